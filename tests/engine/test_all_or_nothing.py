"""A step is made or not made, and nothing that is neither is ever saved, whatever ends it and whenever."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from harness import grouped
from optim_support import CLASSES, CROSSING
from torch import nn

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.comm import SimulatedWorld
from lightning_onebit.comm.transport import CollectiveFailure, Pending
from lightning_onebit.engine import TornStep
from lightning_onebit.engine.whole import signals_held

STEPS = 10
EVERYTHING = {
    **CROSSING,
    "onebit_adam sent early": {**CROSSING["onebit_adam"], "overlap": "backward"},
    "onebit_adam in 16 bits": {**CROSSING["onebit_adam"], "refresh": 3},
    "zero_one_adam in 16 bits": CROSSING["zero_one_adam"],
}


class Ended(BaseException):
    """What a signal's handler raises."""


def build(case: str, group: Any) -> tuple[Any, list[nn.Parameter]]:
    dtype = torch.bfloat16 if "16 bits" in case else torch.float32
    draws = torch.Generator().manual_seed(1)
    shapes = [(40, 3), (70,), (9,)]
    params = [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in shapes]
    groups = [{"params": params[:2]}, {"params": params[2:], "compress": False}]
    options = {"lr": 1e-2, "block_size": 32, "bucket_mb": 32 * 4 * 4 / 2**20, **EVERYTHING[case]}
    return CLASSES[case.partition(" ")[0]](groups, **grouped(options, process_group=group)), params


def make_step(optimizer: Any, params: list[nn.Parameter], t: int, rank: int) -> None:
    """A step as a strategy makes it: the shared model is shown afterwards."""
    draws = torch.Generator().manual_seed(100 * t + rank)
    optimizer.show_local()
    optimizer.zero_grad()
    optimizer.begin_backward()
    sum((torch.randn(p.shape, generator=draws).to(p.dtype) * p).sum() for p in params).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.show_consensus()


def taken(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Any]:
    """What a checkpoint would hold of an optimizer and its weights."""
    with optimizer.consensus():
        weights = [p.detach().clone() for p in params]
    state, own = optimizer.state_dict(), optimizer.residual_state_dict()
    return {
        "weights": weights,
        "state": state["state"],
        "books": {k: v for k, v in state["onebit"].items() if k != "ledger"},
        "own": {k: v.clone() for k, v in own["tensors"].items()},
    }


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class Breaking:
    """Ends what runs within it at one of its lines, or makes one of its waits a time-out (``number`` None: counts them)."""

    def __init__(self, how: str, number: int | None) -> None:
        self.how, self.number, self.count = how, number, 0

    def __enter__(self) -> Breaking:
        if self.how == "line":
            sys.settrace(self._trace)
        else:
            WAITS.now = self
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)
        WAITS.now = None

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.passed()
        return self._trace

    def passed(self) -> None:
        self.count += 1
        if self.count - 1 == self.number:
            sys.settrace(None)
            raise Ended


WAITS = threading.local()
wait = Pending.wait


def wait_or_time_out(pending: Pending) -> None:
    now = getattr(WAITS, "now", None)
    if now is not None:
        try:
            now.passed()
        except Ended:
            pending._failed = pending._transport.failure(pending._what, RuntimeError("timed out"), 1.0)
            raise pending._failed from None
    wait(pending)


def run(group: Any, case: str, how: str, at: int | None, number: int | None) -> Any:
    """Rank 0 is broken in step ``at`` (0, 1, ...); says what it can save then. Unbroken: what it could have saved after each step."""
    optimizer, params = build(case, group)
    saved, counts = [taken(optimizer, params)], []
    for t in range(STEPS):
        if group.rank != 0 or (at is not None and t != at):
            make_step(optimizer, params, t, group.rank)
            saved.append(taken(optimizer, params) if at is None else {})
            continue
        try:
            with Breaking(how, number) as breaking:
                make_step(optimizer, params, t, group.rank)
        except (Ended, CollectiveFailure):  # (a break within Python's locks makes a wait fail)
            try:
                found: Any = taken(optimizer, params)
            except TornStep as error:
                found = str(error)
            raise Found(optimizer.steps, found) from None
        counts.append(breaking.count)
        if at is None:
            saved.append(taken(optimizer, params))
    return saved, counts


class Found(Exception):
    """What could be saved."""


