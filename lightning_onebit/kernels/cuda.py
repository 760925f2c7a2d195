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
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_onebit.kernels import BlockMap, BoundSpans, KernelsUnavailable, Spans, kept
from lightning_onebit.kernels.common import CheckMap, check_rows, increment_versions, is_dense
from lightning_onebit.kernels.counter_rng import DrawKey
from lightning_onebit.kernels.cpu import cache_directory
from lightning_onebit.kernels.packed import BITS_PER_WORD, Packed
from lightning_onebit.kernels.reference import ReferenceKernels
from lightning_onebit.kernels.residual import Residual, settled
from lightning_onebit.kernels.transfer import upload

log = logging.getLogger("lightning_onebit")

SOURCE = Path(__file__).with_name("onebit.cu")
# No contraction, no flushing of denormals, correctly rounded division and root: anything else would change the bits.
OPTIONS = ("-std=c++14", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
CUDA_MAJORS = (12, 13)  # those that there is an extra for

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FP32_ONLY = {torch.float32: 0}
_RESIDUALS = {torch.float32: "", torch.bfloat16: "_bf16"}  # how the names of kernels end that keep residuals so
_MAX_THREADS = 256  # of one compression block: lanes beyond are shared out among them
_GROUP_THREADS = 64  # small compression blocks share a thread block of about this size
_SHARED_BYTES = 48 * 1024  # what a thread block may have on every device without asking
_STATS_THREADS = 256
_PIECE = 1 << 16  # elements of a gradient that one thread block looks at
_TABLES_KEPT = 8
_MAX_ROWS = 65535  # counts of votes have 16 bits

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Argument = Any  # an address or an integer (int), or np.float32


class Runtime(Protocol):
    """The device, as far as the kernels need it."""

    device_type: str

    def launch(
        self,
        name: str,
        device: torch.device,
        grid: int,
        block: tuple[int, int],
        shared: int,
        arguments: Sequence[Argument],
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
        self,
        name: str,
        device: torch.device,
        grid: int,
        block: tuple[int, int],
        shared: int,
        arguments: Sequence[Argument],
    ) -> None:
        """See ``Runtime``."""
        # (in few words: a step's host work is mostly launches)
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        function = self._functions.get((index, name)) or self._function(index, name)
        stream = _Stream(_current_stream(index))
        with torch.cuda.device(index) if index != current else contextlib.nullcontext():
            function((grid,), block, tuple(arguments), shared_mem=shared, stream=stream)

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


# ----- arguments ------------------------------------------------------------------------------------------------------


class _Layout:
    """What kernels know of a bucket on a device, and the tables of its tensors' addresses that were used last."""

    def __init__(self, bucket: BlockMap, runtime: Runtime, device: torch.device) -> None:
        self.numels = [span.numel for span in bucket.spans]
        self.first_blocks = [span.block for span in bucket.spans]
        self.count = len(self.numels)
        block_span = torch.full((bucket.blocks,), -1, dtype=torch.int32)
        for index, span in enumerate(bucket.spans):
            block_span[span.block : span.block + span.blocks(bucket.block_size)] = index
        self.block_span = runtime.upload(block_span, device)
        self._tables: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()

    def table(self, runtime: Runtime, device: torch.device, addresses: list[int], codes: list[int]) -> Tensor:
        """The device's ``Span`` array for these addresses; uploaded only if it is not there already."""
        key = (tuple(addresses), tuple(codes))
        table = self._tables.get(key)
        if table is None:
            rows = [[a, first | code << 32] for a, first, code in zip(addresses, self.first_blocks, codes, strict=True)]
            values = torch.tensor(
                rows or [[0, 0]], dtype=torch.int64
            )  # kernels may read the first entry of an empty one
            table = self._tables[key] = runtime.upload(values, device)
            if len(self._tables) > _TABLES_KEPT:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table


class _Bound:
    """The tensors of a bucket's spans as kernels see them.

    What a kernel cannot read in place (another dtype, gaps in memory) is read, and written back, through an fp32 copy.
    """

    def __init__(
        self, layout: _Layout, spans: Spans, name: str, dtypes: dict[torch.dtype, int], device_type: str
    ) -> None:
        if len(spans) != layout.count:
            raise ValueError(f"{name} must have one entry per span, {layout.count}, got {len(spans)}")
        self.layout = layout
        self._written: list[Tensor] | None = None  # those that autograd counts
        self.copies: list[tuple[Tensor, Tensor]] = []
        # addresses of block -> span and of the table on the device; this object must outlive the launch, since it holds the copies
        self.tables: tuple[int, int] = (0, 0)
        self._table: Tensor | None = None
        # one fact of all tensors after the other, in comprehensions: gradients' tables are made at every step
        there = [tensor for tensor in spans if tensor is not None]
        numels = layout.numels
        if len(there) < len(spans):
            numels = [numel for tensor, numel in zip(spans, numels, strict=True) if tensor is not None]
        if [tensor.numel() for tensor in there] != numels or not all([t.device.type == device_type for t in there]):
            tensor, numel = next(
                (t, n) for t, n in zip(there, numels, strict=True) if t.numel() != n or t.device.type != device_type
            )
            raise ValueError(
                f"{name}: a span of {numel} elements on {device_type} got shape {tuple(tensor.shape)} on {tensor.device}"
            )
        fits = [tensor.dtype in dtypes and tensor.is_contiguous() for tensor in there]
        if not all(fits):
            self.copies = [
                (tensor, tensor.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True))
                for tensor, fit in zip(there, fits, strict=True)
                if not fit
            ]
            copies = iter(self.copies)
            spans = [t if t is None or (t.dtype in dtypes and t.is_contiguous()) else next(copies)[1] for t in spans]
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in spans]
        self.codes = [0 if tensor is None else dtypes[tensor.dtype] for tensor in spans]

    def placed(self, table: Tensor) -> _Bound:
        """Notes where the device has the addresses."""
        self._table = table
        self.tables = (self.layout.block_span.data_ptr(), table.data_ptr())
        return self

    def written(self, spans: Spans) -> None:
        """Makes what a kernel wrote visible: to the tensors that were copied, and to autograd's check of in-place changes.

        Args:
            spans: the tensors that were bound.
        """
        with torch.no_grad():
            for tensor, copy in self.copies:
                tensor.copy_(copy)
        if self._written is None:
            self._written = [tensor for tensor in spans if tensor is not None and not tensor.is_inference()]
        increment_versions(self._written)


