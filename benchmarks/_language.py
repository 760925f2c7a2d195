"""Small language models, their data and training loops: what ``rules.py`` and ``frontier.py`` share."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import site
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from data import load_corpus, standard_library_files

from lightning_onebit.comm import SimulatedWorld

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_onebit"
_Task = TypeVar("_Task", bound="Task")


@dataclass(frozen=True)
class Task:
    """A language model and the length of its training.

    Attributes:
        name: of the task.
        workers: ranks.
        rows: windows that one worker sees in a step.
        context: predictions per window.
        steps: optimizer steps.
        rise: steps in which the learning rate rises; a cosine follows, to 0.1 % of the peak.
        warm_up: steps before second moments freeze.
        vocabulary: byte-pair tokens; 256: bytes.
        width: of the residual stream.
        layers: transformer layers.
        heads: attention heads of a layer.
        std: of initial weights; those that write into the residual stream are smaller by the root of twice the layers.
        packages: tokens of the text of all installed packages to train on, some of them held out; 0: the standard library's text.
        demo: the model is that of ``examples/text_gpt.py``: rotary positions, embeddings that are not tied, weights of unit gain.
    """

    name: str
    workers: int
    rows: int
    context: int
    steps: int
    rise: int
    warm_up: int
    vocabulary: int
    width: int
    layers: int
    # with GPT-2's std of 0.02, for widths of 768 and more, small models learn attention hundreds of steps earlier or later by chance
    heads: int = field(default=4, kw_only=True, repr=False)
    std: float = field(default=0.05, kw_only=True, repr=False)
    packages: int = field(default=0, kw_only=True, repr=False)
    demo: bool = field(default=False, kw_only=True, repr=False)

    def lr(self, peak: float, step: int) -> float:
        """Learning rate of step 1, 2, ..."""
        if step <= self.rise:
            return peak * step / self.rise
        done = (step - self.rise) / (self.steps - self.rise)
        return peak * (0.5 * (1 + math.cos(math.pi * done)) + 1e-3)

    def of_length(self: _Task, steps: int) -> _Task:
        """The same task with another number of steps, in proportion rise and warm-up, of which a hundred steps stay, up to half of all."""
        rise, warm_up = (max(1, round(part * steps / self.steps)) for part in (self.rise, self.warm_up))
        warm_up = max(warm_up, min(self.warm_up, 100, steps // 2))
        return replace(self, steps=steps, rise=rise, warm_up=warm_up)


def shown_fields(task: Task) -> dict[str, Any]:
    """What a task's ``repr`` shows, by name."""
    return {of.name: getattr(task, of.name) for of in fields(task) if of.repr}


class GPT(nn.Module):
    """A small GPT with tied embeddings; ``forward`` gives the mean loss of ``(rows, context + 1)`` tokens."""

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__()
        width = task.width
        self.heads = task.heads
        self.token = nn.Embedding(task.vocabulary, width)
        self.position = nn.Embedding(task.context, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_attention": nn.LayerNorm(width),
                    "query_key_value": nn.Linear(width, 3 * width),
                    "project": nn.Linear(width, width),
                    "norm_feed_forward": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(task.layers)
        )
        draws = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = "project" in name or "down" in name
                p.data.normal_(std=task.std / (2 * task.layers) ** 0.5 if residual else task.std, generator=draws)
            elif "norm" not in name:
                p.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        x = self.token(tokens[:, :-1]) + self.position.weight
        for layer in self.layers:
            heads = layer["query_key_value"](layer["norm_attention"](x)).view(*x.shape[:2], 3, self.heads, -1)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + layer["project"](attended.transpose(1, 2).reshape(x.shape))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm_feed_forward"](x)), approximate="tanh"))
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), tokens[:, 1:].flatten())


