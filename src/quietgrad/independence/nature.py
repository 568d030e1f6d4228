"""What mixes by nature, known without a run: norms over the batch, and what replaces them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from quietgrad.errors import PrivacyError
from quietgrad.independence.layers import label


def fix(model: nn.Module) -> nn.Module:
    """A copy of the model in which every norm that `check` refuses is replaced.

    BatchNorm and SyncBatchNorm become GroupNorm: the largest number of groups up to 32 that divides the channels and
    leaves each group 4 of them (16 for BatchNorm1d, whose inputs may have nothing but channels), or else one group.
    InstanceNorm drops its running statistics. Layers frozen by .eval() with running statistics are sound, and stay.
    """
    _refuse_lazy(model)
    holder = nn.ModuleDict({"model": copy.deepcopy(model)})
    fixed: dict[nn.Module, nn.Module] = {}
    for parent in list(holder.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm) and _mixes(child):
                if child not in fixed:
                    fixed[child] = _group_norm(child)
                parent._modules[name] = fixed[child]
            elif isinstance(child, _InstanceNorm) and child.training and child.running_mean is not None:
                child.track_running_stats = False
                child.running_mean = child.running_var = child.num_batches_tracked = None
    return holder["model"]


def refuse_known(model: nn.Module) -> None:
    """Refuses what is no module, has no shape yet, is TorchScript, or is a norm over the batch."""
    if not isinstance(model, nn.Module):
        raise PrivacyError("model", f"is a {type(model).__name__}", "give a torch.nn.Module")
    _refuse_lazy(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            found = f"{label(name, module)} is TorchScript, whose parameters cannot be arguments"
            raise PrivacyError("model", found, "give the module as it was before scripting or tracing")
        if _mixes(module):
            mode = "in training mode" if module.training else "without running statistics"
            found = (
                f"{label(name, module)} is a batch norm {mode}: it scales each example by the mean and variance of "
                "the batch, so that one example moves the gradients of all others"
            )
            raise PrivacyError("model", found, "use qg.fix(model) or GroupNorm, or freeze its statistics with .eval()")


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise PrivacyError("model", f"`{name}` has no shape yet", "run one public batch through the model first")


def _mixes(module: nn.Module) -> bool:
    """A batch norm that uses the batch's statistics; a subclass with its own forward is left to the test."""
    torchs = type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return isinstance(module, _BatchNorm) and torchs and (module.training or module.running_mean is None)


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    least, channels = 16 if isinstance(norm, nn.BatchNorm1d) else 4, norm.num_features
    groups = max((g for g in range(1, 33) if channels % g == 0 and channels // g >= least), default=1)
    group = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine, device="meta")
    group.weight, group.bias = norm.weight, norm.bias
    return group.train(norm.training)
