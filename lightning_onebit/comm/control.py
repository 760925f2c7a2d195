"""Small rounds in which all ranks learn the same facts: the control round of a step and the handshake before the first."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_onebit.comm.transport import Transport

_HEADER = struct.Struct("<dI")


def control_payload_bytes(parameters: int) -> int:
    """Bytes with which a rank tells of its gradients: 12 and one bit per parameter, a multiple of 4."""
    return _HEADER.size + 4 * -(-parameters // 32)


def control_payload(sum_squares: float, non_finite: int, present: Sequence[bool], digest: int) -> bytes:
    """What a rank tells of its gradients; see ``begin_control``."""
    bits = np.packbits(np.array(present, dtype=bool), bitorder="little").tobytes()
    payload = _HEADER.pack(sum_squares, digest << 1 | (non_finite > 0)) + bits
    return payload.ljust(control_payload_bytes(len(present)), b"\0")


def read_control(rows: np.ndarray, parameters: int) -> Control:
    """What all ranks have told.

    Args:
        rows: uint8 ``(ranks, bytes)``, ``control_payload()`` of each.
        parameters: how many each tells of.
    """
    heads = list(_HEADER.iter_unpack(rows[:, : _HEADER.size].tobytes()))
    total = 0.0
    for squares, _ in heads:  # sum() adds floats otherwise since Python 3.12
        total += squares
    bad = any(flags & 1 for _, flags in heads)
    merged = np.bitwise_or.reduce(rows[:, _HEADER.size :], axis=0)
    anywhere = np.unpackbits(merged, count=parameters, bitorder="little").astype(bool)
    alike = len(heads) > 1 and len({squares for squares, _ in heads}) == 1 and total > 0
    agreed = len({flags >> 1 for _, flags in heads}) == 1
    return Control(total, not bad, tuple(anywhere.tolist()), len(heads), agreed, alike)


@dataclass(frozen=True)
class Control:
    """What all ranks know alike about a step's local gradients.

    Attributes:
        sum_squares: sum over ranks of the squared norms of their local gradients.
        finite: no rank saw a non-finite value.
        present: per parameter, whether any rank has a gradient.
        ranks: number of ranks.
        agreed: all ranks have given the same digest.
        alike: the squared norms of several ranks are equal, bit for bit, and not 0: so are their gradients then.
    """

    sum_squares: float
    finite: bool
    present: tuple[bool, ...]
    ranks: int
    agreed: bool = True
    alike: bool = False

    @property
    def norm(self) -> float:
        """The global norm under compression: ``sqrt((1/n) sum_i ||g_i||^2)``."""
        return (self.sum_squares / self.ranks) ** 0.5


def begin_control(
    transport: Transport,
    sum_squares: float,
    non_finite: int,
    present: Sequence[bool],
    device: torch.device,
    digest: int = 0,
) -> Callable[[], Control]:
    """Begins one small all-gather: every rank's squared norm, non-finite flag and presence bits, combined in rank order.

    An all-gather rather than an all-reduce, because each rank then does the same sums in the same order: the result is
    bitwise equal everywhere whatever the backend. Payload: ``control_payload_bytes()``.

    Args:
        transport: whose ranks take part.
        sum_squares: this rank's squared gradient norm.
        non_finite: how many of its tensors hold a non-finite value.
        present: per parameter, whether this rank has a gradient.
        device: device of the parameters (control tensors live there with NCCL).
        digest: 31 bits of what must be the same on all ranks.

    Returns:
        Waits for the other ranks and gives the result.
    """
    payload = control_payload(sum_squares, non_finite, present, digest)
    what = "control round (norm, non-finite flags, presence of gradients)"
    answer = _begin_rows(transport, payload, device, what)
    return lambda: read_control(answer().cpu().numpy(), len(present))


def control_round(*args: Any, **kwargs: Any) -> Control:
    """``begin_control()``, and its result."""
    return begin_control(*args, **kwargs)()


def share_values(transport: Transport, values: Tensor, what: str) -> Tensor:
    """Numbers of every rank, alike on all of them: one row per rank, ``(ranks, *values.shape)``, where ``values`` are (blocks until there).

    Args:
        transport: whose ranks take part.
        values: the same shape on every rank, any dtype.
        what: what is exchanged, for the message of a timeout.
    """
    return _begin_share(transport, values, what)()


def _begin_share(transport: Transport, values: Tensor, what: str) -> Callable[[], Tensor]:
    mine = values.contiguous().view(-1).view(torch.uint8).to(transport.device(values.device))
    out = torch.empty((transport.size, mine.numel()), dtype=torch.uint8, device=mine.device)
    pending = transport.all_gather(out, mine, transport.topology.group, what=what, link=None)

    def end() -> Tensor:
        pending.wait()
        return out.to(values.device).view(values.dtype).view(transport.size, *values.shape)

    return end


class PlanMismatch(RuntimeError):
    """The ranks do not run the same program: the message names the first difference."""


def handshake(transport: Transport, description: Sequence[str], device: torch.device, subject: str = "plan") -> str:
    """Compares what the ranks are about to do, before the first collective that relies on it.

    Args:
        transport: whose ranks take part.
        description: one line per fact (parameter names, shapes, dtypes, options ...), in a fixed order.
        device: device of the parameters.
        subject: what is compared, for the message.

    Returns:
        The common hash, hexadecimal.

    Raises:
        PlanMismatch: on every rank, naming the first rank that differs from rank 0 and the first line that differs.
    """
    text = json.dumps(list(description)).encode()
    digest = hashlib.sha256(text).digest()
    # hash and length travel together, so that the texts can follow in one more round without asking again
    rows = _gather_rows(transport, digest + struct.pack("<Q", len(text)), device, f"handshake ({subject})")
    if (rows == rows[0]).all():
        return digest.hex()
    longest = max(struct.unpack("<Q", row[32:].tobytes())[0] for row in rows)
    texts = _gather_rows(transport, text.ljust(longest), device, f"handshake ({subject}, texts)")
    lists = [json.loads(t.tobytes()) for t in texts]
    for rank, other in enumerate(lists):
        if other != lists[0]:
            raise PlanMismatch(_first_difference(subject, lists[0], rank, other))
    raise PlanMismatch(f"the {subject} hashes of the ranks differ although the texts are equal")  # pragma: no cover


def _first_difference(subject: str, mine: list[str], rank: int, other: list[str]) -> str:
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return (
                f"ranks disagree about the {subject}: rank 0 has [{a}], rank {rank} has [{b}]; "
                "run the same code and options on every rank"
            )
    longer, who = (mine, 0) if len(mine) > len(other) else (other, rank)
    extra = longer[min(len(mine), len(other))]
    return (
        f"ranks disagree about the {subject}: only rank {who} (compared with rank {rank if who == 0 else 0}) has [{extra}]; "
        "run the same code and options on every rank"
    )


def _gather_rows(transport: Transport, payload: bytes, device: torch.device, what: str) -> np.ndarray:
    """Every rank's payload, of one length everywhere: uint8 ``(ranks, len(payload))``."""
    return _begin_rows(transport, payload, device, what)().cpu().numpy()


def _begin_rows(transport: Transport, payload: bytes, device: torch.device, what: str) -> Callable[[], Tensor]:
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return _begin_share(transport, mine.to(transport.device(device)), what)
