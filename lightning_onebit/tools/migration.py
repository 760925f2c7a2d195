"""From a DeepSpeed configuration with a 1-bit optimizer to a strategy, an optimizer and the Trainer's arguments."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_onebit.algorithms import LambCoefficients, LambOptions, LocalSteps
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.engine.options import check_integer, check_number
from lightning_onebit.strategy import trees


class _Optimizer(NamedTuple):
    """A 1-bit optimizer of DeepSpeed.

    Attributes:
        algorithm: what it is here.
        options: its options by their names there -> here.
        defaults: what DeepSpeed 0.19.6 takes where the configuration is silent and this package would take something else; names of there.
    """

    algorithm: str
    options: dict[str, str]
    defaults: dict[str, Any]


def _alike(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


_LAMB = {
    "max_coeff": "trust_clip.high",
    "min_coeff": "trust_clip.low",
    "coeff_beta": "coefficients.beta",
    "factor_max": "coefficients.factor_max",
    "factor_min": "coefficients.factor_min",
    "factor_threshold": "coefficients.threshold",
}
_LOCAL_STEPS = {"local_step_scaler": "local_steps.double_every", "local_step_clipper": "local_steps.max_gap"}
#: by ``optimizer.type``, in lower case as DeepSpeed compares it
_OPTIMIZERS = {
    "onebitadam": _Optimizer("onebit_adam", _alike("freeze_step"), {"freeze_step": 100_000}),
    "onebitlamb": _Optimizer("onebit_lamb", {**_alike("freeze_step"), **_LAMB}, {"freeze_step": 100_000}),
    "zerooneadam": _Optimizer(
        "zero_one_adam",
        {"var_freeze_step": "freeze_step", **_LOCAL_STEPS},
        {"var_freeze_step": 100_000, "local_step_scaler": 32_678},
    ),
}
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")

#: parameters of DeepSpeed's classes that have no counterpart, as below
_PARAMETERS: dict[str, tuple[Any, str]] = {
    "bias_correction": (
        False,
        "DeepSpeed accepted and ignored it, so the optimizer is made with bias_correction=False, as your runs have trained; "
        "build OnebitStrategy(bias_correction=True, ...) yourself for AdamW's correction (and tune lr again)",
    ),
    "max_grad_norm": (0, "DeepSpeed ignored it here; the Trainer's gradient_clip_val clips"),
    "comm_backend_name": (
        "nccl",
        "the backend follows the device; OnebitStrategy(process_group_backend=...) names another",
    ),
    "eps_inside_sqrt": (False, "eps is added to the root; DeepSpeed ignored the option as well"),
    "var_update_scaler": (16, "refreshes are spaced as with 16, the published number"),
    "amsgrad": (False, "no 1-bit optimizer has it, DeepSpeed's had not either; remove it"),
    "cuda_aware": (False, "it concerns MPI, which is not used"),
}
#: top-level keys that have no counterpart, with what to do instead; without effect (hence harmless) at the given value
_WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "prescale_gradients": (False, "gradients are averaged in fp32 or in their own dtype; remove it"),
    "gradient_predivide_factor": (1.0, "gradients are averaged without an intermediate factor; remove it"),
    "gradient_allreduce_op": (
        "mean",
        "gradients are averaged: multiply lr by the number of ranks where a sum was meant",
    ),
    "sparse_gradients": (False, "sparse gradients are refused: build embeddings with sparse=False"),
    "communication_data_type": (None, "dense steps are sent in the gradients' own dtype, compressed ones in one bit"),
    "disable_allgather": (False, "it concerns ZeRO; remove it"),
    "zero_allow_untested_optimizer": (False, "it concerns ZeRO; remove it"),
    "zero_force_ds_cpu_optimizer": (True, "it concerns ZeRO-Offload; remove it"),
    "wall_clock_breakdown": (False, "CompressionStats logs times; Trainer(profiler='simple') shows the rest"),
    "memory_breakdown": (False, "use DeviceStatsMonitor"),
    "dump_state": (False, "the strategy's repr and CompressionStats say what runs"),
    "dataloader_drop_last": (False, "give drop_last=True to your DataLoader"),
    "graph_harvesting": (False, "use torch.compile on the module"),
}
_SECTIONS = {
    "zero_optimization": "1-bit optimizers need whole gradients and states on every rank (DeepSpeed refused the combination as well); for "
    "models that do not fit, keep FSDP or ZeRO without compression",
    "scheduler": "return a torch scheduler beside the optimizer from configure_optimizers, with interval 'step'",
    "tensorboard": "Trainer(logger=TensorBoardLogger(...)), and CompressionStats among the callbacks",
    "csv_monitor": "Trainer(logger=CSVLogger(...)), and CompressionStats among the callbacks",
    "wandb": "Trainer(logger=WandbLogger(...)), and CompressionStats among the callbacks",
    "comet": "Trainer(logger=CometLogger(...)), and CompressionStats among the callbacks",
    "amp": "Apex is not supported; give precision='16-mixed' to the Trainer",
    "activation_checkpointing": "call torch.utils.checkpoint in the module",
    "flops_profiler": "use a profiler of Lightning",
    "comms_logger": "CompressionStats logs bytes and times of the communication",
    "checkpoint": "use Lightning's ModelCheckpoint",
    "aio": "it concerns ZeRO-Infinity; remove it",
    "elasticity": "start again with another number of ranks: checkpoints resume on other worlds",
    "data_types": "moments are fp32, residuals and frozen denominators bf16 (fp32 with ExchangeOptions(state_dtype='float32'))",
    "pipeline": "pipeline parallelism does not go together with this strategy",
    "sparse_attention": "build it into the module",
    "compression_training": "it concerns the model, not the communication; build it into the module",
    "eigenvalue": "it concerns compression_training; remove it",
    "progressive_layer_drop": "build it into the module",
    "curriculum_learning": "build it into the data loader",
    "data_efficiency": "build it into the data loader",
    "autotuning": "use `lightning-onebit plan` and `lightning-onebit bench`",
    "compile": "use torch.compile on the module",
}
_SCALER = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


@dataclass(frozen=True)
class Migration:
    """What a DeepSpeed configuration has become.

    Attributes:
        algorithm: name of the algorithm.
        strategy: an ``OnebitStrategy`` with its options.
        trainer: arguments for the Trainer: ``strategy``, and what else the configuration decides.
        hyperparameters: arguments of the optimizer (``lr``, ``betas``, ``eps``, ``weight_decay``).
        honoured: configuration key -> what it became, in words.
        unhonoured: configuration key -> why not, and what to do instead.
    """

    algorithm: str
    strategy: Any
    trainer: dict[str, Any]
    hyperparameters: dict[str, Any]
    honoured: dict[str, str] = field(default_factory=dict)
    unhonoured: dict[str, str] = field(default_factory=dict)

    def optimizer(self, params: Any, **changes: Any) -> OnebitOptimizer:
        """The configuration's optimizer, for ``configure_optimizers``.

        Args:
            params: parameters or parameter groups.
            **changes: hyperparameters that replace those of the configuration.
        """
        made: OnebitOptimizer = self.strategy.optimizer(params, **{**self.hyperparameters, **changes})
        return made

    def __str__(self) -> str:
        lines = [f"DeepSpeed configuration -> {self.algorithm}", "taken over:"]
        lines += [f"  {key}: {what}" for key, what in self.honoured.items()]
        if self.unhonoured:
            lines += ["NOT taken over:", *(f"  {key}: {why}" for key, why in self.unhonoured.items())]
        return "\n".join(lines)


def from_deepspeed_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int | None = None,
    tree: trees.Tree | None = None,
) -> Migration:
    """Translates a DeepSpeed configuration whose optimizer is OneBitAdam, OneBitLamb or ZeroOneAdam.

    Every key of the configuration ends up in ``honoured`` or in ``unhonoured``; print the result to see them. Where the configuration is
    silent, DeepSpeed 0.19.6's defaults count (a ``freeze_step`` of 100,000, for instance). ``bias_correction`` is False whatever it says,
    because DeepSpeed accepted the key and ignored it.

    Args:
        config: the configuration, or the path of its JSON file.
        world_size: number of ranks; needed only where accumulation has to be worked out of batch sizes, which are held against it.
        tree: ``"lightning"`` or ``"pytorch_lightning"``; None: the one you have imported.

    Returns:
        Strategy, optimizer factory and Trainer arguments, and what could not be taken over.

    Raises:
        TypeError: not a mapping, a section that should be one is not, or a value of the wrong type.
        ValueError: another optimizer, a file that is no JSON, a value that no option accepts, settings that exclude each other, or
            batch sizes that contradict each other.

    Example:
        >>> migration = from_deepspeed_config("ds_config.json", world_size=16)
        >>> print(migration)
        >>> trainer = Trainer(devices=8, num_nodes=2, **migration.trainer)

    In ``configure_optimizers``, return ``migration.optimizer(self.parameters())``.
    """
    check_integer("world_size", world_size, least=1, optional=True)
    return _Translation(_read(config), world_size).result(tree)


def _read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        try:
            config = json.loads(Path(config).read_text(), object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{config} is no JSON ({error}); comments and trailing commas, which DeepSpeed's reader allows, must go"
            ) from error
    if not isinstance(config, Mapping):
        raise TypeError(f"config={config!r} must be a mapping or the path of a JSON file, not {type(config).__name__}")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the configuration holds {[n for n in found if names.count(n) > 1]} more than once; keep one")
    return found


class _Translation:
    """One pass over a configuration; every handler files its keys under honoured or unhonoured."""

    def __init__(self, config: Mapping[str, Any], world_size: int | None) -> None:
        self.config = config
        self.world_size = world_size
        self.honoured: dict[str, str] = {}
        self.unhonoured: dict[str, str] = {}
        self.trainer: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.hyperparameters: dict[str, Any] = {}

    def result(self, tree: trees.Tree | None) -> Migration:
        known = self._known()
        self._optimizer(known)
        self._batches()
        self._precision()
        handlers = {"gradient_clipping": self._clipping, "steps_per_print": self._printing}
        filed = {key.partition(".")[0] for key in (*self.honoured, *self.unhonoured)}
        for key, value in self.config.items():
            if handler := handlers.get(key):
                handler(key, value)
            elif key not in filed:
                self._rest(key, value)
        strategy = trees.bound_module(tree).OnebitStrategy(known.algorithm, **_gathered(self.options))
        trainer = {"strategy": strategy, **self.trainer}
        return Migration(known.algorithm, strategy, trainer, self.hyperparameters, self.honoured, self.unhonoured)

    def _section(self, *path: str) -> Mapping[str, Any]:
        found: Any = self.config
        for depth, key in enumerate(path, 1):
            found = found.get(key, {})
            if not isinstance(found, Mapping):
                name = ".".join(path[:depth])
                raise TypeError(f"{name}={found!r} must be a section (a mapping), not {type(found).__name__}")
        return found  # type: ignore[no-any-return]

    def _known(self) -> _Optimizer:
        named = self._section("optimizer").get("type")
        known = _OPTIMIZERS.get(str(named).lower())
        if known is None:
            raise ValueError(
                f"optimizer.type={named!r} is none of OneBitAdam, OneBitLamb and ZeroOneAdam. Nothing of DeepSpeed is needed for other "
                "optimizers: use Trainer(strategy='onebit_adam') and return torch.optim.AdamW from configure_optimizers"
            )
        self.honoured["optimizer.type"] = f"strategy {known.algorithm!r}"
        return known

    def _optimizer(self, known: _Optimizer) -> None:
        for key, value in self._section("optimizer").items():
            if key not in ("type", "params"):
                self._unless(f"optimizer.{key}", value, False, "it concerns DeepSpeed's fused optimizers; remove it")
        params = self._section("optimizer", "params")
        self.options = {"bias_correction": False, **{known.options[name]: v for name, v in known.defaults.items()}}
        for name, value in params.items():
            self._parameter(known, name, value)
        for name, value in known.defaults.items():
            if name not in params:
                key = f"optimizer.params.{name} (absent)"
                self.honoured[key] = f"{known.options[name]}={value!r}, DeepSpeed's default"
        if self.options.get("local_steps.max_gap") == 1:
            # no steps between synchronisations, whatever the scaler
            del self.options["local_steps.max_gap"]
            self.options.pop("local_steps.double_every", None)
            key = "optimizer.params.local_step_scaler"
            if self.honoured.pop(f"{key} (absent)", None) is None:
                self.honoured[key] = "no effect with local_step_clipper=1; left out"

    def _parameter(self, known: _Optimizer, name: str, value: Any) -> None:
        """One of ``optimizer.params``."""
        key, option = f"optimizer.params.{name}", known.options.get(name)
        if name == "betas" and value != "auto" and not isinstance(value, (list, tuple)):
            raise TypeError(f"{key}={value!r} must be a list of two numbers, not {type(value).__name__}")
        if value == "auto":
            remedy = f"write the value: optimizer(params, {name}=...)"
            if option is not None:  # the strategy's, which the optimizer cannot be given otherwise
                default = f"{self.options[option]!r}, DeepSpeed's" if option in self.options else "this package's"
                remedy = f"write the number into the configuration (until then it is the default, {default})"
            self.unhonoured[key] = f"'auto' is filled in by another trainer; {remedy}"
        elif option is not None:
            self.options[option] = value
            self.honoured[key] = f"{option}={value!r} of the strategy"
        elif name in _HYPERPARAMETERS:
            self.hyperparameters[name] = tuple(value) if name == "betas" else value
            self.honoured[key] = f"{name}={value!r} of the optimizer"
        elif name in _PARAMETERS:
            self._unless(key, value, *_PARAMETERS[name])
        else:
            self.unhonoured[key] = "unknown to DeepSpeed 0.19.6's class and to this package; remove it"

    def _batches(self) -> None:
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = {key: self.config.get(key) for key in keys}
        for key in keys:
            if given[key] == "auto":
                self.unhonoured[key] = "'auto' is filled in by another trainer; write the number"
                given[key] = None
            check_integer(key, given[key], least=1, optional=True)
        whole, micro, steps = given.values()
        self._check_batches(whole, micro, steps)
        if steps is None and whole is not None and micro is not None:
            steps = self._accumulation(whole, micro)
        elif steps is not None:
            self.honoured["gradient_accumulation_steps"] = f"accumulate_grad_batches={steps}"
        if steps is not None:
            self.trainer["accumulate_grad_batches"] = steps
        if micro is not None:
            self.unhonoured["train_micro_batch_size_per_gpu"] = f"give batch_size={micro} to your DataLoader"
        if whole is not None and "train_batch_size" not in self.honoured:
            per_rank = whole // (self.world_size * (steps or 1)) if self.world_size and micro is None else None
            loader = f"give {f'batch_size={per_rank}' if per_rank else 'a batch_size'} to your DataLoader"
            remedy = f"{loader}: ranks * batch_size * accumulate_grad_batches is to be {whole}"
            self.unhonoured.setdefault("train_batch_size", remedy)

    def _check_batches(self, whole: int | None, micro: int | None, steps: int | None) -> None:
        """Raises where no number of ranks, or not the one that is known, makes the sizes one batch, as DeepSpeed does."""
        known = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
            "world_size": self.world_size,
        }
        factors = {name: value for name, value in known.items() if value is not None}
        product = math.prod(factors.values())
        if whole is None or whole == product or (whole % product == 0 and len(factors) < len(known)):
            return
        said = " times ".join(f"{name}={value}" for name, value in factors.items())
        relation = "is not" if len(factors) == len(known) else "is no multiple of"
        raise ValueError(f"train_batch_size={whole} {relation} {said}; change one of them")

    def _accumulation(self, whole: int, micro: int) -> int | None:
        if self.world_size is None:
            self.unhonoured["train_batch_size"] = (
                "accumulate_grad_batches follows from it and the number of ranks: call from_deepspeed_config(..., world_size=...)"
            )
            return None
        steps = whole // (micro * self.world_size)
        self.honoured["train_batch_size"] = f"accumulate_grad_batches={steps} on {self.world_size} ranks"
        return steps

    def _precision(self) -> None:
        chosen = {}
        for key in ("fp16", "bf16", "bfloat16", "torch_autocast"):
            section = self._section(key)
            enabled = self._switch(key, section)
            if enabled is True:
                dtype = section.get("dtype", "bfloat16") if key == "torch_autocast" else key
                chosen[f"{key}.enabled"] = _precision_of(dtype)
            for name, value in section.items():
                if name != "enabled" and enabled is False:
                    self.honoured[f"{key}.{name}"] = "without effect: the section is off"
                elif key == "torch_autocast" and name == "dtype" and enabled is True:
                    self.honoured[f"{key}.dtype"] = f"precision={chosen[f'{key}.enabled']!r}"
                elif name != "enabled":
                    self._detail(key, name, value)
        if len(set(chosen.values())) > 1:
            raise ValueError(f"{' and '.join(chosen)} are both on and exclude each other; keep one")
        for key, precision in chosen.items():
            self.trainer["precision"] = precision
            self.honoured[key] = f"precision={precision!r}"

    def _detail(self, key: str, name: str, value: Any) -> None:
        """A setting of a precision."""
        said = f"{key}.{name}"
        if key == "torch_autocast":
            remedy = "give precision to the Trainer" if name == "dtype" else "torch's own list of operations counts"
            self.unhonoured[said] = remedy
        elif name in _SCALER:
            self.unhonoured[said] = (
                f"{value!r}: give the Trainer plugins=[MixedPrecision('16-mixed', 'cuda', scaler=torch.amp.GradScaler('cuda', "
                "init_scale=..., growth_interval=...))]; an overflow on one rank skips the step on all"
            )
        else:
            self._unless(said, value, name == "check_grad_overflow", "Lightning's precision plugin decides it")

    def _switch(self, key: str, section: Mapping[str, Any]) -> bool | str:
        """Whether a section is on, or ``"auto"``; files what is not on."""
        enabled = section.get("enabled", False)
        if enabled == "auto":
            self.unhonoured[f"{key}.enabled"] = "'auto' is filled in by another trainer; give precision to the Trainer"
            return "auto"
        if not isinstance(enabled, bool):
            raise TypeError(f'{key}.enabled={enabled!r} must be true, false or "auto"')
        if "enabled" in section and not enabled:
            self.honoured[f"{key}.enabled"] = "off"
        return enabled

    def _clipping(self, key: str, value: Any) -> None:
        if value == "auto":
            self.unhonoured[key] = "'auto' is filled in by another trainer; give gradient_clip_val to the Trainer"
            return
        if value is None or value is False:
            value = 0
        check_number(key, value, least=0)
        if value:
            self.trainer["gradient_clip_val"] = float(value)
            self.honoured[key] = (
                f"gradient_clip_val={float(value)!r} (by one norm over all ranks, not by each rank's own)"
            )
        else:
            self.honoured[key] = "off"

    def _printing(self, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.unhonoured[key] = "give log_every_n_steps to the Trainer"
            return
        self.trainer["log_every_n_steps"] = value
        self.honoured[key] = f"log_every_n_steps={value}"

    def _rest(self, key: str, value: Any) -> None:
        """A key that nothing here corresponds to."""
        if key in _WITHOUT_COUNTERPART:
            self._unless(key, value, *_WITHOUT_COUNTERPART[key])
            return
        off = isinstance(value, Mapping) and (not value or value.get("enabled") is False)
        if key == "zero_optimization":
            off = not self._section(key).get("stage", 0)
        for leaf in _leaves(key, value):
            if off:
                self.honoured[leaf] = "off"
            else:
                self.unhonoured[leaf] = _SECTIONS.get(key, "it has no counterpart here")

    def _unless(self, key: str, value: Any, harmless: Any, why: str) -> None:
        """Files a key as without effect at a harmless value, as not taken over otherwise."""
        if value == harmless or value is None:
            self.honoured[key] = "off" if not harmless else f"{harmless!r}, as it is here anyway"
        else:
            self.unhonoured[key] = why


def _gathered(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a strategy; those that are named ``object.field`` become fields of an object."""
    found = {name: value for name, value in options.items() if "." not in name}

    def fields(owner: str) -> dict[str, Any]:
        return {name.partition(".")[2]: value for name, value in options.items() if name.startswith(f"{owner}.")}

    if clip := fields("trust_clip"):
        low, high = LambOptions.trust_clip
        found["trust_clip"] = (clip.get("low", low), clip.get("high", high))
    if coefficients := fields("coefficients"):
        found["coefficients"] = LambCoefficients(**coefficients)
    if local_steps := fields("local_steps"):
        found["local_steps"] = LocalSteps(**local_steps)
    return found


def _precision_of(dtype: Any) -> str:
    """The Trainer's precision for a dtype of DeepSpeed's."""
    name = str(dtype).removeprefix("torch.")
    if name in ("float16", "fp16", "half"):
        return "16-mixed"
    if name in ("bfloat16", "bf16"):
        return "bf16-mixed"
    raise ValueError(
        f"torch_autocast.dtype={dtype!r} is unknown; choose 'float16' or 'bfloat16', or switch the section off"
    )


def _leaves(key: str, value: Any) -> list[str]:
    """Dotted names of everything in a section."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, part in value.items() for leaf in _leaves(f"{key}.{name}", part)]
