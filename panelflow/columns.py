"""Arrow columns -> entities, int64 dates and float blocks, or an error that names file, column, value and remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from panelflow.errors import PanelError

Locate = Callable[[int], str]
"""Where a row of a table stands in its file, in words."""

_COMPACT = r"^\d{8}$"
_OFFSET = r":\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"


@dataclass(frozen=True)
class Dates:
    """Dates of some rows: int64 nanoseconds since 1970 (UTC) and the zone, ``None`` where they are naive."""

    values: npt.NDArray[np.int64]
    zone: str | None


@dataclass(frozen=True)
class Entities:
    """Entities of some rows: positions in a list of distinct names, all text or all integers."""

    codes: npt.NDArray[np.int64]
    names: list[str] | list[int]
    kind: str


def to_dates(name: str, column: pa.ChunkedArray, locate: Locate) -> Dates:
    """Convert a date column: timestamps of any unit, date32/64, ISO text or yyyymmdd text or integers.

    Raises
    ------
    PanelError
        Missing, unparseable or out-of-range dates, times with and without a zone mixed, another type.
    """
    column = _decode_dictionary(column)
    _refuse_missing("date", name, column, locate)
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return _cast_dates(name, column, getattr(column.type, "tz", None), locate)
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
        _refuse_unlike(_COMPACT, "yyyymmdd integers", name, column, locate)
    if _is_text(column.type):
        return _parse_dates(name, column.cast(pa.string()), locate)
    if len(column) == 0:
        return Dates(np.empty(0, np.int64), None)
    raise PanelError(
        f"{locate(0)}: date column {name!r} has type {column.type}; convert it to datetime64, date32, ISO text or "
        f"yyyymmdd integers: {column[0]}"
    )


def _parse_dates(name: str, column: pa.ChunkedArray, locate: Locate) -> Dates:
    """Parse each distinct text once; eight digits are yyyymmdd, all else is ISO 8601."""
    encoded = column.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # no rows at all
        return Dates(np.empty(0, np.int64), None)
    texts = encoded.dictionary
    compact = pc.match_substring_regex(texts, _COMPACT)
    parts = [pc.utf8_slice_codeunits(texts, *bounds) for bounds in ((0, 4), (4, 6), (6, 8))]
    iso = pc.if_else(compact, pc.binary_join_element_wise(*parts, "-"), texts)
    zoned = pc.match_substring_regex(texts, _OFFSET).to_numpy(zero_copy_only=False)
    if zoned.any() and not zoned.all():
        odd = encoded.indices.to_numpy()
        row = int((zoned[odd] != zoned[odd[0]]).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} mixes times with and without a zone, for example "
            f"{texts[int(zoned.argmax())]} and {texts[int(zoned.argmin())]}; write all of them with a zone or none."
        )
    zone = "UTC" if len(zoned) and zoned.all() else None
    try:
        parsed = pc.cast(iso, pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        bad = next(i for i in range(len(iso)) if not _parses(iso[i], zone))
        row = int((encoded.indices.to_numpy() == bad).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} has a value that is neither an ISO date between 1677 and 2262 nor "
            f"yyyymmdd; correct or drop the row: {texts[bad].as_py()!r}"
        ) from None
    return Dates(parsed.cast(pa.int64()).to_numpy()[encoded.indices.to_numpy()], zone)


def _parses(text: pa.Scalar, zone: str | None) -> bool:
    try:
        pc.cast(pa.array([text.as_py()]), pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        return False
    return True


def _cast_dates(name: str, column: pa.ChunkedArray, zone: str | None, locate: Locate) -> Dates:
    try:
        stamps = column.cast(pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        wide = column.cast(pa.timestamp("s", zone), safe=False).cast(pa.int64()).to_numpy()
        row = int((np.abs(wide) > np.iinfo(np.int64).max // 10**9).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} has a date outside the years 1677 to 2262, which int64 nanoseconds "
            f"cannot hold; correct or drop the row: {column[row]}"
        ) from None
    return Dates(stamps.cast(pa.int64()).to_numpy(), zone)


def to_entities(name: str, column: pa.ChunkedArray, locate: Locate) -> Entities:
    """Convert an entity column of text, integers or categories of either.

    Raises
    ------
    PanelError
        Missing or empty keys, or another type.
    """
    column = _decode_dictionary(column)
    _refuse_missing("entity", name, column, locate)
    if pa.types.is_integer(column.type):
        if len(column) and pc.max(column).as_py() > np.iinfo(np.int64).max:
            raise PanelError(f"{locate(0)}: entity column {name!r} exceeds int64; make it text: {pc.max(column)}")
        distinct, codes = np.unique(column.cast(pa.int64()).to_numpy(), return_inverse=True)
        return Entities(codes.astype(np.int64), distinct.tolist(), "int")
    if _is_text(column.type):
        if len(column) == 0:
            return Entities(np.empty(0, np.int64), [], "text")
        encoded = column.cast(pa.large_string()).dictionary_encode().combine_chunks()
        return Entities(encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist(), "text")
    if len(column) == 0:
        return Entities(np.empty(0, np.int64), [], "text")
    raise PanelError(
        f"{locate(0)}: entity column {name!r} has type {column.type}; entities are text, integers or categories of "
        f"these: {column[0]}"
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def _refuse_missing(role: str, name: str, column: pa.ChunkedArray, locate: Locate) -> None:
    missing = pc.is_null(column)
    if _is_text(column.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(pc.utf8_length(column.cast(pa.large_string())), 0), True))
    flags = missing.to_numpy()
    if flags.any():
        raise PanelError(
            f"{locate(int(flags.argmax()))}: {role} column {name!r} has {int(flags.sum()):,} missing keys; "
            f"fill or drop these rows: {column[int(flags.argmax())].as_py()!r}"
        )


def _refuse_unlike(pattern: str, what: str, name: str, column: pa.ChunkedArray, locate: Locate) -> None:
    unlike = pc.invert(pc.match_substring_regex(column, pattern)).to_numpy()
    if unlike.any():
        row = int(unlike.argmax())
        raise PanelError(f"{locate(row)}: date column {name!r} does not hold {what}; convert it: {column[row]}")


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a feature, target or weight may have this Arrow type (all-null columns may)."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


_TILE_ROWS = 4096


def fill_block(columns: Sequence[pa.ChunkedArray], block: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Write numeric columns side by side into ``block`` [rows, columns], missing values as NaN.

    A value too large for the type of the block becomes infinite. Rows are written in tiles that stay in the processor's
    cache: column by column, every line of the block would travel once for each column.

    Returns
    -------
    bool [columns]
        Whether a column has an infinite value in the block.
    """
    values = [_to_numpy(column) for column in columns]
    infinite = np.zeros(len(columns), dtype=bool)
    with np.errstate(over="ignore"):
        for start in range(0, len(block), _TILE_ROWS):
            tile = block[start : start + _TILE_ROWS]
            for position, column in enumerate(values):
                tile[:, position] = column[start : start + _TILE_ROWS]
            if not np.isfinite(tile.sum(dtype=np.float64)):  # rarely more than a missing value
                infinite |= np.isinf(tile).any(axis=0)
    return infinite


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A numeric column as floats; integers by way of float64 always, since a chunk with nulls comes that way."""
    column = _decode_dictionary(column)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if not pa.types.is_floating(column.type):
        column = column.cast(pa.float64(), safe=False)
    chunks = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate([*chunks, np.empty(0, dtype=column.type.to_pandas_dtype())])


def _to_float(text: str) -> float:
    if "_" in text:  # Python reads 1_000, no table means it
        raise ValueError(text)
    return float(text)


_WORDS = {"true": 1.0, "false": 0.0}


def parse_floats(name: str, column: pa.ChunkedArray, locate: Locate) -> pa.ChunkedArray:
    """Parse a text column that did not read as numbers: booleans in words are 1 and 0, anything else is refused."""
    values = np.empty(len(column))
    for row, text in enumerate(column.to_pylist()):
        if text is None:
            values[row] = np.nan
            continue
        try:
            values[row] = _WORDS[text.lower()] if text.lower() in _WORDS else _to_float(text)
        except ValueError:
            raise PanelError(
                f"{locate(row)}: column {name!r} is not numeric; leave it out of features and targets, or correct "
                f"the value: {text!r}"
            ) from None
    return pa.chunked_array([pa.array(values, from_pandas=False)])
