"""A picture of where a training step's time goes, from a trace of ``torch.profiler``.

    python benchmarks/trace_ranges.py --batch 128 --out docs/images/trace.png

Two processes of this machine train a stack of layers with 1-bit Adam over gloo. Rank 0 is profiled for some compressed steps
and dense steps of a refresh; the ranges ``onebit::...`` of the fastest of each are drawn as they lie in time. ``--trace FILE``
keeps the trace of the compressed one, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_onebit import ExchangeOptions, OnebitAdam

RANKS = 2
#: dense steps, then cycles of compressed ones and a refresh of one step
FREEZE, INTERVAL, CYCLES = 3, 3, 8
#: what is profiled, by its place in a cycle
KINDS = {INTERVAL: "compressed step", 0: "dense step of a refresh"}
ROWS = {
    "forward, backward": "training",
    "control": "onebit::control",
    "pack": "onebit::pack",
    "reduce": "onebit::reduce",
    "exchange (waiting)": "onebit::exchange",
    "apply": "onebit::apply",
    "refresh": "onebit::refresh",
}
COLORS = ("#9aa0a6", "#8a63d2", "#1f77b4", "#17becf", "#d62728", "#2ca02c", "#ff7f0e")


class Bar(NamedTuple):
    """One range of the trace.

    Attributes:
        name: of the range.
        begin: milliseconds since the first.
        length: milliseconds.
    """

    name: str
    begin: float
    length: float


def train(rank: int, folder: str, width: int, layers: int, batch: int, trace: str | None) -> None:
    """One process: trains, and on rank 0 writes the ranges of two steps into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.Tanh()))
    )
    exchange = ExchangeOptions(bucket_mb=4 * width**2 / 2**20)  # a layer's weights
    optimizer = OnebitAdam(model.parameters(), lr=1e-4, freeze_step=FREEZE, refresh=INTERVAL, exchange=exchange)
    data = torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        with record_function("training"):
            optimizer.zero_grad()
            model(data).square().mean().backward()
        optimizer.step()

    kept: dict[str, list[Bar]] = {}
    for number in range(1, FREEZE + CYCLES * (INTERVAL + 1) + 1):
        kind = KINDS.get((number - FREEZE) % (INTERVAL + 1)) if number > FREEZE else None
        if kind is None:
            step()
            continue
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        bars = bars_of(profiler)
        if rank == 0 and (kind not in kept or length(bars) < length(kept[kind])):
            kept[kind] = bars
            if trace and kind == "compressed step":
                profiler.export_chrome_trace(trace)
    assert (optimizer.ledger.compressed_steps, optimizer.skipped_steps) == (CYCLES * INTERVAL, 0)
    if rank == 0:
        torch.save({kind: [tuple(bar) for bar in bars] for kind, bars in kept.items()}, Path(folder, "bars.pt"))
    optimizer.release_communication()
    dist.destroy_process_group()


def bars_of(profiler: profile) -> list[Bar]:
    """The ranges of a trace that are drawn, in milliseconds since the first."""
    events = [e for e in profiler.events() if e.name in ROWS.values()]
    start = min(e.time_range.start for e in events)
    return [Bar(e.name, (e.time_range.start - start) / 1e3, e.time_range.elapsed_us() / 1e3) for e in events]


def length(bars: list[Bar]) -> float:
    """Milliseconds from the first to the end of the last."""
    return max(bar.begin + bar.length for bar in bars)


def draw(steps: dict[str, list[Bar]], path: Path) -> None:
    """A panel for each kind of step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True)
    for panel, (title, bars) in zip(panels, steps.items(), strict=True):
        for row, (name, color) in enumerate(zip(ROWS.values(), COLORS, strict=True)):
            spans = [(bar.begin, bar.length) for bar in bars if bar.name == name]
            panel.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, edgecolors=color, linewidth=0.6)
        panel.set_yticks(range(len(ROWS)), list(ROWS))
        panel.set_ylim(len(ROWS) - 0.5, -0.5)
        panel.set_title(title, loc="left", fontsize=10)
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("milliseconds, rank 0 of 2")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Trains, traces and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trace.png"), help="the picture (%(default)s)")
    parser.add_argument("--trace", help="keep the trace of the compressed step in this JSON file")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="number of layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows per rank (%(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onebit-trace-") as folder:
        settings = (folder, options.width, options.layers, options.batch, options.trace)
        mp.spawn(train, args=settings, nprocs=RANKS)
        steps = torch.load(Path(folder, "bars.pt"), weights_only=True)
    draw({kind: [Bar(*bar) for bar in bars] for kind, bars in steps.items()}, options.out)


if __name__ == "__main__":
    main()
