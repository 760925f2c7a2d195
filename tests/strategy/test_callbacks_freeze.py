"""VarianceFreeze: the step it chooses, what it says, what it refuses."""

from __future__ import annotations

import copy
import io
import logging
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_trainer import FakeTrainer, onebit_adam
from harness import grouped
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_onebit.algorithms import OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.callbacks import freeze
from lightning_onebit.callbacks.freeze import (
    LearningRateWatch,
    VarianceFreezeMixin,
    bytes_of_steps,
)
from lightning_onebit.comm import CollectiveFailure, PlanMismatch, SimulatedGroup, SimulatedWorld
from lightning_onebit.engine import ExchangeOptions, Phase
from lightning_onebit.strategy.ranks import Replicas


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The info lines of the callback."""
    lines: list[str] = []
    monkeypatch.setattr("lightning_onebit.callbacks.freeze.rank_zero_info", lambda text: lines.append(text))
    return lines


# --------------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": 0}, ValueError, ["at=0", "at least 1"]),
        ({"at": -5}, ValueError, ["at=-5", "at least 1"]),
        ({"at": True}, TypeError, ["at=True", '"auto"', "(int)", "(float)"]),
        ({"at": None}, TypeError, ["at=None", '"auto"']),
        ({"at": 2.5}, ValueError, ["at=2.5", "share", "between 0 and 1", "int of steps"]),
        ({"at": 0.0}, ValueError, ["at=0.0", "between 0 and 1"]),
        ({"at": 1.0}, ValueError, ["at=1.0", "between 0 and 1"]),
        ({"at": float("nan")}, ValueError, ["at=nan", "between 0 and 1"]),
        ({"at": "0.2"}, TypeError, ["at='0.2'", '"auto"', "share"]),
        ({"at": "automatic"}, TypeError, ["at='automatic'", '"auto"']),
        ({"at": 3, "earliest": 2}, ValueError, ["earliest=2", "no effect", "at=3", 'at="auto"']),
        ({"at": 0.2, "earliest": 0.15}, ValueError, ["earliest=0.15", "no effect", "at=0.2"]),
        ({"at": 0.2, "latest": 5}, ValueError, ["latest=5", "no effect", "at=0.2"]),
        ({"at": 3, "latest": 0.2}, ValueError, ["latest=0.2", "no effect", "at=3"]),
        ({"threshold": 0.96}, TypeError, ["threshold"]),
        ({"earliest": 0}, ValueError, ["earliest=0", "at least 1"]),
        ({"earliest": 0.0}, ValueError, ["earliest=0.0", "between 0 and 1"]),
        ({"earliest": False}, TypeError, ["earliest=False", "(int)"]),
        ({"latest": 1.5}, ValueError, ["latest=1.5", "between 0 and 1"]),
        ({"latest": "auto"}, TypeError, ["latest='auto'", "(int)"]),
        ({"earliest": 9, "latest": 3}, ValueError, ["earliest=9", "exceeds latest=3", "lower it"]),
        ({"earliest": 0.5}, ValueError, ["earliest=0.5", "exceeds latest=0.2"]),
        ({"earliest": 0.04, "latest": 0.02}, ValueError, ["earliest=0.04", "exceeds latest=0.02"]),
    ],
)
def test_every_bad_option_is_refused_by_name(options: dict[str, Any], error: type, words: list[str]) -> None:
    with pytest.raises(error) as caught:
        VarianceFreezeMixin(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_configuration_file_may_pass_every_option_at_its_default() -> None:
    VarianceFreezeMixin(at=5, earliest=None, latest=None)
    VarianceFreezeMixin(at="auto", earliest=None, latest=None)


# --------------------------------------------------------------------------------------------------------- fixed steps


@pytest.mark.parametrize(
    ("options", "planned", "dense"),
    [
        ({"at": 1}, 100, 1),
        ({"at": 7}, 100, 7),
        ({"at": 7}, math.inf, 7),
        ({"at": 0.2}, 40, 8),
        ({"at": 0.2}, 1, 1),
        ({"at": 0.1}, 30, 3),
    ],
)
def test_exactly_that_many_dense_steps_happen(
    options: dict[str, Any], planned: float, dense: int, said: list[str]
) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer], planned)
    trainer.start(VarianceFreezeMixin(**options))
    for _ in range(12):
        trainer.step()
    assert optimizer.phase is Phase.COMPRESSED
    assert (optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps) == (dense, 12 - dense)


def test_skipped_steps_do_not_count_as_dense_steps(said: list[str]) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer])
    trainer.start(VarianceFreezeMixin(4))
    for scale in (1.0, math.nan, 1.0, math.nan, math.nan, 1.0):
        trainer.step(scale)
    assert optimizer.phase is Phase.WARMUP
    trainer.step()
    assert optimizer.phase is Phase.COMPRESSED
    assert optimizer.ledger.dense_steps == 4
    assert optimizer.skipped_steps == 3


def test_each_of_several_optimizers_is_frozen_by_its_own_steps(said: list[str]) -> None:
    often, seldom = onebit_adam(), onebit_adam()
    trainer = FakeTrainer([often, seldom])
    trainer.start(VarianceFreezeMixin(4))
    for batch in range(8):
        # Two steps of one optimizer within a batch, as in manual optimization: the freeze must not wait for the batch's end.
        trainer.step(only=often)
        trainer.step(only=often)
        if batch % 2:
            trainer.step(only=seldom)
    assert often.ledger.dense_steps == seldom.ledger.dense_steps == 4
    assert (often.ledger.compressed_steps, seldom.ledger.compressed_steps) == (12, 0)
    switches = [line for line in said if "freezes its variance" in line]
    assert len(switches) == 2
    assert "OnebitAdam 0 made 4" in switches[0] and "OnebitAdam 1 made 4" in switches[1]


@pytest.mark.parametrize(
    ("options", "rises", "by_batches", "by_steps", "automatic"),
    [
        ({"at": 0.2}, False, 20, 4, False),
        ({"at": 0.2}, False, 20, 4, True),
        ({}, True, 50, 10, False),
        ({}, False, 50, 10, False),
        ({"latest": 0.2}, True, 20, 4, False),
        ({"latest": 0.2}, False, 10, 2, False),
        ({"latest": 0.2}, False, 10, 2, True),
        ({"earliest": 0.15}, False, 15, 3, False),
        ({"earliest": 9}, True, 20, 9, False),
        ({"earliest": 9}, True, 20, 9, True),
        ({"earliest": 9}, False, 9, 9, False),
        ({"latest": 20}, True, 20, 20, False),
        ({"latest": 20, "earliest": 0.15}, False, 15, 3, False),
        ({"at": 20}, False, 20, 20, False),
    ],
)
def test_a_share_of_the_run_is_one_of_batches_for_an_optimizer_that_steps_in_few_of_them(
    said: list[str], options: dict[str, Any], rises: bool, by_batches: int, by_steps: int, automatic: bool
) -> None:
    """A GAN's generator in every fifth batch: 20 % of its 20 steps, not all of them; a number of steps stays one."""
    often, seldom = onebit_adam(), onebit_adam()
    trainer = FakeTrainer([often, seldom], planned=100)
    trainer.lightning_module.automatic_optimization = automatic
    trainer.start(VarianceFreezeMixin(**options))
    for batch in range(100):
        for optimizer in (often, seldom):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + batch * rises)
        if batch % 5 == 4:
            for p in seldom.param_groups[0]["params"]:
                p.grad = torch.randn_like(p)
            seldom.step()
        trainer.step(math.nan if batch == 7 else 1.0, only=often)
    assert often.ledger.dense_steps == by_batches, "skipped steps do not count"
    assert seldom.ledger.dense_steps == (by_batches if automatic else by_steps)
    line = next(line for line in said if "OnebitAdam 1 made" in line)
    share = "its share of about 20 steps, which it makes in 100 planned batches"
    kept = not options  # they wait for the maximum, because nothing refreshes their second moments
    of_share = not automatic and by_steps < 20 and (rises or kept or options == {"at": 0.2})
    why = ", though the learning rate still rises" * rises + "; nothing renews its variance later" * kept
    assert (f"{share}{why}." in line) is of_share
    assert ("the learning rate does not rise" in line) is (not rises and not kept and "at" not in options)


