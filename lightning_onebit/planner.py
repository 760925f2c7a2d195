"""Predicts what compression would gain on a cluster, before renting it: step times by an explicit alpha-beta cost model.

docs/planner states the model and holds it against published and own measurements. Bytes are those of ``comm.volume``, which
the transport counts with; what remains is arithmetic: a collective costs ``rounds * alpha + messages * overhead + bytes / beta``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from lightning_onebit._choices import Overlap, choices
from lightning_onebit._console import fill, format_figure
from lightning_onebit.algorithms.schedules import IntervalPolicy, VariancePolicy, replay_schedule
from lightning_onebit.comm import (
    Collective,
    control_payload_bytes,
    exchange_collectives,
    peer_bytes,
    ring_bytes,
)
from lightning_onebit.engine.options import LARGEST_BUCKET_MB, check_choice, check_integer, check_number
from lightning_onebit.registry import ALGORITHMS, find_algorithm

#: what one can do without this library, by the bytes of a gradient element on the wire
DENSE = {"dense_fp32": 4, "dense_fp16": 2}

#: Bytes that a step moves through memory per element, apart from packed bits: what it reads and writes of weights, gradients and state.
#: AdamW: x, m, v read and written, g read. Compressed: statistics read g; the worker reads g, reads and writes e; the server d (an n-th);
#: applying reads and writes x, reads denominators; 1-bit LAMB also reads x and denominators and reads and writes vfresh
#: in a pass before; 0/1 Adam's local step reads and writes m, u and x, reads g and denominators; BinSGDM reads and writes m, a and x,
#: reads g twice.
ADAMW_BYTES = 28.0
STEP_BYTES = {"onebit_adam": 28.5, "onebit_lamb": 44.5, "zero_one_adam": 28.5, "binsgdm": 32.0}
LOCAL_STEP_BYTES = 32.0

#: shares by which the best plan must beat the best dense one before it is called worth while
WORTH = 1.10
#: exposed communication below this share of a dense step leaves nothing to save
LITTLE_WAITING = 0.05

#: what counts may be at most: far above all that is built and trained, far below what a float cannot hold
LARGEST = 10**15
MOST_STEPS = 10**9


def _check_count(name: str, value: Any, *, least: int, most: int = LARGEST, optional: bool = False) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``value`` is an integer within the bounds."""
    check_integer(name, value, least=least, optional=optional)
    if value is not None and value > most:
        raise ValueError(f"{name}={value!r} is out of range; it must be at most {most:,}, give the real number")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and the network between them; every number is what a program gets, not what a data sheet promises.

    Attributes:
        gpus: number of ranks ``n``.
        gpus_per_node: ranks ``K`` that share one machine and its network card; divides ``gpus``.
        bandwidth: bits per second that a node's network card carries in each direction (measure it: ``lightning-onebit bench``).
        intra_bandwidth: bits per second between ranks of one node (PCIe 3 x16: 1e11; NVLink: 1e12 and more).
        latency: seconds until a message between nodes arrives, ``alpha``, paid for each dependent round.
        intra_latency: the same within a node.
        message_overhead: seconds that each message keeps a node's card and host busy; all-to-alls of large worlds are bound by it.
        memory_bandwidth: bytes per second at which one rank's optimizer step runs through memory.
    """

    gpus: int
    gpus_per_node: int = 1
    bandwidth: float
    intra_bandwidth: float = 1e11
    latency: float = 50e-6
    intra_latency: float = 10e-6
    message_overhead: float = 1e-6
    memory_bandwidth: float = 5e11

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            TypeError: a number of the wrong type.
            ValueError: out of range, or nodes that are not even.
        """
        _check_count("gpus", self.gpus, least=1)
        _check_count("gpus_per_node", self.gpus_per_node, least=1)
        for name in ("bandwidth", "intra_bandwidth", "memory_bandwidth"):
            check_number(name, getattr(self, name), above=0)
        for name in ("latency", "intra_latency", "message_overhead"):
            check_number(name, getattr(self, name), least=0)
        if self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} does not divide gpus={self.gpus}; nodes must be even, give a divisor"
            )

    @property
    def nodes(self) -> int:
        """``L = gpus / gpus_per_node``."""
        return self.gpus // self.gpus_per_node

    def all_reduce(self, nbytes: int) -> float:
        """Seconds of an all-reduce over all ranks: a ring, or a tree where its fewer rounds outweigh its bytes."""
        if self.gpus == 1:
            return 0.0
        alpha, beta = self._slowest
        ring = 2 * (self.gpus - 1) * (alpha + self.message_overhead) + 8 * ring_bytes(self.gpus, nbytes) / beta
        depth = 2 * math.ceil(math.log2(self.gpus))
        tree = depth * (alpha + self.message_overhead) + 8 * 2 * nbytes / beta
        return min(ring, tree)

    def collective(self, one: Collective) -> float:
        """Seconds of one collective of the exchange, all its groups at once (every node has K of those between nodes)."""
        if one.ranks == 1:
            return 0.0
        if one.link == "intra":
            alpha, beta, sharing, inside = self.intra_latency, self.intra_bandwidth, 1, 0
        elif one.ranks == self.gpus:  # flat: one group, whose ring passes each node once, whose pairs share the card
            alpha, beta = self._slowest
            sharing = self.gpus_per_node if self.nodes > 1 and one.kind == "all_to_all" else 1
            inside = self.gpus_per_node - 1 if self.nodes > 1 else 0
        else:
            alpha, beta, sharing, inside = self.latency, self.bandwidth, self.gpus_per_node, 0
        if one.kind == "all_gather":  # ring: rank r passes on what it has from r-1
            return (one.ranks - 1) * (alpha + self.message_overhead) + 8 * sharing * one.sent / beta
        messages = sharing * (one.ranks - 1 - inside)
        between = 8 * messages * one.row_bytes / beta
        within = 8 * peer_bytes(inside + 1, one.row_bytes) / self.intra_bandwidth
        return alpha + messages * self.message_overhead + max(between, within)

    @property
    def _slowest(self) -> tuple[float, float]:
        """Latency and bandwidth that bound a ring over all ranks."""
        return (self.latency, self.bandwidth) if self.nodes > 1 else (self.intra_latency, self.intra_bandwidth)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how it is trained.

    Attributes:
        params: parameters, in all or of every tensor.
        compute: seconds of a step that exchanges nothing: forward, backward and a dense optimizer step.
        steps: real steps of the run.
        warmup: share of dense steps of 1-bit Adam and 1-bit LAMB, of steps up to the variance freeze for 0/1 Adam; one step at least.
        gradient_bytes: of a gradient element in the warm-up: 4, or 2 where parameters are 16-bit.
        hidden: share of ``compute`` behind which dense averaging hides (backward is two thirds, less its first bucket).
        overlap: ``"step"``, or ``"backward"`` where compressed buckets hide as well (1-bit Adam and 1-bit LAMB).
        block_size: elements that share a scale.
        bucket_mb: MB of fp32 gradients per bucket (by default those of an optimizer on CPUs; on CUDA devices they are larger, and fewer);
            at least a block is in one, in the exchange a block of every rank.
        var_update_scaler: 0/1 Adam's, like the two that follow.
        local_step_scaler: see ``ZeroOneAdam``; None: a fifth of ``steps``, about what the paper's 32,678 are of its 152,511.
        local_step_clipper: see ``ZeroOneAdam``.
    """

    params: int | Sequence[int]
    compute: float
    steps: int = 100_000
    warmup: float = 0.2
    gradient_bytes: int = 4
    hidden: float = 0.5
    overlap: Overlap = "step"
    block_size: int = 2048
    bucket_mb: float = 16.0
    var_update_scaler: int = 16
    local_step_scaler: int | None = None
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            TypeError: a number of the wrong type.
            ValueError: out of range.
        """
        tensors = tuple(self.params) if isinstance(self.params, Sequence) else (self.params,)
        for count in tensors:
            check_integer("params", count, least=0)
        if sum(tensors) < 1:
            raise ValueError(f"params={self.params!r} holds no parameter; give their number, e.g. 336_000_000")
        if sum(tensors) > LARGEST:
            raise ValueError(
                f"params={self.params!r} is out of range; it must be at most {LARGEST:,}, e.g. 336_000_000"
            )
        object.__setattr__(self, "params", tensors)
        check_number("compute", self.compute, least=0)
        _check_count("steps", self.steps, least=1, most=MOST_STEPS)
        check_number("warmup", self.warmup, least=0, most=1)
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradient_bytes={self.gradient_bytes!r} is unknown; choose 4 (fp32) or 2 (fp16, bf16)")
        check_number("hidden", self.hidden, least=0, most=1)
        check_choice("overlap", self.overlap, choices(Overlap))
        _check_count("block_size", self.block_size, least=32)
        if self.block_size % 32:
            raise ValueError(f"block_size={self.block_size} must be a multiple of 32; try 2048")
        check_number("bucket_mb", self.bucket_mb, above=0, most=LARGEST_BUCKET_MB)
        _check_count("var_update_scaler", self.var_update_scaler, least=1)
        _check_count("local_step_scaler", self.local_step_scaler, least=1, optional=True)
        _check_count("local_step_clipper", self.local_step_clipper, least=1)
        if self.local_step_scaler is not None and self.local_step_clipper == 1:
            raise ValueError(
                f"local_step_scaler={self.local_step_scaler} has no effect with local_step_clipper=1, which means no local steps; "
                "leave it out, or allow larger gaps"
            )

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of every parameter tensor."""
        return (self.params,) if isinstance(self.params, int) else tuple(self.params)

    @property
    def elements(self) -> int:
        """Parameters in all."""
        return sum(self.tensors)


@dataclass(frozen=True)
class Prediction:
    """What one way of training costs.

    Attributes:
        name: ``"dense_fp32"``, ``"dense_fp16"`` or an algorithm.
        layout: ``"flat"`` or ``"hierarchical"``.
        dense_seconds: a step of the dense warm-up (of a dense method: its step).
        step_seconds: a step after it, silent steps averaged in.
        mean_seconds: average over the whole run, warm-up included.
        exchange_seconds: of ``step_seconds``, what the exchange costs: wire and kernels.
        node_bytes: bytes that a node's card sends in a step of ``step_seconds``.
        dense_share: share of dense steps in the run.
        speedup_fp32: whole run against ``dense_fp32``.
        speedup_fp16: whole run against ``dense_fp16``.
    """

    name: str
    layout: str
    dense_seconds: float
    step_seconds: float
    mean_seconds: float
    exchange_seconds: float
    node_bytes: float
    dense_share: float
    speedup_fp32: float = 1.0
    speedup_fp16: float = 1.0

    @property
    def title(self) -> str:
        """How tables call it."""
        if self.name in DENSE:
            return f"dense {self.name.removeprefix('dense_')}"
        return f"{ALGORITHMS[self.name].title}, {self.layout}"


@dataclass(frozen=True)
class ForecastReport:
    """Predictions for one cluster and job, and what they mean.

    Attributes:
        cluster: the machines.
        job: the model.
        predictions: dense ones first.
    """

    cluster: Cluster
    job: Job
    predictions: tuple[Prediction, ...]

    @property
    def dense(self) -> Prediction:
        """The fastest dense method."""
        return min((p for p in self.predictions if p.name in DENSE), key=lambda p: p.mean_seconds)

    @property
    def best(self) -> Prediction:
        """The fastest compressed method."""
        return min((p for p in self.predictions if p.name not in DENSE), key=lambda p: p.mean_seconds)

    @property
    def speedup(self) -> float:
        """The fastest compressed method against the fastest dense one, over the whole run."""
        return _over(self.dense.mean_seconds, self.best.mean_seconds)

    @property
    def helps(self) -> bool:
        """Whether compression is worth while: at least 10 % faster than the fastest dense method."""
        return self.speedup >= WORTH

    @property
    def verdict(self) -> str:
        """Whether it helps, and if not why not, in a sentence or two."""
        return _verdict(self)

    def table(self) -> str:
        """The predictions as text."""
        return _table(self)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cluster": asdict(self.cluster),
            "job": asdict(self.job),
            "predictions": [asdict(p) for p in self.predictions],
            "helps": self.helps,
            "break_even_bandwidth": _break_even(self.cluster, self.job, self.best.name, self.best.layout),
            "verdict": self.verdict,
        }


def plan(cluster: Cluster, job: Job, algorithms: Iterable[str] | str = "all") -> ForecastReport:
    """Predicts step times and speed-ups of dense training and of algorithms, flat and (with several ranks per node) hierarchical.

    Args:
        cluster: machines and network.
        job: model and schedule.
        algorithms: names of algorithms, or ``"all"``.

    Raises:
        ValueError: an unknown algorithm, or an option in ``job`` that none of the algorithms has.

    Example:
        >>> report = plan(Cluster(gpus=64, gpus_per_node=4, bandwidth=4.1e9), Job(params=336_000_000, compute=0.3))
        >>> report.helps
        True
    """
    if isinstance(algorithms, str):
        algorithms = ALGORITHMS if algorithms == "all" else [algorithms]
    names = list(dict.fromkeys(find_algorithm(name).name for name in algorithms))
    if not names:
        raise ValueError(f"algorithms is empty; name some of {', '.join(ALGORITHMS)}, or 'all'")
    _check_effect(job, names)
    found = [_predict(cluster, job, name) for name in DENSE]
    layouts = ["flat", "hierarchical"] if 1 < cluster.gpus_per_node < cluster.gpus else ["flat"]
    found += [_predict(cluster, job, name, layout) for name in names for layout in layouts]
    fp32, fp16 = found[0].mean_seconds, found[1].mean_seconds
    return ForecastReport(
        cluster,
        job,
        tuple(
            replace(p, speedup_fp32=_over(fp32, p.mean_seconds), speedup_fp16=_over(fp16, p.mean_seconds))
            for p in found
        ),
    )


def _check_effect(job: Job, names: Sequence[str]) -> None:
    """Raises ``ValueError`` where an option of optimizers is given that none of the algorithms has."""
    for field in fields(Job):
        owners = [algorithm.name for algorithm in ALGORITHMS.values() if field.name in algorithm.options]
        value = getattr(job, field.name)
        if owners and value != field.default and not set(owners) & set(names):
            raise ValueError(
                f"{field.name}={value!r} has no effect on {', '.join(map(repr, names))}: {' and '.join(map(repr, owners))} "
                f"{'has' if len(owners) == 1 else 'have'} it; leave it out or name another algorithm"
            )


def _over(dense: float, mean: float) -> float:
    return dense / mean if mean > 0 else 1.0


def predict(cluster: Cluster, job: Job, name: str, layout: str = "flat") -> Prediction:
    """Predicts one method, without its speed-ups (``plan`` fills them in).

    Args:
        cluster: machines and network.
        job: model and schedule.
        name: ``"dense_fp32"``, ``"dense_fp16"`` or an algorithm.
        layout: ``"flat"`` or ``"hierarchical"``.

    Raises:
        ValueError: an unknown method or layout, or an option in ``job`` that the algorithm does not have.

    Example:
        >>> cluster, job = Cluster(gpus=8, bandwidth=1e9), Job(params=336_000_000, compute=0.1)
        >>> print(f"{predict(cluster, job, 'dense_fp32').step_seconds:.1f} s, {predict(cluster, job, 'onebit_adam').step_seconds:.2f} s")
        18.9 s, 0.73 s
    """
    if name not in DENSE:
        _check_effect(job, [find_algorithm(name).name])
    return _predict(cluster, job, name, layout)


def _predict(cluster: Cluster, job: Job, name: str, layout: str = "flat") -> Prediction:
    """The same for one method of several, to which each option of the job need not apply."""
    check_choice("layout", layout, ("flat", "hierarchical"))
    width = DENSE.get(name, job.gradient_bytes)
    dense, dense_bytes = _dense_step(cluster, job, width)
    if name in DENSE:
        exposed = dense - job.compute
        return Prediction(name, "flat", dense, dense, dense, exposed, dense_bytes, 1.0)
    name = find_algorithm(name).name
    if cluster.gpus == 1:  # nothing is exchanged and nothing compressed
        return Prediction(name, layout, job.compute, job.compute, job.compute, 0.0, 0.0, 1.0)
    rounds = _rounds(job, name)
    wire, node_bytes = _exchange(cluster, job, name, layout == "hierarchical")
    control = _control(cluster, job)
    kernels = job.elements * (STEP_BYTES[name] - ADAMW_BYTES + _packed_bytes(cluster, job)) / cluster.memory_bandwidth
    hides = job.overlap == "backward" and "overlap" in ALGORITHMS[name].options
    exposed = max(0.0, wire - (job.hidden * job.compute if hides else 0.0))
    one_bit = job.compute + exposed + max(0.0, kernels) + control
    silent = job.compute + job.elements * (LOCAL_STEP_BYTES - ADAMW_BYTES) / cluster.memory_bandwidth + control
    later = rounds["one_bit"] + rounds["silent"]
    step = (rounds["one_bit"] * one_bit + rounds["silent"] * silent) / later if later else dense
    share = rounds["dense"] / (later + rounds["dense"])
    spoken = rounds["one_bit"] / later if later else 0.0
    mean = share * dense + (1 - share) * step
    if name == "binsgdm":
        # bitmaps of live coordinates are merged at t = 1, 2, 4, ..., beside the exchanges of these steps
        merge, _ = _exchange(cluster, job, name, layout == "hierarchical", merges=True)
        mean += int(job.steps).bit_length() / job.steps * merge
    return Prediction(
        name,
        layout,
        dense,
        step,
        mean,
        step - job.compute if later else dense - job.compute,
        spoken * node_bytes if later else dense_bytes,
        share,
    )


def _dense_step(cluster: Cluster, job: Job, width: int) -> tuple[float, float]:
    """Seconds of a dense step, and bytes through a node's card: a ring passes every card once."""
    size = max(int(job.bucket_mb * 2**20), width * job.block_size)
    full, rest = divmod(job.elements * width, size)
    sizes = [(size, full), (rest, 1)] if rest else [(size, full)]
    seconds = sum(times * cluster.all_reduce(nbytes) for nbytes, times in sizes)
    sent = float(sum(times * ring_bytes(cluster.gpus, nbytes) for nbytes, times in sizes))
    return job.compute + max(0.0, seconds - job.hidden * job.compute), sent if cluster.nodes > 1 else 0.0


