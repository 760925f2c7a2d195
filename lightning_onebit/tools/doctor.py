"""What is installed here, which kernels will run and why, and whether two processes train alike: ``lightning-onebit doctor``."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_onebit import __version__
from lightning_onebit._text import fill
from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.comm import disconnect
from lightning_onebit.engine.options import LONGEST_WAIT, ExchangeOptions, check_number
from lightning_onebit.kernels import KernelsUnavailable, get_backend
from lightning_onebit.strategy import trees
from lightning_onebit.strategy.registry import available_strategies
from lightning_onebit.tools.console import Outcome

_LOCATION = Path(__file__).parents[1]
_PACKAGES = ("lightning", "pytorch-lightning", "torch", "torchmetrics", "numpy", "matplotlib", "jsonargparse")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
#: steps of the self-test: dense ones, then compressed ones
_DENSE_STEPS, _STEPS = 2, 6


def versions() -> dict[str, str | None]:
    """Version of everything that matters, None where it is not there."""
    found: dict[str, str | None] = {"lightning-onebit": __version__, "python": platform.python_version()}
    found |= {name: _version(name) for name in _PACKAGES}
    found["cupy"] = next((f"{version} ({name})" for name in _CUPY if (version := _version(name))), None)
    found["cuda"] = torch.version.cuda
    there = torch.version.cuda and dist.is_available() and dist.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if there else None
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels() -> dict[str, dict[str, str]]:
    """For each kind of device what ``kernels="auto"`` takes, and why."""
    found = {"cpu": _kernels("cpu", "compiled C++ on this machine")}
    if torch.cuda.is_available():
        found["cuda"] = _kernels("cuda", f"CuPy on {torch.cuda.get_device_name(0)}")
    else:
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        found["cuda"] = {"backend": "none", "why": why}
    return found


def _kernels(device: str, why: str) -> dict[str, str]:
    try:
        get_backend(device, device)
    except KernelsUnavailable as error:
        return {"backend": "reference", "why": f"plain torch, slower with the same bits: {error}"}
    return {"backend": device, "why": why}


def namespaces() -> dict[str, list[str]]:
    """For each Lightning tree that is installed, the strategy names of this package that its registry lacks."""
    missing = {}
    for tree in trees.installed_trees():
        trees.import_tree(tree)
        registry = importlib.import_module(f"{trees.PACKAGES[tree]}.strategies").StrategyRegistry
        missing[trees.PACKAGES[tree]] = [name for name in available_strategies() if name not in registry]
    return missing


def self_test(device: str = "cpu", timeout: float = 120.0) -> dict[str, Any]:
    """Trains a small model with 1-bit Adam on two processes of this machine and compares their weights.

    Args:
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, needs two GPUs).
        timeout: seconds for the whole test.

    Returns:
        ``passed``, ``backend``, ``seconds``, and ``bytes_ratio`` of a compressed step or ``error``.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="onebit-doctor-") as folder:
        logs = [Path(folder, f"log-{rank}") for rank in range(2)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                running.append(_start(log, folder, str(rank), device, str(timeout)))
            error = _watch(running, started + timeout)
        finally:
            for process in running:
                process.kill()
                process.wait()
        facts = {"backend": backend, "seconds": round(time.perf_counter() - started, 2)}
        if error is not None:
            tail = "\n".join(log.read_text()[-1500:] for log in logs)
            return {"passed": False, **facts, "error": f"{error}\n{tail}".strip()}
        answers = [json.loads(Path(folder, f"answer-{rank}").read_text()) for rank in range(2)]
    if answers[0]["weights"] != answers[1]["weights"]:
        return {"passed": False, **facts, "error": "the two processes ended with different weights"}
    return {"passed": True, **facts, "bytes_ratio": answers[0]["ratio"]}


def _start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts one process of the self-test; what it says goes into ``log``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # the package may be a checkout that is on sys.path by PYTHONPATH or by the working folder only
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_LOCATION.parent), environment.get("PYTHONPATH")]))
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name, which may hang
    command = [sys.executable, "-m", __name__, *arguments]
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def _watch(running: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Waits for all; says what went wrong, as soon as it does."""
    while time.perf_counter() < deadline:
        codes = [process.poll() for process in running]
        if any(code not in (None, 0) for code in codes):
            return f"processes ended with exit codes {codes}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    return "timed out: the processes could not talk to each other"


def _work(folder: Path, rank: int, device_type: str, timeout: float) -> None:
    """One process of the self-test."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)
    optimizer = OnebitAdam(
        model.parameters(), lr=1e-2, freeze_step=_DENSE_STEPS, exchange=ExchangeOptions(timeout=timeout)
    )
    data = torch.Generator().manual_seed(1 + rank)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=data).to(device)).square().mean().backward()
        optimizer.step()
    ledger = optimizer.ledger
    if (ledger.dense_steps, ledger.compressed_steps) != (_DENSE_STEPS, _STEPS - _DENSE_STEPS) or ledger.last is None:
        raise RuntimeError(f"{ledger.dense_steps} dense and {ledger.compressed_steps} compressed steps were made")
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    if not bool(torch.isfinite(weights).all()):
        raise RuntimeError("training made non-finite weights")
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    Path(folder, f"answer-{rank}").write_text(json.dumps({"weights": digest, "ratio": round(ledger.last.ratio, 1)}))
    optimizer.release_communication()  # or it keeps the group, and its threads, beyond this
    disconnect()


