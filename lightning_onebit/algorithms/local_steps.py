"""Local steps of 0/1 Adam: what ranks do alone between two synchronisations, and the model that they share meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_onebit.engine.arenas import Arenas
from lightning_onebit.engine.masters import adopt_, adopted
from lightning_onebit.engine.step import Step


class Local:
    """What the ranks of 0/1 Adam do alone between two synchronisations, and the model that they share meanwhile.

    Arenas: ``"u"``, what a rank has moved by since the last synchronisation, and ``"anchor"``, the weights of that synchronisation,
    decayed since.

    Attributes:
        way: by slot, S: sum of ``lr_t`` since the last synchronisation.
        steps: H: local steps since then.
    """

    def __init__(self, kept: Arenas) -> None:
        self._kept = kept
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

    def mean_lr_t(self, step: Step, power: int) -> Sequence[Tensor]:
        """By bucket, fp32 ``(blocks,)``: S/H (1 where a parameter takes no part), to a power."""
        values = step.spread([(way / self.steps) ** power if way > 0 else 1.0 for way in self.way])
        return values.split([bucket.blocks for bucket in self._kept.layout.buckets])

    # ----- the model that is shown -------------------------------------------------------------------------------------

    def show_shared(self) -> None:
        """Points parameters at the anchor; nothing is copied (fp32)."""
        kept = self._kept
        for i in kept.layout.slots:
            p, anchor = kept.layout.params[i], self.anchor(i)
            # (there already, where a signal has broken the last call or the way back)
            kept.hidden.setdefault(i, p.data)
            p.data = anchor if p.dtype == anchor.dtype else torch.empty_like(p.data).copy_(anchor)
        kept.showing = True

    def show_own(self) -> None:
        """Points parameters back at this rank's own weights."""
        self.adopt_shown()
        self._kept.showing = False
        for i, data in self._kept.hidden.items():
            self._kept.layout.params[i].data = data
        self._kept.hidden = {}

    @torch.no_grad()
    def adopt_shown(self) -> None:
        """Takes into the anchor what the program has written into the 16-bit copies that showed it."""
        for i in self._kept.hidden.keys() & self._kept.masters.keys() if self._kept.showing else ():
            adopt_([(self._kept.layout.params[i], self.anchor(i))])

    def keep_shown(self) -> None:
        """Gives what is shown memory of the parameters' own."""
        self.adopt_shown()
        for i in self._kept.hidden:
            p = self._kept.layout.params[i]
            p.data = p.data.clone()

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
