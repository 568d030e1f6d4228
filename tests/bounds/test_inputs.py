"""Bad input is refused before any release, by slot, finding and remedy; nothing half-written stays behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small import Recorder, mlp, plan_of
from torch import Tensor, nn

import quietgrad as qg
from quietgrad.stream import Purpose, Stream

G = torch.Generator().manual_seed(1)
X, Y = torch.randn(40, 4, generator=G), torch.randint(3, (40,), generator=G)
SGD = torch.optim.SGD


@pytest.fixture(autouse=True)
def no_noise_drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test of this file may see noise drawn."""
    drawn: list[int] = []
    normals, uniforms = Stream.normals, Stream.uniforms
    monkeypatch.setattr(Stream, "normals", lambda self, *a: drawn.append(1) or normals(self, *a))

    def watched(self: Stream, purpose: Purpose, *rest: int) -> Tensor:
        drawn.extend([1] * (purpose == Purpose.NOISE))
        return uniforms(self, purpose, *rest)

    monkeypatch.setattr(Stream, "uniforms", watched)
    yield
    assert not drawn


def refused(found: str, act: Callable[[], Any]) -> None:
    """A PrivacyError with its three parts, and nothing else."""
    with pytest.raises(qg.PrivacyError, match=found) as error:
        act()
    assert error.value.slot and error.value.found and error.value.remedy
    assert str(error.value) == f"{error.value.slot}: {error.value.found}; {error.value.remedy}."


def began(data: Any = (X, Y), model: nn.Module | None = None, loss: Any = None, **options: Any) -> Callable[[], None]:
    """A run that is started and driven: the refusal must come before its first release."""

    def act() -> None:
        used = model or mlp()
        given = {"loss": loss or qg.losses.CrossEntropy()} if "forward" not in options else {}
        for batch in plan_of().start(used, Recorder(used.parameters()), **given, **options).batches(data):
            raise AssertionError(f"{batch} came")

    return act


def changed(t: Tensor, value: float, at: int = 33) -> Tensor:
    t = t.clone()
    t.view(len(t), -1)[at, 0] = value
    return t


