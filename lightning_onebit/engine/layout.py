"""Parameters dealt to blocks and buckets: pure data, made anew when something joins or the world is another one."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_onebit.comm import Bucket, Plan, Topology, extended_plan, is_dense, plan_buckets
from lightning_onebit.engine.options import ExchangeOptions
from lightning_onebit.engine.sharded import (
    LocalShard,
    check_dtensor,
    describe_placement,
    is_dtensor,
    local_of,
    placed,
    source_of,
)
from lightning_onebit.kernels.common import bit_sums
from lightning_onebit.kernels.transfer import upload

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Form: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which parameters are exchanged and which averaged densely, and where their elements lie in flat tensors over all blocks.

    Parameters go by their index in the order of ``param_groups``; "slots" are positions of exchanged ones in the plan.

    Attributes:
        params: all parameters, those that do not take part (yet) among them; of a DTensor the local shard.
        group_of: the parameter group of each.
        compressed_groups: by group, what ``compress`` said when it was laid out.
        slots: exchanged parameters, in the order of their slots.
        dense: parameters of ``compress=False`` groups.
        segments: how many slots have been dealt blocks together: at first, and each time others joined behind them; those that are sharded
            in different ways apart, so that what all ranks of a node hold lies alike on them.
        plan: blocks and buckets of the slots.
        ranks: those that blocks are dealt to; without process groups, for it outlives a connection.
        device: where all parameters lie.
    """

    params: list[torch.nn.Parameter]
    group_of: list[int]
    compressed_groups: list[bool]
    slots: list[int]
    dense: list[int]
    segments: list[int]
    plan: Plan
    ranks: Topology
    device: torch.device

    def __post_init__(self) -> None:
        """Takes note of dtypes, shapes and strides, which may not change from now on."""
        _ = self._forms

    @classmethod
    def deal(
        cls,
        groups: Sequence[Mapping[str, Any]],
        ranks: Topology,
        exchange: ExchangeOptions,
        *,
        known: Sequence[int] = (),
        newcomers: bool = True,
        segments: Sequence[int] = (),
        before: Layout | None = None,
    ) -> Layout:
        """Numbers the parameters and deals them to the plan and to dense averaging.

        Args:
            groups: the optimizer's parameter groups.
            ranks: those that train together.
            exchange: block and bucket size.
            known: parameters that take part, trainable now or not; those among them that are exchanged keep this order.
            newcomers: False leaves out trainable ones that are not known.
            segments: how many of the slots have been dealt blocks together, where that is known.
            before: a layout whose slots keep their blocks; others get theirs behind them.
        """
        params = [local_of(p) for group in groups for p in group["params"]]
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        order = {i: k for k, i in enumerate(before.slots if before is not None else known)}
        members = set(known)
        takes_part = [i for i, p in enumerate(params) if i in members or (newcomers and p.requires_grad)]
        compressed = [i for i in takes_part if groups[group_of[i]]["compress"]]
        slots = sorted(compressed, key=lambda i: (order.get(i, len(order)), i))
        dense = [i for i in takes_part if not groups[group_of[i]]["compress"]]
        device = params[0].device

        def blocks_of(indices: Sequence[int]) -> Plan:
            return plan_buckets(
                [params[i].numel() for i in indices],
                block_size=exchange.block_size,
                world_size=ranks.size,
                bucket_elements=int(exchange.bucket_size(device.type) * 2**20 / 4),
                device=device,
            )

        if before is not None:
            plan, segments = before.plan, list(before.segments)
            if joined := slots[len(before.slots) :]:
                joined, counts = _apart(joined, [len(joined)], params)
                slots[len(before.slots) :] = joined
                for part in _cut(joined, counts):
                    plan = extended_plan(plan, blocks_of(part))
                segments += counts
        else:
            segments = list(segments) if sum(segments) == len(slots) and segments else [len(slots)]
            slots, segments = _apart(slots, segments, params)
            plan, first = blocks_of(slots[: segments[0]]), segments[0]
            for count in segments[1:]:
                plan = extended_plan(plan, blocks_of(slots[first : first + count]))
                first += count
        says = [group["compress"] for group in groups]
        return cls(params, group_of, says, slots, dense, segments, plan, _without_groups(ranks), device)

    def fits(self, ranks: Topology) -> bool:
        """Whether blocks are dealt alike to other ranks."""
        return (self.ranks.size, self.ranks.ranks_per_node) == (ranks.size, ranks.ranks_per_node)

    def at(self, ranks: Topology) -> Layout:
        """The same layout among other ranks that it fits."""
        return replace(self, ranks=_without_groups(ranks))

    # ----- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def sources(self) -> list[torch.nn.Parameter]:
        """All parameters, as the program knows them."""
        return [source_of(p) for p in self.params]

    @cached_property
    def sharded(self) -> list[LocalShard]:
        """Local shards of DTensors."""
        return [p for p in self.params if isinstance(p, LocalShard)]

    @cached_property
    def slot_of(self) -> dict[int, int]:
        """Slot of each exchanged parameter."""
        return {i: slot for slot, i in enumerate(self.slots)}

    @cached_property
    def known(self) -> list[int]:
        """All parameters that take part, in ascending order."""
        return sorted((*self.slots, *self.dense))

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of all gradients in their own dtypes: what a dense all-reduce moves once."""
        return sum(self.params[i].numel() * self.params[i].element_size() for i in self.known)

    def by_group(self, indices: Sequence[int]) -> ItemsView[int, list[int]]:
        """Parameters by their groups."""
        members: dict[int, list[int]] = {}
        for i in indices:
            members.setdefault(self.group_of[i], []).append(i)
        return members.items()

    @cached_property
    def _forms(self) -> list[tuple[int, Form]]:
        known = ((i, self.params[i]) for i in self.known)
        return [(i, (p.dtype, p.shape, p.stride())) for i, p in known]

    def refuse_changes(self, groups: Sequence[Mapping[str, Any]], name: str, name_of: Callable[[int], str]) -> None:
        """Raises where the program has edited groups or parameters by hand: what it put there would silently not be trained.

        Raises:
            RuntimeError: other parameters, or another dtype, shape or memory order of one.
        """
        listed = [p for group in groups for p in group["params"]]
        if len(listed) != len(self.params) or any(map(is_not, listed, self.sources)):
            raise RuntimeError(
                f"the parameters in {name}.param_groups are not those of the last step ({len(listed)} now, "
                f"{len(self.params)} then); add parameters with add_param_group(), and make a new optimizer to remove or replace some"
            )
        for index, (group, compressed) in enumerate(zip(groups, self.compressed_groups, strict=False)):
            if group["compress"] is not compressed:
                raise RuntimeError(
                    f"compress={group['compress']!r} has been set in group {index} of {name}.param_groups, which is laid out "
                    f"for compress={compressed}; set it back, and say it before the first step or to a new optimizer"
                )
        for shard in self.sharded:
            if not shard.follow():
                raise RuntimeError(
                    f"{name_of([id(p) for p in self.params].index(id(shard)))} has got a local shard of another shape, "
                    "dtype or device since the last step (module.to()); change the model before the first step, or make a new optimizer, "
                    "which can load_state_dict() the state"
                )
        for i, form in self._forms:
            p = self.params[i]
            if (now := (p.dtype, p.shape, p.stride())) != form and _places(now) != _places(form):
                dtype, shape, strides = form
                raise RuntimeError(
                    f"{name_of(i)} was {dtype} of shape {tuple(shape)} with strides {strides}, for which its state is laid out, and "
                    f"is {p.dtype} of shape {tuple(p.shape)} with strides {p.stride()} now; change the model before the first step, or "
                    "make a new optimizer, which can load_state_dict() the state"
                )

    def refuse_sparse(self, name: str, name_of: Callable[[int], str]) -> None:
        """Raises ``TypeError`` where a gradient is sparse."""
        params, strided = self.params, torch.strided
        sparse = [i for i in self.known if (grad := params[i].grad) is not None and grad.layout is not strided]
        if sparse:
            raise TypeError(
                f"{name_of(sparse[0])} has a sparse gradient; {name} trains dense gradients only (build the layer with sparse=False)"
            )

    def describe(self, groups: Sequence[Mapping[str, Any]], name_of: Callable[[int], str]) -> Iterator[str]:
        """Groups and parameters in words, one fact per line: what all ranks must agree on."""
        yield from describe_groups(groups)
        for i in self.known:
            p = self.params[i]
            yield f"{name_of(i)}: shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}, group {self.group_of[i]}"

    def describe_whole(self, name_of: Callable[[int], str]) -> Iterator[str]:
        """What ranks agree on that hold different shards, one fact per line."""
        for i in self.known:
            yield f"{name_of(i)}: {describe_placement(self.sources[i])}, {self.params[i].dtype}, group {self.group_of[i]}"

    def describe_weights(self, name_of: Callable[[int], str]) -> list[str]:
        """What ranks that begin with equal weights agree on: DDP would broadcast rank 0's."""
        sums = bit_sums([self.params[i] for i in self.known])
        return [
            f"{name_of(i)}: its bits add up to {total} (seed the ranks alike, or broadcast rank 0's weights)"
            for i, total in zip(self.known, sums, strict=True)
        ]

    # ----- where things lie --------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order of their collectives."""
        return self.plan.buckets

    def part(self, flat: Tensor, index: int) -> Tensor:
        """A parameter's 1-D part, in memory order, of a flat over all blocks."""
        start = self.plan.starts[self.slot_of[index]]
        return flat[start : start + self.params[index].numel()]

    def view(self, flat: Tensor, index: int) -> Tensor:
        """A parameter's part of a flat over all blocks, with its shape and strides."""
        return self.plan.view(flat, self.slot_of[index], self.params[index])

    def shard(self, bucket: Bucket) -> tuple[int, int]:
        """First and last (exclusive) block of a bucket that this rank compresses; all of them in the flat exchange."""
        count = bucket.blocks // self.ranks.ranks_per_node
        return self.ranks.local_rank * count, (self.ranks.local_rank + 1) * count

    def chunk(self, bucket: Bucket) -> tuple[int, int]:
        """First and last (exclusive) block of a bucket that this rank reduces as a server."""
        ranks, count = self.ranks, bucket.blocks // self.ranks.size
        chunk = ranks.local_rank * ranks.nodes + ranks.node
        return chunk * count, (chunk + 1) * count

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """Lengths of runs of blocks (of a slot each, or padding), and where the runs of all slots are among them."""
        # blocks of a segment lie in reverse order of its slots, and padding blocks come last
        counts: list[int] = []
        places: list[int] = []
        for size in self.segments:
            slots = self.slots[len(places) : len(places) + size]
            places += reversed(range(len(counts), len(counts) + size))
            blocks = [-(-self.params[i].numel() // self.plan.block_size) for i in reversed(slots)]
            counts += [*blocks, -sum(blocks) % self.ranks.size]
        return upload(counts, self.device), upload(places, self.device)

    def per_slot(self, rows: Tensor, reduction: str) -> Tensor:
        """Reduces what blocks have (``(blocks, k)``) to what slots have (``(slots, k)``), blocks taken in order (deterministic)."""
        lengths, where = self._runs
        return torch.segment_reduce(rows, reduction, lengths=lengths, initial=0.0, unsafe=True)[where]


def _apart(slots: list[int], segments: Sequence[int], params: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Slots of each segment by the way in which they are sharded, and the segments of that."""
    parts: list[list[int]] = []
    for segment in _cut(slots, segments):
        ways: dict[tuple[Any, ...], list[int]] = {}
        for i in segment:
            ways.setdefault(placed(params[i]), []).append(i)
        parts += [part for _, part in sorted(ways.items())] or [[]]
    return [i for part in parts for i in part], [len(part) for part in parts]


def _cut(slots: Sequence[int], segments: Sequence[int]) -> Iterator[Sequence[int]]:
    first = 0
    for count in segments:
        yield slots[first : first + count]
        first += count


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Groups in words, one fact per line."""
    for g, group in enumerate(groups):
        facts = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "param_names"))
        yield f"group {g}: {len(group['params'])} parameters, {facts}"


def _without_groups(ranks: Topology) -> Topology:
    return replace(ranks, group=None, intra_group=None, inter_group=None)


def _places(form: Form) -> tuple[Any, ...]:
    """What decides where a tensor's elements lie: the stride of a dimension of size 1 does not."""
    dtype, shape, strides = form
    return dtype, shape, [stride for stride, size in zip(strides, shape, strict=True) if size != 1]


def check_parameters(params: Sequence[Tensor], device: torch.device, kind: str) -> None:
    """Refuses what cannot be trained; a frozen parameter is asked when it becomes trainable.

    Args:
        params: parameters that join.
        device: of those there are.
        kind: name of the optimizer, for messages.

    Raises:
        RuntimeError: a DTensor, and torch is too old.
        TypeError: complex, sparse or non-floating parameters, tensor subclasses, or a DTensor with a ``Partial`` placement.
        ValueError: parameters on several devices, or with gaps in memory.
    """
    for p in params:
        shape = tuple(p.shape)
        if p.device != device:
            raise ValueError(f"parameters on {device} and {p.device}; give each device its own optimizer")
        if not p.requires_grad:
            continue
        if is_dtensor(p):
            check_dtensor(p, kind)
            p = local_of(p)
        elif is_traceable_wrapper_subclass(p):
            raise TypeError(f"a parameter of shape {shape} is a {type(p).__name__}; {kind} trains plain tensors only")
        if p.is_sparse or p.layout is not torch.strided:
            raise TypeError(f"a parameter of shape {shape} is sparse; {kind} trains dense tensors only")
        if p.dtype not in TRAINABLE_DTYPES:
            raise TypeError(
                f"a parameter of shape {shape} has dtype {p.dtype}; {kind} trains float32, bfloat16 "
                "and float16 (complex and float64 parameters belong to another optimizer)"
            )
        if not is_dense(p):
            raise ValueError(
                f"a parameter of shape {shape} has strides {p.stride()} with gaps or overlaps; make it contiguous"
            )
