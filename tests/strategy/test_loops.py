"""Every loop of Lightning with compression off: what an uncompressed run of the strategy leaves behind is what ddp leaves behind.

Each case runs three times on two real ranks: with ``ddp``; with optimizers that the strategy trains densely (``dense``: bit for bit
ddp); and with its own optimizer before its freeze (``onebit``: ddp to the rounding of AdamW's formula).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run_ranks
from lightning_support import (
    differing,
    enter,
    loader,
    make_module,
    norm_net,
    plain_net,
    quiet_trainer,
    same_on_all_ranks,
    strategy_class,
)
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

Found = dict[str, Tensor]
KINDS = ("ddp", "dense", "onebit")


@dataclass
class Setting:
    """One of the three runs of a case."""

    pl: Any
    kind: str

    def strategy(self, **options: Any) -> Any:
        """A fresh strategy."""
        if self.kind == "ddp":
            return self.pl.strategies.DDPStrategy(find_unused_parameters=options.get("overlap_dense", True))
        if self.kind == "dense":
            return strategy_class()(other_optimizers="dense", convert_optimizers=False, **options)
        return strategy_class()(freeze_step=10**6, **options)

    def trainer(self, strategy: Any = None, **kwargs: Any) -> Any:
        return quiet_trainer(self.pl, strategy or self.strategy(), **{"max_epochs": 2, **kwargs})

    def fit(self, module: Any, data: Any = None, **kwargs: Any) -> Any:
        """Trains ``module``; returns the Trainer."""
        val = kwargs.pop("val", None)
        trainer = self.trainer(**kwargs)
        trainer.fit(module, data if data is not None else loader(), val)
        return trainer


CASES: dict[str, Callable[[Setting], Found]] = {}


def case(fn: Callable[[Setting], Found]) -> Callable[[Setting], Found]:
    CASES[fn.__name__.replace("_", " ")] = fn
    return fn


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def module_of(
    s: Setting, net: Callable[[], torch.nn.Module] = plain_net, configure: Any = adamw, **methods: Any
) -> Any:
    """Every rank draws other weights: rank 0's must win."""
    return make_module(s.pl, configure, net, seed=torch.distributed.get_rank(), **methods)


def state(module: Any) -> Found:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def uneven() -> DataLoader[Any]:
    """Seven batches per rank, of which the last has half the size."""
    return loader(samples=104, batch=8)


# ----- automatic optimization ---------------------------------------------------------------------------------------------------


@case
def uneven_last_batches_and_accumulation(s: Setting) -> Found:
    module = module_of(s, norm_net)
    s.fit(module, uneven(), accumulate_grad_batches=3)
    return state(module)


@case
def an_accumulation_that_changes(s: Setting) -> Found:
    schedule = s.pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    module = module_of(s)
    trainer = s.fit(module, uneven(), callbacks=[schedule], max_epochs=4)
    return {**state(module), "steps": torch.tensor(trainer.global_step)}


@case
def hooks_that_read_gradients_and_clip_them(s: Setting) -> Found:
    norms: list[Tensor] = []

    def on_before_optimizer_step(module: Any, _: Any) -> None:
        norms.append(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]))

    def configure_gradient_clipping(module: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)

    methods = {
        "on_before_optimizer_step": on_before_optimizer_step,
        "configure_gradient_clipping": configure_gradient_clipping,
    }
    module = module_of(s, **methods)
    s.fit(module)
    return {**state(module), "norms": torch.stack(norms)}


@case
def clipping_by_norm(s: Setting) -> Found:
    module = module_of(s)
    s.fit(module, gradient_clip_val=0.05)
    return state(module)


@case
def clipping_by_value(s: Setting) -> Found:
    module = module_of(s)
    s.fit(module, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return state(module)


@case
def stochastic_weight_averaging(s: Setting) -> Found:
    module = module_of(s, norm_net)
    swa = s.pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    s.fit(module, callbacks=[swa], max_epochs=4)
    return state(module)


@case
def an_exponential_average_of_weights(s: Setting) -> Found:
    module = module_of(s, norm_net)
    s.fit(module, callbacks=[s.pl.callbacks.EMAWeightAveraging(decay=0.5)], val=loader(16, seed=4))
    return state(module)


@case
def early_stopping(s: Setting) -> Found:
    stop = s.pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05)
    module = module_of(s)
    trainer = s.fit(module, val=loader(32, seed=4), callbacks=[stop], max_epochs=30)
    assert trainer.current_epoch < 30
    return {**state(module), "epochs": torch.tensor(trainer.current_epoch), "best": stop.best_score}


