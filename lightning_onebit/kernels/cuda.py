"""The CUDA kernels: ``onebit.cu``, compiled by CuPy once per kind of device and launched on torch's current stream.

The compiler is called directly: ``cupy.RawModule`` and ``cupy.RawKernel`` add ``-ftz=true`` behind the options they are given (CuPy 13 and
14), the last one counts, and kernels that flush denormals do not compute the reference's bits.

Tensors are handed over by address: nothing is copied, and no call waits for the device. What a kernel must know of tensors that
lie anywhere (parameters, gradients) travels in a small table through pinned memory, and only when an address has changed.

The class that fills in arguments and launches knows the device through a ``Runtime`` only; the tests run it, and the kernels'
own text, on the CPU through another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_onebit.kernels import BlockMap, KernelsUnavailable, kept
from lightning_onebit.kernels.compiled import DTYPES, Argument, Bound, CompiledKernels, Layout
from lightning_onebit.kernels.cpu import cache_directory
from lightning_onebit.kernels.packed import BITS_PER_WORD, Packed
from lightning_onebit.kernels.reference import Spans
from lightning_onebit.kernels.residual import Residual, as_tensor, check_into
from lightning_onebit.kernels.transfer import upload

log = logging.getLogger("lightning_onebit")

SOURCE = Path(__file__).with_name("onebit.cu")
# No contraction, no flushing of denormals, correctly rounded division and root: anything else would change the bits.
OPTIONS = ("-std=c++14", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
CUDA_MAJORS = (12, 13)  # those that there is an extra for

_MAX_THREADS = 256  # of one compression block: lanes beyond are shared out among them
_GROUP_THREADS = 64  # small compression blocks share a thread block of about this size
_SHARED_BYTES = 48 * 1024  # what a thread block may have on every device without asking
_STATS_THREADS = 256
_PIECE = 1 << 16  # elements of a gradient that one thread block looks at
_TABLES_KEPT = 8

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Runtime(Protocol):
    """The device, as far as the kernels need it."""

    device_type: str

    def launch(
        self, name: str, device: torch.device, grid: int, block: tuple[int, int], shared: int, args: Sequence[Argument]
    ) -> None:
        """Launches a kernel of ``onebit.cu`` on the current stream of ``device``; returns at once."""

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """A copy of a small host tensor on ``device``, ordered on its current stream, without waiting for it."""

    def stream(self, device: torch.device) -> int:
        """Identity of the current stream of ``device``."""


# ----- CuPy -----------------------------------------------------------------------------------------------------------


def import_cupy() -> Any:
    """CuPy, if it is there and fits torch.

    Raises:
        KernelsUnavailable: torch has no CUDA (or one that CuPy is not offered for here), CuPy is missing, broken, or built for
            another major version of CUDA. The message names the extra to install.
    """
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is not built for CUDA")
    major = int(torch.version.cuda.split(".")[0])
    if major not in CUDA_MAJORS:
        supported = " and ".join(map(str, CUDA_MAJORS))
        raise KernelsUnavailable(f"torch is built for CUDA {torch.version.cuda}; the kernels support {supported}")
    remedy = f"pip install 'lightning-onebit[cuda{major}]'"
    try:
        import cupy

        theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except Exception as error:
        # A wheel that is there but cannot load its libraries raises ImportError, with many lines; one beside a NumPy it does not know
        # raises AttributeError.
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise KernelsUnavailable(
            f"CuPy cannot be imported [{first.strip()}]; torch is built for CUDA {torch.version.cuda}: {remedy}"
        ) from error
    if theirs != major:
        raise KernelsUnavailable(
            f"CuPy {cupy.__version__} is built for CUDA {theirs}, torch for CUDA {torch.version.cuda}: "
            f"pip uninstall cupy-cuda{theirs}x, then {remedy}"
        )
    return cupy


def _current_stream(index: int) -> int:
    """Address of torch's current stream of a device."""
    # what torch's own compilers use: an object for the stream takes ten times as long to make
    if _raw_stream is not None:
        return int(_raw_stream(index))
    return torch.cuda.current_stream(index).cuda_stream


