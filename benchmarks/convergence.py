"""Convergence study: do the compressed optimizers reach the loss of their uncompressed twins, on real data?

    python benchmarks/convergence.py                     run what is missing, then write the report
    python benchmarks/convergence.py --only text digits  some studies only
    python benchmarks/convergence.py --report            tables and plots from the runs there are

Every run is one line of ``benchmarks/results/convergence_runs.jsonl``; a run that is there is not repeated, so an
interrupted study continues. ``convergence.json`` holds the summary, ``convergence_*.png`` the plots, docs/convergence-tables.md every
row; docs/convergence.md discusses them. Nothing is downloaded: the data are the standard library's text and scikit-learn's digits.

The global batch is the same whatever the number of workers, so an uncompressed optimizer computes the same run in every
world (up to the order of sums) and is run once, on one process. Compressed worlds of 2 and 4 workers run in real
processes joined by gloo, larger ones (and the search for lr at 4) as a ``SimulatedWorld``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing as mp
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from data import load_corpus  # noqa: E402  (lives in examples/)

from lightning_onebit.comm import SimulatedGroup, SimulatedWorld  # noqa: E402
from lightning_onebit.optim import BinSGDM, OnebitAdam, OnebitLamb, ZeroOneAdam  # noqa: E402

RESULTS = HERE / "results"
RUNS = RESULTS / "convergence_runs.jsonl"
TABLES = HERE.parent / "docs" / "convergence-tables.md"
TABLES_HEAD = """# Convergence: every row

Written by `python benchmarks/convergence.py --report` from
[`convergence_runs.jsonl`](../benchmarks/results/convergence_runs.jsonl); [convergence](convergence.md) says what was run and what it
means. Options name what differs from the defaults of the study. Losses and accuracies are means over seeds, losses ± their standard
deviation; gaps to the uncompressed twin are means ± standard error, seed by seed, each optimizer at its own best lr, the twin at the one
that is best on the row's seeds. `convergence.py` does not repeat the rows marked †, or not with all of their seeds: they were run as
defaults of then, or to find those of now."""

Params = dict[str, Tensor]
Options = tuple[tuple[str, float | str], ...]
SEEDS = (0, 1, 2)
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.func", "lightning_onebit.optim"]


# ----- tasks: data, model, loss ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A learning problem of fixed length. The batch is global: n workers take 1/n of its rows each.

    Attributes:
        name: of the task.
        steps: optimizer steps of a run.
        batch: rows per step over all workers.
        vocabulary: tokens (0: the digits images).
        width: of the residual stream or hidden layer.
        layers: transformer layers.
        context: predictions per row.
        final_lr: at the end of the cosine, as a share of the peak.
    """

    name: str
    steps: int
    batch: int
    vocabulary: int = 0
    width: int = 48
    layers: int = 2
    context: int = 32
    final_lr: float = 0.1

    @property
    def is_text(self) -> bool:
        """Whether rows are windows of text."""
        return self.vocabulary > 0

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        draws = torch.Generator().manual_seed(1000 + seed)

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(*shape, generator=draws) * std

        if not self.is_text:
            sizes, params = (PIXELS, 2 * self.width, self.width, 10), {}
            for k, (fan_in, fan_out) in enumerate(pairwise(sizes)):
                params[f"{k}.weight"] = normal(fan_out, fan_in, std=(2 / fan_in) ** 0.5)
                params[f"{k}.bias"] = torch.zeros(fan_out)
            return params
        width = self.width
        params = {"token": normal(self.vocabulary, width, std=0.5), "position": normal(self.context, width, std=0.1)}
        for k in range(self.layers):
            params |= {
                f"{k}.norm1": torch.ones(width),
                f"{k}.qkv": normal(3 * width, width, std=width**-0.5),
                f"{k}.project": normal(width, width, std=(2 * self.layers * width) ** -0.5),
                f"{k}.norm2": torch.ones(width),
                f"{k}.up": normal(4 * width, width, std=width**-0.5),
                f"{k}.up_bias": torch.zeros(4 * width),
                f"{k}.down": normal(width, 4 * width, std=(2 * self.layers * width) ** -0.5),
            }
        return params | {"norm": torch.ones(width), "head": normal(self.vocabulary, width, std=0.02)}

    def loss(self, params: Params, rows: Tensor) -> Tensor:
        """Mean cross-entropy in nats over rows: windows ``(batch, context + 1)``, or images with a label behind them."""
        logits, targets = self.predict(params, rows)
        return F.cross_entropy(logits, targets)

    def predict(self, params: Params, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(predictions, classes)`` and targets."""
        if not self.is_text:
            x = rows[:, :PIXELS]
            for k in range(3):
                x = F.linear(x, params[f"{k}.weight"], params[f"{k}.bias"])
                x = x if k == 2 else F.relu(x)
            return x, rows[:, PIXELS].long()
        heads, width = 4, self.width
        x = F.embedding(rows[:, :-1], params["token"]) + params["position"]
        batch, time_steps = x.shape[:2]
        mask = torch.ones(time_steps, time_steps, dtype=torch.bool).triu(1)
        for k in range(self.layers):
            normed = F.layer_norm(x, (width,)) * params[f"{k}.norm1"]
            qkv = F.linear(normed, params[f"{k}.qkv"]).reshape(batch, time_steps, 3, heads, width // heads)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            scores = (query @ key.transpose(-1, -2)) * (width // heads) ** -0.5
            attended = scores.masked_fill(mask, -math.inf).softmax(-1) @ value
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, time_steps, width), params[f"{k}.project"])
            hidden = F.gelu(
                F.linear(F.layer_norm(x, (width,)) * params[f"{k}.norm2"], params[f"{k}.up"], params[f"{k}.up_bias"]),
                approximate="tanh",
            )
            x = x + F.linear(hidden, params[f"{k}.down"])
        logits = F.linear(F.layer_norm(x, (width,)) * params["norm"], params["head"])
        return logits.reshape(batch * time_steps, -1), rows[:, 1:].reshape(-1)

    def rows(self, seed: int, step: int) -> Tensor:
        """The global batch of a step: the same for every optimizer and every number of workers."""
        draws = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        train, _ = self.data()
        if not self.is_text:
            return train[torch.randint(len(train), (self.batch,), generator=draws)]
        starts = torch.randint(len(train) - self.context - 1, (self.batch,), generator=draws)
        return train[starts[:, None] + torch.arange(self.context + 1)]

    def data(self) -> tuple[Tensor, Tensor]:
        """Training data (text or rows) and validation rows."""
        if not self.is_text:
            return _digits()
        train, validation = _bytes() if self.vocabulary == 256 else _words(self.vocabulary)
        windows = min(768, (len(validation) - 1) // self.context)
        starts = torch.arange(windows) * self.context
        return train, validation[starts[:, None] + torch.arange(self.context + 1)]


@lru_cache
def _bytes() -> tuple[Tensor, Tensor]:
    train, validation = load_corpus(4 << 20, 64 << 10)
    return train.long(), validation.long()


@lru_cache
def _words(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Words, digits, spaces and signs; the rarer ones share token 0. Counts of the tail are single figures per run."""
    cut = re.compile(r"[A-Za-z]+|_+|\d|\n *| +|[^\w\s]|.")
    train, validation = (bytes(text.byte()).decode("utf-8", "replace") for text in load_corpus(4 << 20, 128 << 10))
    counts = Counter(cut.findall(train))
    kept = sorted(counts, key=lambda token: (-counts[token], token))[: vocabulary - 1]
    index = {token: i + 1 for i, token in enumerate(kept)}
    return tuple(torch.tensor([index.get(t, 0) for t in cut.findall(text)]) for text in (train, validation))  # type: ignore[return-value]


PIXELS = 100
"""Of a digit on its canvas: 8 by 8, shifted by up to one pixel either way."""


@lru_cache
def _digits() -> tuple[Tensor, Tensor]:
    """Every image at nine places of a 10 by 10 canvas: enough rows for a loss that does not rest on a few images.

    Some pixels are 0 in all images (dead inputs), those of the rim in almost all (nearly dead ones).
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order] / 16
    labels = torch.from_numpy(digits.target).float()[order, None]
    shifts = [F.pad(images, (dx, 2 - dx, dy, 2 - dy)).flatten(1) for dx in range(3) for dy in range(3)]
    rows = torch.stack([torch.cat([image, labels], 1) for image in shifts])
    return rows[:, :1347].flatten(0, 1), rows[:, 1347:].flatten(0, 1)


TASKS = {
    task.name: task
    for task in (
        Task("text", steps=200, batch=64, vocabulary=256),
        Task("large_batch", steps=600, batch=192, vocabulary=256, final_lr=0.0),
        Task("words", steps=200, batch=16, vocabulary=4096, width=32),
        Task("digits", steps=1200, batch=64, width=48, final_lr=0.0),
    )
}


# ----- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One training run; equal jobs give equal results.

    Attributes:
        task: name in ``TASKS``.
        optimizer: name in ``OPTIMIZERS``.
        lr: peak learning rate.
        seed: of parameters and data order.
        workers: ranks; 1 for what is not compressed.
        real: in processes joined by gloo, rather than simulated.
        options: of the optimizer, beyond its defaults in this study.
    """

    task: str
    optimizer: str
    lr: float
    seed: int = 0
    workers: int = 1
    real: bool = False
    options: Options = ()

    @property
    def key(self) -> str:
        """Identity of the run, with what its task and optimizer are made of."""
        return json.dumps([asdict(self), asdict(TASKS[self.task])], sort_keys=True)


def schedule(task: Task, step: int) -> float:
    """Factor of lr at step 0, 1, ...: linear over the first 5 %, then a cosine down to ``task.final_lr``."""
    rise = max(1, task.steps // 20)
    if step < rise:
        return (step + 1) / rise
    cosine = 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, task.steps - rise)))
    return task.final_lr + (1 - task.final_lr) * cosine


