"""fp32 master weights of 16-bit parameters: what the program writes into a parameter counts, in whatever way it is written.

A write through ``.data`` moves no version counter, and ``p.data = x`` gives the parameter other memory, so values are compared: a
parameter that no longer shows its master's rounding has been written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_onebit.comm import memory_order
from lightning_onebit.kernels.transfer import Download

# elements treated at once: temporaries stay in the cache of a processor, and small beside the model on a device
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24

_Item = TypeVar("_Item")
Pair = tuple[Tensor, Tensor]  # a 16-bit parameter and its master


def adopted(shown: Tensor, master: Tensor) -> Tensor:
    """A new tensor: the master where the parameter shows its rounding, what the parameter shows elsewhere; fp32."""
    return torch.where(shown == master.to(shown.dtype), master, shown.float())


def adopt_(pairs: Iterable[Pair]) -> None:
    """Takes into masters what has been written into their parameters; a device is not waited for."""
    for shown, master in _chunks(pairs):
        if shown.is_cuda or not _same_bits(shown, master.to(shown.dtype)):
            master.copy_(adopted(shown, master))


class Comparison:
    """Whether any parameter has been written to, found out by a device while the program goes on.

    Args:
        pairs: parameters and masters, all on one device; they must not change before ``adopt()``.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        largest: list[Tensor] = []
        for part in portions(_chunks(pairs), lambda pair: pair[0].numel(), _DEVICE_CHUNK):
            differences = [torch.empty_like(shown) for shown, _ in part]
            torch._foreach_copy_(differences, [master for _, master in part])
            torch._foreach_sub_(differences, [shown for shown, _ in part])
            largest += torch._foreach_norm(differences, float("inf"))
        self._largest = Download(torch.stack(largest).max()) if largest else None

    def adopt(self) -> None:
        """Takes into the masters what has been written, once the device knows that something has."""
        if self._largest is not None and self._largest.read() != 0.0:  # (a nan is not 0)
            adopt_(self._pairs)


def _chunks(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Pieces of parameters and masters, in memory order."""
    for shown, master in pairs:
        size = _DEVICE_CHUNK if shown.is_cuda else _CHUNK
        if shown.numel():
            yield from zip(memory_order(shown.detach()).split(size), memory_order(master).split(size), strict=True)


def portions(items: Iterable[_Item], size_of: Callable[[_Item], int], limit: int) -> Iterator[list[_Item]]:
    """Cuts things into runs of ``limit`` in all, or of one that is larger."""
    portion: list[_Item] = []
    size = 0
    for item in items:
        if portion and size + size_of(item) > limit:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += size_of(item)
    if portion:
        yield portion


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two flat 16-bit tensors on the host hold the same bits; four elements are compared at a time where they lie so."""
    even = a.numel() % 4 == 0 and a.storage_offset() % 4 == 0 and b.storage_offset() % 4 == 0
    dtype = torch.int64 if even else torch.int16
    return torch.equal(a.view(dtype), b.view(dtype))
