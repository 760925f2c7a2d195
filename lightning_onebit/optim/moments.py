"""What the Adam-like optimizers share: second moments that freeze into reciprocal denominators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_onebit._names import shown_as
from lightning_onebit.comm import Bucket, memory_order
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.arena import Coefficients, Phase
from lightning_onebit.optim.base import OnebitOptimizer
from lightning_onebit.optim.compact import Inversion, compact
from lightning_onebit.optim.options import ExchangeOptions, Options, check_flag, check_integer, check_number
from lightning_onebit.optim.rules import (
    dense_adamw_,
    floor_second_moment_,
    fp32_zeros_like,
    precondition_,
    reciprocal_denominator_,
    second_moment_from_reciprocal,
    unprecondition_,
)

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


@shown_as("OnebitOptimizer")
class AdamMoments(OnebitOptimizer):
    """Base of the optimizers whose second moments freeze; see ``OnebitAdam`` for the options."""

    _has_dense_warm_up = True
    options: MomentOptions

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options, exchange: ExchangeOptions) -> None:
        # by parameter index: updates of a second moment that froze, or is refreshed now and then (0/1 Adam); without an entry
        # it has been updated at every step of its parameter
        self._variance_steps: dict[int, float] = {}
        super().__init__(params, defaults, options, exchange)

    @property
    def _preconditioned(self) -> bool:
        """Whether the momentum travels divided by its denominators now, in the units of the step that it makes."""
        return False

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
            bias_correction=self.options.bias_correction,
        )

    def _learn(self, index: int, updates: float = 1.0) -> None:
        """Moments of a parameter from its averaged gradient; the second moment as if that gradient had come ``updates`` times."""
        b1, b2 = self._group(index)["betas"]
        grad, keep = self._grad(index).float(), b2**updates
        self._moment("m", index).lerp_(grad, 1 - b1)
        self._moment("v", index).mul_(keep).addcmul_(grad, grad, value=1 - keep)
        self._variance_steps[index] = self._variance_steps.get(index, self._t[index]) + updates

    def _move(self, index: int) -> None:
        """A parameter's step by its momentum and reciprocal denominators, before the step has been counted."""
        group = self._group(index)
        lr_t = group["lr"] / self._first_correction(index, ahead=1)
        x = self._weight(index).mul_(1 - group["lr"] * group["weight_decay"])
        x.addcmul_(self._moment("m", index), self._moment("r", index), value=-lr_t)

    def _coefficients(self, bucket: Bucket, lo: int, hi: int) -> Coefficients:
        a = self._by_block("a", bucket, lambda i: self._group(i)["betas"][0])
        b = self._by_block("b", bucket, lambda i: (1.0 - self._group(i)["betas"][0]) * self._grad_scale)
        return Coefficients(a[lo:hi], self._momentum_of(bucket, lo, hi), b[lo:hi], self._scaling(bucket, lo, hi))

    def _scaling(self, bucket: Bucket, lo: int, hi: int) -> Tensor | None:
        """What gradients are multiplied by on their way into the exchange of blocks ``[lo, hi)``."""
        if not self._preconditioned:
            return None
        return bucket.slice(self._flat["r"])[lo * bucket.block_size : hi * bucket.block_size]

    def _to_exchanged(self, m: Tensor, start: int = 0) -> None:
        if self._preconditioned and "r" in self._flat:
            precondition_(m, self._flat["r"][start : start + m.numel()])

    def _from_exchanged(self, m: Tensor, start: int = 0) -> None:
        if self._preconditioned and "r" in self._flat:
            unprecondition_(m, self._flat["r"][start : start + m.numel()])

    def _held_momentum(self, bucket: Bucket) -> Tensor | Packed:
        held = super()._held_momentum(bucket)
        if self._preconditioned and "m" in self._flat and "r" in self._flat:
            assert isinstance(held, Tensor)
            return held * bucket.slice(self._flat["r"])
        return held

    def _rank_layout(self) -> dict[str, Any]:
        # the units of the residuals; the key is missing where they are the momentum's, as in states of earlier releases
        return {**super()._rank_layout(), **({"preconditioned": True} if self._preconditioned else {})}

    def _enter_compressed(self) -> None:
        """Inverts the denominators once; v gives its memory to them where they are fp32 too."""
        v = self._flat.pop("v")
        self._count_variance_steps()
        r = self._flat["r"] = (
            v if self._reciprocal_dtype is v.dtype else torch.zeros_like(v, dtype=self._reciprocal_dtype)
        )
        self._invert(v, r)

    def _count_variance_steps(self) -> None:
        """Keeps how many updates second moments have had that freeze now."""
        for i in self._slots:
            if i not in self._late:
                self._variance_steps.setdefault(i, self._t[i])

    def _leave_compressed(self) -> None:
        r = self._flat.pop("r", None)
        if r is not None:
            self._flat["m"].masked_fill_(r == 0, 0.0)  # noise that nothing has divided so far
            self._flat["v"] = self._second_moments(r, r if r.dtype is torch.float32 else fp32_zeros_like(r))
        self._variance_steps = {}

    @property
    def _reciprocal_dtype(self) -> torch.dtype:
        """In which reciprocal denominators are kept."""
        dtype: torch.dtype = getattr(torch, self.exchange.state_dtype)
        return dtype

    def _invert(self, v: Tensor, out: Tensor) -> None:
        """Reciprocal denominators of all compressed parameters (flats over all blocks; may be the same)."""
        for slot in range(len(self._slots)):
            self._invert_slot(slot, v, out)

    def _invert_slot(self, slot: int, v: Tensor, out: Tensor) -> None:
        self._invert_part(slot, self._part(v, slot), self._part(out, slot))

    def _invert_part(self, slot: int, v: Tensor, out: Tensor) -> None:
        """Reciprocal denominators of one parameter (1-D); takes note of those whose second moments are all 0."""
        i = self._slots[slot]
        known = reciprocal_denominator_(
            v,
            out,
            phi=self.options.denominator_floor,
            eps=self._group(i)["eps"],
            correction=self._second_correction(i),
        )
        if known or i in self._late or not v.numel():
            self._cold.discard(i)
        else:
            self._cold.add(i)

    def _floored(self, v: Tensor) -> None:
        """Applies the denominator rule's floor to second moments (flat over all blocks) in place."""
        for slot in range(len(self._slots)):
            floor_second_moment_(self._part(v, slot), phi=self.options.denominator_floor)

    def _first_correction(self, index: int, ahead: int = 0) -> float:
        """``1 - b1**t``, or 1 without bias correction; ``ahead=1`` before the step has been counted."""
        if not self.options.bias_correction:
            return 1.0
        return 1.0 - self._group(index)["betas"][0] ** max(1, self._t[index] + ahead)

    def _second_correction(self, index: int) -> float:
        """``1 - b2**k`` with k the updates that v has had, or 1 without bias correction."""
        if not self.options.bias_correction:
            return 1.0
        return 1.0 - self._group(index)["betas"][1] ** max(1, self._variance_steps.get(index, self._t[index]))

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _saved_arenas(self) -> Iterator[tuple[str, Tensor]]:
        if "r" not in self._flat:
            yield from super()._saved_arenas()
            return
        # Under exp_avg_sq is what suits others (plain AdamW, a world of one rank): the floored moments. A plain Adam that went on
        # with v = 0 under a momentum that holds compression noise would explode; where a whole tensor has none, m is 0 for them.
        r = self._flat["r"]
        for name, values in super()._saved_arenas():
            if name == "exp_avg_sq":
                yield name + EXACT, values
                yield name, self._settled(values.clone())
            elif name == "exp_avg" and bool((noise := (r == 0) & (values != 0)).any()):
                yield name + EXACT, values
                yield name, values.masked_fill(noise, 0.0)
            else:
                yield name, values
        yield "reciprocal_denominator", r
        if self._preconditioned and "m" not in self._flat:
            # exact, where exp_avg is the same to rounding
            yield "preconditioned_momentum", self._exchanged_flat()
        if "v" not in self._flat:
            yield "exp_avg_sq", self._second_moments(r, fp32_zeros_like(r))

    def _shown(self, index: int) -> dict[str, Tensor]:
        """See the base; as a checkpoint has it, ``exp_avg_sq`` with the floor of the denominators in it once they are used."""
        moments = super()._shown(index)
        if "r" not in self._flat or index in self._dense_state:
            return moments
        p, slot = self._params[index], self._slot_of[index]
        r = self._part(self._flat["r"], slot)
        memory_order(moments["exp_avg"]).masked_fill_(r == 0, 0.0)
        if "v" in self._flat:
            v = memory_order(moments["exp_avg_sq"])
            floor_second_moment_(v, phi=self.options.denominator_floor)
        else:
            correction = self._second_correction(index)
            v = second_moment_from_reciprocal(r, eps=self._group(index)["eps"], correction=correction)
            moments["exp_avg_sq"] = v.as_strided(p.shape, p.stride())
        if "v" not in self._flat or index in self._variance_steps:
            v.mul_(self._age(index))
        return moments

    def _reset_some(self, params: list[Tensor]) -> None:
        super()._reset_some(params)
        self._variance_steps = {i: k for i, k in self._variance_steps.items() if self._t[i]}

    def _settled(self, v: Tensor) -> Tensor:
        """Second moments (flat over all blocks, in place) with the floor of their denominators in them, as if updated at every step."""
        self._floored(v)
        for slot, i in enumerate(self._slots):
            if i in self._variance_steps:
                self._part(v, slot).mul_(self._age(i))
        return v

    def _second_moments(self, r: Tensor, out: Tensor, *, aged: bool = True) -> Tensor:
        """Moments of frozen denominators (flats over all blocks; may be the same if r is fp32), as if updated at every step.

        Whoever corrects their bias by the number of steps sees what had frozen. ``aged=False``: of the updates they have had.
        """
        for slot, i in enumerate(self._slots):
            moments = second_moment_from_reciprocal(
                self._part(r, slot), eps=self._group(i)["eps"], correction=self._second_correction(i)
            )
            self._part(out, slot).copy_(moments.mul_(self._age(i)) if aged else moments)
        return out

    def _age(self, index: int) -> float:
        """What makes a second moment of few updates one of ``t`` updates with the same bias-corrected value."""
        if not self.options.bias_correction:
            return 1.0
        return (1.0 - self._group(index)["betas"][1] ** max(1, self._t[index])) / self._second_correction(index)

    @torch.no_grad()
    def _compacted(self, packed: dict[str, Any]) -> dict[str, Any]:
        if "r" not in self._flat or "v" in self._flat:
            return packed
        inversions = {
            i: Inversion(self._group(i)["eps"], self._age(i) * self._second_correction(i)) for i in self._slots
        }
        return compact(packed, inversions, self.exchange.block_size)

    def _books(self) -> dict[str, Any]:
        return {**super()._books(), "variance_steps": dict(self._variance_steps)}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        self._variance_steps = {int(i): k for i, k in books.get("variance_steps", {}).items()}
        self._load_arena(self._flat["v"], "exp_avg_sq" + EXACT, saved)
        if self.compresses:
            self._load_arena(self._flat["m"], "exp_avg" + EXACT, saved)
        else:
            if any("reciprocal_denominator" in state for state in saved.values()):
                self._load_alone(saved, bare=phase is Phase.WARMUP)
            self._variance_steps = {}
        super()._load_phase(phase, books, saved)
        self._load_frozen(saved)

    def _load_alone(self, saved: dict[int, dict[str, Tensor]], *, bare: bool) -> None:
        """Moments of one-bit rounds for a rank alone, whose v learns at every step from here on (``bare``: v as it is was saved)."""
        if bare:
            self._settled(self._flat["v"])
        r = torch.ones_like(self._flat["m"])
        self._load_arena(r, "reciprocal_denominator", saved)
        self._flat["m"].masked_fill_(r == 0, 0.0)  # states of earlier releases hold it

    def _load_frozen(self, saved: dict[int, dict[str, Tensor]]) -> None:
        """Denominators and momentum as they were, where those made of ``exp_avg_sq`` and ``exp_avg`` are the same to rounding."""
        if "r" not in self._flat:
            return
        self._load_arena(self._flat["r"], "reciprocal_denominator", saved)
        # (moments that are made of denominators may be 0 to rounding)
        self._cold = {i for i in self._cold if not bool(self._part(self._flat["r"], self._slot_of[i]).any())}
        if not self._preconditioned:
            return
        m = fp32_zeros_like(self._flat["r"])
        if any("preconditioned_momentum" in state for state in saved.values()):
            self._flat.pop("m", None)
            self._load_arena(m, "preconditioned_momentum", saved)
            self._momentum = [bucket.slice(m) for bucket in self._buckets()]
            return
        self._load_moment(m, "exp_avg", saved)
        self._flat["m"], self._momentum = m, []
        if self._phase is Phase.COMPRESSED:
            self._hold_momentum_by_bucket()

    def _load_moment(self, flat: Tensor, key: str, saved: dict[int, dict[str, Tensor]]) -> None:
        """A moment into a flat over all blocks: as it was, where what others are given under ``key`` is another."""
        self._load_arena(flat, key, saved)
        self._load_arena(flat, key + EXACT, saved)

    def _load_arena(self, flat: Tensor, key: str, saved: dict[int, dict[str, Tensor]]) -> None:
        """Copies per-parameter tensors of a checkpoint, where there are any, into a flat over all blocks."""
        for i, state in saved.items():
            if key in state and i in self._slot_of and i not in self._late:
                like = torch.empty_like(self._params[i], dtype=torch.float32).copy_(state[key])
                self._part(flat, self._slot_of[i]).copy_(memory_order(like))
