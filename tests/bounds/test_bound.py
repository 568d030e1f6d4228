"""No share reaches further than the radius, whatever the gradients are; sums of neighbours differ by no more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import guards
from tests.small import (
    Tied,
    chunks_of,
    context,
    gradients_of,
    norm,
    parameters_of,
    plan_of,
    rows_from,
    sum_of,
    world,
)  # fmt: skip
from torch import Tensor, nn

import quietgrad as qg
from quietgrad.gradients import Rows

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LARGEST = {torch.float32: 1e38, torch.float64: 1e300, torch.bfloat16: 1e38}
SIZES = [0.0, 1e-45, 1e-30, 1e-3, 1.0, 1e3, 1e25, 1e38, 1e300, math.nan, math.inf, -math.inf]
RADII = st.sampled_from([1e-30, 1e-7, 1e-3, 0.1, 1.0, 7.3, 1e4, 1e30])


@st.composite
def gradients(draw: st.DrawFn, most: int = 6) -> dict[str, Tensor]:
    """One to three tensors, up to `most` examples, of mixed size, each row of its own magnitude or not finite."""
    count, dtype = draw(st.integers(1, most)), draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (40, 25)]), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.tensor(draw(st.lists(st.sampled_from(SIZES), min_size=count, max_size=count)), dtype=torch.float64)
    sizes = torch.where(sizes.isfinite(), sizes.clamp(max=LARGEST[dtype]), sizes)
    return {
        f"p{k}": ((torch.rand(count, *s, generator=generator, dtype=torch.float64) * 2 - 1)
                  * sizes.view(-1, *[1] * len(s))).to(dtype)
        for k, s in enumerate(shapes)
    }  # fmt: skip


def summed(radius: float, tensors: dict[str, Tensor], real: Tensor | None = None) -> dict[str, Tensor]:
    """The sum that the step forms of these gradients, after the bound."""
    plan = plan_of(clip=radius)
    return plan.bound(rows_from(tensors, real), context(plan)).sum().spend()


def some(tensors: dict[str, Tensor], keep: list[int]) -> dict[str, Tensor]:
    return {name: t[keep] for name, t in tensors.items()}


@settings(max_examples=300, deadline=None)
@given(gradients(), RADII)
def test_every_share_is_within_the_radius(tensors: dict[str, Tensor], radius: float) -> None:
    """The share of one example, as the float32 (or wider) sum of it alone, for any size, dtype, NaN and infinity."""
    count = len(next(iter(tensors.values())))
    shares = [summed(radius, some(tensors, [i])) for i in range(count)]
    assert all(bool(t.isfinite().all()) and t.dtype == torch.float64 for s in shares for t in s.values())
    guards.shares_within(shares, radius)


@settings(max_examples=150, deadline=None)
@given(gradients(most=12), RADII)
def test_neighbouring_sums_are_within_the_radius(tensors: dict[str, Tensor], radius: float) -> None:
    """With and without an example, sums differ by the radius times 1 + 2 B L u, rule 16 b, at most."""
    count = len(next(iter(tensors.values())))
    slack = 2 * count * 2.0**-53 + 1e-12
    guards.neighbours_within(lambda keep: summed(radius, some(tensors, keep)), count, radius, slack)


def test_many_neighbours_at_a_real_batch_size() -> None:
    """512 float32 rows of a thousand coordinates: leaving one out moves the sum by the radius and rule 16 b's share."""
    rows = {"w": torch.randn(512, 1000, generator=torch.Generator().manual_seed(1)) * 3}
    whole = summed(1.0, rows)["w"]
    for i in (0, 63, 64, 300, 511):
        rest = summed(1.0, some(rows, [j for j in range(512) if j != i]))["w"]
        assert float((whole - rest).norm()) <= 1 + 2 * 512 * 2.0**-53


@settings(max_examples=150, deadline=None)
@given(gradients(), RADII, st.data())
def test_dummies_and_bad_rows_are_nothing(tensors: dict[str, Tensor], radius: float, data: st.DataObject) -> None:
    """A dummy, and a row with NaN or infinity anywhere, changes no bit: the sum is that of zeros in its place."""
    count = len(next(iter(tensors.values())))
    real = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    bad = ~real
    for t in tensors.values():
        bad |= ~t.reshape(count, -1).isfinite().all(1) if t.numel() else False
    clean = {name: torch.where(bad.view(-1, *[1] * (t.ndim - 1)), 0, t) for name, t in tensors.items()}
    mine, meant = summed(radius, tensors, real), summed(radius, clean)
    assert all(torch.equal(mine[name], meant[name]) for name in meant)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, 1e25])
