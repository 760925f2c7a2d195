"""The Lightning adapter: process groups, averaging around backward, buffers, clipping, conversion, checkpoints.

Everything is in :class:`OnebitMixin`, which imports no Lightning class at run time. ``lightning_onebit.lightning`` and
``lightning_onebit.pytorch_lightning`` bind it to the two Lightning trees.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parameter import is_lazy

from lightning_onebit._choices import AlgorithmName, OtherOptimizers, StartMethod, choices
from lightning_onebit._ddp_keywords import DDP_KEYWORDS, explain_missing_wrapper, heed_ddp_keywords
from lightning_onebit._names import shown_as
from lightning_onebit._say import rank_zero_info
from lightning_onebit._trees import BOUND_MODULES, PACKAGES, TREES, tree_of
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
    disconnect,
    handshake,
    torn_down_last,
)
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer, Phase
from lightning_onebit.engine.convert import convert_adam, obstacle, repoint_schedulers, stand_down, stand_in
from lightning_onebit.engine.layout import TRAINABLE_DTYPES
from lightning_onebit.engine.options import arguments_text, check_choice, check_integer
from lightning_onebit.engine.whole import signals_held
from lightning_onebit.registry import (
    Algorithm,
    check_options,
    find_algorithm,
    option_parameters,
    option_texts,
    register,
    when_algorithms_change,
)

if TYPE_CHECKING:
    _Base: Any  # a DDPStrategy of either tree
else:
    _Base = object

log = logging.getLogger("lightning_onebit")

# As DistributedDataParallel: how much one broadcast carries, and how large a bucket of dense averaging is.
_BROADCAST_BYTES = 250 * 2**20
_BUCKET_BYTES = 25 * 2**20
# An asynchronous plugin may still be writing this many checkpoints of the same name: their shards stay.
_ASYNC_GENERATIONS = 3


@shown_as("OnebitStrategy")
class OnebitMixin(_Base):
    """Data-parallel training whose optimizers communicate in one bit per element, without wrapping the module.

    The strategy owns the process groups (one per compressed optimizer), compares the model of all ranks and broadcasts rank 0's
    weights and buffers before training, keeps buffers as DistributedDataParallel does, averages gradients densely while an optimizer
    asks for it (overlapped with backward), and lets the optimizer's ``step()`` do the compressed exchange afterwards.

    ``configure_optimizers`` returns an optimizer of this package, best made by ``self.trainer.strategy.optimizer(params, lr=...)``,
    which knows the strategy's options. A plain ``torch.optim.Adam`` or ``AdamW`` is converted. Where nothing says when the dense
    warm-up ends, ``VarianceFreeze()`` is added.

    Args:
        algorithm: ``"onebit_adam"``, ``"onebit_lamb"``, ``"zero_one_adam"`` or ``"binsgdm"`` (alias ``"birder"``).
        accelerator: see Lightning's ``DDPStrategy``, as for all arguments up to ``start_method``.
        parallel_devices: devices of this node.
        cluster_environment: how processes find each other.
        checkpoint_io: reads and writes checkpoints.
        precision_plugin: numeric precision.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None: by device.
        timeout: bound of every wait for other ranks. A smaller ``timeout`` of an optimizer (seconds) counts for its exchange.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        other_optimizers: ``"error"`` refuses optimizers that cannot be compressed; ``"dense"`` trains them exactly as DDP would.
        convert_optimizers: whether a plain Adam or AdamW becomes the algorithm's optimizer.
        broadcast_buffers: whether buffers follow rank 0's during training, as with DDP.
        overlap_dense: whether dense averaging overlaps with backward; False for models that run a parameter's backward hooks more
            than once in a backward (re-entrant activation checkpointing). It begins after backward where the module has a
            ``backward()`` of its own.
        ranks_per_node: how many consecutive ranks average first and share the work of the exchange between nodes. None: those of a node if
            there are several nodes with several ranks each; 1: the flat exchange. (One machine can play several nodes.)
        strict_residuals: whether resuming raises when what differs by rank (residuals) is missing or damaged, or, as by default,
            warns and goes on with residuals that start from zero.
        exchange: how ranks exchange, see ``ExchangeOptions``.
        **options: options of the algorithm (``freeze_step``, ``max_grad_norm``, ...; see ``AdamOptions`` and the like), and keywords of
            ``DistributedDataParallel``: not needed, which an info line says (``find_unused_parameters``, ...), or refused by an error
            that says what to write instead (``ddp_comm_hook``, ``bucket_cap_mb``, ...).

    Raises:
        TypeError: an option has the wrong type, or nobody knows it.
        ValueError: an option is out of range, or one that the algorithm does not have, or of DDP's and without effect here.
        MisconfigurationException: (when fitting starts) an optimizer that cannot be trained, or an option that could not take effect.

    Example:
        >>> Trainer(devices=2, strategy=OnebitStrategy(freeze_step=1000, max_grad_norm=1.0))
    """

    optimizers: Any  # the base class's property
    # What the binding modules fill in with classes of their tree.
    _misconfiguration: ClassVar[type[Exception]]
    _freeze_callback: ClassVar[type[Any]]
    _final_callback: ClassVar[type[Any]]

    def __init__(
        self,
        algorithm: AlgorithmName = "onebit_adam",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        *,
        other_optimizers: OtherOptimizers = "error",
        convert_optimizers: bool = True,
        broadcast_buffers: bool = True,
        overlap_dense: bool = True,
        ranks_per_node: int | None = None,
        strict_residuals: bool = False,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        self._algorithm: Algorithm = find_algorithm(algorithm)
        known = option_parameters().keys()
        heed_ddp_keywords(
            {name: value for name, value in options.items() if name not in known},
            algorithm=self._algorithm.name,
            known={*inspect.signature(OnebitMixin.__init__).parameters} - {"self", *DDP_KEYWORDS},
        )
        self._options = {name: value for name, value in options.items() if name in known and value is not None}
        self._exchange_options = exchange
        check_options(self._algorithm, self._options, exchange)
        if exchange is not None and exchange.process_group is not None:
            raise ValueError(
                "process_group of the exchange: the strategy makes process groups of all ranks by itself; leave it out"
            )
        check_choice("other_optimizers", other_optimizers, choices(OtherOptimizers))
        flags = {
            "convert_optimizers": convert_optimizers,
            "broadcast_buffers": broadcast_buffers,
            "overlap_dense": overlap_dense,
            "strict_residuals": strict_residuals,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
        check_integer("ranks_per_node", ranks_per_node, least=1, optional=True)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(
                f"timeout={timeout!r} must be a datetime.timedelta or None, not {type(timeout).__name__}; give "
                "timedelta(minutes=30), say"
            )
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout!r} must be longer than nothing; give timedelta(minutes=30), say")
        self._ranks_per_node = ranks_per_node
        self._other_optimizers = other_optimizers
        self._convert_optimizers = convert_optimizers
        self._broadcast_buffers = broadcast_buffers
        self._overlap_dense = overlap_dense
        self._strict_residuals = strict_residuals
        self._loaded_from: str | None = None
        self._good = GoodCheckpoints()
        # holds on signals that steps of this batch have begun
        self._waiting: list[signals_held] = []
        # by path: ids of the checkpoints that an asynchronous plugin was given, oldest first
        self._in_flight: dict[str, list[str]] = {}
        self._unscale: _LockstepUnscale | None = None
        self._sync_backward = True
        self._default_freeze: Any = None
        self._run: _Run | None = None
        self._made: WeakSet[OnebitOptimizer] = WeakSet()
        self._converted: WeakKeyDictionary[torch.optim.Optimizer, OnebitOptimizer] = WeakKeyDictionary()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    # ----- what users see ---------------------------------------------------------------------------------------------

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self._algorithm.name

    @property
    def onebit_optimizers(self) -> list[OnebitOptimizer]:
        """The compressed optimizers in use: empty before fitting, and if all optimizers are trained densely."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, OnebitOptimizer)]

    @property
    def timeout(self) -> timedelta:
        """Bound of every wait for other ranks that is not within an optimizer's exchange."""
        return self._timeout or DEFAULT_TIMEOUT

    def optimizer(self, params: Any, **kwargs: Any) -> OnebitOptimizer:
        """Makes the optimizer of this strategy's algorithm, with the strategy's options.

        Args:
            params: parameters or parameter groups.
            **kwargs: arguments of the optimizer's class (``lr``, ``betas``, ...; options that the strategy was not given).

        Raises:
            ValueError: an option is given here and to the strategy, with different values.

        Example:
            >>> def configure_optimizers(self):
            ...     return self.trainer.strategy.optimizer(self.parameters(), lr=1e-3)
        """
        mine = self._given_options()
        for name, value in mine.items():
            if name in kwargs and kwargs[name] != value:
                raise ValueError(
                    f"{name}={kwargs[name]!r} was given to strategy.optimizer() and {name}={value!r} to the strategy; keep one of them"
                )
        made = self._algorithm.optimizer(params, **{**mine, **kwargs})
        self._made.add(made)
        return made

    def _given_options(self) -> dict[str, Any]:
        """What the strategy was told of the algorithm and of the exchange."""
        exchange = {} if self._exchange_options is None else {"exchange": self._exchange_options}
        return {**self._options, **exchange}

    def synchronise(self) -> None:
        """Brings together what ranks have parted in by steps of their own (0/1 Adam), buffers included; training ends with it.

        Buffers are broadcast from rank 0 (unless ``broadcast_buffers=False``): callbacks may have made them of a rank's own weights, as
        masks of pruned weights are. Does nothing but that for other algorithms. A collective.
        """
        for optimizer in self.onebit_optimizers:
            optimizer.synchronise()
        if self._run is not None and self._run.buffers is not None:
            self._run.buffers.broadcast()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under the names of all algorithms and start methods."""
        register(cls, strategy_registry)

    def __repr__(self) -> str:
        """Says where to import the class for the other Lightning tree: a Trainer of that tree prints this in its error."""
        options = "".join(f", {name}={value!r}" for name, value in self._given_options().items())
        mine = tree_of(self)
        others = "; ".join(
            f"for a Trainer of {PACKAGES[tree]} use `from {BOUND_MODULES[tree]} import OnebitStrategy`"
            for tree in TREES
            if mine is not None and tree != mine
        )
        bound = f" for {PACKAGES[mine]} ({others})" if mine is not None else ""
        return f"<OnebitStrategy({self.algorithm!r}{options}){bound}>"

    # ----- setting up -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connects the processes; before any hook of the user's runs, adds the default ``VarianceFreeze`` where none is set."""
        connected = _connected()
        super().setup_environment()
        if _connected() and not connected:
            # Lightning leaves a gloo group to the interpreter's shutdown, where its threads sometimes abort the process.
            atexit.register(_disconnect)
        if self.lightning_module is None:  # a strategy without a Trainer, for its collectives
            return
        trainer = self.lightning_module.trainer
        self._offer_freeze(trainer)
        trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, self._final_callback)]
        if trainer.state.fn == "fit" and self._algorithm.optimizer.local_steps:
            trainer.callbacks.insert(0, self._final_callback())

    def setup(self, trainer: Any) -> None:
        """Compares the models of all ranks, then does what ``DDPStrategy`` does, without the wrapper."""
        self._end_run()
        assert self.lightning_module is not None
        _check_module(self.lightning_module, self._misconfiguration)
        if _connected():
            handshake(self._everyone("strategy set-up"), _describe(self.lightning_module), self.root_device, "model")
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wraps nothing: gives all ranks rank 0's weights and buffers."""
        module = self.lightning_module
        assert module is not None
        ignored = _ignored(module)
        run = self._run = _Run()
        if not _connected():
            return
        _sync_module_states(module, _world(), _BROADCAST_BYTES, 0, ignored, broadcast_buffers=self._broadcast_buffers)
        if self._broadcast_buffers:
            run.buffers = _BufferSync(module, ignored)

    def _setup_model(self, model: Any) -> Any:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Calls ``configure_optimizers``, converts what can be converted, and gives every compressed optimizer its process group."""
        assert self.lightning_module is not None
        try:
            super().setup_optimizers(trainer)
            self.optimizers = [self._adopt(_unwrap(optimizer)) for optimizer in self.optimizers]
        except TypeError as error:
            named = _named_dtypes(self.lightning_module) if "has dtype" in str(error) else ""
            if not named:
                raise
            precise = str(getattr(self.precision_plugin, "precision", "")) == "64-true"
            remedy = 'train with `precision="32-true"`' if precise else "make it float32 (`module.float()`)"
            raise self._misconfiguration(
                f"compressed optimizers train float32, bfloat16 and float16, but {named}: {remedy}, hold the real and imaginary parts of "
                "a complex one in two parameters, or give it to an optimizer of its own and train that with "
                '`OnebitStrategy(other_optimizers="dense")`.'
            ) from error
        if (given := self._given_options()) and not self.onebit_optimizers:
            raise self._misconfiguration(
                f"{_listed(given)} of {self.algorithm!r} cannot take effect: no optimizer is compressed. Return "
                "`self.trainer.strategy.optimizer(...)` from `configure_optimizers`, or remove the options."
            )
        self._check_ownership()
        self._check_clipping(trainer)
        self._settle_freeze(trainer)
        run = self._run
        assert run is not None
        run.optimizers = self.onebit_optimizers
        self._good.tell(self.onebit_optimizers)
        for optimizer in self.onebit_optimizers:
            optimizer._later = self._waiting.append
        if not _connected():
            return
        if run.dense is not None:
            run.dense.close()  # the program sets its optimizers up anew, within a fit
        # a backward of the module's own may look at gradients, or change them, before it ends
        overlap = self._overlap_dense and not _has_own(self.lightning_module, "backward")
        names: dict[Tensor, str] = {p: name for name, p in self.lightning_module.named_parameters()}
        ranks_per_node = self._node_size() if self.onebit_optimizers else 1
        for optimizer in self.onebit_optimizers:
            optimizer.release_communication()  # one that was kept from an earlier fit()
            limit = timedelta(seconds=optimizer.exchange.timeout)
            optimizer.configure_communication(
                run.new_group(self._timeout),
                ranks_per_node=ranks_per_node,
                timeout=min(self._timeout, limit) if self._timeout is not None else limit,
                parameter_names=names,
                overlap_dense=overlap,
            )
        run.dense = _DenseAverage(self.lightning_module, self.onebit_optimizers, self._connect_dense, overlap)
        # Creating a group ends on one rank before the others have connected. A rank that raises next (a callback that refuses an
        # option, say) would close its connections, and they would report that instead of the reason.
        self.barrier()

    def _node_size(self) -> int:
        """Ranks that exchange as one node; 1 for the flat exchange. Collective if nodes must be found out."""
        world = dist.get_world_size()
        size = self._ranks_per_node
        if size is None:
            # all of them, gathered: a node that was started with fewer ranks than the others must not go unnoticed
            mine = torch.tensor([self._node_of_this_rank()], device=self.root_device)
            layout = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(layout, mine)
            nodes = [int(node) for node in layout]
            counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
            if len(counts) == 1 or max(counts) == 1:
                return 1
            if len(set(counts)) > 1 or nodes != sorted(nodes):
                raise self._misconfiguration(
                    f"the hierarchical exchange needs the same number of consecutive ranks on every node, found ranks per node {counts} "
                    f"(nodes of ranks 0, 1, ...: {nodes}): start all nodes alike, or set `ranks_per_node=1` for the flat exchange."
                )
            size = counts[0]
        if world % size:
            raise self._misconfiguration(
                f"ranks_per_node={size} does not divide the {world} ranks of this run: give a divisor, or 1 for the flat exchange."
            )
        # one node alone has nothing to exchange between nodes: its ranks exchange flat
        return size if size < world else 1

    def _node_of_this_rank(self) -> int:
        return int(self.node_rank)

    def _connect_dense(self) -> Transport:
        assert self._run is not None
        topology = Topology.create(self._run.new_group(self._timeout), timeout=self._timeout)
        return Transport(topology, ByteLedger(), self.timeout, "dense averaging")

    def _adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that trains in the place of one of ``configure_optimizers``; raises if it cannot be trained."""
        if isinstance(optimizer, OnebitOptimizer):
            self._check_direct(optimizer)
            return optimizer
        name, target = type(optimizer).__name__, self._algorithm.optimizer.__name__
        if name == "_MockOptimizer":  # Lightning's stand-in for "no optimizer"
            return optimizer
        reason = _no_counterpart(optimizer)
        if type(optimizer) in self._algorithm.converts:
            found = obstacle(optimizer)
            if found is None and self._other_optimizers == "dense":
                found = _untrainable(optimizer)
            if self._convert_optimizers and found is None:
                return self._convert(optimizer)
            reason = found if found is not None else "conversion is turned off (convert_optimizers=False)"
        if self._other_optimizers == "dense":
            rank_zero_info(f"{name} is trained with dense averaging, as DDP would train it ({reason}).")
            return optimizer
        raise self._misconfiguration(
            f"{name} cannot be trained by {self.algorithm!r}: {reason}. Return `self.trainer.strategy.optimizer(params, ...)` or "
            f"`lightning_onebit.{target}(params, ...)` from `configure_optimizers`, or train it uncompressed, as DDP would, with "
            '`OnebitStrategy(other_optimizers="dense")`.'
        )

    def _check_direct(self, optimizer: OnebitOptimizer) -> None:
        name = type(optimizer).__name__
        if optimizer.algorithm != self.algorithm:
            raise self._misconfiguration(
                f"the strategy's algorithm is {self.algorithm!r}, but `configure_optimizers` returned {name}: set "
                f'`strategy="{optimizer.algorithm}"`, or return `self.trainer.strategy.optimizer(params, ...)`.'
            )
        if (given := self._given_options()) and optimizer not in self._made:
            raise self._misconfiguration(
                f"{_listed(given)} of the strategy cannot take effect: `configure_optimizers` built {name} itself. Return "
                f"`self.trainer.strategy.optimizer(params, ...)`, which knows the strategy's options, or give them to {name}."
            )

    def _convert(self, optimizer: torch.optim.Optimizer) -> OnebitOptimizer:
        if optimizer in self._converted:  # the module returned the same object in an earlier fit()
            converted = self._converted[optimizer]
        else:
            converted = convert_adam(optimizer, self._algorithm.optimizer, self._given_options())
            self._converted[optimizer] = converted
            self._made.add(converted)
            rank_zero_info(
                f"{type(optimizer).__name__} is converted to {type(converted).__name__} with the same hyperparameters, parameter groups "
                "and schedulers (`OnebitStrategy(convert_optimizers=False)` turns conversion off)."
            )
        try:
            repoint_schedulers([config.scheduler for config in self.lr_scheduler_configs], optimizer, converted)
        except ValueError as error:
            raise self._misconfiguration(str(error)) from error
        stand_in(optimizer, converted)
        return converted

    def _check_ownership(self) -> None:
        """Every parameter of a compressed optimizer belongs to the module and to no densely trained optimizer."""
        assert self.lightning_module is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        ignored = _ignored(self.lightning_module)
        dense = {id(p) for o in self.optimizers if not isinstance(o, OnebitOptimizer) for p in _parameters([o])}
        compressed = _parameters(self.onebit_optimizers)
        for parameter in compressed:
            name = names.get(id(parameter))
            if name is None:
                raise self._misconfiguration(
                    f"a compressed optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the LightningModule's "
                    "`named_parameters()`, so no rank could share its first value: register it in the module."
                )
            if id(parameter) in dense:
                raise self._misconfiguration(
                    f"parameter {name} belongs to a compressed optimizer, whose gradients stay local, and to one that needs averaged "
                    "gradients: give it to one of them."
                )
            if name in ignored:
                raise self._misconfiguration(
                    f"parameter {name} is in `_ddp_params_and_buffers_to_ignore`, but a compressed optimizer would exchange it: give it "
                    "to another optimizer."
                )
        self._check_sharing(names)
        early = any(optimizer.exchange.overlap == "backward" for optimizer in self.onebit_optimizers)
        if early and getattr(self.precision_plugin, "scaler", None) is not None:
            raise self._misconfiguration(
                'overlap="backward" sends gradients while precision="16-mixed" still has the loss scale in them: use '
                'overlap="step", or precision="bf16-mixed".'
            )
        if early and _has_own(self.lightning_module, "backward"):
            raise self._misconfiguration(
                f'overlap="backward" sends gradients as they come, and the backward() of {type(self.lightning_module).__name__} may change '
                'them, or add to them, after that: use overlap="step", or Lightning\'s own backward (gradients may be changed in tensor '
                "hooks)."
            )

    def _check_clipping(self, trainer: Any) -> None:
        """Only one of the two clips, and only what has not been sent."""
        if (trainer.gradient_clip_val or 0) <= 0:  # by norm, or by value
            return
        limits = [o.options.max_grad_norm for o in self.onebit_optimizers if o.options.max_grad_norm is not None]
        if limits:
            raise self._misconfiguration(
                f"gradient_clip_val={trainer.gradient_clip_val} of the Trainer and max_grad_norm={limits[0]} of the optimizer would both "
                "clip: give one of them."
            )
        early = any(optimizer.exchange.overlap == "backward" for optimizer in self.onebit_optimizers)
        # a hook of the module's may leave these optimizers out: then the optimizers themselves refuse, when they are clipped
        if early and not _has_own(self.lightning_module, "configure_gradient_clipping"):
            raise self._misconfiguration(
                f'gradient_clip_val={trainer.gradient_clip_val} of the Trainer comes too late with overlap="backward", which sends '
                'gradients as they come, before anything can clip them: use overlap="step", or leave gradient_clip_val out.'
            )

    def _check_sharing(self, names: Mapping[int, str]) -> None:
        """A parameter of several compressed optimizers has one value, which all of them step."""
        owners: dict[int, int] = {}
        for position, optimizer in enumerate(self.optimizers):
            for parameter in _parameters([optimizer]) if isinstance(optimizer, OnebitOptimizer) else []:
                first = owners.setdefault(id(parameter), position)
                if first == position:
                    continue
                pair = (self.optimizers[first], optimizer)
                local = [type(o).__name__ for o in pair if isinstance(o, OnebitOptimizer) and o.local_steps]
                if local:
                    reason = (
                        f"{local[0]} makes local steps, which the other one would take for the model that ranks share"
                    )
                elif parameter.dtype != torch.float32:
                    reason = (
                        f"each would keep a master copy of its {parameter.dtype} values and undo the other one's steps"
                    )
                else:
                    continue
                raise self._misconfiguration(
                    f"parameter {names[id(parameter)]} is in the compressed optimizers {first} and {position} "
                    f"({type(pair[0]).__name__} and {type(pair[1]).__name__}), and {reason}: give it to one of them."
                )

    # ----- the default freeze -----------------------------------------------------------------------------------------

    def _offer_freeze(self, trainer: Any) -> None:
        """Adds the default callback early enough to be set up and restored from a checkpoint like any other."""
        self._withdraw_freeze(trainer)
        fits = trainer.state.fn == "fit"
        chosen = "freeze_step" in self._options or any(isinstance(c, self._freeze_callback) for c in trainer.callbacks)
        if fits and self._algorithm.warm_up and not chosen:
            self._default_freeze = self._freeze_callback()
            trainer.callbacks.insert(0, self._default_freeze)

    def _settle_freeze(self, trainer: Any) -> None:
        """Keeps the default callback only if the optimizers leave the freeze to it."""
        if self._default_freeze is None:
            return
        own = [optimizer.freeze_step is not None for optimizer in self.onebit_optimizers]
        if any(own) and not all(own):
            raise self._misconfiguration(
                "some compressed optimizers have a `freeze_step` and others have none: give it to all of them, or to none and add "
                "VarianceFreeze to the Trainer's callbacks."
            )
        if any(own) or all(optimizer.phase is not Phase.WARMUP for optimizer in self.onebit_optimizers):
            self._withdraw_freeze(trainer)
            return
        rank_zero_info(
            "Nothing says when the dense warm-up ends: added VarianceFreeze(), which ends it when the learning rate no longer rises, "
            "after 10 % of the planned steps at the earliest and 20 % at the latest. Add VarianceFreeze to the Trainer's callbacks, or "
            "give `freeze_step`, to choose."
        )

    def _withdraw_freeze(self, trainer: Any) -> None:
        if self._default_freeze is not None:
            trainer.callbacks[:] = [c for c in trainer.callbacks if c is not self._default_freeze]
            self._default_freeze = None

    # ----- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]
        """Within it gradients only accumulate (gradient accumulation, ``toggle_model(sync_grad=False)``)."""
        before, self._sync_backward = self._sync_backward, False
        try:
            yield
        finally:
            self._sync_backward = before

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; averages densely what the next step needs averaged, before hooks, loggers and clipping look at it."""
        assert self.lightning_module is not None
        self._show_local()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        sync, run = self._sync_backward, self._run
        if run is not None and run.optimizers != self.onebit_optimizers:
            raise self._misconfiguration(
                "the Trainer's optimizers are not those that the strategy has set up, so nobody would average their gradients: make "
                "new ones in `configure_optimizers` and call `trainer.strategy.setup_optimizers(trainer)` on all ranks."
            )
        # toggled off altogether, as the other network of a GAN: nothing will arrive, on any rank, and step() averages what is left of
        # earlier backwards
        concerned = [optimizer for optimizer in self.onebit_optimizers if optimizer.trains]
        for compressed in concerned:
            compressed.begin_backward(sync)
        if run is not None and run.dense is not None and sync:
            run.dense.begin()
        # what has been sent in backward can only be followed by the step
        early = any(compressed.exchange.overlap == "backward" for compressed in concerned)
        with signals_held(self._waiting.append) if early else contextlib.nullcontext():
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if sync and self.lightning_module.automatic_optimization:
            # no other backward comes before the step: whoever waits for these, in the midst of a backward, comes to what follows
            for compressed in concerned:
                compressed.send_gradients()
        if sync:
            for compressed in concerned:
                compressed.sync_gradients()
            if run is not None and run.dense is not None:
                run.dense.finish()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        if not sync and self.lightning_module.automatic_optimization:
            self._show_consensus()
        return closure_loss

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; afterwards the module shows the model that all ranks share (0/1 Adam between synchronisations)."""
        result = super().optimizer_step(optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        if self._unscale is not None and self._unscale.overflowed(optimizer):
            _unwrap(optimizer).skip_step()
        if self.lightning_module.automatic_optimization:
            self._show_consensus()
        return result

    def _handle_signals(self, *, ended: bool = False) -> None:
        """Handles what came since the last step began: between two batches Lightning's own counters and schedules agree with it."""
        while self._waiting:
            self._waiting.pop(0).release(ended=ended)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's; handles signals that came within the last step."""
        self._handle_signals()
        super().on_train_batch_start(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Lightning's; handles signals that came within the last step."""
        self._handle_signals()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Lightning's; handles signals that came within the last step."""
        self._handle_signals()
        super().on_train_end()

    def _show_local(self) -> None:
        """Within a training step every rank works on its own weights."""
        for optimizer in self.onebit_optimizers:
            optimizer.show_local()

    def _show_consensus(self) -> None:
        """Outside of one, everybody who looks (callbacks, evaluation, checkpoints) sees what all ranks share."""
        for optimizer in self.onebit_optimizers:
            optimizer.show_consensus()

    def _keep_what_is_shown(self) -> None:
        """Makes the model that is shown between local steps that of every rank.

        ``StochasticWeightAveraging`` has written its average into it, and now runs an epoch without backward over the data to renew
        BatchNorm's statistics: they are those of the average, as with DDP, and nothing that ranks have done alone comes on top of it.
        """
        for optimizer in self.onebit_optimizers:
            if optimizer.mid_local:
                optimizer.show_consensus()
                params = [p for group in optimizer.param_groups for p in group["params"]]
                shown = [p.detach().clone() for p in params]
                optimizer.synchronise()  # momenta and residuals go on from a synchronisation
                with torch.no_grad():
                    for p, weight in zip(params, shown, strict=True):
                        p.copy_(weight)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, with buffers kept as DDP keeps them."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.fit_loop._skip_backward:
            self._keep_what_is_shown()
        self._show_local()
        # Under manual optimization Lightning tells DDP that no gradients are synchronised, so buffers are broadcast only once.
        with self._forward(self._sync_backward and self.lightning_module.automatic_optimization):
            output = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization:
            self._show_consensus()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, with buffers kept as DDP keeps them."""
        with self._forward(self._sync_backward):
            return super().validation_step(*args, **kwargs)

    @contextlib.contextmanager
    def _forward(self, sync: bool) -> Iterator[None]:
        buffers = self._run.buffers if self._run is not None else None
        if buffers is None:
            yield
            return
        buffers.before_forward()
        yield
        buffers.after_forward(sync)

    # ----- clipping ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, whose clipping knows that gradients stay local, and when they have left."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        super(OnebitMixin, type(self)).precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]
        if precision_plugin is not None:
            precision_plugin.clip_grad_by_norm = _ClipByGlobalNorm(precision_plugin)
            precision_plugin.clip_grad_by_value = _ClipByValue(precision_plugin)
        scaler = getattr(precision_plugin, "scaler", None)
        self._unscale = None
        if scaler is not None:
            self._unscale = scaler.unscale_ = _LockstepUnscale(scaler)

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights as all ranks share them; a view into a larger buffer is copied, so that the file does not carry the buffer."""
        with contextlib.ExitStack() as shown:  # an interrupted training step leaves a rank's own weights
            for optimizer in self.onebit_optimizers:
                shown.enter_context(optimizer.consensus())
            state = super().lightning_module_state_dict()
        return {name: _compact(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's; what differs by rank is written by every rank beside the file, before the file appears (``checkpoint``).

        Raises:
            ShardError: on every rank, if any of them cannot write its part; an older checkpoint of this name stays whole.
            TornStep: the last step of an optimizer did not end on this rank; no file is touched.
        """
        save = super().save_checkpoint
        states, full = [], "optimizer_states" in checkpoint
        for optimizer in self.onebit_optimizers:
            optimizer.check_whole(weights_only=not full)
        if full:
            states = [optimizer.residual_state_dict() for optimizer in self.onebit_optimizers]
        transport = self._everyone("checkpoint")
        if any(state["world_size"] != transport.size for state in states):
            rank_zero_warn(
                f"{filepath} is saved without residuals, which are on {states[0]['world_size']} ranks: {transport.size} of them take part."
            )
            states = []
        if not states:
            older = shard_ids(str(filepath))
            save(checkpoint, filepath, storage_options)
            self._sweep(str(filepath), "", older)
            if full:
                self._good.add(str(filepath), self.onebit_optimizers)
            return
        # metrics in file names may differ by rank: rank 0's name counts, as rank 0's file does
        path, chosen = self.broadcast((str(filepath), uuid.uuid4().hex))
        # before ranks meet: what another rank may soon write for a later checkpoint is not among them
        older = shard_ids(path)
        stamp = Stamp(chosen, transport.size, any(state["tensors"] for state in states))
        save_shards(
            path,
            stamp,
            transport,
            states,
            self.root_device,
            lambda: save({**checkpoint, STAMP_KEY: stamp.as_dict()}, filepath, storage_options),
            cleans=self._cleans,
            asynchronous=self._saves_asynchronously,
        )
        self._sweep(path, stamp.id, older)
        self._good.add(path, self.onebit_optimizers)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's, and what lies beside the file."""
        super().remove_checkpoint(filepath)
        self._good.discard(str(filepath), self.onebit_optimizers)
        if self._cleans:
            self._in_flight.pop(str(filepath), None)
            remove_shards(str(filepath))

    @property
    def checkpoint_io(self) -> Any:
        """The checkpoint plugin; Lightning's own ``TorchCheckpointIO`` replaces local files in one move (``DurableSave``)."""
        return durable(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        super(OnebitMixin, type(self)).checkpoint_io.fset(self, checkpoint_io)  # type: ignore[attr-defined]

    @property
    def _cleans(self) -> bool:
        """Whether this rank removes old shards: one of every node does, for disks may be the nodes' own."""
        return bool(self.local_rank == 0)

    @property
    def _saves_asynchronously(self) -> bool:
        return _asynchronous(self.checkpoint_io)

    def _sweep(self, path: str, kept: str, older: set[str]) -> None:
        """Removes those of the ``older`` shards that belong to checkpoints which the one just saved has overwritten."""
        if not self._cleans:
            return
        written = [kept]
        if self._saves_asynchronously:
            written = self._in_flight.setdefault(path, [])
            written.append(kept)
            del written[:-_ASYNC_GENERATIONS]
            if len(written) < _ASYNC_GENERATIONS:
                return
        remove_shards(path, older.difference(written))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's; remembers where the file lies, for what lies beside it."""
        self._loaded_from = str(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' state, and what differs by rank from beside the checkpoint.

        Raises:
            ShardError: that is missing or damaged, and ``strict_residuals=True``; otherwise it is a warning.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self._loaded_from is not None:
            self._good.add(self._loaded_from, self.onebit_optimizers)
        for plain, converted in self._converted.items():
            stand_in(plain, converted)  # loading makes new groups
        lost = self._restore_residuals(checkpoint) if self.onebit_optimizers else None
        if lost is not None:
            if self._strict_residuals:
                raise ShardError(
                    f"strict_residuals=True: {lost}. Restore the folder `<name>.ckpt.onebit` beside the checkpoint, or set "
                    "strict_residuals=False to go on with residuals that start from zero."
                )
            names = " and ".join(type(optimizer).__name__ for optimizer in self.onebit_optimizers)
            rank_zero_warn(
                f"resuming {names} without residuals: {lost}. Weights, momentum and variance continue from the checkpoint; residuals "
                "(the compression error that is carried from step to step, different on every rank) start from zero. Training goes "
                "on, but not bit for bit as without the interruption (`OnebitStrategy(strict_residuals=True)` makes this an error)."
            )
        self._show_consensus()

    def _restore_residuals(self, checkpoint: Mapping[str, Any]) -> str | None:
        """Loads what differs by rank; says what is wrong if that is not possible."""
        try:
            stamp = Stamp.of(checkpoint)
            if stamp is None:
                return "they are not in the checkpoint" if restarted(self.onebit_optimizers) else None
            if not stamp.shards:
                return None  # when it was saved, nothing differed by rank
            if self._loaded_from is None:
                return "the checkpoint was not loaded from a file by this strategy"
            transport = self._everyone("checkpoint")
            said = restore_residuals(self._loaded_from, stamp, transport, self.onebit_optimizers, self.root_device)
        except ShardError as error:
            return str(error)
        if said is not None:
            rank_zero_info(f"{self._loaded_from}: {said}.")
        return None

    def _everyone(self, name: str) -> Transport:
        """All ranks, for small rounds that neither training nor its accounts know of."""
        topology = Topology.create(None, timeout=self._timeout)
        return Transport(topology, ByteLedger(), self.timeout, name)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's; lets signals through again, and says what replaces the wrapper of DDP, which a module here does not have."""
        super().on_exception(exception)
        self._handle_signals(ended=True)
        explain_missing_wrapper(exception, self.lightning_module)

    # ----- ending -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Gives communication back: hooks, buffers and process groups. Optimizers keep their state, parameters their memory."""
        self._end_run()
        super().teardown()
        self._handle_signals()
        # an asynchronous plugin has now written everything
        while self._in_flight:
            path, written = self._in_flight.popitem()
            remove_shards(path, shard_ids(path).difference(written[-1:]))

    def _end_run(self) -> None:
        self._sync_backward = True
        for optimizer in self.onebit_optimizers:
            optimizer._later = None
        for plain, converted in self._converted.items():
            stand_down(plain, converted)
        if self._run is not None:
            self._show_consensus()
            with torn_down_last(list(self._run.groups)):
                self._give_back()

    def _give_back(self) -> None:
        """Gives up everything that holds a process group; a function of its own, so that its variables do not."""
        run, self._run = self._run, None
        assert run is not None
        for release in [optimizer.release_communication for optimizer in self.onebit_optimizers] + [run.close]:
            try:
                release()
            except RuntimeError as error:
                # After a failure the others may be gone: what brought us here is the news.
                log.warning("while giving communication back: %s", error)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: groups, hooks, optimizers made here."""
        state: dict[str, Any] = super().__getstate__()
        for name in ("_run", "_made", "_converted"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_run": None, "_made": WeakSet(), "_converted": WeakKeyDictionary()})


def _show_options() -> None:
    """Lets ``help()`` and LightningCLI see the options of all algorithms, and DDP's keywords, as keywords of the strategy."""
    init: Any = OnebitMixin.__init__
    vars(init).pop("__signature__", None)
    kinds = get_type_hints(init)
    own = [
        p.replace(annotation=kinds.get(name, p.annotation)) for name, p in inspect.signature(init).parameters.items()
    ]
    ddp = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any) for name in DDP_KEYWORDS
    ]
    init.__signature__ = inspect.Signature([*own[:-1], *option_parameters().values(), *ddp])
    keywords = dict.fromkeys(
        DDP_KEYWORDS, "of DistributedDataParallel: not needed, or refused with what to write instead."
    )
    init.__doc__ = arguments_text({**option_texts(), **keywords})


_show_options()
when_algorithms_change(_show_options)


@dataclass
class _Run:
    """What lives from ``setup()`` to ``teardown()``."""

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    # the compressed optimizers that were set up
    optimizers: list[OnebitOptimizer] = field(default_factory=list)
    buffers: _BufferSync | None = None
    dense: _DenseAverage | None = None

    def new_group(self, timeout: timedelta | None) -> dist.ProcessGroup:
        """A process group of all ranks. Collective."""
        group = dist.new_group(timeout=timeout)
        self.groups.append(group)
        return group

    def close(self) -> None:
        """Destroys the groups."""
        try:
            if self.dense is not None:
                self.dense.close()
        finally:
            for group in self.groups:
                if _connected():
                    dist.destroy_process_group(group)
            self.groups = []


class _BufferSync:
    """When buffers (BatchNorm's statistics) are broadcast from rank 0: the rule of DistributedDataParallel under Lightning.

    Before a forward, if the last one was part of a training step whose gradients were synchronised; before the very first one too.
    """

    def __init__(self, module: torch.nn.Module, ignored: set[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._any = bool(self._buffers())
        self._due = True

    def before_forward(self) -> None:
        """Broadcasts if it is due."""
        if self._any and self._due:
            self.broadcast()

    def broadcast(self) -> None:
        """Gives all ranks rank 0's buffers, those too that the module has got since."""
        if buffers := self._buffers():
            with torch.no_grad():
                dist._broadcast_coalesced(_world(), buffers, _BROADCAST_BYTES, 0)

    def after_forward(self, sync: bool) -> None:
        """Notes whether the forward was one whose gradients are synchronised."""
        self._due = torch.is_grad_enabled() and sync

    def _buffers(self) -> list[Tensor]:
        # looked up every time: modules may assign a new tensor to a buffer
        return [buffer for name, buffer in self._module.named_buffers() if name not in self._ignored]


class _DenseAverage:
    """Averages the gradients of parameters that no compressed optimizer owns, as DDP does.

    Their set may grow while training: layers are unfrozen, a compressed optimizer takes parameters over.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        compressed: Sequence[OnebitOptimizer],
        connect: Callable[[], Transport],
        overlap: bool,
    ) -> None:
        ignored = _ignored(module)
        self._names = {p: name for name, p in module.named_parameters() if name not in ignored}
        self._compressed = compressed
        self._connect = connect
        self._overlap = overlap
        self._transport: Transport | None = None
        self._reducer: Reducer | None = None
        self._owned = -1
        self._candidates: list[torch.nn.Parameter] = []
        self._averaged: list[torch.nn.Parameter] = []

    def begin(self) -> None:
        """Call before a backward whose gradients are to be averaged."""
        self._refresh()
        if self._reducer is not None:
            self._reducer.arm()

    def finish(self) -> None:
        """Call after it: ``.grad`` is the average over ranks."""
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
        owned = sum(len(group["params"]) for optimizer in self._compressed for group in optimizer.param_groups)
        if owned != self._owned:
            self._owned = owned
            theirs = {id(p) for p in _parameters(self._compressed)}
            self._candidates = [p for p in self._names if id(p) not in theirs]
        if not self._candidates:
            wanted = []
        else:
            known = {id(p) for p in self._averaged}
            wanted = [p for p in self._candidates if p.requires_grad or id(p) in known]
        if [id(p) for p in wanted] == [id(p) for p in self._averaged]:
            return
        self.close()
        self._averaged = wanted
        if wanted and dist.get_world_size() > 1:
            self._transport = self._transport or self._connect()
            self._reducer = Reducer(wanted, self._transport, _BUCKET_BYTES, overlap=self._overlap)

    def close(self) -> None:
        """Removes the hooks."""
        reducer, self._reducer, self._averaged = self._reducer, None, []
        if reducer is not None:
            reducer.close()


class _LockstepUnscale:
    """Stands in for ``unscale_`` of a GradScaler: an overflow in one rank's local gradients counts on all ranks.

    All of them then skip the step, and their scalers go on alike. Gradients leave the loss scale here, before any exchange.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._overflowed: set[int] = set()

    def __call__(self, optimizer: Any) -> None:
        scaler, compressed = self._scaler, _unwrap(optimizer)
        type(scaler).unscale_(scaler, optimizer)
        # gradients of others have been averaged: an overflow has reached every rank
        if not isinstance(compressed, OnebitOptimizer) or not scaler.is_enabled():
            return
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        anywhere = compressed.on_any_rank(any(bool(flag) for flag in found.values()))
        if not found:  # no gradient here at all
            device = compressed.param_groups[0]["params"][0].device
            found[device] = torch.zeros(1, device=device)
        for flag in found.values():
            flag.fill_(float(anywhere))
        if anywhere:
            self._overflowed.add(id(compressed))

    def overflowed(self, optimizer: Any) -> bool:
        """Whether the step of an optimizer that has just ended was skipped for an overflow; asks once."""
        key = id(_unwrap(optimizer))
        known = key in self._overflowed
        self._overflowed.discard(key)
        return known


class _ClipByGlobalNorm:
    """Stands in for ``clip_grad_by_norm`` of a precision plugin: compressed optimizers clip by the norm over all ranks."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        optimizer = _unwrap(optimizer)
        if isinstance(optimizer, OnebitOptimizer):
            optimizer.clip_grad_norm_(clip_val)
        else:
            type(self._plugin).clip_grad_by_norm(self._plugin, optimizer, clip_val)


class _ClipByValue:
    """Stands in for ``clip_grad_by_value`` of a precision plugin: refused where it would come too late."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        optimizer = _unwrap(optimizer)
        if isinstance(optimizer, OnebitOptimizer):
            optimizer.check_clipping_by_value(clip_val)
        type(self._plugin).clip_grad_by_value(self._plugin, optimizer, clip_val)


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside a ``LightningOptimizer``."""
    return vars(optimizer).get("_optimizer", optimizer)


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _no_counterpart(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer is none that could be converted."""
    return "there is no 1-bit SGD yet" if isinstance(optimizer, torch.optim.SGD) else "it has no compressed counterpart"


def _untrainable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no compressed optimizer can hold these parameters, or None."""
    strange = {str(p.dtype) for p in _parameters([optimizer]) if p.requires_grad and p.dtype not in TRAINABLE_DTYPES}
    return f"it holds {' and '.join(sorted(strange))} parameters" if strange else None


def _ignored(module: torch.nn.Module) -> set[str]:
    """Names that the user told DistributedDataParallel to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _check_module(module: torch.nn.Module, error: type[Exception]) -> None:
    """Refuses by name what no replica of the strategy could train."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise error(
                f"{name} is not initialised (a lazy module): run a forward pass before `fit`, so that its shape is known."
            )
        if any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__):
            raise error(
                f"{name} is a DTensor (FSDP2, tensor or model parallel), but every rank must hold all of the model: leave it whole, "
                "or use Lightning's ModelParallelStrategy, uncompressed."
            )
    for name, part in module.named_modules():
        kind = type(part).__name__
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise error(f"{name} makes sparse gradients, which are not supported: set sparse=False.")
        if kind == "FullyShardedDataParallel":
            raise error(
                f"{name} is wrapped in {kind}, but every rank must hold all of the model: take the wrapper off, or use Lightning's "
                "FSDPStrategy, uncompressed."
            )
        if isinstance(part, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            raise error(
                f"{name} is wrapped in {kind}, which would average gradients before they are compressed: do not wrap it, the strategy "
                "does all the averaging."
            )


def _named_dtypes(module: torch.nn.Module) -> str:
    """Names the first parameter that no compressed optimizer trains."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.dtype not in TRAINABLE_DTYPES:
            return f"parameter {name} is {p.dtype}"
    return ""


def _describe(module: torch.nn.Module) -> list[str]:
    """What must be alike on all ranks, in words."""
    return [
        f"parameter {name}: shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}, requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ] + [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in module.named_buffers()]


def _compact(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _has_own(module: Any, hook: str) -> bool:
    """Whether a hook of a LightningModule is not Lightning's."""
    if hook in vars(module):
        return True
    owner = next(cls for cls in type(module).__mro__ if hook in vars(cls))
    return not owner.__module__.startswith(tuple(f"{package}." for package in PACKAGES.values()))


def _asynchronous(checkpoint_io: Any) -> bool:
    """Whether a save returns before the file is written."""
    return any(cls.__name__ == "AsyncCheckpointIO" for cls in type(checkpoint_io).__mro__)


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _disconnect() -> None:
    with contextlib.suppress(RuntimeError):
        disconnect()
