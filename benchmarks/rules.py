"""Which rules and mechanisms earn their keep? Each of them on small language models, at its own best learning rate.

    python benchmarks/rules.py run --task T1            run what is missing, two runs at once
    python benchmarks/rules.py run --task T1 --only lamb --minutes 60
    python benchmarks/rules.py table                    the tables, and benchmarks/results/rules.json
    python benchmarks/rules.py plot --task T1           training losses, benchmarks/results/rules.png

A run is one line of ``benchmarks/results/rules_runs.jsonl``. A run that is there is not repeated, so an interrupted study goes on. The
learning rates of AdamW, LAMB, the signs and BinSGDM are searched on T1short and T3, on a grid of factor 2, until the best one has a worse
neighbour on both sides; seeds 1, 2 and 3 compare at that rate. The other compressed rules take that of their dense twin. Within a seed
all rules begin with the same weights and see the same data. Compressed rules run in a ``SimulatedWorld``; dense ones see the batches of
all workers at once, which gives the same mean gradient.

T1 and T2 need ``pip install tokenizers``. Nothing is downloaded: the data is the Python source of the standard library and of torch.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _language
import torch
import torch.nn.functional as F
from _language import GPT, Run, SignDescent, Watch, backward, batch, corpus, shown_fields, train_dense, train_world
from torch import Tensor

import lightning_onebit as ob

HERE = Path(__file__).resolve().parent
RUNS = HERE / "results" / "rules_runs.jsonl"
SUMMARY = HERE / "results" / "rules.json"
PLOT = HERE / "results" / "rules.png"
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: of matrix products: bf16 where the processor multiplies it, for elsewhere it takes ten times as long as fp32
PRECISION = "bf16" if DEVICE.type == "cuda" or torch.cpu._is_avx512_bf16_supported() else "fp32"
BLOCK = 2048


# ----- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task(_language.Task):
    """A language model and the length of its training.

    Attributes:
        like: the task whose dense runs count here too: it sees the same data, shared out among other workers or frozen at another step.
        rates: the task whose learning rates are used; empty: its own.
    """

    like: str = ""
    rates: str = ""


TASKS = {
    task.name: task
    for task in (
        Task("T1", 4, 8, 64, 1000, 200, 200, 4096, 128, 2, rates="T1short"),
        Task("T1short", 4, 8, 64, 1000, 50, 100, 4096, 128, 2),
        Task("T1early", 4, 8, 64, 1000, 50, 50, 4096, 128, 2, "T1short", "T1short"),
        Task("T1half", 4, 8, 64, 1000, 50, 500, 4096, 128, 2, "T1short", "T1short"),
        Task("T2", 16, 2, 64, 1000, 200, 200, 4096, 128, 2, "T1", "T1short"),
        Task("T2short", 16, 2, 64, 1000, 50, 100, 4096, 128, 2, "T1short", "T1short"),
        Task("T3", 4, 4, 128, 600, 60, 60, 256, 256, 4),
    )
}


# ----- rules ----------------------------------------------------------------------------------------------------------

BETAS, BETAS95 = (0.9, 0.999), (0.9, 0.95)


@dataclass(frozen=True)
class Rule:
    """An update rule under study.

    Attributes:
        name: of the rule.
        family: ``"dense"`` (one process, the mean gradient), ``"library"`` (a ``SimulatedWorld``), ``"stacked"`` (gradients of all
            workers as rows of one tensor, for what the library has no option for) or ``"recorded"`` (runs of release 0.1, whose option
            is gone: they are shown and not repeated).
        make: makes the optimizer: from ``(parameters, lr, task, **more)``.
        lr: where the search for the best learning rate begins; 0: there is none, ``like`` or else ``twin`` has it.
        twin: the rule that it is compared with.
        like: the rule whose best learning rate is used, where that is not the twin.
        tasks: those it is run on; empty: all.
    """

    name: str
    family: str
    make: Callable[..., Any]
    lr: float
    twin: str = ""
    like: str = ""
    tasks: tuple[str, ...] = field(default=())


class Separated(torch.optim.Optimizer):
    """Adam or LAMB in which freezing, compression and frozen trust ratios are switched on one at a time.

    ``step_on`` takes the gradients of all workers as rows. The second moment always learns from their mean.

    Args:
        params: parameters.
        lr: learning rate.
        task: gives the workers and the step of the freeze.
        freeze: the second moment stops at the freeze, and its denominators get the library's floor.
        compress: from the freeze on the momentum is exchanged as one bit with error feedback.
        preconditioned: what is compressed is the momentum divided by its denominators.
        refresh: after the freeze the second moment learns in single dense steps on 0/1 Adam's schedule: gaps double after as many of them,
            and are 16 steps at least; 0: never.
        window: a refresh stands for the steps since the last one, but weighs no more than ``1 / window`` in the corrected second moment,
            or than one step of AdamW where that is more.
        floor: of denominators, in units of the root of their tensor's mean second moment.
        lamb: trust ratios of LAMB.
        ratio: ``"own"``: of the step that is made; ``"frozen"``: their average, which stays as it is from the freeze on.
        betas: decays of the moments.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        task: Task,
        *,
        freeze: bool,
        compress: bool,
        preconditioned: bool = True,
        refresh: int = 0,
        window: int = 16,
        floor: float = 0.1,
        lamb: bool = False,
        ratio: str = "own",
        betas: tuple[float, float] = BETAS,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.task, self.freeze, self.compress, self.lamb, self.ratio = task, freeze, compress, lamb, ratio
        self.preconditioned, self.refresh, self.window, self.floor, self.betas = (
            preconditioned,
            refresh,
            window,
            floor,
            betas,
        )
        self.t, self.last, self.dense = 0, 0, 0

    @torch.no_grad()
    def step_on(self, rows: Sequence[Tensor]) -> None:
        """One step; ``rows[k]`` is ``(workers, *shape)`` for parameter k."""
        self.t += 1
        frozen = self.t > self.task.warm_up
        learns = not frozen
        if frozen and self.refresh:
            learns = self.t - self.last >= max(16, 2 ** int(math.log2(1 + (self.last - 1) / self.refresh)))
        for p, g in zip(self.param_groups[0]["params"], rows, strict=True):
            self._step(p, g, frozen, learns, self.param_groups[0]["lr"])
        if learns:
            self.last = self.t
            self.dense += 1

    def bytes_sent(self, task: Task) -> float:
        """Bytes per parameter that a rank has sent."""
        one_bit = self.t - self.dense if self.compress else 0
        return (8.0 * (self.t - one_bit) + 2.0 * one_bit * (1 / 8 + 4 / BLOCK)) * (task.workers - 1) / task.workers

    def _step(self, p: Tensor, g: Tensor, frozen: bool, learns: bool, lr: float) -> None:
        (b1, b2), state, mean = self.betas, self.state[p], g.mean(0)
        if not state:
            state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "old": 1.0, "ratio": 1.0}
        if learns or not self.freeze:
            kept = b2 ** (self.t - self.last) if self.freeze and frozen else b2
            if frozen and self.freeze:
                w = self.window
                kept = max(kept, min(b2, (w - 1) / (w - state["old"])))
            state["v"].mul_(kept).addcmul_(mean, mean, value=1 - kept)
            state["old"] *= kept
        vhat = state["v"] / (1 - state["old"])
        if frozen and (self.freeze or self.compress) and bool((vhat > 0).any()):
            w = vhat[vhat > 0].mean()
            vhat = torch.where(vhat == 0, w, vhat.clamp(min=self.floor**2 * w))
        r = 1 / (vhat.sqrt() + 1e-8)
        if frozen and self.compress and not (learns and self.freeze):
            unit = r if self.preconditioned else torch.ones_like(r)
            received = self._exchange(state, state["m"] * unit * b1 + (1 - b1) * g * unit)
            state["m"] = received / unit
        else:
            state["m"].lerp_(mean, 1 - b1)
        u = state["m"] * r / (1 - b1**self.t)
        if self.lamb:
            if not (frozen and self.ratio == "frozen"):
                x_norm, u_norm = p.norm(), u.norm()
                own = float((x_norm / u_norm).clamp(0.01, 10.0)) if x_norm > 0 and u_norm > 0 else 1.0
                state["ratio"] = own if self.ratio == "own" else 0.9 * state["ratio"] + 0.1 * own
            u = u * state["ratio"]
        p.sub_(lr * u)

    def _exchange(self, state: dict[str, Any], sent: Tensor) -> Tensor:
        workers, shape = len(sent), sent.shape[1:]
        flat = sent.reshape(workers, -1)
        rest = -flat.shape[1] % BLOCK
        flat = F.pad(flat, (0, rest))
        if "e" not in state:
            state |= {"e": torch.zeros_like(flat), "d": torch.zeros_like(flat[0])}
        lengths = torch.full((flat.shape[1] // BLOCK,), float(BLOCK), device=flat.device)
        lengths[-1] = BLOCK - rest
        y = flat + state["e"]
        received = _one_bit(y, lengths)
        if rest:
            received[:, -rest:] = 0.0
        state["e"] = y - received
        z = received.mean(0) + state["d"]
        out = _one_bit(z, lengths)
        state["d"] = z - out
        if rest:
            state["d"][-rest:] = 0.0
        return out[: out.numel() - rest].view(shape)


def _one_bit(y: Tensor, lengths: Tensor) -> Tensor:
    blocks = y.unflatten(-1, (-1, BLOCK))
    scale = (blocks.square().sum(-1) / lengths).sqrt()
    return (torch.where(torch.signbit(blocks), -1.0, 1.0) * scale[..., None]).flatten(-2)


def _dense_adam(betas: tuple[float, float]) -> Callable[..., Any]:
    return lambda params, lr, task: torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=0.0, fused=True)


def _library(cls: type[Any], **options: Any) -> Callable[..., Any]:
    def make(params: Any, lr: float, task: Task, group: Any) -> Any:
        resolved = {name: value(task) if callable(value) else value for name, value in options.items()}
        exchange = ob.ExchangeOptions(state_dtype="float32", process_group=group)
        return cls(params, lr=lr, exchange=exchange, **resolved)

    return make


def _not_made(*_: Any, **__: Any) -> Any:
    raise ValueError("the library has no option for this rule any more")


def _rules() -> dict[str, Rule]:
    warm_up, half = (lambda task: task.warm_up), (lambda task: task.steps // 2)
    local = {"local_steps": lambda task: ob.LocalSteps(max_gap=4, double_every=task.steps // 20)}

    def adam(name: str, **options: Any) -> Rule:
        made = _library(ob.OnebitAdam, freeze_step=warm_up, **options)
        return Rule(name, "library", made, 0.0, "adamw95" if name.endswith("95") else "adamw")

    def lamb(name: str, **options: Any) -> Rule:
        return Rule(name, "library", _library(ob.OnebitLamb, freeze_step=warm_up, **options), 0.0, "lamb")

    def zero_one(name: str, **options: Any) -> Rule:
        made = _library(ob.ZeroOneAdam, **{"freeze_step": warm_up, **options})
        return Rule(name, "library", made, 0.0, "adamw95" if name.endswith("95") else "adamw")

    def binsgdm(name: str, **options: Any) -> Rule:
        made = _library(ob.BinSGDM, **options)
        return Rule(name, "library", made, 0.0, "sign", "binsgdm_floor")

    def separated(name: str, twin: str, **options: Any) -> Rule:
        return Rule(name, "stacked", lambda p, lr, task: Separated(p, lr, task, **options), 0.0, twin)

    both: dict[str, Any] = {"freeze": True, "compress": True}

    rules = [
        Rule("adamw", "dense", _dense_adam(BETAS), 2e-3),
        Rule("adamw95", "dense", _dense_adam(BETAS95), 2e-3),
        Rule("lamb", "dense", lambda p, lr, task: ob.OnebitLamb(p, lr=lr), 1e-2),
        Rule("sign", "dense", lambda p, lr, task: SignDescent(p, lr, lion=False), 1e-3),
        Rule("lion", "dense", lambda p, lr, task: SignDescent(p, lr, lion=True), 1e-3),
        # 1-bit Adam
        adam("onebit_adam"),
        adam("onebit_adam_95", betas=BETAS95),
        adam("onebit_adam_published", recipe="published"),
        adam("onebit_adam_never_refreshed", refresh="never"),
        adam("onebit_adam_floor_0.01", denominator_floor=0.01),
        adam("onebit_adam_no_bias_correction", bias_correction=False),
        Rule("onebit_adam_plain_momentum", "recorded", _not_made, 0.0, "adamw"),  # momenta are exchanged, not steps
        # 1-bit LAMB
        lamb("onebit_lamb"),
        # 0/1 Adam
        zero_one("zero_one_adam"),
        zero_one("zero_one_adam_95", betas=BETAS95),
        zero_one("zero_one_adam_published", recipe="published"),
        zero_one("zero_one_adam_never_refreshed", refresh="never"),
        zero_one("zero_one_adam_freeze_at_half", freeze_step=half),
        zero_one("zero_one_adam_local_4", **local),
        Rule("zero_one_adam_plain_momentum", "recorded", _not_made, 0.0, "adamw"),
        # BinSGDM
        binsgdm("binsgdm"),
        binsgdm("binsgdm_published", recipe="published"),
        # with a floor of the denominators, the root mean square of their block: its rate was searched, and all others are compared with it
        Rule("binsgdm_floor", "recorded", _not_made, 1e-3, "sign"),
        *(
            Rule(f"binsgdm_{part}", "recorded", _not_made, 0.0, "sign", "binsgdm_floor")
            for part in ("random_independent", "drops_overflow", "one_beta")
        ),
        # what costs how much, one at a time
        separated("adam_frozen_dense", "adamw", freeze=True, compress=False),
        separated("adam_learning_compressed", "adamw", freeze=False, compress=True),
        separated("adam_frozen_compressed", "adamw", **both),
        separated("adam_frozen_plain", "adamw", **both, preconditioned=False),
        separated("adam_refreshed", "adamw", **both, refresh=16),
        separated("adam_refreshed_plain", "adamw", **both, refresh=16, preconditioned=False),
        separated("adam_refreshed_floor_0.01", "adamw", **both, refresh=16, floor=0.01),
        separated("adam_frozen_compressed_95", "adamw95", **both, betas=BETAS95),
        separated("adam_refreshed_95", "adamw95", **both, refresh=16, betas=BETAS95),
        separated("lamb_frozen_dense", "lamb", freeze=True, compress=False, lamb=True),
        separated("lamb_frozen_ratio", "lamb", freeze=False, compress=False, lamb=True, ratio="frozen"),
        separated("lamb_learning_compressed", "lamb", freeze=False, compress=True, lamb=True),
        separated("lamb_frozen_compressed", "lamb", **both, lamb=True),
        separated("lamb_refreshed", "lamb", **both, refresh=16, lamb=True),
    ]
    return {rule.name: rule for rule in rules}


RULES = _rules()


# ----- one run --------------------------------------------------------------------------------------------------------


def run_one(task_name: str, rule_name: str, lr: float, seed: int) -> dict[str, Any]:
    """Trains once; see ``RUNS`` for what is kept: validation loss, training losses, bytes per parameter and step, or the error."""
    torch.set_num_threads(1)
    task, rule = TASKS[task_name], RULES[rule_name]
    began = time.perf_counter()
    row: dict[str, Any] = {"task": task_name, "rule": rule_name, "lr": lr, "seed": seed, "precision": PRECISION}
    try:
        train = {"dense": train_dense, "stacked": _run_stacked, "library": train_world}[rule.family]
        row |= train(Run(task, lr, seed, DEVICE, PRECISION), rule.make).result()
    except Exception as error:  # a rule that diverges may raise; that is a result
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row | {"seconds": round(time.perf_counter() - began)}


def _run_stacked(run: Run, make: Callable[..., Any]) -> Watch:
    task = run.task
    train, validation = (tokens.to(DEVICE) for tokens in corpus(task))
    model = GPT(task, run.seed).to(DEVICE)
    params = list(model.parameters())
    optimizer = make(params, run.lr, task)
    watch = Watch(run, validation)
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.lr(run.lr, step)
        grads, total = [], 0.0
        for rows in batch(task, train, run.seed, step).chunk(task.workers):
            optimizer.zero_grad()
            total += backward(model, rows, PRECISION).item() / task.workers
            grads.append([p.grad for p in params])
        optimizer.step_on([torch.stack(row) for row in zip(*grads, strict=True)])
        watch.losses.append(total)
    watch.check(task.steps, model, optimizer.bytes_sent(task))
    return watch


# ----- the study ------------------------------------------------------------------------------------------------------


def read_runs() -> list[dict[str, Any]]:
    """The runs there are."""
    if not RUNS.exists():
        return []
    return [json.loads(line) for line in RUNS.read_text().splitlines() if line]


def loss_of(run: Mapping[str, Any]) -> float:
    """Validation loss; infinite where the run ended in an error or diverged."""
    loss = run.get("loss", math.inf)
    return loss if math.isfinite(loss) else math.inf


def search(runs: Iterable[Mapping[str, Any]], rule: Rule) -> tuple[float, bool]:
    """The learning rate to run next, or the best one; and whether it is bracketed (then nothing is left to search)."""
    found: dict[float, float] = {}
    for run in runs:
        if run["rule"] == rule.name:
            found[run["lr"]] = min(found.get(run["lr"], math.inf), loss_of(run))
    if not found:
        return rule.lr, False
    best = min(found, key=lambda lr: (found[lr], lr))
    for lr in (best / 2, best * 2):
        if lr not in found:
            return lr, False
    return best, True


def best_lr(task: str, rule: Rule, runs: Sequence[Mapping[str, Any]]) -> tuple[float, bool]:
    """``search`` in the task and for the rule whose learning rates count for this one."""
    while not rule.lr:
        rule = RULES[rule.like or rule.twin]
    home = TASKS[task].rates or task
    return search([run for run in runs if run["task"] == home], rule)


def wanted(task: str, rule: Rule, runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """``(lr, seed)`` of the runs of a rule that can be made now; empty: it is complete, or another has to be searched first."""
    if rule.family == "recorded" or (rule.family == "dense" and TASKS[task].like):
        return []
    lr, bracketed = best_lr(task, rule, runs)
    if not bracketed:
        return [(lr, SEARCH_SEED)] if rule.lr and not TASKS[task].rates else []
    own = (run for run in runs if run["task"] == task and run["rule"] == rule.name and run["lr"] == lr)
    done = {run["seed"] for run in own if run["precision"] == PRECISION}
    return [(lr, seed) for seed in SEEDS if seed not in done]


def study(task: str, only: str, minutes: float | None, jobs: int) -> None:
    """Runs what is missing of a task, as many runs at once as ``jobs``; a line of progress for each."""
    corpus(TASKS[task])  # made once, not by every process
    rules = [rule for rule in RULES.values() if re.search(only, rule.name) and (not rule.tasks or task in rule.tasks)]
    began, running = time.monotonic(), dict[Future[dict[str, Any]], tuple[str, float, int]]()
    with ProcessPoolExecutor(jobs, mp.get_context("spawn")) as pool:
        while True:
            runs, claimed = read_runs(), set(running.values())
            late = minutes is not None and time.monotonic() - began > 60 * minutes
            todo = [
                (rule.name, lr, seed)
                for rule in rules
                for lr, seed in wanted(task, rule, runs)
                if (rule.name, lr, seed) not in claimed
            ]
            todo.sort(key=lambda spec: spec[2])  # all rules of a seed before those of the next
            for spec in todo[: 0 if late else jobs - len(running)]:
                running[pool.submit(run_one, task, *spec)] = spec
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                row = future.result()
                RUNS.parent.mkdir(parents=True, exist_ok=True)
                with RUNS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                outcome = row.get("error") or f"loss {row['loss']:.4f}, worst {row['worst']:.2f}"
                elapsed = (time.monotonic() - began) / 60
                print(
                    f"{elapsed:6.1f} min  {task} {row['rule']:32} lr {row['lr']:<8g} seed {row['seed']}  {outcome} "
                    f"({row['seconds']} s; {len(todo)} or more to go)",
                    flush=True,
                )


# ----- the tables -----------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, which a single value has not."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and rule at its learning rate: loss, and the gap to its twin and to the default rule in per cent.

    Gaps are those of pairs: the same seed, and the same precision of matrix products. ``pairs`` says how many there are.
    """
    losses: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    rows = []
    for task in TASKS:
        for rule in RULES.values():
            home = (TASKS[task].like or task) if rule.family == "dense" else task
            lr, bracketed = best_lr(task, rule, runs)
            own = [run for run in runs if run["task"] == home and run["rule"] == rule.name and run["lr"] == lr]
            own = [run for run in own if run["seed"] in SEEDS]
            if not bracketed or not own:
                continue
            found = losses[task, rule.name] = {(run["seed"], run["precision"]): loss_of(run) for run in own}
            used = [run for run in own if "loss" in run]
            row: dict[str, Any] = {"task": task, "rule": rule.name, "lr": lr, "loss": _mean(list(found.values()))}
            row["worst"] = max((run["worst"] for run in used), default=math.inf)
            row["bytes"] = statistics.fmean(run["bytes"] for run in used) if used else math.nan
            default = next(
                (name for name in ("onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm") if name in rule.name), ""
            )
            for key, other in (("gap", rule.twin), ("against_default", default if default != rule.name else "")):
                reference = losses.get((task, other), {})
                gaps = [100 * (loss / reference[pair] - 1) for pair, loss in found.items() if pair in reference]
                if gaps:
                    row[key] = _mean(gaps)
                    row["pairs"] = len(gaps)
            rows.append(row)
    return rows


def _shown(value: tuple[float, float | None] | None, form: str) -> str:
    """``mean +- error``, as far as they are known."""
    return " +- ".join(f"{number:{form}}" for number in value or () if number is not None).replace("+- +", "+- ")


def table(runs: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table per task and writes ``SUMMARY``."""
    rows = summary(runs)
    for task in TASKS:
        own = [row for row in rows if row["task"] == task]
        if all(RULES[row["rule"]].family == "dense" for row in own):
            continue
        print(f"\n{task}: {TASKS[task]}\n")
        print(
            f"{'rule':32} {'lr':>8} {'loss':>14} {'gap %':>14} {'to default %':>14} {'pairs':>5} {'worst':>6} {'B/param':>7}"
        )
        for row in own:
            gap, default = (_shown(row.get(key), "+.2f") for key in ("gap", "against_default"))
            print(
                f"{row['rule']:32} {row['lr']:8.2g} {_shown(row['loss'], '.3f'):>14} {gap:>14} {default:>14} "
                f"{row.get('pairs', ''):>5} {row['worst']:6.2f} {row['bytes']:7.3f}"
            )
    SUMMARY.write_text(
        json.dumps({"tasks": {n: shown_fields(t) for n, t in TASKS.items()}, "rows": rows}, indent=1) + "\n"
    )


def plot(runs: Sequence[Mapping[str, Any]], task: str) -> None:
    """Training loss of the four algorithms, a panel for each dense twin, over the seeds that all of it have run; writes ``PLOT``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[str]] = {}
    for name in ("onebit_adam", "zero_one_adam", "onebit_lamb", "binsgdm"):
        panels.setdefault(RULES[name].twin, []).append(name)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True)
    for axis, (twin, names) in zip(axes, panels.items(), strict=True):
        found: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = {}
        for name in (twin, *names):
            lr, _ = best_lr(task, RULES[name], runs)
            own = (r for r in runs if (r["task"], r["rule"], r["lr"]) == (task, name, lr) and "curve" in r)
            if of_rule := {(run["seed"], run["precision"]): run for run in own if run["seed"] in SEEDS}:
                found[name] = of_rule
        shared = set.intersection(*(set(of_rule) for of_rule in found.values())) if found else set()
        if not shared:
            continue
        for name, of_rule in found.items():
            own = [of_rule[pair] for pair in sorted(shared)]
            curve = [statistics.fmean(values) for values in zip(*(run["curve"] for run in own), strict=True)]
            steps = [(k + 0.5) * TASKS[task].steps / len(curve) for k in range(len(curve))]
            label = f"{name}, {statistics.fmean(run['bytes'] for run in own):.2f} bytes"
            axis.plot(steps, curve, "--" if name == twin else "-", label=label)
        axis.set_xlabel("step")
        axis.legend(fontsize=8, title="bytes sent per parameter and step", title_fontsize=8)
    axes[0].set_ylabel("training loss")
    figure.suptitle(f"{task}: {TASKS[task].workers} workers", fontsize=10)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=120)
    plt.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is missing of a task")
    run.add_argument("--task", choices=TASKS, default="T1")
    run.add_argument("--only", default=".", help="regular expression: rules to run")
    run.add_argument("--minutes", type=float, help="begin no run after so long")
    run.add_argument("--jobs", type=int, default=2, help="runs at once")
    commands.add_parser("table", help="print the tables and write the summary")
    drawn = commands.add_parser("plot", help="draw the training losses of a task (needs matplotlib)")
    drawn.add_argument("--task", choices=TASKS, default="T1short")
    arguments = parser.parse_args()
    if arguments.command == "run":
        study(arguments.task, arguments.only, arguments.minutes, arguments.jobs)
    elif arguments.command == "plot":
        plot(read_runs(), arguments.task)
        return
    table(read_runs())


if __name__ == "__main__":
    main()
