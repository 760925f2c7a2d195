"""The CPU kernels against the speed of memory, and a compressed step's local work against torch.optim.AdamW(fused=True).

    python benchmarks/kernels.py                  # about three minutes; all cores
    python benchmarks/kernels.py --threads 1      # another number of threads
    python benchmarks/kernels.py --no-kernels     # only the step against AdamW

Two tables, each measured side by side in one process, all candidates in turn in every round:

* **kernels**: every operation of the compiled backend, of the reference (plain torch) and of the Numba prototype
  (``_numba_kernels.py``), in GB/s and as a share of a memory copy of the same round. Bytes are counted from the tensors, each input
  read once and each output written once; a copy counts 8 bytes per element.
* **step**: what a compressed 1-bit Adam step computes on a rank of 2, everything but waiting for the network (gradient statistics,
  compress, server part for half of the blocks from 2 streams, apply), over fused AdamW on tensors of the same shapes with the same
  threads; with state in fp32, with denominators in bf16 and with residuals in bf16 besides (``state_dtype="bfloat16"``). Beside it, torch
  operations that do nothing but read and write the same memory, bits aside (sum, add_, mul_, add_). Once for one tensor, once for the
  shapes of a transformer. The steps go through the buckets as the exchange does. Of each candidate it says how many bytes it reads: a
  processor whose reads are the limit takes time in proportion to them.

Prints the tables and writes ``kernels.json`` and ``kernels.png`` into ``--out``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import RESULTS, machine_info, medians, ratio, side_by_side, write_json
from torch import Tensor

from lightning_onebit.comm import Bucket, plan_buckets
from lightning_onebit.kernels import KernelBackend, Packed, Residual, get_backend

BLOCK = 2048
RANKS = 2
BITS = 1 / 8 + 4 / BLOCK  # bytes of bits and scale, per element
TARGET, STRETCH = 1.25, 1.0

try:
    import _numba_kernels as numba_kernels
except ImportError:
    numba_kernels = None  # the prototype's rows are left out


def versions() -> dict[str, Any]:
    """Compiler, Numba and the state of the machine, beside what ``machine_info`` says."""
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0]) or "c++"
    line = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
    found = {"compiler": line[0] if line else "none", "load_average": os.getloadavg()}
    if numba_kernels is not None:
        found["numba"] = numba_kernels.numba.__version__
    return found


# ----- kernels -------------------------------------------------------------------------------------------------------------------


class Case:
    """One bucket of full blocks with everything that the operations read and write."""

    def __init__(self, elements: int) -> None:
        plan = plan_buckets(
            [elements], block_size=BLOCK, world_size=8, bucket_elements=2**40, device=torch.device("cpu")
        )
        (self.bucket,) = plan.buckets
        n, blocks = self.bucket.elements, self.bucket.blocks
        self.g, self.x, self.out = torch.randn(n), torch.randn(n), torch.empty(n)
        self.e, self.m, self.r = torch.zeros(n), torch.randn(n), torch.rand(n) + 1.0
        self.deferred = Residual(self.e, torch.zeros(blocks))
        self.g16 = self.g.bfloat16()
        self.old, self.sent = Packed.empty(1, blocks, BLOCK), Packed.empty(1, blocks, BLOCK)
        self.old.words.random_(-(2**31), 2**31 - 1)
        self.old.scales.fill_(1e-3)
        self.a, self.b = torch.full((blocks,), 0.9), torch.full((blocks,), 0.1)
        self.v, self.factors = torch.rand(n), torch.full((8, blocks), 0.5)
        self.bits = Packed.empty(1, blocks, BLOCK, has_scales=False)
        self.live = torch.full((blocks, BLOCK // 32), -1, dtype=torch.int32)
        self.decay, self.alpha = torch.full((blocks,), 1 - 1e-6), torch.full((blocks,), 1e-4)

    def operations(self, kernels: KernelBackend) -> dict[str, tuple[float, Callable[[], Any]]]:
        """Name -> bytes per element of the bucket, and the call."""
        bucket, blocks = self.bucket, self.bucket.blocks

        def compress(m: Any, g: Any, r: Any = None, e: Any = self.deferred) -> Callable[[], Any]:
            return lambda: kernels.compress(bucket, 0, blocks, a=self.a, m=m, b=self.b, g=g, e=e, out=self.sent, r=r)

        def apply(r: Any) -> Callable[[], Any]:
            return lambda: kernels.apply_adam(bucket, [self.x], self.old, r, self.decay, self.alpha)

        def reduce(rows: int) -> Callable[[], Any]:
            chunk = blocks // rows
            received, reply = Packed.empty(rows, chunk, BLOCK), Packed.empty(1, chunk, BLOCK)
            d = Residual(torch.zeros(chunk * BLOCK), torch.zeros(chunk))
            return lambda: kernels.reduce(received, bucket.lengths[:chunk], d, reply, 1 / rows)

        def vote(rows: int) -> Callable[[], Any]:
            chunk = blocks // rows
            received = Packed.empty(rows, chunk, BLOCK, has_scales=False)
            carry, reply = torch.zeros(chunk * BLOCK), torch.zeros((chunk, BLOCK // 32), dtype=torch.int32)
            return lambda: kernels.vote(received, bucket.lengths[:chunk], (1, 2, 3), 0, reply, carry)

        return {
            "grad_stats": (4, lambda: kernels.grad_stats([self.g])),
            "compress, preconditioned": (16 + 2 * BITS, compress(self.old, [self.g], self.r)),
            "compress, bf16 denominators": (14 + 2 * BITS, compress(self.old, [self.g], self.r.bfloat16())),
            "compress, nothing pending": (16 + 2 * BITS, compress(self.old, [self.g], self.r, self.e)),
            "compress": (12 + 2 * BITS, compress(self.old, [self.g])),
            "compress, bf16 gradient": (10 + 2 * BITS, compress(self.old, [self.g16])),
            "compress, fp32 momentum": (16 + BITS, compress(self.m, [self.g])),
            "reduce, 2 ranks": (8 / 2 + 1.5 * BITS, reduce(2)),
            "reduce, 8 ranks": (8 / 8 + 1.125 * BITS, reduce(8)),
            "apply_adam, preconditioned": (8 + BITS, apply(None)),
            "apply_adam": (12 + BITS, apply(self.r)),
            "lamb_update": (
                16 + 2 * BITS,
                lambda: kernels.lamb_update(bucket, [self.x], self.old, self.sent, self.r, self.v, self.factors),
            ),
            "lamb_apply": (
                12 + BITS,
                lambda: kernels.lamb_apply(bucket, [self.x], self.old, self.r, self.alpha, self.alpha, self.alpha),
            ),
            "local_step": (
                36,
                lambda: kernels.local_step(
                    bucket, [self.x], [self.g], self.m, self.e, self.r, self.v, self.factors[:5]
                ),
            ),
            "sample": (
                20 + 1 / 8,
                lambda: kernels.sample(
                    *(bucket, 0, blocks),
                    **dict(
                        factors=self.factors[:5],
                        g=[self.g],
                        m=self.m,
                        a=self.v,
                        key=(1, 2, 3),
                        first_block=0,
                        out=self.bits,
                    ),
                ),
            ),
            "vote, 2 ranks": (8 / 2 + 1.5 / 8, vote(2)),
            "apply_votes": (
                8 + 2 / 8,
                lambda: kernels.apply_votes(
                    bucket, [self.x], self.bits.words.view(blocks, -1), self.live, self.decay, self.alpha
                ),
            ),
            "unpack": (4 + BITS, lambda: kernels.unpack(self.old, bucket.lengths, self.out)),
            "gather": (8, lambda: kernels.gather(bucket, [self.x], self.out)),
            "scatter": (8, lambda: kernels.scatter(bucket, self.out, [self.x])),
        }

    def prototype(self, threads: int) -> dict[str, tuple[float, Callable[[], Any]]]:
        """The operations that the Numba prototype has."""
        c = self
        return {
            "compress": (
                12 + 2 * BITS,
                lambda: numba_kernels.compress(c.a, c.old, c.b, c.g, c.e, c.sent, threads),
            ),
            "apply_adam": (12 + BITS, lambda: numba_kernels.apply_adam(c.x, c.old, c.r, c.decay, c.alpha, threads)),
        }


def measure_kernels(elements: int, threads: int, repeats: int) -> dict[str, Any]:
    """Seconds, GB/s and share of the copy's speed of every operation."""
    case = Case(elements)
    source, target = torch.randn(elements), torch.empty(elements)
    backends = {"cpu": case.operations(get_backend("cpu", "cpu"))}
    if numba_kernels is not None:
        backends["numba"] = case.prototype(threads)
        for _, call in backends["numba"].values():
            call()
        torch.set_num_threads(threads)  # Numba's first call sets the OpenMP runtime that torch uses to all cores
    table: dict[str, Any] = {}

    def add(backends: dict[str, dict[str, tuple[float, Callable[[], Any]]]], repeats: int) -> None:
        calls = {f"{name}/{op}": call for name, ops in backends.items() for op, (_, call) in ops.items()}
        seconds = side_by_side({"copy": lambda: target.copy_(source), **calls}, repeats=repeats, warm_up=2)
        middle = medians(seconds)
        for name, ops in backends.items():
            for op, (size, _) in ops.items():
                key = f"{name}/{op}"
                table[key] = {
                    "seconds": middle[key],
                    "bytes_per_element": size,
                    "gb_per_second": size * elements / middle[key] / 1e9,
                    "share_of_copy_speed": (size / 8) / ratio(seconds, key, "copy"),
                }
        table.setdefault("copy", {"seconds": middle["copy"], "gb_per_second": 8 * elements / middle["copy"] / 1e9})

    add(backends, repeats)
    add({"reference": case.operations(get_backend("reference", "cpu"))}, max(3, repeats // 5))
    if torch.get_num_threads() != threads:
        raise RuntimeError(f"measured with {torch.get_num_threads()} threads instead of {threads}")
    return {"elements": elements, "table": table}


# ----- the step ------------------------------------------------------------------------------------------------------------------


def transformer_shapes(width: int = 512, layers: int = 7, vocabulary: int = 5000) -> list[tuple[int, ...]]:
    """Parameters of a GPT-like model of 25 M elements."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (64, width), *(block * layers), (width,), (width,)]


class Step:
    """The local work of one compressed step of rank 0 of 2, over all buckets."""

    parts = ("grad_stats", "compress", "reduce", "apply_adam")

    def __init__(
        self,
        kernels: KernelBackend,
        gradients: Sequence[Tensor],
        bucket_mb: float,
        denominators: torch.dtype = torch.float32,
        residuals: torch.dtype = torch.float32,
        deferred: bool = True,
    ) -> None:
        self.kernels = kernels
        self.gradients = gradients
        self.denominators, self.residuals, self.deferred = denominators, residuals, deferred
        flat = [g.reshape(-1) for g in gradients]
        weights = [torch.randn_like(g) for g in flat]
        plan = plan_buckets(
            [g.numel() for g in flat],
            block_size=BLOCK,
            world_size=RANKS,
            bucket_elements=int(bucket_mb * 2**20 / 4),
            device=torch.device("cpu"),
        )
        self.work = [self._bucket(bucket, flat, weights) for bucket in plan.buckets]
        self.seconds: dict[str, list[float]] = {part: [] for part in self.parts}

    def _bucket(self, bucket: Bucket, flat: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Any]:
        n, blocks, chunk = bucket.elements, bucket.blocks, bucket.blocks // RANKS
        momentum = Packed.empty(RANKS, chunk, BLOCK)
        momentum.words.random_(-(2**31), 2**31 - 1)
        momentum.scales.fill_(1e-3)
        return {
            "bucket": bucket,
            "gradients": flat,
            "weights": weights,
            "momentum": momentum,
            "sent": Packed.empty(RANKS, chunk, BLOCK),
            "lengths": bucket.lengths[:chunk],
            "e": self._residual(blocks),
            "d": self._residual(chunk),
            "r": (torch.rand(n) + 1.0).to(self.denominators),
            "a": torch.full((blocks,), 0.9),
            "b": torch.full((blocks,), 0.1),
            "decay": torch.full((blocks,), 1 - 1e-6),
            "alpha": torch.full((blocks,), 1e-4),
        }

    def _residual(self, blocks: int) -> Residual:
        """As an optimizer has it, full blocks' subtraction is left to the next step; or every step goes over them once more."""
        made = self.kernels.residual(blocks, BLOCK, self.residuals, torch.device("cpu"))
        return made if self.deferred else Residual(made.values)

    @property
    def reads(self) -> float:
        """Bytes per element: gradient twice, denominators, residuals, weights, and bits of the momentum, of all rows and of the reply."""
        residual = self.residuals.itemsize * (1 + 1 / RANKS)
        return 4 + 4 + self.denominators.itemsize + residual + 4 + 3 * BITS

    def __call__(self) -> None:
        """One step; what its parts took is added to ``seconds``."""
        clock, spent = time.perf_counter, dict.fromkeys(self.parts, 0.0)
        start = clock()
        self.kernels.grad_stats(self.gradients)
        spent["grad_stats"] = clock() - start
        for w in self.work:
            bucket: Bucket = w["bucket"]
            start = clock()
            spans = bucket.bind(w["gradients"].__getitem__)
            factors, out = {"a": w["a"], "m": w["momentum"], "b": w["b"], "r": w["r"]}, w["sent"]
            self.kernels.compress(bucket, 0, bucket.blocks, g=spans, e=w["e"], out=out, **factors)
            compressed = clock()
            # what the rank sends has the shape of what it receives, and its reply that of a row of the new momentum
            self.kernels.reduce(w["sent"], w["lengths"], w["d"], w["momentum"].narrow(0, 1), 1 / RANKS)
            reduced = clock()
            spans = bucket.bind(w["weights"].__getitem__)
            self.kernels.apply_adam(bucket, spans, w["momentum"], None, w["decay"], w["alpha"])
            spent["compress"] += compressed - start
            spent["reduce"] += reduced - compressed
            spent["apply_adam"] += clock() - reduced
        for part in self.parts:
            self.seconds[part].append(spent[part])


def statistics_as_gradients_arrive(kernels: KernelBackend, gradients: Sequence[Tensor]) -> float:
    """Seconds for ``grad_stats`` of each gradient right after it was written, as in a hook of backward."""
    spent = 0.0
    sources = [g.clone() for g in gradients]
    for gradient, source in zip(gradients, sources, strict=True):
        gradient.copy_(source)
        start = time.perf_counter()
        kernels.grad_stats([gradient])
        spent += time.perf_counter() - start
    return spent


def measure_step(shapes: Sequence[tuple[int, ...]], repeats: int, bucket_mb: float) -> dict[str, Any]:
    """Medians and ratios to fused AdamW of the compressed step, with torch's threads and with the kernels' own."""
    kernels: Any = get_backend("cpu", "cpu")
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    gradients = [p.grad for p in parameters if p.grad is not None]
    adamw = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
    step, own = Step(kernels, gradients, bucket_mb), Step(kernels, gradients, bucket_mb)
    short = {
        "onebit, nothing pending": Step(kernels, gradients, bucket_mb, deferred=False),
        "onebit, bf16 denominators": Step(kernels, gradients, bucket_mb, torch.bfloat16),
        "onebit, bf16 denominators, residuals": Step(kernels, gradients, bucket_mb, torch.bfloat16, torch.bfloat16),
    }

    def own_threads() -> None:
        kernels._library.onebit_use_openmp(0)
        own()
        kernels._library.onebit_use_openmp(1)

    elements = sum(p.numel() for p in parameters)
    g, e, x, r, d = (torch.randn(size) for size in (elements, elements, elements, elements, elements // RANKS))

    def same_memory() -> None:
        g.sum()
        e.addcmul_(g, r, value=1e-9)
        d.mul_(1.0)
        x.mul_(1.0)

    warm_up = 3
    candidates = {
        "adamw_fused": adamw.step,
        "onebit": step,
        **short,
        "onebit, own helper threads": own_threads,
        "bare passes over the same memory": same_memory,
    }
    seconds = side_by_side(candidates, repeats=repeats, warm_up=warm_up)
    parts = {name: statistics.median(values[warm_up:]) for name, values in step.seconds.items()}
    hot = statistics.median(statistics_as_gradients_arrive(kernels, gradients) for _ in range(5))

    def without_statistics(name: str, of: Step) -> float:
        rounds = zip(seconds[name], of.seconds["grad_stats"][warm_up:], seconds["adamw_fused"], strict=True)
        return statistics.median((total - stats) / base for total, stats, base in rounds)

    steps = {"onebit": step, **short}
    return {
        "elements": elements,
        "tensors": len(parameters),
        "median_seconds": medians(seconds),
        "parts_median_seconds": parts,
        "grad_stats_as_gradients_arrive_seconds": hot,
        "over_adamw_fused": {name: ratio(seconds, name, "adamw_fused") for name in candidates},
        "over_adamw_fused_without_grad_stats": {name: without_statistics(name, of) for name, of in steps.items()},
        "bytes_read_per_element": {"adamw_fused": 16, **{name: of.reads for name, of in steps.items()}},
    }


# ----- output --------------------------------------------------------------------------------------------------------------------


def print_kernels(found: dict[str, Any]) -> None:
    """The first table."""
    table = found["table"]
    print(f"\nkernels, {found['elements'] / 1e6:.1f} M elements, memory copy {table['copy']['gb_per_second']:.1f} GB/s")
    print(f"{'operation':28s} {'B/element':>9s} {'cpu GB/s':>9s} {'of copy':>8s} {'numba':>8s} {'reference':>10s}")
    for key, row in table.items():
        backend, _, op = key.partition("/")
        if backend != "cpu":
            continue

        def share(name: str, op: str = op) -> str:
            other = table.get(f"{name}/{op}")
            return f"{other['share_of_copy_speed']:.3f}" if other else "-"

        print(
            f"{op:28s} {row['bytes_per_element']:9.2f} {row['gb_per_second']:9.1f} {row['share_of_copy_speed']:8.2f} "
            f"{share('numba'):>8s} {share('reference'):>10s}"
        )


def print_step(title: str, found: dict[str, Any]) -> None:
    """A block of the second table."""
    print(f"\nstep, {title}: {found['elements'] / 1e6:.1f} M elements in {found['tensors']} tensors")
    reads, without = found["bytes_read_per_element"], found["over_adamw_fused_without_grad_stats"]
    for name, seconds in found["median_seconds"].items():
        line = f"  {name:36s} {seconds * 1e3:8.2f} ms   {found['over_adamw_fused'][name]:.3f} x AdamW fused"
        if name in without:
            line += f", {without[name]:.3f} without grad_stats"
        if name in reads:
            line += f"; reads {reads[name]:.1f} B/element, {reads[name] * found['elements'] / seconds / 1e9:.1f} GB/s"
        print(line)
    for name, seconds in found["parts_median_seconds"].items():
        print(f"    {name:34s} {seconds * 1e3:8.2f} ms")
    print(f"  grad_stats as gradients arrive       {found['grad_stats_as_gradients_arrive_seconds'] * 1e3:8.2f} ms")


def plot(result: dict[str, Any], path: Path) -> None:
    """Shares of the copy's speed, and the parts of the step beside AdamW."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = 2 if "kernels" in result else 1
    figure, axes = plt.subplots(1, panels, figsize=(6.5 * panels, 4.2), squeeze=False)
    axis = axes[0][-1]
    for row, found in enumerate(result["steps"].values()):
        # medians of parts do not add up to the median of the whole: the parts share out the whole's ratio
        whole, left = found["over_adamw_fused"]["onebit"], 0.0
        total = sum(found["parts_median_seconds"].values())
        axis.barh(2 * row, 1.0, color="tab:gray", label="AdamW fused" if row == 0 else None)
        for k, (part, seconds) in enumerate(found["parts_median_seconds"].items()):
            label = part if row == 0 else None
            axis.barh(2 * row + 1, seconds / total * whole, left=left, color=f"C{k}", label=label)
            left += seconds / total * whole
        axis.text(left, 2 * row + 1, f" {left:.2f}", va="center", fontsize=8)
    ticks = [f"{kind}\n{title}" for title in result["steps"] for kind in ("AdamW", "1-bit step")]
    axis.set_yticks(range(len(ticks)), ticks, fontsize=8)
    axis.axvline(TARGET, color="k", lw=0.8, ls="--")
    axis.set_xlabel(f"time over AdamW fused (target {TARGET}), {result['threads']} threads")
    axis.invert_yaxis()
    axis.set_xlim(right=1.15 * max(axis.get_xlim()[1], TARGET))
    axis.legend(fontsize=8)
    if panels == 2:
        table = result["kernels"]["table"]
        axis = axes[0][0]
        names = [key.split("/")[1] for key in table if key.startswith("cpu/")]
        backends = [name for name in ("cpu", "numba", "reference") if any(key.startswith(f"{name}/") for key in table)]
        height = 0.8 / len(backends)
        for k, backend in enumerate(backends):
            rows = [(i, table[f"{backend}/{op}"]) for i, op in enumerate(names) if f"{backend}/{op}" in table]
            shares = [row["share_of_copy_speed"] for _, row in rows]
            places = [i + (k - (len(backends) - 1) / 2) * height for i, _ in rows]
            axis.barh(places, shares, height, label=backend, color=f"C{k}")
        axis.axvline(1.0, color="k", lw=0.8, ls="--")
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("bytes per second over those of a memory copy")
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the one-tensor step")
    parser.add_argument("--kernel-elements", type=int, default=16 * 2**20, help="of the bucket of the kernel table")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--bucket-mb", type=float, default=16.0, help="fp32 megabytes of a bucket of the step")
    parser.add_argument("--no-kernels", action="store_true", help="only the step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="kernels", help="of the result files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "machine": {**machine_info(), **versions()},
        "threads": args.threads,
        "block_size": BLOCK,
        "bucket_mb": args.bucket_mb,
        "repeats": args.repeats,
        "steps": {},
    }
    for title, shapes in (("one tensor", [(args.elements,)]), ("transformer", transformer_shapes())):
        result["steps"][title] = measure_step(shapes, args.repeats, args.bucket_mb)
        print_step(title, result["steps"][title])
    if not args.no_kernels:
        result["kernels"] = measure_kernels(args.kernel_elements, args.threads, max(5, args.repeats // 3))
        print_kernels(result["kernels"])
    write_json(args.out / f"{args.name}.json", result)
    plot(result, args.out / f"{args.name}.png")
    print(f"\nwrote {args.out / args.name}.json and .png")


if __name__ == "__main__":
    main()
