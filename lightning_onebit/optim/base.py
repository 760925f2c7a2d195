"""The step that all optimizers share. No algorithm lives here, and of the state only what a running step needs.

``OnebitOptimizer.step`` is the one template. What differs is in four methods that a subclass fills in: ``_dense_update`` (a step on
averaged gradients), ``_enter_compressed`` (the freeze), ``_coefficients`` (what a worker puts into the exchange) and ``_apply`` (what
is done with the result). Parameters, arenas and the connection are in ``arena``, checkpoints in ``state``.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import (
    Bucket,
    Control,
    ExchangeSession,
    PlanMismatch,
    Topology,
    control_round,
    handshake,
    ring_bytes,
    torn_down_last,
)
from lightning_onebit.comm.ranges import ranged
from lightning_onebit.comm.reducer import remove_with
from lightning_onebit.kernels import BoundSpans, Packed, Residual
from lightning_onebit.kernels.transfer import Download
from lightning_onebit.optim.agreement import AGREE_EVERY
from lightning_onebit.optim.arena import DENSE_LANE, PLAN_LANE, Coefficients, Lookups, Phase
from lightning_onebit.optim.options import CommonOptions, check_number
from lightning_onebit.optim.policies import Rounds
from lightning_onebit.optim.state import StatefulOptimizer
from lightning_onebit.optim.torn import signals_held

log = logging.getLogger("lightning_onebit")

#: compressed steps in a row with the same gradients on all ranks after which that is no accident
ALIKE_STEPS = 3

_alive: weakref.WeakSet[OnebitOptimizer] = weakref.WeakSet()


@atexit.register
def _give_groups_back() -> None:
    """Lets go of what the program has destroyed.

    A program that destroys its process groups and ends may still have an optimizer, which keeps them and gloo's threads; one that
    gives a tensor back after Python has ended aborts the process.
    """
    optimizers = list(_alive)
    topologies = [optimizer._topology for optimizer in optimizers if optimizer._topology is not None]
    held = {group for t in topologies for group in (t.group, t.intra_group, t.inter_group)}
    held |= {optimizer.options.process_group for optimizer in optimizers}
    with torn_down_last([group for group in held if dist.is_available() and isinstance(group, dist.ProcessGroup)]):
        topologies.clear()
        held.clear()
        for optimizer in optimizers:
            optimizer.release_communication()
            optimizer.options = replace(optimizer.options, process_group=None)


class OnebitOptimizer(StatefulOptimizer):
    """Base of the optimizers; see the subclasses for what they compute.

    ``.grad`` holds the local gradient and ``step()`` does all communication still owed, so the optimizer works in a
    plain ``torch.distributed`` program: do not wrap the module in DistributedDataParallel, or call
    ``lightning_onebit.ddp.onebit_ddp``. All ranks must call ``step()`` equally often.
    """

    #: whether ranks take steps of their own between synchronisations
    local_steps: ClassVar[bool] = False
    #: bytes per element that a compressed step moves through memory, apart from packed bits: statistics read g; the worker reads g, reads
    #: and writes e; the server d (an n-th); applying reads and writes x, reads denominators
    STEP_BYTES: ClassVar[float] = 28.5
    #: the same of a step without an exchange
    SILENT_STEP_BYTES: ClassVar[float] = 0.0
    #: whether the exchange sends a scale with each block
    SENDS_SCALES: ClassVar[bool] = True
    #: options under which every step after the first is an exchange
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {"freeze_step": 1}
    # whether it begins with a stage in which all steps are dense, to which it can go back
    _has_dense_warm_up: ClassVar[bool] = False
    # whether a non-finite gradient of any rank shows in the scales that all ranks receive, in the same step
    _scales_tell: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes wrappers that imitate the class of the optimizer they hold forward its methods to it.

        Lightning's and Fabric's wrappers inherit from the optimizer's class at run time, so ``wrapper.freeze()`` would
        run on the wrapper and change the state of nothing.
        """
        super().__init_subclass__(**kwargs)
        wrapper = cls.__mro__[1]
        if issubclass(wrapper, OnebitOptimizer) or not isinstance(getattr(wrapper, "optimizer", None), property):
            return
        for name in dir(cls):
            if not name.startswith("_") and name not in vars(wrapper) and callable(getattr(cls, name)):
                setattr(cls, name, _forwarded(name))

    def __init__(
        self, params: Any, defaults: dict[str, Any], options: CommonOptions, settings: dict[str, Any] | None = None
    ) -> None:
        super().__init__(params, defaults, options, settings or {})
        # given the hold on signals that a step begins (by a strategy, which ends it between two batches)
        self._later: Callable[[signals_held], None] | None = None
        # facts of the running step
        self._present: list[bool] | None = None
        self._verdict: Control | None = None
        # whether what the verdict was asked for was clipping, and whether somebody else has averaged the gradients of a dense step
        self._clipped = False
        self._averaged_elsewhere = False
        self._grad_scale = 1.0
        # whether the running step is dense; decided once, since a schedule may change lr between backward and step
        self._decision: bool | None = None
        self._protected: dict[int, _Protected] = {}
        # overlap="backward": the exchange under way, what has come back, and what backward still owes to each bucket
        self._session: ExchangeSession | None = None
        self._arrived: list[tuple[Bucket, Tensor]] = []
        self._owed: list[int] = []
        # whether the buckets of the running step came back finite, where nobody looked at the gradients before
        self._trusted = False
        # on CUDA: the sum of the scales of the last step's exchange
        self._doubt: Download | None = None
        self._launched = 0
        self._landed: set[int] = set()
        # compressed steps in a row in which all ranks had the same gradients
        self._alike_steps = 0
        self._early_buckets: list[Bucket] = []
        self._remove_landing: Callable[[], object] | None = None
        self._hooked: set[int] = set()  # slots whose gradients are heard of
        _alive.add(self)

    # ----- what users see ---------------------------------------------------------------------------------------------

    @property
    def next_step_is_dense(self) -> bool:
        """Whether the next ``step()`` works on densely averaged gradients."""
        # looking must not decide: a rank that looks before a schedule changes lr would take another path than the
        # others
        return not self.compresses or self._wants_dense() if self._decision is None else self._decision

    @property
    def trains(self) -> bool:
        """Whether any of its parameters requires a gradient now; not those of an optimizer that is toggled off."""
        return any(p.requires_grad for group in self.param_groups for p in group["params"])

    @property
    def freeze_step(self) -> int | None:
        """Number of dense steps after which compression begins; None: by ``freeze()``."""
        return self.settings.get("freeze_step")

    def dense_steps_after_freeze(self, freeze_step: int, steps: int) -> int:
        """How many steps of a run of ``steps`` that freezes after ``freeze_step`` average gradients densely all the same."""
        return 0

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """What the steps of a run send, without running it (lr constant).

        Args:
            steps: of the run.
            freeze_step: last step of the warm-up, at most ``steps``; 0 for an algorithm without one.
            **schedule: those options of the algorithm that shape its schedule.
        """
        return Rounds(freeze_step, steps - freeze_step)

    @torch.inference_mode(False)  # what is laid out in a validation's hook is changed by steps to come
    @torch.no_grad()
    def freeze(self) -> None:
        """Ends the warm-up: the second moments freeze and every following step is compressed.

        In a world of one rank (without ``force_compression``) steps stay dense and exact, and only the phase changes.

        Raises:
            RuntimeError: already frozen, or no step has been taken yet (the second moments are still zero).
        """
        if self._phase is not Phase.WARMUP:
            raise RuntimeError(
                f"{type(self).__name__}.freeze(): already in phase {self._phase.value!r}; freeze only once"
            )
        if self._steps == 0:
            raise RuntimeError(
                f"{type(self).__name__}.freeze() before the first step: the second moments are still zero; take dense steps first"
            )
        if self.freeze_step is not None and self._steps < self.freeze_step:
            raise RuntimeError(
                f"{type(self).__name__}.freeze() at step {self._steps}, but freeze_step={self.freeze_step} was given; use one or the other"
            )
        with self._changing("freeze()"):
            self._freeze_now()

    @torch.inference_mode(False)  # as in freeze()
    @torch.no_grad()
    def thaw(self) -> None:
        """Goes back into the warm-up: dense steps, in which the second moments learn again, until the next freeze.

        Call it on all ranks, between ``step()`` and the next backward. Weights, step counts and the momentum (unpacked to fp32;
        0 for a tensor whose second moments are all 0, which holds compression noise alone) stay. The second moments go on from
        their frozen values, with the floor of the denominators in them, which coordinates that have hardly seen a gradient keep
        until they have learned better; their bias-corrected values do not jump. Residuals are dropped, for a dense step owes
        nothing, and start from zero at the next freeze.

        Raises:
            RuntimeError: not frozen, no dense warm-up to go back to (0/1 Adam, BinSGDM), a ``freeze_step`` was given (it would
                freeze again at once), or an exchange is under way (``overlap="backward"``, after a backward).
        """
        name = type(self).__name__
        if not self._has_dense_warm_up:
            raise RuntimeError(
                f"{name}.thaw(): {name} has no dense warm-up to go back to; use OnebitAdam or OnebitLamb where that is wanted"
            )
        if self.freeze_step is not None:
            raise RuntimeError(
                f"{name}.thaw(): freeze_step={self.freeze_step} would freeze it again at once; leave freeze_step out and call freeze()"
            )
        if self._phase is Phase.WARMUP:
            raise RuntimeError(
                f"{name}.thaw(): already in phase {self._phase.value!r}; only a frozen optimizer can be thawed"
            )
        if self._session is not None:
            raise RuntimeError(f"{name}.thaw(): an exchange is under way; call it between step() and the next backward")
        with self._changing("thaw()"):
            self._thaw_now()

    def _thaw_now(self) -> None:
        self._phase, self._decision = Phase.WARMUP, None
        self._state_shown.renew()
        if self._plan is None:
            return
        self._hold_momentum_flat()
        self._leave_compressed()
        self._worker_residual = self._server_residual = None
        self._remove_landing_hooks()
        self._renew_reducer()

    @torch.inference_mode(False)  # as in freeze()
    @torch.no_grad()
    def reset_state(self, params: Iterable[Tensor] | None = None) -> None:
        """Starts moments over, as they were before the first step; weights stay as they are.

        Call it on all ranks, between ``step()`` and the next backward. Without ``params`` all of the state starts over: moments, step
        counts, residuals, and the phase, so a dense warm-up follows if the algorithm has one (``VarianceFreeze`` ends it as it ended
        the first). 0/1 Adam synchronises first. The ledger and the count of skipped steps go on, and hooks of
        ``register_load_state_dict_post_hook`` are told.

        Args:
            params: parameters whose moments and step counts alone start over; everything else goes on. After the freeze they are averaged
                densely until their second moments have learned again, then compressed.

        Raises:
            ValueError: one of ``params`` is not a parameter of this optimizer.
            RuntimeError: the algorithm cannot start some of ``params`` over alone (BinSGDM with the hierarchical exchange).

        Example:
            >>> optimizer.reset_state()
        """
        self._state_shown.forget()
        self.synchronise()
        if params is not None:
            self._reset_some(list(params))
            return
        books = {"known": self._known(), "skipped": self._skipped, "ledger": self.ledger.as_dict()}
        masters = {i: {"step": torch.zeros(()), "master": self._shared_master(i)} for i in self._masters}
        first = copy.deepcopy(self._first_books or self._books())
        self.load_state_dict({"state": masters, "param_groups": self._packed_groups(), "onebit": {**first, **books}})

    def _reset_some(self, params: list[Tensor]) -> None:
        places = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        if any(id(p) not in places for p in params):
            raise ValueError("reset_state(): one of the tensors given is not a parameter of this optimizer")
        known = set(self._known())
        indices = [i for p in params if (i := places[id(p)]) in known]
        frozen = [i for i in indices if i not in self._dense_state and not self._learns_again]
        if frozen and not self._takes_late:
            raise RuntimeError(
                f"reset_state(): {self.name_of(frozen[0])} is exchanged in one bit, and what has been learned of it in phase "
                f"{self._phase.value!r} cannot be dropped alone; call reset_state() without parameters"
            )
        with self._changing("reset_state()"):
            if frozen:
                self._restart(frozen)
            for i in set(indices).difference(frozen):
                for name in self._arenas():
                    self._moment(name, i).zero_()
                self._t[i] = 0
            self._lookups = Lookups()

    @property
    def _learns_again(self) -> bool:
        """Whether all that is known of a parameter's gradients is in moments that go on learning."""
        return self._worker_residual is None and self._phase is Phase.WARMUP

    @property
    def _takes_late(self) -> bool:
        """Whether a parameter can learn by dense steps while the others are compressed."""
        return False

    def _restart(self, indices: list[int]) -> None:
        """Makes compressed parameters learn anew by dense steps."""
        raise AssertionError("abstract")

    @property
    def mid_local(self) -> bool:
        """Whether replicas differ now because ranks have taken steps of their own (0/1 Adam)."""
        return False

    def synchronise(self) -> None:
        """Brings replicas together that differ after steps of their own; see ``ZeroOneAdam.synchronise()``.

        Raises:
            FloatingPointError: the last step's exchange was not finite (said here on CUDA, where a step does not wait to know).
        """
        self.check_whole()
        self._state_shown.renew()

    def configure_communication(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int = 1,
        timeout: timedelta | None = None,
        parameter_names: Mapping[Tensor, str] | None = None,
        overlap_dense: bool = True,
    ) -> None:
        """Says who trains together, before the first step. A collective if ``ranks_per_node > 1``.

        Args:
            group: the ranks (None: the default group).
            ranks_per_node: more than 1 exchanges hierarchically.
            timeout: bound of every wait (None: the ``timeout`` option).
            parameter_names: names for messages.
            overlap_dense: overlap dense averaging with backward (False: at its end).

        Raises:
            RuntimeError: communication is already in use; call ``release_communication()`` first.
            ValueError: a ``process_group`` was given to the constructor too.
        """
        if self._transport is not None:
            raise RuntimeError("configure_communication(): already in use; call release_communication() first")
        if self.options.process_group is not None and group is not self.options.process_group:
            raise ValueError(
                "process_group was given to the optimizer, but the strategy owns the process groups; leave it out"
            )
        self._timeout = timeout or self._timeout
        self._topology = Topology.create(group, ranks_per_node=ranks_per_node, timeout=self._timeout)
        self._names = parameter_names or {}
        self._overlap_dense = overlap_dense

    def release_communication(self) -> None:
        """Gives hooks, buffers and groups back (they are not destroyed). State stays; the next step connects anew."""
        if self._reducer is not None:
            self._reducer.close()
        self._remove_landing_hooks()
        self._bound = {}
        self._session = None
        self._reducer = self._exchange = self._transport = self._topology = None
        self._present = self._verdict = None
        self._averaged_elsewhere = False

    def _remove_landing_hooks(self) -> None:
        if self._remove_landing is not None:
            self._remove_landing()
        self._remove_landing, self._hooked = None, set()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Shows the model that all ranks share, within the context; here it is always shown between steps."""
        yield

    def show_consensus(self) -> None:
        """Shows the model that all ranks share; replicas of this optimizer are always equal between steps."""

    def show_local(self) -> None:
        """Shows this rank's own weights again; see ``show_consensus()``."""

    def begin_backward(self, sync: bool = True) -> None:
        """Announces a backward pass, so that dense averaging can overlap with it.

        Gradients that are on their way have ``.grad`` None until ``sync_gradients()`` or ``step()``, which bring the averages.

        Args:
            sync: False for a micro-batch whose gradients are only accumulated.
        """
        self._prepare()
        self._present = self._verdict = None
        self._averaged_elsewhere = False
        self._note_hyperparameters()
        self._decision = self.next_step_is_dense
        if not self._launched:
            # armed for an earlier backward, of another model: gradients that only accumulate must not leave
            self._session = None
        if sync and self._early and not self._decision:
            # dense groups are averaged after it: two kinds of collectives that gradients set off would come in an order of each rank's own
            self._open_session()
        elif self._reducer is not None and sync and any(p.requires_grad for p in self._reducer.params):
            self._select_lanes()
            self._reducer.arm()

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Makes ``.grad`` the average over ranks wherever this step needs it so; all of it if the next step is dense.

        Idempotent until the next backward, ``zero_grad()`` or ``step()``. ``step()`` calls it; call it yourself to look
        at averaged gradients before the step.
        """
        self._prepare()
        self._average_gradients()

    def gradients_are_averaged(self) -> None:
        """Says that every ``.grad`` is the average over ranks already, or will be when backward ends.

        For whoever averages in a dense step instead of the optimizer, as a communication hook of DistributedDataParallel
        does (``lightning_onebit.ddp``). Holds until ``step()``, ``zero_grad()`` or the next ``begin_backward()``. A gradient that
        arrives later makes the optimizer average all of them, and a compressed step takes no notice. Call it on all ranks.
        """
        self._averaged_elsewhere = True
        if self._reducer is not None:
            self._reducer.stale = False

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Sends what backward still owes to the exchange that it has begun (``overlap="backward"``); ``step()`` does it otherwise.

        Call it on all ranks, after the last backward of a step. What never landed counts as zero.
        """
        if self._session is not None:
            self._launch_rest(self._session)

    def _prepare(self) -> None:
        self._refuse_torn()
        super()._prepare()

    def _average_gradients(self) -> None:
        """See ``sync_gradients``; after ``_prepare()``."""
        self._refuse_sparse_gradients()
        self._note_hyperparameters()
        self._decision = self.next_step_is_dense
        if self._reducer is None or (self._present is not None and not self._reducer.stale):
            return
        self._averaged_elsewhere &= self._decision and not self._reducer.stale
        if self._averaged_elsewhere:
            return
        if self._session is not None and self._dense:
            self._launch_rest(self._session)
        self._select_lanes()
        self._present = self._reducer.finish()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips gradients by their global norm, by the same factor on every rank.

        In a dense step the norm is that of the averaged gradient (as with DDP); in a compressed step it is
        ``G = sqrt((1/n) sum_i ||g_i||^2)``, which costs the control round that ``step()`` then need not repeat.

        Args:
            max_norm: upper bound of the norm.

        Returns:
            The norm before clipping, fp32, 0-d.
        """
        check_number("max_norm", max_norm, above=0)
        if self.options.overlap == "backward":
            raise ValueError(
                "clip_grad_norm_(): the norm needs all gradients, but overlap='backward' sends them as they come; use overlap='step'"
            )
        self.sync_gradients()
        if self.options.max_grad_norm is not None:
            raise ValueError(
                f"clip_grad_norm_(): the optimizer clips already (max_grad_norm={self.options.max_grad_norm}); give one of the two"
            )
        self.grad_norm()
        assert self._verdict is not None
        norm, self._clipped = self._verdict.norm, True
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            grads = [p.grad for p in self._params if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)
        return torch.tensor(norm, dtype=torch.float32)

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm by which ``clip_grad_norm_()`` clips, alike on all ranks; nothing is clipped. A collective in a compressed step.

        Returns:
            The norm, fp32, 0-d.

        Raises:
            ValueError: gradients have been sent by then (``overlap="backward"``).
        """
        if self.options.overlap == "backward":
            raise ValueError(
                "grad_norm(): the norm needs all gradients, but overlap='backward' sends them as they come; use overlap='step'"
            )
        self.sync_gradients()
        if self._verdict is None:
            self._verdict, self._clipped = self._judge(norm=True), False
        return torch.tensor(self._verdict.norm, dtype=torch.float32)

    def check_clipping_by_value(self, clip_value: float) -> None:
        """Raises where gradients are clipped by value after they have been sent.

        Raises:
            ValueError: ``overlap="backward"``.
        """
        if self.options.overlap == "backward":
            raise ValueError(
                f"clipping by value (to {clip_value}) has no effect with overlap='backward', which sends gradients as they come, before "
                "anything can clip them; use overlap='step'"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``torch.optim.Optimizer.zero_grad``."""
        self._present = self._verdict = None
        self._averaged_elsewhere = False
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def residual_ratio(self) -> float:
        """Norm of this rank's worker residual relative to the norm of the momentum; 0.0 before the first exchange (a pass over memory)."""
        if self._worker_residual is None or not self._worker_residual.values.numel():
            return 0.0
        values = self._worker_residual.settled()
        squares = sum(float(self._momentum_energy(bucket).sum()) for bucket in self._buckets())
        # hierarchical ranks hold 1/K of the residual
        share = values.numel() / max(1, self._known_plan().elements)
        residual = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / share**0.5
        return residual / squares**0.5 if squares > 0 else 0.0

    def _momentum_energy(self, bucket: Bucket) -> Tensor:
        """Sums of squares of the momentum's blocks in the units of the residuals, fp64 ``(blocks,)``."""
        held = self._held_momentum(bucket)
        if isinstance(held, Packed):
            return held.scales.flatten().double().square() * bucket.lengths
        blocks = held.view(-1, bucket.block_size)
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).square()

    # ----- the step template ------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # as torch.optim has it: torch.compiler.disable would import the compiler with this package
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step, with all communication it owes.

        Args:
            closure: re-evaluates the model and returns the loss (forward and backward happen inside).

        Returns:
            What the closure returned.

        Raises:
            FloatingPointError: with this step ``max_consecutive_skips`` steps in a row had a non-finite gradient on some
                rank (0: this one had); or squares of finite ones that are exchanged overflow fp32 (on CUDA it is said by the next
                step or by ``state_dict()``, whichever comes first; BinSGDM sends no scales, and trains on).
            PlanMismatch: the ranks do not run the same program (first step).
            CollectiveTimeout: a rank did not join in time.
            TornStep: the last step did not end.

        An error before the exchange (while gradients are averaged, in the control round) leaves weights and state as they were. A later
        one leaves the optimizer ``torn``. Signals that have handlers in Python wait for the end of the step; a second one of its kind
        does not.
        """
        loss = None
        self._state_shown.check()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with signals_held(self._later):
            self._step()
        return loss

    def _step(self) -> None:
        """``step()``, after the closure."""
        self._prepare()
        self._adopt()
        dense = self._decision = self.next_step_is_dense
        self._average_gradients()
        if self._early and not dense:
            with self._whole.change(self._naming_step()):
                self._step_early()
            return
        if dense and (self._steps + 1) % AGREE_EVERY == 0:
            self._agree()
        self._settle_doubt()
        self._trusted = self._scales_tell and not dense and self.options.max_consecutive_skips == 0
        already_clipped = self._verdict is not None and self._clipped
        verdict = self._verdict or self._judge(norm=self.options.max_grad_norm is not None)
        self._active = list(verdict.present[: len(self._params)])
        self._end_adopting()
        if not verdict.finite:
            self._close_step(dense, skipped=True)
            self._note_skip()
            return
        self._clip(verdict, already_clipped)
        with self._whole.change(self._naming_step()):
            self._hear(verdict)
            if dense:
                self._step_dense([i for i in self._known() if self._active[i]])
            else:
                self._note_alike(verdict.alike)
                late = self._average_late(verdict)
                dense = self._step_compressed()
                self._step_late(late)
            self._skips_in_a_row = 0
            self._steps += 1
            self._close_step(dense, skipped=False)
            self._advance()
            self._take_in_learned()

    def _naming_step(self) -> str:
        return f"step {self._steps + 1}"

    def on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Collective: one control round, which the ledger counts as such."""
        self._prepare()
        if self._ranks().size == 1:
            return flag
        assert self._transport is not None
        return not control_round(self._transport, 0.0, int(flag), [], self._device).finite

    def skip_step(self) -> None:
        """Counts a step that is not made, on all ranks alike, for a reason the caller knows (a loss scaler's overflow).

        Call it on all ranks in place of ``step()``. Parameters, state and residuals stay as they are. What dense averaging
        has begun in backward is brought to its end.

        Raises:
            FloatingPointError: with this one ``max_consecutive_skips`` steps in a row have been skipped.
            RuntimeError: gradients are under way compressed (``overlap="backward"``), and residuals have changed with them.
        """
        if self._session is not None:
            raise RuntimeError(
                f"skip_step() in place of step {self._steps + 1}: overlap='backward' sends gradients in backward, and what has been sent "
                "cannot be skipped; use overlap='step'"
            )
        self._finish_reduction()
        self._close_step(self.next_step_is_dense, skipped=True)
        self._note_skip()

    def _finish_reduction(self) -> None:
        """Ends a dense round that backward has begun: what one rank has sent, all must send."""
        if self._reducer is not None and self._reducer.armed:
            self._reducer.finish()

    def _abandon_step(self) -> None:
        if self._session is not None:
            self._launch_rest(self._session)
            self._session.finish()
            if not self._whole.within:
                self._whole.reset()  # what has arrived is not used, on any rank
        self._session, self._arrived, self._launched, self._landed = None, [], 0, set()
        self._remove_landing_hooks()  # they know parameters by their slots
        self._finish_reduction()
        self._present = self._verdict = self._decision = self._doubt = self._comparison = None
        self._averaged_elsewhere = False

    # ----- overlap="backward" -----------------------------------------------------------------------------------------

    @property
    def _early(self) -> bool:
        """Whether compressed buckets leave during backward."""
        return self.options.overlap == "backward" and self._ranks().size > 1

    @property
    def _sending(self) -> bool:
        return self._session is not None and self._launched > 0

    def _drop_exchange(self) -> None:
        self._session = None

    def _launch(self, session: ExchangeSession, bucket: Bucket) -> None:
        """Sends a bucket; from here on the step can only be ended."""
        step = self._naming_step()
        self._whole.under_way = self._whole.under_way or step
        try:
            session.launch(bucket)
        except BaseException as error:
            self._whole.tear(step, error)
            raise

    def _open_session(self) -> None:
        """Arms the exchange: a bucket leaves as soon as the last of its gradients has landed, in bucket order."""
        assert self._exchange is not None
        if self._session is not None and self._launched:
            raise RuntimeError(
                f"step {self._steps + 1}: overlap='backward' has sent the gradients of an earlier backward, and no step() came between. "
                "Of several models, say whose loss it is: toggle its optimizer under manual optimization, with Fabric call "
                "fabric.backward(loss, model=model). Add up the losses of one step, or let all backwards but the last only accumulate "
                "(toggle_model(sync_grad=False), fabric.no_backward_sync(model)); or use overlap='step'"
            )
        trains = [self._params[i].requires_grad and i not in self._late for i in self._slots]
        hooked = {slot for slot, trained in enumerate(trains) if trained}
        if not hooked <= self._hooked:  # some were frozen when the others were given theirs
            self._remove_landing_hooks()
            hooks = [
                self._params[self._slots[slot]].register_post_accumulate_grad_hook(self._landing_hook(slot))
                for slot in sorted(hooked)
            ]
            self._remove_landing, self._hooked = remove_with(self, hooks), hooked
        self._early_buckets = [b for b in self._buckets() if any(trains[slot] for slot in b.params)]
        self._owed = [sum(trains[slot] for slot in b.params) for b in self._early_buckets]
        self._active = [p.requires_grad and i not in self._late for i, p in enumerate(self._params)]
        self._grad_scale = 1.0
        # frozen for a while, beside others: they stay as they are; so do those that may turn out to be late
        known = [trained and i not in self._cold for i, trained in zip(self._slots, trains, strict=True)]
        self._protected = {
            b.index: _Protected(self, b, known)
            for b in self._early_buckets
            if not all(known[slot] for slot in b.params)
        }
        self._lookups = Lookups()
        self._arrived, self._launched, self._landed = [], 0, set()
        self._begin_exchange()
        # results are used after backward: waiting for them would hold it up
        self._session = self._exchange.begin(self, slack=len(self._early_buckets))

    def _landing_hook(self, slot: int) -> Callable[[Tensor], None]:
        optimizer = weakref.ref(self)  # as in the reducer's hooks

        def landed(_: Tensor) -> None:
            if (held := optimizer()) is not None:
                held._gradient_landed(slot)

        return landed

    @torch.no_grad()
    def _gradient_landed(self, slot: int) -> None:
        if self._session is None or self._slots[slot] in self._late:
            return
        if any(slot in bucket.params for bucket in self._early_buckets[: self._launched]):
            raise RuntimeError(
                f"{self.name_of(self._slots[slot])} received a gradient after its bucket was sent (re-entrant activation "
                "checkpointing does that, or a second backward); use use_reentrant=False, or overlap='step'"
            )
        if slot in self._landed:
            return
        self._landed.add(slot)
        for position, bucket in enumerate(self._early_buckets):
            if slot in bucket.params:
                self._owed[position] -= 1
        while self._launched < len(self._owed) and self._owed[self._launched] <= 0:
            position, self._launched = self._launched, self._launched + 1
            self._launch(self._session, self._early_buckets[position])

    def _launch_rest(self, session: ExchangeSession) -> None:
        """Sends the buckets that backward still owed gradients to; those count as zeros."""
        rest, self._launched = self._early_buckets[self._launched :], len(self._early_buckets)
        for bucket in rest:
            self._launch(session, bucket)

    def _step_early(self) -> None:
        """The rest of a step whose exchange began in backward: what never landed counts as zero, then apply."""
        if self._session is None:
            self._open_session()
        session = self._session
        assert session is not None
        self._launch_rest(session)
        session.finish()
        if (self._steps + 1) % AGREE_EVERY == 0:
            self._agree()
        arrived, self._arrived, self._session = self._arrived, [], None
        if (bad := self._non_finite(arrived)) is not None:
            raise FloatingPointError(
                f"step {self._steps + 1}: a gradient of some rank that is not finite, or whose square overflows fp32, has entered the "
                f"exchange (bucket {bad.index}). With overlap='backward' gradients leave before all of them can be checked, so the step "
                "cannot be skipped; resume from the last checkpoint with overlap='step'"
            )
        self._trusted = True  # the scales have told of what was compressed
        asks = (self._dense and self._reducer is not None) or self._late or self._unheard()
        dense = self._judge(norm=False) if asks else None
        self._trusted = False
        if dense is not None and not dense.finite:
            raise FloatingPointError(
                f"step {self._steps + 1}: a gradient that is averaged densely was not finite on at least one rank. With "
                "overlap='backward' the others have been sent, so the step cannot be skipped; resume from the last checkpoint "
                "with overlap='step'"
            )
        late: list[int] = []
        if dense is not None:
            self._hear(dense)
            late = self._average_late(dense)
        self._end_adopting()
        self._count(i for i in self._slots if self._active[i])
        with self.ledger.compressing("apply"):
            for bucket, gathered in arrived:
                self.finish(bucket, gathered)
            self._end_exchange()
        self._arrived, self._protected = [], {}
        self._publish([i for i in self._slots if self._active[i]])
        self._step_dense([i for i in self._dense if dense is None or dense.present[i]])
        self._step_late(late)
        self._skips_in_a_row = 0
        self._steps += 1
        self._close_step(False, skipped=False)
        self._advance()
        self._take_in_learned()

    def _non_finite(self, arrived: Sequence[tuple[Bucket, Tensor]]) -> Bucket | None:
        """The first bucket with a scale that is not finite: all ranks hold the same ones, so all see a bad gradient of any rank."""
        sums = self._scale_sums(arrived)
        if not arrived or bool(torch.isfinite(sums).all()):
            return None
        return next(
            bucket for (bucket, _), total in zip(arrived, sums.tolist(), strict=True) if not math.isfinite(total)
        )

    def _scale_sums(self, arrived: Sequence[tuple[Bucket, Tensor]]) -> Tensor:
        """Sum of each bucket's scales, fp64: finite if all of them are (fp32) numbers."""
        size = self._ranks().size
        sums = [Packed(raw, b.blocks // size, b.block_size).scales.sum(dtype=torch.float64) for b, raw in arrived]
        return torch.stack(sums) if sums else torch.zeros(0)

    def _check_arrived(self) -> None:
        """Raises where what has been exchanged is not finite although nobody saw a gradient that is not."""
        arrived, self._arrived = self._arrived, []
        if self._device.type == "cuda" and not self._trusted:
            # asked for in the next step: waiting for the device here would hold the program up
            self._doubt = Download(self._scale_sums(arrived).sum())
            return
        if self._non_finite(arrived) is not None:
            self._raise_overflow(self._steps + 1)

    def _settle_doubt(self) -> None:
        """Raises where the last step's exchange, whose scales a device was asked about, has turned out not to be finite."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None and not math.isfinite(doubt.read()):
            self._raise_overflow(self._steps)

    def check_whole(self, *, weights_only: bool = False) -> None:
        """See ``StatefulOptimizer``."""
        self._settle_doubt()
        super().check_whole(weights_only=weights_only)

    def _raise_overflow(self, step: int) -> None:
        reason = (
            "a non-finite gradient of some rank has entered the exchange: with max_consecutive_skips=0 nobody looks before. Resume from "
            "the last checkpoint, with max_consecutive_skips > 0 to skip such steps"
            if self._trusted
            else "gradients of some rank are finite, but so large that their squares are not (fp32). Resume from the last checkpoint, "
            "with a lower lr or with gradients clipped"
        )
        known = f" (the last good one is {self._whole.checkpoint})" if self._whole.checkpoint else ""
        error = FloatingPointError(f"step {step}: {reason}{known}")
        self._whole.tear(f"step {step}", error)
        raise error

    def _close_step(self, dense: bool, *, skipped: bool) -> None:
        self._present = self._verdict = self._decision = None
        self._averaged_elsewhere = False
        ranks = self._ranks().size
        wire = self._wire_bytes
        self.ledger.close_step(
            step=self._steps,
            phase=self._phase.value,
            dense=dense,
            skipped=skipped,
            dense_bytes=ring_bytes(ranks, wire),
        )
        if self._transport is not None:
            self._transport.step = self._steps + 1

    def _note_skip(self) -> None:
        self._skipped += 1
        self._skips_in_a_row += 1
        if self._skipped == 1:
            log.warning(
                "step %d skipped on all ranks: a gradient was not finite on at least one of them (further skips are only counted)",
                self._steps + 1,
            )
        if self.options.max_consecutive_skips == 0:
            raise FloatingPointError(
                f"step {self._steps + 1}: a gradient was not finite on at least one rank, and max_consecutive_skips=0 allows no skip"
            )
        if self._skips_in_a_row >= self.options.max_consecutive_skips:
            raise FloatingPointError(
                f"{self._skips_in_a_row} steps in a row were skipped because of non-finite gradients (max_consecutive_skips="
                f"{self.options.max_consecutive_skips}); the run has diverged: lower lr, clip gradients, or look at the data"
            )

    def _control_round(self, squares: float, non_finite: int, present: Sequence[bool]) -> Control:
        """A control round, in which ranks find out, too, whether they have the same hyperparameters.

        Raises:
            PlanMismatch: on all ranks where they have not.
        """
        assert self._transport is not None
        control = control_round(self._transport, squares, non_finite, present, self._device, self._agreement.digest)
        if control.agreed:
            self._agreement.reached()
            return control
        try:
            handshake(self._transport, self._agreement.facts(), self._device, "options of parameter groups")
        except PlanMismatch as difference:
            raise PlanMismatch(
                f"step {self._steps + 1}: {difference}. A scheduler that follows a metric (ReduceLROnPlateau) must see the same value on "
                "all ranks: self.log(..., sync_dist=True)"
            ) from None
        return control

    def _agree(self) -> None:
        """Compares hyperparameters where a step has no control round; see ``_control_round``."""
        if self._ranks().size > 1 and self.compresses:
            self._control_round(0.0, 0, [])

    def _note_hyperparameters(self) -> None:
        self._agreement.note(self._steps + 1, self.param_groups, self._hyperparameters)

    def _note_alike(self, alike: bool) -> None:
        """Warns, once, where the gradients of several compressed steps were the same on all ranks."""
        if self._alike_steps >= ALIKE_STEPS:
            return
        self._alike_steps = self._alike_steps + 1 if alike else 0
        if self._alike_steps == ALIKE_STEPS and self._ranks().rank == 0:
            log.warning(
                "step %d: all ranks had the same gradients in %d compressed steps in a row. Either something else has averaged them "
                "already (DistributedDataParallel, Horovod), which sends more than it saves: call "
                "lightning_onebit.ddp.onebit_ddp(ddp_model, optimizer), or do not wrap the model. Or all ranks train on the same "
                "data: give each its own share (DistributedSampler)",
                self._steps + 1,
                ALIKE_STEPS,
            )

    @ranged("control")
    def _judge(self, *, norm: bool) -> Control:
        """Finiteness and presence of this step's gradients, alike on all ranks, and their norm if asked for."""
        params, ranks = self._params, self._ranks()
        present = [p.grad is not None for p in params]
        averaged = torch.tensor(True)
        if self._reducer is not None and not self._averaged_elsewhere:
            averaged = self._reducer.finite()
        if self._present is not None:
            assert self._reducer is not None
            for i in self._averaged():
                present[i] = self._present[self._reduced_at[i]]
        local = [i for i in self._known() if params[i].grad is not None]
        shared = set(self._averaged()) if self._reducer is not None else set()
        self._trusted = self._trusted and not norm
        exchanged = self._slot_of.keys() - self._cold - self._late.keys() if self._trusted else ()
        own = [params[i].grad for i in local if i not in shared and i not in exchanged]
        common = [params[i].grad for i in local if i in shared]
        squares, bad = self._kernels.grad_stats([g for g in own if g is not None]).tolist() if own else (0.0, 0)
        bad += not bool(averaged)
        if self._averaged_elsewhere and common:
            bad += self._kernels.grad_stats([g for g in common if g is not None])[1].item()
        present += self._not_zero(self._unheard())
        if ranks.size > 1 and not self.next_step_is_dense:
            assert self._transport is not None
            control = self._control_round(squares, int(bad), present)
        else:
            control = Control(squares, bad == 0, tuple(present), 1)
        if common and norm:
            # averaged gradients are the same on every rank and count once
            square = self._kernels.grad_stats([g for g in common if g is not None])[0].item()
            control = replace(control, sum_squares=control.sum_squares + square * control.ranks)
        return control

    def _clip(self, verdict: Control, already_clipped: bool) -> None:
        self._grad_scale = 1.0
        limit = self.options.max_grad_norm
        if limit is None or already_clipped:
            return
        factor = min(1.0, limit / (verdict.norm + 1e-6))
        if factor == 1.0:
            return
        averaged = [g for i in self._averaged() if (g := self._params[i].grad) is not None]
        if averaged:
            torch._foreach_mul_(averaged, factor)
        # local gradients are not touched: the factor goes into the exchange's coefficients
        self._grad_scale = factor

    @ranged("apply")
    def _step_dense(self, active: list[int]) -> None:
        for group_index, members in self._by_group(active):
            self._dense_update(self.param_groups[group_index], members)
        self._publish(active)
        self._count(active)

    def _step_compressed(self) -> bool:
        """Exchange and apply for the plan's parameters, then a dense update for ``compress=False`` groups.

        Returns:
            Whether gradients have been averaged densely all the same.
        """
        stepped = [i for i in self._slots if self._active[i]]
        self._count(stepped)
        self._exchange_active()
        self._publish(stepped)
        self._step_dense([i for i in self._dense if self._active[i]])
        return False

    def _exchange_active(self) -> None:
        """Runs the exchange over all buckets that hold an active parameter; the others' parameters stay as they are."""
        assert self._exchange is not None
        active = [self._active[i] for i in self._slots]
        idle = {slot for slot, takes_part in enumerate(active) if not takes_part}
        buckets = [b for b in self._buckets() if not b.params <= idle]
        self._protected = {b.index: _Protected(self, b, active) for b in buckets if not b.params.isdisjoint(idle)}
        self._lookups, self._arrived = Lookups(), []
        for bucket in buckets:
            self._look_up(bucket)
        self._begin_exchange()
        self._exchange.run(buckets, self)
        self._end_exchange()
        self._protected = {}
        self._lookups = Lookups()
        self._check_arrived()

    # ----- codec: the exchange's view of an optimizer (see comm.exchange.Codec) -----------------------------------------

    def local(self, bucket: Bucket) -> Tensor | None:
        """fp32 flat of what ranks of a node average before they compress (hierarchical exchange; None: nothing)."""
        mine = self._contribution(bucket)
        if isinstance(mine, Tensor):
            return mine
        flat = torch.empty(bucket.elements, dtype=torch.float32, device=self._device)
        self._kernels.gather(bucket, mine, flat)
        return flat

    def encode(self, bucket: Bucket, shard: Tensor | None) -> Tensor:
        """Worker side: compresses ``a*m + (b*g)*r + e`` of this rank's shard."""
        lo, hi = self._shard_blocks(bucket)
        out = self._payload(bucket, self._ranks().nodes)
        if guard := self._protected.get(bucket.index):
            guard.save()
        (a, m, b, r), residual = self._lookups.worker.get(bucket.index) or self._worker_side(bucket)
        self._kernels.compress(
            bucket,
            lo,
            hi,
            a=a,
            m=m,
            b=b,
            g=shard if shard is not None else self._contribution(bucket),
            e=residual,
            out=out,
            r=r,
        )
        return out.raw

    def reduce(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Server side: reduces and compresses again this rank's chunk."""
        ranks = self._ranks()
        rows = Packed(received, bucket.blocks // ranks.size, bucket.block_size)
        out = self._payload(bucket, 1)
        lengths, residual = self._lookups.server.get(bucket.index) or self._server_side(bucket)
        self._kernels.reduce(rows, lengths, residual, out, 1.0 / ranks.nodes)
        return out.raw.view(-1)

    def reply_buffer(self, bucket: Bucket) -> Tensor:
        """Where round 2 writes: the packed momentum itself."""
        ranks = self._ranks()
        held = self._momentum[bucket.index] if self._momentum else None
        if isinstance(held, Packed) and bucket.index not in self._protected:
            return held.raw
        return self._payload(bucket, ranks.size).raw

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """Takes the averaged, compressed result and applies it."""
        if self._session is not None:
            self._arrived.append((bucket, gathered))  # weights must not change while backward may still read them
            return
        packed = Packed(gathered, bucket.blocks // self._ranks().size, bucket.block_size)
        self._arrived.append((bucket, gathered))
        self._apply(bucket, packed)
        guard = self._protected.get(bucket.index)
        if guard is not None:
            guard.restore()
        self._momentum[bucket.index] = packed if guard is None else guard.merged(packed)

    # ----- parameters whose first gradient comes late (see ``late``) ----------------------------------------------------

    def _unheard(self) -> list[int]:
        """Parameters of which all ranks want to know when one of them has a gradient that is not zero."""
        return []

    def _not_zero(self, indices: Sequence[int]) -> list[bool]:
        """Which of them have a gradient on this rank that is not zero everywhere."""
        grads = {i: grad for i in indices if (grad := self._params[i].grad) is not None}
        if not grads:
            return [False] * len(indices)
        seen = dict(zip(grads, torch.stack([grad.any() for grad in grads.values()]).tolist(), strict=True))
        return [seen.get(i, False) for i in indices]

    def _hear(self, verdict: Control) -> None:
        """Takes note, on all ranks alike, of the first gradients of parameters that had none so far."""
        heard = verdict.present[len(self._params) :]
        if any(heard):
            self._first_gradients([i for i, here in zip(self._unheard(), heard, strict=True) if here])

    def _first_gradients(self, indices: list[int]) -> None:
        """Called before the step in which parameters have their first gradient."""

    def _average_late(self, verdict: Control) -> list[int]:
        """Averages the gradients of late parameters, which take no part in the exchange of this step; returns those that have one."""
        return []

    def _step_late(self, members: list[int]) -> None:
        """Steps late parameters on averaged gradients."""

    def _take_in_learned(self) -> None:
        """Called after every real step: late parameters that have learned enough join the exchange."""

    # ----- what an algorithm fills in ---------------------------------------------------------------------------------

    def _dense_update(self, group: dict[str, Any], members: list[int]) -> None:
        """Steps parameters of one group on averaged gradients."""
        raise AssertionError("abstract")

    def _enter_compressed(self) -> None:
        """Freezes what the algorithm freezes; arenas change here."""
        raise AssertionError("abstract")

    def _leave_compressed(self) -> None:
        """Takes back what ``_enter_compressed`` froze; arenas change here."""
        raise AssertionError("abstract")

    def _contribution(self, bucket: Bucket) -> Tensor | list[Tensor | None]:
        """What differs between ranks and enters the exchange: gradient spans, or an fp32 flat."""
        return self._bind_grads(bucket)

    def _coefficients(self, bucket: Bucket, lo: int, hi: int) -> Coefficients:
        """What the worker compresses for blocks ``[lo, hi)``: factors of the momentum and of the contribution."""
        raise AssertionError("abstract")

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        """Uses the exchanged result of a bucket."""
        raise AssertionError("abstract")

    def _guarded(self, bucket: Bucket) -> list[tuple[Tensor | Residual, tuple[int, int]]]:
        """What an exchange overwrites of a bucket, and the blocks of the bucket whose it is: this rank's shard or chunk."""
        return [
            (self._residual_of(bucket), self._shard_blocks(bucket)),
            (self._server_residual_of(bucket), self._chunk_blocks(bucket)),
        ]

    def _begin_exchange(self) -> None:
        """Called before the exchange of a step."""

    def _end_exchange(self) -> None:
        """Called when all buckets are finished."""

    def _advance(self) -> None:
        """The one transition function: called after every real step."""
        if self._phase is Phase.WARMUP and self.freeze_step is not None and self._steps >= self.freeze_step:
            self._freeze_now()

    # ----- books ------------------------------------------------------------------------------------------------------

    def _wants_dense(self) -> bool:
        """Whether the algorithm's schedule makes the next step dense."""
        return self._phase is Phase.WARMUP

    def _freeze_now(self) -> None:
        self._phase = Phase.COMPRESSED
        self._decision = None
        self._state_shown.renew()
        if self.compresses and self._plan is not None:
            self._start_compression()

    def _start_compression(self) -> None:
        """Turns the warm-up's state into that of the compressed stage."""
        self._enter_compressed()
        self._hold_momentum_by_bucket()
        self._allocate_residuals()
        self._renew_reducer()

    def _averaged(self) -> list[int]:
        """Parameters whose gradients this step averages densely."""
        return self._known() if self.next_step_is_dense else list(self._dense)

    def _select_lanes(self) -> None:
        """Tells the reducer what to average in this step: everything, or ``compress=False`` groups only."""
        if self._reducer is not None:
            self._reducer.select({PLAN_LANE, DENSE_LANE} if self.next_step_is_dense else {DENSE_LANE})

    def _look_up(self, bucket: Bucket) -> None:
        """Looks up what an exchange of a bucket will need, while nothing streams through memory: after a kernel, caches are cold."""
        self._bind_weights(bucket)
        grads = self._contribution(bucket)
        if isinstance(grads, BoundSpans):
            self._kernels.prepare(bucket, grads, "g")
        self._lookups.worker[bucket.index] = self._worker_side(bucket)
        self._lookups.server[bucket.index] = self._server_side(bucket)

    def _worker_side(self, bucket: Bucket) -> tuple[Coefficients, Residual]:
        """What the worker side of a bucket needs: coefficients and residual."""
        return self._coefficients(bucket, *self._shard_blocks(bucket)), self._residual_of(bucket)

    def _server_side(self, bucket: Bucket) -> tuple[Tensor, Residual]:
        """What the server side of this rank's chunk of a bucket needs: lengths of the blocks and residual."""
        return bucket.lengths[slice(*self._chunk_blocks(bucket))], self._server_residual_of(bucket)

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        """Puts the optimizer into the phase of a checkpoint, after m and v are in their arenas."""
        self._phase = phase
        if phase is Phase.WARMUP:
            self._advance()
        elif self.compresses:
            self._start_compression()


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    return method


class _Protected:
    """Keeps a bucket's parameters that have no gradient on any rank exactly as they are through an exchange."""

    def __init__(self, optimizer: OnebitOptimizer, bucket: Bucket, active: Sequence[bool]) -> None:
        self._optimizer = optimizer
        self._bucket = bucket
        idle = torch.tensor([not a for a in active], device=bucket.device)
        self._idle = idle[bucket.block_param]
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []
        self._old: Tensor | Packed | None = None

    def save(self) -> None:
        """Remembers what an exchange overwrites."""
        optimizer, bucket = self._optimizer, self._bucket
        for flat, where in optimizer._guarded(bucket):
            mask = self._idle[slice(*where)]
            for part in (flat.values, flat.owed) if isinstance(flat, Residual) else (flat,):
                if part is not None:
                    blocks = part.view(len(mask), -1)
                    self._saved.append((blocks, mask, blocks[mask]))
        self._old = optimizer._momentum[bucket.index] if optimizer._momentum else None

    def restore(self) -> None:
        """Puts it back."""
        for blocks, mask, values in self._saved:
            blocks[mask] = values

    def merged(self, packed: Packed) -> Tensor | Packed:
        """The new momentum, with the old one in idle blocks."""
        bucket, size = self._bucket, self._bucket.block_size
        idle = self._idle.view(packed.rows, packed.blocks_per_row)
        if isinstance(self._old, Packed):
            packed.scales[idle] = self._old.scales[idle]
            packed.words[idle] = self._old.words[idle]
            return packed
        assert self._old is not None
        kept = self._old.view(-1, size)[self._idle]
        packed.scales[idle] = 0.0
        if not bool(kept.any()):
            return packed
        # an fp32 momentum has no packed form: this bucket stays unpacked until all its parameters get gradients
        flat = torch.empty(bucket.elements, dtype=torch.float32, device=bucket.device)
        self._optimizer._kernels.unpack(packed, bucket.lengths, flat)
        flat.view(-1, size)[self._idle] = kept
        return flat
