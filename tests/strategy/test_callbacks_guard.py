"""DivergenceGuard: notices a blow-up, falls back to dense steps on all ranks together, and comes back."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from fake_trainer import FakeModule, FakeTrainer, onebit_adam
from harness import grouped, run_ranks
from lightning_support import enter, loader, make_module, onebit, quiet_trainer, strategy_class

import lightning_onebit.callbacks.freeze as freeze
import lightning_onebit.callbacks.guard as guard
from lightning_onebit.algorithms import BinSGDM, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.callbacks.freeze import VarianceFreezeMixin
from lightning_onebit.callbacks.guard import DivergenceGuardMixin
from lightning_onebit.engine import Phase


class _Said:
    def __init__(self) -> None:
        self.infos: list[str] = []
        self.warnings: list[str] = []
        guard.rank_zero_info = freeze.rank_zero_info = self.infos.append  # type: ignore[assignment]
        guard.rank_zero_warn = self.warnings.append  # type: ignore[assignment]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> _Said:
    for module, name in ((guard, "rank_zero_info"), (guard, "rank_zero_warn"), (freeze, "rank_zero_info")):
        monkeypatch.setattr(module, name, None)
    return _Said()


def _run(
    callbacks: list[Any], optimizer: Any, losses: list[float], trainer: Any = None, first: int = 0
) -> tuple[Any, list[str]]:
    """One batch per loss; returns the phase after each."""
    trainer = trainer or FakeTrainer([optimizer], planned=1000)
    trainer.callbacks = list(callbacks)
    module = FakeModule()
    for callback in callbacks:
        trainer.start(callback, module)
    phases = []
    for step, loss in enumerate(losses):
        torch.manual_seed(first + step)
        trainer.step()
        for callback in callbacks:
            if hasattr(callback, "on_train_batch_end"):
                callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, step)
        phases.append(optimizer.phase.value)
    return trainer, phases


# ------------------------------------------------------------------------------------------------------------------ thaw


def _thawed(rank: int, world: int, kind: str) -> dict[str, Any]:
    found = {}
    for mode in ("never frozen", "frozen and thawed", "compressed between"):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(33, 5)), torch.nn.Parameter(torch.randn(70))]
        options = {"lr": 1e-2, "betas": (0.9, 0.99), "block_size": 32, "kernels": "reference", "denominator_floor": 0.0}
        optimizer = {"OnebitAdam": OnebitAdam, "OnebitLamb": OnebitLamb}[kind](parameters, **grouped(options))
        torch.manual_seed(rank + 1)

        def steps(count: int, parameters: Any = parameters, optimizer: Any = optimizer) -> None:
            for _ in range(count):
                for p in parameters:
                    p.grad = torch.randn_like(p) * 0.1 + p.detach()
                optimizer.step()

        steps(10)
        if mode != "never frozen":
            optimizer.freeze()
            steps(5 if mode == "compressed between" else 0)
            optimizer.thaw()
            assert optimizer.phase is Phase.WARMUP
        steps(10)
        optimizer.freeze()
        steps(5)
        counts = (optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps, optimizer.steps)
        found[mode] = (counts, [p.detach() for p in parameters])
    return found


@pytest.mark.parametrize("kind", ["OnebitAdam", "OnebitLamb"])
def test_a_thawed_optimizer_goes_on_as_if_it_had_never_been_frozen(kind: str) -> None:
    first, second = run_ranks(_thawed, 2, kind)
    for mode, (counts, weights) in first.items():
        assert second[mode][0] == counts
        assert all(torch.equal(a, b) for a, b in zip(weights, second[mode][1], strict=True)), "replicas stay equal"
    assert first["never frozen"][0] == first["frozen and thawed"][0] == (20, 5, 25)
    assert first["compressed between"][0] == (20, 10, 30)
    for a, b in zip(first["never frozen"][1], first["frozen and thawed"][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_variance_does_not_jump_when_it_had_seen_few_steps() -> None:
    # 3 updates at beta2 = 0.999 against 40 steps: the bias correction differs more than tenfold.
    optimizer = onebit_adam(denominator_floor=0.0)
    for step in range(40):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 2:
            optimizer.freeze()
    optimizer.thaw()
    v = optimizer.state_dict()["state"][0]["exp_avg_sq"] / (1 - 0.999**40)
    torch.testing.assert_close(v, torch.ones_like(v), rtol=1e-3, atol=0)


def test_thaw_refuses_what_it_cannot_take_back() -> None:
    with pytest.raises(RuntimeError, match="phase 'warmup'"):
        onebit_adam().thaw()
    with pytest.raises(RuntimeError, match="freeze_step=3"):
        onebit_adam(freeze_step=3).thaw()
    for kind in (BinSGDM, ZeroOneAdam):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} has no dense warm-up"):
            kind([torch.nn.Parameter(torch.zeros(3))]).thaw()


# ------------------------------------------------------------------------------------------------------------ one process


def test_a_loss_that_blows_up_brings_dense_steps_back_and_then_compression_again(said: _Said) -> None:
    optimizer = onebit_adam()
    callbacks = [VarianceFreezeMixin(10), DivergenceGuardMixin(5, dense_steps=7)]
    losses = [2.0] * 10 + [1.0] * 10 + [1.4] * 5 + [1.6] * 5 + [1.0] * 20
    _, phases = _run(callbacks, optimizer, losses)
    # 1.4 is no blow-up, 1.6 is one: seen at batch 30; 7 dense steps follow.
    assert phases == ["warmup"] * 9 + ["compressed"] * 20 + ["warmup"] * 7 + ["compressed"] * 14
    assert (optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps) == (17, 33)
    assert len(said.warnings) == 1
    assert "after step 30 the mean loss of the last 5 batches is 1.6, the best was 1" in said.warnings[0]
    assert "Fallback 1 of 3" in said.warnings[0] and "until step 37" in said.warnings[0]
    assert "freezes its refreshed variance" in said.infos[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_blow_up_and_no_new_best(bad: float, said: _Said) -> None:
    callback = DivergenceGuardMixin(5, dense_steps=50)
    optimizer = onebit_adam()
    _run([VarianceFreezeMixin(5), callback], optimizer, [1.0] * 12 + [bad] + [1.0] * 2)
    assert optimizer.phase is Phase.WARMUP and callback.best_loss == 1.0


def test_negative_losses_blow_up_upwards_only(said: _Said) -> None:
    optimizer = onebit_adam()
    callbacks = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=50)]
    _, phases = _run(callbacks, optimizer, [-2.0] * 10 + [-3.0] * 10 + [-2.0] * 5 + [-1.4] * 5)
    assert phases.index("warmup", 10) == 29, "-2 is within half the size of the best, -1.4 is not"


def test_a_blow_up_before_the_freeze_is_not_its_business(said: _Said) -> None:
    optimizer = onebit_adam()
    _run([DivergenceGuardMixin(5)], optimizer, [1.0] * 5 + [9.0] * 15)
    assert optimizer.ledger.dense_steps == 20 and said.warnings == []


def test_what_dense_steps_did_is_not_blamed_on_compression(said: _Said) -> None:
    # The loss is high in the fallback (batches 11 to 18) too; the look at batch 20 would see batches 16 to 18 of it.
    optimizer = onebit_adam()
    callbacks = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=8)]
    _run(callbacks, optimizer, [1.0] * 5 + [9.0] * 13 + [1.0] * 12)
    assert len(said.warnings) == 1 and optimizer.phase is Phase.COMPRESSED


def test_a_residual_that_grows_is_a_blow_up(said: _Said, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in ((9.9, Phase.COMPRESSED), (10.1, Phase.WARMUP), (math.nan, Phase.WARMUP)):
        optimizer = onebit_adam()
        monkeypatch.setattr(optimizer, "residual_ratio", lambda value=value: value)
        _run([VarianceFreezeMixin(5), DivergenceGuardMixin(5, loss_factor=None)], optimizer, [1.0] * 10)
        assert optimizer.phase is expected, value


def test_after_the_last_fallback_the_run_stays_dense(said: _Said) -> None:
    optimizer = onebit_adam()
    callbacks = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=3, max_fallbacks=2)]
    _, phases = _run(callbacks, optimizer, [1.0] * 5 + [9.0] * 45)
    assert len(said.warnings) == 2 and "for the rest of the run" in said.warnings[1]
    assert set(phases[-20:]) == {"warmup"}


def test_after_the_last_fallback_an_optimizer_that_was_in_one_stays_dense_too(said: _Said) -> None:
    """The second blow-up is that of the optimizer whose variance forgets sooner, while the other still learns."""
    slow, quick = onebit_adam(betas=(0.9, 0.99)), onebit_adam(betas=(0.9, 0.9))
    trainer = FakeTrainer([slow, quick], planned=1000)
    callbacks: list[Any] = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, residual_limit=None, max_fallbacks=2)]
    for callback in callbacks:
        trainer.start(callback, FakeModule())
    for batch in range(130):
        trainer.step()
        loss = torch.tensor(1.0 if batch < 5 else 9.0)
        callbacks[1].on_train_batch_end(trainer, FakeModule(), loss, None, batch)
    assert len(said.warnings) == 2 and "Fallback 2 of 2" in said.warnings[1] and "rest of the run" in said.warnings[1]
    assert slow.phase is quick.phase is Phase.WARMUP
    assert (slow.ledger.compressed_steps, quick.ledger.compressed_steps) == (5, 10)


def test_a_fallback_lasts_as_long_as_the_memory_of_the_variance_by_default(said: _Said) -> None:
    optimizer = onebit_adam(betas=(0.9, 0.9))
    _, phases = _run([VarianceFreezeMixin(5), DivergenceGuardMixin(5)], optimizer, [1.0] * 5 + [9.0] * 5 + [1.0] * 30)
    assert phases[9:].index("compressed") == 10


@pytest.mark.parametrize("guarded", [True, False])
def test_a_fallback_is_ended_after_a_resume_by_whoever_is_left(guarded: bool, said: _Said) -> None:
    optimizer = onebit_adam()
    callbacks: list[Any] = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=8)]
    _run(callbacks, optimizer, [1.0] * 5 + [9.0] * 5 + [1.0] * 3)
    assert optimizer.phase is Phase.WARMUP
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), *(callback.state_dict() for callback in callbacks)], file)
    file.seek(0)
    saved, *states = torch.load(file, weights_only=True)

    resumed = onebit_adam()
    resumed.load_state_dict(saved)
    callbacks = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=8)][: 1 + guarded]
    for callback, state in zip(callbacks, states, strict=False):
        callback.load_state_dict(state)
    trainer = FakeTrainer([resumed], planned=1000)
    trainer.fit_loop.epoch_loop._batches_that_stepped = 13
    _, phases = _run(callbacks, resumed, [1.0] * 10, trainer, first=13)
    # With the guard the fallback ends at step 10 + 8; without it VarianceFreeze finds itself past its step.
    assert phases.index("compressed") == (4 if guarded else 0)


@pytest.mark.parametrize("options", [{"at": 5}, {"earliest": 5, "latest": 900}])
def test_a_fallback_goes_on_where_the_program_goes_back_within_it(options: dict[str, Any], said: _Said) -> None:
    """To a state from the fallback, after step 12: it ends 8 steps after step 10, not where the first freeze would come."""
    optimizer = onebit_adam()
    callbacks: list[Any] = [VarianceFreezeMixin(**options), DivergenceGuardMixin(5, dense_steps=8)]
    trainer, phases = _run(callbacks, optimizer, [1.0] * 5 + [9.0] * 5 + [1.0] * 2)
    assert phases[4:] == ["compressed"] * 5 + ["warmup"] * 3
    kept = copy.deepcopy(optimizer.state_dict())
    trainer.step()
    optimizer.load_state_dict(kept)
    module, phases = FakeModule(), []
    for batch in range(12, 22):
        trainer.step()
        callbacks[1].on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, batch)
        phases.append(optimizer.phase.value)
    assert phases.index("compressed") == 5


def test_batches_whose_step_was_skipped_are_no_blow_up(said: _Said) -> None:
    """All ranks have left that step out: neither weights nor residuals know of it. Accumulated batches go with their step."""
    for accumulated in (1, 2):
        optimizer = onebit_adam()
        trainer = FakeTrainer([optimizer], planned=1000)
        callbacks: list[Any] = [VarianceFreezeMixin(4), DivergenceGuardMixin(4, residual_limit=None)]
        for callback in callbacks:
            trainer.start(callback, FakeModule())
        for batch in range(50):
            bad = batch // accumulated % 5 == 3
            if batch % accumulated == accumulated - 1:
                trainer.step(math.nan if bad else 1.0)
            first = batch % accumulated == 0
            loss = {"loss": torch.tensor(math.inf if bad and first else 1.0)}
            callbacks[1].on_train_batch_end(trainer, FakeModule(), loss, None, batch)
        assert optimizer.skipped_steps == 50 // accumulated // 5 and optimizer.phase is Phase.COMPRESSED
        assert callbacks[1].fallbacks == 0 and callbacks[1].best_loss == 1.0 and said.warnings == []
        # the same loss in a step that was made is one
        for batch in range(8):
            trainer.step()
            callbacks[1].on_train_batch_end(trainer, FakeModule(), {"loss": torch.tensor(math.inf)}, None, batch)
        assert callbacks[1].fallbacks == 1
        said.warnings.clear()


def _saved(callback: Any, trainer: Any) -> Any:
    """What a checkpoint holds of a callback, written and read as Lightning does."""
    callback.state_key = "one"
    checkpoint = {"callbacks": {"one": callback.state_dict()}}
    if hasattr(callback, "on_save_checkpoint"):
        callback.on_save_checkpoint(trainer, FakeModule(), checkpoint)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["callbacks"]["one"]


def _resumed(callbacks: list[Any], states: list[Any], optimizer: Any, batches: int) -> tuple[Any, Any]:
    resumed = onebit_adam(_alone=optimizer.exchange._alone)
    resumed.load_state_dict(optimizer.state_dict())
    for callback, state in zip(callbacks, states, strict=True):
        callback.load_state_dict(state)
    trainer = FakeTrainer([resumed], planned=1000)
    trainer.fit_loop.epoch_loop._batches_that_stepped = batches
    return resumed, trainer


def test_a_resumed_guard_looks_when_it_would_have_looked_and_at_what(said: _Said) -> None:
    """Also where the checkpoint cuts a window; of less than half of one, where its losses are lost, no loss is judged."""
    looks: list[list[int]] = []
    losses = [1.0] * 20 + [1.0, 9.0] * 10
    for cut, lost in ((None, False), (22, False), (25, False), (28, False), (24, True), (28, True)):
        optimizer = onebit_adam()

        def make() -> list[Any]:
            return [VarianceFreezeMixin(3), DivergenceGuardMixin(10, residual_limit=None, dense_steps=4)]

        callbacks = make()
        trainer, _ = _run(callbacks, optimizer, losses[:cut])
        if cut is not None:
            states = [_saved(callback, trainer) for callback in callbacks]
            if lost:
                del states[1]["window"]
            callbacks = make()
            resumed, trainer = _resumed(callbacks, states, optimizer, cut)
            _run(callbacks, resumed, losses[cut:], trainer, first=cut)
        looks.append([int(line.split("after step ")[1].split()[0]) for line in said.warnings])
        assert all("the last 10 batches is 5, the best" in line for line in said.warnings) or lost
        said.warnings.clear()
    # (the second fallback comes a full window after the first, whose dense steps are not judged)
    assert looks[:5] == [[30]] * 5
    assert looks[5] == [40]


def test_a_window_saved_by_other_ranks_goes_on_with_its_mean(said: _Said) -> None:
    """And with nothing where the run that resumes does not look at losses."""
    state = {"best_loss": 2.0, "fallbacks": 0, "refreeze_at": {}, "batches": 3, "compressed": 0, "compressing": {}}
    state["window"] = [[6.0, 3.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0]]
    for options, best in (({}, 1.1), ({"loss_factor": None}, 2.0)):
        callback = DivergenceGuardMixin(5, **options)  # type: ignore[arg-type]
        callback.load_state_dict(state)
        _run([callback], onebit_adam(), [0.5, 0.5])
        assert callback.best_loss == pytest.approx(best)


def _scheduled_accumulation(rank: int, world: int) -> tuple[float, int]:
    """A loss of 3 in every batch; four of them per step at first, then one."""
    pl = enter(rank)
    import lightning_onebit as ob

    def training_step(module: Any, batch: Any, _: int) -> torch.Tensor:
        return 0.0 * module.net(batch[0]).sum() + 3.0

    watch = ob.callbacks.DivergenceGuard(4)
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 4, 2: 1})
    module = make_module(pl, onebit(None), training_step=training_step)
    trainer = quiet_trainer(
        pl,
        strategy_class()(),
        max_epochs=4,
        log_every_n_steps=1,
        callbacks=[schedule, ob.callbacks.VarianceFreeze(1), watch],
    )
    trainer.fit(module, loader(64, 4))
    return watch.best_loss, watch.fallbacks


def test_the_loss_is_that_of_training_step_whatever_the_accumulation() -> None:
    """Lightning hands it on divided by the factor: where a schedule lowers that, every loss seemed to blow up."""
    assert run_ranks(_scheduled_accumulation, 2, timeout=120) == [(3.0, 0)] * 2


def test_the_loss_must_be_there_if_it_is_to_be_looked_at(said: _Said) -> None:
    for outputs in (None, {}, {"loss": None}):
        callback, trainer, module = DivergenceGuardMixin(), FakeTrainer([onebit_adam()]), FakeModule()
        trainer.start(callback, module)
        with pytest.raises(ValueError, match="set loss_factor=None"):
            callback.on_train_batch_end(trainer, module, outputs, None, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: OnebitAdam(p, freeze_step=5), "freeze_step=5.*VarianceFreeze"),
        (lambda p: BinSGDM(p), "BinSGDM does not have"),
        (lambda p: ZeroOneAdam(p), "ZeroOneAdam does not have"),
    ],
)
def test_optimizers_that_cannot_fall_back_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FakeTrainer([make([torch.nn.Parameter(torch.zeros(3))])]).start(DivergenceGuardMixin(), FakeModule())


# -------------------------------------------------------------------------------------------------------------- two ranks


def _together(rank: int, world: int) -> tuple[list[str], list[str], list[torch.Tensor]]:
    said = _Said()
    torch.manual_seed(0)
    optimizer = onebit_adam(_alone=False)
    callbacks = [VarianceFreezeMixin(5), DivergenceGuardMixin(5, dense_steps=4)]
    # Only rank 1 sees the blow-up: 3 on one of two ranks is a mean of 2.
    _, phases = _run(callbacks, optimizer, [1.0] * 10 + [3.0 if rank else 1.0] * 5 + [1.0] * 10, first=1000 * rank)
    return phases, said.warnings, [p.detach() for p in optimizer.param_groups[0]["params"]]


def test_all_ranks_fall_back_together_though_only_one_sees_the_blow_up() -> None:
    first, second = run_ranks(_together, 2)
    assert first[0] == second[0] == ["warmup"] * 4 + ["compressed"] * 10 + ["warmup"] * 4 + ["compressed"] * 7
    assert "is 2, the best was 1" in first[1][0]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


class _Looking(DivergenceGuardMixin):
    """Writes down what each look sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def _compare_notes(self, *args: Any) -> Any:
        self.seen.append((self._batches, self._compressed, super()._compare_notes(*args)))
        return self.seen[-1][-1]


