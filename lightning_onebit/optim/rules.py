"""Pure update rules shared by the optimizers: what happens to numbers, without books, ranks or buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
        [grad.float() for grad in g],
        list(m),
        list(v),
        [],
        list(torch.tensor(counts, dtype=torch.float32, device=x[0].device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def second_moment_floor(v: Tensor, phi: float) -> tuple[Tensor, Tensor]:
    """What the denominator rule needs to know of a tensor's second moments.

    Returns:
        ``(w, phi^2 w)``: fp32 0-d tensors, ``w`` the mean of the non-zero elements of ``v`` (0 if there are none).
        Summed in
        fp64, so that the rounded result does not depend on the order of summation.
    """
    total = v.sum(dtype=torch.float64)
    count = torch.count_nonzero(v)
    w = total / count.clamp(min=1)
    return w.float(), (w * (phi * phi)).float()


def reciprocal_denominator_(v: Tensor, out: Tensor, *, phi: float, eps: float, correction: float) -> None:
    """``out = 1 / (sqrt(vd / correction) + eps)`` with cold and nearly cold coordinates bounded.

    It is 0 where the whole tensor is cold. ``vd_j = w if v_j == 0 else max(v_j, phi^2 w)``, ``w`` the mean of the non-zero ``v`` of this tensor. A coordinate
    that has seen
    (almost) no gradient would otherwise divide compression noise by (almost) nothing.

    Args:
        v: fp32 1-D second moments of one parameter tensor; unchanged unless ``out`` is ``v``.
        out: fp32 1-D, may be ``v``.
        phi: the optimizer's ``denominator_floor``.
        eps: the optimizer's ``eps``.
        correction: ``1 - b2**k`` with bias correction, 1 without.
    """
    w, floor = second_moment_floor(v, phi)
    if not bool(w > 0):
        out.zero_()
        return
    scale = torch.tensor(correction, dtype=torch.float32, device=v.device)
    for start in range(0, v.numel(), _CHUNK):
        piece = v[start : start + _CHUNK]
        vd = torch.where(piece == 0, w, torch.maximum(piece, floor))
        out[start : start + _CHUNK] = torch.reciprocal(vd.div_(scale).sqrt_().add_(eps))


def second_moment_from_reciprocal(r: Tensor, *, eps: float, correction: float) -> Tensor:
    """The second moments that ``reciprocal_denominator_`` was given, floor applied, to rounding (0 where ``r`` is 0)."""
    root = torch.where(r > 0, torch.reciprocal(r) - eps, torch.zeros_like(r)).clamp_(min=0)
    return root.square_().mul_(correction)
