"""What starts sandboxes: one package per backend behind ``protocol.Backend``."""
