"""What programs written for Lightning's ``DDPStrategy`` say, and what answers to it here.

Each keyword of ``DDPStrategy`` and of ``DistributedDataParallel`` either is not needed, which an info line says, or has a counterpart,
which an error names. So has what programs look for in the wrapper around the module.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from lightning_onebit._say import rank_zero_info
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine.options import arguments_text
from lightning_onebit.strategy.registry import ALGORITHMS, algorithm_names, option_parameters, option_texts

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

#: keywords that ask for something else than what happens here -> what to write instead
_REFUSED = {
    **dict.fromkeys(
        ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"),
        "the strategy itself compresses what ranks send (here by {algorithm!r}), and no hook of torch's comes between; leave it out, or "
        "keep the hook with DDPStrategy",
    ),
    **dict.fromkeys(("device_ids", "output_device", "dim"), "`devices` of the {owner} says it; leave it out"),
    "model_averaging_period": "steps between two averages are 0/1 Adam's local steps; leave it out and give "
    'OnebitStrategy("zero_one_adam", local_steps=LocalSteps(...))',
    "bucket_cap_mb": "the size of buckets is exchange=ExchangeOptions(bucket_mb={value!r}) here (MB of fp32 gradients)",
    "process_group": "the strategy makes process groups of all ranks by itself; leave it out",
    "mixed_precision": "give `precision` to the {owner}",
    "delay_all_reduce_named_params": "dense averaging has no such list; leave it out (overlap_dense=False averages everything after "
    "backward)",
    "param_to_hook_all_reduce": "dense averaging has no such hook; leave it out (overlap_dense=False averages everything after backward)",
    "init_sync": "all ranks get rank 0's weights and buffers at set-up, for replicas must be equal; leave it out",
    "num_nodes": "give `num_nodes` to the {owner}",
    "sync_batchnorm": "give `sync_batchnorm` to the Trainer",
}
#: those that have another counterpart with Fabric
_REFUSED_BY_FABRIC = {
    "model_averaging_period": "steps between two averages are 0/1 Adam's local steps; leave it out and give "
    'fabric.strategy.optimizer(params, local_steps=LocalSteps(...)) with Fabric(strategy="zero_one_adam")',
    "bucket_cap_mb": "the size of buckets is fabric.strategy.optimizer(params, exchange=ExchangeOptions(bucket_mb={value!r})) here (MB of "
    "fp32 gradients)",
    "delay_all_reduce_named_params": "dense averaging has no such list; leave it out",
    "param_to_hook_all_reduce": "dense averaging has no such hook; leave it out",
    "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup",
}


def heed_ddp_keywords(
    given: Mapping[str, Any],
    *,
    algorithm: str,
    known: Collection[str],
    fabric: bool = False,
    strategy: str = "OnebitStrategy",
) -> None:
    """Says why keywords that are no options of a strategy are not needed, or refuses them. None counts as not given.

    ``known`` are the names of its options, for near matches, ``strategy`` that of its class.

    Raises:
        ValueError: a keyword of DDP's that asks for something else than what happens; the message has the counterpart.
        TypeError: a keyword that nobody knows; the message has near matches.
    """
    for name, value in given.items():
        if name not in _NOT_NEEDED and name not in _REFUSED:
            raise TypeError(_unknown(name, value, known, fabric, strategy))
        if value is None:
            continue
        if name in _NOT_NEEDED and not (name == "init_sync" and value is False):
            checkpointing = " (re-entrant activation checkpointing needs overlap_dense=False)"
            more = checkpointing if name == "static_graph" and not fabric else ""
            rank_zero_info(f"{name}={value!r} is not needed: {_NOT_NEEDED[name]}{more}.")
            continue
        remedy = {**_REFUSED, **(_REFUSED_BY_FABRIC if fabric else {})}[name]
        raise ValueError(
            f"{name}={value!r} is no option of {strategy}, which does without DistributedDataParallel: "
            + remedy.format(value=value, algorithm=algorithm, owner="Fabric" if fabric else "Trainer")
        )


def _unknown(name: str, value: Any, known: Collection[str], fabric: bool, strategy: str) -> str:
    """What to say about a keyword that nobody knows."""
    said = f"{strategy} has no option {name}={value!r}"
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
    return f"{said}: see help(lightning_onebit.{'fabric.' if fabric else ''}{strategy}) for those it has"


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


def show_options(init: Any) -> None:
    """Lets ``help()`` and LightningCLI see the options of all algorithms, and DDP's keywords, as keywords of a strategy.

    ``init`` is its constructor, of which the last parameter is ``**options``.
    """
    vars(init).pop("__signature__", None)
    kinds = {**get_type_hints(init), "algorithm": Literal[algorithm_names()]}
    own = [p.replace(annotation=kinds.get(n, p.annotation)) for n, p in inspect.signature(init).parameters.items()]
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    ddp = [inspect.Parameter(name, by_keyword, default=None, annotation=Any) for name in DDP_KEYWORDS]
    init.__signature__ = inspect.Signature([*own[:-1], *option_parameters().values(), *ddp])
    keywords = dict.fromkeys(
        DDP_KEYWORDS, "of DistributedDataParallel: not needed, or refused with what to write instead."
    )
    init.__doc__ = arguments_text({**option_texts(), **keywords})
