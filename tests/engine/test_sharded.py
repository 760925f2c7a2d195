"""Parameters that are DTensors: sharded within a replica (FSDP2, tensor parallel), exchanged between replicas.

Every run is 2 replicas of 2 shards on four processes; ranks 0 and 1 are the first replica.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from optim_support import CLASSES
from torch import Tensor, nn

from lightning_onebit.algorithms import LocalSteps, OnebitAdam
from lightning_onebit.comm import PlanMismatch
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine import sharded as engine_sharded

if tuple(map(int, torch.__version__.split(".")[:2])) < engine_sharded.OLDEST_TORCH:
    pytest.skip("this torch is older than the sharded part needs", allow_module_level=True)

STEPS = 12
LOCAL = LocalSteps(max_gap=4, double_every=2)
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "onebit_adam": ("onebit_adam", {"freeze_step": 3, "refresh": 4}),
    "onebit_adam, as published": ("onebit_adam", {"freeze_step": 3, "recipe": "published"}),
    "onebit_lamb": ("onebit_lamb", {"freeze_step": 3, "weight_decay": 0.1}),
    "zero_one_adam": ("zero_one_adam", {"freeze_step": 4, "_doubling": 2, "local_steps": LOCAL}),
    "binsgdm": ("binsgdm", {}),
    "binsgdm, as published": ("binsgdm", {"recipe": "published"}),
    "onebit_sgd": ("onebit_sgd", {"momentum": 0.9}),
}
#: whose bits do not depend on where blocks lie
EXACT = [rule for rule in RULES if not rule.startswith("binsgdm")]


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def even() -> nn.Module:
    """All shards are multiples of the block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64))


