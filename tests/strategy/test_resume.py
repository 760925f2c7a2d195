"""Exact resume: an interrupted run goes on bit for bit as the uninterrupted one."""

from __future__ import annotations

import os
import warnings
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
    norm_net,
    quiet_trainer,
    resumes_within_epochs,
    same_on_all_ranks,
    strategy_class,
)

import lightning_onebit as ob
from lightning_onebit.strategy.shards import (
    ShardError,
    Stamp,
    checksum,
    read_shard,
    remove_shards,
    shard_path,
    write_shard,
)

STEPS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 4},
    "onebit_lamb": {"freeze_step": 4, "trust_clip": (0.01, 0.3)},
    # (with early_refreshes) refreshes at steps 1, 2, 4, a one-bit round at 3; then synchronisations at 5, 9, 13
    "zero_one_adam": {"freeze_step": 4, "local_steps": ob.LocalSteps(max_gap=4, double_every=1)},
    "binsgdm": {"recipe": "published", "seed": 3},
    "onebit_sgd": {},
}
# in the warm-up (0/1 Adam: among its one-bit rounds), at the freeze, compressed (0/1 Adam: between local steps), and later
CUTS = (3, 4, 6, 10)


def configure(module: Any, schedule: Any = lambda step: 1.0 / (1 + 0.1 * step)) -> Any:
    strategy = module.trainer.strategy
    optimizer = strategy.optimizer(module.parameters(), lr=1e-2, weight_decay=0.01, **early_refreshes(strategy))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def training_step(module: Any, batch: Any, batch_idx: int) -> Any:
    """On points that depend on epoch, batch and rank only: Lightning does not wind a plain DataLoader forward on resuming."""
    trainer = module.trainer
    seed = (trainer.current_epoch * 1000 + batch_idx) * 100 + trainer.global_rank
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    loss = torch.nn.functional.cross_entropy(module.net(x), x[:, :3].argmax(1))
    module.log("loss", loss)
    return loss


