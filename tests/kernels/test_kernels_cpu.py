"""The compiled CPU kernels: the reference's bits for every geometry, and a build that is safe, cached and never in the way."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_onebit.kernels as registry
from lightning_onebit.comm import Bucket, plan_buckets
from lightning_onebit.kernels import KernelsUnavailable, Packed, ReferenceKernels, Residual, cpu, get_backend
from lightning_onebit.kernels.residual import as_tensor

COMPILER = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

REFERENCE = ReferenceKernels()


@pytest.fixture(scope="module")
def kernels() -> cpu.CpuKernels:
    backend = get_backend("cpu", "cpu")
    assert isinstance(backend, cpu.CpuKernels)
    return backend


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, so that -0.0 and 0.0 differ."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def bucket_of(sizes: list[int], block_size: int, world: int = 1) -> Bucket:
    plan = plan_buckets(
        sizes[::-1], block_size=block_size, world_size=world, bucket_elements=2**40, device=torch.device("cpu")
    )
    (bucket,) = plan.buckets
    return bucket


def hard(rng: np.random.Generator, size: int) -> Tensor:
    """Values of many magnitudes, with denormals, overfldeferred squares, equal neighbours and both zeros among them."""
    x = rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)
    for share, value in ((0.1, 1e-41), (0.02, 1e-23), (0.1, 0.0), (0.1, -0.0)):
        x = np.where(rng.random(size) < share, value, x)
    if rng.random() < 0.2:
        x = np.where(rng.random(size) < 0.01, 1e25, x)
    return torch.from_numpy(x.astype(np.float32))


def random_payload(rng: np.random.Generator, rows: int, per_row: int, block_size: int) -> Packed:
    packed = Packed.empty(rows, per_row, block_size)
    packed.words.copy_(torch.from_numpy(rng.integers(-(2**31), 2**31, packed.words.shape).astype(np.int32)))
    packed.scales.copy_(hard(rng, packed.blocks).abs().view(rows, per_row))
    return packed


def run_everything(
    kernels: ReferenceKernels, bucket: Bucket, world: int, seed: int, m_kind: str, g_kind: str, dtype: torch.dtype
) -> list[bytes]:
    """One call of every operation on inputs that depend on the seed alone; all that was written."""
    rng = np.random.default_rng(seed)
    blocks, size = bucket.blocks, bucket.block_size
    chunk = blocks // world
    flats = [hard(rng, bucket.elements) for _ in range(5)]
    a, b, alpha, decay = (torch.from_numpy(rng.random(blocks).astype(np.float32)) for _ in range(4))
    spans = [None if rng.random() < 0.2 else hard(rng, span.numel) for span in bucket.spans]
    with np.errstate(over="ignore"):
        gradients = [None if t is None else t.clamp(-6e4, 6e4).to(dtype) for t in spans]
    old = random_payload(rng, world, chunk, size)
    written: list[bytes] = []

    # residuals and reciprocal denominators may be kept in 16 bits
    held, divided = (torch.bfloat16 if rng.random() < 0.4 else torch.float32 for _ in range(2))

    def residual(flat: Tensor) -> Tensor | Residual:
        """One of ordinary tensors, or one of which something may still have to be taken off."""
        if held is torch.bfloat16 or rng.random() < 0.5:
            return flat.to(held, copy=True)
        made = kernels.residual(flat.numel() // size, size, torch.float32, flat.device)
        return Residual(flat.clone(), hard(rng, flat.numel() // size).abs(), made.subtract)

    def another(one: Tensor | Residual) -> Tensor | Residual | None:
        """None, or one of the same kind that holds something else."""
        if rng.random() < 0.5:
            return None
        if isinstance(one, Tensor):
            return torch.full_like(one, 7.0)
        assert one.pending is not None
        return Residual(torch.full_like(one.values, 7.0), torch.full_like(one.pending, 3.0), one.subtract)

    def bytes_of(*residuals: Tensor | Residual | None) -> list[bytes]:
        return [raw(as_tensor(residual)) for residual in residuals if residual is not None]

    e, out = residual(flats[0]), Packed.empty(world, chunk, size)
    m = {"none": None, "flat": flats[1], "packed": old}[m_kind]
    g = {"none": None, "flat": flats[2], "spans": gradients}[g_kind]
    r = flats[1].abs().to(divided) if g is not None and rng.random() < 0.5 else None
    into = another(e)
    kernels.compress(bucket, 0, blocks, a=a, m=m, b=b, g=g, e=e, out=out, r=r, into=into)
    written += [*bytes_of(e, into), raw(out.raw)]

    d, reply = residual(flats[3][: chunk * size]), Packed.empty(1, chunk, size)
    workers = random_payload(rng, int(rng.integers(1, 7)), chunk, size)
    into = another(d)
    kernels.reduce(workers, bucket.lengths[:chunk], d, reply, 1.0 / workers.rows, into)
    written += [*bytes_of(d, into), raw(reply.raw)]

    flat = flats[4].clone()
    kernels.unpack(old, bucket.lengths, flat)
    written.append(raw(flat))
    flat = flats[4].clone()
    kernels.gather(bucket, gradients, flat)
    written.append(raw(flat))

    weights = [None if t is None else t.clone() for t in spans]
    kernels.apply_adam(bucket, weights, old, r, decay, alpha)
    written += [raw(t) for t in weights if t is not None]
    kernels.apply_adam(bucket, weights, old, flats[1].abs().to(divided), decay, alpha)
    written += [raw(t) for t in weights if t is not None]
    return written


def run_other_algorithms(
    kernels: ReferenceKernels, bucket: Bucket, world: int, seed: int, g_kind: str, dtype: torch.dtype
) -> list[bytes]:
    """The operations of 1-bit LAMB, 0/1 Adam and BinSGDM on inputs that depend on the seed alone; all that was written."""
    rng = np.random.default_rng(seed)
    blocks, size = bucket.blocks, bucket.block_size
    chunk, words = blocks // world, size // 32
    flats = [hard(rng, bucket.elements) for _ in range(6)]
    positive = [flat.abs().clamp(max=1e15) for flat in flats]  # denominators and moments: finite squares
    weights = [None if rng.random() < 0.2 else hard(rng, span.numel) for span in bucket.spans]
    gradients = [None if rng.random() < 0.2 else hard(rng, s.numel).clamp(-6e4, 6e4).to(dtype) for s in bucket.spans]
    factors = torch.from_numpy(rng.random((8, blocks)).astype(np.float32))
    divided = torch.bfloat16 if rng.random() < 0.4 else torch.float32
    new, old = random_payload(rng, world, chunk, size), random_payload(rng, world, chunk, size)
    written: list[bytes] = []

    def moved() -> list[Tensor | None]:
        return [None if w is None else w.clone() for w in weights]

    def note(*tensors: Tensor | None) -> None:
        written.extend(raw(t) for t in tensors if t is not None)

    for before in (old, flats[0]):
        fresh, x = positive[1].clone(), moved()
        partials = kernels.lamb_update(bucket, x, new, before, positive[2].to(divided), fresh, factors)
        note(fresh, partials, *x)
    x = moved()
    kernels.lamb_apply(bucket, x, new, positive[2].to(divided), factors[0], factors[1], factors[2])
    note(*x)

    x, (m, u, anchor) = moved(), (flat.clone() for flat in flats[3:6])
    kernels.local_step(bucket, x, gradients, m, u, positive[0].to(divided), anchor, factors[:5].clone())
    note(m, u, anchor, *x)

    key = (int(rng.integers(2**32)), int(rng.integers(2**32)), int(rng.integers(2**32)))
    first_block = int(rng.integers(2**33))
    m, a = flats[3].clone(), positive[4].clone()
    out = Packed.empty(world, chunk, size, has_scales=False)
    g = flats[5] if g_kind == "flat" else gradients
    kernels.sample(
        *(bucket, 0, blocks),
        **dict(factors=factors[:5].clone(), g=g, m=m, a=a, key=key, first_block=first_block, out=out),
    )
    note(m, a, out.raw)
    live = torch.from_numpy(rng.integers(-(2**31), 2**31, (blocks, words)).astype(np.int32))
    workers = Packed.empty(int(rng.integers(1, 7)), chunk, size, has_scales=False)
    workers.words.copy_(torch.from_numpy(rng.integers(-(2**31), 2**31, workers.words.shape).astype(np.int32)))
    for carry in (None, flats[5][: chunk * size].clamp(-1, 1)):
        result = torch.zeros((chunk, words), dtype=torch.int32)
        kernels.vote(workers, bucket.lengths[:chunk], key, first_block, result, carry)
        note(result, *([] if carry is None else [carry]))
        x = moved()
        votes = result.repeat(world, 1)
        kernels.apply_votes(bucket, x, votes, live, factors[2], factors[3] - 0.5)
        note(*x)
    return written


# ----- the same bits -------------------------------------------------------------------------------------------------------------

BLOCK_SIZES = [32, 64, 96, 128, 160, 256, 512, 544, 1024, 2016, 2048, 4096]


@settings(max_examples=3 * settings.default.max_examples)
@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4096)), min_size=1, max_size=6),
    world=st.integers(1, 3),
    m_kind=st.sampled_from(["none", "flat", "packed"]),
    g_kind=st.sampled_from(["none", "flat", "spans"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_every_operation_has_the_bits_of_the_reference(
    kernels: cpu.CpuKernels,
    block_size: int,
    shapes: list[tuple[int, int]],
    world: int,
    m_kind: str,
    g_kind: str,
    dtype: torch.dtype,
    count: int,
    seed: int,
) -> None:
    """Odd lengths, missing spans, empty blocks, zeros of both signs, denormals and overflow: nothing differs in a bit."""
    bucket = bucket_of([max(1, full * block_size + rest % block_size) for full, rest in shapes], block_size, world)
    case = (bucket, world, seed, m_kind, g_kind, dtype)
    with threads(count):
        mine = run_everything(kernels, *case)
    assert mine == run_everything(REFERENCE, *case)


@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4096)), min_size=1, max_size=5),
    world=st.integers(1, 3),
    g_kind=st.sampled_from(["flat", "spans"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_the_other_algorithms_operations_have_the_bits_of_the_reference(
    kernels: cpu.CpuKernels,
    block_size: int,
    shapes: list[tuple[int, int]],
    world: int,
    g_kind: str,
    dtype: torch.dtype,
    count: int,
    seed: int,
) -> None:
    """LAMB's two passes, 0/1 Adam's local step, BinSGDM's draws, votes and bitmap: nothing differs in a bit."""
    bucket = bucket_of([max(1, full * block_size + rest % block_size) for full, rest in shapes], block_size, world)
    case = (bucket, world, seed, g_kind, dtype)
    with threads(count):
        mine = run_other_algorithms(kernels, *case)
    assert mine == run_other_algorithms(REFERENCE, *case)


