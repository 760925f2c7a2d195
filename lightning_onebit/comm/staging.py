"""Device tensors through a backend that knows only the host's memory: copied through pinned memory, ordered by events.

This is how CUDA tensors travel over gloo, so that clusters without a working NCCL still train. The copy to the host runs on a stream
of its own, and nobody waits for it before the collective needs the bytes; the copy back is queued on the current stream, so whatever
the device does next with the result comes after it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A copy to the host under way."""

    @property
    def host(self) -> Tensor:
        """The copy; not to be read before it is complete."""
        ...

    def ready(self) -> bool:
        """Whether it is complete; does not wait."""
        ...

    def wait(self) -> None:
        """Blocks until it is complete."""


class Stager(Protocol):
    """Copies between a device and the host."""

    def handles(self, tensor: Tensor) -> bool:
        """Whether a backend for host memory needs this tensor staged."""

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Begins to copy what ``tensor`` holds after the operations queued so far."""

    def host_like(self, tensor: Tensor) -> Tensor:
        """Host memory for a result of the shape and dtype of ``tensor``."""

    def to_device(self, host: Tensor, tensor: Tensor) -> None:
        """Queues a copy back; later operations on the current stream see it. ``host`` may be dropped at once."""


class _PinnedCopy:
    def __init__(self, host: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        self.host = host
        # kept until the copy is done, because the allocator knows nothing of the side stream's use of it
        self._source: Tensor | None = source
        self._event = event

    def ready(self) -> bool:
        if self._source is not None and self._event.query():
            self._source = None
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self._event.synchronize()
            self._source = None


class CudaStager:
    """Stages through pinned memory of torch's host allocator, which does not reuse it while a copy is under way."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def handles(self, tensor: Tensor) -> bool:
        """See ``Stager``."""
        return tensor.is_cuda

    def to_host(self, tensor: Tensor) -> HostCopy:
        """See ``Stager``."""
        side = self._streams.get(tensor.device)
        if side is None:
            side = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        host = self.host_like(tensor)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        # blocking: a thread that waits gives the core to the threads of the collectives
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
            event.record(side)
        return _PinnedCopy(host, tensor, event)

    def host_like(self, tensor: Tensor) -> Tensor:
        """See ``Stager``."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def to_device(self, host: Tensor, tensor: Tensor) -> None:
        """See ``Stager``."""
        tensor.copy_(host, non_blocking=True)