FREEZE = 0.2
"""Share of dense steps (1-bit Adam, 1-bit LAMB), and of steps before 0/1 Adam's variance freeze."""


def make_optimizer(job: Job, params: list[torch.nn.Parameter], group: SimulatedGroup | None) -> torch.optim.Optimizer:
    """The optimizer of a job on one rank."""
    steps = TASKS[job.task].steps
    options: dict[str, Any] = dict(job.options)
    common: dict[str, Any] = {"lr": job.lr, "weight_decay": 0.01}
    # a fifth of the run, and the published 32,678 of 152,511 steps, which is also about a fifth
    share = max(1, round(FREEZE * steps))
    if job.optimizer == "adamw":
        return torch.optim.AdamW(params, **common, **options)
    if job.optimizer == "sgd":
        return torch.optim.SGD(params, job.lr, momentum=0.9, **options)
    if job.optimizer == "lamb":
        # dense LAMB is the warm-up of 1-bit LAMB, which never ends in a world of one
        return OnebitLamb(params, **common, **options)
    common |= {"process_group": group, "timeout": 300.0}
    if job.optimizer == "onebit_adam":
        return OnebitAdam(params, **common, **{"freeze_step": share, **options})
    if job.optimizer == "onebit_lamb":
        return OnebitLamb(params, **common, **{"freeze_step": share, **options})
    if job.optimizer == "zero_one_adam":
        local = {} if options.get("local_step_clipper") == 1 else {"local_step_scaler": share}
        return ZeroOneAdam(params, **common, **{"var_freeze_step": share, **local, **options})
    if job.optimizer == "binsgdm":
        return BinSGDM(params, seed=job.seed, **common, **options)
    raise ValueError(f"optimizer={job.optimizer!r} is unknown")


class Observer:
    """What one rank notes about its run."""

    def __init__(self, job: Job, params: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.task = TASKS[job.task]
        self.params, self.optimizer = params, optimizer
        self.curve: list[tuple[int, float]] = []
        self.max_update = 0.0
        self._before: list[Tensor] = []

    def before(self) -> None:
        """Remembers the weights."""
        if self.task.name in ("words", "digits"):
            self._before = [p.detach().clone() for p in self.params.values()]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Notes the largest update in units of lr, and now and then the validation loss on a part."""
        lr = self.optimizer.param_groups[0]["lr"]
        for old, p in zip(self._before, self.params.values(), strict=False):
            self.max_update = max(self.max_update, float((p - old).abs().max()) / lr)
        if (step + 1) % (self.task.steps // 10) == 0:
            self.curve.append((step + 1, self._loss(128)))

    def _loss(self, rows: int) -> float:
        _, validation = self.task.data()
        # 0/1 Adam between synchronisations: the model that all ranks share
        shared = getattr(self.optimizer, "consensus", nullcontext)
        with torch.no_grad(), shared():
            return float(self.task.loss(dict(self.params), validation[:rows]))

    @torch.no_grad()
    def result(self) -> dict[str, Any]:
        """Outcome of the run."""
        _, validation = self.task.data()
        with getattr(self.optimizer, "consensus", nullcontext)():
            logits, targets = self.task.predict(dict(self.params), validation)
            out: dict[str, Any] = {
                "loss": float(F.cross_entropy(logits, targets)),
                "accuracy": float((logits.argmax(-1) == targets).float().mean()),
                "max_weight": max(float(p.abs().max()) for p in self.params.values()),
            }
        out |= {"curve": self.curve, "max_update": self.max_update or None}
        ledger = getattr(self.optimizer, "ledger", None)
        if ledger is not None and ledger.total.bytes_sent:
            out |= {"ratio": ledger.ratio, "dense_steps": ledger.dense_steps, "skipped": ledger.total.skipped}
        return out


def train(
    job: Job,
    params: dict[str, torch.nn.Parameter],
    rank: int,
    group: SimulatedGroup | None,
    backward: Callable[[int], None],
) -> dict[str, Any] | None:
    """Trains one rank; ``backward(step)`` leaves the gradients of the rank's rows in ``.grad``."""
    optimizer = make_optimizer(job, list(params.values()), group)
    observer = Observer(job, params, optimizer) if rank == 0 else None
    task = TASKS[job.task]
    for step in range(task.steps):
        for param_group in optimizer.param_groups:
            param_group["lr"] = job.lr * schedule(task, step)
        optimizer.zero_grad()
        backward(step)
        if observer is not None:
            observer.before()
        optimizer.step()
        if observer is not None:
            observer.after(step)
    return observer.result() if observer is not None else None


def _fresh(job: Job) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value) for name, value in TASKS[job.task].init(job.seed).items()}