def test_an_optimizer_that_begins_late_is_not_frozen_at_its_first_steps(said: list[str]) -> None:
    """Trained from the middle of the run on: a fifth of its own steps is dense, resumed within them or not."""
    for cut in (None, 53):
        first, later, callback = onebit_adam(), onebit_adam(), VarianceFreezeMixin(0.2)
        trainer = FakeTrainer([first, later], planned=100)
        trainer.lightning_module.automatic_optimization = False
        trainer.start(callback)
        for batch in range(100):
            if batch == cut:
                state = callback.state_dict()
                callback.teardown(trainer, None, "fit")
                trainer.callbacks, callback = [], VarianceFreezeMixin(0.2)
                callback.load_state_dict(state)
                trainer.start(callback)
            trainer.step(only=later if batch >= 50 else first)
        assert (first.ledger.dense_steps, later.ledger.dense_steps) == (20, 10)


def test_a_second_fit_counts_its_fresh_optimizer_from_its_own_start(said: list[str]) -> None:
    callback = VarianceFreezeMixin(0.5)
    first = onebit_adam()
    trainer = FakeTrainer([first], planned=8)
    trainer.start(callback)
    for _ in range(8):
        trainer.step()
    callback.on_train_end(trainer, None)
    callback.teardown(trainer, None, "fit")
    assert first.ledger.dense_steps == 4

    # Lightning goes on counting: 8 batches are behind, 20 are planned in all, 12 are left for the new optimizer.
    second = onebit_adam()
    trainer.strategy.onebit_optimizers = [second]
    trainer.estimated_stepping_batches = 20
    trainer.start(callback)
    for _ in range(12):
        trainer.step()
    assert second.ledger.dense_steps == 6