def test_a_bad_example_leaves_the_others_bit_for_bit(value: float) -> None:
    """Through model, loss and engine: an input that is not finite, or overflows, counts as zero, silently."""
    model, (x, y) = world("mlp", 6, torch.float32)
    for vectorise in (False, True):
        engine = gradients_of(model)
        if vectorise:
            engine.choose(parameters_of(model), chunks_of((x, y), 6)[0], context(plan_of()))
            assert engine.name.startswith("vmap"), engine.reason
        spoiled = x.clone()
        spoiled[2] = value
        chunk, bad = chunks_of((x, y), 6)[0], chunks_of((spoiled, y), 6)[0]
        views, at = plan_of().smooth.views(context(plan_of()), engine.stream, parameters_of(model)), context(plan_of())
        mine, meant = (engine(parameters_of(model), c, views, at).rows() for c in (bad, chunk))
        for name, rows in mine.items():
            keep = [0, 1, 3, 4, 5]
            assert torch.equal(rows[keep], meant[name][keep])
            assert bool(rows[2].isfinite().all())
            assert math.isfinite(value) or bool((rows[2] == 0).all())


def test_a_class_number_out_of_range_counts_as_zero_inside_a_step() -> None:
    """Nothing raises, and the others stay as they were."""
    model, (x, y) = world("mlp", 6)
    wrong = y.clone()
    wrong[3] = 99

    def total(bad: bool) -> dict[str, Tensor]:
        if bad:
            return sum_of(plan_of(), model, (x, wrong), 6).spend()
        dropped = chunks_of((x, y), 6)[0]
        dropped.real[3] = False
        views = plan_of().smooth.views(context(plan_of()), gradients_of(model).stream, parameters_of(model))
        rows = gradients_of(model)(parameters_of(model), dropped, views, context(plan_of()))
        return plan_of().bound(rows, context(plan_of())).sum().spend()

    guards.bad_example_is_nothing(total)


def test_an_empty_batch_is_a_sum_of_zeros() -> None:
    """For every parameter, in float64."""
    model, (x, y) = world("cnn")
    total = sum_of(plan_of(), model, (x[:0], y[:0]), 4).spend()
    assert total.keys() == parameters_of(model).keys()
    assert all(t.dtype == torch.float64 and float(t.abs().sum()) == 0 for t in total.values())


def test_what_is_within_the_radius_is_not_touched() -> None:
    """A gradient below the radius is summed as it is; one above has the radius as its norm, to 1e-6."""
    small, large = {"w": torch.tensor([[0.3, 0.4]])}, {"w": torch.tensor([[30.0, 40.0]])}
    assert torch.equal(summed(1.0, small)["w"], torch.tensor([0.3, 0.4]).double())
    assert norm(summed(1.0, large)) == pytest.approx(1.0, rel=1e-6) and norm(summed(1.0, large)) <= 1.0


def test_tied_weights_count_once_and_whole() -> None:
    """Embedding and head of one matrix: the clipped gradient of both uses together is within the radius."""
    model, data = world("tied")
    assert isinstance(model, Tied)
    for radius in (0.05, 0.5, 1.0):
        plan = plan_of(clip=radius)
        shares = [sum_of(plan, model, tuple(t[i : i + 1] for t in data), 4).spend() for i in range(40)]
        assert all(list(s) == ["embedding.weight"] for s in shares)
        guards.shares_within(shares, radius)
        assert max(norm(s) for s in shares) == pytest.approx(radius, rel=1e-6)


def test_matrix_precision_of_torch_is_no_part_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """With matrix products allowed to round to bf16, shares stay within the radius, bit for bit the same."""
    rows = {"w": torch.randn(64, 500, generator=torch.Generator().manual_seed(1))}
    before = summed(1.0, rows)["w"]
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(summed(1.0, rows)["w"], before)
    finally:
        torch.set_float32_matmul_precision("highest")
    for product in ("__matmul__", "matmul", "mv", "mm", "bmm"):
        monkeypatch.setattr(Tensor, product, None)
    assert torch.equal(summed(1.0, rows)["w"], before)


