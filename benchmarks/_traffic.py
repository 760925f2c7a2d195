"""What steps of a method cost, measured: bytes on a network interface, seconds of computing and of the optimizer's own work."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import echo_group
from _ddp import dense
from _language import Task, backward, bytes_sent, model_of
from _methods import METHODS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
#: steps before the measured ones: AdamW's of the warm-up, in which DDP rebuilds its buckets
WARM, WARM_UP = 5, 2
#: measured: averages every 20 steps have one of them
STEPS = 20
#: end of the names of recipes whose steps cost what those of the method do, and that refuse so early a freeze
PUBLISHED = "_published"


# ----- bytes ----------------------------------------------------------------------------------------------------------


class RealGroup:
    """The default process group, with the interface of a ``SimulatedGroup``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sums in place."""
        return dist.all_reduce(tensor, async_op=True)


def countable(name: str) -> bool:
    """Whether a method really sends what its formula counts. Majority votes do not: here a bit travels as a byte."""
    return name == "adamw" or (METHODS[name].family != "dense" and not name.endswith(("_vote", PUBLISHED)))


def measure_network(
    task: Task, names: Iterable[str], hosts: int, megabits: float = 10_000.0, timeout: float = 900.0
) -> list[dict[str, Any]]:
    """Trains with each method over network namespaces of their own.

    Args:
        task: its model; its number of workers is not looked at.
        names: of methods.
        hosts: processes, each in a namespace.
        megabits: per second, of every host.
        timeout: seconds until they are ended.

    Returns:
        By method: what its formula and what the kernel counted, bytes per parameter and step, a mean over the hosts; and the median
        milliseconds of a step, of the first host.

    Raises:
        RuntimeError: no root, no iproute2, or a process failed.
    """
    from _network import SlowNetwork

    with tempfile.TemporaryDirectory() as folder, SlowNetwork(hosts, megabits, prefix="frontier") as network:
        out = Path(folder) / "bytes.json"
        command = [sys.executable, __file__, task.name, str(out), *names]
        network.launch(command, {"OMP_NUM_THREADS": "1"}, timeout, Path(folder))
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def _soon_frozen(task: Task) -> Task:
    """With every freeze before the measured steps: 1-bit LAMB's comes after a fifth of the task's."""
    return replace(task, warm_up=WARM_UP, steps=5 * WARM_UP)


def _host(name: str, out: Path, names: Iterable[str]) -> None:
    """One of the processes; the first one writes the result."""
    from frontier import TASKS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = replace(_soon_frozen(TASKS[name]), workers=dist.get_world_size())
    rows = []
    for method in names:
        rows.append(_count(task, method))
        gc.collect()  # hooks and optimizers hold process groups, whose threads must end before the interpreter does
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _count(task: Task, name: str) -> dict[str, Any]:
    method = METHODS[name]
    model: Any = model_of(task, 0)
    params = list(model.parameters())
    count = sum(p.numel() for p in params)
    if method.family == "world":
        group = RealGroup() if name == "diloco" else dist.group.WORLD
        optimizer = method.make(params, 1e-3, task, group)
    else:
        model = DistributedDataParallel(model)
        optimizer = (dense if method.family == "dense" else method.make)(model, 1e-3, task)
    counted, spent = [], []
    for step in range(WARM + STEPS + 1):
        if step in (WARM, WARM + STEPS):
            dist.barrier()
            counted.append((bytes_sent(optimizer), int(SENT.read_text())))
        if step == WARM + STEPS:
            break
        draws = torch.Generator().manual_seed(step * task.workers + dist.get_rank())
        began = time.perf_counter()
        optimizer.zero_grad()
        backward(model, torch.randint(task.vocabulary, (task.rows, task.context + 1), generator=draws), "fp32")
        optimizer.step()
        spent.append(1e3 * (time.perf_counter() - began))
    totals = torch.tensor(counted, dtype=torch.float64).diff(dim=0)[0]
    dist.all_reduce(totals)
    formula, kernel = (totals / (task.workers * STEPS * count)).tolist()
    return {"method": name, "formula": formula, "kernel": kernel, "milliseconds": statistics.median(spent[WARM:])}


# ----- seconds --------------------------------------------------------------------------------------------------------


def measure_costs(task: Task, device: str, precision: str, names: Iterable[str], repeats: int = 40) -> dict[str, Any]:
    """Milliseconds of a step of one worker before anything is sent.

    Args:
        task: the model and the rows of a worker.
        device: ``"cpu"`` or ``"cuda"``.
        precision: of matrix products.
        names: of methods.
        repeats: measured steps.

    Returns:
        ``compute_ms``, forward and backward, and ``local_ms``, by method: the optimizer's step in a world whose collectives are copies in
        memory; of methods behind DDP what their step takes longer in a world of one.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    task = _soon_frozen(task)
    alone = model_of(task, 0).to(device)
    rows = torch.randint(task.vocabulary, (task.rows, task.context + 1), device=device)
    compute = _least(lambda: backward(alone, rows, precision), repeats, device)
    local: dict[str, float] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # echoes are what it warns of: ranks with the same gradients
    logging.getLogger("lightning_onebit").setLevel(logging.ERROR)
    for name in names:
        if name.endswith(PUBLISHED):
            continue
        method, model = METHODS[name], model_of(task, 0).to(device)
        params = list(model.parameters())
        if method.family == "ddp":
            net = DistributedDataParallel(model)
            optimizer = method.make(net, 1e-5, task)

            def step(net: Any = net, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                backward(net, rows, precision)
                optimizer.step()

            local[name] = max(0.0, _least(step, repeats, device) - compute)
        else:
            group = (echo_group(task.workers),) if method.family == "world" else ()
            optimizer = method.make(params, 1e-5, task, *group)
            for p in params:
                p.grad = torch.randn_like(p) * 1e-3
            local[name] = _least(optimizer.step, repeats, device)
        del optimizer, model
        gc.collect()
    dist.destroy_process_group()
    return {"compute_ms": round(compute, 4), "local_ms": {name: round(ms, 4) for name, ms in local.items()}}


def _least(call: Any, repeats: int, device: str) -> float:
    """Milliseconds of the fastest call but the first: what other programs take only adds."""
    spent = []
    for _ in range(WARM + repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - began))
    return min(spent[WARM:])


def print_bytes(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line per method."""
    print(f"{'bytes per parameter and step':28} {'formula':>8} {'kernel':>8} {'ratio':>6}")
    for row in rows:
        print(f"{row['method']:28} {row['formula']:8.4f} {row['kernel']:8.4f} {row['kernel'] / row['formula']:6.3f}")


def print_seconds(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line per method."""
    print(f"{'milliseconds of a step':28} {'model':>8} {'network':>8} {'ratio':>6}")
    for row in rows:
        ratio = row["milliseconds"] / row["predicted"]
        print(f"{row['method']:28} {row['predicted']:8.1f} {row['milliseconds']:8.1f} {ratio:6.3f}")


if __name__ == "__main__":
    _host(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    # gloo's threads can hold the interpreter's end
    sys.stdout.flush()
    os._exit(0)
