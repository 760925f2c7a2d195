"""Hashes of weights and state after short runs of every rule: run it at two commits on one machine, and compare.

A change that is to leave results alone leaves every hash alone::

    python benchmarks/trajectories.py > before.json      # at one commit
    python benchmarks/trajectories.py --against before.json   # at the other: names what differs, and fails

Ranks are threads of one process and gradients are drawn from a generator, so a run takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import lightning_onebit as ob
from lightning_onebit.comm import SimulatedGroup, SimulatedWorld

SHAPES = ((33, 70), (65,), (0,), (40, 3, 5), (4100,))
STEPS = 60
#: steps after which a run is saved and goes on in new optimizers: in the warm-up, at the freeze, between two synchronisations, ...
RESUMED_AT = (5, 12, 17, 33, 55)
Build = Callable[..., ob.OnebitOptimizer]


def rules() -> dict[str, tuple[Build, dict[str, Any]]]:
    """Every rule by name, default and published: its optimizer and options under which 60 steps cross all phases."""
    adam = {"lr": 1e-2, "weight_decay": 0.01, "freeze_step": 12}
    lamb = {"lr": 1e-2, "weight_decay": 0.01, "freeze_step": 12}
    zero_one = {"lr": 1e-2, "weight_decay": 0.01, "freeze_step": 14, "_doubling": 2}
    return {
        "onebit_adam": (ob.OnebitAdam, adam),
        "onebit_adam, refresh 7": (ob.OnebitAdam, {**adam, "refresh": 7}),
        "onebit_adam, never refreshed": (ob.OnebitAdam, {**adam, "refresh": "never"}),
        "onebit_adam, published": (ob.OnebitAdam, {**adam, "recipe": "published"}),
        "onebit_adam, no bias correction": (ob.OnebitAdam, {**adam, "bias_correction": False}),
        "onebit_lamb": (ob.OnebitLamb, lamb),
        "zero_one_adam": (ob.ZeroOneAdam, {**zero_one, "local_steps": ob.LocalSteps(max_gap=4, double_every=8)}),
        "zero_one_adam, no local steps": (ob.ZeroOneAdam, zero_one),
        "zero_one_adam, by learning rate": (
            ob.ZeroOneAdam,
            {**zero_one, "local_steps": ob.LocalSteps(max_gap=4, double_every="lr_halving")},
        ),
        "zero_one_adam, published": (
            ob.ZeroOneAdam,
            {
                **{"lr": 1e-2, "weight_decay": 0.01, "freeze_step": 50, "recipe": "published"},
                "local_steps": ob.LocalSteps(max_gap=4, double_every=2),
            },
        ),
        "binsgdm": (ob.BinSGDM, {"lr": 1e-3, "weight_decay": 0.01}),
        "onebit_sgd": (ob.OnebitSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
        "onebit_sgd, nesterov": (
            ob.OnebitSGD,
            {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        ),
        "binsgdm, published": (ob.BinSGDM, {"lr": 1e-3, "weight_decay": 0.01, "recipe": "published"}),
    }


def settings(rule: str) -> Iterator[tuple[str, int, dict[str, Any], dict[str, Any]]]:
    """What each rule is run under: a name, the world, options besides the rule's, and what is unusual about the run."""
    yield "2 ranks", 2, {}, {}
    yield "3 ranks", 3, {}, {}
    yield "2 nodes of 2", 4, {}, {"ranks_per_node": 2}
    yield "clipped", 2, {"max_grad_norm": 0.5}, {}
    yield "bf16 weights", 2, {}, {"dtype": torch.bfloat16}
    yield "small buckets, a dense group", 2, {"exchange": {"bucket_mb": 0.004}}, {"dense": True}
    yield "a late tensor", 2, {}, {"late": 25}
    yield "a skipped step", 2, {}, {"bad": (6, 20)}
    yield "alone", 1, {}, {}
    yield "alone, compressed", 1, {"exchange": {"_alone": True}}, {}
    for step in RESUMED_AT:
        yield f"resumed at {step}", 2, {}, {"resumed": step}
    if not rule.startswith("binsgdm"):
        yield "16-bit state", 2, {"exchange": {"state_dtype": "bfloat16"}}, {}
        yield (
            "16-bit state, resumed",
            2,
            {"exchange": {"state_dtype": "bfloat16"}},
            {"resumed": 33},
        )
    if rule.startswith(("onebit_adam", "onebit_lamb")):
        yield "sent in backward", 2, {"exchange": {"overlap": "backward", "bucket_mb": 0.004}}, {}


