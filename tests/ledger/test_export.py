"""Export: what may be published, and nothing else."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.ledger.small import DATA, begin, contents, poisson, room, train
from torch import Tensor, nn

import quietgrad as qg
from quietgrad import Certificate, PrivacyError

FILES = {"model.safetensors", "certificate.json", "certificate.html"}


class Scaled(nn.Module):
    """A buffer that scales the inputs, a frozen layer, a trained one."""

    scale: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 0.1 + 0.2, -0.0]))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.still, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.still(x * self.scale).tanh())


class TiedWeights(nn.Module):
    """One matrix, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Noted(nn.Linear):
    """Puts something of its own beside the weights."""

    def get_extra_state(self) -> object:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def bits(t: Tensor) -> bytes:
    return t.contiguous().numpy().tobytes()


def test_weights_and_certificate(tmp_path: Path) -> None:
    """Three files: the weights as the model holds them, bit for bit, and the certificate of what was released."""
    run = train(begin(), 12)
    folder = run.export(tmp_path / "published" / "model")
    assert set(contents(folder)) == FILES
    kept = load_file(folder / "model.safetensors")
    state = run.model.state_dict()
    assert kept.keys() == state.keys() and all(bits(kept[name]) == bits(state[name]) for name in state)
    read = Certificate.from_json((folder / "certificate.json").read_text())
    assert read.steps == 12 and read.epsilon == run.spent().epsilon and read.status == "proved"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"certificate": "certificate.json", "status": "proved"}
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o600 == 0o600 for p in folder.iterdir())


