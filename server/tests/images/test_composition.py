"""What may be stacked, and whose config wins."""

from __future__ import annotations

import pytest

from opendsec.api.errors import InvalidArgument, UnsupportedCapability
from opendsec.api.models import Image, ImageConfig, Layer
from opendsec_server.images.composition import DEFAULT_PATH, compose_layers, merge_path


def image(reference: str, kind: str = "base", architecture: str | None = "x86_64", **config) -> Image:
    layer = Layer(
        digest=f"blake3:{reference.encode().hex():0>64}",
        kind=kind,
        size=1,
        created_at=0.0,
        architecture=architecture,
        config=ImageConfig(**config),
    )
    return Image(reference=reference, layer=layer)


def compose(base, workspace=None, toolkits=()):
    return compose_layers(base, workspace, list(toolkits), machine="x86_64")


def test_layers_are_ordered_base_first():
    """Base, workspace, then toolkits as given."""
    made = compose(image("b"), image("w", "workspace"), [image("t1", "toolkit"), image("t2", "toolkit")])
    assert [layer.kind for layer in made.layers] == ["base", "workspace", "toolkit", "toolkit"]
    assert made.layers[2].digest < made.layers[3].digest


def test_upper_env_wins_by_name():
    """A toolkit's variable replaces the workspace's, which replaces the base's."""
    made = compose(
        image("b", env={"A": "b", "B": "b", "C": "b"}),
        image("w", "workspace", env={"B": "w", "C": "w"}),
        [image("t", "toolkit", env={"C": "t", "D": "t"})],
    )
    assert made.config.env == {"A": "b", "B": "w", "C": "t", "D": "t", "PATH": DEFAULT_PATH}


def test_path_entries_of_upper_layers_come_first_and_once():
    """PATH is extended, not replaced."""
    made = compose(
        image("b", env={"PATH": "/usr/bin:/bin"}),
        image("w", "workspace", env={"PATH": "/work/bin:$PATH"}),
        [image("t", "toolkit", env={"PATH": "/opt/t/bin:/bin"})],
    )
    assert made.config.env["PATH"] == "/opt/t/bin:/bin:/work/bin:/usr/bin"


def test_a_base_without_path_gets_the_default():
    """A toolkit's PATH never hides the system's programs."""
    made = compose(image("b"), None, [image("t", "toolkit", env={"PATH": "/opt/t"})])
    assert made.config.env["PATH"] == f"/opt/t:{DEFAULT_PATH}"


def test_empty_path_entries_are_dropped():
    """They would mean the working directory."""
    assert merge_path("/a::${PATH}", ":/b:/a") == "/a:/b"


def test_topmost_user_and_workdir_win_but_toolkits_do_not_change_them():
    """A toolkit is a guest."""
    made = compose(
        image("b", user="root", workdir="/"),
        image("w", "workspace", workdir="/src"),
        [image("t", "toolkit", user="tool", workdir="/tool")],
    )
    assert (made.config.user, made.config.workdir) == ("root", "/src")


@pytest.mark.parametrize(
    ("parts", "culprit"),
    [
        ((image("w", "workspace"), None, ()), "w is a workspace"),
        ((image("t", "toolkit"), None, ()), "t is a toolkit"),
        ((image("b"), image("b2"), ()), "b2 is a base"),
        ((image("b"), None, (image("w", "workspace"),)), "w is a workspace"),
        ((image("b"), None, (image("s", "snapshot"),)), "s is a snapshot"),
        ((image("b"), None, (image("t", "toolkit"), image("t", "toolkit"))), "t is the same layer"),
        ((image("b"), image("w", "workspace", "aarch64"), ()), "w is for aarch64"),
        ((image("b", architecture=None), image("w", "workspace"), (image("t", "toolkit", "s390x"),)), "t is for s390x"),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_name(parts, culprit):
    """The message names the layer."""
    with pytest.raises(InvalidArgument, match=culprit):
        compose(*parts)


def test_layers_for_another_machine_are_unsupported():
    """They could not run here."""
    with pytest.raises(UnsupportedCapability, match="b is for aarch64"):
        compose(image("b", architecture="aarch64"))


@pytest.mark.parametrize("architecture", [None, "x86_64", "i686"])
def test_layers_this_machine_runs_are_fine(architecture):
    """Also its 32-bit sibling, and layers without binaries."""
    compose(image("b", architecture=architecture))


def test_at_most_fourteen_layers():
    """The mount options of the overlay must fit into a page."""
    toolkits = [image(f"t{number:02}", "toolkit") for number in range(13)]
    assert len(compose(image("b"), None, toolkits).layers) == 14
    with pytest.raises(InvalidArgument, match="14"):
        compose(image("b"), image("w", "workspace"), toolkits)
