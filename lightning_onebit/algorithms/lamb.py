"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit.algorithms.moments import FrozenMoments, MomentOptions, beta1
from lightning_onebit.algorithms.updates import floor_second_moment_
from lightning_onebit.comm import memory_order
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.masters import portions
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, check_number, takes
from lightning_onebit.engine.rule import Rule, Saved
from lightning_onebit.engine.state import load_flat
from lightning_onebit.engine.step import Facts, Group, Part, Step
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload

# elements treated at once where temporaries are needed, so that none grows with the model
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LambCoefficients:
    """How the frozen trust ratios of 1-bit LAMB are averaged and corrected; defaults as published.

    Attributes:
        beta: decay of the average of trust ratios that freezes, in ``[0, 1)``.
        factor_min: lower clip of the correction f, >= 0, at most ``factor_max``.
        factor_max: upper clip of the correction f, > 0.
        threshold: how much f may change in one step, relative, >= 0.
    """

    beta: float = 0.9
    factor_min: float = 0.5
    factor_max: float = 4.0
    threshold: float = 0.1

    def __post_init__(self) -> None:
        """Checks every coefficient."""
        check_number("beta", self.beta, least=0, below=1)
        check_number("factor_max", self.factor_max, above=0)
        check_number("factor_min", self.factor_min, least=0, most=self.factor_max)
        check_number("threshold", self.threshold, least=0)


@dataclass(frozen=True, kw_only=True)
class LambOptions(MomentOptions):
    """Options of 1-bit LAMB.

    Attributes:
        trust_clip: ``(low, high)``, between which trust ratios are clipped, ``0 <= low <= high``, ``high > 0``.
        coefficients: how trust ratios are averaged and corrected.
        freeze_step: see ``MomentOptions``.
        bias_correction: see ``MomentOptions``.
        denominator_floor: see ``MomentOptions``.
        max_grad_norm: see ``Options``.
    """

    trust_clip: tuple[float, float] = (0.01, 10.0)
    coefficients: LambCoefficients = LambCoefficients()

    def __post_init__(self) -> None:
        """Checks every option."""
        super().__post_init__()
        if not isinstance(self.trust_clip, (tuple, list)) or len(self.trust_clip) != 2:
            raise TypeError(f"trust_clip={self.trust_clip!r} must be a pair of numbers (low, high)")
        low, high = self.trust_clip
        check_number("trust_clip[1]", high, above=0)
        check_number("trust_clip[0]", low, least=0, most=high)
        if not isinstance(self.coefficients, LambCoefficients):
            raise TypeError(
                f"coefficients={self.coefficients!r} must be a LambCoefficients, not {type(self.coefficients).__name__}"
            )


# numbers of a parameter in a step, for tables


def _unshare(p: Facts) -> float:
    return float(1.0 / (1.0 - p["betas"][0]))


def _beta2(p: Facts) -> float:
    return float(p["betas"][1])


def _new_share2(p: Facts) -> float:
    return float(1.0 - p["betas"][1])


