"""The optimizers without Lightning: an ordinary torch.distributed program.

    torchrun --nproc-per-node 2 examples/plain_torch.py
    python examples/plain_torch.py          # the same: starts torchrun itself
    python examples/plain_torch.py --algorithm binsgdm
    python examples/plain_torch.py --ddp    # for a program that wraps its model in DistributedDataParallel

Four rules: do not wrap the model in DistributedDataParallel, or call ``onebit_ddp``; leave gradients local; call
``step()`` on all ranks equally often; look at the model (to validate, to save) within ``optimizer.consensus()``. In the
middle the program saves a checkpoint and goes on from it, as after an interruption: what all ranks share in one file,
residuals in one file per rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_onebit.algorithms import BinSGDM, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.ddp import onebit_ddp
from lightning_onebit.engine import OnebitOptimizer


def make_optimizer(algorithm: str, model: nn.Module, warm_up: int) -> OnebitOptimizer:
    """An optimizer by name; ``warm_up`` steps are dense where the algorithm has a warm-up."""
    if algorithm == "onebit_adam":
        return OnebitAdam(model.parameters(), lr=8e-3, weight_decay=0.01, freeze_step=warm_up)
    if algorithm == "onebit_lamb":
        return OnebitLamb(model.parameters(), lr=1.6e-2, weight_decay=0.01, freeze_step=warm_up)
    if algorithm == "zero_one_adam":
        return ZeroOneAdam(model.parameters(), lr=8e-3, weight_decay=0.01, freeze_step=warm_up)
    return BinSGDM(model.parameters(), lr=4e-3)


def fresh_model() -> nn.Module:
    """The same weights on every rank, for all draw them from the same seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def in_ddp(model: nn.Module, optimizer: OnebitOptimizer) -> nn.Module:
    """The model as an existing program has it; DDP averages in dense steps, ``step()`` communicates in compressed ones."""
    wrapped = DistributedDataParallel(model)
    onebit_ddp(wrapped, optimizer)
    return wrapped


def save(folder: Path, model: nn.Module, optimizer: OnebitOptimizer) -> None:
    """Write ``shared.pt`` on rank 0, and on every rank what only that rank has."""
    with optimizer.consensus():  # between synchronisations of 0/1 Adam every rank has weights of its own
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "shared.pt")
    torch.save(optimizer.residual_state_dict(), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: OnebitOptimizer) -> None:
    """Read it back: first what is shared, then the rank's own part."""
    shared: dict[str, Any] = torch.load(folder / "shared.pt", weights_only=True)
    model.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    optimizer.load_residual_state_dict(torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=True))


def train(chosen: argparse.Namespace, folder: Path) -> None:
    """What every rank runs."""
    data, validation = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=1)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    warm_up = max(1, chosen.epochs * len(loader) // 5)
    model = fresh_model()
    optimizer = make_optimizer(chosen.algorithm, model, warm_up)
    trained = in_ddp(model, optimizer) if chosen.ddp else model
    for epoch in range(chosen.epochs):
        if epoch == chosen.epochs // 2:
            save(folder, model, optimizer)
            model = fresh_model()
            optimizer = make_optimizer(chosen.algorithm, model, warm_up)
            load(folder, model, optimizer)
            trained = in_ddp(model, optimizer) if chosen.ddp else model
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(trained(images), labels).backward()
            optimizer.step()
    optimizer.synchronise()  # 0/1 Adam may have ended among local steps

    images, labels = validation.tensors
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, weights)
    if dist.get_rank() == 0:
        identical = all(torch.equal(copies[0], other) for other in copies)
        accuracy = (model(images).argmax(1) == labels).float().mean()
        ledger = optimizer.ledger
        print(f"accuracy {100 * accuracy:.1f} %, replicas {'identical' if identical else 'DIFFERENT'}")
        print(
            f"{ledger.dense_steps} dense and {ledger.compressed_steps} compressed steps, "
            f"{ledger.ratio:.1f}x fewer bytes than dense all-reduces"
        )
    optimizer.release_communication()  # its groups, before they are destroyed


def main(arguments: list[str] | None = None) -> None:
    """Join the process group, or start torchrun where there is none."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = ("onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm")
    options.add_argument("--algorithm", default="onebit_adam", choices=names, help="which optimizer")
    options.add_argument("--epochs", type=int, default=20, help="passes over the data")
    options.add_argument("--ddp", action="store_true", help="wrap the model in DistributedDataParallel")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = options.parse_args(arguments)
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", __file__, *arguments])
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)  # all ranks use rank 0's folder
        train(chosen, Path(folder[0]))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
