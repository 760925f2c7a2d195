"""The methods of ``frontier.py``: this library's, and those it is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _ddp import DEMO_SOURCE, DION_SOURCE, DeMo, Dion, dense, post_local_sgd, powersgd
from _language import Exchanging, SignDescent, Task, all_reduce_bytes
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import lightning_onebit as ob


@dataclass(frozen=True)
class Method:
    """A way to train on several workers.

    Attributes:
        name: of the method.
        family: ``"dense"`` (one process, the mean gradient), ``"world"`` (a ``SimulatedWorld``) or ``"ddp"`` (a process per worker).
        make: makes the optimizer: from ``(parameters, lr, task)``, in a world also of the worker's group; with DDP from the wrapped model.
        kind: of its learning rate: ``"adam"``, ``"lamb"`` or ``"sign"``; a task says where the search of each begins.
        source: environment variable that names a checkout of its authors' code; without it the method is not run.
    """

    name: str
    family: str
    make: Callable[..., Any]
    kind: str
    source: str = ""

    @property
    def available(self) -> bool:
        """Whether it can be run here."""
        return not self.source or self.source in os.environ


class MajorityVote(Exchanging):
    """``x -= lr * sign(sum of the workers' signs)``; a coordinate without a majority stays where it is.

    The signs are those of each worker's own momentum: SIGNUM's ``m = 0.9 m + 0.1 g`` (arXiv 1810.05291, algorithm 1), or Lion's
    ``0.9 m + 0.1 g`` followed by ``m = 0.99 m + 0.01 g`` (arXiv 2404.00438). Bytes are one bit to the server and one back per parameter,
    the server's work shared out among the ranks.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, task: Task, group: Any, *, lion: bool) -> None:
        super().__init__(params, lr, task, group)
        self.lion = lion

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step on this worker's gradients."""
        params = self.param_groups[0]["params"]
        gradient = parameters_to_vector([p.grad for p in params])
        m = self.state[params[0]].setdefault("m", torch.zeros_like(gradient))
        if self.lion:
            signs = torch.lerp(gradient, m, 0.9).sign().to(torch.int8)
            m.lerp_(gradient, 0.01)
        else:
            signs = m.lerp_(gradient, 0.1).sign().to(torch.int8)
        self.group.all_reduce(signs).wait()
        votes = signs.sign_().split([p.numel() for p in params])
        for p, vote in zip(params, votes, strict=True):
            p.sub_(self.param_groups[0]["lr"] * vote.view_as(p))
        self.sent += all_reduce_bytes(self.task, 1 / 8) * gradient.numel()


class DiLoCo(Exchanging):
    """DiLoCo (arXiv 2311.08105): AdamW on each worker, Nesterov momentum on what they have moved by, every ``every`` steps.

    Args:
        params: parameters.
        lr: of AdamW.
        task: gives the workers.
        group: the worker's group.
        every: H, inner steps per outer step.
        outer_lr: of the outer step.
        outer_momentum: of the outer step.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        task: Task,
        group: Any,
        *,
        every: int = 20,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(params, lr, task, group)
        own = self.param_groups[0]["params"]
        self.every, self.steps = every, 0
        self.inner = torch.optim.AdamW(own, lr=lr, weight_decay=0.0, fused=True)
        self.shared = parameters_to_vector(own).detach().clone()
        self.outer = torch.optim.SGD([self.shared], lr=outer_lr, momentum=outer_momentum, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """An inner step, and an outer one when it is due."""
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self._outer_step()

    def synchronise(self) -> None:
        """An outer step for the inner steps since the last one."""
        if self.steps % self.every:
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        params = self.param_groups[0]["params"]
        gradient = self.shared - parameters_to_vector(params)
        self.group.all_reduce(gradient).wait()
        self.shared.grad = gradient.div_(self.group.size)
        self.outer.step()
        vector_to_parameters(self.shared.clone(), params)
        self.sent += all_reduce_bytes(self.task) * gradient.numel()


def _adamw(beta2: float) -> Callable[..., Any]:
    return lambda params, lr, task: torch.optim.AdamW(params, lr=lr, betas=(0.9, beta2), weight_decay=0.0, fused=True)


def optimizer_of(cls: type[Any], state_dtype: Any = "float32", **options: Any) -> Callable[..., Any]:
    """Makes an optimizer of ours; options that are callable are called with the task."""

    def make(params: Any, lr: float, task: Task, group: Any) -> Any:
        resolved = {name: value(task) if callable(value) else value for name, value in options.items()}
        exchange = ob.ExchangeOptions(process_group=group, state_dtype=state_dtype)
        return cls(params, lr=lr, exchange=exchange, **resolved)

    return make


def _methods() -> dict[str, Method]:
    frozen = {"freeze_step": lambda task: task.warm_up}
    # 1-bit LAMB refreshes nothing: the automatic rule lets it learn its second moments for a fifth of the run
    frozen_late = {"freeze_step": lambda task: max(task.warm_up, task.steps // 5)}
    local = {"local_steps": lambda task: ob.LocalSteps(max_gap=4, double_every=max(1, task.steps // 20))}
    methods = [
        Method("adamw", "dense", _adamw(0.999), "adam"),
        Method("adamw95", "dense", _adamw(0.95), "adam"),
        Method("lamb", "dense", lambda params, lr, task: ob.OnebitLamb(params, lr=lr), "lamb"),
        Method("sign", "dense", lambda params, lr, task: SignDescent(params, lr, lion=False), "sign"),
        Method("lion", "dense", lambda params, lr, task: SignDescent(params, lr, lion=True), "sign"),
        Method("onebit_adam", "world", optimizer_of(ob.OnebitAdam, **frozen), "adam"),
        Method("zero_one_adam", "world", optimizer_of(ob.ZeroOneAdam, **frozen), "adam"),
        Method("zero_one_adam_local", "world", optimizer_of(ob.ZeroOneAdam, **frozen, **local), "adam"),
        Method("onebit_lamb", "world", optimizer_of(ob.OnebitLamb, **frozen_late), "lamb"),
        Method("binsgdm", "world", optimizer_of(ob.BinSGDM), "sign"),
        Method("diloco", "world", DiLoCo, "adam"),
        Method("sign_vote", "world", lambda *given: MajorityVote(*given, lion=False), "sign"),
        Method("lion_vote", "world", lambda *given: MajorityVote(*given, lion=True), "sign"),
        Method("ddp_fp16", "ddp", partial(dense, width=2.0), "adam"),
        Method("powersgd_1", "ddp", partial(powersgd, rank=1), "adam"),
        Method("powersgd_4", "ddp", partial(powersgd, rank=4), "adam"),
        Method("post_local_sgd", "ddp", post_local_sgd, "adam"),
        Method("demo", "ddp", DeMo, "sign", DEMO_SOURCE),
        Method("dion", "ddp", partial(Dion, fraction=1.0), "lamb", DION_SOURCE),
        Method("dion_16", "ddp", partial(Dion, fraction=1 / 16), "lamb", DION_SOURCE),
        # with bf16 state, which is the default
        Method("onebit_adam_16bit", "world", optimizer_of(ob.OnebitAdam, "bfloat16", **frozen), "adam"),
        Method("zero_one_adam_16bit", "world", optimizer_of(ob.ZeroOneAdam, "bfloat16", **frozen), "adam"),
        Method("onebit_lamb_16bit", "world", optimizer_of(ob.OnebitLamb, "bfloat16", **frozen_late), "lamb"),
        Method("onebit_adam_published", "world", optimizer_of(ob.OnebitAdam, **frozen, recipe="published"), "adam"),
        Method("zero_one_adam_published", "world", optimizer_of(ob.ZeroOneAdam, **frozen, recipe="published"), "adam"),
        Method("binsgdm_published", "world", optimizer_of(ob.BinSGDM, recipe="published"), "sign"),
    ]
    return {method.name: method for method in methods}


METHODS = _methods()
