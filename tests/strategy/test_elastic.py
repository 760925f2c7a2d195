"""Elastic resume: another world, flat or hierarchical; shards that are missing; plain DDP with AdamW and back."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import grouped, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from lightning_support import (
    differing,
    early_refreshes,
    enter,
    loader,
    make_module,
    norm_net,
    plain_net,
    quiet_trainer,
    same_on_all_ranks,
    strategy_class,
)
from test_resume import OPTIONS, training_step

import lightning_onebit as ob
from lightning_onebit.comm import SimulatedWorld, plan_buckets
from lightning_onebit.engine.compact import expanded
from lightning_onebit.engine.redistribute import Redistribution
from lightning_onebit.engine.step import Step

CPU = torch.device("cpu")


# ----- one vector over all blocks, whatever the layout ----------------------------------------------------------------------------


def assembled(states: list[dict[str, Any]], name: str, parts: int, part_of: Any) -> torch.Tensor:
    """Mean over its holders of what ranks hold of each block, ``(blocks, block_size)`` without padding at the end.

    Written block by block and from the definition of shards and chunks, unlike the code under test.
    """
    layout = states[0]
    size, valid = layout["block_size"], sum(-(-n // layout["block_size"]) for n in layout["numels"])
    total, holders = torch.zeros(valid, size, dtype=torch.float64), torch.zeros(valid, 1, dtype=torch.float64)
    for state in states:
        flat, at, first = state["tensors"][name].double().view(-1, size), 0, 0
        for blocks in layout["bucket_blocks"]:
            share = blocks // parts
            for k in range(share):
                block = first + part_of(state["rank"]) * share + k
                if block < valid:
                    total[block] += flat[at]
                    holders[block] += 1
                at += 1
            first += blocks
        assert at == len(flat)
    return total / holders


def worker_mean(states: list[dict[str, Any]], name: str = "worker_residual") -> torch.Tensor:
    per_node = states[0]["ranks_per_node"]
    return assembled(states, name, per_node, lambda rank: rank % per_node)


def server_vector(states: list[dict[str, Any]]) -> torch.Tensor:
    size, per_node = states[0]["world_size"], states[0]["ranks_per_node"]
    nodes = size // per_node
    return assembled(states, "server_residual", size, lambda rank: rank % per_node * nodes + rank // per_node)


worlds = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3)])


def layouts(numels: list[int], world: int, per_node: int, bucket: int) -> list[dict[str, Any]]:
    plan = plan_buckets(numels, block_size=32, world_size=world, bucket_elements=bucket, device=CPU)
    common = {"version": 1, "algorithm": "onebit_adam", "steps": 5, "world_size": world, "ranks_per_node": per_node}
    common |= {"block_size": 32, "numels": numels, "bucket_blocks": [b.blocks for b in plan.buckets]}
    return [{**common, "rank": rank, "tensors": {}} for rank in range(world)]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), worlds, worlds, st.integers(1, 400), st.integers(1, 400))
def test_server_residuals_are_cut_anew_exactly_and_the_mean_of_worker_residuals_is_kept(
    numels: list[int], old: tuple[int, int], new: tuple[int, int], old_bucket: int, new_bucket: int
) -> None:
    states = layouts(numels, *old, old_bucket)
    generator = torch.Generator().manual_seed(sum(numels))
    for state in states:
        elements = sum(state["bucket_blocks"]) * 32
        state["tensors"] = {
            "worker_residual": torch.randn(elements // old[1], generator=generator),
            "server_residual": torch.randn(elements // old[0], generator=generator),
        }
    moved = []
    for mine in layouts(numels, *new, new_bucket):
        parts = Redistribution(mine)
        for state in states:
            parts.add(state)
        moved.append(parts.result())
        assert {k: v for k, v in moved[-1].items() if k != "tensors"} == {
            k: v for k, v in mine.items() if k != "tensors"
        }
    assert torch.equal(server_vector(moved), server_vector(states))
    torch.testing.assert_close(worker_mean(moved), worker_mean(states), rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), worlds, st.integers(1, 400), st.integers(1, 400))
def test_in_other_buckets_every_rank_keeps_its_own_residuals_exactly(
    numels: list[int], world: tuple[int, int], old_bucket: int, new_bucket: int
) -> None:
    """There and back, because what two sets of buckets hold is compared in one of them."""
    states, others = layouts(numels, *world, old_bucket), layouts(numels, *world, new_bucket)
    valid = sum(-(-n // 32) for n in numels)
    for state in states:
        rank, per_node, blocks = state["rank"], world[1], sum(state["bucket_blocks"])
        owned = [  # (of a shard, the block that lies at each place; blocks past the last are padding, which holds zeros)
            first + rank % per_node * (count // per_node) + k
            for first, count in zip(
                [sum(state["bucket_blocks"][:b]) for b in range(len(state["bucket_blocks"]))],
                state["bucket_blocks"],
                strict=True,
            )
            for k in range(count // per_node)
        ]
        draw = torch.Generator().manual_seed(1000 * (rank // per_node) + 7)  # the nodes differ
        vector = torch.randn(blocks, 32, generator=draw) * (torch.arange(blocks) < valid)[:, None]
        draw.manual_seed(rank)
        whole = torch.randn(blocks, 32, generator=draw) * (torch.arange(blocks) < valid)[:, None]
        state["tensors"] = {"worker_residual": vector[owned].flatten(), "local_momentum": whole.flatten()}

    def moved(saved: list[dict[str, Any]], into: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for mine in into:
            parts = Redistribution({k: v for k, v in mine.items() if k != "tensors"} | {"tensors": {}})
            for state in saved:
                parts.add(state)
            found.append(parts.result())
        return found

    for before, after in zip(states, moved(moved(states, others), states), strict=True):
        for name, tensor in before["tensors"].items():
            assert torch.equal(after["tensors"][name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 64}, "block_size=64"),
        ({"numels": [5]}, r"numels=\[5\]"),
        ({"strides": [[1, 20]]}, r"strides=\[\[1, 20\]\]"),
        ({"algorithm": "binsgdm"}, "algorithm='binsgdm'"),
        ({"steps": 6}, "steps=6"),
        ({"tensors": {"aura": torch.zeros(3)}}, "'aura' of a rank is unknown"),
        ({"tensors": {"worker_residual": torch.zeros(3)}}, "3 elements"),
    ],
)
def test_state_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    (mine,) = layouts([100], 1, 1, 64)
    with pytest.raises(ValueError, match=message):
        Redistribution(mine).add({**mine, **change})


# ----- through the Trainer --------------------------------------------------------------------------------------------------------


def configure(module: Any) -> Any:
    strategy = module.trainer.strategy
    return strategy.optimizer(module.parameters(), lr=1e-2, weight_decay=0.01, **early_refreshes(strategy))


def elastic_rank(
    rank: int,
    world: int,
    algorithm: str,
    ranks_per_node: int | None,
    steps: int,
    ckpt_path: str | None,
    save: str | None,
    **options: Any,
) -> dict[str, Any]:
    """Goes on from ``ckpt_path`` up to ``steps`` and saves; returns what it started and ended with."""
    pl = enter(rank)
    found: dict[str, Any] = {}

    def snapshot(module: Any) -> dict[str, Any]:
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        state = optimizer.residual_state_dict()
        return {
            "residuals": {**state, "tensors": {k: v.clone() for k, v in state["tensors"].items()}},
            "weights": {k: v.detach().clone() for k, v in module.named_parameters()},
            "mid_local": getattr(optimizer, "mid_local", False),
        }

    def on_train_start(module: Any) -> None:
        found["start"] = snapshot(module)

    def on_train_batch_end(module: Any, *_: Any) -> None:
        # as a ModelCheckpoint would, between synchronisations: training ends with one
        if module.trainer.global_step == steps:
            found["end"] = snapshot(module)
            if save is not None:
                module.trainer.save_checkpoint(save)

    given = grouped(OPTIONS[algorithm], block_size=64, **options)
    strategy = strategy_class()(algorithm, ranks_per_node=ranks_per_node, **given)
    hooks = {"on_train_start": on_train_start, "on_train_batch_end": on_train_batch_end}
    module = make_module(pl, configure, norm_net, training_step=training_step, **hooks)
    trainer = quiet_trainer(pl, strategy, max_steps=steps, max_epochs=20)
    with warnings.catch_warnings(record=True) as caught, Informed() as informed:
        warnings.simplefilter("always")
        trainer.fit(module, loader(samples=96, batch=4), ckpt_path=ckpt_path)
    found |= {
        "warned": [str(w.message) for w in caught if "residuals" in str(w.message)],
        "informed": informed.lines,
        "different": same_on_all_ranks(dict(module.named_parameters())),
        "finite": all(bool(torch.isfinite(p).all()) for p in module.parameters()),
        "steps": strategy.onebit_optimizers[0].steps,
    }
    return found


class Informed:
    """Lines of ``rank_zero_info`` that speak of residuals."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Informed:
        import lightning_onebit.strategy.checkpoint as module

        self._module, self._original = module, module.rank_zero_info

        def record(message: str) -> None:
            if "residuals" in message:
                self.lines.append(message)
            self._original(message)

        module.rank_zero_info = record
        return self

    def __exit__(self, *_: Any) -> None:
        self._module.rank_zero_info = self._original


