"""Details of callbacks, checkpoints, strategy, benchmark and planner that mutations of the code had shown no other test to hold."""

# ruff: noqa: F811  a fixture is imported, and tests take it by its name
from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_callbacks_probe
import torch
from fake_trainer import FakeModule, FakeTrainer, onebit_adam
from harness import run_ranks
from lightning_support import enter, loader, make_module, onebit, quiet_trainer, strategy_class
from optim_support import run_world
from test_callbacks_guard import _run, _Said, said  # noqa: F401  (a fixture)

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.callbacks import probe
from lightning_onebit.callbacks.freeze import LearningRateWatch, VarianceFreezeMixin
from lightning_onebit.callbacks.guard import DivergenceGuardMixin
from lightning_onebit.callbacks.probe import LinkProbeMixin
from lightning_onebit.callbacks.stats import CompressionStatsMixin
from lightning_onebit.engine import ExchangeOptions, Phase
from lightning_onebit.strategy.ranks import Ranks
from lightning_onebit.strategy.shards import ShardError, Stamp, read_shard, shard_path, write_shard
from lightning_onebit.tools import bench
from lightning_onebit.tools.cluster import Cluster, Job
from lightning_onebit.tools.plan import predict


def two_groups(*betas: float) -> OnebitAdam:
    groups = [{"params": [torch.nn.Parameter(torch.randn(40))], "betas": (0.9, b2)} for b2 in betas]
    return OnebitAdam(groups, exchange=ExchangeOptions(_alone=True, block_size=32, kernels="reference"))


@pytest.mark.parametrize("betas", [(0.9, 0.5), (0.5, 0.9)])
def test_the_guard_thaws_for_as_long_as_the_slowest_group_needs(betas: Any, said: Any) -> None:
    optimizer = two_groups(*betas)
    _, phases = _run([VarianceFreezeMixin(5), DivergenceGuardMixin(5)], optimizer, [1.0] * 5 + [9.0] * 5 + [1.0] * 30)
    assert phases[9:].index("compressed") == 10


def test_a_second_fit_forgets_the_losses_of_the_first(said: Any) -> None:
    optimizer = onebit_adam()
    callbacks = [VarianceFreezeMixin(2), DivergenceGuardMixin(5)]
    trainer, _ = _run(callbacks, optimizer, [1.0] * 10 + [9.0] * 2)
    _run(callbacks, optimizer, [1.0] * 5, trainer)
    assert said.warnings == []


def test_the_best_loss_is_in_the_guards_checkpoint(said: Any) -> None:
    first = DivergenceGuardMixin(5)
    _run([VarianceFreezeMixin(2), first], onebit_adam(), [1.0] * 5)
    resumed, optimizer = DivergenceGuardMixin(5, dense_steps=50), onebit_adam()
    resumed.load_state_dict(first.state_dict())
    _run([VarianceFreezeMixin(1), resumed], optimizer, [1.6] * 10)
    assert len(said.warnings) == 1 and "the best was 1" in said.warnings[0]


def _residual_of_one_rank(rank: int, world: int) -> Phase:
    _Said()
    torch.manual_seed(0)
    optimizer = onebit_adam(_alone=False)
    optimizer.residual_ratio = lambda: 11.0 if rank else 1.0
    _run([VarianceFreezeMixin(5), DivergenceGuardMixin(5, loss_factor=None)], optimizer, [1.0] * 10)
    return optimizer.phase


def test_the_largest_residual_of_any_rank_counts() -> None:
    assert run_ranks(_residual_of_one_rank, 2) == [Phase.WARMUP] * 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = test_callbacks_probe._Said()
    monkeypatch.setattr(probe, "rank_zero_info", found.infos.append)
    monkeypatch.setattr(probe, "rank_zero_warn", found.warnings.append)
    monkeypatch.setattr(probe, "dist", SimpleNamespace(get_backend=lambda: "gloo"))
    monkeypatch.setattr(probe, "measure_link", test_callbacks_probe._network(1e7, 0.0, 1e-9))
    return found


