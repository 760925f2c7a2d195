"""Collectives with names: every wait is bounded and its failure says who waited for what."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm.ledger import ByteLedger
from lightning_onebit.comm.ranges import begin, end
from lightning_onebit.comm.simulation import SimulatedGroup, SimulatedWork
from lightning_onebit.comm.staging import CudaStager, HostCopy, Stager
from lightning_onebit.comm.topology import Group, Topology
from lightning_onebit.comm.volume import peer_bytes, ring_bytes

# torch 2.13 renamed all_gather_into_tensor; older releases do not know the new name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Work: TypeAlias = "dist.Work | SimulatedWork"

_CALLS: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], Work]] = {
    "all_to_all": lambda out, inp, group: dist.all_to_all_single(
        out.view(-1), inp.view(-1), group=group, async_op=True
    ),
    "all_gather": lambda out, inp, group: _all_gather(out.view(-1), inp.reshape(-1), group=group, async_op=True),
    "all_reduce": lambda out, _, group: dist.all_reduce(out, group=group, async_op=True),
}

DEFAULT_TIMEOUT = timedelta(minutes=30)


def _backend(group: Group | None, device_type: str) -> str | None:
    """Name of the backend that serves a device's tensors in a group; None: none does."""
    if isinstance(group, SimulatedGroup):
        return "simulated"
    # "cpu:gloo,cuda:nccl"; get_backend() names one backend, or none of them where a group has several
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), None)


class CollectiveFailure(RuntimeError):
    """A collective failed on this rank, most often because another rank has died."""


class CollectiveTimeout(CollectiveFailure):
    """A collective did not complete in time: some other rank never joined it."""


class Pending:
    """A collective under way. ``wait()`` returns when its result may be read."""

    def __init__(self, work: Work | None, what: str, transport: Transport, streams: bool = False) -> None:
        self._work = work
        self._what = what
        self._transport = transport
        self._streams = streams  # whether wait() orders streams (NCCL)
        self._failed: CollectiveFailure | None = None  # a second wait must not take what is there for the result

    def wait(self) -> None:
        """Blocks until the collective is done.

        Raises:
            CollectiveTimeout: not done within the transport's timeout.
            CollectiveFailure: failed otherwise.
        """
        if self._failed is not None:
            raise self._failed
        if self._work is None:
            return
        work, self._work = self._work, None
        transport = self._transport
        start, opened = time.perf_counter(), begin("exchange")
        try:
            # With NCCL, wait() orders streams and must not block the host; its watchdog owns the timeout.
            finished = work.wait() if self._streams else work.wait(transport.timeout)
        except RuntimeError as error:
            self._failed = transport.failure(self._what, error, time.perf_counter() - start)
            raise self._failed from error
        finally:
            end(opened)
        transport.ledger.waited(time.perf_counter() - start)
        if finished is False:
            self._failed = transport.failure(self._what, RuntimeError("timed out"), time.perf_counter() - start)
            raise self._failed


class _Staged(Pending):
    """A collective whose input is on its way to the host, or that has been issued from there."""

    def __init__(
        self, transport: Transport, what: str, copy: HostCopy, result: Tensor, out: Tensor, issue: Callable[[], Work]
    ) -> None:
        super().__init__(None, what, transport)
        self._copy: HostCopy | None = copy
        self._result: Tensor | None = result
        self._out = out
        self._issue = issue

    def start(self, *, block: bool) -> bool:
        """Issues the collective if its input is there, or once it is; whether it was issued."""
        if self._copy is None or (not block and not self._copy.ready()):
            return self._copy is None
        start = time.perf_counter()
        self._copy.wait()
        self._transport.ledger.waited(time.perf_counter() - start)
        self._copy = None
        try:
            self._work = self._transport._issue(self._what, self._issue)
        except CollectiveFailure as error:
            self._failed = error
            raise
        return True

    def wait(self) -> None:
        """Blocks until the collective is done, and queues the copy of its result to the device."""
        if self._result is None:
            return
        # all of them: the network must not idle while this one is waited for
        self._transport.issue_staged(block=True)
        super().wait()
        self._transport.stager.to_device(self._result, self._out)
        self._result = None


