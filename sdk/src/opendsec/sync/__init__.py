"""The SDK without ``await``."""
