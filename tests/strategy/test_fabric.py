"""Lightning Fabric: the same optimizers in the user's own loop, in both Fabric packages."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import counting, python, run_ranks
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
        model.eval()
        with torch.no_grad():
            model(batches(1)[0])  # DDP shares buffers in the next forward
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
        options = {"freeze_step": 3, "local_steps": ob.LocalSteps(double_every=2)}

    def run(saved: bool) -> tuple[Any, Any, Any]:
        fabric = launched(package, algorithm)
        module = net()
        made = fabric.strategy.optimizer(
            module.parameters(), lr=1e-2, exchange=ob.ExchangeOptions(block_size=32), **options
        )
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


# ----- one model after another ----------------------------------------------------------------------------------------------------


def folds(rank: int, world: int, algorithm: str, deletes: bool, folder: str) -> dict[str, Any]:
    """Four folds; only rank 0 collects garbage of itself. Of each: what its last dense step sends, what there is of earlier folds."""
    os.environ["LOCAL_RANK"] = str(rank)
    gc.disable()
    fabric = launched("lightning.fabric", algorithm)
    found: dict[str, Any] = {"sent": [], "served": [], "alive": [], "threads": [], "different": []}
    overlap: Any = "backward" if algorithm == "onebit_lamb" else "step"
    old: list[Any] = []
    for fold in range(4):
        module = net()
        # some folds end in their warm-up
        exchange = ob.ExchangeOptions(block_size=32, overlap=overlap)
        freeze_step = 5 if fold % 2 else 100
        optimizer: Any = fabric.strategy.optimizer(
            module.parameters(), lr=1e-2, freeze_step=freeze_step, exchange=exchange
        )
        model, optimizer = fabric.setup(module, optimizer)
        if deletes:
            found["alive"].append(sum(ref() is not None for ref in old))
        train(fabric, model, optimizer, 3)
        if not deletes:
            gc.collect()  # a module that was set up is in a cycle
            found["alive"].append(sum(ref() is not None for ref in old))
        with counting() as counted:
            train(fabric, model, optimizer, 1, start=3)
        found["sent"].append([(seen.op, seen.input_bytes) for seen in counted.seen])
        train(fabric, model, optimizer, 6, start=4)
        state = {"model": model, "optimizer": optimizer}
        fabric.save(f"{folder}/fold.ckpt", state)
        train(fabric, model, optimizer, 2, start=10)
        straight = weights(module)
        fabric.load(f"{folder}/fold.ckpt", state)
        train(fabric, model, optimizer, 2, start=10)
        found["different"] += [*differing(straight, weights(module)), *same_on_all_ranks(dict(module.state_dict()))]
        found["served"].append(
            [served is optimizer.optimizer for served in fabric.strategy.onebit_optimizers]
            + [optimizer.ledger.compressed_steps > 0]
        )
        found["threads"].append(len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0)
        old += [weakref.ref(thing) for thing in (optimizer.optimizer, *module.parameters())]
        del state
        if deletes:
            del module, model, optimizer
            if rank == 0:
                gc.collect()
    return found


@pytest.mark.parametrize("deletes", [True, False])
@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb"])
def test_folds_that_are_over_are_freed_and_send_nothing(algorithm: str, deletes: bool, tmp_path: Path) -> None:
    """Deleted before the next set-up, or replaced by it; collected by one rank alone, or by none."""
    for found in run_ranks(folds, 2, algorithm, deletes, str(tmp_path)):
        assert found["alive"] == [0, 0, 0, 0]
        assert found["sent"] == [found["sent"][0]] * 4 and found["sent"][0]
        assert found["served"] == [[True, fold % 2 == 1] for fold in range(4)]
        assert found["threads"][3] == found["threads"][0], "process groups have ended, with their threads"
        assert found["different"] == []


def several(rank: int, world: int) -> dict[str, Any]:
    """Two live optimizers; then one is dropped, which rank 0 collects at once and rank 1 keeps; then a third comes."""
    os.environ["LOCAL_RANK"] = str(rank)
    gc.disable()
    fabric = launched("lightning.fabric", "onebit_adam")
    kept: list[Any] = []

    def made(freeze_step: int) -> tuple[Any, Any, Any]:
        module = net()
        optimizer = fabric.strategy.optimizer(
            module.parameters(), lr=1e-2, freeze_step=freeze_step, exchange=ob.ExchangeOptions(block_size=32)
        )
        return module, *fabric.setup(module, optimizer)

    (one, first, optimizer), (two, second, other) = made(4), made(100)
    start = [weights(one), weights(two)]
    for step in range(6):
        train(fabric, first, optimizer, 1, start=step)
        train(fabric, second, other, 1, start=step)
    found: dict[str, Any] = {
        "moved": [len(differing(*pair)) for pair in zip(start, [weights(one), weights(two)], strict=True)],
        "apart": same_on_all_ranks({f"{m}.{k}": v for m in (one, two) for k, v in m.named_parameters()}),
        "compressed": (optimizer.ledger.compressed_steps, other.ledger.compressed_steps),
        "served": [len(fabric.strategy.onebit_optimizers)],
    }
    if rank == 1:
        kept.append(other)
    gone = [weakref.ref(p) for p in two.parameters()]
    del two, second, other
    if rank == 0:
        gc.collect()
    train(fabric, first, optimizer, 2, start=6)  # nobody has agreed yet: all ranks still average it
    found["served"].append(len(fabric.strategy.onebit_optimizers))
    three, third, another = made(3)
    for step in range(5):
        train(fabric, third, another, 1, start=step)
        with counting() as counted:
            train(fabric, first, optimizer, 1, start=8 + step)
    last = optimizer.ledger.last
    found["sent"] = (counted.bytes_sent, last.bytes_sent + last.control_bytes)
    found["served"].append(len(fabric.strategy.onebit_optimizers))
    found["alive"] = [sum(ref() is not None for ref in gone)]
    kept.clear()
    made(3)
    found["alive"].append(sum(ref() is not None for ref in gone))
    found["order"] = [
        served is mine.optimizer
        for served, mine in zip(fabric.strategy.onebit_optimizers, (optimizer, another), strict=False)
    ]
    found["apart"] += same_on_all_ranks({f"{m}.{k}": v for m in (one, three) for k, v in m.named_parameters()})
    return found


def test_ranks_agree_which_of_several_optimizers_a_backward_concerns() -> None:
    for rank, found in enumerate(run_ranks(several, 2)):
        assert found["moved"] == [4, 4]
        assert found["apart"] == []
        assert found["compressed"] == (2, 0)
        assert found["served"] == [2, 2, 2], "one that is gone on a rank cannot step on the others"
        assert found["sent"][0] == found["sent"][1] > 0
        assert found["alive"] == [4 * rank, 0]
        assert found["order"] == [True, True]


# ----- several models at a time -----------------------------------------------------------------------------------------------------


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))


def two_models(fabric: Any, dense: bool = False, overlap: Any = "step") -> list[tuple[Any, Any, Any]]:
    """Two modules, a bucket per tensor; of each the last layer may be a ``compress=False`` group."""
    made = []
    for _ in range(2):
        module = net()
        groups = [
            {"params": list(module[0].parameters())},
            {"params": list(module[2].parameters()), "compress": not dense},
        ]
        exchange = ob.ExchangeOptions(block_size=32, bucket_mb=32 * 4 / 2**20, overlap=overlap)
        optimizer = fabric.strategy.optimizer(groups, lr=1e-2, freeze_step=2, exchange=exchange)
        made.append((module, *fabric.setup(module, optimizer)))
    return made


# (model, micro-batch, whether it is the last before the step) in the order of their backwards; None: both step
PROGRAMS: dict[str, list[tuple[int, int, bool] | int]] = {
    "in turn": [(0, 0, True), 0, (1, 0, True), 1],
    "accumulated": [(0, 0, False), (0, 1, True), 0, (1, 0, False), (1, 1, True), 1],
    "backwards first": [(0, 0, False), (1, 0, False), (0, 1, True), (1, 1, True), 0, 1],
}


def run_program(made: list[tuple[Any, Any, Any]], fabric: Any, program: str, named: bool, through: bool) -> list[Any]:
    """Trains for five steps; returns, of each backward with which gradients leave, which share of both models' buckets has left."""
    sent: list[Any] = []
    for step in range(5):
        xs = batches(2, 2 * step)
        for item in PROGRAMS[program]:
            if isinstance(item, int):
                made[item][2].step()
                for _, _, optimizer in made if through else made[item : item + 1]:
                    optimizer.zero_grad()
                continue
            number, batch, last = item
            _, model, _ = made[number]
            with fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, xs[batch])
                if through and number == 0:  # as a generator's: the other model gets gradients too
                    loss = loss + made[1][1](torch.nn.functional.pad(model(xs[batch]), (0, 3))).square().mean()
                fabric.backward(loss, **({"model": model} if named else {}))
            if last and step > 2:
                served = fabric.strategy.onebit_optimizers
                early = [o._engine.early for o in served]
                sent.append([e._launched / len(e._buckets) if e.open else None for e in early])
    return sent


