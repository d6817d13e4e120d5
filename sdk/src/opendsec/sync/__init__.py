"""The SDK without ``await``: the same names, blocking.

::

    with DSecClient() as client, client.run_container(args) as sandbox:
        print(sandbox.run_shell("echo hello world").stdout)

All calls run on one event loop in a background thread, so objects may be shared between threads. Callbacks
(``on_progress``) are called on that thread and must not call the SDK. Argument records, results and errors are those of
``opendsec``.
"""

from opendsec.sync._generated import DSecClient, Process, Sandbox
from opendsec.sync._generated_parts import Files, Images, Nodes

__all__ = ["DSecClient", "Files", "Images", "Nodes", "Process", "Sandbox"]
