"""Faults in real training runs: killed ranks, signals, full disks, broken numbers. Survivors say why; nothing saved is lost."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning_support import enter, loader, make_module, quiet_trainer, same_on_all_ranks, strategy_class
from test_faults_basic import at
from test_resume import (
    OPTIONS,
    STEPS,
    configure,
    differences,
    fit,
    norm_net,
    shards,
    short_fit,
    training_step,
)
from test_resume import listing as files

from lightning_onebit.callbacks.consistency import ReplicaMismatch
from lightning_onebit.engine import ExchangeOptions, engine
from lightning_onebit.engine.codec import OneBit
from lightning_onebit.kernels import Packed
from lightning_onebit.strategy.shards import Stamp, read_shard

ALGORITHM = "onebit_adam"  # four dense steps, then compressed ones


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int, action: Callable[[], None]) -> None:
    """Runs ``action()`` in place of call ``number`` (1, 2, ...) of a function."""
    original, calls = getattr(owner, name), [0]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


# ----- kill -9 --------------------------------------------------------------------------------------------------------------------

#: name -> (rank that dies, step whose checkpoint is the newest one afterwards)
KILLS = {
    "warm-up": (1, 2),
    "round 1": (1, 5),
    "round 2": (0, 7),
    # shards exist from the fourth checkpoint on: this is the eighth
    "writing its shard": (1, 7),
    "between its shard and the others'": (1, 7),
    "writing the checkpoint": (0, 7),
    "removing what is old": (0, 8),
}


def arm(moment: str) -> None:
    import lightning_onebit.strategy.checkpoint as saving

    if moment == "warm-up":
        at("dense all-reduce", 3, die)
    elif moment == "round 1":
        at("round 1", 6, die)
    elif moment == "round 2":
        at("round 2", 8, die)
    elif moment == "writing its shard":
        at_call(os, "fsync", 13, die)  # of its fifth shard: each is the file's, its folder's and the folder's of that
    elif moment == "between its shard and the others'":
        at_call(os, "replace", 5, die)
    elif moment == "writing the checkpoint":
        at_call(os, "replace", 13, die)  # after seven checkpoints and five shards
    else:
        at_call(saving, "remove_shards", 8, die)


def killed_rank(rank: int, world: int, moment: str, folder: str) -> str:
    pl = enter(rank)
    if rank == KILLS[moment][0]:
        arm(moment)
    try:
        fit(pl, ALGORITHM, folder)
    except Exception as error:  # the survivor's
        return f"{type(error).__name__}: {error}"
    return "trained to the end"


def resuming_rank(rank: int, world: int, folders: dict[str, str]) -> dict[str, Any]:
    """How runs that go on from what the faults have left differ from one that nothing happened to."""
    pl = enter(rank)
    through = fit(pl, ALGORITHM, None)
    found = {}
    for moment, path in folders.items():
        resumed = fit(pl, ALGORITHM, None, seed=9, ckpt_path=path)
        left = STEPS - len(resumed["losses"])
        found[moment] = (
            differences(through["state"], resumed["state"]),
            resumed["residual warnings"],
            resumed["losses"] == through["losses"][left:],
        )
    return found


def newest(folder: Path) -> Path:
    return max(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


def assert_whole(path: Path, world: int = 2) -> None:
    """The checkpoint and all its shards can be read, by nothing but ``weights_only``."""
    stamp = Stamp.of(torch.load(path, weights_only=True))
    assert stamp is not None and stamp.world_size == world
    for rank in range(world):
        if stamp.shards:
            assert read_shard(str(path), stamp, rank)[0]["rank"] == rank


def test_after_kill_9_at_any_moment_survivors_say_why_and_the_newest_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    paths = {}
    for number, (moment, (doomed, step)) in enumerate(KILLS.items()):
        folder = tmp_path / str(number)
        said = run_ranks(killed_rank, 2, moment, str(folder), may_die=[doomed])
        assert said[doomed] is None, f"{moment}: rank {doomed} was not killed"
        # Lightning's own rounds (barriers after a save) have the backend's words
        survivor = said[1 - doomed]
        assert survivor.startswith(("CollectiveFailure", "CollectiveTimeout", "RuntimeError")), survivor
        if moment in ("warm-up", "round 1", "round 2"):
            assert survivor.startswith("Collective") and f"rank {1 - doomed} of 2" in survivor
            assert f"step {step + 1}" in survivor and "died" in survivor
        path = newest(folder)
        assert path.name == f"step={step}.ckpt", moment
        assert_whole(path)
        paths[moment] = str(path)
    for found in run_ranks(resuming_rank, 2, paths, timeout=150):
        assert found == {moment: ([], [], True) for moment in KILLS}


# ----- signals --------------------------------------------------------------------------------------------------------------------


def terminated_rank(rank: int, world: int, folder: str) -> str:
    """SIGTERM in the sixth step to all ranks, as srun, torchrun and Lightning's own launcher pass it on."""
    pl = enter(rank)
    saving = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", save_on_exception=True, every_n_train_steps=100, save_on_train_epoch_end=False
    )

    class Terminate(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit(pl, ALGORITHM, None, callbacks=[Terminate(), saving])
    except BaseException as error:
        return type(error).__name__
    return "trained to the end"


def test_sigterm_saves_what_resumes_exactly(tmp_path: Path) -> None:
    assert run_ranks(terminated_rank, 2, str(tmp_path)) == ["SIGTERMException"] * 2
    path = tmp_path / "step=6.ckpt"
    assert_whole(path)
    for found in run_ranks(resuming_rank, 2, {"terminated": str(path)}, timeout=150):
        assert found == {"terminated": ([], [], True)}


def preempted_rank(rank: int, world: int, folder: str) -> str:
    """SLURM's signal before the time is up: Lightning saves and asks for the job to be queued again."""
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
    os.environ |= {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }
    pl = enter(rank)
    import lightning.pytorch.plugins.environments as environments
    import lightning.pytorch.trainer.connectors.signal_connector as connector

    asked: list[Any] = []
    connector.call = lambda command, **_: asked.append(command) or 0  # type: ignore[func-returns-value]

    class Preempt(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                os.kill(os.getpid(), signal.SIGUSR1)

    fit(
        pl,
        ALGORITHM,
        None,
        callbacks=[Preempt()],
        default_root_dir=folder,
        plugins=[environments.SLURMEnvironment(auto_requeue=True)],
    )
    return str(asked)


def test_slurms_preemption_saves_what_resumes_exactly(tmp_path: Path) -> None:
    asked = run_ranks(preempted_rank, 2, str(tmp_path))
    assert asked == ["[['scontrol', 'requeue', '7']]", "[]"]
    path = tmp_path / "hpc_ckpt_1.ckpt"
    assert_whole(path)
    for found in run_ranks(resuming_rank, 2, {"slurm": str(path)}, timeout=150):
        assert found == {"slurm": ([], [], True)}


# ----- disks ----------------------------------------------------------------------------------------------------------------------


def full_disk_rank(rank: int, world: int, folder: str) -> list[str]:
    """First all goes well; then rank 1 may write no more than 4 kB to a file, then a file stands where the folder should be."""
    pl = enter(rank)
    said, trainer = [], short_fit(pl)
    trainer.save_checkpoint(f"{folder}/c.ckpt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    elif rank == 0:
        Path(folder, "d.ckpt.onebit").touch()
    for name in ("c", "d"):
        try:
            trainer.save_checkpoint(f"{folder}/{name}.ckpt")
            said.append("saved")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return said


def test_a_full_disk_and_a_folder_that_cannot_be_made_leave_the_older_checkpoint_whole(tmp_path: Path) -> None:
    for full, blocked in run_ranks(full_disk_rank, 2, str(tmp_path)):
        for said in (full, blocked):
            assert said.startswith(
                "ShardError: the checkpoint is not saved; an older one of the same name is as it was."
            )
        assert re.search(r"rank 1: cannot write .*rank-00001-of-00002\.pt", full)
        assert "cannot write" in blocked and "d.ckpt.onebit" in blocked
    assert files(tmp_path) == sorted(["c.ckpt", *shards("c.ckpt"), "d.ckpt.onebit"])
    assert_whole(tmp_path / "c.ckpt")


# ----- numbers that are not finite ------------------------------------------------------------------------------------------------


def broken_loss_rank(rank: int, world: int, bad: float) -> dict[str, Any]:
    """Rank 1's loss is not finite in step 2 (dense) and in steps 6 and 7 (compressed)."""
    pl = enter(rank)
    held: list[bool] = []

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = training_step(module, batch, batch_idx)
        at = module.trainer.fit_loop.epoch_loop._batches_that_stepped
        return loss * bad if rank == 1 and at in (1, 5, 6) else loss

    def on_train_batch_start(module: Any, *_: Any) -> None:
        module.before = weights_and_residuals(module)

    def on_train_batch_end(module: Any, *_: Any) -> None:
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        if optimizer.ledger.last.skipped:
            after = weights_and_residuals(module)
            held.append(all(torch.equal(a, b) for a, b in zip(module.before, after, strict=True)))

    methods = {"on_train_batch_start": on_train_batch_start, "on_train_batch_end": on_train_batch_end}
    module = make_module(pl, configure, training_step=step, **methods)
    strategy = strategy_class()(ALGORITHM, exchange=ExchangeOptions(block_size=64), **OPTIONS[ALGORITHM])
    trainer = quiet_trainer(pl, strategy, max_steps=10, max_epochs=9)
    trainer.fit(module, loader(samples=60, batch=4))
    (optimizer,) = strategy.onebit_optimizers
    return {
        "steps": (optimizer.steps, optimizer.skipped_steps),
        "held": held,
        "different": same_on_all_ranks(dict(module.named_parameters())),
        "finite": all(bool(torch.isfinite(p).all()) for p in module.parameters()),
    }


def weights_and_residuals(module: Any) -> list[torch.Tensor]:
    (optimizer,) = module.trainer.strategy.onebit_optimizers
    tensors = optimizer.residual_state_dict()["tensors"].values()
    return [t.detach().clone() for t in (*module.parameters(), *tensors)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(bad: float) -> None:
    for found in run_ranks(broken_loss_rank, 2, bad):
        assert found == {"steps": (7, 3), "held": [True] * 3, "different": [], "finite": True}


def hopeless_rank(rank: int, world: int) -> tuple[str, int]:
    pl = enter(rank)
    engine.MOST_SKIPS = 3  # in this process alone

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = training_step(module, batch, batch_idx)
        return loss * float("nan") if rank == 1 and module.trainer.global_step >= 5 else loss

    strategy = strategy_class()(ALGORITHM, exchange=ExchangeOptions(block_size=64), **OPTIONS[ALGORITHM])
    module = make_module(pl, configure, training_step=step)
    try:
        quiet_trainer(pl, strategy, max_steps=20, max_epochs=9).fit(module, loader(samples=60, batch=4))
    except FloatingPointError as error:
        return str(error), module.trainer.global_step
    return "trained to the end", 0


def test_a_run_that_stays_broken_ends_on_every_rank_after_the_most_skips_in_a_row() -> None:
    for said, step in run_ranks(hopeless_rank, 2):
        assert "3 steps in a row were skipped" in said and "the run has diverged" in said
        assert step == 7, "the eighth attempt raises"


# ----- a payload that changes on its way ------------------------------------------------------------------------------------------


def corrupted_rank(rank: int, world: int, watch: bool) -> str:
    """One bit of what rank 1 receives in the second round of step 6 is turned."""
    pl = enter(rank)
    import lightning_onebit as ob

    original = OneBit.finish

    def finish(self: Any, bucket: Any, gathered: Any) -> None:
        if rank == 1 and self.kept.steps == 5 and bucket.index == 0:
            packed = Packed(gathered, bucket.blocks // world, bucket.block_size)
            packed.words[0, 0, 0] ^= 1
        original(self, bucket, gathered)

    OneBit.finish = finish  # type: ignore[method-assign]
    module = make_module(pl, configure, norm_net, training_step=training_step)
    strategy = strategy_class()(ALGORITHM, exchange=ExchangeOptions(block_size=64), **OPTIONS[ALGORITHM])
    callbacks = [ob.callbacks.ReplicaConsistency(every_n_steps=1)] if watch else []
    trainer = quiet_trainer(pl, strategy, max_steps=9, max_epochs=9, callbacks=callbacks)
    try:
        trainer.fit(module, loader(samples=60, batch=4))
    except ReplicaMismatch as error:
        return str(error)
    return str(same_on_all_ranks(dict(module.named_parameters())))


def test_a_payload_that_changed_on_its_way_is_found_after_the_step_and_the_first_parameter_named() -> None:
    unseen = run_ranks(corrupted_rank, 2, False)
    assert unseen[0] == unseen[1] != "[]", "nothing was corrupted"
    for said in run_ranks(corrupted_rank, 2, True):
        assert "the replicas differ after step 6" in said and "on rank 1 against rank 0" in said
        named = re.search(r"parameter '([^']+)' is the first", said)
        assert named is not None and named[1] in unseen[0]
