"""Checkpoints: what of an optimizer's state is saved, in which layout, and how it is taken back."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit._names import shown_as
from lightning_onebit.comm import Bucket
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.agreement import Agreement
from lightning_onebit.optim.arena import ArenaOptimizer, Phase
from lightning_onebit.optim.compact import expanded
from lightning_onebit.optim.masters import adopted
from lightning_onebit.optim.options import ExchangeOptions, Options
from lightning_onebit.optim.redistribute import remedy
from lightning_onebit.optim.shown_state import ShownState
from lightning_onebit.optim.torn import TornStep

log = logging.getLogger("lightning_onebit")

STATE_VERSION = 1
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


# those that only say how torch makes a step, whatever their value
_HOW_NOT_WHAT = _TORCH_ADAM_OPTIONS - {"amsgrad", "maximize"}


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer, *names: str) -> Iterator[None]:
    """Within it torch finds no state, and no hooks of these kinds: it would run them before what is kept outside of it is there."""
    hooks = {name: vars(optimizer)[name] for name in (*names, "_state_shown")}
    # the very dicts come back: handles of the user's remove hooks from them
    vars(optimizer).update({name: OrderedDict() for name in hooks})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


@shown_as("OnebitOptimizer")
class StatefulOptimizer(ArenaOptimizer):
    """``state_dict()`` makes per-parameter copies of the arenas; what differs by rank is in ``residual_state_dict()``."""

    # whether the state of torch.optim.Adam(W) is a valid start
    _reads_plain_adam: ClassVar[bool] = True
    # arenas that hold one replicated value per element, by the name that torch.optim.AdamW gives it in a checkpoint
    _replicated: ClassVar[dict[str, str]] = {"exp_avg": "m", "exp_avg_sq": "v"}

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options, exchange: ExchangeOptions) -> None:
        # books from before the first step, or the first load
        self._first_books: dict[str, Any] | None = None
        super().__init__(params, defaults, options, exchange)
        self._state_shown = ShownState(self)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Per parameter ``step``, ``exp_avg`` and ``exp_avg_sq``, as ``torch.optim.AdamW`` has them, to be read.

        Values are copies. Writing raises: at once, or in the next step where a copy has been written to. `reset_state` starts
        moments over, `load_state_dict` sets them.
        """
        shown = getattr(self, "_state_shown", None)
        # torch's own while it makes the optimizer, and of copies
        return vars(self).setdefault("state", {}) if shown is None else shown

    @state.setter
    def state(self, state: Any) -> None:
        shown = getattr(self, "_state_shown", None)
        if shown is None:
            vars(self)["state"] = state
        else:
            shown.replace(state)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says what a copy is: copying or pickling a module that holds an optimizer takes its groups along, and nothing else."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if "param_groups" in self.__dict__ and "options" not in self.__dict__ and not name.startswith("__"):
                text = (
                    f"this {type(self).__name__} was copied or unpickled and can do nothing: the original is tied to its parameters "
                    "and to other ranks; make a new optimizer for the other parameters, and let it load_state_dict() the original's "
                    "state_dict()"
                )
            raise AttributeError(text)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Replicated state in the layout of ``torch.optim.AdamW`` (which can load it), plus one key ``"onebit"``.

        Per parameter: ``step`` (fp32, 0-d), ``exp_avg``, ``exp_avg_sq`` (fp32, shape of the parameter), and where they
        exist ``master`` (fp32 weights of a 16-bit parameter) and arenas of the algorithm. Residuals differ by rank and
        are not in it (see ``residual_state_dict``). Hooks of ``register_state_dict_post_hook`` get all of it.

        Raises:
            TornStep: the last step did not end, or one has begun (``overlap="backward"``, between backward and ``step()``).
        """
        self.check_whole()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self._compacted(self._packed_state())
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, packed)
            if replaced is not None:
                packed = replaced
        return packed

    def _compacted(self, packed: dict[str, Any]) -> dict[str, Any]:
        """A state without what follows from the rest of it."""
        return packed

    def check_whole(self, *, weights_only: bool = False) -> None:
        """Raises where weights and state are not those of one step, so that they must not be saved.

        Args:
            weights_only: momentum and residuals are not to be saved. ``overlap="backward"`` changes only those before ``step()``.

        Raises:
            TornStep: the last step did not end, or one has begun.
            FloatingPointError: the last step's exchange was not finite (said here on CUDA, where a step does not wait to know).
        """
        self._refuse_torn()
        if self._whole.under_way and not weights_only:
            raise TornStep(
                f"{type(self).__name__}: {self._whole.under_way} has begun, and with it momentum and residuals have changed; save after "
                "step(), or save the weights only"
            )

    @torch.no_grad()
    def _packed_state(self) -> dict[str, Any]:
        """``state_dict()`` without the hooks."""
        with _without_hooks(self, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
            packed: dict[str, Any] = super().state_dict()
        if self._plan is None:
            packed["onebit"] = self._books()
            return packed
        per_param: dict[int, dict[str, Tensor]] = {i: {} for i in self._known()}
        for name, values in self._saved_arenas():
            for slot, i in enumerate(self._slots):
                view = self._plan.view(values, slot, self._params[i])
                per_param[i][name] = torch.empty_like(view).copy_(view)
            del values
        # what arenas have of late ones is nothing yet
        per_param |= {i: {} for i in self._late}
        for i in (*self._dense, *self._late):
            for key, name in self._replicated.items():
                if name in self._dense_state[i]:
                    per_param[i][key] = self._dense_state[i][name].clone()
        for i in self._known():
            per_param[i]["step"] = torch.tensor(float(self._t[i]), dtype=torch.float32)
            if i in self._masters:
                per_param[i]["master"] = self._shared_master(i)
        packed["state"] = {i: per_param[i] for i in sorted(per_param) if self._t[i] > 0}
        packed["onebit"] = self._books()
        return packed

    def _shared_master(self, index: int) -> Tensor:
        """A copy of the fp32 weights of a 16-bit parameter that all ranks share, with what the program has written into it.

        Saving changes no master: weights that are shown for a moment (averages of them) may be saved, too.
        """
        return adopted(self._params[index].detach(), self._masters[index])

    def _shown(self, index: int) -> dict[str, Tensor]:
        """Copies of what ``optimizer.state`` shows of a parameter that has made steps."""
        moments = {"step": torch.tensor(float(self._t[index]), dtype=torch.float32)}
        for key, name in self._replicated.items():
            if index in self._dense_state:
                if name in self._dense_state[index]:
                    moments[key] = self._dense_state[index][name].clone()
            elif (part := self._shown_part(name, self._slot_of[index])) is not None:
                p = self._params[index]
                moments[key] = part.as_strided(p.shape, p.stride())
        return moments

    def _shown_part(self, name: str, slot: int) -> Tensor | None:
        """A copy of a parameter's part of an arena, 1-D in memory order; None if there is none."""
        if name in self._flat:
            return self._part(self._flat[name], slot).clone()
        if name != "m" or not self._momentum:
            return None
        part = torch.empty(self._params[self._slots[slot]].numel(), dtype=torch.float32, device=self._device)
        for bucket, span in self._known_plan().spans_of(slot):
            whole = self._state_shown.scratch(bucket.index, partial(self._whole_momentum, bucket))
            start = span.block * bucket.block_size
            part[span.start : span.start + span.numel] = whole[start : start + span.numel]
        return part

    def _whole_momentum(self, bucket: Bucket) -> Tensor:
        """The momentum of a bucket, an fp32 flat over its blocks."""
        held, flat = (
            self._momentum[bucket.index],
            torch.empty(bucket.elements, dtype=torch.float32, device=self._device),
        )
        if isinstance(held, Packed):
            self._kernels.unpack(held, bucket.lengths, flat)
        else:
            flat.copy_(held)
        self._from_exchanged(flat, bucket.first_block * bucket.block_size)
        return flat

    def residual_state_dict(self) -> dict[str, Any]:
        """What differs by rank, and its layout: residuals (fp32 flats over this rank's blocks) and other local state.

        The tensors are the optimizer's own, not copies, and hold residuals until the next step: what a step leaves in them may still
        have to be taken off, which the next call does. Clone or write what is to outlive a step.

        Raises:
            TornStep: as ``state_dict()``.
        """
        self.check_whole()
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
            "block_size": self.exchange.block_size,
            "numels": [self._params[i].numel() for i in self._slots],
            # blocks are cut in memory order
            # blocks of those who joined after the freeze lie behind the others'
            **({"segments": list(self._segments)} if len(self._segments) > 1 else {}),
            "strides": [
                [stride for stride, size in zip(p.stride(), p.shape, strict=True) if size != 1]
                for p in (self._params[i] for i in self._slots)
            ],
            "bucket_blocks": [bucket.blocks for bucket in self._plan.buckets] if self._plan is not None else [],
        }

    @torch.inference_mode(False)  # what is laid out here is changed by steps to come
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
            keys += ["numels", "segments", "strides", "bucket_blocks"]
        for key in keys:
            theirs, ours = state.get(key, False), mine.get(key, False)
            if theirs != ours:
                raise ValueError(
                    f"residual state has {key}={theirs!r}, this run has {ours!r}; residuals cannot be loaded as they are"
                    + remedy(key, theirs)
                )
        with self._changing("load_residual_state_dict()"):
            self._load_rank_state(state["tensors"])

    def _rank_state(self) -> dict[str, Tensor]:
        """Tensors that differ by rank."""
        if self._worker_residual is None or self._server_residual is None:
            return {}
        with self._changing("settling residuals"):
            return {
                "worker_residual": self._worker_residual.settled(),
                "server_residual": self._server_residual.settled(),
            }

    def _load_rank_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes ``_rank_state()`` back."""
        if "worker_residual" in tensors:
            self._allocate_residuals()
            assert self._worker_residual is not None and self._server_residual is not None
            self._worker_residual.settled().copy_(tensors["worker_residual"])
            self._server_residual.settled().copy_(tensors["server_residual"])

    def _saved_arenas(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, flat values) of replicated arenas, one at a time so that only one temporary exists."""
        yield "exp_avg", self._momentum_flat()
        for key, name in self._replicated.items():
            if key != "exp_avg" and name in self._flat:
                yield key, self._flat[name]

    def _books(self) -> dict[str, Any]:
        slots = iter(self._slots)
        segments = [[next(slots) for _ in range(count)] for count in self._segments]
        return {
            "version": STATE_VERSION,
            "algorithm": self.algorithm,
            "phase": self._phase.value,
            "steps": self._steps,
            "skipped": self._skipped,
            "skips_in_a_row": self._skips_in_a_row,
            "ledger": self.ledger.as_dict(),
            # the state of one that has never had a gradient is not saved, but blocks are dealt to it
            "known": self._known(),
            "stepped": [i for i in self._known() if self._t[i] > 0],
            # in the order of their blocks, where some have joined after the freeze
            **({"segments": segments} if len(segments) > 1 else {}),
            **({"late": dict(self._late)} if self._late else {}),
        }

    def _check_books(self, books: dict[str, Any] | None) -> None:
        """Raises where a state is not one of this algorithm."""
        name = type(self).__name__
        if books is None:
            if not self._reads_plain_adam:
                raise ValueError(f"{name} cannot continue from the state of a plain optimizer; load the weights only")
            return
        if books["version"] > STATE_VERSION:
            raise ValueError(
                f"optimizer state of format {books['version']}, newer than this release reads ({STATE_VERSION}); upgrade"
            )
        if books["algorithm"] != self.algorithm:
            raise ValueError(
                f"optimizer state of {books['algorithm']!r} cannot be loaded into {self.algorithm!r}; "
                "keep the algorithm, or load the weights only"
            )
        missing = [key for key in ("phase", "steps", "skipped", "ledger") if key not in books]
        if missing:
            raise ValueError(
                f"optimizer state without {missing[0]!r} in its entry 'onebit'; load a complete state_dict() of {name}"
            )
        phases = [phase.value for phase in Phase]
        if books["phase"] not in phases:
            raise ValueError(
                f"optimizer state has phase {books['phase']!r}, and {name} knows {phases}; load a complete state_dict()"
            )
        count = sum(len(group["params"]) for group in self.param_groups)
        joined = [i for segment in books.get("segments", ()) for i in segment]
        if strange := [i for i in (*books.get("known", ()), *joined, *books.get("late", ())) if i not in range(count)]:
            raise ValueError(
                f"optimizer state knows parameter {strange[0]}, this optimizer has {count}; load a complete state_dict() of {name}"
            )

    def _check_groups(self, saved: list[dict[str, Any]]) -> None:
        """Raises where the groups of a state are not this optimizer's, or have options out of range."""
        sizes, ours = ([len(group["params"]) for group in groups] for groups in (saved, self.param_groups))
        if sizes != ours:
            raise ValueError(
                f"optimizer state has parameter groups of {sizes} parameters, this optimizer has groups of {ours}; make the optimizer "
                "with the groups of the run that was saved, or load the weights only"
            )
        for theirs, mine in zip(saved, self.param_groups, strict=True):
            matters = {key: value for key, value in theirs.items() if key not in _HOW_NOT_WHAT}
            self._check_group({**mine, **matters})

    def _check_saved(self, saved: dict[int, dict[str, Tensor]]) -> None:
        """Raises where the state of a parameter, by its index, belongs to a parameter of another shape."""
        params = [p for group in self.param_groups for p in group["params"]]
        for i, state in saved.items():
            name, shape = self._names.get(params[i]) or f"parameter {i}", tuple(params[i].shape)
            if "step" not in state:
                raise ValueError(
                    f"optimizer state of {name} has no 'step', so it is not that of an Adam; load the weights only"
                )
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor) and value.shape != params[i].shape:
                    raise ValueError(
                        f"optimizer state has {key} of shape {tuple(value.shape)} for {name}, whose shape is {shape}; build the model that "
                        "was saved, with its parameters in the same order, or load the weights only"
                    )

    def _check_complete(self, saved: dict[int, dict[str, Tensor]], books: dict[str, Any] | None) -> None:
        """Raises where second moments that can no longer be learned are missing in a state of a later phase than the warm-up."""
        if books is None or books["phase"] == Phase.WARMUP.value or not books["steps"]:
            return
        # (states of earlier releases do not say who has made steps; somebody has)
        known = books.get("stepped", [] if saved else books.get("known", []))
        missing = [i for i in known if i not in saved]
        if missing:
            params = [p for group in self.param_groups for p in group["params"]]
            raise ValueError(
                f"optimizer state of phase {books['phase']!r} after {books['steps']} steps has no entry for "
                f"{self._names.get(params[missing[0]]) or f'parameter {missing[0]}'}, which has made some: its second moments would "
                f"be 0 and it would not train; load a complete state_dict(), or start over with {type(self).__name__}.reset_state()"
            )

    @torch.inference_mode(False)  # as in load_residual_state_dict()
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
        state_dict = state_dict.copy()  # hooks may edit it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._unpack_state(expanded(state_dict))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def _unpack_state(self, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()`` without the hooks."""
        books = state_dict.get("onebit")
        self._first_books = self._first_books or self._books()
        self._check_books(books)
        self._check_groups(state_dict["param_groups"])
        order = [i for g in state_dict["param_groups"] for i in g["params"]]
        saved = {new: state_dict["state"][old] for new, old in enumerate(order) if old in state_dict["state"]}
        self._check_saved(saved)
        self._check_complete(saved, books)
        with self._changing("load_state_dict()", anew=True):
            self._take_state(state_dict, books, saved)

    def _take_state(
        self, state_dict: dict[str, Any], books: dict[str, Any] | None, saved: dict[int, dict[str, Tensor]]
    ) -> None:
        """Replaces all state by one that has been checked."""
        self._abandon_step()
        self._state_shown.forget()
        self._agreement = Agreement()
        ours = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        with _without_hooks(self, "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, mine in zip(self.param_groups, ours, strict=True):
            for key in _TORCH_ADAM_OPTIONS & set(group):
                del group[key]
            for key, value in mine.items():
                group.setdefault(key, value)
        self._phase = Phase.WARMUP
        self._momentum, self._flat, self._plan = [], {}, None
        self._worker_residual = self._server_residual = None
        self._params = [p for group in self.param_groups for p in group["params"]]
        self._t = [0] * len(self._params)
        # what the checkpoint knows is laid out, trainable now or not; _index() deals it to the plan and the dense groups
        segments = (books or {}).get("segments", [])
        known = dict.fromkeys([i for segment in segments for i in segment])
        self._slots, self._dense = list(known | dict.fromkeys(sorted({*saved, *(books or {}).get("known", ())}))), []
        self._segments = [len(segment) for segment in segments]
        # (where a rank is alone, all steps are dense)
        late = (books or {}).get("late", {}) if self.compresses else {}
        self._cold, self._late = set(), {i: (begun, ends) for i, (begun, ends) in late.items()}
        self._build(connect=False, newcomers="known" not in (books or {}))
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
        if (
            not books
            and self._phase is Phase.WARMUP
            and any("reciprocal_denominator" in state for state in saved.values())
        ):
            log.warning(
                "the optimizer state has lost its entry 'onebit' (torch.distributed.checkpoint.state_dict keeps 'state' and 'param_groups' "
                "alone), so %s goes on in the warm-up; keep optimizer.state_dict()['onebit'] beside it, and add it before loading",
                type(self).__name__,
            )
        if self._transport is not None:
            self._transport.step = self._steps + 1

    def _build(self, *, connect: bool = True, newcomers: bool = True) -> None:
        self._first_books = self._first_books or self._books()
        super()._build(connect=connect, newcomers=newcomers)

    def _packed_groups(self) -> list[dict[str, Any]]:
        """Parameter groups as in a state, with indices for parameters."""
        with _without_hooks(self, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
            groups: list[dict[str, Any]] = super().state_dict()["param_groups"]
        return groups

    def _abandon_step(self) -> None:
        """Forgets the running step: what has been decided about it, and what backward has sent, on all ranks alike."""
        raise AssertionError("abstract")

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        """Puts the optimizer into the phase of a checkpoint, after m and v are in their arenas."""
        raise AssertionError("abstract")
