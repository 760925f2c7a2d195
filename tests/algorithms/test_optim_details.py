"""Details of the optimizers and of the exchange that mutations of the code had shown no other test to hold."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import grouped, run_ranks
from optim_support import equal, run_world

from lightning_onebit.algorithms import BinSGDM, LocalSteps, OnebitAdam, OnebitLamb
from lightning_onebit.algorithms.zero_one_adam import ZeroOneAdam
from lightning_onebit.comm import ByteLedger, Topology, Transport
from lightning_onebit.comm.transport import Pending
from lightning_onebit.engine import ExchangeOptions, Phase, engine

OPTIONS: Any = {
    "lr": 0.01,
    "freeze_step": 3,
    "_doubling": 1,
    "local_steps": LocalSteps(max_gap=8, double_every=1),
    "block_size": 32,
}


def thaw_while_sending(group: Any, rank: int, world: int) -> None:
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = OnebitAdam(
        [p], lr=0.01, exchange=ExchangeOptions(overlap="backward", block_size=64, process_group=group)
    )
    for t in range(3):
        optimizer.zero_grad()
        optimizer.begin_backward()
        (p * p).sum().backward()
        if t == 2:
            with pytest.raises(RuntimeError, match="an exchange is under way"):
                optimizer.thaw()
            assert optimizer.phase is Phase.COMPRESSED
        optimizer.step()
        if t == 0:
            optimizer.freeze()


def test_thaw_is_refused_while_an_exchange_is_under_way() -> None:
    run_world(thaw_while_sending, 2)


def test_a_timeout_given_with_the_ranks_bounds_the_exchange() -> None:
    def bound(group: Any, rank: int, world: int) -> timedelta:
        p = torch.nn.Parameter(torch.ones(40))
        optimizer = OnebitAdam([p], exchange=ExchangeOptions(timeout=1800.0))
        optimizer.configure_communication(group, timeout=timedelta(seconds=7))
        p.grad = torch.ones(40)
        optimizer.step()
        return optimizer._engine.link.transport.timeout

    assert run_world(bound, 2) == [timedelta(seconds=7)] * 2


def finishing_16_bit(group: Any, rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    optimizer = ZeroOneAdam([p], **grouped(OPTIONS, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    while optimizer.steps < 6 or not optimizer.mid_local:
        p.grad = torch.randn(70, generator=draws).bfloat16()
        optimizer.step()
    optimizer.synchronise()
    return p.detach().clone(), optimizer.state_dict()["state"][0]["master"]


def test_synchronise_shows_in_16_bit_weights_too() -> None:
    (first, master), (second, _) = run_world(finishing_16_bit, 2)
    assert equal(first, second) and equal(first, master.bfloat16())


def loaded_while_shown(group: Any, rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(70))
    optimizer = ZeroOneAdam([p], **grouped(OPTIONS, process_group=group))
    draws = torch.Generator().manual_seed(rank)

    def step() -> None:
        p.grad = torch.randn(70, generator=draws)
        optimizer.step()

    step()
    step()
    weights, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    while optimizer.steps < 6 or not optimizer.mid_local:
        step()
    optimizer.show_consensus()
    with torch.no_grad():
        p.copy_(weights)
    optimizer.load_state_dict(state)
    optimizer.show_local()
    return p.detach().clone(), weights


def test_weights_loaded_while_the_shared_model_is_shown_stay() -> None:
    for now, loaded in run_world(loaded_while_shown, 2):
        assert equal(now, loaded)


def test_after_a_load_failures_name_the_step_that_is_made() -> None:
    def named(group: Any, rank: int, world: int) -> int:
        p = torch.nn.Parameter(torch.ones(40))
        optimizer = OnebitAdam([p], exchange=ExchangeOptions(process_group=group))
        states = []
        for _ in range(3):
            p.grad = torch.ones(40)
            optimizer.step()
            states.append(optimizer.state_dict())
        optimizer.load_state_dict(states[0])
        return optimizer._engine.link.transport.step

    assert run_world(named, 2) == [2, 2]


def test_a_part_of_other_nodes_is_refused_by_name() -> None:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = OnebitAdam([p], freeze_step=1, exchange=ExchangeOptions(_alone=True))
    for _ in range(2):
        p.grad = torch.ones(40)
        optimizer.step()
    with pytest.raises(ValueError, match="ranks_per_node=2, this run has 1"):
        optimizer.load_residual_state_dict({**optimizer.residual_state_dict(), "ranks_per_node": 2})


def sits_out(group: Any, rank: int, world: int) -> Any:
    params = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(30))]
    optimizer = OnebitLamb(params, lr=0.01, freeze_step=2, exchange=ExchangeOptions(block_size=32, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    seen = []
    for t in range(6):
        for i, p in enumerate(params):
            p.grad = None if t == 5 and i == 1 else torch.randn(p.shape, generator=draws)
        optimizer.step()
        seen.append(optimizer.get_lamb_coeffs())
    return seen


def test_the_coefficient_of_what_sits_a_step_out_is_that_of_its_last_step() -> None:
    for seen in run_world(sits_out, 2):
        assert seen[5]["parameter 1"] == seen[4]["parameter 1"]
        assert seen[5]["parameter 0"] != seen[4]["parameter 0"]


def test_clipping_one_step_does_not_touch_the_next() -> None:
    def run(limit: Any) -> torch.Tensor:
        draws = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.ones(90))
        optimizer = OnebitAdam(
            [p], lr=0.01, freeze_step=1, max_grad_norm=limit, exchange=ExchangeOptions(_alone=True, block_size=32)
        )
        for norm in (0.5, 9.0, 0.5, 0.5):
            g = torch.randn(90, generator=draws)
            g *= norm / g.norm()
            p.grad = g * min(1.0, 1.0 / float(g.norm())) if limit is None else g
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(run(1.0), run(None), rtol=0, atol=1e-6)


def test_waiting_for_a_collective_is_communication_time() -> None:
    class Slow:
        def wait(self, timeout: Any) -> bool:
            time.sleep(0.05)
            return True

    transport = Transport(Topology.create(), ByteLedger())
    Pending(Slow(), "round", transport).wait()
    record = transport.ledger.close_step(step=1, phase="", dense=True, skipped=False, dense_bytes=0)
    assert 0.05 <= record.communication_seconds < 5


def _node_timeouts(rank: int, world: int) -> Any:
    members = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=15))
    if rank == 4:
        return None
    topology = Topology.create(members, ranks_per_node=2, timeout=timedelta(seconds=13))
    cpu = torch.device("cpu")
    return [g._get_backend(cpu).options._timeout.total_seconds() for g in (topology.intra_group, topology.inter_group)]


def test_groups_of_nodes_have_the_timeout_that_was_given() -> None:
    assert run_ranks(_node_timeouts, 5)[:4] == [[13.0, 13.0]] * 4


def test_steps_of_a_loaded_adamw_are_those_of_its_longest_trained_parameter() -> None:
    params = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)]
    adam = torch.optim.AdamW(params)
    for t in range(5):
        params[0].grad, params[1].grad = torch.ones(9), torch.ones(9) if t < 2 else None
        adam.step()
    optimizer = OnebitAdam(params)
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.steps == 5


def _nodes(group: Any, rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(256))
    exchange = ExchangeOptions(block_size=32, state_dtype="float32")
    optimizer = OnebitAdam([p], freeze_step=1, recipe="published", exchange=exchange)
    optimizer.configure_communication(group, ranks_per_node=2)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(4):
        p.grad = torch.randn(256, generator=draws)
        optimizer.step()
    norm = optimizer.residual_state_dict()["tensors"]["worker_residual"].norm()
    return optimizer.residual_ratio(), float(norm * 2**0.5 / optimizer.state_dict()["state"][0]["exp_avg"].norm())


def test_the_residual_ratio_of_a_hierarchical_rank_is_that_of_the_whole() -> None:
    for ratio, expected in run_world(_nodes, 4):
        assert ratio == pytest.approx(expected, rel=1e-5)


def _clipped(group: Any, rank: int, world: int, on_nonfinite: Any) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(90))
    exchange = ExchangeOptions(block_size=32, process_group=group, on_nonfinite=on_nonfinite)
    optimizer = OnebitAdam([p], freeze_step=2, max_grad_norm=0.5, exchange=exchange)
    draws = torch.Generator().manual_seed(rank)
    for t in range(6):
        p.grad = torch.randn(90, generator=draws) * 10.0**t
        optimizer.step()
    return p.detach()


def test_clipping_is_the_same_where_no_step_may_be_skipped() -> None:
    assert equal(run_world(_clipped, 2, "raise"), run_world(_clipped, 2, "skip"))


def _thawed(group: Any, rank: int, world: int) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(90))
    optimizer = OnebitAdam([p], lr=0.01, refresh="never", exchange=ExchangeOptions(block_size=32, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    for t in range(7):
        p.grad = torch.randn(90, generator=draws)
        optimizer.step()
        if t == 1:
            optimizer.freeze()
        if t == 3:
            optimizer.thaw()
    assert optimizer.ledger.last.dense
    return p.detach()


def test_after_a_thaw_all_gradients_are_averaged() -> None:
    first, second = run_world(_thawed, 2)
    assert equal(first, second)


def _early16(group: Any, rank: int, world: int, overlap: str) -> Any:
    p = torch.nn.Parameter(torch.ones(90, dtype=torch.bfloat16))
    optimizer = OnebitAdam(
        [p], lr=0.1, freeze_step=2, exchange=ExchangeOptions(block_size=32, overlap=overlap, process_group=group)
    )
    draws = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        optimizer.begin_backward()
        (p * torch.randn(90, generator=draws).bfloat16()).sum().backward()
        optimizer.step()
    return p.detach()


def test_an_overlapped_step_shows_in_16_bit_weights() -> None:
    assert equal(run_world(_early16, 2, "backward"), run_world(_early16, 2, "step"))


def _several(group: Any, rank: int, world: int) -> Any:
    params = [torch.nn.Parameter(torch.ones(40)) for _ in range(2)]
    optimizer = OnebitAdam(
        params, lr=0.1, freeze_step=1, exchange=ExchangeOptions(block_size=32, overlap="backward", process_group=group)
    )
    draws = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.begin_backward()
        for i in (0, 0, 1):  # the first one's gradient comes in two parts
            (params[i] * torch.randn(40, generator=draws)).sum().backward()
        optimizer.step()
    return [p.detach() for p in params]


def test_a_gradient_that_comes_in_two_parts_does_not_send_its_bucket_early() -> None:
    first, second = run_world(_several, 2)
    assert equal(first, second)


def _zeroed(group: Any, rank: int, world: int, look: bool) -> Any:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = OnebitAdam([p], lr=0.1, exchange=ExchangeOptions(process_group=group))
    for t in range(3):
        if look:
            p.grad = torch.full((40,), 9.0)
            optimizer.sync_gradients()
            optimizer.zero_grad()
        p.grad = torch.full((40,), 1.0 - 3.0 * rank * t)
        optimizer.step()
    return p.detach()


def test_zero_grad_forgets_what_was_averaged() -> None:
    assert equal(run_world(_zeroed, 2, True), run_world(_zeroed, 2, False))


def test_the_count_of_skipped_steps_is_saved() -> None:
    p = torch.nn.Parameter(torch.ones(9))
    optimizer, resumed = OnebitAdam([p]), OnebitAdam([p])
    for value in (1.0, float("nan"), 1.0):
        p.grad = torch.full((9,), value)
        optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.skipped_steps == optimizer.skipped_steps == 1


def _idle(group: Any, rank: int, world: int) -> Any:
    params = [torch.nn.Parameter(torch.ones(70)), torch.nn.Parameter(torch.ones(50))]
    optimizer = ZeroOneAdam(
        params, **grouped(OPTIONS, local_steps=LocalSteps(max_gap=4, double_every=1), process_group=group)
    )
    draws = torch.Generator().manual_seed(rank)

    def step(absent: bool) -> None:
        for i, p in enumerate(params):
            p.grad = None if absent and i == 1 else torch.randn(p.shape, generator=draws)
        optimizer.step()

    while optimizer.steps < 12 or optimizer.mid_local:
        step(False)
    before = optimizer.state_dict()["state"][1]
    step(True)
    while optimizer.mid_local:
        step(True)
    after = optimizer.state_dict()["state"][1]
    return equal(before["exp_avg"], after["exp_avg"])


def test_the_momentum_of_what_sits_a_gap_out_stays() -> None:
    assert run_world(_idle, 2) == [True, True]


def _skips(group: Any, rank: int, world: int, overlap: str) -> int:
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = OnebitAdam(
        [p], freeze_step=1, exchange=ExchangeOptions(process_group=group, overlap=overlap, block_size=32)
    )
    for _ in range(4):
        p.grad = torch.ones(100)
        optimizer.step()
        optimizer.skip_step()
    return optimizer.skipped_steps


def test_skips_are_counted_in_a_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_SKIPS", 2)
    assert run_world(_skips, 2, "step") == run_world(_skips, 2, "backward") == [4, 4]


def _binsgdm_idle(group: Any, rank: int, world: int) -> Any:
    params = [torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))]
    optimizer = BinSGDM(params, exchange=ExchangeOptions(block_size=32, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    kept = []
    for t in range(4):
        for i, p in enumerate(params):
            p.grad = None if t == 3 and i == 1 else torch.randn(64, generator=draws)
        optimizer.step()
        kept.append(optimizer.residual_state_dict()["tensors"]["server_residual"].clone())
    return kept[2], kept[3]


def test_the_server_residual_of_what_sits_a_step_out_stays() -> None:
    # blocks lie in reverse parameter order: rank 0's chunk is that of the parameter that sits out
    (before, after), (other, changed) = run_world(_binsgdm_idle, 2)
    assert equal(before, after) and not equal(other, changed)


def _lamb_idle(group: Any, rank: int, world: int) -> Any:
    params = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(30))]
    optimizer = OnebitLamb(params, lr=0.01, freeze_step=2, exchange=ExchangeOptions(block_size=32, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    seen = []
    for t in range(7):
        for i, p in enumerate(params):
            p.grad = None if t == 6 and i == 1 else torch.randn(p.shape, generator=draws) * (3 if t > 1 else 1)
        optimizer.step()
        seen.append(optimizer.state_dict()["onebit"]["last_factor"][1])
    return seen


def test_the_factor_of_what_sits_a_step_out_stays() -> None:
    for seen in run_world(_lamb_idle, 2):
        assert seen[5] != 1.0 and seen[6] == seen[5]


def test_a_thaw_forgets_the_fresh_second_moments() -> None:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = OnebitLamb([p], exchange=ExchangeOptions(block_size=32, _alone=True))
    for t in range(3):
        p.grad = torch.ones(40)
        optimizer.step()
        if t == 0:
            optimizer.freeze()
    optimizer.thaw()
    assert set(optimizer.state_dict()["state"][0]) == {"exp_avg", "exp_avg_sq", "step"}


def _refreshing16(group: Any, rank: int, world: int) -> bool:
    p = torch.nn.Parameter(torch.ones(90, dtype=torch.bfloat16))
    optimizer = OnebitAdam(
        [p], lr=0.1, freeze_step=2, refresh=3, exchange=ExchangeOptions(block_size=32, process_group=group)
    )
    draws = torch.Generator().manual_seed(rank)
    same = []
    for _ in range(9):
        p.grad = torch.randn(90, generator=draws).bfloat16()
        before = p.detach().clone()
        optimizer.step()
        same.append(equal(before, p.detach()))
    return any(same)


def test_dense_steps_of_a_refresh_show_in_16_bit_weights() -> None:
    assert run_world(_refreshing16, 2) == [False, False]


def _resumed(group: Any, rank: int, world: int) -> Any:
    p, q = (torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = ZeroOneAdam([p], **grouped(OPTIONS, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    while optimizer.steps < 6 or not optimizer.mid_local:
        p.grad = torch.randn(70, generator=draws).bfloat16()
        optimizer.step()
    resumed = ZeroOneAdam([q], **grouped(OPTIONS, process_group=group))
    with optimizer.consensus(), torch.no_grad():
        q.copy_(p)
        state, part = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.residual_state_dict())
    resumed.load_state_dict(state)
    resumed.load_residual_state_dict(part)
    return p.detach(), q.detach()


def test_a_ranks_own_16_bit_weights_are_resumed() -> None:
    for own, again in run_world(_resumed, 2):
        assert equal(own, again)


def _released(group: Any, rank: int, world: int) -> Any:
    p = torch.nn.Parameter(torch.ones(70))
    optimizer = ZeroOneAdam([p], **grouped(OPTIONS, process_group=group))
    draws = torch.Generator().manual_seed(rank)
    while optimizer.steps < 6 or not optimizer.mid_local:
        p.grad = torch.randn(70, generator=draws)
        optimizer.step()
    optimizer.show_consensus()
    optimizer.release_communication()
    return p.untyped_storage().nbytes()


def test_a_released_optimizer_leaves_parameters_their_own_memory() -> None:
    assert run_world(_released, 2) == [70 * 4] * 2


def test_subtractions_are_pending_from_step_to_step_and_nobody_sees_it() -> None:
    """Compiled kernels leave a full block's subtraction to the next step, with fp32 state; who asks for residuals gets the reference's."""

    def run(kernels: str, idle: bool) -> tuple[list[Any], list[int]]:
        params = [torch.nn.Parameter(torch.ones(5 * 64)), torch.nn.Parameter(torch.ones(64 + 30))]
        exchange = ExchangeOptions(block_size=64, kernels=kernels, state_dtype="float32", _alone=True)
        optimizer = OnebitAdam(params, lr=0.01, freeze_step=1, refresh="never", exchange=exchange)
        draws = torch.Generator().manual_seed(4)
        seen, pending = [], []
        for t in range(6):
            for i, p in enumerate(params):
                p.grad = None if idle and t == 3 and i == 0 else torch.randn(p.shape, generator=draws)
            optimizer.step()
            if t:
                pending.append(_pending_blocks(optimizer))
            if t in (2, 3, 5):
                seen += [value.clone() for value in optimizer.residual_state_dict()["tensors"].values()]
                seen.append(torch.tensor(optimizer.residual_ratio()))
        return [*seen, *params], pending

    for idle in (False, True):
        (expected, never), (mine, pending) = run("reference", idle), run("cpu", idle)
        assert equal(mine, expected)
        assert never == [0] * 5
        # six full blocks on each side, and one with padding, which never is; nothing is of what sits a step out after a look
        assert pending == [12, 12, 2 if idle else 12, 12, 12]


def _pending_blocks(optimizer: Any) -> int:
    residuals = (optimizer._engine.kept.worker, optimizer._engine.kept.server)
    return sum(int((residual.pending != 0).sum()) for residual in residuals if residual.pending is not None)


# ----- memory formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [OnebitAdam, OnebitLamb, ZeroOneAdam, BinSGDM])
def test_residuals_of_another_memory_format_are_refused(algorithm: Any) -> None:
    """Blocks are cut in memory order, so a rank's own state of a channels_last model fits no contiguous one."""

    def trained(memory_format: torch.memory_format) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(4, 6, 3).to(memory_format=memory_format)
        freeze = {} if algorithm is BinSGDM else {"freeze_step": 2}
        exchange = ExchangeOptions(block_size=32, _alone=True)
        optimizer = algorithm(model.parameters(), lr=1e-2, exchange=exchange, **freeze)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(2, 4, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    _, saved = trained(torch.channels_last)
    residuals = saved.residual_state_dict()
    _, alike = trained(torch.channels_last)
    alike.load_state_dict(saved.state_dict())
    alike.load_residual_state_dict(residuals)
    _, other = trained(torch.contiguous_format)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="strides"):
        other.load_residual_state_dict(residuals)
