"""What torch itself offers behind ``DistributedDataParallel``, in real processes over gloo: hooks that compress, and rarer averages.

Bytes are counted by formula, per parameter of the ring all-reduces that the hooks issue (``frontier.py bytes`` holds them against what
the kernel counts): fp16 sends half of fp32; PowerSGD (arXiv 1905.13727) sends ``r (n + m)`` elements of an n x m gradient, and those whole
that have one dimension or that this would not at least halve; post-local SGD (arXiv 1808.07217) sends gradients while it warms up,
parameters every ``period`` steps afterwards.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _language import Exchanging, Run, Task, Watch, all_reduce_bytes, backward, batch, corpus, model_of
from torch.nn.parallel import DistributedDataParallel

#: dense steps of PowerSGD, the fewest that torch allows
DENSE_STEPS = 2
#: a gradient is compressed if that leaves less than one part in so many
LEAST_RATE = 2
#: steps from one average of post-local SGD to the next
PERIOD = 20
#: environment variables: checkouts of github.com/bloc97/DeMo, which needs einops, and of github.com/microsoft/dion
DEMO_SOURCE, DION_SOURCE = "DEMO_SOURCE", "DION_SOURCE"


class BehindDDP(Exchanging):
    """AdamW on gradients that DDP has averaged, or parameters that are averaged now and then.

    Args:
        net: the model, its communication hook registered.
        lr: of AdamW.
        task: gives the workers.
        sends: bytes that a rank sends in step 1, 2, ...
        averager: averages parameters after steps; None: they stay equal.
    """

    def __init__(
        self,
        net: DistributedDataParallel,
        lr: float,
        task: Task,
        sends: Callable[[int], float],
        averager: Any = None,
    ) -> None:
        super().__init__(net.parameters(), lr, task, dist.group.WORLD)
        adamw = torch.optim.AdamW(self.param_groups[0]["params"], lr=lr, weight_decay=0.0, fused=True)
        self.inner: Any = adamw
        self.averager, self.sends, self.steps = averager, sends, 0
        if averager is not None:
            from torch.distributed.optim import PostLocalSGDOptimizer

            self.inner = PostLocalSGDOptimizer(adamw, averager)

    def step(self) -> None:  # type: ignore[override]
        """One step on the gradients that DDP has left."""
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        self.steps += 1
        self.sent += self.sends(self.steps)

    def synchronise(self) -> None:
        """Averages parameters that may differ."""
        if self.averager is not None:
            from torch.distributed.algorithms.model_averaging.utils import average_parameters

            params = self.param_groups[0]["params"]
            average_parameters(iter(params), self.group)
            self.sent += all_reduce_bytes(self.task) * sum(p.numel() for p in params)


def dense(net: DistributedDataParallel, lr: float, task: Task, *, width: float = 4.0) -> BehindDDP:
    """AdamW on gradients that are averaged in fp32, or with ``width=2`` in fp16."""
    if width == 2:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        net.register_comm_hook(None, fp16_compress_hook)
    nbytes = all_reduce_bytes(task, width) * _elements(net)
    return BehindDDP(net, lr, task, lambda step: nbytes)


def powersgd(net: DistributedDataParallel, lr: float, task: Task, *, rank: int) -> BehindDDP:
    """AdamW on gradients that PowerSGD has averaged, with error feedback and warm start, after ``DENSE_STEPS`` dense steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def one_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        # Later rounds are issued by gloo's threads, for two buckets under way in another order on every rank, and hang.
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    # gradients of tokens that a batch lacks are zero, and so may columns of P be
    options: dict[str, Any] = {"start_powerSGD_iter": DENSE_STEPS, "min_compression_rate": LEAST_RATE}
    state = PowerSGDState(None, rank, **options, orthogonalization_epsilon=1e-8)
    net.register_comm_hook(state, one_at_a_time)
    elements = powersgd_elements([p.shape for p in net.parameters()], rank)
    whole = all_reduce_bytes(task)
    return BehindDDP(net, lr, task, lambda step: whole * (_elements(net) if step <= DENSE_STEPS else elements))


