"""What is installed is complete, and the texts around the code say what the code does."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_string
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import lightning_onebit as ob
from lightning_onebit.engine.options import as_parameters
from lightning_onebit.strategy.keywords import DDP_KEYWORDS
from lightning_onebit.strategy.registry import ALGORITHMS
from lightning_onebit.strategy.trainer import OnebitMixin

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


# ----- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "build")
    shutil.copytree(ROOT / "lightning_onebit", source / "lightning_onebit", ignore=unwanted)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(source)], folder)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def test_wheel_holds_every_source_and_nothing_else(wheel: Path) -> None:
    shipped = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lightning_onebit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert "lightning_onebit/py.typed" in shipped
    assert any(name.endswith(".cpp") for name in shipped), "the C++ kernels are not where the package data looks"
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert held == shipped


@pytest.mark.timeout(400)
def test_wheel_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """pip installs it, the console script runs, kernels are compiled from what was installed, and two processes train with it."""
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")], tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, str(wheel)], tmp_path)
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    # dependencies: those of this environment, as paths, so that their own .pth files (an editable install of this package) do not count
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    clean = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "LIGHTNING_ONEBIT_CACHE": str(tmp_path / "cache")}
    if compiler := shutil.which("c++"):
        # without optimisation, in a fifth of the time
        (tmp_path / "c++").write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        (tmp_path / "c++").chmod(0o755)
        clean["CXX"] = str(tmp_path / "c++")
    script = tmp_path / "fresh" / "bin" / "lightning-onebit"
    facts = json.loads(run([str(script), "doctor", "--json"], tmp_path, **clean))
    installed = Path(facts["location"])
    assert installed == site / "lightning_onebit"
    assert list(installed.rglob("*.cpp")) and list(installed.rglob("*.cu"))
    assert facts["problems"] == [] and facts["self_tests"]["cpu"]["passed"]
    if compiler:
        assert facts["kernels"]["cpu"]["backend"] == "cpu", "compiled from the installed sources"


def test_metadata_names_version_python_extras_and_withdrawn_releases(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Version"] == ob.__version__
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "Apache-2.0"
    assert {"cpu", "cuda12", "cuda13", "cli", "dev", "plot"} <= set(fields.get_all("Provides-Extra"))
    requirements = [Requirement(text) for text in fields.get_all("Requires-Dist")]
    bare = {requirement.name: requirement.specifier for requirement in requirements if not requirement.marker}
    assert set(bare) == {"torch", "pytorch-lightning", "torchmetrics", "numpy", "fsspec"}
    for requirement in requirements:
        if requirement.name in ("lightning", "pytorch-lightning"):
            for withdrawn in ("2.6.2", "2.6.3"):
                assert withdrawn not in requirement.specifier


def test_constraints_pin_everything_asked_for_and_name_no_host(wheel: Path) -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    assert all(str(pin.specifier).startswith("==") and pin.url is None for pin in pins)
    by_name = {pin.name.lower(): pin.specifier for pin in pins}
    for requirement in map(Requirement, metadata(wheel).get_all("Requires-Dist")):
        # The build tool is whatever Python brings; CuPy depends on the machine; the package's own extras are no package.
        if requirement.name in ("setuptools", "lightning-onebit") or requirement.name.startswith("cupy"):
            continue
        pinned = str(by_name[requirement.name.lower()]).removeprefix("==")
        assert pinned in requirement.specifier, f"{requirement} excludes the pinned {pinned}"
    for pin in pins:
        try:
            installed = distribution(pin.name)
        except PackageNotFoundError:
            continue
        needs = SpecifierSet(installed.metadata["Requires-Python"] or "")
        if installed.version in pin.specifier and "3.10.0" not in needs:
            on_oldest = {"python_version": "3.10", "python_full_version": "3.10.0"}
            assert pin.marker and not pin.marker.evaluate(on_oldest), f"{pin} needs Python {needs}: say so in a marker"
    for name in ("constraints.txt", "constraints-oldest.txt", "pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|trusted-host|https?://", text), f"{name} names a host"


# ----- make ------------------------------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="GNU make is not installed here")


@needs_make
@pytest.mark.parametrize("goal", ["demo", "test"])
def test_second_run_does_not_install_again(goal: str, tmp_path: Path) -> None:
    """What make would run: installs without a stamp and after a change of the requirements, and only then."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    make = ["make", "--dry-run", goal, "ARGS=--option-of-the-user"]
    first = run(make, tmp_path)
    assert "-m venv" in first
    assert re.search(r"pip install .*--constraint constraints.txt .*\.\[dev,cli\]", first)
    assert "--option-of-the-user" in first

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    stamp = tmp_path / ".venv" / ".installed"
    stamp.touch()
    now = stamp.stat().st_mtime
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(tmp_path / name, (now - 100, now - 100))
    assert "install" not in run(make, tmp_path)

    for changed in ("pyproject.toml", "constraints.txt"):
        os.utime(tmp_path / changed, (now + 100, now + 100))
        assert "pip install" in run(make, tmp_path)
        os.utime(tmp_path / changed, (now - 100, now - 100))


@needs_make
def test_make_test_lints_checks_types_and_runs_all_tests() -> None:
    commands = run(["make", "--dry-run", "test"], ROOT)
    assert "ruff check ." in commands
    assert "mypy" in commands
    assert "-m pytest" in commands


