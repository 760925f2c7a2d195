"""OnebitAdam between real processes: against the float64 oracle, against torch's AdamW, and every promise of its contract."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import oracle
import oracle.bitwise
import pytest
import torch
import torch.distributed as dist
from harness import counting, grouped, run_ranks
from torch import Tensor

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.comm import PlanMismatch, StepRecord, control_payload_bytes, plan_buckets
from lightning_onebit.comm.transport import Pending
from lightning_onebit.engine import ExchangeOptions, Phase, engine
from lightning_onebit.engine.compact import expanded
from lightning_onebit.kernels.transfer import Download

SHAPES = ((64, 33), (7,), (0,), (1,), (3, 2049), (4097,))


@dataclass(frozen=True)
class Run:
    """A training run that the library makes in processes and the oracle in one; everything in it is a function of the seed.

    Attributes:
        steps: optimizer steps.
        options: keywords of OnebitAdam, those of its exchange beside the others (those of ``oracle.Adam`` are derived from them).
        shapes: parameters.
        cold: elements of the first parameter, counted from its end, whose gradient is faint.
        faint: factor of those gradients.
        missing: ``(t, rank, l)``: no gradient for tensor l on that rank in step t (rank -1: on all).
        broken: ``(t, rank, l)``: a NaN in the gradient of tensor l.
        lrs: learning rate of each step, if it changes.
        scale: factor of all gradients.
        quantum: gradients are multiples of it, so that averages are exact even in 16 bits.
        dtype: of the parameters and gradients.
        seed: of weights and gradients.
    """

    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    cold: int = 0
    faint: float = 0.0
    missing: frozenset[tuple[int, int, int]] = frozenset()
    broken: frozenset[tuple[int, int, int]] = frozenset()
    lrs: tuple[float, ...] | None = None
    scale: float = 1.0
    fade: float = 1.0
    quantum: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def start(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return [torch.from_numpy(rng.standard_normal(shape)).to(self.dtype).float().numpy() for shape in self.shapes]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.from_numpy(a).to(self.dtype)) for a in self.start()]

    def gradient(self, t: int, rank: int, l: int) -> np.ndarray | None:
        if (t, rank, l) in self.missing or (t, -1, l) in self.missing:
            return None
        shape = self.shapes[l]
        # a part that all ranks and steps share, and noise
        g = np.random.default_rng([self.seed, 10**6, l]).standard_normal(shape)
        g = 0.3 * g + np.random.default_rng([self.seed, t, rank, l]).standard_normal(shape)
        if self.quantum is not None:
            g = np.round(g / self.quantum) * self.quantum
        if l == 0 and self.cold:
            g.reshape(-1)[-self.cold :] *= self.faint
        if (t, rank, l) in self.broken:
            g.reshape(-1)[g.size // 2] = np.nan
        return (self.scale * self.fade**t * g).astype(np.float32)

    def build(self, params: Any, **differing: Any) -> Any:
        """The library's optimizer."""
        return OnebitAdam(params, **grouped(self.options, **differing))

    def gradients(self, t: int, world: int) -> list[list[np.ndarray | None]]:
        return [[self.gradient(t, rank, l) for l in range(len(self.shapes))] for rank in range(world)]

    def put(self, params: Sequence[torch.nn.Parameter], t: int, rank: int) -> None:
        """Sets the local gradients of step t."""
        for l, p in enumerate(params):
            g = self.gradient(t, rank, l)
            p.grad = None if g is None else torch.from_numpy(g).to(p.dtype)

    def average(self, t: int, world: int, l: int) -> Tensor | None:
        """The averaged gradient, rounded once."""
        found = [g for g in (self.gradient(t, rank, l) for rank in range(world)) if g is not None]
        return (
            torch.from_numpy((sum(g.astype(np.float64) for g in found) / world).astype(np.float32)) if found else None
        )

    def oracle(self, world: int, only: slice = slice(None), **differing: Any) -> oracle.Adam:
        """The oracle after the same steps, on the tensors ``only``."""
        o = self.options
        b1, b2 = o.get("betas", (0.9, 0.999))
        published = o.get("recipe") == "published"
        settings = {
            "lr": o.get("lr", 1e-3),
            "b1": b1,
            "b2": b2,
            "eps": o.get("eps", 1e-8),
            "wd": o.get("weight_decay", 0.0),
            "T_w": o.get("freeze_step"),
            "bias_correction": o.get("bias_correction", True),
            "block_size": o.get("block_size", 2048),
            "phi": o.get("denominator_floor", 0.1),
            "preconditioned": not published,
            "max_norm": o.get("max_grad_norm"),
            "refresh": "never" if published else o.get("refresh", "auto"),
        }
        simulated = oracle.Adam(self.start()[only], world, **{**settings, **differing})
        for t in range(self.steps):
            if self.lrs is not None:
                simulated.lr = self.lrs[t]
            simulated.step([worker[only] for worker in self.gradients(t, world)])
        return simulated


def whole_state(optimizer: Any) -> dict[str, Any]:
    """``state_dict()`` with what is left out of it because it follows from the rest."""
    return expanded(optimizer.state_dict())


