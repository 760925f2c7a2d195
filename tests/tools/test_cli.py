"""The console script: quantities as people write them, friendly errors, JSON everywhere, a self-test that can fail."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import python

import lightning_onebit as ob
from lightning_onebit.kernels import KernelsUnavailable
from lightning_onebit.tools import bench, cli, doctor

PLAN = [
    "plan",
    "--params",
    "336M",
    "--gpus",
    "64",
    "--gpus-per-node",
    "4",
    "--bandwidth",
    "4.1Gbps",
    "--compute-ms",
    "250",
]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("336M", 336_000_000),
        ("1.3B", 1_300_000_000),
        ("25_481_472", 25_481_472),
        ("7k", 7000),
        ("1,000", 1000),
        ("2 g", 2 * 10**9),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, count: int) -> None:
    assert cli.parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("4.1Gbps", 4.1e9),
        ("100 Mb/s", 1e8),
        ("12GB/s", 9.6e10),
        ("1GBps", 8e9),
        ("500Mbit/s", 5e8),
        ("1tbps", 1e12),
        ("9600bps", 9600),
    ],
)
def test_rates_are_read_with_their_units(text: str, rate: float) -> None:
    assert cli.parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["4.1", "fast", "0Gbps", "-1Gbps", "4.1Gb", "", "12GB/S", "12GBPS"])
def test_a_rate_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number and its unit"):
        cli.parse_rate(text)


def test_plan_prints_a_table_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(PLAN) == 0
    out = capsys.readouterr().out
    assert "336 M parameters, 64 GPUs, 4 per node, 4.1 Gb/s per node" in out
    assert "1-bit Adam, hierarchical" in out and "BinSGDM, flat" in out and "should make the run" in out


@pytest.mark.parametrize("more", [["--bucket-mb", "1e-9"], ["--bucket-mb", "1e6"], ["--params", "1000T"]])
def test_plan_takes_what_the_optimizers_take(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, *more]) == 0
    assert "1-bit Adam, hierarchical" in capsys.readouterr().out


def test_plan_reads_compute_from_a_measured_dense_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN[:-2], "--dense-ms", "6000", "--algorithm", "onebit_adam,birder", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {p["name"]: p for p in facts["predictions"]}
    assert set(rows) == {"dense_fp32", "dense_fp16", "onebit_adam", "binsgdm"}
    assert rows["dense_fp32"]["step_seconds"] == pytest.approx(6.0, rel=1e-3)


def test_plan_counts_the_rounds_of_the_options_given(capsys: pytest.CaptureFixture[str]) -> None:
    """0/1 Adam's, which sends less the rarer it synchronises."""

    def sent(*more: str) -> float:
        assert cli.main([*PLAN, "--algorithm", "zero_one_adam", "--steps", "10000", *more, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["predictions"]
        return next(float(row["node_bytes"]) for row in rows if row["name"] == "zero_one_adam")

    assert sent("--local-steps", "16,500") < sent("--local-steps", "4,500") < sent()


@pytest.mark.parametrize("text", ["many", "0", "4,0", "1", "1,500", "4,5,x"])
def test_local_steps_that_cannot_be_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*PLAN, "--local-steps", text])
    assert "write for example 16,32768" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("more", [["--steps", "1"], ["--steps", "2"], ["--warmup", "0", "--steps", "10"]])
def test_plan_knows_no_run_without_a_dense_step(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, *more, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    shares = {row["name"]: row["dense_share"] for row in facts["predictions"]}
    one = 1 / facts["job"]["steps"]
    assert shares["onebit_adam"] == shares["onebit_lamb"] == shares["zero_one_adam"] == one and shares["binsgdm"] == 0


def test_json_goes_into_a_file_besides_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--json", str(tmp_path / "plan.json")]) == 0
    assert "should make the run" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["helps"] is True


def test_plan_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.png"
    assert cli.main([*PLAN, "--algorithm", "onebit_adam", "--plot", str(target)]) == 0
    assert target.read_bytes()[:4] == b"\x89PNG" and f"wrote {target}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--bandwidth": "4.1"}, "write a number and its unit"),
        ({"--params": "many"}, "write for example 336M"),
        ({"--gpus": "0"}, "at least 1"),
        ({"--gpus-per-node": "5"}, "gpus_per_node=5 does not divide gpus=64"),
        ({"--shards": "3"}, "shards=3 does not divide gpus_per_node=4"),
        ({"--compute-ms": "-3"}, "at least 0"),
        ({"--warmup": "20"}, "at most 1"),
        ({"--algorithm": "sgd"}, "choose one of 'onebit_adam'"),
        ({"--params": "9" * 400}, f"--params: '{'9' * 400}' is more than 1,000,000,000,000,000 parameters; correct it"),
        ({"--params": "999999T"}, "'999999T' is more than"),
        ({"--gpus": "1", "--gpus-per-node": "1", "--compute-ms": "0"}, "--compute-ms 0 with --gpus 1 leaves nothing"),
        ({"--gpus": "4" * 20}, f"gpus={'4' * 20} is out of range; it must be at most"),
        ({"--steps": "1" * 400}, "it must be at most 1,000,000,000, give the real number"),
        (
            {"--algorithm": "zero_one_adam", "--overlap": "backward"},
            "overlap='backward' has no effect on 'zero_one_adam': 'onebit_adam' and 'onebit_lamb' have it; leave it out",
        ),
        ({"--plot": "/no/such/folder/plan.png"}, "No such file"),
    ],
)
def test_arguments_that_make_no_sense_are_explained(
    change: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = dict(zip(PLAN[1::2], PLAN[2::2], strict=True)) | change
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *(word for pair in arguments.items() for word in pair)])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and words in said and "--help" in said and "Traceback" not in said


