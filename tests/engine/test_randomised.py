"""Random runs of all four optimizers: whatever is combined, replicas agree, nothing explodes, and an interrupted run goes on bit for bit.

A run draws its algorithm, world (flat or in nodes), shapes (empty ones too), dtypes, parameter groups (compressed and not), options,
learning rates (0 too), missing and broken gradients, accumulation, the freeze and a thaw, and where it is saved and resumed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from harness import grouped
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_support import CLASSES, NO_WARM_UP, equal, snapshot

from lightning_onebit.algorithms import LocalSteps, zero_one_adam
from lightning_onebit.comm import SimulatedWorld
from lightning_onebit.engine import OnebitOptimizer, Phase

STEPS = 12
SHAPES = ((), (1,), (0,), (31,), (33,), (64,), (5, 9), (3, 0), (2, 3, 11), (130,))
#: random examples per algorithm: a few in every run of the tests, more than 1,000 in all with `pytest -m nightly`
FEW, MANY = 10, 260


@dataclass(frozen=True)
class Script:
    """A run, the same on all ranks.

    Attributes:
        algorithm: its name.
        world: ranks.
        ranks_per_node: 1 is flat.
        tensors: shape, dtype and group of every parameter.
        dense_groups: groups that are not compressed.
        options: of the optimizer.
        lrs: learning rates per step and group.
        missing: (step, rank, tensor) without gradient; rank -1 means on all ranks.
        broken: (step, rank, tensor) with a gradient that is not finite.
        micro: micro-batches per step.
        freeze: step after which ``freeze()`` is called, if any; likewise ``thaw``.
        cuts: steps after which the run is saved and goes on in fresh objects.
        seed: of weights and gradients.
    """

    algorithm: str
    world: int
    ranks_per_node: int
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, int], ...]
    dense_groups: frozenset[int]
    options: dict[str, Any]
    lrs: tuple[tuple[float, ...], ...]
    missing: frozenset[tuple[int, int, int]]
    broken: frozenset[tuple[int, int, int]]
    micro: tuple[int, ...]
    freeze: int | None
    thaw: int | None
    cuts: frozenset[int]
    seed: int

    def groups(self) -> list[int]:
        return sorted({group for _, _, group in self.tensors})

    def draw(self, *key: int) -> torch.Generator:
        number = self.seed
        for k in key:
            number = (number * 1_000_003 + k + 7) % 2**62
        return torch.Generator().manual_seed(number)

    def has_gradient(self, t: int, rank: int, tensor: int) -> bool:
        return not {(t, rank, tensor), (t, -1, tensor)} & self.missing

    def skips(self, t: int) -> bool:
        """Whether a non-finite gradient exists on any rank."""
        return any(
            step == t and self.has_gradient(t, rank, tensor) and math.prod(self.tensors[tensor][0])
            for step, rank, tensor in self.broken
        )


@st.composite
def scripts(draw: Any, algorithm: str) -> Script:
    world = draw(st.integers(1, 4))
    count = draw(st.integers(1, 5))
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]))
    tensors = tuple(
        (draw(st.sampled_from(SHAPES)), draw(st.sampled_from(dtypes)), draw(st.integers(0, 2))) for _ in range(count)
    )
    groups = sorted({group for _, _, group in tensors})
    dense_groups = frozenset(
        draw(st.sets(st.sampled_from(groups), max_size=len(groups) - 1)) if len(groups) > 1 else ()
    )
    steps = st.integers(0, STEPS - 1)
    ranks = st.sampled_from([-1, *range(world)])
    events = st.frozensets(st.tuples(steps, ranks, st.integers(0, count - 1)), max_size=12)
    early = st.integers(0, STEPS // 2)
    options: dict[str, Any] = {
        "block_size": draw(st.sampled_from([32, 64])),
        "bucket_mb": draw(st.sampled_from([0.0002, 0.001, 16.0])),
        "_alone": draw(st.sampled_from([True, True, False])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "max_grad_norm": draw(st.sampled_from([None, None, 1.0])),
    }
    freeze = draw(st.one_of(st.none(), early))
    if algorithm not in ("onebit_lamb", "onebit_sgd"):
        options["recipe"] = draw(st.sampled_from(["default", "published"]))
    if algorithm not in NO_WARM_UP:
        # short warm-ups leave second moments that say little: the floor must hold
        options |= {"denominator_floor": 0.1, "bias_correction": draw(st.booleans())}
        options |= {"state_dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"]))}
        if freeze is None:
            options["freeze_step"] = draw(st.one_of(st.none(), early.map(lambda step: step + 1)))
    elif algorithm == "binsgdm":
        options["seed"] = draw(st.integers(0, 3))
    if algorithm in ("onebit_adam", "zero_one_adam"):
        published = options["recipe"] == "published"
        options["refresh"] = draw(st.sampled_from(["never", "auto"] if published else ["never", "auto", 1, 2, 4]))
    if algorithm == "zero_one_adam":
        gap = draw(st.integers(1, 4))
        gaps = LocalSteps(max_gap=gap, double_every=draw(st.integers(1, 3))) if gap > 1 else None
        options |= {"_doubling": draw(st.integers(1, 3)), "local_steps": gaps}
    rates = st.lists(st.sampled_from([0.0, 0.01, 0.01, 0.02]), min_size=len(groups), max_size=len(groups)).map(tuple)
    return Script(
        algorithm=algorithm,
        world=world,
        ranks_per_node=draw(st.sampled_from([1, 2])) if world == 4 else 1,
        tensors=tensors,
        dense_groups=dense_groups,
        options=options,
        lrs=tuple(draw(st.lists(rates, min_size=STEPS, max_size=STEPS))),
        missing=draw(events),
        broken=frozenset(e for e in draw(events) if e[1] >= 0),
        micro=tuple(draw(st.lists(st.integers(1, 3), min_size=STEPS, max_size=STEPS))),
        freeze=freeze if algorithm not in NO_WARM_UP else None,
        thaw=draw(st.one_of(st.none(), steps)) if algorithm in ("onebit_adam", "onebit_lamb") else None,
        cuts=draw(st.frozensets(st.integers(0, STEPS - 2), max_size=3)),
        seed=draw(st.integers(0, 2**20)),
    )


class Run:
    """One rank's model and optimizer."""

    def __init__(self, script: Script, group: Any) -> None:
        self.script, self.group, self.rank = script, group, group.rank
        draws = script.draw(-1)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape, dtype, _ in script.tensors
        ]
        self.optimizer = self._optimizer()

    def _optimizer(self) -> Any:
        script = self.script
        groups = [
            {
                "params": [p for p, (_, _, group) in zip(self.params, script.tensors, strict=True) if group == g],
                "compress": g not in script.dense_groups,
            }
            for g in script.groups()
        ]
        optimizer: OnebitOptimizer = CLASSES[script.algorithm](
            groups, **grouped(script.options, process_group=self.group)
        )
        if script.ranks_per_node > 1:
            optimizer.configure_communication(self.group, ranks_per_node=script.ranks_per_node)
        return optimizer

    def step(self, t: int) -> None:
        """Real backwards of ``micro`` micro-batches, then the step."""
        script, optimizer = self.script, self.optimizer
        for group, lr in zip(optimizer.param_groups, script.lrs[t], strict=True):
            group["lr"] = lr
        optimizer.zero_grad()
        optimizer.show_local()
        for micro in range(script.micro[t]):
            optimizer.begin_backward(micro == script.micro[t] - 1)
            loss: Any = 0.0
            for index, p in enumerate(self.params):
                if script.has_gradient(t, self.rank, index):
                    g = torch.randn(p.shape, generator=script.draw(t, self.rank, index, micro))
                    if (t, self.rank, index) in script.broken:
                        g = g * math.inf
                    loss = loss + (p * g.to(p.dtype)).float().sum()
            if isinstance(loss, torch.Tensor):
                loss.backward()
        optimizer.step()
        warm = optimizer.phase is Phase.WARMUP and optimizer.steps > 0 and optimizer.freeze_step is None
        if t == script.freeze and warm:
            optimizer.freeze()
        if t == script.thaw and optimizer.phase is Phase.COMPRESSED and optimizer.freeze_step is None:
            optimizer.thaw()

    def resume(self) -> None:
        """Saves as a checkpoint would and goes on in fresh objects."""
        file = io.BytesIO()
        with torch.no_grad():
            self.optimizer.show_consensus()
            weights = [p.detach().clone() for p in self.params]
            torch.save((weights, self.optimizer.state_dict(), self.optimizer.residual_state_dict()), file)
        file.seek(0)
        weights, state, residuals = torch.load(file, weights_only=True)
        self.params = [torch.nn.Parameter(x) for x in weights]
        self.optimizer.release_communication()
        self.optimizer = self._optimizer()
        self.optimizer.load_state_dict(state)
        self.optimizer.load_residual_state_dict(residuals)

    def state_of(self) -> list[dict[str, torch.Tensor]]:
        """Per tensor: its weights and whatever belongs to it in the optimizer."""
        optimizer, plan = self.optimizer, self.optimizer._engine.kept.layout.plan
        state = optimizer.state_dict()["state"]
        found = []
        for p in self.params:
            index = next(i for i, known in enumerate(optimizer._engine.kept.layout.params) if known is p)
            mine = {name: value.clone() for name, value in state.get(index, {}).items()}
            for name in [name for name in mine if name.endswith("_exact")]:
                mine[name.removesuffix("_exact")] = mine.pop(name)  # not the form for plain AdamW
            mine["weights"] = p.detach().clone()
            residual = optimizer._engine.kept.worker
            if (
                residual is not None
                and residual.values.numel() == plan.elements
                and index in optimizer._engine.kept.layout.slot_of
            ):
                mine["residual"] = optimizer._engine.kept.layout.part(residual.tensor(), index).clone()
            found.append(mine)
        return found

    def seen(self, looks: bool) -> dict[str, Any]:
        """``looks``: at the state too, residuals among it, of which nothing is pending then."""
        optimizer = self.optimizer
        state = self.state_of() if looks else []
        local = [p.detach().clone() for p in self.params]
        optimizer.show_consensus()
        shared = [p.detach().clone() for p in self.params]
        optimizer.show_local()
        counts = (optimizer.steps, optimizer.skipped_steps, optimizer.phase)
        return {"local": local, "shared": shared, "apart": optimizer.mid_local, "counts": counts, "state": state}


