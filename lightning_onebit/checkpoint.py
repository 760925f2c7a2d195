"""What a checkpoint holds of compressed training.

The ``.ckpt`` is one ordinary Lightning file: what all ranks share (weights, momentum, variance, phase, counters) is the optimizer's
ordinary state, which another world size, plain DDP and ``load_from_checkpoint`` read alone. Residuals differ by rank and are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_onebit.optim import OnebitOptimizer, Phase


def restore_residuals(optimizers: Sequence[OnebitOptimizer]) -> list[OnebitOptimizer]:
    """Completes optimizers whose replicated state has just been loaded with what differs by rank.

    Args:
        optimizers: the compressed optimizers, after ``load_state_dict``.

    Returns:
        Those that go on compressing with residuals that start from zero.
    """
    return [optimizer for optimizer in optimizers if optimizer.phase is not Phase.WARMUP and optimizer.compresses]
