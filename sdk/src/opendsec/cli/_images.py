"""``image import|ls|rm|tag`` and ``node ls|drain|undrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from opendsec import DSecClient, Image, ImageConfig, Node
from opendsec._images import Variant, check_kind
from opendsec.cli._output import age, print_json, print_table, progress, size
from opendsec.cli._session import Json, key_values, run_client

_Reference = Annotated[str, typer.Argument(metavar="REF", help="Reference, name:tag.")]
_NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of a node.")]
image_app = typer.Typer(help="Images and their layers.", no_args_is_help=True)
node_app = typer.Typer(help="Nodes of the platform.", no_args_is_help=True)


@image_app.command("import")
def import_(
    *,
    reference: _Reference,
    folder: Annotated[Path | None, typer.Option(help="Root folder on this machine.")] = None,
    tar: Annotated[Path | None, typer.Option(help="Tar on this machine (plain, gzip, zstd).")] = None,
    debian: Annotated[str | None, typer.Option(metavar="SUITE", help="Debian suite; the node builds it.")] = None,
    packages: Annotated[str, typer.Option(metavar="A,B", help="Debian packages, separated by commas.")] = "",
    variant: Annotated[str, typer.Option(help="minbase, apt, essential or important.")] = "minbase",
    kind: Annotated[str, typer.Option(help="base, workspace or toolkit.")] = "base",
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Of commands.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User of commands.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Directory of commands.")] = None,
    json: Json = False,
) -> None:
    """Make a layer from a folder, a tar or a Debian suite, and give it a name."""
    if sum(source is not None for source in (folder, tar, debian)) != 1:
        raise typer.BadParameter("give exactly one of --folder, --tar, --debian", param_hint="--folder")
    if variant not in get_args(Variant):
        raise typer.BadParameter(f"{variant!r} is none of {', '.join(get_args(Variant))}", param_hint="--variant")
    environment = key_values(env or [], "--env")
    config = None
    if environment or user or workdir:
        config = ImageConfig(env=environment, user=user, workdir=workdir)

    async def work(client: DSecClient) -> None:
        what = check_kind(kind)
        images = client.images
        with progress() as steps:
            if folder is not None:
                image = await images.import_folder(folder, reference, kind=what, config=config, on_progress=steps)
            elif tar is not None:
                image = await images.import_tar(tar, reference, kind=what, config=config, on_progress=steps)
            else:
                image = await images.import_debian(
                    reference,
                    suite=debian or "",
                    packages=[name for name in packages.split(",") if name],
                    variant=variant,  # type: ignore[arg-type]
                    kind=what,
                    config=config,
                    on_progress=steps,
                )
        _print_image(image, as_json=json)

    run_client(work, as_json=json)


@image_app.command("ls")
def image_ls(json: Json = False) -> None:
    """List images."""

    async def work(client: DSecClient) -> None:
        images = await client.images.list()
        if json:
            print_json(images)
            return
        rows = [
            [one.reference, one.layer.kind, size(one.layer.size), age(one.layer.created_at), one.layer.digest[:19]]
            for one in images
        ]
        print_table(["REFERENCE", "KIND", "SIZE", "AGE", "DIGEST"], rows)

    run_client(work, as_json=json)


@image_app.command("rm")
def image_rm(
    references: Annotated[list[str], typer.Argument(metavar="REF...", help="References.")], json: Json = False
) -> None:
    """Remove tags; layers in use stay until nothing uses them."""

    async def work(client: DSecClient) -> None:
        for reference in references:
            await client.images.remove(reference)
        if json:
            print_json({"removed": references})

    run_client(work, as_json=json)


@image_app.command("tag")
def image_tag(
    source: Annotated[str, typer.Argument(metavar="REF", help="Reference or digest.")],
    target: Annotated[str, typer.Argument(metavar="NEW", help="New reference.")],
    json: Json = False,
) -> None:
    """Let a new reference point to what another one points to."""

    async def work(client: DSecClient) -> None:
        _print_image(await client.images.tag(source, target), as_json=json)

    run_client(work, as_json=json)


def _print_image(image: Image, *, as_json: bool) -> None:
    if as_json:
        print_json(image)
    else:
        print(f"{image.reference}  {image.layer.digest}  {size(image.layer.size)}")


@node_app.command("ls")
def node_ls(json: Json = False) -> None:
    """List nodes and their load."""

    async def work(client: DSecClient) -> None:
        nodes = await client.nodes.list()
        if json:
            print_json(nodes)
            return
        rows = [
            [
                node.id,
                node.state,
                str(node.sandboxes),
                f"{size(node.memory_available_bytes)} of {size(node.memory_total_bytes)}",
                str(node.cpu_count),
                size(node.disk_free_bytes),
                node.version,
            ]
            for node in nodes
        ]
        print_table(["NODE", "STATE", "SANDBOXES", "MEMORY FREE", "CPUS", "DISK FREE", "VERSION"], rows)

    run_client(work, as_json=json)


@node_app.command("drain")
def node_drain(node: _NodeId, json: Json = False) -> None:
    """Let a node take no new sandboxes; those it has go on."""

    async def work(client: DSecClient) -> None:
        _print_node(await client.nodes.drain(node), as_json=json)

    run_client(work, as_json=json)


@node_app.command("undrain")
def node_undrain(node: _NodeId, json: Json = False) -> None:
    """Let a node take new sandboxes again."""

    async def work(client: DSecClient) -> None:
        _print_node(await client.nodes.undrain(node), as_json=json)

    run_client(work, as_json=json)


def _print_node(node: Node, *, as_json: bool) -> None:
    if as_json:
        print_json(node)
    else:
        print(f"{node.id}  {node.state}  {node.sandboxes} sandboxes")
