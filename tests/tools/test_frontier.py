"""The study of methods compares what it says: searches end at a bracketed rate, bytes are those of the formulas."""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _report
import _traffic
import frontier
from _ddp import Dion, _source, dion_elements, powersgd_elements
from _language import GPT, backward, model_of
from _methods import METHODS

START = 4e-3
TINY = frontier.Task("tiny", 2, 1, 8, 3, 1, 1, 256, 16, 1, starts={"adam": 4e-3})


def run(lr: float, loss: float, seed: int = 0, method: str = "adamw", task: str = "a", **more: Any) -> dict[str, Any]:
    steps = frontier.TASKS[task].steps
    fixed = {"task": task, "steps": steps, "text": "0", "precision": "fp32", "device": "cpu", "bytes": 6.0}
    curve = {"validation": [[steps // 2, loss + 1], [steps, loss]], "sent": [3.0 * steps, 6.0 * steps]}
    return {**fixed, **curve, "method": method, "lr": lr, "seed": seed, "loss": loss, **more}


SEARCHED = [run(START * f, 5.0 + (f != 1)) for f in (0.5, 1, 2)]


def test_a_search_goes_on_until_both_neighbours_of_the_best_rate_are_worse() -> None:
    found: dict[float, float] = {}
    while (answer := frontier.search(found, START))[1] is None:
        assert answer[0], "a search that has not ended asks for more"
        # the best rate is 1 ms, and everything from 8e-3 on diverges
        found |= {lr: math.inf if lr > 7e-3 else abs(math.log2(lr / 1e-3)) for lr in answer[0]}
    assert answer == ([], 1e-3)
    assert sorted(found) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]


def test_a_best_rate_between_worse_ones_ends_a_search_wherever_it_began() -> None:
    assert frontier.search({START: 3.0, START / 2: 1.0, START / 4: 2.0}, START) == ([], START / 2)


def test_a_search_that_gets_better_without_end_ends() -> None:
    found: dict[float, float] = {}
    while missing := frontier.search(found, START)[0]:
        found |= {lr: -lr for lr in missing}
    assert max(found) == START * 2**frontier.FARTHEST


def rows(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    content = _report.table(runs, frontier.TASKS, frontier.SEEDS, frontier.SEARCH_SEED)
    return {(row["task"], row["method"]): row for row in content}


def test_the_table_has_means_over_the_seeds_and_gaps_over_pairs(tmp_path: Path) -> None:
    runs = [*SEARCHED, *(run(START, 4.0 + seed, seed) for seed in frontier.SEEDS)]
    runs += [run(START * f, 5.0 + (f != 1), 0, "binsgdm") for f in (0.5, 1, 2)]
    runs += [run(START, 1.01 * (4.0 + seed), seed, "binsgdm") for seed in frontier.SEEDS[:2]]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in runs))
    assert frontier.summary(path) == list(rows(runs).values())
    row = rows(runs)["a", "binsgdm"]
    assert row["bracketed"] and not row["search_seed_only"] and row["seeds"] == [1, 2]
    assert row["loss"] == pytest.approx(1.01 * 5.5) and row["loss_error"] == pytest.approx(1.01 / 2)
    assert (row["gap"], row["gap_error"]) == pytest.approx((1.0, 0.0), abs=1e-9)


def test_a_best_rate_at_the_edge_and_a_search_without_seeds_are_marked() -> None:
    edge = rows(SEARCHED[:2])["a", "adamw"]
    assert not edge["bracketed"] and edge["search_seed_only"] and edge["lr"] == START
    row = rows([run(START, 5.0, 1), run(START * 2, math.inf, 1)])["a", "adamw"]
    assert not row["bracketed"] and not row["search_seed_only"] and row["loss"] == 5.0
    assert rows([{**SEARCHED[0], "loss": math.inf}])["a", "adamw"]["loss"] is None


def test_dense_runs_count_for_a_task_of_more_workers_at_its_bytes() -> None:
    found = rows([*SEARCHED, run(START, 5.0, 0, "binsgdm", "a16"), run(START, 5.0, 0, "diloco")])
    assert {method for task, method in found if task == "a16"} == {"adamw", "binsgdm"}
    assert found["a16", "adamw"]["bytes"] == pytest.approx(2 * 4 * 15 / 16)


def test_powersgd_sends_both_factors_or_the_whole() -> None:
    assert powersgd_elements([(100, 50), (100,)], 1) == 150 + 100
    assert powersgd_elements([(100, 50)], 4) == 600
    assert powersgd_elements([(4, 4)], 1) == 16, "factors are half of it, not less"


#: stands in for the authors' file: averages what their Dion averages, and keeps what it was given
DION = """
import torch.distributed as dist
from .beside import HERE

class Dion:
    def __init__(self, groups, replicate_mesh, rank_fraction, lr, weight_decay):
        self.param_groups, self.fraction = groups, rank_fraction
        assert HERE and replicate_mesh is dist.group.WORLD and weight_decay == 0

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                whole = group.get("algorithm") == "adamw" or self.fraction == 1
                rows = [p.grad] if whole else [p.grad[:, :1], p.grad[:1]]
                for row in rows:
                    dist.all_reduce(row.contiguous())
"""


@pytest.mark.parametrize("fraction", [1.0, 1 / 32])
@pytest.mark.parametrize("demo", [False, True])
def test_dion_gets_matrices_of_layers_and_its_bytes_are_counted(
    demo: bool, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is AdamW's; a head that is not tied has a smaller learning rate."""
    folder = tmp_path / "dion"
    folder.mkdir()
    for name, text in {
        "__init__": "raise ImportError('no triton')",
        "beside": "HERE = True",
        "dion_reference": DION,
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("DION_SOURCE", str(tmp_path))
    task = replace(TINY, workers=4, width=32, demo=demo)
    payload = [0]
    real = dist.all_reduce

    def counted(tensor: torch.Tensor) -> Any:
        payload[0] += tensor.nbytes
        return real(tensor)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "all_reduce", counted)
        net = DistributedDataParallel(model_of(task, 0))
        optimizer = METHODS["dion"].make(net, 1e-2, task) if fraction == 1 else Dion(net, 1e-2, task, fraction=fraction)
        backward(net, torch.randint(256, (1, 9)), "fp32")
        optimizer.param_groups[0]["lr"] = 4e-3
        optimizer.step()
        assert optimizer.sent == pytest.approx(2 * 3 / 4 * payload[0])
        matrices, others, *heads = optimizer.inner.param_groups
        assert {id(p) for p in matrices["params"]} < {id(p) for p in net.parameters() if p.ndim == 2}
        assert len(matrices["params"]) == 4 and (matrices["lr"], others["lr"]) == (4e-3, 4e-3)
        assert [group["lr"] for group in heads] == pytest.approx([4e-3 / 32**0.5] if demo else [])
        assert sum(len(group["params"]) for group in optimizer.inner.param_groups) == len(list(net.parameters()))
        del net, optimizer
        gc.collect()
    finally:
        dist.destroy_process_group()


def test_dion_sends_both_factors_or_the_gradient() -> None:
    assert dion_elements([(100, 50)], 1.0) == 5000
    assert dion_elements([(100, 50)], 1 / 16) == 4 * 150
    assert dion_elements([(4, 4)], 1 / 2) == 16, "factors are not smaller"


def test_a_checkout_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no dion_reference\.py"):
        _source(tmp_path, "dion_reference")


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.family == "ddp" and method.available]
)
def test_torchs_hooks_send_what_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of one, which issues the collectives of a larger one."""
    task = replace(TINY, workers=4, width=32, warm_up=2)
    payload = [0]
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        payload[0] += tensor.nbytes
        return real(tensor, *args, **options)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "all_reduce", counted)
        net = DistributedDataParallel(GPT(task, 0))
        optimizer = METHODS[name].make(net, 1e-3, task)
        sent = []
        for step in range(4):
            payload[0], before = 0, optimizer.sent
            backward(net, torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(step)), "fp32")
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.sent - before == pytest.approx(2 * 3 / 4 * payload[0])
            sent.append(payload[0])
        assert sent[2] > 0 and (name == "ddp_fp16" or sent[3] < sent[0])
        payload[0], before = 0, optimizer.sent
        optimizer.synchronise()
        assert optimizer.sent - before == pytest.approx(2 * 3 / 4 * payload[0])
        assert (payload[0] > 0) == (name == "post_local_sgd"), "only its replicas may differ"
        del net, optimizer
        gc.collect()
    finally:
        dist.destroy_process_group()


def test_seconds_follow_the_planner_and_the_bytes() -> None:
    """A step with dense and compressed ones in it lies between them; a network without limits leaves computing."""
    task = frontier.TASKS["b"]
    wire = _report.wire(task, "onebit_adam", 1e8, 0.0)
    assert wire.full == 6.0 and wire.bytes == pytest.approx(0.1875, rel=0.05)
    assert wire.dense > 10 * wire.compressed > 0
    assert wire.seconds(6.0) == wire.dense and wire.seconds(wire.bytes) == wire.compressed
    assert wire.seconds((6.0 + wire.bytes) / 2) == pytest.approx((wire.dense + wire.compressed) / 2)
    assert wire.seconds(wire.bytes / 2) == wire.compressed / 2, "silent steps"
    elements = sum(math.prod(shape) for shape in _report.tensors(task))
    assert _report.wire(task, "adamw", 1e8, 0.0).seconds(6.0) == pytest.approx(6.0 * elements * 8 / 1e8, rel=0.1)
    assert _report.wire(task, "diloco", 1e8, 0.0).seconds(0.3) == pytest.approx(wire.dense / 20)
    half, votes, powersgd = (_report.wire(task, name, 1e8, 0.0) for name in ("ddp_fp16", "sign_vote", "powersgd_1"))
    assert half.seconds(3.0) == pytest.approx(wire.dense / 2, rel=0.1)
    assert votes.bytes == pytest.approx(0.1875, rel=0.05) and powersgd.bytes < 0.15 and powersgd.compressed < wire.dense
    costs = _report.Costs(0.5, {"adamw": 0.1}, "")
    assert costs.known("adamw_published") and not costs.known("lamb") and _report.Costs(0.5, {}, "").known("lamb")
    one = {**SEARCHED[1], "validation": [[500, 6.0], [1000, 5.0]], "sent": [3000.0, 6000.0]}
    assert _report.times(task, one, 1e15, costs) == pytest.approx([300.0, 600.0], rel=1e-3)


def test_what_is_measured_of_a_step_comes_after_the_freeze() -> None:
    """1-bit LAMB freezes after a fifth of its task, and dense steps would have been measured instead."""
    for task in map(_traffic._soon_frozen, frontier.TASKS.values()):
        for name in ("onebit_adam", "onebit_lamb", "onebit_lamb_16bit", "zero_one_adam"):
            optimizer = METHODS[name].make([torch.nn.Parameter(torch.zeros(8))], 1e-3, task, None)
            assert optimizer.options.freeze_step <= _traffic.WARM, name


def test_costs_of_some_methods_leave_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "COSTS", tmp_path / "costs.json")
    for only, ms in (("^(lion|adamw)$", 1.0), ("^lion$", 2.0)):
        monkeypatch.setattr(
            _traffic,
            "measure_costs",
            lambda task, device, precision, names, ms=ms: {"compute_ms": ms, "local_ms": dict.fromkeys(names, ms)},
        )
        frontier.measure(argparse.Namespace(command="cost", only=only, device="cpu"), frontier.TASKS["a"])
    (found,) = json.loads((tmp_path / "costs.json").read_text()).values()
    assert found == {"compute_ms": 2.0, "local_ms": {"adamw": 1.0, "lion": 2.0}}


def test_bytes_of_some_methods_leave_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes.json"
    for methods, nbytes in ((("adamw", "binsgdm"), 1.0), (("binsgdm",), 2.0)):
        rows = [{"method": name, "kernel": nbytes} for name in methods]
        monkeypatch.setattr(frontier, "_over_network", lambda *_, rows=rows: (path, "a 2 hosts", rows))
        frontier.measure(argparse.Namespace(command="bytes", only="."), frontier.TASKS["a"])
    found = json.loads(path.read_text())["a 2 hosts"]
    assert found == [{"method": "adamw", "kernel": 1.0}, {"method": "binsgdm", "kernel": 2.0}]


def test_the_first_time_below_a_loss_lies_between_checks() -> None:
    assert _report.first_below(4.5, [1.0, 2.0, 3.0], [6.0, 5.0, 4.0]) == 2.5
    assert _report.first_below(7.0, [1.0, 2.0], [6.0, 5.0]) == 1.0
    assert _report.first_below(3.0, [1.0, 2.0], [6.0, 5.0]) is None


def test_who_is_first_may_end_above_adamws_loss_where_that_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """Both make steps of a second, next to which the network is fast; BinSGDM ends 1 % above AdamW."""
    task = frontier.TASKS["a"]
    ends = {"adamw": 5.0, "binsgdm": 5.05}
    lines = [
        {**run(START, loss, 1, name), "validation": [[500, 6.0], [1000, loss]], "sent": [100.0, 200.0]}
        for name, loss in ends.items()
    ]
    found = _report.best_rows(lines, frontier.SEEDS, frontier.SEARCH_SEED)
    costs = _report.Costs(1.0, dict.fromkeys(ends, 0.0), "")
    _report.print_first(task, found, costs)
    assert "10 Gb/s:  adamw 1,00" in (out := capsys.readouterr().out) and "never: binsgdm" in out
    _report.print_first(task, found, costs, within=0.02)
    out = capsys.readouterr().out
    assert "5.1000" in out and "binsgdm 974" in out.split("25 Gb/s")[1] and "(1.0x)" in out and "never: none" in out
    with pytest.raises(ValueError, match="no AdamW run"):
        _report.print_first(task, found[1:], costs)


@pytest.mark.parametrize(
    ("name", "step_bytes"),
    [
        ("adamw", [4.0, 4.0, 4.0]),
        ("onebit_adam", [4.0, None, None]),
        ("ddp_fp16", [2.0, 2.0, 2.0]),
    ],
)
def test_a_method_of_each_family_trains(
    name: str, step_bytes: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0))
    for module in ("_language", "_ddp"):
        monkeypatch.setattr(sys.modules[module], "corpus", lambda task: (tokens, tokens))
    monkeypatch.setattr(frontier, "text_id", lambda task: "0")
    row = frontier.run_one(TINY, (name, 4e-3, 1), "cpu", False)
    assert "error" not in row, row["error"]
    assert 5.0 < row["loss"] < 6.5 and len(row["curve"]) == TINY.steps
    compressed = _report.wire(TINY, name, 1e9, 0.0).bytes
    expected = sum(compressed if nbytes is None else nbytes for nbytes in step_bytes)
    assert row["sent"][-1] == pytest.approx(expected, rel=5e-3)  # control rounds count too


def test_a_task_of_the_demo_has_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(shape.numel() for shape in _report.tensors(frontier.TASKS["b"])) == 3_286_528
    tokens = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sys.modules["_language"], "corpus", lambda task: (tokens, tokens))
    monkeypatch.setattr(frontier, "text_id", lambda task: "0")
    before = torch.get_rng_state()
    first, second = (
        frontier.run_one(replace(TINY, demo=True), (name, 1e-6, 1), "cpu", False) for name in ("adamw", "onebit_adam")
    )
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4), "they begin with the same weights"
    assert torch.equal(before, torch.get_rng_state())


def test_the_pictures_show_methods_that_are_bracketed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs.jsonl"
    runs = [*SEARCHED, run(START, 4.0, 0, "binsgdm")]
    path.write_text("".join(json.dumps(line) + "\n" for line in runs))
    shown, _ = frontier.rows_of(path, frontier.TASKS["a"], ".", False)
    assert [row.method for row in shown] == ["adamw"]
    everything, _ = frontier.rows_of(path, frontier.TASKS["a"], ".", True)
    files = _report.plot(frontier.TASKS["a"], everything, _report.Costs(0.1, {}, ""), tmp_path / "frontier_a")
    assert [file.read_bytes()[:4] for file in files] == [b"\x89PNG"] * 2
    with pytest.raises(ValueError, match="no run of task a"):
        frontier.rows_of(path, replace(frontier.TASKS["a"], steps=7), ".", True)


def test_a_shorter_run_keeps_a_hundred_steps_of_warm_up() -> None:
    """Second moments over fewer gradients are noise, whatever the length of the run."""
    task = frontier.TASKS["c"]
    assert [task.of_length(steps).warm_up for steps in (1000, 400, 100)] == [200, 100, 50]
    assert [task.of_length(steps).rise for steps in (1000, 400, 100)] == [100, 40, 10]
