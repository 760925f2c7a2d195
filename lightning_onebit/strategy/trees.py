"""Which Lightning tree the user works in: ``lightning.pytorch`` or ``pytorch_lightning``.

Both trees may be installed (``lightning`` always installs ``pytorch-lightning`` too), their class hierarchies are disjoint and mixing
them is rejected everywhere. So what is installed does not say which one is used; what the *user* has imported does. This module imports
no Lightning tree. It remembers which trees were loaded when ``lightning_onebit`` was first imported and which ones this package loaded
by itself, and it runs code when a tree is imported later (:func:`when_imported`), so that nothing here has to import a tree the user
does not use.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

Tree = Literal["lightning", "pytorch_lightning"]

#: Tree -> the package whose import means that it is loaded (Fabric's users load the bare ``lightning`` too), in the order of preference
#: when nothing else decides.
PACKAGES: dict[Tree, str] = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

#: The module of this package that binds strategy and callbacks to a tree.
BOUND_MODULES: dict[Tree, str] = {tree: f"lightning_onebit.{tree}" for tree in PACKAGES}

#: The Fabric that each tree is built on -> the module that binds the strategy to it.
FABRICS: dict[str, str] = {
    "lightning.fabric": "lightning_onebit.strategy.fabric_lightning",
    "lightning_fabric": "lightning_onebit.strategy.fabric_standalone",
}

#: package of strategies -> the module that binds this package's to it
BINDINGS: dict[str, str] = {PACKAGES[tree]: module for tree, module in BOUND_MODULES.items()} | FABRICS

_loaded_at_import: tuple[Tree, ...] = tuple(tree for tree, package in PACKAGES.items() if package in sys.modules)
_loaded_by_us: set[Tree] = set()
_waiting: dict[str, list[Callable[[], object]]] = {}


def installed_trees() -> tuple[Tree, ...]:
    """The Lightning trees that could be imported here, found without importing them."""
    return tuple(tree for tree, package in PACKAGES.items() if package in sys.modules or _is_installed(package))


def loaded_tree() -> Tree:
    """The tree the user has loaded.

    In this order: the tree that was loaded before ``lightning_onebit`` was imported; a tree the user has imported since; the tree that is
    installed. Where that leaves both trees, ``lightning`` is taken: users of the other one then import from
    ``lightning_onebit.pytorch_lightning`` (the error of a class from the wrong tree says so).

    Raises:
        ModuleNotFoundError: if no Lightning tree is installed.
    """
    by_user = tuple(tree for tree, package in PACKAGES.items() if package in sys.modules and tree not in _loaded_by_us)
    for candidates in (_loaded_at_import, by_user, installed_trees()):
        if candidates:
            return candidates[0]
    raise ModuleNotFoundError(
        "lightning_onebit's strategies and callbacks need Lightning: install `lightning` or `pytorch-lightning`. "
        "The optimizers work without it."
    )


def import_tree(tree: Tree) -> ModuleType:
    """Imports the package of ``tree`` for this package's own needs: it does not count as the user's choice."""
    if PACKAGES[tree] not in sys.modules:
        _loaded_by_us.add(tree)
    return importlib.import_module(PACKAGES[tree])


def bound_module(tree: Tree | None = None) -> ModuleType:
    """The module that binds strategy and callbacks to ``tree`` (default: the tree the user has loaded)."""
    tree = loaded_tree() if tree is None else tree
    import_tree(tree)
    return importlib.import_module(BOUND_MODULES[tree])


def tree_of(owner: Any) -> Tree | None:
    """The tree that the class of ``owner`` (an object or a class) comes from, or None if it comes from neither."""
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        for tree, package in PACKAGES.items():
            if f"{base.__module__}.".startswith(f"{package}."):
                return tree
    return None


def check_tree(part: Any, trainer: Any) -> None:
    """Raises if ``part`` (a callback or a strategy) and ``trainer`` come from different Lightning trees.

    Raises:
        TypeError: naming the module to import ``part``'s class from.
    """
    mine, theirs = tree_of(part), tree_of(trainer)
    if mine is None or theirs is None or mine == theirs:
        return
    name = type(part).__name__
    raise TypeError(
        f"{name} is bound to `{PACKAGES[mine]}` but the Trainer comes from `{PACKAGES[theirs]}`; the two do not mix. "
        f"Import it with `from {BOUND_MODULES[theirs]} import {name}`, or import `{PACKAGES[theirs]}` before "
        "`lightning_onebit`."
    )


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Runs ``action`` once the package ``name`` is imported: at once if it is, otherwise right after its import by anyone."""
    if name in sys.modules:
        action()
        return
    if not any(isinstance(finder, _ImportWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatcher())
    _waiting.setdefault(name, []).append(action)


def _is_installed(package: str) -> bool:
    top, _, sub = package.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    # find_spec("lightning.pytorch") would import its parent and with it the whole tree: look for the folder instead.
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return spec is not None and (not sub or any(os.path.isdir(os.path.join(folder, sub)) for folder in folders))


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Lets the usual finders find a watched package and runs the waiting actions after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        for finder in others if fullname in _waiting else ():
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _run_after(spec.loader, fullname)
                return spec
        return None


def _run_after(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for action in _waiting.pop(name, ()):
            action()

    # On the instance, which belongs to this one module: the loader's type stays what tools that look at it expect.
    loader.exec_module = exec_module
