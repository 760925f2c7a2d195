"""A plain Adam becomes a compressed one, and everything that pointed at it follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightning_onebit import ExchangeOptions, OnebitAdam
from lightning_onebit.strategy.convert import convert, obstacle, repoint_schedulers, stand_down, stand_in


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(count)]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_groups_hyperparameters_and_keys_of_the_users_are_taken_over() -> None:
    a, b = parameters()
    plain = torch.optim.AdamW(
        [
            {"params": [a], "lr": 0.1, "name": "head", "compress": False},
            {"params": [b], "betas": (0.8, 0.99), "eps": 1e-6},
        ],
        lr=0.2,
        weight_decay=0.03,
    )
    made = convert(plain, OnebitAdam, {"freeze_step": 7, "exchange": ExchangeOptions(block_size=64)})
    first, second = made.param_groups
    assert first["params"] == [a] and second["params"] == [b]
    assert (first["lr"], first["name"], first["compress"], first["weight_decay"]) == (0.1, "head", False, 0.03)
    assert (second["lr"], second["betas"], second["eps"], second["compress"]) == (0.2, (0.8, 0.99), 1e-6, True)
    assert made.freeze_step == 7 and made.exchange.block_size == 64
    made.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert (made.param_groups[2]["lr"], made.param_groups[2]["weight_decay"]) == (0.2, 0.03)
    assert "lr" in plain.param_groups[0] and "amsgrad" in plain.param_groups[0], "the plain optimizer was changed"


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_the_converted_optimizer_steps_as_the_plain_one_from_where_it_was(make: Any) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1 if make is torch.optim.AdamW else 0.0}
    plain, reference = make(ours, **options), make(theirs, **options)
    for seed in range(3):  # it has moments already
        step(plain, seed)
        step(reference, seed)
    made = convert(plain, OnebitAdam, {})
    assert made.steps == 3
    for seed in range(3, 6):
        step(made, seed)
        step(reference, seed)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["amsgrad=True"]),
        (lambda p: torch.optim.AdamW(p, maximize=True), ["maximize=True"]),
        (lambda p: torch.optim.AdamW(p, differentiable=True), ["differentiable=True"]),
        (lambda p: torch.optim.AdamW(p, capturable=True), ["capturable=True"]),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), ["weight_decay=0.1", "L2", "AdamW"]),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), ["lr=", "plain numbers"]),
        (
            lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.2}]),
            ["weight_decay=0.2", "parameter group 1"],
        ),
    ],
)
def test_what_has_no_compressed_counterpart_is_refused_by_name(make: Callable[[Any], Any], words: list[str]) -> None:
    plain = make(parameters())
    reason = obstacle(plain)
    assert reason is not None
    with pytest.raises(ValueError, match="cannot convert") as caught:
        convert(plain, OnebitAdam, {})
    for word in words:
        assert word in reason and word in str(caught.value)


def test_what_can_be_converted_has_no_obstacle() -> None:
    for plain in (
        torch.optim.AdamW(parameters(), foreach=True, weight_decay=0.1),
        torch.optim.Adam(parameters(), fused=True),
    ):
        assert obstacle(plain) is None


@pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.Adam(parameters()).defaults, reason="torch older than 2.6"
)
def test_adam_with_decoupled_decay_is_adamw() -> None:
    plain = torch.optim.Adam(parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    assert convert(plain, OnebitAdam, {}).param_groups[0]["weight_decay"] == 0.1


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "one cycle": lambda o: OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 10)], [3]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, total_iters=4), ExponentialLR(o, 0.9)]),
    "nested": lambda o: SequentialLR(
        o, [ChainedScheduler([ConstantLR(o, 0.5, total_iters=4), ExponentialLR(o, 0.9)]), CosineAnnealingLR(o, 10)], [4]
    ),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_follow_without_a_warning_and_give_the_same_learning_rates(name: str) -> None:
    if name == "nested" and Version(torch.__version__) < Version("2.6"):
        pytest.skip("torch 2.5 cannot put a ChainedScheduler into a SequentialLR")
    plain = torch.optim.AdamW([{"params": p, "lr": lr} for p, lr in zip(parameters(), (0.1, 0.01), strict=True)])
    reference = torch.optim.AdamW([{"params": p, "lr": lr} for p, lr in zip(parameters(), (0.1, 0.01), strict=True)])
    scheduler, expected = SCHEDULERS[name](plain), SCHEDULERS[name](reference)
    made = convert(plain, OnebitAdam, {})
    repoint_schedulers([scheduler], plain, made)
    assert scheduler.optimizer is made
    before = [group["lr"] for group in plain.param_groups]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch 2.5's own SequentialLR calls step(0) at a milestone
        warnings.filterwarnings("ignore", message="The epoch parameter in")
        for seed in range(8):
            step(made, seed)
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append([group["lr"] for group in made.param_groups])
    for seed in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(reference, seed)
            expected.step(*([1.0] if name == "plateau" else []))
        assert rates[seed] == [group["lr"] for group in reference.param_groups]
    assert rates[0] != rates[-1], "the schedule does nothing: the test checks nothing"
    assert [group["lr"] for group in plain.param_groups] == before, "the plain optimizer is still scheduled"


def test_torch_still_warns_of_a_scheduler_that_steps_before_its_optimizer() -> None:
    plain = torch.optim.AdamW(parameters())
    scheduler = ExponentialLR(plain, 0.9)
    made = convert(plain, OnebitAdam, {})
    repoint_schedulers([scheduler], plain, made)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_scheduler_of_another_optimizer_is_left_alone() -> None:
    plain, other = torch.optim.AdamW(parameters()), torch.optim.SGD(parameters(), lr=0.1)
    scheduler = ExponentialLR(other, 0.9)
    repoint_schedulers([scheduler], plain, convert(plain, OnebitAdam, {}))
    assert scheduler.optimizer is other


def test_a_scheduler_that_was_not_handed_over_is_an_error_rather_than_a_frozen_learning_rate() -> None:
    plain = torch.optim.AdamW(parameters())
    ExponentialLR(plain, 0.9)
    with pytest.raises(ValueError, match="not returned with it"):
        repoint_schedulers([], plain, convert(plain, OnebitAdam, {}))


def test_step_hooks_follow_and_their_handles_still_remove_them() -> None:
    plain = torch.optim.AdamW(parameters())
    calls: list[Any] = []
    handle = plain.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    made = convert(plain, OnebitAdam, {})
    step(made, 0)
    assert calls == [made]
    handle.remove()
    step(made, 1)
    assert len(calls) == 1


def test_what_is_set_and_added_between_two_fits_reaches_what_trains() -> None:
    plain = torch.optim.AdamW(parameters(), lr=0.1, betas=(0.8, 0.99))
    made = convert(plain, OnebitAdam, {})
    stand_in(plain, made)
    plain.param_groups[0]["lr"] = 0.2
    assert made.param_groups[0]["lr"] == 0.2
    stand_down(plain, made)
    assert plain.param_groups[0]["lr"] == 0.2 and plain.param_groups[0]["amsgrad"] is False
    plain.param_groups[0]["lr"] = 0.3
    assert made.param_groups[0]["lr"] == 0.2, "nothing reaches it while it does not train"
    late = torch.nn.Parameter(torch.ones(2))
    plain.add_param_group({"params": [late], "lr": 0.4})
    stand_in(plain, made)
    assert [group["lr"] for group in made.param_groups] == [0.3, 0.4]
    assert made.param_groups[1]["params"][0] is late and made.param_groups[1]["betas"] == (0.8, 0.99)
    stand_down(plain, made)
    stand_down(plain, made)  # a run that ends twice
    assert [group["lr"] for group in plain.param_groups] == [0.3, 0.4]
