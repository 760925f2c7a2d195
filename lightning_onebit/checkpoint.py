"""What a checkpoint holds of compressed training.

The ``.ckpt`` is one ordinary Lightning file: what all ranks share (weights, momentum, variance, phase, counters) is the optimizer's
ordinary state, which another world size, plain DDP and ``load_from_checkpoint`` read alone. What differs by rank, residuals above
all, lies beside it in one file per rank, a *shard*::

    epoch=3.ckpt
    epoch=3.ckpt.onebit/<id>/rank-00000-of-00002.pt
    epoch=3.ckpt.onebit/<id>/rank-00001-of-00002.pt

The id is drawn anew at every save and stamped into the ``.ckpt`` and its shards. Shards are complete before the ``.ckpt`` appears under
its name, and those of a ``.ckpt`` that is being overwritten are removed only afterwards: whenever a run dies, the ``.ckpt`` that can be
seen has its shards.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch import Tensor

from lightning_onebit.comm import Transport
from lightning_onebit.engine import OnebitOptimizer, Phase
from lightning_onebit.engine.redistribute import Redistribution

log = logging.getLogger("lightning_onebit")

SHARD_VERSION = 1
#: key of the stamp in a ``.ckpt``
STAMP_KEY = "lightning_onebit"
# where Lightning's own plugin for torch.save is defined
_TORCH_IO = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
_ID = re.compile(r"[0-9a-f]{32}")
# longest message that ranks tell each other, bytes
_MESSAGE_BYTES = 1024


class GoodCheckpoints:
    """The checkpoints that a run can go on from, those that it has loaded or written, oldest first."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def add(self, path: str, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Notes a file that has been written or loaded."""
        self.discard(path, ())
        self._paths.append(path)
        self.tell(optimizers)

    def discard(self, path: str, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Notes that a file has been removed."""
        self._paths = [other for other in self._paths if other != path]
        self.tell(optimizers)

    def tell(self, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Lets optimizers name the newest one when they refuse to be saved."""
        for optimizer in optimizers:
            optimizer._engine.whole.checkpoint = self._paths[-1] if self._paths else None


class ShardError(RuntimeError):
    """A shard, or the checkpoint it belongs to, could not be written or read; the message names the file and the reason."""


@dataclass(frozen=True)
class Stamp:
    """Says in a ``.ckpt`` which shards belong to it.

    Attributes:
        id: 32 hexadecimal digits, drawn by rank 0 at every save.
        world_size: number of ranks that saved.
        shards: whether there are shards; in a dense warm-up, and in a world of one rank, nothing differs by rank.
        version: format of the shards.
    """

    id: str
    world_size: int
    shards: bool
    version: int = SHARD_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain values, readable with ``weights_only=True``."""
        return asdict(self)

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> Stamp | None:
        """The stamp of a loaded ``.ckpt``; None if it has none (plain DDP's, say).

        Raises:
            ShardError: not a stamp that this release can read.
        """
        found = checkpoint.get(STAMP_KEY)
        if found is None:
            return None
        try:
            stamp = cls(**found)
        except TypeError as error:
            raise ShardError(f"the checkpoint's entry {STAMP_KEY!r} is damaged: {error}") from error
        if stamp.version > SHARD_VERSION:
            raise ShardError(
                f"shards of format {stamp.version} are newer than this release reads ({SHARD_VERSION}); upgrade"
            )
        # it becomes part of a path
        whole = type(stamp.world_size) is int and stamp.world_size >= 1
        if not (isinstance(stamp.id, str) and _ID.fullmatch(stamp.id) and whole):
            raise ShardError(f"the checkpoint's entry {STAMP_KEY!r} is damaged: {found!r}")
        return stamp


# ----- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str, temporary: str) -> Iterator[IO[bytes]]:
    """A local file to be written, which takes the place of ``path`` at the end, on disk and whole; after an error nothing has changed.

    Args:
        path: the file.
        temporary: its name until then, in the same folder.
    """
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
    sync_folder(os.path.dirname(path))


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


class DurableSave:
    """Stands in for ``save_checkpoint`` of Lightning's ``TorchCheckpointIO``: local files are replaced in one move, and are on disk then.

    Lightning writes them in the folder for temporary files, from which another file system is reached by copying: a run that dies in
    the midst of that leaves half a file in the place of a good one.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __call__(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Writes beside the file, flushes to disk and renames; what is not a local file is Lightning's to write."""
        fs, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(fs, LocalFileSystem) or not _saves_by_torch(self._plugin):
            type(self._plugin).save_checkpoint(self._plugin, checkpoint, path, storage_options)
            return
        folder, name = os.path.split(local)
        os.makedirs(folder, exist_ok=True)
        # nothing that looks for checkpoints by their names finds these
        stem = f".{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        with replacing(local, os.path.join(folder, f"{stem}-{_host()}-{os.getpid()}.tmp")) as file:
            torch.save(checkpoint, file)
        _remove_left_over(folder, stem)


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
    """Whether it is Lightning's code that writes."""
    return getattr(type(plugin), "save_checkpoint", None).__module__ in _TORCH_IO


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _remove_left_over(folder: str, stem: str) -> None:
    """Removes what processes of this machine that have died have left of a file."""
    if os.name != "posix":
        return  # signal 0 asks nothing there
    for name in os.listdir(folder):
        match = re.fullmatch(rf"{re.escape(stem)}-{_host()}-(\d+)\.tmp", name)
        if match is None:
            continue
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))
        except OSError:
            continue


def resolve(checkpoint_path: str) -> str:
    """The file that a checkpoint's path stands for: ``last.ckpt`` may be a link to the one that has the shards."""
    fs, path = url_to_fs(checkpoint_path)
    return os.path.realpath(path) if isinstance(fs, LocalFileSystem) else checkpoint_path


def shard_path(checkpoint_path: str, stamp: Stamp, rank: int) -> str:
    """Where the shard of a rank lies: a path or URL beside that of the ``.ckpt``."""
    return f"{_folder(checkpoint_path)}/{stamp.id}/rank-{rank:05d}-of-{stamp.world_size:05d}.pt"


def _folder(checkpoint_path: str) -> str:
    return f"{checkpoint_path}.onebit"


def write_shard(checkpoint_path: str, stamp: Stamp, rank: int, states: Sequence[Mapping[str, Any]]) -> None:
    """Writes what only this rank has; on local filesystems the file appears under its name when it is complete.

    Args:
        checkpoint_path: path or URL of the ``.ckpt``.
        stamp: of the ``.ckpt``.
        rank: whose shard.
        states: ``residual_state_dict()`` of each compressed optimizer.

    Raises:
        ShardError: the file cannot be written.
    """
    # one copy in the host's memory serves both the checksum and the file
    states = [{**state, "tensors": {k: _on_host(t) for k, t in state["tensors"].items()}} for state in states]
    shard = {**stamp.as_dict(), "rank": rank, "optimizers": states, "sha256": checksum(states)}
    target = shard_path(checkpoint_path, stamp, rank)
    try:
        fs, path = url_to_fs(target)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not isinstance(fs, LocalFileSystem):
            # object stores show a file when it is complete; others may show half of it, which no visible .ckpt belongs to
            with fs.open(path, "wb") as file:
                torch.save(shard, file)
            return
        with replacing(path, f"{path}.{os.getpid()}.tmp") as file:
            torch.save(shard, file)
        sync_folder(os.path.dirname(os.path.dirname(path)))  # its folder is new
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ShardError(f"cannot write {target}: {error}") from error


def read_shard(checkpoint_path: str, stamp: Stamp, rank: int) -> list[dict[str, Any]]:
    """The states that ``write_shard()`` was given, tensors on the CPU.

    Nothing in the file is executed (``weights_only=True``).

    Raises:
        ShardError: missing, damaged, of another save, or not inside the checkpoint's folder.
    """
    target = shard_path(checkpoint_path, stamp, rank)
    fs, path = url_to_fs(target)
    local = isinstance(fs, LocalFileSystem)
    if local and not _inside(path, os.path.dirname(url_to_fs(checkpoint_path)[1])):
        raise ShardError(f"{target} leads outside of the checkpoint's folder")
    if not fs.exists(path):
        raise ShardError(f"{target} is missing")
    try:
        if local:
            shard = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            with fs.open(path, "rb") as file:
                shard = torch.load(file, map_location="cpu", weights_only=True)
        found = {key: shard[key] for key in ("id", "world_size", "version", "rank")}
        states, written = shard["optimizers"], shard["sha256"]
        actual = checksum(states)
    except Exception as error:  # a damaged file may make torch's reader raise anything
        raise ShardError(f"{target} is damaged: {type(error).__name__}: {error}") from error
    expected = {"id": stamp.id, "world_size": stamp.world_size, "version": stamp.version, "rank": rank}
    if found != expected:
        raise ShardError(f"{target} belongs to another checkpoint: it says {found}, {expected} was expected")
    if actual != written:
        raise ShardError(f"{target} is damaged: its content has another checksum than when it was written")
    return list(states)


def shard_ids(checkpoint_path: str) -> set[str]:
    """Ids of the checkpoints whose shards lie beside a ``.ckpt``, as far as this machine sees them."""
    fs, folder = url_to_fs(_folder(checkpoint_path))
    try:
        names = {str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(folder, detail=False)}
    except OSError:
        return set()
    return {name for name in names if _ID.fullmatch(name)}


def remove_shards(checkpoint_path: str, ids: Collection[str] | None = None) -> None:
    """Removes shards beside a ``.ckpt``, and their folder when nothing is left in it.

    Several nodes may do so at once. Failing is no reason to end a run: it is only logged.

    Args:
        checkpoint_path: path or URL of the ``.ckpt``.
        ids: of the checkpoints whose shards go; None: all.
    """
    fs, folder = url_to_fs(_folder(checkpoint_path))
    try:
        if ids is None:
            _remove_folder(fs, folder)
            return
        for name in ids:
            _remove_folder(fs, f"{folder}/{name}")
        if ids and not fs.ls(folder, detail=False):
            fs.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove old shards in %s: %s", folder, error)


def _remove_folder(fs: Any, folder: str) -> None:
    if not isinstance(fs, LocalFileSystem):
        with contextlib.suppress(FileNotFoundError):
            fs.rm(folder, recursive=True)
        return
    # goes on where another node has been faster
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder):
        os.rmdir(folder)  # says why


