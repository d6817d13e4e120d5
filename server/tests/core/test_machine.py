"""The state machine of a sandbox, walked at random."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opendsec.api.models import TERMINAL, State
from opendsec_server.core.machine import Refusal, is_live, refusal

STATES: tuple[State, ...] = get_args(State)


@given(st.sampled_from(sorted(TERMINAL)), st.sampled_from(STATES))
def test_a_terminal_state_is_never_left(state, target):
    """Whatever is asked of an ended sandbox is refused as ended."""
    assert refusal(state, target) is Refusal.ENDED


@pytest.mark.parametrize("state", [one for one in STATES if one not in TERMINAL and one != "stopping"])
def test_deleting_wins_from_every_live_state(state):
    """Any live sandbox may begin to stop."""
    assert refusal(state, "stopping") is None


@pytest.mark.parametrize("state", STATES)
def test_no_state_leads_to_itself(state):
    """A transition changes something, so that a repeated one is noticed."""
    assert refusal(state, state) is not None


@pytest.mark.parametrize("state", [one for one in STATES if one != "stopping"])
def test_only_stopping_leads_to_an_end(state):
    """A sandbox is torn down before its record says that it ended."""
    assert all(refusal(state, end) is not None for end in TERMINAL)


def test_refusals_name_their_reason():
    """The reason of a refusal fits what was asked."""
    assert refusal("stopping", "running") is Refusal.STOPPING
    assert refusal("preparing", "pausing") is Refusal.NOT_RUNNING
    assert refusal("running", "resuming") is Refusal.NOT_PAUSED
    assert refusal("requested", "running") is Refusal.IMPOSSIBLE


class Walk(RuleBasedStateMachine):
    """Tries transitions at random and takes those that are allowed."""

    def __init__(self):
        super().__init__()
        self.state: State = "requested"
        self.path: list[State] = ["requested"]

    @rule(wanted=st.sampled_from(STATES))
    def ask(self, wanted):
        """Ask for a transition; take it if nothing is against it."""
        if refusal(self.state, wanted) is None:
            self.state = wanted
            self.path.append(wanted)

    @precondition(lambda self: is_live(self.state))
    @rule()
    def end(self):
        """From every live state two steps lead to an end."""
        if self.state != "stopping":
            assert refusal(self.state, "stopping") is None
            self.path.append("stopping")
        assert refusal("stopping", "stopped") is None
        self.state = "stopped"
        self.path.append("stopped")

    @invariant()
    def ends_once_and_after_stopping(self):
        """There is at most one end, it is last, and ``stopping`` stands before it."""
        ends = [one for one in self.path if one in TERMINAL]
        assert len(ends) <= 1
        if ends:
            assert self.path[-1] == ends[0]
            assert self.path[-2] == "stopping"

    @invariant()
    def runs_only_after_preparing(self):
        """Nothing runs that was not prepared."""
        if "running" in self.path:
            assert "preparing" in self.path[: self.path.index("running")]


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
