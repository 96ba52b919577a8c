"""A dataset opened: splits, their arrays, rows as data frames."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr

from panelflow.errors import CorruptDatasetError, OptionError
from panelflow.files import Folder
from panelflow.format import digest_names, make_grids, read_manifest, zarr_store
from panelflow.shards import ArrayGrid, ShardReader
from panelflow.splits import is_training


class Split:
    """Rows of one split, in stored order.

    Attributes
    ----------
    name : str
    num_rows : int
    row_order : str
        ``"hash"`` (a random cross-section in any run of rows) or ``"date"`` (ascending dates).
    training : bool
    features, targets, weight, entity, date : zarr.Array
        ``features`` [num_rows, num_features] and ``targets`` [num_rows, num_targets] in the dataset's dtype, ``weight``
        [num_rows] or ``None``, ``entity`` [num_rows] int32 codes into ``dataset.entity_names``, ``date`` [num_rows] int64
        nanoseconds since 1970 (UTC). Plain Zarr arrays; slices are numpy arrays.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name
        self._entry = dataset.manifest["content"]["splits"][name]
        self.num_rows: int = self._entry["rows"]
        self.row_order: str = self._entry["row_order"]
        self.training = is_training(name)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"<Split {self.name!r}: {self.num_rows:,} rows in {self.row_order} order>"

    @cached_property
    def grids(self) -> dict[str, ArrayGrid]:
        """How each array is cut into shards and chunks, by name."""
        content, storage = self.dataset.manifest["content"], self.dataset.manifest["storage"]
        schema = content["schema"]
        grids = make_grids(
            self.name,
            self.num_rows,
            num_features=len(schema["features"]),
            num_targets=len(schema["targets"]),
            weighted=schema["weight"] is not None,
            dtype=schema["dtype"],
            chunk_rows=content["layout"]["chunk_rows"],
            shard_rows=content["layout"]["shard_rows"],
            compression=storage["compression"],
        )
        return {grid.path.rsplit("/", 1)[-1]: grid for grid in grids}

    def readers(self) -> dict[str, ShardReader]:
        """A checked reader for each array; every chunk that it returns has passed its checksum."""
        return {name: ShardReader(self.dataset.folder, grid) for name, grid in self.grids.items()}

    @property
    def chunk_rows(self) -> int:
        """Rows of an inner chunk."""
        return int(self.dataset.manifest["content"]["layout"]["chunk_rows"])

    @cached_property
    def date_rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Distinct dates and the rows of each, both int64 [num_dates], for a split in date order; else ``None``."""
        table = self._entry["rows_per_date"]
        return None if table is None else (np.array(table["date"], np.int64), np.array(table["rows"], np.int64))

    def array(self, name: str) -> zarr.Array[Any]:
        """An array of the split as plain Zarr opens it."""
        return cast("zarr.Array[Any]", self.dataset._group[f"{self.name}/{name}"])

    @property
    def features(self) -> zarr.Array[Any]:
        return self.array("features")

    @property
    def targets(self) -> zarr.Array[Any]:
        return self.array("targets")

    @property
    def weight(self) -> zarr.Array[Any] | None:
        return self.array("weight") if "weight" in self.grids else None

    @property
    def entity(self) -> zarr.Array[Any]:
        return self.array("entity")

    @property
    def date(self) -> zarr.Array[Any]:
        return self.array("date")

    def to_pandas(self, start: int = 0, stop: int | None = None) -> pd.DataFrame:
        """Rows ``[start, stop)`` in stored order, under the column names of the source.

        Parameters
        ----------
        start, stop
            Row numbers; ``None`` means to the end. Memory grows with their number.

        Raises
        ------
        OptionError
            A range outside the split.
        CorruptDatasetError
            A damaged shard.
        """
        stop = self.num_rows if stop is None else stop
        if not 0 <= start <= stop <= self.num_rows:
            raise OptionError(f"Rows are numbered 0 to {self.num_rows}; start={start}, stop={stop}")
        schema = self.dataset.manifest["content"]["schema"]
        rows = {name: reader.read_rows(start, stop) for name, reader in self.readers().items()}
        frame = {
            schema["entity"]["name"]: self.dataset.entity_names[rows["entity"]],
            schema["date"]["name"]: self.dataset.to_datetime(rows["date"]),
            **dict(zip(schema["features"], rows["features"].T, strict=True)),
            **dict(zip(schema["targets"], rows["targets"].T, strict=True)),
        }
        if "weight" in rows:
            frame[schema["weight"]] = rows["weight"]
        return pd.DataFrame(frame)


class Dataset(Mapping[str, Split]):
    """A committed dataset: a mapping of split names to :class:`Split`.

    Attributes
    ----------
    manifest : dict
        See "Data format" in the documentation.
    dataset_id : str
        Digest of the content; equal datasets have equal ids wherever and however they were made.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.dataset_id: str = self.manifest["dataset_id"]
        self._splits = {name: Split(self, name) for name in self.manifest["content"]["splits"]}

    def __getitem__(self, name: str) -> Split:
        if name not in self._splits:
            raise OptionError(f"The dataset has the splits {list(self._splits)}, not {name!r}")
        return self._splits[name]

    def __contains__(self, name: object) -> bool:
        return name in self._splits

    def get(self, name: str, default: Any = None) -> Any:
        """A split by name, or ``default`` where there is none."""
        return self._splits.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def __repr__(self) -> str:
        return f"<Dataset {self.folder.path()!r}: {', '.join(f'{s.name} {s.num_rows:,}' for s in self.values())} rows>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.folder,)

    @property
    def splits(self) -> dict[str, Split]:
        """Splits by name, in the order they were declared."""
        return dict(self._splits)

    @property
    def features(self) -> list[str]:
        """Names of the features, in the order of their columns."""
        return list(self.manifest["content"]["schema"]["features"])

    @property
    def targets(self) -> list[str]:
        """Names of the targets, in the order of their columns."""
        return list(self.manifest["content"]["schema"]["targets"])

    @property
    def statistics(self) -> pd.DataFrame:
        """Count, missing, mean, std, min, max of each feature over the training rows; indexed by feature."""
        return pd.DataFrame.from_dict(self.manifest["content"]["statistics"], orient="index")

    @cached_property
    def _group(self) -> zarr.Group:
        return zarr.open_group(zarr_store(self.folder, read_only=True), mode="r", use_consolidated=False)

    @cached_property
    def entity_names(self) -> npt.NDArray[Any]:
        """Distinct entities, sorted: object array of text, or int64 [num_entities]."""
        names = self.read_names("entity_names")
        if digest_names(names) != self.manifest["content"]["schema"]["entity"]["sha256"]:
            raise CorruptDatasetError(f"{self.folder.path('entity_names')}: the entity names were altered; restore the file.")
        return names

    def read_names(self, path: str) -> npt.NDArray[Any]:
        """A small array of names, read whole by Zarr: object array of text, or int64.

        Raises
        ------
        CorruptDatasetError
            It cannot be read.
        """
        try:
            values = np.asarray(cast("zarr.Array[Any]", self._group[path])[:])
        except Exception as error:  # whatever Zarr meets in a torn document or chunk
            raise CorruptDatasetError(f"{self.folder.path(path)} is missing or not whole ({error}); restore it.") from error
        return values if values.dtype == np.int64 else values.astype(object)

    def to_datetime(self, dates: npt.NDArray[np.int64]) -> pd.DatetimeIndex:
        """Stored dates as timestamps, in the zone of the panel if it has one."""
        zone = self.manifest["content"]["schema"]["date"]["zone"]
        index = pd.DatetimeIndex(dates.view("M8[ns]"))
        return index if zone is None else index.tz_localize("UTC").tz_convert(zone)


def open(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> Dataset:
    """Open a committed dataset; reads its manifest only.

    Parameters
    ----------
    path
        A local path or any fsspec URL.
    storage_options
        Options of the fsspec file system.

    Returns
    -------
    Dataset

    Raises
    ------
    DatasetNotFoundError
        There is no committed dataset.
    CorruptDatasetError
        The manifest was altered.
    """
    return Dataset(Folder(os.fspath(path), storage_options or {}))
