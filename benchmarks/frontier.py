"""Loss against bytes: every method on small language models, at its own best learning rate.

    python benchmarks/frontier.py run --task a --jobs 2          run what is missing of a task
    python benchmarks/frontier.py run --task c --no-search       GPT-2 small on a GPU, at given learning rates, seed 1
    python benchmarks/frontier.py table                          every method at its best learning rate; results/frontier.json
    python benchmarks/frontier.py cost --task a                  a step's computing and local work, which these two need:
    python benchmarks/frontier.py plot --task a                  loss against bytes, and against time at four bandwidths
    python benchmarks/frontier.py first --task a                 which method reaches AdamW's last loss first, by bandwidth
    sudo python benchmarks/frontier.py bytes --task a            formulas against what the kernel counts
    sudo python benchmarks/frontier.py seconds --task a          seconds of a step by the planner's model against a slow network

A run is one line of ``benchmarks/results/frontier_runs.jsonl``. A run that is there is not repeated, so an interrupted study goes on.
The learning rate of each method is searched with seed 0, on a grid of factor 2, until the best one has a worse neighbour on both sides;
seeds 1, 2 and 3 follow at that rate. Within a seed all methods begin with the same weights and see the same data. A run that diverges or
fails is a result: its loss is infinite.

Methods that exchange run in a ``SimulatedWorld``, dense ones see the batches of all workers in one process, torch's own (``ddp_fp16``,
``powersgd_*``, ``post_local_sgd``), ``demo`` and ``dion*`` run in a process per worker. Bytes are those that an efficient implementation
sends: a ring all-reduce of fp32 gradients for dense methods, a bit to and from the server for majority votes; ``_ddp.py`` says what those
in processes send.
``sent`` in a line of a run belongs to the points of ``validation``, of the first worker's replica on a quarter of the windows of ``loss``.

Tasks: ``a``, a byte model of 0.45 million parameters and 4 workers; ``a16``, the same data among 16 workers; ``b``, the demo's model of 3.3
million; ``c``, GPT-2 small on the source of all installed packages (needs ``pip install tokenizers``); ``c_toy``, the same at a toy size.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing as mp
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _language
import _report
import _traffic
import torch
from _common import write_json
from _ddp import DEMO_SOURCE, DION_SOURCE, train_ddp
from _language import Run, corpus, text_id, train_dense, train_world
from _methods import METHODS, Method
from _report import loss_of

RUNS = Path(__file__).resolve().parent / "results" / "frontier_runs.jsonl"
COSTS, BYTES, SECONDS = (RUNS.with_name(f"frontier_{name}.json") for name in ("costs", "bytes", "seconds"))
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
CHECKS = 10
#: learning rates this many doublings from the start of the search are not tried
FARTHEST = 8


@dataclass(frozen=True)
class Task(_language.Task):
    """A language model and the length of its training.

    Attributes:
        starts: learning rates at which the search begins, by kind of method.
        precision: of matrix products on a GPU.
        like: the task whose dense runs count here too: it sees the same data, shared out among other workers.
    """

    starts: Mapping[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    precision: str = field(default="fp32", kw_only=True)
    like: str = field(default="", kw_only=True)


_BYTES: dict[str, Any] = {"starts": {"adam": 4e-3, "lamb": 1e-2, "sign": 1e-3}}
_DEMO: dict[str, Any] = {"starts": {"adam": 1e-3, "lamb": 5e-3, "sign": 1e-3}, "demo": True}
_GPT2: dict[str, Any] = {"starts": {"adam": 6e-4, "lamb": 5e-3, "sign": 3e-4}, "std": 0.02, "precision": "bf16"}
TASKS = {
    task.name: task
    for task in (
        Task("a", 4, 4, 64, 1000, 100, 100, 256, 128, 2, **_BYTES),
        Task("a16", 16, 1, 64, 1000, 100, 100, 256, 128, 2, **_BYTES, like="a"),
        Task("b", 4, 2, 64, 1500, 150, 150, 256, 256, 4, **_DEMO),
        Task("c", 4, 8, 1024, 1000, 100, 200, 32768, 768, 12, **_GPT2, heads=12, packages=20_000_000),
        Task("c_toy", 4, 8, 64, 40, 4, 8, 512, 64, 2, **_GPT2, packages=200_000),
    )
}

#: what ``--no-search`` runs of task c, by value: a method, and its learning rate over the start of its kind
GPT2_ORDER = (
    *((name, 1) for name in ("adamw", "onebit_adam_16bit", "binsgdm", "zero_one_adam_16bit", "diloco")),
    *((name, 1) for name in ("onebit_adam_published", "zero_one_adam_published", "binsgdm_published")),
    *((name, 2) for name in ("adamw", "binsgdm")),
    *((name, 1) for name in METHODS),
    *((name, 2) for name in METHODS),
)

Spec = tuple[str, float, int]
"""Method, learning rate, seed."""


# ----- one run --------------------------------------------------------------------------------------------------------


def run_one(task: Task, spec: Spec, device: str, alone: bool) -> dict[str, Any]:
    """Trains once and returns its line, with ``error`` instead of a loss if it failed."""
    name, lr, seed = spec
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    row: dict[str, Any] = {"task": task.name, "steps": task.steps, "method": name, "lr": lr, "seed": seed}
    precision = _precision(task, device)
    row |= {"warm_up": task.warm_up, "precision": precision, "device": _processor(device), "text": text_id(task)}
    began = time.perf_counter()
    try:
        train = {"dense": train_dense, "world": train_world, "ddp": train_ddp}[METHODS[name].family]
        watch = train(Run(task, lr, seed, torch.device(device), precision, CHECKS), METHODS[name].make)
        row |= watch.result() | {"validation": watch.validation, "sent": watch.sent}
        if alone:
            row["ms_per_step"] = round(1e3 * statistics.median(watch.step_seconds), 2)
    except Exception as error:  # a method that diverges may raise; that is a result
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _precision(task: Task, device: str) -> str:
    """Of matrix products: most CPUs take ten times as long for bf16 as for fp32."""
    return task.precision if device == "cuda" else "fp32"


def _processor(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# ----- the study ------------------------------------------------------------------------------------------------------


def read_runs(path: Path, task: Task, text: str, precision: str) -> list[dict[str, Any]]:
    """The runs there are of a task, of its number of steps, on this text and in this precision."""
    runs = [run for run in read_lines(path) if (run["task"], run["steps"]) == (task.name, task.steps)]
    return [run for run in runs if (run["text"], run["precision"]) == (text, precision)]


def search(found: Mapping[float, float], start: float) -> tuple[list[float], float | None]:
    """Learning rates to run next, and the best one once it is bracketed.

    Args:
        found: losses of the search so far, by learning rate.
        start: where it begins, with both neighbours.
    """
    if start not in found:
        return [lr for lr in (start, *_around(start)) if lr not in found], None
    best = min(found, key=lambda lr: (found[lr], lr))
    missing = [lr for lr in _around(best) if lr not in found and abs(math.log2(lr / start)) < FARTHEST + 0.5]
    return missing, None if missing else best


def _around(lr: float) -> tuple[float, float]:
    return lr / 2, lr * 2


def best_lr(method: Method, task: Task, runs: Iterable[Mapping[str, Any]]) -> tuple[list[float], float | None]:
    """``search`` for a method of a task, given the runs of the task."""
    own = [run for run in runs if run["method"] == method.name and run["seed"] == SEARCH_SEED]
    return search({run["lr"]: loss_of(run) for run in own}, task.starts[method.kind])


def wanted(task: Task, only: str, runs: Sequence[Mapping[str, Any]]) -> list[Spec]:
    """Runs of a study that can be made now: those of the search first, then seed by seed."""
    specs: list[Spec] = []
    for method in METHODS.values():
        if not re.search(only, method.name) or not method.available or (method.family == "dense" and task.like):
            continue
        missing, best = best_lr(method, task, runs)
        specs += [(method.name, lr, SEARCH_SEED) for lr in missing]
        if best is not None:
            specs += [(method.name, best, seed) for seed in SEEDS]
    return sorted(specs, key=lambda spec: spec[2])


def given(task: Task, only: str, rates: Mapping[str, Sequence[float]]) -> list[Spec]:
    """Runs at given learning rates, seed 1, the most wanted first."""
    order = GPT2_ORDER if task.name.startswith("c") else tuple((name, 1) for name in METHODS)
    specs: dict[Spec, None] = {}
    for name, factor in order:
        if re.search(only, name) and METHODS[name].available:
            for lr in rates.get(name, (factor * task.starts[METHODS[name].kind],)):
                specs[name, lr, SEEDS[0]] = None
    return list(specs)


@dataclass
class Study:
    """What is to be run.

    Attributes:
        task: of its runs.
        path: file of runs.
        device: ``"cpu"`` or ``"cuda"``.
        jobs: runs at once.
        minutes: the study ends before so long if it can, judged by its longest run; None: when nothing is missing.
        only: regular expression of methods.
        fixed: these runs and no search.
    """

    task: Task
    path: Path
    device: str
    jobs: int
    minutes: float | None
    only: str = "."
    fixed: Sequence[Spec] | None = None

    def run(self) -> None:
        """Runs what is missing; a line of progress for each run."""
        self.began, self._longest, self._text = time.monotonic(), 0.0, text_id(self.task)
        train, _ = corpus(self.task)
        print(
            f"{self._elapsed():6.1f} min  {self.task}; {len(train):,} tokens, text {self._text}, {self.device}",
            flush=True,
        )
        if self.device == "cuda":
            while todo := self._todo(set()):
                self._record(run_one(self.task, todo[0], self.device, True), len(todo) - 1)
            return
        running: dict[Future[dict[str, Any]], Spec] = {}
        with ProcessPoolExecutor(self.jobs, mp.get_context("spawn")) as pool:
            while True:
                todo = self._todo(set(running.values()))
                for spec in todo[: self.jobs - len(running)]:
                    running[pool.submit(run_one, self.task, spec, self.device, self.jobs == 1)] = spec
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    self._record(future.result(), len(todo))

    def _elapsed(self) -> float:
        return (time.monotonic() - self.began) / 60

    def _todo(self, running: set[Spec]) -> list[Spec]:
        """What is to be run next, in order; nothing when time is up."""
        if self.minutes is not None and self._elapsed() + self._longest / 60 > self.minutes:
            return []
        runs = read_runs(self.path, self.task, self._text, _precision(self.task, self.device))
        done = {(run["method"], run["lr"], run["seed"]) for run in runs}
        specs = wanted(self.task, self.only, runs) if self.fixed is None else self.fixed
        return [spec for spec in specs if spec not in done | running]

    def _record(self, row: dict[str, Any], left: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # one write to a file opened for appending: lines of two studies do not mix
        line = (json.dumps(row) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)
        self._longest = max(self._longest, row["seconds"])
        outcome = row.get("error") or f"loss {row['loss']:.4f}, {row['bytes']:.3f} bytes, worst {row['worst']:.2f}"
        pace = f", {row['ms_per_step']} ms a step" if "ms_per_step" in row else ""
        print(
            f"{self._elapsed():6.1f} min  {row['task']} {row['method']:24} lr {row['lr']:<9g} seed {row['seed']}  {outcome} "
            f"({row['seconds']} s{pace}; {left} or more to go)",
            flush=True,
        )


# ----- what came out --------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file of runs; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def summary(path: Path) -> list[dict[str, Any]]:
    """``_report.table`` of a file of runs."""
    return _report.table(read_lines(path), TASKS, SEEDS, SEARCH_SEED)


def rows_of(path: Path, task: Task, only: str, everything: bool) -> tuple[list[_report.Row], list[Mapping[str, Any]]]:
    """Methods of a task to be shown, and its runs: of the text and precision that most of them have.

    Raises:
        ValueError: there are none.
    """
    found = {
        key: runs for key, runs in _report.groups(read_lines(path), TASKS).items() if key[:2] == (task.name, task.steps)
    }
    if not found:
        raise ValueError(f"{path} has no run of task {task.name} with {task.steps} steps; `frontier.py run` makes them")
    runs = max(found.values(), key=len)
    rows = [row for row in _report.best_rows(runs, SEEDS, SEARCH_SEED) if row.method in METHODS]
    return [row for row in rows if re.search(only, row.method) and (everything or row.bracketed)], runs


def show(arguments: argparse.Namespace, task: Task) -> None:
    """``plot`` and ``first``.

    Raises:
        ValueError: nothing to show, or for ``first`` no costs.
    """
    rows, runs = rows_of(arguments.runs, task, arguments.only, arguments.all)
    device = next((run["device"] for run in runs), "cpu")
    costs = _report.read_costs(COSTS, task, device, runs, arguments.compute_ms)
    if costs is None:
        message = (
            f"no costs of a step on {device}: `frontier.py cost --task {task.name}` measures them, or give --compute-ms"
        )
        if arguments.command == "first":
            raise ValueError(message)
        print(f"{message}; there is no picture over time")
    if arguments.command == "first":
        assert costs is not None
        _report.print_first(task, rows, costs, arguments.within)
        return
    for path in _report.plot(task, rows, costs, arguments.out / f"frontier_{task.name}"):
        print(f"wrote {path}")


def measure(arguments: argparse.Namespace, task: Task) -> None:
    """``cost``, ``bytes`` and ``seconds``: a file that keeps what other tasks, processors, bandwidths and methods have left.

    Raises:
        ValueError: no network can be made, or for ``seconds`` no costs.
    """
    names = [name for name, method in METHODS.items() if re.search(arguments.only, name) and method.available]
    if arguments.command == "cost":
        path, key = COSTS, f"{task.name} {_processor(arguments.device)}"
        found: Any = _traffic.measure_costs(task, arguments.device, _precision(task, arguments.device), names)
        print(json.dumps(found, indent=1))
    else:
        path, key, found = _over_network(arguments, task, [name for name in names if _traffic.countable(name)])
    stored = json.loads(path.read_text()) if path.exists() else {}
    if arguments.command == "cost":
        found["local_ms"] = stored.get(key, {}).get("local_ms", {}) | found["local_ms"]
    else:
        found = list({row["method"]: row for row in [*stored.get(key, []), *found]}.values())
    write_json(path, stored | {key: found})


def _over_network(arguments: argparse.Namespace, task: Task, names: Sequence[str]) -> tuple[Path, str, Any]:
    """``bytes`` and ``seconds``: file, key and rows."""
    from _network import SlowNetwork

    if reason := SlowNetwork.requirement():
        raise ValueError(reason)
    key = f"{task.name} {arguments.hosts} hosts"
    if arguments.command == "bytes":
        rows = _traffic.measure_network(task, names, arguments.hosts)
        for row in rows:
            del row["milliseconds"]
        _traffic.print_bytes(rows)
        return BYTES, key, rows
    costs = _report.read_costs(COSTS, task, "cpu", (), None)
    if costs is None:
        raise ValueError(f"no costs of a step on cpu: `frontier.py cost --task {task.name}` measures them")
    rows = _traffic.measure_network(task, names, arguments.hosts, arguments.bandwidth)
    for row in rows:
        waits = _report.wire(
            replace(task, workers=arguments.hosts), row["method"], 1e6 * arguments.bandwidth, costs.compute
        )
        row["predicted"] = 1e3 * (costs.of(row["method"]) + waits.seconds(row["formula"]))
    _traffic.print_seconds(rows)
    return SECONDS, f"{key} {arguments.bandwidth:g} Mb/s", rows


def _rates(options: Sequence[str]) -> dict[str, list[float]]:
    """Learning rates by method, of ``METHOD=VALUE``.

    Raises:
        ValueError: no such method, or no number.
    """
    rates: dict[str, list[float]] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in METHODS:
            raise ValueError(f"--lr {option}: no method {name!r}; there are {', '.join(METHODS)}")
        rates.setdefault(name, []).append(float(value))
    return rates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is missing of a task")
    run.add_argument("--jobs", type=int, default=2, help="runs at once, on CPUs; on a GPU there is one")
    run.add_argument("--minutes", type=float, help="begin no run that is likely to end after so long")
    run.add_argument(
        "--no-search", action="store_true", help="seed 1 only, at the task's learning rates or those of --lr"
    )
    run.add_argument(
        "--lr", action="append", default=[], metavar="METHOD=VALUE", help="with --no-search; several allowed"
    )
    table = commands.add_parser("table", help="print what there is, and write it beside the runs")
    plot = commands.add_parser("plot", help="draw the loss against bytes and against time")
    plot.add_argument("--out", type=Path, default=RUNS.parent, help="folder of the pictures")
    first = commands.add_parser("first", help="which method first reaches AdamW's last loss, by bandwidth")
    first.add_argument("--within", type=float, default=0.0, help="of AdamW's last loss, above it: 0.01 is one per cent")
    cost = commands.add_parser("cost", help="measure computing and the optimizers' own work")
    traffic = commands.add_parser("bytes", help="hold formulas against what the kernel counts; needs root and iproute2")
    seconds = commands.add_parser(
        "seconds", help="hold seconds of steps against a slow network; needs root and iproute2"
    )
    seconds.add_argument("--bandwidth", type=float, default=100.0, help="of every host, megabits per second")
    for command in (traffic, seconds):
        command.add_argument("--hosts", type=int, default=2, help="processes, each in a network namespace")
    for command in (run, plot, first, cost, traffic, seconds):
        command.add_argument("--task", choices=TASKS, default="a")
        command.add_argument("--only", default=".", help="regular expression of methods")
    for command in (run, plot, first):
        command.add_argument("--steps", type=int, help="another number of steps, rise and warm-up in proportion")
    for command in (run, table, plot, first):
        command.add_argument("--runs", type=Path, default=RUNS, help="file of runs")
    for command in (plot, first):
        command.add_argument("--compute-ms", type=float, help="of forward and backward, instead of what was measured")
        command.add_argument("--all", action="store_true", help="also methods whose learning rate is not bracketed")
    for command in (run, cost, traffic, seconds):
        command.add_argument("--demo-src", type=Path, help="checkout of github.com/bloc97/DeMo, for the method demo")
        command.add_argument(
            "--dion-src", type=Path, help="checkout of github.com/microsoft/dion, for dion and dion_16"
        )
    for command in (run, cost):
        command.add_argument(
            "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
        )
    return parser


def main() -> None:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.command == "table":
        content = summary(arguments.runs)
        _report.print_table(content)
        write_json(arguments.runs.with_name(arguments.runs.stem.removesuffix("_runs") + ".json"), {"rows": content})
        return
    task = TASKS[arguments.task]
    task = task.of_length(arguments.steps) if getattr(arguments, "steps", None) else task
    for source, name in ((DEMO_SOURCE, "demo_src"), (DION_SOURCE, "dion_src")):
        if getattr(arguments, name, None):
            os.environ[source] = str(getattr(arguments, name).resolve())
    try:
        if arguments.command in ("plot", "first"):
            show(arguments, task)
        elif arguments.command in ("cost", "bytes", "seconds"):
            measure(arguments, task)
        else:
            if arguments.lr and not arguments.no_search:
                raise ValueError("--lr is for --no-search; a search finds learning rates itself")
            fixed = given(task, arguments.only, _rates(arguments.lr)) if arguments.no_search else None
            Study(
                task, arguments.runs, arguments.device, arguments.jobs, arguments.minutes, arguments.only, fixed
            ).run()
            _report.print_table(summary(arguments.runs))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
