"""The wire format: bits and scales of many blocks in one byte buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BITS_PER_WORD = 32
SCALE_BYTES = 4


@dataclass(frozen=True)
class Packed:
    """Sign bits and scales of ``rows * blocks_per_row`` blocks, one row for each rank's chunk.

    A row holds ``blocks_per_row`` scales (fp32) followed by ``blocks_per_row * block_size / 32`` words (int32). Bit
    ``k`` of word ``j`` of a block is the sign bit of element ``k * (block_size / 32) + j`` (bit planes), so that a
    vector lane or a GPU thread owns one word. With ``scales=False`` (BinSGDM) the rows hold words only.

    A row is exactly what one rank contributes to a collective: nothing is copied between packing and sending.

    Attributes:
        raw: uint8 tensor of shape ``(rows, row_bytes)``, contiguous.
        blocks_per_row: number of blocks in a row.
        block_size: elements of a block, a multiple of 32.
        has_scales: whether rows begin with scales.
        plans: arguments with which backends have called kernels that write into it, by the operands.
    """

    raw: Tensor
    blocks_per_row: int
    block_size: int
    has_scales: bool = True
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def row_bytes(blocks_per_row: int, block_size: int, has_scales: bool = True) -> int:
        """Bytes of one row: ``C * (4 + block_size / 8)``, or ``C * block_size / 8`` without scales."""
        return blocks_per_row * (block_size // 8 + (SCALE_BYTES if has_scales else 0))

    @classmethod
    def empty(
        cls,
        rows: int,
        blocks_per_row: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        has_scales: bool = True,
    ) -> Packed:
        """Allocates a zeroed payload (all scales 0, all bits ``+``)."""
        width = cls.row_bytes(blocks_per_row, block_size, has_scales)
        raw = torch.zeros((rows, width), dtype=torch.uint8, device=device)
        return cls(raw, blocks_per_row, block_size, has_scales)

    @property
    def rows(self) -> int:
        """Number of rows (rank chunks)."""
        return self.raw.shape[0]

    @property
    def blocks(self) -> int:
        """Number of blocks in all rows."""
        return self.rows * self.blocks_per_row

    @property
    def scales(self) -> Tensor:
        """View of the scales: fp32, shape ``(rows, blocks_per_row)``."""
        return self.raw[:, : self.blocks_per_row * SCALE_BYTES].view(torch.float32)

    @property
    def words(self) -> Tensor:
        """View of the bits: int32, shape ``(rows, blocks_per_row, block_size / 32)``."""
        start = self.blocks_per_row * SCALE_BYTES if self.has_scales else 0
        words = self.raw[:, start:].view(torch.int32)
        return words.unflatten(1, (self.blocks_per_row, self.block_size // BITS_PER_WORD))

    def whole_rows(self) -> Tensor:
        """The rows with what lies behind them: contiguous uint8 ``(rows, bytes from row to row)``."""
        return (
            self.raw
            if self.raw.is_contiguous()
            else self.raw.as_strided((self.rows, self.raw.stride(0)), self.raw.stride())
        )

    def narrow(self, start: int, rows: int) -> Packed:
        """The rows ``[start, start + rows)`` as a view."""
        return Packed(self.raw[start : start + rows], self.blocks_per_row, self.block_size, self.has_scales)

    def clone(self) -> Packed:
        """A copy that owns its memory."""
        return Packed(self.raw.clone(), self.blocks_per_row, self.block_size, self.has_scales)