def state_of(optimizer: OnebitAdam, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
    """Copies of everything a step may change, except counters."""
    saved = whole_state(optimizer)
    return {
        "x": [p.detach().clone() for p in params],
        "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()},
        "residuals": {k: v.clone() for k, v in optimizer.residual_state_dict()["tensors"].items()},
    }


def equal(a: Any, b: Any) -> bool:
    """Bitwise equality of nested containers of tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # through integers, so that NaN equals itself and -0.0 is not 0.0
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and torch.equal(a.contiguous().view(size), b.contiguous().view(size))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def train(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Makes a run; returns its final state, the ledger's records and what was really sent in each step."""
    params = run.parameters()
    optimizer = run.build(params)
    records: list[StepRecord] = []
    sent = []
    for t in range(run.steps):
        run.put(params, t, rank)
        if run.lrs is not None:
            optimizer.param_groups[0]["lr"] = run.lrs[t]
        with counting() as counted:
            optimizer.step()
        assert optimizer.ledger.last is not None
        records.append(optimizer.ledger.last)
        sent.append(counted)
    return {**state_of(optimizer, params), "records": records, "sent": sent, "total": optimizer.ledger.total}


def joined(results: list[dict[str, Any]], run: Run) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """Worker residuals ``e[i][l]`` and server residuals ``d[l]`` of all ranks, by parameter."""
    world, block_size = len(results), run.options.get("block_size", 2048)
    sizes = [int(np.prod(s)) for s in run.shapes]
    elements = int(run.options.get("bucket_mb", 16.0) * 2**20 / 4)
    plan = plan_buckets(
        sizes, block_size=block_size, world_size=world, bucket_elements=elements, device=torch.device("cpu")
    )
    d = torch.zeros(plan.elements)
    for bucket in plan.buckets:
        share = bucket.elements // world
        start = bucket.first_block * block_size // world
        for rank, result in enumerate(results):
            bucket.slice(d)[rank * share : (rank + 1) * share] = result["residuals"]["server_residual"][
                start : start + share
            ]

    def parts(flat: Tensor) -> list[np.ndarray]:
        return [plan.view(flat, l, torch.empty(size)).numpy() for l, size in enumerate(sizes)]

    return [parts(r["residuals"]["worker_residual"]) for r in results], parts(d)


def assert_follows(
    results: list[dict[str, Any]],
    run: Run,
    simulated: oracle.Adam,
    *,
    lr: float | None = None,
    only: slice = slice(None),
) -> None:
    """Weights and momentum of every rank are the oracle's, to rounding, and so are the residuals of a complete run."""
    # A sign that rounding could have turned would make the two part for good. The run was chosen so that there is none.
    assert simulated.exchange.margin > 1e-6, "choose another seed: a sign of this run is decided by rounding"
    lr = lr if lr is not None else run.options.get("lr", 1e-3)
    for result in results:
        x = result["x"][only]
        state = [result["state"].get(l) for l in range(len(run.shapes))][only]
        for l, (ours, theirs) in enumerate(zip(x, simulated.x, strict=True)):
            # rounding of the weights themselves, and a relative error of the updates
            np.testing.assert_allclose(ours.float().numpy().ravel(), theirs, rtol=1e-6, atol=5e-4 * lr)
            if state[l] is not None:
                m = state[l]["exp_avg"].numpy().ravel()
                np.testing.assert_allclose(m, simulated.m[l], rtol=1e-5, atol=1e-5 * run.scale)
    if only == slice(None) and results[0]["residuals"]:
        e, d = joined(results, run)
        for i in range(len(results)):
            for l in range(len(run.shapes)):
                theirs = simulated.exchange.e[i][l]
                np.testing.assert_allclose(e[i][l], theirs, atol=1e-5 * max(run.scale, np.abs(theirs).max(initial=0.0)))
        for l in range(len(run.shapes)):
            theirs = simulated.exchange.d[l]
            np.testing.assert_allclose(d[l], theirs, atol=1e-5 * max(run.scale, np.abs(theirs).max(initial=0.0)))


def assert_compressed(results: list[dict[str, Any]], dense: int, compressed: int) -> None:
    """The ledger says that this many steps of each kind were made, and compressed ones sent far less than dense ones."""
    for result in results:
        kinds = [r.dense for r in result["records"] if not r.skipped]
        assert kinds == [True] * dense + [False] * compressed
        assert all(r.bytes_sent < r.dense_bytes for r in result["records"] if not r.dense and not r.skipped)


SMALL = ((33, 9), (7,), (0,), (1,), (200,))


# ----- against the oracle --------------------------------------------------------------------------------------------------------


# every pair of values of two options
@pytest.mark.parametrize(
    ("recipe", "block_size", "world", "seed", "bias_correction"),
    [
        *(("published", 2048, 2, 9, True), ("published", 2048, 2, 9, False), ("published", 64, 3, 13, False)),
        *(("default", 2048, 3, 6, False), ("default", 64, 2, 15, True), ("default", 64, 3, 22, True)),
    ],
)
def test_follows_the_oracle_across_the_freeze(
    recipe: str, block_size: int, world: int, seed: int, bias_correction: bool
) -> None:
    """30 steps, 10 of them dense, with weight decay, over several buckets; half of the first tensor never has a gradient.

    The default recipe would refresh second moments in step 26; the published one has no refreshes.
    """
    options = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "freeze_step": 10,
        **({"refresh": "never"} if recipe == "default" else {}),
        "bias_correction": bias_correction,
        "recipe": recipe,
        "block_size": block_size,
        "bucket_mb": 0.02,
    }
    run = Run(30, options, cold=64 * 33 // 2, seed=seed)
    results = run_ranks(train, world, run)
    assert_compressed(results, 10, 20)
    assert_follows(results, run, run.oracle(world))


def bitwise_worker(rank: int, world: int, run: Run) -> Any:
    """States before and after each of the last two (compressed) steps."""
    params = run.parameters()
    optimizer = run.build(params)
    states = []
    for t in range(run.steps):
        if t >= run.steps - 2:
            states.append(state_of(optimizer, params))
        run.put(params, t, rank)
        optimizer.step()
    return [*states, state_of(optimizer, params)]


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_compressed_steps_are_fp32_operations_in_the_order_of_the_definition(recipe: str) -> None:
    """``e = fl(y - C(y))``, ``d = fl(z - C(z))``, m and x, all bit for bit: first from an fp32 momentum, then from a packed one."""
    world, bs, f32 = 2, 32, np.float32
    betas, lr, wd = (0.9, 0.99), 0.01, 0.1
    options = {"betas": betas, "lr": lr, "weight_decay": wd, "freeze_step": 3, "block_size": bs}
    run = Run(5, {**options, "recipe": recipe}, shapes=((100,),))
    preconditioned = recipe == "default"
    held = "preconditioned_momentum" if preconditioned else "exp_avg"
    results = run_ranks(bitwise_worker, world, run)
    cut = [slice(b, min(b + bs, 100)) for b in range(0, 100, bs)]
    for step in range(2):
        t = 3 + step
        before, after = ([r[step + k] for r in results] for k in (0, 1))
        simulated = oracle.bitwise.Ranks([32, 32, 32, 4], world, bs)
        c = []
        for i in range(world):
            r = after[i]["state"][0]["reciprocal_denominator"].numpy()
            m = before[i]["state"][0]["exp_avg" if step == 0 else held].numpy()
            if preconditioned and step == 0:
                m = m * r
            g = run.gradient(t, i, 0)
            assert g is not None
            bg = f32(1 - betas[0]) * g
            flat = (f32(betas[0]) * m) + (bg * r if preconditioned else bg)
            c.append([flat[s] for s in cut])
            if before[i]["residuals"] and step:
                e = before[i]["residuals"]["worker_residual"].numpy()
                simulated.e[i] = [e[b * bs : b * bs + s.stop - s.start] for b, s in enumerate(cut)]
        if step:
            d = np.concatenate([b["residuals"]["server_residual"].numpy() for b in before])
            simulated.d = [d[b * bs : b * bs + s.stop - s.start] for b, s in enumerate(cut)]
        pairs = simulated.exchange(c)
        m = np.concatenate(
            [oracle.bitwise.decode_block(s, w, cut[b].stop - cut[b].start) for b, (s, w) in enumerate(pairs)]
        )
        alpha, decay = f32(lr / (1 - betas[0] ** (t + 1))), f32(1 - lr * wd)
        d = np.concatenate([a["residuals"]["server_residual"].numpy() for a in after])
        for i in range(world):
            assert equal(after[i]["state"][0][held], torch.from_numpy(m))
            r = after[i]["state"][0]["reciprocal_denominator"].numpy()
            # x = x*decay - (+-(alpha*s) * r), or without r
            magnitudes = np.concatenate(
                [np.full(cut[b].stop - cut[b].start, alpha * s, dtype=f32) for b, (s, _) in enumerate(pairs)]
            )
            if preconditioned:
                np.testing.assert_allclose(after[i]["state"][0]["exp_avg"], m / r, rtol=1e-6)
                r = f32(1)
            x = before[i]["x"][0].numpy() * decay - np.where(m < 0, -magnitudes, magnitudes) * r
            assert equal(after[i]["x"][0], torch.from_numpy(x))
            e = after[i]["residuals"]["worker_residual"].numpy()
            for b, s in enumerate(cut):
                n = s.stop - s.start
                assert (e[b * bs : b * bs + n] == simulated.e[i][b]).all() and not e[b * bs + n : (b + 1) * bs].any()
                assert (d[b * bs : b * bs + n] == simulated.d[b]).all() and not d[b * bs + n : (b + 1) * bs].any()


# ----- warm-up -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_warmup_is_torch_adamw_on_averaged_gradients(world: int) -> None:
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    # the second tensor has no gradient anywhere in step 2, the last one none on rank 0 in step 3
    run = Run(6, options, missing=frozenset({(2, -1, 1), (3, 0, 5)}))
    results = run_ranks(train, world, run)
    params = run.parameters()
    adamw = torch.optim.AdamW(params, **options)
    for t in range(run.steps):
        for l, p in enumerate(params):
            p.grad = run.average(t, world, l)
        adamw.step()
    for result in results:
        for l, p in enumerate(params):
            torch.testing.assert_close(result["x"][l], p.detach(), rtol=1e-6, atol=1e-7)
            if p.numel():
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(result["state"][l][key], adamw.state[p][key], rtol=1e-5, atol=1e-7)
                assert result["state"][l]["step"] == adamw.state[p]["step"]
        assert [r.dense for r in result["records"]] == [True] * 6


def test_first_step_is_a_real_step() -> None:
    run = Run(1, {"lr": 0.01, "freeze_step": 1})
    for result in run_ranks(train, 2, run):
        for l, x in enumerate(run.start()):
            moved = np.abs(result["x"][l].numpy() - x)
            # Adam's first step is lr in every coordinate that has a gradient
            np.testing.assert_allclose(moved, 0.01, rtol=1e-3)


@pytest.mark.parametrize("freeze_step", [1, 4])
def test_freeze_step_means_exactly_that_many_dense_steps(freeze_step: int) -> None:
    run = Run(7, {"freeze_step": freeze_step}, shapes=SMALL)
    results = run_ranks(train, 2, run)
    assert_compressed(results, freeze_step, 7 - freeze_step)
    for result in results:
        for t, (record, sent) in enumerate(zip(result["records"], result["sent"], strict=True)):
            assert record.step == t + 1
            assert bool(sent.of("all_reduce")) == (t < freeze_step)
            assert bool(sent.of("all_to_all")) == (t >= freeze_step)


def freeze_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    optimizer = run.build(params)
    seen = [(optimizer.phase, optimizer.next_step_is_dense)]
    with pytest.raises(RuntimeError, match="before the first step"):
        optimizer.freeze()
    for t in range(run.steps):
        if t == 3:
            optimizer.freeze()
            with pytest.raises(RuntimeError, match="already in phase 'compressed'; freeze only once"):
                optimizer.freeze()
        seen.append((optimizer.phase, optimizer.next_step_is_dense))
        run.put(params, t, rank)
        optimizer.step()
    return {**state_of(optimizer, params), "seen": seen, "dense": optimizer.ledger.dense_steps}


def test_freeze_makes_the_next_step_compressed_and_works_once() -> None:
    results = run_ranks(freeze_worker, 2, Run(6, {}, shapes=SMALL))
    for result in results:
        assert result["seen"] == [(Phase.WARMUP, True)] * 4 + [(Phase.COMPRESSED, False)] * 3
        assert result["dense"] == 3
    (same, _) = run_ranks(train, 2, Run(6, {"freeze_step": 3}, shapes=SMALL))
    assert equal(results[0]["x"], same["x"]), "freeze() and freeze_step give the same run"


def test_freeze_beside_freeze_step_raises() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = OnebitAdam([p], freeze_step=5)
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="freeze_step=5 was given"):
        optimizer.freeze()