@pytest.mark.parametrize("looked_at", [False, True], ids=["left alone", "looked at after every step"])
def test_what_is_subtracted_later_is_what_would_have_been_subtracted_at_once(
    kernels: cpu.CpuKernels, looked_at: bool
) -> None:
    """A full block's scale is left to the next step; neither bits nor residuals differ, whether anyone looks in between or not."""
    size, rng = 2048, np.random.default_rng(3)
    bucket = bucket_of([3 * size, size + 37], size)
    full = bucket.lengths == size
    ones, half = torch.ones(bucket.blocks), torch.full((bucket.blocks,), 0.5)
    at_once = [torch.zeros(bucket.elements) for _ in "ed"]
    deferred = [kernels.residual(bucket.blocks, size, torch.float32, at_once[0].device) for _ in "ed"]
    bits = []
    for _ in range(5):
        g = torch.from_numpy(rng.standard_normal(bucket.elements).astype(np.float32))
        for e, d in (at_once, deferred):
            sent, reply = Packed.empty(1, bucket.blocks, size), Packed.empty(1, bucket.blocks, size)
            kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=half, g=g, e=e, out=sent)
            kernels.reduce(sent, bucket.lengths, d, reply, 1.0)
            bits.append(raw(sent.raw) + raw(reply.raw))
        for residual in deferred:
            assert isinstance(residual, Residual) and residual.pending is not None
            assert torch.equal(residual.pending > 0, full)  # nothing is pending of a block with padding
        if looked_at:
            assert all(raw(a) == raw(as_tensor(b)) for a, b in zip(at_once, deferred, strict=True))
    assert bits[::2] == bits[1::2] and len(set(bits)) == 5
    for a, b in zip(at_once, deferred, strict=True):
        assert raw(a) == raw(as_tensor(b)) == raw(as_tensor(b))  # subtracted once
    part = deferred[0].part(1, 3, size)
    kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=ones, g=g, e=deferred[0], out=sent)
    before = deferred[0].values.clone()
    part.tensor()
    changed = (before != deferred[0].values).view(-1, size).any(1)
    assert changed.tolist() == [False, True, True, *[False] * (bucket.blocks - 3)]