class Recorder:
    """Losses of every step, as logged, and the final state of everything that differs or does not differ by rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.mid_local: list[bool] = []

    def methods(self) -> dict[str, Any]:
        recorder = self

        def on_train_batch_end(module: Any, *_: Any) -> None:
            recorder.losses.append(float(module.trainer.callback_metrics["loss"]))
            (optimizer,) = module.trainer.strategy.onebit_optimizers
            recorder.mid_local.append(getattr(optimizer, "mid_local", False))

        return {"on_train_batch_end": on_train_batch_end, "training_step": training_step}


def everything(trainer: Any, module: Any) -> dict[str, Any]:
    """Weights, optimizer, residuals and accounts of this rank."""
    (optimizer,) = trainer.strategy.onebit_optimizers
    ledger = optimizer.ledger.as_dict()
    for varies in ("communication_seconds", "compression_seconds"):
        del ledger["total"][varies]
    state = optimizer.state_dict()
    books = {k: v for k, v in state["onebit"].items() if k != "ledger"}
    optimizer.show_local()
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "per parameter": {f"{i}.{k}": v.clone() for i, s in state["state"].items() for k, v in s.items()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]],
        "by rank": {k: v.clone() for k, v in optimizer.residual_state_dict()["tensors"].items()},
        "books": books,
        "ledger": ledger,
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found = [
        f"{part}: {name}" for part in ("weights", "per parameter", "by rank") for name in differing(a[part], b[part])
    ]
    return found + [part for part in ("groups", "books", "ledger") if a[part] != b[part]]


def fit(pl: Any, algorithm: str, folder: str | None, **kwargs: Any) -> dict[str, Any]:
    """Trains; with a folder, saves at every step there."""
    ranks_per_node, precision = kwargs.pop("ranks_per_node", None), kwargs.pop("precision", "32-true")
    seed, ckpt_path = kwargs.pop("seed", 0), kwargs.pop("ckpt_path", None)
    options = kwargs.pop("options", OPTIONS[algorithm])
    callbacks = kwargs.pop("callbacks", [])
    recorder = Recorder()
    exchange = ob.ExchangeOptions(block_size=64, bucket_mb=1e-3)
    strategy = strategy_class()(algorithm, ranks_per_node=ranks_per_node, exchange=exchange, **options)
    if folder is not None:
        callbacks = [
            *callbacks,
            pl.callbacks.ModelCheckpoint(
                folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
            ),
        ]
    module = make_module(pl, kwargs.pop("configure", configure), norm_net, seed, **recorder.methods())
    trainer = quiet_trainer(
        pl,
        strategy,
        precision=precision,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        **{"max_steps": STEPS, "max_epochs": 9, **kwargs},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(samples=60, batch=4), ckpt_path=ckpt_path)
    return {
        "state": everything(trainer, module),
        "losses": recorder.losses,
        "mid_local": recorder.mid_local,
        "residual warnings": [str(w.message) for w in caught if "residuals" in str(w.message)],
        "equal": same_on_all_ranks({n: p for n, p in module.named_parameters()}),
    }


def resume_rank(
    rank: int,
    world: int,
    algorithm: str,
    ranks_per_node: int | None,
    precision: str,
    cuts: tuple[int, ...],
    folder: str,
) -> dict[str, Any]:
    pl = enter(rank)
    common = {"ranks_per_node": ranks_per_node, "precision": precision}
    through = fit(pl, algorithm, folder, **common)
    found: dict[str, Any] = {"mid_local": through["mid_local"], "residuals": sorted(through["state"]["by rank"])}
    for cut in cuts:
        resumed = fit(pl, algorithm, None, seed=9, ckpt_path=f"{folder}/step={cut}.ckpt", **common)
        found[cut] = (
            differences(through["state"], resumed["state"]),
            resumed["residual warnings"],
            resumed["losses"] == through["losses"][cut:] and len(resumed["losses"]) == STEPS - cut,
        )
    return found


@resumes_within_epochs
# one flat and one hierarchical world for each algorithm, and each moment in one of the two
@pytest.mark.parametrize(
    ("algorithm", "world", "ranks_per_node", "precision", "cuts"),
    [
        *((algorithm, 2 + number % 2, None, "bf16-mixed", CUTS[::2]) for number, algorithm in enumerate(OPTIONS)),
        *((algorithm, 4, 2, "32-true", CUTS[1::2]) for algorithm in OPTIONS),
    ],
)
def test_interrupted_training_goes_on_bit_for_bit(
    algorithm: str, world: int, ranks_per_node: int | None, precision: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    results = run_ranks(resume_rank, world, algorithm, ranks_per_node, precision, cuts, str(tmp_path), timeout=150)
    for found in results:
        for cut in cuts:
            assert found[cut] == ([], [], True), f"resumed after step {cut}"
        assert found["residuals"], "nothing differed by rank"
        if algorithm == "zero_one_adam":
            assert found["mid_local"][5] and found["mid_local"][9], "steps 6 and 10 are not between synchronisations"


# ----- epochs that end in the middle of an accumulation window, and the automatic freeze ------------------------------------------


def accumulation_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Five batches per epoch, two per step: the third step of every epoch is made on half a window."""
    pl = enter(rank)
    found: dict[str, Any] = {}
    for algorithm in ("onebit_adam", "zero_one_adam"):
        common: dict[str, Any] = {
            "accumulate_grad_batches": 2,
            "limit_train_batches": 5,
            "max_epochs": 5,
            "max_steps": -1,
        }
        common["options"] = OPTIONS["zero_one_adam"] if algorithm == "zero_one_adam" else {}
        if algorithm == "onebit_adam":
            # rises at steps 4, 6 and 8, and the longest gap is that from step 1 to step 4: 12 steps are dense if no rise is forgotten
            common["configure"] = lambda module: configure(
                module, lambda step: 1 + (step >= 3) + (step >= 5) + (step >= 7)
            )
        place = f"{folder}/{algorithm}"

        def freeze(algorithm: str = algorithm) -> list[Any]:
            if algorithm == "zero_one_adam":
                return []
            return [ob.callbacks.VarianceFreeze(earliest=8, latest=0.9)]

        through = fit(pl, algorithm, place, callbacks=freeze(), **common)
        for cut in (3, 6, 9):
            path = f"{place}/step={cut}.ckpt"
            resumed = fit(pl, algorithm, None, seed=9, ckpt_path=path, callbacks=freeze(), **common)
            found[f"{algorithm} {cut}"] = (
                differences(through["state"], resumed["state"]),
                resumed["losses"] == through["losses"][-len(resumed["losses"]) :],
                len(through["losses"]) - len(resumed["losses"]),
            )
        found[f"{algorithm} ledger"] = through["state"]["ledger"]
    return found


