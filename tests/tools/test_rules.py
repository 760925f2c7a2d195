"""The study of rules compares what it says: its second exchange is the library's, and a learning rate at the grid's edge is no result."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_onebit.comm import SimulatedWorld

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rules

# few steps: rounding turns a sign now and then, and training makes more of it
TINY = rules.Task("tiny", 2, 1, 8, 10, 3, 6, 256, 16, 1)


def test_one_bit_adam_of_the_study_trains_as_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.TASKS, "tiny", TINY)
    mine, theirs, dense = (
        rules.run_one("tiny", name, 2e-2, 1) for name in ("adam_frozen_compressed", "onebit_adam", "adamw")
    )
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    assert mine["curve"] == pytest.approx(theirs["curve"], abs=1e-3)
    assert dense["curve"][:6] == pytest.approx(mine["curve"][:6], abs=5e-3), (
        "the same weights and data until the freeze"
    )
    assert max(abs(a - b) for a, b in zip(dense["curve"], mine["curve"], strict=True)) > 0.02


@pytest.mark.parametrize(
    ("name", "theirs"), [("adam_frozen_compressed", "onebit_adam_never_refreshed"), ("adam_refreshed", "onebit_adam")]
)
def test_one_bit_adam_of_the_study_is_the_librarys(name: str, theirs: str) -> None:
    """On gradients that do not depend on the weights, where a sign that rounding turns stays one coordinate's; refreshes at 22 and 38."""
    task = replace(TINY, workers=3)
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((70, 50), (41,))]
    draws = [torch.Generator().manual_seed(1 + rank) for rank in range(task.workers)]
    grads = [[[(2.0 + t) * torch.randn(x.shape, generator=draw) for x in start] for draw in draws] for t in range(40)]

    def library(group: Any) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = rules.RULES[theirs].make(params, 1e-2, task, group)
        for rows in grads:
            for p, g in zip(params, rows[group.rank], strict=True):
                p.grad = g.clone()
            optimizer.step()
        assert optimizer.ledger.dense_steps == task.warm_up + (2 if theirs == "onebit_adam" else 0)
        return [p.detach() for p in params]

    mine = [torch.nn.Parameter(x.clone()) for x in start]
    optimizer = rules.RULES[name].make(mine, 1e-2, task)
    for rows in grads:
        optimizer.step_on([torch.stack(list(row)) for row in zip(*rows, strict=True)])
    for p, q, x in zip(mine, SimulatedWorld(task.workers).run(library)[0], start, strict=True):
        same = torch.isclose(p.detach(), q, rtol=1e-4, atol=1e-5)
        assert same.float().mean() > 0.999 and torch.isclose(q, x, atol=1e-3).float().mean() < 0.5


def run(lr: float, loss: float, seed: int = 0, rule: str = "adamw", **more: Any) -> dict[str, Any]:
    fixed = {"task": "T1short", "precision": rules.PRECISION, "worst": 9.0, "bytes": 6.0}
    return {**fixed, "rule": rule, "lr": lr, "seed": seed, "loss": loss, **more}


#: AdamW's best rate is 8e-3
SEARCHED = [run(8e-3 * f, 5.0 + (f != 1)) for f in (0.5, 1, 2)]


def test_a_learning_rate_is_searched_until_both_neighbours_are_worse() -> None:
    rule = rules.RULES["adamw"]
    runs: list[dict[str, Any]] = []
    asked = []
    while True:
        lr, bracketed = rules.search(runs, rule)
        if bracketed:
            break
        asked.append(lr)
        # it diverges above 4e-3, and its best is there
        runs.append(run(lr, math.inf if lr > 4e-3 else abs(math.log2(lr / 4e-3)) + 4.0))
    assert lr == pytest.approx(4e-3)
    assert sorted(asked) == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3])
    assert rules.wanted("T1short", rule, runs) == [(lr, seed) for seed in rules.SEEDS]


