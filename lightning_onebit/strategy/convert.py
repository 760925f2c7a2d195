"""A plain optimizer becomes a compressed one: same parameters, same hyperparameters, and the LR schedulers follow."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_onebit.engine.layout import TRAINABLE_DTYPES
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import UNSUPPORTED
from lightning_onebit.strategy.registry import ALGORITHMS

# the tables of hooks that every optimizer of torch has
_HOOKS = [
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
]


#: hyperparameters that a compressed optimizer cannot take over where they are set (not 0, False or None) -> why, with a remedy
OBSTACLES = {
    **{name: f"is not supported: {remedy}" for name, remedy in UNSUPPORTED.items()},
    "weight_decay": "of torch.optim.Adam is an L2 term inside the gradient, which would be compressed with it: use torch.optim.AdamW "
    "(decoupled weight decay), or weight_decay=0",
}


def obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a plain optimizer of torch's cannot be converted (option, value and remedy), or None if it can."""
    for index, group in enumerate(optimizer.param_groups):
        where = f" in parameter group {index}" if len(optimizer.param_groups) > 1 else ""
        # torch < 2.6 has no such key; AdamW is always decoupled
        decoupled = group.get("decoupled_weight_decay") or isinstance(optimizer, torch.optim.AdamW)
        coupled = isinstance(optimizer, torch.optim.Adam) and not decoupled
        for name, reason in OBSTACLES.items():
            if group.get(name) and (name != "weight_decay" or coupled):
                return f"{name}={group[name]!r}{where} {reason}"
        for name in optimizer.defaults:
            values = group[name] if isinstance(group[name], tuple | list) else [group[name]]
            if any(isinstance(value, Tensor) for value in values):
                return f"{name}={group[name]!r}{where} is a tensor: give plain numbers"
    return None


