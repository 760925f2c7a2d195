"""The planner: its bytes are the ledger's, its seconds the stated model's, its errors those that the docs print."""

from __future__ import annotations

import doctest
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_support import CLASSES, NO_WARM_UP

from lightning_onebit import _text
from lightning_onebit._text import format_bits, format_seconds
from lightning_onebit.algorithms import LocalSteps, OnebitAdam, OnebitLamb, schedules
from lightning_onebit.algorithms.schedules import SyncPolicy, replay_schedule
from lightning_onebit.algorithms.zero_one_adam import ZeroOneAdam
from lightning_onebit.comm import (
    Collective,
    SimulatedGroup,
    SimulatedWorld,
    control_payload_bytes,
    exchange_collectives,
    plan_buckets,
    ring_bytes,
)
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine.rule import Rounds
from lightning_onebit.strategy.registry import ALGORITHMS, Algorithm
from lightning_onebit.tools import bench
from lightning_onebit.tools import plan as planner
from lightning_onebit.tools.plan import (
    ADAMW_BYTES,
    DENSE,
    Cluster,
    Job,
    break_even_bandwidth,
    exchange_of,
    fit_compute,
    plan,
    plot,
    predict,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planner_check  # lives in benchmarks/

ROOT = Path(__file__).parents[2]
NETWORK = Cluster(gpus=64, gpus_per_node=4, bandwidth=4.1e9)
BERT = Job(params=336_000_000, compute=0.25)
#: neither latency nor kernels: what remains are bytes over bandwidth
IDEAL = {
    "latency": 0.0,
    "intra_latency": 0.0,
    "message_overhead": 0.0,
    "memory_bandwidth": 1e30,
    "intra_bandwidth": 1e30,
}

# ----- bytes: one source ---------------------------------------------------------------------------------------------------

SMALL = ExchangeOptions(block_size=32, bucket_mb=0.001, kernels="reference")
SHAPES = ((5, 33), (7,), (0,), (1,), (3, 165))


def _last_step(group: SimulatedGroup, algorithm: str, ranks_per_node: int) -> Any:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    made = CLASSES[algorithm]
    optimizer = made(parameters, exchange=SMALL, **made.EXCHANGES_SOON)
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node)  # type: ignore[arg-type]
    for _ in range(3):  # BinSGDM merges its bitmaps at t = 1, 2 and 4
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.ledger.last is not None and not optimizer.ledger.last.dense
    return optimizer.ledger.last


@pytest.mark.parametrize("algorithm", CLASSES)
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(3, 1), (4, 2)])
def test_predicted_bytes_and_collectives_are_those_of_a_real_step(
    algorithm: str, ranks: int, ranks_per_node: int
) -> None:
    world = SimulatedWorld(ranks, timeout=60)
    record = world.run(_last_step, algorithm, ranks_per_node)[0]
    cluster = Cluster(gpus=ranks, gpus_per_node=ranks_per_node, bandwidth=1e9)
    job = Job(params=[math.prod(s) for s in SHAPES], compute=1.0, block_size=32, bucket_mb=0.001)
    buckets = exchange_of(cluster, job, algorithm, "hierarchical" if ranks_per_node > 1 else "flat")
    expected = [collective for times, bucket in buckets for collective in times * bucket]
    assert sum(c.sent for c in expected if c.link == "inter") == record.bytes_inter > 0
    assert sum(c.sent for c in expected if c.link == "intra") == record.bytes_intra
    assert len(expected) == record.collectives
    assert record.dense_bytes == ring_bytes(ranks, 4 * job.elements)


def test_bitmaps_of_a_hierarchical_exchange_skip_the_node_average() -> None:
    kinds = [c.kind for c in exchange_collectives([8], 32, 4, 2, has_scales=False, node_average=False)]
    assert kinds == ["all_to_all", "all_gather", "all_gather"]