def test_nothing_is_watched_after_the_fit(said: list[str]) -> None:
    for end in ("on_train_end", "on_exception", "teardown"):
        optimizer = onebit_adam()
        trainer = FakeTrainer([optimizer])
        callback = VarianceFreezeMixin(5)
        trainer.start(callback)
        trainer.step()
        arguments = {"on_train_end": (), "on_exception": (KeyboardInterrupt(),), "teardown": ("fit",)}[end]
        getattr(callback, end)(trainer, None, *arguments)
        for _ in range(8):
            trainer.step()
        assert optimizer.phase is Phase.WARMUP, end


def test_an_optimizer_frozen_by_hand_is_left_alone(said: list[str]) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer])
    trainer.start(VarianceFreezeMixin(5))
    trainer.step()
    optimizer.freeze()
    for _ in range(8):
        trainer.step()
    assert optimizer.ledger.dense_steps == 1
    assert not any("freezes its variance" in line for line in said)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_an_optimizer_with_its_own_freeze_step_is_a_conflict() -> None:
    trainer = FakeTrainer([onebit_adam(freeze_step=10)])
    with pytest.raises(ValueError, match=r"OnebitAdam has freeze_step=10 and VarianceFreeze\(at=5\).*remove one"):
        trainer.start(VarianceFreezeMixin(5))


def test_two_freeze_callbacks_are_a_conflict() -> None:
    trainer = FakeTrainer([onebit_adam()], callbacks=[VarianceFreezeMixin(5)])
    with pytest.raises(ValueError, match="2 VarianceFreeze callbacks"):
        trainer.start(VarianceFreezeMixin(6))


def test_a_strategy_that_compresses_nothing_is_refused() -> None:
    trainer = FakeTrainer([])
    with pytest.raises(ValueError, match="found no compressed optimizer"):
        trainer.start(VarianceFreezeMixin(5))
    trainer.strategy = object()
    with pytest.raises(ValueError, match=r'the Trainer uses object: set `strategy="onebit_adam"`'):
        trainer.start(VarianceFreezeMixin(5))


@pytest.mark.parametrize("planned", [math.inf, -1])
@pytest.mark.parametrize(
    ("options", "name"),
    [({"at": 0.2}, "at"), ({}, "latest"), ({"earliest": 0.15, "latest": 50}, "earliest")],
)
def test_a_share_of_an_unknown_number_of_steps_is_refused(planned: float, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        FakeTrainer([onebit_adam()], planned).start(VarianceFreezeMixin(**options))
    share = 0.15 if name == "earliest" else 0.2
    for words in (
        f"{name}={share}",
        f"{share:.0%}",
        f"`VarianceFreeze({name}=...)`",
        "`Trainer(max_steps=...)`",
        "freeze_step=",
    ):
        assert words in str(caught.value)


def test_a_minimum_beyond_the_maximum_of_this_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"minimum of 30 dense steps .* exceeds the maximum of 20"):
        FakeTrainer([onebit_adam()], 100).start(VarianceFreezeMixin(earliest=30))
    with pytest.raises(ValueError, match=r"minimum of 15 dense steps .* exceeds the maximum of 3"):
        FakeTrainer([onebit_adam()], 100).start(VarianceFreezeMixin(earliest=0.15, latest=3))


# ----------------------------------------------------------------------------------------------------- what it announces


def large(**options: Any) -> OnebitAdam:
    """A model whose tensors fill their blocks."""
    return OnebitAdam([torch.nn.Parameter(torch.zeros(1024, 2048))], **grouped({"refresh": "never", **options}))


def test_the_forecast_names_the_reduction(said: list[str]) -> None:
    FakeTrainer([large()], 1000).start(VarianceFreezeMixin(0.15))
    assert len(said) == 1
    assert "150 dense steps of 1,000 planned (w = 15.0%)" in said[0]
    # scales of blocks take 1.6 % of what is sent after the warm-up
    assert pytest.approx(5.67, abs=0.01) == 1 / (0.15 + 0.85 / 32)
    assert "5.7x less is sent than by dense averaging" in said[0]


