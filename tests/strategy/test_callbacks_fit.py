"""The callbacks in real fits: two processes, both Lightning trees, loggers, resume, several optimizers, refusals."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import textwrap
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_trainer import documented_metrics
from harness import grouped, python, run_ranks
from lightning_support import resumes_within_epochs

TREES = ["lightning.pytorch", "pytorch_lightning"]
BATCHES = 12


def _namespace(package: str) -> SimpleNamespace:
    pl = importlib.import_module(package)
    bound = importlib.import_module(
        "lightning_onebit.lightning" if package == "lightning.pytorch" else "lightning_onebit.pytorch_lightning"
    )
    loggers = importlib.import_module(f"{package}.loggers")
    return SimpleNamespace(pl=pl, ob=bound, loggers=loggers, package=package)


def _as_rank_of_a_launched_job(rank: int, world: int) -> None:
    """What torchrun would have set: Lightning then starts no processes and uses the process group that is there."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_RESTART_COUNT="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )


def _model(ns: SimpleNamespace, schedule: Any = None, **options: Any) -> Any:
    """A model, with ``schedule`` whose learning rate is multiplied by ``schedule(steps made)``."""
    from lightning_onebit import OnebitAdam

    class Model(ns.pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = OnebitAdam(self.parameters(), lr=1e-2, **grouped(options, kernels="reference"))
            if schedule is None:
                return optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Model()


def _two_optimizers(ns: SimpleNamespace) -> Any:
    from lightning_onebit import ExchangeOptions, OnebitAdam

    class Model(ns.pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 4)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for optimizer in self.optimizers():
                loss = torch.nn.functional.cross_entropy(self.second(self.first(x)), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            exchange = ExchangeOptions(kernels="reference")
            return [OnebitAdam(part.parameters(), exchange=exchange) for part in (self.first, self.second)]

    return Model()


def _loader(batches: int = BATCHES) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * 4 * batches, 32, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)


def _trainer(ns: SimpleNamespace, callbacks: list[Any], **options: Any) -> Any:
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": ns.ob.OnebitStrategy(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return ns.pl.Trainer(**{**defaults, **options}, callbacks=callbacks)


class _Said:
    """Collects the info lines of the callbacks."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        for name in ("freeze", "stats", "guard", "probe"):
            module = importlib.import_module(f"lightning_onebit.callbacks.{name}")
            for say in ("rank_zero_info", "rank_zero_warn"):
                setattr(module, say, self.lines.append)


def _counts(trainer: Any) -> list[tuple[int, int]]:
    return [(o.ledger.dense_steps, o.ledger.compressed_steps) for o in trainer.optimizers]


# ------------------------------------------------------------------------------------------------------------- scenarios


def _fixed(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """A fraction with a CSV and a TensorBoard logger, a checkpoint, statistics and the replica check."""
    said = _Said()
    callbacks = [
        ns.ob.VarianceFreeze(0.25),
        ns.ob.CompressionStats(1, sign_agreement_every_n_steps=1),
        ns.ob.ReplicaConsistency(every_n_steps=3),
    ]
    loggers = [ns.loggers.CSVLogger(directory, name="csv"), ns.loggers.TensorBoardLogger(directory, name="tb")]
    trainer = _trainer(
        ns, callbacks, logger=loggers, log_every_n_steps=2, enable_checkpointing=True, default_root_dir=directory
    )
    trainer.fit(_model(ns), _loader())
    optimizer = trainer.optimizers[0]
    return {
        "counts": _counts(trainer),
        "said": said.lines,
        "total": vars(optimizer.ledger.total).copy(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "checkpoint": trainer.checkpoint_callback.best_model_path,
        "log_dir": trainer.log_dir,
    }


def _accumulated(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    _Said()
    trainer = _trainer(ns, [ns.ob.VarianceFreeze(0.5), ns.ob.CompressionStats()], accumulate_grad_batches=2)
    trainer.fit(_model(ns), _loader())
    return _counts(trainer)


def _scheduled(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """Accumulation that changes: 12 + 3 + 3 + 3 steps, and the same cut at 15."""
    _Said()
    scheduler = importlib.import_module(f"{ns.package}.callbacks").GradientAccumulationScheduler
    counts = []
    for max_steps in (-1, 15):
        callbacks = [ns.ob.VarianceFreeze(1 / 3), scheduler({0: 1, 1: 4})]
        trainer = _trainer(ns, callbacks, max_epochs=4, max_steps=max_steps)
        trainer.fit(_model(ns), _loader())
        counts.append(_counts(trainer))
    return counts


def _shared_steps(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """``max_steps`` counts the steps of both optimizers of manual optimization: without epochs, and where it stops them."""
    _Said()
    counts = []
    for options in ({"max_epochs": -1, "max_steps": 20}, {"max_epochs": 2, "max_steps": 20}, {"max_steps": 40}):
        trainer = _trainer(ns, [ns.ob.VarianceFreeze(0.5)], **options)
        trainer.fit(_two_optimizers(ns), _loader())
        counts.append(_counts(trainer))
    return counts


def _auto(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    said = _Said()
    trainer = _trainer(ns, [ns.ob.VarianceFreeze(latest=0.9)], max_epochs=4)
    trainer.fit(_model(ns, lambda done: min(1.0, (done + 1) / 20), refresh="never"), _loader())
    return {"counts": _counts(trainer), "said": said.lines}


def _default(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    _Said()
    trainer = _trainer(ns, [])
    trainer.fit(_model(ns), _loader(10))
    first = _counts(trainer)
    # A second fit of the same Trainer makes a new optimizer, for which ten more batches are planned.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(_model(ns), _loader(10))
    return first, _counts(trainer)


def _several(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    said = _Said()
    callbacks = [ns.ob.VarianceFreeze(3), ns.ob.CompressionStats(1), ns.ob.ReplicaConsistency(4)]
    trainer = _trainer(ns, callbacks)
    trainer.fit(_two_optimizers(ns), _loader(6))
    return {"counts": _counts(trainer), "said": said.lines, "names": sorted(trainer.callback_metrics)}


def _resumed(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """A run that saves after 5 of its 12 steps, and one from there, which has to know of the rises at steps 4 and 5."""
    said = _Said()
    checkpoints = importlib.import_module(f"{ns.package}.callbacks").ModelCheckpoint

    def fit(ckpt_path: str | None) -> Any:
        callbacks = [
            ns.ob.VarianceFreeze(earliest=4, latest=11),
            checkpoints(directory, "{step}", every_n_train_steps=5, save_top_k=-1),
        ]
        trainer = _trainer(ns, callbacks, enable_checkpointing=True)
        model = _model(ns, lambda done: 0.1 * (1 + (done >= 3) + (done >= 4)), refresh="never")
        trainer.fit(model, _loader(), ckpt_path=ckpt_path)
        return _counts(trainer)

    whole = fit(None)
    path = os.path.join(directory, "step=5.ckpt")
    kept = torch.load(path, weights_only=True)["callbacks"]["VarianceFreeze"]["optimizers"]
    rest = fit(path)
    return {
        "whole": whole,
        "rest": rest,
        "kept": kept,
        "switches": [line for line in said.lines if "freezes its variance" in line],
    }


def _guarded(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """The loss jumps in batches 8 to 11 (of 24): four dense steps follow, then compression again."""
    said = _Said()
    model = _model(ns)
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx) * (50.0 if 8 <= batch_idx < 12 else 1.0)
    callbacks = [
        ns.ob.LinkProbe(0.05, watch_steps=1),
        ns.ob.VarianceFreeze(4),
        ns.ob.DivergenceGuard(4, loss_factor=20.0, dense_steps=4),
        ns.ob.ReplicaConsistency(1),
    ]
    trainer = _trainer(ns, callbacks)
    trainer.fit(model, _loader(24))
    report = callbacks[0].report
    return {"counts": _counts(trainer), "said": said.lines, "report": (report.ranks, report.elements)}


def _spoiled(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    class Spoil(ns.pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 5 and rank == 1:
                with torch.no_grad():
                    pl_module.net[2].bias[0] += 1e-7

    trainer = _trainer(ns, [Spoil(), ns.ob.VarianceFreeze(2), ns.ob.ReplicaConsistency(every_n_steps=4)])
    try:
        trainer.fit(_model(ns), _loader())
    except RuntimeError as error:
        return trainer.global_step, str(error)
    return None


def _refused(ns: SimpleNamespace, rank: int, directory: str) -> Any:
    """Misuse that must end in a clear error before a step is made."""
    endless = torch.utils.data.DataLoader(_Endless(), batch_size=4)
    cases = {
        "conflict": (_model(ns, freeze_step=3), [ns.ob.VarianceFreeze(5)], {}, None),
        "endless": (_model(ns), [ns.ob.VarianceFreeze(0.2)], {"max_epochs": -1}, endless),
        "endless_auto": (_model(ns), [ns.ob.VarianceFreeze()], {"max_epochs": -1}, endless),
        "endless_default": (_model(ns), [], {}, endless),
        "ddp_freeze": (_model(ns), [ns.ob.VarianceFreeze(5)], {"strategy": "ddp"}, None),
        "ddp_stats": (_model(ns), [ns.ob.CompressionStats()], {"strategy": "ddp"}, None),
    }
    found = {}
    for name, (model, callbacks, options, loader) in cases.items():
        trainer = _trainer(ns, callbacks, **options)
        try:
            trainer.fit(model, _loader() if loader is None else loader)
        except Exception as error:
            found[name] = (type(error).__name__, traceback.format_exc(), trainer.global_step)
    return found


class _Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        while True:
            yield torch.randn(32), 0


_SCENARIOS = [
    _fixed,
    _accumulated,
    _scheduled,
    _shared_steps,
    _auto,
    _default,
    _several,
    _resumed,
    _guarded,
    _spoiled,
    _refused,
]


def _all_scenarios(rank: int, world: int, package: str, directory: str) -> dict[str, Any]:
    _as_rank_of_a_launched_job(rank, world)
    ns = _namespace(package)
    found = {}
    for scenario in _SCENARIOS:
        where = os.path.join(directory, scenario.__name__)
        os.makedirs(where, exist_ok=True)
        found[scenario.__name__] = scenario(ns, rank, where)
    return found


# the other tests fit with `lightning`
@pytest.fixture(scope="module", params=[pytest.param(TREES[0], marks=pytest.mark.nightly), TREES[1]])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All scenarios in one pair of processes per tree: importing Lightning costs more than the fits."""
    pytest.importorskip(request.param)
    return run_ranks(_all_scenarios, 2, request.param, str(tmp_path_factory.mktemp("fits")), timeout=150)


# ----------------------------------------------------------------------------------------------------------------- tests


def test_a_fraction_of_the_planned_steps_stays_dense_on_every_rank(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_fixed"]["counts"] == [(3, 9)]


def test_the_freeze_is_forecast_before_and_announced_at_the_switch(fits: list[dict[str, Any]]) -> None:
    said = [" ".join(text.split()) for text in fits[0]["_fixed"]["said"]]
    assert "3 dense steps of 12 planned (w = 25.0%)" in said[0]
    assert ["freezes its variance" in line for line in said] == [False, True, False]


def test_loggers_get_the_documented_names_at_lightnings_interval(fits: list[dict[str, Any]]) -> None:
    result = fits[0]["_fixed"]
    path = next(Path(result["log_dir"]).rglob("metrics.csv"))
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["onebit/bytes_sent"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9, 11]
    assert [float(row["onebit/dense_step"]) for row in rows] == [1, 0, 0, 0, 0, 0]
    assert float(rows[-1]["onebit/total_bytes_sent"]) == result["total"]["bytes_sent"]
    assert float(rows[-1]["onebit/ratio"]) > 5 > 1.1 > float(rows[0]["onebit/ratio"])
    logged = {name for name in rows[0] if name.startswith("onebit/")}
    absent = {name.split("/")[1] for name in documented_metrics() - logged}
    assert {name for name in absent if not name.startswith("trust_ratio")} == {"bytes_intra", "bytes_inter"}
    assert logged <= documented_metrics()
    assert all(row["onebit/residual_ratio"] and row["onebit/sign_agreement"] for row in rows[1:])


def test_tensorboard_gets_them_too(fits: list[dict[str, Any]]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = fits[0]["_fixed"]
    folder = next((Path(result["log_dir"]).parents[1] / "tb").iterdir())
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    values = events.Scalars("onebit/total_bytes_sent")
    assert len(values) == 6 and values[-1].value == result["total"]["bytes_sent"]


def test_callback_metrics_hold_the_last_step_for_checkpoint_monitors(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        metrics = result["_fixed"]["metrics"]
        assert metrics["onebit/total_bytes_sent"] == result["_fixed"]["total"]["bytes_sent"]


def test_the_table_comes_at_the_end(fits: list[dict[str, Any]]) -> None:
    from lightning_onebit.callbacks.stats import format_bytes

    result = fits[0]["_fixed"]
    assert f"all ranks together sent {format_bytes(2 * result['total']['bytes_sent'])}" in result["said"][2]


def test_an_optimizer_step_over_several_batches_counts_once(fits: list[dict[str, Any]]) -> None:
    assert [result["_accumulated"] for result in fits] == [[(3, 3)]] * 2


def test_a_fraction_follows_accumulation_that_changes_between_epochs(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_scheduled"] == [[(7, 14)], [(5, 10)]]


def test_a_fraction_is_of_the_steps_of_one_optimizer(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_shared_steps"] == [[(5, 5), (5, 5)], [(5, 5), (5, 5)], [(6, 6), (6, 6)]]


def test_auto_freezes_by_the_rule_at_the_same_step_on_all_ranks(fits: list[dict[str, Any]]) -> None:
    # the peak is that of step 20, the minimum 2, the maximum 43
    assert [result["_auto"]["counts"] for result in fits] == [[(22, 26)]] * 2
    assert "the learning rate no longer rises" in fits[0]["_auto"]["said"][-1]


def test_without_any_freeze_the_default_ends_the_warmup_in_every_fit(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_default"] == ([(5, 5)], [(5, 5)])  # half of so short a run


def test_several_optimizers_have_their_own_freeze_and_their_own_names(fits: list[dict[str, Any]]) -> None:
    result = fits[0]["_several"]
    assert result["counts"] == [(3, 3), (3, 3)]
    assert "onebit/bytes_sent/0" in result["names"] and "onebit/bytes_sent/1" in result["names"]
    assert sum("freezes its variance" in line for line in result["said"]) == 2


@resumes_within_epochs
def test_the_automatic_rule_goes_on_from_a_checkpoint(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        resumed = result["_resumed"]
        # the longest gap is that from step 1 to step 4: over with the fourth step after the last rise
        assert resumed["whole"] == resumed["rest"] == [(9, 3)]
        assert resumed["kept"][0]["learning_rate"]["last_rise"] == resumed["kept"][0]["seen"] == 5
        assert len(resumed["switches"]) == 2 and all("no longer rises" in line for line in resumed["switches"])


def test_a_blow_up_is_survived_by_dense_steps_with_equal_replicas(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_guarded"]["counts"] == [(4 + 4, 8 + 8)]
    said = fits[0]["_guarded"]["said"]
    assert sum("DivergenceGuard: after step 12" in line for line in said) == 1
    assert sum("freezes its refreshed variance" in line for line in said) == 1


def test_the_link_is_measured_before_training(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        assert result["_guarded"]["report"] == (2, 32 * 64 + 64 + 64 * 4 + 4)
    assert fits[0]["_guarded"]["said"][0].startswith("LinkProbe: 2 ranks, 2,372 parameters")


def test_a_spoiled_replica_stops_the_run_on_all_ranks_and_is_named(fits: list[dict[str, Any]]) -> None:
    for result in fits:
        step, message = result["_spoiled"]
        assert step == 8
        assert "parameter 'net.2.bias' is the first of 1 (of 4)" in message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("conflict", ["freeze_step=3", "VarianceFreeze(at=5)", "remove one"]),
        ("endless", ["at=0.2", "unknown", "`VarianceFreeze(at=...)`"]),
        ("endless_auto", ["latest=0.2", "unknown", "`VarianceFreeze(latest=...)`"]),
        (
            "endless_default",
            ["unknown", "20%", "`Trainer(max_steps=...)`", "`freeze_step=`", "`VarianceFreeze(latest=...)`"],
        ),
        ("ddp_freeze", ["VarianceFreeze", "DDPStrategy", 'strategy="onebit_adam"']),
        ("ddp_stats", ["CompressionStats", "DDPStrategy", 'strategy="onebit_adam"']),
    ],
)
def test_misuse_is_refused_before_training(fits: list[dict[str, Any]], case: str, words: list[str]) -> None:
    for result in fits:
        name, message, step = result["_refused"][case]
        assert (name, step) == ("MisconfigurationException", 0), message
        for word in words:
            assert word in message


# ----------------------------------------------------------------------------------------------- trees, without any fit


def _python(code: str) -> str:
    done = subprocess.run(
        [python(), "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("package_first", [False, True])
def test_callbacks_are_those_of_the_tree_the_user_has_loaded(tree: str, package_first: bool) -> None:
    pytest.importorskip(tree)
    lines = ["import lightning_onebit as ob", f"import {tree} as pl"]
    lines = lines if package_first else lines[::-1]
    code = "\n".join(
        [
            *lines,
            "names = ob.callbacks.__all__",
            "assert all(issubclass(getattr(ob.callbacks, name), pl.Callback) for name in names)",
            "assert set(names) <= set(dir(ob.callbacks))",
            "assert ob.callbacks.VarianceFreeze(3).at == 3",
            "import sys; others = {'lightning.pytorch', 'pytorch_lightning'} - {pl.__name__}",
            "print(others & set(sys.modules))",
        ]
    )
    assert _python(code).strip() == "set()", "the tree that is not used must not be imported"


@pytest.mark.parametrize(
    "name", ["VarianceFreeze(2)", "CompressionStats()", "ReplicaConsistency()", "LinkProbe()", "DivergenceGuard()"]
)
@pytest.mark.parametrize("tree", TREES)
def test_a_callback_of_the_wrong_tree_is_refused_with_the_right_import(tree: str, name: str) -> None:
    for package in TREES:
        pytest.importorskip(package)
    ns = _namespace(tree)
    other = _namespace(next(package for package in TREES if package != tree))
    callback = eval(name, vars(other.ob))
    try:
        trainer = ns.pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ns.ob.OnebitStrategy(),
            callbacks=[callback],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except ValueError as error:
        if str(error) != "Expected a parent":
            raise
        pytest.skip("this Lightning's Trainer refuses the callback before the strategy sees it")
    kind = name.split("(")[0]
    with pytest.raises(TypeError, match=rf"from {ns.ob.__name__} import {kind}"):
        trainer.fit(_model(ns), _loader(2))


def test_an_unknown_callback_name_is_an_attribute_error_that_lists_the_names() -> None:
    callbacks = importlib.import_module("lightning_onebit.callbacks")
    with pytest.raises(
        AttributeError, match=r"NoSuch.*CompressionStats, DivergenceGuard, LinkProbe, ReplicaConsistency"
    ):
        _ = callbacks.NoSuch


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_lightnings_progress_bars_show_the_item(
    bar: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bar == "RichProgressBar":
        pytest.importorskip("rich")
    pytest.importorskip("lightning.pytorch")
    # Rich draws nothing between refreshes where the output is no terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    ns = _namespace("lightning.pytorch")
    progress = getattr(importlib.import_module("lightning.pytorch.callbacks"), bar)(refresh_rate=1)
    callbacks = [ns.ob.VarianceFreeze(2), ns.ob.CompressionStats(summary=False), progress]
    trainer = _trainer(ns, callbacks, devices=1, enable_progress_bar=True)
    trainer.fit(_model(ns, _alone=True), _loader(3))
    written = capsys.readouterr()
    assert re.search(r"sent[=:] *\d[\w.]* *\d[\d.]*x", written.out + written.err), written


@pytest.mark.parametrize("tree", TREES)
def test_a_configuration_file_names_the_callbacks_by_class_path(tree: str, tmp_path: Path) -> None:
    pytest.importorskip(tree)
    pytest.importorskip("jsonargparse")
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent("""
        trainer:
          accelerator: cpu
          devices: 1
          strategy: onebit_adam
          logger: false
          callbacks:
            - class_path: lightning_onebit.callbacks.VarianceFreeze
              init_args: {at: auto, latest: 0.3}
            - class_path: lightning_onebit.callbacks.CompressionStats
              init_args: {residual_every_n_steps: null}
            - class_path: lightning_onebit.callbacks.ReplicaConsistency
            - class_path: lightning_onebit.callbacks.LinkProbe
            - class_path: lightning_onebit.callbacks.DivergenceGuard
        """)
    )
    code = f"""
        import sys
        import lightning_onebit
        from {tree}.cli import LightningCLI
        from {tree}.demos.boring_classes import BoringModel
        cli = LightningCLI(BoringModel, run=False, args=["--config", {str(config)!r}])
        freeze, stats, check = cli.trainer.callbacks[:3]
        print(freeze.at, freeze.latest, stats.residual_every_n_steps, check.every_n_steps)
        again = cli.parser.dump(cli.config)
        open({str(tmp_path / "again.yaml")!r}, "w").write(again)
        cli = LightningCLI(BoringModel, run=False, args=["--config", {str(tmp_path / "again.yaml")!r}])
        print([type(callback).__module__ for callback in cli.trainer.callbacks[:5]])
    """
    bound = "lightning_onebit." + tree.split(".")[0]
    assert _python(code).splitlines() == ["auto 0.3 None 1000", str([bound] * 5)]
