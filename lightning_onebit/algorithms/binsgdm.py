"""BinSGDM (Birder)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit._choices import Recipe, StateDtype, choices
from lightning_onebit.algorithms.moments import decay
from lightning_onebit.comm import Bucket
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.codec import Codec, Guarded
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, Options, check_choice, check_number, takes
from lightning_onebit.engine.rule import Rounds, Rule, Saved
from lightning_onebit.engine.step import Facts, Group, Step
from lightning_onebit.kernels import Packed, Residual
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, DrawKey, draw_hash, draw_key, uniform
from lightning_onebit.kernels.reference import pack_bits, unpack_bits

log = logging.getLogger("lightning_onebit")

#: how much longer magnitudes are remembered than the momentum: with one worker's few examples m/a would be as noisy as its gradient
MEMORY = 100.0


@dataclass(frozen=True, kw_only=True)
class BinSGDMOptions(Options):
    """Options of BinSGDM.

    Attributes:
        recipe: ``"default"``, or ``"published"``: one beta for both averages, a server that draws, independent draws, and what a sign
            cannot say is dropped.
        seed: seed of the draws, the same on every rank.
        max_grad_norm: see ``Options``.
    """

    recipe: Recipe = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every option."""
        super().__post_init__()
        check_choice("recipe", self.recipe, choices(Recipe))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r} must be an integer, not {type(self.seed).__name__}")

    @property
    def published(self) -> bool:
        """Whether the rule is the paper's."""
        return self.recipe == "published"


