"""Predicts what compression would gain on a cluster, before renting it: step times by an explicit alpha-beta cost model.

docs/planner states the model and holds it against published and own measurements. Bytes are those of ``comm.volume``, which
the transport counts with; what remains is arithmetic: a collective costs ``rounds * alpha + messages * overhead + bytes / beta``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import cycle
from typing import Any

import torch

from lightning_onebit._text import fill, format_bits, format_figure, format_millions, format_seconds, format_table
from lightning_onebit.comm import Collective, control_payload_bytes, exchange_collectives, ring_bytes
from lightning_onebit.engine.options import check_choice, check_number
from lightning_onebit.engine.rule import Rounds
from lightning_onebit.strategy.registry import ALGORITHMS, Algorithm, find_algorithm
from lightning_onebit.tools.cluster import Cluster, Job

#: what one can do without this library, by the bytes of a gradient element on the wire
DENSE = {"dense_fp32": 4, "dense_fp16": 2}

#: bytes per element that AdamW moves through memory: x, m, v read and written, g read. (Optimizers here know theirs: ``STEP_BYTES``.)
ADAMW_BYTES = 28.0

#: bytes per parameter of optimizer state after the warm-up: of each parameter, and of a rank's n-th
STATE_BYTES = {
    "onebit_adam": (6.5, 4.125),
    "onebit_lamb": (10.5, 4.125),
    "zero_one_adam": (6.5, 4.125),
    "binsgdm": (8.125, 4.0),
    "onebit_sgd": (12.375, 8.125),
}
ADAMW_STATE_BYTES = 8.0
#: more of each parameter with local steps
LOCAL_STATE_BYTES = 11.875

#: factor by which the best plan must beat the best dense one before it is called worth while
WORTH = 1.10
#: exposed communication below this share of a dense step leaves nothing to save
LITTLE_WAITING = 0.05


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
        state_bytes: of optimizer state that a GPU holds after the warm-up, None for an algorithm whose state is not known here.
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
    state_bytes: float | None = None
    speedup_fp32: float = 1.0
    speedup_fp16: float = 1.0

    @property
    def title(self) -> str:
        """How tables call it."""
        return _title(self.name) if self.name in DENSE else f"{_title(self.name)}, {self.layout}"


def _takes_adamw(name: str) -> bool:
    """Whether an algorithm trains as AdamW does, with its hyperparameters."""
    return torch.optim.AdamW in ALGORITHMS[name].converts


def _title(name: str) -> str:
    return f"dense {name.removeprefix('dense_')}" if name in DENSE else ALGORITHMS[name].title


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
        """The fastest compressed method; 1-bit SGD, which takes the place of another optimizer than AdamW, among its like only."""
        compressed = [p for p in self.predictions if p.name not in DENSE]
        like_adamw = [p for p in compressed if not ALGORITHMS[p.name].converts or _takes_adamw(p.name)]
        return min(like_adamw or compressed, key=lambda p: p.mean_seconds)

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
        cluster, dense, best = self.cluster, self.dense, self.best
        if cluster.replicas == 1:
            alone = "GPU" if cluster.gpus == 1 else "replica"
            return f"It will not help because there is one {alone}: nothing is exchanged."
        network = f"At {format_bits(cluster.bandwidth)} per node"
        where = network if cluster.nodes > 1 else "Within one node, without a network,"
        if not self.helps:
            use = "strategy='ddp'" if cluster.shards == 1 else "FSDP2's hybrid sharding"
            return f"{where} it will not help because {self._reason}. Use {use}."
        even = _break_even(cluster, self.job, best.name, best.layout)
        bound = "" if even is None or math.isinf(even) else f"; it pays below about {format_bits(even)} per node"
        return (
            f"{where} {best.title} should make the run {format_figure(self.speedup, 2)}x as fast as {dense.title}, warm-up "
            f"included ({format_figure(dense.step_seconds / best.step_seconds, 2)}x after it){bound}.{self._with_the_rate_of_adamw}"
        )

    @property
    def _with_the_rate_of_adamw(self) -> str:
        """What is fastest at AdamW's learning rate, where the fastest of all needs one of its own."""
        found = [p for p in self.predictions if p.name not in DENSE and _takes_adamw(p.name)]
        if not found or _takes_adamw(self.best.name):
            return ""
        second = min(found, key=lambda p: p.mean_seconds)
        factor = format_figure(_over(self.dense.mean_seconds, second.mean_seconds), 2)
        own = f"{_title(self.best.name)} needs a learning rate of its own"
        return f" {own}; at AdamW's, {second.title} makes the run {factor}x as fast."

    @property
    def _reason(self) -> str:
        """Why it does not help."""
        job, dense, best = self.job, self.dense, self.best
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
                f"{dense.title} after it, {format_figure(self.speedup, 2)}x over the whole run"
            )
        return (
            f"the exchange itself takes too long: {best.title} spends {format_seconds(best.exchange_seconds)} per step on kernels, "
            f"latencies and bits, {dense.title} waits {format_seconds(exposed)} for its bytes"
        )

    def table(self) -> str:
        """The predictions as text."""
        cluster, job = self.cluster, self.job
        rows = [("method", "step ms", "mean ms", "MB/node", "dense", "x fp32", "x fp16")]
        for p in self.predictions:
            figures = (1e3 * p.step_seconds, 1e3 * p.mean_seconds, p.node_bytes / 1e6)
            step, mean, sent = map(format_figure, figures)
            share = "100%" if p.dense_share == 1 else f"{p.dense_share:.1%}"
            rows.append((p.title, step, mean, sent, share, f"{p.speedup_fp32:.2f}", f"{p.speedup_fp16:.2f}"))
        sharded = f"sharded over {cluster.shards} of them, " if cluster.shards > 1 else ""
        head = (
            f"{format_millions(job.elements)} parameters, {cluster.gpus} GPUs, {cluster.gpus_per_node} per node, {sharded}"
            f"{format_bits(cluster.bandwidth)} per node, {format_seconds(job.compute)} of computation per step, {job.steps:,} steps"
        )
        legend = (
            "step: after the warm-up; mean, and the factors over dense training: whole run; MB/node: sent by a node's card per step; "
            "dense: share of dense steps"
        )
        cells = format_table(rows, (24, 9, 9, 9, 7, 8, 8), titled=True)
        held = {_title(p.name): p.state_bytes for p in self.predictions if p.name not in DENSE}
        held = {"AdamW": self.dense.state_bytes, **held}
        state = ", ".join(f"{title} {format_figure(n / 1e9)}" for title, n in held.items() if n is not None)
        return "\n\n".join([fill(head), cells, fill(legend), fill(f"GB of optimizer state per GPU: {state}")])

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
    layouts = ["flat", "hierarchical"] if 1 < cluster.group.gpus_per_node < cluster.replicas else ["flat"]
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
        owners = [
            a.name
            for a in ALGORITHMS.values()
            if (_overlaps(a) if field.name == "overlap" else field.name in a.options)
        ]
        value = getattr(job, field.name)
        if owners and value != field.default and not set(owners) & set(names):
            raise ValueError(
                f"{field.name}={value!r} has no effect on {', '.join(map(repr, names))}: {' and '.join(map(repr, owners))} "
                f"{'has' if len(owners) == 1 else 'have'} it; leave it out or name another algorithm"
            )


