"""The Lightning adapter: what it makes of a Trainer's model and optimizers, and what it does around forward, backward and step.

Everything is in :class:`OnebitMixin`, which imports no Lightning class at run time. ``lightning_onebit.lightning`` and
``lightning_onebit.pytorch_lightning`` bind it to the two Lightning trees.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit._choices import OtherOptimizers, StartMethod
from lightning_onebit._names import shown_as
from lightning_onebit.comm import DEFAULT_TIMEOUT, Transport
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer
from lightning_onebit.engine.whole import signals_held
from lightning_onebit.strategy import checks
from lightning_onebit.strategy.adapter import Adapter
from lightning_onebit.strategy.averaging import (
    Clipping,
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
from lightning_onebit.strategy.keywords import (
    DDP_KEYWORDS,
    explain_missing_wrapper,
    heed_ddp_keywords,
    show_options,
)
from lightning_onebit.strategy.optimizers import DefaultFreeze, OptimizerMaker
from lightning_onebit.strategy.ranks import Groups, connected, disconnected_at_exit
from lightning_onebit.strategy.registry import (
    find_algorithm,
    option_parameters,
    when_algorithms_change,
)
from lightning_onebit.strategy.shards import own_storage
from lightning_onebit.strategy.trees import BOUND_MODULES, PACKAGES, tree_of

log = logging.getLogger("lightning_onebit")


@dataclass
class Run:
    """What lives from ``setup()`` to ``teardown()``."""

    groups: Groups
    # the compressed optimizers that were set up
    optimizers: list[OnebitOptimizer] = field(default_factory=list)
    dense: list[DenseAverage] = field(default_factory=list)
    # whether buffers follow rank 0's before a forward, and whether that is due before the next one
    shares_buffers: bool = False
    buffers_due: bool = False


@shown_as("OnebitStrategy")
class OnebitMixin(Adapter):
    """Data-parallel training whose optimizers communicate in one bit per element, without wrapping the module.

    The strategy owns the process groups (one per compressed optimizer), compares the model of all ranks and broadcasts rank 0's
    weights and buffers before training, keeps buffers as DistributedDataParallel does, averages gradients densely while an optimizer
    asks for it (overlapped with backward), and lets the optimizer's ``step()`` do the compressed exchange afterwards.

    ``configure_optimizers`` returns an optimizer of this package, best made by ``self.trainer.strategy.optimizer(params, lr=...)``,
    which knows the strategy's options. A plain ``torch.optim.Adam`` or ``AdamW`` is converted, under ``"onebit_sgd"`` an ``SGD``. Where
    nothing says when the dense warm-up ends, ``VarianceFreeze()`` is added.

    Args:
        algorithm: ``"onebit_adam"``, ``"onebit_lamb"``, ``"zero_one_adam"``, ``"binsgdm"`` (alias ``"birder"``) or ``"onebit_sgd"``.
        accelerator: see Lightning's ``DDPStrategy``, as for all arguments up to ``start_method``.
        parallel_devices: devices of this node.
        cluster_environment: how processes find each other.
        checkpoint_io: reads and writes checkpoints.
        precision_plugin: numeric precision.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None: by device.
        timeout: bound of every wait for other ranks. A smaller ``timeout`` of an optimizer (seconds) counts for its exchange.
        other_optimizers: ``"error"`` refuses optimizers that cannot be compressed; ``"dense"`` trains them exactly as DDP would.
        convert_optimizers: whether a plain Adam, AdamW or SGD becomes the algorithm's optimizer.
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
    _shown_name: ClassVar[str] = "OnebitStrategy"
    _sharded: ClassVar[bool] = False
    # What the binding modules fill in with classes of their tree.
    _misconfiguration: ClassVar[type[Exception]]
    _freeze_callback: ClassVar[type[Any]]
    _final_callback: ClassVar[type[Any]]

    def __init__(
        self,
        algorithm: str = "onebit_adam",
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
        checks.check_options(
            ranks_per_node,
            other_optimizers,
            timeout,
            convert_optimizers=convert_optimizers,
            broadcast_buffers=broadcast_buffers,
            overlap_dense=overlap_dense,
            strict_residuals=strict_residuals,
        )
        self._take_options(algorithm, exchange, options, converts=convert_optimizers, dense=other_optimizers == "dense")
        self._ranks_per_node = ranks_per_node
        self._broadcast_buffers = broadcast_buffers
        self._overlap_dense = overlap_dense
        self._strict_residuals = strict_residuals
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

    def _take_options(
        self, algorithm: str, exchange: ExchangeOptions | None, options: dict[str, Any], *, converts: bool, dense: bool
    ) -> None:
        """Takes options of the algorithm, refuses others, and begins with nothing set up."""
        found, known = find_algorithm(algorithm), option_parameters().keys()
        heed_ddp_keywords(
            {name: value for name, value in options.items() if name not in known},
            algorithm=found.name,
            known={*inspect.signature(type(self).__init__).parameters} - {"self", *DDP_KEYWORDS},
            strategy=self._shown_name,
        )
        self._options = {name: value for name, value in options.items() if name in known and value is not None}
        self._maker = OptimizerMaker(
            found, self._options, exchange, converts, dense, self._misconfiguration, self._sharded
        )
        self._freeze = DefaultFreeze(self._freeze_callback)
        self._loaded_from: str | None = None
        self._checkpoints = Checkpoints()
        # holds on signals that steps of this batch have begun
        self._waiting: list[signals_held] = []
        self._sync_backward = True
        self._run: Run | None = None

    # ----- what users see ---------------------------------------------------------------------------------------------

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self._maker.algorithm.name

    @property
    def onebit_optimizers(self) -> list[OnebitOptimizer]:
        """The compressed optimizers in use: empty before fitting, and if all optimizers are trained densely."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, OnebitOptimizer)]

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
        return self._maker.make(params, **kwargs)

    def synchronise(self) -> None:
        """Brings together what ranks have parted in by steps of their own (0/1 Adam), buffers included; training ends with it.

        Buffers are broadcast from rank 0 (unless ``broadcast_buffers=False``): callbacks may have made them of a rank's own weights, as
        masks of pruned weights are. Does nothing but that for other algorithms. A collective.
        """
        for optimizer in self.onebit_optimizers:
            optimizer.synchronise()
        if self._run is not None and self._broadcast_buffers and connected():
            self._share_buffers()

    def __repr__(self) -> str:
        """Says where to import the class for the other Lightning tree: a Trainer of that tree prints this in its error."""
        options = f", {self._maker}" if self._maker.given else ""
        mine = tree_of(self)
        others = "; ".join(
            f"for a Trainer of {package} use `from {BOUND_MODULES[tree]} import {self._shown_name}`"
            for tree, package in PACKAGES.items()
            if tree != mine
        )
        bound = f" for {PACKAGES[mine]} ({others})" if mine is not None else ""
        return f"<{self._shown_name}({self.algorithm!r}{options}){bound}>"

    # ----- setting up -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connects the processes; before any hook of the user's runs, adds the default ``VarianceFreeze`` where none is set."""
        with disconnected_at_exit():
            self._connect_processes()
        if self.lightning_module is None:  # a strategy without a Trainer, for its collectives
            return
        trainer = self.lightning_module.trainer
        algorithm = self._maker.algorithm
        self._freeze.offer(trainer, algorithm.warm_up and "freeze_step" not in self._options)
        trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, self._final_callback)]
        if trainer.state.fn == "fit" and algorithm.optimizer.local_steps:
            trainer.callbacks.insert(0, self._final_callback())

    def _connect_processes(self) -> None:
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Compares the models of all ranks, then does what Lightning's strategy does, without a wrapper."""
        self._end_run()
        self._check_module()
        if connected():
            self._ranks("strategy set-up").compare(checks.description(self.lightning_module), "model")
        super().setup(trainer)

    def _check_module(self) -> None:
        """Raises if the model cannot be trained."""
        checks.check_module(self.lightning_module, self._misconfiguration)

    def configure_ddp(self) -> None:
        """Wraps nothing: gives all ranks rank 0's weights and buffers."""
        self._begin_run()

    def _begin_run(self) -> None:
        """Gives all replicas the weights and buffers of the first. Collective."""
        self._run = Run(Groups(self.replicas))
        if connected():
            self._share_state()
            shares = self._broadcast_buffers and bool(buffers_of(self.lightning_module))
            self._run.shares_buffers = self._run.buffers_due = shares

    def _share_state(self) -> None:
        share_state(self.lightning_module, self._broadcast_buffers)

    def _share_buffers(self) -> None:
        broadcast_buffers(self.lightning_module)

    def _setup_model(self, model: Any) -> Any:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Calls ``configure_optimizers``, converts what can be converted, and gives every compressed optimizer its process group."""
        try:
            super().setup_optimizers(trainer)
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            self.optimizers = [self._maker.adopt(unwrap(optimizer), schedulers) for optimizer in self.optimizers]
        except TypeError as error:
            self._explain_dtype(error)
            raise
        compressed = self.onebit_optimizers
        if self._maker.given and not compressed:
            raise self._misconfiguration(
                f"{self._maker} of {self.algorithm!r} cannot take effect: no optimizer is compressed. Return "
                "`self.trainer.strategy.optimizer(...)` from `configure_optimizers`, or remove the options."
            )
        scaler = getattr(self.precision_plugin, "scaler", None)
        for objection in checks.objections(self.optimizers, self.lightning_module, scaler, trainer.gradient_clip_val):
            raise self._misconfiguration(objection)
        self._freeze.keep_if_needed(trainer, compressed, self._misconfiguration)
        assert self._run is not None
        self._run.optimizers = compressed
        self._checkpoints.tell(compressed)
        for optimizer in compressed:
            optimizer.hand_over_signals(self._waiting.append)
        if connected():
            self._connect(self._run)

    def _explain_dtype(self, error: TypeError) -> None:
        """Raises where a compressed optimizer has refused the dtype of a parameter, which is named here."""
        named = checks.strange_dtype(self.lightning_module) if "has dtype" in str(error) else ""
        if named:
            precise = str(getattr(self.precision_plugin, "precision", "")) == "64-true"
            remedy = 'train with `precision="32-true"`' if precise else "make it float32 (`module.float()`)"
            raise self._misconfiguration(
                f"compressed optimizers train float32, bfloat16 and float16, but {named}: {remedy}, hold the real and imaginary parts of "
                "a complex one in two parameters, or give it to an optimizer of its own and train that with "
                f'`{self._shown_name}(other_optimizers="dense")`.'
            ) from error

    def _connect(self, run: Run) -> None:
        """Makes process groups for the optimizers, and what averages the other gradients. Collective."""
        for dense in run.dense:
            dense.close()  # the program sets its optimizers up anew, within a fit
        # a backward of the module's own may look at gradients, or change them, before it ends
        overlap = self._overlap_dense and not checks.has_own(self.lightning_module, "backward")
        names = {p: name for name, p in self.lightning_module.named_parameters()}
        how = {"parameter_names": names, "overlap_dense": overlap}
        self._join(run.groups, run.optimizers, self._misconfiguration, **how)

        run.dense = self._dense_averages(run, overlap)
        # Creating a group ends on one rank before the others have connected. A rank that raises next (a callback that refuses an
        # option, say) would close its connections, and they would report that instead of the reason.
        self.barrier()

    def _dense_averages(self, run: Run, overlap: bool) -> list[DenseAverage]:
        """What averages the gradients of parameters that no compressed optimizer owns."""

        def connect() -> Transport:
            return self._ranks("dense averaging", run.groups.new(self._timeout)).transport

        return [DenseAverage(self.lightning_module, lambda: run.optimizers, connect, overlap)]

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
        module, plugin, sync, run = self.lightning_module, self.precision_plugin, self._sync_backward, self._run
        self._show_local()
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        if run is not None and run.optimizers != self.onebit_optimizers:
            raise self._misconfiguration(
                "the Trainer's optimizers are not those that the strategy has set up, so nobody would average their gradients: make "
                "new ones in `configure_optimizers` and call `trainer.strategy.setup_optimizers(trainer)` on all ranks."
            )
        # toggled off altogether, as the other network of a GAN: nothing will arrive, on any rank, and step() averages what is left of
        # earlier backwards
        training = [compressed for compressed in self.onebit_optimizers if compressed.trains]
        averages = run.dense if sync and run is not None else []
        # what has been sent in backward can only be followed by the step
        early = any(compressed.exchange.overlap == "backward" for compressed in training)
        with (
            averaged(training, training if sync else [], averages, last=module.automatic_optimization),
            signals_held(self._waiting.append) if early else contextlib.nullcontext(),
        ):
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        if not sync and module.automatic_optimization:
            self._show_consensus()
        return closure_loss

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; afterwards the module shows the model that all ranks share (0/1 Adam between synchronisations)."""
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if self._unscale is not None:
            self._unscale.count_skipped(optimizer)
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

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's; lets signals through again, and says what replaces the wrapper of DDP, which a module here does not have."""
        super().on_exception(exception)
        self._handle_signals(ended=True)
        explain_missing_wrapper(exception, self.lightning_module)

    def _show_local(self) -> None:
        """Within a training step every rank works on its own weights."""
        for optimizer in self.onebit_optimizers:
            optimizer.show_local()

    def _show_consensus(self) -> None:
        """Shows the model that all ranks share to all who look outside of a training step (callbacks, evaluation, checkpoints)."""
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
                params = checks.params_of(optimizer)
                shown = [p.detach().clone() for p in params]
                optimizer.synchronise()  # momenta and residuals go on from a synchronisation
                with torch.no_grad():
                    for p, weight in zip(params, shown, strict=True):
                        p.copy_(weight)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, with buffers kept as DDP keeps them."""
        if self.lightning_module.trainer.fit_loop._skip_backward:
            self._keep_what_is_shown()
        self._show_local()
        # Under manual optimization Lightning tells DDP that no gradients are synchronised, so buffers are broadcast only once.
        automatic = self.lightning_module.automatic_optimization
        with self._forward(self._sync_backward and automatic):
            output = super().training_step(*args, **kwargs)
        if not automatic:
            self._show_consensus()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, with buffers kept as DDP keeps them."""
        with self._forward(self._sync_backward):
            return super().validation_step(*args, **kwargs)

    @contextlib.contextmanager
    def _forward(self, sync: bool) -> Iterator[None]:
        """Shares buffers as DDP does under Lightning: before a forward, if the last one was of a step whose gradients were synchronised."""
        run = self._run
        if run is not None and run.buffers_due:
            self._share_buffers()
        yield
        if run is not None and run.shares_buffers:
            run.buffers_due = torch.is_grad_enabled() and sync

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, whose clipping knows that gradients stay local, and when they have left."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        super(OnebitMixin, type(self)).precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]
        if precision_plugin is not None:
            precision_plugin.clip_grad_by_norm = Clipping(precision_plugin, "clip_grad_by_norm")
            precision_plugin.clip_grad_by_value = Clipping(precision_plugin, "clip_grad_by_value")
        self._unscale: LockstepUnscale | None = LockstepUnscale.place(getattr(precision_plugin, "scaler", None))

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights as all ranks share them; a view into a larger buffer is copied, so that the file does not carry the buffer."""
        with consensus(self.onebit_optimizers):  # an interrupted training step leaves a rank's own weights
            state = super().lightning_module_state_dict()
        return {name: own_storage(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's; what differs by rank is written by every rank beside the file, before the file appears (``checkpoint``).

        Raises:
            ShardError: on every rank, if any of them cannot write its part; an older checkpoint of this name stays whole.
            TornStep: the last step of an optimizer did not end on this rank; no file is touched.
        """
        full = "optimizer_states" in checkpoint
        for optimizer in self.onebit_optimizers:
            optimizer.check_whole()
        self._checkpoints.save(
            self,
            str(filepath),
            self.onebit_optimizers if full else [],
            lambda more: self._publish({**checkpoint, **more}, filepath, storage_options),
        )

    def _publish(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Makes a checkpoint appear under its name; called on all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's, and what lies beside the file."""
        super().remove_checkpoint(filepath)
        self._checkpoints.remove(self, str(filepath), self.onebit_optimizers)

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
        self._load_optimizers(checkpoint)
        self._maker.stand_in()
        compressed = self.onebit_optimizers
        self._checkpoints.restore(self, self._loaded_from, checkpoint, compressed, self._strict_residuals)
        self._show_consensus()

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)

    # ----- ending -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Gives communication back: hooks, buffers and process groups. Optimizers keep their state, parameters their memory."""
        self._end_run()
        super().teardown()
        self._handle_signals()
        self._checkpoints.close()

    def _end_run(self) -> None:
        self._sync_backward = True
        for optimizer in self.onebit_optimizers:
            optimizer.hand_over_signals(None)
        self._maker.stand_down()
        run, self._run = self._run, None
        if run is None:
            return
        self._show_consensus()
        ending = [optimizer.release_communication for optimizer in self.onebit_optimizers]
        ending += [dense.close for dense in run.dense]
        for release in (*ending, run.groups.destroy):
            try:
                release()
            except RuntimeError as error:
                # After a failure the others may be gone: what brought us here is the news.
                log.warning("while giving communication back: %s", error)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: groups and hooks."""
        return {**super().__getstate__(), "_run": None}


show_options(OnebitMixin.__init__)
when_algorithms_change(partial(show_options, OnebitMixin.__init__))
