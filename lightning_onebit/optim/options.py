"""Options that all optimizers share, checked where they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch.distributed as dist

from lightning_onebit._choices import Backend, Overlap, StateDtype, choices
from lightning_onebit.comm import SimulatedGroup
from lightning_onebit.kernels import BACKENDS

#: seconds that a wait may last at most: more does not fit where torch keeps them
LONGEST_WAIT = 1e9
#: a terabyte, more than any machine's gradients: numbers of elements beyond do not fit where kernels keep them
LARGEST_BUCKET_MB = 1e6
#: default of bucket_mb, and that of exchanges on a CUDA device (docs/cuda: what the host does for a bucket)
BUCKET_MB, CUDA_BUCKET_MB = 16.0, 64.0


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    optional: bool = False,
) -> None:
    """Raises unless ``value`` is a finite real number within the bounds.

    Raises:
        TypeError: not a real number.
        ValueError: out of range; the message names the option, its value and the range.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}={value!r} must be a number{' or None' if optional else ''}, not {type(value).__name__}"
        )
    bounds = [
        (above, lambda b: value > b, ">"),
        (least, lambda b: value >= b, ">="),
        (below, lambda b: value < b, "<"),
        (most, lambda b: value <= b, "<="),
    ]
    wanted = " and ".join(f"{sign} {bound:g}" for bound, _, sign in bounds if bound is not None)
    if not math.isfinite(value) or any(bound is not None and not holds(bound) for bound, holds, _ in bounds):
        raise ValueError(f"{name}={value!r} is out of range; it must be finite{' and ' + wanted if wanted else ''}")


def check_integer(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``value`` is an integer ``>= least``."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}={value!r} must be an integer{' or None' if optional else ''}, not {type(value).__name__}"
        )
    if value < least:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least {least}")


def check_flag(name: str, value: Any) -> None:
    """Raises ``TypeError`` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")


def check_betas(betas: Any) -> None:
    """Raises unless ``betas`` is a pair of numbers in ``[0, 1)``."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, least=0, below=1)


#: options of torch's Adam that change what is computed and that no optimizer here has, with the remedy
UNSUPPORTED = {
    "amsgrad": "the maximum of second moments cannot be frozen; leave it False",
    "maximize": "minimise the negative of your objective instead",
    "differentiable": "an exchange with other ranks cannot be differentiated; leave it False",
    "capturable": "a step with collectives is not captured in a CUDA graph; leave it False",
}
#: hyperparameters of single algorithms, and of torch.optim.SGD, which a group of another cannot have
_OF_OTHERS = ("betas", "eps", "beta", "magnitude_beta", "momentum", "dampening", "nesterov")


def refuse_ignored(group: Mapping[str, Any], kind: str, own: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises where a parameter group has a hyperparameter that would be ignored; other keys (names, notes of schedulers) pass.

    Args:
        group: the parameter group.
        kind: name of the optimizer, for the message.
        own: hyperparameters that a group may set.
        fixed: options that hold for all groups, with their values.

    Raises:
        ValueError: the message names the key, its value and what to do.
    """
    for name in UNSUPPORTED.keys() & group.keys():
        if group[name]:
            raise ValueError(f"{name}={group[name]!r} in a parameter group of {kind}: {UNSUPPORTED[name]}")
    for name in _OF_OTHERS:
        if group.get(name) and name not in own:
            raise ValueError(f"{name}={group[name]!r} in a parameter group means nothing to {kind}; leave it out")
    for name in fixed.keys() & group.keys():
        if group[name] != fixed[name]:
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group: {kind} has one {name} for all groups, {fixed[name]!r}; give it to the "
                "constructor"
            )


def _is_group(value: Any) -> bool:
    return isinstance(value, SimulatedGroup) or (dist.is_available() and isinstance(value, dist.ProcessGroup))


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every optimizer; validated on construction.

    Attributes:
        block_size: elements that share one scale, a multiple of 32.
        max_grad_norm: clip the global gradient norm (see docs/algorithms); None: no clipping.
        process_group: ranks that train together; None: the default group.
        force_compression: compress even in a world of one rank (for tests and measurements).
        bucket_mb: about how many MB (2**20 bytes) of fp32 gradients one bucket carries; None: see ``bucket_size``.
        max_consecutive_skips: the error comes with this many steps in a row skipped because of non-finite gradients; 0: with
            the first such gradient, see ``OnebitAdam``.
        kernels: kernel backend, ``"auto"``, ``"reference"``, ``"cpu"`` or ``"cuda"``.
        timeout: seconds that a rank waits for the others in one collective.
        overlap: ``"step"`` pipelines the exchange within ``step()``; ``"backward"`` sends a bucket as soon as its last
            gradient has landed. The latter excludes what needs all gradients first or changes them: clipping and skipping a step
            (a non-finite gradient is then an error on all ranks); parameters that are trainable but get no gradient
            count as zero gradients.
        residual_dtype: ``"float32"``, or ``"bfloat16"`` to halve the residuals' memory at some cost in accuracy.
        denominator_dtype: ``"float32"``, or ``"bfloat16"`` to halve the memory of the frozen reciprocal denominators, which are then
            right to 1 part in 256.
    """

    block_size: int = 2048
    max_grad_norm: float | None = None
    process_group: dist.ProcessGroup | None = None
    force_compression: bool = False
    bucket_mb: float | None = None
    max_consecutive_skips: int = 100
    kernels: Backend = "auto"
    timeout: float = 1800.0
    overlap: Overlap = "step"
    residual_dtype: StateDtype = "float32"
    denominator_dtype: StateDtype = "float32"

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of range.
        """
        check_integer("block_size", self.block_size, least=32)
        if self.block_size % 32:
            raise ValueError(f"block_size={self.block_size} must be a multiple of 32 (one word of sign bits); try 2048")
        check_number("max_grad_norm", self.max_grad_norm, above=0, optional=True)
        if self.process_group is not None and not _is_group(self.process_group):
            raise TypeError(
                f"process_group={self.process_group!r} must be a group of torch.distributed that this process is a member of, or None "
                f"for the default group, not {type(self.process_group).__name__}"
            )
        check_flag("force_compression", self.force_compression)
        check_number("bucket_mb", self.bucket_mb, above=0, most=LARGEST_BUCKET_MB, optional=True)
        check_integer("max_consecutive_skips", self.max_consecutive_skips, least=0)
        check_choice("kernels", self.kernels, BACKENDS)
        check_number("timeout", self.timeout, above=0, most=LONGEST_WAIT)
        check_choice("overlap", self.overlap, choices(Overlap))
        check_choice("residual_dtype", self.residual_dtype, choices(StateDtype))
        check_choice("denominator_dtype", self.denominator_dtype, choices(StateDtype))
        if self.overlap == "backward" and self.max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} needs all gradients before the first is sent, overlap='backward' sends them as they "
                "come; use overlap='step' or leave max_grad_norm out"
            )

    def bucket_size(self, device_type: str = "cpu", *, exchanged: bool = True) -> float:
        """MB of fp32 gradients in a bucket: ``bucket_mb``, or its default.

        Args:
            device_type: of the parameters, ``"cuda"`` or another.
            exchanged: False for buckets of dense averages, which leave while backward goes on.
        """
        if self.bucket_mb is not None:
            return self.bucket_mb
        waits = exchanged and self.overlap == "step"
        return CUDA_BUCKET_MB if waits and device_type == "cuda" else BUCKET_MB
