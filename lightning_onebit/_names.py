"""Names that users read in errors."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def shown_as(name: str) -> Callable[[_Class], _Class]:
    """Makes Python's own errors about a class's methods name the class that users know.

    ``OnebitStrategy() got an unexpected keyword argument`` names the function that was called, and with it the class it was written in,
    which may be one that nobody outside of this package has heard of.

    Args:
        name: of the public class.
    """

    def rename(cls: _Class) -> _Class:
        for value in vars(cls).values():
            for function in _functions(value):
                function.__qualname__ = f"{name}.{function.__name__}"
        return cls

    return rename


def _functions(value: Any) -> list[FunctionType]:
    """The functions behind an attribute of a class."""
    parts = [value, getattr(value, "__func__", None)]
    parts += [getattr(value, part, None) for part in ("fget", "fset", "fdel", "__wrapped__")]
    return [part for part in parts if isinstance(part, FunctionType)]
