"""Objects that look like an optimizer and are none: wrappers that imitate its class, and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def forward_methods(cls: type, base: type) -> None:
    """Makes a class that imitates that of the optimizer it holds forward its methods to it; does nothing to optimizers.

    Lightning's and Fabric's wrappers inherit from the optimizer's class at run time, so ``wrapper.freeze()`` would
    run on the wrapper and change the state of nothing.

    Args:
        cls: a subclass of ``base`` that has just been made.
        base: the optimizers'.
    """
    wrapper = cls.__mro__[1]
    if issubclass(wrapper, base) or not isinstance(getattr(wrapper, "optimizer", None), property):
        return
    for name in dir(cls):
        if not name.startswith("_") and name not in vars(wrapper) and callable(getattr(cls, name)):
            setattr(cls, name, _forwarded(name))


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    return method


def missing(optimizer: torch.optim.Optimizer, name: str) -> str:
    """What to say where an optimizer has no such attribute.

    Copying or pickling a module that holds an optimizer takes its groups along, and nothing else: then it says what a copy is.
    """
    kind = type(optimizer).__name__
    if "param_groups" in vars(optimizer) and "options" not in vars(optimizer) and not name.startswith("__"):
        return (
            f"this {kind} was copied or unpickled and can do nothing: the original is tied to its parameters "
            "and to other ranks; make a new optimizer for the other parameters, and let it load_state_dict() the original's "
            "state_dict()"
        )
    return f"{kind!r} object has no attribute {name!r}"
