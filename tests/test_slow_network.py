"""The benchmark's networks are taken down however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from _network import SlowNetwork  # noqa: E402

# of this process: the benchmarks' own may be up, and another worker of the test run may have one
PREFIX = f"onebit-test{os.getpid()}"
REASON = SlowNetwork.requirement()

PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and its children with it
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from _network import SlowNetwork

with SlowNetwork(2, 100, prefix={PREFIX!r}) as network:
    print("up", flush=True)
    network.launch([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]], {{}}, 60, Path(sys.argv[1]))
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_network_and_no_hosts(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "up":
            pytest.skip(f"this machine does not let us make namespaces: {process.communicate()[1][-300:]}")
        assert len(namespaces()) == 3
        process.send_signal(number)
        status = process.wait(30)
    assert status == (128 + number if number == signal.SIGTERM else -number)
    assert namespaces() == []
    deadline = time.monotonic() + 10  # killed, or on its way into a network that is no more
    while any(str(tmp_path).encode() in commands(p) for p in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < deadline, "a host goes on"
        time.sleep(0.05)
