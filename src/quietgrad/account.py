"""Accounting: what an event costs. An event says what was released; its price is the smallest epsilon proved for it.

Three accountants are asked and the smallest figure is taken, since each of them is an upper bound: the closed form for
Gaussian mechanisms without sampling, privacy loss distributions, and Renyi divergences (see `accountants`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import TYPE_CHECKING

from quietgrad.accountants.bill import Bill, bill_of, mu_of
from quietgrad.accountants.exact import gaussian_epsilon, log_delta
from quietgrad.accountants.pld import PassedOver, distribution, pld_epsilon, rounding
from quietgrad.accountants.renyi import ORDERS, quiet, rdp, total_renyi
from quietgrad.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

RELATIONS = {"add-or-remove-one": "ADD_OR_REMOVE_ONE", "zero-out": "REPLACE_SPECIAL"}
ADD_OR_REMOVE_ONE = "add-or-remove-one"
TINY = 1e-300  # what a delta that underflows is rounded up to
CURVE_DELTAS = tuple(10.0**-k for k in range(3, 11))


@dataclass(frozen=True)
class Price:
    """An epsilon and the accountant that proved it."""

    epsilon: float
    accountant: str


# Events


def gaussian(multiplier: float) -> DpEvent:
    """One Gaussian mechanism: noise of standard deviation multiplier times the L2 sensitivity."""
    from dp_accounting import GaussianDpEvent, NonPrivateDpEvent

    return GaussianDpEvent(multiplier) if multiplier else NonPrivateDpEvent()


def poisson(event: DpEvent, probability: float) -> DpEvent:
    """The event on a sample that each example enters independently with this probability."""
    from dp_accounting import PoissonSampledDpEvent

    return PoissonSampledDpEvent(probability, event)


def repeated(event: DpEvent, count: int) -> DpEvent:
    """The event, count times, adaptively."""
    from dp_accounting import SelfComposedDpEvent

    return SelfComposedDpEvent(event, count)


def together(*events: DpEvent) -> DpEvent:
    """All the events, adaptively."""
    from dp_accounting import ComposedDpEvent

    return ComposedDpEvent(events)


def gaussian_mu(event: DpEvent) -> float | None:
    """The mu of Gaussian differential privacy where the event is exactly Gaussian: no sampling, no limit theorem."""
    bill = bill_of(event)
    return mu_of(bill) if all(q == 1 and sigma for q, sigma, _ in bill) else None


# Prices


def price(event: DpEvent, delta: float, adjacency: str = ADD_OR_REMOVE_ONE) -> Price:
    """The smallest epsilon proved at delta, and by which accountant."""
    return _price(bill_of(event), _checked_delta(delta), _checked_relation(adjacency))


@lru_cache(maxsize=4096)
def _price(bill: Bill, delta: float, relation: str) -> Price:
    if not bill:
        return Price(0.0, "nothing was released")
    if not all(sigma for _, sigma, _ in bill):
        return Price(math.inf, "none: an event without noise")
    exact = gaussian_epsilon(mu_of(bill), delta)
    if all(q == 1 for q, *_ in bill):
        return Price(exact, f"exact Gaussian (mu = {up(mu_of(bill))})")
    renyi, order = rdp(bill, delta, relation)
    best, name = (exact, "exact Gaussian, sampling left out") if exact < renyi else (renyi, f"RDP (order {order:g})")
    if best == 0:
        return Price(best, name)
    try:
        figure, _, grid = pld_epsilon(bill, delta, relation, best)
    except PassedOver as reason:
        return Price(best, f"{name}; PLD passed over: {reason}")
    if figure <= best:
        return Price(figure, f"PLD ({grid}); RDP gives {renyi:.4g}")
    return Price(best, f"{name}; PLD ({grid}) gives {figure:.4g}")


def rdp_epsilon(event: DpEvent, delta: float, adjacency: str = ADD_OR_REMOVE_ONE) -> float:
    """The epsilon that Renyi divergences alone prove."""
    bill, delta, relation = bill_of(event), _checked_delta(delta), _checked_relation(adjacency)
    return rdp(bill, delta, relation)[0] if all(sigma for _, sigma, _ in bill) else math.inf


def quick_epsilon(event: DpEvent, delta: float, adjacency: str = ADD_OR_REMOVE_ONE) -> float:
    """What is proved without a PLD, in a millisecond: where a search begins."""
    bill, delta, relation = bill_of(event), _checked_delta(delta), _checked_relation(adjacency)
    return min(rdp(bill, delta, relation)[0], gaussian_epsilon(mu_of(bill), delta))


def delta_of(event: DpEvent, epsilon: float, adjacency: str = ADD_OR_REMOVE_ONE) -> float:
    """The smallest delta proved at epsilon."""
    if not epsilon >= 0:
        raise PrivacyError("epsilon", f"it is {epsilon}", "give a number that is not negative")
    return _delta(bill_of(event), float(epsilon), _checked_relation(adjacency))


@lru_cache(maxsize=4096)
def _delta(bill: Bill, epsilon: float, relation: str) -> float:
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    if not bill:
        return 0.0
    if not all(sigma for _, sigma, _ in bill):
        return 1.0
    if epsilon == math.inf:
        return 0.0
    exact = max(math.exp(log_delta(mu_of(bill), epsilon)), TINY)
    if all(q == 1 for q, *_ in bill):
        return exact
    with quiet():
        best = min(exact, max(float(compute_delta(ORDERS, total_renyi(bill, relation), epsilon)[0]), TINY))
    at = min(best, 0.1)
    try:
        while True:  # the grid is the one of the price at this delta, which the divergence may have missed by far
            guide = min(rdp(bill, at, relation)[0], gaussian_epsilon(mu_of(bill), at))
            figure, grid, _ = pld_epsilon(bill, at, relation, guide) if guide else (0.0, 0.0, "")
            if figure:
                with quiet():
                    found = float(distribution(bill, grid, relation).get_delta_for_epsilon(epsilon)) + rounding(bill)
                best = min(best, found) if found > 0 else best
                if best > at / 2:
                    return best
            at = min(at / 10, best)
    except (PassedOver, ArithmeticError, ValueError):
        return best


def delta_curve(event: DpEvent, adjacency: str = ADD_OR_REMOVE_ONE) -> tuple[tuple[float, float], ...]:
    """Pairs (epsilon, delta) that hold, at the powers of ten in CURVE_DELTAS."""
    return tuple((price(event, delta, adjacency).epsilon, delta) for delta in CURVE_DELTAS)


def _checked_delta(delta: float) -> float:
    if not 0 < delta < 1:
        raise PrivacyError("delta", f"it is {delta}", "give a number between 0 and 1, below one over the examples")
    return float(delta)


def _checked_relation(adjacency: str) -> str:
    if adjacency not in RELATIONS:
        raise PrivacyError("adjacency", f"it is {adjacency!r}", f"choose one of {', '.join(RELATIONS)}")
    return RELATIONS[adjacency]


def up(figure: float) -> str:
    """Four digits, rounded up: what is shown is never below what is proved."""
    if not 0 < figure < math.inf:
        return f"{figure:g}"
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(float(figure)))):.4g}"
