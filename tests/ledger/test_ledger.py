"""The ledger: what is accounted is what ran."""

from __future__ import annotations

import pytest
import torch
from tests.ledger.small import DATA, begin, fixed_order, poisson, train

import quietgrad as qg
from quietgrad import PrivacyError
from quietgrad.ledger import Ledger
from quietgrad.plan import Plan
from quietgrad.step import States, release
from quietgrad.stream import Stream
from quietgrad.values import Context, Nobody, Release, Sum

PARAMETERS = {"weight": torch.zeros(3, 2)}
PLANS = {"Poisson": poisson(), "FixedOrder": fixed_order()}


def made(plan: Plan, step: int) -> Release:
    """A release of no examples, as a step of `plan` makes it."""
    context = Context(step, 0, {}, plan.noise_scale, plan.sample.divisor)
    total = plan.bound(Nobody(PARAMETERS), context).sum()
    return release(plan, total, States({}, {}), context, Stream())


@pytest.mark.parametrize("name", PLANS)
def test_a_full_run_costs_what_the_plan_says(name: str) -> None:
    """After the last step the ledger's event and price are the plan's; on the way they are those of its beginning."""
    plan = PLANS[name]
    run = begin(plan=plan)
    for batch in run.batches(DATA):
        assert run.ledger.event() == plan.event(run.position)
        run.step(batch)
    assert run.ledger.spent == 20
    assert run.ledger.event() == plan.event()
    assert run.spent().epsilon == plan.epsilon() == run.certificate().epsilon


@pytest.mark.parametrize("name", PLANS)
def test_every_release_is_entered(name: str) -> None:
    """The ledger of a run got each release of the plan, in order, at its price."""
    plan = PLANS[name]
    run, seen = begin(plan=plan), []
    add = Ledger.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "add", lambda ledger, given: (seen.append(given), add(ledger, given))[1])
        train(run)
    assert [given.step for given in seen] == list(range(20))
    assert {given.event for given in seen} == {plan.noise.cost(0)}


def test_a_ledger_begins_at_nothing() -> None:
    """Before the first release nothing was spent."""
    run = begin()
    assert run.position == 0 and run.spent().epsilon == 0
    assert run.certificate().epsilon == 0 and run.certificate().steps == 0


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 0], [0, 1, 0]], ids=["late", "skipped", "repeated", "again"])
def test_releases_out_of_order_are_refused(order: list[int]) -> None:
    """Every release once, in order; a refused one is not counted."""
    ledger = Ledger(poisson())
    for step in order[:-1]:
        ledger.add(made(poisson(), step))
    with pytest.raises(PrivacyError, match="ledger: release"):
        ledger.add(made(poisson(), order[-1]))
    assert ledger.spent == len(order) - 1


def test_a_release_of_another_price_is_refused() -> None:
    """A release made with other noise than the plan's is not entered at the plan's price."""
    ledger = Ledger(poisson())
    with pytest.raises(PrivacyError, match=r"cost GaussianDpEvent.*0\.5.*the plan says"):
        ledger.add(made(poisson(20, 0.5), 0))
    assert ledger.spent == 0
    ledger.add(made(poisson(), 0))


def test_a_release_beyond_the_plan_is_refused() -> None:
    """A plan of two steps has two releases."""
    ledger = Ledger(poisson(2))
    for step in range(2):
        ledger.add(made(poisson(2), step))
    with pytest.raises(PrivacyError, match="all are spent"):
        ledger.add(made(poisson(2), 2))


@pytest.mark.parametrize("kind", ["a tensor", "a sum", "tensors by name"])
def test_only_a_release_is_entered(kind: str) -> None:
    """The ledger takes nothing that has not passed the noise."""
    context = Context(0, 0, {}, 1.0, 8.0)
    total: Sum = qg.Clip(1.0)(Nobody(PARAMETERS), context).sum()
    given = {"a tensor": torch.zeros(2), "a sum": total, "tensors by name": PARAMETERS}[kind]
    with pytest.raises(PrivacyError, match="ledger: was given"):
        Ledger(poisson()).add(given)  # type: ignore[arg-type]


def test_what_was_lost_counts() -> None:
    """A ledger that goes on behind lost releases takes the next one, and prices them all."""
    ledger = Ledger(poisson(), 7)
    with pytest.raises(PrivacyError, match="came after 7"):
        ledger.add(made(poisson(), 6))
    ledger.add(made(poisson(), 7))
    assert ledger.event() == poisson().event(8)


def test_the_price_only_grows() -> None:
    """No release is free, and none is given back."""
    prices = [poisson().epsilon()]
    run = begin()
    spent = []
    for batch in run.batches(DATA):
        spent.append(run.spent().epsilon)
        run.step(batch)
    assert spent == sorted(spent) and len(set(spent)) == 20 and spent[-1] < prices[0] == run.spent().epsilon
