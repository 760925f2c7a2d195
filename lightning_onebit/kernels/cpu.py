"""The CPU kernels: ``onebit_cpu.cpp``, compiled once per machine, cached, and called through ctypes.

A plain C library needs no torch headers, so it builds in seconds, and no build tool but a C++ compiler. It is kept in a
directory of the user under a name that carries everything the result depends on (source, compiler, flags, processor); another
machine that shares the home directory, or another version of this package, gets a library of its own. A library that is not
whole, or that somebody else may have written, is not loaded but compiled again (``kept``).

Environment:
    ``CXX``: the compiler, with arguments if need be (default: the first of ``c++``, ``g++``, ``clang++`` on the path).
    ``LIGHTNING_ONEBIT_CACHE``: directory of compiled libraries (default: ``lightning_onebit`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_onebit.kernels import BlockMap, BoundSpans, KernelsUnavailable, kept
from lightning_onebit.kernels.compiled import DTYPES, FP32, Argument, Bound, CompiledKernels, dense
from lightning_onebit.kernels.residual import Residual, check_into

log = logging.getLogger("lightning_onebit")

SOURCE = Path(__file__).with_name("onebit_cpu.cpp")
ABI = 19
# No contraction: a fused multiply-add would change the bits. Later flags win over what a compiler's own default may be.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
)
TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
COMPILE_SECONDS = 300  # a compiler that takes longer hangs


# ----- building -------------------------------------------------------------------------------------------------------


def find_compiler() -> list[str]:
    """The compiler's command line: ``CXX``, else the first C++ compiler on the path.

    Raises:
        KernelsUnavailable: there is none, or ``CXX`` is no command line.
    """
    chosen = os.environ.get("CXX", "").strip()
    try:
        command = shlex.split(chosen) if chosen else [x for x in ("c++", "g++", "clang++") if shutil.which(x)][:1]
    except ValueError as error:
        raise KernelsUnavailable(
            f"CXX={chosen!r} is no command line ({error}); set CXX to a C++ compiler or unset it"
        ) from error
    if not command:
        raise KernelsUnavailable("no C++ compiler (c++, g++ or clang++) is on the path; install one or set CXX")
    if shutil.which(command[0]) is None:
        raise KernelsUnavailable(f"CXX={chosen!r} is not an executable; set CXX to a C++ compiler or unset it")
    return command


def _processor() -> str:
    """What ``-march=native`` depends on."""
    text = f"{sys.platform} {platform.machine()} {platform.processor()}"
    with contextlib.suppress(OSError):
        wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
        # one processor's lines suffice; the first blank line ends them
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        text += "".join(line for line in lines if line.split(":")[0].strip() in wanted)
    return text


def _defines() -> tuple[str, ...]:
    """Macros for this processor: Intel's wait less when told what to fetch, AMD's (Zen 4, Zen 5) were slower where it was tried."""
    return ("-DONEBIT_PREFETCH",) if "GenuineIntel" in _processor() else ()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs a compiler; what it says stays bytes, because some speak no UTF-8.

    Raises:
        KernelsUnavailable: it does not run, or hangs.
    """
    try:
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{shlex.join(command)} failed: {error}") from error