def overlapped(rank: int, world: int, program: str, named: bool, dense: bool, through: bool) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    found: dict[str, Any] = {"apart": []}
    trained = []
    for overlap in ("step", "backward"):
        fabric = launched("lightning.fabric", "onebit_adam")
        made = two_models(fabric, dense=dense, overlap=overlap)
        found["sent"] = run_program(made, fabric, program, named, through)
        trained.append({f"{m}.{k}": v for m, (module, _, _) in enumerate(made) for k, v in weights(module).items()})
        found["apart"] += same_on_all_ranks(trained[-1])
        found["compressed"] = [optimizer.ledger.compressed_steps for _, _, optimizer in made]
    found["different"] = differing(*trained)
    return found


@pytest.mark.parametrize(
    ("program", "named", "dense", "through"),
    [
        ("accumulated", False, False, False),
        ("accumulated", True, True, False),
        ("in turn", True, True, True),
        ("backwards first", True, False, False),
    ],
)
def test_gradients_of_several_models_leave_in_their_own_backward(
    program: str, named: bool, dense: bool, through: bool
) -> None:
    """Bit for bit as with overlap="step"; a backward whose model is named arms no other."""
    for found in run_ranks(overlapped, 2, program, named, dense, through):
        assert found["apart"] == [] and found["different"] == []
        assert found["compressed"] == [3, 3]
        first, second = found["sent"][:2]
        assert first == [1.0, None if named else 0.0]
        assert second == [1.0 if program == "backwards first" else None if named else 0.0, 1.0]


