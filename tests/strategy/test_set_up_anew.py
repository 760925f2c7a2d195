"""Programs that replace their optimizers, or make no step, in the midst of a fit."""

from __future__ import annotations

from typing import Any

import torch
from harness import run_ranks
from lightning_support import enter, loader, make_module, onebit, quiet_trainer, same_on_all_ranks, strategy_class

import lightning_onebit as ob


def replacing_rank(rank: int, world: int, how: str, guarded: bool = False) -> dict[str, Any]:
    """New optimizers at the beginning of the third of five epochs, of four batches each; ``how`` they are made.

    ``guarded``: a guard falls back after every compressed step, for ten steps.
    """
    pl = enter(rank)

    def adamw(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-2)

    def on_train_epoch_start(module: Any) -> None:
        if module.current_epoch == 2:
            if how == "assigned":
                module.trainer.optimizers = [adamw(module)]
            else:
                module.trainer.strategy.setup_optimizers(module.trainer)

    strategy = strategy_class()("onebit_adam", exchange=ob.ExchangeOptions(block_size=32))
    kept: list[Any] = []

    def on_train_end(module: Any) -> None:
        kept.extend(strategy.onebit_optimizers)

    module = make_module(pl, adamw, on_train_epoch_start=on_train_epoch_start, on_train_end=on_train_end)
    guard = ob.callbacks.DivergenceGuard(1, residual_limit=1e-9, dense_steps=10)
    freezes_early = [guard, ob.callbacks.VarianceFreeze(latest=0.2)]
    callbacks = [ob.callbacks.CompressionStats(), *(freezes_early if guarded else [])]
    trainer = quiet_trainer(pl, strategy, max_epochs=5, callbacks=callbacks)
    error = ""
    try:
        trainer.fit(module, loader())
    except pl.utilities.exceptions.MisconfigurationException as raised:
        error = str(raised)
    found: dict[str, Any] = {
        "error": error,
        "fallbacks": guard.fallbacks,
        "different": same_on_all_ranks(dict(module.named_parameters())),
    }
    if not error:
        (optimizer,) = kept
        found |= {"dense": optimizer.ledger.dense_steps, "compressed": optimizer.ledger.compressed_steps}
        found |= {"sent": optimizer.ledger.total.bytes_sent}
        found["told"] = float(trainer.callback_metrics["onebit/total_bytes_sent"])
    return found


def test_optimizers_that_the_strategy_has_not_set_up_are_refused_before_a_backward() -> None:
    for found in run_ranks(replacing_rank, 2, "assigned"):
        assert "trainer.strategy.setup_optimizers(trainer)" in found["error"] and found["different"] == []


def test_optimizers_that_are_set_up_anew_freeze_and_are_counted() -> None:
    for found in run_ranks(replacing_rank, 2, "set up"):
        assert found["error"] == "" and found["different"] == []
        # 20 planned steps, 8 of them taken by the optimizer before; the default freeze comes after half of the rest
        assert found["dense"] == 6 and found["dense"] + found["compressed"] == 12
        assert found["told"] == found["sent"] > 0


def test_a_fallback_of_a_guard_ends_with_its_optimizer() -> None:
    """The one before is in its fallback when it is replaced; the new one freezes when it would, and has a fallback of its own."""
    for found in run_ranks(replacing_rank, 2, "set up", True):
        assert found["error"] == "" and found["different"] == []
        assert found["fallbacks"] == 2 and found["compressed"] == 1 and found["dense"] == 11


def idle_rank(rank: int, world: int) -> dict[str, Any]:
    """0/1 Adam with local steps; ``optimizer_step`` only calls its closure in every second batch, as Lightning's docs show."""
    pl = enter(rank)
    seen: dict[str, Any] = {"different": [], "alone": 0}

    def optimizer_step(module: Any, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
        if batch % 2:
            closure()
        else:
            optimizer.step(closure=closure)

    def look(module: Any, *_: Any) -> None:
        seen["different"] += same_on_all_ranks({name: p.clone() for name, p in module.named_parameters()})
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        seen["alone"] += optimizer.mid_local

    gaps, exchange = ob.LocalSteps(double_every=2), ob.ExchangeOptions(block_size=32)
    strategy = strategy_class()("zero_one_adam", freeze_step=4, local_steps=gaps, exchange=exchange)
    looks = {"on_train_batch_end": look, "on_validation_start": look, "on_train_epoch_end": look}
    module = make_module(
        pl, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2), optimizer_step=optimizer_step, **looks
    )
    trainer = quiet_trainer(pl, strategy, max_epochs=6, num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader(16, seed=4))
    return seen


def test_batches_without_a_step_end_with_the_model_that_ranks_share() -> None:
    for seen in run_ranks(idle_rank, 2):
        assert seen["alone"] > 5, "nobody looked between synchronisations"
        assert seen["different"] == []


def sparse_rank(rank: int, world: int) -> str:
    """A sparse gradient of a parameter that no compressed optimizer owns."""
    pl = enter(rank)

    def configure(module: Any) -> list[torch.optim.Optimizer]:
        module.automatic_optimization = False
        return [onebit()(module.net), torch.optim.SparseAdam(module.table.parameters(), lr=1e-2)]

    def training_step(module: Any, batch: Any, _: int) -> None:
        rows = torch.nn.functional.embedding(batch[1], module.table.weight, sparse=True)
        module.manual_backward(module.net(batch[0]).sum() + rows.sum())

    module = make_module(pl, configure, training_step=training_step)
    module.table = torch.nn.Embedding(3, 4)
    strategy = strategy_class()("onebit_adam", other_optimizers="dense")
    try:
        quiet_trainer(pl, strategy).fit(module, loader())
    except TypeError as error:
        return str(error)
    return "no error"


def test_a_sparse_gradient_beside_a_compressed_optimizer_names_its_parameter() -> None:
    for error in run_ranks(sparse_rank, 2):
        assert "table.weight has a sparse gradient" in error and "sparse=False" in error
