"""The exchange, the control round, the handshake and the dense reducer between real processes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import counting, run_ranks
from oracle import bitwise
from torch import Tensor

from lightning_onebit.comm import (
    Bucket,
    ByteLedger,
    CollectiveFailure,
    CollectiveTimeout,
    Exchange,
    PlanMismatch,
    Reducer,
    Topology,
    Transport,
    chunk_order,
    control_round,
    handshake,
    plan_buckets,
)
from lightning_onebit.comm.transport import Pending
from lightning_onebit.kernels import Packed, get_backend

CPU = torch.device("cpu")


class PlainCodec:
    """Exchanges a flat vector per bucket with error feedback and keeps the result: the exchange without an optimizer."""

    def __init__(self, buckets: tuple[Bucket, ...], topology: Topology, kernels: str = "auto") -> None:
        self.kernels = get_backend(kernels, CPU)
        self.topology = topology
        self.c = {b.index: torch.zeros(b.elements) for b in buckets}
        self.e = {b.index: torch.zeros(b.elements // topology.ranks_per_node) for b in buckets}
        self.d = {b.index: torch.zeros(b.elements // topology.size) for b in buckets}
        self.result: dict[int, Packed] = {}
        self.order: list[tuple[str, int]] = []

    def local(self, bucket: Bucket) -> Tensor:
        self.order.append(("local", bucket.index))
        return self.c[bucket.index].clone()

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        self.order.append(("encode", bucket.index))
        count = bucket.blocks // self.topology.ranks_per_node
        lo = self.topology.local_rank * count
        out = Packed.empty(self.topology.nodes, bucket.blocks // self.topology.size, bucket.block_size)
        g = self.c[bucket.index] if shard is None else shard.view(-1)
        self.kernels.compress(
            bucket, lo, lo + count, a=None, m=None, b=torch.ones(count), g=g, e=self.e[bucket.index], out=out
        )
        return out.raw

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        self.order.append(("reduce", bucket.index))
        count = bucket.blocks // self.topology.size
        chunk = chunk_order(self.topology.size, self.topology.ranks_per_node)[self.topology.rank]
        out = Packed.empty(1, count, bucket.block_size)
        lengths = bucket.lengths[chunk * count : (chunk + 1) * count]
        packed = Packed(received, count, bucket.block_size)
        self.kernels.reduce(packed, lengths, self.d[bucket.index], out, 1.0 / self.topology.nodes)
        return out.raw.view(-1)

    def received_buffer(self, bucket: Bucket, sent: Tensor) -> Tensor:
        return torch.empty_like(sent)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        return Packed.empty(self.topology.size, bucket.blocks // self.topology.size, bucket.block_size).raw

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        self.order.append(("finish", bucket.index))
        self.result[bucket.index] = Packed(gathered, bucket.blocks // self.topology.size, bucket.block_size)


def values(seed: int, step: int, rank: int, bucket: Bucket) -> Tensor:
    """What a rank wants averaged: 0 on padding."""
    rng = np.random.default_rng([seed, step, rank, bucket.index])
    x = rng.standard_normal(bucket.elements).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 3))
    x[rng.random(x.size) < 0.05] = -0.0
    mask = np.arange(bucket.block_size)[None] < bucket.lengths.numpy()[:, None]
    return torch.from_numpy(np.where(mask, x.reshape(mask.shape), np.float32(0)).ravel())


def make_plan(sizes: tuple[int, ...], block_size: int, world: int, bucket_elements: int) -> Any:
    return plan_buckets(sizes, block_size=block_size, world_size=world, bucket_elements=bucket_elements, device=CPU)


def exchange_worker(
    rank: int,
    world: int,
    sizes: tuple[int, ...],
    block_size: int,
    bucket_elements: int,
    steps: int,
    ranks_per_node: int,
    slack: int,
) -> dict[str, Any]:
    plan = make_plan(sizes, block_size, world, bucket_elements)
    ledger = ByteLedger()
    topology = Topology.create(ranks_per_node=ranks_per_node)
    codec = PlainCodec(plan.buckets, topology)
    exchange = Exchange(Transport(topology, ledger), slack=slack)
    packed, seen = [], []
    for step in range(steps):
        for b in plan.buckets:
            codec.c[b.index] = values(0, step, rank, b)
        with counting() as counted:
            exchange.run(plan.buckets, codec)
        record = ledger.close_step(step=step + 1, phase="compressed", dense=False, skipped=False, dense_bytes=0)
        seen.append(([(s.op, s.ranks) for s in counted.seen], counted.bytes_sent, record))
        packed.append({k: (p.scales.flatten().clone(), p.words.flatten(0, 1).clone()) for k, p in codec.result.items()})
    return {"packed": packed, "e": codec.e, "d": codec.d, "seen": seen, "order": codec.order, "total": ledger.total}


def exchanges_worker(
    rank: int, world: int, settings: list[tuple[tuple[int, ...], int, int, int, int]], slack: int
) -> list[dict[str, Any]]:
    """Several exchanges after another, each with state of its own: processes are started once for all of them."""
    return [exchange_worker(rank, world, *setting, slack) for setting in settings]


def simulate(
    sizes: tuple[int, ...], block_size: int, bucket_elements: int, world: int, steps: int, ranks_per_node: int
) -> Any:
    """The same exchange in one process, by the definition."""
    plan = make_plan(sizes, block_size, world, bucket_elements)
    nodes = world // ranks_per_node
    ranks = [bitwise.Ranks(b.lengths.tolist(), nodes, block_size) for b in plan.buckets]
    packed = []
    for step in range(steps):
        packed.append({})
        for b in plan.buckets:
            c = []
            for node in range(nodes):
                mine = [values(0, step, node * ranks_per_node + k, b).numpy() for k in range(ranks_per_node)]
                mean = mine[0]
                for other in mine[1:]:
                    mean = mean + other
                if ranks_per_node > 1:
                    mean = mean * np.float32(1.0 / ranks_per_node)
                # a missing momentum counts as +0.0
                rows = (np.float32(0) + mean).reshape(b.blocks, block_size)
                c.append([row[:n] for row, n in zip(rows, b.lengths.tolist(), strict=True)])
            packed[-1][b.index] = ranks[b.index].exchange(c)
    return plan, ranks, packed


def rows_of(flat: Tensor, block_size: int) -> list[np.ndarray]:
    return list(flat.view(-1, block_size).numpy())


def check_against_simulation(
    results: list[dict[str, Any]],
    sizes: tuple[int, ...],
    block_size: int,
    bucket_elements: int,
    steps: int,
    ranks_per_node: int,
) -> None:
    world = len(results)
    plan, ranks, packed = simulate(sizes, block_size, bucket_elements, world, steps, ranks_per_node)
    chunks = chunk_order(world, ranks_per_node)
    for rank, result in enumerate(results):
        for step in range(steps):
            assert set(result["packed"][step]) == {b.index for b in plan.buckets}
            for b in plan.buckets:
                scales, words = result["packed"][step][b.index]
                for block, (s, w) in enumerate(packed[step][b.index]):
                    assert scales[block].item() == s, f"rank {rank}, step {step}, bucket {b.index}, block {block}"
                    assert (words[block].numpy().view(np.uint32) == w).all()
        for b in plan.buckets:
            simulated = ranks[b.index]
            node, local = divmod(rank, ranks_per_node)
            shard = b.blocks // ranks_per_node
            check_rows(
                rows_of(result["e"][b.index], block_size), simulated.e[node][local * shard : (local + 1) * shard]
            )
            count = b.blocks // world
            mine = slice(chunks[rank] * count, (chunks[rank] + 1) * count)
            check_rows(rows_of(result["d"][b.index], block_size), simulated.d[mine])


def check_rows(rows: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(rows) == len(expected)
    for row, valid in zip(rows, expected, strict=True):
        assert (row[: valid.size].view(np.uint32) == valid.view(np.uint32)).all()
        assert not row[valid.size :].any(), "a residual on padding"


SIZES = [(0,), (1,), (7,), (8,), (9,), (33, 0, 64), (301, 5, 1000)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_exchange_is_bitwise_the_simulated_one_on_both_sides(world: int) -> None:
    """Bits and scales everywhere, worker residuals and server residuals, after several steps, over several buckets."""
    # buckets of one block per rank, so that the larger sizes need several
    settings = [(sizes, 32, 32 * world, 3, 1) for sizes in SIZES]
    by_rank = run_ranks(exchanges_worker, world, settings, 3)
    for setting, *results in zip(settings, *by_rank, strict=True):
        check_against_simulation(results, *setting)


@pytest.mark.parametrize(("ranks_per_node", "world"), [(2, 4), (3, 6), (2, 2)])
def test_hierarchical_exchange_is_bitwise_the_flat_one_on_node_means(ranks_per_node: int, world: int) -> None:
    setting = ((301, 5, 1000), 32, 400, 3, ranks_per_node)
    check_against_simulation(run_ranks(exchange_worker, world, *setting, 3), *setting)


@pytest.mark.parametrize("slack", [0, 1, 3, 100])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_pipelining_changes_nothing_but_the_order_of_work(ranks_per_node: int, slack: int) -> None:
    world = 2 * ranks_per_node
    setting = ((900,), 32, 32 * world, 1, ranks_per_node)
    results = run_ranks(exchange_worker, world, *setting, slack)
    check_against_simulation(results, *setting)
    buckets = len(make_plan(*setting[:2], world, setting[2]).buckets)
    assert buckets > 6
    # a bucket is sent on its way before older ones move on, those with the longest way to go first
    stages = ["encode", "reduce"] if ranks_per_node == 1 else ["local", "encode", "reduce", "gather in the node"]
    expected = []
    for k in range(buckets + len(stages) - 1):
        expected += [(what, k - age) for age, what in enumerate(stages)]
        # and no result is used before, nor as long as more buckets come, unless more than `slack` have arrived
        if k < buckets:
            expected.append(("finish", k - len(stages) + 1 - slack))
    done = max(0, buckets - len(stages) + 1 - slack)
    expected = [(what, k) for what, k in expected if 0 <= k < buckets and what != "gather in the node"]
    expected += [("finish", k) for k in range(done, buckets)]
    for result in results:
        assert result["order"] == expected


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_two_collectives_per_bucket_and_the_ledger_counts_what_was_sent(world: int) -> None:
    sizes, block_size, bucket_elements = (1000, 64, 7), 32, 200
    results = run_ranks(exchange_worker, world, sizes, block_size, bucket_elements, 2, 1, 3)
    buckets = make_plan(sizes, block_size, world, bucket_elements).buckets
    assert len(buckets) > 2
    padded = sum(b.elements for b in buckets)
    formula = 2 * (world - 1) * padded * (1 / 8 + 4 / block_size) / world
    for result in results:
        for ops, counted_bytes, record in result["seen"]:
            assert sorted(ops) == sorted([("all_to_all", world), ("all_gather", world)] * len(buckets))
            assert record.collectives == 2 * len(buckets)
            assert record.bytes_sent == counted_bytes == formula
            assert record.bytes_inter == record.bytes_sent and record.bytes_intra == record.control_bytes == 0
        assert result["total"].bytes_sent == 2 * formula
        assert result["total"].compression_seconds > 0
    assert len({str(r["seen"][0][0]) for r in results}) == 1, "all ranks issue the same collectives in the same order"


@pytest.mark.parametrize(("ranks_per_node", "world"), [(2, 4), (3, 6)])
def test_bytes_between_nodes_follow_the_hierarchical_formula(ranks_per_node: int, world: int) -> None:
    sizes, block_size, bucket_elements = (1000, 64, 7), 32, 400
    results = run_ranks(exchange_worker, world, sizes, block_size, bucket_elements, 1, ranks_per_node, 3)
    padded = sum(b.elements for b in make_plan(sizes, block_size, world, bucket_elements).buckets)
    nodes = world // ranks_per_node
    per_card = 2 * (nodes - 1) / nodes * padded * (1 / 8 + 4 / block_size)
    for node in range(nodes):
        sent = [r["total"].bytes_inter for r in results[node * ranks_per_node : (node + 1) * ranks_per_node]]
        assert sum(sent) == pytest.approx(per_card)
    for result in results:
        # fp32 reduce-scatter, then bits and scales of the other shards
        inside = padded * 4 * (ranks_per_node - 1) / ranks_per_node
        inside += (ranks_per_node - 1) * padded / ranks_per_node * (1 / 8 + 4 / block_size)
        assert result["total"].bytes_intra == pytest.approx(inside)
        assert result["total"].bytes_sent == result["seen"][0][1]


# ----- rounds in which all ranks learn the same ------------------------------------------------------------------------------------


def control_worker(rank: int, world: int) -> Any:
    ledger = ByteLedger()
    transport = Transport(Topology.create(), ledger)
    present = [rank == 0, False, rank == world - 1, True, *[False] * 10, rank == 1]
    verdict = control_round(transport, 0.1 * (rank + 1), int(rank == 2), present, CPU)
    calm = control_round(transport, 1.0, 0, [], CPU)
    record = ledger.close_step(step=1, phase="", dense=False, skipped=False, dense_bytes=0)
    return verdict, calm, record


def test_control_round_tells_all_ranks_the_same_to_the_last_bit() -> None:
    results = run_ranks(control_worker, 3)
    verdict, calm, record = results[0]
    assert all(r[0] == verdict for r in results)
    assert verdict.present == (True, False, True, True, *[False] * 10, True) and not verdict.finite
    assert verdict.sum_squares == pytest.approx(0.6) and verdict.norm == pytest.approx((0.6 / 3) ** 0.5)
    assert calm.finite and calm.norm == 1.0 and calm.present == ()
    # 12 bytes and a bit per parameter, in words of 4 bytes, to two other ranks; never counted as gradient bytes
    assert record.control_bytes == 2 * (12 + 4) + 2 * 12 and record.control_collectives == 2
    assert record.bytes_sent == record.collectives == 0


def handshake_worker(rank: int, world: int, texts: list[list[str]]) -> Any:
    transport = Transport(Topology.create(), ByteLedger())
    try:
        return handshake(transport, texts[rank], CPU, "training plan")
    except PlanMismatch as error:
        return error.args[0]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([["a", "b"], ["a", "b"], ["a", "c"]], ["rank 0 has [b]", "rank 2 has [c]"]),
        ([["a", "b"], ["a"], ["a", "b"]], ["only rank 0", "rank 1", "[b]"]),
        ([["a"], ["a"], ["a", "ü" * 50]], ["only rank 2", "rank 0", "[" + "ü" * 50 + "]"]),
    ],
)
def test_handshake_raises_on_every_rank_and_names_the_first_difference(
    texts: list[list[str]], words: list[str]
) -> None:
    messages = run_ranks(handshake_worker, 3, texts)
    assert len(set(messages)) == 1
    for word in ["training plan", *words]:
        assert word in messages[0]


def test_handshake_of_equal_plans_agrees_on_their_hash() -> None:
    (first, *others) = run_ranks(handshake_worker, 3, [["a", "b"]] * 3)
    assert len(first) == 64 and set(others) == {first}


# ----- the dense reducer -----------------------------------------------------------------------------------------------------------


def reducer_worker(rank: int, world: int, overlap: bool, bucket_bytes: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    unused = torch.nn.Parameter(torch.ones(3))  # has a gradient on rank 0 only
    nowhere = torch.nn.Parameter(torch.ones(2))
    empty = torch.nn.Parameter(torch.ones(0))
    # the buckets follow the reverse order: those of the model are complete before these
    params = [unused, nowhere, empty, *model.parameters()]
    ledger = ByteLedger()
    reducer = Reducer(params, Transport(Topology.create(), ledger), bucket_bytes, overlap=overlap)
    torch.manual_seed(rank)
    grads = []
    launched = []
    for _ in range(2):
        for p in params:
            p.grad = None
        x = torch.randn(4, 6)
        loss = model(x).square().sum() + (unused.sum() if rank == 0 else 0)
        local = [
            None if g is None else g.clone()
            for g in torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        ]
        reducer.arm()
        with counting() as counted:
            loss.backward()
            launched.append(len(counted.seen))
            present = reducer.finish()
        grads.append((local, [None if p.grad is None else p.grad.clone() for p in params], present, counted.bytes_sent))
    record = ledger.close_step(step=1, phase="", dense=True, skipped=False, dense_bytes=0)
    finite = bool(reducer.finite())
    reducer.close()
    return grads, launched, record, finite, sum(p.numel() * p.element_size() for p in reducer.params)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [40, 10**6])
def test_reducer_averages_gradients_as_they_arrive(overlap: bool, bucket_bytes: int) -> None:
    results = run_ranks(reducer_worker, 3, overlap, bucket_bytes)
    for step in range(2):
        for i in range(9):
            locals_ = [r[0][step][0][i] for r in results]
            averaged = [r[0][step][1][i] for r in results]
            if all(g is None for g in locals_):
                assert all(g is None for g in averaged)
                continue
            expected = (
                sum(torch.zeros_like(next(g for g in locals_ if g is not None)) if g is None else g for g in locals_)
                / 3
            )
            for g in averaged:
                assert torch.allclose(g, expected, rtol=1e-5, atol=1e-6)
                assert torch.equal(g, averaged[0])
        for r in results:
            assert r[0][step][2] == [True, False, False, *[True] * 6]
    launched, finite = results[0][1], results[0][3]
    assert finite
    if overlap and bucket_bytes == 40:
        assert min(launched) >= 3, "buckets are sent during backward"
    if not overlap:
        assert launched == [0, 0]
    record = results[0][2]
    assert record.bytes_sent == sum(step[3] for step in results[0][0])
    assert record.collectives >= 2 and results[0][4] == 4 * (35 + 18 + 8 + 3 + 2)


def reducer_nan_worker(rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(5))
    reducer = Reducer([p], Transport(Topology.create(), ByteLedger()), 100)
    verdicts = []
    for bad in (0.0, float("nan"), float("inf"), 3e38):
        p.grad = torch.ones(5)
        if rank == 1:
            p.grad[2] = bad
        reducer.arm()
        reducer.finish()
        verdicts.append(bool(reducer.finite()))
    return verdicts


def test_reducer_tells_all_ranks_whether_the_average_is_finite() -> None:
    assert run_ranks(reducer_nan_worker, 2) == [[True, False, False, True]] * 2


def reducer_memory_worker(rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(5))
    reducer = Reducer([p], Transport(Topology.create(), ByteLedger()), 100)
    found = []
    for arm in (False, True):
        if arm:
            reducer.arm()
        p.grad = torch.ones(5)
        replaced = weakref.ref(p.grad)
        reducer.finish()
        before = bool(reducer.finite())
        assert p.grad is not None
        p.grad[2] = float("nan")  # by a hook of the user's, say
        after = bool(reducer.finite())
        held = replaced() is not None
        reducer.arm()
        found.append((before, after, held, replaced() is not None))
    return found


def gaps_worker(rank: int, world: int) -> list[Tensor]:
    base = torch.zeros(4, 6)
    params = [torch.nn.Parameter(base[:, ::2]), torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(base[:, 1::2])]
    reducer = Reducer(params, Transport(Topology.create(), ByteLedger()), bucket_bytes=2**20)
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, 10.0 * i + rank)
    reducer.finish()
    return [p.grad.clone() for p in params if p.grad is not None]


def test_reducer_keeps_gradients_of_parameters_with_gaps_in_memory_apart() -> None:
    for grads in run_ranks(gaps_worker, 2):
        for i, g in enumerate(grads):
            assert (g == 10.0 * i + 0.5).all()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 1000ms for recv", CollectiveTimeout),
        ("Wait timeout after 5 s", CollectiveTimeout),
        ("watchdog: time out", CollectiveTimeout),
        ("CUDA runtime error: out of memory", CollectiveFailure),
        ("no output at this time", CollectiveFailure),
    ],
)
def test_a_failure_is_told_from_a_timeout(text: str, kind: type[Exception]) -> None:
    found = Transport(Topology.create(), ByteLedger()).failure("a collective", RuntimeError(text), 1.0)
    assert type(found) is kind and text in str(found)


def test_who_waits_again_for_a_collective_that_failed_is_told_again() -> None:
    class Failing:
        def wait(self, *_: Any) -> bool:
            raise RuntimeError("Connection closed by peer")

    pending = Pending(Failing(), "a collective", Transport(Topology.create(), ByteLedger()))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(CollectiveFailure, match="Connection closed"):
            pending.wait()


def test_reducer_looks_again_at_what_was_written_since_and_keeps_replaced_gradients_until_the_next_backward() -> None:
    """Freed at once, their memory went back to the system in every step. Where no backward is announced nothing is kept."""
    assert run_ranks(reducer_memory_worker, 2) == [[(True, False, False, False), (True, False, True, False)]] * 2


def giving_back_worker(rank: int, world: int, watched: bool) -> Any:
    """Which gradients are there before each one lands, and after all have; one has another hook, as of a second optimizer."""
    params = [torch.nn.Parameter(torch.full((4,), float(i + 1))) for i in range(3)]
    reducer = Reducer(params, Transport(Topology.create(), ByteLedger()), bucket_bytes=16)
    seen: list[list[bool]] = []

    def look(_: Any = None) -> None:
        seen.append([q.grad is not None for q in params])

    def check(p: Tensor) -> None:
        assert p.grad is not None and torch.equal(p.grad, p.detach() * (rank + 1) * 2)

    for p in params:
        p.register_hook(look)
    if watched:
        params[2].register_post_accumulate_grad_hook(check)
    reducer.arm()
    # gradients land in the order of the buckets: the last parameter's first
    x = params[0].square().sum()
    for p in params[1:]:
        x = x + p.square().sum()
    (x * (rank + 1)).backward()
    look()
    if watched:
        check(params[2])
    present = reducer.finish()
    return seen, present, [None if p.grad is None else p.grad.tolist() for p in params]


@pytest.mark.parametrize("watched", [False, True])
def test_gradients_on_their_way_give_their_memory_to_the_rest_of_backward(watched: bool) -> None:
    """A model's gradients are never there twice, but for those that hooks of somebody else wait for."""
    for seen, present, grads in run_ranks(giving_back_worker, 2, watched):
        assert seen == [[False] * 3, [False, False, True], [False, True, watched], [True, False, watched]]
        assert present == [True] * 3 and grads == [[3.0 * (i + 1)] * 4 for i in range(3)]


