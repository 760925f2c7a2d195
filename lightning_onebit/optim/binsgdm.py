"""BinSGDM (Birder)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit._choices import Backend, Draws, Overflow, Server, choices
from lightning_onebit.comm import Bucket, memory_order
from lightning_onebit.kernels import Packed, Residual
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, DrawKey, draw_hash, draw_key, uniform
from lightning_onebit.kernels.reference import pack_bits, unpack_bits
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.base import OnebitOptimizer
from lightning_onebit.optim.options import CommonOptions, check_choice, check_number
from lightning_onebit.optim.policies import Rounds

log = logging.getLogger("lightning_onebit")

SERVERS = choices(Server)
DRAWS = choices(Draws)
OVERFLOWS = choices(Overflow)
#: how much longer magnitudes are remembered than the momentum, where nothing else is said
MEMORY = 100.0


class BinSGDM(OnebitOptimizer):
    r"""BinSGDM: randomly binarised normalised momentum; bits only, from the first step, without scales.

    ::

        worker:  m_i, a_i = averages of g_i and of |g_i|      # weights fall by beta and by magnitude_beta per step
                 c_i = max(a_i, phi*rms(a_i))                 # rms over a block of a_i
                 u_i = Q(clip(m_i/c_i, -1, 1))                # Q(y) = +1 with probability (1+y)/2, else -1
                 what the clip takes from m_i falls by magnitude_beta per step instead of beta, until it has been sent
        server:  z = (1/n) sum_i u_i + d ;  ubar = sign(z) ;  d = z - ubar
        all:     x -= lr*wd*x + lr*ubar

    Source: BinSGDM (ICLR 2023 submission), published as Birder (NeurIPS 2023). There, one beta serves both averages, phi is 0
    and the server draws, ``ubar = Q((1/n) sum_i u_i)``; the longer memory of a, the floor phi, the stratified draws, the overflow
    that is kept and the server's feedback are this library's own (docs/differences.md says why, and how to turn each off).

    The update has size lr in every coordinate. Randomness is counter-based (a function of seed, step, rank and element),
    so a run, its resume and its twin on another device draw the same bits. A coordinate that has never had a gradient
    on any rank is not moved: ranks merge a bitmap of such coordinates at t = 1, 2, 4, 8, ... and when a tensor has its first
    gradient. A world of one rank steps by ``m/c`` itself, undrawn.

    Args:
        params: parameters or parameter groups; a group may set ``lr``, ``beta``, ``weight_decay`` and
            ``compress=False`` (averaged densely and updated with ``clip(m/c)`` itself, undrawn).
        lr: learning rate; Adam's own to three times that is a good place to search, the larger the more ranks there are.
        beta: decay of m, in ``[0, 1)``.
        magnitude_beta: decay of a, in ``[0, 1)``; None: a memory a hundred times as long, ``1 - (1-beta)/100``. With ``beta`` itself
            (the paper) ``m/a`` of one worker is as noisy as its gradient, and stays at 1 after a single gradient.
        weight_decay: decoupled weight decay.
        server: ``"feedback"`` sends the sign of the mean and keeps what it leaves out for the next step (``4/n`` bytes per
            element), so that signs add up to the means with an error below 2; ``"random"`` binarises the mean at
            random (the paper).
        denominator_floor: ``phi``, in ``[0, 1]``. Without it a coordinate that had a gradient once goes on at full speed until its
            ``a`` underflows, since m and a decay alike.
        draws: ``"stratified"``: draws of successive steps spread evenly, so that what a coordinate is moved by in several
            steps adds up to nearly the sum of its ``m/c``; ``"independent"`` (the paper): its error grows with the root
            of the number of steps.
        overflow: ``"keep"``: a sign says at most 1, so where ``|m/c|`` is larger the rest stays in m and falls no faster than a
            does, until later signs have said it (``|m|`` is at most ``(1-beta)/(1-magnitude_beta)`` times a: 100 times by
            default); ``"drop"`` (the paper): it falls like the rest of m, so large gradients are lost, which a worker that sees
            few examples has most. None: ``"keep"`` in groups where it has an effect, ``0 < beta < magnitude_beta``.
        seed: seed of the draws, the same on every rank.
        block_size: elements per block of the wire format, a multiple of 32.
        max_grad_norm: see ``OnebitAdam``, like the options after it.
        process_group: see ``OnebitAdam``.
        force_compression: binarise even in a world of one rank.
        bucket_mb: see ``OnebitAdam``.
        max_consecutive_skips: see ``OnebitAdam``.
        kernels: see ``OnebitAdam``.
        timeout: see ``OnebitAdam``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.

    Example:
        >>> optimizer = BinSGDM(model.parameters(), lr=1e-3, beta=0.7)
    """

    algorithm = "binsgdm"
    _reads_plain_adam = False
    _scales_tell = False  # there are none
    STEP_BYTES = 32.0  # reads and writes m, a and x, reads g twice
    SENDS_SCALES = False
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {}
    # of compress=False groups; elsewhere m and a differ by rank (see _rank_state)
    _replicated: ClassVar[dict[str, str]] = {"momentum": "m", "magnitude": "a"}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = 0.7,
        weight_decay: float = 0.0,
        *,
        magnitude_beta: float | None = None,
        server: Server = "feedback",
        denominator_floor: float = 1.0,
        draws: Draws = "stratified",
        overflow: Overflow | None = None,
        seed: int = 0,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float | None = None,
        max_consecutive_skips: int = 100,
        kernels: Backend = "auto",
        timeout: float = 1800.0,
    ) -> None:
        check_choice("server", server, SERVERS)
        check_choice("draws", draws, DRAWS)
        if overflow is not None:
            check_choice("overflow", overflow, OVERFLOWS)
        check_number("denominator_floor", denominator_floor, least=0, most=1)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r} must be an integer, not {type(seed).__name__}")
        # by bucket: int32 (blocks, words), coordinates that have had a gradient on some rank
        self._live: list[Tensor] = []
        self._merging = False
        # the bitmap was laid out anew (a parameter joined): unite it at the next step
        self._merge_due = False
        # by bucket: the bits of the running step, int32 (blocks, words)
        self._drawn: dict[int, Tensor] = {}
        super().__init__(
            params,
            {"lr": lr, "beta": beta, "magnitude_beta": magnitude_beta, "weight_decay": weight_decay},
            CommonOptions(
                block_size=block_size,
                max_grad_norm=max_grad_norm,
                process_group=process_group,
                force_compression=force_compression,
                bucket_mb=bucket_mb,
                max_consecutive_skips=max_consecutive_skips,
                kernels=kernels,
                timeout=timeout,
            ),
            {
                "server": server,
                "denominator_floor": float(denominator_floor),
                "draws": draws,
                "overflow": overflow,
                "seed": seed,
            },
        )
        self._phase = Phase.COMPRESSED

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; bitmaps are merged at t = 1, 2, 4, ..."""
        return Rounds(0, steps, bitmaps=steps.bit_length())

    def freeze(self) -> None:
        """Raises ``RuntimeError``: BinSGDM has no warm-up."""
        raise RuntimeError("BinSGDM.freeze(): BinSGDM has no warm-up to end; it compresses from the first step")

    def residual_ratio(self) -> float:
        """0.0: no worker keeps a residual."""
        return 0.0

    # ----- update rule ------------------------------------------------------------------------------------------------

    def _dense_update(self, group: dict[str, Any], members: list[int]) -> None:
        """``x -= lr*wd*x + lr*clip(m/c)``: the same direction, averaged instead of drawn."""
        for i in members:
            grad, m, a, x = self._grad(i).float(), self._moment("m", i), self._moment("a", i), self._weight(i)
            m.lerp_(grad, _share(group["beta"], self._t[i] + 1))
            a.lerp_(grad.abs(), _share(_magnitude_beta(group), self._t[i] + 1))
            c = torch.maximum(a, self._least(a))
            direction = torch.where(c > 0, m / torch.where(c > 0, c, 1.0), 0.0).clamp_(-1.0, 1.0)
            m.add_(m - m.clamp(-c, c), alpha=self._overflow_share(i, ahead=1))
            x.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])

    def _overflow_share(self, index: int, ahead: int = 0) -> float:
        """How much more what a sign cannot say has to count now, to fall with a in the next step; ``ahead=1`` before it is counted."""
        group = self._group(index)
        if self.settings["overflow"] == "drop" or group["beta"] == 0:
            return 0.0
        after = max(1, self._t[index] + ahead) + 1
        return max(0.0, (1 - _share(_magnitude_beta(group), after)) / (1 - _share(group["beta"], after)) - 1)

    def _least(self, a: Tensor) -> Tensor:
        """Least denominators of a parameter, with the shape and strides of ``a``: phi times the root mean square of a's blocks."""
        size, phi, least = self.options.block_size, self.settings["denominator_floor"], torch.zeros_like(a)
        if phi == 0 or a.numel() == 0:
            return least
        whole = a.numel() // size * size
        for values, floors in zip(
            memory_order(a).split(whole or size), memory_order(least).split(whole or size), strict=True
        ):
            blocks = values.view(-1, min(size, values.numel()))
            floors.view(blocks.shape).copy_(phi * blocks.square().mean(1, keepdim=True).sqrt())
        return least

    def _end_exchange(self) -> None:
        """All bits are in: merge the bitmap when it is due, then move."""
        step = self._steps + 1
        if step & (step - 1) == 0 or self._merge_due:
            self._merge_due = False
            assert self._exchange is not None
            self._merging = True
            try:
                self._exchange.run(self._buckets(), self)
            finally:
                self._merging = False
            self._cold = self._never_live()
        for index, words in self._drawn.items():
            bucket = self._buckets()[index]
            self._kernels.apply_votes(
                bucket,
                self._bind_weights(bucket),
                words,
                self._live[index],
                self._by_block("decay", bucket, self._decay),
                self._by_block("lr", bucket, lambda i: -self._group(i)["lr"]),
            )
        self._drawn = {}

    def _never_live(self) -> set[int]:
        """Parameters of which no coordinate has had a gradient, by the bitmap."""
        plan = self._known_plan()
        live = [(words != 0).any(1) for words in self._live]
        if not live or not self.compresses:
            return set()
        owners = set(plan.block_param[torch.cat(live)].tolist())
        return {i for slot, i in enumerate(self._slots) if slot not in owners and self._params[i].numel()}

    def _unheard(self) -> list[int]:
        return sorted(self._cold)

    def _first_gradients(self, indices: list[int]) -> None:
        """See the base: the bitmap is merged in this step, for the next merge by the schedule may be far."""
        self._cold -= set(indices)
        self._merge_due = True

    # ----- codec ------------------------------------------------------------------------------------------------------

    def local(self, bucket: Bucket) -> Tensor | None:
        """Gradients of the bucket; bitmaps need no average."""
        return None if self._merging else super().local(bucket)

    def _look_up(self, bucket: Bucket) -> None:
        """See the base; no worker keeps a residual, and the worker side is made when its bits are drawn."""
        self._bind_weights(bucket)
        self._kernels.prepare(bucket, self._bind_grads(bucket), "g")

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: draws the signs of this rank's shard, or sends its bitmap of live coordinates."""
        ranks = self._ranks()
        lo, hi = self._shard_blocks(bucket)
        out = self._words(bucket, ranks.nodes)
        if self._merging:
            words = out.words.flatten(0, 1).contiguous()
            self._kernels.mark_live(bucket, lo, hi, self._shard(bucket, "a"), words)
            out.words.copy_(words.view(out.words.shape))
            return out.raw
        if guard := self._protected.get(bucket.index):
            guard.save()
        factors = self._by_block(
            "factors",
            bucket,
            lambda i: 1.0 - _share(self._group(i)["beta"], self._t[i]),
            lambda i: _share(self._group(i)["beta"], self._t[i]) * self._grad_scale,
            lambda i: 1.0 - _share(_magnitude_beta(self._group(i)), self._t[i]),
            lambda i: _share(_magnitude_beta(self._group(i)), self._t[i]) * self._grad_scale,
            self._overflow_share,
        )
        self._kernels.sample(
            bucket,
            lo,
            hi,
            factors=factors[:, lo:hi].contiguous(),
            g=shard if shard is not None else self._contribution(bucket),
            m=self._shard(bucket, "m"),
            a=self._shard(bucket, "a"),
            # a hierarchical exchange has the nodes for workers, and each element of a node is drawn by one of its ranks
            phi=self.settings["denominator_floor"],
            key=self._key(ranks.node, WORKER_STREAM),
            first_block=bucket.first_block + lo,
            out=out,
        )
        return out.raw

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: votes on this rank's chunk, or unites the bitmaps."""
        first, last = self._chunk_blocks(bucket)
        count = last - first
        rows = Packed(received, count, bucket.block_size, has_scales=False)
        if self._merging:
            united = rows.words[0].clone()
            for row in range(1, rows.rows):
                united |= rows.words[row]
            return united.view(torch.uint8).view(-1)
        out = torch.empty((count, bucket.block_size // 32), dtype=torch.int32, device=self._device)
        self._kernels.vote(
            rows,
            bucket.lengths[first:last],
            # drawn by the chunk's owner alone, so the rank is part of neither key nor result
            self._key(0, SERVER_STREAM),
            bucket.first_block + first,
            out,
            self._server_residual_of(bucket).values if self._feeds_back else None,
        )
        return out.view(torch.uint8).view(-1)

    def _key(self, rank: int, stream: int) -> DrawKey:
        return draw_key(
            self.settings["seed"], self._steps + 1, rank, stream, stratified=self.settings["draws"] == "stratified"
        )

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """uint8 ``(size, reply bytes)``: ``block_size/8`` bytes per block."""
        width = bucket.blocks // self._ranks().size * bucket.block_size // 8
        return torch.empty((self._ranks().size, width), dtype=torch.uint8, device=self._device)

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Keeps the bits until all buckets are in, or takes the united bitmap."""
        words = gathered.view(-1).view(torch.int32).view(bucket.blocks, bucket.block_size // 32)
        if self._merging:
            self._live[bucket.index] |= words
            return
        self._drawn[bucket.index] = words
        if guard := self._protected.get(bucket.index):
            guard.restore()

    # ----- books ------------------------------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number("beta", group["beta"], least=0, below=1)
        check_number("magnitude_beta", group["magnitude_beta"], least=0, below=1, optional=True)
        magnitude_beta = _magnitude_beta(group)
        if self.settings["overflow"] == "keep" and not 0 < group["beta"] < magnitude_beta:
            raise ValueError(
                f"overflow='keep' keeps in m what signs cannot say until a has forgotten it, which has no effect with beta={group['beta']} "
                f"and magnitude_beta={magnitude_beta:g}: leave overflow out, or choose 0 < beta < magnitude_beta"
            )

    def _begin_exchange(self) -> None:
        self._drawn = {}

    def _guarded(self, bucket: Bucket) -> list[tuple[Tensor | Residual, tuple[int, int]]]:
        shard: list[tuple[Tensor | Residual, tuple[int, int]]] = [
            (self._shard(bucket, name), self._shard_blocks(bucket)) for name in ("m", "a")
        ]
        feedback = [(self._server_residual_of(bucket), self._chunk_blocks(bucket))] if self._feeds_back else []
        return [*shard, *feedback]

    @property
    def _feeds_back(self) -> bool:
        return bool(self.settings["server"] == "feedback")

    def _takes_new_parameters(self) -> bool:
        return True  # there is no warm-up that a newcomer could have missed

    def _arenas(self) -> tuple[str, ...]:
        return ("m", "a")

    def _state_of(self, index: int, dealt_anew: bool = True) -> dict[str, Tensor]:
        if index not in self._slot_of or not dealt_anew:
            return super()._state_of(index, dealt_anew)
        # of a hierarchical run's m and a this rank has only some blocks
        state = super()._state_of(index) if self._laid_out_for[1] == 1 else {}
        if index in self._masters:
            state["master"] = self._masters[index]
        live = [torch.zeros(0, dtype=torch.bool, device=self._device)]
        for bucket, span in self._known_plan().spans_of(self._slot_of[index]):
            words = self._live[bucket.index][span.block : span.block + span.blocks(bucket.block_size)]
            live.append(unpack_bits(words).flatten()[: span.numel])
        return {**state, "live": torch.cat(live)}

    def _layout(self, kept: dict[int, dict[str, Tensor]]) -> None:
        super()._layout(kept)
        share = self._ranks().ranks_per_node
        if share > 1:
            # hierarchical: m and a follow the node's mean gradient and live on the shard only
            size = self._known_plan().elements // share
            self._flat = {name: torch.zeros(size, dtype=torch.float32, device=self._device) for name in self._arenas()}
            if kept:
                log.warning(
                    "a parameter joins %s: blocks are dealt anew among the ranks of a node, and m and a start from zero",
                    self.algorithm,
                )
        if self._feeds_back and self.compresses:
            self._server_residual = Residual(self._first_feedback())
        self._merge_due = bool(kept)
        live = torch.zeros(self._known_plan().elements, dtype=torch.bool, device=self._device)
        for slot, i in enumerate(self._slots):
            if "live" in (state := kept.get(id(self._params[i]), {})):
                self._part(live, slot).copy_(state["live"])
        self._set_live(live)

    def _first_feedback(self) -> Tensor:
        """Uniform draws in (-1, 1): from zero, all coordinates whose votes cancel would go up and down together."""
        size = self.options.block_size
        key = draw_key(self.settings["seed"], 0, 0, SERVER_STREAM, stratified=False)
        parts = [torch.zeros(0, dtype=torch.float32, device=self._device)]
        for bucket in self._buckets():
            first, last = self._chunk_blocks(bucket)
            parts.append(
                uniform(draw_hash(key, bucket.first_block + first, last - first, size, self._device)).flatten()
            )
        return torch.cat(parts)

    def _set_live(self, flat: Tensor) -> None:
        """Packs the bitmap of live coordinates from bools over all blocks."""
        words = self.options.block_size // 32
        self._live = [
            torch.zeros((bucket.blocks, words), dtype=torch.int32, device=self._device) for bucket in self._buckets()
        ]
        for bucket, packed in zip(self._buckets(), self._live, strict=True):
            pack_bits(bucket.slice(flat).view(-1, bucket.block_size), packed)

    def _words(self, bucket: Bucket, rows: int) -> Packed:
        count = bucket.blocks // self._ranks().size
        width = Packed.row_bytes(count, bucket.block_size, has_scales=False)
        raw = torch.empty((rows, width), dtype=torch.uint8, device=self._device)
        return Packed(raw, count, bucket.block_size, has_scales=False)

    def _shard(self, bucket: Bucket, name: str) -> Tensor:
        """This rank's blocks of an arena."""
        share = self._ranks().ranks_per_node
        start = bucket.first_block * bucket.block_size // share
        return self._flat[name][start : start + bucket.elements // share]

    def _shown_part(self, name: str, slot: int) -> Tensor | None:
        """See the base: this rank's own; of a hierarchical exchange it has but some blocks."""
        return super()._shown_part(name, slot) if self._laid_out_for[1] == 1 else None

    @property
    def _learns_again(self) -> bool:
        return self._laid_out_for[1] == 1

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _saved_arenas(self) -> Iterator[tuple[str, Tensor]]:
        if self._live:
            yield "live", torch.cat([unpack_bits(words).flatten() for words in self._live])

    def _rank_state(self) -> dict[str, Tensor]:
        if not self._flat:
            return {}
        feedback = {} if self._server_residual is None else {"server_residual": self._server_residual.values}
        return {"momentum": self._flat["m"], "magnitude": self._flat["a"], **feedback}

    def _load_rank_state(self, tensors: dict[str, Tensor]) -> None:
        for key, name in self._replicated.items():
            if key in tensors:  # nothing was saved before the first step
                self._flat[name].copy_(tensors[key])
        if self._server_residual is not None and "server_residual" in tensors:
            self._server_residual.values.copy_(tensors["server_residual"])

    def _books(self) -> dict[str, Any]:
        return {**super()._books(), "merge_due": self._merge_due}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        self._phase = Phase.COMPRESSED
        self._merge_due = books.get("merge_due", False)
        flat = torch.zeros(self._known_plan().elements, dtype=torch.bool, device=self._device)
        for i, state in saved.items():
            if "live" in state and i in self._slot_of:
                self._known_plan().view(flat, self._slot_of[i], self._params[i]).copy_(state["live"])
        self._set_live(flat)
        self._cold = self._never_live() if self._steps else set()
        if self._transport is not None:
            self._renew_reducer()


def _magnitude_beta(group: dict[str, Any]) -> float:
    given = group["magnitude_beta"]
    return float(1.0 - (1.0 - group["beta"]) / MEMORY if given is None else given)


def _share(beta: float, step: int) -> float:
    """Weight of the newest of ``step`` values in an average whose weights fall by ``beta`` per step and add up to 1."""
    return (1.0 - beta) / (1.0 - beta ** max(1, step))  # a parameter that sits out may have had none
