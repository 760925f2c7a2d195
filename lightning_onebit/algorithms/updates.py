"""Pure update rules shared by the optimizers: what happens to numbers, without books, ranks or buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_onebit.kernels.transfer import upload

# state_steps beyond which every bias correction 1 - beta**t is exactly 1 in floating point
_NO_BIAS_CORRECTION = 1e18
# elements treated at once where a rule needs temporaries, so that none grows with the model
_CHUNK = 1 << 20


def dense_adamw_(
    x: Sequence[Tensor],
    g: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    t: Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> None:
    """One AdamW step on averaged gradients, in place, by torch's fused kernel.

    ``m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2 ; x -= lr*wd*x + lr * mhat/(sqrt(vhat)+eps)`` (1-bit Adam, warm-up
    stage).

    Args:
        x: fp32 weights.
        g: gradients of the same shapes, cast to fp32 where they are not.
        m: fp32 first moments.
        v: fp32 second moments.
        t: steps that each parameter has taken before this one.
        lr: learning rate.
        betas: ``(b1, b2)``.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay ``wd``.
        bias_correction: False leaves ``mhat = m``, ``vhat = v`` (the published recipes).
    """
    if not x:
        return
    counts = [float(n) if bias_correction else _NO_BIAS_CORRECTION for n in t]
    adamw(
        list(x),
        [_in_order_of(grad.float(), w) for grad, w in zip(g, x, strict=True)],
        list(m),
        list(v),
        [],
        list(upload(counts, x[0].device, torch.float32).unbind()),
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def _in_order_of(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient in the memory order of its weights: torch's fused kernel goes through memory, whatever the strides."""
    if grad.stride() == like.stride():
        return grad
    return torch.empty_like(like).copy_(grad)


def second_moment_floor(v: Tensor, phi: float) -> tuple[Tensor, Tensor]:
    """What the denominator rule needs to know of a tensor's second moments.

    Returns:
        ``(w, phi^2 w)``: fp32 0-d tensors, ``w`` the mean of the non-zero elements of ``v`` (0 if there are none).
        Summed in fp64, so that the rounded result does not depend on the order of summation. Elements that have overflowed count for
        nothing: they come to rest, and would take the others with them.
    """
    total = v.sum(dtype=torch.float64)
    count = torch.count_nonzero(v)
    if not bool(torch.isfinite(total)):
        finite = torch.where(torch.isfinite(v), v, 0.0)
        total, count = finite.sum(dtype=torch.float64), torch.count_nonzero(finite)
    w = total / count.clamp(min=1)
    return w.float(), (w * (phi * phi)).float()


