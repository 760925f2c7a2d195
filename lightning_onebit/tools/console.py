"""What the commands share: friendly errors, text or JSON, exit statuses."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning_onebit._text import fill

#: exit status where the reader of standard output has gone, as a shell reports it of other tools: 128 + SIGPIPE
READER_GONE = 141


class Outcome(NamedTuple):
    """What a command has found.

    Attributes:
        status: exit status, 0 or 1.
        text: for people; empty where there is nothing to say (ranks other than 0).
        facts: for JSON.
    """

    status: int
    text: str
    facts: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Says where help is when arguments make no sense."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{fill(f'{self.prog}: error: {message}')}\n(`{self.prog} --help` lists the options)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exits, quietly also where nobody reads the help to its end (``--help | head -1``)."""
        try:
            if sys.stdout is not None:  # None: closed from the start (``>&-``)
                sys.stdout.flush()
        except OSError:
            _drop_output()
            status = status or READER_GONE
        super().exit(status, message)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json [FILE]``."""
    said = "print JSON instead of text, or (with FILE) write it besides"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=said)


def execute(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Outcome], options: argparse.Namespace
) -> int:
    """Runs a command and reports; what is wrong with its arguments or missing becomes a message instead of a traceback.

    Where the reader has gone (``| head -1``) it ends as quietly as other Unix tools, with their status.
    """
    try:
        outcome = run(options)
        if outcome.text:
            try:
                _report(outcome, options.json)
            except BrokenPipeError:
                _drop_output()
                return READER_GONE
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        parser.error(str(error))
    return outcome.status


def _report(outcome: Outcome, target: str | None) -> None:
    """Writes an outcome as text, as JSON (target ``"-"``), or as text and as JSON into a file."""
    encoded = json.dumps(_finite(outcome.facts), indent=1)
    if target not in (None, "-"):
        Path(str(target)).write_text(encoded + "\n")
    if sys.stdout is None:
        return
    sys.stdout.write((encoded if target == "-" else outcome.text) + "\n")
    sys.stdout.flush()  # here an error can still be told


def _drop_output() -> None:
    """What is buffered for standard output goes nowhere: the interpreter would fail at it once more at its end, and say so."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