@pytest.mark.parametrize(("gpus", "per_node", "flat"), [(64, 8, 1.0), (64, 8, None)])
def test_bytes_through_a_network_card_follow_the_formulas(gpus: int, per_node: int, flat: float | None) -> None:
    """Dense ring 7.9 N, flat about N (direct pairs out, a ring back), hierarchical 2 (L-1)/L N/8: without scales, 8 nodes of 8."""
    cluster, job = Cluster(gpus=gpus, gpus_per_node=per_node, bandwidth=1e9), Job(params=2**26, compute=0.1)
    layout = "flat" if flat else "hierarchical"
    found = predict(cluster, job, "onebit_adam", layout).node_bytes / 2**26
    expected = (8 * 56 / 64 + 63 / 64) if flat else 2 * 7 / 8
    assert found == pytest.approx(expected * (1 / 8 + 4 / 2048), rel=1e-6)
    dense = predict(cluster, job, "dense_fp32").node_bytes / 2**26
    assert dense == pytest.approx(2 * 63 / 64 * 4, rel=1e-6)


@given(
    tensors=st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(any),
    block_size=st.sampled_from([32, 64, 2048]),
    ranks=st.integers(1, 9),
    bucket_mb=st.sampled_from([1e-9, 0.0005, 0.001, 0.0123, 16.0, 1e6]),
)
@settings(deadline=None, max_examples=200)
def test_buckets_are_those_that_the_optimizer_plans(
    tensors: list[int], block_size: int, ranks: int, bucket_mb: float
) -> None:
    cluster, job = (
        Cluster(gpus=ranks, bandwidth=1e9),
        Job(params=tensors, compute=0.1, block_size=block_size, bucket_mb=bucket_mb),
    )
    real = plan_buckets(
        tensors,
        block_size=block_size,
        world_size=ranks,
        bucket_elements=int(bucket_mb * 2**20 / 4),
        device=torch.device("meta"),
    )
    blocks = [bucket.blocks for bucket in real.buckets]
    planned = [one for times, bucket in exchange_of(cluster, job, "onebit_adam") for one in times * bucket]
    assert planned == list(exchange_collectives(blocks, block_size, ranks))


@pytest.mark.parametrize("bucket_mb", [1e-9, 1e-3, 1e6])
def test_buckets_of_any_size_are_planned(bucket_mb: float) -> None:
    """A bucket holds a block at least, as with the optimizer, which accepts such a number too, and the whole model at most."""
    OnebitAdam([torch.nn.Parameter(torch.zeros(3))], exchange=ExchangeOptions(bucket_mb=bucket_mb))
    report = plan(NETWORK, replace(BERT, bucket_mb=bucket_mb))
    block = plan(NETWORK, replace(BERT, bucket_mb=2048 * 4 / 2**20))
    whole = plan(NETWORK, replace(BERT, bucket_mb=2000))
    same = whole if bucket_mb > 1 else block
    for found, expected in zip(report.predictions, same.predictions, strict=True):
        if found.name != "dense_fp16":  # whose bytes are half of those, for a bucket of the same size
            assert found.mean_seconds == pytest.approx(expected.mean_seconds, rel=1e-3)


# ----- seconds -------------------------------------------------------------------------------------------------------------


def _bytes_of_a_run(group: SimulatedGroup, ranks_per_node: int, steps: int) -> int:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = CLASSES["binsgdm"](parameters, exchange=SMALL)
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node)  # type: ignore[arg-type]
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer.ledger.total.bytes_inter


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_bitmaps_of_binsgdm_cost_what_a_short_run_sends(ranks_per_node: int, steps: int) -> None:
    """They are merged at t = 1, 2, 4, ...: on a network where only bytes between nodes cost, time follows the ledger."""
    sent = SimulatedWorld(4, timeout=60).run(_bytes_of_a_run, ranks_per_node, steps)[0]
    # a rank's own bytes take as long as those of all ranks of its node through a card of their own
    cluster = Cluster(gpus=4, gpus_per_node=ranks_per_node, bandwidth=1e9 * ranks_per_node, **IDEAL)
    tensors = [math.prod(shape) for shape in SHAPES]
    job = Job(params=tensors, compute=0.0, block_size=32, bucket_mb=0.001, steps=steps)
    found = predict(cluster, job, "binsgdm", "hierarchical" if ranks_per_node > 1 else "flat")
    control = cluster.collective(Collective("all_gather", "inter", 4, control_payload_bytes(len(tensors))))
    assert found.mean_seconds - control == pytest.approx(8 * sent / steps / 1e9, rel=1e-6)


