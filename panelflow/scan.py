"""First pass: the keys of every unit, checked, and what all of them together say of the panel.

A scan of a unit travels to a worker that merges it with others, so that the client sees one in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from panelflow.columns import to_dates, to_entities
from panelflow.errors import PanelError
from panelflow.hashing import add_checksums, fold, hash_entities, key_checksum
from panelflow.panel import Piece, Unit
from panelflow.pieces import locator, read_pieces
from panelflow.source import Columns


@dataclass(frozen=True, eq=False)
class Scan:
    """Keys of some units: rows, distinct dates with their rows, distinct entities, checksum.

    Attributes
    ----------
    kinds, zones
        Kind of entity (``text``, ``int``) and zone of dates -> the first file that has it.
    """

    rows: int
    dates: npt.NDArray[np.int64]
    rows_per_date: npt.NDArray[np.int64]
    names: list[Any]
    kinds: dict[str, str]
    zones: dict[str | None, str]
    checksum: int


def scan_units(units: Sequence[Unit], columns: Columns, seed: int, options: dict[str, Any]) -> Scan:
    """Read and check the keys of the units of a task; of CSV also that its numbers are numbers."""
    pieces = [piece for unit in units for piece in unit.pieces]
    checked = columns.floats if pieces[0].file.format == "csv" else ()
    tables = read_pieces(pieces, columns.keys, checked, options)
    return merge_scans([_scan_table(table, columns, seed, piece, options) for piece, table in zip(pieces, tables, strict=True)])


def _scan_table(table: pa.Table, columns: Columns, seed: int, piece: Piece, options: dict[str, Any]) -> Scan:
    locate = locator(piece, options)
    entities = to_entities(columns.entity, table[columns.entity], locate)
    dates = to_dates(columns.date, table[columns.date], locate)
    if table.num_rows == 0:
        return Scan(0, dates.values, dates.values, [], {}, {}, 0)
    counts = np.bincount(dates.codes, minlength=len(dates.distinct))
    hashes = fold(seed, hash_entities(entities.names)[entities.codes], dates.values)
    path = piece.file.shown
    return Scan(
        table.num_rows, dates.distinct, counts, entities.names, {entities.kind: path}, {dates.zone: path}, key_checksum(hashes)
    )


def merge_scans(scans: Sequence[Scan]) -> Scan:
    """Join scans in any grouping.

    Raises
    ------
    PanelError
        Kinds of entities or zones of dates differ between files.
    """
    kinds = {kind: path for scan in reversed(scans) for kind, path in scan.kinds.items()}
    zones = {zone: path for scan in reversed(scans) for zone, path in scan.zones.items()}
    if len(kinds) > 1:
        raise PanelError(
            f"The entity is text in {kinds['text']} and an integer in {kinds['int']}; 7 and '007' would be two "
            f"instruments or one. Convert one of them."
        )
    if len(zones) > 1:
        (zone, path), (other, other_path) = sorted(zones.items(), key=lambda item: str(item[0]))[:2]
        raise PanelError(
            f"Dates have {_zone(zone)} in {path} and {_zone(other)} in {other_path}; convert all to one zone or to none."
        )
    dates, inverse = np.unique(np.concatenate([scan.dates for scan in scans]), return_inverse=True)
    counts = np.concatenate([scan.rows_per_date for scan in scans])
    return Scan(
        rows=sum(scan.rows for scan in scans),
        dates=dates,
        rows_per_date=np.bincount(inverse, weights=counts, minlength=len(dates)).astype(np.int64),
        names=sorted({name for scan in scans for name in scan.names}),
        kinds=kinds,
        zones=zones,
        checksum=add_checksums(scan.checksum for scan in scans),
    )


def _zone(zone: str | None) -> str:
    return "no time zone" if zone is None else f"time zone {zone}"
