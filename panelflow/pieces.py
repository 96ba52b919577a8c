"""Read the pieces of a unit as Arrow tables, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as csv

from panelflow.columns import Locate, parse_floats
from panelflow.errors import PanelError, StorageError
from panelflow.files import open_input, open_native
from panelflow.panel import Piece
from panelflow.source import COMPRESSED, DAMAGED, csv_dialect, csv_header, file_state, open_parquet


def read_pieces(
    pieces: Sequence[Piece], keys: Sequence[str], floats: Sequence[str], options: dict[str, Any]
) -> Iterator[pa.Table]:
    """Tables of the named columns of each piece; CSV keys come as text, its numbers as float64.

    Neighbouring parts of one row group are decoded as a stream, so that no more than one of them is in memory.

    Raises
    ------
    PanelError
        A malformed line, or text where a number is due.
    StorageError
        The file system refused.
    """
    stream: Iterator[pa.Table] = iter(())
    before: Piece | None = None
    for piece in pieces:
        held = [name for name in (*keys, *floats) if name not in piece.file.constants]
        try:
            if piece.part is not None:
                if before is None or not piece.continues(before):
                    stream = _stream_group(piece, held, keys, options)
                table = next(stream)
            elif piece.file.format == "parquet":
                table = _read_groups(piece, held, keys, options)
            else:
                table = _read_csv(piece, held, keys, options)
        except StopIteration:
            raise PanelError(f"{piece.file.shown} changed while it was being prepared; run again once it is still.") from None
        except (pa.ArrowInvalid, *DAMAGED) as error:
            raise PanelError(f"{piece.file.shown} cannot be read: {error}") from error
        except OSError as error:
            raise StorageError(f"{piece.file.shown} could not be read: {error}. Finished pieces are kept; run again.") from error
        before = piece
        yield _with_constants(table, piece, keys, floats, options)


def read_piece(piece: Piece, keys: Sequence[str], floats: Sequence[str], options: dict[str, Any]) -> pa.Table:
    """Table of a single piece; see :func:`read_pieces`."""
    return next(read_pieces([piece], keys, floats, options))


def _with_constants(
    table: pa.Table, piece: Piece, keys: Sequence[str], floats: Sequence[str], options: dict[str, Any]
) -> pa.Table:
    """Add the columns that the path of the file holds."""
    for name in (*keys, *floats):
        if name in piece.file.constants:
            value = piece.file.constants[name]
            text = pa.chunked_array([pa.repeat(value if value or name in keys else pa.scalar(None, pa.string()), table.num_rows)])
            column = text if name in keys else parse_floats(name, text, locator(piece, options))
            table = table.append_column(name, column)
    return table


def check_unchanged(piece: Piece, options: dict[str, Any]) -> None:
    """Refuse what was read from a file that is no longer the one that was listed.

    Raises
    ------
    PanelError
    """
    if file_state(piece.file.path, options)[1] != piece.changed:
        raise PanelError(f"{piece.file.shown} changed while it was being prepared; run again once it is still.")


def _read_groups(piece: Piece, held: list[str], keys: Sequence[str], options: dict[str, Any]) -> pa.Table:
    with open_native(piece.file.path, options) as source:
        parquet = open_parquet(source, [name for name in keys if name in held], prefetch="://" in piece.file.path)
        return parquet.read_row_groups(list(range(piece.start, piece.stop)), columns=held, use_threads=False)


_STREAM_BUFFER = 2**16
"""Bytes that are read ahead in each column of a row group that is streamed, at most."""


def _stream_group(first: Piece, held: list[str], keys: Sequence[str], options: dict[str, Any]) -> Iterator[pa.Table]:
    """Tables of the parts of a row group, each of as many rows as the first but for the last."""
    start, wanted = first.part or (0, 0)
    assert start == 0 < wanted, first
    with open_native(first.file.path, options) as source:
        parquet = open_parquet(source, [name for name in keys if name in held], buffer_size=min(8 * wanted, _STREAM_BUFFER))
        batches: list[pa.RecordBatch] = []
        rows = 0
        for batch in parquet.iter_batches(wanted, row_groups=[first.start], columns=held, use_threads=False):
            while batch.num_rows:  # a batch may be shorter than asked for
                part = batch.slice(0, wanted - rows)
                batches.append(part)
                rows, batch = rows + part.num_rows, batch.slice(part.num_rows)
                if rows == wanted:
                    yield pa.Table.from_batches(batches)
                    batches, rows = [], 0
        if batches:
            yield pa.Table.from_batches(batches)


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