def test_an_ideal_network_takes_bytes_over_bandwidth() -> None:
    cluster, job = Cluster(gpus=2, bandwidth=1e9, **IDEAL), Job(params=2**24, compute=0.1, hidden=0.0)
    assert predict(cluster, job, "dense_fp32").step_seconds == pytest.approx(0.1 + 8 * 4 * 2**24 / 1e9)
    assert predict(cluster, job, "dense_fp16").step_seconds == pytest.approx(0.1 + 8 * 2 * 2**24 / 1e9)
    bits = 8 * 2**24 * (1 / 8 + 4 / 2048)
    assert predict(cluster, job, "onebit_adam").step_seconds == pytest.approx(0.1 + bits / 1e9)


def test_what_is_told_of_gradients_takes_a_round_of_its_own_where_it_does_not_ride_along() -> None:
    """1-bit Adam and 1-bit LAMB: an all-to-all and an all-gather of two ranks, a latency each."""
    ideal = {**IDEAL, "latency": 1e-3}
    cluster, job = Cluster(gpus=2, bandwidth=1e30, **ideal), Job(params=2**20, compute=0.0, hidden=0.0, warmup=0.0)
    for name, rounds in (("onebit_adam", 2), ("onebit_lamb", 2), ("binsgdm", 3)):
        assert predict(cluster, job, name).step_seconds == pytest.approx(rounds * 1e-3), name
    nodes = Cluster(gpus=4, gpus_per_node=2, bandwidth=1e30, **ideal)
    assert predict(nodes, job, "onebit_adam", "hierarchical").step_seconds > 3e-3
    shards = Cluster(gpus=4, gpus_per_node=2, bandwidth=1e30, shards=2, **ideal)
    assert predict(shards, job, "onebit_adam").step_seconds == pytest.approx(3e-3)


def test_latency_is_paid_for_every_round_and_messages_keep_the_card_busy() -> None:
    cluster = Cluster(gpus=8, bandwidth=1e30, **{**IDEAL, "latency": 1e-3, "message_overhead": 1e-5})
    assert cluster.collective(Collective("all_to_all", "inter", 8, 100)) == pytest.approx(1e-3 + 7e-5)
    assert cluster.collective(Collective("all_gather", "inter", 8, 100)) == pytest.approx(7 * (1e-3 + 1e-5))
    assert cluster.all_reduce(1000) == pytest.approx(6 * (1e-3 + 1e-5))  # the tree: 2 log2(8) rounds, not 2 * 7
    assert cluster.collective(Collective("all_gather", "intra", 1, 100)) == 0.0


def test_ranks_of_a_node_share_its_card() -> None:
    cluster = Cluster(gpus=16, gpus_per_node=4, bandwidth=1e9, **IDEAL)
    row = 1000
    flat = cluster.collective(Collective("all_to_all", "inter", 16, row))
    assert flat == pytest.approx(8 * 4 * 12 * row / 1e9), "pairs of one node do not use the card"
    assert cluster.collective(Collective("all_gather", "inter", 16, row)) == pytest.approx(8 * 15 * row / 1e9)
    between = cluster.collective(Collective("all_to_all", "inter", 4, row))
    assert between == pytest.approx(8 * 4 * 3 * row / 1e9), "the four groups of a hierarchical exchange run at once"


def test_dense_averaging_hides_behind_backward_and_so_does_an_overlapped_exchange() -> None:
    slow, fast = (Cluster(gpus=2, bandwidth=b, **IDEAL) for b in (1e9, 1e12))
    job = Job(params=2**24, compute=0.2, hidden=0.5)
    assert predict(fast, job, "dense_fp32").step_seconds == 0.2
    wire = 8 * 4 * 2**24 / 1e9
    assert predict(slow, job, "dense_fp32").step_seconds == pytest.approx(0.1 + wire)
    early = predict(slow, replace(job, overlap="backward"), "onebit_adam")
    assert early.step_seconds == pytest.approx(0.2, rel=1e-5)
    assert predict(slow, job, "onebit_adam").step_seconds > 0.21


