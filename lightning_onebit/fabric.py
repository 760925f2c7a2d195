"""The same optimizers under Lightning Fabric: ``Fabric(strategy="onebit_adam")``.

``OnebitStrategy`` is that of the Fabric the program has imported, ``lightning.fabric`` or ``lightning_fabric``. Everything that
trains is below: the optimizers, their exchange, their checkpoints. What is here connects them to Fabric's loop.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.utils import _sync_module_states
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_onebit._choices import AlgorithmName, OtherOptimizers, StartMethod, choices
from lightning_onebit._ddp_keywords import heed_ddp_keywords
from lightning_onebit._names import shown_as
from lightning_onebit._say import rank_zero_info
from lightning_onebit._trees import FABRICS
from lightning_onebit.checkpoint import (
    STAMP_KEY,
    GoodCheckpoints,
    ShardError,
    Stamp,
    durable,
    remove_shards,
    restarted,
    restore_residuals,
    save_shards,
    shard_ids,
)
from lightning_onebit.comm import (
    DEFAULT_TIMEOUT,
    ByteLedger,
    Reducer,
    Topology,
    Transport,
    handshake,
    share_values,
    torn_down_last,
)
from lightning_onebit.engine import OnebitOptimizer, Phase
from lightning_onebit.engine.options import check_choice, check_integer
from lightning_onebit.registry import Algorithm, find_algorithm, register
from lightning_onebit.strategy import (
    _BROADCAST_BYTES,
    _BUCKET_BYTES,
    _asynchronous,
    _check_module,
    _connected,
    _describe,
    _disconnect,
    _ignored,
    _LockstepUnscale,
    _no_counterpart,
    _parameters,
    _unwrap,
    _world,
)

if TYPE_CHECKING:
    _Base: Any  # Fabric's DDPStrategy of either tree
else:
    _Base = object


@shown_as("OnebitStrategy")
class FabricMixin(_Base):
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

    Args:
        algorithm: as for ``Trainer(strategy=...)``: what ``optimizer()`` makes, and the only kind that ``setup`` takes.
        timeout: bound of every wait for other ranks.
        ranks_per_node: ranks that average first and share the exchange between nodes; None: those of a machine if there are several
            machines, 1: the flat exchange.
        broadcast_buffers: whether buffers follow rank 0's during training, as with DDP.
        other_optimizers: ``"error"`` refuses optimizers that are not of this algorithm; ``"dense"`` trains them as DDP would: after
            backward, gradients of all parameters that no compressed optimizer holds are averaged.
        accelerator: see Fabric's ``DDPStrategy``, like all that follow.
        parallel_devices: devices of this node.
        cluster_environment: how processes find each other.
        checkpoint_io: reads and writes checkpoints.
        precision: numeric precision.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None: by device.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
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
        algorithm: AlgorithmName = "onebit_adam",
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
        self._algorithm: Algorithm = find_algorithm(algorithm)
        known = inspect.signature(FabricMixin.__init__).parameters.keys() - {"self", "others"}
        heed_ddp_keywords(others, algorithm=self._algorithm.name, known=known, fabric=True)
        check_integer("ranks_per_node", ranks_per_node, least=1, optional=True)
        if not isinstance(broadcast_buffers, bool):
            raise TypeError(f"broadcast_buffers={broadcast_buffers!r} must be True or False")
        self._ranks_per_node = ranks_per_node
        check_choice("other_optimizers", other_optimizers, choices(OtherOptimizers))
        self._broadcast_buffers = broadcast_buffers
        self._other_optimizers = other_optimizers
        # modules with buffers to share or gradients to average, in the order of set-up, alike on all ranks
        self._models: list[_Model] = []
        self._served: list[_Served] = []  # in the order of set-up, alike on all ranks
        self._retired: list[_Served] = []  # gone on some rank, so that none can step them any more
        # on all ranks alike; their state can still be saved
        self._released: weakref.WeakSet[OnebitOptimizer] = weakref.WeakSet()
        self._settle_due = False
        self._good = GoodCheckpoints()
        self._names = WeakTensorKeyDictionary()
        self._sync = True
        self._unscale: _LockstepUnscale | None = None
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
        self._backward_sync_control: Any = _SyncControl(self)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under the names of all algorithms and start methods."""
        register(cls, strategy_registry)

    @property
    def onebit_optimizers(self) -> list[OnebitOptimizer]:
        """The optimizers that were set up and have not been let go, in this order."""
        return [s.optimizer for s in self._served if isinstance(s.optimizer, OnebitOptimizer)]

    def optimizer(self, params: Any, **kwargs: Any) -> OnebitOptimizer:
        """Makes the optimizer of this strategy's algorithm.

        Args:
            params: parameters or parameter groups.
            **kwargs: arguments of the optimizer's class.
        """
        return self._algorithm.optimizer(params, **kwargs)

    # ----- setting up -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connects the processes."""
        connected = _connected()
        super().setup_environment()
        if _connected() and not connected:
            atexit.register(_disconnect)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            self._unscale = scaler.unscale_ = _LockstepUnscale(scaler)

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wraps nothing: compares the module over all ranks and gives all of them rank 0's weights and buffers."""
        _check_module(module, ValueError)
        self._names.update({p: name for name, p in module.named_parameters()})
        model = None
        if _connected():
            handshake(self._everyone("module set-up"), _describe(module), self.root_device, "module")
            ignored = _ignored(module)
            _sync_module_states(
                module, _world(), _BROADCAST_BYTES, 0, ignored, broadcast_buffers=self._broadcast_buffers
            )
            average = _Average(self._everyone("dense averaging")) if self._other_optimizers == "dense" else None
            model = _Model(module, ignored, self._broadcast_buffers, average)
            if model.buffers() or average is not None:
                self._models.append(model)

        def before(module: torch.nn.Module, *_: Any) -> None:
            # another model stays as it is; of parameters that are in no model, no forward would tell that a loss uses them
            if torch.is_grad_enabled() and (apart := [o for o in self.onebit_optimizers if o.mid_local]):
                own = {id(p) for p in module.parameters()}
                for optimizer in apart:
                    if any(id(p) in own or p not in self._names for p in _parameters([optimizer])):
                        optimizer.show_local()

        def after(*_: Any) -> None:
            if model is not None and torch.is_grad_enabled() and self._sync:
                model.due = True

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Connects an optimizer with its own process group."""
        self._check_optimizer(optimizer)
        # a backward since the last set-up: this may be the next fold
        if self._served and not self._settle_due:
            self._settle()
        self._settle_due = True
        known = next((served for served in self._served if served.optimizer is optimizer), None)
        groups: list[Any] = []
        if _connected() and isinstance(optimizer, OnebitOptimizer):
            limit = timedelta(seconds=optimizer.exchange.timeout)
            ranks_per_node = self._node_size()
            optimizer.release_communication()
            optimizer.configure_communication(
                dist.new_group(timeout=self._timeout),
                ranks_per_node=ranks_per_node,
                timeout=min(self._timeout, limit) if self._timeout is not None else limit,
                parameter_names=self._names,
            )
            topology = optimizer.topology
            groups = [topology.group]
            if topology.hierarchical:
                groups += [topology.intra_group, topology.inter_group]
        if known is None:
            self._served.append(_Served(optimizer, groups))
        else:
            known.destroy_groups()
            known.keep_groups(groups)
        return optimizer

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if an optimizer cannot be trained, or not beside those that are."""
        name, wanted = type(optimizer).__name__, self._algorithm
        compressed = isinstance(optimizer, OnebitOptimizer)
        if isinstance(optimizer, OnebitOptimizer):
            fits = optimizer.algorithm == wanted.name
            if fits and wanted.warm_up and optimizer.phase is Phase.WARMUP and optimizer.freeze_step is None:
                rank_zero_info(f"{name} has no freeze step: its steps stay dense until `optimizer.freeze()` is called.")
        else:
            fits = self._other_optimizers == "dense"
        if not fits:
            uncompressed = (
                f" To train {name} uncompressed, as DDP would ({_no_counterpart(optimizer)}), import OnebitStrategy from "
                f'lightning_onebit.fabric and give Fabric `OnebitStrategy({wanted.name!r}, other_optimizers="dense")`.'
            )
            raise TypeError(
                f"{name} cannot be trained by the Fabric strategy {wanted.name!r}: give `fabric.setup` `fabric.strategy.optimizer(params, "
                f"...)`, or `lightning_onebit.{wanted.optimizer.__name__}(params, ...)`.{'' if compressed else uncompressed}"
            )
        mine = {id(p) for p in _parameters([optimizer])}
        for other in (served.optimizer for served in self._served):
            if other is None or isinstance(other, OnebitOptimizer) == compressed:
                continue
            for p in _parameters([other]):
                if id(p) in mine:
                    raise ValueError(
                        f"{self._names.get(p, 'a parameter')} belongs to {name} and {type(other).__name__}, of which one is compressed, "
                        "so its gradients stay local, and the other one needs averaged gradients: give it to one of them"
                    )

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
        optimizer = _unwrap(optimizer)
        number = next((i for i, served in enumerate(self._served) if served.optimizer is optimizer), None)
        if number is None:
            raise ValueError(
                f"{type(optimizer).__name__} is none of the {len(self._served)} optimizers that this strategy serves: give one that "
                "`fabric.setup` has set up, once"
            )
        if _connected():
            description = [f"optimizer {number} of {len(self._served)}"]
            handshake(self._everyone("release"), description, self.root_device, "optimizer to release")
        served = self._served.pop(number)
        if isinstance(optimizer, OnebitOptimizer):
            if optimizer.exchanging:  # what backward has sent comes in before the group goes
                optimizer.abandon_step()
            optimizer.show_consensus()
            optimizer.release_communication()
            self._released.add(optimizer)
        served.destroy_groups()

    def _settle(self) -> None:
        """Finds out which optimizers and modules the program has let go of, and lets them go. Collective.

        Garbage is collected at each rank's own time, but a backward must concern the same optimizers on all. So the strategy holds them,
        and loosens its grip only here: one that is gone on any rank, which then cannot step, is served no more; its groups go when it is
        gone on all.
        """
        everyone, count = [*self._served, *self._retired], len(self._served)
        held: list[_Served | _Model] = [*everyone, *self._models]
        for part in held:
            part.loosen()
        gc.collect()
        alive = [part.hold() for part in held]
        everywhere = anywhere = alive
        if _connected():
            flags = torch.tensor(alive, dtype=torch.uint8, device=self.root_device)
            rows = share_values(self._everyone("set-up"), flags, "what is still in use").bool()
            everywhere, anywhere = rows.all(0).tolist(), rows.any(0).tolist()
        self._models = [m for m, kept in zip(self._models, everywhere[len(everyone) :], strict=True) if kept]
        everywhere, anywhere = everywhere[: len(everyone)], anywhere[: len(everyone)]
        stays = [i < count and alike for i, alike in enumerate(everywhere)]
        self._served = [served for i, served in enumerate(everyone) if stays[i]]
        self._retired = [served for i, served in enumerate(everyone) if anywhere[i] and not stays[i]]
        for served in self._retired:
            served.loosen()
        for i, served in enumerate(everyone):
            if not anywhere[i]:
                served.destroy_groups()

    def _node_size(self) -> int:
        world = dist.get_world_size()
        size = self._ranks_per_node or (self.num_processes if self.num_nodes > 1 else 1)
        if world % size:
            raise ValueError(f"ranks_per_node={size} does not divide the {world} ranks of this run: give a divisor")
        return size if size < world else 1

    # ----- training ---------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Runs backward; afterwards gradients are averaged where the next step is dense.

        With a module, only those of optimizers that train any of its parameters; for all others the backward is one that only
        accumulates.
        """
        if self._sync and self._settle_due:
            self._settle_due = False
            # by now `model, optimizer = fabric.setup(...)` has replaced those of the fold before
            if len(self._served) > 1:
                self._settle()
        training = [optimizer for optimizer in self.onebit_optimizers if optimizer.trains]
        concerned = training if self._sync else []
        if module is not None:
            own = {id(p) for p in module.parameters()}
            concerned = [o for o in concerned if any(id(p) in own for p in _parameters([o]))]
        for optimizer in training:
            optimizer.begin_backward(optimizer in concerned)
        super().backward(tensor, module, *args, **kwargs)
        if module is not None:
            # before the next model's: a rank that waits for these, in the midst of its backward, would not come to those
            for optimizer in concerned:
                optimizer.send_gradients()
        for optimizer in concerned:
            optimizer.sync_gradients()
        if not self._sync or not self._models:
            return
        compressed = {id(p) for p in _parameters(self.onebit_optimizers)}
        for model in self._models:
            if model.average is not None and (module is None or any(id(p) in own for p in model.parameters())):
                model.average({name: p for p, name in model.parameters().items() if id(p) not in compressed})
        self._share_buffers(module)

    def _share_buffers(self, module: torch.nn.Module | None) -> None:
        """Gives all ranks rank 0's buffers of the models whose backward this was. Collective.

        In a backward, which all ranks run, and not in the next forward, as DDP: a forward may be one that a single rank runs.
        """
        models = [model for model in self._models if model.buffers()]
        if module is not None:
            own = {id(buffer) for buffer in module.buffers()}
            models = [model for model in models if any(id(buffer) in own for buffer in model.buffers())]
        elif len(models) > 1:
            # a rank may have run a forward by itself
            due = torch.tensor([model.due for model in models], dtype=torch.uint8, device=self.root_device)
            rows = share_values(self._everyone("backward"), due, "whose buffers are to be shared").bool()
            models = [model for model, everywhere in zip(models, rows.all(0).tolist(), strict=True) if everywhere]
        for model in models:
            model.broadcast()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Fabric's; afterwards the module shows the model that all ranks share (0/1 Adam between synchronisations)."""
        result = super().optimizer_step(optimizer, **kwargs)
        if self._unscale is not None and self._unscale.overflowed(optimizer):
            optimizer.skip_step()
        if isinstance(plain := _unwrap(optimizer), OnebitOptimizer):
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
        if not isinstance(_unwrap(optimizer), OnebitOptimizer):  # its gradients have been averaged
            averaged: Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
            )
            return averaged
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type!r}: gradients of several ranks are clipped by their 2-norm only")
        self.precision.unscale_gradients(optimizer)
        norm: Tensor = optimizer.clip_grad_norm_(max_norm)
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
        if isinstance(compressed := _unwrap(optimizer), OnebitOptimizer):
            compressed.check_clipping_by_value(clip_val)
        super().clip_gradients_value(module, optimizer, clip_val)

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Fabric's; what differs by rank is written by every rank beside the file. Collective.

        Raises:
            ShardError: on every rank, if any of them cannot write its part; an older checkpoint of this name stays whole.
            TornStep: the last step of an optimizer that is saved, or whose model is, did not end on this rank; no file is touched.
        """
        full = self._optimizers_in(state)
        for optimizer in self.onebit_optimizers:
            if optimizer in full or self._concerns(optimizer, state):
                optimizer.check_whole(weights_only=optimizer not in full)
        # once a forward or backward has followed on the last step, 0/1 Adam's models show a rank's own weights
        with contextlib.ExitStack() as shown:
            for optimizer in self.onebit_optimizers:
                shown.enter_context(optimizer.consensus())
            self._save_checkpoint(path, state, *args, **kwargs)

    def _save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        saved = self._optimizers_in(state)
        save: Callable[..., None] = super().save_checkpoint
        if not saved:
            older = shard_ids(str(path))
            save(path, state, *args, **kwargs)
            self.barrier()  # until the file is there: it is rank 0's, the shards may be another node's to remove
            self._sweep(str(path), older)
            return
        states = [optimizer.residual_state_dict() for optimizer in saved]
        transport = self._everyone("checkpoint")
        path, chosen = self.broadcast((str(path), uuid.uuid4().hex))
        older = shard_ids(path).difference([chosen])  # other ranks may have begun to write
        stamp = Stamp(chosen, transport.size, any(part["tensors"] for part in states))
        save_shards(
            path,
            stamp,
            transport,
            states,
            self.root_device,
            lambda: save(path, {**state, STAMP_KEY: stamp.as_dict()}, *args, **kwargs),
            cleans=self.local_rank == 0,
            asynchronous=_asynchronous(self.checkpoint_io),
        )
        self._sweep(path, older)
        self._good.add(path, saved)

    @staticmethod
    def _concerns(optimizer: OnebitOptimizer, state: Any) -> bool:
        """Whether any of an optimizer's parameters is in what is saved."""
        values = state.values() if isinstance(state, dict) else [state]
        params = {id(p) for value in values if isinstance(value, torch.nn.Module) for p in value.parameters()}
        return any(id(p) in params for p in _parameters([optimizer]))

    @property
    def checkpoint_io(self) -> Any:
        """The checkpoint plugin; Fabric's own ``TorchCheckpointIO`` replaces local files in one move (``DurableSave``)."""
        return durable(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        super(FabricMixin, type(self)).checkpoint_io.fset(self, checkpoint_io)  # type: ignore[attr-defined]

    def _optimizers_in(self, state: Any) -> list[OnebitOptimizer]:
        """The compressed optimizers in what is saved or loaded, by their keys; alike on all ranks."""
        known = {id(optimizer): optimizer for optimizer in [*self.onebit_optimizers, *self._released]}
        items = sorted(state.items(), key=lambda item: str(item[0])) if isinstance(state, dict) else []
        return list(dict.fromkeys(known[id(value)] for _, value in items if id(value) in known))

    def _sweep(self, path: str, older: set[str]) -> None:
        """Removes the shards of checkpoints that the one just saved has overwritten, on one rank of every node."""
        # An asynchronous plugin may not have overwritten them yet, and there is no end of training to wait for.
        if self.local_rank == 0 and not _asynchronous(self.checkpoint_io):
            remove_shards(path, older)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Fabric's; completes the optimizers with what lies beside the file. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        loaded = self._optimizers_in(state)
        if loaded:
            try:
                stamp = Stamp.of(rest)
                said = None
                if stamp is not None and stamp.shards:
                    transport = self._everyone("checkpoint")
                    said = restore_residuals(str(path), stamp, transport, loaded, self.root_device)
                elif stamp is None and restarted(loaded):
                    said = "residuals are not in the checkpoint and start from zero"
                if said is not None:
                    rank_zero_info(f"{path}: {said}.")
            except ShardError as error:
                rank_zero_warn(f"resuming without residuals, which start from zero: {error}")
            for optimizer in loaded:
                optimizer.show_consensus()
            self._good.add(str(path), loaded)
        rest.pop(STAMP_KEY, None)
        return rest

    def _everyone(self, name: str) -> Transport:
        """All ranks, for small rounds that neither training nor its accounts know of."""
        topology = Topology.create(None, timeout=self._timeout)
        return Transport(topology, ByteLedger(), self._timeout or DEFAULT_TIMEOUT, name)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: optimizers, groups, names of parameters."""
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("_served", "_retired", "_released", "_names", "_models")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state,
            _served=[],
            _retired=[],
            _released=weakref.WeakSet(),
            _names=WeakTensorKeyDictionary(),
            _models=[],
        )


class _Model:
    """A module that was set up: its buffers follow rank 0's, gradients of parameters that are not compressed are averaged."""

    def __init__(
        self, module: torch.nn.Module, ignored: set[str], shares_buffers: bool, average: _Average | None
    ) -> None:
        self._module: torch.nn.Module | None = module
        self._weak = weakref.ref(module)
        self._ignored = ignored
        self._shares_buffers = shares_buffers
        self.average = average
        # whether a forward has run whose gradients will be synchronised
        self.due = False

    def loosen(self) -> None:
        """Leaves the module to the program."""
        self._module = None
        if self.average is not None:
            self.average.close()

    def hold(self) -> bool:
        """Holds the module again, if it is still there."""
        self._module = self._weak()
        return self._module is not None

    def parameters(self) -> dict[torch.nn.Parameter, str]:
        """With their names."""
        named = self._module.named_parameters() if self._module is not None else ()
        return {p: name for name, p in named if name not in self._ignored}

    def buffers(self) -> list[Tensor]:
        """Looked up every time: modules may assign a new tensor to a buffer."""
        named = self._module.named_buffers() if self._module is not None and self._shares_buffers else ()
        return [buffer for name, buffer in named if name not in self._ignored]

    def broadcast(self) -> None:
        """Gives all ranks rank 0's buffers. Collective."""
        self.due = False
        # .data: another backward of this forward may follow, and autograd would take its BatchNorm's statistics for changed
        dist._broadcast_coalesced(_world(), [buffer.data for buffer in self.buffers()], _BROADCAST_BYTES, 0)


class _Average:
    """Averages gradients after backward, those of parameters that no compressed optimizer holds."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._reducer: Reducer | None = None

    def __call__(self, named: dict[str, torch.nn.Parameter]) -> None:
        """Makes ``.grad`` of the trained ones the average over ranks. Collective."""
        known = [] if self._reducer is None else self._reducer.params
        ids = {id(p) for p in known}
        # once averaged, always: the reducer leaves alone what has no gradient
        wanted = {name: p for name, p in named.items() if p.requires_grad or id(p) in ids}
        for name, p in wanted.items():
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(
                    f"{name} has a sparse gradient; the strategy averages dense gradients only (build the layer with sparse=False)"
                )
        if [id(p) for p in wanted.values()] != [id(p) for p in known]:
            self.close()
            # without overlap: several models share the transport, and gradients may land in another order on other ranks
            self._reducer = Reducer(list(wanted.values()), self._transport, _BUCKET_BYTES, overlap=False)
        if self._reducer is not None and any(p.requires_grad for p in wanted.values()):
            self._reducer.finish()

    def close(self) -> None:
        """Gives the buffers up."""
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer.close()


class _Served:
    """An optimizer that was set up, and the process groups that were made for it."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[Any]) -> None:
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self._weak = weakref.ref(optimizer)
        self.keep_groups(groups)

    def loosen(self) -> None:
        """Leaves the optimizer to the program (its parameters' hooks hold it weakly, and go with it)."""
        self.optimizer = None

    def hold(self) -> bool:
        """Holds the optimizer again, if it is still there."""
        self.optimizer = self._weak()
        return self.optimizer is not None

    def keep_groups(self, groups: list[Any]) -> None:
        """Remembers groups to be destroyed; torch holds them until then, and whoever holds them longer keeps gloo's threads."""
        self._groups = [weakref.ref(group) for group in groups]

    def destroy_groups(self) -> None:
        """Destroys the groups, on all ranks alike, as far as the program has not done so."""
        groups = [group for ref in self._groups if (group := ref()) is not None]
        self._groups = []
        with torn_down_last(list(groups)):
            while groups:
                group = groups.pop()
                if _connected() and group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)
                del group


class _SyncControl:
    """What ``fabric.no_backward_sync`` asks."""

    def __init__(self, strategy: FabricMixin) -> None:
        self._strategy = strategy

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Within it gradients only accumulate."""
        before = self._strategy._sync
        self._strategy._sync = before and not enabled
        try:
            yield
        finally:
            self._strategy._sync = before


def __getattr__(name: str) -> Any:
    if name != "OnebitStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded = [package for package in FABRICS if package in sys.modules]
    for package in [*loaded, *FABRICS]:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            continue
        return importlib.import_module(FABRICS[package]).OnebitStrategy
    raise ModuleNotFoundError("lightning_onebit.fabric needs Fabric: install `lightning` or `lightning-fabric`.")
