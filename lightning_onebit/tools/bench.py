"""Link benchmark: does compression pay on *your* network?

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:PORT -m lightning_onebit bench

On the real process group, measures the dense all-reduce of gradients against the whole compressed exchange (compress, both rounds,
apply) at several sizes, and says from which size on compression pays and which algorithm suits. Rank 0 reports.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from lightning_onebit._text import fill, format_figure, format_table
from lightning_onebit.comm import disconnect, torn_down_last
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer
from lightning_onebit.engine.options import LONGEST_WAIT, check_integer, check_number, described
from lightning_onebit.kernels import BACKENDS
from lightning_onebit.strategy.registry import ALGORITHMS, find_algorithm
from lightning_onebit.tools.console import Outcome

DEFAULT_SIZES = (250_000, 1_000_000, 4_000_000, 16_000_000)


@dataclass(frozen=True)
class LinkMeasurement:
    """One size on one process group.

    Attributes:
        elements: number of fp32 gradient elements.
        dense_seconds: median time of their all-reduce (slowest rank).
        exchange_seconds: median time of a compressed optimizer step on them (slowest rank), local work included.
        local_seconds: of that, time in kernels; NaN on CUDA, where the host sees only that they are launched.
        dense_bytes: bytes a rank sends in the all-reduce.
        exchange_bytes: bytes a rank sends in the exchange.
    """

    elements: int
    dense_seconds: float
    exchange_seconds: float
    local_seconds: float
    dense_bytes: int
    exchange_bytes: int

    @property
    def speedup(self) -> float:
        """``dense_seconds / exchange_seconds``."""
        return self.dense_seconds / self.exchange_seconds


def measure_link(
    elements: int,
    *,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    ranks_per_node: int = 1,
    timeout: float = 300.0,
    algorithm: str = "onebit_adam",
    exchange: ExchangeOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> LinkMeasurement:
    """Measures one size. A collective: every rank must call it alike.

    Args:
        elements: number of fp32 elements, >= 1.
        device: where gradients live.
        repeats: measured repetitions, >= 1; medians are reported.
        ranks_per_node: more than 1 measures the hierarchical exchange.
        timeout: seconds that a rank waits for the others.
        algorithm: whose steps are measured (0/1 Adam: those that synchronise).
        exchange: how ranks exchange; its buckets are those of the dense all-reduce too. None: the defaults.
        group: the ranks that exchange with this one; None: all. Where there are several groups, they measure at the same time.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: a count that is no integer.
        ValueError: an unknown algorithm, or an option out of range.
        CollectiveTimeout: a rank did not join in time.

    Example:
        Under ``torchrun`` leave ``store``, ``rank`` and ``world_size`` out; alone, nothing is sent.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> measured = measure_link(10_000, repeats=1, exchange=ExchangeOptions(kernels="reference"))
        >>> dist.destroy_process_group()
        >>> measured.elements, measured.exchange_bytes, measured.exchange_seconds > 0
        (10000, 0, True)
    """
    check_integer("elements", elements, least=1)
    check_integer("repeats", repeats, least=1)
    if not dist.is_initialized():
        raise RuntimeError("measure_link() needs an initialised process group; launch with torchrun")
    device = torch.device(device)
    weight = torch.nn.Parameter(torch.zeros(elements, device=device))
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    known = find_algorithm(algorithm).optimizer
    exchange = replace(exchange or ExchangeOptions(), timeout=timeout, _alone=True)
    optimizer = known([weight], lr=1e-6, exchange=exchange, **known.EXCHANGES_SOON)  # type: ignore[call-arg]
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node, timeout=timedelta(seconds=timeout))
    try:
        return _measure(optimizer, weight, gradient, repeats, group)
    finally:
        _release(optimizer)


def _measure(
    optimizer: OnebitOptimizer, weight: torch.Tensor, gradient: torch.Tensor, repeats: int, group: Any
) -> LinkMeasurement:
    exchange, local = _time_exchange(optimizer, weight, gradient, repeats)
    bucket = int(optimizer.exchange.bucket_size(exchanged=False) * 2**20 / 4)
    dense = _time_all_reduce(gradient.clone(), bucket, repeats, group)
    record, device = optimizer.ledger.last, gradient.device
    assert record is not None
    medians = torch.tensor([statistics.median(seconds) for seconds in (dense, exchange, local)])
    slowest = medians.to(device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dense_s, exchange_s, local_s = slowest.tolist()
    if device.type == "cuda":
        local_s = math.nan
    return LinkMeasurement(gradient.numel(), dense_s, exchange_s, local_s, record.dense_bytes, record.bytes_sent)


def _release(optimizer: OnebitOptimizer) -> None:
    """Gives communication back, and the groups of nodes that were made for the hierarchical exchange."""
    topology = optimizer.topology
    optimizer.release_communication()
    made = [topology.intra_group, topology.inter_group] if topology.hierarchical else []
    del topology
    with torn_down_last([group for group in made if isinstance(group, dist.ProcessGroup)]):
        while made:
            dist.destroy_process_group(made.pop())  # type: ignore[arg-type]


def _time_exchange(
    optimizer: OnebitOptimizer, weight: torch.Tensor, gradient: torch.Tensor, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of whole compressed steps, and of their kernels."""
    exchange, local = [], []
    # the dense step, the first exchange, and one for the memory to be touched come before those that count
    for turn in range(3 + repeats):
        weight.grad = gradient.clone()
        seconds = _timed(optimizer.step, gradient.device)
        record = optimizer.ledger.last
        assert record is not None
        if turn >= 3:
            exchange.append(seconds)
            local.append(record.compression_seconds)
    return exchange, local