class Lamb(FrozenMoments):
    """The rule of ``OnebitLamb``. Numbers of each tensor: c_avg, r (the last f) and c of the last step."""

    sends_at_once: ClassVar[bool] = True
    later_arenas: ClassVar[dict[str, str]] = {"fresh": "exp_avg_sq_fresh"}
    numbers: ClassVar[dict[str, float]] = {"coeff_average": 0.0, "last_factor": 1.0, "last_coeff": 1.0}

    def kinds(self) -> Sequence[Hashable]:
        """The updates that second moments had before they froze."""
        return list(map(self.updates.get, self.kept.layout.slots))

    # ----- warm-up -----------------------------------------------------------------------------------------------------

    def dense(self, s: Group) -> None:
        """LAMB: ``u = mhat/(sqrt(vhat) + eps) + wd x ; c = clip(||x||/||u||) ; x -= lr c u``, and c_avg learns c."""
        kept, beta = self.kept, self.options.coefficients.beta
        # a few tensors at a time: u is a temporary of their size
        parts = portions(s.indices, lambda i: kept.layout.params[i].numel(), _CHUNK)
        c = torch.cat([self._dense(Group(s.step, s.of, part)) for part in parts])
        index, numbers = upload(s.indices, kept.device), kept.numbers
        average = numbers["coeff_average"][index]
        numbers["coeff_average"][index] = torch.where(c != 1, beta * average + (1 - beta) * c, average)
        numbers["last_coeff"][index] = c

    def _dense(self, s: Group) -> Tensor:
        """Steps, and returns c of each tensor, fp64."""
        (b1, b2), x, m, v = s.of["betas"], s.x, s["m"], s["v"]
        g = [grad.float() for grad in s.g]
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        u = torch._foreach_sqrt(v)
        if self.options.bias_correction:
            torch._foreach_div_(u, [(1 - b2 ** (t + 1)) ** 0.5 for t in s.t])
        torch._foreach_add_(u, s.of["eps"])
        torch._foreach_reciprocal_(u)
        torch._foreach_mul_(u, m)
        if self.options.bias_correction:
            torch._foreach_div_(u, [1 - b1 ** (t + 1) for t in s.t])
        torch._foreach_add_(u, x, alpha=s.of["weight_decay"])
        # fp64 norms, so that rounding hardly ever depends on the order of summation
        x_norm, u_norm = self._whole_norms(s.indices, self.kept.kernels.norms(x), self.kept.kernels.norms(u))
        live = (x_norm > 0) & (u_norm > 0)
        c = torch.where(live, (x_norm / torch.where(live, u_norm, 1.0)).clamp(*self.options.trust_clip), 1.0)
        torch._foreach_mul_(u, list((-s.of["lr"] * c).float().unbind()))
        torch._foreach_add_(x, u)
        return c

    def _whole_norms(self, indices: Sequence[int], *norms: Tensor) -> Sequence[Tensor]:
        """Norms of whole parameters, fp64 ``(parameters,)``, from those of this rank's shards."""
        if self.kept.shards is None:
            return norms
        squares = torch.stack(norms, dim=1).square()
        return self.kept.over_shards(squares, indices).sqrt().unbind(dim=1)

    def enter_compressed(self) -> None:
        """See the base; the second moments as they froze, floor applied, are where the fresh ones start."""
        fresh = self.kept.flat["v"].clone()
        self.floor(fresh)
        super().enter_compressed()
        self.kept.flat["fresh"] = fresh
        self._default_ratios([i for i in self.kept.layout.slots if i not in self.kept.late])

    def leave_compressed(self) -> None:
        super().leave_compressed()
        self.kept.flat.pop("fresh", None)

    def _default_ratios(self, indices: Sequence[int]) -> None:
        """c_avg is 1 where every trust ratio so far was exactly 1, or there was none."""
        average, index = self.kept.numbers["coeff_average"], upload(indices, self.kept.device, torch.int64)
        average[index] = torch.where(average[index] == 0, 1.0, average[index])

    # ----- compressed stage --------------------------------------------------------------------------------------------

    def take(self, s: Part, u: Packed) -> Tensor:
        """``ghat = (m - b1 m_old)/(1-b1) ; vfresh = b2 vfresh + (1-b2) ghat^2``, and what f and k need of each block.

        Returns:
            Sums of squares of up and u and the largest ``D/Dfresh``, fp32 ``(blocks, 3)``.
        """
        factors = s.each(beta1, _unshare, _beta2, _new_share2, self._alpha2, "eps", self._alpha, "weight_decay")
        return s.kernels.lamb_update(s.blocks, s.x, u, s.momentum, s["r"], s["fresh"], factors)

    def _alpha(self, p: Facts) -> float:
        return 1.0 / self.first_correction(p)

    def _alpha2(self, p: Facts) -> float:
        return 1.0 / self.second_correction(p.index)

    def finish(self, step: Step, taken: Sequence[tuple[Part, Packed, Any]]) -> None:
        """``f = ... ; x -= lr c_avg f u``, now that all norms are complete."""
        if not taken:
            return
        kept = self.kept
        coefficient = self._corrected_coefficients(step, taken)
        size = (upload(step.by_slot("lr"), kept.device, torch.float64) * coefficient).float()
        for s, m, _ in taken:
            s.kernels.lamb_apply(
                s.blocks, s.x, m, s["r"], s.each(self._alpha), s.each("weight_decay"), size[s.blocks.block_param]
            )
        active = [(slot, i) for slot, i in enumerate(kept.layout.slots) if step.active[i]]
        index, slots = upload([i for _, i in active], kept.device), upload([slot for slot, _ in active], kept.device)
        kept.numbers["last_coeff"][index] = coefficient[slots]

    def _corrected_coefficients(self, step: Step, taken: Sequence[tuple[Part, Packed, Any]]) -> Tensor:
        """``c_avg f`` per slot, fp64, from the blocks' partial norms in a fixed order."""
        kept, s = self.kept, self.options.coefficients
        rows = torch.zeros((kept.layout.plan.blocks, 3), dtype=torch.float64, device=kept.device)
        for part, _, norms in taken:
            first = part.blocks.first_block
            rows[first : first + part.blocks.blocks] = norms.double()
        slots = kept.layout.slots
        up, u = kept.over_shards(kept.layout.per_slot(rows[:, :2], "sum"), slots).sqrt().unbind(dim=1)
        largest = kept.over_shards(kept.layout.per_slot(rows[:, 2:], "max"), slots, "max")[:, 0]
        f = torch.where(largest > 0, largest, torch.ones_like(largest))
        k = torch.where(u > 0, (up / torch.where(u > 0, u, torch.ones_like(u))).clamp(max=1.0), torch.ones_like(u))
        f = torch.where(upload(step.by_slot("weight_decay"), kept.device, torch.float64) > 0, f * k + (1 - k), f)
        index = upload(kept.layout.slots, kept.device)
        last = kept.numbers["last_factor"][index]
        f = f.clamp(s.factor_min, s.factor_max)
        f = torch.minimum(torch.maximum(f, last * (1 - s.threshold)), last * (1 + s.threshold))
        active = upload([step.active[i] for i in kept.layout.slots], kept.device)
        kept.numbers["last_factor"][index] = torch.where(active, f, last)
        return kept.numbers["coeff_average"][index] * f

    # ----- parameters that join or learn late --------------------------------------------------------------------------

    def joined(self, indices: Sequence[int]) -> None:
        super().joined(indices)
        if "fresh" in self.kept.flat:
            self._default_ratios(indices)

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        super().first_gradients(step, indices)
        self.kept.numbers["coeff_average"][upload(indices, self.kept.device, torch.int64)] = 0.0

    def take_in(self, index: int, own: dict[str, Tensor], updates: int) -> None:
        if "fresh" in self.kept.flat:
            fresh = self.kept.part("fresh", index)
            fresh.copy_(memory_order(own["v"]))
            floor_second_moment_(fresh, phi=self.options.denominator_floor, sums=self.sums_of({index: fresh})[index])
            self._default_ratios([index])
        super().take_in(index, own, updates)

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        super().load(phase, books, saved, enter)
        if "fresh" in self.kept.flat:
            load_flat(self.kept, self.kept.flat["fresh"], "exp_avg_sq_fresh", saved)


