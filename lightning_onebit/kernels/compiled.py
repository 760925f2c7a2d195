"""What the compiled backends share: an operation's arguments are checked and flattened here, once, in the order in which kernels take them.

A function of ``onebit_cpu.cpp`` and the kernel of ``onebit.cu`` of the same name have the same parameters behind the block size and the
number of blocks. A tensor is handed over as its address (0: None), state as its address and the code of its dtype, a payload as its
address, the bytes from row to row and the blocks of a row, and spans as a table that the backend makes.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_onebit.kernels import BoundSpans
from lightning_onebit.kernels.common import check_rows, increment_versions, is_dense
from lightning_onebit.kernels.counter_rng import DrawKey
from lightning_onebit.kernels.packed import BITS_PER_WORD, Packed
from lightning_onebit.kernels.reference import ReferenceKernels, Spans
from lightning_onebit.kernels.residual import Residual

if TYPE_CHECKING:
    from lightning_onebit.kernels import BlockMap

Argument = Any  # an address or an integer (int), or np.float32

FP32 = {torch.float32: 0}
DTYPES = {**FP32, torch.bfloat16: 1, torch.float16: 2}  # those that kernels read, and their codes

# arguments kept with what a kernel writes into: residuals and momenta alternate between two places each
_PLANS_KEPT = 16
_MAX_ROWS = 65535  # counts of votes have 16 bits
_NO_MOMENTUM = (0, 0, 0, 1)


class Layout:
    """What kernels know of a bucket, whatever tensors it is called with; ``lengths``: address of those of its blocks."""

    def __init__(self, bucket: BlockMap, kernels: CompiledKernels) -> None:
        self.lengths = kernels._lengths(bucket)
        self.numels = [span.numel for span in bucket.spans]
        self.first_blocks = array("q", [span.block for span in bucket.spans])
        self.count = len(self.numels)
        self.device_type, self.is_here = kernels._device_type, kernels._is_here


class Bound:
    """The tensors of a bucket's spans as kernels see them.

    What a kernel cannot read in place (another dtype, gaps in memory) is read, and written back, through an fp32 copy. The object must
    outlive the call, for it holds the copies.

    Attributes:
        layout: of their bucket.
        addresses: one for each span (0: no tensor).
        codes: of their dtypes.
        copies: tensors that kernels cannot read, each with its copy.
        arguments: what kernels are given; the backend fills it in.
        table: what lies there.

    Raises:
        ValueError: the tensors are not those of the spans, or lie on another device.
    """

    arguments: tuple[Argument, ...] = ()
    table: Any = None

    def __init__(self, layout: Layout, spans: Spans, name: str, dtypes: dict[torch.dtype, int]) -> None:
        if len(spans) != layout.count:
            raise ValueError(f"{name} must have one entry per span, {layout.count}, got {len(spans)}")
        self.layout = layout
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._written: list[Tensor] | None = None  # those that autograd counts
        # one fact of all tensors after the other, in comprehensions: gradients' tables are made at every step
        is_here, numels = layout.is_here, layout.numels
        there = [tensor for tensor in spans if tensor is not None]
        if len(there) < len(spans):
            numels = [numel for tensor, numel in zip(spans, numels, strict=True) if tensor is not None]
        if [tensor.numel() for tensor in there] != numels or not all([is_here(tensor) for tensor in there]):
            tensor, numel = next((t, n) for t, n in zip(there, numels, strict=True) if t.numel() != n or not is_here(t))
            raise ValueError(
                f"{name}: a span of {numel} elements on {layout.device_type} got shape {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
        if not all([tensor.dtype in dtypes and tensor.is_contiguous() for tensor in there]):
            spans = [t if t is None or (t.dtype in dtypes and t.is_contiguous()) else self._copy(t) for t in spans]
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in spans]
        self.codes = [0 if tensor is None else dtypes[tensor.dtype] for tensor in spans]

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        self.copies.append((tensor, copy))
        return copy

    def written(self, spans: Spans) -> None:
        """Makes what a kernel wrote visible: to the tensors that were copied, and to autograd's check of in-place changes.

        Args:
            spans: the tensors that were bound.
        """
        for tensor, copy in self.copies:
            with torch.no_grad():
                tensor.copy_(copy)
        if self._written is None:
            self._written = [tensor for tensor in spans if tensor is not None and not tensor.is_inference()]
        increment_versions(self._written)


class CompiledKernels(ReferenceKernels):
    """Kernels that are called with addresses; the semantics, argument by argument, are those of ``ReferenceKernels``.

    A subclass says how a kernel is called (``_call``), where its tables lie and what else is its own.

    Args:
        device_type: of all tensors.
    """

    _no_spans: tuple[Argument, ...]  # in the place of a table
    _fp32: Callable[[float], Argument]  # a number as an argument

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._is_here = attrgetter(f"is_{device_type}")
        self._layouts: dict[Hashable, tuple[weakref.ref[BlockMap], Any]] = {}

    # ----- what a backend says ----------------------------------------------------------------------------------------

    def _call(
        self, name: str, near: Tensor, block_size: int, blocks: int, arguments: Sequence[Argument], sums: int = 0
    ) -> None:
        """Calls a kernel.

        Args:
            name: of the operation, or what ``_kernel`` has made of it.
            near: a tensor on the device.
            block_size: elements of a block.
            blocks: number of blocks.
            arguments: of the kernel, after these two.
            sums: how many sums it keeps for each lane.
        """
        raise NotImplementedError

    def _kernel(
        self,
        name: str,
        block_size: int,
        residual: Tensor | Residual,
        into: Tensor | Residual | None = None,
        m: Tensor | Packed | None = None,
        r: Tensor | None = None,
    ) -> str:
        """The kernel that compresses such operands."""
        return name

    def _residuals(
        self, old: Tensor | Residual, new: Tensor | Residual | None, name: str, blocks: int, block_size: int
    ) -> tuple[Argument, ...]:
        """A residual that is read, and the one that is written (None: the same), as arguments."""
        raise NotImplementedError

    def _place(self, near: Tensor) -> Hashable:
        """What a layout belongs to besides its bucket."""
        return None

    def _new_layout(self, bucket: BlockMap, near: Tensor) -> Layout:
        return Layout(bucket, self)

    def _tabulated(self, bound: Bound, near: Tensor) -> Bound:
        """Fills in ``arguments`` and ``table`` of what has been bound."""
        raise NotImplementedError

    def _statistics(self, tensors: list[Tensor]) -> Tensor:
        """``grad_stats`` of dense tensors whose dtypes kernels read."""
        raise NotImplementedError

    def _reproduces_the_reference(self, device: torch.device, denormals: bool) -> bool:
        """Compares with the reference once, because a compiler with other ideas of arithmetic would go unnoticed.

        Args:
            device: where to compute.
            denormals: of one block.
        """
        size, generator = 2048, torch.Generator().manual_seed(1)
        data = torch.randn(5, 3 * size, dtype=torch.float32, generator=generator)
        pending, lengths = data[0, :3].abs(), torch.tensor([size, size - 37, 100], dtype=torch.int32)
        if denormals:
            data[:4, 2 * size :] *= 1e-41
            pending[2] = 0.0
        data[:4].view(4, 3, size)[:, torch.arange(size) >= lengths[:, None]] = 0.0
        results = []
        for kernels, on in ((ReferenceKernels(), torch.device("cpu")), (self, device)):
            bucket: Any = SimpleNamespace(block_size=size, blocks=3, lengths=lengths.to(on))
            subtract = kernels.residual(1, size, torch.float32, on).subtract
            flats = [row.to(on, copy=True) for row in data]
            e, d = (Residual(flat, pending.to(on, copy=True), subtract) for flat in flats[:2])
            m, g, r = flats[2], flats[3], flats[4].abs()
            sent, reply = Packed.empty(1, 3, size, device=on), Packed.empty(1, 3, size, device=on)
            kernels.compress(bucket, 0, 3, a=r[:3].clone(), m=m, b=r[:3].clone(), g=g, e=e, out=sent, r=r)
            kernels.reduce(sent, bucket.lengths, d, reply, 1 / 3)
            results.append([t.cpu().view(torch.uint8) for t in (e.tensor(), d.tensor(), sent.raw, reply.raw)])
        return all(a.equal(b) for a, b in zip(*results, strict=True))

    # ----- arguments --------------------------------------------------------------------------------------------------

    def _address(self, tensor: Tensor, name: str, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Address of a tensor that a kernel reads or writes as it lies in memory."""
        if (
            tensor.dtype is not dtype
            or tensor.numel() != numel
            or not tensor.is_contiguous()
            or not self._is_here(tensor)
        ):
            raise ValueError(
                f"{name} must be {numel} contiguous elements of {dtype} on {self._device_type}, got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
            )
        return tensor.data_ptr()

    def _lengths(self, bucket: BlockMap, lo: int = 0) -> int:
        return self._address(bucket.lengths, "bucket.lengths", bucket.blocks, torch.int32) + 4 * lo

    def _state(self, tensor: Tensor | None, name: str, numel: int) -> tuple[int, int]:
        """Address and code of residuals or reciprocal denominators: fp32 or, in half the memory, bf16."""
        if tensor is None:
            return 0, 0
        dtype = torch.bfloat16 if tensor.dtype is torch.bfloat16 else torch.float32
        return self._address(tensor, name, numel, dtype), DTYPES[dtype]

    def _payload(
        self, packed: Packed, name: str, blocks: int, block_size: int, scales: bool = True
    ) -> tuple[int, int, int]:
        """Address, bytes from row to row, and blocks of a row."""
        # few attribute look-ups: between two buckets Python runs with cold caches, which makes each several times as dear
        raw, per_row = packed.raw, packed.blocks_per_row
        if raw.shape[0] * per_row != blocks or packed.block_size != block_size or packed.has_scales is not scales:
            raise ValueError(
                f"{name} must hold {blocks} blocks of {block_size} elements {'with' if scales else 'without'} scales, got "
                f"{packed.blocks} of {packed.block_size}, has_scales={packed.has_scales}"
            )
        address, (stride, step) = raw.data_ptr(), raw.stride()
        if not self._is_here(raw) or step != 1 or address % 4 or stride % 4:
            raise ValueError(
                f"{name}.raw must be rows of contiguous bytes on {self._device_type} that begin at multiples of 4 bytes"
            )
        return address, stride, per_row

    def _momentum(self, m: Tensor | Packed, name: str, blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """Of a momentum the address if it is flat, and the payload if it is packed."""
        if isinstance(m, Packed):
            return 0, *self._payload(m, name, blocks, block_size)
        return self._address(m, name, blocks * block_size), *_NO_MOMENTUM[1:]

    def _gradient(
        self, g: Tensor | Spans, bucket: BlockMap, lo: int, hi: int, near: Tensor
    ) -> tuple[tuple[Argument, ...], Bound | None]:
        """Of a gradient the address if it is flat, and the table if it is spans."""
        if isinstance(g, Tensor):
            return (self._address(g, "g", (hi - lo) * bucket.block_size), *self._no_spans), None
        if hi - lo != bucket.blocks:
            raise ValueError(f"g as spans needs the whole bucket, got blocks {lo} to {hi} of {bucket.blocks}")
        bound = self._bind(bucket, g, "g", near)
        return (0, *bound.arguments), bound

    def _layout(self, bucket: BlockMap, near: Tensor) -> Any:
        # by identity: hashing a bucket would hash all its spans at every call
        key = (id(bucket), self._place(near))
        known = self._layouts.get(key)
        if known is not None and known[0]() is bucket:
            return known[1]
        layout = self._new_layout(bucket, near)
        self._layouts[key] = (weakref.ref(bucket, lambda _: self._layouts.pop(key, None)), layout)
        return layout

    def _bind(
        self, bucket: BlockMap, spans: Spans, name: str, near: Tensor, dtypes: dict[torch.dtype, int] = DTYPES
    ) -> Bound:
        """The table of some spans; the one of an earlier call where they are the same."""
        layout = self._layout(bucket, near)
        if not isinstance(spans, BoundSpans):
            return self._tabulated(Bound(layout, spans, name, dtypes), near)
        key = f"{self.name} {name} {len(dtypes)}"
        known: Bound | None = spans.tables.get(key)
        if known is None or known.layout is not layout:
            known = self._tabulated(Bound(layout, spans, name, dtypes), near)
            # a copy holds what the tensor held (gradients are bound for one step, in which nobody writes to them)
            if not known.copies or name == "g":
                spans.tables[key] = known
        return known

    def _update(self, name: str, bucket: BlockMap, spans: Spans, near: Tensor, *arguments: Argument) -> None:
        """Calls a kernel that updates fp32 weights."""
        bound = self._bind(bucket, spans, "spans", near, FP32)
        where = (bound.layout.lengths, *bound.arguments)
        self._call(name, near, bucket.block_size, bucket.blocks, (*where, *arguments))
        bound.written(spans)

    # ----- operations -------------------------------------------------------------------------------------------------

    def gather(self, bucket: BlockMap, spans: Spans, out: Tensor) -> None:
        """Spans to flat fp32 with zero padding."""
        target = self._address(out, "out", bucket.elements)
        bound = self._bind(bucket, spans, "spans", out)
        arguments = (bound.layout.lengths, *bound.arguments, target)
        self._call("gather", out, bucket.block_size, bucket.blocks, arguments)

    def grad_stats(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of squares, in fp64, and the number of tensors with a non-finite value, on the tensors' device."""
        known = [tensor for tensor in tensors if tensor.dtype in DTYPES]
        if known:
            result = self._statistics(dense(known))
        else:
            result = torch.zeros(2, dtype=torch.float64, device=tensors[0].device if tensors else "cpu")
        if len(known) < len(tensors):
            for tensor in tensors:
                if tensor.dtype not in DTYPES:  # fp64; no decision on values, hence no waiting for the device
                    squares = tensor.detach().double().square().sum()
                    result += torch.stack([squares, (~torch.isfinite(tensor)).any().double()])
        return result

    def compress(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        a: Tensor | None,
        m: Tensor | Packed | None,
        b: Tensor | None,
        g: Tensor | Spans | None,
        e: Tensor | Residual,
        out: Packed,
        r: Tensor | None = None,
        into: Tensor | Residual | None = None,
    ) -> None:
        """``y = ((a*m) + ((b*g)*r)) + e`` on blocks ``[lo, hi)``, then bits, scale and residual, in one pass over memory."""
        operands = (self, bucket, a, m, b, g is None, e, r, into)
        plan = None if isinstance(g, Tensor) else known_plan(out.plans, operands, (lo, hi))
        size, blocks = bucket.block_size, hi - lo
        if plan is None:
            near = out.raw
            moment: tuple[Argument, ...] = (0, *_NO_MOMENTUM)
            if m is not None:
                if a is None:
                    raise ValueError("a must be given with m")
                moment = (self._address(a, "a", blocks), *self._momentum(m, "m", blocks, size))
            if g is not None and b is None:
                raise ValueError("b must be given with g")
            if g is None and r is not None:
                raise ValueError("r must be None with g=None")
            factor = 0 if b is None or g is None else self._address(b, "b", blocks)
            flat = self._gradient(g, bucket, lo, hi, near)[0] if isinstance(g, Tensor) else (0, *self._no_spans)
            state = (*self._state(r, "r", blocks * size), *self._residuals(e, into, "e", blocks, size))
            before = (self._lengths(bucket, lo), *moment, factor)
            after = (*state, *self._payload(out, "out", blocks, size))
            plan = self._kernel("compress", size, e, into, m, r), before, flat, after
            if not (isinstance(m, Tensor) or isinstance(g, Tensor)):  # which are other ones in the next step
                keep_plan(out.plans, operands, (lo, hi), plan)
        name, before, gradient, after = plan
        if not (g is None or isinstance(g, Tensor)):
            gradient, _bound = self._gradient(g, bucket, lo, hi, out.raw)
        self._call(name, out.raw, size, blocks, (*before, *gradient, *after), sums=1)

    def reduce(
        self,
        received: Packed,
        lengths: Tensor,
        d: Tensor | Residual,
        out: Packed,
        inv_n: float,
        into: Tensor | Residual | None = None,
    ) -> None:
        """``z = (C_0 + C_1 + ...) * inv_n + d`` over the rows, then bits, scale and residual."""
        operands = (self, received, lengths, d, into)
        plan = known_plan(out.plans, operands, (inv_n,))
        size, blocks = received.block_size, received.blocks_per_row
        if plan is None:
            check_rows(received)
            rows = received.rows
            if out.rows != 1:
                raise ValueError(f"out must be one row, got {out.rows}")
            raw = self._payload(received, "received", rows * blocks, size)
            target = self._payload(out, "out", blocks, size)
            residual = self._residuals(d, into, "d", blocks, size)
            where = self._address(lengths, "lengths", blocks, torch.int32)
            arguments = (rows, *raw[:2], where, *residual, *target[:2], self._fp32(inv_n))
            plan = self._kernel("reduce", size, d), arguments
            keep_plan(out.plans, operands, (inv_n,), plan)
        self._call(plan[0], out.raw, size, blocks, plan[1], sums=1)

    def unpack(self, packed: Packed, lengths: Tensor, out: Tensor) -> None:
        """Bits and scales to flat fp32, 0 on padding."""
        size, blocks = packed.block_size, packed.blocks
        where = (self._address(lengths, "lengths", blocks, torch.int32), self._address(out, "out", blocks * size))
        self._call("unpack", out, size, blocks, (*self._payload(packed, "packed", blocks, size), *where))

    def apply_adam(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor | None, decay: Tensor, alpha: Tensor
    ) -> None:
        """``x = x*decay - (+-(alpha*s) * r)``, r None: without it."""
        operands = (self, bucket, packed, r, decay, alpha)
        plan = known_plan(spans.tables, operands, ()) if isinstance(spans, BoundSpans) else None
        if plan is None:
            size, blocks = bucket.block_size, bucket.blocks
            payload, state = self._payload(packed, "packed", blocks, size), self._state(r, "r", bucket.elements)
            plan = (*payload, *state, self._address(decay, "decay", blocks), self._address(alpha, "alpha", blocks))
            if isinstance(spans, BoundSpans):
                keep_plan(spans.tables, operands, (), plan)
        self._update("apply_adam", bucket, spans, decay, *plan)

    def lamb_update(
        self,
        bucket: BlockMap,
        spans: Spans,
        new: Packed,
        old: Tensor | Packed,
        r: Tensor,
        fresh: Tensor,
        factors: Tensor,
    ) -> Tensor:
        """Fresh second moments, and of every block the squared norms of ``up`` and ``u`` and the largest ratio."""
        size, blocks, elements = bucket.block_size, bucket.blocks, bucket.elements
        bound = self._bind(bucket, spans, "spans", r, FP32)
        result = torch.empty((blocks, 3), dtype=torch.float32, device=r.device)
        arguments = (
            *(bound.layout.lengths, *bound.arguments, *self._payload(new, "new", blocks, size)),
            *(*self._momentum(old, "old", blocks, size), *self._state(r, "r", elements)),
            self._address(fresh, "fresh", elements),
            *(self._address(factors, "factors", 8 * blocks), result.data_ptr()),
        )
        self._call("lamb_update", r, size, blocks, arguments, sums=3)
        return result

    def lamb_apply(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor, alpha: Tensor, wd: Tensor, step: Tensor
    ) -> None:
        """``x = x - step*u`` with ``u = (alpha*m)*r + wd*x``."""
        size, blocks = bucket.block_size, bucket.blocks
        payload, state = self._payload(packed, "packed", blocks, size), self._state(r, "r", bucket.elements)
        factors = [self._address(t, n, blocks) for t, n in ((alpha, "alpha"), (wd, "wd"), (step, "step"))]
        self._update("lamb_apply", bucket, spans, r, *payload, *state, *factors)

    def local_step(
        self, bucket: BlockMap, spans: Spans, g: Spans, m: Tensor, u: Tensor, r: Tensor, anchor: Tensor, factors: Tensor
    ) -> None:
        """``m = b1*m + o1*g ; p = lr*m ; u = u + p ; x = x*decay - clamp(p*r) ; anchor = anchor*decay``, one pass over memory."""
        elements = bucket.elements
        gradients = self._bind(bucket, g, "g", m)
        arguments = (
            *(gradients.arguments[-1], self._address(m, "m", elements), self._address(u, "u", elements)),
            *(*self._state(r, "r", elements), self._address(anchor, "anchor", elements)),
            self._address(factors, "factors", 5 * bucket.blocks),
        )
        self._update("local_step", bucket, spans, m, *arguments)

    def sample(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        factors: Tensor,
        g: Tensor | Spans,
        m: Tensor,
        a: Tensor,
        key: DrawKey,
        first_block: int,
        out: Packed,
    ) -> None:
        """``m = b1*m + o1*g ; a = b2*a + o2*|g|``, then drawn signs of ``m / a``; what they leave out stays in m."""
        size, blocks = bucket.block_size, hi - lo
        gradient, _bound = self._gradient(g, bucket, lo, hi, m)
        arguments = (
            *(self._lengths(bucket, lo), self._address(factors, "factors", 5 * blocks), *gradient),
            *(self._address(m, "m", blocks * size), self._address(a, "a", blocks * size)),
            *(*key, first_block, *self._payload(out, "out", blocks, size, scales=False)),
        )
        self._call("sample", m, size, blocks, arguments)

    def vote(
        self,
        received: Packed,
        lengths: Tensor,
        key: DrawKey,
        first_block: int,
        out: Tensor,
        carry: Tensor | None = None,
    ) -> None:
        """Combines the workers' signs of one chunk: drawn, or with what was left over."""
        check_rows(received)
        size, blocks, rows = received.block_size, received.blocks_per_row, received.rows
        if rows > _MAX_ROWS:
            raise ValueError(f"received has {rows} rows; votes of at most {_MAX_ROWS} ranks can be counted")
        arguments = (
            *(rows, *self._payload(received, "received", rows * blocks, size, scales=False)[:2]),
            *(self._address(lengths, "lengths", blocks, torch.int32), *key, first_block),
            *(self._address(out, "out", blocks * size // BITS_PER_WORD, torch.int32), self._fp32(1.0 / rows)),
            0 if carry is None else self._address(carry, "carry", blocks * size),
        )
        self._call("vote", out, size, blocks, arguments)

    def apply_votes(
        self, bucket: BlockMap, spans: Spans, words: Tensor, live: Tensor, decay: Tensor, lr: Tensor
    ) -> None:
        """``x = x*decay + lr*ubar`` on live coordinates, ``x = x*decay`` elsewhere."""
        blocks, count = bucket.blocks, bucket.elements // BITS_PER_WORD
        bits = (self._address(words, "words", count, torch.int32), self._address(live, "live", count, torch.int32))
        factors = (self._address(decay, "decay", blocks), self._address(lr, "lr", blocks))
        self._update("apply_votes", bucket, spans, words, *bits, *factors)


def known_plan(plans: dict[Any, Any], operands: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    """The arguments of an earlier call with the same operands, which have been checked then; None: there was none.

    Operands are the same if they are the same objects: engines keep those of a bucket from step to step.
    """
    known = plans.get((*map(id, operands), *numbers))
    return None if known is None else known[1]


def keep_plan(plans: dict[Any, Any], operands: tuple[Any, ...], numbers: tuple[Any, ...], plan: Any) -> None:
    """Keeps the arguments of a call, and its operands: while they live, nothing else has their ``id``."""
    if len(plans) >= _PLANS_KEPT:
        plans.clear()
    key = (*map(id, operands), *numbers)
    plans[key] = operands, plan


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that have gaps in memory."""
    # (the contiguous ones are asked in place: a call for each of many tensors at every step)
    return [t if t.is_contiguous() or is_dense(t) else t.detach().contiguous() for t in tensors]
