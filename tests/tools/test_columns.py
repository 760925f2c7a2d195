"""Nothing that is printed is wider than a terminal of 80 columns."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_trainer import FakeModule, FakeTrainer, onebit_adam
from lightning_utilities.core import rank_zero

from lightning_onebit._text import fill
from lightning_onebit.callbacks import probe
from lightning_onebit.callbacks.freeze import VarianceFreezeMixin
from lightning_onebit.callbacks.probe import LinkProbeMixin
from lightning_onebit.callbacks.stats import CompressionStatsMixin
from lightning_onebit.tools import bench, cli, doctor
from lightning_onebit.tools.bench import LinkMeasurement


def fits(text: str) -> bool:
    """Whether every line fits; a line of one word (a path) may be as long as it is."""
    wide = [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]
    assert not wide, "\n".join(wide)
    return bool(text.strip())


BASE = ["--gpus", "64", "--gpus-per-node", "4", "--compute-ms", "247", "--bandwidth"]


@pytest.mark.parametrize(
    "more",
    [
        [*BASE, "4.1Gbps", "--params", "336M"],
        [*BASE, "10Gbps", "--params", "1.3B", "--algorithm", "onebit_lamb", "--steps", "100"],
        [*BASE, "9600bps", "--params", "1000T"],
        [*BASE, "9600bps", "--params", "1000T", "--shards", "4"],
        ["--gpus", "8", "--dense-ms", "6000", "--bandwidth", "20Gbps", "--params", "1B", "--warmup", "1"],
    ],
)
def test_plan_fits(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *more]) == 0
    assert fits(capsys.readouterr().out)


@pytest.mark.parametrize("command", [[], ["plan"], ["doctor"], ["bench"]])
def test_help_and_errors_fit(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert fits(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        cli.main([*(command or ["plan"]), "--kernels", "fast", "--params", "4.1 of a kind", "--timeout", "-1"])
    message = capsys.readouterr().err
    assert fits(message[message.index("error:") :])


def test_bench_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    slow = LinkMeasurement(16_000_000_000, 1234.5, 2345.6, 12.3, 64_000_000_000, 2_000_000_000)
    fast = LinkMeasurement(250_000, 0.01, 0.002, 0.001, 1_000_000, 30_000)
    monkeypatch.setattr(bench.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(bench.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench.dist, "get_world_size", lambda: 4096)
    for results in ([slow], [fast], [fast, slow]):
        left = list(results)
        monkeypatch.setattr(bench, "measure_link", lambda *_, left=left, **__: left.pop())
        assert cli.main(["bench", "--sizes", *("9" for _ in results)]) == 0
        said = capsys.readouterr()
        assert fits(said.out) and fits(said.err)


def test_doctor_fits_with_and_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--no-test"]) in (0, 1)
    assert fits(capsys.readouterr().out)
    facts = doctor.examine(test=False)
    facts["namespaces"] = {"lightning.pytorch": ["onebit_adam", "onebit_adam_spawn", "onebit_lamb"] * 4, "other": []}
    facts["kernels"]["cpu"] = {"backend": "reference", "why": "plain torch, slower with the same bits: " + "no " * 99}
    error = "processes ended with exit codes [1, None]\n" + "RuntimeError: " + "Connection closed by peer " * 9
    facts["self_tests"] = {
        "cpu": {"passed": False, "backend": "gloo", "seconds": 120.01, "error": error},
        "cuda": {"passed": True, "backend": "nccl", "seconds": 12.34, "bytes_ratio": 27.9},
    }
    facts["problems"] = doctor._problems(facts)
    assert fits(doctor.describe(facts))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What Lightning's logger prints."""
    printed = io.StringIO()
    monkeypatch.setattr(rank_zero.rank_zero_only, "rank", 0, raising=False)
    handler, level = logging.StreamHandler(printed), rank_zero.log.level
    rank_zero.log.setLevel(logging.INFO)
    rank_zero.log.addHandler(handler)
    yield printed
    rank_zero.log.removeHandler(handler)
    rank_zero.log.setLevel(level)


class Bar:
    """Stands for a progress bar, which leaves the cursor at the end of its line."""

    is_enabled = True

    def get_metrics(self, *_: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("optimizers", [1, 6])
def test_what_callbacks_say_fits_and_begins_below_the_progress_bar(
    optimizers: int, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        probe, "measure_link", lambda n, **_: LinkMeasurement(n, n * 2e-8, n * 1e-9, n / 1e9, n, n // 30)
    )
    monkeypatch.setattr(probe, "dist", SimpleNamespace(get_backend=lambda: "gloo"))
    trainer, module = FakeTrainer([onebit_adam() for _ in range(optimizers)], 1000), FakeModule()
    trainer.progress_bar_callback = Bar()
    stats = CompressionStatsMixin(1)
    callbacks: list[Any] = [
        VarianceFreezeMixin(latest=3),
        stats,
        LinkProbeMixin(watch_steps=1),
    ]
    for callback in callbacks:
        trainer.start(callback, module)
    for step in range(5):
        trainer.step()
        for callback in callbacks[1:]:
            callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, step)
    for optimizer in trainer.optimizers:
        ledger = optimizer.ledger
        ledger.dense_steps, ledger.compressed_steps = 10**8, 10**9
        ledger.total.bytes_sent, ledger.total.dense_bytes = 0, 999 * 10**12
        ledger.total.communication_seconds = ledger.total.compression_seconds = 1e6
    bar = trainer.progress_bar_callback.get_metrics()
    stats.on_train_end(trainer, module)
    said = logged.getvalue()
    assert fits(said)
    for beginning in ("VarianceFreeze: OnebitAdam", "Compression since"):
        assert f"\n\n{beginning}" in said, "after what the bar has drawn"
    assert "LinkProbe: " in said and said.count("freezes its variance") == optimizers
    assert len(f"sent: {bar['sent']}") <= 24


def test_words_are_not_torn_and_lines_that_fit_stay() -> None:
    path = "/a" * 60
    text = f"  two  spaces\n\nsee {path} and {'so on ' * 20}"
    assert fill(text).splitlines()[:4] == ["  two  spaces", "", "see", path]