class _Stream:
    """A stream as a launch of CuPy's wants it: its address."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class CupyRuntime:
    """Compiles with CuPy's NVRTC, keeps the binary in the directory of compiled libraries, launches on torch's current stream.

    Raises:
        KernelsUnavailable: see ``import_cupy``; or there is no device, or the kernels do not compile for it.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._cupy = import_cupy()
        if not torch.cuda.is_available():
            raise KernelsUnavailable("torch sees no CUDA device")
        self._modules: dict[int, Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}
        self._load(torch.cuda.current_device())

    def _load(self, index: int) -> None:
        """Compiles for a device, or takes the binary that is there, and loads it.

        Raises:
            KernelsUnavailable: NVRTC or the driver refuses.
        """
        try:
            with torch.cuda.device(index):
                torch.cuda.init()
                module = self._cupy.cuda.function.Module()
                module.load(self._binary(index))
        except Exception as error:  # CuPy's and the driver's have no common class
            raise KernelsUnavailable(
                f"CuPy {self._cupy.__version__} cannot compile the kernels for {torch.cuda.get_device_name(index)} [{error}]"
            ) from error
        self._modules[index] = module

    def _binary(self, index: int) -> bytes:
        """Machine code for the current device, whose index is given."""
        source, compiler = SOURCE.read_text(), self._cupy.cuda.compiler
        digest = hashlib.sha256()
        facts = (OPTIONS, torch.cuda.get_device_capability(index), self._cupy.cuda.nvrtc.getVersion())
        for part in (source, *map(repr, facts)):
            digest.update(b"\0" + part.encode())
        try:
            target = cache_directory() / f"onebit-{digest.hexdigest()[:20]}.cubin"
        except KernelsUnavailable as error:
            log.debug("the binary of the cuda kernels is not kept: %s", error)
            target = None
        found = kept.fetch(target) if target is not None else None
        if found is not None:
            return found
        binary: bytes
        binary, _ = compiler.compile_using_nvrtc(source, OPTIONS, None, SOURCE.name)
        if target is not None:
            with contextlib.suppress(OSError):
                kept.keep(target, binary)
        return binary

    def launch(
        self, name: str, device: torch.device, grid: int, block: tuple[int, int], shared: int, args: Sequence[Argument]
    ) -> None:
        """See ``Runtime``."""
        # (in few words: a step's host work is mostly launches)
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        function = self._functions.get((index, name)) or self._function(index, name)
        stream = _Stream(_current_stream(index))
        with torch.cuda.device(index) if index != current else contextlib.nullcontext():
            function((grid,), block, tuple(args), shared_mem=shared, stream=stream)

    def _function(self, index: int, name: str) -> Any:
        """A kernel on a device."""
        if index not in self._modules:
            self._load(index)
        with torch.cuda.device(index):
            function = self._functions[index, name] = self._modules[index].get_function(name)
        return function

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """See ``Runtime``."""
        return upload(values, device)

    def stream(self, device: torch.device) -> int:
        """See ``Runtime``."""
        return _current_stream(torch.cuda.current_device() if device.index is None else device.index)


# ----- calling --------------------------------------------------------------------------------------------------------


class _Recent(OrderedDict[Hashable, Any]):
    """The tables that were used last."""

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is kept under a key, made if need be."""
        known = self.get(key)
        if known is None:
            known = self[key] = make()
            if len(self) > _TABLES_KEPT:
                self.popitem(last=False)
        else:
            self.move_to_end(key)
        return known


class _CudaLayout(Layout):
    """With the span of each block, and tables of tensors' addresses, on a device."""

    def __init__(self, bucket: BlockMap, kernels: CudaKernels, device: torch.device) -> None:
        super().__init__(bucket, kernels)
        block_span = torch.full((bucket.blocks,), -1, dtype=torch.int32)
        for index, span in enumerate(bucket.spans):
            block_span[span.block : span.block + span.blocks(bucket.block_size)] = index
        self.block_span = kernels._runtime.upload(block_span, device)
        self.tables = _Recent()


