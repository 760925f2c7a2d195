"""Compiles onebit.cu to machine code without a GPU and reads what the assembler says about registers and spills.

``python tests/cuda_shim/compilers.py`` prints registers as a table.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ARCHITECTURES = (70, 75, 80, 86, 89, 90)
SOURCE = Path(__file__).parents[2] / "lightning_onebit" / "kernels" / "onebit.cu"


def kept(make: Callable[[Path], None], *depends_on: object) -> Path:
    """A file that is made once for all tests, workers and runs, in the temporary directory.

    Args:
        make: writes the file.
        depends_on: all that the content depends on.
    """
    directory = Path(tempfile.gettempdir()) / f"onebit-cuda-shim-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    assert directory.stat().st_uid == os.getuid()
    target = directory / hashlib.sha256("\0".join(map(str, depends_on)).encode()).hexdigest()[:20]
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                made = Path(folder, "made")
                make(made)
                os.replace(made, target)
    return target


@dataclass(frozen=True)
class Usage:
    """What one kernel needs on one architecture; bytes per thread."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def parse(log: str) -> list[Usage]:
    """Reads the output of ``ptxas -v``."""
    usages: list[Usage] = []
    kernel, memory = "", (0, 0, 0)
    for line in log.splitlines():
        if found := re.search(r"entry function '(\w+)'", line):
            kernel = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            memory = (int(found[1]), int(found[2]), int(found[3]))
        elif found := re.search(r"Used (\d+) registers", line):
            usages.append(Usage(kernel, int(found[1]), *memory))
    return usages


class Nvrtc:
    """The run-time compiler, which is what CuPy uses."""

    def __init__(self, path: str) -> None:
        self._path, self._library = path, ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"NVRTC {major.value}.{minor.value}"
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = tuple(numbers)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with code {code}")

    def compile(self, architecture: int, options: tuple[str, ...]) -> tuple[list[Usage], bytes]:
        """Register use of all kernels, and the machine code."""

        def make(target: Path) -> None:
            text, binary = self._compile(architecture, options)
            target.write_bytes(text.encode() + b"\0" + binary)

        known = kept(make, SOURCE.read_text(), self._path, self.version, architecture, options)
        text, _, binary = known.read_bytes().partition(b"\0")
        return parse(text.decode()), binary

    def _compile(self, architecture: int, options: tuple[str, ...]) -> tuple[str, bytes]:
        """What the assembler says, and the machine code."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), SOURCE.read_bytes(), b"onebit.cu", 0, None, None)
        try:
            words = [f"-arch=sm_{architecture}", *options, "--ptxas-options=-v"]
            values = (ctypes.c_char_p * len(words))(*(w.encode() for w in words))
            code = self._library.nvrtcCompileProgram(program, len(words), values)
            size = ctypes.c_size_t()
            self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetProgramLog", program, log)
            text = log.value.decode()
            if code:
                raise RuntimeError(f"{self.version}, sm_{architecture}: {text}")
            self._call("nvrtcGetCUBINSize", program, ctypes.byref(size))
            binary = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetCUBIN", program, binary)
            return text, binary.raw
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtcs() -> list[Nvrtc]:
    """The run-time compilers on this machine: Python packages first, then what the loader finds."""
    names = []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        names += sorted(map(str, Path(folder).glob("*/lib/libnvrtc.so.*")))
    names += ["libnvrtc.so.12", "libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so"]
    found: dict[str, Nvrtc] = {}
    for name in names:
        try:
            compiler = Nvrtc(name)
        except OSError:
            continue
        found.setdefault(compiler.version, compiler)
    return list(found.values())


def nvrtc_for(architecture: int) -> Nvrtc | None:
    """One that can compile for the architecture."""
    return next((c for c in nvrtcs() if architecture in c.architectures), None)


@cache
def nvcc_architectures() -> tuple[int, ...]:
    """What nvcc on the path compiles for; empty without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ()
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, timeout=60, check=True).stdout
    return tuple(int(n) for n in re.findall(r"compute_(\d+)$", listed, re.MULTILINE))


def compile_with_nvcc(architecture: int) -> tuple[list[Usage], bytes]:
    """The same by the offline compiler."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "onebit.cubin")
        flags = ["-std=c++14", "-fmad=false", "-Werror", "all-warnings", "-Xptxas", "-v", "-cubin", "-o", str(target)]
        command = ["nvcc", f"-arch=sm_{architecture}", *flags, str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return parse(done.stderr), target.read_bytes()


def table(options: tuple[str, ...]) -> str:
    """Registers of every kernel on every architecture that can be compiled for here, as Markdown."""
    columns, rows = [], {}
    for architecture in ARCHITECTURES:
        if compiler := nvrtc_for(architecture):
            columns.append(f"sm_{architecture}")
            for usage in compiler.compile(architecture, options)[0]:
                spills = usage.stack + usage.spill_stores + usage.spill_loads
                rows.setdefault(usage.kernel, []).append(f"{usage.registers}{' + spills' if spills else ''}")
    lines = [f"| kernel | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    lines += [f"| `{name.removeprefix('onebit_')}` | {' | '.join(rows[name])} |" for name in sorted(rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    from lightning_onebit.kernels.cuda import OPTIONS

    sys.stdout.write(table(OPTIONS) + "\n")
