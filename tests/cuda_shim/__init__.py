"""Runs the CUDA kernels' own text on the CPU (see shim.h), behind the interface through which the library launches them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_shim.compilers import kept
from lightning_onebit.kernels.cuda import SOURCE

HERE = Path(__file__).parent
# -fsanitize=alignment traps on a 16-byte access that is not aligned, where a GPU would stop with an error
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-fast-math", "-fno-strict-aliasing"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-Wall", "-Wno-unknown-pragmas", "-Werror"),
)
_ONE_LAUNCH = threading.Lock()  # the shim has one set of fibres, and simulated ranks are threads
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}


def kernel_names() -> list[str]:
    """Names of all kernels in onebit.cu."""
    return re.findall(r"^KERNEL\w* (\w+)\(", SOURCE.read_text(), re.MULTILINE)


def compiler() -> str | None:
    """A C++ compiler of the GNU kind, or None."""
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None)


def build(source: str | None = None) -> Path:
    """Compiles the shim and the kernels, once for all tests.

    Args:
        source: text to use instead of onebit.cu.
    """
    text = SOURCE.read_text() if source is None else source
    cxx = compiler()
    assert cxx is not None
    names = re.findall(r"^KERNEL\w* (\w+)\(", text, re.MULTILINE)
    parts = [text, *((HERE / name).read_text() for name in ("shim.h", "runner.h")), *FLAGS, cxx]

    def make(target: Path) -> None:
        folder = target.parent
        (folder / "kernels.inc").write_text("".join(f"SHIM_KERNEL({name})\n" for name in names))
        (folder / "onebit.cu.h").write_text(text)
        (folder / "shim.cpp").write_text(
            f'#include "{HERE}/shim.h"\n#include "onebit.cu.h"\n#define SHIM_KERNELS <kernels.inc>\n#include "{HERE}/runner.h"\n'
        )
        command = [cxx, *FLAGS, f"-I{folder}", "-o", str(target), str(folder / "shim.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")

    return kept(make, *parts)


class ShimRuntime:
    """A ``Runtime`` (see ``lightning_onebit.kernels.cuda``) whose device is the CPU.

    Args:
        order: in which order the threads of a block run between barriers.
        source: text to use instead of onebit.cu.

    Attributes:
        launches: names of the kernels launched so far.
        uploads: number of tables uploaded so far.
    """

    device_type = "cpu"

    def __init__(self, order: str = "forward", source: str | None = None) -> None:
        self._library = ctypes.CDLL(str(build(source)))
        self._library.shim_launch.restype = ctypes.c_char_p
        self._library.shim_launch.argtypes = [
            *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
        ]
        self._order = ORDERS[order]
        self.launches: list[str] = []
        self.uploads = 0
        self.current_stream = 0

    def launch(
        self, name: str, device: torch.device, grid: int, block: tuple[int, int], shared: int, arguments: Sequence[Any]
    ) -> None:
        values = (ctypes.c_int64 * len(arguments))()
        for index, argument in enumerate(arguments):
            if isinstance(argument, np.float32):
                values[index] = int(argument.view(np.uint32))
            else:
                assert type(argument) is int, f"{name}: argument {index} is {argument!r}"
                values[index] = argument
        start = ctypes.addressof(values)
        slots = (ctypes.c_void_p * len(arguments))(*(start + 8 * i for i in range(len(arguments))))
        with _ONE_LAUNCH:
            problem = self._library.shim_launch(name.encode(), grid, *block, shared, slots, len(arguments), self._order)
            if problem is not None:
                raise RuntimeError(f"{name}: {problem.decode()}")
            self.launches.append(name)

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        self.uploads += 1
        return values.clone()

    def stream(self, device: torch.device) -> int:
        return self.current_stream