def checksum(states: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over layouts, names and bytes of all tensors, hexadecimal."""
    digest = hashlib.sha256()
    for state in states:
        layout = {key: value for key, value in state.items() if key != "tensors"}
        digest.update(json.dumps(layout, sort_keys=True).encode())
        for name, tensor in sorted(state["tensors"].items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    # the file must not carry a larger buffer that the tensor is a part of
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor


def _inside(path: str, folder: str) -> bool:
    folder = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), folder]) == folder


# ----- all ranks ------------------------------------------------------------------------------------------------------


def agree(transport: Transport, message: str, device: torch.device, what: str) -> str | None:
    """Tells all ranks what has gone wrong on any; also waits for all of them, within the transport's bound.

    Args:
        transport: the ranks.
        message: what went wrong here; empty if nothing did.
        device: of the parameters.
        what: name of the occasion, for failures.

    Returns:
        The message of the first rank that has one, with its rank; None if none has.
    """
    device = transport.device(device)
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    text = message.encode()[:_MESSAGE_BYTES]
    if text:
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    rows = torch.empty((transport.size, _MESSAGE_BYTES), dtype=torch.uint8, device=device)
    transport.all_gather(rows, mine, transport.topology.group, what=what, link=None).wait()
    for rank, row in enumerate(rows.cpu()):
        said = bytes(row.tolist()).rstrip(b"\0")
        if said:
            return f"rank {rank}: {said.decode(errors='replace')}"
    return None


def save_shards(
    checkpoint_path: str,
    stamp: Stamp,
    transport: Transport,
    states: Sequence[Mapping[str, Any]],
    device: torch.device,
    publish: Callable[[], None],
    *,
    cleans: bool,
    asynchronous: bool = False,
) -> None:
    """Writes the shards of all ranks, then the ``.ckpt``. Collective.

    Args:
        checkpoint_path: path or URL of the ``.ckpt``, the same on all ranks.
        stamp: drawn by rank 0.
        transport: the ranks that save.
        states: ``residual_state_dict()`` of each compressed optimizer.
        device: of the parameters.
        publish: makes the ``.ckpt`` appear (does nothing on ranks other than 0).
        cleans: whether this rank removes what a save that fails has left on its node.
        asynchronous: whether ``publish`` only hands the ``.ckpt`` over to be written.

    Raises:
        ShardError: on every rank, if any rank cannot write; an older checkpoint of this name stays whole.
    """
    rank, problem = transport.topology.rank, ""
    if stamp.shards:
        try:
            write_shard(checkpoint_path, stamp, rank, states)
        except ShardError as error:
            problem = str(error)
    failed = agree(transport, problem, device, "saving shards")
    if failed is None:
        raised: Exception | None = None
        try:
            publish()
        except Exception as reason:
            raised = reason
        failed = agree(transport, f"cannot write {checkpoint_path}: {raised}" if raised else "", device, "saving")
        if failed is not None and cleans and not asynchronous:
            remove_shards(checkpoint_path, [stamp.id])
        if raised is not None:
            raise raised
    elif cleans:
        remove_shards(checkpoint_path, [stamp.id])
    if failed is not None:
        raise ShardError(f"the checkpoint is not saved; an older one of the same name is as it was. {failed}")


def restore_residuals(
    checkpoint_path: str,
    stamp: Stamp,
    transport: Transport,
    optimizers: Sequence[OnebitOptimizer],
    device: torch.device,
) -> str | None:
    """Completes optimizers whose replicated state has just been loaded with what differs by rank. Collective.

    Into the world it was saved from, everything returns bit for bit. Into another one it is redistributed (see
    ``Redistribution``), reading one shard at a time.

    Args:
        checkpoint_path: path or URL of the ``.ckpt``.
        stamp: of the ``.ckpt``; it has shards.
        transport: the ranks of this run.
        optimizers: the compressed optimizers, after ``load_state_dict``.
        device: of the parameters.

    Returns:
        A sentence about what was redistributed; None when all is as it was.

    Raises:
        ShardError: on every rank, if any rank finds a shard missing, damaged or unsuitable. No optimizer has been changed.
    """
    states: list[dict[str, Any]] = []
    said, problem = None, ""
    try:
        states, said = _states_for(resolve(checkpoint_path), stamp, transport.topology.rank, optimizers)
    except (ShardError, ValueError, KeyError) as error:
        problem = str(error)
    failed = agree(transport, problem, device, "loading shards")
    if failed is not None:
        raise ShardError(failed)
    for optimizer, state in zip(optimizers, states, strict=True):
        # (weights that the program has changed on loading count for the model that all share)
        optimizer.load_residual_state_dict({k: v for k, v in state.items() if k != "shared_weights"})
    return said


def _states_for(
    checkpoint_path: str, stamp: Stamp, rank: int, optimizers: Sequence[OnebitOptimizer]
) -> tuple[list[dict[str, Any]], str | None]:
    """This rank's states, and what was redistributed."""
    mine = [{k: v for k, v in optimizer.residual_state_dict().items() if k != "tensors"} for optimizer in optimizers]
    if stamp.world_size == mine[0]["world_size"]:
        states = _checked(read_shard(checkpoint_path, stamp, rank), len(mine))
        if all(map(_fits, states, mine)):
            return states, None
    parts = [Redistribution(own) for own in mine]
    nodes = 1
    for other in range(stamp.world_size):
        states = _checked(read_shard(checkpoint_path, stamp, other), len(mine))
        for part, state in zip(parts, states, strict=True):
            part.add(state)
        nodes = states[0]["ranks_per_node"]
    dropped = any(part.dropped for part in parts)
    before, now = (stamp.world_size, nodes), (mine[0]["world_size"], mine[0]["ranks_per_node"])
    averaged = (
        "server residuals are cut anew, worker residuals (and momenta of BinSGDM and 1-bit SGD) are averaged over ranks"
    )
    return [part.result() for part in parts], (
        (
            f"residuals of {_world(*before)} continue in other buckets"
            if before == now
            else f"residuals of {_world(*before)} continue on {_world(*now)}: {averaged}"
        )
        + ("; steps that ranks had made alone since the last synchronisation are dropped" if dropped else "")
    )


def _fits(state: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether an optimizer that describes itself as ``own`` can load this state as it is."""
    free = {"tensors": 0, "shared_weights": 0}
    return {**state, **free} == {**own, **free}


def _checked(states: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    if len(states) != count:
        raise ShardError(f"the shards hold the state of {len(states)} compressed optimizers, this run has {count}")
    return states


def _world(size: int, ranks_per_node: int) -> str:
    return f"{size} rank{'s' * (size > 1)}" + (f" ({ranks_per_node} per node)" if ranks_per_node > 1 else "")


def restarted(optimizers: Sequence[OnebitOptimizer]) -> list[OnebitOptimizer]:
    """Those that go on compressing with residuals that start from zero, when there is nothing to restore."""
    return [optimizer for optimizer in optimizers if optimizer.phase is not Phase.WARMUP and optimizer.compresses]