class CudaKernels(CompiledKernels):
    """Kernels of ``onebit.cu``; the semantics, argument by argument, are those of ``reference.ReferenceKernels``.

    Calls return when the kernel is queued on torch's current stream of the tensors' device. As with torch's own operations, a
    tensor used on a stream other than the one it was allocated on is the caller's to keep alive (``Tensor.record_stream``).

    Args:
        runtime: the device; None: CuPy.

    Raises:
        KernelsUnavailable: CuPy is missing or does not fit, or the device does not compute the reference's bits.
    """

    name = "cuda"
    _no_spans = (0, 0)
    _fp32 = np.float32

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime: Runtime = CupyRuntime() if runtime is None else runtime
        super().__init__(self._runtime.device_type)
        self._pieces = _Recent()
        self._lock = threading.Lock()  # of the tables: backward hooks and simulated ranks come from other threads
        if not self._reproduces_the_reference(torch.device(self._runtime.device_type), denormals=True):
            raise KernelsUnavailable("the compiled CUDA kernels do not compute the reference's bits on this device")

    def _place(self, near: Tensor) -> Hashable:
        # by stream: an upload is ordered with the kernels of its own stream only
        return near.device, self._runtime.stream(near.device)

    def _new_layout(self, bucket: BlockMap, near: Tensor) -> Layout:
        return _CudaLayout(bucket, self, near.device)

    def _bind(
        self, bucket: BlockMap, spans: Spans, name: str, near: Tensor, dtypes: dict[torch.dtype, int] = DTYPES
    ) -> Bound:
        with self._lock:
            return super()._bind(bucket, spans, name, near, dtypes)

    def _tabulated(self, bound: Bound, near: Tensor) -> Bound:
        """Uploads the ``Span`` array of these addresses, only if it is not there already."""
        layout = bound.layout
        assert isinstance(layout, _CudaLayout)

        def upload_table() -> Tensor:
            rows = [
                [address, first | code << 32]
                for address, first, code in zip(bound.addresses, layout.first_blocks, bound.codes, strict=True)
            ]
            # (kernels may read the first entry of an empty one)
            return self._runtime.upload(torch.tensor(rows or [[0, 0]], dtype=torch.int64), near.device)

        bound.table = layout.tables.get_or_make((tuple(bound.addresses), tuple(bound.codes)), upload_table)
        bound.arguments = (layout.block_span.data_ptr(), bound.table.data_ptr())
        return bound

    def _residuals(
        self, old: Tensor | Residual, new: Tensor | Residual | None, name: str, blocks: int, block_size: int
    ) -> tuple[Argument, ...]:
        check_into(name, old, new)
        read = self._state(as_tensor(old), name, blocks * block_size)
        written = read if new is None else self._state(as_tensor(new), "into", blocks * block_size)
        return read[0], written[0]

    def _kernel(
        self,
        name: str,
        block_size: int,
        residual: Tensor | Residual,
        into: Tensor | Residual | None = None,
        m: Tensor | Packed | None = None,
        r: Tensor | None = None,
    ) -> str:
        e = as_tensor(residual)
        suffix = "_bf16" if e.dtype is torch.bfloat16 else ""
        if name == "reduce":
            return f"reduce{suffix}"
        kind = "none" if m is None else "packed" if isinstance(m, Packed) else "flat"
        narrow = r is not None and r.dtype is torch.bfloat16
        flats = [tensor for tensor in (e, e if into is None else as_tensor(into), m, r) if isinstance(tensor, Tensor)]
        aligned = all([flat.data_ptr() % (4 * flat.element_size()) == 0 for flat in flats])
        # (no such kernel for the rest: they would need more registers, or occur in a run's first steps alone)
        fits = r is None or kind == "packed" or (kind == "none" and not narrow)
        lanes = block_size // BITS_PER_WORD
        if lanes % 4 == 0 and lanes <= _MAX_THREADS and aligned and fits:
            return f"compress_vectors_{kind}{'_r16' if narrow else ''}{suffix}"
        return f"compress_{kind}{suffix}"

    def _call(
        self, name: str, near: Tensor, block_size: int, blocks: int, arguments: Sequence[Argument], sums: int = 0
    ) -> None:
        if blocks == 0:
            return
        lanes = block_size // BITS_PER_WORD
        threads = min(lanes, _MAX_THREADS)
        groups = max(1, _GROUP_THREADS // threads)
        grid = -(-blocks // groups)
        staged = name.startswith("compress_vectors")  # whole blocks go through shared memory
        shared = groups * lanes * 4 * (sums + (BITS_PER_WORD if staged else 0))
        scratch: tuple[Argument, ...] = (0,) if sums else ()
        if sums and shared > _SHARED_BYTES:
            memory = torch.empty(grid * groups * lanes * sums, dtype=torch.float32, device=near.device)
            scratch, shared = (memory.data_ptr(),), 0
        self._runtime.launch(
            f"onebit_{name}", near.device, grid, (threads, groups), shared, (block_size, blocks, *arguments, *scratch)
        )

    # ----- gradient statistics ----------------------------------------------------------------------------------------

    def _statistics(self, tensors: list[Tensor]) -> Tensor:
        device = tensors[0].device
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if not tensors:
            return torch.zeros(2, dtype=torch.float64, device=device)
        strange = [tensor for tensor in tensors if not self._is_here(tensor)]
        if strange:
            raise ValueError(f"grad_stats: a tensor of shape {tuple(strange[0].shape)} is on {strange[0].device}")
        facts = tuple([(t.data_ptr(), t.numel(), DTYPES[t.dtype]) for t in tensors])
        with self._lock:
            key = (device, self._runtime.stream(device), facts)
            pieces, owners = self._pieces.get_or_make(key, lambda: self._piece_table(facts, device))
        count = len(pieces)
        sums = torch.empty(count, dtype=torch.float64, device=device)
        broken = torch.zeros(len(tensors), dtype=torch.int32, device=device)
        result = torch.empty(2, dtype=torch.float64, device=device)
        block = (_STATS_THREADS, 1)
        tables = (pieces.data_ptr(), owners.data_ptr(), sums.data_ptr(), broken.data_ptr())
        self._runtime.launch("onebit_grad_stats", device, count, block, 8 * _STATS_THREADS, tables)
        totals = (count, sums.data_ptr(), len(tensors), broken.data_ptr(), result.data_ptr())
        self._runtime.launch("onebit_grad_stats_total", device, 1, block, 16 * _STATS_THREADS, totals)
        return result

    def _piece_table(self, facts: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """The device's ``Piece`` array, and the tensor of each piece, of tensors' addresses, lengths and codes."""
        rows, owners = [], []
        for index, (address, numel, code) in enumerate(facts):
            starts = np.arange(0, numel, _PIECE, dtype=np.int64)
            counts = np.minimum(numel - starts, _PIECE)
            rows.append(np.stack([address + starts * (4 if code == 0 else 2), counts | code << 32], axis=1))
            owners.append(np.full(len(starts), index, dtype=np.int32))
        table = self._runtime.upload(torch.from_numpy(np.concatenate(rows)), device)
        return table, self._runtime.upload(torch.from_numpy(np.concatenate(owners)), device)
