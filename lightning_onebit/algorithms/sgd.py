"""1-bit SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit._choices import StateDtype
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, Options, check_flag, check_number, takes
from lightning_onebit.engine.rule import Rule, Sent
from lightning_onebit.engine.step import Group, Part, Step
from lightning_onebit.kernels import Packed


class Momentum(Rule):
    """The rule of ``OnebitSGD``; ``m`` is each rank's own."""

    arenas: ClassVar[dict[str, str]] = {"m": "momentum_buffer"}
    per_rank: ClassVar[bool] = True
    residual_unit: ClassVar[str] = "lr"
    reads_plain: ClassVar[str] = "momentum_buffer"
    first_phase: ClassVar[Phase] = Phase.COMPRESSED
    fixed_exchange: ClassVar[dict[str, Any]] = {"overlap": "step"}
    state_dtype: ClassVar[StateDtype] = "float32"
    p: Tensor  # what is exchanged, flat over all blocks

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_number("momentum", group["momentum"], least=0)
        check_number("dampening", group["dampening"])
        check_flag("nesterov", group["nesterov"])
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("nesterov=True needs momentum > 0 and dampening=0, as in torch.optim.SGD")

    def direction(self, s: Group, scale: float = 1.0) -> list[Tensor]:
        """``g += wd x ; m = mu m + (1-dampening) g ; p = g + mu m`` (nesterov) or ``m``; the first m is g, as in torch."""
        mu, p = s.of["momentum"], []
        for t, x, g, m in zip(s.t, s.x, s.g, s["m"], strict=True):
            g = (g.float() * scale).add_(x, alpha=s.of["weight_decay"])
            m.mul_(mu).add_(g, alpha=1 - s.of["dampening"] if t and mu else 1)
            p.append(g.add_(m, alpha=mu) if s.of["nesterov"] else m)
        return p

    def dense(self, s: Group) -> None:
        """``x -= lr p``."""
        torch._foreach_add_(s.x, self.direction(s), alpha=-s.of["lr"])

    def scales_tell(self) -> bool:
        """See the base; momenta learn before, and where lr is 0 no scales are sent."""
        return False

    def step_compressed(self, step: Step) -> bool:
        """Every momentum learns, then ``p_i`` are exchanged."""
        kept, layout, m = self.kept, self.kept.layout, self.kept.flat["m"]
        step.whole.writes()
        apart = any(group["nesterov"] for group in kept.groups)
        self.p = torch.zeros_like(m) if apart else m
        for group, members in layout.by_group([i for i in layout.slots if step.active[i]]):
            directions = self.direction(Group(step, kept.groups[group], members), step.grad_scale)
            if apart:
                torch._foreach_copy_([layout.view(self.p, i) for i in members], directions)
        dense = super().step_compressed(step)
        del self.p
        return dense

    def send(self, s: Part) -> Sent:
        """``p_i``."""
        return Sent(b=torch.ones_like(s.each("lr")), g=s.blocks.slice(self.p))

    def take(self, s: Part, u: Packed) -> None:
        """``x -= lr p``."""
        s.kernels.apply_adam(s.blocks, s.x, u, None, torch.ones_like(s.each("lr")), s.each("lr"))


@takes(Options)
class OnebitSGD(OnebitOptimizer):
    r"""1-bit SGD: torch.optim.SGD with one-bit, error-compensated steps from the first on.

    ::

        worker:  g_i += wd*x ; m_i = mu m_i + (1-dampening) g_i          # m_i is the rank's own; the first is g_i
                 p_i = g_i + mu m_i (nesterov) or m_i
                 p = exchange(p_i), every residual entering as (lr_{t-1}/lr_t) * residual
        all:     x -= lr*p                                               # lr = 0: residuals stay as they are, too

    Source: our reading of dist-EF-blockSGD, arXiv 1905.10936, whose scale is the mean of \|p\| of a block; ours is the root mean square.

    Args:
        params: parameters or parameter groups; a group may have ``compress=False`` (averaged densely) and its own of the five:
        lr: learning rate, >= 0.
        momentum: ``mu``, >= 0.
        dampening: as in torch.optim.SGD.
        weight_decay: ``wd``, coupled.
        nesterov: needs ``momentum > 0`` and ``dampening=0``; 4 bytes per element more during a step.
        exchange: how ranks exchange, see ``ExchangeOptions``; ``overlap="backward"`` cannot take effect.
        **options: see ``Options``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range.
    """

    algorithm = "onebit_sgd"
    rule_class: ClassVar[type[Rule]] = Momentum
    STEP_BYTES = 40.5  # reads g twice and p once, reads and writes m, e and x
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **own}, options, exchange)
