"""torchmetrics metrics of compressed training, each with ``plot()``.

``CommunicationVolume``, ``CompressionRatio`` and ``CommunicationTime`` are fed with records of the byte ledger,
``ResidualNorm`` with what ``optimizer.residual_ratio()`` returns, ``SignAgreement`` with local gradients. ``compute()``
combines all ranks, like every torchmetrics metric: it is a collective that all ranks must call.

Example:
    >>> volume = CommunicationVolume()
    >>> for batch in batches:
    ...     loss(batch).backward()
    ...     optimizer.step()
    ...     volume.update(optimizer.ledger.last)
    >>> volume.compute()        # bytes sent by all ranks together
    >>> fig, ax = volume.plot()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_onebit.comm import StepRecord

__all__ = ["CommunicationTime", "CommunicationVolume", "CompressionRatio", "ResidualNorm", "SignAgreement"]


class _OnebitMetric(Metric):
    """What the metrics of this module share."""

    is_differentiable = False
    full_state_update = False
    plot_lower_bound = 0.0
    #: states that add up over updates and ranks
    _sums: ClassVar[dict[str, torch.dtype]] = {}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, dtype in self._sums.items():
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plots one value or a series of them.

        Args:
            val: a result of ``compute()`` or ``forward()``, or a list of them to draw as a line; None computes now.
            ax: a matplotlib axis to draw into.

        Returns:
            The matplotlib figure and axis.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return self._plot(val, ax)


class CommunicationVolume(_OnebitMetric):
    """Bytes sent for gradients and momentum, summed over steps and ranks (int64, 0-d).

    Example:
        >>> metric = CommunicationVolume()
        >>> metric.update(optimizer.ledger.last)
        >>> metric.compute()
        tensor(66048)
    """

    higher_is_better = False
    _sums: ClassVar = {"bytes_sent": torch.int64}
    bytes_sent: Tensor

    def update(self, record: StepRecord) -> None:
        """Adds the record of one step, or a sum of several."""
        self.bytes_sent += record.bytes_sent

    def compute(self) -> Tensor:
        """Bytes sent by all ranks together."""
        return self.bytes_sent


class CompressionRatio(_OnebitMetric):
    """Bytes a dense ring all-reduce would have sent over bytes sent, all steps and ranks (float64, 0-d).

    1.0 while nothing was sent and nothing would have been; inf if only the dense all-reduce would have sent something.

    Example:
        >>> metric = CompressionRatio()
        >>> metric.update(optimizer.ledger.last)
        >>> metric.compute()
        tensor(31.5077, dtype=torch.float64)
    """

    higher_is_better = True
    _sums: ClassVar = {"bytes_sent": torch.int64, "dense_bytes": torch.int64}
    bytes_sent: Tensor
    dense_bytes: Tensor

    def update(self, record: StepRecord) -> None:
        """Adds the record of one step, or a sum of several."""
        self.bytes_sent += record.bytes_sent
        self.dense_bytes += record.dense_bytes

    def compute(self) -> Tensor:
        """The ratio of the sums (not the mean of the steps' ratios: a run's saving is decided by its dense steps)."""
        ratio = self.dense_bytes.double() / self.bytes_sent.double()
        return torch.where((self.bytes_sent == 0) & (self.dense_bytes == 0), torch.ones_like(ratio), ratio)


class CommunicationTime(_OnebitMetric):
    """Seconds per step that a rank was blocked waiting for a collective: the mean over steps and ranks (float64, 0-d).

    Time in which communication was hidden behind other work does not count. 0.0 before the first step.

    Example:
        >>> metric = CommunicationTime()
        >>> metric.update(optimizer.ledger.last)
        >>> metric.compute()
        tensor(0.0021, dtype=torch.float64)
    """

    higher_is_better = False
    _sums: ClassVar = {"seconds": torch.float64, "steps": torch.int64}
    seconds: Tensor
    steps: Tensor

    def update(self, record: StepRecord, steps: int = 1) -> None:
        """Adds a record.

        Args:
            record: of one step, or a sum of several.
            steps: how many steps the record holds.
        """
        self.seconds += record.communication_seconds
        self.steps += steps

    def compute(self) -> Tensor:
        """Mean seconds per step."""
        return self.seconds / self.steps.clamp(min=1)


class ResidualNorm(_OnebitMetric):
    """Norm of the worker residual relative to the norm of the momentum: the mean over updates and ranks (float64, 0-d).

    The compression error that later steps have to send. It stays near a constant of about 1 in a healthy run; a value that
    keeps growing says that the errors are no longer corrected. 0.0 before the first update.

    Example:
        >>> metric = ResidualNorm()
        >>> metric.update(optimizer.residual_ratio())
        >>> metric.compute()
        tensor(0.8132, dtype=torch.float64)
    """

    higher_is_better = False
    _sums: ClassVar = {"ratio_sum": torch.float64, "updates": torch.int64}
    ratio_sum: Tensor
    updates: Tensor

    def update(self, ratio: float | Tensor) -> None:
        """Adds one reading of ``optimizer.residual_ratio()``."""
        self.ratio_sum += ratio
        self.updates += 1

    def compute(self) -> Tensor:
        """Mean ratio."""
        return self.ratio_sum / self.updates.clamp(min=1)


class SignAgreement(_OnebitMetric):
    """Share of coordinates where the signs of all ranks agree (float64, 0-d, between 0 and 1).

    Feed it what differs between ranks, normally the local gradients. A high share says that the ranks see the same
    signal; near ``2**(1-n)`` on n ranks their signs are as good as independent, averaging does most of the work and a
    larger local batch pays. Coordinates that are 0 on every rank are left out; a 0 beside a non-zero does not agree.
    nan when nothing was compared.

    Args:
        max_elements: at most this many coordinates, evenly spread, are kept of each update: a byte each, and what
            ``compute()`` sends per update.
        **kwargs: of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``max_elements`` is smaller than 1.

    Example:
        >>> metric = SignAgreement()
        >>> metric.update(p.grad for p in model.parameters())
        >>> metric.compute()
        tensor(0.6328, dtype=torch.float64)
    """

    higher_is_better = True
    # Signs stacked over ranks cannot be merged with signs that are not, which is what the partial update would do.
    full_state_update = True
    plot_upper_bound = 1.0
    signs: Tensor

    def __init__(self, max_elements: int = 65_536, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 1:
            raise ValueError(f"`max_elements` must be a whole number of at least 1, got {max_elements!r}.")
        self.max_elements = max_elements
        # Without a reduction the states of the ranks arrive stacked: (ranks, coordinates).
        self.add_state("signs", torch.zeros(0, dtype=torch.int8), dist_reduce_fx=None)

    def update(self, values: Tensor | Iterable[Tensor]) -> None:
        """Takes this rank's values; the shapes must be the same on all ranks.

        Args:
            values: a tensor or several of them, any shapes and real dtypes.
        """
        tensors = [values] if isinstance(values, Tensor) else list(values)
        total = sum(tensor.numel() for tensor in tensors)
        stride = max(1, -(-total // self.max_elements))
        start = 0
        for tensor in tensors:
            sample = tensor.detach().flatten()[start::stride]
            self.signs = torch.cat([self.signs, torch.sign(sample).to(self.signs)])
            # The first coordinate to take from the next tensor, as if all of them were one.
            start = (start - tensor.numel()) % stride

    def compute(self) -> Tensor:
        """Share of agreeing coordinates."""
        signs = self.signs if self.signs.ndim == 2 else self.signs.unsqueeze(0)
        compared = (signs != 0).any(dim=0)
        agreeing = (signs == signs[:1]).all(dim=0) & compared
        return agreeing.sum().double() / compared.sum()
