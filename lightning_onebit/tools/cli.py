"""The console script ``lightning-onebit``: ``plan``, ``doctor`` and ``bench``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from lightning_onebit import __version__
from lightning_onebit._choices import Overlap, choices
from lightning_onebit._text import fill, format_seconds
from lightning_onebit.algorithms import LocalSteps
from lightning_onebit.engine.options import ExchangeOptions, described
from lightning_onebit.strategy.registry import ALGORITHMS, find_algorithm
from lightning_onebit.tools import bench, doctor
from lightning_onebit.tools.cluster import LARGEST
from lightning_onebit.tools.console import Outcome, Parser, add_json, execute
from lightning_onebit.tools.plan import Cluster, Job, fit_compute, plan, plot

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_count(text: str) -> int:
    """``336M``, ``1.3B`` or ``25_481_472`` as an integer.

    Raises:
        argparse.ArgumentTypeError: anything else; more than the planner counts too.
    """
    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmgbt]?)", text.strip(), re.IGNORECASE)
    count = float(re.sub("[_,]", "", found[1])) * _COUNTS[found[2].lower()] if found else 0.0
    if count > LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {LARGEST:,} parameters; correct it, for example 336M, 1.3B or 336000000"
        )
    if round(count) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of parameters; write for example 336M, 1.3B or 336000000"
        )
    return round(count)


def parse_rate(text: str) -> float:
    """``4.1Gbps``, ``100 Mb/s`` or ``12GB/s`` (bytes) as bits per second.

    Raises:
        argparse.ArgumentTypeError: anything else; a number without a unit too, which could mean anything, and units in capitals
            (``GBPS``), which could mean bits or bytes.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(bps|bit/s|b/s|bit|B/s)", text.strip(), re.IGNORECASE)
    rate = float(found[1]) * _RATES[found[2].lower()] if found else 0.0
    if found is None or rate <= 0 or found[3] in ("B/S", "BPS"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no bandwidth; write a number and its unit, for example 4.1Gbps or 100Mb/s (12GB/s for bytes)"
        )
    return rate * 8 if found[3] in ("B/s", "Bps") else rate


def _number(least: float, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    wanted = f"{'above' if above else 'at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and not (above and value == least)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {wanted}")
        return value

    return parse


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        return value

    return parse


def _local_steps(text: str) -> LocalSteps:
    """``16,32768``: the largest gap between synchronisations, and steps after which gaps double."""
    try:
        gap, *steps = (int(part) for part in text.split(","))
        return LocalSteps(max_gap=gap, **dict(zip(("double_every",), steps, strict=False)))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}; write for example 16,32768, or leave it out for no local steps"
        ) from None


