"""Numbers, lines and tables as people read them; imports nothing of this package."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

#: columns of a terminal, of which nothing that is printed takes more
WIDTH = 80


def fill(text: str, indent: str = "") -> str:
    """Text in lines of at most 80 columns; lines that fit stay as they are, and words (a path) are never torn.

    Args:
        text: of one or several lines.
        indent: what the continuation of a line begins with.
    """
    lines = []
    for line in text.split("\n"):
        pieces = textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += [line] if len(line) <= WIDTH else pieces
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]], least: Sequence[int], *, titled: bool = False) -> str:
    """Rows as lines of right-aligned columns, two spaces apart at least.

    Args:
        rows: the cells, headings first.
        least: least width of each column.
        titled: whether the first column holds titles, which are left-aligned.

    Example:
        >>> print(format_table([("n", "ms"), ("12", "3.5")], (3, 6)))
          n    ms
         12   3.5
    """
    widths = [max(least[i], 2 * bool(i) + max(map(len, column))) for i, column in enumerate(zip(*rows, strict=True))]
    aligned = ["<" if titled and not i else ">" for i in range(len(widths))]
    return "\n".join("".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligned, widths, strict=True)) for row in rows)


def format_figure(value: float, digits: int = 4, separator: str = "") -> str:
    """A number with so many significant digits, without an exponent below 1e7: its whole part in full, its fraction to six decimals.

    Args:
        value: the number.
        digits: significant digits of numbers that have no more before the point.
        separator: of thousands.

    Example:
        >>> [format_figure(value) for value in (202.03, 18_923.4, 0.00008, 7e7)]
        ['202', '18923', '0.00008', '7e+07']
        >>> format_figure(175_000, separator=",")
        '175,000'
    """
    size = abs(value)
    if 10**digits - 0.5 <= size < 1e7:
        return f"{value:{separator}.0f}"
    if 0 < size < 1e-4:
        return f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{value:{separator}.{digits}g}"


def format_millions(count: int) -> str:
    """A number of parameters as text, e.g. ``1,300 M``."""
    return f"{format_figure(count / 1e6, separator=',')} M"


def format_bits(rate: float) -> str:
    """Bits per second as text, e.g. ``4.1 Gb/s``."""
    for unit in ("b/s", "kb/s", "Mb/s", "Gb/s"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{format_figure(rate, 3)} Tb/s"


def format_seconds(seconds: float) -> str:
    """Seconds as milliseconds, e.g. ``12.5 ms``."""
    return f"{format_figure(1000 * seconds, 3)} ms"