@pytest.mark.parametrize("tensors", [[(33, 5), (7,)], [(2048, 3), (9,)], [(2,)]], ids=["padded", "one", "tiny"])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_forecast_is_what_is_sent_padding_and_control_rounds_included(
    tensors: list[tuple[int, ...]], ranks_per_node: int
) -> None:
    """Against what the transport counts in a dense step and in a compressed one."""

    def train(group: SimulatedGroup) -> Any:
        model = [torch.nn.Parameter(torch.ones(shape)) for shape in tensors]
        optimizer = OnebitAdam(model, freeze_step=1, exchange=ExchangeOptions(block_size=64, kernels="reference"))
        optimizer.configure_communication(group, ranks_per_node=ranks_per_node)  # type: ignore[arg-type]
        records = []
        for _ in range(2):
            for p in model:
                p.grad = torch.full_like(p, group.rank + 1.0)
            optimizer.step()
            records.append(copy.copy(optimizer.ledger.last))
        return bytes_of_steps(optimizer, 4), records

    for (dense, compressed, ddp), records in SimulatedWorld(4).run(train):
        assert [record.dense for record in records] == [True, False]
        assert dense == records[0].bytes_sent and records[0].control_bytes == 0
        assert compressed == ranks_per_node * records[1].bytes_inter + records[1].control_bytes
        assert ddp == records[0].dense_bytes


def test_the_forecast_says_that_a_model_is_too_small_to_gain(said: list[str]) -> None:
    small = OnebitAdam([torch.nn.Parameter(torch.zeros(10, 3)), torch.nn.Parameter(torch.zeros(7))])
    FakeTrainer([small], 1000).start(VarianceFreezeMixin(0.15))
    assert "The model is too small to gain: a compressed step sends " in said[0]
    assert "whole blocks of 2,048 elements" in said[0] and "less is sent" not in said[0]


def test_the_forecast_counts_refreshes(said: list[str]) -> None:
    FakeTrainer([large(refresh=96)], 1000).start(VarianceFreezeMixin(0.15))
    # 15 % and 8 of 1,000
    assert "(w = 15.8%)" in said[0] and "and 8 refreshes" in said[0]
    assert pytest.approx(5.42, abs=0.01) == 1 / (0.158 + 0.842 / 32) and "5.4x less is sent" in said[0]


def test_the_forecast_of_the_automatic_rule_is_a_lower_bound(said: list[str]) -> None:
    FakeTrainer([large()], 1000).start(VarianceFreezeMixin())
    start = "VarianceFreeze(at='auto'): OnebitAdam makes at most 200 dense steps of 1,000 planned (w = 20.0%): "
    assert said == [f"{start}at least 4.4x less is sent than by dense averaging."]


def test_the_forecast_says_when_nothing_can_be_saved(said: list[str]) -> None:
    FakeTrainer([onebit_adam()], 10).start(VarianceFreezeMixin(10))
    assert "no step will be compressed" in said[0]
    alone = FakeTrainer([onebit_adam()], 10)
    alone.world_size, alone.strategy.replicas = 1, Replicas(1)
    alone.start(VarianceFreezeMixin(2))
    assert "One process exchanges nothing" in said[1]


def test_the_switch_is_announced_once_with_step_rule_and_reason(said: list[str]) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer], 40)
    trainer.start(VarianceFreezeMixin(0.1))
    for _ in range(10):
        trainer.step()
    switches = [line for line in said if "freezes its variance" in line]
    assert len(switches) == 1
    assert "made 4 dense steps" in switches[0]
    assert "Rule: at=0.1" in switches[0]
    assert "the next step is compressed" in switches[0]
    assert "4 dense steps of 40 planned were asked for" in switches[0]


def test_steps_that_are_not_all_dense_before_the_freeze_are_not_called_so(said: list[str]) -> None:
    optimizer = onebit_adam()
    optimizer.local_steps = True  # type: ignore[misc]  # as 0/1 Adam, which compresses before its freeze too
    trainer = FakeTrainer([optimizer], 10)
    trainer.start(VarianceFreezeMixin(2))
    for _ in range(3):
        trainer.step()
    assert "makes 2 steps with a learning variance of 10 planned" in said[0]
    assert re.search(r"at least \d\.\dx less is sent than by dense averaging", said[0])
    assert "made 2 steps and freezes" in said[1] and not any("dense step" in line for line in said)


def test_a_single_process_is_not_told_that_steps_get_compressed(said: list[str]) -> None:
    optimizer = onebit_adam(_alone=False)
    trainer = FakeTrainer([optimizer])
    trainer.start(VarianceFreezeMixin(2))
    for _ in range(4):
        trainer.step()
    assert "steps stay dense in a single process" in said[-1]
    assert optimizer.ledger.dense_steps == 4