@takes(LambOptions)
class OnebitLamb(OnebitOptimizer):
    r"""1-bit LAMB: layer-wise adaptive steps, frozen second moments, and one bit per coordinate in the exchange.

    Warm-up, per parameter tensor (this is LAMB)::

        u = mhat / (sqrt(vhat) + eps) + wd*x ;  c = clip(||x|| / ||u||, *trust_clip), 1 if a norm is 0 ;  x -= lr*c*u
        c_avg = beta*c_avg + (1-beta)*c  (if c != 1)

    Compressed stage, with ``D = sqrt(vhat_freeze) + eps``::

        m = exchange(b1 m + (1-b1) g_i) ;  ghat = (m - b1 m_old)/(1-b1) ;  vfresh = b2 vfresh + (1-b2) ghat^2
        f = max_j D_j / Dfresh_j ;  k = min(1, ||up||/||u||) ;  f = f*k + (1-k)  (if wd > 0)
        f = clip(clip(f, factor_min, factor_max), r(1-threshold), r(1+threshold)) ;  r = f
        x -= lr * c_avg*f * u ,  up = mhat/D ,  u = up + wd*x

    Two passes over a step: ``f`` needs norms of the whole tensor.

    Source: "1-bit LAMB", arXiv 2104.06069, algorithm 1; this library's differences are listed in docs/differences.

    Args:
        params: parameters or parameter groups (see ``OnebitAdam``).
        lr: learning rate; LAMB's own recipe for BERT-Large is 11e-3 with ``weight_decay=0.01``, ``trust_clip=(0.01, 0.3)``.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decay inside LAMB's update ``u`` (never inside a compressed quantity).
        exchange: how ranks exchange, see ``ExchangeOptions``.
        **options: see ``LambOptions``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.

    Example:
        >>> optimizer = OnebitLamb(model.parameters(), lr=11e-3, weight_decay=0.01, trust_clip=(0.01, 0.3), freeze_step=1000)
    """

    algorithm = "onebit_lamb"
    rule_class: ClassVar[type[Rule]] = Lamb
    STEP_BYTES = 34.5  # a pass before reads x and denominators, reads and writes vfresh

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
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options, exchange
        )

    def get_lamb_coeffs(self) -> dict[str, float]:
        """The coefficients c of the last step.

        Returns:
            A fresh dict, name (or ``"parameter i"``) -> coefficient, of the parameters that have been stepped.
        """
        kept = self._engine.kept
        if not kept.numbers:
            return {}
        values = kept.numbers["last_coeff"].tolist()
        return {self.name_of(i): values[i] for i in kept.layout.known if kept.t[i] > 0}
