"""ReplicaConsistency: finds a replica that differs, on every rank, by name; disturbs nothing that is right."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.callbacks.consistency import ReplicaConsistencyMixin, ReplicaMismatch, fingerprint
from lightning_onebit.comm import CollectiveFailure, PlanMismatch
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.strategy.ranks import Replicas


def _module(*shapes: tuple[int, ...]) -> torch.nn.Module:
    module = torch.nn.Module()
    torch.manual_seed(0)
    for index, shape in enumerate(shapes):
        module.register_parameter(f"w{index}", torch.nn.Parameter(torch.randn(shape)))
    module.device = torch.device("cpu")  # type: ignore[assignment]
    return module


def _trainer(optimizer: Any = None, timeout: float = 30) -> Any:
    if optimizer is None:
        optimizer = SimpleNamespace(steps=0, mid_local=False)
    replicas, limit = Replicas(dist.get_world_size()), timedelta(seconds=timeout)
    strategy = SimpleNamespace(onebit_optimizers=[optimizer], timeout=limit, replicas=replicas)
    return SimpleNamespace(global_step=0, strategy=strategy)


def _run(rank: int, spoil_at: int, spoiled: int, steps: int, every: int, local: bool = False) -> tuple[int, str]:
    """Trains for some steps; rank 1 loses one bit of parameter ``spoiled`` after step ``spoil_at``. Returns where it raised."""
    module, trainer = _module((3, 5), (0,), (), (7,)), _trainer()
    callback = ReplicaConsistencyMixin(every)
    callback.on_train_start(trainer, module)
    try:
        for step in range(1, steps + 1):
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(0.1)
                if step == spoil_at and rank == 1:
                    flat = list(module.parameters())[spoiled].view(-1)
                    flat.view(torch.int32)[-1] ^= 1
            trainer.global_step = step
            if local:
                trainer.strategy.onebit_optimizers[0].mid_local = step % 4 != 0
            callback.on_train_batch_end(trainer, module, None, None, step)
        callback.on_train_end(trainer, module)
    except ReplicaMismatch as error:
        return trainer.global_step, str(error)
    return -1, ""


def _spoiled(rank: int, world: int, *args: Any) -> tuple[int, str]:
    return _run(rank, *args)


@pytest.mark.parametrize("spoiled", [0, 3])
def test_one_flipped_bit_is_found_on_every_rank_and_named(spoiled: int) -> None:
    results = run_ranks(_spoiled, 3, 4, spoiled, 20, 5)
    assert len(set(results)) == 1, "every rank must raise alike"
    step, message = results[0]
    assert step == 5
    assert f"parameter 'w{spoiled}'" in message and "rank 1 against rank 0" in message and "step 5" in message


def test_equal_replicas_raise_nothing_and_the_last_step_is_checked_too() -> None:
    assert run_ranks(_spoiled, 2, -1, 0, 12, 5) == [(-1, "")] * 2
    assert [step for step, _ in run_ranks(_spoiled, 2, 12, 0, 12, 100)] == [12, 12]


def test_between_synchronisations_replicas_may_differ_and_the_check_waits_for_the_next_one() -> None:
    # Synchronisations at steps 4, 8, 12: the check due at step 5 is made at step 8.
    assert [step for step, _ in run_ranks(_spoiled, 2, 1, 0, 12, 5, True)] == [8, 8]


def _other_model(rank: int, world: int) -> str:
    module = _module((3, 5), (4 + rank,))
    try:
        ReplicaConsistencyMixin().on_train_start(_trainer(), module)
    except PlanMismatch as error:
        return str(error)
    return ""


def test_models_of_different_shapes_are_told_apart_before_any_hash() -> None:
    for message in run_ranks(_other_model, 2):
        assert "w1 (4,)" in message and "w1 (5,)" in message


def _other_start(rank: int, world: int) -> str:
    module = _module((3, 5), (4,))
    if rank:
        with torch.no_grad():
            module.get_parameter("w1").add_(1)
    try:
        ReplicaConsistencyMixin().on_train_start(_trainer(), module)
    except ReplicaMismatch as error:
        return str(error)
    return ""


def test_initial_weights_are_compared() -> None:
    for message in run_ranks(_other_start, 2):
        assert "after step 0" in message and "'w1'" in message


def _other_plan(rank: int, world: int, lr: float) -> str:
    module = _module((40, 5), (4,))
    optimizer = OnebitAdam(module.parameters(), lr=0.01, freeze_step=2, exchange=ExchangeOptions(block_size=32))
    trainer = _trainer(optimizer=optimizer)
    callback = ReplicaConsistencyMixin(4)
    callback.on_train_start(trainer, module)
    for step in range(1, 5):
        for p in module.parameters():
            p.grad = torch.full_like(p, float(rank + step))
        optimizer.step()
        trainer.global_step = step
        if step == 4 and rank == 1:
            optimizer.param_groups[0]["lr"] = lr
        try:
            callback.on_train_batch_end(trainer, module, None, None, step)
        except PlanMismatch as error:
            return str(error)
    return ""


def test_optimizers_whose_plans_part_while_training_are_told_apart() -> None:
    assert run_ranks(_other_plan, 2, 0.01) == ["", ""]
    for message in run_ranks(_other_plan, 2, 0.02):
        assert "plan of optimizer 0" in message and "lr=0.02" in message and "lr=0.01" in message


def _missing(rank: int, world: int) -> str:
    module, trainer = _module((3,)), _trainer(timeout=2)
    callback = ReplicaConsistencyMixin(1)
    callback.on_train_start(trainer, module)
    trainer.global_step = 1
    if rank == 0:
        try:
            callback.on_train_batch_end(trainer, module, None, None, 0)
        except CollectiveFailure as error:
            return str(error)
    return "absent"


def test_a_rank_that_does_not_come_ends_in_an_error_not_in_a_hang() -> None:
    try:
        message = run_ranks(_missing, 2, timeout=30)[0]
    except RanksFailed as error:
        message = str(error)
    assert "ReplicaConsistency, step 1, hashes of the parameters" in message and "(now 2 s)" in message


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_fingerprint_changes_with_any_bit_and_with_order_and_with_nothing_else(
    numel: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    tensor = torch.randn(numel, 2).to(dtype)
    strided = tensor.t().contiguous().t()
    assert strided.stride() != tensor.stride() or numel == 1
    assert fingerprint(strided) == fingerprint(tensor)
    raw = tensor.clone().view(-1)
    bits = (torch.view_as_real(raw) if raw.is_complex() else raw).view(-1).view(torch.uint8)
    position = data.draw(st.integers(0, bits.numel() - 1))
    bits[position] ^= 1 if dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    assert fingerprint(raw) != fingerprint(tensor)


def test_fingerprint_sees_every_sign_of_the_widest_words() -> None:
    # The topmost bit of a 64-bit word survives only a multiplication by an odd weight.
    tensor = torch.ones(64, dtype=torch.float64)
    for position in range(64):
        changed = tensor.clone()
        changed[position] = -1
        assert fingerprint(changed) != fingerprint(tensor)


def test_fingerprint_sees_order_zeros_and_signs_of_zero() -> None:
    assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(torch.tensor([2.0, 1.0]))
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(3))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))


def test_fingerprint_does_not_depend_on_where_it_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = fingerprint(tensor)
    monkeypatch.setattr("lightning_onebit.callbacks.consistency.CHUNK", 64)
    assert fingerprint(tensor) == whole


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps=0"),
        ({"every_n_steps": 1.5}, TypeError, "every_n_steps=1.5"),
        ({"every_n_steps": None}, TypeError, "every_n_steps=None"),
        ({"timeout": 30}, TypeError, "timeout"),
    ],
)
def test_every_bad_option_is_refused_by_name(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        ReplicaConsistencyMixin(**options)
