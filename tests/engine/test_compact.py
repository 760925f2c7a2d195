"""A checkpoint in the compressed phase is as large as AdamW's, and what it leaves out comes back bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_onebit.algorithms import OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.algorithms.updates import reciprocal_denominator_, second_moment_from_reciprocal
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer
from lightning_onebit.engine.compact import Inversion, compact, expanded
from lightning_onebit.engine.state import packed

MAKERS: dict[str, Any] = {
    "adam": lambda p: OnebitAdam(p, freeze_step=3, exchange=ExchangeOptions(_alone=True)),
    "published": lambda p: OnebitAdam(p, freeze_step=3, recipe="published", exchange=ExchangeOptions(_alone=True)),
    "16 bits": lambda p: OnebitAdam(p, freeze_step=3, exchange=ExchangeOptions(state_dtype="bfloat16", _alone=True)),
    "lamb": lambda p: OnebitLamb(p, freeze_step=3, exchange=ExchangeOptions(_alone=True)),
    "0/1": lambda p: ZeroOneAdam(p, freeze_step=3, exchange=ExchangeOptions(_alone=True)),
}


def size(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getbuffer())


def trained(make: Any, shapes: list[tuple[int, ...]], steps: int = 6) -> tuple[list[Any], Any]:
    draws = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    if len(shapes[0]) == 4:
        params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws)
            p.grad[0] *= 1e-9
        optimizer.step()
    return params, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_after_the_freeze_is_not_larger_than_adamws(kind: str) -> None:
    shapes = [(300, 200), (8, 3, 5, 5), (11_200,)]
    params, optimizer = trained(MAKERS[kind], shapes)
    assert optimizer.phase != "warmup"
    plain = torch.optim.AdamW(params)
    plain.step()
    names = set().union(*optimizer.state_dict()["state"].values())
    # books, and a scale for each block; 1-bit LAMB has fresh second moments besides
    fresh = 4 * sum(p.numel() for p in params) if kind == "lamb" else 0
    assert size(optimizer.state_dict()) < 1.01 * size(plain.state_dict()) + fresh + 8_000, names


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_left_out_comes_back_bit_for_bit_whatever_the_layout(kind: str) -> None:
    """Also from a file that has lost the strides, and in an optimizer of other blocks."""
    params, optimizer = trained(MAKERS[kind], [(5, 3, 4, 4), (70, 60), (1,), (7,)])
    whole, saved = packed(optimizer), optimizer.state_dict()
    assert "reciprocal_denominator" in whole["state"][1] and "reciprocal_denominator" not in saved["state"][1]
    before = copy.deepcopy(saved)
    for state in saved["state"].values():
        for name, value in state.items():
            state[name] = value.contiguous()
    found = expanded(saved)
    for i, state in whole["state"].items():
        for name in state.keys() - {"exp_avg_sq"}:
            assert equal(state[name].contiguous(), found["state"][i][name].contiguous()), (i, name)
        torch.testing.assert_close(state["exp_avg_sq"], found["state"][i]["exp_avg_sq"], rtol=1e-6, atol=1e-44)
    assert equal(saved, before), "what was given stays as it was"
    resumed = MAKERS[kind](copied := copy.deepcopy(params))
    resumed.load_state_dict(saved)
    resumed.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
    for p, q in zip(params, copied, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    resumed.step()
    assert all(torch.equal(p, q) for p, q in zip(params, copied, strict=True))


def test_plain_adamw_loads_it_and_steps_by_the_frozen_denominators() -> None:
    params, optimizer = trained(MAKERS["adam"], [(40, 50)])
    whole = packed(optimizer)["state"][0]
    plain = torch.optim.AdamW(params, lr=0.5, weight_decay=0.0)
    plain.load_state_dict({**optimizer.state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    before, params[0].grad = params[0].detach().clone(), torch.zeros_like(params[0])
    plain.step()
    moved = (before - params[0].detach()) / 0.5 * (1 - 0.9**7) / 0.9
    # AdamW corrects by the step it makes; v has lost a thousandth
    torch.testing.assert_close(moved, whole["exp_avg"] * whole["reciprocal_denominator"], rtol=0.1, atol=1e-6)


@settings(max_examples=40)
@given(
    magnitude=st.floats(-22, 8),
    beta=st.sampled_from([0.9, 0.95, 0.999]),
    steps=st.integers(1, 3000),
    updates=st.integers(1, 3000),
    eps=st.sampled_from([0.0, 1e-15, 1e-8, 1e-3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_denominators_follow_from_second_moments_of_any_magnitude(
    magnitude: float, beta: float, steps: int, updates: int, eps: float, dtype: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(0)
    v = (torch.randn(1500, generator=draws) * 10**magnitude).square()
    v[::5] = 0
    correction, age = 1 - beta**updates, (1 - beta**steps) / (1 - beta**updates)
    r = torch.empty(1500, dtype=dtype)
    reciprocal_denominator_(v, r, phi=0.1, eps=eps, correction=correction)
    made = second_moment_from_reciprocal(r, eps=eps, correction=correction) * age
    packed = {"state": {0: {"exp_avg_sq": made.clone(), "reciprocal_denominator": r.clone()}}, "onebit": {}}
    packed = compact(packed, {0: Inversion(eps, 1 - beta**steps)}, 2048)
    assert equal(expanded(packed)["state"][0]["reciprocal_denominator"], r)


def test_a_momentum_that_is_not_one_scale_per_block_is_saved_whole() -> None:
    momentum = torch.randn(100)
    state = {"exp_avg": momentum.clone(), "preconditioned_momentum": momentum.clone()}
    packed = compact({"state": {0: state}, "onebit": {}}, {0: Inversion(0.0, 1.0)}, 32)
    assert equal(packed["state"][0]["preconditioned_momentum"], momentum)


def test_a_state_whose_parts_do_not_fit_together_is_refused_before_anything_changes() -> None:
    _, optimizer = trained(MAKERS["adam"], [(40, 50)])
    for lost in ("exp_avg", "exp_avg_sq", "momentum_layout"):
        broken = copy.deepcopy(optimizer.state_dict())
        del broken["state"][0][lost]
        other: OnebitOptimizer = MAKERS["adam"]([torch.nn.Parameter(torch.zeros(40, 50))])
        with pytest.raises(ValueError, match=f"parameter 0 is not complete.*{lost}"):
            other.load_state_dict(broken)
        assert other.steps == 0
