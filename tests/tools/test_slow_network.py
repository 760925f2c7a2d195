"""The benchmark's networks are taken down however a run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from _network import SlowNetwork  # noqa: E402

from lightning_onebit.engine.sharded import OLDEST_TORCH  # noqa: E402

# of this process: the benchmarks' own may be up, and another worker of the test run may have one
PREFIX = f"onebit-test{os.getpid()}"
TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
REASON = SlowNetwork.requirement()

PROGRAM = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and its children with it
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from _network import SlowNetwork

folder, during_start = sys.argv[1], int(sys.argv[2])
hosts = []


class Host(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if folder in command:
            hosts.append(self)
            if during_start:
                signal.raise_signal(during_start)


subprocess.Popen = Host
try:
    with SlowNetwork(2, 100, prefix={PREFIX!r}) as network:
        print("up", flush=True)
        network.launch([sys.executable, "-c", "import time; time.sleep(60)", folder], {{}}, 60, Path(folder))
finally:
    print(len(hosts), "started,", sum(host.returncode is not None for host in hosts), "ended", flush=True)
"""


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def commands(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has just ended
        return b""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("starting", [False, True], ids=["", "while a host is being started"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_network_and_no_hosts(
    number: signal.Signals, starting: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(int(number) if starting else 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "up":
            pytest.skip(f"this machine does not let us make namespaces: {process.communicate()[1][-300:]}")
        if not starting:
            assert len(namespaces()) == 3
            process.send_signal(number)
        try:
            told = process.communicate(timeout=30)[0]
        finally:
            process.kill()
    started, ended = re.findall(r"(\d+) started, (\d+) ended", told)[0]
    assert started == ended and (not starting or started == "1")
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert namespaces() == []
    assert not any(str(tmp_path).encode() in commands(p) for p in Path("/proc").glob("[0-9]*/cmdline"))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_benchmark_measures_steps_cycles_and_the_exchange_against_its_floor(tmp_path: Path) -> None:
    methods = ["ddp", "onebit", "zero_one4"]
    options = (
        f"--hosts 2 --bandwidth 1000 --steps 8 --width 64 --layers 1 --name small --prefix {PREFIX} --out {tmp_path}"
    )
    command = [sys.executable, str(BENCHMARKS / "slow_network.py"), *options.split(), "--methods", *methods]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"this machine does not let us make namespaces: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "small.json").read_text())["results"]
    assert {name: len(values) for name, values in result["all_step_seconds"].items()} == {
        "ddp": 8,
        "onebit": 8,
        "zero_one4": 2,  # cycles of four steps
    }
    sent = {name: facts["bytes_sent"] for name, facts in result["facts"].items() if facts}
    assert sent["zero_one4"] == sent["onebit"] / 4
    facts, floor = result["facts"]["onebit"], result["floor"]
    assert floor["wire_seconds"] == pytest.approx(sent["onebit"] / 125e6)
    assert floor["floor_seconds"] == pytest.approx(floor["wire_seconds"] + facts["local_seconds"])
    assert floor["exchange_over_floor"] == pytest.approx(facts["exchange_seconds"] / floor["floor_seconds"])
    assert f"{floor['exchange_over_floor']:.2f}x of" in done.stdout


@pytest.mark.skipif(REASON is not None or TORCH < OLDEST_TORCH, reason=REASON or "FSDP2 on CPUs needs a newer torch")
def test_ranks_of_a_host_share_its_loopback_and_a_sharded_step_sends_its_bits_alone(tmp_path: Path) -> None:
    methods = ["none", "local", "hsdp", "onebit"]
    options = f"--steps 2 --width 64 --layers 1 --name small --prefix {PREFIX} --out {tmp_path}"
    command = [sys.executable, str(BENCHMARKS / "sharded.py"), *options.split(), "--methods", *methods]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"this machine does not let us make namespaces: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "small.json").read_text())["results"]
    crossed = {name: facts["card_bytes"] for name, facts in result["facts"].items()}
    dense = 4 * result["elements"]  # of a host: two halves of the model, 2 (n-1)/n = 1 of each
    assert dense < crossed["hsdp"] < 1.3 * dense
    assert max(crossed["none"], crossed["local"]) < 0.1 * dense, "FSDP2's gathers stay within a host"
    counted = 2 * result["facts"]["onebit"]["bytes_sent"]
    assert counted < dense / 20 and counted < crossed["onebit"] < 0.2 * dense
    floor = result["floor"]
    assert floor["wire_seconds"] == pytest.approx(counted / 125e6)
    assert floor["floor_seconds"] == pytest.approx(floor["wire_seconds"] + result["step_seconds"]["local"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to compute on")
@pytest.mark.parametrize(
    ("options", "words"),
    [((), "--device cuda: torch sees no CUDA device"), (("--deepspeed-python", "x"), "--deepspeed-python: that peer")],
)
def test_the_benchmark_says_where_hosts_cannot_compute_on_a_gpu(options: tuple[str, ...], words: str) -> None:
    command = [python(), str(BENCHMARKS / "slow_network.py"), "--device", "cuda", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
