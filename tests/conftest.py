"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Every rank imports its test module, and every program the package: from byte code, which takes a fraction of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Workers and tests share few cores, and thread pools of OpenMP do not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# The same examples in every run: a failure in one's own change is one's own. `--hypothesis-profile=explore` looks further.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and says so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


# What a Trainer or torchrun leaves in the environment of the process it ran in.
_LAUNCHER = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PL_GLOBAL_SEED",
)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A test that trains in this process leaves neither a process group nor its address to the next one."""
    before = {name: os.environ.get(name) for name in _LAUNCHER}
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _same_draws() -> Iterator[None]:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
    yield
