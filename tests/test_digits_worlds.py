"""The second opinion on whole runs: benchmarks/digits_worlds.cpp, which shares no line with the library, trains as it does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import convergence  # lives in benchmarks/
import digits_worlds  # so does this

LR = 0.004

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        digits_worlds.library()
    except RuntimeError as error:
        pytest.skip(str(error))


def final_weights(job: convergence.Job, monkeypatch: pytest.MonkeyPatch, task: convergence.Task) -> convergence.Params:
    """Of the library's own run."""
    monkeypatch.setitem(convergence.TASKS, task.name, task)
    monkeypatch.setattr(
        convergence.Observer, "result", lambda self: {k: p.detach().clone() for k, p in self.params.items()}
    )
    monkeypatch.setattr(convergence.Observer, "after", lambda self, step: None)
    result = convergence.train_process(job, 0, 1) if job.workers == 1 else convergence.train_simulated(job)
    assert result is not None
    return result


def distance(a: convergence.Params, b: convergence.Params) -> float:
    """Of two models, in units of the first's length."""
    flats = [torch.cat([p[name].flatten() for name in a]) for p in (a, b)]
    return float((flats[0] - flats[1]).norm() / flats[0].norm())


@pytest.mark.parametrize(
    ("optimizer", "workers", "steps", "options"),
    [
        ("adamw", 1, 200, ()),
        ("lamb", 1, 200, ()),
        ("onebit_adam", 4, 200, ()),
        ("onebit_adam", 16, 60, (("scale_factor", 1.25),)),
        ("onebit_lamb", 4, 200, ()),
        ("zero_one_adam", 4, 200, ()),  # gaps of 1, 2, 4 and 8 steps
        ("zero_one_adam", 4, 300, (("local_step_clipper", 2),)),
        ("zero_one_adam", 4, 240, (("var_rise_steps", 0),)),
        ("zero_one_adam", 4, 40, (("var_rise_steps", 0), ("var_update_scaler", 2))),
    ],
)
def test_runs_agree_with_the_library(
    optimizer: str,
    workers: int,
    steps: int,
    options: convergence.Options,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the distance that rounding grows to once it has turned a first bit: that of a run with another lr in its fifth digit."""
    task = replace(digits_worlds.TASK, steps=steps)
    job = convergence.Job("digits", optimizer, LR, 3, workers, False, options)
    ours = final_weights(job, monkeypatch, task)
    beside = final_weights(replace(job, lr=LR * (1 + 1e-5)), monkeypatch, task)
    theirs, _, _ = digits_worlds.weights_after(job, task)
    assert distance(ours, theirs) < 2 * distance(ours, beside)


@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb"])
def test_first_bits_agree_with_the_library(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None has been turned yet. (0/1 Adam's first denominators are those of few gradients, which magnify rounding.)"""
    task = replace(digits_worlds.TASK, steps=20)
    job = convergence.Job("digits", optimizer, LR, 3, 4, False)
    ours = final_weights(job, monkeypatch, task)
    theirs, dense, one_bit = digits_worlds.weights_after(job, task)
    assert (dense, one_bit) == (4, 16)
    assert distance(ours, theirs) < 1e-3 * distance(ours, task.init(job.seed))