# ----- what is sent --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_ledger_counts_what_was_sent_and_it_is_two_collectives_per_bucket(world: int) -> None:
    block_size, bucket_mb = 64, 0.02
    run = Run(4, {"freeze_step": 2, "block_size": block_size, "bucket_mb": bucket_mb})
    results = run_ranks(train, world, run)
    sizes = [int(np.prod(s)) for s in run.shapes]
    plan = plan_buckets(
        sizes,
        block_size=block_size,
        world_size=world,
        bucket_elements=int(bucket_mb * 2**20 / 4),
        device=torch.device("cpu"),
    )
    assert len(plan.buckets) > 1
    for result in results:
        for t, (record, sent) in enumerate(zip(result["records"], result["sent"], strict=True)):
            assert record.dense_bytes == 2 * (world - 1) * 4 * sum(sizes) // world
            if t == 0:
                continue  # also holds the handshake
            assert record.bytes_sent + record.control_bytes == sent.bytes_sent
            assert record.collectives + record.control_collectives == len(sent.seen)
            if t < 2:
                assert {s.op for s in sent.seen} == {"all_reduce"} and record.control_collectives == 0
                # a dense step sends the gradients and one number per parameter that says whether there is one
                assert record.dense_bytes <= record.bytes_sent <= record.dense_bytes + 2 * 4 * len(sizes)
            else:
                assert len(sent.of("all_to_all")) == len(plan.buckets)
                assert len(sent.of("all_gather")) == len(plan.buckets)
                assert len(sent.seen) == 2 * len(plan.buckets)
                # who has a gradient is told behind the first bucket's rows
                assert record.collectives == 2 * len(plan.buckets) and record.control_collectives == 0
                assert record.control_bytes == (world - 1) * control_payload_bytes(len(sizes))
                # 2 (n-1)/n * N (1/8 + 4/block_size), N = padded elements
                assert record.bytes_sent == 2 * (world - 1) * plan.elements * (1 / 8 + 4 / block_size) / world
                assert record.bytes_inter == record.bytes_sent and record.bytes_intra == 0
                assert record.ratio > 10
        assert result["total"].bytes_sent == sum(r.bytes_sent for r in result["records"])
        assert result["total"].dense_bytes == sum(r.dense_bytes for r in result["records"])


def pausing_bytes_worker(rank: int, world: int, resumed: bool) -> list[tuple[int, int]]:
    """A tensor that fills a bucket of its own pauses on all ranks in three steps, and comes back on one."""
    params = [torch.nn.Parameter(torch.ones(640)) for _ in range(2)]
    exchange = ExchangeOptions(block_size=64, bucket_mb=640 * 4 / 2**20)
    optimizer = OnebitAdam(params, freeze_step=2, exchange=exchange)
    seen = []
    for t in range(10):
        for index, p in enumerate(params):
            there = index or t not in (5, 6, 7, 8) or (t == 8 and rank == 1)
            p.grad = torch.full_like(p, 1.0 + rank + t) if there else None
        before = params[0].detach().clone()
        optimizer.step()
        record = optimizer.ledger.last
        assert record is not None and equal([before], [params[0]]) == (t in (5, 6, 7))
        seen.append((record.bytes_sent, record.collectives))
        if resumed:
            state, residuals = optimizer.state_dict(), optimizer.residual_state_dict()
            optimizer = OnebitAdam(params, freeze_step=2, exchange=exchange)
            optimizer.load_state_dict(state)
            optimizer.load_residual_state_dict(residuals)
    return seen


@pytest.mark.parametrize("resumed", [False, True])
def test_a_bucket_in_which_nothing_has_a_gradient_is_sent_once_and_then_no_more_until_one_has(resumed: bool) -> None:
    for seen in run_ranks(pausing_bytes_worker, 2, resumed):
        assert seen[2:] == [(seen[2][0], 4)] * 4 + [(seen[2][0] // 2, 2)] * 2 + [(seen[2][0], 4)] * 2


# ----- gradients that are missing ------------------------------------------------------------------------------------------------


def test_a_gradient_missing_on_one_rank_counts_as_zero() -> None:
    missing = frozenset({(1, 0, 0), (2, 1, 4), (6, 0, 0), (7, 1, 4), (7, 1, 0), (8, 0, 1)})
    run = Run(12, {"freeze_step": 5, "weight_decay": 0.1, "block_size": 32}, shapes=SMALL, missing=missing)
    results = run_ranks(train, 2, run)
    assert_compressed(results, 5, 7)
    assert_follows(results, run, run.oracle(2))


def idle_worker(rank: int, world: int, run: Run, bucket_mb: float) -> Any:
    params = run.parameters()
    optimizer = run.build(params, bucket_mb=bucket_mb)
    states = []
    for t in range(run.steps):
        run.put(params, t, rank)
        optimizer.step()
        states.append(state_of(optimizer, params))
    return {**states[-1], "states": states, "records": []}


@pytest.mark.parametrize("bucket_mb", [16.0, 0.0005])
def test_a_parameter_without_gradient_on_all_ranks_is_left_alone_exactly(bucket_mb: float) -> None:
    """x, m, v and residuals do not move by a bit: in the warm-up, in the first compressed step and later ones."""
    gone = {1: (0,), 4: (0, 1), 5: (0,), 8: (4,), 9: (0, 1, 2, 3, 4)}  # step -> tensors; the freeze is after step 3
    missing = frozenset((t, -1, l) for t, ls in gone.items() for l in ls)
    options = {"freeze_step": 4, "weight_decay": 0.1, "block_size": 32}
    run = Run(12, options, shapes=SMALL, missing=missing)
    results = run_ranks(idle_worker, 2, run, bucket_mb)
    sized = Run(12, {**options, "bucket_mb": bucket_mb}, shapes=SMALL, missing=missing)
    for t, ls in gone.items():
        for result in results:
            before, after = result["states"][t - 1], result["states"][t]
            for l in ls:
                assert equal(before["x"][l], after["x"][l]), f"weights of tensor {l} in step {t}"
                keys = set(before["state"].get(l, {})) & set(after["state"].get(l, {}))
                for key in keys:
                    assert equal(before["state"][l][key], after["state"][l][key]), f"{key} of tensor {l} in step {t}"
        if t > 4:
            pairs = [joined([r["states"][k] for r in results], sized) for k in (t - 1, t)]
            for l in ls:
                assert (pairs[0][1][l] == pairs[1][1][l]).all(), f"server residual of tensor {l} in step {t}"
                for i in range(2):
                    assert (pairs[0][0][i][l] == pairs[1][0][i][l]).all(), f"worker residual of tensor {l} in step {t}"
        others = [l for l in (0, 1, 3, 4) if l not in ls]
        for l in others:
            assert not equal(results[0]["states"][t - 1]["x"][l], results[0]["states"][t]["x"][l])
    # and what follows is what the oracle says
    assert_follows(results, sized, run.oracle(2))


def frozen_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    params[0].requires_grad_(False)
    optimizer = run.build(params)
    for t in range(run.steps):
        run.put(params, t, rank)
        params[0].grad = None
        if t == 2:
            params[1].requires_grad_(False)  # a parameter that had state and is frozen now
        if t >= 2:
            params[1].grad = None
        optimizer.step()
    assert optimizer.ledger.last is not None
    result = {**state_of(optimizer, params), "bytes": optimizer.ledger.last.dense_bytes}
    return result


def test_frozen_parameters_stay_and_cost_nothing() -> None:
    missing = frozenset({(t, -1, 0) for t in range(8)} | {(t, -1, 1) for t in range(2, 8)})
    run = Run(8, {"freeze_step": 4, "weight_decay": 0.1, "block_size": 32}, shapes=SMALL, missing=missing)
    simulated = run.oracle(2)
    for result in run_ranks(frozen_worker, 2, run):
        assert equal(result["x"][0], torch.from_numpy(run.start()[0])) and 0 not in result["state"]
        assert result["bytes"] == 4 * (7 + 1 + 200)
        for l in range(5):
            np.testing.assert_allclose(result["x"][l].numpy().ravel(), simulated.x[l], rtol=1e-6, atol=1e-6)


def thaw_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    params[4].requires_grad_(False)
    optimizer = run.build(params)
    for t in range(run.steps):
        if t == 2:
            params[4].requires_grad_(True)
        run.put(params, t, rank)
        optimizer.step()
    return {**state_of(optimizer, params), "records": []}


def test_a_parameter_unfrozen_in_the_warmup_joins_and_the_others_keep_their_state() -> None:
    run = Run(8, {"freeze_step": 5, "block_size": 32}, shapes=SMALL, missing=frozenset({(0, -1, 4), (1, -1, 4)}))
    assert_follows(run_ranks(thaw_worker, 2, run), run, run.oracle(2))


# ----- coordinates with (almost) no gradient -------------------------------------------------------------------------------------


def largest_moves(rank: int, world: int, run: Run) -> tuple[float, float]:
    """Largest |update| / lr of a compressed step, in the cold half and in the other."""
    params = run.parameters()
    optimizer = run.build(params)
    cold = torch.zeros(params[0].numel(), dtype=torch.bool)
    cold[-run.cold :] = True
    worst = [0.0, 0.0]
    for t in range(run.steps):
        run.put(params, t, rank)
        before = params[0].detach().clone()
        optimizer.step()
        if t >= run.options["freeze_step"]:
            moved = ((params[0].detach() - before).abs() / run.options["lr"]).view(-1)
            worst = [max(worst[0], moved[cold].max().item()), max(worst[1], moved[~cold].max().item())]
    return worst[0], worst[1]


def test_cold_and_nearly_cold_coordinates_stay_bounded() -> None:
    def worst(faint: float, phi: float, recipe: str = "published") -> tuple[float, float]:
        options = {"lr": 1e-3, "freeze_step": 10, "denominator_floor": phi, "recipe": recipe}
        run = Run(30, options, shapes=((64, 32),), cold=1024, faint=faint)
        return run_ranks(largest_moves, 2, run)[0]

    cold, warm = worst(faint=0.0, phi=0.01)
    assert cold < 3 * warm, "a coordinate without any gradient moves like its tensor's others"
    assert worst(faint=0.0, phi=0.0)[0] < 3 * warm, "phi = 0 keeps that half of the rule"
    nearly, _ = worst(faint=1e-6, phi=0.01)
    unbounded, _ = worst(faint=1e-6, phi=0.0)
    # noise of about one standard gradient over phi times one
    assert nearly < 200 < 1e4 < unbounded
    # noise of one's own size, whatever the denominator
    for faint in (0.0, 1e-6):
        assert all(worst(faint, phi, "default")[0] < 3 * warm for phi in (0.0, 0.01))


# ----- gradients that are not finite ---------------------------------------------------------------------------------------------


def broken_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    optimizer = run.build(params)
    unchanged, t_good = [], 0
    bad_steps = sorted({t for t, *_ in run.broken})
    for t in range(run.steps):
        if t in bad_steps:
            before, steps = state_of(optimizer, params), optimizer.steps
            run.put(params, t, rank)
            optimizer.step()
            assert optimizer.ledger.last is not None
            unchanged.append(
                equal(before, state_of(optimizer, params))
                and optimizer.steps == steps
                and optimizer.ledger.last.skipped == 1
            )
        else:
            run.put(params, t, rank)
            optimizer.step()
            t_good += 1
    return {
        **state_of(optimizer, params),
        "unchanged": unchanged,
        "skipped": optimizer.skipped_steps,
        "steps": optimizer.steps,
        "dense": optimizer.ledger.dense_steps,
        "records": [],
    }


def test_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing() -> None:
    """In the warm-up, right at the freeze and after it; skipped steps do not count towards freeze_step."""
    run = Run(
        14,
        {"freeze_step": 4, "weight_decay": 0.1, "block_size": 32},
        shapes=SMALL,
        broken=frozenset({(1, 1, 0), (5, 0, 4), (9, 1, 3), (10, 0, 1), (10, 1, 1)}),
    )
    results = run_ranks(broken_worker, 2, run)
    simulated = run.oracle(2)
    assert simulated.skipped == 4
    for result in results:
        assert result["unchanged"] == [True] * 4 and result["skipped"] == 4
        assert result["steps"] == 10 and result["dense"] == 4
    assert_follows(results, run, simulated)


def skips_worker(rank: int, world: int, phase: str) -> Any:
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = OnebitAdam([p])
    engine.MOST_SKIPS = 3  # in this process alone
    bad_steps = 0

    def step(bad: bool) -> None:
        p.grad = torch.ones(100)
        if bad and rank == 1:
            p.grad[7] = float("inf")
        optimizer.step()

    step(bad=False)
    if phase == "compressed":
        optimizer.freeze()
    for bad in (True, True, False, True, True):  # a good step between resets the count
        step(bad)
        bad_steps += bad
    try:
        step(bad=True)
    except FloatingPointError as error:
        return str(error), optimizer.skipped_steps
    return None


@pytest.mark.parametrize("phase", ["warmup", "compressed"])
def test_too_many_skips_in_a_row_raise_on_all_ranks(phase: str) -> None:
    for message, skipped in run_ranks(skips_worker, 2, phase):
        assert "3 steps in a row were skipped" in message and "the run has diverged" in message
        assert skipped == 5


# ----- ranks that do not run the same program --------------------------------------------------------------------------------------


def mismatch_worker(rank: int, world: int, kind: str) -> str | None:
    torch.manual_seed(0)
    odd = rank == 1
    shapes = [(4, 3), (5,)]
    options: dict[str, Any] = {"freeze_step": 3}
    if kind == "shape":
        shapes[1] = (6,) if odd else (5,)
    if kind == "order":
        shapes = shapes[::-1] if odd else shapes
    if kind == "count":
        shapes = shapes[:1] if odd else shapes
    params = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    if kind == "dtype" and odd:
        params[0] = torch.nn.Parameter(params[0].detach().bfloat16())
    if kind == "frozen":
        params[1].requires_grad_(not odd)
    if kind in ("block_size", "freeze_step", "lr", "betas", "weight_decay", "max_grad_norm", "bias_correction"):
        value = {
            "block_size": 64,
            "freeze_step": 4,
            "lr": 0.5,
            "betas": (0.5, 0.5),
            "weight_decay": 0.5,
            "max_grad_norm": 2.0,
            "bias_correction": False,
        }[kind]
        options |= {kind: value} if odd else {}
    groups: Any = params
    if kind == "compress":
        groups = [{"params": params[:1]}, {"params": params[1:], "compress": not odd}]
    optimizer = OnebitAdam(groups, **grouped(options))
    if kind == "name":
        names = ["a", "b" if odd else "c"]
        optimizer.configure_communication(None, parameter_names=dict(zip(params, names, strict=True)))
    for p in params:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except PlanMismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["(5,)", "(6,)", "parameter 1"]),
        ("order", ["(4, 3)", "(5,)"]),
        ("count", ["1 parameters", "2 parameters"]),
        ("dtype", ["torch.float32", "torch.bfloat16", "parameter 0"]),
        ("frozen", ["only rank 0", "parameter 1"]),
        ("block_size", ["block_size=2048", "block_size=64"]),
        ("freeze_step", ["freeze_step=3", "freeze_step=4"]),
        ("lr", ["lr=0.001", "lr=0.5"]),
        ("betas", ["betas=(0.9, 0.999)", "betas=(0.5, 0.5)"]),
        ("weight_decay", ["weight_decay=0.0", "weight_decay=0.5"]),
        ("max_grad_norm", ["max_grad_norm=None", "max_grad_norm=2.0"]),
        ("bias_correction", ["bias_correction=True", "bias_correction=False"]),
        ("compress", ["compress=True", "compress=False"]),
        ("name", ["[b:", "[c:"]),
    ],
)
def test_ranks_that_differ_raise_on_all_ranks_and_name_the_difference(kind: str, words: list[str]) -> None:
    messages = run_ranks(mismatch_worker, 3, kind, timeout=30)
    assert messages[0] is not None and len(set(messages)) == 1
    for word in ["rank 0", "rank 1", *words]:
        assert word in messages[0]


