"""Several "hosts" with a slow TCP network on one machine: network namespaces joined by a switch, shaped with tbf. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SUBNET = "10.77.0"
PORT = 29511


def _run(*command: str, check: bool = True) -> None:
    # in a session of its own, which a terminal's interrupt does not reach: what was begun is finished
    quiet = None if check else subprocess.DEVNULL
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=quiet, start_new_session=True)


@dataclass
class SlowNetwork:
    """Context manager: ``hosts`` namespaces on one switch, every link shaped to ``megabits`` per second in both directions.

    Everything is torn down on exit, also after an error, an interrupt or SIGTERM (in the main thread, where handlers can be set), and
    leftovers of a killed run are removed on entry.

    Attributes:
        hosts: number of namespaces.
        megabits: rate of each link, Mb/s.
        prefix: of the namespaces' names.
        congestion: TCP's congestion control between the hosts, which would else be whatever this machine prefers.
    """

    hosts: int
    megabits: float
    prefix: str = "onebit"
    congestion: str = "cubic"
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _handlers: dict[int, Any] = field(default_factory=dict)  # what this process did on signals before
    _held: list[int] | None = None  # signals that wait, while they have to

    @staticmethod
    def requirement() -> str | None:
        """Why this machine cannot do it, or None."""
        if os.name != "posix" or os.geteuid() != 0:
            return "shaping a network needs root (network namespaces and tc)"
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                return f"`{tool}` is missing: install iproute2"
        return None

    def namespace(self, host: int) -> str:
        """Name of a host's namespace."""
        return f"{self.prefix}-{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{SUBNET}.{host + 1}"

    def __enter__(self) -> SlowNetwork:
        if reason := self.requirement():
            raise RuntimeError(reason)
        self._tear_down()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._end)
        try:
            with self._undisturbed():
                self._set_up()
        except BaseException:
            self._tear_down()
            raise
        return self

    def _end(self, number: int, _: FrameType | None) -> None:
        """Ends the program by an exception, so that its contexts are left (by default SIGTERM would not leave them)."""
        if self._held is not None:
            self._held.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Signals take effect at its end: an exception between a process's start and the note of it would leave it to nobody."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for number in held:
                signal.raise_signal(number)

    def _set_up(self) -> None:
        switch = f"{self.prefix}-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            space, port = self.namespace(host), f"port{host}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            route = (f"{SUBNET}.0/24", "dev", "eth0", "proto", "kernel", "scope", "link", "src", self.address(host))
            _run("ip", "-n", space, "route", "replace", *route, "congctl", self.congestion)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0")
            _run("ip", "-n", switch, "link", "set", port, "up")
            for where, device in ((space, "eth0"), (switch, port)):
                # a bucket of 2 ms of traffic, a queue long enough that TCP is paced, not dropped
                burst = max(16_384, int(self.megabits * 1e6 / 8 * 0.002))
                _run(
                    *("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf"),
                    *("rate", f"{self.megabits}mbit", "burst", str(burst), "latency", "200ms"),
                )

    def launch(
        self, command: Sequence[str], environment: dict[str, str], timeout: float, log: Path, ranks_per_host: int = 1
    ) -> None:
        """Runs ``command`` on every host (RANK, WORLD_SIZE and MASTER_ADDR set) and waits.

        Args:
            command: argument vector.
            environment: additional variables.
            timeout: seconds until all are killed.
            log: folder for the ranks' output.
            ranks_per_host: neighbouring ranks that share a namespace; the kernel keeps their traffic on its loopback, which is not shaped.

        Raises:
            RuntimeError: a rank failed or the time ran out; the message holds the end of its output.
        """
        files = []
        ranks = self.hosts * ranks_per_host
        for rank in range(ranks):
            host = rank // ranks_per_host
            variables = {
                **os.environ,
                **environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            file = (log / f"rank{rank}.log").open("wb")
            files.append(file)
            with self._undisturbed():
                self._processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", self.namespace(host), *command],
                        env=variables,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        failed = None
        deadline = time.monotonic() + timeout
        try:
            while self._running():
                if time.monotonic() > deadline:
                    failed = f"not finished after {timeout:g} s"
                    break
                time.sleep(0.05)
            else:
                codes = enumerate(process.returncode for process in self._processes)
                failed = next((f"rank {rank} ended with status {code}" for rank, code in codes if code), None)
        finally:
            with self._undisturbed():
                self._kill()
            for file in files:
                file.close()
        if failed:
            tails = "\n".join(
                f"--- rank {rank}\n{(log / f'rank{rank}.log').read_text(errors='replace')[-1500:]}"
                for rank in range(ranks)
            )
            raise RuntimeError(f"{failed}\n{tails}")

    def _running(self) -> bool:
        """Whether a host goes on.

        Asked instead of waited for: ``Popen.wait(timeout)``, interrupted in an unlucky moment, keeps a lock that the next one waits for.
        """
        with self._undisturbed():
            return any([process.poll() is None for process in self._processes])

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []

    def _tear_down(self) -> None:
        with self._undisturbed():
            self._kill()
            for host in range(max(self.hosts, 16)):
                # also what a killed run has left
                inside = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True)
                for pid in inside.stdout.split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _run("ip", "netns", "del", self.namespace(host), check=False)
            _run("ip", "netns", "del", f"{self.prefix}-switch", check=False)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()
