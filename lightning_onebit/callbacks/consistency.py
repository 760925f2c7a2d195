"""``ReplicaConsistency``: are the weights still bit for bit the same on all ranks?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_onebit._names import shown_as
from lightning_onebit.callbacks._common import OnebitCallback, column, everyone
from lightning_onebit.comm import Transport, handshake, share_values
from lightning_onebit.engine.options import check_integer
from lightning_onebit.engine.sharded import is_dtensor

# Elements hashed at once: the 64-bit temporaries stay at a few megabytes, whatever the size of the parameter.
CHUNK = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatch(RuntimeError):
    """The ranks' replicas of the model differ; the message names the first parameter that does."""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits: ``sum_j (bits_j + 1) * w_j mod 2^64`` with pseudo-random odd weights ``w_j``.

    Integer sums do not depend on their order, so equal bits give equal hashes on every device and with any number of
    threads. One changed element always changes the hash (``w_j`` is odd); several go unnoticed with probability 2^-63.

    Args:
        tensor: any shape, dtype and strides; elements are taken in logical order. Of a DTensor those of this rank's shard.

    Returns:
        int64, 0-d, on the tensor's device.
    """
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    flat = local.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device) * _GOLDEN
        weights = (weights ^ (weights >> 29)) * _GOLDEN | 1
        total += ((part + 1) * weights).sum()
    return total


@shown_as("ReplicaConsistency")
class ReplicaConsistencyMixin(OnebitCallback):
    """Compares the weights of all ranks bit for bit and stops a run whose replicas have drifted apart.

    Every rank hashes every parameter (a pass over memory) and all of them exchange the hashes (8 bytes per parameter), and a
    hash of each compressed optimizer's plan: options, phase, steps, groups with their learning rates, and the layout that says which
    residual belongs to which parameter.
    The first check comes before the first step, the last one when training ends. Local steps of 0/1 Adam let replicas
    differ on purpose: a check that falls between two synchronisations waits for the next one. Works with any strategy
    of this package, whichever optimizers train the model. Of a sharded model, ranks that hold the same shards are compared.

    Args:
        every_n_steps: optimizer steps between two checks (all optimizers counted together, like ``trainer.global_step``).

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an option is out of range.
        ReplicaMismatch: (while training, on every rank) naming the first parameter that differs and where.
        PlanMismatch: (when training starts, on every rank) the ranks' parameters have different names, shapes or dtypes; (while
            training) an optimizer's plan differs.
        CollectiveTimeout: (while training) a rank did not send its hashes within the strategy's ``timeout``.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[ReplicaConsistency(every_n_steps=500)])
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        super().__init__()
        check_integer("every_n_steps", every_n_steps, least=1)
        self.every_n_steps = every_n_steps
        self._transport: Transport | None = None
        self._checked_at = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compares names, shapes and dtypes, then the initial weights."""
        self._transport = everyone(trainer, "ReplicaConsistency")
        parameters = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in pl_module.named_parameters()]
        handshake(self._transport, parameters, pl_module.device, "parameters")
        self._check(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Checks when enough steps have been made."""
        self._check_after(self.every_n_steps, trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Checks the weights that training ends with."""
        self._check_after(1, trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lets go of the process group."""
        self._transport = None

    def _check_after(self, steps: int, trainer: Any, pl_module: Any) -> None:
        local = any(optimizer.mid_local for optimizer in trainer.strategy.onebit_optimizers)
        if trainer.global_step - self._checked_at >= steps and not local:
            self._check(trainer, pl_module)

    def _check(self, trainer: Any, pl_module: Any) -> None:
        assert self._transport is not None  # on_train_start came first
        step = self._checked_at = trainer.global_step
        self._transport.step = step
        names, parameters = zip(*pl_module.named_parameters(), strict=True)
        mine = torch.stack([fingerprint(p).to(pl_module.device) for p in parameters])
        rows = share_values(self._transport, mine, "hashes of the parameters")
        # all ranks see all hashes, so that all of them raise
        for ranks in trainer.strategy.replicas.columns:
            _compare(names, rows.cpu(), step, ranks)
        for index, optimizer in enumerate(trainer.strategy.onebit_optimizers):
            if optimizer.steps:  # before the first step it makes the same comparison itself
                plan, ranks = optimizer.plan_description(), column(trainer, "ReplicaConsistency")
                handshake(ranks, plan, pl_module.device, f"plan of optimizer {index}")


def _compare(names: Sequence[str], rows: Tensor, step: int, ranks: Sequence[int]) -> None:
    rows = rows[list(ranks)]
    differs = rows != rows[:1]
    wrong = differs.any(dim=0).nonzero().flatten().tolist()
    if wrong:
        others = [ranks[i] for i in differs[:, wrong[0]].nonzero().flatten().tolist()]
        raise ReplicaMismatch(
            f"the replicas differ after step {step}: parameter {names[wrong[0]]!r} is the first of {len(wrong)} (of "
            f"{len(names)}) that do, on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} against rank {ranks[0]}. "
            "Something changes the weights of one rank alone (a callback, a hook, in-place surgery, failing memory): "
            "lower `every_n_steps` to find the step, and continue from a checkpoint made before it."
        )
