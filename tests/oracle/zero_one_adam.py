"""0/1 Adam (arXiv 2202.06009, algorithm 1; docs/algorithms, section 6)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from oracle.adam import gap_of_refreshes, updates_of_refresh
from oracle.blocks import Array, Exchange, node_means
from oracle.common import (
    Gradients,
    finite,
    flatten,
    floored,
    present,
    step_over,
    times_denominator,
    zero_if_missing,
)


class VariancePolicy:
    """``T_v``: the gap after a refresh at t is ``gap_of_refreshes(t)``, after the freeze at least 16; the first refresh is at t = 1.

    Followed from there, the gap between refresh j and refresh j+1 is ``2^floor(j/scaler)``.
    """

    def __init__(self, scaler: int = 16) -> None:
        self.scaler, self.last, self.next, self.asked, self.frozen = scaler, 0, 1, 0, False

    def __call__(self, t: int) -> bool:
        """Whether step t refreshes v; asked once for every t = 1, 2, ... in turn."""
        return t >= self.next

    def gap(self, t: int) -> int:
        """Steps from a refresh at t to the next one."""
        return max(16 if self.frozen else 1, gap_of_refreshes(t, self.scaler))

    def ask(self, t: int) -> None:
        """Makes step t a refresh, if there is none before it."""
        if t != self.next:
            self.asked, self.next = t, min(self.next, t)

    def refreshed(self, t: int) -> None:
        """Says that step t did."""
        self.last, self.next = t, t + self.gap(t)
        if self.asked > t:
            self.next = min(self.next, self.asked)


class SyncPolicy:
    """``T_u``: every step up to ``var_freeze_step``, then when ``gap(t)`` or more steps have passed since the last, this one included.

    Args:
        var_freeze_step: last step at which v may be refreshed.
        scaler: ``interval``: ``gap(t) = min(clipper, 2^floor((t - var_freeze_step - 1)/scaler))``.
        clipper: largest gap.
        policy: ``"interval"``, or ``"learning_rate"``: the gap doubles each time lr has halved since the freeze.
    """

    def __init__(self, var_freeze_step: int, scaler: int = 32768, clipper: int = 16, policy: str = "interval") -> None:
        self.var_freeze_step, self.scaler, self.clipper, self.policy = var_freeze_step, scaler, clipper, policy
        self.last = 0
        self.lr_at_freeze: float | None = None

    def gap(self, t: int, lr: float) -> int:
        """``gap(t)``."""
        if t <= self.var_freeze_step:
            return 1
        if self.policy == "interval":
            return min(self.clipper, 2 ** ((t - self.var_freeze_step - 1) // self.scaler))
        if lr <= 0 or not self.lr_at_freeze:
            return self.clipper if self.lr_at_freeze else 1
        return min(self.clipper, 2 ** max(0, math.floor(math.log2(self.lr_at_freeze / lr) + 1e-9)))

    def __call__(self, t: int, lr: float) -> bool:
        """Whether step t synchronises; asked once for every t = 1, 2, ... in turn."""
        if t <= self.var_freeze_step or self.lr_at_freeze is None:
            self.lr_at_freeze = lr
        if t - self.last >= self.gap(t, lr):
            self.last = t
            return True
        return False


class ZeroOneAdam:
    """n workers of 0/1 Adam; arguments as ``oracle.adam.Adam`` and the two policies.

    Local steps talk to nobody, so there a missing gradient counts as zero even if it is missing everywhere. Clipping is not modelled.

    Attributes:
        xs: weights of each worker, ``xs[i][l]`` (equal after every synchronisation).
        ms: first moments of each worker.
        anchor: weights at the last synchronisation, decayed since.
        u: what each worker has accumulated since.
        S: sum of ``lr_t`` since, per tensor; H: steps since.
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
        var_freeze_step: int = 100,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32768,
        local_step_clipper: int = 16,
        local_step_policy: str = "interval",
        var_decay: str = "step",
        bias_correction: bool = True,
        block_size: int = 2048,
        phi: float = 0.1,
        preconditioned: bool = True,
        refresh: int | str = "auto",
        ranks_per_node: int = 1,
    ) -> None:
        start = [np.array(a, dtype=np.float64).ravel() for a in x]
        sizes = [a.size for a in start]
        self.n, self.lr, self.b1, self.b2, self.eps, self.wd = n, lr, b1, b2, eps, wd
        self.var_freeze_step, self.bias_correction, self.phi = var_freeze_step, bias_correction, phi
        self.ranks_per_node, self.preconditioned = ranks_per_node, preconditioned
        self.var_decay, self.refresh = var_decay, refresh
        self.T_v = VariancePolicy(var_update_scaler)
        self.T_u = SyncPolicy(var_freeze_step, local_step_scaler, local_step_clipper, local_step_policy)
        self.xs = [[a.copy() for a in start] for _ in range(n)]
        self.ms = [[np.zeros(size) for size in sizes] for _ in range(n)]
        self.v = [np.zeros(size) for size in sizes]
        self.anchor = [a.copy() for a in start]
        self.u = [[np.zeros(size) for size in sizes] for _ in range(n)]
        self.S = [0.0] * len(sizes)
        self.H = 0
        self.t = [0] * len(sizes)
        self.k: list[float] = [0] * len(sizes)
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node)
        self.steps = self.skipped = 0
        self.compressed_once = False
        self.bounded = 0  # coordinates that local steps have moved by the bound
        self.kinds: list[str] = []  # what each step was: "refresh", "dense", "compressed", "sync", "local" or "relearn"
        # after the freeze: what the denominators are made of, v and its updates then or at the last "relearn" step
        self.frozen: tuple[list[Array], list[float]] | None = None
        # tensors whose first gradient has come after the first one-bit round: after which of their steps that was, and after which they
        # may join the exchange
        self.late: dict[int, tuple[int, int]] = {}

    @property
    def x(self) -> list[Array]:
        """Weights of worker 0."""
        return self.xs[0]

    @property
    def m(self) -> list[Array]:
        """First moments of worker 0."""
        return self.ms[0]

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):
            self.skipped += 1
            return
        g = flatten(g)
        self.steps += 1
        local_stage = self.steps > self.var_freeze_step
        if local_stage and self.frozen is None:
            self.frozen = ([floored(v, self.phi) for v in self.v], list(self.k))
            self.T_v.frozen = True
            self.T_v.next = self.T_v.last + self.T_v.gap(self.T_v.last)
            if not isinstance(self.refresh, str):
                self.T_v.next = self.steps + self.refresh
        due = self.T_v(self.steps) and (not local_stage or self.refresh != "never")
        relearn = local_stage and due and self.T_u.last == self.steps - 1  # where workers are equal
        refresh = due and not local_stage
        sync = relearn or self.T_u(self.steps, self.lr)
        # workers are to be equal before a refresh
        if local_stage and self.refresh != "never" and (due or self.T_v(self.steps + 1)):
            sync = True
        if sync:
            self.T_u.last = self.steps
        self.H += 1
        if relearn:
            kind = "relearn"
        elif refresh:
            kind = "refresh"
        elif local_stage:
            kind = "sync" if sync else "local"
        else:
            kind = "compressed"
        # lr (or the sum of it) is 0 where a synchronisation is due: a dense round that does not touch v
        if (kind == "compressed" and self.lr == 0) or (kind == "sync" and self.lr == 0 and not any(self.S)):
            kind = "dense"
        if kind in ("compressed", "sync"):
            self.compressed_once = True
        self.kinds.append(kind)
        self._find_late(g, kind, local_stage)
        for l in range(len(self.v)):
            if l in self.late:
                if present(g, l):
                    self._learn_alone(l, zero_if_missing(g, l, self.v[l].size))
            elif (local_stage and not relearn) or present(g, l):
                self.t[l] += 1
                getattr(self, "_" + kind)(l, zero_if_missing(g, l, self.v[l].size))
        if kind != "local":
            self.H = 0
        if refresh or relearn:
            self.T_v.refreshed(self.steps)
            if relearn and not isinstance(self.refresh, str):
                self.T_v.next = self.steps + self.refresh + 1
        if not local_stage or self.T_u.last == self.steps:
            self._join(local_stage)

    def _find_late(self, g: Gradients, kind: str, local_stage: bool) -> None:
        for l in range(len(self.v)):
            cold = self.compressed_once and l not in self.late and not self.v[l].any()
            local = zero_if_missing(g, l, self.v[l].size)
            if cold and (np.mean(local, axis=0) if kind in ("refresh", "relearn", "dense") else np.array(local)).any():
                self.late[l] = (self.t[l], self.t[l] + max(1, min(self.steps - 1, round(1 / (1 - self.b2)))))
                if local_stage and self.refresh != "never":
                    self.T_v.ask(self.steps + 4)

    def _learn_alone(self, l: int, g: Sequence[Array]) -> None:
        """Adam, as torch.optim.AdamW has it, on the averaged gradient."""
        x, mean = self.xs[0][l], np.mean(g, axis=0)
        self.t[l] += 1
        self.v[l] = self.b2 * self.v[l] + (1 - self.b2) * mean**2
        m = self.b1 * self.ms[0][l] + (1 - self.b1) * mean
        update = step_over(self._lr_t(l) * m, self.v[l], self.t[l], self.b2, self.eps, self.bias_correction)
        self._set_all(l, m, x - self.lr * self.wd * x - update)

    def _join(self, local_stage: bool) -> None:
        """Late tensors whose v has learned for long enough are like the others from here on."""
        for l, (begun, ends) in list(self.late.items()):
            if self.t[l] >= ends and self.v[l].any():
                del self.late[l]
                self.k[l] = self.t[l] - begun
                if local_stage and self.refresh != "never":
                    self.T_v.ask(self.steps + 1)
                if self.frozen is not None:
                    self.frozen[0][l], self.frozen[1][l] = floored(self.v[l], self.phi), self.k[l]

    def _D(self, l: int) -> tuple[Array, float, float, float, bool]:
        """What denominators are made of: from the first compressed step on floored, in a refresh too, for m holds noise then."""
        if self.frozen is not None:
            vd, k = self.frozen[0][l], self.frozen[1][l]
        else:
            vd, k = floored(self.v[l], self.phi) if self.compressed_once else self.v[l], self.k[l]
        return vd, k, self.b2, self.eps, self.bias_correction

    def _lr_t(self, l: int) -> float:
        return self.lr / (1 - self.b1 ** self.t[l]) if self.bias_correction else self.lr  # lr_t = lr/(1-b1^t)

    def _over_denominator(self, l: int, update: Array) -> Array:
        return step_over(update, *self._D(l))

    def _exchanged(self, l: int, c: Sequence[Array]) -> Array:
        """``exchange(c_i)``, or ``exchange(c_i/D)*D``, where what travels is the change of the weights."""
        if not self.preconditioned:
            return self.exchange(l, c)
        D = self._D(l)
        return times_denominator(self.exchange(l, [step_over(a, *D) for a in c]), *D)

    def _set_all(self, l: int, m: Array, x: Array) -> None:
        for i in range(self.n):
            self.ms[i][l], self.xs[i][l] = m.copy(), x.copy()
        self.anchor[l] = x.copy()

    def _refresh(self, l: int, g: Sequence[Array]) -> None:
        x, mean = self.xs[0][l], np.mean(g, axis=0)  # g = mean_i g_i (dense)
        m = self.b1 * self.ms[0][l] + (1 - self.b1) * mean  # m = b1 m + (1-b1) g
        # v = b2 v + (1-b2) g^2, or by "step" as often as steps have passed since the last refresh
        times = updates_of_refresh(self.steps - self.T_v.last, self.b2, self.k[l]) if self.var_decay == "step" else 1
        self.v[l] = self.b2**times * self.v[l] + (1 - self.b2**times) * mean**2
        self.k[l] += times
        # x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        self._set_all(l, m, x - self.lr * self.wd * x - self._over_denominator(l, self._lr_t(l) * m))

    def _relearn(self, l: int, g: Sequence[Array]) -> None:
        assert self.frozen is not None
        self.v[l] = self.frozen[0][l]  # v learns on from what denominators are made of
        x, mean = self.xs[0][l], np.mean(g, axis=0)
        m = self.b1 * self.ms[0][l] + (1 - self.b1) * mean
        times = updates_of_refresh(self.steps - self.T_v.last, self.b2, self.k[l]) if self.var_decay == "step" else 1
        self.v[l] = self.b2**times * self.v[l] + (1 - self.b2**times) * mean**2
        self.k[l] += times
        self.frozen[0][l], self.frozen[1][l] = floored(self.v[l], self.phi), self.k[l]
        self._set_all(l, m, x - self.lr * self.wd * x - self._over_denominator(l, self._lr_t(l) * m))

    def _dense(self, l: int, g: Sequence[Array]) -> None:
        # lr is 0: x and anchor stay, m becomes the mean of all workers' m
        m = np.mean([self.b1 * self.ms[i][l] + (1 - self.b1) * g[i] for i in range(self.n)], axis=0)
        self._set_all(l, m, self.anchor[l])

    def _compressed(self, l: int, g: Sequence[Array]) -> None:
        x, lr_t = self.xs[0][l], self._lr_t(l)
        # m = exchange(b1 m + (1-b1) g_i) ; x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        m = self._exchanged(l, [self.b1 * self.ms[i][l] + (1 - self.b1) * g[i] for i in range(self.n)])
        self._set_all(l, m, x - self.lr * self.wd * x - self._over_denominator(l, lr_t * m))

    def _local(self, l: int, g: Sequence[Array]) -> None:
        lr_t = self._lr_t(l)
        if self.ranks_per_node > 1:  # the workers of a hierarchical exchange are the nodes
            means = node_means(g, self.ranks_per_node)
            g = [means[i // self.ranks_per_node] for i in range(self.n)]
        for i in range(self.n):
            self.ms[i][l] = self.b1 * self.ms[i][l] + (1 - self.b1) * g[i]  # m_i = b1 m_i + (1-b1) g_i
            self.u[i][l] = self.u[i][l] + lr_t * self.ms[i][l]  # u_i += lr_t*m_i
            # x_i -= lr*wd*x_i + clip(lr_t*m_i/(sqrt(vhat)+eps), -bound, bound) , bound = lr_t*max(1, (1-b1)/sqrt(1-b2))
            bound = lr_t * max(1.0, (1 - self.b1) / math.sqrt(1 - self.b2))
            if not self.preconditioned:  # as published
                bound = np.inf
            step = np.clip(self._over_denominator(l, lr_t * self.ms[i][l]), -bound, bound)
            self.xs[i][l] = self.xs[i][l] - self.lr * self.wd * self.xs[i][l] - step
            self.bounded += int(np.sum(np.abs(step) == bound))
        self.S[l] += lr_t  # S += lr_t
        self.anchor[l] = self.anchor[l] - self.lr * self.wd * self.anchor[l]  # anchor -= lr*wd*anchor

    def _sync(self, l: int, g: Sequence[Array]) -> None:
        self._local(l, g)
        unit = self.S[l] / self.H  # mean lr_t of the H steps
        ubar = unit * self._exchanged(
            l, [self.u[i][l] / unit for i in range(self.n)]
        )  # ubar = (S/H) exchange(u_i/(S/H))
        # m = ubar/S ; x = anchor - ubar/(sqrt(vhat)+eps) ; anchor = x ; u = 0 ; S = 0
        self._set_all(l, ubar / self.S[l], self.anchor[l] - self._over_denominator(l, ubar))
        for i in range(self.n):
            self.u[i][l] = np.zeros_like(self.u[i][l])
        self.S[l] = 0.0
