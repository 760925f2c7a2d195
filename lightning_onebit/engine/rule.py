"""What the engine asks of an algorithm: a rule hears of gradients and of what came back, and of no rank, bucket or checkpoint key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_onebit._choices import StateDtype
from lightning_onebit.engine.arenas import Arenas, Phase
from lightning_onebit.engine.codec import Codec, OneBit
from lightning_onebit.engine.masters import adopted
from lightning_onebit.engine.options import ExchangeOptions
from lightning_onebit.kernels import Packed

if TYPE_CHECKING:
    from lightning_onebit.engine.step import Group, Part, Step

#: the state of each parameter in a checkpoint, by its index
Saved: TypeAlias = Mapping[int, Mapping[str, Tensor]]


class Rounds(NamedTuple):
    """How many steps of a run send what.

    Attributes:
        dense: averages of gradients.
        one_bit: exchanges.
        silent: no data at all.
        bitmaps: exchanges with which bitmaps of live coordinates are merged as well (BinSGDM).
    """

    dense: int
    one_bit: int
    silent: int = 0
    bitmaps: int = 0


class Sent(NamedTuple):
    """What a worker wants averaged of some blocks: ``a*m + (b*g)*r``.

    Attributes:
        b: fp32 factors of the gradient, per block.
        a: fp32 factors of ``m``, per block; None with it.
        m: momentum as it travels.
        r: fp32 or bf16 flat, what gradients are multiplied by; None: by nothing.
        g: fp32 flat of the whole bucket in the place of gradients.
    """

    b: Tensor
    a: Tensor | None = None
    m: Tensor | Packed | None = None
    r: Tensor | None = None
    g: Tensor | None = None


class Rule:
    """An update rule. A subclass says what it keeps, and fills in ``dense``, ``send`` and ``take``.

    Attributes:
        options: the algorithm's.
        kept: the tensors that the engine keeps for it.
    """

    #: state per element, from the start: name of the arena -> name in a checkpoint
    arenas: ClassVar[dict[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}
    #: that which comes later
    later_arenas: ClassVar[dict[str, str]] = {}
    #: numbers of each parameter: name (in checkpoints too) -> first value
    numbers: ClassVar[dict[str, float]] = {}
    #: whether arenas differ by rank: they are saved beside residuals, and a resize gives every rank the mean
    per_rank: ClassVar[bool] = False
    #: whether such arenas are of the rank's shard only in a hierarchical exchange, in which a node's gradients are averaged first
    by_shard: ClassVar[bool] = False
    #: hyperparameter in whose units residuals are: where it changes they enter as (before/now) * residual, and where it is 0 the
    #: parameter takes no part in the exchange; "": none
    residual_unit: ClassVar[str] = ""
    #: what the state of a plain optimizer has, for each parameter, where it is a valid start (torch.optim.Adam's); "": none is
    reads_plain: ClassVar[str] = "exp_avg_sq"
    #: whether it begins with a stage in which all steps are dense, to which it can go back
    has_dense_warm_up: ClassVar[bool] = False
    #: whether a compressed step is one exchange of all parameters, in which nothing that is sent depends on who takes part
    sends_at_once: ClassVar[bool] = False
    first_phase: ClassVar[Phase] = Phase.WARMUP
    frozen_phase: ClassVar[Phase] = Phase.COMPRESSED
    #: options of the exchange that would have no effect, with the only value that they may have
    fixed_exchange: ClassVar[dict[str, Any]] = {}
    #: of residuals and of frozen denominators, where the exchange's option is None
    state_dtype: ClassVar[StateDtype] = "bfloat16"

    def __init__(self, options: Any, exchange: ExchangeOptions) -> None:
        self.options: Any = options
        self.kept = Arenas(
            exchange,
            tuple(self.arenas),
            self.numbers,
            by_shard=self.by_shard,
            unit=self.unit,
            phase=self.first_phase,
            state_dtype=getattr(torch, exchange.state_dtype or self.state_dtype),
        )

    @property
    def unit(self) -> str | None:
        """Arena by which the momentum is multiplied while it travels."""
        return None

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Validates what a parameter group says to this rule alone."""

    # ----- the rule ----------------------------------------------------------------------------------------------------

    def dense(self, s: Group) -> None:
        """Steps some parameters of one group on averaged gradients."""
        raise NotImplementedError

    def send(self, s: Part) -> Sent:
        """What a worker wants averaged of some blocks."""
        raise NotImplementedError

    def take(self, s: Part, u: Packed) -> Any:
        """What all do with what came back of some blocks; what it returns is given to ``finish``."""
        raise NotImplementedError

    def finish(self, step: Step, taken: Sequence[tuple[Part, Packed, Any]]) -> None:
        """Called when all blocks have come back, with what was taken of each bucket."""

    # ----- what a step is ----------------------------------------------------------------------------------------------

    def wants_dense(self) -> bool:
        """Whether the schedule makes the next step dense."""
        return self.kept.phase is Phase.WARMUP

    def may_be_dense(self) -> bool:
        """Whether this or a later step may average exchanged parameters densely."""
        return self.kept.phase is Phase.WARMUP

    def step_dense(self, step: Step, active: list[int]) -> None:
        """A step on averaged gradients."""
        step.update(active)

    def step_compressed(self, step: Step) -> bool:
        """A step on local gradients; returns whether they have been averaged densely all the same."""
        step.exchange_all()
        return False

    def scales_tell(self) -> bool:
        """Whether a gradient of any rank that is not finite shows in the scales that all ranks receive in the next compressed step.

        Then nobody looks at gradients before they are sent; the step must write nothing until all scales are there.
        """
        return True

    def codec(self, step: Step) -> Codec:
        """What travels in an exchange."""
        return OneBit(step, self.send, self.take, self.finish, becomes_momentum=not self.per_rank)

    def made(self) -> None:
        """Called after every real step."""

    def kinds(self) -> Sequence[Hashable]:
        """What else than group and step count the numbers of exchanged parameters depend on; empty: nothing."""
        return ()

    # ----- phases ------------------------------------------------------------------------------------------------------

    def freezes(self) -> None:
        """Called before the phase changes from the warm-up; raises where it cannot."""

    def enter_compressed(self) -> None:
        """Turns the warm-up's arenas into those of the compressed stage."""

    def leave_compressed(self) -> None:
        """Takes back what ``enter_compressed()`` has made, the momentum lying flat."""

    def dense_steps_after_freeze(self, freeze_step: int, steps: int) -> int:
        """How many steps of a run of ``steps`` that freezes after ``freeze_step`` average gradients densely all the same."""
        return 0

    # ----- parameters that join, learn late or start over --------------------------------------------------------------

    def takes_new_parameters(self) -> bool:
        """Whether all blocks may be dealt anew for parameters that join; others are given blocks behind those there are."""
        return self.kept.phase is Phase.WARMUP or self.per_rank

    def keeps_of(self, index: int) -> dict[str, Tensor]:
        """What else a parameter keeps where blocks are dealt anew."""
        return {}

    def leaving_world(self) -> None:
        """Called before all state is cut anew for another number of ranks."""

    def laid_out(self, kept: Mapping[int, Mapping[str, Tensor]], *, in_use: bool, grew: bool) -> None:
        """Called when all blocks have been dealt.

        Args:
            kept: what parameters have kept.
            in_use: there were residuals, which are gone.
            grew: parameters have joined.
        """
        if self.first_phase is not Phase.WARMUP and self.kept.compresses:
            self.kept.allocate_residuals()

    def joined(self, indices: Sequence[int]) -> None:
        """Called when parameters have been given blocks behind those there were."""

    def unheard(self) -> list[int]:
        """Parameters of which all ranks want to know when one of them has a gradient that is not zero."""
        return []

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        """Called before the step in which parameters have their first gradient."""

    def may_take_in(self) -> bool:
        """Whether arenas can take in a parameter now."""
        return True

    def take_in(self, index: int, own: dict[str, Tensor], updates: int) -> None:
        """Takes a parameter that has learned, by ``updates`` steps of its own, into the exchange."""

    def stepped_late(self, indices: Sequence[int]) -> None:
        """Called after late parameters have made their steps."""

    def restarted(self) -> None:
        """Called when parameters whose count of steps is 0 have started over."""

    @property
    def takes_late(self) -> bool:
        """Whether a parameter that is exchanged can learn anew by dense steps of its own."""
        return False

    # ----- replicas that differ for a while ----------------------------------------------------------------------------

    @property
    def mid_local(self) -> bool:
        """Whether replicas differ now because ranks have taken steps of their own."""
        return False

    def show_shared(self) -> None:
        """Shows the model that all ranks share, where it is another than this rank's own."""

    def synchronise(self, step: Step) -> None:
        """Brings replicas together without a step."""

    # ----- saving ------------------------------------------------------------------------------------------------------

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint, flat over all blocks) of replicated state, one at a time so that only one temporary exists."""
        kept = self.kept
        if self.per_rank:
            return
        yield self.arenas["m"], kept.momentum_flat()
        for name, key in {**self.arenas, **self.later_arenas}.items():
            if name != "m" and name in kept.flat:
                yield key, kept.flat[name]

    def shown(self, index: int, moments: dict[str, Tensor]) -> None:
        """Makes copies of an exchanged parameter's moments what a checkpoint has."""

    def compacted(self, packed: dict[str, Any]) -> dict[str, Any]:
        """A state without what follows from the rest of it."""
        return packed

    def books(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        return {}

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        """Goes on from a checkpoint, whose arenas are loaded; ``enter`` puts the engine into its phase.

        ``books`` is empty for the state of a plain optimizer.
        """
        enter(phase)

    def rank_layout(self) -> dict[str, Any]:
        """What else is saved beside state that differs by rank: what it is cut for."""
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """Tensors that differ by rank, besides residuals."""
        return {}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        """Raises where this rank cannot go on from ``rank_state()``."""

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes ``rank_state()`` back."""

    def shared_master(self, index: int) -> Tensor:
        """A copy of the fp32 weights of a 16-bit parameter that all ranks share, with what the program has written into it.

        Saving changes no master: weights that are shown for a moment (averages of them) may be saved, too.
        """
        return adopted(self.kept.layout.params[index].detach(), self.kept.masters[index])