def powersgd_elements(shapes: Iterable[Iterable[int]], rank: int) -> int:
    """Elements that PowerSGD sends of gradients of these shapes: both factors, or the whole where those are not at most half of it."""
    total = 0
    for shape in map(torch.Size, shapes):
        whole, rows = shape.numel(), shape[0] if len(shape) else 1
        factors = rank * (rows + whole // max(1, rows))
        total += factors if len(shape) > 1 and factors * LEAST_RATE < whole else whole
    return total


def post_local_sgd(net: DistributedDataParallel, lr: float, task: Task, *, period: int = PERIOD) -> BehindDDP:
    """AdamW: on averaged gradients up to the task's ``warm_up``, then on each worker's own with averages of parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    state = PostLocalSGDState(None, None, task.warm_up, post_local_gradient_allreduce=False)
    net.register_comm_hook(state, post_localSGD_hook)
    nbytes = all_reduce_bytes(task) * _elements(net)

    def sends(step: int) -> float:
        local = step - 1 - task.warm_up
        return nbytes if local < 0 or local % period == 0 else 0.0

    return BehindDDP(net, lr, task, sends, PeriodicModelAverager(period, task.warm_up))


class Authors(Exchanging):
    """An optimizer of somebody else's that exchanges by itself, on gradients which DDP leaves to each worker."""

    def __init__(self, net: DistributedDataParallel, lr: float, task: Task) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

        super().__init__(net.parameters(), lr, task, dist.group.WORLD)
        net.register_comm_hook(None, noop_hook)
        self.inner: Any = None

    def step(self) -> None:  # type: ignore[override]
        """One step on this worker's gradients."""
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * group.get("factor", 1.0)
        self.inner.step()
        self.sent += self.sends()

    def sends(self) -> float:
        """Bytes of the step that was made last."""
        raise NotImplementedError


class DeMo(Authors):
    """DeMo (arXiv 2411.19870) from its authors' ``demo.py``: each worker's largest cosine coefficients, gathered, and a step of signs.

    Bytes are those that it reports itself: 8 for the index of a coefficient and 4 for its value, to every other worker.
    """

    def __init__(self, net: DistributedDataParallel, lr: float, task: Task) -> None:
        super().__init__(net, lr, task)
        source = _source(Path(os.environ[DEMO_SOURCE]), "demo")
        self.inner = source.DeMo(self.param_groups[0]["params"], lr=lr, process_group=self.group)

    def sends(self) -> float:
        """What it has counted."""
        return float((self.task.workers - 1) * self.inner.data_transmit)


class Dion(Authors):
    """Dion (arXiv 2504.05295) from its authors' ``dion/dion_reference.py``: power iteration of momentum, both factors averaged.

    Embeddings, the head, norms and biases are AdamW's, their gradients averaged whole; the head's lr is divided by the root of its width,
    as its authors advise.

    Args:
        net: the model.
        lr: of matrices, whose steps Dion scales by their shape, and of AdamW.
        task: gives the workers.
        fraction: rank of the factors over the smaller side of a matrix.
    """

    def __init__(self, net: DistributedDataParallel, lr: float, task: Task, *, fraction: float) -> None:
        super().__init__(net, lr, task)
        named = list(net.module.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ("layers." in name or "blocks." in name)]
        head = [p for name, p in named if name.endswith("head.weight")]
        chosen = {id(p) for p in matrices + head}
        others = [p for p in net.parameters() if id(p) not in chosen]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
        if head:  # one that is tied to the embedding is among the others
            groups.append({"params": head, "algorithm": "adamw", "factor": head[0].shape[1] ** -0.5})
        source = _source(Path(os.environ[DION_SOURCE]) / "dion", "dion_reference")
        self.inner = source.Dion(groups, self.group, rank_fraction=fraction, lr=lr, weight_decay=0.0)
        elements = dion_elements([p.shape for p in matrices], fraction) + sum(p.numel() for p in others + head)
        self.nbytes = all_reduce_bytes(task) * elements

    def sends(self) -> float:
        """Both factors, or the gradient where that is smaller."""
        return self.nbytes


def dion_elements(shapes: Iterable[Iterable[int]], fraction: float) -> int:
    """Elements that Dion averages of matrices of these shapes: both factors, or the gradient where they are not smaller."""
    total = 0
    for rows, columns in shapes:
        factors = math.ceil(fraction * min(rows, columns)) * (rows + columns)
        total += min(factors, rows * columns) if fraction < 1 else rows * columns
    return total


def _source(folder: Path, name: str) -> Any:
    """A module of a checkout, and what it imports beside it; what the folder's ``__init__`` imports is left alone."""
    package = f"_source_of_{name}"
    if not (folder / f"{name}.py").is_file():
        raise ValueError(f"{folder} has no {name}.py; name a checkout of the repository")
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"{package}.{name}")


def _elements(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# ----- training -------------------------------------------------------------------------------------------------------


def train_ddp(run: Run, make: Callable[..., Any]) -> Watch:
    """Trains in a process per worker; ``make(net, lr, task)`` gives the optimizer and registers its hook. It must be picklable.

    Raises:
        RuntimeError: a worker failed; the message is the last line of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(corpus(run.task), Path(folder) / "texts")  # shared memory may be too small for them
        try:
            mp.spawn(_worker, (run, make, folder), nprocs=run.task.workers)
        except mp.ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        watch: Watch = pickle.loads((Path(folder) / "watch").read_bytes())
        return watch


def _worker(rank: int, run: Run, make: Callable[..., Any], folder: str) -> None:
    """Trains as one of the processes; the first one leaves its ``Watch`` in the folder."""
    task = run.task
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if run.device.type == "cuda" else "highest")
    store = dist.FileStore(str(Path(folder) / "store"), task.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.workers, timeout=timedelta(minutes=10))
    train, validation = (tokens.to(run.device) for tokens in torch.load(Path(folder) / "texts"))
    net = DistributedDataParallel(model_of(task, run.seed).to(run.device))
    optimizer = make(net, run.lr, task)
    losses = torch.zeros(task.steps, device=run.device)
    watch = Watch(run, validation)
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.lr(run.lr, step)
        optimizer.zero_grad()
        losses[step - 1] = backward(net, batch(task, train, run.seed, step).chunk(task.workers)[rank], run.precision)
        optimizer.step()
        if step == task.steps:
            optimizer.synchronise()
        if rank == 0 and watch.due(step):
            watch.check(step, net.module, optimizer.sent / _elements(net))
    dist.all_reduce(losses)
    watch.losses = (losses / task.workers).tolist()
    if rank == 0:
        (Path(folder) / "watch").write_bytes(pickle.dumps(watch))
    dist.barrier()
    # hooks and optimizers hold process groups, whose threads must end before the interpreter does
    del net, optimizer
    gc.collect()
    dist.destroy_process_group()
