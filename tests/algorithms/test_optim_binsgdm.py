"""BinSGDM: against the oracle with the library's own draws, the statistics of those draws, and coordinates that no rank has seen."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import SMALL, Problem, close, equal, run_world, snapshot, train
from oracle.binsgdm import share

from lightning_onebit.algorithms.binsgdm import BinSGDM
from lightning_onebit.comm import plan_buckets
from lightning_onebit.engine import ExchangeOptions, Phase
from lightning_onebit.kernels import Packed, counter_rng, get_backend
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, draw_hash, draw_key
from lightning_onebit.kernels.reference import pack_bits, unpack_bits

CPU = torch.device("cpu")
SHAPES = ((20, 33), (7,), (0,), (1,), (300,))


@dataclass(frozen=True)
class Sparse(Problem):
    """Part of the first tensor has a gradient in four steps from ``late`` on, and on rank 1 only."""

    late: int = 5
    algorithm: str = "binsgdm"

    def gradient(self, t: int, rank: int, l: int) -> np.ndarray | None:
        g = super().gradient(t, rank, l)
        if g is not None and l == 0 and (not self.late <= t + 1 < self.late + 4 or rank != 1):
            g.reshape(-1)[300:400] = 0.0
        return g

    def plan(self, world: int) -> Any:
        sizes = [int(np.prod(s)) for s in self.shapes]
        elements = int(self.options.get("bucket_mb", 16.0) * 2**20 / 4)
        size = self.options.get("block_size", 2048)
        return plan_buckets(sizes, block_size=size, world_size=world, bucket_elements=elements, device=CPU)

    def uniform(self, world: int) -> Any:
        """The library's draws, for the oracle."""
        plan, size = self.plan(world), self.options.get("block_size", 2048)
        seed = self.options.get("seed", 0)

        def draws(t: int, who: int | str, l: int) -> np.ndarray:
            numel = int(np.prod(self.shapes[l]))
            stream = (0, SERVER_STREAM) if who == "server" else (int(who), WORKER_STREAM)
            blocks = -(-numel // size)
            h = counter_rng.draw_hash(
                draw_key(seed, t, *stream, self.options.get("recipe") != "published"),
                plan.starts[l] // size,
                blocks,
                size,
                CPU,
            )
            return counter_rng.uniform(h).numpy().ravel()[:numel].astype(np.float64)

        return draws


def sparse(steps: int = 18, **options: Any) -> Sparse:
    """Of 18 steps bitmaps merge at 1, 2, 4, 8 and 16; gradients are missing here and there."""
    missing = frozenset({(2, 0, 0), (3, -1, 4), (7, 1, 1), (8, -1, 0)})
    settings = {"lr": 0.01, "weight_decay": 0.1, "block_size": 64, "bucket_mb": 0.0012, **options}
    return Sparse(steps, settings, shapes=SHAPES, cold=100, missing=missing, seed=2)


@pytest.mark.parametrize(
    ("recipe", "world", "real"),
    [
        ("default", 2, True),
        ("default", 3, False),
        ("default", 4, True),
        ("published", 2, False),
        ("published", 3, True),
        ("published", 4, False),
        ("default", 64, False),
    ],
)
def test_follows_the_oracle_with_the_draws_of_the_library(recipe: str, world: int, real: bool) -> None:
    """Weights after every step and both averages of every rank at the end; what signs cannot say is kept by the default recipe."""
    made = sparse(18 if world < 64 else 5, recipe=recipe, seed=77, beta=0.7)
    seen: list[Any] = []
    uniform = made.uniform(world)
    simulated = made.simulate(world, lambda o, t: seen.append([a.copy() for a in o.x]), uniform=uniform)
    plan = made.plan(world)
    assert len(plan.buckets) > 1 or world == 64  # a bucket has as many blocks as there are ranks, or more
    for rank, result in enumerate(run_world(train, world, made, real=real)):
        for t, (ours, theirs) in enumerate(zip(result["trajectory"], seen, strict=True)):
            for l, x in enumerate(ours):
                close(x, theirs[l], 0.01, f"rank {rank}, step {t + 1}, tensor {l}")
        clipped = any((m != sent).any() for m, sent in zip(simulated.m[rank], simulated.sent[rank], strict=True))
        assert clipped == (recipe == "default"), "with one beta for both, m is never larger than a"
        for l in range(len(SHAPES)):
            # what the clip takes from m is held in the size in which b lets it fall by ba
            excess = simulated.m[rank][l] - simulated.sent[rank][l]
            k = simulated.k[l] + 1
            more = (1 - share(0.997, k)) / (1 - share(0.7, k)) - 1 if recipe == "default" else 0.0
            simulated.m[rank][l] = simulated.m[rank][l] + more * excess
        for name, expected in (("momentum", simulated.m[rank]), ("magnitude", simulated.a[rank])):
            for l, a in enumerate(expected):
                ours = plan.view(result["residuals"][name], l, torch.empty(a.size)).numpy()
                np.testing.assert_allclose(ours, a, rtol=1e-4, atol=1e-6, err_msg=f"{name} of tensor {l}")


# ----- the draws -----------------------------------------------------------------------------------------------------------------


def sampled(y: torch.Tensor, a: torch.Tensor, steps: int, copies: int = 100, stratified: bool = False) -> np.ndarray:
    """How often each coordinate with ``m/a = y`` was drawn as +1, in ``steps * copies`` draws."""
    size = y.numel()
    elements = size * copies
    (bucket,) = plan_buckets([elements], block_size=size, world_size=1, bucket_elements=elements, device=CPU).buckets
    kernels = get_backend("auto", CPU)
    raw = torch.zeros((1, Packed.row_bytes(copies, size, has_scales=False)), dtype=torch.uint8)
    out = Packed(raw, copies, size, has_scales=False)
    positive = np.zeros(size)
    m, magnitude = (y * a).repeat(copies), a.repeat(copies)
    # b = 1 and o = 0 leave both averages as they are
    factors = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]).repeat(1, copies)
    for step in range(1, steps + 1):
        key = draw_key(0, step, 0, WORKER_STREAM, stratified)
        kernels.sample(
            *(bucket, 0, copies),
            **dict(factors=factors, g=[None], m=m, a=magnitude, key=key, first_block=0, out=out),
        )
        bits = np.unpackbits(out.words.contiguous().numpy().view(np.uint8), bitorder="little")
        # bit k of word j is element k*W + j
        positive += copies - bits.reshape(copies, -1, 32).sum(axis=0).T.ravel()
    return positive


