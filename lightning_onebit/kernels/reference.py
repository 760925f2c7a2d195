"""The kernels in plain torch: the definition that every other backend reproduces bit for bit.

All arithmetic is IEEE fp32 with one rounding per operation and no fused multiply-add; sums run in a fixed order that a
vector
lane or a GPU thread can follow (see ``block_square_sums``). Only element-wise operations whose result IEEE 754
prescribes are
used, so the bits do not depend on the machine. The order of operations is part of the definition: change it nowhere
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_onebit.kernels.packed import BITS_PER_WORD, Packed

if TYPE_CHECKING:
    from lightning_onebit.kernels import BlockMap

Spans = Sequence["Tensor | None"]


def _as_blocks(flat: Tensor, block_size: int) -> Tensor:
    return flat.view(-1, block_size)


def valid_mask(lengths: Tensor, block_size: int) -> Tensor:
    """Which elements of each block are not padding: bool ``(blocks, block_size)`` from int32 ``(blocks,)``."""
    return torch.arange(block_size, device=lengths.device, dtype=torch.int32)[None, :] < lengths[:, None]


def block_square_sums(y: Tensor) -> Tensor:
    """Sum of squares of each block in the fixed order.

    Lane ``j`` of ``W = block_size / 32`` adds ``y[k*W + j]**2`` for ``k = 0 .. 31`` in turn; then the upper half of the
    lanes is
    folded on the lower until one is left (``h = (w + 1) // 2``).

    Args:
        y: fp32 ``(blocks, block_size)``, padding 0.

    Returns:
        fp32 ``(blocks,)``.
    """
    blocks, block_size = y.shape
    return fold_sums(y * y, block_size // BITS_PER_WORD) if blocks else y.new_zeros((0,))


def fold_sums(values: Tensor, lanes: int) -> Tensor:
    """Sums each row of ``values`` (fp32, ``(blocks, 32 * lanes)``) in the fixed order of ``block_square_sums``."""
    planes = values.view(values.shape[0], BITS_PER_WORD, lanes)
    acc = planes[:, 0].clone()
    for k in range(1, BITS_PER_WORD):
        acc += planes[:, k]
    return _fold_lanes(acc, torch.add)


def fold_max(values: Tensor, lanes: int) -> Tensor:
    """Maximum of each row of ``values`` (fp32, ``(blocks, 32 * lanes)``); order does not matter for a maximum."""
    return values.view(values.shape[0], BITS_PER_WORD * lanes).amax(dim=1)


def _fold_lanes(acc: Tensor, op) -> Tensor:  # type: ignore[no-untyped-def]
    width = acc.shape[1]
    while width > 1:
        half = (width + 1) // 2
        op(acc[:, : width - half], acc[:, half:width], out=acc[:, : width - half])
        width = half
    return acc[:, 0]


def pack_bits(negative: Tensor, words: Tensor) -> None:
    """Packs bools ``(..., block_size)`` into int32 ``words`` of shape ``(..., block_size / 32)``, bit plane k of elements ``k*W + j``."""
    lanes = words.shape[-1]
    planes = negative.unflatten(-1, (BITS_PER_WORD, lanes))
    packed = torch.zeros(words.shape, dtype=torch.int32, device=words.device)
    for k in range(BITS_PER_WORD):
        packed |= planes[..., k, :].to(torch.int32) << k
    words.copy_(packed)


def unpack_bits(words: Tensor) -> Tensor:
    """The inverse of ``pack_bits``: bool ``(..., block_size)`` from int32 ``(..., block_size / 32)``."""
    shifts = torch.arange(BITS_PER_WORD, device=words.device, dtype=torch.int32)[:, None]
    return ((words.unsqueeze(-2) >> shifts) & 1).bool().flatten(-2)


def _signed(scales: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -scales[..., None], scales[..., None])


def _values(packed: Packed) -> Tensor:
    """Decoded values ``+-s`` of all rows, fp32 ``(rows * blocks_per_row, block_size)``; padding not cleared."""
    return _signed(packed.scales, unpack_bits(packed.words)).flatten(0, 1)


def _compress_blocks(y: Tensor, valid: Tensor, lengths: Tensor, out: Packed) -> Tensor:
    """Writes bits and scales of ``y`` into ``out``; returns the residual ``y - C(y)`` (0 on padding)."""
    counts = lengths.to(torch.float32)
    mean = block_square_sums(y) / torch.where(lengths > 0, counts, torch.ones_like(counts))
    # torch.sqrt of fp32 may come from a vector library and be off by one unit; through fp64 it is correctly rounded everywhere
    scale = torch.sqrt(mean.double()).float()
    negative = torch.signbit(y) & valid
    out.scales.copy_(scale.view(out.rows, out.blocks_per_row))
    pack_bits(negative.view(out.rows, out.blocks_per_row, out.block_size), out.words)
    return torch.where(valid, y - _signed(scale, negative), torch.zeros_like(y))


class ReferenceKernels:
    """Plain torch on any device. Slow on purpose where clarity asks for it; always available."""

    name = "reference"

    # ----- moving between parameters and flat buckets -----------------------------------------------------------------

    def gather(self, bucket: BlockMap, spans: Spans, out: Tensor) -> None:
        """Copies parameter spans into a flat bucket.

        Args:
            bucket: the block map of the bucket.
            spans: one 1-D tensor per ``bucket.spans`` entry, any float dtype; None counts as zeros.
            out: fp32 ``(bucket.elements,)``; padding is set to 0.
        """
        out.zero_()
        targets, sources = [], []
        for span, tensor in zip(bucket.spans, spans, strict=True):
            if tensor is not None:
                start = span.block * bucket.block_size
                targets.append(out[start : start + span.numel])
                sources.append(tensor)
        if targets:
            torch._foreach_copy_(targets, sources)

    def scatter(self, bucket: BlockMap, flat: Tensor, spans: Spans) -> None:
        """Copies a flat fp32 bucket back into parameter spans (cast to their dtype); None spans are left alone."""
        targets, sources = [], []
        for span, tensor in zip(bucket.spans, spans, strict=True):
            if tensor is not None:
                start = span.block * bucket.block_size
                targets.append(tensor)
                sources.append(flat[start : start + span.numel])
        if targets:
            torch._foreach_copy_(targets, sources)

    def grad_stats(self, tensors: Sequence[Tensor]) -> Tensor:
        """Squared norm and a finiteness verdict of local gradients in one pass.

        Args:
            tensors: 1-D or n-D tensors of any float dtype (no None).

        Returns:
            float64 ``(2,)`` on the tensors' device: sum of squares, and the number of tensors holding a non-finite
            value.
        """
        if not tensors:
            return torch.zeros(2, dtype=torch.float64)
        norms = torch.stack([n.double() for n in torch._foreach_norm([t.detach() for t in tensors], 2, torch.float32)])
        bad = ~torch.isfinite(norms)
        squares = (norms * norms).sum()
        # A finite tensor whose norm overflows fp32 is not an error of the gradient: look again, exactly, only then.
        flags = [
            (~torch.isfinite(t)).any() if b else torch.zeros((), dtype=torch.bool, device=t.device)
            for t, b in zip(tensors, bad.tolist(), strict=True)
        ]
        if bool(bad.any()):
            squares = torch.stack([t.double().square().sum() for t in tensors]).sum()
        return torch.stack([squares, torch.stack(flags).sum().double()])

    # ----- the error-compensated compressor ---------------------------------------------------------------------------

    def compress(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        a: Tensor | None,
        m: Tensor | Packed | None,
        b: Tensor | None,
        g: Tensor | Spans | None,
        e: Tensor,
        out: Packed,
    ) -> None:
        """Worker side of the exchange: bits, scale and residual of ``y = ((a*m) + (b*g)) + e`` on blocks ``[lo, hi)``.

        Source: docs/algorithms, compressor C and exchange, worker line.

        Args:
            bucket: the block map.
            lo: first block.
            hi: one past the last block; ``hi - lo == out.blocks``.
            a: fp32 ``(hi - lo,)`` factor of ``m`` per block (None with ``m=None``).
            m: old momentum: fp32 flat of the range, or ``Packed`` with the blocks of the range, or None (+0.0).
            b: fp32 ``(hi - lo,)`` factor of ``g`` per block (None with ``g=None``).
            g: gradient: fp32 flat of the range, or span tensors of the whole bucket (``lo, hi`` must then be all of
                it), or None (+0.0).
            e: fp32 flat of the range, worker residual; read and overwritten.
            out: receives bits and scales, ``out.rows * out.blocks_per_row == hi - lo``.
        """
        bs = bucket.block_size
        lengths = bucket.lengths[lo:hi]
        y = torch.zeros((hi - lo, bs), dtype=torch.float32, device=e.device)
        if m is not None:
            assert a is not None
            y = a[:, None] * (_values(m) if isinstance(m, Packed) else _as_blocks(m, bs))
        if g is not None:
            assert b is not None
            if not isinstance(g, Tensor):
                flat = torch.empty(bucket.elements, dtype=torch.float32, device=e.device)
                self.gather(bucket, g, flat)
                g = flat
            y = y + b[:, None] * _as_blocks(g, bs)
        else:
            y = y + 0.0
        y = y + _as_blocks(e, bs)
        valid = valid_mask(lengths, bs)
        y = torch.where(valid, y, torch.zeros_like(y))
        _as_blocks(e, bs).copy_(_compress_blocks(y, valid, lengths, out))

    def reduce(self, received: Packed, lengths: Tensor, d: Tensor, out: Packed, inv_n: float) -> None:
        """Server side: ``z = (C_0 + C_1 + ...) * inv_n + d`` over the rows, then bits, scale and residual of z.

        Args:
            received: one row per worker, all of the same chunk.
            lengths: int32 ``(blocks_per_row,)`` valid lengths of the chunk's blocks.
            d: fp32 flat ``(blocks_per_row * block_size,)`` server residual; read and overwritten.
            out: one row.
            inv_n: ``1 / n``, rounded to fp32.
        """
        bs = received.block_size
        z = _values(received.narrow(0, 1))
        for row in range(1, received.rows):
            z = z + _values(received.narrow(row, 1))
        z = z * torch.tensor(inv_n, dtype=torch.float32, device=d.device) + _as_blocks(d, bs)
        valid = valid_mask(lengths, bs)
        z = torch.where(valid, z, torch.zeros_like(z))
        _as_blocks(d, bs).copy_(_compress_blocks(z, valid, lengths, out))

    def unpack(self, packed: Packed, lengths: Tensor, out: Tensor) -> None:
        """Decodes ``+-s`` into ``out`` (fp32 flat, all rows), 0 on padding."""
        values = _values(packed)
        values = torch.where(valid_mask(lengths, packed.block_size), values, torch.zeros_like(values))
        out.copy_(values.flatten())

    def apply_adam(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor, decay: Tensor, alpha: Tensor
    ) -> None:
        """Decompress and apply: ``x = x*decay - (+-(alpha*s) * r)``.

        Args:
            bucket: the block map (whole bucket).
            spans: fp32 weights, one 1-D tensor per span, updated in place; None spans are left alone.
            packed: bits and scales of all the bucket's blocks.
            r: fp32 flat ``(elements,)``, reciprocal denominators.
            decay: fp32 ``(blocks,)``, ``1 - lr * weight_decay``.
            alpha: fp32 ``(blocks,)``, ``lr`` with its bias correction.
        """
        bs = bucket.block_size
        step = alpha * packed.scales.flatten()
        update = _signed(step, unpack_bits(packed.words).flatten(0, 1)) * _as_blocks(r, bs)
        for span, x in zip(bucket.spans, spans, strict=True):
            if x is None:
                continue
            blocks = slice(span.block, span.block + span.blocks(bs))
            delta = update[blocks].flatten()[: span.numel]
            # every block of a span belongs to one parameter, hence one group, hence one decay
            x.copy_(x * decay[span.block] - delta)
