"""What programs do to parameters, gradients and state between steps, which no training loop of Lightning's does."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import time
import weakref
from typing import Any

import pytest
import torch
from harness import grouped
from optim_support import CLASSES, CROSSING, run_world
from torch import Tensor, nn

from lightning_onebit.algorithms import LocalSteps, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.comm import PlanMismatch, SimulatedWorld
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer

STEPS = 12


def build(algorithm: str, params: Any, group: Any = None, **options: Any) -> OnebitOptimizer:
    settings = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32, **options}
    return CLASSES[algorithm](params, **grouped(settings, process_group=group))


def fill(params: list[nn.Parameter], step: int, rank: int) -> None:
    """Random gradients of a step, others on every rank, as autograd leaves them: added to those there are."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    sum((p * torch.randn(p.shape, generator=draws, dtype=p.dtype)).sum() for p in params).backward()  # type: ignore[union-attr]


def equal_everywhere(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# ----- parameters that are moved or changed -----------------------------------------------------------------------------------------


def moved(group: Any, rank: int, world: int, algorithm: str, there_and_back: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
    params = list(model.parameters())
    with torch.no_grad():
        for p in params:
            p.fill_(0.5)
    optimizer = build(algorithm, [{"params": params[:2]}, {"params": params[2:], "compress": False}], group)
    for t in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        fill(params, t, rank)
        optimizer.step()
        if there_and_back:
            model.double().float()
    optimizer.synchronise()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("algorithm", CLASSES)
def test_a_model_that_is_converted_and_converted_back_between_steps_trains_as_before(algorithm: str) -> None:
    """``Module.double()`` points ``.grad`` at other memory, too, and next to it the buffers that gradients were averaged in."""
    still, converted = (run_world(moved, 2, algorithm, there_and_back) for there_and_back in (False, True))
    assert equal_everywhere(converted) and equal_everywhere([still[0], converted[0]])


CHANGES: dict[str, Any] = {
    "strides": lambda p: p.detach().contiguous(memory_format=torch.channels_last),
    "shape": lambda p: p.detach().reshape(4, 3, 9),
    "dtype": lambda p: p.detach().half(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [1, 6])
@pytest.mark.parametrize("algorithm", CLASSES)
def test_a_parameter_of_another_form_is_refused_by_name(algorithm: str, step: int, change: str) -> None:
    """State lies in the memory order of the parameters: it would belong to other elements."""
    param = nn.Parameter(torch.ones(4, 3, 3, 3))
    optimizer = build(algorithm, [param], _alone=True)
    for t in range(step):
        optimizer.zero_grad()
        fill([param], t, 0)
        optimizer.step()
    param.grad = None
    param.data = CHANGES[change](param)
    before = param.detach().clone()
    fill([param], step, 0)
    with pytest.raises(RuntimeError, match=r"parameter 0 was torch\.float32 of shape \(4, 3, 3, 3\).*load_state_dict"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam])
def test_alone_it_is_adamw_whatever_the_strides_of_a_gradient(kind: Any) -> None:
    """torch's fused kernel walks through memory; ``autograd.grad`` gives gradients in the strides that autograd made."""
    weights = []
    for make in (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0), lambda p: kind(p, lr=0.01)):
        w = nn.Parameter(torch.arange(60.0).view(6, 10) / 60)
        optimizer = make([w])
        draws = torch.Generator().manual_seed(0)
        for _ in range(5):
            x = torch.randn(8, 10, 1, generator=draws)
            (w.grad,) = torch.autograd.grad((w.t().contiguous().tanh() * x).square().sum(), [w])
            assert w.grad.stride() != w.stride()
            optimizer.step()
        weights.append(w.detach())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)


def differently_seeded(group: Any, rank: int, world: int, algorithm: str) -> str:
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.randn(40).bfloat16())]
    optimizer = build(algorithm, params, group)
    fill(params, 0, rank)
    try:
        optimizer.step()
    except PlanMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("algorithm", CLASSES)
def test_ranks_that_begin_with_other_weights_are_told_which(algorithm: str) -> None:
    for said in run_world(differently_seeded, 2, algorithm):
        assert "the first weights: rank 0 has [parameter 1: " in said and "seed the ranks alike" in said


