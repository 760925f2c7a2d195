"""Strategy names, the algorithm behind each, and the options that an algorithm has: one table entry per algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_onebit.algorithms import BinSGDM, OnebitAdam, OnebitLamb, OnebitSGD, ZeroOneAdam
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer
from lightning_onebit.engine.options import as_parameters, described

#: suffix of a strategy name -> start method, as Lightning names its own strategies
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

#: suffix of the names of ``OnebitModelParallelStrategy``
SHARDED = "_sharded"

#: further suffix -> what it asks for; users of DDP's names find the like here
UNUSED_PARAMETERS: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


@dataclass(frozen=True)
class Algorithm:
    """One way to train with compressed communication.

    Attributes:
        name: the name users know, also that of its strategy.
        title: how texts call it.
        optimizer: its optimizer class, whose ``options_class`` says what options the algorithm has.
        converts: optimizer classes (exactly these, no subclasses) that it can stand in for with the same hyperparameters; ``convert``
            has what hinders it.
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
    known = _by_name()
    for name in (algorithm.name, *algorithm.aliases):
        if name in known and known[name].name != algorithm.name:
            raise ValueError(f"algorithm name {name!r} belongs to {known[name].title}; choose another")
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
        Algorithm("onebit_sgd", "1-bit SGD", OnebitSGD, converts=(torch.optim.SGD,), warm_up=False),
    )
}


def registered_strategies() -> Iterator[tuple[str, Algorithm, dict[str, Any]]]:
    """All names that importing ``lightning_onebit`` registers, aliases included, with further keywords of the strategy."""
    for name, algorithm in _by_name().items():
        for suffix, start_method in START_METHODS.items():
            for further, asked in UNUSED_PARAMETERS.items():
                yield name + suffix + further, algorithm, {"start_method": start_method, **asked}


def sharded_strategies() -> Iterator[tuple[str, Algorithm, dict[str, Any]]]:
    """The same of the strategy for models that are sharded inside a replica."""
    for name, algorithm in _by_name().items():
        yield name + SHARDED, algorithm, {"replicate_size": "auto"}


def register(strategy_class: type, registry: Any, names: Callable[[], Iterator[Any]] = registered_strategies) -> None:
    """Enters a strategy class in a registry of Lightning's or Fabric's under every name, also those of algorithms to come."""
    if (id(registry), strategy_class) not in _registered:
        _registered.add((id(registry), strategy_class))
        when_algorithms_change(lambda: register(strategy_class, registry, names))
    for name, algorithm, keywords in names():
        said = f"{algorithm.title} with " + " and ".join(f"`{key}` {value!r}" for key, value in keywords.items())
        keywords["algorithm"] = algorithm.name
        registry.register(name, strategy_class, description=said, override=True, **keywords)


def available_strategies() -> tuple[str, ...]:
    """The names that ``Trainer(strategy=...)`` accepts once ``lightning_onebit`` is imported; Fabric has those without ``_sharded``.

    Example:
        >>> "onebit_adam" in available_strategies()
        True
    """
    return tuple(name for name, _, _ in (*registered_strategies(), *sharded_strategies()))


def find_algorithm(name: Any) -> Algorithm:
    """The algorithm of a name or alias; ``TypeError`` or ``ValueError``, with the known ones, where there is none."""
    known = _by_name()
    if isinstance(name, str) and name in known:
        return known[name]
    one_of = f"choose one of {', '.join(map(repr, known))}"
    if not isinstance(name, str):
        raise TypeError(f"algorithm={name!r} must be a string, not {type(name).__name__}; {one_of}")
    raise ValueError(f"algorithm={name!r} is unknown; {one_of}")


def check_options(algorithm: Algorithm, options: Mapping[str, Any], exchange: ExchangeOptions | None = None) -> None:
    """``TypeError`` or ``ValueError`` unless ``algorithm`` has every option, accepts its value, and can exchange as ``exchange`` says."""
    for name, value in options.items():
        if name not in algorithm.options:
            owners = [repr(other.name) for other in ALGORITHMS.values() if name in other.options]
            has = "no algorithm has it" if not owners else f"{' and '.join(owners)} ha{'ve' if owners[1:] else 's'} it"
            raise ValueError(
                f"{name}={value!r} is no option of {algorithm.name!r}: {has}; remove it or change `algorithm`"
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
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    return {name: inspect.Parameter(name, by_keyword, default=None, annotation=kind) for name, kind in kinds.items()}


def option_texts() -> dict[str, str]:
    """What each of these options is, in the words of the algorithms that have it, which are named."""
    owners: dict[str, dict[str, list[str]]] = {}
    for algorithm in ALGORITHMS.values():
        for name, text in described(algorithm.optimizer.options_class).items():
            owners.setdefault(name, {}).setdefault(text, []).append(algorithm.name)
    return {
        name: " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()) for name, texts in owners.items()
    }


def algorithm_names() -> tuple[str, ...]:
    """The names and aliases of all algorithms."""
    return tuple(_by_name())


def _by_name() -> dict[str, Algorithm]:
    """Every algorithm by each of its names."""
    return {name: algorithm for algorithm in ALGORITHMS.values() for name in (algorithm.name, *algorithm.aliases)}
