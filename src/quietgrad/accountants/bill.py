"""The bill: what the accountants see of an event."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from quietgrad.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Bill: TypeAlias = tuple[tuple[float, float, int], ...]  # sampling probability, multiplier, count: sorted, distinct


def bill_of(event: DpEvent) -> Bill:
    """What the accountants see: composition does not depend on order, equal steps add up, Gaussians become one."""
    counts: Counter[tuple[float, float]] = Counter()
    _add(event, 1, counts)
    mu = mu_of(tuple((q, sigma, n) for (q, sigma), n in counts.items() if q == 1))
    sampled = tuple((q, sigma, n) for (q, sigma), n in sorted(counts.items()) if q < 1)
    return sampled + (((1.0, 1 / mu, 1),) if mu else ())


def _add(event: DpEvent, count: int, counts: Counter[tuple[float, float]]) -> None:
    import dp_accounting as dp

    match event:
        case dp.NoOpDpEvent():
            pass
        case dp.NonPrivateDpEvent() | dp.PoissonSampledDpEvent(event=dp.NonPrivateDpEvent()):
            counts[1.0, 0.0] += count
        case dp.GaussianDpEvent():
            _add(dp.PoissonSampledDpEvent(1.0, event), count, counts)
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=sigma)):
            if not 0 <= q <= 1:
                raise PrivacyError("event", f"a sampling probability of {q}", "give one between 0 and 1")
            if not 0 <= sigma < math.inf:
                raise PrivacyError("event", f"a noise multiplier of {sigma}", "give a finite one that is not negative")
            if q and count:
                counts[(float(q), float(sigma)) if sigma > 1e-9 else (1.0, 0.0)] += count
        case dp.SelfComposedDpEvent(event=inner, count=times):
            if not (times >= 0 and float(times).is_integer()):
                raise PrivacyError("event", f"a repetition count of {times}", "give a whole number from 0 on")
            if times:
                _add(inner, count * int(times), counts)
        case dp.ComposedDpEvent(events=events):
            for inner in events:
                _add(inner, count, counts)
        case _:
            raise PrivacyError(
                "event", f"no accountant here prices {event!r}", "compose Gaussian and Poisson-sampled Gaussian events"
            )


def mu_of(bill: Bill) -> float:
    """One Gaussian mechanism that dominates the bill (sampling, left out, only helps)."""
    return math.sqrt(math.fsum(n / sigma**2 if sigma else math.inf for _, sigma, n in bill))
