"""Saving and loading, in one place for all algorithms: what of an optimizer's state is saved, in which layout, and how it is taken back."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, memory_order
from lightning_onebit.engine.agreement import Agreement
from lightning_onebit.engine.arenas import Arenas, Phase
from lightning_onebit.engine.compact import expanded
from lightning_onebit.engine.engine import Engine
from lightning_onebit.engine.redistribute import WHOLE, WORKER, remedy
from lightning_onebit.engine.sharded import LocalShard, as_sharded, local_part, placed

if TYPE_CHECKING:
    from lightning_onebit.engine.optimizer import OnebitOptimizer

log = logging.getLogger("lightning_onebit")

STATE_VERSION = 1
# options that torch.optim.Adam(W) keeps in its groups and that mean nothing here
_TORCH_ADAM_OPTIONS = {
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}
# those that only say how torch makes a step, whatever their value
_HOW_NOT_WHAT = _TORCH_ADAM_OPTIONS - {"amsgrad", "maximize"}
_SAVING = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_LOADING = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer, *names: str) -> Iterator[None]:
    """Within it torch finds no state, and no hooks of these kinds: it would run them before what is kept outside of it is there."""
    hooks = {name: vars(optimizer)[name] for name in (*names, "_shown_state")}
    # the very dicts come back: handles of the user's remove hooks from them
    vars(optimizer).update({name: OrderedDict() for name in hooks})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


# ----- saving ---------------------------------------------------------------------------------------------------------


def save(optimizer: OnebitOptimizer) -> dict[str, Any]:
    """See ``OnebitOptimizer.state_dict()``; hooks are told."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state = optimizer._engine.rule.compacted(packed(optimizer))
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = after(optimizer, state)
        if replaced is not None:
            state = replaced
    return state


def packed_groups(optimizer: OnebitOptimizer) -> list[dict[str, Any]]:
    """Parameter groups as in a state, with indices for parameters."""
    with _without_hooks(optimizer, *_SAVING):
        groups: list[dict[str, Any]] = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return groups


@torch.no_grad()
def packed(optimizer: OnebitOptimizer) -> dict[str, Any]:
    """``state_dict()``, of which no hook is told, with what follows from the rest of it."""
    kept, rule = optimizer._engine.kept, optimizer._engine.rule
    state: dict[str, Any] = {"state": {}, "param_groups": packed_groups(optimizer), "onebit": books(optimizer._engine)}
    if not kept.laid_out:
        return state
    layout = kept.layout
    of: dict[int, dict[str, Tensor]] = {i: {} for i in layout.known}
    for key, values in rule.saved():
        for i in layout.slots:
            view = layout.view(values, i)
            of[i][key] = torch.empty_like(view).copy_(view)
        del values
    # what arenas have of late ones is nothing yet
    of |= {i: {} for i in kept.late}
    for i in (*layout.dense, *kept.late):
        of[i] |= {key: kept.own[i][name].clone() for name, key in rule.arenas.items() if name in kept.own[i]}
    for i in layout.known:
        of[i]["step"] = torch.tensor(float(kept.t[i]), dtype=torch.float32)
        if i in kept.masters:
            of[i]["master"] = rule.shared_master(i)
    state["state"] = {i: _as_placed(of[i], layout.params[i]) for i in sorted(of) if kept.t[i] > 0}
    return state


