"""Checkpoints of sharded models: what resumes bit for bit, what another mesh makes of them, who else reads them, what a crash leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning_support import differing, enter, loader, quiet_trainer, strategy_class
from sharded_support import SIZES, SMALL, fit, make_sharded, net, sharded_class, whole

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="sharded models need torch 2.9"
)

OPTIONS: dict[str, dict[str, Any]] = {"onebit_adam": {"freeze_step": 2}, "zero_one_adam": {}, "binsgdm": {}}


def train(
    pl: Any,
    epochs: int,
    *,
    ckpt_path: Any = None,
    algorithm: str = "onebit_adam",
    seed: int | None = 0,
    callbacks: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Two steps an epoch on four ranks; the strategy and the module."""
    how = {**SIZES, **OPTIONS.get(algorithm, {}), **options}
    strategy = sharded_class()(algorithm, exchange=SMALL, **how)
    module = make_sharded(pl, seed=seed)
    fit(pl, strategy, module, ckpt_path=ckpt_path, max_epochs=epochs, callbacks=callbacks)
    return strategy, module


def save(strategy: Any, path: str) -> None:
    strategy.lightning_module.trainer.save_checkpoint(path)


def all_state(strategy: Any, module: Any) -> dict[str, Any]:
    """Weights, and the residuals of this rank."""
    residuals = strategy.onebit_optimizers[0].residual_state_dict()["tensors"]
    return {**whole(module), **{f"residual {k}": v.clone() for k, v in residuals.items()}}


