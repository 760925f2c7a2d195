"""What programs written for Lightning's DDP say: it works here, or the error says what to write instead."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning_support import TREES, enter, loader, make_module, norm_net, onebit, quiet_trainer, strategy_class

import lightning_onebit as ob
from lightning_onebit.strategy.registry import ALGORITHMS, available_strategies

FABRICS = {"lightning.fabric": "strategy.fabric_lightning", "lightning_fabric": "strategy.fabric_standalone"}


def fabric_class(package: str = "lightning.fabric") -> Any:
    return importlib.import_module(f"lightning_onebit.{FABRICS[package]}").OnebitStrategy


# ----- keywords ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Info lines about keywords."""
    lines: list[str] = []
    monkeypatch.setattr("lightning_onebit.strategy.keywords.rank_zero_info", lines.append)
    return lines


@pytest.mark.parametrize("make", [strategy_class, fabric_class])
@pytest.mark.parametrize(
    "name",
    ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "init_sync", "skip_all_reduce_unused_params"],
)
def test_a_keyword_that_asks_for_nothing_missing_is_accepted_with_one_line_that_says_why(
    make: Any, name: str, said: list[str]
) -> None:
    make()("onebit_adam", **{name: True})
    assert len(said) == 1 and f"{name}=True is not needed: " in said[0]
    make()("onebit_adam", **{name: None})  # LightningCLI gives every keyword
    assert len(said) == 1


@pytest.mark.parametrize(
    ("keyword", "trainer", "fabric"),
    [
        ({"ddp_comm_hook": print}, "the strategy itself compresses", "the strategy itself compresses"),
        ({"ddp_comm_state": 1}, "the strategy itself compresses", "the strategy itself compresses"),
        ({"ddp_comm_wrapper": print}, "the strategy itself compresses", "the strategy itself compresses"),
        (
            {"model_averaging_period": 4},
            'OnebitStrategy("zero_one_adam", local_steps=LocalSteps(...))',
            'Fabric(strategy="zero_one_adam")',
        ),
        (
            {"bucket_cap_mb": 50},
            "is exchange=ExchangeOptions(bucket_mb=50) here",
            "fabric.strategy.optimizer(params, exchange=ExchangeOptions(bucket_mb=50))",
        ),
        ({"process_group": 1}, "process groups of all ranks by itself", "process groups of all ranks by itself"),
        ({"mixed_precision": 1}, "give `precision` to the Trainer", "give `precision` to the Fabric"),
        ({"init_sync": False}, "rank 0's weights", "rank 0's weights"),
        ({"delay_all_reduce_named_params": ["a"]}, "overlap_dense=False", "leave it out"),
        ({"device_ids": [0]}, "`devices` of the Trainer", "`devices` of the Fabric"),
        ({"sync_batchnorm": True}, "to the Trainer", "convert_sync_batchnorm"),
    ],
)
def test_a_keyword_that_has_a_counterpart_is_refused_with_it(
    keyword: dict[str, Any], trainer: str, fabric: str
) -> None:
    [(name, value)] = keyword.items()
    for make, remedy in ((strategy_class(), trainer), (fabric_class(), fabric)):
        with pytest.raises(ValueError) as caught:
            make("onebit_adam", **keyword)
        assert f"{name}={value!r} is no option of OnebitStrategy" in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize(
    ("make", "keyword", "remedy"),
    [
        (strategy_class, {"freez_step": 3}, "did you mean freeze_step?"),
        (strategy_class, {"find_unused_params": True}, "find_unused_parameters"),
        (strategy_class, {"lr": 0.1}, "`self.trainer.strategy.optimizer(params, lr=0.1)`"),
        (strategy_class, {"block_size": 64}, "give `exchange=ExchangeOptions(block_size=64)` to the strategy"),
        (strategy_class, {"xyzzy": 1}, "see help(lightning_onebit.OnebitStrategy)"),
        (fabric_class, {"timout": 3}, "did you mean timeout?"),
        (fabric_class, {"freeze_step": 3}, "`fabric.strategy.optimizer(params, freeze_step=3)`"),
        (
            fabric_class,
            {"block_size": 64},
            "`exchange=ExchangeOptions(block_size=64)` to fabric.strategy.optimizer(params",
        ),
        (fabric_class, {"xyzzy": 1}, "see help(lightning_onebit.fabric.OnebitStrategy)"),
    ],
)
def test_a_keyword_that_nobody_knows_is_refused_with_near_matches(
    make: Any, keyword: dict[str, Any], remedy: str
) -> None:
    [(name, value)] = keyword.items()
    with pytest.raises(TypeError) as caught:
        make()("onebit_adam", **keyword)
    assert str(caught.value).startswith(f"OnebitStrategy has no option {name}={value!r}") and remedy in str(
        caught.value
    )


