"""The Lightning adapter for models that are sharded inside a replica: one bit between replicas, FSDP2 and tensor parallel within.

A replica is the ranks of a node, unless ``replicate_size`` says otherwise. :class:`ShardedMixin` adds to what ``OnebitMixin`` does the
mesh, what is shared over it and checkpoints of sharded tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_onebit._choices import OtherOptimizers
from lightning_onebit._names import shown_as
from lightning_onebit.comm import DEFAULT_TIMEOUT, Transport
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine.options import check_integer
from lightning_onebit.engine.sharded import is_dtensor
from lightning_onebit.strategy import checks
from lightning_onebit.strategy.averaging import DenseAverage, broadcast, buffers_of, consensus
from lightning_onebit.strategy.keywords import show_options
from lightning_onebit.strategy.ranks import Replicas, connected
from lightning_onebit.strategy.registry import register, sharded_strategies, when_algorithms_change
from lightning_onebit.strategy.sharded_checkpoint import ShardedFiles
from lightning_onebit.strategy.trainer import OnebitMixin, Run

#: dimensions of the mesh, outermost first; the last two are Lightning's
REPLICATE, DATA, TENSOR = DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")

Size = int | Literal["auto"]


@shown_as("OnebitModelParallelStrategy")
class ShardedMixin(OnebitMixin):
    """Models that are sharded inside a node and replicated between nodes, whose optimizers communicate in one bit between the nodes.

    As with Lightning's ``ModelParallelStrategy``, ``configure_model`` shards the model over ``self.device_mesh["data_parallel"]``
    (``fully_shard``) and ``self.device_mesh["tensor_parallel"]`` (``parallelize_module``). Ranks are dealt to a mesh ``replicate x
    data_parallel x tensor_parallel``. Gradients are averaged densely inside a replica, by FSDP2; every rank then exchanges its shard with
    the ranks that hold the same one in the other replicas. All replicas begin with the first one's weights and buffers. Optimizers,
    the end of the warm-up and clipping are those of ``OnebitStrategy``.

    Needs torch 2.9 or newer.

    Args:
        algorithm: as of ``OnebitStrategy``; names end in ``_sharded`` for ``Trainer(strategy="onebit_adam_sharded")``.
        replicate_size: number of replicas; ``"auto"``: of nodes. (One machine can play several nodes.)
        data_parallel_size: ranks of a replica that see different data; ``"auto"``: all that there are beside the other two sizes.
        tensor_parallel_size: ranks that share the tensors of a layer and see the same data.
        save_distributed_checkpoint: whether a checkpoint is a folder, into which every rank of the first replica writes its shards, or one
            file with whole tensors, which rank 0 writes and every strategy reads.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None: by device.
        timeout: bound of every wait for other ranks. A smaller ``timeout`` of an optimizer (seconds) counts for its exchange.
        other_optimizers: ``"error"`` refuses optimizers that cannot be compressed; ``"dense"`` averages their gradients over replicas.
        convert_optimizers: whether a plain Adam, AdamW or SGD becomes the algorithm's optimizer.
        broadcast_buffers: whether buffers follow the first rank's during training, as with DDP.
        overlap_dense: whether dense averaging overlaps with backward.
        strict_residuals: whether resuming raises when residuals are missing, damaged or those of another sharding, or, as by default,
            warns and goes on with residuals that start from zero.
        exchange: how ranks exchange, see ``ExchangeOptions``.
        **options: options of the algorithm, as of ``OnebitStrategy``.

    Raises:
        TypeError: an option has the wrong type, or nobody knows it.
        ValueError: an option is out of range, or one that the algorithm does not have.
        MisconfigurationException: (when fitting starts) sizes that are not those of the run, a model or an optimizer that cannot be
            trained, or an option that could not take effect.

    Example:
        >>> Trainer(devices=8, num_nodes=4, strategy=OnebitModelParallelStrategy(freeze_step=1000))
    """

    _shown_name: ClassVar[str] = "OnebitModelParallelStrategy"
    _sharded: ClassVar[bool] = True
    _device_mesh: Any  # the base class's

    def __init__(
        self,
        algorithm: str = "onebit_adam",
        replicate_size: Size = "auto",
        data_parallel_size: Size = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        *,
        other_optimizers: OtherOptimizers = "error",
        convert_optimizers: bool = True,
        broadcast_buffers: bool = True,
        overlap_dense: bool = True,
        strict_residuals: bool = False,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        flags = {
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "convert_optimizers": convert_optimizers,
            "broadcast_buffers": broadcast_buffers,
            "overlap_dense": overlap_dense,
            "strict_residuals": strict_residuals,
        }
        checks.check_options(None, other_optimizers, timeout, **flags)
        self._asked: dict[str, Size] = {
            "replicate_size": replicate_size,
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        for name, size in self._asked.items():
            if size != "auto" or name == "tensor_parallel_size":
                check_integer(name, size, least=1)
        self._take_options(algorithm, exchange, options, converts=convert_optimizers, dense=other_optimizers == "dense")
        # within a column the exchange is flat
        self._ranks_per_node = 1
        self._broadcast_buffers = broadcast_buffers
        self._overlap_dense = overlap_dense
        self._strict_residuals = strict_residuals
        self._data_ranks: Any = None
        self._files = ShardedFiles(self)
        # the sizes of Lightning's strategy are those of its own mesh, which is not made
        super(OnebitMixin, self).__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under the names of all algorithms, with ``_sharded`` behind them."""
        register(cls, strategy_registry, sharded_strategies)

    # ----- the mesh ---------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Replicas:
        """How the ranks of the run share the model."""
        count, data, tensor = self._sizes()
        return Replicas(count, data * tensor)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank of a replica's data-parallel dimension, in every replica, has samples of its own."""
        count, data, _ = self._sizes()
        replica, rank, _ = self.device_mesh.get_coordinate()
        return {"num_replicas": count * data, "rank": replica * data + rank}

    def _sizes(self) -> tuple[int, int, int]:
        """Sizes of the mesh.

        Raises:
            MisconfigurationException: they are not those of the run.
        """
        world, asked = self.num_nodes * self.num_processes, dict(self._asked)
        auto = [name for name, size in asked.items() if size == "auto"]
        if asked["replicate_size"] == "auto":
            asked["replicate_size"] = self.num_nodes
        if asked["data_parallel_size"] == "auto":
            asked["data_parallel_size"] = max(
                1, world // (asked["replicate_size"] * int(asked["tensor_parallel_size"]))
            )
        count, data, tensor = (int(size) for size in asked.values())
        if count * data * tensor != world:
            said = " x ".join(f"{n}={s}{' (auto)' if n in auto else ''}" for n, s in asked.items())
            fits = world % (data * tensor) == 0 and "data_parallel_size" not in auto
            remedy = (
                f"set replicate_size={world // (data * tensor)}" if fits else "give sizes whose product is that number"
            )
            raise self._misconfiguration(
                f"{said} is {count * data * tensor}, but this run has {world} processes ({self.num_nodes} node(s) with "
                f"{self.num_processes}): {remedy}, or start as many processes as the sizes ask for."
            )
        return count, data, tensor

    def _connect_processes(self) -> None:
        checks.check_sharded_torch(self._misconfiguration)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise self._misconfiguration(
                'precision="16-mixed" scales the loss, and ranks that hold different shards would not skip a step together: use '
                'precision="bf16-mixed".'
            )
        if self._layer_sync is not None:
            raise self._misconfiguration(
                "sync_batchnorm=True has no effect on a model that is sharded in `configure_model`: leave it out, and call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm there."
            )
        sizes = self._sizes()
        self._setup_distributed()
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=DIMENSIONS)
        self._data_ranks = None
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    def _data_group(self) -> Any:
        """The ranks that hold the same part of a layer: they differ in the data they see alone. Collective when first called."""
        count, data, tensor = self._sizes()
        if self._data_ranks is None:
            all_ranks = [list(range(part, count * data * tensor, tensor)) for part in range(tensor)]
            made = [dist.new_group(ranks, timeout=self._timeout) for ranks in all_ranks]
            self._data_ranks = made[dist.get_rank() % tensor]
        return self._data_ranks

    # ----- setting up -------------------------------------------------------------------------------------------------

    def _check_module(self) -> None:
        column = dist.get_process_group_ranks(self.device_mesh.get_group(REPLICATE)) if connected() else []
        checks.check_sharded_module(self.lightning_module, column, self._misconfiguration)

    def model_to_device(self) -> None:
        """Lightning's; then, before fitting, all replicas get the first one's weights and buffers."""
        super().model_to_device()
        if self.lightning_module.trainer.state.fn == "fit":
            self._begin_run()

    def _share_state(self) -> None:
        left_alone = checks.ignored(self.lightning_module)
        params = [p for name, p in self.lightning_module.named_parameters() if name not in left_alone]
        broadcast([p for p in params if is_dtensor(p)], self.device_mesh.get_group(REPLICATE))
        # every rank holds all of the others
        broadcast([p for p in params if not is_dtensor(p)], dist.group.WORLD)
        if self._broadcast_buffers:
            self._share_buffers()

    def _share_buffers(self) -> None:
        buffers = buffers_of(self.lightning_module)
        broadcast([b for b in buffers if is_dtensor(b)], self.device_mesh.get_group(REPLICATE))
        broadcast([b for b in buffers if not is_dtensor(b)], self._data_group())

    def _dense_averages(self, run: Run, overlap: bool) -> list[DenseAverage]:
        """Gradients of sharded parameters are averaged over replicas; nobody has averaged those of others, over any ranks."""

        def connect(everyone: bool) -> Transport:
            return self._ranks("dense averaging", run.groups.new(self._timeout, everyone=everyone)).transport

        module = self.lightning_module
        return [
            DenseAverage(module, lambda: run.optimizers, partial(connect, everyone), overlap and not everyone, which)
            for everyone, which in ((False, is_dtensor), (True, lambda p: not is_dtensor(p)))
        ]

    # ----- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]
        """Within it gradients only accumulate, in FSDP2 too."""
        parts = list(self._fsdp_parts())
        with super().block_backward_sync():
            for part in parts:
                part.set_requires_gradient_sync(False, recurse=False)
            try:
                yield
            finally:
                for part in parts:
                    part.set_requires_gradient_sync(True, recurse=False)

    def _fsdp_parts(self) -> Iterator[Any]:
        from torch.distributed.fsdp import FSDPModule

        return (part for part in self.lightning_module.modules() if isinstance(part, FSDPModule))

    def _reshard(self) -> None:
        """Lets go of weights that a forward without gradients has gathered, which FSDP2 keeps at the root: they may have changed since."""
        for part in self._fsdp_parts():
            part.reshard()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See ``OnebitStrategy``; on the weights of now."""
        self._show_local()
        self._reshard()
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """See ``OnebitStrategy``; on the weights of now."""
        super().on_validation_start()
        self._reshard()

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def writes_later(self) -> bool:
        """A folder is not written by a plugin."""
        return not self._save_distributed_checkpoint and super().writes_later

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers are loaded after the model, as by other strategies."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights as all replicas share them: shards, or whole tensors on rank 0."""
        with consensus(self.onebit_optimizers):
            state: dict[str, Any] = super(OnebitMixin, self).lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of an optimizer, by the parameters' numbers: shards, or whole tensors on rank 0. Collective."""
        return self._files.optimizer_state(optimizer)

    def _publish(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        self._files.publish(checkpoint, str(self.broadcast(str(filepath))), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a folder or a file of any strategy; weights and optimizers are loaded when Lightning asks for it."""
        self._loaded_from = str(self.broadcast(str(checkpoint_path)))
        return self._files.read(self._loaded_from, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights, of which every rank takes its part."""
        self._files.load_weights(self._loaded_from, checkpoint, strict)
        self._reshard()

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        self._files.load_optimizers(self._loaded_from, checkpoint)

    # ----- ending -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: groups and the mesh."""
        return {**super().__getstate__(), "_device_mesh": None, "_data_ranks": None}


show_options(ShardedMixin.__init__)
when_algorithms_change(partial(show_options, ShardedMixin.__init__))
