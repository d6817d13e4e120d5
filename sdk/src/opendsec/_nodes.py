"""Nodes of the platform."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from opendsec._core import Core
from opendsec.api.models import Node

_Nodes = list[Node]
_nodes = msgspec.json.Decoder(_Nodes)
_node = msgspec.json.Decoder(Node)


class Nodes:
    """Node calls; ``client.nodes``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def list(self) -> _Nodes:
        """Return all nodes with their load."""
        return _nodes.decode(await self._core.transport.call("GET", "/v1/nodes"))

    async def drain(self, node: str) -> Node:
        """Let a node take no new sandboxes; those it has go on.

        Raises:
            NotFound: no such node.
        """
        return _node.decode(await self._core.transport.call("POST", f"/v1/nodes/{quote(node, safe='')}/drain"))

    async def undrain(self, node: str) -> Node:
        """Let a node take new sandboxes again.

        Raises:
            NotFound: no such node.
        """
        return _node.decode(await self._core.transport.call("POST", f"/v1/nodes/{quote(node, safe='')}/undrain"))
