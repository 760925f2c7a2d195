"""Second moments and denominators as pure functions, without books, ranks or buckets."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_onebit.kernels.transfer import upload

# elements treated at once where a rule needs temporaries, so that none grows with the model
_CHUNK = 1 << 20


def moment_sums(v: Tensor) -> Tensor:
    """What the denominator rule needs to know of a tensor's second moments: fp64 ``(2,)``, the sum and number of its non-zero elements.

    Summed in fp64, so that the rounded mean does not depend on the order of summation. Elements that have overflowed count for nothing:
    they come to rest, and would take the others with them.
    """
    total = v.sum(dtype=torch.float64)
    count = torch.count_nonzero(v)
    if not bool(torch.isfinite(total)):
        finite = torch.where(torch.isfinite(v), v, 0.0)
        total, count = finite.sum(dtype=torch.float64), torch.count_nonzero(finite)
    return torch.stack([total, count.to(total.dtype)])


def second_moment_floor(sums: Tensor, phi: float) -> tuple[Tensor, Tensor]:
    """``(w, phi^2 w)``: fp32 0-d tensors, ``w`` the mean of non-zero second moments by their ``moment_sums()``, 0 if there are none."""
    w = sums[0] / sums[1].clamp(min=1)
    return w.float(), (w * (phi * phi)).float()


def reciprocal_denominator_(
    v: Tensor, out: Tensor, *, phi: float, eps: float, correction: float, sums: Tensor | None = None
) -> bool:
    """``out = 1 / (sqrt(vd / correction) + eps)`` with cold and nearly cold coordinates bounded.

    It is 0 where the whole tensor is cold. ``vd_j = w if v_j == 0 else max(v_j, phi^2 w)``, ``w`` the mean of the
    non-zero ``v`` of this tensor. A coordinate that has seen (almost) no gradient would otherwise divide compression
    noise by (almost) nothing.

    Args:
        v: fp32 1-D second moments of one parameter tensor; unchanged unless ``out`` is ``v``.
        out: 1-D, fp32 (may be ``v``) or bf16, to which the fp32 result is rounded.
        phi: the optimizer's ``denominator_floor``.
        eps: the optimizer's ``eps``.
        correction: ``1 - b2**k`` with bias correction, 1 without.
        sums: ``moment_sums()`` of the whole tensor, where ``v`` is a shard of it.

    Returns:
        Whether any second moment is not 0.
    """
    w, floor = second_moment_floor(moment_sums(v) if sums is None else sums, phi)
    if not bool(w > 0):
        out.zero_()
        return False
    scale = upload([correction], v.device, torch.float32)
    for start in range(0, v.numel(), _CHUNK):
        piece = v[start : start + _CHUNK]
        vd = torch.where(piece == 0, w, torch.maximum(piece, floor))
        out[start : start + _CHUNK] = torch.reciprocal(vd.div_(scale).sqrt_().add_(eps))
    return True


def compression_noise(v: Tensor, *, phi: float, block_size: int, sums: Tensor | None = None) -> Tensor:
    """How far one-bit rounds of a momentum that is divided afterwards move weights: squares, in units of lr.

    A momentum of the size ``sqrt(v)`` arrives as ``+-s`` with s the root mean square of its block, so a weight moves by
    ``sqrt(mean v of its block) / sqrt(vd)``, where Adam's own step is 1.

    Args:
        v: fp32 1-D second moments of one parameter tensor.
        phi: the optimizer's ``denominator_floor``.
        block_size: elements of a block.
        sums: see ``reciprocal_denominator_``.

    Returns:
        fp64 ``(2,)``: the sum of squares (0 for a tensor that is cold), and the number of elements.
    """
    w, floor = second_moment_floor(moment_sums(v) if sums is None else sums, phi)
    total = torch.zeros((), dtype=torch.float64, device=v.device)
    elements = torch.full_like(total, v.numel())
    if not bool(w > 0):
        return torch.stack([total, elements])
    whole = v.numel() // block_size * block_size
    at_a_time = max(1, _CHUNK // block_size) * block_size
    pieces = [piece.view(-1, block_size) for piece in v[:whole].split(at_a_time) if piece.numel()]
    for piece in (*pieces, v[whole:].view(1, -1)):
        vd = torch.where(piece == 0, w, torch.maximum(piece, floor))
        energy = torch.where(torch.isfinite(piece), piece, 0.0).sum(dim=1, dtype=torch.float64) / max(1, piece.shape[1])
        total += energy.dot(torch.reciprocal(vd).sum(dim=1, dtype=torch.float64))
    return torch.stack([total, elements])


def fp32_zeros_like(r: Tensor) -> Tensor:
    """A flat for moments: one fp32 zero for each reciprocal denominator, which may be kept in 16 bits."""
    return torch.zeros_like(r, dtype=torch.float32)


def floor_second_moment_(v: Tensor, *, phi: float, sums: Tensor | None = None) -> None:
    """``v = vd`` in place (see ``reciprocal_denominator_``); a tensor without any non-zero element stays zero."""
    w, floor = second_moment_floor(moment_sums(v) if sums is None else sums, phi)
    for start in range(0, v.numel(), _CHUNK):
        piece = v[start : start + _CHUNK]
        piece.copy_(torch.where(piece == 0, w, torch.maximum(piece, floor)))


def second_moment_from_reciprocal(r: Tensor, *, eps: float, correction: float) -> Tensor:
    """The second moments that ``reciprocal_denominator_`` was given, floor applied, to rounding (0 where ``r`` is 0); fp32."""
    r = r.float()
    root = torch.where(r > 0, torch.reciprocal(r) - eps, torch.zeros_like(r)).clamp_(min=0)
    return root.square_().mul_(correction)
