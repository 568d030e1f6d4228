"""The ledger: what was released, in order. What is accounted is what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from quietgrad.errors import PrivacyError
from quietgrad.plan import Plan
from quietgrad.values import Release, received

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@final
class Ledger:
    """Takes every Release of a plan, in turn. Releases that were reserved and lost count as spent."""

    def __init__(self, plan: Plan, spent: int = 0) -> None:
        self.plan, self.spent = plan, spent

    def add(self, release: Release) -> None:
        """Counts a release: the next one, at the plan's price, within the plan."""
        received(release, Release, "ledger")
        if release.step != self.spent:
            raise PrivacyError(
                "ledger", f"release {release.step} came after {self.spent}", "enter every release, once, in order"
            )
        if self.spent >= self.plan.steps:
            raise PrivacyError("ledger", f"the plan has {self.plan.steps} steps, all are spent", "make a longer plan")
        cost = self.plan.noise.cost(release.step)
        if release.event != cost:
            raise PrivacyError(
                "ledger", f"a release cost {release.event}, the plan says {cost}", "run the plan that is accounted"
            )
        self.spent += 1

    def event(self) -> DpEvent:
        """What all releases so far cost together."""
        return self.plan.event(self.spent)