def reciprocal_denominator_(v: Tensor, out: Tensor, *, phi: float, eps: float, correction: float) -> bool:
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

    Returns:
        Whether any second moment is not 0.
    """
    w, floor = second_moment_floor(v, phi)
    if not bool(w > 0):
        out.zero_()
        return False
    scale = upload([correction], v.device, torch.float32)
    for start in range(0, v.numel(), _CHUNK):
        piece = v[start : start + _CHUNK]
        vd = torch.where(piece == 0, w, torch.maximum(piece, floor))
        out[start : start + _CHUNK] = torch.reciprocal(vd.div_(scale).sqrt_().add_(eps))
    return True


def compression_noise(v: Tensor, *, phi: float, block_size: int) -> float:
    """How far one-bit rounds of a momentum that is divided afterwards move the weights of a tensor: root mean square, in units of lr.

    A momentum of the size ``sqrt(v)`` arrives as ``+-s`` with s the root mean square of its block, so a weight moves by
    ``sqrt(mean v of its block) / sqrt(vd)``, where Adam's own step is 1.

    Args:
        v: fp32 1-D second moments of one parameter tensor.
        phi: the optimizer's ``denominator_floor``.
        block_size: elements of a block.

    Returns:
        That, summed in fp64; 0 for a tensor that is cold.
    """
    w, floor = second_moment_floor(v, phi)
    if not bool(w > 0):
        return 0.0
    total = torch.zeros((), dtype=torch.float64, device=v.device)
    whole = v.numel() // block_size * block_size
    at_a_time = max(1, _CHUNK // block_size) * block_size
    pieces = [piece.view(-1, block_size) for piece in v[:whole].split(at_a_time) if piece.numel()]
    for piece in (*pieces, v[whole:].view(1, -1)):
        vd = torch.where(piece == 0, w, torch.maximum(piece, floor))
        energy = torch.where(torch.isfinite(piece), piece, 0.0).sum(dim=1, dtype=torch.float64) / max(1, piece.shape[1])
        total += energy.dot(torch.reciprocal(vd).sum(dim=1, dtype=torch.float64))
    return float((total / v.numel()).sqrt())


def fp32_zeros_like(r: Tensor) -> Tensor:
    """A flat for moments: one fp32 zero for each reciprocal denominator, which may be kept in 16 bits."""
    return torch.zeros_like(r, dtype=torch.float32)


def floor_second_moment_(v: Tensor, *, phi: float) -> None:
    """``v = vd`` in place (see ``reciprocal_denominator_``); a tensor without any non-zero element stays zero."""
    w, floor = second_moment_floor(v, phi)
    for start in range(0, v.numel(), _CHUNK):
        piece = v[start : start + _CHUNK]
        piece.copy_(torch.where(piece == 0, w, torch.maximum(piece, floor)))


def dense_lamb_(
    x: Sequence[Tensor],
    g: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    t: Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    clip: tuple[float, float],
    norms: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor:
    """One LAMB step on averaged gradients, in place.

    ``m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2 ; u = mhat/(sqrt(vhat)+eps) + wd*x ; x -= lr*c*u`` with
    ``c = clip(||x||/||u||)``, 1 where either norm is 0 (1-bit LAMB, warm-up stage).

    Args:
        x: fp32 weights.
        g: gradients of the same shapes.
        m: fp32 first moments.
        v: fp32 second moments.
        t: number of this step for each parameter (1 for the first).
        lr: learning rate.
        betas: ``(b1, b2)``.
        eps: added to the root of the second moment.
        weight_decay: ``wd``.
        bias_correction: False leaves ``mhat = m``, ``vhat = v``.
        clip: ``(min_coeff, max_coeff)``.
        norms: fp64 norms of fp32 tensors (the kernels').

    Returns:
        c of each tensor, fp64 ``(len(x),)`` on the device of ``x``.
    """
    b1, b2 = betas
    coeffs = []
    # a few tensors at a time: u is a temporary of their size
    for part in _portions([w.numel() for w in x]):
        weights, moments, squares = [x[i] for i in part], [m[i] for i in part], [v[i] for i in part]
        grads = [g[i].float() for i in part]
        torch._foreach_lerp_(moments, grads, 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        u = torch._foreach_sqrt(squares)
        if bias_correction:
            torch._foreach_div_(u, [(1 - b2 ** t[i]) ** 0.5 for i in part])
        torch._foreach_add_(u, eps)
        torch._foreach_reciprocal_(u)
        torch._foreach_mul_(u, moments)
        if bias_correction:
            torch._foreach_div_(u, [1 - b1 ** t[i] for i in part])
        torch._foreach_add_(u, weights, alpha=weight_decay)
        # fp64 norms, so that rounding hardly ever depends on the order of summation
        c = _trust_ratio(norms(weights), norms(u), clip)
        torch._foreach_mul_(u, list((-lr * c).float().unbind()))
        torch._foreach_add_(weights, u)
        coeffs.append(c)
    return torch.cat(coeffs) if coeffs else torch.zeros(0, dtype=torch.float64)


def _trust_ratio(x: Tensor, u: Tensor, clip: tuple[float, float]) -> Tensor:
    live = (x > 0) & (u > 0)
    return torch.where(live, (x / torch.where(live, u, 1.0)).clamp(*clip), 1.0)


def _portions(numels: Sequence[int]) -> list[list[int]]:
    """Cuts a list of tensors into runs of about ``_CHUNK`` elements."""
    portions: list[list[int]] = []
    size = 0
    for i, numel in enumerate(numels):
        if not portions or size + numel > _CHUNK:
            portions.append([])
            size = 0
        portions[-1].append(i)
        size += numel
    return portions


def second_moment_from_reciprocal(r: Tensor, *, eps: float, correction: float) -> Tensor:
    """The second moments that ``reciprocal_denominator_`` was given, floor applied, to rounding (0 where ``r`` is 0); fp32."""
    r = r.float()
    root = torch.where(r > 0, torch.reciprocal(r) - eps, torch.zeros_like(r)).clamp_(min=0)
    return root.square_().mul_(correction)
