"""Parameters whose first gradient comes after second moments have frozen: averaged densely until theirs have learned.

A parameter's life where denominators are frozen::

    cold    its second moment is 0: it has had no gradient yet, or exact zeros, or has joined after the freeze
    late    from its first gradient on any rank: the rule's dense step, on averaged gradients, with moments of its own
    known   its second moment has learned for as many steps as the run had taken before, 1/(1-b2) at most: compressed from here on

A cold parameter with gradients of zeros takes part in the exchange and sends scales of 0; a late one takes no part.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from lightning_onebit.comm import Control, memory_order
from lightning_onebit.engine.step import Group

if TYPE_CHECKING:
    from lightning_onebit.engine.rule import Rule
    from lightning_onebit.engine.step import Step

log = logging.getLogger("lightning_onebit")

#: names of parameters that a message lists
_NAMED = 4


class Late:
    """Begins and ends the time in which parameters are late, and makes their steps.

    Args:
        rule: what trains.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule, self._kept = rule, rule.kept

    def begin(self, indices: list[int], reason: str) -> None:
        """Makes parameters late from the next step on; the reason is for the log."""
        kept = self._kept
        kept.cold -= set(indices)
        for i in indices:
            kept.late[i] = kept.t[i], kept.t[i] + self.lessons(i)
            kept.own[i] = kept.own_zeros(i)
        if kept.layout.ranks.rank == 0:
            names = ", ".join(map(kept.name_of, indices[:_NAMED]))
            more = f" (and {len(indices) - _NAMED} others)" if len(indices) > _NAMED else ""
            log.warning(
                "step %d: %s%s %s: averaged densely for %d steps, in which its second moment learns, then compressed",
                *(kept.steps + 1, names, more, reason, max(map(self.lessons, indices))),
            )

    def lessons(self, index: int) -> int:
        """Dense steps in which a late parameter's second moment learns: what it can remember, or as many as the run has taken."""
        return max(1, min(self._kept.steps, round(1.0 / (1.0 - self._kept.group(index)["betas"][1]))))

    def average(self, step: Step, verdict: Control) -> list[int]:
        """Averages the gradients of late parameters, which take no part in the exchange of this step; returns those that have one."""
        kept = self._kept
        for i in kept.late:
            step.active[i] = False
        members = [i for i in sorted(kept.late) if verdict.present[i]]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in members:
            by_dtype.setdefault(kept.layout.params[i].dtype, []).append(i)
        for same in by_dtype.values():
            params = [kept.layout.params[i] for i in same]
            flat = torch.cat(
                [memory_order(torch.empty_like(p).copy_(kept.grad(i))) for i, p in zip(same, params, strict=True)]
            )
            names = f"dense average of {len(same)} tensors that learn after the freeze, {kept.name_of(same[0])} first"
            step.link.average(flat, names)
            if step.grad_scale != 1.0:
                flat.mul_(step.grad_scale)
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad = part.as_strided(p.shape, p.stride(), part.storage_offset())
        return members

    def step(self, step: Step, members: list[int]) -> None:
        """Steps late parameters on averaged gradients."""
        kept = self._kept
        for group, part in kept.layout.by_group(members):
            self._rule.dense(Group(step, kept.groups[group], part))
        kept.publish(members)
        step.count(members)
        self._rule.stepped_late(members)

    def restart(self, indices: list[int]) -> None:
        """Makes exchanged parameters learn anew by dense steps."""
        kept = self._kept
        for i in indices:
            kept.t[i] = 0
            kept.part("r", i).zero_()
            kept.clear_momentum(i)
        self.begin(indices, "starts over by reset_state()")

    def start_over(self) -> None:
        """Gives late parameters that have made no step a full time to learn in."""
        kept = self._kept
        kept.late |= {i: (0, self.lessons(i)) for i in kept.late if not kept.t[i]}

    def take_in_learned(self) -> None:
        """Lets those that have learned enough join the exchange."""
        kept = self._kept
        if not kept.late or not self._rule.may_take_in():
            return
        ready = [i for i, (_, ends) in sorted(kept.late.items()) if kept.t[i] >= ends]
        if not ready:
            return
        known = torch.stack([kept.own[i]["v"].any() for i in ready]).double()[:, None]
        for i, has_learned in zip(ready, kept.over_shards(known, ready, "max")[:, 0].tolist(), strict=True):
            begun = kept.late[i][0]
            if has_learned:
                del kept.late[i]
                kept.clear_residuals(i)  # (one that has started over still has what was held back before)
                self._rule.take_in(i, kept.own.pop(i), kept.t[i] - begun)
                log.info("step %d: second moments of %s have learned; it is compressed", kept.steps, kept.name_of(i))