@pytest.mark.parametrize("algorithm", ["onebit_adam", "zero_one_adam", "binsgdm"])
def test_a_compiled_training_step_leaves_the_optimizer_alone(algorithm: str) -> None:
    torch._dynamo.reset()
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = build(algorithm, model.parameters(), _alone=True)

        def train(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        step: Any = torch.compile(train, backend="eager") if compiled else train
        for t in range(STEPS):
            step(torch.randn(5, 6, generator=torch.Generator().manual_seed(t)))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert equal_everywhere(weights)


# ----- numbers that are finite, and too large -----------------------------------------------------------------------------------------


def enormous(group: Any, rank: int, world: int, algorithm: str, step: int) -> tuple[int, int, str]:
    params = [nn.Parameter(torch.ones(200)), nn.Parameter(torch.ones(30))]
    optimizer = build(algorithm, params, group)
    for t in range(STEPS):
        optimizer.zero_grad()
        fill(params, t, rank)
        if t == step and rank == 1:
            assert params[1].grad is not None
            params[1].grad[3] = 1e28
        try:
            optimizer.step()
        except FloatingPointError as error:
            return optimizer.steps, optimizer.skipped_steps, str(error)
    return optimizer.steps, optimizer.skipped_steps, ""


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_a_step_of_finite_gradients_whose_squares_overflow_is_skipped_on_all_ranks(algorithm: str) -> None:
    assert run_world(enormous, 2, algorithm, 7) == [(STEPS - 1, 1, "")] * 2


@pytest.mark.parametrize(("algorithm", "step"), [("zero_one_adam", STEPS - 4), ("onebit_sgd", 7)])
def test_or_is_an_error_on_all_ranks_where_they_have_learned_from_it(algorithm: str, step: int) -> None:
    """After local steps 0/1 Adam finds out when it next synchronises."""
    results = run_world(enormous, 2, algorithm, step)
    assert len({steps for steps, *_ in results}) == 1 and results[0][0] < STEPS
    for _, skipped, said in results:
        assert "squares are not (fp32)" in said and "lower lr" in said and not skipped


def sent_early(group: Any, rank: int, world: int, value: float) -> tuple[list[torch.Tensor], int]:
    """A gradient that has been sent and is written to afterwards, beside a group that is averaged densely."""
    params = [nn.Parameter(torch.ones(200)), nn.Parameter(torch.ones(30))]
    groups = [{"params": params[:1]}, {"params": params[1:], "compress": False}]
    optimizer = OnebitAdam(
        groups, lr=0.01, freeze_step=2, exchange=ExchangeOptions(overlap="backward", block_size=64, process_group=group)
    )
    for t in range(5):
        optimizer.zero_grad()
        optimizer.begin_backward()
        draws = torch.Generator().manual_seed(10 * t + rank)
        loss = sum((torch.randn(p.shape, generator=draws) * p).sum() for p in params)
        (loss * (value if t == 4 else 1.0)).backward()
        if t == 3 and rank == 1:
            assert params[0].grad is not None
            params[0].grad[3] = float("nan")
        optimizer.step()
    return [p.detach() for p in params], optimizer.skipped_steps


def test_what_is_written_into_a_gradient_that_was_sent_early_concerns_nobody() -> None:
    results = run_world(sent_early, 2, 1.0)
    assert not any(skipped for _, skipped in results)
    assert all(bool(p.isfinite().all()) for params, _ in results for p in params)


def test_squares_that_overflow_in_a_bucket_sent_early_skip_the_step() -> None:
    for params, skipped in run_world(sent_early, 2, 1e24):
        assert skipped == 1 and all(bool(p.isfinite().all()) for p in params)


def test_the_stride_of_a_dimension_of_one_does_not_concern_the_state() -> None:
    conv = nn.Conv2d(1, 8, 3)
    optimizer = OnebitAdam(conv.parameters(), lr=0.01)
    strides = set()
    for _ in range(2):
        conv(torch.ones(1, 1, 4, 4)).sum().backward()
        optimizer.step()
        strides.add(conv.weight.stride())
        conv.to(memory_format=torch.channels_last)
    assert len(strides) == 2, "this is what the test is about"
    assert optimizer.steps == 2


def test_landing_hooks_that_are_made_anew_leave_nothing_behind() -> None:
    def hooks(group: Any, rank: int, world: int) -> tuple[Any, Any]:
        param = nn.Parameter(torch.ones(100))
        optimizer = OnebitAdam(
            [param], lr=0.01, exchange=ExchangeOptions(overlap="backward", block_size=64, process_group=group)
        )
        counts = []
        for _ in range(3):
            for t in range(3):
                optimizer.zero_grad()
                optimizer.begin_backward()
                (param * param).sum().backward()
                optimizer.step()
                if t == 0:
                    dense = len(param._post_accumulate_grad_hooks or ())
                    optimizer.freeze()
            kept = [
                entry for entry in weakref.finalize._registry.values() if entry.weakref() is optimizer._engine.early
            ]
            counts.append((len(param._post_accumulate_grad_hooks or ()), len(kept)))
            optimizer.thaw()
            assert len(param._post_accumulate_grad_hooks or ()) == dense, "a thaw takes those of the overlap back"
        return counts[0], counts[-1]

    for first, last in SimulatedWorld(2, timeout=60).run(lambda group: hooks(group, group.rank, group.size)):
        assert first == last


def test_importing_the_optimizers_does_not_import_a_compiler() -> None:
    look = "print('torch._dynamo' in sys.modules)"
    program = f"import sys, torch\n{look}\nimport lightning_onebit.algorithms\n{look}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    before, after = done.stdout.split()
    assert after == before


@pytest.mark.parametrize("kind", [OnebitAdam, OnebitLamb])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_one_second_moment_that_overflows_does_not_stop_its_whole_tensor(kind: Any, floor: float) -> None:
    """1-bit LAMB compresses momenta, in which the square of that gradient overflows too: none of its steps can be made then."""
    param = nn.Parameter(torch.ones(100))
    optimizer = kind(
        [param], lr=0.01, freeze_step=3, denominator_floor=floor, exchange=ExchangeOptions(_alone=True, block_size=32)
    )
    for t in range(3 if kind is OnebitLamb else 6):
        optimizer.zero_grad()
        fill([param], t, 0)
        if t == 1:
            assert param.grad is not None
            param.grad[7] = 1e30
        before = param.detach().clone()
        optimizer.step()
    assert bool(torch.isfinite(param).all())
    assert int((param != before).sum()) >= 99
    if kind is OnebitLamb:
        optimizer.step()
        assert optimizer.skipped_steps == 1


def broken_dense_group(group: Any, rank: int, world: int) -> list[bool]:
    p, q = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(5))
    groups = [{"params": [p]}, {"params": [q], "compress": False}]
    optimizer = OnebitAdam(
        groups, lr=0.01, freeze_step=2, exchange=ExchangeOptions(overlap="backward", process_group=group)
    )
    moved = []
    for t in range(6):
        optimizer.zero_grad()
        before = [x.detach().clone() for x in (p, q)]
        optimizer.begin_backward()
        ((p * torch.randn(300)).sum() + q.sum() * (float("nan") if t == 4 and rank == 1 else 1.0)).backward()
        optimizer.step()
        moved.append(not equal_everywhere([before, [p.detach(), q.detach()]]))
    return moved


