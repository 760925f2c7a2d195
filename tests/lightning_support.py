"""Small models, data and Trainers for the tests of the Lightning adapter, in either Lightning tree."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_onebit as ob

TREES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

# Ranks are forked from a server that has imported these once: a run then takes a fraction of a second instead of five.
harness._PRELOAD += [name for name in TREES.values() if name not in harness._PRELOAD]


#: A plain AdamW run that Lightning 2.4 resumes from a checkpoint within an epoch trains the last batch once more (8 batches: 9 steps).
resumes_within_epochs = pytest.mark.skipif(
    Version(version("pytorch-lightning")) < Version("2.5"),
    reason="Lightning before 2.5 repeats a batch when it resumes within an epoch, whatever the strategy",
)


def enter(rank: int, tree: str = "lightning") -> Any:
    """Makes this process rank ``rank`` for Lightning and returns the tree's package. The process group is the harness's."""
    os.environ["LOCAL_RANK"] = str(rank)
    # Lightning initialises no second group, but asks for an address
    os.environ.setdefault("MASTER_PORT", "29500")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    pl = importlib.import_module(TREES[tree])
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return pl


def strategy_class(tree: str = "lightning") -> Any:
    return importlib.import_module(f"lightning_onebit.{tree}").OnebitStrategy


def quiet_trainer(pl: Any, strategy: Any, **kwargs: Any) -> Any:
    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **kwargs})


def loader(samples: int = 64, batch: int = 8, features: int = 6, seed: int = 3) -> DataLoader[Any]:
    """Classification of ``samples`` points in order; a distributed sampler deals them to the ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch)


def plain_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def norm_net() -> torch.nn.Module:
    """With BatchNorm's buffers, a frozen parameter, one that never gets a gradient, and an empty one.

    No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to steps of full size.
    """
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    net.register_parameter("empty", torch.nn.Parameter(torch.ones(0)))
    net[3].bias.requires_grad_(False)
    return net


def make_module(
    pl: Any,
    configure: Callable[[Any], Any],
    net: Callable[[], torch.nn.Module] = plain_net,
    seed: int = 0,
    **attributes: Any,
) -> Any:
    """A LightningModule of tree ``pl``; ``configure(module)`` is its ``configure_optimizers``.

    Args:
        pl: the tree.
        configure: makes optimizers (and schedulers).
        net: the model inside.
        seed: of the initial weights.
        **attributes: further methods and attributes of the class.
    """

    def training_step(self: Any, batch: Any, _: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self: Any, batch: Any, _: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def init(self: Any) -> None:
        super(cls, self).__init__()
        torch.manual_seed(seed)
        self.net = net()

    cls = type(
        "Module",
        (pl.LightningModule,),
        {
            "__init__": init,
            "training_step": training_step,
            "validation_step": validation_step,
            "configure_optimizers": configure,
            **attributes,
        },
    )
    return cls()


def early_refreshes(strategy: Any) -> dict[str, Any]:
    """What 0/1 Adam is told so that its refreshes grow rarer from the first on, and a few steps hold one-bit rounds too."""
    return {"_doubling": 1} if strategy.algorithm == "zero_one_adam" else {}


def onebit(freeze_step: int | None = 2, **options: Any) -> Callable[[Any], Any]:
    """A ``configure_optimizers`` that returns ``OnebitAdam``; options of the exchange are given beside the others."""
    return lambda module: ob.OnebitAdam(
        module.parameters(), lr=1e-2, freeze_step=freeze_step, **harness.grouped(options)
    )


def same_on_all_ranks(tensors: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not bitwise equal on all ranks."""
    different = []
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach().contiguous())
        if not all(torch.equal(copies[0].reshape(-1), other.reshape(-1)) for other in copies):
            different.append(name)
    return different


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not bitwise equal in two state dicts."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
