"""Laplacian smoothing is the solution of the paper's linear system, and only that."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from tests import guards
from tests.small import context, noise_only, plan_of, world
from torch import Tensor, nn
from torch.nn import functional as F

import quietgrad as qg
from quietgrad.laplacian import smoothed
from quietgrad.papers import dp_lssgd as paper
from quietgrad.plan import Plan
from quietgrad.step import apply
from quietgrad.stream import Purpose, Stream

SGD, CE = torch.optim.SGD, qg.losses.CrossEntropy
AT = context(plan_of())


def matrix(d: int, sigma: float) -> Tensor:
    """Equation 3, entry by entry: neighbours on a circle add up where they are the same."""
    a = torch.zeros(d, d, dtype=torch.float64)
    for i in range(d):
        a[i, i] += 1 + 2 * sigma
        a[i, (i + 1) % d] -= sigma
        a[i, (i - 1) % d] -= sigma
    return a


def solves(smooth: object) -> None:
    """Relative 1e-6 of the dense solution in float64, every d to 64, from float32 and from float64. No false alarms."""
    g = torch.Generator().manual_seed(1)
    for sigma in (1e-9, 0.3, 1.0, 2, 3.0, 100.0, 1e4):
        for d in range(1, 65):
            v = torch.randn(d, generator=g)
            u = torch.linalg.solve(matrix(d, sigma), v.double())
            for given in (v, v.double()):
                off = float((smooth(given, sigma).double() - u).norm() / u.norm())  # type: ignore[operator]
                guards.require(off < 1e-6, f"d {d}, sigma {sigma}: off by {off:.2g}")


def mirrored(vector: Tensor, sigma: float) -> Tensor:
    """A twin: the boundary of appendix C (Neumann), which is not that of equation 3."""
    a = matrix(len(vector), sigma)
    if len(vector) > 1:
        a[0, -1] += sigma
        a[-1, 0] += sigma
        a[0, 0] -= sigma
        a[-1, -1] -= sigma
    return torch.linalg.solve(a, vector.double()).to(vector.dtype)


def one_sided(vector: Tensor, sigma: float) -> Tensor:
    """A twin: lemma 7's kernel cut where the circle closes."""
    reach = torch.arange(len(vector), dtype=torch.float64)
    kernel = paper.alpha(sigma) ** (reach[:, None] - reach).abs() / math.sqrt(4 * sigma + 1)
    return (kernel @ vector.double()).to(vector.dtype)


def test_it_is_the_dense_solution() -> None:
    """At every size and strength; broken boundaries are told apart."""
    solves(smoothed)
    for twin in (mirrored, one_sided):
        with pytest.raises(guards.Caught):
            solves(twin)


def test_one_and_two_coordinates() -> None:
    """One is its own neighbour: nothing to smooth. Two are neighbours twice: -2 sigma beside the diagonal."""
    assert torch.equal(smoothed(torch.tensor([0.3]), 7.0), torch.tensor([0.3]))
    two = torch.tensor([[1 + 2 * 1.5, -2 * 1.5], [-2 * 1.5, 1 + 2 * 1.5]], dtype=torch.float64)
    v = torch.tensor([1.0, -0.25], dtype=torch.float64)
    torch.testing.assert_close(two @ smoothed(v, 1.5), v, rtol=1e-14, atol=0)
    assert smoothed(torch.zeros(0), 1.0).shape == (0,)


