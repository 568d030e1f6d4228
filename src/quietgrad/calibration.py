"""Calibration: the least noise that stays within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from quietgrad.account import ADD_OR_REMOVE_ONE, price, quick_epsilon, up
from quietgrad.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER = 1e6, 1e-3  # what is considered


def calibrate(
    event_of: Callable[[float], DpEvent], epsilon: float, delta: float, adjacency: str = ADD_OR_REMOVE_ONE
) -> float:
    """The smallest noise multiplier whose price is within epsilon, and uses at least 99 % of it.

    Only multipliers between SMALLEST_MULTIPLIER and LARGEST_MULTIPLIER are considered: where the smallest is private
    enough it is returned. RDP brackets, price refines; what is returned was priced and is within the budget.
    """
    if not 0 < epsilon < math.inf:
        raise PrivacyError("epsilon", f"a budget of {epsilon}", "give a positive, finite one")

    def exact(multiplier: float) -> float:
        return price(event_of(multiplier), delta, adjacency).epsilon

    start = _search(lambda multiplier: quick_epsilon(event_of(multiplier), delta, adjacency), 1.0, epsilon, 0.1)
    found = _search(exact, start, epsilon, 0.01)
    if (reached := exact(found)) > epsilon:
        raise PrivacyError(
            "budget",
            f"epsilon {epsilon:g} at delta {delta:g} cannot be met: a multiplier of {found:g} costs {up(reached)}",
            f"allow epsilon {up(reached)}, or take fewer steps, more data or a smaller batch",
        )
    return found


def _search(cost: Callable[[float], float], start: float, budget: float, slack: float) -> float:
    """The multiplier whose cost is within budget and above (1 - slack) of it; the largest, if none is within."""
    low = high = start
    spent = over = cost(start)
    while spent > budget and high < LARGEST_MULTIPLIER:
        low, over = high, spent
        high = min(high * min(max(spent / budget, 1.1), 4.0), LARGEST_MULTIPLIER)
        spent = cost(high)
    while over <= budget and low > SMALLEST_MULTIPLIER:
        high, spent = low, over
        if spent >= (1 - slack) * budget:
            return high
        low = max(low * min(math.sqrt(max(over / budget, 0.1)), 0.9), SMALLEST_MULTIPLIER)
        over = cost(low)
    if spent > budget or over <= budget:
        return high if spent > budget else low

    def excess(figure: float) -> float:
        return math.log(min(max(figure / budget, 1e-6), 1e6) / (1 - slack / 2))

    # Regula falsi on the logarithms; an end that stays is halved (Illinois).
    above, below, side = excess(over), excess(spent), 0
    while spent < (1 - slack) * budget and high > low * (1 + 1e-9):
        middle = low * (high / low) ** min(max(above / (above - below), 0.02), 0.98)
        figure = cost(middle)
        if figure <= budget:
            high, spent, below = middle, figure, excess(figure)
            above, side = (above / 2 if side > 0 else above), 1
        else:
            low, over, above = middle, figure, excess(figure)
            below, side = (below / 2 if side < 0 else below), -1
    return high
