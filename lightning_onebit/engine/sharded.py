"""Parameters that are DTensors: their local shards as plain tensors, and what the ranks that hold the other shards must know alike."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_onebit.comm import ByteLedger, Topology, Transport, handshake, share_values

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: the first torch whose FSDP2 runs on the CPU, averages rightly with gloo, and slices meshes of slices
OLDEST_TORCH = (2, 9)

_HEAD = struct.Struct("<I")


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; imports nothing for one that is not."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


class LocalShard(Tensor):
    """The local shard of a DTensor parameter: a plain tensor in the same memory, whose gradient and hooks are the parameter's.

    Memory belongs to the module (FSDP2 gathers from it), so ``.data = x`` copies.

    Attributes:
        source: the parameter.
    """

    source: DTensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(source: DTensor) -> LocalShard:
        """The shard that this rank holds."""
        shard: LocalShard = Tensor._make_subclass(LocalShard, source._local_tensor.detach())
        shard.source = source
        return shard

    def follow(self) -> bool:
        """Goes where the parameter's local shard has gone (FSDP2's first forward moves some); False: that has another shape or dtype."""
        now = self.source._local_tensor
        if now.data_ptr() == self.data_ptr() and now.shape == self.shape and now.dtype == self.dtype:
            return True
        if now.shape != self.shape or now.dtype != self.dtype or now.device != self.device:
            return False
        Tensor.data.__set__(self, now.detach())  # type: ignore[attr-defined]
        return True

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """The parameter's."""
        return self.source.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """Local shard of the parameter's gradient, placed as the parameter is."""
        grad = cast("DTensor | None", self.source.grad)
        if grad is None:
            return None
        if grad.placements != self.source.placements:
            grad = grad.redistribute(placements=self.source.placements)
            self.source.grad = grad
        local = grad._local_tensor
        return local.wait() if hasattr(local, "wait") else local

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.source.grad = None
            return
        # as from_local() makes it, at a twentieth of its time
        self.source.grad = type(self.source)(value, self.source._spec, requires_grad=False)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard itself."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return getattr(self.source, "_post_accumulate_grad_hooks", None)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Hears of the parameter's gradients, which FSDP2 accumulates after it has scattered them."""
        handle: RemovableHandle = self.source.register_post_accumulate_grad_hook(hook)
        return handle


def local_of(parameter: Tensor) -> Any:
    """What the engine works on: the parameter, or its local shard."""
    return LocalShard.of(cast("DTensor", parameter)) if is_dtensor(parameter) else parameter


def source_of(parameter: Tensor) -> Any:
    """The parameter as the program knows it."""
    return parameter.source if isinstance(parameter, LocalShard) else parameter


def placed(parameter: Tensor) -> tuple[Any, ...]:
    """The way in which a parameter is sharded, alike on all ranks; empty: not at all."""
    if not isinstance(parameter, LocalShard):
        return ()
    mesh, placements = parameter.source.device_mesh, parameter.source.placements
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple((names[d], mesh.size(d), placement.is_shard()) for d, placement in enumerate(placements))


def as_sharded(value: Tensor, like: Tensor) -> Tensor:
    """A tensor of a local shard's shape as a DTensor that is placed as its parameter is; of a plain parameter as it is."""
    if not isinstance(like, LocalShard):
        return value
    from torch.distributed.tensor import DTensor

    source = like.source
    return DTensor.from_local(
        value.detach(),
        source.device_mesh,
        source.placements,
        run_check=False,
        shape=source.shape,
        stride=source.stride(),
    )


def place(value: Any, parameter: Tensor) -> Any:
    """A saved tensor of a parameter's shape as a DTensor that is placed as the parameter is; anything else as it is.

    Args:
        value: a DTensor, placed in any way on the parameter's mesh (a collective where its placement is another), or the whole tensor.
        parameter: as the program knows it.
    """
    if not isinstance(value, Tensor) or not is_dtensor(parameter) or value.shape != parameter.shape:
        return value
    of = cast("DTensor", parameter)
    if is_dtensor(value):
        saved = cast("DTensor", value)
        if saved.device_mesh != of.device_mesh:
            raise ValueError(f"a saved tensor lies on {saved.device_mesh}, its parameter on {of.device_mesh}")
        return saved.redistribute(placements=of.placements)
    from torch.distributed.tensor import distribute_tensor

    # every rank has the whole of it, so nothing is sent
    whole = value.to(of.device)
    return distribute_tensor(whole, of.device_mesh, of.placements, src_data_rank=None)