def play(group: Any, script: Script, interrupted: bool) -> dict[str, Any]:
    """The run on one rank. Nobody looks at the state of one that is ``interrupted``, so that subtractions are pending from step to step."""
    run = Run(script, group)
    seen = []
    for t in range(STEPS):
        run.step(t)
        seen.append(run.seen(looks=not interrupted))
        if interrupted and t in script.cuts:
            run.resume()
    run.optimizer.synchronise()
    ledger = run.optimizer.ledger.as_dict()
    for varies in ("communication_seconds", "compression_seconds"):
        del ledger["total"][varies]
    return {"seen": seen, "end": snapshot(run.optimizer, run.params), "ledger": ledger}


def kept(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """What there was is as it was; the bitmap of coordinates that have had a gradient may still learn of earlier steps."""
    return all(
        name in after and (not (value & ~after[name]).any() if name == "live" else equal(value, after[name]))
        for name, value in before.items()
    )


@pytest.fixture(autouse=True, scope="module")
def no_variance_is_too_young() -> Iterator[None]:
    with mock.patch.object(zero_one_adam, "LARGEST_NOISE", math.inf):
        yield


def check(script: Script) -> None:
    """What holds for every run."""
    through = SimulatedWorld(script.world, timeout=60).run(play, script, False)
    skipped = 0
    for t in range(STEPS):
        states = [rank["seen"][t] for rank in through]
        skipped += script.skips(t)
        for state in states:
            assert equal(state["shared"], states[0]["shared"]), f"the shared model after step {t + 1}"
            assert state["apart"] or equal(state["local"], states[0]["local"]), f"replicas after step {t + 1}"
            assert all(x.isfinite().all() and (not x.numel() or x.abs().max() < 50) for x in state["local"])
            assert state["counts"] == (t + 1 - skipped, skipped, states[0]["counts"][2])
        for rank in through if t else ():
            before, after = rank["seen"][t - 1], rank["seen"][t]
            if before["counts"][2] is not after["counts"][2] or script.thaw in (t - 1, t):
                continue  # arenas change
            for index in range(len(script.tensors)):
                absent = not any(script.has_gradient(t, r, index) for r in range(script.world))
                # at a synchronisation of local steps what has travelled moves, gradient or not
                if script.skips(t) or (absent and after["counts"][2] is not Phase.LOCAL):
                    assert kept(before["state"][index], after["state"][index]), f"tensor {index} in step {t + 1}"
    for rank in through:
        assert equal(rank["end"]["x"], through[0]["end"]["x"]), "replicas at the end"
    if script.cuts:
        for a, b in zip(through, SimulatedWorld(script.world, timeout=60).run(play, script, True), strict=True):
            for t in range(STEPS):
                assert equal(a["seen"][t]["local"], b["seen"][t]["local"]), f"a resumed run after step {t + 1}"
            assert equal(a["end"], b["end"]), "a resumed run's state"
            assert a["ledger"] == b["ledger"]


@pytest.mark.parametrize("algorithm", list(CLASSES))
@settings(max_examples=FEW)
@given(data=st.data())
def test_random_runs_keep_every_invariant(algorithm: str, data: st.DataObject) -> None:
    check(data.draw(scripts(algorithm)))


@pytest.mark.parametrize("moved, dense", [(9, 10), (6, 7)], ids=["at lr 0", "refresh"])
def test_dense_rounds_of_zero_one_adam_leave_a_tensor_without_gradient_as_it_is(moved: int, dense: int) -> None:
    """Momenta meet in them: that of such a tensor is not rounded on its way there and back."""
    lrs = tuple((0.0, 0.01 if t == moved else 0.0) for t in range(STEPS))
    options = {"block_size": 32, "bucket_mb": 0.0002, "_alone": True, "refresh": "never", "_doubling": 1}
    options |= {"bias_correction": False}
    tensors = (((), torch.float32, 0), ((), torch.float32, 1))
    missing = frozenset([(dense, -1, 0)])
    check(
        Script(
            algorithm="zero_one_adam",
            world=1,
            ranks_per_node=1,
            tensors=tensors,
            dense_groups=frozenset(),
            options=options,
            lrs=lrs,
            missing=missing,
            broken=frozenset(),
            micro=(1,) * STEPS,
            freeze=None,
            thaw=None,
            cuts=frozenset(),
            seed=0,
        )
    )


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("algorithm", list(CLASSES))
@settings(max_examples=MANY, derandomize=False)
@given(data=st.data())
def test_more_than_a_thousand_random_runs_keep_every_invariant(algorithm: str, data: st.DataObject) -> None:
    check(data.draw(scripts(algorithm)))
