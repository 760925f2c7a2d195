"""State that differs by rank, cut anew for another number of ranks, other nodes or other buckets.

Blocks of all parameters in a row are the same vector whatever the layout (only the padding differs, at its end, and where parameters
joined after the freeze behind those before), and a rank's flat tensor holds a run of it per bucket::

    worker residual     the rank's shard of every bucket (all of it when flat); one copy per node
    server residual     the rank's chunk of every bucket; one copy in all
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_onebit.comm.exchange import chunk_order

# how a rank's tensor lies over the blocks, by its name in ``OnebitOptimizer.residual_state_dict()``; a rule's own say it there ("arenas")
WORKER, SERVER, WHOLE = "worker", "server", "whole"
_KINDS = {
    "worker_residual": WORKER,
    "server_residual": SERVER,
    # between local steps of 0/1 Adam
    "local_momentum": WHOLE,
    "local_update": WHOLE,
    "local_weights": WHOLE,
}
# what a rank has done alone since the last synchronisation means nothing in another world: training goes on from the shared model
_DROPPED = frozenset({"local_update", "local_weights"})


def remedy(key: str, saved: Any) -> str:
    """What to say to a run whose residuals were saved with another value of ``key``, an entry of their description ("": nothing helps)."""
    if key == "block_size":
        return f"; continue with exchange=ExchangeOptions(block_size={saved!r})"
    if key == "preconditioned":
        return f"; continue with recipe={'default' if saved else 'published'!r}"
    return ""


# where a segment (blocks that were dealt together) begins, at the latest, among all blocks in a row
_SEGMENT = 1 << 48


class _Run(NamedTuple):
    """``blocks`` blocks from ``block`` on, of all blocks in a row."""

    block: int
    blocks: int


class Redistribution:
    """Makes this rank's part out of the parts of all ranks of an earlier run, which are added one at a time.

    The server residual is one vector over all blocks and is cut anew exactly. Of the worker residual only the mean over ranks
    enters the exchange: every rank gets that mean, so the mean stays what it was (to fp32 rounding). Moments that differ by rank
    (BinSGDM's m and a, 1-bit SGD's m, 0/1 Adam's m between synchronisations) are averaged likewise; local steps since the last
    synchronisation are dropped.

    Where ranks and nodes are as many as they were and only buckets are others (``bucket_mb``, or its default on another kind of device),
    every rank takes its own part, local steps among it, and nothing is averaged.

    Args:
        mine: ``residual_state_dict()`` of this rank's optimizer; its tensors are not used.

    Example:
        >>> parts = Redistribution(optimizer.residual_state_dict())
        >>> for rank in range(4):
        ...     parts.add(read(rank))
        >>> optimizer.load_residual_state_dict(parts.result())
    """

    def __init__(self, mine: Mapping[str, Any]) -> None:
        self._mine = {key: value for key, value in mine.items() if key not in ("tensors", "shared_weights")}
        self._tensors: dict[str, Tensor] = {}
        self.dropped: set[str] = set()

    def add(self, theirs: Mapping[str, Any]) -> None:
        """Adds the part of one rank of the earlier run.

        Raises:
            ValueError: written by another algorithm, at another step, or for other parameters or blocks.
        """
        same_elements = ("numels", "segments", "strides", "placed", "shard")
        for key in ("algorithm", "steps", "block_size", *same_elements, "preconditioned"):
            saved, wanted = theirs.get(key, False), self._mine.get(key, False)
            if saved != wanted:
                raise ValueError(
                    f"residuals were saved with {key}={saved!r}, this run has {wanted!r}, and cannot be redistributed"
                    + remedy(key, saved)
                )
        size, size_per_node, rank = theirs["world_size"], theirs["ranks_per_node"], theirs["rank"]
        shares = {WORKER: size_per_node / size, SERVER: 1.0, WHOLE: 1.0 / size}
        same = (size, size_per_node) == (self._mine["world_size"], self._mine["ranks_per_node"])
        if same:
            own = self._mine["rank"]
            shares |= {WORKER: float(rank // size_per_node == own // size_per_node), WHOLE: float(rank == own)}
        for name, tensor in theirs["tensors"].items():
            if name in _DROPPED and not same:
                self.dropped.add(name)
                continue
            kind = {**_KINDS, **theirs.get("arenas", {})}.get(name)
            if kind is None:
                raise ValueError(f"state {name!r} of a rank is unknown to this release and cannot be redistributed")
            if name not in self._tensors:
                blocks = sum(r.blocks for r in _runs(self._mine, kind))
                self._tensors[name] = torch.zeros(blocks * self._block_size, dtype=torch.float32)
            _add_blocks(
                self._tensors[name],
                _runs(self._mine, kind),
                tensor,
                _runs(theirs, kind),
                self._block_size,
                shares[kind],
            )

    def result(self) -> dict[str, Any]:
        """What ``load_residual_state_dict()`` of this rank's optimizer takes, fp32 on the CPU."""
        return {**self._mine, "tensors": self._tensors}

    @property
    def _block_size(self) -> int:
        return int(self._mine["block_size"])


def _runs(layout: Mapping[str, Any], kind: str) -> list[_Run]:
    """Which blocks a rank's flat tensor holds, one run per bucket, in the tensor's order."""
    size, size_per_node, rank = layout["world_size"], layout["ranks_per_node"], layout["rank"]
    parts, part = {
        WORKER: (size_per_node, rank % size_per_node),
        SERVER: (size, chunk_order(size, size_per_node)[rank]),
        WHOLE: (1, 0),
    }[kind]
    runs, first, left = [], 0, _blocks_by_segment(layout)
    for blocks in layout["bucket_blocks"]:
        runs.append(_Run(first + part * (blocks // parts), blocks // parts))
        first, left[0] = first + blocks, left[0] - blocks
        if left[0] <= 0:
            # the padding at its end depends on the layout
            first = (first // _SEGMENT + 1) * _SEGMENT
            left = left[1:] or [0]
    return runs


def _blocks_by_segment(layout: Mapping[str, Any]) -> list[int]:
    """Blocks of the parameters of each segment, without padding; segments without any are left out."""
    blocks = [-(-numel // layout["block_size"]) for numel in layout["numels"]]
    ends = list(accumulate(layout.get("segments", [len(blocks)])))
    return [total for start, end in pairwise([0, *ends]) if (total := sum(blocks[start:end]))] or [0]


def _add_blocks(
    into: Tensor, into_runs: list[_Run], values: Tensor, value_runs: list[_Run], size: int, factor: float
) -> None:
    """``into += factor * values`` where both hold the same blocks (runs of each are in ascending order); factor 0: not at all."""
    if values.numel() != sum(run.blocks for run in value_runs) * size:
        raise ValueError(
            f"a rank's state has {values.numel()} elements, {sum(run.blocks for run in value_runs) * size} were expected"
        )
    i = j = at_i = at_j = 0
    if not factor:
        return
    while i < len(into_runs) and j < len(value_runs):
        a, b = into_runs[i], value_runs[j]
        lo, hi = max(a.block, b.block), min(a.block + a.blocks, b.block + b.blocks)
        if lo < hi:
            target = into[(at_i + lo - a.block) * size : (at_i + hi - a.block) * size]
            target.add_(values[(at_j + lo - b.block) * size : (at_j + hi - b.block) * size].float(), alpha=factor)
        # the run that ends first is done
        if a.block + a.blocks <= b.block + b.blocks:
            i, at_i = i + 1, at_i + a.blocks
        else:
            j, at_j = j + 1, at_j + b.blocks