@case
def backbone_finetuning(s: Setting) -> Found:
    """The backbone is frozen at first and joins the optimizer as a new group in the second epoch."""

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(plain_net(), torch.nn.Tanh(), torch.nn.Linear(3, 3))

    def configure(module: Any) -> Any:
        return torch.optim.AdamW(module.net[2].parameters(), lr=1e-2, weight_decay=0.1)

    class Late(s.pl.callbacks.BackboneFinetuning):  # type: ignore[name-defined, misc]
        """Freezes after DDP has looked: it never averages parameters that are frozen when it wraps the module."""

        def setup(self, *_: Any, **__: Any) -> None:
            pass

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_start(trainer, pl_module)
            self.freeze_before_training(pl_module)

    module = module_of(s, net, configure)
    module.backbone = module.net[0]
    kind = Late if s.kind == "ddp" else s.pl.callbacks.BackboneFinetuning
    callback = kind(1, lambda epoch: 1.5, backbone_initial_lr=1e-3, verbose=False)
    trainer = s.fit(module, callbacks=[callback], max_epochs=4)
    assert len(trainer.optimizers[0].param_groups) == 2
    return state(module)


@case
def learning_rate_finder(s: Setting) -> Found:
    def configure(module: Any) -> Any:
        return torch.optim.AdamW(module.parameters(), lr=module.lr, weight_decay=0.1)

    module = module_of(s, configure=configure, lr=1e-3)
    trainer = s.trainer()
    found = s.pl.tuner.Tuner(trainer).lr_find(module, loader(), num_training=8, early_stop_threshold=None)
    trainer.fit(module, loader())
    losses = torch.tensor(found.results["loss"])
    return {
        **state(module),
        "losses": losses,
        "rates": torch.tensor(found.results["lr"]),
        "lr": torch.tensor(module.lr),
    }


@case
def schedulers_of_steps_epochs_and_metrics(s: Setting) -> Found:
    rates: list[float] = []

    def on_train_batch_start(module: Any, *_: Any) -> None:
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    def configure(module: Any) -> Any:
        optimizer = adamw(module)
        if module.trainer.max_epochs == 3:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chain, "interval": "step"}}

    found: Found = {}
    for epochs in (2, 3):
        module = module_of(s, configure=configure, on_train_batch_start=on_train_batch_start)
        s.fit(module, val=loader(16, seed=4), max_epochs=epochs)
        found |= {f"{epochs} {name}": value for name, value in state(module).items()}
    return {**found, "rates": torch.tensor(rates)}


@case
def overfitting_limits_and_checks_within_an_epoch(s: Setting) -> Found:
    found: Found = {}
    for name, kwargs in {
        "overfit": {"overfit_batches": 2},
        "limited": {"limit_train_batches": 0.5, "limit_val_batches": 1, "num_sanity_val_steps": -1},
        "often": {"val_check_interval": 2, "num_sanity_val_steps": 2},
        "fast": {"fast_dev_run": 3},
        "steps": {"max_steps": 5, "max_epochs": -1},
    }.items():
        module = module_of(s, norm_net)
        trainer = s.fit(module, val=loader(32, seed=4), **kwargs)
        found |= {f"{name} {key}": value for key, value in state(module).items()}
        found[f"{name} step"] = torch.tensor(trainer.global_step)
    return found


@case
def distributed_samplers(s: Setting) -> Found:
    """Lightning's own, the user's own, shuffled, and none."""
    found: Found = {}
    data = loader().dataset
    for name in ("own", "shuffled", "none"):
        module = module_of(s)
        if name == "own":
            sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=5)
            s.fit(module, DataLoader(data, 8, sampler=sampler), use_distributed_sampler=False)
        elif name == "shuffled":
            s.fit(module, DataLoader(data, 8, shuffle=True))
        else:
            s.fit(module, DataLoader(data, 8), use_distributed_sampler=False)
        found |= {f"{name} {key}": value for key, value in state(module).items()}
    return found


