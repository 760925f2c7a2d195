"""Local steps of 0/1 Adam: what ranks do alone between two synchronisations, and the model that they share meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_onebit.engine.arenas import Arenas
from lightning_onebit.engine.codec import OneBit
from lightning_onebit.engine.masters import adopted
from lightning_onebit.engine.rule import Sent
from lightning_onebit.engine.step import Part, Step
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import upload


class Local:
    """What the ranks of 0/1 Adam do alone between two synchronisations, and the model that they share meanwhile.

    Arenas: ``"u"``, what a rank has moved by since the last synchronisation, and ``"anchor"``, the weights of that synchronisation,
    decayed since.

    Attributes:
        way: by slot, S: sum of ``lr_t`` since the last synchronisation.
        steps: H: local steps since then.
    """

    def __init__(self, kept: Arenas, *, preconditioned: bool) -> None:
        self._kept, self._preconditioned = kept, preconditioned
        self.way: list[float] = []
        self.steps = 0
        self._anchored = False

    def reset(self) -> None:
        """Replicas are equal: what the program writes into weights from here on belongs to the shared model."""
        self.way, self.steps, self._anchored = [0.0] * len(self._kept.layout.slots), 0, False

    def anchor_here(self) -> None:
        """Makes sure that ``u`` and the anchor exist, and that the anchor is the model of the last synchronisation."""
        kept = self._kept
        if "anchor" not in kept.flat:
            elements, device = kept.layout.plan.elements, kept.device
            kept.flat["u"] = torch.zeros(elements, dtype=torch.float32, device=device)
            kept.flat["anchor"] = torch.zeros_like(kept.flat["u"])
            self._anchored = False
        if not self._anchored:
            for i in kept.layout.slots:
                self.anchor(i).copy_(kept.weight(i))
            self._anchored = True

    def drop_arenas(self) -> None:
        """Gives ``u`` and the anchor up, while replicas are equal."""
        for name in ("u", "anchor"):
            self._kept.flat.pop(name, None)
        self._anchored = False

    def anchor(self, index: int) -> Tensor:
        """Weights of a parameter that all ranks share."""
        return self._kept.layout.view(self._kept.flat["anchor"], index)

    def anchor_late(self, indices: Sequence[int]) -> None:
        """What all ranks have alike belongs to the shared model at once."""
        if self._anchored and "anchor" in self._kept.flat:
            for i in indices:
                self.anchor(i).copy_(self._kept.weight(i))

    # ----- a synchronisation -------------------------------------------------------------------------------------------

    def synchronise(self, step: Step) -> None:
        """``ubar = (S/H) exchange(u_i/(S/H))`` of all that have moved, whether or not the last step had a gradient."""
        layout = self._kept.layout
        step.active = [False] * len(layout.params)
        for slot, i in enumerate(layout.slots):
            step.active[i] = self.way[slot] > 0
        over, times = self._mean_lr_t(step, -1), self._mean_lr_t(step, 1)

        def send(s: Part) -> Sent:
            b = over[s.blocks.index][s.lo : s.hi]
            return Sent(b=b, r=s["r"] if self._preconditioned else None, g=s.whole("u"))

        def take(s: Part, u: Packed) -> None:
            self._take(s, u, times[s.blocks.index])

        step.exchange(OneBit(step, send, take, becomes_momentum=False))

    def _mean_lr_t(self, step: Step, power: int) -> Sequence[Tensor]:
        """By bucket, fp32 ``(blocks,)``: S/H (1 where a parameter takes no part), to a power."""
        return step.spread([(way / self.steps) ** power if way > 0 else 1.0 for way in self.way])

    def _take(self, s: Part, u: Packed, alpha: Tensor) -> None:
        """``m = ubar/S ; x = anchor - ubar r ; anchor = x ; u = 0``."""
        kept, bucket, layout = self._kept, s.blocks, self._kept.layout
        anchor, momentum = s["anchor"], s["m"]
        views = [anchor[p.block * bucket.block_size : p.block * bucket.block_size + p.numel] for p in bucket.spans]
        moves = [s.step.active[layout.slots[p.param]] for p in bucket.spans]
        moving = [view if moved else None for view, moved in zip(views, moves, strict=True)]
        ones = torch.ones(bucket.blocks, dtype=torch.float32, device=layout.device)
        s.kernels.apply_adam(bucket, moving, u, None if self._preconditioned else s["r"], ones, alpha)
        s.kernels.scatter(bucket, anchor, s.x)
        kept.exchanged = self.steps
        u.scales.div_(self.steps)  # the mean of their momenta
        idle = upload([not s.step.active[i] for i in layout.slots], layout.device)[bucket.block_param]
        before = momentum.view(-1, bucket.block_size)[idle]
        s.kernels.unpack(u, bucket.lengths, momentum)
        kept.as_momentum(momentum, bucket.first_block * bucket.block_size)
        momentum.view(-1, bucket.block_size)[idle] = before
        s["u"].zero_()

    def own_weights(self) -> Tensor:
        """This rank's weights, a flat over all blocks."""
        kept = self._kept
        flat = torch.zeros_like(kept.flat["u"])
        for i in kept.layout.slots:
            own = kept.weight(i)
            if i in kept.masters:
                own = adopted(kept.hidden.get(i, kept.layout.params[i].detach()), own)
            kept.layout.view(flat, i).copy_(own)
        return flat