def train_process(job: Job, rank: int, workers: int) -> dict[str, Any] | None:
    """One rank of a real world (or the only one)."""
    task, params = TASKS[job.task], _fresh(job)
    count = task.batch // workers

    def backward(step: int) -> None:
        rows = task.rows(job.seed, step)[rank * count : (rank + 1) * count]
        task.loss(dict(params), rows).backward()

    return train(job, params, rank, None, backward)


def train_simulated(job: Job) -> dict[str, Any] | None:
    """All ranks in this process. Rank 0 computes everybody's gradients in one batched pass over stacked parameters."""
    task, n = TASKS[job.task], job.workers
    stacked = {name: value.expand(n, *value.shape).clone() for name, value in task.init(job.seed).items()}
    gradients = vmap(grad_and_value(task.loss), in_dims=(0, 0))
    shared: Params = {}

    def rank_main(group: SimulatedGroup) -> dict[str, Any] | None:
        params = {name: torch.nn.Parameter(value[group.rank]) for name, value in stacked.items()}

        def backward(step: int) -> None:
            group.barrier()
            if group.rank == 0:
                rows = task.rows(job.seed, step)
                shared.update(gradients(stacked, rows.view(n, task.batch // n, *rows.shape[1:]))[0])
            group.barrier()
            for name, p in params.items():
                p.grad = shared[name][group.rank]

        return train(job, params, group.rank, group, backward)

    with on_one_core():
        return SimulatedWorld(n, timeout=600).run(rank_main)[0]


#: of this process of a study
_core: int | None = None


@contextmanager
def on_one_core() -> Iterator[None]:
    """Threads of ranks take turns: on one core 64 of them take less than half the time that they take on two."""
    if _core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _real_rank(job: Job, rank: int, store: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=job.workers, timeout=timedelta(seconds=600)
    )
    result = train_process(job, rank, job.workers)
    if rank == 0:
        answer.send(result)
    dist.barrier()
    dist.destroy_process_group()


def train_real(job: Job) -> dict[str, Any] | None:
    """A world of processes joined by gloo."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_real_rank, args=(job, rank, f"{folder}/store", theirs), daemon=True)
            for rank in range(job.workers)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            if not ours.poll(1800):
                raise TimeoutError(f"{job} did not finish in 1800 s")
            return ours.recv()
        except EOFError:
            raise RuntimeError(f"a rank of {job} died; its traceback is above") from None
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def run_job(job: Job, runs: Path | None = None) -> dict[str, Any]:
    """Runs a job (or finds its result) and returns its record; ``runs``: another file than the study's."""
    runs = runs or RUNS
    for record in read_runs(runs):
        if record["key"] == job.key:
            return record
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        if job.workers == 1:
            result = train_process(job, 0, 1)
        elif job.real:
            result = train_real(job)
        else:
            result = train_simulated(job)
    except FloatingPointError:  # diverged: too many steps in a row without a finite gradient
        result = {"loss": math.inf, "accuracy": 0.0, "max_weight": math.inf, "curve": [], "max_update": math.inf}
    assert result is not None
    if not math.isfinite(result["loss"]):
        result["loss"] = math.inf
    record = {"key": job.key, **asdict(job), **result, "seconds": round(time.perf_counter() - start, 1)}
    runs.parent.mkdir(exist_ok=True)
    with runs.open("a") as file:  # one write of one line: runs of several processes do not mix
        file.write(json.dumps(record) + "\n")
    return record


def read_runs(runs: Path | None = None) -> Iterator[dict[str, Any]]:
    """All records there are, of the study or in another file."""
    runs = runs or RUNS
    if runs.exists():
        for line in runs.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


# ----- the studies ----------------------------------------------------------------------------------------------------


def rung(k: float) -> float:
    """The shared grid of learning rates: ``1e-3 * 2**(k/2)``."""
    return float(f"{1e-3 * 2 ** (k / 2):.4g}")


@dataclass(frozen=True)
class Chain:
    """An optimizer on a task: the search for its lr, then more seeds at the best.

    Attributes:
        task: name.
        optimizer: name.
        workers: ranks during the search.
        options: of the optimizer.
        start: rung of the grid where the search starts.
        also: further worlds ``(workers, real, seeds)`` at the best lr.
        also_options: further options of these worlds.
        also_rungs: rungs from the best at which these worlds are run, so that they have a search of their own.
        variants: further options, all seeds at the best lr.
        refine: search the half steps too.
        fine: and their neighbours, a factor of 2**(1/4) away.
        seeds: seeds at the best lr.
        search: seeds of the search, whose mean loss decides.
    """

    task: str
    optimizer: str
    workers: int = 1
    options: Options = ()
    start: int = 6
    also: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()
    also_options: Options = ()
    also_rungs: tuple[float, ...] = (0,)
    variants: tuple[Options, ...] = ()
    refine: bool = True
    fine: bool = False
    seeds: tuple[int, ...] = SEEDS
    search: tuple[int, ...] = (0,)


def run_chain(chain: Chain, run: Callable[[Job], dict[str, Any]] | None = None) -> float:
    """Finds the best lr (rungs a factor of 2 apart until the best is inside, then a factor of sqrt 2 and less), then all else.

    Args:
        chain: what to run.
        run: gives a job's record (None: ``run_job``).

    Returns:
        The best lr.
    """
    run = run or run_job
    losses: dict[float, float] = {}

    def job(lr: float, seed: int, options: Options = chain.options) -> Job:
        return Job(chain.task, chain.optimizer, lr, seed, chain.workers, False, options)

    def loss(k: float) -> float:
        if k not in losses:
            losses[k] = statistics.fmean(run(job(rung(k), seed))["loss"] for seed in chain.search)
        return losses[k]

    best: float = chain.start
    while (winner := min([best, best - 2, best + 2], key=loss)) != best:
        best = winner
    if chain.refine:
        best = min([best, best - 1, best + 1], key=loss)
    if chain.fine:
        best = min([best, best - 0.5, best + 0.5], key=loss)
    lr = rung(best)
    for seed in chain.seeds:
        run(job(lr, seed))
        for options in chain.variants:
            run(job(lr, seed, options))
    also_options = (*chain.options, *chain.also_options)
    for (workers, real, seeds), away in itertools.product(chain.also, chain.also_rungs):
        for seed in seeds:
            run(Job(chain.task, chain.optimizer, rung(best + away), seed, workers, real, also_options))
    return lr


UNGUARDED: tuple[Options, ...] = (
    (("denominator_floor", 0.0),),
    (("draws", "independent"),),
    (("magnitude_beta", 0.7),),
    (("overflow", "drop"),),
    (("server", "random"),),
)
# with a memory of magnitudes ten times as long as that of the momentum, or thirty, and not a hundred
SHORTER: Options = (("magnitude_beta", 0.97),)
THIRTY: Options = (("magnitude_beta", 0.99),)
DROPPED: Options = (*SHORTER, ("overflow", "drop"))
PAPERS_BINSGDM: Options = (
    *(("beta", 0.7), ("denominator_floor", 0.0), ("draws", "independent")),
    *(("magnitude_beta", 0.7), ("overflow", "drop"), ("server", "random")),
)
BETAS = (0.5, 0.8, 0.9, 0.95)  # besides the default, 0.7
# runs of seconds, whose loss varies by 5 % between seeds: these search, and more of them place the gaps that matter
DIGITS_SEEDS, MANY_SEEDS, MOST_SEEDS = tuple(range(8)), tuple(range(24)), tuple(range(48))
# as many as there was time for, where 64 workers have one image each
THREE_DOZEN, FIVE_DOZEN, TEN_DOZEN = tuple(range(36)), tuple(range(60)), tuple(range(120))
ALL_SEEDS = tuple(range(96))  # and these where a gap of the default options lies close to its target
TWICE_ALL = tuple(range(192))  # and where it still does then
FIVE_SEEDS, TEN_SEEDS, TWELVE_SEEDS = tuple(range(5)), tuple(range(10)), tuple(range(12))
# gaps as large as their target: 1-bit LAMB's with four workers
NINE_SEEDS = tuple(range(9))
SIXTEEN_SEEDS = tuple(range(16))  # search where eight find another best than more do
DEFAULT_FLOOR = 0.1
HALVES: Options = (("residual_dtype", "bfloat16"),)
SHORT: Options = (("denominator_dtype", "bfloat16"),)
RECIPE: Options = (("max_coeff", 0.3),)  # LAMB's own for BERT
FROZEN_RATIOS: Options = (("trust_ratio", "frozen"),)  # 1-bit LAMB as published
FLOORS = (0.0, 0.01, 0.03)  # besides the default, which every other run has
# 1-bit Adam as published keeps what has frozen, and compresses the momentum itself
FROZEN: Options = (("refresh_interval", "never"),)
MOMENTUM: Options = (("preconditioned", False), *FROZEN)
# so does 0/1 Adam, whose variance is an average of refreshes; and the same with steps compressed from the start
# (so do refreshes while lr rises, which all count)
ALL_COUNT: Options = (("var_rise_steps", 0),)
PAPERS_ZERO_ONE: Options = (*MOMENTUM, ("var_decay", "refresh"), *ALL_COUNT)
STEPS: Options = (("preconditioned", True), *FROZEN, ("var_decay", "refresh"), *ALL_COUNT)
# 0/1 Adam with its variance refreshed to the end of the run, hence without local steps: as an average of refreshes, and over time
TO_THE_END: Options = (("preconditioned", True), ("var_decay", "refresh"), ("var_freeze_step", 1200), *ALL_COUNT)
OVER_TIME: Options = (("preconditioned", True), ("var_freeze_step", 1200), *ALL_COUNT)
# 0/1 Adam whose refreshes grow rarer as soon as lr has risen, in 60 steps, and not after four times as many
RISEN: Options = (("var_rise_steps", 60),)
# whatever lr does, after 64 of them in the place of 16
DENSER: Options = (*ALL_COUNT, ("var_update_scaler", 64))
# and whose steps before the freeze all are (of 240, but for the last few)
ALL_DENSE: Options = (*ALL_COUNT, ("var_update_scaler", 236))
# blocks sent with a quarter more than their root mean square, by workers and servers; by default 1-bit LAMB's servers send half more, of
# four workers or more, and so do its workers, of 32 or more, and both of 1-bit Adam's, of 32 or more
LARGER: Options = (("scale_factor", 1.25),)
# blocks sent with their root mean square, as 1-bit Adam of fewer than 32 workers sends them by default
UNIT: Options = (("scale_factor", 1.0),)
# a quarter more, and 1-bit LAMB's ratios measured in every tenth step, and not in every second
SELDOM: Options = (("ratio_interval", 10), *LARGER)
# 1-bit Adam whose frozen variance is refreshed by 4 dense steps now and then
REFRESHES, SHORT_REFRESHES = (("refresh_interval", 100),), (("refresh_interval", 40),)


def studies() -> dict[str, list[Chain]]:
    """Chains by study. A search that is listed twice is answered by its first runs."""
    floors: tuple[Options, ...] = tuple((("denominator_floor", phi),) for phi in FLOORS)
    momentum_floors: tuple[Options, ...] = tuple((*floor, *MOMENTUM) for floor in floors)
    frozen_floors: tuple[Options, ...] = tuple((*floor, *FROZEN) for floor in floors)

    def published(beta: float, server: str = "random") -> Options:
        """BinSGDM without this library's floor, stratified draws, longer memory of magnitudes, kept overflow and feedback."""
        changed = {"beta": beta, "magnitude_beta": beta, "server": server}
        return tuple((name, changed.get(name, value)) for name, value in PAPERS_BINSGDM)

    # what is computed is the same in processes as simulated (tests/test_simulation.py): few seeds show it, but on digits
    two, four, many = (2, True, SEEDS), (4, True, SEEDS), (4, True, MANY_SEEDS)
    one_of_four = (4, True, (0,))
    sixteen, sixty_four = (16, False, SEEDS), (64, False, SEEDS)

    def digits(name: str, workers: int = 4, start: int = 8, options: Options = (), **more: Any) -> Chain:
        # the search by the mean of all seeds, where one seed says little
        common: dict[str, Any] = {"refine": False, "seeds": DIGITS_SEEDS, "search": DIGITS_SEEDS}
        return Chain("digits", name, workers, options, start, **{**common, **more})

    def large_batch(options: Options = ()) -> tuple[Chain, Chain]:
        """1-bit LAMB with the default clip of its ratios, and with that of LAMB's recipe."""
        name = ("large_batch", "onebit_lamb", 4)
        return (
            Chain(*name, options, start=9, fine=True, seeds=NINE_SEEDS, also=(two, four, sixteen), search=SEEDS),
            Chain(*name, (*RECIPE, *options), start=10, also=(two, sixteen, sixty_four)),
        )

    def sharp(name: str, workers: int = 4, **more: Any) -> Chain:
        # LAMB's best on digits: half a rung more or less costs 2 %
        return digits(name, workers, refine=True, fine=True, search=SIXTEEN_SEEDS, **more)

    return {
        "text": [
            Chain("text", "adamw", seeds=tuple(range(9))),
            Chain("text", "onebit_adam", 4, variants=floors[1:], also=(two, four, sixteen, sixty_four)),
            Chain("text", "onebit_adam", 4, also=(sixty_four,), also_options=UNIT),
            Chain(
                *("text", "zero_one_adam", 4),
                seeds=NINE_SEEDS,
                also=(two, four, (16, False, NINE_SEEDS), (64, False, NINE_SEEDS)),
            ),
            Chain("text", "binsgdm", 4, start=8, refine=False, also=(two, four, sixteen)),
            Chain("text", "binsgdm", 64, start=10, refine=False),
        ],
        # the paper's rule
        "binsgdm": [
            Chain("text", "binsgdm", 4, published(0.7, "mean"), refine=False, also=(sixteen,)),
            Chain("text", "binsgdm", 64, published(0.7, "mean"), start=8),
            Chain("text", "binsgdm", 4, published(0.7), refine=False, also=((2, True, (0,)), sixteen)),
            *(Chain("text", "binsgdm", 4, published(beta), refine=False) for beta in BETAS),
            digits("binsgdm", options=published(0.7, "mean"), start=6),
            digits("binsgdm", options=published(0.7), start=6),
        ],
        "lamb": [
            Chain("large_batch", "lamb", start=10, fine=True, seeds=NINE_SEEDS, search=SEEDS),
            Chain("large_batch", "lamb", 1, RECIPE, start=10),
            *large_batch(),
            # as published; with the default max_coeff, 10, it stops training at the lr after its best
            Chain("large_batch", "onebit_lamb", 4, (*RECIPE, *FROZEN_RATIOS), start=10),
            Chain("large_batch", "onebit_lamb", 4, FROZEN_RATIOS, start=10, seeds=(0, 1)),
        ],
        "digits": [
            # at three lr: best on seeds 0 to 7 is the largest of them, on all the one between
            digits("adamw", 1, refine=True, seeds=ALL_SEEDS, also=((1, False, TWICE_ALL),), also_rungs=(-2, -1, 0)),
            digits(
                "onebit_adam",
                refine=True,
                also=((2, True, MANY_SEEDS), (4, False, MOST_SEEDS), (16, False, MANY_SEEDS)),
                also_rungs=(-1, 0),
            ),
            digits("onebit_adam", seeds=ALL_SEEDS, also=(many, (16, False, ALL_SEEDS), (64, False, TEN_DOZEN))),
            digits("onebit_adam", seeds=MOST_SEEDS, variants=(LARGER,)),
            digits("onebit_adam", options=FROZEN, variants=frozen_floors),
            digits(
                *("onebit_adam", 4, 8, FROZEN),
                refine=True,
                seeds=MOST_SEEDS,
                also=((2, True, MANY_SEEDS), (4, False, MOST_SEEDS), (16, False, MANY_SEEDS)),
                also_rungs=(-1, 0),
            ),
            *(
                digits(
                    *("zero_one_adam", 4, 8, options),
                    seeds=ALL_SEEDS,
                    also=((4, False, MOST_SEEDS),),
                    also_rungs=(0, 1),
                )
                for options in ((), RISEN, ALL_COUNT, DENSER)
            ),
            digits(
                "zero_one_adam",
                seeds=ALL_SEEDS,
                also=((2, True, ALL_SEEDS), (4, True, MOST_SEEDS), (16, False, ALL_SEEDS), (64, False, MOST_SEEDS)),
            ),
            digits(
                "zero_one_adam",
                options=RISEN,
                seeds=ALL_SEEDS,
                also=((2, True, MANY_SEEDS), many, (16, False, TWICE_ALL), (64, False, MANY_SEEDS)),
            ),
            # the neighbours of that lr with 16 workers
            digits("zero_one_adam", options=RISEN, also=((16, False, MOST_SEEDS),), also_rungs=(1,)),
            digits("zero_one_adam", options=RISEN, also=((16, False, TEN_SEEDS),), also_rungs=(-1,)),
            digits("zero_one_adam", options=DENSER, also=((16, False, MOST_SEEDS),)),
            digits("zero_one_adam", 16, options=ALL_DENSE, seeds=ALL_SEEDS, also=((64, False, MANY_SEEDS),)),
            digits("onebit_adam", also=((64, False, FIVE_DOZEN),), also_options=UNIT),
            # the neighbours with 64 workers; the better one of each with all the seeds
            digits("onebit_adam", also=((64, False, DIGITS_SEEDS),), also_options=UNIT, also_rungs=(-1,)),
            digits("onebit_adam", also=((64, False, MANY_SEEDS),), also_options=UNIT, also_rungs=(1,)),
            digits("zero_one_adam", options=RISEN, also=((64, False, DIGITS_SEEDS),), also_rungs=(1,)),
            digits("zero_one_adam", options=RISEN, also=((64, False, MANY_SEEDS),), also_rungs=(-1,)),
            sharp("lamb", 1, seeds=ALL_SEEDS, also=((1, False, TWICE_ALL),), also_rungs=(-0.5, 0, 0.5)),
            sharp(
                "onebit_lamb",
                seeds=ALL_SEEDS,
                also=((4, True, MANY_SEEDS),),
            ),
            # other worlds at LAMB's own best lr, half a rung below that of 4 workers
            sharp(
                "onebit_lamb",
                also=(
                    (2, True, MOST_SEEDS),
                    (4, False, ALL_SEEDS),
                    (16, False, MOST_SEEDS),
                    (64, False, ALL_SEEDS),
                ),
                also_rungs=(-0.5,),
            ),
            digits("onebit_lamb", options=FROZEN_RATIOS, seeds=MOST_SEEDS),
            digits("sgd", 1, 16),
            digits("binsgdm", refine=True, seeds=MOST_SEEDS, also=(many,)),
            digits("binsgdm", also=((2, True, MANY_SEEDS),)),
            digits(
                *("binsgdm", 16, 10),
                refine=True,
                seeds=MANY_SEEDS,
                search=SEEDS,
            ),
            digits("binsgdm", 64, 10, refine=True, seeds=MANY_SEEDS, search=(0, 1)),
        ],
        # 1-bit LAMB whose servers send blocks with the scale that its workers have
        "servers": [
            *large_batch(LARGER),
            sharp(
                *("onebit_lamb", 4),
                options=LARGER,
                seeds=ALL_SEEDS,
                also=((4, True, MOST_SEEDS), (16, False, MOST_SEEDS), (64, False, TWELVE_SEEDS)),
            ),
        ],
        # and whose ratios are measured in every tenth step besides, and not in every second
        "seldom": [
            *large_batch(SELDOM),
            sharp(
                "onebit_lamb",
                options=SELDOM,
                seeds=ALL_SEEDS,
                # on seeds 0 to 15 the two are level, on all of them the lower one is better
                also=((4, False, ALL_SEEDS), (2, True, ALL_SEEDS), four, (16, False, MANY_SEEDS)),
                also_rungs=(-0.5, 0),
            ),
            # in other worlds more seeds, at the better lr only, and with 64 workers its neighbours
            sharp(
                "onebit_lamb",
                options=SELDOM,
                also=((4, True, TWICE_ALL), (4, False, TWICE_ALL), (16, False, ALL_SEEDS), (64, False, THREE_DOZEN)),
                also_rungs=(-0.5,),
            ),
            sharp("onebit_lamb", options=SELDOM, also=((64, False, DIGITS_SEEDS),), also_rungs=(-1, 0)),
        ],
        # BinSGDM with a shorter memory of magnitudes, and with that losing what signs cannot say
        "overflow": [
            Chain("text", "binsgdm", 4, SHORTER, start=8, refine=False),
            Chain("text", "binsgdm", 64, SHORTER, start=10, refine=False, seeds=(0, 1)),
            digits("binsgdm", 16, options=SHORTER, start=9, seeds=SEEDS, search=SEEDS),
            Chain("text", "binsgdm", 4, DROPPED, start=8, refine=False, also=(two, one_of_four, sixteen)),
            Chain("text", "binsgdm", 64, DROPPED, start=10, refine=False),
            digits("binsgdm", options=DROPPED, refine=True, seeds=MANY_SEEDS, also=((2, True, SEEDS),)),
            digits("binsgdm", 16, options=DROPPED, start=10, seeds=SEEDS, search=SEEDS),
            Chain("text", "binsgdm", 4, THIRTY, start=8, refine=False, also=(two, four, sixteen)),
            Chain("text", "binsgdm", 64, THIRTY, start=10, refine=False),
            Chain("words", "binsgdm", 4, THIRTY, start=8, refine=False),
            digits("binsgdm", options=THIRTY, refine=True, seeds=MOST_SEEDS, also=(many,)),
            digits("binsgdm", options=THIRTY, also=((2, True, MANY_SEEDS),)),
            digits("binsgdm", 16, options=THIRTY, start=10, refine=True, seeds=tuple(range(15)), search=SEEDS),
            digits("binsgdm", 64, options=THIRTY, start=10, refine=True, seeds=MANY_SEEDS, search=(0, 1)),
        ],
        "words": [
            Chain("words", "adamw", refine=False),
            Chain("words", "onebit_adam", 4, refine=False, variants=floors),
            Chain("words", "binsgdm", 4, start=8, refine=False),
        ],
        # what decides the gaps: each with one thing changed
        "causes": [
            digits(
                *("onebit_adam", 4, 8, FROZEN),
                refine=True,
                seeds=MOST_SEEDS,
                variants=((("freeze_step", 480), *FROZEN),),
            ),
            # each guard of BinSGDM alone taken away
            digits("binsgdm", refine=True, seeds=FIVE_SEEDS, variants=UNGUARDED),
            Chain("text", "binsgdm", 4, start=8, refine=False, variants=UNGUARDED),
        ],
        "refreshes": [
            digits(
                *("onebit_adam", 4, 8, REFRESHES),
                refine=True,
                seeds=MANY_SEEDS,
                variants=((("freeze_step", 120), *REFRESHES),),
            ),
            digits("onebit_adam", options=REFRESHES, seeds=MANY_SEEDS, variants=((("freeze_step", 120), *REFRESHES),)),
            digits("onebit_adam", options=REFRESHES, seeds=MOST_SEEDS),
            Chain(
                *("text", "onebit_adam", 4, SHORT_REFRESHES),
                start=8,
                refine=False,
                also=(sixty_four,),
                also_options=UNIT,
            ),
        ],
        # 1-bit Adam by the paper's rule
        "momentum": [
            Chain(
                *("text", "onebit_adam", 4, MOMENTUM),
                variants=momentum_floors[1:],
                also=(two, one_of_four, sixteen, sixty_four),
            ),
            Chain("words", "onebit_adam", 4, MOMENTUM, refine=False, variants=momentum_floors),
            digits(
                "onebit_adam", options=MOMENTUM, variants=momentum_floors, also=((2, True, SEEDS), (16, False, SEEDS))
            ),
            digits("onebit_adam", options=MOMENTUM, seeds=MANY_SEEDS, variants=((("freeze_step", 480), *MOMENTUM),)),
            digits("onebit_adam", options=MOMENTUM, refine=True, seeds=MANY_SEEDS),
            digits("onebit_adam", options=MOMENTUM, seeds=MOST_SEEDS),
        ],
        # 0/1 Adam by the paper's rules, and with one thing changed
        "zero_one": [
            Chain(
                *("text", "zero_one_adam", 4, PAPERS_ZERO_ONE),
                variants=tuple((*floor, *PAPERS_ZERO_ONE) for floor in floors[1:]),
                also=((2, True, (0,)), one_of_four, sixteen, (64, False, NINE_SEEDS)),
            ),
            digits("zero_one_adam", options=PAPERS_ZERO_ONE, refine=True, seeds=MANY_SEEDS),
            digits(
                *("zero_one_adam", 4, 8, PAPERS_ZERO_ONE),
                seeds=MOST_SEEDS,
                variants=(
                    (("local_step_clipper", 1), *PAPERS_ZERO_ONE),
                    (("preconditioned", False), ("var_decay", "refresh"), ("var_freeze_step", 1200), *ALL_COUNT),
                ),
            ),
            Chain(
                *("text", "zero_one_adam", 4, STEPS),
                start=8,
                also=((2, True, (0,)), one_of_four, sixteen, sixty_four),
            ),
            digits("zero_one_adam", options=STEPS, refine=True, seeds=MANY_SEEDS),
            digits("zero_one_adam", options=STEPS, seeds=MOST_SEEDS),
            Chain(
                *("text", "zero_one_adam", 4, LARGER),
                seeds=NINE_SEEDS,
                also=((2, True, (0,)), one_of_four, (16, False, NINE_SEEDS), (64, False, NINE_SEEDS)),
            ),
            digits(
                "zero_one_adam",
                options=(*LARGER, *RISEN),
                seeds=ALL_SEEDS,
                also=((2, True, MANY_SEEDS), one_of_four, (16, False, ALL_SEEDS)),
            ),
            # the variance refreshed to the end, as an average of refreshes and of steps, at one lr
            digits("zero_one_adam", options=OVER_TIME, seeds=MOST_SEEDS, variants=(TO_THE_END,)),
            digits("zero_one_adam", options=OVER_TIME, refine=True, seeds=MANY_SEEDS),
        ],
        # residuals in half the memory, at the lr of whole ones
        "residuals": [
            Chain("text", "onebit_adam", 4, variants=(HALVES, SHORT, (*SHORT, *HALVES))),
            Chain("words", "onebit_adam", 4, refine=False, variants=(HALVES, SHORT, (*SHORT, *HALVES))),
            digits("onebit_adam", seeds=MOST_SEEDS, variants=(SHORT, (*SHORT, *HALVES))),
        ],
    }


def _init_worker(started: Any) -> None:
    global _core
    torch.set_num_threads(1)
    with started.get_lock():
        index = started.value
        started.value += 1
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        _core = cores[index % len(cores)]


def run_studies(names: Iterable[str], processes: int) -> None:
    """Runs what is missing of some studies, ``processes`` chains at a time."""
    chains = [(name, chain) for name in names for chain in studies()[name]]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    failures = 0
    with ProcessPoolExecutor(processes, context, initializer=_init_worker, initargs=(context.Value("i", 0),)) as pool:
        futures = {pool.submit(run_chain, chain): (name, chain) for name, chain in chains}
        for future in as_completed(futures):
            name, chain = futures[future]
            error = future.exception()
            failures += error is not None
            outcome = f"failed: {error!r}" if error is not None else f"best lr {future.result():g}"
            print(
                f"{name}: {chain.task} {chain.optimizer} {dict(chain.options)} x{chain.workers}: {outcome}", flush=True
            )
    if failures:
        raise SystemExit(f"{failures} chains failed; their messages are above")


# ----- the report -----------------------------------------------------------------------------------------------------

TWINS = {"onebit_adam": "adamw", "zero_one_adam": "adamw", "onebit_lamb": "lamb", "binsgdm": "adamw"}
TARGETS = {"onebit_adam": 0.01, "zero_one_adam": 0.01, "onebit_lamb": 0.01, "binsgdm": 0.02}

World = tuple[str, str, Options, int, bool]  # task, optimizer, options, workers, real


@dataclass(frozen=True)
class Row:
    """An optimizer in a world at its best lr.

    Attributes:
        world: task, optimizer, options, workers, whether in real processes.
        lr: the best.
        runs: the records at this lr, by seed.
        gap: mean over seeds of ``loss / twin's loss - 1`` (None: it has no twin).
        gap_error: standard error of that mean (None: fewer than two seeds).
        repeated: whether the studies, run anew, would make all of these runs.
    """

    world: World
    lr: float
    runs: tuple[dict[str, Any], ...]
    gap: float | None
    gap_error: float | None = None
    repeated: bool = True

    def mean(self, name: str) -> float:
        """Mean of a number over seeds."""
        return statistics.fmean(run[name] for run in self.runs)

    @property
    def spread(self) -> float:
        """Standard deviation of the loss over seeds (0 for one seed)."""
        losses = [run["loss"] for run in self.runs if math.isfinite(run["loss"])]
        return statistics.stdev(losses) if len(losses) > 1 else 0.0

    @property
    def outcome(self) -> str:
        """Mean and spread of the loss; how many runs diverged, if any did."""
        lost = sum(not math.isfinite(run["loss"]) for run in self.runs)
        if lost:
            return f"diverged ({lost} of {len(self.runs)})"
        return f"{self.mean('loss'):.4f}" + (f" ± {self.spread:.4f}" if len(self.runs) > 1 else "")

    @property
    def label(self) -> str:
        """Optimizer and options."""
        return " ".join([self.world[1], *(f"{name}={value}" for name, value in self.world[2])])

    @property
    def met(self) -> bool | None:
        """Whether the gap is within the target."""
        return None if self.gap is None else self.gap <= TARGETS[self.world[1]]


def keys_of_studies(records: Iterable[dict[str, Any]]) -> set[str]:
    """Keys of all runs that the studies make, with lr found by the losses of ``records`` (one without a run counts as infinitely bad)."""
    losses = {record["key"]: record["loss"] for record in records}
    keys = set()

    def look_up(job: Job) -> dict[str, Any]:
        keys.add(job.key)
        return {"loss": losses.get(job.key, math.inf)}

    for chain in itertools.chain.from_iterable(studies().values()):
        run_chain(chain, look_up)
    return keys


def summarise(records: Collection[dict[str, Any]]) -> list[Row]:
    """One row per world, at the lr with the most seeds and, among those, the lowest loss; its twin at that which is best on its seeds."""
    worlds: dict[World, dict[float, dict[int, dict[str, Any]]]] = {}
    for record in records:
        options = tuple((name, value) for name, value in record["options"])
        world = (record["task"], record["optimizer"], options, record["workers"], record["real"])
        worlds.setdefault(world, {}).setdefault(record["lr"], {})[record["seed"]] = record
    best: dict[World, tuple[float, dict[int, dict[str, Any]]]] = {}
    for world, by_lr in worlds.items():
        best[world] = min(
            by_lr.items(), key=lambda item: (-len(item[1]), statistics.fmean(r["loss"] for r in item[1].values()))
        )
    rows, made = [], keys_of_studies(records)

    def order(item: tuple[World, Any]) -> tuple[Any, ...]:
        task, optimizer, options, workers, real = item[0]
        # values of an option need not be of one type
        return task, optimizer, [(name, repr(value)) for name, value in options], workers, real

    for world, (lr, by_seed) in sorted(best.items(), key=order):
        task, optimizer, *_ = world
        shared = tuple(option for option in world[2] if option[0] == "max_coeff")  # LAMB's as well
        twin_world = (task, TWINS.get(optimizer, ""), shared, 1, False)
        _, twin = best.get(twin_world, (0.0, {}))
        # at the lr that is best for it on these very seeds, where it was run with all of them at more than one (a seed alone says
        # nothing): its best lr differs between sets of seeds, and a row must not gain by that
        rivals = [
            runs for runs in worlds.get(twin_world, {}).values() if len(by_seed) > 1 and by_seed.keys() <= runs.keys()
        ]
        if rivals:
            twin = min(rivals, key=lambda runs: statistics.fmean(runs[seed]["loss"] for seed in by_seed))
        gaps = [by_seed[s]["loss"] / twin[s]["loss"] - 1 for s in sorted(by_seed.keys() & twin.keys())]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 and all(map(math.isfinite, gaps)) else None
        gap = statistics.fmean(gaps) if gaps else None
        runs = tuple(by_seed[s] for s in sorted(by_seed))
        rows.append(Row(world, lr, runs, gap, error, all(run["key"] in made for run in runs)))
    return rows


def table(rows: Iterable[Row]) -> str:
    """Markdown table of losses."""
    lines = [
        "| optimizer | workers | best lr | seeds | validation loss | accuracy | gap to twin | target | bytes saved |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        _, optimizer, _, workers, real = row.world
        world = "1 (whole batch)" if workers == 1 else f"{workers} {'processes' if real else 'simulated'}"
        gap = "" if row.gap is None or math.isinf(row.gap) else f"{row.gap:+.2%}"
        gap += "" if row.gap_error is None else f" ± {row.gap_error:.2%}"
        target = "" if row.gap is None else f"{TARGETS[optimizer]:.0%} {'met' if row.met else '**missed**'}"
        ratio = f"{row.mean('ratio'):.1f}x" if all("ratio" in run for run in row.runs) else ""
        lines.append(
            f"| {row.label}{'' if row.repeated else ' †'} | {world} | {row.lr:g} | {len(row.runs)} | {row.outcome} | "
            f"{row.mean('accuracy'):.3f} | {gap} | {target} | {ratio} |"
        )
    return "\n".join(lines)


def floor_table(rows: Iterable[Row]) -> str:
    """Markdown table of the denominator floor's effect."""
    lines = [
        "| task | phi | lr | seeds | validation loss | max abs x | max abs update / lr |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        # a dense AdamW has no floor
        phi = dict(row.world[2]).get("denominator_floor", DEFAULT_FLOOR if row.world[1] == "onebit_adam" else row.label)
        weight = max(run["max_weight"] for run in row.runs)
        updates = [run["max_update"] for run in row.runs if run["max_update"] is not None]  # not noted on all tasks
        lines.append(
            f"| {row.world[0]} | {phi} | {row.lr:g} | {len(row.runs)} | {row.outcome} | "
            f"{weight:.1f} | {f'{max(updates):.1f}' if updates else ''} |"
        )
    return "\n".join(lines)


def _in_main_table(row: Row) -> bool:
    """Not one of the floors that were only tried."""
    return "denominator_floor" not in dict(row.world[2]) or row.world[1] == "binsgdm"


def _in_floor_study(row: Row) -> bool:
    task, optimizer, options, workers, real = row.world
    if task not in ("words", "digits", "text") or real:
        return False
    return optimizer == "adamw" or (
        optimizer == "onebit_adam"
        and workers == 4
        # on digits with what had frozen
        and tuple(option for option in options if option[0] != "denominator_floor")
        == (FROZEN if task == "digits" else ())
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def tables(rows: Sequence[Row]) -> str:
    """The page of all rows, one table per task and that of the denominator floors."""
    parts = [TABLES_HEAD]
    for name in TASKS:
        own = [row for row in rows if row.world[0] == name and _in_main_table(row)]
        if own:
            parts.append(f"## {name}\n\n{table(own)}")
    floors = [row for row in rows if _in_floor_study(row)]
    if floors:
        parts.append(f"## denominator floor (1-bit Adam, 4 workers)\n\n{floor_table(floors)}")
    return "\n\n".join(parts) + "\n"


def report() -> None:
    """Writes ``convergence.json``, the page of tables and the plots."""
    records = list({record["key"]: record for record in read_runs()}.values())
    rows = summarise(records)
    summary = [
        {
            "task": row.world[0],
            "optimizer": row.world[1],
            "options": dict(row.world[2]),
            "workers": row.world[3],
            "real_processes": row.world[4],
            "lr": row.lr,
            "seeds": [run["seed"] for run in row.runs],
            # null: diverged
            "losses": [_finite(run["loss"]) for run in row.runs],
            "mean_loss": _finite(row.mean("loss")),
            "gap_to_twin": _finite(row.gap),
            "gap_standard_error": row.gap_error,
            "target_met": row.met,
            "repeated": row.repeated,
        }
        for row in rows
    ]
    tasks = {name: asdict(task) for name, task in TASKS.items()}
    text = json.dumps({"tasks": tasks, "rows": summary, "runs": len(records), "torch": torch.__version__}, indent=1)
    (RESULTS / "convergence.json").write_text(text + "\n")
    text = tables(rows)
    TABLES.write_text(text)
    plot(records, rows)
    print(text.removeprefix(TABLES_HEAD).strip())


# curves of the plot by workers
WORKER_CURVES = {
    "binsgdm": "BinSGDM",
    " ".join(["binsgdm", *(f"{name}={value}" for name, value in PAPERS_BINSGDM)]): "BinSGDM, the paper's rule",
    "onebit_adam": "1-bit Adam",
    "zero_one_adam": "0/1 Adam",
    "onebit_lamb": "1-bit LAMB",
}


def plot(records: list[dict[str, Any]], rows: list[Row]) -> None:
    """Loss curves, loss by lr, gap by number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    plain = [row for row in rows if _in_main_table(row)]
    # the tables have every option; curves of more than a few would hide each other
    shown = [row for row in plain if {name for name, _ in row.world[2]} <= {"max_coeff", "trust_ratio"}]
    names = [name for name in TASKS if any(row.world[0] == name for row in shown)]
    figure, axes = plt.subplots(2, len(names), figsize=(4.6 * len(names), 7.6), squeeze=False)
    palette = plt.get_cmap("tab20").colors  # strong colours first, then the pale ones
    palette = (*palette[::2], *palette[1::2])
    colours = {label: palette[i % 20] for i, label in enumerate(sorted({row.label for row in shown}))}
    for (above, below), name in zip(axes.T, names, strict=True):
        for row in shown:
            if row.world[0] != name or row.world[3] not in (1, 4) or row.world[4]:
                continue
            curves = [dict(map(tuple, run["curve"])) for run in row.runs if run["curve"]]
            steps = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
            style = "--" if row.world[3] == 1 else "-"
            means = [statistics.fmean(c[step] for c in curves) for step in steps]
            above.plot(steps, means, style, color=colours[row.label], label=row.label)
            tried = sorted(
                (r["lr"], r["loss"])
                for r in records
                if (r["task"], r["optimizer"], r["workers"], r["real"], r["seed"])
                == (name, *row.world[1:2], *row.world[3:], 0)
                and tuple(map(tuple, r["options"])) == row.world[2]
                and math.isfinite(r["loss"])
            )
            below.plot(*zip(*tried, strict=True), style, marker=".", color=colours[row.label], label=row.label)
        above.set_title(f"{name}: validation loss (part)\n4 workers, best lr", fontsize=10)
        below.set_title(f"{name}: final loss by peak lr, seed 0", fontsize=10)
        above.set(xlabel="step", yscale="log")
        below.set(xlabel="lr", xscale="log", yscale="log")
        above.legend(fontsize=7, loc="upper right")
        below.xaxis.set_minor_formatter(NullFormatter())
        for axis in (above, below):
            axis.yaxis.set_major_formatter(ScalarFormatter())
            low, high = axis.get_ylim()
            if high > 5 * low:
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_formatter(NullFormatter() if high > 5 * low else ScalarFormatter())
            axis.tick_params(axis="y", which="both", labelsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "convergence_curves.png", dpi=110)
    plt.close(figure)

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for axis, name in zip(panels, ("text", "digits"), strict=True):
        shown = [
            row for row in plain if row.world[0] == name and row.world[2] in ((), PAPERS_BINSGDM) and not row.world[4]
        ]
        for k, label in enumerate(WORKER_CURVES):
            points = sorted(
                (row.world[3], 100 * row.gap, 100 * (row.gap_error or 0.0))
                for row in shown
                if row.label == label and row.gap is not None and math.isfinite(row.gap)
            )
            if len(points) > 1:
                x, y, error = zip(*points, strict=True)
                x = [workers * 1.03 ** (k - 2) for workers in x]  # side by side
                axis.errorbar(x, y, error, marker="ov^sD"[k], color=f"C{k}", label=WORKER_CURVES[label], capsize=2)
        axis.axhspan(-100, 1, color="0.92", zorder=0, label="within 1 %")
        axis.axhline(2, color="0.6", linestyle=":", label="2 % (BinSGDM)")
        axis.set(title=f"{name}: gap to the uncompressed twin", xlabel="simulated workers", ylim=(-7, 8))
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 16, 64], ["4", "16", "64"])
        axis.legend(fontsize=8, loc="upper left")
    panels[0].set_ylabel("%, mean and standard error over seeds")
    figure.tight_layout()
    figure.savefig(RESULTS / "convergence_workers.png", dpi=110)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(studies()), default=list(studies()), help="studies to run")
    parser.add_argument("--report", action="store_true", help="run nothing: tables and plots from the runs there are")
    parser.add_argument("--processes", type=int, default=2, help="chains at a time, each on one core")
    options = parser.parse_args()
    if not options.report:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run_studies(options.only, options.processes)
    report()


if __name__ == "__main__":
    main()
