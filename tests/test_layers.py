"""Imports go one way: every module has a place, and imports only from below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cudaops"

# Lowest first. A name stands for a module or a whole subpackage; those on one level do not import each other.
LEVELS = [
    {"errors", "environment", "listing"},
    {"plan"},
    {"cache", "signature", "sources", "toolkit"},
    {"compile", "arguments", "pointees", "interop", "emulator"},
    {"launch_cupy"},
    {"launch"},
    {"kernel", "ops", "info"},
    {"explain", "nn"},
    {"warmup", "tune", "demos", "bench"},
    {"cli"},
]
PUBLIC = "the public names"
PLACE = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    """(name of the module or subpackage in the table, file)."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        if parts != ("__init__.py",):  # the public names: above everything
            yield parts[0].removesuffix(".py"), file


def imported(file: Path) -> Iterator[str]:
    """Every name in the table that `file` imports from, wherever in the file it does."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            if node.module == "cudaops":
                yield from (alias.name for alias in node.names)
            elif node.module and node.module.startswith("cudaops."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "cudaops" or alias.name.startswith("cudaops."):
                    yield alias.name.partition("cudaops.")[2].split(".")[0] or PUBLIC


def test_every_module_has_a_place() -> None:
    assert {name for name, _ in modules()} <= set(PLACE)


@pytest.mark.parametrize(("name", "file"), [pytest.param(n, f, id=str(f.relative_to(PACKAGE))) for n, f in modules()])
def test_imports_only_from_below(name: str, file: Path) -> None:
    for other in imported(file):
        if other == name and file.parent != PACKAGE:
            continue  # inside its own subpackage
        if other == "__version__" and PLACE[name] >= PLACE["info"]:
            continue  # a word, and not a module
        if other == PUBLIC and PLACE[name] >= PLACE["demos"]:
            continue  # as any user would
        assert other in PLACE, f"{name} imports {other}, which has no place"
        assert PLACE[other] < PLACE[name], f"{name} imports {other}, which is not below it"
