"""Who exchanges with whom: the ranks of a group and, for the hierarchical exchange, their nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lightning_onebit.comm.simulation import SimulatedGroup

if dist.is_available():
    # It takes the default group of the moment as default argument and so keeps it, and gloo's threads, to the end of the process,
    # where a thread that still has a tensor to give back ends it with SIGABRT. Every optimizer imports it, through torch._dynamo:
    # now, while there is no group.
    import torch.distributed.nn.functional

# strings: torch may have been built without torch.distributed
Group: TypeAlias = "dist.ProcessGroup | SimulatedGroup"


def distributed_world() -> int:
    """World size of the default group, 1 when torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextlib.contextmanager
def torn_down_last(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Within it groups may be given up; what is behind them (gloo's threads) ends at its end.

    Torch before 2.6 ends these threads with Python's lock held when the last reference to a group goes, and waits for ever if one of them
    needs the lock just then to give a tensor back. The last reference to a *backend* goes without the lock.
    """
    backends = [backend for group in groups for backend in _backends(group)]
    del groups  # the caller's list may hold the last references
    try:
        yield
    finally:
        backends.clear()


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # none for this kind of device
            yield group._get_backend(torch.device(device))


def disconnect() -> None:
    """Destroys all process groups of this process; nothing happens where there are none."""
    if dist.is_available() and dist.is_initialized():
        with torn_down_last(list(dist.distributed_c10d._world.pg_map)):
            dist.destroy_process_group()


@dataclass(frozen=True)
class Topology:
    """Ranks of one exchange: ``size = ranks_per_node * nodes``; rank r is number ``r % K`` of node ``r // K``.

    Attributes:
        group: process group of all ranks; None in a single process without torch.distributed.
        rank: rank within the group.
        size: number of ranks ``n``.
        ranks_per_node: ``K``; 1 means the flat exchange.
        intra_group: the K ranks of this node (None when flat).
        inter_group: the ranks with the same number on every node (``group`` itself when flat).
    """

    group: Group | None
    rank: int = 0
    size: int = 1
    ranks_per_node: int = 1
    intra_group: Group | None = None
    inter_group: Group | None = None

    @property
    def nodes(self) -> int:
        """``L = size / ranks_per_node``."""
        return self.size // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Number of this rank within its node, ``k``."""
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        """Number of this rank's node, ``l``."""
        return self.rank // self.ranks_per_node

    @property
    def hierarchical(self) -> bool:
        """Whether ranks of a node share the work of the exchange."""
        return self.ranks_per_node > 1

    @classmethod
    def create(
        cls,
        group: Group | None = None,
        *,
        ranks_per_node: int = 1,
        timeout: timedelta | None = None,
        backend: str | None = None,
    ) -> Topology:
        """Builds the topology of a group; with ``ranks_per_node > 1`` also its node groups.

        Creating node groups is a collective of the whole group: every rank must call this alike.

        Args:
            group: process group, or a rank's group of a ``SimulatedWorld``; None takes the default group if
                torch.distributed is initialised, else a single process.
            ranks_per_node: consecutive ranks that share a node.
            timeout: timeout of the node groups.
            backend: backend of the node groups (None: the default group's).

        Raises:
            ValueError: ``ranks_per_node`` does not divide the group, or this process is not a member of it.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            if ranks_per_node != 1:
                raise ValueError(
                    f"ranks_per_node={ranks_per_node} needs torch.distributed; a single process has 1 rank"
                )
            return cls(None)
        if isinstance(group, SimulatedGroup):
            rank, size = group.rank, group.size
        else:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError(
                "this process is not a member of the process_group it was given; pass the group only to its members"
            )
        if ranks_per_node < 1 or size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not divide the {size} ranks of the group; nodes must be even"
            )
        if ranks_per_node == 1:
            return cls(group, rank, size, 1, None, group)
        nodes = size // ranks_per_node

        def own_group(family: list[list[int]]) -> Group:
            """That group of a family of disjoint ones which this rank belongs to."""
            mine = next(ranks for ranks in family if rank in ranks)
            if isinstance(group, SimulatedGroup):
                return group.subgroup(mine)
            members = dist.get_process_group_ranks(group)
            if size < dist.get_world_size():
                # ranks outside of the group take no part
                chosen = [members[r] for r in mine]
                return dist.new_group(chosen, timeout=timeout, backend=backend, use_local_synchronization=True)
            made = [dist.new_group([members[r] for r in ranks], timeout=timeout, backend=backend) for ranks in family]
            return made[family.index(mine)]

        if not isinstance(group, SimulatedGroup) and size < dist.get_world_size():
            assert group is not None  # it is a part of the world
            _align_group_counts(group, timeout)
        intra = own_group([[node * ranks_per_node + k for k in range(ranks_per_node)] for node in range(nodes)])
        inter = own_group([[node * ranks_per_node + k for node in range(nodes)] for k in range(ranks_per_node)])
        return cls(group, rank, size, ranks_per_node, intra, inter)


def _align_group_counts(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Makes sure that all ranks of a group have made equally many groups before.

    With local synchronisation torch names a group after that number: ranks with different ones would wait for each other in vain.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    nccl = "nccl" in str(dist.get_backend(group))
    most = torch.tensor(count, device=torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - count):
        dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
