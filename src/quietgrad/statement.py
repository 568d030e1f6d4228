"""The privacy statement: a plan, as it is printed. It could be pasted into a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad import account
from quietgrad.stage import UNIT

if TYPE_CHECKING:
    import quietgrad as qg

SIDES = {"noise": "the noise", "denoise": "sees releases only"}


def statement(plan: qg.Plan, slots: tuple[str, ...], status: str | None) -> str:
    """Each stage in order, which side of the noise it is on, what all of it costs (status None: not calibrated)."""
    head = f"quietgrad plan: {plan.steps:,} steps of about {plan.sample.divisor:g} examples" + ", a study" * plan.study
    lines = [head]
    for slot in slots:
        stage = getattr(plan, slot)
        says = stage.says if stage is not None else "given at the start"
        lines.append(f"  {slot:8} {says:88} | {SIDES.get(slot, 'sees data')}")
    lines.append(f"  {'':8} {'optimizer':88} | sees releases only")
    if status is None:
        return "\n".join([*lines, "costs    nothing is known before calibrate(epsilon=…, delta=…)"])
    if status == "none":
        return "\n".join([*lines, "costs    NO GUARANTEE: status none, for study only"])
    price, at = account.price(plan.event(), plan.delta(), plan.adjacency), account.up(plan.delta())
    mark = "CLAIMED ONLY (seeded: not for publication)" if status == "seeded" else status
    return "\n".join(
        [
            *lines,
            f"costs    epsilon {account.up(price.epsilon)} at delta {at}, {mark} ({price.accountant})",
            f"protects {UNIT}; neighbours: {plan.adjacency.replace('-', ' ')}",
            "covers   the final model and every iterate, never metrics on private data",
            f"assumes  {plan.sample.examples:,} examples is a public fact; tuning on this data is not accounted",
        ]
    )
