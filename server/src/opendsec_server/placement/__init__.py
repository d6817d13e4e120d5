"""Which node gets a sandbox: pure policy, driven by the watcher's views; clock and randomness come in as arguments.

Filter (alive, not draining, has what is asked, above its thresholds), then sample ``d`` nodes at random and take the
least loaded (power of d choices; paper, section 4). Each replica lays its own placements, not yet visible in the
watcher's last view, over that view. The edge's admission stays final: a refusal comes back as an exclusion.
"""

from opendsec_server.placement.engine import Placement, PlacementEngine
from opendsec_server.placement.filter import Refusal, refusal
from opendsec_server.placement.overlay import InFlight, Overlay
from opendsec_server.placement.views import Demand, NodeView, PlacementPolicy, demand_of

__all__ = [
    "Demand",
    "InFlight",
    "NodeView",
    "Overlay",
    "Placement",
    "PlacementEngine",
    "PlacementPolicy",
    "Refusal",
    "demand_of",
    "refusal",
]
