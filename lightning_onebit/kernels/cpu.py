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
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_onebit.kernels import BlockMap, BoundSpans, KernelsUnavailable, Spans, kept
from lightning_onebit.kernels.common import CheckMap, check_rows, increment_versions, is_dense
from lightning_onebit.kernels.counter_rng import DrawKey
from lightning_onebit.kernels.packed import Packed
from lightning_onebit.kernels.reference import ReferenceKernels
from lightning_onebit.kernels.residual import Residual, take_off

log = logging.getLogger("lightning_onebit")

SOURCE = Path(__file__).with_name("onebit_cpu.cpp")
ABI = 17
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
)
TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
COMPILE_SECONDS = 300  # a compiler that takes longer hangs

_FLOAT32 = {torch.float32: 0}
_DTYPES = {**_FLOAT32, torch.bfloat16: 1, torch.float16: 2}


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
                    kept.publish(Path(name), target)
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
_KEY = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
_SPANS = (_LONG, _POINTER, _POINTER, _POINTER, _POINTER)  # count, first blocks, lengths, addresses, dtypes
_PAYLOAD = (_POINTER, _LONG, _LONG)  # address, bytes from row to row, blocks of a row
_STATE = (_POINTER, _INT)  # address, dtype
_RESIDUAL = (*_STATE, _POINTER)  # and what its blocks owe

# The parameters after the first (threads, int) of each function of onebit_cpu.cpp.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "gather": (_LONG, _LONG, *_SPANS, _POINTER),
    "scatter": (_LONG, _LONG, *_SPANS, _POINTER),
    "grad_stats": (_LONG, *[_POINTER] * 5),
    "compress": (_LONG, _LONG, *[_POINTER] * 3, *_PAYLOAD, *[_POINTER] * 2, *_SPANS, *_STATE, *_RESIDUAL, *_PAYLOAD),
    "settle": (_LONG, _LONG, _POINTER, _POINTER),
    "reduce": (_LONG, _INT, *_PAYLOAD, _POINTER, *_RESIDUAL, _POINTER, _LONG, _FLOAT),
    "unpack": (_LONG, _LONG, *_PAYLOAD, _POINTER, _POINTER),
    "apply_adam": (_LONG, _LONG, *_SPANS, *_PAYLOAD, *_STATE, _POINTER, _POINTER),
    "lamb_update": (_LONG, _LONG, *_SPANS, *_PAYLOAD, _POINTER, *_PAYLOAD, *_STATE, *[_POINTER] * 3),
    "lamb_apply": (_LONG, _LONG, *_SPANS, *_PAYLOAD, *_STATE, *[_POINTER] * 3),
    "local_step": (_LONG, _LONG, *_SPANS, *[_POINTER] * 4, *_STATE, _POINTER, _POINTER),
    "sample": (_LONG, _LONG, *[_POINTER] * 3, *_SPANS, _POINTER, _POINTER, *_KEY, _LONG, *_PAYLOAD),
    "vote": (_LONG, _INT, *_PAYLOAD, _POINTER, *_KEY, _LONG, _POINTER, _POINTER),
    "apply_votes": (_LONG, _LONG, *_SPANS, _POINTER, _POINTER, _POINTER, _POINTER),
    "mark_live": (_LONG, _LONG, *[_POINTER] * 3),
}

_Payload = tuple[int | None, int, int]
_SpanArguments = tuple[int, int | None, int | None, int | None, bytes | None]
_NO_PAYLOAD: _Payload = (None, 0, 1)
_NO_STATE = (None, 0)
_NO_SPANS: _SpanArguments = (0, None, None, None, None)


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


def _address(tensor: Tensor, name: str, numel: int, dtype: torch.dtype = torch.float32) -> int:
    """Address of a tensor that C reads or writes as it lies in memory."""
    if tensor.dtype is not dtype or tensor.numel() != numel or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be {numel} contiguous elements of {dtype} on the cpu, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
        )
    return tensor.data_ptr()


def _state(tensor: Tensor, name: str, numel: int) -> tuple[int, int]:
    """Address and code of residuals or reciprocal denominators: fp32 or, in half the memory, bf16."""
    dtype = torch.bfloat16 if tensor.dtype is torch.bfloat16 else torch.float32
    return _address(tensor, name, numel, dtype), _DTYPES[dtype]


