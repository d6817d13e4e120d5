"""File calls of the fake platform, over memory."""

from __future__ import annotations

import io
import tarfile
import time
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from aiohttp import web

from opendsec.api.errors import Conflict, InvalidArgument, NotFound
from opendsec.testing._state import FakeSandbox, Node


def raw_query(request: web.Request) -> dict[str, bytes]:
    """Return the query with values as bytes, since names of files are no text."""
    raw = request.rel_url.raw_query_string
    pairs = (part.partition("=") for part in raw.split("&") if part)
    return {name: unquote_to_bytes(value.replace("+", " ")) for name, _, value in pairs}


def path_of(query: dict[str, bytes], name: str = "path") -> bytes:
    """Return a path of the query without its slash at the end."""
    path = query.get(name, b"")
    if not path.startswith(b"/"):
        raise InvalidArgument(f"{name} must be absolute", field=name)
    return path.rstrip(b"/") or b"/"


def flag(query: dict[str, bytes], name: str) -> bool:
    """Return a boolean of the query."""
    return query.get(name) == b"true"


def find(box: FakeSandbox, path: bytes) -> Node:
    """Return what is at a path."""
    node = box.files.get(path)
    if node is None:
        raise NotFound(f"{path.decode('utf-8', 'replace')}: no such file or directory", path=repr(path))
    return node


def make_parents(box: FakeSandbox, path: bytes, *, make: bool) -> None:
    """Check, or make, the directories above a path."""
    above = path.rpartition(b"/")[0] or b"/"
    if above in box.files:
        if box.files[above].kind != "directory":
            raise Conflict("not a directory")
        return
    if not make:
        raise NotFound("no such directory", path=repr(above))
    make_parents(box, above, make=True)
    box.files[above] = Node(kind="directory", mode=0o755)


async def read(box: FakeSandbox, request: web.Request) -> web.Response:
    """GET files."""
    query = raw_query(request)
    node = find(box, path_of(query))
    if node.kind == "directory":
        raise InvalidArgument("is a directory")
    start = int(query.get("offset", b"0"))
    length = int(query["length"]) if "length" in query else None
    data = node.data[start:] if length is None else node.data[start : start + length]
    return web.Response(body=data, content_type="application/octet-stream")


async def write(box: FakeSandbox, request: web.Request) -> web.Response:
    """PUT files; nothing changes before all has come."""
    query = raw_query(request)
    path = path_of(query)
    make_parents(box, path, make=flag(query, "parents"))
    old = box.files.get(path)
    if old is not None and old.kind == "directory":
        raise Conflict("is a directory")
    data = await request.read()
    before = old.data if old is not None else b""
    if flag(query, "append"):
        data = before + data
    elif "offset" in query:
        at = int(query["offset"])
        data = before[:at].ljust(at, b"\0") + data + before[at + len(data) :]
    mode = int(query["mode"], 8) if "mode" in query else old.mode if old is not None else 0o644
    box.files[path] = Node(kind="file", data=data, mode=mode, mtime=time.time())
    return web.json_response({"size": len(data)})


async def stat(box: FakeSandbox, request: web.Request) -> web.Response:
    """GET files/stat."""
    path = path_of(raw_query(request))
    return web.Response(body=msgspec.json.encode(find(box, path).info(path)), content_type="application/json")


async def list_directory(box: FakeSandbox, request: web.Request) -> web.Response:
    """GET files/list."""
    query = raw_query(request)
    path = path_of(query)
    if find(box, path).kind != "directory":
        raise InvalidArgument("not a directory")
    prefix = path.rstrip(b"/") + b"/"
    names = sorted(name for name in box.files if name.startswith(prefix) and name != b"/")
    if not flag(query, "recursive"):
        names = [name for name in names if b"/" not in name[len(prefix) :]]
    lines = [msgspec.json.encode(box.files[name].info(name)) + b"\n" for name in names]
    return web.Response(body=b"".join(lines), content_type="application/x-ndjson")


async def remove(box: FakeSandbox, request: web.Request) -> web.Response:
    """DELETE files."""
    query = raw_query(request)
    path = path_of(query)
    find(box, path)
    below = [name for name in box.files if name.startswith(path.rstrip(b"/") + b"/")]
    if below and not flag(query, "recursive"):
        raise Conflict("the directory is not empty")
    for name in (*below, path):
        del box.files[name]
    return web.Response(status=204)


async def mkdir(box: FakeSandbox, request: web.Request) -> web.Response:
    """POST files/mkdir."""
    query = raw_query(request)
    path, parents = path_of(query), flag(query, "parents")
    if path in box.files and not (parents and box.files[path].kind == "directory"):
        raise Conflict("it exists already")
    make_parents(box, path, make=parents)
    box.files.setdefault(path, Node(kind="directory", mode=int(query.get("mode", b"755"), 8)))
    return web.Response(status=204)


async def move(box: FakeSandbox, request: web.Request) -> web.Response:
    """POST files/move."""
    query = raw_query(request)
    source, target = path_of(query, "source"), path_of(query, "target")
    find(box, source)
    for name in [name for name in box.files if name == source or name.startswith(source + b"/")]:
        box.files[target + name[len(source) :]] = box.files.pop(name)
    return web.Response(status=204)


async def archive_out(box: FakeSandbox, request: web.Request) -> web.Response:
    """GET archive."""
    path = path_of(raw_query(request))
    prefix = path.rstrip(b"/") + b"/"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name in sorted(box.files):
            if not name.startswith(prefix) or name == b"/":
                continue
            node = box.files[name]
            member = tarfile.TarInfo(name[len(prefix) :].decode("utf-8", "surrogateescape"))
            member.mode, member.mtime = node.mode, int(node.mtime)
            if node.kind == "directory":
                member.type = tarfile.DIRTYPE
            elif node.kind == "symlink":
                member.type, member.linkname = tarfile.SYMTYPE, node.target or ""
            else:
                member.size = len(node.data)
            tar.addfile(member, io.BytesIO(node.data) if node.kind == "file" else None)
    return web.Response(body=buffer.getvalue(), content_type="application/x-tar")


async def archive_in(box: FakeSandbox, request: web.Request) -> web.Response:
    """PUT archive."""
    path = path_of(raw_query(request))
    if find(box, path).kind != "directory":
        raise InvalidArgument("not a directory")
    with tarfile.open(fileobj=io.BytesIO(await request.read()), errors="surrogateescape") as tar:
        for member in tar:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if ".." in parts or member.name.startswith("/"):
                raise InvalidArgument("a member would leave the directory")
            name = path.rstrip(b"/") + b"/" + "/".join(parts).encode("utf-8", "surrogateescape")
            name = name.rstrip(b"/") or b"/"
            make_parents(box, name, make=True)
            file = tar.extractfile(member) if member.isreg() or member.islnk() else None
            box.files[name] = Node(
                kind="directory" if member.isdir() else "symlink" if member.issym() else "file",
                data=file.read() if file is not None else b"",
                mode=member.mode,
                target=member.linkname if member.issym() else None,
                mtime=float(member.mtime),
            )
    return web.Response(status=204)


def text_query(request: web.Request) -> list[tuple[str, str]]:
    """Return the query as pairs of text."""
    return parse_qsl(request.rel_url.raw_query_string)
