"""What the tests of all optimizers share: runs that the library makes on several ranks and the oracle in one process."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from harness import grouped, run_ranks
from test_optim_adam import SMALL, Run, equal, joined, whole_state
from torch import Tensor

from lightning_onebit.algorithms import (
    BinSGDM,
    LambCoefficients,
    LocalSteps,
    OnebitAdam,
    OnebitLamb,
    OnebitSGD,
    ZeroOneAdam,
)
from lightning_onebit.comm import SimulatedGroup, SimulatedWorld
from lightning_onebit.engine import OnebitOptimizer

__all__ = ["SMALL", "Problem", "equal", "joined", "whole_state"]

CLASSES: dict[str, type[OnebitOptimizer]] = {
    "onebit_adam": OnebitAdam,
    "onebit_lamb": OnebitLamb,
    "zero_one_adam": ZeroOneAdam,
    "binsgdm": BinSGDM,
    "onebit_sgd": OnebitSGD,
}

#: options under which a run of 16 steps crosses every phase change of its algorithm
CROSSING: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 4},
    "onebit_lamb": {"freeze_step": 4},
    # refreshes at t = 1, 2, 3, 5; gaps 1, 2 and 4 between synchronisations after step 6
    "zero_one_adam": {"freeze_step": 6, "_doubling": 2, "local_steps": LocalSteps(max_gap=4, double_every=2)},
    "binsgdm": {},
    "onebit_sgd": {"momentum": 0.9},
}

#: those that exchange from the first step on
NO_WARM_UP = ("binsgdm", "onebit_sgd")


@dataclass(frozen=True)
class Problem(Run):
    """A ``Run`` of any algorithm.

    Attributes:
        algorithm: its name.
        growth: gradients of step t are ``growth**t`` times as large.
        shared: ranks of a node (``shared`` of them) have the same gradients.
        blank: tensors whose weights start at 0.
    """

    algorithm: str = "onebit_adam"
    growth: float = 1.0
    shared: int = 1
    blank: tuple[int, ...] = ()

    def start(self) -> list[np.ndarray]:
        return [np.zeros_like(a) if l in self.blank else a for l, a in enumerate(super().start())]

    def gradient(self, t: int, rank: int, l: int) -> np.ndarray | None:
        g = super().gradient(t, rank // self.shared, l)
        return g if g is None or self.growth == 1.0 else (g * self.growth**t).astype(np.float32)

    def build(self, params: Any, **differing: Any) -> Any:
        """The library's optimizer."""
        return CLASSES[self.algorithm](params, **grouped(self.options, **differing))

    def lr_at(self, t: int) -> float:
        """Learning rate of step t (0, 1, ...)."""
        return self.lrs[t] if self.lrs is not None else self.options.get("lr", 1e-3)

    def simulate(self, world: int, watch: Callable[[Any, int], None] | None = None, **differing: Any) -> Any:
        """The oracle after the same steps; ``watch(oracle, t)`` is called after each."""
        kinds: dict[str, Any] = {
            "onebit_adam": oracle.Adam,
            "onebit_lamb": oracle.Lamb,
            "zero_one_adam": oracle.ZeroOneAdam,
            "binsgdm": oracle.BinSGDM,
            "onebit_sgd": oracle.SGD,
        }
        settings = in_the_oracles_letters(self.algorithm, self.options)
        simulated = kinds[self.algorithm](self.start(), world, **{**settings, **differing})
        for t in range(self.steps):
            simulated.lr = self.lr_at(t)
            simulated.step(self.gradients(t, world))
            if watch is not None:
                watch(simulated, t)
        return simulated


#: names of options -> letters of the oracle
LETTERS = {
    "weight_decay": "wd",
    "freeze_step": "T_w",
    "denominator_floor": "phi",
    "beta": "b",
    "momentum": "mu",
    "max_grad_norm": "max_norm",
}
#: the paper's rule in the oracle's letters
PUBLISHED: dict[str, dict[str, Any]] = {
    "onebit_adam": {"preconditioned": False, "refresh": "never"},
    "zero_one_adam": {"preconditioned": False, "refresh": "never", "var_decay": "refresh"},
    "binsgdm": {"server": "random", "overflow": "drop"},
}


