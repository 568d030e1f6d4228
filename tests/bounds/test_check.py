# ruff: noqa: NPY002
"""`check` refuses what mixes examples or remembers them, and names it; `fix` replaces what it can."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from quietgrad.errors import PrivacyError
from quietgrad.independence import check, fix, held, rule4
from quietgrad.independence import trial as trials

CE = nn.CrossEntropyLoss(reduction="none")
CLASSES = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fn(nn.Module):
    """A layer without parameters whose forward is a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def vectors(rows: int = 4, features: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, features, generator=g), torch.arange(rows) % CLASSES


def images(rows: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.rand(rows, 1, 8, 8, generator=g), torch.arange(rows) % CLASSES


def tokens(rows: int = 4, length: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randint(0, 20, (rows, length), generator=g), torch.arange(rows) % CLASSES


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, CLASSES))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(8 * 16, CLASSES),
    )  # fmt: skip


def refused(model: nn.Module, batch: Any, loss: Any = CE, **options: Any) -> PrivacyError:
    with pytest.raises(PrivacyError) as caught:
        check(model, batch, loss, **options)
    return caught.value


# What treats each example alone passes.


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=batch_first)
        self.first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)  # (n, length, 8)
        if self.first:
            return self.head(self.rnn(x)[0][:, -1])
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


class Attentive(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=batch_first)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class Tied(nn.Module):
    """A language model whose head is its embedding; values are summed over the positions by `next_token`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


class Experts(nn.Module):
    """Each row goes to one expert, and none is turned away."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = gates.argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(-1)
            out = out.index_add(0, rows, gates[rows, k, None] * expert(x[rows]))
        return out


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, CLASSES).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout()), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, CLASSES), nn.Embedding(20, CLASSES)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.one(x) + self.two(ids).sum(1)


def frozen_norm() -> nn.Module:
    model = mlp(nn.BatchNorm1d(8))
    model[2].eval()
    return model


def zero_head() -> nn.Module:
    model = mlp()
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    return model


GOOD: dict[str, tuple[nn.Module, Any]] = {
    "a CNN with dropout": (cnn(), images()),
    "one row": (cnn(), images(1)),
    "in eval mode": (cnn().eval(), images()),
    "BatchNorm in eval mode": (frozen_norm(), vectors()),
    "InstanceNorm": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(144, CLASSES)),
                     images()),
    "LayerNorm": (mlp(nn.LayerNorm(8)), vectors()),
    "weight norm": (nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, CLASSES)), vectors()),
    "LSTM, examples first": (Recurrent(True), tokens()),
    "LSTM, examples second": (Recurrent(False), tokens()),
    "LSTM, as long as the batch": (Recurrent(False), tokens(length=16)),
    "attention": (Attentive(), tokens()),
    "attention in eval mode": (Attentive().eval(), tokens()),
    "an encoder layer": (
        nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(),
                      nn.Linear(56, CLASSES)), tokens()),
    "one row of integers": (Attentive(), tokens(1)),
    "experts without capacity": (Experts(), vectors()),
    "dropout as a function": (mlp(Fn(lambda x: F.dropout(x, 0.5))), vectors()),
    "noise of its own": (mlp(Fn(lambda x: x + torch.randn_like(x))), vectors()),
    "random cut": (mlp(Fn(lambda x: x * (torch.rand(len(x), 1) < 0.5))), vectors()),
    "LoRA with B = 0": (Lora(), vectors()),
    "a head of zeros": (zero_head(), vectors()),
    "checkpointing": (Checkpointed(), vectors()),
    "autocast": (Autocast(), vectors()),
    "float64": (mlp().double(), (vectors()[0].double(), vectors()[1])),
    "bfloat16": (mlp().bfloat16(), (vectors()[0].bfloat16(), vectors()[1])),
    "inputs changed in place": (nn.Sequential(Fn(lambda x: x.mul_(2)), mlp(), nn.ReLU(inplace=True)), vectors()),
    "inputs as NumPy": (nn.Sequential(Fn(lambda x: torch.from_numpy(x.numpy() ** 2)), nn.Linear(6, CLASSES)),
                        vectors()),
    "a layer that refuses NaN": (mlp(Fn(lambda x: x if bool(x.isfinite().all()) else 1 / 0)), vectors()),
    "two inputs": (Two(), ((vectors()[0], tokens()[0]), tokens()[1])),
    "named inputs": (Two(), ({"ids": tokens()[0], "x": vectors()[0]}, tokens()[1])),
    "one-hot": (nn.Sequential(Fn(lambda i: F.one_hot(i, 20).float()), nn.Flatten(), nn.Linear(140, CLASSES)), tokens()),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_treats_each_example_alone_passes(name: str) -> None:
    check(*GOOD[name], CE)


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_any_size_passes(size: int) -> None:
    check(cnn(), images(), CE, size=size)


