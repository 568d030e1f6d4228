"""Keep: a run's folder, where journal and checkpoint stand side by side. What lets a run survive a crash.

The journal says how much is spent, the checkpoint where the weights are; neither is believed without the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from quietgrad import checkpoint
from quietgrad.errors import PrivacyError
from quietgrad.journal import Journal
from quietgrad.plan import Plan
from quietgrad.trained import shapes, trains


@final
class Keeper:
    """Journal and checkpoint of one run, which is known by its plan, model, optimizer and seed."""

    def __init__(
        self, folder: Path, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int | None
    ) -> None:
        self.folder, self.plan, self.model, self.optimizer, self.seed = folder.absolute(), plan, model, optimizer, seed
        self.saved = False  # whether there is something to resume from
        self._journal: Journal | None = None

    @property
    def journal(self) -> Journal:
        """The open journal."""
        assert self._journal is not None
        return self._journal

    @property
    def run(self) -> str:
        """The run's id."""
        return str(self.journal.header["run"])

    def begin(self) -> None:
        """A new run in the folder."""
        facts = {"plan": self.plan.to_json(), "randomness": "secure" if self.seed is None else "seeded"}
        self._journal = Journal.create(self.folder, facts, self._block)

    def resume(self, device: torch.device) -> dict[str, Any]:
        """Puts model and optimizer where the checkpoint left them, and gives the rest of it back."""
        self._journal = Journal.reopen(self.folder, self._block)
        try:
            kept = checkpoint.load(self.folder, device)
            self._restore(kept)
            self._journal.resumed()
            checkpoint.tidy(self.folder)
        except BaseException:
            self._journal.close()
            raise
        self.saved = True
        return kept

    def reserve(self, step: int, rest: Mapping[str, Any]) -> None:
        """Before a release: it counts as spent, on disk, and there is a checkpoint to go on from."""
        if not self.saved:
            self.write(rest)
        self.journal.reserve(step, self.plan.steps)

    def write(self, rest: Mapping[str, Any]) -> Path:
        """The checkpoint: what is here, and the `rest` that the run remembers."""
        path = checkpoint.save(self.folder, {**self._here(), "journal": self.journal.mark(), **rest, "format": 1})
        self.saved = True
        return path

    def close(self) -> None:
        """Lets go of the folder."""
        if self._journal is not None:
            self._journal.close()

    @property
    def _block(self) -> int:
        return max(1, self.plan.steps // 1000)

    def _here(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {
            "run": self.run,
            "plan": self.plan.to_json(),
            "seed": self.seed,
            "shapes": shapes(state),
            "trains": trains(self.model, self.optimizer),
            "model": state,
            "optimizer": self.optimizer.state_dict(),
        }

    def _restore(self, kept: Mapping[str, Any]) -> None:
        others = {
            "run": ("another run than the journal beside it", "restore the whole folder"),
            "plan": ("another plan", "start with the plan that the run began with"),
            "seed": ("a run with another seed, or with none", "resume with the seed it began with"),
            "shapes": ("another model", "build the same model"),
            "trains": ("another optimizer", "build the same one, over the same parameters in the same order"),
        }
        checkpoint.belongs(kept, self._here(), others)
        if not self.journal.follows(kept["journal"]):
            found = "the journal beside it is older, or another copy's"
            raise PrivacyError("checkpoint", found, "restore the whole folder")
        if self.journal.reserved and kept["rows"] is None:
            found = "it is older than the first batch, whose order it does not know"
            raise PrivacyError("checkpoint", found, "take a later one")
        try:
            self.optimizer.load_state_dict(kept["optimizer"])
        except (ValueError, KeyError) as error:
            found = f"it belongs to another optimizer ({error})"
            raise PrivacyError("checkpoint", found, "build the same optimizer") from error
        self.model.load_state_dict(kept["model"])
