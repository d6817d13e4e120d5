"""Checks of requests that types cannot express; shared by apiserver and edge, so that both refuse alike."""

from __future__ import annotations

from opendsec.api import ids
from opendsec.api.errors import InvalidArgument, UnsupportedCapability
from opendsec.api.models import CreateSandbox

#: Most labels of a sandbox, and characters of a key and of a value.
MAX_LABELS, MAX_LABEL_KEY, MAX_LABEL_VALUE = 64, 128, 1024
#: Most bytes of all environment names and values together (Linux allows a quarter of the stack, 2 MiB).
MAX_ENV_BYTES = 1024 * 1024
#: Most toolkit layers (overlayfs takes 500 lower layers; a page of mount options fewer).
MAX_TOOLKITS = 12


def check_create(request: CreateSandbox) -> None:
    """Check a create.

    Raises:
        InvalidArgument: a field is malformed; ``detail["field"]`` names it.
        UnsupportedCapability: a network rule opens something, which nothing can enforce yet.
    """
    _check_references(request)
    check_network_rules(request.network_rules)
    check_labels(request.labels)
    check_env(request.env)
    if request.job is not None:
        ids.check_name("job", request.job)
    if request.workdir is not None and (not request.workdir.startswith("/") or "\0" in request.workdir):
        raise InvalidArgument("workdir must be an absolute path", field="workdir")
    user = request.init_user
    if user is not None and (not user or len(user) > 256 or any(char in user for char in "\0\n/")):
        raise InvalidArgument("init_user must be a name or an id, with :group if wanted", field="init_user")
    if request.request_id is not None and not request.request_id.isprintable():
        raise InvalidArgument("request_id must be printable", field="request_id")


def _check_references(request: CreateSandbox) -> None:
    ids.parse_reference(request.container_image)
    if request.workspace is not None:
        ids.parse_reference(request.workspace)
    if len(request.toolkits) > MAX_TOOLKITS:
        raise InvalidArgument(f"at most {MAX_TOOLKITS} toolkits can be stacked", field="toolkits")
    for toolkit in request.toolkits:
        ids.parse_reference(toolkit)


def check_network_rules(rules: dict[str, bool]) -> None:
    """Refuse rules that open something: until the egress gateway exists, ``False`` is all that can be enforced.

    Raises:
        UnsupportedCapability: a rule is ``True``.
    """
    wanted = sorted(name for name, allowed in rules.items() if allowed)
    if wanted:
        raise UnsupportedCapability(
            f"network rule {wanted[0]!r}: this installation has no egress gateway, so nothing can be opened",
            field="network_rules",
            rules=wanted[:20],
        )


def check_labels(labels: dict[str, str]) -> None:
    """Check labels.

    Raises:
        InvalidArgument: too many, too long, or a key that the list filter ``label=key=value`` could not name.
    """
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"at most {MAX_LABELS} labels are allowed", field="labels")
    for key, value in labels.items():
        if not key or "=" in key or len(key) > MAX_LABEL_KEY:
            raise InvalidArgument(
                f"label key {key[:80]!r} must have 1 to {MAX_LABEL_KEY} characters without '='", field="labels"
            )
        if len(value) > MAX_LABEL_VALUE:
            raise InvalidArgument(f"label {key!r} is longer than {MAX_LABEL_VALUE} characters", field="labels")


def check_env(env: dict[str, str]) -> None:
    """Check environment variables.

    Raises:
        InvalidArgument: an empty name, ``=`` in a name, NUL anywhere, or too many bytes.
    """
    total = 0
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidArgument(f"environment variable {name[:80]!r} is malformed", field="env")
        total += len(name) + len(value) + 2
    if total > MAX_ENV_BYTES:
        raise InvalidArgument(f"the environment is larger than {MAX_ENV_BYTES} bytes", field="env")
