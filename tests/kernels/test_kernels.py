"""Every kernel backend that can run here reproduces the definition bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import bitwise
from torch import Tensor

from lightning_onebit.comm import Bucket, plan_buckets
from lightning_onebit.kernels import BACKENDS, KernelBackend, KernelsUnavailable, Packed, get_backend
from lightning_onebit.kernels.residual import Residual, as_tensor

f32 = np.float32


def _backends() -> list:
    found = []
    for name in BACKENDS:
        if name == "auto":
            continue
        device = "cuda" if name == "cuda" else "cpu"
        marks = [pytest.mark.gpu] if name == "cuda" else []
        found.append(pytest.param((name, device), id=name, marks=marks))
    return found


@pytest.fixture(params=_backends())
def kernels(request: pytest.FixtureRequest) -> KernelBackend:
    name, device = request.param
    try:
        return get_backend(name, device)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def device_of(kernels: KernelBackend) -> str:
    return "cuda" if kernels.name == "cuda" else "cpu"


def bucket_of(sizes: Sequence[int], block_size: int, device: str = "cpu", world: int = 1) -> Bucket:
    """One bucket that holds tensors of these sizes (and empty blocks up to a multiple of ``world``)."""
    plan = plan_buckets(
        list(reversed(sizes)),
        block_size=block_size,
        world_size=world,
        bucket_elements=2**40,
        device=torch.device(device),
    )
    (bucket,) = plan.buckets
    return bucket


def hard_values(rng: np.random.Generator, size: int) -> np.ndarray:
    """Normal numbers of many sizes with denormals, both zeros and repeated values among them."""
    x = rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)
    x = np.where(rng.random(size) < 0.1, rng.standard_normal(size) * 1e-41, x)
    x = np.where(rng.random(size) < 0.1, 0.0, x)
    return np.where(rng.random(size) < 0.1, -0.0, x).astype(f32)


def bits(a: np.ndarray | Tensor) -> np.ndarray:
    """Bit patterns, so that -0.0 and 0.0 differ and NaNs compare."""
    a = a.detach().cpu().numpy() if isinstance(a, Tensor) else np.asarray(a)
    return np.ascontiguousarray(a).view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])


def same_bits(a: np.ndarray | Tensor, b: np.ndarray | Tensor) -> bool:
    return bits(a).shape == bits(b).shape and bool((bits(a) == bits(b)).all())


def same_bits_or_nan(a: Tensor, b: Tensor) -> bool:
    """Equal bits where a number is; the payload of a NaN is nobody's business."""
    nan = a.isnan()
    return bool((nan == b.isnan()).all()) and same_bits(a[~nan].view(torch.int16), b[~nan].view(torch.int16))


