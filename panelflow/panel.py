"""Cut the source into units of bounded bytes, and read a piece of one as an Arrow table.

Parquet is read by row groups, CSV by byte ranges that end at line ends; a plain text file larger than a unit must therefore
not hold line breaks inside quotes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as csv

from panelflow.columns import Locate, parse_floats
from panelflow.errors import PanelError, StorageError
from panelflow.files import open_input, open_native
from panelflow.source import COMPRESSED, DAMAGED, Columns, FileInfo, SourceFile, csv_dialect, csv_header, open_parquet

_COMPRESSION = 8
"""How much text a compressed file is taken to hold, for each of its bytes."""


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
        splittable = not info.file.path.lower().endswith(COMPRESSED)
        # A value takes at least a digit and a separator as text, eight bytes decoded.
        growth = max(1.0, 8 * (2 + len(columns.floats)) / (2 * len(info.columns))) * (1 if splittable else _COMPRESSION)
        step = max(int(unit_bytes / growth), 1) if splittable else info.size
        for start in range(0, info.size, step):
            stop = min(start + step, info.size)
            yield Piece(info.file, start, stop, 0, int((stop - start) * growth))
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
    StorageError
        The file system refused.
    """
    held = [name for name in (*keys, *floats) if name not in piece.file.constants]
    try:
        if piece.file.format == "parquet":
            groups = list(range(piece.start, piece.stop))
            with open_native(piece.file.path, options) as source:
                table = open_parquet(source, [name for name in keys if name in held]).read_row_groups(
                    groups, columns=held, use_threads=False
                )
        else:
            table = _read_csv(piece, held, keys, options)
    except (pa.ArrowInvalid, *DAMAGED) as error:
        raise PanelError(f"{piece.file.shown} cannot be read: {error}") from error
    except OSError as error:
        raise StorageError(f"{piece.file.shown} could not be read: {error}. Finished pieces are kept; run again.") from error
    for name in (*keys, *floats):
        if name in piece.file.constants:
            value = piece.file.constants[name]
            text = pa.chunked_array([pa.repeat(value if value or name in keys else pa.scalar(None, pa.string()), table.num_rows)])
            column = text if name in keys else parse_floats(name, text, locator(piece, options))
            table = table.append_column(name, column)
    return table


def _read_csv(piece: Piece, held: list[str], keys: Sequence[str], options: dict[str, Any]) -> pa.Table:
    names = csv_header(piece.file, options)
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
        parse_options=csv_dialect(piece.file),
        convert_options=csv.ConvertOptions(
            include_columns=list(types), column_types=types, strings_can_be_null=strings_can_be_null
        ),
    )


def _csv_body(piece: Piece, options: dict[str, Any]) -> bytes:
    """Bytes of the lines that start in this piece's range, without the header line."""
    with open_input(piece.file.path, options | {"compression": "infer"}) as stream:
        if piece.file.path.lower().endswith(COMPRESSED):
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
            before, left = 1, max(piece.start - 1, 0)
            while left:
                block = stream.read(min(left, 2**20))
                before, left = before + block.count(b"\n"), left - len(block)
        return f"{piece.file.shown}, line {before + row + 1}"

    return locate