def test_forward_serves_everything_else() -> None:
    check(Tied(), tokens()[0], forward=next_token)
    check(Two(), {"x": vectors()[0], "ids": tokens()[0], "y": tokens()[1]},
          forward=lambda m, b: CE(m(b["x"], b["ids"]), b["y"]))  # fmt: skip
    check(nn.LSTM(6, CLASSES), (torch.randn(4, 3, 6), vectors()[1]),
          forward=lambda m, b: CE(m(b[0].transpose(0, 1))[0][-1], b[1]))  # fmt: skip


def test_a_forward_that_knows_the_model_by_another_way_is_tested_too() -> None:
    model = mlp(Fn(lambda x: x - x.mean(0)))
    assert "layer `2`" in str(refused(model, vectors(), forward=lambda _, b: CE(model(b[0]), b[1])))


def test_regression_with_float_targets() -> None:
    check(nn.Linear(6, 2), (vectors()[0], torch.rand(4, 2)), lambda o, t: F.mse_loss(o, t, reduction="none").sum(1))


def test_a_compiled_model_is_tested_as_it_was_written() -> None:
    check(torch.compile(mlp()), vectors(), CE)
    assert "layer `2` (Fn)" in str(refused(torch.compile(mlp(Fn(lambda x: x - x.mean(0)))), vectors()))
    nested = nn.Sequential(torch.compile(mlp(nn.BatchNorm1d(8))))
    assert "layer `0.2` (BatchNorm1d)" in str(refused(nested, vectors()))


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 5), features=st.integers(1, 9), size=st.integers(1, 33), dropout=st.sampled_from([0.0, 0.4]))
def test_perceptrons_pass_at_any_size(rows: int, features: int, size: int, dropout: float) -> None:
    model = nn.Sequential(nn.Linear(features, 7), nn.Dropout(dropout), nn.Tanh(), nn.Linear(7, CLASSES))
    check(model, vectors(rows, features), CE, size=size)


# What mixes is refused, by name.


class Centred(nn.Module):
    """Mixes in its own forward code, not in a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lower(x)
        return self.upper(hidden - hidden.mean(0))


class MixUp(nn.Module):
    def __init__(self, draw: Callable[[int], Any]) -> None:
        super().__init__()
        self.draw, self.body = draw, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(0.7 * x + 0.3 * x[self.draw(len(x))])


class Capacity(nn.Module):
    """Each expert serves the two rows that want it most."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for k, expert in enumerate(self.experts):
            rows = gates[:, k].topk(min(2, len(x))).indices
            out = out.index_add(0, rows, gates[rows, k, None] * expert(x[rows]))
        return out


class BackwardMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].detach().abs().mean()


def renormed(x: Tensor) -> Tensor:
    return x / x.detach().nan_to_num().norm()