def states(results: list[dict[str, Any]], when: str) -> list[dict[str, Any]]:
    return [result[when]["residuals"] for result in results]


def assert_carried_over(before: list[dict[str, Any]], after: list[dict[str, Any]], algorithm: str) -> None:
    """The ranks of ``after`` began with what those of ``before`` ended with, redistributed."""
    old, new = states(before, "end"), states(after, "start")
    if algorithm == "binsgdm":
        for name in ("momentum", "magnitude"):
            torch.testing.assert_close(worker_mean(new, name), worker_mean(old, name), rtol=1e-5, atol=1e-7)
            assert worker_mean(new, name).any()
    else:
        assert torch.equal(server_vector(new), server_vector(old)) and server_vector(new).any()
        torch.testing.assert_close(worker_mean(new), worker_mean(old), rtol=1e-5, atol=1e-8)
        assert worker_mean(new).any()
    for result in after:
        assert differing(result["start"]["weights"], before[0]["end"]["weights"]) == []
        assert not result["start"]["mid_local"] and result["warned"] == []
        assert result["different"] == [] and result["finite"]
        (line,) = result["informed"]
        assert "server residuals are cut anew, worker residuals" in line
        assert ("are dropped" in line) == before[0]["end"]["mid_local"]


@pytest.mark.parametrize(
    ("algorithm", "old", "new"),
    [
        ("onebit_adam", (4, None), (2, None)),
        ("onebit_lamb", (2, None), (4, None)),
        ("zero_one_adam", (3, None), (2, None)),
        ("binsgdm", (4, 2), (2, None)),
        ("onebit_adam", (4, None), (4, 2)),
        ("zero_one_adam", (4, 2), (4, None)),
        ("binsgdm", (3, None), (4, 2)),
        ("onebit_sgd", (3, None), (2, None)),
    ],
)
def test_another_world_goes_on_from_the_same_residuals(
    algorithm: str, old: tuple[int, int | None], new: tuple[int, int | None], tmp_path: Path
) -> None:
    path = str(tmp_path / "x.ckpt")
    before = run_ranks(elastic_rank, old[0], algorithm, old[1], 7, None, path)
    after = run_ranks(elastic_rank, new[0], algorithm, new[1], 11, path, None)
    assert before[0]["end"]["mid_local"] == (algorithm == "zero_one_adam")
    assert_carried_over(before, after, algorithm)
    assert after[0]["steps"] == 11


