"""What an optimizer keeps: parameters dealt to blocks and buckets, flat arenas of state, the connection to the other ranks.

No algorithm and no step lives here; ``base`` adds the step that all share, ``state`` the checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from operator import is_not
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_onebit._names import shown_as
from lightning_onebit.comm import (
    Bucket,
    ByteLedger,
    Exchange,
    Plan,
    Reducer,
    Topology,
    Transport,
    extended_plan,
    handshake,
    is_dense,
    memory_order,
    plan_buckets,
)
from lightning_onebit.kernels import BoundSpans, Packed, Residual, get_backend
from lightning_onebit.kernels.common import bit_sums
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.agreement import Agreement
from lightning_onebit.optim.masters import Comparison, adopt_
from lightning_onebit.optim.options import (
    ExchangeOptions,
    Options,
    check_betas,
    check_flag,
    check_number,
    made_options,
    refuse_ignored,
)
from lightning_onebit.optim.torn import Wholeness, signals_held

# lanes of the dense reducer: parameters in the block plan, and those of compress=False groups
PLAN_LANE, DENSE_LANE = 0, 1
Form: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...]]
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Phase(str, Enum):
    """Where an optimizer is in its schedule.

    WARMUP: the second moments learn, from densely averaged gradients (0/1 Adam: with one-bit rounds in between).
    COMPRESSED: one-bit exchanges.
    LOCAL: local steps with a one-bit synchronisation now and then (0/1 Adam after its variance freeze).
    """

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"


class Coefficients(NamedTuple):
    """What a worker puts into the exchange of a bucket: ``c = a*m + (b*g)*r``.

    a, b: fp32 factors per block; m may be missing, and so may r (fp32 flat), which then counts as 1.
    """

    a: Tensor | None
    m: Tensor | Packed | None
    b: Tensor
    r: Tensor | None = None


class Members(NamedTuple):
    """The parameters of a bucket's spans, one entry for each span: looked up once, for as long as the plan and the weights stay.

    weights: what holds the fp32 weights: the parameter, or the master copy of a 16-bit one.
    special: positions of those whose gradient kernels cannot take as it is: only a part of it lies in the bucket, or the parameter's
        memory order is not that of its indices.
    """

    indices: list[int]
    params: list[torch.nn.Parameter]
    weights: list[Tensor]
    special: list[int]


class Lookups:
    """What a step looks up once, by bucket: spans of weights and gradients, both sides of the exchange, tables of numbers."""

    def __init__(self) -> None:
        self.weights: dict[int, BoundSpans] = {}
        self.grads: dict[int, BoundSpans] = {}
        self.worker: dict[int, tuple[Coefficients, Residual]] = {}
        self.server: dict[int, tuple[Tensor, Residual]] = {}
        self.tables: dict[str, Sequence[Tensor]] = {}
        # a parameter of each kind (see ``_kinds``), and for each slot the position of its kind there; values by slot
        self.kinds: tuple[list[int], list[int]] | None = None
        self.values: dict[str, list[float]] = {}


@shown_as("OnebitOptimizer")
class ArenaOptimizer(torch.optim.Optimizer):
    """Parameters, their state in flat arenas, and the ranks that train together.

    State that torch would keep in ``optimizer.state`` lives in flat arenas outside it, because torch casts everything
    there to the parameter's dtype on load and Lightning moves its tensors one by one.
    """

    algorithm: ClassVar[str]
    #: dataclass of the algorithm's options, which are keyword arguments of the constructor
    options_class: ClassVar[type[Options]] = Options
    # options of the exchange that would have no effect, with the only value that they may have
    _fixed_exchange: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options, exchange: ExchangeOptions) -> None:
        # those of the algorithm, for all groups
        self.options = options
        self.exchange = exchange
        self._check_exchange()
        self._plan: Plan | None = None
        self._phase = Phase.WARMUP
        self._steps = 0
        self._whole = Wholeness()
        self._skipped = 0
        self._skips_in_a_row = 0
        self._hyperparameters = tuple(defaults)
        super().__init__(params, {**defaults, "compress": True})
        self.ledger = ByteLedger()
        self._topology: Topology | None = None
        self._transport: Transport | None = None
        self._exchange: Exchange | None = None
        self._reducer: Reducer | None = None
        self._reduced_at: dict[int, int] = {}
        self._names: Mapping[Tensor, str] = {}
        self._timeout = timedelta(seconds=exchange.timeout)
        self._overlap_dense = True
        # by parameter index (order of param_groups)
        self._params: list[torch.nn.Parameter] = []
        self._group_of: list[int] = []
        # by group: what ``compress`` said when it was laid out
        self._compressed_groups: list[bool] = []
        self._t: list[int] = []
        self._masters: dict[int, Tensor] = {}
        # what the program may have written into parameters that have masters, while a device compares them
        self._comparison: Comparison | None = None
        self._dense_state: dict[int, dict[str, Tensor]] = {}
        # parameters in the block plan ("slots" are positions in this list) and those averaged densely for ever
        self._slots: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._dense: list[int] = []
        # how many slots have been dealt blocks together: at first, and at the end of the plan each time others joined after the freeze
        self._segments: list[int] = []
        # parameters in the plan that nothing is known of yet; and those that are averaged densely until their second moments have
        # learned: after which of their own steps that begins and may end (see ``late``)
        self._cold: set[int] = set()
        self._late: dict[int, tuple[int, int]] = {}
        # dtype, shape and strides of the known ones
        self._forms: list[tuple[int, Form]] = []
        self._wire_bytes = 0
        self._laid_out_for = (0, 0)
        self._flat: dict[str, Tensor] = {}
        self._momentum: list[Tensor | Packed] = []
        self._worker_residual: Residual | None = None
        self._server_residual: Residual | None = None
        # by parameter index: whether it takes part in the running step
        self._active: list[bool] = []
        # by bucket: the addresses of its weights and the views that were made of them; its parameters
        self._bound: dict[int, tuple[list[int], BoundSpans]] = {}
        self._members: dict[int, Members] = {}
        self._lookups = Lookups()
        self._agreement = Agreement()

    # ----- what users see ---------------------------------------------------------------------------------------------

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress for: more than one rank."""
        return self._ranks().size > 1 or self.exchange._alone

    @property
    def topology(self) -> Topology:
        """The ranks that exchange, and their nodes if the exchange is hierarchical."""
        return self._ranks()

    @property
    def bucket_mb(self) -> float:
        """MB (2**20 bytes) of fp32 gradients in a bucket of the exchange: the option, or its default for the parameters' device."""
        return self.exchange.bucket_size(self._device.type)

    @property
    def phase(self) -> Phase:
        """Current phase."""
        return self._phase

    @property
    def steps(self) -> int:
        """Real steps taken (a skipped step does not count)."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because some rank's gradient was not finite."""
        return self._skipped

    @property
    def torn(self) -> bool:
        """Whether a step has begun that did not end, so that weights and state are not those of one step; see ``TornStep``."""
        whole = self._whole
        return bool(whole.cause) or (bool(whole.under_way) and not whole.within and not self._sending)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; ``compress=False`` in it keeps its parameters densely averaged for ever.

        Those of other groups that join after the freeze are averaged densely until their second moments have learned.

        Raises:
            TypeError: complex, sparse or non-floating parameters.
            ValueError: options out of range, parameters on several devices.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self._check_group(group)
            self._check_parameters(group["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._plan is not None:
            self._build()

    @property
    def _sending(self) -> bool:
        """Whether backward has begun an exchange that the next step ends."""
        return False

    def _drop_exchange(self) -> None:
        """Forgets an exchange that cannot be ended."""

    def _refuse_torn(self) -> None:
        """Raises where the last step did not end."""
        if self.torn:
            raise self._whole.error(type(self).__name__)

    @contextlib.contextmanager
    def _changing(self, what: str, *, anew: bool = False) -> Iterator[None]:
        """Within it state changes outside of a step, all or nothing; ``anew``: all of it is replaced."""
        if anew:
            if self.torn:
                self._drop_exchange()
            self._whole.reset()
        self._refuse_torn()
        with signals_held(), self._whole.change(what):
            yield

    @classmethod
    def _given(cls, options: Mapping[str, Any]) -> Any:
        """The algorithm's options from keyword arguments.

        Raises:
            TypeError: one that it does not have, or of the wrong type.
            ValueError: out of range.
        """
        return made_options(cls.options_class, cls.__name__, options)

    def _check_exchange(self) -> None:
        """Refuses options of the exchange that contradict the algorithm, or its options."""
        name = type(self).__name__
        for option, only in self._fixed_exchange.items():
            if (value := getattr(self.exchange, option)) != only:
                raise ValueError(
                    f"{option}={value!r} of the exchange cannot take effect in {name}; leave it out ({only!r})"
                )
        if self.exchange.overlap == "backward" and self.options.max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm={self.options.max_grad_norm} needs all gradients before the first is sent, overlap='backward' sends them "
                "as they come; use overlap='step' or leave max_grad_norm out"
            )

    # ----- what an algorithm says about its state ----------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Validates the options of a parameter group."""
        check_number("lr", group["lr"], least=0)
        check_number("weight_decay", group["weight_decay"], least=0)
        check_flag("compress", group["compress"])
        refuse_ignored(group, type(self).__name__, self.defaults, self._options_of_all_groups())
        if "betas" in group and "betas" in self.defaults:
            check_betas(group["betas"])
        if "eps" in group and "eps" in self.defaults:
            check_number("eps", group["eps"], least=0)

    def _options_of_all_groups(self) -> dict[str, Any]:
        return {**vars(self.exchange), **vars(self.options)}

    def _check_group_keys(self) -> None:
        """Raises where the program has set something in a group since the last step that would be ignored."""
        name, own, fixed = type(self).__name__, self.defaults, self._options_of_all_groups()
        for index, (group, compressed) in enumerate(zip(self.param_groups, self._compressed_groups, strict=False)):
            refuse_ignored(group, name, own, fixed)
            if group["compress"] is not compressed:
                raise RuntimeError(
                    f"compress={group['compress']!r} has been set in group {index} of {name}.param_groups, which is laid out "
                    f"for compress={compressed}; set it back, and say it before the first step or to a new optimizer"
                )

    def _arenas(self) -> tuple[str, ...]:
        """State per element that the algorithm needs from the start."""
        return ("m", "v")

    def _takes_new_parameters(self) -> bool:
        """Whether all blocks may be dealt anew for parameters that join; others are given blocks behind those there are."""
        return self._phase is Phase.WARMUP

    def _may_be_dense(self) -> bool:
        """Whether this or a later step may average the plan's gradients densely."""
        return self._phase is Phase.WARMUP

    def _to_exchanged(self, m: Tensor, start: int = 0) -> None:
        """From the momentum to what buckets hold and exchange, in place; ``m`` begins at element ``start`` of all blocks."""

    def _from_exchanged(self, m: Tensor, start: int = 0) -> None:
        """The inverse of ``_to_exchanged``, to rounding."""

    # ----- parameters --------------------------------------------------------------------------------------------------

    def _ranks(self) -> Topology:
        if self._topology is None:
            self._topology = Topology.create(self.exchange.process_group)
        return self._topology

    @property
    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _known(self) -> list[int]:
        return sorted((*self._slots, *self._dense))

    def _by_group(self, indices: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        members: dict[int, list[int]] = {}
        for i in indices:
            members.setdefault(self._group_of[i], []).append(i)
        yield from members.items()

    def name_of(self, index: int) -> str:
        """Name of a parameter for messages."""
        param = self._params[index]
        return self._names.get(param) or f"parameter {index}"

    def _group(self, index: int) -> dict[str, Any]:
        """Parameter group of a parameter."""
        return self.param_groups[self._group_of[index]]

    def _grad(self, index: int) -> Tensor:
        """Gradient of a parameter that has one, or zeros where only other ranks have one."""
        p = self._params[index]
        return torch.zeros_like(p) if p.grad is None else p.grad

    def _weight(self, index: int) -> Tensor:
        """fp32 weights of a parameter: itself, or its master copy when it is a 16-bit tensor."""
        return self._masters.get(index, self._params[index].data)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Takes into the masters what the program has written into 16-bit parameters; on CUDA ``_end_adopting()`` does it."""
        if not self._masters:
            return
        pairs = [(self._params[i], master) for i, master in self._masters.items()]
        # without a look at the gradients the host never waits for a device, and shall not here
        if self._device.type == "cuda" and self.exchange.on_nonfinite == "skip":
            self._comparison = Comparison(pairs)
        else:
            adopt_(pairs)

    def _end_adopting(self) -> None:
        """Call it before masters are used, but after something else has waited for the device."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            comparison.adopt()

    def _publish(self, indices: Sequence[int]) -> None:
        """Writes master weights back into 16-bit parameters."""
        if self._masters and (pairs := [(self._params[i], self._masters[i]) for i in indices if i in self._masters]):
            torch._foreach_copy_([p.data for p, _ in pairs], [w for _, w in pairs])

    def _check_parameters(self, params: Sequence[Tensor]) -> None:
        """Refuses what cannot be trained; a frozen parameter is asked when it becomes trainable."""
        first = self.param_groups[0]["params"][0]
        for p in params:
            shape = tuple(p.shape)
            if p.device != first.device:
                raise ValueError(f"parameters on {first.device} and {p.device}; give each device its own optimizer")
            if not p.requires_grad:
                continue
            if is_traceable_wrapper_subclass(p):
                if type(p).__name__ == "DTensor":
                    raise TypeError(
                        f"a parameter of shape {shape} is a DTensor (fully_shard, tensor parallelism), which "
                        f"{type(self).__name__} does not train yet; replicate the model on every rank"
                    )
                raise TypeError(
                    f"a parameter of shape {shape} is a {type(p).__name__}; {type(self).__name__} trains plain tensors only"
                )
            if p.is_sparse or p.layout is not torch.strided:
                raise TypeError(
                    f"a parameter of shape {shape} is sparse; {type(self).__name__} trains dense tensors only"
                )
            if p.dtype not in TRAINABLE_DTYPES:
                raise TypeError(
                    f"a parameter of shape {shape} has dtype {p.dtype}; {type(self).__name__} trains float32, bfloat16 "
                    "and float16 (complex and float64 parameters belong to another optimizer)"
                )
            if not is_dense(p):
                raise ValueError(
                    f"a parameter of shape {shape} has strides {p.stride()} with gaps or overlaps; make it contiguous"
                )

    def _refuse_sparse_gradients(self) -> None:
        params, strided = self._params, torch.strided
        sparse = [i for i in self._known() if (grad := params[i].grad) is not None and grad.layout is not strided]
        if sparse:
            raise TypeError(
                f"{self.name_of(sparse[0])} has a sparse gradient; {type(self).__name__} trains dense gradients only (build the layer with "
                "sparse=False)"
            )

    def _check_parameter_list(self) -> None:
        """State is laid out for the parameters there were: groups that were edited by hand would silently not be trained."""
        listed = [p for group in self.param_groups for p in group["params"]]
        if len(listed) != len(self._params) or any(map(is_not, listed, self._params)):
            raise RuntimeError(
                f"the parameters in {type(self).__name__}.param_groups are not those of the last step ({len(listed)} now, "
                f"{len(self._params)} then); add parameters with add_param_group(), and make a new optimizer to remove or replace some"
            )
        self._check_group_keys()
        for i, form in self._forms:
            p = self._params[i]
            if (now := (p.dtype, p.shape, p.stride())) != form and _places(now) != _places(form):
                dtype, shape, strides = form
                raise RuntimeError(
                    f"{self.name_of(i)} was {dtype} of shape {tuple(shape)} with strides {strides}, for which its state is laid out, and "
                    f"is {p.dtype} of shape {tuple(p.shape)} with strides {p.stride()} now; change the model before the first step, or "
                    "make a new optimizer, which can load_state_dict() the state"
                )

    # ----- plan and connection -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Plans and connects on first use, and again when a parameter becomes trainable."""
        if self._plan is None:
            self._build()
            return
        self._check_parameter_list()
        known = set(self._slots) | set(self._dense)
        if any([p.requires_grad and i not in known for i, p in enumerate(self._params)]):
            self._build()
        elif self._transport is None:
            self._reconnect()

    def _reconnect(self) -> None:
        """Connects; where nothing but the connection is new, state that differs by rank stays exactly as it is."""
        moved = any(bucket.device != self._device for bucket in self._buckets())
        if moved or not self._in_its_world():
            self._build()
            return
        self._connect()
        self._renew_reducer()

    def _build(self, *, connect: bool = True, newcomers: bool = True) -> None:
        """Lays out parameters and arenas, keeping state there is, and agrees on the plan with the other ranks.

        Args:
            connect: False leaves the handshake to the first step (loading a checkpoint is no collective).
            newcomers: False lays out what is known already; who else is trainable joins in the next step.
        """
        fixed = self._plan is not None and not self._takes_new_parameters()
        if fixed and not self._in_its_world():
            # connected to another world since: cut everything anew (before newcomers, which have no state to save, are numbered)
            self._unpack_state(self._packed_state())
        stays = self._plan_stays(newcomers)
        known = self._known() if self._plan is not None else []
        kept = {id(self._params[i]): self._state_of(i, dealt_anew=not stays) for i in known}
        if not stays and self._plan is not None:
            self._segments = []
        self._index(newcomers, in_order=stays or self._plan is None)
        with self._changing("laying out state"):
            if stays:
                self._layout_dense(kept)
                self._append()
            else:
                self._layout(kept)
        if connect:
            self._connect()
        if self._transport is not None:
            self._renew_reducer()

    def _in_its_world(self) -> bool:
        """Whether the ranks are those that blocks have been dealt to."""
        ranks = self._ranks()
        return self._laid_out_for == (ranks.size, ranks.ranks_per_node)

    def _plan_stays(self, newcomers: bool = True) -> bool:
        """Whether blocks, and all that lies in them, stay as they are: nobody (of ``newcomers``) joins who is to be among them."""
        if self._plan is None or not self._takes_new_parameters():
            return self._plan is not None
        known = {id(self._params[i]) for i in self._slots}
        compressed = [p for group in self.param_groups if group["compress"] for p in group["params"]]
        joins = newcomers and any(p.requires_grad and id(p) not in known for p in compressed)
        return not joins and self._in_its_world() and all(b.device == self._device for b in self._buckets())

    def _index(self, newcomers: bool, *, in_order: bool) -> None:
        """Numbers the parameters and deals them to the plan (``_slots``) and to dense averaging, newcomers too if they may join.

        ``in_order``: slots that there are keep their numbers.
        """
        known = {id(self._params[i]) for i in self._known()}
        self._check_parameters([p for group in self.param_groups for p in group["params"] if id(p) not in known])
        counts = {id(p): t for p, t in zip(self._params, self._t, strict=True)}
        self._params = [p for group in self.param_groups for p in group["params"]]
        self._group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        self._compressed_groups = [group["compress"] for group in self.param_groups]
        self._t = [counts.get(id(p), 0) for p in self._params]
        takes_part = [i for i, p in enumerate(self._params) if id(p) in known or (newcomers and p.requires_grad)]
        compressed = [i for i in takes_part if self._group(i)["compress"]]
        order = {i: slot for slot, i in enumerate(self._slots)} if in_order else {}
        self._slots = sorted(compressed, key=lambda i: (order.get(i, len(order)), i))
        self._slot_of = {i: slot for slot, i in enumerate(self._slots)}
        self._dense = [i for i in takes_part if not self._group(i)["compress"]]
        self._wire_bytes = sum(self._params[i].numel() * self._params[i].element_size() for i in self._known())
        self._bound, self._members, self._lookups = {}, {}, Lookups()
        known_now = ((i, self._params[i]) for i in self._known())
        self._forms = [(i, (p.dtype, p.shape, p.stride())) for i, p in known_now]

    def _layout(self, kept: dict[int, dict[str, Tensor]]) -> None:
        ranks = self._ranks()
        self._laid_out_for = (ranks.size, ranks.ranks_per_node)
        self._kernels = get_backend(self.exchange.kernels, self._device)
        if not self._segments or sum(self._segments) != len(self._slots):
            self._segments = [len(self._slots)]
        self._plan = self._deal(self._slots[: self._segments[0]])
        first = self._segments[0]
        for count in self._segments[1:]:
            self._plan = extended_plan(self._plan, self._deal(self._slots[first : first + count]))
            first += count
        size = self._plan.elements
        self._flat = {name: torch.zeros(size, dtype=torch.float32, device=self._device) for name in self._arenas()}
        self._layout_dense(kept)

    def _deal(self, indices: Sequence[int]) -> Plan:
        """Blocks and buckets of some parameters, as if there were no others."""
        return plan_buckets(
            [self._params[i].numel() for i in indices],
            block_size=self.exchange.block_size,
            world_size=self._ranks().size,
            bucket_elements=int(self.bucket_mb * 2**20 / 4),
            device=self._device,
        )

    def _append(self) -> None:
        """Deals blocks behind those there are to slots that have none yet; nothing of the others moves."""
        joined = self._slots[sum(self._segments) :]
        if not joined:
            return
        before = self._known_plan()
        plan = self._plan = extended_plan(before, self._deal(joined))
        self._segments.append(len(joined))
        for name, flat in self._flat.items():
            self._flat[name] = torch.cat([flat, flat.new_zeros(plan.elements - before.elements)])
        if "m" not in self._flat:
            more = plan.buckets[len(before.buckets) :]
            self._momentum += [torch.zeros(b.elements, dtype=torch.float32, device=self._device) for b in more]
        if self._worker_residual is not None and self._server_residual is not None:
            ranks, blocks = self._ranks(), plan.blocks - before.blocks
            self._worker_residual = self._longer(self._worker_residual, blocks // ranks.ranks_per_node)
            self._server_residual = self._longer(self._server_residual, blocks // ranks.size)

    def _longer(self, residual: Residual, blocks: int) -> Residual:
        """A residual with so many blocks of zeros behind its own."""
        values = residual.values
        owed = None if residual.owed is None else torch.cat([residual.owed, residual.owed.new_zeros(blocks)])
        more = values.new_zeros(blocks * self.exchange.block_size)
        return Residual(torch.cat([values, more]), owed, residual.settle)

    def _packed_state(self) -> dict[str, Any]:
        """``state_dict()``, of which no hook is told."""
        raise AssertionError("abstract")

    def _unpack_state(self, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()``, of which no hook is told."""
        raise AssertionError("abstract")

    def _layout_dense(self, kept: dict[int, dict[str, Tensor]]) -> None:
        """State that is kept by parameter: moments of dense groups and master weights; then all state there was."""
        names = self._arenas()
        self._dense_state = {
            i: {name: torch.zeros_like(self._params[i], dtype=torch.float32) for name in names}
            for i in (*self._dense, *self._late)
        }
        self._masters = {
            i: kept.get(id(self._params[i]), {}).get("master", self._params[i].detach().float())
            for i in (*self._slots, *self._dense)
            if self._params[i].dtype != torch.float32
        }
        for i in (*self._slots, *self._dense):
            for name, value in kept.get(id(self._params[i]), {}).items():
                if name in names:
                    self._moment(name, i).copy_(value)

    def _state_of(self, index: int, dealt_anew: bool = True) -> dict[str, Tensor]:
        """What a parameter keeps where things are laid out anew; ``dealt_anew``: blocks are, and all that lies in them must be."""
        names = self._dense_state.get(index, self._flat if dealt_anew and self._takes_new_parameters() else {})
        state = {name: self._moment(name, index).clone() for name in names}
        if index in self._masters:
            state["master"] = self._masters[index]
        return state

    def _connect(self) -> None:
        ranks = self._ranks()
        self._transport = Transport(ranks, self.ledger, self._timeout, self.algorithm)
        self._transport.step = self._steps + 1
        self._exchange = Exchange(self._transport)
        self._agreement = Agreement()
        if ranks.size > 1:
            # on an account of its own: it belongs to no step, and a run that is resumed makes one more
            lobby = Transport(ranks, ByteLedger(), self._timeout, self.algorithm)
            lobby.step = self._transport.step
            handshake(lobby, self.plan_description(), self._device, "training plan")
            if not self._steps:
                handshake(lobby, self._first_weights(), self._device, "first weights")

    def _renew_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        indices = self._known() if self._may_be_dense() else list(self._dense)
        self._reduced_at = {i: k for k, i in enumerate(indices)}
        # not connected while a checkpoint is loaded: the first step connects and comes back here
        if self._transport is not None and self._ranks().size > 1 and indices:
            self._reducer = Reducer(
                [self._params[i] for i in indices],
                self._transport,
                int(self.exchange.bucket_size(exchanged=False) * 2**20),
                overlap=self._overlap_dense,
                lanes=[PLAN_LANE if i in self._slot_of else DENSE_LANE for i in indices],
            )

    def plan_description(self) -> list[str]:
        """The plan in words, one fact per line: what all ranks must agree on (options, phase, groups, layout of the parameters)."""
        ranks = self._ranks()
        lines = [f"algorithm {self.algorithm}", f"world of {ranks.size} ranks, {ranks.ranks_per_node} per node"]
        left_out = ("process_group", "kernels", "timeout", "_alone")
        options = {k: v for k, v in vars(self.exchange).items() if k not in left_out} | {"bucket_mb": self.bucket_mb}
        lines += [f"option {name}={value}" for name, value in {**options, **vars(self.options)}.items()]
        lines.append(f"phase {self._phase.value} after {self._steps} steps")
        for g, group in enumerate(self.param_groups):
            facts = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "param_names"))
            lines.append(f"group {g}: {len(group['params'])} parameters, {facts}")
        for i in self._known():
            p = self._params[i]
            lines.append(
                f"{self.name_of(i)}: shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}, group {self._group_of[i]}"
            )
        return lines

    def _first_weights(self) -> list[str]:
        """What ranks that begin with equal weights agree on: DDP would broadcast rank 0's."""
        known = self._known()
        sums = bit_sums([self._params[i] for i in known])
        return [
            f"{self.name_of(i)}: its bits add up to {total} (seed the ranks alike, or broadcast rank 0's weights)"
            for i, total in zip(known, sums, strict=True)
        ]

    # ----- arenas ------------------------------------------------------------------------------------------------------

    def _known_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _buckets(self) -> tuple[Bucket, ...]:
        return self._known_plan().buckets

    def _moment(self, name: str, index: int) -> Tensor:
        """State of a parameter with its shape and strides; a view of an arena for what is compressed."""
        if index in self._dense_state:
            return self._dense_state[index][name]
        return self._known_plan().view(self._flat[name], self._slot_of[index], self._params[index])

    def _part(self, flat: Tensor, slot: int) -> Tensor:
        """A parameter's 1-D part, in memory order, of a flat over all blocks."""
        start = self._known_plan().starts[slot]
        return flat[start : start + self._params[self._slots[slot]].numel()]

    def _allocate_residuals(self) -> None:
        if self._worker_residual is None:
            ranks = self._ranks()
            self._worker_residual = self._no_residual(ranks.ranks_per_node)
            self._server_residual = self._no_residual(ranks.size)

    def _no_residual(self, share: int) -> Residual:
        """Zeros for one of ``share`` equal parts of all blocks."""
        dtype: torch.dtype = getattr(torch, self.exchange.state_dtype)
        return self._kernels.residual(self._known_plan().blocks // share, self.exchange.block_size, dtype, self._device)

    def _residual_of(self, bucket: Bucket) -> Residual:
        return _part(self._worker_residual, bucket, self._ranks().ranks_per_node)

    def _server_residual_of(self, bucket: Bucket) -> Residual:
        return _part(self._server_residual, bucket, self._ranks().size)

    def _shard_blocks(self, bucket: Bucket) -> tuple[int, int]:
        ranks = self._ranks()
        count = bucket.blocks // ranks.ranks_per_node
        return ranks.local_rank * count, (ranks.local_rank + 1) * count

    def _chunk_blocks(self, bucket: Bucket) -> tuple[int, int]:
        """First and last (exclusive) block of a bucket that this rank reduces as a server."""
        ranks = self._ranks()
        count = bucket.blocks // ranks.size
        chunk = ranks.local_rank * ranks.nodes + ranks.node
        return chunk * count, (chunk + 1) * count

    def _payload(self, bucket: Bucket, rows: int) -> Packed:
        count = bucket.blocks // self._ranks().size
        width = Packed.row_bytes(count, bucket.block_size)
        return Packed(torch.empty((rows, width), dtype=torch.uint8, device=self._device), count, bucket.block_size)

    # ----- the momentum: one arena, or by bucket, where bits replace it ------------------------------------------------

    def _hold_momentum_by_bucket(self) -> None:
        """Hands the momentum arena over to the buckets, each of which replaces its part by bits after its exchange."""
        m = self._flat.pop("m", None)
        if m is not None:
            self._to_exchanged(m)
            self._momentum = [bucket.slice(m) for bucket in self._buckets()]

    def _hold_momentum_flat(self) -> None:
        """Takes the momentum back into an fp32 arena."""
        if "m" not in self._flat:
            self._flat["m"] = self._momentum_flat()
            self._momentum = []

    def _momentum_of(self, bucket: Bucket, lo: int, hi: int) -> Tensor | Packed:
        """The held momentum of blocks ``[lo, hi)``."""
        held = self._momentum[bucket.index]
        if isinstance(held, Packed):
            return held.narrow(lo // held.blocks_per_row, (hi - lo) // held.blocks_per_row)
        return held[lo * bucket.block_size : hi * bucket.block_size]

    def _held_momentum(self, bucket: Bucket) -> Tensor | Packed:
        """The momentum of a bucket as it travels."""
        return bucket.slice(self._flat["m"]) if "m" in self._flat else self._momentum[bucket.index]

    def _momentum_flat(self) -> Tensor:
        """The momentum as an fp32 flat over all blocks."""
        if "m" in self._flat:
            return self._flat["m"]
        flat = self._exchanged_flat()
        self._from_exchanged(flat)
        return flat

    def _exchanged_flat(self) -> Tensor:
        """What buckets hold as momentum, as an fp32 flat over all blocks."""
        flat = torch.zeros(self._known_plan().elements, dtype=torch.float32, device=self._device)
        for bucket, held in zip(self._buckets(), self._momentum, strict=True):
            if isinstance(held, Packed):
                self._kernels.unpack(held, bucket.lengths, bucket.slice(flat))
            else:
                bucket.slice(flat).copy_(held)
        return flat

    # ----- what kernels are given --------------------------------------------------------------------------------------

    def _members_of(self, bucket: Bucket) -> Members:
        known = self._members.get(bucket.index)
        if known is None:
            indices = [self._slots[span.param] for span in bucket.spans]
            params = [self._params[i] for i in indices]
            special = [
                k
                for k, (p, span) in enumerate(zip(params, bucket.spans, strict=True))
                if span.numel != p.numel() or not p.is_contiguous()
            ]
            known = self._members[bucket.index] = Members(indices, params, self._holders(indices), special)
        return known

    def _holders(self, indices: Sequence[int]) -> list[Tensor]:
        """What holds the fp32 weights of some parameters, to be read (``_weight`` makes a tensor for each, to be written to)."""
        return [self._masters[i] if i in self._masters else self._params[i] for i in indices]

    def _bind_grads(self, bucket: Bucket) -> BoundSpans:
        """Gradients by span; looked up once in a step."""
        known = self._lookups.grads.get(bucket.index)
        if known is not None:
            return known
        members = self._members_of(bucket)
        late = self._late
        grads = [None if i in late else p.grad for i, p in zip(members.indices, members.params, strict=True)]
        for k in members.special:
            p, grad, span = members.params[k], grads[k], bucket.spans[k]
            if grad is None:
                continue
            if not (grad.is_contiguous() and p.is_contiguous()) and grad.stride() != p.stride() and p.numel() > 1:
                grad = torch.empty_like(p).copy_(grad)  # autograd may hand over another memory order
            grads[k] = memory_order(grad)[span.start : span.start + span.numel]
        spans = self._lookups.grads[bucket.index] = BoundSpans(grads)
        return spans

    def _bind_weights(self, bucket: Bucket) -> BoundSpans:
        """Weights by span; the very list of the step before where they lie as they lay, with what backends have made of it."""
        spans = self._lookups.weights.get(bucket.index)
        if spans is not None:
            return spans
        members, active = self._members_of(bucket), self._active
        where = [w.data_ptr() if active[i] else 0 for i, w in zip(members.indices, members.weights, strict=True)]
        known = self._bound.get(bucket.index)
        if known is None or known[0] != where:

            def weight(slot: int) -> Tensor | None:
                i = self._slots[slot]
                return memory_order(self._weight(i)) if self._active[i] else None

            known = self._bound[bucket.index] = (where, BoundSpans(bucket.bind(weight)))
            self._members.pop(bucket.index)  # weights that lie elsewhere may have another memory order
        self._lookups.weights[bucket.index] = known[1]
        return known[1]

    def _kinds(self) -> Sequence[tuple[Hashable, ...]]:
        """Of each slot, what the numbers of a step depend on that are the same for most: group and step count."""
        return [(self._group_of[i], self._t[i]) for i in self._slots]

    def _sorted_kinds(self) -> tuple[list[int], list[int]]:
        """A parameter of each kind, and for each slot the position of its kind among them."""
        if self._lookups.kinds is None:
            kinds = self._kinds()
            examples = dict(zip(kinds, self._slots, strict=True))
            place = {kind: k for k, kind in enumerate(examples)}
            self._lookups.kinds = list(examples.values()), [place[kind] for kind in kinds]
        return self._lookups.kinds

    def _by_slot(self, name: str, value_of: Callable[[int], float]) -> list[float]:
        """One value per slot. It depends on the slot's kind alone, and is asked for once for each (given a parameter's index).

        Made at the first call of a step (or of ``_count``) with this ``name``.
        """
        known = self._lookups.values.get(name)
        if known is None:
            examples, place = self._sorted_kinds()
            values = [value_of(i) for i in examples]
            known = self._lookups.values[name] = [values[k] for k in place]
        return known

    def _by_block(self, name: str, bucket: Bucket, *values_of: Callable[[int], float]) -> Tensor:
        """fp32 ``(blocks,)`` from one value per parameter, or ``(values, blocks)`` from several; see ``_by_slot``.

        Made for all buckets at the first call of a step (or of ``_count``) with this ``name``.
        """
        tables = self._lookups.tables.get(name)
        if tables is None:
            examples, place = self._sorted_kinds()
            kinds = [[value_of(i) for i in examples] for value_of in values_of]
            rows = [self._spread(values if len(values) == 1 else [values[k] for k in place]) for values in kinds]
            table = rows[0] if len(rows) == 1 else torch.stack(rows)
            parts = table.split([b.blocks for b in self._buckets()], dim=-1)
            tables = self._lookups.tables[name] = [part.contiguous() for part in parts]
        return tables[bucket.index]

    def _spread(self, values: Sequence[float]) -> Tensor:
        """fp32 ``(blocks,)``, over all buckets, from a value per slot (or one for all)."""
        plan = self._known_plan()
        if len(distinct := set(values)) == 1:
            return torch.full((plan.blocks,), distinct.pop(), dtype=torch.float32, device=self._device)
        return upload(values, self._device, torch.float32)[plan.block_param]

    def _decay(self, index: int) -> float:
        """``1 - lr*wd`` of a parameter."""
        group = self._group(index)
        return float(1.0 - group["lr"] * group["weight_decay"])

    def _count(self, indices: Iterable[int]) -> None:
        """Counts a step of some parameters; what has been looked up may depend on their number."""
        for i in indices:
            self._t[i] += 1
        self._lookups = Lookups()


def _part(residual: Residual | None, bucket: Bucket, share: int) -> Residual:
    """What a rank that has one of ``share`` parts of every bucket holds of this one."""
    assert residual is not None
    first = bucket.first_block // share
    return residual.part(first, first + bucket.blocks // share, bucket.block_size)


def _places(form: Form) -> tuple[Any, ...]:
    """What decides where a tensor's elements lie: the stride of a dimension of size 1 does not."""
    dtype, shape, strides = form
    return dtype, shape, [stride for stride, size in zip(strides, shape, strict=True) if size != 1]
