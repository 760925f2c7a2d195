"""The study of the freeze: the rule it asks is the callback's, and the page quotes what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import convergence  # noqa: E402  lives in benchmarks/
import freeze  # noqa: E402


def test_rule_is_asked_after_the_learning_rate_has_risen_and_a_window_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(freeze.TASKS, "small", convergence.Task("small", steps=60, batch=16, width=8))
    monkeypatch.setitem(freeze.CASES, "small", (0.02, 0.9, (0,)))  # a window of 10 steps
    fired, ratios = freeze.settling("small", 0)
    assert fired is not None and 10 < fired < 60
    found = dict(ratios)
    assert found[fired] >= freeze.DEFAULT_THRESHOLD
    rise = 60 // 20
    assert all(found[step] < freeze.DEFAULT_THRESHOLD for step in found if rise < step < fired)
    assert min(found) == 11, "the first look has a window behind it"
    rows = freeze.plan("small")
    assert [dict(job.options).get("freeze_step") for job, _ in rows["auto"]] == [fired]
    assert [dict(job.options)["freeze_step"] for job, _ in rows["20%"]] == [12]


def test_page_quotes_the_table_of_the_report() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "freeze.json").read_text())["cases"]
    page = (ROOT / "docs" / "freeze.md").read_text()
    for case in cases.values():
        for name, row in case["rows"].items():
            quoted = f"| {name} | {row['share']:.1%} |"
            assert quoted in page, quoted
            assert f"{row['gap_percent']:+.1f} % ± {row['error']:.1f} % |" in page, name
