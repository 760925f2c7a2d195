"""Train the byte-level GPT with DDP and with compressing strategies, and put the runs side by side.

    make demo
    make demo ARGS="--steps 800 --strategies onebit_adam zero_one_adam"

Each training is a process group of its own (``examples/text_gpt.py``), with the same seed, data order, AdamW settings
and schedule. Options that are not listed here are handed on to ``text_gpt.py``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# Validated for contrast and for the common colour-vision deficiencies.
COLOURS = ("#2a78d6", "#eb6834", "#1f8a70", "#8e5bc0", "#b8860b")
INK, MUTED, GRID = "#0b0b0b", "#6b6a66", "#e4e3df"


def train(strategy: str, out: Path, arguments: list[str]) -> dict[str, Any]:
    """Run ``text_gpt.py`` once.

    Args:
        strategy: Lightning strategy by name.
        out: Folder of this run's record.
        arguments: Further options of ``text_gpt.py``.

    Returns:
        Its ``result.json``.

    Raises:
        SystemExit: The training failed; its exit status is handed on.
    """
    command = [sys.executable, str(HERE / "text_gpt.py"), *arguments, "--strategy", strategy, "--out", str(out)]
    status = subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    if status:
        raise SystemExit(status)
    return json.loads((out / "result.json").read_text())


def read_metrics(out: Path) -> dict[str, list[float | None]]:
    """Read a run's ``metrics.csv`` by column; empty cells are None."""
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) if row[name] else None for row in rows] for name in rows[0]}


def megabytes(count: float) -> str:
    """Write a byte count in MB (10^6 bytes)."""
    return f"{count / 1e6:,.1f} MB"


def found(dense: dict[str, Any], compressed: dict[str, Any]) -> str:
    """What one compressing strategy has saved, and at which loss."""
    dense_steps, steps = compressed["dense_steps"], compressed["steps"]
    later, dense_step = steps - dense_steps, dense["bytes_sent"] / dense["steps"]
    sent_later = compressed["bytes_sent"] - dense_steps * dense_step
    gap = compressed["val_loss"] / dense["val_loss"] - 1
    ratio = dense["bytes_sent"] / max(1, compressed["bytes_sent"])
    text = f"{compressed['strategy']}: {ratio:.2f}x fewer bytes, validation loss {100 * gap:+.2f} % against {dense['strategy']}."
    if not later:
        return f"{text} No step was compressed."
    if not dense_steps:
        return text
    return (
        f"{text} Of its {steps} steps {dense_steps} are dense, which sets the limit; the other {later} alone send "
        f"{later * dense_step / sent_later:.1f}x fewer."
    )


