"""DeepSpeed configurations become strategies; every key is accounted for; the result trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning_support import enter

import lightning_onebit as ob
from lightning_onebit.strategy.registry import find_algorithm

#: as in DeepSpeed's own tutorials, with what users add
BERT = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 100,
    "prescale_gradients": False,
    "optimizer": {
        "type": "OneBitAdam",
        "params": {
            "lr": 4e-4,
            "betas": [0.9, 0.99],
            "weight_decay": 0.01,
            "bias_correction": True,
            "freeze_step": 23000,
            "comm_backend_name": "nccl",
            "cuda_aware": False,
            "max_grad_norm": 1.0,
        },
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "zero_optimization": {"stage": 0},
}


def leaves(value: Any, prefix: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return {leaf for key, part in value.items() for leaf in leaves(part, f"{prefix}.{key}" if prefix else key)}


def accounted(migration: ob.Migration, config: dict[str, Any]) -> None:
    """Every key is in exactly one of the two lists, and none that the configuration does not have."""
    honoured = {key for key in migration.honoured if not key.endswith("(absent)")}
    assert {key for key in honoured if config.get(key) != {}} | set(migration.unhonoured) == leaves(config)
    assert not honoured & set(migration.unhonoured)
    assert all(len(why) > 2 for why in (*migration.honoured.values(), *migration.unhonoured.values()))


def test_a_configuration_of_the_tutorial_is_taken_over() -> None:
    migration = ob.from_deepspeed_config(BERT, world_size=64)
    assert migration.trainer == {
        "strategy": migration.strategy,
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 100,
        "precision": "16-mixed",
    }
    optimizer = migration.optimizer([torch.nn.Parameter(torch.zeros(3))])
    assert isinstance(optimizer, ob.OnebitAdam) and optimizer.freeze_step == 23000
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (4e-4, (0.9, 0.99), 0.01)
    assert optimizer.options.bias_correction is False, "as DeepSpeed trained"
    assert set(migration.unhonoured) == {
        "train_micro_batch_size_per_gpu",
        "optimizer.params.bias_correction",
        "optimizer.params.max_grad_norm",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
    }
    accounted(migration, BERT)
    text = str(migration)
    assert "batch_size=16" in text and text.index("taken over") < text.index("NOT taken over")


LAMB = {
    "freeze_step": 1000,
    **{"max_coeff": 0.3, "min_coeff": 0.02, "coeff_beta": 0.8},
    **{"factor_max": 3.0, "factor_min": 0.6, "factor_threshold": 0.2},
}
OUR_LAMB = {
    "freeze_step": 1000,
    "trust_clip": (0.02, 0.3),
    "coefficients": ob.LambCoefficients(beta=0.8, factor_max=3.0, factor_min=0.6, threshold=0.2),
}
NO_LOCAL_STEPS = {"freeze_step": 5}


@pytest.mark.parametrize(
    ("type_", "params", "algorithm", "options", "absent"),
    [
        ("OneBitAdam", {}, "onebit_adam", {"freeze_step": 100_000}, {"freeze_step"}),
        ("onebitadam", {"freeze_step": 7}, "onebit_adam", {"freeze_step": 7}, set()),
        ("OneBitLamb", LAMB, "onebit_lamb", OUR_LAMB, set()),
        ("OneBitLamb", {"freeze_step": 9, "max_coeff": 0.3}, "onebit_lamb", {"freeze_step": 9, "trust_clip": (0.01, 0.3)}, set()),
        (
            "ZeroOneAdam",
            {},
            "zero_one_adam",
            {"freeze_step": 100_000, "local_steps": ob.LocalSteps(double_every=32_678)},
            {"var_freeze_step", "local_step_scaler"},
        ),
        (
            "ZeroOneAdam",
            {"var_freeze_step": 12_500, "local_step_scaler": 100, "local_step_clipper": 4},
            "zero_one_adam",
            {"freeze_step": 12_500, "local_steps": ob.LocalSteps(max_gap=4, double_every=100)},
            set(),
        ),
        # no local steps, whatever their scaler, DeepSpeed's default of which is not ours
        ("ZeroOneAdam", {"var_freeze_step": 5, "local_step_clipper": 1}, "zero_one_adam", NO_LOCAL_STEPS, set()),
        (
            "ZeroOneAdam",
            {"var_freeze_step": 5, "local_step_scaler": 100, "local_step_clipper": 1},
            "zero_one_adam",
            NO_LOCAL_STEPS,
            set(),
        ),
    ],
)  # fmt: skip
def test_every_optimizer_keeps_its_schedule_and_deepspeeds_defaults(
    type_: str, params: dict[str, Any], algorithm: str, options: dict[str, Any], absent: set[str]
) -> None:
    config = {"optimizer": {"type": type_, "params": params}}
    migration = ob.from_deepspeed_config(config)
    assert migration.algorithm == migration.strategy.algorithm == algorithm
    assert migration.strategy._options == {"bias_correction": False, **options}
    assert type(migration.optimizer([torch.nn.Parameter(torch.zeros(3))])) is find_algorithm(algorithm).optimizer
    accounted(migration, config)
    said = {key for key in migration.honoured if key.endswith("(absent)")}
    assert said == {f"optimizer.params.{name} (absent)" for name in absent}


def test_a_spacing_of_refreshes_that_is_not_the_published_one_is_said_to_be_left_out() -> None:
    migration = ob.from_deepspeed_config({"optimizer": {"type": "ZeroOneAdam", "params": {"var_update_scaler": 8}}})
    assert "as with 16" in migration.unhonoured["optimizer.params.var_update_scaler"]


#: sections and keys, what is said about them (None: nothing to say, they are off or without effect)
ODD: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
     {"zero_optimization.stage": "refused the combination", "zero_optimization.offload_optimizer.device": "refused"}),
    ({"gradient_allreduce_op": "sum"}, {"gradient_allreduce_op": "multiply lr"}),
    ({"sparse_gradients": True}, {"sparse_gradients": "sparse=False"}),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, {"amp.enabled": "Apex", "amp.opt_level": "Apex"}),
    ({"amp": {"enabled": False, "opt_level": "O1"}}, {}),
    ({"wandb": {"enabled": True}}, {"wandb.enabled": "WandbLogger"}),
    ({"bf16": {"enabled": True, "immediate_grad_update": True}}, {"bf16.immediate_grad_update": "precision plugin"}),
    ({"bf16": {}, "fp16": {}}, {}),
    ({"something_new": {"deep": {"inside": 1}}}, {"something_new.deep.inside": "no counterpart"}),
    ({"something_newer": 3}, {"something_newer": "no counterpart"}),
    ({"gradient_clipping": 0.0, "prescale_gradients": False, "dump_state": False, "gradient_predivide_factor": 1.0}, {}),
    ({"gradient_clipping": "auto"}, {"gradient_clipping": "gradient_clip_val"}),
    ({"gradient_clipping": None}, {}),
    ({"gradient_clipping": False}, {}),
    ({"steps_per_print": True}, {"steps_per_print": "log_every_n_steps"}),
    ({"fp16": {"enabled": "auto"}}, {"fp16.enabled": "precision"}),
    ({"fp16": {"enabled": "auto", "loss_scale": 0, "auto_cast": True}},
     {"fp16.enabled": "precision", "fp16.loss_scale": "GradScaler", "fp16.auto_cast": "precision plugin"}),
    ({"torch_autocast": {"enabled": "auto", "dtype": "float16"}},
     {"torch_autocast.enabled": "precision", "torch_autocast.dtype": "precision"}),
    ({"torch_autocast": {"dtype": "float16"}}, {}),
    ({"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4},
     {"train_batch_size": "world_size=...", "train_micro_batch_size_per_gpu": "batch_size=4"}),
    ({"train_batch_size": 512, "gradient_accumulation_steps": 2}, {"train_batch_size": "is to be 512"}),
    ({"gradient_accumulation_steps": "auto"}, {"gradient_accumulation_steps": "write the number"}),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}},
     {"torch_autocast.lower_precision_safe_modules": "torch's own list"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "expected"), ODD, ids=lambda value: "+".join(value) if isinstance(value, dict) else None
)
def test_what_cannot_be_taken_over_is_listed_with_a_remedy(extra: dict[str, Any], expected: dict[str, str]) -> None:
    config = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, **extra}
    migration = ob.from_deepspeed_config(config)
    assert set(migration.unhonoured) == set(expected)
    accounted(migration, config)
    for key, words in expected.items():
        assert words in migration.unhonoured[key]


def test_odd_parameters_of_the_optimizer_are_listed() -> None:
    params = {
        "lr": "auto",
        "amsgrad": True,
        "eps_inside_sqrt": True,
        "comm_backend_name": "mpi",
        "cuda_aware": True,
        "nonsense": 1,
    }
    config = {"optimizer": {"type": "OneBitAdam", "params": params, "legacy_fusion": True}}
    migration = ob.from_deepspeed_config(config)
    assert "lr" not in migration.hyperparameters
    assert set(migration.unhonoured) == {f"optimizer.params.{name}" for name in params} | {"optimizer.legacy_fusion"}
    accounted(migration, config)
    assert migration.optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.5).param_groups[0]["lr"] == 0.5


def test_an_option_of_the_strategy_that_is_auto_is_to_be_written_into_the_configuration() -> None:
    """The strategy has a value for it, so that migration.optimizer() refuses another."""
    params = {"betas": "auto", "freeze_step": "auto", "max_coeff": "auto"}
    config = {"optimizer": {"type": "OneBitLamb", "params": params}}
    migration = ob.from_deepspeed_config(config)
    accounted(migration, config)
    assert "into the configuration" in migration.unhonoured["optimizer.params.freeze_step"]
    assert "the default, 100000, DeepSpeed's" in migration.unhonoured["optimizer.params.freeze_step"]
    assert "the default, this package's" in migration.unhonoured["optimizer.params.max_coeff"]
    assert "optimizer(params, betas=...)" in migration.unhonoured["optimizer.params.betas"]
    with pytest.raises(ValueError, match="freeze_step=7 was given to strategy"):
        migration.optimizer([torch.nn.Parameter(torch.zeros(1))], freeze_step=7)


@pytest.mark.parametrize(
    ("extra", "precision"),
    [
        ({"fp16": {"enabled": True}}, "16-mixed"),
        ({"bf16": {"enabled": True}}, "bf16-mixed"),
        ({"bfloat16": {"enabled": True}}, "bf16-mixed"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "16-mixed"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bf16-mixed"),
        ({"torch_autocast": {"enabled": False, "dtype": "float16"}}, None),
        ({"torch_autocast": {"enabled": "auto", "dtype": "float16"}}, None),
        ({"fp16": {"enabled": False}}, None),
    ],
)
def test_precision_becomes_the_trainers(extra: dict[str, Any], precision: str | None) -> None:
    migration = ob.from_deepspeed_config({"optimizer": {"type": "OneBitAdam"}, **extra})
    assert migration.trainer.get("precision") == precision


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"optimizer": {"type": "AdamW"}}, ValueError, "strategy='onebit_adam'"),
        ({}, ValueError, "optimizer.type=None"),
        ({"optimizer": "OneBitAdam"}, TypeError, "optimizer='OneBitAdam' must be a section"),
        (
            {"optimizer": {"type": "OneBitAdam"}, "fp16": {"enabled": "false"}},
            TypeError,
            "fp16.enabled='false' must be",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "torch_autocast": {"enabled": "false"}},
            TypeError,
            "torch_autocast.enabled='false' must be",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "torch_autocast": {"enabled": True, "dtype": "float32"}},
            ValueError,
            "torch_autocast.dtype='float32' is unknown; choose 'float16'",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"betas": 0.9}}},
            TypeError,
            "optimizer.params.betas=0.9 must be",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"betas": None}}},
            TypeError,
            "optimizer.params.betas=None must be a list of two numbers",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"betas": "0.9"}}},
            TypeError,
            "optimizer.params.betas='0.9' must be a list of two numbers",
        ),
        *(
            ({"optimizer": {"type": "OneBitAdam"}, "gradient_clipping": value}, error, words)
            for value, error, words in [
                (-1, ValueError, "gradient_clipping=-1 is out of range; it must be finite and >= 0"),
                (float("nan"), ValueError, "gradient_clipping=nan is out of range"),
                ("1.0", TypeError, "gradient_clipping='1.0' must be a number"),
                ([1], TypeError, r"gradient_clipping=\[1\] must be a number"),
                (True, TypeError, "gradient_clipping=True must be a number"),
            ]
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": None}}, TypeError, "optimizer.params=None must be a section"),
        (
            {"optimizer": {"type": "OneBitAdam"}, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ValueError,
            "keep one",
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": -1}}}, ValueError, "freeze_step=-1"),
        (
            {"optimizer": {"type": "OneBitAdam"}, "gradient_accumulation_steps": 0},
            ValueError,
            "gradient_accumulation_steps=0",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "train_batch_size": 100, "train_micro_batch_size_per_gpu": 16},
            ValueError,
            "is no multiple",
        ),
        (3, TypeError, "config=3"),
    ],
)
def test_what_makes_no_sense_is_refused(config: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        ob.from_deepspeed_config(config, world_size=4)


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "world_size", "words"),
    [
        (256, 8, 2, 8, "is not train_micro_batch_size_per_gpu=8 times gradient_accumulation_steps=2 times world_size=8"),
        (64, 8, 2, 8, "is not train_micro_batch_size_per_gpu=8 times gradient_accumulation_steps=2 times world_size=8"),
        (100, 8, 2, None, "is no multiple of train_micro_batch_size_per_gpu=8 times gradient_accumulation_steps=2"),
        (8, 8, 2, None, "is no multiple of train_micro_batch_size_per_gpu=8 times gradient_accumulation_steps=2"),
        (100, 16, None, None, "is no multiple of train_micro_batch_size_per_gpu=16"),
        (100, 16, "auto", None, "is no multiple of train_micro_batch_size_per_gpu=16"),
        (10, None, 3, None, "is no multiple of gradient_accumulation_steps=3"),
        (12, None, 3, 8, "is no multiple of gradient_accumulation_steps=3 times world_size=8"),
        (10, None, None, 4, "is no multiple of world_size=4"),
        (128, 8, 2, 8, None),
        (96, 8, 2, None, None),
        (512, 4, None, None, None),
        (24, None, 3, 8, None),
        (None, 8, 2, 3, None),
    ],
)  # fmt: skip
def test_batch_sizes_that_contradict_each_other_are_refused(
    whole: int | None, micro: int | None, steps: Any, world_size: int | None, words: str | None
) -> None:
    """DeepSpeed asserts train_batch_size = micro * accumulation * ranks; without the ranks some number of them must do."""
    sizes = {
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    config = {"optimizer": {"type": "OneBitAdam"}, **{key: size for key, size in sizes.items() if size is not None}}
    if words is None:
        accounted(ob.from_deepspeed_config(config, world_size=world_size), config)
        return
    with pytest.raises(ValueError, match=f"train_batch_size={whole} {words}; change one of them"):
        ob.from_deepspeed_config(config, world_size=world_size)


def test_files_are_read_and_their_faults_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BERT))
    assert (
        ob.from_deepspeed_config(path, world_size=64).honoured == ob.from_deepspeed_config(BERT, world_size=64).honoured
    )
    path.write_text('{"optimizer": {"type": "OneBitAdam",}}')
    with pytest.raises(ValueError, match=r"no JSON .* trailing commas"):
        ob.from_deepspeed_config(str(path))
    path.write_text('{"optimizer": {"type": "OneBitAdam"}, "fp16": {}, "fp16": {}}')
    with pytest.raises(ValueError, match="more than once"):
        ob.from_deepspeed_config(path)
    with pytest.raises(FileNotFoundError):
        ob.from_deepspeed_config(tmp_path / "none.json")


@pytest.mark.parametrize("tree", ["lightning", "pytorch_lightning"])
def test_the_strategy_is_of_the_tree_that_was_asked_for(tree: Any) -> None:
    made = ob.from_deepspeed_config({"optimizer": {"type": "OneBitAdam"}}, tree=tree).strategy
    assert any(
        base.__module__.startswith(("lightning.pytorch" if tree == "lightning" else "pytorch_lightning") + ".")
        for base in type(made).__mro__
    )


@pytest.mark.parametrize("world_size", [0, -1, 2.0])
def test_a_world_of_no_ranks_is_refused_by_name(world_size: Any) -> None:
    config = {"optimizer": {"type": "OneBitAdam"}, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises((TypeError, ValueError), match=f"world_size={world_size} "):
        ob.from_deepspeed_config(config, world_size=world_size)


def train(rank: int, world: int, folder: str) -> Any:
    enter(rank)
    import lightning.pytorch as pl

    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.05, "freeze_step": 2}},
    }
    migration = ob.from_deepspeed_config(config, world_size=world)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return (self.layer(batch) - 1).square().mean()

        def configure_optimizers(self) -> Any:
            return migration.optimizer(self.parameters())

    data = torch.randn(16 * 8 * world, 4, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **migration.trainer,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    (optimizer,) = trainer.strategy.onebit_optimizers
    return optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps, model.layer.weight.tolist()


def test_a_migrated_configuration_trains(tmp_path: Path) -> None:
    results = run_ranks(train, 2, str(tmp_path), timeout=120)
    assert results[0] == results[1]
    assert results[0][:2] == (2, 6), "16 batches, 2 of them per step, 2 dense steps"
