"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

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


@pytest.fixture(autouse=True)
def _same_draws() -> Iterator[None]:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
    yield
