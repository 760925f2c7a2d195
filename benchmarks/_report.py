"""What ``frontier.py`` makes of its runs: the table, seconds of a run over a network, and the pictures.

Seconds of a step are those of computing, of the optimizer's own work, and of its collectives by the planner's model
(``lightning_onebit.tools.plan``, docs/planner): one worker per node, latency and overhead as the planner presets them. Which of the steps
between two checks were dense and which compressed follows from the bytes that were sent in them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from _ddp import powersgd_elements
from _language import Task, all_reduce_bytes, model_of
from _methods import METHODS

from lightning_onebit.strategy.registry import ALGORITHMS
from lightning_onebit.tools.cluster import Cluster, Job
from lightning_onebit.tools.plan import predict

#: of the pictures, bits per second
BANDWIDTHS = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10, "25 Gb/s": 2.5e10}
#: bytes of gradients in a bucket of DDP
DDP_BUCKET = 25 * 2**20

Runs = Sequence[Mapping[str, Any]]


def loss_of(run: Mapping[str, Any]) -> float:
    """Validation loss; infinite for a run that failed or diverged."""
    loss = run.get("loss", math.inf)
    return loss if math.isfinite(loss) else math.inf


# ----- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A method on a task, at its best learning rate.

    Attributes:
        method: its name.
        lr: best learning rate of the search, or of the seeds where nothing was searched.
        bracketed: both neighbours of that rate, half and twice, are worse.
        runs: those at that rate which count, by seed: those of the seeds, or where there are none that of the search.
        searched: it is that of the search.
    """

    method: str
    lr: float
    bracketed: bool
    runs: Mapping[int, Mapping[str, Any]]
    searched: bool

    @property
    def losses(self) -> dict[int, float]:
        """By seed."""
        return {seed: loss_of(run) for seed, run in self.runs.items()}

    @property
    def bytes(self) -> float:
        """That a rank sends per parameter and step; nan if every run failed."""
        return next((run["bytes"] for run in self.runs.values() if "bytes" in run), math.nan)


