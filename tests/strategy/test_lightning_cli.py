"""Options in LightningCLI: flat in a configuration file, groups of them nested, shown by help, and wrong ones refused."""

from __future__ import annotations

import importlib
import io
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_support import TREES, strategy_class

import lightning_onebit as ob
from lightning_onebit.engine.options import described
from lightning_onebit.strategy.registry import ALGORITHMS

jsonargparse = pytest.importorskip("jsonargparse")

CONFIGURATION = """
trainer:
  strategy:
    class_path: lightning_onebit.{tree}.OnebitStrategy
    init_args:
      algorithm: zero_one_adam
      freeze_step: 60
      recipe: published
      exchange: {{block_size: 64}}
      local_steps: {{max_gap: 8}}
optimizer:
  class_path: lightning_onebit.OnebitLamb
  init_args:
    lr: 0.01
    trust_clip: [0.01, 0.3]
    coefficients: {{beta: 0.8}}
    exchange: {{block_size: 96, overlap: backward}}
"""


def started(tree: str, *arguments: str) -> Any:
    """LightningCLI without a subcommand: the Trainer, the model and the optimizer are made, and nothing is run."""
    pl = importlib.import_module(TREES[tree])
    cli = importlib.import_module(f"{TREES[tree]}.cli")

    class Model(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.net = torch.nn.Linear(width, 3)

    settings = {"accelerator": "cpu", "devices": 1, "logger": False}
    return cli.LightningCLI(
        Model,
        run=False,
        args=[*arguments],
        save_config_callback=None,
        trainer_defaults=settings,
        seed_everything_default=False,
    )


@pytest.fixture
def configuration(tmp_path: Path) -> Any:
    def write(tree: str) -> str:
        path = tmp_path / f"{tree}.yaml"
        path.write_text(CONFIGURATION.format(tree=tree))
        return str(path)

    return write


def assert_as_configured(made: Any, tree: str) -> None:
    strategy = made.trainer.strategy
    assert type(strategy) is strategy_class(tree) and strategy.algorithm == "zero_one_adam"
    optimizer = strategy.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.options.changed() == {
        "freeze_step": 60,
        "recipe": "published",
        "local_steps": ob.LocalSteps(max_gap=8),
    }
    assert optimizer.exchange == ob.ExchangeOptions(block_size=64)
    own = made.model.configure_optimizers()
    assert type(own) is ob.OnebitLamb and own.param_groups[0]["lr"] == 0.01
    assert own.options.trust_clip == (0.01, 0.3) and own.options.coefficients == ob.LambCoefficients(beta=0.8)
    assert own.exchange == ob.ExchangeOptions(block_size=96, overlap="backward")


@pytest.mark.parametrize("tree", TREES)
def test_options_are_flat_in_a_configuration_and_groups_of_them_nested(tree: str, configuration: Any) -> None:
    made = started(tree, "--config", configuration(tree))
    assert_as_configured(made, tree)
    # what LightningCLI saves beside a run makes the same run
    Path(path := configuration(tree)).write_text(made.parser.dump(made.config, skip_none=False))
    assert "_alone" not in yaml.safe_load(Path(path).read_text())["optimizer"]["init_args"]["exchange"]
    assert_as_configured(started(tree, "--config", path), tree)


def test_options_are_given_on_the_command_line_alike() -> None:
    strategy = "--trainer.strategy.init_args"
    made = started(
        "lightning",
        "--trainer.strategy=lightning_onebit.lightning.OnebitStrategy",
        f"{strategy}.algorithm=zero_one_adam",
        f"{strategy}.freeze_step=60",
        f"{strategy}.recipe=published",
        f"{strategy}.exchange.block_size=64",
        f"{strategy}.local_steps.max_gap=8",
        "--optimizer=lightning_onebit.OnebitLamb",
        "--optimizer.lr=0.01",
        "--optimizer.trust_clip=[0.01, 0.3]",
        "--optimizer.coefficients.beta=0.8",
        "--optimizer.exchange.block_size=96",
        "--optimizer.exchange.overlap=backward",
    )
    assert_as_configured(made, "lightning")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("recipe=paper", ["paper", "'default', 'published'"]),
        ("refresh=often", ["often", "'auto', 'never'"]),
        ("exchange.overlap=always", ["always", "'step', 'backward'"]),
        ("local_steps.double_every=never", ["never", "'lr_halving'"]),
        ("freeze_step=soon", ["freeze_step", "soon"]),
        ("freeze_steps=3", ["freeze_steps"]),
        ("exchange.blocksize=64", ["blocksize"]),
    ],
)
def test_a_wrong_option_is_refused_with_its_name(
    wrong: str, words: list[str], configuration: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        started("lightning", "--config", configuration("lightning"), f"--trainer.strategy.init_args.{wrong}")
    said = capsys.readouterr().err
    assert all(word in said for word in words), said[-2000:]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("exchange.block_size=33", "block_size=33 must be a multiple of 32"),
        ("local_steps.max_gap=0", "max_gap=0 is out of range"),
        ("seed=3", "seed=3 is no option of 'zero_one_adam': 'binsgdm' has it"),
    ],
)
def test_what_only_the_options_themselves_can_tell_is_said_by_them(wrong: str, words: str, configuration: Any) -> None:
    arguments = ["--config", configuration("lightning"), f"--trainer.strategy.init_args.{wrong}"]
    with pytest.raises(ValueError, match=re.escape(words)):
        started("lightning", *arguments)


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        started("lightning", "--trainer.strategy.help=lightning_onebit.lightning.OnebitStrategy")
    shown = capsys.readouterr().out
    for name in ("freeze_step", "recipe", "refresh", "local_steps", "trust_clip", "coefficients", "exchange", "seed"):
        assert f"strategy.init_args.{name}" in shown or f"strategy.{name}" in shown, name
    assert "published" in shown and "_alone" not in shown and "_doubling" not in shown


@pytest.mark.parametrize("kind", ["OnebitStrategy", *(a.optimizer.__name__ for a in ALGORITHMS.values())])
def test_help_says_what_an_option_is_in_the_words_of_its_dataclass_once(kind: str) -> None:
    parser, out = jsonargparse.ArgumentParser(), io.StringIO()
    of_strategy = kind == "OnebitStrategy"
    parser.add_class_arguments(strategy_class("lightning") if of_strategy else getattr(ob, kind), "made")
    parser.print_help(out)
    shown = "".join(out.getvalue().split())  # lines end at blanks and at hyphens
    for algorithm in ALGORITHMS.values():
        if not of_strategy and algorithm.optimizer is not getattr(ob, kind):
            continue
        options = algorithm.optimizer.options_class
        texts = described(options)
        assert texts.keys() == {field.name for field in fields(options) if not field.name.startswith("_")}
        for field in fields(options) if not of_strategy else ():
            if is_dataclass(field.default):  # a group of options of its own, whose heading is its class's
                texts.pop(field.name)
                texts |= described(type(field.default))
        for name, text in texts.items():
            assert shown.count("".join(text.split())) == 1, f"{name} of {options.__name__}"
    assert "(type:" in shown and not re.search(r"--made\.\S+ [A-Z_]+\s+\(type:", out.getvalue()), (
        "an option without a text"
    )


def test_every_option_of_the_exchange_has_its_text() -> None:
    assert described(ob.ExchangeOptions).keys() == {f.name for f in fields(ob.ExchangeOptions) if f.name[0] != "_"}
