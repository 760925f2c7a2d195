"""All four algorithms through the Trainer: flat and hierarchical, and what lookers see between local steps of 0/1 Adam."""

from __future__ import annotations

import copy
import importlib
import inspect
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_support import (
    differing,
    early_refreshes,
    enter,
    loader,
    make_module,
    norm_net,
    plain_net,
    quiet_trainer,
    resumes_within_epochs,
    same_on_all_ranks,
    strategy_class,
)

import lightning_onebit as ob

saves_on_exception = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
LOCAL: dict[str, Any] = {"freeze_step": 3, "local_steps": ob.LocalSteps(max_gap=4, double_every=2)}
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 2},
    "onebit_lamb": {"freeze_step": 2, "trust_clip": (0.01, 0.3)},
    "zero_one_adam": LOCAL,
    "binsgdm": {"recipe": "published", "seed": 3},
    "onebit_sgd": {},
}


#: 0/1 Adam that compresses momenta, under one denominator for a whole tensor
MOMENTA = {
    **{"recipe": "published", "denominator_floor": 1.0, "exchange": ob.ExchangeOptions(block_size=64)},
    **LOCAL,
}


def factory(module: Any) -> Any:
    strategy = module.trainer.strategy
    return strategy.optimizer(module.parameters(), lr=1e-2, weight_decay=0.01, **early_refreshes(strategy))


def fit(pl: Any, strategy: Any, configure: Any = factory, net: Any = norm_net, **kwargs: Any) -> tuple[Any, Any]:
    attributes = kwargs.pop("attributes", {})
    module = make_module(pl, configure, net, **attributes)
    trainer = quiet_trainer(pl, strategy, **{"max_epochs": 4, **kwargs})
    trainer.fit(module, loader(samples=96, batch=4), loader(samples=16))
    return trainer, module


def algorithm_rank(rank: int, world: int, algorithm: str, ranks_per_node: int | None) -> dict[str, Any]:
    pl = enter(rank)
    strategy = strategy_class()(
        algorithm, ranks_per_node=ranks_per_node, exchange=ob.ExchangeOptions(block_size=64), **OPTIONS[algorithm]
    )
    different: list[str] = []

    def on_train_batch_end(module: Any, *_: Any) -> None:
        different.extend(same_on_all_ranks(dict(module.net.named_parameters())))

    _, module = fit(pl, strategy, max_steps=11, attributes={"on_train_batch_end": on_train_batch_end})
    (optimizer,) = strategy.onebit_optimizers
    total = optimizer.ledger.total
    return {
        "different": different,
        "class": type(optimizer).__name__,
        "steps": optimizer.steps,
        "compressed": optimizer.ledger.compressed_steps,
        "dense": optimizer.ledger.dense_steps,
        "sent": total.bytes_sent,
        "intra": total.bytes_intra,
        "finite": all(bool(torch.isfinite(p).all()) for p in module.parameters()),
        "moved": float(
            (module.net[0].weight.detach() - make_module(pl, factory, norm_net).net[0].weight.detach()).abs().max()
        ),
    }


@pytest.mark.parametrize(
    ("algorithm", "world", "ranks_per_node"),
    [*((algorithm, 4, 2) for algorithm in OPTIONS), *((a, 2, None) for a in ("zero_one_adam", "binsgdm"))],
)
def test_every_algorithm_trains_replicas_that_everybody_sees_equal(
    algorithm: str, world: int, ranks_per_node: int | None
) -> None:
    for result in run_ranks(algorithm_rank, world, algorithm, ranks_per_node):
        assert result["different"] == []
        assert result["steps"] == 11 and result["finite"] and result["moved"] > 1e-3
        assert result["compressed"] >= 7 and result["sent"] > 0
        assert (result["dense"] > 0) == (algorithm not in ("binsgdm", "onebit_sgd"))
        assert (result["intra"] > 0) == (ranks_per_node is not None)