def table(runs: list[dict[str, Any]]) -> str:
    """Lay out the comparison.

    Args:
        runs: Records, that of DDP first.

    Returns:
        The table and the notes that make it readable alone.
    """
    dense, *others = runs
    rows = [
        ("", *(run["strategy"] for run in runs)),
        ("validation loss (nats per byte)", *(f"{run['val_loss']:.4f}" for run in runs)),
        ("bytes sent per process", *(megabytes(run["bytes_sent"]) for run in runs)),
        ("replicas identical", *("yes" if run["replicas_identical"] else "NO" for run in runs)),
        ("median time of a step", *(f"{1e3 * run['seconds_per_step']:.0f} ms" for run in runs)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    notes = [
        *(found(dense, run) for run in others),
        f"One run of {dense['steps']} steps tells losses apart that differ by more than about one per cent.",
        f"Bytes are those one process sends for gradients or momentum, counted {dense['bytes_counted']} "
        f"({dense['strategy']}) and {others[0]['bytes_counted']} (the others).",
        f"All {dense['ranks']} processes share this machine; step times tell nothing about a real network.",
    ]
    return "\n".join([*lines, "", *(textwrap.fill(note, 80) for note in notes)])


def warm_up(folder: Path, result: dict[str, Any]) -> int | None:
    """Number of the last dense step if a run's dense steps all come first and others follow, else None."""
    sent = [0.0, *(count for count in read_metrics(folder)["bytes_sent"] if count is not None)]
    dense_step = result["dense_bytes"] / result["steps"]
    dense = [after - before >= dense_step for before, after in pairwise(sent)]
    count = sum(dense)
    return count if 0 < count < len(dense) and all(dense[:count]) else None


def smooth(values: list[float], window: int) -> list[float]:
    """Trailing mean over ``window`` values."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot(folders: list[Path], results: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves and the cumulative bytes side by side.

    Args:
        folders: Record folders of the runs, that of DDP first.
        results: Their ``result.json``.
        path: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 10,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
        for z, (folder, result) in enumerate(zip(folders, results, strict=True), 2):
            colour, metrics = COLOURS[(z - 2) % len(COLOURS)], read_metrics(folder)
            steps = [step for step in metrics["step"] if step is not None]
            losses = [loss for loss in metrics["train_loss"] if loss is not None]
            left.plot(steps, smooth(losses, 10), color=colour, alpha=0.35, linewidth=1, zorder=z)
            validated = [(s, v) for s, v in zip(steps, metrics["val_loss"], strict=True) if v is not None]
            label = f"{result['strategy']}: {result['val_loss']:.3f}"
            left.plot(
                *zip(*validated, strict=True), "o-", color=colour, markersize=5, linewidth=2, label=label, zorder=z
            )
            sent = [0.0, *(count / 1e6 for count in metrics["bytes_sent"] if count is not None)]
            right.plot([0.0, *steps], sent, color=colour, linewidth=2, zorder=z)
            right.annotate(
                f" {result['strategy']}\n {sent[-1]:,.0f} MB",
                (steps[-1], sent[-1]),
                color=colour,
                va="center",
                annotation_clip=False,
            )
        # The first fall from ln 256 = 5.5 would leave no room to tell the curves apart: it may leave the frame at the top.
        left.set_ylim(top=1.35 * max(v for line in left.lines[1::2] for v in line.get_ydata()[:1]))
        freezes = [(result["strategy"], warm_up(*run)) for run in zip(folders, results, strict=True)]
        for name, freeze in freezes[1:]:
            for axes in (left, right) if freeze is not None else ():
                axes.axvline(freeze, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
                axes.annotate(
                    f"{name}:\ncompressed from here on",
                    (freeze, 0.97),
                    xycoords=("data", "axes fraction"),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="top",
                    color=MUTED,
                    fontsize=9,
                )
        left.set(title="Loss: validation (dots), training (pale, mean of 10 steps)")
        left.set(xlabel="optimizer step", ylabel="nats per byte")
        left.legend(title="final validation loss", frameon=False, loc="upper right")
        right.set(title="Bytes sent per process", xlabel="optimizer step", ylabel="cumulative MB")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set_xlim(left=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Run all trainings, print the table and write the figure."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Every other option is handed on to text_gpt.py (see its --help).",
    )
    options.add_argument(
        "--strategies", nargs="+", default=["onebit_adam", "binsgdm"], help="compressing strategies to compare with ddp"
    )
    options.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for records and figure")
    options.add_argument("--plot-only", action="store_true", help="only table and figure of the records in --out")
    chosen, rest = options.parse_known_args(arguments)

    names = ("ddp", *chosen.strategies)
    folders = [chosen.out / name for name in names]
    begin = time.perf_counter()
    results = []
    for number, (name, folder) in enumerate(zip(names, folders, strict=True), 1):
        if chosen.plot_only:
            results.append(json.loads((folder / "result.json").read_text()))
            continue
        print(f'\n[{number}/{len(names)}] strategy="{name}"', flush=True)
        results.append(train(name, folder, rest))
    figure = chosen.out / "demo.png"
    plot(folders, results, figure)
    print("\n" + table(results))
    print(f"\nFigure: {figure}")
    if not chosen.plot_only:
        print(f"Took {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
