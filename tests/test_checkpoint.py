from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import panelflow as pf
from panelflow import checkpoint


def test_the_newest_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for updates in (1, 2, 10, 100):
        checkpoint.save(tmp_path, updates, {"updates": updates, "x": torch.arange(3)})
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-0000000010.pt", "step-0000000100.pt"]
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert loaded["updates"] == 100


def test_a_torn_one_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"updates": 1})
    newest = checkpoint.save(tmp_path, 2, {"updates": 2})
    newest.write_bytes(newest.read_bytes()[:50])
    with pytest.warns(UserWarning, match=r"step-0000000002.pt is not whole, or"):
        assert checkpoint.load_newest(tmp_path) == {"updates": 1}
    (tmp_path / "step-0000000001.pt").write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(pf.CheckpointError, match="None of the 2"):
        checkpoint.load_newest(tmp_path)


def test_a_failed_save_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {"updates": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(pf.StorageError, match=r"step-0000000002.pt.*No space left"):
        checkpoint.save(tmp_path, 2, {"updates": 2})
    assert checkpoint.load_newest(tmp_path) == {"updates": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001.pt"]


def test_numpy_numbers_are_read_again(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"lr": np.float64(0.5), "nested": [(np.int64(3),)]})
    assert checkpoint.load_newest(tmp_path) == {"lr": 0.5, "nested": [(3,)]}


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path / "never") is None
