"""What a checkpoint holds of compressed training.

The ``.ckpt`` is one ordinary Lightning file: what all ranks share (weights, momentum, variance, phase, counters) is the optimizer's
ordinary state, which another world size, plain DDP and ``load_from_checkpoint`` read alone. What differs by rank, residuals above
all, lies beside it in one file per rank, a *shard*::

    epoch=3.ckpt
    epoch=3.ckpt.onebit/<id>/rank-00000-of-00002.pt
    epoch=3.ckpt.onebit/<id>/rank-00001-of-00002.pt

If the model is sharded, ranks are numbered by replica, and names begin with the column (``column-00000-of-00004-rank-...``).

The id is drawn anew at every save and stamped into the ``.ckpt`` and its shards. Shards are complete before the ``.ckpt`` appears under
its name, and those of a ``.ckpt`` that is being overwritten are removed only afterwards: whenever a run dies, the ``.ckpt`` that can be
seen has its shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch import Tensor

from lightning_onebit.engine import OnebitOptimizer, Phase
from lightning_onebit.engine.redistribute import Redistribution
from lightning_onebit.strategy.files import sync_folder, writing
from lightning_onebit.strategy.ranks import Ranks, Replicas

log = logging.getLogger("lightning_onebit")

SHARD_VERSION = 1
#: key of the stamp in a ``.ckpt``
STAMP_KEY = "lightning_onebit"
_ID = re.compile(r"[0-9a-f]{32}")


class ShardError(RuntimeError):
    """A shard, or the checkpoint it belongs to, could not be written or read; the message names the file and the reason."""


@dataclass(frozen=True)
class Stamp:
    """Says in a ``.ckpt`` which shards belong to it.

    Attributes:
        id: 32 hexadecimal digits, drawn by rank 0 at every save.
        world_size: number of ranks that saved; of a sharded model the number of its replicas.
        shards: whether there are shards; in a dense warm-up, and in a world of one rank, nothing differs by rank.
        version: format of the shards.
        columns: ranks that hold one replica together.
    """

    id: str
    world_size: int
    shards: bool
    version: int = SHARD_VERSION
    columns: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, readable with ``weights_only=True``."""
        return {key: value for key, value in asdict(self).items() if (key, value) != ("columns", 1)}

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
        whole = all(type(number) is int and number >= 1 for number in (stamp.world_size, stamp.columns))
        if not (isinstance(stamp.id, str) and _ID.fullmatch(stamp.id) and whole):
            raise ShardError(f"the checkpoint's entry {STAMP_KEY!r} is damaged: {found!r}")
        return stamp


def resolve(checkpoint_path: str) -> str:
    """The file that a checkpoint's path stands for: ``last.ckpt`` may be a link to the one that has the shards."""
    fs, path = url_to_fs(checkpoint_path)
    return os.path.realpath(path) if isinstance(fs, LocalFileSystem) else checkpoint_path


def shard_path(checkpoint_path: str, stamp: Stamp, rank: int, column: int = 0) -> str:
    """Where the shard of a rank lies: a path or URL beside that of the ``.ckpt``."""
    of_model = f"column-{column:05d}-of-{stamp.columns:05d}-" if stamp.columns > 1 else ""
    return f"{checkpoint_path}.onebit/{stamp.id}/{of_model}rank-{rank:05d}-of-{stamp.world_size:05d}.pt"


def write_shard(
    checkpoint_path: str, stamp: Stamp, rank: int, states: Sequence[Mapping[str, Any]], column: int = 0
) -> None:
    """Writes what only this rank has: ``residual_state_dict()`` of each compressed optimizer.

    Raises:
        ShardError: the file cannot be written.
    """
    # one copy in the host's memory serves both the checksum and the file
    states = [
        {**state, "tensors": {k: own_storage(t.detach().cpu()) for k, t in state["tensors"].items()}}
        for state in states
    ]
    shard = {**_identity(stamp, rank, column), "optimizers": states, "sha256": checksum(states)}
    target = shard_path(checkpoint_path, stamp, rank, column)
    try:
        with writing(target) as file:
            torch.save(shard, file)
        fs, path = url_to_fs(target)
        if isinstance(fs, LocalFileSystem):
            sync_folder(os.path.dirname(os.path.dirname(path)))  # the shard's folder is new
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ShardError(f"cannot write {target}: {error}") from error


def _identity(stamp: Stamp, rank: int, column: int) -> dict[str, Any]:
    """Which shard of which save it is."""
    return {**stamp.as_dict(), "rank": rank, **({"column": column} if stamp.columns > 1 else {})}


