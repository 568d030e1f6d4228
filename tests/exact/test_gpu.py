"""The step on a GPU is the step on a CPU: the same draws, the same sums to rounding, the same guards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quietgrad as qg

pytestmark = pytest.mark.gpu


def data(rows: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(rows, 1, 8, 8, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.0), nn.Linear(6 * 36, 10)).double()


def trained(device: str, where: str, folder: Path | None = None, stop: int = 12) -> tuple[nn.Module, qg.Run]:
    net = model().to(device)
    plan = qg.dp_sgd(examples=200, batch_size=40, steps=12, noise_multiplier=0.8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    run = plan.start(net, optimizer, loss=qg.losses.CrossEntropy(), seed=11, folder=folder)
    x, y = data()
    for batch in run.batches((x.double().to(where), y.to(where))):
        run.step(batch)
        if run.position == stop:
            break
    return net, run


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_seeded_run_is_the_same_on_both_devices(where: str) -> None:
    """Sampling, clip and noise do not depend on the device, nor on where the data lies (float64, to rounding)."""
    here, _ = trained("cpu", "cpu")
    there, _ = trained("cuda", where)
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), rtol=1e-9, atol=1e-9)


def test_a_run_on_a_gpu_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Saved after 5 of 12 steps and resumed, a seeded run ends bit for bit where the uninterrupted one ends."""
    whole, _ = trained("cuda", "cuda")
    _, run = trained("cuda", "cuda", tmp_path / "run", stop=5)
    run.save()
    run.close()
    net = model().to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    again = run.plan.start(net, optimizer, loss=qg.losses.CrossEntropy(), seed=11, folder=tmp_path / "run", resume=True)
    x, y = data()
    for batch in again.batches((x.double(), y)):
        again.step(batch)
    for mine, theirs in zip(whole.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_noise_on_a_gpu_has_its_scale() -> None:
    """Zero gradients: the standard deviation of the release is clip * multiplier / batch within 2 % (20,000 draws;
    false alarm below 1e-4)."""
    net = nn.Linear(20_000, 1, bias=False).cuda()
    before = net.weight.detach().clone()
    plan = qg.dp_sgd(examples=100, batch_size=10, steps=1, clip=2.0, noise_multiplier=1.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    run = plan.start(net, optimizer, forward=lambda m, b: m(b[0])[:, 0] * b[1], seed=2)
    x = torch.rand(100, 20_000)
    for batch in run.batches((x, torch.full((100,), 1e-12))):
        run.step(batch)
    moved = (net.weight.detach() - before).std().item()
    assert moved == pytest.approx(2.0 * 1.5 / 10, rel=0.02)


def test_the_check_sees_mixing_on_a_gpu() -> None:
    """Rule 4 is tested where the model is."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).cuda()
    x, y = data()
    loss = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(qg.PrivacyError, match="BatchNorm1d"):
        qg.check(net, (x[:8].cuda(), y[:8].cuda()), loss)
    qg.check(qg.fix(net), (x[:8].cuda(), y[:8].cuda()), loss)
