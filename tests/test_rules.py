"""The study of rules compares what it says: its second exchange is the library's, and a learning rate at the grid's edge is no result."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import rules

# few steps: rounding turns a sign now and then, and training makes more of it
TINY = rules.Task("tiny", 2, 1, 8, 10, 3, 6, 256, 16, 1)


@pytest.mark.parametrize(("steps", "name"), [(10, "adam_frozen_compressed"), (24, "adam_refreshed")])
def test_one_bit_adam_of_the_study_is_the_librarys(steps: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a refresh, at step 22."""
    monkeypatch.setitem(rules.TASKS, "tiny", replace(TINY, steps=steps))
    mine, theirs = (rules.run_one("tiny", name, 2e-2, 1) for name in (name, "onebit_adam"))
    dense = rules.run_one("tiny", "adamw", 2e-2, 1)
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    assert mine["curve"] == pytest.approx(theirs["curve"], abs=1e-3)
    assert dense["curve"][:6] == pytest.approx(mine["curve"][:6], abs=5e-3), (
        "the same weights and data until the freeze"
    )
    assert max(abs(a - b) for a, b in zip(dense["curve"], mine["curve"], strict=True)) > 0.02


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
