"""OnebitSGD: against the oracle through schedules, and what a learning rate does to what is held back."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from optim_support import SMALL, Problem, close, equal, joined, run_world, snapshot, sure, train

from lightning_onebit import OnebitAdam, OnebitSGD
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine.redistribute import Redistribution

#: rises from 0, falls by 10, pauses, and falls again
LRS = (0.0, 0.01, 0.02, 0.02, 0.02, 0.002, 0.002, 0.002, 0.0, 0.002, 0.002, 0.0002, 0.0002, 0.0002)
#: on these no sign is decided by rounding
SEEDS = {("nesterov", 4, 2): 1}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "clipped": {"momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 3.0},
}


def scheduled(seed: int = 0, **options: Any) -> Problem:
    missing = frozenset({(2, 0, 0), (3, -1, 4), (7, 1, 1), (8, -1, 0)})
    settings = {"lr": 0.01, "block_size": 32, **options}
    return Problem(len(LRS), settings, shapes=SMALL, algorithm="onebit_sgd", lrs=LRS, missing=missing, seed=seed)


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("rule", RULES)
def test_it_follows_the_oracle_through_a_schedule(rule: str, world: int, ranks_per_node: int) -> None:
    """Weights after every step, and residuals and each rank's own momentum at the end; replicas are equal bit for bit."""
    made = scheduled(SEEDS.get((rule, world, ranks_per_node), 0), **RULES[rule])
    seen: list[Any] = []
    simulated = made.simulate(world, lambda o, t: seen.append([a.copy() for a in o.x]), ranks_per_node=ranks_per_node)
    sure(simulated)
    results = run_world(train, world, made, ranks_per_node)
    for rank, result in enumerate(results):
        assert equal(result["trajectory"], results[0]["trajectory"]), "replicas differ"
        for t, (ours, theirs) in enumerate(zip(result["trajectory"], seen, strict=True)):
            for l, x in enumerate(ours):
                close(x, theirs[l], max(LRS), f"rank {rank}, step {t + 1}, tensor {l}")
    if ranks_per_node > 1:
        return
    e, d = joined(results, made)
    for l in range(len(made.shapes)):
        for rank in range(world):
            np.testing.assert_allclose(e[rank][l], simulated.exchange.e[rank][l], rtol=1e-5, atol=2e-4)
        np.testing.assert_allclose(d[l], simulated.exchange.d[l], rtol=1e-5, atol=2e-4)


def test_the_same_between_processes() -> None:
    made = scheduled(**RULES["nesterov"])
    real, threads = run_world(train, 2, made, real=True), run_world(train, 2, made)
    assert equal([r["x"] for r in real], [r["x"] for r in threads])
    assert equal([r["residuals"] for r in real], [r["residuals"] for r in threads])


def telescoped(group: Any, rank: int, world: int) -> dict[str, Any]:
    """What weights have moved by, what the rank wanted to move them by, and what it holds back."""
    x = torch.nn.Parameter(torch.zeros(96))
    exchange = ExchangeOptions(block_size=32, process_group=group)
    optimizer = OnebitSGD([x], lr=0.1, momentum=0.9, exchange=exchange)
    wanted, drawn = torch.zeros(96, dtype=torch.float64), torch.Generator().manual_seed(rank)
    for t in range(40):
        optimizer.param_groups[0]["lr"] = lr = 0.0 if t % 7 == 3 else 0.1 * 0.1 ** (t // 10)
        x.grad = torch.randn(96, generator=drawn)
        optimizer.step()
        wanted -= lr * optimizer.state[x]["momentum_buffer"].double()
    return {"moved": x.detach().double(), "wanted": wanted, "lr": lr, **snapshot(optimizer, [x])}


def test_nothing_is_lost_or_blown_up_where_the_learning_rate_falls() -> None:
    """``x = -sum lr p_mean + lr (e_mean + d)``: what was held back counts with the learning rate under which it was."""
    results = run_world(telescoped, 3)
    d = torch.cat([r["residuals"]["server_residual"] for r in results])[:96].double()
    e = sum(r["residuals"]["worker_residual"][:96].double() for r in results) / 3
    wanted = sum(r["wanted"] for r in results) / 3
    for result in results:
        # with plain residuals the difference would be of the size of the first steps, 0.1
        torch.testing.assert_close(result["moved"], wanted + result["lr"] * (e + d), rtol=1e-5, atol=2e-6)


def paused(group: Any, rank: int, world: int) -> list[dict[str, Any]]:
    params = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(50))]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    optimizer = OnebitSGD(groups, lr=0.1, momentum=0.9, exchange=ExchangeOptions(block_size=32, process_group=group))
    states, drawn = [], torch.Generator().manual_seed(rank)
    for t in range(4):
        optimizer.param_groups[0]["lr"] = 0.0 if t in (1, 2) else 0.1
        optimizer.param_groups[1]["lr"] = 0.0 if t == 2 else 0.05
        for p in params:
            p.grad = torch.randn(p.shape, generator=drawn)
        optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
        states.append({**snapshot(optimizer, params), "momenta": momenta, "last": optimizer.ledger.last})
    return states


