"""Filters over steps, their chains, and averages of iterates: each equals its equation, survives a resume, and is
DP-SGD at its neutral setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy.signal import lfilter
from tests.small import Recorder, context, plan_of, world
from torch import Tensor
from torch.nn import functional as F

import quietgrad as qg
from quietgrad import audit
from quietgrad.plan import Plan
from quietgrad.stream import Purpose, Stream
from quietgrad.values import Nobody

SGD = torch.optim.SGD
AT = context(plan_of())
FILTERS = {
    "averaging": qg.Averaging(0.8),
    "low pass": qg.LowPass(0.7, 1.0, 0.5),
    "kalman": qg.Kalman(0.6),
    "chain": qg.Chain(qg.LowPass(), qg.Kalman(), qg.Chain(qg.Averaging(0.5), qg.LaplacianSmoothing(1.0)), qg.Keep()),
}
NEUTRAL = {
    "averaging": qg.Averaging(0.0),
    "low pass": qg.LowPass(0.0, 2.0, 0.0),
    "kalman": qg.Kalman(1.0),
    "chain": qg.Chain(qg.Keep(), qg.LaplacianSmoothing(0), qg.Averaging(0), qg.Chain(qg.Kalman(1))),
}


def trained(
    plan: Plan, make: Callable[[Any], Any] = lambda p: SGD(p, 0.5), until: int = 99, kind: str = "mlp", **more: Any
) -> qg.Run:
    """A run of the plan to `until`, with seed 3."""
    model, data = world(kind)
    run = plan.start(model, make(model.parameters()), loss=qg.losses.CrossEntropy(), seed=3, **more)
    for batch in run.batches(data) if run.position < min(until, plan.steps) else ():
        run.step(batch)
        if run.position == until:
            break
    return run


def weights(run: qg.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def filtered(stage: qg.Denoise, signal: Tensor) -> Tensor:
    """What a stage makes of (steps, coordinates)."""
    state, out = stage.begin({"w": signal[0]}), []
    for g in signal:
        tensors, state = stage.filter({"w": g.clone()}, state, AT)
        out.append(tensors["w"])
    return torch.stack(out)


SIGNAL = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_averaging_is_its_equation() -> None:
    """m_t over 1 - a^t; noise keeps (1 - a) / (1 + a) of its variance in the long run."""
    m, out = torch.zeros(4, dtype=torch.float64), []
    for t, g in enumerate(SIGNAL, 1):
        m = 0.8 * m + 0.2 * g
        out.append(m / (1 - 0.8**t))
    torch.testing.assert_close(filtered(qg.Averaging(0.8), SIGNAL), torch.stack(out), rtol=1e-12, atol=1e-14)
    impulse = torch.zeros(400, 1, dtype=torch.float64)
    impulse[200] = 1.0
    kept = float(filtered(qg.Averaging(0.8), impulse).square().sum())
    assert kept == pytest.approx(0.2 / 1.8)


@pytest.mark.parametrize(("a", "b0", "b1"), [(9 / 11, 1.0, 1.0), (0.7, 1.0, 0.5), (0.0, 3.0, 1.0), (0.9, 1.0, 0.0)])
def test_low_pass_is_its_equation(a: float, b0: float, b1: float) -> None:
    """The linear filter, over what it makes of ones; gain 1 at frequency 0 from the first step."""
    taps = [(1 - a) * b0 / (b0 + b1), (1 - a) * b1 / (b0 + b1)]
    expected = lfilter(taps, [1, -a], SIGNAL.numpy(), axis=0) / lfilter(taps, [1, -a], [[1.0]] * 30, axis=0)
    torch.testing.assert_close(filtered(qg.LowPass(a, b0, b1), SIGNAL), torch.tensor(expected), rtol=1e-10, atol=1e-13)
    constant = torch.full((30, 2), 0.7, dtype=torch.float64)
    torch.testing.assert_close(filtered(qg.LowPass(a, b0, b1), constant), constant, rtol=1e-12, atol=0)
    torch.testing.assert_close(filtered(qg.Averaging(a), constant), constant, rtol=1e-12, atol=0)


def test_equal_taps_take_the_highest_frequency_to_nothing() -> None:
    """And half the power at the cut, .2 radians a step."""
    alternating = torch.tensor([[(-1.0) ** t] for t in range(200)], dtype=torch.float64)
    assert float(filtered(qg.LowPass(), alternating)[-50:].abs().max()) < 1e-9
    cut = 2 * math.atan(0.1)
    wave = torch.sin(cut * torch.arange(4000, dtype=torch.float64))[:, None]
    assert float(filtered(qg.LowPass(), wave)[-3000:].square().mean()) == pytest.approx(0.25, rel=0.01)


def test_averaging_is_a_low_pass_with_one_tap() -> None:
    torch.testing.assert_close(
        filtered(qg.Averaging(0.8), SIGNAL), filtered(qg.LowPass(0.8, 1.0, 0.0), SIGNAL), rtol=1e-12, atol=1e-14
    )


def gradient(model: Any, rows: list[int], data: tuple[Tensor, Tensor], plan: Plan, t: int, stream: Stream) -> Tensor:
    """The release of one step, where the model stands, by a plain loop."""
    params, scale = list(model.parameters()), plan.noise_scale
    total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for i in rows:
        g = torch.autograd.grad(F.cross_entropy(model(data[0][i : i + 1]), data[1][i : i + 1]), params)
        row = torch.cat([x.flatten() for x in g])
        total += row * min(1.0, plan.bound.reach / float(row.norm()))
    total += scale * stream.normals(Purpose.NOISE, t, 0, len(total))
    lattice = 2.0 ** math.floor(math.log2(scale * 2.0**-16))
    return torch.round(total / lattice) * lattice / plan.sample.divisor


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_kalman_is_its_equations(adam: bool) -> None:
    """x, its last move, one gradient ahead of it, and the mean: a loop in float64, under two optimizers."""
    make: Callable[[Any], Any] = (lambda p: torch.optim.Adam(p, 0.05)) if adam else (lambda p: SGD(p, 0.5))
    plan = plan_of(steps=7, noise=0.7).replace(denoise=qg.Kalman(0.6))
    model, data = world("mlp")
    optimizer, stream, gamma = make(model.parameters()), Stream(3), (1 - 0.6) / 0.6
    x = before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    g: Tensor | None = None
    for t in range(plan.steps):
        torch.nn.utils.vector_to_parameters(x + gamma * (x - before), model.parameters())
        rows = plan.sample.draw(stream, t, 40, None).tolist()
        seen = gradient(model, rows, data, plan, t, stream)
        g = seen if g is None else 0.4 * g + 0.6 * seen
        torch.nn.utils.vector_to_parameters(x.clone(), model.parameters())
        for p, piece in zip(model.parameters(), g.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
        before, x = x, torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(weights(trained(plan, make)), x, rtol=0, atol=1e-9)


def test_kalman_under_sgd_is_an_average_of_dp_sgd() -> None:
    """At a constant rate: DP-SGD with a first step 1 / kappa as long, and the exponential average of its iterates."""
    kappa, plan = 0.6, plan_of(steps=8)
    model, data = world("mlp")
    optimizer = SGD(model.parameters(), 0.5 / kappa)
    run = plan.start(model, optimizer, loss=qg.losses.CrossEntropy(), seed=3)
    mean = weights(run)
    for batch in run.batches(data):
        run.step(batch)
        optimizer.param_groups[0]["lr"] = 0.5
        mean = (1 - kappa) * mean + kappa * weights(run)
    kalman = trained(plan.replace(denoise=qg.Kalman(kappa)))
    torch.testing.assert_close(weights(kalman), mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_settings_are_dp_sgd_bit_for_bit(name: str) -> None:
    plan = plan_of(steps=6)
    other = plan.replace(denoise=NEUTRAL[name])
    assert torch.equal(weights(trained(other)), weights(trained(plan)))
    assert other.epsilon(1e-5) == plan.epsilon(1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_a_seeded_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """With the filter's memory in the checkpoint, saved twice; the average of the iterates too."""
    plan, more = plan_of(steps=9).replace(denoise=FILTERS[name]), {"average": qg.Average(0.9)}
    make = lambda p: SGD(p, 0.3, momentum=0.9, nesterov=True)  # noqa: E731  # nesterov writes into its gradients
    whole = trained(plan, make, **more)
    for until in (3, 4, 9):
        run = trained(plan, make, until, folder=tmp_path / "run", resume=until > 3, **more)
        run.save()
        run.close()
    assert torch.equal(weights(run), weights(whole)) and not torch.equal(
        weights(run), weights(trained(plan_of(steps=9), make))
    )
    with run.averaged(), whole.averaged():
        assert torch.equal(weights(run), weights(whole))