def test_a_rule_is_compared_in_pairs_of_a_seed_and_a_precision() -> None:
    runs = [*SEARCHED, *(run(8e-3, 4.0 + seed, seed) for seed in rules.SEEDS)]
    runs += [run(8e-3, 1.01 * (4.0 + seed), seed, "onebit_adam") for seed in rules.SEEDS[:2]]
    runs.append(run(8e-3, 9.0, rules.SEEDS[2], "onebit_adam", precision="fp8"))  # no AdamW of that precision
    rows = {(row["task"], row["rule"]): row for row in rules.summary(runs)}
    # a dense run of T1short is one of T2short too, which shares its batches out among more workers
    assert {task for task, rule in rows if rule == "adamw"} == {"T1short", "T1early", "T1half", "T2short"}
    assert {task for task, rule in rows if rule == "onebit_adam"} == {"T1short"}
    row = rows["T1short", "onebit_adam"]
    assert row["gap"] == pytest.approx((1.0, 0.0), abs=1e-9) and row["pairs"] == 2
    assert row["loss"][0] == pytest.approx((5.05 + 6.06 + 9.0) / 3)
    assert rules.summary(runs[3:]) == [], "a rate that is not bracketed is no result"


def test_compressed_rules_run_at_the_rate_of_their_twin_and_tasks_of_the_same_model_at_that_of_one() -> None:
    adam, published = rules.RULES["onebit_adam"], rules.RULES["onebit_adam_published"]
    assert rules.wanted("T1short", adam, []) == rules.wanted("T2", published, []) == [], "that is not known yet"
    for task, rule in (("T1short", adam), ("T1short", published), ("T1", rules.RULES["adamw"]), ("T2", adam)):
        assert rules.wanted(task, rule, SEARCHED) == [(8e-3, seed) for seed in rules.SEEDS]
    assert rules.wanted("T2", rules.RULES["adamw"], SEARCHED) == [], "T1 has them"
    assert rules.wanted("T1", rules.RULES["adamw"], []) == [], "T1short is searched"


def test_binsgdm_runs_at_the_rate_that_was_searched_with_its_floor() -> None:
    recorded, rule = rules.RULES["binsgdm_floor"], rules.RULES["binsgdm"]
    assert rules.wanted("T1short", recorded, []) == rules.wanted("T1short", rule, []) == []
    runs = [run(1e-3 * f, 5.0 + (f != 1), rule="binsgdm_floor") for f in (0.5, 1, 2)]
    assert rules.wanted("T1short", rule, runs) == [(1e-3, seed) for seed in rules.SEEDS]


@pytest.mark.parametrize("name", [rule.name for rule in rules.RULES.values() if rule.family == "library"])
def test_every_rule_of_the_library_can_be_built(name: str) -> None:
    def make(group: Any) -> str:
        params = [torch.nn.Parameter(torch.ones(5))]
        return rules.RULES[name].make(params, 1e-3, replace(TINY, steps=40), group).algorithm

    algorithms = SimulatedWorld(2).run(make)
    assert algorithms[0] == algorithms[1] and name.startswith(algorithms[0])


def test_runs_of_rules_whose_option_is_gone_are_shown_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules, "SUMMARY", tmp_path / "rules.json")
    runs = rules.read_runs()
    recorded = {name for name, rule in rules.RULES.items() if rule.family == "recorded"}
    assert recorded <= {run["rule"] for run in runs} <= set(rules.RULES)
    rules.table(runs)
    shown = capsys.readouterr().out
    for name in recorded:
        assert name in shown and rules.wanted("T1short", rules.RULES[name], runs) == []


def test_a_seed_of_another_precision_is_run_again() -> None:
    runs = [*SEARCHED, run(8e-3, 5.0, 1), run(8e-3, 5.0, 2, precision="fp8")]
    assert rules.wanted("T1short", rules.RULES["adamw"], runs) == [(8e-3, 2), (8e-3, 3)]


def test_the_plot_averages_what_all_rules_of_a_panel_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves a panel empty where they have no run in common."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(rules, "PLOT", tmp_path / "rules.png")
    curve = [5.0, 4.0, 3.0]
    runs = [*SEARCHED, run(8e-3, 4.0, 1, curve=curve), run(8e-3, 4.0, 2, curve=curve)]
    runs += [run(8e-3, 4.1, 1, "onebit_adam", curve=curve), run(8e-3, 4.1, 1, "zero_one_adam", curve=curve)]
    runs += [run(2e-3 * f, 5.0 + (f != 1), rule="sign") for f in (0.5, 1, 2)] + [run(2e-3, 4.0, 1, "sign", curve=curve)]
    runs += [run(4e-3 * f, 5.0 + (f != 1), rule="binsgdm_floor") for f in (0.5, 1, 2)]
    runs.append(run(4e-3, 4.0, 2, "binsgdm", curve=curve))
    rules.plot(runs, "T1short")
    assert rules.PLOT.read_bytes().startswith(b"\x89PNG")
