"""What the source is: its files in canonical order, what their footers tell, and the columns that take part.

The canonical order of a panel is sorted path, then row. Columns may stand in a path: hive segments ``key=value``, or the entity
in a file name.
"""

from __future__ import annotations

import fnmatch
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from panelflow.columns import is_numeric
from panelflow.errors import OptionError, PanelError
from panelflow.files import open_input, reaching

_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".parq": "parquet", ".csv": "csv", ".txt": "csv", ".tsv": "csv"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_MAGIC = "*?["
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)
"""What decompression meets in a torn file."""
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
ENTITY_FROM_NAME = "entity"
"""Name of the column that a file name template fills."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the source: its path, format, the columns that its path holds, and its name in messages."""

    path: str
    format: str
    constants: dict[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def shown(self) -> str:
        return self.label or self.path


@dataclass(frozen=True)
class FileInfo:
    """What a footer or a header tells about a file.

    Attributes
    ----------
    columns
        Name -> whether it is numeric; ``None`` where only reading tells (CSV).
    groups
        Rows of each Parquet row group; empty for CSV.
    size
        Bytes on disk.
    changed
        What the file system tells about its last change.
    empty
        No row in it: no byte, no line below the header, no row group.
    """

    file: SourceFile
    columns: dict[str, bool | None]
    types: dict[str, str]
    groups: tuple[int, ...]
    size: int
    changed: str = ""
    empty: bool = False


@dataclass(frozen=True)
class Columns:
    """The columns that take part, by role."""

    entity: str
    date: str
    features: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str | None

    @property
    def keys(self) -> tuple[str, str]:
        return self.entity, self.date

    @property
    def floats(self) -> tuple[str, ...]:
        """Columns of a row block, in its order: features, targets, weight."""
        return (*self.features, *self.targets, *((self.weight,) if self.weight else ()))


def list_files(source: Any, template: str | None, options: dict[str, Any]) -> list[SourceFile]:
    """Expand paths, globs and directories to files, sorted by path.

    Parameters
    ----------
    source
        A path or URL, a glob, or a list of these. Directories are searched for Parquet and CSV files.
    template
        A file name with ``{entity}`` in it, or ``None``.
    options
        fsspec storage options.

    Raises
    ------
    PanelError
        Nothing there, formats mixed, or a file name that does not fit the template.
    """
    sources: Iterable[Any] = source if isinstance(source, list | tuple) else [source]
    for item in sources:
        if not isinstance(item, str | os.PathLike):
            raise OptionError(f"A source is paths, a pandas or a Dask data frame, not {type(item).__name__}: {item!r:.200}")
    found = sorted(path_and_root for item in sources for path_and_root in _expand(os.fspath(item), options))
    if not found:
        raise PanelError(f"No Parquet or CSV file found in {source!r}; name a file, a directory or a pattern.")
    for (left, _), (right, _) in pairwise(found):
        if left == right:
            raise PanelError(f"A file is listed twice; name it once: {left}")
    if len(found) > 1 and all(path.rpartition("/")[0] == root for path, root in found):  # single files: what they share
        common = os.path.commonpath([root for _, root in found])
        found = [(path, common) for path, _ in found]
    files = [SourceFile(path, _format_of(path), _constants_of(path, root, template)) for path, root in found]
    formats = {file.format for file in files}
    if len(formats) > 1:
        first = {kind: next(file.path for file in files if file.format == kind) for kind in sorted(formats)}
        raise PanelError(f"The source mixes Parquet and CSV files; prepare one kind: {first}")
    return files


def _expand(path: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Files of one item of the source, each with the folder below which hive segments count."""
    with reaching(path):
        return _find(path, options)


def _find(path: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    filesystem, plain = url_to_fs(path, **options)
    if any(character in plain for character in _MAGIC) and not filesystem.exists(plain):
        fixed = takewhile(lambda segment: not any(c in segment for c in _MAGIC), plain.split("/"))
        root, named = "/".join(fixed), filesystem.glob(plain)
    elif filesystem.isdir(plain):
        root, named = plain.rstrip("/"), [plain]
    elif filesystem.exists(plain):
        root, named = plain.rpartition("/")[0], [plain]
    else:
        raise PanelError(f"There is no such file or directory: {path}")
    files: dict[str, None] = {}  # a glob such as dir/** names a folder and the files in it
    for name in named:
        inside = filesystem.find(name) if filesystem.isdir(name) else None
        files.update(dict.fromkeys([name] if inside is None else [item for item in inside if _is_panel_file(item, name)]))
    whole = filesystem.unstrip_protocol if "://" in path else str
    return [(whole(name), whole(root)) for name in files]


def _is_panel_file(path: str, folder: str) -> bool:
    """Whether a file of a folder belongs to a panel: by its ending, and nothing hidden."""
    hidden = any(segment.startswith((".", "_")) for segment in path.removeprefix(folder).split("/") if "=" not in segment)
    return _format_by_name(path) is not None and not hidden


def _format_by_name(path: str) -> str | None:
    return _FORMATS.get(_ending(path))


def _ending(path: str) -> str:
    """Ending of a file's name, that of its compression aside."""
    stem = path.lower()
    for suffix in COMPRESSED:
        stem = stem.removesuffix(suffix)
    return os.path.splitext(stem)[1]


def _format_of(path: str) -> str:
    known = _format_by_name(path)
    if known is None:
        raise PanelError(f"Not a Parquet or CSV file by its name (.parquet, .pq, .csv, .txt, .tsv): {path}")
    return known


def _constants_of(path: str, root: str, template: str | None) -> dict[str, str]:
    """Columns that the path holds: hive segments ``key=value`` and the entity of a file name template, all as text."""
    segments = path.removeprefix(root).split("/")
    pairs = [segment.split("=", 1) for segment in segments[:-1] if "=" in segment]
    constants = {key: "" if value == _HIVE_NULL else unquote(value) for key, value in pairs}
    if template is not None:
        before, after = template.split("{entity}", 1)
        packed = "" if after.lower().endswith(COMPRESSED) else f"({'|'.join(map(re.escape, COMPRESSED))})?"
        match = re.fullmatch(f"{re.escape(before)}(.+?){re.escape(after)}{packed}", segments[-1])
        if match is None:
            raise PanelError(f"The file name does not fit the template entity={template!r}: {path}")
        constants[ENTITY_FROM_NAME] = match.group(1)
    return constants


def inspect_file(file: SourceFile, options: dict[str, Any]) -> FileInfo:
    """Read a footer (Parquet) or a header (CSV).

    Raises
    ------
    PanelError
        The file is empty, torn or of another format.
    """
    try:
        size, changed = file_state(file.path, options)
        if size == 0:
            return FileInfo(file, {}, {}, (), 0, changed, empty=True)
        columns: dict[str, bool | None] = dict.fromkeys(file.constants)
        if file.format == "csv":
            names, empty = _read_header(file, options)
            return FileInfo(file, columns | dict.fromkeys(names), {}, (), size, changed, empty)
        with open_input(file.path, options) as stream:
            parquet = open_parquet(stream)
            schema, meta = parquet.schema_arrow, parquet.metadata
        _refuse_repeated(file, schema.names)
        numeric: dict[str, bool | None] = {field.name: is_numeric(field.type) for field in schema}
        groups = tuple(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
        types = {field.name: str(field.type) for field in schema}
        return FileInfo(file, columns | numeric, types, groups, size, changed, empty=meta.num_rows == 0)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError, *DAMAGED) as error:
        raise PanelError(f"{file.shown} cannot be read as {file.format}: {error}") from error


def open_parquet(source: Any, categories: Sequence[str] = (), *, prefetch: bool = False, buffer_size: int = 0) -> pq.ParquetFile:
    """A Parquet file; text columns among ``categories`` come with each distinct value once.

    Old 96-bit times come in microseconds, so that a year beyond 2262 is seen and refused. ``prefetch`` joins the reads of
    many columns into few, as object stores want it.
    """
    return pq.ParquetFile(
        source,
        coerce_int96_timestamp_unit="us",
        read_dictionary=list(categories),
        pre_buffer=prefetch,
        buffer_size=buffer_size,
    )


_STATE = ("mtime", "ino", "created", "ETag", "etag", "LastModified", "last_modified", "generation", "md5Hash")
"""What file systems and object stores tell of the state of a file, where they do."""


def file_state(path: str, options: dict[str, Any]) -> tuple[int, str]:
    """Size of a file, and what changes whenever its content does."""
    filesystem, plain = url_to_fs(path, **options)
    filesystem.invalidate_cache(filesystem._parent(plain))
    info = filesystem.info(plain)
    return int(info["size"]), str([(name, str(info[name])) for name in ("size", *_STATE) if name in info])


def csv_header(file: SourceFile, options: dict[str, Any]) -> list[str]:
    """Column names of a CSV file."""
    return _read_header(file, options)[0]


def _read_header(file: SourceFile, options: dict[str, Any]) -> tuple[list[str], bool]:
    """Column names, from the header line alone, so that no type is guessed from the rows; and whether nothing stands below."""
    with open_input(file.path, options | {"compression": "infer"}) as stream:
        line = stream.readline()
        empty = not stream.read(64).strip()
    names = csv.open_csv(pa.BufferReader(line), parse_options=csv_dialect(file)).schema.names if line.strip() else []
    _refuse_repeated(file, names)
    return cast("list[str]", names), empty


def _refuse_repeated(file: SourceFile, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PanelError(f"{file.shown}: the file names a column twice; rename one: {repeated[0]!r}")


def csv_dialect(file: SourceFile) -> csv.ParseOptions:
    return csv.ParseOptions(delimiter="\t" if _ending(file.path) == ".tsv" else ",")


def select_columns(
    infos: Sequence[FileInfo],
    *,
    entity: str,
    date: str,
    features: Sequence[str],
    targets: Sequence[str],
    weight: str | None,
) -> Columns:
    """Expand patterns and check that every file has every column.

    Raises
    ------
    OptionError
        A pattern that matches nothing, a target named as a feature.
    PanelError
        A file lacks a column, or the column is not numeric there.
    """
    names = sorted({name for info in infos for name in info.columns})
    keys: set[str | None] = {entity, date}
    chosen_targets = _expand_patterns("targets", targets, names, keys | {weight})
    chosen_features = _expand_patterns("features", features, names, keys | {weight} | set(chosen_targets))
    for name in chosen_features:
        if name in chosen_targets or name in keys or name == weight:
            raise OptionError(f"A feature is also a key, the target or the weight, which would leak it: {name!r}")
    for role, chosen, given in (("targets", chosen_targets, targets), ("features", chosen_features, features)):
        if not chosen:
            raise OptionError(f"At least one column is needed; {role}={list(given)!r}")
    if weight in chosen_targets or weight in keys:
        raise OptionError(f"The weight is also a key or a target: {weight!r}")
    columns = Columns(entity, date, chosen_features, chosen_targets, weight)
    for info in infos:
        for name in (*columns.keys, *columns.floats):
            if name not in info.columns:
                raise PanelError(f"{info.file.shown}: column {name!r} is missing; the file has {sorted(info.columns)}")
        for name in columns.floats:
            if info.columns[name] is False:
                raise PanelError(
                    f"{info.file.shown}: column {name!r} has type {info.types[name]}, not a number; convert it or leave it out "
                    f"of features and targets."
                )
    return columns


def _expand_patterns(role: str, patterns: Sequence[str], names: list[str], taken: set[str | None]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise OptionError(f"Columns are named by text; {role}={pattern!r}")
    chosen: dict[str, None] = {}
    for pattern in patterns:
        if pattern in names or not any(character in pattern for character in "*?["):
            chosen[pattern] = None
            continue
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern) and name not in taken]
        if not matches:
            raise OptionError(f"A pattern of {role} matches no column of {names}: {pattern!r}")
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)