def resume(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Runs on from a checkpoint that was written in the midst of a run, and compares with how that run ended."""
    pl, found = enter(rank), {}

    class SaveOnce(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(path)

    for algorithm, options in OPTIONS.items():
        for distributed in (True, False):
            path = f"{folder}/{algorithm}-{distributed}.ckpt"
            how = {"algorithm": algorithm, "save_distributed_checkpoint": distributed, **options}
            uninterrupted = all_state(*train(pl, 6, callbacks=[SaveOnce()], **how))
            strategy, module = train(pl, 6, ckpt_path=path, seed=None, **how)
            found[f"{algorithm} {distributed}"] = differing(uninterrupted, all_state(strategy, module))
            assert strategy.onebit_optimizers[0].steps == 12, path
    return found


def test_both_kinds_of_checkpoint_resume_bit_for_bit(tmp_path: Path) -> None:
    for found in run_ranks(resume, 4, str(tmp_path), timeout=120):
        assert found and not any(found.values()), found
    folder, file = tmp_path / "onebit_adam-True.ckpt", tmp_path / "onebit_adam-False.ckpt"
    for loaded in (torch.load(folder / "meta.pt", weights_only=True), torch.load(file, weights_only=True)):
        assert loaded["optimizer_states"][0]["onebit"]["algorithm"] == "onebit_adam"
    shards = sorted(p.name for p in Path(f"{folder}.onebit").glob("*/*"))
    names = [f"column-0000{c}-of-00002-rank-0000{r}-of-00002.pt" for c in range(2) for r in range(2)]
    assert shards == names, "one file per rank, named by what it holds of the model and by replica"


def write_file(rank: int, world: int, path: str) -> Any:
    pl = enter(rank)
    strategy, module = train(pl, 3, save_distributed_checkpoint=False)
    save(strategy, path)
    # over a folder of that name
    train_folder, _ = train(pl, 1)
    save(train_folder, f"{path}.other")
    save(strategy, f"{path}.other")
    return whole(module), os.path.isfile(f"{path}.other")


def plain_module(pl: Any) -> Any:
    return make_sharded(pl, shard=lambda module: None)


def resume_plain(rank: int, world: int, path: str) -> Any:
    """``OnebitStrategy`` goes on from the file, and a sharded run from its."""
    pl = enter(rank)
    strategy, module = strategy_class()(exchange=SMALL, freeze_step=2), plain_module(pl)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = fit(pl, strategy, module, ckpt_path=path, max_epochs=4)
    trainer.save_checkpoint(f"{path}.whole")
    weights = whole(module)
    sharded = sharded_class()(exchange=SMALL, freeze_step=2, replicate_size=2)
    again = make_sharded(pl, seed=None)
    trainer = quiet_trainer(pl, sharded, max_epochs=4)
    trainer.fit(again, loader(), ckpt_path=f"{path}.whole")
    steps = [s.onebit_optimizers[0].steps for s in (strategy, sharded)]
    return steps, differing(weights, whole(again)), [str(w.message) for w in said if "residuals" in str(w.message)]


def test_a_file_is_read_by_a_plain_model_and_by_other_strategies(tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    weights, replaced = run_ranks(write_file, 4, path)[0]
    assert replaced
    loaded = torch.load(path, weights_only=True)["state_dict"]
    model = torch.nn.ModuleDict({"net": net()})
    model.load_state_dict(loaded)
    assert differing(dict(model.state_dict()), weights) == []
    for rank, ((plain, sharded), different, warned) in enumerate(run_ranks(resume_plain, 2, path)):
        assert plain == sharded > 6 and different == []
        assert rank or warned, "residuals of shards are not those of the whole model"


def write_folder(rank: int, world: int, path: str) -> Any:
    pl = enter(rank)
    strategy, module = train(pl, 3)
    save(strategy, path)
    residual = strategy.onebit_optimizers[0].residual_state_dict()["tensors"]["worker_residual"]
    return whole(module), residual.clone()


def on_another_mesh(rank: int, world: int, path: str) -> Any:
    """Loads, trains nothing more; then trains on."""
    pl, found = enter(rank), {}
    meshes = (
        {"replicas": {"replicate_size": 3, "data_parallel_size": 2}}
        if world == 6
        else {
            "sharding": {"replicate_size": 4, "data_parallel_size": 1},
            "strict": {"replicate_size": 4, "data_parallel_size": 1, "strict_residuals": True},
            "validated": SIZES,
        }
    )
    for name, sizes in meshes.items():
        lines: list[str] = []
        from lightning_onebit.strategy import checkpoint

        checkpoint.rank_zero_info = lines.append  # type: ignore[assignment]
        checkpoint.rank_zero_warn = lines.append  # type: ignore[assignment]
        strategy, module = sharded_class()(exchange=SMALL, freeze_step=2, **sizes), make_sharded(pl, seed=None)
        try:
            if name == "validated":
                quiet_trainer(pl, strategy).validate(module, loader(), ckpt_path=path, verbose=False)
            else:
                fit(pl, strategy, module, ckpt_path=path, max_epochs=3)
        except RuntimeError as error:
            found[name] = (str(error), None, None)
            continue
        residual = None
        if name != "validated":
            residual = strategy.onebit_optimizers[0].residual_state_dict()["tensors"].get("worker_residual")
            residual = None if residual is None else residual.clone()
        found[name] = (lines, whole(module), residual)
    return found


def test_other_meshes_go_on_with_the_same_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "folder.ckpt")
    saved = run_ranks(write_folder, 4, path)
    weights = saved[0][0]
    for found in run_ranks(on_another_mesh, 4, path):
        lines, loaded, residual = found["sharding"]
        assert differing(weights, loaded) == [] and any("residuals" in line and "2 rank(s)" in line for line in lines)
        assert residual is None or not residual.any(), "residuals start from zero"
        assert "strict_residuals=True" in found["strict"][0] and "2 rank(s)" in found["strict"][0]
        assert differing(weights, found["validated"][1]) == []
    more = [found["replicas"] for found in run_ranks(on_another_mesh, 6, path)]
    for rank, (lines, loaded, residual) in enumerate(more):
        assert differing(weights, loaded) == []
        assert rank or any("residuals of 2 replicas continue on 3 replicas" in line for line in lines)
        before = torch.stack([saved[other][1] for other in (rank % 2, rank % 2 + 2)]).mean(0)
        filled = min(len(before), len(residual))
        torch.testing.assert_close(residual[:filled], before[:filled])


# ----- files ------------------------------------------------------------------------------------------------------------


def keep_two(rank: int, world: int, folder: str) -> Any:
    pl = enter(rank)
    keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="epoch", mode="max", save_top_k=2, save_last="link")
    strategy, module = sharded_class()(exchange=SMALL, freeze_step=1, **SIZES), make_sharded(pl)
    trainer = quiet_trainer(pl, strategy, max_epochs=3, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, loader())
    dist.barrier()
    names = sorted(os.listdir(folder))
    again, second = sharded_class()(exchange=SMALL, freeze_step=1, strict_residuals=True, **SIZES), make_sharded(pl)
    fit(pl, again, second, ckpt_path=f"{folder}/last.ckpt", max_epochs=3)
    return names, differing(whole(module), whole(second))


def test_model_checkpoint_keeps_folders_with_what_lies_beside_them(tmp_path: Path) -> None:
    for names, different in run_ranks(keep_two, 4, str(tmp_path)):
        kept = ["epoch=1.ckpt", "epoch=1.ckpt.onebit", "epoch=2.ckpt", "epoch=2.ckpt.onebit", "last.ckpt"]
        assert names == kept and different == []
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    consolidated = _load_distributed_checkpoint(tmp_path / "epoch=2.ckpt")
    torch.nn.ModuleDict({"net": net()}).load_state_dict(consolidated["state_dict"])


def die_while_saving(rank: int, world: int, path: str, moment: str) -> None:
    from lightning_onebit.strategy import files, sharded_checkpoint

    pl = enter(rank)
    strategy, _ = train(pl, 2)
    save(strategy, path)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    rename = files.os.rename

    def rename_once(old: Any, new: Any) -> None:
        rename(old, new)
        if str(new).endswith(".aside"):
            die()

    if moment == "before":
        sharded_checkpoint.move_folder = die  # type: ignore[assignment]
    else:
        files.os.rename = rename_once  # type: ignore[assignment]
    publish = sharded_checkpoint.ShardedFiles._publish_folder

    def publish_and_die(*args: Any) -> None:
        publish(*args)
        die()

    sharded_checkpoint.ShardedFiles._publish_folder = publish_and_die  # type: ignore[method-assign]
    strategy, _ = train(pl, 3)
    with contextlib.suppress(RuntimeError):  # of a rank that waits for one that has died
        save(strategy, path)
    die()


def load_after(rank: int, world: int, path: str) -> Any:
    pl = enter(rank)
    _, expected = train(pl, 2)
    strategy, module = train(pl, 2, ckpt_path=path, seed=None, strict_residuals=True)
    save(strategy, path)
    return differing(whole(expected), whole(module)), sorted(os.listdir(os.path.dirname(path)))


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_kill_while_saving_leaves_the_older_checkpoint(tmp_path: Path, moment: str) -> None:
    """``between``: the older folder has been moved aside, the new one is not in its place yet."""
    path = str(tmp_path / "run.ckpt")
    run_ranks(die_while_saving, 4, path, moment, may_die=range(4))
    assert os.path.isdir(path) == (moment == "before")
    for different, names in run_ranks(load_after, 4, path):
        assert different == []
        assert names == ["run.ckpt", "run.ckpt.onebit"], "the next save clears up"


def misuse(rank: int, world: int, folder: str) -> list[str]:
    pl, said = enter(rank), []
    strategy, _ = train(pl, 1)
    Path(folder, "data").mkdir(exist_ok=True)
    dist.barrier()
    for path, options in ((f"{folder}/data", {}), (f"{folder}/a.ckpt", {"storage_options": {"a": 1}})):
        try:
            strategy.lightning_module.trainer.save_checkpoint(path, **options)
        except Exception as error:
            said.append(str(error))
    return said


def test_folders_of_other_things_stay(tmp_path: Path) -> None:
    for folder, options in run_ranks(misuse, 4, str(tmp_path)):
        assert "data is a folder, but no checkpoint" in folder and "storage_options={'a': 1}" in options
    assert (tmp_path / "data").is_dir()