@pytest.mark.parametrize("name", ["averaging", "low pass", "kalman"])
def test_an_optimizer_that_writes_into_its_gradient_leaves_the_memory_alone(name: str) -> None:
    """What the optimizer is given is not what the filter keeps."""

    class Rude(Recorder):
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                p.grad.zero_()

    plan = plan_of(steps=6).replace(denoise=FILTERS[name])
    polite, rude = (trained(plan, kind).optimizer.flat() for kind in (Recorder, Rude))  # type: ignore[attr-defined]
    assert torch.equal(polite, rude) and bool((polite[-1] != 0).all())


@dataclass(frozen=True)
class Cubed(qg.Denoise):
    """A filter of a user's own, which does not commute."""

    @property
    def says(self) -> str:
        return "Cubed"

    def begin(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        return {"calls": 0}

    def filter(self, released: Mapping[str, Tensor], state: Any, context: Any) -> tuple[dict[str, Tensor], Any]:
        return {n: t**3 for n, t in released.items()}, {"calls": state["calls"] + 1}


def test_a_chain_keeps_its_order_and_each_memory() -> None:
    """Chain(a, b) is b(a(…)); two of a kind do not share what they remember."""
    expected = filtered(qg.Averaging(0.5), SIGNAL) ** 3
    torch.testing.assert_close(filtered(qg.Chain(qg.Averaging(0.5), Cubed()), SIGNAL), expected)
    torch.testing.assert_close(
        filtered(qg.Chain(Cubed(), qg.Averaging(0.5)), SIGNAL), filtered(qg.Averaging(0.5), SIGNAL**3)
    )
    twice = qg.Chain(qg.Averaging(0.5), qg.Chain(qg.Averaging(0.9)))
    torch.testing.assert_close(
        filtered(twice, SIGNAL), filtered(qg.Averaging(0.9), filtered(qg.Averaging(0.5), SIGNAL))
    )


@pytest.mark.parametrize("name", FILTERS)
def test_no_attack_through_a_filter_beats_the_price(name: str) -> None:
    """Nor may it see a Sum. 100,000 canaries, 95 %: a false alarm has a probability of 5 % at most, at a seed that is
    fixed; that noise half gone is caught is shown in tests/audit."""
    plan = plan_of(examples=1000, batch_size=1000, noise=1.0).replace(denoise=FILTERS[name])
    assert audit.one_step(plan, canaries=100_000, seed=1).passed
    total = plan.bound(Nobody({"w": torch.zeros(5)}), context(plan)).sum()
    with pytest.raises(qg.PrivacyError, match="denoise: was given Sum"):
        plan.denoise(total, plan.denoise.begin({}), context(plan))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_written_and_read_back(name: str) -> None:
    plan = plan_of().replace(denoise=FILTERS[name])
    assert Plan.from_json(plan.to_json()) == plan and FILTERS[name].says in str(plan)
    own = plan.replace(denoise=qg.Chain(FILTERS[name], Cubed()))
    assert Plan.from_json(own.to_json(), stages=(Cubed,)) == own


@pytest.mark.parametrize(
    "make",
    [qg.Averaging, qg.LowPass, qg.Kalman, qg.Average, partial(qg.LowPass, 0.5), partial(qg.LowPass, 0.5, 1.0)],
)
@pytest.mark.parametrize("odd", [-0.1, math.nan, math.inf])
def test_odd_settings_are_refused(make: Callable[[float], Any], odd: float) -> None:
    with pytest.raises(qg.PrivacyError, match="give"):
        make(odd)


def test_odd_edges_and_chains_are_refused() -> None:
    for wrong in (
        lambda: qg.Averaging(1.0), lambda: qg.LowPass(1.0), lambda: qg.LowPass(0.5, now=0.0), lambda: qg.Kalman(0.0),
        lambda: qg.Kalman(1.1), lambda: qg.Average(1.0), qg.Chain, lambda: qg.Chain(qg.Clip(1.0)),
    ):  # fmt: skip
        with pytest.raises(qg.PrivacyError, match="give"):
            wrong()


@pytest.mark.parametrize("decay", [None, 0.7, 0.0])
def test_an_average_is_of_the_iterates_and_is_what_is_exported(decay: float | None, tmp_path: Path) -> None:
    """Weights a^k, or equal ones, over every iterate and not the start; the model itself goes on from the last."""
    model, data = world("mlp")
    run = plan_of(steps=6).start(
        model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3, average=qg.Average(decay)
    )
    iterates = []
    for batch in run.batches(data):
        run.step(batch)
        iterates.append(weights(run))
    shares = torch.tensor([1.0 if decay is None else decay ** (5 - t) for t in range(6)], dtype=torch.float64)
    expected = (shares[:, None] * torch.stack(iterates)).sum(0) / shares.sum()
    with run.averaged():
        torch.testing.assert_close(weights(run), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(weights(run), iterates[-1])
    exported = load_file(run.export(tmp_path / "out") / "model.safetensors")
    flat = torch.cat([exported[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(weights(run), iterates[-1])


def test_nothing_is_stepped_or_saved_while_the_average_is_looked_at(tmp_path: Path) -> None:
    """The run would go on from it. Afterwards it goes on from the last iterate, as if nobody had looked."""
    model, data = world("mlp")
    run = plan_of().start(
        model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3, folder=tmp_path / "run",
        average=qg.Average(),
    )  # fmt: skip
    for batch in run.batches(data):
        if run.position == 2:
            with run.averaged():
                for wrong in (run.save, lambda batch=batch: run.step(batch)):
                    with pytest.raises(qg.PrivacyError, match="parameters were changed outside"):
                        wrong()
        run.step(batch)
    assert torch.equal(weights(run), weights(trained(plan_of())))
    with pytest.raises(KeyError), run.averaged():
        raise KeyError
    run.save()


def test_without_an_average_the_last_iterate_is_exported(tmp_path: Path) -> None:
    run = trained(plan_of())
    exported = load_file(run.export(tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(exported[name], p) for name, p in run.model.named_parameters())
    with run.averaged():
        assert all(torch.equal(exported[name], p) for name, p in run.model.named_parameters())


def test_a_run_goes_on_with_its_own_average(tmp_path: Path) -> None:
    """Another one, or none, is refused."""
    run = trained(plan_of(), until=2, folder=tmp_path / "run", average=qg.Average(0.9))
    run.save()
    run.close()
    for other in (None, qg.Average(), qg.Average(0.5)):
        with pytest.raises(qg.PrivacyError, match=r"checkpoint: it belongs to a run with another average than"):
            trained(plan_of(), folder=tmp_path / "run", resume=True, average=other)