def groups(
    lines: Iterable[Mapping[str, Any]], like: Mapping[str, Task]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Runs that can be compared, by task, steps, text and precision.

    Args:
        lines: of the file of runs.
        like: a task and the one whose dense runs count in it too, at the bytes of its own number of workers.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in lines:
        found.setdefault(tuple(run[name] for name in ("task", "steps", "text", "precision")), []).append(run)
    for (name, *others), runs in list(found.items()):
        for task in like.values():
            key = (task.name, *others)
            if getattr(task, "like", "") == name and key in found:
                factor = all_reduce_bytes(task) / all_reduce_bytes(like[name])
                found[key] += [_resent(run, task.name, factor) for run in runs if _family(run) == "dense"]
    return found


def _family(run: Mapping[str, Any]) -> str:
    return METHODS[run["method"]].family if run["method"] in METHODS else ""


def _resent(run: Mapping[str, Any], task: str, factor: float) -> dict[str, Any]:
    """A dense run as one of another task, whose workers send that much more."""
    sent = {"sent": [factor * b for b in run["sent"]], "bytes": factor * run["bytes"]} if "sent" in run else {}
    return {**run, "task": task, **sent}


def best_rows(runs: Runs, seeds: Sequence[int], search_seed: int) -> list[Row]:
    """A row per method of runs that can be compared, the lowest loss first."""
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        by_seed: dict[float, dict[int, Mapping[str, Any]]] = {}
        for run in runs:
            if run["method"] == method:
                by_seed.setdefault(run["lr"], {})[run["seed"]] = run
        found = {lr: loss_of(of[search_seed]) for lr, of in by_seed.items() if search_seed in of}
        searched = bool(found)
        if not searched:
            found = {lr: statistics.fmean(map(loss_of, of.values())) for lr, of in by_seed.items()}
        best = min(found, key=lambda lr: (found[lr], lr))
        bracketed = all(found.get(lr, -math.inf) > found[best] for lr in (best / 2, best * 2))
        chosen = {seed: by_seed[best][seed] for seed in seeds if seed in by_seed[best]}
        rows.append(Row(method, best, bracketed, chosen or by_seed[best], not chosen))
    return sorted(rows, key=lambda row: statistics.fmean(row.losses.values()))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None for one value or an infinite one."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, None
    return mean, statistics.stdev(values) / math.sqrt(len(values))


def gap(row: Row, adamw: Row | None) -> tuple[float, float | None] | None:
    """Per cent by which the loss lies above AdamW's, and its standard error, over the seeds that both have."""
    both = [] if adamw is None else sorted(set(row.runs) & set(adamw.runs))
    if adamw is None or not both:
        return None
    return mean_and_error([100 * (row.losses[seed] / adamw.losses[seed] - 1) for seed in both])


def table(
    lines: Sequence[Mapping[str, Any]], like: Mapping[str, Task], seeds: Sequence[int], search_seed: int
) -> list[dict[str, Any]]:
    """Rows for JSON, by task; what is infinite or unknown is None."""
    content = []
    for (task, steps, text, precision), runs in sorted(groups(lines, like).items()):
        rows = best_rows(runs, seeds, search_seed)
        adamw = next((row for row in rows if row.method == "adamw"), None)
        for row in rows:
            loss, error = mean_and_error(list(row.losses.values()))
            above = gap(row, adamw) or (None, None)
            content.append(
                {"task": task, "steps": steps, "text": text, "precision": precision, "method": row.method, "lr": row.lr}
                | {"bracketed": row.bracketed, "seeds": sorted(row.runs), "search_seed_only": row.searched}
                | {"loss": _finite(loss), "loss_error": error, "bytes": _finite(row.bytes)}
                | {"gap": _finite(above[0]), "gap_error": above[1]}
            )
    return content


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def print_table(content: Iterable[Mapping[str, Any]]) -> None:
    """One block per task."""
    last = None
    for row in content:
        if (head := (row["task"], row["steps"], row["text"], row["precision"])) != last:
            last = head
            print(f"\ntask {head[0]}, {head[1]} steps, text {head[2]}, {head[3]}; loss and its standard error")
            print(f"{'method':24} {'lr':>9} {'loss':>8} {'':8} {'seeds':>5} {'bytes':>7} {'over adamw':>18}")
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
        error = "" if row["loss_error"] is None else f"± {row['loss_error']:.4f}"
        above = "" if row["gap"] is None else f"{row['gap']:+.2f}%"
        above += "" if row["gap_error"] is None else f" ± {row['gap_error']:.2f}%"
        nbytes = "" if row["bytes"] is None else f"{row['bytes']:.3f}"
        marks = ["not bracketed"] * (not row["bracketed"]) + ["search seed only"] * row["search_seed_only"]
        seeds = len(row["seeds"])
        print(
            f"{row['method']:24} {row['lr']:9.3g} {loss:>8} {error:8} {seeds:5} {nbytes:>7} {above:>18}  {', '.join(marks)}"
        )


# ----- seconds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What a step of a task costs before anything is sent.

    Attributes:
        compute: seconds of forward and backward of one worker's rows.
        local: seconds of the optimizer's own work, by method; empty: that is not looked at.
        source: where the numbers come from, for titles.
    """

    compute: float
    local: Mapping[str, float]
    source: str

    def known(self, method: str) -> bool:
        """Whether it is known what a step of a method costs."""
        return not self.local or method.removesuffix("_published") in self.local

    def of(self, method: str) -> float:
        """Seconds of a step of a method before anything is sent; published recipes cost what their methods do."""
        return self.compute + (self.local[method.removesuffix("_published")] if self.local else 0.0)


@lru_cache(maxsize=8)
def tensors(task: Task) -> tuple[torch.Size, ...]:
    """Shapes of the model's parameters."""
    return tuple(p.shape for p in model_of(task, 0).parameters())


@dataclass(frozen=True)
class Wire:
    """Seconds that steps of a method wait for the network.

    Attributes:
        dense: of a step that sends fp32 gradients or parameters.
        compressed: of one that sends ``bytes``.
        bytes: per parameter; 0: the others send nothing.
        full: bytes per parameter of a dense step.
    """

    dense: float
    compressed: float
    bytes: float
    full: float

    def seconds(self, sent: float) -> float:
        """Of a step, for the bytes per parameter that it sends on average."""
        if sent <= self.bytes:  # the others are silent
            return self.compressed * (sent / self.bytes) if self.bytes else 0.0
        share = min(1.0, (sent - self.bytes) / (self.full - self.bytes)) if self.full > self.bytes else 0.0
        return share * self.dense + (1 - share) * self.compressed


def wire(task: Task, method: str, bandwidth: float, compute: float) -> Wire:
    """The planner's seconds for a method.

    Dense gradients hide behind half of computing, as the planner presets it; averages of parameters do not. Majority votes travel as
    BinSGDM's bits, DeMo's and Dion's bytes as a part of a dense all-reduce. PowerSGD has three all-reduces per bucket of DDP, which hide
    as dense ones do.

    Args:
        task: model and workers.
        method: its name.
        bandwidth: of a worker, bits per second.
        compute: seconds of forward and backward.
    """
    sizes = [math.prod(shape) for shape in tensors(task)]
    # kernels are measured: here memory costs nothing
    cluster = Cluster(gpus=task.workers, bandwidth=bandwidth, memory_bandwidth=1e30)
    job = Job(params=sizes, compute=compute, steps=task.steps)
    full, elements = all_reduce_bytes(task), sum(sizes)
    dense = predict(cluster, job, "dense_fp32").exchange_seconds
    if method == "ddp_fp16":
        return Wire(dense, predict(cluster, job, "dense_fp16").exchange_seconds, full / 2, full)
    if METHODS[method].family == "dense":
        return Wire(dense, dense, full, full)
    if method.startswith("powersgd"):
        nbytes = 4 * powersgd_elements(tensors(task), int(method[-1]))
        rounds = 3 * math.ceil(4 * elements / DDP_BUCKET)
        seconds = rounds * cluster.all_reduce(round(nbytes / rounds))
        return Wire(dense, max(0.0, seconds - job.hidden * compute), full * nbytes / 4 / elements, full)
    name = "binsgdm" if method.endswith("_vote") else next((a for a in ALGORITHMS if method.startswith(a)), "")
    if not name:  # parameters or gradients now and then, nothing between
        return Wire(predict(cluster, replace(job, hidden=0.0), "dense_fp32").exchange_seconds, 0.0, 0.0, full)
    found = predict(cluster, job, name)  # 0/1 Adam's silent steps follow from the bytes
    return Wire(dense, found.exchange_seconds, found.node_bytes / elements, full)


def times(task: Task, run: Mapping[str, Any], bandwidth: float, costs: Costs) -> list[float]:
    """Seconds from the start of a run to each of its checks."""
    waits = wire(task, run["method"], bandwidth, costs.compute)
    own = costs.of(run["method"])
    seconds, last_step, last_sent, total = [], 0, 0.0, 0.0
    for (step, _), sent in zip(run["validation"], run["sent"], strict=True):
        steps = step - last_step
        total += steps * (own + waits.seconds((sent - last_sent) / steps))
        seconds.append(total)
        last_step, last_sent = step, sent
    return seconds


def first_below(target: float, seconds: Sequence[float], losses: Sequence[float]) -> float | None:
    """When the loss, between checks along a line, first is at most the target; None if it never is."""
    for k, loss in enumerate(losses):
        if loss <= target:
            if k == 0:
                return seconds[0]
            part = (losses[k - 1] - target) / (losses[k - 1] - loss)
            return seconds[k - 1] + part * (seconds[k] - seconds[k - 1])
    return None


def mean_curve(row: Row, of: Callable[[Mapping[str, Any]], Sequence[float]]) -> list[float]:
    """Mean over the row's seeds, check by check; empty if a run failed."""
    if not all(math.isfinite(loss) for loss in row.losses.values()):
        return []
    return [statistics.fmean(values) for values in zip(*map(of, row.runs.values()), strict=True)]


def validation(run: Mapping[str, Any]) -> list[float]:
    """Losses at the checks."""
    return [loss for _, loss in run["validation"]]


def print_first(task: Task, rows: Sequence[Row], costs: Costs, within: float = 0.0) -> None:
    """At every bandwidth, when each method's mean loss first is at most AdamW's last one, and how much sooner than AdamW's own.

    Args:
        task: of the runs.
        rows: methods at their best learning rates.
        costs: of a step.
        within: so much of AdamW's last loss it may be above it.

    Raises:
        ValueError: AdamW was not run, or diverged.
    """
    adamw = next((row for row in rows if row.method == "adamw"), None)
    target = mean_curve(adamw, validation)[-1:] if adamw is not None else []
    if not target:
        raise ValueError(f"there is no AdamW run of task {task.name} that ended; run it first")
    loss = (1 + within) * target[0]
    print(f"seconds until the loss is {loss:.4f}, {within:.1%} above AdamW's last one; {costs.source}")
    if unknown := [row.method for row in rows if not costs.known(row.method)]:
        print(f"{'':11}costs not measured: {', '.join(unknown)}")
    rows = [row for row in rows if costs.known(row.method)]
    for label, bandwidth in BANDWIDTHS.items():
        reached, never = {}, []
        for row in rows:
            seconds = mean_curve(row, lambda run: times(task, run, bandwidth, costs))  # noqa: B023
            found = first_below(loss, seconds, mean_curve(row, validation))
            if found is None:
                never.append(row.method)
            else:
                reached[row.method] = found
        ranked = sorted(reached.items(), key=lambda item: item[1])
        own = reached.get("adamw", math.nan)
        print(f"{label:>9}:  " + ", ".join(f"{name} {found:,.1f} s ({own / found:.1f}x)" for name, found in ranked))
        print(f"{'':11}never: {', '.join(never) or 'none'}")


# ----- the pictures ---------------------------------------------------------------------------------------------------


def plot(task: Task, rows: Sequence[Row], costs: Costs | None, stem: Path) -> list[Path]:
    """Draws the validation loss against bytes per parameter and, given costs, against seconds at four bandwidths.

    Args:
        task: of the rows.
        rows: methods; one that is not bracketed is dashed.
        costs: of a step; None: no picture over time.
        stem: the files' common name.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kept = [(row, mean_curve(row, validation)) for row in rows]
    kept = [(row, losses) for row, losses in kept if losses]
    names = [name for name in METHODS if name in {row.method for row, _ in kept}]

    def draw(axis: Any, x_of: Callable[[Mapping[str, Any]], Sequence[float]], label: str, scale: str) -> None:
        for row, losses in kept:
            # what has sent nothing yet has no place on a logarithmic axis
            points = [(x, loss) for x, loss in zip(mean_curve(row, x_of), losses, strict=True) if x > 0]
            style = {"color": plt.get_cmap("tab20")(names.index(row.method) % 20), "linewidth": _width(row.method)}
            dashes = "-" if row.bracketed else "--"
            axis.plot(*zip(*points, strict=True), dashes, marker=".", markersize=4, label=row.method, **style)
        axis.set(xscale=scale, xlabel=label)
        axis.set_ylim(top=_top([losses for _, losses in kept]))

    paths = [stem.with_name(f"{stem.name}_bytes.png")]
    figure, axis = plt.subplots(figsize=(9, 5))
    draw(axis, lambda run: run["sent"], "bytes that a worker has sent per parameter", "log")
    axis.set_ylabel("validation loss, nats")
    axis.set_title(f"task {task.name}, {task.workers} workers, {task.steps:,} steps", fontsize=10)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(paths[0], dpi=150)
    plt.close(figure)
    if costs is None:
        return paths
    kept = [(row, losses) for row, losses in kept if costs.known(row.method)]
    paths.append(stem.with_name(f"{stem.name}_time.png"))
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), sharey=True)
    for axis, (label, bandwidth) in zip(axes.flat, BANDWIDTHS.items(), strict=True):
        draw(axis, lambda run: times(task, run, bandwidth, costs), "seconds", "linear")  # noqa: B023
        axis.set_title(label, fontsize=10)
    axes[0][1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    for axis in axes[:, 0]:
        axis.set_ylabel("validation loss, nats")
    figure.suptitle(f"task {task.name}, {task.workers} workers, by the planner's model; {costs.source}", fontsize=10)
    figure.tight_layout()
    figure.savefig(paths[1], dpi=150)
    plt.close(figure)
    return paths


def _width(method: str) -> float:
    """Of a line: this library's are thick."""
    return 2.0 if method.startswith(tuple(ALGORITHMS)) else 1.0


def _top(curves: Iterable[Sequence[float]]) -> float:
    """An upper end that leaves the last quarter of the curves readable."""
    curves = list(curves)
    return max((losses[len(losses) // 4] for losses in curves), default=1.0)


def read_costs(path: Path, task: Task, device: str, runs: Runs, compute_ms: float | None) -> Costs | None:
    """Costs as ``frontier.py cost`` left them; else, without local work, those of AdamW's own runs; None if there are none either.

    Args:
        path: of the file of costs.
        task: whose costs.
        device: the processor that the runs name.
        runs: of the task.
        compute_ms: given milliseconds of forward and backward, instead of measured ones.
    """
    stored = json.loads(path.read_text()).get(f"{task.name} {device}") if path.exists() else None
    if stored is not None:
        compute = stored["compute_ms"] if compute_ms is None else compute_ms
        local = {name: ms / 1e3 for name, ms in stored["local_ms"].items()}
        return Costs(compute / 1e3, local, f"{compute:.3g} ms of computing, optimizers measured on {device}")
    measured = [run["ms_per_step"] for run in runs if run["method"] == "adamw" and "ms_per_step" in run]
    if compute_ms is None and measured:
        # one process saw the rows of all workers
        compute_ms = statistics.median(measured) / task.workers
    if compute_ms is None:
        return None
    return Costs(compute_ms / 1e3, {}, f"{compute_ms:.3g} ms of computing, optimizers at AdamW's cost")