@dataclass(frozen=True)
class Sign(qg.Bound):
    """A bound of a user's own: it looks at rows."""

    radius: float = 1.0
    forgets: str = ""

    @property
    def says(self) -> str:
        return "the sign of each coordinate"

    @property
    def contribution(self) -> Any:
        from quietgrad.values import L2Ball

        return L2Ball(self.radius)

    @property
    def reach(self) -> float:
        return self.radius

    def total(self, per_example: Any, context: Any) -> Any:
        rows = per_example.rows()
        width = sum(r[0].numel() if len(r) else 0 for r in rows.values()) or 1
        kept = {name: r for name, r in rows.items() if name != self.forgets}
        return lambda: {name: r.float().sign().sum(0) * self.radius * 0.999 / width**0.5 for name, r in kept.items()}


def test_a_bound_of_ones_own_may_ask_for_rows_and_must_give_every_parameter() -> None:
    """It runs, its guarantee is its user's, and a parameter that it forgets is refused before the noise."""
    model, data = world("mlp")
    plan = plan_of().replace(bound=Sign())
    assert plan.status == "claimed by user"
    guards.shares_within([sum_of(plan, model, tuple(t[i : i + 1] for t in data), 4).spend() for i in range(5)], 1.0)
    with pytest.raises(qg.PrivacyError, match=r"bound: the sum has nothing for 0\.bias"):
        sum_of(plan_of().replace(bound=Sign(forgets="0.bias")), model, data, 4)


def test_a_scalar_parameter_is_clipped_with_the_rest() -> None:
    """A parameter without axes is one coordinate more."""
    rows = {"scale": torch.tensor([3.0, 30.0]), "w": torch.tensor([[4.0], [40.0]])}
    total = summed(1.0, some(rows, [1]))
    assert total["scale"].shape == () and norm(total) == pytest.approx(1.0, rel=1e-6)


def test_layers_of_all_sizes_share_one_norm() -> None:
    """The norm is over all parameters together: two equal tensors get the radius over the root of two each."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    rows = {name: torch.full((1, 2, 2), 1e3) for name, _ in model.named_parameters()}
    total = summed(1.0, rows)
    assert [norm({"one": t}) for t in total.values()] == pytest.approx([0.5**0.5] * 2, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_is_no_part_of_a_sum(dtype: torch.dtype) -> None:
    """Inside torch.autocast models may compute in bf16; norms and sums of shares do not, and stay what they were."""
    rows = {"w": (100 * torch.randn(8, 500, generator=torch.Generator().manual_seed(1))).to(dtype)}
    before = [summed(1.0, some(rows, [i])) for i in range(8)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = [summed(1.0, some(rows, [i])) for i in range(8)]
    guards.shares_within(within, 1.0)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(before, within, strict=True))


def test_a_sum_is_in_float64_whatever_a_bound_gives() -> None:
    """A bound of one's own that sums in float32 is noised, and rounded to the lattice, in float64 all the same."""
    plan = plan_of(noise=1e-3).replace(bound=Sign())
    rows = rows_from({"w": torch.randn(3, 400)})
    total = plan.bound(rows, context(plan)).sum()
    assert all(t.dtype == torch.float64 for t in total.spend().values())


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6, 1e30])
def test_parameters_of_two_precisions_share_one_norm(size: float) -> None:
    """A model in float32 and float64: the norm is that of both together, at any size of either."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"single": torch.zeros(7), "double": torch.zeros(5, dtype=torch.float64)}
    parts = {"single": torch.randn((6, 7), generator=generator), "double": torch.randn((6, 5), generator=generator)}
    for part in ("single", "double"):
        rows = {"single": parts["single"].clone(), "double": parts["double"].double()}
        rows[part] *= size
        every = Rows(shapes, rows, torch.zeros(6), torch.ones(6, dtype=torch.bool))
        true = (rows["single"].double().square().sum(1) + rows["double"].square().sum(1)).sqrt()
        assert torch.all(every.norms() >= true) and torch.allclose(every.norms(), true, rtol=1e-5)
        for i in range(6):
            one = Rows(shapes, {n: r[i : i + 1] for n, r in rows.items()}, torch.zeros(1), torch.ones(1) > 0)
            share = one.weighted_sum((1.0 / one.norms()).clamp(max=1.0))
            assert sum(float(t.square().sum()) for t in share.values()) <= 1.0
