"""What a compressed step costs grows with the elements alone: not with the number of tensors, and not with the number of ranks."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from harness import counting, grouped, run_ranks
from optim_support import CLASSES

from lightning_onebit.algorithms import LocalSteps, OnebitAdam
from lightning_onebit.comm import control_payload_bytes
from lightning_onebit.comm.simulation import SimulatedWorld
from lightning_onebit.kernels import ReferenceKernels, get_backend

BLOCK = 64
ELEMENTS = 840 * BLOCK  # a multiple of every number of ranks up to 8, and of the numbers of tensors below
BUCKET_MB = 440 * BLOCK * 4 / 2**20  # two buckets, for every number of ranks
# from the second step on every step is an exchange
SOON: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 1},
    "onebit_lamb": {"freeze_step": 1},
    "zero_one_adam": {"freeze_step": 1},
    "binsgdm": {},
    "onebit_sgd": {"momentum": 0.9},
}
OPERATIONS = (
    "gather",
    "scatter",
    "grad_stats",
    "norms",
    "compress",
    "reduce",
    "unpack",
    "apply_adam",
    "lamb_update",
    "lamb_apply",
)
OPERATIONS += ("local_step", "sample", "vote", "apply_votes")


def one_step(rank: int, world: int, algorithm: str, tensors: int) -> tuple[list[Any], int, int]:
    """The collectives and bytes of the third step (the first two of BinSGDM unite bitmaps)."""
    params = [torch.nn.Parameter(torch.ones(ELEMENTS // tensors)) for _ in range(tensors)]
    optimizer = CLASSES[algorithm](params, lr=1e-3, **grouped(SOON[algorithm], block_size=BLOCK, bucket_mb=BUCKET_MB))
    with counting() as counted:
        for _ in range(3):
            counted.take()
            for index, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + rank + index)
            optimizer.step()
        seen = [(s.op, s.bytes_sent) for s in counted.take().seen]
    record = optimizer.ledger.last
    assert record is not None and not record.dense
    return seen, record.collectives, record.bytes_sent


@pytest.mark.parametrize("algorithm", list(CLASSES))
def test_the_number_of_collectives_does_not_depend_on_the_number_of_tensors(algorithm: str) -> None:
    """3 tensors and 280 with the same elements: the same collectives, which carry the same bytes, and a bit per tensor."""
    few, many = (run_ranks(one_step, 2, algorithm, tensors)[0] for tensors in (3, 280))
    exchanges = [[s for s in seen if s[1] > 200] for seen, _, _ in (few, many)]  # the rest is the control round
    for seen, tensors in zip(exchanges, (3, 280), strict=True):
        if algorithm in ("onebit_adam", "onebit_lamb"):  # which tell it with the first bucket
            seen[0] = (seen[0][0], seen[0][1] - control_payload_bytes(tensors))
    assert exchanges[0] == exchanges[1] and len(exchanges[0]) == few[1] > 0
    assert len(few[0]) == len(many[0]) <= len(exchanges[0]) + 1
    assert few[1:] == many[1:]


class Counting:
    """Hands calls on to kernels and counts them and the elements they work on."""

    def __init__(self) -> None:
        self.kernels: ReferenceKernels = get_backend("auto", "cpu")
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.kernels, name)
        if name not in OPERATIONS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name == "compress":
                self.elements[name] += (args[2] - args[1]) * args[0].block_size
            elif name == "reduce":  # elements of residual and result; every row is read as bits
                self.elements[name] += args[0].blocks_per_row * args[0].block_size
            elif name == "apply_adam":
                self.elements[name] += args[0].elements
            elif name == "grad_stats":
                self.elements[name] += sum(tensor.numel() for tensor in args[0])
            return value(*args, **kwargs)

        return call


def cost_of_a_step(group: Any) -> tuple[Counter[str], Counter[str], int]:
    """Kernel calls, elements that they pass over and bytes sent by a rank in one compressed step."""
    params = [torch.nn.Parameter(torch.ones(ELEMENTS // 3)) for _ in range(3)]
    options = {"block_size": BLOCK, "bucket_mb": BUCKET_MB, "freeze_step": 1, "process_group": group}
    optimizer = OnebitAdam(params, lr=1e-3, **grouped(options))
    counter = Counting()
    for step in range(3):
        if step == 2:
            optimizer._engine.kept.kernels = counter  # type: ignore[assignment]
        for p in params:
            p.grad = torch.full_like(p, 1.0 + group.rank)
        optimizer.step()
    assert optimizer.ledger.last is not None
    return counter.calls, counter.elements, optimizer.ledger.last.bytes_sent


def test_the_cost_of_a_rank_does_not_grow_with_the_number_of_ranks() -> None:
    """Bytes are 2(n-1)/n of the bits and scales, passes over memory 2 of all elements and 1 of a share of 1/n: flat up to 8 ranks."""
    payload = ELEMENTS // 8 + 4 * (ELEMENTS // BLOCK)
    for ranks in (2, 3, 4, 5, 7, 8):
        for calls, elements, sent in SimulatedWorld(ranks).run(cost_of_a_step):
            assert sent == 2 * (ranks - 1) * payload // ranks
            whole = dict.fromkeys(("compress", "apply_adam"), ELEMENTS)
            assert elements == {**whole, "reduce": ELEMENTS // ranks}
            assert calls == {"compress": 2, "reduce": 2, "apply_adam": 2}


#: options with which every step from the second on is of the kind, and the calls that a further tensor may cost in one: 5 facts of it are
#: asked for (of its gradient, where its weights lie and in what order), 8 where somebody looks at gradients before they are sent, 13 where
#: weights are stepped and then synchronised
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "onebit_adam": ("onebit_adam", {}, 6),
    "onebit_lamb": ("onebit_lamb", {}, 6),
    "zero_one_adam": ("zero_one_adam", {}, 6),
    "zero_one_adam, local": ("zero_one_adam", {"local_steps": LocalSteps(max_gap=1000, double_every=1)}, 9),
    "zero_one_adam, synchronising": ("zero_one_adam", {"local_steps": LocalSteps(max_gap=2, double_every=1)}, 14),
    "binsgdm": ("binsgdm", {}, 9),
}


def calls_in_a_step(group: Any, kind: str, tensors: int) -> int:
    """Calls of Python's and C's functions that rank 0 makes in a compressed step of a kind, which keeps no gradient alive."""
    algorithm, extra, _ = KINDS[kind]
    options = {**SOON[algorithm], **extra}
    # what is rare: local steps in pairs with synchronisations, bitmaps at powers of 2
    steps = 12 if "local" not in kind else 13
    params = [torch.nn.Parameter(torch.ones(ELEMENTS // tensors)) for _ in range(tensors)]
    optimizer = CLASSES[algorithm](params, lr=1e-3, **grouped(options, block_size=BLOCK, process_group=group))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(steps):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + group.rank + step)
        if step == steps - 1 and group.rank == 0:
            sys.setprofile(count)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    record = optimizer.ledger.last
    assert record is not None and not record.dense
    assert (record.collectives > 0) == ("local" not in kind)
    # without the garbage collector's help
    gradients = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert not any(gradient() is not None for gradient in gradients)
    return calls


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_further_tensor_costs_few_calls(kind: str) -> None:
    """What has to be asked of every tensor at every step is asked for in place; the rest once for all, or while nothing moves."""
    few, many = (SimulatedWorld(2).run(calls_in_a_step, kind, tensors)[0] for tensors in (3, 280))
    assert (many - few) / 277 < KINDS[kind][2]
