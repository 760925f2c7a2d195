"""The documentation builds without a warning, every page is reachable, and its code runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import run_ranks
from lightning_support import enter

from lightning_onebit.engine import OnebitOptimizer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# What a page leaves to the reader: a model, batches. Everything else a page says itself.
BEFORE = {
    "metrics.md": "import torch\nfrom lightning_onebit import OnebitAdam\ntorch.manual_seed(0)\n"
    + "model = torch.nn.Linear(8, 2)\noptimizer = OnebitAdam(model.parameters())\nbatches = [torch.randn(4, 8)] * 3\n"
    + "loss = lambda batch: model(batch).square().mean()\n",
    "sharded.md": "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(64, 64)\n"
    + "device, nodes, ranks_per_node = 'cpu', 2, 1\n",
    "transformers.md": "import os\nimport torch\nimport torch.distributed as dist\n"
    + "os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', ACCELERATE_USE_CPU='true')\n"
    + "data = [{'input_ids': torch.arange(16), 'labels': torch.arange(16)}] * 32\n",
}
# What else the code of a page makes possible.
AFTER = {
    "sharded.md": """
optimizer = ob.OnebitAdam(model.parameters(), lr=1e-3, freeze_step=2, exchange=exchange)
for _ in range(3):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(type(next(model.parameters())).__name__, optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps)
""",
    "contributing.md": """
import jsonargparse
from lightning_onebit.lightning import OnebitStrategy
from lightning_onebit.tools.bench import measure_link
from lightning_onebit.tools.plan import Cluster, Job, predict

