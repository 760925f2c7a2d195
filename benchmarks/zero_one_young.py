"""Do 1-bit Adam and 0/1 Adam keep AdamW's loss where the variance freezes after a few steps? A small GPT with a large vocabulary.

    python benchmarks/zero_one_young.py                 runs what is missing, then prints the table
    python benchmarks/zero_one_young.py --report        the table from the runs there are

Most rows of an embedding have a gradient in few steps, so their second moments are nearly 0 when a young variance freezes: where noise
or local steps are divided by them, weights jump. Four simulated workers of 256 tokens each, 60 steps, lr rises for 3 of them and falls to
0 along a cosine. The text is Python's and torch's own sources, in tokens of a byte-level BPE (``pip install tokenizers``). Every run is
an entry of ``results/zero_one_young.json`` and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, machine_info, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_onebit.comm import SimulatedWorld
from lightning_onebit.optim import OnebitAdam, ZeroOneAdam

REPORT = RESULTS / "zero_one_young.json"
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 8192, 64, 128, 2, 4
WORKERS, SEQUENCES, STEPS, RISE = 4, 4, 60, 3
LRS, SEEDS = (1e-3, 1e-2), (0, 1, 2)
BYTES, VALIDATION = 16_000_000, 20_000  # of text for the vocabulary; tokens held back
LOCAL: dict[str, Any] = {"local_step_scaler": 10, "local_step_clipper": 8}
PUBLISHED: dict[str, Any] = {"preconditioned": False, "refresh_interval": "never"}


def zero_one(freeze: int, *, local: bool, published: bool = False) -> Callable[..., torch.optim.Optimizer]:
    """0/1 Adam; options that have no effect before the 19th step are left out."""
    options = {"var_freeze_step": freeze, **(LOCAL if local else {"local_step_clipper": 1})}
    if published:
        options |= PUBLISHED | ({"var_decay": "refresh", "var_rise_steps": 0} if freeze >= 19 else {})
    return lambda params, lr, group: ZeroOneAdam(params, lr=lr, process_group=group, **options)


def rows() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Optimizers by name, made from parameters, lr and the group of workers."""
    made: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": lambda params, lr, group: torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    }
    for freeze in (10, 30):
        made[f"1-bit Adam, freeze at {freeze}"] = lambda params, lr, group, freeze=freeze: OnebitAdam(
            params, lr=lr, freeze_step=freeze, process_group=group
        )
        for rule, published in (("0/1 Adam", False), ("0/1 Adam as published", True)):
            made[f"{rule}, freeze at {freeze}"] = zero_one(freeze, local=False, published=published)
            made[f"{rule}, local steps, freeze at {freeze}"] = zero_one(freeze, local=True, published=published)
    return made


