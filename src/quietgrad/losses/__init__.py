"""Losses: one value per example. A loss may ask for the public Context and for taps; it never sees another example."""

from quietgrad.losses.labelled import SAE, SSE, CrossEntropy, Focal, Huber, Labelled
from quietgrad.losses.loss import Loss, Tap
from quietgrad.losses.own import Forward, Own
from quietgrad.losses.penalty import Fading, Multiplied, Penalty, Steady
from quietgrad.losses.tailored import Tailored

__all__ = [
    "Loss", "Labelled", "CrossEntropy", "Focal", "SSE", "SAE", "Huber", "Tailored", "Own", "Forward",
    "Penalty", "Fading", "Steady", "Multiplied", "Tap",
]  # fmt: skip
