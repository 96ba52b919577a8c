"""Open a source as an ordered list of units of bounded bytes, and read a unit as Arrow tables.

The canonical order of a panel is sorted path, then row. Parquet is read by row groups, CSV by byte ranges that end at line
ends; a plain text file larger than a unit must therefore not hold line breaks inside quotes.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from panelflow.columns import Locate, is_numeric, parse_floats
from panelflow.errors import OptionError, PanelError
from panelflow.files import open_input

_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".parq": "parquet", ".csv": "csv", ".txt": "csv", ".tsv": "csv"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
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
    """

    file: SourceFile
    columns: dict[str, bool | None]
    types: dict[str, str]
    groups: tuple[int, ...]
    size: int
    changed: str = ""


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


@dataclass(frozen=True)
class Piece:
    """A part of one file: row groups ``[start, stop)`` of Parquet, bytes ``[start, stop)`` of CSV."""

    file: SourceFile
    start: int
    stop: int
    first_row: int
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """What one task reads: pieces in canonical order; ``nbytes`` estimates them decoded."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


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
    paths = sorted(path for item in sources for path in _expand(os.fspath(item), options))
    if not paths:
        raise PanelError(f"No Parquet or CSV file found in {source!r}; name a file, a directory or a pattern.")
    for left, right in zip(paths, paths[1:], strict=False):
        if left == right:
            raise PanelError(f"A file is listed twice; name it once: {left}")
    files = [SourceFile(path, _format_of(path), _constants_of(path, template)) for path in paths]
    formats = {file.format for file in files}
    if len(formats) > 1:
        first = {kind: next(file.path for file in files if file.format == kind) for kind in sorted(formats)}
        raise PanelError(f"The source mixes Parquet and CSV files; prepare one kind: {first}")
    return files


def _expand(path: str, options: dict[str, Any]) -> list[str]:
    filesystem, plain = url_to_fs(path, **options)
    if any(character in plain for character in "*?["):
        found, chosen = filesystem.glob(plain), True
    elif filesystem.isdir(plain):
        found, chosen = filesystem.find(plain), False
    elif filesystem.exists(plain):
        found, chosen = [plain], True
    else:
        raise PanelError(f"There is no such file or directory: {path}")
    expanded = []
    for name in found:
        base = name.rsplit("/", 1)[-1]
        if filesystem.isdir(name):
            expanded += [item for item in filesystem.find(name) if _is_panel_file(item)]
        elif chosen or (_is_panel_file(name) and not base.startswith((".", "_"))):
            expanded.append(name)
    return [filesystem.unstrip_protocol(name) if "://" in path else name for name in expanded]


def _is_panel_file(path: str) -> bool:
    return _format_by_name(path) is not None


def _format_by_name(path: str) -> str | None:
    stem = path.lower()
    for suffix in _COMPRESSED:
        stem = stem.removesuffix(suffix)
    return _FORMATS.get(os.path.splitext(stem)[1])


def _format_of(path: str) -> str:
    known = _format_by_name(path)
    if known is None:
        raise PanelError(f"Not a Parquet or CSV file by its name (.parquet, .pq, .csv, .txt, .tsv): {path}")
    return known


def _constants_of(path: str, template: str | None) -> dict[str, str]:
    """Columns that the path holds: hive segments ``key=value`` and the entity of a file name template, all as text."""
    segments = path.split("/")
    pairs = [segment.split("=", 1) for segment in segments[:-1] if "=" in segment]
    constants = {key: "" if value == _HIVE_NULL else unquote(value) for key, value in pairs}
    if template is not None:
        before, after = template.split("{entity}", 1)
        match = re.fullmatch(re.escape(before) + "(.+)" + re.escape(after), segments[-1])
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
    constants: dict[str, bool | None] = dict.fromkeys(file.constants)
    try:
        with open_input(file.path, options) as stream:
            if file.format == "csv":
                stream.seek(0, 2)
                names = dict.fromkeys(_header(file, options))
                return FileInfo(file, constants | names, {}, (), stream.tell(), _last_change(file.path, options))
            parquet = pq.ParquetFile(stream)
            schema, meta = parquet.schema_arrow, parquet.metadata
            numeric: dict[str, bool | None] = {field.name: is_numeric(field.type) for field in schema}
            groups = tuple(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
            types = {field.name: str(field.type) for field in schema}
            stream.seek(0, 2)
            return FileInfo(file, constants | numeric, types, groups, stream.tell(), _last_change(file.path, options))
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise PanelError(f"{file.shown} cannot be read as {file.format}: {error}") from error


def _last_change(path: str, options: dict[str, Any]) -> str:
    filesystem, plain = url_to_fs(path, **options)
    return str(filesystem.ukey(plain))


def _header(file: SourceFile, options: dict[str, Any]) -> list[str]:
    with open_input(file.path, options | {"compression": "infer"}) as stream:
        names = csv.open_csv(pa.BufferReader(_first_lines(stream)), parse_options=_dialect(file)).schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PanelError(f"{file.shown}: the header names a column twice; rename one: {repeated[0]!r}")
    return cast("list[str]", names)


def _first_lines(stream: Any) -> bytes:
    """The header line alone, so that no data type is guessed from the rows."""
    return cast(bytes, stream.readline())


def _dialect(file: SourceFile) -> csv.ParseOptions:
    stem = file.path.lower()
    for suffix in _COMPRESSED:
        stem = stem.removesuffix(suffix)
    return csv.ParseOptions(delimiter="\t" if stem.endswith(".tsv") else ",")


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
    keys = {entity, date}
    chosen_targets = _expand_patterns("targets", targets, names, keys | {weight})
    chosen_features = _expand_patterns("features", features, names, keys | {weight} | set(chosen_targets))
    for name in chosen_features:
        if name in chosen_targets or name in keys or name == weight:
            raise OptionError(f"A feature is also a key, the target or the weight, which would leak it: {name!r}")
    if not chosen_targets:
        raise OptionError(f"At least one target is needed; targets={list(targets)!r}")
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


def make_units(infos: Sequence[FileInfo], columns: Columns, unit_bytes: int) -> list[Unit]:
    """Cut files into pieces of at most ``unit_bytes`` decoded (one row group at least) and join small ones."""
    units: list[Unit] = []
    pieces: list[Piece] = []
    size = 0
    for piece in (piece for info in infos for piece in _cut(info, columns, unit_bytes)):
        if pieces and size + piece.nbytes > unit_bytes:
            units.append(Unit(len(units), tuple(pieces)))
            pieces, size = [], 0
        pieces.append(piece)
        size += piece.nbytes
    if pieces:
        units.append(Unit(len(units), tuple(pieces)))
    return units


def _cut(info: FileInfo, columns: Columns, unit_bytes: int) -> Iterator[Piece]:
    if info.file.format == "csv":
        splittable = not info.file.path.lower().endswith(_COMPRESSED)
        step = unit_bytes if splittable else info.size
        for start in range(0, info.size, step):
            stop = min(start + step, info.size)
            yield Piece(info.file, start, stop, 0, (stop - start) * (1 if splittable else 4))
        return
    row_bytes = 8 * (2 + len(columns.floats))
    start, rows, first_row = 0, 0, 0
    for group, group_rows in enumerate(info.groups):
        if group > start and (rows + group_rows) * row_bytes > unit_bytes:
            yield Piece(info.file, start, group, first_row, rows * row_bytes)
            start, first_row, rows = group, first_row + rows, 0
        rows += group_rows
    if rows:
        yield Piece(info.file, start, len(info.groups), first_row, rows * row_bytes)


def read_piece(piece: Piece, keys: Sequence[str], floats: Sequence[str], options: dict[str, Any]) -> pa.Table:
    """Read the named columns of a piece; CSV keys come as text, its numbers as float64.

    Raises
    ------
    PanelError
        A malformed line, or text where a number is due.
    """
    held = [name for name in (*keys, *floats) if name not in piece.file.constants]
    try:
        if piece.file.format == "parquet":
            with open_input(piece.file.path, options) as stream:
                groups = list(range(piece.start, piece.stop))
                table = pq.ParquetFile(stream).read_row_groups(groups, columns=held, use_threads=False)
        else:
            table = _read_csv(piece, held, keys, options)
    except (pa.ArrowInvalid, OSError) as error:
        raise PanelError(f"{piece.file.shown} cannot be read: {error}") from error
    for name in (*keys, *floats):
        if name in piece.file.constants:
            text = pa.chunked_array([pa.repeat(piece.file.constants[name], table.num_rows)])
            column = text if name in keys else parse_floats(name, text, locator(piece, options))
            table = table.append_column(name, column)
    return table


def _read_csv(piece: Piece, held: list[str], keys: Sequence[str], options: dict[str, Any]) -> pa.Table:
    names = _header(piece.file, options)
    body = _csv_body(piece, options)
    types = {name: pa.string() if name in keys else pa.float64() for name in held}
    try:
        return _parse_csv(piece, body, names, types)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
    table = _parse_csv(piece, body, names, dict.fromkeys(held, pa.string()), strings_can_be_null=True)
    keyed = _parse_csv(piece, body, names, {name: pa.string() for name in held if name in keys})
    locate = locator(piece, options)
    return pa.table(
        {name: keyed[name] if name in keys else parse_floats(name, table[name], locate) for name in held},
    )


def _parse_csv(
    piece: Piece, body: bytes, names: list[str], types: dict[str, pa.DataType], *, strings_can_be_null: bool = False
) -> pa.Table:
    if not body.strip() or not types:
        return pa.table({name: pa.array([], kind) for name, kind in types.items()})
    return csv.read_csv(
        pa.BufferReader(body),
        read_options=csv.ReadOptions(column_names=names, use_threads=False),
        parse_options=_dialect(piece.file),
        convert_options=csv.ConvertOptions(
            include_columns=list(types), column_types=types, strings_can_be_null=strings_can_be_null
        ),
    )


def _csv_body(piece: Piece, options: dict[str, Any]) -> bytes:
    """Bytes of the lines that start in this piece's range, without the header line."""
    with open_input(piece.file.path, options | {"compression": "infer"}) as stream:
        if piece.file.path.lower().endswith(_COMPRESSED):
            stream.readline()
            return cast(bytes, stream.read())
        stream.seek(max(piece.start - 1, 0))
        stream.readline()  # the header, or the line that an earlier piece owns
        start = stream.tell()
        body = cast(bytes, stream.read(max(piece.stop - start, 0)))
        return body if body.endswith(b"\n") or start >= piece.stop else body + cast(bytes, stream.readline())


def locator(piece: Piece, options: dict[str, Any]) -> Locate:
    """Words for the place of a row of this piece; counts lines only when asked, that is when something is wrong."""

    def locate(row: int) -> str:
        if piece.file.format == "parquet":
            return f"{piece.file.shown}, row {piece.first_row + row}"
        with open_input(piece.file.path, options | {"compression": "infer"}) as stream:
            before = 1 + stream.read(max(piece.start - 1, 0)).count(b"\n")
        return f"{piece.file.shown}, line {before + row + 1}"

    return locate
