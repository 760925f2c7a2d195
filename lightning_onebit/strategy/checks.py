"""What cannot be trained, and what could not take effect: refused when fitting starts, with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_onebit._choices import OtherOptimizers, choices
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.engine.layout import TRAINABLE_DTYPES
from lightning_onebit.engine.options import check_choice, check_flag, check_integer
from lightning_onebit.engine.sharded import OLDEST_TORCH, is_dtensor, torch_is_too_old
from lightning_onebit.strategy.trees import PACKAGES

# what a module may not hold -> why, with a remedy
_TENSORS: list[tuple[Callable[[Any], bool], str]] = [
    (is_lazy, "is not initialised (a lazy module): run a forward pass before `fit`, so that its shape is known."),
    (
        lambda tensor: any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__),
        "is a DTensor (FSDP2, tensor or model parallel), but every rank must hold all of the model: leave it whole, or, with a Trainer, "
        'use OnebitModelParallelStrategy (strategy="onebit_adam_sharded"), which compresses between replicas. Without one give the '
        'optimizer the ranks that hold the same shards: OnebitAdam(params, exchange=ExchangeOptions(process_group=mesh["replicate"]'
        ".get_group())).",
    ),
]
_MODULES: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda part: isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse,
        "makes sparse gradients, which are not supported: set sparse=False.",
    ),
    (
        lambda part: type(part).__name__ == "FullyShardedDataParallel",
        "is wrapped in FullyShardedDataParallel, but every rank must hold all of the model: take the wrapper off, or use Lightning's "
        "FSDPStrategy, uncompressed.",
    ),
    (
        lambda part: isinstance(part, DistributedDataParallel | DataParallel),
        "is wrapped in {kind}, which would average gradients before they are compressed: do not wrap it, the strategy does all the "
        "averaging.",
    ),
]


def check_options(ranks_per_node: int | None, other_optimizers: str, timeout: timedelta | None, **flags: bool) -> None:
    """Refuses options of Lightning's or Fabric's strategy that have a wrong type or value.

    Raises:
        TypeError: a wrong type.
        ValueError: out of range, or an unknown choice.
    """
    check_choice("other_optimizers", other_optimizers, choices(OtherOptimizers))
    for name, value in flags.items():
        check_flag(name, value)
    check_integer("ranks_per_node", ranks_per_node, least=1, optional=True)
    example = "give timedelta(minutes=30), say"
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} must be a datetime.timedelta or None, not {type(timeout).__name__}; {example}"
        )
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout!r} must be longer than nothing; {example}")


def check_module(module: torch.nn.Module, error: type[Exception], *, sharded: bool = False) -> None:
    """Refuses by name what no replica of the strategy could train; ``sharded``: a replica may have several ranks.

    Raises:
        error: a parameter, buffer or part of the module is lazy, sharded, sparse or wrapped.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    wrong_tensors = _TENSORS[:1] if sharded else _TENSORS
    for (name, part), (wrong, reason) in (*product(tensors, wrong_tensors), *product(module.named_modules(), _MODULES)):
        if wrong(part):
            raise error(f"{name} {reason.format(kind=type(part).__name__)}")


def check_sharded_torch(error: type[Exception]) -> None:
    """Refuses a torch that is too old for sharded models."""
    if torch_is_too_old():
        raise error(
            f"OnebitModelParallelStrategy needs torch>={'.'.join(map(str, OLDEST_TORCH))}, this is torch {torch.__version__}: "
            'upgrade it, or train the whole model on every rank with OnebitStrategy (strategy="onebit_adam").'
        )


def check_sharded_module(module: Any, column: Sequence[int], error: type[Exception]) -> None:
    """Refuses by name what no replica of the strategy for sharded models could train.

    Args:
        module: the LightningModule.
        column: the ranks that hold the same shards as this one, in other replicas.
        error: what is raised.
    """
    if not has_own(module, "configure_model"):
        raise error(
            f"{type(module).__name__} has no `configure_model`: shard the model there, with fully_shard(part, mesh=self.device_mesh"
            '["data_parallel"]), or use OnebitStrategy (strategy="onebit_adam"), with which every rank holds all of the model.'
        )
    for name, part in module.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise error(
                f"{name} is wrapped in FullyShardedDataParallel, whose parameters are no DTensors: use FSDP2, fully_shard(part, "
                'mesh=self.device_mesh["data_parallel"]).'
            )
    check_module(module, error, sharded=True)
    sharded = {name: p for name, p in module.named_parameters() if is_dtensor(p)}
    if not sharded:
        raise error(
            f"no parameter of {type(module).__name__} is a DTensor, so every rank holds all of the model: shard it in `configure_model`, "
            'with fully_shard(part, mesh=self.device_mesh["data_parallel"]), or use OnebitStrategy (strategy="onebit_adam").'
        )
    for name, p in sharded.items():
        mesh = p.device_mesh
        if len(both := sorted(set(column).intersection(mesh.mesh.flatten().tolist()))) > 1:
            raise error(
                f"{name} is sharded over ranks {both}, which are in different replicas (mesh dimensions {mesh.mesh_dim_names}): give "
                'fully_shard() and parallelize_module() the dimensions within a replica, mesh=self.device_mesh["data_parallel"] or '
                '["tensor_parallel"].'
            )


