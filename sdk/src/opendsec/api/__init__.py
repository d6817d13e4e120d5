"""Wire types, ids and error codes shared by SDK and server."""
