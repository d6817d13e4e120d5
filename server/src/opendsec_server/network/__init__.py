"""Network namespaces and policy."""
