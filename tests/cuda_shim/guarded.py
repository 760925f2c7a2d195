"""Runs every case with each tensor flush against a page that must not be touched; a kernel that strays dies of it.

Run as a program by a test, so that a death is a failure and not the end of pytest. The page lies behind every tensor first, then in
front of it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_shim import ShimRuntime, cases
from lightning_onebit.kernels.cuda import CudaKernels
from lightning_onebit.kernels.reference import ReferenceKernels

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_alive: list[mmap.mmap] = []


def guarded(tensor: Tensor, where: str) -> Tensor:
    """A copy of a tensor against a forbidden page."""
    nbytes = tensor.numel() * tensor.element_size()
    pages = -(-max(nbytes, 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    _alive.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbidden = start + (pages * PAGE if where == "after" else 0)
    if _mprotect(forbidden, PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = pages * PAGE - nbytes if where == "after" else PAGE
    place = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=offset)
    copy = torch.from_numpy(place).view(tensor.dtype).view(tensor.shape) if nbytes else tensor.clone()
    return copy.copy_(tensor)


def check(kernels: CudaKernels, where: str) -> None:
    reference = ReferenceKernels()
    for block_size in (96, 2048):
        for name, case in cases.CASES.items():
            ours = case(cases.world(kernels, lambda t: guarded(t, where), block_size, (100, 4097, 64)))
            theirs = case(cases.world(reference, lambda t: t, block_size, (100, 4097, 64)))
            found = cases.differences(ours, theirs)
            assert not found, f"{name}, block_size {block_size}: {found}"
            _alive.clear()
    tensors = [guarded(torch.randn(n).to(t), where) for n in (1, 7, 1030, 70001) for t in cases.DTYPES]
    kernels.grad_stats(tensors)


if __name__ == "__main__":
    backend = CudaKernels(ShimRuntime())
    for where in ("after", "before"):
        check(backend, where)
    sys.stdout.write("all cases kept to their tensors\n")
