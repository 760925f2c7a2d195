"""Runs every kernel in every way on the GPU; a program of its own so that compute-sanitizer can watch it.

Every tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a stray access leaves one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_shim import cases
from lightning_onebit.kernels.cuda import CudaKernels

if __name__ == "__main__":
    kernels = CudaKernels()
    for block_size in (32, 96, 2048, 16384):
        for case in cases.CASES.values():
            case(cases.world(kernels, lambda t: t.cuda(), block_size, (100, 4097, 64)))
    kernels.grad_stats([torch.randn(n, device="cuda").to(t) for n in (1, 70001) for t in cases.DTYPES])
    torch.cuda.synchronize()
    sys.stdout.write("every kernel has run\n")