def test_equal_ranks_pass_the_handshake() -> None:
    assert run_ranks(mismatch_worker, 3, "nothing") == [None] * 3


# ----- clipping ------------------------------------------------------------------------------------------------------------------


def test_clipping_follows_the_oracle_in_dense_and_compressed_steps() -> None:
    """Norm of the averaged gradient in dense steps, ``sqrt((1/n) sum_i ||g_i||^2)`` in compressed ones."""
    options = {"freeze_step": 4, "max_grad_norm": 5.0, "block_size": 32, "betas": (0.9, 0.9)}
    run = Run(10, options, shapes=SMALL)
    results = run_ranks(train, 3, run)
    assert_follows(results, run, run.oracle(3))
    # the option takes effect: without it momentum is larger
    (free, *_) = run_ranks(train, 3, Run(10, {**options, "max_grad_norm": None}, shapes=SMALL))
    assert free["state"][0]["exp_avg"].norm() > 2 * results[0]["state"][0]["exp_avg"].norm()


def clip_worker(rank: int, world: int, run: Run, by_hand: bool) -> Any:
    params = run.parameters()
    optimizer = run.build(params, max_grad_norm=None if by_hand else 5.0)
    norms, rounds = [], 0
    for t in range(run.steps):
        run.put(params, t, rank)
        if by_hand:
            norms.append(optimizer.clip_grad_norm_(5.0).item())
        optimizer.step()
        assert optimizer.ledger.last is not None
        rounds += optimizer.ledger.last.control_collectives
    return state_of(optimizer, params), norms, rounds


