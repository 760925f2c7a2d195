"""BinSGDM, published as Birder (NeurIPS 2023), as docs/algorithms, section 7, reads it."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from oracle.blocks import Array, node_means
from oracle.common import Gradients, finite, flatten, present, zero_if_missing

#: ``uniform(t, i, l)``: the draws in (-1, 1) of step t for all elements of tensor l; i is the worker, or "server"; with t = 0 the
#: server's feedback before the first step
Uniform = Callable[[int, "int | str", int], Array]


def share(b: float, k: int) -> float:
    """Weight of the newest of k values in an average whose weights fall by b per value and add up to 1."""
    return (1 - b) / (1 - b**k)


def Q(y: Array, U: Array) -> Array:
    """+1 with probability (1+y)/2, else -1: +1 where y > U, U uniform in (-1, 1)."""
    return np.where(y > U, 1.0, -1.0)


class BinSGDM:
    """n workers of BinSGDM.

    Args:
        x: initial weights, any shapes.
        n: workers.
        uniform: where the draws come from, so that the library's counter-based hash can be injected.
        lr: learning rate.
        b: decay of m.
        ba: decay of a; None: a memory a hundred times as long as that of m.
        wd: decoupled weight decay; acts on every coordinate, moved or not.
        server: ``"feedback"`` or ``"random"`` (the paper).
        overflow: ``"keep"``: what the clip takes from m falls by ba instead of b; ``"drop"`` is the paper.
        ranks_per_node: hierarchical exchange: gradients are averaged within nodes, the workers are the nodes.

    Attributes:
        seen: which coordinates have ever had a gradient anywhere, as of the last merge.
    """

    def __init__(
        self,
        x: Sequence[Array],
        n: int,
        *,
        uniform: Uniform,
        lr: float = 1e-3,
        b: float = 0.7,
        ba: float | None = None,
        wd: float = 0.0,
        server: str = "feedback",
        overflow: str = "keep",
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.uniform, self.lr, self.b, self.wd, self.server = uniform, lr, b, wd, server
        self.overflow = overflow
        self.ba = 1 - (1 - b) / 100 if ba is None else ba
        self.ranks_per_node = ranks_per_node
        self.n = n // ranks_per_node
        sizes = [a.size for a in self.x]
        self.m = [[np.zeros(size) for size in sizes] for _ in range(self.n)]
        self.a = [[np.zeros(size) for size in sizes] for _ in range(self.n)]
        self.sent = [[np.zeros(size) for size in sizes] for _ in range(self.n)]  # the part of m that signs could say
        self.seen = [np.zeros(size, dtype=bool) for size in sizes]
        self.d = [uniform(0, "server", l) if server == "feedback" else np.zeros(0) for l in range(len(sizes))]
        self.k = [0] * len(sizes)  # steps of each tensor
        self.steps = self.skipped = 0

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):
            self.skipped += 1
            return
        g = flatten(g)
        self.steps += 1
        t = self.steps
        for l in range(len(self.x)):
            if present(g, l):
                self._step(t, l, node_means(zero_if_missing(g, l, self.x[l].size), self.ranks_per_node))

    def _step(self, t: int, l: int, g: Sequence[Array]) -> None:
        votes = []
        self.k[l] += 1
        w, wa = share(self.b, self.k[l]), share(self.ba, self.k[l])
        for i in range(self.n):
            # m = b*sent + max(b, ba)*excess + (1-b) g, in the limit of many steps
            excess = self.m[i][l] - self.sent[i][l]
            slower = max(1 - w, 1 - wa) if self.overflow == "keep" else 1 - w
            self.m[i][l] = (1 - w) * self.sent[i][l] + slower * excess + w * g[i]
            self.a[i][l] = (1 - wa) * self.a[i][l] + wa * np.abs(g[i])
            m, a = self.m[i][l], self.a[i][l]
            self.sent[i][l] = np.clip(m, -a, a)
            y = np.divide(m, a, out=np.zeros_like(m), where=a != 0)  # 0/0 counts as 0
            votes.append(Q(np.clip(y, -1, 1), self.uniform(t, i, l)))  # u_i = Q(clip(m_i/a_i))
        if t & (t - 1) == 0:  # t = 1, 2, 4, 8, ...: the bitmap is merged over the ranks
            for i in range(self.n):
                self.seen[l] |= self.a[i][l] != 0
        mean = np.mean(votes, axis=0)
        if self.server == "random":
            ubar = Q(mean, self.uniform(t, "server", l))  # ubar = Q((1/n) sum_i u_i), drawn once
        else:
            z = mean + self.d[l]
            ubar = np.where(z >= 0, 1.0, -1.0)
            self.d[l] = z - ubar
        # x -= lr*wd*x + lr*ubar, and ubar counts only where some worker has ever had a gradient
        self.x[l] = self.x[l] - self.lr * self.wd * self.x[l] - self.lr * np.where(self.seen[l], ubar, 0.0)
