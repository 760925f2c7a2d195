"""One running step: what is known of it, and what it does. It is made when a step begins and dropped when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, Control, control_payload
from lightning_onebit.comm.ranges import ranged
from lightning_onebit.engine.codec import Codec, OneBit, first_bad
from lightning_onebit.engine.link import DENSE_LANE, PLAN_LANE, Link
from lightning_onebit.engine.whole import NotFinite, Wholeness
from lightning_onebit.kernels import BoundSpans, KernelBackend, Packed

if TYPE_CHECKING:
    from lightning_onebit.engine.late import Late
    from lightning_onebit.engine.rule import Rule


class Facts:
    """What the numbers of a parameter depend on in a step: ``p["lr"]`` and the other hyperparameters of its group.

    Attributes:
        index: the parameter.
        t: steps that it has made; this one is among them once it has been counted.
        grad_scale: factor by which its gradient is clipped.
    """

    __slots__ = ("_group", "grad_scale", "index", "t")

    def __init__(self, group: dict[str, Any], index: int, t: int, grad_scale: float) -> None:
        self._group, self.index, self.t, self.grad_scale = group, index, t, grad_scale

    def __getitem__(self, name: str) -> Any:
        return self._group[name]


#: a number of a parameter: a hyperparameter, or a function of a module or a bound method, for tables are kept by it
Number: TypeAlias = "str | Callable[[Facts], float]"


def _value(number: Number, p: Facts) -> float:
    return float(p[number]) if isinstance(number, str) else number(p)


class Group:
    """Some parameters of one group with averaged gradients, for a dense update; ``s["m"]`` lists their moments, ``s.of`` is the group.

    Attributes:
        indices: the parameters.
        x: their fp32 weights.
        g: their gradients.
        t: steps that each has made before this one.
    """

    def __init__(self, step: Step, of: dict[str, Any], indices: list[int]) -> None:
        self.step, self.kept, self.of, self.indices = step, step.kept, of, indices
        self.x = [self.kept.weight(i) for i in indices]
        self.g = [self.kept.grad(i) for i in indices]
        self.t = [self.kept.t[i] for i in indices]

    def __getitem__(self, name: str) -> list[Tensor]:
        return [self.kept.moment(name, i) for i in self.indices]


class Part:
    """Blocks ``[lo, hi)`` of a bucket, as kernels take them; ``s["r"]`` is their part of an arena."""

    def __init__(self, step: Step, bucket: Bucket, lo: int, hi: int) -> None:
        self.step, self.blocks, self.lo, self.hi = step, bucket, lo, hi

    @property
    def kernels(self) -> KernelBackend:
        """The kernels of the parameters' device."""
        return self.step.kept.kernels

    @property
    def x(self) -> BoundSpans:
        """fp32 weights of the bucket by span; None where a parameter sits the step out."""
        return self.step.weights(self.blocks)

    @property
    def g(self) -> BoundSpans:
        """Gradients of the bucket by span."""
        return self.step.grads(self.blocks)

    @property
    def momentum(self) -> Tensor | Packed:
        """The momentum as it travels."""
        held = self.step.kept.momentum[self.blocks.index]
        if self.lo == 0 and self.hi == self.blocks.blocks:
            return held
        if isinstance(held, Packed):
            rows = held.blocks_per_row
            return held.narrow(self.lo // rows, (self.hi - self.lo) // rows)
        return held[self.lo * self.blocks.block_size : self.hi * self.blocks.block_size]

    def each(self, *numbers: Number) -> Tensor:
        """fp32 ``(blocks,)``, a number of its parameter for each block, or ``(numbers, blocks)`` of several."""
        table = self.step.table(*numbers)[self.blocks.index]
        whole = self.lo == 0 and self.hi == self.blocks.blocks
        return table if whole else table[..., self.lo : self.hi].contiguous()

    def __getitem__(self, name: str) -> Tensor:
        bucket, kept = self.blocks, self.step.kept
        if kept.sharded:  # they hold these blocks and no others
            start = bucket.first_block * bucket.block_size // kept.layout.ranks.ranks_per_node
        else:
            start = (bucket.first_block + self.lo) * bucket.block_size
        assert kept.tables is not None
        return kept.tables.view(
            name, bucket.index, kept.flat[name], start, start + (self.hi - self.lo) * bucket.block_size
        )

    def whole(self, name: str) -> Tensor:
        """The part of an arena that belongs to the whole bucket."""
        return self.blocks.slice(self.step.kept.flat[name])


class Step:
    """A step from its first backward to its end.

    Attributes:
        dense: whether it works on densely averaged gradients; decided once, since a schedule may change lr between backward and step;
            None: not yet.
        verdict: what all ranks know alike of its gradients; None: they have not asked yet.
        clipped: what the verdict was asked for was clipping.
        averaged_elsewhere: somebody else has averaged the gradients of a dense step.
        grad_scale: factor by which gradients are clipped.
        active: by parameter, whether it takes part.
        trusted: nobody looks at the gradients that are exchanged before they come back.
        alike: whether all ranks have the same gradients, as far as it shows.
    """

    def __init__(self, rule: Rule, link: Link, late: Late, whole: Wholeness) -> None:
        self.rule, self.kept, self.link, self.late, self.whole = rule, rule.kept, link, late, whole
        self.dense: bool | None = None
        self.grad_scale = 1.0
        self.active: list[bool] = []
        self.trusted = self.alike = False
        self.forget_gradients()
        self.forget_numbers()

    def forget_gradients(self) -> None:
        """Another backward follows, or gradients are dropped: what is known of them holds no more."""
        # by the reducer's parameters, whether some rank had a gradient
        self._present: list[bool] | None = None
        self.verdict: Control | None = None
        self.clipped = False
        self.averaged_elsewhere = False
        # gradients of parameters that are not sharded, beside others that are, have been averaged over the ranks of a replica
        self._evened = False
        self._grads: dict[int, BoundSpans] = {}

    # ----- gradients ---------------------------------------------------------------------------------------------------

    @property
    def averaged(self) -> list[int]:
        """Parameters whose gradients it averages densely."""
        return self.kept.layout.known if self.dense else self.kept.layout.dense

    def select_lanes(self) -> None:
        """Tells the reducer what to average: everything, or ``compress=False`` groups only."""
        self.link.select(*((PLAN_LANE, DENSE_LANE) if self.dense else (DENSE_LANE,)))

    def needs_average(self) -> bool:
        """Whether gradients have yet to be averaged."""
        reducer = self.link.reducer
        if reducer is None or (self._present is not None and not reducer.stale):
            return False
        self.averaged_elsewhere = self.averaged_elsewhere and bool(self.dense) and not reducer.stale
        return not self.averaged_elsewhere

    def average(self) -> None:
        """Makes ``.grad`` the average over ranks wherever it is needed so."""
        self.select_lanes()
        assert self.link.reducer is not None
        self._present = self.link.reducer.finish()

    def even_out(self) -> None:
        """Averages, over the ranks of a replica, gradients of parameters that all of them hold whole; once."""
        shards, params = self.link.shards, self.kept.layout.params
        if shards is None or self._evened:
            return
        self._evened = True
        known = set(self.kept.layout.known)
        if plain := [i for i in shards.plain if i in known]:
            _, _, present = self.link.control_shards(
                self.kept.steps + 1, [], False, [params[i].grad is not None for i in plain], self.kept.device
            )
            members = [i for i, here in zip(plain, present, strict=True) if here]
            for i in members:
                if params[i].grad is None:
                    params[i].grad = torch.zeros_like(params[i])
            shards.average([self.kept.grad(i) for i in members])

    def average_exchanged(self) -> None:
        """Averages densely what was to be exchanged, clipped."""
        reducer, kept = self.link.reducer, self.kept
        if reducer is not None:
            self.link.select(PLAN_LANE)
            reducer.finish()
        grads = [g for i in kept.layout.slots if self.active[i] and (g := kept.layout.params[i].grad) is not None]
        if self.grad_scale != 1.0 and grads:
            torch._foreach_mul_(grads, self.grad_scale)

    def judge(self, *, norm: bool) -> Control:
        """Finiteness and presence of its gradients, alike on all ranks, and their norm if asked for."""
        return self.ask(norm=norm)()

    @ranged("control")
    def ask(self, *, norm: bool) -> Callable[[], Control]:
        """Begins to judge; what it returns waits for the answer."""
        kept, link, params = self.kept, self.link, self.kept.layout.params
        present = [p.grad is not None for p in params]
        finite = torch.tensor(True)
        if link.reducer is not None and not self.averaged_elsewhere:
            finite = link.reducer.finite()
        if self._present is not None:
            for i in self.averaged:
                present[i] = link.present(i, self._present)
        local = [i for i in kept.layout.known if params[i].grad is not None]
        shared = set(self.averaged) if link.reducer is not None else set()
        self.trusted = self.trusted and not norm
        unseen = kept.layout.slot_of.keys() - kept.cold - kept.late.keys() if self.trusted else ()
        own, bad = self._stats([i for i in local if i not in shared and i not in unseen])
        common, overflowed = [0.0] * len(own), 0
        if norm or self.averaged_elsewhere:
            # averaged gradients are the same on every rank and count once
            common, overflowed = self._stats([i for i in local if i in shared])
        bad += (not bool(finite)) + (overflowed if self.averaged_elsewhere else 0)
        present, bad, (own, common) = self._judge_shards(present, bad, (own, common))
        if link.ranks.size > 1 and not self.dense:
            answer = link.begin_control(kept.steps + 1, sum(own), int(bad), present, kept.device)
        else:
            alone = Control(sum(own), bad == 0, tuple(present), 1)
            answer = lambda: alone  # noqa: E731

        def judged() -> Control:
            control = answer()
            if norm and self.averaged:
                control = replace(control, sum_squares=control.sum_squares + sum(common) * control.ranks)
            return control

        return judged

    def _stats(self, indices: Sequence[int]) -> tuple[list[float], int]:
        """Sums of squares of some gradients, one for each way in which parameters are sharded, and how many are not finite."""
        kept, params, shards = self.kept, self.kept.layout.params, self.link.shards
        squares, bad = [], 0
        for members in [indices] if shards is None else shards.by_way(indices):
            grads = [g for i in members if (g := params[i].grad) is not None]
            square, wrong = kept.kernels.grad_stats(grads).tolist() if grads else (0.0, 0)
            squares.append(square)
            bad += int(wrong)
        return squares, bad

    def _judge_shards(
        self, present: list[bool], bad: int, squares: tuple[list[float], list[float]]
    ) -> tuple[list[bool], int, tuple[list[float], list[float]]]:
        """What this rank knows of gradients, to what all ranks of its replica know, with a flag more for each of ``unheard()``."""
        unheard, count = self.rule.unheard(), len(present)
        heard = self._not_zero(unheard)
        if self.link.shards is None:
            return [*present, *heard], bad, squares
        # by parameter: a rule may have heard of other ones on other shards
        flags = present + [False] * count
        for i, here in zip(unheard, heard, strict=True):
            flags[count + i] = here
        both = [*squares[0], *squares[1]]
        both, wrong, flags = self.link.control_shards(self.kept.steps + 1, both, bad > 0, flags, self.kept.device)
        half = len(both) // 2
        return [*flags[:count], *(flags[count + i] for i in unheard)], int(wrong), (both[:half], both[half:])

    def _not_zero(self, indices: Sequence[int]) -> list[bool]:
        """Which of some parameters have a gradient on this rank that is not zero everywhere."""
        grads = {i: grad for i in indices if (grad := self.kept.layout.params[i].grad) is not None}
        if not grads:
            return [False] * len(indices)
        seen = dict(zip(grads, torch.stack([grad.any() for grad in grads.values()]).tolist(), strict=True))
        return [seen.get(i, False) for i in indices]

    def hear(self, verdict: Control) -> None:
        """Takes note, on all ranks alike, of the first gradients of parameters that had none so far."""
        heard = verdict.present[len(self.kept.layout.params) :]
        if any(heard):
            self.whole.writes()
            self._grads = {}  # those of late parameters are not exchanged
            unheard = self.rule.unheard()
            self.rule.first_gradients(self, [i for i, here in zip(unheard, heard, strict=True) if here])

    def clip(self, verdict: Control, limit: float | None) -> None:
        """Clips by the global norm, unless that has been done."""
        if limit is None or self.clipped:
            return
        factor = min(1.0, limit / (verdict.norm + 1e-6))
        if factor == 1.0:
            return
        averaged = [g for i in self.averaged if (g := self.kept.layout.params[i].grad) is not None]
        if averaged:
            torch._foreach_mul_(averaged, factor)
        # local gradients are not touched: the factor goes into what is sent
        self.grad_scale = factor

    # ----- the step itself ---------------------------------------------------------------------------------------------

    def make(self, verdict: Control) -> None:
        """Makes the step on gradients that ranks have agreed on; decides anew whether it was dense."""
        self.hear(verdict)
        if self.dense:
            self.whole.writes()
            self.rule.step_dense(self, [i for i in self.kept.layout.known if self.active[i]])
            return
        members = self.late.average(self, verdict)
        self.dense = self.rule.step_compressed(self)
        self.late.step(self, members)

    def make_early(self, codec: OneBit) -> None:
        """The rest of a step whose exchange began in backward: what never landed counts as zero; then apply.

        Raises:
            NotFinite: a gradient of some rank was not.
        """
        kept = self.kept
        self._check(codec)
        self.trusted = True  # the scales have told of what was compressed
        asks = (kept.layout.dense and self.link.reducer is not None) or kept.late or self.rule.unheard()
        verdict = self.judge(norm=False) if asks else None
        if verdict is not None and not verdict.finite:
            raise NotFinite
        members: list[int] = []
        if verdict is not None:
            self.hear(verdict)
            members = self.late.average(self, verdict)
        kept.end_adopting()
        self.whole.writes()
        stepped = [i for i in kept.layout.slots if self.active[i]]
        self.count(stepped)
        with self.link.ledger.compressing("apply"):
            codec.end()
        kept.publish(stepped)
        self.update([i for i in kept.layout.dense if verdict is None or verdict.present[i]])
        self.late.step(self, members)

    def may_send_at_once(self) -> bool:
        """Whether ranks can exchange before they know who takes part, which travels with the first bucket; alike on all ranks."""
        kept, ranks = self.kept, self.link.ranks
        flat = ranks.size > 1 and ranks.ranks_per_node == 1 and self.link.shards is None
        return flat and self.rule.sends_at_once and kept.worker is not None and bool(self._expected())

    def _expected(self) -> list[Bucket]:
        """Buckets with parameters that took part in the last compressed step; all of them before the first."""
        slot_of, who = self.kept.layout.slot_of, self.kept.took_part
        slots = None if who is None else {slot_of[i] for i in who if i in slot_of}
        return [b for b in self.kept.layout.buckets if slots is None or not b.params.isdisjoint(slots)]

    def make_at_once(self) -> None:
        """A step that exchanges what took part in the last one, and then, ranks knowing better, what is missing.

        Raises:
            NotFinite: a gradient of some rank was not.
        """
        kept, link, slots = self.kept, self.link, self.kept.layout.slots
        present = [p.grad is not None for p in kept.layout.params]
        if link.reducer is not None and not bool(link.reducer.finite()):
            raise NotFinite  # averages are the same on all ranks
        if self._present is not None:
            for i in self.averaged:
                present[i] = link.present(i, self._present)
        codec, buckets = self.rule.codec(self), self._expected()
        assert isinstance(codec, OneBit) and link.exchange is not None
        codec.tells = control_payload(0.0, 0, present, link.agreement.digest)
        self.active = [True] * len(present)
        self.look_at_gradients()
        link.exchange.run(buckets, codec)
        self.active = list(link.agreed(codec.heard(len(present)), kept.steps + 1, kept.device).present)
        moved = {slot for slot, i in enumerate(slots) if self.active[i]}
        link.exchange.run(
            [b for b in kept.layout.buckets if b not in buckets and not b.params.isdisjoint(moved)], codec
        )
        self._check(codec)
        codec.arrived = [(b, raw) for b, raw in codec.arrived if not b.params.isdisjoint(moved)]
        codec.protect([b for b, _ in codec.arrived], [self.active[i] for i in slots])
        kept.end_adopting()
        self.whole.writes()
        stepped = [i for i in slots if self.active[i]]
        self.count(stepped)
        with link.ledger.compressing("apply"):
            codec.end()
        kept.publish(stepped)
        self.update_dense_groups()

    # ----- what a step is made of --------------------------------------------------------------------------------------

    @ranged("apply")
    def update(self, indices: list[int]) -> None:
        """Steps some parameters on averaged gradients by the dense rule."""
        for group, members in self.kept.layout.by_group(indices):
            self.rule.dense(Group(self, self.kept.groups[group], members))
        self.kept.publish(indices)
        self.count(indices)

    def count(self, indices: Iterable[int], steps: int = 1) -> None:
        """Counts a step of some parameters, or takes it back; numbers that are known already may depend on it."""
        for i in indices:
            self.kept.t[i] += steps
        self.forget_numbers()

    def exchange_all(self) -> None:
        """Exchanges and applies, then a dense update of ``compress=False`` groups."""
        stepped = [i for i in self.kept.layout.slots if self.active[i]]
        self.count(stepped)
        try:
            self.exchange()
        except BaseException:
            if not self.whole.written:
                self.count(stepped, -1)
            raise
        self.kept.publish(stepped)
        self.update_dense_groups()

    def update_dense_groups(self) -> None:
        """A dense update of ``compress=False`` groups."""
        self.update([i for i in self.kept.layout.dense if self.active[i]])

    def exchange(self, codec: Codec | None = None) -> None:
        """Exchanges all buckets that hold an active parameter; the others' parameters stay as they are.

        Raises:
            NotFinite: what has come back is not, and nothing has been written.
            FloatingPointError: it is not, and something has been written before it was sent.
        """
        codec = codec or self.rule.codec(self)
        assert self.link.exchange is not None
        units = self._residual_units()
        active = [self.active[i] for i in self.kept.layout.slots]
        if units:
            active = [takes_part and unit != 0.0 for takes_part, unit in zip(active, units.values(), strict=True)]
        idle = {slot for slot, takes_part in enumerate(active) if not takes_part}
        buckets = [b for b in self.kept.layout.buckets if not b.params <= idle]
        codec.protect(buckets, active)
        self.forget_numbers()
        for bucket in buckets:
            codec.look_up(bucket)
        if not codec.is_transaction:
            self.whole.writes()
        self.link.exchange.run(buckets, codec)
        self._check(codec)
        self.whole.writes()
        codec.end()
        self.kept.units |= {i: unit for i, unit in units.items() if self.active[i] and unit}
        self.forget_numbers()

    def _check(self, codec: Codec) -> None:
        """Raises, alike on all ranks, where what has come back is not finite."""
        bad = first_bad(codec.arrived)
        if self.link.any_shard(bad is not None, self.kept.device):
            if not self.whole.written:
                raise NotFinite
            known = f" (the last good one is {self.whole.checkpoint})" if self.whole.checkpoint else ""
            raise FloatingPointError(
                f"step {self.kept.steps + 1}: gradients of some rank are finite, but so large that their squares are not (fp32). Resume "
                f"from the last checkpoint, with a lower lr or with gradients clipped{known}"
            )
        self.alike = codec.alike is not None and bool(codec.alike)

    def _residual_units(self) -> dict[int, float]:
        """By exchanged parameter, in units of what its residuals are after this step; empty: of nothing that changes."""
        unit = self.rule.residual_unit
        return {} if not unit else dict(zip(self.kept.layout.slots, self.by_slot(unit), strict=True))

    def rescaled_residuals(self) -> Sequence[Tensor] | None:
        """By bucket, fp32 ``(blocks,)``: factors that bring residuals into this step's units; None: all are 1."""
        before = self.kept.units
        factors = [before.get(i, unit) / unit if unit else 1.0 for i, unit in self._residual_units().items()]
        return self.spread(factors) if set(factors) - {1.0} else None

    # ----- what is looked up once --------------------------------------------------------------------------------------

    def forget_numbers(self) -> None:
        """Numbers of parameters, or who is active, may be others from here on."""
        self._weights: dict[int, BoundSpans] = {}
        self._tables: dict[tuple[Number, ...], Sequence[Tensor]] = {}
        # a parameter of each kind, and for each slot the position of its kind there
        self._kinds: tuple[list[Facts], list[int]] | None = None

    def part(self, bucket: Bucket, lo: int, hi: int) -> Part:
        """Blocks ``[lo, hi)`` of a bucket."""
        return Part(self, bucket, lo, hi)

    def parts(self) -> list[Part]:
        """All buckets."""
        return [self.part(bucket, 0, bucket.blocks) for bucket in self.kept.layout.buckets]

    def weights(self, bucket: Bucket) -> BoundSpans:
        """fp32 weights of active parameters by span."""
        known = self._weights.get(bucket.index)
        if known is None:
            known = self._weights[bucket.index] = self.kept.bind_weights(bucket, self.active)
        return known

    def look_at_gradients(self) -> None:
        """Looks up gradients before they are needed, while there is something to wait for."""
        for bucket in self.kept.layout.buckets:
            self.kept.kernels.prepare(bucket, self.grads(bucket), "g")

    def grads(self, bucket: Bucket) -> BoundSpans:
        """Gradients by span."""
        known = self._grads.get(bucket.index)
        if known is None:
            known = self._grads[bucket.index] = self.kept.bind_grads(bucket)
        return known

    def facts(self, index: int) -> Facts:
        """What the numbers of a parameter depend on."""
        return Facts(self.kept.group(index), index, self.kept.t[index], self.grad_scale)

    def _sorted_kinds(self) -> tuple[list[Facts], list[int]]:
        if self._kinds is None:
            kept, rule = self.kept, self.rule
            group_of, t, slots = kept.layout.group_of, kept.t, kept.layout.slots
            others = rule.kinds() or [None] * len(slots)
            kinds = [(group_of[i], t[i], other) for i, other in zip(slots, others, strict=True)]
            examples = dict(zip(kinds, kept.layout.slots, strict=True))
            place = {kind: k for k, kind in enumerate(examples)}
            self._kinds = [self.facts(i) for i in examples.values()], [place[kind] for kind in kinds]
        return self._kinds

    def by_slot(self, number: Number) -> list[float]:
        """A number of each exchanged parameter; asked for once for each kind."""
        examples, place = self._sorted_kinds()
        values = [_value(number, p) for p in examples]
        return [values[k] for k in place]

    def table(self, *numbers: Number) -> Sequence[Tensor]:
        """By bucket, fp32 ``(blocks,)`` of one number of parameters, ``(numbers, blocks)`` of several; made for all buckets at once."""
        tables = self._tables.get(numbers)
        if tables is None:
            assert self.kept.tables is not None
            rows = [self.by_slot(number) for number in numbers]
            tables = self._tables[numbers] = self.kept.tables.numbers(numbers, rows)
        return tables

    def spread(self, values: Sequence[float]) -> Sequence[Tensor]:
        """By bucket, fp32 ``(blocks,)`` from a value per slot, a tensor of this step alone."""
        assert self.kept.tables is not None
        return self.kept.tables.by_bucket(self.kept.tables.spread(values))
