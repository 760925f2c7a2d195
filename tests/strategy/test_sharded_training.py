"""Models that are sharded inside a replica, on two replicas of two CPU ranks: what trains, what is shared, what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import counting, run_ranks
from lightning_support import TREES, enter, loader, quiet_trainer, same_on_all_ranks, strategy_class
from sharded_support import SIZES, SMALL, fit, make_sharded, net, shard, sharded_class, whole
from torch.utils.data import DataLoader, TensorDataset

import lightning_onebit as ob
from lightning_onebit.strategy.registry import ALGORITHMS

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="sharded models need torch 2.9"
)

NAMES = ("onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm", "onebit_sgd")
OPTIONS: dict[str, dict[str, Any]] = {name: {"freeze_step": 2} for name in ("onebit_adam", "onebit_lamb")}
LR = {"onebit_sgd": 0.1, "binsgdm": 1e-3}


def names_that_differ(module: Any) -> list[str]:
    return same_on_all_ranks(whole(module))


# ----- training ---------------------------------------------------------------------------------------------------------


def even_net() -> torch.nn.Sequential:
    """Shards on two ranks are whole blocks of 32, so that blocks are those of the unsharded model."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))


def slices(rank: int, ranks: int, steps: int = 6) -> Any:
    """Batches of 32 samples, of which every rank has its part; the parts of consecutive ranks are those of one rank of fewer."""
    x = torch.randn(32 * steps, 8, generator=torch.Generator().manual_seed(3))
    mine = x.view(steps, ranks, 32 // ranks, 8)[:, rank].reshape(-1, 8)
    return DataLoader(TensorDataset(mine, mine[:, :4].argmax(1)), batch_size=32 // ranks)


def train_all(rank: int, world: int, sharded: bool) -> dict[str, Any]:
    """Every algorithm, with clipping; weights after six steps."""
    pl, found = enter(rank), {}
    callbacks = importlib.import_module("lightning_onebit.lightning")
    for name in NAMES:
        how = SIZES if sharded else {"convert_optimizers": True}
        strategy = (sharded_class() if sharded else strategy_class())(
            name, exchange=SMALL, **OPTIONS.get(name, {}), **how
        )
        lr = LR.get(name, 1e-2)
        module = make_sharded(
            pl,
            lambda module, lr=lr: module.trainer.strategy.optimizer(module.parameters(), lr=lr),
            even_net,
            **({} if sharded else {"shard": lambda module: None}),
        )
        fit(
            pl,
            strategy,
            module,
            data=slices(rank, world),
            gradient_clip_val=0.2,
            use_distributed_sampler=False,
            callbacks=[callbacks.ReplicaConsistency(1)],
        )
        [optimizer] = strategy.onebit_optimizers
        assert optimizer.steps == 6 and optimizer.ledger.compressed_steps >= 3, name
        assert names_that_differ(module) == [], name
        found[name] = whole(module)
    return found


def test_every_algorithm_trains_a_sharded_model_as_it_trains_the_whole_one_on_the_means_of_replicas() -> None:
    sharded, plain = run_ranks(train_all, 4, True)[0], run_ranks(train_all, 2, False)[0]
    assert sharded.keys() == set(NAMES)
    for name in sharded.keys() - {"binsgdm"}:  # which draws its signs at random, shards apart
        assert sharded[name].keys() == plain[name].keys()
        for key, value in plain[name].items():
            torch.testing.assert_close(sharded[name][key], value, rtol=1e-5, atol=1e-6, msg=f"{name} {key}")


def norm_net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))