def test_the_probe_times_every_fit_from_its_own_start(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    callback = LinkProbeMixin(watch_steps=10)
    for fit in range(2):
        optimizer = onebit_adam()
        trainer = FakeTrainer([optimizer])
        trainer.start(callback, FakeModule())
        for step in range(5 if fit == 0 else 20):
            trainer.step()
            clock.now += 1.0
            optimizer.ledger.total.communication_seconds += 0.5
            callback.on_train_batch_end(trainer, None, None, None, step)
        clock.now += 100.0
    assert "in 10 dense steps this rank waited 50%" in told.infos[-1]


def test_the_probe_adds_up_the_waiting_of_all_optimizers(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    optimizers = [onebit_adam(), onebit_adam()]
    trainer, callback = FakeTrainer(optimizers), LinkProbeMixin(watch_steps=10)
    trainer.start(callback, FakeModule())
    for step in range(20):
        trainer.step()
        clock.now += 1.0
        for optimizer in optimizers:
            optimizer.ledger.total.communication_seconds += 0.25
        callback.on_train_batch_end(trainer, None, None, None, step)
    assert "this rank waited 50%" in told.infos[-1]


def test_a_plan_that_stays_dense_costs_what_its_16_bit_gradients_do() -> None:
    cluster = Cluster(gpus=8, bandwidth=1e9)
    job = Job(params=336_000_000, compute=0.1, warmup=1.0, gradient_bytes=2)
    assert predict(cluster, job, "onebit_adam").mean_seconds == predict(cluster, job, "dense_fp16").mean_seconds


def test_a_fraction_is_of_all_steps_where_a_fit_goes_on_with_the_same_optimizer(said: Any) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer], planned=8)
    for planned in (8, 20):  # fitted further with the same optimizer, whose steps the Trainer has counted
        trainer.estimated_stepping_batches = planned
        callback = VarianceFreezeMixin(0.7) if planned == 20 else VarianceFreezeMixin(100)
        trainer.callbacks = []
        trainer.start(callback)
        for _ in range(8 if planned == 8 else 12):
            trainer.step()
        callback.teardown(trainer, None, "fit")
    assert optimizer.ledger.dense_steps == 14


def _bound(rank: int, world: int) -> Any:
    pl = enter(rank)
    found = []
    for given, limit in ((timedelta(seconds=50), 1800.0), (timedelta(seconds=50), 20.0)):
        strategy = strategy_class()(timeout=given)
        trainer = quiet_trainer(pl, strategy, max_steps=1)

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                [optimizer] = trainer.strategy.onebit_optimizers
                found.append(optimizer._engine.link.timeout.total_seconds())

        trainer.callbacks.append(Look())
        trainer.fit(make_module(pl, onebit(freeze_step=2, timeout=limit)), loader())
    return found


def test_the_shorter_timeout_bounds_an_exchange() -> None:
    assert run_ranks(_bound, 1) == [[50.0, 20.0]]


def test_the_longest_rest_of_a_learning_rate_tells_when_its_rise_is_over() -> None:
    watch = LearningRateWatch()
    for step, lr in enumerate([1.0] * 10 + [2.0, 2.0, 3.0] + [3.0] * 15, start=1):
        watch.observe(step, [lr])
    assert watch.longest_gap == 10 and watch.rising(23) and not watch.rising(24)


def _signs(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    optimizer = onebit_adam(_alone=False)
    callback, module = CompressionStatsMixin(sign_agreement_every_n_steps=1, summary=False), FakeModule()
    trainer = FakeTrainer([optimizer])
    trainer.start(callback, module)
    trainer.step()
    optimizer.freeze()
    first, second = optimizer.param_groups[0]["params"]
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second) if rank == 0 else None
    callback.on_before_optimizer_step(trainer, module, optimizer)
    return callback._watches[0].found["onebit/sign_agreement"]


def test_sign_agreement_counts_coordinates_that_one_rank_has_no_gradient_for() -> None:
    # the second tensor has a gradient on rank 0 alone: its 7 coordinates do not agree
    assert run_ranks(_signs, 2) == [pytest.approx(165 / 172)] * 2


def test_the_shard_of_another_rank_is_refused(tmp_path: Path) -> None:
    path, stamp = str(tmp_path / "a.ckpt"), Stamp("0" * 32, 2, True)
    write_shard(path, stamp, 1, [])
    shutil.copy(shard_path(path, stamp, 1), shard_path(path, stamp, 0))
    with pytest.raises(ShardError, match="belongs to another checkpoint"):
        read_shard(path, stamp, 0)


def _long(group: Any, rank: int, world: int) -> str | None:
    ranks = Ranks(timedelta(seconds=60), torch.device("cpu"), "saving", group)
    return ranks.agree("x" * 5000 if rank else "")


def test_a_long_message_of_a_failed_save_is_cut() -> None:
    assert run_world(_long, 2) == ["rank 1: " + "x" * 1024] * 2


def _slowest(rank: int, world: int) -> Any:
    bench._time_all_reduce = lambda *_: [rank + 1.0]  # type: ignore[assignment]
    return bench.measure_link(1000, repeats=1, exchange=ExchangeOptions(kernels="reference")).dense_seconds


def test_the_slowest_rank_counts_in_a_benchmark() -> None:
    assert run_ranks(_slowest, 2) == [2.0, 2.0]


def _counts(rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = OnebitAdam([p], freeze_step=1)
    exchange, local = bench._time_exchange(optimizer, p, torch.randn(100), 2)
    return len(exchange), len(local), optimizer.steps


def test_the_first_three_steps_of_a_benchmark_do_not_count() -> None:
    assert run_ranks(_counts, 2) == [(2, 2, 5)] * 2