def in_smaller_buckets(rank: int, world: int, algorithm: str, ckpt_path: str) -> dict[str, Any]:
    return elastic_rank(rank, world, algorithm, None, 11, ckpt_path, None, bucket_mb=0.0005)


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm", "onebit_sgd"])
def test_other_buckets_go_on_exactly(algorithm: str, tmp_path: Path) -> None:
    """As where a run that was saved on CPUs is resumed on CUDA devices, whose buckets are larger by default."""
    path = str(tmp_path / "x.ckpt")
    saved = run_ranks(elastic_rank, 2, algorithm, None, 7, None, path)
    assert saved[0]["end"]["mid_local"] == (algorithm == "zero_one_adam")
    same = run_ranks(elastic_rank, 2, algorithm, None, 11, path, None)
    other = run_ranks(in_smaller_buckets, 2, algorithm, path)
    assert same[0]["informed"] == []
    (line,) = other[0]["informed"]
    assert line.endswith("residuals of 2 ranks continue in other buckets.")
    for left, right in zip(same, other, strict=True):
        assert differing(left["end"]["weights"], right["end"]["weights"]) == []
        buckets = [len(run["end"]["residuals"]["bucket_blocks"]) for run in (left, right)]
        assert buckets[0] == 1 < buckets[1]


@pytest.mark.parametrize("algorithm", ["onebit_adam", "zero_one_adam"])
def test_two_ranks_then_one_then_two_keep_the_mean_of_the_residuals(algorithm: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("two.ckpt", "one.ckpt")]
    two = run_ranks(elastic_rank, 2, algorithm, None, 7, None, paths[0])
    one = run_ranks(elastic_rank, 1, algorithm, None, 9, paths[0], paths[1])
    again = run_ranks(elastic_rank, 2, algorithm, None, 12, paths[1], None)
    assert_carried_over(two, one, algorithm)
    assert_carried_over(one, again, algorithm)
    # alone, nothing is compressed: the residuals wait
    assert torch.equal(server_vector(states(again, "start")), server_vector(states(two, "end")))
    assert again[0]["steps"] == 12


