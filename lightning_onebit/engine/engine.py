"""The engine: it drives a rule through steps and phases. ``OnebitOptimizer`` is its public surface."""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_onebit.comm import ring_bytes, torn_down_last
from lightning_onebit.engine.agreement import AGREE_EVERY
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.early import Early
from lightning_onebit.engine.late import Late
from lightning_onebit.engine.layout import Layout, check_parameters, describe_groups
from lightning_onebit.engine.link import Link
from lightning_onebit.engine.options import ExchangeOptions, check_group, refuse_ignored
from lightning_onebit.engine.rule import Rule
from lightning_onebit.engine.step import Step
from lightning_onebit.engine.whole import NotFinite, Wholeness, signals_held

log = logging.getLogger("lightning_onebit")

#: steps skipped in a row after which a run has diverged: no loss scaler needs as many to find its scale
MOST_SKIPS = 100
#: compressed steps in a row with the same gradients on all ranks after which that is no accident
ALIKE_STEPS = 3


_alive: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _give_groups_back() -> None:
    """Lets go of what the program has destroyed.

    A program that destroys its process groups and ends may still have an optimizer, which keeps them and gloo's threads; one that
    gives a tensor back after Python has ended aborts the process.
    """
    engines = list(_alive)
    held = {group for engine in engines for group in engine.link.groups()}
    with torn_down_last(list(held)):
        held.clear()
        for engine in engines:
            engine.release()
            # (the program may hold the very object)
            object.__setattr__(engine.exchange, "process_group", None)


