"""The two-phase exchange: round 1 sends every rank its chunk, the owner reduces, round 2 sends the result to all.

Two collectives per bucket (four when hierarchical), pipelined: bucket k+1 is encoded and sent, then
bucket k reduced and sent on, then bucket k-1 finished. Collectives are asynchronous and issued in the same order on all
ranks. The codec decides what is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_onebit.comm.buckets import Bucket
from lightning_onebit.comm.transport import Pending, Transport
from lightning_onebit.kernels.transfer import upload


class Codec(Protocol):
    """What an algorithm puts on the wire and does with what comes back."""

    def local(self, bucket: Bucket) -> Tensor | None:
        """fp32 flat of the whole bucket: the quantity that ranks of a node average before compression (hierarchical only)."""

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: uint8 ``(nodes, row bytes)``, row l for the owner on node l. ``shard``: node mean of ``local`` or None when flat."""

    def received_buffer(self, bucket: Bucket, sent: Tensor) -> Tensor:
        """Like ``sent``: what round 1 writes into."""

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: uint8 reply for this rank's chunk from ``received`` of shape ``(nodes, row bytes)``."""

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Every rank: ``gathered`` is uint8 ``(size, reply bytes)``, row r the chunk ``[r, r+1) * blocks/size`` of the bucket."""

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """uint8 ``(size, reply bytes)`` that round 2 writes into."""


def chunk_order(size: int, ranks_per_node: int) -> list[int]:
    """Which chunk each rank owns: rank ``l*K + k`` owns chunk ``k*L + l``, so that shard k is contiguous."""
    nodes = size // ranks_per_node
    return [(r % ranks_per_node) * nodes + r // ranks_per_node for r in range(size)]


class Exchange:
    """Runs codecs over buckets.

    Args:
        transport: collectives, ledger and timeouts.
        slack: buckets that may have their last collective under way while others are encoded, >= 0.
    """

    def __init__(self, transport: Transport, slack: int = 1) -> None:
        self.transport = transport
        self.slack = slack

    def run(self, buckets: Sequence[Bucket], codec: Codec) -> None:
        """Exchanges all buckets; returns when the last one is finished.

        Raises:
            CollectiveTimeout: a rank did not join a collective; the message names rank, step, round and bucket.
            CollectiveFailure: a collective failed.
        """
        session = self.begin(codec)
        for bucket in buckets:
            session.launch(bucket)
        session.finish()

    def begin(self, codec: Codec, slack: int | None = None) -> ExchangeSession:
        """Opens an exchange whose buckets are launched one by one, as their gradients arrive; ``slack`` replaces the exchange's."""
        return ExchangeSession(self, codec, self.slack if slack is None else slack)

    def _stages(self, bucket: Bucket, codec: Codec) -> Generator[Pending, None, None]:
        transport, topology = self.transport, self.transport.topology
        ledger, where = transport.ledger, f"bucket {bucket.index}"
        inter, intra, shard, local = topology.inter_group, topology.intra_group, None, None
        if topology.hierarchical:
            with ledger.compressing("pack"):
                local = codec.local(bucket)
        if local is not None:
            local = local.view(topology.ranks_per_node, -1)
            parts = torch.empty_like(local)
            what = f"node round (reduce-scatter) of {where}"
            yield transport.all_to_all(parts, local, intra, what=what, link="intra")
            with ledger.compressing("pack"):
                shard = mean_in_order(parts)
        with ledger.compressing("pack"):
            sent = codec.encode(bucket, shard)
        received = codec.received_buffer(bucket, sent)
        yield transport.all_to_all(received, sent, inter, what=f"round 1 (all-to-all) of {where}", link="inter")
        with ledger.compressing("reduce"):
            reply = codec.reduce(bucket, received)
        gathered = codec.reply_buffer(bucket)
        rows = reply.new_empty((topology.nodes, reply.numel())) if topology.hierarchical else gathered
        yield transport.all_gather(rows, reply, inter, what=f"round 2 (all-gather) of {where}", link="inter")
        if topology.hierarchical:
            by_number, what = gathered.view(topology.ranks_per_node, -1), f"node round (all-gather) of {where}"
            yield transport.all_gather(by_number, rows, intra, what=what, link="intra")
        with ledger.compressing("apply"):
            codec.finish(bucket, gathered)


def mean_in_order(parts: Tensor) -> Tensor:
    """Mean of the rows of an fp32 tensor, summed in row order, then times fp32(1/rows)."""
    total = parts[0].clone()
    for row in range(1, parts.shape[0]):
        total += parts[row]
    return total.mul_(upload([1.0 / parts.shape[0]], parts.device, torch.float32))


class ExchangeSession:
    """An exchange under way.

    Every launch encodes and sends the new bucket, then moves every older one a stage on, those with most stages left first. A
    bucket whose last collective has been issued waits, for no other rank depends on it. The order depends on the sequence of
    launches alone, so ranks that launch alike issue the same sequence of collectives.
    """

    def __init__(self, exchange: Exchange, codec: Codec, slack: int) -> None:
        self._exchange = exchange
        self._codec = codec
        self._slack = slack
        self._last_stage = 4 if exchange.transport.topology.hierarchical else 2
        self._under_way: list[_Flight] = []
        self._arriving: deque[_Flight] = deque()

    def launch(self, bucket: Bucket) -> None:
        """Begins a bucket's exchange.

        Raises:
            CollectiveFailure: an older bucket's collective failed or timed out.
        """
        older = self._under_way
        newest = _Flight(self._exchange._stages(bucket, self._codec))
        newest.advance()
        self._under_way = [*older, newest]
        self._advance(older)
        while len(self._arriving) > self._slack:
            self._arriving.popleft().advance()

    def finish(self) -> None:
        """Brings all buckets in."""
        while self._under_way:
            self._advance(self._under_way)
        while self._arriving:
            self._arriving.popleft().advance()

    def _advance(self, flights: Sequence[_Flight]) -> None:
        for flight in sorted(flights, key=lambda flight: flight.stage):
            flight.advance()
        self._arriving.extend(flight for flight in self._under_way if flight.stage == self._last_stage)
        self._under_way = [flight for flight in self._under_way if flight.stage < self._last_stage]


class _Flight:
    """The stages of a bucket and the collective it waits for."""

    def __init__(self, stages: Generator[Pending, None, None]) -> None:
        self._stages = stages
        self._pending: Pending | None = None
        self.stage = 0  # collectives issued

    def advance(self) -> None:
        """Waits for the collective under way, then runs up to the next one."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = next(self._stages, None)
        self.stage += 1