def test_the_warm_up_and_silent_steps_are_counted() -> None:
    report = plan(NETWORK, replace(BERT, warmup=0.25, steps=1000))
    for p in report.predictions:
        if p.name in ("onebit_adam", "onebit_lamb"):
            share = {"onebit_adam": 0.281, "onebit_lamb": 0.25}[p.name]  # 1-bit Adam has 31 refreshes besides
            assert p.dense_share == share
            assert p.mean_seconds == pytest.approx(share * p.dense_seconds + (1 - share) * p.step_seconds)
        if p.name in NO_WARM_UP:
            assert p.dense_share == 0.0 and p.mean_seconds == pytest.approx(p.step_seconds, rel=0.01)
    # 0/1 Adam with the constants of its paper, a hundred dense steps, and 58 refreshes after the freeze
    job = replace(BERT, steps=152_511, warmup=12_500 / 152_511, local_steps=LocalSteps(double_every=32_678))
    found = predict(NETWORK, job, "zero_one_adam")
    assert found.dense_share == pytest.approx(266 / 152_511)
    every = replace(job, local_steps=None)
    spoken = found.node_bytes / predict(NETWORK, every, "zero_one_adam").node_bytes
    assert spoken == pytest.approx(74_114 / 152_245)
    assert found.step_seconds < predict(NETWORK, every, "zero_one_adam").step_seconds


def test_the_verdict_says_what_is_fastest_at_adamws_learning_rate_too() -> None:
    """As docs/choosing does: below 1 Gb/s BinSGDM, where its learning rate can be searched for."""
    slow = Cluster(gpus=8, bandwidth=1e8)
    assert plan(slow, BERT).best.name == "binsgdm"
    for steps, title in ((400, "1-bit Adam"), (1000, "0/1 Adam"), (100_000, "0/1 Adam")):
        said = f"BinSGDM needs a learning rate of its own; at AdamW's, {title}, flat makes the run "
        assert said in plan(slow, replace(BERT, steps=steps)).verdict, steps
    for names in (["onebit_adam", "zero_one_adam"], ["binsgdm", "onebit_sgd"]):
        assert "AdamW's" not in plan(slow, BERT, names).verdict


def test_local_steps_are_planned_where_they_are_asked_for_and_take_memory() -> None:
    asked = replace(BERT, local_steps=LocalSteps(double_every=100))
    without, within = predict(NETWORK, BERT, "zero_one_adam"), predict(NETWORK, asked, "zero_one_adam")
    assert (
        within.node_bytes < without.node_bytes
        and without.state_bytes == predict(NETWORK, BERT, "onebit_adam").state_bytes
    )
    assert within.state_bytes == pytest.approx((18.375 + 4.125 / NETWORK.gpus) * BERT.elements)


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb"])
def test_refreshes_are_counted_as_the_optimizer_makes_them(algorithm: str) -> None:
    p = torch.nn.Parameter(torch.zeros(40))
    made = {"onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb}[algorithm]
    optimizer = made([p], freeze_step=6, exchange=ExchangeOptions(_alone=True, block_size=32))
    for _ in range(60):
        p.grad = torch.ones(40)
        optimizer.step()
    refreshes = {"onebit_adam": 3, "onebit_lamb": 0}[algorithm]
    share = predict(NETWORK, replace(BERT, steps=60, warmup=0.1), algorithm).dense_share
    assert share == optimizer.ledger.dense_steps / 60 == (6 + refreshes) / 60
    assert optimizer.dense_steps_after_freeze(6, 60) == refreshes


@pytest.mark.parametrize("refresh", ["auto", "never"])
def test_rounds_of_0_1_adam_are_counted_as_the_optimizer_makes_them(refresh: str) -> None:
    """With synchronisations that come early for refreshes."""
    p = torch.nn.Parameter(torch.zeros(40))
    local_steps, exchange = LocalSteps(max_gap=4, double_every=4), ExchangeOptions(_alone=True, block_size=32)
    optimizer = ZeroOneAdam([p], freeze_step=8, refresh=refresh, local_steps=local_steps, exchange=exchange)
    counts = {"dense": 0, "one_bit": 0, "silent": 0}
    for _ in range(60):
        p.grad = torch.ones(40)
        optimizer.step()
        last = optimizer.ledger.last
        assert last is not None
        counts["dense" if last.dense else "silent" if optimizer.mid_local else "one_bit"] += 1
    policy = SyncPolicy(LocalSteps(max_gap=4, double_every=4))
    found = replay_schedule(60, freeze_step=8, policy=policy, refresh=refresh == "auto")
    assert found == counts and counts["silent"] > 5
    if refresh == "auto":
        job = replace(BERT, steps=60, warmup=8 / 60, local_steps=local_steps)
        assert predict(NETWORK, job, "zero_one_adam").dense_share == counts["dense"] / 60


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.2, 0.3, 1.0])
@pytest.mark.parametrize("algorithm", list(CLASSES))
def test_short_runs_are_counted_as_the_optimizers_make_them(algorithm: str, warmup: float, steps: int) -> None:
    """Whatever the share rounds to, the first step of a run with a warm-up is dense: there is no freeze_step of 0."""
    schedule = {} if algorithm in NO_WARM_UP else {"freeze_step": max(1, round(warmup * steps))}
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = CLASSES[algorithm]([p], exchange=ExchangeOptions(_alone=True, block_size=32), **schedule)
    for _ in range(steps):
        p.grad = torch.ones(40)
        optimizer.step()
    found = predict(NETWORK, replace(BERT, steps=steps, warmup=warmup), algorithm)
    assert found.dense_share == optimizer.ledger.dense_steps / steps
    assert (found.dense_share >= 1 / steps) is (algorithm not in NO_WARM_UP)


