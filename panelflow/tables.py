"""Tables for a terminal, or plain text of one width where there is none."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from panelflow.sizing import Estimate
from panelflow.store import Dataset

_PLAIN_WIDTH = 120
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def make_console() -> Console:
    """Standard output, wide enough for the tables also where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def split_bytes(dataset: Dataset, name: str) -> int:
    """Bytes on disk of all shards of a split."""
    return sum(sum(shard.values()) for shard in dataset.manifest["storage"]["sizes"][name])


def print_splits(dataset: Dataset) -> None:
    """Splits with their dates, rows and sizes, and the account of all source rows."""
    content = dataset.manifest["content"]
    table = Table(
        "split", "rows", "dates", "first", "last", "purged rows", "no target", "shards", "MB", title=dataset.folder.path()
    )
    for name, entry in content["splits"].items():
        table.add_row(
            name,
            f"{entry['rows']:,}",
            f"{entry['dates']:,}",
            str(entry["first_date"])[:16].removesuffix("T00:00"),
            str(entry["last_date"])[:16].removesuffix("T00:00"),
            f"{entry['purged_rows']:,}",
            f"{entry['missing_target_rows']:,}",
            f"{len(content['shards'][name]):,}",
            f"{split_bytes(dataset, name) / 1e6:,.1f}",
        )
    console = make_console()
    console.print(table)
    rows = content["conservation"]["rows"]
    reasons = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in rows.items())
    console.print(f"{content['conservation']['source_rows']:,} source rows = {reasons}", highlight=False)
    empty = dataset.manifest["provenance"]["empty_files"]
    if empty:
        names = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        console.print(f"{len(empty):,} empty files left out: {names}", highlight=False)
    console.print(f"dataset id {dataset.dataset_id}", highlight=False)


def print_estimate(estimate: Estimate) -> None:
    """What a run would take, a line for each figure."""
    table = Table("what", "figure", title="The run, at most")
    rows = {
        "rows, features": f"{estimate.rows:,}, {estimate.features:,}",
        "workers, threads of each": f"{estimate.workers:,}, {estimate.threads}",
        "memory of a worker, needed": _bytes(estimate.worker_bytes),
        "memory of a worker, limit": "none" if estimate.memory_limit is None else _bytes(estimate.memory_limit),
        "passes over scratch": str(estimate.passes),
        "tasks": ", ".join(f"{name} {count:,}" for name, count in estimate.tasks.items() if count),
        "units, bytes decoded": f"{estimate.units:,}, {_bytes(estimate.unit_bytes)}",
        "scratch files, bytes": f"{estimate.scratch_files:,}, {_bytes(estimate.scratch_bytes)}",
        "segments read, bytes of each": f"{estimate.segments:,}, {_bytes(estimate.segment_bytes)}",
        "shards, bytes of the dataset": f"{estimate.shards:,}, {_bytes(estimate.output_bytes)}",
        "bytes read, written": f"{_bytes(estimate.bytes_read)}, {_bytes(estimate.bytes_written)}",
    }
    for name, figure in rows.items():
        table.add_row(name, figure)
    make_console().print(table)


def _bytes(size: int) -> str:
    scaled, unit = float(size), 0
    while scaled >= 1024 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return f"{scaled:,.1f} {_UNITS[unit]}"


def print_features(dataset: Dataset) -> None:
    """Statistics of each feature."""
    table = Table("feature", "count", "missing", "mean", "std", "min", "max", title="Features over the training rows")
    for name, row in dataset.manifest["content"]["statistics"].items():
        numbers = ["-" if row[key] is None else f"{row[key]:.6g}" for key in ("mean", "std", "min", "max")]
        table.add_row(name, f"{row['count']:,}", f"{row['missing']:,}", *numbers)
    make_console().print(table)


def print_history(result: dict[str, Any]) -> None:
    """Losses and validation metrics of each epoch; of several targets the first is shown."""
    table = Table("epoch", "train loss", "loss", "R2", "IC", "rank IC", "steps", "s", title="Training, with validation metrics")
    for entry in result["history"]:
        validation = entry["validation"] or {"loss": None, "targets": {"": dict.fromkeys(("r2", "ic", "rank_ic"))}}
        first = next(iter(validation["targets"].values()))
        figures = (entry["train_loss"], validation["loss"], first["r2"], first["ic"], first["rank_ic"])
        numbers = ["-" if value is None else f"{value:.6g}" for value in figures]
        table.add_row(str(entry["epoch"]), *numbers, str(entry["steps"]), f"{entry['seconds']:.1f}")
    make_console().print(table)
