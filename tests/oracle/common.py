"""What all algorithms share (docs/algorithms, section 3): gradients that are missing, clipped or not finite, and denominators."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Gradients = Sequence[
    Sequence["Array | None"]
]  # g[i][l]: local gradient of worker i for tensor l, None where it has none


def flatten(g: Gradients) -> list[list[Array | None]]:
    """Local gradients as flat float64 vectors."""
    return [[None if a is None else np.asarray(a, dtype=np.float64).ravel() for a in worker] for worker in g]


def finite(g: Gradients) -> bool:
    """Whether no value of any worker's gradient is infinite or NaN; else all workers skip the step."""
    return all(np.isfinite(a).all() for worker in g for a in worker if a is not None)


def present(g: Gradients, l: int) -> bool:
    """Whether any worker has a gradient for tensor l; else the tensor is left alone."""
    return any(worker[l] is not None for worker in g)


def zero_if_missing(g: Gradients, l: int, size: int) -> list[Array]:
    """All workers' gradients of tensor l; one that is missing on some workers counts as zero there."""
    return [np.zeros(size) if worker[l] is None else worker[l] for worker in g]


def average(g: Gradients, l: int, size: int) -> Array:
    """``g = mean_i g_i`` (dense)."""
    return np.mean(zero_if_missing(g, l, size), axis=0)


def squared_norm(arrays: Sequence[Array | None]) -> float:
    """``||g||^2`` over several tensors, missing ones counting as zero."""
    return float(sum(np.sum(a**2) for a in arrays if a is not None))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """``min(1, max_norm / (G + 1e-6))``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def floored(v: Array, phi: float) -> Array:
    """Second moments for denominators from the first compressed step on: ``w if v_j == 0 else max(v_j, phi^2 w)``."""
    if not (v != 0).any():
        return np.zeros_like(v)
    w = np.mean(v[v != 0])  # w the mean of the non-zero v of its own tensor
    return np.where(v == 0, w, np.maximum(v, phi**2 * w))


def times_denominator(u: Array, vd: Array, k: float, b2: float, eps: float, bias_correction: bool) -> Array:
    """``u * (sqrt(vhat) + eps)``: what ``step_over`` has divided."""
    vhat = vd / (1 - b2**k) if bias_correction else vd
    return u * (np.sqrt(vhat) + eps)


def step_over(update: Array, vd: Array, k: float, b2: float, eps: float, bias_correction: bool) -> Array:
    """``update / (sqrt(vhat) + eps)``, and 0 for a tensor whose second moments are all zero."""
    if not vd.any():
        return np.zeros_like(update)
    vhat = vd / (1 - b2**k) if bias_correction else vd  # vhat = v / (1 - b2^k), k updates of v so far
    return update / (np.sqrt(vhat) + eps)