# ----- shards that are missing or damaged -----------------------------------------------------------------------------------------


def transposed_net() -> torch.nn.Module:
    """``norm_net`` with a weight in another memory order."""
    net = norm_net()
    net[0].weight = torch.nn.Parameter(net[0].weight.detach().t().contiguous().t())
    return net


def lost_rank(rank: int, world: int, path: str, strict: bool, net: Any = norm_net) -> dict[str, Any]:
    pl = enter(rank)
    found: dict[str, Any] = {}

    def on_train_start(module: Any) -> None:
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        found["residuals"] = sum(float(t.abs().sum()) for t in optimizer.residual_state_dict()["tensors"].values())

    strategy = strategy_class()(
        "onebit_adam", strict_residuals=strict, exchange=ob.ExchangeOptions(block_size=64), **OPTIONS["onebit_adam"]
    )
    module = make_module(pl, configure, net, training_step=training_step, on_train_start=on_train_start)
    trainer = quiet_trainer(pl, strategy, max_steps=9, max_epochs=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(samples=96, batch=4), ckpt_path=path)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    found["warned"] = [str(w.message) for w in caught if "residuals" in str(w.message)]
    found["different"] = same_on_all_ranks(dict(module.named_parameters()))
    return found


@pytest.mark.parametrize(("damage", "reason"), [("missing", "is missing"), ("damaged", "is damaged")])
def test_lost_shards_are_a_warning_and_zero_residuals_or_an_error_when_strict(
    damage: str, reason: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "x.ckpt")
    run_ranks(elastic_rank, 2, "onebit_adam", None, 7, None, path)
    (shard,) = tmp_path.glob("x.ckpt.onebit/*/rank-00001-of-00002.pt")
    content = shard.read_bytes()
    shard.unlink() if damage == "missing" else shard.write_bytes(content[: len(content) // 2])
    # whether this rank's own shard is the broken one or not
    for rank, found in enumerate(run_ranks(lost_rank, 2, path, False)):
        assert found["residuals"] == 0 and found["different"] == [] and "error" not in found
        assert len(found["warned"]) == (1 if rank == 0 else 0)
        assert all(f"rank-00001-of-00002.pt {reason}" in text and "rank 1:" in text for text in found["warned"])
    for found in run_ranks(lost_rank, 2, path, True):
        assert found["error"].startswith("ShardError: strict_residuals=True: rank 1:") and reason in found["error"]
    # another world needs all of them
    for found in run_ranks(lost_rank, 3, path, True):
        assert found["error"].startswith("ShardError: strict_residuals=True") and reason in found["error"]


def test_shards_of_another_memory_order_count_as_missing(tmp_path: Path) -> None:
    """Blocks are cut in memory order: residuals would land on other elements, on as many ranks or on others."""
    path = str(tmp_path / "x.ckpt")
    run_ranks(elastic_rank, 2, "onebit_adam", None, 7, None, path)
    for found in run_ranks(lost_rank, 2, path, False, transposed_net):
        assert found["residuals"] == 0 and found["different"] == [] and "error" not in found
    for world in (2, 3):
        for found in run_ranks(lost_rank, world, path, True, transposed_net):
            assert found["error"].startswith("ShardError: strict_residuals=True") and "strides=" in found["error"]


# ----- plain DDP with AdamW, and back ---------------------------------------------------------------------------------------------


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)


def plain_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    pl = enter(rank)

    def train(strategy: Any, steps: int, ckpt_path: str | None, save: str | None) -> tuple[dict[str, Any], Any]:
        module = make_module(pl, adamw, plain_net, training_step=training_step)
        trainer = quiet_trainer(pl, strategy, max_steps=steps, max_epochs=20)
        trainer.fit(module, loader(samples=96, batch=4), ckpt_path=ckpt_path)
        if save is not None:
            trainer.save_checkpoint(save)
        return {k: v.clone() for k, v in module.state_dict().items()}, trainer

    found: dict[str, Any] = {}
    ddp, onebit, back = (f"{folder}/{name}.ckpt" for name in ("ddp", "onebit", "back"))
    train("ddp", 4, None, ddp)
    found["ddp"], _ = train("ddp", 6, ddp, None)
    found["warm-up"], _ = train(strategy_class()("onebit_adam", freeze_step=6), 6, ddp, None)
    weights, trainer = train(strategy_class()("onebit_adam", freeze_step=6), 9, ddp, onebit)
    (optimizer,) = trainer.strategy.onebit_optimizers
    found["compressed"] = (optimizer.steps, optimizer.phase.value)
    loaded, _ = train("ddp", 9, onebit, None)
    found["loaded differs"] = differing(loaded, weights)
    after, trainer = train("ddp", 12, onebit, back)
    found["moved"] = max(float((after[k] - weights[k]).abs().max()) for k in after)
    found["step"] = {float(s["step"]) for s in trainer.optimizers[0].state.values()}
    return found


def test_plain_ddp_with_adamw_goes_on_as_onebit_adam_and_back(tmp_path: Path) -> None:
    for found in run_ranks(plain_rank, 2, str(tmp_path), timeout=120):
        torch.testing.assert_close(found["warm-up"], found["ddp"], rtol=1e-5, atol=1e-6)
        assert found["compressed"] == (9, "compressed")
        assert found["loaded differs"] == []
        # AdamW goes on with the momentum and the floored second moments: steps of ordinary size
        assert 1e-4 < found["moved"] < 0.1 and found["step"] == {12.0}


# ----- second moments through other worlds ----------------------------------------------------------------------------------------


def constant_worker(group: Any, rank: int, algorithm: str, steps: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """Steps on a gradient that is 1 everywhere, so that a bias-corrected second moment is 1 whatever its age."""
    params = [torch.nn.Parameter(torch.zeros(40)), torch.nn.Parameter(torch.zeros(7))]
    kind, options = {
        "onebit_adam": (ob.OnebitAdam, {"freeze_step": 3}),
        # a refresh begins at step 7 and ends with step 9
        "onebit_adam, refreshing": (ob.OnebitAdam, {"freeze_step": 3, "refresh": 3}),
        "onebit_lamb": (ob.OnebitLamb, {"freeze_step": 3}),
        # refreshes at 1, 2, 4, 8, ...: v has had fewer updates than there were steps
        "zero_one_adam": (ob.ZeroOneAdam, {"freeze_step": 12, "_doubling": 1}),
    }[algorithm]
    exchange = ob.ExchangeOptions(block_size=32, state_dtype="float32", process_group=group)
    optimizer: Any = kind(params, lr=1e-4, denominator_floor=0.0, exchange=exchange, **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    saved: dict[str, Any] = expanded(optimizer.state_dict())
    return saved


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_adam, refreshing", "onebit_lamb", "zero_one_adam"])
def test_the_bias_correction_of_second_moments_survives_worlds_of_two_and_one(algorithm: str) -> None:
    def run(world: int, steps: int, state: dict[str, Any] | None) -> dict[str, Any]:
        # alone: no group at all, where nothing is compressed
        fn = constant_worker
        if world == 1:
            return fn(None, 0, algorithm, steps, state)
        return SimulatedWorld(world).run(lambda group: fn(group, group.rank, algorithm, steps, state))[0]

    def corrected(state: dict[str, Any], steps: int) -> torch.Tensor:
        assert all(float(s["step"]) == steps for s in state["state"].values())
        # what torch.optim.AdamW makes of it
        return torch.cat([s["exp_avg_sq"] for s in state["state"].values()]) / (1 - 0.999**steps)

    two = run(2, 7, None)
    torch.testing.assert_close(corrected(two, 7), torch.ones(47), rtol=1e-4, atol=0)
    one = run(1, 20, two)
    torch.testing.assert_close(corrected(one, 27), torch.ones(47), rtol=1e-4, atol=0)
    again = run(2, 3, one)
    for state in again["state"].values():
        torch.testing.assert_close(
            state["reciprocal_denominator"], torch.ones_like(state["exp_avg"]), rtol=1e-4, atol=0
        )
    torch.testing.assert_close(corrected(run(1, 1, again), 31), torch.ones(47), rtol=1e-4, atol=0)


def half_worker(group: Any, rank: int, state: Any, first: int, last: int, **options: Any) -> Any:
    """0/1 Adam where every second coordinate never has a gradient (rows of an embedding that are not used); one-bit rounds come early."""
    p = torch.nn.Parameter(torch.zeros(256) if state is None else state[0].clone())
    optimizer = ob.ZeroOneAdam([p], lr=1e-3, exchange=ob.ExchangeOptions(process_group=group), **options)
    if state is not None:
        optimizer.load_state_dict(state[1])
    return half_steps(p, optimizer, rank, first, last)


def half_steps(p: torch.nn.Parameter, optimizer: Any, rank: int, first: int, last: int) -> Any:
    for t in range(first, last):
        p.grad = torch.randn(256, generator=torch.Generator().manual_seed(100 * t + rank))
        p.grad[1::2] = 0
        optimizer.step()
    return p.detach().clone(), optimizer.state_dict()


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_unused_coordinates_stay_bounded_where_one_rank_or_adamw_goes_on_from_one_bit_rounds(recipe: str) -> None:
    """Their momentum is noise and their second moment 0, which an optimizer that does not compress must not divide by."""
    steps, options = 30, {"recipe": recipe, "_doubling": 16}
    saved = SimulatedWorld(2).run(lambda group: half_worker(group, group.rank, None, 0, steps, **options))[0]
    (mine,) = saved[1]["state"].values()
    assert float(mine["exp_avg"][1::2].abs().max()) > 0
    lone, _ = half_worker(None, 0, saved, steps, steps + 3, **options)
    p = torch.nn.Parameter(saved[0].clone())
    plain = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0)
    plain.load_state_dict(copy.deepcopy(saved[1]))
    adamw, _ = half_steps(p, plain, 0, steps, steps + 3)
    for x in (lone, adamw):
        assert 0 < float((x - saved[0])[1::2].abs().max()) < 3e-3
        assert float((x - saved[0])[::2].abs().max()) > 5e-4
    # what one rank makes of it is what AdamW makes of it; and a state of earlier releases, where only v as it is was saved
    torch.testing.assert_close(lone, adamw, rtol=0, atol=1e-6)
    mine["exp_avg_sq"] = mine.pop("exp_avg_sq_exact")
    torch.testing.assert_close(half_worker(None, 0, saved, steps, steps + 3, **options)[0], lone, rtol=0, atol=1e-6)


def test_one_rank_that_resumes_alone_keeps_the_variance_as_it_is() -> None:
    """The floor enters where one-bit rounds end, not with every resume of a rank that goes on alone."""
    saved = SimulatedWorld(2).run(lambda group: half_worker(group, group.rank, None, 0, 30))[0]
    lone = half_worker(None, 0, saved, 30, 36)
    resumed = half_worker(None, 0, half_worker(None, 0, saved, 30, 33), 33, 36)
    assert torch.equal(lone[0], resumed[0])
    assert not differing(lone[1]["state"][0], resumed[1]["state"][0])


COLD = {
    "onebit_adam": (ob.OnebitAdam, {"recipe": "published"}),
    "onebit_lamb": (ob.OnebitLamb, {}),
    # refreshes at 1, 2, 4, 8, 16
    "zero_one_adam": (ob.ZeroOneAdam, {"_doubling": 1, "recipe": "published"}),
}
COLD_STEPS = 12


def cold_worker(group: Any, algorithm: str, first: int = 0, last: int = COLD_STEPS, saved: Any = None) -> Any:
    """Steps in which a second tensor has gradients where they are compressed only, and there in every second coordinate.

    Returns:
        The weights, the state, this rank's own, and the moves after ``thaw()`` where there is one.
    """
    rank = group.rank
    params = [torch.nn.Parameter(torch.ones(256)) for _ in range(2)]
    kind, options = COLD[algorithm]
    optimizer: Any = kind(params, lr=1e-3, exchange=ob.ExchangeOptions(block_size=64, process_group=group), **options)
    if saved is not None:
        with torch.no_grad():
            for p, x in zip(params, saved[0], strict=True):
                p.copy_(x)
        optimizer.load_state_dict(saved[1])
        optimizer.load_residual_state_dict(saved[2][rank])
    for t in range(first, last):
        if t == 4 and algorithm != "zero_one_adam":
            optimizer.freeze()
        cold_gradients(params, t, rank, warm=not optimizer.next_step_is_dense)
        optimizer.step()
    weights = [p.detach().clone() for p in params]
    state, residuals = copy.deepcopy((optimizer.state_dict(), optimizer.residual_state_dict()))
    if algorithm == "zero_one_adam":  # no warm-up to go back to
        return weights, state, residuals, None
    optimizer.thaw()
    return weights, state, residuals, cold_moves(params, optimizer, rank)


def cold_gradients(params: Any, t: int, rank: int, *, warm: bool) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(256, generator=torch.Generator().manual_seed(100 * t + 10 * i + rank))
        p.grad[1::2] = 0
    if not warm:
        params[1].grad = None


def cold_moves(params: Any, optimizer: Any, rank: int = 0) -> tuple[float, float]:
    """Largest moves, in 3 steps, of coordinates with and without a gradient of the tensor that was cold."""
    start = params[1].detach().clone()
    for t in range(COLD_STEPS, COLD_STEPS + 3):
        cold_gradients(params, t, rank, warm=True)
        optimizer.step()
    moved = (params[1].detach() - start).abs()
    return float(moved[::2].max()), float(moved[1::2].max())


@pytest.mark.parametrize(
    ("algorithm", "how"),
    [(a, how) for a in COLD for how in ("alone", "AdamW", "alone, from an earlier release")]
    + [("onebit_adam", "thaw"), ("onebit_lamb", "thaw")],
)
def test_a_tensor_first_used_after_the_freeze_stays_bounded_where_steps_are_dense_again(
    algorithm: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a state of a release that compressed it: its momentum is noise, its second moments are 0, and it begins without either."""
    monkeypatch.setattr(Step, "hear", lambda self, verdict: None)
    weights, state, _, moved = SimulatedWorld(2).run(cold_worker, algorithm)[0]
    if how != "thaw":
        noise = state["state"][1].get("exp_avg_exact")
        assert noise is not None and float(noise.abs().min()) > 0 and not state["state"][1]["exp_avg"].any()
        if "earlier" in how:
            for s in state["state"].values():
                s.update({key: s.pop(f"{key}_exact") for key in ("exp_avg", "exp_avg_sq") if f"{key}_exact" in s})
        params = [torch.nn.Parameter(x) for x in weights]
        kind, options = COLD[algorithm]
        optimizer: Any = torch.optim.AdamW(params, lr=1e-3) if how == "AdamW" else kind(params, lr=1e-3, **options)
        optimizer.load_state_dict(state)
        moved = cold_moves(params, optimizer)
    limit = 0.1 if algorithm == "onebit_lamb" else 0.01  # with a trust ratio of at most 10
    assert 1e-4 < moved[0] < limit and moved[1] < limit / 100


@pytest.mark.parametrize("algorithm", COLD)
def test_two_ranks_go_on_with_the_momentum_of_a_tensor_first_used_after_the_freeze(algorithm: str) -> None:
    """What plain AdamW must not see is still there for who goes on compressing: the run is the one that was not interrupted."""
    through, half = SimulatedWorld(2).run(cold_worker, algorithm), SimulatedWorld(2).run(cold_worker, algorithm, 0, 7)
    saved = (*half[0][:2], [part[2] for part in half])
    resumed = SimulatedWorld(2).run(cold_worker, algorithm, 7, COLD_STEPS, saved)
    for a, b in zip(through, resumed, strict=True):
        assert not differing(a[2]["tensors"], b[2]["tensors"])
        for i in range(2):
            assert torch.equal(a[0][i], b[0][i]) and not differing(a[1]["state"][i], b[1]["state"][i])
