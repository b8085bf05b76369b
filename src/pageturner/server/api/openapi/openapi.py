"""`/openapi.json`: the API as an OpenAPI 3.1 document, for the model that is served; and `/docs`,
to read it.

Owns how a document is made of the table of operations and the schemas of bodies and answers. Must
not know any operation or field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import pageturner
from pageturner.http.error_responses import SHAPES, TYPES, anthropic_error, ollama_error
from pageturner.http.json_schemas import STRING, Schema, ref
from pageturner.http.web_pages import docs_page
from pageturner.server.admission.service_level import MAX_MS, MAX_PRIORITY
from pageturner.server.api.base import replies
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.openapi.operations import OPERATIONS, PLAIN, ApiOperation
from pageturner.server.api.openapi.request_schemas import (
    data,
    known_schemas,
    request_schemas,
    resolved,
)
from pageturner.server.service import Service

# that any request may meet: of HTTP, of the door, of the server
EVERY_REQUEST = (400, 408, 413, 431, 500, 503)
BEHIND_THE_DOOR = (403, 415)  # those of requests that keys and web pages matter to
AGAIN = (429, 503)  # with Retry-After
_PRIORITY: Schema = {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY - 1}
_MS: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_MS}
_ERROR_SCHEMAS = {anthropic_error: "AnthropicError", ollama_error: "OllamaError"}


def document(
    served: ServedModel, keyed: bool, operations: Sequence[ApiOperation] = OPERATIONS
) -> dict[str, Any]:
    """The whole document. keyed: requests need an API key."""
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, served, keyed)
    schemas, bodies = data(), request_schemas(served)
    components = resolved(schemas["components"], schemas["parts"])
    bodies = {one.body: bodies[one.body] for one in operations if one.body}
    schemes: dict[str, Any] = {"AdminKey": {"type": "http", "scheme": "bearer"}}
    if keyed:
        schemes["ApiKey"] = {"type": "http", "scheme": "bearer"}
        schemes["ApiKeyHeader"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pageturner",
            "version": pageturner.__version__,
            "description": f"The API of this server, for the model {served.model}, whose bounds these are."
            " Other fields are passed over and named in the log, unless they would change an answer or"
            " are a known one misspelt: those are refused. A slash at the end of a path changes nothing."
            " HEAD is answered where GET is.",
        },
        "paths": paths,
        "components": {
            "schemas": {**bodies, **components, **schemas["answers"]},
            "parameters": resolved(
                schemas["parameters"], {"priority": _PRIORITY, "milliseconds": _MS}
            ),
            "headers": schemas["headers"],
            "securitySchemes": schemes,
        },
    }


def _operation(one: ApiOperation, served: ServedModel, keyed: bool) -> dict[str, Any]:
    known = {**known_schemas(served), "text": STRING}
    variables = [
        {"name": name, "in": "path", "required": True, "schema": known[one.variable]}
        for name in re.findall(r"\{(\w+)\}", one.path)
    ]
    made: dict[str, Any] = {"operationId": one.id, "summary": one.summary, "tags": [one.group]}
    if parameters := [*variables, *_headers(one)]:
        made["parameters"] = parameters
    if one.body:
        schema = ref(one.body)
        made["requestBody"] = {"required": True, "content": {one.form: {"schema": schema}}}
    made["responses"] = {"200": _answer(one), **_errors(one, keyed)}
    if one.admin:
        made["security"] = [{"AdminKey": []}]
    elif keyed and not one.open:
        made["security"] = [{"ApiKey": []}, {"ApiKeyHeader": []}]
    return made


def _headers(one: ApiOperation) -> list[dict[str, Any]]:
    names = data()["parameters"] if one.targets else ("X-Request-Id",)
    return [{"$ref": f"#/components/parameters/{name}"} for name in names if not one.open]


def _answer(one: ApiOperation) -> dict[str, Any]:
    made: dict[str, Any] = {"description": one.summary}
    made["headers"] = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    if one.made:
        made["links"] = {
            name: {"operationId": name, "parameters": {"id": "$response.body#/id"}}
            for name in one.made
        }
    json = {"application/json": {"schema": ref(one.answer) if one.answer else {}}}
    if one.media == PLAIN:
        return made
    if one.events:
        # tools differ in what they hold against the schema of a stream: all of it, or each event
        said = {"description": f"Each event or line is a {one.events}.", "x-event": ref(one.events)}
        events = {one.media: {"schema": said}}
        return {**made, "content": {**json, **events}}
    whole = bool(one.body) or one.media == "application/json"
    return {**made, "content": json if whole else {one.media: {"schema": STRING}}}


def _errors(one: ApiOperation, keyed: bool) -> dict[str, Any]:
    statuses = {*EVERY_REQUEST, *one.errors}
    if not one.open:
        statuses |= {*BEHIND_THE_DOOR, *([401] if keyed and not one.admin else [])}
    shape = next(
        (_ERROR_SCHEMAS[shape] for begin, shape in SHAPES if one.path.startswith(begin)), "Error"
    )
    return {str(status): _error(status, shape) for status in sorted(statuses)}


def _error(status: int, shape: str) -> dict[str, Any]:
    made: dict[str, Any] = {"description": TYPES.get(status, "BadRequestError")}
    if status in AGAIN:
        made["headers"] = {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}
    return {**made, "content": {"application/json": {"schema": ref(shape)}}}


# -- pages -----------------------------------------------------------------------------------------
class OpenApiPages:
    """The document of one server, and the page that shows it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._made: tuple[ServedModel, bytes] | None = None

    async def openapi(self, _: HTTPRequest) -> Response:
        """ClientError 503 while the model is loaded: bounds are its own."""
        served = replace(self._service.served(), pinned=0)
        if self._made is None or self._made[0] != served:
            made = document(served, self._service.keys.needed)
            self._made = served, replies.encode(made)
        return Response(self._made[1], media_type="application/json")

    async def docs(self, _: HTTPRequest) -> Response:
        return docs_page()
