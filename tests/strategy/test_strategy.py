"""The strategy as an object: names, options, what it refuses and how it says so, which Lightning tree it belongs to."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import python, run_ranks
from lightning.pytorch.callbacks import Callback
from lightning_support import (
    TREES,
    enter,
    loader,
    make_module,
    onebit,
    plain_net,
    quiet_trainer,
    same_on_all_ranks,
    strategy_class,
)
from packaging.version import Version
from test_ddp_habits import FABRICS, fabric_class
from torch.distributed.optim import ZeroRedundancyOptimizer

import lightning_onebit as ob
from lightning_onebit.algorithms import AdamOptions
from lightning_onebit.comm import SimulatedWorld
from lightning_onebit.engine.options import takes
from lightning_onebit.strategy import registry
from lightning_onebit.strategy.keywords import DDP_KEYWORDS
from lightning_onebit.strategy.ranks import Groups
from lightning_onebit.strategy.registry import ALGORITHMS, Algorithm, available_strategies, find_algorithm

ROOT = Path(__file__).parents[2]


# ----- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_every_name_is_registered_in_each_tree_and_starts_processes_as_it_says(tree: str) -> None:
    strategies = importlib.import_module(f"{TREES[tree]}.strategies")
    methods = {
        "onebit_adam": "popen",
        "onebit_adam_spawn": "spawn",
        "onebit_adam_fork": "fork",
        "onebit_adam_notebook": "fork",
    }
    assert set(methods) <= set(available_strategies())
    for name in available_strategies():
        assert name == name.lower(), "the Trainer lower-cases what the user gives"
        if name.endswith("_sharded"):  # see test_sharded_training
            continue
        strategy = strategies.StrategyRegistry.get(name)
        assert type(strategy) is strategy_class(tree)
        assert isinstance(strategy, strategies.DDPStrategy)
        algorithm = find_algorithm(strategy.algorithm)
        assert name.startswith((algorithm.name, *algorithm.aliases))
        if name in methods:
            assert strategy._start_method == methods[name]


def test_unknown_algorithms_are_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm='onebit' is unknown.*'onebit_adam'"):
        strategy_class()("onebit")
    with pytest.raises(TypeError, match="algorithm=3"):
        strategy_class()(3)


@pytest.mark.parametrize(("module", "package"), [("lightning", "lightning.pytorch"), ("pytorch_lightning",) * 2])
def test_a_bound_module_may_be_the_first_import_of_a_program(module: str, package: str) -> None:
    program = f"""