def in_the_oracles_letters(algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
    """Flat options of an optimizer as what the oracle of its algorithm takes."""
    settings = {LETTERS.get(k, k): v for k, v in options.items()}
    # (BinSGDM sends no scales, so its blocks have no effect)
    for without_effect in ("bucket_mb", "kernels", "seed", *(("block_size",) if algorithm == "binsgdm" else ())):
        settings.pop(without_effect, None)
    if "betas" in settings:
        settings["b1"], settings["b2"] = settings.pop("betas")
    if settings.pop("recipe", "default") == "published":
        settings |= PUBLISHED[algorithm]
        if algorithm == "binsgdm":
            settings = {"ba": settings.get("b", 0.7), **settings}
    if "trust_clip" in settings:
        settings["min_coeff"], settings["max_coeff"] = settings.pop("trust_clip")
    if "coefficients" in settings:
        c: LambCoefficients = settings.pop("coefficients")
        settings |= {"coeff_beta": c.beta, "factor_threshold": c.threshold}
        settings |= {"factor_min": c.factor_min, "factor_max": c.factor_max}
    if algorithm == "zero_one_adam":
        steps: LocalSteps | None = settings.pop("local_steps", None)
        by_lr = steps is not None and steps.double_every == "lr_halving"
        settings |= {"local_step_clipper": 1 if steps is None else steps.max_gap}
        settings |= {"local_step_policy": "learning_rate" if by_lr else "interval"}
        settings |= {"local_step_scaler": steps.double_every} if steps is not None and not by_lr else {}
        renamed = {"T_w": "var_freeze_step", "_doubling": "var_update_scaler"}
        settings = {renamed.get(k, k): v for k, v in settings.items()}
    return settings


def snapshot(optimizer: Any, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
    """Copies of everything a step may change."""
    saved = whole_state(optimizer)
    books = {k: v for k, v in saved["onebit"].items() if k != "ledger"}
    return {
        "x": [p.detach().clone() for p in params],
        "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()},
        "residuals": {k: v.clone() for k, v in optimizer.residual_state_dict()["tensors"].items()},
        "books": books,
    }


def run_world(fn: Callable[..., Any], world: int, *args: Any, real: bool = False) -> list[Any]:
    """``fn(group, rank, world, *args)`` on every rank: threads of a simulated world, or processes joined by gloo (``real``)."""
    if real:
        return run_ranks(_in_process, world, fn, args, timeout=120.0)
    return SimulatedWorld(world, timeout=60).run(lambda group: fn(group, group.rank, world, *args))


def _in_process(rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(None, rank, world, *args)


def train(
    group: SimulatedGroup | None, rank: int, world: int, problem: Problem, ranks_per_node: int = 1
) -> dict[str, Any]:
    """Makes a run; returns its final state, the weights after every step and the ledger's records."""
    params = problem.parameters()
    optimizer = problem.build(params, process_group=group)
    if ranks_per_node > 1:
        optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
    trajectory, records = [], []
    for t in range(problem.steps):
        problem.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = problem.lr_at(t)
        optimizer.step()
        trajectory.append([p.detach().clone() for p in params])
        records.append(optimizer.ledger.last)
    return {
        **snapshot(optimizer, params),
        "trajectory": trajectory,
        "records": records,
        "skips": optimizer.skipped_steps,
    }


def close(ours: Tensor, theirs: np.ndarray, lr: float, message: str = "") -> None:
    """Weights equal those of the oracle, to rounding: of the weights themselves, and a relative error of the updates."""
    np.testing.assert_allclose(ours.float().numpy().ravel(), theirs, rtol=1e-6, atol=5e-4 * lr, err_msg=message)


def sure(simulated: Any) -> None:
    """No sign of the run was so close to 0 that rounding could have turned it (the two would then part for good)."""
    assert simulated.exchange.margin > 1e-6, "choose another seed: a sign of this run is decided by rounding"
