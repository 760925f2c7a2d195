"""A model that FSDP2 shards within each node, replicated over nodes by one bit per parameter: plain torch.distributed.

    torchrun --nproc-per-node 4 examples/sharded_torch.py
    python examples/sharded_torch.py          # the same: starts torchrun itself
    torchrun --nnodes 4 --nproc-per-node 8 ... examples/sharded_torch.py --ranks-per-node 8     # on real nodes

Four processes play two nodes of two ranks. First FSDP2's hybrid sharding trains a byte-level GPT with AdamW, then 1-bit Adam trains it
from the same weights on the same text. Two things differ: ``fully_shard`` gets the ranks of a node only, and the optimizer gets the
group of the ranks that hold the same shard on the other nodes. Needs torch 2.9 or newer.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import VOCABULARY, TextWindows, load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.engine import ExchangeOptions

CONTEXT = 64
BATCH = 8


class ByteGPT(nn.Module):
    """A small GPT over bytes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes, shape ``(batch * time, 256)``, of int64 tokens of shape ``(batch, time)``."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x.flatten(0, 1))


def sharded_model(chosen: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """The same weights at every call, sharded over one dimension of the mesh and replicated over the one before it, if there is one."""
    torch.manual_seed(0)
    model = ByteGPT(chosen.layers, chosen.width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing).__name__ != "DTensor":  # the tensor within it is counted
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte over windows of shape ``(batch, time + 1)``."""
    return F.cross_entropy(model(windows[:, :-1]), windows[:, 1:].flatten())


def fit(chosen: argparse.Namespace, model: nn.Module, optimizer: Any, text: tuple[Tensor, Tensor]) -> float:
    """Trains; returns the loss on held-out text."""
    train, held_out = (TextWindows(part, CONTEXT) for part in text)
    shuffled = torch.Generator().manual_seed(dist.get_rank())  # every rank reads other windows
    for _ in range(chosen.steps):
        picked = torch.randint(len(train), (BATCH,), generator=shuffled)
        loss_of(model, torch.stack([train[i] for i in picked.tolist()])).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, torch.stack([held_out[i] for i in range(64)]))
    return float(loss)


def run(chosen: argparse.Namespace) -> None:
    """What every rank runs."""
    nodes = dist.get_world_size() // chosen.ranks_per_node
    mesh = init_device_mesh("cpu", (nodes, chosen.ranks_per_node), mesh_dim_names=("replicate", "shard"))
    text = load_corpus(1 << 20, 64 * CONTEXT + 1)

    model = sharded_model(chosen, mesh)
    before = tensor_bytes()
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    dense_loss = fit(chosen, model, adamw, text)
    dense_memory = tensor_bytes() - before
    del model, adamw

    model = sharded_model(chosen, mesh["shard"])
    before = tensor_bytes()
    onebit = OnebitAdam(
        model.parameters(),
        lr=2e-3,
        weight_decay=0.01,
        freeze_step=max(1, chosen.steps // 5),
        exchange=ExchangeOptions(process_group=mesh["replicate"].get_group()),
    )
    loss = fit(chosen, model, onebit, text)
    memory = tensor_bytes() - before

    total, last = onebit.ledger.total, onebit.ledger.last
    assert last is not None
    # by a rank; a node's ranks send each their own shard
    sent = torch.tensor([total.dense_bytes, total.bytes_sent, last.dense_bytes, last.bytes_sent], dtype=torch.float64)
    dist.all_reduce(sent, group=mesh["shard"].get_group())
    if dist.get_rank() == 0:
        dense_run, ours_run, dense_step, step = (sent / 1e6).tolist()
        elements = sum(p.numel() for p in model.parameters())
        print(f"{elements:,} parameters, {nodes} nodes of {chosen.ranks_per_node} ranks, {chosen.steps} steps")
        print(f"{'':<13}{'loss':>7}{'MB a node sent':>16}{'in the last step':>18}{'optimizer MB per rank':>23}")
        for name, *row in (
            ("HSDP, AdamW", dense_loss, dense_run, dense_step, dense_memory / 1e6),
            ("1-bit Adam", loss, ours_run, step, memory / 1e6),
        ):
            print(f"{name:<13}{row[0]:>7.3f}{row[1]:>16.2f}{row[2]:>18.4f}{row[3]:>23.2f}")
    onebit.release_communication()  # its groups, before they are destroyed


def main(arguments: list[str] | None = None) -> None:
    """Join the process group, or start torchrun where there is none."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--steps", type=int, default=100, help="optimizer steps; a fifth of them is dense")
    options.add_argument("--layers", type=int, default=2, help="transformer layers")
    options.add_argument("--width", type=int, default=128, help="of the model, a multiple of 32")
    options.add_argument("--ranks-per-node", type=int, default=2, help="that shard the model")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = options.parse_args(arguments)
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "4", __file__, *arguments])
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(chosen)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
