"""The edge's HTTP API for images: imports answer with lines of progress, the last holds the image or the error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
import structlog
from litestar import Request, Response, delete, get, post, put
from litestar.handlers import BaseRouteHandler
from litestar.status_codes import HTTP_200_OK, HTTP_204_NO_CONTENT

from opendsec.api import ids, models
from opendsec.api.errors import Internal, InvalidArgument, PlatformError
from opendsec_server.edge.service import EdgeService
from opendsec_server.images.interface import ProgressReport
from opendsec_server.platform.http import NDJSON, StreamAnswer

_log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode
_END = object()


async def progress_lines(work: Callable[[ProgressReport], Awaitable[models.Image]]) -> AsyncGenerator[bytes, None]:
    """Do the work and yield its progress; a client that leaves cancels it."""
    reports: asyncio.Queue[models.Progress | object] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def report(message: str, fraction: float | None) -> None:
        loop.call_soon_threadsafe(reports.put_nowait, models.Progress(message=message, fraction=fraction))

    async def run() -> models.Image:
        try:
            return await work(report)
        finally:
            loop.call_soon(reports.put_nowait, _END)

    task = asyncio.create_task(run())
    try:
        while (one := await reports.get()) is not _END:
            yield _encode(one) + b"\n"
        try:
            last = models.Progress(message="done", fraction=1.0, image=await task)
        except PlatformError as error:
            last = models.Progress(message="failed", error=msgspec.to_builtins(error.body()))
        except Exception:
            _log.exception("import_failed")
            last = models.Progress(message="failed", error=msgspec.to_builtins(Internal("the import failed").body()))
        yield _encode(last) + b"\n"
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


@get("/v1/images", tags=["images"])
async def list_images(service: EdgeService) -> list[models.Image]:
    """List all tags."""
    return service.images.list()


@get("/v1/images/resolve", tags=["images"])
async def resolve_image(service: EdgeService, reference: str) -> models.Image:
    """Return what a reference points to."""
    return service.images.resolve(reference)


@delete("/v1/images", status_code=HTTP_204_NO_CONTENT, tags=["images"])
async def remove_image(service: EdgeService, reference: str) -> None:
    """Remove a tag, and its layer when nothing needs it any more."""
    await asyncio.to_thread(service.images.remove, reference, in_use=service.layer_in_use)


@post("/v1/images/tag", status_code=HTTP_200_OK, tags=["images"])
async def tag_image(data: models.TagImage, service: EdgeService) -> models.Image:
    """Point a reference at what another one points to."""
    return await asyncio.to_thread(service.images.tag, data.source, data.target)


@post("/v1/images", status_code=HTTP_200_OK, tags=["images"])
async def import_image(data: models.ImportImage, service: EdgeService) -> Response[bytes]:
    """Build and import an image from Debian packages; answers with lines of ``Progress``."""
    ids.parse_reference(data.reference)
    source = data.debian
    if source is None:
        raise InvalidArgument("name a source: debian (a tar is sent with PUT)", field="debian")

    async def work(report: ProgressReport) -> models.Image:
        return await service.images.import_debian(
            data.reference, source, kind=data.kind, config=data.config, report=report
        )

    return StreamAnswer(progress_lines(work), NDJSON)


@put("/v1/images", status_code=HTTP_200_OK, tags=["images"], request_max_body_size=None)
async def upload_image(
    request: Request[Any, Any, Any],
    service: EdgeService,
    reference: str,
    kind: Literal["base", "workspace", "toolkit"] = "base",
    config: str | None = None,
) -> Response[bytes]:
    """Import the tar (plain or compressed) in the body; answers with lines of ``Progress``."""
    ids.parse_reference(reference)
    try:
        image_config = msgspec.json.decode(config, type=models.ImageConfig) if config else None
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"config: {error}", field="config") from None

    async def body() -> AsyncIterator[bytes]:
        async for piece in request.stream():
            if piece:
                yield piece

    def nothing(_message: str, _fraction: float | None) -> None:
        """The answer begins when the body has been read, so there is nobody to tell."""

    image = await service.images.import_tar(reference, body(), kind=kind, config=image_config, report=nothing)

    async def lines() -> AsyncGenerator[bytes, None]:
        yield _encode(models.Progress(message="done", fraction=1.0, image=image)) + b"\n"

    return StreamAnswer(lines(), NDJSON)


IMAGE_HANDLERS: Sequence[BaseRouteHandler] = (
    list_images,
    resolve_image,
    remove_image,
    tag_image,
    import_image,
    upload_image,
)