def _overlaps(algorithm: Algorithm) -> bool:
    """Whether compressed buckets can leave during backward."""
    return "overlap" not in algorithm.optimizer.rule_class.fixed_exchange


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
    seen = _predict_shard(cluster.group, job.shard(cluster.shards), name, layout, sharded=cluster.shards > 1)
    return replace(seen, node_bytes=cluster.shards * seen.node_bytes)


def _predict_shard(cluster: Cluster, job: Job, name: str, layout: str, *, sharded: bool) -> Prediction:
    """The same of ranks of which each has what it exchanges for itself; ``sharded``: which is a shard of the model."""
    dense, dense_bytes = _dense_step(cluster, job, DENSE.get(name, job.gradient_bytes))
    adamw_state = ADAMW_STATE_BYTES * job.elements
    if name in DENSE:
        return Prediction(name, "flat", dense, dense, dense, dense - job.compute, dense_bytes, 1.0, adamw_state)
    algorithm = find_algorithm(name)
    name, optimizer = algorithm.name, algorithm.optimizer
    if cluster.gpus == 1:  # nothing is exchanged and nothing compressed
        return Prediction(
            name, layout, job.compute, job.compute, job.compute, 0.0, 0.0, 1.0, ADAMW_STATE_BYTES * job.elements
        )
    rounds = _rounds(job, name)
    wire, node_bytes = _exchange(cluster, job, name, layout)
    hides = job.overlap == "backward" and _overlaps(algorithm)
    exposed = max(0.0, wire - (job.hidden * job.compute if hides else 0.0))
    # bits, scales and this rank's part of the server residual, all read and written
    server = 4 if optimizer.rule_class.state_dtype == "bfloat16" else 8
    packed = 4 * (1 / 8 + 4 / job.block_size) + server / cluster.gpus
    kernels = job.elements * (optimizer.STEP_BYTES - ADAMW_BYTES + packed) / cluster.memory_bandwidth
    rides_along = optimizer.rule_class.sends_at_once and layout == "flat" and not sharded
    about_gradients = Collective("all_gather", "inter", cluster.gpus, control_payload_bytes(len(job.tensors)))
    control = 0.0 if rides_along else cluster.collective(about_gradients)
    one_bit = job.compute + exposed + max(0.0, kernels) + control
    local = job.elements * (optimizer.SILENT_STEP_BYTES - ADAMW_BYTES) / cluster.memory_bandwidth
    silent = job.compute + local + control
    later = rounds.one_bit + rounds.silent
    step = (rounds.one_bit * one_bit + rounds.silent * silent) / later if later else dense
    share = rounds.dense / (later + rounds.dense)
    mean = share * dense + (1 - share) * step
    if rounds.bitmaps:
        mean += rounds.bitmaps / job.steps * _exchange(cluster, job, name, layout, merges=True)[0]
    sent = rounds.one_bit / later * node_bytes if later else dense_bytes
    whole, share_of_rank = STATE_BYTES.get(name, (math.nan, math.nan))
    whole += LOCAL_STATE_BYTES if rounds.silent else 0.0
    state = (whole + share_of_rank / cluster.gpus) * job.elements if name in STATE_BYTES else None
    return Prediction(name, layout, dense, step, mean, step - job.compute, sent, share, state)


