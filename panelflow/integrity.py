"""Verify a dataset: read every byte and compare it with the manifest."""

from __future__ import annotations

from typing import Any

import numpy as np

from panelflow.errors import CorruptDatasetError
from panelflow.format import ROOT
from panelflow.progress import Reporter
from panelflow.shards import ShardReader, digest_rows
from panelflow.store import Dataset, Split


def verify(dataset: Dataset, *, progress: bool = False) -> int:
    """Read every byte of a dataset and compare it with the manifest.

    Parameters
    ----------
    dataset
        An open dataset. Memory: one chunk at a time, and one shard to digest it.
    progress
        Report rows, bytes and time left.

    Returns
    -------
    int
        Number of files checked.

    Raises
    ------
    CorruptDatasetError
        The first damage found; names the file and its rows.
    """
    dataset.entity_names  # noqa: B018  reading it checks it
    content = dataset.manifest["content"]
    checked = 2
    with Reporter(progress) as reporter:
        reporter.phase("verify", sum(split.num_rows for split in dataset.values()))
        for split in dataset.values():
            checked += _verify_metadata(split)
            readers = split.readers()
            for shard, entry in enumerate(content["shards"][split.name]):
                for name, reader in readers.items():
                    _verify_shard(reader, shard, entry["sha256"][name], dataset.manifest["storage"]["sizes"], split.name, name)
                    checked += 1
                reporter.advance(entry["rows"], entry["rows"] * sum(grid.row_bytes for grid in split.grids.values()))
        reporter.finish()
    return checked


def _verify_shard(reader: ShardReader, shard: int, digest: str, sizes: dict[str, Any], split: str, name: str) -> None:
    path = reader.folder.path(reader.grid.key(shard))
    start, stop = reader.grid.shard_range(shard)
    where = f"(rows {start:,} to {stop:,} of {reader.grid.path})"
    found, wanted = reader.folder.size(reader.grid.key(shard)), sizes[split][shard][name]
    if found is not None and found != wanted:
        raise CorruptDatasetError(
            f"{path}: {found:,} bytes instead of {wanted:,}: truncated or altered {where}. Restore the file."
        )
    if digest_rows(reader.read_shard(shard)) != digest:
        raise CorruptDatasetError(f"{path}: its values are whole but are not those that were written {where}. Restore the file.")


def _verify_metadata(split: Split) -> int:
    """Compare what a plain Zarr reader would see with the manifest."""
    for name, grid in split.grids.items():
        path = split.dataset.folder.path(f"{grid.path}/{ROOT}")
        try:
            array = split.array(name)
            seen = (array.shape, array.dtype, array.chunks, array.shards)
        except Exception as error:
            raise CorruptDatasetError(f"{path} is missing or not whole ({error}). Restore the file.") from error
        inner = grid.shape[1:]
        wanted = (grid.shape, np.dtype(grid.dtype), (grid.chunk_rows, *inner), (grid.shard_rows, *inner))
        if seen != wanted:
            raise CorruptDatasetError(f"{path} was altered: {seen} instead of {wanted}. Restore the file.")
    for name in ("feature", "target"):
        names = split.dataset.read_names(f"{split.name}/{name}").tolist()
        if names != getattr(split.dataset, f"{name}s"):
            raise CorruptDatasetError(
                f"{split.dataset.folder.path(f'{split.name}/{name}')}: names were altered. Restore the file."
            )
    return len(split.grids) + 2
