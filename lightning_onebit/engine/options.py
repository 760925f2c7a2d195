"""Options: those of the exchange, what those of an algorithm have in common, and the checks of single values."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import FunctionType
from typing import Any, TypeVar, get_type_hints

import torch.distributed as dist

from lightning_onebit._choices import Backend, OnNonfinite, Overlap, StateDtype, choices
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


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
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


def refuse_ignored(group: Mapping[str, Any], kind: str, own: Collection[str], fixed: Mapping[str, Any]) -> None:
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


def check_group(group: Mapping[str, Any], kind: str, own: Collection[str], fixed: Mapping[str, Any]) -> None:
    """Validates what a parameter group says; arguments as of ``refuse_ignored``."""
    check_number("lr", group["lr"], least=0)
    check_number("weight_decay", group["weight_decay"], least=0)
    check_flag("compress", group["compress"])
    refuse_ignored(group, kind, own, fixed)
    if "betas" in group and "betas" in own:
        check_betas(group["betas"])
    if "eps" in group and "eps" in own:
        check_number("eps", group["eps"], least=0)


def _is_group(value: Any) -> bool:
    return isinstance(value, SimulatedGroup) or (dist.is_available() and isinstance(value, dist.ProcessGroup))


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How ranks exchange, whatever the algorithm. Give it to an optimizer or to the strategy as ``exchange``.

    Attributes:
        block_size: elements that share one scale, a multiple of 32.
        bucket_mb: about how many MB (2**20 bytes) of fp32 gradients one bucket carries. None: 16; on a CUDA device 64, because launching
            kernels costs the host more than their work costs the device, but 16 where buckets leave in the midst of backward.
        overlap: ``"step"`` pipelines the exchange within ``step()``; ``"backward"`` sends a bucket as soon as its last
            gradient has landed (1-bit Adam and 1-bit LAMB). The latter excludes what needs all gradients first or changes them, such as
            clipping; parameters that are trainable but get no gradient count as zero gradients.
        state_dtype: of residuals and of frozen denominators, ``"float32"``, or ``"bfloat16"`` in half the memory: a
            coordinate's step is then off by a constant factor of at most 1 + 2**-8 until the next refresh. None: ``"bfloat16"``, and
            ``"float32"`` in 1-bit SGD and in BinSGDM, which takes no other.
        on_nonfinite: ``"skip"`` a step on all ranks alike if a gradient of any rank is not finite (an error after 100 in a row), or
            ``"raise"`` at the first one.
        kernels: kernel backend, ``"auto"``, ``"reference"``, ``"cpu"`` or ``"cuda"``; all give the same bits.
        timeout: seconds that a rank waits for the others in one collective.
        process_group: ranks that train together; None: the default group. A strategy makes groups itself.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option out of range; the message names it, its value and the range.

    Example:
        >>> OnebitAdam(model.parameters(), exchange=ExchangeOptions(block_size=4096, overlap="backward"))
    """

    block_size: int = 2048
    bucket_mb: float | None = None
    overlap: Overlap = "step"
    state_dtype: StateDtype | None = None
    on_nonfinite: OnNonfinite = "skip"
    kernels: Backend = "auto"
    timeout: float = 1800.0
    process_group: Any = None
    # compress in a world of one rank too, for tests and measurements
    _alone: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Checks every option."""
        check_integer("block_size", self.block_size, least=32)
        if self.block_size % 32:
            raise ValueError(f"block_size={self.block_size} must be a multiple of 32 (one word of sign bits); try 2048")
        if self.process_group is not None and not _is_group(self.process_group):
            raise TypeError(
                f"process_group={self.process_group!r} must be a group of torch.distributed that this process is a member of, or None "
                f"for the default group, not {type(self.process_group).__name__}"
            )
        check_number("bucket_mb", self.bucket_mb, above=0, most=LARGEST_BUCKET_MB, optional=True)
        check_choice("overlap", self.overlap, choices(Overlap))
        check_choice("state_dtype", self.state_dtype, (None, *choices(StateDtype)))
        check_choice("on_nonfinite", self.on_nonfinite, choices(OnNonfinite))
        check_choice("kernels", self.kernels, BACKENDS)
        check_number("timeout", self.timeout, above=0, most=LONGEST_WAIT)

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


def made_exchange(given: ExchangeOptions | None) -> ExchangeOptions:
    """What a constructor was given as ``exchange``; None: the defaults.

    Raises:
        TypeError: it is something else.
    """
    if given is None:
        return ExchangeOptions()
    if not isinstance(given, ExchangeOptions):
        raise TypeError(
            f"exchange={given!r} must be an ExchangeOptions or None, not {type(given).__name__}; give "
            "exchange=ExchangeOptions(block_size=4096), say"
        )
    return given


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every algorithm can be told besides its hyperparameters. A subclass adds what is its own, and checks it.

    Attributes:
        max_grad_norm: clips the global norm (of the averaged gradient in dense steps, ``sqrt((1/n) sum_i ||g_i||^2)``
            in compressed ones); None: no clipping.
    """

    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        check_number("max_grad_norm", self.max_grad_norm, above=0, optional=True)

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def as_parameters(options: type[Options]) -> list[inspect.Parameter]:
    """The fields of a dataclass as keyword-only parameters, with their types and defaults."""
    kinds = get_type_hints(options)
    public = [f for f in fields(options) if not f.name.startswith("_")]
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
        for f in public
    ]


