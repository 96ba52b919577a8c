from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import panelflow as pf


@pytest.fixture
def copy(dataset: pf.Dataset, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset.folder.path(), tmp_path / "copy.zarr"))


def test_a_whole_dataset_passes_and_every_file_is_looked_at(dataset: pf.Dataset, copy: Path) -> None:
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert pf.verify(dataset) > len(files) * 0.6
    unnoticed = []
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            pf.verify(pf.open(copy))
            unnoticed.append(path)
        except (pf.CorruptDatasetError, pf.DatasetNotFoundError) as error:
            assert str(path).split("/c/")[0].removesuffix("/zarr.json") in str(error)
        path.write_bytes(whole)
    # Group documents of the splits hold nothing but the fact that they are groups.
    assert {str(path.relative_to(copy)) for path in unnoticed} <= {f"{name}/zarr.json" for name in dataset}


@pytest.mark.parametrize("array", ["features", "targets", "weight", "entity", "date"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
def test_damage_is_named(copy: Path, array: str, damage: str) -> None:
    shard = copy / "train" / array / "c" / "1"
    shard = shard / "0" if shard.is_dir() else shard
    whole = shard.read_bytes()
    if damage == "flip":
        shard.write_bytes(whole[:9] + bytes([whole[9] ^ 4]) + whole[10:])
    elif damage == "truncate":
        shard.write_bytes(whole[:-5])
    elif damage == "delete":
        shard.unlink()
    else:  # a whole shard, but another one: every checksum in it is right
        other = Path(str(shard).replace(f"{array}/c/1", f"{array}/c/0"))
        shard.write_bytes(other.read_bytes())
    with pytest.raises(pf.CorruptDatasetError, match=str(shard)):
        pf.verify(pf.open(copy))
