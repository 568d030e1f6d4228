"""Watch: private figures for the person who trains (mean loss, share clipped, quantiles of norms). Never released.

They go to `private/watch.jsonl` in the run's folder; certificate, export and standard output do not hold them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.stage import counted
from quietgrad.values import PerExample

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MARK = "PRIVATE: computed from the data without noise; not for release"


@final
@dataclass(frozen=True)
class Watch:
    """Look every `every` steps at figures over the steps in between."""

    every: int = 50

    def __post_init__(self) -> None:
        counted("watch", "every", self.every)


@final
@dataclass
class Watcher:
    """Gathers on the device; writes a line every `watch.every` steps, the only time it waits for the device."""

    watch: Watch
    folder: Path
    radius: float
    norms: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    real: list[Tensor] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where the figures are."""
        return self.folder / "private" / "watch.jsonl"

    def __call__(self, per_example: PerExample) -> None:
        self.norms.append(per_example.norms())
        self.losses.append(per_example.losses)
        self.real.append(per_example.real)

    def stepped(self, steps: int) -> None:
        """Called after each step, with the number of steps so far."""
        if steps % self.watch.every == 0:
            self.write(steps)

    def write(self, steps: int) -> None:
        """Appends the figures since the last time."""
        real = torch.cat(self.real) if self.real else torch.zeros(0, dtype=torch.bool)
        if not bool(real.any()):
            self.forget()
            return
        norms, losses = torch.cat(self.norms)[real], torch.cat(self.losses)[real]
        dead = norms == 0  # what is not finite counts as zero: rule 12
        live = norms[:: max(1, len(norms) // 100_000)]
        figures: dict[str, Any] = {
            "private": MARK,
            "steps": steps,
            "examples": int(real.sum()),
            "mean_loss": float(losses[losses.isfinite()].double().mean()) if bool(losses.isfinite().any()) else None,
            "share_clipped": float((norms > self.radius).double().mean()),
            "share_zero_or_not_finite": float(dead.double().mean()),
            "norm_quantiles": {str(q): float(live.quantile(q)) for q in QUANTILES},
        }
        self.forget()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(json.dumps(figures) + "\n")
        except OSError as error:
            raise PrivacyError(
                "watch", f"{self.path} cannot be written ({error})", "make room on the disk, or watch nothing"
            ) from error

    def forget(self) -> None:
        """Empties the buffers."""
        self.norms.clear()
        self.losses.clear()
        self.real.clear()

    def figures(self) -> list[dict[str, Any]]:
        """What was written so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def unwatched(per_example: PerExample) -> None:
    """Looks at nothing."""
