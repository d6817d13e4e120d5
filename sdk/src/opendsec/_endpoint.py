"""Where the platform is, and the key to it: arguments first, then the environment, then this machine's socket.

The only module of the SDK that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from opendsec.api.errors import InvalidArgument, Unauthenticated

DEFAULT_RUN_DIR = "/run/opendsec"
DEFAULT_DATA_DIR = "/var/lib/opendsec"


class Endpoint:
    """Address and key of a platform.

    Attributes:
        base: prefix of every URL, without a slash at its end.
        socket: path of the Unix socket, or None for TCP.
        shown: the address as people know it.
    """

    __slots__ = ("_api_key", "_key_file", "base", "shown", "socket")

    def __init__(self, base: str, socket: str | None, shown: str, api_key: str | None, key_file: Path | None) -> None:
        self.base = base
        self.socket = socket
        self.shown = shown
        self._api_key = api_key
        self._key_file = key_file

    def __repr__(self) -> str:
        return f"Endpoint({self.shown!r})"

    def api_key(self) -> str | None:
        """Return the key, reading the key file of this machine if none was given.

        Raises:
            Unauthenticated: the key file exists but may not be read.
        """
        if self._api_key is not None or self._key_file is None:
            return self._api_key
        try:
            return self._key_file.read_text().strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unauthenticated(
                f"no API key: {self._key_file} cannot be read ({error.strerror}); "
                "set OPENDSEC_API_KEY or run as the user who started the server"
            ) from error


def find_endpoint(url: str | None, api_key: str | None, environ: Mapping[str, str] | None = None) -> Endpoint:
    """Return the endpoint to use.

    Args:
        url: ``unix:///path``, ``http://host:port`` or ``https://host``; default ``OPENDSEC_URL``, else the socket
            ``api.sock`` in ``OPENDSEC_RUN_DIR`` (``/run/opendsec``).
        api_key: default ``OPENDSEC_API_KEY``; for a Unix socket else the file ``admin.key`` in ``OPENDSEC_DATA_DIR``
            (``/var/lib/opendsec``).
        environ: environment to look into; default the process's.

    Raises:
        InvalidArgument: the URL has another form.
    """
    env = os.environ if environ is None else environ
    url = url or env.get("OPENDSEC_URL") or f"unix://{env.get('OPENDSEC_RUN_DIR') or DEFAULT_RUN_DIR}/api.sock"
    api_key = api_key or env.get("OPENDSEC_API_KEY") or None
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument("the API key has characters that no key has")
    if url.startswith("unix:"):
        socket = url.removeprefix("unix:").removeprefix("//")
        if not socket.startswith("/"):
            raise InvalidArgument(f"{url!r}: a Unix socket needs an absolute path, as in unix:///run/opendsec/api.sock")
        key_file = Path(env.get("OPENDSEC_DATA_DIR") or DEFAULT_DATA_DIR, "admin.key")
        return Endpoint("http://localhost", socket, f"unix://{socket}", api_key, key_file)
    if url.startswith(("http://", "https://")):
        base = url.rstrip("/").removesuffix("/v1")
        return Endpoint(base, None, base, api_key, None)
    raise InvalidArgument(f"{url!r} is not an address: use unix:///path, http://host:port or https://host")