def test_clip_grad_norm_is_the_option_called_by_hand_and_costs_no_second_round() -> None:
    run = Run(8, {"freeze_step": 4, "block_size": 32}, shapes=SMALL)
    by_hand, by_option = (run_ranks(clip_worker, 2, run, flag) for flag in (True, False))
    for (a, norms, rounds), (b, _, same_rounds) in zip(by_hand, by_option, strict=True):
        for x, y in zip(a["x"], b["x"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert rounds == same_rounds
        assert norms == by_hand[0][1], "all ranks see the same norm"
    for t, norm in enumerate(by_hand[0][1]):
        g = run.gradients(t, 2)
        if t < 4:
            expected = np.sqrt(sum(np.sum(((g[0][l] + g[1][l]) / 2) ** 2) for l in range(5)))
        else:
            expected = np.sqrt(sum(np.sum(a**2) for worker in g for a in worker if a is not None) / 2)
        assert norm == pytest.approx(expected, rel=1e-5)


def test_with_clipping_the_scale_of_the_gradients_does_not_matter() -> None:
    options = {"freeze_step": 4, "max_grad_norm": 0.5, "block_size": 32, "eps": 1e-12}
    ones, thousands = (run_ranks(train, 2, Run(8, options, shapes=SMALL, scale=s)) for s in (1.0, 1024.0))
    for a, b in zip(ones[0]["x"], thousands[0]["x"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_counts_averaged_and_local_gradients_once_each() -> None:
    """A compress=False group's gradients are averaged already; the norm mixes both kinds by the rule."""
    run = Run(8, {"freeze_step": 3, "max_grad_norm": 4.0, "block_size": 32}, shapes=SMALL)
    results = run_ranks(mixed_worker, 2, run)
    assert_follows(results, run, run.oracle(2, compressed=[True, True, True, True, False]), only=slice(None, 5))


def mixed_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    optimizer = run.build([{"params": params[:4]}, {"params": params[4:], "compress": False}])
    for t in range(run.steps):
        run.put(params, t, rank)
        optimizer.step()
    return {**state_of(optimizer, params), "residuals": {}}


# ----- real backward passes ------------------------------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(10, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)
    )


def batch(t: int, rank: int, part: int = 0, parts: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * t + rank)
    return torch.randn(12, 10, generator=generator).chunk(parts)[part]


def backward_worker(
    rank: int, world: int, how: str, parts: int, steps: int, freeze_step: int, overlap: str = "step"
) -> Any:
    model = network()
    params = list(model.parameters())
    optimizer = OnebitAdam(
        params,
        lr=0.01,
        freeze_step=freeze_step,
        exchange=ExchangeOptions(block_size=32, bucket_mb=0.002, overlap=overlap),
    )
    during, collectives = [], []
    for t in range(steps):
        optimizer.zero_grad(set_to_none=how != "kept")
        with counting() as counted:
            for part in range(parts):
                if how == "announced":
                    optimizer.begin_backward(sync=part == parts - 1)
                (model(batch(t, rank, part, parts)).square().mean() / parts).backward()
            during.append(len(counted.seen))
            if how == "synced":
                optimizer.sync_gradients()
                optimizer.sync_gradients()
        if how == "closure":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(batch(t, rank)).square().mean()  # noqa: B023  called at once
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        else:
            optimizer.step()
        assert optimizer.ledger.last is not None
        collectives.append(optimizer.ledger.last.collectives)
    return state_of(optimizer, params), during, collectives


def ddp_worker(rank: int, world: int, steps: int) -> list[Tensor]:
    model = torch.nn.parallel.DistributedDataParallel(network())
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for t in range(steps):
        adamw.zero_grad()
        model(batch(t, rank)).square().mean().backward()
        adamw.step()
    return [p.detach() for p in model.parameters()]


def test_warmup_equals_distributed_data_parallel_with_adamw() -> None:
    expected = run_ranks(ddp_worker, 3, 10)
    for how in ("announced", "plain"):
        ours = run_ranks(backward_worker, 3, how, 1, 10, 100)
        for (state, during, _), theirs in zip(ours, expected, strict=True):
            for x, y in zip(state["x"], theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
            if how == "announced":
                assert min(during) > 1, "dense averaging overlaps with backward"
            else:
                assert max(during) == 0, "nothing is sent before step() unless backward is announced"


@pytest.mark.parametrize("how", ["announced", "synced", "closure", "kept"])
def test_every_way_of_calling_gives_the_same_run(how: str) -> None:
    """Announced backward passes, an early (repeated) sync_gradients(), a closure, gradients kept by zero_grad: no bit differs."""
    (reference, *_), (ours, *_) = (run_ranks(backward_worker, 2, h, 1, 8, 4) for h in ("plain", how))
    assert equal(ours[0], reference[0])
    assert ours[2] == reference[2], "no collective more"


@pytest.mark.parametrize("how", ["announced", "plain"])
def test_accumulating_micro_batches_is_one_big_batch_and_one_exchange(how: str) -> None:
    whole, parts = (run_ranks(backward_worker, 2, how, k, 6, 3) for k in (1, 3))
    for (a, _, collectives), (b, _, same) in zip(whole, parts, strict=True):
        assert collectives == same
        for x, y in zip(a["x"], b["x"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["announced", "plain"])
def test_overlap_with_backward_gives_the_same_run_and_sends_while_backward_runs(how: str) -> None:
    (reference, *_), (ours, *_) = (
        run_ranks(backward_worker, 2, h, 2, 8, 4, o) for h, o in (("plain", "step"), (how, "backward"))
    )
    assert equal(ours[0], reference[0]) and ours[2] == reference[2]
    compressed = ours[1][4:]
    assert (min(compressed) >= 2) if how == "announced" else (max(compressed) == 0)


def waits_worker(rank: int, world: int) -> list[str]:
    """What a rank waits for in a compressed step, in order, with a mark where backward ends."""
    model = network()
    optimizer = OnebitAdam(
        model.parameters(), freeze_step=1, exchange=ExchangeOptions(overlap="backward", block_size=32, bucket_mb=0.002)
    )
    waits: list[str] = []
    wait = Pending.wait

    def recorded(pending: Pending) -> None:
        waits.append(pending._what)
        wait(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", recorded)
        for t in range(2):
            waits.clear()
            optimizer.zero_grad()
            optimizer.begin_backward()
            model(batch(t, rank)).square().mean().backward()
            waits.append("end of backward")
            optimizer.step()
    return waits


def test_overlap_with_backward_waits_for_no_result_before_backward_ends() -> None:
    for waits in run_ranks(waits_worker, 2):
        end = waits.index("end of backward")
        assert sum("round 1" in what for what in waits[:end]) >= 2, "several buckets leave during backward"
        assert not any("round 2" in what for what in waits[:end])
        assert sum("round 2" in what for what in waits[end:]) == sum("round 1" in what for what in waits)


def overlap_broken_worker(rank: int, world: int) -> tuple[int, int]:
    params = list(network().parameters())
    optimizer = OnebitAdam(params, freeze_step=1, exchange=ExchangeOptions(overlap="backward", block_size=32))
    for t in range(3):
        optimizer.zero_grad()
        optimizer.begin_backward()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        (loss * (float("nan") if t == 2 and rank == 1 else 1.0)).backward()
        before = [p.detach().clone() for p in params]
        optimizer.step()
        assert equal(before, params) == (t == 2)
    return optimizer.steps, optimizer.skipped_steps


def test_overlap_with_backward_skips_a_broken_step_on_all_ranks() -> None:
    assert run_ranks(overlap_broken_worker, 2) == [(2, 1)] * 2


def test_overlap_with_backward_excludes_clipping() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 needs all gradients .* overlap='backward'"):
        OnebitAdam([p], max_grad_norm=1.0, exchange=ExchangeOptions(overlap="backward"))
    with pytest.raises(ValueError, match="overlap='backward' sends them as they come"):
        OnebitAdam([p], exchange=ExchangeOptions(overlap="backward")).clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match=r"clipping by value \(to 0\.5\) has no effect with overlap='backward'"):
        OnebitAdam([p], exchange=ExchangeOptions(overlap="backward")).check_clipping_by_value(0.5)
    OnebitAdam([p]).check_clipping_by_value(0.5)


def early_dense_worker(rank: int, world: int, overlap: str, missing: bool) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(40, generator=draw)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "compress": False}]
    optimizer = OnebitAdam(
        groups, lr=0.01, freeze_step=2, exchange=ExchangeOptions(block_size=32, overlap=overlap, timeout=20.0)
    )
    mine = torch.Generator().manual_seed(10 + rank)
    for t in range(6):
        factors = torch.randn(3, 40, generator=mine)
        optimizer.zero_grad()
        optimizer.begin_backward()
        # gradients land in the order 1, 0, 2 or 0, 2
        taken = [i for i in (2, 0, 1) if not (missing and t == 4 and i == 1 and rank == 0)]
        torch.stack([(params[i] * factors[i]).sum() for i in taken]).sum().backward()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("missing", [False, True])
def test_overlap_with_backward_and_a_dense_group_issue_collectives_in_one_order(missing: bool) -> None:
    for overlap in ("step", "backward"):
        first, second = run_ranks(early_dense_worker, 2, overlap, missing)
        assert equal(first, second)


def second_backward_worker(rank: int, world: int) -> list[str]:
    """Two backwards of one step; a backward whose step is left out; gradients that land twice in one backward."""
    said = []
    for what in ("two", "left out", "twice"):
        model = network()
        optimizer = OnebitAdam(
            model.parameters(), freeze_step=1, exchange=ExchangeOptions(overlap="backward", block_size=32)
        )

        def backward(t: int, optimizer: Any = optimizer, model: Any = model) -> None:
            optimizer.begin_backward()
            model(batch(t, rank)).square().mean().backward()

        for t in range(3):
            optimizer.zero_grad()
            backward(t)
            optimizer.step()
        backward(3)
        with pytest.raises(RuntimeError) as caught:
            if what == "twice":
                model(batch(3, rank)).square().mean().backward()
            elif what == "left out":
                optimizer.zero_grad()
                backward(4)
            else:
                backward(3)
        said.append(str(caught.value))
        optimizer.release_communication()
    return said


def test_overlap_with_backward_sends_gradients_once_per_step() -> None:
    for two, left_out, twice in run_ranks(second_backward_worker, 2):
        assert two == left_out and "step 4" in two and "overlap='step'" in two and "sync_grad=False" in two
        assert "received a gradient after its bucket was sent" in twice and "use_reentrant=False" in twice


def sync_worker(rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.zeros(50))
    optimizer = OnebitAdam([p], freeze_step=2)
    seen = []
    for t in range(4):
        p.grad = torch.full((50,), float(rank + t))
        with counting() as counted:
            optimizer.sync_gradients()
            optimizer.sync_gradients()
            seen.append((p.grad[0].item(), len(counted.of("all_reduce"))))
        optimizer.step()
    return seen


def test_sync_gradients_averages_once_and_only_what_the_next_step_needs_averaged() -> None:
    assert run_ranks(sync_worker, 2) == [
        [(0.5, 1), (1.5, 1), (2.0, 0), (3.0, 0)],
        [(0.5, 1), (1.5, 1), (3.0, 0), (4.0, 0)],
    ]


# ----- groups and schedules ------------------------------------------------------------------------------------------------------


def groups_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    groups = [
        {"params": params[:1], "lr": 0.02, "weight_decay": 0.1},
        {"params": params[1:4], "betas": (0.7, 0.9), "eps": 1e-4},
        {"params": params[4:], "compress": False, "weight_decay": 0.2},
    ]
    optimizer = run.build(groups)
    sent, records = [], []
    for t in range(run.steps):
        run.put(params, t, rank)
        with counting() as counted:
            optimizer.step()
        sent.append(counted)
        records.append(optimizer.ledger.last)
    return {**state_of(optimizer, params), "sent": sent, "records": records}


def test_groups_have_their_own_settings_and_compress_false_stays_dense() -> None:
    run = Run(12, {"freeze_step": 4, "block_size": 32}, shapes=SMALL)
    results = run_ranks(groups_worker, 2, run)
    first, second, last = slice(0, 1), slice(1, 4), slice(4, 5)
    assert_follows(results, run, run.oracle(2, first, lr=0.02, wd=0.1), only=first, lr=0.02)
    assert_follows(results, run, run.oracle(2, second, b1=0.7, b2=0.9, eps=1e-4), only=second)
    dense = run.oracle(2, last, wd=0.2, compressed=[False])
    assert_follows(results, run, dense, only=last)
    (
        np.testing.assert_allclose(results[0]["state"][4]["exp_avg_sq"], dense.v[0], rtol=1e-5),
        "v of a dense group keeps learning",
    )
    for result in results:
        for t in (4, 11):
            sent, record = result["sent"][t], result["records"][t]
            (reduced,) = sent.of("all_reduce")
            assert reduced.input_bytes == 4 * (200 + 1), "the dense group and its presence, nothing else"
            assert not record.dense and record.bytes_sent + record.control_bytes == sent.bytes_sent


def add_group_worker(rank: int, world: int, run: Run, when: int) -> Any:
    params = run.parameters()
    optimizer = run.build(params[:4])
    for t in range(run.steps):
        if t == when:
            optimizer.add_param_group({"params": params[4:], "lr": 0.02})
        run.put(params, t, rank)
        optimizer.step()
    return {**state_of(optimizer, params), "records": []}


@pytest.mark.parametrize("when", [0, 2])
def test_add_param_group_in_the_warmup_keeps_the_state_of_the_others(when: int) -> None:
    missing = frozenset((t, -1, 4) for t in range(when))
    run = Run(10, {"freeze_step": 5, "block_size": 32, "weight_decay": 0.1}, shapes=SMALL, missing=missing)
    results = run_ranks(add_group_worker, 2, run, when)
    assert_follows(results, run, run.oracle(2, slice(0, 4)), only=slice(0, 4))
    assert_follows(results, run, run.oracle(2, slice(4, 5), lr=0.02), only=slice(4, 5), lr=0.02)


def late_group_worker(rank: int, world: int, run: Run, given: dict[str, Any]) -> Any:
    params = run.parameters()
    optimizer = run.build(params[:4])
    for t in range(run.steps):
        if t == 6:
            optimizer.add_param_group({"params": params[4:], **given})
        run.put(params, t, rank)
        optimizer.step()
    return {**state_of(optimizer, params), "records": []}


@pytest.mark.parametrize("given", [{"compress": False}, {}], ids=str)
def test_a_group_that_is_added_after_the_freeze_is_dense_at_first(given: dict[str, Any]) -> None:
    """Those that are to be compressed for as many steps as the run has taken (see test_late_gradients)."""
    options = {"freeze_step": 4, "block_size": 32, "refresh": "never"}
    run = Run(12, options, shapes=SMALL, missing=frozenset((t, -1, 4) for t in range(6)))
    results = run_ranks(late_group_worker, 2, run, given)
    assert_follows(results, run, run.oracle(2, slice(0, 4)), only=slice(0, 4))
    assert_follows(results, run, run.oracle(2, slice(4, 5), compressed=[False]), only=slice(4, 5))


def schedule_worker(rank: int, world: int, run: Run) -> Any:
    params = run.parameters()
    optimizer = run.build(params)
    assert run.lrs is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: run.lrs[min(t, run.steps - 1)] / 0.01)
    for t in range(run.steps):
        run.put(params, t, rank)
        optimizer.step()
        scheduler.step()
    return {**state_of(optimizer, params), "records": []}


def test_lr_schedulers_work_across_the_freeze() -> None:
    lrs = (0.0, 0.01, 0.02, 0.03, 0.02, 0.01, 0.005, 0.0, 0.01, 0.001)
    run = Run(10, {"lr": 0.01, "freeze_step": 4, "weight_decay": 0.1, "block_size": 32}, shapes=SMALL, lrs=lrs)
    assert_follows(run_ranks(schedule_worker, 2, run), run, run.oracle(2))


def test_one_cycle_may_change_betas_too() -> None:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = OnebitAdam([p], lr=0.1, freeze_step=3, exchange=ExchangeOptions(_alone=True))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for _ in range(8):
        p.grad = torch.ones(40)
        optimizer.step()
        scheduler.step() if optimizer.steps < 8 else None
    assert optimizer.ledger.compressed_steps == 5 and (p < 1).all()
    assert optimizer.param_groups[0]["betas"][0] != 0.9


# ----- state_dict ----------------------------------------------------------------------------------------------------------------


def resume_worker(rank: int, world: int, run: Run, at: int, path: str) -> Any:
    """Trains through, and once more with a save and load in new objects after ``at`` steps. The last tensor stays dense."""

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:4]}, {"params": params[4:], "compress": False, "weight_decay": 0.2}]

    params = run.parameters()
    optimizer = run.build(groups(params))
    for t in range(run.steps):
        if t == at:
            saved = {"o": optimizer.state_dict(), "x": params, "r": optimizer.residual_state_dict()}
            torch.save(saved, f"{path}/{rank}.pt")
        run.put(params, t, rank)
        optimizer.step()
    through = state_of(optimizer, params)
    saved = torch.load(f"{path}/{rank}.pt", weights_only=True)
    params = [torch.nn.Parameter(p.detach().clone()) for p in saved["x"]]
    optimizer = run.build(groups(params), lr=77.0)
    optimizer.load_state_dict(saved["o"])
    assert optimizer.steps == at and [g["lr"] for g in optimizer.param_groups] == [run.options["lr"]] * 2
    optimizer.load_residual_state_dict(saved["r"])
    loaded = {"o": optimizer.state_dict()["state"], "phase": optimizer.phase, "same": saved["o"]["state"]}
    for t in range(at, run.steps):
        run.put(params, t, rank)
        optimizer.step()
    return through, state_of(optimizer, params), loaded, optimizer.ledger.steps, optimizer.ledger.total.bytes_sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_saved_state_continues_bit_for_bit(at: int, dtype: torch.dtype, tmp_path: Any) -> None:
    """In the warm-up, at the freeze and after it; saved with torch.save and read with weights_only."""
    options = {"lr": 0.01, "freeze_step": 4, "weight_decay": 0.1, "block_size": 32}
    run = Run(12, options, shapes=SMALL, dtype=dtype)
    for through, resumed, loaded, steps, sent in run_ranks(resume_worker, 2, run, at, str(tmp_path)):
        assert equal(loaded["o"], loaded["same"]), "loading and saving changes nothing"
        assert loaded["phase"] is (Phase.WARMUP if at < 4 else Phase.COMPRESSED)
        assert equal(through, resumed)
        assert steps == 12 and sent > 0