def _dense_step(cluster: Cluster, job: Job, width: int) -> tuple[float, float]:
    """Seconds of a dense step, and bytes through a node's card: a ring passes every card once."""
    size = max(int(job.bucket_mb * 2**20), width * job.block_size)
    full, rest = divmod(job.elements * width, size)
    sizes = [(size, full), (rest, 1)] if rest else [(size, full)]
    seconds = sum(times * cluster.all_reduce(nbytes) for nbytes, times in sizes)
    sent = float(sum(times * ring_bytes(cluster.gpus, nbytes) for nbytes, times in sizes))
    return job.compute + max(0.0, seconds - job.hidden * job.compute), sent if cluster.nodes > 1 else 0.0


def exchange_of(
    cluster: Cluster, job: Job, name: str, layout: str = "flat", *, merges: bool = False
) -> list[tuple[int, list[Collective]]]:
    """The collectives of one compressed step, as the optimizer itself would plan them: ``comm.plan_buckets`` for models of any size.

    Parameters fill whole blocks one after another, over bucket borders; all buckets but the last are full, and it is padded to an
    even share of every rank.

    Args:
        cluster: machines and network.
        job: model and schedule.
        name: algorithm.
        layout: ``"flat"`` or ``"hierarchical"``.
        merges: those of its bitmaps, which nodes do not average.

    Returns:
        How many buckets are alike, and the collectives of each, of a sharded model those of one rank.
    """
    cluster, job = cluster.group, job.shard(cluster.shards)
    ranks, size = cluster.gpus, job.block_size
    share = cluster.gpus_per_node if layout == "hierarchical" else 1
    scales = find_algorithm(name).optimizer.SENDS_SCALES
    capacity = max(1, int(job.bucket_mb * 2**20 / 4) // (size * ranks)) * ranks
    full, rest = divmod(sum(-(-count // size) for count in job.tensors), capacity)
    alike = [(full, capacity)] if full else []
    alike += [(1, -(-rest // ranks) * ranks)] if rest else []
    return [
        (times, list(exchange_collectives([blocks], size, ranks, share, has_scales=scales, node_average=not merges)))
        for times, blocks in alike
    ]


def _exchange(cluster: Cluster, job: Job, name: str, layout: str, *, merges: bool = False) -> tuple[float, float]:
    """Seconds on the wire of one exchange (collectives one after another), and bytes through a node's card."""
    seconds = sent = 0.0
    for times, bucket in exchange_of(cluster, job, name, layout, merges=merges):
        for one in bucket:
            seconds += times * cluster.collective(one)
            sent += times * cluster.card_bytes(one)
    return seconds, sent


def _rounds(job: Job, name: str) -> Rounds:
    """What the steps of the run send."""
    algorithm = find_algorithm(name)
    # second moments learn in a dense step at least, however small the share
    freeze = max(1, round(job.warmup * job.steps)) if algorithm.warm_up else 0
    schedule = {option: value for option, value in job.schedule.items() if option in algorithm.options}
    return _counted(algorithm, job.steps, freeze, tuple(schedule.items()))


@lru_cache(maxsize=64)
def _counted(algorithm: Algorithm, steps: int, freeze_step: int, schedule: tuple[tuple[str, Any], ...]) -> Rounds:
    return algorithm.optimizer.count_rounds(steps, freeze_step, **dict(schedule))


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
        101 Gb/s
    """
    _check_effect(job, [find_algorithm(name).name])
    return _break_even(cluster, job, name, layout)


def _break_even(cluster: Cluster, job: Job, name: str, layout: str) -> float | None:
    def faster(bandwidth: float) -> bool:
        there = replace(cluster, bandwidth=bandwidth)
        dense = min(_predict(there, job, kind).mean_seconds for kind in DENSE)
        return _predict(there, job, name, layout).mean_seconds < dense

    low, high = 1e4, 1e14
    if not faster(low):
        return None
    if faster(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


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
    # algorithms may send the same, so that their lines coincide: dots and dashes lie on whole lines
    patterns: Any = cycle([("-", 2), ((0, (3, 3)), 3), ((0, (1, 4)), 4)])
    for name in dict.fromkeys(p.name for p in over_bandwidth[0].predictions):
        pattern, layer = ("--", 2) if name in DENSE else next(patterns)
        style = {"linestyle": pattern, "zorder": layer, "linewidth": 2}
        label = _title(name)
        speedups = [max(p.speedup_fp32 for p in r.predictions if p.name == name) for r in over_bandwidth]
        times = [1e3 * min(p.mean_seconds for p in r.predictions if p.name == name) for r in over_world]
        left.plot([b / 1e9 for b in BANDWIDTHS], speedups, label=label, **style)
        right.plot(worlds, times, marker="." if len(worlds) < 3 else "", label=label, **style)
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