def no_counterpart(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer is none that could be converted."""
    for algorithm in ALGORITHMS.values():
        if type(optimizer) in algorithm.converts:
            return f'its compressed counterpart is that of `strategy="{algorithm.name}"`'
    return "it has no compressed counterpart"


def untrainable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no compressed optimizer can hold the parameters of an optimizer, or None."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    strange = {str(p.dtype) for p in params if p.requires_grad and p.dtype not in TRAINABLE_DTYPES}
    return f"it holds {' and '.join(sorted(strange))} parameters" if strange else None


def convert(
    optimizer: torch.optim.Optimizer, target: type[OnebitOptimizer], options: Mapping[str, Any]
) -> OnebitOptimizer:
    """Makes a compressed optimizer of a plain one.

    Parameter groups are taken over as they are, with every key of the user's (``initial_lr`` of schedulers, names, ``compress=False``),
    and so are state and hooks. Of the plain optimizer's hyperparameters those that the target has by the same name go on; the others
    choose among torch's implementations of one rule, or are obstacles. The plain optimizer is left untouched and must not be stepped
    any more.

    Args:
        optimizer: of a class that the algorithm of ``target`` ``converts`` (a ``torch.optim.AdamW``, say).
        target: class of the result.
        options: the target's options (``freeze_step`` ...).

    Raises:
        ValueError: the optimizer uses an option that has no compressed counterpart; see :func:`obstacle`.

    Example:
        >>> convert(torch.optim.AdamW(model.parameters(), lr=1e-3), OnebitAdam, {"freeze_step": 1000})
    """
    reason = obstacle(optimizer)
    if reason is not None:
        raise ValueError(f"cannot convert torch.optim.{type(optimizer).__name__} to {target.__name__}: {reason}")
    shared = optimizer.defaults.keys() & inspect.signature(target).parameters.keys()
    left_out = optimizer.defaults.keys() - shared
    groups = [
        {name: list(value) if name == "params" else value for name, value in group.items() if name not in left_out}
        for group in optimizer.param_groups
    ]
    # The defaults are what a group added later inherits.
    converted = target(groups, **{name: optimizer.defaults[name] for name in shared}, **options)
    if len(optimizer.state):
        converted.load_state_dict(optimizer.state_dict())
    for name in _HOOKS:
        if hasattr(optimizer, name):
            # the same dict, so that the handles which users hold still remove their hooks
            setattr(converted, name, getattr(optimizer, name))
    return converted


def stand_in(plain: torch.optim.Optimizer, converted: OnebitOptimizer) -> None:
    """Makes a plain optimizer show what trains in its place, to a program that has kept it.

    A module that sets ``lr`` through an attribute of its own, or another library's scheduler, then sets what trains: both have the same
    groups. ``plain.step()`` raises. Repeat it where ``converted`` has been given other groups (``load_state_dict``); `stand_down` ends it.
    What has been set in ``plain`` since then, and the groups that have joined it, are taken over.
    """
    if "_onebit_own" not in vars(plain):
        for mine, theirs in zip(converted.param_groups, plain.param_groups, strict=False):
            mine.update({name: theirs[name] for name in mine.keys() & theirs.keys() - {"params"}})
        own = plain.defaults.keys() - converted.defaults.keys()
        for joined in plain.param_groups[len(converted.param_groups) :]:
            converted.add_param_group({name: value for name, value in joined.items() if name not in own})
        vars(plain)["_onebit_own"] = [
            {name: group[name] for name in own & group.keys()} for group in plain.param_groups
        ]
    plain.param_groups = converted.param_groups
    plain.state = converted.state
    plain.add_param_group = converted.add_param_group  # type: ignore[method-assign]
    name = type(converted).__name__

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"this {type(self).__name__} has been converted to {name}, which trains in its place: step that (`self.optimizers()` gives "
            "it), or turn conversion off (`OnebitStrategy(convert_optimizers=False)`)"
        )

    plain.step = MethodType(step, plain)  # type: ignore[method-assign]


def stand_down(plain: torch.optim.Optimizer, converted: OnebitOptimizer) -> None:
    """Ends `stand_in`: gives back a plain optimizer with what was set meanwhile, and no state (``converted`` has it)."""
    own = vars(plain).pop("_onebit_own", None)
    if own is None:
        return
    foreign = converted.defaults.keys() - plain.defaults.keys()
    groups = [{name: value for name, value in group.items() if name not in foreign} for group in converted.param_groups]
    own += [{}] * (len(groups) - len(own))  # groups that joined
    plain.param_groups = [
        {**plain.defaults, **mine, **group, "params": list(group["params"])}
        for mine, group in zip(own, groups, strict=False)
    ]
    plain.state = defaultdict(dict)
    for name in ("step", "add_param_group"):
        vars(plain).pop(name, None)


def repoint_schedulers(schedulers: Iterable[Any], old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Makes LR schedulers of ``old`` schedule ``new``, whose learning rates are not touched; others are left alone.

    SequentialLR, ChainedScheduler and wrappers of the user's that keep the optimizer or schedulers in attributes are followed, however
    deeply they are nested.

    Raises:
        ValueError: ``old`` has a scheduler that is not among them, which would go on to schedule an optimizer that no
        longer trains.
    """
    seen: set[int] = set()
    found = [_repoint(scheduler, old, new, seen) for scheduler in schedulers]
    if not hasattr(old.step, "_wrapped_by_lr_sched"):
        return
    if not any(found):
        raise ValueError(
            f"a learning rate scheduler was made for torch.optim.{type(old).__name__} but not returned with it, so it cannot follow the "
            f"conversion to {type(new).__name__}: return it from `configure_optimizers`, or return {type(new).__name__} itself"
        )
    # A scheduler warns unless it has seen its optimizer's steps.
    _StepTracker(new)
    if getattr(old, "_opt_called", False):
        new._opt_called = True  # type: ignore[attr-defined]


class _StepTracker(LRScheduler):
    """Changes no learning rate; constructing it lets torch itself wrap ``optimizer.step`` the way this release of it does."""

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _repoint(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer, seen: set[int]) -> bool:
    """Whether anything pointed at ``old``."""
    if id(scheduler) in seen:
        return False
    seen.add(id(scheduler))
    found = False
    for name, value in list(getattr(scheduler, "__dict__", {}).items()):
        if value is old:
            setattr(scheduler, name, new)
            found = True
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LRScheduler) or getattr(item, "optimizer", None) is old:
                found |= _repoint(item, old, new, seen)
    return found