class Uneven(nn.Module):
    """Shards of 2 and 1 rows, and of none; a part that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sharded = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 3))
        self.gain = nn.Linear(3, 1)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.sharded(x))
        return x * self.gain(x)


def shard(module: nn.Module, of: Any, **how: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    parts = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    for part in parts:
        if not (isinstance(module, Uneven) and part is module.norm):
            fully_shard(part, mesh=of["shard"], **how)
    return module if isinstance(module, Uneven) else fully_shard(module, mesh=of["shard"], **how)


def make(rule: str, params: Any, group: Any, exchange: dict[str, Any] | None = None, **more: Any) -> Any:
    algorithm, options = RULES[rule]
    how = {"block_size": 32, "timeout": 30.0, **(exchange or {}), "process_group": group}
    return CLASSES[algorithm](params, lr=1e-2, exchange=ExchangeOptions(**how), **options, **more)


def batch(step: int, worker: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(module: nn.Module, step: int, worker: int) -> Tensor:
    width = 24 if isinstance(module, Uneven) else 64
    return (module(batch(step, worker, width).to(next(module.parameters()).device)) - 1).square().mean()


def backward(module: nn.Module, step: int, workers: range) -> None:
    for worker in workers:
        (loss_of(module, step, worker) / len(workers)).backward()


def whole(module: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in module.parameters()]


def same_on(values: list[Tensor], group: Any) -> bool:
    """Whether all ranks of a group have the same tensors, bit for bit."""
    flat = torch.cat([v.reshape(-1) for v in values]) if values else torch.zeros(0)
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, flat, group=group)
    return all(torch.equal(flat, other) for other in others)


def local(module: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in module.parameters()]


# ----- the rules ---------------------------------------------------------------------------------------------------------


def beside_whole_models(rank: int, world: int, rules: list[str], steps: int) -> dict[str, Any]:
    """Trains sharded replicas, and whole ones on the means of the same nodes."""
    of = mesh()
    group, node, result = of["replicate"].get_group(), rank // 2, {}
    for rule in rules:
        sharded, plain = shard(even(), of), even()
        ours, theirs = make(rule, sharded.parameters(), group), make(rule, plain.parameters(), group)
        replicas, kinds = [], []
        for step in range(steps):
            backward(sharded, step, range(rank, rank + 1))
            backward(plain, step, range(2 * node, 2 * node + 2))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            kinds.append(ours.phase.value)
            replicas.append(ours.mid_local or same_on(local(sharded), group))
        for optimizer in (ours, theirs):
            optimizer.synchronise()
        pairs = list(zip(whole(sharded), whole(plain), strict=True))
        result[rule] = {
            "replicas": all(replicas),
            "equal": all(torch.equal(a, b) for a, b in pairs),
            "apart": max(float((a - b).abs().max()) for a, b in pairs),
            "moved": max(float((a - b).abs().max()) for a, b in zip(whole(plain), whole(even()), strict=True)),
            "phases": sorted(set(kinds)),
            "sent": ours.ledger.total.bytes_inter / theirs.ledger.total.bytes_inter,
        }
    return result


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(beside_whole_models, 4, list(RULES), STEPS, timeout=120)


def test_replicas_are_equal_bit_for_bit_after_every_synchronisation(trained: Any) -> None:
    for rule in RULES:
        assert all(result[rule]["replicas"] for result in trained), rule
        assert trained[0][rule]["moved"] > 1e-3, rule


def test_shards_of_whole_blocks_train_as_whole_models_do_on_the_means_of_nodes(trained: Any) -> None:
    for rule in EXACT:
        assert all(result[rule]["equal"] for result in trained), (rule, [result[rule]["apart"] for result in trained])
        assert len(trained[0][rule]["phases"]) == (1 if rule == "onebit_sgd" else 2)


def test_votes_are_drawn_apart_for_other_shards(trained: Any) -> None:
    """Not the draws of the whole model, but steps of the same size."""
    for rule in ("binsgdm", "binsgdm, as published"):
        assert 0 < trained[0][rule]["apart"] <= 2 * STEPS * 1e-2 + 1e-6


def test_a_rank_sends_its_share_of_the_model(trained: Any) -> None:
    for result in trained:
        for rule in RULES:
            assert 0.4 < result[rule]["sent"] < 0.62, (rule, result[rule]["sent"])


def on_a_gpu(rank: int, world: int, rules: list[str], directory: str) -> dict[str, Any]:
    """Two replicas share a device over gloo, or one exchanges with itself over NCCL; beside parameters that are no DTensors."""
    if world == 1:
        dist.destroy_process_group()
        dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=0, world_size=1)
    of = dist.device_mesh.init_device_mesh("cuda", (world, 1), mesh_dim_names=("replicate", "shard"))
    group, result = of["replicate"].get_group(), {}
    for rule in rules:
        sharded, plain = shard(even().to("cuda:0"), of), even().to("cuda:0")
        exchange = {"kernels": "cuda", "_alone": world == 1}
        ours, theirs = (make(rule, module.parameters(), group, exchange) for module in (sharded, plain))
        for step in range(10):
            for module, optimizer in ((sharded, ours), (plain, theirs)):
                backward(module, step, range(rank, rank + 1))
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in (ours, theirs):
            optimizer.synchronise()
        equal = all(torch.equal(a, b) for a, b in zip(whole(sharded), whole(plain), strict=True))
        result[rule] = equal, type(next(sharded.parameters())).__name__
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2], ids=["nccl", "gloo"])
def test_shards_on_a_gpu_train_as_tensors_that_are_not_sharded(world: int, tmp_path: Path) -> None:
    for result in run_ranks(on_a_gpu, world, list(RULES), str(tmp_path), timeout=120):
        assert result == dict.fromkeys(RULES, (True, "DTensor"))


# ----- uneven, empty and plain parameters --------------------------------------------------------------------------------


def of_uneven(rank: int, world: int, rules: list[str]) -> dict[str, Any]:
    of, result = mesh(), {}
    replicas, node = of["replicate"].get_group(), of["shard"].get_group()
    for rule in rules:
        module = shard(Uneven(), of)
        optimizer = make(rule, module.parameters(), replicas)
        losses = []
        for step in range(12):
            backward(module, step % 3, range(rank, rank + 1))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(float(sum(loss_of(module, s, rank) for s in range(3))))
            for part in module.modules():  # FSDP2 keeps what it has gathered until the next backward
                if hasattr(part, "reshard"):
                    part.reshard()
        optimizer.synchronise()
        plain = [p.detach() for p in module.norm.parameters()]
        result[rule] = {
            "replicas": same_on(local(module), replicas),
            "plain": same_on(plain, node),
            "moved": bool((plain[0] != 1).any()),
            "losses": losses,
            "empty": min(p.numel() for p in local(module)),
        }
    return result


def test_uneven_and_empty_shards_train_beside_parameters_that_are_not_sharded() -> None:
    """Gradients of the latter differ within a replica, where nobody else averages them."""
    rules = [rule for rule in RULES if "published" not in rule]
    ranks = run_ranks(of_uneven, 4, rules, timeout=120)
    assert [rank["binsgdm"]["empty"] for rank in ranks] == [1, 0, 1, 0]
    for rule in rules:
        for rank in ranks:
            assert rank[rule]["replicas"] and rank[rule]["plain"] and rank[rule]["moved"], rule
            assert rank[rule]["losses"][-1] < rank[rule]["losses"][0], rule


# ----- what is agreed over all ranks -------------------------------------------------------------------------------------


def of_bad_values(rank: int, world: int, rule: str, exchange: dict[str, Any]) -> list[Any]:
    """A shard of one replica is not finite in a dense and in a compressed step: what changes, and whether training goes on."""
    of = mesh()
    module = shard(even(), of)
    optimizer = make(rule, module.parameters(), of["replicate"].get_group(), exchange)
    seen: list[Any] = []
    for step in range(8):
        backward(module, step, range(rank, rank + 1))
        if step in (1, 5) and rank == 3:
            next(module.parameters()).grad.to_local()[0, 0] = float("nan")
        before = [*local(module), *(v for s in optimizer.residual_state_dict()["tensors"].values() for v in [s])]
        before = [value.clone() for value in before]
        try:
            optimizer.step()
        except FloatingPointError as error:
            seen.append(f"step {step}: {error}")
            return seen
        after = [*local(module), *optimizer.residual_state_dict()["tensors"].values()]
        if step in (1, 5):
            same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            seen.append((optimizer.skipped_steps, same))
        optimizer.zero_grad()
    seen.append((optimizer.steps, same_on(local(module), of["replicate"].get_group())))
    return seen


def of_bad_values_everywhere(rank: int, world: int) -> dict[str, Any]:
    return {rule: of_bad_values(rank, world, rule, {}) for rule in RULES if "published" not in rule}


def test_a_value_that_is_not_finite_in_one_shard_skips_the_step_on_all_ranks() -> None:
    for seen in run_ranks(of_bad_values_everywhere, 4):
        assert len(seen) == 5
        for rule, steps in seen.items():
            assert steps == [(1, True), (2, True), (6, True)], rule


def test_with_overlap_too() -> None:
    for seen in run_ranks(of_bad_values, 4, "onebit_adam", {"overlap": "backward"}):
        assert seen == [(1, True), (2, True), (6, True)]


def test_or_raises_on_all_ranks() -> None:
    for seen in run_ranks(of_bad_values, 4, "onebit_adam", {"on_nonfinite": "raise"}):
        assert len(seen) == 1 and str(seen[-1]).startswith("step 1")


def of_norms(rank: int, world: int) -> dict[str, Any]:
    of = mesh()
    group, result = of["replicate"].get_group(), {}
    module = shard(Uneven(), of)
    optimizer = make("onebit_adam", module.parameters(), group)
    for step in range(5):
        backward(module, step, range(rank, rank + 1))
        grads = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in module.parameters()
        ]
        for p, grad in zip(module.parameters(), grads, strict=True):
            if not hasattr(p, "full_tensor"):  # averaged over the node by the optimizer
                dist.all_reduce(grad, group=of["shard"].get_group())
                grad /= 2
        flat = torch.cat([grad.reshape(-1) for grad in grads]).double()
        nodes = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(nodes, flat, group=group)
        dense = optimizer.next_step_is_dense
        mean = torch.stack(nodes).mean(0).norm() if dense else (torch.stack(nodes).square().sum() / 2).sqrt()
        norm = float(optimizer.clip_grad_norm_(0.1))
        result[step] = (dense, norm, float(mean))
        clipped = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
        result[step] += (float(torch.cat([c.reshape(-1) for c in clipped]).norm()),)
        optimizer.step()
        optimizer.zero_grad()
    result["replicas"] = same_on(local(module), group)
    return result


def test_the_global_norm_counts_every_element_once() -> None:
    ranks = run_ranks(of_norms, 4)
    for rank in ranks:
        assert rank["replicas"]
        for step in range(5):
            dense, norm, expected, clipped = rank[step]
            assert norm == pytest.approx(expected, rel=1e-5)
            assert norm == ranks[0][step][1]
            if dense:
                assert clipped == pytest.approx(min(0.1, norm), rel=1e-3)
    assert {rank[step][0] for rank in ranks for step in range(5)} == {True, False}


class Rare(nn.Module):
    """An embedding of which ``known`` rows of 8 are asked for before ``late``, and a part that is used from then on."""

    def __init__(self, known: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.known, self.words = known, nn.Embedding(8, 64)
        self.usual = nn.Linear(64, 64)
        self.unusual = nn.Linear(64, 64)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.usual(self.words(x % (8 if late else self.known)))
        return self.unusual(x) if late else x


def of_late(rank: int, world: int, rule: str, known: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    of = mesh()
    group, node = of["replicate"].get_group(), rank // 2
    sharded, plain = Rare(known), Rare(known)
    for part in (sharded.words, sharded.usual, sharded.unusual):
        fully_shard(part, mesh=of["shard"])
    ours, theirs = make(rule, sharded.parameters(), group), make(rule, plain.parameters(), group)
    late, cold = [], []
    for step in range(20):
        for module, workers in ((sharded, [rank]), (plain, [2 * node, 2 * node + 1])):
            for worker in workers:
                words = torch.randint(0, 8, (16,), generator=torch.Generator().manual_seed(100 * step + worker))
                # the new part is used in the first replica alone
                out = module(words, step >= 8 and node == 0)
                (out - 1).square().mean().div(len(workers)).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        late.append((sorted(ours._engine.kept.late), sorted(theirs._engine.kept.late)))
        cold.append((sorted(ours._engine.kept.cold), sorted(theirs._engine.kept.cold)))
    for optimizer in (ours, theirs):
        optimizer.synchronise()
    pairs = zip(whole(sharded), whole(plain), strict=True)
    return {
        "late": late,
        "cold": cold,
        "apart": [float((a - b).abs().max()) for a, b in pairs],
        "replicas": same_on(local(sharded), group),
    }


LATE = ["onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm"]


def of_late_everywhere(rank: int, world: int, rules: list[str], known: int) -> dict[str, Any]:
    return {rule: of_late(rank, world, rule, known) for rule in rules}


@pytest.mark.parametrize("known", [4, 3], ids=["half of the rows are cold", "most are"])
def test_what_is_cold_or_late_is_a_whole_parameter(known: int) -> None:
    """A shard of an embedding without a gradient is not a tensor without one; a part's first gradient is heard of on all ranks."""
    for rule, ranks in of_rules(run_ranks(of_late_everywhere, 4, LATE, known, timeout=120)).items():
        assert all(rank["replicas"] for rank in ranks), rule
        if rule == "binsgdm":
            continue
        for rank in ranks:
            assert rank["late"] == ranks[0]["late"] and rank["cold"] == ranks[0]["cold"], rule
            assert all(ours == theirs for ours, theirs in rank["late"] + rank["cold"]), rule
            assert max(rank["apart"]) == 0.0, (rule, rank["apart"])
        assert any(ours for ours, _ in ranks[0]["late"]) and any(ours for ours, _ in ranks[0]["cold"]), rule
        woken = any(0 in ours for ours, _ in ranks[0]["late"])
        assert woken is (rule != "onebit_lamb"), (
            "a refresh finds the rows' first gradients (half of them and what equals them)"
        )


