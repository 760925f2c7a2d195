"""Options: one dataclass for the exchange, one for each algorithm, and what is said about keywords that nobody has."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import lightning_onebit as ob
from lightning_onebit.algorithms import AdamOptions, BinSGDMOptions, LambOptions, ZeroOneAdamOptions
from lightning_onebit.engine import Options
from lightning_onebit.engine.options import takes
from lightning_onebit.strategy.registry import ALGORITHMS

OPTIMIZERS = [algorithm.optimizer for algorithm in ALGORITHMS.values()]


def made(cls: Any, **options: Any) -> Any:
    return cls([torch.nn.Parameter(torch.ones(3))], **options)


# ----- of the exchange ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block_size": 0}, ValueError, "block_size=0"),
        ({"block_size": 100}, ValueError, "block_size=100 must be a multiple of 32"),
        ({"block_size": 64.0}, TypeError, "block_size=64.0 must be an integer"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb=0"),
        ({"bucket_mb": float("inf")}, ValueError, "bucket_mb=inf"),
        ({"overlap": "always"}, ValueError, "overlap='always' is unknown; choose one of 'step', 'backward'"),
        ({"state_dtype": "float16"}, ValueError, "state_dtype='float16' is unknown; choose one of"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite='ignore' is unknown; choose one of 'skip', 'raise'"),
        ({"kernels": "gpu"}, ValueError, "kernels='gpu' is unknown; choose one of"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": None}, TypeError, "timeout=None"),
        ({"process_group": "gloo"}, TypeError, "process_group='gloo' must be a group of torch.distributed"),
    ],
)
def test_bad_options_of_the_exchange_are_named_with_their_value(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ob.ExchangeOptions(**options)


def test_the_exchange_is_made_once_and_changed_by_making_another() -> None:
    exchange = ob.ExchangeOptions(block_size=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        exchange.block_size = 128  # type: ignore[misc]
    assert made(ob.OnebitAdam, exchange=exchange).exchange is exchange
    with pytest.raises(ValueError, match="block_size=100"):
        dataclasses.replace(exchange, block_size=100)


def test_buckets_have_a_size_by_default_for_each_kind_of_device() -> None:
    step, backward = ob.ExchangeOptions(), ob.ExchangeOptions(overlap="backward")
    assert [o.bucket_size(device) for o in (step, backward) for device in ("cpu", "cuda")] == [16.0, 64.0, 16.0, 16.0]
    assert step.bucket_size("cuda", exchanged=False) == 16.0  # they leave while backward goes on
    given = ob.ExchangeOptions(bucket_mb=3.0)
    assert given.bucket_size("cpu") == given.bucket_size("cuda") == given.bucket_size("cuda", exchanged=False) == 3.0
    optimizer = made(ob.OnebitAdam)
    assert optimizer.exchange.bucket_mb is None and optimizer.bucket_mb == 16.0
    # what all ranks must agree on is the size, not the default
    assert "option bucket_mb=16.0" in optimizer.plan_description()


@pytest.mark.parametrize(
    ("cls", "given", "words"),
    [
        (
            ob.ZeroOneAdam,
            {"overlap": "backward"},
            "overlap='backward' of the exchange cannot take effect in ZeroOneAdam",
        ),
        (ob.BinSGDM, {"overlap": "backward"}, "overlap='backward' of the exchange cannot take effect in BinSGDM"),
        (
            ob.BinSGDM,
            {"state_dtype": "bfloat16"},
            "state_dtype='bfloat16' of the exchange cannot take effect in BinSGDM",
        ),
    ],
)
def test_what_cannot_take_effect_is_refused_by_name(cls: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}; leave it out"):
        made(cls, exchange=ob.ExchangeOptions(**given))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_an_exchange_that_is_none_is_refused(cls: Any) -> None:
    for given in ({"block_size": 64}, {}, 64):
        with pytest.raises(TypeError, match=r"exchange=.* must be an ExchangeOptions or None, not .*; give exchange="):
            made(cls, exchange=given)
    assert made(cls, exchange=None).exchange == ob.ExchangeOptions()


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_state_is_in_16_bits_where_it_can_be_and_is_not_asked_to_be_exact(cls: Any) -> None:
    exact = cls in (ob.BinSGDM, ob.OnebitSGD)
    default = made(cls)
    assert default._engine.kept.state_dtype is (torch.float32 if exact else torch.bfloat16)
    assert f"option state_dtype={'float32' if exact else 'bfloat16'}" in default._engine.plan_description()
    asked = made(cls, exchange=ob.ExchangeOptions(state_dtype="float32"))
    assert asked._engine.kept.state_dtype is torch.float32


# ----- of the algorithms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ob.OnebitAdam, AdamOptions),
        (ob.OnebitLamb, LambOptions),
        (ob.ZeroOneAdam, ZeroOneAdamOptions),
        (ob.BinSGDM, BinSGDMOptions),
    ],
)
def test_a_constructor_shows_the_fields_of_its_dataclass(cls: Any, options: type[Options]) -> None:
    """With their types and defaults; none of them is private, and none is written a second time."""
    assert cls.options_class is options
    shown = inspect.signature(cls).parameters
    own = {f.name for f in dataclasses.fields(options) if not f.name.startswith("_")}
    assert own < shown.keys() and not any(name.startswith("_") for name in shown)
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    code = inspect.unwrap(cls.__init__).__code__
    assert own.isdisjoint(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for f in dataclasses.fields(options):
        if f.name in own:
            assert shown[f.name].kind is inspect.Parameter.KEYWORD_ONLY and shown[f.name].default == f.default
            assert not isinstance(shown[f.name].annotation, str)
    assert made(cls).options == options()


def test_a_subclass_without_a_constructor_takes_options_of_its_own() -> None:
    """Also one of an optimizer that takes options itself, whose signature stays as it was."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(AdamOptions):
        extra: int = 3

    before = inspect.signature(ob.OnebitAdam)

    @takes(Mine)
    class MyAdam(ob.OnebitAdam):
        """With one option more."""

    shown = inspect.signature(MyAdam).parameters
    assert list(shown)[:5] == ["params", "lr", "betas", "eps", "weight_decay"] and list(shown)[-1] == "exchange"
    assert shown.keys() - before.parameters.keys() == {"extra"} and shown["extra"].default == 3
    assert inspect.signature(ob.OnebitAdam) == before
    optimizer = made(MyAdam, lr=0.5, extra=7, freeze_step=2)
    assert optimizer.options == Mine(extra=7, freeze_step=2) and optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match="extra=7"):
        made(ob.OnebitAdam, extra=7)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_what_is_given_is_what_the_optimizer_holds(cls: Any) -> None:
    optimizer = made(cls, max_grad_norm=2.0)
    assert optimizer.options.max_grad_norm == 2.0 and optimizer.options.changed() == {"max_grad_norm": 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.options.max_grad_norm = 3.0


@pytest.mark.parametrize(
    ("cls", "given", "words"),
    [
        (
            ob.OnebitAdam,
            {"freeze_steps": 3},
            r"OnebitAdam\(\) got an unexpected keyword argument freeze_steps=3; did you mean freeze_step\?",
        ),
        (ob.ZeroOneAdam, {"var_freeze_step": 3}, r"var_freeze_step=3; did you mean freeze_step\?"),
        (ob.ZeroOneAdam, {"local_step": 8}, r"local_step=8; did you mean local_steps"),
        (ob.OnebitLamb, {"coefficient": 0.9}, r"coefficient=0.9; did you mean coefficients\?"),
        (ob.OnebitLamb, {"recipe": "published"}, "recipe='published'$"),
        (ob.BinSGDM, {"freeze_step": 3}, "freeze_step=3$"),
        (ob.BinSGDM, {"sed": 3}, r"sed=3; did you mean seed\?"),
        (ob.OnebitAdam, {"nothing_like_it": 3}, "nothing_like_it=3$"),
        *(
            (cls, {name: 64}, rf"{name}=64; did you mean exchange=ExchangeOptions\({name}=\.\.\.\)\?")
            for cls in OPTIMIZERS
            for name in ("block_size", "kernels", "timeout", "process_group")
        ),
    ],
)
def test_unknown_keywords_are_refused_with_near_matches(cls: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        made(cls, **given)
