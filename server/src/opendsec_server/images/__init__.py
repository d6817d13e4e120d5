"""References, catalog, layers, import, EROFS build, composition."""