def test_a_dense_step_shorter_than_its_communication_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*PLAN[:-2], "--dense-ms", "10"])
    assert "averaging alone should take longer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (PLAN, {}),
        (PLAN, {"PYTHONUNBUFFERED": "1"}),
        ([*PLAN, "--json"], {}),
        (["plan", "--help"], {}),
        (["--version"], {}),
        (["doctor", "--no-test"], {}),
        (
            ["bench", "--sizes", "1000", "--repeats", "1", "--backend", "gloo", "--kernels", "reference"],
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
        ),
    ],
    ids=["plan", "plan unbuffered", "plan json", "help", "version", "doctor", "bench"],
)
def test_a_reader_that_has_gone_ends_a_command_quietly(arguments: list[str], environment: dict[str, str]) -> None:
    """As with `| head -1`: no message, and the status that a shell gives other tools."""
    if "RANK" in environment:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment = {**environment, "MASTER_PORT": str(free.getsockname()[1])}
    read, write = os.pipe()
    os.close(read)
    root = str(Path(__file__).parents[2])
    base = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [python(), "-m", "lightning_onebit", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        env={**base, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment},
    )
    os.close(write)
    said = [line for line in done.stderr.splitlines() if not line.startswith("measured ")]
    assert done.returncode == 141 and not [line for line in said if "rror" in line or "pipe" in line], done.stderr


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["plan", "--bogus"], 2), (PLAN, 0)])
def test_commands_whose_output_is_closed_from_the_start_say_no_more(arguments: list[str], status: int) -> None:
    command = f"exec {shlex.join([python(), '-m', 'lightning_onebit', *arguments])} >&-"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=100, env=environment)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    root = str(Path(__file__).parents[2])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [python(), "-m", "lightning_onebit", *PLAN],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": root},
        )
    assert done.returncode == 2 and "No space left" in done.stderr and "Exception" not in done.stderr


def test_bench_without_ranks_says_how_to_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench"])
    assert ended.value.code == 2 and "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["elements", "repeats"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_measure_link_refuses_counts_that_are_none(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"elements": 100, name: value}
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name}={value!r}")):
        bench.measure_link(**arguments)


@pytest.mark.parametrize(("built", "why"), [(False, "torch was built without NCCL"), (True, "no GPU was found")])
def test_bench_says_where_nccl_cannot_be_used(
    built: bool, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: built)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--backend", "nccl"])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and f"--backend nccl cannot be used: {'this ' if not built else ''}{why}" in said
    assert "use --backend gloo" in said and "Traceback" not in said


def test_bench_measures_on_real_ranks_and_reports_once(tmp_path: Path) -> None:
    command = [
        python(),
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "lightning_onebit",
        "bench",
    ]
    command += ["--sizes", "1000", "40000", "--repeats", "2", "--backend", "gloo", "--kernels", "reference", "--json"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)  # one rank has spoken
    assert [row["elements"] for row in facts["sizes"]] == [1000, 40000] and "2 ranks, gloo" in facts["setting"]
    assert all(row["dense_bytes"] > row["exchange_bytes"] > 0 for row in facts["sizes"])


def test_measurements_of_nothing_say_nothing_about_a_network() -> None:
    alone = bench.LinkMeasurement(1000, 1e-5, 1e-3, 1e-4, 0, 0)
    assert bench.advice([alone]) == (
        "One rank exchanges nothing, so there is no network to judge: start it on several, on all machines."
    )
    for judge in (bench.break_even, bench.advice):
        with pytest.raises(ValueError, match="measurements is empty"):
            judge([])