@case
def evaluation_and_prediction_before_and_after(s: Setting) -> Found:
    def test_step(module: Any, batch: Any, _: int) -> None:
        module.log("test_loss", cross_entropy(module.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(module: Any, batch: Any, _: int) -> Tensor:
        out: Tensor = module.net(batch[0])
        return out

    module = module_of(s, norm_net, test_step=test_step, predict_step=predict_step)
    # nothing has shared rank 0's weights yet: that is fit's business, with ddp too
    module.load_state_dict(state(make_module(s.pl, adamw, norm_net)))
    found: Found = {}
    trainer = s.trainer()
    for when in ("before", "after"):
        if when == "after":
            trainer.fit(module, loader(), loader(32, seed=4))
        (metrics,) = trainer.validate(module, loader(32, seed=4), verbose=False)
        (tested,) = trainer.test(module, loader(32, seed=5), verbose=False)
        found |= {f"{when} {key}": torch.tensor(value) for key, value in {**metrics, **tested}.items()}
        found[f"{when} predictions"] = torch.cat(trainer.predict(module, loader(32, seed=6)))
    return {**found, **state(module)}


@case
def two_fits_of_one_trainer(s: Setting) -> Found:
    module, trainer = module_of(s, norm_net), s.trainer()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    return state(module)


@case
def a_fit_that_goes_on_from_a_checkpoint(s: Setting) -> Found:
    path = s.trainer().strategy.broadcast(f"{s.pl.__name__}") and _path(s)
    module = module_of(s, norm_net)
    trainer = s.fit(module)
    trainer.save_checkpoint(path)
    resumed = module_of(s, norm_net)
    trainer = s.trainer(max_epochs=4)
    trainer.fit(resumed, loader(), ckpt_path=path)
    assert trainer.global_step == 16
    return state(resumed)


def _path(s: Setting) -> str:
    """The same on all ranks, another one in every test."""
    import tempfile

    place = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(place)
    return f"{place[0]}/{s.kind}.ckpt"


# ----- manual optimization ------------------------------------------------------------------------------------------------------


@case
def a_small_gan_with_two_optimizers_that_are_toggled(s: Setting) -> Found:
    def net() -> torch.nn.Module:
        generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6))
        critic = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LeakyReLU(), torch.nn.Linear(16, 1))
        return torch.nn.ModuleDict({"generator": generator, "critic": critic})

    def configure(module: Any) -> Any:
        made = [
            torch.optim.AdamW(module.net[k].parameters(), lr=1e-2, betas=(0.5, 0.9)) for k in ("generator", "critic")
        ]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 2)]

    def training_step(module: Any, batch: Any, index: int) -> None:
        generator, critic = module.net["generator"], module.net["critic"]
        first, second = module.optimizers()
        seed = 1000 * module.current_epoch + 10 * index + module.global_rank
        noise = torch.randn(len(batch[0]), 4, generator=torch.Generator().manual_seed(seed))
        module.toggle_optimizer(first)
        fooled = critic(generator(noise))
        first.zero_grad()
        module.manual_backward(binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled)))
        module.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        module.untoggle_optimizer(first)
        module.toggle_optimizer(second)
        real, fake = critic(batch[0]), critic(generator(noise).detach())
        loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
        second.zero_grad()
        module.manual_backward(loss + binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)))
        second.step()
        module.untoggle_optimizer(second)
        module.lr_schedulers().step()

    module = module_of(s, net, configure, training_step=training_step, automatic_optimization=False)
    s.fit(module)
    return state(module)