def test_the_oldest_set_is_the_lower_bound_of_every_requirement(wheel: Path) -> None:
    """What `make test-oldest` installs is what the metadata promises to support, and the tests it names exist."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()]
    pins = {r.name.lower(): str(r.specifier).removeprefix("==") for r in map(Requirement, filter(None, lines))}
    for requirement in map(Requirement, metadata(wheel).get_all("Requires-Dist")):
        if requirement.name.lower() not in pins:
            assert requirement.marker, f"{requirement} is not in the oldest set"
            continue
        lowest = next(s.version for s in requirement.specifier if s.operator == ">=")
        pinned = Version(pins[requirement.name.lower()])
        assert pinned in requirement.specifier
        assert (pinned.major, pinned.minor) == (Version(lowest).major, Version(lowest).minor), (
            f"{requirement}, tested {pinned}"
        )
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"OLDEST_TESTS := .*?,((?:\w+\s|\\\n|\s)+\w+),", makefile)
    assert named, "no list of tests"
    names = named[1].replace("\\", "").split()
    assert {"exchange", "resume", "strategy"} <= set(names)
    for name in names:
        assert list((ROOT / "tests").rglob(f"test_{name}.py")), name


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^    make test\b", readme, re.MULTILINE)
    assert re.search(r"^    make demo\b", readme, re.MULTILINE)


@needs_make
def test_python_that_is_too_old_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path / "Makefile")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "python3.8 is older than Python 3.10; name a newer one" in done.stderr
    assert not (tmp_path / ".venv").exists()


# ----- texts -----------------------------------------------------------------------------------------------------------


def option_table(heading: str) -> dict[str, object]:
    """The first table under a heading of docs/options.md: option -> default."""
    section = (ROOT / "docs" / "options.md").read_text().split(f"## {heading}\n", 1)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.MULTILINE)
    made: dict[str, object] = {"LambCoefficients()": ob.LambCoefficients()}
    return {name: made[default] if default in made else ast.literal_eval(default) for name, default in found}


def defaults(parameters: Iterable[inspect.Parameter]) -> dict[str, object]:
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_docs_list_every_option_of_every_algorithm_with_its_default() -> None:
    listed, known = option_table("Algorithm"), set()
    for algorithm in ALGORITHMS.values():
        for name, default in defaults(as_parameters(algorithm.optimizer.options_class)).items():
            known.add(name)
            if (algorithm.name, name) != ("binsgdm", "denominator_floor"):  # None: 1.0 or, as published, 0.0
                assert listed[name] == default, (algorithm.name, name)
    assert set(listed) == known


def test_docs_list_every_option_of_the_exchange_with_its_default() -> None:
    assert option_table("Exchange") == defaults(as_parameters(ob.ExchangeOptions))


def test_docs_list_the_options_of_the_strategy_with_their_defaults() -> None:
    own = defaults(inspect.signature(OnebitMixin.__init__).parameters.values())
    handed_on = {name for algorithm in ALGORITHMS.values() for name in algorithm.options}
    # those of DDP's are no options: docs/migration.md has what replaces them
    expected = {name: default for name, default in own.items() if name not in handed_on | set(DDP_KEYWORDS)}
    assert option_table("Strategy") == {"algorithm": "onebit_adam", **expected}
    assert handed_on <= set(own), "the strategy cannot hand on every option of its algorithms"


def test_readme_lists_every_algorithm() -> None:
    readme = (ROOT / "README.md").read_text()
    for algorithm in ALGORITHMS.values():
        names = ", ".join(f"`{name}`" for name in (algorithm.name, *algorithm.aliases))
        optimizer = algorithm.optimizer.__name__
        row = re.search(rf"^\| {names} \| `{optimizer}` \|.*\| `?(AdamW|SGD|no)`? \|$", readme, re.MULTILINE)
        assert row, f"no row for {names}"
        taken = [cls.__name__ for cls in (torch.optim.AdamW, torch.optim.SGD) if cls in algorithm.converts]
        assert row[1] == (taken[0] if taken else "no")


def test_readme_names_every_extra(wheel: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for extra in metadata(wheel).get_all("Provides-Extra"):
        assert f"`{extra}`" in readme


def test_readme_code_uses_names_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    used = set()
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text.startswith("ob."):
                used.add(text)
    assert {"ob.OnebitAdam", "ob.callbacks.VarianceFreeze"} <= used
    for text in used:
        found: object = ob
        for name in text.split(".")[1:]:
            found = getattr(found, name)


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
)
def test_links_between_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_citation_names_the_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == ob.__version__
    references = citation["references"]
    assert len(references) == 5
    assert all(reference["authors"] and reference["year"] for reference in references)
    text = " ".join(reference["title"] + reference["url"] for reference in references)
    for part in ("2102.02888", "2104.06069", "2202.06009", "Birder", "1905.10936"):
        assert part in text


def test_licence_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_every_promise_of_reliability_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(promises) > 35
    for line in promises:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", line)
        assert named, line
        for file, test in named:
            (path,) = (ROOT / "tests").rglob(file)
            assert f"def {test}(" in path.read_text(), f"{file}::{test}"
