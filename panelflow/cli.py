"""The command line: thin commands over the public API.

Exit codes: 0 done, 1 the data or the dataset is at fault, 2 the command line is.
"""

from __future__ import annotations

import json
import sys
from inspect import signature as inspect_signature
from pathlib import Path
from typing import Any

import click

import panelflow as pf
from panelflow.demo import run_demo
from panelflow.errors import OptionError, PanelflowError, RankError
from panelflow.runs import load_model, make_model, train_rank
from panelflow.tables import print_estimate, print_features, print_history, print_splits, split_bytes

_RESULT = "result.json"


class _Group(click.Group):
    """Turns panelflow's errors into one paragraph and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PanelflowError as error:
            if ctx.params.get("debug"):
                raise
            cause = error.__cause__ if isinstance(error, RankError) and isinstance(error.__cause__, PanelflowError) else error
            click.echo(f"panelflow: {cause}", err=True)
            sys.exit(2 if isinstance(cause, OptionError) else 1)
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                raise
            click.echo("panelflow: stopped; run the same command again to go on from the pieces that are finished.", err=True)
            sys.exit(130)
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"panelflow: {error.filename or 'a file'}: {error.strerror or error}", err=True)
            sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="panelflow")
def main(debug: bool) -> None:
    """Panels prepared on Dask, streamed from Zarr, trained by exact PyTorch DDP."""


def parse_range(text: str) -> tuple[str | None, str | None]:
    """``A:B``, or ``A/B`` where bounds carry times of day; an empty side is open.

    Raises
    ------
    OptionError
        Not two bounds.
    """
    parts = text.split("/") if "/" in text else text.split(":")
    if len(parts) != 2:
        raise OptionError(f"A range is START:END, or START/END where times of day stand in it; got {text!r}")
    return parts[0] or None, parts[1] or None


@main.command()
@click.argument("sources", nargs=-1, required=True)
@click.argument("out")
@click.option("--entity", required=True, help="Column of the instrument, or a file name template such as '{entity}_data.csv'.")
@click.option("--date", required=True, help="Column of the date.")
@click.option("--features", required=True, multiple=True, help="Column name or glob pattern; may be repeated.")
@click.option("--target", "targets", required=True, multiple=True, help="Column name or glob pattern; may be repeated.")
@click.option("--train", help="Date range START:END of the split 'train'; half-open, either side may be empty.")
@click.option("--validation", help="Date range of the split 'validation'.")
@click.option("--test", help="Date range of the split 'test'.")
@click.option("--split", "splits", multiple=True, metavar="NAME=RANGE", help="A further split; may be repeated.")
@click.option("--horizon", type=int, required=True, help="Observed dates after which a label is known.")
@click.option("--embargo", type=int, default=0, show_default=True, help="Further dates that training loses after evaluation.")
@click.option("--seed", type=click.IntRange(-(2**63), 2**63 - 1), default=0, show_default=True)
@click.option("--weight", help="Column of sample weights.")
@click.option("--duplicates", type=click.Choice(["error", "first", "last"]), default="error", show_default=True)
@click.option("--missing-target", type=click.Choice(["drop", "error", "keep"]), default="drop", show_default=True)
@click.option("--infinite", type=click.Choice(["error", "missing"]), default="error", show_default=True)
@click.option("--empty-files", type=click.Choice(["skip", "error"]), default="skip", show_default=True, help="Files of no rows.")
@click.option("--row-order", type=click.Choice(["auto", "hash", "date"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "float64"]), default="float32", show_default=True)
@click.option("--chunk-rows", type=int, help="Rows of an inner chunk, a power of two.")
@click.option("--shard-bytes", default="64MiB", show_default=True)
@click.option("--compression", type=click.Choice(["zstd"]))
@click.option("--workers", type=int, help="Processes of the local cluster.")
@click.option("--threads-per-worker", type=int, default=1, show_default=True)
@click.option("--memory-limit", default="auto", show_default=True, help="Memory of each worker, for example 1GiB.")
@click.option("--scheduler", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option("--scratch", help="Folder for scratch files that all workers see.")
@click.option("--exchange", type=click.Choice(["files", "p2p"]), default="files", show_default=True)
@click.option("--allow-empty", is_flag=True, help="Accept splits without rows.")
@click.option("--overwrite", is_flag=True, help="Replace a dataset once the new one is whole.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Keep finished pieces and go on from them.")
@click.option("--dry-run", is_flag=True, help="Say from footers what the run would take, and do nothing.")
def prepare(
    sources: tuple[str, ...],
    out: str,
    train: str | None,
    validation: str | None,
    test: str | None,
    splits: tuple[str, ...],
    scheduler: str | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Turn a panel (SOURCES: files, directories, patterns) into the dataset OUT."""
    ranges = {name: text for name, text in (("train", train), ("validation", validation), ("test", test)) if text is not None}
    for item in splits:
        name, _, text = item.partition("=")
        ranges[name] = text
    split = pf.DateSplit(**{name: parse_range(text) for name, text in ranges.items()})
    if dry_run:
        names = inspect_signature(pf.estimate).parameters
        print_estimate(pf.estimate(list(sources), **{name: options[name] for name in options if name in names}))
        return
    client = _connect(scheduler) if scheduler else None
    try:
        dataset = pf.prepare(list(sources), out, split=split, client=client, **options)
    finally:
        if client is not None:
            client.close()
    print_splits(dataset)


