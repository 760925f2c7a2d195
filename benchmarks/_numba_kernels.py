"""The two kernels of a worker in Numba, for the choice of the CPU backend: compress and apply, the same bits as the reference.

Full blocks of flat fp32 tensors only: what a fair comparison of speed needs, not a backend.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numba import njit, prange

from lightning_onebit.kernels import Packed

BLOCK = 2048
LANES = BLOCK // 32
CHUNK = 64  # blocks per piece of work

f32, u32 = np.float32, np.uint32


@njit(parallel=True, fastmath=False, boundscheck=False)
def _compress(a, old_scales, old_words, b, g, e, scales, words):  # type: ignore[no-untyped-def]
    blocks = scales.size
    for chunk in prange((blocks + CHUNK - 1) // CHUNK):
        acc, old, word = np.empty(LANES, f32), np.empty(LANES, u32), np.empty(LANES, u32)
        for block in range(chunk * CHUNK, min(blocks, (chunk + 1) * CHUNK)):
            plus, factor = a[block] * old_scales[block], b[block]
            minus = -plus
            for j in range(LANES):
                acc[j] = f32(0)
                word[j] = u32(0)
                old[j] = old_words[block * LANES + j]
            for k in range(32):
                first = block * BLOCK + k * LANES
                y, gradient = e[first : first + LANES], g[first : first + LANES]
                for j in range(LANES):
                    m = minus if old[j] & u32(1) else plus
                    y[j] = (m + factor * gradient[j]) + y[j]
                for j in range(LANES):
                    acc[j] += y[j] * y[j]
                for j in range(LANES):
                    # copysign sees the sign of -0.0, and LLVM can vectorise it
                    word[j] = (word[j] >> u32(1)) | (
                        u32(0x80000000) if math.copysign(f32(1), y[j]) < f32(0) else u32(0)
                    )
                    old[j] >>= u32(1)
            width = LANES
            while width > 1:
                width //= 2
                for j in range(width):
                    acc[j] += acc[j + width]
            scale = np.sqrt(acc[0] / f32(BLOCK))
            scales[block] = scale
            for j in range(LANES):
                words[block * LANES + j] = word[j]
            y = e[block * BLOCK : (block + 1) * BLOCK]
            for i in range(BLOCK):
                y[i] = y[i] - math.copysign(scale, y[i])


@njit(parallel=True, fastmath=False, boundscheck=False)
def _apply(x, r, scales, words, decay, alpha):  # type: ignore[no-untyped-def]
    blocks = scales.size
    for chunk in prange((blocks + CHUNK - 1) // CHUNK):
        word = np.empty(LANES, u32)
        for block in range(chunk * CHUNK, min(blocks, (chunk + 1) * CHUNK)):
            t, keep = alpha[block] * scales[block], decay[block]
            for j in range(LANES):
                word[j] = words[block * LANES + j]
            for k in range(32):
                first = block * BLOCK + k * LANES
                weight, reciprocal = x[first : first + LANES], r[first : first + LANES]
                for j in range(LANES):
                    update = t * reciprocal[j]
                    weight[j] = weight[j] * keep - (-update if word[j] & u32(1) else update)
                for j in range(LANES):
                    word[j] >>= u32(1)


def _parts(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    if packed.rows != 1:
        raise ValueError(f"the prototype takes payloads of one row, got {packed.rows}")
    return packed.scales[0].numpy(), packed.words[0].reshape(-1).numpy().view(u32)


def compress(
    a: torch.Tensor, m: Packed, b: torch.Tensor, g: torch.Tensor, e: torch.Tensor, out: Packed, threads: int
) -> None:
    """As ``ReferenceKernels.compress`` with a packed momentum and a flat gradient."""
    numba.set_num_threads(threads)
    _compress(a.numpy(), *_parts(m), b.numpy(), g.numpy(), e.numpy(), *_parts(out))


def apply_adam(
    x: torch.Tensor, packed: Packed, r: torch.Tensor, decay: torch.Tensor, alpha: torch.Tensor, threads: int
) -> None:
    """As ``ReferenceKernels.apply_adam`` for one flat weight tensor."""
    numba.set_num_threads(threads)
    _apply(x.numpy(), r.numpy(), *_parts(packed), decay.numpy(), alpha.numpy())
