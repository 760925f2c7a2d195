"""The CUDA kernels against the speed of memory, torch's fused AdamW and DeepSpeed's sequence of passes, on one GPU.

    python benchmarks/gpu_kernels.py                      # about half a minute on one GPU with 40 GB or more
    python benchmarks/gpu_kernels.py --elements 100000000 # smaller

What is measured, and how:

* The copy bandwidth of this GPU in this run (device to device, bytes read plus bytes written) turns every kernel's byte count into the
  least time it could take; a kernel's *ratio* is its time over that. Bytes are counted from the tensors: each input read once, each
  output written once.
* Times are medians over CUDA events. A sample passes over all buckets of the model in turn, gigabytes in all, so that nothing is found
  in the L2 cache; small working sets are repeated on several copies.
* "DeepSpeed's sequence" restates what DeepSpeed 0.19.6 does on the device for one tensor of OnebitAdam (momentum update, error
  feedback, norm, sign, cupy.packbits, unpackbits, server part, update by separate element-wise operations), without its collectives
  and without its two host synchronisations, on tensors large enough that its launches do not matter.

Writes ``gpu_kernels.json`` and ``gpu_kernels.png`` into ``--out`` and prints the table. ``--dry-run`` goes through the same code with
small sizes on the CPU, to test this program; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_onebit import BinSGDM, ExchangeOptions, OnebitAdam, OnebitLamb
from lightning_onebit.comm import Bucket, Plan, plan_buckets
from lightning_onebit.kernels import Packed, get_backend
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, draw_key

BLOCK_SIZE = 2048
TENSORS = 32
TARGETS = {
    "compress + apply, ratio to copy": 1.25,
    "compress + apply, ratio to fused AdamW": 1.0,
    "server part of 8 ranks, ratio to copy": 1.5,
}


@dataclass
class Row:
    """One measurement.

    Attributes:
        name: what ran.
        nbytes: bytes it must move.
        milliseconds: median.
        spread: half the distance between the quartiles, milliseconds.
        ratio: time over the time that a copy of as many bytes takes (filled in by ``Report``).
    """

    name: str
    nbytes: int
    milliseconds: float
    spread: float
    ratio: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that must be moved over the time it took."""
        return self.nbytes / self.milliseconds / 1e6


