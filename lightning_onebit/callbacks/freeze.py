"""``VarianceFreeze``: when the dense warm-up ends and compression begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_onebit._choices import Automatic
from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit.algorithms.schedules import FEWEST_GRADIENTS
from lightning_onebit.callbacks._common import WatchingCallback, misconfiguration, named_optimizers, uncompressed
from lightning_onebit.callbacks.guard import DivergenceGuardMixin
from lightning_onebit.comm import control_payload_bytes, exchange_collectives, peer_bytes, plan_buckets, ring_bytes
from lightning_onebit.engine import Phase
from lightning_onebit.engine.options import check_integer
from lightning_onebit.engine.sharded import local_of

# shares of the planned steps between which the automatic rule freezes where nobody has chosen others
EARLIEST, LATEST = 0.1, 0.2

# It waits for FEWEST_GRADIENTS dense steps besides, but not for more than half of the run (docs/freeze).
OF_FEW = f"Frozen after fewer than {FEWEST_GRADIENTS} steps, second moments are noisy: the loss may end some per cent higher."

# Where a compressed step sends more than this share of a dense one, no schedule makes the run worth while.
LITTLE_GAIN = 0.9


def bytes_of_steps(optimizer: Any, ranks: int) -> tuple[int, int, int]:
    """Bytes that a rank sends (of a hierarchical exchange: a node) in a dense step, in a compressed one, and in DDP's.

    All that is sent counts: scales, the blocks that tensors do not fill, and the control round. The optimizer need not have stepped.
    """
    share, size = optimizer.topology.ranks_per_node, optimizer.exchange.block_size
    groups = [(group["params"], group["compress"]) for group in optimizer.param_groups]
    trained = [(local_of(p), compressed) for params, compressed in groups for p in params if p.requires_grad]
    ddp = ring_bytes(ranks, sum(p.numel() * p.element_size() for p, _ in trained))
    # with every gradient goes an element that says whether there is one
    dense = ring_bytes(ranks, sum((p.numel() + 1) * p.element_size() for p, _ in trained))
    apart = ring_bytes(ranks, sum((p.numel() + 1) * p.element_size() for p, compressed in trained if not compressed))
    control = peer_bytes(ranks, control_payload_bytes(len(trained)))
    plan = plan_buckets(
        [p.numel() for p, compressed in trained if compressed],
        block_size=size,
        world_size=ranks,
        bucket_elements=int(optimizer.bucket_mb * 2**20 / 4),
        device=torch.device("cpu"),
    )
    collectives = exchange_collectives((bucket.blocks for bucket in plan.buckets), size, ranks, share)
    exchange = sum(share * one.sent for one in collectives if one.link == "inter")
    return dense, exchange + apart + control, ddp


@dataclass
class LearningRateWatch:
    """Tells whether the learning rate is still in its warm-up.

    The warm-up is over once more steps have passed since the last rise of any group's learning rate than ever lay
    between two rises (from the first step seen to the first rise counts too). A schedule that rises every step is
    recognised as over after two steps without a rise, one that rises once per epoch after an epoch without, and one that
    never rises was never in a warm-up.

    Attributes:
        learning_rates: one per param group, those of the last step seen.
        last_rise: step of the last rise, 0 if there was none.
        longest_gap: most steps between two rises.
        first: first step seen, 0 before it.
    """

    learning_rates: list[float] = field(default_factory=list)
    last_rise: int = 0
    longest_gap: int = 0
    first: int = 0

    def observe(self, step: int, learning_rates: Sequence[float]) -> None:
        """Notes the learning rates that step number ``step`` (counted from 1) was made with."""
        self.first = self.first or step
        # A param group added since has no earlier value to have risen from: zip leaves it out.
        if any(new > old for new, old in zip(learning_rates, self.learning_rates, strict=False)):
            self.longest_gap = max(self.longest_gap, step - max(self.last_rise, self.first))
            self.last_rise = step
        self.learning_rates = list(learning_rates)

    def rising(self, step: int) -> bool:
        """Whether the warm-up is still going on after ``step``."""
        return self.last_rise > 0 and step - self.last_rise <= self.longest_gap

    def over(self, step: int) -> bool:
        """Whether it is known after ``step`` that no warm-up goes on. One step alone cannot tell."""
        return 0 < self.first < step and not self.rising(step)


@dataclass
class _Watch:
    """What the callback knows of one optimizer, whose freeze comes between two steps, ``earliest`` and ``latest``."""

    name: str
    optimizer: Any
    planned: int | None
    offset: int  # batches that had stepped before its first step
    earliest: int
    latest: int
    seen: int  # its last step
    done: bool = False
    began: tuple[int, int] | None = None  # batches and steps at its first step
    expected: int | None = None  # steps in the whole run, where it does not step in every batch
    learning_rate: LearningRateWatch = field(default_factory=LearningRateWatch)

    @property
    def warms_up(self) -> bool:
        return not self.done and self.optimizer.phase is Phase.WARMUP

    @property
    def steps(self) -> str:
        """What its steps before the freeze are called: 0/1 Adam compresses most of them, by its own policy."""
        return "steps" if self.optimizer.local_steps else "dense steps"

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("offset", "seen", "done", "began")}
        return {**kept, "learning_rate": asdict(self.learning_rate)}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen, self.done, self.began = state["seen"], state["done"], state["began"]
        self.learning_rate = LearningRateWatch(**state["learning_rate"])


@shown_as("VarianceFreeze")
class VarianceFreezeMixin(WatchingCallback):
    """Ends the dense warm-up: freezes the variance of every compressed optimizer and lets compression begin.

    The automatic rule freezes after the first step, from ``earliest`` on, after which the learning rate no longer rises, and
    after step ``latest`` in any case. A variance that nothing refreshes (1-bit LAMB's; ``refresh="never"``; ``recipe="published"``)
    stays as it freezes for the rest of the run: it does so after step ``latest``, if neither bound is given. While the learning rate
    rises gradients change their scale, and the variance with them. The rise is over once more steps have passed since the last rise
    than ever lay between two; a learning rate that never rises has no warm-up, which takes two steps to see.

    Steps are real optimizer steps (an int; skipped ones do not count) or a share of the planned ones (a float; at least one
    step). Planned is what ``trainer.estimated_stepping_batches`` says, with two corrections: a
    GradientAccumulationScheduler's factor of every epoch counts, and under manual optimization ``max_steps``, which counts
    the steps of all optimizers, is divided by their number. An optimizer that does not step in every batch has the share of
    the steps that it makes in as many batches, by what it has made so far.

    Before training the callback says how much less the run will send than dense averaging (about ``1/(w + (1-w)/32)`` for fp32
    gradients with ``w`` the share of dense steps), or that the model is too small to gain. At the switch it says why it comes.
    Each of several compressed optimizers is judged by its own steps and its own learning rate. All ranks switch at the same
    step: fixed steps are counted, and between ``earliest`` and ``latest`` rank 0 decides.

    Args:
        at: dense steps: a number, a share, or ``"auto"``, the end of the learning rate's rise.
        earliest: for ``at="auto"``: fewest dense steps, for learning rates that rise briefly or not at all. None: 0.1, but no more
            than ``latest``, and half of it where the number of planned steps is unknown.
        latest: for ``at="auto"``: most dense steps. None: 0.2. Where neither is given, both are 100 steps at least, or half of a
            run that is shorter than 200.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an option is out of range, ``earliest`` exceeds ``latest``, or one of them is given with another ``at``.
        MisconfigurationException: (when fitting starts) a share of the planned steps is asked for and their number is
            unknown; ``earliest`` exceeds ``latest`` in this run; an optimizer has a ``freeze_step`` of its own, or no dense
            warm-up to end; another strategy.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[VarianceFreeze(1000)])
        >>> Trainer(strategy="onebit_adam", callbacks=[VarianceFreeze(latest=0.25)])
    """

    def __init__(
        self,
        at: int | float | Automatic = "auto",
        *,
        earliest: int | float | None = None,
        latest: int | float | None = None,
    ) -> None:
        super().__init__()
        if at != "auto":
            _check_point("at", at, also='"auto", ')
        for name, value in {"earliest": earliest, "latest": latest}.items():
            if value is not None:
                _check_point(name, value)
                if at != "auto":
                    raise ValueError(f'{name}={value!r} has no effect with at={at!r}; leave it out, or give at="auto"')
        self.at = at
        self.earliest = earliest
        self.latest = LATEST if at == "auto" and latest is None else latest
        self._by_itself = at == "auto" and earliest is None and latest is None
        if earliest is not None and type(earliest) is type(self.latest) and earliest > self.latest:  # type: ignore[operator]
            raise ValueError(f"earliest={earliest!r} exceeds latest={self.latest!r}; lower it, or raise the other one")
        self._restored: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses what cannot work before any training time is spent."""
        freezes = sum(isinstance(callback, VarianceFreezeMixin) for callback in trainer.callbacks)
        if freezes > 1:
            raise misconfiguration(
                trainer, f"{freezes} VarianceFreeze callbacks are set, which would contradict each other: keep one."
            )
        for name, optimizer in named_optimizers(self, trainer):
            if optimizer.freeze_step is not None:
                raise misconfiguration(
                    trainer,
                    f"{name} has freeze_step={optimizer.freeze_step} and VarianceFreeze(at={self.at!r}) is set "
                    "too: remove one of them.",
                )
            if optimizer.steps == 0 and optimizer.phase is not Phase.WARMUP:
                raise misconfiguration(
                    trainer,
                    f"VarianceFreeze ends a dense warm-up, but {name} has none (it starts in phase "
                    f"{optimizer.phase.value!r}): remove VarianceFreeze.",
                )
            self._bounds(trainer, optimizer, _planned(trainer, 0))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts watching the optimizers; by now a checkpoint's optimizer state has been loaded."""
        self._release()
        restored, self._restored, self._watches = self._restored, [], []
        for index, (name, optimizer) in enumerate(named_optimizers(self, trainer)):
            kept = restored[index] if index < len(restored) else None
            # An optimizer that was made for a second fit() starts at 0 while the Trainer goes on counting.
            offset = kept["offset"] if kept else max(0, _stepped_batches(trainer) - optimizer.steps)
            planned = _planned(trainer, offset)
            watch = _Watch(
                name, optimizer, planned, offset, *self._bounds(trainer, optimizer, planned), seen=optimizer.steps
            )
            if kept:
                watch.restore(kept)
            # Frozen before and warming up again: a fallback of DivergenceGuard, which ends it (if it is still there).
            watch.done = watch.done and _guarded(trainer)
            self._watches.append(watch)
            self._undo += [
                optimizer.register_step_post_hook(partial(self._after_step, trainer, watch)).remove,
                optimizer.register_load_state_dict_post_hook(partial(self._after_load, trainer, watch)).remove,
            ]
            if watch.warms_up:
                few = watch.latest < FEWEST_GRADIENTS
                rank_zero_info(self._forecast(trainer, watch) + (f" {OF_FEW}" if few else ""))
                # A resumed run may be past the step that the callback asks for by now.
                if optimizer.steps >= watch.latest:
                    self._freeze(trainer, watch)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stops watching and forgets the optimizers: another fit() brings its own."""
        super().teardown(trainer, pl_module, stage)
        self._watches = []

    def state_dict(self) -> dict[str, Any]:
        """The history that the automatic rule decides from, per optimizer: plain numbers."""
        return {"optimizers": [watch.state() for watch in self._watches]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self._restored = list(state_dict["optimizers"])

    # ----- each step --------------------------------------------------------------------------------------------------

    def _after_step(self, trainer: Any, watch: _Watch, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = optimizer.steps
        # A skipped step is no step; and an optimizer frozen by hand needs nothing from here.
        if step == watch.seen or not watch.warms_up:
            return
        watch.seen = step
        watch.learning_rate.observe(step, [float(group["lr"]) for group in optimizer.param_groups])
        earliest, latest = self._bounds_by_now(trainer, watch)
        # Rank 0 says whether the rise is over. A rank that freezes alone joins another collective than the others, which ends in a
        # timeout at best. Where learning rates differ, ranks that freeze together are told so by the next control round.
        if step >= latest or (step >= earliest and trainer.strategy.broadcast(watch.learning_rate.over(step))):
            self._freeze(trainer, watch)

    def _after_load(self, trainer: Any, watch: _Watch, optimizer: Any) -> None:
        """The program has given the optimizer another state, or none: what comes next follows from its phase."""
        # what was seen last is the step after which it froze
        in_fallback = watch.done and optimizer.steps >= watch.seen and _guarded(trainer)
        watch.seen, watch.began, watch.expected = optimizer.steps, None, None
        watch.learning_rate = LearningRateWatch()
        watch.done = in_fallback or optimizer.phase is not Phase.WARMUP

    def _bounds_by_now(self, trainer: Any, watch: _Watch) -> tuple[int, int]:
        """The bounds, of which shares of the run are shares of the steps that the optimizer makes in it.

        Planned are batches. How many steps an optimizer makes in them under manual optimization (a GAN's generator in every fifth
        batch, or from some epoch on) is known by watching only.
        """
        bounds = watch.earliest, watch.latest
        if isinstance(self.at, int) or watch.planned is None or trainer.lightning_module.automatic_optimization:
            return bounds
        batches = _stepped_batches(trainer) + 1 - watch.offset  # this one has not been counted
        tried = watch.optimizer.steps + watch.optimizer.skipped_steps
        watch.began = watch.began or (batches, tried)
        since, made = batches - watch.began[0], tried - watch.began[1]
        if tried >= batches or since <= 0:
            return bounds
        watch.expected = watch.optimizer.steps + round(max(0, watch.planned - batches) * made / since)
        now = self._in_run_of(trainer, watch.optimizer, watch.expected)
        earliest = min(watch.earliest, now[0])
        return earliest, max(earliest, min(watch.latest, now[1]))

    def _freeze(self, trainer: Any, watch: _Watch) -> None:
        optimizer = watch.optimizer
        optimizer.freeze()
        # The hook stays registered: torch is iterating over its hooks when this runs from one of them.
        watch.done = True
        # In a single process there is nobody to exchange with, so steps stay dense after the freeze.
        then = "steps stay dense in a single process" if optimizer.next_step_is_dense else "the next step is compressed"
        text = (
            f"VarianceFreeze: {watch.name} made {optimizer.steps:,} {watch.steps} and freezes its variance; {then}. "
            f"Rule: at={self.at!r}. Reason: {self._reason(watch)}."
        )
        rank_zero_info(below_bar(trainer, text))

    # ----- words ------------------------------------------------------------------------------------------------------

    def _reason(self, watch: _Watch) -> str:
        step, lr = watch.optimizer.steps, watch.learning_rate
        note = ", though the learning rate still rises" if lr.rising(step) else ""
        if self._waits(watch.optimizer, watch.expected or watch.planned):
            note = f"{note}; nothing renews its variance later"
        elif self.at == "auto" and lr.over(step):
            return "the learning rate no longer rises" if lr.last_rise else "the learning rate does not rise"
        if watch.expected is not None and step < watch.latest:
            share = f"its share of about {watch.expected:,} steps, which it makes in {watch.planned:,} planned batches"
            return f"that is {share}{note}"
        if self.at == "auto":
            return f"the maximum of {watch.latest:,} {watch.steps} is reached{note}"
        of = f" of {watch.planned:,} planned" if watch.planned is not None else ""
        return f"{watch.latest:,} {watch.steps}{of} were asked for{note}"

    def _forecast(self, trainer: Any, watch: _Watch) -> str:
        optimizer, latest, planned = watch.optimizer, watch.latest, watch.planned
        at_most, at_least = ("at most ", "at least ") if self.at == "auto" else ("", "")
        text = f"VarianceFreeze(at={self.at!r}): {watch.name} makes {at_most}{latest:,} {watch.steps}"
        if watch.steps == "steps":
            text, at_least = f"{text} with a learning variance", "at least "
        text += f" of {planned:,} planned" if planned is not None else ""
        ranks = trainer.strategy.replicas.count
        if ranks == 1:
            return (
                f"{text}. One process exchanges nothing."
                if trainer.world_size == 1
                else f"{text}. One replica exchanges nothing."
            )
        dense, compressed, ddp = bytes_of_steps(optimizer, ranks)
        if compressed >= LITTLE_GAIN * ddp:
            return (
                f"{text}. The model is too small to gain: a compressed step sends {compressed:,} bytes, a dense one {ddp:,}, because every "
                f"tensor fills whole blocks of {optimizer.exchange.block_size:,} elements. Use {uncompressed(trainer)}."
            )
        if planned is None:
            return f"{text}. The longer the run, the less is sent: up to {ddp / compressed:.3g}x less than by dense averaging."
        if latest >= planned and watch.steps == "dense steps":
            return f"{text}: no step will be compressed and nothing is saved. Freeze earlier or train longer."
        w = min(1.0, latest / planned)
        if refreshes := optimizer.dense_steps_after_freeze(latest, planned):
            w += refreshes / planned
            text += f", and {refreshes:,} refreshes"
        between = " between nodes" if optimizer.topology.ranks_per_node > 1 else ""
        between = " between replicas" if trainer.strategy.replicas.shards > 1 else between
        factor = ddp / (w * dense + (1 - w) * compressed)
        return f"{text} (w = {w:.1%}): {at_least}{factor:.1f}x less is sent{between} than by dense averaging."

    # ----- when -------------------------------------------------------------------------------------------------------

    def _bounds(self, trainer: Any, optimizer: Any, planned: int | None) -> tuple[int, int]:
        """First step after which the freeze may happen in a run of so many steps (None: unknown), and step after which it does.

        Raises:
            MisconfigurationException: the first exceeds the other, or a share is asked for of an unknown number.
        """
        earliest, latest = self._in_run_of(trainer, optimizer, planned)
        if earliest > latest:
            raise misconfiguration(
                trainer,
                f"VarianceFreeze: the minimum of {earliest} dense steps (earliest={self.earliest}) exceeds the maximum of {latest} "
                f"(latest={self.latest}): change one of them.",
            )
        return earliest, latest

    def _waits(self, optimizer: Any, planned: int | None) -> bool:
        """Whether the freeze waits for the maximum because second moments never learn after it; where nobody has chosen bounds."""
        if not self._by_itself or planned is None:
            return False
        return not optimizer.dense_steps_after_freeze(round(LATEST * planned), planned)

    def _in_run_of(self, trainer: Any, optimizer: Any, planned: int | None) -> tuple[int, int]:
        if self.latest is None:
            at = _in_steps(trainer, "at", self.at, planned)
            return at, at
        latest = _in_steps(trainer, "latest", self.latest, planned)
        if self.earliest is not None:
            return _in_steps(trainer, "earliest", self.earliest, planned), latest
        # one that nobody has chosen gives way to a smaller maximum
        earliest = latest // 2 if planned is None else round(EARLIEST * planned)
        if self._by_itself and planned is not None:
            fewest = min(FEWEST_GRADIENTS, planned // 2)
            earliest, latest = max(earliest, fewest), max(latest, fewest)
        if self._waits(optimizer, planned):
            earliest = latest
        return min(max(1, earliest), latest), latest


def _check_point(name: str, value: Any, also: str = "") -> None:
    """Raises unless ``value`` is a number of steps or a share of the run."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name}={value!r} must be {also}a number of steps (int) or a share of the planned steps (float)"
        )
    if isinstance(value, int):
        check_integer(name, value, least=1)
    elif not 0 < value < 1:
        raise ValueError(
            f"{name}={value!r} is out of range; give a share of the planned steps between 0 and 1, or an int of steps"
        )