@pytest.mark.parametrize("tree", TREES)
def test_a_configuration_may_keep_the_keywords_of_ddp(tree: str, said: list[str]) -> None:
    pl = importlib.import_module(TREES[tree])
    cli = importlib.import_module(f"{TREES[tree]}.cli")
    arguments = [
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.strategy=lightning_onebit." + tree + ".OnebitStrategy",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.strategy.freeze_step=7",
    ]
    made = cli.LightningCLI(pl.LightningModule, run=False, args=arguments, save_config_callback=None)
    assert made.trainer.strategy._options == {"freeze_step": 7}
    assert sum("find_unused_parameters=True is not needed" in line for line in said) == 1
    with pytest.raises(Exception, match="bucket_mb=50"):
        cli.LightningCLI(
            pl.LightningModule,
            run=False,
            args=[*arguments, "--trainer.strategy.bucket_cap_mb=50"],
            save_config_callback=None,
        )


def test_every_algorithm_has_the_names_that_ddp_has() -> None:
    expected = set()
    for algorithm in ALGORITHMS.values():
        for start in ("", "_spawn", "_fork", "_notebook"):
            for value in ("true", "false"):
                expected.add(f"{algorithm.name}{start}_find_unused_parameters_{value}")
    assert expected <= set(available_strategies())
    for tree in TREES.values():
        registry = importlib.import_module(f"{tree}.strategies").StrategyRegistry
        strategy = registry.get("onebit_lamb_spawn_find_unused_parameters_true")
        assert strategy.algorithm == "onebit_lamb" and strategy._start_method == "spawn"
        assert expected <= set(registry)
    for package in FABRICS:
        registry = importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY
        assert type(registry.get("onebit_adam_find_unused_parameters_true")) is fabric_class(package)


# ----- what errors call things --------------------------------------------------------------------------------------------


def public_classes() -> list[type]:
    bound = [importlib.import_module(f"lightning_onebit.{tree}") for tree in TREES]
    classes = [getattr(module, name) for module in bound for name in module.__all__]
    return [*classes, *map(fabric_class, FABRICS), *(a.optimizer for a in ALGORITHMS.values())]


def test_no_error_names_a_class_that_users_do_not_know() -> None:
    # Lightning's Callback: hooks that all callbacks share
    known = {cls.__name__ for cls in public_classes()} | {"OnebitOptimizer", "Callback"}
    for cls in public_classes():
        for name in dir(cls):
            for function in (
                inspect.getattr_static(cls, name),
                getattr(inspect.getattr_static(cls, name), "fget", None),
            ):
                if inspect.isfunction(function) and function.__module__.startswith("lightning_onebit"):
                    assert function.__qualname__.split(".")[0] in known, function
    for wrong in (
        lambda: strategy_class()(*range(20)),
        lambda: strategy_class()().optimizer(),
        lambda: ob.callbacks.VarianceFreeze(colour="red"),
        lambda: ob.OnebitAdam([torch.nn.Parameter(torch.ones(1))]).freeze(1, 2, 3),
    ):
        with pytest.raises(TypeError, match=r"^(OnebitStrategy|VarianceFreeze|OnebitOptimizer)\."):
            wrong()


def wrapper_errors(rank: int, world: int, attribute: str) -> str:
    pl = enter(rank)

    def step(self: Any, batch: Any, _: int) -> Any:
        getattr(self.trainer.model, attribute)
        return self.net(batch[0]).sum()

    module = make_module(pl, onebit(), training_step=step)
    with pytest.raises(AttributeError) as caught:
        quiet_trainer(pl, strategy_class()()).fit(module, loader())
    return str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "remedy"),
    [("module", "trainer.lightning_module"), ("no_sync", "trainer.strategy.block_backward_sync()"), ("colour", None)],
)
def test_who_looks_for_the_wrapper_of_ddp_is_told_what_replaces_it(attribute: str, remedy: str | None) -> None:
    for text in run_ranks(wrapper_errors, 2, attribute):
        assert f"has no attribute '{attribute}'" in text
        assert remedy in text if remedy else "DistributedDataParallel" not in text


def test_users_of_sgd_are_told_of_1_bit_sgd_and_how_to_train_it_uncompressed() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(Exception, match=r'strategy="onebit_sgd".*other_optimizers="dense"'):
        strategy_class()()._maker.adopt(optimizer, [])
    with pytest.raises(TypeError, match=r'strategy="onebit_sgd".*other_optimizers="dense"'):
        fabric_class()().setup_optimizer(optimizer)


# ----- a strategy without a Trainer ---------------------------------------------------------------------------------------


def collectives(rank: int, world: int, tree: str) -> None:
    enter(rank, tree)
    base = TREES[tree]
    environments = importlib.import_module(f"{base}.plugins.environments")
    accelerators = importlib.import_module(f"{base}.accelerators")
    result = importlib.import_module(f"{base}.trainer.connectors.logger_connector.result")
    strategy = strategy_class(tree)(
        accelerator=accelerators.CPUAccelerator(),
        parallel_devices=[torch.device("cpu")] * world,
        cluster_environment=environments.LightningEnvironment(),
    )
    strategy.setup_environment()
    mine = torch.full((3, 2), float(rank + 1), requires_grad=True)
    gathered = strategy.all_gather(mine, sync_grads=True)
    assert gathered[:, 0, 0].tolist() == [r + 1.0 for r in range(world)]
    (gathered.sum() * rank).backward()
    assert torch.equal(mine.grad, torch.full((3, 2), float(sum(range(world)))))
    sync = result._Sync(strategy.reduce, _should=True, _op="SUM")
    assert sync(torch.tensor([1.0])).item() == world
    assert strategy.broadcast(rank) == 0 and strategy.reduce_boolean_decision(rank == 0, all=False)
    strategy.teardown()


