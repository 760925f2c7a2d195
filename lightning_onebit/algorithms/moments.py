"""Second moments that freeze into reciprocal denominators: what the Adam-like rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_onebit.algorithms.updates import (
    floor_second_moment_,
    fp32_zeros_like,
    moment_sums,
    reciprocal_denominator_,
    second_moment_from_reciprocal,
)
from lightning_onebit.comm import memory_order
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.compact import Inversion, compact
from lightning_onebit.engine.options import ExchangeOptions, Options, check_flag, check_integer, check_number
from lightning_onebit.engine.rule import Rule, Saved, Sent
from lightning_onebit.engine.state import load_flat
from lightning_onebit.engine.step import Facts, Group, Part, Step
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload

#: steps from which every bias correction 1 - beta**t is exactly 1 in floating point
_NO_BIAS_CORRECTION = 1e18
#: ends the name, in a checkpoint, of a moment as it is, where others (plain AdamW) are given it in a form that suits them
EXACT = "_exact"


@dataclass(frozen=True, kw_only=True)
class MomentOptions(Options):
    """Options of the algorithms whose second moments freeze.

    Attributes:
        freeze_step: number of dense steps, >= 1; None: the switch is made by ``freeze()`` (``callbacks.VarianceFreeze`` does it).
            The published hand rule is 15-25 % of all steps.
        bias_correction: True means what torch's AdamW means; False gives the published recipe.
        denominator_floor: ``phi``; denominators of coordinates with (almost) no gradient are at least phi times the root of their
            tensor's mean second moment (of those that are not 0).
        max_grad_norm: see ``Options``.
    """

    freeze_step: int | None = None
    bias_correction: bool = True
    denominator_floor: float = 0.1

    def __post_init__(self) -> None:
        """Checks every option."""
        super().__post_init__()
        check_integer("freeze_step", self.freeze_step, least=1, optional=True)
        check_flag("bias_correction", self.bias_correction)
        check_number("denominator_floor", self.denominator_floor, least=0, most=1)


# numbers of a parameter in a step, for tables


def beta1(p: Facts) -> float:
    """``b1``."""
    return float(p["betas"][0])


def new_share(p: Facts) -> float:
    """``1 - b1``, times the factor by which gradients are clipped."""
    return float((1.0 - p["betas"][0]) * p.grad_scale)


def lr(p: Facts) -> float:
    """``lr``."""
    return float(p["lr"])


def decay(p: Facts) -> float:
    """``1 - lr*wd``."""
    return float(1.0 - p["lr"] * p["weight_decay"])


class FrozenMoments(Rule):
    """Moments ``m`` and ``v`` that learn from dense averages until ``v`` freezes into ``r = 1 / (sqrt(vhat) + eps)``."""

    has_dense_warm_up: ClassVar[bool] = True

    def __init__(self, options: Any, exchange: ExchangeOptions) -> None:
        super().__init__(options, exchange)
        # by parameter: updates of a second moment that froze, or is refreshed now and then (0/1 Adam); without an entry it has been
        # updated at every step of its parameter
        self.updates: dict[int, float] = {}

    @property
    def preconditioned(self) -> bool:
        """Whether the momentum travels divided by its denominators, in the units of the step that it makes."""
        return False

    @property
    def unit(self) -> str | None:
        return "r" if self.preconditioned else None

    # ----- the rule ----------------------------------------------------------------------------------------------------

    def dense(self, s: Group) -> None:
        """AdamW: ``m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2 ; x -= lr wd x + lr mhat/(sqrt(vhat) + eps)``."""
        if not s.x:
            return
        counts = [float(t) if self.options.bias_correction else _NO_BIAS_CORRECTION for t in s.t]
        adamw(
            s.x,
            [_in_order_of(grad.float(), x) for grad, x in zip(s.g, s.x, strict=True)],
            s["m"],
            s["v"],
            [],
            list(upload(counts, self.kept.device, torch.float32).unbind()),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=s.of["betas"][0],
            beta2=s.of["betas"][1],
            **{name: s.of[name] for name in ("lr", "weight_decay", "eps")},
        )

    def send(self, s: Part) -> Sent:
        """``b1 m + (1-b1) g``, or preconditioned ``b1 u + (1-b1) g r``."""
        return Sent(b=s.each(new_share), a=s.each(beta1), m=s.momentum, r=s["r"] if self.preconditioned else None)

    def take(self, s: Part, u: Packed) -> Any:
        """``x -= lr wd x + lr_t u``, or ``x -= lr wd x + lr_t m r``."""
        r = None if self.preconditioned else s["r"]
        s.kernels.apply_adam(s.blocks, s.x, u, r, s.each(decay), s.each(self.lr_t))

    def lr_t(self, p: Facts) -> float:
        """``lr / (1-b1^t)``."""
        return float(p["lr"] / self.first_correction(p))

    def first_correction(self, p: Facts, ahead: int = 0) -> float:
        """``1 - b1^t``, or 1 without bias correction; ``ahead=1`` before the step has been counted."""
        return 1.0 - p["betas"][0] ** max(1, p.t + ahead) if self.options.bias_correction else 1.0

    def second_correction(self, index: int) -> float:
        """``1 - b2^k`` with k the updates that v has had, or 1 without bias correction."""
        if not self.options.bias_correction:
            return 1.0
        return 1.0 - self.kept.group(index)["betas"][1] ** max(1, self.updates.get(index, self.kept.t[index]))

    # ----- denominators ------------------------------------------------------------------------------------------------

    def enter_compressed(self) -> None:
        """Inverts the denominators once; v gives its memory to them where they are fp32 too."""
        v = self.kept.flat.pop("v")
        self.keep_updates()
        r = self.kept.flat["r"] = v if self.r_dtype is v.dtype else torch.zeros_like(v, dtype=self.r_dtype)
        self.invert_all(v, r)

    def leave_compressed(self) -> None:
        """See the base; late parameters are like the others, where all learn again."""
        kept = self.kept
        r = kept.flat.pop("r", None)
        if r is not None:
            kept.flat["m"].masked_fill_(r == 0, 0.0)  # noise that nothing has divided so far
            kept.flat["v"] = self.second_moments(r, r if r.dtype is torch.float32 else fp32_zeros_like(r))
        self.updates = {}
        for i in kept.late:
            for name, value in kept.own.pop(i).items():
                kept.moment(name, i).copy_(value)
        kept.late, kept.cold = {}, set()

    @property
    def r_dtype(self) -> torch.dtype:
        """In which reciprocal denominators are kept."""
        return self.kept.state_dtype

    def keep_updates(self) -> None:
        """Keeps how many updates second moments have had that freeze now."""
        for i in self.kept.layout.slots:
            if i not in self.kept.late:
                self.updates.setdefault(i, self.kept.t[i])

    def invert_all(self, v: Tensor, r: Tensor) -> None:
        """Reciprocal denominators of all exchanged parameters (flats over all blocks; may be the same)."""
        layout = self.kept.layout
        parts = {i: layout.part(v, i) for i in layout.slots}
        for i, sums in self.sums_of(parts).items():
            self.invert(i, parts[i], layout.part(r, i), sums)

    def sums_of(self, moments: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """``moment_sums()`` of whole parameters, of which these are the second moments of this rank's shards; None: they are the whole."""
        if self.kept.shards is None or not moments:
            return dict.fromkeys(moments)
        rows = torch.stack([moment_sums(v) for v in moments.values()])
        return dict(zip(moments, self.kept.over_shards(rows, list(moments)).unbind(), strict=True))

    def invert(self, index: int, v: Tensor, r: Tensor, sums: Tensor | None) -> None:
        """Reciprocal denominators of one parameter (1-D); takes note of those whose second moments are all 0."""
        known = reciprocal_denominator_(
            v,
            r,
            phi=self.options.denominator_floor,
            eps=self.kept.group(index)["eps"],
            correction=self.second_correction(index),
            sums=sums,
        )
        if known or index in self.kept.late or not self.kept.layout.sources[index].numel():
            self.kept.cold.discard(index)
        else:
            self.kept.cold.add(index)

    def floor(self, v: Tensor, *, alone: bool = False) -> None:
        """Applies the denominator rule's floor to second moments (flat over all blocks) in place; ``alone``: by this rank's shards."""
        parts = {i: self.kept.layout.part(v, i) for i in self.kept.layout.slots}
        for i, sums in (dict.fromkeys(parts) if alone else self.sums_of(parts)).items():
            floor_second_moment_(parts[i], phi=self.options.denominator_floor, sums=sums)

    def second_moments(self, r: Tensor, out: Tensor, *, aged: bool = True) -> Tensor:
        """Moments of frozen denominators (flats over all blocks; may be the same if r is fp32), as if updated at every step.

        Who corrects their bias by the number of steps sees what had frozen. ``aged=False``: of the updates they have had.
        """
        layout = self.kept.layout
        for i in layout.slots:
            moments = self._second_moment(i, layout.part(r, i))
            layout.part(out, i).copy_(moments.mul_(self._age(i)) if aged else moments)
        return out

    def _second_moment(self, index: int, r: Tensor) -> Tensor:
        return second_moment_from_reciprocal(
            r, eps=self.kept.group(index)["eps"], correction=self.second_correction(index)
        )

    def _age(self, index: int) -> float:
        """What makes a second moment of few updates one of ``t`` updates with the same bias-corrected value."""
        if not self.options.bias_correction:
            return 1.0
        b2 = self.kept.group(index)["betas"][1]
        return float((1.0 - b2 ** max(1, self.kept.t[index])) / self.second_correction(index))

    # ----- parameters that join or learn late --------------------------------------------------------------------------

    def joined(self, indices: Sequence[int]) -> None:
        """See the base; second moments of those who join after the freeze have learned nothing yet."""
        if "r" in self.kept.flat:
            self.kept.cold |= {i for i in indices if self.kept.layout.sources[i].numel()}
            self.updates |= dict.fromkeys(indices, 0)

    def unheard(self) -> list[int]:
        return sorted(self.kept.cold) if self.kept.cold and self.takes_late else []

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        """See the base: from here on they are late."""
        for i in indices:
            self.updates.pop(i, None)
        step.late.begin(indices, "has its first gradient after second moments have frozen")

    def wake(self, step: Step, members: list[int]) -> list[int]:
        """Makes late, and returns, those most of which was cold and has a gradient now; momenta lie flat, gradients are averaged.

        The first gradient of a head, say, brings those of most of the units below it. Their denominators are all the mean of the others',
        strictly between these. Such a parameter starts afresh, and so does its count of steps.
        """
        kept = self.kept
        woken = self._mostly_woken(members)
        for i in woken:
            kept.t[i] = 0
            self.updates.pop(i, None)
            for name in ("m", "r"):
                kept.part(name, i).zero_()
        if woken:
            step.late.begin(woken, "has its first gradient in most of its elements after second moments have frozen")
        return woken

    def _mostly_woken(self, members: list[int]) -> list[int]:
        """Those whose denominators were mostly cold and whose gradients are mostly not 0 now, elements of all shards together.

        Denominators without a gradient before they were made are alike, and between those of the rest. Not so where all are nearly
        alike, which rounding to 16 bits makes equal.
        """
        kept = self.kept
        if not members:
            return []
        parts = [kept.part("r", i) for i in members]
        # what most of a parameter equals is what most of some shard equals
        alike = kept.over_shards(torch.stack([_of_most(r) for r in parts]).view(-1, 1), members, "max")
        rows = [_compared(r, value, kept.grad(i)) for i, r, value in zip(members, parts, alike[:, 0], strict=True)]
        counts = kept.over_shards(torch.stack(rows), members).tolist()
        return [
            i
            for i, (below, equal, above, fresh, elements) in zip(members, counts, strict=True)
            if below and above and 2 * equal > elements and 2 * fresh > elements
        ]

    def take_in(self, index: int, own: dict[str, Tensor], updates: int) -> None:
        """See the base: its denominators, and its momentum as it travels."""
        self.updates[index] = updates
        m, v = memory_order(own["m"]), memory_order(own["v"])
        if "v" in self.kept.flat:
            self.kept.part("v", index).copy_(v)
        self.invert(index, v, self.kept.part("r", index), self.sums_of({index: v})[index])
        self.kept.put_momentum(index, m)

    @property
    def takes_late(self) -> bool:
        return self.kept.compresses and "r" in self.kept.flat

    def restarted(self) -> None:
        self.updates = {i: k for i, k in self.updates.items() if self.kept.t[i]}

    # ----- saving ------------------------------------------------------------------------------------------------------

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """See the base.

        Under ``exp_avg_sq`` is what suits others (plain AdamW, a world of one rank): the floored moments. A plain Adam that went on
        with v = 0 under a momentum that holds compression noise would explode; where a whole tensor has none, m is 0 for them.
        """
        flat = self.kept.flat
        if "r" not in flat:
            yield from super().saved()
            return
        r = flat["r"]
        for name, values in super().saved():
            if name == "exp_avg_sq":
                yield name + EXACT, values
                yield name, self._for_others(values.clone())
            elif name == "exp_avg" and bool((noise := (r == 0) & (values != 0)).any()):
                yield name + EXACT, values
                yield name, values.masked_fill(noise, 0.0)
            else:
                yield name, values
        yield "reciprocal_denominator", r
        if self.preconditioned and "m" not in flat:
            # exact, where exp_avg is the same to rounding
            yield "preconditioned_momentum", self.kept.travelling_flat()
        if "v" not in flat:
            yield "exp_avg_sq", self.second_moments(r, fp32_zeros_like(r))

    def shown(self, index: int, moments: dict[str, Tensor]) -> None:
        """See the base; ``exp_avg_sq`` with the floor of the denominators in it once they are used."""
        kept = self.kept
        if "r" not in kept.flat:
            return
        p, r = kept.layout.params[index], kept.part("r", index)
        memory_order(moments["exp_avg"]).masked_fill_(r == 0, 0.0)
        if "v" in kept.flat:
            v = memory_order(moments["exp_avg_sq"])
            floor_second_moment_(v, phi=self.options.denominator_floor)
        else:
            v = self._second_moment(index, r)
            moments["exp_avg_sq"] = v.as_strided(p.shape, p.stride())
        if "v" not in kept.flat or index in self.updates:
            v.mul_(self._age(index))

    def _for_others(self, v: Tensor) -> Tensor:
        """Second moments (flat over all blocks, in place) with the floor of their denominators in them, as if updated at every step."""
        self.floor(v, alone=True)  # saving is no collective
        for i in self.kept.layout.slots:
            if i in self.updates:
                self.kept.layout.part(v, i).mul_(self._age(i))
        return v

    @torch.no_grad()
    def compacted(self, packed: dict[str, Any]) -> dict[str, Any]:
        kept = self.kept
        if "r" not in kept.flat or "v" in kept.flat or kept.anything_sharded:
            return packed
        inversions = {
            i: Inversion(kept.group(i)["eps"], self._age(i) * self.second_correction(i)) for i in kept.layout.slots
        }
        return compact(packed, inversions, kept.exchange.block_size)

    def books(self) -> dict[str, Any]:
        # of a shard without elements denominators do not tell
        cold = {"cold": sorted(self.kept.cold)} if self.kept.anything_sharded else {}
        return {"variance_steps": dict(self.updates), **cold}

    def rank_layout(self) -> dict[str, Any]:
        """See the base: the units of the residuals; the key is missing where they are the momentum's."""
        return {"preconditioned": True} if self.preconditioned else {}

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        flat = self.kept.flat
        self.updates = {int(i): k for i, k in books.get("variance_steps", {}).items()}
        load_flat(self.kept, flat["v"], "exp_avg_sq" + EXACT, saved)
        if self.kept.compresses:
            load_flat(self.kept, flat["m"], "exp_avg" + EXACT, saved)
        else:
            if any("reciprocal_denominator" in state for state in saved.values()):
                self._load_alone(saved, bare=phase is Phase.WARMUP)
            self.updates = {}
        enter(phase)
        self.load_frozen(saved, books)

    def _load_alone(self, saved: Saved, *, bare: bool) -> None:
        """Moments of one-bit rounds for a rank alone, whose v learns at every step from here on (``bare``: v as it is was saved)."""
        flat = self.kept.flat
        if bare:
            self._for_others(flat["v"])
        r = torch.ones_like(flat["m"])
        load_flat(self.kept, r, "reciprocal_denominator", saved)
        flat["m"].masked_fill_(r == 0, 0.0)  # states of earlier releases hold it

    def load_frozen(self, saved: Saved, books: Mapping[str, Any]) -> None:
        """Denominators and momentum as they were, where those made of ``exp_avg_sq`` and ``exp_avg`` are the same to rounding."""
        kept, flat = self.kept, self.kept.flat
        if "r" not in flat:
            return
        load_flat(kept, flat["r"], "reciprocal_denominator", saved)
        # (moments that are made of denominators may be 0 to rounding)
        kept.cold = {i for i in kept.cold if not bool(kept.part("r", i).any())}
        if "cold" in books:
            kept.cold = set(books["cold"])
        if not self.preconditioned:
            return
        m = fp32_zeros_like(flat["r"])
        if any("preconditioned_momentum" in state for state in saved.values()):
            flat.pop("m", None)
            load_flat(kept, m, "preconditioned_momentum", saved)
            kept.momentum = [bucket.slice(m) for bucket in kept.layout.buckets]
            return
        for key in ("exp_avg", "exp_avg" + EXACT):
            load_flat(kept, m, key, saved)
        flat["m"], kept.momentum = m, []
        if kept.phase is Phase.COMPRESSED:
            kept.hold_by_bucket()


def _in_order_of(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient in the memory order of its weights: torch's fused kernel goes through memory, whatever the strides."""
    return grad if grad.stride() == like.stride() else torch.empty_like(like).copy_(grad)


def _of_most(r: Tensor) -> Tensor:
    """The value, fp64 (), that more than half of a tensor have; 0 if there is none."""
    if not r.numel():
        return torch.zeros((), dtype=torch.float64, device=r.device)
    middle = r.median()
    return middle.double() * (2 * torch.count_nonzero(r == middle) > r.numel())


def _compared(r: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """How many elements lie clearly below a value, equal it and lie clearly above it, have a gradient, and are there; fp64 ``(5,)``."""
    few = 4 * torch.finfo(r.dtype).eps
    found = (r < value * (1 - few), r == value, r > value * (1 + few), grad != 0)
    counts = [torch.count_nonzero(elements) for elements in found]
    return torch.stack([*counts, torch.full_like(counts[0], r.numel())]).double()
