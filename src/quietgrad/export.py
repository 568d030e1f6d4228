"""Export: what may be published, and nothing else."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from quietgrad import checkpoint, journal
from quietgrad.checkpoint import write_whole
from quietgrad.errors import PrivacyError

if TYPE_CHECKING:
    from quietgrad.certificate import Certificate

WEIGHTS, JSON, PAGE = "model.safetensors", "certificate.json", "certificate.html"


def write(folder: Path, model: nn.Module, changed: list[str], certificate: Certificate) -> Path:
    """Weights and certificate. Buffers or frozen parameters that moved during training are refused: they saw data."""
    from safetensors.torch import save

    from quietgrad.report import certificate_page

    if changed:
        raise PrivacyError(
            "export",
            f"{', '.join(changed[:3])} changed during training, outside the noise",
            "take a layer without such state: qg.fix(model)",
        )
    if (folder / journal.NAME).exists() or (folder / checkpoint.NAME).exists():
        raise PrivacyError("export", f"{folder} holds the run's secrets", "take another folder, which may be published")
    state = model.state_dict()
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    odd = [name for name, t in state.items() if name not in known or not isinstance(t, Tensor)]
    if odd:
        found = f"{odd[0]} is neither a parameter nor a buffer, so nobody knows what it saw"
        raise PrivacyError("export", found, "keep it out of the state dict")
    weights = {name: t.detach().cpu().clone().contiguous() for name, t in state.items()}
    facts = {"certificate": JSON, "status": certificate.status}
    files = {  # the certificate first: weights never lie there without one
        JSON: certificate.to_json().encode(),
        PAGE: certificate_page(certificate).encode(),
        WEIGHTS: save(weights, facts),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, methodcaller("write", content), 0o644, "export")
    return folder
