"""Gaps of the convergence study's `digits` task on hundreds of seeds, from an implementation of its own.

    python benchmarks/digits_worlds.py                  run what is missing, print the table, write results/digits_worlds.json and .png
    python benchmarks/digits_worlds.py --seeds 100      fewer seeds, 250 where gaps are close to their target (of worlds with fewer)
    python benchmarks/digits_worlds.py --report         table and plot from the runs there are
    python benchmarks/digits_worlds.py --check          against the library's runs; writes results/digits_worlds_check.json

Runs of ``convergence.py`` that simulate 64 workers with the library's own code take a minute and more each, so their gaps rest on a few
dozen seeds, whose standard error is larger than the targets. ``digits_worlds.cpp`` computes such a run in less than a second. It shares no
line with the library: seeds on which both were run, compared by ``--check``, and runs compared weight by weight in
tests/test_digits_worlds.py show that it computes the same.

The seeds here are none of those on which the library's defaults were chosen, but for one: that BinSGDM's magnitudes need a longer
memory was found on the first 40.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing.pool import Pool
from pathlib import Path

import torch
import torch.nn.functional as F
from _common import machine_info
from convergence import RESULTS, TARGETS, TASKS, TWINS, Job, Options, Params, Task, read_runs

SOURCE = Path(__file__).with_name("digits_worlds.cpp")
OUT = RESULTS / "digits_worlds.json"
CHECK = RESULTS / "digits_worlds_check.json"
TASK = TASKS["digits"]
FIRST_SEED = 1000
"""Of the seeds here; the study's, on which rules were chosen, lie below it."""
ALGORITHMS = ("adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm")
_MOMENTS = ("denominator_floor", "scale_factor", "server_scale_factor", "refresh_interval")
OPTIONS = {
    "onebit_adam": _MOMENTS,
    "onebit_lamb": (*_MOMENTS, "ratio_interval"),
    "zero_one_adam": (*_MOMENTS, "var_update_scaler", "var_rise_steps", "local_step_clipper"),
    "binsgdm": ("denominator_floor", "beta", "magnitude_beta"),
}
"""What a job's options may be, by optimizer; others have none."""
# rounding may differ from run to run in any case; nothing else may: no -ffast-math
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
)


class _Config(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in (
            *("algorithm", "lr", "weight_decay", "steps", "workers", "batch", "freeze_step", "scale_factor"),
            *("var_update_scaler", "var_rise_steps", "local_step_scaler", "local_step_clipper"),
            *("denominator_floor", "beta", "magnitude_beta", "seed"),
            *("refresh_interval", "ratio_interval", "server_scale_factor"),
        )
    )