@dataclass
class Report:
    """Everything that is written."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    copy_gigabytes_per_second: float = 0.0
    rows: list[Row] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> Row:
        """Notes a row and its ratio to the copy."""
        row.ratio = row.gigabytes_per_second and self.copy_gigabytes_per_second / row.gigabytes_per_second
        self.rows.append(row)
        return row


class Clock:
    """Times functions on a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._cuda = device.type == "cuda"
        self._repeats = repeats

    def __call__(self, name: str, nbytes: int, fn: Callable[[], object]) -> Row:
        """Median time of ``fn``, which queues work that moves ``nbytes``."""
        for _ in range(3):
            fn()
        times = self._events(fn) if self._cuda else self._host(fn)
        quartiles = statistics.quantiles(times, n=4)
        return Row(name, nbytes, statistics.median(times), (quartiles[2] - quartiles[0]) / 2)

    def _events(self, fn: Callable[[], object]) -> list[float]:
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self._repeats)
        ]
        torch.cuda.synchronize()
        for begin, end in marks:
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]

    def _host(self, fn: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(self._repeats):
            begin = time.perf_counter()
            fn()
            times.append((time.perf_counter() - begin) * 1e3)
        return times


class Model:
    """Parameters, gradients and the optimizer's state, cut into buckets."""

    def __init__(
        self,
        elements: int,
        bucket_mb: float,
        device: torch.device,
        gradients: torch.dtype = torch.float32,
        residuals: torch.dtype = torch.float32,
        denominators: torch.dtype = torch.float32,
    ) -> None:
        self.device = device
        numels = [elements // TENSORS] * TENSORS
        self.plan: Plan = plan_buckets(
            numels, block_size=BLOCK_SIZE, world_size=1, bucket_elements=int(bucket_mb * 2**20 / 4), device=device
        )
        self.x = [torch.randn(n, device=device) for n in numels]
        self.g = [torch.randn(n, device=device).mul_(1e-3).to(gradients) for n in numels]
        self.e = self.flat(1e-4).to(residuals)
        self.r = self.flat(1.0).abs_().add_(1.0).to(denominators)
        self.momentum = [self.payload(b.blocks) for b in self.buckets]
        self.sent = [self.payload(b.blocks) for b in self.buckets]
        self.factors = [
            [torch.full((b.blocks,), value, device=device) for value in (0.9, 0.1, 0.9999, 1e-5)] for b in self.buckets
        ]
        self.x_spans = [self.bind(b, self.x) for b in self.buckets]
        self.g_spans = [self.bind(b, self.g) for b in self.buckets]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All of them."""
        return self.plan.buckets

    def bind(self, bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """A bucket's views of per-tensor values."""
        return [tensors[s.param][s.start : s.start + s.numel] for s in bucket.spans]

    def flat(self, scale: float) -> Tensor:
        """fp32 flat over all blocks with zero padding."""
        flat = torch.empty(self.plan.elements, device=self.device)
        flat.normal_(std=scale)
        for bucket in self.buckets:
            blocks = bucket.slice(flat).view(bucket.blocks, BLOCK_SIZE)
            for block in (bucket.lengths < BLOCK_SIZE).nonzero().flatten().tolist():
                blocks[block, int(bucket.lengths[block]) :] = 0.0
        return flat

    def payload(self, blocks: int, rows: int = 1, scales: bool = True) -> Packed:
        """Random bits and plausible scales."""
        packed = Packed.empty(rows, blocks, BLOCK_SIZE, device=self.device, has_scales=scales)
        packed.raw.random_(0, 256)
        if scales:
            packed.scales.uniform_(1e-4, 1e-3)
        return packed

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(t.numel() for t in self.x)

    @property
    def payload_bytes(self) -> int:
        """Bits and scales of all blocks."""
        return sum(p.raw.numel() for p in self.sent)


def measure_copy(clock: Clock, elements: int, device: torch.device) -> Row:
    """Device-to-device copy: bytes read plus bytes written."""
    source, target = torch.randn(elements, device=device), torch.empty(elements, device=device)
    return clock("copy", 2 * source.numel() * 4, lambda: target.copy_(source))


def measure_step(clock: Clock, report: Report, kernels: Any, model: Model, note: str = "") -> tuple[Row, Row]:
    """Worker and apply pass over all buckets."""

    def compress() -> None:
        for k, b in enumerate(model.buckets):
            a, o, _, _ = model.factors[k]
            e, r, out = b.slice(model.e), b.slice(model.r), model.sent[k]
            kernels.compress(b, 0, b.blocks, a=a, m=model.momentum[k], b=o, g=model.g_spans[k], e=e, out=out, r=r)

    def apply() -> None:
        for k, b in enumerate(model.buckets):
            _, _, decay, alpha = model.factors[k]
            kernels.apply_adam(b, model.x_spans[k], model.sent[k], None, decay, alpha)

    gradient_bytes = sum(t.numel() * t.element_size() for t in model.g)
    residual_bytes = 2 * model.e.element_size() * model.plan.elements
    denominator_bytes = model.r.element_size() * model.plan.elements
    compressed = residual_bytes + gradient_bytes + denominator_bytes + 2 * model.payload_bytes
    applied = 8 * model.numel + model.payload_bytes
    return (
        report.add(clock(f"compress{note}", compressed, compress)),
        report.add(clock(f"apply_adam{note}", applied, apply)),
    )


def measure_server(clock: Clock, report: Report, kernels: Any, model: Model, ranks: int, note: str = "") -> Row:
    """What one rank of ``ranks`` does for its share of the model; on enough copies to leave the cache behind."""
    blocks, dtype = max(1, model.plan.blocks // ranks), model.e.dtype
    one = Packed.row_bytes(blocks, BLOCK_SIZE) * (ranks + 1) + 2 * dtype.itemsize * blocks * BLOCK_SIZE
    copies = 1 if model.device.type == "cpu" else max(1, -(-(1 << 30) // one))
    lengths = torch.full((blocks,), BLOCK_SIZE, dtype=torch.int32, device=model.device)
    sets = [
        (
            model.payload(blocks, ranks),
            torch.randn(blocks * BLOCK_SIZE, device=model.device, dtype=dtype),
            model.payload(blocks),
        )
        for _ in range(copies)
    ]

    def reduce() -> None:
        for received, d, out in sets:
            kernels.reduce(received, lengths, d, out, 1.0 / ranks)

    return report.add(clock(f"reduce of {ranks} ranks{note}", copies * one, reduce))


def measure_others(clock: Clock, report: Report, kernels: Any, model: Model) -> None:
    """Every other kernel, on one model."""
    b = max(model.buckets, key=lambda bucket: bucket.blocks)
    k = b.index
    elements, bits, lanes = b.elements, model.sent[k].raw.numel(), BLOCK_SIZE // 32
    valid = int(b.lengths.sum())
    flats = [torch.randn(elements, device=model.device) for _ in range(5)]
    size, fresh = flats[1].abs_(), flats[4].abs_()
    x, g, (a, _, decay, alpha) = model.x_spans[k], model.g_spans[k], model.factors[k]
    factors = torch.full((8, b.blocks), 0.5, device=model.device)
    votes = torch.randint(-(2**31), 2**31, (b.blocks, lanes), dtype=torch.int32, device=model.device)
    live = torch.full((b.blocks, lanes), -1, dtype=torch.int32, device=model.device)
    signs, marked = model.payload(b.blocks, scales=False), torch.empty_like(live)
    eight = model.payload(b.blocks, 8, scales=False)
    worker, server = draw_key(0, 1, 0, WORKER_STREAM), draw_key(0, 1, 0, SERVER_STREAM)
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("grad_stats", 4 * model.numel, lambda: kernels.grad_stats(model.g)),
        ("gather", 4 * valid + 4 * elements, lambda: kernels.gather(b, g, flats[0])),
        ("scatter", 8 * valid, lambda: kernels.scatter(b, flats[0], x)),
        ("unpack", bits + 4 * elements, lambda: kernels.unpack(model.sent[k], b.lengths, flats[0])),
        (
            "lamb_update",
            16 * valid + 2 * bits,
            lambda: kernels.lamb_update(b, x, model.sent[k], model.momentum[k], size, fresh, factors),
        ),
        ("lamb_apply", 12 * valid + bits, lambda: kernels.lamb_apply(b, x, model.sent[k], size, a, decay, alpha)),
        (
            "local_step",
            40 * valid,
            lambda: kernels.local_step(b, x, g, flats[0], flats[2], size, flats[3], factors[:5]),
        ),
        (
            "sample",
            20 * elements + signs.raw.numel(),
            lambda: kernels.sample(
                b,
                0,
                b.blocks,
                factors=factors[:5],
                g=g,
                m=flats[0],
                a=size,
                key=worker,
                first_block=0,
                out=signs,
            ),
        ),
        (
            "vote of 8 ranks",
            eight.raw.numel() + 4 * votes.numel() + 8 * elements,
            lambda: kernels.vote(eight, b.lengths, server, 0, votes, flats[2]),
        ),
        (
            "vote of 8 ranks, drawn",
            eight.raw.numel() + 4 * votes.numel(),
            lambda: kernels.vote(eight, b.lengths, server, 0, votes),
        ),
        (
            "apply_votes",
            8 * valid + 8 * live.numel(),
            lambda: kernels.apply_votes(b, x, votes, live, decay, alpha),
        ),
        ("mark_live", 4 * elements + 4 * live.numel(), lambda: kernels.mark_live(b, 0, b.blocks, size, marked)),
    ]
    for name, nbytes, fn in calls:
        report.add(clock(name, nbytes, fn))


def measure_fused_adamw(clock: Clock, report: Report, model: Model) -> Row:
    """``torch.optim.AdamW(fused=True)`` on the same parameters and gradients."""
    params = [torch.nn.Parameter(t) for t in model.x]
    for p, g in zip(params, model.g, strict=True):
        p.grad = g
    optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01, fused=True)
    return report.add(clock("torch.optim.AdamW(fused=True)", 28 * model.numel, lambda: optimizer.step()))


def measure_optimizers(clock: Clock, device: torch.device, elements: int, fused: Row) -> dict[str, float]:
    """Whole steps of the optimizers, in a world of one rank, over fused AdamW's: kernels, launches, and what the host waits for.

    One rank serves the whole model, not a share of it: this is the most that a step can cost.
    """
    usual: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
    frozen: dict[str, Any] = {**usual, "freeze_step": 1}
    alone = ExchangeOptions(_alone=True)
    wide = replace(alone, bucket_mb=256.0)
    made: dict[str, Callable[..., Any]] = {
        "warm-up step of OnebitAdam": lambda p: OnebitAdam(p, freeze_step=10**9, **usual),
        "compressed step of OnebitAdam": lambda p: OnebitAdam(p, refresh="never", exchange=alone, **frozen),
        "compressed step of OnebitAdam, buckets of 256 MB": lambda p: OnebitAdam(
            p, refresh="never", exchange=wide, **frozen
        ),
        "compressed step of OnebitLamb": lambda p: OnebitLamb(p, exchange=alone, **frozen),
        "step of BinSGDM": lambda p: BinSGDM(p, exchange=alone, **usual),
    }
    found = {}
    for name, make in made.items():
        params = [torch.nn.Parameter(torch.randn(elements // TENSORS, device=device)) for _ in range(TENSORS)]
        for p in params:
            p.grad = torch.randn_like(p).mul_(1e-3)
        optimizer = make(params)
        row = clock(name, 0, optimizer.step)
        found[f"{name}, ratio to fused AdamW"] = row.milliseconds / fused.milliseconds
        del optimizer, params
    return found


# ----- DeepSpeed's sequence -----------------------------------------------------------------------------------------------


class DeepSpeedSequence:
    """The passes of DeepSpeed 0.19.6's OnebitAdam over one fp32 tensor in the compressed stage, collectives left out.

    Every rank's packed bits stand in for what would have been received, so the server part has its real size.
    """

    def __init__(self, x: Tensor, g: Tensor, ranks: int, packer: Any) -> None:
        unit = 8 * ranks
        self._ranks, self._packer = ranks, packer
        self._x, self._g = x, g
        self._padded = -(-x.numel() // unit) * unit
        self._m, self._v = torch.randn_like(x), torch.rand_like(x).add_(1.0)
        self._worker_error = torch.zeros(self._padded, device=x.device)
        self._server_error = torch.zeros(self._padded // ranks, device=x.device)

    def step(self, lr: float = 1e-5, decay: float = 0.01) -> None:
        """Momentum update, compressed average, weight update."""
        self._m.mul_(0.9).add_(self._g, alpha=0.1)
        self._m.copy_(self._average(self._m))
        update = self._m / self._v.sqrt().add_(1e-8)
        update.add_(self._x, alpha=decay)
        self._x.add_(update, alpha=-lr)

    @staticmethod
    def _signs(values: Tensor) -> Tensor:
        return values.sign().add_(1).bool()

    def _compress(self, values: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """Error feedback with one scale for all; the packed signs and the scale."""
        values.add_(error)
        scale = torch.linalg.vector_norm(values) / values.numel() ** 0.5
        error.copy_(values - scale * self._signs(values).float().add_(-0.5).mul_(2.0))
        return self._packer.pack(self._signs(values)), scale

    def _decode(self, bits: Tensor) -> Tensor:
        return self._packer.unpack(bits).float().add_(-0.5).mul_(2.0)

    def _average(self, momentum: Tensor) -> Tensor:
        buffer = torch.nn.functional.pad(momentum, (0, self._padded - momentum.numel()))
        bits, scale = self._compress(buffer, self._worker_error)
        received, scales = bits.view(self._ranks, -1), scale.expand(self._ranks, 1)
        server = (self._decode(received.flatten()).view(self._ranks, -1) * scales * (1.0 / self._ranks)).sum(0)
        reply, scale = self._compress(server, self._server_error)
        gathered = reply.repeat(self._ranks)
        return (self._decode(gathered).view(self._ranks, -1) * scale).flatten()[: momentum.numel()]


class CupyPacker:
    """Packs bits with CuPy on torch's stream, as DeepSpeed does."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def pack(self, signs: Tensor) -> Tensor:
        """Bool to uint8, eight to a byte."""
        return self._run(self._cupy.packbits, signs.view(torch.uint8))

    def unpack(self, bits: Tensor) -> Tensor:
        """The inverse; uint8 of 0 and 1."""
        return self._run(self._cupy.unpackbits, bits)

    def _run(self, function: Any, tensor: Tensor) -> Tensor:
        with self._cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream, tensor.device.index):
            return torch.as_tensor(function(self._cupy.asarray(tensor.contiguous())), device=tensor.device)


class NumpyPacker:
    """The same on the CPU, for dry runs."""

    def pack(self, signs: Tensor) -> Tensor:
        """Bool to uint8, eight to a byte."""
        import numpy as np

        return torch.from_numpy(np.packbits(signs.numpy()))

    def unpack(self, bits: Tensor) -> Tensor:
        """The inverse."""
        import numpy as np

        return torch.from_numpy(np.unpackbits(bits.numpy()))


def measure_deepspeed(clock: Clock, report: Report, model: Model, ranks: int) -> Row:
    """The sequence over all tensors; its byte count is that of our own step, so that ratios compare."""
    packer = NumpyPacker() if model.device.type == "cpu" else CupyPacker()
    sequences = [DeepSpeedSequence(x, g, ranks, packer) for x, g in zip(model.x, model.g, strict=True)]

    def step() -> None:
        for sequence in sequences:
            sequence.step()

    server = 8 * model.plan.elements // ranks + model.payload_bytes
    ours = 8 * model.plan.elements + 16 * model.numel + 3 * model.payload_bytes + server
    return report.add(clock("DeepSpeed's sequence", ours, step))


def measure_launch(kernels: Any, device: torch.device) -> float:
    """Microseconds that the host spends on one launch of ``compress`` with tables in place."""
    model = Model(TENSORS * BLOCK_SIZE * 4, 1024.0, device)
    bucket, count = model.buckets[0], 200
    a, b, _, _ = model.factors[0]

    def compress() -> None:
        kernels.compress(
            bucket, 0, bucket.blocks, a=a, m=model.momentum[0], b=b, g=model.g_spans[0], e=model.e, out=model.sent[0]
        )

    compress()
    begin = time.perf_counter()
    for _ in range(count):
        compress()
    return (time.perf_counter() - begin) / count * 1e6


# ----- report -------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": "CPU (dry run)"}
    if device.type == "cuda":
        import cupy

        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20),
            "cuda": torch.version.cuda,
            "cupy": cupy.__version__,
        }
    return facts


def table(report: Report) -> str:
    """Markdown."""
    lines = [
        f"{report.machine['device']}, torch {report.machine['torch']}, {report.settings['elements']:,} parameters; "
        f"copy: {report.copy_gigabytes_per_second:,.0f} GB/s",
        "",
        "| what | ms | +- | GB/s | time over copy of as many bytes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in report.rows:
        lines.append(
            f"| {row.name} | {row.milliseconds:.3f} | {row.spread:.3f} | {row.gigabytes_per_second:,.0f} | {row.ratio:.2f} |"
        )
    lines += ["", "| result | value | target |", "| --- | ---: | ---: |"]
    for name, value in report.results.items():
        lines.append(f"| {name} | {value:.2f} | {'at most ' + str(TARGETS[name]) if name in TARGETS else ''} |")
    return "\n".join(lines)


def plot(report: Report, path: Path) -> None:
    """Ratios of all kernels, and whole steps side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("compress", "apply_adam", "reduce of 8 ranks", "torch.optim.AdamW(fused=True)", "DeepSpeed's sequence")
    times = {row.name: row.milliseconds for row in report.rows}
    share = report.results["server milliseconds of 8 ranks"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5))
    rows = [row for row in report.rows if row.name not in names[3:]]
    left.barh([row.name for row in rows][::-1], [row.ratio for row in rows][::-1], color="tab:blue")
    left.axvline(1.0, color="black", lw=0.8)
    left.axvline(1.25, color="tab:red", lw=0.8, ls="--")
    left.set_xlabel("time over the time of a copy of as many bytes")
    bars = ["1-bit Adam", "fused AdamW", "DeepSpeed's sequence"]
    bottom = 0.0
    for name, value in (("compress", times[names[0]]), ("server (8 ranks)", share), ("apply", times[names[1]])):
        right.bar(bars[0], value, bottom=bottom, label=name)
        bottom += value
    right.bar(bars[1], times[names[3]], color="tab:gray")
    if names[4] in times:
        right.bar(bars[2], times[names[4]], color="tab:brown")
    right.set_ylabel(f"ms per step, {report.settings['elements'] / 1e6:,.0f} M parameters")
    right.legend()
    figure.suptitle(f"{report.machine['device']}: local work of one compressed step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(arguments: argparse.Namespace) -> Report:
    """All measurements."""
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    torch.manual_seed(0)
    kernels = get_backend("auto" if arguments.dry_run else "cuda", device)
    clock = Clock(device, arguments.repeats)
    settings = {
        "elements": arguments.elements // TENSORS * TENSORS,
        "bucket_mb": arguments.bucket_mb,
        "repeats": arguments.repeats,
    }
    report = Report(
        machine(device), {**settings, "block_size": BLOCK_SIZE, "tensors": TENSORS, "kernels": kernels.name}
    )
    copy = measure_copy(clock, settings["elements"], device)
    report.copy_gigabytes_per_second = copy.gigabytes_per_second
    report.add(copy)
    model = Model(arguments.elements, arguments.bucket_mb, device)
    compress, apply = measure_step(clock, report, kernels, model)
    servers = {ranks: measure_server(clock, report, kernels, model, ranks) for ranks in (2, 8, 64)}
    fused = measure_fused_adamw(clock, report, model)
    deepspeed = measure_deepspeed(clock, report, model, 8)
    whole = measure_optimizers(clock, device, settings["elements"], fused)
    measure_others(clock, report, kernels, Model(arguments.elements // 4, 1e9, device))
    measure_step(
        clock,
        report,
        kernels,
        Model(arguments.elements, arguments.bucket_mb, device, torch.bfloat16),
        ", bf16 gradients",
    )
    halves = Model(arguments.elements, arguments.bucket_mb, device, residuals=torch.bfloat16)
    measure_step(clock, report, kernels, halves, ", bf16 residuals")
    measure_server(clock, report, kernels, halves, 8, ", bf16 residuals")
    del halves
    short = Model(arguments.elements, arguments.bucket_mb, device, denominators=torch.bfloat16)
    measure_step(clock, report, kernels, short, ", bf16 denominators")
    del short
    for bucket_mb in (4.0, 16.0, 64.0):
        small = Model(arguments.elements, bucket_mb, device)
        measure_step(clock, report, kernels, small, f", buckets of {bucket_mb:g} MB")
        del small
    least = (compress.nbytes + apply.nbytes) / report.copy_gigabytes_per_second / 1e6
    ours = compress.milliseconds + apply.milliseconds
    server_bytes = 8 * model.plan.elements // 8 + model.payload_bytes * 9 // 8
    server = servers[8].milliseconds * server_bytes / servers[8].nbytes
    report.results = {
        "compress + apply, ratio to copy": ours / least,
        "compress + apply, ratio to fused AdamW": ours / fused.milliseconds,
        "server part of 8 ranks, ratio to copy": servers[8].ratio,
        **whole,
        "DeepSpeed's sequence over ours (compress + server + apply)": deepspeed.milliseconds / (ours + server),
        "server milliseconds of 8 ranks": server,
        "host microseconds per launch": measure_launch(kernels, device),
    }
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=500_000_000, help="parameters")
    parser.add_argument("--bucket-mb", type=float, default=256.0, help="MB of fp32 gradients in a bucket")
    parser.add_argument("--repeats", type=int, default=30, help="samples of which the median is taken")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU, to test this program")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.elements, arguments.repeats, arguments.bucket_mb = min(arguments.elements, 300_000), 3, 0.5
    elif not torch.cuda.is_available():
        parser.exit(
            2, "gpu_kernels.py needs a CUDA device (torch sees none); --dry-run tests the program without one\n"
        )
    report = run(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_kernels.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    plot(report, arguments.out / "gpu_kernels.png")
    sys.stdout.write(table(report) + "\n")


if __name__ == "__main__":
    main()