def test_warmup_state_goes_to_torch_adamw_and_back() -> None:
    def parameters() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.from_numpy(a)) for a in Run(0, shapes=SMALL).start()]

    def train_on(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], first: int, last: int) -> None:
        for t in range(first, last):
            Run(0, shapes=SMALL).put(params, t, 0)
            optimizer.step()

    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    reference = parameters()
    train_on(torch.optim.AdamW(reference, **settings), reference, 0, 9)
    params = parameters()
    optimizer: torch.optim.Optimizer = OnebitAdam(params, **settings)
    train_on(optimizer, params, 0, 3)
    for kind, first in ((torch.optim.AdamW, 3), (OnebitAdam, 6)):
        following = kind(params, lr=0.5)
        following.load_state_dict(optimizer.state_dict())
        optimizer = following
        train_on(optimizer, params, first, first + 3)
    assert isinstance(optimizer, OnebitAdam) and optimizer.steps == 9
    for a, b in zip(params, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert set(optimizer.param_groups[0]) == {"params", "lr", "betas", "eps", "weight_decay", "compress"}


def test_state_of_the_compressed_stage_is_read_by_torch_adamw() -> None:
    """Floored second moments and the momentum: a plain AdamW goes on without exploding, cold coordinates included."""
    run = Run(10, {"lr": 0.01, "freeze_step": 5, "_alone": True, "block_size": 32}, shapes=((64, 8),), cold=256)
    params = run.parameters()
    optimizer = run.build(params)
    for t in range(10):
        run.put(params, t, 0)
        optimizer.step()
    adamw = torch.optim.AdamW(params, lr=0.01)
    adamw.load_state_dict(optimizer.state_dict())
    assert (adamw.state[params[0]]["exp_avg_sq"] > 0).all()
    before = params[0].detach().clone()
    run.put(params, 10, 0)
    adamw.step()
    assert (params[0] - before).abs().max() < 0.1


def test_load_state_dict_refuses_what_it_cannot_read() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = OnebitAdam([p])
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="'onebit_lamb' cannot be loaded into 'onebit_adam'"):
        optimizer.load_state_dict({**state, "onebit": {**state["onebit"], "algorithm": "onebit_lamb"}})
    with pytest.raises(ValueError, match="newer than this release"):
        optimizer.load_state_dict({**state, "onebit": {**state["onebit"], "version": 10**6}})
    with pytest.raises(ValueError, match="group"):
        OnebitAdam([p, torch.nn.Parameter(torch.ones(2))]).load_state_dict(state)


