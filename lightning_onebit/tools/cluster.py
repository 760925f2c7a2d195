"""What is planned: machines with a network between them, what a collective costs there, and the job that they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_onebit._choices import Overlap
from lightning_onebit.algorithms import LocalSteps
from lightning_onebit.comm import Collective, peer_bytes, ring_bytes
from lightning_onebit.engine import ExchangeOptions
from lightning_onebit.engine.options import LARGEST_BUCKET_MB, check_integer, check_number

#: what counts may be at most: far above all that is built and trained, far below what a float cannot hold
LARGEST = 10**15
MOST_STEPS = 10**9


def _check_count(name: str, value: Any, *, most: int = LARGEST) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``value`` is an integer within the bounds."""
    check_integer(name, value, least=1)
    if value > most:
        raise ValueError(f"{name}={value!r} is out of range; it must be at most {most:,}, give the real number")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and the network between them; every number is what a program gets, not what a data sheet promises.

    Attributes:
        gpus: number of ranks ``n``.
        gpus_per_node: ranks ``K`` that share one machine and its network card; divides ``gpus``.
        shards: ranks of one node over which FSDP2 shards a replica of the model; divides ``gpus_per_node``. 1: every rank has a replica.
        bandwidth: bits per second that a node's network card carries in each direction (measure it: ``lightning-onebit bench``).
        intra_bandwidth: bits per second between ranks of one node (PCIe 3 x16: 1e11; NVLink: 1e12 and more).
        latency: seconds until a message between nodes arrives, ``alpha``, paid for each dependent round.
        intra_latency: the same within a node.
        message_overhead: seconds that each message keeps a node's card and host busy; all-to-alls of large worlds are bound by it.
        memory_bandwidth: bytes per second at which one rank's optimizer step runs through memory.

    Raises:
        TypeError: a number of the wrong type.
        ValueError: out of range, or nodes that are not even.
    """

    gpus: int
    gpus_per_node: int = 1
    shards: int = 1
    bandwidth: float
    intra_bandwidth: float = 1e11
    latency: float = 50e-6
    intra_latency: float = 10e-6
    message_overhead: float = 1e-6
    memory_bandwidth: float = 5e11

    def __post_init__(self) -> None:
        _check_count("gpus", self.gpus)
        _check_count("gpus_per_node", self.gpus_per_node)
        _check_count("shards", self.shards)
        for name in ("bandwidth", "intra_bandwidth", "memory_bandwidth"):
            check_number(name, getattr(self, name), above=0)
        for name in ("latency", "intra_latency", "message_overhead"):
            check_number(name, getattr(self, name), least=0)
        if self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} does not divide gpus={self.gpus}; nodes must be even, give a divisor"
            )
        if self.gpus_per_node % self.shards:
            raise ValueError(
                f"shards={self.shards} does not divide gpus_per_node={self.gpus_per_node}; a replica lies within a node, give a divisor"
            )

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.gpus // self.shards

    @property
    def group(self) -> Cluster:
        """What one rank sees of the others that hold the same shard, and of the card that it shares with the groups of other shards."""
        if self.shards == 1:
            return self
        return replace(
            self,
            gpus=self.replicas,
            gpus_per_node=self.gpus_per_node // self.shards,
            shards=1,
            bandwidth=self.bandwidth / self.shards,
            message_overhead=self.message_overhead * self.shards,
        )

    @property
    def nodes(self) -> int:
        """``L = gpus / gpus_per_node``."""
        return self.gpus // self.gpus_per_node

    def all_reduce(self, nbytes: int) -> float:
        """Seconds of an all-reduce over all ranks: a ring, or a tree where its fewer rounds outweigh its bytes."""
        if self.gpus == 1:
            return 0.0
        alpha, beta = self._slowest
        ring = 2 * (self.gpus - 1) * (alpha + self.message_overhead) + 8 * ring_bytes(self.gpus, nbytes) / beta
        depth = 2 * math.ceil(math.log2(self.gpus))
        tree = depth * (alpha + self.message_overhead) + 8 * 2 * nbytes / beta
        return min(ring, tree)

    def collective(self, one: Collective) -> float:
        """Seconds of one collective of the exchange, all its groups at once (every node has K of those between nodes)."""
        if one.ranks == 1:
            return 0.0
        if one.link == "intra":
            alpha, beta, sharing, inside = self.intra_latency, self.intra_bandwidth, 1, 0
        elif one.ranks == self.gpus:  # flat: one group, whose ring passes each node once, whose pairs share the card
            alpha, beta = self._slowest
            sharing = self.gpus_per_node if self.nodes > 1 and one.kind == "all_to_all" else 1
            inside = self.gpus_per_node - 1 if self.nodes > 1 else 0
        else:
            alpha, beta, sharing, inside = self.latency, self.bandwidth, self.gpus_per_node, 0
        if one.kind == "all_gather":  # ring: rank r passes on what it has from r-1
            return (one.ranks - 1) * (alpha + self.message_overhead) + 8 * sharing * one.sent / beta
        messages = sharing * (one.ranks - 1 - inside)
        between = 8 * messages * one.row_bytes / beta
        within = 8 * peer_bytes(inside + 1, one.row_bytes) / self.intra_bandwidth
        return alpha + messages * self.message_overhead + max(between, within)

    def card_bytes(self, one: Collective) -> float:
        """Bytes that a node's card sends in a collective."""
        if one.link == "intra" or self.nodes == 1:
            return 0.0
        if one.ranks < self.gpus or self.gpus_per_node == 1:
            return float(self.gpus_per_node * one.sent)
        if one.kind == "all_gather":
            return float(one.sent)
        return float(self.gpus_per_node * (one.ranks - self.gpus_per_node) * one.row_bytes)

    @property
    def _slowest(self) -> tuple[float, float]:
        """Latency and bandwidth that bound a ring over all ranks."""
        return (self.latency, self.bandwidth) if self.nodes > 1 else (self.intra_latency, self.intra_bandwidth)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how it is trained.

    Attributes:
        params: parameters, in all or of every tensor.
        compute: seconds of a step that exchanges nothing: forward, backward and a dense optimizer step. Of a sharded model: of a replica
            alone, with what its ranks gather and scatter.
        steps: real steps of the run.
        warmup: share of dense steps of 1-bit Adam and 1-bit LAMB, of steps up to the variance freeze for 0/1 Adam; one step at least.
        gradient_bytes: of a gradient element in the warm-up: 4, or 2 where parameters are 16-bit.
        hidden: share of ``compute`` behind which dense averaging hides (backward is two thirds, less its first bucket).
        overlap: ``"step"``, or ``"backward"`` where compressed buckets hide as well (1-bit Adam and 1-bit LAMB).
        block_size: elements that share a scale.
        bucket_mb: MB of fp32 gradients per bucket (by default those of an optimizer on CPUs; on CUDA devices they are larger, and fewer);
            at least a block is in one, in the exchange a block of every rank.
        local_steps: 0/1 Adam's.

    Raises:
        TypeError: a number of the wrong type.
        ValueError: out of range, or an option without effect.
    """

    params: int | Sequence[int]
    compute: float
    steps: int = 100_000
    warmup: float = 0.2
    gradient_bytes: int = 4
    hidden: float = 0.5
    overlap: Overlap = "step"
    block_size: int = 2048
    bucket_mb: float = 16.0
    local_steps: LocalSteps | None = None

    def __post_init__(self) -> None:
        tensors = tuple(self.params) if isinstance(self.params, Sequence) else (self.params,)
        for count in tensors:
            check_integer("params", count, least=0)
        if sum(tensors) < 1:
            raise ValueError(f"params={self.params!r} holds no parameter; give their number, e.g. 336_000_000")
        if sum(tensors) > LARGEST:
            raise ValueError(
                f"params={self.params!r} is out of range; it must be at most {LARGEST:,}, e.g. 336_000_000"
            )
        object.__setattr__(self, "params", tensors)
        check_number("compute", self.compute, least=0)
        _check_count("steps", self.steps, most=MOST_STEPS)
        check_number("warmup", self.warmup, least=0, most=1)
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradient_bytes={self.gradient_bytes!r} is unknown; choose 4 (fp32) or 2 (fp16, bf16)")
        check_number("hidden", self.hidden, least=0, most=1)
        check_number("bucket_mb", self.bucket_mb, above=0, most=LARGEST_BUCKET_MB)
        ExchangeOptions(block_size=self.block_size, overlap=self.overlap)
        _check_count("block_size", self.block_size)

    @property
    def schedule(self) -> dict[str, Any]:
        """Options of single algorithms that shape a schedule, as ``count_rounds`` takes them."""
        return {"local_steps": self.local_steps}

    def shard(self, shards: int) -> Job:
        """The same job with the part of each parameter that one of so many ranks holds."""
        return self if shards == 1 else replace(self, params=tuple(-(-count // shards) for count in self.tensors))

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of every parameter tensor."""
        return (self.params,) if isinstance(self.params, int) else tuple(self.params)

    @property
    def elements(self) -> int:
        """Parameters in all."""
        return sum(self.tensors)