class DemoGPT(nn.Module):
    """The demo's model, with the same ``forward`` as ``GPT``."""

    def __init__(self, task: Task, seed: int) -> None:
        from text_gpt import TextGPT

        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = TextGPT(task.layers, task.width, task.heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        return self.net.loss(tokens)


def model_of(task: Task, seed: int) -> nn.Module:
    """The task's model, with its first weights."""
    return (DemoGPT if task.demo else GPT)(task, seed)


# ----- data -----------------------------------------------------------------------------------------------------------


def corpus(task: Task) -> tuple[Tensor, Tensor]:
    """Training and validation tokens, int64; byte-pair tokens are kept in a file for the next run.

    They are cut by file, or by package where the task trains on those.
    """
    return _corpus(task.vocabulary, task.packages)


@lru_cache(maxsize=2)
def _corpus(vocabulary: int, packages: int) -> tuple[Tensor, Tensor]:
    if vocabulary == 256:
        train, validation = load_corpus()
        return train.long(), validation.long()
    path = CACHE / (f"packages_{vocabulary}_{packages}.pt" if packages else f"rules_{vocabulary}.pt")
    if not path.exists():
        parts = _packages(vocabulary, packages) if packages else _library(vocabulary)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(parts, temporary)
        os.replace(temporary, path)
    parts = torch.load(path)
    return parts["train"].long(), parts["validation"].long()


def text_id(task: Task) -> str:
    """Eight hexadecimal digits that say which text it is: losses on different ones are not to be compared."""
    digest = hashlib.sha256()
    for tokens in corpus(task):
        digest.update(tokens.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()[:8]


def _trained(vocabulary: int, texts: Sequence[str]) -> Any:
    """A byte-level byte-pair tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _encoded(bpe: Any, texts: Sequence[str], limit: int) -> Tensor:
    """Tokens of the texts, int32; of so many texts as give ``limit`` tokens."""
    parts: list[Tensor] = []
    size = 0
    for start in range(0, len(texts), 256):
        parts += [torch.tensor(piece.ids, dtype=torch.int32) for piece in bpe.encode_batch(texts[start : start + 256])]
        size += sum(map(len, parts[-256:]))
        if size >= limit:
            break
    return torch.cat(parts)[:limit]


def _library(vocabulary: int) -> dict[str, Tensor]:
    """The standard library and torch, cut by file."""
    files = standard_library_files() + sorted(Path(torch.__path__[0]).rglob("*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    texts: list[str] = []
    size = 0
    for k in order:
        texts.append(files[k].read_text(errors="replace")[:60_000])
        size += len(texts[-1])
        if size > 24e6:
            break
    validation, train = texts[: len(texts) // 40], texts[len(texts) // 40 :]
    bpe = _trained(vocabulary, train[::2])
    return {name: _encoded(bpe, part, 10**9) for name, part in (("train", train), ("validation", validation))}


def _package_files() -> Iterator[tuple[str, Path]]:
    """``(package, file)`` of the standard library and everything installed."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(site.getsitepackages())
    for root in sorted({Path(root).resolve() for root in roots}):
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            # tables that a program wrote, and other roots
            if not {"site-packages", "dist-packages", "encodings", "pydoc_data"} & set(inside):
                yield inside[0].removesuffix(".py"), path


def _packages(vocabulary: int, limit: int) -> dict[str, Tensor]:
    """Everything installed; a tenth of the packages, by a hash of their names, is held out."""
    files: dict[bool, list[Path]] = {True: [], False: []}
    for package, path in _package_files():
        files[hashlib.sha256(package.encode()).digest()[0] % 10 == 0].append(path)
    draws = torch.Generator().manual_seed(0)
    texts: dict[bool, list[str]] = {}
    for held_out, paths in files.items():
        texts[held_out], size, wanted = [], 0, 6 * limit // (20 if held_out else 1)
        for k in torch.randperm(len(paths), generator=draws).tolist():
            texts[held_out].append(paths[k].read_text(errors="replace")[:60_000])
            size += len(texts[held_out][-1])
            if size > wanted:
                break
    some, size = [], 0
    for text in texts[False]:
        some.append(text)
        size += len(text)
        if size > min(25e6, 2 * limit):
            break
    bpe = _trained(vocabulary, some)
    return {"train": _encoded(bpe, texts[False], limit), "validation": _encoded(bpe, texts[True], limit // 20)}


def batch(task: Task, tokens: Tensor, seed: int, step: int) -> Tensor:
    """The windows of a step, those of a worker together: int64 ``(workers * rows, context + 1)``."""
    draws = torch.Generator().manual_seed(seed * 10**6 + step)
    starts = torch.randint(len(tokens) - task.context - 1, (task.workers * task.rows, 1), generator=draws)
    return _windows(task, tokens, starts)


def _windows(task: Task, tokens: Tensor, starts: Tensor) -> Tensor:
    return tokens[starts.to(tokens.device) + torch.arange(task.context + 1, device=tokens.device)]


# ----- training -------------------------------------------------------------------------------------------------------


def backward(model: nn.Module, rows: Tensor, precision: str, parts: int = 1) -> Tensor:
    """Gradients of the mean loss, a part of the rows at a time; returns that loss, 0-d.

    ``precision`` is that of matrix products, ``"bf16"`` or ``"fp32"``.
    """
    total = torch.zeros((), device=rows.device)
    for part in rows.chunk(parts):
        # autocast belongs to the thread: here each worker enters its own
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(part) / parts
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def validation_loss(task: Task, model: nn.Module, tokens: Tensor, windows: int = 1024) -> float:
    """Mean loss over windows spread evenly over the validation text."""
    starts = torch.linspace(0, len(tokens) - task.context - 1, windows).long()[:, None]
    rows = _windows(task, tokens, starts)
    losses = [model(part) for part in rows.split(min(64, max(1, 8192 // task.context)))]
    return torch.stack(losses).double().mean().item()


class SignDescent(torch.optim.Optimizer):
    """``x -= lr * sign(p)`` with p the momentum of rate ``beta``, or Lion's interpolation (arXiv 2302.06675)."""

    def __init__(self, params: Iterable[Tensor], lr: float, *, lion: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.lion = lion

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step on averaged gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                if self.lion:
                    p.sub_(group["lr"] * torch.lerp(p.grad, m, 0.9).sign())
                    m.lerp_(p.grad, 0.01)
                else:
                    m.lerp_(p.grad, 0.3)
                    p.sub_(group["lr"] * m.sign())


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task: what is learned.
        lr: peak of the learning rate.
        seed: of weights and data.
        device: of model and data.
        precision: of matrix products in training, ``"bf16"`` or ``"fp32"``.
        checks: how often the model is validated, evenly spread; the last time is at the end.
    """

    task: Task
    lr: float
    seed: int
    device: torch.device
    precision: str
    checks: int = 1


class Watch:
    """What is seen of a run.

    Attributes:
        losses: of training, a mean over workers per step.
        validation: ``(step, loss)`` of the checks, on the same windows every time.
        loss: in the end, on four times the windows.
        sent: bytes that a rank has sent per parameter up to each check.
        step_seconds: mean seconds of a step between two checks, validation left out.
    """

    def __init__(self, run: Run, tokens: Tensor) -> None:
        self.run, self._tokens = run, tokens
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.loss = math.nan
        self.sent: list[float] = []
        self.step_seconds: list[float] = []
        self._due = {round(k * run.task.steps / run.checks) for k in range(1, run.checks + 1)}
        self._last, self._began = 0, time.perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        """Without the text, for other processes."""
        return self.__dict__ | {"_tokens": None}

    def due(self, step: int) -> bool:
        """Whether the model is to be checked after this step."""
        return step in self._due

    def check(self, step: int, model: nn.Module, sent: float) -> None:
        """Validates.

        Raises:
            FloatingPointError: the run has diverged, nothing more is to be learned from it.
        """
        task, device = self.run.task, self.run.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.step_seconds.append((time.perf_counter() - self._began) / (step - self._last))
        loss = validation_loss(task, model, self._tokens, 256)
        self.validation.append((step, round(loss, 5)))
        self.sent.append(round(sent, 4))
        if not math.isfinite(loss):
            raise FloatingPointError(f"diverged within {step} steps")
        if step == task.steps:
            self.loss = round(validation_loss(task, model, self._tokens), 5)
        self._last, self._began = step, time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Validation ``loss``, ``worst`` training loss after the first tenth, ``curve`` of training, ``bytes`` per parameter and step."""
        losses = self.losses
        width = max(1, len(losses) // 20)
        curve = [round(statistics.fmean(losses[k : k + width]), 4) for k in range(0, len(losses), width)]
        worst = round(max(losses[len(losses) // 10 :]), 3)
        nbytes = round(self.sent[-1] / self.run.task.steps, 4)
        return {"loss": self.loss, "worst": worst, "curve": curve, "bytes": nbytes}


def all_reduce_bytes(task: Task, element: float = 4.0) -> float:
    """Bytes per parameter that a rank sends in a ring all-reduce of elements of so many bytes."""
    return 2 * element * (task.workers - 1) / task.workers


def train_dense(run: Run, make: Callable[..., Any]) -> Watch:
    """Trains in one process, on the mean gradient of all workers; ``make(parameters, lr, task)`` gives the optimizer."""
    task = run.task
    train, validation = (tokens.to(run.device) for tokens in corpus(task))
    model = model_of(task, run.seed).to(run.device)
    optimizer = make(list(model.parameters()), run.lr, task)
    losses = torch.zeros(task.steps, device=run.device)
    watch, dense = Watch(run, validation), all_reduce_bytes(task)
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.lr(run.lr, step)
        optimizer.zero_grad()
        rows = batch(task, train, run.seed, step)
        losses[step - 1] = backward(model, rows, run.precision, max(1, len(rows) // 8))
        optimizer.step()
        if watch.due(step):
            watch.check(step, model, step * dense)
    watch.losses = losses.tolist()
    return watch


def train_world(run: Run, make: Callable[..., Any]) -> Watch:
    """Trains in a ``SimulatedWorld``.

    ``make(parameters, lr, task, group)`` gives a worker's optimizer: one of the library, or an ``Exchanging``.
    """
    task = run.task
    train, validation = (tokens.to(run.device) for tokens in corpus(task))
    first = model_of(task, run.seed).to(run.device)
    turn = threading.Lock()  # models that take turns are faster than models that share a core, and need less memory

    def worker(group: Any) -> Watch:
        with turn:
            model = copy.deepcopy(first)
        count = sum(p.numel() for p in model.parameters())
        optimizer = make(list(model.parameters()), run.lr, task, group)
        losses = torch.zeros(task.steps, device=run.device)
        watch = Watch(run, validation)
        for step in range(1, task.steps + 1):
            for param_group in optimizer.param_groups:
                param_group["lr"] = task.lr(run.lr, step)
            with turn:
                rows = batch(task, train, run.seed, step).chunk(task.workers)[group.rank]
                optimizer.zero_grad()
                losses[step - 1] = backward(model, rows, run.precision)
            optimizer.step()
            if step == task.steps:
                optimizer.synchronise()
            if group.rank == 0 and watch.due(step):
                with turn:
                    watch.check(step, model, bytes_sent(optimizer) / count)
        group.all_reduce(losses).wait()
        watch.losses = (losses / task.workers).tolist()
        return watch

    return SimulatedWorld(task.workers, timeout=600.0).run(worker)[0]


class Exchanging(torch.optim.Optimizer):
    """Base of optimizers that exchange by themselves in a ``SimulatedWorld``.

    Attributes:
        sent: bytes that this rank has sent, as an efficient implementation would.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, task: Task, group: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.task, self.group, self.sent = task, group, 0.0

    def synchronise(self) -> None:
        """Makes replicas equal."""


def bytes_sent(optimizer: Any) -> float:
    """Bytes that this rank has sent for gradients or momentum."""
    return optimizer.sent if isinstance(optimizer, Exchanging) else float(optimizer.ledger.total.bytes_sent)
