"""What the benchmark scripts share: side-by-side timing, a description of the machine, result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine_info() -> dict[str, Any]:
    """Processor, cores, memory, device and versions, for the head of a result file."""
    import torch

    info: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        info["device"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
    return info


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def side_by_side(
    candidates: Mapping[str, Callable[[], Any]], *, repeats: int = 15, warm_up: int = 3
) -> dict[str, list[float]]:
    """Times candidates in turn, A B C A B C ..., so that a machine whose speed drifts drifts for all of them.

    Args:
        candidates: name -> what to time.
        repeats: counted runs of each.
        warm_up: runs of each that are not counted.

    Returns:
        Seconds of every counted run, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warm_up + repeats):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each candidate, seconds."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def ratio(seconds: Mapping[str, list[float]], name: str, baseline: str) -> float:
    """Median over turns of ``name / baseline``, pair by pair, which a drift of the machine hardly moves."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[baseline], strict=True))


def transformer(width: int, layers: int, device: str = "cpu") -> Any:
    """A byte-level decoder of ``layers`` torch encoder layers under a causal mask, the same weights on every rank."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, width)
            heads = max(1, width // 64)
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.body(self.embed(x), mask=mask, is_causal=True))

    torch.manual_seed(0)
    return Transformer().to(device)


def echo_group(ranks: int) -> Any:
    """A group of ``ranks`` in which the others send what this rank sends, at once: a step's local work with nothing to wait for."""
    from lightning_onebit.comm.simulation import SimulatedGroup, SimulatedWorld

    class Done:
        def wait(self, timeout: Any = None) -> bool:
            return True

    class Echo(SimulatedGroup):
        def join(self, kind: str, inp: Any, out: Any) -> Any:
            if kind == "all_to_all":
                out.copy_(inp)
            elif kind == "all_gather":
                out.view(self.size, -1).copy_(inp.view(1, -1).expand(self.size, -1))
            elif kind == "all_reduce":
                out.mul_(self.size)
            return Done()

    return Echo(SimulatedWorld(ranks), tuple(range(ranks)), 0)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a result file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def horizontal_bars(
    path: Path, values: Mapping[str, float], *, unit: str, title: str, highlight: str = "onebit"
) -> None:
    """A bar chart; bars whose name begins with ``highlight`` stand out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 0.45 * len(values) + 1.4))
    colors = ["tab:orange" if name.startswith(highlight) else "tab:blue" for name in values]
    bars = axis.barh(list(values), list(values.values()), color=colors)
    axis.bar_label(bars, fmt=" %.3g", fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.set_xlim(right=max(values.values()) * 1.15)
    axis.set_title(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
