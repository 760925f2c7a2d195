"""Named ranges of ``torch.profiler``: which part of a step takes the time.

``onebit::pack`` (compress), ``onebit::reduce`` (average and compress this rank's share), ``onebit::exchange`` (blocked in a collective),
``onebit::apply`` (decompress and move the weights; dense updates and local steps too), ``onebit::control`` and ``onebit::refresh``.
While no profiler runs a range costs a look at a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

_P = ParamSpec("_P")
_R = TypeVar("_R")


def begin(name: str) -> profiler.record_function | None:
    """Opens ``onebit::NAME``, to be closed with ``end()``; None while no profiler runs."""
    if not profiler._is_profiler_enabled:
        return None
    opened = profiler.record_function(f"onebit::{name}")
    opened.__enter__()
    return opened


def end(opened: profiler.record_function | None) -> None:
    """Closes what ``begin()`` has opened."""
    if opened is not None:
        opened.__exit__(None, None, None)


def ranged(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes every call of a function a range ``onebit::NAME``."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            opened = begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                end(opened)

        return call

    return decorate
