"""The connection to the other ranks: transport, exchange, dense averages, the control round and what ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import (
    ByteLedger,
    Control,
    Exchange,
    PlanMismatch,
    Reducer,
    Topology,
    Transport,
    begin_control,
    control_round,
    handshake,
)
from lightning_onebit.engine.agreement import Agreement
from lightning_onebit.engine.layout import Layout
from lightning_onebit.engine.options import ExchangeOptions
from lightning_onebit.engine.sharded import Shards

# lanes of the dense reducer: parameters in the block plan, and those of compress=False groups
PLAN_LANE, DENSE_LANE = 0, 1
_OPTIONS = "options of parameter groups"


class Link:
    """Who trains together, and what travels between them; not connected before the first step.

    Attributes:
        ledger: account of all that is sent.
        topology: the ranks; None until somebody asks for ``ranks``, or says who they are.
        transport, exchange: collectives, and the two-phase exchange made of them; None while not connected.
        reducer: averages gradients densely; None where nothing is to be averaged.
        shards: the ranks that hold the other shards of this replica; None where nothing is sharded.
    """

    def __init__(self, algorithm: str, exchange: ExchangeOptions) -> None:
        self._algorithm, self._options = algorithm, exchange
        self.ledger = ByteLedger()
        self.topology: Topology | None = None
        self.transport: Transport | None = None
        self.exchange: Exchange | None = None
        self.reducer: Reducer | None = None
        self.shards: Shards | None = None
        self.agreement = Agreement()
        self.timeout = timedelta(seconds=exchange.timeout)
        self.overlap_dense = True
        self._reduced_at: dict[int, int] = {}

    @property
    def ranks(self) -> Topology:
        """The ranks that train together."""
        if self.topology is None:
            self.topology = Topology.create(self._options.process_group)
        return self.topology

    def configure(self, group: Any, *, ranks_per_node: int, timeout: timedelta | None, overlap_dense: bool) -> None:
        """Says who trains together; a collective if ``ranks_per_node > 1``."""
        if self.transport is not None:
            raise RuntimeError("configure_communication(): already in use; call release_communication() first")
        if self._options.process_group is not None and group is not self._options.process_group:
            raise ValueError(
                "process_group was given to the optimizer, but the strategy owns the process groups; leave it out"
            )
        self.timeout = timeout or self.timeout
        self.topology = Topology.create(group, ranks_per_node=ranks_per_node, timeout=self.timeout)
        self.overlap_dense = overlap_dense

    def connect(
        self, steps: int, device: torch.device, plan: Callable[[], list[str]], weights: Callable[[], list[str]]
    ) -> None:
        """Connects, and compares what the ranks are about to do: plans, and first weights before the first step.

        Raises:
            PlanMismatch: the ranks do not run the same program.
        """
        ranks = self.ranks
        self.transport = Transport(ranks, self.ledger, self.timeout, self._algorithm)
        self.begin_step(steps + 1)
        self.exchange = Exchange(self.transport)
        self.agreement = Agreement()
        if ranks.size > 1:
            # on an account of its own: it belongs to no step, and a run that is resumed makes one more
            apart = Transport(ranks, ByteLedger(), self.timeout, self._algorithm)
            apart.step = self.transport.step
            handshake(apart, plan(), device, "training plan")
            if not steps:
                handshake(apart, weights(), device, "first weights")

    def begin_step(self, step: int) -> None:
        """Number of the step that failures name from now on."""
        for transport in (self.transport, *(self.shards.transports if self.shards is not None else ())):
            if transport is not None:
                transport.step = step

    def release(self) -> None:
        """Gives hooks, buffers and groups back."""
        if self.reducer is not None:
            self.reducer.close()
        self.reducer = self.exchange = self.transport = self.topology = self.shards = None

    def connect_shards(
        self, params: Sequence[Tensor], device: torch.device, step: int, plan: Callable[[], list[str]]
    ) -> Shards | None:
        """Connects with the ranks that hold the other shards of parameters, and compares plans with them."""
        found = Shards(params, self.ranks, self.timeout, self._algorithm)
        self.shards = found if found.transports else None
        if self.shards is not None:
            self.begin_step(step)
            self.shards.compare(plan(), device, "training plan of shards")
        return self.shards

    def groups(self) -> set[Any]:
        """Process groups that it holds."""
        t = self.topology
        held = set() if t is None else {t.group, t.intra_group, t.inter_group}
        return {
            group
            for group in held | {self._options.process_group}
            if dist.is_available() and isinstance(group, dist.ProcessGroup)
        }

    # ----- dense averages ----------------------------------------------------------------------------------------------

    def renew_reducer(self, layout: Layout, may_be_dense: bool) -> None:
        """A reducer for what may be averaged from now on: everything, or ``compress=False`` groups only."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        indices = layout.known if may_be_dense else list(layout.dense)
        self._reduced_at = {i: k for k, i in enumerate(indices)}
        # not connected while a checkpoint is loaded: the first step connects and comes back here
        if self.transport is not None and self.ranks.size > 1 and indices:
            self.reducer = Reducer(
                [layout.params[i] for i in indices],
                self.transport,
                int(self._options.bucket_size(exchanged=False) * 2**20),
                overlap=self.overlap_dense,
                lanes=[PLAN_LANE if i in layout.slot_of else DENSE_LANE for i in indices],
            )

    def select(self, *lanes: int) -> None:
        """Tells the reducer what to average."""
        if self.reducer is not None:
            self.reducer.select(set(lanes))

    def present(self, index: int, averaged: Sequence[bool]) -> bool:
        """Whether some rank had a gradient of a parameter, by what ``Reducer.finish()`` has returned."""
        return averaged[self._reduced_at[index]]

    def finish_reduction(self) -> None:
        """Ends a dense round that backward has begun: what one rank has sent, all must send."""
        if self.reducer is not None and self.reducer.armed:
            self.reducer.finish()

    def average(self, flat: Tensor, what: str) -> None:
        """Makes a tensor the mean over ranks."""
        assert self.transport is not None
        flat.mul_(1.0 / self.ranks.size)
        self.transport.all_reduce(flat, what=what).wait()

    # ----- what all ranks know alike -----------------------------------------------------------------------------------

    def control_round(
        self, step: int, squares: float, non_finite: int, present: Sequence[bool], device: torch.device
    ) -> Control:
        """A control round, in which ranks find out, too, whether they have the same hyperparameters.

        Raises:
            PlanMismatch: on all ranks where they have not.
        """
        return self.begin_control(step, squares, non_finite, present, device)()

    def begin_control(
        self, step: int, squares: float, non_finite: int, present: Sequence[bool], device: torch.device
    ) -> Callable[[], Control]:
        """Sends what a control round needs of this rank; what it returns waits for the others and ends the round."""
        assert self.transport is not None
        transport = self.transport
        answer = begin_control(transport, squares, non_finite, present, device, self.agreement.digest)
        return lambda: self.agreed(answer(), step, device)

    def agreed(self, control: Control, step: int, device: torch.device) -> Control:
        """A verdict of ranks that have the same hyperparameters.

        Raises:
            PlanMismatch: on all ranks where they have not.
        """
        if control.agreed:
            self.agreement.reached()
            return control
        assert self.transport is not None
        transport, facts = self.transport, self.agreement.facts
        self._name_difference(step, lambda: handshake(transport, facts(), device, _OPTIONS))
        return control

    def control_shards(
        self, step: int, squares: Sequence[float], bad: bool, flags: Sequence[bool], device: torch.device
    ) -> tuple[list[float], bool, list[bool]]:
        """A control round of the ranks that hold the shards of this replica; see ``Shards.agree``.

        Raises:
            PlanMismatch: on all of these ranks where they have different hyperparameters.
        """
        if self.shards is None:
            return list(squares), bad, list(flags)
        shards, facts = self.shards, self.agreement.facts
        squares, bad, flags, agreed = shards.agree(squares, bad, flags, self.agreement.digest, device)
        if not agreed:
            self._name_difference(step, lambda: shards.compare(facts(), device, _OPTIONS))
        return squares, bad, flags

    def _name_difference(self, step: int, compare: Callable[[], object]) -> None:
        """Compares options of parameter groups that are known to differ."""
        try:
            compare()
        except PlanMismatch as difference:
            raise PlanMismatch(
                f"step {step}: {difference}. A scheduler that follows a metric (ReduceLROnPlateau) must see the same value on "
                "all ranks: self.log(..., sync_dist=True)"
            ) from None

    def any_shard(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is set on any of the ranks that hold the shards of this replica. Collective."""
        return flag if self.shards is None else self.shards.anywhere(flag, device)

    def any_rank(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is set on any rank. Collective."""
        flag = self.any_shard(flag, device)
        if self.ranks.size == 1:
            return flag
        assert self.transport is not None
        return not control_round(self.transport, 0.0, int(flag), [], device).finite
