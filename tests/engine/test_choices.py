"""Options with fixed values: LightningCLI shows them, refuses others, and the checks at run time know the same list."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from lightning_onebit import _choices
from lightning_onebit._choices import choices
from lightning_onebit.algorithms import LocalSteps
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.lightning import OnebitStrategy
from lightning_onebit.strategy.registry import ALGORITHMS
from lightning_onebit.strategy.trees import installed_trees

OPTIMIZERS = [algorithm.optimizer for algorithm in ALGORITHMS.values()]
GROUPS = [ExchangeOptions, LocalSteps]


def owners() -> list[type]:
    """Everything whose constructor LightningCLI (or a configuration file) may call."""
    found: list[type] = [*OPTIMIZERS, *GROUPS]
    for tree in installed_trees()[:1]:
        module = importlib.import_module(f"lightning_onebit.{tree}")
        found += [value for value in vars(module).values() if inspect.isclass(value) and hasattr(value, "__init__")]
    found += [importlib.import_module("lightning_onebit.strategy.fabric").FabricMixin]
    return [one for one in found if one.__module__.startswith("lightning_onebit")]


def literals(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from literals(part)


def fixed(cls: type) -> dict[str, tuple[str, ...]]:
    """The parameters of a constructor that have fixed values."""
    hints = get_type_hints(cls.__init__)
    # those that a dataclass adds have types, not their names
    hints |= {
        p.name: p.annotation for p in inspect.signature(cls).parameters.values() if not isinstance(p.annotation, str)
    }
    return {name: found for name, kind in hints.items() if (found := tuple(literals(kind)))}


def test_no_option_with_fixed_values_is_a_plain_string() -> None:
    listed = {name for kind in vars(_choices).values() if get_origin(kind) is Literal for name in get_args(kind)}
    assert {"auto", "never", "backward", "bfloat16", "published", "lr_halving", "raise"} <= listed
    for cls in owners():
        for name, parameter in inspect.signature(cls).parameters.items():
            assert parameter.default not in listed or name in fixed(cls), f"{cls.__name__}({name}=...)"
    algorithm = inspect.signature(OnebitStrategy).parameters["algorithm"].annotation
    assert set(choices(algorithm)) == {name for a in ALGORITHMS.values() for name in (a.name, *a.aliases)}


def made(cls: Any, **options: Any) -> Any:
    return cls(*([] if cls in GROUPS else [[torch.nn.Parameter(torch.zeros(2))]]), **options)


@pytest.mark.parametrize(
    "cls", [one for one in (*OPTIMIZERS, *GROUPS) if one.__name__ not in ("OnebitLamb", "OnebitSGD")]
)
def test_the_checks_at_run_time_know_the_same_values(cls: Any) -> None:
    """(1-bit LAMB and 1-bit SGD have no option with fixed values of its own.)"""
    assert fixed(cls)
    for name, values in fixed(cls).items():
        for value in values:
            made(cls, **{name: value})
        with pytest.raises(ValueError, match="choose") as caught:
            made(cls, **{name: "wrong"})
        assert all(repr(value) in str(caught.value) for value in values), name


@pytest.mark.parametrize("cls", ["OnebitStrategy", "VarianceFreeze", *OPTIMIZERS, *GROUPS])
def test_lightning_cli_shows_the_choices_and_refuses_others(cls: Any) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    if isinstance(cls, str):
        cls = getattr(importlib.import_module(f"lightning_onebit.{installed_trees()[0]}"), cls)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "made", skip={"params"} & inspect.signature(cls).parameters.keys())
    shown = re.sub(r"\s+", " ", parser.format_help()).split("--made.")
    for name, values in fixed(cls).items():
        said = " ".join(text for text in shown if text.startswith(f"{name} "))
        assert set(values) <= set(re.findall(r"\w+", said)), name
        assert parser.parse_args([f"--made.{name}={values[-1]}"]).made[name] == values[-1]
        with pytest.raises(jsonargparse.ArgumentError) as caught:
            parser.parse_args([f"--made.{name}=wrong"])
        assert all(value in str(caught.value) for value in values), name
