"""The same optimizers under Lightning Fabric: ``Fabric(strategy="onebit_adam")``.

Everything that trains is below: the optimizers, their exchange, their checkpoints. What is here connects them to Fabric's loop.
``lightning_onebit.fabric`` has the class for the Fabric that the program has imported.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_onebit._choices import OtherOptimizers, StartMethod
from lightning_onebit._names import shown_as
from lightning_onebit._say import rank_zero_info
from lightning_onebit.comm import DEFAULT_TIMEOUT
from lightning_onebit.engine import OnebitOptimizer, Phase
from lightning_onebit.strategy import checks
from lightning_onebit.strategy.adapter import Adapter
from lightning_onebit.strategy.averaging import (
    DenseAverage,
    LockstepUnscale,
    averaged,
    broadcast_buffers,
    buffers_of,
    consensus,
    share_state,
    unwrap,
)
from lightning_onebit.strategy.checkpoint import Checkpoints
from lightning_onebit.strategy.checks import params_of
from lightning_onebit.strategy.convert import no_counterpart
from lightning_onebit.strategy.keywords import heed_ddp_keywords
from lightning_onebit.strategy.ranks import Groups, connected, disconnected_at_exit
from lightning_onebit.strategy.registry import Algorithm, find_algorithm
from lightning_onebit.strategy.shards import STAMP_KEY

_Kept = TypeVar("_Kept")


class _Held(Generic[_Kept]):
    """Holds what was set up, and can let go of it to find out whether the program still does."""

    def __init__(self, value: _Kept) -> None:
        self.value: _Kept | None = value
        self._weak = weakref.ref(value)

    def loosen(self) -> None:
        """Leaves it to the program."""
        self.value = None

    def hold(self) -> bool:
        """Holds it again, if it is still there."""
        self.value = self._weak()
        return self.value is not None


class _Model(_Held[torch.nn.Module]):
    """A module that was set up: its buffers follow rank 0's, gradients of parameters that are not compressed are averaged."""

    # whether a forward has run whose gradients will be synchronised
    due = False
    average: DenseAverage | None = None

    def loosen(self) -> None:
        """Leaves it to the program; what averages its gradients knows its parameters, and goes."""
        super().loosen()
        if self.average is not None:
            self.average.close()
            self.average = None

    def trains(self, params: set[int] | None) -> bool:
        """Whether it has any of these parameters (by id; None: of all models)."""
        return self.value is not None and (params is None or any(id(p) in params for p in self.value.parameters()))


