"""``strategy="onebit_sgd"``: programs that return a plain ``torch.optim.SGD`` train as they are."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning_support import TREES, enter, quiet_trainer
from optim_support import equal

import lightning_onebit as ob
from lightning_onebit.lightning import OnebitStrategy
from lightning_onebit.strategy.convert import convert, obstacle
from lightning_onebit.tools.bench import measure_link
from lightning_onebit.tools.plan import Cluster, Job, predict


def plain(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(40))], lr=0.1, **options)


def test_hyperparameters_of_a_plain_sgd_are_taken_over() -> None:
    made = convert(plain(momentum=0.9, nesterov=True, weight_decay=0.01), ob.OnebitSGD, {})
    (group,) = made.param_groups
    assert {name: group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")} == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "nesterov": True,
        "weight_decay": 0.01,
    }


def test_a_momentum_that_has_learned_goes_on() -> None:
    """Alone it steps as torch's does, so the two stay together."""
    old, never = plain(momentum=0.9), plain(momentum=0.9)
    for t in range(6):
        if t == 3:
            new = convert(old, ob.OnebitSGD, {})
        for optimizer in (never, old if t < 3 else new):
            optimizer.param_groups[0]["params"][0].grad = torch.linspace(-1, 1, 40) * (t + 1)
            optimizer.step()
    torch.testing.assert_close(new.param_groups[0]["params"][0], never.param_groups[0]["params"][0])


@pytest.mark.parametrize("option", ["maximize", "differentiable"])
def test_what_it_cannot_take_over_is_an_obstacle(option: str) -> None:
    assert f"{option}=True" in str(obstacle(plain(**{option: True})))


def boring(rank: int, world: int, tree: str) -> tuple[str, int, list[Any]]:
    pl = enter(rank, tree)
    model = importlib.import_module(f"{TREES[tree]}.demos.boring_classes").BoringModel()
    trainer = quiet_trainer(pl, "onebit_sgd", limit_train_batches=8, limit_val_batches=2)
    trainer.fit(model)
    (optimizer,) = trainer.strategy.onebit_optimizers
    return type(optimizer).__name__, optimizer.ledger.compressed_steps, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("tree", TREES)
def test_the_boring_model_trains_in_both_namespaces(tree: str) -> None:
    (name, steps, ours), (_, _, theirs) = run_ranks(boring, 2, tree)
    assert name == "OnebitSGD" and steps == 8 and equal(ours, theirs)


def under_fabric(rank: int, world: int) -> str:
    enter(rank)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="onebit_sgd")
    fabric.launch()
    model = torch.nn.Linear(32, 2)
    with pytest.raises(TypeError, match=r"lightning_onebit\.OnebitSGD\(.*Fabric converts none"):
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model, optimizer = fabric.setup(model, fabric.strategy.optimizer(model.parameters(), lr=0.1, momentum=0.9))
    fabric.backward(model(torch.ones(4, 32)).square().mean())
    optimizer.step()
    return type(optimizer.optimizer).__name__


def test_fabric_trains_it_and_says_that_it_converts_none() -> None:
    assert run_ranks(under_fabric, 2) == ["OnebitSGD"] * 2


def measured(rank: int, world: int) -> float:
    return measure_link(4000, algorithm="onebit_sgd", repeats=1).exchange_bytes


def test_configurations_the_planner_and_the_bench_know_it() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(OnebitStrategy, "strategy")
    made = parser.instantiate_classes(parser.parse_args(["--strategy.algorithm=onebit_sgd"])).strategy
    assert isinstance(made.optimizer([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9), ob.OnebitSGD)
    found = predict(Cluster(gpus=64, gpus_per_node=8, bandwidth=1e9), Job(params=10**8, compute=0.1), "onebit_sgd")
    assert found.dense_share == 0.0 and found.step_seconds < 0.2 * found.dense_seconds
    assert run_ranks(measured, 2)[0] < 4000
