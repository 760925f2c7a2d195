"""Strategy names, the algorithm behind each, and the options that an algorithm has: one table entry per algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_onebit.algorithms import BinSGDM, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer
from lightning_onebit.engine.options import as_parameters, described

#: suffix of a strategy name -> start method, as Lightning names its own strategies
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

#: further suffix -> ``find_unused_parameters`` of DDP's names; users of those find the like here
UNUSED_PARAMETERS = {"": None, "_find_unused_parameters_false": False, "_find_unused_parameters_true": True}


@dataclass(frozen=True)
class Algorithm:
    """One way to train with compressed communication.

    Attributes:
        name: the name users know, also that of its strategy.
        title: how texts call it.
        optimizer: its optimizer class, whose ``options_class`` says what options the algorithm has.
        converts: optimizer classes (exactly these, no subclasses) that it can stand in for with the same hyperparameters.
        warm_up: whether training begins with dense steps that somebody has to end (``freeze_step``, ``callbacks.VarianceFreeze``).
        aliases: other names of the same thing.
    """

    name: str
    title: str
    optimizer: type[OnebitOptimizer]
    converts: tuple[type[torch.optim.Optimizer], ...] = ()
    warm_up: bool = True
    aliases: tuple[str, ...] = ()

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the options that a strategy may hand to the optimizer."""
        return frozenset(parameter.name for parameter in as_parameters(self.optimizer.options_class))


# registries that strategies have been entered in, and what is told when an algorithm is added after that
_registered: set[tuple[int, type]] = set()
_listeners: list[Callable[[], object]] = []


def register_algorithm(algorithm: Algorithm) -> None:
    """Adds an algorithm: its strategies, the planner, the bench and command lines know it from here on.

    Raises:
        ValueError: one of its names belongs to another algorithm.
        TypeError: its optimizer does not say what options it has.

    Example:
        >>> register_algorithm(Algorithm("onebit_lion", "1-bit Lion", OnebitLion, warm_up=False))
    """
    taken = {name: other for other in ALGORITHMS.values() for name in (other.name, *other.aliases)}
    for name in (algorithm.name, *algorithm.aliases):
        if name in taken and taken[name].name != algorithm.name:
            raise ValueError(f"algorithm name {name!r} belongs to {taken[name].title}; choose another")
    if not issubclass(algorithm.optimizer, OnebitOptimizer):
        raise TypeError(
            f"optimizer={algorithm.optimizer!r} of {algorithm.name!r} must be a subclass of OnebitOptimizer"
        )
    ALGORITHMS[algorithm.name] = algorithm
    for listener in _listeners:
        listener()


def when_algorithms_change(listener: Callable[[], object]) -> None:
    """Calls ``listener`` after every algorithm that is added."""
    _listeners.append(listener)


#: every algorithm by name
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("onebit_adam", "1-bit Adam", OnebitAdam, converts=(torch.optim.Adam, torch.optim.AdamW)),
        Algorithm("onebit_lamb", "1-bit LAMB", OnebitLamb),
        Algorithm("zero_one_adam", "0/1 Adam", ZeroOneAdam, converts=(torch.optim.Adam, torch.optim.AdamW)),
        Algorithm("binsgdm", "BinSGDM", BinSGDM, warm_up=False, aliases=("birder",)),
    )
}


class RegisteredStrategy(NamedTuple):
    """A name that ``Trainer(strategy=...)`` accepts, and what it stands for."""

    name: str
    algorithm: Algorithm
    start_method: str
    find_unused_parameters: bool | None = None


def registered_strategies() -> Iterator[RegisteredStrategy]:
    """All names that importing ``lightning_onebit`` registers, aliases included."""
    for algorithm in ALGORITHMS.values():
        for name in (algorithm.name, *algorithm.aliases):
            for suffix, start_method in START_METHODS.items():
                for further, unused in UNUSED_PARAMETERS.items():
                    yield RegisteredStrategy(name + suffix + further, algorithm, start_method, unused)


def register(strategy_class: type, registry: Any) -> None:
    """Enters a strategy class in a registry of Lightning's or Fabric's under every name, also those of algorithms to come."""
    if (id(registry), strategy_class) not in _registered:
        _registered.add((id(registry), strategy_class))
        when_algorithms_change(lambda: register(strategy_class, registry))
    for name, algorithm, start_method, unused in registered_strategies():
        asked = {} if unused is None else {"find_unused_parameters": unused}
        registry.register(
            name,
            strategy_class,
            description=f"{algorithm.title} with `start_method` {start_method!r}"
            + "".join(f" and `{key}` {value}" for key, value in asked.items()),
            override=True,
            algorithm=algorithm.name,
            start_method=start_method,
            **asked,
        )


def available_strategies() -> tuple[str, ...]:
    """The names that ``Trainer(strategy=...)`` accepts once ``lightning_onebit`` is imported.

    Example:
        >>> "onebit_adam" in available_strategies()
        True
    """
    return tuple(strategy.name for strategy in registered_strategies())


def find_algorithm(name: Any) -> Algorithm:
    """The algorithm of a name or alias.

    Raises:
        TypeError: not a string.
        ValueError: unknown; the message lists the known ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"algorithm={name!r} must be a string, not {type(name).__name__}; choose one of {_names()}")
    for algorithm in ALGORITHMS.values():
        if name in (algorithm.name, *algorithm.aliases):
            return algorithm
    raise ValueError(f"algorithm={name!r} is unknown; choose one of {_names()}")


def check_options(algorithm: Algorithm, options: Mapping[str, Any], exchange: ExchangeOptions | None = None) -> None:
    """Raises unless ``algorithm`` has every option and accepts its value, and can exchange as ``exchange`` says.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option out of range, or one that the algorithm does not have.
    """
    for name, value in options.items():
        if name not in algorithm.options:
            owners = [repr(other.name) for other in ALGORITHMS.values() if name in other.options]
            remedy = (
                f"{' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
                if owners
                else "no algorithm has it"
            )
            raise ValueError(
                f"{name}={value!r} is no option of {algorithm.name!r}: {remedy}; remove it or change `algorithm`"
            )
    if options or exchange is not None:
        # The optimizer's constructor knows the ranges; an optimizer of nothing is the way to ask it.
        given = {**options, **({} if exchange is None else {"exchange": exchange})}
        algorithm.optimizer([torch.nn.Parameter(torch.zeros(1))], **given)


def option_parameters() -> dict[str, inspect.Parameter]:
    """What a strategy can be told by keyword: the options of all algorithms, each of the types that any of them takes, or None."""
    kinds: dict[str, Any] = {}
    for algorithm in ALGORITHMS.values():
        for parameter in as_parameters(algorithm.optimizer.options_class):
            kinds[parameter.name] = parameter.annotation | kinds.get(parameter.name)
    return {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    }


def option_texts() -> dict[str, str]:
    """What each of these options is, in the words of the algorithms that have it, which are named."""
    owners: dict[str, dict[str, list[str]]] = {}
    for algorithm in ALGORITHMS.values():
        for name, text in described(algorithm.optimizer.options_class).items():
            owners.setdefault(name, {}).setdefault(text, []).append(algorithm.name)
    return {
        name: " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()) for name, texts in owners.items()
    }


def _names() -> str:
    return ", ".join(repr(name) for a in ALGORITHMS.values() for name in (a.name, *a.aliases))
