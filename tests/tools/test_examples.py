"""The examples run as they are: the demo compares two trainings, and configuration files drive the command line."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import python, run_ranks
from lightning_support import enter

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import data  # noqa: E402

from lightning_onebit.engine.sharded import OLDEST_TORCH  # noqa: E402

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
SMALL_MODEL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "2"]
SMALL_DATA = ["--train-bytes", "65536", "--validation-windows", "8"]


def alone() -> dict[str, str]:
    """This process's environment without what a Lightning run in it may have left: the child starts a run of its own."""
    taken = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    return {name: value for name, value in os.environ.items() if name not in taken}


def finished(command: list[str], folder: Path, **environment: str) -> str:
    """Runs a command in ``folder`` and returns what it wrote; fails with it if the status is not 0."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**alone(), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Runs Python in ``folder``."""
    return finished([python(), *command], folder, **environment)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def said(folder: str) -> Iterator[io.StringIO]:
    """Works in ``folder`` and collects what is printed and logged."""
    os.chdir(folder)
    printed = io.StringIO()
    from lightning_utilities.core import rank_zero

    logger = rank_zero.log  # what rank_zero_info, and so the callbacks, report through
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(printed))
    with contextlib.redirect_stdout(printed):
        yield printed


def example(rank: int, world: int, name: str, arguments: list[str], folder: str) -> str:
    """Runs an example's ``main`` as one rank of a launched job; returns what it printed and logged."""
    import importlib

    enter(rank)
    with said(folder) as printed:
        importlib.import_module(name).main(arguments)
    return printed.getvalue()


# ----- the text --------------------------------------------------------------------------------------------------------


def library(folder: Path, files: int = 200) -> Path:
    for number in range(files):
        path = folder / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# file {number:04d}\n" * 10)
    (folder / "test").mkdir()
    (folder / "test" / "test_left_out.py").write_text("left out\n" * 100)
    return folder


def test_corpus_is_the_same_at_every_reading_and_split_by_file(tmp_path: Path) -> None:
    root = library(tmp_path)
    train, validation = data.load_corpus(10**6, 10**6, root)
    again = data.load_corpus(10**6, 10**6, root)
    assert torch.equal(train, again[0]) and torch.equal(validation, again[1])
    assert train.dtype == torch.uint8
    texts = [bytes(part.numpy()).decode() for part in (train, validation)]
    numbers = [set(re.findall(r"file (\d+)", text)) for text in texts]
    assert numbers[0] and numbers[1]
    assert not numbers[0] & numbers[1], "a file is in both parts"
    assert len(numbers[0] | numbers[1]) == 200, "a file is in neither part"
    assert "left out" not in texts[0] + texts[1]


def test_corpus_is_cut_at_its_size_and_available_everywhere() -> None:
    train, validation = data.load_corpus(50_000, 20_000)
    assert (train.numel(), validation.numel()) == (50_000, 20_000)


def test_corpus_without_source_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="use a Python that ships"):
        data.load_corpus(root=tmp_path)


def test_windows_cover_the_text_and_targets_are_the_next_bytes() -> None:
    text = torch.arange(41, dtype=torch.uint8)
    windows = data.TextWindows(text, 10)
    assert len(windows) == 4
    assert torch.equal(torch.cat([windows[i][:-1] for i in range(4)]), text[:40].long())
    assert torch.equal(torch.cat([windows[i][1:] for i in range(4)]), text[1:].long())
    assert len(data.TextWindows(text, 10, limit=3)) == 3
    with pytest.raises(ValueError, match="length=41"):
        data.TextWindows(text, 41)


# ----- the demo --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One small run of the demo: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    options = [*SMALL_MODEL, *SMALL_DATA, "--steps", "10", "--freeze-fraction", "0.3", "--warmup-steps", "2"]
    printed = run([str(EXAMPLES / "demo.py"), "--out", str(folder), *options], folder)
    return folder, printed


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "result.json").read_text())


def test_demo_trains_both_on_the_same_weights_and_data(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    dense, compressed = rows(folder / "ddp"), rows(folder / "onebit_adam")
    assert [row["step"] for row in dense] == [str(step) for step in range(1, 11)]
    # The first three steps are dense in both; what differs is the order of additions in the update.
    for a, b in zip(dense[:4], compressed[:4], strict=True):
        assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), rel=1e-5)
    # Compression is really on afterwards: nothing but rounding would differ otherwise.
    assert abs(float(dense[-1]["train_loss"]) / float(compressed[-1]["train_loss"]) - 1) > 1e-6


