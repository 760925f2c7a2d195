"""Short runs of all four optimizers, to be compared bit for bit between kernel backends on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_onebit import BinSGDM, ExchangeOptions, LocalSteps, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.comm import SimulatedGroup

#: name -> optimizer of parameters; phases and schedules change within eight steps
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "onebit_adam": lambda p, **k: OnebitAdam(p, lr=0.01, weight_decay=0.01, freeze_step=2, **k),
    "onebit_lamb": lambda p, **k: OnebitLamb(p, lr=0.01, weight_decay=0.01, freeze_step=2, **k),
    "zero_one_adam": lambda p, **k: ZeroOneAdam(
        p,
        lr=0.01,
        weight_decay=0.01,
        freeze_step=4,
        local_steps=LocalSteps(max_gap=4, double_every=2),
        _doubling=2,
        **k,
    ),
    "binsgdm": lambda p, **k: BinSGDM(p, lr=0.01, weight_decay=0.01, **k),
    "binsgdm published": lambda p, **k: BinSGDM(p, lr=0.01, weight_decay=0.01, recipe="published", **k),
}

#: name -> dtype of the parameters and options
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"state_dtype": "float32"}),
    "bf16": (torch.bfloat16, {"state_dtype": "float32"}),
    "fp16": (torch.float16, {"state_dtype": "float32"}),
    "bf16 state": (torch.float32, {"state_dtype": "bfloat16"}),
}


def runs(*kinds: str) -> list[tuple[str, str]]:
    """Every optimizer with every kind that it has (BinSGDM keeps neither residuals nor denominators in 16 bits)."""
    return [(o, k) for o in OPTIMIZERS for k in kinds if not (k == "bf16 state" and o.startswith("binsgdm"))]


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Odd shapes, several orders of memory, one of them empty."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(64, 33), (7,), (0,), (1,), (3, 2049), (4097,)]
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    tensors.append(torch.randn(2, 3, 4, 5, generator=draw).to(device, dtype, memory_format=torch.channels_last))
    return [nn.Parameter(t) for t in tensors]


def run(name: str, kernels: str, device: str, group: Any, kind: str = "fp32", steps: int = 8) -> list[Tensor]:
    """The parameters after some steps on gradients drawn on the host; every rank of a simulated group draws its own.

    Args:
        name: of ``OPTIMIZERS``.
        kernels: the backend.
        device: of the parameters.
        group: process group, or None.
        kind: of ``KINDS``.
        steps: how many.
    """
    dtype, options = KINDS[kind]
    params = parameters(device, dtype)
    optimizer = OPTIMIZERS[name](
        params,
        exchange=ExchangeOptions(
            kernels=kernels, process_group=group, block_size=64, bucket_mb=0.02, _alone=True, **options
        ),
    )
    draw = torch.Generator().manual_seed(100 + (group.rank if isinstance(group, SimulatedGroup) else 0))
    for step in range(steps):
        optimizer.zero_grad()
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=draw) * 10.0 ** (step % 3 - 2)
            if index == 4:
                grad[:, ::2] = 0.0  # cold coordinates
            if not (index == 1 and step % 2):  # a gradient that comes and goes
                p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    # the last steps of 0/1 Adam may be local: replicas differ until they synchronise, and so be it
    return [p.detach().clone() for p in params]
