"""Files that are whole under their name: written beside it, flushed to disk, moved in one step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterator
from typing import IO, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

# where Lightning's own plugin for torch.save is defined
_TORCH_IO = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")


@contextlib.contextmanager
def writing(url: str) -> Iterator[IO[bytes]]:
    """A file to be written, in a folder that is made for it; a local one appears under its name when it is whole and on disk.

    After an error nothing has changed. Object stores show a file when it is complete too; others may show half of it.
    """
    fs, path = url_to_fs(url)
    folder, name = os.path.split(path)
    fs.makedirs(folder, exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        with fs.open(path, "wb") as file:
            yield file
        return
    stem = _stem(name)
    temporary = os.path.join(folder, f"{stem}-{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    sync_folder(folder)
    _remove_left_over(folder, stem)


def _stem(name: str) -> str:
    """How temporary names of a file begin on this machine; nothing that looks for checkpoints by their names finds them."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    return f".{hashlib.sha256(name.encode()).hexdigest()[:16]}-{host}"


def folder_beside(path: str) -> str:
    """Makes an empty folder beside a path, whose content ``move_folder()`` brings there; what dead processes have left of one goes."""
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    _remove_left_over(folder or ".", _stem(name))
    temporary = os.path.join(folder, f"{_stem(name)}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    return temporary


def move_folder(temporary: str, path: str) -> None:
    """Brings a folder under its name, in the place of a file or folder that is there.

    A folder cannot be replaced in one move: the older one is moved aside first, and ``put_back()`` finds it if this process dies before
    the new one is in its place.
    """
    sync_folder(temporary)
    with set_aside(path):
        os.rename(temporary, path)
    sync_folder(os.path.dirname(path))


@contextlib.contextmanager
def set_aside(path: str) -> Iterator[None]:
    """Within it there is nothing under a path; afterwards what was there is gone, or back after an error."""
    put_back(path)
    if not os.path.lexists(path):
        yield
        return
    aside = _aside(path)
    os.rename(path, aside)
    try:
        yield
    except BaseException:
        os.rename(aside, path)
        raise
    _remove(aside)


def put_back(path: str) -> None:
    """Ends a ``set_aside()`` whose process has died: what it has moved aside returns, unless something new has come."""
    aside = _aside(path)
    if os.path.lexists(aside):
        if os.path.lexists(path):
            _remove(aside)
        else:
            os.rename(aside, path)


def _aside(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.aside")


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.remove(path)


def sync_folder(folder: str) -> None:
    """Brings the names in a local folder to disk, on file systems that can."""
    try:
        number = os.open(folder or ".", os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(number)


def _remove_left_over(folder: str, stem: str) -> None:
    """Removes what processes of this machine that have died have left of a file."""
    if os.name != "posix":
        return  # signal 0 asks nothing there
    for name in os.listdir(folder):
        if (match := re.fullmatch(rf"{re.escape(stem)}-(\d+)\.tmp", name)) is not None:
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                with contextlib.suppress(OSError):
                    _remove(os.path.join(folder, name))
            except OSError:
                continue


class DurableSave:
    """Stands in for ``save_checkpoint`` of Lightning's ``TorchCheckpointIO``: local files are replaced in one move, and are on disk then.

    Lightning writes them in the folder for temporary files, from which another file system is reached by copying: a run that dies in
    the midst of that leaves half a file in the place of a good one.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __call__(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; what is not a local file is Lightning's to write."""
        local = isinstance(url_to_fs(str(path))[0], LocalFileSystem)
        if storage_options is not None or not local or not _saves_by_torch(self._plugin):
            type(self._plugin).save_checkpoint(self._plugin, checkpoint, path, storage_options)
            return
        with writing(str(path)) as file:
            torch.save(checkpoint, file)


def durable(plugin: Any) -> Any:
    """Makes Lightning's own ``TorchCheckpointIO`` replace local files in one move, alone or within a plugin that wraps it.

    A plugin of the user's that writes files itself stays as it is.
    """
    wrapped = getattr(plugin, "_checkpoint_io", None)
    if wrapped is not None:
        durable(wrapped)
    elif _saves_by_torch(plugin) and "save_checkpoint" not in vars(plugin):
        plugin.save_checkpoint = DurableSave(plugin)
    return plugin


def _saves_by_torch(plugin: Any) -> bool:
    """Whether it is Lightning's code that writes; a program may have replaced it."""
    return type(plugin).save_checkpoint.__module__ in _TORCH_IO