def test_q_has_its_argument_for_a_mean() -> None:
    """Chi-square over 96 arguments in (-1, 1) and 20,000 draws of each; at +1 and -1 nothing is left to chance."""
    y = torch.linspace(-1, 1, 96)
    rounds = 20_000
    positive = sampled(y, torch.logspace(-8, 8, 96), 200)
    assert positive[0] == 0 and positive[-1] == rounds
    p = (1 + y.double().numpy()[1:-1]) / 2
    statistic = float(((positive[1:-1] - rounds * p) ** 2 / (rounds * p * (1 - p))).sum())
    freedom = 94
    assert abs(statistic - freedom) / np.sqrt(2 * freedom) < 4


def test_stratified_draws_add_up_to_their_arguments_within_a_few_draws() -> None:
    """400 draws of an unchanging argument: the sum is off by less than 6, where independent draws are off by up to 20 and more."""
    y, steps = torch.linspace(-1, 1, 96), 400
    positive = np.stack([sampled(y, torch.ones(96), steps, copies=1, stratified=s) for s in (True, False)])
    error = abs(2 * positive - steps - steps * y.double().numpy())
    assert error[0].max() < 6 < 20 < error[1].max()


def test_a_coordinate_without_any_average_draws_either_sign() -> None:
    rounds = 4000
    positive = sampled(torch.zeros(64), torch.zeros(64), 40)
    assert (abs(positive - rounds / 2) < 4.5 * np.sqrt(rounds) / 2).all()