@main.command()
@click.option("--rows", type=float, required=True, help="Rows of the panel, such as 1e10.")
@click.option("--features", type=int, required=True)
@click.option("--targets", type=int, default=1, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "float64"]), default="float32", show_default=True)
@click.option("--shard-bytes", default="64MiB", show_default=True)
@click.option("--workers", type=int)
@click.option("--threads-per-worker", type=int, default=1, show_default=True)
@click.option("--memory-limit", default="auto", show_default=True, help="Memory of each worker, for example 4GiB.")
def size(rows: float, **options: Any) -> None:
    """Say what preparing a panel of a size would take: tasks, files, bytes, memory."""
    print_estimate(pf.estimate_size(int(rows), **options))


def _connect(address: str) -> Any:
    from distributed import Client  # only here: no other command needs Dask

    try:
        return Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"No Dask scheduler answers ({error}); --scheduler {address}") from error


@main.command()
@click.argument("out")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest and the sizes as JSON.")
def inspect(out: str, as_json: bool) -> None:
    """Show splits, date ranges, purged rows, shards, sizes, and features with their statistics."""
    dataset = pf.open(out)
    if as_json:
        click.echo(json.dumps(dataset.manifest | {"bytes": {name: split_bytes(dataset, name) for name in dataset}}, indent=1))
        return
    print_splits(dataset)
    print_features(dataset)


@main.command()
@click.argument("out")
def verify(out: str) -> None:
    """Read every byte of OUT and compare it with the manifest."""
    dataset = pf.open(out)
    files = pf.verify(dataset, progress=True)
    click.echo(f"{out}: {files:,} files are whole")


@main.command()
@click.argument("out")
@click.option("--run-dir", required=True, type=click.Path(path_type=Path), help="Where checkpoints, metrics and the model go.")
@click.option("--hidden", default="32,16,8", show_default=True, help="Units of each hidden layer of the plain MLP; '' for none.")
@click.option("--model", "factory", help="package.module:factory, called as factory(num_features, num_targets).")
@click.option("--epochs", type=int, default=5, show_default=True)
@click.option("--batch-size", type=int, default=8192, show_default=True, help="Rows over all ranks.")
@click.option("--lr", type=float, default=1e-3, show_default=True)
@click.option("--loss", type=click.Choice(["mse", "mae", "huber"]), default="mse", show_default=True)
@click.option("--optimizer", type=click.Choice(["adam", "adamw", "sgd"]), default="adam", show_default=True)
@click.option("--weight-decay", type=float, default=0.0, show_default=True)
@click.option("--clip-norm", type=float)
@click.option("--accumulate", type=int, default=1, show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--early-stopping", type=int, help="Epochs without improvement after which to stop.")
@click.option("--monitor", default="loss", show_default=True)
@click.option("--checkpoint-every", type=int, help="Optimizer steps between checkpoints, besides those at epoch ends.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this machine.")
@click.option("--seed", type=click.IntRange(-(2**63), 2**63 - 1), default=0, show_default=True)
@click.option("--lanes", type=int)
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir.")
def train(out: str, run_dir: Path, hidden: str, factory: str | None, nproc: int, resume: bool, **options: Any) -> None:
    """Train on OUT and write metrics.jsonl, result.json and model.pt into the run directory."""
    _check_run_dir(run_dir, resume)
    dataset = pf.open(out)
    model = {"hidden": _parse_hidden(hidden), "factory": factory}
    make_model(model, len(dataset.features), len(dataset.targets))
    pf.Loader(dataset["train"], options["batch_size"], lanes=options["lanes"], rank=0, world_size=nproc)  # refuses bad sizes here
    run_dir.mkdir(parents=True, exist_ok=True)
    options |= {"checkpoint_dir": str(run_dir), "resume": "auto" if resume else "never"}
    result = pf.launch(train_rank, nproc, (out, model, options))[0]
    result["nproc"] = nproc
    _write_json(run_dir / _RESULT, result)
    print_history(result)


def _check_run_dir(run_dir: Path, resume: bool) -> None:
    if run_dir.exists() and any(run_dir.iterdir()) and not resume:
        raise OptionError(f"The run directory is used by an earlier run; pass --resume to continue it, or another: {run_dir}")


def _parse_hidden(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(f"Hidden layers are numbers joined by commas, such as 32,16,8; --hidden {text}")
    return [int(part) for part in parts]


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


@main.command()
@click.argument("out")
@click.option("--run-dir", required=True, type=click.Path(path_type=Path))
@click.option("--split", "split_name", default="test", show_default=True)
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="Parquet file to write.")
def predict(out: str, run_dir: Path, split_name: str, to: Path) -> None:
    """Predict a split of OUT with the model of a run, in date order."""
    dataset = pf.open(out)
    split = dataset[split_name]
    model, precision = load_model(run_dir, dataset)
    pf.predict(model, split, precision=precision, to=to)
    click.echo(f"{split.num_rows:,} predictions of {split_name} in {to}")


@main.command()
@click.argument("directory", default="panelflow-demo", type=click.Path(path_type=Path))
def demo(directory: Path) -> None:
    """Plant a signal in a made-up panel and find it again: prepare, verify, train on 2 ranks, predict."""
    run_demo(directory)