def _cut_windows(rank: int, world: int) -> dict[str, Any]:
    """40 batches, two per step, whose losses differ by rank; checkpoints cut windows, and steps too."""
    _Said()
    losses = torch.rand(40, generator=torch.Generator().manual_seed(rank)).tolist()

    def train(callbacks: list[Any], optimizer: Any, trainer: Any, first: int, last: int) -> None:
        trainer.callbacks = callbacks
        for callback in callbacks:
            trainer.start(callback, FakeModule())
        for batch in range(first, last):
            torch.manual_seed(1000 * rank + batch)
            if batch % 2:
                trainer.step(math.nan if batch == 23 else 1.0)
            callbacks[1].on_train_batch_end(trainer, FakeModule(), torch.tensor(losses[batch]), None, batch)

    def make() -> list[Any]:
        return [VarianceFreezeMixin(3), _Looking(10, loss_factor=1.2, residual_limit=None)]

    found: dict[str, Any] = {}
    for cut in (40, 12, 17, 22, 23, 25, 28, 39):
        torch.manual_seed(0)
        optimizer, callbacks = onebit_adam(_alone=False), make()
        trainer = FakeTrainer([optimizer], planned=1000)
        train(callbacks, optimizer, trainer, 0, cut)
        if cut == 28:  # saved when training has ended
            callbacks[1].on_train_end(trainer, FakeModule())
            callbacks[1].teardown(trainer, FakeModule(), "fit")
        seen = callbacks[1].seen
        states = [_saved(callback, trainer) for callback in callbacks]
        if cut < 40:
            callbacks = make()
            resumed, trainer = _resumed(callbacks, states, optimizer, cut // 2)
            train(callbacks, resumed, trainer, cut, 40)
            seen = seen + callbacks[1].seen
        found[str(cut)] = (seen, callbacks[1].best_loss, callbacks[1].fallbacks)
    return found


def test_a_guard_that_resumes_within_a_window_sees_bit_for_bit_what_it_would_have_seen() -> None:
    """Losses differ by rank, and so does what each has seen of a window: all of it is in the checkpoint."""
    first, second = run_ranks(_cut_windows, 2, timeout=120)
    assert first == second and [look[0] for look in first["40"][0]] == [10, 20, 30, 40]
    for cut, found in first.items():
        assert found == first["40"], f"saved after batch {cut}"


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps=0"),
        ({"loss_factor": 1.0}, ValueError, "loss_factor=1.0"),
        ({"loss_factor": "2"}, TypeError, "loss_factor='2'"),
        ({"residual_limit": 0}, ValueError, "residual_limit=0"),
        ({"loss_factor": None, "residual_limit": None}, ValueError, "look at nothing"),
        ({"dense_steps": 0}, ValueError, "dense_steps=0"),
        ({"max_fallbacks": 0}, ValueError, "max_fallbacks=0"),
        ({"max_fallbacks": 1.5}, TypeError, "max_fallbacks=1.5"),
        ({"timeout": 30}, TypeError, "timeout"),
    ],
)
def test_every_bad_option_is_refused_by_name(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        DivergenceGuardMixin(**options)
