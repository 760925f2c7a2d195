"""Checkpoints without what follows, bit for bit, from the rest: a state in the compressed phase is as large as AdamW's.

* ``reciprocal_denominator`` follows from ``exp_avg_sq``, ``r = 1 / (sqrt(exp_avg_sq / c) + eps)``. Several second moments give the same
  ``r``, so ``exp_avg_sq``, which is made from ``r``, is moved by some units in the last place where it has to be.
  The few elements for which there is none are saved with their places.
* ``preconditioned_momentum`` is one bit per element and a scale per block: the signs are those of ``exp_avg``, the scales are saved.

Both are tried before they are left out. A tensor that does not come out bit for bit is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_onebit.comm import memory_order

#: units in the last place by which second moments are moved at most
_REACH = 4
#: share of denominators that may be saved one by one
_FEW = 1 / 64


class Inversion(NamedTuple):
    """What second moments were inverted with: ``r = 1 / (sqrt(v / correction) + eps)``.

    Attributes:
        eps: the optimizer's ``eps``.
        correction: of the bias.
    """

    eps: float
    correction: float

    def __call__(self, v: Tensor, dtype: torch.dtype) -> Tensor:
        """Reciprocal denominators; 0 where ``v`` is."""
        scale = torch.tensor(self.correction, dtype=torch.float32, device=v.device)
        r = torch.reciprocal(v.div(scale).sqrt_().add_(self.eps))
        return torch.where(v == 0, torch.zeros_like(r), r).to(dtype)


def compact(packed: dict[str, Any], inversions: Mapping[int, Inversion], block_size: int) -> dict[str, Any]:
    """Leaves out of a state what ``expanded()`` puts back.

    Args:
        packed: a state whose tensors belong to it; ``exp_avg_sq`` may change by rounding.
        inversions: by parameter, of those whose ``exp_avg_sq`` was made from frozen denominators.
        block_size: elements that share a scale.
    """
    for i, inversion in inversions.items():
        state = packed["state"].get(i, {})
        r, v = state.get("reciprocal_denominator"), state.get("exp_avg_sq")
        if r is not None and v is not None:
            rest = _make_it_give(v, r, inversion)
            if rest.numel() <= _FEW * r.numel():
                del state["reciprocal_denominator"]
                state["denominators_by"] = torch.tensor([*inversion, 8.0 * r.element_size()], dtype=torch.float64)
                if rest.numel():
                    state["denominators_at"], state["denominators_there"] = rest, r.reshape(-1)[rest]
        momentum = state.get("preconditioned_momentum")
        if momentum is not None:
            scales = memory_order(momentum).abs()[::block_size].clone(memory_format=torch.contiguous_format)
            strides = list(momentum.stride())
            if _same_bits(_signed(state["exp_avg"], scales, block_size, strides), momentum):
                del state["preconditioned_momentum"]
                state["momentum_scales"] = scales
                state["momentum_layout"] = torch.tensor([block_size, *strides], dtype=torch.int64)
    return packed


def expanded(packed: dict[str, Any]) -> dict[str, Any]:
    """A state with all that ``compact()`` has left out; the one given stays as it is.

    Raises:
        ValueError: what is left does not fit together.
    """
    states = dict(packed.get("state", {}))
    for i, saved in states.items():
        if "denominators_by" not in saved and "momentum_scales" not in saved:
            continue
        state = states[i] = dict(saved)
        try:
            if "denominators_by" in state:
                eps, correction, bits = state.pop("denominators_by").tolist()
                dtype = torch.bfloat16 if bits == 16 else torch.float32
                r = Inversion(eps, correction)(state["exp_avg_sq"].float(), dtype)
                if "denominators_at" in state:
                    at, there = state.pop("denominators_at").to(r.device), state.pop("denominators_there")
                    r[torch.unravel_index(at, r.shape)] = there.to(r.device, dtype)
                state["reciprocal_denominator"] = r
            if "momentum_scales" in state:
                block_size, *strides = state.pop("momentum_layout").tolist()
                scales, signs = state.pop("momentum_scales"), state["exp_avg"].float()
                state["preconditioned_momentum"] = _signed(signs, scales, block_size, strides)
        except (KeyError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"optimizer state of parameter {i} is not complete ({error}); load a complete state_dict()"
            ) from error
    return {**packed, **({"state": states} if "state" in packed else {})}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool((a.view(torch.int32) == b.view(torch.int32)).all())


def _signed(signs: Tensor, scales: Tensor, block_size: int, strides: list[int]) -> Tensor:
    """The scale of its block, in memory order of a tensor with these strides, with the sign of each element."""
    out = torch.empty_strided(signs.shape, strides, dtype=torch.float32, device=signs.device).copy_(signs)
    flat = memory_order(out)
    spread = scales.to(signs.device).repeat_interleave(block_size)[: flat.numel()]
    flat.copy_(torch.copysign(spread, flat))
    return out


def _make_it_give(v: Tensor, r: Tensor, inversion: Inversion) -> Tensor:
    """Moves ``v`` in place until its inverse is ``r``, bit for bit; places (int64, of the flattened tensor) where that fails."""
    wrong = (inversion(v, r.dtype) != r).reshape(-1).nonzero().flatten()
    if not wrong.numel():
        return wrong
    place = torch.unravel_index(wrong, v.shape)
    start, wanted = v[place], r[place]
    best, misses = start.clone(), torch.ones_like(start, dtype=torch.bool)
    for towards in (torch.inf, 0.0):
        moved, end = start, torch.full_like(start, towards)
        for _ in range(_REACH):
            moved = torch.nextafter(moved, end)
            hits = misses & (inversion(moved, r.dtype) == wanted)
            best[hits] = moved[hits]
            misses &= ~hits
    v[place] = best
    return wrong[misses]