def uneven(rank: int, world: int) -> list[str]:
    """Both backwards before both steps, where one rank has no gradients of the buckets that leave first."""
    os.environ["LOCAL_RANK"] = str(rank)
    from lightning_onebit.fabric import OnebitStrategy

    fabric = launched("lightning.fabric", OnebitStrategy(timeout=timedelta(seconds=15)))
    made = two_models(fabric, overlap="backward")
    for step in range(5):
        (x,) = batches(1, step)
        for module, model, _ in made:
            short = rank == 1 and step > 2
            fabric.backward(module[0](x).square().mean() if short else loss_of(model, x), model=model)
        for _, _, optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return same_on_all_ranks(
        {f"{m}.{k}": v for m, (module, _, _) in enumerate(made) for k, v in weights(module).items()}
    )


def test_a_rank_without_some_gradients_keeps_nobody_waiting_in_backward() -> None:
    assert run_ranks(uneven, 2) == [[], []]


def unnamed(rank: int, world: int, program: str, dense: bool) -> str:
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "onebit_adam")
    with pytest.raises(RuntimeError) as caught:
        run_program(two_models(fabric, dense=dense, overlap="backward"), fabric, program, False, False)
    return str(caught.value)


@pytest.mark.parametrize(("program", "dense"), [("in turn", True), ("backwards first", False)])
def test_gradients_that_left_in_the_backward_of_an_unnamed_model_are_refused_with_the_remedy(
    program: str, dense: bool
) -> None:
    for said in run_ranks(unnamed, 2, program, dense):
        assert "step 3: overlap='backward' has sent the gradients of an earlier backward" in said
        assert "fabric.backward(loss, model=model)" in said and "fabric.no_backward_sync(model)" in said