@case
def manual_optimization_with_closures_and_accumulation(s: Setting) -> Found:
    def training_step(module: Any, batch: Any, index: int) -> None:
        optimizer = module.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(module.net(batch[0]), batch[1])
            module.manual_backward(loss)
            return loss

        if module.current_epoch == 0:
            optimizer.step(closure=closure)
            return
        # every second batch steps; the first only accumulates
        with optimizer.toggle_model(sync_grad=index % 2 == 1):
            module.manual_backward(cross_entropy(module.net(batch[0]), batch[1]) / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    module = module_of(s, training_step=training_step, automatic_optimization=False)
    s.fit(module)
    return state(module)


# ----- models -------------------------------------------------------------------------------------------------------------------


@case
def activation_checkpointing(s: Setting) -> Found:
    found: Found = {}
    for reentrant in (False, True):

        def training_step(module: Any, batch: Any, _: int, reentrant: bool = reentrant) -> Tensor:
            hidden = module.net[:2](batch[0])
            return cross_entropy(checkpoint(module.net[2:], hidden, use_reentrant=reentrant), batch[1])

        module = module_of(s, training_step=training_step)
        # re-entrant checkpoints run hooks in a backward of their own
        s.fit(module, strategy=s.strategy(overlap_dense=not reentrant))
        found |= {f"{reentrant} {name}": value for name, value in state(module).items()}
    return found


@case
def tied_weights(s: Setting) -> Found:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6)
            self.out.weight = self.into.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.into(x)))

    module = module_of(s, Tied)
    s.fit(module)
    assert module.net.out.weight is module.net.into.weight
    return state(module)


@case
def a_module_that_is_compiled(s: Setting) -> Found:
    def training_step(module: Any, batch: Any, _: int) -> Tensor:
        return cross_entropy(module.net(batch[0]), batch[1])

    module = module_of(s, training_step=training_step)
    compiled = torch.compile(module, backend="eager")
    s.fit(compiled)
    return state(module)


@case
def a_part_that_is_compiled(s: Setting) -> Found:
    module = module_of(s, lambda: torch.compile(plain_net(), backend="eager"))  # type: ignore[arg-type, return-value]
    s.fit(module)
    return state(module)


@case
def mixed_precision_in_bfloat16(s: Setting) -> Found:
    module = module_of(s, norm_net)
    s.fit(module, precision="bf16-mixed")
    return state(module)


@case
def layers_that_only_some_ranks_or_steps_use(s: Setting) -> Found:
    """The second head by turns, and the third on rank 1 only."""

    def net() -> torch.nn.Module:
        return torch.nn.ModuleList([plain_net(), torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)])

    def training_step(module: Any, batch: Any, index: int) -> Tensor:
        out = module.net[0](batch[0])
        if index % 2:
            out = out + module.net[1](batch[0])
        if module.global_rank == 1:
            out = out + module.net[2](batch[0])
        return cross_entropy(out, batch[1])

    module = module_of(s, net, training_step=training_step)
    s.fit(module)
    return state(module)


# ----- Lightning's demonstrations -----------------------------------------------------------------------------------------------