def test_a_run_that_is_all_warm_up_is_a_dense_run() -> None:
    report = plan(NETWORK, replace(BERT, warmup=1.0), ["onebit_adam"])
    dense, found = report.predictions[0], report.predictions[-1]
    assert found.mean_seconds == pytest.approx(dense.mean_seconds) and found.speedup_fp32 == pytest.approx(1.0)


def test_fitting_compute_recovers_what_the_model_was_given() -> None:
    measured = [
        (NETWORK, BERT, "dense_fp32", predict(NETWORK, BERT, "dense_fp32").step_seconds),
        (NETWORK, BERT, "onebit_adam", predict(NETWORK, BERT, "onebit_adam").step_seconds),
    ]
    assert fit_compute(measured) == pytest.approx(BERT.compute, rel=1e-4)
    assert fit_compute([(NETWORK, BERT, "dense_fp32", 1e-3)]) == pytest.approx(0.0, abs=1e-6)
    # an option of one of the algorithms that are measured with a job does not concern the others
    local = replace(BERT, local_steps=LocalSteps(double_every=500))
    mixed = [(NETWORK, local, name, seconds) for _, _, name, seconds in measured]
    with pytest.raises(ValueError, match=r"local_steps=.*500\) has no effect"):
        fit_compute(mixed)
    silent = next(
        p.step_seconds
        for p in plan(NETWORK, local, ["zero_one_adam"]).predictions
        if p.name == "zero_one_adam" and p.layout == "flat"
    )
    assert fit_compute([*mixed, (NETWORK, local, "zero_one_adam", silent)]) == pytest.approx(BERT.compute, rel=1e-3)
    with pytest.raises(ValueError, match="measured is empty"):
        fit_compute([])
    with pytest.raises(ValueError, match="seconds=0"):
        fit_compute([(NETWORK, BERT, "dense_fp32", 0)])


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (planner, ("plan", "predict", "fit_compute", "break_even_bandwidth", "plot")),
        (bench, ("measure_link", "break_even")),
        (
            schedules,
            ("VariancePolicy", "SyncPolicy", "replay_schedule"),
        ),
        (_text, ("format_figure", "format_table")),
    ],
    ids=["planner", "bench", "policies", "_text"],
)
def test_examples_in_docstrings_run(
    module: Any, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that people look for have one."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tests = {test.name.rpartition(".")[2]: test for test in doctest.DocTestFinder().find(module)}
    assert [name for name in names if not tests[name].examples] == []
    said: list[str] = []
    for test in tests.values():
        doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


class Fifth(OnebitAdam):
    """An algorithm of somebody else's."""

    algorithm = "fifth"
    STEP_BYTES = 40.0
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {"freeze_step": 1, "refresh": "never"}

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        return Rounds(2 * freeze_step, steps - 2 * freeze_step)


def test_an_algorithm_that_is_registered_is_planned_and_measured_by_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALGORITHMS, "fifth", Algorithm("fifth", "Fifth", Fifth))
    assert "Fifth, hierarchical" in plan(NETWORK, BERT).table()
    found = predict(NETWORK, BERT, "fifth")
    assert found.dense_share == 0.4
    monkeypatch.setattr(Fifth, "STEP_BYTES", 50.0)
    slower = predict(NETWORK, BERT, "fifth").step_seconds - found.step_seconds
    assert slower == pytest.approx(BERT.elements * 10 / NETWORK.memory_bandwidth)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert bench.measure_link(1000, repeats=1, exchange=SMALL, algorithm="fifth").local_seconds > 0
    finally:
        dist.destroy_process_group()


