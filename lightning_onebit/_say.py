"""What training says through Lightning's logger, in lines that fit a terminal."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info as _info

from lightning_onebit._text import fill


def rank_zero_info(text: str) -> None:
    """Lightning's, in lines of at most 80 columns."""
    _info(fill(text, "  "), stacklevel=5)


def below_bar(trainer: Any, text: str) -> str:
    """``text`` on a line of its own where the progress bar is drawn, which leaves the cursor at the end of its line."""
    bar = trainer.progress_bar_callback
    return f"\n{text}" if getattr(bar, "is_enabled", False) else text
