"""The optimizer that all algorithms share: it drives a rule through steps and phases. No algorithm lives here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import ByteLedger, Topology
from lightning_onebit.engine import state
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.engine import Engine
from lightning_onebit.engine.layout import check_parameters
from lightning_onebit.engine.options import (
    ExchangeOptions,
    Options,
    check_number,
    made_exchange,
    made_options,
    refuse_contradictions,
)
from lightning_onebit.engine.rule import Rounds, Rule
from lightning_onebit.engine.shown_state import ShownAttribute, ShownState
from lightning_onebit.engine.whole import signals_held
from lightning_onebit.engine.wrapped import forward_methods, missing


class OnebitOptimizer(torch.optim.Optimizer):
    """Base of the optimizers; see the subclasses for what they compute.

    ``.grad`` holds the local gradient and ``step()`` does all communication still pending, so the optimizer works in a
    plain ``torch.distributed`` program: do not wrap the module in DistributedDataParallel, or call
    ``lightning_onebit.ddp.onebit_ddp``. All ranks must call ``step()`` equally often.
    """

    algorithm: ClassVar[str]
    #: the update rule
    rule_class: ClassVar[type[Rule]]
    #: dataclass of the algorithm's options, which are keyword arguments of the constructor
    options_class: ClassVar[type[Options]] = Options
    #: whether ranks take steps of their own between synchronisations
    local_steps: ClassVar[bool] = False
    #: bytes per element that a compressed step moves through memory with the default ``state_dtype``, apart from packed bits: the worker
    #: reads g and e and writes e elsewhere, which a cache reads first; the server d (an n-th); applying reads and writes x and reads
    #: denominators
    STEP_BYTES: ClassVar[float] = 20.5
    #: the same of a step without an exchange
    SILENT_STEP_BYTES: ClassVar[float] = 0.0
    #: whether the exchange sends a scale with each block
    SENDS_SCALES: ClassVar[bool] = True
    #: options under which every step after the first is an exchange
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {"freeze_step": 1}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """See ``wrapped``."""
        super().__init_subclass__(**kwargs)
        forward_methods(cls, OnebitOptimizer)

    def __init__(
        self, params: Any, defaults: dict[str, Any], options: Mapping[str, Any], exchange: ExchangeOptions | None
    ) -> None:
        self.options: Any = made_options(self.options_class, type(self).__name__, options)
        exchange = made_exchange(exchange)
        refuse_contradictions(exchange, self.options, self.rule_class.fixed_exchange, type(self).__name__)
        rule = self.rule_class(self.options, exchange)
        self._engine = Engine(rule, exchange, self.algorithm, type(self).__name__, tuple(defaults))
        # given the hold on signals that a step begins (by a strategy, which ends it between two batches)
        self._later: Callable[[signals_held], None] | None = None
        super().__init__(params, {**defaults, "compress": True})
        self._shown_state = ShownState(self)

    @property
    def exchange(self) -> ExchangeOptions:
        """How ranks exchange."""
        return self._engine.exchange

    @property
    def ledger(self) -> ByteLedger:
        """Account of all bytes that have been sent."""
        return self._engine.link.ledger

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress for: more than one rank."""
        return self._engine.compresses

    @property
    def topology(self) -> Topology:
        """The ranks that exchange, and their nodes if the exchange is hierarchical."""
        return self._engine.link.ranks

    @property
    def bucket_mb(self) -> float:
        """MB (2**20 bytes) of fp32 gradients in a bucket of the exchange: the option, or its default for the parameters' device."""
        return self.exchange.bucket_size(self._engine.kept.device.type)

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self._engine.kept.device

    @property
    def phase(self) -> Phase:
        """Current phase."""
        return self._engine.kept.phase

    @property
    def steps(self) -> int:
        """Real steps taken (a skipped step does not count)."""
        return self._engine.kept.steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because some rank's gradient was not finite."""
        return self._engine.skipped

    @property
    def torn(self) -> bool:
        """Whether a step has begun that did not end, so that weights and state are not those of one step; see ``TornStep``."""
        return self._engine.torn

    @property
    def next_step_is_dense(self) -> bool:
        """Whether the next ``step()`` works on densely averaged gradients."""
        return self._engine.next_is_dense()

    @property
    def trains(self) -> bool:
        """Whether any of its parameters requires a gradient now; not those of an optimizer that is toggled off."""
        return any(p.requires_grad for group in self.param_groups for p in group["params"])

    @property
    def freeze_step(self) -> int | None:
        """Number of dense steps after which compression begins; None: by ``freeze()``."""
        return getattr(self.options, "freeze_step", None)

    @property
    def mid_local(self) -> bool:
        """Whether replicas differ now because ranks have taken steps of their own (0/1 Adam)."""
        return self._engine.rule.mid_local

    def dense_steps_after_freeze(self, freeze_step: int, steps: int) -> int:
        """How many steps of a run of ``steps`` that freezes after ``freeze_step`` average gradients densely all the same."""
        return self._engine.rule.dense_steps_after_freeze(freeze_step, steps)

    def name_of(self, index: int) -> str:
        """Name of a parameter for messages."""
        return self._engine.kept.name_of(index)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; ``compress=False`` in it keeps its parameters densely averaged for ever.

        Those of other groups that join after the freeze are averaged densely until their second moments have learned.

        Raises:
            TypeError: complex, sparse or non-floating parameters.
            ValueError: options out of range, parameters on several devices.
        """
        super().add_param_group(param_group)
        self._engine.kept.groups = self.param_groups
        try:
            group = self.param_groups[-1]
            self._engine.check_group(group)
            check_parameters(group["params"], self._engine.kept.device, type(self).__name__)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._engine.kept.laid_out:
            state.lay_out(self)

    # ----- phases -----------------------------------------------------------------------------------------------------

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

        In a world of one rank steps stay dense and exact, and only the phase changes.

        Raises:
            RuntimeError: already frozen, or no step has been taken yet (the second moments are still zero).
        """
        self._engine.freeze()
        self._shown_state.renew()

    @torch.inference_mode(False)  # as in freeze()
    @torch.no_grad()
    def thaw(self) -> None:
        """Goes back into the warm-up: dense steps, in which the second moments learn again, until the next freeze.

        Call it on all ranks, between ``step()`` and the next backward. Weights, step counts and the momentum (unpacked to fp32;
        0 for a tensor whose second moments are all 0, which holds compression noise alone) stay. The second moments go on from
        their frozen values, with the floor of the denominators in them, which coordinates that have hardly seen a gradient keep
        until they have learned better; their bias-corrected values do not jump. Residuals are dropped, for after a dense step nothing
        is held back, and start from zero at the next freeze.

        Raises:
            RuntimeError: not frozen, no dense warm-up to go back to (0/1 Adam, BinSGDM), a ``freeze_step`` was given (it would
                freeze again at once), or an exchange is under way (``overlap="backward"``, after a backward).
        """
        self._engine.thaw()
        self._shown_state.renew()

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
        """
        self._shown_state.forget()
        self.synchronise()
        if params is not None:
            self._engine.start_over(list(params))
            return
        state.start_over(self)

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
        self._engine.link.configure(group, ranks_per_node=ranks_per_node, timeout=timeout, overlap_dense=overlap_dense)
        self.name_parameters(parameter_names or {})

    def name_parameters(self, names: Mapping[Tensor, str]) -> None:
        """Gives parameters names for messages."""
        self._engine.kept.parameter_names = names

    @property
    def configured(self) -> bool:
        """Whether it is known who trains together."""
        return self._engine.link.topology is not None

    @property
    def exchanging(self) -> bool:
        """Whether an exchange waits for gradients, or is under way (``overlap="backward"``, until ``step()``)."""
        return self._engine.early.open

    @property
    def parameter_names(self) -> Mapping[Tensor, str]:
        """Names of parameters, as far as they are known."""
        return self._engine.kept.parameter_names

    @property
    def connected(self) -> bool:
        """Whether ranks have compared their plans, as they do before the first step."""
        return self._engine.link.transport is not None

    def release_communication(self) -> None:
        """Gives hooks, buffers and groups back (they are not destroyed). State stays; the next step connects anew."""
        self._engine.release()

    def on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Collective: one control round, which the ledger counts as such."""
        self.prepare()
        return self._engine.link.any_rank(flag, self._engine.kept.device)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Shows the model that all ranks share; between steps it is always shown, but by 0/1 Adam in local steps.

        It is the weights of the last synchronisation, decayed since. No communication. Training continues as if nobody had looked.
        What is written into a weight inside the context changes the shared model alone.
        """
        shown = self._engine.kept.showing is not None
        self.show_consensus()
        try:
            yield
        finally:
            if not shown:
                self.show_local()

    def show_consensus(self) -> None:
        """Points parameters at the model that all ranks share until ``show_local()`` or the next ``step()``; fp32 is not copied."""
        self._engine.rule.show_shared()

    def show_local(self) -> None:
        """Points parameters back at this rank's own weights; see ``show_consensus()``."""
        self._engine.kept.show_own()

    @torch.no_grad()
    def synchronise(self) -> None:
        """Brings replicas together that differ after steps of their own (0/1 Adam); does nothing at other times.

        It is the synchronisation that the schedule has for later, without a step. What ranks have done alone since the last one enters
        the model that all share, as at any synchronisation. A collective there: call it on all ranks, for instance when training
        ends (the strategy does so before ``on_train_end``). Residuals carry over; the ledger counts its bytes in the totals, and no step.

        Raises:
            FloatingPointError: the last step's exchange was not finite (said here on CUDA, where a step does not wait to know).
        """
        self.check_whole()
        self._shown_state.renew()
        if self.local_steps:
            self.prepare()
            self.show_local()
            self._engine.synchronise()

    # ----- gradients --------------------------------------------------------------------------------------------------

    def begin_backward(self, sync: bool = True) -> None:
        """Announces a backward pass, so that dense averaging can overlap with it.

        Gradients that are on their way have ``.grad`` None until ``sync_gradients()`` or ``step()``, which bring the averages.

        Args:
            sync: False for a micro-batch whose gradients are only accumulated.
        """
        self.prepare()
        self._engine.begin_backward(sync)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Makes ``.grad`` the average over ranks wherever this step needs it so; all of it if the next step is dense.

        Idempotent until the next backward, ``zero_grad()`` or ``step()``. ``step()`` calls it; call it yourself to look
        at averaged gradients before the step.
        """
        self.prepare()
        self._engine.average()

    def gradients_are_averaged(self) -> None:
        """Says that every ``.grad`` is the average over ranks already, or will be when backward ends.

        For what averages in a dense step instead of the optimizer, as a communication hook of DistributedDataParallel
        does (``lightning_onebit.ddp``). Holds until ``step()``, ``zero_grad()`` or the next ``begin_backward()``. A gradient that
        arrives later makes the optimizer average all of them, and a compressed step takes no notice. Call it on all ranks.
        """
        self._engine.running = self._engine.running or self._engine.new_step()
        self._engine.running.averaged_elsewhere = True
        if self._engine.link.reducer is not None:
            self._engine.link.reducer.stale = False

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Sends what is pending of the exchange that backward has begun (``overlap="backward"``); ``step()`` does it otherwise.

        Call it on all ranks, after the last backward of a step. What never landed counts as zero.
        """
        self._engine.early.launch_rest()

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
        self._engine.refuse_norm("clip_grad_norm_()")
        self.prepare()
        return torch.tensor(self._engine.clip(max_norm), dtype=torch.float32)

    def grad_norm(self) -> Tensor:
        """The norm by which ``clip_grad_norm_()`` clips, alike on all ranks; nothing is clipped. A collective in a compressed step.

        Returns:
            The norm, fp32, 0-d.

        Raises:
            ValueError: gradients have been sent by then (``overlap="backward"``).
        """
        return torch.tensor(self.global_norm(), dtype=torch.float32)

    @torch.no_grad()
    def global_norm(self, *, clips: bool = False) -> float:
        """``grad_norm()`` in full precision; ``clips``: the caller clips gradients by it now, so the step does not do it again."""
        self._engine.refuse_norm("grad_norm()")
        self.prepare()
        return self._engine.global_norm(clips=clips)

    @property
    def gradients_clipped(self) -> bool:
        """Whether the gradients of the next step have been clipped by their global norm."""
        return self._engine.running is not None and self._engine.running.clipped

    def check_clipping_by_value(self, clip_value: float) -> None:
        """Raises ``ValueError`` where gradients would be clipped by value after they have been sent (``overlap="backward"``)."""
        if self.exchange.overlap == "backward":
            raise ValueError(
                f"clipping by value (to {clip_value}) has no effect with overlap='backward', which sends gradients as they come, before "
                "anything can clip them; use overlap='step'"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``torch.optim.Optimizer.zero_grad``."""
        if self._engine.running is not None:
            self._engine.running.forget_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def residual_ratio(self) -> float:
        """Norm of this rank's worker residual relative to the norm of the momentum; 0.0 before the first exchange (a pass over memory)."""
        return self._engine.kept.residual_ratio()

    @torch._disable_dynamo  # as torch.optim has it: torch.compiler.disable would import the compiler with this package
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step, with all communication that is pending.

        Args:
            closure: re-evaluates the model and returns the loss (forward and backward happen inside).

        Returns:
            What the closure returned.

        Raises:
            FloatingPointError: with this step 100 steps in a row had a non-finite gradient on some rank (``on_nonfinite="raise"``: this
                one had).
            PlanMismatch: the ranks do not run the same program (first step).
            CollectiveTimeout: a rank did not join in time.
            TornStep: the last step did not end.

        A step is made entirely or not at all: an error while anything is sent leaves weights and state as they were, and so does a
        gradient that is not finite, or whose square overflows fp32, on all ranks. What BinSGDM, 1-bit SGD and local steps of 0/1 Adam
        have learned when their exchange fails is not taken back; the optimizer is ``torn`` then. Signals that have handlers in Python
        wait for the end of the step; a second one of its kind does not.
        """
        self.show_local()
        loss = None
        self._shown_state.check()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with signals_held(self._later):
            self.prepare()
            self._engine.make_step()
        return loss

    def skip_step(self) -> None:
        """Counts a step that is not made, on all ranks alike, for a reason the caller knows (a loss scaler's overflow).

        Call it on all ranks in place of ``step()``. Parameters, state and residuals stay as they are. What dense averaging
        has begun in backward is brought to its end.

        Raises:
            FloatingPointError: with this one 100 steps in a row have been skipped.
        """
        self._engine.skip_step()

    def abandon_step(self) -> None:
        """Forgets the running step: what has been decided about it, and what backward has sent, on all ranks alike."""
        self._engine.abandon()

    def hand_over_signals(self, later: Callable[[signals_held], None] | None) -> None:
        """Has signals that come within a step wait for its caller: ``later`` gets the hold on them, to be released between two steps."""
        self._later = later

    def prepare(self) -> None:
        """Lays parameters out and connects on first use, and again when a parameter becomes trainable. The first step does it.

        Raises:
            RuntimeError: parameter groups have been edited by hand since the last step.
            TornStep: the last step did not end.
        """
        engine = self._engine
        engine.refuse_torn()
        engine.kept.groups = self.param_groups
        if not engine.kept.laid_out:
            state.lay_out(self)
            return
        engine.refuse_changes()
        known = set(engine.kept.layout.known)
        joins = any([p.requires_grad and i not in known for i, p in enumerate(engine.kept.layout.params)])
        if joins or (not self.connected and not engine.reconnect()):
            state.lay_out(self)

    def plan_description(self) -> list[str]:
        """The plan in words, one fact per line: what all ranks must agree on (options, phase, groups, layout of the parameters)."""
        return self._engine.plan_description()

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    state: Any = ShownAttribute()
    """Per parameter ``step``, ``exp_avg`` and ``exp_avg_sq``, as ``torch.optim.AdamW`` has them, to be read; see ``shown_state``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says what a copy is."""
            raise AttributeError(missing(self, name))

    def check_whole(self) -> None:
        """Raises where weights and state are not those of one step, so that they must not be saved.

        Raises:
            TornStep: the last step did not end.
        """
        self._engine.refuse_torn()

    def note_checkpoint(self, path: str | None) -> None:
        """Says which checkpoint of this run to go on from where a step does not end; None: there is none."""
        self._engine.whole.checkpoint = path

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Replicated state in the layout of ``torch.optim.AdamW`` (which can load it), plus one key ``"onebit"``.

        Per parameter: ``step`` (fp32, 0-d), ``exp_avg``, ``exp_avg_sq`` (fp32, shape of the parameter), and where they
        exist ``master`` (fp32 weights of a 16-bit parameter) and arenas of the algorithm. Residuals differ by rank and
        are not in it (see ``residual_state_dict``). Hooks of ``register_state_dict_post_hook`` get all of it.

        Raises:
            TornStep: the last step did not end.
        """
        self.check_whole()
        return state.save(self)

    @torch.inference_mode(False)  # what is laid out here is changed by steps to come
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads ``state_dict()``, or the state of a plain ``torch.optim.Adam`` / ``AdamW``.

        The latter continues in the warm-up. Residuals start from zero unless ``load_residual_state_dict`` follows. A step that
        has begun is forgotten: gradients that were loaded before count for nothing. No collective, unless ``begin_backward()``
        has begun to send gradients. What hooks of ``register_load_state_dict_pre_hook`` return is checked and loaded in its place.

        Raises:
            ValueError: groups or shapes do not match, an option of a group is out of range, another algorithm's state, or a newer
                version of the format; nothing has changed then.
        """
        state.load(self, state_dict)

    def residual_state_dict(self) -> dict[str, Any]:
        """What differs by rank, and its layout: residuals (fp32 flats over this rank's blocks) and other local state.

        The tensors are the optimizer's own, not copies, and hold residuals until the next step: what a step leaves in them may still
        have to be taken off, which the next call does. Clone or write what is to outlive a step. Between synchronisations of 0/1 Adam
        they hold this rank's own weights: save the model within ``consensus()``.

        Raises:
            TornStep: as ``state_dict()``.
        """
        self.check_whole()
        return state.rank_state(self)

    @torch.inference_mode(False)  # as in load_state_dict()
    @torch.no_grad()
    def load_residual_state_dict(self, state_of_rank: dict[str, Any]) -> None:
        """Continues from this rank's ``residual_state_dict()``; call it after ``load_state_dict``.

        Raises:
            ValueError: the state was written for another layout (world, node size, blocks or parameters), or beside other weights;
                the message names what differs.
        """
        state.load_rank_state(self, state_of_rank)
