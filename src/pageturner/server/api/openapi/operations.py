"""Every operation of a server: a method, a path, what it takes and what comes back.

Owns the form of an operation; the table is `operations.json`, a line for each route of app.py, and
tests/server/test_openapi.py names the route whose line is missing. Must not know how a document is
made of it (openapi.py), nor schemas (request_schemas.py, schemas.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# statuses that a request for an answer may meet beside those of every request
GENERATED = (404, 409, 429, 504)
EVENTS, PLAIN = "text/event-stream", ""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path.

    route     method and path as its route has them, the path's variables as {name}
    summary   one line
    group     under which the page of the documentation shows it
    body      name of the schema of its body; "": it takes none
    answer    name of the schema of its JSON answer; "": any JSON
    events    name of the schema of an event or line of its stream; "": it does not stream
    media     of its answer: of its stream, where it has one; PLAIN: it has no content
    errors    statuses beside those of every request
    targets   it takes headers that say how urgent it is
    open      it needs no key; admin: it takes the admin key
    variable  name of the schema of the path's variable
    form      its body is of this media type, not JSON
    made      operations whose path has the id of what this one has made
    """

    route: str
    summary: str
    group: str
    body: str = ""
    answer: str = ""
    events: str = ""
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    targets: bool = False
    open: bool = False
    admin: bool = False
    variable: str = "text"
    form: str = "application/json"
    made: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return self.route.split()[0]

    @property
    def path(self) -> str:
        return self.route.split()[1]

    @property
    def id(self) -> str:
        """The operation's name in the document."""
        words = self.path.replace("{", "by_").replace("}", "").strip("/").replace("/", "_")
        return f"{self.method.lower()}_{words}"


def _operation(generates: bool = False, **fields: Any) -> ApiOperation:
    """An operation of the table. generates: it answers as all operations do that generate text or
    rows."""
    usual: dict[str, Any] = {}
    if generates:
        usual = {"media": EVENTS, "errors": GENERATED, "targets": True}
    return ApiOperation(**usual | fields)


OPERATIONS = tuple(
    _operation(**fields)
    for fields in json.loads(Path(__file__).with_name("operations.json").read_bytes())
)