class Tokens(Dataset[Any]):
    """Sequences of a language of 30 words, each with what follows."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(30, (9,), generator=torch.Generator().manual_seed(index))
        return words[:-1], words[1:]


def demo(s: Setting, model: Any, **kwargs: Any) -> Found:
    s.fit(model, **kwargs)
    return state(model)


@case
def boring_models(s: Setting) -> Found:
    from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, ManualOptimBoringModel, RandomDataset

    found: Found = {}
    for kind in (BoringModel, ManualOptimBoringModel, DemoModel):

        class Model(kind):  # type: ignore[misc, valid-type]
            """With AdamW, and data that all runs share."""

            def configure_optimizers(self) -> Any:
                return adamw(self)

        s.pl.seed_everything(3)
        data = DataLoader(RandomDataset(32, 64), batch_size=4)
        val = None if kind is DemoModel else data
        for key, value in demo(s, Model(), data=data, val=val).items():
            found[f"{kind.__name__} {key}"] = value
    return found


@case
def the_transformer_and_the_lstm_of_the_demonstrations(s: Setting) -> Found:
    from lightning.pytorch.demos import lstm, transformer

    class Words(s.pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, recurrent: bool) -> None:
            super().__init__()
            self.recurrent = recurrent
            if recurrent:
                self.model = lstm.SimpleLSTM(30, 8, 8, 1, dropout=0.0)
            else:
                self.model = transformer.Transformer(30, 8, 2, 16, 1, dropout=0.0)

        def training_step(self, batch: Any, _: int) -> Tensor:
            source, target = batch
            hidden = self.model.init_hidden(len(source)) if self.recurrent else target
            out = self.model(source, hidden)
            out = out[0] if self.recurrent else out
            return torch.nn.functional.nll_loss(out.view(-1, 30), target.view(-1))

        def configure_optimizers(self) -> Any:
            # gradients of the keys' biases are zero but for rounding, which a small eps would blow up
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    found: Found = {}
    for recurrent in (False, True):
        torch.manual_seed(5)
        for key, value in demo(s, Words(recurrent), data=DataLoader(Tokens(), batch_size=4), max_epochs=1).items():
            found[f"{recurrent} {key}"] = value
    return found


# ----- the comparison -----------------------------------------------------------------------------------------------------------


def distance(a: Found, b: Found) -> float:
    """Largest difference, in units of ``1e-5 + 1e-4*|a|``."""
    assert a.keys() == b.keys() and all(a[k].shape == b[k].shape for k in a)
    pairs = [(a[k].double(), b[k].double()) for k in a if a[k].numel()]
    return max(float(((x - y).abs() / (1e-5 + 1e-4 * x.abs())).max()) for x, y in pairs)


def three_times(rank: int, world: int, names: list[str]) -> dict[str, dict[str, Any]]:
    pl = enter(rank)
    warnings.filterwarnings("ignore")
    # EMAWeightAveraging came with Lightning 2.6
    lacking = set() if hasattr(pl.callbacks, "EMAWeightAveraging") else {"an exponential average of weights"}
    return {name: compared(pl, name) for name in names if name not in lacking}


def compared(pl: Any, name: str) -> dict[str, Any]:
    runs: dict[str, Found] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        runs[kind] = CASES[name](Setting(pl, kind))
    weights = {k: v for k, v in runs["onebit"].items() if v.is_floating_point() and not k.endswith("predictions")}
    return {
        "dense": differing(runs["ddp"], runs["dense"]),
        "onebit": distance(runs["ddp"], runs["onebit"]),
        "apart": same_on_all_ranks(weights),
        "finite": all(bool(torch.isfinite(v).all()) for v in runs["ddp"].values()),
    }


#: cases of one start of processes
TOGETHER = 4


@pytest.mark.parametrize("first", range(0, len(CASES), TOGETHER))
def test_with_compression_off_this_equals_ddp_bit_for_bit_and_the_own_optimizer_to_rounding(first: int) -> None:
    for cases in run_ranks(three_times, 2, list(CASES)[first : first + TOGETHER], timeout=150):
        for name, found in cases.items():
            assert found["finite"], name
            assert found["dense"] == [], f"{name}: not bit for bit what ddp does"
            assert found["onebit"] < 1, f"{name}: not what ddp does, to rounding"


# ----- what ddp refuses, and optimizers that evaluate several times ---------------------------------------------------------------


def refused_alike(rank: int, world: int) -> dict[str, list[str]]:
    """What a run with ddp and one with the strategy say where neither can go on."""
    pl = enter(rank)
    warnings.filterwarnings("ignore")
    found: dict[str, list[str]] = {"batch size finder": [], "sync_batchnorm": []}
    for kind in ("ddp", "onebit"):
        s = Setting(pl, kind)
        finder = pl.callbacks.BatchSizeFinder()
        for name, kwargs in {
            "batch size finder": {"callbacks": [finder]},
            "sync_batchnorm": {"sync_batchnorm": True},
        }.items():
            module = module_of(s, norm_net)
            try:
                s.fit(module, **kwargs)
                found[name].append("trained")
            except Exception as error:
                found[name].append(f"{type(error).__name__}: {error}")
    return found


def test_what_ddp_cannot_do_ends_in_its_own_words() -> None:
    for found in run_ranks(refused_alike, 2):
        theirs, ours = found["batch size finder"]
        assert ours == theirs and "not supported with distributed strategies" in ours
        # BatchNorm is converted, as with ddp; torch's SyncBatchNorm then wants a GPU
        assert all("SyncBatchNorm" in said and "GPU" in said for said in found["sync_batchnorm"])


def several_evaluations(rank: int, world: int) -> list[str]:
    pl = enter(rank)
    warnings.filterwarnings("ignore")

    def lbfgs(module: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    states = []
    for kind in ("ddp", "dense"):
        s = Setting(pl, kind)
        module = module_of(s, configure=lbfgs)
        s.fit(module)
        states.append(state(module))
    return differing(*states)


def test_lbfgs_trained_densely_is_bit_for_bit_that_of_ddp() -> None:
    assert run_ranks(several_evaluations, 2) == [[], []]
