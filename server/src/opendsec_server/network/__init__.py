"""Networks of sandboxes. For now there is loopback only.

The OCI runtime makes a network namespace for each sandbox and brings ``lo`` up in it; nothing connects it to anything.
It lives and dies with the sandbox's processes, so there is nothing to set up or to remove here. Rules that name a
service with ``True`` are refused by the edge. The backend contract (``loopback_is_up_and_all_there_is``) holds it to
that.
"""
