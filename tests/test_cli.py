from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from panels import make_panel

import panelflow as pf

COLUMNS = ["--entity", "stock", "--date", "date", "--features", "f*", "--target", "ret", "--horizon", "3"]
SPLITS = ["--train", ":2015-03-01", "--validation", "2015-03-01:2015-05-01", "--test", "2015-05-01T00:00/"]
SIZES = ["--chunk-rows", "64", "--shard-bytes", "8192", "--workers", "1"]


def run(*arguments: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "panelflow", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "panel.parquet"
    make_panel().to_parquet(path, index=False)
    return path


def test_the_whole_path_on_the_command_line(source: Path, unweighted: pf.Dataset, tmp_path: Path) -> None:
    out, run_dir = tmp_path / "out.zarr", tmp_path / "run"
    done = run("prepare", source, out, *COLUMNS, *SPLITS, *SIZES)
    assert "2,760 source rows = written 2,622" in done.stdout
    assert unweighted.dataset_id in done.stdout
    assert "scatter" in done.stderr

    shown = run("inspect", out).stdout
    assert "validation" in shown
    assert "f3" in shown
    manifest = json.loads(run("inspect", out, "--json").stdout)
    assert manifest["dataset_id"] == unweighted.dataset_id
    assert set(manifest["bytes"]) == {"train", "validation", "test"}

    assert "files are whole" in run("verify", out).stdout

    train = ["train", out, "--run-dir", run_dir, "--hidden", "8", "--epochs", "2", "--batch-size", "100", "--nproc", "2"]
    assert "train loss" in run(*train).stdout
    result = json.loads((run_dir / "result.json").read_text())
    assert [entry["epoch"] for entry in result["history"]] == [0, 1]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert "--resume" in run(*train, code=2).stderr
    assert run(*train, "--resume").returncode == 0

    predictions = tmp_path / "p.parquet"
    run("predict", out, "--run-dir", run_dir, "--split", "test", "--to", predictions)
    frame = pd.read_parquet(predictions)
    assert len(frame) == pf.open(out)["test"].num_rows
    assert frame["prediction"].std() > 0

    assert "exists" in run("prepare", source, out, *COLUMNS, *SPLITS, *SIZES, code=1).stderr
    run("prepare", source, out, *COLUMNS, *SPLITS, *SIZES, "--overwrite", "--seed", "1")
    assert pf.open(out).dataset_id != unweighted.dataset_id


def test_a_factory_names_the_model(unweighted: pf.Dataset, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n\n\ndef linear(num_features, num_targets):\n    return torch.nn.Linear(num_features, num_targets)\n"
    )
    out, run_dir = unweighted.folder.path(), tmp_path / "run"
    options = ["--run-dir", run_dir, "--epochs", "1", "--batch-size", "100", "--model"]
    run("train", out, *options, "nets:linear", cwd=tmp_path)
    run("predict", out, "--run-dir", run_dir, "--to", tmp_path / "p.parquet", cwd=tmp_path)
    options[1] = tmp_path / "other"
    assert "--model nets:cubic" in run("train", out, *options, "nets:cubic", code=2, cwd=tmp_path).stderr


def test_verify_names_the_damaged_file(unweighted: pf.Dataset, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(unweighted.folder.path(), tmp_path / "copy.zarr"))
    shard = copy / "test" / "features" / "c" / "0" / "0"
    whole = shard.read_bytes()
    for damaged in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-9], None):
        shard.unlink() if damaged is None else shard.write_bytes(damaged)
        assert str(shard) in run("verify", copy, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, ""),
        (["prepare", "nowhere.parquet", "out.zarr", *COLUMNS, *SPLITS, *SIZES], 1, "nowhere.parquet"),
        (["prepare", "a", "b", *COLUMNS, "--train", "2015"], 2, "'2015'"),
        (["prepare", "a", "b", "--entity", "stock"], 2, "Missing option"),
        (["prepare", "a", "b", *COLUMNS], 2, "at least one range"),
        (["prepare", "a", "b", *COLUMNS, *SPLITS, "--scheduler", "tcp://127.0.0.1:1"], 2, "--scheduler tcp://127.0.0.1:1"),
        (["inspect", "nowhere.zarr"], 1, "no dataset"),
        (["verify", "nowhere.zarr"], 1, "no dataset"),
        (["train", "nowhere.zarr", "--run-dir", "run"], 1, "no dataset"),
        (["train", "nowhere.zarr", "--run-dir", "run", "--epochs", "many"], 2, "many"),
        (["train", "nowhere.zarr"], 2, "--run-dir"),
        (["predict", "nowhere.zarr", "--run-dir", "run", "--to", "p.parquet"], 1, "no dataset"),
        (["fly"], 2, "fly"),
    ],
)
def test_exit_codes_and_one_paragraph(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    done = run(*arguments, code=code, cwd=tmp_path)
    assert text in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--hidden", "8,-1"],
        ["--lr", "-1"],
        ["--nproc", "40", "--batch-size", "20"],
        ["--model", "os:getcwd"],
        ["--seed", str(2**70)],
    ],
)
def test_training_options_are_refused_in_one_paragraph(unweighted: pf.Dataset, tmp_path: Path, options: list[str]) -> None:
    done = run("train", unweighted.folder.path(), "--run-dir", tmp_path / "run", *options, code=2)
    assert options[-1].split(",")[-1] in done.stderr or options[1] in done.stderr


def test_a_model_predicts_only_the_features_it_was_trained_on(unweighted: pf.Dataset, prepare: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run("train", unweighted.folder.path(), "--run-dir", run_dir, "--epochs", "1", "--hidden", "")
    other = prepare(make_panel().rename(columns={"f0": "fz"}))
    predict = ["predict", other.folder.path(), "--run-dir", run_dir, "--to", tmp_path / "p.parquet"]
    assert "['f1', 'f2', 'f3', 'fz']" in run(*predict, code=1).stderr
    (run_dir / "model.pt").write_bytes((run_dir / "model.pt").read_bytes()[:100])
    assert "model.pt is not whole" in run(*predict, code=1).stderr
    (tmp_path / "file").touch()
    run("train", unweighted.folder.path(), "--run-dir", tmp_path / "file" / "run", code=1)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "panelflow", "--debug", "inspect", str(tmp_path / "nothing.zarr")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_errors_of_a_rank_are_one_paragraph(unweighted: pf.Dataset, tmp_path: Path) -> None:
    done = run("train", unweighted.folder.path(), "--run-dir", tmp_path / "run", "--epochs", "0", "--nproc", "2", code=2)
    assert "epochs=0" in done.stderr


@pytest.mark.slow
def test_the_demo_finds_what_was_planted(tmp_path: Path) -> None:
    done = run("demo", tmp_path / "demo")
    assert "recovered" in done.stdout
    assert "NOT" not in done.stdout
    assert run("demo", tmp_path / "demo").returncode == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    assert "other" in run("demo", tmp_path / "other", code=2).stderr