class CudaKernels(ReferenceKernels):
    """Kernels of ``onebit.cu``; the semantics, argument by argument, are those of ``reference.ReferenceKernels``.

    Calls return when the kernel is queued on torch's current stream of the tensors' device. As with torch's own operations, a
    tensor used on a stream other than the one it was allocated on is the caller's to keep alive (``Tensor.record_stream``).

    Args:
        runtime: the device; None: CuPy.

    Raises:
        KernelsUnavailable: CuPy is missing or does not fit, or the device does not compute the reference's bits.
    """

    name = "cuda"

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime: Runtime = CupyRuntime() if runtime is None else runtime
        self._layouts: dict[tuple[int, torch.device, int], tuple[weakref.ref[BlockMap], _Layout]] = {}
        self._pieces: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = threading.Lock()  # of the tables: backward hooks and simulated ranks come from other threads
        self._check()

    def _check(self) -> None:
        """Compares with the reference once, because a compiler with other ideas of arithmetic would go unnoticed."""
        size, generator = 2048, torch.Generator().manual_seed(1)
        data = torch.randn(5, 3 * size, dtype=torch.float32, generator=generator)
        data[:4, 2 * size :] *= 1e-41  # a block of denormals, which some options flush
        lengths = torch.tensor([size, size - 37, 100], dtype=torch.int32)
        data[:4].view(4, 3, size)[:, torch.arange(size) >= lengths[:, None]] = 0.0
        results = []
        for kernels, device in ((ReferenceKernels(), "cpu"), (self, self._runtime.device_type)):
            on = torch.device(device)
            bucket = CheckMap(size, lengths.to(on))
            e, d, m, g, r = (row.to(on, copy=True) for row in data)
            r.abs_()
            factors = r[:3].clone()
            sent, reply = Packed.empty(1, 3, size, device=on), Packed.empty(1, 3, size, device=on)
            kernels.compress(bucket, 0, 3, a=factors, m=m, b=factors, g=g, e=e, out=sent, r=r)
            kernels.reduce(sent, bucket.lengths, d, reply, 1 / 3)
            results.append([t.cpu().view(torch.uint8) for t in (e, d, sent.raw, reply.raw)])
        if not all(a.equal(b) for a, b in zip(*results, strict=True)):
            raise KernelsUnavailable("the compiled CUDA kernels do not compute the reference's bits on this device")

    # ----- helpers ----------------------------------------------------------------------------------------------------

    def _address(self, tensor: Tensor | None, name: str, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Address of a tensor that a kernel reads or writes as it lies in memory."""
        if tensor is None:
            raise ValueError(f"{name} must be given")
        there = tensor.device.type == self._runtime.device_type
        if tensor.dtype != dtype or tensor.numel() != numel or not tensor.is_contiguous() or not there:
            raise ValueError(
                f"{name} must be {numel} contiguous elements of {dtype} on {self._runtime.device_type}, got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
            )
        return tensor.data_ptr()

    def _residual(self, tensor: Tensor, name: str, numel: int) -> tuple[int, str]:
        """Address of residuals, fp32 or, in half the memory, bf16; and how the names of the kernels for them end."""
        dtype = torch.bfloat16 if tensor.dtype is torch.bfloat16 else torch.float32
        return self._address(tensor, name, numel, dtype), _RESIDUALS[dtype]

    def _reciprocals(self, tensor: Tensor, numel: int) -> tuple[int, int]:
        """Address and code of reciprocal denominators, fp32 or, in half the memory, bf16."""
        dtype = torch.bfloat16 if tensor.dtype is torch.bfloat16 else torch.float32
        return self._address(tensor, "r", numel, dtype), _DTYPES[dtype]

    def _payload(
        self, packed: Packed, name: str, blocks: int, block_size: int, has_scales: bool = True
    ) -> tuple[int, int, int]:
        """Address, bytes from row to row, and blocks of a row."""
        raw = packed.raw
        if packed.blocks != blocks or packed.block_size != block_size or packed.has_scales != has_scales:
            raise ValueError(
                f"{name} must hold {blocks} blocks of {block_size} elements, has_scales={has_scales}, got {packed.blocks} of "
                f"{packed.block_size}, has_scales={packed.has_scales}"
            )
        address, stride = raw.data_ptr(), raw.stride(0)
        if raw.device.type != self._runtime.device_type or raw.stride(1) != 1 or address % 4 or stride % 4:
            raise ValueError(
                f"{name}.raw must be rows of contiguous bytes on {self._runtime.device_type} that begin at multiples of 4 bytes"
            )
        return address, stride, packed.blocks_per_row

    def _layout(self, bucket: BlockMap, device: torch.device) -> _Layout:
        # By identity: hashing a bucket would hash all its spans at every call. By stream: an upload is ordered with the kernels of
        # its own stream only.
        key = (id(bucket), device, self._runtime.stream(device))
        known = self._layouts.get(key)
        if known is not None and known[0]() is bucket:
            return known[1]
        layout = _Layout(bucket, self._runtime, device)
        self._layouts[key] = (weakref.ref(bucket, lambda _: self._layouts.pop(key, None)), layout)
        return layout

    def _bind(
        self, bucket: BlockMap, spans: Spans, name: str, device: torch.device, dtypes: dict[torch.dtype, int] = _DTYPES
    ) -> _Bound:
        key = f"cuda {name} {len(dtypes)}"
        with self._lock:
            layout = self._layout(bucket, device)
            known: _Bound | None = spans.tables.get(key) if isinstance(spans, BoundSpans) else None
            if known is not None and known.layout is layout:  # a layout belongs to a stream, like the tables
                return known
            bound = _Bound(layout, spans, name, dtypes, self._runtime.device_type)
            bound.placed(layout.table(self._runtime, device, bound.addresses, bound.codes))
            # a copy holds what the tensor held (gradients are bound for one step, in which nobody writes to them)
            if isinstance(spans, BoundSpans) and (not bound.copies or name == "g"):
                spans.tables[key] = bound
            return bound

    def _lengths(self, bucket: BlockMap, lo: int = 0) -> int:
        return self._address(bucket.lengths, "bucket.lengths", bucket.blocks, torch.int32) + 4 * lo

    def _launch(
        self,
        name: str,
        device: torch.device,
        block_size: int,
        blocks: int,
        arguments: Sequence[Argument],
        *,
        accumulators: int = 0,
        staged: bool = False,
    ) -> None:
        """Launches over ``blocks`` compression blocks.

        Args:
            name: of the kernel, without its prefix.
            device: of the tensors.
            block_size: elements of a block.
            blocks: number of blocks.
            arguments: of the kernel after block size and number of blocks.
            accumulators: sums per lane that it keeps: in shared memory, or in memory of its last argument where they are many.
            staged: whether whole blocks go through shared memory.
        """
        if blocks == 0:
            return
        lanes = block_size // BITS_PER_WORD
        threads = min(lanes, _MAX_THREADS)
        groups = max(1, _GROUP_THREADS // threads)
        grid = -(-blocks // groups)
        shared = groups * lanes * 4 * (accumulators + (BITS_PER_WORD if staged else 0))
        scratch: list[Argument] = []
        memory = None
        if accumulators and not staged:
            if shared > _SHARED_BYTES:
                memory = torch.empty(grid * groups * lanes * accumulators, dtype=torch.float32, device=device)
                shared = 0
            scratch = [0 if memory is None else memory.data_ptr()]
        elif staged:
            scratch = [0]
        self._runtime.launch(
            f"onebit_{name}", device, grid, (threads, groups), shared, (block_size, blocks, *arguments, *scratch)
        )

    # ----- moving between parameters and flat buckets -----------------------------------------------------------------

    def gather(self, bucket: BlockMap, spans: Spans, out: Tensor) -> None:
        """Spans to flat fp32 with zero padding."""
        target = self._address(out, "out", bucket.elements)
        bound = self._bind(bucket, spans, "spans", out.device)
        arguments = (self._lengths(bucket), *bound.tables, target)
        self._launch("gather", out.device, bucket.block_size, bucket.blocks, arguments)

    def scatter(self, bucket: BlockMap, flat: Tensor, spans: Spans) -> None:
        """Flat fp32 to spans, cast to their dtype."""
        source = self._address(flat, "flat", bucket.elements)
        bound = self._bind(bucket, spans, "spans", flat.device)
        arguments = (self._lengths(bucket), *bound.tables, source)
        self._launch("scatter", flat.device, bucket.block_size, bucket.blocks, arguments)
        bound.written(spans)

    def grad_stats(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of squares, in fp64, and the number of tensors with a non-finite value, on the tensors' device."""
        known = [tensor for tensor in tensors if tensor.dtype in _DTYPES and tensor.numel()]
        # (the contiguous ones are asked in place: a call for each of many tensors at every step)
        ours = [t if t.is_contiguous() or is_dense(t) else t.detach().contiguous() for t in known]
        others = [tensor.detach() for tensor in tensors if tensor.dtype not in _DTYPES]
        result = self._stats(ours) if ours else None
        if others:
            # no decision on values, hence no waiting for the device
            values = [t.double() for t in others]
            squares = torch.stack([v.square().sum() for v in values]).sum()
            broken = torch.stack([(~torch.isfinite(v)).any() for v in values]).sum().double()
            rest = torch.stack([squares, broken])
            result = rest if result is None else result + rest
        if result is None:
            device = tensors[0].device if tensors else torch.device("cpu")
            return torch.zeros(2, dtype=torch.float64, device=device)
        return result

    def _stats(self, tensors: list[Tensor]) -> Tensor:
        device = tensors[0].device
        strange = [tensor for tensor in tensors if tensor.device.type != self._runtime.device_type]
        if strange:
            raise ValueError(f"grad_stats: a tensor of shape {tuple(strange[0].shape)} is on {strange[0].device}")
        with self._lock:
            pieces, owners = self._piece_table(tensors, device)
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

    def _piece_table(self, tensors: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """The device's ``Piece`` array and the tensor of each piece; kept while no address changes."""
        facts = tuple([(t.data_ptr(), t.numel(), _DTYPES[t.dtype]) for t in tensors])
        key = (device, self._runtime.stream(device), facts)
        known = self._pieces.get(key)
        if known is not None:
            self._pieces.move_to_end(key)
            return known
        rows, owners = [], []
        for index, (address, numel, code) in enumerate(facts):
            starts = np.arange(0, numel, _PIECE, dtype=np.int64)
            counts = np.minimum(numel - starts, _PIECE)
            rows.append(np.stack([address + starts * (4 if code == 0 else 2), counts | code << 32], axis=1))
            owners.append(np.full(len(starts), index, dtype=np.int32))
        table = self._runtime.upload(torch.from_numpy(np.concatenate(rows)), device)
        owner = self._runtime.upload(torch.from_numpy(np.concatenate(owners)), device)
        self._pieces[key] = table, owner
        if len(self._pieces) > _TABLES_KEPT:
            self._pieces.popitem(last=False)
        return table, owner

    # ----- the error-compensated compressor ---------------------------------------------------------------------------

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
        e = settled(e)
        size, blocks, device = bucket.block_size, hi - lo, e.device
        elements = blocks * size
        kind, factor_m, flat_m, packed_m = "none", 0, 0, (0, 0, 1)
        if m is not None:
            factor_m = self._address(a, "a", blocks)
            if isinstance(m, Packed):
                kind, packed_m = "packed", self._payload(m, "m", blocks, size)
            else:
                kind, flat_m = "flat", self._address(m, "m", elements)
        factor_g, flat_g, bound = 0, 0, None
        if g is not None:
            factor_g = self._address(b, "b", blocks)
            if isinstance(g, Tensor):
                flat_g = self._address(g, "g", elements)
            else:
                if blocks != bucket.blocks:
                    raise ValueError(f"g as spans needs the whole bucket, got blocks {lo} to {hi} of {bucket.blocks}")
                bound = self._bind(bucket, g, "g", device)
        elif r is not None:
            raise ValueError("r must be None with g=None")
        reciprocal, code = (0, 0) if r is None else self._reciprocals(r, elements)
        residual, suffix = self._residual(e, "e", elements)
        lanes = size // BITS_PER_WORD
        narrow = code != _DTYPES[torch.float32]
        aligned = (
            residual % (4 * e.element_size()) == 0 and flat_m % 16 == 0 and reciprocal % (8 if narrow else 16) == 0
        )
        # (no such kernel for the rest: they would need more registers, or occur in a run's first steps alone)
        fits = r is None or kind == "packed" or (kind == "none" and not narrow)
        wide = lanes % 4 == 0 and lanes <= _MAX_THREADS and aligned and fits
        arguments = (
            *(self._lengths(bucket, lo), factor_m, flat_m, *packed_m, factor_g, flat_g),
            *(*(bound.tables if bound is not None else (0, 0)), reciprocal, code, residual),
            *self._payload(out, "out", blocks, size),
        )
        name = f"compress_vectors_{kind}{'_r16' if narrow else ''}{suffix}" if wide else f"compress_{kind}{suffix}"
        self._launch(name, device, size, blocks, arguments, accumulators=1, staged=wide)

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
        d = settled(d)
        size, blocks = received.block_size, received.blocks_per_row
        if out.rows != 1:
            raise ValueError(f"out must be one row, got {out.rows}")
        address, stride, _ = self._payload(received, "received", received.rows * blocks, size)
        target, target_stride, _ = self._payload(out, "out", blocks, size)
        residual, suffix = self._residual(d, "d", blocks * size)
        arguments = (
            *(received.rows, address, stride, self._address(lengths, "lengths", blocks, torch.int32)),
            *(residual, target, target_stride, np.float32(inv_n)),
        )
        self._launch(f"reduce{suffix}", d.device, size, blocks, arguments, accumulators=1)

    def unpack(self, packed: Packed, lengths: Tensor, out: Tensor) -> None:
        """Bits and scales to flat fp32, 0 on padding."""
        size, blocks = packed.block_size, packed.blocks
        where = (self._address(lengths, "lengths", blocks, torch.int32), self._address(out, "out", blocks * size))
        self._launch("unpack", out.device, size, blocks, (*self._payload(packed, "packed", blocks, size), *where))

    def apply_adam(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor | None, decay: Tensor, alpha: Tensor
    ) -> None:
        """``x = x*decay - (+-(t*r))`` with ``t = alpha*s``, r None: without it."""
        self._apply(
            "apply_adam",
            bucket,
            spans,
            decay.device,
            (
                *self._payload(packed, "packed", bucket.blocks, bucket.block_size),
                *((0, 0) if r is None else self._reciprocals(r, bucket.elements)),
                self._address(decay, "decay", bucket.blocks),
                self._address(alpha, "alpha", bucket.blocks),
            ),
        )

    def _apply(
        self,
        name: str,
        bucket: BlockMap,
        spans: Spans,
        device: torch.device,
        arguments: Sequence[Argument],
        **more: Any,
    ) -> None:
        """Launches a kernel that reads or updates fp32 weights."""
        bound = self._bind(bucket, spans, "spans", device, _FP32_ONLY)
        tables = (self._lengths(bucket), *bound.tables)
        self._launch(name, device, bucket.block_size, bucket.blocks, (*tables, *arguments), **more)
        if name != "lamb_update":  # which only reads the weights
            bound.written(spans)

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
        """Fresh second moments and the partial norms of every block: fp32 ``(blocks, 3)``."""
        size, blocks, elements = bucket.block_size, bucket.blocks, bucket.elements
        flat, packed = 0, (0, 0, 1)
        if isinstance(old, Packed):
            packed = self._payload(old, "old", blocks, size)
        else:
            flat = self._address(old, "old", elements)
        result = torch.empty((blocks, 3), dtype=torch.float32, device=r.device)
        self._apply(
            "lamb_update",
            bucket,
            spans,
            r.device,
            (
                *(*self._payload(new, "new", blocks, size), flat, *packed, *self._reciprocals(r, elements)),
                *(
                    self._address(fresh, "fresh", elements),
                    self._address(factors, "factors", 8 * blocks),
                    result.data_ptr(),
                ),
            ),
            accumulators=3,
        )
        return result

    def lamb_apply(
        self, bucket: BlockMap, spans: Spans, packed: Packed, r: Tensor, alpha: Tensor, wd: Tensor, step: Tensor
    ) -> None:
        """``x = x - step*u`` with ``u = (alpha*m)*r + wd*x``."""
        factors = ((alpha, "alpha"), (wd, "wd"), (step, "step"))
        self._apply(
            "lamb_apply",
            bucket,
            spans,
            r.device,
            (
                *self._payload(packed, "packed", bucket.blocks, bucket.block_size),
                *self._reciprocals(r, bucket.elements),
                *(self._address(tensor, name, bucket.blocks) for tensor, name in factors),
            ),
        )

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
        """``m = b1*m + o1*g ; p = lr*m ; u = u + p ; x = x*decay - clamp(p*r) ; anchor = anchor*decay``."""
        gradients = self._bind(bucket, g, "g", m.device)
        elements = bucket.elements
        self._apply(
            "local_step",
            bucket,
            spans,
            m.device,
            (
                *(gradients.tables[1], self._address(m, "m", elements), self._address(u, "u", elements)),
                *(*self._reciprocals(r, elements), self._address(anchor, "anchor", elements)),
                self._address(factors, "factors", 5 * bucket.blocks),
            ),
        )

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
        """``m = b1*m + o1*g ; a = b2*a + o2*|g|``, then bits of ``Q(m / a)``; what signs cannot express stays in m."""
        size, blocks = bucket.block_size, hi - lo
        flat, bound = 0, None
        if isinstance(g, Tensor):
            flat = self._address(g, "g", blocks * size)
        else:
            if blocks != bucket.blocks:
                raise ValueError(f"g as spans needs the whole bucket, got blocks {lo} to {hi} of {bucket.blocks}")
            bound = self._bind(bucket, g, "g", m.device)
        tables = bound.tables if bound is not None else (0, 0)
        arguments = (
            *(self._lengths(bucket, lo), self._address(factors, "factors", 5 * blocks), flat, *tables),
            *(self._address(m, "m", blocks * size), self._address(a, "a", blocks * size)),
            *(*key, first_block, *self._payload(out, "out", blocks, size, has_scales=False)),
        )
        self._launch("sample", m.device, size, blocks, arguments)

    def vote(
        self,
        received: Packed,
        lengths: Tensor,
        key: DrawKey,
        first_block: int,
        out: Tensor,
        carry: Tensor | None = None,
    ) -> None:
        """Combines the workers' signs of one chunk."""
        check_rows(received)
        size, blocks, rows = received.block_size, received.blocks_per_row, received.rows
        if rows > _MAX_ROWS:
            raise ValueError(f"received has {rows} rows; votes of at most {_MAX_ROWS} ranks can be counted")
        address, stride, _ = self._payload(received, "received", rows * blocks, size, has_scales=False)
        target = self._address(out, "out", blocks * (size // BITS_PER_WORD), torch.int32)
        arguments = (
            *(rows, address, stride, self._address(lengths, "lengths", blocks, torch.int32)),
            *(*key, first_block, target, np.float32(1.0 / rows)),
            0 if carry is None else self._address(carry, "carry", blocks * size),
        )
        self._launch("vote", out.device, size, blocks, arguments)

    def apply_votes(
        self,
        bucket: BlockMap,
        spans: Spans,
        words: Tensor,
        live: Tensor,
        decay: Tensor,
        lr: Tensor,
    ) -> None:
        """``x = x*decay + lr*ubar`` where the coordinate is live, ``x = x*decay`` elsewhere."""
        lanes = bucket.block_size // BITS_PER_WORD
        votes = self._address(words, "words", bucket.blocks * lanes, torch.int32)
        bitmap = self._address(live, "live", bucket.blocks * lanes, torch.int32)
        factors = (self._address(decay, "decay", bucket.blocks), self._address(lr, "lr", bucket.blocks))
        self._apply("apply_votes", bucket, spans, words.device, (votes, bitmap, *factors))

    def mark_live(self, bucket: BlockMap, lo: int, hi: int, a: Tensor, words: Tensor) -> None:
        """Bitmap of coordinates with ``a > 0``."""
        size, blocks = bucket.block_size, hi - lo
        source = self._address(a, "a", blocks * size)
        target = self._address(words, "words", blocks * (size // BITS_PER_WORD), torch.int32)
        self._launch("mark_live", a.device, size, blocks, (self._lengths(bucket, lo), source, target))
