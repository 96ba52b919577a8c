"""Cut the source into units of bounded bytes.

Parquet is cut between row groups, and inside of one that is larger than a unit; CSV by byte ranges that end at line ends, so
that a plain text file larger than a unit must not hold line breaks inside quotes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from panelflow.source import COMPRESSED, Columns, FileInfo, SourceFile

_COMPRESSION = 8
"""How much text a compressed file is taken to hold, for each of its bytes."""


_MOST_PIECES = 512
"""Pieces of a unit: thousands of tiny files are work for more than one worker."""


@dataclass(frozen=True)
class Piece:
    """A part of one file: row groups ``[start, stop)`` of Parquet, bytes ``[start, stop)`` of CSV.

    Attributes
    ----------
    first_row
        Its first row in the file (Parquet).
    changed
        What told of the last change of the file when it was listed.
    part
        Rows ``[start, stop)`` of a single row group of which the piece is a part, else ``None``.
    """

    file: SourceFile
    start: int
    stop: int
    first_row: int
    nbytes: int
    changed: str = ""
    part: tuple[int, int] | None = None

    def continues(self, other: Piece) -> bool:
        """Whether this piece goes on in the row group that the other one breaks off in."""
        parts = self.part is not None and self.part[0] > 0 and other.part is not None
        return parts and (self.file.path, self.start) == (other.file.path, other.start)


@dataclass(frozen=True)
class Unit:
    """What becomes one scratch file: pieces in canonical order; ``nbytes`` estimates them decoded."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def make_units(infos: Sequence[FileInfo], columns: Columns, unit_bytes: int) -> list[Unit]:
    """Cut files into pieces of at most ``unit_bytes`` decoded, and join small ones."""
    units: list[Unit] = []
    pieces: list[Piece] = []
    size = 0
    for piece in (piece for info in infos for piece in _cut(info, columns, unit_bytes)):
        if pieces and (size + piece.nbytes > unit_bytes or len(pieces) == _MOST_PIECES):
            units.append(Unit(len(units), tuple(pieces)))
            pieces, size = [], 0
        pieces.append(piece)
        size += piece.nbytes
    if pieces:
        units.append(Unit(len(units), tuple(pieces)))
    return units


def make_batches(units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Units that one task reads: one each, or all those of one row group, which cannot be entered midway."""
    batches: list[list[Unit]] = []
    for unit in units:
        if batches and unit.pieces[0].continues(batches[-1][-1].pieces[-1]):
            batches[-1].append(unit)
        else:
            batches.append([unit])
    return [tuple(batch) for batch in batches]


def _cut(info: FileInfo, columns: Columns, unit_bytes: int) -> Iterator[Piece]:
    return _cut_text(info, columns, unit_bytes) if info.file.format == "csv" else _cut_groups(info, columns, unit_bytes)


def _cut_text(info: FileInfo, columns: Columns, unit_bytes: int) -> Iterator[Piece]:
    splittable = not info.file.path.lower().endswith(COMPRESSED)
    # A value takes at least a digit and a separator as text, eight bytes decoded.
    growth = max(1.0, 8 * (2 + len(columns.floats)) / (2 * len(info.columns))) * (1 if splittable else _COMPRESSION)
    step = max(int(unit_bytes / growth), 1) if splittable else info.size
    for start in range(0, info.size, step):
        stop = min(start + step, info.size)
        yield Piece(info.file, start, stop, 0, int((stop - start) * growth), info.changed)


def _cut_groups(info: FileInfo, columns: Columns, unit_bytes: int) -> Iterator[Piece]:
    row_bytes = row_bytes_of(columns)
    most = max(unit_bytes // row_bytes, 1)
    start, rows, first_row = 0, 0, 0
    for group, group_rows in enumerate(info.groups):
        if group > start and rows + group_rows > most:
            yield Piece(info.file, start, group, first_row, rows * row_bytes, info.changed)
            start, first_row, rows = group, first_row + rows, 0
        rows += group_rows
        if group == start and rows > most:
            for low in range(0, rows, most):
                high = min(low + most, rows)
                yield Piece(info.file, group, group + 1, first_row + low, (high - low) * row_bytes, info.changed, (low, high))
            start, first_row, rows = group + 1, first_row + rows, 0
    if rows:
        yield Piece(info.file, start, len(info.groups), first_row, rows * row_bytes, info.changed)


def row_bytes_of(columns: Columns) -> int:
    """Bytes that a row is taken to have when it is decoded: eight for each value."""
    return 8 * (2 + len(columns.floats))
