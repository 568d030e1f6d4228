"""The chain from a batch to one value per example: the model, then the loss (or the user's own forward)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from quietgrad.errors import PrivacyError
from quietgrad.gradients.taps import Taps
from quietgrad.losses import Forward, Loss, Tap
from quietgrad.values import Context, Tensors


class Chain(nn.Module):
    """Model and loss as one module, so that parameters are arguments and the model is never changed."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.read: tuple[str, ...] = ()  # the layers that the loss reads, known from the meeting on

    def forward(self, batch: Any, context: Context) -> Tensor:
        """(n,) values for a batch of n rows."""
        if isinstance(self.loss, Forward):
            return self.loss(self.model, batch, context)
        inputs, targets = self.pair(batch)
        if not self.loss.tapped:
            return self.loss(self.outputs(inputs), targets, context)
        outputs, taps = self.tapped(inputs)
        return self.loss(outputs, targets, context, taps)

    def outputs(self, inputs: Any) -> Any:
        """The model on inputs: one tensor, or several as positional or named arguments."""
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def tapped(self, inputs: Any) -> tuple[Any, list[Tap]]:
        """The model's outputs, and those of its linear layers and convolutions."""
        with Taps(self.model) as taps:
            outputs = self.outputs(inputs)
        return outputs, taps.seen

    @staticmethod
    def pair(batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            shape = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
            raise PrivacyError(
                "loss",
                f"a batch is a {shape}, not (inputs, targets)",
                "give pairs, or start(forward=f) with f(model, batch)",
            )
        return batch[0], batch[1]

    def values(self, parameters: Tensors, batch: Any, context: Context) -> Tensor:
        """(n,) values with other parameters in the model's place; a tied parameter is replaced at each of its uses."""
        values = functional_call(self, {f"model.{name}": p for name, p in parameters.items()}, (batch, context))
        if not isinstance(values, Tensor) or values.ndim != 1:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            hint = "use reduction='none'" if shape == () else "sum over the outputs of each example"
            raise PrivacyError("loss", f"the loss gave {shape}, not one value per example", hint)
        return values
