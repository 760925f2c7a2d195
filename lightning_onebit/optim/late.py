"""Parameters whose first gradient comes after second moments have frozen: averaged densely until theirs have learned.

A parameter's life where denominators are frozen::

    cold    its second moment is 0: it has had no gradient yet, or exact zeros, or has joined after the freeze
    late    from its first gradient on any rank: the algorithm's dense step, on averaged gradients, with moments of its own
    known   its second moment has learned for as many steps as the run had taken before, 1/(1-b2) at most: compressed from here on

A cold parameter with gradients of zeros takes part in the exchange and sends scales of 0; a late one takes no part.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_onebit._names import shown_as
from lightning_onebit.comm import Control, memory_order
from lightning_onebit.kernels import Packed, Residual
from lightning_onebit.optim.arena import Lookups
from lightning_onebit.optim.moments import AdamMoments

log = logging.getLogger("lightning_onebit")

#: names of parameters that a message lists
_NAMED = 4


@shown_as("OnebitOptimizer")
class LateParameters(AdamMoments):
    """Base of the optimizers whose second moments freeze, and with them what each parameter has learned by then."""

    def _append(self) -> None:
        """See the base; second moments of those who join after the freeze have learned nothing yet."""
        joined = self._slots[sum(self._segments) :]
        super()._append()
        if "r" in self._flat:
            self._cold |= {i for i in joined if self._params[i].numel()}
            self._variance_steps |= dict.fromkeys(joined, 0)

    def _unheard(self) -> list[int]:
        return sorted(self._cold) if self._cold and self.compresses and "r" in self._flat else []

    def _first_gradients(self, indices: list[int]) -> None:
        """See the base: from here on they are late."""
        self._cold -= set(indices)
        self._begin_late(indices, "has its first gradient after second moments have frozen")

    def _begin_late(self, indices: list[int], reason: str) -> None:
        for i in indices:
            self._late[i] = self._t[i], self._t[i] + self._lessons(i)
            self._variance_steps.pop(i, None)
            like = torch.zeros_like(self._params[i], dtype=torch.float32)
            self._dense_state[i] = {name: torch.zeros_like(like) for name in self._arenas()}
        if self._ranks().rank == 0:
            names = ", ".join(map(self.name_of, indices[:_NAMED]))
            more = f" (and {len(indices) - _NAMED} others)" if len(indices) > _NAMED else ""
            log.warning(
                "step %d: %s%s %s: averaged densely for %d steps, in which its second moment learns, then compressed",
                *(self._steps + 1, names, more, reason, max(map(self._lessons, indices))),
            )

    def _wake(self, members: list[int]) -> list[int]:
        """Makes late, and returns, those most of which was cold and has a gradient now; momenta lie in their arena, gradients are averaged.

        The first gradient of a head, say, brings those of most of the units below it. Their denominators are all the mean of the others',
        strictly between these. Such a parameter starts afresh, and so does its count of steps.
        """
        woken = []
        for i in members:
            r = self._part(self._flat["r"], self._slot_of[i])
            if _mostly_cold(r) and _most(self._grad(i) != 0):
                woken.append(i)
        for i in woken:
            self._t[i] = 0
            for name in ("m", "r"):
                self._part(self._flat[name], self._slot_of[i]).zero_()
        if woken:
            self._begin_late(woken, "has its first gradient in most of its elements after second moments have frozen")
        return woken

    def _clear_residuals(self, slot: int) -> None:
        for bucket, _ in self._known_plan().spans_of(slot):
            mine = bucket.block_param == slot
            for kept, (first, last) in self._guarded(bucket):
                assert isinstance(kept, Residual)
                kept.settled().view(last - first, -1)[mine[first:last]] = 0.0

    def _lessons(self, index: int) -> int:
        """Dense steps in which a late parameter's second moment learns: what it can remember, or as many as the run has taken."""
        return max(1, min(self._steps, round(1.0 / (1.0 - self._group(index)["betas"][1]))))

    def _average_late(self, verdict: Control) -> list[int]:
        for i in self._late:
            self._active[i] = False
        members = [i for i in sorted(self._late) if verdict.present[i]]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in members:
            by_dtype.setdefault(self._params[i].dtype, []).append(i)
        for same in by_dtype.values():
            self._average(same)
        return members

    def _average(self, indices: list[int]) -> None:
        """Makes ``.grad`` of parameters of one dtype the average over ranks, clipped, in one all-reduce."""
        assert self._transport is not None
        params = [self._params[i] for i in indices]
        flat = torch.cat(
            [memory_order(torch.empty_like(p).copy_(self._grad(i))) for i, p in zip(indices, params, strict=True)]
        )
        flat.mul_(1.0 / self._ranks().size)
        what = f"dense average of {len(indices)} tensors that learn after the freeze, {self.name_of(indices[0])} first"
        self._transport.all_reduce(flat, what=what).wait()
        if self._grad_scale != 1.0:
            flat.mul_(self._grad_scale)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = part.as_strided(p.shape, p.stride(), part.storage_offset())

    def _step_late(self, members: list[int]) -> None:
        for group_index, part in self._by_group(members):
            self._dense_update(self.param_groups[group_index], part)
        self._publish(members)
        self._count(members)

    @property
    def _takes_late(self) -> bool:
        return self.compresses and "r" in self._flat

    def _restart(self, indices: list[int]) -> None:
        for i in indices:
            self._t[i] = 0
            slot = self._slot_of[i]
            self._part(self._flat["r"], slot).zero_()
            self._clear_momentum(slot)
        self._cold -= set(indices)
        self._begin_late(indices, "starts over by reset_state()")
        self._lookups = Lookups()

    def _clear_momentum(self, slot: int) -> None:
        if "m" in self._flat:
            self._part(self._flat["m"], slot).zero_()
            return
        for bucket, _ in self._known_plan().spans_of(slot):
            mine, held = bucket.block_param == slot, self._momentum[bucket.index]
            if isinstance(held, Packed):
                held.scales[mine.view(held.rows, held.blocks_per_row)] = 0.0
            else:
                held.view(-1, bucket.block_size)[mine] = 0.0

    def _reset_some(self, params: list[Tensor]) -> None:
        super()._reset_some(params)
        self._late |= {i: (0, self._lessons(i)) for i in self._late if not self._t[i]}

    # ----- the end of it ----------------------------------------------------------------------------------------------

    def _may_take_in(self) -> bool:
        """Whether arenas can take in a parameter after this step."""
        return True

    def _take_in_learned(self) -> None:
        if not self._late or not self._may_take_in():
            return
        for i, (begun, ends) in sorted(self._late.items()):
            if self._t[i] >= ends and bool(self._dense_state[i]["v"].any()):
                del self._late[i]
                self._variance_steps[i] = self._t[i] - begun
                self._take_in(i, self._dense_state.pop(i))
                log.info("step %d: second moments of %s have learned; it is compressed", self._steps, self.name_of(i))

    def _take_in(self, index: int, state: dict[str, Tensor]) -> None:
        """Puts what a late parameter has learned into the arenas: its denominators, and its momentum as it travels."""
        slot, m, v = self._slot_of[index], memory_order(state["m"]), memory_order(state["v"])
        self._clear_residuals(slot)  # (one that has started over still has what was held back before)
        if "v" in self._flat:
            self._part(self._flat["v"], slot).copy_(v)
        self._invert_part(slot, v, self._part(self._flat["r"], slot))
        if "m" in self._flat:
            self._part(self._flat["m"], slot).copy_(m)
            return
        self._to_exchanged(m, self._known_plan().starts[slot])
        for bucket, span in self._known_plan().spans_of(slot):
            held = self._momentum[bucket.index]
            if isinstance(held, Packed):
                whole = torch.empty(bucket.elements, dtype=torch.float32, device=self._device)
                self._kernels.unpack(held, bucket.lengths, whole)
                held = self._momentum[bucket.index] = whole
            start = span.block * bucket.block_size
            held[start : start + span.numel] = m[span.start : span.start + span.numel]

    def _leave_compressed(self) -> None:
        """See the base; late parameters are like the others, where all learn again."""
        super()._leave_compressed()
        for i in self._late:
            for name, value in self._dense_state.pop(i).items():
                self._moment(name, i).copy_(value)
        self._late, self._cold = {}, set()


def _mostly_cold(r: Tensor) -> bool:
    """Whether most of a tensor had no gradient before its denominators were made: these are alike, and between those of the rest."""
    if r.numel() <= 1:
        return False
    most = r.median()
    return bool((r.min() < most) & (most < r.max())) and _most(r == most)


def _most(elements: Tensor) -> bool:
    """Whether more than half of some booleans are true."""
    return bool(2 * torch.count_nonzero(elements) > elements.numel())
