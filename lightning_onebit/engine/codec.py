"""What travels in an exchange: bits and scales with error feedback. The one place that writes residuals and the momentum of a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket
from lightning_onebit.comm import Codec as Wire
from lightning_onebit.engine.whole import Wholeness
from lightning_onebit.kernels import BoundSpans, Packed, Residual
from lightning_onebit.kernels.transfer import Download

if TYPE_CHECKING:
    from lightning_onebit.engine.rule import Sent
    from lightning_onebit.engine.step import Part, Step

#: what an exchange overwrites, and the blocks of the bucket whose it is: this rank's shard or chunk
Guarded: TypeAlias = "list[tuple[Tensor | Residual, tuple[int, int]]]"


class Codec(Wire):
    """What all codecs of a step have in common (see ``comm.exchange.Codec``).

    Attributes:
        arrived: what has come back, with scales that tell whether it is finite.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.kept = step, step.kept
        self.arrived: list[tuple[Bucket, Tensor]] = []
        self.protected: dict[int, Protected] = {}

    def protect(self, buckets: Sequence[Bucket], known: Sequence[bool]) -> None:
        """Keeps slots out of ``known`` as they are through the exchange; what they send still enters it."""
        idle = {slot for slot, moves in enumerate(known) if not moves}
        self.protected = {b.index: Protected(self, b, known) for b in buckets if not b.params.isdisjoint(idle)}

    def guarded(self, bucket: Bucket) -> Guarded:
        """What the exchange overwrites of a bucket."""
        raise NotImplementedError

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
    """One bit per element and one scale per block, error feedback on both sides (docs/algorithms, section 2).

    Args:
        step: the running step.
        send: see ``Rule.send``.
        take: see ``Rule.take``.
        done: see ``Rule.finish``.
        becomes_momentum: whether what comes back becomes the momentum of its bucket.
    """

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
        self._taken: list[tuple[Part, Packed, Any]] = []
        self._workers: dict[int, tuple[Sent, Residual]] = {}
        self._servers: dict[int, tuple[Tensor, Residual]] = {}
        #: whether weights must not change yet, for backward may still read them
        self.waits = False

    def _worker(self, bucket: Bucket) -> tuple[Sent, Residual]:
        known = self._workers.get(bucket.index)
        if known is None:
            part = self.step.part(bucket, *self.kept.layout.shard(bucket))
            known = self._workers[bucket.index] = self._send(part), self.kept.worker_residual(bucket)
        return known

    def _server(self, bucket: Bucket) -> tuple[Tensor, Residual]:
        known = self._servers.get(bucket.index)
        if known is None:
            lengths = bucket.lengths[slice(*self.kept.layout.chunk(bucket))]
            known = self._servers[bucket.index] = lengths, self.kept.server_residual(bucket)
        return known

    def _rescale(self, bucket: Bucket, residual: Residual, blocks: tuple[int, int]) -> None:
        """Brings what was held back of some blocks into this step's unit."""
        if self._rescaled is not None:
            factors = self._rescaled[bucket.index][slice(*blocks)]
            residual.tensor().view(len(factors), bucket.block_size).mul_(factors[:, None])

    def guarded(self, bucket: Bucket) -> Guarded:
        """See the base: residuals, and what else is the rank's own."""
        layout, rule = self.kept.layout, self.step.rule
        names = rule.arenas if rule.per_rank else ()
        return [
            *((bucket.slice(self.kept.flat[name]), (0, bucket.blocks)) for name in names),
            (self.kept.worker_residual(bucket), layout.shard(bucket)),
            (self.kept.server_residual(bucket), layout.chunk(bucket)),
        ]

    def look_up(self, bucket: Bucket) -> None:
        super().look_up(bucket)
        self._worker(bucket)
        self._server(bucket)

    def contribution(self, bucket: Bucket) -> Tensor | BoundSpans:
        flat = self._worker(bucket)[0].g
        return super().contribution(bucket) if flat is None else flat

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: compresses ``a*m + (b*g)*r + e`` of this rank's shard."""
        lo, hi = self.kept.layout.shard(bucket)
        out = self.kept.payload(bucket, self.kept.layout.ranks.nodes)
        if guard := self.protected.get(bucket.index):
            guard.save()
        sent, residual = self._worker(bucket)
        self._rescale(bucket, residual, (lo, hi))
        g = shard if shard is not None else self.contribution(bucket)
        self.kept.kernels.compress(bucket, lo, hi, a=sent.a, m=sent.m, b=sent.b, g=g, e=residual, out=out, r=sent.r)
        return out.raw

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: reduces and compresses again this rank's chunk."""
        ranks = self.kept.layout.ranks
        rows = Packed(received, bucket.blocks // ranks.size, bucket.block_size)
        out = self.kept.payload(bucket, 1)
        lengths, residual = self._server(bucket)
        self._rescale(bucket, residual, self.kept.layout.chunk(bucket))
        self.kept.kernels.reduce(rows, lengths, residual, out, 1.0 / ranks.nodes)
        return out.raw.view(-1)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """Where round 2 writes: the packed momentum itself, unless the old one is still needed."""
        held = self.kept.momentum[bucket.index] if self.kept.momentum else None
        fresh = self.step.rule.needs_old_momentum or bucket.index in self.protected
        if isinstance(held, Packed) and not fresh:
            return held.raw
        return self.kept.payload(bucket, self.kept.layout.ranks.size).raw

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Takes the averaged, compressed result and applies it."""
        self.arrived.append((bucket, gathered))
        if not self.waits:
            self._apply(bucket, gathered)

    def _apply(self, bucket: Bucket, gathered: Tensor) -> None:
        packed = Packed(gathered, bucket.blocks // self.kept.layout.ranks.size, bucket.block_size)
        part = self.step.part(bucket, 0, bucket.blocks)
        self._taken.append((part, packed, self._take(part, packed)))
        guard = self.protected.get(bucket.index)
        if guard is not None:
            guard.restore()
        if self._becomes_momentum:
            self.kept.momentum[bucket.index] = packed if guard is None else guard.merged(packed)

    def end(self) -> None:
        """See the base: what waited is applied, then the rule finishes."""
        if self.waits:
            self._workers, self._servers = {}, {}
            for bucket, gathered in self.arrived:
                self._apply(bucket, gathered)
        if self._done is not None:
            self._done(self.step, self._taken)


class Protected:
    """Keeps a bucket's parameters that have no gradient on any rank exactly as they are through an exchange."""

    def __init__(self, codec: Codec, bucket: Bucket, active: Sequence[bool]) -> None:
        self._codec = codec
        self._bucket = bucket
        idle = torch.tensor([not a for a in active], device=bucket.device)
        self._idle = idle[bucket.block_param]
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []
        self._old: Tensor | Packed | None = None

    def save(self) -> None:
        """Remembers what an exchange overwrites."""
        momentum = self._codec.kept.momentum
        for flat, where in self._codec.guarded(self._bucket):
            mask = self._idle[slice(*where)]
            for part in (flat.values, flat.pending) if isinstance(flat, Residual) else (flat,):
                if part is not None:
                    blocks = part.view(len(mask), -1)
                    self._saved.append((blocks, mask, blocks[mask]))
        self._old = momentum[self._bucket.index] if momentum else None

    def restore(self) -> None:
        """Puts it back."""
        for blocks, mask, values in self._saved:
            blocks[mask] = values

    def merged(self, packed: Packed) -> Tensor | Packed:
        """The new momentum, with the old one in idle blocks."""
        bucket, size = self._bucket, self._bucket.block_size
        idle = self._idle.view(packed.rows, packed.blocks_per_row)
        if isinstance(self._old, Packed):
            packed.scales[idle] = self._old.scales[idle]
            packed.words[idle] = self._old.words[idle]
            return packed
        assert self._old is not None
        kept = self._old.view(-1, size)[self._idle]
        packed.scales[idle] = 0.0
        if not bool(kept.any()):
            return packed
        # an fp32 momentum has no packed form: this bucket stays unpacked until all its parameters get gradients
        flat = torch.empty(bucket.elements, dtype=torch.float32, device=bucket.device)
        self._codec.kept.kernels.unpack(packed, bucket.lengths, flat)
        flat.view(-1, size)[self._idle] = kept
        return flat


class Scales:
    """Whether what has come back is finite: all ranks hold the same scales, so all see a bad gradient of any rank.

    Attributes:
        unread: on CUDA, the sum of the scales of the last step's exchange, on its way to the host.
    """

    def __init__(self, whole: Wholeness) -> None:
        self._whole = whole
        self.unread: Download | None = None

    @staticmethod
    def _sums(arrived: Sequence[tuple[Bucket, Tensor]]) -> Tensor:
        """Sum of each bucket's scales, fp64: finite if all of them are (fp32) numbers."""
        packed = [Packed(raw, b.blocks // raw.shape[0], b.block_size) for b, raw in arrived]
        return torch.stack([p.scales.sum(dtype=torch.float64) for p in packed])

    def first_bad(self, arrived: Sequence[tuple[Bucket, Tensor]]) -> Bucket | None:
        """The first bucket with a scale that is not finite."""
        if not arrived or bool(torch.isfinite(sums := self._sums(arrived)).all()):
            return None
        return next(
            bucket for (bucket, _), total in zip(arrived, sums.tolist(), strict=True) if not math.isfinite(total)
        )

    def check(
        self,
        arrived: Sequence[tuple[Bucket, Tensor]],
        step: int,
        *,
        trusted: bool,
        anywhere: Callable[[bool], bool],
    ) -> None:
        """Raises where what has been exchanged is not finite although nobody saw a gradient that is not.

        Args:
            arrived: what has come back.
            step: number of the step.
            trusted: nobody looked at the gradients before, so that the answer is needed now.
            anywhere: whether something is so on any rank that holds shards of this replica. Collective.
        """
        if arrived and arrived[0][1].is_cuda and not trusted:
            # asked for in the next step: waiting for the device here would hold the program up
            self.unread = Download(self._sums(arrived).sum())
        elif anywhere(self.first_bad(arrived) is not None):
            self._refuse(step, trusted)

    def read(self, step: int, anywhere: Callable[[bool], bool] = bool) -> None:
        """Raises where the last step's exchange, whose scales a device was asked about, has turned out not to be finite."""
        unread, self.unread = self.unread, None
        if unread is not None and anywhere(not math.isfinite(unread.read())):
            self._refuse(step, trusted=False)

    def _refuse(self, step: int, trusted: bool) -> None:
        reason = (
            "a non-finite gradient of some rank has entered the exchange: with on_nonfinite='raise' nobody looks before. Resume from "
            "the last checkpoint, with on_nonfinite='skip' to skip such steps"
            if trusted
            else "gradients of some rank are finite, but so large that their squares are not (fp32). Resume from the last checkpoint, "
            "with a lower lr or with gradients clipped"
        )
        known = f" (the last good one is {self._whole.checkpoint})" if self._whole.checkpoint else ""
        error = FloatingPointError(f"step {step}: {reason}{known}")
        self._whole.tear(f"step {step}", error)
        raise error