class Engine:
    """Drives a rule: layout and connection, the step that all rules share, and the phases.

    Args:
        rule: what trains.
        exchange: how ranks exchange.
        algorithm: its name, for the handshake and checkpoints.
        kind: name of the optimizer, for messages.
        hyperparameters: of groups, which ranks compare.

    Attributes:
        kept: the rule's tensors, and how far it has come.
        link: the connection to the other ranks.
        whole: whether all of it belongs to one step.
        early: the exchange that a backward has begun.
        late: what parameters go through whose first gradient comes late.
        running: the running step; None between steps.
        skipped, skips_in_a_row: steps that were not made, for gradients were not finite.
    """

    def __init__(
        self, rule: Rule, exchange: ExchangeOptions, algorithm: str, kind: str, hyperparameters: tuple[str, ...]
    ) -> None:
        self.rule, self.kept, self.exchange, self.algorithm, self.kind = rule, rule.kept, exchange, algorithm, kind
        self.whole = Wholeness()
        self.link = Link(algorithm, exchange)
        self.late, self.early = Late(rule), Early()
        self.running: Step | None = None
        self.skipped = self.skips_in_a_row = 0
        self._hyperparameters = hyperparameters
        # compressed steps in a row in which all ranks had the same gradients
        self._alike_steps = 0
        _alive.add(self)

    # ----- the step ---------------------------------------------------------------------------------------------------

    def next_is_dense(self) -> bool:
        """Whether the next step works on densely averaged gradients."""
        # looking must not decide: a rank that looks before a schedule changes lr would take another path than the others
        if self.running is not None and self.running.dense is not None:
            return self.running.dense
        return not self.compresses or self.rule.wants_dense()

    def new_step(self) -> Step:
        """A step of which nothing is known yet."""
        return Step(self.rule, self.link, self.late, self.whole)

    def begin(self) -> Step:
        """The running step, or a new one; from here on it is decided whether it is dense."""
        self.link.agreement.note(self.kept.steps + 1, self.kept.groups, self._hyperparameters)
        self.running = self.running or self.new_step()
        self.running.dense = self.next_is_dense()
        return self.running

    def average(self) -> Step:
        """Makes ``.grad`` the average over ranks wherever the running step needs it so."""
        self.kept.layout.refuse_sparse(self.kind, self.kept.name_of)
        step = self.begin()
        if step.needs_average():
            if self.kept.layout.dense:
                self.early.launch_rest()
            step.average()
        step.even_out()
        return step

    @property
    def sends_early(self) -> bool:
        """Whether compressed buckets leave during backward."""
        return self.exchange.overlap == "backward" and self.link.ranks.size > 1

    def make_step(self) -> None:
        """One step, with all communication that is pending; laid out and connected by then."""
        self.kept.adopt()
        step, limit = self.average(), self.rule.options.max_grad_norm
        if self.sends_early and not step.dense:
            self._make(step, self._end_early)
            return
        if step.dense:
            self._agree_now_and_then()
        kept = self.kept
        step.trusted = self.rule.scales_tell() and not (step.dense or kept.cold or kept.late)
        verdict = step.verdict
        if verdict is None and step.trusted and limit is None and step.may_send_at_once():
            self._make(step, Step.make_at_once)
            self._note_alike(step.alike, dense=False)
            return
        if verdict is None:
            answer = step.ask(norm=limit is not None)
            if step.trusted:
                step.look_at_gradients()
            verdict = answer()
        step.active = list(verdict.present[: len(kept.layout.params)])
        kept.end_adopting()
        if not verdict.finite:
            self.skip(bool(step.dense))
            return
        step.clip(verdict, limit)
        self._make(step, lambda step: step.make(verdict))
        self._note_alike(step.alike or verdict.alike, dense=bool(step.dense))

    def _make(self, step: Step, make: Callable[[Step], None]) -> None:
        """Makes a step, or skips it where what has come back is not finite."""
        try:
            with self.whole.change(f"step {self.kept.steps + 1}", written=False):
                make(step)
                self._end(step)
        except NotFinite:
            self.skip(dense=False)

    def _end_early(self, step: Step) -> None:
        """The rest of a step that backward has begun."""
        codec = self.early.complete(step)
        self._agree_now_and_then()
        step.make_early(codec)

    def _end(self, step: Step) -> None:
        """Ends a step that has been made."""
        self.skips_in_a_row = 0
        self.kept.steps += 1
        if self.rule.sends_at_once and not step.dense:
            self.kept.took_part = {i for i in self.kept.layout.slots if step.active[i]}
        self._close(bool(step.dense), skipped=False)
        self.advance()
        self.late.take_in_learned()

    def _close(self, dense: bool, *, skipped: bool) -> None:
        self.running = None
        wire = self.kept.layout.wire_bytes if self.kept.laid_out else 0
        self.link.ledger.close_step(
            step=self.kept.steps,
            phase=self.kept.phase.value,
            dense=dense,
            skipped=skipped,
            dense_bytes=ring_bytes(self.link.ranks.size, wire),
        )
        self.link.begin_step(self.kept.steps + 1)

    def skip(self, dense: bool) -> None:
        """Counts a step that is not made.

        Raises:
            FloatingPointError: it may not be skipped, or too many have been in a row.
        """
        self._close(dense, skipped=True)
        self.skipped += 1
        self.skips_in_a_row += 1
        if self.skipped == 1:
            log.warning(
                "step %d skipped on all ranks: a gradient was not finite on at least one of them (further skips are only counted)",
                self.kept.steps + 1,
            )
        if self.exchange.on_nonfinite == "raise":
            raise FloatingPointError(
                f"step {self.kept.steps + 1}: a gradient was not finite on at least one rank, and on_nonfinite='raise' allows no skip"
            )
        if self.skips_in_a_row >= MOST_SKIPS:
            raise FloatingPointError(
                f"{self.skips_in_a_row} steps in a row were skipped because of non-finite gradients; the run has diverged: lower lr, clip "
                "gradients, or look at the data"
            )

    def skip_step(self) -> None:
        """See ``OnebitOptimizer.skip_step()``."""
        if self.early.open:
            self.early.abandon()
        self.link.finish_reduction()
        self.skip(self.next_is_dense())

    def abandon(self) -> None:
        """Forgets the running step: what has been decided about it, and what backward has sent, on all ranks alike."""
        self.kept.hidden, self.kept.showing = {}, None  # weights that are shown are those of the state that is loaded
        self.early.abandon()
        self.link.finish_reduction()
        self.running = self.kept.comparison = None

    def _agree_now_and_then(self) -> None:
        """Compares hyperparameters where a step has no control round."""
        number = self.kept.steps + 1
        if number % AGREE_EVERY == 0 and self.link.ranks.size > 1:
            self.link.control_round(number, 0.0, 0, [], self.kept.device)

    def _note_alike(self, alike: bool, *, dense: bool) -> None:
        """Warns, once, where the gradients of several compressed steps were the same on all ranks."""
        if dense or self._alike_steps >= ALIKE_STEPS:
            return
        self._alike_steps = self._alike_steps + 1 if alike else 0
        if self._alike_steps == ALIKE_STEPS and self.link.ranks.rank == 0:
            log.warning(
                "step %d: all ranks had the same gradients in %d compressed steps in a row. Either something else has averaged them "
                "already (DistributedDataParallel, Horovod), which sends more than it saves: call "
                "lightning_onebit.ddp.onebit_ddp(ddp_model, optimizer), or do not wrap the model. Or all ranks train on the same "
                "data: give each its own share (DistributedSampler)",
                self.kept.steps + 1,
                ALIKE_STEPS,
            )

    # ----- gradients --------------------------------------------------------------------------------------------------

    def begin_backward(self, sync: bool) -> None:
        """See ``OnebitOptimizer.begin_backward()``."""
        step, reducer = self.begin(), self.link.reducer
        step.forget_gradients()
        self.early.disarm()  # gradients that only accumulate must not leave
        if sync and self.sends_early and not step.dense:
            # dense groups are averaged after it: two kinds of collectives that gradients set off would come in an order of each rank's own
            self.early.arm(step)
        elif reducer is not None and sync and any(p.requires_grad for p in reducer.params):
            step.select_lanes()
            reducer.arm()

    def refuse_norm(self, what: str) -> None:
        """Raises where gradients are sent before their norm is known."""
        if self.exchange.overlap == "backward":
            raise ValueError(
                f"{what}: the norm needs all gradients, but overlap='backward' sends them as they come; use overlap='step'"
            )

    def global_norm(self, *, clips: bool) -> float:
        """See ``OnebitOptimizer.global_norm()``."""
        step = self.average()
        if step.verdict is None:
            step.verdict, step.clipped = step.judge(norm=True), False
        step.clipped = step.clipped or clips
        return step.verdict.norm

    def clip(self, max_norm: float) -> float:
        """See ``OnebitOptimizer.clip_grad_norm_()``."""
        if (limit := self.rule.options.max_grad_norm) is not None:
            self.average()
            raise ValueError(
                f"clip_grad_norm_(): the optimizer clips already (max_grad_norm={limit}); give one of the two"
            )
        norm = self.global_norm(clips=True)
        factor = max_norm / (norm + 1e-6)
        grads = [p.grad for p in self.kept.layout.params if p.grad is not None]
        if factor < 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        return norm

    def synchronise(self) -> None:
        """See ``OnebitOptimizer.synchronise()``; own weights are shown by then."""
        if not self.rule.mid_local:
            return
        if self.running is not None:
            self.running.verdict = None
        with self.changing("synchronise()"):
            self.rule.synchronise(self.new_step())
            self.link.ledger.close_outside()

    # ----- phases -----------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """See ``OnebitOptimizer.freeze()``."""
        kind, kept, freeze_step = self.kind, self.kept, self.freeze_step
        if self.rule.first_phase is not Phase.WARMUP:
            raise RuntimeError(f"{kind}.freeze(): {kind} has no warm-up to end; it compresses from the first step")
        if kept.phase is not Phase.WARMUP:
            raise RuntimeError(f"{kind}.freeze(): already in phase {kept.phase.value!r}; freeze only once")
        if kept.steps == 0:
            raise RuntimeError(
                f"{kind}.freeze() before the first step: the second moments are still zero; take dense steps first"
            )
        if freeze_step is not None and kept.steps < freeze_step:
            raise RuntimeError(
                f"{kind}.freeze() at step {kept.steps}, but freeze_step={freeze_step} was given; use one or the other"
            )
        if kept.anything_sharded and self.link.transport is None:
            self.connect()  # denominators are those of whole tensors
        with self.changing("freeze()"):
            self._freeze_now()

    def thaw(self) -> None:
        """See ``OnebitOptimizer.thaw()``."""
        kind, phase = self.kind, self.kept.phase
        if not self.rule.has_dense_warm_up:
            raise RuntimeError(
                f"{kind}.thaw(): {kind} has no dense warm-up to go back to; use OnebitAdam or OnebitLamb where that is wanted"
            )
        if self.freeze_step is not None:
            raise RuntimeError(
                f"{kind}.thaw(): freeze_step={self.freeze_step} would freeze it again at once; leave freeze_step out and call freeze()"
            )
        if phase is Phase.WARMUP:
            raise RuntimeError(
                f"{kind}.thaw(): already in phase {phase.value!r}; only a frozen optimizer can be thawed"
            )
        if self.early.open:
            raise RuntimeError(f"{kind}.thaw(): an exchange is under way; call it between step() and the next backward")
        with self.changing("thaw()"):
            self.enter(Phase.WARMUP)

    @property
    def freeze_step(self) -> int | None:
        """Step after which the phase changes; None: ``freeze()`` does it."""
        return getattr(self.rule.options, "freeze_step", None)

    def _freeze_now(self) -> None:
        self.rule.freezes()
        self.enter(self.rule.frozen_phase)

    def enter(self, phase: Phase) -> None:
        """The one transition function: every phase but the first begins here."""
        kept = self.kept
        kept.phase = phase
        if self.running is not None:
            self.running.dense = None
        if not kept.laid_out:
            return
        if phase is Phase.WARMUP:
            kept.hold_flat()
            self.rule.leave_compressed()
            kept.drop_residuals()
            self.early.remove_hooks()
        elif self.compresses:
            self.rule.enter_compressed()
            if not self.rule.per_rank:
                kept.hold_by_bucket()
            kept.allocate_residuals()
        else:
            return
        self.renew_reducer()

    def advance(self) -> None:
        """Called after every real step: the freeze, if one is planned for it."""
        planned = self.freeze_step
        if self.kept.phase is Phase.WARMUP and planned is not None and self.kept.steps >= planned:
            self._freeze_now()
        self.rule.made()

    def enter_loaded(self, phase: Phase) -> None:
        """Goes on in the phase of a state whose arenas have been loaded."""
        self.kept.phase = phase
        if phase is Phase.WARMUP:
            self.advance()
        else:
            self.enter(phase)

    def start_over(self, params: Sequence[Tensor]) -> None:
        """Starts some parameters over; everything else goes on. See ``OnebitOptimizer.reset_state()``."""
        kept, rule = self.kept, self.rule
        places = {id(p): i for i, p in enumerate(p for group in kept.groups for p in group["params"])}
        if any(id(p) not in places for p in params):
            raise ValueError("reset_state(): one of the tensors given is not a parameter of this optimizer")
        known = set(kept.layout.known) if kept.laid_out else set()
        indices = [i for p in params if (i := places[id(p)]) in known]
        # what is known of the others is in moments that go on learning
        learns = kept.worker is None and kept.phase is Phase.WARMUP
        learns = learns or (kept.laid_out and rule.per_rank and not kept.sharded)
        frozen = [] if learns else [i for i in indices if i not in kept.own]
        if frozen and not rule.takes_late:
            raise RuntimeError(
                f"reset_state(): {kept.name_of(frozen[0])} is exchanged in one bit, and what has been learned of it in phase "
                f"{kept.phase.value!r} cannot be dropped alone; call reset_state() without parameters"
            )
        with self.changing("reset_state()"):
            if frozen:
                self.late.restart(frozen)
            for i in set(indices).difference(frozen):
                for name in kept.names:
                    kept.moment(name, i).zero_()
                kept.t[i] = 0
                if kept.worker is not None and i not in kept.own:
                    kept.clear_residuals(i)
            kept.reset_numbers()
            rule.restarted()
            self.late.start_over()

    # ----- all or nothing ---------------------------------------------------------------------------------------------

    @property
    def torn(self) -> bool:
        """Whether a step has begun that did not end."""
        whole = self.whole
        return bool(whole.cause) or (bool(whole.under_way) and not whole.within)

    def refuse_torn(self) -> None:
        """Raises where the last step did not end."""
        if self.torn:
            raise self.whole.error(self.kind)

    @contextlib.contextmanager
    def changing(self, what: str, *, anew: bool = False) -> Iterator[None]:
        """Within it state changes outside of a step, all or nothing; ``anew``: all of it is replaced."""
        if anew:
            self.whole.reset()
        self.refuse_torn()
        with signals_held(), self.whole.change(what):
            yield

    # ----- parameter groups -------------------------------------------------------------------------------------------

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Validates what a parameter group says."""
        check_group(group, self.kind, self._hyperparameters, self._for_all_groups())
        self.rule.check_group(group)

    def refuse_changes(self) -> None:
        """Raises where the program has edited groups by hand, so that what it put there would not be trained, or be ignored."""
        kept = self.kept
        kept.layout.refuse_changes(kept.groups, self.kind, kept.name_of)
        for group in kept.groups:
            refuse_ignored(group, self.kind, self._hyperparameters, self._for_all_groups())

    def _for_all_groups(self) -> dict[str, Any]:
        return {**vars(self.exchange), **vars(self.rule.options)}

    # ----- layout and connection --------------------------------------------------------------------------------------

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress for: more than one rank."""
        return self.link.ranks.size > 1 or self.exchange._alone

    def lay_out(
        self,
        groups: list[dict[str, Any]],
        *,
        connect: bool = True,
        newcomers: bool = True,
        known: Sequence[int] = (),
        segments: Sequence[int] = (),
    ) -> None:
        """Lays out parameters and arenas, keeping state there is, and agrees on the plan with the other ranks.

        Args:
            groups: parameter groups.
            connect: False leaves the handshake to the first step (loading a checkpoint is no collective).
            newcomers: False lays out what is known already; who else is trainable joins in the next step.
            known: parameters that a state knows, in the order of their blocks; where there is no layout yet.
            segments: see ``Layout``; of that state.
        """
        kept, rule, ranks = self.kept, self.rule, self.link.ranks
        kept.groups = groups
        before = kept.layout if kept.laid_out else None
        known = before.known if before is not None else known
        joining = [p for i, p in enumerate(p for group in groups for p in group["params"]) if i not in set(known)]
        check_parameters(joining, kept.device, self.kind)
        stays = before is not None and self._plan_stays(before, newcomers)
        if before is not None and not stays:
            kept.hold_flat()  # one-bit rounds of a warm-up hold momenta by bucket
        state = {
            i: {**kept.keeps_of(i, arenas=not stays), **({} if stays else rule.keeps_of(i))}
            for i in (known if before is not None else ())
        }
        layout = Layout.deal(
            groups,
            ranks,
            self.exchange,
            known=known,
            newcomers=newcomers,
            segments=segments,
            before=before if stays else None,
        )
        with self.changing("laying out state"):
            if stays and before is not None:
                kept.extend(layout, state)
                rule.joined(layout.slots[len(before.slots) :])
            else:
                in_use = kept.worker is not None
                kept.lay_out(layout, state)
                rule.laid_out(state, in_use=in_use, grew=before is not None and len(layout.slots) > len(before.slots))
        if connect:
            self.connect()
        if self.link.transport is not None:
            self.renew_reducer()

    def _plan_stays(self, before: Layout, newcomers: bool) -> bool:
        """Whether blocks, and all that lies in them, stay as they are: nobody (of ``newcomers``) joins who is to be among them."""
        if not self.rule.takes_new_parameters():
            return True
        known = {id(before.sources[i]) for i in before.slots}
        compressed = [p for group in self.kept.groups if group["compress"] for p in group["params"]]
        joins = newcomers and any(p.requires_grad and id(p) not in known for p in compressed)
        return not joins and before.fits(self.link.ranks) and before.device == self.kept.device

    def cut_for_another_world(self) -> bool:
        """Whether what is laid out cannot be dealt anew, and the ranks are not those it was dealt to."""
        if not self.kept.laid_out or self.rule.takes_new_parameters():
            return False
        return not self.kept.layout.fits(self.link.ranks)

    def reconnect(self) -> bool:
        """Connects; returns whether nothing but the connection is new, so that state that differs by rank stays exactly as it is."""
        layout, ranks = self.kept.layout, self.link.ranks
        if layout.device != self.kept.device or not layout.fits(ranks):
            return False
        self.kept.move_to(layout.at(ranks))
        self.connect()
        self.renew_reducer()
        return True

    def connect(self) -> None:
        """Connects, and compares plans."""
        layout, name_of = self.kept.layout, self.kept.name_of
        self.link.connect(
            self.kept.steps, layout.device, self.plan_description, lambda: layout.describe_weights(name_of)
        )
        if layout.sharded:
            self.kept.shards = self.link.connect_shards(
                layout.sources, layout.device, self.kept.steps + 1, self._description_for_shards
            )
            if self.link.shards is not None and self.exchange.overlap == "backward":
                self.link.shards.refuse_early(name_of)

    def _description_for_shards(self) -> list[str]:
        """The plan in words, one fact per line, as far as ranks with different shards agree on it."""
        kept = self.kept
        facts = [line for line in self._facts() if not line.startswith("world of")]
        return [*facts, *describe_groups(kept.groups), *kept.layout.describe_whole(kept.name_of)]

    def plan_description(self) -> list[str]:
        """The plan in words, one fact per line: what all ranks must agree on."""
        kept = self.kept
        laid_out = kept.layout.describe(kept.groups, kept.name_of) if kept.laid_out else describe_groups(kept.groups)
        return [*self._facts(), *laid_out]

    def _facts(self) -> list[str]:
        """That of it which does not depend on parameters."""
        kept, left_out = self.kept, ("process_group", "kernels", "timeout", "_alone")
        options = {k: v for k, v in vars(self.exchange).items() if k not in left_out}
        options["bucket_mb"] = self.exchange.bucket_size(kept.device.type)
        options["state_dtype"] = str(kept.state_dtype).removeprefix("torch.")
        ranks = self.link.ranks
        return [
            f"algorithm {self.algorithm}",
            f"world of {ranks.size} ranks, {ranks.ranks_per_node} per node",
            *[f"option {name}={value}" for name, value in {**options, **vars(self.rule.options)}.items()],
            f"phase {kept.phase.value} after {kept.steps} steps",
        ]

    def release(self) -> None:
        """Gives hooks, buffers and groups back; state stays."""
        self.kept.keep_shown()
        self.link.release()
        self.kept.shards = None
        self.early.remove_hooks()
        self.early.forget()
        self.kept.forget_bound()
        if self.running is not None:
            self.running.forget_gradients()

    def renew_reducer(self) -> None:
        """Averages densely what may be averaged from now on."""
        self.link.renew_reducer(self.kept.layout, self.rule.may_be_dense())
