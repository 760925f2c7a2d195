"""Files that are kept from one run to the next and then executed: written to last, and believed only when they are whole and ours.

Beside a file lies its record, ``NAME.sha256``: the hash and the length of the content, and the file's name. Both are
flushed to the disk before they appear under their names, the record last. A file is used only if both are regular files of this user
that nobody else can write to, and the record fits. Anything else (truncated, zeroed, without a record, put there by someone else while
the folder was open to others) counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_private(info: os.stat_result) -> bool:
    """Whether something belongs to this user and nobody else can write to it."""
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE


def fetch(path: Path) -> bytes | None:
    """The content of a kept file; None if there is none, or none to be believed."""
    content, record = _read(path), _read(_record_path(path))
    return content if content and record == _record(path, content) else None


def keep(path: Path, content: bytes) -> None:
    """Keeps ``content`` under ``path`` in place of what is there.

    Raises:
        OSError: it cannot be written.
    """
    _write(path, content)
    _write(_record_path(path), _record(path, content))


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _record(path: Path, content: bytes) -> bytes:
    # with the name: files of ours that somebody has swapped do not pass for each other
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} ".encode() + os.fsencode(path.name) + b"\n"


def _read(path: Path) -> bytes | None:
    """What a private regular file holds; symlinks are not followed, and nothing is waited for (a FIFO)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or not is_private(info):
            return None
        try:
            return file.read()
        except OSError:
            return None


def _write(path: Path, content: bytes) -> None:
    """Renames what is on the disk by then: after a loss of power there is the old file or the new one, never half of one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    with contextlib.suppress(OSError):  # some file systems do not flush folders
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
