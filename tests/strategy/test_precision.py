"""16-mixed: one decision about overflows on all ranks, gradients unscaled before they are exchanged."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning_support import (
    differing,
    early_refreshes,
    enter,
    loader,
    make_module,
    plain_net,
    quiet_trainer,
    resumes_within_epochs,
    same_on_all_ranks,
    strategy_class,
)
from test_resume import OPTIONS

from lightning_onebit.engine import ExchangeOptions, engine

STEPS = 12
# in the warm-up and compressed; between local steps of 0/1 Adam
OVERFLOWS = (2, 8)


def half(pl: Any, **scaler: Any) -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **scaler))


def configure(module: Any) -> Any:
    strategy = module.trainer.strategy
    return strategy.optimizer(module.parameters(), lr=1e-2, weight_decay=0.01, **early_refreshes(strategy))


def snapshot(trainer: Any, module: Any) -> dict[str, Any]:
    (optimizer,) = trainer.strategy.onebit_optimizers
    state = optimizer.state_dict()["state"]
    return {
        "weights": {k: v.detach().clone() for k, v in module.named_parameters()},
        "by rank": {k: v.clone() for k, v in optimizer.residual_state_dict()["tensors"].items()},
        "state": {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items()},
        "steps": optimizer.steps,
        "scaler": trainer.precision_plugin.scaler.state_dict(),
    }


def fit(pl: Any, strategy: Any, overflows: tuple[int, ...], scaler: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Trains; on the last rank the loss is infinite in the given batches. Snapshots after every batch."""
    after: list[dict[str, Any]] = []
    ckpt_path, configured = kwargs.pop("ckpt_path", None), kwargs.pop("configure", configure)

    def training_step(module: Any, batch: Any, batch_idx: int) -> Any:
        trainer = module.trainer
        seed = 100 * batch_idx + trainer.global_rank
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        loss = torch.nn.functional.cross_entropy(module.net(x).float(), x[:, :3].argmax(1))
        bad = trainer.global_rank == trainer.world_size - 1 and batch_idx in overflows
        return loss * float("inf") if bad else loss

    def on_train_batch_end(module: Any, *_: Any) -> None:
        if module.trainer.strategy.__class__.__name__ == "OnebitStrategy":
            after.append(snapshot(module.trainer, module))

    module = make_module(pl, configured, plain_net, training_step=training_step, on_train_batch_end=on_train_batch_end)
    kwargs = {"max_steps": STEPS, "max_epochs": 1, "plugins": [half(pl, **scaler)], **kwargs}
    trainer = quiet_trainer(pl, strategy, **kwargs)
    error = None
    try:
        trainer.fit(module, loader(samples=400, batch=4), ckpt_path=ckpt_path)
    except FloatingPointError as raised:
        error = str(raised)
    weights = {k: v.detach().clone() for k, v in module.named_parameters()}
    return {
        "after": after,
        "weights": weights,
        "error": error,
        "scaler": trainer.precision_plugin.scaler.state_dict(),
        "different": same_on_all_ranks(weights),
        "trainer": trainer,
    }


