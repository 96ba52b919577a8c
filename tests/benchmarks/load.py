"""Stream the reference dataset in shuffled batches, beside what a user would pick instead, in one run.

    python tests/benchmarks/load.py [--dates 2520] [--features 32] [--batch-size 8192] [--repeats 3] [--only NAME ...]

12.6 million rows of 32 float32 features and a target, one training split, its pages warm. All runners take turns; the yardstick
is a gather of a permutation of the whole dataset in memory, batch by batch, which is what the fastest loader written by hand does
where the data fits. Nothing is asserted here; the figures are for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prepare import STOCKS, make_panel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import panelflow as pf

Runner = Callable[[], Iterable[Any]]


def prepare(folder: Path, dates: int, features: int, compression: str | None) -> pf.Dataset:
    """The reference panel as one training split."""
    source, output = folder / f"panel-{dates}-{features}", folder / f"dataset-{dates}-{features}-{compression or 'plain'}"
    if not output.exists():
        make_panel(source, dates, features)
        split = pf.DateSplit(train=(None, None))
        keys = {"entity": "stock", "date": "date", "features": ["f*"], "targets": ["ret"]}
        pf.prepare(source, output, **keys, split=split, horizon=0, compression=compression)
    return pf.open(output)


def runners(plain: pf.Dataset, packed: pf.Dataset, batch_size: int) -> dict[str, Runner]:
    """What is compared, each a function that begins an epoch."""
    features, targets = plain["train"].features[:], plain["train"].targets[:]
    torch_features, torch_targets = torch.from_numpy(features), torch.from_numpy(targets)

    def gather_numpy() -> Iterator[Any]:
        permutation = np.random.default_rng().permutation(len(features))
        for start in range(0, len(features), batch_size):
            rows = permutation[start : start + batch_size]
            yield features[rows], targets[rows]

    def gather_torch() -> Iterator[Any]:
        permutation = torch.randperm(len(features))
        for start in range(0, len(features), batch_size):
            rows = permutation[start : start + batch_size]
            yield torch_features[rows], torch_targets[rows]

    def copy_sequentially() -> Iterator[Any]:
        for start in range(0, len(features), batch_size):
            yield mapped[start : start + batch_size].copy()

    path = Path(plain.folder.path("raw.bin"))
    path = path.parent.parent / "raw.bin"
    features.tofile(path)
    mapped = np.memmap(path, np.float32, mode="r").reshape(features.shape)
    tensors = TensorDataset(torch_features, torch_targets)
    sampler = BatchSampler(RandomSampler(tensors), batch_size, drop_last=False)

    def loader(dataset: pf.Dataset, workers: int | None = None, **options: Any) -> Runner:
        made = pf.Loader(dataset["train"], batch_size, keys=False, **options)
        return lambda: made if workers is None else DataLoader(made, batch_size=None, num_workers=workers)

    return {
        "gather numpy": gather_numpy,
        "gather torch": gather_torch,
        "panelflow": loader(plain),
        "panelflow unshuffled": loader(plain, shuffle=False),
        "panelflow zstd": loader(packed),
        "panelflow 1 thread": loader(plain, threads=1),
        "panelflow 4 threads": loader(plain, threads=4),
        "DataLoader(panelflow), 0 workers": loader(plain, workers=0),
        "DataLoader(panelflow), 2 workers": loader(plain, workers=2),
        "DataLoader(TensorDataset)": lambda: DataLoader(tensors, sampler=sampler, batch_size=None),
        "memmap copy, in order": copy_sequentially,
    }


def rows_per_second(run: Runner, rows: int) -> float:
    """Rate of one epoch, whose batches are looked at and dropped."""
    started = time.perf_counter()
    for _ in run():
        pass
    return rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dates", type=int, default=2520)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "panelflow-bench")
    options = parser.parse_args()
    plain, packed = (prepare(options.folder, options.dates, options.features, compression) for compression in (None, "zstd"))
    rows = STOCKS * options.dates
    print(f"{rows:,} rows, batches of {options.batch_size:,}; {os.cpu_count()} cores, torch {torch.__version__}")
    chosen = {name: run for name, run in runners(plain, packed, options.batch_size).items() if name in (options.only or [name])}
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.repeats + 1):
        for name, run in chosen.items():
            rates[name].append(rows_per_second(run, rows))
    # The first turn warms the page cache.
    medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
    yardstick = max(medians.get("gather numpy", 0.0), medians.get("gather torch", 0.0)) or float("nan")
    print(f"{'':<36}{'million rows/s':>16}   times the gather")
    for name, rate in medians.items():
        print(f"{name:<36}{rate / 1e6:>16.2f}   {rate / yardstick:.2f}")


if __name__ == "__main__":
    main()
