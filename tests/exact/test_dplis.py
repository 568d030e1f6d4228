"""DPLIS is the paper's equation 6 and algorithm 2, and DP-SGD where nothing is perturbed."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import guards
from tests.small import chunks_of, context, gradients_of, parameters_of, plan_of, sum_of, world
from torch import Tensor, nn
from torch.nn import functional as F

import quietgrad as qg
from quietgrad import RandomizedSmoothing, SummedViews, Views, audit
from quietgrad.plan import Plan
from quietgrad.smooth import AsIs
from quietgrad.stream import Purpose, Stream

SGD = torch.optim.SGD
EXAMPLES = Path(__file__).parents[2] / "examples"


def halved_each_step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def by_hand(plan: Plan, model: nn.Module, data: tuple[Tensor, Tensor], lr: float, seed: int) -> list[bool]:
    """Algorithm 2 on the same random numbers, the rate halved at each step; says which examples were clipped."""
    stream, clipped = Stream(seed), []
    sigma, clip, expected = plan.noise.multiplier, plan.bound.reach, plan.sample.batch_size
    lattice = 2.0 ** math.floor(math.log2(sigma * clip * 2.0**-16))
    params = list(model.parameters())
    width = sum(p.numel() for p in params)
    for t in range(plan.steps):
        total = [torch.zeros_like(p) for p in params]
        moved = []
        for k in range(plan.smooth.samples):
            nu = sigma * clip * stream.normals(Purpose.SMOOTH, t, k * (width + width % 2 + 2), width)
            moved.append(copy.deepcopy(model))
            for p, piece in zip(moved[k].parameters(), nu.split([p.numel() for p in params]), strict=True):
                p.data += plan.smooth.radius * lr / expected * piece.view_as(p)
        for i in plan.sample.draw(stream, t, len(data[1]), None).tolist():
            x, y = data[0][i : i + 1], data[1][i : i + 1]
            views = [torch.autograd.grad(F.cross_entropy(m(x), y), list(m.parameters())) for m in moved]
            g = [sum(v) / len(views) for v in zip(*views, strict=True)]
            size = math.sqrt(sum(float((v**2).sum()) for v in g))
            clipped.append(size > clip)
            total = [s + v / max(1.0, size / clip) for s, v in zip(total, g, strict=True)]
        noise = stream.normals(Purpose.NOISE, t, 0, width).split([p.numel() for p in params])
        for p, s, n in zip(params, total, noise, strict=True):
            p.data -= lr * torch.round((s + sigma * clip * n.view_as(s)) / lattice) * lattice / expected
        lr /= 2
    return clipped


def norms(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    chunk = chunks_of(data, len(data[1]))[0]
    return gradients_of(model)(parameters_of(model), chunk, (AsIs(),), context(plan_of())).norms()


def trained(plan: Plan, model: nn.Module, data: Any, optimizer: Any = None, **given: Any) -> Tensor:
    run = plan.start(model, optimizer or SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3, **given)
    for batch in run.batches(data):
        run.step(batch)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied"])
@pytest.mark.parametrize(("samples", "chunk"), [(1, None), (3, 3), (10, 50)])
def test_a_run_is_dplis_by_hand(kind: str, samples: int, chunk: int | None) -> None:
    """Weights in float64 equal those of a plain loop, examples on both sides of the clip, under a schedule."""
    model, data = world(kind)
    plan = plan_of(steps=4, clip=float(norms(model, data).median()), noise=0.8)
    plan = qg.dplis(plan, radius=6.0, samples=samples)
    optimizer = SGD(model.parameters(), lr=2.0)
    schedule = halved_each_step(optimizer)
    run = plan.start(model, optimizer, loss=qg.losses.CrossEntropy(), seed=3, chunk=chunk)
    for batch in run.batches(data):
        run.step(batch)
        schedule.step()
    assert "vmap over examples" in str(run)
    other, _ = world(kind)
    clipped = by_hand(plan, other, data, 2.0, 3)
    assert any(clipped) and not all(clipped)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_the_loop_and_vmap_see_the_same_views() -> None:
    """Rows by either engine, for a mean and for a sum, with a parameter that nothing uses."""
    model, data = world("mlp", 6)
    model.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    for combine in (qg.MeanOfViews(), SummedViews()):
        plan = plan_of().replace(smooth=RandomizedSmoothing(sigma=0.3, samples=3, combine=combine))
        slow, fast, params = gradients_of(model), gradients_of(model), parameters_of(model)
        views = plan.smooth.views(context(plan), fast.stream, params)
        fast.choose(params, chunks_of(data, 6)[0], context(plan), views)
        assert fast.name.startswith("vmap"), fast.reason
        rows = [e(params, chunks_of(data, 6)[0], views, context(plan)) for e in (slow, fast)]
        for name, meant in rows[0].rows().items():
            torch.testing.assert_close(rows[1].rows()[name], meant, rtol=0, atol=1e-12)
        torch.testing.assert_close(rows[1].losses, rows[0].losses, rtol=0, atol=1e-6, check_dtype=False)


# Neutral settings.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("neutral", [{"radius": 0.0}, {"sigma": 0.0}], ids=["radius", "sigma"])
def test_without_perturbations_it_is_dp_sgd(neutral: dict[str, float], dtype: torch.dtype) -> None:
    """One view bit for bit, dropout included; several to 1e-6."""
    data = world("mlp", dtype=dtype)[1]

    def make(rate: float) -> nn.Module:
        layers = world("mlp", dtype=dtype)[0]
        return nn.Sequential(layers[0], nn.Dropout(rate), layers[2])

    for chunk in (None, 3):
        plain = trained(plan_of(), make(0.5), data, chunk=chunk)
        one = plan_of().replace(smooth=RandomizedSmoothing(samples=1, **neutral))
        assert torch.equal(trained(one, make(0.5), data, chunk=chunk), plain)
        many = plan_of().replace(smooth=RandomizedSmoothing(samples=3, **neutral))
        meant = trained(plan_of(), make(0.0), data, chunk=chunk)
        torch.testing.assert_close(trained(many, make(0.0), data, chunk=chunk), meant, rtol=0, atol=1e-6)


def test_dropout_is_fresh_in_every_view() -> None:
    """Three unperturbed views of a net with dropout are three masks: more coordinates are reached than by one."""
    model = nn.Sequential(nn.Linear(4, 60, bias=False), nn.Dropout(0.5), nn.Linear(60, 3)).double()
    data = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    for fast in (False, True):
        engine, params = gradients_of(model), parameters_of(model)
        if fast:
            engine.choose(params, chunks_of(data, 4)[0], context(plan_of()))
        reached = []
        for samples in (1, 3):
            views = RandomizedSmoothing(sigma=0.0, samples=samples).views(context(plan_of()), engine.stream, params)
            rows = engine(params, chunks_of(data, 4)[0], views, context(plan_of())).rows()["0.weight"]
            reached.append(float((rows.abs().sum(2) != 0).double().mean()))
        assert reached[0] < 0.65 < 0.75 < reached[1]  # 1/2 and 7/8


# The perturbations.

WIDE = {"w": torch.zeros(100, 333, dtype=torch.float64), "b": torch.zeros(101, dtype=torch.float64)}


def drawn(stage: RandomizedSmoothing, seed: int = 1, step: int = 0, rates: dict[str, float] | None = None) -> Tensor:
    """(samples, coordinates)"""
    at = dataclasses.replace(context(plan_of(), step), learning_rates=rates or dict.fromkeys(WIDE, 1.0))
    views = stage.views(at, Stream(seed), WIDE)
    return torch.stack([torch.cat([t.flatten() for t in v(WIDE, None)[0].values()]) for v in views])


def test_perturbations_are_normal_fresh_and_independent_of_the_noise() -> None:
    """Of every view and step, reproducible under a seed. False alarm 1e-5 a draw, and 6e-7 a pair; seeds are fixed."""
    stage = RandomizedSmoothing(sigma=0.2, samples=3)
    draws = drawn(stage)
    for draw in draws:
        guards.has_scale(draw, 0.2)
    noise = [Stream(1).normals(Purpose.NOISE, t, 0, draws.shape[1]) for t in (0, 1)]
    guards.are_independent([*draws, *drawn(stage, step=1), *noise])
    assert torch.equal(draws, drawn(stage)) and not torch.equal(draws, drawn(stage, seed=2))


def test_the_radius_reads_rate_batch_and_noise_by_parameter() -> None:
    """sigma_smooth = R * lr / L * sigma * C, each parameter with the rate of its group."""
    plan = plan_of(batch_size=8, clip=0.5, noise=3.0)
    unit = drawn(RandomizedSmoothing(sigma=1.0, samples=1))[0]
    at = dataclasses.replace(context(plan), learning_rates={"w": 0.4, "b": 1.6})
    view = RandomizedSmoothing(radius=6.0, samples=1).views(at, Stream(1), WIDE)[0]
    moved = view(WIDE, None)[0]
    for name, rate, piece in (("w", 0.4, unit[:33300].view(100, 333)), ("b", 1.6, unit[33300:])):
        torch.testing.assert_close(moved[name], 6.0 * rate / 8 * 3.0 * 0.5 * piece, rtol=1e-14, atol=0)
    assert all(bool((t == 0).all()) for t in WIDE.values())


def test_antithetic_pairs_cancel_and_pairs_differ() -> None:
    """What is linear in the perturbation has mean zero exactly."""
    draws = drawn(RandomizedSmoothing(sigma=0.2, samples=4, antithetic=True))
    assert torch.equal(draws[0], -draws[1]) and torch.equal(draws[2], -draws[3])
    guards.are_independent([draws[0], draws[2]])


def test_the_ball_has_the_variance_of_the_gaussian() -> None:
    """Within sigma * sqrt(n + 2), fresh by view, uniform: in the plane half lie within 1 / sqrt(2) of the radius."""
    draws = drawn(RandomizedSmoothing(sigma=0.2, samples=3, ball=True))
    radius = 0.2 * math.sqrt(draws.shape[1] + 2)
    assert bool((draws.norm(dim=1) <= radius).all()) and bool((draws.norm(dim=1) > 0.999 * radius).all())
    guards.are_independent(list(draws))
    one = {"w": torch.zeros(2, dtype=torch.float64)}
    views = RandomizedSmoothing(sigma=1.0, samples=4000, ball=True).views(context(plan_of()), Stream(1), one)
    points = torch.stack([v(one, None)[0]["w"] for v in views])
    assert float(points.norm(dim=1).max()) <= 2.0
    assert float(points.square().mean()) == pytest.approx(1.0, abs=0.06)  # five of its standard deviations
    assert float((points.norm(dim=1) < math.sqrt(2)).double().mean()) == pytest.approx(0.5, abs=0.04)


def test_summed_views_are_a_mean_clipped_at_a_kth() -> None:
    """K times the sum with the clip C / K, as the released code does it; each share is within C, so it stays proved."""
    model, data = world("mlp", 12)
    sums = []
    for clip, combine in ((0.6, SummedViews()), (0.2, qg.MeanOfViews())):
        smooth = RandomizedSmoothing(sigma=0.1, samples=3, combine=combine)
        plan = plan_of(clip=clip).replace(smooth=smooth)
        assert plan.status == "proved"
        sums.append(sum_of(plan, model, data, 5).spend())
    for name, tensor in sums[0].items():
        torch.testing.assert_close(tensor, 3 * sums[1][name], rtol=0, atol=1e-12)


# Views of the examples.


def doubled(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return 2 * example[0], example[1]


def jittered(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return example[0] + torch.randn_like(example[0]), example[1]


def shuffled_by_chance(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (example[0].flip(-1) if float(torch.rand(())) < 0.5 else example[0]), example[1]


def test_views_of_both_kinds_are_k_not_k_squared() -> None:
    """A fixed transform with K perturbations is K perturbations on transformed data."""
    model, (x, y) = world("mlp")
    inner = RandomizedSmoothing(radius=6.0, samples=3)
    both = trained(plan_of().replace(smooth=Views(doubled, 3, inner=inner)), model, (x, y))
    assert len(Views(doubled, 3, inner=inner).views(
        dataclasses.replace(context(plan_of()), learning_rates=dict.fromkeys(parameters_of(model), 1.0)),
        Stream(1), parameters_of(model))) == 3  # fmt: skip
    meant = trained(plan_of().replace(smooth=inner), world("mlp")[0], (2 * x, y))
    torch.testing.assert_close(both, meant, rtol=0, atol=1e-12)
    alone = trained(plan_of().replace(smooth=Views(doubled, 3)), world("mlp")[0], (x, y))
    torch.testing.assert_close(alone, trained(plan_of(), world("mlp")[0], (2 * x, y)), rtol=0, atol=1e-12)
    summed = RandomizedSmoothing(sigma=0.1, samples=3, combine=SummedViews())
    with_sum = trained(plan_of().replace(smooth=Views(doubled, 3, inner=summed)), world("mlp")[0], (x, y))
    meant = trained(plan_of().replace(smooth=summed), world("mlp")[0], (2 * x, y))
    torch.testing.assert_close(with_sum, meant, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transform", [jittered, shuffled_by_chance])
def test_views_are_fresh_by_example_and_repeat_under_a_seed(transform: Callable[[Any], Any]) -> None:
    """Equal rows are seen differently; a seeded run ends where it ended; what vmap cannot follow, the loop does."""
    data = world("mlp")[1]
    plan = plan_of().replace(smooth=Views(transform, 2))
    model = world("mlp")[0]
    run = plan.start(model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data):
        run.step(batch)
    assert ("vmap cannot follow" in str(run)) == (transform is shuffled_by_chance)
    ends = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(ends, trained(plan, world("mlp")[0], data))
    same = data[0][:1].expand(6, -1).contiguous(), data[1][:1].expand(6).contiguous()
    views = plan.smooth.views(context(plan), run.stream, run.parameters)
    rows = run.gradients(run.parameters, chunks_of(same, 6)[0], views, context(plan)).rows()["0.weight"]
    assert any("Views: 2 of each example" in fact and "the user's" in fact for fact in run.certificate().assumptions)
    kinds = len({tuple(r.flatten().tolist()) for r in rows})
    assert kinds == 6 if transform is jittered else kinds > 1


class Remembering:
    """Mixes an example with the one that came before it."""

    def __init__(self) -> None:
        self.last: Tensor | float = 0.0

    def __call__(self, example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        mixed, self.last = (example[0] + self.last) / 2, example[0]
        return mixed, example[1]


@pytest.mark.parametrize(("transform", "says"), [
    (Remembering(), "another view after it has seen others"),
    (lambda e: (e[0].repeat(2, 1), e[1].repeat(2)), "makes 2 rows of one"),
    (lambda e: e["image"], "fails on an example"),
], ids=["memory", "rows", "failure"])  # fmt: skip
def test_a_transform_that_mixes_examples_is_refused(transform: Callable[[Any], Any], says: str) -> None:
    """Before the first release."""
    model, data = world("mlp")
    run = (
        plan_of()
        .replace(smooth=Views(transform, 2, digest="mine"))
        .start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy())
    )
    with pytest.raises(qg.PrivacyError, match=says) as error:
        run.batches(data)
    assert error.value.slot == "smooth" and run.position == 0


# Guarantee.


@pytest.mark.parametrize("smooth", [
    RandomizedSmoothing(radius=10.0, samples=4), RandomizedSmoothing(sigma=0.5, samples=2, combine=SummedViews()),
    Views(doubled, 2, inner=RandomizedSmoothing(radius=5.0, samples=2, ball=True)),
], ids=["mean", "sum", "views"])  # fmt: skip
def test_no_example_moves_a_sum_further(smooth: qg.Smooth) -> None:
    """Removed, spoilt or alone, in these chunks and in others. Exact."""
    model, data = world("mlp", 9)
    plan = plan_of(examples=9, batch_size=4, clip=0.3).replace(smooth=smooth)
    found = audit.sensitivity(plan, model, qg.losses.CrossEntropy(), data, examples=5, seed=2)
    assert found.passed and found.largest > 0.29, str(found)


def test_the_price_is_that_of_dp_sgd_and_no_attack_beats_it() -> None:
    """The audit through the whole step, with views; false alarms at most 5 % (the seed is fixed)."""
    plain = qg.dp_sgd(examples=60_000, batch_size=256, steps=100).calibrate(epsilon=2.0, delta=1e-5)
    plan = qg.dplis(plain, samples=2)
    assert plan.epsilon() == plain.epsilon() and plan.status == "proved" and plan.budget == plain.budget
    assert "RandomizedSmoothing: mean over 2 views" in str(plan)
    assert audit.one_step(plan, canaries=50_000, seed=1).passed


# On paper, and refused.


class Own(qg.Smooth):
    says, count = "Own", 1

    def views(self, *given: object) -> tuple[AsIs]:
        return (AsIs(),)


STAGES = [
    RandomizedSmoothing(), RandomizedSmoothing(4, 20), RandomizedSmoothing(sigma=0.1, samples=2, antithetic=True),
    RandomizedSmoothing(ball=True, combine=SummedViews()),
    Views(doubled, 4, inner=RandomizedSmoothing(samples=4)), Views(jittered, digest="mine"),
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_json_and_back(stage: qg.Smooth) -> None:
    plan = plan_of().replace(smooth=stage)
    back = Plan.from_json(plan.to_json())
    assert back == plan and hash(back) == hash(plan) and str(back) == str(plan)
    if isinstance(stage, Views):
        model = world("mlp")[0]
        with pytest.raises(qg.PrivacyError, match=r"smooth: the plan knows .* by name only"):
            back.start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy())


@pytest.mark.parametrize(("make", "says"), [
    (lambda: RandomizedSmoothing(-1.0), "radius is -1.0"),
    (lambda: RandomizedSmoothing(math.nan), "radius is nan"),
    (lambda: RandomizedSmoothing(math.inf), "radius is inf"),
    (lambda: RandomizedSmoothing("10"), "radius is '10'"),
    (lambda: RandomizedSmoothing(sigma=-0.1), "sigma is -0.1"),
    (lambda: RandomizedSmoothing(sigma=math.nan), "sigma is nan"),
    (lambda: RandomizedSmoothing(10.0, sigma=0.1), "give one"),
    (lambda: RandomizedSmoothing(samples=0), "samples is 0"),
    (lambda: RandomizedSmoothing(samples=2.5), "samples is 2.5"),
    (lambda: RandomizedSmoothing(samples=3, antithetic=True), "antithetic pairs"),
    (lambda: RandomizedSmoothing(ball=1), "True or False"),
    (lambda: RandomizedSmoothing(combine="sum"), "SummedViews"),
    (lambda: Views(doubled, 0), "samples is 0"),
    (lambda: Views(doubled, 4, inner=RandomizedSmoothing()), "give 1 or 4 views"),
    (lambda: Views(doubled, 4, inner=qg.Clip(1.0)), "give 1 or 4 views"),
    (lambda: Views(doubled, 4, inner=Own()), "user's own"),
    (lambda: Views(samples=3), "no transform"),
    (lambda: Views(3), "give a function"),
    (lambda: qg.dplis(plan_of(), radius=-1), "radius is -1"),
])  # fmt: skip
def test_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(qg.PrivacyError, match=says) as error:
        make()
    assert error.value.slot == "smooth"


def test_a_radius_is_for_plain_sgd() -> None:
    """Adaptive steps and momentum are refused at the start; a fixed sigma, and radius 0, go with any optimizer."""
    model = world("mlp")[0]

    def start(smooth: qg.Smooth, optimizer: torch.optim.Optimizer) -> object:
        return plan_of().replace(smooth=smooth).start(model, optimizer, loss=qg.losses.CrossEntropy())

    adam, heavy = torch.optim.Adam(model.parameters()), SGD(model.parameters(), 0.1, momentum=0.9)
    for smooth in (RandomizedSmoothing(), Views(doubled, 10, inner=RandomizedSmoothing())):
        for optimizer, name in ((adam, "Adam"), (heavy, "SGD with momentum")):
            with pytest.raises(qg.PrivacyError, match=f"^smooth: radius is 10.*{name}.*sigma"):
                start(smooth, optimizer)
        start(smooth, SGD(model.parameters(), 0.1, weight_decay=0.1))
    for smooth in (RandomizedSmoothing(0.0), RandomizedSmoothing(sigma=0.1)):
        start(smooth, adam)


def test_the_example_is_base_with_one_line_more() -> None:
    lines = [(EXAMPLES / name).read_text().splitlines() for name in ("base.py", "dplis.py")]
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    assert len(changed) == 1 and changed[0].startswith("+ plan = qg.dplis(plan)")
