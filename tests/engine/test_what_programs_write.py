"""What programs write into weights, parameter groups and state: it counts, or it is refused by name before anything moves."""

from __future__ import annotations

import collections
import copy
import inspect
import logging
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import grouped, run_ranks
from optim_support import CLASSES, CROSSING, run_world
from torch import Tensor, nn

from lightning_onebit.algorithms import LocalSteps, OnebitAdam, ZeroOneAdam
from lightning_onebit.comm import PlanMismatch
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer, Phase
from lightning_onebit.engine.masters import Comparison
from lightning_onebit.engine.sharded import OLDEST_TORCH

STEPS = 12


def build(algorithm: str, params: Any, group: Any = None, **options: Any) -> OnebitOptimizer:
    settings = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32, **options}
    return CLASSES[algorithm](params, **grouped(settings, process_group=group))


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
        # steps of 0.01 from what was written; before, weights are as large as 2
        assert not seen or all(p.abs().max() < 0.5 for p in params)
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
        optimizer = build("onebit_adam", params, _alone=True)
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
    "betas": ((0.9, 0.99), "means nothing to"),
    "max_grad_norm": (1.0, "one max_grad_norm for all groups"),
}


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (a, k)
        for a, cls in CLASSES.items()
        for k in IGNORED
        if k not in inspect.signature(cls).parameters or k == "max_grad_norm"
    ],
)
def test_a_key_of_a_group_that_would_be_ignored_raises_before_the_step(algorithm: str, key: str) -> None:
    value, words = IGNORED[key]
    params = small()
    optimizer = build(algorithm, params, _alone=True)
    fill(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0][key] = value
    fill(params, 1)
    with pytest.raises((ValueError, RuntimeError), match=f"{key}={re.escape(str(value))}.*{words}"):
        optimizer.step()
    assert all(map(torch.equal, params, before)) and optimizer.steps == 1
    if key == "compress":
        optimizer.param_groups[0][key] = True
        optimizer.step()
        return
    with pytest.raises(ValueError, match=f"{key}={re.escape(str(value))}"):
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
    optimizer = OnebitAdam(
        [{"params": params, "name": "all", "lr_scale": 0.5}], freeze_step=2, exchange=ExchangeOptions(_alone=True)
    )
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
    optimizer = build(algorithm, params, _alone=True)
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


# ----- optimizer.state --------------------------------------------------------------------------------------------------------------

#: besides CROSSING: refreshes and both forms of the momentum
READ: dict[str, tuple[str, dict[str, Any]]] = {
    **{algorithm: (algorithm, {}) for algorithm in CLASSES},
    "refreshed": ("onebit_adam", {"refresh": 3}),
    "published": ("onebit_adam", {"recipe": "published"}),
    "local, refreshed": ("zero_one_adam", {"refresh": 4}),
    "local, published": ("zero_one_adam", {"recipe": "published"}),
    "drawn, published": ("binsgdm", {"recipe": "published"}),
}


@pytest.mark.parametrize("name", READ)
def test_optimizer_state_reads_as_a_checkpoint_in_every_phase(name: str) -> None:
    algorithm, options = READ[name]
    params = [*small(), nn.Parameter(torch.ones(7, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [*params[:1], *params[2:]]}, {"params": params[1:2], "compress": False}]
    optimizer = build(algorithm, groups, _alone=True, **options)
    params = [p for group in groups for p in group["params"]]
    assert len(optimizer.state) == 0 and list(optimizer.state) == [] and optimizer.state[params[0]] == {}
    own = {"binsgdm": {"momentum", "magnitude"}, "onebit_sgd": {"momentum_buffer"}}
    moments = own.get(algorithm, {"exp_avg", "exp_avg_sq"})
    for t in range(STEPS):
        fill(params[:-1], t)
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        assert list(optimizer.state) == params[:-1] and params[-1] not in optimizer.state
        for i, (p, entry) in enumerate(optimizer.state.items()):
            assert {"step", *moments} <= entry.keys() and entry is optimizer.state[p]
            assert all(entry[key].shape == p.shape for key in moments) and entry["step"] == t + 1
            for key in saved[i].keys() & entry.keys():
                # (a checkpoint's second moments give the denominators bit for bit)
                rounding = {"rtol": 1e-6, "atol": 1e-44} if key == "exp_avg_sq" else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(entry[key], saved[i][key], **rounding, msg=key)
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(1))]


