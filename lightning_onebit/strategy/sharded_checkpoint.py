"""Checkpoints of sharded models: a folder with the shards of the first replica, or one file with whole tensors.

A folder is written by ``torch.distributed.checkpoint``, with all that is no tensor in ``meta.pt``, as Lightning's own are. Whatever lies
in it is the first replica's: tensors that are sharded from its ranks, others from rank 0. A file is an ordinary ``.ckpt``, the same that
``OnebitStrategy`` writes. Both can be read on any mesh, for tensors are cut anew. What differs by rank lies beside either (``shards``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.engine.sharded import is_dtensor, place
from lightning_onebit.strategy.averaging import unwrap
from lightning_onebit.strategy.checks import params_of
from lightning_onebit.strategy.files import folder_beside, move_folder, put_back, set_aside, writing
from lightning_onebit.strategy.shards import ShardError, resolve

#: all that is no tensor, in a folder
META = "meta.pt"
# what wrappers add to the names of parameters
_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def is_folder(path: str) -> bool:
    """Whether a checkpoint is a folder with shards."""
    return os.path.isfile(os.path.join(path, META))


class ShardedFiles:
    """Reads and writes checkpoints of a strategy's model and optimizers."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    # ----- writing ----------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of an optimizer, by the parameters' numbers: shards, or whole tensors on rank 0. A collective of each replica."""
        state: dict[str, Any] = unwrap(optimizer).state_dict()
        if self._strategy._save_distributed_checkpoint:
            return state
        whole: dict[Any, Any] = {}
        if self._first_replica:
            for index, values in state["state"].items():
                gathered = {key: _whole(value) for key, value in values.items()}
                if self._strategy.global_rank == 0:
                    whole[index] = gathered
        return {**state, "state": whole}

    @property
    def _first_replica(self) -> bool:
        return bool(self._strategy.replicas.place(self._strategy.global_rank)[0] == 0)

    def publish(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Makes a checkpoint appear under its name; whatever has this name stays whole until then. Collective.

        Raises:
            TypeError: ``storage_options``, which nobody could heed.
            IsADirectoryError: the name is that of a folder that is no checkpoint.
            ShardError: on all ranks, if the folder cannot be made.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} has no effect on checkpoints of sharded models: leave it out"
            )
        if self._strategy._save_distributed_checkpoint:
            self._publish_folder(checkpoint, path)
        elif self._strategy.global_rank == 0:
            if not os.path.isdir(path):
                self._strategy.checkpoint_io.save_checkpoint(checkpoint, path)
                return
            _refuse_other_folder(path)
            with set_aside(path):
                self._strategy.checkpoint_io.save_checkpoint(checkpoint, path)

    def _publish_folder(self, checkpoint: dict[str, Any], path: str) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, save

        tensors, rest = self._split(checkpoint)
        first, made, problem = self._strategy.global_rank == 0, "", ""
        try:
            if first:
                if os.path.isdir(path):
                    _refuse_other_folder(path)
                made = folder_beside(path)
        except OSError as error:
            problem = str(error)
        made, problem = self._strategy.broadcast((made, problem))
        if problem:
            raise ShardError(f"cannot write {path}: {problem}")
        try:
            save(tensors, storage_writer=FileSystemWriter(made))
            if first:
                with writing(os.path.join(made, META)) as file:
                    torch.save(rest, file)
                move_folder(made, path)
        finally:
            if first:  # there is none if all went well
                shutil.rmtree(made, ignore_errors=True)

    def _split(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors that this rank writes, in the keys of Lightning's folders, and everything else."""
        tensors: dict[str, Any] = {"state_dict": checkpoint["state_dict"]}
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = []
        for number, state in enumerate(checkpoint.get("optimizer_states", ())):
            names = self._names(self._strategy.optimizers[number])
            kept = {
                names[i]: {k: v for k, v in of.items() if isinstance(v, Tensor)} for i, of in state["state"].items()
            }
            plain = {i: {k: v for k, v in of.items() if not isinstance(v, Tensor)} for i, of in state["state"].items()}
            tensors[f"optimizer_{number}"] = {"state": kept}
            rest["optimizer_states"].append({**state, "state": {i: of for i, of in plain.items() if of}})
        if self._strategy.global_rank != 0:
            # others may have other buffers, and what the other replicas have is the same
            tensors = _sharded_only(tensors) if self._first_replica else {}
        return tensors, rest

    def _names(self, optimizer: Any) -> list[str]:
        """Names of an optimizer's parameters, as in the model's state."""
        names = dict(self._named())
        return [names.get(p, f"parameter {i}") for i, p in enumerate(params_of(unwrap(optimizer)))]

    def _named(self) -> Iterator[tuple[Tensor, str]]:
        for name, p in self._strategy.lightning_module.named_parameters():
            for prefix in _PREFIXES:
                name = name.replace(prefix, "")
            yield p, name

    # ----- reading ----------------------------------------------------------------------------------------------------

    def read(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """All of a file, of which tensors stay on disk until they are needed; of a folder what is no tensor. Collective."""
        if self._strategy.global_rank == 0 and os.path.isdir(os.path.dirname(path) or "."):
            put_back(path)
        self._strategy.barrier()
        if os.path.isdir(path):
            _refuse_other_folder(path)
            path = os.path.join(path, META)
        if weights_only is False or not os.path.isfile(path):  # what its user trusts, or a URL
            how = {} if weights_only is None else {"weights_only": weights_only}
            return dict(self._strategy.checkpoint_io.load_checkpoint(path, **how))
        return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))

    def load_weights(self, path: str | None, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Loads the model's weights, of which every rank takes its part. Collective.

        Raises:
            RuntimeError: other names than the model's, if ``strict``.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

        model = self._strategy.model
        if path is not None and os.path.isdir(path):
            state = get_model_state_dict(model)
            if strict:
                _compare(
                    state.keys(), {key.partition(".")[2] for key in _stored(path) if key.startswith("state_dict.")}
                )
            _load(path, {"state_dict": state}, partial=not strict)
            set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
        else:
            whole = StateDictOptions(full_state_dict=True, strict=strict)
            set_model_state_dict(model, dict(checkpoint["state_dict"]), options=whole)

    def load_optimizers(self, path: str | None, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of all optimizers, of which every rank takes its part. Collective."""
        folder = path if path is not None and os.path.isdir(path) else None
        for number, (optimizer, state) in enumerate(
            zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=False)
        ):
            values = {int(i): dict(of) for i, of in state["state"].items()}
            if folder is not None:
                for index, of in self._stored_state(folder, number, optimizer).items():
                    values[index] = {**values.get(index, {}), **of}
            if not isinstance(optimizer, OnebitOptimizer):  # which takes its part by itself
                params = params_of(unwrap(optimizer))
                values = {i: {key: place(value, params[i]) for key, value in of.items()} for i, of in values.items()}
            optimizer.load_state_dict({**state, "state": values})

    def _stored_state(self, folder: str, number: int, optimizer: Any) -> dict[int, dict[str, Tensor]]:
        """The tensors of an optimizer's state, cut as its parameters are."""
        index_of = {f"optimizer_{number}.state.{name}": i for i, name in enumerate(self._names(optimizer))}
        params = params_of(unwrap(optimizer))
        wanted: dict[str, dict[str, Tensor]] = {}
        for full_key, about in _stored(folder).items():
            owner, _, key = full_key.rpartition(".")
            if owner in index_of:
                p = params[index_of[owner]]
                whole = is_dtensor(p) and about.size == p.shape
                like = torch.empty_like(p, dtype=about.properties.dtype) if whole else None
                empty = torch.empty(about.size, dtype=about.properties.dtype) if like is None else like
                wanted.setdefault(owner, {})[key] = empty
        prefix = f"optimizer_{number}.state."
        if wanted:
            state = {owner.removeprefix(prefix): of for owner, of in wanted.items()}
            _load(folder, {f"optimizer_{number}": {"state": state}}, partial=False)
        return {index_of[owner]: of for owner, of in wanted.items()}


def _whole(value: Any) -> Any:
    """All of a tensor, on the host."""
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if is_dtensor(value) else value).cpu()  # type: ignore[attr-defined]


def _sharded_only(tensors: Any) -> Any:
    """A tree of dicts, without what is no DTensor."""
    if not isinstance(tensors, Mapping):
        return tensors
    return {k: _sharded_only(v) for k, v in tensors.items() if isinstance(v, Mapping) or is_dtensor(v)}


def _refuse_other_folder(path: str) -> None:
    if not is_folder(path):
        raise IsADirectoryError(f"{path} is a folder, but no checkpoint: it has no {META}; choose another name")


def _stored(path: str) -> Mapping[str, Any]:
    """What a folder says of its tensors."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(Path(resolve(path))).read_metadata().state_dict_metadata


def _load(path: str, state: dict[str, Any], *, partial: bool) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load

    load(
        state,
        storage_reader=FileSystemReader(Path(resolve(path))),
        planner=DefaultLoadPlanner(allow_partial_load=partial),
    )


def _compare(mine: Any, saved: set[str]) -> None:
    missing, unexpected = sorted(set(mine) - saved), sorted(saved - set(mine))
    if missing or unexpected:
        raise RuntimeError(
            f"the checkpoint's weights are not those of this model: {missing} are missing in it, {unexpected} are not in the model; build "
            "the model that was saved, or set `strict_loading = False` in the LightningModule"
        )
