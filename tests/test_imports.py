"""Imports point one way: the list of modules reads as the path of a row."""

from __future__ import annotations

import ast
from pathlib import Path

import panelflow

PACKAGE = Path(panelflow.__file__).parent
COMMON = ["errors", "hashing", "sorting", "progress", "allocator", "files"]
PREPARE = [
    "splits",
    "columns",
    "source",
    "panel",
    "pieces",
    "plan",
    "budget",
    "scan",
    "scratch",
    "scatter",
    "regroup",
    "count",
    "gather",
]
STORE = ["shards", "statistics", "format", "store", "integrity"]
DASK = ["lease", "staging", "manifest", "cluster", "tasks", "p2p", "exchange", "frames", "shuffle", "preparation", "sizing"]
TORCH = [
    "order",
    "reading",
    "loader",
    "distributed",
    "modeling",
    "metrics",
    "evaluation",
    "replica",
    "stopping",
    "record",
    "recipe",
    "checkpoint",
    "trainer",
]
FRONT = ["tables", "demo", "runs", "cli", "__main__"]
# A module may import those before it in this list, and nothing else of the package.
IN_ORDER = [
    *COMMON,
    "splits",
    "columns",
    "source",
    "panel",
    "pieces",
    "plan",
    "budget",
    "scan",
    "scratch",
    "shards",
    "statistics",
    "format",
    "store",
    "integrity",
    "scatter",
    "regroup",
    "count",
    "gather",
    *DASK,
    *TORCH,
    *FRONT,
]


def imports_of(module: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("panelflow"):
            tail = node.module.removeprefix("panelflow").strip(".")
            found |= {tail} if tail else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("panelflow.") for alias in node.names if alias.name.startswith("panelflow.")}
    return found


def libraries_of(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*IN_ORDER, "__init__"}


def test_imports_point_one_way() -> None:
    for position, module in enumerate(IN_ORDER):
        assert imports_of(module) <= set(IN_ORDER[:position]), module


def test_the_halves_meet_only_in_the_store() -> None:
    shared = {*COMMON, *STORE, "splits"}
    for module in TORCH:
        assert imports_of(module) <= {*shared, *TORCH}, module
        assert not libraries_of(module) & {"dask", "distributed"}, module
    for module in {*COMMON, *PREPARE, *STORE, *DASK}:
        assert imports_of(module) <= {*COMMON, *PREPARE, *STORE, *DASK}, module
        assert "torch" not in libraries_of(module), module


def test_only_a_few_modules_know_dask() -> None:
    assert {m for m in IN_ORDER if libraries_of(m) & {"dask", "distributed"}} <= {*DASK, "cli"}


def code_lines(path: Path) -> int:
    """Lines without docstrings and blank ones."""
    source = path.read_text()
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_modules_are_short_enough_to_read() -> None:
    assert {path.name: code_lines(path) for path in PACKAGE.glob("*.py") if code_lines(path) > 250} == {}