# ----- what it says --------------------------------------------------------------------------------------------------------


def test_a_slow_network_is_said_to_be_helped_and_by_how_much() -> None:
    report = plan(NETWORK, BERT, ["onebit_adam"])
    assert report.helps and report.best.layout == "hierarchical"
    assert "At 4.1 Gb/s per node 1-bit Adam, hierarchical should make the run" in report.verdict
    even = break_even_bandwidth(NETWORK, BERT, "onebit_adam", "hierarchical")
    assert even is not None
    assert f"it pays below about {even / 1e9:.3g} Gb/s" in report.verdict
    for factor, helps in ((0.98, True), (1.02, False)):
        there = plan(replace(NETWORK, bandwidth=even * factor), BERT, ["onebit_adam"])
        assert (there.speedup > 1) is helps


@pytest.mark.parametrize(
    ("cluster", "job", "reason"),
    [
        ({"gpus": 1, "gpus_per_node": 1}, {}, "there is one GPU"),
        ({"bandwidth": 4e11}, {"compute": 2.0}, "hides behind backward"),
        ({}, {"warmup": 0.97}, "the dense warm-up of 97% takes the gain back"),
        ({}, {"warmup": 1.0}, "the dense warm-up is the whole run (100,000 steps) and no step is compressed"),
        (
            {},
            {"steps": 1},
            "the dense warm-up is the whole run (1 step) and no step is compressed; shorten it or train",
        ),
        (
            {"gpus": 4, "gpus_per_node": 1, "bandwidth": 2e10, "latency": 5e-3},
            {"params": 300_000, "compute": 1e-3, "warmup": 0.0},
            "the exchange itself takes too long",
        ),
    ],
    ids=["one GPU", "hidden", "warm-up", "all warm-up", "one step", "latency"],
)
def test_where_it_cannot_help_the_sentence_says_why(cluster: dict[str, Any], job: dict[str, Any], reason: str) -> None:
    report = plan(replace(NETWORK, **cluster), replace(BERT, **job), ["onebit_adam"])
    assert not report.helps
    assert "it will not help because" in report.verdict.lower() and reason in report.verdict


def test_one_process_costs_what_it_computes() -> None:
    report = plan(Cluster(gpus=1, bandwidth=1e9), BERT)
    assert {p.mean_seconds for p in report.predictions} == {BERT.compute}
    assert {p.node_bytes for p in report.predictions} == {0.0}


def test_one_process_that_computes_nothing_gains_nothing() -> None:
    report = plan(Cluster(gpus=1, bandwidth=1e9), replace(BERT, compute=0.0))
    assert report.speedup == 1.0 and not report.helps and "there is one GPU" in report.verdict
    assert report.as_dict()["helps"] is False


def test_every_algorithm_and_layout_has_a_row_and_json_holds_them_all() -> None:
    report = plan(NETWORK, BERT)
    rows = {(p.name, p.layout) for p in report.predictions}
    assert rows == {(name, "flat") for name in DENSE} | {
        (name, layout) for name in ALGORITHMS for layout in ("flat", "hierarchical")
    }
    for p in report.predictions:
        assert p.title in report.table()
    facts = json.loads(json.dumps(report.as_dict()))
    assert len(facts["predictions"]) == 12 and facts["helps"] is True and facts["break_even_bandwidth"] > 4.1e9
    flat_only = plan(replace(NETWORK, gpus_per_node=1), BERT, "birder")
    assert [p.name for p in flat_only.predictions] == [*DENSE, "binsgdm"]


def _cells(table: str) -> list[list[str]]:
    """The rows of a table by columns: two spaces or more lie between them, one within a title."""
    return [re.split(r" {2,}", line) for line in table.split("\n\n")[1].splitlines()]


