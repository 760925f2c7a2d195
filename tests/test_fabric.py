"""Lightning Fabric: the same optimizers in the user's own loop, in both Fabric packages."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning_support import differing, enter, same_on_all_ranks

import lightning_onebit as ob

FABRICS = ["lightning.fabric", "lightning_fabric"]


def net(norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(dist.get_rank())  # rank 0's weights must reach everybody
    middle = torch.nn.BatchNorm1d(16) if norm else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(6, 16, bias=not norm), middle, torch.nn.Linear(16, 3))


def launched(package: str, strategy: Any, **options: Any) -> Any:
    enter(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    fabric = importlib.import_module(package).Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options
    )
    fabric.launch()
    return fabric


def batches(count: int, start: int = 0) -> list[torch.Tensor]:
    """Different on every rank."""
    return [
        torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for step in range(start, start + count)
    ]


def train(
    fabric: Any, model: Any, optimizer: Any, steps: int, start: int = 0, accumulate: int = 1, clip: float | None = None
) -> None:
    for step, x in enumerate(batches(steps * accumulate, start), 1):
        stepping = step % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not stepping):
            fabric.backward(torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) / accumulate)
        if stepping:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def dense_and_ddp(rank: int, world: int, package: str) -> list[float]:
    os.environ["LOCAL_RANK"] = str(rank)
    found = []
    for strategy in ("ddp", "onebit_adam"):
        fabric = launched(package, strategy)
        module = net(norm=True)
        make = torch.optim.AdamW if strategy == "ddp" else fabric.strategy.optimizer
        model, optimizer = fabric.setup(module, make(module.parameters(), lr=1e-2, weight_decay=0.1))
        train(fabric, model, optimizer, 6, accumulate=2, clip=0.5)
        found.append(weights(module))
    return [float((found[0][name].float() - found[1][name].float()).abs().max()) for name in found[0]]


@pytest.mark.parametrize("package", FABRICS)
def test_dense_steps_are_those_of_ddp_with_accumulation_clipping_and_buffers(package: str) -> None:
    for differences in run_ranks(dense_and_ddp, 2, package):
        assert max(differences) < 1e-6


def every_algorithm(rank: int, world: int, package: str, algorithm: str, folder: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    options: dict[str, Any] = {"freeze_step": 3} if algorithm in ("onebit_adam", "onebit_lamb") else {}
    if algorithm == "zero_one_adam":
        options = {"var_freeze_step": 3, "local_step_scaler": 2}

    def run(saved: bool) -> tuple[Any, Any, Any]:
        fabric = launched(package, algorithm)
        module = net()
        made = fabric.strategy.optimizer(module.parameters(), lr=1e-2, block_size=32, **options)
        model, optimizer = fabric.setup(module, made)
        state = {"model": model, "optimizer": optimizer, "step": 7}
        if not saved:
            train(fabric, model, optimizer, 7)
            fabric.save(f"{folder}/a.ckpt", state)
        else:
            assert fabric.load(f"{folder}/a.ckpt", state) == {}
            assert state["step"] == 7
        shown = same_on_all_ranks(dict(module.state_dict()))
        train(fabric, model, optimizer, 6, start=7)
        return weights(module), shown, optimizer

    straight, shown, optimizer = run(False)
    resumed, _, again = run(True)
    return {
        "resumed": differing(straight, resumed),
        "shown": shown,
        "compressed": (optimizer.ledger.compressed_steps, again.ledger.compressed_steps),
        "shards": len(list(Path(folder).rglob("rank-*.pt"))),
        "ratio": optimizer.ledger.ratio,
    }


@pytest.mark.parametrize(
    ("package", "algorithm"),
    [*((FABRICS[0], name) for name in ("onebit_adam", "onebit_lamb", "binsgdm")), (FABRICS[1], "zero_one_adam")],
)
def test_every_algorithm_trains_and_resumes_bit_for_bit(package: str, algorithm: str, tmp_path: Path) -> None:
    for found in run_ranks(every_algorithm, 2, package, algorithm, str(tmp_path)):
        assert found["resumed"] == [], "the run that was loaded goes on as the one that was not interrupted"
        assert found["shown"] == [], "outside of steps all ranks see the same model, between local steps too"
        assert found["compressed"][0] == found["compressed"][1] >= 10
        assert found["shards"] == 2
        assert found["ratio"] > 1.2


def overwriting(rank: int, world: int, folder: str) -> list[int]:
    """How many sets of shards lie beside a checkpoint after each save under its name; the last holds the model alone."""
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "onebit_adam")
    module = net()
    model, optimizer = fabric.setup(module, fabric.strategy.optimizer(module.parameters(), lr=1e-2, freeze_step=2))
    found = []
    for step in range(4):
        train(fabric, model, optimizer, 1, start=step)
        whole = {"optimizer": optimizer} if step < 3 else {}
        fabric.save(f"{folder}/last.ckpt", {"model": model, "step": step, **whole})
        found.append(len(list(Path(folder).glob("last.ckpt.onebit/*"))))
        if step == 2:
            state = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(f"{folder}/last.ckpt", state)
            assert state["step"] == 2 and optimizer.residual_state_dict()["tensors"]["worker_residual"].any()
        fabric.barrier()  # before a rank that is ahead writes the next
    return found


def test_shards_of_an_overwritten_checkpoint_go(tmp_path: Path) -> None:
    for found in run_ranks(overwriting, 2, str(tmp_path)):
        assert found == [0, 1, 1, 0], "the first save is in the warm-up, when ranks do not differ"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def frozen_by_hand(rank: int, world: int) -> tuple[str, list[bool], list[str]]:
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "onebit_adam")
    module = net(norm=True)
    model, optimizer = fabric.setup(module, fabric.strategy.optimizer(module.parameters(), lr=1e-2))
    train(fabric, model, optimizer, 2)
    optimizer.freeze()
    dense = []
    for step in range(3):
        train(fabric, model, optimizer, 1, start=10 + step)
        dense.append(optimizer.ledger.last.dense)
    return fabric.strategy.onebit_optimizers[0].phase.value, dense, same_on_all_ranks(dict(module.named_parameters()))


def test_freeze_through_fabrics_wrapper_reaches_the_optimizer() -> None:
    for phase, dense, different in run_ranks(frozen_by_hand, 2):
        assert phase == "compressed"
        assert dense == [False, False, False]
        assert different == []


def overflow(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    precision = importlib.import_module("lightning.fabric.plugins.precision").MixedPrecision
    enter(rank)
    plugin = precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    fabric = launched("lightning.fabric", "onebit_adam", plugins=[plugin])
    module = net()
    model, optimizer = fabric.setup(module, fabric.strategy.optimizer(module.parameters(), lr=1e-2, freeze_step=2))
    train(fabric, model, optimizer, 4)
    before = weights(module)
    x = batches(1)[0]
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    fabric.backward(loss * (torch.inf if rank == 1 else 1.0))
    optimizer.step()
    optimizer.zero_grad()
    skipped = differing(before, weights(module))
    train(fabric, model, optimizer, 2, start=20)
    return {
        "skipped": skipped,
        "count": fabric.strategy.onebit_optimizers[0].skipped_steps,
        "steps": fabric.strategy.onebit_optimizers[0].steps,
        "scale": plugin.scaler.get_scale(),
        "different": same_on_all_ranks(dict(module.named_parameters())),
    }


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    found = run_ranks(overflow, 2)
    assert found[0] == found[1]
    assert found[0] == {"skipped": [], "count": 1, "steps": 6, "scale": 2.0, "different": []}


def refused(rank: int, world: int) -> dict[str, str]:
    os.environ["LOCAL_RANK"] = str(rank)
    from lightning_onebit.fabric import OnebitStrategy

    def attempt(strategy: Any, make: Any, clip: dict[str, Any] | None = None) -> str:
        try:
            fabric = launched("lightning.fabric", strategy)
            module = net()
            model, optimizer = fabric.setup(module, make(module.parameters()))
            if clip is not None:
                fabric.backward(model(torch.ones(2, 6)).sum())
                fabric.clip_gradients(model, optimizer, **clip)
        except (TypeError, ValueError) as error:
            return str(error)
        return "nothing"

    return {
        "plain": attempt("onebit_adam", torch.optim.AdamW),
        "other": attempt("onebit_lamb", ob.OnebitAdam),
        "nodes": attempt(OnebitStrategy(ranks_per_node=3), ob.OnebitAdam),
        "norm": attempt("onebit_adam", ob.OnebitAdam, {"max_norm": 1.0, "norm_type": 1.0}),
        "sparse": attempt(
            "onebit_adam", lambda _: ob.OnebitAdam(torch.nn.Linear(1, 1).parameters(), overlap="nothing")
        ),
    }


def test_misuse_is_refused_with_the_remedy() -> None:
    for found in run_ranks(refused, 2):
        assert "AdamW cannot be trained by the Fabric strategy 'onebit_adam'" in found["plain"]
        assert "fabric.strategy.optimizer(params, ...)" in found["plain"]
        assert "`lightning_onebit.OnebitLamb(params, ...)`" in found["other"]
        assert "ranks_per_node=3 does not divide the 2 ranks" in found["nodes"]
        assert "norm_type=1.0" in found["norm"]
        assert "overlap='nothing' is unknown" in found["sparse"]


@pytest.mark.parametrize(("package", "package_first"), [(FABRICS[0], False), (FABRICS[1], True)])
def test_names_are_registered_whichever_is_imported_first(package: str, package_first: bool) -> None:
    lines = [f"from {package} import Fabric", "import lightning_onebit as ob"]
    program = "\n".join(lines if package_first else lines[::-1]) + (
        "\nimport sys\n"
        "from lightning_onebit.fabric import OnebitStrategy\n"
        "for name in ob.available_strategies():\n"
        "    strategy = Fabric(accelerator='cpu', devices=2, strategy=name).strategy\n"
        "    assert type(strategy) is OnebitStrategy, type(strategy)\n"
        f"assert {({*FABRICS} - {package}).pop()!r} not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