def test_extreme_strengths() -> None:
    """From no effect to the mean, without overflow; constants pass whatever sigma is; the input is not written to."""
    v = torch.randn(1001, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kept = v.clone()
    torch.testing.assert_close(smoothed(v, 1.7e308), v.mean().expand(1001), rtol=1e-9, atol=1e-12)
    assert torch.equal(smoothed(v, 5e-324), v)
    for sigma in (0.1, 3.0, 1e4, 1e30):
        torch.testing.assert_close(smoothed(torch.ones(1001), sigma), torch.ones(1001), rtol=1e-7, atol=0)
    assert torch.equal(v, kept)


def test_an_impulse_crosses_tensors_and_wraps_or_stays() -> None:
    """At a tensor's last coordinate it reaches the next tensor, and from the last the first; not by tensor."""
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
    for name, after in (("a", "b"), ("b", "c"), ("c", "a")):
        tensors = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
        tensors[name].view(-1)[-1] = 1.0
        whole = qg.LaplacianSmoothing(2.0).filter(tensors, {}, AT)[0]
        assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in tensors.items()}
        own = whole[name].flatten()
        assert whole[after].flatten()[0] == pytest.approx(float(own[-2])) and float(own[-2]) > 0.1
        alone = qg.LaplacianSmoothing.by_tensor(2.0).filter(tensors, {}, AT)[0]
        assert all(not t.any() for n, t in alone.items() if n != name)
        assert float(alone[name].sum()) == pytest.approx(1.0)
        assert alone[name].flatten()[0] == pytest.approx(float(alone[name].flatten()[-2]))


@pytest.mark.parametrize(("sigma", "printed"), [(1.0, 0.268), (2.0, 0.185), (3.0, 0.149)])
def test_noise_keeps_the_share_beta_of_its_variance(sigma: float, printed: float) -> None:
    """Zero gradients, d = 50,021, 16 draws: what moves the weights has beta times the noise's variance. The ratio's
    standard deviation is below .3 % of it: 1.5 % is off with a probability below 1e-6, and tells the three apart."""
    shapes = {"w": (200, 250), "b": (21,)}
    plan = qg.recipes.dp_lssgd(plan_of(), sigma)
    before, after = [], []
    for step in range(16):
        weights = {n: torch.zeros(s, requires_grad=True) for n, s in shapes.items()}
        release = noise_only(plan, weights, Stream(4), [step])[0]
        before.append(torch.cat([t.flatten() for t in release.tensors.values()]))
        apply(plan.denoise(release, {}, AT)[0], weights, SGD(weights.values(), lr=1.0))
        after.append(torch.cat([w.detach().flatten() for w in weights.values()]))
    share = float(torch.stack(after).square().mean() / torch.stack(before).square().mean())
    assert share == pytest.approx(paper.beta(sigma, 50_021), rel=0.015)
    assert paper.beta(sigma, 50_021) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("sigma", [-1.0, -1e-300, math.nan, math.inf, -math.inf, True, None, "1"])
def test_odd_strengths_are_refused(sigma: object) -> None:
    for make in (qg.LaplacianSmoothing, qg.LaplacianSmoothing.by_tensor):
        with pytest.raises(qg.PrivacyError, match=r"denoise: sigma is .*; give a finite sigma of at least 0"):
            make(sigma)  # type: ignore[operator]


