"""1-bit Adam (arXiv 2102.02888, algorithm 1; docs/algorithms, section 4)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracle.blocks import Array, Exchange, kappas
from oracle.common import (
    Gradients,
    average,
    clip_factor,
    finite,
    flatten,
    floored,
    present,
    squared_norm,
    step_over,
    times_denominator,
    zero_if_missing,
)


def shrunk(energies: Sequence[float], steps: int) -> bool:
    """Whether the bias-corrected average (decay 0.95) of the energies is below 0.8 of the highest there was from the 20th on, which is
    asked from the 100th step on."""
    averages, mean = [], 0.0
    for k, energy in enumerate(energies, start=1):
        mean = 0.95 * mean + 0.05 * energy
        averages.append(mean / (1 - 0.95**k))
    return steps >= 100 and len(averages) >= 20 and averages[-1] < 0.8 * max(averages[19:])


class Adam:
    """n workers of 1-bit Adam.

    Args:
        x: initial weights, any shapes.
        n: workers.
        lr: learning rate; an attribute that a schedule may change between steps, like all others.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the denominator.
        wd: decoupled weight decay.
        T_w: dense steps; None until ``freeze()``.
        bias_correction: as torch.optim.AdamW, or none.
        block_size: elements per block.
        phi: denominator floor.
        preconditioned: m/D travels, with D the denominators, rather than m.
        refresh_interval: compressed steps between two refreshes of v; "auto": whenever steps have shrunk; "never".
        refresh_steps: dense steps of a refresh.
        max_norm: clip the global norm.
        compressed: per tensor, False for one that stays dense for ever (``compress=False``).
        ranks_per_node: hierarchical exchange.
    """

    def __init__(
        self,
        x: Sequence[Array],
        n: int,
        *,
        lr: float = 1e-3,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        wd: float = 0.0,
        T_w: int | None = None,
        bias_correction: bool = True,
        block_size: int = 2048,
        phi: float = 0.1,
        scale_factor: float | None = None,
        server_scale_factor: float | None = None,
        preconditioned: bool = True,
        refresh_interval: int | str = "auto",
        refresh_steps: int = 4,
        max_norm: float | None = None,
        compressed: Sequence[bool] | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.n, self.lr, self.b1, self.b2, self.eps, self.wd = n, lr, b1, b2, eps, wd
        self.T_w, self.bias_correction, self.phi, self.max_norm = T_w, bias_correction, phi, max_norm
        self.preconditioned = preconditioned
        self.refresh_interval, self.refresh_steps = refresh_interval, refresh_steps
        self.dense_steps: list[bool] = []  # of the steps made, which were dense
        self.energies: list[float] = []  # "auto": of the compressed steps since the freeze or the last refresh
        self.compressed = [True] * len(x) if compressed is None else list(compressed)
        sizes = [a.size for a in self.x]
        self.m = [np.zeros(size) for size in sizes]
        self.v = [np.zeros(size) for size in sizes]
        # t counts steps in which the tensor took part, k those in which its v was updated (as torch.optim.AdamW counts, per tensor)
        self.t = [0] * len(x)
        self.k = [0] * len(x)
        # many nodes send more than the root mean square, workers and servers
        defaults = (1.5, 1.5) if preconditioned and n // ranks_per_node >= 32 else (1.0, 1.0)
        scales = kappas(defaults, scale_factor, server_scale_factor)
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node, *scales)
        self.steps = self.skipped = 0
        # what the denominators are made of in the compressed stage: v and k as they were at the freeze or the last refresh
        self.v_D = self.v
        self.k_D = self.k
        self.frozen = False
        self.since = 0  # steps since then
        self.interval: int | None = None  # compressed steps before the refresh that is due or under way
        if T_w == 0:
            self.freeze()

    def freeze(self) -> None:
        """The next step is compressed."""
        self.frozen = True
        self._new_denominators()

    def _new_denominators(self) -> None:
        self.v_D, self.k_D, self.since = [floored(v, self.phi) for v in self.v], list(self.k), 0
        self.interval = self.refresh_interval if isinstance(self.refresh_interval, int) else None
        self.energies = []

    @property
    def refreshing(self) -> bool:
        """Whether the next step is a dense one of a refresh."""
        return self.frozen and self.interval is not None and self.since >= self.interval

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):  # any non-finite value anywhere: all skip, nothing changes
            self.skipped += 1
            return
        g = flatten(g)
        if self.refreshing and self.since == self.interval:  # v learns on from what the denominators are made of
            self.v = [self.v_D[l] if self.compressed[l] else self.v[l] for l in range(len(self.x))]
        self.dense_steps.append(not self.frozen or self.refreshing)
        factor = clip_factor(self._norm(g), self.max_norm)
        for l in range(len(self.x)):
            if not present(g, l):  # no gradient on any worker: left alone
                continue
            self.t[l] += 1
            local = [factor * a for a in zero_if_missing(g, l, self.x[l].size)]
            if self.frozen and self.compressed[l] and not self.refreshing:
                # m = exchange(b1 m + (1-b1) g_i), or m/D = exchange((b1 m + (1-b1) g_i)/D)
                vd, k = self.v_D[l], self.k_D[l]
                D = (vd, k, self.b2, self.eps, self.bias_correction)
                sent = [self.b1 * self.m[l] + (1 - self.b1) * local[i] for i in range(self.n)]
                if self.preconditioned:
                    self.m[l] = times_denominator(self.exchange(l, [step_over(c, *D) for c in sent]), *D)
                else:
                    self.m[l] = self.exchange(l, sent)
            else:
                mean = np.mean(local, axis=0)  # g = mean_i g_i (dense)
                self.m[l] = self.b1 * self.m[l] + (1 - self.b1) * mean  # m = b1 m + (1-b1) g
                # v = b2 v + (1-b2) g^2; in a refresh g counts for s = 1 + interval/steps steps: v = b2^s v + (1-b2^s) g^2
                refreshing = self.refreshing and self.compressed[l]
                s = 1 + self.interval // self.refresh_steps if refreshing else 1
                self.v[l] = self.b2**s * self.v[l] + (1 - self.b2**s) * mean**2
                self.k[l] += s
                vd, k = (self.v_D[l], self.k_D[l]) if refreshing else (self.v[l], self.k[l])
            mhat = self.m[l] / (1 - self.b1 ** self.t[l]) if self.bias_correction else self.m[l]
            # x -= lr*wd*x + lr * mhat/(sqrt(vhat)+eps)
            update = step_over(mhat, vd, k, self.b2, self.eps, self.bias_correction)
            self.x[l] = self.x[l] - self.lr * self.wd * self.x[l] - self.lr * update
        self.steps += 1
        if not self.frozen:
            if self.T_w is not None and self.steps >= self.T_w:
                self.freeze()
            return
        self.since += 1
        if self.interval is not None:
            if self.since >= self.interval + self.refresh_steps:
                self._new_denominators()
        elif self.refresh_interval == "auto":
            self.energies.append(self._energy())
            if shrunk(self.energies[:-1], self.since - 1):  # a step counts when the next has been made
                self.interval = self.since

    def _energy(self) -> float:
        """Of the momentum as it travels: sum of squares of m, or of m/D."""
        energy = 0.0
        for l in range(len(self.x)):
            if self.compressed[l]:
                D = (self.v_D[l], self.k_D[l], self.b2, self.eps, self.bias_correction)
                energy += squared_norm([step_over(self.m[l], *D) if self.preconditioned else self.m[l]])
        return energy

    def _norm(self, g: Gradients) -> float:
        """Norm of the averaged gradient in a dense step, ``G = sqrt((1/n) sum_i ||g_i||^2)`` where gradients are local."""
        squares = 0.0
        for l in range(len(self.x)):
            if self.frozen and self.compressed[l] and not self.refreshing:
                squares += sum(squared_norm([g[i][l]]) for i in range(self.n)) / self.n
            elif present(g, l):
                squares += squared_norm([average(g, l, self.x[l].size)])
        return float(np.sqrt(squares))
