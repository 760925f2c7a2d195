"""``LinkProbe``: does compression pay on this network, for this model?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit._text import format_bits, format_seconds
from lightning_onebit.callbacks._common import OnebitCallback, column_group, named_optimizers, uncompressed
from lightning_onebit.comm import ByteLedger
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.engine.options import check_integer, check_number
from lightning_onebit.engine.sharded import local_of
from lightning_onebit.tools.bench import LinkMeasurement, measure_link

# Dense steps that are left out beside the first when waiting is watched: they connect, allocate and may compile.
WARM_STEPS = 2

# Below this share of waiting there is nothing worth saving.
LITTLE_WAITING = 0.05


@dataclass(frozen=True)
class LinkReport:
    """What a step's communication of a model costs on a network, measured on a small and a large sample and extrapolated.

    Nothing is hidden behind backward in these numbers.

    Attributes:
        ranks: number of ranks.
        elements: of the model's gradient.
        dense_seconds: of its dense all-reduce.
        exchange_seconds: of a compressed step: compress, both rounds, apply.
        local_seconds: of that, in kernels.
        bandwidth: bits per second that one rank sends in the larger dense all-reduce.
        break_even: bandwidth below which the exchange is the faster one, in bits per second; inf if kernels cost nothing
            (and unknown, also inf, on CUDA, where the time in kernels is not seen by the host).
    """

    ranks: int
    elements: int
    dense_seconds: float
    exchange_seconds: float
    local_seconds: float
    bandwidth: float
    break_even: float

    @classmethod
    def extrapolate(cls, elements: int, ranks: int, small: LinkMeasurement, large: LinkMeasurement) -> LinkReport:
        """Costs of ``elements`` on the lines through two measurements."""

        def cost(name: str) -> float:
            return _on_line(elements, small.elements, getattr(small, name), large.elements, getattr(large, name))

        saved = 8 * (large.dense_bytes - large.exchange_bytes) / large.elements * elements
        local = cost("local_seconds")
        return cls(
            ranks,
            elements,
            cost("dense_seconds"),
            cost("exchange_seconds"),
            local,
            8 * large.dense_bytes / large.dense_seconds,
            # bytes_dense / B = bytes_exchange / B + local; NaN where the host does not see kernels
            saved / local if local > 0 else math.inf,
        )

    @property
    def speedup(self) -> float:
        """``dense_seconds / exchange_seconds``."""
        return self.dense_seconds / self.exchange_seconds

    @property
    def pays(self) -> bool:
        """Whether the exchange is faster than the dense all-reduce."""
        return self.speedup > 1.0

    def __str__(self) -> str:
        text = (
            f"{self.ranks} ranks, {self.elements:,} parameters: averaging gradients densely takes "
            f"{format_seconds(self.dense_seconds)} per step ({format_bits(self.bandwidth)} per rank), a compressed step "
            f"{format_seconds(self.exchange_seconds)}, {self.speedup:.2g}x the speed"
        )
        return (
            text if math.isinf(self.break_even) else f"{text}; they break even at about {format_bits(self.break_even)}"
        )


def _on_line(x: int, x1: int, y1: float, x2: int, y2: float) -> float:
    slope = (y2 - y1) / (x2 - x1)
    # Noise can make the larger sample the faster one; in proportion is then the better guess than for nothing.
    if slope <= 0:
        return y2 * x / x2
    line = y1 + slope * (x - x1)
    # So it is for a model below the smaller sample where the line would cross 0.
    return line if x >= x1 else max(line, y1 * x / x1)


def _elements(optimizer: OnebitOptimizer) -> int:
    """Those that this rank holds."""
    return sum(local_of(p).numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


class _Clock(NamedTuple):
    """A moment within the dense warm-up: seconds since some start, of which so many this rank has waited for others."""

    steps: int
    seconds: float
    waited: float


@shown_as("LinkProbe")
class LinkProbeMixin(OnebitCallback):
    """Measures at start-up whether compression pays on this network, and says so.

    1. Before the first step: the dense all-reduce and the whole compressed step on two samples, on the ranks that train
       (``lightning_onebit.tools.bench.measure_link``), extrapolated to the model. An info line gives both times, the bandwidth
       and the bandwidth at which they would break even; a warning says when compression would not be faster.
    2. In the first dense steps of the warm-up: how much of a step the ranks really wait for each other. Dense averaging
       overlaps with backward, so it may cost nothing even where it takes long; then nothing can be saved, and a warning
       says so. (Not with NCCL, where waiting happens on the device and is not seen.)

    The probe makes the steps that training will make: those of the optimizer's algorithm (of 0/1 Adam those that synchronise), with its
    ``kernels``, ``block_size``, ``bucket_mb`` and ``state_dtype``, over the nodes of its exchange. Where a
    model has several compressed optimizers, the one with the most parameters counts. ``report`` holds the result.

    Args:
        sample_mb: MB of fp32 gradients in the larger sample; on a slow network the probe takes about ten times as long as
            averaging them once. A sample smaller than a bucket travels as one, so several buckets' worth shows their pipelining too.
        watch_steps: dense steps over which waiting is watched; None watches none.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an option is out of range.
        MisconfigurationException: (when fitting starts) the strategy compresses nothing.
        CollectiveTimeout: (when training starts) a rank did not take part within the strategy's ``timeout``.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[LinkProbe()])
    """

    def __init__(self, sample_mb: float = 4.0, *, watch_steps: int | None = 20) -> None:
        super().__init__()
        check_number("sample_mb", sample_mb, above=0, below=4096)
        check_integer("watch_steps", watch_steps, least=1, optional=True)
        self.sample_mb = sample_mb
        self.watch_steps = watch_steps
        self.report: LinkReport | None = None
        self._watch_from: int | None = None  # step, None: waiting is not watched
        self._began: _Clock | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses a fit without compressed optimizers."""
        named_optimizers(self, trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measures the link."""
        optimizers = [optimizer for _, optimizer in named_optimizers(self, trainer)]
        self._watch_from = self._began = None
        ranks, shards = trainer.strategy.replicas.count, trainer.strategy.replicas.shards
        if ranks == 1:
            kind = "replica" if shards > 1 else "process"
            rank_zero_info(f"LinkProbe: one {kind} exchanges nothing, so there is no link to measure.")
            return
        size, largest = max(16, int(self.sample_mb * 1e6 / 4)), max(optimizers, key=_elements)
        small, large = (
            measure_link(
                elements,
                device=optimizers[0].param_groups[0]["params"][0].device,
                timeout=trainer.strategy.timeout.total_seconds(),
                algorithm=largest.algorithm,
                ranks_per_node=largest.topology.ranks_per_node,
                group=column_group(trainer),
                # groups and when buckets leave are the probe's own
                exchange=replace(largest.exchange, bucket_mb=largest.bucket_mb, process_group=None, overlap="step"),
            )
            for elements in (size // 16, size)
        )
        # shards may be uneven: what the first rank says holds for all
        elements = trainer.strategy.broadcast(sum(map(_elements, optimizers)))
        self.report = LinkReport.extrapolate(elements, ranks, small, large)
        rank_zero_info(f"LinkProbe: {self.report}.")
        if not self.report.pays:
            rank_zero_warn(
                "LinkProbe: compression cannot pay here: the exchange is not faster than averaging densely. Use "
                f"{uncompressed(trainer)}, or bring a slower network, more ranks or a larger model."
            )
        if self.watch_steps is not None and "nccl" not in str(dist.get_backend()):
            self._watch_from = optimizers[0].ledger.steps + WARM_STEPS

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Watches the first dense steps."""
        if self._watch_from is None:
            return
        ledgers: list[ByteLedger] = [optimizer.ledger for optimizer in trainer.strategy.onebit_optimizers]
        if any(ledger.last is not None and not ledger.last.dense for ledger in ledgers):
            self._watch_from = None  # compression has begun
            return
        now = _Clock(ledgers[0].steps, time.perf_counter(), sum(item.total.communication_seconds for item in ledgers))
        if self._began is None:
            self._began = now if now.steps > self._watch_from else None
        elif now.steps - self._began.steps >= (self.watch_steps or 0):
            self._watch_from = None
            self._judge(trainer, self._began, now)

    def _judge(self, trainer: Any, began: _Clock, ended: _Clock) -> None:
        share = min(0.999, (ended.waited - began.waited) / max(1e-9, ended.seconds - began.seconds))
        text = (
            f"LinkProbe: in {ended.steps - began.steps} dense steps this rank waited {share:.0%} of the time for the "
            f"others, so compression can make steps at most {1 / (1 - share):.3g}x faster"
        )
        if share < LITTLE_WAITING:
            rank_zero_warn(
                f"{text}: the network is not the bottleneck, compression cannot pay. Use {uncompressed(trainer)}, or a smaller "
                "batch per rank if that trains better."
            )
        else:
            rank_zero_info(below_bar(trainer, f"{text}."))
