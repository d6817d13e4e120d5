"""Config, logging, metrics, clock, database."""
