"""Each floor knows only those below it, and nothing below the strategy knows Lightning."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_onebit"

# what a floor may import of this package, besides itself
BELOW: dict[str, set[str]] = {
    "kernels": set(),
    "comm": {"kernels"},
    "engine": {"comm", "kernels"},
    "algorithms": {"engine", "comm", "kernels"},
    "strategy": {"algorithms", "engine", "comm", "kernels"},
}
# types of options, names in errors, text: they import nothing of this package, and every floor may import them
GROUND = {"_choices", "_names", "_text"}
# what training says, in lines that fit a terminal
SAYS = {"_say"}
# what a floor may import from elsewhere, besides the standard library
OUTSIDE = {
    "kernels": {"torch", "numpy", "cupy", "numba"},
    "comm": {"torch", "numpy"},
    "engine": {"torch", "numpy"},
    "algorithms": {"torch", "numpy"},
}
# public names of the strategy: they see the floors below, and nothing that people look at above them
PUBLIC = {"fabric", "ddp", "huggingface"}
# these bind the strategy to a Lightning tree together with the callbacks, which stand on it
TREES = {"lightning", "pytorch_lightning"}
# these bind it to a Fabric; its other modules work with whichever Lightning there is
BINDINGS = {"fabric_lightning", "fabric_standalone"}
ABOVE = {"callbacks", "metrics", "tools"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}


def imports(path: Path) -> set[str]:
    """Absolute names of every module that a file imports, at its top or inside a function, for typing or for running."""
    package = ["lightning_onebit", *path.relative_to(PACKAGE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from lightning_onebit import engine` imports a floor too
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "lightning_onebit" else {module}
    return names


def floor_of(name: str) -> str | None:
    """The floor (first name below the package) that a module belongs to; None for other packages."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else "") if parts[0] == "lightning_onebit" else None


def files(floor: str) -> list[Path]:
    found = sorted((PACKAGE / floor).rglob("*.py"))
    assert found, f"no files in floor {floor}"
    return found


def test_every_file_has_a_floor() -> None:
    floors = {*BELOW, *ABOVE, *GROUND, *SAYS, *PUBLIC, *TREES, "__init__", "__main__"}
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")} == floors


@pytest.mark.parametrize("floor", sorted(BELOW))
def test_a_floor_imports_only_floors_below_it(floor: str) -> None:
    for path in files(floor):
        for name in imports(path):
            other = floor_of(name)
            if other is not None:
                says = SAYS if floor == "strategy" else set()
                assert other in BELOW[floor] | {floor} | GROUND | says, (
                    f"{path.name} imports {name}: floor {floor} may not know {other!r}"
                )


@pytest.mark.parametrize("module", sorted(GROUND))
def test_what_every_floor_may_import_imports_nothing_of_this_package(module: str) -> None:
    assert not [name for name in imports(PACKAGE / f"{module}.py") if floor_of(name) is not None]


@pytest.mark.parametrize("floor", sorted(OUTSIDE))
def test_a_floor_below_the_strategy_imports_no_lightning(floor: str) -> None:
    for path in files(floor):
        for name in imports(path):
            root = name.split(".")[0]
            known = OUTSIDE[floor] | set(sys.stdlib_module_names) | {"lightning_onebit", "__future__"}
            assert root in known, f"{path.name} imports {name}, which floor {floor} may not need"


def test_public_names_of_the_strategy_import_nothing_that_stands_on_it() -> None:
    for module in PUBLIC:
        for name in imports(PACKAGE / f"{module}.py"):
            assert floor_of(name) not in ABOVE, f"{module}.py imports {name}, which stands above the strategy"


def test_the_strategy_imports_no_lightning_but_where_it_is_bound_to_one() -> None:
    for path in files("strategy"):
        if path.stem not in BINDINGS:
            for name in imports(path):
                assert name.split(".")[0] not in LIGHTNING, f"{path.name} imports {name}"


def test_modules_of_the_strategy_take_nothing_private_from_each_other() -> None:
    for path in [*files("strategy"), *(PACKAGE / f"{module}.py" for module in PUBLIC)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_onebit.strategy"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name} imports {private} from {node.module}"


def test_tools_import_nothing_that_stands_beside_them() -> None:
    for path in files("tools"):
        for name in imports(path):
            assert floor_of(name) not in ABOVE - {"tools"}, f"{path.name} imports {name}"


def test_the_rule_is_checked_against_files_that_break_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "comm" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("def f():\n    from lightning_onebit import engine\n    from ..engine.layout import Layout\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert {floor_of(name) for name in imports(bad)} == {"engine"}
    with pytest.raises(AssertionError, match="may not know 'engine'"):
        test_a_floor_imports_only_floors_below_it("comm")


def test_optimizers_work_where_lightning_cannot_be_imported() -> None:
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {LIGHTNING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import torch
from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.engine import ExchangeOptions
x = torch.nn.Parameter(torch.ones(5))
optimizer = OnebitAdam([x], lr=0.1, freeze_step=1, exchange=ExchangeOptions(_alone=True))
for _ in range(2):
    x.grad = torch.ones(5)
    optimizer.step()
assert optimizer.ledger.compressed_steps == 1 and (x < 1).all()
assert not {LIGHTNING!r} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
