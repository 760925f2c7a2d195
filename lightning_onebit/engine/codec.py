"""What travels in an exchange: bits and scales with error feedback. The one place that writes residuals and the momentum of a bucket.

An exchange is a transaction. Encoding and reducing write *new* residuals, beside those there are, and what comes back waits; when all
buckets are there and finite, ``end()`` makes the new residuals the optimizer's, hands momenta over and has the rule write weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, Control, peer_bytes, read_control
from lightning_onebit.comm import Codec as Wire
from lightning_onebit.kernels import BoundSpans, Packed, Residual
from lightning_onebit.kernels.residual import copy_blocks

if TYPE_CHECKING:
    from lightning_onebit.engine.rule import Sent
    from lightning_onebit.engine.step import Part, Step

#: what an exchange overwrites, and the blocks of the bucket whose it is: this rank's shard or chunk
Guarded: TypeAlias = "list[tuple[Tensor | Residual, tuple[int, int]]]"


class Codec(Wire):
    """What all codecs of a step have in common (see ``comm.exchange.Codec``).

    Attributes:
        arrived: what has come back, with scales that tell whether it is finite.
        alike: bool, 0-d, whether all workers have sent the same, and something; None: not known.
    """

    #: whether nothing is written before ``end()``
    is_transaction: ClassVar[bool] = False

    def __init__(self, step: Step) -> None:
        self.step, self.kept = step, step.kept
        self.arrived: list[tuple[Bucket, Tensor]] = []
        self.alike: Tensor | None = None
        self.protected: dict[int, Protected] = {}

    def protect(self, buckets: Sequence[Bucket], known: Sequence[bool]) -> None:
        """Keeps slots out of ``known`` as they are through the exchange; what they send still enters it."""
        idle = {slot for slot, moves in enumerate(known) if not moves}
        self.protected = {b.index: Protected(self, b, known) for b in buckets if not b.params.isdisjoint(idle)}

    def guarded(self, bucket: Bucket) -> Guarded:
        """What encoding and reducing overwrite of a bucket."""
        return []

    def received_buffer(self, bucket: Bucket, sent: Tensor) -> Tensor:
        """Where round 1 writes."""
        return torch.empty_like(sent)

    def look_up(self, bucket: Bucket) -> None:
        """Looks up what the exchange of a bucket will need, while nothing streams through memory: after a kernel, caches are cold."""
        self.step.weights(bucket)
        grads = self.contribution(bucket)
        if isinstance(grads, BoundSpans):
            self.kept.kernels.prepare(bucket, grads, "g")

    def contribution(self, bucket: Bucket) -> Tensor | BoundSpans:
        """What differs between ranks and enters the exchange: gradients by span, or an fp32 flat."""
        return self.step.grads(bucket)

    def local(self, bucket: Bucket) -> Tensor | None:
        """fp32 flat of what ranks of a node average before they compress (hierarchical exchange)."""
        mine = self.contribution(bucket)
        if isinstance(mine, Tensor):
            return mine
        flat = torch.empty(bucket.elements, dtype=torch.float32, device=bucket.device)
        self.kept.kernels.gather(bucket, mine, flat)
        return flat

    def end(self) -> None:
        """Called when all buckets have come back."""


class OneBit(Codec):
    """One bit per element and one scale per block, error feedback on both sides (docs/algorithms, section 2); a transaction.

    Args:
        step: the running step.
        send: see ``Rule.send``.
        take: see ``Rule.take``.
        done: see ``Rule.finish``.
        becomes_momentum: whether what comes back becomes the momentum of its bucket.
    """

    is_transaction: ClassVar[bool] = True

    def __init__(
        self,
        step: Step,
        send: Callable[[Part], Sent],
        take: Callable[[Part, Packed], Any],
        done: Callable[[Step, Sequence[tuple[Part, Packed, Any]]], None] | None = None,
        *,
        becomes_momentum: bool = True,
    ) -> None:
        super().__init__(step)
        self._rescaled = step.rescaled_residuals()
        self._send, self._take, self._done, self._becomes_momentum = send, take, done, becomes_momentum
        self._sent: dict[int, Sent] = {}
        #: what this rank tells of its gradients behind the first bucket's rows
        self.tells = b""
        self._told_with: Bucket | None = None

    def _tail(self, bucket: Bucket) -> int:
        """Bytes behind the rows of a bucket in round 1."""
        return len(self.tells) if bucket is self._told_with else 0

    def heard(self, parameters: int) -> Control:
        """What all ranks have told; the first bucket is there."""
        assert self._told_with is not None
        rows = self.kept.buffer(self._told_with, "received", self.kept.layout.ranks.nodes, len(self.tells)).whole_rows()
        return read_control(rows[:, -len(self.tells) :].cpu().numpy(), parameters)

    def _worker(self, bucket: Bucket) -> Sent:
        known = self._sent.get(bucket.index)
        if known is None:
            part = self.step.part(bucket, *self.kept.layout.shard(bucket))
            known = self._sent[bucket.index] = self._send(part)
        return known

    def _residuals(self, bucket: Bucket, side: str, blocks: tuple[int, int]) -> tuple[Residual, Residual | None]:
        """The residual of some blocks that enters, in this step's unit, and where the new one goes (None: in its place)."""
        old, new = self.kept.residual(bucket, side), self.kept.new_residual(bucket, side)
        if self._rescaled is None:
            return old, new
        factors, shape = self._rescaled[bucket.index][slice(*blocks)], (blocks[1] - blocks[0], bucket.block_size)
        torch.mul(old.tensor().view(shape), factors[:, None], out=new.values.view(shape))
        if new.pending is not None:
            new.pending.zero_()
        return new, None

    def look_up(self, bucket: Bucket) -> None:
        super().look_up(bucket)
        self._worker(bucket)

    def contribution(self, bucket: Bucket) -> Tensor | BoundSpans:
        flat = self._worker(bucket).g
        return super().contribution(bucket) if flat is None else flat

    def received_buffer(self, bucket: Bucket, sent: Tensor) -> Tensor:
        """See the base: the same memory at every step."""
        return self.kept.buffer(bucket, "received", self.kept.layout.ranks.nodes, self._tail(bucket)).whole_rows()

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: compresses ``a*m + (b*g)*r + e`` of this rank's shard."""
        lo, hi = self.kept.layout.shard(bucket)
        if self.tells and self._told_with is None:
            self._told_with = bucket
        nodes, tail = self.kept.layout.ranks.nodes, self._tail(bucket)
        out, sent = self.kept.buffer(bucket, "sent", nodes, tail), self._worker(bucket)
        e, into = self._residuals(bucket, "worker", (lo, hi))
        g = shard if shard is not None else self.contribution(bucket)
        self.kept.kernels.compress(bucket, lo, hi, a=sent.a, m=sent.m, b=sent.b, g=g, e=e, out=out, r=sent.r, into=into)
        if not tail:
            return out.raw
        self.step.link.ledger.rode_along(peer_bytes(nodes, tail))
        told = torch.frombuffer(bytearray(self.tells), dtype=torch.uint8)
        out.whole_rows()[:, -tail:] = told.to(bucket.device)
        return out.whole_rows()

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: reduces and compresses again this rank's chunk."""
        ranks, chunk = self.kept.layout.ranks, self.kept.layout.chunk(bucket)
        rows = self.kept.buffer(bucket, "received", ranks.nodes, self._tail(bucket))
        if self.alike is None and ranks.nodes > 1:
            self.alike = (rows.scales == rows.scales[0]).all() & (rows.scales > 0).any()
        out = self.kept.buffer(bucket, "reply", 1)
        d, into = self._residuals(bucket, "server", chunk)
        assert self.kept.tables is not None
        lengths = self.kept.tables.view("lengths", bucket.index, bucket.lengths, *chunk)
        self.kept.kernels.reduce(rows, lengths, d, out, 1.0 / ranks.nodes, into)
        return out.raw.view(-1)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """Where round 2 writes: what becomes the momentum."""
        return self.kept.buffer(bucket, "momentum", self.kept.layout.ranks.size).raw

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Keeps the averaged, compressed result until all are there."""
        self.arrived.append((bucket, gathered))

    def end(self) -> None:
        """See the base: what has come back is applied, and the new residuals are the optimizer's."""
        taken: list[tuple[Part, Packed, Any]] = []
        for bucket, _ in self.arrived:
            packed = self.kept.buffer(bucket, "momentum", self.kept.layout.ranks.size)
            part = self.step.part(bucket, 0, bucket.blocks)
            taken.append((part, packed, self._take(part, packed)))
            guard = self.protected.get(bucket.index)
            if guard is not None:
                guard.keep_residuals()
            if self._becomes_momentum:
                held = self.kept.momentum[bucket.index]
                self.kept.momentum[bucket.index] = packed if guard is None else guard.merged(held, packed)
                self.kept.reuse(bucket, "momentum", held)
        if self._done is not None:
            self._done(self.step, taken)
        self.kept.take_new_residuals({bucket.index for bucket, _ in self.arrived})


