"""In-memory twins of every port, a simulated edge, the backend contract suite."""