def overflow_rank(rank: int, world: int, algorithm: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    pl = enter(rank)
    strategy = strategy_class()(algorithm, exchange=ExchangeOptions(block_size=64), **OPTIONS[algorithm])
    every = kwargs.get("accumulate_grad_batches", 1)
    overflows = tuple(every * step for step in OVERFLOWS)
    found = fit(pl, strategy, overflows, {"init_scale": 2.0**10, "growth_interval": 4}, **kwargs)
    after = found["after"][every - 1 :: every]
    (optimizer,) = strategy.onebit_optimizers
    changed = {}
    for step in range(1, STEPS):
        a, b = after[step - 1], after[step]
        names = differing(a["weights"], b["weights"]) if a["weights"].keys() == b["weights"].keys() else ["?"]
        for part in ("by rank", "state"):
            names += differing(a[part], b[part]) if a[part].keys() == b[part].keys() else ["?"]
        changed[step] = bool(names) or a["steps"] != b["steps"]
    return {
        "still": [step for step, moved in changed.items() if not moved],
        "skipped": (optimizer.steps, optimizer.skipped_steps, optimizer.ledger.total.skipped),
        "scales": [s["scaler"]["scale"] for s in after],
        "scaler": found["scaler"],
        "different": found["different"],
        "finite": all(bool(torch.isfinite(t).all()) for t in after[-1]["by rank"].values()),
        "phase": optimizer.phase.value,
    }


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        ("onebit_adam", {}),
        ("onebit_adam", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        ("onebit_lamb", {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        ("zero_one_adam", {}),
        ("binsgdm", {}),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_leaves_everything_as_it_was(
    algorithm: str, kwargs: dict[str, Any]
) -> None:
    results = run_ranks(overflow_rank, 2, algorithm, kwargs)
    for found in results:
        assert found["still"] == list(OVERFLOWS)
        assert found["skipped"] == (STEPS - 2, 2, 2)
        # halved at each overflow, doubled after four good steps
        expected = [2.0**10] * 2 + [2.0**9] * 4 + [2.0**10] * 2 + [2.0**9] * 4
        assert found["scales"] == expected
        assert found["different"] == [] and found["finite"]
        assert found["phase"] != "warmup"
    assert results[0]["scaler"] == results[1]["scaler"]


def scale_rank(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    found = {}
    for scale in (2.0, 2.0**12):
        strategy = strategy_class()("onebit_adam", freeze_step=4, exchange=ExchangeOptions(block_size=64))
        run = fit(pl, strategy, (), {"init_scale": scale})
        found[scale] = run["after"][-1]["by rank"]["worker_residual"]
    return found


def test_residuals_are_in_units_of_gradients_whatever_the_loss_scale() -> None:
    for found in run_ranks(scale_rank, 2):
        small, large = found.values()
        assert small.any()
        norm = float(torch.linalg.vector_norm(small))
        assert 0.5 * norm < float(torch.linalg.vector_norm(large)) < 2 * norm


def storm_rank(rank: int, world: int, freeze_step: int) -> dict[str, Any]:
    pl = enter(rank)
    engine.MOST_SKIPS = 5  # in this process alone
    strategy = strategy_class()("onebit_adam", freeze_step=freeze_step)
    found = fit(pl, strategy, tuple(range(3, 100)), {"init_scale": 2.0**10}, max_steps=50)
    return {"error": found["error"], "batches": len(found["after"])}


@pytest.mark.parametrize("freeze_step", [2, 1000])
def test_an_overflow_storm_ends_in_an_error_on_every_rank(freeze_step: int) -> None:
    for found in run_ranks(storm_rank, 2, freeze_step):
        assert found["batches"] == 7  # three good ones, four skips; the fifth raises
        assert "5 steps in a row were skipped" in found["error"] and "the run has diverged" in found["error"]


def ddp_rank(rank: int, world: int) -> dict[str, Any]:
    """With compression off, and AdamW, against plain DDP."""
    pl = enter(rank)

    def adamw(module: Any) -> Any:
        return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)

    scaler = {"init_scale": 2.0**10, "growth_interval": 4}
    found = {}
    for name, strategy in (("ddp", "ddp"), ("onebit", strategy_class()("onebit_adam", freeze_step=1000))):
        run = fit(pl, strategy, OVERFLOWS, scaler, configure=adamw)
        found[name] = (run["weights"], run["scaler"])
    return found


def test_with_compression_off_it_trains_as_ddp_does() -> None:
    for found in run_ranks(ddp_rank, 2):
        torch.testing.assert_close(found["onebit"][0], found["ddp"][0], rtol=1e-5, atol=1e-6)
        assert found["onebit"][1] == found["ddp"][1]


def resume_rank(rank: int, world: int, folder: str, algorithm: str) -> dict[str, Any]:
    pl = enter(rank)
    scaler = {"init_scale": 2.0**10, "growth_interval": 4}
    found = {}
    for name, ckpt_path in (("through", None), ("resumed", f"{folder}/step=9.ckpt")):
        strategy = strategy_class()(algorithm, exchange=ExchangeOptions(block_size=64), **OPTIONS[algorithm])
        kwargs: dict[str, Any] = {"ckpt_path": ckpt_path}
        if ckpt_path is None:
            kwargs["enable_checkpointing"] = True
            kwargs["callbacks"] = [
                pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            ]
        found[name] = fit(pl, strategy, OVERFLOWS, scaler if ckpt_path is None else {}, **kwargs)["after"][-1]
    a, b = found["through"], found["resumed"]
    return {
        "differs": [name for part in ("weights", "by rank", "state") for name in differing(a[part], b[part])],
        "steps": (a["steps"], b["steps"]),
        "scaler": (a["scaler"], b["scaler"]),
    }


@resumes_within_epochs
@pytest.mark.parametrize("algorithm", list(OPTIONS))
def test_the_scaler_resumes_with_everything_else(tmp_path: Path, algorithm: str) -> None:
    for found in run_ranks(resume_rank, 2, str(tmp_path), algorithm):
        assert found["differs"] == [] and found["steps"] == (STEPS - 2, STEPS - 2)
        assert found["scaler"][0] == found["scaler"][1]


def test_a_strategy_with_a_scaler_can_be_sent_to_spawned_processes() -> None:
    import lightning.pytorch as pl

    strategy = strategy_class()("onebit_adam", precision_plugin=half(pl))
    sent = pickle.loads(pickle.dumps(strategy))
    assert sent._unscale is sent.precision_plugin.scaler.unscale_
    assert sent._unscale is not strategy._unscale
