"""Thin typed wrappers of kernel interfaces."""