class Transport:
    """Issues the collectives of one exchange and counts them in a ledger.

    Args:
        topology: the ranks.
        ledger: where bytes and waiting times go.
        timeout: bound of every wait.
        name: who communicates, for messages.
        stager: how tensors reach a backend that knows only the host's memory (None: CUDA tensors through pinned memory).
    """

    def __init__(
        self,
        topology: Topology,
        ledger: ByteLedger,
        timeout: timedelta = DEFAULT_TIMEOUT,
        name: str = "exchange",
        stager: Stager | None = None,
    ) -> None:
        self.topology = topology
        self.ledger = ledger
        self.timeout = timeout
        self.name = name
        self.step = 0  # named in failures; the owner keeps it current
        self.stager: Stager = stager or CudaStager()
        # staged collectives that wait for their input, in the order in which all ranks issue them
        self._staged: deque[_Staged] = deque()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    def failure(self, what: str, error: Exception, seconds: float) -> CollectiveFailure:
        """Turns a backend's error into one that says who waited for what."""
        text = str(error)
        late = re.search(r"timed?[ -]?out", text, re.IGNORECASE)
        where = f"rank {self.topology.rank} of {self.size}, {self.name}, step {self.step}, {what}"
        if late:
            return CollectiveTimeout(
                f"{where}: gave up after {seconds:.1f} s waiting for the other ranks. One of them has died, is stalled, or took "
                f"another path (look at its log); raise `timeout` (now {self.timeout.total_seconds():g} s) if it is only slow. [{text}]"
            )
        return CollectiveFailure(
            f"{where}: failed, most likely because another rank has died; look at its log. [{text}]"
        )

    def all_to_all(self, out: Tensor, inp: Tensor, group: Group | None, *, what: str, link: str) -> Pending:
        """Row r of ``inp`` goes to rank r of ``group``; row r of ``out`` comes from it. Asynchronous.

        Args:
            out: ``(ranks, ...)``, contiguous.
            inp: same shape and dtype.
            group: members.
            what: name for failures.
            link: ``"inter"`` or ``"intra"``, for the ledger.
        """
        ranks = inp.shape[0]
        self.ledger.sent(peer_bytes(ranks, inp.numel() // ranks * inp.element_size()), link=link)
        return self._begin("all_to_all", what, group, out, inp)

    def all_gather(self, out: Tensor, inp: Tensor, group: Group | None, *, what: str, link: str | None) -> Pending:
        """Every rank's ``inp`` arrives as one row of ``out`` on all ranks. Asynchronous. ``link=None`` counts as control."""
        ranks = out.shape[0]
        nbytes = peer_bytes(ranks, inp.numel() * inp.element_size())
        if link is None:
            self.ledger.controlled(nbytes)
        else:
            self.ledger.sent(nbytes, link=link)
        return self._begin("all_gather", what, group, out, inp)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Pending:
        """Sums ``tensor`` over all ranks in place. Asynchronous. Counted as a ring: ``2 (n-1)/n`` of its bytes."""
        self.ledger.sent(ring_bytes(self.size, tensor.numel() * tensor.element_size()), link="inter")
        return self._begin("all_reduce", what, self.topology.group, tensor, tensor)

    def _begin(self, kind: str, what: str, group: Group | None, out: Tensor, inp: Tensor) -> Pending:
        """Issues a collective, or stages it where the group's backend cannot reach the device's memory."""
        if group is None:
            out.copy_(inp.view(out.shape))
            return Pending(None, what, self)
        if isinstance(group, SimulatedGroup):
            return Pending(group.join(kind, inp, out), what, self)
        call = _CALLS[kind]
        streams = _backend(group, inp.device.type) == "nccl"
        if streams or not self.stager.handles(inp):
            # ranks issue in the same order, whatever they have staged
            self.issue_staged(block=True)
            return Pending(self._issue(what, lambda: call(out, inp, group)), what, self, streams)
        copy = self.stager.to_host(inp)
        result = copy.host if out is inp else self.stager.host_like(out)
        staged = _Staged(self, what, copy, result, out, lambda: call(result, copy.host, group))
        self._staged.append(staged)
        self.issue_staged(block=False)
        return staged

    def issue_staged(self, *, block: bool) -> None:
        """Issues staged collectives in order: those whose input has reached the host or, blocking for it, all."""
        while self._staged and self._staged[0].start(block=block):
            self._staged.popleft()

    def _issue(self, what: str, call: Callable[[], Work]) -> Work:
        try:
            return call()
        except RuntimeError as error:
            raise self.failure(what, error, 0.0) from error

    def device(self, preferred: torch.device) -> torch.device:
        """Device that small control tensors must live on."""
        group = self.topology.group
        return preferred if group is not None and _backend(group, "cpu") in (None, "nccl") else torch.device("cpu")
