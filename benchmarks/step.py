"""What a step costs without a slow network: the compressed step's local work, and the warm-up step against Lightning's ddp.

    python benchmarks/step.py local      # compressed 1-bit Adam step against torch.optim.AdamW(fused=True), one process
    python benchmarks/step.py local --algorithm onebit_lamb
    python benchmarks/step.py local --width 128 --layers 2         # 0.46 M parameters
    python benchmarks/step.py local --device cuda                  # the same on a GPU
    python benchmarks/step.py pair       # optimizer steps of 2 processes over loopback: DDP's average and AdamW against 1-bit Adam
    python benchmarks/step.py warmup     # training steps through the Trainer, 2 processes: ddp against the dense stage of onebit_adam

``local`` runs the whole optimizer step of a rank of 2 (``--ranks``) whose collectives are copies in memory: compress, server part (half of
the blocks from 2 streams), apply, and all of Python between them. Nothing is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _common import (
    RESULTS,
    echo_group,
    horizontal_bars,
    machine_info,
    medians,
    ratio,
    side_by_side,
    transformer,
    write_json,
)


def _model(width: int, layers: int, device: str = "cpu") -> Any:
    """A transformer of about ``12 * layers * width^2`` parameters, with gradients."""
    import torch

    net = transformer(width, layers, device)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return net


def local(
    threads: int,
    repeats: int,
    shape: tuple[int, int],
    bucket_mb: list[float],
    ranks: int,
    algorithm: str = "onebit_adam",
    device: str = "cpu",
) -> dict[str, Any]:
    """The compressed step of a transformer of some width and number of layers, in one process."""
    import torch

    from lightning_onebit.algorithms import OnebitAdam, OnebitLamb
    from lightning_onebit.engine import ExchangeOptions

    optimizer_class: Any = {"onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb}[algorithm]
    torch.set_num_threads(threads)
    candidates = {}
    elements = 0

    def timed(call: Any) -> Any:
        return call if device == "cpu" else lambda: (call(), torch.cuda.synchronize())

    base = _model(*shape, device)
    elements = sum(p.numel() for p in base.parameters())
    fused = torch.optim.AdamW(base.parameters(), lr=1e-4, fused=True)
    candidates["AdamW fused"] = timed(fused.step)
    copies = [torch.empty(elements, device=device), torch.empty(elements, device=device)]
    candidates["copy of the gradient"] = timed(lambda: copies[0].copy_(copies[1]))
    variants: dict[str, dict[str, Any]] = {
        "onebit step": {"state_dtype": "float32"},
        "onebit, bf16 state": {"state_dtype": "bfloat16"},
    }
    for size in bucket_mb:
        for name, options in variants.items():
            exchange = ExchangeOptions(process_group=echo_group(ranks), bucket_mb=size, kernels=device, **options)
            optimizer = optimizer_class(_model(*shape, device).parameters(), 1e-4, freeze_step=1, exchange=exchange)
            candidates[f"{name}, {size:g} MB buckets"] = timed(optimizer.step)
    seconds = side_by_side(candidates, repeats=repeats)
    ratios = {name: ratio(seconds, name, "AdamW fused") for name in candidates}
    return {
        "algorithm": algorithm,
        "elements": elements,
        "threads": threads,
        "ranks": ranks,
        "median_seconds": medians(seconds),
        "over_adamw_fused": ratios,
    }


def _pair_rank(rank: int, store: str, out: str, shape: tuple[int, int], repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from lightning_onebit.algorithms import OnebitAdam
    from lightning_onebit.engine import ExchangeOptions

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dense, ours, narrow = (_model(*shape) for _ in range(3))
    elements = sum(p.numel() for p in dense.parameters())
    torch.manual_seed(rank)
    for net in (dense, ours, narrow):
        for p in net.parameters():
            p.grad.normal_(std=1e-3)
    adamw = torch.optim.AdamW(dense.parameters(), lr=1e-4, fused=True)
    grads = torch.zeros(elements)
    buckets = grads.split(25 * 2**20 // 4)

    def average() -> None:
        """What DDP does for a step but for hooks: gradients into buckets of 25 MB, which are averaged; then AdamW."""
        torch.cat([p.grad.view(-1) for p in dense.parameters()], out=grads)
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        adamw.step()

    candidates = {"DDP's average, AdamW fused": average}
    for name, net, dtype in (("1-bit Adam", ours, "float32"), ("1-bit Adam, bf16 state", narrow, "bfloat16")):
        exchange = ExchangeOptions(state_dtype=dtype)
        candidates[name] = OnebitAdam(net.parameters(), 1e-4, freeze_step=1, refresh="never", exchange=exchange).step

    def together(call: Any) -> Any:
        return lambda: (dist.barrier(), call())

    floor = side_by_side({"barrier": dist.barrier}, repeats=repeats)
    seconds = side_by_side({name: together(call) for name, call in candidates.items()}, repeats=repeats)
    if rank == 0:
        result = {
            "elements": elements,
            "barrier_seconds": medians(floor)["barrier"],
            "median_seconds": medians(seconds),
        }
        result["over_ddp"] = {name: ratio(seconds, name, "DDP's average, AdamW fused") for name in candidates}
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def pair(shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Optimizer steps of two processes of one thread each, which meet over loopback."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result.json"
        mp.spawn(_pair_rank, (f"{folder}/store", out, shape, repeats), nprocs=2)
        return json.loads(Path(out).read_text())


def _train(strategy: str, out: Path, layers: int, steps: int) -> None:
    import lightning.pytorch as pl
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformer(512, layers)
            self.marks: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            return cross_entropy(self.net(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    import lightning_onebit as ob

    chosen: Any = strategy
    if strategy == "onebit_adam":
        chosen = ob.OnebitStrategy(freeze_step=10**6)
    data = torch.utils.data.TensorDataset(torch.randint(0, 256, (4 * steps, 65)))
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=chosen,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
    if trainer.is_global_zero:
        import resource

        gaps = [b - a for a, b in zip(module.marks[4:], module.marks[5:], strict=False)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        out.write_text(json.dumps({"seconds": gaps, "peak_bytes": peak}))


def warmup(layers: int, steps: int, turns: int) -> dict[str, Any]:
    """Alternates whole trainings by ddp and by onebit_adam's dense stage, 2 processes on this machine."""
    import statistics

    seconds: dict[str, list[float]] = {"ddp": [], "onebit_adam": []}
    peaks: dict[str, list[float]] = {"ddp": [], "onebit_adam": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for name in seconds:
                out = Path(folder) / f"{name}{turn}.json"
                command = [sys.executable, __file__, "train", "--strategy", name, "--out", str(out)]
                command += ["--layers", str(layers), "--steps", str(steps)]
                subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
                result = json.loads(out.read_text())
                seconds[name].append(statistics.median(result["seconds"]))
                peaks[name].append(result["peak_bytes"])
    return {
        "median_seconds": medians(seconds),
        "all_seconds": seconds,
        "onebit_over_ddp": ratio(seconds, "onebit_adam", "ddp"),
        "peak_bytes": medians(peaks),
        "peak_onebit_over_ddp": ratio(peaks, "onebit_adam", "ddp"),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["local", "pair", "warmup", "train"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="local, pair: of the transformer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="local")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ranks", type=int, default=2, help="local: of the world whose rank is measured")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--algorithm", choices=["onebit_adam", "onebit_lamb"], default="onebit_adam", help="local")
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[4.0, 16.0, 64.0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.algorithm != "onebit_adam" and args.what != "local":
        parser.error(f"--algorithm {args.algorithm} has no effect with {args.what!r}; leave it out")
    if args.what == "train":
        _train(args.strategy, args.out, args.layers, args.steps)
        return
    if args.what == "local":
        shape = args.width, args.layers
        result = local(args.threads, args.repeats, shape, args.bucket_mb, args.ranks, args.algorithm, args.device)
        print(f"{result['elements'] / 1e6:.1f} M parameters, {result['threads']} threads")
        for name, value in result["median_seconds"].items():
            print(f"  {name:<28}{value * 1e3:>9.2f} ms{result['over_adamw_fused'][name]:>8.2f}x AdamW fused")
        values = {name: value * 1e3 for name, value in result["median_seconds"].items()}
    elif args.what == "pair":
        result = pair((args.width, args.layers), args.repeats)
        print(f"{result['elements'] / 1e6:.2f} M parameters; a barrier takes {result['barrier_seconds'] * 1e3:.2f} ms")
        for name, value in result["median_seconds"].items():
            print(f"  {name:<28}{value * 1e3:>9.2f} ms{result['over_ddp'][name]:>8.2f}x")
        values = {name: value * 1e3 for name, value in result["median_seconds"].items()}
    else:
        result = warmup(args.layers, args.steps, args.turns)
        for name, value in result["median_seconds"].items():
            print(f"  {name:<14}{value * 1e3:>9.1f} ms per step{result['peak_bytes'][name] / 2**20:>9.0f} MiB peak")
        print(
            f"  onebit_adam / ddp: {result['onebit_over_ddp']:.3f} in time, {result['peak_onebit_over_ddp']:.3f} in memory"
        )
        values = {name: value * 1e3 for name, value in result["median_seconds"].items()}
    name = f"step_{args.what}" + ("_lamb" if args.algorithm == "onebit_lamb" else "")
    name += "_gpu" if args.device == "cuda" else ""
    name += f"_{args.width}x{args.layers}" if (args.width, args.layers) != (512, 8) else ""
    write_json(args.out / f"{name}.json", {"machine": machine_info(), **result})
    horizontal_bars(args.out / f"{name}.png", values, unit="ms per step (median)", title=f"step.py {args.what}")


if __name__ == "__main__":
    main()