strategy = OnebitStrategy("onebit_lion", momentum=0.95)
made = strategy.optimizer(model.parameters(), lr=0.01)
assert isinstance(made, OnebitLion) and made.options.momentum == 0.95
assert predict(Cluster(gpus=64, bandwidth=1e9), Job(params=10**8, compute=0.1), "onebit_lion").dense_share == 0
assert measure_link(4000, algorithm="onebit_lion", repeats=1).exchange_bytes < 4000
parser = jsonargparse.ArgumentParser()
parser.add_class_arguments(OnebitStrategy, "strategy")
given = parser.parse_args(["--strategy.algorithm=onebit_lion", "--strategy.memory=0.9"])
assert parser.instantiate_classes(given).strategy.optimizer(model.parameters(), lr=0.01).options.memory == 0.9
""",
}
# What a page's code prints if it does what the page says.
PRINTED = {
    "loops.md": r"compressed 2 3\n",
    "how-it-works.md": r"step 2: \w+, [\d,]+ bytes in \d+ collectives\nstep 3: compressed, [\d,]+ bytes in 2 ",
    "freeze.md": r"15%: 5\.7x, 4\.9x\n20%: 4\.4x, 4\.0x",
    "transformers.md": r"3 compressed steps",
    "sharded.md": r"DTensor 2 1\n",
    "recipes.md": r"onebit/total_ratio: [\d.]+",
    "contributing.md": r"loss [01]\.\d+ after 240 compressed steps, ratio [2-9]\.\d",
}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((DOCS / page).read_text())


def run_page(rank: int, world: int, page: str, folder: str) -> str:
    enter(rank)
    os.chdir(folder)
    import matplotlib

    matplotlib.use("Agg")
    printed = io.StringIO()
    # a script: names of one block are known to the next
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate([BEFORE.get(page, ""), *blocks(page), AFTER.get(page, "")]):
            exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), names)
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_code_of_a_page_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    if page == "transformers.md":
        for name in ("transformers", "accelerate"):
            pytest.importorskip(name, reason=f"{name} is not installed")
    for printed in run_ranks(run_page, 2, page, str(tmp_path), timeout=120):
        assert re.search(PRINTED.get(page, ""), printed), printed


def test_what_is_said_about_a_page_is_said_about_one_that_has_code() -> None:
    for page in {*BEFORE, *PRINTED}:
        assert blocks(page), f"{page} has no code any more"
    assert sum(len(blocks(page)) for page in PAGES) >= 10


def test_worked_example_of_an_algorithm_has_less_than_80_lines() -> None:
    assert len(blocks("contributing.md")[0].splitlines()) < 80


def test_gaps_that_pages_quote_are_rows_of_the_study() -> None:
    """Two decimals and a per cent sign say that a number is a row's, with its standard error if it is of several pairs."""
    path = ROOT / "benchmarks" / "results" / "rules.json"
    files = [file for file in (path, path.with_name("freeze_steps.json")) if file.exists()]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    measured = [row[key] for row in rows for key in ("gap", "against_default") if key in row]
    if (frontier := path.with_name("frontier.json")).exists():
        measured += [
            (row["gap"], row["gap_error"]) for row in json.loads(frontier.read_text())["rows"] if row["gap"] is not None
        ]
    known = {f"{mean:+.2f}%" + (f" ± {error:.2f}%" if error is not None else "") for mean, error in measured}
    quoted = 0
    for page in [*(DOCS / page for page in PAGES), ROOT / "README.md"]:
        gaps = re.findall(r"[+-]\d+\.\d\d%(?: ± \d+\.\d\d%)?", page.read_text())
        assert not [gap for gap in gaps if gap not in known], page
        quoted += len(gaps)
    assert quoted or not path.exists(), "no page quotes the study"


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:examples|benchmarks|tests)/[\w/]+\.(?:py|sh|sbatch|yaml))", (DOCS / page).read_text()
        ):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_results_that_pages_name_are_kept_and_every_plot_has_its_numbers() -> None:
    results = ROOT / "benchmarks" / "results"
    named = {
        name
        for page in [*(DOCS / page for page in PAGES), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
        for name in re.findall(r"`(\w*(?:kernels|step|exchange|network|rules)[\w*]*\.jsonl?)`", page.read_text())
    }
    assert len(named) >= 8 and not [name for name in named if not list(results.glob(name))]
    # several files are drawn into the plot of docs/performance.md
    plots = {plot.stem for plot in results.glob("*.png")} - {"slow_network_zen5"}
    numbers = {file.stem for file in results.glob("*.json")}
    # those of a task are drawn from its lines among all runs
    if tasks := {json.loads(line)["task"] for line in (results / "frontier_runs.jsonl").read_text().splitlines()}:
        numbers |= {f"frontier_{task}_{axis}" for task in tasks for axis in ("bytes", "time")}
    assert plots <= numbers


def _pages_in(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        nav = list(nav.values())
    assert isinstance(nav, list)
    return [page for item in nav for page in _pages_in(item)]


def test_every_page_is_in_the_navigation() -> None:
    assert sorted(_pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == PAGES


def build(site: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr[-3000:]
    for page in PAGES:
        assert (tmp_path / page).with_suffix(".html").exists(), page
    reference = (tmp_path / "api" / "optimizers.html").read_text()
    assert "decay of the first and second moment" in reference, "docstrings are not in the reference"
    common = [cls for cls in OnebitOptimizer.__mro__ if cls.__module__.startswith("lightning_onebit")]
    public = {
        name
        for cls in common
        for name, value in vars(cls).items()
        if name[0] != "_" and not name.isupper() and getattr(value, "__doc__", None)
    }
    assert {"step", "state_dict", "phase"} <= public
    for name in public - {"algorithm", "local_steps", "options_class", "rule_class"}:
        assert f'id="lightning_onebit.engine.OnebitOptimizer.{name}"' in reference, name
    # images outside of docs/ are in the site, where the page looks for them
    page = (tmp_path / "performance.html").read_text()
    images = re.findall(r'src="(repository/[^"]+\.png)"', page)
    assert images and all((tmp_path / image).stat().st_size > 1000 for image in images)
    # opened from a folder, without network: nothing is fetched from elsewhere
    for path in tmp_path.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link)\b[^>]*(?:src|href)="(https?:[^"]+)', path.read_text())
        assert not [address for address in fetched if "canonical" not in address], path


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    del config["nav"], config["hooks"], config["plugins"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