def _residual(residual: Tensor | Residual, name: str, blocks: int, block_size: int) -> tuple[int, int, int | None]:
    """Address and code of a residual, and the address of what its blocks owe (None: they never do)."""
    values, owed = (residual.values, residual.owed) if isinstance(residual, Residual) else (residual, None)
    if owed is None:
        return (*_state(values, name, blocks * block_size), None)
    return _address(values, name, blocks * block_size), _FLOAT32[torch.float32], _address(owed, f"{name}.owed", blocks)


def _payload(packed: Packed, name: str, blocks: int, block_size: int, scales: bool = True) -> tuple[int, int, int]:
    # few attribute look-ups: between two buckets Python runs with cold caches, which makes each several times as dear
    raw, per_row = packed.raw, packed.blocks_per_row
    if raw.shape[0] * per_row != blocks or packed.block_size != block_size or packed.has_scales is not scales:
        raise ValueError(
            f"{name} must hold {blocks} blocks of {block_size} elements {'with' if scales else 'without'} scales, got "
            f"{packed.blocks} of {packed.block_size}, has_scales={packed.has_scales}"
        )
    address, (stride, step) = raw.data_ptr(), raw.stride()
    if not raw.is_cpu or step != 1 or address % 4 or stride % 4:
        raise ValueError(f"{name}.raw must be rows of contiguous bytes on the cpu that begin at multiples of 4 bytes")
    return address, stride, per_row


class _Layout:
    """The tables of a bucket that C reads."""

    def __init__(self, bucket: BlockMap) -> None:
        self.numels = [span.numel for span in bucket.spans]
        self._first_blocks = array("q", (span.block for span in bucket.spans))
        self._lengths = array("q", self.numels)
        self.tables = (self._first_blocks.buffer_info()[0], self._lengths.buffer_info()[0])
        self.count = len(self.numels)


class _SpanTable:
    """Addresses of the tensors of a bucket's spans, for the duration of one call, or for as long as they are bound to them.

    What C cannot read in place (another dtype, gaps in memory) is read, and written back, through an fp32 copy.
    """

    def __init__(self, layout: _Layout, spans: Spans, name: str, dtypes: dict[torch.dtype, int]) -> None:
        if len(spans) != layout.count:
            raise ValueError(f"{name} must have one entry per span, {layout.count}, got {len(spans)}")
        self.layout = layout
        self._in_place: list[Tensor] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        # one fact of all tensors after the other, in comprehensions: gradients' tables are made at every step
        there = [tensor for tensor in spans if tensor is not None]
        numels = layout.numels
        if len(there) < len(spans):
            numels = [numel for tensor, numel in zip(spans, numels, strict=True) if tensor is not None]
        if [tensor.numel() for tensor in there] != numels or not all([tensor.is_cpu for tensor in there]):
            tensor, numel = next((t, n) for t, n in zip(there, numels, strict=True) if t.numel() != n or not t.is_cpu)
            raise ValueError(
                f"{name}: a span of {numel} elements on the cpu got shape {tuple(tensor.shape)} on {tensor.device}"
            )
        fits = [tensor.dtype in dtypes and tensor.is_contiguous() for tensor in there]
        if not all(fits):
            self._copies = [
                (tensor, tensor.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True))
                for tensor, fit in zip(there, fits, strict=True)
                if not fit
            ]
            copies = iter(self._copies)
            spans = [t if t is None or (t.dtype in dtypes and t.is_contiguous()) else next(copies)[1] for t in spans]
        addresses = array("Q", [0 if tensor is None else tensor.data_ptr() for tensor in spans])
        self._keep = (addresses, bytes([0 if tensor is None else dtypes[tensor.dtype] for tensor in spans]))
        self.arguments = (layout.count, *layout.tables, addresses.buffer_info()[0], self._keep[1])

    @classmethod
    def of(cls, layout: _Layout, spans: Spans, name: str, dtypes: dict[torch.dtype, int]) -> _SpanTable:
        """The table of some spans; the one of an earlier call where they are the same."""
        if not isinstance(spans, BoundSpans):
            return cls(layout, spans, name, dtypes)
        key = f"cpu {name} {len(dtypes)}"
        known: _SpanTable | None = spans.tables.get(key)
        if known is None or known.layout is not layout:
            known = cls(layout, spans, name, dtypes)
            # a copy holds what the tensor held (gradients are bound for one step, in which nobody writes to them)
            if not known._copies or name == "g":
                spans.tables[key] = known
        return known

    def written(self, spans: Spans) -> None:
        """Makes what C wrote visible: to the tensors that were copied, and to autograd's check of in-place changes.

        Args:
            spans: the tensors that the table was made of.
        """
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        if self._in_place is None:
            self._in_place = [tensor for tensor in spans if tensor is not None and not tensor.is_inference()]
        increment_versions(self._in_place)


