"""Runs a function on several real processes joined by gloo, every wait bounded, and counts the collectives that really happen.

Workers are forked from a server process that has torch and the package imported and has done nothing else, so a run costs a fraction of a
second instead of one interpreter start per rank, and no state leaks from one run, or from pytest, into the next.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import quick_start

# what nearly every worker needs; test modules themselves are imported by the worker, from their cached byte code
_PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torchmetrics",
    "quick_start",
    "pytest",
    "hypothesis.strategies",
]
# after what a test module adds: the package then finds the Lightning trees loaded, and its import registers with them once, not per rank
_PRELOAD_LAST = ["lightning_onebit", "lightning_onebit.kernels.cpu", "oracle", "optim_support", "lightning_support"]

#: seconds that surviving ranks get to finish once a rank has failed
GRACE = 5.0


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung; the message holds every traceback and the stack of every hung rank."""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, may_die: Collection[int] = ()
) -> list[Any]:
    """Runs ``fn(rank, world, *args)`` on ``world`` processes and returns their results by rank.

    Each process has one torch thread and an initialised gloo group of all ranks. ``fn`` must be a function of a module; arguments
    and results must be picklable (tensors and arrays are).

    Args:
        fn: what every rank runs.
        world: number of processes.
        *args: passed on.
        timeout: seconds for the whole run, and for every collective in it.
        may_die: ranks that are expected to die without an answer (killed on purpose); their result is None.

    Raises:
        RanksFailed: a rank raised (its traceback is in the message), died, or was still running at the timeout (all are killed then).
    """
    context = mp.get_context("forkserver")
    _start_server()
    _build_kernels_once()
    with tempfile.TemporaryDirectory(prefix="onebit-ranks-") as directory:
        job = pickle.dumps((fn, args))
        processes, connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, world, job, theirs, directory, timeout), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            answers, dead, hung = _collect(connections, timeout, may_die)
            problems = _problems(answers, dead, hung, processes, directory, timeout)
            if problems:
                raise RanksFailed(f"{fn.__name__} on {world} ranks:\n" + "\n".join(problems))
            return [pickle.loads(a[1]) if a is not None else None for a in answers]
        finally:
            # ranks stay until all have answered, so that none closes a connection another one still reads
            for process, connection in zip(processes, connections, strict=True):
                connection.close()
                process.kill()
            for process in processes:
                process.join(10)