def test_demo_counts_bytes_by_formula_and_by_ledger(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    dense, compressed = result(folder, "ddp"), result(folder, "onebit_adam")
    per_step = 4 * dense["parameters"]  # 2 (n-1)/n * 4 N with n = 2
    assert dense["bytes_sent"] == 10 * per_step == compressed["dense_bytes"]
    assert compressed["dense_steps"] == 3
    sent = [0, *(int(row["bytes_sent"]) for row in rows(folder / "onebit_adam"))]
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert sent[-1] == compressed["bytes_sent"]
    assert all(per_step <= count < 1.02 * per_step for count in steps[:3])
    # 32 bits less scales, padding of small tensors and the control round
    assert all(count < per_step / 8 for count in steps[3:])


def test_demo_ends_with_table_and_figure(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    dense, compressed, binary = (result(folder, name) for name in ("ddp", "onebit_adam", "binsgdm"))
    assert all(run["replicas_identical"] is True for run in (dense, compressed, binary))
    assert re.search(r"replicas identical +yes +yes +yes", printed)
    losses = [f"{run['val_loss']:.4f}" for run in (dense, compressed, binary)]
    assert re.search(rf"validation loss.* {losses[0]} +{losses[1]} +{losses[2]}", printed)
    said = " ".join(printed.split())
    for run in (compressed, binary):
        ratio, gap = dense["bytes_sent"] / run["bytes_sent"], run["val_loss"] / dense["val_loss"] - 1
        start = f"{run['strategy']}: {ratio:.2f}x fewer bytes, validation loss {100 * gap:+.2f} % against ddp."
        assert start + " Of its 10 steps 3 are dense" * (run is compressed) in said
    assert dense["bytes_sent"] / binary["bytes_sent"] > 8 and binary["dense_steps"] == 0
    figure = (folder / "demo.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and len(figure) > 20_000


def test_demo_redraws_without_training(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    (folder / "demo.png").unlink()
    again = run([str(EXAMPLES / "demo.py"), "--out", str(folder), "--plot-only"], folder)
    assert (folder / "demo.png").exists()
    assert printed[printed.index("onebit_adam: ") : printed.index("Figure:")] in again


def test_freeze_is_drawn_only_where_the_dense_steps_come_first(tmp_path: Path) -> None:
    import demo as driver

    def freeze_of(increments: list[int]) -> int | None:
        sent = list(itertools.accumulate(increments))
        (tmp_path / "metrics.csv").write_text(
            "step,bytes_sent\n" + "".join(f"{i},{n}\n" for i, n in enumerate(sent, 1))
        )
        return driver.warm_up(tmp_path, {"dense_bytes": 100 * len(sent), "steps": len(sent)})

    assert freeze_of([101, 100, 4, 4]) == 2
    assert freeze_of([100, 4, 100, 4]) is None  # dense rounds in between, as 0/1 Adam makes them
    assert freeze_of([4, 4]) is None
    assert freeze_of([100, 100]) is None


def test_replicas_that_differ_are_called_different(demo: tuple[Path, str], tmp_path: Path) -> None:
    """The table does not hide it: the word comes from the record."""
    import demo as driver

    folder, _ = demo
    broken = {**result(folder, "onebit_adam"), "replicas_identical": False}
    assert re.search(r"replicas identical +yes +NO", driver.table([result(folder, "ddp"), broken]))


def hash_before_and_after_a_flipped_bit(rank: int, world: int) -> tuple[bool, bool]:
    from text_gpt import replicas_identical

    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        before = replicas_identical(model)
        model.bias.view(torch.int32)[1] ^= rank
    return before, replicas_identical(model)


def test_hash_sees_one_flipped_bit_on_one_rank() -> None:
    assert run_ranks(hash_before_and_after_a_flipped_bit, 2) == [(True, False)] * 2


def refusal(rank: int, world: int, arguments: list[str]) -> str:
    from text_gpt import parse

    written = io.StringIO()
    with contextlib.redirect_stderr(written), contextlib.suppress(SystemExit):
        parse(arguments)
    return written.getvalue()


def test_option_that_would_skip_the_last_validation_is_refused() -> None:
    (message,) = run_ranks(refusal, 1, ["--steps", "10", "--validate-every", "4"])
    assert "--validate-every 4 does not divide --steps 10" in message
    assert run_ranks(refusal, 1, ["--steps", "10", "--validate-every", "5"]) == [""]


# ----- LightningCLI ----------------------------------------------------------------------------------------------------

CLI = str(EXAMPLES / "cli" / "main.py")
SMALL_CLI = [
    *("--trainer.max_steps", "10", "--trainer.val_check_interval", "5", "--trainer.enable_progress_bar", "false"),
    *("--trainer.logger", "false", "--trainer.enable_checkpointing", "false"),
    *("--trainer.enable_model_summary", "false"),
    *("--model.layers", "1", "--model.width", "32", "--model.heads", "2"),
    *(
        "--data.batch_size",
        "2",
        "--data.context",
        "32",
        "--data.train_bytes",
        "65536",
        "--data.validation_windows",
        "8",
    ),
]


def cli_rank(rank: int, world: int, arguments: list[str], folder: str) -> str:
    """Runs the command line as one rank of a launched job; returns what it printed and logged."""
    import runpy

    enter(rank)
    sys.argv = [CLI, *arguments]
    with said(folder) as printed:
        runpy.run_path(CLI, run_name="__main__")
    return printed.getvalue()


def steps_of(printed: str) -> dict[str, tuple[int, ...]]:
    """Dense, compressed and skipped steps of every optimizer, from the tables that CompressionStats has printed."""
    found: dict[str, tuple[int, ...]] = {}
    for text in printed.split("Compression since the start of training")[1:]:
        lines = text.splitlines()
        names = re.split(r"\s{2,}", lines[1].strip())
        counts = []
        for kind in ("dense", "compressed", "skipped"):
            row = next(line for line in lines if line.strip().startswith(f"{kind} steps "))
            counts.append([int(count) for count in row.partition("steps")[2].split()])
        found |= dict(zip(names, zip(*counts, strict=True), strict=True))
    return found


@pytest.mark.parametrize(
    ("config", "extra", "converted"),
    [
        pytest.param("onebit_adam.yaml", [], True, id="strategy-by-name"),
        pytest.param("class_path.yaml", [], False, id="strategy-optimizer-callbacks-by-class-path"),
        pytest.param(
            "onebit_adam.yaml", ["--optimizer", "lightning_onebit.OnebitAdam"], False, id="optimizer-argument"
        ),
    ],
)
def test_cli_trains_from_configuration(config: str, extra: list[str], converted: bool, tmp_path: Path) -> None:
    arguments = ["fit", "--config", str(EXAMPLES / "cli" / config), *SMALL_CLI, *extra]
    printed = run_ranks(cli_rank, 2, arguments, str(tmp_path), timeout=150)[0]
    # 20 % of 10 steps dense, the rest compressed; the line is the statistics callback's
    assert steps_of(printed) == {"OnebitAdam": (2, 8, 0)}, printed[-3000:]
    assert ("AdamW is converted to OnebitAdam" in printed) is converted


@pytest.mark.parametrize("algorithm", ["onebit_lamb", "zero_one_adam", "binsgdm"])
def test_every_algorithm_has_a_configuration(algorithm: str) -> None:
    """Parsed as the command line parses it, and it names its algorithm; one of them trains below."""
    config = yaml.safe_load((EXAMPLES / "cli" / f"{algorithm}.yaml").read_text())
    strategy = config["trainer"]["strategy"]
    assert algorithm in (strategy, strategy["init_args"]["algorithm"] if isinstance(strategy, dict) else "")
    assert config["trainer"]["devices"] == 2 and config["trainer"]["accelerator"] == "cpu"


def test_cli_trains_zero_one_adam_from_configuration(tmp_path: Path) -> None:
    """Started as a user starts it: Lightning starts the second process."""
    config = str(EXAMPLES / "cli" / "zero_one_adam.yaml")
    strategy = "--trainer.strategy.init_args"
    short = [f"{strategy}.freeze_step", "4", f"{strategy}.local_steps.double_every", "2"]
    printed = run([CLI, "fit", "--config", config, *SMALL_CLI, *short], tmp_path)
    assert steps_of(printed) == {"ZeroOneAdam": (4, 6, 0)}, printed[-3000:]


# ----- the other examples, each as it is, but smaller -------------------------------------------------------------------


def output_of(name: str, arguments: list[str], folder: Path) -> str:
    """What rank 0 of two says."""
    return run_ranks(example, 2, name, arguments, str(folder), timeout=150)[0]


def test_digits_learns_with_the_automatic_freeze(tmp_path: Path) -> None:
    printed = output_of("digits", ["--epochs", "6"], tmp_path)
    found = re.search(r"validation loss ([\d.]+), accuracy ([\d.]+) %", printed)
    assert found, printed[-3000:]
    assert float(found[2]) > 85, "ten classes: 10 % is chance"
    assert steps_of(printed) == {"OnebitAdam": (66, 60, 0)}, "half of 126 steps, for so short a run, and 3 refreshes"


def test_masked_model_trains_with_lamb_at_batches_by_accumulation(tmp_path: Path) -> None:
    small = ["--steps", "8", "--batch-size", "4", "--accumulate", "3", "--context", "32", "--layers", "1"]
    small += ["--width", "32", "--train-bytes", "65536"]
    printed = output_of("bert_mlm_lamb", small, tmp_path)
    assert "24 windows per step, replicas identical" in printed
    assert steps_of(printed) == {"OnebitLamb": (2, 6, 0)}, printed[-3000:]
    assert float(re.findall(r"validation loss ([\d.]+)", printed)[-1]) < 5.6, "log(256) = 5.55 before training"


def test_bytes_are_hidden_as_bert_hides_words() -> None:
    from bert_mlm_lamb import HIDDEN, hide

    tokens = torch.randint(256, (400, 500))
    inputs, guessed = hide(tokens, torch.Generator().manual_seed(0))
    assert float(guessed.float().mean()) == pytest.approx(0.15, abs=0.005)
    assert torch.equal(inputs[~guessed], tokens[~guessed]), "what is not to be guessed is left alone"
    assert float((inputs[guessed] == HIDDEN).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float((inputs[guessed] == tokens[guessed]).float().mean()) == pytest.approx(0.1, abs=0.01)


def test_fine_tuning_goes_on_from_the_weights_with_another_algorithm(tmp_path: Path) -> None:
    small = ["--steps", "10", "--tune-steps", "16", "--batch-size", "4", "--context", "32", "--layers", "1"]
    printed = output_of("finetune", [*small, "--width", "32"], tmp_path)
    before, after = map(float, re.findall(r"English: ([\d.]+) before, ([\d.]+) after", printed)[0])
    assert after < before, printed[-3000:]
    assert steps_of(printed) == {"OnebitAdam": (2, 8, 0), "ZeroOneAdam": (4, 12, 0)}, printed[-3000:]
    assert "replicas identical" in printed
    folder = tmp_path / "demo_out" / "finetune"
    assert (folder / "pretrained.ckpt").is_file()
    assert len(list((folder / "pretrained.ckpt.onebit").rglob("rank-*.pt"))) == 2, "residuals lie beside it"


def test_manual_has_no_file_in_common_with_the_corpus() -> None:
    train, validation = data.load_manual()
    assert train.numel() > 5 * validation.numel() > 5000
    assert b"assert_stmt" in bytes(torch.cat([train, validation]).numpy())


def test_gan_trains_two_compressed_optimizers_by_hand(tmp_path: Path) -> None:
    printed = output_of("gan_manual_optimization", ["--epochs", "1", "--freeze-step", "8"], tmp_path)
    assert "replicas identical" in printed
    assert steps_of(printed) == {"OnebitAdam 0": (8, 13, 0), "OnebitAdam 1": (8, 13, 0)}, printed[-3000:]
    assert "all ranks had the same gradients" not in printed, "each rank draws noise of its own"


def test_fabric_accumulates_clips_freezes_and_resumes(tmp_path: Path) -> None:
    printed = output_of("fabric", ["--epochs", "5"], tmp_path)
    assert "replicas identical" in printed
    assert "26 dense and 79 compressed steps" in printed, printed
    assert float(re.findall(r"accuracy ([\d.]+)", printed)[0]) > 80


@pytest.mark.parametrize("wrapped", [[], ["--ddp"]], ids=["", "ddp"])
def test_plain_torch_starts_itself_and_resumes(wrapped: list[str], tmp_path: Path) -> None:
    printed = run([str(EXAMPLES / "plain_torch.py"), "--epochs", "4", *wrapped], tmp_path)
    assert "replicas identical" in printed
    dense, compressed = map(int, re.findall(r"(\d+) dense and (\d+) compressed steps", printed)[0])
    assert dense + compressed == 84, "the ledger goes on after the resume"
    assert dense == 20
    assert float(re.findall(r"accuracy ([\d.]+)", printed)[0]) > 80


@pytest.mark.skipif(TORCH < OLDEST_TORCH, reason="FSDP2 on CPUs needs a newer torch")
def test_sharded_torch_starts_itself_and_compares_with_hybrid_sharding(tmp_path: Path) -> None:
    printed = run([str(EXAMPLES / "sharded_torch.py"), "--steps", "12", "--width", "32", "--layers", "1"], tmp_path)
    found = re.findall(r"^(HSDP, AdamW|1-bit Adam) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    dense, ours = (dict(zip(("loss", "sent", "step", "memory"), map(float, row[1:]), strict=True)) for row in found)
    assert abs(ours["loss"] / dense["loss"] - 1) < 0.05 and dense["loss"] < 5.6, "both learn from the same start"
    assert 12 * dense["step"] == pytest.approx(dense["sent"], rel=0.01), "every step is dense"
    assert dense["step"] / ours["step"] > 10 and 3 < dense["sent"] / ours["sent"] < 8, "but two, after the dense fifth"
    assert 0 < dense["memory"] < ours["memory"], printed


@pytest.mark.nightly
@pytest.mark.skipif(TORCH < OLDEST_TORCH, reason="FSDP2 on CPUs needs a newer torch")
def test_sharded_gpt_trains_both_by_lightning_and_ends_with_a_table(tmp_path: Path) -> None:
    printed = run([str(EXAMPLES / "sharded_gpt.py"), "--steps", "10", "--width", "32", "--layers", "1"], tmp_path)
    found = re.findall(
        r"^(dense HSDP, AdamW|1-bit Adam) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE
    )
    dense, ours = (dict(zip(("loss", "sent", "step", "memory"), map(float, row[1:]), strict=True)) for row in found)
    assert abs(ours["loss"] / dense["loss"] - 1) < 0.05, "both learn from the same start"
    assert dense["step"] / ours["step"] > 10 and dense["sent"] / ours["sent"] > 3


# ----- several machines -------------------------------------------------------------------------------------------------

TINY = [*SMALL_MODEL, *SMALL_DATA, "--steps", "4", "--freeze-fraction", "0.5", "--warmup-steps", "2"]


def shell(command: list[str], folder: Path, **environment: str) -> str:
    """Runs a script in the project's root."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").symlink_to(python())
    return finished(command, ROOT, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", **environment)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_script_for_several_machines_starts_torchrun_and_needs_only_pytorch_lightning(tmp_path: Path) -> None:
    """One machine with two processes plays the only node; more of them need more machines.

    As where only ``pytorch_lightning`` is installed: a package that cannot be imported stands before the other one.
    """
    hidden = tmp_path / "hide" / "lightning"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden by a test', name='lightning')\n")
    shell(
        ["bash", str(EXAMPLES / "multi_node.sh"), *TINY, "--out", str(tmp_path / "out")],
        tmp_path,
        **{"NODES": "1", "NODE_RANK": "0", "HEAD": "127.0.0.1", "DEVICES": "2", "PORT": free_port()},
        PYTHONPATH=os.pathsep.join([str(hidden.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (record["ranks"], record["dense_steps"], record["replicas_identical"]) == (2, 2, True)
    assert record["bytes_sent"] < record["dense_bytes"]


def test_slurm_script_starts_one_task_per_rank(tmp_path: Path) -> None:
    """``srun`` is played by a script that sets what Slurm sets: two nodes of one task each, both on this machine."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(
        "#!/bin/bash\nset -e\nfor task in 0 1; do\n"
        'SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & pids+=($!)\ndone\n'
        'for pid in "${pids[@]}"; do wait "$pid"; done\n'
    )
    srun.chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "onebit",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    shell(
        ["bash", str(EXAMPLES / "slurm.sbatch"), *TINY, "--out", str(tmp_path / "out")],
        tmp_path,
        **{**slurm, "ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
    )
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (record["ranks"], record["dense_steps"], record["replicas_identical"]) == (2, 2, True)
