"""1-bit Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import Bucket, memory_order
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.base import Coefficients, OnebitOptimizer, Phase
from lightning_onebit.optim.options import CommonOptions, check_flag, check_integer, check_number
from lightning_onebit.optim.rules import dense_adamw_, reciprocal_denominator_, second_moment_from_reciprocal


class OnebitAdam(OnebitOptimizer):
    r"""1-bit Adam: Adam with a frozen second moment and one-bit, error-compensated momentum.

    For ``t <= freeze_step`` (warm-up) gradients are averaged densely and the step is that of ``torch.optim.AdamW``.
    Afterwards::

        m = exchange(b1 m + (1-b1) g_i)                        # the averaged, compressed momentum becomes m
        x -= lr*wd*x + lr * mhat / (sqrt(vhat_freeze) + eps)

    Source: "1-bit Adam", arXiv 2102.02888, algorithm 1; this library's differences are listed in docs/differences.

    ``.grad`` holds the local gradient; ``step()`` does all communication it owes. Do not wrap the module in
    DistributedDataParallel. Weight decay is decoupled, as in AdamW. Parameters may be fp32, bf16 or fp16 (fp32 master
    weights are
    kept for the latter two); all state is fp32.

    Args:
        params: parameters or parameter groups. A group may set ``lr``, ``betas``, ``eps``, ``weight_decay`` and
            ``compress=False``
            (always averaged densely; its second moments keep learning).
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, each in ``[0, 1)``.
        eps: added to the denominator, >= 0.
        weight_decay: decoupled weight decay, >= 0.
        freeze_step: number of dense steps, >= 1; None: the switch is made by ``freeze()`` (``callbacks.VarianceFreeze``
            does it).
            The published hand rule is 15-25 % of all steps.
        bias_correction: True means what torch's AdamW means; False gives the published recipe.
        block_size: elements that share one scale, a multiple of 32.
        max_grad_norm: clips the global norm (of the averaged gradient in dense steps, ``sqrt((1/n) sum_i ||g_i||^2)``
            in compressed ones).
        denominator_floor: ``phi``; denominators of coordinates with (almost) no gradient are at least phi times their
            tensor's mean.
        process_group: ranks that train together; None: the default group.
        force_compression: compress even in a world of one rank.
        bucket_mb: about how many MB of fp32 gradients one bucket carries.
        max_consecutive_skips: steps in a row that may be skipped because of non-finite gradients before an error.
        kernels: ``"auto"``, ``"reference"``, ``"cpu"`` or ``"cuda"``; all give the same bits.
        timeout: seconds that a rank waits for the others in one collective.

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
        denominator_floor: float = 0.01,
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float = 16.0,
        max_consecutive_skips: int = 100,
        kernels: str = "auto",
        timeout: float = 1800.0,
    ) -> None:
        check_integer("freeze_step", freeze_step, least=1, optional=True)
        check_flag("bias_correction", bias_correction)
        check_number("denominator_floor", denominator_floor, least=0, most=1)
        # by parameter index: number of updates the second moment had when it froze
        self._variance_steps: dict[int, int] = {}
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
            ),
            {
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
                "denominator_floor": denominator_floor,
            },
        )

    def _dense_update(self, group: dict[str, Any], members: list[int]) -> None:
        dense_adamw_(
            [self._weight(i) for i in members],
            [self._grad(i) for i in members],
            [self._moment("m", i) for i in members],
            [self._moment("v", i) for i in members],
            [self._t[i] for i in members],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=self.settings["bias_correction"],
        )

    def _enter_compressed(self) -> None:
        """Inverts the denominators once; v gives its memory to them."""
        v = self._flat.pop("v")
        for slot, i in enumerate(self._slots):
            self._variance_steps.setdefault(i, self._t[i])
            part = self._part(v, slot)
            reciprocal_denominator_(
                part,
                part,
                phi=self.settings["denominator_floor"],
                eps=self._group(i)["eps"],
                correction=self._second_correction(i),
            )
        self._flat["r"] = v

    def _coefficients(self, bucket: Bucket, lo: int, hi: int) -> Coefficients:
        b1 = [self._group(i)["betas"][0] for i in self._slots]
        a = self._per_block(bucket, b1)[lo:hi]
        b = self._per_block(bucket, [(1.0 - beta) * self._grad_scale for beta in b1])[lo:hi]
        return Coefficients(a, self._momentum_of(bucket, lo, hi), b)

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        groups = [self._group(i) for i in self._slots]
        decay = self._per_block(bucket, [1.0 - g["lr"] * g["weight_decay"] for g in groups])
        alpha = self._per_block(
            bucket, [g["lr"] / self._first_correction(i) for i, g in zip(self._slots, groups, strict=True)]
        )
        self._kernels.apply_adam(
            bucket, self._bind_weights(bucket), packed, bucket.slice(self._flat["r"]), decay, alpha
        )

    def _first_correction(self, index: int) -> float:
        """``1 - b1**t``, or 1 without bias correction."""
        if not self.settings["bias_correction"]:
            return 1.0
        return 1.0 - self._group(index)["betas"][0] ** max(1, self._t[index])

    def _second_correction(self, index: int) -> float:
        """``1 - b2**k`` with k the updates that v has had, or 1 without bias correction."""
        if not self.settings["bias_correction"]:
            return 1.0
        return 1.0 - self._group(index)["betas"][1] ** max(1, self._variance_steps[index])

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _saved_arenas(self) -> Iterator[tuple[str, Tensor]]:
        yield from super()._saved_arenas()
        if "r" not in self._flat:
            return
        r = self._flat["r"]
        yield "reciprocal_denominator", r
        # For others (plain AdamW, another world): the floored moments. A plain Adam that went on with v = 0 under a
        # momentum that
        # holds compression noise would explode.
        v = torch.zeros_like(r)
        for slot, i in enumerate(self._slots):
            if i in self._variance_steps:
                self._part(v, slot).copy_(
                    second_moment_from_reciprocal(
                        self._part(r, slot), eps=self._group(i)["eps"], correction=self._second_correction(i)
                    )
                )
        yield "exp_avg_sq", v

    def _books(self) -> dict[str, Any]:
        return {**super()._books(), "variance_steps": dict(self._variance_steps)}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        self._variance_steps = {int(i): int(k) for i, k in books.get("variance_steps", {}).items()}
        super()._load_phase(phase, books, saved)
        if "r" in self._flat:
            for i, state in saved.items():
                if "reciprocal_denominator" in state and i in self._slot_of:
                    self._part(self._flat["r"], self._slot_of[i]).copy_(memory_order(state["reciprocal_denominator"]))
