"""Holds the planner against published points and against our own runs over shaped networks, and prints the tables of docs/planner.md.

    python benchmarks/planner_check.py            # the tables, as Markdown
    python benchmarks/planner_check.py --plot     # also draws docs/images/planner.png

Nothing here is fitted to a number that it is then compared with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from lightning_onebit.algorithms import LocalSteps
from lightning_onebit.algorithms.schedules import SyncPolicy, replay_schedule
from lightning_onebit.tools.plan import ADAMW_BYTES, Cluster, Job, fit_compute, plot, predict

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

#: 1-bit Adam paper: BERT-Large, V100s at 4 per node, effective 4.1 Gb/s, batch 16 per GPU; by GPUs: samples/s of Adam and compressed
PUBLISHED = {8: (45, 245), 16: (90, 450), 32: (131, 870)}
BATCH = 16
#: Adam in fp16; DeepSpeed averages gradients after backward, so nothing of it is hidden
BERT_LARGE = Job(params=336_000_000, compute=0.0, gradient_bytes=2, hidden=0.0)
#: our runs that the docs quote
SHAPED = ("slow_network.json", "slow_network_100.json")
METHODS = {"ddp": ("dense_fp32", "step"), "ddp_fp16": ("dense_fp16", "step")}
METHODS |= {"onebit": ("onebit_adam", "step"), "onebit_backward": ("onebit_adam", "backward")}
#: models that are sharded over the 8 GPUs of each of 8 nodes: parameters, and seconds of a step of a node alone
SHARDED_MODELS = {"7 B": (7_000_000_000, 0.86), "70 B": (70_000_000_000, 8.6)}
SHARDED_GIGABITS = (10, 25, 100)
SHARDED_METHODS = {"hsdp": ("dense_fp32", 0.0), "hsdp_overlapped": ("dense_fp32", 0.5), "onebit": ("onebit_adam", 0.0)}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: what was measured.
        predicted: the planner's number.
        measured: the published or measured one.
        unit: of both.
    """

    what: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted / self.measured - 1


def ethernet(gpus: int) -> Cluster:
    """The published cluster."""
    return Cluster(gpus=gpus, gpus_per_node=4, bandwidth=4.1e9)


def published(fitted_on: str) -> tuple[float, list[Row]]:
    """Samples per second of the points that ``compute`` was not fitted on.

    Args:
        fitted_on: ``"dense"``, the dense column, or ``"compressed"``, the compressed stage on 8 GPUs alone.

    Returns:
        The fitted seconds of computation, and the comparisons.
    """
    names = ("dense_fp16", "onebit_adam")
    points = {(n, name): value for n, values in PUBLISHED.items() for name, value in zip(names, values, strict=True)}
    known = [p for p in points if (p[1] == "dense_fp16" if fitted_on == "dense" else p == (8, "onebit_adam"))]
    compute = fit_compute([(ethernet(n), BERT_LARGE, name, n * BATCH / points[n, name]) for n, name in known])
    job = replace(BERT_LARGE, compute=compute)
    rows = [
        Row(
            f"{n} GPUs, {'dense' if name == 'dense_fp16' else 'compressed stage'}",
            n * BATCH / predict(ethernet(n), job, name).step_seconds,
            value,
            "samples/s",
        )
        for (n, name), value in points.items()
        if (n, name) not in known
    ]
    return compute, rows


def arithmetic() -> list[Row]:
    """Published numbers that follow from schedules alone."""

    def volume(share: float) -> float:
        # against fp16, without scales, as the papers count
        return 1 / (share + (1 - share) / 16)

    counts = replay_schedule(
        152_511, freeze_step=12_500, policy=SyncPolicy(LocalSteps(double_every=32_678)), refresh=False, dense=0
    )
    share = 23_000 / 152_500
    stage = max(compressed / dense for dense, compressed in PUBLISHED.values())
    return [
        Row("1-bit Adam, 15 % warm-up: volume against fp16", volume(0.15), 5.0, "x"),
        Row("1-bit LAMB, 1,000 of 5,993 steps: volume against fp16", volume(1000 / 5993), 4.6, "x"),
        Row("0/1 Adam, 152,511 steps: dense rounds", counts["dense"], 153, ""),
        Row("0/1 Adam: one-bit rounds", counts["one_bit"], 74_200, ""),
        Row("0/1 Adam: silent steps", counts["silent"], 78_158, ""),
        Row("1-bit Adam end to end, from its stage on 32 GPUs", 1 / (share + (1 - share) / stage), 3.3, "x"),
    ]


def shaped(file: str) -> tuple[str, list[Row]]:
    """Step times over one of our shaped networks.

    ``compute`` is the measured step without communication, the bandwidth that of the bare all-reduce, the speed of memory that of fused
    AdamW on the same kind of machine (``kernels_1thread.json``).
    """
    (result,) = json.loads((RESULTS / file).read_text())["results"]
    kernels = json.loads((RESULTS / "kernels_1thread.json").read_text())["steps"]["one tensor"]
    hosts, elements, steps = result["hosts"], result["elements"], result["step_seconds"]
    bandwidth = 8 * 2 * (hosts - 1) / hosts * 4 * elements / result["all_reduce_seconds"]
    memory = ADAMW_BYTES * kernels["elements"] / kernels["median_seconds"]["adamw_fused"]
    cluster = Cluster(gpus=hosts, bandwidth=bandwidth, memory_bandwidth=memory)
    job = Job(params=elements, compute=steps["none"], bucket_mb=result["setting"]["bucket_mb"])
    rows = [
        Row(
            name,
            1e3 * predict(cluster, replace(job, overlap=METHODS[name][1]), METHODS[name][0]).step_seconds,
            1e3 * seconds,
            "ms",
        )
        for name, seconds in steps.items()
        if name in METHODS
    ]
    return f"{result['megabits']:,g} Mb/s, {bandwidth / 1e6:.0f} in an all-reduce", rows