def _buckets(cluster: Cluster, job: Job) -> list[tuple[int, int]]:
    """Blocks of a bucket, and how many buckets have so many: ``comm.plan_buckets`` in closed form, for models of any size.

    Parameters fill whole blocks one after another, over bucket borders; all buckets but the last are full, and it is padded to an
    even share of every rank.
    """
    ranks = cluster.gpus
    capacity = max(1, int(job.bucket_mb * 2**20 / 4) // (job.block_size * ranks)) * ranks
    full, rest = divmod(sum(-(-count // job.block_size) for count in job.tensors), capacity)
    return [(blocks, times) for blocks, times in ((capacity, full), (-(-rest // ranks) * ranks, 1)) if blocks and times]


def _collectives(
    cluster: Cluster, job: Job, name: str, hierarchical: bool, blocks: Iterable[int], merges: bool = False
) -> Iterator[Collective]:
    """The collectives of buckets of so many blocks; ``merges``: of bitmaps, which nodes do not average and no server votes on."""
    share = cluster.gpus_per_node if hierarchical else 1
    return exchange_collectives(
        *(blocks, job.block_size, cluster.gpus, share),
        has_scales=name != "binsgdm",
        node_average=not merges,
    )


def exchange_of(cluster: Cluster, job: Job, name: str, hierarchical: bool = False) -> list[Collective]:
    """Every collective of one compressed step, by the plan that the optimizer itself would make.

    Args:
        cluster: machines and network.
        job: model and schedule.
        name: algorithm.
        hierarchical: whether ranks of a node average first.
    """
    blocks = (count for count, times in _buckets(cluster, job) for _ in range(times))
    return list(_collectives(cluster, job, name, hierarchical, blocks))


def _exchange(cluster: Cluster, job: Job, name: str, hierarchical: bool, merges: bool = False) -> tuple[float, float]:
    """Seconds on the wire of one exchange (collectives one after another), and bytes through a node's card."""
    seconds = sent = 0.0
    for blocks, times in _buckets(cluster, job):
        for one in _collectives(cluster, job, name, hierarchical, [blocks], merges):
            seconds += times * cluster.collective(one)
            sent += times * _card_bytes(cluster, one)
    return seconds, sent


def _card_bytes(cluster: Cluster, one: Collective) -> float:
    """Bytes that a node's card sends in a collective."""
    if one.link == "intra" or cluster.nodes == 1:
        return 0.0
    if one.ranks < cluster.gpus or cluster.gpus_per_node == 1:
        return float(cluster.gpus_per_node * one.sent)
    if one.kind == "all_gather":
        return float(one.sent)
    return float(cluster.gpus_per_node * (one.ranks - cluster.gpus_per_node) * one.row_bytes)


def _control(cluster: Cluster, job: Job) -> float:
    """Seconds of the control round that every compressed step makes."""
    return cluster.collective(Collective("all_gather", "inter", cluster.gpus, control_payload_bytes(len(job.tensors))))


def _packed_bytes(cluster: Cluster, job: Job) -> float:
    """Memory bytes per element for bits, scales and this rank's part of the server residual (read and written)."""
    packed = 1 / 8 + 4 / job.block_size
    return 4 * packed + 8 / cluster.gpus


def _rounds(job: Job, name: str) -> dict[str, float]:
    """Dense, one-bit and silent steps of the run."""
    if name == "binsgdm":
        return {"dense": 0.0, "one_bit": float(job.steps), "silent": 0.0}
    # all others learn their variance in a dense step at least, however small the share
    dense = max(1, round(job.warmup * job.steps))
    if name != "zero_one_adam":
        dense += VariancePolicy().count(dense, job.steps) if name == "onebit_adam" else 0
        return {"dense": float(dense), "one_bit": float(job.steps - dense), "silent": 0.0}
    scaler = job.local_step_scaler if job.local_step_scaler is not None else max(1, job.steps // 5)
    return dict(_replayed(job.steps, dense, job.var_update_scaler, scaler, job.local_step_clipper))


@lru_cache(maxsize=64)
def _replayed(steps: int, freeze: int, scaler: int, local_scaler: int, clipper: int) -> tuple[tuple[str, float], ...]:
    policy = IntervalPolicy(clipper, scaler=local_scaler)
    counts = replay_schedule(steps, var_freeze_step=freeze, var_update_scaler=scaler, policy=policy)
    return tuple((kind, float(count)) for kind, count in counts.items())


def fit_compute(measured: Sequence[tuple[Cluster, Job, str, float]]) -> float:
    """The ``compute`` under which the model comes closest to measured steps (least squares of relative errors).

    Args:
        measured: cluster, job (its ``compute`` is not looked at), method (``"dense_fp32"``, an algorithm, ...; flat) and seconds of a
            step, of an algorithm one after its warm-up.

    Returns:
        Seconds; 0.0 where communication alone is predicted to take longer than the steps that were measured.

    Raises:
        ValueError: nothing was measured, a time is not positive, or a job has an option that none of the algorithms measured with it has.

    Example:
        >>> cluster, job = Cluster(gpus=8, bandwidth=1e9), Job(params=336_000_000, compute=0.0)
        >>> compute = fit_compute([(cluster, job, "dense_fp32", 19.0), (cluster, job, "onebit_adam", 0.8)])
        >>> print(f"{compute:.2f} s")
        0.17 s
    """
    if not measured:
        raise ValueError("measured is empty; give at least one (cluster, job, method, seconds)")
    for *_, seconds in measured:
        check_number("seconds", seconds, above=0)
    for _, job, *_ in measured:
        names = [find_algorithm(name).name for _, other, name, _ in measured if other == job and name not in DENSE]
        if names:
            _check_effect(job, names)

    def error(compute: float) -> float:
        return sum(
            (_predict(cluster, replace(job, compute=compute), name).step_seconds / seconds - 1) ** 2
            for cluster, job, name, seconds in measured
        )

    low, high = 0.0, max(seconds for *_, seconds in measured) * 2
    while high - low > 1e-9 + 1e-6 * high:
        third = (high - low) / 3
        if error(low + third) <= error(high - third):
            high -= third
        else:
            low += third
    return low if low > 0 else 0.0


# ----- what the numbers mean ---------------------------------------------------------------------------------------------


def break_even_bandwidth(cluster: Cluster, job: Job, name: str, layout: str = "flat") -> float | None:
    """Bits per second of a node's card at which a method is no faster any more than the fastest dense one, over the whole run.

    Args:
        cluster: machines; their bandwidth is not looked at.
        job: model and schedule.
        name: algorithm.
        layout: ``"flat"`` or ``"hierarchical"``.

    Returns:
        The bandwidth; inf if the method is faster even at 1e14 bits per second, None if it is not at 1e4.

    Raises:
        ValueError: an unknown algorithm or layout, or an option in ``job`` that the algorithm does not have.

    Example:
        >>> cluster, job = Cluster(gpus=8, bandwidth=1e9), Job(params=336_000_000, compute=0.1)
        >>> print(f"{break_even_bandwidth(cluster, job, 'onebit_adam') / 1e9:.0f} Gb/s")
        98 Gb/s
    """
    _check_effect(job, [find_algorithm(name).name])
    return _break_even(cluster, job, name, layout)


def _break_even(cluster: Cluster, job: Job, name: str, layout: str) -> float | None:
    def faster(bandwidth: float) -> bool:
        there = replace(cluster, bandwidth=bandwidth)
        dense = min(_predict(there, job, kind).mean_seconds for kind in DENSE)
        return _predict(there, job, name, layout).mean_seconds < dense

    return _bisect(faster, 1e4, 1e14)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    if not holds(low):
        return None
    if holds(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _verdict(report: ForecastReport) -> str:
    cluster, job, dense, best = report.cluster, report.job, report.dense, report.best
    if cluster.gpus == 1:
        return "It will not help because there is one GPU: nothing is exchanged."
    where = (
        f"At {format_bits(cluster.bandwidth)} per node" if cluster.nodes > 1 else "Within one node, without a network,"
    )
    if report.helps:
        even = _break_even(cluster, job, best.name, best.layout)
        bound = "" if even is None or math.isinf(even) else f"; it pays below about {format_bits(even)} per node"
        return (
            f"{where} {best.title} should make the run {format_figure(report.speedup, 2)}x as fast as {dense.title}, warm-up "
            f"included ({format_figure(dense.step_seconds / best.step_seconds, 2)}x after it){bound}."
        )
    return f"{where} it will not help because {_reason(report)}. Use strategy='ddp'."


def _reason(report: ForecastReport) -> str:
    job, dense, best = report.job, report.dense, report.best
    exposed = dense.step_seconds - job.compute
    if exposed <= LITTLE_WAITING * dense.step_seconds:
        return (
            f"{dense.title} averaging hides behind backward: only {format_seconds(exposed)} of a step of "
            f"{format_seconds(dense.step_seconds)} is spent waiting for it"
        )
    if best.dense_share == 1:
        run = f"{job.steps:,} step{'s' * (job.steps > 1)}"
        return f"the dense warm-up is the whole run ({run}) and no step is compressed; shorten it or train longer"
    after = dense.step_seconds / best.step_seconds
    if after >= WORTH and best.dense_share > 0:
        return (
            f"the dense warm-up of {best.dense_share:.0%} takes the gain back: {best.title} is {format_figure(after, 2)}x as fast as "
            f"{dense.title} after it, {format_figure(report.speedup, 2)}x over the whole run"
        )
    return (
        f"the exchange itself takes too long: {best.title} spends {format_seconds(best.exchange_seconds)} per step on kernels, "
        f"latencies and bits, {dense.title} waits {format_seconds(exposed)} for its bytes"
    )


#: of the columns of a table; wider where a number is
_WIDTHS = (24, 9, 9, 9, 7, 8, 8)


def _table(report: ForecastReport) -> str:
    cluster, job = report.cluster, report.job
    rows = [("method", "step ms", "mean ms", "MB/node", "dense", "x fp32", "x fp16")]
    rows += [
        (
            p.title,
            format_figure(1e3 * p.step_seconds),
            format_figure(1e3 * p.mean_seconds),
            format_figure(p.node_bytes / 1e6),
            "100%" if p.dense_share == 1 else f"{p.dense_share:.1%}",
            f"{p.speedup_fp32:.2f}",
            f"{p.speedup_fp16:.2f}",
        )
        for p in report.predictions
    ]
    widths = [
        max(least, 2 * bool(i) + max(map(len, column)))
        for i, (least, column) in enumerate(zip(_WIDTHS, zip(*rows, strict=True), strict=True))
    ]
    lines = [
        f"{format_millions(job.elements)} parameters, {cluster.gpus} GPUs, {cluster.gpus_per_node} per node, "
        f"{format_bits(cluster.bandwidth)} per node, {format_seconds(job.compute)} of computation per step, {job.steps:,} steps",
        "",
    ]
    for title, *cells in rows:
        lines.append(f"{title:<{widths[0]}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)))
    lines += [
        "",
        "step: after the warm-up; mean, and the factors over dense training: whole run; MB/node: sent by a node's card per step; "
        "dense: share of dense steps",
    ]
    return "\n".join([fill(lines[0]), *lines[1:-1], fill(lines[-1])])


def format_millions(count: int) -> str:
    """A number of parameters as text, e.g. ``1,300 M``."""
    return f"{format_figure(count / 1e6, separator=',')} M"


def format_bits(rate: float) -> str:
    """Bits per second as text, e.g. ``4.1 Gb/s``."""
    for unit in ("b/s", "kb/s", "Mb/s", "Gb/s"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{format_figure(rate, 3)} Tb/s"


def format_seconds(seconds: float) -> str:
    """Seconds as milliseconds, e.g. ``12.5 ms``."""
    return f"{format_figure(1000 * seconds, 3)} ms"


# ----- the plot ----------------------------------------------------------------------------------------------------------

BANDWIDTHS = tuple(10 ** (8 + k / 8) for k in range(29))  # 100 Mb/s to 316 Gb/s
LARGEST_WORLD = 4096


def plot(cluster: Cluster, job: Job, path: str, algorithms: Iterable[str] | str = "all") -> None:
    """Draws the speed-up over bandwidth, and the step time over the number of GPUs up to 4,096; the better layout of each method.

    Args:
        cluster: machines; the left panel varies their bandwidth, the right one their number.
        job: model and schedule.
        path: file to write; its ending chooses the format.
        algorithms: names of algorithms, or ``"all"``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.

    Example:
        >>> plot(Cluster(gpus=8, bandwidth=1e9), Job(params=336_000_000, compute=0.1), "plan.png", ["onebit_adam"])
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the plot needs matplotlib: pip install 'lightning-onebit[plot]'", name=error.name
        ) from error
    algorithms = algorithms if isinstance(algorithms, str) else list(algorithms)  # planned many times
    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    over_bandwidth = [plan(replace(cluster, bandwidth=b), job, algorithms) for b in BANDWIDTHS]
    worlds = [cluster.gpus_per_node * 2**k for k in range(13) if cluster.gpus_per_node * 2**k <= LARGEST_WORLD]
    worlds = worlds or [cluster.gpus_per_node]
    over_world = [plan(replace(cluster, gpus=n), job, algorithms) for n in worlds]
    for name in dict.fromkeys(p.name for p in over_bandwidth[0].predictions):
        # 1-bit LAMB sends what 1-bit Adam sends: their lines all but coincide
        style = "--" if name in DENSE else ":" if name == "onebit_lamb" else "-"
        label = name.replace("dense_", "dense ") if name in DENSE else ALGORITHMS[name].title
        speedups = [max(p.speedup_fp32 for p in r.predictions if p.name == name) for r in over_bandwidth]
        times = [1e3 * min(p.mean_seconds for p in r.predictions if p.name == name) for r in over_world]
        left.plot([b / 1e9 for b in BANDWIDTHS], speedups, style, label=label)
        right.plot(worlds, times, style, marker="." if len(worlds) < 3 else "", label=label)
    left.axvline(cluster.bandwidth / 1e9, color="gray", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="Gb/s per node", ylabel="speed-up over dense fp32, whole run")
    left.set_title(f"{cluster.gpus} GPUs, {cluster.gpus_per_node} per node", fontsize=10)
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms per step, whole run")
    right.set_title(f"{format_bits(cluster.bandwidth)} per node", fontsize=10)
    left.legend(fontsize=8)
    figure.suptitle(
        f"{format_millions(job.elements)} parameters, {format_seconds(job.compute)} of computation", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
