"""A process with the CLI imported that forks for every call: a call costs milliseconds instead of a start of Python."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading


class Zygote:
    """Runs command lines in forks of one process that has imported everything."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        """End it."""
        self._ours.close()
        self._process.wait()

    def start(self, arguments: list[str], env: dict[str, str], files: list[int]) -> socket.socket:
        """Start a command line; the socket returned gives its exit code."""
        mine, theirs = socket.socketpair()
        with self._lock, theirs:
            request = json.dumps({"arguments": arguments, "env": env}).encode()
            socket.send_fds(self._ours, [request], [*files, theirs.fileno()])
        return mine


def serve(control: socket.socket) -> None:
    """Fork for every request until the other side is gone."""
    from opendsec.cli import _app

    # Import what is imported late, here and not in every fork.
    os.environ["OPENDSEC_URL"] = "unix:///nowhere"
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for arguments in (["ls"], ["run"], ["image"]):
            _app.run(arguments)
    gc.freeze()
    while True:
        request, files, _, _ = socket.recv_fds(control, 2**20, 8)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            wanted = json.loads(request)
            for number, file in enumerate(files[:3]):
                os.dup2(file, number)
            os.environ.clear()
            os.environ.update(wanted["env"])
            code = 70
            try:
                code = _app.run(wanted["arguments"])
            finally:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os.write(files[3], str(code).encode())
                os._exit(0)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
