"""The README and the docs say what is true, and their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.S)


def test_the_readme_example_runs(tmp_path: Path) -> None:
    (code,) = blocks(README, "python")
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "TargetMetrics" in done.stdout
    assert "prediction" in done.stdout


def test_the_two_commands_are_what_the_project_calls() -> None:
    demo, tests = (block.strip() for block in blocks(README, "sh"))
    assert demo.endswith("panelflow demo")
    assert tests.endswith("tox")
    assert "constraints.txt" in demo
    assert (ROOT / "constraints.txt").exists()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_vectors_of_the_docs_are_those_of_the_tests() -> None:
    from test_hashing import VECTORS

    documented = re.findall(r"`([0-9a-f]{16})`", (ROOT / "docs" / "format.md").read_text())
    assert documented == [vector for vectors in VECTORS for vector in vectors]


def test_options_in_the_docs_exist() -> None:
    from panelflow.cli import main

    parameters = [parameter for command in main.commands.values() for parameter in command.params]
    known = {option for p in parameters for option in [*p.opts, *p.secondary_opts]} | {"--debug"}
    for benchmark in (ROOT / "tests" / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', benchmark.read_text()))
    for path in TEXTS:
        # A line that starts another program's command has that program's options.
        ours = re.sub(r"^(dask|srun|pip|pytest) .*$", "", path.read_text(), flags=re.M)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+\b(?!-)", ours):
            assert option in known, (path.name, option)


def test_doctests() -> None:
    import doctest

    import panelflow.splits

    assert doctest.testmod(panelflow.splits).failed == 0
