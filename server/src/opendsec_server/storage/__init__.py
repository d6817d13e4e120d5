"""Where layers are kept."""
