"""The four values are made where their claim is made true, used once, and taken only where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.small import chunks_of, context, gradients_of, mlp, parameters_of, plan_of, rows_from, world
from torch import Tensor

import quietgrad as qg
from quietgrad.denoise import Denoise
from quietgrad.ledger import Ledger
from quietgrad.losses import Loss
from quietgrad.noise import Noise
from quietgrad.plan import Plan
from quietgrad.smooth import AsIs
from quietgrad.step import apply
from quietgrad.stream import Stream
from quietgrad.values import Bounded, L2Ball, Nobody, PerExample, Release, Sum

PLAN = plan_of()
AT = context(PLAN)
ROWS = {"w": torch.ones(3, 2)}


def bounded() -> Bounded:
    return PLAN.bound(rows_from(ROWS), AT)


def released(step: int = 0, plan: Plan = PLAN) -> Release:
    total = plan.bound(Nobody({"w": torch.zeros(2)}), context(plan, step)).sum()
    return plan.noise(total, {}, context(plan, step), Stream(1))[0]


def per_example() -> PerExample:
    model, data = world("mlp", 3)
    return gradients_of(model)(parameters_of(model), chunks_of(data, 3)[0], (AsIs(),), AT)


MADE: dict[str, Callable[[], Any]] = {
    "Bounded": lambda: Bounded(object(), rows_from(ROWS), L2Ball(1.0), dict),  # type: ignore[arg-type]
    "Bounded without a key": lambda: Bounded(None, rows_from(ROWS), L2Ball(1.0), dict),  # type: ignore[arg-type]
    "Sum": lambda: Sum(object(), dict(ROWS), ROWS, L2Ball(1.0)),  # type: ignore[arg-type]
    "Release": lambda: Release(object(), ROWS, 0, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("value", MADE)
def test_a_hand_made_value_is_refused(value: str) -> None:
    """Only a Bound makes a Bounded, only its sum a Sum, only a Noise a Release."""
    with pytest.raises(qg.PrivacyError, match=f"a {value.split(maxsplit=1)[0]} was made outside a"):
        MADE[value]()


def test_a_bounded_is_summed_once() -> None:
    """Twice, an example would count twice."""
    value = bounded()
    value.sum()
    with pytest.raises(qg.PrivacyError, match="summed twice"):
        value.sum()


def test_a_sum_is_used_once() -> None:
    """By the noise, or by adding it to another; added to itself it is refused, and gone."""
    total = bounded().sum()
    PLAN.noise(total, {}, AT, Stream(1))
    with pytest.raises(qg.PrivacyError, match="used twice"):
        PLAN.noise(total, {}, AT, Stream(1))
    first, second = bounded().sum(), bounded().sum()
    first += second
    with pytest.raises(qg.PrivacyError, match="used twice"):
        second.spend()
    with pytest.raises(qg.PrivacyError, match="used twice"):
        first += first


def test_sums_of_other_bounds_do_not_add() -> None:
    """Nor does anything that is not a Sum."""
    other = plan_of(clip=2.0)
    for wrong in (other.bound(rows_from(ROWS), context(other)).sum(), dict(ROWS), 0.0):
        total = bounded().sum()
        with pytest.raises(qg.PrivacyError, match="bound: a Sum within"):
            total += wrong  # type: ignore[arg-type]


def test_private_values_do_not_print_their_numbers() -> None:
    """repr shows the contribution, or the place."""
    for value in (per_example(), bounded(), bounded().sum(), Nobody(ROWS)):
        assert "tensor" not in repr(value) and "1." not in repr(value).replace("radius=1.0", "")
    assert repr(released()) == "Release(step 0, GaussianDpEvent(noise_multiplier=1.0))"


ABOVE: dict[str, Callable[[], Any]] = {
    "PerExample": per_example, "Bounded": bounded, "Sum": lambda: bounded().sum(), "dict": lambda: dict(ROWS),
    "tensor": lambda: torch.ones(2), "None": lambda: None,
}  # fmt: skip
TAKES: dict[str, tuple[Callable[[Any], Any], set[str], str]] = {
    "bound": (lambda v: PLAN.bound(v, AT), {"PerExample"}, "give it the per-example gradients"),
    "noise": (lambda v: PLAN.noise(v, {}, AT, Stream(1)), {"Sum"}, "give it a Sum"),
    "denoise": (lambda v: PLAN.denoise(v, {}, AT), set(), "give it a Release"),
    "optimizer": (lambda v: apply(v, {}, torch.optim.SGD(mlp().parameters(), 0.1)), set(), "give it a Release"),
    "ledger": (lambda v: Ledger(PLAN).add(v), set(), "give it a Release"),
}


@pytest.mark.parametrize("value", ABOVE)
@pytest.mark.parametrize("place", TAKES)
def test_each_place_takes_its_own_value_alone(place: str, value: str) -> None:
    """Whatever has not come far enough is refused: by place, finding and remedy."""
    take, fits, remedy = TAKES[place]
    made = ABOVE[value]()
    if value in fits:
        take(made)
        return
    with pytest.raises(qg.PrivacyError) as error:
        take(made)
    assert error.value.slot == place and type(made).__name__ in error.value.found and error.value.remedy == remedy


def test_optimizer_ledger_and_filter_take_a_release() -> None:
    """The other side of the same rule."""
    model = torch.nn.Linear(2, 1, bias=False)
    release = released()
    apply(release.after({"w": release.tensors["w"]}), {}, torch.optim.SGD(model.parameters(), 0.1))
    Ledger(PLAN).add(release)
    assert PLAN.denoise(release, {}, AT)[0].step == 0


def test_the_ledger_takes_each_release_once_in_order_at_the_plans_price() -> None:
    """One twice, one left out, one at another price, one beyond the plan: refused."""
    ledger = Ledger(PLAN)
    ledger.add(released(0))
    for wrong, found in (
        (released(0), "came after"),
        (released(2), "came after"),
        (released(1, plan_of(noise=2.0)), "cost"),
    ):
        with pytest.raises(qg.PrivacyError, match=f"ledger: .*{found}"):
            ledger.add(wrong)
    for step in range(1, 5):
        ledger.add(released(step))
    with pytest.raises(qg.PrivacyError, match="all are spent"):
        ledger.add(released(5))
    assert ledger.spent == 5


@pytest.mark.parametrize(
    "tensors", [{}, {"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2), "v": torch.ones(1)}]
)
def test_a_filter_gives_back_what_it_was_given(tensors: dict[str, Tensor]) -> None:
    """One tensor a parameter, of its shape."""
    with pytest.raises(qg.PrivacyError, match="denoise: the filter's answer has"):
        released().after(tensors)


# Stages.


@pytest.mark.parametrize(
    "stage", [qg.Poisson, qg.FixedOrder, qg.losses.CrossEntropy, qg.Plain, qg.Clip, qg.Gaussian, qg.Keep]
)
def test_a_finished_stage_has_no_subclass(stage: type) -> None:
    """Its guarantee would be inherited unproved."""
    with pytest.raises(qg.PrivacyError, match=f"subclasses the finished stage {stage.__name__}"):
        type("Tweaked", (stage,), {})


@pytest.mark.parametrize(
    ("base", "method"), [(qg.Bound, "__call__"), (Noise, "__call__"), (Denoise, "__call__"), (qg.Independent, "cost")]
)
def test_what_a_stage_keeps_for_itself_is_not_overridden(base: type, method: str) -> None:
    """The methods that make the values, and those that say what is fresh."""
    with pytest.raises(qg.PrivacyError, match=f"overrides {method}"):
        type("Tweaked", (base,), {method: lambda self: None})


WRONG = {"sample": qg.Clip(1.0), "loss": qg.Keep(), "smooth": qg.Clip(1.0), "bound": qg.Gaussian(1.0),
         "noise": qg.Clip(1.0), "denoise": qg.Plain()}  # fmt: skip


@pytest.mark.parametrize("slot", WRONG)
def test_a_wrong_stage_in_a_slot_is_refused(slot: str) -> None:
    """By slot, what was found, and the slot that it fills; and so is anything that is no stage."""
    slots: dict[str, Any] = {
        "sample": PLAN.sample, "loss": qg.losses.CrossEntropy(), "smooth": PLAN.smooth, "bound": PLAN.bound,
        "noise": PLAN.noise, "denoise": PLAN.denoise,
    }  # fmt: skip
    for wrong in (WRONG[slot], 1.0, "clip", qg.Clip):
        if wrong == slots[slot]:
            continue
        for build in (lambda w: Plan(**(slots | {slot: w})), lambda w: PLAN.replace(**{slot: w})):
            with pytest.raises(qg.PrivacyError) as error:
                build(wrong)
            assert error.value.slot == slot and "cannot use" in error.value.found and error.value.remedy
    with pytest.raises(qg.PrivacyError, match=f"it fills '{WRONG[slot].slot}'"):
        Plan(**(slots | {slot: WRONG[slot]}))


@dataclass(frozen=True)
class Envelope:
    """A contribution that no noise here accounts for."""

    size: float = 1.0


@dataclass(frozen=True)
class Enveloped(qg.Bound):
    """A bound whose contribution is not an L2 ball."""

    @property
    def says(self) -> str:
        return "an envelope"

    @property
    def contribution(self) -> Any:
        return Envelope()

    @property
    def reach(self) -> float:
        return 1.0

    def total(self, per_example: PerExample, context: Any) -> Any:
        raise AssertionError


def test_a_noise_that_cannot_account_for_the_bound_is_refused() -> None:
    """When the plan is made, by the noise."""
    with pytest.raises(qg.PrivacyError, match="noise: Gaussian cannot account for Envelope"):
        plan_of().replace(bound=Enveloped())


@dataclass(frozen=True)
class Silent(qg.Independent):
    """States no event."""

    @property
    def says(self) -> str:
        return "silent"

    def admits(self, contribution: Any, sample: Any) -> None:
        pass

    def event(self, step: int) -> Any:
        return None

    def account(self, sample: Any, releases: int) -> Any:
        return None

    def draw(self, stream: Any, state: Any, step: int, start: int, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)


def test_a_noise_without_an_event_has_no_price_unless_claimed() -> None:
    """It cannot be priced; claimed, it is priced as its user says, and the plan says who said so."""
    from dp_accounting import GaussianDpEvent

    plan = plan_of().replace(noise=Silent(1.0))
    with pytest.raises(qg.PrivacyError, match="states no event"):
        plan.epsilon(1e-5)
    claimed = plan.replace(noise=qg.Claimed(Silent(1.0), GaussianDpEvent(1.0), why="a paper of mine"))
    assert claimed.status == "claimed by user" and claimed.epsilon(1e-5) == pytest.approx(plan_of().epsilon(1e-5))


def test_every_stage_is_a_frozen_record() -> None:
    """Fields cannot be set; equal stages are equal and hash alike."""
    for stage in (
        qg.Poisson(10, 2, 3),
        qg.Clip(1.0),
        qg.Gaussian(1.0),
        qg.Keep(),
        qg.Plain(),
        qg.losses.CrossEntropy(),
    ):
        with pytest.raises((AttributeError, TypeError)):
            stage.radius = 3.0  # type: ignore[union-attr]
        assert hash(stage) == hash(type(stage)(**vars(stage))) and stage == type(stage)(**vars(stage))
    assert issubclass(qg.losses.CrossEntropy, Loss)
