"""Training that is ended anywhere by a signal or a time-out leaves only files of whole steps."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning_support import enter, make_module, plain_net, quiet_trainer, strategy_class
from test_all_or_nothing import WAITS, Ended, alike, wait_or_time_out
from test_resume import OPTIONS, configure, training_step
from torch.utils.data import DataLoader, TensorDataset

from lightning_onebit import ExchangeOptions
from lightning_onebit.comm.transport import Pending
from lightning_onebit.strategy.shards import Stamp, read_shard

STEPS = 9
SIGNALS = ["SIGINT", "SIGTERM", "SIGKILL"]


class At:
    """Sends a signal at a line (of the optimizers, or any), or makes a wait a time-out (``number`` None: counts them)."""

    def __init__(self, how: str, number: int | None, where: str | tuple[str, ...] = "") -> None:
        self.how, self.number, self.count = how, number, 0
        self.where = (where,) if isinstance(where, str) else where  # parts of names of files

    def begin(self) -> None:
        if self.how == "time-out":
            WAITS.now = self
        else:
            sys.settrace(self._trace)

    def end(self) -> None:
        sys.settrace(None)
        WAITS.now = None

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in self.where):
            return None
        if event == "line":
            self.passed()
        return self._trace

    def passed(self) -> None:
        self.count += 1
        if self.count - 1 != self.number:
            return
        self.end()
        if self.how == "time-out":
            raise Ended
        os.kill(os.getpid(), getattr(signal, self.how))


def fit(pl: Any, algorithm: str, folder: str, at: At, every: int) -> None:
    """Saves now and then, and when an exception ends it; ``at`` begins with the second batch."""

    class Begin(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                at.begin()

    saving = pl.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=every, save_top_k=-1, save_last=True, save_on_exception=True
    )
    exchange = ExchangeOptions(_alone=True, block_size=32, bucket_mb=5e-4)
    strategy = strategy_class()(algorithm, exchange=exchange, **OPTIONS[algorithm])
    module = make_module(pl, configure, plain_net, training_step=training_step, validation_step=None)
    trainer = quiet_trainer(
        pl, strategy, enable_checkpointing=True, callbacks=[Begin(), saving], max_steps=STEPS, devices=1
    )
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(STEPS))))
    finally:
        at.end()


def in_a_child(pl: Any, algorithm: str, folder: str, at: At, every: int) -> int:
    """Fits in a process of its own; its exit status, or the negative number of the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # nothing may hang
        try:
            fit(pl, algorithm, folder, at, every)
            Path(folder, "count").write_text(str(at.count))
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(path: Path) -> dict[str, Any]:
    """What a checkpoint holds of one step; everything in it can be read."""
    loaded = torch.load(path, weights_only=True)
    (state,) = loaded["optimizer_states"]
    state["onebit"].pop("ledger")
    stamp = Stamp.of(loaded)
    assert stamp is not None
    own = [part["tensors"] for part in read_shard(str(path), stamp, 0)] if stamp.shards else []
    return {"weights": loaded["state_dict"], "state": state, "own": own, "counted": loaded["global_step"]}


def campaign(rank: int, world: int, folder: str, seeds: range) -> dict[str, Any]:
    dist.destroy_process_group()
    pl = enter(rank)
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        os.environ.pop(name)
    Pending.wait = wait_or_time_out  # type: ignore[method-assign]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    undisturbed: dict[str, dict[int, Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    came: Counter[str] = Counter()
    for seed in seeds:
        draws = random.Random(seed)
        algorithm, how = draws.choice(list(OPTIONS)), draws.choice([*SIGNALS, "time-out"])
        where = (
            "time-out"
            if how == "time-out"
            else draws.choice(["lightning_onebit/engine", "lightning_onebit/algorithms", ""])
        )
        if algorithm not in undisturbed:
            there = Path(folder, algorithm)
            assert in_a_child(pl, algorithm, str(there), At("SIGINT", None), 1) == 0
            files = [content(path) for path in there.glob("step=*.ckpt")]
            undisturbed[algorithm] = {int(found["state"]["onebit"]["steps"]): found for found in files}
            assert len(undisturbed[algorithm]) == STEPS
        if (algorithm, where) not in counts:
            there = Path(folder, f"counted {len(counts)}")
            assert in_a_child(pl, algorithm, str(there), At(how, None, where), 3) == 0
            counts[algorithm, where] = int(there.joinpath("count").read_text())
        number = draws.randrange(counts[algorithm, where])
        there = Path(folder, str(seed))
        ended = in_a_child(pl, algorithm, str(there), At(how, number, where), 3)
        assert ended != -signal.SIGALRM, (seed, algorithm, how, where, number)
        came[f"{how}: {'ended well' if ended == 0 else 'ended early'}"] += 1
        for path in there.glob("*.ckpt"):
            found = content(path)
            steps = int(found["state"]["onebit"]["steps"])
            right = undisturbed[algorithm][steps]
            differing = [key for key in ("weights", "state", "own") if not alike(found[key], right[key])]
            assert differing == [], (seed, algorithm, how, where, number, path.name)
            came["files"] += 1
            came["files saved by an exception"] += steps % 3 > 0
            came["files whose step Lightning had not counted"] += found["counted"] != steps
    return dict(came)


@pytest.mark.parametrize(
    "seeds",
    [range(4), pytest.param(range(4, 260), marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
    ids=["some", "many"],
)
def test_every_file_of_training_that_was_ended_anywhere_is_that_of_a_whole_step(tmp_path: Path, seeds: range) -> None:
    (came,) = run_ranks(campaign, 1, str(tmp_path), seeds, timeout=60 + 10 * len(seeds))
    print(came)
    assert came["files"] >= len(seeds) and any("early" in name for name in came)