class CpuKernels(ReferenceKernels):
    """Compiled kernels; the semantics, argument by argument, are those of ``reference.ReferenceKernels``.

    The work is shared out over ``torch.get_num_threads()`` threads, in pieces of whole blocks, so their number never changes a
    bit. Python's global lock is not held meanwhile. Calls from several threads at once are allowed: one of them gets the
    helper threads, the others work alone.

    Raises:
        KernelsUnavailable: no compiler, no place for the library, or a library that does not reproduce the reference.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._library = load(build())
        self._functions = {name: getattr(self._library, f"onebit_{name}") for name in _SIGNATURES}
        self._layouts: dict[int, tuple[weakref.ref[BlockMap], _Layout]] = {}
        self._check()

    def _check(self) -> None:
        """Compares with the reference once, because a compiler with other ideas of arithmetic would go unnoticed."""
        size, generator = 2048, torch.Generator().manual_seed(1)
        lengths = torch.tensor([size, size - 37, 0], dtype=torch.int32)
        data = torch.randn(5, 3 * size, dtype=torch.float32, generator=generator)
        bucket = CheckMap(size, lengths)
        results = []
        for kernels in (ReferenceKernels(), self):
            settle = self._settle if kernels is self else take_off
            e, d = (Residual(flat.clone(), data[0, :3].abs(), settle) for flat in data[:2])
            sent, reply = Packed.empty(1, 3, size), Packed.empty(1, 3, size)
            factors = data[4, :3].abs()
            kernels.compress(
                bucket,
                0,
                3,
                a=factors,
                m=data[2],
                b=factors,
                g=data[3],
                e=e,
                out=sent,
                r=data[4].abs(),
            )
            kernels.reduce(sent, lengths, d, reply, 1 / 3)
            results.append((e.settled(), d.settled(), sent.raw, reply.raw))
        if not all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(*results, strict=True)):
            raise KernelsUnavailable(
                f"the library compiled with {shlex.join(find_compiler())!r} does not compute the reference's bits; "
                "set CXX to another compiler"
            )

    def _layout(self, bucket: BlockMap) -> _Layout:
        # by identity: hashing a bucket would hash all its spans at every call
        key = id(bucket)
        known = self._layouts.get(key)
        if known is not None and known[0]() is bucket:
            return known[1]
        layout = _Layout(bucket)
        self._layouts[key] = (weakref.ref(bucket, lambda _: self._layouts.pop(key, None)), layout)
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        self._functions[name](torch.get_num_threads(), *arguments)

    def prepare(self, bucket: BlockMap, spans: BoundSpans, name: str) -> None:
        """Makes the table of the spans, so that nobody looks at every tensor between two kernels."""
        _SpanTable.of(self._layout(bucket), spans, name, _DTYPES if name == "g" else _FLOAT32)

    def gather(self, bucket: BlockMap, spans: Spans, out: Tensor) -> None:
        """Spans to flat fp32 with zero padding."""
        target = _address(out, "out", bucket.elements)
        table = _SpanTable(self._layout(bucket), spans, "spans", _DTYPES)
        self._call("gather", bucket.block_size, bucket.blocks, *table.arguments, target)

    def scatter(self, bucket: BlockMap, flat: Tensor, spans: Spans) -> None:
        """Flat fp32 to spans, cast to their dtype."""
        source = _address(flat, "flat", bucket.elements)
        table = _SpanTable.of(self._layout(bucket), spans, "spans", _DTYPES)
        self._call("scatter", bucket.block_size, bucket.blocks, *table.arguments, source)
        table.written(spans)

    def grad_stats(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of squares, in fp64, and the number of tensors with a non-finite value."""
        others = [tensor for tensor in tensors if tensor.dtype not in _DTYPES]  # fp64
        known = tensors if not others else [tensor for tensor in tensors if tensor.dtype in _DTYPES]
        result = torch.zeros(2, dtype=torch.float64)
        self._sum_squares(known, result, None)
        for tensor in others:
            result[0] += tensor.detach().double().square().sum()
            result[1] += (~torch.isfinite(tensor)).any()
        return result

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms with fp64 sums, whose order does not depend on the number of threads."""
        if any([tensor.dtype not in _DTYPES for tensor in tensors]):
            return super().norms(tensors)
        squares = torch.empty(len(tensors), dtype=torch.float64)
        self._sum_squares(tensors, torch.empty(2, dtype=torch.float64), squares)
        return squares.sqrt_()

    def _sum_squares(self, tensors: Sequence[Tensor], result: Tensor, of_each: Tensor | None) -> None:
        # (the contiguous ones are asked in place: a call for each of many tensors at every step)
        dense = [t if t.is_contiguous() or is_dense(t) else t.detach().contiguous() for t in tensors]
        numels = array("q", [tensor.numel() for tensor in dense])
        addresses = array("Q", [tensor.data_ptr() for tensor in dense])
        codes = bytes([_DTYPES[tensor.dtype] for tensor in dense])
        each = None if of_each is None else of_each.data_ptr()
        where = (numels.buffer_info()[0], addresses.buffer_info()[0], codes, result.data_ptr(), each)
        self._call("grad_stats", len(numels), *where)

    def residual(self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Residual:
        """Of fp32 it may owe, so that a block is gone over once."""
        made = super().residual(blocks, block_size, dtype, device)
        if dtype is not torch.float32:
            return made
        return Residual(made.values, torch.zeros(blocks, dtype=torch.float32, device=device), self._settle)

    def _settle(self, values: Tensor, owed: Tensor) -> None:
        blocks = owed.numel()
        size = values.numel() // blocks
        where = (_address(values, "values", blocks * size), _address(owed, "owed", blocks))
        self._call("settle", size, blocks, *where)

    def compress(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        a: Tensor | None,
        m: Tensor | Packed | None,
        b: Tensor | None,
        g: Tensor | Spans | None,
        e: Tensor | Residual,
        out: Packed,
        r: Tensor | None = None,
    ) -> None:
        """``y = ((a*m) + ((b*g)*r)) + e`` on blocks ``[lo, hi)``, then bits, scale and residual, in one pass over memory."""
        size, blocks = bucket.block_size, hi - lo
        elements = blocks * size
        lengths = _address(bucket.lengths, "bucket.lengths", bucket.blocks, torch.int32) + 4 * lo
        flat_m = factor_m = flat_g = factor_g = None
        packed_m: _Payload = _NO_PAYLOAD
        spans_g: _SpanArguments = _NO_SPANS
        if m is not None:
            if a is None:
                raise ValueError("a must be given with m")
            factor_m = _address(a, "a", blocks)
            if isinstance(m, Packed):
                packed_m = _payload(m, "m", blocks, size)
            else:
                flat_m = _address(m, "m", elements)
        if g is not None:
            if b is None:
                raise ValueError("b must be given with g")
            factor_g = _address(b, "b", blocks)
            if isinstance(g, Tensor):
                flat_g = _address(g, "g", elements)
            else:
                if blocks != bucket.blocks:
                    raise ValueError(f"g as spans needs the whole bucket, got blocks {lo} to {hi} of {bucket.blocks}")
                table = _SpanTable.of(self._layout(bucket), g, "g", _DTYPES)
                spans_g = table.arguments
        elif r is not None:
            raise ValueError("r must be None with g=None")
        residual = _residual(e, "e", blocks, size)
        reciprocal = _NO_STATE if r is None else _state(r, "r", elements)
        self._call(
            "compress",
            *(size, blocks, lengths, factor_m, flat_m, *packed_m),
            *(factor_g, flat_g, *spans_g, *reciprocal, *residual, *_payload(out, "out", blocks, size)),
        )

    def reduce(
        self,
        received: Packed,
        lengths: Tensor,
        d: Tensor | Residual,
        out: Packed,
        inv_n: float,
    ) -> None:
        """``z = (C_0 + C_1 + ...) * inv_n + d`` over the rows, then bits, scale and residual."""
        check_rows(received)
        size, blocks = received.block_size, received.blocks_per_row
        if out.rows != 1:
            raise ValueError(f"out must be one row, got {out.rows}")
        address, stride, _ = _payload(out, "out", blocks, size)
        self._call(
            "reduce",
            *(size, received.rows, *_payload(received, "received", received.rows * blocks, size)),
            *(
                _address(lengths, "lengths", blocks, torch.int32),
                *_residual(d, "d", blocks, size),
                address,
                stride,
                inv_n,
            ),
        )

    def unpack(self, packed: Packed, lengths: Tensor, out: Tensor) -> None:
        """Bits and scales to flat fp32, 0 on padding."""
        size, blocks = packed.block_size, packed.blocks
        where = (_address(lengths, "lengths", blocks, torch.int32), _address(out, "out", blocks * size))
        self._call("unpack", size, blocks, *_payload(packed, "packed", blocks, size), *where)

    def apply_adam(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor | None, decay: Tensor, alpha: Tensor
    ) -> None:
        """``x = x*decay - (+-(alpha*s) * r)``, r None: without it."""
        size, blocks = bucket.block_size, bucket.blocks
        payload = _payload(packed, "packed", blocks, size)
        reciprocal = _NO_STATE if r is None else _state(r, "r", bucket.elements)
        state = (*reciprocal, _address(decay, "decay", blocks), _address(alpha, "alpha", blocks))
        table = _SpanTable.of(self._layout(bucket), spans, "spans", _FLOAT32)
        self._call("apply_adam", size, blocks, *table.arguments, *payload, *state)
        table.written(spans)

    # ----- 1-bit LAMB -------------------------------------------------------------------------------------------------

    def lamb_update(
        self,
        bucket: BlockMap,
        spans: Spans,
        new: Packed,
        old: Tensor | Packed,
        r: Tensor,
        fresh: Tensor,
        factors: Tensor,
    ) -> Tensor:
        """Fresh second moments, and of every block the squared norms of ``up`` and ``u`` and the largest ratio."""
        size, blocks, elements = bucket.block_size, bucket.blocks, bucket.elements
        packed_old, flat_old = _NO_PAYLOAD, None
        if isinstance(old, Packed):
            packed_old = _payload(old, "old", blocks, size)
        else:
            flat_old = _address(old, "old", elements)
        partials = torch.empty((blocks, 3), dtype=torch.float32)
        table = _SpanTable.of(self._layout(bucket), spans, "spans", _FLOAT32)
        self._call(
            "lamb_update",
            *(size, blocks, *table.arguments, *_payload(new, "new", blocks, size), flat_old, *packed_old),
            *(*_state(r, "r", elements), _address(fresh, "fresh", elements)),
            *(_address(factors, "factors", 8 * blocks), partials.data_ptr()),
        )
        return partials

    def lamb_apply(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor, alpha: Tensor, wd: Tensor, step: Tensor
    ) -> None:
        """``x = x - step*u`` with ``u = (alpha*m)*r + wd*x``."""
        size, blocks = bucket.block_size, bucket.blocks
        table = _SpanTable.of(self._layout(bucket), spans, "spans", _FLOAT32)
        self._call(
            "lamb_apply",
            *(
                size,
                blocks,
                *table.arguments,
                *_payload(packed, "packed", blocks, size),
                *_state(r, "r", bucket.elements),
            ),
            *(_address(alpha, "alpha", blocks), _address(wd, "wd", blocks), _address(step, "step", blocks)),
        )
        table.written(spans)

    # ----- 0/1 Adam ---------------------------------------------------------------------------------------------------

    def local_step(
        self,
        bucket: BlockMap,
        spans: Spans,
        g: Spans,
        m: Tensor,
        u: Tensor,
        r: Tensor,
        anchor: Tensor,
        factors: Tensor,
    ) -> None:
        """``m = b1*m + o1*g ; p = lr*m ; u = u + p ; x = x*decay - clamp(p*r) ; anchor = anchor*decay``, one pass over memory."""
        blocks, elements = bucket.blocks, bucket.elements
        layout = self._layout(bucket)
        table = _SpanTable.of(layout, spans, "spans", _FLOAT32)
        gradients = _SpanTable.of(layout, g, "g", _DTYPES)
        self._call(
            "local_step",
            *(bucket.block_size, blocks, *table.arguments, *gradients.arguments[-2:]),
            *(_address(m, "m", elements), _address(u, "u", elements), *_state(r, "r", elements)),
            *(_address(anchor, "anchor", elements), _address(factors, "factors", 5 * blocks)),
        )
        table.written(spans)

    # ----- BinSGDM ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        bucket: BlockMap,
        lo: int,
        hi: int,
        *,
        factors: Tensor,
        g: Tensor | Spans,
        m: Tensor,
        a: Tensor,
        key: DrawKey,
        first_block: int,
        out: Packed,
    ) -> None:
        """``m = b1*m + o1*g ; a = b2*a + o2*|g|``, then drawn signs of ``m / a``, in one pass over memory.

        What signs cannot express stays in m (see the reference).
        """
        size, blocks = bucket.block_size, hi - lo
        elements = blocks * size
        flat_g = None
        spans_g: _SpanArguments = _NO_SPANS
        if isinstance(g, Tensor):
            flat_g = _address(g, "g", elements)
        elif blocks != bucket.blocks:
            raise ValueError(f"g as spans needs the whole bucket, got blocks {lo} to {hi} of {bucket.blocks}")
        else:
            table = _SpanTable.of(self._layout(bucket), g, "g", _DTYPES)
            spans_g = table.arguments
        lengths = _address(bucket.lengths, "bucket.lengths", bucket.blocks, torch.int32) + 4 * lo
        self._call(
            "sample",
            *(size, blocks, lengths, _address(factors, "factors", 5 * blocks), flat_g, *spans_g),
            *(_address(m, "m", elements), _address(a, "a", elements), *key, first_block),
            *_payload(out, "out", blocks, size, scales=False),
        )

    def vote(
        self,
        received: Packed,
        lengths: Tensor,
        key: DrawKey,
        first_block: int,
        out: Tensor,
        carry: Tensor | None = None,
    ) -> None:
        """Combines the workers' signs of one chunk: drawn, or with what was left over."""
        size, blocks, rows = received.block_size, received.blocks_per_row, received.rows
        check_rows(received)
        self._call(
            "vote",
            *(size, rows, *_payload(received, "received", rows * blocks, size, scales=False)),
            *(_address(lengths, "lengths", blocks, torch.int32), *key, first_block),
            _address(out, "out", blocks * size // 32, torch.int32),
            0 if carry is None else _address(carry, "carry", blocks * size),
        )

    def apply_votes(
        self,
        bucket: BlockMap,
        spans: Spans,
        words: Tensor,
        live: Tensor,
        decay: Tensor,
        lr: Tensor,
    ) -> None:
        """``x = x*decay + lr*ubar`` on live coordinates, ``x = x*decay`` elsewhere."""
        size, blocks = bucket.block_size, bucket.blocks
        table = _SpanTable.of(self._layout(bucket), spans, "spans", _FLOAT32)
        self._call(
            "apply_votes",
            *(size, blocks, *table.arguments),
            _address(words, "words", blocks * size // 32, torch.int32),
            _address(live, "live", blocks * size // 32, torch.int32),
            *(_address(decay, "decay", blocks), _address(lr, "lr", blocks)),
        )
        table.written(spans)

    def mark_live(self, bucket: BlockMap, lo: int, hi: int, a: Tensor, words: Tensor) -> None:
        """Bitmap of coordinates with ``a > 0``."""
        size, blocks = bucket.block_size, hi - lo
        self._call(
            "mark_live",
            *(size, blocks, _address(bucket.lengths, "bucket.lengths", bucket.blocks, torch.int32) + 4 * lo),
            *(_address(a, "a", blocks * size), _address(words, "words", blocks * size // 32, torch.int32)),
        )
