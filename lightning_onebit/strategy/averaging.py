"""What an adapter does beside the compressed exchange: state and buffers from rank 0, dense averages, clipping, the loss scale."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states

from lightning_onebit.comm import Reducer, Transport
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.engine.sharded import is_dtensor, local_of
from lightning_onebit.strategy.checks import ignored, params_of

# As DistributedDataParallel: how much one broadcast carries, and how large a bucket of dense averaging is.
BROADCAST_BYTES = 250 * 2**20
BUCKET_BYTES = 25 * 2**20


def share_state(module: torch.nn.Module, buffers: bool) -> None:
    """Gives all ranks rank 0's weights, and its buffers too. Collective."""
    _sync_module_states(module, _get_default_group(), BROADCAST_BYTES, 0, ignored(module), broadcast_buffers=buffers)


def buffers_of(module: torch.nn.Module) -> list[Tensor]:
    """The buffers of a module that ranks share, looked up every time: modules may assign a new tensor to a buffer."""
    left_alone = ignored(module)
    return [buffer for name, buffer in module.named_buffers() if name not in left_alone]


def broadcast_buffers(module: torch.nn.Module) -> None:
    """Gives all ranks rank 0's buffers (BatchNorm's statistics), those too that the module has got since set-up. Collective."""
    broadcast(buffers_of(module), _get_default_group())


def broadcast(tensors: Sequence[Tensor], group: Any) -> None:
    """Gives all ranks of a group the first one's values, of DTensors those of the local shard. Collective."""
    # .data: another backward of the last forward may follow, and autograd would take buffers for changed
    local = [(t._local_tensor if is_dtensor(t) else t).data for t in tensors]  # type: ignore[attr-defined]
    if local and dist.get_world_size(group) > 1:
        dist._broadcast_coalesced(group, local, BROADCAST_BYTES, 0)


class DenseAverage:
    """Averages the gradients of a module's parameters that no compressed optimizer owns, as DistributedDataParallel does.

    Their set may grow while training: layers are unfrozen, a compressed optimizer takes parameters over.

    Args:
        module: whose parameters.
        compressed: gives the compressed optimizers of the moment.
        connect: makes the transport, which is needed only where there is something to average.
        overlap: whether averages leave in the midst of backward.
        which: of the parameters; None: all.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        compressed: Callable[[], Sequence[OnebitOptimizer]],
        connect: Callable[[], Transport],
        overlap: bool,
        which: Callable[[Tensor], bool] | None = None,
    ) -> None:
        left_alone = ignored(module)
        named = [(name, p) for name, p in module.named_parameters() if which is None or which(p)]
        self._names = {p: name for name, p in named if name not in left_alone}
        self._compressed = compressed
        self._connect = connect
        self._overlap = overlap
        self._transport: Transport | None = None
        self._reducer: Reducer | None = None
        # each compressed optimizer with the number of its parameters, when it was last looked who owns what
        self._owners: list[tuple[weakref.ref[OnebitOptimizer], int]] | None = None
        self._candidates: list[torch.nn.Parameter] = []
        self._averaged: list[torch.nn.Parameter] = []

    def begin(self) -> None:
        """Call before a backward whose gradients are to be averaged."""
        self._refresh()
        if self._reducer is not None:
            self._reducer.arm()

    def finish(self) -> None:
        """Call after it: ``.grad`` is the average over ranks. Collective.

        Raises:
            TypeError: a gradient is sparse.
        """
        for p in self._averaged:
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(
                    f"{self._names[p]} has a sparse gradient; the strategy averages dense gradients only (build the layer with "
                    "sparse=False)"
                )
        # toggled off altogether, as the other network of a GAN: nothing has arrived, on any rank
        if self._reducer is not None and any(p.requires_grad for p in self._averaged):
            self._reducer.finish()

    def _refresh(self) -> None:
        compressed = self._compressed()
        owners = [(weakref.ref(o), sum(len(group["params"]) for group in o.param_groups)) for o in compressed]
        if owners != self._owners:
            self._owners = owners
            theirs = {id(p) for p in params_of(*compressed)}
            self._candidates = [p for p in self._names if id(p) not in theirs]
        # once averaged, always: the reducer leaves alone what has no gradient
        known = {id(p) for p in self._averaged} if self._candidates else set()
        wanted = [p for p in self._candidates if p.requires_grad or id(p) in known]
        if [id(p) for p in wanted] == [id(p) for p in self._averaged]:
            return
        self._stop()
        self._averaged = wanted
        if wanted and dist.get_world_size() > 1:
            self._transport = self._transport or self._connect()
            self._reducer = Reducer([local_of(p) for p in wanted], self._transport, BUCKET_BYTES, overlap=self._overlap)

    def _stop(self) -> None:
        reducer, self._reducer, self._averaged = self._reducer, None, []
        if reducer is not None:
            reducer.close()

    def close(self) -> None:
        """Removes the hooks, and gives buffers and ranks up."""
        self._transport = None
        self._stop()


@contextlib.contextmanager
def averaged(
    training: Sequence[OnebitOptimizer],
    concerned: Sequence[OnebitOptimizer],
    dense: Sequence[DenseAverage],
    *,
    last: bool,
) -> Iterator[None]:
    """Within it backward runs; afterwards gradients are averaged where the next step is dense. Collective.

    Args:
        training: the compressed optimizers with parameters that require a gradient.
        concerned: those of them whose gradients are synchronised; for the others the backward only accumulates.
        dense: what averages the gradients of other parameters.
        last: no other backward of these optimizers comes before their step.
    """
    for optimizer in training:
        optimizer.begin_backward(optimizer in concerned)
    for average in dense:
        average.begin()
    yield
    if last:
        # before anything else is sent: a rank that waits for these, in the midst of a backward, would not come to what follows
        for optimizer in concerned:
            optimizer.send_gradients()
    for optimizer in concerned:
        optimizer.sync_gradients()
    for average in dense:
        average.finish()


@contextlib.contextmanager
def consensus(optimizers: Sequence[OnebitOptimizer]) -> Iterator[None]:
    """Within it parameters show the model that all ranks share."""
    with contextlib.ExitStack() as shown:
        for optimizer in optimizers:
            shown.enter_context(optimizer.consensus())
        yield


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside Lightning's or Fabric's wrapper."""
    return vars(optimizer).get("_optimizer", optimizer)