def _write_a_copy(how: Callable[[Tensor], Any]) -> Callable[[Any, Any], None]:
    def write(optimizer: Any, p: nn.Parameter) -> None:
        how(optimizer.state[p]["exp_avg"])

    return write


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clear": lambda o, p: o.state.clear(),
    "replace": lambda o, p: setattr(o, "state", collections.defaultdict(dict)),
    "delete": lambda o, p: o.state.__delitem__(p),
    "pop": lambda o, p: o.state.pop(p, None),
    "assign": lambda o, p: o.state.__setitem__(p, {}),
    "update": lambda o, p: o.state.update({p: {"step": torch.zeros(())}}),
    "assign a key": lambda o, p: o.state[p].__setitem__("exp_avg", torch.zeros_like(p)),
    "assign a new key": lambda o, p: o.state[p].__setitem__("mine", 1),
    "clear an entry": lambda o, p: o.state[p].clear(),
    "pop a key": lambda o, p: o.state[p].pop("exp_avg", None),
    "zero_": _write_a_copy(lambda t: t.zero_()),
    "fill elements": _write_a_copy(lambda t: t.__setitem__(0, 0.0)),
    "foreach": _write_a_copy(lambda t: torch._foreach_mul_([t], 0.5)),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_into_optimizer_state_raises_before_anything_moves(how: str) -> None:
    params = small()
    optimizer = build("onebit_adam", params, _alone=True)
    for t in range(6):
        fill(params, t)
        optimizer.step()
    before, state = [p.detach().clone() for p in params], optimizer.state_dict()["state"]
    with pytest.raises(RuntimeError, match=r"optimizer\.state.*reset_state\(\)"):
        WRITES[how](optimizer, params[0])
        fill(params, 6)
        optimizer.step()
    assert optimizer.steps == 6 and all(map(torch.equal, params, before))
    for key, value in state[0].items():
        assert torch.equal(optimizer.state_dict()["state"][0][key], value)
    optimizer.reset_state()
    fill(params, 6)
    optimizer.step()
    assert optimizer.steps == 1


def test_a_copy_that_is_held_for_long_is_watched_for_as_long() -> None:
    params = small()
    optimizer = build("onebit_adam", params, _alone=True)
    fill(params, 0)
    optimizer.step()
    held = optimizer.state[params[0]]["exp_avg"]
    for t in range(3):
        fill(params, t)
        optimizer.step()
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], held)
    held.zero_()
    with pytest.raises(RuntimeError, match=r"state\[parameter 0\]\['exp_avg'\] has been written to"):
        optimizer.step()


def test_moving_the_state_as_lightning_does_changes_nothing_and_keeps_no_copies() -> None:
    from lightning.fabric.utilities.optimizer import _optimizer_to_device
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning_utilities.core.apply_func import apply_to_collection

    params = small()
    optimizer = build("onebit_adam", params, _alone=True)
    _optimizer_to_device(optimizer, torch.device("cpu"))
    fill(params, 0)
    optimizer.step()
    given = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    _optimizer_to_device(optimizer, torch.device("cpu"))
    for p, entry in optimizer.state.items():  # earlier releases, of other devices
        optimizer.state[p] = apply_to_collection(entry, Tensor, torch.clone)
    del entry
    assert given() is None
    wrapper: Any = LightningOptimizer(optimizer)
    assert wrapper.state is optimizer.state
    optimizer.state = optimizer.state
    fill(params, 1)
    optimizer.step()


