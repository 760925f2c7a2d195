"""LinkProbe: its arithmetic, what it says, when it warns; on real ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_trainer import FakeModule, FakeTrainer, onebit_adam
from harness import run_ranks

import lightning_onebit.callbacks.probe as probe
from lightning_onebit.algorithms import BinSGDM, OnebitAdam
from lightning_onebit.callbacks.probe import LinkProbeMixin, LinkReport
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.strategy.ranks import Replicas
from lightning_onebit.tools.bench import LinkMeasurement, measure_link
from lightning_onebit.tools.cluster import Cluster, Job
from lightning_onebit.tools.plan import exchange_of


class _Said:
    def __init__(self) -> None:
        self.infos: list[str] = []
        self.warnings: list[str] = []


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> _Said:
    found = _Said()
    monkeypatch.setattr(probe, "rank_zero_info", found.infos.append)
    monkeypatch.setattr(probe, "rank_zero_warn", found.warnings.append)
    monkeypatch.setattr(probe, "dist", SimpleNamespace(get_backend=lambda: "gloo"))
    return found


def _network(bits_per_second: float, latency: float, kernel_seconds_per_element: float, n: int = 2) -> Any:
    """A network and a machine that behave exactly like the model."""

    def measure(elements: int, **_: Any) -> LinkMeasurement:
        dense, sent = 8 * (n - 1) * elements // n, (n - 1) * elements // (4 * n)
        local = kernel_seconds_per_element * elements
        wire = 8 / bits_per_second
        return LinkMeasurement(elements, latency + dense * wire, 2 * latency + sent * wire + local, local, dense, sent)

    return measure


def test_a_model_on_the_line_through_both_samples_is_predicted_exactly() -> None:
    measure = _network(1e8, 1e-3, 2e-9)
    report = LinkReport.extrapolate(50_000_000, 2, measure(60_000), measure(1_000_000))
    truth = measure(50_000_000)
    assert report.dense_seconds == pytest.approx(truth.dense_seconds)
    assert report.exchange_seconds == pytest.approx(truth.exchange_seconds)
    assert report.local_seconds == pytest.approx(truth.local_seconds)
    assert report.speedup == pytest.approx(truth.speedup)


def test_at_the_break_even_bandwidth_both_take_equally_long() -> None:
    measure = _network(1e8, 0.0, 2e-9)
    even = LinkReport.extrapolate(10**7, 2, measure(10**5), measure(10**6)).break_even
    measure = _network(even, 0.0, 2e-9)
    assert LinkReport.extrapolate(10**7, 2, measure(10**5), measure(10**6)).speedup == pytest.approx(1.0, rel=1e-4)


def test_noise_between_the_samples_is_no_reason_to_predict_a_free_exchange() -> None:
    small, large = (LinkMeasurement(size, 0.01, 0.01, 0.001, 8 * size, size) for size in (100, 1600))
    report = LinkReport.extrapolate(16_000, 2, small, large)
    assert report.dense_seconds == pytest.approx(0.1)


def test_a_model_below_the_smaller_sample_takes_no_negative_time() -> None:
    """Where costs grow faster than sizes (caches), the line through both samples is below 0 there."""
    small = LinkMeasurement(62_500, 0.001, 0.002, 0.0005, 250_000, 10_000)
    large = LinkMeasurement(1_000_000, 0.1, 0.01, 0.002, 4_000_000, 160_000)
    report = LinkReport.extrapolate(6_250, 2, small, large)
    assert report.dense_seconds == pytest.approx(0.0001), "in proportion to the smaller sample"
    assert report.exchange_seconds == pytest.approx(0.002 - 0.008 * 56_250 / 937_500), "on the line"
    assert not report.pays and 0 < report.speedup < 1


def test_break_even_is_left_out_where_kernels_are_not_seen() -> None:
    measure = _network(1e8, 0.0, 2e-9)
    small, large = (replace(measure(size), local_seconds=math.nan) for size in (10**5, 10**6))  # as measured on CUDA
    report = LinkReport.extrapolate(10**7, 2, small, large)
    assert math.isinf(report.break_even) and "break even" not in str(report)


def _start(monkeypatch: pytest.MonkeyPatch, measure: Any, **options: Any) -> tuple[Any, Any, Any]:
    monkeypatch.setattr(probe, "measure_link", measure)
    optimizer = onebit_adam()
    trainer, callback = FakeTrainer([optimizer]), LinkProbeMixin(**options)
    trainer.start(callback, FakeModule())
    return callback, trainer, optimizer


def test_a_slow_link_is_reported_and_a_fast_one_warned_about(monkeypatch: pytest.MonkeyPatch, said: _Said) -> None:
    callback, *_ = _start(monkeypatch, _network(1e7, 0.0, 1e-9))
    assert callback.report.elements == 33 * 5 + 7 and callback.report.pays
    assert "172 parameters" in said.infos[0] and "10 Mb/s per rank" in said.infos[0] and "break even" in said.infos[0]
    assert said.warnings == []
    callback, *_ = _start(monkeypatch, _network(1e11, 0.0, 1e-8))
    assert not callback.report.pays
    assert len(said.warnings) == 1 and "compression cannot pay" in said.warnings[0] and "ddp" in said.warnings[0]


def test_a_single_process_measures_nothing(monkeypatch: pytest.MonkeyPatch, said: _Said) -> None:
    monkeypatch.setattr(probe, "measure_link", None)
    trainer, callback = FakeTrainer([onebit_adam()]), LinkProbeMixin()
    trainer.world_size, trainer.strategy.replicas = 1, Replicas(1)
    trainer.start(callback, FakeModule())
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert callback.report is None and "no link to measure" in said.infos[0]


@pytest.mark.parametrize(("share", "warns"), [(0.5, False), (0.01, True)])
def test_the_share_of_waiting_in_dense_steps_bounds_the_gain(
    monkeypatch: pytest.MonkeyPatch, said: _Said, share: float, warns: bool
) -> None:
    callback, trainer, optimizer = _start(monkeypatch, _network(1e7, 0.0, 1e-9), watch_steps=10)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    for step in range(20):
        trainer.step()
        waited = 5.0 if step < 2 else share  # the first steps connect and must not count
        clock.now += 9.0 if step < 2 else 1.0
        optimizer.ledger.total.communication_seconds += waited
        callback.on_train_batch_end(trainer, None, None, None, step)
        callback.on_train_batch_end(trainer, None, None, None, step)  # a batch that only accumulates
    words = said.warnings if warns else said.infos[1:]
    assert len(words) == 1 and len(said.warnings) == warns
    assert (
        f"in 10 dense steps this rank waited {share:.0%}" in words[0] and f"{1 / (1 - share):.3g}x faster" in words[0]
    )
    assert ("not the bottleneck" in words[0]) == warns


def test_waiting_is_watched_where_batches_accumulate_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, said: _Said
) -> None:
    callback, trainer, _ = _start(monkeypatch, _network(1e7, 0.0, 1e-9), watch_steps=4)
    for batch in range(40):
        if batch % 4 == 3:
            trainer.step()
        callback.on_train_batch_end(trainer, None, None, None, batch)
    assert sum("in 4 dense steps this rank waited" in line for line in [*said.infos, *said.warnings]) == 1


def test_watching_ends_where_compression_begins_and_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, said: _Said
) -> None:
    for options, freeze_after in (({"watch_steps": 5}, 4), ({"watch_steps": None}, 99)):
        callback, trainer, optimizer = _start(monkeypatch, _network(1e7, 0.0, 1e-9), **options)
        for step in range(20):
            trainer.step()
            callback.on_train_batch_end(trainer, None, None, None, step)
            if step + 1 == freeze_after:
                optimizer.freeze()
    assert len(said.infos) == 2 and said.warnings == []


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            lambda p: OnebitAdam(
                p,
                exchange=ExchangeOptions(
                    block_size=64, bucket_mb=2.0, kernels="reference", state_dtype="bfloat16", overlap="backward"
                ),
            ),
            {
                "algorithm": "onebit_adam",
                "exchange": ExchangeOptions(block_size=64, bucket_mb=2.0, kernels="reference", state_dtype="bfloat16"),
            },
        ),
        (
            lambda p: BinSGDM(p, exchange=ExchangeOptions(block_size=32)),
            {"algorithm": "binsgdm", "exchange": ExchangeOptions(block_size=32, bucket_mb=16.0)},
        ),
    ],
    ids=["onebit_adam", "binsgdm"],
)
def test_the_probe_makes_the_steps_that_training_makes(
    monkeypatch: pytest.MonkeyPatch, said: _Said, optimizer: Any, expected: dict[str, Any]
) -> None:
    seen: list[dict[str, Any]] = []
    network = _network(1e7, 0.0, 1e-9)

    def measure(elements: int, **options: Any) -> LinkMeasurement:
        seen.append(options)
        return network(elements)

    monkeypatch.setattr(probe, "measure_link", measure)
    small = onebit_adam()  # several optimizers: the largest counts
    large = optimizer([torch.nn.Parameter(torch.zeros(1000))])
    callback = LinkProbeMixin()
    FakeTrainer([small, large]).start(callback, FakeModule())
    assert callback.report is not None and callback.report.elements == 1000 + 33 * 5 + 7
    device = {"device": torch.device("cpu"), "timeout": 30.0}
    assert seen == [{**device, "ranks_per_node": 1, "group": None, **expected}] * 2


def _measured_in_nodes(rank: int, world: int, algorithm: str) -> Any:
    before = len(dist.distributed_c10d._world.pg_map)
    found = measure_link(
        5000,
        repeats=1,
        ranks_per_node=2,
        algorithm=algorithm,
        exchange=ExchangeOptions(kernels="reference", block_size=32, bucket_mb=0.005),
    )
    assert len(dist.distributed_c10d._world.pg_map) == before, "groups of nodes are given back"
    return found.exchange_bytes


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm"])
def test_a_hierarchical_exchange_of_every_algorithm_is_measured(algorithm: str) -> None:
    job = Job(params=5000, compute=0.0, block_size=32, bucket_mb=0.005)
    expected = exchange_of(Cluster(gpus=4, gpus_per_node=2, bandwidth=1e9), job, algorithm, "hierarchical")
    sent = sum(times * collective.sent for times, bucket in expected for collective in bucket)
    found = run_ranks(_measured_in_nodes, 4, algorithm)
    if algorithm == "binsgdm":  # the last step measured merges its bitmap too (t = 4)
        assert found[0] > sent
    else:
        assert found == [sent] * 4


def _measured(rank: int, world: int) -> Any:
    lines: list[str] = []
    probe.rank_zero_info = lines.append  # type: ignore[assignment]
    probe.rank_zero_warn = lambda text: None  # type: ignore[assignment]
    callback = LinkProbeMixin(0.2)
    optimizer = onebit_adam()
    before = torch.get_rng_state()
    FakeTrainer([optimizer]).start(callback, FakeModule())
    assert torch.equal(torch.get_rng_state(), before), "measuring must not change the run"
    assert optimizer.steps == 0 and optimizer.ledger.total.bytes_sent == 0
    report = callback.report
    assert report is not None
    return report.ranks, report.elements, report.dense_seconds, report.exchange_seconds, lines


def test_real_ranks_are_measured_and_the_run_is_not_disturbed() -> None:
    for ranks, elements, dense, exchange, lines in run_ranks(_measured, 2):
        assert (ranks, elements) == (2, 33 * 5 + 7)
        assert dense > 0 and exchange > 0
        assert lines[0].startswith("LinkProbe: 2 ranks, 172 parameters")


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"sample_mb": 0}, ValueError, "sample_mb=0"),
        ({"sample_mb": "4"}, TypeError, "sample_mb='4'"),
        ({"watch_steps": 0}, ValueError, "watch_steps=0"),
        ({"watch_steps": 2.5}, TypeError, "watch_steps=2.5"),
        ({"timeout": 30}, TypeError, "timeout"),
    ],
)
def test_every_bad_option_is_refused_by_name(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        LinkProbeMixin(**options)