class Clipping:
    """Stands in for a clipping method of Lightning's precision plugins.

    Compressed optimizers clip by the norm over all ranks, and refuse to be clipped by value where that comes too late.
    """

    def __init__(self, plugin: Any, how: str) -> None:
        self._plugin = plugin
        self._how = how

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        """Clips the gradients of an optimizer."""
        optimizer = unwrap(optimizer)
        if isinstance(optimizer, OnebitOptimizer):
            if self._how == "clip_grad_by_norm":
                optimizer.clip_grad_norm_(clip_val)
                return
            optimizer.check_clipping_by_value(clip_val)
        getattr(type(self._plugin), self._how)(self._plugin, optimizer, clip_val)


class LockstepUnscale:
    """Stands in for ``unscale_`` of a GradScaler: an overflow in one rank's local gradients counts on all ranks.

    All of them then skip the step, and their scalers go on alike. Gradients leave the loss scale here, before any exchange.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._overflowed: set[int] = set()

    @classmethod
    def place(cls, scaler: Any) -> LockstepUnscale | None:
        """Puts one in the place of a scaler's own method; None without a scaler."""
        if scaler is not None:
            scaler.unscale_ = cls(scaler)
        return getattr(scaler, "unscale_", None)

    def __call__(self, optimizer: Any) -> None:
        """Takes the loss scale out of the gradients of an optimizer. Collective."""
        scaler, compressed = self._scaler, unwrap(optimizer)
        type(scaler).unscale_(scaler, optimizer)
        # gradients of others have been averaged: an overflow has reached every rank
        if not isinstance(compressed, OnebitOptimizer) or not scaler.is_enabled():
            return
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        anywhere = compressed.on_any_rank(any(bool(flag) for flag in found.values()))
        if not found:  # no gradient here at all
            found[compressed.device] = torch.zeros(1, device=compressed.device)
        for flag in found.values():
            flag.fill_(float(anywhere))
        if anywhere:
            self._overflowed.add(id(compressed))

    def count_skipped(self, optimizer: Any) -> None:
        """Has an optimizer count the step that has just ended, if it was skipped for an overflow."""
        compressed = unwrap(optimizer)
        if id(compressed) in self._overflowed:
            self._overflowed.discard(id(compressed))
            compressed.skip_step()
