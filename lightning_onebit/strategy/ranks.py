"""The ranks of a run, as the adapters see them: who they are, how an optimizer joins them, what is given back in the end."""

from __future__ import annotations

import atexit
import contextlib
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import ByteLedger, Topology, Transport, disconnect, handshake, share_values, torn_down_last
from lightning_onebit.engine import OnebitOptimizer

# characters of what ranks tell each other of a problem
_LONGEST_PROBLEM = 1024


def connected() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def disconnected_at_exit() -> Iterator[None]:
    """Within it the process is connected; it is disconnected when it ends.

    Lightning leaves a gloo group to the interpreter's shutdown, where its threads sometimes abort the process.
    """
    before = connected()
    yield
    if not before:
        atexit.register(_disconnect)


def _disconnect() -> None:
    with contextlib.suppress(RuntimeError):
        disconnect()


@dataclass(frozen=True)
class Replicas:
    """How the ranks of a run share the model: consecutive ones hold the shards of one replica.

    The ranks that hold the same shards, one in each replica, are a *column*: they exchange with each other.

    Attributes:
        count: number of replicas.
        shards: ranks of a replica; 1: every rank holds all of the model.
    """

    count: int
    shards: int = 1

    @property
    def columns(self) -> list[list[int]]:
        """The ranks of every column, in the order of replicas."""
        return [list(range(column, self.count * self.shards, self.shards)) for column in range(self.shards)]

    def place(self, rank: int) -> tuple[int, int]:
        """The replica that a rank belongs to, and its column."""
        return divmod(rank, self.shards)


class Ranks:
    """All ranks of a run (or of ``group``), for small rounds that neither training nor its accounts know of.

    ``timeout`` bounds every wait, ``device`` is that of the parameters, ``name`` tells the occasion in failures.
    """

    def __init__(self, timeout: timedelta, device: torch.device, name: str, group: Any = None) -> None:
        self.transport = Transport(Topology.create(group), ByteLedger(), timeout, name)
        self.rank, self.size = self.transport.topology.rank, self.transport.size
        self._device = device
        self._name = name

    def compare(self, facts: Sequence[str], subject: str) -> None:
        """Raises ``PlanMismatch`` on all ranks where they have different facts. Collective."""
        handshake(self.transport, facts, self._device, subject)

    def share(self, numbers: Sequence[int]) -> Tensor:
        """Numbers of every rank, int64, one row per rank; as many on each. Collective."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return share_values(self.transport, mine, self._name)

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, of what JSON can say. Collective."""
        text = list(json.dumps(value).encode())
        lengths = self.share([len(text)]).flatten().tolist()
        rows = self.share(text + [0] * (max(lengths) - len(text))).tolist()
        return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, problem: str) -> str | None:
        """The problem of the first rank that has one (not an empty one), with its rank. Collective; it waits for all of them."""
        said = self.gather(problem[:_LONGEST_PROBLEM])
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), None)


def node_size(asked: int | None, node: int, device: torch.device, error: type[Exception]) -> int:
    """Ranks that exchange as one node; 1 for the flat exchange. Collective if nodes must be found out.

    Args:
        asked: ``ranks_per_node``; None: the ranks of a node if there are several nodes with several ranks each.
        node: number of this rank's node.
        device: of the parameters.
        error: what is raised where nodes are uneven, or ``asked`` does not divide the ranks.
    """
    ranks, size = dist.get_world_size(), asked
    if size is None:
        # all of them, gathered: a node that was started with fewer ranks than the others must not go unnoticed
        mine = torch.tensor([node], device=device)
        layout = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(layout, mine)
        nodes = [int(number) for number in layout]
        counts = [nodes.count(number) for number in dict.fromkeys(nodes)]
        if len(counts) == 1 or max(counts) == 1:
            return 1
        if len(set(counts)) > 1 or nodes != sorted(nodes):
            raise error(
                f"the hierarchical exchange needs the same number of consecutive ranks on every node, found ranks per node {counts} "
                f"(nodes of ranks 0, 1, ...: {nodes}): start all nodes alike, or set `ranks_per_node=1` for the flat exchange."
            )
        size = counts[0]
    if ranks % size:
        raise error(
            f"ranks_per_node={size} does not divide the {ranks} ranks of this run: give a divisor, or 1 for the flat exchange."
        )
    # one node alone has nothing to exchange between nodes: its ranks exchange flat
    return size if size < ranks else 1


class Groups:
    """Process groups that were made for an adapter, to be destroyed on all ranks alike.

    Torch holds them until then; a reference that lives longer keeps gloo's threads, so here they are held weakly.

    Args:
        replicas: how ranks share the model; None: each has all of it.
    """

    def __init__(self, replicas: Replicas | None = None) -> None:
        self._replicas = replicas
        self._refs: list[weakref.ref[Any]] = []

    def new(self, timeout: timedelta | None, *, everyone: bool = False) -> dist.ProcessGroup:
        """A process group of this rank's column, or of all ranks if there is one column or ``everyone`` is set. Collective."""
        replicas = None if everyone else self._replicas
        if replicas is None or replicas.shards == 1:
            group = dist.new_group(timeout=timeout)
        else:  # every rank makes the groups of all columns, in the same order
            made = [dist.new_group(ranks, timeout=timeout) for ranks in replicas.columns]
            group = made[replicas.place(dist.get_rank())[1]]
        self._refs.append(weakref.ref(group))
        return group

    def join(self, optimizer: OnebitOptimizer, timeout: timedelta | None, **how: Any) -> None:
        """Gives an optimizer a process group of its own (``new()``), instead of the one it may have from an earlier run. Collective.

        The smaller of ``timeout`` and its exchange's counts. ``how``: as for ``configure_communication()``.
        """
        limit = timedelta(seconds=optimizer.exchange.timeout)
        optimizer.release_communication()
        optimizer.configure_communication(
            self.new(timeout), timeout=limit if timeout is None else min(timeout, limit), **how
        )
        topology = optimizer.topology
        if topology.hierarchical:
            self._refs += [weakref.ref(group) for group in (topology.intra_group, topology.inter_group)]

    def destroy(self) -> None:
        """Destroys them, as far as the program has not done so. Nothing of the caller's may refer to them any more."""
        groups = [group for ref in self._refs if (group := ref()) is not None]
        self._refs = []
        with torn_down_last(list(groups)):
            while groups:
                group = groups.pop()
                if connected() and group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)
                del group