@cache
def _start_server() -> str:
    """Starts the server that ranks are forked from; returns the path of a ``python`` that asks its twin (see ``quick_start``)."""
    folder = Path(tempfile.mkdtemp(prefix="onebit-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    client, address = Path(__file__).with_name("quick_start.py"), folder / "socket"
    script = folder / "python"
    command = shlex.join([sys.executable, "-I", "-S", str(client), str(address), str(script)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", quick_start.ADDRESS)}
    ours = [str(client.parent), *(path for path in sys.path if Path(path).parent == client.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [before["PYTHONPATH"]])])
    os.environ[quick_start.ADDRESS] = str(address)
    try:
        mp.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *_PRELOAD_LAST])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return str(script)


def python() -> str:
    """Path of a ``python`` for programs that import torch or Lightning: ten seconds quicker than ``sys.executable``."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    script = _start_server()
    deadline = time.monotonic() + 100
    while not Path(script).with_name("socket").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return script


@cache
def _build_kernels_once() -> None:
    """Compiles the CPU kernels if that was never done on this machine, outside the time limit of any run."""
    process = mp.get_context("forkserver").Process(target=_build_kernels, daemon=True)
    process.start()
    process.join(300)
    process.kill()


def _build_kernels() -> None:
    from lightning_onebit.kernels import get_backend

    get_backend("auto", "cpu")
    os._exit(0)


def _collect(
    connections: list[Any], timeout: float, may_die: Collection[int]
) -> tuple[list[Any], list[int], list[int]]:
    """Waits for the answers ``(succeeded, pickle)`` by rank; also returns the ranks that died against expectation and those that hang."""
    answers: list[Any] = [None] * len(connections)
    dead: list[int] = []
    open_ranks = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + timeout
    while open_ranks and time.monotonic() < deadline:
        for connection in wait(list(open_ranks), deadline - time.monotonic()):
            rank = open_ranks.pop(connection)
            try:
                answers[rank] = connection.recv()
            except EOFError:
                if rank not in may_die:
                    dead.append(rank)
            if rank in dead or (answers[rank] is not None and not answers[rank][0]):
                # the others most likely wait for this one: do not sit out the whole timeout
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers, sorted(dead), sorted(open_ranks.values())


def _problems(
    answers: list[Any], dead: list[int], hung: list[int], processes: list[Any], directory: str, timeout: float
) -> list[str]:
    """One text per rank that raised, died or hung."""
    problems = []
    for rank in hung:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    for rank, answer in enumerate(answers):
        if answer is not None and not answer[0]:
            problems.append(f"--- rank {rank} raised:\n{pickle.loads(answer[1])}")
    for rank in dead:
        processes[rank].join(10)
        problems.append(f"--- rank {rank} died with exit code {processes[rank].exitcode}")
    for rank in hung:
        limit = f"{timeout:g} s, or {GRACE:g} s after another rank failed"
        problems.append(f"--- rank {rank} still ran after {limit}:\n{_stack(directory, rank)}")
    return problems


def _stack(directory: str, rank: int) -> str:
    path, deadline = Path(directory, f"stack-{rank}"), time.monotonic() + 2
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        if text:
            return text
        time.sleep(0.02)
    return "(no stack)"


def _worker(rank: int, world: int, job: bytes, connection: Connection, directory: str, timeout: float) -> None:
    gc.freeze()  # a collection need not look through what the server imported, which takes a second
    stack = open(Path(directory, f"stack-{rank}"), "w")  # noqa: SIM115  lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name, which may hang
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        fn, args = pickle.loads(job)
        answer = (True, pickle.dumps(fn(rank, world, *args)))
    except BaseException:
        answer = (False, pickle.dumps(traceback.format_exc()))
    connection.send(answer)
    with contextlib.suppress(EOFError):
        connection.recv()  # ends when the parent has all answers and closes its end
    os._exit(0)  # no destructors: gloo's threads sometimes abort a process that exits in the normal way


def grouped(options: Mapping[str, Any], **differing: Any) -> dict[str, Any]:
    """Keywords of an optimizer, or of a strategy, from flat options: those of the exchange go into one ``ExchangeOptions``.

    Args:
        options: keywords and fields of ``ExchangeOptions`` by name; the fields change an ``exchange`` that is given too.
        **differing: more of them, which count where both have them.
    """
    from lightning_onebit import ExchangeOptions

    given = {**options, **differing}
    exchange = {f.name: given.pop(f.name) for f in fields(ExchangeOptions) if f.name in given}
    return {**given, "exchange": replace(given.get("exchange", ExchangeOptions(state_dtype="float32")), **exchange)}


# ----- what really went through torch.distributed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One collective as it was issued: its name, the bytes of this rank's input and the ranks taking part."""

    op: str
    input_bytes: int
    ranks: int

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sends: an all-to-all keeps its own row, an all-gather sends its input to all others, an all-reduce is a ring."""
        n = self.ranks
        if self.op == "all_to_all":
            return self.input_bytes * (n - 1) // n
        if self.op == "all_gather":
            return self.input_bytes * (n - 1)
        if self.op == "all_reduce":
            return 2 * self.input_bytes * (n - 1) // n
        raise ValueError(f"op={self.op!r} is no collective of the exchange; give its bytes here if it is to be one")


# methods of ProcessGroup (names of old and new torch releases) -> (name here, position of the input among the arguments)
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "barrier": ("barrier", 0),
}


@dataclass
class Counted:
    """The collectives seen so far, in the order in which they were issued."""

    seen: list[Seen] = field(default_factory=list)

    def of(self, op: str) -> list[Seen]:
        """Those of one kind."""
        return [s for s in self.seen if s.op == op]

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sent in all of them."""
        return sum(s.bytes_sent for s in self.seen)

    def take(self) -> Counted:
        """What was seen since the last call; forgets it."""
        taken, self.seen = Counted(self.seen), []
        return taken


def _nbytes(argument: Any) -> int:
    import torch

    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_nbytes(a) for a in argument)
    return 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts every collective of this process, whatever function of torch.distributed issues it.

    Works below the public functions, on the methods of ``ProcessGroup``, so it sees what code that kept a reference to an
    old function does.
    """
    import torch.distributed as dist

    counted = Counted()
    # from the class dictionary: getattr would hand out plain functions that no longer bind when they are put back
    originals = {name: vars(dist.ProcessGroup)[name] for name in _METHODS if name in vars(dist.ProcessGroup)}

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        op, position = _METHODS[name]

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            counted.seen.append(Seen(op, _nbytes(args[position]) if len(args) > position else 0, group.size()))
            return original(group, *args, **kwargs)

        return method

    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, wrap(name, original))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
