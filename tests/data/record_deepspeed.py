"""Records small trajectories of DeepSpeed's 1-bit optimizers, the last release that had them (0.19.6), on two CPU processes.

The optimizers and their NCCL backend run unmodified; only what needs a GPU is replaced: CuPy by NumPy (the same ``packbits``), the 0-d
scale by a 1-d one in ``all_gather`` (gloo refuses to mix the two), and argument orders of ``add_`` and ``addcmul_`` that torch has dropped.

    pip download deepspeed==0.19.6 --no-deps --no-binary :all: && tar xzf deepspeed-0.19.6.tar.gz
    pip install hjson py-cpuinfo msgpack pydantic einops psutil tqdm
    python tests/data/record_deepspeed.py deepspeed-0.19.6 > tests/data/deepspeed_0_19_6.json

The trajectories are chosen so that DeepSpeed's granularity (one worker scale per tensor or fused buffer, one server scale per rank's
chunk) and blocks of half a buffer give the same numbers: the second half of every gradient is the mirror of the first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import sys
import tempfile
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2

#: optimizer class, its options, shapes of the parameters, steps, and how often the learning rate changes
CASES: dict[str, dict[str, Any]] = {
    "onebit_adam": {
        "module": "adam",
        "class": "OnebitAdam",
        "options": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "freeze_step": 5},
        "sizes": [64],
        "mirror": "within",
        "steps": 14,
    },
    "onebit_lamb": {
        "module": "lamb",
        "class": "OnebitLamb",
        "options": {
            "lr": 0.02,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.05,
            "freeze_step": 7,
            "max_coeff": 2.0,
            "min_coeff": 0.2,
            "coeff_beta": 0.7,
            "factor_max": 1.3,
            "factor_min": 0.8,
            "factor_threshold": 0.1,
        },
        "sizes": [32, 32],
        "mirror": "across",
        "steps": 18,
    },
    "zero_one_adam": {
        "module": "zoadam",
        "class": "ZeroOneAdam",
        "options": {
            "lr": 0.01,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "var_freeze_step": 3,
            "var_update_scaler": 16,
            "local_step_scaler": 4,
            "local_step_clipper": 4,
        },
        "sizes": [64],
        "mirror": "within",
        "steps": 19,
    },
}


def gradient(case: str, step: int, rank: int, index: int) -> np.ndarray:
    """Local gradient of a tensor, fp32; RandomState's stream is frozen for ever."""
    spec = CASES[case]

    def draw(*seed: int) -> np.ndarray:
        return np.random.RandomState(list(seed)).standard_normal(32)

    tensor = 0 if spec["mirror"] == "across" else index
    # the size of gradients shrinks slowly, so that fresh second moments leave the frozen ones
    size = 0.9**step
    half = (size * (0.5 * draw(1, tensor) + draw(2, step, rank, tensor))).astype(np.float32)
    if spec["mirror"] == "across":  # the second tensor: mirrored and twice as large
        return half if index == 0 else np.float32(-2) * half
    return np.concatenate([half, -half])


def start(case: str) -> list[np.ndarray]:
    """Initial weights, fp32: not mirrored, and of different size per tensor."""
    sizes = CASES[case]["sizes"]
    return [
        ((1 + 3 * index) * np.random.RandomState([3, index]).standard_normal(size)).astype(np.float32)
        for index, size in enumerate(sizes)
    ]


def _fake_cupy() -> types.ModuleType:
    cupy = types.ModuleType("cupy")

    class Device:
        def __init__(self, index: int) -> None:
            pass

        def use(self) -> None:
            pass

    stream = types.SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda: stream)  # type: ignore[attr-defined]
    for name in ("packbits", "unpackbits", "split", "zeros"):
        setattr(cupy, name, getattr(np, name))
    return cupy


def _accept_old_argument_orders() -> None:
    add, addcmul = torch.Tensor.add_, torch.Tensor.addcmul_

    def add_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 2:
            return add(self, args[1], alpha=args[0])
        return add(self, *args, **kwargs)

    def addcmul_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 3:
            return addcmul(self, args[1], args[2], value=args[0])
        return addcmul(self, *args, **kwargs)

    torch.Tensor.add_, torch.Tensor.addcmul_ = add_, addcmul_  # type: ignore[method-assign, assignment]


def _worker(rank: int, source: str, store: str, case: str, out: Any) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    faulthandler.dump_traceback_later(100, exit=True)
    sys.path.insert(0, source)
    sys.modules["cupy"] = _fake_cupy()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _accept_old_argument_orders()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    with contextlib.redirect_stdout(io.StringIO()):
        out.put((rank, _run(rank, case)))
    dist.barrier()


def _run(rank: int, case: str) -> list[list[list[float]]]:
    import deepspeed.comm as ds_comm

    ds_comm.init_distributed(dist_backend="gloo", verbose=False, dist_init_required=False)
    gather = ds_comm.all_gather
    backend = importlib.import_module("deepspeed.runtime.comm.nccl")
    packer = importlib.import_module("deepspeed.runtime.compression.cupy").CupyBackend
    packer.torch2cupy = lambda self, tensor: tensor.numpy()
    packer.cupy2torch = lambda self, array: torch.from_numpy(array)
    backend.dist = types.SimpleNamespace(
        **{n: getattr(ds_comm, n) for n in ("new_group", "get_world_size", "get_rank", "all_to_all_single")},
        all_gather=lambda outs, tensor, group: gather(outs, tensor.reshape(outs[0].shape), group=group),
    )
    spec = CASES[case]
    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{spec['module']}")
    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    params = [torch.nn.Parameter(torch.from_numpy(x)) for x in start(case)]
    optimizer = getattr(module, spec["class"])(params, engine, bias_correction=False, **spec["options"])
    trajectory = []
    for step in range(spec["steps"] + 1):
        for index, p in enumerate(params):
            # step 0 is the one that DeepSpeed throws away
            p.grad = torch.from_numpy(gradient(case, max(step, 1), rank, index).copy())
            if engine.enable_backward_allreduce:  # what the engine does in backward
                dist.all_reduce(p.grad)
                p.grad.mul_(1 / WORLD)
        optimizer.step()
        if step:
            # every other weight, with the nine digits that fp32 has
            trajectory.append([[float(f"{x:.9g}") for x in p.detach()[::2].tolist()] for p in params])
    return trajectory


def main(source: str) -> None:
    """Writes the recording of all cases to the standard output."""
    context = mp.get_context("spawn")
    recorded: dict[str, Any] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            out = context.Queue()
            ranks = [
                context.Process(target=_worker, args=(rank, source, f"{directory}/store", case, out))
                for rank in range(WORLD)
            ]
            for process in ranks:
                process.start()
            results = dict(out.get(timeout=120) for _ in ranks)
            for process in ranks:
                process.join(60)
        recorded[case] = {"weights_of_rank_0": results[0], "ranks_equal": results[0] == results[1]}
        if results[0] != results[1]:  # local steps
            recorded[case]["weights_of_rank_1"] = results[1]
    print(json.dumps(recorded).replace("]], [[", "]],\n [["))


if __name__ == "__main__":
    main(sys.argv[1])
