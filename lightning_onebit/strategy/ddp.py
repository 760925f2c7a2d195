"""The optimizers under DistributedDataParallel: for a model that somebody else has wrapped.

``onebit_ddp(model, optimizer)`` registers a communication hook: DDP averages gradients in the optimizer's dense steps, overlapped with
backward as ever, and leaves them alone in compressed ones, where ``optimizer.step()`` communicates. Accelerate and
``transformers.Trainer`` are in ``lightning_onebit.huggingface``; Lightning wraps no model and needs none of this.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_onebit.comm import ring_bytes
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.kernels.common import bit_sums
from lightning_onebit.strategy.averaging import LockstepUnscale, consensus
from lightning_onebit.strategy.checks import params_of
from lightning_onebit.strategy.files import writing
from lightning_onebit.strategy.ranks import Ranks, connected
from lightning_onebit.strategy.shards import (
    STAMP_KEY,
    ShardError,
    Stamp,
    remove_shards,
    restarted,
    restore_residuals,
    save_shards,
)

log = logging.getLogger("lightning_onebit")

#: name of the file that says which residuals belong to a checkpoint; they lie in a folder beside it
RESIDUALS_NAME = "residuals.json"
#: key in that file of what the shared model is known by
_WEIGHTS_KEY = "weights"

# optimizers whose residuals have been restored since their state was loaded
_restored: weakref.WeakSet[OnebitOptimizer] = weakref.WeakSet()


# ----- the model ------------------------------------------------------------------------------------------------------


def onebit_ddp(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, scaler: Any = None) -> None:
    """Lets DistributedDataParallel average in dense steps only. Call it once, after wrapping and before the first backward.

    The loop stays as it is: ``no_sync()``, ``find_unused_parameters``, ``static_graph`` and ``gradient_as_bucket_view`` mean what they
    mean. Groups with ``compress=False`` are averaged by ``step()``. Parameters of other optimizers are averaged in every step.
    Replicas stay bitwise equal.

    In a compressed step ``.grad`` is this rank's own. So clip with ``max_grad_norm=`` of the optimizer or with ``clip_grad_norm_()``
    below, not with ``torch.nn.utils.clip_grad_norm_``. A step that has begun to clip rank by rank warns once.

    Args:
        model: the wrapped model. Unwrapped it is accepted in a world of one rank, where there is nothing to average.
        *optimizers: all compressed optimizers that train the model (Accelerate's wrappers are looked through).
        scaler: a ``torch.amp.GradScaler``, if there is one: an overflow on one rank then skips the step on all.

    Raises:
        TypeError: the model is not wrapped in DistributedDataParallel (FSDP is not supported), or an optimizer is not of this package.
        ValueError: an optimizer has parameters that DDP does not average or other ranks than DDP, ``overlap="backward"``, or the
            model has a communication hook already.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        >>> onebit_ddp(model, optimizer)
    """
    wrapped = _wrapper(model)
    compressed = [_compressed(optimizer) for optimizer in optimizers]
    if not compressed:
        raise ValueError("onebit_ddp(): no optimizer was given; give all compressed optimizers that train the model")
    if wrapped is None:
        return
    names: dict[Tensor, str] = {p: name for name, p in wrapped.module.named_parameters()}
    for optimizer in compressed:
        if problem := _problem(wrapped, optimizer, names):
            raise ValueError(f"onebit_ddp(): {type(optimizer).__name__} {problem}")
    for optimizer in compressed:
        if optimizer.configured:
            optimizer.name_parameters(names)
        else:
            limit = timedelta(seconds=optimizer.exchange.timeout)
            optimizer.configure_communication(wrapped.process_group, timeout=limit, parameter_names=names)
    state = next((state for _, state in wrapped._comm_hooks if isinstance(state, _Hook)), None)
    if state is None:
        state = _Hook(wrapped)
        try:
            wrapped.register_comm_hook(state, _average_dense)
        except RuntimeError as error:
            raise _hooked(f" [{error}]") from error
    state.serve(compressed, scaler)


def innermost(optimizer: Any) -> Any:
    """The optimizer inside wrappers of others (Accelerate's)."""
    while not isinstance(optimizer, OnebitOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _compressed(optimizer: Any) -> OnebitOptimizer:
    inner = innermost(optimizer)
    if not isinstance(inner, OnebitOptimizer):
        raise TypeError(
            f"onebit_ddp(): {type(inner).__name__} compresses nothing; give optimizers of this package only (parameters of others are "
            "averaged in every step without being named)"
        )
    return inner


def _wrapper(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is; None if it is not wrapped and need not be."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    if isinstance(inner, DistributedDataParallel):
        if inner._comm_hooks and not isinstance(inner._comm_hooks[0][1], _Hook):
            raise _hooked(f": {getattr(inner._comm_hooks[0][0], '__qualname__', inner._comm_hooks[0][0])}")
        return inner
    if {cls.__name__ for cls in type(inner).__mro__} & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TypeError(
            "onebit_ddp(): the model is wrapped in FSDP, whose ranks do not hold the whole model; compressed optimizers need "
            "DistributedDataParallel (Accelerate: run `accelerate launch --multi_gpu` without FSDP)"
        )
    if not connected() or dist.get_world_size() == 1:
        return None
    raise TypeError(
        f"onebit_ddp(): the model is a {type(inner).__name__}, not a DistributedDataParallel. Give the wrapped model (with Accelerate "
        "what `prepare` has returned); a model that nobody wraps needs no call, `optimizer.step()` communicates by itself"
    )


def _hooked(which: str) -> ValueError:
    return ValueError(
        f"onebit_ddp(): the model has a communication hook already{which}, and DistributedDataParallel takes one. Leave the other out "
        "(Accelerate: DistributedDataParallelKwargs(comm_hook=...)); gradients are compressed by the optimizer"
    )


def _problem(wrapped: DistributedDataParallel, optimizer: OnebitOptimizer, names: dict[Tensor, str]) -> str | None:
    """Why an optimizer cannot train a wrapped model, behind its name; None if it can."""
    if optimizer.exchange.overlap == "backward":
        return "has overlap='backward', which sends gradients before DistributedDataParallel is done with them; use overlap='step'"
    for p in params_of(optimizer):
        if p not in names:
            return (
                f"trains a parameter of shape {tuple(p.shape)} that is not in the wrapped {type(wrapped.module).__name__}; give the model "
                "that the optimizer was made for"
            )
        if names[p] in wrapped.parameters_to_ignore:
            return (
                f"trains {names[p]}, which DistributedDataParallel was told to ignore; leave it out of one of the two"
            )
    if not optimizer.configured and optimizer.exchange.process_group is None:
        return None  # joins DDP's ranks
    ranks = optimizer.topology.group
    mine = dist.get_process_group_ranks(ranks if isinstance(ranks, dist.ProcessGroup) else dist.group.WORLD)
    theirs = dist.get_process_group_ranks(wrapped.process_group)
    if mine == theirs:
        return None
    return (
        f"exchanges among ranks {mine}, DistributedDataParallel averages among {theirs}; give the optimizer "
        "process_group=model.process_group"
    )


class _Hook:
    """What the communication hook of a model knows. DDP keeps it for ever, so it holds nothing that is large."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = wrapped.process_group
        self._optimizers: list[weakref.ref[OnebitOptimizer]] = []
        # of the running backward: parameters that are averaged elsewhere or later, and those that DDP has brought
        self._local: set[int] = set()
        self._seen: set[int] = set()
        self._dense: list[OnebitOptimizer] = []
        self._owners: dict[int, OnebitOptimizer] = {}
        # a local gradient as backward has left it: the parameter and the version of its gradient
        self._witness: tuple[weakref.ref[Tensor], int] | None = None
        self._watches = True
        self._handles: list[Any] = []
        self._warned_late = False
        this = weakref.ref(self)

        def before_forward(*_: Any) -> None:
            if (state := this()) is not None and torch.is_grad_enabled():
                state._before_forward()

        wrapped.register_forward_pre_hook(before_forward)
        wrapped.module._register_state_dict_hook(_with_own_storage)

    def serve(self, optimizers: Sequence[OnebitOptimizer], scaler: Any) -> None:
        """Serves these optimizers, and no others any more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._witness, self._watches = [], None, scaler is None
        self._optimizers = [weakref.ref(optimizer) for optimizer in dict.fromkeys(optimizers)]
        for optimizer in optimizers:
            self._serve(optimizer)
        if scaler is not None and scaler.is_enabled():
            _lockstep(scaler)

    def _serve(self, optimizer: OnebitOptimizer) -> None:
        this, unread = weakref.ref(self), [True]  # at its first step, and at the first after a state was loaded

        def before_step(optimizer: Any, *_: Any) -> None:
            if (state := this()) is not None:
                state._look_for_clipping(optimizer)
            if unread:
                unread.clear()
                _warn_without_residuals(optimizer)

        def loaded(optimizer: Any) -> None:
            _restored.discard(optimizer)
            unread[:] = [True]

        self._handles += [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]
        if optimizer.local_steps:
            self._handles.append(optimizer.register_step_post_hook(lambda o, *_: o.show_consensus()))

    def _alive(self) -> list[OnebitOptimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _before_forward(self) -> None:
        for optimizer in self._alive():
            if optimizer.trains and not optimizer.connected:
                optimizer.prepare()  # not in backward, where another thread would compare the ranks' plans
            optimizer.show_local()

    def begin(self) -> None:
        """Decides, alike on all ranks, whose gradients this backward averages."""
        self._local, self._seen, self._dense, self._owners, self._witness = set(), set(), [], {}, None
        for optimizer in self._alive():
            optimizer.begin_backward(sync=False)
            owned = {id(p) for p in params_of(optimizer)}
            if optimizer.next_step_is_dense:
                self._dense.append(optimizer)
                self._owners.update(dict.fromkeys(owned, optimizer))
            else:
                self._local |= owned

    def shares(self, params: Sequence[Tensor]) -> list[bool]:
        """Which of a bucket's gradients are averaged now."""
        self._seen.update(map(id, params))
        return [id(p) not in self._local for p in params]

    def account(self, params: Iterable[Tensor], itemsize: int) -> None:
        """Puts what an average of these gradients sends on the accounts of their optimizers."""
        elements: dict[OnebitOptimizer, int] = {}
        for p in params:
            if (owner := self._owners.get(id(p))) is not None:
                elements[owner] = elements.get(owner, 0) + p.numel()
        for optimizer, count in elements.items():
            optimizer.ledger.sent(ring_bytes(self.group.size(), count * itemsize), link="inter")

    def end(self) -> None:
        """Tells the optimizers whose gradients have come averaged."""
        for optimizer in self._dense:
            late = [p for p in params_of(optimizer) if p.requires_grad and id(p) not in self._seen]
            if not late:
                optimizer.gradients_are_averaged()
            elif not self._warned_late:
                self._warned_late = True
                log.warning(
                    "%s became trainable after the model was wrapped in DistributedDataParallel, which does not average it: the optimizer "
                    "averages all gradients of dense steps once more; wrap the model again",
                    optimizer.parameter_names.get(late[0]) or f"a parameter of shape {tuple(late[0].shape)}",
                )
        self._dense, self._owners = [], {}
        if self._watches and self._local:
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            # behind DDP's own, which comes next and writes gradients
            engine.queue_callback(lambda: engine.queue_callback(self._remember))

    def _remember(self) -> None:
        for p in params_of(*self._alive()):
            if id(p) in self._local and p.grad is not None:
                self._witness = weakref.ref(p), p.grad._version
                return

    def _look_for_clipping(self, optimizer: OnebitOptimizer) -> None:
        """Warns once where something has written to the local gradients of a compressed step."""
        if self._witness is None or optimizer.next_step_is_dense or optimizer.gradients_clipped:
            return
        witness, version = self._witness
        p, self._witness = witness(), None
        if p is not None and p.grad is not None and p.grad._version != version:
            self._watches = False
            log.warning(
                "gradients of a compressed step were changed between backward and step(): torch.nn.utils.clip_grad_norm_ clips each rank "
                "by the norm of its own gradients. Give the optimizer max_grad_norm=, or call lightning_onebit.ddp.clip_grad_norm_; give "
                "a GradScaler to onebit_ddp(..., scaler=scaler)"
            )


def _with_own_storage(_: Any, state_dict: dict[str, Any], *__: Any) -> None:
    """Copies weights that are shown as parts of one flat: safetensors would take them for one tensor under many names."""
    copies: dict[tuple[int, Any], Tensor] = {}
    for name, value in state_dict.items():
        alone = (
            not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.numel() * value.element_size()
        )
        if not alone and not isinstance(value, torch.nn.Parameter):
            state_dict[name] = copies.setdefault((value.data_ptr(), value.shape), value.clone())  # tied ones stay tied


def _average_dense(state: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    if bucket.index() == 0:
        state.begin()
    params, buffer = bucket.parameters(), bucket.buffer()
    shared = state.shares(params)
    state.account((p for p, here in zip(params, shared, strict=True) if here), buffer.element_size())
    if not any(shared):
        result: torch.futures.Future[Tensor] = torch.futures.Future()
        result.set_result(buffer)
    elif all(shared):
        result = _average(buffer, state.group)
    else:
        grads = [g for g, here in zip(bucket.gradients(), shared, strict=True) if here]
        flat = torch.cat([g.reshape(-1) for g in grads])

        def put_back(future: torch.futures.Future[Tensor]) -> Tensor:
            parts = future.value().split([g.numel() for g in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
            return buffer

        result = _average(flat, state.group).then(put_back)
    if bucket.is_last():
        state.end()
    return result


_average_dense.__annotations__.clear()  # torch compares them with types, and they are texts in this file


def _average(tensor: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    tensor.mul_(1.0 / group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def _lockstep(scaler: Any) -> None:
    """An overflow in one rank's local gradients counts on all ranks, whose optimizers then count a step that was not made."""
    if isinstance(getattr(scaler, "unscale_", None), LockstepUnscale):
        return
    unscale = LockstepUnscale.place(scaler)
    assert unscale is not None

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = type(scaler).step(scaler, optimizer, *args, **kwargs)
        unscale.count_skipped(optimizer)
        return result

    scaler.step = step


# ----- clipping -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, *optimizers: torch.optim.Optimizer, norm_type: float = 2.0
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients that compressed optimizers have not averaged: one norm for all ranks.

    It is that of ``OnebitOptimizer.clip_grad_norm_()``, together with the gradients of parameters that none of the optimizers
    trains. A collective in a compressed step: call it on all ranks.

    Args:
        parameters: as for torch's function.
        max_norm: upper bound of the norm; infinite: nothing is clipped.
        *optimizers: the compressed optimizers that train them.
        norm_type: 2 only.

    Returns:
        The norm before clipping, fp32, 0-d, on the CPU.

    Raises:
        ValueError: another norm than the 2-norm, an optimizer that clips already (``max_grad_norm``), or one that trains
            parameters that were not given.
    """
    if norm_type != 2.0:
        raise ValueError(f"norm_type={norm_type!r}: gradients of several ranks are clipped by their 2-norm only")
    given = {id(p): p for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
    clips = max_norm != float("inf")
    squares, owned = 0.0, set()
    for optimizer in map(_compressed, optimizers):
        mine = params_of(optimizer)
        if not any(id(p) in given for p in mine):
            continue
        if any(p.grad is not None and id(p) not in given for p in mine):
            raise ValueError(
                f"clip_grad_norm_(): {type(optimizer).__name__} has gradients of further parameters, which would not be clipped; give all "
                "parameters of an optimizer"
            )
        if clips and optimizer.options.max_grad_norm is not None:
            raise ValueError(
                f"clip_grad_norm_(): the optimizer clips already (max_grad_norm={optimizer.options.max_grad_norm}); leave out one of the "
                "two (transformers: TrainingArguments(max_grad_norm=0))"
            )
        owned |= {id(p) for p in mine}
        squares += optimizer.global_norm(clips=clips) ** 2
    others = [p.grad for key, p in given.items() if key not in owned and p.grad is not None]
    if others:
        squares += float(torch.stack([torch.linalg.vector_norm(g).float() for g in others]).square().sum())
    norm = squares**0.5
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and (grads := [p.grad for p in given.values() if p.grad is not None]):
        torch._foreach_mul_(grads, factor)
    return torch.tensor(norm, dtype=torch.float32)


# ----- checkpoints ----------------------------------------------------------------------------------------------------


def save_residuals(folder: str | os.PathLike[str], *optimizers: torch.optim.Optimizer) -> None:
    """Writes what differs by rank beside a checkpoint that holds the model and ``optimizer.state_dict()``. Collective.

    One file per rank, and one that says which belong together. Save the model within ``optimizer.consensus()`` where 0/1 Adam
    takes local steps.

    Args:
        folder: of the checkpoint, the same on all ranks; a path or URL.
        *optimizers: in the order in which they will be given to ``load_residuals()``.

    Raises:
        ShardError: on all ranks, if any cannot write.
    """
    compressed, ranks, path = _opened(folder, optimizers)
    states = [optimizer.residual_state_dict() for optimizer in compressed]
    weights = _fingerprint(compressed)
    first = int(os.environ.get("LOCAL_RANK", ranks.rank)) == 0

    def publish(stamp: Stamp) -> None:
        if ranks.rank == 0:
            with writing(path) as file:
                file.write(json.dumps({STAMP_KEY: stamp.as_dict(), _WEIGHTS_KEY: weights}).encode())

    path, _, older = save_shards(path, states, ranks, publish, cleans=first)
    if first:
        remove_shards(path, older)


def load_residuals(folder: str | os.PathLike[str], *optimizers: torch.optim.Optimizer) -> bool:
    """Completes optimizers with what ``save_residuals()`` wrote. Collective; call it after the model and their state were loaded.

    Into the world it was saved from everything returns bit for bit; into another one it is redistributed. What cannot be
    restored starts from zero, and a warning says why.

    Args:
        folder: as it was given to ``save_residuals()``.
        *optimizers: in the same order.

    Returns:
        Whether nothing was lost.
    """
    compressed, ranks, path = _opened(folder, optimizers)
    text = ranks.gather(_read(path) if ranks.rank == 0 else None)[0]
    problem = None
    try:
        if text is None:
            problem = f"{path} is missing" if restarted(compressed) else None
        else:
            found = json.loads(text)
            same = found.get(_WEIGHTS_KEY) == _fingerprint(compressed)
            other = "" if same else f"{path} belongs to another model than the one that was loaded"
            if (failed := ranks.agree(other)) is not None:
                raise ShardError(failed)
            said = restore_residuals(found, path, compressed, ranks)
            if said is not None and ranks.rank == 0:
                log.info("%s: %s", path, said)
    except (ShardError, ValueError) as error:
        problem = str(error)
    _restored.update(compressed)  # has been said, if anything is to be said
    if problem is not None and ranks.rank == 0:
        log.warning("resuming without residuals, which start from zero: %s", problem)
    return problem is None


def _warn_without_residuals(optimizer: OnebitOptimizer) -> None:
    """Says that a state was loaded without its residuals: in the first step after it all of them are zero."""
    if optimizer in _restored or optimizer.steps == 0 or not restarted([optimizer]) or optimizer.topology.rank:
        return
    if not any(bool(tensor.any()) for tensor in optimizer.residual_state_dict()["tensors"].values()):
        log.warning(
            "%s goes on compressing at step %d with residuals that start from zero: load_state_dict() holds what all ranks share. Call "
            "lightning_onebit.ddp.save_residuals(folder, optimizer) with every checkpoint and load_residuals(folder, optimizer) after it",
            type(optimizer).__name__,
            optimizer.steps + 1,
        )


def _opened(
    folder: str | os.PathLike[str], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[list[OnebitOptimizer], Ranks, str]:
    """The compressed optimizers, their ranks, and the path of the file in a folder."""
    compressed = [_compressed(optimizer) for optimizer in optimizers]
    if not compressed:
        raise ValueError("no optimizer was given")
    first, path = compressed[0], f"{os.fspath(folder).rstrip('/')}/{RESIDUALS_NAME}"
    limit = timedelta(seconds=first.exchange.timeout)
    return compressed, Ranks(limit, first.device, "checkpoint", first.topology.group), path


def _fingerprint(optimizers: Sequence[OnebitOptimizer]) -> str:
    """What the model that all ranks share is known by, hexadecimal."""
    with consensus(optimizers):
        params = [p for p in params_of(*optimizers) if p.requires_grad]
        return hashlib.sha256(json.dumps(bit_sums(params)).encode()).hexdigest()


def _read(path: str) -> str | None:
    fs, inner = url_to_fs(path)
    if not fs.exists(inner):
        return None
    with fs.open(inner, "r") as file:
        return str(file.read())
