"""What only a GPU can show: ``pytest -m gpu`` on a machine that has one; skipped with a reason elsewhere.

The same cases as in test_kernels_cuda.py on the device itself, its streams, graphs and memory checkers, and training over NCCL and
over gloo through pinned memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_shim import cases, training
from harness import counting, run_ranks
from torch import Tensor

from lightning_onebit import ExchangeOptions, OnebitAdam
from lightning_onebit import kernels as registry
from lightning_onebit.comm import ByteLedger, Topology, Transport, plan_buckets
from lightning_onebit.comm.staging import CudaStager
from lightning_onebit.kernels import KernelsUnavailable, Packed, get_backend
from lightning_onebit.kernels.reference import ReferenceKernels
from lightning_onebit.kernels.transfer import Download

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def kernels() -> Any:
    try:
        return get_backend("cuda", DEVICE)
    except KernelsUnavailable as error:
        if torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None:
            pytest.fail(f"CuPy and a device are there, and yet: {error}")
        pytest.skip(str(error))


def put(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def busy(milliseconds: int = 200) -> None:
    """Keeps the current stream busy, so that whatever is queued next has not run when the host goes on."""
    torch.cuda._sleep(int(milliseconds * 1e6))  # cycles; the clock is between 1 and 2 GHz


def test_a_number_on_its_way_to_the_host_is_not_waited_for() -> None:
    value = torch.full((), 3.0, device=DEVICE)
    torch.cuda.synchronize()
    download = Download(value)
    value.add_(1.0)  # behind the copy, in the order of the stream
    busy()
    end = torch.cuda.Event()
    end.record()
    assert download.read() == 3.0
    assert not end.query(), "reading waited for what was queued later"


# ----- kernels ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(cases.CASES))
def test_kernel_reproduces_the_reference_bit_for_bit(kernels: Any, name: str) -> None:
    for block_size in cases.BLOCK_SIZES:
        for sizes in cases.SIZES:
            theirs = cases.CASES[name](cases.world(ReferenceKernels(), lambda t: t, block_size, sizes))
            ours = cases.CASES[name](cases.world(kernels, put, block_size, sizes))
            found = cases.differences(ours, theirs)
            assert not found, f"block_size {block_size}, sizes {sizes}: {found}"


@pytest.mark.parametrize(
    "name", ["compress packed flat", "reduce 3", "lamb_update packed", "compress packed spans, bf16 residual"]
)
def test_blocks_with_more_lanes_than_shared_memory_holds(kernels: Any, name: str) -> None:
    theirs = cases.CASES[name](cases.world(ReferenceKernels(), lambda t: t, 2**19, (2**19 + 5,)))
    ours = cases.CASES[name](cases.world(kernels, put, 2**19, (2**19 + 5,)))
    assert not cases.differences(ours, theirs)


def test_residual_identities_hold_exactly_on_many_blocks(kernels: Any) -> None:
    """``e = fl(y - C(y))`` and ``d = fl(z - C(z))`` on a bucket that fills the device."""
    block_size, rows, elements = 2048, 4, 1 << 24
    bucket = plan_buckets(
        [elements - 77], block_size=block_size, world_size=rows, bucket_elements=2**40, device=torch.device(DEVICE)
    ).buckets[0]
    draw = torch.Generator(DEVICE).manual_seed(1)
    y = torch.randn(bucket.elements, generator=draw, device=DEVICE)
    y[elements - 77 :] = 0.0
    e, sent = y.clone(), Packed.empty(rows, bucket.blocks // rows, block_size, device=DEVICE)
    kernels.compress(bucket, 0, bucket.blocks, a=None, m=None, b=None, g=None, e=e, out=sent)
    decoded = torch.empty_like(y)
    kernels.unpack(sent, bucket.lengths, decoded)
    assert torch.equal(e.view(torch.int32), (y - decoded).view(torch.int32))
    # server: the rows as if they came from so many workers
    count = bucket.blocks // rows
    lengths, d = bucket.lengths[:count], torch.randn(count * block_size, generator=draw, device=DEVICE)
    before, reply = d.clone(), Packed.empty(1, count, block_size, device=DEVICE)
    kernels.reduce(sent, lengths, d, reply, 1.0 / rows)
    z, out = decoded.view(rows, -1), torch.empty_like(d)
    total = z[0]
    for row in range(1, rows):
        total = total + z[row]
    kernels.unpack(reply, lengths, out)
    expected = total * (1.0 / rows) + before - out
    whole = slice((count - 1) * block_size)  # the last row ends in padding, which was decoded as 0 above
    assert torch.equal(d[whole].view(torch.int32), expected[whole].view(torch.int32))


def test_grad_stats_on_the_device(kernels: Any) -> None:
    tensors = [torch.randn(n, device=DEVICE).to(t) for n in (1, 7, 1_000_003) for t in cases.DTYPES]
    result = kernels.grad_stats(tensors)
    assert result.device.type == DEVICE
    squares, bad = result.tolist()
    assert bad == 0 and squares == pytest.approx(sum(float(t.double().square().sum()) for t in tensors), rel=1e-12)
    assert torch.equal(kernels.grad_stats(tensors), result), "the same bits every time"
    tensors[4][3] = float("nan")
    assert kernels.grad_stats(tensors)[1].item() == 1


def test_no_kernel_waits_for_the_device(kernels: Any) -> None:
    """The stream is kept busy; had a call waited for it, its work would be done when the call returns."""
    block_size = 2048
    bucket = plan_buckets(
        [100_000, 333], block_size=block_size, world_size=1, bucket_elements=2**40, device=torch.device(DEVICE)
    ).buckets[0]
    flat = torch.randn(bucket.elements, device=DEVICE)
    one, packed = torch.ones(bucket.blocks, device=DEVICE), Packed.empty(1, bucket.blocks, block_size, device=DEVICE)
    out = Packed.empty(1, bucket.blocks, block_size, device=DEVICE)

    def calls() -> None:
        kernels._layouts.clear()  # all tables must be uploaded
        kernels._pieces.clear()
        spans = [torch.ones(s.numel, device=DEVICE) for s in bucket.spans]
        kernels.grad_stats(spans)
        kernels.compress(bucket, 0, bucket.blocks, a=one, m=packed, b=one, g=spans, e=flat, out=out)
        kernels.reduce(out, bucket.lengths, flat, packed, 1.0)
        kernels.apply_adam(bucket, spans, packed, flat, one, one)
        kernels.gather(bucket, spans, flat)
        kernels.unpack(packed, bucket.lengths, flat)

    calls()  # device and pinned memory are there from now on
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(500)
        calls()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "a call waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_a_step_waits_for_the_device_as_often_with_many_buckets_as_with_one(kernels: Any) -> None:
    """What a step must know on the host costs a wait; what it does per bucket does not."""

    def waits(bucket_mb: float) -> int:
        params = [torch.nn.Parameter(torch.randn(70_000, device=DEVICE)) for _ in range(8)]
        optimizer = OnebitAdam(
            params, freeze_step=1, exchange=ExchangeOptions(_alone=True, kernels="cuda", bucket_mb=bucket_mb)
        )
        count = 0
        for step in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            count = sum("synchronizing" in str(w.message) for w in caught) if step == 3 else 0
        assert optimizer.ledger.compressed_steps == 3
        return count

    one, many = waits(64.0), waits(0.3)
    assert one == many


def test_buckets_are_larger_by_default_than_on_the_cpu(kernels: Any) -> None:
    numel = 40 * 2**18  # 40 MB

    def buckets(**exchange: Any) -> int:
        params = [torch.nn.Parameter(torch.zeros(numel, device=DEVICE))]
        params[0].grad = torch.ones_like(params[0])
        optimizer = OnebitAdam(params, freeze_step=1, exchange=ExchangeOptions(**exchange))
        optimizer.step()
        assert optimizer.bucket_mb == exchange.get("bucket_mb", 16.0 if "overlap" in exchange else 64.0)
        return len(optimizer._engine.kept.layout.buckets)

    assert (buckets(), buckets(overlap="backward"), buckets(bucket_mb=20.0)) == (1, 3, 2)


def test_kernels_run_on_torchs_current_stream(kernels: Any) -> None:
    import cupy

    side, theirs = torch.cuda.Stream(), cupy.cuda.get_current_stream()
    w = cases.world(kernels, put, 2048, (5000,))
    spans, out = w.spans(dtypes=cases.DTYPES[:1], missing=None), w.flat()
    assert spans[0] is not None
    expected = torch.full((5000,), 3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy()
        spans[0].fill_(3.0)  # after the wait, on the side stream: only a kernel on the same stream sees it
        kernels.gather(w.bucket, spans, out)
        copy = out.clone()
    side.synchronize()
    assert torch.equal(copy[:5000].cpu(), expected)
    assert cupy.cuda.get_current_stream() == theirs and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_graph_of_the_users_is_not_disturbed(kernels: Any) -> None:
    """Forward and backward in a CUDA graph, the compressed step outside: as without a graph."""

    def train(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10)).to(DEVICE)
        optimizer = OnebitAdam(
            model.parameters(), lr=0.01, freeze_step=3, exchange=ExchangeOptions(_alone=True, kernels="cuda")
        )
        x = torch.zeros(32, 64, device=DEVICE)

        def backward() -> None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
            model(x).square().mean().backward()

        graph = torch.cuda.CUDAGraph()
        if graphed:
            warm = torch.cuda.Stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                backward()
            torch.cuda.current_stream().wait_stream(warm)
            with torch.cuda.graph(graph):
                backward()
        for step in range(8):
            x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(step)))
            if graphed:
                graph.replay()
            else:
                backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(kernels: Any, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the path")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "42", sys.executable, str(ROOT / "tests/cuda_shim/exercise.py")],
        capture_output=True, text=True, timeout=550, env=environment,
    )  # fmt: skip
    said = (done.stdout + done.stderr)[-3000:]
    if "not supported" in said and "every kernel has run" not in said:
        pytest.skip(f"compute-sanitizer cannot watch this device: {said[-300:]}")
    assert (
        done.returncode == 0 and "every kernel has run" in done.stdout and "0 errors" in said
    ) or "0 hazards" in said, said


# ----- optimizers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), training.runs(*training.KINDS))
def test_optimizers_train_alike_on_these_kernels_and_on_the_reference(kernels: Any, name: str, kind: str) -> None:
    """From the gradients to the parameters, on the device, in every phase."""
    ours = training.run(name, "cuda", DEVICE, None, kind)
    theirs = training.run(name, "reference", DEVICE, None, kind)
    assert not cases.differences(ours, theirs)


def test_without_cupy_a_cuda_machine_trains_on_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cached in (registry._load, registry._announce_fallback):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    try:
        assert get_backend("auto", DEVICE).name == "reference"
        training.run("onebit_adam", "auto", DEVICE, None)
        (warning,) = [r for r in caplog.records if "cuda kernels cannot be used" in r.getMessage()]
        assert "lightning-onebit[cuda1" in warning.getMessage()
    finally:
        for cached in (registry._load, registry._announce_fallback):
            cached.cache_clear()


# ----- staging ------------------------------------------------------------------------------------------------------------------


def test_staging_is_ordered_by_events_and_waits_for_nothing() -> None:
    stager = CudaStager()
    assert stager.handles(torch.zeros(1, device=DEVICE)) and not stager.handles(torch.zeros(1))
    source = torch.zeros(1 << 20, device=DEVICE)
    stager.to_host(source).wait()  # streams and pinned memory exist now
    torch.cuda.synchronize()
    busy()
    source.fill_(5.0)
    copy = stager.to_host(source)
    assert copy.host.is_pinned() and not copy.ready(), "the copy waited for the device"
    copy.wait()
    assert copy.ready() and bool((copy.host == 5.0).all())
    back = torch.zeros_like(source)
    host = stager.host_like(back).fill_(7.0)
    stager.to_device(host, back)
    del host  # the allocator keeps it until the copy is done
    for _ in range(4):
        stager.host_like(back).fill_(-1.0)
    assert bool((back == 7.0).all())


def _text(device: str, rank: int, world: int, steps: int) -> dict[str, Any]:
    """Trains a small byte-level GPT of examples/ on the standard library's text; the losses of this rank and its weights."""
    sys.path.insert(0, str(ROOT / "examples"))
    from data import load_corpus
    from text_gpt import TextGPT

    torch.manual_seed(0)
    model = TextGPT(layers=2, width=64, heads=2).to(device)
    text, _ = load_corpus(1 << 18, 1 << 10)
    optimizer = OnebitAdam(model.parameters(), lr=2e-3, weight_decay=0.01, freeze_step=steps // 4)
    draw = torch.Generator().manual_seed(10 + rank)
    losses = []
    with counting() as counted:
        for _ in range(steps):
            starts = torch.randint(0, len(text) - 65, (8,), generator=draw)
            windows = torch.stack([text[s : s + 65] for s in starts.tolist()]).long().to(device)
            optimizer.zero_grad()
            optimizer.begin_backward()
            loss = model.loss(windows)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert optimizer.ledger.compressed_steps == steps - steps // 4
    stager = optimizer._engine.link.transport.stager if optimizer._engine.link.transport is not None else None
    return {
        "losses": losses,
        "weights": [p.detach().cpu() for p in model.parameters()],
        "kernels": optimizer._engine.kept.kernels.name,
        "exchanges": len(counted.of("all_to_all")),
        "stager": type(stager).__name__,
    }


def _text_rank(rank: int, world: int, device: str, steps: int) -> dict[str, Any]:
    return _text(device, rank, world, steps)


def test_two_ranks_on_one_gpu_over_gloo_train_as_on_the_cpu(kernels: Any) -> None:
    steps = 80
    gpu = run_ranks(_text_rank, 2, DEVICE, steps, timeout=280)
    cpu = run_ranks(_text_rank, 2, "cpu", steps, timeout=280)
    assert gpu[0]["kernels"] == "cuda" and gpu[0]["stager"] == "CudaStager"
    assert gpu[0]["exchanges"] == cpu[0]["exchanges"] > 0
    assert all(torch.equal(a, b) for a, b in zip(gpu[0]["weights"], gpu[1]["weights"], strict=True)), "replicas differ"

    def end(runs: Sequence[dict[str, Any]]) -> float:
        return sum(sum(run["losses"][-20:]) for run in runs) / (20 * len(runs))

    assert gpu[0]["losses"][0] == pytest.approx(cpu[0]["losses"][0], rel=1e-3)
    assert end(gpu) == pytest.approx(end(cpu), rel=0.02)
    assert end(gpu) < 0.75 * gpu[0]["losses"][0], "it did not learn"


# ----- NCCL ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nccl(directory: Path) -> Iterator[dist.ProcessGroup]:
    """A world of one rank and, as the strategy does it, a communicator of its own."""
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", list(training.OPTIMIZERS))
def test_nccl_runs_the_real_collectives_of_one_rank(kernels: Any, tmp_path: Path, name: str) -> None:
    """Compressed in a world of one: all_to_all and all_gather on uint8, and the same bits as without a group."""
    alone = training.run(name, "cuda", DEVICE, None)
    with nccl(tmp_path) as group, counting() as counted:
        ours = training.run(name, "cuda", DEVICE, group)
        assert counted.of("all_to_all") and counted.of("all_gather")
        assert not cases.differences(ours, alone)


def test_nccl_orders_streams_without_blocking_the_host(tmp_path: Path) -> None:
    with nccl(tmp_path) as group:
        _ordered_by_streams(group)


def _ordered_by_streams(nccl: dist.ProcessGroup) -> None:
    transport = Transport(Topology.create(nccl), ByteLedger())
    inp = torch.zeros(1, 1 << 20, dtype=torch.uint8, device=DEVICE)
    out = torch.zeros_like(inp)
    transport.all_to_all(out, inp, nccl, what="first", link="inter").wait()  # the communicator exists now
    torch.cuda.synchronize()
    busy()
    inp.fill_(9)
    transport.all_to_all(out, inp, nccl, what="exchange", link="inter").wait()
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "wait() blocked the host"
    assert bool((out == 9).all())
    assert transport.device(torch.device(DEVICE)).type == DEVICE  # control tensors of a group without a host backend


# ----- Lightning ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_trainer_compresses_on_a_gpu(kernels: Any, backend: str, precision: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from text_gpt import TextData, TextGPT, pl

    import lightning_onebit as ob

    strategy = ob.OnebitStrategy(process_group_backend=backend, freeze_step=4, exchange=ExchangeOptions(_alone=True))
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_steps=12, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(TextGPT(layers=1, width=64, heads=2), TextData(train_bytes=1 << 17, validation_windows=16))
    (optimizer,) = strategy.onebit_optimizers
    assert optimizer._engine.kept.kernels.name == "cuda" and optimizer.ledger.compressed_steps >= 6
    assert torch.isfinite(torch.tensor(float(trainer.callback_metrics["train_loss"])))
