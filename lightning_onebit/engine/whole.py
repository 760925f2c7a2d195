"""All or nothing: signals wait for the end of a step, and a step that does not end leaves a mark that nothing is saved over."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeAlias

Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"

# those whose handlers raise, or save: Ctrl-C, the end of a job, a batch system's warning. SIGINT comes first, see __enter__
_SIGNALS = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    if hasattr(signal, name)
]


# what the module signal is a wrapper of, without the enums that make each call ten times as long; asked for several times in a step
_raw: Any = sys.modules.get("_signal", signal)


class NotFinite(Exception):
    """What has come back of an exchange is not finite: the step is not made. Nothing has been written by then."""


class TornStep(RuntimeError):
    """A step has begun to write and not ended: weights, momentum and residuals are not those of one step, and are not saved.

    The message says what ended it, and names the newest checkpoint of the run where a strategy knows it. The optimizer
    is usable again after ``load_state_dict()``; weights must be loaded too.
    """


class _Held:
    """Stands in for a signal's handler. The first signal waits; a second one goes through at once."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.frame: FrameType | None = None
        self.waits = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.waits:
            self.waits, self.frame = False, None
            self.handler(signum, frame)
        else:
            self.waits, self.frame = True, frame


class signals_held:
    """Within it signals that have a handler in Python wait; afterwards they are handled.

    In other threads than the main one, which handles no signals, it does nothing.

    Args:
        later: is given this object where the context ends without an exception, and has to ``release()`` it where its caller is between
            two steps; signals but SIGTERM wait until then (None: until the end of the context).
    """

    def __init__(self, later: Callable[[signals_held], None] | None = None) -> None:
        self._later = later
        self._held: list[tuple[int, _Held]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = _raw.getsignal(number)
                # (SIG_IGN and SIG_DFL are numbers; the process is not told of them)
                if callable(handler) and not isinstance(handler, _Held):
                    held = _Held(handler)
                    self._held.append((number, held))
                    _raw.signal(number, held)
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._later is None or kind is not None:
            self.release()
        elif self._held:
            self._later(self)
            self.release(
                {signal.SIGTERM}
            )  # whose handler in Lightning sets a flag, which is looked at between two batches

    def release(self, numbers: Collection[int] | None = None, *, ended: bool = False) -> None:
        """Puts handlers back, and handles the signals that have waited.

        Args:
            numbers: of the signals (None: all).
            ended: the run is being ended by an exception, so a Ctrl-C has nothing left to do.
        """
        for number, held in self._restore(numbers):
            frame, held.frame = held.frame, None
            if not (ended and number == signal.SIGINT):
                held.handler(number, frame)

    def _restore(self, numbers: Collection[int] | None = None) -> list[tuple[int, _Held]]:
        """Puts handlers back, SIGINT's last; returns what has waited."""
        held = [pair for pair in reversed(self._held) if numbers is None or pair[0] in numbers]
        self._held = [pair for pair in self._held if pair not in held]
        for number, stand_in in held:
            if _raw.getsignal(number) is stand_in:  # a handler may have put another in its place
                _raw.signal(number, stand_in.handler)
        return [(number, stand_in) for number, stand_in in held if stand_in.waits]


class Wholeness:
    """Whether an optimizer's state is that of one step.

    Attributes:
        under_way: what has begun and not ended, in words; empty between steps.
        cause: what ended it before its time.
        within: whether it is being done now.
        written: whether what is being done has begun to write; before that it can end without a trace.
        checkpoint: the newest checkpoint to go on from; None: there is none; empty: nobody has said.
    """

    def __init__(self) -> None:
        self.under_way = ""
        self.cause = ""
        self.within = self.written = False
        self.checkpoint: str | None = ""

    @contextlib.contextmanager
    def change(self, what: str, *, written: bool = True) -> Iterator[None]:
        """Marks what happens within it as not to be seen half done; an exception leaves the mark.

        Args:
            what: happens, in words.
            written: whether it begins to write at once; otherwise ``writes()`` says when, and an exception before leaves no mark.
        """
        inner, outer = (self.within, self.written), self.under_way
        self.under_way = outer or what
        try:
            self.within, self.written = True, written or self.written
            yield
        except BaseException as error:
            if not self.written:
                self.under_way = outer
            else:
                self.cause = self.cause or f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            self.within, self.written = inner
        self.under_way = outer

    def writes(self) -> None:
        """From here on what is being done cannot be taken back."""
        self.written = True

    def reset(self) -> None:
        """All state is being replaced."""
        self.under_way = self.cause = ""

    def error(self, name: str) -> TornStep:
        """Says what has happened, and what to go on from."""
        ended = f" ({self.cause})" if self.cause else ""
        if self.checkpoint:
            remedy = f"Go on from the last good checkpoint, {self.checkpoint}"
        elif self.checkpoint is None:
            remedy = "This run has no checkpoint to go on from"
        else:
            remedy = (
                "Go on from the last good checkpoint: load its weights, and its optimizer state by load_state_dict()"
            )
        return TornStep(
            f"{name}: {self.under_way} did not end{ended}. Weights, momentum and residuals are partly those before it and partly those "
            f"after it, so they are not saved and training cannot go on from them. {remedy}"
        )