def test_copies_of_an_optimizer_have_no_state_and_torch_describes_it_as_ever() -> None:
    params = small()
    optimizer = build("onebit_adam", params, _alone=True)
    fill(params, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state == {} and len(other.param_groups) == 1
        with pytest.raises(AttributeError, match="was copied or unpickled"):
            other.step()
    assert "lr: 0.01" in repr(optimizer) and "2 parameters of OnebitAdam" in repr(optimizer.state)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(optimizer.state) == 2


def test_a_plain_optimizer_in_whose_place_another_trains_shows_its_state() -> None:
    from lightning_onebit.strategy.convert import convert, stand_down, stand_in

    params = small()
    plain = torch.optim.AdamW(params)
    converted = convert(plain, OnebitAdam, {"exchange": ExchangeOptions(_alone=True)})
    stand_in(plain, converted)
    fill(params, 0)
    converted.step()
    assert torch.equal(plain.state[params[0]]["exp_avg"], converted.state[params[0]]["exp_avg"])
    with pytest.raises(RuntimeError, match="reset_state"):
        plain.state.clear()
    stand_down(plain, converted)
    plain.step()
    assert plain.state[params[0]]["step"] == 1


def test_torchs_checkpoint_functions_take_no_hidden_step(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, other = (nn.Linear(4, 3) for _ in range(2))
    optimizer = build("onebit_adam", model.parameters(), _alone=True)
    before = [p.detach().clone() for p in model.parameters()]
    assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    assert optimizer.steps == 0 and all(map(torch.equal, model.parameters(), before))
    for t in range(6):
        fill(list(model.parameters()), t)
        optimizer.step()
        optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    assert optimizer.steps == 6 and torch.equal(
        state["state"]["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )
    resumed = build("onebit_adam", other.parameters(), _alone=True)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(state))
    assert resumed.steps == 6 and resumed.phase is Phase.COMPRESSED  # (by freeze_step)
    torch.testing.assert_close(resumed.state[other.weight]["exp_avg_sq"], optimizer.state[model.weight]["exp_avg_sq"])
    by_hand = OnebitAdam(other.parameters(), exchange=ExchangeOptions(_alone=True))
    with caplog.at_level(logging.WARNING, logger="lightning_onebit"):
        set_optimizer_state_dict(other, by_hand, copy.deepcopy(state))
    assert by_hand.phase is Phase.WARMUP and "has lost its entry 'onebit'" in caplog.text


def started_over(group: Any, rank: int, world: int, algorithm: str, dtype: torch.dtype) -> Any:
    """A run that starts over, and a new optimizer that begins with its weights."""
    params = small(dtype)
    optimizer = build(algorithm, params, group)
    for t in range(STEPS):
        fill(params, t, rank)
        optimizer.step()
    if algorithm == "zero_one_adam":
        assert optimizer.mid_local, "this is what the test is about"
    optimizer.reset_state()
    kept = [p.detach().clone() for p in params]
    assert optimizer.steps == 0 and len(optimizer.state) == 0
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = build(algorithm, others, group)
    for t in range(STEPS):
        for ps, o in ((params, optimizer), (others, other)):
            fill(ps, 50 + t, rank)
            o.step()
    for o in (optimizer, other):
        o.synchronise()
    return kept, [p.detach() for p in params], [p.detach() for p in others], optimizer.phase


@pytest.mark.parametrize("algorithm", CLASSES)
def test_reset_state_starts_over_as_a_new_optimizer_would(algorithm: str) -> None:
    results = run_world(started_over, 2, algorithm, torch.float32)
    for kept, again, anew, phase in results:
        assert all(map(torch.equal, again, anew)) and phase is not Phase.WARMUP
        assert all(map(torch.equal, kept, results[0][0])) and all(map(torch.equal, again, results[0][1]))


def test_reset_state_keeps_the_last_bits_of_16_bit_weights() -> None:
    params = small(torch.bfloat16)
    optimizer = build("onebit_adam", params, _alone=True)
    for t in range(6):
        fill(params, t)
        optimizer.step()
    masters = [optimizer._engine.kept.masters[i].clone() for i in range(2)]
    assert not torch.equal(masters[0].bfloat16().float(), masters[0])
    optimizer.reset_state()
    assert all(torch.equal(optimizer._engine.kept.masters[i], master) for i, master in enumerate(masters))


def test_reset_state_of_some_parameters_is_what_adamw_without_their_state_does() -> None:
    ours, theirs = small(), small()
    optimizer = OnebitAdam(ours, lr=0.01, exchange=ExchangeOptions(_alone=True))
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.0)
    for t in range(8):
        for params, stepped in ((ours, optimizer), (theirs, adamw)):
            fill(params, t)
            stepped.step()
        if t == 4:
            optimizer.reset_state([ours[1]])
            adamw.state.pop(theirs[1])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="not a parameter of this optimizer"):
        optimizer.reset_state([theirs[0]])


# ----- gradients that are averaged already ------------------------------------------------------------------------------------------


def averaged_before(group: Any, rank: int, world: int, kind: Any, averaged: bool, clip: bool) -> None:
    params = small()
    optimizer = kind(params, lr=0.01, exchange=ExchangeOptions(process_group=group, block_size=32))
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


def of_summands(rank: int, world: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    shared = nn.Parameter(DTensor.from_local(torch.ones(8), init_device_mesh("cpu", (world,)), [Partial()]))
    said = []
    for kind in CLASSES.values():
        optimizer = kind(small())
        for refused in (lambda kind=kind: kind([shared]), lambda o=optimizer: o.add_param_group({"params": [shared]})):
            with pytest.raises(TypeError) as caught:
                refused()
            said.append(str(caught.value))
        assert len(optimizer.param_groups) == 1
    return said


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH,
    reason="this torch is older than the sharded part needs",
)
def test_summands_are_refused_by_name_when_an_optimizer_is_made() -> None:
    for said in run_ranks(of_summands, 1)[0]:
        assert "Partial" in said and "shape (8,)" in said and "redistribute" in said


# ----- hyperparameters that differ between ranks ------------------------------------------------------------------------------------


def parted(group: Any, rank: int, world: int, algorithm: str, at: int, ours: Any, options: dict[str, Any]) -> Any:
    """Ranks set other options before step ``at``: what a rank says, in which step, and whether it has moved nothing in it."""
    params = small()
    optimizer = build(algorithm, params, group, **options)
    for t in range(1, 80):
        before = [p.detach().clone() for p in params]
        if t == at:
            optimizer.param_groups[0].update(ours[rank])
        fill(params, t, rank)
        try:
            optimizer.step()
        except PlanMismatch as error:
            return str(error), optimizer.steps + 1, all(map(torch.equal, params, before))
    return "", 0, False


def lrs(*values: float) -> list[dict[str, Any]]:
    return [{"lr": value} for value in values]


LOCAL: dict[str, Any] = {"local_steps": LocalSteps(max_gap=8, double_every="lr_halving")}
#: algorithm, first step with other options, the options by rank, those of the optimizer, the step that says so
PARTED: dict[str, tuple[str, int, Any, dict[str, Any], int]] = {
    "1-bit Adam": ("onebit_adam", 7, lrs(0.01, 0.005), {}, 7),
    "1-bit LAMB, betas": ("onebit_lamb", 7, [{"betas": (0.9, 0.999)}, {"betas": (0.8, 0.999)}], {}, 7),
    "BinSGDM": ("binsgdm", 2, lrs(0.01, 0.0), {}, 2),
    "without statistics": ("onebit_adam", 7, lrs(0.01, 0.005), {"on_nonfinite": "raise"}, 7),
    "in the warm-up": ("onebit_adam", 2, lrs(0.01, 0.005), {}, 5),
    "in a long warm-up": ("onebit_adam", 2, lrs(0.01, 0.005), {"freeze_step": None}, 64),
    "sent in backward": ("onebit_adam", 7, lrs(0.01, 0.005), {"overlap": "backward"}, 64),
    "gaps that follow lr": ("zero_one_adam", 8, lrs(0.01, 0.001), LOCAL, 8),
    "a gap that grows on one rank": ("zero_one_adam", 8, lrs(0.001, 0.01), LOCAL, 8),
    "0 on one rank": ("zero_one_adam", 8, lrs(0.0, 0.01), LOCAL, 8),
    "0 on the other rank": ("zero_one_adam", 4, lrs(0.01, 0.0), {}, 4),
}


@pytest.mark.parametrize("name", PARTED)
def test_other_hyperparameters_on_one_rank_are_an_error_on_all_before_anything_hangs(name: str) -> None:
    algorithm, at, ours, options, found = PARTED[name]
    results = run_world(parted, 2, algorithm, at, ours, options)
    assert results[0] == results[1]
    said, step, unmoved = results[0]
    assert step == found and unmoved
    for value in ours:
        (fact,) = [f"{key}={setting}" for key, setting in value.items()]
        assert fact in said
    assert f"since step {at} parameter group 0" in said and "sync_dist=True" in said


def standing_still(group: Any, rank: int, world: int) -> Any:
    params = small()
    optimizer = build("zero_one_adam", params, group)
    dense = []
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.0 if t in (3, 7) else 0.01
        fill(params, t, rank)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        dense.append(optimizer.ledger.last.dense and (t not in (3, 7) or all(map(torch.equal, params, before))))
    return dense


def test_at_lr_0_gradients_are_averaged_densely_once_all_ranks_have_said_so() -> None:
    dense = run_world(standing_still, 2)
    assert dense[0] == dense[1] and dense[0][3] and dense[0][7] and not dense[0][8]
