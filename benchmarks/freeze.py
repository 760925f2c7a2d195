"""When should the warm-up end? 1-bit Adam frozen at fixed shares of a run, and where the automatic rule would freeze it.

    python benchmarks/freeze.py             runs what is missing, then writes the report
    python benchmarks/freeze.py --report    the report from the runs there are

Tasks, schedule and simulated workers are those of ``convergence.py``. The rule looks a window of ``1/(1-beta2)`` steps
back, about as long as these runs are with beta2 = 0.999, so beta2 is 0.98 here (50 steps). Every run is a line of
``results/freeze_runs.jsonl`` and is not repeated; ``freeze.json`` holds the summary, docs/freeze.md discusses it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from _common import machine_info, write_json
from convergence import DIGITS_SEEDS, MOMENTUM, RESULTS, SEEDS, TASKS, Job, read_runs, run_job, schedule

from lightning_onebit.callbacks.freeze import DEFAULT_THRESHOLD, LearningRateWatch, StabilityRule, volume_reduction
from lightning_onebit.optim import OnebitAdam

RUNS = RESULTS / "freeze_runs.jsonl"
REPORT = RESULTS / "freeze.json"
WORKERS = 4
# task -> learning rate (the best one of the convergence study for 1-bit Adam), beta2, seeds
CASES: dict[str, tuple[float, float, tuple[int, ...]]] = {
    "digits": (0.016, 0.98, DIGITS_SEEDS),
    "text": (0.008, 0.98, SEEDS),
}
SHARES = (0.05, 0.1, 0.2, 0.4)


@lru_cache
def settling(task_name: str, seed: int) -> tuple[int | None, list[tuple[int, float]]]:
    """Train densely and ask the rule of ``VarianceFreeze(mode="auto")`` after every step.

    Returns:
        The step after which it would freeze (None: never), and the ratio found at each look.
    """
    task, (lr, beta2, _) = TASKS[task_name], CASES[task_name]
    params = {name: torch.nn.Parameter(value) for name, value in task.init(seed).items()}
    optimizer = OnebitAdam(params.values(), lr=lr, betas=(0.9, beta2), weight_decay=0.01)  # a world of one stays dense
    rule = StabilityRule(round(1 / (1 - beta2)), DEFAULT_THRESHOLD, earliest=1, latest=task.steps)
    watch, fired, ratios = LearningRateWatch(), None, []
    for step in range(1, task.steps + 1):
        rate = lr * schedule(task, step - 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        task.loss(dict(params), task.rows(seed, step - 1)).backward()
        optimizer.step()
        watch.observe(step, [rate])
        if rule.needs_norm(step):
            rule.observe(step, optimizer.variance_l1())
        if rule.looks_at(step) and rule.ratio is not None:
            ratios.append((step, round(rule.ratio, 4)))
            if fired is None and rule.settled and not watch.rising(step):
                fired = step
    return fired, ratios


def job(task: str, seed: int, freeze_step: int) -> Job:
    """1-bit Adam on four workers, dense for ``freeze_step`` steps."""
    lr, beta2, _ = CASES[task]
    # the published rule, of which these results are
    options: Any = (("betas", (0.9, beta2)), ("freeze_step", freeze_step), *MOMENTUM)
    return Job(task, "onebit_adam", lr, seed, WORKERS, False, options)


def dense_job(task: str, seed: int) -> Job:
    """AdamW on the whole batch."""
    lr, beta2, _ = CASES[task]
    options: Any = (("betas", (0.9, beta2)),)
    return Job(task, "adamw", lr, seed, 1, False, options)


def plan(task: str) -> dict[str, list[tuple[Job, float]]]:
    """Jobs, with the share of dense steps, by row of the report."""
    steps = TASKS[task].steps
    rows: dict[str, list[tuple[Job, float]]] = {"AdamW": [(dense_job(task, seed), 1.0) for seed in CASES[task][2]]}
    for share in SHARES:
        rows[f"{share:.0%}"] = [(job(task, seed, max(1, round(share * steps))), share) for seed in CASES[task][2]]
    rows["auto"] = []
    for seed in CASES[task][2]:
        fired, _ = settling(task, seed)
        at = fired if fired is not None else steps
        rows["auto"].append((job(task, seed, at), at / steps))
    return rows


def report() -> str:
    """Write ``freeze.json`` and return the tables, with what is there."""
    found = {record["key"]: record for record in read_runs(RUNS)}
    summary: dict[str, Any] = {"machine": machine_info(), "workers": WORKERS, "cases": {}}
    text = []
    for task in CASES:
        rows = {}
        text += [
            f"\n{task}",
            "| dense steps | share | saved, fp32 | validation loss | against AdamW |",
            "|---|---|---|---|---|",
        ]
        twins: dict[int, float] = {}
        for name, jobs in plan(task).items():
            done = [(found[each.key], share) for each, share in jobs if each.key in found]
            if not done:
                continue
            losses = {record["seed"]: record["loss"] for record, _ in done}
            twins = twins or losses
            gaps = [100 * (loss / twins[seed] - 1) for seed, loss in losses.items() if seed in twins]
            share = statistics.fmean(share for _, share in done)
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            rows[name] = {"share": share, "losses": losses, "gap_percent": statistics.fmean(gaps), "error": error}
            text.append(
                f"| {name} | {share:.1%} | {volume_reduction(share, 32):.1f}x | {statistics.fmean(losses.values()):.4f} | "
                f"{statistics.fmean(gaps):+.1f} % ± {error:.1f} % |"
            )
        looks = settling(task, 0)[1]
        summary["cases"][task] = {
            "lr_beta2": CASES[task][:2],
            "rows": rows,
            "ratio_by_step": looks[:: max(1, len(looks) // 40)],
        }
    write_json(REPORT, summary)
    return "\n".join(text)


def main() -> None:
    """Run what is missing, seed by seed, and report."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--report", action="store_true", help="run nothing")
    torch.set_num_threads(1)
    if not options.parse_args().report:
        for task in CASES:
            rows = plan(task).values()
            for jobs in zip(*rows, strict=True):  # seed by seed
                for each, _ in jobs:
                    record = run_job(each, RUNS)
                    print(f"{task} seed {each.seed} {dict(each.options)} loss {record['loss']:.4f}", flush=True)
    print(report())
    print(f"\n{REPORT.relative_to(Path(__file__).resolve().parents[1])}")


if __name__ == "__main__":
    main()
