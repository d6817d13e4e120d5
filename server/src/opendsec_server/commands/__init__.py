"""Commands that need the server installed; the CLI of the SDK loads ``register`` through ``opendsec.commands``."""

from opendsec_server.commands.serving import register

__all__ = ["register"]