def _algorithms(text: str) -> list[str]:
    try:
        return list(ALGORITHMS) if text == "all" else [find_algorithm(name.strip()).name for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; or 'all'") from error


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and schedule")
    add = model.add_argument
    add("--params", type=parse_count, required=True, help="number of parameters, e.g. 336M")
    compute = model.add_mutually_exclusive_group(required=True)
    said = "milliseconds of a step on one GPU (sharded: of one replica), without any communication between them"
    compute.add_argument("--compute-ms", type=_number(0), help=said)
    said = "instead: milliseconds of a dense step (`ddp`, HSDP) on this very cluster"
    compute.add_argument("--dense-ms", type=_number(0, above=True), help=said)
    add("--steps", type=_whole(1), default=Job.steps, help="optimizer steps of the run (%(default)s)")
    said = "share of dense steps, one at least (%(default)s); 0/1 Adam: until the freeze"
    add("--warmup", type=_number(0, 1), default=Job.warmup, help=said)
    said = "in the warm-up: 4, or 2 for 16-bit parameters"
    add("--gradient-bytes", type=int, choices=(2, 4), default=Job.gradient_bytes, help=said)
    said = "share of compute behind which dense averaging hides (%(default)s)"
    add("--hidden", type=_number(0, 1), default=Job.hidden, help=said)
    options = described(ExchangeOptions)
    add("--overlap", choices=choices(Overlap), default=Job.overlap, help=options["overlap"])
    add("--bucket-mb", type=_number(0, above=True), default=Job.bucket_mb, help=options["bucket_mb"])
    add(
        "--local-steps",
        type=_local_steps,
        metavar="GAP,STEPS",
        help="0/1 Adam's largest gap between synchronisations, and after how many steps gaps double, e.g. 16,32768 (no local steps)",
    )

    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", type=_whole(1), required=True, help="number of ranks")
    add("--gpus-per-node", type=_whole(1), default=1, help="that share one network card (1)")
    add("--shards", type=_whole(1), default=1, help="GPUs of a node over which FSDP2 shards a replica (1)")
    said = "what a node's network card really carries, e.g. 4.1Gbps"
    add("--bandwidth", type=parse_rate, required=True, help=said)
    add("--intra-bandwidth", type=parse_rate, default=Cluster.intra_bandwidth, help="within a node (100Gbps)")
    said = "microseconds of a message between nodes (50)"
    add("--latency-us", type=_number(0), default=1e6 * Cluster.latency, help=said)
    said = "of a rank's memory, e.g. 500GB/s (the default)"
    add("--memory-bandwidth", type=parse_rate, default=8 * Cluster.memory_bandwidth, help=said)

    said = "'all' (default), or names separated by commas: " + ", ".join(ALGORITHMS)
    parser.add_argument("--algorithm", type=_algorithms, default="all", help=said)
    said = "draw speed-up over bandwidth and time over GPUs (needs matplotlib)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=said)


def _plan(options: argparse.Namespace) -> Outcome:
    cluster = Cluster(
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        shards=options.shards,
        bandwidth=options.bandwidth,
        intra_bandwidth=options.intra_bandwidth,
        latency=options.latency_us / 1e6,
        memory_bandwidth=options.memory_bandwidth / 8,
    )
    own = {field.name: getattr(options, field.name) for field in fields(Job) if hasattr(options, field.name)}
    job = Job(compute=(options.compute_ms or 0.0) / 1e3, **own)
    notes = []
    if options.gpus == 1 and options.dense_ms is None and job.compute == 0:
        raise ValueError(
            f"--compute-ms {options.compute_ms:g} with --gpus 1 leaves nothing to predict, for one GPU exchanges nothing; give the "
            "milliseconds that a step takes, or more GPUs"
        )
    if options.dense_ms is not None:
        compute = fit_compute([(cluster, job, "dense_fp32", options.dense_ms / 1e3)])
        if compute == 0:
            raise ValueError(
                f"--dense-ms {options.dense_ms:g}: averaging alone should take longer than that at this --bandwidth; correct one of them"
            )
        job = Job(compute=compute, **own)
        notes.append(f"computation of a step, from --dense-ms: {format_seconds(compute)}")
    report = plan(cluster, job, options.algorithm)
    if options.plot is not None:
        plot(cluster, job, str(options.plot), options.algorithm)
        notes.append(f"wrote {options.plot}")
    return Outcome(0, "\n".join([report.table(), "", *map(fill, (report.verdict, *notes))]), report.as_dict())


def build_parser() -> argparse.ArgumentParser:
    """The parser of the console script."""
    parser = Parser(
        prog="lightning-onebit", description="Plan, check and measure 1-bit compressed data-parallel training."
    )
    parser.add_argument("--version", action="version", version=f"lightning-onebit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,doctor,bench}")
    checks = "what is installed, which kernels will run, do two processes train alike?"
    measures = "does compression pay on this network? (start it with torchrun on all machines)"
    for name, text, add_arguments, run in (
        ("plan", "what would compression gain on a cluster?", _plan_arguments, _plan),
        ("doctor", checks, doctor.add_arguments, doctor.run),
        ("bench", measures, bench.add_arguments, bench.run),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        add_json(command)
        command.set_defaults(run=run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, 1 if a check has failed, 2 for arguments that make no sense."""
    options = build_parser().parse_args(arguments)
    return execute(options.parser, options.run, options)