def _complaint(command: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> str:
    """What a compiler that failed has said, or how it ended if it said nothing."""
    said = (done.stderr or done.stdout).decode(errors="replace").strip()[:2000]
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            said = f"it was ended by {signal.Signals(-done.returncode).name} {said}".rstrip()
    return f"{shlex.join(command)} failed: {said or f'exit status {done.returncode}, without a message'}"


def _identity(compiler: Sequence[str]) -> str:
    """Hash of everything the library depends on."""
    command = [*compiler, "--version"]
    done = _run(command)
    if done.returncode:
        raise KernelsUnavailable(f"the C++ compiler {shlex.join(compiler)!r} does not run: {_complaint(command, done)}")
    digest = hashlib.sha256(SOURCE.read_bytes() + b"\0" + done.stdout)
    for part in (*compiler, *FLAGS, *_defines(), *map(str, TUNING), _processor()):
        digest.update(b"\0" + os.fsencode(part))
    return digest.hexdigest()[:20]


def cache_directory() -> Path:
    """The directory of compiled libraries: made if need be, the user's own, and closed to others.

    Raises:
        KernelsUnavailable: it cannot be made or others could put libraries there.
    """
    chosen = os.environ.get("LIGHTNING_ONEBIT_CACHE")
    if chosen:
        candidates = [chosen]
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        candidates = [os.path.join(base, "lightning_onebit")]
        # a home that is not there or cannot be written to is usual in containers; a private name in the temporary directory serves too
        with contextlib.suppress(OSError):  # there is none that can be written to
            candidates.append(os.path.join(tempfile.gettempdir(), f"lightning_onebit-{os.getuid()}"))
    problems = []
    for candidate in candidates:
        try:
            path = Path(candidate).expanduser()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = path.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory is known
            problems.append(f"{candidate}: {getattr(error, 'strerror', None) or error}")
            continue
        if not kept.is_private(info):
            problems.append(f"{path}: others could write to it (chmod 700, or name another directory)")
        elif not os.access(path, os.W_OK | os.X_OK):
            problems.append(f"{path}: not writable")
        else:
            return path
    raise KernelsUnavailable(
        f"no directory for the compiled library ({'; '.join(problems)}); set LIGHTNING_ONEBIT_CACHE to one"
    )


@contextlib.contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Lets one process build while others wait; where locks do not work, or a builder hangs, duplicate work is harmless."""
    import fcntl  # not on every platform; those without it have no C++ compiler of the kind needed either

    handle = None
    with contextlib.suppress(OSError):  # no lock can be had there: the compilation says what is wrong, if anything is
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + COMPILE_SECONDS
        # somebody else's lock might never open
        while handle is not None and kept.is_private(os.fstat(handle)) and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _compile(compiler: Sequence[str], target: Path) -> None:
    """Compiles to a temporary name and renames what can be loaded."""
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        said = ""
        for tuning in TUNING:
            command = [*compiler, *FLAGS, *_defines(), *tuning, "-o", name, str(SOURCE)]
            done = _run(command)
            if done.returncode == 0:
                try:
                    load(Path(name))
                except KernelsUnavailable as error:
                    said = f"{shlex.join(command)} made no library that can be loaded ({error.__cause__ or error})"
                else:
                    kept.keep(target, Path(name).read_bytes())
                    return
            else:
                said = _complaint(command, done)
        # under the name that it would have got: the same failure makes the same message, which is then said once
        raise KernelsUnavailable(said.replace(name, str(target)))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def build() -> Path:
    """The compiled library, from the cache or built now.

    Raises:
        KernelsUnavailable: no compiler, no place to put it, or the compilation failed.
    """
    if os.name != "posix":
        raise KernelsUnavailable(f"the compiled kernels need a POSIX system, this is {os.name!r}")
    compiler = find_compiler()
    directory = cache_directory()
    target = directory / f"onebit_cpu-{_identity(compiler)}.so"
    if kept.fetch(target) is None:
        with _one_builder(target.with_suffix(".lock")):
            if kept.fetch(target) is None:
                log.info("compiling the cpu kernels into %s (once per machine)", directory)
                try:
                    _compile(compiler, target)
                except OSError as error:
                    raise KernelsUnavailable(
                        f"the compiled library cannot be kept in {directory} ({error}); set LIGHTNING_ONEBIT_CACHE to "
                        "another directory"
                    ) from error
    return target


# ----- calling --------------------------------------------------------------------------------------------------------

_INT, _LONG, _POINTER, _FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIZES = (_LONG, _LONG)  # elements of a block, blocks
_KEY = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
_PAYLOAD = (_POINTER, _LONG, _LONG)  # address, bytes from row to row, blocks of a row
_STATE = (_POINTER, _INT)  # address, dtype
_RESIDUAL = (
    *_STATE,
    _POINTER,
    _POINTER,
    _POINTER,
)  # and what is pending of its blocks; the one that is written, and of its blocks
_SPANS = (_POINTER, _POINTER)  # lengths of the blocks, table

# The parameters after the first (threads, int) of each function of onebit_cpu.cpp.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "gather": (*_SIZES, *_SPANS, _POINTER),
    "grad_stats": (_LONG, *[_POINTER] * 5),
    "compress": (*_SIZES, *[_POINTER] * 3, *_PAYLOAD, *[_POINTER] * 3, *_STATE, *_RESIDUAL, *_PAYLOAD),
    "subtract": (*_SIZES, _POINTER, _POINTER),
    "reduce": (*_SIZES, _LONG, _POINTER, _LONG, _POINTER, *_RESIDUAL, _POINTER, _LONG, _FLOAT),
    "unpack": (*_SIZES, *_PAYLOAD, _POINTER, _POINTER),
    "apply_adam": (*_SIZES, *_SPANS, *_PAYLOAD, *_STATE, _POINTER, _POINTER),
    "lamb_update": (*_SIZES, *_SPANS, *_PAYLOAD, _POINTER, *_PAYLOAD, *_STATE, *[_POINTER] * 3),
    "lamb_apply": (*_SIZES, *_SPANS, *_PAYLOAD, *_STATE, *[_POINTER] * 3),
    "local_step": (*_SIZES, *_SPANS, *[_POINTER] * 3, *_STATE, _POINTER, _POINTER),
    "sample": (*_SIZES, *[_POINTER] * 6, *_KEY, _LONG, *_PAYLOAD),
    "vote": (*_SIZES, _LONG, _POINTER, _LONG, _POINTER, *_KEY, _LONG, _POINTER, _FLOAT, _POINTER),
    "apply_votes": (*_SIZES, *_SPANS, *[_POINTER] * 4),
}


def load(path: Path) -> ctypes.CDLL:
    """Loads the library and declares its functions.

    Raises:
        KernelsUnavailable: the file is not a library that this processor and this version of the package can use.
    """
    try:
        library = ctypes.CDLL(str(path))
        if library.onebit_abi() != ABI:
            raise KernelsUnavailable(f"{path} has another interface than this version of lightning_onebit; delete it")
        for name, parameters in _SIGNATURES.items():
            function = getattr(library, f"onebit_{name}")
            function.argtypes, function.restype = (_INT, *parameters), None
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}; delete it to compile it again") from error
    return library


class CpuKernels(CompiledKernels):
    """Compiled kernels; the semantics, argument by argument, are those of ``reference.ReferenceKernels``.

    The work is shared out over ``torch.get_num_threads()`` threads, in pieces of whole blocks, so their number never changes a
    bit. Python's global lock is not held meanwhile, and calls from several threads at once are allowed.

    Raises:
        KernelsUnavailable: no compiler, no place for the library, or a library that does not reproduce the reference.
    """

    name = "cpu"
    _no_spans = (0,)
    _fp32 = float

    def __init__(self) -> None:
        super().__init__("cpu")
        self._library = load(build())
        self._functions = {name: getattr(self._library, f"onebit_{name}") for name in _SIGNATURES}
        # (where the caller flushes denormals, the reference has others)
        if not self._reproduces_the_reference(torch.device("cpu"), denormals=False):
            raise KernelsUnavailable(
                f"the library compiled with {shlex.join(find_compiler())!r} does not compute the reference's bits; "
                "set CXX to another compiler"
            )

    def _call(
        self, name: str, near: Tensor, block_size: int, blocks: int, arguments: Sequence[Argument], sums: int = 0
    ) -> None:
        self._functions[name](torch.get_num_threads(), block_size, blocks, *arguments)

    def _tabulated(self, bound: Bound, near: Tensor) -> Bound:
        layout = bound.layout
        words = (layout.count, layout.first_blocks.buffer_info()[0], *bound.addresses, *bound.codes)
        bound.table = array("Q", words)  # struct Spans
        bound.arguments = (bound.table.buffer_info()[0],)
        return bound

    def _residual(self, residual: Tensor | Residual, name: str, blocks: int, block_size: int) -> tuple[Argument, ...]:
        values, pending = (residual.values, residual.pending) if isinstance(residual, Residual) else (residual, None)
        if pending is None:
            return (*self._state(values, name, blocks * block_size), 0)
        address = self._address(values, name, blocks * block_size)
        return address, DTYPES[torch.float32], self._address(pending, f"{name}.pending", blocks)

    def _residuals(
        self, old: Tensor | Residual, new: Tensor | Residual | None, name: str, blocks: int, block_size: int
    ) -> tuple[Argument, ...]:
        read = self._residual(old, name, blocks, block_size)
        check_into(name, old, new)
        address, _, pending = read if new is None else self._residual(new, "into", blocks, block_size)
        return (*read, address, pending)

    def prepare(self, bucket: BlockMap, spans: BoundSpans, name: str) -> None:
        """Makes the table of the spans, so that nobody looks at every tensor between two kernels."""
        self._bind(bucket, spans, name, bucket.lengths, DTYPES if name == "g" else FP32)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms with fp64 sums, whose order does not depend on the number of threads."""
        if any([tensor.dtype not in DTYPES for tensor in tensors]):
            return super().norms(tensors)
        squares = torch.empty(len(tensors), dtype=torch.float64)
        self._statistics(dense(tensors), squares)
        return squares.sqrt_()

    def _statistics(self, tensors: list[Tensor], of_each: Tensor | None = None) -> Tensor:
        numels = array("q", [tensor.numel() for tensor in tensors])
        addresses = array("Q", [tensor.data_ptr() for tensor in tensors])
        codes = bytes([DTYPES[tensor.dtype] for tensor in tensors])
        result, each = torch.empty(2, dtype=torch.float64), 0 if of_each is None else of_each.data_ptr()
        where = (numels.buffer_info()[0], addresses.buffer_info()[0], codes, result.data_ptr(), each)
        self._functions["grad_stats"](torch.get_num_threads(), len(numels), *where)
        return result

    def residual(self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Residual:
        """Of fp32 the subtraction may be pending, so that a block is gone over once."""
        made = super().residual(blocks, block_size, dtype, device)
        if dtype is not torch.float32:
            return made
        return Residual(made.values, torch.zeros(blocks, dtype=torch.float32, device=device), self._subtract)

    def _subtract(self, values: Tensor, pending: Tensor) -> None:
        blocks = pending.numel()
        size = values.numel() // blocks
        where = (self._address(values, "values", blocks * size), self._address(pending, "pending", blocks))
        self._call("subtract", values, size, blocks, where)
