"""A residual whose last subtraction may be left to whoever reads it next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements that are settled at a time, so that no temporary has the size of the model


def take_off(values: Tensor, owed: Tensor) -> None:
    """``values -= (+-owed)``, block by block, with the signs of the values (flat over blocks; fp32 ``(blocks,)``); then nothing is owed."""
    blocks = values.view(owed.numel(), -1)
    at_a_time = max(1, CHUNK // max(1, blocks.shape[1]))
    for part, scales in zip(blocks.split(at_a_time), owed.split(at_a_time), strict=True):
        part.sub_(torch.copysign(scales[:, None], part))
    owed.zero_()


@dataclass(frozen=True)
class Residual:
    """The residual ``values - (+-owed)``, block by block, with the signs of the values.

    A compressor that has just written ``y`` to memory need not go over it once more to write ``y - C(y)``: it leaves ``y`` where it is
    and ``C(y)``'s scale in ``owed``, and the next step takes it off on its way. Numbers are the same, bit for bit, for what is
    taken off later is what would have been taken off at once. A settled block owes 0.

    Attributes:
        values: flat over blocks, fp32 or bf16; 0 on padding.
        owed: fp32 ``(blocks,)``; None: always settled, as bf16 residuals are, in which ``y`` has no room.
        settle: what settles it.
    """

    values: Tensor
    owed: Tensor | None = None
    settle: Callable[[Tensor, Tensor], None] = take_off
    _parts: dict[tuple[int, int], Residual] = field(default_factory=dict, init=False, repr=False, compare=False)

    def part(self, first: int, last: int, block_size: int) -> Residual:
        """Blocks ``[first, last)`` as a view; the same one at every call."""
        part = self._parts.get((first, last))
        if part is None:
            values = self.values[first * block_size : last * block_size]
            owed = None if self.owed is None else self.owed[first:last]
            part = self._parts[first, last] = Residual(values, owed, self.settle)
        return part

    def settled(self) -> Tensor:
        """The values, after what they owe has been taken off them."""
        if self.owed is not None and self.owed.numel():
            self.settle(self.values, self.owed)
        return self.values


def settled(residual: Tensor | Residual) -> Tensor:
    """A residual's values, in either form."""
    return residual.settled() if isinstance(residual, Residual) else residual
