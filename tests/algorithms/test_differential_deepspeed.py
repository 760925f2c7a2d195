"""Against DeepSpeed 0.19.6, the last release that had 1-bit optimizers, where this library means to compute the same.

Its trajectories were recorded by ``tests/data/record_deepspeed.py``, which says what was run; DeepSpeed is not needed here. Where the two
differ on purpose, see docs/differences.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from harness import grouped, run_ranks
from optim_support import CLASSES, in_the_oracles_letters

from lightning_onebit.algorithms import LambCoefficients, LocalSteps
from lightning_onebit.algorithms.schedules import SyncPolicy, replay_schedule

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "deepspeed_0_19_6.json").read_text())
_spec = importlib.util.spec_from_file_location("record_deepspeed", DATA / "record_deepspeed.py")
assert _spec is not None and _spec.loader is not None
recording = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(recording)

# its formulas: no bias correction, no floor under the denominators; one block is what one rank reduces, as there
AS_THERE: dict[str, Any] = {"bias_correction": False, "denominator_floor": 0.0, "block_size": 32}


def options_of(case: str) -> dict[str, Any]:
    """Our options for a recorded run."""
    theirs = recording.CASES[case]["options"]
    options = {**{name: theirs[name] for name in ("lr", "betas", "eps", "weight_decay")}, **AS_THERE}
    if case == "zero_one_adam":
        gaps = LocalSteps(max_gap=theirs["local_step_clipper"], double_every=theirs["local_step_scaler"])
        options |= {"freeze_step": theirs["var_freeze_step"], "_doubling": theirs["var_update_scaler"]}
        return options | {"local_steps": gaps, "recipe": "published"}
    # its counter includes the first step, which it throws away
    options["freeze_step"] = theirs["freeze_step"] - 1
    if case == "onebit_adam":
        return options | {"recipe": "published"}
    bounds = {name: theirs[name] for name in ("factor_min", "factor_max")}
    coefficients = LambCoefficients(beta=theirs["coeff_beta"], threshold=theirs["factor_threshold"], **bounds)
    return options | {"trust_clip": (theirs["min_coeff"], theirs["max_coeff"]), "coefficients": coefficients}


def train(rank: int, world: int, case: str) -> dict[str, Any]:
    params = [torch.nn.Parameter(torch.from_numpy(x)) for x in recording.start(case)]
    optimizer = CLASSES[case](params, **grouped(options_of(case)))
    trajectory, records = [], []
    for step in range(1, recording.CASES[case]["steps"] + 1):
        for index, p in enumerate(params):
            p.grad = torch.from_numpy(recording.gradient(case, step, rank, index).copy())
        optimizer.step()
        assert optimizer.ledger.last is not None
        trajectory.append([p.detach().numpy()[::2].copy() for p in params])
        records.append((optimizer.ledger.last.dense, optimizer.ledger.last.collectives))
    return {"x": trajectory, "records": records}


def simulate(case: str) -> Any:
    """The oracle on the same run: tells how close a rounding error comes to turning a sign."""
    settings = in_the_oracles_letters(case, options_of(case))
    kind: Any = {"onebit_adam": oracle.Adam, "onebit_lamb": oracle.Lamb, "zero_one_adam": oracle.ZeroOneAdam}[case]
    simulated = kind(recording.start(case), 2, **settings)
    for step in range(1, recording.CASES[case]["steps"] + 1):
        tensors = range(len(recording.CASES[case]["sizes"]))
        simulated.step([[recording.gradient(case, step, i, index) for index in tensors] for i in range(2)])
    return simulated


@pytest.mark.parametrize("case", list(RECORDED))
def test_trajectories_are_those_of_deepspeed(case: str) -> None:
    """Warm-up, freeze and one-bit steps: 1-bit Adam; 1-bit LAMB with its momentum pre-scaling and all clips; 0/1 Adam's local steps."""
    results = run_ranks(train, 2, case)
    simulated = simulate(case)
    assert simulated.exchange.margin > 1e-5, "a sign of this run is decided by rounding"
    lr = recording.CASES[case]["options"]["lr"]
    recorded = RECORDED[case]
    for rank, result in enumerate(results):
        theirs = recorded.get(f"weights_of_rank_{rank}", recorded["weights_of_rank_0"])
        assert len(theirs) == len(result["x"]) == recording.CASES[case]["steps"]
        for step, (a, b) in enumerate(zip(result["x"], theirs, strict=True)):
            for ours, expected in zip(a, b, strict=True):
                message = f"rank {rank}, step {step + 1}"
                np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=5e-4 * lr, err_msg=message)
    compressed = [collectives for dense, collectives in results[0]["records"] if not dense]
    if case == "zero_one_adam":
        # gaps 1, 2 and 4: the same rounds at the same steps
        assert compressed == [2, 2, 2, 2, 0, 2, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2]
        assert not recorded["ranks_equal"]
    else:
        assert compressed == [2] * (recording.CASES[case]["steps"] - options_of(case)["freeze_step"])