@pytest.mark.parametrize("special", [1e-39, -3e-41, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_16_bit_residuals_of_special_numbers_are_those_of_the_reference(
    kernels: cpu.CpuKernels, special: float, share: float
) -> None:
    """Processors that round to bf16 themselves may flush denormal numbers; which NaN stands for one does not matter."""
    bucket = bucket_of([3 * 2048 + 37], 2048)
    rng = np.random.default_rng(5)
    usual = rng.standard_normal(bucket.elements) * (1e-38 if abs(special) < 1 else 1.0)
    drawn = np.where(rng.random(bucket.elements) < share, special * rng.uniform(0.5, 2, bucket.elements), usual)
    g, ones = torch.from_numpy(drawn.astype(np.float32)), torch.ones(bucket.blocks)
    residuals = []
    for backend in (kernels, REFERENCE):
        e, out = torch.zeros(bucket.elements, dtype=torch.bfloat16), Packed.empty(1, bucket.blocks, 2048)
        backend.compress(bucket, 0, bucket.blocks, a=None, m=None, b=ones, g=g, e=e, out=out)
        residuals.append(e)
    mine, theirs = residuals
    assert torch.equal(mine.isnan(), theirs.isnan())
    there = ~theirs.isnan()
    assert raw(mine[there]) == raw(theirs[there])


def test_only_rare_operations_are_left_to_the_reference(kernels: cpu.CpuKernels) -> None:
    """A kernel that is missing here would still give the right bits, a hundred times slower."""
    operations = {name for name in vars(ReferenceKernels) if not name.startswith("_") and name != "name"}
    inherited = {name for name in operations if getattr(cpu.CpuKernels, name) is getattr(ReferenceKernels, name)}
    assert inherited == {"scatter", "mark_live"}


@pytest.mark.parametrize("block_size", [8192, 65536, 65536 - 32])
def test_large_blocks_have_the_bits_of_the_reference(kernels: cpu.CpuKernels, block_size: int) -> None:
    bucket = bucket_of([block_size + 5, 2 * block_size, 77], block_size, 2)
    for m_kind, dtype in (("packed", torch.float32), ("flat", torch.float16)):
        case = (bucket, 2, 11, m_kind, "spans", dtype)
        assert run_everything(kernels, *case) == run_everything(REFERENCE, *case)
    other = (bucket, 2, 11, "spans", torch.float32)
    assert run_other_algorithms(kernels, *other) == run_other_algorithms(REFERENCE, *other)


def test_the_number_of_threads_changes_no_bit(kernels: cpu.CpuKernels) -> None:
    """A bucket of many pieces of work, among them the statistics of gradients, which are a sum."""
    bucket = bucket_of([400_001, 5, 250_000], 2048, 2)
    gradients = [hard(np.random.default_rng(k), n).clamp(-1e9, 1e9) for k, n in enumerate((400_001, 5, 250_000))]
    results = []
    for count in (1, 2, 3, 5):
        with threads(count):
            everything = run_everything(kernels, bucket, 2, 3, "packed", "spans", torch.float32)
            sums = kernels.grad_stats(gradients).tolist() + kernels.norms(gradients).tolist()
            results.append((everything, sums))
    assert all(result == results[0] for result in results)


def test_grad_stats_are_exact_to_fp64_rounding(kernels: cpu.CpuKernels) -> None:
    """Squares that underflow or overflow fp32 count, and any memory layout is read."""
    rng = np.random.default_rng(0)
    tensors = [hard(rng, 100_003), torch.full((10,), 1e-30), torch.full((10,), 1e30), torch.randn(4, 6)[:, ::2]]
    tensors += [torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), torch.randn(9).half(), torch.zeros(0)]
    tensors += [torch.randn(70_000).bfloat16(), torch.randn(7, dtype=torch.float64)]
    exact = sum(float(t.double().square().sum()) for t in tensors)
    squares, bad = kernels.grad_stats(tensors).tolist()
    assert squares == pytest.approx(exact, rel=1e-14)
    assert bad == 0
    tiny, none_bad = kernels.grad_stats([tensors[1]]).tolist()
    assert tiny == pytest.approx(1e-59, rel=1e-6)  # the fp32 nearest to 1e-30, squared
    assert none_bad == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", [0, 31, 65_535, 65_536, 70_000])
def test_grad_stats_see_every_non_finite_element(
    kernels: cpu.CpuKernels, value: float, dtype: torch.dtype, position: int
) -> None:
    broken, sound = torch.ones(70_001, dtype=dtype), torch.ones(100, dtype=dtype)
    broken[position] = value
    assert kernels.grad_stats([sound, broken, sound, broken])[1] == 2


def test_16_bit_numbers_are_read_as_torch_reads_them(kernels: cpu.CpuKernels) -> None:
    """Every one of them, denormals and infinities too."""
    bits = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16)
    bucket = bucket_of([bits.numel()], 2048)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        values = torch.where(values.isnan(), 0.0, values)
        flat = torch.empty(bucket.elements)
        kernels.gather(bucket, [values], flat)
        assert raw(flat[: bits.numel()]) == raw(values.float())


