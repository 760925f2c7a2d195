"""torch.profiler shows which part of a step takes the time, and a step without a profiler pays nothing for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import grouped
from torch.profiler import ProfilerActivity, profile

from lightning_onebit.algorithms import LocalSteps, OnebitAdam, ZeroOneAdam
from lightning_onebit.comm import SimulatedGroup, SimulatedWorld
from lightning_onebit.comm.ranges import begin
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer


def ranges(make: type[OnebitOptimizer], **options: object) -> list[set[str]]:
    """Names of the ranges of each step of a small model, rank 0 of two."""

    def train(group: SimulatedGroup) -> list[set[str]]:
        model = [torch.nn.Parameter(torch.ones(300, 7))]
        optimizer = make(model, **grouped(options, kernels="reference", block_size=64, process_group=group))
        found = []
        for _ in range(6):
            model[0].grad = torch.randn(300, 7)
            if group.rank:
                optimizer.step()
                continue
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                optimizer.step()
            found.append({e.name.removeprefix("onebit::") for e in profiler.events() if e.name.startswith("onebit::")})
        return found

    return SimulatedWorld(2).run(train)[0]


def test_a_profiler_sees_the_parts_of_every_kind_of_step() -> None:
    steps = ranges(OnebitAdam, freeze_step=1, refresh=3)
    compressed = {"pack", "reduce", "exchange", "apply"}
    assert steps[0] == {"control", "exchange", "apply"}, "dense"
    assert steps[1] == steps[2] == steps[3] == compressed
    assert steps[4] == {"control", "exchange", "apply", "refresh"}
    early = ranges(OnebitAdam, freeze_step=1, overlap="backward", refresh="never")
    assert early[1] >= compressed
    clipped = ranges(OnebitAdam, freeze_step=1, max_grad_norm=1.0, refresh="never")
    assert clipped[1] == {"control", *compressed}
    local = ranges(ZeroOneAdam, freeze_step=1, local_steps=LocalSteps(max_gap=4, double_every=1), refresh="never")
    assert {"control", "exchange", "apply"} in local[1:], "a local step, which waits in the control round only"


def test_without_a_profiler_no_range_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = torch.profiler.record_function
    names: list[str] = []
    monkeypatch.setattr("torch.autograd.profiler.record_function", lambda name: names.append(name) or opened(name))
    assert begin("pack") is None
    model = [torch.nn.Parameter(torch.ones(300, 7))]
    optimizer = OnebitAdam(model, freeze_step=1, exchange=ExchangeOptions(kernels="reference", _alone=True))
    for _ in range(3):
        model[0].grad = torch.randn(300, 7)
        optimizer.step()
    assert not [name for name in names if name.startswith("onebit::")]  # torch's own wrapper of step() opens one


def test_the_picture_of_a_trace_shows_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    trace_ranges = __import__("trace_ranges")
    model = [torch.nn.Parameter(torch.ones(300, 7))]
    optimizer = OnebitAdam(model, freeze_step=1, exchange=ExchangeOptions(kernels="reference", _alone=True))
    for _ in range(2):
        model[0].grad = torch.randn(300, 7)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
    bars = trace_ranges.bars_of(profiler)
    assert {"onebit::pack", "onebit::reduce", "onebit::apply", "onebit::control"} <= {bar.name for bar in bars}
    assert min(bar.begin for bar in bars) == 0 and 0 < trace_ranges.length(bars) < 60_000
    trace_ranges.draw({"a step": bars, "another": bars}, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
