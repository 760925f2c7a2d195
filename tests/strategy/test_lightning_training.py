"""Training through the Trainer on real ranks: what equals DDP, what is exchanged, what every rank ends up with."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import counting, run_ranks
from lightning_support import (
    differing,
    enter,
    loader,
    make_module,
    norm_net,
    onebit,
    plain_net,
    quiet_trainer,
    same_on_all_ranks,
    strategy_class,
)
from torch import Tensor

import lightning_onebit as ob


def sgd(module: Any) -> Any:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def adamw(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


class Recorder:
    """Gradients as ``on_after_backward`` and clipping leave them, and buffers after each batch, by name."""

    def __init__(self) -> None:
        self.after_backward: list[dict[str, Tensor]] = []
        self.after_clipping: list[dict[str, Tensor]] = []
        self.buffers: list[dict[str, Tensor]] = []

    def methods(self) -> dict[str, Any]:
        recorder = self

        def grads(module: Any) -> dict[str, Tensor]:
            return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

        def on_after_backward(module: Any) -> None:
            recorder.after_backward.append(grads(module))

        def configure_gradient_clipping(module: Any, optimizer: Any, **kwargs: Any) -> None:
            module.clip_gradients(optimizer, **kwargs)
            recorder.after_clipping.append(grads(module))

        def on_train_batch_end(module: Any, *_: Any) -> None:
            recorder.buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})

        return {
            "on_after_backward": on_after_backward,
            "configure_gradient_clipping": configure_gradient_clipping,
            "on_train_batch_end": on_train_batch_end,
        }


# ----- nothing to compress ----------------------------------------------------------------------------------------------


def step_by_hand(module: Any, batch: Any, _: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(torch.nn.functional.cross_entropy(module.net(batch[0]), batch[1]))
    optimizer.step()


def train_as_ddp(rank: int, world: int, tree: str) -> list[str]:
    pl = enter(rank, tree)
    problems = []
    by_hand = {"training_step": step_by_hand, "automatic_optimization": False}
    settings: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"max_epochs": 2}, {}, {}),
        # 4 batches: the last window is not full
        ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"overlap_dense": False}, {}),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"broadcast_buffers": False}, {}),
        ({"max_epochs": 2}, {}, by_hand),
    ]
    for configure in (sgd, adamw):
        for kwargs, options, attributes in settings:
            results = []
            ddp_options = {name: value for name, value in options.items() if name == "broadcast_buffers"}
            for strategy in (
                pl.strategies.DDPStrategy(find_unused_parameters=True, **ddp_options),
                strategy_class(tree)(other_optimizers="dense", convert_optimizers=False, **options),
            ):
                recorder = Recorder()
                # every rank starts from other weights and buffers: rank 0's must win
                module = make_module(pl, configure, norm_net, seed=rank, **recorder.methods(), **attributes)
                module.net[1].running_mean.fill_(float(rank))
                trainer = quiet_trainer(pl, strategy, **kwargs)
                trainer.fit(module, loader(), loader(24, seed=4))
                metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
                results.append((module.state_dict(), metrics, recorder))
            (state, metrics, theirs), (our_state, our_metrics, ours) = results
            different = differing(state, our_state) + differing(metrics, our_metrics)
            for moment in ("after_backward", "after_clipping", "buffers"):
                for before, after in zip(getattr(theirs, moment), getattr(ours, moment), strict=True):
                    different += [f"{name} {moment}" for name in differing(before, after)]
            problems += [f"{configure.__name__} {kwargs} {options} {list(attributes)}: {n}" for n in different]
    return problems


# (test_loops.py compares more with ddp in the first tree)
@pytest.mark.parametrize("tree", [pytest.param("lightning", marks=pytest.mark.nightly), "pytorch_lightning"])
def test_with_nothing_to_compress_the_strategy_equals_ddp_bit_for_bit(tree: str) -> None:
    # BatchNorm, frozen, unused and empty parameters, validation between epochs, accumulation, clipping by norm and by value
    assert run_ranks(train_as_ddp, 2, tree, timeout=120) == [[], []]


def unfreeze(rank: int, world: int) -> tuple[bool, list[str]]:
    pl = enter(rank)

    def on_train_epoch_start(module: Any) -> None:
        module.net[0].requires_grad_(module.current_epoch > 0)

    def configure(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    module = make_module(pl, configure, plain_net, on_train_epoch_start=on_train_epoch_start)
    module.net[0].requires_grad_(False)
    first = module.net[0].weight.detach().clone()
    quiet_trainer(pl, strategy_class()(other_optimizers="dense"), max_epochs=2).fit(module, loader())
    return torch.equal(first, module.net[0].weight), same_on_all_ranks(dict(module.named_parameters()))


def test_a_layer_that_is_unfrozen_while_training_is_averaged_from_then_on() -> None:
    assert run_ranks(unfreeze, 2) == [(False, []), (False, [])]


def overlap(rank: int, world: int) -> dict[str, Any]:
    """How many all-reduces were under way when the first layer's gradient, the last of a backward, landed."""
    pl = enter(rank)
    importlib.import_module("lightning_onebit.strategy.averaging").BUCKET_BYTES = 300  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for name, configure, options in (
        ("dense", sgd, {"other_optimizers": "dense"}),
        ("dense, off", sgd, {"other_optimizers": "dense", "overlap_dense": False}),
        ("warm-up", onebit(1000, bucket_mb=300 / 2**20), {}),
        ("warm-up, off", onebit(1000, bucket_mb=300 / 2**20), {"overlap_dense": False}),
    ):
        issued: list[int] = []
        module = make_module(pl, configure)
        with counting() as seen:

            def landed(grad: Tensor, seen: Any = seen, issued: list[int] = issued) -> None:
                issued.append(len(seen.of("all_reduce")))

            def on_train_batch_start(module: Any, batch: Any, index: int, seen: Any = seen) -> None:
                seen.take()

            type(module).on_train_batch_start = on_train_batch_start
            module.net[0].weight.register_hook(landed)
            quiet_trainer(pl, strategy_class()(**options)).fit(module, loader())
        found[name] = issued
    return found


