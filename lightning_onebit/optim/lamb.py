"""1-bit LAMB."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit._choices import Backend, Overlap, RefreshRule, StateDtype, TrustRatio, choices
from lightning_onebit.comm import Bucket, Plan, memory_order, share_values
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.options import CommonOptions, check_choice, check_number
from lightning_onebit.optim.refresh import CompressingAdam
from lightning_onebit.optim.rules import dense_lamb_, floor_second_moment_, sum_in_order

log = logging.getLogger("lightning_onebit")

#: what trust_ratio may be, and the options that only "frozen" uses, with their defaults
TRUST_RATIOS = choices(TrustRatio)
FROZEN_OPTIONS = {"coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}

#: compressed steps after the freeze in all of which gradients are measured, the interval from there on, and steps that the averages
#: remember (a measurement counts by the interval over that, or as one of those there are while they are few)
FIRST_STEPS, RATIO_INTERVAL, REMEMBERED_STEPS = 10, 2, 50

# Per-parameter scalars, by their names in a checkpoint, with their first values. Of the published rule: r (the last f). Of the other one:
# number of measurements, averages of X and E. Of both: c_avg, c of the next step and of the last.
_MEASURED = {"measurements": 0.0, "signal": 0.0, "energy": 0.0}
_SCALARS = {"coeff_average": 0.0, "last_factor": 1.0, **_MEASURED, "coefficient": 1.0, "last_coeff": 1.0}


class OnebitLamb(CompressingAdam):
    r"""1-bit LAMB: layer-wise adaptive steps, frozen second moments, and one bit per coordinate in the exchange.

    Warm-up, per parameter tensor (this is LAMB)::

        u = mhat / (sqrt(vhat) + eps) + wd*x ;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 if a norm is 0 ;  x -= lr*c*u

    Compressed stage, ``trust_ratio="followed"``, with ``D = sqrt(vhat_freeze) + eps``::

        s = exchange(b1 s + (1-b1) g_i/D) ;  x -= lr * c * (shat + wd*x)           # s = m/D: steps are compressed, not momenta

    where c is LAMB's own ratio, ``||x||`` over an estimate of what ``||u||`` would be without compression, which makes the exchanged
    step longer. Compression noise is not in the product of exchanged steps and new gradients, so, with ``h_i = g_i/D``, ::

        X = (1/n) sum_i <s_before, h_i> ,  E = (1/n^2) sum_i ||h_i||^2 , both averaged over time ;  S = max(X, 0)
        ||shat||^2 = (2 b1 S + (1-b1) (E + (1-1/n) S)) / (1+b1) / (1-b1^t)^2
        c = clip(||x|| / sqrt(||shat||^2 + (wd*||x||)^2), min_coeff, max_coeff)

    measured in compressed steps 1 to 10 and in every second from there; c counts from the next step on.

    Compressed stage, ``trust_ratio="frozen"`` (as published; ``c_avg = coeff_beta*c_avg + (1-coeff_beta)*c if c != 1`` in the warm-up)::

        m = exchange(b1 m + (1-b1) g_i) ;  ghat = (m - b1 m_old)/(1-b1) ;  vfresh = b2 vfresh + (1-b2) ghat^2
        f = max_j D_j / Dfresh_j ;  k = min(1, ||up||/||u||) ;  f = f*k + (1-k)  (if wd > 0)
        f = clip(clip(f, factor_min, factor_max), r(1-factor_threshold), r(1+factor_threshold)) ;  r = f
        x -= lr * c_avg*f * u ,  up = mhat/D ,  u = up + wd*x

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
        coeff_beta: decay of the average of trust ratios that freezes, in ``[0, 1)``; like the next three with
            ``trust_ratio="frozen"`` only.
        factor_max: upper clip of the correction f, > 0.
        factor_min: lower clip of the correction f, >= 0, at most ``factor_max``.
        factor_threshold: how much f may change in one step, relative, >= 0.
        trust_ratio: ``"followed"``: ratios follow both norms after the freeze, as LAMB's do, and steps are compressed; ``"frozen"``: as
            published, with 4 bytes per parameter more and two passes over a compressed step.
        refresh: see ``OnebitAdam``. None: ``"auto"``, or ``"never"`` with ``trust_ratio="frozen"``, which knows no refreshes.
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
    _replicated: ClassVar[dict[str, str]] = {**CompressingAdam._replicated, "exp_avg_sq_fresh": "fresh"}

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
        trust_ratio: TrustRatio = "followed",
        refresh: int | RefreshRule | None = None,
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
        check_choice("trust_ratio", trust_ratio, TRUST_RATIOS)
        published = {"coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min}
        published["factor_threshold"] = factor_threshold
        for name, value in published.items():
            if trust_ratio != "frozen" and value != FROZEN_OPTIONS[name]:
                raise ValueError(
                    f"{name}={value} has no effect with trust_ratio={trust_ratio!r}; leave it out, or say trust_ratio='frozen'"
                )
        if trust_ratio == "frozen" and refresh not in (None, "never"):
            raise ValueError(
                f"refresh={refresh!r} has no effect with trust_ratio='frozen', whose trust ratios belong to the second moments that froze; "
                "leave it out"
            )
        # per parameter: see _SCALARS; fp64, on the parameters' device
        self._scalars: dict[str, Tensor] = {}
        # compressed steps since the freeze; whether gradients are measured in the running one, and what has been of them so far: numbers
        # of a first block, and this rank's fp64 (blocks, 2) of E and X from there on
        self._ratio_steps = 0
        self._measuring = False
        self._products: list[tuple[int, Tensor]] = []
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
                **published,
                "trust_ratio": trust_ratio,
                "refresh": refresh if refresh is not None else "auto" if trust_ratio == "followed" else "never",
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

    @property
    def _follows(self) -> bool:
        return self.settings["trust_ratio"] == "followed"

    @property
    def _preconditioned(self) -> bool:
        return self._follows

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
        # the first compressed step has it too (one rank alone steps so after the freeze as well)
        self._scalars["coefficient"][index] = coeffs
        self._forget(index)

    def _reset_some(self, params: list[Tensor]) -> None:
        super()._reset_some(params)
        index = torch.tensor([t == 0 for t in self._t], device=self._device)
        for name, value in _SCALARS.items():
            if name in self._scalars:
                self._scalars[name][index] = value

    def _forget(self, index: Tensor) -> None:
        """Makes the next compressed step of some parameters the first in which they are measured."""
        for name, value in _MEASURED.items():
            self._scalars[name].index_fill_(0, index, value)

    # ----- compressed stage -------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[tuple[Hashable, ...]]:
        """See the base; by the published rule the updates that second moments had before they froze count too."""
        if self._follows:
            return super()._kinds()
        updates = map(self._variance_steps.get, self._slots)
        return [(*kind, k) for kind, k in zip(super()._kinds(), updates, strict=True)]

    def _enter_compressed(self) -> None:
        if self._follows:
            super()._enter_compressed()
            return
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
        self._ratio_steps = 0
        self._forget(torch.arange(len(self._params), device=self._device))
        self._flat.pop("fresh", None)

    def _move(self, index: int) -> None:
        """See the base; with the trust ratio there is, whose denominators these are."""
        group, c = self._group(index), float(self._scalars["coefficient"][index])
        self._scalars["last_coeff"][index] = c
        lr_t = group["lr"] * c / self._first_correction(index, ahead=1)
        x = self._weight(index).mul_(1 - group["lr"] * c * group["weight_decay"])
        x.addcmul_(self._moment("m", index), self._moment("r", index), value=-lr_t)

    def _products_of(self, bucket: Bucket) -> Tensor | None:
        """See the base; of every block of this rank's shard, its part of E and X, in steps that are measured."""
        if not self._measuring:
            return None
        lo, hi = self._shard_blocks(bucket)
        products = torch.empty((hi - lo, 2), dtype=torch.float64, device=self._device)
        self._products.append((bucket.first_block + lo, products))
        return products

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """See the base; a new buffer where the old momentum is still needed, to recover the averaged gradient."""
        return super().reply_buffer(bucket) if self._follows else self._payload(bucket, self._ranks().size).raw

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        if self._follows:
            alpha, decay = (table[bucket.index] for table in self._followed_factors())
            self._kernels.apply_adam(bucket, self._bind_weights(bucket), packed, None, decay, alpha)
            return
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

    def _followed_factors(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """``lr*c/(1-b1**t)`` and ``1 - lr*c*wd`` by bucket, fp32 ``(blocks,)``; made once in a step."""
        tables = self._lookups.tables
        if "followed" not in tables:
            plan = self._known_plan()
            rates = self._by_slot("lr_t", lambda i: self._group(i)["lr"] / self._first_correction(i))
            decays = self._by_slot("lr*wd", lambda i: self._group(i)["lr"] * self._group(i)["weight_decay"])
            c = self._scalars["coefficient"][upload(self._slots, self._device)]
            alpha = (upload(rates, self._device, torch.float64) * c).float()
            decay = (1.0 - upload(decays, self._device, torch.float64) * c).float()
            counts = [bucket.blocks for bucket in plan.buckets]
            tables["followed"], tables["decay"] = (row[plan.block_param].split(counts) for row in (alpha, decay))
        return tables["followed"], tables["decay"]

    def _end_exchange(self) -> None:
        """What trust ratios follow; or, by the published rule, corrects them and steps, now that all norms are complete."""
        if self._follows:
            index = upload([i for i in self._slots if self._active[i]], self._device, torch.int64)
            self._scalars["last_coeff"][index] = self._scalars["coefficient"][index]
            self._ratio_steps += 1
            if self._measuring and self._slots:
                self._follow()
        elif self._partials:
            self._step_corrected()

    def _follow(self) -> None:
        """Trust ratios of the following steps, from the weights as they are now and all ranks' gradients of this step."""
        rows = torch.zeros((self._known_plan().blocks, 2), dtype=torch.float64, device=self._device)
        for first, products in self._products:
            rows[first : first + len(products)] = products
        self._products = []
        local = self._per_slot(rows, "sum").T.contiguous()
        scale = self._grad_scale
        local *= upload([scale * scale, scale], self._device, torch.float64)[:, None]
        norms = self._kernels.norms(self._holders(self._slots))
        # replicas are equal, but sums over them may differ in the last bit where ranks have other kernels: rank 0's count
        rows = self._share(torch.cat([local, norms[None]]))
        n = self._ranks().nodes
        energy, signal, norm = sum_in_order(rows[:, 0]) / n**2, sum_in_order(rows[:, 1]) / n, rows[0, 2]
        index = upload(self._slots, self._device)
        known = {name: self._scalars[name][index] for name in (*_MEASURED, "coefficient")}
        active = upload([self._active[i] for i in self._slots], self._device)
        seen = active & (energy > 0) & (norm > 0)
        measured = known["measurements"] + seen
        least = RATIO_INTERVAL / REMEMBERED_STEPS
        weight = torch.where(seen, (1.0 / measured.clamp(min=1)).clamp(min=least), 0.0)
        # (lerp would fuse its operations on some processors)
        energy = known["energy"] + weight * (energy - known["energy"])
        signal = known["signal"] + weight * (signal - known["signal"])
        coefficient = torch.where(seen, self._trust_ratio(norm, energy, signal), known["coefficient"])
        for name, value in zip(known, (measured, signal, energy, coefficient), strict=True):
            self._scalars[name][index] = value

    def _trust_ratio(self, norm: Tensor, energy: Tensor, signal: Tensor) -> Tensor:
        """``||x||/||u||`` by slot, clipped; 1 where a norm is 0."""
        n = self._ranks().nodes
        firsts = self._by_slot("first", self._first_correction)
        b1 = upload(self._by_slot("b1", lambda i: self._group(i)["betas"][0]), self._device, torch.float64)
        decay = upload(self._by_slot("wd", lambda i: self._group(i)["weight_decay"]), self._device, torch.float64)
        shared = signal.clamp(min=0)
        momentum = (2 * b1 * shared + (1 - b1) * (energy + (1 - 1 / n) * shared)) / (1 + b1)
        update = (momentum / upload(firsts, self._device, torch.float64).square() + (decay * norm).square()).sqrt()
        live = (norm > 0) & (update > 0)
        # fp32 is what steps are made with; the same however sums were shared out in a node
        ratio = (norm / torch.where(live, update, 1.0)).float().double()
        return torch.where(live, ratio.clamp(self.settings["min_coeff"], self.settings["max_coeff"]), 1.0)

    def _share(self, values: Tensor) -> Tensor:
        """Every rank's values as one row."""
        if self._ranks().size == 1:
            return values[None]
        assert self._transport is not None
        return share_values(self._transport, values, "norms of gradients for 1-bit LAMB's trust ratios")

    def _step_corrected(self) -> None:
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
        if not self._follows and not isinstance(self._momentum[bucket.index], Packed):
            self._exchanged[bucket.index] = Packed(gathered, bucket.blocks // self._ranks().size, bucket.block_size)

    def _begin_exchange(self) -> None:
        self._partials, self._exchanged, self._products = {}, {}, []
        step = self._ratio_steps + 1
        self._measuring = self._follows and (step <= FIRST_STEPS or step % RATIO_INTERVAL == 0)

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
        return {**super()._books(), **scalars, "ratio_steps": self._ratio_steps}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        for name, value in _SCALARS.items():
            known = books.get(name, [])
            known = [*known, *[value] * (len(self._params) - len(known))]  # parameters that have joined since have none
            self._scalars[name].copy_(torch.tensor(known, dtype=torch.float64))
        self._ratio_steps = books.get("ratio_steps", 0)
        super()._load_phase(phase, books, saved)
        if "fresh" in self._flat:
            self._load_arena(self._flat["fresh"], "exp_avg_sq_fresh", saved)
