"""The second opinion on whole runs: benchmarks/digits_worlds.cpp, which shares no line with the library, trains as it does."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import convergence  # lives in benchmarks/
import digits_worlds  # so does this

LR = 0.004

COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine"),
]


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
        ("onebit_lamb", 4, 60, (("ratio_interval", 10),)),
        ("onebit_lamb", 4, 60, (("scale_factor", 1.1),)),
        ("onebit_adam", 64, 40, ()),
        ("onebit_adam", 4, 60, (("server_scale_factor", 1.5),)),
        ("onebit_adam", 4, 60, (("refresh_interval", 6),)),
        ("onebit_lamb", 4, 30, (("refresh_interval", 6),)),
        ("zero_one_adam", 4, 200, (("refresh_interval", 30),)),
        ("binsgdm", 64, 30, ()),
        ("binsgdm", 4, 200, ()),
        ("binsgdm", 16, 60, (("magnitude_beta", 0.97),)),
        ("zero_one_adam", 4, 200, ()),  # gaps of 1, 2, 4 and 8 steps
        ("zero_one_adam", 4, 300, (("local_step_clipper", 2),)),
        ("zero_one_adam", 4, 240, (("var_rise_steps", 0),)),
        ("zero_one_adam", 4, 400, ()),  # lr rises for 20 steps, and all up to the freeze are dense
        ("zero_one_adam", 4, 400, (("var_rise_steps", 30),)),  # or the first 31
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


@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb", "binsgdm"])
def test_first_bits_agree_with_the_library(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, on one seed of four at least: on the others it may have turned a bit. (0/1 Adam's first denominators magnify it.)"""
    task = replace(digits_worlds.TASK, steps=20)
    shares = []
    for seed in range(4):
        job = convergence.Job("digits", optimizer, LR, seed, 4, False)
        ours = final_weights(job, monkeypatch, task)
        theirs, dense, one_bit = digits_worlds.weights_after(job, task)
        assert (dense, one_bit) == ((0, 20) if optimizer == "binsgdm" else (4, 16))
        shares.append(distance(ours, theirs) / distance(ours, task.init(seed)))
    assert min(shares) < 1e-4, shares


def test_gaps_are_to_the_better_twin_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_worlds, "OUT", tmp_path / "digits_worlds.json")
    twins = [
        digits_worlds.World("adamw", 1, (), lr, losses, 1200, 0)
        for lr, losses in ((0.1, (2.0, 1.0)), (0.2, (2.0, 4.0)))
    ]
    own = digits_worlds.World("onebit_adam", 4, (("scale_factor", 1.25),), 0.1, (3.0, 1.0), 260.0, 940.0)
    worlds = {world.key: world for world in (*twins, own)}
    assert own.gap(worlds.values()) == pytest.approx((0.25, 0.25))
    assert own.gap([own]) is None and twins[0].gap(worlds.values()) is None
    digits_worlds.write_worlds(worlds)
    assert digits_worlds.read_worlds() == worlds
    assert (
        "| onebit_adam scale_factor=1.25 | 4 | 0.1 | 2 | 2.00000 | +25.00% ± 25.00% | 1% **missed** | 260, 940 |"
        in (digits_worlds.table(worlds))
    )


def test_a_gap_close_to_its_target_and_its_twins_have_more_seeds() -> None:
    counts = {world.key: len(world.losses) for world in digits_worlds.read_worlds().values()}
    worlds = digits_worlds.keys()
    assert counts == {key: digits_worlds.seeds_of(key, 400) for key in worlds}
    close = {("adamw", 1), ("lamb", 1), ("zero_one_adam", 16), *(("onebit_lamb", n) for n in digits_worlds.WORKERS)}
    assert {key[:2] for key, count in counts.items() if count == 1000} == close


@pytest.mark.parametrize(
    ("optimizer", "workers", "options", "message"),
    [
        ("onebit_adam", 4, (("block_size", 256),), "block_size=256 is no option of onebit_adam here"),
        ("onebit_adam", 4, (("beta", 0.5),), "beta=0.5 is no option of onebit_adam here"),
        ("adamw", 1, (("scale_factor", 1.25),), "scale_factor=1.25 is no option of adamw here"),
        ("binsgdm", 5, (), "workers=5 cannot share 64 images evenly"),
    ],
)
def test_what_it_cannot_do_is_named(optimizer: str, workers: int, options: convergence.Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digits_worlds.weights_after(convergence.Job("digits", optimizer, LR, 0, workers, False, options))


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler was not found: .* CXX"):
        digits_worlds.program.__wrapped__()
