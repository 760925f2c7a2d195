"""A rank that dies or stalls: the others end with an error that says where, instead of waiting for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.comm import CollectiveFailure, CollectiveTimeout, Transport
from lightning_onebit.engine import ExchangeOptions

STEPS, FREEZE = 6, 3
DOOMED = 1


def at(moment: str, step: int, action: Any) -> None:
    """Replaces this rank's collectives so that ``action()`` runs just before the first one named ``moment`` of a step."""
    for name in ("all_to_all", "all_gather", "all_reduce"):
        original = getattr(Transport, name)

        def method(self: Transport, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if moment in kwargs["what"] and self.step == step:
                action()
            return original(self, *args, **kwargs)

        setattr(Transport, name, method)


def worker(rank: int, world: int, moment: str, step: int, fault: str) -> Any:
    if rank == DOOMED:
        store = dist.distributed_c10d._get_default_store()

        def stall() -> None:
            store.wait(["survivors are done"])
            raise InterruptedError

        at(moment, step, stall if fault == "stall" else lambda: os.kill(os.getpid(), signal.SIGKILL))
    params = [torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(40))]
    # several buckets; a rank waits 5 seconds for the others
    optimizer = OnebitAdam(
        params,
        freeze_step=FREEZE,
        max_grad_norm=1.0 if moment == "control round" else None,  # which needs one
        exchange=ExchangeOptions(
            block_size=32, bucket_mb=0.0005, timeout=3.0 if fault == "stall" else 5.0, kernels="reference"
        ),
    )
    dist.barrier()  # start together, however long a busy machine took to import
    try:
        for _ in range(STEPS):
            for p in params:
                p.grad = torch.randn(p.shape)
            optimizer.step()
    except InterruptedError:
        return None
    except CollectiveFailure as error:
        # the stalled rank may go on once every survivor has given up
        if dist.distributed_c10d._get_default_store().add("failed", 1) == world - 1:
            dist.distributed_c10d._get_default_store().set("survivors are done", "yes")
        return type(error).__name__, str(error), optimizer.steps
    return "nothing", "", optimizer.steps


MOMENTS = [
    ("handshake", 1, 0),
    ("dense all-reduce of bucket 0", 2, 1),
    ("control round", 5, 4),
    ("round 1 (all-to-all) of bucket 0", 4, 3),
    ("round 2 (all-gather) of bucket 0", 5, 4),
]


@pytest.mark.parametrize(("moment", "step", "done"), MOMENTS)
@pytest.mark.parametrize("world", [2, 3])
def test_survivors_of_a_killed_rank_end_with_an_error_that_names_rank_collective_and_step(
    world: int, moment: str, step: int, done: int
) -> None:
    results = run_ranks(worker, world, moment, step, "kill", timeout=40, may_die=[DOOMED])
    for rank, result in enumerate(results):
        if rank == DOOMED:
            assert result is None
            continue
        kind, message, steps = result
        assert kind in ("CollectiveFailure", "CollectiveTimeout")
        assert steps == done, "the broken step is not counted"
        for words in (f"rank {rank} of {world}", "onebit_adam", f"step {step}", "died"):
            assert words in message
        assert any(m in message for m in ("handshake", "all-reduce", "control round", "bucket"))


@pytest.mark.parametrize(("moment", "step", "done"), MOMENTS)
def test_a_stalled_rank_ends_in_a_timeout_that_names_the_collective_the_bucket_and_the_step(
    moment: str, step: int, done: int
) -> None:
    (kind, message, steps), stalled = run_ranks(worker, 2, moment, step, "stall", timeout=40)
    assert stalled is None
    assert kind == CollectiveTimeout.__name__
    assert steps == done
    for words in ("rank 0 of 2", f"step {step}", moment, "raise `timeout` (now 3 s)"):
        assert words in message


def test_without_a_fault_the_same_run_ends_well() -> None:
    assert run_ranks(worker, 2, "nowhere", 0, "kill") == [("nothing", "", STEPS)] * 2


ENDS = """
import torch
import torch.distributed as dist
from lightning_onebit.comm import disconnect

dist.init_process_group("gloo", init_method="file://" + {store!r}, rank=0, world_size=1)
parameter = torch.nn.Parameter(torch.zeros(3))
torch.optim.Adam([parameter])  # imports, through torch._dynamo, functions that keep the default group of the moment
dist.all_reduce(parameter.data)
disconnect()
print([name.read_text() for name in __import__("pathlib").Path("/proc/self/task").glob("*/comm")])
"""


# a program of plain torch, whose optimizer lives to its end
FORGOTTEN = """
import atexit
from dataclasses import replace
from pathlib import Path

atexit.register(lambda: print([name.read_text() for name in Path("/proc/self/task").glob("*/comm")]))

import torch
import torch.distributed as dist
from lightning_onebit import ExchangeOptions, LocalSteps, OnebitAdam, ZeroOneAdam

dist.init_process_group("gloo", init_method="file://" + {store!r}, rank=0, world_size=1)
parameter = torch.nn.Parameter(torch.zeros(3))
alone = ExchangeOptions(_alone=True)
default = OnebitAdam([parameter], freeze_step=2, max_grad_norm=1.0, exchange=alone)
gaps, connected = LocalSteps(double_every=1), replace(alone, process_group=dist.group.WORLD)
given = ZeroOneAdam([parameter], freeze_step=2, local_steps=gaps, max_grad_norm=1.0, exchange=connected)
for optimizer in (default, given):
    for _ in range(6):
        parameter.grad = torch.randn(3)
        optimizer.step()
given.show_consensus()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the threads of a process are not listed here")
@pytest.mark.parametrize("program", [ENDS, FORGOTTEN], ids=["disconnected", "an optimizer keeps the group"])
def test_the_backends_threads_end_before_python(program: str, tmp_path: Path) -> None:
    # a thread of gloo that gives a tensor back after Python has ended aborts the process
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program.format(store=str(tmp_path / "store"))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout and "gloo" not in done.stdout, done.stdout
