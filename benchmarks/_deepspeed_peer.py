"""DeepSpeed 0.19.6's OnebitAdam as a method of ``slow_network.py``, in the environment that has DeepSpeed. Needs torch and NumPy besides.

The optimizer and its NCCL back end run unmodified. Replaced is only what needs a GPU: CuPy by NumPy (the same ``packbits``), and the 0-d
scale by a 1-d one in ``all_gather`` (gloo refuses to mix the two). Its engine is replaced by what it does in each step: average
gradients in backward until the freeze. All parameters and gradients lie in one flat buffer each, as in its fp16 mode, so that a step is
one exchange and not one per tensor.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def _numpy_for_cupy() -> types.ModuleType:
    cupy: Any = types.ModuleType("cupy")
    device = types.SimpleNamespace(use=lambda: None)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = types.SimpleNamespace(Device=lambda _: device, get_current_stream=lambda: stream)
    for name in ("packbits", "unpackbits", "split", "zeros"):
        setattr(cupy, name, getattr(np, name))
    return cupy


def _accept_old_argument_orders() -> None:
    add, addcmul = torch.Tensor.add_, torch.Tensor.addcmul_

    def add_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return add(self, args[1], alpha=args[0]) if len(args) == 2 else add(self, *args, **kwargs)

    def addcmul_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return addcmul(self, args[1], args[2], value=args[0]) if len(args) == 3 else addcmul(self, *args, **kwargs)

    torch.Tensor.add_, torch.Tensor.addcmul_ = add_, addcmul_  # type: ignore[method-assign, assignment]


def _optimizer_class() -> Any:
    """DeepSpeed's class, ready for gloo and the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.modules["cupy"] = _numpy_for_cupy()
    _accept_old_argument_orders()
    with contextlib.redirect_stdout(io.StringIO()):
        communication = importlib.import_module("deepspeed.comm")
        # collectives through shared memory, compiled at first use: for ranks of one machine, which hosts are not
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        communication.init_distributed(dist_backend="gloo", verbose=False, dist_init_required=False)
        backend = importlib.import_module("deepspeed.runtime.comm.nccl")
        packer = importlib.import_module("deepspeed.runtime.compression.cupy").CupyBackend
        found = importlib.import_module("deepspeed.runtime.fp16.onebit.adam").OnebitAdam
    packer.torch2cupy = lambda self, tensor: tensor.numpy()
    packer.cupy2torch = lambda self, array: torch.from_numpy(array)
    gather = communication.all_gather
    names = ("new_group", "get_world_size", "get_rank", "all_to_all_single")
    backend.dist = types.SimpleNamespace(
        **{name: getattr(communication, name) for name in names},
        all_gather=lambda outs, tensor, group: gather(outs, tensor.reshape(outs[0].shape), group=group),
    )
    return found


def make_step(
    model: torch.nn.Module, loss: Callable[[Any, Any, Any], Any], freeze_step: int
) -> tuple[Callable[[Any, Any], None], Callable[[], dict[str, Any]]]:
    """A training step ``(x, y) -> None`` and a function that tells what it has learned about itself.

    Args:
        model: fp32 parameters; they become views of one buffer.
        loss: ``(model, x, y) -> loss``.
        freeze_step: its option; the step after which exchanges are compressed.
    """
    params = list(model.parameters())
    weights = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
    weights.grad = torch.zeros_like(weights)
    start = 0
    for p in params:
        part = slice(start, start + p.numel())
        p.data, p.grad = weights.data[part].view_as(p), weights.grad[part].view_as(p)
        start += p.numel()
    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = _optimizer_class()([weights], engine, lr=1e-4, freeze_step=freeze_step)

    def step(x: Any, y: Any) -> None:
        loss(model, x, y).backward()
        if engine.enable_backward_allreduce:  # what the engine does in backward
            dist.all_reduce(weights.grad)
            weights.grad.div_(dist.get_world_size())
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.step()
        weights.grad.zero_()

    def told() -> dict[str, Any]:
        if engine.enable_backward_allreduce:
            raise RuntimeError("DeepSpeed's OnebitAdam has not reached its compressed stage")
        deepspeed = importlib.import_module("deepspeed")
        return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "packer": "NumPy packbits for CuPy's"}

    return step, told