def shard_first(module: Any) -> None:
    """Layers that are not sharded stay whole on every rank."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"])


def on_meta() -> torch.nn.Sequential:
    with torch.device("meta"):
        return net()


def checkpointed() -> torch.nn.Sequential:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    return torch.nn.Sequential(checkpoint_wrapper(model[0]), model[1], model[2])


def with_policy(module: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def compiled(module: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    module.net[0] = torch.compile(module.net[0], backend="eager")
    fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"])
    shard(module)


#: what is different from an ordinary fit -> module, Trainer
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "policy of FSDP2": ({"shard": with_policy}, {}),
    "activation checkpointing": ({"net": checkpointed}, {}),
    "compiled layer": ({"shard": compiled}, {}),
    "meta device": ({"net": on_meta}, {}),
    "clipping by value": ({}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "batch norm": ({"net": norm_net}, {}),
    "layers that are not sharded": ({"shard": shard_first}, {"gradient_clip_val": 0.5}),
}


def train_ways(rank: int, world: int) -> dict[str, Any]:
    pl, found = enter(rank), {}
    for way, (of_module, of_trainer) in WAYS.items():
        strategy = sharded_class()(exchange=SMALL, freeze_step=2, **SIZES)
        module = make_sharded(pl, seed=None, **of_module)
        trainer = quiet_trainer(pl, strategy, max_epochs=3, num_sanity_val_steps=0, **of_trainer)
        trainer.fit(module, loader(), loader(16))
        [optimizer] = strategy.onebit_optimizers
        keys = sorted(trainer.strategy.lightning_module_state_dict())
        found[way] = (names_that_differ(module), optimizer.ledger.compressed_steps, keys)
        assert all(bool(t.isfinite().all()) for t in whole(module).values()), way
    return found


def test_replicas_begin_and_stay_equal_in_every_way_of_training() -> None:
    """Ranks have first weights of their own; precision, policies, wrappers and buffers may not part them."""
    plain = ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
    for found in run_ranks(train_ways, 4, timeout=120):
        for way, (different, compressed, keys) in found.items():
            assert different == [] and compressed == 4, way
            if way != "batch norm":
                assert keys == plain, f"{way}: names in checkpoints have no prefix"


def tensor_parallel(module: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module.net, module.device_mesh["tensor_parallel"], plan)


def tensor_net() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )


def train_tensor_parallel(rank: int, world: int) -> tuple[Any, ...]:
    pl, seen = enter(rank, "pytorch_lightning"), []

    def training_step(self: Any, batch: Any, _: int) -> Any:
        seen.extend(batch[0][:, 0].tolist())
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    strategy = sharded_class("pytorch_lightning")(
        exchange=SMALL, freeze_step=2, replicate_size=2, tensor_parallel_size=2
    )
    module = make_sharded(pl, None, tensor_net, tensor_parallel, None, training_step=training_step)
    fit(pl, strategy, module, gradient_clip_val=0.5)
    kinds = {name: type(p).__name__ for name, p in module.named_parameters()}
    return names_that_differ(module), seen, kinds, strategy.onebit_optimizers[0].ledger.compressed_steps


def test_tensor_parallel_layers_train_with_whole_ones_between_them() -> None:
    found = run_ranks(train_tensor_parallel, 4)
    for different, _, kinds, compressed in found:
        assert different == [] and compressed == 2
        assert kinds["net.0.weight"] == "DTensor" and kinds["net.3.weight"] == "Parameter"
    seen = [samples for _, samples, *_ in found]
    assert seen[0] == seen[1] and seen[2] == seen[3], "ranks of a tensor-parallel group see the same data"
    assert not set(seen[0]) & set(seen[2]) and len(set(seen[0]) | set(seen[2])) == 64, "replicas share the data"


def train_accumulating(rank: int, world: int) -> list[Any]:
    pl, found = enter(rank), []
    for accumulate, batch in ((2, 4), (1, 8)):
        strategy = sharded_class()(exchange=SMALL, freeze_step=1, **SIZES)
        module = make_sharded(pl, net=even_small)
        data = loader(batch=batch)
        with counting() as counted:
            trainer = fit(pl, strategy, module, data=data, accumulate_grad_batches=accumulate, max_epochs=2)
        sampler = trainer.strategy.distributed_sampler_kwargs
        found.append((whole(module), len(counted.of("reduce_scatter")), sampler))
    return found


def even_small() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))


def test_accumulation_reduces_gradients_inside_the_replica_once_per_step() -> None:
    for rank, ((summed, reduced, sampler), (at_once, expected, _)) in enumerate(run_ranks(train_accumulating, 4)):
        assert reduced == expected > 0
        assert sampler == {"num_replicas": 4, "rank": rank}
        for name, value in at_once.items():
            torch.testing.assert_close(summed[name], value, rtol=1e-3, atol=1e-4)


def train_dense(rank: int, world: int) -> tuple[Any, ...]:
    pl = enter(rank)
    strategy = sharded_class()(other_optimizers="dense", **SIZES)
    module = make_sharded(pl, lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2), even_net, shard_first)
    fit(pl, strategy, module, data=slices(rank, world), use_distributed_sampler=False)
    return names_that_differ(module), whole(module)


def test_other_optimizers_train_on_averages_over_all_ranks() -> None:
    torch.manual_seed(0)
    model = even_net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for x, y in slices(0, 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for different, weights in run_ranks(train_dense, 4):
        assert different == []
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[f"net.{name}"], value.detach(), rtol=1e-4, atol=1e-5)


# ----- callbacks --------------------------------------------------------------------------------------------------------


def train_watched(rank: int, world: int) -> tuple[Any, ...]:
    pl = enter(rank)
    own = importlib.import_module("lightning_onebit.lightning")
    watching = [
        own.CompressionStats(residual_every_n_steps=1, sign_agreement_every_n_steps=1),
        own.DivergenceGuard(2, residual_limit=1e9),
        own.LinkProbe(0.001, watch_steps=None),
    ]
    strategy = sharded_class()(exchange=SMALL, **SIZES)
    module = make_sharded(pl)
    trainer = fit(pl, strategy, module, callbacks=watching, max_epochs=4, log_every_n_steps=1)
    freezes = [type(c).__name__ for c in trainer.callbacks if type(c).__name__ == "VarianceFreeze"]
    [optimizer] = strategy.onebit_optimizers
    elements = sum(p.to_local().numel() for p in module.parameters())
    agreement = float(trainer.callback_metrics["onebit/sign_agreement"])
    return freezes, optimizer.ledger.compressed_steps, watching[2].report, elements, agreement


def test_callbacks_work_with_parts_of_the_model() -> None:
    found = run_ranks(train_watched, 4)
    for freezes, compressed, report, _, agreement in found:
        assert freezes == ["VarianceFreeze"] and compressed > 0, "the default ends the warm-up"
        assert report.ranks == 2 and report.elements == found[0][3], "what a rank exchanges, with the other replicas"
        assert 0 < agreement < 1


def drift(rank: int, world: int) -> str:
    pl = enter(rank)
    own = importlib.import_module("lightning_onebit.lightning")

    class Drift(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if rank == 3:
                with torch.no_grad():
                    module.net[2].weight.to_local().view(-1)[0] += 1e-3

    strategy = sharded_class()(exchange=SMALL, freeze_step=1, **SIZES)
    try:
        fit(pl, strategy, make_sharded(pl), callbacks=[Drift(), own.ReplicaConsistency(1)])
    except RuntimeError as error:
        return str(error)
    return ""


def test_replica_consistency_compares_ranks_that_hold_the_same_shard() -> None:
    for said in run_ranks(drift, 4):
        assert "parameter 'net.2.weight'" in said and "on rank 3 against rank 1" in said


# ----- names ------------------------------------------------------------------------------------------------------------


def by_name(rank: int, world: int, tree: str) -> tuple[Any, ...]:
    pl = enter(rank, tree)
    module = make_sharded(pl, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
    trainer = fit(pl, "onebit_adam_sharded", module)
    [optimizer] = trainer.strategy.onebit_optimizers
    mesh = trainer.strategy.device_mesh
    return (
        type(trainer.strategy) is sharded_class(tree),
        type(optimizer),
        dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
    )


@pytest.mark.parametrize("tree", TREES)
def test_names_make_the_strategy_of_each_tree(tree: str) -> None:
    strategies = importlib.import_module(f"{TREES[tree]}.strategies")
    for algorithm in ALGORITHMS.values():
        for name in (algorithm.name, *algorithm.aliases):
            strategy = strategies.StrategyRegistry.get(f"{name}_sharded")
            assert type(strategy) is sharded_class(tree) and isinstance(strategy, strategies.ModelParallelStrategy)
            assert strategy.algorithm == algorithm.name and f"{name}_sharded" in ob.available_strategies()
    for right, optimizer, mesh in run_ranks(by_name, 2, tree):
        assert right and optimizer is ob.OnebitAdam
        assert mesh == {"replicate": 1, "data_parallel": 2, "tensor_parallel": 1}, "a node is a replica"


@pytest.mark.parametrize("tree", TREES)
def test_command_lines_know_the_options(tree: str) -> None:
    pl = importlib.import_module(TREES[tree])
    cli = importlib.import_module(f"{TREES[tree]}.cli")
    arguments = ["--trainer.strategy=OnebitModelParallelStrategy", "--trainer.strategy.replicate_size=2"]
    arguments += ["--trainer.strategy.freeze_step=7", "--trainer.strategy.save_distributed_checkpoint=false"]
    arguments += ["--trainer.strategy.data_parallel_size=auto", "--trainer.accelerator=cpu", "--trainer.devices=4"]
    arguments[0] = f"--trainer.strategy=lightning_onebit.{tree}.OnebitModelParallelStrategy"
    made = cli.LightningCLI(pl.LightningModule, run=False, args=arguments, save_config_callback=None)
    strategy = made.trainer.strategy
    assert type(strategy) is sharded_class(tree) and "OnebitModelParallelStrategy" in repr(strategy)
    assert strategy._sizes() == (2, 2, 1) and not strategy._save_distributed_checkpoint
    made_by_it = strategy.optimizer([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    assert made_by_it.freeze_step == 7
    assert ob.OnebitModelParallelStrategy in map(sharded_class, TREES)


# ----- refusals ---------------------------------------------------------------------------------------------------------


def over_all(module: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module.net)


def unsharded(module: Any) -> None:
    pass


def of_fsdp1() -> torch.nn.Module:
    class FullyShardedDataParallel(torch.nn.Sequential):
        pass

    return FullyShardedDataParallel(*net())


def scaled(pl: Any) -> Any:
    precision = importlib.import_module(f"{pl.__name__}.plugins.precision")
    return precision.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


#: what is wrong -> strategy, module, Trainer, words of the error
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "sizes": (
        {"replicate_size": "auto", "data_parallel_size": 2},
        {},
        {},
        ["replicate_size=1 (auto)", "data_parallel_size=2", "4 processes", "set replicate_size=2"],
    ),
    "uneven": ({"replicate_size": 3}, {}, {}, ["replicate_size=3", "data_parallel_size=1 (auto)", "4 processes"]),
    "no configure_model": (SIZES, {"configure_model": None}, {}, ["configure_model", "OnebitStrategy"]),
    "whole model": (SIZES, {"shard": unsharded}, {}, ["no parameter", "DTensor", 'strategy="onebit_adam"']),
    "over replicas": (SIZES, {"shard": over_all}, {}, ["net.0.weight", "different replicas", '"data_parallel"']),
    "FSDP1": (SIZES, {"net": of_fsdp1, "shard": unsharded}, {}, ["FullyShardedDataParallel", "FSDP2"]),
    "loss scaling": (SIZES, {}, {"plugins": scaled}, ["16-mixed", "bf16-mixed"]),
    "SyncBatchNorm": (SIZES, {}, {"sync_batchnorm": True}, ["sync_batchnorm", "configure_model"]),
    "old torch": (SIZES, {}, {}, ["torch>=2.9", "torch 2.8.1", "OnebitStrategy"]),
    "plain optimizer": (
        SIZES,
        {"configure": lambda m: torch.optim.RMSprop(m.parameters())},
        {},
        ["RMSprop", 'OnebitModelParallelStrategy(other_optimizers="dense")'],
    ),
}


def refuse(rank: int, world: int) -> dict[str, str]:
    pl, said = enter(rank), {}
    version = torch.__version__
    for name, (of_strategy, of_module, of_trainer, _) in REFUSED.items():
        torch.__version__ = "2.8.1" if name == "old torch" else version
        kwargs = {key: value(pl) if callable(value) else value for key, value in of_trainer.items()}
        module = make_sharded(pl, **of_module)
        if name == "no configure_model":
            del type(module).configure_model
            module.net = net()
        try:
            fit(pl, sharded_class()(exchange=SMALL, **of_strategy), module, **kwargs)
        except Exception as error:
            said[name] = str(error)
        finally:
            torch.__version__ = version
            dist.barrier()
    return said


def test_what_cannot_be_trained_is_refused_with_the_remedy() -> None:
    for said in run_ranks(refuse, 4):
        for name, (*_, words) in REFUSED.items():
            assert all(word in said[name] for word in words), f"{name}: {said.get(name)}"


def test_options_are_checked_when_the_strategy_is_made() -> None:
    cls = sharded_class()
    for options, error, words in (
        ({"replicate_size": 0}, ValueError, "replicate_size=0"),
        ({"data_parallel_size": "all"}, TypeError, "data_parallel_size='all'"),
        ({"tensor_parallel_size": "auto"}, TypeError, "tensor_parallel_size='auto'"),
        ({"save_distributed_checkpoint": "no"}, TypeError, "save_distributed_checkpoint='no'"),
        ({"ranks_per_node": 2}, TypeError, "OnebitModelParallelStrategy has no option ranks_per_node=2"),
        ({"ddp_comm_hook": print}, ValueError, "ddp_comm_hook"),
    ):
        with pytest.raises(error, match=words):
            cls(**options)
