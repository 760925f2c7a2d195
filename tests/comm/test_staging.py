"""Device tensors through a backend for host memory, with a device that the test pretends: its copies complete when it says so.

What a real device adds (pinned memory, streams, events) is in test_gpu.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import counting, run_ranks
from torch import Tensor

from lightning_onebit import ExchangeOptions, OnebitAdam
from lightning_onebit.comm import ByteLedger, Reducer, Topology, Transport, control_round
from lightning_onebit.comm import transport as transport_module
from lightning_onebit.comm.transport import _backend


class FakeCopy:
    """A copy that holds garbage until it is waited for or has been asked for often enough."""

    def __init__(self, stager: FakeStager, source: Tensor) -> None:
        self.host = torch.full_like(source, 1, memory_format=torch.contiguous_format).mul_(77).view(source.shape)
        self._value: Tensor | None = source.clone()  # what the device holds now: later operations come after the copy
        self._stager = stager
        self._asked = 0

    def _complete(self) -> None:
        if self._value is not None:
            self.host.copy_(self._value)
            self._value = None

    def ready(self) -> bool:
        self._asked += 1
        if self._asked > self._stager.patience:
            self._complete()
        return self._value is None

    def wait(self) -> None:
        if self._value is not None:
            self._stager.waits += 1
        self._complete()


class FakeStager:
    """A device whose tensors are those that are not on the list of host tensors.

    Args:
        patience: how often a copy says that it is not complete.
    """

    def __init__(self, patience: int = 10**9) -> None:
        self.patience = patience
        self.waits = self.copies = self.returned = 0

    def handles(self, tensor: Tensor) -> bool:
        return tensor.numel() > 40  # the control rounds of these tests are smaller, as on a GPU they are host tensors

    def to_host(self, tensor: Tensor) -> FakeCopy:
        self.copies += 1
        return FakeCopy(self, tensor)

    def host_like(self, tensor: Tensor) -> Tensor:
        return torch.full(tensor.shape, 66, dtype=tensor.dtype)

    def to_device(self, host: Tensor, tensor: Tensor) -> None:
        self.returned += 1
        tensor.copy_(host)


def transport_with(stager: FakeStager, timeout: float = 30.0) -> Transport:
    from datetime import timedelta

    return Transport(Topology.create(), ByteLedger(), timedelta(seconds=timeout), stager=stager)


# ----- collectives --------------------------------------------------------------------------------------------------------------


def _collectives(rank: int, world: int, patience: int) -> None:
    stager = FakeStager(patience)
    transport = transport_with(stager)
    group = transport.topology.group
    mine = torch.arange(world * 50).view(world, 50) + 1000 * rank
    received, gathered = torch.zeros_like(mine), torch.zeros_like(mine)
    total = torch.full((60,), float(rank + 1))
    exchange = transport.all_to_all(received, mine, group, what="exchange", link="inter")
    gather = transport.all_gather(gathered, mine[rank], group, what="gather", link="inter")
    reduce = transport.all_reduce(total, what="reduce")
    # the device goes on: what it does to the inputs afterwards must not travel
    for pending in (reduce, exchange, gather):  # waited for in another order than issued
        pending.wait()
        pending.wait()  # waiting twice is allowed
    for other in range(world):
        assert torch.equal(received[other], torch.arange(rank * 50, rank * 50 + 50) + 1000 * other)
        assert torch.equal(gathered[other], torch.arange(other * 50, other * 50 + 50) + 1000 * other)
    assert total.tolist() == [world * (world + 1) / 2] * 60
    assert stager.copies == 3 and stager.returned == 3
    assert transport.ledger._open.collectives == 3


@pytest.mark.parametrize("patience", [0, 1, 10**9])
def test_collectives_carry_what_the_device_held(patience: int) -> None:
    run_ranks(_collectives, 3, patience)


def _mixed_order(rank: int, world: int) -> list[str]:
    """Ranks whose copies complete at different times, with host tensors in between."""
    transport = transport_with(FakeStager(patience=0 if rank == 0 else 10**9))
    group = transport.topology.group
    device, host = torch.full((50,), float(rank)), torch.full((5,), 10.0 + rank)
    gathered, small = torch.zeros(world, 50), torch.zeros(world, 5)
    with counting() as counted:
        first = transport.all_reduce(device, what="staged")
        control = control_round(transport, 1.0, 0, [True], torch.device("cpu"))
        second = transport.all_gather(gathered, device.clone(), group, what="staged too", link="inter")
        third = transport.all_gather(small, host, group, what="host", link="inter")
        third.wait(), second.wait(), first.wait()
    assert control.ranks == world and small[:, 0].tolist() == [10.0 + r for r in range(world)]
    assert device.tolist() == [sum(range(world))] * 50 and gathered[:, 0].tolist() == [float(r) for r in range(world)]
    return [seen.op for seen in counted.seen]


def test_all_ranks_issue_in_the_same_order_whatever_has_arrived() -> None:
    orders = run_ranks(_mixed_order, 2)
    assert orders[0] == orders[1] == ["all_reduce", "all_gather", "all_gather", "all_gather"]


def _no_early_wait(rank: int, world: int) -> None:
    stager = FakeStager(patience=2)
    transport = transport_with(stager)
    pendings = []
    with counting() as counted:
        for index in range(4):
            pendings.append(transport.all_reduce(torch.full((50,), float(index)), what=f"bucket {index}"))
        # each launch asked the copies before it; none was waited for
        assert stager.waits == 0
        assert 0 < len(counted.seen) < 4
        pendings[0].wait()
        # waiting for one issues all, so that the network does not idle meanwhile
        assert len(counted.seen) == 4 and stager.waits > 0
    for pending in pendings[1:]:
        pending.wait()


def test_launching_waits_for_no_copy_and_waiting_starts_all() -> None:
    run_ranks(_no_early_wait, 2)


def _missing_rank(rank: int, world: int) -> str:
    transport = transport_with(FakeStager(), timeout=1.0)
    if rank == 1:
        return ""
    try:
        transport.all_reduce(torch.ones(50), what="dense all-reduce of bucket 7").wait()
    except transport_module.CollectiveTimeout as error:
        return str(error)
    return "no error"


def test_a_missing_rank_ends_in_a_timeout_that_names_the_collective() -> None:
    message = run_ranks(_missing_rank, 2, timeout=20)[0]
    assert "rank 0 of 2" in message and "dense all-reduce of bucket 7" in message


# ----- reducer and optimizer ----------------------------------------------------------------------------------------------------


def _reducer(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 40), torch.nn.Linear(40, 3))
    stager = FakeStager(patience=1)
    reducer = Reducer(list(model.parameters()), transport_with(stager), bucket_bytes=4096)
    reducer.arm()
    x = torch.randn(8, 60, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    assert all(reducer.finish())
    expected = torch.zeros(sum(p.numel() for p in model.parameters()))
    for other in range(world):
        twin = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 40), torch.nn.Linear(40, 3))
        twin.load_state_dict(model.state_dict())
        twin(torch.randn(8, 60, generator=torch.Generator().manual_seed(other))).square().mean().backward()
        expected += torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    ours = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, expected / world)
    assert stager.returned == stager.copies > 1


def test_dense_averaging_goes_through_the_stager() -> None:
    run_ranks(_reducer, 2)


def _train(rank: int, world: int, staged: bool) -> tuple[list[Tensor], int]:
    stagers: list[FakeStager] = []

    def make() -> FakeStager:
        stagers.append(FakeStager(patience=1))
        return stagers[-1]

    if staged:
        transport_module.CudaStager = make  # type: ignore[assignment, misc]
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.Tanh(), torch.nn.Linear(70, 20))
    exchange = ExchangeOptions(block_size=64, bucket_mb=0.004)
    optimizer = OnebitAdam(model.parameters(), lr=0.01, freeze_step=3, exchange=exchange)
    data = torch.Generator().manual_seed(rank)
    for _ in range(8):
        optimizer.zero_grad()
        optimizer.begin_backward()
        model(torch.randn(16, 33, generator=data)).square().mean().backward()
        optimizer.step()
    assert optimizer.ledger.compressed_steps == 5
    return [p.detach().clone() for p in model.parameters()], sum(s.returned for s in stagers)


def test_training_is_the_same_bit_for_bit_with_and_without_staging() -> None:
    plain, staged = run_ranks(_train, 2, False), run_ranks(_train, 2, True)
    assert plain[0][1] == 0 and staged[0][1] > 8
    for (ours, _), (theirs, _) in zip(plain, staged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ----- which backend serves a tensor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:gloo,mps:gloo", "gloo", "gloo"),
        ("cuda:nccl", None, "nccl"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cpu:gloo", "gloo", None),
    ],
)
def test_backends_are_told_apart_by_device(monkeypatch: pytest.MonkeyPatch, config: str, cpu: Any, cuda: Any) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert (_backend(None, "cpu"), _backend(None, "cuda")) == (cpu, cuda)


def test_cuda_tensors_alone_are_staged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not transport_module.CudaStager().handles(torch.zeros(3))
    assert transport_module.CudaStager().handles(_Cuda())  # type: ignore[arg-type]


class _Cuda:
    is_cuda = True
