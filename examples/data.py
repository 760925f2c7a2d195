"""Real data without downloads: the text of the Python standard library, its manual, and scikit-learn's digits.

The texts depend on the Python version they are read from (the standard library changes), so losses are comparable
between runs of one interpreter, not between interpreters.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

VOCABULARY = 256
"""A byte is a token."""

# Machine-made tables (code pages, topic dumps) are no text; tests are half of the library and would crowd the rest out.
_LEFT_OUT = {"test", "tests", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}

_VALIDATION_SHARE = 20  # one file in so many is held out


def standard_library_files(root: Path | None = None) -> list[Path]:
    """List the ``*.py`` files of the standard library in an order that is the same everywhere.

    Args:
        root: Folder to read; the running interpreter's standard library if None.

    Returns:
        Paths ordered by the SHA-256 of their relative name, so that any prefix is a fair sample of the library.

    Raises:
        FileNotFoundError: The folder holds no Python source (some embedded Pythons ship byte code only).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = [path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"no *.py files under {str(root)!r}: use a Python that ships its library as source")
    return sorted(files, key=lambda path: _digest(path, root))


def _digest(path: Path, root: Path) -> bytes:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()


def load_corpus(
    train_bytes: int = 4 << 20, validation_bytes: int = 256 << 10, root: Path | None = None
) -> tuple[Tensor, Tensor]:
    """Read the corpus and split it by file: no file is in both parts.

    Args:
        train_bytes: Size at which the training text is cut, in bytes.
        validation_bytes: Size at which the validation text is cut, in bytes.
        root: Folder to read; the running interpreter's standard library if None.

    Returns:
        Training and validation text, uint8 tensors of shape ``(bytes,)``.

    Raises:
        FileNotFoundError: The folder holds no Python source.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    sizes = (train_bytes, validation_bytes)
    for path in standard_library_files(root):
        which = int(_digest(path, root)[-1] % _VALIDATION_SHARE == 0)
        if len(parts[which]) < sizes[which]:
            parts[which].extend(path.read_bytes())
        elif all(len(part) >= size for part, size in zip(parts, sizes, strict=True)):
            break
    train, validation = (
        torch.from_numpy(np.frombuffer(bytes(part[:size]), dtype=np.uint8).copy())
        for part, size in zip(parts, sizes, strict=True)
    )
    return train, validation


def load_manual(validation_share: float = 0.1) -> tuple[Tensor, Tensor]:
    """Read the topics of Python's interactive help: English prose, which ``load_corpus`` leaves out.

    Args:
        validation_share: Share of the topics that is held out.

    Returns:
        Training and validation text, uint8 tensors of shape ``(bytes,)``.
    """
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = max(1, round(validation_share * len(names)))
    parts = ("\n\n".join(topics[name] for name in chosen) for chosen in (names[held_out:], names[:held_out]))
    train, validation = (torch.tensor(list(part.encode()), dtype=torch.uint8) for part in parts)
    return train, validation


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Read scikit-learn's handwritten digits.

    Returns:
        1,347 training and 450 validation pairs: an fp32 image of shape ``(64,)`` in [0, 1], and its int64 label.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(digits.data).float() / 16)[order]
    labels = torch.from_numpy(digits.target).long()[order]
    return TensorDataset(images[:1347], labels[:1347]), TensorDataset(images[1347:], labels[1347:])


class TextWindows(Dataset[Tensor]):
    """Consecutive, non-overlapping windows of a text.

    Item ``i`` is an int64 tensor of shape ``(length + 1,)``: the inputs are its first ``length`` bytes, the targets its
    last ``length``.

    Args:
        text: uint8 tensor of shape ``(bytes,)``.
        length: Number of predictions per window.
        limit: Use at most so many windows; all if None.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, text: Tensor, length: int, limit: int | None = None) -> None:
        windows = (text.numel() - 1) // length
        if windows < 1:
            raise ValueError(f"length={length} does not fit into a text of {text.numel()} bytes; make it smaller")
        self.text = text
        self.length = length
        self.windows = windows if limit is None else min(windows, limit)

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


def available_cores() -> int:
    """Count the processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