def votes(group: Any, rank: int, world: int, recipe: str, steps: int) -> Any:
    """What the server made of all workers' votes, and what this one's were drawn for: ``(ubar, clip(m_i/a_i))`` per step."""
    p = torch.nn.Parameter(torch.zeros(2000))
    exchange = ExchangeOptions(process_group=group)
    optimizer = BinSGDM([p], lr=1.0, recipe=recipe, exchange=exchange)
    draws = torch.Generator().manual_seed(rank)
    out = []
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = 0.2 + torch.randn(2000, generator=draws)
        optimizer.step()
        state = optimizer.residual_state_dict()["tensors"]
        y = (state["momentum"] / state["magnitude"])[:2000]
        out.append((before - p.detach(), y.clamp(-1, 1)))
    return out


def test_what_a_server_draws_is_unbiased() -> None:
    world, steps = 4, 40
    results = run_world(votes, world, "published", steps)
    means = torch.stack([torch.stack([r[t][1] for r in results]).mean(0) for t in range(5, steps)]).double()
    noise = torch.stack([results[0][t][0] for t in range(5, steps)]).double() - means
    assert abs(float(noise.mean())) < 4.5 * float(noise.std()) / noise.numel() ** 0.5
    # draws of draws are draws: +-1 with the mean ybar
    assert float(noise.square().mean()) == pytest.approx(float((1 - means.square()).mean()), rel=0.02)


def test_what_moves_a_coordinate_adds_up_closer_to_the_sum_of_what_was_asked_for() -> None:
    """Of fluctuating momenta, through workers and server: the variance of the sum over 60 steps falls by more than half."""
    world, steps = 4, 60
    variance = {}
    for recipe in ("published", "default"):
        results = run_world(votes, world, recipe, steps)
        total = sum(results[0][t][0] - torch.stack([r[t][1] for r in results]).mean(0) for t in range(steps))
        assert abs(float(total.mean())) < 4.5 * float(total.std()) / total.numel() ** 0.5, "unbiased"
        variance[recipe] = float(total.square().mean())
    assert variance["default"] < variance["published"] / 2