class Wild(nn.Module):
    """Outputs of a wrong form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unsqueeze(2)


TORCHS = nn.CrossEntropyLoss(reduction="none")
DATA: dict[str, tuple[str, Callable[[], None]]] = {
    "far too few rows": ("the data has 20 rows, the plan says 40", began((X[:20], Y[:20]))),
    "far too many rows": ("the data has 80 rows", began((torch.cat([X, X]), torch.cat([Y, Y])))),
    "no rows": ("empty", began((X[:0], Y[:0]))),
    "tensors of other lengths": (r"shapes \(40, 4\), \(39,\)", began((X, Y[:39]))),
    "NaN in the data": ("NaN or infinity", began((changed(X, math.nan), Y))),
    "infinity in the data": ("NaN or infinity", began((changed(X, math.inf), Y))),
    "NaN in the targets": ("NaN or infinity", began((X, changed(torch.ones(40, 3), math.nan)))),
    "a class too large": ("targets run from 0 to 3, the model has 3 outputs", began((X, changed(Y, 3)))),
    "a class below zero": ("targets run from -1", began((X, changed(Y, -1)))),
    "a class too large for torch's loss": ("out of bounds", began((X, changed(Y, 7)), loss=TORCHS)),
    "class numbers as floats": (r"floating targets have shape \(40,\)", began((X, Y.float()))),
    "class numbers as floats for torch's loss": ("target dtype|Float", began((X, Y.float()), loss=TORCHS)),
    "probabilities of other classes": (r"floating targets have shape \(40, 5\)", began((X, torch.ones(40, 5) / 5))),
    "class numbers in a column": (r"class numbers have shape \(40, 1\)", began((X, Y[:, None]))),
    "whole numbers where floats are due": ("loss|model", began((X, Y), loss=nn.MSELoss(reduction="none"))),
    "targets in a tuple": ("targets are a tuple", began((X, (Y, Y)))),
    "inputs too wide": ("shapes cannot be multiplied|fails", began((torch.ones(40, 5), Y))),
    "whole numbers as inputs": ("dtype|fails", began((torch.ones(40, 4, dtype=torch.int64), Y))),
    "double inputs for a float model": ("dtype|fails", began((X.double(), Y))),
    "outputs that are no matrix": (r"wants outputs \(n, classes\)", began(model=Wild())),
    "one tensor where pairs are due": ("not \\(inputs, targets\\)", began(X)),
    "three tensors where pairs are due": ("not \\(inputs, targets\\)", began((X, Y, Y))),
    "a dict where pairs are due": ("not \\(inputs, targets\\)", began({"x": X, "y": Y})),
    "batch norm in training": ("batch norm", began(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))),
    "a forward that gives a mean": ("one number", began(forward=lambda m, b: TORCHS(m(b[0]), b[1]).mean())),
    "a forward that gives no tensor": ("float|tensor", began(forward=lambda m, b: 1.0)),
    "a loss that has nothing to train": ("gradient", began(forward=lambda m, b: b[0].sum(1))),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_data_that_does_not_fit_is_refused(kind: str) -> None:
    """Before the first batch."""
    refused(*DATA[kind])


def starts(optimizer: Callable[[nn.Module], Any], model: Callable[[], nn.Module] = mlp) -> Callable[[], Any]:
    def act() -> Any:
        used = model()
        return plan_of().start(used, optimizer(used), loss=qg.losses.CrossEntropy())

    return act


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def broken() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    return model


def whole_numbers() -> nn.Module:
    model = mlp()
    model.counts = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


OPTIMIZERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LBFGS": ("LBFGS evaluates the loss by itself", starts(lambda m: torch.optim.LBFGS(m.parameters()))),
    "a parameter outside": ("it leaves out 2.weight, 2.bias", starts(lambda m: SGD(m[0].parameters(), 0.1))),
    "another model's parameter": ("not the model's", starts(lambda m: SGD([*m.parameters(), nn.Parameter(X)], 0.1))),
    "another model's parameters": ("not the model's", starts(lambda m: SGD(mlp().parameters(), 0.1))),
    "nothing trainable": ("nothing is trainable", starts(lambda m: SGD(m.parameters(), 0.1), frozen)),
    "NaN in a parameter": ("0.weight holds NaN", starts(lambda m: SGD(m.parameters(), 0.1), broken)),
    "a complex parameter": ("complex64", starts(lambda m: SGD(m.parameters(), 0.1), whole_numbers)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_does_not_fit_is_refused(kind: str) -> None:
    """At the start."""
    refused(*OPTIMIZERS[kind])


def test_a_closure_is_seen_through_what_wraps_an_optimizers_step() -> None:
    """A scheduler's or a profiler's wrapper hides neither LBFGS nor spoils SGD."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused("LBFGS", lambda: plan_of().start(model, optimizer, loss=qg.losses.CrossEntropy()))
    plain = SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    plan_of().start(model, plain, loss=qg.losses.CrossEntropy())


NUMBERS = (0, -1, -0.5, math.nan, math.inf, "1", None, True)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_numbers_that_are_not_positive_and_finite_are_refused(number: Any) -> None:
    """Epsilon, delta, clip, multiplier, sizes and lengths: zero, negative, NaN, infinite, no number at all."""
    sizes = {"examples": 100, "batch_size": 10}
    refused("radius", lambda: qg.Clip(number))
    refused("radius", lambda: qg.dp_sgd(**sizes, steps=3, clip=number))
    if number is not None and number != 0:
        refused("multiplier", lambda: qg.Gaussian(number))
    if number != math.inf:
        refused("epsilon|budget", lambda: qg.dp_sgd(**sizes, steps=3).calibrate(epsilon=number, delta=1e-5))
    if number is not None:
        refused("delta", lambda: qg.dp_sgd(**sizes, steps=3).calibrate(epsilon=1.0, delta=number))
        refused("delta", lambda: qg.dp_sgd(**sizes, steps=3, noise_multiplier=1.0).epsilon(number))
        refused("epochs", lambda: qg.dp_sgd(**sizes, epochs=number))
    for name in ("examples", "batch_size", "steps"):
        refused(name, lambda name=name: qg.dp_sgd(**(sizes | {"steps": 3, name: number})))  # type: ignore[misc]