class Binary(Rule):
    """The rule of ``BinSGDM``; ``m`` and ``a`` are each rank's own."""

    arenas: ClassVar[dict[str, str]] = {"m": "momentum", "a": "magnitude"}
    per_rank: ClassVar[bool] = True
    by_shard: ClassVar[bool] = True
    reads_plain: ClassVar[str] = ""
    first_phase: ClassVar[Phase] = Phase.COMPRESSED
    fixed_exchange: ClassVar[dict[str, Any]] = {"overlap": "step", "state_dtype": "float32"}
    state_dtype: ClassVar[StateDtype] = "float32"

    def __init__(self, options: BinSGDMOptions, exchange: ExchangeOptions) -> None:
        super().__init__(options, exchange)
        # bits of all blocks, int32 (blocks, words): coordinates that have had a gradient on some rank
        self.live = torch.zeros((0, 0), dtype=torch.int32)
        # the bitmap was laid out anew (a parameter joined), or a tensor has its first gradient: unite it at the next step
        self.merge_due = False

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_number("beta", group["beta"], least=0, below=1)

    # ----- the rule ----------------------------------------------------------------------------------------------------

    def dense(self, s: Group) -> None:
        """``x -= lr wd x + lr clip(m/a)``: the same direction, averaged instead of drawn."""
        lr, beta = s.of["lr"], s.of["beta"]
        for p, x, g, m, a in zip(map(s.step.facts, s.indices), s.x, s.g, s["m"], s["a"], strict=True):
            g = g.float()
            m.lerp_(g, _share(beta, p.t + 1))
            a.lerp_(g.abs(), _share(self.magnitude_beta(p), p.t + 1))
            direction = torch.where(a > 0, m / torch.where(a > 0, a, 1.0), 0.0).clamp_(-1.0, 1.0)
            m.add_(m - m.clamp(-a, a), alpha=self.overflow(p, ahead=1))
            x.mul_(1 - lr * s.of["weight_decay"]).add_(direction, alpha=-lr)

    def magnitude_beta(self, p: Facts) -> float:
        """Decay of a."""
        return float(p["beta"] if self.options.published else 1.0 - (1.0 - p["beta"]) / MEMORY)

    def overflow(self, p: Facts, ahead: int = 0) -> float:
        """How much more what a sign cannot say has to count now, to fall with a in the next step; ``ahead=1`` before it is counted."""
        if self.options.published or p["beta"] == 0:
            return 0.0
        after = max(1, p.t + ahead) + 1
        return max(0.0, (1 - _share(self.magnitude_beta(p), after)) / (1 - _share(p["beta"], after)) - 1)

    def scales_tell(self) -> bool:
        """See the base; there are none."""
        return False

    def codec(self, step: Step) -> Codec:
        """See the base: votes."""
        return Votes(step, self)

    # factors of the worker's averages

    def m_keeps(self, p: Facts) -> float:
        """``1 - w`` of m."""
        return 1.0 - _share(p["beta"], p.t)

    def m_takes(self, p: Facts) -> float:
        """``w`` of m, clipped."""
        return _share(p["beta"], p.t) * p.grad_scale

    def a_keeps(self, p: Facts) -> float:
        """``1 - w`` of a."""
        return 1.0 - _share(self.magnitude_beta(p), p.t)

    def a_takes(self, p: Facts) -> float:
        """``w`` of a, clipped."""
        return _share(self.magnitude_beta(p), p.t) * p.grad_scale

    # ----- coordinates that have had a gradient ------------------------------------------------------------------------

    def set_live(self, flat: Tensor) -> None:
        """Packs the bitmap of live coordinates from bools over all blocks."""
        plan, size = self.kept.layout.plan, self.kept.exchange.block_size
        self.live = torch.zeros((plan.blocks, size // 32), dtype=torch.int32, device=self.kept.device)
        for bucket in plan.buckets:
            pack_bits(bucket.slice(flat).view(-1, size), self.live_of(bucket))

    def live_of(self, bucket: Bucket) -> Tensor:
        """A bucket's part of the bitmap."""
        return self.live[bucket.first_block : bucket.first_block + bucket.blocks]

    def never_live(self) -> set[int]:
        """Parameters of which no coordinate has had a gradient, by the bitmap."""
        layout = self.kept.layout
        if not self.kept.compresses:
            return set()
        owners = set(layout.plan.block_param[(self.live != 0).any(1)].tolist())
        return {i for slot, i in enumerate(layout.slots) if slot not in owners and layout.params[i].numel()}

    def unheard(self) -> list[int]:
        return sorted(self.kept.cold)

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        """See the base: the bitmap is merged in this step, for the next merge by the schedule may be far."""
        self.kept.cold -= set(indices)
        self.merge_due = True

    # ----- layout ------------------------------------------------------------------------------------------------------

    def takes_new_parameters(self) -> bool:
        """See the base; there is no warm-up that a newcomer could have missed."""
        return True

    @property
    def feeds_back(self) -> bool:
        """Whether a server keeps what its signs leave out."""
        return not self.options.published

    def keeps_of(self, index: int) -> dict[str, Tensor]:
        """See the base: its live coordinates."""
        layout = self.kept.layout
        if index not in layout.slot_of:
            return {}
        size, numel = layout.plan.block_size, layout.params[index].numel()
        first = layout.plan.starts[layout.slot_of[index]] // size
        return {"live": unpack_bits(self.live[first : first + -(-numel // size)]).flatten()[:numel]}

    def laid_out(self, kept: Mapping[int, Mapping[str, Tensor]], *, in_use: bool, grew: bool) -> None:
        if self.kept.sharded and kept:
            log.warning(
                "a parameter joins binsgdm: blocks are dealt anew among the ranks of a node, and m and a start from zero"
            )
        if self.feeds_back and self.kept.compresses:
            self.kept.server = Residual(self._first_feedback())
        self.merge_due = bool(kept)
        layout = self.kept.layout
        live = torch.zeros(layout.plan.elements, dtype=torch.bool, device=layout.device)
        for i in layout.slots:
            if "live" in kept.get(i, {}):
                layout.part(live, i).copy_(kept[i]["live"])
        self.set_live(live)

    def _first_feedback(self) -> Tensor:
        """Uniform draws in (-1, 1): from zero, all coordinates whose votes cancel would go up and down together."""
        size, layout = self.kept.exchange.block_size, self.kept.layout
        key = draw_key(self.options.seed, 0, 0, SERVER_STREAM, stratified=False)
        parts = [torch.zeros(0, dtype=torch.float32, device=layout.device)]
        for bucket in layout.buckets:
            first, last = layout.chunk(bucket)
            draws = draw_hash(key, bucket.first_block + first, last - first, size, layout.device)
            parts.append(uniform(draws).flatten())
        return torch.cat(parts)

    # ----- saving ------------------------------------------------------------------------------------------------------

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        if self.live.numel():
            parts = map(self.live_of, self.kept.layout.buckets)
            yield "live", torch.cat([unpack_bits(words).flatten() for words in parts])

    def books(self) -> dict[str, Any]:
        return {"merge_due": self.merge_due}

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        layout = self.kept.layout
        self.merge_due = books.get("merge_due", False)
        flat = torch.zeros(layout.plan.elements, dtype=torch.bool, device=layout.device)
        for i, state in saved.items():
            if "live" in state and i in layout.slot_of:
                layout.view(flat, i).copy_(state["live"])
        self.set_live(flat)
        self.kept.cold = self.never_live() if self.kept.steps else set()


class Votes(Codec):
    """Signs without scales, drawn by workers and put to the vote by servers; or bitmaps of live coordinates, which are united."""

    def __init__(self, step: Step, rule: Binary) -> None:
        super().__init__(step)
        self._rule = rule
        self._merging = False
        # by bucket: the bits of the step, int32 (blocks, words)
        self._drawn: list[tuple[Bucket, Tensor]] = []

    def guarded(self, bucket: Bucket) -> Guarded:
        """See the base: averages, and what the server keeps."""
        layout = self.kept.layout
        part = self.step.part(bucket, *layout.shard(bucket))
        shard: Guarded = [(part[name], layout.shard(bucket)) for name in ("m", "a")]
        feedback = [(self.kept.residual(bucket, "server"), layout.chunk(bucket))] if self._rule.feeds_back else []
        return [*shard, *feedback]

    def local(self, bucket: Bucket) -> Tensor | None:
        """Gradients of the bucket; bitmaps need no average."""
        return None if self._merging else super().local(bucket)

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: draws the signs of this rank's shard, or sends its bitmap of live coordinates."""
        kept, rule, ranks = self.kept, self._rule, self.kept.layout.ranks
        lo, hi = kept.layout.shard(bucket)
        out = kept.payload(bucket, ranks.nodes, has_scales=False)
        s = self.step.part(bucket, lo, hi)
        if self._merging:
            words = out.words.flatten(0, 1).contiguous()
            kept.kernels.mark_live(bucket, lo, hi, s["a"], words)
            out.words.copy_(words.view(out.words.shape))
            return out.raw
        if guard := self.protected.get(bucket.index):
            guard.save()
        kept.kernels.sample(
            bucket,
            lo,
            hi,
            factors=s.each(rule.m_keeps, rule.m_takes, rule.a_keeps, rule.a_takes, rule.overflow),
            g=shard if shard is not None else s.g,
            m=s["m"],
            a=s["a"],
            # a hierarchical exchange has the nodes for workers, and each element of a node is drawn by one of its ranks
            key=self._key(bucket, ranks.node, WORKER_STREAM),
            first_block=bucket.first_block + lo,
            out=out,
        )
        return out.raw

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: votes on this rank's chunk, or unites the bitmaps."""
        first, last = self.kept.layout.chunk(bucket)
        rows = Packed(received, last - first, bucket.block_size, has_scales=False)
        if self._merging:
            united = rows.words[0].clone()
            for row in range(1, rows.rows):
                united |= rows.words[row]
            return united.view(torch.uint8).view(-1)
        out = torch.empty((last - first, bucket.block_size // 32), dtype=torch.int32, device=bucket.device)
        self.kept.kernels.vote(
            rows,
            bucket.lengths[first:last],
            # drawn by the chunk's owner alone, so the rank is part of neither key nor result
            self._key(bucket, 0, SERVER_STREAM),
            bucket.first_block + first,
            out,
            self.kept.residual(bucket, "server").values if self._rule.feeds_back else None,
        )
        return out.view(torch.uint8).view(-1)

    def _key(self, bucket: Bucket, rank: int, stream: int) -> DrawKey:
        options, ranks = self._rule.options, self.kept.layout.ranks
        if self.kept.shards is not None and bucket.params:
            # other shards of a tensor are drawn apart; what all ranks of a replica hold, alike on them
            way = self.kept.shards.ways[self.kept.layout.slots[min(bucket.params)]]
            rank += self.kept.shards.position(way) * ranks.nodes
        return draw_key(options.seed, self.kept.steps + 1, rank, stream, stratified=not options.published)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """uint8 ``(size, reply bytes)``: ``block_size/8`` bytes per block."""
        return self.kept.payload(bucket, self.kept.layout.ranks.size, has_scales=False).raw

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Keeps the bits until all buckets are in, or takes the united bitmap."""
        words = gathered.view(-1).view(torch.int32).view(bucket.blocks, bucket.block_size // 32)
        if self._merging:
            self._rule.live_of(bucket).bitwise_or_(words)
            return
        self._drawn.append((bucket, words))
        if guard := self.protected.get(bucket.index):
            guard.restore()

    def end(self) -> None:
        """All bits are in: merge the bitmap when it is due, then ``x -= lr wd x + lr ubar``."""
        rule, kept, step = self._rule, self.kept, self.kept.steps + 1
        if step & (step - 1) == 0 or rule.merge_due:
            rule.merge_due = False
            assert self.step.link.exchange is not None
            self._merging = True
            self.step.link.exchange.run(kept.layout.buckets, self)
            kept.cold = rule.never_live()
        for bucket, words in self._drawn:
            s = self.step.part(bucket, 0, bucket.blocks)
            kept.kernels.apply_votes(bucket, s.x, words, rule.live_of(bucket), s.each(decay), s.each(_downhill))


def _downhill(p: Facts) -> float:
    return float(-p["lr"])


def _share(beta: float, step: int) -> float:
    """Weight of the newest of ``step`` values in an average whose weights fall by ``beta`` per step and add up to 1."""
    return (1.0 - beta) / (1.0 - beta ** max(1, step))  # a parameter that sits out may have had none


@takes(BinSGDMOptions)
class BinSGDM(OnebitOptimizer):
    r"""BinSGDM: randomly binarised normalised momentum; bits only, from the first step, without scales.

    ::

        worker:  m_i, a_i = averages of g_i and of |g_i|      # weights fall by beta and by ba = 1 - (1-beta)/100 per step
                 u_i = Q(clip(m_i/a_i, -1, 1))                # Q(y) = +1 with probability (1+y)/2, else -1
                 what the clip takes from m_i falls by ba per step instead of beta, until it has been sent
        server:  z = (1/n) sum_i u_i + d ;  ubar = sign(z) ;  d = z - ubar
        all:     x -= lr*wd*x + lr*ubar

    Source: BinSGDM (ICLR 2023 submission), published as Birder (NeurIPS 2023). There (``recipe="published"``), one beta serves both
    averages, what the clip takes is lost, and the server draws, ``ubar = Q((1/n) sum_i u_i)``. Draws of successive steps are
    spread evenly here, so that what a coordinate is moved by in several steps adds up to nearly the sum of its ``m/c``; the
    paper's are independent. docs/differences says why.

    The update has size lr in every coordinate. Randomness is counter-based (a function of seed, step, rank and element),
    so a run, its resume and its twin on another device draw the same bits. A coordinate that has never had a gradient
    on any rank is not moved: ranks merge a bitmap of such coordinates at t = 1, 2, 4, 8, ... and when a tensor has its first
    gradient. A world of one rank steps by ``m/c`` itself, undrawn.

    Args:
        params: parameters or parameter groups; a group may set ``lr``, ``beta``, ``weight_decay`` and
            ``compress=False`` (averaged densely and updated with ``clip(m/c)`` itself, undrawn).
        lr: learning rate; Adam's own to three times that is a good place to search, the larger the more ranks there are.
        beta: decay of m, in ``[0, 1)``.
        weight_decay: decoupled weight decay.
        exchange: how ranks exchange, see ``ExchangeOptions``; ``overlap="backward"`` and ``state_dtype`` cannot take effect.
        **options: see ``BinSGDMOptions``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.

    Example:
        >>> optimizer = BinSGDM(model.parameters(), lr=1e-3, beta=0.7)
    """

    algorithm = "binsgdm"
    rule_class: ClassVar[type[Rule]] = Binary
    STEP_BYTES = 32.0  # reads and writes m, a and x, reads g twice
    SENDS_SCALES = False
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = 0.7,
        weight_decay: float = 0.0,
        *,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay}, options, exchange)

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; bitmaps are merged at t = 1, 2, 4, ..."""
        return Rounds(0, steps, bitmaps=steps.bit_length())