def of_rules(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {rule: [rank[rule] for rank in ranks] for rule in ranks[0]}


def of_newcomers(rank: int, world: int, rules: list[str]) -> dict[str, Any]:
    """A part joins by ``add_param_group()`` between one-bit rounds; 0/1 Adam's variance is not frozen yet."""
    of, result = mesh(), {}
    group = of["replicate"].get_group()
    for rule in rules:
        module, joining = shard(even(), of), shard(nn.Sequential(nn.Linear(64, 64)), of)
        algorithm, options = RULES[rule]
        exchange = ExchangeOptions(block_size=32, timeout=30.0, process_group=group)
        late = {"freeze_step": 10} if rule == "zero_one_adam" else {}
        optimizer = CLASSES[algorithm](module.parameters(), lr=1e-2, exchange=exchange, **{**options, **late})
        joins = 0
        for step in range(14):
            if not joins and step >= 5 and optimizer._engine.kept.worker is not None:
                joins = step
                optimizer.add_param_group({"params": list(joining.parameters())})
            x = module(batch(step, rank, 64))
            (joining(x) if joins else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronise()
        equal = same_on([*local(module), *local(joining)], group)
        result[rule] = equal, joins > 0, len(optimizer.state_dict()["state"])
    return result


def test_sharded_parameters_join_while_training() -> None:
    rules = ["onebit_adam", "onebit_lamb", "zero_one_adam"]
    for rank in run_ranks(of_newcomers, 4, rules, timeout=120):
        assert rank == dict.fromkeys(rules, (True, True, 8))


# ----- tensor parallel -----------------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def of_tensor_parallel(rank: int, world: int, rules: list[str], data_parallel: int) -> dict[str, Any]:
    """Replicas of ``data_parallel`` x 2 ranks; a norm within a sequence-parallel part, with a replicated DTensor."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    names = ("replicate", "data", "tensor")
    of = dist.device_mesh.init_device_mesh(
        "cpu", (world // (2 * data_parallel), data_parallel, 2), mesh_dim_names=names
    )
    replicas, result = of["replicate"].get_group(), {}
    for rule in rules:
        module = Parallel()
        twin = copy.deepcopy(module)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(
            module,
            of["tensor"],
            {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)), **plan},
        )
        if data_parallel > 1:
            fully_shard(module, mesh=of["data"])
        ours, theirs = make(rule, module.parameters(), replicas), make(rule, twin.parameters(), replicas)
        node, me = rank // (2 * data_parallel), rank // 2
        kinds: set[str] = set()
        apart, losses = 0.0, [0.0, 0.0]
        for step in range(8):
            x = [
                torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(100 * step + w))
                for w in range(world // 2)
            ]
            (module(x[me]) - 1).square().mean().backward()
            for worker in range(node * data_parallel, (node + 1) * data_parallel):
                (twin(x[worker]) - 1).square().mean().div(data_parallel).backward()
            dense = ours.next_step_is_dense
            kinds |= {str(type(p.grad).__name__) for p in module.parameters()}
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            if dense and step < 3:
                apart = max(float((a - b).abs().max()) for a, b in zip(whole(module), whole(twin), strict=True))
        ours.synchronise()
        theirs.synchronise()
        shards, norms = local(module), [p.to_local().detach() for p in module.norm.parameters()]
        with torch.no_grad():
            losses = [float((model(x[me]) - 1).square().mean()) for model in (module, twin)]
        result[rule] = {
            "replicas": same_on(shards, replicas),
            "norms": same_on(norms, of["tensor"].get_group()),
            "apart": apart,
            "losses": losses,
            "kinds": kinds,
        }
    return result


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_tensor_parallel_parameters_train_and_replicated_ones_stay_equal(data_parallel: int) -> None:
    rules = list(RULES) if data_parallel == 1 else ["onebit_adam", "onebit_lamb"]
    for rank in run_ranks(of_tensor_parallel, 4 * data_parallel, rules, data_parallel, timeout=120):
        for rule, seen in rank.items():
            assert seen["replicas"] and seen["norms"], rule
            # gradients of matrices that are multiplied in parts differ in their last bits, and blocks hold other elements
            assert seen["apart"] < 1e-4, (rule, seen["apart"])
            assert seen["losses"][0] == pytest.approx(seen["losses"][1], rel=0.1), rule
            assert seen["kinds"] == {"DTensor"}


# ----- backward: overlap, accumulation, precision -------------------------------------------------------------------------------


def of_ways_to_backward(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy

    of = mesh()
    group, result = of["replicate"].get_group(), {}

    def plain_steps(module: Any, optimizer: Any, announced: bool, accumulate: int = 1) -> list[Tensor]:
        for step in range(8):
            for part in range(accumulate):
                last = part == accumulate - 1
                module.set_requires_gradient_sync(last)
                if announced:
                    optimizer.begin_backward(sync=last)
                loss_of(module, step * accumulate + part, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same_on(local(module), group)
        return whole(module)

    def run(
        announced: bool = False, accumulate: int = 1, exchange: Any = None, wrap: Any = None, **how: Any
    ) -> list[Tensor]:
        module = even() if wrap is None else wrap(even())
        module = shard(module, of, **how)
        return plain_steps(module, make("onebit_adam", module.parameters(), group, exchange), announced, accumulate)

    base = run()
    same = {
        "announced": run(announced=True),
        "overlapped": run(announced=True, exchange={"overlap": "backward"}),
        "small buckets": run(announced=True, exchange={"bucket_mb": 0.01, "overlap": "backward"}),
        "checkpointed": run(wrap=lambda m: nn.Sequential(*(checkpoint_wrapper(part) for part in m))),
    }
    result["same"] = {k: all(torch.equal(a, b) for a, b in zip(base, v, strict=True)) for k, v in same.items()}
    result["accumulated"] = [
        all(torch.equal(a, b) for a, b in zip(run(accumulate=2), run(announced=announced, accumulate=2), strict=True))
        for announced in (True,)
    ]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mixed = run(announced=True, mp_policy=policy)
    result["mixed"] = max(float((a - b).abs().max()) for a, b in zip(base, mixed, strict=True)), mixed[0].dtype
    half = shard(even().to(torch.bfloat16), of)
    optimizer = make("onebit_adam", half.parameters(), group)
    for step in range(6):
        (half(batch(step, rank, 64).bfloat16()) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = [optimizer.state_dict()["state"][0]["master"]]
    result["16 bits"] = same_on(local(half), group), type(masters[0]).__name__, masters[0].shape, masters[0].dtype
    with torch.device("meta"):
        meta = even()
    meta = shard(meta, of)
    meta.to_empty(device="cpu")
    torch.manual_seed(3)
    for part in meta.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    result["meta"] = bool(plain_steps(meta, make("onebit_adam", meta.parameters(), group), announced=True))
    return result


def test_backward_overlaps_accumulates_recomputes_and_mixes_precision_as_without_shards() -> None:
    for rank in run_ranks(of_ways_to_backward, 4, timeout=120):
        assert all(rank["same"].values()), rank["same"]
        assert all(rank["accumulated"]) and rank["meta"]
        assert 0 < rank["mixed"][0] < 0.1 and rank["mixed"][1] is torch.float32
        assert rank["16 bits"] == (True, "DTensor", torch.Size([64, 64]), torch.float32)


# ----- state ---------------------------------------------------------------------------------------------------------------


def of_resuming(rank: int, world: int, rules: list[str]) -> dict[str, Any]:
    of = mesh()
    group, result = of["replicate"].get_group(), {}

    def steps(module: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            backward(module, step, range(rank, rank + 1))
            optimizer.step()
            optimizer.zero_grad()

    for rule in rules:
        # in the warm-up, and after it
        for at in (2, 7) if rule == "onebit_adam" else (7,):
            module = shard(Uneven(), of)
            optimizer = make(rule, module.parameters(), group)
            steps(module, optimizer, 0, at)
            with optimizer.consensus():
                weights = copy.deepcopy(module.state_dict())
            state, own = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.residual_state_dict())
            kinds = {type(v).__name__ for s in state["state"].values() for k, v in s.items() if k != "step"}
            shapes = all(
                v.shape == p.shape
                for i, p in enumerate(module.parameters())
                for k, v in state["state"].get(i, {}).items()
                if k != "step"
            )
            steps(module, optimizer, at, 12)
            optimizer.synchronise()
            again = shard(Uneven(), of)
            again.load_state_dict(weights)
            resumed = make(rule, again.parameters(), group)
            resumed.load_state_dict(state)
            resumed.load_residual_state_dict(own)
            steps(again, resumed, at, 12)
            resumed.synchronise()
            result[rule, at] = {
                "equal": all(torch.equal(a, b) for a, b in zip(whole(module), whole(again), strict=True)),
                "kinds": kinds,
                "shapes": shapes,
            }
    # on one process, and sharded again: the whole tensors
    module = shard(Uneven(), of)
    optimizer = make("onebit_adam", module.parameters(), group)
    steps(module, optimizer, 0, 6)
    state = optimizer.state_dict()
    full = {
        **state,
        "state": {
            i: {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
            for i, values in state["state"].items()
        },
    }
    alone = Uneven()
    plain = OnebitAdam(alone.parameters(), lr=1e-2, freeze_step=3, exchange=ExchangeOptions(block_size=32))
    plain._engine.link.topology = None
    plain.load_state_dict(copy.deepcopy(full))
    again = shard(Uneven(), of)
    resumed = make("onebit_adam", again.parameters(), group)
    resumed.load_state_dict(copy.deepcopy(full))
    result["full"] = all(
        torch.equal(a["exp_avg"].full_tensor() if hasattr(a["exp_avg"], "full_tensor") else a["exp_avg"], b["exp_avg"])
        for a, b in zip(resumed.state_dict()["state"].values(), full["state"].values(), strict=True)
    )
    with pytest.raises(ValueError, match="shard"):
        wrong = copy.deepcopy(optimizer.residual_state_dict())
        wrong["shard"] = [[1 - c for c in coordinate] for coordinate in wrong["shard"]]
        optimizer.load_residual_state_dict(wrong)
    return result


def test_a_run_resumes_bit_for_bit_on_the_same_mesh_and_state_is_of_whole_parameters() -> None:
    for rank in run_ranks(of_resuming, 4, [rule for rule in RULES if "published" not in rule], timeout=180):
        assert rank.pop("full")
        for case, seen in rank.items():
            assert seen["equal"] and seen["shapes"], case
            assert seen["kinds"] <= {"DTensor", "Tensor"} and (
                case[0].startswith(("binsgdm", "onebit_sgd")) or "DTensor" in seen["kinds"]
            )


# ----- what is refused -----------------------------------------------------------------------------------------------------------


def of_refusals(rank: int, world: int) -> dict[str, str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial

    of, said = mesh(), {}

    def note(what: str, kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said[what] = str(caught.value)

    summands = nn.Parameter(DTensor.from_local(torch.ones(8), of["shard"], [Partial()]))
    note("partial", TypeError, lambda: OnebitAdam([summands]))
    module, group = shard(even(), of), of["replicate"].get_group()
    newest = engine_sharded.OLDEST_TORCH
    engine_sharded.OLDEST_TORCH = (99, 0)
    note("torch", RuntimeError, lambda: OnebitAdam(module.parameters()))
    engine_sharded.OLDEST_TORCH = newest
    hybrid = fully_shard(even(), mesh=of)
    optimizer = make("onebit_adam", hybrid.parameters(), group)
    backward(hybrid, 0, range(rank, rank + 1))
    note("hybrid", ValueError, optimizer.step)
    mixed = shard(Uneven(), of)
    optimizer = make("onebit_adam", mixed.parameters(), group, {"overlap": "backward"})
    note("early", ValueError, optimizer.begin_backward)
    differs = make("onebit_adam", module.parameters(), group)
    differs.param_groups[0]["lr"] = 1e-2 * (1 + rank % 2)
    backward(module, 0, range(rank, rank + 1))
    note("lr", PlanMismatch, differs.step)
    moved = shard(even(), of)
    optimizer = make("onebit_adam", moved.parameters(), group)
    backward(moved, 0, range(rank, rank + 1))
    optimizer.step()
    moved.to(torch.float64)
    note("moved", RuntimeError, optimizer.step)
    return said


def test_what_cannot_be_trained_is_refused_with_the_remedy() -> None:
    words = {
        "partial": ["Partial", "redistribute"],
        "torch": ["torch>=99.0", torch.__version__],
        "hybrid": ["mesh", "fully_shard", "process_group"],
        "early": ["overlap", "norm", "fully_shard"],
        "lr": ["lr"],
        "moved": ["local shard", "make a new optimizer"],
    }
    for said in run_ranks(of_refusals, 4):
        assert said.keys() == words.keys()
        for what, expected in words.items():
            for word in expected:
                assert word in said[what] or (word == "norm" and "parameter" in said[what]), (what, said[what])


def of_a_missing_shard(rank: int, world: int) -> str:
    of = mesh()
    module = shard(even(), of)
    how = {"block_size": 32, "timeout": 3.0, "process_group": of["replicate"].get_group()}
    optimizer = OnebitAdam(module.parameters(), freeze_step=2, exchange=ExchangeOptions(**how))
    for step in range(3):
        backward(module, step, range(rank, rank + 1))
        if step == 2 and rank % 2:
            return "stayed away"
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.zero_grad()
    return "went on"


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    said = run_ranks(of_a_missing_shard, 4, timeout=60)
    for rank in (0, 2):
        assert "shards" in said[rank] and "step 3" in said[rank], said[rank]
