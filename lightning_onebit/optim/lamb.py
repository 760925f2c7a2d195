"""1-bit LAMB."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import Bucket, share_values
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.moments import AdamMoments
from lightning_onebit.optim.options import CommonOptions, check_choice, check_number
from lightning_onebit.optim.rules import dense_lamb_, preconditioned_squares, sum_in_order

#: what trust_ratio may be, and the options that only "frozen" uses, with their defaults
TRUST_RATIOS = ("followed", "frozen")
FACTORS = {"factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}

#: compressed steps at the end of which gradients are measured: the first ones, whose mean is what later ones are compared with, and every
#: tenth from there, which counts in the average by this weight
REFERENCE_STEPS, MEASURE_EVERY, MEASURE_WEIGHT = 10, 10, 0.2

# Per-parameter scalars, by their names in a checkpoint, with their first values. Of the published rule: c_avg, r (the last f). Of the other
# one: number of measurements, w0, G0, G; then rho, and c of the next step and of the last.
_PUBLISHED = {"coeff_average": 0.0, "last_factor": 1.0}
_MEASURED = {"measurements": 0.0, "weight_norm": 0.0, "gradient_reference": 0.0, "gradient_energy": 0.0}
_SCALARS = {**_PUBLISHED, **_MEASURED, "ratio_average": 0.0, "coefficient": 1.0, "last_coeff": 1.0}


class OnebitLamb(AdamMoments):
    r"""1-bit LAMB: layer-wise adaptive steps, frozen second moments, and one bit per coordinate in the exchange.

    Warm-up, per parameter tensor (this is LAMB)::

        u = mhat / (sqrt(vhat) + eps) + wd*x ;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 if a norm is 0 ;  x -= lr*c*u

    Compressed stage, ``trust_ratio="followed"``, with ``D = sqrt(vhat_freeze) + eps``::

        s = exchange(b1 s + (1-b1) g_i/D) ;  x -= lr * c * (shat + wd*x)           # s = m/D: steps are compressed, not momenta

    where c follows ``||x||`` as it is, and ``||u||`` where it shrinks, in proportion to local gradients: compression makes the exchanged
    step longer, the more so the smaller gradients become, so that its own norm would mislead. Measured at the end of compressed steps
    1 to 10 and of every tenth from there::

        G = sum_i ||g_i/D||^2 / n^2, averaged over time ;  w0, G0: ||x|| at the first and G over the first ten ;  U0 = w0/rho
        c = clip(||x|| / sqrt((U0^2 - (wd*w0)^2) * min(1, G/G0) + (wd*||x||)^2), min_coeff, max_coeff)

    and ``rho`` is the average of ``||x||/||u||`` at the end of the warm-up, which c is up to the first of these. Where gradients grow
    after the freeze, c does not fall: steps grow with them, as those of 1-bit Adam do.

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
        coeff_beta: decay of the averages of trust ratios, in ``[0, 1)``.
        factor_max: upper clip of the correction f, > 0; like the next two with ``trust_ratio="frozen"`` only.
        factor_min: lower clip of the correction f, >= 0, at most ``factor_max``.
        factor_threshold: how much f may change in one step, relative, >= 0.
        trust_ratio: ``"followed"``: ratios follow both norms after the freeze, as LAMB's do, and steps are compressed; ``"frozen"``: as
            published, with 4 bytes per parameter more and two passes over a compressed step.
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
        trust_ratio: str = "followed",
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
        check_choice("trust_ratio", trust_ratio, TRUST_RATIOS)
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        for name, value in factors.items():
            if trust_ratio != "frozen" and value != FACTORS[name]:
                raise ValueError(
                    f"{name}={value} has no effect with trust_ratio={trust_ratio!r}; leave it out, or say trust_ratio='frozen'"
                )
        # per parameter: see _SCALARS; fp64, on the parameters' device
        self._scalars: dict[str, Tensor] = {}
        # compressed steps since the freeze
        self._ratio_steps = 0
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
                **factors,
                "trust_ratio": trust_ratio,
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
        coeffs, ratios = dense_lamb_(
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
        beta = settings["coeff_beta"]
        average = self._scalars["coeff_average"][index]
        self._scalars["coeff_average"][index] = torch.where(coeffs != 1, beta * average + (1 - beta) * coeffs, average)
        average = self._scalars["ratio_average"][index]
        average = torch.where(average > 0, average, ratios)
        self._scalars["ratio_average"][index] = torch.where(ratios > 0, beta * average + (1 - beta) * ratios, average)
        self._scalars["last_coeff"][index] = coeffs
        # averages that have moved belong to the norms of now (one rank alone steps so after the freeze too)
        self._forget(index)

    def _forget(self, index: Tensor) -> None:
        """Makes the next compressed step of some parameters the first whose norms are measured."""
        for name, value in _MEASURED.items():
            self._scalars[name].index_fill_(0, index, value)
        self._scalars["coefficient"][index] = self._followed(self._scalars["ratio_average"][index])

    def _followed(self, ratio: Tensor) -> Tensor:
        """Trust ratios from ``||x||/||u||``; 1 where that is 0, which stands for not known."""
        clipped = ratio.clamp(self.settings["min_coeff"], self.settings["max_coeff"])
        return torch.where(ratio > 0, clipped, torch.ones_like(ratio))

    # ----- compressed stage -------------------------------------------------------------------------------------------

    def _enter_compressed(self) -> None:
        if self._follows:
            super()._enter_compressed()
            return
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
        self._ratio_steps = 0
        self._forget(torch.arange(len(self._params), device=self._device))

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
            groups = [self._group(i) for i in self._slots]
            rates = [group["lr"] / self._first_correction(i) for i, group in zip(self._slots, groups, strict=True)]
            decays = [group["lr"] * group["weight_decay"] for group in groups]
            c = self._scalars["coefficient"][upload(self._slots, self._device)]
            alpha = (upload(rates, self._device, torch.float64) * c).float()
            decay = (1.0 - upload(decays, self._device, torch.float64) * c).float()
            counts = [bucket.blocks for bucket in plan.buckets]
            tables["followed"], tables["decay"] = (row[plan.block_param].split(counts) for row in (alpha, decay))
        return tables["followed"], tables["decay"]

    def _end_exchange(self) -> None:
        """Measures what trust ratios follow; or, by the published rule, corrects them and steps, now that all norms are complete."""
        if self._follows:
            index = upload([i for i in self._slots if self._active[i]], self._device, torch.int64)
            self._scalars["last_coeff"][index] = self._scalars["coefficient"][index]
            self._ratio_steps += 1
            if self._ratio_steps <= REFERENCE_STEPS or self._ratio_steps % MEASURE_EVERY == 0:
                self._measure()
        elif self._partials:
            self._step_corrected()

    def _measure(self) -> None:
        """Trust ratios of the following steps, from the weights as they are now and all ranks' gradients of this step."""
        plan, r = self._known_plan(), self._flat["r"]
        energies = torch.zeros(len(self._slots), dtype=torch.float64, device=self._device)
        slots, grads, reciprocals = [], [], []
        for bucket in plan.buckets:
            for span, g in zip(bucket.spans, self._bind_grads(bucket), strict=True):
                if g is not None and self._active[self._slots[span.param]]:
                    start = (bucket.first_block + span.block) * bucket.block_size
                    slots.append(span.param)
                    grads.append(g)
                    reciprocals.append(r[start : start + span.numel])
        if grads:
            squares = preconditioned_squares(grads, reciprocals) * self._grad_scale**2
            # runs of one parameter follow each other
            counts = Counter(slots)
            lengths = upload(list(counts.values()), self._device)
            energies[upload(list(counts), self._device)] = torch.segment_reduce(squares, "sum", lengths=lengths)
        norms = torch._foreach_norm([self._weight(i) for i in self._slots], 2, torch.float64)
        index = upload(self._slots, self._device)
        known = {name: self._scalars[name][index] for name in (*_MEASURED, "ratio_average", "coefficient")}
        # replicas are equal, but sums over them may differ in the last bit with the number of threads: rank 0's count
        rows = self._share(torch.stack([energies, torch.stack(norms), known["ratio_average"]]))
        energy, norm, rho = sum_in_order(rows[:, 0]) / len(rows) ** 2, rows[0, 1], rows[0, 2]
        measured, w0, reference, average = (known[name] for name in _MEASURED)
        seen = (energy > 0) & (norm > 0)  # not where a parameter sits out: its energy is 0
        measured = measured + seen
        w0 = torch.where(seen & (w0 == 0), norm, w0)
        young = measured <= REFERENCE_STEPS
        reference = torch.where(seen & young, reference + (energy - reference) / measured.clamp(min=1), reference)
        average = torch.where(seen, torch.where(young, reference, average.lerp(energy, MEASURE_WEIGHT)), average)
        decays = upload([self._group(i)["weight_decay"] for i in self._slots], self._device, torch.float64)
        first = w0 / torch.where(rho > 0, rho, torch.ones_like(rho))
        gradient = (first.square() - (decays * w0).square()).clamp(min=0)
        shrunk = (average / torch.where(seen, reference, torch.ones_like(reference))).clamp(max=1)
        update = gradient * shrunk + (decays * norm).square()
        ratio = norm / torch.where(update > 0, update, torch.ones_like(update)).sqrt()
        coefficient = torch.where(seen & (update > 0), self._followed(ratio), known["coefficient"])
        for name, value in zip(known, (measured, w0, reference, average, rho, coefficient), strict=True):
            self._scalars[name][index] = value

    def _share(self, values: Tensor) -> Tensor:
        """Every rank's values as one row."""
        if self._ranks().size == 1:
            return values[None]
        assert self._transport is not None
        return share_values(self._transport, values, "norms of gradients for 1-bit LAMB's trust ratios")

    def _step_corrected(self) -> None:
        coefficient = self._corrected_coefficients()
        lr = upload([self._group(i)["lr"] for i in self._slots], self._device, torch.float64)
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
        if not self._follows and not isinstance(self._momentum[bucket.index], Packed):
            self._exchanged[bucket.index] = Packed(gathered, bucket.blocks // self._ranks().size, bucket.block_size)

    def _begin_exchange(self) -> None:
        self._partials, self._exchanged = {}, {}

    def _corrected_coefficients(self) -> Tensor:
        """``c_avg*f`` per slot, fp64, from the blocks' partial norms in a fixed order."""
        s = self.settings
        (up, u), largest = self._per_slot_norms()
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
        return self._scalars["coeff_average"][index] * factor

    def _per_slot_norms(self) -> tuple[Sequence[Tensor], Tensor]:
        """``||up||``, ``||u||`` and the largest ratios, ``(slots,)``, fp64, blocks taken in order (deterministic)."""
        plan = self._known_plan()
        rows = torch.zeros((plan.blocks, 3), dtype=torch.float64, device=self._device)
        for bucket in plan.buckets:
            if bucket.index in self._partials:
                rows[bucket.first_block : bucket.first_block + bucket.blocks] = self._partials[bucket.index].double()
        counts = self._slot_blocks()
        # blocks lie in reverse parameter order, and padding blocks come last
        used = rows[: sum(counts)]
        lengths = upload(list(reversed(counts)), self._device)
        sums = torch.segment_reduce(used, "sum", lengths=lengths, initial=0.0, unsafe=True).flip(0)
        largest = torch.segment_reduce(used[:, 2:], "max", lengths=lengths, initial=0.0, unsafe=True).flip(0)
        return sums[:, :2].sqrt().unbind(dim=1), largest[:, 0]

    def _slot_blocks(self) -> Sequence[int]:
        size = self.options.block_size
        return [-(-self._params[i].numel() // size) for i in self._slots]

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        scalars = {name: values.tolist() for name, values in self._scalars.items()}
        return {**super()._books(), **scalars, "ratio_steps": self._ratio_steps}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        for name, value in _SCALARS.items():
            known = books.get(name, [value] * len(self._params))
            self._scalars[name].copy_(torch.tensor(known, dtype=torch.float64))
        self._ratio_steps = books.get("ratio_steps", 0)
        super()._load_phase(phase, books, saved)
        if "fresh" in self._flat:
            self._load_arena(self._flat["fresh"], "exp_avg_sq_fresh", saved)
