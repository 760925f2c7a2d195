"""Kernels: the only device-specific code, behind one registry.

``reference`` (plain torch, any device) defines the semantics; ``cpu`` (compiled C++) and ``cuda`` (CuPy raw kernels)
reproduce it bit for bit and are chosen automatically where they can run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_onebit._choices import Backend, choices
from lightning_onebit.kernels.packed import Packed
from lightning_onebit.kernels.reference import ReferenceKernels
from lightning_onebit.kernels.residual import Residual

log = logging.getLogger("lightning_onebit")

__all__ = [
    "BACKENDS",
    "BlockMap",
    "BoundSpans",
    "KernelBackend",
    "KernelsUnavailable",
    "Packed",
    "Residual",
    "SpanLike",
    "get_backend",
]

BACKENDS = choices(Backend)


class SpanLike(Protocol):
    """A run of elements of one parameter and the blocks that it fills (see ``comm.buckets.Span``)."""

    @property
    def param(self) -> int:
        """Index of the parameter."""
        ...

    @property
    def numel(self) -> int:
        """Elements of the run."""
        ...

    @property
    def block(self) -> int:
        """First block of the run within its bucket."""
        ...

    def blocks(self, block_size: int) -> int:
        """Blocks that the run fills."""
        ...


class BlockMap(Protocol):
    """What a kernel needs to know of a bucket (``comm.buckets.Bucket`` is one)."""

    @property
    def block_size(self) -> int:
        """Elements per block."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks, empty padding blocks included."""
        ...

    @property
    def elements(self) -> int:
        """``blocks * block_size``."""
        ...

    @property
    def spans(self) -> Sequence[SpanLike]:
        """Runs of parameter elements, in block order."""
        ...

    @property
    def lengths(self) -> Tensor:
        """int32 ``(blocks,)``: valid length of each block."""
        ...


class BoundSpans(list["Tensor | None"]):
    """Span tensors whose maker keeps the list, and hands over the same one, as long as they stay where they are in memory.

    Attributes:
        tables: what a backend (by its name) has made of them, so that it need not look at every tensor again.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        super().__init__(tensors)
        self.tables: dict[str, Any] = {}


class KernelsUnavailable(RuntimeError):
    """A kernel backend cannot run here; the message says why and what to install."""

    def __init__(self, message: str) -> None:
        # paths and CXX may hold bytes that are no text; the message has to reach whatever prints it
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


# A backend is the reference with what it does faster overridden: an operation that a backend does not speed up is inherited.
KernelBackend = ReferenceKernels


def _cpu() -> KernelBackend:
    from lightning_onebit.kernels.cpu import CpuKernels  # compiles at first use, hence not at import

    return CpuKernels()


def _cuda() -> KernelBackend:
    from lightning_onebit.kernels.cuda import CudaKernels  # compiles at first use, and CuPy need not be there

    return CudaKernels()


_FACTORIES: dict[str, Callable[[], KernelBackend]] = {"reference": ReferenceKernels, "cpu": _cpu, "cuda": _cuda}


@cache
def _load(name: str) -> KernelBackend:
    return _FACTORIES[name]()


def get_backend(name: str, device: torch.device | str) -> KernelBackend:
    """Chooses the kernels for a device.

    Args:
        name: ``"auto"`` (the fastest that can run), or a backend by name, which raises when it cannot run.
        device: where parameters live.

    Raises:
        ValueError: unknown name.
        KernelsUnavailable: the named backend cannot run on this device or machine.
    """
    device = torch.device(device)
    if name not in BACKENDS:
        raise ValueError(f"kernels={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if name == "auto":
        fast = device.type
        if fast in _FACTORIES:
            try:
                return _load(fast)
            except KernelsUnavailable as error:
                _announce_fallback(fast, str(error))
        return _load("reference")
    if name in ("cpu", "cuda") and device.type != name:
        raise KernelsUnavailable(f"kernels={name!r} cannot run on {device}; use kernels='auto' or 'reference'")
    return _load(name)


@cache
def _announce_fallback(backend: str, reason: str) -> None:
    # cached: said once per process and reason, not once per optimizer
    log.warning("the %s kernels cannot be used (%s): the slower reference kernels run instead", backend, reason)
