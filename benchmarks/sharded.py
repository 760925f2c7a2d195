"""Training steps of sharded models over a real slow network: FSDP2's hybrid sharding with AdamW against 1-bit Adam on its shards.

    sudo python benchmarks/sharded.py --hosts 2 --ranks-per-host 2 --bandwidth 1000

Every host is a network namespace with several ranks. The model is sharded over the ranks of a host, whose traffic stays on the
namespace's loopback and is not shaped, and replicated over the hosts, whose links are shaped with tbf. All methods train the same
transformer on the same batches and take their steps in turn (A B C A B C ...), so that a machine whose speed drifts drifts for all.
Layers stay gathered from forward to backward in all of them, as it is processors, not memory, that are scarce here. Reported are
medians, medians of the ratios of a turn, and bytes that a host's card has sent (counted by the kernel, TCP/IP headers included).

``local`` is our whole training step in which the exchange goes to copies in memory: computing, gathers within the host, kernels.
The floor of a compressed step is ``local`` plus the bytes that must cross over the bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

METHODS = ("none", "local", "hsdp", "hsdp_overlapped", "onebit", "onebit_backward")
LABELS = {
    "none": "no traffic between hosts, AdamW",
    "local": "no traffic between hosts, 1-bit Adam",
    "hsdp": "HSDP, AdamW",
    "hsdp_overlapped": "HSDP, AdamW, overlapped",
    "onebit": "1-bit Adam",
    "onebit_backward": "1-bit Adam, overlapped",
}
HSDP = ("hsdp", "hsdp_overlapped")
WARM_UP = 3  # steps: the dense one, the first touch of memory, gloo's connections
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass
class Setting:
    """What one rank measures."""

    methods: list[str]
    ranks_per_host: int
    width: int
    layers: int
    batch: int
    length: int
    steps: int
    megabits: float


# ----- worker: runs on every rank ------------------------------------------------------------------------------------------


class DenseAverage:
    """Averages the shards' gradients over the replicas in buckets, begun as backward fills them (torch alone).

    FSDP2's own all-reduce over the replicas blocks backward with gloo, which has no streams.
    """

    def __init__(self, parameters: Any, group: Any, bucket_bytes: int = 25 * 2**20) -> None:
        self.group, self.bucket_bytes = group, bucket_bytes
        self.filled: list[Any] = []
        self.pending: list[tuple[list[Any], Any, Any]] = []
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Any) -> None:
        self.filled.append(parameter.grad.to_local())
        if sum(grad.nbytes for grad in self.filled) >= self.bucket_bytes:
            self._send()

    def _send(self) -> None:
        import torch
        import torch.distributed as dist

        if self.filled:
            flat = torch.cat([grad.flatten() for grad in self.filled])
            self.pending.append((self.filled, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
            self.filled = []

    def wait(self) -> None:
        """Sends the rest and puts the means into the gradients."""
        self._send()
        for grads, flat, work in self.pending:
            work.wait()
            flat /= self.group.size()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
        self.pending = []


def _method(name: str, setting: Setting, mesh: Any) -> tuple[Callable[[Any, Any], None], Callable[[], dict[str, Any]]]:
    """A training step ``(x, y) -> None``, and a function that tells what it has learned about itself."""
    import torch
    from _common import echo_group, transformer
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy

    from lightning_onebit.algorithms import OnebitAdam
    from lightning_onebit.engine import ExchangeOptions

    model = transformer(setting.width, setting.layers)
    on = mesh if name == "hsdp" else mesh["shard"]
    for layer in model.body.layers:
        fully_shard(layer, mesh=on, reshard_after_forward=False)
    fully_shard(model, mesh=on)
    replicas = mesh["replicate"].get_group()

    def backward(x: Any, y: Any) -> None:
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    if name in ("local", "onebit", "onebit_backward"):
        group = echo_group(replicas.size()) if name == "local" else replicas
        overlap: Any = "backward" if name == "onebit_backward" else "step"
        exchange = ExchangeOptions(process_group=group, overlap=overlap)
        onebit = OnebitAdam(model.parameters(), lr=1e-4, freeze_step=1, exchange=exchange)

        def onebit_step(x: Any, y: Any) -> None:
            onebit.begin_backward()
            backward(x, y)
            onebit.step()
            onebit.zero_grad()

        def told() -> dict[str, Any]:
            record = onebit.ledger.last
            assert record is not None and not record.dense and record.bytes_sent
            seconds = {key: getattr(record, key) for key in ("compression_seconds", "communication_seconds")}
            return {"bytes_sent": record.bytes_sent, "collectives": record.collectives, **seconds}

        return onebit_step, told
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    average = DenseAverage(model.parameters(), replicas) if name == "hsdp_overlapped" else None

    def dense_step(x: Any, y: Any) -> None:
        backward(x, y)
        if average is not None:
            average.wait()
        optimizer.step()
        optimizer.zero_grad()

    return dense_step, dict


def _bandwidths(mesh: Any, elements: int) -> dict[str, float]:
    """Bits per second of an all-reduce within a host, and between hosts by all their ranks at once."""
    import torch
    import torch.distributed as dist

    found = {}
    for dimension, link in (("shard", "within"), ("replicate", "between")):
        group = mesh[dimension].get_group()
        ranks, sharing = group.size(), mesh["shard"].size() if link == "between" else 1
        flat = torch.ones(elements // mesh["shard"].size())
        seconds = []
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(flat, group=group)
            seconds.append(time.perf_counter() - start)
        found[link] = 8 * sharing * 2 * (ranks - 1) / ranks * flat.nbytes / statistics.median(seconds)
    return found


def worker(setting: Setting, out: Path) -> None:
    """Measures all methods on this rank; rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from _common import transformer
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (ranks // setting.ranks_per_host, setting.ranks_per_host)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(rank)
    elements = sum(p.numel() for p in transformer(setting.width, setting.layers).parameters())
    bandwidths = _bandwidths(mesh, elements)
    methods = {name: _method(name, setting, mesh) for name in setting.methods}
    times: dict[str, list[float]] = {name: [] for name in methods}
    crossed: dict[str, list[int]] = {name: [] for name in methods}
    for number in range(WARM_UP + setting.steps):
        x = torch.randint(0, 256, (setting.batch, setting.length + 1), generator=generator)
        for name, (step, _) in methods.items():
            dist.barrier()
            before, start = int(SENT.read_text()), time.perf_counter()
            step(x[:, :-1], x[:, 1:])
            dist.barrier()  # the step of a world ends with its last rank
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
                crossed[name].append(int(SENT.read_text()) - before)
        if rank == 0:
            print(
                f"step {number + 1}: { ({name: round(values[-1], 3) for name, values in times.items() if values}) }",
                flush=True,
            )
    facts = {name: told() | {"card_bytes": statistics.median(crossed[name])} for name, (_, told) in methods.items()}
    if rank == 0:
        result = {
            "hosts": shape[0],
            "elements": elements,
            "bandwidths": bandwidths,
            "step_seconds": {name: statistics.median(values) for name, values in times.items()},
            "all_step_seconds": times,
            "facts": facts,
        }
        out.write_text(json.dumps(result))
    dist.barrier()
    # optimizers hold process groups, whose threads must end before the interpreter does
    del methods, step
    gc.collect()
    dist.destroy_process_group()


# ----- driver --------------------------------------------------------------------------------------------------------------


def measure(setting: Setting, hosts: int, timeout: float, prefix: str = "onebit") -> dict[str, Any]:
    """Runs the ranks over a shaped network of their own."""
    from _network import SlowNetwork

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, SlowNetwork(hosts, setting.megabits, prefix) as network:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(setting)), "--out", str(out)]
        network.launch(command, {"OMP_NUM_THREADS": "1"}, timeout, Path(folder), setting.ranks_per_host)
        result: dict[str, Any] = json.loads(out.read_text())
    result.update(megabits=setting.megabits, setting=asdict(setting), congestion=network.congestion, load_before=load)
    result["floor"] = floor(result)
    return result


