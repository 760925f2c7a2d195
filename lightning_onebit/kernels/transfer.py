"""Small facts on their way between host and device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor | Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of host values on a device, ordered on its current stream.

    ``torch.tensor(values, device="cuda")`` waits until the device has done everything queued before, because pageable memory may
    change after the call. Pinned memory of torch's allocator is not handed out again before the copy is done, so nobody needs to wait.

    Args:
        values: a host tensor, or numbers.
        device: where the copy goes.
        dtype: of the copy (None: of the values).

    Returns:
        A tensor that shares no memory with ``values``.
    """
    host = values.to(dtype or values.dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device, copy=host is values)


class Download:
    """A number of a device on its way to the host; who asks for it later need not wait for what was queued since.

    Args:
        value: a tensor of one element. It is copied in the order of its device's current stream.
    """

    def __init__(self, value: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))
        else:
            self._host = value.detach().clone()

    def read(self) -> float:
        """The number, once it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._host)
