"""Small models by name, for the command line and the examples. Each treats examples independently."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping

from torch import nn

from quietgrad.errors import PrivacyError


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer. Bounded activations lose less to the clip than ReLU (Papernot et al. 2021)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.Tanh(), nn.Linear(hidden, classes))


MODELS: Mapping[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": mlp, "logistic": logistic}


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model of that name."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise PrivacyError("model", f"{name!r} is unknown", f"{guess}give one of {', '.join(MODELS)}")
    return MODELS[name](shape, classes)
