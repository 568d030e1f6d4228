"""Small models and data, and one step of a plan in pieces: what the tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import quietgrad as qg
from quietgrad.batches import Chunk, pad, rows_of, tree_map
from quietgrad.gradients import Chain, Gradients, Rows
from quietgrad.plan import Plan
from quietgrad.step import private_sum
from quietgrad.stream import Stream
from quietgrad.values import Context, Nobody, PerExample, Release, Sum
from quietgrad.watch import unwatched

CPU = torch.device("cpu")


class Recorder(torch.optim.Optimizer):
    """Moves nothing, keeps every gradient it is given."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[list[Tensor | None]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in held])

    def flat(self) -> Tensor:
        """(steps, coordinates)."""
        return torch.stack([torch.cat([g.flatten() for g in step if g is not None]) for step in self.seen])


class Tied(nn.Module):
    """Tokens in, tokens out, by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


class Words(nn.Module):
    """Mean of embeddings, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(30, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer's last state, then a layer."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cell, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


class TwoInputs(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) * self.right(b)


def mlp() -> nn.Module:
    """4 numbers to 3 classes."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    """6 x 6 images to 3 classes."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Tensor], int]] = {
    "mlp": (mlp, lambda g, n: torch.randn(n, 4, generator=g, dtype=torch.float64), 3),
    "cnn": (cnn, lambda g, n: torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64), 3),
    "lstm": (Recurrent, lambda g, n: torch.randn(n, 5, 4, generator=g, dtype=torch.float64), 3),
    "tied": (Tied, lambda g, n: torch.randint(11, (n, 7), generator=g), 11),
    "embedding": (Words, lambda g, n: torch.randint(30, (n, 4), generator=g), 3),
}


def world(kind: str, count: int = 40, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model, and (inputs, class numbers) of `count` examples; the same at every call."""
    make, inputs, classes = MODELS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = make().to(dtype)
    g = torch.Generator().manual_seed(7)
    x = inputs(g, count)
    return model, (x.to(dtype) if x.is_floating_point() else x, torch.randint(classes, (count,), generator=g))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The trainable ones."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def context(plan: Plan, step: int = 0) -> Context:
    """A context of a plan, without learning rates."""
    return Context(step, plan.sample.epoch(step), {}, plan.noise_scale, plan.sample.divisor)


def plan_of(examples: int = 40, batch_size: int = 8, steps: int = 5, clip: float = 1.0, noise: float = 1.0) -> Plan:
    """DP-SGD with a stated multiplier."""
    return qg.dp_sgd(examples=examples, batch_size=batch_size, steps=steps, clip=clip, noise_multiplier=noise)


def chunks_of(tree: Any, size: int) -> list[Chunk]:
    """A batch in padded chunks."""
    starts = range(0, rows_of(tree), size)
    return [pad(tree_map(lambda t, a=a: t[a : a + size], tree), size, CPU, k) for k, a in enumerate(starts)]


def gradients_of(model: nn.Module, loss: Any = None, seed: int = 1) -> Gradients:
    """The engine before any choice: the loop."""
    return Gradients(Chain(model, loss or qg.losses.CrossEntropy()), Stream(seed))


def sum_of(
    plan: Plan,
    model: nn.Module,
    tree: Any,
    size: int,
    engine: Gradients | None = None,
    watch: Callable[[PerExample], None] = unwatched,
) -> Sum:
    """The private sum of one batch."""
    engine = engine or gradients_of(model)
    return private_sum(plan, engine, parameters_of(model), chunks_of(tree, size), context(plan), engine.stream, watch)


def rows_from(tensors: dict[str, Tensor], real: Tensor | None = None) -> Rows:
    """Given gradients, one row an example, as PerExample."""
    count = len(next(iter(tensors.values())))
    shapes = {name: torch.zeros(t.shape[1:], dtype=t.dtype) for name, t in tensors.items()}
    return Rows(shapes, tensors, torch.zeros(count), torch.ones(count, dtype=torch.bool) if real is None else real)


def norm(tensors: dict[str, Tensor] | Any) -> float:
    """Over all parameters together, in float64; infinite where it is not a number."""
    largest = max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)
    if not largest < float("inf"):
        return float("inf")
    unit = largest or 1.0
    return unit * sum(float((t.double() / unit).square().sum()) for t in tensors.values()) ** 0.5


def noise_only(plan: Plan, parameters: dict[str, Tensor], stream: Stream, steps: Sequence[int]) -> list[Release]:
    """Releases of empty batches."""
    released = []
    for step in steps:
        at = context(plan, step)
        total = plan.bound(Nobody(parameters), at).sum()
        released.append(plan.noise(total, plan.noise.begin(step), at, stream)[0])
    return released


def flat(release: Release) -> Tensor:
    """A release as one vector."""
    return torch.cat([t.flatten() for t in release.tensors.values()]).double()
