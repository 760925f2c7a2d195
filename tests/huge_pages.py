"""Puts the memory of the process that imports this into huge pages, so that forking it takes a third of the time.

The harness's server imports it last. Where the system has no such call (it came with Linux 6.1), nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

SIZE = 2 << 20
MADV_COLLAPSE = 25


def collapse() -> int:
    """Bytes of private writable memory that now lie in huge pages."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-start // SIZE) * SIZE, end // SIZE * SIZE, SIZE):
            done += SIZE * (advise(page, SIZE, MADV_COLLAPSE) == 0)
    return done


with contextlib.suppress(OSError, AttributeError):  # no /proc, no madvise
    collapse()