@pytest.mark.parametrize("world", [2, 3, 8])
def test_signs_sent_with_feedback_add_up_to_the_means_of_the_votes(world: int) -> None:
    """To within what the server can hold back: one sign, before the first step and now."""
    steps, size, kernels = 50, 64, get_backend("auto", CPU)
    lengths = torch.tensor([size, size - 7], dtype=torch.int32)
    generator = torch.Generator().manual_seed(world)
    carry = 2 * torch.rand(2 * size, generator=generator) - 1
    raw = torch.zeros((world, Packed.row_bytes(2, size, has_scales=False)), dtype=torch.uint8)
    received, out = Packed(raw, 2, size, has_scales=False), torch.zeros((2, size // 32), dtype=torch.int32)
    valid = torch.arange(size) < lengths[:, None]
    apart, first = torch.zeros(2, size, dtype=torch.float64), None
    for _ in range(steps):
        negative = torch.rand((world, 2, size), generator=generator) < 0.4
        pack_bits(negative, received.words)
        kernels.vote(received, lengths, (1, 2, 3), 0, out, carry)
        apart += torch.where(unpack_bits(out), -1.0, 1.0) - torch.where(negative, -1.0, 1.0).mean(0)
        first = apart.clone() if first is None else first
    assert apart[valid].abs().max() < 2 + 1e-4
    assert apart[valid].abs().mean() > 0.3, "one bit cannot say it all at once"
    # from a common start, coordinates whose votes cancel would move as one
    assert first is not None and abs(float(first[valid].mean())) < 0.3


def test_streams_of_ranks_are_independent() -> None:
    """Draws of different ranks, and of the server, agree in sign as often as chance has it."""
    blocks, size = 40, 64
    drawn = [
        counter_rng.uniform(draw_hash(draw_key(5, 3, *stream, stratified), 0, blocks, size, CPU)).flatten()
        for stratified in (True, False)
        for stream in ((0, WORKER_STREAM), (1, WORKER_STREAM), (2, WORKER_STREAM), (0, SERVER_STREAM))
    ]
    for a, b in itertools.combinations(drawn, 2):
        assert abs(float(((a > 0) == (b > 0)).float().mean()) - 0.5) < 4.5 * 0.5 / (blocks * size) ** 0.5


def test_a_run_is_a_function_of_its_seed() -> None:
    first, again, other = (run_world(train, 2, sparse(seed=s)) for s in (5, 5, 6))
    for a, b, c in zip(first, again, other, strict=True):
        assert equal(a["x"], b["x"]) and equal(a["residuals"], b["residuals"])
        assert not equal(a["x"], c["x"])
    assert equal(first[0]["x"], first[1]["x"]), "replicas are equal"


def test_a_skipped_step_draws_nothing() -> None:
    """A run with a skipped step is the run without it."""

    def with_skip(group: Any, rank: int, world: int, skip: bool) -> Any:
        made = sparse()
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(6):
            if skip and t == 3:
                made.put(params, t, rank)
                if rank == 1:
                    params[4].grad = torch.full((300,), float("inf"))
                optimizer.step()
            made.put(params, t, rank)
            optimizer.step()
        state = snapshot(optimizer, params)
        assert state["books"].pop("skipped") == skip
        return state

    # step 4 has no gradient for the last tensor anywhere, which does not matter here
    assert equal(run_world(with_skip, 2, True), run_world(with_skip, 2, False))


# ----- coordinates that no rank has seen ------------------------------------------------------------------------------------------


def test_a_coordinate_moves_only_after_the_merge_that_follows_its_first_gradient() -> None:
    """First gradient at t = 5, on one rank: still at t = 5, 6, 7, moving from t = 8 on; never-seen coordinates stay for ever."""
    made = dataclasses.replace(sparse(weight_decay=0.0), missing=frozenset(), steps=12)
    results = run_world(train, 3, made)
    for result in results:
        x = [torch.from_numpy(made.start()[0]), *(t[0] for t in result["trajectory"])]
        moved = [(b - a).abs().view(-1) for a, b in itertools.pairwise(x)]
        for t, step in enumerate(moved, start=1):
            assert (step[:300] > 0).all()
            assert (step[300:400] > 0).all() == (t >= 8) and (step[300:400] == 0).all() == (t < 8), f"t = {t}"
            assert not step[-100:].any(), "cold coordinates never move"
        merges = [r.collectives for r in result["records"]]
        usual = min(merges)
        assert [t for t, c in enumerate(merges, start=1) if c > usual] == [1, 2, 4, 8]


def test_weight_decay_acts_on_coordinates_that_do_not_move() -> None:
    made = sparse()
    (result, _) = run_world(train, 2, made)
    steps = 18 - 1  # one step has no gradient for the tensor anywhere
    cold = torch.from_numpy(made.start()[0]).view(-1)[-100:]
    torch.testing.assert_close(result["x"][0].view(-1)[-100:], cold * (1 - 0.01 * 0.1) ** steps, rtol=1e-5, atol=0)


def test_every_live_coordinate_moves_by_lr_and_stays_within_lr_times_t() -> None:
    made = dataclasses.replace(sparse(weight_decay=0.0), missing=frozenset(), scale=1e-30)
    (result, _) = run_world(train, 2, made)
    x = [torch.from_numpy(made.start()[4]), *(t[4] for t in result["trajectory"])]
    for a, b in itertools.pairwise(x):
        torch.testing.assert_close((b - a).abs(), torch.full((300,), 0.01), rtol=1e-4, atol=1e-6)


def spiked(group: Any, rank: int, world: int, recipe: str, alone: bool) -> Any:
    """Where coordinates get that have small gradients and, in step 41, one that is 40 times as large; the first half has none."""
    p = torch.nn.Parameter(torch.zeros(128))
    exchange = ExchangeOptions(_alone=alone, process_group=group, block_size=32)
    optimizer = BinSGDM([p], lr=1.0, recipe=recipe, exchange=exchange)
    draws = torch.Generator().manual_seed(rank)
    places = []
    for t in range(160):
        p.grad = torch.randn(128, generator=draws)
        if t == 40:
            p.grad[64:] = 40.0
        optimizer.step()
        places.append(p.detach().clone())
    return places


@pytest.mark.parametrize(("world", "alone"), [(1, False), (1, True), (2, False)])
def test_what_signs_cannot_say_at_once_is_said_by_later_ones(world: int, alone: bool) -> None:
    """A spike moves a coordinate by what it is worth in m/c by the default recipe, and by a fraction of that by the published one."""
    (kept, *others), (dropped, *_) = (run_world(spiked, world, recipe, alone) for recipe in ("default", "published"))
    assert all(equal(kept, other) for other in others)
    calm = torch.arange(128) < 64
    moved = [float((run[80] - run[39])[~calm].mean()) for run in (kept, dropped)]
    assert moved[0] < 1.5 * moved[1] < -8
    # what is kept ends: by then no faster than everywhere else
    assert abs(float((kept[159] - kept[110])[~calm].mean())) < 5


def test_what_is_kept_is_bounded_and_comes_to_rest() -> None:
    """After one gradient in a long silence m is a hundred times a and falls behind it: 330 steps."""
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer = BinSGDM([p], lr=1.0, exchange=ExchangeOptions(_alone=True, block_size=32))
    for t in range(3000):
        p.grad = torch.full((64,), float(t in (0, 2400)))
        optimizer.step()
        state = optimizer.residual_state_dict()["tensors"]
        assert bool((state["momentum"].abs() <= 100.1 * 0.997 / 0.7 * state["magnitude"]).all())
        if t == 2399:
            before = p.detach().clone()
    travelled = before - p.detach()
    assert bool(((travelled > 320) & (travelled < 340)).all())


# ----- what is sent --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_the_wire_carries_bits_only(recipe: str) -> None:
    """Round 1 is N/8 bytes, the reply as many, a merge twice N/8; no scales."""
    made = sparse(recipe=recipe)
    plan = made.plan(3)
    for result in run_world(train, 3, made):
        for t, record in enumerate(result["records"], start=1):
            if t in (4, 9):
                continue  # a tensor has no gradient anywhere: fewer buckets
            merge = t & (t - 1) == 0
            assert record.bytes_sent == plan.elements / 8 * (2 / 3) * (2 + 2 * merge)
            assert record.collectives == 2 * len(plan.buckets) * (1 + merge)
            assert not record.dense and record.control_collectives == 1


# ----- a world of one --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_a_single_process_steps_by_m_over_a_itself(recipe: str) -> None:
    """Magnitudes are remembered a hundred times as long as the momentum by the default recipe."""
    options = {"lr": 0.01, "beta": 0.8, "weight_decay": 0.1, "recipe": recipe, "block_size": 64}
    default = recipe == "default"
    made = Problem(6, options, shapes=SMALL, algorithm="binsgdm", cold=50)
    params = made.parameters()
    optimizer = made.build(params)
    for t in range(6):
        made.put(params, t, 0)
        optimizer.step()
    for l, (p, x) in enumerate(zip(params, made.start(), strict=True)):
        x = x.astype(np.float64)
        sent, excess, a = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        for t in range(6):
            g = made.gradient(t, 0, l)
            assert g is not None
            w, wa = share(0.8, t + 1), share(0.998 if default else 0.8, t + 1)
            m = (1 - w) * sent + ((1 - wa) if default else (1 - w)) * excess + w * g
            a = (1 - wa) * a + wa * np.abs(g)
            y = np.divide(m, a, out=np.zeros_like(m), where=a != 0)
            sent = np.clip(m, -a, a)
            excess = m - sent
            x = x - 0.01 * 0.1 * x - 0.01 * np.clip(y, -1, 1)
        close(p.detach(), x.ravel(), 0.01)
    assert optimizer.next_step_is_dense and optimizer.ledger.total.bytes_sent == 0


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_without_a_memory_weights_stay_finite(recipe: str) -> None:
    made = Problem(6, {"lr": 0.01, "beta": 0.0, "recipe": recipe}, shapes=SMALL, algorithm="binsgdm")
    params = made.parameters()
    optimizer = made.build(params)
    for t in range(6):
        made.put(params, t, 0)
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


def test_a_rank_that_compresses_alone_draws() -> None:
    p = torch.nn.Parameter(torch.zeros(200))
    optimizer = BinSGDM([p], lr=0.5, exchange=ExchangeOptions(_alone=True))
    p.grad = torch.linspace(-1, 1, 200)
    optimizer.step()
    assert (p.detach().abs() == 0.5).all() and optimizer.ledger.compressed_steps == 1


# ----- parameters that join --------------------------------------------------------------------------------------------------------


def joining(group: Any, rank: int, world: int, ranks_per_node: int, cut: bool = False) -> Any:
    made = dataclasses.replace(sparse(weight_decay=0.0), missing=frozenset(), steps=14)
    params = made.parameters()
    optimizer = made.build(params[:4], process_group=group)
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
    moves = []
    for t in range(made.steps):
        if t == 9:
            optimizer.add_param_group({"params": params[4:], "lr": 0.02})
        if t == 9 and cut:
            state, part = optimizer.state_dict(), optimizer.residual_state_dict()
            optimizer.release_communication()
            optimizer = made.build(params[:4], process_group=group)
            optimizer.add_param_group({"params": params[4:]})
            optimizer.load_state_dict(state)
            optimizer.load_residual_state_dict(part)
        made.put(params, t, rank)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        moves.append([(p.detach() - b).abs().view(-1) for p, b in zip(params, before, strict=True)])
    return moves, [p.detach().clone() for p in params]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_group_that_joins_moves_at_once_and_the_others_know_what_they_have_seen(
    ranks_per_node: int, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_world(joining, 4, ranks_per_node)
    for moves, x in results:
        assert equal(x, results[0][1])
        for t in range(9, 14):
            torch.testing.assert_close(moves[t][4], torch.full((300,), 0.02), rtol=1e-4, atol=1e-6)
            assert (moves[t][0][:-100] > 0).all() and not moves[t][0][-100:].any()
    assert any("m and a start from zero" in r.message for r in caplog.records) == (ranks_per_node > 1)


def test_a_checkpoint_between_a_groups_joining_and_the_next_step_changes_nothing() -> None:
    through, resumed = (run_world(joining, 2, 1, cut) for cut in (False, True))
    assert equal(through, resumed)


# ----- what it refuses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"seed": 1.5}, TypeError, "seed=1.5 must be an integer"),
        ({"seed": True}, TypeError, "seed=True"),
        ({"beta": 1.0}, ValueError, "beta=1.0 .* < 1"),
        ({"beta": -0.1}, ValueError, "beta=-0.1"),
        ({"recipe": "paper"}, ValueError, "recipe='paper' is unknown; choose one of 'default', 'published'"),
        ({"lr": -1.0}, ValueError, "lr=-1.0"),
        ({"betas": (0.9, 0.99)}, TypeError, "betas"),
        ({"freeze_step": 3}, TypeError, "freeze_step"),
        ({"server": "random"}, TypeError, "server='random'"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BinSGDM([torch.nn.Parameter(torch.ones(3))], **options)


def test_it_has_no_warmup_and_no_residual() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = BinSGDM([p])
    assert optimizer.phase is Phase.COMPRESSED and optimizer.residual_ratio() == 0.0
    with pytest.raises(RuntimeError, match="no warm-up"):
        optimizer.freeze()
    adamw = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    adamw.step()
    with pytest.raises(ValueError, match="cannot continue from the state of a plain optimizer"):
        optimizer.load_state_dict(adamw.state_dict())