MIXING: dict[str, tuple[nn.Module, Any, str]] = {
    "x - x.mean(0)": (mlp(Fn(lambda x: x - x.mean(0))), vectors(), "layer `2` (Fn)"),
    "in place": (nn.Sequential(nn.Linear(6, 8), Fn(lambda x: x.sub_(x.mean(0))), nn.Tanh(), nn.Linear(8, CLASSES)),
                 vectors(), "layer `1` (Fn)"),
    "a detached norm that hides NaN": (mlp(Fn(renormed)), vectors(), "layer `2` (Fn)"),
    "division by the length": (mlp(Fn(lambda x: x / len(x))), vectors(), "layer `2` (Fn)"),
    "in forward": (Centred(), vectors(), "the forward code of the model (Centred)"),
    "in a block": (nn.Sequential(Centred()), vectors(), "the forward code of layer `0` (Centred)"),
    "MixUp": (MixUp(torch.randperm), vectors(), "the forward code of the model (MixUp)"),
    "MixUp by NumPy": (MixUp(np.random.permutation), vectors(), "(MixUp)"),
    "MixUp by Python": (MixUp(lambda n: random.sample(range(n), n)), vectors(), "(MixUp)"),
    "its neighbour": (mlp(Fn(lambda x: x + 0.1 * x.roll(1, 0))), vectors(), "layer `2` (Fn)"),
    "capacity": (Capacity(), vectors(), "(Capacity)"),
    "the largest of the batch": (mlp(Fn(lambda x: x / x.abs().max().detach())), vectors(), "layer `2` (Fn)"),
    "softmax over the batch": (mlp(nn.Softmax(0)), vectors(), "layer `2` (Softmax)"),
    "attention, examples second": (Attentive(False), tokens(), "layer `attention` (MultiheadAttention)"),
    "LSTM, examples taken for time": (nn.Sequential(Fn(lambda x: x[:, None]), nn.LSTM(6, 5), Fn(lambda o: o[0][:, 0])),
                                      vectors(), "layer `1` (LSTM)"),
    "integers, in a head of zeros": (nn.Sequential(nn.Embedding(20, 8), Fn(lambda x: x - x.mean(0)), nn.Flatten(),
                                                   nn.Linear(56, CLASSES)), tokens(), "layer `1` (Fn)"),
    "one row of integers": (nn.Sequential(nn.Embedding(20, 8), Fn(lambda x: x - x.mean(0)), nn.Flatten(),
                                          nn.Linear(56, CLASSES)), tokens(1), "layer `1` (Fn)"),
    "one-hot integers": (nn.Sequential(Fn(lambda i: F.one_hot(i, 20).float()), Fn(lambda x: x - x.mean(0)),
                                       nn.Flatten(), nn.Linear(140, CLASSES)), tokens(), "layer `1` (Fn)"),
    "by a hair": (mlp(Fn(lambda x: x - 1e-7 * x.mean(0))), vectors(), "layer `2` (Fn)"),
    "a backward pass": (mlp(Fn(BackwardMean.apply)), vectors(), "a backward pass"),
    "dropout that rows share": (mlp(nn.Dropout(), Fn(lambda x: x.cumsum(0))), vectors(), "layer `3` (Fn)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_refused_by_name(name: str) -> None:
    model, batch, where = MIXING[name]
    error = refused(model, batch)
    assert error.slot == "model"
    assert where in error.found and "mixes examples" in error.found
    assert error.remedy


@settings(max_examples=10, deadline=None)
@given(share=st.floats(1e-8, 1), size=st.integers(2, 40), after=st.booleans())
def test_a_mean_over_the_batch_is_refused_at_any_strength(share: float, size: int, after: bool) -> None:
    mean = Fn(lambda x: x + share * x.mean(0))
    model = nn.Sequential(nn.Linear(6, 8), *((nn.Tanh(), mean) if after else (mean, nn.Tanh())), nn.Linear(8, CLASSES))
    assert f"layer `{2 if after else 1}` (Fn)" in str(refused(model, vectors(), size=size))


def contrast(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(a @ b.T, torch.arange(len(a)), reduction="none")


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = targets.bincount(minlength=CLASSES)
    return CE(outputs, targets) / counts[targets]


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "one that averages": (nn.CrossEntropyLoss(), "one number", "reduction"),
    "one that sums": (lambda o, t: CE(o, t).sum(), "one number", "reduction"),
    "several per example": (lambda o, t: (o - F.one_hot(t, CLASSES)) ** 2, "(16, 5)", "sum over"),
    "too few": (lambda o, t: CE(o, t)[:-1], "15 values for 16", "one value per example"),
    "integers": (lambda o, t: o.argmax(1), "int64", "floating-point"),
    "no tensor": (lambda o, t: CE(o, t).tolist(), "list", "tensor"),
    "no gradient": (lambda o, t: CE(o, t).detach(), "no gradient", "detach"),
    "a zero gradient": (lambda o, t: 0 * CE(o, t), "no trainable parameter gets a gradient", "depend"),
    "a batch's mean": (lambda o, t: CE(o, t) - CE(o, t).mean(), "mixes", "depend on its own example"),
    "a batch's length": (lambda o, t: CE(o, t) / len(t), "rows instead of 16", "constants"),
    "negatives of the batch": (lambda o, t: contrast(o, o.detach()), "mixes", "negatives"),
    "weights from the batch's classes": (balanced, "mixes", "own example"),
    "never finite": (lambda o, t: CE(o, t) / 0, "could not be made", "logarithms"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_one_value_per_example_is_refused(name: str) -> None:
    loss, found, remedy = LOSSES[name]
    error = refused(mlp(), vectors(), loss)
    assert found in error.found and remedy in error.remedy
    assert error.slot == "loss" or name in ("a zero gradient", "never finite")


def test_a_loss_module_and_a_forward_are_named() -> None:
    class Mean(nn.Module):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return CE(outputs, targets) - CE(outputs, targets).mean()

    assert refused(mlp(), vectors(), Mean()).slot == "loss"
    error = refused(mlp(), vectors(), None, forward=lambda m, b: CE(m(b[0] - b[0].mean(0)), b[1]))
    assert error.slot == "forward" and "the code of `forward`" in error.found


@pytest.mark.parametrize("train", [True, False])
def test_a_batch_norm_is_explained(train: bool) -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=train)
    error = refused(mlp(norm).train(train), vectors())
    assert "layer `2` (BatchNorm1d)" in error.found and "mean and variance of the batch" in error.found
    assert "qg.fix(model)" in error.remedy


def test_a_batch_norm_of_ones_own_is_left_to_the_test() -> None:
    class Public(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, torch.zeros(8), torch.ones(8), self.weight, self.bias)

    check(mlp(Public(8)), vectors(), CE)


# What remembers is refused.


class Remembering(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last, self.called, self.body = how, torch.zeros(()), False, mlp()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "changed in place":
                self.seen += x.detach().mean()
            case "replaced":
                self.seen = x.detach().mean()
            case "registered":
                self.register_buffer("late", x.detach().mean())
            case "first call":
                if not self.called:
                    self.body[0].bias.data.copy_(x.detach().mean())
                self.called = True
            case "parameter":
                self.body[0].weight.data.clamp_(-0.01, 0.01)
            case "attribute":
                x, self.last = x + self.last, x.detach().mean()
            case "graph":
                x, self.last = x + self.last, x.mean()
            case "generator":
                x = x + torch.randn(x.shape, generator=self.own)
        return self.body(x)


@pytest.mark.parametrize(
    ("how", "what"),
    [("changed in place", "`seen`"), ("replaced", "`seen`"), ("registered", "`late`"), ("parameter", "`weight`"),
     ("first call", "`bias`"),
     ("attribute", "state between calls"), ("graph", "state between calls"), ("generator", "its own generator")],
)  # fmt: skip
def test_what_remembers_is_refused_and_left_as_it_was(how: str, what: str) -> None:
    model = Remembering(how)
    before, last = copy.deepcopy(model.state_dict()), model.last
    assert what in refused(model, vectors()).found
    assert model.last is last and not model.last.any()
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_instance_norm_with_statistics_and_an_embedding_with_a_norm_are_named() -> None:
    norm = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(64, CLASSES))
    error = refused(norm, images())
    assert "layer `0` (InstanceNorm2d) changes `running_mean`" in error.found and "qg.fix" in error.remedy
    check(fix(norm), images(), CE)
    embedding = nn.Sequential(nn.Embedding(20, 8, max_norm=0.1), nn.Flatten(), nn.Linear(56, CLASSES))
    assert "layer `0` (Embedding) changes `weight`" in refused(embedding, tokens()).found


def test_a_harmless_attribute_passes_and_is_put_back() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shown, self.all = mlp(), None, [0]

        def forward(self, x: Tensor) -> Tensor:
            self.shown = x.detach()
            self.all.append(1)
            return self.body(x)

    model = Shows()
    check(model, vectors(), CE)
    assert model.shown is None and model.all == [0]


# Bad input, and what cannot be told.


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((vectors()[0], torch.full((4,), 9)), "Target 9 is out of bounds"),
        ((vectors()[0][:, :3], vectors()[1]), "shapes"),
        ((vectors()[0], vectors()[1][:2]), "(4, 6), (2,)"),
        ((vectors()[0][:0], vectors()[1][:0]), "no rows"),
        (vectors()[0], "(inputs, targets)"),
        ((vectors()[0], "abc"), "str"),
        ((), "shape"),
        ((vectors()[0].long(), vectors()[1]), "RuntimeError"),
        ((vectors()[0] * torch.nan, vectors()[1]), "could not be made"),
    ],
)
def test_bad_rows_are_refused_with_what_was_found(batch: Any, text: str) -> None:
    assert text in str(refused(mlp(), batch))


def test_bad_arguments_are_refused() -> None:
    assert "size is 0" in str(refused(mlp(), vectors(), size=0))
    assert "there is none" in str(refused(mlp(), vectors(), None))
    assert "function" in str(refused(lambda x: x, vectors()))
    assert "no shape yet" in str(refused(nn.LazyLinear(5), vectors()))
    assert "no trainable parameter gets a gradient" in str(refused(mlp().requires_grad_(False), vectors()))
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(mlp())
    assert "TorchScript" in str(refused(nn.Sequential(scripted), vectors()))


def test_a_row_with_nan_among_others_does_no_harm() -> None:
    inputs, targets = vectors()
    inputs[1, 2] = torch.nan
    check(mlp(), (inputs, targets), CE)


def test_rows_of_integers_that_are_all_alike_say_nothing() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(56, CLASSES))
    assert "all alike" in str(refused(model, (torch.ones(3, 7).long(), torch.zeros(3).long())))