def test_info_lines_reach_the_logger_that_lightning_users_see(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning_utilities.core import rank_zero as rank_zero_module

    logger = rank_zero_module.log
    with caplog.at_level(logging.INFO, logger=logger.name):
        logger.addHandler(caplog.handler)
        try:
            FakeTrainer([onebit_adam()], 1000).start(VarianceFreezeMixin(0.15))
        finally:
            logger.removeHandler(caplog.handler)
    assert "VarianceFreeze(at=0.15)" in caplog.text


# ---------------------------------------------------------------------------------------------------- learning rate rule


def _rising(schedule: list[float]) -> list[bool]:
    watch = LearningRateWatch()
    verdicts = []
    for step, lr in enumerate(schedule, start=1):
        watch.observe(step, [lr])
        verdicts.append(watch.rising(step))
    return verdicts


def test_a_learning_rate_that_never_rises_is_in_no_warmup() -> None:
    assert _rising([1.0] * 20) == [False] * 20
    assert _rising([1.0 / step for step in range(1, 20)]) == [False] * 19


def test_a_warmup_that_rises_every_step_is_over_two_steps_after_its_peak() -> None:
    verdicts = _rising([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.3])
    assert verdicts == [False, True, True, True, True, False, False]


def test_a_warmup_that_rises_every_epoch_is_not_over_within_an_epoch() -> None:
    epoch, rises = 10, 4
    schedule = [0.1 * (step // epoch + 1) for step in range(epoch * rises)] + [0.1 * rises] * 30
    verdicts = _rising(schedule)
    first_rise, last_rise = epoch, epoch * (rises - 1)
    assert all(verdicts[first_rise:last_rise]), "a plateau between two rises is part of the warm-up"
    assert not any(verdicts[last_rise + epoch + 1 :])


def test_one_rising_group_is_enough_and_a_new_group_is_no_rise() -> None:
    watch = LearningRateWatch()
    watch.observe(1, [1.0, 1.0])
    watch.observe(2, [0.5, 1.0, 3.0])
    assert not watch.rising(2)
    watch.observe(3, [0.4, 1.1, 3.0])
    assert watch.rising(3)


def test_one_step_cannot_tell_that_a_warmup_is_over_wherever_watching_begins() -> None:
    for start in (1, 500):
        watch = LearningRateWatch()
        verdicts = []
        for step in range(start, start + 8):
            watch.observe(step, [1.0 + min(step - start, 3)])
            verdicts.append(watch.over(step))
        assert verdicts == [False] * 5 + [True] * 3, "three rises, then two steps without one"
    assert not LearningRateWatch().over(1)


# ---------------------------------------------------------------------------------------------------- the automatic rule


def _train(optimizer: Any, rates: list[float], planned: float = 0, **options: Any) -> FakeTrainer:
    """One step with each of these learning rates, until it is frozen."""
    trainer = FakeTrainer([optimizer], planned or len(rates))
    trainer.start(VarianceFreezeMixin(**options))
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        trainer.step()
        if optimizer.phase is Phase.COMPRESSED:
            break
    return trainer


def _frozen_at(rates: list[float], earliest: int, latest: int) -> int:
    """The step of the automatic rule, counted from 1, by looking at the whole schedule."""
    rises = [step for step in range(2, latest + 1) if rates[step - 1] > rates[step - 2]]
    for step in range(max(2, earliest), latest):
        past = [1, *(rise for rise in rises if rise <= step)]
        gaps = [after - before for before, after in pairwise(past)]
        if not gaps or step - past[-1] > max(gaps):
            return step
    return latest


@settings(max_examples=100, deadline=None)
@given(
    rises=st.lists(st.tuples(st.sampled_from([-0.1, 0.0, 0.1, 0.1]), st.integers(1, 5)), min_size=1, max_size=14),
    first=st.integers(1, 40),
    more=st.integers(0, 40),
)
def test_auto_freezes_after_the_first_step_from_the_minimum_on_after_which_nothing_rises(
    rises: list[tuple[float, int]], first: int, more: int
) -> None:
    rates = [1.0]
    for rise, flat in rises:
        rates += [rates[-1] + rise] * flat
    rates += [rates[-1]] * (first + more)
    optimizer = OnebitAdam(
        [torch.nn.Parameter(torch.ones(3))], lr=1.0, refresh="never", exchange=ExchangeOptions(_alone=True)
    )
    _train(optimizer, rates, earliest=first, latest=first + more)
    assert optimizer.phase is Phase.COMPRESSED
    assert optimizer.steps == _frozen_at(rates, first, first + more)


@pytest.mark.parametrize(
    ("planned", "options", "flat", "rising"),
    [
        (600, {}, 100, 120),  # 10 % and 20 %, but 100 steps at least
        (200, {}, 100, 100),
        (200, {"latest": 0.02}, 4, 4),  # the default minimum gives way
        (200, {"latest": 3}, 3, 3),
        (200, {"latest": 100}, 20, 100),
        (200, {"earliest": 0.15}, 30, 40),
        (200, {"earliest": 1}, 2, 40),
        (200, {"earliest": 7}, 7, 40),
        (200, {"earliest": 3, "latest": 50}, 3, 50),
        (10, {}, 5, 5),  # half of a short run
        (4, {}, 2, 2),
        (1, {"latest": 0.2}, 1, 1),
        (10, {"latest": 0.2}, 2, 2),  # the minimum of one step cannot tell
        (math.inf, {"latest": 40}, 20, 40),  # half of the maximum
        (-1, {"latest": 3}, 2, 3),
        (math.inf, {"earliest": 30, "latest": 40}, 30, 40),
    ],
)
def test_minimum_and_maximum_are_counted_in_steps(
    planned: float, options: dict[str, Any], flat: int, rising: int, said: list[str]
) -> None:
    for expected, rise in ((flat, 0.0), (rising, 0.01)):
        optimizer = onebit_adam(refresh="auto")
        _train(optimizer, [1e-3 * (1 + rise * step) for step in range(120)], planned, **options)
        assert optimizer.phase is Phase.COMPRESSED and optimizer.steps == expected


def _kept_forever(algorithm: str) -> Any:
    """An optimizer whose second moments nothing refreshes."""
    if algorithm == "lamb":
        return OnebitLamb([torch.nn.Parameter(torch.ones(40))], **grouped({"_alone": True, "block_size": 32}))
    return onebit_adam(
        **{"never": {"refresh": "never"}, "published": {"refresh": "auto", "recipe": "published"}}[algorithm]
    )


@pytest.mark.parametrize("algorithm", ["lamb", "never", "published"])
@pytest.mark.parametrize(
    ("planned", "options", "steps"),
    [(600, {}, 120), (10, {}, 5), (600, {"latest": 0.2}, 60), (600, {"earliest": 0.1}, 60), (600, {"at": 30}, 30)],
)
@pytest.mark.parametrize("rise", [0.0, 0.01])
def test_second_moments_that_nothing_refreshes_learn_until_the_maximum(
    algorithm: str, planned: int, options: dict[str, Any], steps: int, rise: float, said: list[str]
) -> None:
    """Where nobody has chosen bounds; chosen ones are taken at their word."""
    optimizer = _kept_forever(algorithm)
    _train(optimizer, [1e-3 * (1 + rise * step) for step in range(120)], planned, **options)
    chosen = bool(options) and "at" not in options
    assert optimizer.phase is Phase.COMPRESSED and optimizer.steps == (120 if chosen and rise else steps)
    rises = ", though the learning rate still rises" if rise else ""
    reason = f"Reason: the maximum of {steps} dense steps is reached{rises}; nothing renews its variance later."
    assert said[-1].endswith(reason) is (not options)


def test_steps_made_by_hand_are_judged_by_whether_their_own_second_moments_are_refreshed(said: list[str]) -> None:
    """A GAN's two networks: one waits for a fifth of its own steps, the other for the end of the rise."""
    refreshed, kept = onebit_adam(refresh="auto"), onebit_adam()
    trainer = FakeTrainer([refreshed, kept], planned=2000)
    trainer.lightning_module.automatic_optimization = False
    trainer.start(VarianceFreezeMixin())
    for batch in range(500):
        trainer.step(only=kept if batch % 2 else refreshed)
    assert "OnebitAdam 0 made 100 dense steps" in said[-2] and "OnebitAdam 1 made 200 dense steps" in said[-1]


@pytest.mark.parametrize(
    ("options", "few"), [({"at": 99}, True), ({"at": 100}, False), ({"latest": 0.1}, True), ({}, False)]
)
def test_a_freeze_after_few_steps_is_told_beforehand(options: dict[str, Any], few: bool, said: list[str]) -> None:
    FakeTrainer([onebit_adam()], 600).start(VarianceFreezeMixin(**options))
    assert (freeze.OF_FEW in said[0]) is few


@pytest.mark.parametrize(("at", "few"), [(99, True), (100, False)])
def test_a_freeze_of_0_1_adam_after_few_steps_is_told_too(at: int, few: bool, said: list[str]) -> None:
    exchange = ExchangeOptions(_alone=True, block_size=32)
    optimizer = ZeroOneAdam([torch.nn.Parameter(torch.zeros(40))], exchange=exchange)
    FakeTrainer([optimizer], 600).start(VarianceFreezeMixin(at=at))
    assert (freeze.OF_FEW in said[0]) is few


def test_auto_says_why_it_froze(said: list[str]) -> None:
    rise = [0.01 * step for step in range(1, 16)]
    _train(onebit_adam(), rise + [0.15] * 85, latest=0.2)
    assert "made 17 dense steps and freezes its variance; the next step is compressed. Rule: at='auto'. " in said[-1]
    assert said[-1].endswith("Reason: the learning rate no longer rises.")
    _train(onebit_adam(), [1.0] * 100, latest=0.2)
    assert "made 10 dense steps" in said[-1] and said[-1].endswith("Reason: the learning rate does not rise.")
    _train(onebit_adam(), rise + [0.15 + step for step in range(85)], latest=0.2)
    why = "Reason: the maximum of 20 dense steps is reached, though the learning rate still rises."
    assert "made 20 dense steps" in said[-1] and said[-1].endswith(why)
    _train(onebit_adam(), [1.0] * 100, latest=1)
    assert said[-1].endswith("Reason: the maximum of 1 dense steps is reached."), "one step does not tell of a rise"


def test_a_group_that_rises_is_waited_for(said: list[str]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(9)) for _ in range(2)]
    optimizer = OnebitAdam(
        [{"params": [p]} for p in parameters], refresh="never", exchange=ExchangeOptions(_alone=True)
    )
    trainer = FakeTrainer([optimizer], 100)
    trainer.start(VarianceFreezeMixin(latest=0.5))
    for step in range(100):
        optimizer.param_groups[1]["lr"] = min(step, 29)
        trainer.step()
    assert optimizer.ledger.dense_steps == 30 + 2


def test_ranks_ask_each_other_between_minimum_and_maximum_only(said: list[str]) -> None:
    rise = [0.01 * step for step in range(1, 41)]
    assert _train(onebit_adam(), rise, earliest=10, latest=25).strategy.broadcasts == 15
    assert _train(onebit_adam(), [1.0] * 40, earliest=10, latest=25).strategy.broadcasts == 1
    trainer = FakeTrainer([onebit_adam()])
    trainer.start(VarianceFreezeMixin(20))
    for _ in range(30):
        trainer.step()
    assert trainer.strategy.broadcasts == 0


def _ranks(body: Any) -> list[tuple[type | None, str, int, Phase]]:
    """What two ranks raise, after how many steps and in which phase, while ``body(rank, optimizer, step, trainer)`` steps."""

    def train(group: SimulatedGroup) -> tuple[type | None, str, int, Phase]:
        parameter = torch.nn.Parameter(torch.ones(65))
        optimizer = OnebitAdam(
            [parameter], refresh="never", exchange=ExchangeOptions(block_size=32, kernels="reference")
        )
        optimizer.configure_communication(group)  # type: ignore[arg-type]
        trainer = FakeTrainer([optimizer], 50)

        def broadcast(value: bool) -> bool:
            told = torch.zeros(2, dtype=torch.uint8)
            assert optimizer._engine.link.transport is not None
            mine = torch.tensor([value], dtype=torch.uint8)
            optimizer._engine.link.transport.all_gather(told, mine, group, what="decision", link=None).wait()  # type: ignore[arg-type]
            return bool(told[0])

        trainer.strategy.broadcast = broadcast
        try:
            for step in range(1, 13):
                body(group.rank, optimizer, step, trainer)
        except Exception as error:
            return type(error), str(error), optimizer.steps, optimizer.phase
        return None, "", optimizer.steps, optimizer.phase

    return SimulatedWorld(2).run(train)


def test_a_rank_that_freezes_alone_fails_with_the_others() -> None:
    """What the automatic rule must not let happen: none of the messages says why."""

    def body(rank: int, optimizer: Any, step: int, trainer: FakeTrainer) -> None:
        trainer.step()
        if (rank, step) == (1, 4):
            optimizer.freeze()

    results = _ranks(body)
    assert [(error, steps) for error, _, steps, _ in results] == [(CollectiveFailure, 4)] * 2
    assert "step 5, dense all-reduce" in results[0][1] and "step 5, round 1" in results[1][1]


@pytest.mark.parametrize("rank_that_rises", [None, 0, 1])
def test_ranks_with_other_learning_rates_freeze_together_and_are_told(
    rank_that_rises: int | None, said: list[str]
) -> None:
    def body(rank: int, optimizer: Any, step: int, trainer: FakeTrainer) -> None:
        if step == 1:
            trainer.start(VarianceFreezeMixin(earliest=4, latest=9))
        optimizer.param_groups[0]["lr"] = 1e-3 * (step if rank == rank_that_rises else 1)
        trainer.step()

    results = _ranks(body)
    if rank_that_rises is None:
        assert results == [(None, "", 12, Phase.COMPRESSED)] * 2
    for error, words, steps, phase in results if rank_that_rises is not None else []:
        assert error is PlanMismatch and "disagree about the options of parameter groups" in words
        assert words.count("lr=") == 2
        assert (steps, phase) == (9 if rank_that_rises == 0 else 4, Phase.COMPRESSED)


# ---------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("cut", [5, 17, 45])
def test_a_resumed_run_freezes_at_the_step_of_the_uninterrupted_one(cut: int, said: list[str]) -> None:
    """By rises after steps 15, 25 and 35. A run that has forgotten what came before ``cut`` freezes after step 47, 20 or 47."""
    options: dict[str, Any] = {"earliest": 20, "latest": 0.9}
    rates = [1e-3 * (1 + sum(step >= rise for rise in (15, 25, 35))) for step in range(80)]

    def run(optimizer: Any, callback: Any, start: int, stop: int) -> None:
        trainer = FakeTrainer([optimizer], 80)
        trainer.fit_loop.epoch_loop._batches_that_stepped = start
        trainer.start(callback)
        for step in range(start, stop):
            torch.manual_seed(step)
            optimizer.param_groups[0]["lr"] = rates[step]
            trainer.step()
        assert stop < 80 or optimizer.phase is Phase.COMPRESSED

    torch.manual_seed(1)
    whole = onebit_adam(betas=(0.9, 0.95))
    start_state = [p.detach().clone() for p in whole.param_groups[0]["params"]]
    run(whole, VarianceFreezeMixin(**options), 0, 80)
    assert whole.ledger.dense_steps == 36 + 15 + 1, (
        "the last rise is that of step 36, the longest gap from step 1 to step 16"
    )

    first, callback = onebit_adam(betas=(0.9, 0.95)), VarianceFreezeMixin(**options)
    with torch.no_grad():
        for p, value in zip(first.param_groups[0]["params"], start_state, strict=True):
            p.copy_(value)
    run(first, callback, 0, cut)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "callback": callback.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, callback = onebit_adam(betas=(0.9, 0.95)), VarianceFreezeMixin(**options)
    with torch.no_grad():
        for p, q in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            p.copy_(q)
    second.load_state_dict(saved["optimizer"])
    callback.load_state_dict(saved["callback"])
    run(second, callback, cut, 80)
    frozen_at = [line for line in said if "freezes its variance" in line]
    assert frozen_at[0] == frozen_at[1]


def test_a_run_resumed_after_the_freeze_says_and_does_nothing(said: list[str]) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer])
    trainer.start(VarianceFreezeMixin(3))
    for _ in range(5):
        trainer.step()
    resumed = onebit_adam()
    resumed.load_state_dict(optimizer.state_dict())
    said.clear()
    trainer = FakeTrainer([resumed])
    trainer.fit_loop.epoch_loop._batches_that_stepped = 5
    trainer.start(VarianceFreezeMixin(3))
    trainer.step()
    assert said == [] and resumed.phase is Phase.COMPRESSED


