"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit._choices import Backend, Overlap, StateDtype
from lightning_onebit.comm import Bucket, Plan, memory_order
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.late import LateParameters
from lightning_onebit.optim.options import CommonOptions, check_number
from lightning_onebit.optim.rules import dense_lamb_, floor_second_moment_

# Per-parameter scalars, by their names in a checkpoint, with their first values: c_avg, r (the last f) and c of the last step
_SCALARS = {"coeff_average": 0.0, "last_factor": 1.0, "last_coeff": 1.0}


class OnebitLamb(LateParameters):
    r"""1-bit LAMB: layer-wise adaptive steps, frozen second moments, and one bit per coordinate in the exchange.

    Warm-up, per parameter tensor (this is LAMB)::

        u = mhat / (sqrt(vhat) + eps) + wd*x ;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 if a norm is 0 ;  x -= lr*c*u
        c_avg = coeff_beta*c_avg + (1-coeff_beta)*c  (if c != 1)

    Compressed stage, with ``D = sqrt(vhat_freeze) + eps``::

        m = exchange(b1 m + (1-b1) g_i) ;  ghat = (m - b1 m_old)/(1-b1) ;  vfresh = b2 vfresh + (1-b2) ghat^2
        f = max_j D_j / Dfresh_j ;  k = min(1, ||up||/||u||) ;  f = f*k + (1-k)  (if wd > 0)
        f = clip(clip(f, factor_min, factor_max), r(1-factor_threshold), r(1+factor_threshold)) ;  r = f
        x -= lr * c_avg*f * u ,  up = mhat/D ,  u = up + wd*x

    Two passes over a step: ``f`` needs norms of the whole tensor.

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
        coeff_beta: decay of the average of trust ratios that freezes, in ``[0, 1)``.
        factor_max: upper clip of the correction f, > 0.
        factor_min: lower clip of the correction f, >= 0, at most ``factor_max``.
        factor_threshold: how much f may change in one step, relative, >= 0.
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
        denominator_dtype: see ``OnebitAdam``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.

    Example:
        >>> optimizer = OnebitLamb(model.parameters(), lr=11e-3, weight_decay=0.01, max_coeff=0.3, freeze_step=1000)
    """

    algorithm = "onebit_lamb"
    STEP_BYTES = 44.5  # a pass before reads x and denominators, reads and writes vfresh
    _replicated: ClassVar[dict[str, str]] = {**LateParameters._replicated, "exp_avg_sq_fresh": "fresh"}

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
        bias_correction: bool = True,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        denominator_floor: float = 0.1,
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
        check_number("max_coeff", max_coeff, above=0)
        check_number("min_coeff", min_coeff, least=0, most=max_coeff)
        check_number("coeff_beta", coeff_beta, least=0, below=1)
        check_number("factor_max", factor_max, above=0)
        check_number("factor_min", factor_min, least=0, most=factor_max)
        check_number("factor_threshold", factor_threshold, least=0)
        # per parameter: see _SCALARS; fp64, on the parameters' device
        self._scalars: dict[str, Tensor] = {}
        # by bucket, between the two passes of a step: partial norms, and the result where the momentum is kept unpacked
        self._partials: dict[int, Tensor] = {}
        self._exchanged: dict[int, Packed] = {}
        # of a plan: runs of blocks (of a slot each, or padding), and where the runs of all slots are among them
        self._lengths_of: tuple[Plan, Tensor, Tensor] | None = None
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
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
                "coeff_beta": coeff_beta,
                "factor_max": factor_max,
                "factor_min": factor_min,
                "factor_threshold": factor_threshold,
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

    def _layout_dense(self, kept: dict[int, dict[str, Tensor]]) -> None:
        super()._layout_dense(kept)
        # here, for compress=False groups may join after the freeze, when nothing else is laid out anew
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
            norms=self._kernels.norms,
        )
        index = upload(members, self._device)
        beta = settings["coeff_beta"]
        average = self._scalars["coeff_average"][index]
        average = torch.where(coeffs != 1, beta * average + (1 - beta) * coeffs, average)
        self._scalars["coeff_average"][index] = average
        self._scalars["last_coeff"][index] = coeffs

    def _reset_some(self, params: list[Tensor]) -> None:
        super()._reset_some(params)
        index = torch.tensor([t == 0 for t in self._t], device=self._device)
        for name, value in _SCALARS.items():
            if name in self._scalars:
                self._scalars[name][index] = value

    # ----- compressed stage -------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[tuple[Hashable, ...]]:
        """See the base; the updates that second moments had before they froze count too."""
        updates = map(self._variance_steps.get, self._slots)
        return [(*kind, k) for kind, k in zip(super()._kinds(), updates, strict=True)]

    def _enter_compressed(self) -> None:
        # the second moments as they froze, floor applied, are where the fresh ones start
        fresh = self._flat["v"].clone()
        self._floored(fresh)
        super()._enter_compressed()
        self._flat["fresh"] = fresh
        self._default_ratios([i for i in self._slots if i not in self._late])

    def _default_ratios(self, indices: Sequence[int]) -> None:
        """1 where every trust ratio so far was exactly 1, or there was none."""
        average, index = self._scalars["coeff_average"], upload(indices, self._device, torch.int64)
        average[index] = torch.where(average[index] == 0, 1.0, average[index])

    def _append(self) -> None:
        first = sum(self._segments)
        super()._append()
        if "fresh" in self._flat:
            self._default_ratios(self._slots[first:])

    def _first_gradients(self, indices: list[int]) -> None:
        super()._first_gradients(indices)
        self._scalars["coeff_average"][upload(indices, self._device, torch.int64)] = 0.0

    def _take_in(self, index: int, state: dict[str, Tensor]) -> None:
        if "fresh" in self._flat:
            fresh = self._part(self._flat["fresh"], self._slot_of[index])
            floor_second_moment_(fresh.copy_(memory_order(state["v"])), phi=self.settings["denominator_floor"])
            self._default_ratios([index])
        super()._take_in(index, state)

    def _leave_compressed(self) -> None:
        super()._leave_compressed()
        self._flat.pop("fresh", None)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """See the base; a new buffer, for the old momentum is still needed to recover the averaged gradient."""
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
        """Corrects the trust ratios and steps, now that all norms are complete."""
        if not self._partials:
            return
        coefficient = self._corrected_coefficients()
        lr = upload(self._by_slot("lr", lambda i: self._group(i)["lr"]), self._device, torch.float64)
        step = (lr * coefficient).float()
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
                self._by_block("alpha", bucket, lambda i: 1.0 / self._first_correction(i)),
                self._by_block("wd", bucket, lambda i: self._group(i)["weight_decay"]),
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

    def _corrected_coefficients(self) -> Tensor:
        """``c_avg*f`` per slot, fp64, from the blocks' partial norms in a fixed order."""
        s = self.settings
        (up, u), largest = self._per_slot_norms()
        factor = torch.where(largest > 0, largest, torch.ones_like(largest))
        k = torch.where(u > 0, (up / torch.where(u > 0, u, torch.ones_like(u))).clamp(max=1.0), torch.ones_like(u))
        decays = upload(self._by_slot("decays", lambda i: self._group(i)["weight_decay"] > 0), self._device)
        factor = torch.where(decays, factor * k + (1 - k), factor)
        index = upload(self._slots, self._device)
        last = self._scalars["last_factor"][index]
        factor = factor.clamp(s["factor_min"], s["factor_max"])
        factor = torch.minimum(
            torch.maximum(factor, last * (1 - s["factor_threshold"])), last * (1 + s["factor_threshold"])
        )
        active = upload([self._active[i] for i in self._slots], self._device)
        self._scalars["last_factor"][index] = torch.where(active, factor, last)
        return self._scalars["coeff_average"][index] * factor

    def _per_slot_norms(self) -> tuple[Sequence[Tensor], Tensor]:
        """``||up||``, ``||u||`` and the largest ratios, ``(slots,)``, fp64, blocks taken in order (deterministic)."""
        plan = self._known_plan()
        rows = torch.zeros((plan.blocks, 3), dtype=torch.float64, device=self._device)
        for bucket in plan.buckets:
            if bucket.index in self._partials:
                rows[bucket.first_block : bucket.first_block + bucket.blocks] = self._partials[bucket.index].double()
        return self._per_slot(rows[:, :2], "sum").sqrt().unbind(dim=1), self._per_slot(rows[:, 2:], "max")[:, 0]

    def _per_slot(self, rows: Tensor, reduction: str) -> Tensor:
        """Reduces what blocks have (``(blocks, k)``) to what slots have (``(slots, k)``), blocks taken in order."""
        plan = self._known_plan()
        if self._lengths_of is None or self._lengths_of[0] is not plan:
            # blocks of a segment lie in reverse order of its slots, and padding blocks come last
            counts: list[int] = []
            places: list[int] = []
            for size in self._segments:
                slots = self._slots[len(places) : len(places) + size]
                places += reversed(range(len(counts), len(counts) + size))
                blocks = [-(-self._params[i].numel() // plan.block_size) for i in reversed(slots)]
                counts += [*blocks, -sum(blocks) % self._ranks().size]
            self._lengths_of = plan, upload(counts, self._device), upload(places, self._device)
        _, lengths, where = self._lengths_of
        return torch.segment_reduce(rows, reduction, lengths=lengths, initial=0.0, unsafe=True)[where]

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        scalars = {name: values.tolist() for name, values in self._scalars.items()}
        return {**super()._books(), **scalars}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        for name, value in _SCALARS.items():
            known = books.get(name, [])
            known = [*known, *[value] * (len(self._params) - len(known))]  # parameters that have joined since have none
            self._scalars[name].copy_(torch.tensor(known, dtype=torch.float64))
        super()._load_phase(phase, books, saved)
        if "fresh" in self._flat:
            self._load_arena(self._flat["fresh"], "exp_avg_sq_fresh", saved)
