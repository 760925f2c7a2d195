"""What programs write into weights, parameter groups and state: it counts, or it is refused by name before anything moves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from optim_support import CLASSES, CROSSING, run_world
from torch import Tensor, nn

from lightning_onebit.optim import OnebitAdam, OnebitOptimizer, ZeroOneAdam
from lightning_onebit.optim.masters import Comparison

STEPS = 12


def build(algorithm: str, params: Any, group: Any = None, **options: Any) -> OnebitOptimizer:
    settings = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32, **options}
    return CLASSES[algorithm](params, process_group=group, **settings)  # type: ignore[arg-type]


def fill(params: list[nn.Parameter], step: int, rank: int = 0) -> None:
    draws = torch.Generator().manual_seed(1000 * step + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draws).to(p.dtype)


def small(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in ((9, 5), (33,))]


# ----- weights ----------------------------------------------------------------------------------------------------------------------


def _in_place(p: nn.Parameter, value: Tensor) -> None:
    p.data.copy_(value)


def _rebound(p: nn.Parameter, value: Tensor) -> None:
    p.data = value.clone()


def _from_a_vector(p: nn.Parameter, value: Tensor) -> None:
    nn.utils.vector_to_parameters(value.flatten(), [p])


def _seen_by_torch(p: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def clamped(
    group: Any, rank: int, world: int, algorithm: str, write: Callable[[nn.Parameter, Tensor], None]
) -> list[Any]:
    params = small(torch.bfloat16)
    optimizer = build(algorithm, params, group)
    seen = []
    for t in range(STEPS):
        fill(params, t, rank)
        optimizer.step()
        if not optimizer.mid_local:
            for p in params:
                write(p, p.detach().clamp(-0.05, 0.05))
            masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
            assert all(torch.equal(m.to(p.dtype), p) for m, p in zip(masters, params, strict=True))
        seen.append([p.detach().clone() for p in params])
    return seen


@pytest.mark.parametrize("algorithm", CLASSES)
def test_what_is_written_through_data_into_16_bit_weights_trains_on(algorithm: str) -> None:
    """As what torch sees being written does; the master copies must not bring the old weights back."""
    seen = run_world(clamped, 2, algorithm, _seen_by_torch)[0]
    for write in (_in_place, _rebound, _from_a_vector):
        for a, b in zip(run_world(clamped, 2, algorithm, write)[0], seen, strict=True):
            assert all(map(torch.equal, a, b)), write.__name__


def test_weights_that_are_shown_while_the_state_is_saved_leave_training_as_it_was() -> None:
    """As weight averaging does: what is saved is what is shown, and the masters keep their last bits."""
    ends = []
    for saves in (False, True):
        params = small(torch.bfloat16)
        optimizer = build("onebit_adam", params, force_compression=True)
        for t in range(STEPS):
            fill(params, t)
            optimizer.step()
            if saves:
                own = [p.data for p in params]
                for p in params:
                    p.data = torch.full_like(p, 0.25)
                assert all((s["master"] == 0.25).all() for s in optimizer.state_dict()["state"].values())
                for p, values in zip(params, own, strict=True):
                    p.data = values
        ends.append([state["master"] for state in optimizer.state_dict()["state"].values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_device_finds_every_write_and_no_other(dtype: torch.dtype) -> None:
    masters = [
        torch.tensor([1.0001, 0.0, -0.0, 1e-40, float("nan"), float("inf"), 3.3]),
        torch.randn(40),
        torch.ones(0),
    ]
    shown = [m.to(dtype) for m in masters]
    before = [m.clone() for m in masters]
    pairs = list(zip(shown, masters, strict=True))
    Comparison(pairs).adopt()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(masters, before, strict=True))
    shown[0][6], shown[1][-1] = 0.0, 2.0
    Comparison(pairs).adopt()
    assert masters[0][6] == 0.0 and masters[1][-1] == 2.0
    assert torch.equal(masters[0][:4], before[0][:4]) and torch.equal(masters[1][:-1], before[1][:-1])
    shown[1][3] = torch.finfo(dtype).smallest_normal / 8  # (difference below every normal number)
    masters[1][3] = 0.0
    Comparison(pairs).adopt()
    assert masters[1][3] == shown[1][3].float() != 0


# ----- parameter groups -------------------------------------------------------------------------------------------------------------

IGNORED: dict[str, tuple[Any, str]] = {
    "maximize": (True, "minimise the negative"),
    "amsgrad": (True, "leave it False"),
    "compress": (False, "is laid out for compress=True.*before the first step"),
    "momentum": (0.9, "means nothing to"),
    "max_grad_norm": (1.0, "one max_grad_norm for all groups"),
}


@pytest.mark.parametrize("key", IGNORED)
@pytest.mark.parametrize("algorithm", CLASSES)
def test_a_key_of_a_group_that_would_be_ignored_raises_before_the_step(algorithm: str, key: str) -> None:
    value, words = IGNORED[key]
    params = small()
    optimizer = build(algorithm, params, force_compression=True)
    fill(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0][key] = value
    fill(params, 1)
    with pytest.raises((ValueError, RuntimeError), match=f"{key}={value}.*{words}"):
        optimizer.step()
    assert all(map(torch.equal, params, before)) and optimizer.steps == 1
    if key == "compress":
        optimizer.param_groups[0][key] = True
        optimizer.step()
        return
    with pytest.raises(ValueError, match=f"{key}={value}"):
        build(algorithm, [{"params": small(), key: value}])


def test_a_state_that_would_be_maximised_is_refused_and_how_torch_steps_is_nothing_to_us() -> None:
    params = small()
    plain = torch.optim.AdamW(params, maximize=True)
    optimizer = OnebitAdam(params)
    with pytest.raises(ValueError, match="maximize=True"):
        optimizer.load_state_dict(plain.state_dict())
    plain.param_groups[0].update(maximize=False, foreach=True, fused=None, capturable=True)
    optimizer.load_state_dict(plain.state_dict())


def test_what_schedulers_and_programs_note_in_groups_passes() -> None:
    params = small()
    optimizer = OnebitAdam([{"params": params, "name": "all", "lr_scale": 0.5}], force_compression=True, freeze_step=2)
    optimizer.param_groups[0].update(amsgrad=False, maximize=False, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    for t in range(STEPS - 1):
        fill(params, t)
        optimizer.step()
        schedule.step()
    assert {"initial_lr", "max_lr", "min_lr", "max_momentum"} <= optimizer.param_groups[0].keys()


# ----- states -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", CLASSES)
def test_a_state_of_the_compressed_stage_without_a_parameter_that_has_made_steps_is_refused(algorithm: str) -> None:
    params = small()
    optimizer = build(algorithm, params, force_compression=True)
    for t in range(STEPS):
        fill(params, t)
        optimizer.step()
    whole = optimizer.state_dict()
    before = [p.detach().clone() for p in params]
    for kept, name in (({}, 0), ({0: whole["state"][0]}, 1)):
        with pytest.raises(ValueError, match=f"no entry for parameter {name}"):
            optimizer.load_state_dict({**whole, "state": kept})
    earlier = {key: value for key, value in whole["onebit"].items() if key != "stepped"}
    with pytest.raises(ValueError, match="no entry for parameter 0"):
        optimizer.load_state_dict({**whole, "state": {}, "onebit": earlier})
    assert all(map(torch.equal, params, before)) and optimizer.steps == STEPS
    optimizer.load_state_dict(whole)


# ----- gradients that are averaged already ------------------------------------------------------------------------------------------


def averaged_before(group: Any, rank: int, world: int, kind: Any, averaged: bool, clip: bool) -> None:
    params = small()
    optimizer = kind(params, lr=0.01, process_group=group, block_size=32)
    for t in range(9):
        fill(params, t, 0 if averaged else rank)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if t == 2:
            optimizer.freeze()


@pytest.mark.parametrize(("kind", "clip"), [(OnebitAdam, False), (OnebitAdam, True), (ZeroOneAdam, False)])
def test_gradients_that_something_else_has_averaged_are_told_of_once(
    kind: Any, clip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_onebit"):
        for averaged, world in ((False, 2), (True, 1)):
            run_world(averaged_before, world, kind, averaged, clip)
        assert not caplog.records
        run_world(averaged_before, 2, kind, True, clip)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "same gradients" in said and "onebit_ddp(ddp_model, optimizer)" in said


# ----- parameters that are no plain tensors -----------------------------------------------------------------------------------------


def of_dtensors(rank: int, world: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    shared = nn.Parameter(distribute_tensor(torch.ones(8), init_device_mesh("cpu", (world,)), [Replicate()]))
    said = []
    for kind in CLASSES.values():
        optimizer = kind(small())
        for refused in (lambda kind=kind: kind([shared]), lambda o=optimizer: o.add_param_group({"params": [shared]})):
            with pytest.raises(TypeError) as caught:
                refused()
            said.append(str(caught.value))
        assert len(optimizer.param_groups) == 1
    return said


def test_dtensor_parameters_are_refused_by_name_when_an_optimizer_is_made() -> None:
    for said in run_ranks(of_dtensors, 1)[0]:
        assert "DTensor" in said and "shape (8,)" in said and "not train yet" in said
