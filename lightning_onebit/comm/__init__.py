"""Communication: buckets, the two-phase exchange, dense averaging and the byte ledger."""

from lightning_onebit.comm.buckets import Bucket, Plan, Span, extended_plan, is_dense, memory_order, plan_buckets
from lightning_onebit.comm.control import (
    Control,
    PlanMismatch,
    begin_control,
    control_payload,
    control_payload_bytes,
    control_round,
    handshake,
    read_control,
    share_values,
)
from lightning_onebit.comm.exchange import Codec, Exchange, ExchangeSession, chunk_order, mean_in_order
from lightning_onebit.comm.ledger import ByteLedger, StepRecord
from lightning_onebit.comm.reducer import Reducer
from lightning_onebit.comm.simulation import SimulatedGroup, SimulatedWorld
from lightning_onebit.comm.topology import Topology, disconnect, distributed_world, torn_down_last
from lightning_onebit.comm.transport import DEFAULT_TIMEOUT, CollectiveFailure, CollectiveTimeout, Pending, Transport
from lightning_onebit.comm.volume import Collective, exchange_collectives, peer_bytes, ring_bytes

__all__ = [
    "DEFAULT_TIMEOUT",
    "Bucket",
    "ByteLedger",
    "Codec",
    "Collective",
    "CollectiveFailure",
    "CollectiveTimeout",
    "Control",
    "Exchange",
    "ExchangeSession",
    "Pending",
    "Plan",
    "PlanMismatch",
    "Reducer",
    "SimulatedGroup",
    "SimulatedWorld",
    "Span",
    "StepRecord",
    "Topology",
    "Transport",
    "begin_control",
    "chunk_order",
    "control_payload",
    "control_payload_bytes",
    "control_round",
    "disconnect",
    "distributed_world",
    "exchange_collectives",
    "extended_plan",
    "handshake",
    "is_dense",
    "mean_in_order",
    "memory_order",
    "peer_bytes",
    "plan_buckets",
    "read_control",
    "ring_bytes",
    "share_values",
    "torn_down_last",
]