def local_part(value: Any, parameter: Tensor) -> Any:
    """What of a saved tensor belongs to this rank's shard of a parameter; see ``place()``."""
    there = place(value, parameter)
    return there._local_tensor if is_dtensor(there) else there


def torch_is_too_old() -> bool:
    """Whether this torch is older than the sharded part needs."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < OLDEST_TORCH


def check_dtensor(parameter: Tensor, kind: str) -> None:
    """Refuses a DTensor that cannot be trained.

    Raises:
        RuntimeError: torch is older than the sharded part needs.
        TypeError: a ``Partial`` placement.
    """
    if torch_is_too_old():
        needed = ".".join(map(str, OLDEST_TORCH))
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is a DTensor, which {kind} trains with torch>={needed}; "
            f"this is torch {torch.__version__}"
        )
    placements = cast("DTensor", parameter).placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} has placements {tuple(placements)}; a Partial one holds summands, not "
            f"weights: redistribute it to Shard or Replicate before {kind} is made"
        )


class Shards:
    """The ranks that hold the other shards of this replica: a process group for every dimension of the parameters' meshes.

    Args:
        params: the optimizer's parameters as the program knows them.
        ranks: the replicas that this rank exchanges with.
        timeout: bound of every wait.
        name: who communicates, for messages.

    Raises:
        ValueError: a mesh holds several replicas.
    """

    def __init__(self, params: Sequence[Tensor], ranks: Topology, timeout: timedelta, name: str) -> None:
        groups = {members: group for p in params for members, (group, _) in _dimensions(p).items()}
        self._refuse_replicas(groups, ranks)
        self.transports = [
            Transport(Topology.create(group), ByteLedger(), timeout, f"{name}, shards") for group in groups.values()
        ]
        self._members = list(groups)
        self.know(params)

    def know(self, params: Sequence[Tensor]) -> None:
        """Takes note of all parameters there are, in their order."""
        dimensions = [_dimensions(p) for p in params]
        #: by parameter, for each group whether it is sharded over it
        self.ways = [tuple(m in of and of[m][1] for m in self._members) for of in dimensions]
        #: the different ones of them
        self.kinds = sorted(set(self.ways))
        #: parameters that every rank of the groups holds whole, and nobody averages over them
        self.plain = [i for i, p in enumerate(params) if not is_dtensor(p)] if self._members else []

    @staticmethod
    def _refuse_replicas(groups: Any, ranks: Topology) -> None:
        if ranks.size == 1 or not isinstance(ranks.group, dist.ProcessGroup):
            return
        replicas = set(dist.get_process_group_ranks(ranks.group))
        for members in groups:
            if len(replicas.intersection(members)) > 1:
                raise ValueError(
                    f"ranks {sorted(replicas.intersection(members))} hold shards of the same tensors and would exchange them as replicas: "
                    'give the optimizer process_group=mesh["replicate"].get_group(), and fully_shard() (or parallelize_module()) the '
                    "dimensions of the mesh within a replica alone, mesh=mesh[...] without it"
                )

    def position(self, way: tuple[bool, ...]) -> int:
        """Number of this rank's shard of a parameter that is sharded in some way; 0 where it is whole."""
        number = 0
        for transport, sharded in zip(self.transports, way, strict=True):
            if sharded:
                number = number * transport.size + transport.topology.rank
        return number

    def by_way(self, indices: Sequence[int]) -> list[list[int]]:
        """Parameters by the way in which they are sharded, in the order of ``kinds``."""
        return [[i for i in indices if self.ways[i] == kind] for kind in self.kinds]

    def combine(self, rows: Tensor, indices: Sequence[int], how: Literal["sum", "max"] = "sum") -> Tensor:
        """Numbers of shards to numbers of whole parameters, alike on all ranks of the groups. Collective.

        Args:
            rows: fp64 ``(parameters, k)``.
            indices: which parameters.
            how: what is made of the shards' numbers, in the order of their ranks.
        """
        for position, transport in enumerate(self.transports):
            parts = share_values(transport, rows, f"{how} over shards of {len(indices)} parameters")
            total = parts[0]
            for part in parts[1:]:
                total = total + part if how == "sum" else torch.maximum(total, part)
            sharded = torch.tensor([self.ways[i][position] for i in indices], device=rows.device)
            rows = torch.where(sharded[:, None], total, rows)
        return rows

    def agree(
        self, squares: Sequence[float], bad: bool, flags: Sequence[bool], digest: int, device: torch.device
    ) -> tuple[list[float], bool, list[bool], bool]:
        """What must be known alike of a step. Collective.

        Args:
            squares: for every kind of ``kinds``, one number or several after each other; summed over the shards of that kind.
            bad: whether something is not finite here.
            flags: true somewhere is true.
            digest: of what must be the same everywhere.
            device: of the parameters.

        Returns:
            Those, and whether all digests were equal.
        """
        agreed, values = True, np.array(squares, dtype=np.float64)
        bits = np.array(flags, dtype=bool)
        for position, transport in enumerate(self.transports):
            head = _HEAD.pack(digest << 1 | bad)
            payload = head + values.tobytes() + np.packbits(bits, bitorder="little").tobytes()
            mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(transport.device(device))
            rows = share_values(transport, mine, "control round of shards").cpu().numpy()
            heads = [_HEAD.unpack(row[:4].tobytes())[0] for row in rows]
            bad, agreed = any(h & 1 for h in heads), agreed and len({h >> 1 for h in heads}) == 1
            parts = [np.frombuffer(row[4 : 4 + values.nbytes].tobytes(), dtype=np.float64) for row in rows]
            total = np.zeros_like(values)
            for part in parts:
                total += part
            sharded = [self.kinds[k % len(self.kinds)][position] for k in range(len(values))]
            values = np.where(sharded, total, values)
            merged = np.bitwise_or.reduce(rows[:, 4 + values.nbytes :], axis=0)
            bits = np.unpackbits(merged, count=len(bits), bitorder="little").astype(bool)
        return values.tolist(), bad, bits.tolist(), agreed

    def anywhere(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is set on any rank of the groups. Collective."""
        return self.agree([], flag, [], 0, device)[1]

    def average(self, grads: Sequence[Tensor]) -> None:
        """Makes gradients of parameters that all ranks hold whole their mean over the groups, in place. Collective."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for same in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in same])
            for transport in self.transports:
                flat.mul_(1.0 / transport.size)
                transport.all_reduce(flat, what=f"mean over shards of {len(same)} tensors that are not sharded").wait()
            torch._foreach_copy_(
                same, [p.view_as(g) for p, g in zip(flat.split([g.numel() for g in same]), same, strict=True)]
            )

    def refuse_early(self, name_of: Callable[[int], str]) -> None:
        """Raises where gradients would leave in backward that must be averaged over the ranks of a replica before."""
        if self.plain:
            raise ValueError(
                f"overlap='backward' would send {name_of(self.plain[0])} before its gradient is averaged over the ranks that hold the "
                "shards of the others; fully_shard() the whole model, or use overlap='step'"
            )

    def compare(self, facts: Sequence[str], device: torch.device, subject: str) -> None:
        """Raises ``PlanMismatch`` where the ranks of a group have different facts. Collective."""
        for transport in self.transports:
            handshake(transport, facts, device, subject)


def _dimensions(parameter: Tensor) -> dict[tuple[int, ...], tuple[Any, bool]]:
    """Of each dimension of a parameter's mesh with several ranks: their group, by its ranks, and whether it is sharded over it."""
    if not is_dtensor(parameter):
        return {}
    mesh, placements = cast("DTensor", parameter).device_mesh, cast("DTensor", parameter).placements
    several = [(mesh.get_group(d), placement.is_shard()) for d, placement in enumerate(placements) if mesh.size(d) > 1]
    return {tuple(dist.get_process_group_ranks(group)): (group, sharded) for group, sharded in several}


def describe_placement(parameter: Tensor) -> str:
    """Shape of the whole parameter, and how it is placed."""
    placed = f" {tuple(cast('DTensor', parameter).placements)}" if is_dtensor(parameter) else ""
    return f"shape {tuple(parameter.shape)}{placed}"
