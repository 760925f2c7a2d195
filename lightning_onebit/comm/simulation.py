"""Many ranks in one process: a world whose collectives meet in memory, for studies and tests of worlds one has no machines for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class SimulatedWork:
    """A simulated collective under way; what ``dist.Work`` is to a real one."""

    def __init__(self, meeting: _Meeting, group: SimulatedGroup) -> None:
        self._meeting = meeting
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until all ranks have joined.

        Args:
            timeout: bound of the wait; the world's own if None or longer.

        Raises:
            RuntimeError: a rank did not join in time, has failed, or joined with something else.
        """
        world, meeting = self._group.world, self._meeting
        seconds = world.timeout if timeout is None else min(world.timeout, timeout.total_seconds())
        meeting.over.wait(seconds)
        if not meeting.done:
            missing = [rank for member, rank in enumerate(self._group.ranks) if member not in meeting.arrived]
            if world.failed:
                rank, error = next(iter(world.failed.items()))
                raise RuntimeError(f"simulated rank {rank} has failed: {error}")
            raise RuntimeError(f"timed out after {seconds:g} s: simulated ranks {missing} never joined")
        if meeting.error is not None:
            raise RuntimeError(meeting.error)
        return True


class _Meeting:
    """One collective: who has come with which tensors."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.inputs: list[Tensor | None] = [None] * size
        self.outputs: list[Tensor | None] = [None] * size
        self.arrived: set[int] = set()
        self.error: str | None = None
        # set when carried out, and when a rank has failed so that nobody need wait any longer
        self.over = threading.Event()
        self.done = False


class SimulatedGroup:
    """What one rank holds of a simulated process group; give it to an optimizer as ``process_group``.

    Attributes:
        world: the world it belongs to.
        ranks: members, as ranks of the world.
        rank: this rank's number within the group.
        size: number of members.
    """

    def __init__(self, world: SimulatedWorld, ranks: tuple[int, ...], rank: int) -> None:
        self.world = world
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._calls = 0

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank={self.rank}, size={self.size})"

    def subgroup(self, ranks: Sequence[int]) -> SimulatedGroup:
        """The group of some members (numbers within this group), as this rank holds it.

        Raises:
            ValueError: this rank is not among them.
        """
        if self.rank not in ranks:
            raise ValueError(f"ranks={list(ranks)} does not contain this rank ({self.rank}); only members make a group")
        members = tuple(self.ranks[r] for r in ranks)
        return SimulatedGroup(self.world, members, list(ranks).index(self.rank))

    def all_reduce(self, tensor: Tensor) -> SimulatedWork:
        """Sums ``tensor`` over the ranks in place, in rank order: ``((t_0 + t_1) + t_2) + ...``."""
        return self.join("all_reduce", tensor, tensor)

    def barrier(self) -> None:
        """Waits until all ranks are here.

        Raises:
            RuntimeError: a rank did not come within the world's timeout, or has failed.
        """
        token = torch.empty(0)
        self.join("barrier", token, token).wait()

    def join(self, kind: str, inp: Tensor, out: Tensor) -> SimulatedWork:
        """Takes part in a collective, ``"all_to_all"``, ``"all_gather"``, ``"all_reduce"`` or ``"barrier"``."""
        number, self._calls = self._calls, self._calls + 1
        return SimulatedWork(self.world.join(self, number, kind, inp, out), self)


class SimulatedWorld:
    """``size`` ranks as threads of one process, each with its own model and optimizer, through the code of a real world.

    Only the transport differs: a collective completes when the last rank has joined it, in memory. Everything else
    (kernels, residuals, control rounds, ledger) is what runs on a cluster, so a result holds there bit for bit, up to
    the order in which a real dense all-reduce sums more than two ranks. Every wait is bounded.

    Torch's global random state is shared by all ranks: draw data from a ``torch.Generator`` of the rank's own.

    Args:
        size: number of ranks, >= 1.
        timeout: seconds that a rank waits for the others in one collective, > 0.

    Raises:
        ValueError: ``size`` or ``timeout`` out of range.

    Example:
        >>> def train(group):
        ...     model = build_model()
        ...     optimizer = OnebitAdam(
        ...         model.parameters(), freeze_step=10, exchange=ExchangeOptions(process_group=group)
        ...     )
        ...     for batch in batches(group.rank, group.size):
        ...         optimizer.zero_grad()
        ...         model(batch).mean().backward()
        ...         optimizer.step()
        ...     return optimizer.ledger.ratio
        >>> ratios = SimulatedWorld(64).run(train)
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size={size!r} must be an integer >= 1: the number of ranks to simulate")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be > 0 seconds")
        self.size = size
        self.timeout = float(timeout)
        self._lock = threading.Lock()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self.failed: dict[int, BaseException] = {}  # what ranks have raised

    def run(self, fn: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Runs ``fn(group, *args)`` on every rank and returns the results by rank.

        Args:
            fn: what a rank does; ``group`` is its ``SimulatedGroup`` of all ranks.
            *args: passed on, the same objects to every rank.

        Raises:
            Exception: what a rank raised (the first rank to raise; the others are then woken and end too).
        """
        self._meetings.clear()
        self.failed.clear()
        results: list[Any] = [None] * self.size
        everyone = tuple(range(self.size))

        def rank_main(rank: int) -> None:
            try:
                results[rank] = fn(SimulatedGroup(self, everyone, rank), *args)
            except BaseException as error:  # it is raised again below, in the caller's thread
                with self._lock:
                    self.failed.setdefault(rank, error)
                    for meeting in self._meetings.values():
                        meeting.over.set()

        # daemons, so that a rank stuck outside of collectives cannot keep the process alive
        threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in everyone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            rank, error = next(iter(self.failed.items()))
            if hasattr(error, "add_note"):
                error.add_note(f"raised by rank {rank} of a simulated world of {self.size}")
            raise error
        return results

    def join(self, group: SimulatedGroup, number: int, kind: str, inp: Tensor, out: Tensor) -> _Meeting:
        """One rank joins the group's collective number ``number``; the last one to come carries it out for all."""
        key = (group.ranks, number)
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting(kind, group.size))
            if kind != meeting.kind and meeting.error is None:
                meeting.error = f"rank {group.rank} joined collective {number} as {kind}, others as {meeting.kind}"
            meeting.inputs[group.rank], meeting.outputs[group.rank] = inp, out
            meeting.arrived.add(group.rank)
            last = len(meeting.arrived) == group.size
            if last:
                del self._meetings[key]
            elif self.failed:
                meeting.over.set()
        if last:
            try:
                if meeting.error is None:
                    _carry_out(meeting)
            except RuntimeError as error:
                meeting.error = f"{kind}: the ranks' tensors do not fit together ({error})"
            meeting.done = True
            meeting.over.set()
        return meeting


@torch.no_grad()
def _carry_out(meeting: _Meeting) -> None:
    """Moves the data of a collective that everybody has joined."""
    inputs = [t for t in meeting.inputs if t is not None]
    outputs = [t for t in meeting.outputs if t is not None]
    if meeting.kind == "all_to_all":
        rows = torch.stack([t.reshape(len(inputs), -1) for t in inputs])
        for rank, out in enumerate(outputs):
            out.copy_(rows[:, rank].reshape(out.shape))
    elif meeting.kind == "all_gather":
        gathered = torch.stack([t.reshape(-1) for t in inputs])
        for out in outputs:
            out.copy_(gathered.view(out.shape))
    elif meeting.kind == "all_reduce":
        total = inputs[0].clone()
        for other in inputs[1:]:
            total += other
        for out in outputs:
            out.copy_(total)
