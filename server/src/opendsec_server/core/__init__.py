"""Pure parts: state machine, ids, policies. No I/O, no clock, no randomness of its own."""
