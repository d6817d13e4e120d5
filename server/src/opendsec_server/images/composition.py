"""How a base, a workspace and toolkits become one environment: what may be stacked, and whose config wins.

Pure: no I/O, so the hot path of a create and the in-memory store share it. The rules, lowest layer first
(base < workspace < toolkits in the order given):

* **env**: a name set by an upper layer replaces the lower one's, except ``PATH``: the entries of each upper layer
  are put in front of what is below, each entry once. A literal ``$PATH`` or ``${PATH}`` entry is dropped.
* **PATH** is never unset: a base without one gets ``DEFAULT_PATH``, as ``docker exec`` has it.
* **user** and **workdir**: the topmost that is set wins, but toolkits never change them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from opendsec.api.errors import InvalidArgument, UnsupportedCapability
from opendsec.api.models import Image, ImageConfig, Layer
from opendsec_server.core.validate import check_env
from opendsec_server.images.interface import Environment

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Config of a base that comes without one.
DEFAULT_BASE_CONFIG = ImageConfig(env={"PATH": DEFAULT_PATH}, user="root", workdir="/")
#: Most layers of an environment: their mount points must fit into one page of overlay options.
MAX_LAYERS = 14
#: Architectures a machine runs beside its own.
_RUNS_TOO = {"x86_64": {"i686"}, "aarch64": {"armv7l"}}


def compose_layers(
    base: Image, workspace: Image | None, toolkits: Sequence[Image], *, machine: str | None = None
) -> Environment:
    """Check and merge resolved layers.

    Args:
        base: the base image.
        workspace: the workspace, if any.
        toolkits: the toolkits, each above the one before.
        machine: architecture of this node as ``uname -m`` has it; this machine's if absent.

    Raises:
        InvalidArgument: a layer of the wrong kind, the same layer twice, layers of different architectures, or too
            many layers; the message names the reference.
        UnsupportedCapability: the layers are for another architecture than this node's.
    """
    _check_kind(base, "base")
    if workspace is not None:
        _check_kind(workspace, "workspace")
    for toolkit in toolkits:
        _check_kind(toolkit, "toolkit")
    images = [base, *([workspace] if workspace is not None else []), *toolkits]
    if len(images) > MAX_LAYERS:
        raise InvalidArgument(f"{len(images)} layers are more than the {MAX_LAYERS} that can be stacked")
    _check_once(images)
    _check_architecture(images, machine or os.uname().machine)
    return Environment(
        layers=tuple(image.layer for image in images),
        config=merge_configs([image.layer for image in images]),
    )


def _check_kind(image: Image, wanted: str) -> None:
    kind = image.layer.kind
    if kind != wanted:
        raise InvalidArgument(
            f"{image.reference} is a {kind} layer and cannot serve as {wanted}", reference=image.reference, kind=kind
        )


def _check_once(images: Sequence[Image]) -> None:
    seen: dict[str, str] = {}
    for image in images:
        first = seen.get(image.layer.digest)
        if first is not None:
            raise InvalidArgument(f"{image.reference} is the same layer as {first}: each can be stacked once")
        seen[image.layer.digest] = image.reference


def _check_architecture(images: Sequence[Image], machine: str) -> None:
    known = [image for image in images if image.layer.architecture is not None]
    for image in known[1:]:
        if image.layer.architecture != known[0].layer.architecture:
            raise InvalidArgument(
                f"{image.reference} is for {image.layer.architecture}, "
                f"but {known[0].reference} is for {known[0].layer.architecture}"
            )
    for image in known[:1]:
        architecture = image.layer.architecture
        if architecture != machine and architecture not in _RUNS_TOO.get(machine, ()):
            raise UnsupportedCapability(f"{image.reference} is for {architecture}, but this node is {machine}")


def merge_configs(layers: Sequence[Layer]) -> ImageConfig:
    """Merge the configs of layers, base first, by the rules of this module."""
    env: dict[str, str] = {}
    path = DEFAULT_PATH
    user = workdir = None
    for index, layer in enumerate(layers):
        config = layer.config
        env.update(config.env)
        own = config.env.get("PATH")
        if own is not None:
            path = own if index == 0 else merge_path(own, path)
        if layer.kind != "toolkit":
            user = config.user if config.user is not None else user
            workdir = config.workdir if config.workdir is not None else workdir
    env["PATH"] = path
    return ImageConfig(env=env, user=user, workdir=workdir)


def check_config(config: ImageConfig) -> None:
    """Check the config of a layer.

    Raises:
        InvalidArgument: an impossible variable name, user or working directory.
    """
    check_env(config.env)
    user, workdir = config.user, config.workdir
    if user is not None and (not user or len(user) > 256 or any(char in user for char in "\0\n/")):
        raise InvalidArgument("user must be a name or an id, with :group if wanted", field="config.user")
    if workdir is not None and (not workdir.startswith("/") or "\0" in workdir):
        raise InvalidArgument("workdir must be an absolute path", field="config.workdir")


def merge_path(upper: str, lower: str) -> str:
    """Put the entries of ``upper`` in front of those of ``lower``, each once; empty entries are dropped."""
    entries = [entry for entry in f"{upper}:{lower}".split(":") if entry and entry not in {"$PATH", "${PATH}"}]
    return ":".join(dict.fromkeys(entries))
