"""SDK of OpenDSec."""
