"""CompressionStats: what it logs, how often, under which names; the progress bar, the table and the figure."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_trainer import FakeModule, FakeTrainer, documented_metrics, onebit_adam
from harness import run_ranks

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.callbacks.stats import (
    CompressionStatsMixin,
    format_bytes,
    format_ratio,
)
from lightning_onebit.engine import ExchangeOptions


def _train(callback: Any, optimizers: list[Any], steps: int, *, freeze_after: int = 2, trainer: Any = None) -> Any:
    trainer, module = trainer or FakeTrainer(optimizers), FakeModule()
    trainer.start(callback, module)
    torch.manual_seed(0)
    for step in range(steps):
        trainer.step()
        if step + 1 == freeze_after:
            for optimizer in optimizers:
                optimizer.freeze()
        callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0 / (step + 1))}, None, step)
    return trainer, module


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr("lightning_onebit.callbacks.stats.rank_zero_info", lambda text: lines.append(text))
    return lines


# ----------------------------------------------------------------------------------------------------------------- names


def test_every_logged_name_is_documented_and_every_documented_name_exists() -> None:
    _, module = _train(CompressionStatsMixin(1), [onebit_adam()], 5)
    logged, documented = {name for values in module.logged for name in values}, documented_metrics()
    assert logged <= documented
    # Those that need several nodes, an option, or something to compare with appear elsewhere.
    special = {"bytes_intra", "bytes_inter", "sign_agreement", "ratio"}
    absent = {name.split("/")[1] for name in documented - logged}
    assert {name for name in absent if not name.startswith("trust_ratio")} <= special


def test_names_of_several_optimizers_end_in_their_number() -> None:
    _, module = _train(CompressionStatsMixin(1), [onebit_adam(), onebit_adam()], 3)
    plain = {name.rsplit("/", 1)[0] for name in module.logged[-1]}
    assert {name.rsplit("/", 1)[1] for name in module.logged[-1]} == {"0", "1"}
    assert plain <= documented_metrics()
    _, single = _train(CompressionStatsMixin(1), [onebit_adam()], 3)
    assert not any(name.endswith("/0") for name in single.logged[-1])


# ---------------------------------------------------------------------------------------------------------------- values


def _two_ranks(rank: int, world: int) -> dict[str, Any]:
    optimizer = onebit_adam()
    callback = CompressionStatsMixin(1, sign_agreement_every_n_steps=2)
    trainer, module = FakeTrainer([optimizer]), FakeModule()
    trainer.start(callback, module)
    torch.manual_seed(rank)
    records = []
    for step in range(6):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        callback.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
        if step == 2:
            optimizer.freeze()
        records.append(vars(optimizer.ledger.last).copy())
        callback.on_train_batch_end(trainer, module, None, None, step)
    said: list[str] = []
    import lightning_onebit.callbacks.stats as stats

    stats.rank_zero_info = said.append  # type: ignore[assignment]
    callback.on_train_end(trainer, module)
    total = optimizer.ledger.total
    return {"logged": module.logged, "records": records, "total": vars(total).copy(), "said": said}


def test_logged_values_are_those_of_the_ledger() -> None:
    for result in run_ranks(_two_ranks, 2):
        assert len(result["logged"]) == 6
        for values, record in zip(result["logged"], result["records"], strict=True):
            for name in ("bytes_sent", "dense_bytes", "collectives", "control_bytes"):
                assert values[f"onebit/{name}"] == record[name], name
            for name in ("communication_seconds", "compression_seconds"):
                assert values[f"onebit/{name}"] == record[name] >= 0, name
            assert values["onebit/ratio"] == record["dense_bytes"] / record["bytes_sent"]
        dense = [values["onebit/dense_step"] for values in result["logged"]]
        assert dense == [1, 1, 1, 0, 0, 0]
        ratios = [values["onebit/ratio"] for values in result["logged"]]
        assert max(ratios[:3]) <= 1.0 < 2 < min(ratios[3:]), "compression must show"
        last = result["logged"][-1]
        for name in ("bytes_sent", "dense_bytes", "communication_seconds", "compression_seconds"):
            assert last[f"onebit/total_{name}"] == result["total"][name]
            if name.endswith("bytes") or name.startswith("bytes"):
                assert result["total"][name] == sum(record[name] for record in result["records"])
        assert last["onebit/total_ratio"] == result["total"]["dense_bytes"] / result["total"]["bytes_sent"]


def test_sign_agreement_is_measured_on_local_gradients_of_compressed_steps_at_its_interval() -> None:
    results = run_ranks(_two_ranks, 2)
    found = [[values.get("onebit/sign_agreement") for values in result["logged"]] for result in results]
    assert found[0] == found[1], "all ranks compute the same"
    # Steps 2 and 4, 6 are due; step 2 is dense.
    assert [value is not None for value in found[0]] == [False, False, False, True, False, True]
    assert all(0.3 < value < 0.7 for value in found[0] if value is not None), "independent signs agree by half"


def test_trust_ratios_are_summarised_and_listed_per_layer_on_request() -> None:
    for per_layer in (False, True):
        optimizer = onebit_adam()
        optimizer.get_lamb_coeffs = lambda: {"a.weight": 0.5, "a.bias": 2.0, "b": 3.5}  # type: ignore[attr-defined]
        _, module = _train(CompressionStatsMixin(trust_ratios_per_layer=per_layer), [optimizer], 3)
        found = {name: value for name, value in module.logged[-1].items() if "trust" in name}
        expected = {"min": 0.5, "mean": 2.0, "max": 3.5}
        expected = {f"onebit/trust_ratio_{name}": value for name, value in expected.items()}
        if per_layer:
            expected.update({f"onebit/trust_ratio/{name}": v for name, v in optimizer.get_lamb_coeffs().items()})
        assert found == expected


def test_trust_ratios_without_lamb_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trust_ratios_per_layer=True.*the optimizers are OnebitAdam"):
        FakeTrainer([onebit_adam()]).start(CompressionStatsMixin(trust_ratios_per_layer=True), FakeModule())


def test_the_table_combines_the_ranks() -> None:
    results = run_ranks(_two_ranks, 2)
    sent = sum(result["total"]["bytes_sent"] for result in results)
    for result in results:
        assert len(result["said"]) == 1
        assert f"all ranks together sent {format_bytes(sent)} in this fit" in result["said"][0]


# -------------------------------------------------------------------------------------------------------------- how often


def test_nothing_is_logged_between_log_steps_or_without_a_step_but_totals_miss_nothing() -> None:
    optimizer = onebit_adam()
    callback, trainer, module = CompressionStatsMixin(), FakeTrainer([optimizer]), FakeModule()
    trainer.start(callback, module)
    for step in range(10):
        trainer._logger_connector.should_update_logs = step % 5 == 4
        if step != 4:  # a batch that only accumulates gradients
            trainer.step()
        callback.on_train_batch_end(trainer, module, None, None, step)
    # The record of step 3 was still unlogged at batch 4.
    assert len(module.logged) == 2
    assert module.logged[-1]["onebit/total_compression_seconds"] == optimizer.ledger.total.compression_seconds
    trainer._logger_connector.should_update_logs = True
    callback.on_train_batch_end(trainer, module, None, None, 10)
    assert len(module.logged) == 2, "no optimizer step, no log"
    trainer._logger_connector.should_update_logs = False
    trainer.is_last_batch = True
    trainer.step()
    callback.on_train_batch_end(trainer, module, None, None, 11)
    assert len(module.logged) == 3, "the last batch of an epoch is logged for callback_metrics"


@pytest.mark.parametrize(("every", "expected"), [(1, 6), (3, 2), (None, 0)])
def test_the_residual_is_read_at_its_interval_and_in_compressed_steps_only(every: int | None, expected: int) -> None:
    optimizer = onebit_adam()
    reads = []
    original = optimizer.residual_ratio
    optimizer.residual_ratio = lambda: reads.append(1) or original()  # type: ignore[method-assign,func-returns-value]
    _, module = _train(CompressionStatsMixin(every), [optimizer], 10, freeze_after=4)
    values = [values["onebit/residual_ratio"] for values in module.logged if "onebit/residual_ratio" in values]
    assert len(reads) == len(values) == expected
    assert all(0 < value < 100 for value in values)


def test_an_optimizer_whose_groups_are_all_dense_has_no_residual() -> None:
    parameters = [{"params": [torch.nn.Parameter(torch.randn(33, 5))], "compress": False}]
    optimizer = OnebitAdam(parameters, exchange=ExchangeOptions(_alone=True, kernels="reference"))
    _, module = _train(CompressionStatsMixin(1), [optimizer], 4)
    assert [values.get("onebit/residual_ratio") for values in module.logged] == [None, None, 0.0, 0.0]


def test_skipped_steps_are_counted() -> None:
    optimizer = onebit_adam()
    callback, trainer, module = CompressionStatsMixin(), FakeTrainer([optimizer]), FakeModule()
    trainer.start(callback, module)
    for step, scale in enumerate((1.0, math.nan, 1.0)):
        trainer.step(scale)
        callback.on_train_batch_end(trainer, module, None, None, step)
    assert [values["onebit/skipped_steps"] for values in module.logged] == [0, 1, 1]


def test_an_infinite_ratio_is_left_out() -> None:
    optimizer = onebit_adam()
    callback, trainer, module = CompressionStatsMixin(), FakeTrainer([optimizer]), FakeModule()
    trainer.start(callback, module)
    trainer.step()
    optimizer.ledger.last.dense_bytes, optimizer.ledger.last.bytes_sent = 80, 0
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert "onebit/ratio" not in module.logged[0]
    assert all(math.isfinite(value) for value in module.logged[0].values())


# ----------------------------------------------------------------------------------------------- progress bar and the end


class _Bar:
    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        return {"v_num": 3}


def test_the_progress_bar_shows_bytes_and_ratio_and_is_left_as_it_was(said: list[str]) -> None:
    optimizers = [onebit_adam(), onebit_adam()]
    trainer = FakeTrainer(optimizers)
    trainer.progress_bar_callback = bar = _Bar()
    callback = CompressionStatsMixin()
    _train(callback, optimizers, 3, trainer=trainer)
    for optimizer, (sent, dense) in zip(optimizers, [(1_000_000, 20_000_000), (500_000, 22_000_000)], strict=True):
        optimizer.ledger.total.bytes_sent, optimizer.ledger.total.dense_bytes = sent, dense
    assert bar.get_metrics(trainer, None) == {"v_num": 3, "sent": "1.5MB 28x"}
    callback.on_train_end(trainer, None)
    assert bar.get_metrics(trainer, None) == {"v_num": 3} and "get_metrics" not in vars(bar)


def test_a_progress_bar_that_was_changed_by_its_user_keeps_the_change() -> None:
    for end in ("on_exception", "teardown"):
        trainer = FakeTrainer([onebit_adam()])
        trainer.progress_bar_callback = bar = SimpleNamespace(get_metrics=lambda *_: {"mine": 1})
        callback = CompressionStatsMixin(summary=False)
        trainer.start(callback, FakeModule())
        assert set(bar.get_metrics(trainer, None)) == {"mine", "sent"}
        getattr(callback, end)(trainer, None, KeyboardInterrupt() if end == "on_exception" else "fit")
        assert set(bar.get_metrics(trainer, None)) == {"mine"}


def test_the_bar_is_left_alone_when_not_wanted() -> None:
    trainer = FakeTrainer([onebit_adam()])
    trainer.progress_bar_callback = _Bar()
    trainer.start(CompressionStatsMixin(progress_bar=False), FakeModule())
    assert vars(trainer.progress_bar_callback) == {}


def test_the_table_lists_steps_and_totals_per_optimizer(said: list[str]) -> None:
    optimizers = [onebit_adam(), onebit_adam()]
    callback = CompressionStatsMixin(1)
    trainer, module = _train(callback, optimizers, 5)
    optimizers[0].ledger.total.bytes_sent, optimizers[0].ledger.total.dense_bytes = 2_000_000, 56_000_000
    callback.on_train_end(trainer, module)
    assert len(said) == 1
    rows = [re.split(r"\s\s+", line.strip()) for line in said[0].splitlines()]
    first = {row[0]: row[1] for row in rows if len(row) == 3}
    expected = {
        "dense steps": "2",
        "compressed steps": "3",
        "skipped steps": "0",
        "sent": "2MB",
        "dense all-reduce": "56MB",
    }
    expected |= {"ratio": "28x", "waiting": "0.0 s"}
    assert {label: first[label] for label in expected} == expected
    assert sum("OnebitAdam 1" in line for line in said[0].splitlines()) == 2
    assert "residual norm / momentum norm" in said[0]


def test_no_table_when_not_wanted(said: list[str]) -> None:
    callback = CompressionStatsMixin(summary=False)
    trainer, module = _train(callback, [onebit_adam()], 3)
    callback.on_train_end(trainer, module)
    assert said == []


def test_nothing_is_watched_after_the_fit() -> None:
    for end in ("on_train_end", "on_exception", "teardown"):
        optimizer = onebit_adam()
        callback = CompressionStatsMixin(summary=False)
        trainer, module = _train(callback, [optimizer], 3)
        trainer.progress_bar_callback = bar = _Bar()
        callback.on_train_start(trainer, module)
        assert "sent" in bar.get_metrics(trainer, None)
        arguments = {"on_train_end": (), "on_exception": (KeyboardInterrupt(),), "teardown": ("fit",)}[end]
        getattr(callback, end)(trainer, module, *arguments)
        assert "sent" not in bar.get_metrics(trainer, None) and not optimizer._optimizer_step_post_hooks, end


def test_a_second_fit_starts_anew_and_goes_on_with_the_totals(said: list[str]) -> None:
    optimizer = onebit_adam()
    callback = CompressionStatsMixin(1)
    _train(callback, [optimizer], 4)
    optimizer.ledger.total.bytes_sent = 10**6  # as a loaded checkpoint would have it
    trainer, module = FakeTrainer([optimizer]), FakeModule()
    trainer.start(callback, module)
    trainer.step()
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert module.logged[-1]["onebit/total_bytes_sent"] == 10**6 + optimizer.ledger.last.bytes_sent
    record = optimizer.ledger.last
    callback.on_train_end(trainer, module)
    assert f"all ranks together sent {format_bytes(record.bytes_sent)} in this fit" in said[0]
    assert f"waiting per step {1000 * record.communication_seconds:.3g} ms" in said[0], "of one step"


# ----------------------------------------------------------------------------------------------------------- formatting


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "1kB"), (12_345_678, "12.3MB"), (999_600_000, "1GB"), (5e15, "5e+03TB")],
)
def test_bytes_are_written_in_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.0, "1.0x"), (4.57, "4.6x"), (27.9, "28x"), (math.inf, "nothing sent")])
def test_ratios_are_written_with_the_digits_that_matter(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text


# --------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"residual_every_n_steps": 0}, ValueError, "residual_every_n_steps=0"),
        ({"residual_every_n_steps": "10"}, TypeError, "residual_every_n_steps='10'"),
        ({"sign_agreement_every_n_steps": -1}, ValueError, "sign_agreement_every_n_steps=-1"),
        ({"sign_agreement_every_n_steps": 1.5}, TypeError, "sign_agreement_every_n_steps=1.5"),
        ({"progress_bar": 1}, TypeError, "progress_bar=1"),
        ({"trust_ratios_per_layer": None}, TypeError, "trust_ratios_per_layer=None"),
        ({"summary": "yes"}, TypeError, "summary='yes'"),
        ({"figure": True}, TypeError, "figure"),
    ],
)
def test_every_bad_option_is_refused_by_name(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        CompressionStatsMixin(**options)


def test_a_strategy_that_compresses_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CompressionStats.* found no compressed optimizer"):
        FakeTrainer([]).start(CompressionStatsMixin(), FakeModule())


# -------------------------------------------------------------------------------------------------- the other algorithms


def _other_algorithm(rank: int, world: int, kind: str, ranks_per_node: int) -> tuple[list[dict[str, float]], list[str]]:
    import lightning_onebit.callbacks.freeze as freeze
    import lightning_onebit.callbacks.stats as stats
    from lightning_onebit import algorithms

    said: list[str] = []
    stats.rank_zero_info = freeze.rank_zero_info = said.append  # type: ignore[assignment]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64, 33)), torch.nn.Parameter(torch.randn(7))]
    optimizer = getattr(algorithms, kind)(parameters, exchange=ExchangeOptions(block_size=32, kernels="reference"))
    optimizer.configure_communication(None, ranks_per_node=ranks_per_node)
    callbacks: list[Any] = [CompressionStatsMixin(1)]
    if kind != "BinSGDM":
        callbacks.append(freeze.VarianceFreezeMixin(3))
    trainer, module = FakeTrainer([optimizer]), FakeModule()
    for callback in callbacks:
        trainer.start(callback, module)
    for step in range(8):
        trainer.step()
        callbacks[0].on_train_batch_end(trainer, module, None, None, step)
    callbacks[0].on_train_end(trainer, module)
    return module.logged, said


@pytest.mark.parametrize("kind", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "BinSGDM"])
def test_every_algorithm_is_reported(kind: str) -> None:
    for logged, said in run_ranks(_other_algorithm, 2, kind, 1):
        assert len(logged) == 8
        assert {name for values in logged for name in values} <= documented_metrics()
        assert all(math.isfinite(value) for values in logged for value in values.values())
        assert logged[-1]["onebit/total_ratio"] > 1
        assert ("onebit/trust_ratio_mean" in logged[-1]) == (kind == "OnebitLamb")
        assert kind in said[-1]


def test_bytes_inside_and_between_nodes_are_told_apart() -> None:
    for logged, _ in run_ranks(_other_algorithm, 4, "OnebitAdam", 2):
        last = logged[-1]
        assert last["onebit/bytes_intra"] > 0 and last["onebit/bytes_inter"] > 0
        assert last["onebit/bytes_intra"] + last["onebit/bytes_inter"] == last["onebit/bytes_sent"]