def by_hand(plan: Plan, model: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Algorithm 1 with clipped gradients, in float64, on the same random numbers."""
    stream, sigma, clip = Stream(3), plan.noise.multiplier, plan.bound.reach
    lattice = 2.0 ** math.floor(math.log2(sigma * clip * 2.0**-16))
    params = list(model.parameters())
    for t in range(plan.steps):
        total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
        for i in plan.sample.draw(stream, t, len(data[1]), None).tolist():
            g = torch.autograd.grad(F.cross_entropy(model(data[0][i : i + 1]), data[1][i : i + 1]), params)
            row = torch.cat([x.flatten() for x in g])
            total += row * min(1.0, clip / float(row.norm()))
        total += sigma * clip * stream.normals(Purpose.NOISE, t, 0, len(total))
        pieces = (torch.round(total / lattice) * lattice / plan.sample.batch_size).split([p.numel() for p in params])
        groups = [[p] for p in pieces] if plan.denoise.tensorwise else [list(pieces)]  # type: ignore[attr-defined]
        solved = [torch.linalg.solve(matrix(len(v), plan.denoise.sigma), v) for v in map(torch.cat, groups)]  # type: ignore[attr-defined]
        for p, u in zip(params, torch.cat(solved).split([p.numel() for p in params]), strict=True):
            p.grad = u.view_as(p)
        optimizer.step()


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm", "tied"])
def test_a_run_is_algorithm_1_by_hand(kind: str, adam: bool) -> None:
    """Weights after a run of the recipe equal those of a plain loop; under Adam it is LSAdam."""
    for stage in (qg.LaplacianSmoothing(1.5), qg.LaplacianSmoothing.by_tensor(3.0)):
        ends = []
        for run_it in (True, False):
            model, data = world(kind)
            optimizer = torch.optim.Adam(model.parameters(), 0.05) if adam else SGD(model.parameters(), 0.5)
            plan = plan_of(steps=4, noise=0.8).replace(denoise=stage)
            if run_it:
                run = plan.start(model, optimizer, loss=CE(), seed=3)
                for batch in run.batches(data):
                    run.step(batch)
            else:
                by_hand(plan, model, data, optimizer)
            ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_strength_it_is_dp_sgd_bit_for_bit(dtype: torch.dtype) -> None:
    """sigma = 0, whole or by tensor: the very same weights, at the same price."""
    ends = []
    plans = [
        plan_of(),
        qg.recipes.dp_lssgd(plan_of(), 0),
        plan_of().replace(denoise=qg.LaplacianSmoothing.by_tensor(0)),
    ]
    for plan in plans:
        assert plan.epsilon(1e-5) == plans[0].epsilon(1e-5)
        model, data = world("mlp", dtype=dtype)
        run = plan.start(model, SGD(model.parameters(), 0.5, momentum=0.9), loss=CE(), seed=3)
        for batch in run.batches(data):
            run.step(batch)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_the_recipe_appends() -> None:
    """In place of Keep, behind any other filter, at the end of a chain; never instead of one."""
    one = qg.recipes.dp_lssgd(plan_of(), 1.0)
    two = qg.recipes.dp_lssgd(plan_of().replace(denoise=qg.Averaging(0.5)), 2.0)
    three = qg.recipes.dp_lssgd(two, 3.0)
    assert one.denoise == qg.LaplacianSmoothing(1.0)
    assert two.denoise == qg.Chain(qg.Averaging(0.5), qg.LaplacianSmoothing(2.0))
    assert three.denoise == qg.Chain(qg.Averaging(0.5), qg.LaplacianSmoothing(2.0), qg.LaplacianSmoothing(3.0))
    for plan in (one, two, three, plan_of().replace(denoise=qg.LaplacianSmoothing.by_tensor(1.0))):
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.denoise.says in str(plan)


def test_the_example_is_base_with_one_line_more() -> None:
    base, ours = (((Path(__file__).parents[2] / "examples") / f"{n}.py").read_text() for n in ("base", "dp_lssgd"))
    changed = [line for line in ours.splitlines() if line not in base.splitlines()]
    assert changed == ["plan = qg.dp_lssgd(plan, sigma=1.0)  # releases smoothed along their coordinates"]
    assert ours.replace(changed[0] + "\n", "") == base


@pytest.mark.alone
def test_it_costs_at_most_a_tenth_of_a_step() -> None:
    """d = 468,874: an MLP 784-512-... on CPU, batches of about 128, against the stage alone at sigma 3."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
    data = torch.randn(600, 784), torch.randint(10, (600,))
    run = plan_of(600, 128, 3).start(model, SGD(model.parameters(), 0.1), loss=CE())
    steps, tensors = [], {n: torch.randn_like(p) for n, p in run.parameters.items()}
    for batch in run.batches(data):
        begun = time.perf_counter()
        run.step(batch)
        steps.append(time.perf_counter() - begun)
    alone = []
    for _ in range(9):
        begun = time.perf_counter()
        qg.LaplacianSmoothing(3.0).filter(tensors, {}, AT)
        alone.append(time.perf_counter() - begun)
    assert min(alone) < 0.1 * min(steps)
