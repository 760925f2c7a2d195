"""What can be proven of the CUDA kernels without a GPU: they compile, they compute the reference's bits, they are called rightly.

The text of onebit.cu runs here on the CPU, one fibre per CUDA thread (tests/cuda_shim); test_gpu.py repeats the cases on a device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_shim import ORDERS, ShimRuntime, cases, compiler, compilers, kernel_names, training

from lightning_onebit import kernels as registry
from lightning_onebit.comm import SimulatedWorld
from lightning_onebit.kernels import KernelsUnavailable, Packed, cuda, get_backend
from lightning_onebit.kernels.compiled import CompiledKernels
from lightning_onebit.kernels.cuda import OPTIONS, SOURCE, CudaKernels
from lightning_onebit.kernels.reference import ReferenceKernels
from lightning_onebit.kernels.transfer import upload

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to run the kernels on the CPU with")
REFERENCE = ReferenceKernels()


@pytest.fixture(scope="module")
def shims() -> dict[str, CudaKernels]:
    """The backend on the CPU, for each order in which threads may run."""
    if compiler() is None:
        pytest.skip("no C++ compiler to run the kernels on the CPU with")
    return {order: CudaKernels(ShimRuntime(order)) for order in ORDERS}


def runtime_of(kernels: CudaKernels) -> ShimRuntime:
    runtime = kernels._runtime
    assert isinstance(runtime, ShimRuntime)
    return runtime


def compare(
    kernels: CudaKernels, name: str, block_size: int, sizes: Sequence[int], put: cases.Put = lambda t: t
) -> list[str]:
    theirs = cases.CASES[name](cases.world(REFERENCE, lambda t: t, block_size, sizes))
    ours = cases.CASES[name](cases.world(kernels, put, block_size, sizes))
    return cases.differences(ours, theirs)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins 4 bytes (8 for 8-byte types) after a multiple of 16."""
    shift = max(4, tensor.element_size())
    memory = torch.empty(shift + tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    return memory[shift:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


# ----- the same bits as the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(cases.CASES))
def test_kernel_reproduces_the_reference_bit_for_bit(shims: dict[str, CudaKernels], name: str) -> None:
    """Random, denormal, -0.0 and all-zero blocks of odd sizes, whatever order threads run in between two barriers."""
    for i, block_size in enumerate(cases.BLOCK_SIZES):
        for j, sizes in enumerate(cases.SIZES):
            order = [*shims][(i + j) % len(shims)]  # every pair of a block size, sizes and an order
            found = compare(shims[order], name, block_size, sizes)
            assert not found, f"block_size {block_size}, sizes {sizes}, threads {order}: {found}"


@pytest.mark.parametrize(
    "name", ["compress packed flat", "reduce 3", "lamb_update packed", "compress packed spans, bf16 residual"]
)
def test_blocks_with_more_lanes_than_shared_memory_holds(shims: dict[str, CudaKernels], name: str) -> None:
    assert not compare(shims["shuffled"], name, 2**19, (2**19 + 5,))


def test_every_kernel_of_the_file_is_compared(shims: dict[str, CudaKernels]) -> None:
    kernels = CudaKernels(ShimRuntime())
    for block_size in (96, 2048):
        for name in cases.CASES:
            assert not compare(kernels, name, block_size, (100, 4097, 64))
    kernels.grad_stats([torch.ones(3)])
    assert set(runtime_of(kernels).launches) == set(kernel_names())


def test_sixteen_byte_loads_are_used_where_alignment_allows(shims: dict[str, CudaKernels]) -> None:
    kernels = CudaKernels(ShimRuntime())
    runtime = runtime_of(kernels)
    for name, suffix in [("compress flat flat", ""), ("compress flat flat, bf16 residual", "_bf16")]:
        for block_size, kernel in [(2048, "onebit_compress_vectors_flat"), (96, "onebit_compress_flat")]:
            runtime.launches.clear()
            assert not compare(kernels, name, block_size, (5000,))
            assert runtime.launches == [kernel + suffix] * 2
        runtime.launches.clear()
        assert not compare(kernels, name, 2048, (5000,), unaligned)
        assert runtime.launches == ["onebit_compress_flat" + suffix] * 2


@pytest.mark.parametrize("block_size", [96, 2048])
def test_tensors_that_begin_anywhere_in_memory_give_the_same_bits(
    shims: dict[str, CudaKernels], block_size: int
) -> None:
    """The shim stops at a 16-byte access that is not aligned, as a GPU does."""
    for name in cases.CASES:
        found = compare(shims["forward"], name, block_size, (100, 4097, 64), unaligned)
        assert not found, f"{name}: {found}"


@pytest.mark.parametrize(("name", "kind"), training.runs("fp32", "bf16", "bf16 state"))
def test_optimizers_train_alike_on_these_kernels_and_on_the_reference(
    shims: dict[str, CudaKernels], monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Two ranks, every phase, from the gradients to the parameters."""
    monkeypatch.setitem(registry._FACTORIES, "cpu", lambda: shims["shuffled"])
    registry._load.cache_clear()
    try:
        launches = runtime_of(shims["shuffled"]).launches
        launches.clear()
        ours = SimulatedWorld(2, timeout=60).run(lambda group: training.run(name, "cpu", "cpu", group, kind))
        assert launches, "the kernels were not used"
        exchanges = [n for n in launches if "compress" in n or "reduce" in n]
        assert all(n.endswith("_bf16") == (kind == "bf16 state") for n in exchanges)
        theirs = SimulatedWorld(2, timeout=60).run(lambda group: training.run(name, "reference", "cpu", group, kind))
    finally:
        registry._load.cache_clear()
    for mine, other in zip(ours, theirs, strict=True):
        assert not cases.differences(mine, other)


# ----- gradient statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64])
@pytest.mark.parametrize("shift", [0, 1])
def test_grad_stats_is_exact_to_fp64_rounding(shims: dict[str, CudaKernels], dtype: torch.dtype, shift: int) -> None:
    tensors = [torch.randn(n + shift).to(dtype)[shift:] for n in (1, 7, 0, 70_001, 131_072)]
    tensors.append(torch.randn(6, 4).to(dtype).t())  # another memory order
    tensors.append(torch.randn(8, 4).to(dtype)[::2, ::2])  # gaps
    squares, bad = shims["forward"].grad_stats(tensors).tolist()
    assert bad == 0 and squares == pytest.approx(sum(float(t.double().square().sum()) for t in tensors), rel=1e-13)
    aligned = shims["shuffled"].grad_stats([t.clone() for t in tensors])
    assert aligned[0].item() == squares, "the sum depends on alignment or on the order of threads"
    tensors[1][3], tensors[3][70_000], tensors[3][5] = float("inf"), float("nan"), float("-inf")
    assert shims["forward"].grad_stats(tensors)[1].item() == 2


def test_grad_stats_neither_overflows_nor_underflows(shims: dict[str, CudaKernels]) -> None:
    large, small = torch.full((100,), 3e38), torch.full((100,), 1e-41)
    squares, bad = shims["forward"].grad_stats([large]).tolist()
    assert bad == 0 and squares == pytest.approx(100 * float(large[0]) ** 2, rel=1e-13)
    assert shims["forward"].grad_stats([small])[0].item() == pytest.approx(100 * float(small[0]) ** 2, rel=1e-13)


def test_grad_stats_of_nothing(shims: dict[str, CudaKernels]) -> None:
    assert shims["forward"].grad_stats([]).tolist() == [0.0, 0.0]
    assert shims["forward"].grad_stats([torch.empty(0)]).tolist() == [0.0, 0.0]


# ----- memory and barriers --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_no_kernel_touches_memory_outside_its_tensors(shims: dict[str, CudaKernels]) -> None:
    """Every tensor lies against a page whose access kills the process."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "cuda_shim" / "guarded.py")],
        capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0 and "all cases kept" in done.stdout, (
        f"exit code {done.returncode}: {done.stderr[-2000:]}"
    )


HALF = "    const int half = (width + 1) / 2;\n"
MUTATIONS = {
    "no barrier while folding lanes": (HALF + "    __syncthreads();\n    for", HALF + "    for"),
    "a barrier that some threads pass by": (
        "  fold_lanes(acc, h);\n  if (!h.live) return;",
        "  if (!h.live || h.t == 3) return;\n  fold_lanes(acc, h);",
    ),
}


@needs_compiler
@pytest.mark.parametrize("mutation", list(MUTATIONS))
def test_the_shim_notices_broken_barriers(mutation: str) -> None:
    """Otherwise the comparisons above would prove nothing about races."""
    text, (old, new) = SOURCE.read_text(), MUTATIONS[mutation]
    assert old in text
    runtime = ShimRuntime("backward", text.replace(old, new))
    kernels = CudaKernels.__new__(CudaKernels)
    with contextlib.suppress(RuntimeError):  # its own comparison with the reference may fail already
        kernels.__init__(runtime)  # type: ignore[misc]
    noticed = []
    for order in ORDERS:
        runtime._order = ORDERS[order]
        try:
            noticed += compare(kernels, "compress packed fp32", 2048, (5000,))
        except RuntimeError as error:
            noticed.append(str(error))
    assert noticed


@needs_compiler
def test_launches_that_a_gpu_would_refuse_fail_here_too() -> None:
    runtime, device = ShimRuntime(), torch.device("cpu")
    with pytest.raises(RuntimeError, match="no such kernel"):
        runtime.launch("onebit_nothing", device, 1, (32, 1), 0, ())
    with pytest.raises(RuntimeError, match="takes 7 arguments, not 1"):
        runtime.launch("onebit_unpack", device, 1, (32, 1), 0, (0,))
    with pytest.raises(RuntimeError, match="impossible shape"):
        runtime.launch("onebit_unpack", device, 1, (257, 1), 0, (0,) * 7)
    with pytest.raises(RuntimeError, match="shared memory"):
        runtime.launch("onebit_unpack", device, 1, (32, 1), 48 * 1024 + 4, (0,) * 7)


# ----- how the kernels are called -------------------------------------------------------------------------------------------------


def test_tables_are_uploaded_only_when_an_address_has_changed(shims: dict[str, CudaKernels]) -> None:
    kernels = CudaKernels(ShimRuntime())
    runtime = runtime_of(kernels)
    w = cases.world(kernels, lambda t: t, 2048, (5000, 100))
    out, first, second = w.flat(), w.spans(), w.spans()
    kernels.gather(w.bucket, first, out)
    begun = runtime.uploads
    kernels.gather(w.bucket, first, out)
    kernels.compress(w.bucket, 0, w.blocks, a=None, m=None, b=w.factors(w.blocks), g=first, e=out, out=w.output())
    assert runtime.uploads == begun
    kernels.gather(w.bucket, second, out)
    assert runtime.uploads == begun + 1
    kernels.gather(w.bucket, first, out)
    assert runtime.uploads == begun + 1, "the tables used last are kept"
    # an upload is ordered with the kernels of its own stream only
    runtime.current_stream = 1
    kernels.gather(w.bucket, first, out)
    assert runtime.uploads > begun + 1
    grads = [t for t in first if t is not None]
    runtime.current_stream, runtime.uploads = 0, 0
    for _ in range(2):
        kernels.grad_stats(grads)
    assert runtime.uploads == 2  # pieces and their owners


def test_upload_copies_values_of_any_kind() -> None:
    host = torch.arange(3, dtype=torch.int32)
    copies = [upload(host, torch.device("cpu")), upload([0.0, 1.0, 2.0], torch.device("cpu"), torch.float32)]
    copies.append(upload(host, torch.device("cpu"), torch.float64))
    host[0] = 9
    assert [c.tolist() for c in copies] == [[0, 1, 2]] * 3
    assert [c.dtype for c in copies] == [torch.int32, torch.float32, torch.float64]


def test_tables_of_forgotten_buckets_are_given_up(shims: dict[str, CudaKernels]) -> None:
    kernels = CudaKernels(ShimRuntime())
    w = cases.world(kernels, lambda t: t, 64, (100,))
    kernels.gather(w.bucket, w.spans(missing=None), w.flat())
    assert len(kernels._layouts) == 1
    del w
    assert not kernels._layouts


@needs_compiler
def test_copies_of_what_a_kernel_cannot_read_outlive_the_launch() -> None:
    """Memory given up before a launch may be handed out again and overwritten before the kernel reads it."""

    class Greedy(ShimRuntime):
        def launch(self, *arguments: Any) -> None:
            taken = [torch.full((n,), float("nan")) for n in (100, 4097, 64) for _ in range(4)]
            super().launch(*arguments)
            del taken

    kernels = CudaKernels(Greedy())
    for name in cases.CASES:
        if "odd" in name:
            assert not compare(kernels, name, 96, (100, 4097, 64)), name


def test_updates_in_place_are_seen_by_autograd(shims: dict[str, CudaKernels]) -> None:
    w = cases.world(shims["forward"], lambda t: t, 64, (100,))
    spans = w.spans(dtypes=cases.DTYPES[:1], missing=None)
    assert spans[0] is not None
    before = spans[0]._version
    w.kernels.apply_adam(w.bucket, spans, w.momentum(), w.flat(positive=True), w.per_param(), w.per_param())
    assert spans[0]._version > before


def test_bad_arguments_are_named(shims: dict[str, CudaKernels]) -> None:
    w = cases.world(shims["forward"], lambda t: t, 64, (100, 7))
    kernels, one = w.kernels, torch.ones(w.blocks)
    with pytest.raises(ValueError, match="spans must have one entry per span, 2, got 1"):
        kernels.gather(w.bucket, [None], w.flat())
    with pytest.raises(ValueError, match="a span of 100 elements"):
        kernels.gather(w.bucket, [None, torch.zeros(3)][::-1], w.flat())
    with pytest.raises(ValueError, match=r"out must be \d+ contiguous elements of torch.float32"):
        kernels.gather(w.bucket, w.spans(), w.flat().double())
    with pytest.raises(ValueError, match="a must be given"):
        kernels.compress(w.bucket, 0, w.blocks, a=None, m=w.flat(), b=None, g=None, e=w.flat(), out=w.output())
    with pytest.raises(ValueError, match="g as spans needs the whole bucket, got blocks 0 to 1"):
        part = Packed.empty(1, 1, 64)
        kernels.compress(w.bucket, 0, 1, a=None, m=None, b=one[:1], g=w.spans(), e=w.flat()[:64], out=part)
    with pytest.raises(ValueError, match=r"e must be \d+ contiguous elements of torch.float32 .* torch.float16"):
        kernels.compress(w.bucket, 0, w.blocks, a=None, m=None, b=None, g=None, e=w.flat().half(), out=w.output())
    with pytest.raises(ValueError, match=r"d must be \d+ contiguous elements of torch.bfloat16"):
        kernels.reduce(w.momentum(), w.bucket.lengths, w.flat().bfloat16(), w.payload(1, w.row_blocks, fill=False), 1.0)
    with pytest.raises(ValueError, match="out must hold"):
        kernels.compress(w.bucket, 0, w.blocks, a=None, m=None, b=None, g=None, e=w.flat(), out=Packed.empty(1, 1, 64))
    with pytest.raises(ValueError, match="out must be one row, got 2"):
        kernels.reduce(w.momentum(), w.bucket.lengths, w.flat(), w.output(), 1.0)


def test_a_device_that_computes_other_bits_is_refused() -> None:
    class Rounding(ShimRuntime):
        """Flushes denormals, as a careless compiler option would."""

        def launch(self, *arguments: Any) -> None:
            torch.set_flush_denormal(True)
            try:
                super().launch(*arguments)
            finally:
                torch.set_flush_denormal(False)

    if compiler() is None or not torch.set_flush_denormal(False):
        pytest.skip("no C++ compiler, or no way to flush denormals here")
    with pytest.raises(KernelsUnavailable, match="do not compute the reference's bits"):
        CudaKernels(Rounding())


@needs_compiler
def test_the_comparison_with_the_reference_does_not_depend_on_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        CudaKernels(ShimRuntime())
    finally:
        torch.set_default_dtype(torch.float32)


# ----- compiling for real devices -------------------------------------------------------------------------------------------------


#: compiled in every run; each architecture takes half a minute, so the others are for the nightly run
EVERY_RUN = (80,)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=() if a in EVERY_RUN else pytest.mark.nightly) for a in compilers.ARCHITECTURES],
)
def test_every_kernel_compiles_without_spills(
    architecture: int, record_property: Callable[[str, object], None]
) -> None:
    """By NVRTC as CuPy does it, else by nvcc; registers are reported with ``--junit-xml`` or ``-s``."""
    found = compilers.nvrtc_for(architecture)
    if found is not None:
        usages, binary = found.compile(architecture, OPTIONS)
        by = found.version
    elif architecture in compilers.nvcc_architectures():
        usages, binary = compilers.compile_with_nvcc(architecture)
        by = "nvcc"
    else:
        pytest.skip(f"no NVRTC (pip install nvidia-cuda-nvrtc-cu12) and no nvcc that supports sm_{architecture}")
    assert {u.kernel for u in usages} == set(kernel_names()) and binary[:4] == b"\x7fELF"
    print(
        f"\nsm_{architecture} by {by}: "
        + ", ".join(f"{u.kernel.removeprefix('onebit_')} {u.registers}" for u in usages)
    )
    for usage in usages:
        record_property(f"registers of {usage.kernel} on sm_{architecture}", usage.registers)
        assert usage.stack == usage.spill_stores == usage.spill_loads == 0, f"{usage} spills"
        # 256 threads must fit a multiprocessor twice, so that one thread block's barriers hide behind another's loads
        assert usage.registers <= 128, f"{usage} needs too many registers"