def wide_reducer_worker(rank: int, world: int, dtype: torch.dtype) -> Any:
    """One gradient is missing on rank 1, one everywhere; the second round holds an infinity in its imaginary part, or a large number."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3)]
    reducer = Reducer(params, Transport(Topology.create(), ByteLedger()), 1 << 20)
    found = []
    for value in (1.0, complex(0.0, float("inf")) if dtype.is_complex else 1e300):
        params[0].grad = torch.full((3,), value, dtype=dtype)
        params[1].grad = None if rank else torch.full((3,), 2.0, dtype=dtype)
        params[2].grad = None
        reducer.finish()
        found.append(([None if p.grad is None else p.grad[0].item() for p in params], bool(reducer.finite())))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.filterwarnings("error:Casting complex values")
def test_reducer_averages_float64_and_complex_gradients(dtype: torch.dtype) -> None:
    for first, (grads, finite) in run_ranks(wide_reducer_worker, 2, dtype):
        assert first == ([1.0, 1.0, None], True)
        assert grads[1:] == [1.0, None] and finite == (dtype is torch.float64)


# ----- topology --------------------------------------------------------------------------------------------------------------------


def topology_worker(rank: int, world: int) -> Any:
    errors = []
    for bad in (0, 3, 4):
        try:
            Topology.create(ranks_per_node=bad)
        except ValueError as error:
            errors.append(str(error))
    inside = dist.new_group([0])
    if rank == 1:
        try:
            Topology.create(inside)
        except ValueError as error:
            errors.append(str(error))
    # ranks that have been in a different number of groups still find each other
    t = Topology.create(ranks_per_node=2)
    return errors, (t.rank, t.size, t.nodes, t.node, t.local_rank, t.hierarchical)


def test_topology_refuses_uneven_nodes_and_strangers() -> None:
    (errors, facts), (errors_1, facts_1) = run_ranks(topology_worker, 2)
    assert len(errors) == 3 and all("does not divide the 2 ranks" in e for e in errors)
    assert "not a member" in errors_1[-1]
    assert facts == (0, 2, 1, 0, 0, True) and facts_1 == (1, 2, 1, 0, 1, True)


def test_single_process_needs_no_process_group() -> None:
    assert Topology.create() == Topology(None) and Topology.create().size == 1
    with pytest.raises(ValueError, match=r"ranks_per_node=2 needs torch\.distributed"):
        Topology.create(ranks_per_node=2)


def nested_worker(rank: int, world: int) -> Any:
    group = dist.new_group([0, 1, 2, 3])
    if rank == 4:
        return None
    t = Topology.create(group, ranks_per_node=2)
    return dist.get_process_group_ranks(t.intra_group), dist.get_process_group_ranks(t.inter_group)


def test_nodes_within_a_part_of_the_world() -> None:
    expected = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3]), None]
    assert run_ranks(nested_worker, 5) == expected
