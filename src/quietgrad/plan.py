"""Plan: the private step as a frozen record of named slots, with its price.

`print(plan)` is the privacy statement: each stage in order, which side of the noise it is on, what all of it costs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quietgrad import account
from quietgrad.bound import Bound
from quietgrad.calibration import calibrate
from quietgrad.denoise import Denoise, Keep
from quietgrad.errors import PrivacyError
from quietgrad.losses import Forward, Loss, Own
from quietgrad.noise import Noise
from quietgrad.sample import Sample
from quietgrad.smooth import Plain, Smooth
from quietgrad.stage import Stage, finished, positive, rebuild, record
from quietgrad.statement import statement
from quietgrad.values import L2Ball

if TYPE_CHECKING:
    from pathlib import Path

    from dp_accounting import DpEvent

    import quietgrad as qg

SLOTS: Mapping[str, type[Stage]] = {s.slot: s for s in (Sample, Loss, Smooth, Bound, Noise, Denoise)}
PRICED = ("sample", "bound", "noise")  # the slots that the price depends on
TRUSTED = ("smooth", *PRICED)  # the slots whose guarantee it rests on, and no test vouches for


@dataclass(frozen=True)
class Budget:
    """What may be spent."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Plan:
    """Six slots, a budget where one was set, and whether this is a study (which may train without a guarantee)."""

    sample: Sample
    bound: Bound
    noise: Noise
    loss: Loss | None = None
    smooth: Smooth = field(default_factory=Plain)
    denoise: Denoise = field(default_factory=Keep)
    budget: Budget | None = None
    study: bool = False

    def __post_init__(self) -> None:
        for slot in SLOTS:
            stage = getattr(self, slot)
            if stage is None and slot == "loss":
                continue
            _fits(slot, stage)
        contribution = self.bound.contribution
        if isinstance(contribution, L2Ball) and not contribution.radius <= self.bound.reach:
            found = f"{type(self.bound).__name__} scales the noise to {self.bound.reach:g} and promises {contribution}"
            raise PrivacyError("bound", found, "let `reach` be the radius")
        self.noise.admits(contribution, self.sample)
        if self.loss is not None:
            self.loss.suits(self.sample.epoch(self.steps - 1))

    # What it costs.

    @property
    def steps(self) -> int:
        """Releases, at most."""
        return self.sample.steps

    @property
    def adjacency(self) -> str:
        """Which data sets count as neighbours."""
        return self.sample.adjacency

    @property
    def noise_scale(self) -> float:
        """The scale of the noise on the sum: multiplier times the bound's radius."""
        if self.noise.multiplier is None:
            raise PrivacyError(
                "noise", "the multiplier is not set", "call plan.calibrate(epsilon=…, delta=…) or give one"
            )
        return self.noise.multiplier * self.bound.reach

    def event(self, releases: int | None = None) -> DpEvent:
        """What the first `releases` releases cost together (all of them, if not said)."""
        self.noise_scale  # noqa: B018  # refuses a plan without a multiplier
        event = self.noise.account(self.sample, self.steps if releases is None else releases)
        if event is None:
            found = f"{type(self.noise).__name__} states no event, so no epsilon can be given"
            raise PrivacyError("noise", found, "return one from event(), or qg.Claimed(stage, event, why=…)")
        return event

    def epsilon(self, delta: float | None = None) -> float:
        """The price of the whole plan; infinite without noise."""
        return account.price(self.event(), self.delta(delta), self.adjacency).epsilon

    def delta(self, delta: float | None = None) -> float:
        """The delta asked for, else the budget's, else `default_delta`; at 1 / examples or above it is refused."""
        if delta is None:
            delta = self.budget.delta if self.budget else default_delta(self.sample.examples)
        positive("plan", "delta", delta)
        if not delta < 1 / self.sample.examples:
            fix = f"give one between 0 and 1/{self.sample.examples} (one per example)"
            raise PrivacyError("plan", f"delta is {delta!r}", fix)
        return delta

    @property
    def status(self) -> str:
        """`proved`, `claimed by user` or `none`; a run with a seed is `seeded`."""
        if self.study or not self.noise_scale > 0:
            return "none"
        return "claimed by user" if self.claims else "proved"

    @property
    def claims(self) -> tuple[str, ...]:
        """What rests on the user's word."""
        own = (slot for slot in TRUSTED if not getattr(self, slot).ours)
        kept = (f"{type(getattr(self, slot)).__name__} in slot '{slot}' keeps its slot's guarantee" for slot in own)
        return (*self.noise.claims, *kept)

    @property
    def guests(self) -> tuple[Stage, ...]:
        """Stages of the user's own that cost nothing if they keep to their arguments."""
        filters = getattr(self.denoise, "stages", (self.denoise,))  # of a Chain
        stages = (self.loss, self.smooth, *filters)
        return tuple(s for s in stages if s is not None and (hasattr(s, "digest") or not s.ours))

    # Other plans from this one.

    def calibrate(self, *, epsilon: float, delta: float) -> Plan:
        """The plan with the least noise that stays within the budget, which is kept. Infinite epsilon: a study
        without noise."""
        delta = self.delta(delta)
        if epsilon == math.inf:
            return dataclasses.replace(self, noise=self.noise.scaled(0.0), study=True, budget=None)
        positive("plan", "epsilon", epsilon)

        def event_of(multiplier: float) -> DpEvent:
            return self.noise.scaled(multiplier).account(self.sample, self.steps)

        multiplier = calibrate(event_of, epsilon, delta, self.adjacency)
        return dataclasses.replace(self, noise=self.noise.scaled(multiplier), budget=Budget(epsilon, delta))

    def replace(
        self,
        *,
        sample: Sample | None = None,
        loss: Loss | None = None,
        smooth: Smooth | None = None,
        bound: Bound | None = None,
        noise: Noise | None = None,
        denoise: Denoise | None = None,
    ) -> Plan:
        """The plan with other stages. A stored budget is kept: the noise is calibrated again, unless it was given with
        a multiplier of its own, which must then stay within it."""
        given = {"sample": sample, "loss": loss, "smooth": smooth, "bound": bound, "noise": noise, "denoise": denoise}
        given = {slot: stage for slot, stage in given.items() if stage is not None}
        for slot, stage in given.items():
            _fits(slot, stage)
        if noise is not None and noise.multiplier is None and self.budget is None and self.noise.multiplier is not None:
            given["noise"] = noise.scaled(self.noise.multiplier)
        plan: Plan = dataclasses.replace(self, **given)  # type: ignore[arg-type]
        if self.budget is None or not given.keys() & set(PRICED):
            return plan
        if noise is None or noise.multiplier is None:
            return plan.calibrate(epsilon=self.budget.epsilon, delta=self.budget.delta)
        if plan.epsilon() > self.budget.epsilon:
            spent = f"costs epsilon {account.up(plan.epsilon())}, beyond {self.budget.epsilon:g}"
            fix = "leave the multiplier out, so that it is calibrated, or calibrate the plan to a larger budget"
            raise PrivacyError("noise", f"multiplier {noise.multiplier:g} {spent}", fix)
        return plan

    # On paper.

    def to_json(self) -> str:
        """Numbers, names and digests; never a pickle."""
        budget = None if self.budget is None else dataclasses.asdict(self.budget)
        slots = {slot: record(getattr(self, slot)) for slot in SLOTS}
        return json.dumps({"quietgrad": 1, **slots, "budget": budget, "study": self.study}, indent=1)

    @classmethod
    def from_json(
        cls, text: str, *, loss: Callable[..., Tensor] | None = None, stages: tuple[type[Stage], ...] = ()
    ) -> Plan:
        """The plan that `to_json` wrote. A user's loss or stage is given again, and must be the one that was named."""
        try:
            read = json.loads(text)
            version, budget, study = read["quietgrad"], read["budget"], read["study"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrivacyError("plan", f"this is not a plan ({error})", "give the text that to_json wrote") from error
        if version != 1:
            raise PrivacyError("plan", f"this plan has format {version!r}", "read it with the version that wrote it")
        known = {c.__name__: c for c in finished(Stage)}  # type: ignore[type-abstract]
        known |= {f"{c.__module__}.{c.__qualname__}": c for c in stages}
        try:
            slots = {slot: rebuild(read.get(slot), known) for slot in SLOTS}
            plan = cls(**slots, budget=None if budget is None else Budget(**budget), study=bool(study))
        except TypeError as error:
            raise PrivacyError(
                "plan", f"a field is missing or odd ({error})", "give the text that to_json wrote"
            ) from error
        return plan if loss is None else plan.with_loss(loss=loss)

    def with_loss(
        self, *, loss: Callable[..., Tensor] | None = None, forward: Callable[..., Tensor] | None = None
    ) -> Plan:
        """Fills the loss slot; a loss that the plan names already must be the same one."""
        if loss is not None and forward is not None:
            raise PrivacyError(
                "loss", "both loss and forward are given", "give one: forward(model, batch) is the whole chain"
            )
        if loss is None and forward is None:
            if self.loss is None:
                raise PrivacyError("loss", "the plan has no loss", "give start(loss=…) or start(forward=…)")
            return self
        stated = getattr(self.loss, "digest", None)
        if forward is not None and self.loss is not None and self.loss.tapped:
            found = f"forward= is the whole chain, so the pre-activations {type(self.loss).__name__} reads are not seen"
            raise PrivacyError("loss", found, "give pairs of inputs and targets, or leave the penalty out")
        if forward is not None:
            filled: Loss = Forward.of(forward)
        else:
            assert loss is not None
            filled = loss if isinstance(loss, Loss) else Own.of(loss)
        if self.loss is not None and filled != self.loss:
            raise PrivacyError(
                "loss",
                f"the plan says {self.loss.says}, this is {filled.says}",
                "give the loss that the plan names" if stated else "change the plan with replace(loss=…)",
            )
        return dataclasses.replace(self, loss=filled)

    def __str__(self) -> str:
        return self.statement(None if self.noise.multiplier is None else self.status)

    def statement(self, status: str | None) -> str:
        """The plan as it is printed, for a run of this status (None: not calibrated)."""
        return statement(self, tuple(SLOTS), status)

    # Training.

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Callable[..., Tensor] | None = None,
        forward: Callable[[Any, Any], Tensor] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        watch: qg.Watch | None = None,
        seed: int | None = None,
        chunk: int | None = None,
        average: qg.Average | None = None,
    ) -> qg.Run:
        """A run of this plan: see `quietgrad.run.Run`."""
        from quietgrad.run import Run

        plan = self.with_loss(loss=loss, forward=forward)
        given: dict[str, Any] = {"folder": folder, "resume": resume, "watch": watch, "seed": seed, "chunk": chunk}
        return Run(plan, model, optimizer, **given, average=average)

    def fit(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, loss: Callable[..., Tensor] | None = None
    ) -> qg.Run:
        """The whole plan on `data`, with a progress bar that shows the budget spent."""
        from quietgrad.progress import bar

        run = self.start(model, optimizer, loss=loss)
        with bar(run) as tick:
            for batch in run.batches(data):
                run.step(batch)
                tick()
        return run


def _fits(slot: str, stage: object) -> None:
    if not isinstance(stage, SLOTS[slot]):
        fills = f"it fills '{stage.slot}'" if isinstance(stage, Stage) else f"give a {SLOTS[slot].__name__}"
        raise PrivacyError(slot, f"cannot use {type(stage).__name__} here", fills)


def default_delta(examples: int) -> float:
    """The smaller of 1e-5 and the largest power of ten below 1 / examples."""
    power = math.floor(-math.log10(examples))
    if not 10.0**power < 1 / examples:
        power -= 1
    return min(1e-5, 10.0**power)


def study(plan: Plan) -> Plan:
    """The plan, free to train without a guarantee: for research, status `none`."""
    return dataclasses.replace(plan, study=True)
