"""Who takes part: Poisson draws are what the account says, fixed orders are a partition that nobody else moves.

Statistical guards (tests/guards.py) state their false-alarm rate and power; seeds are fixed, and each takes seconds.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare, kstest
from tests import guards
from torch import Tensor

import quietgrad as qg
from quietgrad.stream import Purpose, Stream


def draws(sample: qg.Poisson, rows: int, seed: int = 1, steps: int | None = None) -> list[Tensor]:
    stream = Stream(seed)
    return [sample.draw(stream, t, rows, None) for t in range(steps or sample.steps)]


@pytest.mark.parametrize(
    ("rows", "batch", "steps"), [(20_000, 200, 200), (500, 150, 2000), (40, 36, 5000), (3, 1, 20_000)]
)
def test_poisson_draws_are_poisson(rows: int, batch: int, steps: int) -> None:
    """Each row with probability q, rows and steps independent, sizes binomial, nobody twice."""
    sample = qg.Poisson(rows, batch, steps)
    guards.are_poisson(draws(sample, rows), rows, sample.probability)


@pytest.mark.parametrize("wrong", [0.9, 0.97, 1.03, 1.1])
def test_another_rate_is_rejected(wrong: float) -> None:
    """3 % from q is caught at 20,000 rows and 200 draws (more than 99.9 % power at 5 %)."""
    with pytest.raises(guards.Caught, match="frequency"):
        guards.are_poisson(draws(qg.Poisson(20_000, 200, 200), 20_000), 20_000, 0.01 * wrong)


def test_geometric_skips_are_equal_in_law_to_coins() -> None:
    """Sizes and gaps of drawn batches against a Bernoulli coin for each row: two-sample tests at 1e-5 each; a rate 10 %
    off would be seen with more than 99.9 %."""
    sample, coins = qg.Poisson(2000, 100, 400), Stream(8)
    skips = draws(sample, 2000)
    tossed = [(coins.uniforms(Purpose.SAMPLE, t, 0, 2000) <= 0.05).nonzero().flatten() for t in range(400)]
    gaps, meant = (torch.cat([d[1:] - d[:-1] for d in many]).double().numpy() for many in (skips, tossed))
    bins = range(1, 60)
    counts = [[int((g == k).sum()) for k in bins] for g in (gaps, meant)]
    total = [a + b for a, b in zip(*counts, strict=True)]
    share = len(gaps) / (len(gaps) + len(meant))
    statistic = sum((a - t * share) ** 2 / (t * share * (1 - share)) for a, t in zip(counts[0], total, strict=True))
    assert statistic <= chi2.ppf(1 - 1e-5, len(total))
    first = torch.tensor([float(d[0]) for d in skips]).numpy()
    geometric = lambda x: 1 - 0.95 ** (x + 1)  # noqa: E731
    assert (
        kstest(first + torch.rand(400, generator=torch.Generator().manual_seed(1)).numpy() - 0.5, geometric).pvalue
        > 1e-5
    )


@given(st.integers(1, 400), st.data())
@settings(max_examples=200, deadline=None)
def test_a_draw_is_ascending_rows_that_are_there(examples: int, data: st.DataObject) -> None:
    """For any rate, and data that holds a few rows more or fewer than stated."""
    batch = data.draw(st.integers(1, examples))
    rows = data.draw(st.integers(1, examples + 10))
    drawn = qg.Poisson(examples, batch, 1).draw(Stream(data.draw(st.integers(0, 99))), 0, rows, None)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == sorted(set(drawn.tolist())) and all(0 <= i < rows for i in drawn.tolist())
    if batch == examples:
        assert drawn.tolist() == list(range(rows))


def test_the_last_row_and_the_first_take_part_as_often_as_others() -> None:
    """No edge is missed or doubled: 20,000 draws of 5 rows, each frequency within 5 sigma (false alarm 3e-6)."""
    sample = qg.Poisson(5, 2, 20_000)
    counts = torch.bincount(torch.cat(draws(sample, 5)), minlength=5).double()
    assert float(((counts / 20_000 - 0.4).abs() / (0.24 / 20_000) ** 0.5).max()) <= 5


def test_tiny_rates_give_empty_batches_and_rare_members() -> None:
    """One expected of a million: sizes are Poisson(1), a chi-square at 1e-6."""
    sizes = torch.tensor([len(d) for d in draws(qg.Poisson(1_000_000, 1, 4000), 1_000_000)])
    seen = torch.bincount(sizes.clamp(max=5), minlength=6).double().numpy()
    meant = torch.tensor([0.36788, 0.36788, 0.18394, 0.06131, 0.01533, 0.00366]).double()
    assert chisquare(seen, (meant / meant.sum() * 4000).numpy()).pvalue > 1e-6


def test_a_row_stays_where_it_is_when_rows_are_appended() -> None:
    """Poisson draws of the first rows do not know how many follow."""
    sample, stream = qg.Poisson(1000, 50, 20), Stream(3)
    for t in range(20):
        few, many = (sample.draw(stream, t, rows, None) for rows in (900, 1100))
        assert torch.equal(many[many < 900], few)


@pytest.mark.alone
def test_a_draw_from_ten_million_rows_takes_less_than_a_millisecond() -> None:
    """At batch 4,096, the median of 50 draws, in processor time of one thread: a busy machine does not lengthen it."""
    sample, stream, taken = qg.Poisson(10_000_000, 4096, 100), Stream(), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for t in range(60):
            begun = time.thread_time()
            drawn = sample.draw(stream, t, 10_000_000, None)
            taken.append(time.thread_time() - begun)
            assert 3500 < len(drawn) < 4700
    finally:
        torch.set_num_threads(threads)
    assert statistics.median(taken[10:]) < 1e-3


# Fixed order.


def test_a_fixed_order_is_a_partition_every_epoch_the_same() -> None:
    """Every row in one batch of an epoch, the same at every epoch, ascending."""
    sample, stream = qg.FixedOrder(1000, 64, 48), Stream(2)
    memory = sample.begin(stream, 1000)
    epochs = [[sample.draw(stream, e * 16 + k, 1000, memory).tolist() for k in range(16)] for e in range(3)]
    assert sorted(i for batch in epochs[0] for i in batch) == list(range(1000))
    assert epochs[0] == epochs[1] == epochs[2]


def test_a_fixed_order_does_not_shift_when_a_row_comes() -> None:
    """The first n rows keep their batches whatever is appended: nobody is assigned by the number of others."""
    sample, stream = qg.FixedOrder(1000, 64, 16), Stream(2)
    few, many = sample.begin(stream, 900), sample.begin(stream, 1100)
    assert torch.equal(many[:900], few)


def test_a_fixed_order_is_uniform_and_independent() -> None:
    """Batches of 100,000 rows by chi-square, and pairs of neighbours too, at 1e-6; an order that deals rows out in turn
    fails the second, one that prefers a batch by 10 % the first."""

    def fits(places: Tensor) -> bool:
        single = chisquare(torch.bincount(places, minlength=10).numpy()).pvalue
        pair = chisquare(torch.bincount(places[:-1:2] * 10 + places[1::2], minlength=100).numpy()).pvalue
        return bool(min(single, pair) > 1e-6)

    assert fits(qg.FixedOrder(100_000, 10_000, 10).begin(Stream(2), 100_000).long())
    assert not fits(torch.arange(100_000) % 10)


def test_a_fixed_order_goes_on_with_its_own_data_alone() -> None:
    """Other rows than the order covers, or no order: refused."""
    sample, stream = qg.FixedOrder(100, 10, 10), Stream(2)
    memory = sample.begin(stream, 100)
    for rows, held in ((99, memory), (100, None)):
        with pytest.raises(qg.PrivacyError, match="the order covers"):
            sample.draw(stream, 0, rows, held)
