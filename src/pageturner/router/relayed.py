"""Which requests a router passes on to a replica, and by what it tells how their prompts begin.

Owns the list of paths. Must not know how a request is passed on.
"""

from __future__ import annotations

from collections.abc import Callable

from pageturner.router.prefix_digest import prefix_digests

DigestPrefix = Callable[[bytes, bytes], tuple[bytes, ...]]  # (body, key): digests of its beginning


def no_prefix(body: bytes, authorization: bytes) -> tuple[bytes, ...]:
    """For requests whose prompts are not told apart by their beginnings."""
    return ()


# what begins as its earlier requests began goes where those went
_BY_PREFIX = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)
_ANYWHERE = (
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/infill",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/tokenize",
    "/detokenize",
)
_PAGES = ("/api/version", "/v1/models/{id:path}")  # the lists of models: model_lists.py
RELAYED: tuple[tuple[str, str, DigestPrefix], ...] = (
    *(("POST", path, prefix_digests) for path in _BY_PREFIX),
    *(("POST", path, no_prefix) for path in _ANYWHERE),
    *(("GET", path, no_prefix) for path in _PAGES),
)