class Protected:
    """Keeps a bucket's parameters that have no gradient on any rank exactly as they are through an exchange."""

    def __init__(self, codec: Codec, bucket: Bucket, active: Sequence[bool]) -> None:
        self._codec = codec
        self._bucket = bucket
        idle = torch.tensor([not a for a in active], device=bucket.device)
        self._idle = idle[bucket.block_param]
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []

    def save(self) -> None:
        """Remembers what encoding and reducing overwrite."""
        for flat, where in self._codec.guarded(self._bucket):
            mask = self._idle[slice(*where)]
            for part in (flat.values, flat.pending) if isinstance(flat, Residual) else (flat,):
                if part is not None:
                    blocks = part.view(len(mask), -1)
                    self._saved.append((blocks, mask, blocks[mask]))

    def restore(self) -> None:
        """Puts it back."""
        for blocks, mask, values in self._saved:
            blocks[mask] = values

    def keep_residuals(self) -> None:
        """Gives idle blocks of the new residuals what they have in the old ones."""
        kept, bucket = self._codec.kept, self._bucket
        for side, blocks in (("worker", kept.layout.shard(bucket)), ("server", kept.layout.chunk(bucket))):
            copy_blocks(kept.residual(bucket, side), kept.new_residual(bucket, side), self._idle[slice(*blocks)])

    def merged(self, old: Tensor | Packed, packed: Packed) -> Tensor | Packed:
        """The new momentum, with the old one in idle blocks."""
        bucket, size = self._bucket, self._bucket.block_size
        idle = self._idle.view(packed.rows, packed.blocks_per_row)
        if isinstance(old, Packed):
            packed.scales[idle] = old.scales[idle]
            packed.words[idle] = old.words[idle]
            return packed
        kept = old.view(-1, size)[self._idle]
        packed.scales[idle] = 0.0
        if not bool(kept.any()):
            return packed
        # an fp32 momentum has no packed form: this bucket stays unpacked until all its parameters get gradients
        flat = torch.empty(bucket.elements, dtype=torch.float32, device=bucket.device)
        self._codec.kept.kernels.unpack(packed, bucket.lengths, flat)
        flat.view(-1, size)[self._idle] = kept
        return flat


def first_bad(arrived: Sequence[tuple[Bucket, Tensor]]) -> Bucket | None:
    """The first bucket that has come back with a scale that is not finite: all ranks hold the same, so all see a bad gradient of any."""
    if not arrived:
        return None
    packed = [Packed(raw, b.blocks // raw.shape[0], b.block_size) for b, raw in arrived]
    # finite if all of them are (fp32) numbers
    sums = torch.stack([p.scales.sum(dtype=torch.float64) for p in packed]).tolist()
    return next((bucket for (bucket, _), total in zip(arrived, sums, strict=True) if not math.isfinite(total)), None)
