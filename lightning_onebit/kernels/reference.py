"""The kernels in plain torch: the definition that every other backend reproduces bit for bit.

All arithmetic is IEEE fp32 with one rounding per operation and no fused multiply-add; sums run in a fixed order that a
vector lane or a GPU thread can follow (see ``block_square_sums``). Only element-wise operations whose result IEEE 754
prescribes are used, so the bits do not depend on the machine. The order of operations is part of the definition: change
it nowhere alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_onebit.kernels import counter_rng
from lightning_onebit.kernels.common import check_rows
from lightning_onebit.kernels.counter_rng import DrawKey
from lightning_onebit.kernels.packed import BITS_PER_WORD, Packed
from lightning_onebit.kernels.residual import Residual, as_tensor, written

if TYPE_CHECKING:
    from lightning_onebit.kernels import BlockMap, BoundSpans, SpanLike

Spans = Sequence["Tensor | None"]


def _as_blocks(flat: Tensor, block_size: int) -> Tensor:
    return flat.view(-1, block_size)


def valid_mask(lengths: Tensor, block_size: int) -> Tensor:
    """Which elements of each block are not padding: bool ``(blocks, block_size)`` from int32 ``(blocks,)``."""
    return torch.arange(block_size, device=lengths.device, dtype=torch.int32)[None, :] < lengths[:, None]


def block_square_sums(y: Tensor) -> Tensor:
    """Sum of squares of each block in the fixed order.

    Lane ``j`` of ``W = block_size / 32`` adds ``y[k*W + j]**2`` for ``k = 0 .. 31`` in turn; then the upper half of the
    lanes is folded on the lower until one is left (``h = (w + 1) // 2``).

    Args:
        y: fp32 ``(blocks, block_size)``, padding 0.

    Returns:
        fp32 ``(blocks,)``.
    """
    width = y.shape[1] // BITS_PER_WORD
    planes = (y * y).view(len(y), BITS_PER_WORD, width)
    acc = planes[:, 0].clone()
    for k in range(1, BITS_PER_WORD):
        acc += planes[:, k]
    while width > 1:
        half = (width + 1) // 2
        acc[:, : width - half] += acc[:, half:width]
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


def _block_rms(y: Tensor, lengths: Tensor) -> Tensor:
    """Root mean square of each block in the fixed order, fp32 ``(blocks,)``; 0 where a block holds nothing."""
    counts = lengths.to(torch.float32)
    holds = lengths > 0
    mean = torch.where(holds, block_square_sums(y) / torch.where(holds, counts, torch.ones_like(counts)), 0.0)
    # torch.sqrt of fp32 may come from a vector library and be off by one unit; through fp64 it is correctly rounded
    # everywhere
    return torch.sqrt(mean.double()).float()


def _compress_blocks(y: Tensor, valid: Tensor, lengths: Tensor, out: Packed) -> Tensor:
    """Writes bits and scales of ``y`` into ``out``; returns the residual ``y - C(y)`` (0 on padding)."""
    scale = _block_rms(y, lengths)
    negative = torch.signbit(y) & valid
    out.scales.copy_(scale.view(out.rows, out.blocks_per_row))
    pack_bits(negative.view(out.rows, out.blocks_per_row, out.block_size), out.words)
    return torch.where(valid, y - _signed(scale, negative), torch.zeros_like(y))


def _held(bucket: BlockMap, spans: Spans) -> list[tuple[SpanLike, Tensor, slice]]:
    """The spans that have a tensor, with it and with their elements of a flat of the bucket."""
    size = bucket.block_size
    return [
        (span, tensor, slice(span.block * size, span.block * size + span.numel))
        for span, tensor in zip(bucket.spans, spans, strict=True)
        if tensor is not None
    ]


class ReferenceKernels:
    """Plain torch on any device. Slow on purpose where clarity asks for it; always available."""

    name = "reference"

    # ----- moving between parameters and flat buckets -----------------------------------------------------------------

    def prepare(self, bucket: BlockMap, spans: BoundSpans, name: str) -> None:
        """Makes what a later operation of this step needs of spans that it will get as argument ``name``; nothing, here."""

    def gather(self, bucket: BlockMap, spans: Spans, out: Tensor) -> None:
        """Copies parameter spans into a flat bucket.

        Args:
            bucket: the block map of the bucket.
            spans: one tensor per ``bucket.spans`` entry, any float dtype, its elements in the order of its indices (which is why a
                whole gradient may keep its shape); None counts as zeros.
            out: fp32 ``(bucket.elements,)``; padding is set to 0.
        """
        out.zero_()
        runs = [(out[part], tensor.reshape(-1)) for _, tensor, part in _held(bucket, spans)]
        if runs:
            targets, sources = zip(*runs, strict=True)
            torch._foreach_copy_(targets, sources)

    def scatter(self, bucket: BlockMap, flat: Tensor, spans: Spans) -> None:
        """Copies a flat fp32 bucket back into parameter spans (cast to their dtype); None spans are left alone."""
        runs = [(tensor, flat[part]) for _, tensor, part in _held(bucket, spans)]
        if runs:
            targets, sources = zip(*runs, strict=True)
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
        norms = torch.stack(torch._foreach_norm([t.detach() for t in tensors], 2, torch.float64))
        return torch.stack([(norms * norms).sum(), (~torch.isfinite(norms)).sum().double()])

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Euclidean norm of each tensor, with fp64 sums.

        The one operation in which backends may differ, in the last bit: the order of these sums is their own, and in this one that of
        torch, which depends on the number of threads.

        Args:
            tensors: of any shapes and float dtypes.

        Returns:
            fp64 ``(len(tensors),)`` on their device (on the CPU if there are none).
        """
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack(torch._foreach_norm([t.detach() for t in tensors], 2, torch.float64))

    # ----- the error-compensated compressor ---------------------------------------------------------------------------

    def residual(self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Residual:
        """A residual of zeros in the form in which this backend keeps it; ``compress`` and ``reduce`` take any.

        Args:
            blocks: of it.
            block_size: elements of a block.
            dtype: fp32 or bf16.
            device: where it lies.
        """
        return Residual(torch.zeros(blocks * block_size, dtype=dtype, device=device))

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
        e: Tensor | Residual,
        out: Packed,
        r: Tensor | None = None,
        into: Tensor | Residual | None = None,
    ) -> None:
        """Worker side of the exchange: bits, scale and residual of ``y = ((a*m) + ((b*g)*r)) + e`` on blocks ``[lo, hi)``.

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
            e: flat of the range, worker residual, fp32 or bf16; what it is worth stays as it is where ``into`` is given.
            out: receives bits and scales, ``out.rows * out.blocks_per_row == hi - lo``.
            r: flat of the range, fp32 or bf16, reciprocal denominators by which the gradient is multiplied; None: by nothing (and
                None with ``g=None``).
            into: receives the new worker residual (rounded to its dtype), kept as ``e`` is; None: ``e`` itself does. Of a ``Residual``
                the subtraction may be pending afterwards.
        """
        if r is not None and g is None:
            raise ValueError("r must be None with g=None")
        e, into = as_tensor(e), written("e", e, into)
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
            bg = b[:, None] * _as_blocks(g, bs)
            y = y + (bg if r is None else bg * _as_blocks(r, bs))
        else:
            y = y + 0.0
        y = y + _as_blocks(e, bs)
        valid = valid_mask(lengths, bs)
        y = torch.where(valid, y, torch.zeros_like(y))
        _as_blocks(into, bs).copy_(_compress_blocks(y, valid, lengths, out))

    def reduce(
        self,
        received: Packed,
        lengths: Tensor,
        d: Tensor | Residual,
        out: Packed,
        inv_n: float,
        into: Tensor | Residual | None = None,
    ) -> None:
        """Server side: ``z = (C_0 + C_1 + ...) * inv_n + d`` over the rows, then bits, scale and residual of z.

        Args:
            received: one row per worker, all of the same chunk.
            lengths: int32 ``(blocks_per_row,)`` valid lengths of the chunk's blocks.
            d: flat ``(blocks_per_row * block_size,)`` server residual, fp32 or bf16 (see ``compress``).
            out: one row.
            inv_n: ``1 / n``, rounded to fp32.
            into: receives the new server residual; None: ``d`` itself does.

        Raises:
            ValueError: there is no row.
        """
        check_rows(received)
        d, into = as_tensor(d), written("d", d, into)
        bs = received.block_size
        z = _values(received.narrow(0, 1))
        for row in range(1, received.rows):
            z = z + _values(received.narrow(row, 1))
        z = z * torch.tensor(inv_n, dtype=torch.float32, device=d.device) + _as_blocks(d, bs)
        valid = valid_mask(lengths, bs)
        z = torch.where(valid, z, torch.zeros_like(z))
        _as_blocks(into, bs).copy_(_compress_blocks(z, valid, lengths, out))

    def unpack(self, packed: Packed, lengths: Tensor, out: Tensor) -> None:
        """Decodes ``+-s`` into ``out`` (fp32 flat, all rows), 0 on padding."""
        values = _values(packed)
        values = torch.where(valid_mask(lengths, packed.block_size), values, torch.zeros_like(values))
        out.copy_(values.flatten())

    def apply_adam(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor | None, decay: Tensor, alpha: Tensor
    ) -> None:
        """Decompress and apply: ``x = x*decay - (+-(alpha*s) * r)``.

        Args:
            bucket: the block map (whole bucket).
            spans: fp32 weights, one 1-D tensor per span, updated in place; None spans are left alone.
            packed: bits and scales of all the bucket's blocks.
            r: flat ``(elements,)``, fp32 or bf16, reciprocal denominators; None: what was exchanged holds them already.
            decay: fp32 ``(blocks,)``, ``1 - lr * weight_decay``.
            alpha: fp32 ``(blocks,)``, ``lr`` with its bias correction.
        """
        bs = bucket.block_size
        step = alpha * packed.scales.flatten()
        update = _signed(step, unpack_bits(packed.words).flatten(0, 1))
        if r is not None:
            update = update * _as_blocks(r, bs)
        flat = update.flatten()
        for span, x, part in _held(bucket, spans):
            # every block of a span belongs to one parameter, hence one group, hence one decay
            x.copy_(x * decay[span.block] - flat[part])

    # ----- 1-bit LAMB -------------------------------------------------------------------------------------------------

    def lamb_update(
        self,
        bucket: BlockMap,
        spans: Spans,
        new: Packed,
        old: Tensor | Packed,
        r: Tensor,
        fresh: Tensor,
        factors: Tensor,
    ) -> Tensor:
        """First pass of a compressed LAMB step: fresh second moments and the partial norms of every block.

        ``ghat = (m - b1*m_old)*i1 ; fresh = b2*fresh + o2*(ghat*ghat) ; up = (alpha*m)*r ; u = up + wd*x``, and the
        ratio ``D/Dfresh = 1/(r*(sqrt(fresh*c2) + eps))``.

        Args:
            bucket: the block map (whole bucket).
            spans: fp32 weights, one per span; blocks of None spans are left alone and give zeros.
            new: exchanged momentum.
            old: momentum before the exchange (packed, or fp32 flat).
            r: flat reciprocal denominators, fp32 or bf16.
            fresh: fp32 flat, updated in place.
            factors: fp32 ``(8, blocks)``: b1, i1 = 1/(1-b1), b2, o2 = 1-b2, c2 = 1/(1-b2^T), eps, alpha, wd.

        Returns:
            fp32 ``(blocks, 3)``: sum of squares of up, sum of squares of u, largest ratio (0 where r is 0); sums in the
            fixed order.
        """
        bs = bucket.block_size
        x = torch.zeros(bucket.elements, dtype=torch.float32, device=r.device)
        self.gather(bucket, spans, x)
        live = torch.zeros(bucket.blocks, dtype=torch.bool, device=r.device)
        for span, tensor in zip(bucket.spans, spans, strict=True):
            live[span.block : span.block + span.blocks(bs)] = tensor is not None
        b1, i1, b2, o2, c2, eps, alpha, wd = (row[:, None] for row in factors)
        valid = valid_mask(bucket.lengths, bs) & live[:, None]
        negative = unpack_bits(new.words).flatten(0, 1)
        m = _signed(new.scales.flatten(), negative)
        m0 = _values(old) if isinstance(old, Packed) else _as_blocks(old, bs)
        ghat = (m - b1 * m0) * i1
        moments = _as_blocks(fresh, bs)
        learned = b2 * moments + o2 * (ghat * ghat)
        moments.copy_(torch.where(valid, learned, moments))
        reciprocal = _as_blocks(r, bs)
        up = _signed(alpha[:, 0] * new.scales.flatten(), negative) * reciprocal
        weights = _as_blocks(x, bs)
        u = up + wd * weights
        root = torch.sqrt((moments * c2).double()).float()  # correctly rounded, as in _compress_blocks
        ratio = torch.reciprocal(reciprocal * (root + eps))
        zero = torch.zeros_like(up)
        ratio = torch.where(valid & (reciprocal > 0), ratio, zero)
        return torch.stack(
            [
                block_square_sums(torch.where(valid, up, zero)),
                block_square_sums(torch.where(valid, u, zero)),
                ratio.amax(dim=1) if len(ratio) else zero.new_zeros(0),
            ],
            dim=1,
        )

    def lamb_apply(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor, alpha: Tensor, wd: Tensor, step: Tensor
    ) -> None:
        """Second pass: ``x = x - step*u`` with ``u = (alpha*m)*r + wd*x``; alpha, wd, step: fp32 ``(blocks,)``, r: fp32 or bf16."""
        bs = bucket.block_size
        negative = unpack_bits(packed.words).flatten(0, 1)
        up = (_signed(alpha * packed.scales.flatten(), negative) * _as_blocks(r, bs)).flatten()
        for span, x, part in _held(bucket, spans):
            u = up[part] + wd[span.block] * x
            x.copy_(x - step[span.block] * u)

    # ----- 0/1 Adam ---------------------------------------------------------------------------------------------------

    def local_step(
        self, bucket: BlockMap, spans: Spans, g: Spans, m: Tensor, u: Tensor, r: Tensor, anchor: Tensor, factors: Tensor
    ) -> None:
        """One local step: ``m = b1*m + o1*g ; p = lr*m ; u = u + p ; x = x*decay - clamp(p*r) ; anchor = anchor*decay``.

        No weight moves by more than ``bound`` alone; ``u`` takes all of p, for what is exchanged is not bounded.

        Args:
            bucket: the block map (whole bucket).
            spans: fp32 weights, updated in place; blocks of None spans are left alone altogether.
            g: local gradients, any float dtype; None counts as +0.0.
            m: fp32 flat local momentum.
            u: fp32 flat update accumulated since the last synchronisation.
            r: flat reciprocal denominators, fp32 or bf16.
            anchor: fp32 flat weights of the last synchronisation.
            factors: fp32 ``(5, blocks)``: b1, o1 (``1-b1`` times a clipping factor), lr, decay, bound (>= 0).
        """
        bs = bucket.block_size
        for span, x, grad in zip(bucket.spans, spans, g, strict=True):
            if x is None:
                continue
            b1, o1, lr, decay, bound = factors[:, span.block]
            part = slice(span.block * bs, span.block * bs + span.numel)
            gradient = torch.zeros_like(x) if grad is None else grad.float().reshape(-1)
            m[part] = b1 * m[part] + o1 * gradient
            p = lr * m[part]
            u[part] += p
            step = p * r[part]
            step = torch.where(step > bound, bound, step)
            x.copy_(x * decay - torch.where(step < -bound, -bound, step))
            anchor[part] *= decay

    # ----- BinSGDM ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        factors: Tensor,
        g: Tensor | Spans,
        m: Tensor,
        a: Tensor,
        key: DrawKey,
        first_block: int,
        out: Packed,
    ) -> None:
        """Worker side: ``m = b1*m + o1*g ; a = b2*a + o2*|g|``, then bits of ``Q(m/a)``, negative where not ``m > a*U``.

        Where ``|m| > a`` the sign of m is certain, and what it leaves out counts more than the rest in the steps to come:
        ``m = m + k*(m - clip(m, -a, a))``. A coordinate with ``a == 0`` counts as ``m/a = 0``: either sign with probability 1/2.

        Args:
            bucket: the block map.
            lo: first block of the shard.
            hi: one past its last block.
            factors: fp32 ``(5, hi - lo)``: b1, o1, b2, o2, k (>= 0).
            g: gradient: spans of the whole bucket or fp32 flat of the shard.
            m: fp32 flat of the shard, updated in place.
            a: fp32 flat of the shard, updated in place.
            key: from ``counter_rng.draw_key``.
            first_block: global number of block ``lo``.
            out: bits only (``has_scales=False``).
        """
        bs = bucket.block_size
        if not isinstance(g, Tensor):
            flat = torch.empty(bucket.elements, dtype=torch.float32, device=m.device)
            self.gather(bucket, g, flat)
            g = flat
        gradient = _as_blocks(g, bs)
        moment, size = _as_blocks(m, bs), _as_blocks(a, bs)
        b1, o1, b2, o2, share = factors[:, :, None]
        moment.copy_(b1 * moment + o1 * gradient)
        size.copy_(b2 * size + o2 * gradient.abs())
        u = counter_rng.uniform(counter_rng.draw_hash(key, first_block, hi - lo, bs, m.device))
        lengths = bucket.lengths[lo:hi]
        positive = moment > torch.where(size == 0, torch.ones_like(size), size) * u
        negative = ~positive & valid_mask(lengths, bs)
        pack_bits(negative.view(out.rows, out.blocks_per_row, bs), out.words)
        moment.copy_(torch.where(moment.abs() > size, moment + share * (moment - moment.clamp(-size, size)), moment))

    def vote(
        self,
        received: Packed,
        lengths: Tensor,
        key: DrawKey,
        first_block: int,
        out: Tensor,
        carry: Tensor | None = None,
    ) -> None:
        """Server side: combines the workers' signs of one chunk.

        With c negatives of n and a carry: the sign of ``z = (n - 2c)*(1/n) + carry`` (+1 at 0), and ``carry = z - sign``. Without:
        negative where not ``n - 2c > n*U``.

        Args:
            received: one row of bits per worker.
            lengths: int32 ``(blocks_per_row,)``.
            key: from ``counter_rng.draw_key``; draws are made without a carry alone.
            first_block: global number of the chunk's first block.
            out: int32 ``(blocks_per_row, words)``.
            carry: fp32 flat of the chunk, padding included, updated in place.

        Raises:
            ValueError: there is no row.
        """
        check_rows(received)
        bs, n = received.block_size, received.rows
        count = unpack_bits(received.words).to(torch.int32).sum(dim=0, dtype=torch.int32)
        valid = valid_mask(lengths, bs)
        balance = n - 2 * count
        if carry is not None:
            z = balance.to(torch.float32) * (1.0 / n) + carry.view(count.shape)
            negative = ~(z >= 0)
            carry.view(count.shape).copy_(torch.where(negative, z + 1.0, z - 1.0))
        else:
            h = counter_rng.draw_hash(key, first_block, received.blocks_per_row, bs, out.device)
            negative = ~(balance.to(torch.float32) > float(n) * counter_rng.uniform(h))
        pack_bits(negative & valid, out)

    def apply_votes(
        self, bucket: BlockMap, spans: Spans, words: Tensor, live: Tensor, decay: Tensor, lr: Tensor
    ) -> None:
        """``x = x*decay + lr*ubar`` where the coordinate is live, ``x = x*decay`` elsewhere; ``ubar = +-1`` by the bits.

        Args:
            bucket: the block map (whole bucket).
            spans: fp32 weights, updated in place; None spans are left alone.
            words: int32 ``(blocks, words)`` of ``vote``.
            live: int32 ``(blocks, words)`` bitmap of coordinates that have had a gradient on some rank.
            decay: fp32 ``(blocks,)``.
            lr: fp32 ``(blocks,)``.
        """
        alive = unpack_bits(live)
        ubar = torch.where(unpack_bits(words), -1.0, 1.0).to(torch.float32)
        delta = torch.where(alive, lr[:, None] * ubar, torch.zeros_like(ubar)).flatten()
        for span, x, part in _held(bucket, spans):
            x.copy_(x * decay[span.block] + delta[part])

    def mark_live(self, bucket: BlockMap, lo: int, hi: int, a: Tensor, words: Tensor) -> None:
        """Bitmap of coordinates with ``a > 0``: int32 ``(hi - lo, block_size/32)`` from fp32 flat ``a`` of ``[lo, hi)``."""
        pack_bits((_as_blocks(a, bucket.block_size) > 0) & valid_mask(bucket.lengths[lo:hi], bucket.block_size), words)