@pytest.mark.parametrize(
    ("params", "bandwidth", "compute"),
    [(336_000_000, 1e9, 0.1), (336_000_000, 1e5, 0.1), (10**12, 1e9, 100.0), (10**15, 1e4, 1e6), (3, 1e9, 1e-6)],
)
def test_columns_stay_apart_and_numbers_in_full_however_large_they_get(
    params: int, bandwidth: float, compute: float
) -> None:
    report = plan(Cluster(gpus=8, gpus_per_node=2, bandwidth=bandwidth), Job(params=params, compute=compute))
    head, *rows = _cells(report.table())
    assert head == ["method", "step ms", "mean ms", "MB/node", "dense", "x fp32", "x fp16"]
    assert len(rows) == len(report.predictions)
    for row, p in zip(rows, report.predictions, strict=True):
        exact = (1e3 * p.step_seconds, 1e3 * p.mean_seconds, p.node_bytes / 1e6)
        for text, value in zip(row[1:4], exact, strict=True):
            assert float(text) == pytest.approx(value, rel=6e-4, abs=1e-6)
            assert ("e" in text) is (value >= 1e7), text
        assert len(row) == len(head) and row[0] == p.title
    ends = {len(line) for line in report.table().split("\n\n")[1].splitlines()}
    assert len(ends) == 1, "right-aligned"
    assert "e+0" not in report.verdict or params == 10**15


def test_sentences_and_headings_have_no_exponents_either() -> None:
    report = plan(Cluster(gpus=8, bandwidth=1e7), Job(params=175_000_000_000, compute=12.0))
    assert report.table().startswith("175,000 M parameters, 8 GPUs, 1 per node, 10 Mb/s per node, 12000 ms of")
    assert re.search(r"should make the run \d+x as fast .* \(\d+x after it\)", report.verdict)
    assert format_seconds(1.0) == "1000 ms" and format_seconds(0.0125) == "12.5 ms" and format_seconds(0.0) == "0 ms"
    assert format_bits(2.5e15) == "2500 Tb/s" and format_bits(4.1e9) == "4.1 Gb/s"


def test_a_plot_reaches_4096_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    plot(NETWORK, BERT, str(tmp_path / "plan.png"), ["onebit_adam"])
    bandwidth, world = drawn[0].axes
    assert max(world.lines[0].get_xdata()) == 4096
    assert [line.get_label() for line in world.lines] == ["dense fp32", "dense fp16", "1-bit Adam"]
    speedups = bandwidth.lines[2].get_ydata()
    assert speedups[0] > 3 and speedups[0] > speedups[-1], "the slower the network, the more is gained"


def test_a_plot_takes_any_iterable_of_algorithms_and_nodes_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    plot(NETWORK, BERT, str(tmp_path / "plan.png"), (name for name in ["onebit_adam"]))
    assert [line.get_label() for line in drawn[0].axes[0].lines[:3]] == ["dense fp32", "dense fp16", "1-bit Adam"]
    plot(replace(NETWORK, gpus=16384, gpus_per_node=8192), BERT, str(tmp_path / "plan.png"), ["onebit_adam"])
    assert list(drawn[1].axes[1].lines[0].get_xdata()) == [8192]


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (
            Cluster,
            {"gpus": 6, "gpus_per_node": 4, "bandwidth": 1e9},
            ValueError,
            "gpus_per_node=4 does not divide gpus=6",
        ),
        (
            Cluster,
            {"gpus": 8, "gpus_per_node": 4, "shards": 8, "bandwidth": 1e9},
            ValueError,
            "shards=8 does not divide gpus_per_node=4",
        ),
        (Cluster, {"gpus": 8, "shards": 0, "bandwidth": 1e9}, ValueError, "shards=0"),
        (Cluster, {"gpus": 2, "bandwidth": 0}, ValueError, "bandwidth=0"),
        (Cluster, {"gpus": 2, "bandwidth": "4"}, TypeError, "bandwidth='4'"),
        (Cluster, {"gpus": 0, "bandwidth": 1e9}, ValueError, "gpus=0"),
        (Cluster, {"gpus": 2, "bandwidth": 1e9, "latency": -1}, ValueError, "latency=-1"),
        (Cluster, {"gpus": 10**400, "bandwidth": 1e9}, ValueError, "must be at most 1,000,000,000,000,000"),
        (Job, {"params": 0, "compute": 1}, ValueError, "params"),
        (Job, {"params": 10**16, "compute": 1}, ValueError, "params=10000000000000000 is out of range; it must be at"),
        (Job, {"params": 10, "compute": 1, "steps": 10**10}, ValueError, "steps=10000000000 is out of range"),
        (Job, {"params": 10, "compute": 1, "block_size": 32 * 10**400}, ValueError, "block_size=32000"),
        (Job, {"params": 10.5, "compute": 1}, TypeError, "params"),
        (Job, {"params": 10, "compute": -1}, ValueError, "compute=-1"),
        (Job, {"params": 10, "compute": 1, "warmup": 1.5}, ValueError, "warmup=1.5"),
        (Job, {"params": 10, "compute": 1, "gradient_bytes": 8}, ValueError, "gradient_bytes=8"),
        (Job, {"params": 10, "compute": 1, "block_size": 33}, ValueError, "block_size=33"),
        (Job, {"params": 10, "compute": 1, "overlap": "never"}, ValueError, "overlap='never'"),
    ],
)
def test_every_bad_number_is_refused_by_name(make: Any, options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make(**options)


def test_unknown_methods_and_no_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="'sgd' is unknown"):
        plan(NETWORK, BERT, ["sgd"])
    with pytest.raises(ValueError, match="algorithms is empty"):
        plan(NETWORK, BERT, [])
    with pytest.raises(ValueError, match="layout='tree'"):
        predict(NETWORK, BERT, "onebit_adam", "tree")