def test_flush_to_zero_of_the_caller_changes_no_bit_and_stays_on(kernels: cpu.CpuKernels) -> None:
    bucket = bucket_of([50_000], 2048)
    case = (bucket, 1, 5, "flat", "spans", torch.float16)
    expected = run_everything(REFERENCE, *case)
    inputs = torch.full((50_000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        out, e = Packed.empty(1, bucket.blocks, 2048), torch.zeros(bucket.elements)
        ones = torch.ones(bucket.blocks)
        with threads(2):
            kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=ones, g=[inputs], e=e, out=out)
            deferred = kernels.residual(bucket.blocks, 2048, torch.float32, e.device)
            kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=ones, g=[inputs], e=deferred, out=out)
            as_tensor(deferred)
        assert e.numpy().view(np.uint32).any(), "denormal residuals were flushed"
        assert raw(deferred.values) == raw(e), "denormal residuals were flushed as the scales were subtracted"
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0, "the caller's mode was lost"
    finally:
        torch.set_flush_denormal(False)
    assert run_everything(kernels, *case) == expected


def test_spans_that_c_cannot_read_in_place_go_through_a_copy(kernels: cpu.CpuKernels) -> None:
    """Strided or fp64 tensors are read, and written back where they are."""
    bucket = bucket_of([100, 64], 64)
    flat = torch.randn(bucket.elements)
    for backend in (kernels, REFERENCE):
        strided, double = torch.arange(200.0)[::2], torch.arange(64, dtype=torch.float64)
        gathered = torch.empty(bucket.elements)
        backend.gather(bucket, [strided, double], gathered)
        assert raw(gathered[:100]) == raw(strided) and raw(gathered[128:]) == raw(double.float())
        ones = torch.ones(bucket.blocks)
        backend.apply_adam(bucket, [strided, None], Packed.empty(1, bucket.blocks, 64), flat, ones * 0.5, ones)
        assert raw(strided) == raw(torch.arange(100.0))
        backend.scatter(bucket, flat, [strided, double])
        assert raw(strided) == raw(flat[:100]) and raw(double) == raw(flat[128:].double())


