"""What programs must set alike on all ranks while they train: learning rates and the other hyperparameters of parameter groups.

A plateau scheduler that looks at a metric of its own rank sets them apart. Replicas would drift, and decisions that follow from lr would
part the ranks. Every change goes into a running digest, which ranks compare where they meet anyway.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

#: dense steps, which have no control round, from one comparison to the next
AGREE_EVERY = 64
#: past settings that a message can tell of
_REMEMBERED = 256


class Agreement:
    """A digest of all hyperparameters that there have been, the same on ranks that have set the same at the same steps."""

    def __init__(self) -> None:
        self.digest = 0  # 31 bits, which the control round has room for
        self._values: list[tuple[Any, ...]] = []
        self._facts: list[str] = []  # by group
        self._past: deque[str] = deque(maxlen=_REMEMBERED)  # facts that have changed since ranks last agreed

    def note(self, step: int, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        """Takes note of what ``step`` is made with."""
        values = [tuple([group[name] for name in names]) for group in groups]
        if values == self._values:
            return
        for index, now in enumerate(values):
            if index < len(self._values) and self._values[index] == now:
                continue
            settings = ", ".join(f"{name}={value}" for name, value in zip(names, now, strict=True))
            fact = f"since step {step} parameter group {index} with {settings}"
            self._past += self._facts[index : index + 1]
            self._facts[index : index + 1] = [fact]
            self.digest = zlib.crc32(fact.encode(), self.digest) >> 1
        self._values = values

    def reached(self) -> None:
        """All ranks have the same digest."""
        self._past.clear()

    def facts(self) -> list[str]:
        """What the digest is made of, the latest first, as far as it is remembered."""
        return [*self._facts, *reversed(self._past), f"digest {self.digest} of all that has been set before"]