@pytest.mark.parametrize(
    ("option", "without", "owners"),
    [
        (
            {"overlap": "backward"},
            ("zero_one_adam", "binsgdm", "onebit_sgd"),
            "'onebit_adam' and 'onebit_lamb' have it",
        ),
        (
            {"local_steps": LocalSteps(max_gap=8)},
            ("onebit_adam", "onebit_lamb", "binsgdm", "onebit_sgd"),
            "'zero_one_adam' has it",
        ),
    ],
)
def test_an_option_without_effect_is_refused(option: dict[str, Any], without: tuple[str, ...], owners: str) -> None:
    """Where no algorithm that was named has it; among others that do, all are planned."""
    job = replace(BERT, **option)
    (field,) = option
    words = rf"{field}=.* has no effect on .*{re.escape(owners)}; leave it out or name another algorithm"
    for call in (plan, predict, break_even_bandwidth):
        for name in without:
            with pytest.raises(ValueError, match=words):
                call(NETWORK, job, name)  # type: ignore[operator]
    with pytest.raises(ValueError, match=words):
        plan(NETWORK, job, without)
    for name in set(ALGORITHMS) - set(without):
        assert predict(NETWORK, job, name).step_seconds > 0
    report = plan(NETWORK, job)
    assert (
        len(report.predictions) == 2 + 2 * len(ALGORITHMS)
        and report.as_dict()["break_even_bandwidth"] > 0
        and report.verdict
    )
    assert predict(NETWORK, job, "dense_fp32") == predict(NETWORK, BERT, "dense_fp32")


# ----- validation ------------------------------------------------------------------------------------------------------------


def test_our_shaped_networks_are_predicted_within_15_per_cent() -> None:
    for file in planner_check.SHAPED:
        _, rows = planner_check.shaped(file)
        assert {"ddp", "onebit"} <= {row.what for row in rows}
        for row in rows:
            assert abs(row.error) < 0.15, (file, row)


def test_schedules_agree_with_the_published_numbers() -> None:
    for row in planner_check.arithmetic():
        assert abs(row.error) < 0.1, row


def test_published_points_are_missed_by_no_more_than_the_docs_say() -> None:
    """The dense column alone does not fix the computation: docs/planner.md says so, with these errors."""
    compute, rows = planner_check.published("dense")
    assert 0.3 < compute < 1.0 and len(rows) == 3
    assert all(-0.5 < row.error < 0 for row in rows), "the model is pessimistic there, not optimistic"
    _, rows = planner_check.published("compressed")
    assert len(rows) == 5 and sorted(abs(row.error) for row in rows)[2] < 0.15


def test_the_docs_print_the_tables_that_the_code_makes() -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    for caption, table in planner_check.sections().items():
        assert caption in text and table in text, (
            f"run benchmarks/planner_check.py and put '{caption}' into docs/planner.md"
        )


def test_a_compressed_step_never_takes_less_than_computing() -> None:
    """Not even where it moves fewer bytes through memory than AdamW, as those with bf16 state do."""
    still = Cluster(gpus=2, bandwidth=1e30, **{**IDEAL, "memory_bandwidth": ADAMW_BYTES * 1e9})
    job = Job(params=10**6, compute=0.1, warmup=0.0)
    steps = {name: predict(still, job, name).step_seconds for name in ALGORITHMS}
    assert min(steps.values()) >= 0.1 == steps["onebit_adam"] < steps["onebit_lamb"]
