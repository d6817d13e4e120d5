"""Fakes for users' own tests."""