def test_a_plan_without_noise_does_not_train() -> None:
    """A multiplier of zero has no guarantee: refused at the start, unless it is a study."""
    model, plan = mlp(), qg.dp_sgd(examples=40, batch_size=8, steps=3, noise_multiplier=0.0)
    assert plan.status == "none"
    refused("no guarantee", lambda: plan.start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy()))
    qg.study(plan).start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy())


def test_a_plan_without_multiplier_loss_or_length_does_not_train() -> None:
    """What was never set is named."""
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    plan = qg.dp_sgd(examples=40, batch_size=8, steps=3)
    refused(
        "multiplier is not set", lambda: plan.start(model, optimizer, loss=qg.losses.CrossEntropy()).batches((X, Y))
    )
    refused("no loss", lambda: plan_of().start(model, optimizer))
    refused("both", lambda: plan_of().start(model, optimizer, loss=TORCHS, forward=lambda m, b: b))
    refused("one of the two", lambda: qg.dp_sgd(examples=40, batch_size=8))
    refused("one of the two", lambda: qg.dp_sgd(examples=40, batch_size=8, steps=3, epochs=2))


def test_sizes_that_cannot_be_are_refused() -> None:
    """A batch larger than the data, a delta that is no guarantee, a radius that float32 cannot sum."""
    refused("batch_size 41 exceeds examples 40", lambda: qg.dp_sgd(examples=40, batch_size=41, steps=3))
    refused("delta", lambda: qg.dp_sgd(examples=40, batch_size=8, steps=3).calibrate(epsilon=1.0, delta=0.025))
    for radius in (1e-31, 1e31, 5e-324):
        refused("radius", lambda radius=radius: qg.Clip(radius))  # type: ignore[misc]


def test_a_few_rows_more_or_fewer_are_a_neighbouring_data_set() -> None:
    """Under add-or-remove the data may hold a little more or less than stated, and nothing is said."""
    for rows in (36, 39, 41, 44):
        model = mlp()
        data = torch.cat([X, X])[:rows], torch.cat([Y, Y])[:rows]
        plan_of().start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy()).batches(data)


def test_a_refusal_leaves_model_data_and_folder_as_they_were(tmp_path: Path) -> None:
    """Weights, buffers (also of the layer that is refused), gradients, the data; and the folder serves the next run."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x = X.clone()
    with pytest.raises(qg.PrivacyError, match="batch norm"):
        began((x, Y), model)()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()) and torch.equal(x, X)
    assert all(p.grad is None for p in model.parameters())
    folder = tmp_path / "run"
    refused("leaves out", lambda: plan_of().start(model, SGD(model[0].parameters(), 0.1), loss=TORCHS, folder=folder))
    assert not folder.exists()
    fixed = qg.fix(model)
    plan_of().start(fixed, SGD(fixed.parameters(), 0.1), loss=TORCHS, folder=folder).close()


def test_a_step_on_what_is_no_batch_is_refused() -> None:
    """Tuples, lists, None: no sampler drew them."""
    model = mlp()
    run = plan_of().start(model, SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy())
    for wrong in ((X[:8], Y[:8]), [X], None, X):
        refused("was not drawn by this run", lambda wrong=wrong: run.step(wrong))  # type: ignore[misc, arg-type]
