"""The tensors that an optimizer keeps: arenas over all blocks, moments and masters by parameter, momentum and residuals as they travel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, memory_order
from lightning_onebit.engine.layout import Layout
from lightning_onebit.engine.masters import Comparison, adopt_
from lightning_onebit.engine.options import ExchangeOptions
from lightning_onebit.engine.sharded import LocalShard, Shards
from lightning_onebit.engine.tables import Tables
from lightning_onebit.kernels import BoundSpans, KernelBackend, Packed, Residual, get_backend
from lightning_onebit.kernels.residual import copy_blocks

# elements treated at once where temporaries are needed, so that none grows with the model
_CHUNK = 1 << 20
#: what a parameter keeps while things are laid out anew, by its index
Kept = Mapping[int, Mapping[str, Tensor]]


class Phase(str, Enum):
    """Where an optimizer is in its schedule.

    WARMUP: the second moments learn, from densely averaged gradients (0/1 Adam: with one-bit rounds in between).
    COMPRESSED: one-bit exchanges.
    LOCAL: local steps with a one-bit synchronisation now and then (0/1 Adam after its variance freeze).
    """

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"


class _Members(NamedTuple):
    """The parameters of a bucket's spans, one entry for each span: looked up once, for as long as the layout and the weights stay.

    weights: what holds the fp32 weights: the parameter, or the master copy of a 16-bit one.
    special: positions of those whose gradient kernels cannot take as it is: only a part of it lies in the bucket, or the parameter's
        memory order is not that of its indices.
    """

    indices: list[int]
    params: list[torch.nn.Parameter]
    weights: list[Tensor]
    special: list[int]


class Arenas:
    """All state of an optimizer that is made of tensors, and how far it has come. It knows no algorithm and no other rank.

    State that torch would keep in ``optimizer.state`` lies outside of it, because torch casts everything there to the parameter's dtype
    on load and Lightning moves its tensors one by one.

    Attributes:
        groups: the optimizer's parameter groups.
        names: arenas that the rule needs from the start (``"m"``, ``"v"``).
        state_dtype: of residuals and of frozen denominators.
        by_shard: whether these are of the rank's shard only in a hierarchical exchange.
        numbers: fp64 ``(parameters,)`` on their device, by name: a number of each parameter that the rule keeps.
        unit: arena by which the momentum is multiplied while it travels, once there is such an arena; None: it travels as it is.
        flat: fp32 values (or bf16, of some) over all blocks, by name.
        own: moments of parameters that take no part in the exchange (``compress=False``, late ones), by index and name.
        masters: fp32 weights of 16-bit parameters.
        hidden: this rank's own weights of parameters that show others for a while.
        showing: what gives exchanged parameters the weights that they show meanwhile; None: they show their own.
        exchanged: steps whose momenta the last exchange has carried.
        momentum: by bucket, as it travels: bits and scales, or an fp32 flat; empty while it is the arena ``"m"``.
        worker, server: the residuals of both sides; None before there is one.
        units: by parameter, in units of what its residuals are (see ``Rule.residual_unit``).
        took_part: parameters that were in the last compressed step, of a rule that ``sends_at_once``; None: there was none.
        t: steps that each parameter has made.
        cold: parameters of which nothing is known yet that an exchange of theirs could go by.
        late: those that are averaged densely until they have learned: their steps when that began, and when it may end.
        phase: see ``Phase``.
        steps: real steps made.
        shards: what makes numbers of shards those of whole parameters; None: not connected, or nothing is sharded.
        comparison: what ``adopt()`` has begun.
    """

    worker: Residual | None
    server: Residual | None
    _new_worker: Residual | None
    _new_server: Residual | None

    def __init__(
        self,
        exchange: ExchangeOptions,
        names: Sequence[str],
        numbers: Mapping[str, float],
        *,
        by_shard: bool,
        unit: str | None,
        phase: Phase,
        state_dtype: torch.dtype,
    ) -> None:
        self.exchange, self.names, self.by_shard, self.unit = exchange, tuple(names), by_shard, unit
        self.state_dtype = state_dtype
        self._first_numbers = dict(numbers)
        self.groups: list[dict[str, Any]] = []
        self.parameter_names: Mapping[Tensor, str] = {}
        self._first_phase = phase
        self.kernels: KernelBackend = get_backend("reference", "cpu")
        self.shards: Shards | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets everything, as before the first step."""
        self.phase, self.steps = self._first_phase, 0
        self._layout: Layout | None = None
        self.numbers: dict[str, Tensor] = {}
        self.flat: dict[str, Tensor] = {}
        self.own: dict[int, dict[str, Tensor]] = {}
        self.masters: dict[int, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}
        self.showing: Callable[[int], Tensor] | None = None
        self.exchanged = 1
        self.momentum: list[Tensor | Packed] = []
        self.drop_residuals()
        self.units: dict[int, float] = {}
        self.took_part: set[int] | None = None
        self.t: list[int] = []
        self.cold: set[int] = set()
        self.late: dict[int, tuple[int, int]] = {}
        self.comparison: Comparison | None = None
        self.forget_bound()

    # ----- layout ------------------------------------------------------------------------------------------------------

    @property
    def laid_out(self) -> bool:
        """Whether there is a layout, which the first step makes, or loading a state."""
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """Where parameters lie."""
        assert self._layout is not None
        return self._layout

    @property
    def device(self) -> torch.device:
        """Of all parameters."""
        device: torch.device = self.groups[0]["params"][0].device
        return device

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress for: more than one rank."""
        return self._layout is not None and (self._layout.ranks.size > 1 or self.exchange._alone)

    @property
    def sharded(self) -> bool:
        """Whether arenas hold this rank's shard only."""
        return self.by_shard and self.layout.ranks.ranks_per_node > 1

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, dtype=torch.float32, device=self.layout.device)

    def lay_out(self, layout: Layout, kept: Kept) -> None:
        """Makes all arenas anew, of zeros but for what is kept; without residuals."""
        self._layout = layout
        self.kernels = get_backend(self.exchange.kernels, layout.device)
        size = layout.plan.elements // (layout.ranks.ranks_per_node if self.by_shard else 1)
        self.flat = {name: self._zeros(size) for name in self.names}
        self.momentum = []
        self.drop_residuals()
        self._keep(kept)

    def extend(self, layout: Layout, kept: Kept) -> None:
        """Takes in parameters whose blocks lie behind those there are; nothing of the others moves."""
        before, self._layout = self.layout, layout
        self._keep(kept)
        if layout.plan is before.plan:
            return
        for name, flat in self.flat.items():
            self.flat[name] = torch.cat([flat, flat.new_zeros(layout.plan.elements - before.plan.elements)])
        if "m" not in self.flat:
            self.momentum += [self._zeros(b.elements) for b in layout.buckets[len(before.buckets) :]]
        if self.worker is not None and self.server is not None:
            ranks, blocks = layout.ranks, layout.plan.blocks - before.plan.blocks
            worker, server = self.worker, self.server
            self.drop_residuals()
            self.worker = self._longer(worker, blocks // ranks.ranks_per_node)
            self.server = self._longer(server, blocks // ranks.size)

    def move_to(self, layout: Layout) -> None:
        """The same layout at another place in an equal world."""
        self._layout = layout
        self.forget_bound()

    def _longer(self, residual: Residual, blocks: int) -> Residual:
        """A residual with so many blocks of zeros behind its own."""
        values = residual.values
        pending = (
            None if residual.pending is None else torch.cat([residual.pending, residual.pending.new_zeros(blocks)])
        )
        return Residual(
            torch.cat([values, values.new_zeros(blocks * self.exchange.block_size)]), pending, residual.subtract
        )

    def _keep(self, kept: Kept) -> None:
        """State that is kept by parameter: counts, numbers, own moments and masters; then all that there was before."""
        layout, params = self.layout, self.layout.params
        self.forget_bound()
        if self.shards is not None:
            self.shards.know(layout.sources)
        self.t += [0] * (len(params) - len(self.t))
        for name, first in self._first_numbers.items():
            numbers = torch.full((len(params),), first, dtype=torch.float64, device=layout.device)
            if name in self.numbers:
                numbers[: len(self.numbers[name])] = self.numbers[
                    name
                ]  # groups are only ever added behind those there are
            self.numbers[name] = numbers
        self.own = {i: self.own_zeros(i) for i in (*layout.dense, *self.late)}
        self.masters = {
            i: kept.get(i, {}).get("master", params[i].detach().float())
            for i in (*layout.slots, *layout.dense)
            if params[i].dtype != torch.float32
        }
        for i in (*layout.slots, *layout.dense):
            for name, value in kept.get(i, {}).items():
                if name in self.names and (i in self.own or not self.sharded):
                    self.moment(name, i).copy_(value)

    def reset_numbers(self) -> None:
        """Gives parameters that have made no step their first numbers."""
        index = torch.tensor([t == 0 for t in self.t], device=self.device)
        for name, value in self._first_numbers.items():
            if name in self.numbers:
                self.numbers[name][index] = value

    def own_zeros(self, index: int) -> dict[str, Tensor]:
        """Moments of a parameter's own, zeros."""
        like = self.layout.params[index]
        return {name: torch.zeros_like(like, dtype=torch.float32) for name in self.names}

    def keeps_of(self, index: int, *, arenas: bool) -> dict[str, Tensor]:
        """What a parameter keeps where things are laid out anew; ``arenas``: what lies in arenas too."""
        names = self.own.get(index, self.flat if arenas and not self.sharded else {})
        state = {name: self.moment(name, index).clone() for name in names}
        if index in self.masters:
            state["master"] = self.masters[index]
        return state

    # ----- parameters --------------------------------------------------------------------------------------------------

    def group(self, index: int) -> dict[str, Any]:
        """Parameter group of a parameter."""
        return self.groups[self.layout.group_of[index]]

    def name_of(self, index: int) -> str:
        """Name of a parameter for messages."""
        return self.parameter_names.get(self.layout.sources[index]) or f"parameter {index}"

    def grad(self, index: int) -> Tensor:
        """Gradient of a parameter that has one, or zeros where only other ranks have one."""
        p = self.layout.params[index]
        return torch.zeros_like(p) if p.grad is None else p.grad

    def over_shards(self, rows: Tensor, indices: Sequence[int], how: Literal["sum", "max"] = "sum") -> Tensor:
        """Numbers of local parameters, fp64 ``(parameters, k)``, to those of whole ones; a collective where something is sharded."""
        return rows if self.shards is None else self.shards.combine(rows, indices, how)

    @property
    def anything_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return self._layout is not None and bool(self._layout.sharded)

    def weight(self, index: int) -> Tensor:
        """fp32 weights of a parameter: itself, or its master copy when it is a 16-bit tensor; this rank's own."""
        master = self.masters.get(index)
        if master is not None:
            return master
        hidden = self.hidden.get(index)
        return self.layout.params[index].data if hidden is None else hidden

    def moment(self, name: str, index: int) -> Tensor:
        """State of a parameter with its shape and strides; a view of an arena for what is exchanged."""
        if index in self.own:
            return self.own[index][name]
        return self.layout.view(self.flat[name], index)

    def part(self, name: str, index: int) -> Tensor:
        """A parameter's 1-D part, in memory order, of an arena."""
        return self.layout.part(self.flat[name], index)

    @torch.no_grad()
    def adopt(self) -> None:
        """Takes into the masters what the program has written into 16-bit parameters; on CUDA ``end_adopting()`` does it."""
        if not self.masters:
            return
        pairs = [(self.layout.params[i], master) for i, master in self.masters.items()]
        if self.device.type == "cuda":
            self.comparison = Comparison(pairs)
        else:
            adopt_(pairs)

    def end_adopting(self) -> None:
        """Call it before masters are used, but after something else has waited for the device."""
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            comparison.adopt()

    def publish(self, indices: Iterable[int]) -> None:
        """Writes master weights back into 16-bit parameters."""
        params = self.layout.params
        if self.masters and (pairs := [(params[i], self.masters[i]) for i in indices if i in self.masters]):
            torch._foreach_copy_([p.data for p, _ in pairs], [w for _, w in pairs])

    def show(self, weights_of: Callable[[int], Tensor]) -> None:
        """Points exchanged parameters at other weights than their own; nothing is copied (fp32)."""
        for i in self.layout.slots:
            p, weights = self.layout.params[i], weights_of(i)
            # (there already, where a signal has broken the last call or the way back)
            # (the memory of a shard is the module's: its contents change)
            self.hidden.setdefault(i, p.data.clone() if isinstance(p, LocalShard) else p.data)
            p.data = weights if p.dtype == weights.dtype else torch.empty_like(p.data).copy_(weights)
        self.showing = weights_of

    def show_own(self) -> None:
        """Points parameters back at this rank's own weights."""
        self.adopt_shown()
        self.showing = None
        for i, data in self.hidden.items():
            self.layout.params[i].data = data
        self.hidden = {}

    @torch.no_grad()
    def adopt_shown(self) -> None:
        """Takes into what is shown what the program has written into copies that show it: of 16 bits, or in the memory of shards."""
        if self.showing is not None:
            copied = {i for i in self.hidden if i in self.masters or isinstance(self.layout.params[i], LocalShard)}
            adopt_((self.layout.params[i], self.showing(i)) for i in sorted(copied))

    def keep_shown(self) -> None:
        """Gives what is shown memory of the parameters' own: connections end."""
        self.adopt_shown()
        for i in self.hidden:
            p = self.layout.params[i]
            p.data = p.data.clone()

    # ----- residuals ---------------------------------------------------------------------------------------------------

    def allocate_residuals(self) -> None:
        """Makes both residuals, of zeros, where there are none."""
        if self.worker is None:
            self.worker, self.server = map(self._no_residual, ("worker", "server"))

    def _no_residual(self, side: str) -> Residual:
        """Zeros for what a rank has of all blocks."""
        blocks = self.layout.plan.blocks // self._share(side)
        return self.kernels.residual(blocks, self.exchange.block_size, self.state_dtype, self.layout.device)

    def drop_residuals(self) -> None:
        """Gives both up, with all that exchanges need besides."""
        self.worker = self.server = None
        self._drop_new()

    def _drop_new(self) -> None:
        self._new_worker = self._new_server = None
        self._buffers: dict[tuple[int, str, int], Packed] = {}

    def residual(self, bucket: Bucket, side: str) -> Residual:
        """What this rank holds back of its shard of a bucket (``side="worker"``), or of its chunk of it (``"server"``)."""
        return _part(self.worker if side == "worker" else self.server, bucket, self._share(side))

    def new_residual(self, bucket: Bucket, side: str) -> Residual:
        """Where an exchange writes the next one: in memory of its own, which counts once ``take_new_residuals()`` is called."""
        if self._new_worker is None:
            self._new_worker, self._new_server = map(self._no_residual, ("worker", "server"))
        return _part(self._new_worker if side == "worker" else self._new_server, bucket, self._share(side))

    def take_new_residuals(self, exchanged: Collection[int]) -> None:
        """Makes what an exchange has written the residuals; those of buckets that are not among ``exchanged`` stay as they are."""
        if not exchanged:
            return
        for bucket in [b for b in self.layout.buckets if b.index not in exchanged]:
            for side in ("worker", "server"):
                every = torch.ones(bucket.blocks // self._share(side), dtype=torch.bool, device=bucket.device)
                copy_blocks(self.residual(bucket, side), self.new_residual(bucket, side), every)
        self.worker, self._new_worker = self._new_worker, self.worker
        self.server, self._new_server = self._new_server, self.server

    def _share(self, side: str) -> int:
        """Of how many equal parts of every bucket a rank has one."""
        return self.layout.ranks.ranks_per_node if side == "worker" else self.layout.ranks.size

    def clear_residuals(self, index: int) -> None:
        """Drops what is held back of a parameter."""
        layout = self.layout
        for bucket, _ in layout.plan.spans_of(layout.slot_of[index]):
            mine = bucket.block_param == layout.slot_of[index]
            for side, (first, last) in (("worker", layout.shard(bucket)), ("server", layout.chunk(bucket))):
                self.residual(bucket, side).tensor().view(last - first, -1)[mine[first:last]] = 0.0

    def residual_ratio(self) -> float:
        """Norm of the worker residual relative to that of the momenta that the last exchange has carried; 0 before it."""
        if self.worker is None or not self.worker.values.numel():
            return 0.0
        values = self.worker.tensor()
        squares = sum(float(self._energy(bucket).sum()) for bucket in self.layout.buckets) * self.exchanged**2
        # hierarchical ranks hold 1/K of the residual
        share = values.numel() / max(1, self.layout.plan.elements)
        residual = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / share**0.5
        return residual / squares**0.5 if squares > 0 else 0.0

    def _energy(self, bucket: Bucket) -> Tensor:
        """Sums of squares of the momentum's blocks as it travels, fp64 ``(blocks,)``."""
        held = self.travelling(bucket)
        if isinstance(held, Packed):
            return held.scales.flatten().double().square() * bucket.lengths
        return torch.linalg.vector_norm(held.view(-1, bucket.block_size), dim=1, dtype=torch.float64).square()

    # ----- the momentum: one arena, or by bucket, where bits replace it ------------------------------------------------

    def _unit(self, start: int, elements: int) -> Tensor | None:
        if self.unit is None or self.unit not in self.flat:
            return None
        return self.flat[self.unit][start : start + elements]

    def as_travelling(self, m: Tensor, start: int = 0) -> None:
        """From the momentum to what buckets hold and exchange, in place; ``m`` begins at element ``start`` of all blocks."""
        if (unit := self._unit(start, m.numel())) is not None:
            m.mul_(unit)

    def as_momentum(self, m: Tensor, start: int = 0) -> None:
        """The inverse of ``as_travelling()``, to rounding; 0 where the unit is."""
        if (unit := self._unit(start, m.numel())) is None:
            return
        for first in range(0, m.numel(), _CHUNK):
            piece, factor = m[first : first + _CHUNK], unit[first : first + _CHUNK]
            piece.copy_(torch.where(factor > 0, piece / factor, torch.zeros_like(piece)))

    def hold_by_bucket(self) -> None:
        """Hands the momentum arena over to the buckets, each of which replaces its part by bits after its exchange."""
        m = self.flat.pop("m", None)
        if m is not None:
            self.as_travelling(m)
            self.momentum = [bucket.slice(m) for bucket in self.layout.buckets]

    def hold_flat(self) -> None:
        """Takes the momentum back into an fp32 arena."""
        if "m" not in self.flat:
            self._drop_new()  # (a dense step follows, which needs memory of its own)
            self.flat["m"] = self.momentum_flat()
            self.momentum = []

    def travelling(self, bucket: Bucket) -> Tensor | Packed:
        """The momentum of a bucket as it travels."""
        if "m" not in self.flat:
            return self.momentum[bucket.index]
        held = bucket.slice(self.flat["m"])
        unit = self._unit(bucket.first_block * bucket.block_size, bucket.elements)
        return held if unit is None else held * unit

    def momentum_flat(self) -> Tensor:
        """The momentum as an fp32 flat over all blocks."""
        if "m" in self.flat:
            return self.flat["m"]
        self.as_momentum(flat := self.travelling_flat())
        return flat

    def travelling_flat(self) -> Tensor:
        """What buckets hold as momentum, as an fp32 flat over all blocks."""
        flat = self._zeros(self.layout.plan.elements)
        for bucket, held in zip(self.layout.buckets, self.momentum, strict=True):
            self.unpack(held, bucket, bucket.slice(flat))
        return flat

    def unpack(self, held: Tensor | Packed, bucket: Bucket, out: Tensor) -> Tensor:
        """Writes what a bucket holds into an fp32 flat of it."""
        if isinstance(held, Packed):
            self.kernels.unpack(held, bucket.lengths, out)
        else:
            out.copy_(held)
        return out

    def unpacked(self, bucket: Bucket) -> Tensor:
        """A copy of what a bucket holds as momentum, an fp32 flat."""
        out = torch.empty(bucket.elements, dtype=torch.float32, device=bucket.device)
        return self.unpack(self.momentum[bucket.index], bucket, out)

    def clear_momentum(self, index: int) -> None:
        """Makes the momentum of a parameter 0."""
        if "m" in self.flat:
            self.part("m", index).zero_()
            return
        slot = self.layout.slot_of[index]
        for bucket, _ in self.layout.plan.spans_of(slot):
            mine, held = bucket.block_param == slot, self.momentum[bucket.index]
            if isinstance(held, Packed):
                held.scales[mine.view(held.rows, held.blocks_per_row)] = 0.0
            else:
                held.view(-1, bucket.block_size)[mine] = 0.0

    def put_momentum(self, index: int, m: Tensor) -> None:
        """Gives a parameter a momentum (fp32, 1-D in memory order, changed by it)."""
        if "m" in self.flat:
            self.part("m", index).copy_(m)
            return
        slot = self.layout.slot_of[index]
        self.as_travelling(m, self.layout.plan.starts[slot])
        for bucket, span in self.layout.plan.spans_of(slot):
            held = self.momentum[bucket.index]
            if isinstance(held, Packed):
                held = self.momentum[bucket.index] = self.unpacked(bucket)
            start = span.block * bucket.block_size
            held[start : start + span.numel] = m[span.start : span.start + span.numel]

    def momentum_part(self, index: int, whole: Callable[[Bucket], Tensor]) -> Tensor:
        """A copy of a parameter's momentum that buckets hold, 1-D in memory order; ``whole`` gives that of a bucket."""
        slot = self.layout.slot_of[index]
        part = torch.empty(self.layout.params[index].numel(), dtype=torch.float32, device=self.layout.device)
        for bucket, span in self.layout.plan.spans_of(slot):
            start = span.block * bucket.block_size
            part[span.start : span.start + span.numel] = whole(bucket)[start : start + span.numel]
        return part

    def payload(self, bucket: Bucket, rows: int, *, has_scales: bool = True, tail: int = 0) -> Packed:
        """An empty payload for ``rows`` chunks of a bucket; ``tail``: bytes behind each row, a multiple of 4."""
        count = bucket.blocks // self.layout.ranks.size
        width = Packed.row_bytes(count, bucket.block_size, has_scales)
        raw = torch.empty((rows, width + tail), dtype=torch.uint8, device=self.layout.device)
        return Packed(raw[:, :width] if tail else raw, count, bucket.block_size, has_scales)

    def buffer(self, bucket: Bucket, name: str, rows: int, tail: int = 0) -> Packed:
        """A payload for ``rows`` chunks of a bucket, with ``tail`` bytes behind each row; the same one at every step."""
        key = (bucket.index, name, tail)
        if key not in self._buffers:
            self._buffers[key] = self.payload(bucket, rows, tail=tail)
        return self._buffers[key]

    def reuse(self, bucket: Bucket, name: str, held: Tensor | Packed) -> None:
        """Has the next step write into a payload that nothing needs any more, in the place of the one that it has been given."""
        if isinstance(held, Packed):
            self._buffers[bucket.index, name, 0] = held
        else:
            self._buffers.pop((bucket.index, name, 0))

    # ----- what kernels are given --------------------------------------------------------------------------------------

    def forget_bound(self) -> None:
        """Lets go of views of weights, which are made again where they are needed."""
        # by bucket: the addresses of its weights and the views that were made of them; its parameters
        self.tables = Tables(self._layout) if self._layout is not None else None
        self._bound: dict[int, tuple[list[int], BoundSpans]] = {}
        self._members: dict[int, _Members] = {}

    def _members_of(self, bucket: Bucket) -> _Members:
        known = self._members.get(bucket.index)
        if known is None:
            indices = [self.layout.slots[span.param] for span in bucket.spans]
            params = [self.layout.params[i] for i in indices]
            special = [
                k
                for k, (p, span) in enumerate(zip(params, bucket.spans, strict=True))
                if span.numel != p.numel() or not p.is_contiguous()
            ]
            weights: list[Tensor] = [self.masters.get(i, p) for i, p in zip(indices, params, strict=True)]
            known = self._members[bucket.index] = _Members(indices, params, weights, special)
        return known

    def bind_grads(self, bucket: Bucket) -> BoundSpans:
        """Gradients by span; None where there is none, and of late parameters."""
        members, late = self._members_of(bucket), self.late
        grads = [None if i in late else p.grad for i, p in zip(members.indices, members.params, strict=True)]
        for k in members.special:
            p, grad, span = members.params[k], grads[k], bucket.spans[k]
            if grad is None:
                continue
            if not (grad.is_contiguous() and p.is_contiguous()) and grad.stride() != p.stride() and p.numel() > 1:
                grad = torch.empty_like(p).copy_(grad)  # autograd may hand over another memory order
            grads[k] = memory_order(grad)[span.start : span.start + span.numel]
        return BoundSpans(grads)

    def bind_weights(self, bucket: Bucket, active: Sequence[bool]) -> BoundSpans:
        """Weights of active parameters by span; the very list of the step before, and what backends have made of it, if they lie still."""
        members = self._members_of(bucket)
        where = [w.data_ptr() if active[i] else 0 for i, w in zip(members.indices, members.weights, strict=True)]
        known = self._bound.get(bucket.index)
        if known is None or known[0] != where:
            slots = self.layout.slots
            spans = bucket.bind(lambda slot: memory_order(self.weight(slots[slot])) if active[slots[slot]] else None)
            known = self._bound[bucket.index] = (where, BoundSpans(spans))
            self._members.pop(bucket.index)  # weights that lie elsewhere may have another memory order
        return known[1]


def _part(residual: Residual | None, bucket: Bucket, share: int) -> Residual:
    """What a rank that has one of ``share`` parts of every bucket holds of this one."""
    assert residual is not None
    first = bucket.first_block // share
    return residual.part(first, first + bucket.blocks // share, bucket.block_size)