def run(
    group: SimulatedGroup,
    build: Build,
    options: dict[str, Any],
    *,
    ranks_per_node: int = 1,
    dtype: torch.dtype = torch.float32,
    dense: bool = False,
    late: int | None = None,
    bad: tuple[int, ...] = (),
    resumed: int | None = None,
) -> str:
    """60 steps of one rank; the hash of its weights after each fifth step, and of all of its state after the last."""
    first = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter((torch.randn(shape, generator=first) * 0.1).to(dtype)) for shape in SHAPES]
    given = torch.Generator().manual_seed(2 + group.rank)

    def made() -> ob.OnebitOptimizer:
        groups = [{"params": params[:-2]}, {"params": params[-2:-1], "compress": not dense}, {"params": params[-1:]}]
        exchange = ob.ExchangeOptions(**{"state_dtype": "float32", **options.get("exchange", {})}, process_group=group)
        optimizer = build(groups, **{**options, "exchange": exchange})
        if ranks_per_node > 1:
            optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
        return optimizer

    optimizer, seen = made(), hashlib.sha256()
    backward = options.get("exchange", {}).get("overlap") == "backward"
    for step in range(1, STEPS + 1):
        if step - 1 == resumed:
            state, own = optimizer.state_dict(), optimizer.residual_state_dict()
            with optimizer.consensus():
                weights = [p.detach().clone() for p in params]
            params = [torch.nn.Parameter(w) for w in weights]
            optimizer = made()
            optimizer.load_state_dict(state)
            optimizer.load_residual_state_dict(own)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=given) * torch.linspace(0.01, 1.0, max(1, p.numel()))[
                : p.numel()
            ].view(p.shape)
            if i == 0:
                grad[:, 3] = 0.0  # coordinates that never have a gradient
            p.grad = None if late is not None and i == 1 and step < late else grad.to(dtype)
            if step in bad and group.rank == 1 and i == 1:
                p.grad[0] = float("nan")
        if backward:
            grads = [p.grad for p in params]
            for p in params:
                p.grad = None
            optimizer.begin_backward()
            sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()
        for param_group in optimizer.param_groups:
            param_group["lr"] = options["lr"] * min(1.0, step / 4) * (0.5 if step > 30 else 1.0)
        optimizer.step()
        if step % 5 == 0:
            with optimizer.consensus():
                _add(seen, *params)
    _add(seen, *(value for entry in optimizer.state_dict()["state"].values() for value in entry.values()))
    _add(seen, *optimizer.residual_state_dict()["tensors"].values())
    return seen.hexdigest()[:16]


def _add(seen: Any, *tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            seen.update(tensor.detach().float().contiguous().numpy().tobytes())


def record(only: str = "") -> dict[str, str]:
    """The hash of every case, all ranks' together; an error's text in its place."""
    cases = [(rule, made, *setting) for rule, made in rules().items() for setting in settings(rule)]
    found: dict[str, str] = {}
    for rule, (build, options), name, world, more, unusual in tqdm(cases, file=sys.stderr):
        case = f"{rule} | {name}"
        if only not in case:
            continue
        try:
            of_ranks = SimulatedWorld(world, timeout=60).run(lambda g: run(g, build, {**options, **more}, **unusual))  # noqa: B023
            found[case] = hashlib.sha256("".join(of_ranks).encode()).hexdigest()[:16]
        except Exception as error:  # a combination that is refused
            found[case] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    """Prints the hashes, or compares them with those of another commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="what another commit has printed on this machine")
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args()
    found = record(args.only)
    if args.against is None:
        print(json.dumps(found, indent=1))
        return
    known = json.loads(args.against.read_text())
    different = [case for case in found if found[case] != known.get(case)]
    for case in different:
        print(f"{case}: {known.get(case)} -> {found[case]}")
    print(f"{len(found) - len(different)} of {len(found)} cases are the same, bit for bit")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
