"""A ``python`` that starts at once: what it runs is forked from a process that has imported torch and torchmetrics.

An interpreter that imports Lightning takes ten seconds, all but one of them for other packages. The harness's server forks a
second server before it imports Lightning or this package. ``harness.python()`` is a script that asks that one for a process with
its own arguments, environment, folder and open files. A test of what torch's own import or Python's end does uses ``sys.executable``.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

ADDRESS = "ONEBIT_QUICK_START"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# ----- the script -------------------------------------------------------------------------------------------------------


def _inherited() -> list[int]:
    """Open files that a process started from this one would have, by number."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sorted(number for number in numbers if _is_open(number) and os.get_inheritable(number))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def ask(address: str, executable: str, arguments: list[str]) -> int:
    """Has the server run ``python`` with these arguments; returns its exit status, negative for a signal.

    Options that the server does not know are for a new interpreter.
    """
    files = _inherited()
    known = [argument for argument in arguments if argument not in ("-B", "-u")]
    if not known or (known[0].startswith("-") and known[0] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *arguments])
    request = {"executable": executable, "arguments": arguments, "folder": os.getcwd(), "files": files}
    request["environment"] = dict(os.environ)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        told = json.dumps(request).encode()
        socket.send_fds(server, [struct.pack("!i", len(told))], files)
        server.sendall(told)
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        answer = server.recv(4)
    return struct.unpack("!i", answer)[0] if len(answer) == 4 else 1


def _end(status: int) -> None:
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


# ----- the server -------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket, parent: int) -> None:
    """Forks a process per request until the harness's server has ended; returns only in those processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    while os.getppid() == parent:
        ready = select.select([listener], [], [], 1.0)[0]
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if ready:
            client = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                return _handle(client)
            client.close()
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
    os._exit(0)


def _handle(client: socket.socket) -> None:
    """Runs one request in a child of this process and tells the client its status; returns only in the child."""
    size, files, _, _ = socket.recv_fds(client, 4, 64)
    told = bytearray()
    while len(told) < struct.unpack("!i", size)[0]:
        told += client.recv(65536)
    process = os.fork()
    if process == 0:
        client.close()
        return _run(json.loads(told), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(process)
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        number = client.recv(1) if client in ready else b""
        # a client that was killed takes its process with it
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        client.sendall(struct.pack("!i", status))
    finally:
        os._exit(0)


def _stream(number: int, unbuffered: bool) -> Any:
    return open(number, "w", closefd=False, buffering=1 if unbuffered else -1) if _is_open(number) else None


def _run(request: dict[str, Any], files: list[int]) -> None:
    """Becomes what ``python`` would be, runs the program and ends as Python does, but for what destructors do."""
    _become(request, files)
    status = 0
    try:
        _execute(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException as error:
        print(f"Exception ignored: {error!r}", file=sys.stderr)
        status = status or 120
    if status < 0:
        _end(status)
    os._exit(status & 0xFF)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Takes over the files, the environment and the folder of the process that asked."""
    import multiprocessing.spawn

    targets = request["files"]
    above = max([*targets, 2]) + 1
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for number in {0, 1, 2} - {*targets}:
        os.close(number)
    for file, target in zip(files, targets, strict=True):
        os.dup2(file, target)
        os.close(file)
    for number in _FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    own = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), "", os.getcwd()]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    searched = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*searched, *(path for path in sys.path if path not in own)]
    sys.executable = request["executable"]
    multiprocessing.spawn.set_executable(sys.executable)
    unbuffered = "-u" in request["arguments"][:2] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _stream(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, True)  # type: ignore[misc]


def _execute(arguments: list[str]) -> None:
    """What ``python`` does with its command line."""
    import runpy

    while arguments[0] in ("-B", "-u"):
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _fork_server(address: str) -> None:
    """Forks the server from this process, which goes on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    parent = os.getpid()
    if os.fork() == 0:
        _serve(listener, parent)
    listener.close()


if __name__ == "__main__":
    _end(ask(sys.argv[1], sys.argv[2], sys.argv[3:]))
elif ADDRESS in os.environ:
    _fork_server(os.environ.pop(ADDRESS))
