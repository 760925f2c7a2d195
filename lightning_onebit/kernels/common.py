"""Facts about tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_onebit.kernels.packed import Packed


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one contiguous piece of memory, each once, in any stride order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor of 16- or 32-bit floats the sum of its elements' bits, read as integers: what tells other values apart.

    A pass at the speed of memory, and one wait for the device. (``ReplicaConsistency`` has a hash that notices every change.)
    """
    words = {2: torch.int16, 4: torch.int32}
    sums = [t.detach().view(words[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def check_rows(received: Packed) -> None:
    """Raises ``ValueError`` if there is no worker's row to reduce."""
    if not received.rows:
        raise ValueError("received must have a row for each worker, got none")


def _counts_many() -> bool:
    """Whether this torch takes many tensors in one call (2.6 and later)."""
    try:
        torch.autograd.graph.increment_version([])
    except TypeError:
        return False
    return True


_COUNTS_MANY = _counts_many()


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Tells autograd's check of in-place changes that a kernel has written to these tensors (made outside of inference mode)."""
    if _COUNTS_MANY:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
