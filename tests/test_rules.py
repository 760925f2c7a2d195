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

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

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
        assert same.float().mean() > 0.99 and not torch.isclose(q, x, atol=1e-3).float().mean() > 0.5


def run(lr: float, loss: float, seed: int = 0, rule: str = "adamw", **more: Any) -> dict[str, Any]:
    return {"task": "T1", "rule": rule, "lr": lr, "seed": seed, "loss": loss, "worst": 9.0, "bytes": 6.0, **more}


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
    assert rules.wanted("T1", rule, runs) == [(lr, seed) for seed in rules.SEEDS]


def test_a_rule_is_compared_seed_by_seed_and_only_when_it_is_complete() -> None:
    runs = [run(8e-3 * f, 5.0 + (f != 1)) for f in (0.5, 1, 2)] + [run(8e-3, 4.0 + seed, seed) for seed in rules.SEEDS]
    runs += [run(8e-3 * f, 5.0 + (f != 1), rule="onebit_adam") for f in (0.5, 1, 2)]
    runs += [run(8e-3, 1.01 * (4.0 + seed), seed, "onebit_adam") for seed in rules.SEEDS[:2]]
    # a dense run of T1 is one of T2 too, which shares its batches out among more workers
    assert [(row["task"], row["rule"]) for row in rules.summary(runs)] == [("T1", "adamw"), ("T2", "adamw")]
    runs.append(run(8e-3, 1.01 * (4.0 + rules.SEEDS[2]), rules.SEEDS[2], "onebit_adam"))
    rows = {row["rule"]: row for row in rules.summary(runs) if row["task"] == "T1"}
    assert rows["onebit_adam"]["gap"] == pytest.approx((1.0, 0.0), abs=1e-6)


def test_a_variant_is_run_at_the_rate_of_its_rule_and_in_the_seeds_that_compare() -> None:
    """And a task of more workers at the rates of the one whose data it sees."""
    variant = rules.RULES["onebit_adam_plain_momentum"]
    assert rules.wanted("T1", variant, []) == rules.wanted("T2", rules.RULES["onebit_adam"], []) == []
    runs = [run(8e-3 * f, 5.0 + (f != 1), rule="onebit_adam") for f in (0.5, 1, 2)]
    for task, rule in (("T1", variant), ("T2", variant), ("T2", rules.RULES["onebit_adam"])):
        assert rules.wanted(task, rule, runs) == [(8e-3, seed) for seed in rules.SEEDS]
    assert rules.wanted("T2", rules.RULES["adamw"], runs) == []


def test_the_search_of_a_compressed_rule_begins_at_the_best_rate_of_its_twin() -> None:
    rule = rules.RULES["onebit_adam"]
    runs = [run(2e-3, 5.0), run(1e-3, 5.1)]
    assert rules.wanted("T1", rule, runs) == [], "that is not known yet"
    assert rules.wanted("T1", rule, [*runs, run(4e-3, 5.1)]) == [(2e-3, 0)]
