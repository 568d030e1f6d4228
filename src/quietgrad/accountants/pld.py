"""The PLD accountant: dp-accounting's privacy loss distributions, connect-the-dots, on a grid that follows the figure.

Floating point must not make a figure too small. The Fourier transforms behind a PLD of T steps may lose delta: up to
5e-16 T against the same in long double, over a wide range of settings. So a PLD is read at delta - 4e-15 T, and passed
over where little is left.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from quietgrad.accountants.bill import Bill
from quietgrad.accountants.renyi import ORDERS, quiet, renyi

STEP_POINTS, TOTAL_POINTS = 60_000, 2_000_000  # the largest PLDs: half a second


class PassedOver(Exception):
    """Why a PLD was not asked, or not believed."""


def rounding(bill: Bill) -> float:
    """What the arithmetic of a PLD may lose of delta."""
    return 4e-15 * (sum(n for *_, n in bill) + len(bill))


def _span(q: float, sigma: float) -> float:
    """How far the losses of one step reach, up to a mass of e^-50."""
    far = (10 * sigma + 0.5) / sigma**2
    most = math.log1p(q * math.expm1(min(far, 700.0))) + max(far - 700.0, 0.0)
    return most - math.log1p(q * math.expm1(-far)) if q < 1 else 2 * far


def _stages(count: int, points: float) -> tuple[int, ...]:
    """A composition on few points goes by way of the root: in one stage dp-accounting would compute the number of
    points to the power of count, and its window would be too wide. On many points one stage has the smaller window."""
    return () if count == 1 else (math.isqrt(count), count) if points < 2_000 else (count,)


def _grid(bill: Bill, epsilon: float, delta: float, relation: str) -> tuple[float, bool]:
    """A power of two that costs an epsilon of this size under 0.5 %, and whether it had to be coarser for speed.

    Connect-the-dots adds about grid^2 / 12 to the mean of each step's loss and twice that to its variance V, and
    epsilon is about the mean of the sum plus the root of 2 V log(1/delta).
    """
    steps = sum(n for *_, n in bill)
    wanted = min(epsilon * math.sqrt(0.02 / (steps * -math.log(delta))), math.sqrt(0.03 * epsilon / steps), epsilon / 8)
    points = feasible = 0.0
    for q, sigma, n in bill:
        width = _span(q, sigma)
        feasible = max(feasible, width / STEP_POINTS)
        for times in _stages(n, width / wanted):
            slope = np.clip(ORDERS - 1, 1 / width, 20 / width)  # what dp-accounting tries in its Chernoff bound
            bound = times * renyi(q, sigma, relation) * np.maximum(1, slope / (ORDERS - 1)) + 36 / slope
            width = min(times * width, 2 * float(np.min(bound)))
        points += width
    feasible = max(feasible, points / TOTAL_POINTS)
    if wanted >= feasible:
        return 2.0 ** math.floor(math.log2(wanted)), False
    return 2.0 ** math.ceil(math.log2(feasible)), True


@lru_cache(maxsize=8)
def _one_step(probability: float, multiplier: float, grid: float, relation: str) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=grid,
        sampling_prob=probability,
        neighboring_relation=NeighboringRelation[relation],
    )


@lru_cache(maxsize=4)
def distribution(bill: Bill, grid: float, relation: str) -> Any:
    """The privacy loss distribution of the whole bill."""
    total: Any = None
    for q, sigma, n in bill:
        part = whole = _one_step(q, sigma, grid, relation)
        done = 1
        for times in _stages(n, _span(q, sigma) / grid):
            whole, done = whole.self_compose(times // done), times // done * done
        if n > done:
            whole = whole.compose(part.self_compose(n - done))
        total = whole if total is None else total.compose(whole)
    return total


def pld_epsilon(bill: Bill, delta: float, relation: str, guide: float) -> tuple[float, float, str]:
    """Epsilon, its grid (which follows the figure, from a guess on) and both in words."""
    target = delta - rounding(bill)
    if target < delta / 10:
        raise PassedOver(f"its rounding, up to {rounding(bill):.0e}, leaves little of delta")
    grid, _ = _grid(bill, guide, delta, relation)
    while True:
        if grid > guide / 4:
            raise PassedOver("a grid fine enough would take too long")
        try:
            with quiet():
                epsilon = float(distribution(bill, grid, relation).get_epsilon_for_delta(target))
        except (ArithmeticError, ValueError, IndexError, MemoryError) as error:
            raise PassedOver(f"it failed ({type(error).__name__})") from None
        if not 0 <= epsilon < math.inf:
            raise PassedOver(f"it answered {epsilon}")
        finer, coarse = _grid(bill, max(epsilon, grid), delta, relation)
        if finer >= grid or epsilon == 0:
            return epsilon, grid, f"grid 2^{round(math.log2(grid))}" + ", coarse for speed" * coarse
        grid = finer
