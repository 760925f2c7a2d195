"""The exchange by size and number of ranks, against a dense all-reduce of the same gradients, with bytes and passes counted.

    python benchmarks/exchange.py                                   # processes of this machine, over the loopback device
    sudo python benchmarks/exchange.py --bandwidth 1000             # every rank a host of its own, Mb/s per link

Timed is a whole compressed optimizer step (gradients are there, ``step()`` is called) beside ``all_reduce`` of one flat buffer, in turn.
What a rank does is also counted, because ranks that share the cores of a machine cannot show in seconds that their cost is flat in n:
bytes sent, collectives, and elements that its kernels pass over.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _common import RESULTS, machine_info, write_json


def worker(sizes: list[int], repeats: int, tensors: int, out: Path) -> None:
    """Measures all sizes on this rank; rank 0 writes the slowest rank's medians."""
    import torch
    import torch.distributed as dist

    from lightning_onebit.algorithms import OnebitAdam

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = []
    for elements in sizes:
        params = [torch.nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
        optimizer = OnebitAdam(params, lr=1e-4, freeze_step=1)
        flat = torch.randn(elements)
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        for _ in range(3):
            optimizer.step()
            for p in params:
                p.grad = torch.randn_like(p) * 1e-3
        seconds: dict[str, list[float]] = {"exchange": [], "local": [], "waiting": [], "all_reduce": []}
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            seconds["exchange"].append(time.perf_counter() - start)
            record = optimizer.ledger.last
            assert record is not None and not record.dense
            seconds["local"].append(record.compression_seconds)
            seconds["waiting"].append(record.communication_seconds)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(flat)
            seconds["all_reduce"].append(time.perf_counter() - start)
        mine = torch.tensor([statistics.median(values) for values in seconds.values()])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        row: dict[str, Any] = {"elements": elements, "ranks": size, "bytes_sent": record.bytes_sent}
        row |= {"dense_bytes": record.dense_bytes, "collectives": record.collectives}
        row |= {"control_collectives": record.control_collectives}
        row |= {f"{name}_seconds": float(value) for name, value in zip(seconds, mine, strict=True)}
        row["elements_passed_over"] = dict(passes(optimizer))
        rows.append(row)
        del optimizer, params, flat
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def passes(optimizer: Any) -> Counter[str]:
    """Elements that the kernels of one more step pass over, by kernel."""
    kernels, counted = optimizer._engine.kept.kernels, Counter[str]()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            call = getattr(kernels, name)
            if name not in ("compress", "reduce", "apply_adam", "grad_stats"):
                return call

            def watched(*args: Any, **kwargs: Any) -> Any:
                if name == "grad_stats":
                    counted[name] += sum(t.numel() for t in args[0])
                elif name == "reduce":
                    counted[name] += args[0].blocks_per_row * args[0].block_size
                else:
                    counted[name] += args[0].elements
                return call(*args, **kwargs)

            return watched

    optimizer._engine.kept.kernels = Watched()
    optimizer.step()
    optimizer._engine.kept.kernels = kernels
    return counted


def measure(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the ranks, over the loopback device or a shaped network."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--worker", str(out), "--sizes", *map(str, args.sizes)]
        command += ["--repeats", str(args.repeats), "--tensors", str(args.tensors)]
        if args.bandwidth:
            from _network import SlowNetwork

            with SlowNetwork(ranks, args.bandwidth) as network:
                network.launch(command, {"OMP_NUM_THREADS": threads}, args.timeout, Path(folder))
        else:
            _launch_here(command, ranks, threads, args.timeout)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def _launch_here(command: list[str], ranks: int, threads: str, timeout: float) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(ranks)]
    deadline = time.monotonic() + timeout
    try:
        for rank, process in enumerate(processes):
            if process.wait(max(0.1, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} of {ranks} ended with status {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def table(rows: list[dict[str, Any]]) -> str:
    """All rows as text."""
    head = f"{'ranks':>5} {'M elem.':>8} {'step ms':>9} {'local':>8} {'waiting':>8} {'all-reduce':>11} {'faster':>7}"
    head += f" {'MB sent':>8} {'dense MB':>9} {'coll.':>6} {'passes':>7}"
    lines = [head]
    for r in rows:
        passed = sum(n for name, n in r["elements_passed_over"].items()) / r["elements"]
        lines.append(
            f"{r['ranks']:>5} {r['elements'] / 1e6:>8.2f} {r['exchange_seconds'] * 1e3:>9.2f} {r['local_seconds'] * 1e3:>8.2f} "
            f"{r['waiting_seconds'] * 1e3:>8.2f} {r['all_reduce_seconds'] * 1e3:>11.2f} "
            f"{r['all_reduce_seconds'] / r['exchange_seconds']:>6.1f}x {r['bytes_sent'] / 1e6:>8.3f} {r['dense_bytes'] / 1e6:>9.2f} "
            f"{r['collectives'] + r['control_collectives']:>6} {passed:>7.2f}"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over size for each number of ranks; bytes and passes over ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, counts) = plt.subplots(1, 2, figsize=(10, 4))
    for k, ranks in enumerate(sorted({r["ranks"] for r in rows})):
        mine = [r for r in rows if r["ranks"] == ranks]
        x = [r["elements"] / 1e6 for r in mine]
        times.loglog(
            x, [r["exchange_seconds"] * 1e3 for r in mine], "o-", color=f"C{k}", label=f"{ranks} ranks, exchange"
        )
        times.loglog(x, [r["all_reduce_seconds"] * 1e3 for r in mine], "x--", color=f"C{k}", label="all-reduce")
    times.set_xlabel("million elements")
    times.set_ylabel("ms (median, slowest rank)")
    times.legend(fontsize=7)
    largest = [r for r in rows if r["elements"] == max(r["elements"] for r in rows)]
    ranks_axis = [r["ranks"] for r in largest]
    counts.plot(ranks_axis, [r["bytes_sent"] * 8 / r["elements"] for r in largest], "o-", label="bits sent per element")
    passed = [sum(r["elements_passed_over"].values()) / r["elements"] for r in largest]
    counts.plot(ranks_axis, passed, "s-", label="kernel passes over the elements")
    counts.set_ylim(bottom=0)
    counts.set_xlabel("ranks")
    counts.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[250_000, 1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--tensors", type=int, default=16, help="tensors that share the elements")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--bandwidth", type=float, help="Mb/s per link of a shaped network (needs root); without it: loopback"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per number of ranks")
    parser.add_argument("--name", default="exchange", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.sizes, args.repeats, args.tensors, args.worker)
        return
    if args.bandwidth:
        from _network import SlowNetwork

        if reason := SlowNetwork.requirement():
            parser.error(reason)
    rows = [row for ranks in args.ranks for row in measure(ranks, args)]
    print(table(rows))
    network = f"{args.bandwidth:g} Mb/s per link" if args.bandwidth else "loopback"
    write_json(args.out / f"{args.name}.json", {"machine": machine_info(), "network": network, "rows": rows})
    plot(rows, args.out / f"{args.name}.png")
    print(f"wrote {args.out / args.name}.json and .png")


if __name__ == "__main__":
    main()
