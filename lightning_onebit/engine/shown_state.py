"""``optimizer.state``: what torch keeps there, read from where this library keeps it. It can be read, and nothing can be changed in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lightning_onebit.engine import state

if TYPE_CHECKING:
    from lightning_onebit.engine.optimizer import OnebitOptimizer

_MISSING: Any = object()


class ShownState(MutableMapping[Tensor, Any]):
    """Parameter -> a dict with ``step`` and its moments, as ``torch.optim.AdamW`` has it; of parameters that have made steps.

    Values are copies, made for one parameter when they are asked for and kept until the next step. Assigning what is there
    already changes nothing and is allowed (Lightning moves states to a device that way). Every other write raises; one into a copy
    is noticed by the next step.
    """

    def __init__(self, optimizer: OnebitOptimizer) -> None:
        self._of = weakref.ref(optimizer)
        self._places: dict[int, int] = {}  # indices of parameters, by id
        self._entries: dict[int, Entry] = {}
        # copies that somebody may still hold: their names, and their versions when they were handed out
        self._given: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._scratch: dict[int, Tensor] = {}

    # ----- what the optimizer asks for ---------------------------------------------------------------------------------

    def scratch(self, index: int, make: Callable[[], Tensor]) -> Tensor:
        """What several parameters are read from, one after the other: the last one asked for is kept."""
        if index not in self._scratch:
            self._scratch = {index: make()}
        return self._scratch[index]

    def check(self) -> None:
        """Before a step: raises where something has been written into a copy.

        Raises:
            RuntimeError: the message names the parameter, the key and what to call.
        """
        for name, ref, version in self._given:
            copy = ref()
            if copy is not None and copy._version != version:
                self.refuse(f"{name} has been written to")
        copy = None
        self.renew()
        self._given = [given for given in self._given if given[1]() is not None]

    def renew(self) -> None:
        """Lets go of the copies, for the state is about to change; who asks is given new ones."""
        self._places, self._entries, self._scratch = {}, {}, {}

    def forget(self) -> None:
        """Lets go of all copies, whatever has been done to them: the state is another one now."""
        self.renew()
        self._given = []

    def replace(self, state: Any) -> None:
        """``optimizer.state = state``, which raises unless that changes nothing."""
        if state is self:
            return
        known = isinstance(state, Mapping) and len(state) == len(self) and all(param in self for param in state)
        if not known or not all(self[param].says(entry) for param, entry in state.items()):
            self.refuse("optimizer.state has been replaced")

    def refuse(self, what: str) -> NoReturn:
        """Raises.

        Raises:
            RuntimeError: always.
        """
        kind = type(self._optimizer).__name__
        raise RuntimeError(
            f"{what}, which cannot change anything: {kind} keeps its state elsewhere, and optimizer.state shows copies. To start over call "
            f"{kind}.reset_state(), or reset_state(params) for some parameters, on all ranks; to set moments call load_state_dict()"
        )

    def let_go(self, index: int) -> None:
        """Keeps the copies of a parameter no longer than the program that asked for them does."""
        self._entries.pop(index, None)

    # ----- reading -----------------------------------------------------------------------------------------------------

    def __getitem__(self, param: Tensor) -> Entry:
        """State of a parameter, empty before its first step.

        Raises:
            KeyError: not a parameter of this optimizer.
        """
        index = self._index_of(param)
        if index is None:
            raise KeyError(param)
        entry = self._entries.get(index)
        if entry is None:
            with torch.inference_mode(False), torch.no_grad():
                copies = state.shown(self._optimizer, index) if self._count(index) else {}
            name = (
                f"optimizer.state[{self._optimizer.name_of(index)}]"
                if copies
                else f"optimizer.state[parameter {index}]"
            )
            entry = self._entries[index] = Entry(copies, self, index, name)
            self._given += [(f"{name}[{key!r}]", weakref.ref(copy), copy._version) for key, copy in copies.items()]
        return entry

    def __iter__(self) -> Iterator[Tensor]:
        return (param for index, param in enumerate(self._params()) if self._count(index))

    def __len__(self) -> int:
        return sum(steps > 0 for steps in self._optimizer._engine.kept.t)

    def __bool__(self) -> bool:
        """True, before the first step too: ``torch.distributed.checkpoint`` makes one, on zeros, where there is no state."""
        return True

    def __contains__(self, param: object) -> bool:
        index = self._index_of(param)
        return index is not None and self._count(index) > 0

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters of {type(self._optimizer).__name__}, to be read>"

    def __reduce__(self) -> Any:
        """A copied or unpickled optimizer has no state."""
        return dict, ()

    # ----- writes ------------------------------------------------------------------------------------------------------

    def __setitem__(self, param: Tensor, value: Any) -> None:
        entry = self[param]
        if not entry.says(value):
            self.refuse(f"{entry.name} has been assigned to")
        self.let_go(entry.index)

    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self.refuse(f"{self[param].name} has been deleted")

    def clear(self) -> None:
        """Raises unless there is nothing to clear."""
        if len(self):
            self.refuse("optimizer.state has been cleared")

    def pop(self, param: Tensor, default: Any = _MISSING) -> Any:
        """Raises unless there is nothing to take out."""
        if param in self or default is _MISSING:
            del self[param]
        return default

    def popitem(self) -> Any:
        """Raises unless there is nothing to take out, and a ``KeyError`` then, as a dict does."""
        self.clear()
        raise KeyError("optimizer.state is empty")

    # ----- where things are --------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> OnebitOptimizer:
        optimizer = self._of()
        if optimizer is None:
            raise RuntimeError("the optimizer whose state this was is gone")
        return optimizer

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _index_of(self, param: object) -> int | None:
        if id(param) not in self._places:
            self._places = {id(p): index for index, p in enumerate(self._params())}
        return self._places.get(id(param))

    def _count(self, index: int) -> int:
        counts = self._optimizer._engine.kept.t
        return counts[index] if index < len(counts) else 0


class ShownAttribute:
    """``optimizer.state``: per parameter ``step``, ``exp_avg`` and ``exp_avg_sq``, as ``torch.optim.AdamW`` has them, to be read.

    Values are copies. Writing raises: at once, or in the next step where a copy has been written to. `reset_state` starts
    moments over, `load_state_dict` sets them.
    """

    def __get__(self, optimizer: OnebitOptimizer | None, _: Any = None) -> Any:
        if optimizer is None:
            return self
        shown = getattr(optimizer, "_shown_state", None)
        # torch's own while it makes the optimizer, and of copies
        return vars(optimizer).setdefault("state", {}) if shown is None else shown

    def __set__(self, optimizer: OnebitOptimizer, state: Any) -> None:
        shown = getattr(optimizer, "_shown_state", None)
        if shown is None:
            vars(optimizer)["state"] = state
        else:
            shown.replace(state)


class Entry(dict[str, Any]):
    """State of one parameter; a dict of the program's own where nobody shows it (a copy, or what ``apply_to_collection`` makes of one)."""

    def __init__(self, values: Any = (), shown_by: ShownState | None = None, index: int = -1, name: str = "") -> None:
        super().__init__(values)
        self.shown_by, self.index, self.name = shown_by, index, name

    def says(self, other: Any) -> bool:
        """Whether a mapping holds the same values."""
        return (
            isinstance(other, Mapping)
            and other.keys() == self.keys()
            and all(_same(other[k], v) for k, v in self.items())
        )

    def __setitem__(self, key: str, value: Any) -> None:
        if self.shown_by is not None:
            if key not in self or not _same(value, self[key]):
                self.shown_by.refuse(f"{self.name}[{key!r}] has been assigned to")
            self.shown_by.let_go(self.index)
            return
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._refuse("has been deleted from")
        super().__delitem__(key)

    def clear(self) -> None:
        """Raises where the state is shown."""
        self._refuse("has been cleared")
        super().clear()

    def pop(self, *args: Any) -> Any:
        """Raises where the state is shown."""
        self._refuse("has been taken from")
        return super().pop(*args)

    def popitem(self) -> Any:
        """Raises where the state is shown."""
        self._refuse("has been taken from")
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """What is there, as of a dict; raises instead of adding something where the state is shown."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dict; raises where the state is shown, unless it changes nothing."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Entry:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _refuse(self, what: str) -> None:
        if self.shown_by is not None and self:
            self.shown_by.refuse(f"{self.name} {what}")


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to(b.device), b)
