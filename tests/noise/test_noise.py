"""The noise of a step: its scale, its place on every coordinate, its independence, its lattice.

Statistical guards (tests/guards.py) state their false-alarm rate and power; seeds are fixed, and each takes seconds.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests import guards
from tests.small import Recorder, Words, context, flat, mlp, noise_only, parameters_of, plan_of
from torch import Tensor, nn

import quietgrad as qg
from quietgrad.noise import to_lattice
from quietgrad.stream import Stream

WIDE = {"a": torch.zeros(300, 300), "b": torch.zeros(10_000, dtype=torch.float64)}


def nothing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A chain whose gradients are all zero, yet depend on the parameters."""
    x, weight = batch
    return (model(x) * weight[:, None]).sum(1)


def recorded(
    *, steps: int = 40, batch_size: int = 2, clip: float = 0.7, noise: float = 1.3, seed: int | None = 11,
    chunk: int | None = None,
) -> Recorder:  # fmt: skip
    """What the optimizer was given in a whole run on gradients of zero; some batches are empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 80), nn.Tanh(), nn.Linear(80, 3))
    recorder = Recorder(model.parameters())
    plan, data = (
        plan_of(batch_size=batch_size, steps=steps, clip=clip, noise=noise),
        (torch.ones(40, 30), torch.zeros(40)),
    )
    run, empty = plan.start(model, recorder, forward=nothing, seed=seed, chunk=chunk), 0
    for batch in run.batches(data):
        empty += not batch.chunks
        run.step(batch)
    assert batch_size > 2 or empty
    return recorder


def test_noise_has_the_scale_that_is_accounted_empty_batches_included() -> None:
    """Standard deviation of what the optimizer gets, on gradients of zero, within 2 % of clip * multiplier / expected
    batch size; Kolmogorov-Smirnov accepts the scale and rejects 2/3 and 3/2 of it."""
    seen, meant = recorded().flat(), 0.7 * 1.3 / 2
    assert seen.numel() > 100_000
    assert float(seen.std()) == pytest.approx(meant, rel=0.02)
    guards.has_scale(seen, meant)
    for wrong in (2 / 3, 3 / 2, 0.5, 0.97):
        with pytest.raises(guards.Caught):
            guards.has_scale(seen, meant * wrong)


def test_an_empty_batch_has_the_noise_of_any_other() -> None:
    """Step by step, false alarm 4e-6 in all: no step has less noise than another."""
    seen, meant = recorded().flat().double(), 0.7 * 1.3 / 2
    spread = seen.square().mean(1).sqrt() / meant
    assert float((spread - 1).abs().max()) <= 5.5 / math.sqrt(2 * seen.shape[1])


def test_every_coordinate_of_every_trainable_tensor_has_noise() -> None:
    """Rows of an embedding that no example uses, a parameter that nothing uses, one without axes."""
    model = Words()
    model.idle, model.number = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.tensor(1.0))
    model.out.bias.requires_grad_(False)
    recorder = Recorder(model.parameters())
    tokens, labels = torch.arange(160).view(40, 4) % 2 * torch.arange(40)[:, None].clamp(max=1), torch.arange(40) % 3
    run = plan_of(steps=60).start(model, recorder, loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches((tokens, labels)):
        run.step(batch)
    names = [name for name, _ in model.named_parameters()]
    steps = [{n: g for n, g in zip(names, seen, strict=True) if g is not None} for seen in recorder.seen]
    assert set(steps[0]) == set(names) - {"out.bias"}
    untouched = [{"embedding": s["embedding.weight"][2:], "idle": s["idle"]} for s in steps]
    guards.covers_every_coordinate(untouched, 1.0 / 8)
    for s in steps:
        assert float(s["number"]) != 0 and bool((s["embedding.weight"] != 0).all())


def test_steps_and_tensors_have_noise_of_their_own() -> None:
    """No two steps, and no two tensors of a step, are correlated; equal shapes get other numbers."""
    alike = {"a": torch.zeros(20_000), "b": torch.zeros(20_000), "c": torch.zeros(20_000)}
    releases = noise_only(plan_of(), alike, Stream(1), range(6))
    guards.are_independent([t for r in releases for t in r.tensors.values()])
    with pytest.raises(guards.Caught):
        guards.are_independent([flat(releases[0]), flat(releases[0])])


@pytest.mark.parametrize("multiplier", [1e-3, 0.3, 1.0, 1.3, 64.0])
def test_a_release_lies_on_the_lattice(multiplier: float) -> None:
    """Times the expected batch size it is a multiple of a power of two, between 2^-17 and 2^-16 standard deviations."""
    plan = plan_of(noise=multiplier, clip=0.9)
    shares = {name: torch.randn(t.shape, dtype=torch.float64) for name, t in WIDE.items()}
    total = plan.bound(_one_row(shares), context(plan)).sum()
    released = plan.noise(total, {}, context(plan), Stream(1))[0].tensors
    guards.lies_on_lattice(released["b"], plan.sample.divisor, plan.noise_scale)
    with pytest.raises(guards.Caught):
        guards.lies_on_lattice(released["b"] + 1e-9 * multiplier, plan.sample.divisor, plan.noise_scale)


def _one_row(tensors: dict[str, Tensor]) -> qg.gradients.Rows:
    shapes = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    rows = {name: t[None] for name, t in tensors.items()}
    return qg.gradients.Rows(shapes, rows, torch.zeros(1), torch.ones(1, dtype=torch.bool))


def test_the_lattice_is_a_power_of_two() -> None:
    """The largest that is at most scale * 2^-16, also where the scale is one itself; rounding is to the nearest."""
    for scale, spacing in ((1.0, 2.0**-16), (0.999, 2.0**-17), (3.0, 2.0**-15), (2.0**-20, 2.0**-36)):
        x = torch.tensor([0.4, 0.6, -1.6]).double() * spacing
        assert (to_lattice(x.clone(), scale) / spacing).tolist() == [0.0, 1.0, -2.0]


def test_the_release_is_rounded_before_it_is_divided() -> None:
    """In float64, an expected batch size of 3 leaves the lattice where it was; float32 only rounds what is released."""
    plan = plan_of(examples=9, batch_size=3)
    total = plan.bound(_one_row({"w": torch.rand(1000, dtype=torch.float64)}), context(plan)).sum()
    released = plan.noise(total, {}, context(plan), Stream(1))[0].tensors["w"]
    steps = released * 3 * 2**16
    assert float((steps - steps.round()).abs().max()) < 1e-6


def test_noise_is_the_same_whatever_the_chunks() -> None:
    """On gradients of zero a seeded run in chunks of 1, 2 and 50 gives the optimizer the same numbers, bit for bit."""
    first, second, third = (recorded(steps=3, batch_size=8, chunk=c).flat() for c in (1, 2, 50))
    assert torch.equal(first, second) and torch.equal(first, third)


def test_runs_without_a_seed_differ_and_seeded_ones_do_not() -> None:
    """Keys come from the operating system; a seed repeats, and another seed does not."""
    secure = [recorded(steps=2, batch_size=8, seed=None).flat()[0] for _ in range(3)]
    guards.are_independent(secure)
    assert torch.equal(recorded(steps=2, batch_size=8, seed=1).flat(), recorded(steps=2, batch_size=8, seed=1).flat())
    guards.are_independent([recorded(steps=2, batch_size=8, seed=s).flat()[0] for s in (1, 2)])


def test_torchs_seed_does_not_move_the_noise() -> None:
    """manual_seed repeats nothing that is secure."""
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        seen.append(flat(noise_only(plan_of(), WIDE, Stream(), [0])[0]))
    guards.are_independent(seen)


def test_noise_is_formed_in_float64_on_a_sum_of_any_size() -> None:
    """A sum of a million clips keeps its noise to the lattice."""
    plan = plan_of()
    total = plan.bound(_one_row({"w": torch.zeros(1000, dtype=torch.float64)}), context(plan)).sum()
    shifted = plan.bound(_one_row({"w": torch.zeros(1000, dtype=torch.float64)}), context(plan)).sum()
    tensors = shifted.spend()
    tensors["w"] += 1e6
    shifted._tensors = tensors
    one, other = (plan.noise(s, {}, context(plan), Stream(1))[0].tensors["w"] for s in (total, shifted))
    assert torch.equal(other * 8 - 1e6, one * 8)


def test_a_study_without_noise_releases_the_mean() -> None:
    """Multiplier zero: the sum over the divisor, not rounded, at status none."""
    plan = qg.study(plan_of(noise=0.0))
    assert plan.status == "none" and math.isinf(plan.epsilon(1e-5))
    total = plan.bound(_one_row({"w": torch.tensor([0.1, 0.2], dtype=torch.float64)}), context(plan)).sum()
    released = plan.noise(total, {}, context(plan), Stream(1))[0].tensors["w"]
    torch.testing.assert_close(released, torch.tensor([0.1, 0.2], dtype=torch.float64) / 8, rtol=0, atol=0)


def test_names_and_order_of_parameters_address_the_noise() -> None:
    """Coordinates run through the parameters in their order: a tensor's noise is the stream's at its place."""
    model = mlp().double()
    plan, stream = plan_of(), Stream(4)
    released = noise_only(plan, parameters_of(model), stream, [2])[0]
    whole = to_lattice(stream.normals(qg.stream.Purpose.NOISE, 2, 0, 51), 1.0) / 8
    assert torch.equal(flat(released), whole)