@lru_cache
def corpus() -> tuple[Tensor, Tensor]:
    """Token numbers for training and for validation."""
    cache = Path(tempfile.gettempdir()) / f"onebit_young_tokens_{VOCABULARY}.pt"
    if not cache.exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        roots = (os.path.dirname(os.__file__), os.path.dirname(torch.__path__[0]))
        files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
        texts: list[str] = []
        for i in torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist():
            texts.append(files[i].read_text(errors="replace")[:60_000])
            if sum(map(len, texts)) > BYTES:
                break
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        bpe.train_from_iterator(texts, trainer)
        encoded = bpe.encode_batch(texts[: len(texts) // 2])
        torch.save(torch.tensor([token for text in encoded for token in text.ids], dtype=torch.int32), cache)
    tokens = torch.load(cache).long()
    return tokens[:-VALIDATION], tokens[-VALIDATION:]


def batch(seed: int, step: int, rank: int) -> Tensor:
    """Sequences of one worker in one step, ``(SEQUENCES, CONTEXT + 1)``."""
    train, _ = corpus()
    draw = torch.Generator().manual_seed(seed * 10**6 + step * WORKERS + rank)
    first = torch.randint(len(train) - CONTEXT - 1, (SEQUENCES, 1), generator=draw)
    return train[first + torch.arange(CONTEXT + 1)]


class GPT(nn.Module):
    """A GPT-2 in small, with tied embeddings."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        d = WIDTH
        self.tok, self.pos, self.ln = nn.Embedding(VOCABULARY, d), nn.Embedding(CONTEXT, d), nn.LayerNorm(d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{"ln1": nn.LayerNorm(d), "qkv": nn.Linear(d, 3 * d), "proj": nn.Linear(d, d)},
                    **{"ln2": nn.LayerNorm(d), "up": nn.Linear(d, 4 * d), "down": nn.Linear(4 * d, d)},
                }
            )
            for _ in range(LAYERS)
        )
        draw = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            ends = "proj" in name or "down" in name
            if p.ndim == 2:
                p.data.normal_(std=0.02 / (math.sqrt(2 * LAYERS) if ends else 1), generator=draw)
            elif "ln" not in name:
                p.data.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of token numbers to their mean loss."""
        x = self.tok(rows[:, :-1]) + self.pos.weight
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            q, k, v = block["qkv"](block["ln1"](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["proj"](seen.transpose(1, 2).reshape(x.shape))
            x = x + block["down"](F.gelu(block["up"](block["ln2"](x)), approximate="tanh"))
        return F.cross_entropy(F.linear(self.ln(x), self.tok.weight).flatten(0, 1), rows[:, 1:].flatten())


def lr_at(step: int, peak: float) -> float:
    """Of step 0, 1, ...: up in a straight line, down along a cosine."""
    fall = 0.5 * (1 + math.cos(math.pi * max(0, step - RISE) / (STEPS - RISE)))
    return peak * min((step + 1) / RISE, fall)


def run(make: Callable[..., torch.optim.Optimizer], lr: float, seed: int, threads: int) -> dict[str, float | str]:
    """One training: validation loss at its end and the largest training loss after the fifth step, or why it was refused."""
    running = threading.Semaphore(threads)

    def worker(group: Any) -> tuple[float, float]:
        model = GPT(seed)
        params = list(model.parameters())
        optimizer, losses = make(params, lr, group), []
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = lr_at(step, lr)
            with running:
                optimizer.zero_grad()
                loss = model(batch(seed, step, group.rank))
                loss.backward()
            mean = loss.detach().reshape(1).clone()
            group.all_reduce(mean).wait()
            losses.append(mean.item() / WORKERS)
            if isinstance(optimizer, torch.optim.AdamW):
                for p in params:
                    assert p.grad is not None
                    group.all_reduce(p.grad).wait()
                    p.grad /= WORKERS
            optimizer.step()
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.synchronise()
        if group.rank:
            return 0.0, 0.0
        _, held_back = corpus()
        with torch.no_grad():
            length = 48 * (CONTEXT + 1)
            return model(held_back[:length].view(48, CONTEXT + 1)).item(), max(losses[5:])

    try:
        validation, largest = SimulatedWorld(WORKERS).run(worker)[0]
    except ValueError as refusal:
        return {"refused": str(refusal)}
    return {"validation": round(validation, 4), "largest training loss": round(largest, 2)}


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".", help="regular expression of the rows to run")
    parser.add_argument("--lr", type=float, nargs="*", default=LRS)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--threads", type=int, default=2, help="workers that compute at the same time")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(REPORT.read_text())["runs"] if REPORT.exists() else {}
    for seed in () if given.report else given.seeds:
        for lr in given.lr:
            for name, make in rows().items():
                key = f"{name}, lr {lr:g}, seed {seed}"
                if re.search(given.only, name) and key not in known:
                    known[key] = run(make, lr, seed, given.threads)
                    print(key, known[key], flush=True)
                    write_json(REPORT, {"machine": machine_info(), "runs": known})
    print_table(known)


def print_table(known: dict[str, Any]) -> None:
    """Mean validation loss by row and lr, its distance from AdamW's seed by seed, and the largest training loss of all seeds."""
    lrs = sorted({float(key.split(", lr ")[1].split(",")[0]) for key in known})
    print("| | " + " | ".join(f"lr {lr:g}" for lr in lrs) + " |\n|---|" + "---|" * len(lrs))
    for name in rows():
        cells = []
        for lr in lrs:
            runs = {key.rsplit(" ", 1)[1]: entry for key, entry in known.items() if key.startswith(f"{name}, lr {lr:g},")}
            if any("refused" in entry for entry in runs.values()):
                cells.append("refused")
                continue
            losses = {seed: entry["validation"] for seed, entry in runs.items()}
            base = {seed: known.get(f"AdamW, lr {lr:g}, seed {seed}", {}).get("validation") for seed in runs}
            gaps = [100 * (loss / base[seed] - 1) for seed, loss in losses.items() if base[seed]]
            largest = max((entry["largest training loss"] for entry in runs.values()), default=math.nan)
            cells.append(
                f"{statistics.mean(losses.values()):.3f} ({statistics.mean(gaps):+.1f} %, at most {max(gaps):+.1f} %; {largest:.1f})"
                if gaps
                else ""
            )
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
