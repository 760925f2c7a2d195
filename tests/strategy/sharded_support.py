"""Models that are sharded in ``configure_model``, on two replicas of two ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from lightning_support import loader, quiet_trainer
from torch import Tensor

import lightning_onebit as ob

#: two replicas of two ranks each, on one machine
SIZES = {"replicate_size": 2, "data_parallel_size": 2}


def sharded_class(tree: str = "lightning") -> Any:
    return importlib.import_module(f"lightning_onebit.{tree}").OnebitModelParallelStrategy


def net() -> torch.nn.Sequential:
    """Shards of 16 x 8 and 8 x 16 on two ranks, biases of 16 and 3, of which ranks hold uneven parts."""
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def shard(module: Any, **how: Any) -> None:
    """FSDP2 over the data-parallel dimension: the layers, then the rest."""
    from torch.distributed.fsdp import fully_shard

    mesh = module.device_mesh["data_parallel"]
    for layer in module.net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **how)
    fully_shard(module.net, mesh=mesh, **how)


def make_sharded(
    pl: Any,
    configure: Callable[[Any], Any] | None = None,
    net: Callable[[], torch.nn.Module] = net,
    shard: Callable[[Any], None] = shard,
    seed: int | None = 0,
    **attributes: Any,
) -> Any:
    """A LightningModule of tree ``pl`` that is sharded in ``configure_model``; ``seed`` None: every rank has weights of its own."""

    def training_step(self: Any, batch: Any, _: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self: Any, batch: Any, _: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_model(self: Any) -> None:
        if self.net is None:
            torch.manual_seed(self.global_rank if seed is None else seed)
            self.net = net()
            shard(self)

    def init(self: Any) -> None:
        super(cls, self).__init__()
        self.net = None

    def optimizers(self: Any) -> Any:
        return self.trainer.strategy.optimizer(self.parameters(), lr=1e-2)

    methods = {
        "__init__": init,
        "configure_model": configure_model,
        "training_step": training_step,
        "validation_step": validation_step,
        "configure_optimizers": configure or optimizers,
    }
    cls = type("Module", (pl.LightningModule,), {**methods, **attributes})
    return cls()


def fit(pl: Any, strategy: Any, module: Any, *, ckpt_path: Any = None, data: Any = None, **kwargs: Any) -> Any:
    """Fits with a quiet Trainer, which it returns."""
    trainer = quiet_trainer(pl, strategy, **kwargs)
    trainer.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def whole(module: Any) -> dict[str, Tensor]:
    """Parameters and buffers of a module, gathered inside the replica."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}


SMALL = ob.ExchangeOptions(block_size=32)