@pytest.mark.nightly
def test_nvcc_accepts_the_file_as_well() -> None:
    """NVRTC and nvcc have different front ends; warnings are errors."""
    known = [a for a in compilers.ARCHITECTURES if a in compilers.nvcc_architectures()]
    if not known:
        pytest.skip("no nvcc on the path")
    usages, _ = compilers.compile_with_nvcc(known[-1])
    assert {u.kernel for u in usages} == set(kernel_names()) and not any(u.stack for u in usages)


def test_the_build_forbids_whatever_changes_bits() -> None:
    assert {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"} <= set(OPTIONS)
    assert "#include" not in SOURCE.read_text(), "NVRTC compiles the file as it stands"


# ----- CuPy missing, foreign or broken --------------------------------------------------------------------------------------------


class FakeCupy(types.ModuleType):
    """Of CuPy as much as is looked at."""

    def __init__(self, runtime_version: int = 13000) -> None:
        super().__init__("cupy")
        self.__version__ = "14.0.0"
        self.calls: list[tuple[Any, ...]] = []
        self.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(runtimeGetVersion=lambda: runtime_version),
            compiler=types.SimpleNamespace(compile_using_nvrtc=self._compile),
            function=types.SimpleNamespace(Module=self._module),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        )

    def _compile(self, source: str, options: tuple[str, ...], arch: None, filename: str) -> tuple[bytes, None]:
        assert source == SOURCE.read_text() and options == OPTIONS and filename == "onebit.cu"
        self.calls.append(("compile",))
        return b"machine code", None

    def _module(self) -> Any:
        def load(binary: bytes) -> None:
            assert binary == b"machine code"
            self.calls.append(("load",))

        def get_function(name: str) -> Callable[..., None]:
            def function(grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any) -> None:
                self.calls.append((name, grid, block, arguments, shared_mem, stream.ptr))

            return function

        return types.SimpleNamespace(load=load, get_function=get_function)


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine whose torch is built for CUDA 13; what the registry remembers is forgotten before and after."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for cached in (registry._load, registry._announce_fallback):
        cached.cache_clear()
    yield monkeypatch
    for cached in (registry._load, registry._announce_fallback):
        cached.cache_clear()