@lru_cache
def program() -> ctypes.CDLL:
    """``digits_worlds.cpp``, compiled for this processor.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/digits_worlds.so"
        command = [os.environ.get("CXX", "c++"), *FLAGS, "-shared", "-fPIC", "-o", out, str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError(f"{command[0]} was not found: install a C++ compiler, or name one in CXX") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{' '.join(command)} failed:\n{error.stderr}") from None
        return ctypes.CDLL(out)


@lru_cache(maxsize=4)
def _rows(seed: int, task: Task) -> torch.Tensor:
    """Which images each step takes, int32 ``(steps, batch)``: those of ``Task.rows``."""
    count = len(task.data()[0])
    draws = torch.Generator()
    steps = [
        torch.randint(count, (task.batch,), generator=draws.manual_seed(1_000_003 * (seed + 1) + step))
        for step in range(task.steps)
    ]
    return torch.stack(steps).int().contiguous()


def weights_after(job: Job, task: Task = TASK) -> tuple[Params, int, int]:
    """Trains as ``job`` says on ``task``, one of digits.

    Returns:
        ``(weights, dense rounds, one-bit rounds)``; rounds of a world of one are dense.

    Raises:
        ValueError: an option that is not one of ``OPTIONS``, or a batch that cannot be shared out evenly.
    """
    options = dict(job.options)
    if unknown := options.keys() - set(OPTIONS.get(job.optimizer, ())):
        raise ValueError(f"{min(unknown)}={options[min(unknown)]!r} is no option of {job.optimizer} here; leave it out")
    if task.batch % job.workers:
        raise ValueError(f"workers={job.workers} cannot share {task.batch} images evenly; choose a divisor")
    share = max(1, round(0.2 * task.steps))
    # scales of workers and servers
    defaults = (1.0, 1.0)
    if job.optimizer == "onebit_adam" and job.workers >= 32:
        defaults = 1.5, 1.5
    elif job.optimizer == "onebit_lamb":
        defaults = 1.5 if job.workers >= 32 else 1.25, 1.5 if job.workers >= 4 else 1.25
    config = _Config(
        algorithm=ALGORITHMS.index(job.optimizer),
        lr=job.lr,
        weight_decay=0.01,
        steps=task.steps,
        workers=job.workers,
        batch=task.batch,
        freeze_step=share,
        scale_factor=options.get("scale_factor", defaults[0]),
        var_update_scaler=options.get("var_update_scaler", 16),
        var_rise_steps=options.get("var_rise_steps", 256),
        local_step_scaler=share,
        local_step_clipper=options.get("local_step_clipper", 16),
        denominator_floor=options.get("denominator_floor", 1.0 if job.optimizer == "binsgdm" else 0.1),
        beta=(beta := options.get("beta", 0.7)),
        magnitude_beta=options.get("magnitude_beta", 1 - (1 - beta) / 100),
        seed=job.seed,
        refresh_interval=options.get("refresh_interval", -1),
        ratio_interval=options.get("ratio_interval", 2),
        server_scale_factor=options.get("server_scale_factor", options.get("scale_factor", defaults[1])),
    )
    start = task.init(job.seed)
    flat = torch.cat([value.flatten() for value in start.values()]).contiguous()
    images, out, rounds = task.data()[0].contiguous(), torch.empty_like(flat), (ctypes.c_double * 2)()
    rows = _rows(job.seed, task)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (flat, rows, images, out)]
    program().train(ctypes.byref(config), *pointers, rounds)
    parts = out.split([value.numel() for value in start.values()])
    weights = {name: part.view(value.shape) for (name, value), part in zip(start.items(), parts, strict=True)}
    return weights, int(rounds[0]), int(rounds[1])


def run_job(job: Job) -> tuple[float, int, int]:
    """``(validation loss, dense rounds, one-bit rounds)`` of a run."""
    torch.set_num_threads(1)
    weights, dense, one_bit = weights_after(job)
    with torch.no_grad():
        logits, targets = TASK.predict(weights, TASK.data()[1])
    return float(F.cross_entropy(logits, targets)), dense, one_bit


# ----- the table ------------------------------------------------------------------------------------------------------

# what the study has found to be best on this task with 4 workers, and of the uncompressed optimizers its neighbours
ADAM_LRS, LAMB_LRS = (0.01131, 0.016, 0.02263), (0.009514, 0.01131, 0.01345)
BINSGDM_LRS = (0.02263, 0.032, 0.04525)  # by number of workers
ALL_DENSE = (("var_rise_steps", 0), ("var_update_scaler", 236))
# a memory of magnitudes thirty times as long as the momentum's, and not a hundred
SHORTER = (("magnitude_beta", 0.99),)
DENSER = (("var_rise_steps", 0), ("var_update_scaler", 64))
# 0/1 Adam's one-bit rounds as soon as lr has risen, in 60 steps
RISEN = (("var_rise_steps", 60),)
# 1-bit Adam's workers and servers, of 64 workers, with the scale that few have
UNIT = (("scale_factor", 1.0),)
# 1-bit LAMB's servers with the scale of its workers
EVEN = (("scale_factor", 1.25),)
# its workers, 64 of them, with the scale that few have
FEW = (*EVEN, ("server_scale_factor", 1.5))
# and what its ratios follow measured in every tenth step, and not in every second
SELDOM = (("ratio_interval", 10), *EVEN)
WORKERS = (4, 16, 64)


Key = tuple[str, int, Options, float]  # optimizer, workers, options, lr


def keys() -> list[Key]:
    """The worlds of the table."""
    return [
        *(("adamw", 1, (), lr) for lr in ADAM_LRS),
        *(("lamb", 1, (), lr) for lr in LAMB_LRS),
        *(("onebit_adam", n, (), 0.016) for n in WORKERS),
        ("onebit_adam", 64, UNIT, 0.016),
        *(("onebit_lamb", n, (), 0.01131) for n in WORKERS),
        ("onebit_lamb", 64, FEW, 0.01131),
        *(("onebit_lamb", n, EVEN, 0.01131) for n in WORKERS),
        *(("onebit_lamb", n, SELDOM, 0.01131) for n in WORKERS),
        *(("zero_one_adam", n, options, 0.016) for options in ((), RISEN) for n in WORKERS),
        ("zero_one_adam", 16, DENSER, 0.016),
        *(("zero_one_adam", n, ALL_DENSE, 0.016) for n in WORKERS[1:]),
        *(("binsgdm", n, (), lr) for n, lr in zip(WORKERS, BINSGDM_LRS, strict=True)),
        ("binsgdm", 64, SHORTER, 0.04525),
    ]


# gaps close to their target, and the twins of these: so many times as many seeds
CLOSE = 2.5


def seeds_of(key: Key, count: int) -> int:
    """How many seeds a world is run with, where others have ``count``."""
    optimizer, workers, options, _ = key
    close = (
        *(("onebit_lamb", n, ()) for n in WORKERS),
        *(("onebit_lamb", n, EVEN) for n in WORKERS[:2]),
        *(("zero_one_adam", 16, options) for options in ((), RISEN)),
    )
    return round(count * CLOSE) if optimizer in ("adamw", "lamb") or (optimizer, workers, options) in close else count


def job(key: Key, seed: int) -> Job:
    """One run of a world."""
    optimizer, workers, options, lr = key
    return Job("digits", optimizer, lr, seed, workers, False, options)


@dataclass(frozen=True)
class World:
    """An optimizer with so many workers.

    Attributes:
        optimizer: name.
        workers: ranks.
        options: beyond the defaults.
        lr: learning rate.
        losses: validation losses of seeds ``FIRST_SEED``, ``FIRST_SEED + 1``, ...
        dense: mean number of dense rounds.
        one_bit: mean number of one-bit rounds.
    """

    optimizer: str
    workers: int
    options: Options
    lr: float
    losses: tuple[float, ...]
    dense: float
    one_bit: float

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.optimizer, self.workers, self.options, self.lr

    @property
    def label(self) -> str:
        """Optimizer and options."""
        return " ".join([self.optimizer, *(f"{name}={value}" for name, value in self.options)])

    def gap(self, worlds: Iterable[World]) -> tuple[float, float] | None:
        """Mean of ``loss / twin's loss - 1`` over seeds, and its standard error; None: it has no twin.

        The twin is taken at that of its learning rates which is best on these very seeds.
        """
        count = len(self.losses)
        rivals = [
            other.losses[:count]
            for other in worlds
            if other.optimizer == TWINS.get(self.optimizer) and len(other.losses) >= count
        ]
        if not rivals or count < 2:
            return None
        ratios = [own / theirs - 1 for own, theirs in zip(self.losses, min(rivals, key=statistics.fmean), strict=True)]
        return statistics.fmean(ratios), statistics.stdev(ratios) / count**0.5


def read_worlds() -> dict[Key, World]:
    """Those that have been run."""
    if not OUT.exists():
        return {}
    known = {}
    for row in json.loads(OUT.read_text())["worlds"]:
        options = tuple((name, value) for name, value in row["options"])
        world = World(**{**row, "options": options, "losses": tuple(row["losses"])})
        known[world.key] = world
    return known


def write_worlds(worlds: dict[Key, World]) -> None:
    """Writes ``digits_worlds.json``; losses with six decimals."""
    rows = [{**asdict(world), "losses": [round(loss, 6) for loss in world.losses]} for world in worlds.values()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    OUT.write_text(f'{{"machine": {json.dumps(machine_info())},\n"worlds": [\n{lines}\n]}}\n')


def run_world(key: Key, seeds: Sequence[int], pool: Pool) -> World:
    """Runs a world with all of some seeds."""
    losses, dense, one_bit = zip(*pool.map(run_job, [job(key, seed) for seed in seeds], chunksize=4), strict=True)
    optimizer, workers, options, lr = key
    return World(optimizer, workers, options, lr, losses, statistics.fmean(dense), statistics.fmean(one_bit))


def table(worlds: dict[Key, World]) -> str:
    """Markdown."""
    lines = [
        "| optimizer | workers | lr | seeds | validation loss | gap to twin | target | dense, one-bit rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for world in worlds.values():
        measured = world.gap(worlds.values())
        gap = target = rounds = ""
        if measured is not None:
            goal = TARGETS[world.optimizer]
            gap = f"{measured[0]:+.2%} ± {measured[1]:.2%}"
            target = f"{goal:.0%} {'met' if measured[0] <= goal else '**missed**'}"
            rounds = f"{world.dense:.0f}, {world.one_bit:.0f}"
        loss, count = statistics.fmean(world.losses), len(world.losses)
        lines.append(
            f"| {world.label} | {world.workers} | {world.lr:g} | {count} | {loss:.5f} | {gap} | {target} | {rounds} |"
        )
    return "\n".join(lines)


def check(pool: Pool) -> None:
    """Runs what the library has run on the study's seeds, and writes how far losses differ, by world."""
    theirs: dict[Key, dict[int, float]] = {}
    for record in read_runs():
        if record["task"] == TASK.name and not record["real"]:
            options = tuple((name, value) for name, value in record["options"])
            key = (record["optimizer"], record["workers"], options, record["lr"])
            theirs.setdefault(key, {})[record["seed"]] = record["loss"]
    rows = []
    for key in keys():
        known = theirs.get(key, {})
        if len(known) < 2:
            continue
        ours = run_world(key, list(known), pool)
        ratios = [loss / other - 1 for loss, other in zip(ours.losses, known.values(), strict=True)]
        mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
        row = {"optimizer": ours.label, "workers": ours.workers, "lr": ours.lr, "seeds": len(ratios)}
        rows.append({**row, "mean": mean, "standard_error": error})
        print(f"{ours.label}, {ours.workers} workers: done", file=sys.stderr, flush=True)
    CHECK.write_text(json.dumps({"machine": machine_info(), "worlds": rows}, indent=1) + "\n")


