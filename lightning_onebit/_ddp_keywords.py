"""What programs written for Lightning's ``DDPStrategy`` say, and what answers to it here.

Each keyword of ``DDPStrategy`` and of ``DistributedDataParallel`` either is not needed, which an info line says, or has a counterpart,
which an error names. So has what programs look for in the wrapper around the module.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from lightning_onebit._say import rank_zero_info
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.registry import ALGORITHMS

#: keywords that ask for nothing that is missing here -> why
_NOT_NEEDED = {
    "find_unused_parameters": "parameters without a gradient, on some ranks or on all of them, are always allowed for",
    "static_graph": "no graph is recorded",
    "gradient_as_bucket_view": "averaged gradients always are views of their bucket",
    "check_reduction": "nothing is checked by it in current releases of torch either",
    "skip_all_reduce_unused_params": "parameters without a gradient are always allowed for",
    "init_sync": "all ranks get rank 0's weights and buffers at set-up",
}

#: keywords of Lightning's ``DDPStrategy``, which configurations may have
DDP_KEYWORDS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
    "bucket_cap_mb",
)

#: where precision, devices and nodes are said
_OWNERS = {True: "Fabric", False: "Trainer"}


def heed_ddp_keywords(
    given: Mapping[str, Any], *, algorithm: str, known: Collection[str], fabric: bool = False
) -> None:
    """Says why keywords of DDP's are not needed, or refuses them with what to write instead. None counts as not given.

    Args:
        given: keywords that are no options of the strategy.
        algorithm: of the strategy.
        known: names of the strategy's options, for near matches.
        fabric: whether it is Fabric's strategy.

    Raises:
        ValueError: a keyword of DDP's that asks for something else than what happens; the message has the counterpart.
        TypeError: a keyword that nobody knows; the message has near matches.
    """
    refused = _refusals(algorithm, fabric)
    for name, value in given.items():
        if name in _NOT_NEEDED and not (name == "init_sync" and value is False):
            if value is not None:
                more = ""
                if name == "static_graph" and not fabric:
                    more = " (re-entrant activation checkpointing needs overlap_dense=False)"
                rank_zero_info(f"{name}={value!r} is not needed: {_NOT_NEEDED[name]}{more}.")
        elif name in refused:
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is no option of OnebitStrategy, which does without DistributedDataParallel: "
                    + refused[name].format(value=value)
                )
        else:
            raise TypeError(_unknown(name, value, known, fabric))


def _refusals(algorithm: str, fabric: bool) -> dict[str, str]:
    """Keywords that ask for something else than what happens here -> what to write instead."""
    compresses = (
        f"the strategy itself compresses what ranks send (here by {algorithm!r}), and no hook of torch's comes between; leave it out, or "
        "keep the hook with DDPStrategy"
    )
    owner = _OWNERS[fabric]
    devices = f"`devices` of the {owner} says it; leave it out"
    bucket = "exchange=ExchangeOptions(bucket_mb={value!r})"
    make = "fabric.strategy.optimizer(params, {})"
    local = "local_steps=LocalSteps(...)"
    steps = make.format(local) if fabric else f'OnebitStrategy("zero_one_adam", {local})'
    return {
        "ddp_comm_hook": compresses,
        "ddp_comm_state": compresses,
        "ddp_comm_wrapper": compresses,
        "model_averaging_period": (
            f"steps between two averages are 0/1 Adam's local steps; leave it out and give {steps}"
            + (' with Fabric(strategy="zero_one_adam")' if fabric else "")
        ),
        "bucket_cap_mb": f"the size of buckets is {make.format(bucket) if fabric else bucket} here (MB of fp32 gradients)",
        "process_group": "the strategy makes process groups of all ranks by itself; leave it out",
        "mixed_precision": f"give `precision` to the {owner}",
        "delay_all_reduce_named_params": "dense averaging has no such list; leave it out"
        + ("" if fabric else " (overlap_dense=False averages everything after backward)"),
        "param_to_hook_all_reduce": "dense averaging has no such hook; leave it out"
        + ("" if fabric else " (overlap_dense=False averages everything after backward)"),
        "init_sync": "all ranks get rank 0's weights and buffers at set-up, for replicas must be equal; leave it out",
        "device_ids": devices,
        "output_device": devices,
        "dim": devices,
        "num_nodes": f"give `num_nodes` to the {owner}",
        "sync_batchnorm": "give `sync_batchnorm` to the Trainer"
        if not fabric
        else "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup",
    }


def _unknown(name: str, value: Any, known: Collection[str], fabric: bool) -> str:
    """What to say about a keyword that nobody knows."""
    said = f"OnebitStrategy has no option {name}={value!r}"
    optimizer = "fabric.strategy.optimizer" if fabric else "self.trainer.strategy.optimizer"
    options = set().union(*(algorithm.options for algorithm in ALGORITHMS.values()))
    if name in {"lr", "betas", "beta", "eps", "weight_decay"} or (fabric and name in options):
        return f"{said}: it is one of the optimizer, so give it to `{optimizer}(params, {name}={value!r})`"
    if name in {f.name for f in fields(ExchangeOptions)}:
        where = "fabric.strategy.optimizer(params, ...)" if fabric else "the strategy"
        return f"{said}: it is one of the exchange, so give `exchange=ExchangeOptions({name}={value!r})` to {where}"
    near = difflib.get_close_matches(name, {*known, *_NOT_NEEDED, *(options if fabric else ())}, n=3, cutoff=0.6)
    if near:
        listed = " or ".join(
            f"{match}{f' (of `{optimizer}`)' if fabric and match in options else ''}" for match in near
        )
        return f"{said}: did you mean {listed}?"
    return f"{said}: see help(lightning_onebit.{'fabric.' if fabric else ''}OnebitStrategy) for those it has"


#: attributes of the wrapper that programs reach for -> what to write instead
_WRAPPER = {
    "module": "`trainer.lightning_module`, which `trainer.model` is here too",
    "no_sync": "`with trainer.strategy.block_backward_sync():` around the backward whose gradients only accumulate",
    "join": "loaders of the same length on all ranks",
    "register_comm_hook": "the strategy's `algorithm`",
}


def explain_missing_wrapper(error: BaseException, module: Any) -> None:
    """Adds what to write instead to the error of a program that looks for DistributedDataParallel around a module."""
    if not isinstance(error, AttributeError) or module is None or getattr(error, "obj", None) is not module:
        return
    instead = _WRAPPER.get(str(getattr(error, "name", "")))
    if instead is not None:
        error.args = (f"{error}. The strategy wraps no module in DistributedDataParallel: use {instead}.",)