def test_without_cupy_the_reference_runs_and_one_warning_names_the_extra(
    cuda_machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_machine.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING, "lightning_onebit"):
        assert [get_backend("auto", "cuda").name for _ in range(3)] == ["reference"] * 3
    (record,) = caplog.records
    assert "pip install 'lightning-onebit[cuda13]'" in record.getMessage()
    with pytest.raises(KernelsUnavailable, match=r"lightning-onebit\[cuda13\]"):
        get_backend("cuda", "cuda")


@pytest.mark.parametrize(
    ("torch_cuda", "cupy_runtime", "extra"), [("13.0", 12080, "cuda13"), ("12.6", 13000, "cuda12")]
)
def test_cupy_for_another_cuda_is_told_apart(
    cuda_machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torch_cuda: str, cupy_runtime: int, extra: str
) -> None:
    cuda_machine.setattr(torch.version, "cuda", torch_cuda)
    cuda_machine.setitem(sys.modules, "cupy", FakeCupy(cupy_runtime))
    major = cupy_runtime // 1000
    remedy = rf"pip uninstall cupy-cuda{major}x, then pip install 'lightning-onebit\[{extra}\]'"
    expected = rf"CUDA {major}, torch for CUDA {torch_cuda}: {remedy}"
    with pytest.raises(KernelsUnavailable, match=expected):
        get_backend("cuda", "cuda")
    with caplog.at_level(logging.WARNING, "lightning_onebit"):
        assert get_backend("auto", "cuda").name == "reference"
    assert extra in caplog.text