from lightning_onebit.{module} import OnebitStrategy
from {package}.strategies import StrategyRegistry
assert StrategyRegistry["onebit_adam"]["strategy"] is OnebitStrategy
"""
    subprocess.run([python(), "-c", program], check=True, timeout=120)


# ----- options ----------------------------------------------------------------------------------------------------------


#: what Lightning's DDPStrategy takes and looks after
LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
LIGHTNINGS |= {"process_group_backend", "timeout", "start_method"}
#: what the strategy itself takes beside them and DDP's own keywords
OWN = {"algorithm", "other_optimizers", "convert_optimizers", "broadcast_buffers", "overlap_dense", "ranks_per_node"}
OWN |= {"strict_residuals", "exchange"}


def test_the_strategy_shows_every_option_of_every_algorithm_with_its_type_and_few_of_its_own() -> None:
    """Each is written once, in the algorithm's dataclass."""
    parameters = inspect.signature(strategy_class()).parameters
    options = {name: p for name, p in parameters.items() if name not in LIGHTNINGS | OWN | {*DDP_KEYWORDS}}
    assert set(options) == set().union(*(algorithm.options for algorithm in ALGORITHMS.values()))
    assert LIGHTNINGS | OWN | {*DDP_KEYWORDS} | options.keys() == parameters.keys()
    for name, parameter in options.items():
        assert parameter.default is None and parameter.kind is parameter.KEYWORD_ONLY
        owners = [a.optimizer for a in ALGORITHMS.values() if name in a.options]
        kinds = [inspect.signature(owner).parameters[name].annotation for owner in owners]
        assert parameter.annotation == reduce(operator.or_, kinds) | None, name
        fields = [f for owner in owners for f in dataclasses.fields(owner.options_class) if f.name == name]
        assert len(fields) == len(owners)
    assert len(OWN) <= 15
    for algorithm in ALGORITHMS.values():
        assert len(inspect.signature(algorithm.optimizer).parameters) <= 15


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"freeze_step": -1}, ValueError, ["freeze_step=-1", "at least 1"]),
        ({"freeze_step": "many"}, TypeError, ["freeze_step='many'"]),
        ({"bias_correction": 1}, TypeError, ["bias_correction=1"]),
        ({"max_grad_norm": 0.0}, ValueError, ["max_grad_norm=0.0"]),
        ({"denominator_floor": 2.0}, ValueError, ["denominator_floor=2.0"]),
        ({"recipe": "paper"}, ValueError, ["recipe='paper'", "'published'"]),
        ({"refresh": 16, "recipe": "published"}, ValueError, ["refresh=16", "recipe='published'"]),
        ({"exchange": {"block_size": 64}}, TypeError, ["exchange={'block_size': 64}", "ExchangeOptions"]),
        ({"ranks_per_node": 0}, ValueError, ["ranks_per_node=0", "at least 1"]),
        ({"other_optimizers": "ignore"}, ValueError, ["other_optimizers='ignore'", "'dense'"]),
        ({"convert_optimizers": None}, TypeError, ["convert_optimizers=None"]),
        ({"broadcast_buffers": "no"}, TypeError, ["broadcast_buffers='no'"]),
        ({"overlap_dense": 0}, TypeError, ["overlap_dense=0"]),
        ({"strict_residuals": "no"}, TypeError, ["strict_residuals='no'"]),
    ],
)
def test_options_are_checked_when_the_strategy_is_made(
    options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        strategy_class()(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_process_group_of_the_exchange_is_refused() -> None:
    group = SimulatedWorld(1).run(lambda group: group)[0]
    with pytest.raises(
        ValueError, match="process_group of the exchange: the strategy makes process groups of all ranks by"
    ):
        strategy_class()(exchange=ob.ExchangeOptions(process_group=group))


# ----- further algorithms -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherOptions(AdamOptions):
    """One option more than 1-bit Adam has."""

    patience: int = 3


@takes(OtherOptions)
class Other(ob.OnebitAdam):
    """An algorithm of a user's."""

    algorithm = "other"

    def __init__(
        self, params: Any, lr: float = 1e-3, *, exchange: ob.ExchangeOptions | None = None, **options: Any
    ) -> None:
        super().__init__(params, lr, exchange=exchange, **options)


OTHER = Algorithm("other", "another one", Other, warm_up=False, aliases=("nickname",))


@pytest.fixture
def other_algorithm() -> Iterator[Algorithm]:
    """The algorithm, added after Lightning and Fabric were imported; all tables are as before when the test ends."""
    tables = [importlib.import_module(f"{package}.strategies").StrategyRegistry for package in TREES.values()]
    tables += [importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY for package in FABRICS]
    before = [dict(table) for table in (ALGORITHMS, *tables)]
    registry.register_algorithm(OTHER)
    yield OTHER
    for table, entries in zip((ALGORITHMS, *tables), before, strict=True):
        table.clear()
        table.update(entries)
    for listener in registry._listeners:
        listener()


@pytest.mark.parametrize("tree", TREES)
def test_an_algorithm_that_is_added_late_has_its_names_in_every_tree(tree: str, other_algorithm: Algorithm) -> None:
    assert {"other", "other_spawn", "nickname", "nickname_fork"} <= set(available_strategies())
    assert find_algorithm("nickname") is other_algorithm
    pl = importlib.import_module(TREES[tree])
    for name in ("other", "nickname_spawn"):
        strategy = pl.Trainer(accelerator="cpu", devices=1, strategy=name, logger=False).strategy
        assert type(strategy) is strategy_class(tree) and strategy.algorithm == "other"
    for package in FABRICS:
        made = importlib.import_module(package).Fabric(accelerator="cpu", devices=1, strategy="other").strategy
        assert type(made) is fabric_class(package) and made._algorithm is OTHER


@pytest.mark.parametrize("tree", TREES)
def test_an_algorithm_that_is_added_late_shows_its_options(tree: str, other_algorithm: Algorithm) -> None:
    assert other_algorithm.options == ALGORITHMS["onebit_adam"].options | {"patience"}
    shown = inspect.signature(strategy_class(tree)).parameters["patience"]
    assert shown.kind is shown.KEYWORD_ONLY and shown.default is None and shown.annotation == int | None
    strategy = strategy_class(tree)("nickname", patience=5, exchange=ob.ExchangeOptions(block_size=64))
    assert strategy.algorithm == "other"
    made = strategy.optimizer([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    assert type(made) is Other and made.options.patience == 5 and made.exchange.block_size == 64
    with pytest.raises(ValueError, match="patience=5 is no option of 'onebit_adam': 'other' has it"):
        strategy_class(tree)(patience=5)


def test_an_algorithm_that_is_gone_has_left_nothing_behind() -> None:
    """What the fixture restores is all there is."""
    assert "other" not in available_strategies() and "patience" not in inspect.signature(strategy_class()).parameters
    with pytest.raises(TypeError, match="patience=5"):
        strategy_class()(patience=5)


def added_late(rank: int, world: int) -> list[tuple[str, int, list[str]]]:
    """Training by the name of an algorithm that is added after Lightning was imported, in both trees."""
    found = []
    for tree in TREES:
        pl = enter(rank, tree)
        registry.register_algorithm(OTHER)
        module = make_module(pl, lambda m: m.trainer.strategy.optimizer(m.parameters(), lr=1e-2, freeze_step=2))
        quiet_trainer(pl, "nickname").fit(module, loader())
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        kept = same_on_all_ranks(dict(module.named_parameters()))
        found.append((type(optimizer).__name__, optimizer.ledger.compressed_steps, kept))
    return found


def test_an_algorithm_that_is_added_late_trains() -> None:
    for found in run_ranks(added_late, 2):
        assert found == [("Other", 2, [])] * 2


@pytest.mark.parametrize(
    ("algorithm", "error", "words"),
    [
        (Algorithm("birder", "mine", Other), ValueError, "algorithm name 'birder' belongs to BinSGDM; choose another"),
        (Algorithm("mine", "mine", Other, aliases=("onebit_adam",)), ValueError, "'onebit_adam' belongs to 1-bit Adam"),
        (Algorithm("mine", "mine", torch.optim.AdamW), TypeError, "must be a subclass of OnebitOptimizer"),  # type: ignore[arg-type]
    ],
)
def test_an_algorithm_that_cannot_be_added_is_refused(algorithm: Algorithm, error: type[Exception], words: str) -> None:
    before = dict(ALGORITHMS)
    with pytest.raises(error, match=words):
        registry.register_algorithm(algorithm)
    assert before == ALGORITHMS


def test_an_option_that_the_algorithm_does_not_have_names_those_that_have_it() -> None:
    words = r"freeze_step=5 is no option of 'binsgdm': 'onebit_adam' and 'onebit_lamb' and 'zero_one_adam' have it"
    with pytest.raises(ValueError, match=words):
        strategy_class()("binsgdm", freeze_step=5)
    with pytest.raises(ValueError, match="no algorithm has it"):
        registry.check_options(find_algorithm("onebit_adam"), {"colour": "red"})


def test_the_factory_merges_the_strategys_options_and_refuses_contradictions() -> None:
    strategy = strategy_class()(freeze_step=5, exchange=ob.ExchangeOptions(block_size=64))
    weights = [torch.nn.Parameter(torch.zeros(2))]
    made = strategy.optimizer(weights, lr=0.1, denominator_floor=0.5, exchange=ob.ExchangeOptions(block_size=64))
    assert made.freeze_step == 5 and made.exchange.block_size == 64 and made.param_groups[0]["lr"] == 0.1
    assert made.options.denominator_floor == 0.5
    with pytest.raises(ValueError, match=r"freeze_step=6.*freeze_step=5"):
        strategy.optimizer(weights, freeze_step=6)
    with pytest.raises(ValueError, match=r"exchange=.*block_size=32.*exchange=.*block_size=64"):
        strategy.optimizer(weights, exchange=ob.ExchangeOptions(block_size=32))


@pytest.mark.parametrize("tree", TREES)
def test_a_strategy_can_be_pickled_for_spawn(tree: str) -> None:
    pl = importlib.import_module(TREES[tree])
    plugin = pl.plugins.Precision()
    strategy = strategy_class(tree)(freeze_step=5, timeout=timedelta(seconds=77), precision_plugin=plugin)
    strategy.optimizer([torch.nn.Parameter(torch.zeros(2))])
    copy = pickle.loads(pickle.dumps(strategy))
    assert type(copy) is type(strategy) and copy.timeout == timedelta(seconds=77)
    assert strategy_class(tree)(timeout=None).timeout == timedelta(minutes=30)
    assert copy.optimizer([torch.nn.Parameter(torch.zeros(2))]).freeze_step == 5
    # the copy's plugin clips compressed optimizers by their own rule, on the copy and not on the original
    x = torch.nn.Parameter(torch.zeros(4))
    made = copy.optimizer([x])
    x.grad = torch.full((4,), 3.0)
    copy.precision_plugin.clip_grad_by_norm(made, 1.5)
    assert torch.allclose(x.grad, torch.full((4,), 0.75))
    assert copy.precision_plugin.clip_grad_by_norm._plugin is copy.precision_plugin


def test_norm_clipping_of_other_optimizers_stays_the_plugins_own() -> None:
    from lightning.pytorch.plugins import Precision

    class Doubling(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            optimizer.param_groups[0]["params"][0].grad *= 2

    plugin = Doubling()
    strategy_class()(precision_plugin=plugin)
    x = torch.nn.Parameter(torch.zeros(1))
    x.grad = torch.ones(1)
    plugin.clip_grad_by_norm(torch.optim.SGD([x], lr=1.0), 0.1)
    assert x.grad.item() == 2.0


# ----- the two trees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.permutations(TREES)))
def test_a_trainer_of_the_other_tree_is_told_which_module_to_import_from(mine: str, theirs: str) -> None:
    pl = importlib.import_module(TREES[theirs])
    with pytest.raises(ValueError, match=f"from lightning_onebit.{theirs} import OnebitStrategy"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy_class(mine)())


REFUSE = """
import sys
class Refuse:
    def __init__(self, *names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
"""


def run_python(program: str, interpreter: str) -> str:
    done = subprocess.run([interpreter, "-c", REFUSE + program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_lightning_the_torch_level_works_and_the_strategy_says_what_to_install() -> None:
    run_python(
        """
sys.meta_path.insert(0, Refuse("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"))
from lightning_onebit import *
import lightning_onebit as ob
assert "onebit_adam" in available_strategies()
import torch
OnebitAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
assert "OnebitStrategy" not in dir(ob) and "OnebitStrategy" not in globals()
for name in ("ob.OnebitStrategy", "ob.callbacks.VarianceFreeze"):
    try:
        eval(name)
    except ImportError as error:
        assert "install `lightning` or `pytorch-lightning`" in str(error), error
    else:
        raise SystemExit(name)
try:
    ob.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
""",
        sys.executable,
    )


def test_the_tree_that_the_user_has_loaded_decides_although_both_are_installed() -> None:
    # imported after: names are registered when the tree comes, and the other tree is never imported
    run_python(
        """
import lightning_onebit as ob
assert not {"lightning.pytorch", "pytorch_lightning"} & set(sys.modules), "importing the package imported Lightning"
import pytorch_lightning as pl
assert "onebit_adam" in pl.strategies.StrategyRegistry
assert issubclass(ob.OnebitStrategy, pl.strategies.DDPStrategy)
assert issubclass(ob.callbacks.VarianceFreeze, pl.Callback)
assert "lightning.pytorch" not in sys.modules
import lightning.pytorch
assert "onebit_adam" in lightning.pytorch.strategies.StrategyRegistry
""",
        python(),
    )
    # both loaded before: lightning.pytorch is preferred
    run_python(
        """
import pytorch_lightning
import lightning.pytorch as pl
import lightning_onebit as ob
assert "onebit_adam" in pl.strategies.StrategyRegistry and "onebit_adam" in pytorch_lightning.strategies.StrategyRegistry
assert issubclass(ob.OnebitStrategy, pl.strategies.DDPStrategy)
""",
        python(),
    )


# ----- what is refused when fitting starts ----------------------------------------------------------------------------------


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def adamw(**options: Any) -> Callable[[Any], Any]:
    return lambda module: torch.optim.AdamW(module.parameters(), **options)


def unreturned_scheduler(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters())
    module.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer


def one_frozen_one_not(module: Any) -> Any:
    return [ob.OnebitAdam(module.net[0].parameters(), freeze_step=2), ob.OnebitAdam(module.net[2].parameters())]


def shared_parameter(module: Any) -> Any:
    return [ob.OnebitAdam(module.net.parameters()), torch.optim.SGD(module.net[0].parameters(), lr=0.1)]


def two_of_one_layer(module: Any, kind: Any = ob.OnebitAdam) -> list[Any]:
    exchange = ob.ExchangeOptions(block_size=32)
    return [kind(module.net[0].parameters(), lr=lr, freeze_step=2, exchange=exchange) for lr in (1e-2, 1e-3)]


def foreign_parameter(module: Any) -> Any:
    return ob.OnebitAdam([*module.parameters(), torch.nn.Parameter(torch.zeros(5))])


def ignored_parameter(module: Any) -> Any:
    module._ddp_params_and_buffers_to_ignore = ["net.0.weight"]
    return ob.OnebitAdam(module.parameters())


def lazy_net() -> torch.nn.Module:
    return torch.nn.LazyLinear(3)


def sparse_net() -> torch.nn.Module:
    return torch.nn.Embedding(5, 3, sparse=True)


def fully_sharded() -> torch.nn.Module:
    class FullyShardedDataParallel(torch.nn.Sequential):
        """Torch's wants an accelerator; what is looked for is the name."""

    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    return FullyShardedDataParallel(plain_net())


def tensor_parallel() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    layer = torch.nn.Linear(6, 3)
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return layer


def endless() -> Any:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(loader().dataset)

    return torch.utils.data.DataLoader(Endless(), batch_size=4)


def scaled_precision() -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def freeze_callback() -> Any:
    from lightning_onebit.lightning import VarianceFreeze

    return VarianceFreeze(3)


FACTORIES = ["self.trainer.strategy.optimizer", "lightning_onebit.OnebitAdam", 'other_optimizers="dense"']

#: name -> configure_optimizers, options of the strategy, words of the error; further: net, data, keywords of the Trainer
REFUSED: dict[str, dict[str, Any]] = {
    "another optimizer": {"configure": sgd, "words": ["SGD", *FACTORIES]},
    "a subclass of Adam": {
        "configure": lambda m: type("MyAdam", (torch.optim.Adam,), {})(m.parameters()),
        "words": ["MyAdam", *FACTORIES],
    },
    "amsgrad": {"configure": adamw(amsgrad=True), "words": ["AdamW", "amsgrad=True", *FACTORIES]},
    "conversion off": {
        "configure": adamw(),
        "options": {"convert_optimizers": False},
        "words": ["AdamW", "convert_optimizers=False", *FACTORIES],
    },
    "option without effect, direct": {
        "configure": onebit(None),
        "options": {"exchange": ob.ExchangeOptions(block_size=64)},
        "words": ["exchange=ExchangeOptions(block_size=64", "cannot take effect", "self.trainer.strategy.optimizer"],
    },
    "option without effect, dense": {
        "configure": sgd,
        "options": {"exchange": ob.ExchangeOptions(block_size=64), "other_optimizers": "dense"},
        "words": ["exchange=ExchangeOptions(block_size=64", "cannot take effect"],
    },
    "algorithm": {
        "configure": lambda m: Other(m.parameters()),
        "words": ["'onebit_adam'", "Other", 'strategy="other"', "self.trainer.strategy.optimizer"],
    },
    "scheduler": {"configure": unreturned_scheduler, "words": ["scheduler", "return it from `configure_optimizers`"]},
    "two ways to freeze": {
        "configure": one_frozen_one_not,
        "manual": True,
        "words": ["freeze_step", "VarianceFreeze"],
    },
    "freeze_step and callback": {
        "configure": onebit(5),
        "trainer": lambda: {"callbacks": [freeze_callback()]},
        "words": ["freeze_step=5", "VarianceFreeze"],
    },
    "unknown number of steps": {
        "configure": onebit(None),
        "data": endless,
        "words": ["max_step", "unknown"],
    },
    "shared parameter": {
        "configure": shared_parameter,
        "options": {"other_optimizers": "dense"},
        "manual": True,
        "words": ["net.0.weight", "give it to one of them"],
    },
    "shared with local steps": {
        "configure": lambda m: [
            ob.ZeroOneAdam(m.parameters()),
            ob.ZeroOneAdam(m.net[0].parameters(), local_steps=ob.LocalSteps()),
        ],
        "options": {"algorithm": "zero_one_adam"},
        "manual": True,
        "words": ["net.0.weight", "optimizers 0 and 1", "ZeroOneAdam makes local steps", "give it to one of them"],
    },
    "shared in 16 bits": {
        "configure": lambda m: [torch.optim.SGD(m.net[2].parameters(), lr=0.1), *two_of_one_layer(m)],
        "options": {"other_optimizers": "dense"},
        "net": lambda: plain_net().bfloat16(),
        "manual": True,
        "words": ["net.0.weight", "optimizers 1 and 2", "torch.bfloat16", "give it to one of them"],
    },
    "foreign parameter": {"configure": foreign_parameter, "words": ["(5,)", "register it"]},
    "ignored parameter": {
        "configure": ignored_parameter,
        "words": ["net.0.weight", "_ddp_params_and_buffers_to_ignore"],
    },
    "lazy module": {"configure": onebit(None), "net": lazy_net, "words": ["net.weight", "forward pass"]},
    "sparse gradients": {"configure": onebit(None), "net": sparse_net, "words": ["net", "sparse=False"]},
    "LBFGS": {
        "configure": lambda m: torch.optim.LBFGS(m.parameters()),
        "words": ["LBFGS", *FACTORIES],
    },
    "sharded optimizer": {
        "configure": lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=0.1),
        "words": ["ZeroRedundancyOptimizer", *FACTORIES],
    },
    "complex parameters": {
        "configure": onebit(None),
        "net": lambda: torch.nn.Linear(6, 3, dtype=torch.complex64),
        "words": ["net.weight", "torch.complex64", "real and imaginary"],
    },
    "double precision": {
        "configure": onebit(None),
        "net": lambda: torch.nn.Linear(6, 3, dtype=torch.float64),
        "words": ["net.weight", "torch.float64", "float32"],
    },
    "wrapped by DDP": {
        "configure": onebit(None),
        "net": lambda: torch.nn.parallel.DistributedDataParallel(plain_net()),
        "words": ["net", "DistributedDataParallel", "do not wrap"],
    },
    "wrapped by DataParallel": {
        "configure": onebit(None),
        "net": lambda: torch.nn.DataParallel(plain_net()),
        "words": ["net", "DataParallel", "do not wrap"],
    },
    "sharded module": {
        "configure": onebit(None),
        "net": fully_sharded,
        "words": ["net", "FullyShardedDataParallel", "FSDPStrategy"],
    },
    "sharded parameters": {
        "configure": onebit(None),
        "net": tensor_parallel,
        "words": ["net.weight", "DTensor", "OnebitModelParallelStrategy", '"onebit_adam_sharded"', 'mesh["replicate"]'],
    },
    "loss scaling with early exchange": {
        "configure": onebit(None, overlap="backward"),
        "trainer": lambda: {"plugins": [scaled_precision()]},
        "words": ["16-mixed", 'overlap="step"'],
    },
    "own backward with early exchange": {
        "configure": onebit(None, overlap="backward"),
        "attributes": {"backward": lambda module, loss: loss.backward()},
        "words": ['overlap="backward"', "backward() of Module", 'overlap="step"'],
    },
}


def gloo_carries(dtype: torch.dtype) -> bool:
    """Whether DDP itself could train it: gloo of torch 2.5 knows no complex numbers."""
    try:
        torch.distributed.broadcast(torch.zeros(1, dtype=dtype), 0)
    except RuntimeError:
        return False
    return True


def refuse(rank: int, world: int) -> dict[str, str | None]:
    pl = enter(rank)
    messages: dict[str, str | None] = {}
    for name, case in REFUSED.items():
        if name == "complex parameters" and not gloo_carries(torch.complex64):
            messages[name] = None
            continue
        attributes = {"automatic_optimization": not case.get("manual", False), **case.get("attributes", {})}
        module = make_module(pl, case["configure"], case.get("net", plain_net), **attributes)
        strategy = strategy_class()(**case.get("options", {}))
        trainer = quiet_trainer(pl, strategy, **case.get("trainer", dict)())
        try:
            trainer.fit(module, case.get("data", loader)())
            messages[name] = "nothing was raised"
        except pl.utilities.exceptions.MisconfigurationException as error:
            messages[name] = str(error)
    return messages


def test_what_could_not_take_effect_or_be_trained_raises_when_fitting_starts_and_names_the_remedy() -> None:
    [messages] = run_ranks(refuse, 1)
    assert messages.keys() == REFUSED.keys()
    for name, message in messages.items():
        if message is None:
            assert Version(torch.__version__) < Version("2.13"), f"{name} was not tried"
            continue
        for word in REFUSED[name]["words"]:
            assert word in message, f"{name}: {message}"


def sharing(rank: int, world: int) -> list[tuple[list[str], list[int], float]]:
    pl = enter(rank)
    longest: list[float] = []

    def by_turns(module: Any, batch: Any, _: int) -> None:
        weight = module.net[0].weight
        for optimizer in module.optimizers():
            optimizer.zero_grad()
            module.manual_backward(torch.nn.functional.cross_entropy(module.net(batch[0]), batch[1]))
            before = weight.detach().clone()
            optimizer.step()
            longest.append(float((weight.detach() - before).abs().max()) / optimizer.param_groups[0]["lr"])

    found = []
    for kind in (ob.OnebitAdam, ob.ZeroOneAdam):

        def configure(module: Any, kind: Any = kind) -> Any:
            return two_of_one_layer(module, kind)

        module = make_module(pl, configure, training_step=by_turns, automatic_optimization=False)
        trainer = quiet_trainer(pl, strategy_class()(kind.algorithm))
        longest.clear()
        trainer.fit(module, loader())
        compressed = [optimizer.ledger.compressed_steps for optimizer in trainer.strategy.onebit_optimizers]
        found.append((same_on_all_ranks(dict(module.named_parameters())), compressed, max(longest)))
    return found


def test_optimizers_without_local_steps_may_share_fp32_parameters() -> None:
    for found in run_ranks(sharing, 2):
        for different, compressed, longest in found:
            assert different == [] and compressed == [2, 2]
            assert 0 < longest < 5, "in units of its learning rate: more would undo the other one's tenfold steps"


# ----- the default freeze ---------------------------------------------------------------------------------------------------


def default_freeze(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    from lightning_onebit.lightning import VarianceFreeze

    lines: list[str] = []
    optimizers_module = importlib.import_module("lightning_onebit.strategy.optimizers")
    optimizers_module.rank_zero_info = lines.append  # type: ignore[attr-defined]
    found: dict[str, Any] = {}

    def fit(
        name: str, strategy: Any, configure: Any, callbacks: list[Any] | None = None, fits: int = 1, **attributes: Any
    ) -> None:
        seen: list[Any] = []

        def on_train_start(module: Any) -> None:
            seen[:] = [c for c in module.trainer.callbacks if isinstance(c, VarianceFreeze)]

        module = make_module(pl, configure, on_train_start=on_train_start, **attributes)
        trainer = quiet_trainer(pl, strategy, max_epochs=5, callbacks=callbacks)
        lines.clear()
        for _ in range(fits):
            trainer.fit(module, loader(32))
        optimizers = trainer.strategy.onebit_optimizers
        dense = [o.freeze_step or o.steps - o.ledger.compressed_steps for o in optimizers]
        found[name] = (
            [(c.at, c.latest) for c in seen],
            sum("VarianceFreeze" in line for line in lines),
            sum("converted" in line for line in lines),
            [str(o.phase.value) for o in optimizers],
            dense,
        )

    fit("none", "onebit_adam", onebit(None, _alone=True))
    fit("twice", "onebit_adam", onebit(None, _alone=True), fits=2)
    fit("optimizer", "onebit_adam", onebit(3))
    fit("strategy", strategy_class()(freeze_step=3), adamw())
    fit("callback", "onebit_adam", onebit(None, _alone=True), [VarianceFreeze(3)])
    fit(
        "model's callback",
        "onebit_adam",
        onebit(None, _alone=True),
        configure_callbacks=lambda module: VarianceFreeze(3),
    )
    fit("dense", strategy_class()(other_optimizers="dense"), sgd)
    return found


def test_a_freeze_is_added_exactly_where_nothing_says_when_the_warm_up_ends() -> None:
    [found] = run_ranks(default_freeze, 1)
    # 4 batches per epoch, 5 epochs: half of so short a run
    assert found["none"] == ([("auto", 0.2)], 1, 0, ["compressed"], [10])
    assert found["twice"][0] == [("auto", 0.2)], "one for each fit, not two"
    assert found["optimizer"] == ([], 0, 0, ["compressed"], [3])
    assert found["strategy"] == ([], 0, 1, ["compressed"], [3])
    assert found["callback"] == ([(3, None)], 0, 0, ["compressed"], [4])
    assert found["model's callback"] == ([(3, None)], 0, 0, ["compressed"], [4])
    assert found["dense"] == ([], 0, 0, [], [])


def refusing_at_once(rank: int, world: int) -> tuple[str, bool]:
    """Refused right after the process groups are made; whether the other rank had made its own by then."""
    pl = enter(rank)
    store = torch.distributed.distributed_c10d._get_default_store()
    original = Groups.new

    def new(groups: Any, timeout: Any) -> Any:
        group = original(groups, timeout)
        store.add("groups made", 1)
        return group

    Groups.new = new  # type: ignore[method-assign]
    module = make_module(pl, onebit(5))
    try:
        quiet_trainer(pl, strategy_class()(), callbacks=[AfterGroups(store)]).fit(module, loader())
    except InterruptedError as error:
        return str(error), True
    return "trained", False


class AfterGroups(Callback):
    """Refuses at the first chance after the groups were made."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        raise InterruptedError(f"{self.store.add('groups made', 0)} ranks have made their groups")


def test_no_rank_goes_on_before_all_have_made_their_process_groups() -> None:
    for _ in range(3):
        assert run_ranks(refusing_at_once, 3) == [("3 ranks have made their groups", True)] * 3
