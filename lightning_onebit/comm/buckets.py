"""Blocks, spans and buckets: how parameters are cut for the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_onebit.kernels.common import is_dense


def memory_order(tensor: Tensor) -> Tensor:
    """A 1-D view of a dense tensor in the order of its memory (raises ``ValueError`` when it is not dense)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps in memory"
        )
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class Span:
    """Elements ``[start, start + numel)`` of parameter ``param`` (memory order) fill a bucket's blocks from ``block`` on."""

    param: int
    start: int
    numel: int
    block: int

    def blocks(self, block_size: int) -> int:
        """Number of blocks filled, the last one perhaps in part."""
        return -(-self.numel // block_size)


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of blocks that travels in one pair of collectives.

    Attributes:
        index: position in the plan; collectives are issued in this order on every rank.
        block_size: elements per block.
        first_block: position of the bucket's first block among all blocks of the plan.
        blocks: number of blocks, empty padding blocks included; a multiple of the world size.
        spans: runs of parameter elements in block order.
        device: where ``lengths`` and ``block_param`` live.
    """

    index: int
    block_size: int
    first_block: int
    blocks: int
    spans: tuple[Span, ...]
    device: torch.device

    @property
    def elements(self) -> int:
        """Elements of a flat tensor of this bucket, padding included."""
        return self.blocks * self.block_size

    @cached_property
    def lengths(self) -> Tensor:
        """int32 ``(blocks,)``: valid length of each block, 0 for an empty padding block."""
        lengths = torch.zeros(self.blocks, dtype=torch.int32)
        for span in self.spans:
            count = span.blocks(self.block_size)
            lengths[span.block : span.block + count] = self.block_size
            lengths[span.block + count - 1] = span.numel - (count - 1) * self.block_size
        return lengths.to(self.device)

    @cached_property
    def block_param(self) -> Tensor:
        """int64 ``(blocks,)``: parameter that owns each block (0 for padding blocks, whose values never matter)."""
        owner = torch.zeros(self.blocks, dtype=torch.int64)
        for span in self.spans:
            owner[span.block : span.block + span.blocks(self.block_size)] = span.param
        return owner.to(self.device)

    @cached_property
    def params(self) -> frozenset[int]:
        """Parameters with elements in this bucket."""
        return frozenset(span.param for span in self.spans)

    def slice(self, flat: Tensor) -> Tensor:
        """This bucket's part of a flat tensor over all blocks of the plan."""
        start = self.first_block * self.block_size
        return flat[start : start + self.elements]

    def bind(self, tensor_of: Callable[[int], Tensor | None]) -> list[Tensor | None]:
        """Views of per-parameter tensors, one per span.

        Args:
            tensor_of: gives a parameter's tensor, 1-D in memory order (``memory_order``), or None; asked once per span.
        """
        views: list[Tensor | None] = []
        for span in self.spans:
            tensor = tensor_of(span.param)
            if tensor is not None and tensor.numel() != span.numel:
                tensor = tensor[span.start : span.start + span.numel]
            views.append(tensor)
        return views


@dataclass(frozen=True)
class Plan:
    """All buckets of one optimizer.

    Attributes:
        buckets: in the order of their collectives: reverse parameter order, which is about the order gradients arrive
            in.
        block_size: elements per block.
        blocks: blocks of all buckets.
        starts: first element, in a flat tensor over all blocks, of each parameter (0 for one without elements).
    """

    buckets: tuple[Bucket, ...]
    block_size: int
    blocks: int
    starts: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Length of a flat tensor over all blocks."""
        return self.blocks * self.block_size

    @cached_property
    def block_param(self) -> Tensor:
        """int64 ``(blocks,)``: parameter that owns each block (0 for padding blocks)."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(bucket.block_param for bucket in self.buckets)])

    def view(self, flat: Tensor, param: int, like: Tensor) -> Tensor:
        """Parameter ``param``'s part of a flat tensor, with the shape and strides of ``like``."""
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + self.starts[param])

    def spans_of(self, param: int) -> Iterator[tuple[Bucket, Span]]:
        """Every span of a parameter with its bucket."""
        for bucket in self.buckets:
            if param in bucket.params:
                for span in bucket.spans:
                    if span.param == param:
                        yield bucket, span


def plan_buckets(
    numels: Sequence[int], *, block_size: int, world_size: int, bucket_elements: int, device: torch.device
) -> Plan:
    """Cuts parameters into blocks and deals the blocks to buckets.

    Every bucket but the last is full, and full means a multiple of ``world_size`` blocks, so that padding blocks occur
    only at the very end and a parameter's blocks are contiguous over bucket borders. Padding is at most ``world_size -
    1`` blocks.

    Args:
        numels: elements of each parameter; 0 is legal and owns no block.
        block_size: elements per block, a multiple of 32.
        world_size: number of ranks that share a bucket's blocks.
        bucket_elements: about how many elements a bucket holds (at least one block per rank).
        device: device of the buckets' tables.
    """
    capacity = max(1, bucket_elements // (block_size * world_size)) * world_size
    buckets: list[Bucket] = []
    spans: list[Span] = []
    used = first_block = 0
    starts = [0] * len(numels)

    def close() -> None:
        nonlocal spans, used, first_block
        blocks = -(-used // world_size) * world_size
        buckets.append(Bucket(len(buckets), block_size, first_block, blocks, tuple(spans), device))
        first_block += blocks
        spans, used = [], 0

    for param in reversed(range(len(numels))):
        start = 0
        while start < numels[param]:
            if used == capacity:
                close()
            if start == 0:
                starts[param] = (first_block + used) * block_size
            numel = min(numels[param] - start, (capacity - used) * block_size)
            spans.append(Span(param, start, numel, used))
            used += spans[-1].blocks(block_size)
            start += numel
    if spans:
        close()
    return Plan(tuple(buckets), block_size, first_block, tuple(starts))


def extended_plan(plan: Plan, more: Plan) -> Plan:
    """``plan`` with the buckets of ``more`` behind its own, for the parameters after its own: nothing that lies in it moves."""
    known, first = len(plan.starts), len(plan.buckets)
    buckets = [
        replace(
            bucket,
            index=first + bucket.index,
            first_block=plan.blocks + bucket.first_block,
            spans=tuple(replace(span, param=known + span.param) for span in bucket.spans),
        )
        for bucket in more.buckets
    ]
    starts = [plan.elements + start for start in more.starts]
    return Plan((*plan.buckets, *buckets), plan.block_size, plan.blocks + more.blocks, (*plan.starts, *starts))
