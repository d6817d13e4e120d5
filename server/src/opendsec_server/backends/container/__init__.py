"""Containers by an OCI runtime over EROFS layers and overlayfs."""
