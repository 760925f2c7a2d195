"""The hierarchical exchange of all four optimizers: the flat exchange on node means, bit for bit, with fewer bytes between nodes."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from optim_support import CLASSES, CROSSING, SMALL, Problem, close, equal, run_world, snapshot, sure, train

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.comm import CollectiveFailure, Topology, plan_buckets
from lightning_onebit.comm.exchange import mean_in_order
from lightning_onebit.engine import ExchangeOptions

ALGORITHMS = list(CLASSES)
# 1-bit SGD averages its p_i within a node, the others gradients; it is held against its oracle with nodes, too
OF_GRADIENTS = [algorithm for algorithm in ALGORITHMS if algorithm != "onebit_sgd"]
SHAPES = ((20, 33), (7,), (0,), (1,), (300,))
#: (ranks per node, nodes)
NODES = [(2, 2), (2, 3), (3, 2)]
STEPS, WARM = 16, 6


def problem(algorithm: str, **differing: Any) -> Problem:
    options = {"lr": 0.01, "weight_decay": 0.1, "block_size": 32, **CROSSING[algorithm]}
    return Problem(STEPS, options, shapes=SHAPES, algorithm=algorithm, cold=100, **differing)


@dataclasses.dataclass(frozen=True)
class NodeMeans(Problem):
    """What the nodes of a hierarchical run see: the mean of their ranks' gradients, rounded as the exchange rounds it."""

    ranks_per_node: int = 1

    def gradient(self, t: int, rank: int, l: int) -> np.ndarray | None:
        K = self.ranks_per_node
        mine = [super(NodeMeans, self).gradient(t, rank * K + k, l) for k in range(K)]
        assert all(g is not None for g in mine)
        return mean_in_order(torch.from_numpy(np.stack([g for g in mine if g is not None]))).numpy()


def warmed_up(group: Any, rank: int, world: int, made: Problem) -> dict[str, Any]:
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    for t in range(WARM):
        made.put(params, t, rank)
        optimizer.step()
    return {"x": [p.detach().clone() for p in params], "state": optimizer.state_dict()}


def from_state(
    group: Any, rank: int, world: int, made: Problem, start: dict[str, Any], ranks_per_node: int, stop: int
) -> dict[str, Any]:
    """Goes on from replicated state and weights, with residuals of zero."""
    params = [torch.nn.Parameter(x.clone()) for x in start["x"]]
    optimizer = made.build(params, process_group=group)
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
    optimizer.load_state_dict(start["state"])
    trajectory, records = [], []
    for t in range(WARM, stop):
        made.put(params, t, rank)
        optimizer.step()
        trajectory.append([p.detach().clone() for p in params])
        records.append(optimizer.ledger.last)
    return {**snapshot(optimizer, params), "trajectory": trajectory, "records": records}


