"""Every option of every constructor with values of the wrong type and out of range, and calls in the wrong order.

The tables must be complete: an option without bad values fails a test.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import grouped

import lightning_onebit as ob
from lightning_onebit.lightning import (
    CompressionStats,
    DivergenceGuard,
    LinkProbe,
    OnebitStrategy,
    ReplicaConsistency,
    VarianceFreeze,
)

OPTIMIZERS = (ob.OnebitAdam, ob.OnebitLamb, ob.ZeroOneAdam, ob.BinSGDM, ob.OnebitSGD)
GROUPS = (ob.ExchangeOptions, ob.LambCoefficients, ob.LocalSteps)
CALLBACKS = (CompressionStats, DivergenceGuard, LinkProbe, ReplicaConsistency, VarianceFreeze)

NUMBER: tuple[Any, ...] = ("1", True, [1.0], math.nan, math.inf)
COUNT: tuple[Any, ...] = ("1", True, 1.5, 0, -1)
OPTIONAL_COUNT = COUNT
FLAG: tuple[Any, ...] = ("yes", 1, 0.0)
CHOICE: tuple[Any, ...] = ("something", 3)

#: option -> values that no class takes
BAD: dict[str, tuple[Any, ...]] = {
    # of optimizers
    "lr": (*NUMBER, None, -1e-3),
    "betas": (0.9, "ab", (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, "0.99"), None),
    "beta": (*NUMBER, None, -0.1, 1.0),
    "eps": (*NUMBER, None, -1e-8),
    "weight_decay": (*NUMBER, None, -0.1),
    "momentum": (*NUMBER, None, -0.1),
    "dampening": (*NUMBER, None),
    "nesterov": (*FLAG, None),
    "freeze_step": COUNT,
    "bias_correction": FLAG,
    "max_grad_norm": (*NUMBER, 0.0, -1.0),
    "denominator_floor": (*NUMBER, -0.1, 1.1),
    "recipe": CHOICE,
    "refresh": COUNT,
    "trust_clip": (0.3, "ab", (0.1,), (2.0, 1.0), (-0.1, 1.0), (0.1, "1"), (0.0, 0.0)),
    "coefficients": (0.9, {"beta": 0.9}),
    "local_steps": (8, {"max_gap": 8}),
    "seed": ("1", True, 1.5),
    "exchange": (64, "step", {"block_size": 64}, {}),
    # of the exchange
    "block_size": ("64", True, 64.0, 0, 31, 33, -32),
    "bucket_mb": (*NUMBER, 0, -1.0, 1e300),
    "overlap": CHOICE,
    "state_dtype": (*CHOICE, torch.float16),
    "on_nonfinite": CHOICE,
    "kernels": CHOICE,
    "timeout": ("1", 0, -1.0, 1e300),
    "process_group": ("gloo", 3, object()),
    # of 1-bit LAMB's coefficients
    "factor_max": (*NUMBER, 0.0, -1.0),
    "factor_min": (*NUMBER, -1.0),
    "threshold": (*NUMBER, -0.1),
    # of 0/1 Adam's local steps
    "max_gap": COUNT,
    "double_every": COUNT,
    # of the strategy
    "algorithm": ("adam", 3, None),
    "other_optimizers": CHOICE,
    "convert_optimizers": (*FLAG, None),
    "broadcast_buffers": (*FLAG, None),
    "overlap_dense": (*FLAG, None),
    "ranks_per_node": COUNT,
    "strict_residuals": (*FLAG, None),
    # of callbacks
    "at": (*NUMBER, None, 0, -1, 0.0, 1.0, 2.5, -0.5),
    "earliest": (*NUMBER, 0, -1, 0.0, 1.5),
    "latest": (*NUMBER, 0, -1, 0.0, 1.5),
    "every_n_steps": COUNT,
    "residual_every_n_steps": COUNT,
    "sign_agreement_every_n_steps": COUNT,
    "trust_ratios_per_layer": FLAG,
    "progress_bar": FLAG,
    "summary": FLAG,
    "loss_factor": (*NUMBER, 1.0, 0.5),
    "residual_limit": (*NUMBER, 0.0, -1.0),
    "dense_steps": COUNT,
    "max_fallbacks": COUNT,
    "sample_mb": (*NUMBER, 0.0, -1.0),
    "watch_steps": COUNT,
}
#: what Lightning's DDPStrategy takes and looks after
LIGHTNINGS = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "start_method",
}
#: what programs written for it say, answered by name (test_ddp_habits.py)
LIGHTNINGS |= {
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
    "others",
}
REMEDIES = ("must", "give", "choose", "try ", "use ", "set ", "leave ", "remove ")


def options_of(cls: Any) -> list[str]:
    names = list(inspect.signature(cls).parameters)
    names = [name for name in names if name != "params" and not name.startswith("_")]
    return [name for name in names if not (cls is OnebitStrategy and name in LIGHTNINGS)]


def make(cls: Any, **options: Any) -> Any:
    if cls in OPTIMIZERS:
        return cls([torch.nn.Parameter(torch.zeros(3))], **options)
    if cls is OnebitStrategy and "algorithm" not in options:
        (name,) = options
        owners = [a.algorithm for a in OPTIMIZERS if name in inspect.signature(a).parameters]
        return cls(owners[0] if owners else "onebit_adam", **options)
    return cls(**options)


CLASSES = (*OPTIMIZERS, *GROUPS, OnebitStrategy, *CALLBACKS)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_option_refuses_wrong_types_and_ranges_and_names_itself_the_value_and_a_remedy(cls: Any) -> None:
    problems = []
    for name in options_of(cls):
        assert name in BAD, f"{cls.__name__} has an option {name} without bad values: add them to the table"
        for value in BAD[name]:
            try:
                make(cls, **{name: value})
            except (TypeError, ValueError) as error:
                said = str(error)
                shown = repr(value) in said or (isinstance(value, tuple) and any(repr(v) in said for v in value))
                if name not in said or not shown or not any(word in said for word in REMEDIES):
                    problems.append(f"{name}={value!r}: {type(error).__name__}: {said}")
            else:
                problems.append(f"{name}={value!r} was taken")
    assert problems == []


# ----- calls in the wrong order ---------------------------------------------------------------------------------------------------


def optimizer(**options: Any) -> ob.OnebitAdam:
    given = grouped({"_alone": True, "block_size": 32, **options})
    return ob.OnebitAdam([torch.nn.Parameter(torch.ones(40))], **given)


def stepped(steps: int = 1, **options: Any) -> ob.OnebitAdam:
    made = optimizer(**options)
    for _ in range(steps):
        for group in made.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        made.step()
    return made


def frozen() -> ob.OnebitAdam:
    made = stepped(2)
    made.freeze()
    return made


def twice_frozen() -> None:
    frozen().freeze()


def two_devices() -> None:
    ob.OnebitAdam([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, device="meta"))])


def appended() -> None:
    made = stepped()
    made.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))
    made.step()


def replaced() -> None:
    made = frozen()
    made.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(40))
    made.step()


def removed() -> None:
    made = stepped()
    made.param_groups[0]["params"].clear()
    made.step()


def reconnected() -> None:
    stepped().configure_communication(None)


def other_state() -> None:
    made = ob.BinSGDM([torch.nn.Parameter(torch.ones(40))], exchange=ob.ExchangeOptions(_alone=True))
    made.load_state_dict(stepped().state_dict())


def state_of_a_plain_optimizer() -> None:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(40))])
    ob.BinSGDM([torch.nn.Parameter(torch.ones(40))]).load_state_dict(plain.state_dict())


def other_residuals() -> None:
    state = frozen().residual_state_dict()
    optimizer().load_residual_state_dict(state)


def clipped_twice() -> None:
    made = stepped(max_grad_norm=1.0)
    made.param_groups[0]["params"][0].grad = torch.ones(40)
    made.clip_grad_norm_(1.0)


def clipped_early() -> None:
    stepped(overlap="backward").clip_grad_norm_(1.0)


def contradicting_factory() -> None:
    OnebitStrategy(freeze_step=3).optimizer([torch.nn.Parameter(torch.ones(3))], freeze_step=4)


def copied() -> None:
    """As part of a module, whose copy (weight averaging) may hold one that nobody uses."""
    copy.deepcopy(stepped()).step()


def pickled() -> None:
    pickle.loads(pickle.dumps(stepped())).state_dict()


#: name -> (call, error, words of its message: what, value where there is one, remedy)
MISUSE: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "freeze before the first step": (
        lambda: optimizer().freeze(),
        RuntimeError,
        ["first step", "take dense steps first"],
    ),
    "freeze twice": (twice_frozen, RuntimeError, ["'compressed'", "only once"]),
    "freeze by hand before freeze_step": (
        lambda: stepped(freeze_step=9).freeze(),
        RuntimeError,
        ["step 1", "freeze_step=9", "one or the other"],
    ),
    "thaw what is not frozen": (lambda: stepped().thaw(), RuntimeError, ["'warmup'", "only a frozen"]),
    "two devices": (two_devices, ValueError, ["cpu", "meta", "own optimizer"]),
    "a parameter appended by hand": (appended, RuntimeError, ["2 now", "1 then", "add_param_group"]),
    "a parameter replaced by hand": (replaced, RuntimeError, ["param_groups", "new optimizer"]),
    "all parameters removed": (removed, RuntimeError, ["0 now", "1 then", "new optimizer"]),
    "configured after a step": (reconnected, RuntimeError, ["already in use", "release_communication"]),
    "state of another algorithm": (other_state, ValueError, ["'onebit_adam'", "'binsgdm'", "weights only"]),
    "state of a plain optimizer": (state_of_a_plain_optimizer, ValueError, ["BinSGDM", "weights only"]),
    "residuals of another run": (other_residuals, ValueError, ["steps=2", "has 0"]),
    "a copy": (copied, AttributeError, ["OnebitAdam was copied", "state_dict()"]),
    "a pickle": (pickled, AttributeError, ["OnebitAdam was copied or unpickled", "state_dict()"]),
    "clipping on top of max_grad_norm": (clipped_twice, ValueError, ["max_grad_norm=1.0", "one of the two"]),
    "clipping what has been sent": (clipped_early, ValueError, ["overlap='backward'", "overlap='step'"]),
    "a bad norm": (lambda: optimizer().clip_grad_norm_(0.0), ValueError, ["max_norm=0.0", "> 0"]),
    "options that contradict": (contradicting_factory, ValueError, ["freeze_step=4", "freeze_step=3", "keep one"]),
    "no parameters": (lambda: ob.OnebitAdam([]), ValueError, ["empty parameter list"]),
    "an unknown option": (lambda: optimizer(freeze_steps=3), TypeError, ["freeze_steps"]),
}


@pytest.mark.parametrize("name", list(MISUSE))
def test_calls_in_the_wrong_order_say_what_is_wrong_and_what_to_do(name: str) -> None:
    call, kind, words = MISUSE[name]
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_strategys_timeout_is_a_duration() -> None:
    for value, kind in ((30, TypeError), ("30", TypeError), (timedelta(0), ValueError)):
        with pytest.raises(kind, match=r"timeout=.*give timedelta"):
            OnebitStrategy(timeout=value)  # type: ignore[arg-type]