def shown_beside(rank: int, world: int) -> dict[str, list[str]]:
    """Which parameters differ between ranks, with two models and a parameter of no model between synchronisations of 0/1 Adam."""
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "zero_one_adam")
    options: Any = {"lr": 1e-2, "freeze_step": 3, "local_steps": ob.LocalSteps(double_every=2)}
    options["exchange"] = ob.ExchangeOptions(block_size=32)
    made = [
        (module, *fabric.setup(module, fabric.strategy.optimizer(module.parameters(), **options)))
        for module in (net(), net())
    ]
    scale = torch.nn.Parameter(torch.ones(8, 3))
    scaling = fabric.setup_optimizers(fabric.strategy.optimizer([scale], **options))
    for x in batches(9):
        for _, model, optimizer in made:
            fabric.backward((scale * model(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        scaling.step()
        scaling.zero_grad()
    assert all(optimizer.mid_local for optimizer in fabric.strategy.onebit_optimizers)

    def apart() -> list[str]:
        named = {"first": made[0][0][0].weight, "second": made[1][0][0].weight, "scale": scale}
        return same_on_all_ranks({name: p.detach().clone() for name, p in named.items()})

    (x,) = batches(1, 9)
    found = {"stepped": apart()}
    with torch.no_grad():
        made[0][1](x)
    found["evaluated"] = apart()
    made[0][1](x)
    found["forward of the first"] = apart()
    made[1][1](x)
    found["forward of both"] = apart()
    return found


def test_a_forward_shows_a_ranks_own_weights_of_no_other_model() -> None:
    for found in run_ranks(shown_beside, 2):
        assert found == {
            "stepped": [],
            "evaluated": [],
            "forward of the first": ["first", "scale"],
            "forward of both": ["first", "second", "scale"],
        }


def saved_within_a_step(rank: int, world: int, folder: str) -> list[bool]:
    """0/1 Adam between synchronisations: saved after a forward, and after a backward that only accumulates."""
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "zero_one_adam")
    module = net()
    options: Any = {"lr": 1e-2, "freeze_step": 3, "local_steps": ob.LocalSteps(double_every=2)}
    options["exchange"] = ob.ExchangeOptions(block_size=32)
    model, optimizer = fabric.setup(module, fabric.strategy.optimizer(module.parameters(), **options))
    train(fabric, model, optimizer, 9)
    assert optimizer.mid_local
    shared = {name: p.detach().clone() for name, p in module.named_parameters()}
    (x,) = batches(1)
    found = []
    for name in ("forward", "accumulated"):
        with fabric.no_backward_sync(model):
            loss = model(x).sum()
            if name == "accumulated":
                fabric.backward(loss)
        fabric.save(f"{folder}/{name}.ckpt", {"model": model, "optimizer": optimizer})
        saved = torch.load(f"{folder}/{name}.ckpt", weights_only=True)["model"]
        found.append(all(torch.equal(saved[key], value) for key, value in shared.items()))
        # and training goes on from the rank's own weights, as if nobody had saved
        found.append(not same_on_all_ranks(shared) and bool(same_on_all_ranks(dict(module.named_parameters()))))
    return found


def test_fabric_saves_the_shared_model_within_a_step_too(tmp_path: Path) -> None:
    for found in run_ranks(saved_within_a_step, 2, str(tmp_path), timeout=60):
        assert found == [True] * 4


def released(rank: int, world: int, folder: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = launched("lightning.fabric", "zero_one_adam")
    found: dict[str, Any] = {"messages": [], "apart": []}
    module = net()
    options: Any = {"lr": 1e-2, "freeze_step": 3, "local_steps": ob.LocalSteps(double_every=2)}
    options["exchange"] = ob.ExchangeOptions(block_size=32)
    model, optimizer = fabric.setup(module, fabric.strategy.optimizer(module.parameters(), **options))
    _, second = fabric.setup(net(), fabric.strategy.optimizer([torch.nn.Parameter(torch.ones(3))], lr=1.0))
    try:
        fabric.strategy.release(optimizer if rank == 0 else second)
    except ob.comm.PlanMismatch as error:
        found["messages"].append(str(error))
    train(fabric, model, optimizer, 9)
    groups = len(dist.distributed_c10d._world.pg_map)
    fabric.strategy.release(second)
    fabric.strategy.release(optimizer)
    found["groups"] = groups - len(dist.distributed_c10d._world.pg_map)
    found["served"] = len(fabric.strategy.onebit_optimizers)
    for wrong in (optimizer, torch.optim.SGD(module.parameters())):
        try:
            fabric.strategy.release(wrong)
        except ValueError as error:
            found["messages"].append(str(error))
    found["apart"] += same_on_all_ranks(dict(module.named_parameters()))
    with counting() as counted:
        fabric.backward(model(torch.ones(2, 6)).sum())
    found["seen"] = len(counted.seen)
    # what differs by rank can be saved still
    fabric.save(f"{folder}/released.ckpt", {"model": model, "optimizer": optimizer})
    found["saved"] = len(list(Path(folder).glob("released.ckpt.onebit/*/rank-*.pt")))
    # once more, and twice: it keeps its state and its place
    again: Any = None
    for _ in range(2):
        again = fabric.setup_optimizers(optimizer.optimizer)
    train(fabric, model, again, 6, start=9)
    found["again"] = (again.steps, len(fabric.strategy.onebit_optimizers), optimizer.optimizer is again.optimizer)
    found["groups again"] = groups - len(dist.distributed_c10d._world.pg_map)
    found["apart"] += same_on_all_ranks(dict(module.named_parameters()))
    again.synchronise()
    found["apart"] += same_on_all_ranks(dict(module.named_parameters()))
    # a new one for the same model: the old one's hooks are gone from its parameters
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    old = weakref.ref(again.optimizer)
    made: Any = fabric.strategy.optimizer(module.parameters(), **options)
    again = fabric.setup_optimizers(made)
    del optimizer, made
    train(fabric, model, again, 6)
    found["old"] = old() is None
    found["hooks"] = hooks, [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    return found


def test_an_optimizer_is_released_and_set_up_again(tmp_path: Path) -> None:
    for found in run_ranks(released, 2, str(tmp_path)):
        assert found["saved"] == 2
        mismatch, twice, plain = found["messages"]
        assert "optimizer 0 of 2" in mismatch and "optimizer 1 of 2" in mismatch
        assert "FabricZeroOneAdam" not in twice and "ZeroOneAdam is none of the 0 optimizers" in twice
        assert "SGD is none of the 0 optimizers" in plain
        assert (found["groups"], found["served"], found["seen"]) == (2, 0, 0)
        assert found["again"] == (15, 1, True) and found["groups again"] == 1
        assert found["old"]
        assert found["apart"] == []
        assert found["hooks"] == ([1] * 4, [1] * 4)


def test_a_strategy_can_be_sent_to_the_processes_it_starts() -> None:
    from lightning_onebit.fabric import OnebitStrategy

    strategy = pickle.loads(pickle.dumps(OnebitStrategy("onebit_lamb", ranks_per_node=1)))
    assert strategy.onebit_optimizers == [] and strategy._ranks_per_node == 1


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
            "onebit_adam",
            lambda _: ob.OnebitAdam(torch.nn.Linear(1, 1).parameters(), exchange=ob.ExchangeOptions(overlap="nothing")),
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
        "for name in [n for n in ob.available_strategies() if not n.endswith('_sharded')]:\n"
        "    strategy = Fabric(accelerator='cpu', devices=2, strategy=name).strategy\n"
        "    assert type(strategy) is OnebitStrategy, type(strategy)\n"
        f"assert {({*FABRICS} - {package}).pop()!r} not in sys.modules\n"
    )
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