def sharded(file: str = "sharded.json") -> list[Row]:
    """Step times of sharded models over our shaped networks, from the same numbers as ``shaped``; means over the runs in the file.

    FSDP2's own all-reduce hides behind nothing with gloo. Ranks share cores, and with them the speed of memory.
    """
    content = json.loads((RESULTS / file).read_text())
    kernels = json.loads((RESULTS / "kernels_1thread.json").read_text())["steps"]["one tensor"]
    memory = ADAMW_BYTES * kernels["elements"] / kernels["median_seconds"]["adamw_fused"]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for result in content["results"]:
        ranks = result["setting"]["ranks_per_host"]
        gpus = ranks * result["hosts"]
        cluster = Cluster(
            gpus=gpus,
            gpus_per_node=ranks,
            shards=ranks,
            bandwidth=result["bandwidths"]["between"],
            memory_bandwidth=memory * min(1.0, content["machine"]["cores"] / gpus),
        )
        steps = result["step_seconds"]
        for name, (method, hidden) in SHARDED_METHODS.items():
            job = Job(params=result["elements"], compute=steps["none"], hidden=hidden)
            found = predict(cluster, job, method).step_seconds
            pairs.setdefault(f"{name} | {result['megabits']:,g} Mb/s", []).append((found, steps[name]))
    return [
        Row(what, 1e3 * fmean(found for found, _ in both), 1e3 * fmean(seconds for _, seconds in both), "ms")
        for what, both in pairs.items()
    ]


def sharded_models() -> str:
    """What HSDP and 1-bit Adam on its shards should cost where nothing was measured."""
    heads = (
        "model",
        "Gb/s",
        "HSDP fp32, s",
        "HSDP bf16, s",
        "1-bit Adam, s",
        "gain",
        "GB/node",
        "ours",
        "AdamW GB/GPU",
        "ours",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, (params, compute) in SHARDED_MODELS.items():
        for gigabits in SHARDED_GIGABITS:
            cluster = Cluster(gpus=64, gpus_per_node=8, shards=8, bandwidth=gigabits * 1e9)
            job = Job(params=params, compute=compute)
            fp32, bf16, ours = (predict(cluster, job, name) for name in ("dense_fp32", "dense_fp16", "onebit_adam"))
            seconds = [f"{p.step_seconds:.3g}" for p in (fp32, bf16, ours)]
            gains = f"{fp32.step_seconds / ours.step_seconds:.1f}x, {bf16.step_seconds / ours.step_seconds:.1f}x"
            sent = [f"{p.node_bytes / 1e9:.3g}" for p in (fp32, ours)]
            held = [f"{(p.state_bytes or 0) / 1e9:.3g}" for p in (fp32, ours)]
            lines.append(f"| {' | '.join([model, str(gigabits), *seconds, gains, *sent, *held])} |")
    return "\n".join(lines)


def markdown(rows: Sequence[Row], measured: str, *second: str) -> str:
    """A table of comparisons; ``second`` heads what follows a bar in ``Row.what``."""
    heads = ["", *second, "predicted", measured, "error"]
    lines = [f"|{' |'.join(f' {head}'.rstrip() for head in heads)} |", "|---" * len(heads) + "|"]
    lines += [
        f"| {row.what} | {_number(row.predicted)} {row.unit} | {_number(row.measured)} {row.unit} | {row.error:+.0%} |".replace(
            "  |", " |"
        )
        for row in rows
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def sections() -> dict[str, str]:
    """Every table of docs/planner.md by its caption."""
    points: list[Row] = []
    for fitted_on, what in (("dense", "dense column"), ("compressed", "8 GPUs, compressed")):
        compute, rows = published(fitted_on)
        points += [replace(row, what=f"{row.what} | {what}, {1e3 * compute:.0f} ms") for row in rows]
    own = [replace(row, what=f"{row.what} | {caption}") for caption, rows in map(shaped, SHAPED) for row in rows]
    return {
        "Published points": markdown(points, "published", "computation fitted on"),
        "Schedules": markdown(arithmetic(), "published"),
        "Our networks": markdown(own, "measured", "network"),
        "Our sharded runs": markdown(sharded(), "measured", "network"),
        "Sharded models": sharded_models(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="draw docs/images/planner.png")
    options = parser.parse_args()
    for caption, table in sections().items():
        print(f"**{caption}**\n\n{table}\n")
    if options.plot:
        job = replace(BERT_LARGE, compute=published("compressed")[0], steps=152_500, warmup=23_000 / 152_500)
        plot(ethernet(64), job, str(ROOT / "docs" / "images" / "planner.png"))


if __name__ == "__main__":
    main()
