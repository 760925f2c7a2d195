"""Nothing that is read is executed, nothing outside of a checkpoint's folder is touched, nothing runs in a shell or listens."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_onebit
from lightning_onebit.strategy.shards import (
    ShardError,
    Stamp,
    read_shard,
    remove_shards,
    shard_ids,
    shard_path,
    write_shard,
)

PACKAGE = Path(lightning_onebit.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
#: modules that execute what they read, or listen
FORBIDDEN = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "socket",
    "socketserver",
    "http",
    "xmlrpc",
}
#: functions that do so, by their last name; torch's exchange of objects unpickles what other ranks send
CALLS = {
    "eval",
    "exec",
    "system",
    "popen",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "recv_object_list",
}


def nodes(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(ast.parse(path.read_text())):
        yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_no_source_unpickles_opens_a_shell_or_listens() -> None:
    assert len(SOURCES) > 30
    found = []
    for path in SOURCES:
        for where, node in nodes(path):
            found += [f"{where} imports {name}" for name in imported(node) if name in FORBIDDEN]
            name = called(node)
            if name in CALLS:
                found.append(f"{where} calls {name}")
            if isinstance(node, ast.keyword) and node.arg == "shell":
                found.append(f"{where} opens a shell")
    assert found == []


def test_whatever_torch_loads_is_loaded_with_weights_only() -> None:
    loads = []
    for path in SOURCES:
        for where, node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "torch.jit.load",
                "numpy.load",
                "np.load",
            ):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                loads.append(where)
                assert given.get("weights_only") == "True", where
    assert loads, "the scan has found no torch.load at all"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_shard_with_code_in_it_executes_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    stamp, path = Stamp("0" * 32, 1, True), str(tmp_path / "x.ckpt")
    write_shard(path, stamp, 0, [])
    torch.save({"id": stamp.id, "optimizers": [Bomb(str(mark))]}, shard_path(path, stamp, 0))
    with pytest.raises(ShardError, match="is damaged"):
        read_shard(path, stamp, 0)
    assert not mark.exists()
    # the file would have done it
    torch.load(shard_path(path, stamp, 0), weights_only=False)
    assert mark.exists()


def test_shards_outside_of_the_checkpoints_folder_are_neither_read_nor_removed(tmp_path: Path) -> None:
    stamp, outside = Stamp("0" * 32, 1, True), tmp_path / "outside"
    write_shard(str(outside / "y.ckpt"), stamp, 0, [])
    inside = tmp_path / "inside"
    inside.mkdir()
    # a link in the place of the folder of shards
    (inside / "x.ckpt.onebit").symlink_to(outside / "y.ckpt.onebit")
    with pytest.raises(ShardError, match="outside of the checkpoint's folder"):
        read_shard(str(inside / "x.ckpt"), stamp, 0)
    remove_shards(str(inside / "x.ckpt"))
    assert read_shard(str(outside / "y.ckpt"), stamp, 0) == []
    # only names that are ids are ever removed one by one
    (outside / "y.ckpt.onebit" / "notes").mkdir()
    assert shard_ids(str(outside / "y.ckpt")) == {stamp.id}
    remove_shards(str(outside / "y.ckpt"), shard_ids(str(outside / "y.ckpt")))
    assert os.listdir(outside / "y.ckpt.onebit") == ["notes"]


@pytest.mark.parametrize(
    "field", [{"id": "../" * 8 + "etc"}, {"id": "/etc/passwd"}, {"world_size": "../.."}, {"world_size": True}]
)
def test_a_stamp_cannot_name_a_path(field: dict[str, Any]) -> None:
    with pytest.raises(ShardError, match="damaged"):
        Stamp.of({"lightning_onebit": {**Stamp("0" * 32, 2, True).as_dict(), **field}})
