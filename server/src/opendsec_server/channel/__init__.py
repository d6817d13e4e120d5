"""Host end of the chronus protocol."""
