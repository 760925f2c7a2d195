"""The study of classifiers trains what it says, and refuses folders that are not its data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import classify

TINY = replace(classify.TASKS["digits"], rows=2, steps=40, rise=4, warm_up=20, width=4, layers=8)


def toy_data(task: object, messages: object) -> classify.Data:
    """Ten bars, of which each class has one place."""
    classes = torch.arange(100) % 10
    images = torch.zeros(100, 1, 10, 10)
    images[torch.arange(100), 0, classes] = 1
    return images, classes, torch.arange(100) < 20


def test_the_residual_net_has_the_size_of_its_paper() -> None:
    net = classify.resnet(classify.TASKS["digits"], 0)
    assert sum(p.numel() for p in net.parameters()) == 269_434  # 0.27 million
    assert len([module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]) == 20
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", classify.NAMES["digits"])
def test_every_method_learns_and_begins_with_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify, "data_of", toy_data)
    lr = {"sgd": 0.1, "onebit_sgd": 0.1}.get(name, 0.01)
    row = classify.run_one(TINY, Path(), name, lr, 0, "cpu")
    assert "error" not in row
    assert row["accuracy"] > 0.5  # chance: 0.1
    assert 0.1 < row["bytes"] <= 6.1
    assert classify.run_one(TINY, Path(), name, lr, 0, "cpu")["loss"] == row["loss"]


def test_an_epoch_sees_every_row_once_and_the_next_one_in_another_order() -> None:
    first = torch.cat([classify._batch(100, 20, 0, step) for step in range(1, 6)])
    second = torch.cat([classify._batch(100, 20, 0, step) for step in range(6, 11)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert first.tolist() != second.tolist()


def test_messages_are_read_without_headers_and_mark_up(tmp_path: Path) -> None:
    for folder, text in (("spam-1", "Subject: x\n\n<b>Buy</b> now"), ("easy-ham-2", "From: y\n\nHello\n\nthere")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "1.json").write_text(json.dumps({"text": text}))
    assert classify._spam(tmp_path) == (["Hello\n\nthere", " Buy  now"], [0, 1])
    with pytest.raises(FileNotFoundError, match="--messages"):
        classify._spam(tmp_path / "data")


def test_seeds_follow_at_the_best_rate() -> None:
    task, rates = classify.TASKS["news"], (1e-4, 2e-4, 4e-4)
    runs = [{"method": "adamw", "lr": lr, "seed": 0, "loss": abs(lr - 2e-4)} for lr in rates]
    assert classify.wanted(task, "^adamw$", runs) == [("adamw", 2e-4, seed) for seed in classify.SEEDS]
    assert classify.wanted(task, "^adamw$", []) == [("adamw", lr, 0) for lr in (2e-4, 1e-4, 4e-4)]
