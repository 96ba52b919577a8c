"""The dataset on disk: an ordinary Zarr v3 group with a manifest, opened and read.

The manifest stands in the attributes of the root group under ``panelflow``. Its ``content`` is what the dataset is, and
``dataset_id`` is the digest of that; ``storage`` says how the bytes lie, ``provenance`` where they came from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import FsspecStore, LocalStore

from panelflow.errors import CorruptDatasetError, DatasetError, DatasetNotFoundError, OptionError
from panelflow.files import Folder
from panelflow.shards import ArrayGrid, ShardReader
from panelflow.splits import is_training

FORMAT_VERSION = 1
ROOT = "zarr.json"
_DATE_ATTRIBUTES: dict[str, Any] = {"units": "nanoseconds since 1970-01-01", "calendar": "proleptic_gregorian"}


def make_grids(
    split: str,
    num_rows: int,
    *,
    num_features: int,
    num_targets: int,
    weighted: bool,
    dtype: str,
    chunk_rows: int,
    shard_rows: int,
    compression: str | None,
) -> list[ArrayGrid]:
    """The arrays of a split, all on one row grid."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "features": (dtype, (num_rows, num_features)),
        "targets": (dtype, (num_rows, num_targets)),
        **({"weight": (dtype, (num_rows,))} if weighted else {}),
        "entity": ("int32", (num_rows,)),
        "date": ("int64", (num_rows,)),
    }
    return [
        ArrayGrid(f"{split}/{name}", kind, shape, chunk_rows, shard_rows, compression) for name, (kind, shape) in shapes.items()
    ]


def write_metadata(
    folder: Folder,
    grids: Mapping[str, Sequence[ArrayGrid]],
    *,
    features: Sequence[str],
    targets: Sequence[str],
    names: npt.NDArray[Any],
) -> None:
    """Write the metadata documents and the small name arrays of a dataset whose shards are there, but not its manifest."""
    root = zarr.open_group(_zarr_store(folder), mode="a", zarr_format=3)
    for split, arrays in grids.items():
        for grid in arrays:
            _write_array_metadata(root, folder, grid)
        _write_names(root, folder, f"{split}/feature", list(features), "feature")
        _write_names(root, folder, f"{split}/target", list(targets), "target")
    _write_names(root, folder, "entity_names", names, "entity_name")


def _write_array_metadata(root: zarr.Group, folder: Folder, grid: ArrayGrid) -> None:
    folder.remove(f"{grid.path}/{ROOT}")
    name = grid.path.rsplit("/", 1)[-1]
    inner = {"features": ("row", "feature"), "targets": ("row", "target")}.get(name, ("row",))
    checks: list[Any] = [ZstdCodec(level=3)] if grid.compression else []
    root.create_array(
        grid.path,
        shape=grid.shape,
        dtype=grid.dtype,
        chunks=(grid.chunk_rows, *grid.shape[1:]),
        shards=(grid.shard_rows, *grid.shape[1:]),
        compressors=[*checks, Crc32cCodec()],
        filters=None,
        fill_value=grid.fill_value,
        dimension_names=inner,
        attributes=_DATE_ATTRIBUTES if name == "date" else {},
        config={"write_empty_chunks": True},
    )


def _write_names(root: zarr.Group, folder: Folder, path: str, names: Sequence[str] | npt.NDArray[Any], dimension: str) -> None:
    folder.remove(path)
    values = np.asarray(names, dtype=np.int64 if getattr(names, "dtype", None) == np.int64 else object)
    kind: Any = "int64" if values.dtype == np.int64 else str
    array = root.create_array(
        path, shape=values.shape, dtype=kind, chunks=(max(len(values), 1),), compressors=None, dimension_names=(dimension,)
    )
    if len(values):
        array[:] = values


def write_manifest(folder: Folder, content: dict[str, Any], storage: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Write the root document with the manifest, whole or not at all; where nothing can be renamed this is the commit."""
    manifest = {
        "format": "panelflow",
        "format_version": FORMAT_VERSION,
        "dataset_id": content_digest(content),
        "content": content,
        "storage": storage,
        "provenance": provenance,
    }
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"panelflow": manifest}}
    folder.write(ROOT, [json.dumps(document, indent=1, allow_nan=False).encode()])


def content_digest(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a manifest's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def digest_names(names: Sequence[Any] | npt.NDArray[Any]) -> str:
    """SHA-256 of a list of names."""
    return hashlib.sha256(json.dumps(list(map(str, names))).encode()).hexdigest()


def _zarr_store(folder: Folder, *, read_only: bool = False) -> Any:
    if folder.is_local:
        return LocalStore(folder.path(), read_only=read_only)
    return FsspecStore.from_url(str(folder.url), storage_options=folder.options, read_only=read_only)


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Read and check the manifest.

    Raises
    ------
    DatasetNotFoundError
        No dataset there, or one that was never committed.
    CorruptDatasetError
        The manifest is not what was written.
    DatasetError
        It was written by a newer panelflow.
    """
    path = folder.path(ROOT)
    try:
        document = json.loads(folder.read(ROOT))
        manifest = document["attributes"]["panelflow"]
    except FileNotFoundError:
        raise DatasetNotFoundError(
            f"There is no dataset at {folder.path()}: {path} is missing. Prepare it; an interrupted run continues."
        ) from None
    except (KeyError, TypeError):
        raise DatasetNotFoundError(f"{path} has no panelflow manifest: not a dataset, or one never committed.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptDatasetError(f"{path} is not whole ({error}); prepare the dataset again.") from None
    if manifest["format_version"] > FORMAT_VERSION:
        raise DatasetError(f"{path} has format version {manifest['format_version']}; this panelflow reads {FORMAT_VERSION}.")
    if content_digest(manifest["content"]) != manifest["dataset_id"]:
        raise CorruptDatasetError(f"{path} was altered: its content does not match its dataset_id. Restore it from a copy.")
    return cast("dict[str, Any]", manifest)


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
        return zarr.open_group(_zarr_store(self.folder, read_only=True), mode="r", use_consolidated=False)

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