def half_rank(rank: int, world: int, algorithm: str) -> dict[str, Any]:
    """The same run by manual and by automatic optimization: only in the first ``step()`` sees Lightning's 16-bit default dtype."""
    pl = enter(rank)
    defaults: set[torch.dtype] = set()

    def by_hand(module: Any, batch: Any, _: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(torch.nn.functional.cross_entropy(module.net(batch[0]), batch[1]))
        defaults.add(torch.get_default_dtype())
        optimizer.step()

    ends, dtypes, compressed = [], set(), []
    for attributes in ({"automatic_optimization": False, "training_step": by_hand}, {}):
        exchange = ob.ExchangeOptions(block_size=64, state_dtype="float32")
        strategy = strategy_class()(algorithm, exchange=exchange, **OPTIONS[algorithm])
        _, module = fit(pl, strategy, net=plain_net, max_steps=11, precision="bf16-true", attributes=attributes)
        (optimizer,) = strategy.onebit_optimizers
        compressed.append(optimizer.ledger.compressed_steps)
        ends.append(dict(module.state_dict()))
        for state in optimizer.state_dict()["state"].values():
            places = (
                "live",
                "denominators_by",
                "denominators_at",
                "momentum_layout",
            )  # no numbers that training computes with
            dtypes |= {value.dtype for name, value in state.items() if name not in places}
        dtypes |= {value.dtype for value in optimizer.residual_state_dict()["tensors"].values()}
    return {"different": differing(*ends), "dtypes": dtypes, "compressed": compressed, "defaults": defaults}


@pytest.mark.parametrize("algorithm", list(OPTIONS))
def test_manual_optimization_in_half_precision_is_automatic_optimization_bit_for_bit(algorithm: str) -> None:
    for result in run_ranks(half_rank, 2, algorithm):
        assert result["defaults"] == {torch.bfloat16}, "this is what the test is about"
        assert result["dtypes"] <= {torch.float32, torch.bool} and torch.float32 in result["dtypes"]
        assert result["different"] == []
        assert result["compressed"][0] == result["compressed"][1] >= 7


REFRESHING = {
    "onebit_adam": {"freeze_step": 2, "refresh": 3},
    # two steps of a variance, a synchronisation, a step alone, a synchronisation that comes early for the refresh
    "zero_one_adam": {"freeze_step": 2, "local_steps": ob.LocalSteps(max_gap=4, double_every=1), "refresh": 3},
}


def refreshing_rank(rank: int, world: int, folder: str, algorithm: str) -> dict[str, Any]:
    """Plain AdamW, converted, or LAMB, with accumulation and clipping; saved after a refresh and continued from there."""
    pl = enter(rank)

    def configured(module: Any) -> Any:
        if algorithm == "onebit_lamb":
            return module.trainer.strategy.optimizer(module.parameters(), lr=1e-2)
        return torch.optim.AdamW(module.parameters(), lr=1e-2)

    found: dict[str, Any] = {"dense": [], "different": [], "alone": 0}

    def on_train_batch_end(module: Any, *_: Any) -> None:
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        if optimizer.steps > len(found["dense"]):
            found["dense"].append(optimizer.ledger.last.dense)
            found["alone"] += optimizer.mid_local
            with optimizer.consensus() if algorithm == "zero_one_adam" else nullcontext():
                found["different"] += same_on_all_ranks(dict(module.net.named_parameters()))

    ends = []
    for ckpt_path in (None, f"{folder}/step=6.ckpt"):
        found["dense"] = found["dense"][:6]
        strategy = strategy_class()(algorithm, exchange=ob.ExchangeOptions(block_size=64), **REFRESHING[algorithm])
        module = make_module(pl, configured, norm_net, on_train_batch_end=on_train_batch_end)
        trainer = quiet_trainer(
            *(pl, strategy),
            max_steps=11,
            max_epochs=20,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            enable_checkpointing=True,
            default_root_dir=folder,
        )
        save = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
        trainer.callbacks.append(save)
        trainer.fit(module, loader(samples=96, batch=4), ckpt_path=ckpt_path)
        ends.append(weights(module))
    return {**found, "resumed": differing(*ends)}


@resumes_within_epochs
@pytest.mark.parametrize("algorithm", REFRESHING)
def test_refreshes_with_the_trainer_and_a_resume_between_them(tmp_path: Any, algorithm: str) -> None:
    for result in run_ranks(refreshing_rank, 2, str(tmp_path), algorithm):
        assert (result["alone"] > 0) == (algorithm == "zero_one_adam")
        assert result["dense"] == [True] * 2 + ([False] * 3 + [True]) * 2 + [False]
        assert result["different"] == [] and result["resumed"] == []


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.net.named_parameters()}


