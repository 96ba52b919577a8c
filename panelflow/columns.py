"""Arrow columns -> entities, int64 dates and float blocks, or an error that names file, column, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
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
    """Dates of some rows: positions in a list of distinct int64 nanoseconds since 1970 (UTC), and the zone.

    ``zone`` is ``None`` where they are naive.
    """

    codes: npt.NDArray[np.int64]
    distinct: npt.NDArray[np.int64]
    zone: str | None

    @property
    def values(self) -> npt.NDArray[np.int64]:
        return self.distinct[self.codes]


_NO_DATES = Dates(np.empty(0, np.int64), np.empty(0, np.int64), None)


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
    _refuse_missing("date", name, _is_missing(column), column, locate)
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return _cast_dates(name, column, getattr(column.type, "tz", None), locate)
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
        _refuse_unlike(_COMPACT, "yyyymmdd integers", name, column, locate)
    if _is_text(column.type):
        return _parse_dates(name, column.cast(pa.string()), locate)
    if len(column) == 0:
        return _NO_DATES
    raise PanelError(
        f"{locate(0)}: date column {name!r} has type {column.type}; convert it to datetime64, date32, ISO text or "
        f"yyyymmdd integers: {column[0]}"
    )


def _parse_dates(name: str, column: pa.ChunkedArray, locate: Locate) -> Dates:
    """Parse each distinct text once; eight digits are yyyymmdd, all else is ISO 8601."""
    if len(column) == 0:
        return _NO_DATES
    codes, texts = _distinct(column)
    compact = pc.match_substring_regex(texts, _COMPACT)
    parts = [pc.utf8_slice_codeunits(texts, *bounds) for bounds in ((0, 4), (4, 6), (6, 8))]
    iso = pc.if_else(compact, pc.binary_join_element_wise(*parts, "-"), texts)
    zoned = pc.match_substring_regex(texts, _OFFSET).to_numpy(zero_copy_only=False)
    if zoned.any() and not zoned.all():
        row = int((zoned[codes] != zoned[codes[0]]).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} mixes times with and without a zone, for example "
            f"{texts[int(zoned.argmax())]} and {texts[int(zoned.argmin())]}; write all of them with a zone or none."
        )
    zone = "UTC" if len(zoned) and zoned.all() else None
    try:
        parsed = pc.cast(iso, pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        bad = next(i for i in range(len(iso)) if not _parses(iso[i], zone))
        row = int((codes == bad).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} has a value that is neither an ISO date between 1677 and 2262 nor "
            f"yyyymmdd; correct or drop the row: {texts[bad].as_py()!r}"
        ) from None
    return Dates(codes, parsed.cast(pa.int64()).to_numpy(), zone)


def _parses(text: pa.Scalar, zone: str | None) -> bool:
    try:
        pc.cast(pa.array([text.as_py()]), pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        return False
    return True


def _cast_dates(name: str, column: pa.ChunkedArray, zone: str | None, locate: Locate) -> Dates:
    if len(column) == 0:
        return _NO_DATES
    try:
        stamps = column.cast(pa.timestamp("ns", zone))
    except pa.ArrowInvalid:
        wide = column.cast(pa.timestamp("s", zone), safe=False).cast(pa.int64()).to_numpy()
        row = int((np.abs(wide) > np.iinfo(np.int64).max // 10**9).argmax())
        raise PanelError(
            f"{locate(row)}: date column {name!r} has a date outside the years 1677 to 2262, which int64 nanoseconds "
            f"cannot hold; correct or drop the row: {column[row]}"
        ) from None
    codes, distinct = _distinct(stamps.cast(pa.int64()))
    return Dates(codes, distinct.to_numpy(), zone)


def to_entities(name: str, column: pa.ChunkedArray, locate: Locate) -> Entities:
    """Convert an entity column of text, integers or categories of either.

    Raises
    ------
    PanelError
        Missing or empty keys, or another type.
    """
    if len(column) == 0:
        return Entities(np.empty(0, np.int64), [], "text")
    codes, values = _distinct(column)
    if not (_is_text(values.type) or pa.types.is_integer(values.type) or pa.types.is_null(values.type)):
        raise PanelError(
            f"{locate(0)}: entity column {name!r} has type {column.type}; entities are text, integers or categories of "
            f"these: {column[0]}"
        )
    missing = np.append(_is_missing(values), True)[codes]  # the code -1 is a null of the column
    _refuse_missing("entity", name, missing, column, locate)
    used = np.bincount(codes, minlength=len(values)) > 0
    if not used.all():  # categories that no row has
        codes, values = (np.cumsum(used) - 1)[codes], values.filter(pa.array(used))
    if _is_text(values.type):
        return Entities(codes, values.to_pylist(), "text")
    largest = pc.max(values).as_py()
    if largest > np.iinfo(np.int64).max:
        raise PanelError(f"{locate(0)}: entity column {name!r} exceeds int64; make it text: {largest}")
    return Entities(codes, values.to_pylist(), "int")


def _distinct(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Codes of the rows, -1 for nulls, and the values that they stand for."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # what an older Arrow makes of several chunks
        encoded = pa.concat_arrays(encoded.chunks)
    codes = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    return codes.to_numpy().astype(np.int64), encoded.dictionary


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def _is_missing(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Nulls, and texts without a character."""
    missing = pc.is_null(column)
    if _is_text(column.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(pc.binary_length(column.cast(pa.large_string())), 0), True))
    flags: npt.NDArray[np.bool_] = missing.to_numpy(zero_copy_only=False)
    return flags


def _refuse_missing(
    role: str, name: str, missing: npt.NDArray[np.bool_], column: pa.Array | pa.ChunkedArray, locate: Locate
) -> None:
    if missing.any():
        row = int(missing.argmax())
        raise PanelError(
            f"{locate(row)}: {role} column {name!r} has {int(missing.sum()):,} missing keys; "
            f"fill or drop these rows: {column[row].as_py()!r}"
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


def to_floats(column: pa.ChunkedArray, dtype: str) -> npt.NDArray[Any]:
    """A numeric column as floats [rows] of a type, missing values as NaN; what is too large for it becomes infinite.

    The array may share the memory of the column and is not to be written to.
    """
    with np.errstate(over="ignore"):
        return _to_numpy(column).astype(dtype, copy=False)


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