def test_bench_lets_ranks_share_a_gpu_over_gloo_only() -> None:
    assert [bench._gpu_of(rank, 2, "gloo").index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [bench._gpu_of(rank, 2, "nccl").index for rank in range(2)] == [0, 1]
    with pytest.raises(
        ValueError, match=r"LOCAL_RANK=2 of this machine has no GPU: there are 2.*--nproc-per-node 2.*--backend gloo"
    ):
        bench._gpu_of(2, 2, "nccl")


@pytest.mark.parametrize("command", ["bench", "doctor"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "0", "-1"])
def test_a_timeout_that_is_none_is_refused_by_name(
    command: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("it has begun"))
    monkeypatch.setattr(doctor, "examine", lambda **_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--timeout", value])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and f"--timeout={float(value)!r} is out of range; it must be" in said


@pytest.mark.parametrize("option", ["--sizes", "--repeats", "--ranks-per-node"])
def test_bench_names_the_count_that_is_none(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        cli.main(["bench", option, "0"])
    assert f"{option}=0 is out of range; it must be at least 1" in " ".join(capsys.readouterr().err.split())


# ----- doctor --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speedups", "even", "said"),
    [
        ((1.5, 2.0, 3.0), 0.0, "faster at every size measured"),
        ((0.5, 1.5, 3.0), 3.25e6, "pays from about 3.2 M"),
        ((1.5, 0.5, 1.5), 8.5e6, "pays from about 8.5 M"),
        ((0.5, 1.1, 0.5), None, r"does not pay.* 2\.0x as long .*faster at 4,000,000 elements"),
        ((0.5, 0.6, 0.8), None, "does not pay.* 1.2x as long as the dense all-reduce. Use strategy='ddp'.$"),
    ],
)
def test_break_even_is_where_the_exchange_is_faster_from_then_on(
    speedups: tuple[float, ...], even: float | None, said: str
) -> None:
    sizes = (1_000_000, 4_000_000, 10_000_000)
    measured = [bench.LinkMeasurement(n, 1.0, 1 / s, math.nan, 8 * n, n) for n, s in zip(sizes, speedups, strict=True)]
    assert bench.break_even(measured) == (even if even is None else pytest.approx(even))
    assert re.search(said, bench.advice(measured))
    assert " - " in bench.table(measured), "on CUDA the host does not see the time in kernels"


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test's two ranks start at once; test_packaging.py has it start interpreters."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.mark.usefixtures("quick_ranks")
def test_doctor_finds_this_installation_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problems"] == []
    assert facts["versions"]["lightning-onebit"] == ob.__version__ and facts["versions"]["torch"]
    assert facts["namespaces"] == {"lightning.pytorch": [], "pytorch_lightning": []}
    assert facts["kernels"]["cpu"]["backend"] in ("cpu", "reference") and facts["kernels"]["cuda"]["why"]
    test = facts["self_tests"]["cpu"]
    assert test["passed"] and test["backend"] == "gloo" and test["bytes_ratio"] > 10


def test_doctor_says_why_slower_kernels_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, device: Any) -> None:
        raise KernelsUnavailable("no C++ compiler")

    monkeypatch.setattr(doctor, "get_backend", refuse)
    assert cli.main(["doctor", "--no-test"]) == 0
    assert "reference   plain torch, slower with the same bits: no C++ compiler" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_ranks")
def test_a_self_test_that_fails_is_a_problem_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert cli.main(["doctor", "--timeout", "60"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "no-such-interface" in out and "Problems" in out


@pytest.mark.usefixtures("quick_ranks")
def test_different_weights_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_differently(running: Any, deadline: float) -> None:
        folder = Path(running[0].args[running[0].args.index("lightning_onebit.tools.doctor") + 1])
        for rank in range(2):
            folder.joinpath(f"answer-{rank}").write_text(json.dumps({"weights": str(rank), "ratio": 1.0}))

    monkeypatch.setattr(doctor, "_watch", answer_differently)
    found = doctor.self_test(timeout=100)
    assert not found["passed"] and "different weights" in found["error"]


@pytest.mark.usefixtures("quick_ranks")
def test_a_self_test_that_hangs_ends() -> None:
    found = doctor.self_test(timeout=0.05)
    assert not found["passed"] and "timed out" in found["error"]


def test_a_registry_that_lacks_a_name_is_a_problem() -> None:
    facts = {
        "namespaces": {"lightning.pytorch": ["onebit_adam"]},
        "devices": ["a GPU"],
        "kernels": {"cuda": {"backend": "reference"}},
        "self_tests": {},
    }
    found = doctor._problems(facts)
    assert any("does not know onebit_adam" in p for p in found) and any(
        "CUDA kernels cannot be used" in p for p in found
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for command in ("plan", "doctor", "bench"):
        assert command in out
