"""Node agent: service, admission, journal, lifecycle, execs, reaper."""