def test_the_recorded_lamb_run_uses_what_it_is_meant_to_compare() -> None:
    """One trust ratio is clipped and one is not, the factor moves away from 1, and the pre-scaling is not the identity."""
    case = "onebit_lamb"
    simulated = simulate(case)
    o = recording.CASES[case]["options"]
    clipped = o["max_coeff"] * (1 - o["coeff_beta"] ** options_of(case)["freeze_step"])
    assert simulated.c_avg[1] == pytest.approx(clipped) and 0.5 < simulated.c_avg[0] < 0.9 * clipped
    assert all(r != 1.0 for r in simulated.r)
    scales = [np.sqrt(np.mean(m**2)) for m in simulated.m]
    assert scales[1] == pytest.approx(2 * scales[0])


def deepspeed_schedule(
    steps: int, *, var_freeze_step: int, var_update_scaler: int, local_step_scaler: int, local_step_clipper: int
) -> dict[str, int]:
    """The counters of ``deepspeed/runtime/fp16/onebit/zoadam.py`` in 0.19.6, restated."""
    state = {"var_interval": 1, "var_counter": 0, "local_step_interval": 1, "local_step_counter": 0}
    counts = {"dense": 0, "one_bit": 0, "silent": 0}
    freeze_key = False
    for step in range(1, steps + 1):
        if not freeze_key:
            refresh = step % state["var_interval"] == 0
            counts["dense" if refresh else "one_bit"] += 1
            if refresh:
                state["var_counter"] += 1
                if state["var_counter"] == var_update_scaler:
                    state["var_counter"] = 0
                    state["var_interval"] *= 2
        else:
            counts["one_bit" if step % state["local_step_interval"] == 0 else "silent"] += 1
            state["local_step_counter"] += 1
            if state["local_step_counter"] == local_step_scaler:
                state["local_step_counter"] = 0
                state["local_step_interval"] = min(local_step_clipper, state["local_step_interval"] * 2)
        if step > var_freeze_step:
            freeze_key = True
    return counts


def test_schedule_replay_gives_the_published_rounds() -> None:
    """153 / 74,200 / 78,158 of 152,511 steps, with DeepSpeed's constants; with this library's gaps within 1 %."""
    published = {"dense": 153, "one_bit": 74_200, "silent": 78_158}
    theirs = deepspeed_schedule(
        152_511, var_freeze_step=12_500, var_update_scaler=16, local_step_scaler=32_678, local_step_clipper=16
    )
    assert theirs == published
    # it asks `step > var_freeze_step` after the step, so its 12,500 lets 12,501 steps pass before the local stage
    policy = SyncPolicy(LocalSteps(double_every=32_678))
    ours = replay_schedule(152_511, freeze_step=12_501, policy=policy, refresh=False, dense=0)
    assert ours == published
    policy = SyncPolicy(LocalSteps())
    ours = replay_schedule(152_511, freeze_step=12_500, policy=policy, refresh=False, dense=0)
    assert sum(ours.values()) == 152_511
    for kind, count in published.items():
        assert ours[kind] == pytest.approx(count, rel=0.01), kind
