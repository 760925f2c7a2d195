"""One deterministic case per kernel and way of calling it; each returns every tensor that the kernel wrote.

A case takes the backend and ``put``, which places a host tensor where the backend can use it (on the CPU, on a GPU, against a
guard page), so the same cases compare the reference, the shim and a real device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, plan_buckets
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, draw_key

Put = Callable[[Tensor], Tensor]
Results = list[Tensor]

#: one below the vector layout (W = 1, 2, 3), the smallest with it (4), odd sizes of it, the default, more lanes than threads
BLOCK_SIZES = (32, 64, 96, 128, 384, 2048, 16384)
SIZES = ((1,), (7, 0, 33), (100, 4097, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class World:
    """A bucket, its random numbers, and where its tensors go."""

    kernels: Any
    put: Put
    bucket: Bucket
    rng: np.random.Generator
    row_blocks: int

    @property
    def blocks(self) -> int:
        return self.bucket.blocks

    @property
    def size(self) -> int:
        return self.bucket.block_size

    def values(self, count: int) -> np.ndarray:
        """Numbers of many sizes with denormals, both zeros and long runs of zeros among them."""
        rng = self.rng
        x = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)
        x = np.where(rng.random(count) < 0.1, rng.standard_normal(count) * 1e-41, x)
        x = np.where(rng.random(count) < 0.1, 0.0, x)
        x = np.where(rng.random(count) < 0.1, -0.0, x)
        return x.astype(np.float32)

    def host_flat(self, *, positive: bool = False) -> Tensor:
        """fp32 flat of the bucket with zero padding; every fifth block holds nothing but zeros."""
        flat = np.zeros((self.blocks, self.size), dtype=np.float32)
        for block, length in enumerate(self.bucket.lengths.tolist()):
            if block % 5 != 3:
                flat[block, :length] = self.values(length)
        return torch.from_numpy(np.abs(flat) if positive else flat).flatten()

    def flat(self, *, positive: bool = False) -> Tensor:
        return self.put(self.host_flat(positive=positive))

    def reciprocals(self, dtype: torch.dtype = torch.float32, *, positive: bool = True) -> Tensor:
        """A flat as reciprocal denominators are kept."""
        return self.put(self.host_flat(positive=positive).to(dtype))

    def residual(self, dtype: torch.dtype) -> Tensor:
        """A flat as residuals are kept; its third block is full of numbers that are denormal in bf16 as well."""
        flat = self.host_flat()
        tiny = flat.view(self.blocks, self.size)[2:3]
        tiny.copy_(tiny.clamp(-1, 1) * 1e-39)
        return self.put(flat.to(dtype))

    def factors(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return self.put(torch.from_numpy(self.rng.uniform(low, high, shape).astype(np.float32)))

    def per_param(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """fp32 ``(blocks,)``, one value per parameter."""
        values = self.rng.uniform(low, high, len(self.bucket.spans) + 8).astype(np.float32)
        return self.put(torch.from_numpy(values)[self.bucket.block_param])

    def spans(
        self, *, dtypes: Sequence[torch.dtype] = DTYPES, missing: int | None = 1, shift: int = 0
    ) -> list[Tensor | None]:
        """One tensor per span, of dtypes in turn; ``shift`` elements lie before each in memory."""
        tensors: list[Tensor | None] = []
        for index, span in enumerate(self.bucket.spans):
            values = torch.from_numpy(np.clip(self.values(shift + span.numel), -6e4, 6e4)).to(
                dtypes[index % len(dtypes)]
            )
            tensors.append(None if index == missing else self.put(values)[shift:])
        return tensors

    def odd_spans(self) -> list[Tensor | None]:
        """Spans that a kernel cannot read in place: fp64, or with gaps in memory."""
        tensors: list[Tensor | None] = []
        for index, span in enumerate(self.bucket.spans):
            values = torch.from_numpy(self.values(2 * span.numel))
            tensors.append(self.put(values)[::2] if index % 2 else self.put(values[: span.numel].double()))
        return tensors

    def payload(self, rows: int, blocks_per_row: int, *, fill: bool, scales: bool = True) -> Packed:
        """A payload of random bits (or of garbage, to be overwritten)."""
        host = Packed.empty(rows, blocks_per_row, self.size, has_scales=scales)
        host.raw.copy_(torch.from_numpy(self.rng.integers(0, 256, host.raw.shape, dtype=np.uint8)))
        if scales:
            drawn = np.abs(self.values(rows * blocks_per_row)).reshape(rows, blocks_per_row)
            host.scales.copy_(torch.from_numpy(drawn if fill else np.full_like(drawn, np.nan)))
        return Packed(self.put(host.raw), blocks_per_row, self.size, scales)

    def momentum(self) -> Packed:
        """Bits and scales of all blocks, in several rows."""
        return self.payload(self.blocks // self.row_blocks, self.row_blocks, fill=True)

    def output(self) -> Packed:
        return self.payload(self.blocks // self.row_blocks, self.row_blocks, fill=False)


def world(kernels: Any, put: Put, block_size: int, sizes: Sequence[int], seed: int = 0, ranks: int = 2) -> World:
    """A bucket of tensors of these sizes and empty blocks up to a multiple of ``ranks``."""
    host = plan_buckets(
        list(reversed(sizes)),
        block_size=block_size,
        world_size=ranks,
        bucket_elements=2**40,
        device=torch.device("cpu"),
    ).buckets[0]
    bucket = _Placed(host.index, block_size, host.first_block, host.blocks, host.spans, host.device)
    bucket.__dict__["lengths"] = put(host.lengths)
    rng = np.random.default_rng([seed, block_size, *sizes])
    return World(kernels, put, bucket, rng, host.blocks // ranks)


class _Placed(Bucket):
    """A bucket whose lengths were placed by the test."""


def _present(tensors: Sequence[Tensor | None]) -> Results:
    return [t for t in tensors if t is not None]


# ----- the cases ----------------------------------------------------------------------------------------------------------------


def compress(
    w: World, momentum: str, gradient: str, residual: torch.dtype = torch.float32, times: torch.dtype | None = None
) -> Results:
    e, out = w.residual(residual), w.output()
    m = {"none": None, "flat": w.flat(), "packed": w.momentum()}[momentum]
    g = {
        "none": lambda: None,
        "flat": w.flat,
        "spans": w.spans,
        "fp32": lambda: w.spans(dtypes=DTYPES[:1], missing=None),
        "bf16": lambda: w.spans(dtypes=DTYPES[1:2], missing=None),
        "shifted": lambda: w.spans(shift=1),
        "odd": w.odd_spans,
        "tiny": lambda: w.residual(torch.float32),
    }[gradient]()
    a, b = w.factors(w.blocks), w.factors(w.blocks)
    factors = {"a": None if m is None else a, "b": None if g is None else b}
    r = None if times is None else w.reciprocals(times, positive=False)
    kept, into = e.clone(), w.residual(residual)
    w.kernels.compress(w.bucket, 0, w.blocks, m=m, g=g, e=kept, out=out, r=r, into=into, **factors)
    apart = out.raw.clone()
    w.kernels.compress(w.bucket, 0, w.blocks, m=m, g=g, e=e, out=out, r=r, **factors)
    return [e, out.raw, kept, into, apart]


def compress_range(w: World, residual: torch.dtype = torch.float32, times: torch.dtype | None = None) -> Results:
    lo, hi = w.row_blocks, 2 * w.row_blocks
    part = slice(lo * w.size, hi * w.size)
    e, g, out = w.residual(residual)[part], w.flat()[part], w.payload(1, w.row_blocks, fill=False)
    m = w.momentum().narrow(1, 1)
    a, b = w.factors(w.blocks), w.factors(w.blocks)
    r = None if times is None else w.reciprocals(times, positive=False)[part]
    w.kernels.compress(w.bucket, lo, hi, a=a[lo:hi], m=m, b=b[lo:hi], g=g, e=e, out=out, r=r)
    return [e, out.raw]


def reduce(w: World, rows: int, residual: torch.dtype = torch.float32) -> Results:
    received, d, out = w.payload(rows, w.blocks, fill=True), w.residual(residual), w.payload(1, w.blocks, fill=False)
    kept, into = d.clone(), w.residual(residual)
    w.kernels.reduce(received, w.bucket.lengths, kept, out, 1.0 / rows, into)
    apart = out.raw.clone()
    w.kernels.reduce(received, w.bucket.lengths, d, out, 1.0 / rows)
    return [d, out.raw, kept, into, apart]


def unpack(w: World) -> Results:
    out = w.flat()
    w.kernels.unpack(w.momentum(), w.bucket.lengths, out)
    return [out]


def gather(w: World, shift: int) -> Results:
    outs = [w.put(torch.full((w.bucket.elements,), float("nan"))) for _ in range(2)]
    for out, missing in zip(outs, (1, None), strict=True):
        w.kernels.gather(w.bucket, w.spans(missing=missing, shift=shift), out)
    return outs


def gather_odd(w: World) -> Results:
    out = w.put(torch.full((w.bucket.elements,), float("nan")))
    w.kernels.gather(w.bucket, w.odd_spans(), out)
    return [out]


def apply_adam(w: World, shift: int, times: torch.dtype | None = torch.float32) -> Results:
    spans = w.spans(dtypes=DTYPES[:1], shift=shift)
    r, decay, alpha = w.reciprocals(times or torch.float32), w.per_param(0.9), w.per_param(0.0, 0.1)
    w.kernels.apply_adam(w.bucket, spans, w.momentum(), None if times is None else r, decay, alpha)
    return _present(spans)


def lamb_update(w: World, old: str, times: torch.dtype = torch.float32) -> Results:
    spans = w.spans(dtypes=DTYPES[:1])
    rows = ((0.8, 0.99), (5, 10), (0.9, 0.999), (0.001, 0.1), (1, 2), (1e-8, 1e-6), (0.5, 1), (0, 0.1))
    factors = torch.cat([w.factors(1, w.blocks, low=low, high=high) for low, high in rows])
    fresh = w.flat(positive=True)
    before = w.momentum() if old == "packed" else w.flat()
    norms = w.kernels.lamb_update(
        w.bucket, spans, w.momentum(), before, w.reciprocals(times), fresh, w.put(factors.cpu())
    )
    return [norms, fresh]


def lamb_apply(w: World, shift: int, times: torch.dtype = torch.float32) -> Results:
    spans = w.spans(dtypes=DTYPES[:1], shift=shift)
    w.kernels.lamb_apply(
        w.bucket, spans, w.momentum(), w.reciprocals(times), w.per_param(), w.per_param(0, 0.1), w.per_param(0, 0.01)
    )
    return _present(spans)


def local_step(w: World, gradient: str, times: torch.dtype = torch.float32) -> Results:
    spans = w.spans(dtypes=DTYPES[:1], missing=2)
    grads = w.odd_spans() if gradient == "odd" else w.spans(shift=int(gradient == "shifted"))
    m, u, r, anchor = w.flat(), w.flat(), w.reciprocals(times), w.flat()
    factors = w.put(torch.stack([w.per_param().cpu() for _ in range(5)]))
    w.kernels.local_step(w.bucket, spans, grads, m, u, r, anchor, factors)
    return [m, u, anchor, *_present(spans)]


def sample(w: World, gradient: str) -> Results:
    m, a = w.host_flat(), w.host_flat(positive=True)
    a[::11] = 0.0
    a = torch.maximum(a, m.abs())
    m, a = w.put(m), w.put(a)
    g = {"flat": w.flat, "spans": w.spans, "odd": w.odd_spans}[gradient]()
    out = w.payload(w.blocks // w.row_blocks, w.row_blocks, fill=False, scales=False)
    factors = w.put(torch.stack([w.factors(w.blocks).cpu() for _ in range(5)]))
    key = draw_key(7, 3, 1, WORKER_STREAM)
    w.kernels.sample(w.bucket, 0, w.blocks, factors=factors, g=g, m=m, a=a, key=key, first_block=2**32 - 3, out=out)
    return [m, a, out.raw]


def vote(w: World, feedback: bool, rows: int) -> Results:
    received = w.payload(rows, w.blocks, fill=True, scales=False)
    out = w.put(torch.full((w.blocks, w.size // 32), -1, dtype=torch.int32))
    carry = w.put(w.host_flat().clamp(-1.0, 1.0)) if feedback else None
    w.kernels.vote(received, w.bucket.lengths, draw_key(1, 2, 3, SERVER_STREAM), 5, out, carry)
    return [out] if carry is None else [out, carry]


def apply_votes(w: World) -> Results:
    words, live = (
        w.put(torch.from_numpy(w.rng.integers(0, 2**32, (w.blocks, w.size // 32), dtype=np.uint32).view(np.int32)))
        for _ in range(2)
    )
    spans = w.spans(dtypes=DTYPES[:1])
    w.kernels.apply_votes(w.bucket, spans, words, live, w.per_param(0.9), w.per_param(0, 0.1))
    return _present(spans)


#: name -> function of a world; every kernel occurs in every way of calling it
CASES: dict[str, Callable[[World], Results]] = {
    **{
        f"compress {m} {g}": (lambda w, m=m, g=g: compress(w, m, g))
        for m in ("none", "flat", "packed")
        for g in ("none", "flat", "spans", "fp32", "bf16", "shifted", "odd")
    },
    "compress range": compress_range,
    **{
        f"compress {m} {g} times r, {str(dtype).removeprefix('torch.')} residual": (
            lambda w, m=m, g=g, dtype=dtype: compress(w, m, g, dtype, torch.float32)
        )
        for m, g, dtype in (
            ("none", "flat", torch.float32),
            ("flat", "odd", torch.float32),
            ("packed", "spans", torch.float32),
            ("packed", "bf16", torch.bfloat16),
        )
    },
    "compress range times r": lambda w: compress_range(w, times=torch.float32),
    **{
        f"compress {m} {g} times bf16 r, {str(dtype).removeprefix('torch.')} residual": (
            lambda w, m=m, g=g, dtype=dtype: compress(w, m, g, dtype, torch.bfloat16)
        )
        for m, g, dtype in (
            ("none", "flat", torch.float32),
            ("flat", "odd", torch.bfloat16),
            ("packed", "spans", torch.float32),
            ("packed", "shifted", torch.bfloat16),
        )
    },
    "compress range times bf16 r": lambda w: compress_range(w, times=torch.bfloat16),
    **{f"reduce {rows}": (lambda w, rows=rows: reduce(w, rows)) for rows in (1, 2, 3, 7, 8, 9, 17)},
    **{
        f"compress {m} {g}, bf16 residual": (lambda w, m=m, g=g: compress(w, m, g, torch.bfloat16))
        for m, g in (("none", "none"), ("none", "tiny"), ("flat", "flat"), ("packed", "spans"), ("packed", "shifted"))
    },
    "compress range, bf16 residual": lambda w: compress_range(w, torch.bfloat16),
    **{f"reduce {rows}, bf16 residual": (lambda w, rows=rows: reduce(w, rows, torch.bfloat16)) for rows in (1, 5, 10)},
    "unpack": unpack,
    **{f"gather shifted {s}": (lambda w, s=s: gather(w, s)) for s in (0, 1)},
    "gather odd": gather_odd,
    **{f"apply_adam shifted {s}": (lambda w, s=s: apply_adam(w, s)) for s in (0, 1)},
    **{f"apply_adam shifted {s} without r": (lambda w, s=s: apply_adam(w, s, None)) for s in (0, 1)},
    **{f"apply_adam shifted {s}, bf16 r": (lambda w, s=s: apply_adam(w, s, torch.bfloat16)) for s in (0, 1)},
    **{f"lamb_update {old}": (lambda w, old=old: lamb_update(w, old)) for old in ("flat", "packed")},
    "lamb_update packed, bf16 r": lambda w: lamb_update(w, "packed", torch.bfloat16),
    **{f"lamb_apply shifted {s}": (lambda w, s=s: lamb_apply(w, s)) for s in (0, 1)},
    **{f"lamb_apply shifted {s}, bf16 r": (lambda w, s=s: lamb_apply(w, s, torch.bfloat16)) for s in (0, 1)},
    **{f"local_step {g}": (lambda w, g=g: local_step(w, g)) for g in ("spans", "shifted", "odd")},
    **{f"local_step {g}, bf16 r": (lambda w, g=g: local_step(w, g, torch.bfloat16)) for g in ("spans", "shifted")},
    **{f"sample {g}": (lambda w, g=g: sample(w, g)) for g in ("flat", "spans", "odd")},
    **{
        f"vote {mode} {rows}": (lambda w, mode=mode, rows=rows: vote(w, mode == "feedback", rows))
        for mode in ("random", "feedback")
        for rows in (1, 2, 5, 8, 17, 300)  # more than 8 bits of votes
    },
    "apply_votes": apply_votes,
}


def bits(tensor: Tensor) -> Tensor:
    """Bit patterns on the host, so that -0.0 and 0.0 differ."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def differences(ours: Results, theirs: Results) -> list[str]:
    """What differs between two backends' results of a case."""
    found = []
    assert len(ours) == len(theirs)
    for index, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"output {index}: {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}")
        elif not torch.equal(bits(x), bits(y)):
            wrong = (bits(x) != bits(y)).view(-1, x.element_size()).any(dim=1).nonzero().flatten()
            first = int(wrong[0])
            values = f"{x.detach().cpu().flatten()[first]} against {y.detach().cpu().flatten()[first]}"
            found.append(f"output {index} {tuple(x.shape)}: {len(wrong)} elements, the first at {first}: {values}")
    return found
