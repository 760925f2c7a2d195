"""``VarianceFreeze``: when the dense warm-up ends and compression begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit.callbacks._common import (
    check_count,
    check_number,
    check_trainer,
    compressed_optimizers,
    misconfiguration,
    optimizer_name,
    set_up_anew,
    stepped_batches,
)
from lightning_onebit.callbacks.guard import DivergenceGuardMixin
from lightning_onebit.comm import control_payload_bytes, exchange_collectives, peer_bytes, plan_buckets, ring_bytes

DEFAULT_MIN_FRACTION = 0.1
DEFAULT_MAX_FRACTION = 0.2

# Where a compressed step sends more than this share of a dense one, no schedule makes the run worth while.
LITTLE_GAIN = 0.9


def volume_reduction(warmup_share: float, bits: int = 16) -> float:
    """How many times fewer bytes than a dense all-reduce a run sends whose warm-up is ``warmup_share`` of all steps.

    ``1 / (w + (1 - w) / bits)``: the published accounting (1-bit Adam, arXiv 2102.02888), one bit per element after the
    warm-up.

    Args:
        warmup_share: ``w``, between 0 and 1.
        bits: bits per element of the dense all-reduce: 16 for fp16 and bf16, 32 for fp32.

    Example:
        >>> round(volume_reduction(0.15), 1)
        4.9
    """
    return 1.0 / (warmup_share + (1.0 - warmup_share) / bits)


def bytes_of_steps(optimizer: Any, ranks: int) -> tuple[int, int, int]:
    """Bytes that a rank sends (of a hierarchical exchange: a node) in a dense step, in a compressed one, and in DDP's.

    All that is sent counts: scales, the blocks that tensors do not fill, and the control round.

    Args:
        optimizer: a compressed optimizer, which need not have made a step.
        ranks: number of ranks.
    """
    topology, size = optimizer.topology, optimizer.exchange.block_size
    trained = [(p, group["compress"]) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
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
    share = topology.ranks_per_node
    exchange = sum(
        share * one.sent
        for one in exchange_collectives((b.blocks for b in plan.buckets), size, ranks, share)
        if one.link == "inter"
    )
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


@dataclass(frozen=True)
class _Bounds:
    """When the freeze may happen; a fixed step is both.

    Attributes:
        earliest: first step after which it may.
        latest: step after which it happens in any case.
    """

    earliest: int
    latest: int


@dataclass
class _Watch:
    """What the callback knows of one optimizer."""

    name: str
    bounds: _Bounds
    planned: int | None
    offset: int
    steps: str
    learning_rate: LearningRateWatch = field(default_factory=LearningRateWatch)
    seen: int = 0
    done: bool = False
    began: tuple[int, int] | None = None  # batches and steps at its first step
    expected: int | None = None  # steps in the whole run, where it does not step in every batch
    handles: list[Any] = field(default_factory=list)

    def start_over(self, optimizer: Any) -> None:
        """Watches an optimizer that has been given another state, of which nothing is known but its steps and its phase."""
        self.seen, self.began, self.expected = optimizer.steps, None, None
        self.learning_rate = LearningRateWatch()
        self.done = not _in_warmup(optimizer)

    def state(self) -> dict[str, Any]:
        lr = self.learning_rate
        return {
            "offset": self.offset,
            "seen": self.seen,
            "done": self.done,
            "learning_rates": list(lr.learning_rates),
            "last_rise": lr.last_rise,
            "longest_gap": lr.longest_gap,
            "first": lr.first,
            "began": self.began,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.seen, self.done = state["seen"], state["done"]
        self.began = tuple(began) if (began := state.get("began")) else None
        rates = list(state["learning_rates"])
        # States of older releases lack the first step: it is that of the run, unless the optimizer was given another state since.
        first = state.get("first", 1 if rates else 0)
        self.learning_rate = LearningRateWatch(rates, state["last_rise"], state["longest_gap"], first)


@shown_as("VarianceFreeze")
class VarianceFreezeMixin:
    """Ends the dense warm-up: freezes the variance of every compressed optimizer and lets compression begin.

    Exactly one way to choose the step is given:

    * ``step``: after exactly this many real optimizer steps (skipped steps do not count).
    * ``fraction``: after this share of the planned steps, at least one step. Planned is what
      ``trainer.estimated_stepping_batches`` says, with two corrections: a GradientAccumulationScheduler's factor of
      every epoch counts, and under manual optimization ``max_steps``, which counts the steps of all optimizers, is
      divided by their number. There planned are batches, and of an optimizer that does not step in every one of them the
      share is taken of the steps that it makes in as many, by what it has made so far.
    * ``mode="auto"``: after the first step, from the minimum on, after which the learning rate no longer rises, and at
      the latest at the maximum. Gradients, and with them the variance, change their scale while the learning rate rises,
      so a variance from before its end is that of another regime; after it, refreshes go on teaching the variance.

    The learning rate no longer rises once more steps have passed since its last rise than ever lay between two rises;
    one that never rises has no warm-up, which takes two steps to see. At the maximum the freeze happens even while it
    rises, and the announcement says so.

    Before training the callback says how much less the run will send than dense averaging, which is about
    ``1/(w + (1-w)/32)`` for fp32 gradients with ``w`` the share of dense steps and less for a small model, whose tensors do
    not fill their blocks; a model too small to gain is told so. When it switches it says so once per optimizer. With
    several compressed optimizers each one is judged by its own steps and its own learning rate. All ranks switch at the
    same step: fixed steps are counted, and between minimum and maximum rank 0 decides.

    Args:
        step: dense steps, at least 1.
        fraction: share of the planned steps, between 0 and 1.
        mode: ``"auto"`` or None.
        min_step: for ``mode="auto"``: fewest dense steps; given, it replaces ``min_fraction``.
        min_fraction: for ``mode="auto"``: the same as a share of the planned steps, at least one step; None: one step. It
            is for learning rates that rise briefly or not at all. The default is the maximum where that is less, and
            half of ``max_step`` where the number of planned steps is unknown.
        max_step: for ``mode="auto"``: most dense steps; given, it replaces ``max_fraction``.
        max_fraction: for ``mode="auto"``: the same as a share of the planned steps. A maximum is required: None needs
            ``max_step``.

    Attributes:
        added_by_strategy: whether this is the default of a strategy, which the user has not asked for.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: not exactly one way is chosen, an option is out of range, or an option was given that the chosen way
            ignores.
        MisconfigurationException: (when fitting starts) a share of the planned steps is asked for and their number is
            unknown; the minimum exceeds the maximum; an optimizer has a ``freeze_step`` of its own, or no dense warm-up
            to end; another strategy.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[VarianceFreeze(fraction=0.2)])
        >>> Trainer(strategy="onebit_adam", callbacks=[VarianceFreeze(mode="auto", max_fraction=0.25)])
    """

    def __init__(
        self,
        step: int | None = None,
        fraction: float | None = None,
        mode: Literal["auto"] | None = None,
        *,
        min_step: int | None = None,
        min_fraction: float | None = DEFAULT_MIN_FRACTION,
        max_step: int | None = None,
        max_fraction: float | None = DEFAULT_MAX_FRACTION,
    ) -> None:
        super().__init__()
        self.step = step
        self.fraction = fraction
        self.mode = mode
        self.min_step = min_step
        self.min_fraction = min_fraction
        self.max_step = max_step
        self.max_fraction = max_fraction
        self.added_by_strategy = False
        self._check_options()
        self._watches: list[_Watch] = []
        self._watched: list[Any] = []
        self._restored: list[dict[str, Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses a Trainer of the other Lightning tree and a strategy that compresses nothing."""
        if stage == "fit":
            check_trainer(self, trainer)
            # One of the other tree is not known to the strategy, which then adds its default: name the cause, not the effect.
            freezes = [callback for callback in trainer.callbacks if isinstance(callback, VarianceFreezeMixin)]
            for callback in freezes:
                check_trainer(callback, trainer)
            if len(freezes) > 1:
                raise misconfiguration(
                    trainer,
                    f"{len(freezes)} VarianceFreeze callbacks are set, which would contradict each other: keep one.",
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses what cannot work before any training time is spent."""
        optimizers = compressed_optimizers(self, trainer)
        for index, optimizer in enumerate(optimizers):
            name = optimizer_name(index, len(optimizers), optimizer)
            if optimizer.freeze_step is not None:
                raise misconfiguration(
                    trainer,
                    f"{name} has freeze_step={optimizer.freeze_step} and VarianceFreeze({self._rule_text()}) is set "
                    "too: remove one of them.",
                )
            if optimizer.steps == 0 and not _in_warmup(optimizer):
                raise misconfiguration(
                    trainer,
                    f"VarianceFreeze ends a dense warm-up, but {name} has none (it starts in phase "
                    f"{optimizer.phase.value!r}): remove VarianceFreeze.",
                )
            self._bounds(trainer, self._planned(trainer, 0))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts watching the optimizers; by now a checkpoint's optimizer state has been loaded."""
        self._release()
        self._watches = []
        optimizers = self._watched = list(compressed_optimizers(self, trainer))
        for index, optimizer in enumerate(optimizers):
            restored = self._restored[index] if index < len(self._restored) else None
            # An optimizer that was made for a second fit() starts at 0 while the Trainer goes on counting.
            offset = restored["offset"] if restored else max(0, stepped_batches(trainer) - optimizer.steps)
            planned = self._planned(trainer, offset)
            bounds = self._bounds(trainer, planned)
            # 0/1 Adam compresses most steps before its variance freezes too: what is dense follows its own policy.
            steps = "steps" if optimizer.local_steps else "dense steps"
            name = optimizer_name(index, len(optimizers), optimizer)
            watch = _Watch(name, bounds, planned, offset, steps, seen=optimizer.steps)
            if restored:
                watch.restore(restored)
            self._watches.append(watch)
            # Frozen before and warming up again: a fallback of DivergenceGuard, which ends it (if it is still there).
            watch.done = watch.done and self._guarded(trainer)
            watch.handles = [
                optimizer.register_step_post_hook(partial(self._after_step, trainer, watch)),
                optimizer.register_load_state_dict_post_hook(partial(self._after_load, trainer, watch)),
            ]
            if _in_warmup(optimizer) and not watch.done:
                rank_zero_info(self._forecast(trainer, watch, optimizer))
                # A resumed run may be past the step that the callback asks for by now.
                if optimizer.steps >= bounds.latest:
                    self._freeze(trainer, watch, optimizer)
        self._restored = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Watches the new optimizers where the program has set them up anew."""
        if set_up_anew(trainer, self._watched):
            self.on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops watching."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stops watching."""
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stops watching and forgets the optimizers: another fit() brings its own."""
        self._release()
        self._watches, self._watched = [], []

    def state_dict(self) -> dict[str, Any]:
        """The history that the automatic rule decides from, per optimizer: plain numbers."""
        return {"optimizers": [watch.state() for watch in self._watches]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self._restored = list(state_dict["optimizers"])

    # --------------------------------------------------------------------------------------------------------- each
    # step

    def _after_step(self, trainer: Any, watch: _Watch, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = optimizer.steps
        if watch.done or step == watch.seen or not _in_warmup(optimizer):
            # A skipped step is no step; and an optimizer frozen by hand needs nothing from here.
            return
        watch.seen = step
        watch.learning_rate.observe(step, [float(group["lr"]) for group in optimizer.param_groups])
        bounds = self._bounds_by_now(trainer, watch, optimizer)
        if step >= bounds.latest or (step >= bounds.earliest and self._rank_0_says(trainer, watch, step)):
            self._freeze(trainer, watch, optimizer)

    def _after_load(self, trainer: Any, watch: _Watch, optimizer: Any) -> None:
        """The program has given the optimizer another state, or none: what comes next follows from its phase."""
        # what was seen last is the step after which it froze
        in_fallback = watch.done and optimizer.steps >= watch.seen and self._guarded(trainer)
        watch.start_over(optimizer)
        watch.done = watch.done or in_fallback

    def _bounds_by_now(self, trainer: Any, watch: _Watch, optimizer: Any) -> _Bounds:
        """The bounds, of which shares of the run are shares of the steps that the optimizer makes in it.

        Planned are batches. How many steps an optimizer makes in them under manual optimization (a GAN's generator in every fifth
        batch, or from some epoch on) is known by watching only.
        """
        if self.step is not None or watch.planned is None or trainer.lightning_module.automatic_optimization:
            return watch.bounds
        batches = stepped_batches(trainer) + 1 - watch.offset  # this one has not been counted
        tried = optimizer.steps + optimizer.skipped_steps
        watch.began = watch.began or (batches, tried)
        since, made = batches - watch.began[0], tried - watch.began[1]
        if tried >= batches or since <= 0:
            return watch.bounds
        watch.expected = optimizer.steps + round(max(0, watch.planned - batches) * made / since)
        now = self._in_run_of(trainer, watch.expected)
        earliest = min(watch.bounds.earliest, now.earliest)
        return _Bounds(earliest, max(earliest, min(watch.bounds.latest, now.latest)))

    @staticmethod
    def _rank_0_says(trainer: Any, watch: _Watch, step: int) -> bool:
        """Whether the learning rate's rise is over: one small broadcast.

        A rank that freezes alone joins another collective than the others, which ends in a timeout at best. Where learning rates
        differ, ranks that freeze together are told so by the next control round.
        """
        return bool(trainer.strategy.broadcast(watch.learning_rate.over(step)))

    def _freeze(self, trainer: Any, watch: _Watch, optimizer: Any) -> None:
        optimizer.freeze()
        # The hook stays registered: torch is iterating over its hooks when this runs from one of them.
        watch.done = True
        # In a single process there is nobody to exchange with, so steps stay dense after the freeze.
        then = "steps stay dense in a single process" if optimizer.next_step_is_dense else "the next step is compressed"
        text = (
            f"VarianceFreeze: {watch.name} made {optimizer.steps:,} {watch.steps} and freezes its variance; {then}. "
            f"Rule: {self._rule_text()}. Reason: {self._reason(watch, optimizer.steps)}."
        )
        rank_zero_info(below_bar(trainer, text))

    @staticmethod
    def _guarded(trainer: Any) -> bool:
        return any(isinstance(callback, DivergenceGuardMixin) for callback in trainer.callbacks)

    def _release(self) -> None:
        for watch in self._watches:
            for handle in watch.handles:
                handle.remove()
            watch.handles = []

    # -------------------------------------------------------------------------------------------------------------
    # words

    def _rule_text(self) -> str:
        if self.step is not None:
            return f"step={self.step}"
        if self.fraction is not None:
            return f"fraction={self.fraction:g}"
        return 'mode="auto"'

    def _reason(self, watch: _Watch, step: int) -> str:
        latest, lr = watch.bounds.latest, watch.learning_rate
        if self.mode == "auto" and lr.over(step):
            return "the learning rate no longer rises" if lr.last_rise else "the learning rate does not rise"
        note = ", though the learning rate still rises" if lr.rising(step) else ""
        if watch.expected is not None and step < latest:
            share = f"its share of about {watch.expected:,} steps, which it makes in {watch.planned:,} planned batches"
            return f"that is {share}{note}"
        if self.mode == "auto":
            return f"the maximum of {latest:,} {watch.steps} is reached{note}"
        of = f" of {watch.planned:,} planned" if watch.planned is not None else ""
        return f"{latest:,} {watch.steps}{of} were asked for{note}"

    def _forecast(self, trainer: Any, watch: _Watch, optimizer: Any) -> str:
        latest, planned = watch.bounds.latest, watch.planned
        at_most, at_least = ("at most ", "at least ") if self.mode == "auto" else ("", "")
        text = f"VarianceFreeze({self._rule_text()}): {watch.name} makes {at_most}{latest:,} {watch.steps}"
        if watch.steps == "steps":
            text, at_least = f"{text} with a learning variance", "at least "
        text += f" of {planned:,} planned" if planned is not None else ""
        if trainer.world_size == 1:
            return f"{text}. One process exchanges nothing."
        dense, compressed, ddp = bytes_of_steps(optimizer, trainer.world_size)
        if compressed >= LITTLE_GAIN * ddp:
            return (
                f"{text}. The model is too small to gain: a compressed step sends {compressed:,} bytes, a dense one {ddp:,}, because every "
                f'tensor fills whole blocks of {optimizer.exchange.block_size:,} elements. Use `strategy="ddp"`.'
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
        factor = ddp / (w * dense + (1 - w) * compressed)
        return f"{text} (w = {w:.1%}): {at_least}{factor:.1f}x less is sent{between} than by dense averaging."

    # -----------------------------------------------------------------------------------------------------------
    # options

    def _check_options(self) -> None:
        ways = {"step": self.step, "fraction": self.fraction, "mode": self.mode}
        chosen = [f"{name}={value!r}" for name, value in ways.items() if value is not None]
        if len(chosen) != 1:
            found = " and ".join(chosen) if chosen else "none"
            raise ValueError(
                'VarianceFreeze needs exactly one of `step=`, `fraction=` and `mode="auto"`, got '
                f"{found}: keep one, e.g. VarianceFreeze(fraction=0.2)."
            )
        if self.step is not None:
            check_count("step", self.step)
        if self.fraction is not None:
            check_number(
                "fraction", self.fraction, 0, 1, "give the share of the planned steps that stay dense, e.g. 0.2"
            )
        if self.mode is None:
            self._refuse_auto_options(chosen[0])
        elif self.mode != "auto":
            raise ValueError(
                f'`mode` must be "auto" or None, got {self.mode!r}: for a fixed step give `step=` or `fraction=`.'
            )
        else:
            self._check_auto_options()

    def _refuse_auto_options(self, chosen: str) -> None:
        # A configuration file passes every option, so a default value cannot be told from one that was not given.
        given: dict[str, tuple[Any, Any]] = {
            "min_step": (self.min_step, None),
            "min_fraction": (self.min_fraction, DEFAULT_MIN_FRACTION),
            "max_step": (self.max_step, None),
            "max_fraction": (self.max_fraction, DEFAULT_MAX_FRACTION),
        }
        for name, (value, default) in given.items():
            if value != default:
                raise ValueError(
                    f'`{name}={value!r}` belongs to mode="auto" and would be ignored with {chosen}: '
                    f'remove it, or give mode="auto" instead of {chosen}.'
                )

    def _check_auto_options(self) -> None:
        for name in ("min_step", "max_step"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("min_fraction", "max_fraction"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, 1, "give a share of the planned steps")
        if self.min_step is not None and self.min_fraction not in (None, DEFAULT_MIN_FRACTION):
            raise ValueError(
                f"`min_step={self.min_step}` and `min_fraction={self.min_fraction}` are two minima: keep one of them."
            )
        if self.max_step is not None and self.max_fraction not in (None, DEFAULT_MAX_FRACTION):
            raise ValueError(
                f"`max_step={self.max_step}` and `max_fraction={self.max_fraction}` are two maxima: keep one of them."
            )
        if self.max_step is None and self.max_fraction is None:
            raise ValueError(
                '`max_step=None` and `max_fraction=None`: mode="auto" needs a maximum, or a run whose learning rate '
                "never stops rising would never compress; give one of them."
            )
        if self.min_step is not None and self.max_step is not None and self.min_step > self.max_step:
            raise ValueError(f"`min_step={self.min_step}` exceeds `max_step={self.max_step}`: lower it.")
        shares = self.max_step is None and self.min_fraction is not None and self.max_fraction is not None
        if shares and not self._default_minimum and self.min_fraction > self.max_fraction:  # type: ignore[operator]
            raise ValueError(
                f"`min_fraction={self.min_fraction}` exceeds `max_fraction={self.max_fraction}`: lower it."
            )

    def _planned(self, trainer: Any, offset: int) -> int | None:
        """Steps that an optimizer will make in the whole run, None if that is unknown (or infinite)."""
        estimate = _stepping_batches(trainer)
        # Lightning answers inf for training without end and -1 for a loader without length and no `max_steps`.
        if not math.isfinite(estimate) or estimate < 0:
            return None
        return max(1, int(estimate) - offset)

    @property
    def _default_minimum(self) -> bool:
        """Whether the minimum is one that nobody has chosen, which gives way to a smaller maximum."""
        return self.min_step is None and self.min_fraction == DEFAULT_MIN_FRACTION

    def _bounds(self, trainer: Any, planned: int | None) -> _Bounds:
        """The bounds in a run of so many steps (None: unknown).

        Raises:
            MisconfigurationException: the minimum exceeds the maximum, or a share is asked for of an unknown number.
        """
        bounds = self._in_run_of(trainer, planned)
        if bounds.earliest > bounds.latest:
            raise misconfiguration(
                trainer,
                f"VarianceFreeze: the minimum of {bounds.earliest} dense steps (min_step={self.min_step}, min_fraction="
                f"{self.min_fraction}) exceeds the maximum of {bounds.latest} (max_step={self.max_step}, max_fraction="
                f"{self.max_fraction}): change one of them.",
            )
        return bounds

    def _in_run_of(self, trainer: Any, planned: int | None) -> _Bounds:
        if self.mode != "auto":
            at = self._in_steps(trainer, planned, self.step, self.fraction, "fraction", "step")
            return _Bounds(at, at)
        latest = self._in_steps(trainer, planned, self.max_step, self.max_fraction, "max_fraction", "max_step")
        if self._default_minimum:
            earliest = latest // 2 if planned is None else round(DEFAULT_MIN_FRACTION * planned)
            return _Bounds(min(max(1, earliest), latest), latest)
        if self.min_step is None and self.min_fraction is None:
            return _Bounds(1, latest)
        earliest = self._in_steps(trainer, planned, self.min_step, self.min_fraction, "min_fraction", "min_step")
        return _Bounds(earliest, latest)

    def _in_steps(
        self, trainer: Any, planned: int | None, step: int | None, share: float | None, share_name: str, step_name: str
    ) -> int:
        if step is not None:
            return step
        assert share is not None  # _check_options: one of the two is set
        if planned is None:
            unknown = f"their number is unknown (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps})"
            if self.added_by_strategy:
                raise misconfiguration(
                    trainer,
                    f"Nothing says when the dense warm-up ends, and the default ends it after {share:.0%} of the planned "
                    f"steps at the latest, but {unknown}: give `Trainer(max_steps=...)`, or `freeze_step=` to the strategy "
                    "(`var_freeze_step=` with 0/1 Adam), or add `VarianceFreeze(step=...)` to the Trainer's callbacks.",
                )
            raise misconfiguration(
                trainer,
                f"VarianceFreeze: `{share_name}={share:g}` is a share of the planned steps, and {unknown}: give "
                f"`{step_name}=` in steps instead, or set the Trainer's `max_steps`.",
            )
        return max(1, round(share * planned))


def _stepping_batches(trainer: Any) -> float:
    """``trainer.estimated_stepping_batches``, also where the optimizers share ``max_steps`` or the accumulation changes.

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
    return estimate


def _in_warmup(optimizer: Any) -> bool:
    return bool(optimizer.phase.name == "WARMUP")
