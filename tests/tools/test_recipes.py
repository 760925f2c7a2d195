"""What the recipes name is there, and fits together. Their commands were run by hand; containers and clusters are not at hand here."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy

from lightning_onebit.lightning import OnebitStrategy

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_a_jobset_starts_as_many_processes_as_it_has_pods_and_finds_the_first() -> None:
    job = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    (replicated,) = job["spec"]["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"} and replicated["replicas"] == 1
    spec = replicated["template"]["spec"]
    assert set(spec) == {"completionMode", "parallelism", "completions", "backoffLimit", "template"}
    assert spec["completionMode"] == "Indexed", "JOB_COMPLETION_INDEX is the rank of a node"
    pods = spec["parallelism"]
    assert pods == spec["completions"]
    pod = spec["template"]["spec"]
    assert set(pod) == {"restartPolicy", "containers"} and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert set(container) == {"name", "image", "ports", "command", "resources"}
    shell, flag, text = container["command"]
    assert (shell, flag) == ("bash", "-c")
    words = shlex.split(text)
    options = dict(itertools.pairwise(words))
    assert options["--nnodes"] == options["--num-nodes"] == str(pods)
    assert options["--nproc-per-node"] == options["--devices"]
    assert options["--node-rank"] == "$JOB_COMPLETION_INDEX"
    name = job["metadata"]["name"]
    assert options["--master-addr"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(options["--master-port"]) == container["ports"][0]["containerPort"]
    assert any((ROOT / word).is_file() for word in words)


def test_the_image_is_built_of_what_there_is_and_runs_the_demo() -> None:
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    copied = [source for word, rest in steps if word == "COPY" for source in rest.split()[:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)
    package = {"pyproject.toml", "README.md", "LICENSE", "lightning_onebit"}
    assert package <= set(copied), "what pip needs to build the package"
    (command,) = [rest for word, rest in steps if word == "CMD"]
    assert (ROOT / yaml.safe_load(command)[1]).exists()
    (torch_version,) = re.findall(r"torch==([\d.]+)", " ".join(lines))
    assert f"torch=={torch_version}\n" in (ROOT / "constraints.txt").read_text()


def test_a_strategy_that_knows_its_devices_lends_them_to_this_one() -> None:
    """As ``RayDDPStrategy`` does, in ``examples/ray_train.py``."""

    class Rays(DDPStrategy):
        @property
        def root_device(self) -> torch.device:
            return torch.device("meta")

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            return {"num_replicas": 7, "rank": 3}

    class Both(OnebitStrategy, Rays):
        pass

    strategy = Both("onebit_adam")
    assert isinstance(strategy, Rays) and strategy.root_device == torch.device("meta")
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 7, "rank": 3}
    source = (EXAMPLES / "ray_train.py").read_text()
    assert "class RayOnebitStrategy(OnebitStrategy, RayDDPStrategy)" in source