def read_shard(checkpoint_path: str, stamp: Stamp, rank: int, column: int = 0) -> list[dict[str, Any]]:
    """The states that ``write_shard()`` was given, tensors on the CPU.

    Nothing in the file is executed (``weights_only=True``).

    Raises:
        ShardError: missing, damaged, of another save, or not inside the checkpoint's folder.
    """
    target = shard_path(checkpoint_path, stamp, rank, column)
    fs, path = url_to_fs(target)
    local = isinstance(fs, LocalFileSystem)
    folder = os.path.realpath(os.path.dirname(url_to_fs(checkpoint_path)[1]))
    if local and os.path.commonpath([os.path.realpath(path), folder]) != folder:
        raise ShardError(f"{target} leads outside of the checkpoint's folder")
    if not fs.exists(path):
        raise ShardError(f"{target} is missing")
    try:
        if local:
            shard = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            with fs.open(path, "rb") as file:
                shard = torch.load(file, map_location="cpu", weights_only=True)
        expected = _identity(stamp, rank, column)
        del expected["shards"]
        found = {key: shard[key] for key in expected}
        states, written = shard["optimizers"], shard["sha256"]
        actual = checksum(states)
    except Exception as error:  # a damaged file may make torch's reader raise anything
        raise ShardError(f"{target} is damaged: {type(error).__name__}: {error}") from error
    if found != expected:
        raise ShardError(f"{target} belongs to another checkpoint: it says {found}, {expected} was expected")
    if actual != written:
        raise ShardError(f"{target} is damaged: its content has another checksum than when it was written")
    return list(states)


def shard_ids(checkpoint_path: str) -> set[str]:
    """Ids of the checkpoints whose shards lie beside a ``.ckpt``, as far as this machine sees them."""
    fs, folder = url_to_fs(f"{checkpoint_path}.onebit")
    try:
        names = {str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(folder, detail=False)}
    except OSError:
        return set()
    return {name for name in names if _ID.fullmatch(name)}


def remove_shards(checkpoint_path: str, ids: Collection[str] | None = None) -> None:
    """Removes the shards of some checkpoints beside a ``.ckpt`` (None: all), and their folder when nothing is left in it.

    Several nodes may do so at once. Failing is no reason to end a run: it is only logged.
    """
    fs, folder = url_to_fs(f"{checkpoint_path}.onebit")
    try:
        for path in [folder] if ids is None else [f"{folder}/{name}" for name in ids]:
            if not isinstance(fs, LocalFileSystem):
                with contextlib.suppress(FileNotFoundError):
                    fs.rm(path, recursive=True)
                continue
            # goes on where another node has been faster
            shutil.rmtree(path, ignore_errors=True)
            if os.path.isdir(path):
                os.rmdir(path)  # says why
        if ids and not fs.ls(folder, detail=False):
            fs.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove old shards in %s: %s", folder, error)


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


