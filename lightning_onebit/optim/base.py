"""The books around an update rule: parameters, phases, communication, state. No algorithm lives here.

``OnebitOptimizer.step`` is the one template that all algorithms share. What differs is in four methods that a subclass
fills in: ``_dense_update`` (a step on averaged gradients), ``_enter_compressed`` (the freeze), ``_coefficients`` (what
a worker puts into the exchange) and ``_apply`` (what is done with the result).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import (
    Bucket,
    ByteLedger,
    Control,
    Exchange,
    ExchangeSession,
    Plan,
    Reducer,
    Topology,
    Transport,
    control_round,
    handshake,
    is_dense,
    memory_order,
    plan_buckets,
    ring_bytes,
)
from lightning_onebit.kernels import BoundSpans, Packed, get_backend
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.options import CommonOptions, check_betas, check_flag, check_number

log = logging.getLogger("lightning_onebit")

STATE_VERSION = 1
# lanes of the dense reducer: parameters in the block plan, and those of compress=False groups
_PLAN_LANE, _DENSE_LANE = 0, 1
# options that torch.optim.Adam(W) keeps in its groups and that mean nothing here
_TORCH_ADAM_OPTIONS = {
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Phase(str, Enum):
    """Where an optimizer is in its schedule.

    WARMUP: the second moments learn, from densely averaged gradients (0/1 Adam: with one-bit rounds in between).
    COMPRESSED: one-bit exchanges.
    LOCAL: local steps with a one-bit synchronisation now and then (0/1 Adam after its variance freeze).
    """

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"


class Coefficients(NamedTuple):
    """What a worker puts into the exchange of a bucket: ``c = a*m + (b*g)*r``.

    a, b: fp32 factors per block; m may be missing, and so may r (fp32 flat), which then counts as 1.
    """

    a: Tensor | None
    m: Tensor | Packed | None
    b: Tensor
    r: Tensor | None = None


class OnebitOptimizer(torch.optim.Optimizer):
    """Base of the optimizers; see the subclasses for what they compute.

    ``.grad`` holds the local gradient and ``step()`` does all communication still owed, so the optimizer works in a
    plain ``torch.distributed`` program: do not wrap the module in DistributedDataParallel. All ranks must call
    ``step()`` equally often.

    State that torch would keep in ``optimizer.state`` lives in flat arenas outside it, because torch casts everything
    there to the parameter's dtype on load and Lightning moves its tensors one by one; ``state_dict()`` makes
    per-parameter copies.
    """

    algorithm: ClassVar[str]
    #: whether ranks take steps of their own between synchronisations
    local_steps: ClassVar[bool] = False
    # whether the state of torch.optim.Adam(W) is a valid start
    _reads_plain_adam: ClassVar[bool] = True
    # whether it begins with a stage in which all steps are dense, to which it can go back
    _has_dense_warm_up: ClassVar[bool] = False
    # whether a non-finite gradient of any rank shows in the scales that all ranks receive, in the same step
    _scales_tell: ClassVar[bool] = True
    # arenas that hold one replicated value per element, by the name that torch.optim.AdamW gives it in a checkpoint
    _replicated: ClassVar[dict[str, str]] = {"exp_avg": "m", "exp_avg_sq": "v"}

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
        self.options = options
        # options of the algorithm that hold for all groups
        self.settings = settings or {}
        self._plan: Plan | None = None
        self._phase = Phase.WARMUP
        self._steps = 0
        self._skipped = 0
        self._skips_in_a_row = 0
        super().__init__(params, {**defaults, "compress": True})
        self.ledger = ByteLedger()
        self._topology: Topology | None = None
        self._transport: Transport | None = None
        self._exchange: Exchange | None = None
        self._reducer: Reducer | None = None
        self._reduced_at: dict[int, int] = {}
        self._names: Mapping[Tensor, str] = {}
        self._timeout = timedelta(seconds=options.timeout)
        self._overlap_dense = True
        # by parameter index (order of param_groups)
        self._params: list[torch.nn.Parameter] = []
        self._group_of: list[int] = []
        self._t: list[int] = []
        self._masters: dict[int, Tensor] = {}
        self._dense_state: dict[int, dict[str, Tensor]] = {}
        # parameters in the block plan ("slots" are positions in this list) and those averaged densely for ever
        self._slots: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._dense: list[int] = []
        self._wire_bytes = 0
        self._laid_out_for = (0, 0)
        self._flat: dict[str, Tensor] = {}
        self._momentum: list[Tensor | Packed] = []
        self._worker_residual: Tensor | None = None
        self._server_residual: Tensor | None = None
        # facts of the running step
        self._present: list[bool] | None = None
        self._verdict: Control | None = None
        self._active: list[bool] = []
        self._grad_scale = 1.0
        # whether the running step is dense; decided once, since a schedule may change lr between backward and step
        self._decision: bool | None = None
        self._protected: dict[int, _Protected] = {}
        # by bucket: the addresses of its weights and the views that were made of them
        self._bound: dict[int, tuple[list[int], BoundSpans]] = {}
        self._lookups = _Lookups()
        # overlap="backward": the exchange under way, what has come back, and what backward still owes to each bucket
        self._session: ExchangeSession | None = None
        self._arrived: list[tuple[Bucket, Tensor]] = []
        self._owed: list[int] = []
        # whether the buckets of the running step came back finite, where nobody looked at the gradients before
        self._trusted = False
        self._launched = 0
        self._early_buckets: list[Bucket] = []
        self._landing_hooks: list[Any] = []

    # ----- what users see ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Current phase."""
        return self._phase

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress for: more than one rank, or ``force_compression=True``."""
        return self._ranks().size > 1 or self.options.force_compression

    @property
    def topology(self) -> Topology:
        """The ranks that exchange, and their nodes if the exchange is hierarchical."""
        return self._ranks()

    @property
    def next_step_is_dense(self) -> bool:
        """Whether the next ``step()`` works on densely averaged gradients."""
        # looking must not decide: a rank that looks before a schedule changes lr would take another path than the
        # others
        return not self.compresses or self._wants_dense() if self._decision is None else self._decision

    @property
    def steps(self) -> int:
        """Real steps taken (a skipped step does not count)."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because some rank's gradient was not finite."""
        return self._skipped

    @property
    def freeze_step(self) -> int | None:
        """Number of dense steps after which compression begins; None: by ``freeze()``."""
        return self.settings.get("freeze_step")

    @property
    def refreshed_share(self) -> float:
        """Share of the steps after the freeze that are dense all the same, to refresh the frozen second moments (1-bit Adam)."""
        return 0.0

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
        self._freeze_now()

    def thaw(self) -> None:
        """Goes back into the warm-up: dense steps, in which the second moments learn again, until the next freeze.

        Call it on all ranks, between ``step()`` and the next backward. Weights, step counts and the momentum (unpacked to fp32)
        stay. The second moments go on from their frozen values, with the floor of the denominators in them, which coordinates that
        have hardly seen a gradient keep until they have learned better; their bias-corrected values do not jump. Residuals are
        dropped, for a dense step owes nothing, and start from zero at the next freeze.

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
        self._phase, self._decision = Phase.WARMUP, None
        if self._plan is None:
            return
        self._hold_momentum_flat()
        self._leave_compressed()
        self._worker_residual = self._server_residual = None
        self._remove_landing_hooks()
        self._renew_reducer()

    @property
    def mid_local(self) -> bool:
        """Whether replicas differ now because ranks have taken steps of their own (0/1 Adam)."""
        return False

    def synchronise(self) -> None:
        """Brings replicas together that differ after steps of their own; see ``ZeroOneAdam.synchronise()``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; ``compress=False`` in it keeps its parameters densely averaged for ever.

        Raises:
            RuntimeError: a compressed group is added after the freeze (its second moments could no longer be learned).
            TypeError: complex, sparse or non-floating parameters.
            ValueError: options out of range, parameters on several devices.
        """
        if self._plan is not None and not self._takes_new_parameters() and param_group.get("compress", True):
            raise RuntimeError(
                f"add_param_group() in phase {self._phase.value!r}: second moments of new parameters can no longer be learned; add the "
                "group before the freeze, or with compress=False"
            )
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self._check_group(group)
            self._check_parameters(group["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._plan is not None:
            self._build()

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

    def _remove_landing_hooks(self) -> None:
        for handle in self._landing_hooks:
            handle.remove()
        self._landing_hooks = []

    def show_consensus(self) -> None:
        """Shows the model that all ranks share; replicas of this optimizer are always equal between steps."""

    def show_local(self) -> None:
        """Shows this rank's own weights again; see ``show_consensus()``."""

    def begin_backward(self, sync: bool = True) -> None:
        """Announces a backward pass, so that dense averaging can overlap with it.

        Args:
            sync: False for a micro-batch whose gradients are only accumulated.
        """
        self._prepare()
        self._present = self._verdict = None
        self._decision = self.next_step_is_dense
        if self._reducer is not None and sync and any(p.requires_grad for p in self._reducer.params):
            self._select_lanes()
            self._reducer.arm()
        if sync and self._early and not self._decision:
            self._open_session()

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Makes ``.grad`` the average over ranks wherever this step needs it so; all of it if the next step is dense.

        Idempotent until the next backward, ``zero_grad()`` or ``step()``. ``step()`` calls it; call it yourself to look
        at averaged gradients before the step.
        """
        self._prepare()
        self._refuse_sparse_gradients()
        self._decision = self.next_step_is_dense
        if self._reducer is None or (self._present is not None and not self._reducer.stale):
            return
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
        if self._verdict is None:
            self._verdict = self._judge(norm=True)
        norm = self._verdict.norm
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            grads = [p.grad for p in self._params if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)
        return torch.tensor(norm, dtype=torch.float32)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``torch.optim.Optimizer.zero_grad``."""
        self._present = self._verdict = None
        super().zero_grad(set_to_none)

    def variance_l1(self) -> float:
        """``||v||_1`` of the compressed groups (a full pass over memory), rounded to fp32 so that all ranks see the same number."""
        v = self._flat.get("v")
        if v is None:
            raise RuntimeError(
                f"variance_l1(): the second moments are frozen (phase {self._phase.value!r})"
                if self._steps
                else "variance_l1(): no step has been taken yet"
            )
        return float(v.sum(dtype=torch.float64).float())

    @torch.no_grad()
    def residual_ratio(self) -> float:
        """Norm of this rank's worker residual relative to the norm of the momentum; 0.0 before the first exchange (a pass over memory)."""
        if self._worker_residual is None or not self._worker_residual.numel():
            return 0.0
        squares = sum(float(self._momentum_energy(bucket).sum()) for bucket in self._buckets())
        # hierarchical ranks hold 1/K of the residual
        share = self._worker_residual.numel() / max(1, self._known_plan().elements)
        residual = float(torch.linalg.vector_norm(self._worker_residual, dtype=torch.float64)) / share**0.5
        return residual / squares**0.5 if squares > 0 else 0.0

    def _momentum_energy(self, bucket: Bucket) -> Tensor:
        """Sums of squares of the momentum's blocks in the units of the residuals, fp64 ``(blocks,)``."""
        held = self._held_momentum(bucket)
        if isinstance(held, Packed):
            return held.scales.flatten().double().square() * bucket.lengths
        blocks = held.view(-1, bucket.block_size)
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).square()

    def _held_momentum(self, bucket: Bucket) -> Tensor | Packed:
        """The momentum of a bucket as it travels."""
        return bucket.slice(self._flat["m"]) if "m" in self._flat else self._momentum[bucket.index]

    # ----- the step template ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step, with all communication it owes.

        Args:
            closure: re-evaluates the model and returns the loss (forward and backward happen inside).

        Returns:
            What the closure returned.

        Raises:
            FloatingPointError: more than ``max_consecutive_skips`` steps in a row had a non-finite gradient on some
                rank.
            PlanMismatch: the ranks do not run the same program (first step).
            CollectiveTimeout: a rank did not join in time.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        dense = self._decision = self.next_step_is_dense
        self.sync_gradients()
        if self._early and not dense:
            return self._step_early(loss)
        self._trusted = self._scales_tell and not dense and self.options.max_consecutive_skips == 0
        verdict = self._verdict or self._judge(norm=self.options.max_grad_norm is not None)
        already_clipped = self._verdict is not None
        self._active = list(verdict.present)
        if verdict.finite:
            self._clip(verdict, already_clipped)
            if dense:
                self._step_dense([i for i in self._known() if self._active[i]])
            else:
                self._step_compressed()
            self._skips_in_a_row = 0
            self._steps += 1
        self._close_step(dense, skipped=not verdict.finite)
        if verdict.finite:
            self._advance()
        else:
            self._note_skip()
        return loss

    def on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Collective: one control round, which the ledger counts as such."""
        self._prepare()
        if self._ranks().size == 1:
            return flag
        assert self._transport is not None
        return not control_round(self._transport, 0.0, int(flag), [], self._device).finite

    def skip_step(self) -> None:
        """Counts a step that is not made, on all ranks alike, for a reason the caller knows (a loss scaler's overflow).

        Call it on all ranks in place of ``step()``. Parameters, state and residuals stay as they are.

        Raises:
            FloatingPointError: more than ``max_consecutive_skips`` steps in a row have been skipped.
        """
        self._close_step(self.next_step_is_dense, skipped=True)
        self._note_skip()

    # ----- overlap="backward" -----------------------------------------------------------------------------------------

    @property
    def _early(self) -> bool:
        """Whether compressed buckets leave during backward."""
        return self.options.overlap == "backward" and self._ranks().size > 1

    def _open_session(self) -> None:
        """Arms the exchange: a bucket leaves as soon as the last of its gradients has landed, in bucket order."""
        assert self._exchange is not None
        if not self._landing_hooks:
            self._landing_hooks = [
                self._params[i].register_post_accumulate_grad_hook(self._landing_hook(slot))
                for slot, i in enumerate(self._slots)
                if self._params[i].requires_grad
            ]
        trains = [self._params[i].requires_grad for i in self._slots]
        self._early_buckets = [b for b in self._buckets() if any(trains[slot] for slot in b.params)]
        self._owed = [sum(trains[slot] for slot in b.params) for b in self._early_buckets]
        self._active = [p.requires_grad for p in self._params]
        self._grad_scale = 1.0
        self._protected = {}
        self._lookups = _Lookups()
        self._arrived, self._launched = [], 0
        self._begin_exchange()
        # results are used after backward: waiting for them would hold it up
        self._session = self._exchange.begin(self, slack=len(self._early_buckets))

    def _landing_hook(self, slot: int) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def landed(_: Tensor) -> None:
            if self._session is None:
                return
            for position, bucket in enumerate(self._early_buckets):
                if slot in bucket.params:
                    self._owed[position] -= 1
            while self._launched < len(self._owed) and self._owed[self._launched] <= 0:
                self._session.launch(self._early_buckets[self._launched])
                self._launched += 1

        return landed

    def _step_early(self, loss: Any) -> Any:
        """The rest of a step whose exchange began in backward: what never landed counts as zero, then apply."""
        if self._session is None:
            self._open_session()
        session = self._session
        assert session is not None
        for bucket in self._early_buckets[self._launched :]:
            session.launch(bucket)
        session.finish()
        self._count(i for i in self._slots if self._active[i])
        arrived, self._arrived, self._session = self._arrived, [], None
        if (bad := self._non_finite(arrived)) is not None:
            raise FloatingPointError(
                f"step {self._steps + 1}: a non-finite gradient of some rank has entered the exchange (bucket {bad.index}). With "
                "overlap='backward' gradients leave before all of them can be checked, so the step cannot be skipped; resume from "
                "the last checkpoint with overlap='step'"
            )
        with self.ledger.compressing():
            for bucket, gathered in arrived:
                self.finish(bucket, gathered)
            self._end_exchange()
        self._publish([i for i in self._slots if self._active[i]])
        dense = self._judge(norm=False) if self._dense and self._reducer is not None else None
        self._step_dense([i for i in self._dense if dense is None or dense.present[i]])
        self._steps += 1
        self._close_step(False, skipped=False)
        self._advance()
        return loss

    def _non_finite(self, arrived: Sequence[tuple[Bucket, Tensor]]) -> Bucket | None:
        """The first bucket with a scale that is not finite: all ranks hold the same ones, so all see a bad gradient of any rank."""
        size = self._ranks().size
        scales = [Packed(raw, bucket.blocks // size, bucket.block_size).scales for bucket, raw in arrived]
        if not scales or bool(torch.stack([torch.isfinite(s).all() for s in scales]).all()):
            return None
        return next(b for (b, _), s in zip(arrived, scales, strict=True) if not bool(torch.isfinite(s).all()))

    def _close_step(self, dense: bool, *, skipped: bool) -> None:
        self._present = self._verdict = self._decision = None
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

    def _judge(self, *, norm: bool) -> Control:
        """Finiteness and presence of this step's gradients, alike on all ranks, and their norm if asked for."""
        params, ranks = self._params, self._ranks()
        present = [p.grad is not None for p in params]
        averaged = self._reducer.finite() if self._reducer is not None else torch.tensor(True)
        if self._present is not None:
            assert self._reducer is not None
            for i in self._averaged():
                present[i] = self._present[self._reduced_at[i]]
        local = [i for i in self._known() if params[i].grad is not None]
        shared = set(self._averaged()) if self._reducer is not None else set()
        self._trusted = self._trusted and not norm
        own = [params[i].grad for i in local if i not in shared and not (self._trusted and i in self._slot_of)]
        common = [params[i].grad for i in local if i in shared]
        squares, bad = self._kernels.grad_stats([g for g in own if g is not None]).tolist() if own else (0.0, 0)
        bad += not bool(averaged)
        if ranks.size > 1 and not self.next_step_is_dense:
            assert self._transport is not None
            control = control_round(self._transport, squares, int(bad), present, self._device)
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

    def _step_dense(self, active: list[int]) -> None:
        for group_index, members in self._by_group(active):
            self._dense_update(self.param_groups[group_index], members)
        self._publish(active)
        self._count(active)

    def _count(self, indices: Iterable[int]) -> None:
        """Counts a step of some parameters; what has been looked up may depend on their number."""
        for i in indices:
            self._t[i] += 1
        self._lookups = _Lookups()

    def _step_compressed(self) -> None:
        """Exchange and apply for the plan's parameters, then a dense update for ``compress=False`` groups."""
        self._count(i for i in self._slots if self._active[i])
        self._exchange_active()
        self._publish([i for i in self._slots if self._active[i]])
        self._step_dense([i for i in self._dense if self._active[i]])

    def _exchange_active(self) -> None:
        """Runs the exchange over all buckets that hold an active parameter; the others' parameters stay as they are."""
        assert self._exchange is not None
        active = [self._active[i] for i in self._slots]
        buckets = [b for b in self._buckets() if any(active[slot] for slot in b.params)]
        self._protected = {
            b.index: _Protected(self, b, active) for b in buckets if not all(active[s] for s in b.params)
        }
        self._lookups, self._arrived = _Lookups(), []
        for bucket in buckets:
            self._look_up(bucket)
        self._begin_exchange()
        self._exchange.run(buckets, self)
        self._end_exchange()
        self._protected = {}
        self._lookups = _Lookups()
        arrived, self._arrived = self._arrived, []
        if (bad := self._non_finite(arrived)) is not None:
            raise FloatingPointError(
                f"step {self._steps + 1}: a non-finite gradient of some rank has entered the exchange (bucket {bad.index}); with "
                "max_consecutive_skips=0 nobody looks before. Resume from the last checkpoint, with max_consecutive_skips > 0 to skip "
                "such steps"
            )

    # ----- codec: the exchange's view of an optimizer (see comm.exchange.Codec)
    # -----------------------------------------

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
        if self._trusted:
            self._arrived.append((bucket, gathered))
        self._apply(bucket, packed)
        guard = self._protected.get(bucket.index)
        if guard is not None:
            guard.restore()
        self._momentum[bucket.index] = packed if guard is None else guard.merged(packed)

    # ----- what an algorithm fills in ---------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Validates the options of a parameter group."""
        check_number("lr", group["lr"], least=0)
        check_number("weight_decay", group["weight_decay"], least=0)
        check_flag("compress", group["compress"])
        if "betas" in group:
            check_betas(group["betas"])
        if "eps" in group:
            check_number("eps", group["eps"], least=0)

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

    def _guarded(self, bucket: Bucket) -> list[Tensor]:
        """Flats over this rank's shard or chunk of a bucket that an exchange overwrites."""
        return [self._residual_of(bucket), self._server_residual_of(bucket)]

    def _begin_exchange(self) -> None:
        """Called before the exchange of a step."""

    def _end_exchange(self) -> None:
        """Called when all buckets are finished."""

    def _advance(self) -> None:
        """The one transition function: called after every real step."""
        if self._phase is Phase.WARMUP and self.freeze_step is not None and self._steps >= self.freeze_step:
            self._freeze_now()

    def _arenas(self) -> tuple[str, ...]:
        """State per element that the algorithm needs from the start."""
        return ("m", "v")

    def _takes_new_parameters(self) -> bool:
        """Whether parameters may still join the block plan: their second moments must be learned before the freeze."""
        return self._phase is Phase.WARMUP

    # ----- books ------------------------------------------------------------------------------------------------------

    def _wants_dense(self) -> bool:
        """Whether the algorithm's schedule makes the next step dense."""
        return self._phase is Phase.WARMUP

    def _freeze_now(self) -> None:
        self._phase = Phase.COMPRESSED
        self._decision = None
        if self.compresses and self._plan is not None:
            self._start_compression()

    def _start_compression(self) -> None:
        """Turns the warm-up's state into that of the compressed stage."""
        self._enter_compressed()
        self._hold_momentum_by_bucket()
        self._allocate_residuals()
        self._renew_reducer()

    def _hold_momentum_by_bucket(self) -> None:
        """Hands the momentum arena over to the buckets, each of which replaces its part by bits after its exchange."""
        m = self._flat.pop("m", None)
        if m is not None:
            self._to_exchanged(m)
            self._momentum = [bucket.slice(m) for bucket in self._buckets()]

    def _hold_momentum_flat(self) -> None:
        """Takes the momentum back into an fp32 arena."""
        if "m" not in self._flat:
            self._flat["m"] = self._momentum_flat()
            self._momentum = []

    def _allocate_residuals(self) -> None:
        ranks, elements = self._ranks(), self._known_plan().elements
        if self._worker_residual is None:
            dtype = getattr(torch, self.options.residual_dtype)
            self._worker_residual = torch.zeros(elements // ranks.ranks_per_node, dtype=dtype, device=self._device)
            self._server_residual = torch.zeros(elements // ranks.size, dtype=dtype, device=self._device)

    def _ranks(self) -> Topology:
        if self._topology is None:
            self._topology = Topology.create(self.options.process_group)
        return self._topology

    @property
    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _known_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _buckets(self) -> tuple[Bucket, ...]:
        return self._known_plan().buckets

    def _known(self) -> list[int]:
        return sorted((*self._slots, *self._dense))

    def _averaged(self) -> list[int]:
        """Parameters whose gradients this step averages densely."""
        return self._known() if self.next_step_is_dense else list(self._dense)

    def _select_lanes(self) -> None:
        """Tells the reducer what to average in this step: everything, or ``compress=False`` groups only."""
        if self._reducer is not None:
            self._reducer.select({_PLAN_LANE, _DENSE_LANE} if self.next_step_is_dense else {_DENSE_LANE})

    def _by_group(self, indices: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        members: dict[int, list[int]] = {}
        for i in indices:
            members.setdefault(self._group_of[i], []).append(i)
        yield from members.items()

    def name_of(self, index: int) -> str:
        """Name of a parameter for messages."""
        param = self._params[index]
        return self._names.get(param) or f"parameter {index}"

    def _weight(self, index: int) -> Tensor:
        """fp32 weights of a parameter: itself, or its master copy when it is a 16-bit tensor."""
        return self._masters.get(index, self._params[index].data)

    def _moment(self, name: str, index: int) -> Tensor:
        """State of a parameter with its shape and strides; a view of an arena for compressed groups."""
        if index in self._dense_state:
            return self._dense_state[index][name]
        return self._known_plan().view(self._flat[name], self._slot_of[index], self._params[index])

    def _group(self, index: int) -> dict[str, Any]:
        """Parameter group of a parameter."""
        return self.param_groups[self._group_of[index]]

    def _grad(self, index: int) -> Tensor:
        """Gradient of a parameter that has one, or zeros where only other ranks have one."""
        p = self._params[index]
        return torch.zeros_like(p) if p.grad is None else p.grad

    def _part(self, flat: Tensor, slot: int) -> Tensor:
        """A parameter's 1-D part, in memory order, of a flat over all blocks."""
        start = self._known_plan().starts[slot]
        return flat[start : start + self._params[self._slots[slot]].numel()]

    def _momentum_of(self, bucket: Bucket, lo: int, hi: int) -> Tensor | Packed:
        """The held momentum of blocks ``[lo, hi)``."""
        held = self._momentum[bucket.index]
        if isinstance(held, Packed):
            return held.narrow(lo // held.blocks_per_row, (hi - lo) // held.blocks_per_row)
        return held[lo * bucket.block_size : hi * bucket.block_size]

    def _publish(self, indices: Sequence[int]) -> None:
        """Writes master weights back into 16-bit parameters."""
        pairs = [(self._params[i], self._masters[i]) for i in indices if i in self._masters]
        if pairs:
            torch._foreach_copy_([p.data for p, _ in pairs], [w for _, w in pairs])

    def _look_up(self, bucket: Bucket) -> None:
        """Looks up what an exchange of a bucket will need, while nothing streams through memory: after a kernel, caches are cold."""
        self._bind_weights(bucket)
        grads = self._contribution(bucket)
        if isinstance(grads, BoundSpans):
            self._kernels.prepare(bucket, grads, "g")
        self._lookups.worker[bucket.index] = self._worker_side(bucket)
        self._lookups.server[bucket.index] = self._server_side(bucket)

    def _worker_side(self, bucket: Bucket) -> tuple[Coefficients, Tensor]:
        """What the worker side of a bucket needs: coefficients and residual."""
        return self._coefficients(bucket, *self._shard_blocks(bucket)), self._residual_of(bucket)

    def _server_side(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """What the server side of this rank's chunk of a bucket needs: lengths of the blocks and residual."""
        ranks = self._ranks()
        count = bucket.blocks // ranks.size
        chunk = ranks.local_rank * ranks.nodes + ranks.node
        return bucket.lengths[chunk * count : (chunk + 1) * count], self._server_residual_of(bucket)

    def _bind_grads(self, bucket: Bucket) -> BoundSpans:
        """Gradients by span; looked up once in a step."""
        known = self._lookups.grads.get(bucket.index)
        if known is not None:
            return known

        def gradient(slot: int) -> Tensor | None:
            p = self._params[self._slots[slot]]
            grad = p.grad
            if grad is None:
                return None
            if grad.is_contiguous() and p.is_contiguous():
                return grad.view(-1)
            if grad.stride() != p.stride() and p.numel() > 1:
                grad = torch.empty_like(p).copy_(grad)  # autograd may hand over another memory order
            return memory_order(grad)

        spans = self._lookups.grads[bucket.index] = BoundSpans(bucket.bind(gradient))
        return spans

    def _bind_weights(self, bucket: Bucket) -> BoundSpans:
        """Weights by span; the very list of the step before where they lie as they lay, with what backends have made of it."""
        spans = self._lookups.weights.get(bucket.index)
        if spans is not None:
            return spans
        indices = [self._slots[slot] for slot in bucket.members]
        where = [self._weight(i).data_ptr() if self._active[i] else 0 for i in indices]
        known = self._bound.get(bucket.index)
        if known is None or known[0] != where:

            def weight(slot: int) -> Tensor | None:
                i = self._slots[slot]
                return memory_order(self._weight(i)) if self._active[i] else None

            known = self._bound[bucket.index] = (where, BoundSpans(bucket.bind(weight)))
        self._lookups.weights[bucket.index] = known[1]
        return known[1]

    def _by_block(self, name: str, bucket: Bucket, *values_of: Callable[[int], float], alike: bool = False) -> Tensor:
        """fp32 ``(blocks,)`` from one value per parameter (given its index), or ``(values, blocks)`` from several.

        Made for all buckets at the first call of a step (or of ``_count``) with this ``name``. ``alike`` promises that the values
        depend on a parameter's group and step count alone: they are asked for once for each.
        """
        tables = self._lookups.tables.get(name)
        if tables is None:
            tables = self._lookups.tables[name] = self._tables(values_of, alike)
        return tables[bucket.index]

    def _tables(self, values_of: Sequence[Callable[[int], float]], alike: bool) -> Sequence[Tensor]:
        plan = self._known_plan()
        kinds: Sequence[Any] = self._slots
        if alike:
            kinds = self._lookups.kinds = self._lookups.kinds or [(self._group_of[i], self._t[i]) for i in self._slots]
        examples = dict(zip(kinds, self._slots, strict=True))
        rows = []
        for value_of in values_of:
            values = {kind: value_of(i) for kind, i in examples.items()}
            distinct = set(values.values())
            if len(distinct) == 1:
                rows.append(torch.full((plan.blocks,), distinct.pop(), dtype=torch.float32, device=self._device))
            else:
                by_slot = upload([values[kind] for kind in kinds], self._device, torch.float32)
                rows.append(by_slot[plan.block_param])
        counts = [bucket.blocks for bucket in plan.buckets]
        if len(rows) == 1:
            return rows[0].split(counts)
        return [table.contiguous() for table in torch.stack(rows).split(counts, dim=1)]

    def _decay(self, index: int) -> float:
        """``1 - lr*wd`` of a parameter."""
        group = self._group(index)
        return float(1.0 - group["lr"] * group["weight_decay"])

    def _shard_blocks(self, bucket: Bucket) -> tuple[int, int]:
        ranks = self._ranks()
        count = bucket.blocks // ranks.ranks_per_node
        return ranks.local_rank * count, (ranks.local_rank + 1) * count

    def _residual_of(self, bucket: Bucket) -> Tensor:
        assert self._worker_residual is not None
        share = self._ranks().ranks_per_node
        start = bucket.first_block * bucket.block_size // share
        return self._worker_residual[start : start + bucket.elements // share]

    def _server_residual_of(self, bucket: Bucket) -> Tensor:
        assert self._server_residual is not None
        share = self._ranks().size
        start = bucket.first_block * bucket.block_size // share
        return self._server_residual[start : start + bucket.elements // share]

    def _payload(self, bucket: Bucket, rows: int) -> Packed:
        count = bucket.blocks // self._ranks().size
        width = Packed.row_bytes(count, bucket.block_size)
        return Packed(torch.empty((rows, width), dtype=torch.uint8, device=self._device), count, bucket.block_size)

    def _check_parameters(self, params: Sequence[Tensor]) -> None:
        first = self.param_groups[0]["params"][0]
        for p in params:
            shape = tuple(p.shape)
            if p.is_sparse or p.layout is not torch.strided:
                raise TypeError(
                    f"a parameter of shape {shape} is sparse; {type(self).__name__} trains dense tensors only"
                )
            if p.dtype not in TRAINABLE_DTYPES:
                raise TypeError(
                    f"a parameter of shape {shape} has dtype {p.dtype}; {type(self).__name__} trains float32, bfloat16 "
                    "and float16 (complex and float64 parameters belong to another optimizer)"
                )
            if p.device != first.device:
                raise ValueError(f"parameters on {first.device} and {p.device}; give each device its own optimizer")
            if not is_dense(p):
                raise ValueError(
                    f"a parameter of shape {shape} has strides {p.stride()} with gaps or overlaps; make it contiguous"
                )

    def _refuse_sparse_gradients(self) -> None:
        for i in self._known():
            grad = self._params[i].grad
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"{self.name_of(i)} has a sparse gradient; {type(self).__name__} trains dense gradients only (build the layer with "
                    "sparse=False)"
                )

    def _prepare(self) -> None:
        """Plans and connects on first use, and again when a parameter becomes trainable."""
        if self._plan is None:
            self._build()
            return
        self._check_parameter_list()
        known = set(self._slots) | set(self._dense)
        fresh = [i for i, p in enumerate(self._params) if p.requires_grad and i not in known]
        if fresh:
            late = [i for i in fresh if self.param_groups[self._group_of[i]]["compress"]]
            if late and not self._takes_new_parameters():
                raise RuntimeError(
                    f"{self.name_of(late[0])} became trainable in phase {self._phase.value!r}: its second moments can no longer "
                    "be learned; unfreeze it before the freeze, or put it into a group with compress=False"
                )
            self._build()
        elif self._transport is None:
            self._reconnect()

    def _check_parameter_list(self) -> None:
        """State is laid out for the parameters there were: groups that were edited by hand would silently not be trained."""
        listed = [p for group in self.param_groups for p in group["params"]]
        if len(listed) != len(self._params) or any(
            p is not known for p, known in zip(listed, self._params, strict=True)
        ):
            raise RuntimeError(
                f"the parameters in {type(self).__name__}.param_groups are not those of the last step ({len(listed)} now, "
                f"{len(self._params)} then); add parameters with add_param_group(), and make a new optimizer to remove or replace some"
            )

    def _reconnect(self) -> None:
        """Connects; where nothing but the connection is new, state that differs by rank stays exactly as it is."""
        ranks = self._ranks()
        moved = any(bucket.device != self._device for bucket in self._buckets())
        if moved or self._laid_out_for != (ranks.size, ranks.ranks_per_node):
            self._build()
            return
        self._connect()
        self._renew_reducer()

    def _build(self, *, connect: bool = True) -> None:
        """Lays out parameters and arenas, keeping state there is, and agrees on the plan with the other ranks.

        Args:
            connect: False leaves the handshake to the first step (loading a checkpoint is no collective).
        """
        kept = {id(self._params[i]): self._state_of(i) for i in self._known()} if self._plan is not None else {}
        self._index()
        if self._takes_new_parameters() or self._plan is None:
            self._layout(kept)
        elif self._laid_out_for != (self._ranks().size, self._ranks().ranks_per_node):
            self.load_state_dict(self.state_dict())  # connected to another world since: cut everything anew
        else:
            self._layout_dense(kept)
        if connect:
            self._connect()
        if self._transport is not None:
            self._renew_reducer()

    def _index(self) -> None:
        """Numbers the parameters and deals them to the plan (``_slots``) and to dense averaging (``_dense``)."""
        known = {id(self._params[i]) for i in self._known()}
        counts = {id(p): t for p, t in zip(self._params, self._t, strict=True)}
        self._params = [p for group in self.param_groups for p in group["params"]]
        self._group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        self._t = [counts.get(id(p), 0) for p in self._params]
        trainable = [i for i, p in enumerate(self._params) if p.requires_grad or id(p) in known]
        self._slots = [i for i in trainable if self.param_groups[self._group_of[i]]["compress"]]
        self._slot_of = {i: slot for slot, i in enumerate(self._slots)}
        self._dense = [i for i in trainable if not self.param_groups[self._group_of[i]]["compress"]]
        self._wire_bytes = sum(self._params[i].numel() * self._params[i].element_size() for i in self._known())
        self._bound = {}

    def _layout(self, kept: dict[int, dict[str, Tensor]]) -> None:
        ranks = self._ranks()
        self._laid_out_for = (ranks.size, ranks.ranks_per_node)
        self._kernels = get_backend(self.options.kernels, self._device)
        self._plan = plan_buckets(
            [self._params[i].numel() for i in self._slots],
            block_size=self.options.block_size,
            world_size=ranks.size,
            bucket_elements=int(self.options.bucket_mb * 2**20 / 4),
            device=self._device,
        )
        self._flat = {name: torch.zeros(self._plan.elements, device=self._device) for name in self._arenas()}
        self._layout_dense(kept)

    def _layout_dense(self, kept: dict[int, dict[str, Tensor]]) -> None:
        """State that is kept by parameter: moments of dense groups and master weights; then all state there was."""
        names = self._arenas()
        self._dense_state = {
            i: {name: torch.zeros_like(self._params[i], dtype=torch.float32) for name in names} for i in self._dense
        }
        self._masters = {
            i: kept.get(id(self._params[i]), {}).get("master", self._params[i].detach().float())
            for i in (*self._slots, *self._dense)
            if self._params[i].dtype != torch.float32
        }
        for i in (*self._slots, *self._dense):
            for name, value in kept.get(id(self._params[i]), {}).items():
                if name in names:
                    self._moment(name, i).copy_(value)

    def _state_of(self, index: int) -> dict[str, Tensor]:
        names = self._flat if self._takes_new_parameters() else self._dense_state.get(index, {})
        state = {name: self._moment(name, index).clone() for name in names}
        if index in self._masters:
            state["master"] = self._masters[index]
        return state

    def _connect(self) -> None:
        ranks = self._ranks()
        self._transport = Transport(ranks, self.ledger, self._timeout, self.algorithm)
        self._transport.step = self._steps + 1
        self._exchange = Exchange(self._transport)
        if ranks.size > 1:
            # on an account of its own: it belongs to no step, and a run that is resumed makes one more
            lobby = Transport(ranks, ByteLedger(), self._timeout, self.algorithm)
            lobby.step = self._transport.step
            handshake(lobby, self.plan_description(), self._device, "training plan")

    def _renew_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        indices = self._known() if self._may_be_dense() else list(self._dense)
        self._reduced_at = {i: k for k, i in enumerate(indices)}
        # not connected while a checkpoint is loaded: the first step connects and comes back here
        if self._transport is not None and self._ranks().size > 1 and indices:
            self._reducer = Reducer(
                [self._params[i] for i in indices],
                self._transport,
                int(self.options.bucket_mb * 2**20),
                overlap=self._overlap_dense,
                lanes=[_PLAN_LANE if i in self._slot_of else _DENSE_LANE for i in indices],
            )

    def _may_be_dense(self) -> bool:
        """Whether this or a later step may average the plan's gradients densely."""
        return self._phase is Phase.WARMUP

    def plan_description(self) -> list[str]:
        """The plan in words, one fact per line: what all ranks must agree on (options, phase, groups, layout of the parameters)."""
        ranks = self._ranks()
        lines = [f"algorithm {self.algorithm}", f"world of {ranks.size} ranks, {ranks.ranks_per_node} per node"]
        options = {k: v for k, v in vars(self.options).items() if k not in ("process_group", "kernels", "timeout")}
        lines += [f"option {name}={value}" for name, value in options.items()]
        lines += [f"option {name}={value}" for name, value in self.settings.items()]
        lines.append(f"phase {self._phase.value} after {self._steps} steps")
        for g, group in enumerate(self.param_groups):
            facts = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "param_names"))
            lines.append(f"group {g}: {len(group['params'])} parameters, {facts}")
        for i in self._known():
            p = self._params[i]
            lines.append(
                f"{self.name_of(i)}: shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}, group {self._group_of[i]}"
            )
        return lines

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Replicated state in the layout of ``torch.optim.AdamW`` (which can load it), plus one key ``"onebit"``.

        Per parameter: ``step`` (fp32, 0-d), ``exp_avg``, ``exp_avg_sq`` (fp32, shape of the parameter), and where they
        exist ``master`` (fp32 weights of a 16-bit parameter) and arenas of the algorithm. Residuals differ by rank and
        are not in it (see ``residual_state_dict``).
        """
        packed = super().state_dict()
        if self._plan is None:
            packed["onebit"] = self._books()
            return packed
        per_param: dict[int, dict[str, Tensor]] = {i: {} for i in self._known()}
        for name, values in self._saved_arenas():
            for slot, i in enumerate(self._slots):
                view = self._plan.view(values, slot, self._params[i])
                per_param[i][name] = torch.empty_like(view).copy_(view)
            del values
        for i in self._dense:
            for key, name in self._replicated.items():
                if name in self._dense_state[i]:
                    per_param[i][key] = self._dense_state[i][name].clone()
        for i in self._known():
            per_param[i]["step"] = torch.tensor(float(self._t[i]))
            if i in self._masters:
                per_param[i]["master"] = self._shared_master(i).clone()
        packed["state"] = {i: per_param[i] for i in sorted(per_param) if self._t[i] > 0}
        packed["onebit"] = self._books()
        return packed

    def _shared_master(self, index: int) -> Tensor:
        """fp32 master weights that all ranks share."""
        return self._masters[index]

    def residual_state_dict(self) -> dict[str, Any]:
        """What differs by rank, and its layout: residuals (fp32 flats over this rank's blocks) and other local state.

        The tensors are the optimizer's own, not copies.
        """
        return {**self._rank_layout(), "tensors": self._rank_state()}

    def _rank_layout(self) -> dict[str, Any]:
        ranks = self._ranks()
        # what the state is cut for, which outlives the connection
        size, ranks_per_node = self._laid_out_for if self._plan is not None else (ranks.size, ranks.ranks_per_node)
        return {
            "version": STATE_VERSION,
            "algorithm": self.algorithm,
            "steps": self._steps,
            "world_size": size,
            "ranks_per_node": ranks_per_node,
            "rank": ranks.rank,
            "block_size": self.options.block_size,
            "numels": [self._params[i].numel() for i in self._slots],
            "bucket_blocks": [bucket.blocks for bucket in self._plan.buckets] if self._plan is not None else [],
        }

    @torch.no_grad()
    def load_residual_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from this rank's ``residual_state_dict()``; call it after ``load_state_dict``.

        Raises:
            ValueError: the state was written for another layout (world, node size, blocks or parameters); the message
                names it.
        """
        mine = self._rank_layout()
        keys = ["algorithm", "steps", "world_size", "ranks_per_node", "rank", "block_size", "preconditioned"]
        if state["tensors"]:  # before its first step an optimizer has no blocks, and nothing to load
            keys += ["numels", "bucket_blocks"]
        for key in keys:
            theirs, ours = state.get(key, False), mine.get(key, False)
            if theirs != ours:
                raise ValueError(
                    f"residual state has {key}={theirs!r}, this run has {ours!r}; residuals cannot be loaded as they are"
                    + (f": continue with {key}={theirs!r}" if key in ("block_size", "preconditioned") else "")
                )
        self._load_rank_state(state["tensors"])

    def _rank_state(self) -> dict[str, Tensor]:
        """Tensors that differ by rank."""
        if self._worker_residual is None or self._server_residual is None:
            return {}
        return {"worker_residual": self._worker_residual, "server_residual": self._server_residual}

    def _load_rank_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes ``_rank_state()`` back."""
        if "worker_residual" in tensors:
            self._allocate_residuals()
            assert self._worker_residual is not None and self._server_residual is not None
            self._worker_residual.copy_(tensors["worker_residual"])
            self._server_residual.copy_(tensors["server_residual"])

    def _saved_arenas(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, flat values) of replicated arenas, one at a time so that only one temporary exists."""
        yield "exp_avg", self._momentum_flat()
        for key, name in self._replicated.items():
            if key != "exp_avg" and name in self._flat:
                yield key, self._flat[name]

    def _to_exchanged(self, m: Tensor, start: int = 0) -> None:
        """From the momentum to what buckets hold and exchange, in place; ``m`` begins at element ``start`` of all blocks."""

    def _from_exchanged(self, m: Tensor, start: int = 0) -> None:
        """The inverse of ``_to_exchanged``, to rounding."""

    def _momentum_flat(self) -> Tensor:
        """The momentum as an fp32 flat over all blocks."""
        if "m" in self._flat:
            return self._flat["m"]
        flat = self._exchanged_flat()
        self._from_exchanged(flat)
        return flat

    def _exchanged_flat(self) -> Tensor:
        """What buckets hold as momentum, as an fp32 flat over all blocks."""
        flat = torch.zeros(self._known_plan().elements, device=self._device)
        for bucket, held in zip(self._buckets(), self._momentum, strict=True):
            if isinstance(held, Packed):
                self._kernels.unpack(held, bucket.lengths, bucket.slice(flat))
            else:
                bucket.slice(flat).copy_(held)
        return flat

    def _books(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "algorithm": self.algorithm,
            "phase": self._phase.value,
            "steps": self._steps,
            "skipped": self._skipped,
            "skips_in_a_row": self._skips_in_a_row,
            "ledger": self.ledger.as_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads ``state_dict()``, or the state of a plain ``torch.optim.Adam`` / ``AdamW``.

        The latter continues in the warm-up. Residuals start from zero unless ``load_residual_state_dict`` follows.

        Raises:
            ValueError: groups do not match, another algorithm's state, or a newer version of the format.
        """
        books = state_dict.get("onebit")
        if books is None and not self._reads_plain_adam:
            raise ValueError(
                f"{type(self).__name__} cannot continue from the state of a plain optimizer; load the weights only"
            )
        if books is not None:
            if books["version"] > STATE_VERSION:
                raise ValueError(
                    f"optimizer state of format {books['version']}, newer than this release reads ({STATE_VERSION}); upgrade"
                )
            if books["algorithm"] != self.algorithm:
                raise ValueError(
                    f"optimizer state of {books['algorithm']!r} cannot be loaded into {self.algorithm!r}; "
                    "keep the algorithm, or load the weights only"
                )
        ours = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, mine in zip(self.param_groups, ours, strict=True):
            for key in _TORCH_ADAM_OPTIONS & set(group):
                del group[key]
            for key, value in mine.items():
                group.setdefault(key, value)
            self._check_group(group)
        self._phase = Phase.WARMUP
        self._momentum, self._flat, self._plan = [], {}, None
        self._worker_residual = self._server_residual = None
        self._t = [0] * len(self._params)
        self._build(connect=False)
        order = [i for g in state_dict["param_groups"] for i in g["params"]]
        saved = {new: state_dict["state"][old] for new, old in enumerate(order) if old in state_dict["state"]}
        steps = [int(s["step"]) for s in saved.values()]
        self._steps = books["steps"] if books else max(steps, default=0)
        self._skipped = books["skipped"] if books else 0
        self._skips_in_a_row = books.get("skips_in_a_row", 0) if books else 0
        if books:
            self.ledger.load_dict(books["ledger"])
        for i, state in saved.items():
            self._t[i] = int(state["step"])
            if i in self._masters and "master" in state:
                self._masters[i].copy_(state["master"])
        for i, state in saved.items():
            for key, name in self._replicated.items():
                if key in state and (
                    name in self._dense_state.get(i, {}) or (i in self._slot_of and name in self._flat)
                ):
                    self._moment(name, i).copy_(state[key])
        self._load_phase(Phase(books["phase"]) if books else Phase.WARMUP, books or {}, saved)
        if self._transport is not None:
            self._transport.step = self._steps + 1

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


class _Lookups:
    """What a step looks up once, by bucket: spans of weights and gradients, both sides of the exchange, tables of numbers."""

    def __init__(self) -> None:
        self.weights: dict[int, BoundSpans] = {}
        self.grads: dict[int, BoundSpans] = {}
        self.worker: dict[int, tuple[Coefficients, Tensor]] = {}
        self.server: dict[int, tuple[Tensor, Tensor]] = {}
        self.tables: dict[str, Sequence[Tensor]] = {}
        self.kinds: list[tuple[int, int]] = []  # group and step count of each slot


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
        ranks = optimizer._ranks()
        lo, hi = optimizer._shard_blocks(bucket)
        count = bucket.blocks // ranks.size
        chunk = ranks.local_rank * ranks.nodes + ranks.node
        for flat in optimizer._guarded(bucket):
            blocks = flat.view(-1, bucket.block_size)
            mask = self._idle[lo:hi] if len(blocks) == hi - lo else self._idle[chunk * count : (chunk + 1) * count]
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
