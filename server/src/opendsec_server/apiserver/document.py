"""The OpenAPI document of the apiserver: its own handlers, and of the edge's document everything it forwards.

apiserver and edge meet in ``openapi/edge.json``, which is generated from the edge and checked in. An installation
without the checkout asks a running edge for its document.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig

from opendsec_server.apiserver.http import DOCUMENTED

_CHECKED_IN = Path(__file__).parents[4] / "openapi" / "edge.json"
_FORWARDED = re.compile(r"/v1/(sandboxes/\{|images)")
_METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")


def document(edge: dict[str, Any]) -> dict[str, Any]:
    """Return the document of the apiserver, given the edge's."""
    config = OpenAPIConfig(title="OpenDSec", version="v1")
    # Handlers get the service from the program; without a provider it would pass for a query parameter.
    nothing = {"service": Provide(lambda: None, sync_to_thread=False)}
    app = Litestar(route_handlers=list(DOCUMENTED), dependencies=nothing, openapi_config=config)
    own: dict[str, Any] = app.openapi_schema.to_schema()
    paths: dict[str, Any] = dict(own.get("paths", {}))
    for path, item in edge.get("paths", {}).items():
        if _FORWARDED.match(path):
            paths.setdefault(path, item)
    schemas = {**edge.get("components", {}).get("schemas", {}), **own.get("components", {}).get("schemas", {})}
    for path, item in paths.items():
        if path == "/healthz":
            for method in _METHODS:
                if method in item:
                    item[method]["security"] = []
    own["paths"] = dict(sorted(paths.items()))
    own["components"] = {
        "schemas": dict(sorted(schemas.items())),
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "bearerFormat": "ods_…"}},
    }
    own["security"] = [{"key": []}]
    own["servers"] = [{"url": "/"}]
    return own


def render(value: dict[str, Any]) -> bytes:
    """Return a document as it is checked in: indented JSON with sorted keys and a final newline."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def shipped() -> dict[str, Any]:
    """Return the checked-in document of the edge, or an empty one outside of a checkout."""
    if not _CHECKED_IN.exists():
        return {}
    loaded: dict[str, Any] = msgspec.json.decode(_CHECKED_IN.read_bytes())
    return loaded