def test_a_step_with_lr_0_changes_no_residual_and_no_weight() -> None:
    """Of the groups that have it; momenta learn, and nothing is sent where no group moves."""
    for first, second, third, fourth in run_world(paused, 2):
        assert equal(first["x"][0], second["x"][0]) and not equal(first["x"][1], second["x"][1])
        assert equal(second["x"], third["x"]) and not equal(third["x"][0], fourth["x"][0])
        one, two = first["residuals"], second["residuals"]
        assert equal(one["worker_residual"][64:128], two["worker_residual"][64:128]) or equal(
            one["worker_residual"][:64], two["worker_residual"][:64]
        )
        assert first["last"].collectives and not third["last"].collectives
        residuals = ("worker_residual", "server_residual")
        assert all(equal(two[name], third["residuals"][name]) for name in residuals)
        assert not any(equal(a, b) for a, b in zip(first["momenta"], second["momenta"], strict=True))
        assert not any(equal(a, b) for a, b in zip(second["momenta"], third["momenta"], strict=True))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "clipped"])
@pytest.mark.parametrize("dense", [False, True], ids=["alone", "a dense group"])
def test_where_nothing_is_compressed_it_is_torchs_sgd(rule: str, dense: bool) -> None:
    made = scheduled(**RULES[rule])
    options = {k: v for k, v in made.options.items() if k != "block_size"}
    ours, theirs = made.parameters(), made.parameters()
    optimizer = OnebitSGD([{"params": ours, "compress": not dense}], **options)
    plain = torch.optim.SGD(theirs, **options)
    for t in range(made.steps):
        for params, one in ((ours, optimizer), (theirs, plain)):
            made.put(params, t, 0)
            one.param_groups[0]["lr"] = LRS[t]
            one.step()
        assert equal([p.detach() + 0 for p in ours], [p.detach() + 0 for p in theirs]), t


def resumed(group: Any, rank: int, world: int, at: int) -> dict[str, Any]:
    made = scheduled(**RULES["nesterov"])
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    for t in range(made.steps):
        if t == at:
            state, own = optimizer.state_dict(), optimizer.residual_state_dict()
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = made.build(params, process_group=group)
            optimizer.load_state_dict(state)
            optimizer.load_residual_state_dict(own)
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = LRS[t]
        optimizer.step()
    return snapshot(optimizer, params)


@pytest.mark.parametrize("at", [1, 5, 9, 11])
def test_a_run_goes_on_bit_for_bit(at: int) -> None:
    """Also where the learning rate changes with the first step after it, so that the last one must be known."""
    whole, again = run_world(train, 3, scheduled(**RULES["nesterov"])), run_world(resumed, 3, at)
    for a, b in zip(whole, again, strict=True):
        assert all(equal(a[key], b[key]) for key in ("x", "state", "residuals"))


def own_state(group: Any, rank: int, world: int) -> dict[str, Any]:
    made = scheduled(**RULES["momentum"])
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    made.put(params, 0, rank)
    optimizer.step()
    return dict(optimizer.residual_state_dict())


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1)])
def test_another_world_gives_every_rank_the_mean_of_the_momenta(before: int, after: int) -> None:
    parts, mine = run_world(own_state, before), run_world(own_state, after)
    made = scheduled(**RULES["momentum"])
    mean = torch.cat([torch.from_numpy(sum(g) / before).ravel() for g in zip(*made.gradients(0, before), strict=True)])
    for own in mine:
        cut = Redistribution(own)
        for part in parts:
            cut.add(part)
        m = cut.result()["tensors"]["momentum_buffer"]
        assert m.numel() == own["tensors"]["momentum_buffer"].numel()
        torch.testing.assert_close(m[m != 0].sort().values, mean[mean != 0].float().sort().values)


def test_a_plain_sgd_goes_on_compressed_and_back() -> None:
    x, y = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    plain = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    for p, one in ((x, plain), (y, OnebitSGD([y], lr=0.1, momentum=0.9))):
        p.grad = torch.arange(5.0)
        one.step()
    ours = OnebitSGD([y], lr=0.1, momentum=0.9)
    ours.load_state_dict(plain.state_dict())
    for one in (plain, ours):
        one.step()
    assert equal(x.detach(), y.detach())
    plain.load_state_dict(ours.state_dict())
    without = torch.optim.SGD([x], lr=0.1)
    without.step()
    OnebitSGD([y], lr=0.1).load_state_dict(without.state_dict())
    groups = plain.state_dict()["param_groups"]
    adams = {0: {"step": torch.ones(()), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}}
    with pytest.raises(ValueError, match="OnebitSGD cannot continue from an optimizer state without 'momentum_buffer'"):
        ours.load_state_dict({"state": adams, "param_groups": groups})
    for one in groups:
        one["momentum"] = 0.0
    with pytest.raises(ValueError, match="OnebitAdam cannot continue from an optimizer state without 'exp_avg_sq'"):
        OnebitAdam([y]).load_state_dict({"state": {0: {"momentum_buffer": torch.ones(5)}}, "param_groups": groups})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"momentum": -0.1}, ValueError, "momentum=-0.1"),
        ({"nesterov": True}, ValueError, "nesterov=True needs momentum > 0 and dampening=0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "dampening=0"),
        ({"nesterov": 1, "momentum": 0.9}, TypeError, "nesterov=1 must be True or False"),
        ({"exchange": ExchangeOptions(overlap="backward")}, ValueError, "overlap='backward' of the exchange"),
        ({"freeze_step": 5}, TypeError, "freeze_step=5"),
        ({"maximize": True}, TypeError, "maximize=True"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        OnebitSGD([torch.nn.Parameter(torch.zeros(3))], **options)
