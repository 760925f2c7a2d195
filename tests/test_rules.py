"""The study of rules compares what it says: its second exchange is the library's, and a learning rate at the grid's edge is no result."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import rules

# few steps: rounding turns a sign now and then, and training makes more of it
TINY = rules.Task("tiny", 2, 1, 8, 10, 3, 6, 256, 16, 1)


def test_one_bit_adam_of_the_study_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.TASKS, "tiny", TINY)
    mine, theirs = (rules.run_one("tiny", name, 2e-2, 1) for name in ("adam_frozen_compressed", "onebit_adam"))
    dense = rules.run_one("tiny", "adamw", 2e-2, 1)
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    assert mine["curve"] == pytest.approx(theirs["curve"], abs=1e-3)
    assert dense["curve"][:6] == pytest.approx(mine["curve"][:6], abs=1e-4), (
        "the same weights and data until the freeze"
    )
    assert abs(dense["loss"] - mine["loss"]) > 0.02


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
        # it diverges above 4e-3, and its best is at 2e-3
        runs.append(run(lr, math.inf if lr > 4e-3 else abs(math.log2(lr / 2e-3)) + 4.0))
    assert lr == pytest.approx(2e-3)
    assert sorted(asked) == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3])
    assert rules.wanted("T1", rule, runs) == [(lr, seed) for seed in rules.SEEDS]


def test_a_rule_is_compared_seed_by_seed_and_only_when_it_is_complete() -> None:
    runs = [run(8e-3 * f, 5.0 + (f != 1)) for f in (0.5, 1, 2)] + [run(8e-3, 4.0 + seed, seed) for seed in rules.SEEDS]
    runs += [run(8e-3 * f, 5.0 + (f != 1), rule="onebit_adam") for f in (0.5, 1, 2)]
    runs += [run(8e-3, 1.01 * (4.0 + seed), seed, "onebit_adam") for seed in rules.SEEDS[:2]]
    assert [row["rule"] for row in rules.summary(runs)] == ["adamw"]
    runs.append(run(8e-3, 1.01 * (4.0 + rules.SEEDS[2]), rules.SEEDS[2], "onebit_adam"))
    rows = {row["rule"]: row for row in rules.summary(runs)}
    assert rows["onebit_adam"]["gap"] == pytest.approx((1.0, 0.0), abs=1e-6)