def test_writing_weights_is_seen_by_autograd(kernels: cpu.CpuKernels) -> None:
    """Backward through a tensor that a step has overwritten raises, as after an in-place operation of torch."""
    bucket, ones = bucket_of([64], 64), torch.ones(1)
    weight = torch.randn(64, requires_grad=True)
    loss = (weight.clone() * weight).sum()
    kernels.apply_adam(bucket, [weight.detach()], Packed.empty(1, 1, 64), torch.ones(64), ones, ones)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        {"e": torch.zeros(127)},
        {"e": torch.zeros(128, dtype=torch.float64)},
        {"e": torch.zeros(256)[::2]},
        {"a": torch.ones(1)},
        {"a": None},
        {"b": None},
        {"g": [torch.zeros(99)]},
        {"g": []},
        {"g": torch.zeros(64)},
        {"m": torch.zeros(64)},
        {"m": Packed.empty(1, 1, 64)},
        {"r": torch.zeros(64)},
        {"out": Packed.empty(1, 2, 32)},
        {"out": Packed.empty(1, 2, 64, has_scales=False)},
    ],
    ids=str,
)
def test_tensors_of_another_size_or_type_are_refused(kernels: cpu.CpuKernels, change: dict) -> None:
    """C trusts what it is told, so the wrapper checks it."""
    bucket, ones = bucket_of([100], 64), torch.ones(2)
    arguments = dict(a=ones, m=torch.zeros(128), b=ones, g=[torch.zeros(100)], e=torch.zeros(128))
    arguments["out"] = Packed.empty(1, 2, 64)
    kernels.compress(bucket, 0, 2, **arguments)
    with pytest.raises(ValueError, match=next(iter(change))):
        kernels.compress(bucket, 0, 2, **{**arguments, **change})
    with pytest.raises(ValueError, match="r must be None"):
        kernels.compress(bucket, 0, 2, **{**arguments, "g": None, "b": None, "r": torch.zeros(128)})


# ----- threads and processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "own helpers"])
def test_calls_from_several_threads_at_once_do_not_disturb_each_other(kernels: cpu.CpuKernels, openmp: bool) -> None:
    bucket = bucket_of([300_000], 2048)
    expected = [run_everything(kernels, bucket, 1, seed, "flat", "spans", torch.float32) for seed in range(3)]
    got: dict[int, list[list[bytes]]] = {seed: [] for seed in range(3)}

    def call(seed: int) -> None:
        for _ in range(4):
            got[seed].append(run_everything(kernels, bucket, 1, seed, "flat", "spans", torch.float32))

    kernels._library.onebit_use_openmp(openmp)
    try:
        with threads(2):
            workers = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(timeout=120)
    finally:
        kernels._library.onebit_use_openmp(True)
    assert not any(worker.is_alive() for worker in workers)
    assert got == {seed: [expected[seed]] * 4 for seed in range(3)}


def _sum_in_child(library: cpu.CpuKernels, values: Tensor, pipe: multiprocessing.connection.Connection) -> None:
    # no large torch operation here: torch's own threads do not survive a fork
    for _ in range(3):
        pipe.send(library.grad_stats([values]).tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(kernels: cpu.CpuKernels) -> None:
    """OpenMP teams do not survive a fork; the kernels must not wait for them."""
    values = torch.randn(1_000_000)
    context = multiprocessing.get_context("fork")
    with threads(2):
        expected = kernels.grad_stats([values]).tolist()
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_sum_in_child, args=(kernels, values, sender))
        child.start()
        try:
            for _ in range(3):
                assert receiver.poll(60), "the child hangs"
                assert receiver.recv() == expected
        finally:
            child.join(timeout=10)
            if child.is_alive():
                child.kill()


def test_a_forked_child_may_be_the_first_to_call_a_kernel_with_threads() -> None:
    """The parent has loaded the kernels, and torch has used its team, which the child does not have."""
    program = """
import os, signal, torch
from lightning_onebit.kernels import get_backend
torch.set_num_threads(2)
kernels, values = get_backend("cpu", "cpu"), torch.randn(1_000_000)
(values * 2 + values).sum()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends it if it hangs
    kernels.grad_stats([values])
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hangs"
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


# ----- building ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The registry as in a new process."""
    registry._load.cache_clear()
    registry._announce_fallback.cache_clear()
    yield
    registry._load.cache_clear()
    registry._announce_fallback.cache_clear()