def _in_steps(trainer: Any, name: str, point: Any, planned: int | None) -> int:
    """A point of the run in steps, at least 1; the option that asks for it is ``name``."""
    if isinstance(point, int):
        return point
    if planned is None:
        raise misconfiguration(
            trainer,
            f"VarianceFreeze: {name}={point:g} ends the dense warm-up after {point:.0%} of the planned steps, but their number is unknown "
            f"(max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}): give `Trainer(max_steps=...)`, or a number of steps as "
            f"`VarianceFreeze({name}=...)` or as `freeze_step=` of the strategy.",
        )
    return max(1, round(point * planned))


def _planned(trainer: Any, offset: int) -> int | None:
    """Steps that an optimizer will make in the whole run, before which ``offset`` batches have stepped; None: unknown, or no end.

    Lightning's estimate takes ``max_steps`` for a number of batches, but under manual optimization the steps of every
    optimizer count; and it takes the accumulation factor of the moment for that of every epoch.
    """
    estimate: float = trainer.estimated_stepping_batches
    # Both trees' GradientAccumulationScheduler, and subclasses; the last one that is called sets the factor.
    schedules = [callback for callback in trainer.callbacks if hasattr(callback, "get_accumulate_grad_batches")]
    most = math.inf if trainer.max_steps == -1 else trainer.max_steps
    if schedules and trainer.max_epochs != -1 and math.isfinite(trainer.num_training_batches):
        factors = map(schedules[-1].get_accumulate_grad_batches, range(max(trainer.max_epochs, 1)))
        estimate = min(sum(math.ceil(trainer.num_training_batches / factor) for factor in factors), most)
    if math.isfinite(most) and not trainer.lightning_module.automatic_optimization:
        estimate = min(estimate, math.ceil(most / len(trainer.optimizers)))
    # Lightning answers inf for training without end and -1 for a loader without length and no `max_steps`.
    return max(1, int(estimate) - offset) if math.isfinite(estimate) and estimate >= 0 else None


def _stepped_batches(trainer: Any) -> int:
    """Batches that ended in an optimizer step so far; ``trainer.global_step`` counts the steps of all optimizers together."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _guarded(trainer: Any) -> bool:
    return any(isinstance(callback, DivergenceGuardMixin) for callback in trainer.callbacks)