def _time_all_reduce(flat: torch.Tensor, bucket_elements: int, repeats: int, group: Any) -> list[float]:
    """Seconds of dense averaging in buckets, all of them under way at once as in the warm-up."""
    buckets = flat.split(max(1, bucket_elements))

    def average() -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
            work.wait()

    return [_timed(average, flat.device) for _ in range(repeats + 1)][1:]


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call that all ranks begin together, until the device has done its work."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    dist.barrier()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def break_even(measurements: Sequence[LinkMeasurement]) -> float | None:
    """Elements from which on the exchange is faster, interpolated between measured sizes.

    Returns:
        The number of elements; 0 if it is faster at every size measured, None if it is not at the largest.

    Raises:
        ValueError: nothing was measured.

    Example:
        >>> small = LinkMeasurement(1_000_000, 0.010, 0.012, 0.001, 4_000_000, 130_000)
        >>> large = LinkMeasurement(4_000_000, 0.040, 0.020, 0.004, 16_000_000, 520_000)
        >>> print(f"{break_even([small, large]):,.0f}")
        1,272,727
    """
    if not measurements:
        raise ValueError("measurements is empty; measure at least one size")
    ordered = sorted(measurements, key=lambda m: m.elements)
    if all(m.speedup >= 1 for m in ordered):
        return 0.0
    if ordered[-1].speedup < 1:
        return None
    for small, large in reversed(list(pairwise(ordered))):
        if small.speedup < 1:
            gap = (small.exchange_seconds - small.dense_seconds, large.exchange_seconds - large.dense_seconds)
            return small.elements + (large.elements - small.elements) * gap[0] / (gap[0] - gap[1])
    return None


def advice(measurements: Sequence[LinkMeasurement]) -> str:
    """What the numbers mean, in a sentence or two."""
    even = break_even(measurements)
    largest = max(measurements, key=lambda m: m.elements)
    if largest.dense_bytes == 0:
        return "One rank exchanges nothing, so there is no network to judge: start it on several, on all machines."
    if even is None:
        faster = ", ".join(f"{m.elements:,}" for m in measurements if m.speedup >= 1)
        return (
            f"Compression does not pay on this network: even at {largest.elements / 1e6:g} M elements the exchange takes "
            f"{1 / largest.speedup:.1f}x as long as the dense all-reduce. Use strategy='ddp'."
            + (f" (It was faster at {faster} elements.)" if faster else "")
        )
    text = (
        "The exchange is faster at every size measured."
        if even == 0
        else f"Compression pays from about {format_figure(even / 1e6, 2)} M parameters on; below that, use strategy='ddp'."
    )
    if largest.speedup < 1.5:
        return text + " The gain is small: compare whole training steps before you switch."
    waiting = 1 - largest.local_seconds / largest.exchange_seconds
    if waiting > 0.7:
        return text + (
            " Most of the exchange is spent on the network even so: 'binsgdm' has no dense steps, and needs a learning rate of its own; "
            "'onebit_adam' is the simplest choice."
        )
    return text + " 'onebit_adam' is the simplest choice ('onebit_lamb' for large batches)."