@pytest.fixture
def other_builds(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of other flags are built once for all runs of the tests: their names carry flags and source. No program looks there."""
    monkeypatch.setenv("LIGHTNING_ONEBIT_CACHE", os.path.join(tempfile.gettempdir(), f"onebit-cpu-tests-{os.getuid()}"))


def write_compiler(path: Path, log: Path, call: str, times: int) -> str:
    """A compiler that writes down its calls and copies this machine's library, after so many calls in all with the word ``call``."""
    script = (
        f'#!/bin/sh\necho "$* " >> {log}\n[ "$1" = --version ] && exit\n'
        f"tries=0\nuntil [ $(grep -c -e '{call} ' {log}) -ge {times} ] || [ $tries -ge 600 ]; do\n"
        "tries=$((tries + 1)); sleep 0.1; done\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {cpu.build()} "$2"\n'
    )
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


LOAD = """
import torch
from lightning_onebit.kernels import get_backend
print(get_backend("cpu", "cpu").name, flush=True)
"""


def test_processes_that_start_together_build_once_and_later_ones_not_at_all(tmp_path: Path) -> None:
    """The one that builds is not done before the others have found no library."""
    log, cache = tmp_path / "calls", tmp_path / "cache"
    environment = {
        **os.environ,
        "CXX": write_compiler(tmp_path / "cxx", log, "--version", 3),
        "LIGHTNING_ONEBIT_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True)

    def compilations() -> int:
        return sum(" -o " in line for line in log.read_text().splitlines())

    together = [start() for _ in range(3)]
    try:
        assert [process.communicate(timeout=150)[0] for process in together] == ["cpu\n"] * 3
        assert compilations() == 1
        later = start()
        together.append(later)
        assert later.communicate(timeout=60)[0] == "cpu\n"
        assert compilations() == 1
    finally:
        for process in together:
            process.kill()
    left = sorted(path.suffix for path in cache.iterdir() if path.suffix != ".lock")
    assert left == [".sha256", ".so"], "something was left behind"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_duplicate_builds_without_locks_are_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming is atomic: what another process loads is whole, and the last builder wins."""
    folder, log = tmp_path / "cache", tmp_path / "calls"
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "cxx", log, "-o", 2))
    folder.mkdir()
    target = folder / "kernels.so"
    builders = [threading.Thread(target=cpu._compile, args=(cpu.find_compiler(), target)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=150)
    assert sum(" -o " in line for line in log.read_text().splitlines()) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.so", "kernels.so.sha256"]
    cpu.load(target)


def test_without_a_compiler_the_reference_is_used_and_it_is_said_once(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("LIGHTNING_ONEBIT_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="lightning_onebit"):
        assert [get_backend("auto", "cpu").name for _ in range(3)] == ["reference"] * 3
    (record,) = caplog.records
    assert "/nonexistent/c++" in record.getMessage() and "reference kernels run instead" in record.getMessage()
    with pytest.raises(KernelsUnavailable, match="CXX='/nonexistent/c\\+\\+' is not an executable"):
        get_backend("cpu", "cpu")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="install one or set CXX"):
        get_backend("cpu", "cpu")


def test_a_compiler_that_fails_is_quoted(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of licences" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LIGHTNING_ONEBIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelsUnavailable, match="out of licences"):
        get_backend("cpu", "cpu")
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob(".*.so"))


def test_a_compiler_with_other_arithmetic_is_refused(other_builds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused multiply-adds change the bits; the comparison at load time notices."""
    version = subprocess.run(
        [str(COMPILER), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True
    )
    if b"__FMA__" not in version.stdout and b"__ARM_FEATURE_FMA" not in version.stdout:
        pytest.skip("this processor has no fused multiply-add")
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-O1", "-fexpensive-optimizations", "-ffp-contract=fast"))
    with pytest.raises(KernelsUnavailable, match="does not compute the reference's bits"):
        get_backend("cpu", "cpu")


def test_the_comparison_at_load_time_does_not_depend_on_torchs_default_dtype(forgotten: None) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert get_backend("cpu", "cpu").name == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_directory_that_others_can_write_to_is_refused(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library put there by someone else would run as this user."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LIGHTNING_ONEBIT_CACHE", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="others could write to it"):
        get_backend("cpu", "cpu")


def test_an_unusable_home_is_replaced_by_a_private_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("LIGHTNING_ONEBIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cpu.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = cpu.cache_directory()
    assert directory.parent == tmp_path and stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_damaged_library_is_named(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(cpu, "build", lambda: broken)
    with pytest.raises(KernelsUnavailable, match=r"broken\.so cannot be loaded.*delete it"):
        get_backend("cpu", "cpu")


class Cache:
    """A cache of this test's own, and a compiler at once done: it hands out the library that this machine has."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.folder, self.compiler = patch, folder / "cache", folder / "cxx"
        self.compiled = cpu.build()
        self.says("", f'cp {self.compiled} "$made"')
        patch.setenv("CXX", str(self.compiler))
        patch.setenv("LIGHTNING_ONEBIT_CACHE", str(self.folder))

    def says(self, version: str, otherwise: str) -> None:
        """What the compiler does when asked for its version, and when asked to write ``$made``."""
        find = 'while [ "$1" != -o ]; do shift; done; made=$2'
        self.compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && {{ {version or ":"}; exit; }}\n{find}\n{otherwise}\n'
        )
        self.compiler.chmod(0o755)

    def load(self) -> str:
        """What a new process gets for "auto"."""
        registry._load.cache_clear()
        registry._announce_fallback.cache_clear()
        return get_backend("auto", "cpu").name


@pytest.fixture
def cache(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path, monkeypatch)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda library, record: os.truncate(library, library.stat().st_size // 2),
    "zeroed": lambda library, record: library.write_bytes(bytes(library.stat().st_size)),
    "empty": lambda library, record: library.write_bytes(b""),
    "one bit": lambda library, record: library.write_bytes(library.read_bytes()[:-1] + b"\1"),
    "without its record": lambda library, record: record.unlink(),
    "with an empty record": lambda library, record: record.write_bytes(b""),
    "under another name": lambda library, record: record.write_bytes(
        record.read_bytes().replace(b"onebit_cpu", b"another")
    ),
    "writable by the group": lambda library, record: library.chmod(0o620),
    "with a record writable by all": lambda library, record: record.chmod(0o602),
    "a symlink": lambda library, record: library.symlink_to(library.rename(library.with_name("elsewhere.so"))),
    "a FIFO": lambda library, record: (library.unlink(), os.mkfifo(library, 0o600)),
}


def test_a_library_that_is_not_whole_or_not_ours_is_compiled_again_and_not_loaded(cache: Cache) -> None:
    """Loading a zeroed one would end the process with SIGBUS, one that somebody else wrote would run as this user."""
    assert cache.load() == "cpu"
    (library,) = cache.folder.glob("*.so")
    record = library.with_name(f"{library.name}.sha256")
    loaded: list[bytes] = []
    load = cpu.load
    cache.patch.setattr(cpu, "load", lambda path: loaded.append(path.read_bytes()) or load(path))
    whole = library.read_bytes()
    for damage, do in DAMAGES.items():
        shutil.copy2(library, cache.folder / "copy")  # this process runs in the one that it has loaded
        os.replace(cache.folder / "copy", library)
        do(library, record)
        loaded.clear()
        assert cache.load() == "cpu", damage
        assert loaded == [whole] * 2, f"{damage}: compiled, tried, kept and loaded"
        assert library.read_bytes() == whole and not library.is_symlink()
        assert stat.S_IMODE(library.stat().st_mode) == stat.S_IMODE(record.stat().st_mode) == 0o600
        loaded.clear()
        assert cache.load() == "cpu" and loaded == [whole], f"{damage}: the next process compiles nothing"


def test_a_library_of_another_owner_is_not_loaded_although_its_folder_is_closed_by_now(cache: Cache) -> None:
    assert cache.load() == "cpu"
    (library,) = cache.folder.glob("*.so")
    foreign, status = library.stat().st_ino, os.fstat

    def owned(handle: int) -> os.stat_result:
        info = status(handle)
        fields = list(info)
        fields[4] += info.st_ino == foreign
        return os.stat_result(fields)

    cache.patch.setattr(os, "fstat", owned)
    assert cache.load() == "cpu"
    assert library.stat().st_ino != foreign, "replaced by one of our own"


@pytest.mark.parametrize(
    ("version", "compile", "message"),
    [
        ("", "printf 'Fehler f\\374r \\377' >&2; exit 1", "Fehler f\ufffdr \ufffd"),
        ("", "exit 3", "exit status 3"),
        ("", "kill -9 $$", "ended by SIGKILL"),
        ("", ":", "made no library that can be loaded"),
        ("", 'rm -f "$made"', "made no library that can be loaded"),
        ("", 'head -c 100 /dev/zero > "$made"', "made no library that can be loaded"),
        ("printf '\\377'; exit 1", "", "does not run"),
        ("kill -9 $$", "", "ended by SIGKILL"),
    ],
)
def test_a_compiler_with_any_bad_end_leaves_auto_with_the_reference(
    version: str, compile: str, message: str, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.says(version, compile)
    assert cache.load() == get_backend("auto", "cpu").name == "reference"
    (record,) = caplog.records
    assert message in record.getMessage()
    with pytest.raises(KernelsUnavailable, match=re.escape(message)):
        get_backend("cpu", "cpu")
    assert not [path for path in cache.folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ('g++ "-DX=1', "No closing quotation"),
        ("/tmp", "CXX='/tmp' is not an executable"),
        ("/\udcff", "not an executable"),
    ],
    ids=["quote", "folder", "no text"],
)
def test_a_cxx_that_is_no_command_is_named_and_auto_goes_on(
    chosen: str, message: str, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.patch.setenv("CXX", chosen)
    assert cache.load() == "reference"
    (record,) = caplog.records
    assert message in record.getMessage() and record.getMessage().encode()
    with pytest.raises(KernelsUnavailable, match=message):
        get_backend("cpu", "cpu")


def test_a_compiler_whose_name_and_version_are_no_utf8_is_used(cache: Cache) -> None:
    cache.says("printf '\\377'", f'cp {cache.compiled} "$made"')
    odd = cache.compiler.rename(cache.compiler.with_name("c\udcff"))
    cache.patch.setenv("CXX", str(odd))
    assert cache.load() == "cpu"


def test_no_home_no_temporary_directory_no_room_and_no_lock_leave_auto_with_a_backend(
    cache: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def nobody(*_: object) -> None:
        raise KeyError("uid not found")

    for name in ("fsync", "replace"):
        with cache.patch.context() as patch:
            patch.setattr(os, name, full)
            assert cache.load() == "reference"
        assert (
            "cannot be kept" in caplog.text
            and "No space left" in caplog.text
            and "LIGHTNING_ONEBIT_CACHE" in caplog.text
        )
        caplog.clear()
    with cache.patch.context() as patch:
        patch.setattr(cpu.tempfile, "mkstemp", full)
        assert cache.load() == "reference"
    assert "cannot be kept" in caplog.text
    caplog.clear()
    with cache.patch.context() as patch:  # a container's user without an entry in the password file
        for name in ("HOME", "LIGHTNING_ONEBIT_CACHE", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setattr("pwd.getpwuid", nobody)
        patch.setattr(cpu.tempfile, "gettempdir", lambda: str(tmp_path))
        assert cache.load() == "cpu"
        patch.setattr(cpu.tempfile, "gettempdir", full)
        assert cache.load() == "reference"
    assert "no directory for the compiled library (~/.cache/lightning_onebit: " in caplog.text
    (lock,) = cache.folder.glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert cache.load() == "cpu", "without a lock the work may be done twice, no more"


@pytest.mark.parametrize(
    ("vendor", "defines"), [("GenuineIntel", ("-DONEBIT_PREFETCH",)), ("AuthenticAMD", ()), (None, ())]
)
def test_only_intel_is_told_what_to_fetch(
    vendor: str | None, defines: tuple[str, ...], forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the library in the cache says by its name which it is."""
    text = "linux aarch64" if vendor is None else f"linux x86_64 vendor_id\t: {vendor}"
    monkeypatch.setattr(cpu, "_processor", lambda: text)
    monkeypatch.setenv("LIGHTNING_ONEBIT_CACHE", str(tmp_path))
    commands: list[list[str]] = []

    def compiled(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(cpu.subprocess, "run", compiled)
    monkeypatch.setattr(cpu, "load", lambda path: None)
    first = cpu.build()
    (command,) = [command for command in commands if "-shared" in command]
    assert tuple(part for part in command if part.startswith("-D")) == defines
    monkeypatch.setattr(cpu, "_defines", lambda: ("-DANOTHER",))
    assert cpu.build() != first


@pytest.mark.slow
@pytest.mark.parametrize(
    "tuning",
    [("-march=x86-64",), pytest.param(("-march=x86-64-v3",), marks=pytest.mark.nightly)],
    ids=["sse2", "avx2"],
)
def test_other_instruction_sets_compute_the_same_bits(
    tuning: tuple[str, ...], other_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrower registers, no hardware conversion of halves, and prefetching where there is none else: other code, equal results."""
    monkeypatch.setattr(cpu, "TUNING", (tuning,))
    told = cpu._defines()
    monkeypatch.setattr(cpu, "_defines", lambda: () if told else ("-DONEBIT_PREFETCH",))  # not what this processor gets
    try:
        other = cpu.CpuKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    for block_size in (32, 96, 160, 544, 2048):
        for m_kind, g_kind, dtype in (("packed", "spans", torch.float16), ("flat", "flat", torch.bfloat16)):
            sizes = [3 * block_size + 7, 1, block_size, 5 * block_size // 2]
            case = (bucket_of(sizes, block_size, 2), 2, block_size, m_kind, g_kind, dtype)
            assert run_everything(other, *case) == run_everything(REFERENCE, *case)
            case = (bucket_of(sizes, block_size, 2), 2, block_size, g_kind, dtype)
            assert run_other_algorithms(other, *case) == run_other_algorithms(REFERENCE, *case)