def ignored(module: torch.nn.Module) -> set[str]:
    """Names that the user told DistributedDataParallel to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def description(module: torch.nn.Module) -> list[str]:
    """What must be alike on all ranks, in words."""
    return [
        f"parameter {name}: shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}, requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ] + [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in module.named_buffers()]


def strange_dtype(module: torch.nn.Module) -> str:
    """Names the first parameter that no compressed optimizer trains, with its dtype."""
    found = ((n, p) for n, p in module.named_parameters() if p.requires_grad and p.dtype not in TRAINABLE_DTYPES)
    return next((f"parameter {name} is {p.dtype}" for name, p in found), "")


def has_own(module: Any, hook: str) -> bool:
    """Whether a hook of a LightningModule is not Lightning's."""
    if hook in vars(module):
        return True
    owner = next(cls for cls in type(module).__mro__ if hook in vars(cls))
    return not owner.__module__.startswith(tuple(f"{package}." for package in PACKAGES.values()))


def params_of(*optimizers: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All parameters of some optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


# ----- objections to what a Trainer is about to train; all of them sentences with a remedy --------------------------------------


def objections(
    optimizers: Sequence[torch.optim.Optimizer], module: Any, scaler: Any, clip_value: float | None
) -> Iterator[str]:
    """Says what is wrong with the optimizers of a LightningModule, and with what the Trainer would do to their gradients.

    Args:
        optimizers: all of the Trainer's, in order.
        module: the LightningModule.
        scaler: of the loss, None without one.
        clip_value: the Trainer's ``gradient_clip_val``.
    """
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    compressed = [optimizer for optimizer in optimizers if isinstance(optimizer, OnebitOptimizer)]
    dense = {id(p) for p in params_of(*(o for o in optimizers if not isinstance(o, OnebitOptimizer)))}
    left_alone = ignored(module)
    for p in params_of(*compressed):
        if p not in names:
            yield (
                f"a compressed optimizer holds a parameter of shape {tuple(p.shape)} that is not in the LightningModule's "
                "`named_parameters()`, so no rank could share its first value: register it in the module."
            )
        if id(p) in dense:
            yield (
                f"parameter {names[p]} belongs to a compressed optimizer, whose gradients stay local, and to one that needs averaged "
                "gradients: give it to one of them."
            )
        if names[p] in left_alone:
            yield (
                f"parameter {names[p]} is in `_ddp_params_and_buffers_to_ignore`, but a compressed optimizer would exchange it: give it "
                "to another optimizer."
            )
    yield from _shared(optimizers, names)
    if any(optimizer.exchange.overlap == "backward" for optimizer in compressed):
        yield from _too_early(module, scaler, clip_value)
    limits = [o.options.max_grad_norm for o in compressed if o.options.max_grad_norm is not None]
    if limits and (clip_value or 0) > 0:
        yield (
            f"gradient_clip_val={clip_value} of the Trainer and max_grad_norm={limits[0]} of the optimizer would both clip: give one of "
            "them."
        )


def _shared(optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str]) -> Iterator[str]:
    """A parameter of several compressed optimizers has one value, which all of them step."""
    owners: dict[int, int] = {}
    for second, optimizer in enumerate(optimizers):
        for p in params_of(optimizer) if isinstance(optimizer, OnebitOptimizer) else []:
            first = owners.setdefault(id(p), second)
            if first == second:
                continue
            pair = [o for o in (optimizers[first], optimizer) if isinstance(o, OnebitOptimizer)]
            kinds = [type(o).__name__ for o in pair]
            if local := [kind for kind, o in zip(kinds, pair, strict=True) if getattr(o.options, "local_steps", None)]:
                why = f"{local[0]} makes local steps, which the other one would take for the model that ranks share"
            elif p.dtype != torch.float32:
                why = f"each would keep a master copy of its {p.dtype} values and undo the other one's steps"
            else:
                continue
            yield (
                f"parameter {names[p]} is in the compressed optimizers {first} and {second} ({' and '.join(kinds)}), and {why}: give it "
                "to one of them."
            )


def _too_early(module: Any, scaler: Any, clip_value: float | None) -> Iterator[str]:
    """What comes too late for gradients that leave in the midst of backward."""
    if scaler is not None:
        yield (
            'overlap="backward" sends gradients while precision="16-mixed" still has the loss scale in them: use overlap="step", or '
            'precision="bf16-mixed".'
        )
    if has_own(module, "backward"):
        yield (
            f'overlap="backward" sends gradients as they come, and the backward() of {type(module).__name__} may change them, or add to '
            'them, after that: use overlap="step", or Lightning\'s own backward (gradients may be changed in tensor hooks).'
        )
    # a hook of the module's may leave these optimizers out: then the optimizers themselves refuse, when they are clipped
    if (clip_value or 0) > 0 and not has_own(module, "configure_gradient_clipping"):
        yield (
            f'gradient_clip_val={clip_value} of the Trainer comes too late with overlap="backward", which sends gradients as they come, '
            'before anything can clip them: use overlap="step", or leave gradient_clip_val out.'
        )
