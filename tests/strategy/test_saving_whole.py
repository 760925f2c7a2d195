"""What is in a checkpoint's place is a whole checkpoint of a whole step: the last good one, or a new one."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning_support import enter, make_module, plain_net, quiet_trainer, strategy_class
from test_kill_points import At
from test_lightning_algorithms import saves_on_exception
from test_resume import configure, training_step
from torch.utils.data import DataLoader, TensorDataset

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.engine import ExchangeOptions, TornStep
from lightning_onebit.strategy.files import durable

# ----- torn steps -----------------------------------------------------------------------------------------------------------------

#: how a run saves whose sixth step is not finite, and does not take back what it has learned: which file would be written
FAULTS = {
    "a callback that saves all": "step=4.ckpt",
    "weights only": "weights-step=4.ckpt",
    "a callback's own file": "on_exception.ckpt",
}


def failing_fit(pl: Any, fault: str, folder: str, algorithm: str, factor: float, **exchange: Any) -> BaseException:
    """A run whose sixth step cannot be made, and which saves every second one, the last one, and when an exception ends it."""

    def broken_step(module: Any, batch: Any, batch_idx: int) -> Any:
        return training_step(module, batch, batch_idx) * (factor if batch_idx == 5 else 1.0)

    def sgd(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    saving = pl.callbacks.ModelCheckpoint(
        folder,
        "weights-{step}" if fault == "weights only" else "{step}",
        every_n_train_steps=2,
        save_top_k=-1,
        save_last=True,
        save_on_exception=fault != "a callback's own file",
        save_weights_only=fault == "weights only",
    )
    callbacks = [saving]
    if fault == "a callback's own file":
        callbacks.append(pl.callbacks.OnExceptionCheckpoint(folder))
    options = {} if algorithm == "onebit_sgd" else {"freeze_step": 2}
    strategy = strategy_class()(algorithm, exchange=ExchangeOptions(block_size=32, **exchange), **options)
    configured = sgd if algorithm == "onebit_sgd" else configure
    module = make_module(pl, configured, plain_net, training_step=broken_step, validation_step=None)
    trainer = quiet_trainer(pl, strategy, enable_checkpointing=True, callbacks=callbacks, max_steps=8)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(32))))
    except Exception as error:
        return error
    raise AssertionError("the sixth step was made")


def failing_rank(rank: int, world: int, folder: str) -> list[Any]:
    pl = enter(rank)
    found = []
    for fault in FAULTS:
        error = failing_fit(pl, fault, f"{folder}/{fault}", "onebit_sgd", 1e30)
        found.append((type(error).__name__, str(error), type(error.__context__).__name__))
    return found


def refusing_rank(rank: int, world: int, folder: str) -> str:
    return str(failing_fit(enter(rank), "", folder, "onebit_adam", float("inf"), on_nonfinite="raise"))


@pytest.mark.skipif(not saves_on_exception, reason="ModelCheckpoint cannot save on an exception in this Lightning")
def test_a_step_that_was_not_made_leaves_the_last_one_to_be_saved(tmp_path: Path) -> None:
    for said in run_ranks(refusing_rank, 2, str(tmp_path)):
        assert said.startswith("step 6: a gradient was not finite")
    loaded = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert loaded["global_step"] == loaded["optimizer_states"][0]["onebit"]["steps"] == 5
    assert all(bool(w.isfinite().all()) for w in loaded["state_dict"].values())


@pytest.mark.skipif(not saves_on_exception, reason="ModelCheckpoint cannot save on an exception in this Lightning")
def test_after_a_step_that_is_not_finite_no_weights_are_saved_and_the_last_good_file_is_named(tmp_path: Path) -> None:
    for found in run_ranks(failing_rank, 2, str(tmp_path), timeout=150):
        for (kind, said, context), fault in zip(found, FAULTS, strict=True):
            assert kind == "TornStep" and context == "FloatingPointError", (fault, kind, context)
            assert "step 6 did not end (FloatingPointError: " in said, fault
            good = "no checkpoint to go on from" if fault == "weights only" else f"{fault}/last.ckpt"
            assert good in said, (fault, said)
    for fault in FAULTS:
        files = sorted(path.name for path in (tmp_path / fault).glob("*.ckpt"))
        mark = "weights-" if fault == "weights only" else ""
        assert files == ["last.ckpt", f"{mark}step=2.ckpt", f"{mark}step=4.ckpt"], fault
        for name in files:
            loaded = torch.load(tmp_path / fault / name, weights_only=True)
            assert all(bool(w.isfinite().all()) for w in loaded["state_dict"].values()), (fault, name)
        assert torch.load(tmp_path / fault / "last.ckpt", weights_only=True)["global_step"] == 4


@pytest.mark.skipif(not saves_on_exception, reason="ModelCheckpoint cannot save on an exception in this Lightning")
@pytest.mark.parametrize("where", ["within the step", "before its schedule goes on"])
def test_ctrl_c_within_a_step_is_handled_between_two_batches_whose_file_counts_that_step(
    tmp_path: Path, where: str
) -> None:
    pl = enter(0)
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        os.environ.pop(name)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=100, save_on_exception=True)

    class Interrupt(pl.Callback):  # type: ignore[name-defined, misc]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step != 4:
                return
            place, name = (
                (optimizer._engine.rule, "take") if where == "within the step" else (module, "lr_scheduler_step")
            )
            call = getattr(place, name)
            setattr(place, name, lambda *args, **more: (signal.raise_signal(signal.SIGINT), call(*args, **more)))

    strategy = strategy_class()("onebit_adam", freeze_step=2, exchange=ExchangeOptions(block_size=32, _alone=True))
    module = make_module(pl, configure, plain_net, training_step=training_step, validation_step=None)
    trainer = quiet_trainer(
        pl, strategy, enable_checkpointing=True, callbacks=[saving, Interrupt()], max_steps=8, devices=1
    )
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
            trainer.fit(module, DataLoader(TensorDataset(torch.zeros(8))))
    finally:
        signal.signal(signal.SIGINT, handler)
    loaded = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert loaded["global_step"] == loaded["optimizer_states"][0]["onebit"]["steps"] == 5
    assert loaded["lr_schedulers"][0]["last_epoch"] == 5


def test_fabric_saves_neither_a_torn_optimizer_nor_its_model(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, strategy="onebit_adam")
    fabric.launch()
    torch.manual_seed(0)
    model, other = plain_net(), plain_net()
    optimizer: Any = OnebitAdam(
        model.parameters(), lr=0.01, freeze_step=1, exchange=ExchangeOptions(_alone=True, block_size=32)
    )
    model, wrapped = fabric.setup(model, optimizer)
    path = str(tmp_path / "good.ckpt")
    take = optimizer._engine.rule.take
    for factor in (1.0, 1.0, 2.0):
        if factor == 1.0:
            fabric.save(path, {"model": model, "optimizer": wrapped})
        wrapped.zero_grad()
        fabric.backward(model(torch.ones(4, 6)).sum() * factor)
        if factor > 1:
            optimizer._engine.rule.take = lambda *_: 1 / 0
            with pytest.raises(ZeroDivisionError):
                wrapped.step()
            optimizer._engine.rule.take = take
        else:
            wrapped.step()
    before = Path(path).read_bytes()
    for state in ({"model": model, "optimizer": wrapped}, {"model": model}):
        with pytest.raises(TornStep, match=r"step 3 did not end.*good\.ckpt"):
            fabric.save(path, state)
    assert Path(path).read_bytes() == before
    fabric.save(str(tmp_path / "other.ckpt"), {"model": other})  # of another model
    fabric.load(path, {"model": model, "optimizer": wrapped})
    fabric.save(path, {"model": model, "optimizer": wrapped})


# ----- files ----------------------------------------------------------------------------------------------------------------------


def plugin() -> Any:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    return durable(TorchCheckpointIO())


def test_a_file_is_written_beside_the_one_it_replaces_and_is_on_disk_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "folder" / "step=3.ckpt", []
    fsync, replace = os.fsync, os.replace

    def name(number: int) -> str:
        return os.readlink(f"/proc/self/fd/{number}")

    monkeypatch.setattr(os, "fsync", lambda number: events.append(("flushed", name(number))) or fsync(number))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append(("moved", a, b)) or replace(a, b))
    plugin().save_checkpoint({"x": torch.arange(3)}, path)
    (_, temporary), (_, source, target), (_, folder) = events
    assert [event[0] for event in events] == ["flushed", "moved", "flushed"]
    assert temporary == source and os.path.dirname(temporary) == folder == str(path.parent) and target == str(path)
    assert not temporary.endswith(".ckpt") and "ckpt_" not in temporary  # nothing takes it for a checkpoint
    assert os.listdir(path.parent) == ["step=3.ckpt"]
    assert path.stat().st_mode == Path(tempfile.mkstemp(dir=tmp_path)[1]).stat().st_mode | 0o044


def saved_until_killed(rank: int, world: int, folder: str, elsewhere: str) -> tuple[int, set[int], list[str]]:
    """Kills a process at every line that saving over a file comes to, outside of torch; says how many, and what was in the file then."""
    dist.destroy_process_group()
    tempfile.tempdir = elsewhere
    path, saving = Path(folder, "last.ckpt"), plugin()
    saving.save_checkpoint({"number": -1, "x": torch.ones(5000)}, path)
    number, found = 0, set()
    while True:
        pid = os.fork()
        if pid == 0:
            at = At(
                "SIGKILL",
                number,
                ("shutil.py", "strategy/files.py", "cloud_io.py", "implementations/local.py", "tempfile.py"),
            )
            at.begin()
            saving.save_checkpoint({"number": number, "x": torch.ones(5000)}, path)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        loaded = torch.load(path, weights_only=True)
        assert torch.equal(loaded["x"], torch.ones(5000))
        found.add(number - loaded["number"])
        if not killed:
            return number, found, os.listdir(folder)
        number += 1


def test_kill_9_at_any_line_of_saving_leaves_a_whole_file_wherever_temporary_files_are(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    (answer,) = run_ranks(saved_until_killed, 1, str(tmp_path), str(elsewhere))
    lines, ages, left = answer
    assert lines > 20 and 0 in ages and max(ages) > 1
    assert left == ["last.ckpt"]  # what the dead have left is gone too


def test_only_lightnings_own_plugin_is_made_to_replace_files_in_one_move(tmp_path: Path) -> None:
    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    class Own(TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            Path(path).touch()

    own, inner = durable(Own()), TorchCheckpointIO()
    assert "save_checkpoint" not in vars(own)
    wrapping = strategy_class()(checkpoint_io=AsyncCheckpointIO(inner)).checkpoint_io
    assert type(inner.save_checkpoint).__name__ == "DurableSave"
    wrapping.save_checkpoint({"x": 1}, str(tmp_path / "a.ckpt"))
    wrapping.teardown()
    assert torch.load(tmp_path / "a.ckpt") == {"x": 1}
    inner.save_checkpoint({"x": 2}, "memory://bucket/a.ckpt")
    assert inner.load_checkpoint("memory://bucket/a.ckpt") == {"x": 2}
    with pytest.raises(TypeError, match="storage_options"):
        inner.save_checkpoint({"x": 3}, str(tmp_path / "b.ckpt"), storage_options={})
