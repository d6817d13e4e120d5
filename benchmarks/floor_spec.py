"""What the floor takes from the platform: the same layer, and the same walls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opendsec.api.models import ImageConfig, Limits
from opendsec_server import tools
from opendsec_server.backends.container.oci import OciConfig
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.images.store import LocalImageStore
from opendsec_server.testing.local import LocalServer


def layer_file(local: LocalServer, digest: str) -> Path:
    """Return the EROFS image of a layer of the server."""
    return LocalImageStore(local.config.data).layer_path(digest)


def oci_spec(local: LocalServer) -> dict[str, Any]:
    """Return the OCI configuration of a sandbox without limits, as the backend would write it."""
    builder = OciConfig(
        root=Path("rootfs"), tools=tools.locate(local.config), cgroup_parent="opendsec-floor", limit_swap=False
    )
    spec = SandboxSpec(
        id="floor",
        backend="container",
        runtime="runc",
        layers=(),
        config=ImageConfig(),
        limits=Limits(),
        hostname="floor",
    )
    rendered: dict[str, Any] = json.loads(builder.render(spec))
    return rendered
