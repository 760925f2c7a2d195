"""The ``.ckpt`` is an ordinary Lightning file, and training goes on from it."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import run_ranks
from lightning_support import (
    differing,
    enter,
    loader,
    make_module,
    onebit,
    quiet_trainer,
    resumes_within_epochs,
    same_on_all_ranks,
    strategy_class,
)

import lightning_onebit as ob
from lightning_onebit.callbacks import freeze

RESIDUALS = "residuals"


def fit_with_warnings(trainer: Any, module: Any, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), **kwargs)
    return [str(w.message) for w in caught]


def save_and_resume(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pl = enter(rank)
    freeze.FEWEST_GRADIENTS = 1  # not half of so short a run

    # compressed stage, with the freeze chosen by the default callback: a tenth of the 20 planned steps, for the learning rate does not rise
    module = make_module(pl, onebit(None))
    trainer = quiet_trainer(pl, "onebit_adam", max_epochs=5, enable_checkpointing=True, default_root_dir=folder)
    trainer.callbacks.append(
        pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    )
    trainer.fit(module, loader())
    found["weights"] = {k: v.clone() for k, v in module.state_dict().items()}
    path = f"{folder}/step=8.ckpt"
    if rank == 0:
        shutil.rmtree(path + ".onebit")
    torch.distributed.barrier()
    resumed = make_module(pl, onebit(None), seed=9)
    trainer = quiet_trainer(pl, "onebit_adam", max_epochs=5)
    found["compressed"] = [w for w in fit_with_warnings(trainer, resumed, ckpt_path=path) if "LeafSpec" not in w]
    [optimizer] = trainer.strategy.onebit_optimizers
    found["books"] = (optimizer.steps, optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps)
    found["different"] = same_on_all_ranks(dict(resumed.named_parameters()))

    # the same file under the other tree
    other = enter(rank, "pytorch_lightning")
    again = make_module(other, onebit(None), seed=9)
    trainer = quiet_trainer(other, "onebit_adam", max_epochs=5)
    trainer.fit(again, loader(), ckpt_path=path)
    found["trees differ"] = differing(resumed.state_dict(), again.state_dict())

    # warm-up: nothing is lost, so the resumed run is the uninterrupted one
    states = []
    for ckpt_path in (None, f"{folder}/warm-up.ckpt"):
        module = make_module(pl, onebit(6), seed=0 if ckpt_path is None else 9)
        trainer = quiet_trainer(pl, strategy_class()(), max_epochs=3)
        if ckpt_path is None:

            def save(module: Any) -> None:
                if module.current_epoch == 0:
                    module.trainer.save_checkpoint(f"{folder}/warm-up.ckpt")

            type(module).on_train_epoch_end = save
        found["warm-up"] = [w for w in fit_with_warnings(trainer, module, ckpt_path=ckpt_path) if RESIDUALS in w]
        states.append(copy.deepcopy(module.state_dict()))
    found["warm-up differs"] = differing(*states)
    return found


@resumes_within_epochs
def test_checkpoints_load_alone_and_training_resumes(tmp_path: Path) -> None:
    results = run_ranks(save_and_resume, 2, str(tmp_path), timeout=120)
    for rank, found in enumerate(results):
        # the .ckpt alone: one warning, on rank 0, that says what is lost; and none of Lightning's about a callback that is missing
        said = [w for w in found["compressed"] if RESIDUALS in w]
        assert len(said) == (1 if rank == 0 else 0)
        assert all("OnebitAdam" in w and "start from zero" in w for w in said)
        assert not any("VarianceFreeze" in w for w in found["compressed"]), found["compressed"]
        assert found["books"] == (20, 3, 17)
        assert found["different"] == []
        assert found["trees differ"] == []
        assert found["warm-up"] == [] and found["warm-up differs"] == []

    # on one machine, without a process group, and without executing anything from the file
    import lightning.pytorch as pl

    path = tmp_path / "step=20.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["optimizer_states"][0]["onebit"]["phase"] == ob.Phase.COMPRESSED.value
    loaded = type(make_module(pl, onebit(None))).load_from_checkpoint(path)
    assert differing(loaded.state_dict(), results[0]["weights"]) == []
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == [
        *(f"step={s}.ckpt" for s in (12, 16, 20, 4, 8)),
        "warm-up.ckpt",
    ]
