"""A trial: the chain (model, loss) with random parameters, run on dummy rows and on variants of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quietgrad.batches import Tree, leaves, rows_of, tree_map
from quietgrad.errors import PrivacyError
from quietgrad.independence.dummies import dummies, noised, patterns
from quietgrad.independence.held import Generators, Still, same
from quietgrad.independence.layers import Call, tainted, traced

RUNS = "see that model and loss run on the rows given: shapes, dtypes, range of labels"


class Chain(nn.Module):
    """Model and loss as one module, in which work runs with swapped parameters, backward included (checkpointing)."""

    def __init__(self, model: nn.Module, loss: Any, own: Any) -> None:
        super().__init__()
        self.model, self.loss, self.own = model, loss, own

    def values(self, batch: Tree) -> Any:
        """What the loss, or the user's own forward, gives for a batch."""
        if self.own is not None:
            return self.own(self.model, batch)
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            return self.loss(self.model(**inputs), targets)
        return self.loss(self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs), targets)

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Outcome(NamedTuple):
    """What one run gives."""

    values: Tensor  # (n,)
    gradients: list[Tensor]  # to the trainable parameters
    inputs: list[Tensor]  # to the float inputs, (n, ...)


@dataclass(frozen=True)
class Variant:
    """A batch to run: its rows, which of them to compare, where embeddings give NaN, whether draws stand still."""

    rows: list[Tensor]
    kept: Tensor
    taint: list[Tensor] = field(default_factory=list)
    still: Still | None = None


@dataclass
class Trial:
    """A chain with random parameters, n dummy rows, and n others to replace them by."""

    chain: Chain
    tree: Tree
    rows: list[Tensor]
    spare: list[Tensor]
    floats: list[bool]  # which leaves are float inputs
    parameters: Mapping[str, Tensor]
    generators: Generators
    differentiable: bool  # whether float inputs may ask for gradients
    eps: float = 0.0

    @property
    def n(self) -> int:
        return len(self.rows[0])

    @property
    def tight(self) -> float:
        """Replacement keeps shapes, thus kernels: only the order of atomic additions may differ."""
        return min(64 * self.eps, 0.05)

    @property
    def loose(self) -> float:
        """Other shapes take other kernels, whose rounding grows with depth (on a GPU perhaps that of tf32)."""
        coarse = 2.0**-11 if any(p.is_cuda for p in self.parameters.values()) else 0.0
        return min(8192 * max(self.eps, coarse), 0.1)

    def others(self, j: int) -> Tensor:
        return torch.tensor([i for i in range(self.n) if i != j])

    def dummy(self, kept: Tensor | None = None, still: Still | None = None) -> Variant:
        return Variant(self.rows, torch.arange(self.n) if kept is None else kept, still=still)

    def fewer(self, kept: Tensor) -> Variant:
        return Variant([x[kept.to(x.device)] for x in self.rows], torch.arange(len(kept)), still=Still())

    def replaced(self, j: int) -> Variant:
        return Variant([_with_row(x, j, y[j]) for x, y in zip(self.rows, self.spare, strict=True)], self.others(j))

    def tainted(self, j: int) -> Variant:
        """NaN in the float inputs of row j, and in what embeddings make of those ids that a replacement changes."""
        rows = [_with_row(x, j, torch.nan) if f else x for x, f in zip(self.rows, self.floats, strict=True)]
        taint: list[Tensor] = []
        if any(isinstance(m, nn.Embedding) for m in self.chain.modules()):
            before, after = (self.calls(v, nn.Embedding) for v in (self.dummy(), self.replaced(j)))
            pairs = [(a.inputs[0], b.inputs[0]) for a, b in zip(before, after, strict=False)]
            taint = [a != b if a.shape == b.shape else torch.zeros_like(a, dtype=torch.bool) for a, b in pairs]
        return Variant(rows, self.others(j), taint)

    def run(self, variant: Variant, over: Tensor | None = None, state: dict[str, Tensor] | None = None) -> Outcome:
        """One value per row, and the gradient of the sum of those `over`; the generators start where they stood."""
        self.generators.rewind()
        state = self.state() if state is None else state
        with variant.still or nullcontext(), tainted(self.chain, variant.taint):
            outcome: Outcome = functional_call(self.chain, state, (partial(self._outcome, state, variant.rows, over),))
        return outcome

    def state(self) -> dict[str, Tensor]:
        """Copies of the random parameters and of the buffers."""
        copies = {k: nn.Parameter(p.detach().clone(), p.requires_grad) for k, p in self.parameters.items()}
        return {**copies, **{k: b.detach().clone() for k, b in self.chain.named_buffers()}}

    def calls(self, variant: Variant, kind: type[nn.Module] = nn.Module) -> list[Call]:
        """Every call of such modules, in the order in which they end."""
        with traced(self.chain, kind) as calls:
            self.run(variant)
        return calls

    def _outcome(self, state: dict[str, Tensor], rows: list[Tensor], over: Tensor | None) -> Outcome:
        asks = [self.differentiable and f for f in self.floats]
        points = [x.clone().requires_grad_(a) for x, a in zip(rows, asks, strict=True)]
        copies = iter([p.clone() for p in points])
        values = _one_each(self.chain.values(tree_map(lambda _: next(copies), self.tree)), len(rows[0]))
        if over is None:
            return Outcome(values.detach(), [], [])
        trainable = [state[k] for k, p in self.parameters.items() if p.requires_grad]
        wanted = [*trainable, *(p for p in points if p.requires_grad)]
        total = values[over.to(values.device)].sum()
        found = [g.to_dense() for g in torch.autograd.grad(total, wanted, materialize_grads=True)]
        return Outcome(values.detach(), found[: len(trainable)], found[len(trainable) :])


