"""What the document of a router says of `/v1/router/replicas`, where replicas register.

Owns these operations and the schemas of their bodies and answers. Must not know how they are answered
(member_pages.py), nor what else the document has (documents.py).
"""

from __future__ import annotations

from typing import Any

from pageturner.http.json_schemas import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    array,
    nullable,
    of_struct,
    record,
)
from pageturner.router.member_pages import PATH, Registration
from pageturner.server.api.base.call import ServedModel
from pageturner.server.api.openapi import openapi_answers
from pageturner.server.api.openapi.openapi import body_name, header_components, operation_object
from pageturner.server.api.openapi.openapi_operations import ApiOperation

_GROUP, _KEY = "Replicas of the router", "RegisterKey"


def registration(_: ServedModel | None = None) -> dict[str, Any]:
    """The body of POST and DELETE."""
    return record(of_struct(Registration), "url", additionalProperties=False)


OPERATIONS = (
    ApiOperation(
        "GET", PATH, "All replicas of the router", _GROUP, answer="RouterReplicas", errors=(404,)
    ),
    ApiOperation(
        "POST",
        PATH,
        "Register a replica, or say that it is still there",
        _GROUP,
        registration,
        "RegisteredReplica",
        errors=(404, 429),
    ),
    ApiOperation(
        "DELETE",
        PATH,
        "Take out a replica that registered",
        _GROUP,
        registration,
        "UnregisteredReplica",
        errors=(404,),
    ),
)


def described() -> dict[str, dict[str, Any]]:
    """Each method of the path, by its name."""
    return {
        one.method.lower(): operation_object(one, keyed=False) | {"security": [{_KEY: []}]}
        for one in OPERATIONS
    }


def components() -> dict[str, dict[str, Any]]:
    """All that these operations name."""
    replica = {
        "url": STRING,
        "models": array(STRING),
        "healthy": BOOLEAN,
        "open": INTEGER,
        "predicted_tokens": INTEGER,
        "aside": BOOLEAN,
        "expires_in": nullable(NUMBER),
    }
    replicas = {"object": STRING, "data": array(record(replica, *replica))}
    registered, gone = {"url": STRING, "expires_in": NUMBER}, {"url": STRING, "deleted": BOOLEAN}
    schemas = {
        body_name(registration): registration(),
        "RouterReplicas": record(replicas, *replicas),
        "RegisteredReplica": record(registered, *registered),
        "UnregisteredReplica": record(gone, *gone),
        "Error": openapi_answers.components()["Error"],
    }
    schemes = {
        _KEY: {"type": "http", "scheme": "bearer", "description": "The key of --register-key."}
    }
    return {"schemas": schemas, **header_components(), "securitySchemes": schemes}