def _as_placed(values: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """State of a parameter, in DTensors that are placed as it is, if it is one."""
    return {key: value if key == "step" else as_sharded(value, parameter) for key, value in values.items()}


def books(engine: Engine) -> dict[str, Any]:
    """What a state holds besides tensors."""
    kept = engine.kept
    known = kept.layout.known if kept.laid_out else []
    slots = iter(kept.layout.slots if kept.laid_out else [])
    segments = [[next(slots) for _ in range(count)] for count in kept.layout.segments] if kept.laid_out else []
    return {
        "version": STATE_VERSION,
        "algorithm": engine.algorithm,
        "phase": kept.phase.value,
        "steps": kept.steps,
        "skipped": engine.skipped,
        "skips_in_a_row": engine.skips_in_a_row,
        "ledger": engine.link.ledger.as_dict(),
        # the state of one that has never had a gradient is not saved, but blocks are dealt to it
        "known": list(known),
        "stepped": [i for i in known if kept.t[i] > 0],
        # in the order of their blocks, where some have joined after the freeze
        **({"segments": segments} if len(segments) > 1 else {}),
        **({"late": dict(kept.late)} if kept.late else {}),
        **({"units": dict(kept.units)} if kept.units else {}),
        # a run that goes on sends what one that was not interrupted would send
        **({"took_part": sorted(kept.took_part)} if kept.took_part is not None else {}),
        **{name: values.tolist() for name, values in kept.numbers.items()},
        **engine.rule.books(),
    }


def shown(optimizer: OnebitOptimizer, index: int) -> dict[str, Tensor]:
    """Copies of what ``optimizer.state`` shows of a parameter that has made steps."""
    kept, rule = optimizer._engine.kept, optimizer._engine.rule
    moments = {"step": torch.tensor(float(kept.t[index]), dtype=torch.float32)}
    if index in kept.own:
        own = kept.own[index]
        moments |= {key: own[name].clone() for name, key in rule.arenas.items() if name in own}
        return _as_placed(moments, kept.layout.params[index])
    p = kept.layout.params[index]
    for name, key in {**rule.arenas, **rule.later_arenas}.items():
        if name in kept.flat and not kept.sharded:
            part = kept.part(name, index).clone()
        elif name == "m" and kept.momentum:
            part = kept.momentum_part(index, lambda bucket: _whole_momentum(optimizer, bucket))
        else:
            continue
        moments[key] = part.as_strided(p.shape, p.stride())
    rule.shown(index, moments)
    return _as_placed(moments, p)


def _whole_momentum(optimizer: OnebitOptimizer, bucket: Bucket) -> Tensor:
    """The momentum that a bucket holds, an fp32 flat; the last one asked for is kept until the next step."""
    kept = optimizer._engine.kept

    def make() -> Tensor:
        flat = kept.unpacked(bucket)
        kept.as_momentum(flat, bucket.first_block * bucket.block_size)
        return flat

    return optimizer._shown_state.scratch(bucket.index, make)


# ----- checks ---------------------------------------------------------------------------------------------------------


def _check_books(optimizer: OnebitOptimizer, saved: dict[str, Any] | None) -> None:
    """Raises where a state is not one of this algorithm."""
    name = type(optimizer).__name__
    if saved is None:
        if not optimizer._engine.rule.reads_plain:
            raise ValueError(f"{name} cannot continue from the state of a plain optimizer; load the weights only")
        return
    if saved["version"] > STATE_VERSION:
        raise ValueError(
            f"optimizer state of format {saved['version']}, newer than this release reads ({STATE_VERSION}); upgrade"
        )
    if saved["algorithm"] != optimizer.algorithm:
        raise ValueError(
            f"optimizer state of {saved['algorithm']!r} cannot be loaded into {optimizer.algorithm!r}; "
            "keep the algorithm, or load the weights only"
        )
    missing = [key for key in ("phase", "steps", "skipped", "ledger") if key not in saved]
    if missing:
        raise ValueError(
            f"optimizer state without {missing[0]!r} in its entry 'onebit'; load a complete state_dict() of {name}"
        )
    phases = [phase.value for phase in Phase]
    if saved["phase"] not in phases:
        raise ValueError(
            f"optimizer state has phase {saved['phase']!r}, and {name} knows {phases}; load a complete state_dict()"
        )
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    joined = [i for segment in saved.get("segments", ()) for i in segment]
    if strange := [i for i in (*saved.get("known", ()), *joined, *saved.get("late", ())) if i not in range(count)]:
        raise ValueError(
            f"optimizer state knows parameter {strange[0]}, this optimizer has {count}; load a complete state_dict() of {name}"
        )


def _of_plain(optimizer: OnebitOptimizer, saved: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """The state of a plain optimizer, by index; raises where the algorithm cannot go on from it."""
    wanted, name = optimizer._engine.rule.reads_plain, type(optimizer).__name__
    if saved and not any(wanted in state for state in saved.values()):
        raise ValueError(f"{name} cannot continue from an optimizer state without {wanted!r}; load the weights only")
    # torch.optim.SGD counts no steps, and has None for a momentum that it does not keep
    counted = {i: {"step": torch.ones(()), **s} if s.keys() == {"momentum_buffer"} else s for i, s in saved.items()}
    return {i: state for i, state in counted.items() if state.get(wanted, 0) is not None}


def _check_groups(optimizer: OnebitOptimizer, saved: list[dict[str, Any]]) -> None:
    """Raises where the groups of a state are not this optimizer's, or have options out of range."""
    sizes, ours = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if sizes != ours:
        raise ValueError(
            f"optimizer state has parameter groups of {sizes} parameters, this optimizer has groups of {ours}; make the optimizer "
            "with the groups of the run that was saved, or load the weights only"
        )
    for theirs, mine in zip(saved, optimizer.param_groups, strict=True):
        matters = {key: value for key, value in theirs.items() if key not in _HOW_NOT_WHAT}
        optimizer._engine.check_group({**mine, **matters})


def _check_saved(optimizer: OnebitOptimizer, saved: dict[int, dict[str, Tensor]]) -> None:
    """Raises where the state of a parameter, by its index, belongs to a parameter of another shape."""
    params, names = _parameters(optimizer), optimizer._engine.kept.parameter_names
    for i, state in saved.items():
        name, shape = names.get(params[i]) or f"parameter {i}", tuple(params[i].shape)
        if "step" not in state:
            raise ValueError(
                f"optimizer state of {name} has no 'step', so it is not that of an Adam; load the weights only"
            )
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.shape != params[i].shape:
                raise ValueError(
                    f"optimizer state has {key} of shape {tuple(value.shape)} for {name}, whose shape is {shape}; build the model that "
                    "was saved, with its parameters in the same order, or load the weights only"
                )


def _check_complete(
    optimizer: OnebitOptimizer, saved: dict[int, dict[str, Tensor]], books: dict[str, Any] | None
) -> None:
    """Raises where second moments that can no longer be learned are missing in a state of a later phase than the warm-up."""
    if books is None or books["phase"] == Phase.WARMUP.value or not books["steps"]:
        return
    # (states of earlier releases do not say who has made steps; somebody has)
    known = books.get("stepped", [] if saved else books.get("known", []))
    missing = [i for i in known if i not in saved]
    if missing:
        names = optimizer._engine.kept.parameter_names
        raise ValueError(
            f"optimizer state of phase {books['phase']!r} after {books['steps']} steps has no entry for "
            f"{names.get(_parameters(optimizer)[missing[0]]) or f'parameter {missing[0]}'}, which has made some: its second moments would "
            f"be 0 and it would not train; load a complete state_dict(), or start over with {type(optimizer).__name__}.reset_state()"
        )


def _parameters(optimizer: OnebitOptimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# ----- loading --------------------------------------------------------------------------------------------------------


def load(optimizer: OnebitOptimizer, state_dict: dict[str, Any]) -> None:
    """See ``OnebitOptimizer.load_state_dict()``; hooks are told."""
    state_dict = state_dict.copy()  # hooks may edit it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = before(optimizer, state_dict)
        if replaced is not None:
            state_dict = replaced
    unpack(optimizer, expanded(state_dict))
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def start_over(optimizer: OnebitOptimizer) -> None:
    """Loads the state of before the first step; masters, the ledger and the count of skipped steps go on."""
    engine, kept = optimizer._engine, optimizer._engine.kept
    rule = optimizer.rule_class(optimizer.options, optimizer.exchange)
    first = books(Engine(rule, engine.exchange, engine.algorithm, engine.kind, ()))
    known = kept.layout.known if kept.laid_out else []
    goes_on = {"known": known, "skipped": engine.skipped, "ledger": engine.link.ledger.as_dict()}
    masters = {i: {"step": torch.zeros(()), "master": engine.rule.shared_master(i)} for i in kept.masters}
    optimizer.load_state_dict(
        {"state": masters, "param_groups": packed_groups(optimizer), "onebit": {**first, **goes_on}}
    )


@torch.no_grad()
def unpack(optimizer: OnebitOptimizer, state_dict: dict[str, Any]) -> None:
    """``load_state_dict()``, of which no hook is told."""
    known = state_dict.get("onebit")
    _check_books(optimizer, known)
    _check_groups(optimizer, state_dict["param_groups"])
    order = [i for g in state_dict["param_groups"] for i in g["params"]]
    saved = {new: state_dict["state"][old] for new, old in enumerate(order) if old in state_dict["state"]}
    if known is None:
        saved = _of_plain(optimizer, saved)
    _check_saved(optimizer, saved)
    _check_complete(optimizer, saved, known)
    params = _parameters(optimizer)
    saved = {i: {key: local_part(value, params[i]) for key, value in of.items()} for i, of in saved.items()}
    with optimizer._engine.changing("load_state_dict()", anew=True):
        optimizer._engine.abandon()
        optimizer._shown_state.forget()
        optimizer._engine.link.agreement = Agreement()
        _take_groups(optimizer, state_dict["param_groups"])
        _take_state(optimizer, known or {}, saved)


def _take_groups(optimizer: OnebitOptimizer, groups: list[dict[str, Any]]) -> None:
    ours = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    with _without_hooks(optimizer, *_LOADING):
        torch.optim.Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": groups})
    for group, mine in zip(optimizer.param_groups, ours, strict=True):
        for key in _TORCH_ADAM_OPTIONS & set(group):
            del group[key]
        for key, value in mine.items():
            group.setdefault(key, value)


def _take_state(optimizer: OnebitOptimizer, known: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
    """Replaces all state by one that has been checked; ``known`` are its books, empty for those of a plain optimizer."""
    engine = optimizer._engine
    kept, rule = engine.kept, engine.rule
    # denominators of whole parameters are in the state; loading asks nobody
    shards, kept.shards = kept.shards, None
    kept.clear()
    if optimizer.compresses:  # (where a rank is alone, all steps are dense)
        kept.late = {i: (begun, ends) for i, (begun, ends) in known.get("late", {}).items()}
    # what the checkpoint knows is laid out, trainable now or not
    segments = known.get("segments", [])
    order = dict.fromkeys([i for segment in segments for i in segment])
    order |= dict.fromkeys(sorted({*saved, *known.get("known", ())}))
    lay_out(
        optimizer,
        connect=False,
        newcomers="known" not in known,
        known=list(order),
        segments=[len(segment) for segment in segments],
    )
    steps = [int(s["step"]) for s in saved.values()]
    kept.steps = known.get("steps", max(steps, default=0))
    engine.skipped, engine.skips_in_a_row = known.get("skipped", 0), known.get("skips_in_a_row", 0)
    if known:
        optimizer.ledger.load_dict(known["ledger"])
    for i, state in saved.items():
        kept.t[i] = int(state["step"])
        if i in kept.masters and "master" in state:
            kept.masters[i].copy_(state["master"])
        for name, key in rule.arenas.items():
            there = kept.own.get(i, kept.flat if i in kept.layout.slot_of else {})
            if key in state and name in there:
                kept.moment(name, i).copy_(state[key])
    kept.units = dict(known.get("units", {}))
    kept.took_part = set(known["took_part"]) if "took_part" in known else None
    for name, values in kept.numbers.items():
        numbers = known.get(name, [])  # parameters that have joined since have none
        values[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    phase = Phase(known.get("phase", rule.first_phase))
    rule.load(phase, known, saved, engine.enter_loaded)
    kept.shards = shards
    lost = any("reciprocal_denominator" in state for state in saved.values())
    if not known and lost and kept.phase is Phase.WARMUP:
        log.warning(
            "the optimizer state has lost its entry 'onebit' (torch.distributed.checkpoint.state_dict keeps 'state' and 'param_groups' "
            "alone), so %s goes on in the warm-up; keep optimizer.state_dict()['onebit'] beside it, and add it before loading",
            type(optimizer).__name__,
        )
    engine.link.begin_step(kept.steps + 1)


def lay_out(optimizer: OnebitOptimizer, **how: Any) -> None:
    """See ``Engine.lay_out()``; connected to another world since, all state is cut anew before newcomers, which have none, are numbered."""
    engine = optimizer._engine
    if engine.cut_for_another_world():
        engine.rule.leaving_world()
        unpack(optimizer, packed(optimizer))
    engine.lay_out(optimizer.param_groups, **how)


def load_flat(kept: Arenas, flat: Tensor, key: str, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Copies per-parameter tensors of a checkpoint, where there are any, into a flat over all blocks."""
    for i, state in saved.items():
        if key in state and i in kept.layout.slot_of and i not in kept.late:
            like = torch.empty_like(kept.layout.params[i], dtype=torch.float32).copy_(state[key])
            kept.layout.part(flat, i).copy_(memory_order(like))


# ----- what differs by rank -------------------------------------------------------------------------------------------


def rank_state(optimizer: OnebitOptimizer) -> dict[str, Any]:
    """See ``OnebitOptimizer.residual_state_dict()``."""
    kept, rule = optimizer._engine.kept, optimizer._engine.rule
    tensors = {key: kept.flat[name] for name, key in rule.arenas.items() if rule.per_rank and name in kept.flat}
    with optimizer._engine.changing("completing residuals"):
        for residual, key in ((kept.worker, "worker_residual"), (kept.server, "server_residual")):
            if residual is not None:
                tensors[key] = residual.tensor()
        return {**_rank_layout(optimizer), "tensors": {**tensors, **rule.rank_state()}}


def _rank_layout(optimizer: OnebitOptimizer) -> dict[str, Any]:
    kept, rule = optimizer._engine.kept, optimizer._engine.rule
    layout = kept.layout if kept.laid_out else None
    # what the state is cut for, which outlives the connection
    ranks = layout.ranks if layout is not None else optimizer.topology
    slots = [layout.params[i] for i in layout.slots] if layout is not None else []
    segments = layout.segments if layout is not None else []
    return {
        "version": STATE_VERSION,
        "algorithm": optimizer.algorithm,
        "steps": kept.steps,
        "world_size": ranks.size,
        "ranks_per_node": ranks.ranks_per_node,
        "rank": ranks.rank,
        "block_size": optimizer.exchange.block_size,
        "numels": [p.numel() for p in slots],
        # blocks of those who joined after the freeze lie behind the others'
        **({"segments": list(segments)} if len(segments) > 1 else {}),
        # blocks are cut in memory order
        "strides": [[stride for stride, size in zip(p.stride(), p.shape, strict=True) if size != 1] for p in slots],
        "bucket_blocks": [bucket.blocks for bucket in layout.buckets] if layout is not None else [],
        # how tensors of the rule lie over the blocks
        **(
            {"arenas": dict.fromkeys(rule.arenas.values(), WORKER if rule.by_shard else WHOLE)} if rule.per_rank else {}
        ),
        # and of the shards that this rank holds
        **(
            {"placed": [list(map(list, placed(p))) for p in slots], "shard": _shard_of(slots)}
            if kept.anything_sharded
            else {}
        ),
        **rule.rank_layout(),
    }


def _shard_of(slots: Sequence[Tensor]) -> list[list[int]]:
    """Coordinates of this rank in the meshes of some parameters."""
    return [list(p.source.device_mesh.get_coordinate() or ()) if isinstance(p, LocalShard) else [] for p in slots]


def load_rank_state(optimizer: OnebitOptimizer, state: dict[str, Any]) -> None:
    """See ``OnebitOptimizer.load_residual_state_dict()``."""
    optimizer._engine.rule.check_rank_state(state)
    mine, tensors = _rank_layout(optimizer), state["tensors"]
    keys = ["algorithm", "steps", "world_size", "ranks_per_node", "rank", "block_size", "preconditioned"]
    if tensors:  # before its first step an optimizer has no blocks, and nothing to load
        keys += ["numels", "segments", "strides", "placed", "shard", "bucket_blocks"]
    for key in keys:
        theirs, ours = state.get(key, False), mine.get(key, False)
        if theirs != ours:
            raise ValueError(
                f"residual state has {key}={theirs!r}, this run has {ours!r}; residuals cannot be loaded as they are"
                + remedy(key, theirs)
            )
    kept = optimizer._engine.kept
    with optimizer._engine.changing("load_residual_state_dict()"):
        if "worker_residual" in tensors:
            kept.allocate_residuals()
        for name, key in optimizer._engine.rule.arenas.items():
            if optimizer._engine.rule.per_rank and key in tensors:  # nothing was saved before the first step
                kept.flat[name].copy_(tensors[key])
        for residual, key in ((kept.worker, "worker_residual"), (kept.server, "server_residual")):
            if residual is not None and key in tensors:
                residual.tensor().copy_(tensors[key])
        optimizer._engine.rule.load_rank_state(tensors)