@pytest.mark.parametrize("tree", TREES)
def test_a_strategy_without_a_trainer_connects_gathers_and_reduces(tree: str) -> None:
    run_ranks(collectives, 2, tree)


# ----- one rank alone -----------------------------------------------------------------------------------------------------


def statistics(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([buffer.detach().float().reshape(-1) for buffer in module.buffers()])


def alike(tensor: torch.Tensor) -> bool:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return all(torch.equal(rows[0], row) for row in rows)


def evaluate_alone(rank: int, world: int, package: str) -> list[bool]:
    enter(rank)
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=world, strategy="onebit_adam")
    fabric.launch()
    modules = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)) for _ in "ab"]
    pairs = [fabric.setup(m, fabric.strategy.optimizer(m.parameters(), lr=1e-2, freeze_step=2)) for m in modules]
    found = []
    for step in range(4):
        for (model, optimizer), named in zip(pairs, (True, False), strict=True):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            fabric.backward(loss, **({"model": model} if named else {}))
            optimizer.step()
            optimizer.zero_grad()
            found.append(alike(statistics(model)))
        if rank == 0:
            for model, module in zip((pair[0] for pair in pairs), modules, strict=True):
                model.eval()
                with torch.no_grad():
                    model(x), model.module(x), module(x)
                inputs = x.clone().requires_grad_()
                torch.autograd.grad(module(inputs).sum(), inputs)  # a saliency map
                model.train()
                with torch.no_grad():
                    model(x)
                model(x)  # only its loss is looked at
    return found


@pytest.mark.parametrize("package", FABRICS)
def test_under_fabric_no_forward_of_one_rank_waits_for_others_and_buffers_follow_rank_0(package: str) -> None:
    for found in run_ranks(evaluate_alone, 2, package, timeout=20.0):
        assert found == [True] * 8


def look_alone(rank: int, world: int) -> bool:
    pl = enter(rank)

    def validation_step(self: Any, batch: Any, index: int) -> None:
        if self.global_rank == 0:
            self(batch[0])
            self.trainer.model(batch[0])
            with torch.enable_grad():
                self.train()
                self(batch[0])
                self.eval()

    module = make_module(pl, onebit(), norm_net, validation_step=validation_step, forward=lambda self, x: self.net(x))
    quiet_trainer(pl, strategy_class()(), max_epochs=2).fit(module, loader(), loader())
    return alike(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def test_in_a_trainer_rank_0_may_look_at_the_model_alone() -> None:
    assert run_ranks(look_alone, 2, timeout=30.0) == [True, True]


# ----- uncompressed optimizers under Fabric -------------------------------------------------------------------------------


def train_uncompressed(rank: int, world: int, package: str) -> list[list[float]]:
    os.environ["LOCAL_RANK"] = str(rank)
    enter(rank)
    found = []
    ours = fabric_class(package)(other_optimizers="dense")
    for strategy in ("ddp", ours):
        fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        torch.manual_seed(rank)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        for step in range(6):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)))
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist())
    fabric.strategy.release(optimizer)
    return found


@pytest.mark.parametrize("package", FABRICS)
def test_under_fabric_other_optimizers_are_trained_as_ddp_trains_them(package: str) -> None:
    for theirs, ours in run_ranks(train_uncompressed, 2, package):
        assert ours == pytest.approx(theirs, abs=1e-6)


def mixed(rank: int, world: int) -> tuple[str, bool]:
    enter(rank)
    strategy = fabric_class()(other_optimizers="dense")
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    body, head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
    net = torch.nn.Sequential(body, head)
    compressed = fabric.strategy.optimizer(body.parameters(), lr=1e-2, freeze_step=2)
    model, compressed, plain = fabric.setup(net, compressed, torch.optim.SGD(head.parameters(), lr=0.1))
    with pytest.raises(ValueError) as caught:
        fabric.setup_optimizers(torch.optim.SGD(body.parameters(), lr=0.1))
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        fabric.backward(torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)))
        for optimizer in (compressed, plain):
            optimizer.step()
            optimizer.zero_grad()
    unowned = torch.nn.Linear(2, 1)
    fabric.backward(fabric.setup(unowned)(torch.full((1, 2), rank + 1.0)).sum())
    assert unowned.weight.grad is not None and unowned.weight.grad.tolist() == [[1.5, 1.5]]
    return str(caught.value), alike(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))


def test_under_fabric_compressed_and_other_optimizers_train_one_model_and_the_rest_is_averaged() -> None:
    for message, same in run_ranks(mixed, 2):
        assert "0.weight belongs to SGD and" in message and "OnebitAdam" in message
        assert same