# every algorithm in two of the three arrangements
@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node", "nodes"),
    [(a, *NODES[(i + more) % len(NODES)]) for i, a in enumerate(OF_GRADIENTS) for more in (0, 1)],
)
def test_hierarchical_is_bitwise_the_flat_exchange_run_on_node_means(
    algorithm: str, ranks_per_node: int, nodes: int
) -> None:
    """Weights, momentum, residuals and LAMB's coefficients, from common state on; no step of it is dense."""
    made = problem(algorithm)
    means = NodeMeans(**{**vars(made), "ranks_per_node": ranks_per_node})
    # 0/1 Adam: up to its local steps, whose rounding differs (tested below)
    stop = 8 if algorithm == "zero_one_adam" else STEPS
    (start, *_) = run_world(warmed_up, nodes, means)
    flat = run_world(from_state, nodes, means, start, 1, stop)
    ours = run_world(from_state, nodes * ranks_per_node, made, start, ranks_per_node, stop)
    assert not any(record.dense for record in ours[0]["records"])
    assert flat[0]["records"][-1].bytes_intra == 0 < ours[0]["records"][-1].bytes_intra
    for rank, result in enumerate(ours):
        node, local = divmod(rank, ranks_per_node)
        assert equal(result["trajectory"], flat[node]["trajectory"])
        assert equal(result["state"], flat[node]["state"]), "replicated state"
        for key in ("coeff_average", "last_factor", "last_coeff", "coefficient"):
            assert result["books"].get(key) == flat[node]["books"].get(key)
        # what differs by rank: shard k of the node's, padding apart
        for key, shard in result["residuals"].items():
            if key in ("server_residual", "momentum_buffer"):
                continue
            whole = flat[node]["residuals"][key]
            start_of = local * shard.numel()
            valid = whole[start_of : start_of + shard.numel()]
            assert equal(shard[: valid.numel()], valid) and not shard[valid.numel() :].any(), key
    if algorithm != "binsgdm":
        # chunk k*L + l is rank l*K + k's
        order = sorted(range(len(ours)), key=lambda r: (r % ranks_per_node, r // ranks_per_node))
        joined = torch.cat([ours[r]["residuals"]["server_residual"] for r in order])
        expected = torch.cat([f["residuals"]["server_residual"] for f in flat])
        length = min(joined.numel(), expected.numel())
        assert equal(joined[:length], expected[:length]) and joined.any()


def test_local_steps_of_equal_ranks_of_a_node_are_bitwise_those_of_the_node() -> None:
    """Ranks of a node with the same gradients: their mean of two is exact, so 0/1 Adam equals two flat ranks to the last bit."""
    made = problem("zero_one_adam", shared=2)
    alone = dataclasses.replace(made, shared=1)
    (start, *_) = run_world(warmed_up, 2, alone)
    flat = run_world(from_state, 2, alone, start, 1, STEPS)
    ours = run_world(from_state, 4, made, start, 2, STEPS)
    assert [r.collectives for r in ours[0]["records"]] == [4, 4, 0, 4, 0, 0, 0, 4, 0, 0]
    for rank, result in enumerate(ours):
        assert equal(result["trajectory"], flat[rank // 2]["trajectory"])


@pytest.mark.parametrize(("ranks_per_node", "nodes"), NODES)
def test_synchronisations_of_local_steps_follow_the_oracle_of_nodes(ranks_per_node: int, nodes: int) -> None:
    """Each rank takes local steps on its own gradients; where all meet again they are where nodes with mean gradients would be."""
    made = problem("zero_one_adam", seed=1)
    world = ranks_per_node * nodes
    seen: list[Any] = []
    simulated = made.simulate(world, lambda o, t: seen.append([a.copy() for a in o.x]), ranks_per_node=ranks_per_node)
    sure(simulated)
    results = run_world(train, world, made, ranks_per_node, real=(ranks_per_node, nodes) == (2, 2))
    for t, kind in enumerate(simulated.kinds):
        xs = [r["trajectory"][t] for r in results]
        assert all(equal(x, xs[0]) for x in xs) == (kind != "local"), f"step {t + 1}"
        if kind != "local":
            for l, x in enumerate(xs[0]):
                close(x, seen[t][l], 0.01, f"step {t + 1}, tensor {l}")


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb"])
def test_follows_the_oracle_of_nodes_through_the_freeze(algorithm: str) -> None:
    """Six real processes as two nodes of three, warm-up included."""
    made = problem(algorithm, seed=3)
    simulated = made.simulate(6, ranks_per_node=3)
    sure(simulated)
    for result in run_world(train, 6, made, 3, real=True):
        for l, x in enumerate(result["x"]):
            close(x, simulated.x[l], 0.01)


# ----- bytes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node", "nodes"),
    [
        *((algorithm, *NODES[number % 3]) for number, algorithm in enumerate(ALGORITHMS)),
        ("binsgdm", 2, 3),
    ],
)
def test_bytes_between_nodes_equal_the_formula_and_collectives_are_four_per_bucket(
    algorithm: str, ranks_per_node: int, nodes: int
) -> None:
    """Through one node's card: ``2 (L-1)/L * N (1/8 + 4/block_size)``, K times less than the flat exchange; bits only for BinSGDM."""
    made = problem(algorithm)
    bucket_mb, world = 0.0012, ranks_per_node * nodes
    made = dataclasses.replace(made, options={**made.options, "bucket_mb": bucket_mb})
    sizes = [int(np.prod(s)) for s in SHAPES]
    plan = plan_buckets(
        sizes, block_size=32, world_size=world, bucket_elements=int(bucket_mb * 2**18), device=torch.device("cpu")
    )
    assert len(plan.buckets) > 1
    # the last step that exchanges and, for BinSGDM, merges nothing
    step = {"zero_one_adam": 13, "binsgdm": 14}.get(algorithm, 15)
    records = [r["records"][step] for r in run_world(train, world, made, ranks_per_node)]
    per_element = 1 / 8 if algorithm == "binsgdm" else 1 / 8 + 4 / 32
    card = 2 * (nodes - 1) / nodes * plan.elements * per_element
    for node in range(nodes):
        members = records[node * ranks_per_node : (node + 1) * ranks_per_node]
        assert sum(r.bytes_inter for r in members) == pytest.approx(card, abs=1e-6)
    K = ranks_per_node
    for record in records:
        # fp32 reduce-scatter of what is averaged, then the results of the other shards
        inside = (K - 1) / K * plan.elements * (4 + per_element)
        assert record.bytes_intra == pytest.approx(inside, abs=1e-6)
        assert record.bytes_sent == record.bytes_inter + record.bytes_intra
        assert record.collectives == 4 * len(plan.buckets) and not record.dense


def test_residuals_and_averages_take_one_kth_of_the_memory() -> None:
    for algorithm in ALGORITHMS:
        flat, nodes = (run_world(train, 4, problem(algorithm), k)[0]["residuals"] for k in (1, 2))
        for key in ("worker_residual", "momentum", "magnitude"):
            if key in flat:
                assert nodes[key].numel() * 2 == flat[key].numel(), f"{key} of {algorithm}"
        if "server_residual" in flat:
            assert nodes["server_residual"].numel() == flat["server_residual"].numel()


# ----- layouts that are no nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "ranks_per_node"), [(3, 2), (4, 3), (2, 4), (4, 0), (4, -2)])
def test_uneven_nodes_raise_with_the_layout(world: int, ranks_per_node: int) -> None:
    def uneven(group: Any, rank: int, world: int) -> str:
        optimizer = OnebitAdam([torch.nn.Parameter(torch.ones(3))], exchange=ExchangeOptions(process_group=group))
        with pytest.raises(ValueError, match="must be even") as caught:
            optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
        return str(caught.value)

    for message in run_world(uneven, world):
        assert f"ranks_per_node={ranks_per_node}" in message and f"{world} ranks" in message


def test_a_single_process_has_no_nodes() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node=2 needs torch\.distributed"):
        Topology.create(ranks_per_node=2)


def test_ranks_that_disagree_about_nodes_raise() -> None:
    def disagreeing(group: Any, rank: int, world: int) -> Any:
        p = torch.nn.Parameter(torch.ones(50))
        optimizer = OnebitAdam([p], exchange=ExchangeOptions(process_group=group))
        optimizer.configure_communication(group, ranks_per_node=2 if rank < 2 else 1)
        p.grad = torch.ones(50)
        optimizer.step()

    with pytest.raises((RuntimeError, CollectiveFailure), match="per node"):
        run_world(disagreeing, 4)


def test_one_node_of_all_ranks_exchanges_inside_only() -> None:
    made = problem("onebit_adam", seed=2)
    simulated = made.simulate(2, ranks_per_node=2)
    sure(simulated)
    for result in run_world(train, 2, made, 2):
        assert result["records"][-1].bytes_inter == 0 < result["records"][-1].bytes_intra
        for l, x in enumerate(result["x"]):
            close(x, simulated.x[l], 0.01)


def test_small_tensors_leave_ranks_without_blocks() -> None:
    """Six ranks share a single block: five of them hold padding only."""
    made = Problem(8, {"lr": 0.01, "freeze_step": 3, "block_size": 2048}, shapes=SMALL[1:2], seed=1)
    simulated = made.simulate(6, ranks_per_node=3)
    sure(simulated)
    for result in run_world(train, 6, made, 3):
        close(result["x"][0], simulated.x[0], 0.01)


# ----- a group that is not the whole world -----------------------------------------------------------------------------------------


def part_of_the_world(rank: int, world: int, made: Problem) -> Any:
    """Four of five ranks as two nodes of two; one of them has had a process group that the others have not."""
    members = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=15))
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if rank == 4:
        return None
    params = made.parameters()
    optimizer = made.build(params, process_group=members, timeout=15.0)
    optimizer.configure_communication(members, ranks_per_node=2)
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.step()
    return [p.detach() for p in params], optimizer.ledger.last.bytes_intra


def test_nodes_within_a_part_of_the_world_need_not_have_made_the_same_groups_before() -> None:
    results = run_ranks(part_of_the_world, 5, problem("onebit_adam"), timeout=60)
    for x, intra in results[:4]:
        assert equal(x, results[0][0]) and intra > 0
