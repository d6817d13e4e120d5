"""Control plane and node agent of OpenDSec."""
