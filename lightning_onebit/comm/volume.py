"""Bytes on the wire, as formulas: what the transport counts, what the ledger compares with and what the planner predicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_onebit.kernels import Packed


def ring_bytes(ranks: int, nbytes: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of ``nbytes``: ``2 (n-1)/n * nbytes``, rounded down."""
    return 2 * (ranks - 1) * nbytes // ranks


def peer_bytes(ranks: int, row_bytes: int) -> int:
    """Bytes that one rank sends when every other rank gets ``row_bytes`` of it (all-to-all, all-gather): ``(n-1) * row_bytes``."""
    return (ranks - 1) * row_bytes


@dataclass(frozen=True)
class Collective:
    """One collective of an exchange, as a rank takes part in it.

    Attributes:
        kind: ``"all_to_all"`` or ``"all_gather"``.
        link: ``"inter"`` or ``"intra"``, as the ledger counts it.
        ranks: number of ranks that take part.
        row_bytes: bytes that each of the others receives from this rank.
    """

    kind: str
    link: str
    ranks: int
    row_bytes: int

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, as the ledger counts them."""
        return peer_bytes(self.ranks, self.row_bytes)


def exchange_collectives(
    blocks: Iterable[int],
    block_size: int,
    ranks: int,
    ranks_per_node: int = 1,
    *,
    has_scales: bool = True,
    node_average: bool = True,
) -> Iterator[Collective]:
    """The collectives of ``Exchange.run`` over buckets of so many blocks each, in the order in which a bucket meets them.

    Args:
        blocks: blocks per bucket, padding included; multiples of ``ranks``.
        block_size: elements per block.
        ranks: number of ranks ``n``.
        ranks_per_node: ``K``; more than 1 is the hierarchical exchange.
        has_scales: whether rows carry a scale per block (all algorithms but BinSGDM).
        node_average: whether ranks of a node average in fp32 first (not for BinSGDM's bitmaps of live coordinates).
    """
    nodes = ranks // ranks_per_node
    for count in blocks:
        chunk = count // ranks
        row = Packed.row_bytes(chunk, block_size, has_scales)
        if ranks_per_node > 1 and node_average:
            yield Collective("all_to_all", "intra", ranks_per_node, count // ranks_per_node * block_size * 4)
        yield Collective("all_to_all", "inter", nodes, row)
        yield Collective("all_gather", "inter", nodes, row)
        if ranks_per_node > 1:
            yield Collective("all_gather", "intra", ranks_per_node, nodes * row)