# ----- who takes part ------------------------------------------------------------------------------------------------------------


def subgroup_worker(rank: int, world: int, run: Run) -> Any:
    group = dist.new_group([0, 2])
    params = run.parameters()
    if rank == 1:
        with pytest.raises(TypeError, match="that this process is a member of"):
            run.build(params, process_group=group)
        return None
    optimizer = run.build(params, process_group=group)
    for t in range(run.steps):
        run.put(params, t, rank // 2)
        optimizer.step()
    return {**state_of(optimizer, params), "records": []}


def test_a_process_group_trains_without_the_ranks_outside_it() -> None:
    run = Run(8, {"freeze_step": 4, "block_size": 32}, shapes=SMALL)
    first, outside, second = run_ranks(subgroup_worker, 3, run)
    assert outside is None
    assert_follows([first, second], run, run.oracle(2))


def single(run: Run, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], OnebitAdam]:
    params = run.parameters()
    optimizer = OnebitAdam(params, **grouped(options))
    for t in range(run.steps):
        run.put(params, t, 0)
        optimizer.step()
    return params, optimizer


def test_a_single_process_is_plain_adamw_even_after_the_freeze() -> None:
    run = Run(10, {"lr": 0.01, "weight_decay": 0.1})
    params, optimizer = single(run, {**run.options, "freeze_step": 4})
    assert optimizer.phase is Phase.COMPRESSED and optimizer.next_step_is_dense and not optimizer.compresses
    assert optimizer.ledger.compressed_steps == 0 and optimizer.ledger.total.bytes_sent == 0
    reference = run.parameters()
    adamw = torch.optim.AdamW(reference, **run.options)
    for t in range(10):
        run.put(reference, t, 0)
        adamw.step()
    for a, b in zip(params, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("connected", [False, True])
def test_a_world_of_one_compresses_where_measurements_want_it(connected: bool) -> None:
    run = Run(12, {"lr": 0.01, "freeze_step": 4, "_alone": True, "block_size": 32}, shapes=SMALL)
    if connected:
        results = run_ranks(train, 1, run)
    else:
        params, optimizer = single(run, run.options)
        assert optimizer.ledger.compressed_steps == 8
        results = [{**state_of(optimizer, params)}]
    assert (results[0]["residuals"]["worker_residual"] != 0).any(), "something was compressed"
    assert_follows(results, run, run.oracle(1))


# ----- other memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_fp32_masters_and_state(dtype: torch.dtype) -> None:
    # multiples of 1/4: their average over two ranks is exact in either format
    run = Run(
        12,
        {"lr": 1e-3, "freeze_step": 5, "weight_decay": 0.1, "block_size": 32},
        shapes=SMALL,
        dtype=dtype,
        quantum=0.25,
    )
    results = run_ranks(train, 2, run)
    simulated = run.oracle(2)
    assert_compressed(results, 5, 7)
    for result in results:
        for l, x in enumerate(result["x"]):
            assert x.dtype == dtype
            if not x.numel():
                continue
            state = result["state"][l]
            assert all(state[k].dtype == torch.float32 for k in ("master", "exp_avg", "exp_avg_sq"))
            assert equal(state["master"].to(dtype), x), "the weights are the rounded masters"
        masters = {**result, "x": [result["state"].get(l, {}).get("master", x) for l, x in enumerate(result["x"])]}
        assert_follows([masters], run, simulated, only=slice(0, 5, None))
    moved = (results[0]["state"][4]["master"] - torch.from_numpy(run.start()[4])).abs()
    assert (moved > 0).all(), "steps too small for 16 bits are kept in the masters"


def test_residuals_in_bfloat16_take_half_the_memory_and_stay_near_the_run_in_fp32() -> None:
    options = {"lr": 1e-3, "freeze_step": 5, "block_size": 32, "refresh": "never"}
    runs = [Run(30, {**options, "state_dtype": d}, shapes=SMALL) for d in ("float32", "bfloat16")]
    exact, short = (run_ranks(train, 2, run) for run in runs)
    assert_compressed(short, 5, 25)
    for result in short:
        assert {r.dtype for r in result["residuals"].values()} == {torch.bfloat16}
        assert equal(result["x"], short[0]["x"])
    moved = [(a - torch.from_numpy(x)).norm() for a, x in zip(exact[0]["x"], runs[0].start(), strict=True)]
    for l, (a, b) in enumerate(zip(exact[0]["x"], short[0]["x"], strict=True)):
        assert l in (2, 3) or 0 < (a - b).norm() < 0.25 * moved[l], "some signs turn, the direction does not"


def channels_last_worker(rank: int, world: int, run: Run) -> Any:
    """NHWC arrays seen as NCHW parameters: memory order is that of the run."""
    params = [torch.nn.Parameter(torch.from_numpy(a).permute(0, 3, 1, 2)) for a in run.start()]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in params)
    optimizer = run.build(params)
    for t in range(run.steps):
        for l, p in enumerate(params):
            g = run.gradient(t, rank, l)
            assert g is not None
            p.grad = torch.from_numpy(g).permute(0, 3, 1, 2)
            if rank == 0:
                p.grad = p.grad.contiguous()  # another memory order than the parameter's
        optimizer.step()
    state = state_of(optimizer, params)
    assert all(s["exp_avg"].stride() == p.stride() for s, p in zip(state["state"].values(), params, strict=True))
    back = {l: {"exp_avg": s["exp_avg"].permute(0, 2, 3, 1).contiguous()} for l, s in state["state"].items()}
    return {
        "x": [x.permute(0, 2, 3, 1).contiguous() for x in state["x"]],
        "state": back,
        "residuals": state["residuals"],
    }


def test_channels_last_parameters_keep_their_strides() -> None:
    run = Run(10, {"freeze_step": 4, "weight_decay": 0.1, "block_size": 32}, shapes=((4, 5, 3, 6), (2, 3, 3, 2)))
    assert_follows(run_ranks(channels_last_worker, 2, run), run, run.oracle(2))


# ----- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0"),
        ({"lr": float("nan")}, ValueError, "lr=nan"),
        ({"lr": "fast"}, TypeError, "lr='fast'"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]=-0.1"),
        ({"betas": 0.9}, TypeError, "betas=0.9 must be a pair"),
        ({"betas": (0.9,)}, TypeError, "must be a pair"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
        ({"freeze_step": 0}, ValueError, "freeze_step=0 .* at least 1"),
        ({"freeze_step": -3}, ValueError, "freeze_step=-3"),
        ({"freeze_step": 2.5}, TypeError, "freeze_step=2.5 must be an integer"),
        ({"freeze_step": True}, TypeError, "freeze_step=True"),
        ({"bias_correction": "no"}, TypeError, "bias_correction='no' must be True or False"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm=0"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1'"),
        ({"denominator_floor": -0.1}, ValueError, "denominator_floor=-0.1"),
        ({"denominator_floor": 1.5}, ValueError, "denominator_floor=1.5"),
        ({"recipe": "paper"}, ValueError, "recipe='paper' is unknown; choose one of 'default', 'published'"),
        ({"recipe": "published", "refresh": 16}, ValueError, "refresh=16 has no effect with recipe='published'"),
        ({"refresh": 0}, ValueError, "refresh=0 .* at least 1"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OnebitAdam([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0"),
        ({"betas": (2, 0)}, ValueError, "betas"),
        ({"compress": "no"}, TypeError, "compress='no' must be True or False"),
        ({"weight_decay": None}, TypeError, "weight_decay=None"),
    ],
)
def test_bad_options_of_a_group_are_named_with_their_value(
    group: dict[str, Any], error: type[Exception], words: str
) -> None:
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(error, match=words):
        OnebitAdam([{"params": [p], **group}])
    optimizer = OnebitAdam([p])
    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": [q], **group})
    assert len(optimizer.param_groups) == 1, "a refused group is not kept"


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, dtype=torch.complex64), "complex"),
        (torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3, 3).to_sparse(), "sparse"),
    ],
)
def test_parameters_it_cannot_train_are_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        OnebitAdam([torch.nn.Parameter(tensor)])


def test_parameters_with_holes_in_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) has strides \(4, 1\)"):
        OnebitAdam([torch.nn.Parameter(torch.ones(3, 4)[:, :2])])