def described(options: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of each field; "see" another class is no text of its own."""
    found = {}
    for cls in reversed(options.__mro__):
        section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
        for name, text in re.findall(
            r"^    (\w+): (.+(?:\n     .+)*)", re.split(r"\n(?=\S)", section)[0], re.MULTILINE
        ):
            if not text.startswith("see ``"):
                found[name] = " ".join(text.split())
    return found


def arguments_text(texts: Mapping[str, str]) -> str:
    """A docstring in which command lines find the help of keyword arguments."""
    return "\n".join(
        ["Options are keyword arguments.\n", "Args:", *(f"    {name}: {text}" for name, text in texts.items())]
    )


_Made = TypeVar("_Made", bound=type)


def takes(options: type[Options]) -> Callable[[_Made], _Made]:
    """Makes the fields of a dataclass keyword arguments of an optimizer's constructor, which takes them as ``**options``.

    ``help()``, ``inspect.signature()`` and command lines see them with their types, defaults and descriptions.
    """

    def decorate(cls: _Made) -> _Made:
        if "__init__" not in vars(cls):
            cls.__init__ = _copied(cls.__init__, cls.__qualname__)  # type: ignore[misc]
        init: Any = cls.__init__  # type: ignore[misc]
        kinds = get_type_hints(init)
        parameters = inspect.signature(init).parameters.values()
        own = [p.replace(annotation=kinds.get(p.name, p.annotation)) for p in parameters if p.kind is not p.VAR_KEYWORD]
        init.__signature__ = inspect.Signature([*own[:-1], *as_parameters(options), own[-1]])
        init.__doc__ = arguments_text(described(options))
        cls.options_class = options  # type: ignore[attr-defined]
        return cls

    return decorate


def _copied(init: Any, owner: str) -> Any:
    """An inherited constructor as a function of its own, for signatures belong to functions, and so do the names in Python's errors."""
    copied = FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = init.__kwdefaults__, dict(init.__annotations__)
    copied.__module__, copied.__qualname__ = init.__module__, f"{owner}.{init.__name__}"
    return copied


def made_options(kind: type[Options], optimizer: str, given: Mapping[str, Any]) -> Options:
    """The options of an algorithm from keyword arguments.

    Raises:
        TypeError: a keyword that it does not have; the message has near matches.
    """
    known = [f.name for f in fields(kind)]
    for name, value in given.items():
        if name not in known:
            where = {f.name: "exchange=ExchangeOptions({}=...)" for f in fields(ExchangeOptions)}
            near = [where[name].format(name)] if name in where else difflib.get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise TypeError(f"{optimizer}() got an unexpected keyword argument {name}={value!r}{hint}")
    return kind(**given)


def refuse_contradictions(exchange: ExchangeOptions, options: Options, fixed: Mapping[str, Any], kind: str) -> None:
    """Refuses options of the exchange that contradict the algorithm (``fixed``: those with one possible value), or its options."""
    for option, only in fixed.items():
        if (value := getattr(exchange, option)) not in (None, only):
            raise ValueError(
                f"{option}={value!r} of the exchange cannot take effect in {kind}; leave it out ({only!r})"
            )
    if exchange.overlap == "backward" and options.max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={options.max_grad_norm} needs all gradients before the first is sent, overlap='backward' sends them "
            "as they come; use overlap='step' or leave max_grad_norm out"
        )
