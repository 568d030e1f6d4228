"""Every evil twin is refused; with the refusal taken away, the guard behind it fires; and it does not fire for us."""

from __future__ import annotations

import pytest
from tests.guards import Caught
from tests.small import plan_of
from tests.twins import TWINS, Own, Peek, Spy, Twin

import quietgrad as qg

named = pytest.mark.parametrize("twin", TWINS, ids=[twin.name.replace(" ", "-") for twin in TWINS])


@named
def test_refused(twin: Twin) -> None:
    """By type, seal or provenance: with slot, finding and remedy."""
    with pytest.raises(qg.PrivacyError, match=twin.says) as error:
        twin.refused()
    assert error.value.slot and error.value.found and error.value.remedy


@named
def test_caught_without_the_refusal(twin: Twin) -> None:
    """The statistical or property guard fires on the broken thing."""
    evidence = twin.broken()
    with pytest.raises(Caught):
        twin.guard(evidence)


@named
def test_the_honest_stage_passes(twin: Twin) -> None:
    """The same guard is silent on what quietgrad does."""
    twin.guard(twin.honest())


def test_there_are_at_least_sixteen() -> None:
    """And each has a name of its own."""
    assert len({twin.name for twin in TWINS}) == len(TWINS) >= 16


def test_a_stage_of_ones_own_is_never_called_proved() -> None:
    """Where a broken stage is written as a user's own, the plan says whose word it is."""
    plan = plan_of()
    assert plan.status == "proved"
    assert plan.replace(noise=Own(1.0, "halved")).status == "claimed by user"
    assert plan.replace(bound=Spy([]), denoise=Peek([])).status == "claimed by user"