@cache
def undisturbed(case: str, how: str) -> Any:
    return SimulatedWorld(2, timeout=30).run(run, case, how, None, None)[0]


def break_somewhere(seed: int) -> str:
    """One random break; says what came of it."""
    draws = random.Random(seed)
    case, how = draws.choice(list(EVERYTHING)), draws.choice(["line", "line", "line", "wait"])
    saved, counts = undisturbed(case, how)
    at = draws.randrange(STEPS)
    if not counts[at]:
        return "nothing to break"
    number = draws.randrange(counts[at])
    try:
        SimulatedWorld(2, timeout=10).run(run, case, how, at, number)
    except Found as found:
        steps, state = found.args
        if isinstance(state, str):
            assert "did not end" in state, (seed, case, how, at, number, state)
            # nothing is written before the last wait is over
            assert how == "line" or not case.startswith(("onebit_adam", "onebit_lamb")), (seed, case, at, number, state)
            return "torn"
        # (before the first step the optimizer may or may not have laid out what it needs)
        what = state if steps else ("weights", "state")
        assert steps in (at, at + 1), (seed, case, how, at, number)
        differing = [key for key in what if not alike(state[key], saved[steps][key])]
        assert differing == [], (seed, case, how, at, number)
        return "before" if steps == at else "after"
    return "nothing came of it"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "wait", wait_or_time_out)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(
    "seeds",
    [range(8), pytest.param(range(8, 400), marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
    ids=["some", "many"],
)
def test_what_can_be_saved_after_a_step_that_was_broken_anywhere_is_one_whole_steps(seeds: range) -> None:
    came = Counter(break_somewhere(seed) for seed in seeds)
    print(came)
    assert came["torn"] and came["before"]


# ----- signals --------------------------------------------------------------------------------------------------------------------


def alone(**options: Any) -> tuple[OnebitAdam, nn.Parameter]:
    """An optimizer that compresses with nobody, after its first step."""
    param = nn.Parameter(torch.ones(100))
    options = {"lr": 0.01, "_alone": True, "block_size": 32, "freeze_step": 1, **options}
    optimizer = OnebitAdam([param], **grouped(options))
    param.grad = torch.ones(100)
    optimizer.step()
    return optimizer, param


def signal_within(optimizer: Any, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Signals come when the next exchange's result is applied."""
    apply = optimizer._engine.rule.take

    def interrupted(*args: Any) -> None:
        for number in numbers:
            signal.raise_signal(number)
        apply(*args)

    monkeypatch.setattr(optimizer._engine.rule, "take", interrupted)


def test_ctrl_c_waits_for_the_end_of_the_step_and_a_second_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = alone()
    handler = signal.getsignal(signal.SIGINT)
    signal_within(optimizer, monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.steps == 2 and not optimizer.torn and signal.getsignal(signal.SIGINT) is handler
    optimizer.state_dict()
    signal_within(optimizer, monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.torn and signal.getsignal(signal.SIGINT) is handler
    for refused in (
        optimizer.state_dict,
        optimizer.residual_state_dict,
        optimizer.step,
        optimizer.thaw,
        optimizer.synchronise,
    ):
        with pytest.raises((TornStep, RuntimeError), match=r"step 3 did not end \(KeyboardInterrupt\)|freeze_step"):
            refused()


def test_a_signal_whose_handler_only_takes_note_changes_nothing_about_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = alone()
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number) or heard.append(optimizer.steps))
    try:
        signal_within(optimizer, monkeypatch, signal.SIGTERM)
        optimizer.step()
        assert heard == [signal.SIGTERM, 2]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_other_threads_signals_are_left_alone() -> None:
    seen: list[Any] = []

    def look() -> None:
        with signals_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


# ----- going on -------------------------------------------------------------------------------------------------------------------


def test_a_torn_optimizer_goes_on_exactly_from_a_state_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = alone()
    weights, state, own = param.detach().clone(), optimizer.state_dict(), optimizer.residual_state_dict()
    own = {**own, "tensors": {k: v.clone() for k, v in own["tensors"].items()}}
    optimizer.step()
    right = param.detach().clone()
    with monkeypatch.context() as within:
        within.setattr(optimizer._engine.rule, "take", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    with pytest.raises(TornStep, match="ZeroDivisionError"):
        optimizer.step()
    with torch.no_grad():
        param.copy_(weights)
    optimizer.load_state_dict(state)
    optimizer.load_residual_state_dict(own)
    optimizer.step()
    assert not optimizer.torn and torch.equal(param, right)


def early(group: Any) -> list[Any]:
    optimizer, params = build("onebit_adam sent early", group)
    for t in range(5):
        make_step(optimizer, params, t, group.rank)
    before = taken(optimizer, params)
    optimizer.zero_grad()
    optimizer.begin_backward()
    sum(p.sum() for p in params).backward()  # type: ignore[union-attr]
    whole = alike(before, taken(optimizer, params))
    if group.size == 2:  # what has been sent may be dropped, on all ranks
        optimizer.skip_step()
        whole = whole and alike(without_skips(before), without_skips(taken(optimizer, params)))
    optimizer.begin_backward()
    sum(p.sum() for p in params).backward()  # type: ignore[union-attr]
    optimizer.step()
    return [whole, optimizer.torn, optimizer.state_dict()["onebit"]["steps"]]


def test_between_a_backward_that_has_sent_gradients_and_the_step_the_last_step_can_be_saved_and_this_one_skipped() -> (
    None
):
    assert SimulatedWorld(2, timeout=30).run(early) == [[True, False, 6]] * 2


def failing_early(group: Any, number: int) -> list[Any]:
    """A step whose exchange fails on all ranks, then the same step from the state that could be saved meanwhile."""
    optimizer, params = build("onebit_adam sent early", group)
    for t in range(5):
        make_step(optimizer, params, t, group.rank)
    before = taken(optimizer, params)
    with pytest.raises((CollectiveFailure, Ended)), Breaking("wait", number):
        make_step(optimizer, params, 5, group.rank)
    whole = alike(before, taken(optimizer, params))
    state, own = optimizer.state_dict(), optimizer.residual_state_dict()
    optimizer.load_state_dict(state)
    optimizer.load_residual_state_dict(own)
    make_step(optimizer, params, 5, group.rank)
    return [whole, optimizer.torn, optimizer.steps, *(p.detach().clone() for p in params)]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("number", [0, 2, 5])
def test_an_exchange_that_backward_has_begun_and_that_fails_is_forgotten(number: int) -> None:
    found = SimulatedWorld(2, timeout=30).run(failing_early, number)
    assert [rank[:3] for rank in found] == [[True, False, 6]] * 2
    assert alike(found[0][3:], found[1][3:])


# ----- values that are not finite ----------------------------------------------------------------------------------------------------


def without_skips(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "books": {k: v for k, v in state["books"].items() if "skip" not in k}}


def bad_value(group: Any, case: str, bad: int, value: float, where: int) -> tuple[bool, int, bool]:
    """One element of rank 1 is bad in step ``bad``: whether that step left everything as it was, and the run goes on as without it."""
    weights = []
    for spoilt in (True, False):
        optimizer, params = build(case, group)
        for t in range(bad + 3):
            if t != bad:
                make_step(optimizer, params, t, group.rank)
                continue
            if not spoilt:
                continue
            before = taken(optimizer, params)
            with Spoiling(params[where], value if group.rank == 1 else None):
                make_step(optimizer, params, t, group.rank)
            same = alike(without_skips(before), without_skips(taken(optimizer, params)))
            skipped = optimizer.skipped_steps
        weights.append([p.detach().clone() for p in params])
    return same, skipped, alike(*weights)


class Spoiling:
    """Makes one element of a gradient bad as it is accumulated, before anybody else's hook sees it."""

    def __init__(self, param: nn.Parameter, value: float | None) -> None:
        self.param, self.value = param, value

    def __enter__(self) -> None:
        def spoil(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad.view(-1)[grad.numel() // 2] = self.value
            return grad

        self.handle = self.param.register_hook(spoil) if self.value is not None else None

    def __exit__(self, *_: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


@pytest.mark.parametrize("case", EVERYTHING)
def test_a_step_with_a_bad_value_on_one_rank_leaves_every_byte_as_it_was_on_all(case: str) -> None:
    """In every phase; in what is compressed and in what is not."""
    for bad, where, value in [(t, t % 3, float("nan") if t % 2 else float("inf")) for t in range(1, STEPS)]:
        found = SimulatedWorld(2, timeout=30).run(bad_value, case, bad, value, where)
        assert found == [(True, 1, True)] * 2, (bad, where, value)