class _Served(_Held[torch.optim.Optimizer]):
    """An optimizer that was set up, and the process groups that were made for it; its parameters' hooks hold it weakly."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.groups = Groups()


@shown_as("OnebitStrategy")
class FabricMixin(Adapter):
    """Fabric strategy whose optimizers communicate in one bit per element.

    Give ``fabric.setup`` an optimizer of this package, made by ``fabric.strategy.optimizer(params, lr=..., freeze_step=...)`` or by its
    class; the module is not wrapped. Then the usual loop: ``fabric.backward(loss)``, ``optimizer.step()``. Gradient accumulation
    (``fabric.no_backward_sync``), clipping (``fabric.clip_gradients``), buffers and checkpoints (``fabric.save``, ``fabric.load``, with
    one shard per rank beside the file) mean what they mean with DDP. Callbacks of this package need a Trainer: end the warm-up with
    ``freeze_step`` or ``optimizer.freeze()``.

    No forward waits for other ranks, so that one rank may evaluate alone. Buffers (BatchNorm's statistics) are broadcast from rank 0 at
    the end of a synchronised backward, those of the models that a forward with gradients has gone through since the last one.

    A program may set up one model after another (cross-validation, sweeps). An optimizer that it no longer refers to is let go, with
    its parameters and its connection, at the next ``fabric.setup`` or in the first backward after it, where all ranks agree on it.
    Until then it stays, and every backward averages its gradients too while its steps are dense; ``fabric.strategy.release(optimizer)``
    lets it go at once.

    With several models at a time, say whose loss it is: ``fabric.backward(loss, model=model)``, alike on all ranks. That is the last
    synchronised backward of this model's step, and what other models get from it only accumulates. Without it every backward
    averages the gradients of all, and ``overlap="backward"``, which cannot send twice in a step, stops where a model's gradients or those
    of its ``compress=False`` groups have left before its own backward.

    Arguments that are not named below are those of Fabric's ``DDPStrategy``.

    Args:
        algorithm: as for ``Trainer(strategy=...)``: what ``optimizer()`` makes, and the only kind that ``setup`` takes.
        timeout: bound of every wait for other ranks.
        ranks_per_node: ranks that average first and share the exchange between nodes; None: those of a machine if there are several
            machines, 1: the flat exchange.
        broadcast_buffers: whether buffers follow rank 0's during training, as with DDP.
        other_optimizers: ``"error"`` refuses optimizers that are not of this algorithm; ``"dense"`` trains them as DDP would: after
            backward, gradients of all parameters that no compressed optimizer holds are averaged.
        **others: keywords of ``DistributedDataParallel``: not needed, which an info line says (``find_unused_parameters``, ...), or refused
            with what to write instead.

    Raises:
        ValueError: an unknown algorithm, a keyword of DDP's without effect here, or ``ranks_per_node`` that does not divide the number of
            ranks (at set-up).
        TypeError: an optimizer that is not of this algorithm (at set-up); unknown arguments.

    Example:
        >>> fabric = Fabric(devices=2, strategy="onebit_adam")
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, fabric.strategy.optimizer(model.parameters(), lr=1e-3, freeze_step=1000))
    """

    def __init__(
        self,
        algorithm: str = "onebit_adam",
        *,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        ranks_per_node: int | None = None,
        broadcast_buffers: bool = True,
        other_optimizers: OtherOptimizers = "error",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        **others: Any,
    ) -> None:
        checks.check_options(ranks_per_node, other_optimizers, timeout, broadcast_buffers=broadcast_buffers)
        self._algorithm: Algorithm = find_algorithm(algorithm)
        known = inspect.signature(FabricMixin.__init__).parameters.keys() - {"self", "others"}
        heed_ddp_keywords(others, algorithm=self._algorithm.name, known=known, fabric=True)
        self._ranks_per_node = ranks_per_node
        self._broadcast_buffers = broadcast_buffers
        self._dense = other_optimizers == "dense"
        self._sync = True
        self._unscale: LockstepUnscale | None = None
        self._checkpoints = Checkpoints()
        self._forget()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control: Any = self  # what `fabric.no_backward_sync` asks

    def _forget(self) -> None:
        """Begins with nothing set up."""
        # modules with buffers to share or gradients to average, and optimizers, in the order of set-up, alike on all ranks
        self._models: list[_Model] = []
        self._served: list[_Served] = []
        self._retired: list[_Served] = []  # gone on some rank, so that none can step them any more
        # on all ranks alike; their state can still be saved
        self._released: weakref.WeakSet[OnebitOptimizer] = weakref.WeakSet()
        self._backward_since_set_up = True
        self._names = WeakTensorKeyDictionary()

    @property
    def onebit_optimizers(self) -> list[OnebitOptimizer]:
        """The optimizers that were set up and have not been let go, in this order."""
        return [served.value for served in self._served if isinstance(served.value, OnebitOptimizer)]

    def optimizer(self, params: Any, **kwargs: Any) -> OnebitOptimizer:
        """Makes the optimizer of this strategy's algorithm; ``kwargs`` are arguments of its class."""
        return self._algorithm.optimizer(params, **kwargs)

    # ----- setting up -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connects the processes."""
        with disconnected_at_exit():
            super().setup_environment()
        self._unscale = LockstepUnscale.place(getattr(self.precision, "scaler", None))

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wraps nothing: compares the module over all ranks and gives all of them rank 0's weights and buffers."""
        checks.check_module(module, ValueError)
        self._names.update({p: name for name, p in module.named_parameters()})
        model = _Model(module)
        if connected():
            self._ranks("module set-up").compare(checks.description(module), "module")
            share_state(module, self._broadcast_buffers)
            if self._dense or self._buffers(model):
                self._models.append(model)

        def before(module: torch.nn.Module, *_: Any) -> None:
            # another model stays as it is; of parameters that are in no model, no forward would tell that a loss uses them
            if torch.is_grad_enabled() and (apart := [o for o in self.onebit_optimizers if o.mid_local]):
                own = {id(p) for p in module.parameters()}
                for optimizer in apart:
                    if any(id(p) in own or p not in self._names for p in params_of(optimizer)):
                        optimizer.show_local()

        def after(*_: Any) -> None:
            if torch.is_grad_enabled() and self._sync:
                model.due = True

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Connects an optimizer with its own process group."""
        self._check_optimizer(optimizer)
        if self._served and self._backward_since_set_up:  # this may be the next fold
            self._let_go()
        self._backward_since_set_up = False
        known = next((served for served in self._served if served.value is optimizer), None)
        served = known or _Served(optimizer)
        if connected() and isinstance(optimizer, OnebitOptimizer):
            optimizer.release_communication()
            served.groups.destroy()
            self._join(served.groups, [optimizer], ValueError, parameter_names=self._names)
            # a group ends on one rank before the others have connected: a second set-up must not destroy it by then
            self.barrier()
        if known is None:
            self._served.append(served)
        return optimizer

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if an optimizer cannot be trained, or not beside those that are."""
        name, wanted = type(optimizer).__name__, self._algorithm
        compressed = isinstance(optimizer, OnebitOptimizer)
        fits = optimizer.algorithm == wanted.name if isinstance(optimizer, OnebitOptimizer) else self._dense
        if not fits:
            why = "Fabric converts none" if type(optimizer) in wanted.converts else no_counterpart(optimizer)
            uncompressed = (
                f" To train {name} uncompressed, as DDP would ({why}), import OnebitStrategy from "
                f'lightning_onebit.fabric and give Fabric `OnebitStrategy({wanted.name!r}, other_optimizers="dense")`.'
            )
            raise TypeError(
                f"{name} cannot be trained by the Fabric strategy {wanted.name!r}: give `fabric.setup` `fabric.strategy.optimizer(params, "
                f"...)`, or `lightning_onebit.{wanted.optimizer.__name__}(params, ...)`.{'' if compressed else uncompressed}"
            )
        mine = {id(p) for p in params_of(optimizer)}
        for other in (served.value for served in self._served if served.value is not None):
            both = [p for p in params_of(other) if id(p) in mine]
            if both and isinstance(other, OnebitOptimizer) != compressed:
                raise ValueError(
                    f"{self._names.get(both[0], 'a parameter')} belongs to {name} and {type(other).__name__}, of which one is compressed, "
                    "so its gradients stay local, and the other one needs averaged gradients: give it to one of them"
                )
        if not isinstance(optimizer, OnebitOptimizer) or not wanted.warm_up:
            return
        if optimizer.phase is Phase.WARMUP and optimizer.freeze_step is None:
            rank_zero_info(f"{name} has no freeze step: its steps stay dense until `optimizer.freeze()` is called.")

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets go of an optimizer that has done its work. Collective.

        No backward averages its gradients any more, its process group is gone, and the strategy refers neither to it nor to its
        parameters. Needed by a program that cannot wait for the next ``fabric.setup``, or that still refers to the optimizer (Fabric itself
        refers to every ``LightningModule`` and its optimizers). A step that has begun is forgotten; state stays, and
        ``fabric.setup_optimizers`` takes the optimizer again.

        Args:
            optimizer: what ``fabric.setup`` was given or has returned; alike on all ranks.

        Raises:
            ValueError: not set up, or let go before.
            PlanMismatch: ranks give different optimizers.
        """
        optimizer = unwrap(optimizer)
        number = next((i for i, served in enumerate(self._served) if served.value is optimizer), None)
        if number is None:
            raise ValueError(
                f"{type(optimizer).__name__} is none of the {len(self._served)} optimizers that this strategy serves: give one that "
                "`fabric.setup` has set up, once"
            )
        if connected():
            self._ranks("release").compare([f"optimizer {number} of {len(self._served)}"], "optimizer to release")
        served = self._served.pop(number)
        if isinstance(optimizer, OnebitOptimizer):
            if optimizer.exchanging:  # what backward has sent comes in before the group goes
                optimizer.abandon_step()
            optimizer.show_consensus()
            optimizer.release_communication()
            self._released.add(optimizer)
        served.groups.destroy()

    def _let_go(self) -> None:
        """Finds out which optimizers and modules the program has let go of, and lets them go. Collective.

        Garbage is collected at each rank's own time, but a backward must concern the same optimizers on all. So the strategy holds them,
        and loosens its grip only here: one that is gone on any rank, which then cannot step, is served no more; its groups go when it is
        gone on all.
        """
        served, retired, models = self._served, self._retired, self._models
        everything: list[_Held[Any]] = [*served, *retired, *models]
        for held in everything:
            held.loosen()
        gc.collect()
        alive = [held.hold() for held in everything]
        votes = self._ranks("set-up").share(alive).bool() if connected() else torch.tensor([alive])
        everywhere = dict(zip(everything, votes.all(0).tolist(), strict=True))
        anywhere = dict(zip(everything, votes.any(0).tolist(), strict=True))
        self._models = [model for model in models if everywhere[model]]
        self._served = [one for one in served if everywhere[one]]
        self._retired = [one for one in (*served, *retired) if anywhere[one] and one not in self._served]
        for one in self._retired:
            one.loosen()
        for one in (*served, *retired):
            if not anywhere[one]:
                one.groups.destroy()

    # ----- training ---------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Runs backward; afterwards gradients are averaged where the next step is dense.

        With a module, only those of optimizers that train any of its parameters; for all others the backward is one that only
        accumulates.
        """
        if self._sync and not self._backward_since_set_up:
            self._backward_since_set_up = True
            # by now `model, optimizer = fabric.setup(...)` has replaced those of the fold before
            if len(self._served) > 1:
                self._let_go()
        own = None if module is None else {id(p) for p in module.parameters()}
        training = [optimizer for optimizer in self.onebit_optimizers if optimizer.trains]
        concerned = [o for o in training if self._sync and (own is None or any(id(p) in own for p in params_of(o)))]
        averages = [self._average(m) for m in self._models if self._sync and self._dense and m.trains(own)]
        with averaged(training, concerned, averages, last=module is not None):
            super().backward(tensor, module, *args, **kwargs)
        if self._sync and self._models:
            self._share_buffers(module)

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Within it gradients only accumulate."""
        before = self._sync
        self._sync = before and not enabled
        try:
            yield
        finally:
            self._sync = before

    def _average(self, model: _Model) -> DenseAverage:
        if model.average is None:
            assert model.value is not None
            ranks = self._ranks("dense averaging")
            # without overlap: several models share the world, and gradients may land in another order on other ranks
            model.average = DenseAverage(
                model.value, lambda: self.onebit_optimizers, lambda: ranks.transport, overlap=False
            )
        return model.average

    def _buffers(self, model: _Model) -> list[Tensor]:
        return buffers_of(model.value) if self._broadcast_buffers and model.value is not None else []

    def _share_buffers(self, module: torch.nn.Module | None) -> None:
        """Gives all ranks rank 0's buffers of the models whose backward this was. Collective.

        In a backward, which all ranks run, and not in the next forward, as DDP: a forward may be one that a single rank runs.
        """
        models = [model for model in self._models if self._buffers(model)]
        if module is not None:
            own = {id(buffer) for buffer in module.buffers()}
            models = [model for model in models if any(id(buffer) in own for buffer in self._buffers(model))]
        elif len(models) > 1:
            # a rank may have run a forward by itself
            due = self._ranks("backward").share([model.due for model in models]).bool().all(0).tolist()
            models = [model for model, everywhere in zip(models, due, strict=True) if everywhere]
        for model in models:
            assert model.value is not None
            model.due = False
            broadcast_buffers(model.value)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Fabric's; afterwards the module shows the model that all ranks share (0/1 Adam between synchronisations)."""
        result = super().optimizer_step(optimizer, **kwargs)
        if self._unscale is not None:
            self._unscale.count_skipped(optimizer)
        if isinstance(plain := unwrap(optimizer), OnebitOptimizer):
            plain.show_consensus()
        return result

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm over all ranks, by the same factor on each (``OnebitOptimizer.clip_grad_norm_``).

        Raises:
            ValueError: another norm than the 2-norm.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; all ranks raise alike.
        """
        norm: Tensor
        if not isinstance(unwrap(optimizer), OnebitOptimizer):  # its gradients have been averaged
            norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
            return norm
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type!r}: gradients of several ranks are clipped by their 2-norm only")
        self.precision.unscale_gradients(optimizer)
        norm = optimizer.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the norm of the gradients is {float(norm)}; give error_if_nonfinite=False to let the step be skipped"
            )
        return norm

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Any, clip_val: float) -> None:
        """Fabric's.

        Raises:
            ValueError: gradients have been sent by then (``overlap="backward"``).
        """
        if isinstance(compressed := unwrap(optimizer), OnebitOptimizer):
            compressed.check_clipping_by_value(clip_val)
        super().clip_gradients_value(module, optimizer, clip_val)

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Fabric's; what differs by rank is written by every rank beside the file. Collective.

        Raises:
            ShardError: on every rank, if any of them cannot write its part; an older checkpoint of this name stays whole.
            TornStep: the last step of an optimizer that is saved, or whose model is, did not end on this rank; no file is touched.
        """
        saved, save = self._optimizers_in(state), super().save_checkpoint
        modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
        params = {id(p) for module in modules for p in module.parameters()}
        for optimizer in self.onebit_optimizers:
            if optimizer in saved or any(id(p) in params for p in params_of(optimizer)):
                optimizer.check_whole()

        def publish(more: dict[str, Any]) -> None:
            save(path, {**state, **more}, *args, **kwargs)
            if not saved:
                self.barrier()  # until the file is there: it is rank 0's, shards may be another node's to remove

        # once a forward or backward has followed on the last step, 0/1 Adam's models show a rank's own weights
        with consensus(self.onebit_optimizers):
            self._checkpoints.save(self, str(path), saved, publish)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Fabric's; completes the optimizers with what lies beside the file. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        loaded = self._optimizers_in(state)
        if loaded:
            self._checkpoints.restore(self, str(path), rest, loaded)
        for optimizer in loaded:
            optimizer.show_consensus()
        rest.pop(STAMP_KEY, None)
        return rest

    def _optimizers_in(self, state: Any) -> list[OnebitOptimizer]:
        """The compressed optimizers in what is saved or loaded, by their keys; alike on all ranks."""
        known = {id(optimizer): optimizer for optimizer in [*self.onebit_optimizers, *self._released]}
        items = sorted(state.items(), key=lambda item: str(item[0])) if isinstance(state, dict) else []
        return list(dict.fromkeys(known[id(value)] for _, value in items if id(value) in known))

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: optimizers, groups, names of parameters."""
        mine = ("_served", "_retired", "_released", "_names", "_models")
        return {key: value for key, value in vars(self).items() if key not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
