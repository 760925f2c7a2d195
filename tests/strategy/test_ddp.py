"""A model that somebody else has wrapped in DistributedDataParallel trains as without the wrapper, and sends no more."""

from __future__ import annotations

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import counting, grouped, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_onebit import BinSGDM, ExchangeOptions, LocalSteps, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.ddp import clip_grad_norm_, load_residuals, onebit_ddp, save_residuals

#: every algorithm through every kind of step: dense, compressed, refreshes after the freeze, local
MAKERS: dict[str, Any] = {
    "onebit_adam": lambda p: OnebitAdam(p, lr=1e-2, freeze_step=3, refresh=3),
    "onebit_lamb": lambda p: OnebitLamb(p, lr=1e-2, freeze_step=3),
    "zero_one_adam": lambda p: ZeroOneAdam(
        p, lr=1e-2, freeze_step=4, local_steps=LocalSteps(max_gap=4, double_every=2)
    ),
    "binsgdm": lambda p: BinSGDM(p, lr=1e-3),
}
STEPS = 12


class Net(nn.Module):
    """Has a branch that a batch may leave out, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(24, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.norm = nn.BatchNorm1d(40)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(self.branch(hidden) + hidden if branch else hidden)


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(step: int, rank: int, part: int = 0) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + part))


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_everywhere(params: list[Tensor]) -> bool:
    mine = torch.cat([p.flatten() for p in params])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return all(torch.equal(mine, row) for row in rows)


def sync_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


class Heard(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning_onebit").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self, words: str) -> int:
        found = [line for line in self.lines if words in line]
        self.lines = []
        return len(found)


def trajectory(
    rank: int, make: Any, wrap: dict[str, Any] | None, micro: int = 1, drops: bool = False, zeroes: bool = False
) -> tuple[list[Tensor], list[tuple[bool, int]]]:
    """Weights after a run, under DDP with these options or without it, and what each step sent."""
    heard, model = Heard(), net()
    optimizer = make(model.parameters())
    wrapped: Any = model
    if wrap is not None:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005, **wrap)
        onebit_ddp(wrapped, optimizer)
    sent = []
    for step in range(STEPS):
        for part in range(micro):
            last = part == micro - 1
            with contextlib.nullcontext() if last or wrap is None else wrapped.no_sync():
                if wrap is None:
                    sync_buffers(model)
                # rank 1 leaves a branch out in some steps
                out = wrapped(batch(step, rank, part), branch=not (drops and rank == 1 and step % 2))
                out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroes)
        sent.append((optimizer.ledger.last.dense, optimizer.ledger.last.bytes_sent))
    optimizer.synchronise()
    assert same_everywhere(weights(model)) and heard.lines == []
    return weights(model), sent


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "views": ({"gradient_as_bucket_view": True}, {"zeroes": True}),
    "static": ({"static_graph": True}, {}),
    "accumulated": ({}, {"micro": 3}),
    "unused": ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, {"drops": True, "micro": 2}),
}


def compare_with_unwrapped(rank: int, world: int) -> None:
    for name, make in MAKERS.items():
        chosen = VARIANTS if name in ("onebit_adam", "zero_one_adam") else {"plain": VARIANTS["plain"]}
        for variant, (wrap, how) in chosen.items():
            ours, sent = trajectory(rank, make, wrap, **how)
            theirs, expected = trajectory(rank, make, None, **how)
            assert all(map(torch.equal, ours, theirs)), (name, variant)
            assert [dense for dense, _ in sent] == [dense for dense, _ in expected], (name, variant)
            numel = sum(w.numel() for w in ours)  # half of it twice between two ranks, four bytes each
            assert {b for dense, b in sent if dense} <= {4 * numel}, (name, variant)
            assert [b for dense, b in sent if not dense] == [b for dense, b in expected if not dense], (name, variant)


def test_a_wrapped_model_trains_bit_for_bit_as_an_unwrapped_one() -> None:
    run_ranks(compare_with_unwrapped, 2)


def count_collectives(rank: int, world: int) -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.005)
    optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=2, exchange=ExchangeOptions(block_size=64))
    onebit_ddp(model, optimizer)
    numel = sum(p.numel() for p in model.parameters())
    for step in range(4):
        with counting() as counted:
            loss = model(batch(step, rank)).square().mean()
            counted.take()  # buffers, and in the first step the comparison of plans
            loss.backward()
            in_backward = counted.take()
            optimizer.step()
            in_step = counted.take()
        optimizer.zero_grad()
        if step < 2:
            assert sum(s.input_bytes for s in in_backward.of("all_reduce")) == 4 * numel
            assert not in_step.seen, "averaged twice"
            assert len(in_backward.seen) > step, "DDP makes its buckets small after the first step"
        else:
            assert not in_backward.seen
            assert {s.op for s in in_step.seen} == {"all_gather", "all_to_all"}
            assert in_step.bytes_sent < 4 * numel / 8


def test_ddp_sends_nothing_in_a_compressed_step_and_the_optimizer_nothing_in_a_dense_one() -> None:
    run_ranks(count_collectives, 2)


def share_a_model(rank: int, world: int) -> None:
    model = net()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    groups = [{"params": model.first.parameters()}, {"params": model.norm.parameters(), "compress": False}]
    first = OnebitAdam(groups, lr=1e-2, freeze_step=2)
    second = BinSGDM(model.branch.parameters(), lr=1e-3)
    other = torch.optim.SGD(model.last.parameters(), lr=1e-2)
    onebit_ddp(wrapped, first, second)
    for step in range(5):
        with wrapped.no_sync():
            (2 * wrapped(batch(step, rank)).square().mean()).backward()
        own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        wrapped.zero_grad()
        model.norm.load_state_dict(copy.deepcopy(model.norm.state_dict()))
        (2 * wrapped(batch(step, rank)).square().mean()).backward()
        for name, p in model.named_parameters():
            average = own[name].clone()
            dist.all_reduce(average)
            average /= world
            local = name.startswith("branch") or (name.startswith(("first", "norm")) and step >= 2)
            assert p.grad is not None
            torch.testing.assert_close(p.grad, own[name] if local else average)
        if step >= 2:
            first.sync_gradients()  # those of compress=False
            average = own["norm.weight"].clone()
            dist.all_reduce(average)
            torch.testing.assert_close(model.norm.weight.grad, average / world)
        for optimizer in (first, second, other):
            optimizer.step()
        wrapped.zero_grad()
        assert same_everywhere(weights(model))


def test_parameters_of_other_optimizers_are_averaged_in_every_step_and_uncompressed_groups_by_step() -> None:
    run_ranks(share_a_model, 2)


def refuse(rank: int, world: int) -> None:
    def wrapped(**options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(net(), **options)

    def adam(model: nn.Module, **options: Any) -> OnebitAdam:
        return OnebitAdam(model.parameters(), **grouped({"freeze_step": 2, **options}))

    model = wrapped()
    with pytest.raises(
        TypeError, match=r"a Net, not a DistributedDataParallel.*`optimizer.step\(\)` communicates by itself"
    ):
        onebit_ddp(model.module, adam(model))
    with pytest.raises(TypeError, match="SGD compresses nothing"):
        onebit_ddp(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    with pytest.raises(ValueError, match="no optimizer was given"):
        onebit_ddp(model)
    with pytest.raises(ValueError, match=r"parameter of shape \(40, 24\) that is not in the wrapped Net"):
        onebit_ddp(model, adam(net()))
    with pytest.raises(ValueError, match=r"overlap='backward'.*use overlap='step'"):
        onebit_ddp(model, adam(model, overlap="backward"))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    with pytest.raises(ValueError, match=rf"exchanges among ranks \[{rank}\].*process_group=model.process_group"):
        onebit_ddp(model, adam(model, process_group=alone))
    inner = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["last.weight"])
    with pytest.raises(ValueError, match=r"trains last\.weight, which DistributedDataParallel was told to ignore"):
        onebit_ddp(DistributedDataParallel(inner), adam(inner))
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="communication hook already: allreduce_hook"):
        onebit_ddp(model, adam(model))
    from torch.distributed import fsdp

    if hasattr(fsdp, "fully_shard"):
        with pytest.raises(TypeError, match="wrapped in FSDP"):
            onebit_ddp(fsdp.fully_shard(net(), mesh=dist.init_device_mesh("cpu", (world,))), adam(model))
    # ranks that differ say so, by the parameter's or the option's name, before anything is averaged
    model = wrapped()
    optimizer = adam(model, lr=1e-2 * (1 + rank))
    onebit_ddp(model, optimizer)
    with pytest.raises(RuntimeError, match=r"lr=0\.01"):
        model(batch(0, rank))


def test_what_cannot_work_is_refused_by_name() -> None:
    run_ranks(refuse, 2)


def go_astray(rank: int, world: int) -> None:
    """Uses that DDP allows, and that would be wrong here or there."""
    heard = Heard()
    model = net()
    for p in model.branch.parameters():
        p.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    optimizer = OnebitAdam(model.parameters(), lr=1e-2)
    onebit_ddp(wrapped, optimizer)

    def step(number: int, change: Any = None, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else wrapped.no_sync():
            wrapped(batch(number, rank)).square().mean().backward()
        if change is not None:
            change()
        optimizer.step()
        optimizer.zero_grad()
        assert same_everywhere(weights(model))

    step(0)
    step(1, sync=False)  # nobody has averaged
    for p in model.branch.parameters():
        p.requires_grad_(True)
    step(2)
    assert heard.take("branch.weight became trainable after the model was wrapped") == 1
    step(3)
    assert heard.lines == []
    step(4, optimizer.freeze)  # between backward and step
    assert optimizer.ledger.last.dense is False
    step(5)
    assert heard.lines == []
    for number in (6, 7):
        step(number, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
    assert heard.take("lightning_onebit.ddp.clip_grad_norm_") == 1
    # a gradient that is not finite on one rank
    before = weights(model)

    def spoil() -> None:
        if rank == 1:
            model.first.weight.grad.fill_(float("nan"))

    step(8, spoil)
    assert optimizer.skipped_steps == 1 and all(map(torch.equal, before, weights(model)))
    optimizer.thaw()
    wrapped(batch(9, rank) * (float("inf") if rank else 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 2 and all(map(torch.equal, before, weights(model)))
    # another optimizer on the same wrapper
    onebit_ddp(wrapped, optimizer := OnebitAdam(model.parameters(), lr=1e-2, freeze_step=1))
    step(10)
    step(11)
    assert [optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps] == [1, 1]


def test_steps_that_ddp_or_the_user_leave_unaveraged_or_changed_stay_equal_on_all_ranks() -> None:
    run_ranks(go_astray, 2)


def clip(rank: int, world: int) -> None:
    def run(how: str) -> list[Tensor]:
        model = net()
        wrapped = DistributedDataParallel(model)
        limit = 0.05 if how == "option" else None
        optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=2, max_grad_norm=limit)
        onebit_ddp(wrapped, optimizer)
        for step in range(5):
            wrapped(batch(step, rank)).square().mean().backward()
            if how == "function":
                norm = clip_grad_norm_(model.parameters(), 0.05, optimizer)
                assert norm > 0.05
            elif how == "option":
                measured = clip_grad_norm_(model.parameters(), float("inf"), optimizer)
                assert measured > 0.05
            optimizer.step()
            optimizer.zero_grad()
            # one control round a step, whichever part asks for it; nobody does where nothing is clipped
            assert optimizer.ledger.last.control_collectives == (step >= 2 and how != "none")
        if how == "option":
            with pytest.raises(ValueError, match=r"TrainingArguments\(max_grad_norm=0\)"):
                clip_grad_norm_(model.parameters(), 1.0, optimizer)
        else:
            model(batch(0, rank)).square().mean().backward()
            with pytest.raises(ValueError, match="has gradients of further parameters"):
                clip_grad_norm_(model.first.parameters(), 1.0, optimizer)
            with pytest.raises(ValueError, match="norm_type=1"):
                clip_grad_norm_(model.parameters(), 1.0, optimizer, norm_type=1)
        return weights(model)

    option, function, none = run("option"), run("function"), run("none")
    for a, b in zip(option, function, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)  # a factor of signs, or of gradients: rounded elsewhere
    assert not torch.allclose(option[0], none[0], rtol=0, atol=2e-3)


def test_clipping_agrees_on_one_norm() -> None:
    run_ranks(clip, 2)


def overflow(rank: int, world: int) -> None:
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    onebit_ddp(wrapped, optimizer, scaler=scaler)
    heard = Heard()
    for step in range(6):
        loss = wrapped(batch(step, rank)).square().mean()
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same_everywhere(weights(model))
    assert (optimizer.steps, optimizer.skipped_steps, scaler.get_scale()) == (5, 1, 2.0**9)
    assert heard.take("clip") == 0


def test_an_overflow_on_one_rank_skips_the_step_of_a_scaler_on_all() -> None:
    run_ranks(overflow, 2)


def train_and_save(rank: int, world: int, folder: str, algorithm: str, steps: int, load: str | None = None) -> Any:
    heard, model = Heard(), net()
    wrapped = DistributedDataParallel(model)
    optimizer = MAKERS[algorithm](model.parameters())
    onebit_ddp(wrapped, optimizer)
    first = 0
    if load is not None:
        shared = torch.load(f"{folder}/shared.pt", weights_only=True)
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        first = shared["step"]
        if load == "other":
            with torch.no_grad():
                model.last.bias.add_(1.0)
        if load != "forgotten":
            assert load_residuals(f"{folder}/gone" if load == "missing" else folder, optimizer) == (load == "whole")
    for step in range(first, steps):
        if load is None and step == steps - 4:
            with optimizer.consensus():
                if rank == 0:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(saved, f"{folder}/shared.pt")
            save_residuals(folder, optimizer)
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronise()
    return weights(model), heard.lines


@pytest.mark.parametrize("algorithm", ["onebit_adam", "zero_one_adam"])
def test_a_run_goes_on_bit_for_bit_and_says_once_where_residuals_are_gone(algorithm: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(train_and_save, 2, folder, algorithm, STEPS)
    again = run_ranks(train_and_save, 2, folder, algorithm, STEPS, "whole")
    for (before, _), (after, lines) in zip(whole, again, strict=True):
        assert all(map(torch.equal, before, after)) and lines == []
    if algorithm != "onebit_adam":
        return
    for load, words in [
        ("missing", "is missing"),
        ("other", "belongs to another model"),
        ("forgotten", "load_residuals("),
    ]:
        (_, lines), (_, quiet) = run_ranks(train_and_save, 2, folder, algorithm, STEPS, load)
        assert len(lines) == 1 and words in lines[0] and "start from zero" in lines[0]
        assert quiet == []
    # another world: they are redistributed
    ((_, lines),) = run_ranks(train_and_save, 1, folder, algorithm, STEPS, "whole")
    assert lines == []
    (tmp_path / "residuals.json").write_text("{")
    (_, lines), _ = run_ranks(train_and_save, 2, folder, algorithm, STEPS, "damaged")
    assert len(lines) == 1


def alone(rank: int, world: int) -> None:
    dist.destroy_process_group()
    model = net()
    optimizer = OnebitAdam(model.parameters(), freeze_step=1)
    onebit_ddp(model, optimizer)
    model(batch(0, 0)).square().mean().backward()
    optimizer.step()


def test_the_same_program_runs_alone_and_unwrapped() -> None:
    run_ranks(alone, 1)