@pytest.mark.parametrize("status", ["seeded", "none"])
def test_what_must_not_be_published_says_so(status: str, tmp_path: Path) -> None:
    """A seeded run or a study is exported with its status in both files and no epsilon."""
    run = train(
        begin(plan=qg.study(poisson()) if status == "none" else None, seed=1 if status == "seeded" else None), 2
    )
    folder = run.export(tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["status"] == status
    read = json.loads((folder / "certificate.json").read_text())
    assert read["status"] == status and read["epsilon"] is None


def test_what_stood_still_is_bit_equal(tmp_path: Path) -> None:
    """Buffers and frozen parameters are those of the start, to the bit; the trained ones moved."""
    model = Scaled()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    folder = train(begin(model=model)).export(tmp_path)
    kept = load_file(folder / "model.safetensors")
    assert kept.keys() == before.keys() == {"scale", "still.weight", "still.bias", "head.weight", "head.bias"}
    for name in ("scale", "still.weight", "still.bias"):
        assert bits(kept[name]) == bits(before[name])
    assert not torch.equal(kept["head.weight"], before["head.weight"])


@pytest.mark.parametrize("name", ["scale", "hidden", "still.bias", "head.late"])
@pytest.mark.parametrize("change", ["one bit", "a sign of zero", "another shape"])
def test_what_moved_is_refused(name: str, change: str, tmp_path: Path) -> None:
    """A buffer (persistent or not) or a frozen parameter that moved, or is new, saw data: nothing is written."""
    model = Scaled()
    run = train(begin(model=model), 3)
    if name == "head.late":
        model.head.register_buffer("late", torch.zeros(2))
    elif change == "another shape":
        if name == "still.bias":
            model.still.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        else:
            model.register_buffer(name, torch.ones(2))
    else:
        with torch.no_grad():
            t = model.get_parameter(name) if "." in name else model.get_buffer(name)
            if change == "one bit":
                t.flatten()[:1].view(torch.int32).add_(1)
            else:
                t.copy_(torch.where(t == 0, -t, t) if name == "scale" else t.nextafter(torch.zeros(())))
    with pytest.raises(PrivacyError, match=f"{name} changed during training") as found:
        run.export(tmp_path / "model")
    assert found.value.slot == "export" and not (tmp_path / "model").exists()


def test_what_moved_over_a_resume_is_refused(tmp_path: Path) -> None:
    """What stood still is measured against the start of the run, not of the process."""
    model = Scaled()
    run = train(begin(tmp_path / "run", model=model), 3)
    model.scale.mul_(2)
    run.save()
    run.close()
    again = begin(tmp_path / "run", model=Scaled(), resume=True)
    with pytest.raises(PrivacyError, match="scale changed"):
        again.export(tmp_path / "model")


def test_tied_weights_load_back(tmp_path: Path) -> None:
    """A parameter with two names is written under both, and the model that is built anew takes it."""
    model = TiedWeights()
    run = train(begin(model=model, loss=lambda o, t: o.square().sum(-1)))
    folder = run.export(tmp_path)
    again = TiedWeights()
    again.load_state_dict(load_file(folder / "model.safetensors"))
    assert again.one.weight is again.two.weight and torch.equal(again.one.weight, model.one.weight)
    assert torch.equal(again(DATA[0]), model(DATA[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights keep their precision; views and transposed weights are written as they are."""
    model = nn.Linear(3, 2).to(dtype)
    model.weight = nn.Parameter(torch.randn(3, 2, dtype=dtype).t())
    run = begin(model=model)
    for batch in run.batches((DATA[0].to(dtype), DATA[1])):
        run.step(batch)
    kept = load_file(run.export(tmp_path) / "model.safetensors")
    assert kept["weight"].dtype == dtype and torch.equal(kept["weight"], model.weight)


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    """No watch figure, no loss, no norm, no key, no name of the run's folder, no optimizer state."""
    run = begin(tmp_path / "secret-run", watch=qg.Watch(3))
    train(run)
    run.save()
    figures = [
        json.loads(line) for line in (tmp_path / "secret-run" / "private" / "watch.jsonl").read_text().splitlines()
    ]
    assert len(figures) >= 6 and figures[0]["mean_loss"] > 0
    folder = run.export(tmp_path / "model")
    assert set(contents(folder)) == FILES
    text = b"".join(contents(folder).values())
    for line in figures:
        for figure in (line["mean_loss"], line["share_clipped"], *line["norm_quantiles"].values()):
            if len(str(figure)) > 8:
                assert str(figure).encode() not in text
    for word in (b"mean_loss", b"norm_quantiles", b"share_clipped", b"PRIVATE", b"secret-run", b"momentum_buffer"):
        assert word not in text
    assert run.stream._key is not None and run.stream._key not in text
    kept = load_file(folder / "model.safetensors")
    assert set(kept) == {"weight", "bias"}


def test_no_export_into_the_runs_folder(tmp_path: Path) -> None:
    """What may be published is never put beside what may not."""
    run = train(begin(tmp_path / "run"), 3)
    before = contents(tmp_path)
    with pytest.raises(PrivacyError, match="holds the run's secrets"):
        run.export(tmp_path / "run")
    assert contents(tmp_path) == before


def test_extra_state_is_refused(tmp_path: Path) -> None:
    """A model that keeps more than parameters and buffers could keep anything."""
    with pytest.raises(PrivacyError, match="neither a parameter nor a buffer"):
        train(begin(model=Noted(3, 2)), 2).export(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_no_room(tmp_path: Path) -> None:
    """On a full disk an export that was there stays whole, no temporary is left, and weights never lie alone."""
    run = train(begin(), 3)
    folder = run.export(tmp_path / "model")
    before = contents(folder)
    train(run, 6)
    with room(20), pytest.raises(PrivacyError, match=r"export.*cannot be written"):
        run.export(folder)
    assert contents(folder) == before
    with room(20), pytest.raises(PrivacyError, match=r"export.*nothing was there before"):
        run.export(tmp_path / "other")
    assert not contents(tmp_path / "other")
    assert contents(run.export(folder))["model.safetensors"] != before["model.safetensors"]


def test_export_again_replaces(tmp_path: Path) -> None:
    """A later export takes the place of an earlier one, certificate and weights together."""
    run = train(begin(), 3)
    run.export(tmp_path)
    train(run)
    run.export(tmp_path)
    assert json.loads((tmp_path / "certificate.json").read_text())["steps"] == 20
    assert torch.equal(load_file(tmp_path / "model.safetensors")["bias"], run.model.state_dict()["bias"])