@pytest.mark.parametrize(
    ("built_for", "message"),
    [(None, "not built for CUDA"), ("11.8", "built for CUDA 11.8; the kernels support 12 and 13")],
)
def test_torch_without_a_supported_cuda_is_told(
    cuda_machine: pytest.MonkeyPatch, built_for: str | None, message: str
) -> None:
    cuda_machine.setattr(torch.version, "cuda", built_for)
    cuda_machine.setitem(sys.modules, "cupy", FakeCupy())
    with pytest.raises(KernelsUnavailable, match=message):
        get_backend("cuda", "cuda")


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("`np.float_` was removed in the NumPy 2.0 release"),
        ImportError("libcublas.so.13: no"),
        OSError("no"),
    ],
)
def test_a_cupy_that_breaks_when_it_is_imported_is_no_crash(
    cuda_machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "cupy":
                raise error

    cuda_machine.delitem(sys.modules, "cupy", raising=False)
    cuda_machine.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with caplog.at_level(logging.WARNING, "lightning_onebit"):
        assert get_backend("auto", "cuda").name == "reference"
    assert "CuPy cannot be imported" in caplog.text and str(error) in caplog.text


def test_a_cupy_that_cannot_compile_is_no_crash(cuda_machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeCupy()

    def broken(*_: Any) -> Any:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    fake.cuda.compiler.compile_using_nvrtc = broken
    _pretend_a_device(cuda_machine, fake, tmp_path)
    with pytest.raises(KernelsUnavailable, match=r"cannot compile the kernels for Fake GPU .*libnvrtc"):
        get_backend("cuda", "cuda")
    assert get_backend("auto", "cuda").name == "reference"


def _pretend_a_device(patch: pytest.MonkeyPatch, fake: FakeCupy, cache: Path, stream: int = 77) -> None:
    patch.setitem(sys.modules, "cupy", fake)
    patch.setenv("LIGHTNING_ONEBIT_CACHE", str(cache))
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "init": lambda: None,
        "get_device_name": lambda index: "Fake GPU",
        "get_device_capability": lambda index: (9, 0) if index < 2 else (8, 0),
        "device": lambda index: contextlib.nullcontext(),
        "current_stream": lambda index: types.SimpleNamespace(cuda_stream=stream + index),
    }.items():
        patch.setattr(torch.cuda, name, value)


def test_kernels_are_compiled_once_per_kind_of_device_and_launched_on_torchs_stream(
    cuda_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeCupy()
    _pretend_a_device(cuda_machine, fake, tmp_path)
    runtime = cuda.CupyRuntime()
    for index in (0, 0, 1, 1, 2):
        runtime.launch("onebit_unpack", torch.device("cuda", index), 5, (64, 2), 128, (1, np.float32(2)))
    launched = ("onebit_unpack", (5,), (64, 2), (1, np.float32(2)), 128)
    compiled, loaded = ("compile",), ("load",)
    first = [compiled, loaded, *[(*launched, 77)] * 2]
    assert fake.calls == [*first, loaded, *[(*launched, 78)] * 2, compiled, loaded, (*launched, 79)]
    fake.calls.clear()
    cuda.CupyRuntime()
    assert fake.calls == [loaded], "another process finds the binary"
    binaries = sorted(tmp_path.glob("*.cubin"))
    assert len(binaries) == 2, "one file for each kind of device"
    assert len(list(tmp_path.iterdir())) == 4, "with its record each, and no temporary one"
    binaries[0].write_bytes(bytes(binaries[0].stat().st_size))
    binaries[1].chmod(0o666)
    fake.calls.clear()
    runtime = cuda.CupyRuntime()
    runtime.launch("onebit_unpack", torch.device("cuda", 2), 5, (64, 2), 128, (1, np.float32(2)))
    assert fake.calls.count(compiled) == 2, "zeroed, or open to others: compiled again"
    cuda_machine.setattr(cuda, "cache_directory", lambda: tmp_path / "gone")
    fake.calls.clear()
    cuda.CupyRuntime()
    assert fake.calls == [compiled, loaded], "without a place to keep it, it is compiled again"


# ----- the benchmark ----------------------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_where_there_is_no_gpu_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its program, not its numbers: every part runs and everything is written."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu_kernels = __import__("gpu_kernels")
    gpu_kernels.main(["--dry-run", "--elements", "100000", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "gpu_kernels.json").read_text())
    assert set(gpu_kernels.TARGETS) <= set(report["results"]) and (tmp_path / "gpu_kernels.png").stat().st_size > 1000
    measured = {row["name"].split()[0] for row in report["rows"]}
    operations = {n for n in (*vars(CompiledKernels), *vars(CudaKernels)) if not n.startswith("_") and n != "name"}
    assert operations <= measured, "every operation of the backend is measured"
    assert all(row["nbytes"] > 0 and row["milliseconds"] > 0 for row in report["rows"])
    assert "fused AdamW" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            gpu_kernels.main(["--out", str(tmp_path)])
