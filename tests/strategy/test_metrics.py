"""The torchmetrics metrics: what they compute alone, over ranks, and drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import run_ranks

from lightning_onebit.comm import StepRecord
from lightning_onebit.metrics import (
    CommunicationTime,
    CommunicationVolume,
    CompressionRatio,
    ResidualNorm,
    SignAgreement,
)

# compute() before update() is a promise here, not an accident.
pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")

ALL = [CommunicationTime, CommunicationVolume, CompressionRatio, ResidualNorm, SignAgreement]


def _record(sent: int, dense: int, seconds: float = 0.0) -> StepRecord:
    return StepRecord(bytes_sent=sent, dense_bytes=dense, communication_seconds=seconds)


def _feed(metric: Any, value: float) -> None:
    if isinstance(metric, ResidualNorm):
        metric.update(value)
    elif isinstance(metric, SignAgreement):
        metric.update(torch.tensor([value, -value]))
    else:
        metric.update(_record(int(value), int(10 * value), value))


def test_volume_sums_steps_exactly_beyond_single_precision() -> None:
    metric = CommunicationVolume()
    metric.update(_record(2**40, 0))
    metric.update(_record(1, 0))
    assert int(metric.compute()) == 2**40 + 1


def test_ratio_is_that_of_the_sums_not_the_mean_of_ratios() -> None:
    metric = CompressionRatio()
    metric.update(_record(100, 100))
    metric.update(_record(4, 128))
    assert float(metric.compute()) == pytest.approx(228 / 104)


def test_ratio_of_nothing_is_one_and_of_silence_is_infinite() -> None:
    assert float(CompressionRatio().compute()) == 1.0
    metric = CompressionRatio()
    metric.update(_record(0, 8))
    assert float(metric.compute()) == math.inf


def test_time_is_per_step_also_for_sums_of_several_steps() -> None:
    metric = CommunicationTime()
    assert float(metric.compute()) == 0.0
    metric.update(_record(0, 0, 1.0))
    metric.update(_record(0, 0, 5.0), steps=3)
    assert float(metric.compute()) == 1.5


def test_residual_norm_is_the_mean_of_its_readings() -> None:
    metric = ResidualNorm()
    for value in (1.0, torch.tensor(2.0), 6.0):
        metric.update(value)
    assert float(metric.compute()) == 3.0


def test_sign_agreement_of_one_rank_is_complete_and_of_nothing_is_nan() -> None:
    metric = SignAgreement()
    assert math.isnan(float(metric.compute()))
    metric.update(torch.tensor([1.0, -2.0, 0.0]))
    assert float(metric.compute()) == 1.0


def test_sign_agreement_keeps_an_even_sample_over_all_tensors() -> None:
    metric = SignAgreement(max_elements=10)
    values = torch.arange(1, 96).float() * torch.tensor([1.0, -1.0]).repeat(48)[:95]
    metric.update([values[:7].view(7, 1), values[7:8], values[8:8], values[8:]])
    assert metric.signs.tolist() == values[::10].sign().tolist()


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
def test_sign_agreement_refuses_a_bad_sample_size_by_name(bad: Any) -> None:
    with pytest.raises(ValueError, match="`max_elements`"):
        SignAgreement(max_elements=bad)


@pytest.mark.parametrize("kind", ALL)
def test_forward_returns_the_batch_value_and_accumulates_the_rest(kind: type) -> None:
    metric, expected, single = kind(), kind(), kind()
    for value in (3.0, 5.0):
        _feed(expected, value)
    _feed(single, 5.0)
    argument: dict[type, Any] = {
        ResidualNorm: lambda value: value,
        SignAgreement: lambda value: torch.tensor([value, -value]),
    }
    make = argument.get(kind, lambda value: _record(int(value), int(10 * value), value))
    metric(make(3.0))
    assert torch.equal(metric(make(5.0)), single.compute())
    assert torch.equal(metric.compute(), expected.compute())


@pytest.mark.parametrize("kind", ALL)
def test_reset_starts_anew(kind: type) -> None:
    metric = kind()
    _feed(metric, 5.0)
    metric.reset()
    assert torch.equal(metric.compute(), kind().compute()) or math.isnan(float(metric.compute()))


@pytest.mark.parametrize("kind", ALL)
def test_plot_draws_one_value_and_a_series(kind: type) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    metric = kind()
    _feed(metric, 5.0)
    figure, axis = metric.plot()
    assert axis.has_data()
    _, axis = metric.plot([metric.compute(), metric.compute()], ax=figure.add_subplot(2, 1, 2))
    assert [len(line.get_xdata()) for line in axis.lines][:1] == [2]


def _combined(rank: int, world: int) -> dict[str, float]:
    metrics = {kind.__name__: kind() for kind in ALL}
    for step in range(1 + rank):  # ranks may have made different numbers of updates
        metrics["CommunicationVolume"].update(_record(10 + rank, 0))
        metrics["CompressionRatio"].update(_record(1, 10 * (rank + 1)))
        metrics["CommunicationTime"].update(_record(0, 0, float(rank + step)))
        metrics["ResidualNorm"].update(float(rank))
    signs = [[1.0, 1.0, -1.0, 0.0, 0.0], [1.0, -1.0, -2.0, 0.0, 3.0], [0.5, 1.0, -1.0, 0.0, 0.0]]
    metrics["SignAgreement"].update(torch.tensor(signs[rank]))
    metrics["SignAgreement"].update([torch.tensor([[-1.0]]), torch.tensor([float(rank - 1)])])
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    # What is local stays local: after compute() every rank goes on from its own state.
    assert int(metrics["CommunicationVolume"].bytes_sent) == (1 + rank) * (10 + rank)
    return found


def test_compute_combines_the_ranks_and_all_of_them_see_the_same() -> None:
    results = run_ranks(_combined, 3)
    assert results[0] == results[1] == results[2]
    assert results[0]["CommunicationVolume"] == 10 + 2 * 11 + 3 * 12
    assert results[0]["CompressionRatio"] == (10 + 2 * 20 + 3 * 30) / 6
    assert results[0]["CommunicationTime"] == pytest.approx((0 + 1 + 2 + 2 + 3 + 4) / 6)
    assert results[0]["ResidualNorm"] == pytest.approx((0 + 2 * 1 + 3 * 2) / 6)
    # Compared: 4 of the first 5 coordinates (one is 0 everywhere), both of the second update. Agreeing: 0, 2, and one of the two.
    assert results[0]["SignAgreement"] == pytest.approx(3 / 6)
