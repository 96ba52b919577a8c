"""Documents and arrays of a dataset on disk: an ordinary Zarr v3 group with a manifest in its attributes.

The manifest stands under ``panelflow``. Its ``content`` is what the dataset is, and ``dataset_id`` is the digest of that;
``storage`` says how the bytes lie, ``provenance`` where they came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import FsspecStore, LocalStore

from panelflow.errors import CorruptDatasetError, DatasetError, DatasetNotFoundError
from panelflow.files import Folder
from panelflow.shards import ArrayGrid

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
    root = zarr.open_group(zarr_store(folder), mode="a", zarr_format=3)
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


def zarr_store(folder: Folder, *, read_only: bool = False) -> Any:
    """The store by which zarr-python opens a folder."""
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