def test_a_chain_that_cannot_take_one_row_is_refused() -> None:
    error = refused(nn.Linear(6, 1), (vectors()[0], torch.rand(4, 1)), lambda o, t: ((o - t) ** 2).squeeze())
    assert "1 rows instead of 16" in error.found and "squeeze()" in error.remedy
    assert "rows instead of 16" in str(refused(nn.Sequential(Fn(lambda x: x.view(16, 6)), mlp()), vectors()))


# Collation.


def ragged(lengths: tuple[int, ...] = (3, 5, 4)) -> list[tuple[Tensor, int]]:
    return [(torch.arange(1, n + 1), n % CLASSES) for n in lengths]


def padded(length: int | None) -> Callable[[list[Any]], tuple[Tensor, Tensor]]:
    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        longest = length or max(len(ids) for ids, _ in items)
        return torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in items]), torch.tensor(
            [y for _, y in items]
        )

    return collate


def test_padding_to_the_longest_is_refused() -> None:
    model, samples = Attentive(), ragged()
    check(model, padded(7)(samples), CE, collate=padded(7), samples=samples)
    error = refused(model, padded(None)(samples), collate=padded(None), samples=samples)
    assert error.slot == "collate" and "padding to the longest" in error.found and "fixed public length" in error.remedy