def check_table() -> str:
    """Markdown of what ``check`` has written."""
    lines = ["| optimizer | workers | lr | seeds | loss over that of the library |", "|---|---|---|---|---|"]
    for row in json.loads(CHECK.read_text())["worlds"]:
        change = f"{100 * row['mean']:+.2f} % ± {100 * row['standard_error']:.2f}"
        lines.append(f"| {row['optimizer']} | {row['workers']} | {row['lr']:g} | {row['seeds']} | {change} |")
    return "\n".join(lines)


def plot(worlds: dict[Key, World]) -> None:
    """Gap by number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2))
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for world in worlds.values():
        measured = world.gap(worlds.values())
        if measured is not None and world.options in ((), ALL_DENSE, SHORTER):
            label = world.label.replace(" var_rise_steps=0", "")
            curves.setdefault(label, []).append((world.workers, 100 * measured[0], 100 * measured[1]))
    for k, (label, points) in enumerate(curves.items()):
        x, y, error = zip(*sorted(points), strict=True)
        beside = [workers * 1.03 ** (k - 1.5) for workers in x]
        axis.errorbar(beside, y, error, marker="o^sD"[k % 4], capsize=2, label=label)
    axis.axhline(1, color="0.6", linestyle=":", label="target, 1 %")
    axis.axhline(2, color="0.8", linestyle=":", label="BinSGDM's, 2 %")
    axis.set_xscale("log", base=2)
    axis.set_xticks(WORKERS, [str(n) for n in WORKERS])
    count = min(len(world.losses) for world in worlds.values())
    axis.set(
        xlabel="workers (64 images in all)", ylabel="gap to the uncompressed twin, %", title=f"digits, {count} seeds"
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(OUT.with_suffix(".png"), dpi=110)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=400, help=f"how many, from {FIRST_SEED} on")
    parser.add_argument("--report", action="store_true", help="run nothing: table and plot from the runs there are")
    parser.add_argument("--check", action="store_true", help="compare with the runs of convergence.py, on their seeds")
    options = parser.parse_args()
    if options.seeds < 2:
        raise SystemExit(f"--seeds {options.seeds}: a gap needs two or more")
    worlds = read_worlds()
    if not options.report:
        program()
        with mp.get_context("fork").Pool() as pool:
            if options.check:
                check(pool)
                print(check_table())
                return
            for key in keys():
                count = seeds_of(key, options.seeds)
                if key not in worlds or len(worlds[key].losses) < count:
                    worlds[key] = run_world(key, range(FIRST_SEED, FIRST_SEED + count), pool)
                    write_worlds({known: worlds[known] for known in keys() if known in worlds})
                    print(f"{worlds[key].label}, {worlds[key].workers} workers: done", file=sys.stderr, flush=True)
    worlds = read_worlds()
    print(table(worlds))
    plot(worlds)


if __name__ == "__main__":
    main()