class Looker:
    """Evaluates, saves and averages weights in the middle of local steps, as callbacks do."""

    def __init__(self, looks: bool) -> None:
        self.looks = looks
        self.seen_different: list[str] = []
        self.mid_local = 0
        self.last: dict[str, Any] = {}

    def methods(self) -> dict[str, Any]:
        looker = self

        def look(module: Any) -> None:
            (optimizer,) = module.trainer.strategy.onebit_optimizers
            looker.mid_local += optimizer.mid_local
            looker.seen_different += same_on_all_ranks(dict(module.net.named_parameters()))

        def on_train_batch_end(module: Any, *_: Any) -> None:
            if looker.looks:
                look(module)
                module.trainer.strategy.lightning_module_state_dict()
                module.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            if module.trainer.global_step == 10:
                (optimizer,) = module.trainer.strategy.onebit_optimizers
                looker.last["last mid_local"] = optimizer.mid_local
                looker.last["shared"] = weights(module)
                optimizer.show_local()
                looker.last["own"] = weights(module)
                optimizer.show_consensus()

        def on_validation_epoch_start(module: Any) -> None:
            if looker.looks and not module.trainer.sanity_checking:
                look(module)

        def on_train_end(module: Any) -> None:
            looker.seen_different += same_on_all_ranks(dict(module.net.named_parameters()))
            looker.last["at the end"] = weights(module)

        return {
            "on_train_batch_end": on_train_batch_end,
            "on_validation_epoch_start": on_validation_epoch_start,
            "on_train_end": on_train_end,
        }


def looking_rank(rank: int, world: int, looks: bool, accumulate: int, average: bool) -> dict[str, Any]:
    pl = enter(rank)
    looker = Looker(looks)
    callbacks = []
    if average:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        callbacks.append(EMAWeightAveraging(decay=0.5))
    # momenta are compressed: steps would have one size in a whole block, which hides where ranks have gone
    strategy = strategy_class()("zero_one_adam", **MOMENTA)
    kwargs = {"val_check_interval": 2 * accumulate, "accumulate_grad_batches": accumulate} if looks else {}
    kwargs.setdefault("accumulate_grad_batches", accumulate)
    _trainer, module = fit(
        pl, strategy, max_steps=10, attributes=looker.methods(), callbacks=callbacks, limit_val_batches=1, **kwargs
    )
    (optimizer,) = strategy.onebit_optimizers
    final = weights(module)
    owns = all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in module.parameters() if p.numel())
    return {
        "different": looker.seen_different,
        "mid_local": looker.mid_local,
        **looker.last,
        "final": final,
        "owns": owns,
        "steps": optimizer.steps,
        "silent": optimizer.ledger.total.collectives,
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_as_if_nobody_had_looked_between_local_steps(accumulate: int) -> None:
    looked = run_ranks(looking_rank, 2, True, accumulate, False)
    alone = run_ranks(looking_rank, 2, False, accumulate, False)
    for a, b in zip(looked, alone, strict=True):
        assert a["mid_local"] > 1, "nobody looked between local steps"
        assert a["different"] == b["different"] == []
        assert differing(a["final"], b["final"]) == []
        assert differing(a["own"], b["own"]) == []
        assert a["owns"] and a["steps"] == 10
        # training ends with a synchronisation that takes what ranks have done alone into the model, before on_train_end
        assert differing(a["final"], a["at the end"]) == []
        moved = sum(float((a["final"][n] - a["shared"][n]).abs().sum()) for n in a["final"])
        apart = sum(float((a["final"][n] - a["own"][n]).abs().sum()) for n in a["final"])
        assert moved > 0 and apart < moved
    assert differing(looked[0]["final"], looked[1]["final"]) == []
    # step 10 is in the middle of a gap: each rank has weights of its own beside what is shown
    assert looked[0]["last mid_local"]
    assert differing(looked[0]["own"], looked[1]["own"]) != []


def averaging_rank(rank: int, world: int) -> dict[str, Any]:
    """SWA with BatchNorm whose last epoch, which renews statistics, begins between synchronisations."""
    pl = enter(rank)
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    found: dict[str, Any] = {"mid_local": [], "forwards": 0, "different": []}

    def training_step(module: Any, batch: Any, _: int) -> torch.Tensor:
        loop = module.trainer.fit_loop
        if loop._skip_backward:
            average = dict(swa._average_model.net.named_parameters())
            found["forwards"] += 1
            found["different"] += differing(weights(module), {name: p.detach() for name, p in average.items()})
            found["different"] += same_on_all_ranks(dict(module.net.named_parameters()))
        return torch.nn.functional.cross_entropy(module.net(batch[0]), batch[1])

    def on_train_epoch_start(module: Any) -> None:
        (optimizer,) = module.trainer.strategy.onebit_optimizers
        found["mid_local"].append(optimizer.mid_local)

    def on_train_end(module: Any) -> None:
        found["different"] += same_on_all_ranks(dict(module.net.named_parameters()))

    strategy = strategy_class()("zero_one_adam", **MOMENTA)
    attributes = {
        "training_step": training_step,
        "on_train_epoch_start": on_train_epoch_start,
        "on_train_end": on_train_end,
    }
    # 6 batches a rank and epoch; synchronised with the steps 4, 5, 7, 11, 15 and 19
    module = make_module(pl, factory, norm_net, **attributes)
    quiet_trainer(pl, strategy, max_epochs=3, callbacks=[swa]).fit(module, loader(samples=48, batch=4))
    return found


def test_weight_averaging_renews_the_statistics_of_its_average_between_local_steps() -> None:
    for result in run_ranks(averaging_rank, 2):
        assert result["mid_local"][-1], "this is what the test is about"
        assert result["forwards"] == 6
        assert result["different"] == []


def quantised_rank(rank: int, world: int) -> tuple[str, list[str]]:
    """A frozen integer parameter among those that AdamW is given, as quantised weights below adapters are."""
    pl = enter(rank)

    class Quantised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Parameter(torch.ones(6, dtype=torch.uint8), requires_grad=False)
            self.head = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * self.base)

    strategy = strategy_class()("onebit_adam", freeze_step=2)
    _, module = fit(
        pl, strategy, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3), Quantised, max_steps=4
    )
    return type(strategy.onebit_optimizers[0]).__name__, same_on_all_ranks(dict(module.named_parameters()))


