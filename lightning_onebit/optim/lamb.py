"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import Bucket
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.moments import AdamMoments
from lightning_onebit.optim.options import CommonOptions, check_flag, check_number
from lightning_onebit.optim.rules import dense_lamb_

# per-parameter scalars that the algorithm carries, by their names in a checkpoint, with their first values
_SCALARS = {"coeff_average": 0.0, "last_factor": 1.0, "last_coeff": 1.0, "weight_norm": 0.0}


class OnebitLamb(AdamMoments):
    r"""1-bit LAMB: layer-wise adaptive steps with frozen, then corrected trust ratios and one-bit momentum.

    Warm-up, per parameter tensor (this is LAMB)::

        u = mhat / (sqrt(vhat) + eps) + wd*x ;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 if a norm is 0
        c_avg = coeff_beta*c_avg + (1-coeff_beta)*c  if c != 1 ;  x -= lr*c*u

    Compressed stage::

        m = exchange(b1 m + (1-b1) g_i) ;  ghat = (m - b1 m_old)/(1-b1) ;  vfresh = b2 vfresh + (1-b2) ghat^2
        f = max_j D_j / Dfresh_j ;  k = min(1, ||up||/||u||) ;  f = f*k + (1-k)  (if wd > 0)
        f = clip(clip(f, factor_min, factor_max), r(1-factor_threshold), r(1+factor_threshold)) ;  r = f
        c = clip(c_avg*f * ||x||/w0, min_coeff, max_coeff)  (c_avg*f where a norm is 0)
        x -= lr * c * u ,  up = mhat/D ,  u = up + wd*x

    ``w0`` is ``||x||`` at the first compressed step that finds it above 0.

    Source: "1-bit LAMB", arXiv 2104.06069, algorithm 1; this library's differences are listed in docs/differences.

    Args:
        params: parameters or parameter groups (see ``OnebitAdam``).
        lr: learning rate; LAMB's own recipe for BERT-Large is 11e-3 with ``weight_decay=0.01``, ``max_coeff=0.3``.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decay inside LAMB's update ``u`` (never inside a compressed quantity).
        freeze_step: number of dense steps, >= 1; None: by ``freeze()``.
        max_coeff: upper clip of the trust ratio, > 0.
        min_coeff: lower clip of the trust ratio, >= 0, at most ``max_coeff``.
        coeff_beta: decay of the average of trust ratios, in ``[0, 1)``.
        factor_max: upper clip of the correction f, > 0.
        factor_min: lower clip of the correction f, >= 0, at most ``factor_max``.
        factor_threshold: how much f may change in one step, relative, >= 0.
        track_weight_norm: whether the frozen ratio follows ``||x||``, which every rank knows exactly and which goes on growing after
            the freeze; False: ``c = c_avg*f``, as published.
        bias_correction: as in ``OnebitAdam``.
        block_size: as in ``OnebitAdam``, like the options after it.
        max_grad_norm: see ``OnebitAdam``.
        denominator_floor: see ``OnebitAdam``.
        process_group: see ``OnebitAdam``.
        force_compression: see ``OnebitAdam``.
        bucket_mb: see ``OnebitAdam``.
        max_consecutive_skips: see ``OnebitAdam``.
        kernels: see ``OnebitAdam``.
        timeout: see ``OnebitAdam``.
        overlap: see ``OnebitAdam``.
        residual_dtype: see ``OnebitAdam``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.

    Example:
        >>> optimizer = OnebitLamb(model.parameters(), lr=11e-3, weight_decay=0.01, max_coeff=0.3, freeze_step=1000)
    """

    algorithm = "onebit_lamb"
    _replicated: ClassVar[dict[str, str]] = {**AdamMoments._replicated, "exp_avg_sq_fresh": "fresh"}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        track_weight_norm: bool = True,
        bias_correction: bool = True,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        denominator_floor: float = 0.1,
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float = 16.0,
        max_consecutive_skips: int = 100,
        kernels: str = "auto",
        timeout: float = 1800.0,
        overlap: str = "step",
        residual_dtype: str = "float32",
    ) -> None:
        check_number("max_coeff", max_coeff, above=0)
        check_number("min_coeff", min_coeff, least=0, most=max_coeff)
        check_number("coeff_beta", coeff_beta, least=0, below=1)
        check_number("factor_max", factor_max, above=0)
        check_number("factor_min", factor_min, least=0, most=factor_max)
        check_number("factor_threshold", factor_threshold, least=0)
        check_flag("track_weight_norm", track_weight_norm)
        # per parameter: c_avg, r (the last f), the coefficient last used and w0 (0: not known); fp64, on the parameters' device
        self._scalars: dict[str, Tensor] = {}
        # by bucket, between the two passes of a step: partial norms, and the result where the momentum is kept unpacked
        self._partials: dict[int, Tensor] = {}
        self._exchanged: dict[int, Packed] = {}
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
            ),
            {
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
                "denominator_floor": denominator_floor,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
                "coeff_beta": coeff_beta,
                "factor_max": factor_max,
                "factor_min": factor_min,
                "factor_threshold": factor_threshold,
                "track_weight_norm": track_weight_norm,
            },
        )

    def get_lamb_coeffs(self) -> dict[str, float]:
        """The coefficients c of the last step.

        Returns:
            A fresh dict, name (or ``"parameter i"``) -> coefficient, of the parameters that have been stepped.
        """
        if not self._scalars:
            return {}
        values = self._scalars["last_coeff"].tolist()
        return {self.name_of(i): values[i] for i in self._known() if self._t[i] > 0}

    # ----- warm-up ----------------------------------------------------------------------------------------------------

    def _layout(self, kept: dict[int, dict[str, Tensor]]) -> None:
        super()._layout(kept)
        for name, value in _SCALARS.items():
            scalars = torch.full((len(self._params),), value, dtype=torch.float64, device=self._device)
            known = self._scalars.get(name)
            if known is not None:
                scalars[: len(known)] = known  # groups are only ever added behind those there are
            self._scalars[name] = scalars

    def _dense_update(self, group: dict[str, Any], members: list[int]) -> None:
        settings = self.settings
        coeffs = dense_lamb_(
            [self._weight(i) for i in members],
            [self._grad(i) for i in members],
            [self._moment("m", i) for i in members],
            [self._moment("v", i) for i in members],
            [self._t[i] + 1 for i in members],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=settings["bias_correction"],
            clip=(settings["min_coeff"], settings["max_coeff"]),
        )
        index = upload(members, self._device)
        average = self._scalars["coeff_average"]
        beta = settings["coeff_beta"]
        moved = torch.where(coeffs != 1, beta * average[index] + (1 - beta) * coeffs, average[index])
        average[index] = moved
        self._scalars["last_coeff"][index] = coeffs
        # an average that has moved belongs to the norm of now (one rank alone steps so after the freeze too)
        self._scalars["weight_norm"].index_fill_(0, index, 0.0)

    # ----- compressed stage -------------------------------------------------------------------------------------------

    def _enter_compressed(self) -> None:
        # the second moments as they froze, floor applied, are where the fresh ones start
        fresh = self._flat["v"].clone()
        self._floored(fresh)
        super()._enter_compressed()
        self._flat["fresh"] = fresh
        average = self._scalars["coeff_average"]
        average[average == 0] = 1.0

    def _leave_compressed(self) -> None:
        super()._leave_compressed()
        self._flat.pop("fresh", None)
        self._scalars["weight_norm"].zero_()

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """A new buffer: the old momentum is still needed to recover the averaged gradient."""
        return self._payload(bucket, self._ranks().size).raw

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        old = self._momentum[bucket.index]
        values: tuple[Callable[[int], float], ...] = (
            lambda i: self._group(i)["betas"][0],
            lambda i: 1.0 / (1.0 - self._group(i)["betas"][0]),
            lambda i: self._group(i)["betas"][1],
            lambda i: 1.0 - self._group(i)["betas"][1],
            lambda i: 1.0 / self._second_correction(i),
            lambda i: self._group(i)["eps"],
            lambda i: 1.0 / self._first_correction(i),
            lambda i: self._group(i)["weight_decay"],
        )
        factors = self._by_block("factors", bucket, *values)
        self._partials[bucket.index] = self._kernels.lamb_update(
            bucket,
            self._bind_weights(bucket),
            packed,
            old,
            bucket.slice(self._flat["r"]),
            bucket.slice(self._flat["fresh"]),
            factors,
        )

    def _end_exchange(self) -> None:
        """Per-tensor norms are complete once all buckets are: now correct the coefficients and step."""
        if not self._partials:
            return
        step, coefficient = self._corrected_coefficients()
        for bucket in self._buckets():
            held = self._momentum[bucket.index]
            if bucket.index not in self._partials:
                continue
            packed = held if isinstance(held, Packed) else self._exchanged[bucket.index]
            self._kernels.lamb_apply(
                bucket,
                self._bind_weights(bucket),
                packed,
                bucket.slice(self._flat["r"]),
                self._by_block("alpha", bucket, lambda i: 1.0 / self._first_correction(i), alike=True),
                self._by_block("wd", bucket, lambda i: self._group(i)["weight_decay"], alike=True),
                step[bucket.block_param],
            )
        index = upload([i for i in self._slots if self._active[i]], self._device)
        slots = upload([s for s, i in enumerate(self._slots) if self._active[i]], self._device)
        self._scalars["last_coeff"][index] = coefficient[slots]
        self._partials, self._exchanged = {}, {}

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """See the base; keeps the packed form of a bucket whose momentum had to be unpacked."""
        super().finish(bucket, gathered)
        if not isinstance(self._momentum[bucket.index], Packed):
            self._exchanged[bucket.index] = Packed(gathered, bucket.blocks // self._ranks().size, bucket.block_size)

    def _begin_exchange(self) -> None:
        self._partials, self._exchanged = {}, {}

    def _corrected_coefficients(self) -> tuple[Tensor, Tensor]:
        """``(lr * c, c)`` per slot, fp32 and fp64, from the blocks' partial norms in a fixed order."""
        s = self.settings
        (up, u, norm), largest = self._per_slot_norms()
        factor = torch.where(largest > 0, largest, torch.ones_like(largest))
        k = torch.where(u > 0, (up / torch.where(u > 0, u, torch.ones_like(u))).clamp(max=1.0), torch.ones_like(u))
        decays = upload([self._group(i)["weight_decay"] > 0 for i in self._slots], self._device)
        factor = torch.where(decays, factor * k + (1 - k), factor)
        index = upload(self._slots, self._device)
        last = self._scalars["last_factor"][index]
        factor = factor.clamp(s["factor_min"], s["factor_max"])
        factor = torch.minimum(
            torch.maximum(factor, last * (1 - s["factor_threshold"])), last * (1 + s["factor_threshold"])
        )
        active = upload([self._active[i] for i in self._slots], self._device)
        self._scalars["last_factor"][index] = torch.where(active, factor, last)
        coefficient = self._scalars["coeff_average"][index] * factor
        if s["track_weight_norm"]:
            coefficient = self._followed(coefficient, norm, index)
        lr = upload([self._group(i)["lr"] for i in self._slots], self._device, torch.float64)
        return (lr * coefficient).float(), coefficient

    def _followed(self, frozen: Tensor, norm: Tensor, index: Tensor) -> Tensor:
        """Coefficients per slot, from ``c_avg*f`` and ``||x||`` (0 where a parameter sits out); takes w0 where it is not known yet."""
        s = self.settings
        known = self._scalars["weight_norm"][index]
        first = torch.where(known == 0, norm, known)
        self._scalars["weight_norm"][index] = first
        has_norms = (first > 0) & (norm > 0)
        now = frozen * norm / torch.where(has_norms, first, torch.ones_like(first))
        return torch.where(has_norms, now.clamp(s["min_coeff"], s["max_coeff"]), frozen)

    def _per_slot_norms(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """``||up||``, ``||u||``, ``||x||`` and the largest ratios, ``(slots,)``, fp64, blocks taken in order (deterministic)."""
        plan = self._known_plan()
        rows = torch.zeros((plan.blocks, 4), dtype=torch.float64, device=self._device)
        for bucket in plan.buckets:
            if bucket.index in self._partials:
                rows[bucket.first_block : bucket.first_block + bucket.blocks] = self._partials[bucket.index].double()
        counts = self._slot_blocks()
        # blocks lie in reverse parameter order, and padding blocks come last
        used = rows[: sum(counts)]
        lengths = upload(list(reversed(counts)), self._device)
        sums = torch.segment_reduce(used, "sum", lengths=lengths, initial=0.0, unsafe=True).flip(0)
        largest = torch.segment_reduce(used[:, 2:3], "max", lengths=lengths, initial=0.0, unsafe=True).flip(0)
        return tuple(sums[:, column].sqrt() for column in (0, 1, 3)), largest[:, 0]

    def _slot_blocks(self) -> Sequence[int]:
        size = self.options.block_size
        return [-(-self._params[i].numel() // size) for i in self._slots]

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        return {**super()._books(), **{name: values.tolist() for name, values in self._scalars.items()}}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        for name, value in _SCALARS.items():
            known = books.get(name, [value] * len(self._params))
            self._scalars[name].copy_(torch.tensor(known, dtype=torch.float64))
        super()._load_phase(phase, books, saved)
        if "fresh" in self._flat:
            self._load_arena(self._flat["fresh"], "exp_avg_sq_fresh", saved)