@resumes_within_epochs
def test_epochs_that_end_within_an_accumulation_window_and_the_history_of_the_freeze_resume_exactly(
    tmp_path: Path,
) -> None:
    for found in run_ranks(accumulation_rank, 2, str(tmp_path), timeout=150):
        for algorithm in ("onebit_adam", "zero_one_adam"):
            for epochs, cut in ((1, 3), (2, 6), (3, 9)):
                assert found[f"{algorithm} {cut}"] == ([], True, 5 * epochs)
            assert 1 < found[f"{algorithm} ledger"]["dense_steps"] < 13
            assert found[f"{algorithm} ledger"]["compressed_steps"] > 1
        assert found["onebit_adam ledger"]["dense_steps"] == 12


def guarded_rank(rank: int, world: int, folder: str) -> dict[int, Any]:
    """Windows of five batches of which a checkpoint cuts one; what every look sees is written down."""
    pl = enter(rank)

    def fitted(place: str | None, **kwargs: Any) -> tuple[list[Any], float, dict[str, Any]]:
        guard, seen = ob.callbacks.DivergenceGuard(5), []
        compare = guard._compare_notes
        guard._compare_notes = lambda *args: seen.append(compare(*args)) or seen[-1]
        callbacks = [ob.callbacks.VarianceFreeze(2), guard]
        result = fit(pl, "onebit_adam", place, options={}, callbacks=callbacks, max_steps=15, **kwargs)
        return seen, guard.best_loss, result["state"]

    seen, best, state = fitted(folder)
    found = {}
    for cut in (6, 8, 9, 14):
        later, found_best, found_state = fitted(None, seed=9, ckpt_path=f"{folder}/step={cut}.ckpt")
        found[cut] = (later == seen[cut // 5 :], len(later), found_best == best, differences(state, found_state))
    return found


@resumes_within_epochs
def test_the_guard_sees_after_a_resume_what_it_would_have_seen(tmp_path: Path) -> None:
    for found in run_ranks(guarded_rank, 2, str(tmp_path), timeout=150):
        assert found == {cut: (True, 3 - cut // 5, True, []) for cut in (6, 8, 9, 14)}


# ----- files --------------------------------------------------------------------------------------------------------------------


def short_fit(pl: Any, *callbacks: Any, steps: int = 4, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    """Compresses from the third step on; returns the trainer, with its strategy still knowing its optimizers."""
    strategy = strategy_class()("onebit_adam", freeze_step=2, strict_residuals=kwargs.pop("strict", False))
    module = make_module(pl, configure, norm_net, **{"training_step": training_step})
    trainer = quiet_trainer(
        pl,
        strategy,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        max_steps=steps,
        max_epochs=9,
        **kwargs,
    )
    trainer.fit(module, loader(samples=64, batch=4), ckpt_path=ckpt_path)
    return trainer


def listing(folder: Path) -> list[str]:
    """Files below a folder, ids left out."""
    return sorted(
        "/".join("<id>" if len(part) == 32 else part for part in path.relative_to(folder).parts)
        for path in folder.rglob("*")
        if not path.is_dir()
    )


def shards(name: str, world: int = 2) -> list[str]:
    return [f"{name}.onebit/<id>/rank-{rank:05d}-of-{world:05d}.pt" for rank in range(world)]


def files_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    pl = enter(rank)
    checkpoint = pl.callbacks.ModelCheckpoint
    top = checkpoint(
        f"{folder}/top",
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="step",
        mode="max",
        save_last="link",
    )
    trainer = short_fit(pl, top)
    # after fit, again under the same name, and the weights alone
    trainer.save_checkpoint(f"{folder}/after/a.ckpt")
    trainer.save_checkpoint(f"{folder}/after/a.ckpt")
    trainer.save_checkpoint(f"{folder}/weights/w.ckpt")
    trainer.save_checkpoint(f"{folder}/weights/w.ckpt", weights_only=True)
    short_fit(pl, checkpoint(f"{folder}/warm", filename="w", every_n_train_steps=1), steps=1)
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    last = checkpoint(f"{folder}/async", filename="a", every_n_train_steps=1, enable_version_counter=False)
    short_fit(pl, last, steps=8, plugins=[AsyncCheckpointIO()])
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    for name in ("top/last.ckpt", "after/a.ckpt", "async/a.ckpt"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = short_fit(pl, steps=9, ckpt_path=f"{folder}/{name}", strict=True)
        said = [str(w.message) for w in caught if "residuals" in str(w.message)]
        found[name] = (said, resumed.strategy.onebit_optimizers[0].steps)
    return found


def test_shards_lie_beside_their_checkpoint_and_go_with_it(tmp_path: Path) -> None:
    for found in run_ranks(files_rank, 2, str(tmp_path), timeout=150):
        assert set(map(str, found.values())) == {"([], 9)"}
    # two checkpoints are kept, with their shards; the link has none of its own
    names = ["step=3.ckpt", "step=4.ckpt"]
    assert listing(tmp_path / "top") == sorted(["last.ckpt", *names, *shards(names[0]), *shards(names[1])])
    assert (tmp_path / "top" / "last.ckpt").is_symlink()
    # overwritten: one generation of shards; weights only, and warm-up: none
    assert listing(tmp_path / "after") == sorted(["a.ckpt", *shards("a.ckpt")])
    assert listing(tmp_path / "weights") == ["w.ckpt"] and not (tmp_path / "weights" / "w.ckpt.onebit").exists()
    assert listing(tmp_path / "warm") == ["w.ckpt"]
    assert listing(tmp_path / "async") == sorted(["a.ckpt", *shards("a.ckpt")])

    # readable without executing anything, one id in all of them, and a checksum over what they hold
    checkpoint = torch.load(tmp_path / "after" / "a.ckpt", weights_only=True)
    stamp = Stamp.of(checkpoint)
    assert stamp is not None and stamp.world_size == 2 and stamp.shards
    residuals = []
    for rank in range(2):
        path = shard_path(str(tmp_path / "after" / "a.ckpt"), stamp, rank)
        shard = torch.load(path, weights_only=True)
        assert (shard["id"], shard["rank"], shard["version"]) == (stamp.id, rank, 1)
        assert shard["sha256"] == checksum(shard["optimizers"])
        residuals.append(shard["optimizers"][0]["tensors"]["worker_residual"])
        # this rank's residuals and nothing else
        held = sum(t.numel() * t.element_size() for t in shard["optimizers"][0]["tensors"].values())
        assert Path(path).stat().st_size < held + 8192
    assert not torch.equal(*residuals)


def own_disks_rank(rank: int, world: int, folder: str) -> list[list[str]]:
    """Two nodes of one rank, each with a disk of its own (the same relative path from another directory)."""
    os.environ["NODE_RANK"] = str(rank)
    pl = enter(0)
    place = Path(folder, f"disk of node {rank}")
    place.mkdir()
    os.chdir(place)

    class Here(pl.callbacks.ModelCheckpoint):  # type: ignore[name-defined, misc]
        """Its path stays relative, so that it leads to this node's disk."""

        def setup(self, *args: Any, **kwargs: Any) -> None:
            super().setup(*args, **kwargs)
            self.dirpath = "c"

    checkpoint = Here("c", filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    trainer = short_fit(pl, checkpoint, devices=1, num_nodes=2)
    seen = [listing(place)]
    for _ in range(2):
        trainer.save_checkpoint("again.ckpt")
    seen.append(listing(place))
    trainer.strategy.remove_checkpoint("again.ckpt")
    return [*seen, listing(place)]


def test_shards_on_the_disks_of_nodes_are_removed_with_their_checkpoint_on_every_node(tmp_path: Path) -> None:
    for rank, (top, twice, removed) in enumerate(run_ranks(own_disks_rank, 2, str(tmp_path))):
        # of four checkpoints one is left, and of its shards this node's; the .ckpt lies on the first node only
        kept, again = (f"{name}.ckpt.onebit/<id>/rank-{rank:05d}-of-00002.pt" for name in ("c/step=4", "again"))
        files = ["c/step=4.ckpt"] * (rank == 0)
        assert top == [*files, kept]
        assert twice == sorted(["again.ckpt"] * (rank == 0) + [again, *top])
        assert removed == top


def failing_rank(rank: int, world: int, folder: str) -> list[str]:
    """The first save succeeds; then rank 1 cannot write its shard, then rank 0 cannot write the checkpoint."""
    import lightning_onebit.strategy.files as saving

    pl = enter(rank)
    path, said = f"{folder}/c.ckpt", []
    trainer = short_fit(pl)
    trainer.save_checkpoint(path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    replace = os.replace
    if rank == 1:
        saving.os.replace = full
    for breaks in ("shard", "checkpoint"):
        if breaks == "checkpoint":
            os.replace = replace
            type(trainer.strategy.checkpoint_io).save_checkpoint = full
        try:
            trainer.save_checkpoint(path)
            said.append("saved")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one_whole_and_raises_on_every_rank(
    tmp_path: Path,
) -> None:
    results = run_ranks(failing_rank, 2, str(tmp_path))
    for rank, (shard, checkpoint) in enumerate(results):
        assert shard.startswith("ShardError") and "rank 1: cannot write" in shard and "No space left" in shard
        assert "No space left" in checkpoint
        assert checkpoint.startswith("OSError" if rank == 0 else "ShardError: the checkpoint is not saved")
    assert listing(tmp_path) == sorted(["c.ckpt", *shards("c.ckpt")])
    path = str(tmp_path / "c.ckpt")
    stamp = Stamp.of(torch.load(path, weights_only=True))
    assert stamp is not None
    for rank in range(2):
        assert read_shard(path, stamp, rank)[0]["rank"] == rank


def state() -> list[dict[str, Any]]:
    return [{"algorithm": "a", "steps": 3, "tensors": {"worker_residual": torch.arange(64.0)}}]


def test_shards_are_written_and_read_through_fsspec() -> None:
    stamp = Stamp("0" * 32, 1, True)
    for path in ("memory://bucket/run/x.ckpt", "memory://bucket/run/y.ckpt"):
        write_shard(path, stamp, 0, state())
        assert torch.equal(read_shard(path, stamp, 0)[0]["tensors"]["worker_residual"], torch.arange(64.0))
    remove_shards("memory://bucket/run/x.ckpt")
    with pytest.raises(ShardError, match=r"x\.ckpt.*is missing"):
        read_shard("memory://bucket/run/x.ckpt", stamp, 0)
    read_shard("memory://bucket/run/y.ckpt", stamp, 0)


def test_what_is_not_the_shard_that_was_written_is_refused(tmp_path: Path) -> None:
    path, stamp = str(tmp_path / "x.ckpt"), Stamp("0" * 32, 1, True)
    write_shard(path, stamp, 0, state())
    target = Path(shard_path(path, stamp, 0))
    whole = target.read_bytes()

    def complaint(content: bytes) -> str:
        target.write_bytes(content)
        with pytest.raises(ShardError) as raised:
            read_shard(path, stamp, 0)
        return str(raised.value)

    assert "is damaged" in complaint(whole[: len(whole) // 2])
    assert "is damaged" in complaint(b"")
    # one bit of the numbers themselves
    at = whole.index(torch.arange(64.0).numpy().tobytes()) + 17
    assert "another checksum" in complaint(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    # of another save, with code inside, or somewhere else
    target.write_bytes(whole)
    other = Stamp("1" * 32, 1, True)
    target.parent.parent.joinpath(other.id).mkdir()
    Path(shard_path(path, other, 0)).write_bytes(whole)
    with pytest.raises(ShardError, match="belongs to another checkpoint"):
        read_shard(path, other, 0)
    torch.save({"optimizers": Path("anything")}, target)
    with pytest.raises(ShardError, match="is damaged"):
        read_shard(path, stamp, 0)
    target.unlink()
    outside = tmp_path.parent / f"{tmp_path.name}-outside.pt"
    outside.write_bytes(whole)
    target.symlink_to(outside)
    with pytest.raises(ShardError, match="outside of the checkpoint's folder"):
        read_shard(path, stamp, 0)


@pytest.mark.parametrize(
    "found", [{"id": "../../../etc"}, {"id": "0" * 31}, {"id": 3}, {"world_size": "2"}, {"unknown": 1}, {"version": 99}]
)
def test_a_stamp_that_leads_elsewhere_or_is_newer_is_refused(found: dict[str, Any]) -> None:
    good = Stamp("0" * 32, 2, True).as_dict()
    assert Stamp.of({"lightning_onebit": good}) is not None and Stamp.of({}) is None
    with pytest.raises(ShardError):
        Stamp.of({"lightning_onebit": {**good, **found}})
