"""A residual whose last subtraction may be left to the next reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements that are gone over at a time, so that no temporary has the size of the model


def subtract_pending(values: Tensor, pending: Tensor) -> None:
    """``values -= (+-pending)``, block by block, with the signs of the values, and ``pending = 0``.

    Args:
        values: flat over blocks.
        pending: fp32 ``(blocks,)``.
    """
    blocks = values.view(pending.numel(), -1)
    at_a_time = max(1, CHUNK // max(1, blocks.shape[1]))
    for part, scales in zip(blocks.split(at_a_time), pending.split(at_a_time), strict=True):
        part.sub_(torch.copysign(scales[:, None], part))
    pending.zero_()


@dataclass(frozen=True)
class Residual:
    """The residual ``values - (+-pending)``, block by block, with the signs of the values.

    A compressor that has just written ``y`` to memory need not go over it once more to write ``y - C(y)``: it leaves ``y`` where it is
    and ``C(y)``'s scale in ``pending``, and the next step subtracts it on its way. Numbers are the same, bit for bit, for what is
    subtracted later is what would have been subtracted at once.

    Attributes:
        values: flat over blocks, fp32 or bf16; 0 on padding.
        pending: fp32 ``(blocks,)``, 0 where nothing is; None: never, as with bf16 residuals, in which ``y`` has no room.
        subtract: subtracts what is pending from the values, and makes it 0.
    """

    values: Tensor
    pending: Tensor | None = None
    subtract: Callable[[Tensor, Tensor], None] = subtract_pending
    _parts: dict[tuple[int, int], Residual] = field(default_factory=dict, init=False, repr=False, compare=False)

    def part(self, first: int, last: int, block_size: int) -> Residual:
        """Blocks ``[first, last)`` as a view; the same one at every call."""
        part = self._parts.get((first, last))
        if part is None:
            values = self.values[first * block_size : last * block_size]
            pending = None if self.pending is None else self.pending[first:last]
            part = self._parts[first, last] = Residual(values, pending, self.subtract)
        return part

    def tensor(self) -> Tensor:
        """The values, after what is pending has been subtracted from them."""
        if self.pending is not None and self.pending.numel():
            self.subtract(self.values, self.pending)
        return self.values


def as_tensor(residual: Tensor | Residual) -> Tensor:
    """A residual's values, in either form."""
    return residual.tensor() if isinstance(residual, Residual) else residual


def _kind(residual: Tensor | Residual) -> tuple[torch.dtype, bool]:
    if isinstance(residual, Residual):
        return residual.values.dtype, residual.pending is not None
    return residual.dtype, False


def check_into(name: str, old: Tensor | Residual, new: Tensor | Residual | None) -> None:
    """Refuses a place for the successor of a residual that is not kept as ``old`` is.

    Raises:
        ValueError: it has another dtype, or one of the two can have something pending.
    """
    if new is not None and _kind(new) != _kind(old):
        raise ValueError(f"into must be kept as {name} is: in the same dtype, with or without what is pending")


def written(name: str, old: Tensor | Residual, new: Tensor | Residual | None) -> Tensor:
    """Where the successor of a residual is written: into the values of ``new``, in which nothing is pending then; None: into ``old``.

    Raises:
        ValueError: see ``check_into``.
    """
    check_into(name, old, new)
    if not isinstance(new, Residual):
        return as_tensor(old) if new is None else new
    if new.pending is not None:
        new.pending.zero_()
    return new.values


def copy_blocks(old: Residual, new: Residual, blocks: Tensor) -> None:
    """Copies some blocks of a residual, in a bool mask ``(blocks,)``, to another that is kept in the same way."""
    for source, target in ((old.values, new.values), (old.pending, new.pending)):
        if source is not None and target is not None:
            target.view(len(blocks), -1)[blocks] = source.view(len(blocks), -1)[blocks]
