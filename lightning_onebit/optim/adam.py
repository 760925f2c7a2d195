"""1-bit Adam."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_onebit._choices import Backend, Overlap, RefreshRule, StateDtype
from lightning_onebit.comm import Bucket
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.options import CommonOptions, check_flag
from lightning_onebit.optim.policies import Rounds, VariancePolicy
from lightning_onebit.optim.refresh import CompressingAdam


class OnebitAdam(CompressingAdam):
    r"""1-bit Adam: Adam with a frozen second moment and one-bit, error-compensated momentum.

    For ``t <= freeze_step`` (warm-up) gradients are averaged densely and the step is that of ``torch.optim.AdamW``.
    Afterwards::

        m = exchange(b1 m + (1-b1) g_i)                        # the averaged, compressed momentum becomes m
        x -= lr*wd*x + lr * mhat / (sqrt(vhat_freeze) + eps)

    With ``preconditioned=True`` it is the step, not the momentum, that is compressed: with ``D = sqrt(vhat_freeze) + eps``::

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
        freeze_step: number of dense steps, >= 1; None: the switch is made by ``freeze()`` (``callbacks.VarianceFreeze``
            does it).
            The published hand rule is 15-25 % of all steps.
        bias_correction: True means what torch's AdamW means; False gives the published recipe.
        block_size: elements that share one scale, a multiple of 32.
        max_grad_norm: clips the global norm (of the averaged gradient in dense steps, ``sqrt((1/n) sum_i ||g_i||^2)``
            in compressed ones).
        preconditioned: compress the momentum divided by its denominators, so that every coordinate gets compression noise in
            proportion to the step it would take; False: the momentum itself, as published.
        refresh: compressed steps from one refresh of the frozen second moments, a dense step, to the next, >= 1. ``"auto"``: the
            schedule of 0/1 Adam, but 15 compressed steps at least: about a sixteenth to a thirty-second of the steps so far, so
            that refreshes cost ever less. ``"never"``: the second moments stay as they froze, as published. A refresh holds 8
            bytes per parameter more while it lasts.
        denominator_floor: ``phi``; denominators of coordinates with (almost) no gradient are at least phi times the root of their
            tensor's mean second moment (of those that are not 0).
        process_group: ranks that train together; None: the default group.
        force_compression: compress even in a world of one rank.
        bucket_mb: about how many MB of fp32 gradients one bucket carries. None: 16; on a CUDA device 64, because launching kernels costs
            the host more than their work costs the device, but 16 where buckets leave in the midst of backward (dense averages,
            ``overlap="backward"``).
        max_consecutive_skips: the error comes with this many steps in a row skipped because of non-finite gradients. 0: with
            the first such gradient; 1-bit Adam and 1-bit LAMB then find it by what the exchange brings instead of looking
            at all gradients first, which takes a tenth and more off the work of a compressed step.
        kernels: ``"auto"``, ``"reference"``, ``"cpu"`` or ``"cuda"``; all give the same bits.
        timeout: seconds that a rank waits for the others in one collective.
        overlap: ``"step"``, or ``"backward"`` to send buckets as their gradients land (no clipping, no skipping of steps;
            nothing may change gradients after backward).
        residual_dtype: ``"float32"`` or ``"bfloat16"`` (half the memory of the residuals, some accuracy).
        denominator_dtype: ``"float32"`` or ``"bfloat16"``: half the memory of the frozen reciprocal denominators, 2 bytes per
            parameter, and less to read in every compressed step. A coordinate's step is then off by a constant factor of at most
            1 + 2**-8 until the next refresh.

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
        freeze_step: int | None = None,
        bias_correction: bool = True,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        denominator_floor: float = 0.1,
        preconditioned: bool = True,
        refresh: int | RefreshRule = "auto",
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float | None = None,
        max_consecutive_skips: int = 100,
        kernels: Backend = "auto",
        timeout: float = 1800.0,
        overlap: Overlap = "step",
        residual_dtype: StateDtype = "float32",
        denominator_dtype: StateDtype = "float32",
    ) -> None:
        check_flag("preconditioned", preconditioned)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            CommonOptions(
                block_size=block_size,
                max_grad_norm=max_grad_norm,
                process_group=process_group,
                force_compression=force_compression,
                bucket_mb=bucket_mb,
                max_consecutive_skips=max_consecutive_skips,
                kernels=kernels,
                timeout=timeout,
                overlap=overlap,
                residual_dtype=residual_dtype,
                denominator_dtype=denominator_dtype,
            ),
            {
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
                "denominator_floor": denominator_floor,
                "preconditioned": preconditioned,
                "refresh": refresh,
            },
        )

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; refreshes are dense."""
        dense = freeze_step + VariancePolicy().count(freeze_step, steps)
        return Rounds(dense, steps - dense)

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        decay = self._by_block("decay", bucket, self._decay)
        alpha = self._by_block("alpha", bucket, lambda i: self._group(i)["lr"] / self._first_correction(i))
        r = None if self._preconditioned else bucket.slice(self._flat["r"])
        self._kernels.apply_adam(bucket, self._bind_weights(bucket), packed, r, decay, alpha)
