"""The ``opendsec`` command."""
