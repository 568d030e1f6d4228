"""Views: the gradient of an example as the mean over transforms of it (augmentation multiplicity)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from quietgrad.batches import leaves, rows_of, tree_map
from quietgrad.errors import PrivacyError
from quietgrad.fresh import PUBLIC, drawing
from quietgrad.smooth import Plain, Smooth, View
from quietgrad.stage import counted, digest, qualified
from quietgrad.stream import Stream
from quietgrad.values import Context, Tensors


@final
class Transformed(View):
    """A view whose example is transformed, alone."""

    def __init__(self, transform: Callable[[Any], Any], inner: View, share: float) -> None:
        self.transform, self.inner, self.share = transform, inner, share

    def __call__(self, parameters: Tensors, example: Any) -> tuple[Tensors, Any]:
        return self.inner(parameters, self.transform(example))


@final
@dataclass(frozen=True)
class Views(Smooth):
    """g(x) = 1/K sum_k grad L(theta, T_k(x)): augmentation multiplicity, T_k the k-th draw of `transform`. With
    `inner=RandomizedSmoothing(samples=K)` view k has the k-th perturbation too: K views, not K squared.

    **Guarantee**: a transform is given one example at a time (a batch of one row: inputs and targets, or what a forward
    gets) and the bound comes after the mean. **Caller's duty**: it draws from torch's generator, which is filled from
    the run's stream, and remembers nothing; one that does not repeat itself on a few rows is refused. *Why*: De et al.
    2022, who average 16 views.
    """

    transform: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)
    samples: int = 16
    inner: Smooth = field(default_factory=Plain)
    name: str = ""  # of the transform: filled in, as the digest is, unless one is stated
    digest: str = ""

    def __post_init__(self) -> None:
        counted(self.slot, "samples", self.samples)
        if not isinstance(self.inner, Smooth) or self.inner.count not in (1, self.samples):
            found = self.inner.says if isinstance(self.inner, Smooth) else f"inner is {type(self.inner).__name__}"
            raise PrivacyError(self.slot, f"{self.samples} views within {found}", f"give 1 or {self.samples} views")
        if not self.inner.ours:
            found = f"{type(self.inner).__name__} is the user's own, and stands inside Views"
            raise PrivacyError(self.slot, found, "write one stage that does both, whose claim the plan can state")
        if self.transform is not None:
            if not callable(self.transform):
                raise PrivacyError(self.slot, f"transform is {type(self.transform).__name__}", "give a function")
            object.__setattr__(self, "name", qualified(self.transform))
            object.__setattr__(self, "digest", self.digest or digest(self.transform))
        elif not self.name:
            raise PrivacyError(self.slot, "there is no transform", "give a function from example to example")

    @property
    def says(self) -> str:
        inner = "" if isinstance(self.inner, Plain) else f", with {self.inner.says}"
        return f"Views: {self.samples} of each example by {self.name} (the user's; {self.digest[:12]}){inner}"

    @property
    def count(self) -> int:
        return self.samples

    def admits(self, optimizer: Optimizer) -> None:
        self._given()
        self.inner.admits(optimizer)

    def tries(self, examples: Sequence[Any]) -> None:
        first = self._tried(examples[0])
        for example in examples[1:]:
            self._tried(example)
        again = self._tried(examples[0])
        alike = [x.shape == y.shape and torch.equal(x, y) for x, y in zip(first, again, strict=False)]
        if len(first) != len(again) or not all(alike):
            found = f"{self.name} gives an example another view after it has seen others"
            raise PrivacyError(self.slot, found, "let it draw from torch's generator alone, and remember nothing")
        self.inner.tries(examples)

    def views(self, context: Context, stream: Stream, parameters: Tensors) -> Sequence[View]:
        transform, inner = self._given(), self.inner.views(context, stream, parameters)
        part = len(inner) / self.samples
        each = tuple(inner) * (self.samples // len(inner))  # the only one for all, or one for each
        return tuple(Transformed(transform, view, view.share * part) for view in each)

    def _tried(self, example: Any) -> list[Tensor]:
        transform = self._given()
        with drawing(PUBLIC, leaves(example)[0].device):
            try:
                made = transform(tree_map(torch.clone, example))
                rows, found = rows_of(made), leaves(made)
            except Exception as error:
                told = f"{self.name} fails on an example: {type(error).__name__}: {str(error).strip()[:160]}"
                raise PrivacyError(self.slot, told, "take and give a batch of one row, as the loss is given") from error
        if rows != 1:
            raise PrivacyError(
                self.slot, f"{self.name} makes {rows} rows of one", "give one row: samples says how many"
            )
        return found

    def _given(self) -> Callable[[Any], Any]:
        if self.transform is None:
            found = f"the plan knows {self.name} by name only"
            raise PrivacyError(self.slot, found, "give it: plan.replace(smooth=Views(transform, …))")
        return self.transform
