"""What a step looks up and the next one finds again: tables of numbers by block, and views of arenas."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lightning_onebit.engine.layout import Layout
from lightning_onebit.kernels.transfer import upload


class Tables:
    """The same tensors at every step, as long as the layout stays, so that kernels need not be told anew where their operands lie.

    Args:
        layout: of the parameters.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._numbers: dict[Hashable, tuple[Sequence[Sequence[float]], list[Tensor]]] = {}
        self._views: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def numbers(self, key: Hashable, rows: Sequence[Sequence[float]]) -> list[Tensor]:
        """By bucket, fp32 ``(blocks,)`` of one row of numbers, ``(rows, blocks)`` of several; overwritten when ``key`` has other numbers.

        Args:
            key: what the numbers are.
            rows: a number of each exchanged parameter, or several.
        """
        known = self._numbers.get(key)
        if known is not None and known[0] == rows:
            return known[1]
        spread = [self.spread(row) for row in rows]
        table = spread[0] if len(spread) == 1 else torch.stack(spread)
        parts = self.by_bucket(table)
        if known is None:
            self._numbers[key] = rows, parts
            return parts
        torch._foreach_copy_(known[1], parts)
        self._numbers[key] = rows, known[1]
        return known[1]

    def by_bucket(self, table: Tensor) -> list[Tensor]:
        """Cuts a table over all blocks into those of the buckets."""
        parts = table.split([b.blocks for b in self._layout.buckets], dim=-1)
        return [part.contiguous() for part in parts]

    def spread(self, values: Sequence[float]) -> Tensor:
        """fp32 ``(blocks,)``, over all buckets, from a value per slot (or one for all)."""
        plan, device = self._layout.plan, self._layout.device
        if len(distinct := set(values)) == 1:
            return torch.full((plan.blocks,), distinct.pop(), dtype=torch.float32, device=device)
        return upload(values, device, torch.float32)[plan.block_param]

    def view(self, name: str, index: int, flat: Tensor, start: int, stop: int) -> Tensor:
        """``flat[start:stop]``, the very view of the step before if ``flat`` is the same tensor.

        Args:
            name: of the flat.
            index: of the bucket.
            flat: a flat of which there is one of this name.
            start: first element.
            stop: one past the last element.
        """
        key = name, index, start, stop
        known = self._views.get(key)
        if known is None or known[0] is not flat:
            known = self._views[key] = flat, flat[start:stop]
        return known[1]