def table(measurements: Sequence[LinkMeasurement]) -> str:
    """The measurements as text."""
    rows = [("elements", "all-reduce ms", "exchange ms", "of it local", "bytes", "speed-up")]
    for m in measurements:
        dense, exchange, local = (f"{1e3 * s:.2f}" for s in (m.dense_seconds, m.exchange_seconds, m.local_seconds))
        saved = f"{m.dense_bytes / max(1, m.exchange_bytes):.1f}x"
        local = "-" if math.isnan(m.local_seconds) else local
        rows.append((f"{m.elements:,}", dense, exchange, local, saved, f"{m.speedup:.2f}x"))
    return format_table(rows, (12, 15, 13, 13, 9, 10))


#: options of the command that ``measure_link`` has too
_OPTIONS = ("repeats", "ranks_per_node", "timeout", "algorithm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add = parser.add_argument
    options = described(ExchangeOptions)
    add("--sizes", type=int, nargs="+", default=list(DEFAULT_SIZES), help="elements of the gradients")
    add("--repeats", type=int, default=5, help="measured repetitions, of which the median counts (%(default)s)")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl where CUDA is available, else gloo")
    add("--ranks-per-node", type=int, default=1, help="more than 1 measures the hierarchical exchange")
    add("--timeout", type=float, default=300.0, help="seconds that a rank waits for the others")
    said = f"whose steps to measure: {', '.join(ALGORITHMS)} (%(default)s)"
    add("--algorithm", choices=tuple(ALGORITHMS), default="onebit_adam", metavar="NAME", help=said)
    add("--kernels", choices=BACKENDS, default="auto", help=options["kernels"])
    add("--bucket-mb", type=float, help=options["bucket_mb"])


def _gpu_of(local_rank: int, gpus: int, backend: str) -> torch.device:
    """The GPU of a rank: one of its own, which over gloo several may share.

    Raises:
        ValueError: NCCL would refuse to share one.
    """
    if backend == "nccl" and local_rank >= gpus:
        raise ValueError(
            f"rank LOCAL_RANK={local_rank} of this machine has no GPU: there are {gpus}, and NCCL wants one for every rank; start at "
            f"most {gpus} ranks here (--nproc-per-node {gpus}), or let them share with --backend gloo"
        )
    return torch.device("cuda", local_rank % gpus)


def _connect(options: argparse.Namespace) -> tuple[str, torch.device]:
    """Joins the other ranks; returns the backend and this rank's device."""
    if "RANK" not in os.environ:
        raise ValueError(
            "no ranks found: launch on all machines with torchrun, e.g. "
            "`torchrun --nproc-per-node 2 --no-python lightning-onebit bench`"
        )
    cuda = torch.cuda.is_available()
    if options.backend == "nccl" and not (cuda and dist.is_nccl_available()):
        missing = "no GPU was found here" if dist.is_nccl_available() else "this torch was built without NCCL"
        raise ValueError(f"--backend nccl cannot be used: {missing}; use --backend gloo, or leave the option out")
    backend = options.backend or ("nccl" if cuda else "gloo")
    device = torch.device("cpu")
    if cuda:
        device = _gpu_of(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count(), backend)
        torch.cuda.set_device(device)
    # NCCL guesses a rank's device where it is not told
    known = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout), device_id=known)
    return backend, device


def run(options: argparse.Namespace) -> Outcome:
    """The command, on every rank; rank 0 has something to say."""
    counts = [("--sizes", size) for size in options.sizes]
    for name, count in [*counts, ("--repeats", options.repeats), ("--ranks-per-node", options.ranks_per_node)]:
        check_integer(name, count, least=1)
    check_number("--timeout", options.timeout, above=0, most=LONGEST_WAIT)
    backend, device = _connect(options)
    exchange = ExchangeOptions(kernels=options.kernels, bucket_mb=options.bucket_mb)
    shared = {name: getattr(options, name) for name in _OPTIONS} | {"exchange": exchange}
    try:
        results = []
        for size in options.sizes:
            results.append(measure_link(size, device=device, **shared))
            if dist.get_rank() == 0:
                with suppress(BrokenPipeError):  # the reader has gone; the other ranks are still at work
                    sys.stderr.write(f"measured {size:,} elements\n")
        if dist.get_rank() != 0:
            return Outcome(0, "", {})
        world = f"{dist.get_world_size()} ranks, {backend}, {device.type}, torch {torch.__version__}"
    finally:
        disconnect()
    said = advice(results)
    facts = {
        "setting": world,
        "algorithm": options.algorithm,
        "sizes": [{**asdict(r), "speedup": r.speedup} for r in results],
        "break_even_elements": break_even(results),
        "advice": said,
    }
    return Outcome(0, f"{world}\n{table(results)}\n{fill(said)}", facts)