def floor(result: dict[str, Any]) -> dict[str, float]:
    """The faster of our steps against its floor and the faster HSDP step; the wire's time is that of the payload of all ranks of a host."""
    from _common import ratio

    steps, every, facts = result["step_seconds"], result["all_step_seconds"], result["facts"]
    ours = min((name for name in steps if name.startswith("onebit")), key=lambda name: steps[name], default=None)
    if ours is None or "local" not in steps:
        return {}
    wire = result["setting"]["ranks_per_host"] * facts[ours]["bytes_sent"] / (result["megabits"] * 1e6 / 8)
    over = statistics.median(a / (wire + b) for a, b in zip(every[ours], every["local"], strict=True))
    found = {"wire_seconds": wire, "floor_seconds": wire + steps["local"], "step_over_floor": over}
    if dense := min((name for name in HSDP if name in steps), key=lambda name: steps[name], default=None):
        found["hsdp_over_step"] = ratio(every, dense, ours)
    return found


def table(result: dict[str, Any]) -> str:
    """One network's results as text."""
    from _common import ratio

    steps, setting = result["step_seconds"], result["setting"]
    ranks = setting["ranks_per_host"]
    fastest = min((name for name in HSDP if name in steps), key=lambda name: steps[name], default=None)
    lines = [
        f"{result['hosts']} hosts of {ranks} ranks, {result['megabits']:g} Mb/s ({result['bandwidths']['between'] / 1e6:.0f} in an "
        f"all-reduce, {result['bandwidths']['within'] / 1e6:,.0f} within a host), {result['elements'] / 1e6:.1f} M parameters, "
        f"{ranks * setting['batch'] * setting['length']} tokens per host and step, load {result['load_before']:.1f} before",
        f"  {'method':<38}{'step ms':>9}{'MB of card':>12}{'MB counted':>12}{'HSDP / it':>11}",
    ]
    for name, seconds in steps.items():
        facts = result["facts"][name]
        counted = f"{ranks * facts['bytes_sent'] / 1e6:.2f}" if "bytes_sent" in facts and name != "local" else ""
        times = f"{ratio(result['all_step_seconds'], fastest, name):.2f}x" if fastest else ""
        lines.append(
            f"  {LABELS[name]:<38}{seconds * 1e3:>9.0f}{facts['card_bytes'] / 1e6:>12.2f}{counted:>12}{times:>11}"
        )
    if f := result["floor"]:
        lines.append(
            f"  the faster of our steps is {f['step_over_floor']:.2f}x its floor: {f['wire_seconds'] * 1e3:.0f} ms wire + "
            f"{steps['local'] * 1e3:.0f} ms local"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of step times by method, one panel per network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(6.4 * len(results), 3.2), squeeze=False, sharey=True)
    for axis, result in zip(axes[0], results, strict=True):
        steps = result["step_seconds"]
        colors = ["tab:blue" if n in HSDP else "tab:orange" if n.startswith("onebit") else "tab:gray" for n in steps]
        bars = axis.barh([LABELS[n] for n in steps], [1e3 * s for s in steps.values()], color=colors)
        axis.bar_label(bars, [f" {1e3 * s:,.0f} ms" for s in steps.values()], fontsize=8)
        axis.set_xlim(right=1.2e3 * max(steps.values()))
        axis.set_xlabel("ms per training step")
        ranks = result["setting"]["ranks_per_host"]
        axis.set_title(f"{result['hosts']} hosts of {ranks} ranks, {result['megabits']:g} Mb/s", fontsize=10)
    axes[0][0].invert_yaxis()  # shared
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--ranks-per-host", type=int, default=2, help="that shard the model")
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[1000.0], help="Mb/s per link")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--length", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each method")
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds per network")
    parser.add_argument("--name", default="sharded", help="of the result files")
    parser.add_argument("--prefix", default="onebit", help="of the namespaces' names; two runs at once need two")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.worker:
        worker(Setting(**json.loads(args.worker)), args.out)
        return
    from _common import machine_info, write_json
    from _network import SlowNetwork

    if reason := SlowNetwork.requirement():
        parser.error(reason)
    chosen = {key: getattr(args, key) for key in Setting.__dataclass_fields__ if key != "megabits"}
    results = []
    for hosts in args.hosts:
        for megabits in args.bandwidth:
            results.append(measure(Setting(**chosen, megabits=megabits), hosts, args.timeout, args.prefix))
            print(table(results[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / f"{args.name}.json", {"machine": machine_info(), "results": results})
    plot(results, args.out / f"{args.name}.png")
    print(f"wrote {args.out / args.name}.json and .png")


if __name__ == "__main__":
    main()