def test_with_overlap_a_bad_gradient_of_a_dense_group_skips_the_step() -> None:
    for moved in run_world(broken_dense_group, 2):
        assert moved == [True, True, True, True, False, True]


# ----- 0/1 Adam: what is written into the model, and saved from it ------------------------------------------------------------------------


def written(group: Any, rank: int, world: int, dtype: torch.dtype, when: str) -> tuple[int, float, float]:
    """Writes 9 into a weight whose gradient is always 0; what it is after the next synchronisation, and in a state saved before."""
    param = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer: Any = build("zero_one_adam", [param], group, local_steps=LocalSteps(max_gap=2, double_every=1))
    saved, at = float("nan"), -1
    for t in range(20):
        optimizer.zero_grad()
        fill([param], t, rank)
        assert param.grad is not None
        param.grad[0] = 0.0
        optimizer.step()
        if t > 8 and at < 0 and optimizer.mid_local == (when == "within consensus()"):
            at = t
            with optimizer.consensus() if optimizer.mid_local else contextlib.nullcontext(), torch.no_grad():
                param[0] = 9.0
                state = optimizer.state_dict()["state"][0]
                saved = float(state.get("master", param.detach())[0])
    optimizer.synchronise()
    return at, float(param.detach()[0]), saved


@pytest.mark.parametrize("when", ["after a synchronisation", "within consensus()"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_one_adam_keeps_what_is_written_into_the_model_that_all_share(dtype: torch.dtype, when: str) -> None:
    for at, value, saved in run_world(written, 2, dtype, when):
        assert at > 8 and saved == 9.0
        assert value == pytest.approx(
            9.0, abs=0.5
        )  # (one bit of noise an exchange, and nothing that pulls it back to 1)


def saved_between(group: Any, rank: int, world: int, within: bool) -> tuple[list[Tensor], list[Tensor], str]:
    """A run, and one that goes on from what the first saved between two synchronisations."""

    def make() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(9).bfloat16())]
        return params, build("zero_one_adam", params, group)

    def go(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
        for t in steps:
            optimizer.zero_grad()
            fill(params, t, rank)
            optimizer.step()
        optimizer.synchronise()

    params, optimizer = make()
    t = 0
    while t < 10 or not optimizer.mid_local:
        optimizer.zero_grad()
        fill(params, t, rank)
        optimizer.step()
        t += 1
    with optimizer.consensus() if within else contextlib.nullcontext():
        model = [p.detach().clone() for p in params]
        state = copy.deepcopy(optimizer.state_dict())
    own = copy.deepcopy(optimizer.residual_state_dict())
    again, other = make()
    with torch.no_grad():
        for p, value in zip(again, model, strict=True):
            p.copy_(value)
    other.load_state_dict(state)
    try:
        other.load_residual_state_dict(own)
    except ValueError as error:
        return [], [], str(error)
    go(params, optimizer, range(t, t + 9))
    go(again, other, range(t, t + 9))
    return [p.detach() for p in params], [p.detach() for p in again], ""


def test_zero_one_adam_resumes_exactly_from_what_was_saved_within_consensus_and_refuses_the_rest() -> None:
    results = run_world(saved_between, 2, True)
    assert all(equal_everywhere([straight, resumed]) for straight, resumed, _ in results)
    assert equal_everywhere([resumed for _, resumed, _ in results])
    for _, _, said in run_world(saved_between, 2, False):
        assert "other weights than all ranks shared" in said and "optimizer.consensus()" in said


# ----- after something has failed -----------------------------------------------------------------------------------------------------


def test_after_a_collective_that_failed_communication_can_be_given_back_and_another_run_begin() -> None:
    params = [nn.Parameter(torch.ones(10)) for _ in range(2)]

    def stalls(group: Any) -> OnebitOptimizer:
        param = params[group.rank]
        optimizer = OnebitAdam([param], lr=1e-3, exchange=ExchangeOptions(process_group=group, timeout=0.5))
        for t in range(2):
            optimizer.zero_grad()
            if t == 1 and group.rank == 1:
                time.sleep(1.5)  # rank 0 gives up meanwhile
                break
            optimizer.begin_backward()
            param.sum().backward()
            with contextlib.nullcontext() if t == 0 else pytest.raises(RuntimeError, match="dense all-reduce"):
                optimizer.step()
        return optimizer

    for optimizer in SimulatedWorld(2, timeout=30).run(stalls):
        optimizer.release_communication()
    assert not any(param._post_accumulate_grad_hooks for param in params)

    def goes_on(group: Any) -> float:
        param = params[group.rank]
        optimizer = OnebitAdam([param], lr=1e-3, exchange=ExchangeOptions(process_group=group))
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.begin_backward()
            param.sum().backward()
            optimizer.step()
        return float(param.detach()[0])

    first, second = SimulatedWorld(2, timeout=30).run(goes_on)
    assert first == second == pytest.approx(0.997)


@pytest.mark.parametrize("algorithm", CLASSES)
@pytest.mark.parametrize(
    ("key", "value", "named"), [("phase", "x", ["'x'", "'warmup'"]), ("known", [0, 99], ["parameter 99", "has 1"])]
)
def test_a_damaged_state_is_refused_before_anything_changes(
    algorithm: str, key: str, value: Any, named: list[str]
) -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = build(algorithm, [param], _alone=True)
    for t in range(8):
        optimizer.zero_grad()
        fill([param], t, 0)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(optimizer.residual_state_dict())
    state["onebit"][key] = value
    with pytest.raises(ValueError) as refused:
        optimizer.load_state_dict(state)
    assert all(word in str(refused.value) for word in named)
    after = optimizer.residual_state_dict()
    assert before["steps"] == after["steps"] == 8
    assert all(torch.equal(before["tensors"][name], after["tensors"][name]) for name in before["tensors"])


def let_go(group: Any, rank: int, world: int, algorithm: str, overlap: str) -> list[weakref.ref[nn.Parameter]]:
    """Parameters of a model and of its optimizer that the program lets go of without another word."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(9))]
    options: dict[str, Any] = {"overlap": overlap} if overlap != "step" else {}
    optimizer = build(algorithm, [{"params": params[:1]}, {"params": params[1:], "compress": False}], group, **options)
    for t in range(STEPS):
        optimizer.zero_grad()
        optimizer.begin_backward()
        fill(params, t, rank)
        optimizer.step()
    return [weakref.ref(p) for p in params]


@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    [*((name, "step") for name in CLASSES), ("onebit_adam", "backward"), ("onebit_lamb", "backward")],
)
def test_what_the_program_lets_go_of_is_freed(algorithm: str, overlap: str) -> None:
    gc.freeze()  # a collection need not look through what was imported
    try:
        known = run_world(let_go, 2, algorithm, overlap)
        gc.collect()  # here and not in the ranks' threads: a collection while another thread collects does nothing
        assert [[reference() for reference in references] for references in known] == [[None, None]] * 2
    finally:
        gc.unfreeze()


# ----- inference mode, in which Lightning runs validations with their hooks -----------------------------------------------------------


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("algorithm", "called"),
    [
        *[("onebit_adam", called) for called in ("freeze", "thaw", "load")],
        *[("onebit_lamb", called) for called in ("freeze", "thaw", "load")],
        *[("zero_one_adam", called) for called in ("freeze", "load")],
    ],
)
def test_what_is_laid_out_in_inference_mode_serves_the_steps_after_it(
    algorithm: str, called: str, kernels: str
) -> None:
    """A validation's hook may freeze, thaw or load: later steps, and what reads residuals, change what it has laid out."""

    def run(inference: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(5 * 32)), nn.Parameter(torch.ones(40, dtype=torch.bfloat16))]
        options: Any = {"_alone": True, "state_dtype": "bfloat16"}
        if algorithm != "onebit_lamb":
            options["refresh"] = 3
        optimizer = CLASSES[algorithm](params, lr=0.01, **grouped(options, block_size=32, kernels=kernels))
        for t in range(12):
            if t == 3 and called != "freeze":
                optimizer.freeze()
            if t == 5:
                saved = copy.deepcopy((optimizer.state_dict(), optimizer.residual_state_dict()))
                with torch.inference_mode(inference):
                    if called == "load":
                        optimizer.load_state_dict(saved[0])
                        optimizer.load_residual_state_dict(saved[1])
                    else:
                        getattr(optimizer, called)()
                    assert torch.is_inference_mode_enabled() is inference
            optimizer.zero_grad()
            fill(params, t, 0)
            optimizer.step()
        optimizer.synchronise()
        residuals = optimizer.residual_state_dict()["tensors"]
        return [p.detach() for p in params] + [value.clone() for value in residuals.values()]

    assert equal_everywhere([run(False), run(True)])