def cut(flat: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """The valid elements of every block."""
    rows = flat.reshape(bucket.blocks, bucket.block_size)
    return [row[:length] for row, length in zip(rows, bucket.lengths.tolist(), strict=True)]


def join(pieces: Sequence[np.ndarray], bucket: Bucket) -> np.ndarray:
    flat = np.zeros((bucket.blocks, bucket.block_size), dtype=f32)
    for row, piece in zip(flat, pieces, strict=True):
        row[: piece.size] = piece
    return flat.ravel()


def random_flat(rng: np.random.Generator, bucket: Bucket) -> np.ndarray:
    return join([hard_values(rng, length) for length in bucket.lengths.tolist()], bucket)


def assert_packed(packed: Packed, expected: Sequence[tuple[np.float32, np.ndarray]]) -> None:
    assert same_bits(packed.scales.flatten().clone(), np.array([s for s, _ in expected], dtype=f32))
    words = packed.words.flatten(0, 1).cpu().numpy().view(np.uint32)
    for block, (_, w) in enumerate(expected):
        assert (words[block] == w).all(), f"sign bits of block {block}"


SIZES = [(1,), (7,), (32,), (33, 1), (64, 2049, 5), (4097,), (100, 100, 100)]
BLOCK_SIZES = [32, 64, 96, 2048]
#: what ``compress`` is given: gradient, whether it is preconditioned, momentum
GIVEN = [
    (gradient, preconditioned, momentum)
    for gradient in ("none", "flat", "spans")
    for preconditioned in ((False, True) if gradient != "none" else (False,))
    for momentum in ("none", "flat", "packed")
]
# two of the seven sizes for each: all sizes with each block size, and with each of what is given
COMPRESSED = [
    (*given, block_size, SIZES[(i + 2 * j + more) % len(SIZES)])
    for i, given in enumerate(GIVEN)
    for j, block_size in enumerate(BLOCK_SIZES)
    for more in (0, 1)
]


# ----- the wire format -----------------------------------------------------------------------------------------------------------


def test_row_is_scales_then_bit_planes(kernels: KernelBackend) -> None:
    """Bit k of word j is element ``k*W + j``; a row is C scales, then C*W words, little-endian."""
    device, block_size = device_of(kernels), 64
    bucket = bucket_of([128], block_size, device)
    y = torch.ones(128)
    y[[0, 1, 2, 63, 64 + 5]] = -1.0  # block 0: (plane, lane) = (0,0), (0,1), (1,0), (31,1) ; block 1: (2,1)
    out = Packed.empty(1, 2, block_size, device=device)
    kernels.compress(
        bucket,
        0,
        2,
        a=None,
        m=None,
        b=torch.ones(2, device=device),
        g=y.to(device),
        e=torch.zeros(128, device=device),
        out=out,
    )
    raw = out.raw.cpu().numpy()
    assert raw.shape == (1, 2 * (4 + 64 // 8)) and Packed.row_bytes(2, 64) == raw.shape[1]
    assert raw[0, :8].view("<f4").tolist() == [1.0, 1.0]
    assert raw[0, 8:].view("<u4").tolist() == [0b11, (1 << 31) | 1, 0, 0b100]


@pytest.mark.parametrize("block_size", [32, 64, 96, 2048])
def test_unpack_inverts_compress(kernels: KernelBackend, block_size: int) -> None:
    device, rng = device_of(kernels), np.random.default_rng(0)
    bucket = bucket_of([5, 4097], block_size, device, world=3)
    y = random_flat(rng, bucket)
    e = torch.from_numpy(y.copy()).to(device)
    out = Packed.empty(3, bucket.blocks // 3, block_size, device=device)
    kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=None, g=None, e=e, out=out)
    decoded = torch.full((bucket.elements,), 7.0, device=device)
    kernels.unpack(out, bucket.lengths, decoded)
    expected = []
    for piece in cut(y, bucket):
        s, w, _ = bitwise.compress_block(piece + f32(0), block_size)
        expected.append(bitwise.decode_block(s, w, piece.size))
    assert same_bits(decoded, join(expected, bucket))


# ----- compress ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gradient", "preconditioned", "momentum", "block_size", "sizes"), COMPRESSED)
def test_compress_follows_the_definition(
    kernels: KernelBackend, sizes: tuple[int, ...], block_size: int, momentum: str, gradient: str, preconditioned: bool
) -> None:
    device, rng = device_of(kernels), np.random.default_rng([block_size, *sizes])
    bucket = bucket_of(sizes, block_size, device, world=2)
    a = rng.random(bucket.blocks).astype(f32)
    b = rng.random(bucket.blocks).astype(f32)
    m, g, e, r = (random_flat(rng, bucket) for _ in range(4))
    packed = Packed.empty(2, bucket.blocks // 2, block_size, device=device)
    old = []
    for piece in cut(m, bucket):
        s, w, _ = bitwise.compress_block(piece, block_size)
        old.append((s, w))
    if momentum == "packed":
        packed.scales.copy_(torch.tensor([s for s, _ in old]).view(2, -1))
        packed.words.copy_(
            torch.from_numpy(np.stack([w for _, w in old]).view(np.int32)).view(2, bucket.blocks // 2, -1)
        )
        m = join([bitwise.decode_block(s, w, p.size) for (s, w), p in zip(old, cut(m, bucket), strict=True)], bucket)
    spans: list[Tensor | None] = [
        torch.from_numpy(g[s.block * block_size : s.block * block_size + s.numel].copy()).to(device)
        for s in bucket.spans
    ]
    if gradient == "spans" and len(spans) > 1:
        gone = bucket.spans[1]
        spans[1] = None  # a missing gradient counts as +0.0
        g[gone.block * block_size : (gone.block + gone.blocks(block_size)) * block_size] = 0.0
    residual = torch.from_numpy(e.copy()).to(device)
    out = Packed.empty(2, bucket.blocks // 2, block_size, device=device)
    kernels.compress(
        bucket,
        0,
        bucket.blocks,
        a=None if momentum == "none" else torch.from_numpy(a).to(device),
        m={"none": None, "flat": torch.from_numpy(m).to(device), "packed": packed}[momentum],
        b=None if gradient == "none" else torch.from_numpy(b).to(device),
        g={"none": None, "flat": torch.from_numpy(g).to(device), "spans": spans}[gradient],
        e=residual,
        out=out,
        r=torch.from_numpy(r).to(device) if preconditioned else None,
    )
    expected, kept = [], []
    pieces = zip(cut(m, bucket), cut(g, bucket), cut(e, bucket), cut(r, bucket), strict=True)
    for block, (pm, pg, pe, pr) in enumerate(pieces):
        # y = ((a*m) + ((b*g)*r)) + e, a missing m or g counting as +0.0, a missing r as 1
        am = f32(0) if momentum == "none" else a[block] * pm
        bg = f32(0) if gradient == "none" else b[block] * pg
        if preconditioned:
            bg = bg * pr
        s, w, rest = bitwise.compress_block((am + bg) + pe, block_size)
        expected.append((s, w))
        kept.append(rest)
    assert_packed(out, expected)
    assert same_bits(residual, join(kept, bucket))


def test_compress_of_a_range_of_blocks_is_that_part_of_the_whole(kernels: KernelBackend) -> None:
    device, rng = device_of(kernels), np.random.default_rng(1)
    bucket = bucket_of([200, 77], 32, device, world=4)
    one = torch.ones(bucket.blocks, device=device)
    g, e = (torch.from_numpy(random_flat(rng, bucket)).to(device) for _ in range(2))
    whole, whole_e = Packed.empty(4, bucket.blocks // 4, 32, device=device), e.clone()
    kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=one, g=g, e=whole_e, out=whole)
    count = bucket.blocks // 4
    for row in range(4):
        lo, hi = row * count, (row + 1) * count
        part, cut_ = Packed.empty(1, count, 32, device=device), slice(lo * 32, hi * 32)
        part_e = e[cut_].clone()
        kernels.compress(bucket, lo, hi, a=None, m=None, b=one[lo:hi], g=g[cut_].clone(), e=part_e, out=part)
        assert torch.equal(part.raw, whole.raw[row : row + 1])
        assert same_bits(part_e, whole_e[cut_])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compress_reads_16_bit_gradients_exactly(kernels: KernelBackend, dtype: torch.dtype) -> None:
    device = device_of(kernels)
    bucket = bucket_of([100, 33], 32, device)
    g = [torch.randn(s.numel, device=device).to(dtype) for s in bucket.spans]
    outs = []
    for spans in (g, [t.float() for t in g]):
        out, e = Packed.empty(1, bucket.blocks, 32, device=device), torch.zeros(bucket.elements, device=device)
        kernels.compress(
            bucket, 0, bucket.blocks, a=None, m=None, b=torch.ones(bucket.blocks, device=device), g=spans, e=e, out=out
        )
        outs.append((out.raw, e))
    assert torch.equal(outs[0][0], outs[1][0]) and same_bits(outs[0][1], outs[1][1])


@pytest.mark.parametrize(("block_size", "rows"), [(32, 1), (96, 5), (2048, 2)])
@pytest.mark.parametrize("momentum", ["none", "flat", "packed"])
def test_16_bit_residuals_are_those_of_fp32_rounded(
    kernels: KernelBackend, block_size: int, rows: int, momentum: str
) -> None:
    dtype = torch.bfloat16
    device, rng = device_of(kernels), np.random.default_rng(5)
    bucket = bucket_of([7, 4097], block_size, device, world=rows)
    held, g, flat = (torch.from_numpy(random_flat(rng, bucket)).to(device) for _ in range(3))
    held = held.to(dtype)
    g[:3] = torch.inf  # a broken gradient breaks its block in either form
    a, b = (torch.full((bucket.blocks,), factor, device=device) for factor in (0.9, 0.5))
    count = bucket.blocks // rows
    m: Tensor | Packed | None = flat if momentum == "flat" else None
    if momentum == "packed":
        m = Packed.empty(rows, count, block_size, device=device)
        kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=b, g=flat, e=torch.zeros_like(flat), out=m)
    sent, halves = (Packed.empty(rows, count, block_size, device=device) for _ in range(2))
    whole, half = held.float(), held.clone()
    for e, out in ((whole, sent), (half, halves)):
        kernels.compress(bucket, 0, bucket.blocks, a=None if m is None else a, m=m, b=b, g=g, e=e, out=out)
    assert same_bits(sent.raw, halves.raw) and same_bits_or_nan(half, whole.to(dtype))

    whole, half = held[: count * block_size].float(), held[: count * block_size].clone()
    replies = []
    for d in (whole, half):
        replies.append(Packed.empty(1, count, block_size, device=device))
        kernels.reduce(sent, bucket.lengths[:count], d, replies[-1], 0.5)
    assert same_bits(replies[0].raw, replies[1].raw) and same_bits_or_nan(half, whole.to(dtype))


def test_tensors_that_begin_anywhere_in_memory_give_the_same_bits(kernels: KernelBackend) -> None:
    """Spans are views into parameters of any alignment."""
    device = device_of(kernels)
    bucket = bucket_of([1000, 77], 64, device)
    g = [torch.randn(s.numel, device=device) for s in bucket.spans]
    x, r = [torch.randn(s.numel, device=device) for s in bucket.spans], torch.rand(bucket.elements, device=device)
    one = torch.ones(bucket.blocks, device=device)
    results = []
    for offset in range(4):
        shifted = []
        for tensors in (g, x):
            shifted.append([torch.cat([t.new_zeros(offset), t])[offset:] for t in tensors])
        e, out = torch.zeros(bucket.elements, device=device), Packed.empty(1, bucket.blocks, 64, device=device)
        kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=one, g=shifted[0], e=e, out=out)
        kernels.apply_adam(bucket, shifted[1], out, r, one * 0.5, one)
        results.append([out.raw, e, *shifted[1]])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@given(
    size=st.integers(1, 300),
    block_size=st.sampled_from([32, 64]),
    steps=st.integers(1, 5),
    exponent=st.integers(-30, 15),
    seed=st.integers(0, 2**16),
)
def test_residual_identity_and_telescoping(size: int, block_size: int, steps: int, exponent: int, seed: int) -> None:
    """``e = fl(y - C(y))`` bit for bit in every step; and what was sent plus what is kept is what was to be sent, to rounding."""
    kernels = get_backend("auto", "cpu")
    bucket = bucket_of([size], block_size)
    rng = np.random.default_rng(seed)
    e = torch.zeros(bucket.elements)
    to_send, sent, largest = np.zeros(bucket.elements), np.zeros(bucket.elements), 0.0
    for _ in range(steps):
        c = join([(rng.standard_normal(n) * 2.0**exponent).astype(f32) for n in bucket.lengths.tolist()], bucket)
        before = e.numpy().copy()
        out, decoded = Packed.empty(1, bucket.blocks, block_size), torch.empty(bucket.elements)
        ones = torch.ones(bucket.blocks)
        kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=ones, g=torch.from_numpy(c), e=e, out=out)
        kernels.unpack(out, bucket.lengths, decoded)
        y = c + before
        assert same_bits(e, y - decoded.numpy())
        to_send += c
        sent += decoded.numpy()
        largest = max(largest, float(np.abs(y).max()), float(np.abs(decoded.numpy()).max()))
    # two roundings per step (y and e), each at most half an ulp of a number below 2 * largest
    assert np.abs(sent + e.numpy() - to_send).max() <= steps * 2 * 2.0**-24 * 2 * largest


def test_zero_block_sends_scale_zero_and_keeps_nothing(kernels: KernelBackend) -> None:
    device = device_of(kernels)
    bucket = bucket_of([64], 32, device, world=3)
    e, out = torch.zeros(bucket.elements, device=device), Packed.empty(3, bucket.blocks // 3, 32, device=device)
    kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=None, g=None, e=e, out=out)
    assert not out.raw.any() and same_bits(e, torch.zeros(bucket.elements))


# ----- reduce --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(1,), (7,), (33, 64), (4097,)])
@pytest.mark.parametrize("block_size", [32, 96, 2048])
def test_reduce_follows_the_definition(
    kernels: KernelBackend, sizes: tuple[int, ...], rows: int, block_size: int
) -> None:
    device, rng = device_of(kernels), np.random.default_rng([rows, block_size, *sizes])
    bucket = bucket_of(sizes, block_size, device)
    received = Packed.empty(rows, bucket.blocks, block_size, device=device)
    decoded: list[list[np.ndarray]] = []
    for row in range(rows):
        pairs = [bitwise.compress_block(p, block_size) for p in cut(random_flat(rng, bucket), bucket)]
        received.scales[row] = torch.tensor([p[0] for p in pairs])
        received.words[row] = torch.from_numpy(np.stack([p[1] for p in pairs]).view(np.int32)).to(device)
        decoded.append(
            [bitwise.decode_block(s, w, n) for (s, w, _), n in zip(pairs, bucket.lengths.tolist(), strict=True)]
        )
    d = random_flat(rng, bucket)
    kept, out = torch.from_numpy(d.copy()).to(device), Packed.empty(1, bucket.blocks, block_size, device=device)
    kernels.reduce(received, bucket.lengths, kept, out, 1.0 / rows)
    expected, rest = [], []
    for block, piece in enumerate(cut(d, bucket)):
        total = decoded[0][block]
        for row in range(1, rows):
            total = total + decoded[row][block]
        s, w, r = bitwise.compress_block(total * f32(1.0 / rows) + piece, block_size)
        expected.append((s, w))
        rest.append(r)
    assert_packed(out, expected)
    assert same_bits(kept, join(rest, bucket))


# ----- apply, gather, scatter, statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [32, 96])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_apply_adam_follows_the_definition_and_leaves_missing_spans_alone(
    kernels: KernelBackend, block_size: int, preconditioned: bool
) -> None:
    device, rng = device_of(kernels), np.random.default_rng(3)
    bucket = bucket_of([7, 100, 33, 2050], block_size, device, world=2)
    pairs = [bitwise.compress_block(p, block_size) for p in cut(random_flat(rng, bucket), bucket)]
    packed = Packed.empty(2, bucket.blocks // 2, block_size, device=device)
    packed.scales.copy_(torch.tensor([p[0] for p in pairs]).view(2, -1))
    packed.words.copy_(torch.from_numpy(np.stack([p[1] for p in pairs]).view(np.int32)).view(2, bucket.blocks // 2, -1))
    x, r = random_flat(rng, bucket), np.abs(random_flat(rng, bucket))
    owner = bucket.block_param.cpu().numpy()
    decay = rng.uniform(0.9, 1.0, 4).astype(f32)[owner]
    alpha = rng.uniform(0.0, 0.1, 4).astype(f32)[owner]
    spans: list[Tensor | None] = [
        torch.from_numpy(x[s.block * block_size : s.block * block_size + s.numel].copy()).to(device)
        for s in bucket.spans
    ]
    spans[1] = None
    kernels.apply_adam(
        bucket,
        spans,
        packed,
        None if preconditioned else torch.from_numpy(r).to(device),
        torch.from_numpy(decay).to(device),
        torch.from_numpy(alpha).to(device),
    )
    expected = []
    for block, (px, pr) in enumerate(zip(cut(x, bucket), cut(r, bucket), strict=True)):
        s, w, _ = pairs[block]
        # t = alpha*s ; x = (x*decay) - (bit ? -(t*r) : +(t*r)), without r where the exchange has had it
        change = np.full_like(pr, alpha[block] * s)
        if not preconditioned:
            change = change * pr
        sign = bitwise.decode_block(f32(1), w, px.size)
        expected.append(px * decay[block] - np.where(sign < 0, -change, change))
    flat = join(expected, bucket)
    for s, tensor in zip(bucket.spans, spans, strict=True):
        if tensor is not None:
            assert same_bits(tensor, flat[s.block * block_size : s.block * block_size + s.numel])


def test_gather_and_scatter_are_inverse_and_clear_padding(kernels: KernelBackend) -> None:
    device = device_of(kernels)
    bucket = bucket_of([5, 64, 33], 32, device, world=2)
    tensors = [
        torch.randn(s.numel, device=device).to(t)
        for s, t in zip(bucket.spans, [torch.float32, torch.bfloat16, torch.float16], strict=True)
    ]
    flat = torch.full((bucket.elements,), float("nan"), device=device)
    kernels.gather(bucket, [tensors[0], None, tensors[2]], flat)
    rows = flat.view(bucket.blocks, 32)
    for row, length in zip(rows, bucket.lengths.tolist(), strict=True):
        assert not row[length:].any()
    missing = bucket.spans[1]
    assert not rows[missing.block : missing.block + missing.blocks(32)].any()
    back: list[Tensor | None] = [torch.zeros_like(t) for t in tensors]
    untouched = back[0]
    kernels.gather(bucket, tensors, flat)
    kernels.scatter(bucket, flat, [None, back[1], back[2]])
    assert torch.equal(back[1], tensors[1]) and torch.equal(back[2], tensors[2]) and not untouched.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grad_stats_sums_squares_and_counts_non_finite_tensors(kernels: KernelBackend, dtype: torch.dtype) -> None:
    device = device_of(kernels)
    tensors = [torch.randn(n, device=device).to(dtype) for n in (1, 7, 5000)]
    squares, bad = kernels.grad_stats(tensors).tolist()
    assert squares == pytest.approx(sum(float(t.double().square().sum()) for t in tensors), rel=1e-5) and bad == 0
    tensors[0][0], tensors[2][4999] = float("inf"), float("nan")
    assert kernels.grad_stats(tensors)[1].item() == 2
    assert kernels.grad_stats([]).tolist() == [0.0, 0.0]


def test_grad_stats_are_those_of_fp64(kernels: KernelBackend) -> None:
    """Ranks with different kernels clip by the same factor but for the rounding of a double."""
    tensors = [torch.randn(100_003, device=device_of(kernels)), torch.full((10,), 1e-25, device=device_of(kernels))]
    for tensor in tensors:
        exact = tensor.cpu().double().square().sum().item()
        assert kernels.grad_stats([tensor])[0].item() == pytest.approx(exact, rel=1e-12)


def test_grad_stats_does_not_mistake_a_large_gradient_for_a_broken_one(kernels: KernelBackend) -> None:
    large = torch.full((100,), 3e38, device=device_of(kernels))
    squares, bad = kernels.grad_stats([large]).tolist()
    assert bad == 0 and squares == pytest.approx(100 * 3e38**2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_are_those_of_each_tensor_whatever_its_layout(kernels: KernelBackend, dtype: torch.dtype) -> None:
    device, draw = device_of(kernels), torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=draw).to(device, dtype) for n in (1, 7, 0, 300_001)]
    tensors += [
        torch.randn(4, 6, generator=draw).to(device, dtype)[:, ::2],
        torch.full((9,), 1e4, device=device, dtype=dtype),
    ]
    if dtype is torch.float32:
        tensors += [torch.full((100,), 3e38, device=device), torch.full((9,), 1e-30, device=device)]
    norms = kernels.norms(tensors)
    assert norms.dtype == torch.float64 and norms.device.type == torch.device(device).type
    for norm, tensor in zip(norms.tolist(), tensors, strict=True):
        assert norm == pytest.approx(float(tensor.double().norm()), rel=1e-13)
    assert norms[2] == 0.0 and kernels.norms([]).shape == (0,)


def test_a_chunk_without_a_row_of_any_worker_is_refused(kernels: KernelBackend) -> None:
    device = device_of(kernels)
    lengths, d = torch.full((2,), 64, dtype=torch.int32, device=device), torch.zeros(128, device=device)
    with pytest.raises(ValueError, match="received must have a row for each worker, got none"):
        kernels.reduce(Packed.empty(0, 2, 64, device=device), lengths, d, Packed.empty(1, 2, 64, device=device), 1.0)
    bits = Packed.empty(0, 2, 64, device=device, has_scales=False)
    with pytest.raises(ValueError, match="received must have a row for each worker, got none"):
        kernels.vote(bits, lengths, (1, 2, 0), 0, torch.zeros((2, 2), dtype=torch.int32, device=device))


# ----- the registry --------------------------------------------------------------------------------------------------------------


def test_reference_kernels_are_always_there_and_auto_never_fails() -> None:
    assert get_backend("reference", "cpu").name == "reference"
    assert get_backend("auto", "cpu").name in ("cpu", "reference")


def test_unknown_and_impossible_backends_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kernels='gpu' is unknown; choose one of auto, reference, cpu, cuda"):
        get_backend("gpu", "cpu")
    with pytest.raises(KernelsUnavailable, match=r"kernels='cuda' cannot run on cpu"):
        get_backend("cuda", "cpu")


# ----- buckets -------------------------------------------------------------------------------------------------------------------


@given(
    numels=st.lists(st.integers(0, 200), max_size=6),
    block_size=st.sampled_from([32, 64]),
    world=st.integers(1, 5),
    bucket_elements=st.integers(1, 600),
)
def test_plan_holds_every_element_once_and_pads_to_the_world_only(
    numels: list[int], block_size: int, world: int, bucket_elements: int
) -> None:
    plan = plan_buckets(
        numels, block_size=block_size, world_size=world, bucket_elements=bucket_elements, device=torch.device("cpu")
    )
    covered: list[list[tuple[int, int]]] = [[] for _ in numels]
    padding = 0
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index and bucket.blocks % world == 0 and bucket.blocks > 0
        assert int(bucket.lengths.sum()) == sum(s.numel for s in bucket.spans)
        used = 0
        for span in bucket.spans:
            assert span.block == used and span.numel > 0
            covered[span.param].append((span.start, span.numel))
            lengths = bucket.lengths[used : used + span.blocks(block_size)].tolist()
            # only the last block of a parameter is short
            assert all(n == block_size for n in lengths[:-1])
            assert lengths[-1] == block_size or span.start + span.numel == numels[span.param]
            assert (bucket.block_param[used : used + span.blocks(block_size)] == span.param).all()
            used += span.blocks(block_size)
        padding += bucket.blocks - used
        assert (bucket.lengths[used:] == 0).all()
    for numel, parts in zip(numels, covered, strict=True):
        assert sum(n for _, n in sorted(parts)) == numel
        position = 0
        for begin, n in sorted(parts):
            assert begin == position
            position += n
    assert padding < world
    flat = torch.arange(plan.elements, dtype=torch.float32)
    for param, numel in enumerate(numels):
        view = plan.view(flat, param, torch.empty(numel))
        pieces = [b.slice(flat)[s.block * block_size :][: s.numel] for b, s in plan.spans_of(param)]
        assert torch.equal(view, torch.cat(pieces) if pieces else torch.empty(0))


def test_lamb_update_sums_the_squares_of_weights_without_padding_and_absent_tensors(kernels: KernelBackend) -> None:
    """Of small whole numbers, which any order of additions sums exactly; ``u = x`` where the momentum is 0 and the decay 1."""
    device, sizes, block_size = device_of(kernels), (150, 70, 40, 64), 64
    bucket = bucket_of(sizes, block_size, device, world=4)
    draw = torch.Generator().manual_seed(0)
    x = [torch.randint(-8, 9, (span.numel,), generator=draw).float().to(device) for span in bucket.spans]
    spans: list[Tensor | None] = [None if index == 1 else t for index, t in enumerate(x)]
    expected = torch.zeros(bucket.blocks)
    for span, tensor in zip(bucket.spans, spans, strict=True):
        if tensor is not None:
            for k in range(span.blocks(block_size)):
                expected[span.block + k] = tensor[k * block_size : (k + 1) * block_size].square().sum()
    momentum = Packed.empty(1, bucket.blocks, block_size, device=device)
    momentum.raw.zero_()
    flat = torch.ones(bucket.elements, device=device)
    factors = torch.full((8, bucket.blocks), 0.5, device=device)
    factors[7] = 1.0
    partials = kernels.lamb_update(bucket, spans, momentum, flat, flat, flat.clone(), factors)
    assert partials.shape == (bucket.blocks, 3)
    assert partials[:, 0].tolist() == [0.0] * bucket.blocks
    assert partials[:, 1].tolist() == expected.tolist()
    assert (expected > 0).sum() == sum(s.blocks(block_size) for s in bucket.spans) - bucket.spans[1].blocks(block_size)


@pytest.mark.parametrize("other", ["dtype", "pending"])
def test_a_residual_is_not_written_to_memory_of_another_kind(kernels: KernelBackend, other: str) -> None:
    device = device_of(kernels)
    lengths, d = torch.full((2,), 64, dtype=torch.int32, device=device), torch.ones(128, device=device)
    received, reply = Packed.empty(1, 2, 64, device=device), Packed.empty(1, 2, 64, device=device)
    received.raw.zero_()
    into = d.bfloat16() if other == "dtype" else Residual(torch.ones_like(d), torch.zeros(2, device=device))
    with pytest.raises(
        ValueError, match="into must be kept as d is: in the same dtype, with or without what is pending"
    ):
        kernels.reduce(received, lengths, d, reply, 1.0, into)
    assert (d == 1).all() and (as_tensor(into) == 1).all()