def most_searching(chain: Chain, batch: Tree, size: int, generators: Generators) -> Trial:
    """The first trial that runs and is finite: jittered rows and large noise first, the rows as given last."""
    if rows_of(batch) == 0:
        raise PrivacyError("batch", "has no rows", "give at least one real row")
    if chain.own is None and not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise PrivacyError("batch", "is not a pair (inputs, targets)", "give such a pair, or forward=")
    asked = len(leaves(batch if chain.own is not None else batch[0]))
    given = [p.to(next(chain.model.parameters(), p).device) for p in leaves(batch)]
    floats = [i < asked and x.is_floating_point() for i, x in enumerate(given)]
    pool = patterns(given, floats)
    failure: Exception | None = None
    for differentiable, jitter, amount in product((True, False), (True, False), (1.0, 0.1)):
        rows, spare = (dummies(pool, [f and jitter for f in floats], size, shift) for shift in (0, 1))
        parameters = {f"model.{k}": noised(p, i, amount) for i, (k, p) in enumerate(chain.model.named_parameters())}
        trial = Trial(chain, batch, rows, spare, floats, parameters, generators, differentiable)
        still = Still()
        try:
            outcome = trial.run(trial.dummy(still=still), trial.others(0))
        except Exception as error:
            failure = error
            continue
        trial.eps, failure = still.eps, None
        if all(bool(t.isfinite().all()) for t in (outcome.values, *outcome.gradients)):
            return _telling(trial, outcome)
    if isinstance(failure, PrivacyError):
        raise failure
    if failure is not None:
        raise PrivacyError("model", f"the chain fails on the rows given ({quote(failure)})", RUNS) from failure
    found = "could not be made: losses or gradients are not finite for dummy rows and random parameters"
    raise PrivacyError("check", found, "scale the inputs, see the range of labels, guard logarithms, roots, divisions")


def quote(error: Exception) -> str:
    """How a message tells another's error."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return text if isinstance(error, PrivacyError) else f"{type(error).__name__}: {text}"


def _telling(trial: Trial, outcome: Outcome) -> Trial:
    """Refuses a trial in which nothing could be seen."""
    if not any(bool(g.any()) for g in outcome.gradients):
        raise PrivacyError("model", "no trainable parameter gets a gradient", "let the loss depend on one that is")
    if all(same(x[0], y[0]) for x, y in zip(trial.rows, trial.spare, strict=True)):
        raise PrivacyError("check", "could not be made: the rows are all alike", "give two rows that differ")
    return trial


def _one_each(values: Any, n: int) -> Tensor:
    if not isinstance(values, Tensor):
        raise PrivacyError("loss", f"gives a {type(values).__name__}", "give a tensor with one value per example")
    shape, summed = tuple(values.shape), "sum over the outputs, values.flatten(1).sum(1), for one value per example"
    whole = "gives one number for the whole batch: it averages or sums over the examples"
    for wrong, found, remedy in (
        (not shape, whole, 'use reduction="none"'),
        (len(shape) > 1, f"gives shape {shape} for {n} examples", summed),
        (shape != (n,), f"gives {values.numel()} values for {n} examples", "give one value per example"),
        (not values.is_floating_point(), f"gives {values.dtype}", "give floating-point values"),
        (not values.requires_grad, "has no gradient to a trainable parameter", "detach nothing, and train a parameter"),
    ):
        if wrong:
            raise PrivacyError("loss", found, remedy)
    return values


def _with_row(rows: Tensor, j: int, row: Tensor | float) -> Tensor:
    changed = rows.clone()
    changed[j] = row
    return changed