def own_storage(tensor: Tensor) -> Tensor:
    """A tensor, or a copy of one that is a part of a larger buffer, so that a file does not carry the buffer."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor


# ----- all ranks ------------------------------------------------------------------------------------------------------


def save_shards(
    checkpoint_path: str,
    states: Sequence[Mapping[str, Any]],
    ranks: Ranks,
    publish: Callable[[Stamp], None],
    *,
    replicas: Replicas | None = None,
    cleans: bool,
    asynchronous: bool = False,
) -> tuple[str, str, set[str]]:
    """Writes the shards of all ranks, then the ``.ckpt``. Collective.

    Args:
        checkpoint_path: path or URL; metrics in file names may differ by rank: rank 0's counts, as its file does.
        states: ``residual_state_dict()`` of each compressed optimizer.
        ranks: those that save.
        publish: makes the ``.ckpt`` with this stamp appear; called on all ranks.
        replicas: how they share the model; None: each has all of it.
        cleans: whether this rank removes what a save that fails has left on its node.
        asynchronous: whether ``publish`` only hands the ``.ckpt`` over to be written.

    Returns:
        The path, the id of the shards, and the ids of those that were there before.

    Raises:
        ShardError: on every rank, if any rank cannot write; an older checkpoint of this name stays whole.
    """
    replicas = replicas or Replicas(ranks.size)
    mine = any(state["tensors"] for state in states)
    said = ranks.gather((checkpoint_path, uuid.uuid4().hex, mine))
    path, chosen, _ = said[0]
    older = shard_ids(path).difference([chosen])  # other ranks may have begun to write
    # a rank may hold no element of a sharded model
    stamp = Stamp(chosen, replicas.count, any(theirs for *_, theirs in said), columns=replicas.shards)
    position, column = replicas.place(ranks.rank)
    problem, raised = "", None
    if stamp.shards:
        try:
            write_shard(path, stamp, position, states, column)
        except ShardError as error:
            problem = str(error)
    failed = incomplete = ranks.agree(problem)
    if incomplete is None:
        try:
            publish(stamp)
        except Exception as reason:
            raised = reason
        failed = ranks.agree(f"cannot write {path}: {raised}" if raised else "")
    if failed is not None and cleans and (incomplete is not None or not asynchronous):
        remove_shards(path, [chosen])
    if raised is not None:
        raise raised
    if failed is not None:
        raise ShardError(f"the checkpoint is not saved; an older one of the same name is as it was. {failed}")
    return path, chosen, older


def restore_residuals(
    loaded: Mapping[str, Any],
    checkpoint_path: str | None,
    optimizers: Sequence[OnebitOptimizer],
    ranks: Ranks,
    replicas: Replicas | None = None,
) -> str | None:
    """Completes optimizers whose replicated state was loaded from a ``.ckpt`` with what differs by rank. Collective.

    Into the world it was saved from, everything returns bit for bit. Into another number of replicas it is redistributed (see
    ``Redistribution``), reading one shard at a time. Residuals of a model that is sharded in another way are those of other elements.

    Returns:
        A sentence about what was redistributed; None when all is as it was.

    Raises:
        ShardError: on every rank, if any rank finds a shard missing, damaged or unsuitable, or there are none although the optimizers go
            on compressing. No optimizer has been changed.
    """
    stamp = Stamp.of(loaded)
    if stamp is None and restarted(optimizers):
        raise ShardError("they are not in the checkpoint")
    if stamp is None or not stamp.shards:  # when it was saved, nothing differed by rank
        return None
    if checkpoint_path is None:
        raise ShardError("the checkpoint was not loaded from a file by this strategy")
    states: list[dict[str, Any]] = []
    said, problem = None, ""
    try:
        replicas = replicas or Replicas(ranks.size)
        position, column = replicas.place(ranks.rank)
        if stamp.columns != replicas.shards:
            raise ShardError(
                f"they belong to replicas of {stamp.columns} rank(s) each, which hold other parts of the model than those here, of "
                f"{replicas.shards} rank(s)"
            )
        states, said = _states_for(resolve(checkpoint_path), stamp, position, column, optimizers)
    except (ShardError, ValueError, KeyError) as error:
        problem = str(error)
    failed = ranks.agree(problem)
    if failed is not None:
        raise ShardError(failed)
    for optimizer, state in zip(optimizers, states, strict=True):
        # (weights that the program has changed on loading count for the model that all share)
        optimizer.load_residual_state_dict({k: v for k, v in state.items() if k != "shared_weights"})
    return said


def _states_for(
    checkpoint_path: str, stamp: Stamp, rank: int, column: int, optimizers: Sequence[OnebitOptimizer]
) -> tuple[list[dict[str, Any]], str | None]:
    """This rank's states, and what was redistributed."""
    mine = [{k: v for k, v in optimizer.residual_state_dict().items() if k != "tensors"} for optimizer in optimizers]

    def shard(rank: int) -> list[dict[str, Any]]:
        states = read_shard(checkpoint_path, stamp, rank, column)
        if len(states) != len(mine):
            raise ShardError(
                f"the shards hold the state of {len(states)} compressed optimizers, this run has {len(mine)}"
            )
        return states

    free = {"tensors": 0, "shared_weights": 0}
    if stamp.world_size == mine[0]["world_size"]:
        states = shard(rank)
        if all({**state, **free} == {**own, **free} for state, own in zip(states, mine, strict=True)):
            return states, None
    parts = [Redistribution(own) for own in mine]
    for other in range(stamp.world_size):
        states = shard(other)
        for part, state in zip(parts, states, strict=True):
            part.add(state)
    noun = "replica" if stamp.columns > 1 else "rank"
    before, now = (_world(state["world_size"], state["ranks_per_node"], noun) for state in (states[0], mine[0]))
    said = (
        f"residuals of {before} continue on {now}: server residuals are cut anew, worker residuals (and "
        f"momenta of BinSGDM and 1-bit SGD) are averaged over {noun}s"
        if before != now
        else f"residuals of {before} continue in other buckets"
    )
    if any(part.dropped for part in parts):
        said += "; steps that ranks had made alone since the last synchronisation are dropped"
    return [part.result() for part in parts], said


def _world(size: int, ranks_per_node: int, noun: str) -> str:
    return f"{size} {noun}{'s' * (size > 1)}" + (f" ({ranks_per_node} per node)" if ranks_per_node > 1 else "")


def restarted(optimizers: Sequence[OnebitOptimizer]) -> list[OnebitOptimizer]:
    """Those that go on compressing with residuals that start from zero, when there is nothing to restore."""
    return [optimizer for optimizer in optimizers if optimizer.phase is not Phase.WARMUP and optimizer.compresses]