def test_adamw_is_converted_with_a_frozen_integer_parameter() -> None:
    assert run_ranks(quantised_rank, 2) == [("OnebitAdam", [])] * 2


def pruning_rank(rank: int, world: int, permanent: bool) -> dict[str, Any]:
    """Masks that a callback makes of what pruning has kept of a rank's own weights."""
    pl = enter(rank)
    module = make_module(pl, factory)
    pruning = pl.callbacks.ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(module.net[0], "weight")],
        amount=0.3,
        use_lottery_ticket_hypothesis=False,
        make_pruning_permanent=permanent,
    )
    strategy = strategy_class()("zero_one_adam", **MOMENTA)
    quiet_trainer(pl, strategy, max_epochs=3, callbacks=[pruning]).fit(module, loader(samples=48, batch=4))
    state = {name: value.float() for name, value in module.state_dict().items()}
    return {"state": state, "pruned": float((module.net[0].weight == 0).float().mean())}


@pytest.mark.parametrize("permanent", [True, False])
def test_masks_of_pruned_weights_are_equal_after_local_steps(permanent: bool) -> None:
    first, second = run_ranks(pruning_rank, 2, permanent)
    assert differing(first["state"], second["state"]) == []
    assert first["pruned"] > 0.2


def plain_loop_rank(rank: int, world: int, accumulate: int) -> dict[str, Any]:
    """0/1 Adam on the same batches in a plain loop and by the Trainer."""
    pl = enter(rank)
    steps = 12

    def loss(net: torch.nn.Module, batch: int) -> torch.Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * batch + rank))
        return torch.nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))

    def configured(module: Any) -> Any:
        return module.trainer.strategy.optimizer(module.parameters(), lr=0.05, _doubling=1)

    # ranks soon are so far apart that gradients of the shared model have other signs than those of a rank's own
    strategy = strategy_class()("zero_one_adam", **MOMENTA)
    module = make_module(pl, configured, plain_net, training_step=lambda self, _, index: loss(self.net, index))
    net = copy.deepcopy(module.net)
    trainer = quiet_trainer(pl, strategy, max_steps=steps, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(samples=4 * world * accumulate * steps, batch=4))
    [ours] = strategy.onebit_optimizers

    plain = ob.ZeroOneAdam(net.parameters(), lr=0.05, _doubling=1, **MOMENTA)
    alone = 0
    for step in range(steps):
        plain.zero_grad()
        for batch in range(step * accumulate, (step + 1) * accumulate):
            (loss(net, batch) / accumulate).backward()
        plain.step()
        alone += plain.mid_local
    plain.synchronise()
    residuals = [optimizer.residual_state_dict()["tensors"] for optimizer in (ours, plain)]
    return {
        "alone": alone,
        "steps": (ours.steps, plain.steps),
        "weights": differing(dict(module.net.named_parameters()), dict(net.named_parameters())),
        "residuals": differing(*residuals),
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_local_steps_by_the_trainer_are_those_of_a_plain_loop_bit_for_bit(accumulate: int) -> None:
    """Every forward is on a rank's own weights, also of a batch that comes before ``step()``, whatever others are shown in between."""
    for found in run_ranks(plain_loop_rank, 2, accumulate):
        assert found.pop("alone") > 4, "this is what the test is about"
        assert found == {"steps": (12, 12), "weights": [], "residuals": []}


def interrupted_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A training step of 0/1 Adam that fails between synchronisations, and the run resumed from what was saved then."""
    pl = enter(rank)

    def run(name: str, fails: bool, **kwargs: Any) -> tuple[Any, Any]:
        def training_step(module: Any, batch: Any, _: int) -> Any:
            step = module.trainer.global_step
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = torch.nn.functional.cross_entropy(module.net(x), x[:, :3].argmax(1))
            if fails and step == 10:
                raise KeyError("a mistake of the user's")
            return loss

        save = pl.callbacks.ModelCheckpoint(folder, filename=name, save_on_exception=True, every_n_train_steps=10**6)
        module = make_module(pl, factory, plain_net, training_step=training_step)
        strategy = strategy_class()("zero_one_adam", exchange=ob.ExchangeOptions(block_size=64), **LOCAL)
        trainer = quiet_trainer(pl, strategy, max_epochs=2, max_steps=15, callbacks=[save], enable_checkpointing=True)
        with suppress(KeyError) if fails else nullcontext():
            trainer.fit(module, loader(samples=128, batch=8), **kwargs)
        return trainer, module

    _, whole = run("whole", fails=False)
    broken, module = run("broken", fails=True)
    [optimizer] = broken.strategy.onebit_optimizers
    different = same_on_all_ranks(dict(module.net.named_parameters()))
    _, resumed = run("resumed", fails=False, ckpt_path=f"{folder}/broken.ckpt")
    return {
        "between synchronisations": optimizer.mid_local,
        "different": different,
        "resumed": differing(weights(resumed), weights(whole)),
    }


@pytest.mark.skipif(not saves_on_exception, reason="ModelCheckpoint cannot save on an exception in this Lightning")
def test_a_training_step_that_fails_between_local_steps_leaves_and_saves_the_shared_model(tmp_path: Any) -> None:
    for found in run_ranks(interrupted_rank, 2, str(tmp_path)):
        assert found == {"between synchronisations": True, "different": [], "resumed": []}


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="EMAWeightAveraging came with Lightning 2.6"
)
def test_weight_averaging_callbacks_average_the_model_that_ranks_share() -> None:
    for result in run_ranks(looking_rank, 2, True, 1, True):
        assert result["different"] == [] and result["mid_local"] > 1


def hierarchy_error_rank(rank: int, world: int, options: dict[str, Any]) -> str:
    pl = enter(rank)
    try:
        fit(pl, strategy_class()("onebit_adam", freeze_step=2, **options), max_steps=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_node": 3}, "ranks_per_node=3 does not divide the 4 ranks"),
    ],
)
def test_a_hierarchy_that_cannot_be_raises_on_every_rank(options: dict[str, Any], message: str) -> None:
    for text in run_ranks(hierarchy_error_rank, 4, options):
        assert text.startswith("MisconfigurationException") and message in text


def layout_rank(rank: int, world: int, nodes: list[int]) -> str:
    """What the strategy makes of the nodes that ranks are on."""
    pl = enter(rank)

    adapter = importlib.import_module("lightning_onebit.strategy.adapter")
    node_size = adapter.node_size
    adapter.node_size = lambda asked, node, *others: node_size(asked, nodes[rank], *others)  # type: ignore[attr-defined]
    strategy = strategy_class()("onebit_adam", freeze_step=2)
    try:
        _trainer, _ = fit(pl, strategy, max_steps=4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    (optimizer,) = strategy.onebit_optimizers
    return f"intra {optimizer.ledger.total.bytes_intra > 0}"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0, 1, 1], "intra True"),
        ([0, 0, 0, 0], "intra False"),
        ([0, 1, 2, 3], "intra False"),
        ([0, 0, 0, 1], "ranks per node [3, 1]"),
        ([0, 1, 0, 1], "nodes of ranks 0, 1, ...: [0, 1, 0, 1]"),
    ],
)
def test_auto_follows_the_nodes_of_the_cluster_and_uneven_ones_raise(nodes: list[int], expected: str) -> None:
    for text in run_ranks(layout_rank, 4, nodes):
        assert expected in text


def test_names_and_aliases_are_listed_and_registered() -> None:
    names = ob.available_strategies()
    from lightning.pytorch.strategies import StrategyRegistry

    for name in ("onebit_adam", "onebit_lamb", "zero_one_adam", "binsgdm", "birder", "onebit_sgd"):
        for suffix in ("", "_spawn", "_fork", "_notebook"):
            assert name + suffix in names and name + suffix in StrategyRegistry


EARLY = ob.ExchangeOptions(overlap="backward")


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("onebit_adam", {"trust_clip": (0.01, 0.3)}, "is no option of 'onebit_adam': 'onebit_lamb' has it"),
        ("binsgdm", {"freeze_step": 5}, "freeze_step=5 is no option of 'binsgdm'"),
        ("onebit_lamb", {"recipe": "published"}, "recipe='published' is no option of 'onebit_lamb'"),
        (
            "onebit_adam",
            {"local_steps": ob.LocalSteps(max_gap=8)},
            "is no option of 'onebit_adam': 'zero_one_adam' has it",
        ),
        ("zero_one_adam", {"recipe": "published", "refresh": 5}, "refresh=5 has no effect with recipe='published'"),
        ("onebit_lamb", {"trust_clip": (2.0, 1.0)}, "trust_clip[0]=2.0 is out of range"),
        ("birder", {"recipe": "paper"}, "recipe='paper' is unknown"),
        ("onebit_adam", {"max_grad_norm": 1.0, "exchange": EARLY}, "max_grad_norm=1.0 needs all gradients"),
        ("zero_one_adam", {"exchange": EARLY}, "overlap='backward' of the exchange cannot take effect in ZeroOneAdam"),
        ("binsgdm", {"exchange": EARLY}, "overlap='backward' of the exchange cannot take effect in BinSGDM"),
        ("binsgdm", {"exchange": ob.ExchangeOptions(state_dtype="bfloat16")}, "state_dtype='bfloat16' of the exchange"),
        ("onebit_adam", {"ranks_per_node": 0}, "ranks_per_node=0 is out of range"),
    ],
)
def test_options_that_cannot_take_effect_raise_on_construction(
    algorithm: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        strategy_class()(algorithm, **options)
    assert message in str(raised.value)


def conversion_rank(rank: int, world: int, algorithm: str) -> str:
    pl = enter(rank)
    strategy = strategy_class()(algorithm, **OPTIONS[algorithm])
    try:
        fit(pl, strategy, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3), max_steps=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return type(strategy.onebit_optimizers[0]).__name__


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("zero_one_adam", "ZeroOneAdam"),
        ("onebit_lamb", "lightning_onebit.OnebitLamb(params, ...)"),
        ("binsgdm", "lightning_onebit.BinSGDM(params, ...)"),
    ],
)
def test_adamw_is_converted_where_it_can_be_and_elsewhere_the_error_shows_the_line(
    algorithm: str, expected: str
) -> None:
    for text in run_ranks(conversion_rank, 2, algorithm):
        assert expected in text


def default_freeze_rank(rank: int, world: int) -> dict[str, Any]:
    pl = enter(rank)
    strategy = strategy_class()("zero_one_adam")
    _, _module = fit(pl, strategy, max_steps=10)
    (optimizer,) = strategy.onebit_optimizers
    return {"phase": optimizer.phase.value, "frozen_at": optimizer.sync_policy.frozen_at}


def test_without_a_freeze_the_variance_of_zero_one_adam_freezes_by_the_default_callback() -> None:
    for result in run_ranks(default_freeze_rank, 2):
        assert result == {"phase": "local", "frozen_at": 5}
