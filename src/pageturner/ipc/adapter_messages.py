"""Messages of the two processes about LoRA adapters.

Ground floor: both import it. Which request wants which adapter stands in the request, by the digest
of the adapter's content.
"""

from __future__ import annotations

import msgspec


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """API to engine: from here on there is an adapter of this name. Answered by AdapterLoaded, but
    not where the digest of its content is known already: then it was there before, and is read when
    it is wanted. Without a name it is there for requests that an engine process before this one
    had.

    number  which loading it is: the answer has it too, for a name may be given again
    """

    name: str
    path: str
    digest: str = ""
    number: int = 0


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """API to engine: nobody will ask for this name any more. Who has it goes on with it."""

    name: str


class AdaptersInMemory(msgspec.Struct, tag=True, frozen=True):
    """Engine to API: which adapters are in memory now, by their digests, when that has changed. At
    most as many as `--max-loras` says."""

    digests: list[str]


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """Engine to API, in answer to LoadAdapter. With a code it could not be loaded, and the message
    says why.

    digest  of its content
    nbytes  that it takes in memory
    base    the model that it says it was trained on
    """

    name: str
    number: int = 0
    digest: str = ""
    nbytes: int = 0
    rank: int = 0
    base: str = ""
    code: str = ""
    message: str = ""
