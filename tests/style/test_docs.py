"""Documents name only what exists, and lead to everything that exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
)
#: First parts of paths in this repository; only what begins with one of them is taken for a path.
TOP = {
    "sdk",
    "server",
    "crates",
    "openapi",
    "tests",
    "benchmarks",
    "deploy",
    "docs",
    "examples",
    "changes",
    "scripts",
    ".ci",
}
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Return a document without its fenced blocks."""
    return FENCE.sub("", text)


def paths_named(text: str) -> set[str]:
    """Return what the inline code of a document names as paths of this repository."""
    found = set()
    for code in CODE.findall(prose(text)):
        word = code.split("::")[0].rstrip("/")
        if re.fullmatch(r"[\w./*-]+", word) and "/" in word and word.split("/")[0] in TOP:
            found.add(word)
    return found


def commands_named(text: str) -> set[str]:
    """Return the ``make`` and ``opendsec`` calls of a document."""
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()] + CODE.findall(prose(text))
    return {line.strip() for line in lines if re.match(r"(make|opendsec)\s+[a-z]", line.strip())}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_named_in_documents_exist(document: Path) -> None:
    """Inline paths and relative links lead somewhere."""
    text = document.read_text()
    missing = {word for word in paths_named(text) if not list(ROOT.glob(word))}
    missing |= {
        target for target, _ in LINK.findall(text) if "://" not in target and not (document.parent / target).exists()
    }
    assert missing == set()


def command_names() -> set[str]:
    """Return the commands of the command line, with sub-commands as ``group name``."""
    from typer.main import get_command

    from opendsec.cli._app import build

    root = get_command(build([]))
    names = set()
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        names.add(name)
        names |= {f"{name} {sub}" for sub in getattr(command, "commands", {})}
    return names


def test_commands_named_in_documents_exist() -> None:
    """Every ``make`` target and ``opendsec`` command of the documents can be called."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = command_names()
    groups = {name.split()[0] for name in known if " " in name}
    unknown = set()
    for document in DOCUMENTS:
        for call in commands_named(document.read_text()):
            words = call.split()
            if words[0] == "make":
                unknown |= {
                    f"make {word}" for word in words[1:2] if word not in targets and not word.startswith("build/")
                }
            else:
                name = " ".join(words[1:3]) if words[1] in groups and len(words) > 2 else words[1]
                unknown |= {call} if name not in known else set()
    assert unknown == set()


def test_every_package_is_reachable_from_the_architecture_page() -> None:
    """A reader finds each package and crate by name."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {path.parent.name for path in (ROOT / "server/src/opendsec_server").glob("*/__init__.py")}
    packages |= {path.parent.name for path in (ROOT / "sdk/src/opendsec").glob("*/__init__.py")}
    packages |= {tomllib.loads(path.read_text())["package"]["name"] for path in (ROOT / "crates").glob("*/Cargo.toml")}
    assert {name for name in packages if not re.search(rf"[`/ ]{re.escape(name)}[`/ ]", text)} == set()


def test_every_promised_number_links_its_proof_or_says_that_it_has_none() -> None:
    """Each row of the tables in SPECIFICATION.md names an existing test or benchmark, or ``not yet proven``."""
    rows = [
        line
        for line in (ROOT / "SPECIFICATION.md").read_text().splitlines()
        if line.startswith("|") and not re.match(r"\|\s*(-|what|limit)", line)
    ]
    assert len(rows) >= 10
    unproven = []
    for row in rows:
        proof = row.strip("| ").split("|")[-1]
        links = [target for target, _ in LINK.findall(proof)]
        proven = bool(links) and all((ROOT / target).is_file() for target in links)
        if not proven and "not yet proven" not in proof:
            unproven.append(row)
    assert unproven == []


def test_every_guard_named_in_the_threat_model_exists() -> None:
    """Each row names tests as ``file::function``, or says that there is none yet."""
    text = (ROOT / "THREAT_MODEL.md").read_text()
    named = re.findall(r"`((?:tests|server/tests|sdk/tests|crates)/[\w/.-]+)::(\w+)`", text)
    assert named
    missing = {
        f"{file}::{function}"
        for file, function in named
        if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text().replace("fn ", "def ")
    }
    assert missing == set()


def test_what_installs_names_no_address() -> None:
    """Where packages come from is the machine's business; the lock holds hashes only."""
    places = ["requirements.lock", "Makefile", ".ci", "scripts", "examples/demo", ":(glob)**/pyproject.toml"]
    listed = subprocess.run(["git", "ls-files", "-z", "--", *places], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / raw.decode() for raw in listed.split(b"\0") if raw]
    assert ROOT / "requirements.lock" in files
    guilty = [path.name for path in files if path.is_file() and re.search(r"https?://", path.read_text())]
    assert guilty == []