def sparse_worker(rank: int, world: int, announced: bool) -> str:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = OnebitAdam(embedding.parameters())
    if announced:
        optimizer.begin_backward()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(("world", "announced"), [(1, False), (2, False), (2, True)])
def test_sparse_gradients_are_refused_by_name(world: int, announced: bool) -> None:
    for message in run_ranks(sparse_worker, world, announced):
        assert "parameter 0 has a sparse gradient" in message and "sparse=False" in message


def test_a_residual_begins_with_the_freeze() -> None:
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = OnebitAdam([p], betas=(0.9, 0.5), exchange=ExchangeOptions(_alone=True))
    for _ in range(2):
        p.grad = torch.full((100,), 2.0)
        optimizer.step()
    assert optimizer.residual_ratio() == 0.0
    optimizer.freeze()
    p.grad = torch.randn(100)
    optimizer.step()
    assert optimizer.residual_ratio() > 0


# ----- refreshes -----------------------------------------------------------------------------------------------------------------

#: refreshes at steps 22 and 38
REFRESHED = {"lr": 1e-2, "weight_decay": 0.1, "freeze_step": 6, "betas": (0.9, 0.98)}
DENSE = [t < 6 or t in (21, 37) for t in range(41)]


def refreshed_run(idle: int | None = None, **options: Any) -> Run:
    # tensor 1 without a gradient on one rank in the first refresh, tensor 3 on all, nor 1 in the second; rank 1 broken before that; in
    # step ``idle`` there is no gradient at all
    missing = frozenset({(21, 0, 1), (21, -1, 3), (38, -1, 1), *((idle, -1, l) for l in range(len(SHAPES)) if idle)})
    return Run(42, {**REFRESHED, **options}, cold=64 * 33 // 2, missing=missing, broken=frozenset({(30, 1, 0)}))


@pytest.mark.parametrize(("world", "seed", "bias_correction"), [(2, 7, False), (3, 1, True)])
def test_refreshes_follow_the_oracle(world: int, seed: int, bias_correction: bool) -> None:
    """Two refreshes, with missing gradients in both and a skipped step between them, clipped, over several buckets."""
    options = {"block_size": 64, "bucket_mb": 0.02, "max_grad_norm": 40.0}
    run = refreshed_run(bias_correction=bias_correction, **options)
    run = replace(run, seed=seed)
    results = run_ranks(train, world, run)
    simulated = run.oracle(world)
    for result in results:
        assert [r.dense for r in result["records"] if not r.skipped] == DENSE == simulated.dense_steps
        assert [r.skipped for r in result["records"]] == [t == 30 for t in range(42)]
    assert_follows(results, run, simulated)
    for l, (v, k) in enumerate(zip(simulated.v_D, simulated.k_D, strict=True)):
        r = results[0]["state"][l]["reciprocal_denominator"].numpy().ravel()
        vhat = v / (1 - 0.98**k) if bias_correction else v
        expected = 1 / (np.sqrt(vhat) + 1e-8) if v.any() else np.zeros_like(v)
        np.testing.assert_allclose(r, expected, rtol=1e-5)


def refreshed_worker(rank: int, world: int, cuts: Sequence[int], recipe: str) -> Any:
    """A run with refreshes, and the same run continued in a new optimizer after each of ``cuts`` steps."""
    # in the second refresh there is no gradient
    run = refreshed_run(38, block_size=32, bucket_mb=0.02, recipe=recipe)

    def go(params: list[torch.nn.Parameter], optimizer: OnebitAdam, first: int, saves: Sequence[int] = ()) -> Any:
        saved = {}
        for t in range(first, run.steps):
            if t in saves:
                residuals = optimizer.residual_state_dict()
                tensors = {k: v.clone() for k, v in residuals["tensors"].items()}
                weights = [p.detach().clone() for p in params]
                saved[t] = (weights, copy.deepcopy(optimizer.state_dict()), {**residuals, "tensors": tensors})
            run.put(params, t, rank)
            optimizer.step()
        return state_of(optimizer, params), saved

    params = run.parameters()
    whole, saved = go(params, run.build(params), 0, cuts)
    continued = []
    for t, (weights, state, residuals) in saved.items():
        params = [torch.nn.Parameter(w) for w in weights]
        optimizer = run.build(params)
        optimizer.load_state_dict(state)
        optimizer.load_residual_state_dict(residuals)
        continued.append((t, go(params, optimizer, t)[0]))
    return whole, continued


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_a_run_resumed_around_refreshes_is_the_run_that_was_not_interrupted(recipe: str) -> None:
    """Bit for bit: before and after the first refresh, after the skipped step, before and after a refresh without any gradient.

    By the published recipe these steps are compressed ones.
    """
    results = run_ranks(refreshed_worker, 2, [8, 21, 22, 31, 38, 39], recipe)
    for whole, continued in results:
        assert len(continued) == 6
        for t, state in continued:
            assert equal(state, whole), f"resumed after {t} steps"
    assert equal(results[0][0]["x"], results[1][0]["x"]), "replicas are bitwise equal"


def test_a_run_resumed_without_refreshes_has_none() -> None:
    """And with them again, the one that was due meanwhile."""
    options = {**REFRESHED, "_alone": True, "block_size": 32}
    p = torch.nn.Parameter(torch.zeros(64))

    def steps(optimizer: OnebitAdam, count: int) -> list[bool]:
        kinds = []
        for _ in range(count):
            p.grad = torch.linspace(-1, 1, 64)
            optimizer.step()
            assert optimizer.ledger.last is not None
            kinds.append(optimizer.ledger.last.dense)
        return kinds

    def resumed(saved: OnebitAdam, **differing: Any) -> OnebitAdam:
        optimizer = OnebitAdam([p], **grouped(options, **differing))
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        optimizer.load_residual_state_dict(saved.residual_state_dict())
        return optimizer

    optimizer = OnebitAdam([p], **grouped(options))
    assert steps(optimizer, 20) == DENSE[:20]
    without = resumed(optimizer, refresh="never")
    assert steps(without, 5) == [False] * 5
    assert steps(resumed(without), 5) == [True] + [False] * 4
    assert p.isfinite().all()


def overlapped_refresh_worker(rank: int, world: int, overlap: str) -> Any:
    model = network()
    params = list(model.parameters())
    optimizer = OnebitAdam(
        params, exchange=ExchangeOptions(block_size=32, bucket_mb=0.002, overlap=overlap), **REFRESHED
    )
    kinds = []
    for t in range(24):
        optimizer.zero_grad()
        optimizer.begin_backward()
        model(batch(t, rank)).square().mean().backward()
        optimizer.step()
        assert optimizer.ledger.last is not None
        kinds.append(optimizer.ledger.last.dense)
    return state_of(optimizer, params), kinds


def test_refreshes_go_together_with_overlap() -> None:
    step, backward = (run_ranks(overlapped_refresh_worker, 2, overlap) for overlap in ("step", "backward"))
    assert equal(step[0], backward[0])
    assert step[0][1] == DENSE[:24]


def test_a_refresh_lets_denominators_follow_gradients_that_shrink() -> None:
    """After the freeze gradients shrink tenfold: without refreshes denominators stay, with them they end close to the gradients."""

    def denominators(steps: int, **options: Any) -> Tensor:
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = OnebitAdam(
            [p],
            lr=1e-3,
            betas=(0.9, 0.9),
            freeze_step=5,
            exchange=ExchangeOptions(_alone=True, block_size=32, state_dtype="float32"),
            **options,
        )
        for t in range(steps):
            p.grad = torch.full((64,), 1.0 if t < 5 else 0.1)
            optimizer.step()
        return 1 / whole_state(optimizer)["state"][0]["reciprocal_denominator"]

    torch.testing.assert_close(denominators(300, refresh="never"), torch.ones(64))
    halfway, refreshed = denominators(150), denominators(1500)
    assert ((refreshed < halfway) & (halfway < 0.9) & (refreshed > 0.1) & (refreshed < 0.2)).all()


def test_a_number_on_its_way_to_the_host_is_what_it_was() -> None:
    value = torch.full((), 3.0)
    download = Download(value)
    value.add_(1.0)
    assert download.read() == 3.0


def test_an_unknown_refresh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"refresh='often' is unknown; choose"):
        OnebitAdam([torch.nn.Parameter(torch.ones(3))], refresh="often")  # type: ignore[arg-type]


def test_a_refresh_leaves_what_has_no_gradient_in_it_bit_for_bit() -> None:
    p, q = (torch.nn.Parameter(torch.zeros(100)) for _ in range(2))
    optimizer = OnebitAdam([p, q], exchange=ExchangeOptions(_alone=True, block_size=32), **REFRESHED)
    generator = torch.Generator().manual_seed(3)
    for _ in range(21):
        p.grad, q.grad = torch.randn(100, generator=generator), torch.randn(100, generator=generator)
        optimizer.step()
    assert optimizer.next_step_is_dense
    before = copy.deepcopy(whole_state(optimizer)["state"])
    p.grad, q.grad = torch.randn(100, generator=generator), None
    optimizer.step()
    after = whole_state(optimizer)["state"]
    assert after[1].keys() == before[1].keys() and not optimizer.next_step_is_dense
    for name in before[1]:
        assert torch.equal(before[1][name], after[1][name]), name
        assert not torch.equal(before[0][name], after[0][name]), name