def test_dense_averaging_overlaps_with_backward_unless_turned_off() -> None:
    for found in run_ranks(overlap, 2):
        for name in ("dense", "warm-up"):
            assert found[name] and min(found[name]) > 0
            assert found[f"{name}, off"] and max(found[f"{name}, off"]) == 0


def own_backward(rank: int, world: int, tree: str) -> list[Any]:
    """A module that looks at gradients and changes them within its own backward, and one that runs two of them there."""
    pl = enter(rank, tree)

    def doubled(module: Any, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()
        for p in module.parameters():
            p.grad.mul_(2.0)

    def twice(module: Any, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    def scaled(module: Any, batch: Any, _: int) -> Tensor:
        return 2.0 * torch.nn.functional.cross_entropy(module.net(batch[0]), batch[1])

    found = []
    for options in ({"other_optimizers": "dense"}, {}):
        configure = sgd if options else onebit(1000, bucket_mb=300 / 2**20)
        states = []
        for attributes in ({"training_step": scaled}, {"backward": doubled}, {"backward": twice}):
            module = make_module(pl, configure, seed=rank, **attributes)
            quiet_trainer(pl, strategy_class(tree)(**options)).fit(module, loader())
            states.append(module.state_dict())
        found.append([differing(states[0], state) for state in states[1:]])
        found.append(same_on_all_ranks(states[1]))
    return found


@pytest.mark.parametrize("tree", ["lightning", "pytorch_lightning"])
def test_a_backward_of_the_modules_own_sees_and_changes_gradients_before_they_are_averaged(tree: str) -> None:
    for found in run_ranks(own_backward, 2, tree):
        assert found == [[[], []], [], [[], []], []]


# ----- warm-up ----------------------------------------------------------------------------------------------------------


def warm_up(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    found: dict[str, Any] = {}
    for name, kwargs in {
        "plain": {"max_epochs": 3},
        "clipped": {"max_epochs": 3, "gradient_clip_val": 0.05},
        "accumulated": {"max_epochs": 3, "accumulate_grad_batches": 2},
    }.items():
        results = []
        for strategy, configure in (
            ("ddp_find_unused_parameters_true", adamw),
            ("onebit_adam", lambda m: ob.OnebitAdam(m.parameters(), lr=1e-2, weight_decay=0.1, freeze_step=1000)),
        ):
            recorder = Recorder()
            module = make_module(pl, configure, norm_net, seed=rank, **recorder.methods())
            trainer = quiet_trainer(pl, strategy, **kwargs)
            trainer.fit(module, loader(), loader(24, seed=4))
            results.append((module.state_dict(), recorder))
        (state, theirs), (our_state, ours) = results
        found[name] = max(
            float((state[k].double() - our_state[k].double()).abs().max()) for k in state if state[k].numel()
        )
        # the first micro-batch that synchronises starts from the same weights: its averaged gradient is DDP's own
        first = kwargs.get("accumulate_grad_batches", 1) - 1
        found[f"{name} gradient"] = differing(theirs.after_backward[first], ours.after_backward[first])
        found[f"{name} replicas"] = same_on_all_ranks(dict(module.named_parameters()))
    return found


def test_warm_up_equals_ddp_with_adamw_to_rounding_and_hooks_see_its_averaged_gradients() -> None:
    for found in run_ranks(warm_up, 2, timeout=120):
        for name in ("plain", "clipped", "accumulated"):
            assert found[name] < 2e-6, found
            assert found[f"{name} gradient"] == []
            assert found[f"{name} replicas"] == []


def big_and_small_batches(rank: int, world: int) -> float:
    pl = enter(rank)
    results = []
    for batch, accumulate in ((16, 1), (4, 4)):
        module = make_module(pl, onebit(freeze_step=1000))
        # the same samples per rank and step, whatever the batch size
        data = loader(64, batch)
        shard = [data.dataset[i] for i in range(rank * 32, rank * 32 + 32)]
        trainer = quiet_trainer(
            pl, "onebit_adam", accumulate_grad_batches=accumulate, use_distributed_sampler=False, max_epochs=2
        )
        trainer.fit(module, torch.utils.data.DataLoader(shard, batch_size=batch))
        assert trainer.strategy.onebit_optimizers[0].steps == 4
        results.append(module.state_dict())
    return max(float((results[0][k] - results[1][k]).abs().max()) for k in results[0])


def test_k_micro_batches_equal_one_big_batch_in_warm_up() -> None:
    for difference in run_ranks(big_and_small_batches, 2):
        assert difference < 1e-6


# ----- compressed stage ---------------------------------------------------------------------------------------------------


def compress(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    found: dict[str, Any] = {}
    module = make_module(pl, onebit(freeze_step=4, block_size=32), norm_net, seed=rank)
    trainer = quiet_trainer(pl, "onebit_adam", max_epochs=5, accumulate_grad_batches=2)
    with counting() as seen:
        trainer.fit(module, loader())
    [optimizer] = trainer.strategy.onebit_optimizers
    ledger = optimizer.ledger
    found["phase"] = optimizer.phase
    found["steps"] = (ledger.steps, ledger.dense_steps, ledger.compressed_steps)
    found["exchanges"] = len(seen.of("all_to_all"))
    found["bytes"] = (ledger.total.bytes_sent, ledger.total.dense_bytes)
    found["different"] = same_on_all_ranks(dict(module.named_parameters()))
    found["owned"] = [p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in module.parameters()]
    found["groups"] = len(dist.distributed_c10d._world.pg_map)
    return found


def test_after_the_freeze_one_exchange_per_optimizer_step_and_replicas_stay_identical() -> None:
    for found in run_ranks(compress, 2):
        assert found["phase"] is ob.Phase.COMPRESSED
        # 4 batches per epoch and rank, two of which make a step: 10 steps, 4 of them dense; one bucket
        assert found["steps"] == (10, 4, 6)
        assert found["exchanges"] == 6
        assert found["bytes"][0] < found["bytes"][1]
        assert found["different"] == []
        # after teardown: every parameter owns its memory, the strategy's groups are gone, the default group is not
        assert all(found["owned"])
        assert found["groups"] == 1


def clip(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    found: dict[str, Any] = {}
    for algorithm, limit in (("norm", 0.02), ("value", 0.005)):
        recorder = Recorder()
        module = make_module(pl, onebit(freeze_step=2), **recorder.methods())
        trainer = quiet_trainer(pl, "onebit_adam", gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
        trainer.fit(module, loader())
        found[algorithm] = []
        for before, after in zip(recorder.after_backward, recorder.after_clipping, strict=True):
            squares = sum(float(g.double().square().sum()) for g in before.values())
            clipped = sum(float(g.double().square().sum()) for g in after.values())
            largest = max(float(g.abs().max()) for g in after.values())
            differ = same_on_all_ranks(before)
            found[algorithm].append((squares, clipped, largest, bool(differ)))
    return found


def test_clipping_uses_the_global_norm_and_the_same_factor_on_every_rank() -> None:
    first, second = run_ranks(clip, 2)
    for step, (a, b) in enumerate(zip(first["norm"], second["norm"], strict=True)):
        local = step >= 2  # after the freeze gradients stay local
        assert a[3] is b[3] is local
        norm = ((a[0] + b[0]) / 2) ** 0.5  # averaged gradients are equal, so this is their norm in warm-up
        assert norm > 0.02, "nothing to clip: the test checks nothing"
        factor = 0.02 / (norm + 1e-6)
        for squares, clipped, _, _ in (a, b):
            assert (clipped / squares) ** 0.5 == pytest.approx(factor, rel=1e-4)
    for results in (first, second):
        assert max(largest for _, _, largest, _ in results["value"]) == pytest.approx(0.005)


# ----- the Trainer's ways to run --------------------------------------------------------------------------------------------


def ways_to_run(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    found: dict[str, Any] = {}
    trainer = quiet_trainer(pl, "onebit_adam", fast_dev_run=True)
    trainer.fit(make_module(pl, adamw), loader(), loader(16))
    found["fast_dev_run"] = trainer.strategy.onebit_optimizers[0].steps

    def broken(module: Any) -> None:
        raise KeyError("a mistake of the user's")

    found["broken off"] = []
    for configure, strategy in ((adamw, "onebit_adam"), (sgd, strategy_class()(other_optimizers="dense"))):
        module = make_module(pl, configure, on_after_backward=broken)
        with contextlib.suppress(KeyError):
            quiet_trainer(pl, strategy).fit(module, loader())
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
        found["broken off"].append((len(dist.distributed_c10d._world.pg_map), hooks))

    # several fits of one Trainer, one strategy and one optimizer object, whose state must live on
    kept: list[Any] = []

    def keep(module: Any) -> Any:
        kept.append(kept[0] if kept else torch.optim.AdamW(module.parameters(), lr=1e-2))
        return kept[0]

    module = make_module(pl, keep)
    strategy = strategy_class()(freeze_step=6)
    trainer = quiet_trainer(pl, strategy)
    trainer.fit(module, loader())
    trainer.validate(module, loader(16), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    [optimizer] = strategy.onebit_optimizers
    found["fits"] = (
        optimizer.steps,
        optimizer.ledger.compressed_steps,
        same_on_all_ranks(dict(module.named_parameters())),
    )
    found["groups"] = len(dist.distributed_c10d._world.pg_map)
    return found


def test_fast_dev_run_several_fits_of_one_trainer_and_a_fit_that_breaks_off() -> None:
    for found in run_ranks(ways_to_run, 2):
        assert found["fast_dev_run"] == 1
        assert found["broken off"] == [(1, 0), (1, 0)], "process groups or hooks are left"
        assert found["fits"] == (12, 6, [])
        assert found["groups"] == 1


def clipped_too_late(rank: int, world: int, algorithm: str, own_hook: bool) -> tuple[str, int]:
    """What is said, and after how many batches."""
    pl = enter(rank)
    strategy, batches = strategy_class()(freeze_step=2, exchange=ob.ExchangeOptions(overlap="backward")), []
    trainer = quiet_trainer(pl, strategy, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    trainer.callbacks.append(pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: batches.append(0)))
    module = make_module(pl, lambda m: strategy.optimizer(m.parameters(), lr=1e-2))
    if own_hook:
        module.configure_gradient_clipping = lambda optimizer, **limits: module.clip_gradients(optimizer, **limits)
    with pytest.raises(Exception, match="overlap=") as caught:
        trainer.fit(module, loader())
    return str(caught.value), len(batches)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_refused_at_set_up_where_gradients_will_have_been_sent(algorithm: str) -> None:
    for message, batches in run_ranks(clipped_too_late, 2, algorithm, False):
        assert 'gradient_clip_val=0.1 of the Trainer comes too late with overlap="backward"' in message
        assert 'use overlap="step", or leave gradient_clip_val out' in message
        assert batches == 0


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("norm", "clip_grad_norm_(): the norm needs all gradients, but overlap='backward' sends them as they come"),
        ("value", "clipping by value (to 0.1) has no effect with overlap='backward'"),
    ],
)
def test_clipping_of_the_modules_own_is_refused_where_gradients_have_been_sent(algorithm: str, said: str) -> None:
    for message, batches in run_ranks(clipped_too_late, 2, algorithm, True):
        assert said in message
        assert batches == 1


def collective_after_backward(rank: int, world: int) -> tuple[int, list[str]]:
    pl = enter(rank)
    exchange = ob.ExchangeOptions(overlap="backward", block_size=32, bucket_mb=1 / 2**14)
    strategy = strategy_class()(freeze_step=2, exchange=exchange)

    def training_step(module: Any, batch: Any, index: int) -> Tensor:
        # the last layer's gradients land first, and on rank 1 in some steps never
        hidden = module.net[1](module.net[0](batch[0]))
        out = hidden[:, :3] if rank == 1 and index == 3 else module.net[2](hidden)
        return torch.nn.functional.cross_entropy(out, batch[1])

    def on_after_backward(module: Any) -> None:
        dist.all_reduce(torch.ones(1))

    hooks = {"training_step": training_step, "on_after_backward": on_after_backward}
    module = make_module(pl, lambda m: strategy.optimizer(m.parameters(), lr=1e-2), **hooks)
    quiet_trainer(pl, strategy, max_epochs=2).fit(module, loader())
    return module.optimizers().optimizer.ledger.compressed_steps, same_on_all_ranks(module.state_dict())


def test_a_collective_between_backward_and_step_finds_every_rank_there() -> None:
    """A rank that lacks gradients which leave first sends what is left at the end of backward, in which another waits for it."""
    for compressed, same in run_ranks(collective_after_backward, 2, timeout=60.0):
        assert compressed == 6 and same == []


def one_device(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    states = []
    for configure in (onebit(freeze_step=2), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.0)):
        module = make_module(pl, configure)
        strategy = "onebit_adam" if not states else "auto"
        # a distributed sampler would shuffle
        trainer = quiet_trainer(pl, strategy, max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, loader(), loader(16))
        states.append(copy.deepcopy(module.state_dict()))
    forced = make_module(pl, onebit(freeze_step=2, _alone=True))
    trainer = quiet_trainer(pl, "onebit_adam")
    trainer.fit(forced, loader())
    return {
        "difference": max(float((states[0][k] - states[1][k]).abs().max()) for k in states[0]),
        "forced": trainer.strategy.onebit_optimizers[0].ledger.compressed_steps,
    }


def test_one_device_compresses_nothing_and_is_adamw() -> None:
    [found] = run_ranks(one_device, 1)
    assert found["difference"] < 1e-6
    assert found["forced"] == 6


# ----- unequal ranks ------------------------------------------------------------------------------------------------------


def mismatched(rank: int, world: int, what: str) -> str:
    pl = enter(rank)

    def net() -> torch.nn.Module:
        made = plain_net()
        if rank == 1:
            if what == "shape":
                made[0] = torch.nn.Linear(6, 17)
                made[2] = torch.nn.Linear(17, 3)
            elif what == "name":
                made.add_module("extra", torch.nn.Linear(1, 1))
            elif what == "dtype":
                made[2].to(torch.bfloat16)
            elif what == "buffer":
                made.register_buffer("table", torch.zeros(2))
        return made

    try:
        quiet_trainer(pl, "onebit_adam").fit(make_module(pl, onebit(), net), loader())
    except ob.PlanMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["net.0.weight", "(16, 6)", "(17, 6)"]),
        ("name", ["net.extra.weight"]),
        ("dtype", ["net.2.weight", "torch.float32", "torch.bfloat16"]),
        ("buffer", ["net.table"]),
    ],
)
def test_models_that_differ_between_ranks_raise_on_every_rank_and_name_the_difference(
    what: str, words: list[str]
) -> None:
    for message in run_ranks(mismatched, 2, what, timeout=60):
        for word in ["model", *words]:
            assert word in message


# ----- several optimizers ---------------------------------------------------------------------------------------------------


def manual(rank: int, world: int) -> dict[str, Any]:
    """Two networks, a compressed and a dense optimizer, and a parameter that no optimizer owns."""
    pl = enter(rank)
    found: dict[str, Any] = {"orphan": []}

    def net() -> torch.nn.Module:
        made = torch.nn.ModuleDict({"a": plain_net(), "b": plain_net()})
        made.register_parameter("orphan", torch.nn.Parameter(torch.ones(3)))
        return made

    def configure(module: Any) -> Any:
        first = ob.OnebitAdam(module.net["a"].parameters(), lr=1e-2)
        return [first, torch.optim.SGD(module.net["b"].parameters(), lr=0.1)]

    def training_step(module: Any, batch: Any, index: int) -> None:
        for optimizer, name in zip(module.optimizers(), "ab", strict=True):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            scores = module.net[name](batch[0])
            loss = torch.nn.functional.cross_entropy(scores * module.net.orphan, batch[1])
            module.manual_backward(loss)
            optimizer.step()
            module.untoggle_optimizer(optimizer)
        module.net.orphan.grad = None
        module.manual_backward((module.net.orphan * (rank + 1.0)).sum())
        found["orphan"].append(module.net.orphan.grad.tolist())
        if module.current_epoch == 0 and index == 1:
            module.optimizers()[0].freeze()

    module = make_module(pl, configure, net, seed=rank, training_step=training_step, automatic_optimization=False)
    strategy = strategy_class()(other_optimizers="dense")
    trainer = quiet_trainer(pl, strategy, max_epochs=2, callbacks=[frozen_late(pl)])
    trainer.fit(module, loader())
    [optimizer] = strategy.onebit_optimizers
    found["steps"] = (optimizer.steps, optimizer.ledger.compressed_steps)
    found["different"] = same_on_all_ranks({n: p for n, p in module.named_parameters() if "orphan" not in n})
    return found


def frozen_late(pl: Any) -> Any:
    from lightning_onebit.lightning import VarianceFreeze

    return VarianceFreeze(10_000)


def test_manual_optimization_with_a_compressed_and_a_dense_optimizer() -> None:
    for found in run_ranks(manual, 2):
        # the user's freeze() through self.optimizers() reached the optimizer itself
        assert found["steps"] == (8, 6)
        assert found["different"] == []
        # a parameter that no optimizer owns still gets averaged gradients: the mean of 1 and 2
        assert all(grads == [1.5, 1.5, 1.5] for grads in found["orphan"])


def two_compressed(rank: int, world: int, toggled: bool) -> dict[str, Any]:
    """Two networks with a compressed optimizer each; in the second epoch the first one's gradients wait for its step()."""
    pl = enter(rank)

    def net() -> torch.nn.Module:
        return torch.nn.ModuleDict({"a": plain_net(), "b": plain_net()})

    def configure(module: Any) -> Any:
        return [module.trainer.strategy.optimizer(module.net[name].parameters(), lr=1e-2) for name in "ab"]

    def training_step(module: Any, batch: Any, index: int) -> None:
        def backward(name: str) -> None:
            module.manual_backward(torch.nn.functional.cross_entropy(module.net[name](batch[0]), batch[1]))

        first, second = module.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        if not toggled:
            backward("a")
            first.step()
            backward("b")
            second.step()
            return
        with first.toggle_model(sync_grad=module.current_epoch == 0):
            backward("a")
        with second.toggle_model():
            backward("b")
        second.step()
        first.step()

    module = make_module(pl, configure, net, seed=rank, training_step=training_step, automatic_optimization=False)
    strategy = strategy_class()()
    quiet_trainer(pl, strategy, max_epochs=2, callbacks=[frozen_late(pl)]).fit(module, loader())
    return {
        "ratio": [optimizer.ledger.ratio for optimizer in strategy.onebit_optimizers],
        "different": same_on_all_ranks(dict(module.named_parameters())),
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


def test_a_backward_sends_nothing_for_a_compressed_optimizer_that_is_toggled_off() -> None:
    apart = run_ranks(two_compressed, 2, True)
    together = run_ranks(two_compressed, 2, False)
    for found in (*apart, *together):
        assert found["different"] == []
    # a control round and presence slots are all that is added to the gradients; without toggling each backward sends both networks'
    assert all(0.9 < ratio <= 1 for ratio in apart[0]["ratio"])
    assert all(ratio < 0.6 for ratio in together[0]["ratio"])
    # neither who is averaged when nor what waits for step() changes what is computed
    assert differing(apart[0]["weights"], together[0]["weights"]) == []


# ----- optimizers and layers that others hold on to -------------------------------------------------------------------------


def keeps_its_optimizer(rank: int, world: int, folder: str) -> list[float]:
    """How far ``onebit_adam``, not yet compressed, is from ddp where a module sets lr through the optimizer that it has made and kept."""
    pl = enter(rank)
    found = []

    def configure(module: Any) -> Any:
        module.own = torch.optim.AdamW(module.parameters(), lr=1e-2)
        return module.own

    def on_train_epoch_start(module: Any) -> None:
        module.own.param_groups[0]["lr"] = (1e-2, 1e-3, 0.0)[module.current_epoch]
        if isinstance(module.trainer.strategy, strategy_class()):
            with pytest.raises(RuntimeError, match="has been converted to OnebitAdam"):
                module.own.step()

    for make in (lambda: "ddp", lambda: strategy_class()("onebit_adam", freeze_step=10**6)):
        path, module = f"{folder}/{len(found)}.ckpt", None
        for epochs in (1, 3):  # the second Trainer resumes
            module = make_module(pl, configure, plain_net, seed=epochs, on_train_epoch_start=on_train_epoch_start)
            trainer = quiet_trainer(pl, make(), max_epochs=epochs)
            trainer.fit(module, loader(), ckpt_path=path if epochs == 3 else None)
            trainer.save_checkpoint(path)
        found.append(module)
    return [float((a - b).detach().abs().max()) for a, b in zip(*(m.parameters() for m in found), strict=True)]


def test_a_module_that_sets_lr_through_the_optimizer_it_made_sets_what_trains(tmp_path: Any) -> None:
    for differences in run_ranks(keeps_its_optimizer, 2, str(tmp_path)):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("then", ["auto", "dense", "onebit_adam", "the same trainer", "a loop"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_after_the_fit_a_converted_optimizer_is_the_programs_again(then: str, decoupled: bool) -> None:
    import lightning.pytorch as pl

    keywords: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if decoupled and "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
        pytest.skip("this torch has no decoupled weight decay in Adam")
    kind: Any = partial(torch.optim.Adam, decoupled_weight_decay=True) if decoupled else torch.optim.AdamW
    module = make_module(pl, lambda module: module.own, plain_net)
    module.own = kind(module.parameters(), **keywords)
    keys = set(module.own.param_groups[0])

    def trainer_of(strategy: Any) -> Any:
        return pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    first = trainer_of(strategy_class()("onebit_adam"))
    first.fit(module, loader())
    assert isinstance(first.optimizers[0], ob.OnebitAdam)
    assert keys <= set(module.own.param_groups[0]) and "compress" not in module.own.param_groups[0]
    module.own.param_groups[0]["lr"] = 0.5  # for what comes next
    before = [p.detach().clone() for p in module.parameters()]
    if then == "a loop":
        module.own.step()
    else:
        if then == "the same trainer":
            trainer = first
            trainer.fit_loop.epoch_loop.max_steps = 6
        else:
            dense = strategy_class()("onebit_adam", convert_optimizers=False, other_optimizers="dense")
            trainer = trainer_of(dense if then == "dense" else then)
        trainer.fit(module, loader())
        [trained] = trainer.optimizers
        assert isinstance(trained, ob.OnebitAdam) == (then in ("onebit_adam", "the same trainer"))
        assert trained.param_groups[0]["lr"] == 0.5
        module.own.add_param_group({"params": torch.nn.Parameter(torch.ones(2))})
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("limit", [None, 0, 0.5])
def test_only_one_of_trainer_and_optimizer_clips(limit: float | None) -> None:
    import lightning.pytorch as pl

    module = make_module(pl, lambda module: module.trainer.strategy.optimizer(module.parameters(), lr=0.1), plain_net)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy_class()("onebit_adam", freeze_step=2, max_grad_norm=1.0), max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=limit,
    )  # fmt: skip
    refused = pytest.raises(
        Exception, match=r"gradient_clip_val=0\.5 of the Trainer and max_grad_norm=1\.0 of the optimizer"
    )
    with refused if limit else contextlib.nullcontext():
        trainer.fit(module, loader())
    assert trainer.global_step == (0 if limit else 3)


def unfreezes_late(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    finetuning = importlib.import_module(f"{pl.__name__}.callbacks").BackboneFinetuning

    def configure(module: Any) -> Any:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)

    module = make_module(pl, configure, plain_net)
    module.backbone = module.net[0]
    before = module.backbone.weight.detach().clone()
    strategy = strategy_class()("onebit_adam", freeze_step=2)
    quiet_trainer(pl, strategy, max_epochs=3, callbacks=[finetuning(1, verbose=False)]).fit(module, loader())
    [optimizer] = strategy.onebit_optimizers
    return {
        "groups": [group["compress"] for group in optimizer.param_groups],
        "moved": not torch.equal(before, module.backbone.weight),
        "different": same_on_all_ranks(dict(module.named_parameters())),
    }


def test_layers_that_backbone_finetuning_unfreezes_after_the_freeze_are_trained() -> None:
    for found in run_ranks(unfreezes_late, 2):
        assert found == {"groups": [True, True], "moved": True, "different": []}
