"""1-bit Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_onebit.comm import Bucket
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.options import ExchangeOptions, made_exchange, takes
from lightning_onebit.optim.refresh import CompressingAdam, RefreshOptions


@dataclass(frozen=True, kw_only=True)
class AdamOptions(RefreshOptions):
    """Options of 1-bit Adam; see ``RefreshOptions`` and ``MomentOptions``."""


@takes(AdamOptions)
class OnebitAdam(CompressingAdam):
    r"""1-bit Adam: Adam with a frozen second moment and one-bit, error-compensated momentum.

    For ``t <= freeze_step`` (warm-up) gradients are averaged densely and the step is that of ``torch.optim.AdamW``.
    Afterwards::

        m = exchange(b1 m + (1-b1) g_i)                        # the averaged, compressed momentum becomes m
        x -= lr*wd*x + lr * mhat / (sqrt(vhat_freeze) + eps)

    By the default recipe it is the step, not the momentum, that is compressed, so that every coordinate gets compression noise in
    proportion to the step it takes: with ``D = sqrt(vhat_freeze) + eps``::

        u = exchange(b1 u + (1-b1) g_i / D) ; x -= lr*wd*x + lr * uhat        # u = m/D

    Source: "1-bit Adam", arXiv 2102.02888, algorithm 1; this library's differences are listed in docs/differences.

    ``.grad`` holds the local gradient; ``step()`` does all communication it owes. Do not wrap the module in
    DistributedDataParallel. Weight decay is decoupled, as in AdamW. Parameters may be fp32, bf16 or fp16 (fp32 master
    weights are kept for the latter two); all state is fp32.

    Args:
        params: parameters or parameter groups. A group may set ``lr``, ``betas``, ``eps``, ``weight_decay`` and
            ``compress=False`` (always averaged densely; its second moments keep learning).
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, each in ``[0, 1)``.
        eps: added to the denominator, >= 0.
        weight_decay: decoupled weight decay, >= 0; 0.0 by default, where torch's AdamW has 0.01.
        exchange: how ranks exchange, see ``ExchangeOptions``.
        **options: see ``AdamOptions``.

    Raises:
        TypeError: an option or parameter of the wrong type (sparse and complex parameters among them).
        ValueError: an option out of range; the message names it, its value and the range.

    Example:
        >>> optimizer = OnebitAdam(model.parameters(), lr=1e-3, weight_decay=0.01, freeze_step=1000)
        >>> loss(model(x)).backward()
        >>> optimizer.step()
    """

    algorithm = "onebit_adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, self._given(options), made_exchange(exchange))

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        decay = self._by_block("decay", bucket, self._decay)
        alpha = self._by_block("alpha", bucket, lambda i: self._group(i)["lr"] / self._first_correction(i))
        r = None if self._preconditioned else bucket.slice(self._flat["r"])
        self._kernels.apply_adam(bucket, self._bind_weights(bucket), packed, r, decay, alpha)