def examine(*, test: bool = True, timeout: float = 120.0) -> dict[str, Any]:
    """Everything that the command reports.

    Args:
        test: whether to run the self-test (on CPU, and with NCCL where there are two GPUs).
        timeout: seconds for each self-test.

    Returns:
        ``location`` of the package that is imported, ``versions``, ``kernels``, ``namespaces`` (names missing by tree), ``devices``,
        ``self_tests`` and ``problems``.
    """
    facts: dict[str, Any] = {
        "location": str(_LOCATION),
        "versions": versions(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": kernels(),
        "namespaces": namespaces(),
        "self_tests": {},
    }
    if test:
        kinds = ["cpu"] + (["cuda"] if len(facts["devices"]) > 1 and dist.is_nccl_available() else [])
        facts["self_tests"] = {kind: self_test(kind, timeout) for kind in kinds}
    facts["problems"] = _problems(facts)
    return facts


def _problems(facts: dict[str, Any]) -> list[str]:
    found = []
    if not facts["namespaces"]:
        found.append(
            "no Lightning is installed: the optimizers work, strategies and callbacks do not; pip install lightning"
        )
    for tree, missing in facts["namespaces"].items():
        if missing:
            found.append(f"{tree} does not know {', '.join(missing)}")
    if facts["devices"] and facts["kernels"]["cuda"]["backend"] != "cuda":
        found.append("there is a GPU, but the CUDA kernels cannot be used; see kernels")
    for kind, result in facts["self_tests"].items():
        if not result["passed"]:
            found.append(f"the self-test on {kind} failed: {result['error']}")
    return found


def describe(facts: dict[str, Any]) -> str:
    """``examine()`` as text."""
    lines = [f"Package   {facts['location']}", "Versions"]
    lines += [f"  {name:<20}{version or '-'}" for name, version in facts["versions"].items()]
    lines += ["Devices", *(f"  {name}" for name in facts["devices"] or ["no GPU"])]
    lines.append("Kernels that kernels='auto' takes")
    lines += [f"  {kind:<6}{found['backend']:<12}{found['why']}" for kind, found in facts["kernels"].items()]
    lines.append("Strategies")
    lines += [
        f"  {tree:<20}{'all registered' if not missing else 'missing: ' + ', '.join(missing)}"
        for tree, missing in facts["namespaces"].items()
    ] or ["  no Lightning installed"]
    if facts["self_tests"]:
        lines.append("Self-test: two processes train with 1-bit Adam")
    for kind, result in facts["self_tests"].items():
        passed = f"passed, equal weights, {result.get('bytes_ratio')}x fewer bytes in a compressed step"
        outcome = passed if result["passed"] else "FAILED"
        lines.append(f"  {kind} ({result['backend']}): {outcome}, {result['seconds']} s")
    lines += ["Problems", *(f"  {problem}" for problem in facts["problems"])] if facts["problems"] else ["No problems."]
    return fill("\n".join(lines), " " * 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--no-test", action="store_true", help="leave the self-test out")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the self-test (%(default)s)")


def run(options: argparse.Namespace) -> Outcome:
    """The command; exit status 1 if there are problems."""
    check_number("--timeout", options.timeout, above=0, most=LONGEST_WAIT)
    facts = examine(test=not options.no_test, timeout=options.timeout)
    return Outcome(int(bool(facts["problems"])), describe(facts), facts)


if __name__ == "__main__":  # a process of the self-test
    _work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
