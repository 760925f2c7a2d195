"""The byte ledger: what was sent, in how many collectives, and how long it took.

Callbacks, metrics, benchmarks and tests read this one ledger. Bytes are those that one rank puts on the wire.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_onebit.comm.ranges import begin, end


@dataclass
class StepRecord:
    """What one optimizer step cost this rank.

    Attributes:
        step: real optimizer steps completed when the record was closed (the totals hold the last one).
        phase: name of the phase in which the step was made.
        dense: whether the step averaged gradients densely.
        skipped: whether the step was skipped because of a non-finite gradient (in totals: how many were).
        bytes_sent: payload bytes sent by this rank for gradients or momentum, ``bytes_intra + bytes_inter``.
        bytes_intra: of those, bytes to ranks of the same node (hierarchical exchange only).
        bytes_inter: of those, bytes between nodes (all bytes when the exchange is flat).
        dense_bytes: bytes a ring all-reduce of the same gradients in their own dtype would have sent,
            ``2 (n-1)/n * sum(numel * itemsize)``.
        collectives: number of collectives for gradients or momentum.
        control_bytes: bytes of the small control round (norms, non-finite flags, presence of gradients).
        control_collectives: number of control collectives.
        communication_seconds: time this rank was blocked waiting for a collective.
        compression_seconds: time spent in kernels (on CUDA: launching them).
    """

    step: int = 0
    phase: str = ""
    dense: bool = False
    skipped: int = 0
    bytes_sent: int = 0
    bytes_intra: int = 0
    bytes_inter: int = 0
    dense_bytes: int = 0
    collectives: int = 0
    control_bytes: int = 0
    control_collectives: int = 0
    communication_seconds: float = 0.0
    compression_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """``dense_bytes / bytes_sent``; 1.0 while nothing has been sent and nothing would have been, inf if only nothing was sent."""
        if self.bytes_sent:
            return self.dense_bytes / self.bytes_sent
        return float("inf") if self.dense_bytes else 1.0


_SUMMED = tuple(f.name for f in fields(StepRecord) if f.name not in ("step", "phase", "dense"))


class _Compressing:
    """The context of ``ByteLedger.compressing()``; a class, because it is entered several times per bucket."""

    __slots__ = ("_ledger", "_name", "_range", "_start")

    def __init__(self, ledger: ByteLedger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __enter__(self) -> None:
        self._range = begin(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ledger._open.compression_seconds += time.perf_counter() - self._start
        end(self._range)


class ByteLedger:
    """Keeps the record of the running step, of the last step and the sum of all.

    Example:
        >>> optimizer.ledger.last.bytes_sent, optimizer.ledger.total.ratio
    """

    def __init__(self) -> None:
        self._open = StepRecord()
        self.last: StepRecord | None = None
        self.total = StepRecord()
        self.steps = 0
        self.dense_steps = 0
        self.compressed_steps = 0

    @property
    def ratio(self) -> float:
        """Dense-equivalent bytes over bytes sent, all steps."""
        return self.total.ratio

    def sent(self, nbytes: int, *, link: str) -> None:
        """Counts one collective for gradients or momentum; ``link`` is ``"inter"`` or ``"intra"``."""
        self._open.bytes_sent += nbytes
        self._open.collectives += 1
        if link == "intra":
            self._open.bytes_intra += nbytes
        else:
            self._open.bytes_inter += nbytes

    def controlled(self, nbytes: int) -> None:
        """Counts one control collective."""
        self._open.control_bytes += nbytes
        self._open.control_collectives += 1

    def rode_along(self, nbytes: int) -> None:
        """Counts bytes as control bytes that a collective for gradients carries."""
        self._open.bytes_sent -= nbytes
        self._open.bytes_inter -= nbytes
        self._open.control_bytes += nbytes

    def compressing(self, name: str) -> _Compressing:
        """Times kernels; profilers see them as ``onebit::NAME``."""
        return _Compressing(self, name)

    def waited(self, seconds: float) -> None:
        """Counts time blocked in a collective."""
        self._open.communication_seconds += seconds

    def close_step(self, *, step: int, phase: str, dense: bool, skipped: bool, dense_bytes: int) -> StepRecord:
        """Ends the running record and opens the next one."""
        record = self._open
        record.step, record.phase, record.dense, record.skipped = step, phase, dense, int(skipped)
        record.dense_bytes = dense_bytes
        self._add(record)
        self.total.step, self.total.phase, self.total.dense = step, phase, dense
        self.steps += 1
        if not skipped:
            self.dense_steps += dense
            self.compressed_steps += not dense
        self.last, self._open = record, StepRecord()
        return record

    def close_outside(self) -> None:
        """Adds what was sent outside of a step (0/1 Adam's synchronisation when training ends) to the totals; no step is counted."""
        record, self._open = self._open, StepRecord()
        self._add(record)

    def _add(self, record: StepRecord) -> None:
        for name in _SUMMED:
            setattr(self.total, name, getattr(self.total, name) + getattr(record, name))

    def as_dict(self) -> dict[str, Any]:
        """Totals and step counts, for checkpoints and JSON."""
        counts = {"steps": self.steps, "dense_steps": self.dense_steps, "compressed_steps": self.compressed_steps}
        return {"total": asdict(self.total), **counts}

    def load_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``as_dict()``."""
        self.total = StepRecord(**state["total"])
        self.steps, self.dense_steps = state["steps"], state["dense_steps"]
        self.compressed_steps = state["compressed_steps"]
