"""Whole training steps over a real slow network: 1-bit Adam and 0/1 Adam against DDP, its fp16 hook, PowerSGD and DeepSpeed's 1-bit Adam.

    sudo python benchmarks/slow_network.py --hosts 2 4 --bandwidth 1000 100
    sudo python benchmarks/slow_network.py --deepspeed-python /path/to/python ...     # a Python that has deepspeed==0.19.6
    sudo python benchmarks/slow_network.py --device cuda --hosts 2 --bandwidth 1000   # the hosts share this machine's first GPU
    python benchmarks/slow_network.py --plot results/a.json results/b.json --name both  # one figure of several results

Sets up one network namespace per host, joined by a switch and shaped with tbf, and always tears it down. All methods train the
same transformer on the same batches in one process per host, one after the other in every round, so that a machine whose speed
drifts drifts for all of them. DeepSpeed runs afterwards in processes of its own environment. Reported are medians, and ratios to DDP.

``zero_one4`` and ``zero_one16`` are 0/1 Adam's local steps, synchronised by every 4th and 16th: the mean over such a cycle. The floor
of the exchange is bytes over bandwidth plus local cost: the same optimizer's step in a world whose collectives are copies in memory,
taken by all hosts at once, as they take the real one (hosts that share cores, or a GPU, share them in both).

With ``--device cuda`` model and gradients live on the GPU and travel over gloo through the host's memory, as NCCL refuses two ranks on
one GPU; the all-reduce takes a flat tensor that lies there.
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

METHODS = ("none", "ddp", "ddp_fp16", "powersgd1", "powersgd2", "powersgd4", "onebit", "onebit_backward")
METHODS += ("zero_one4", "zero_one16")
LABELS = {"none": "no communication", "ddp": "DDP", "ddp_fp16": "DDP, fp16 hook", "onebit": "1-bit Adam"}
LABELS |= {f"powersgd{rank}": f"PowerSGD, rank {rank}" for rank in (1, 2, 4)}
LABELS |= {"onebit_backward": "1-bit Adam, overlapped", "deepspeed": "DeepSpeed OnebitAdam*"}
LABELS |= {f"zero_one{gap}": f"0/1 Adam, sync every {gap}" for gap in (4, 16)}


@dataclass
class Setting:
    """What one worker measures."""

    methods: list[str]
    width: int
    layers: int
    batch: int
    length: int
    rounds: int
    steps: int
    bucket_mb: float | None
    megabits: float
    device: str = "cpu"


# ----- worker: runs on every host ------------------------------------------------------------------------------------------


def _now(setting: Setting) -> float:
    """Seconds, once a device has done what it was given."""
    import torch

    if setting.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _method(name: str, setting: Setting) -> tuple[Callable[[Any, Any], None], Callable[[], dict[str, Any]]]:
    """A training step ``(x, y) -> None`` and a function that tells what it has learned about itself, which ends the method.

    1-bit Adam's is a collective: it takes as many steps again in which all hosts begin the exchange together, as they begin the
    all-reduce, so that waiting for a host whose backward was late does not count as exchange.
    """
    import torch
    import torch.distributed as dist
    from _common import transformer
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    model = transformer(setting.width, setting.layers, setting.device)

    def loss(net: Any, x: Any, y: Any) -> Any:
        return cross_entropy(net(x).flatten(0, 1), y.flatten())

    if name == "deepspeed":
        from _deepspeed_peer import make_step

        return make_step(model, loss, freeze_step=2)
    nothing: Callable[[], dict[str, Any]] = dict
    if name.startswith("onebit"):
        from lightning_onebit.algorithms import OnebitAdam
        from lightning_onebit.engine import ExchangeOptions

        overlap: Any = "backward" if name == "onebit_backward" else "step"
        exchange = ExchangeOptions(bucket_mb=setting.bucket_mb, overlap=overlap)
        onebit = OnebitAdam(model.parameters(), lr=1e-4, freeze_step=1, exchange=exchange)
        seconds: dict[str, list[float]] = {}
        inputs: list[tuple[Any, Any]] = []

        def onebit_step(x: Any, y: Any, together: bool = False) -> None:
            onebit.begin_backward()
            loss(model, x, y).backward()
            if together:
                _now(setting)
                dist.barrier()
            start = _now(setting)
            onebit.step()
            spent = _now(setting) - start
            onebit.zero_grad()
            inputs[:] = [(x, y)]
            record = onebit.ledger.last
            assert record is not None
            kind = "" if together else "in_step_"
            seconds.setdefault(f"{kind}exchange_seconds", []).append(spent)
            seconds.setdefault(f"{kind}kernel_seconds", []).append(record.compression_seconds)
            seconds.setdefault(f"{kind}waiting_seconds", []).append(record.communication_seconds)

        def told() -> dict[str, Any]:
            nonlocal onebit
            if overlap == "step":
                for _ in range(2 + setting.steps):
                    onebit_step(*inputs[0], together=True)
            record = onebit.ledger.last
            assert record is not None and not record.dense and record.bytes_sent
            if overlap == "step":
                del onebit
                seconds["local_seconds"] = _local_seconds(model, setting)
            return {
                "bytes_sent": record.bytes_sent,
                "collectives": record.collectives,
                # the first steps are the dense one and the first touch of memory
                **{key: statistics.median(values[2:]) for key, values in seconds.items()},
            }

        return onebit_step, told
    if name.startswith("zero_one"):
        from lightning_onebit.algorithms import LocalSteps, ZeroOneAdam
        from lightning_onebit.engine import ExchangeOptions

        gap = _cycle(name)
        sent: list[tuple[int, bool]] = []
        # the gap doubles with every step after the first two, up to its bound
        zero_one = ZeroOneAdam(
            model.parameters(),
            1e-4,
            freeze_step=1,
            local_steps=LocalSteps(max_gap=gap, double_every=1),
            exchange=ExchangeOptions(bucket_mb=setting.bucket_mb),
        )

        def local_step(x: Any, y: Any) -> None:
            zero_one.begin_backward()
            loss(model, x, y).backward()
            zero_one.step()
            zero_one.zero_grad()
            record = zero_one.ledger.last
            assert record is not None
            sent.append((record.bytes_sent, record.dense))

        def volume() -> dict[str, Any]:
            cycle = sent[-gap:]
            assert [nbytes > 0 for nbytes, _ in cycle] == [False] * (gap - 1) + [True]
            assert not any(dense for _, dense in cycle)
            return {"bytes_sent": statistics.fmean(nbytes for nbytes, _ in cycle)}

        return local_step, volume
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    net: Any = model
    if name != "none":
        net = DistributedDataParallel(model)
    if name == "ddp_fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        net.register_comm_hook(None, fp16_compress_hook)
    if name.startswith("powersgd"):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        def one_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            # Its later rounds are issued by gloo's threads as earlier ones complete: with two buckets under way, in another order
            # on every rank, which hangs or breaks off. So each bucket is waited for.
            future = powerSGD_hook(state, bucket)
            future.wait()
            return future

        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=int(name[8:]), start_powerSGD_iter=2)
        net.register_comm_hook(state, one_at_a_time)

    def dense_step(x: Any, y: Any) -> None:
        loss(net, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return dense_step, nothing


def _cycle(name: str) -> int:
    """Steps after which a method begins again; its step time is their mean."""
    return int(name[8:]) if name.startswith("zero_one") else 1


def _local_seconds(model: Any, setting: Setting) -> list[float]:
    """1-bit Adam's compressed steps of a rank of this world without a network, taken by all hosts at once. Collective."""
    import torch
    import torch.distributed as dist
    from _common import echo_group

    from lightning_onebit.algorithms import OnebitAdam
    from lightning_onebit.engine import ExchangeOptions

    exchange = ExchangeOptions(bucket_mb=setting.bucket_mb, process_group=echo_group(dist.get_world_size()))
    alone = OnebitAdam(model.parameters(), 1e-4, freeze_step=1, exchange=exchange)
    seconds = []
    for _ in range(2 + setting.steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        _now(setting)
        dist.barrier()
        start = _now(setting)
        alone.step()
        seconds.append(_now(setting) - start)
    return seconds


def worker(setting: Setting, out: Path) -> None:
    """Measures all methods on this host; rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from _common import transformer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    elements = sum(p.numel() for p in transformer(setting.width, setting.layers).parameters())
    flat = torch.randn(elements, generator=generator).to(setting.device)
    reduce_seconds = []
    for _ in range(3):
        dist.barrier()
        start = _now(setting)
        dist.all_reduce(flat)
        reduce_seconds.append(_now(setting) - start)
    del flat
    times: dict[str, list[float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    # One method at a time is alive (memory), rounds interleave at the level of methods.
    for turn in range(setting.rounds):
        for name in setting.methods:
            step, told = _method(name, setting)
            cycle = _cycle(name)
            # DDP rebuilds its buckets, PowerSGD and 1-bit Adam take their dense steps, 0/1 Adam's gap grows
            warm = 4 if cycle == 1 else 2 + cycle
            seconds: list[float] = []
            for _ in range(warm + cycle * max(1, setting.steps // cycle)):
                x = torch.randint(0, 256, (setting.batch, setting.length + 1), generator=generator).to(setting.device)
                dist.barrier()
                start = _now(setting)
                step(x[:, :-1], x[:, 1:])
                seconds.append(_now(setting) - start)
            cycles = [seconds[i : i + cycle] for i in range(warm, len(seconds), cycle)]
            times.setdefault(name, []).extend(map(statistics.fmean, cycles))
            facts[name] = told()
            if rank == 0:
                median = statistics.median(times[name])
                print(f"round {turn + 1}/{setting.rounds} {name}: {median * 1e3:.0f} ms", flush=True)
    if rank == 0:
        result = {
            "hosts": size,
            "elements": elements,
            "all_reduce_seconds": statistics.median(reduce_seconds),
            "step_seconds": {name: statistics.median(values) for name, values in times.items()},
            "all_step_seconds": times,
            "facts": facts,
        }
        out.write_text(json.dumps(result))
    dist.barrier()
    # the last method's optimizer and model hold process groups, whose threads must end before the interpreter does
    del step, told
    gc.collect()
    dist.destroy_process_group()


# ----- driver --------------------------------------------------------------------------------------------------------------


def measure(
    setting: Setting, hosts: int, timeout: float, deepspeed_python: str | None = None, prefix: str = "onebit"
) -> dict[str, Any]:
    """Runs the workers over a shaped network of their own, then those of DeepSpeed's environment if there is one."""
    from _network import SlowNetwork

    with tempfile.TemporaryDirectory() as folder, SlowNetwork(hosts, setting.megabits, prefix) as network:
        out = Path(folder) / "result.json"
        threads = max(1, (os.cpu_count() or 1) // hosts)

        def run(python: str, methods: list[str]) -> dict[str, Any]:
            chosen = json.dumps({**asdict(setting), "methods": methods})
            command = [python, __file__, "--worker", chosen, "--out", str(out)]
            network.launch(command, {"OMP_NUM_THREADS": str(threads)}, timeout, Path(folder))
            found: dict[str, Any] = json.loads(out.read_text())
            return found

        result = run(sys.executable, setting.methods)
        if deepspeed_python is not None:
            theirs = run(deepspeed_python, ["deepspeed"])
            for key in ("step_seconds", "all_step_seconds", "facts"):
                result[key] |= theirs[key]
    result.update(megabits=setting.megabits, setting=asdict(setting), threads=threads, congestion=network.congestion)
    result["floor"] = floor(result)
    return result


def floor(result: dict[str, Any]) -> dict[str, float]:
    """The exchange, begun by all hosts together, against its floor: bytes over bandwidth plus the local cost of the same steps."""
    facts = result["facts"].get("onebit")
    if not facts:
        return {}
    wire = facts["bytes_sent"] / (result["megabits"] * 1e6 / 8)
    return {
        "wire_seconds": wire,
        "floor_seconds": wire + facts["local_seconds"],
        "exchange_over_floor": facts["exchange_seconds"] / (wire + facts["local_seconds"]),
        "all_reduce_over_exchange": result["all_reduce_seconds"] / facts["exchange_seconds"],
    }


def table(result: dict[str, Any]) -> str:
    """The step times of one network as text."""
    steps = result["step_seconds"]
    lines = [
        f"{result['hosts']} hosts, {result['megabits']:g} Mb/s, {result['elements'] / 1e6:.1f} M parameters, "
        f"{result['setting']['batch'] * result['setting']['length']} tokens per host and step, {result['threads']} thread(s) per host"
        + (", all on one GPU" if result["setting"].get("device") == "cuda" else ""),
        f"  {'method':<24}{'step ms':>10}{'ddp / it':>10}",
    ]
    for name, seconds in steps.items():
        ratio = f"{steps['ddp'] / seconds:.2f}x" if "ddp" in steps else ""
        lines.append(f"  {LABELS[name]:<24}{seconds * 1e3:>10.0f}{ratio:>10}")
    if "deepspeed" in steps:
        lines.append(
            f"  * {result['facts']['deepspeed']['deepspeed']}; {result['facts']['deepspeed']['packer']}, its packer being for GPUs only"
        )
    lines.append(f"  dense all-reduce alone {result['all_reduce_seconds'] * 1e3:.0f} ms")
    if result["floor"]:
        facts, f = result["facts"]["onebit"], result["floor"]
        lines.append(
            f"  exchange (whole optimizer step, begun together) {facts['exchange_seconds'] * 1e3:.0f} ms = "
            f"{f['exchange_over_floor']:.2f}x of {f['wire_seconds'] * 1e3:.0f} ms wire + {facts['local_seconds'] * 1e3:.0f} ms local "
            f"({facts['kernel_seconds'] * 1e3:.0f} ms of the exchange in kernels); "
            f"{f['all_reduce_over_exchange']:.1f}x faster than the all-reduce; in training steps, late hosts and all, "
            f"{facts['in_step_exchange_seconds'] * 1e3:.0f} ms"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of steps per second by method, with their milliseconds, one panel per network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4), squeeze=False, sharey=True)
    for axis, result in zip(axes[0], results, strict=True):
        seconds = result["step_seconds"]
        ours = ("onebit", "zero_one")
        colors = ["tab:orange" if n.startswith(ours) else "tab:gray" if n == "none" else "tab:blue" for n in seconds]
        bars = axis.barh([LABELS[n] for n in seconds], [1 / s for s in seconds.values()], color=colors)
        axis.bar_label(bars, [f" {s * 1e3:,.0f} ms" for s in seconds.values()], fontsize=8)
        axis.set_xlim(right=1.3 / min(seconds.values()))
        axis.tick_params(axis="x", labelsize=8)
        axis.set_xlabel("training steps per second")
        axis.set_title(f"{result['hosts']} hosts, {result['megabits']:g} Mb/s", fontsize=10)
    axes[0][0].invert_yaxis()  # shared
    gpu = ", hosts that share one GPU" if results[0]["setting"].get("device") == "cuda" else ""
    figure.suptitle(f"{results[0]['elements'] / 1e6:.1f} M-parameter transformer{gpu}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[1000.0, 100.0], help="Mb/s per link")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="measured steps per method and round")
    parser.add_argument("--bucket-mb", type=float, help="default: the optimizers'")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the hosts compute")
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds per network and environment")
    parser.add_argument(
        "--deepspeed-python", help="a Python that has deepspeed==0.19.6; without it that peer is left out"
    )
    parser.add_argument("--name", default="slow_network", help="of the result files")
    parser.add_argument("--plot", type=Path, nargs="+", help="measure nothing; draw these result files as one figure")
    parser.add_argument("--prefix", default="onebit", help="of the namespaces' names; two runs at once need two")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.worker:
        worker(Setting(**json.loads(args.worker)), args.out)
        return
    if args.plot:
        plot([r for path in args.plot for r in json.loads(path.read_text())["results"]], args.out / f"{args.name}.png")
        print(f"wrote {args.out / args.name}.png")
        return
    from _common import machine_info, write_json
    from _network import SlowNetwork

    if args.device == "cuda":
        import torch

        if args.deepspeed_python:
            parser.error("--deepspeed-python: that peer is made to run on CPUs; leave --device cuda out")
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA device; leave it out to compute on the CPU")
    if reason := SlowNetwork.requirement():
        parser.error(reason)
    results = []
    for hosts in args.hosts:
        for megabits in args.bandwidth:
            setting = Setting(
                args.methods,
                args.width,
                args.layers,
                args.batch,
                args.length,
                args.rounds,
                args.steps,
                args.bucket_mb,
                megabits,
                args.device,
            )
            results.append(measure(setting, hosts, args.timeout, args.deepspeed_python, args.prefix))
            print(table(results[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / f"{args.name}.json", {"machine": machine_info(), "results": results})
    plot(results, args.out / f"{args.name}.png")
    print(f"wrote {args.out / args.name}.json and .png")


if __name__ == "__main__":
    main()