def test_collation_that_mixes_draws_or_drops() -> None:
    items = [(x, y) for x, y in zip(*vectors(), strict=True)]

    def plain(batch: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])

    def masking(batch: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = plain(batch)
        return x * torch.bernoulli(torch.full(x.shape, 0.8)), y

    def mixing(batch: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = plain(batch)
        return 0.5 * (x + x[torch.randperm(len(x))]), y

    def centring(batch: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = plain(batch)
        return x - x.mean(0), y

    def dropping(batch: list[Any]) -> tuple[Tensor, Tensor]:
        return plain(batch[:3])

    def failing(batch: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x[: 1 + len(batch)] for x, _ in batch[:1]] + [x for x, _ in batch[1:]]), plain(batch)[1]

    for good in (None, plain, masking):
        check(mlp(), vectors(), CE, collate=good, samples=items)
    for bad, text in (
        (mixing, "depends on the other"), (centring, "depends on the other"), (dropping, "3 rows of 8"),
        (failing, "fails on 2 samples"),
    ):  # fmt: skip
        error = refused(mlp(), vectors(), collate=bad, samples=items)
        assert error.slot == "collate" and text in error.found
    assert "no samples" in str(refused(mlp(), vectors(), collate=plain))


# The model and the generators are left as they were.


@pytest.mark.parametrize("middle", [nn.Dropout(), Fn(lambda x: x - x.mean(0)), nn.BatchNorm1d(8)])
def test_nothing_changes(middle: nn.Module) -> None:
    model = nn.Sequential(mlp(middle, nn.BatchNorm1d(8).eval()), Fn(lambda x: x + np.random.rand() + random.random()))
    model[0][0].eval()
    CE(model(vectors()[0]), vectors()[1]).sum().backward()
    held = list(model.parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in held]
    copies = [None if g is None else g.clone() for g in grads]
    modes = [m.training for m in model.modules()]
    keys = [list(vars(m)) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    batch = vectors()
    generators = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    try:
        check(model, batch, CE)
    except PrivacyError:
        assert not isinstance(middle, nn.Dropout)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (str(np.random.get_state()), random.getstate())
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(held, grads, strict=True))
    assert all(g is None or torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    assert modes == [m.training for m in model.modules()]
    assert keys == [list(vars(m)) for m in model.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(batch, vectors(), strict=True))


def test_a_recurrent_layer_keeps_its_flat_weights_and_no_grad_is_no_hindrance() -> None:
    model = Recurrent(True)
    weights = list(model.rnn._flat_weights)
    with torch.no_grad():
        check(model, tokens(), CE)
    with torch.inference_mode():
        check(model, tokens(), CE)
    assert all(a is b for a, b in zip(weights, model.rnn._flat_weights, strict=True))
    assert all(a is b for a, b in zip(weights, model.rnn.parameters(), strict=True))


# Evil twins: what each part of the test is for.


def trial_of(model: nn.Module, batch: Any, loss: Any = CE, size: int = 16) -> Any:
    chain = trials.Chain(model, loss, None)
    return trials.most_searching(chain, batch, size, held.Generators(chain))


def test_twin_without_removal_misses_a_division_by_the_length() -> None:
    trial = trial_of(mlp(), vectors(), lambda o, t: CE(o, t) / len(t))
    for j in (0, 8, 15):
        before = trial.run(trial.dummy(), trial.others(j))
        rule4._replace(trial, j, before)
        rule4._taint(trial, j, before)
    with pytest.raises(PrivacyError, match="length of the batch"):
        rule4._remove(trial, trial.others(8))


class Gated(nn.Module):
    """A residual branch that mixes, behind a gate that starts at zero, under a head that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gate, self.head = nn.Linear(6, 6), nn.Parameter(torch.zeros(1)), zero_head()[-1]
        self.head = nn.Linear(6, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * self.branch(x - x.detach().nan_to_num().mean(0)))


def test_twin_without_random_parameters_is_blind_at_a_zero_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(Gated)" in str(refused(Gated(), vectors()))
    monkeypatch.setattr(trials, "noised", lambda p, seed, amount: nn.Parameter(p.detach().clone()))
    check(Gated(), vectors(), CE)


def test_twin_without_taint_misses_a_whisper() -> None:
    trial = trial_of(mlp(Fn(lambda x: x + 1e-7 * x.detach().mean(0))), vectors())
    before = trial.run(trial.dummy(), trial.others(8))
    rule4._replace(trial, 8, before)
    with pytest.raises(PrivacyError, match="filled with NaN"):
        rule4._taint(trial, 8, before)


def test_twin_of_three_rows_misses_a_capacity() -> None:
    class Roomy(Capacity):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) > 4 else self.experts[0](x)

    check(Roomy(), vectors(), CE, size=3)
    refused(Roomy(), vectors(), size=16)


def test_twin_that_does_not_rewind_refuses_dropout() -> None:
    trial = trial_of(mlp(nn.Dropout()), vectors())
    rule4._check_chain(trial)
    trial.generators.rewind = lambda: None
    with pytest.raises(PrivacyError):
        rule4._check_chain(trial)


def test_an_outcome_is_the_plain_gradient() -> None:
    trial = trial_of(mlp(), vectors())
    outcome = trial.run(trial.dummy(), torch.arange(3))
    model = mlp()
    model.load_state_dict({k.removeprefix("model."): p for k, p in trial.parameters.items()})
    CE(model(trial.rows[0][:3]), trial.rows[1][:3]).sum().backward()
    for got, p in zip(outcome.gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad)


# fix


@settings(max_examples=40, deadline=None)
@given(channels=st.integers(1, 300), kind=st.sampled_from([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]))
def test_groups_divide_the_channels(channels: int, kind: type[nn.Module]) -> None:
    group = fix(kind(channels))
    assert isinstance(group, nn.GroupNorm)
    least = 16 if kind is nn.BatchNorm1d else 4
    assert channels % group.num_groups == 0 and group.num_groups <= 32
    assert group.num_groups == 1 or channels // group.num_groups >= least


def test_fix_keeps_what_can_be_kept() -> None:
    norm = nn.BatchNorm2d(8, eps=1e-3).double()
    nn.init.uniform_(norm.weight)
    norm.weight.requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(1, 8, 3).double(), norm, nn.ReLU(), nn.Conv2d(8, 8, 3).double(), norm)
    fixed = fix(model)
    group = fixed[1]
    assert isinstance(model[1], nn.BatchNorm2d) and isinstance(group, nn.GroupNorm)
    assert fixed[4] is group and group.eps == 1e-3 and group.training
    assert group.weight.dtype == torch.float64 and torch.equal(group.weight, norm.weight)
    assert not group.weight.requires_grad and group.bias.requires_grad
    assert group.weight is not norm.weight
    assert not list(fixed.buffers())
    assert fix(nn.BatchNorm2d(4, affine=False)).weight is None


def test_fix_leaves_what_is_frozen_and_takes_what_has_no_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False).eval(),
                          nn.BatchNorm1d(4), nn.SyncBatchNorm(4))  # fmt: skip
    kinds = [type(m) for m in fix(model)]
    assert kinds == [nn.BatchNorm1d, nn.GroupNorm, nn.GroupNorm, nn.GroupNorm]
    assert [m.training for m in fix(model)] == [False, False, True, True]


def test_what_is_fixed_passes() -> None:
    check(fix(mlp(nn.BatchNorm1d(8))), vectors(), CE)
    images_model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, CLASSES))
    assert "BatchNorm2d" in str(refused(images_model, images()))
    check(fix(images_model), images(), CE)
    assert fix(nn.BatchNorm1d(8))(torch.randn(3, 8)).shape == (3, 8)
    assert fix(nn.BatchNorm1d(8))(torch.randn(3, 8, 2)).shape == (3, 8, 2)
    tracked = fix(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    assert isinstance(tracked, nn.InstanceNorm1d) and tracked.running_mean is None and tracked.weight is not None
    with pytest.raises(PrivacyError, match="no shape yet"):
        fix(nn.LazyBatchNorm1d())