def test_a_run_resumed_past_a_smaller_step_freezes_before_its_next_step(said: list[str]) -> None:
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer])
    for _ in range(6):
        trainer.step()
    trainer.start(VarianceFreezeMixin(3))
    assert optimizer.phase is Phase.COMPRESSED and not optimizer.next_step_is_dense


# ------------------------------------------------------------------------------------------- another state in mid-run


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("options", [{"at": 5}, {"latest": 5}])
def test_an_optimizer_that_starts_over_is_frozen_again(options: dict[str, Any], resets: bool, said: list[str]) -> None:
    """The program loads the state that it kept from before the first step, or calls ``reset_state()``."""
    optimizer = onebit_adam()
    first = copy.deepcopy(optimizer.state_dict())
    trainer, callback = FakeTrainer([optimizer]), VarianceFreezeMixin(**options)
    trainer.start(callback)
    phases = []
    for t in range(20):
        if t == 9:
            optimizer.reset_state() if resets else optimizer.load_state_dict(first)
        trainer.step()
        phases.append(optimizer.phase is Phase.WARMUP)
    assert phases == [True] * 4 + [False] * 5 + [True] * 4 + [False] * 7
    callback.on_train_end(trainer, None)
    optimizer.load_state_dict(first)
    for _ in range(6):
        trainer.step()
    assert optimizer.phase is Phase.WARMUP, "it goes on watching after the end"


def test_a_state_from_before_does_not_end_the_rise_of_the_learning_rate(said: list[str]) -> None:
    """The program goes back from step 20 to step 15, of a learning rate that rises up to step 30."""
    optimizer, kept = onebit_adam(), {}
    trainer = FakeTrainer([optimizer], 100)
    trainer.start(VarianceFreezeMixin(latest=0.9))
    for batch in range(50):
        if batch == 20:
            optimizer.load_state_dict(kept)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(optimizer.steps + 1, 30)
        trainer.step()
        if batch == 14:
            kept = copy.deepcopy(optimizer.state_dict())
    assert optimizer.phase is Phase.COMPRESSED and optimizer.steps == 45
    assert "made 32 dense steps" in said[-1]


def test_an_optimizer_that_is_given_a_frozen_state_in_mid_run_stays_frozen(said: list[str]) -> None:
    donor = onebit_adam()
    FakeTrainer([donor]).step()
    donor.freeze()
    optimizer = onebit_adam()
    trainer = FakeTrainer([optimizer])
    trainer.start(VarianceFreezeMixin(5))
    trainer.step()
    optimizer.load_state_dict(donor.state_dict())
    for _ in range(7):
        trainer.step()
    assert optimizer.phase is Phase.COMPRESSED
