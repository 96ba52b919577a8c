"""Train an MLP by ``panelflow.fit`` and by a bare loop over batches that lie in memory, on one rank and on two, in one run.

    python tests/benchmarks/train.py [--dates 1260] [--features 32] [--batch-size 8192] [--epochs 3] [--hidden 64 32]

Same model, optimizer, batches and number of threads; ``fit`` streams its batches from disk meanwhile, checksums checked. What is
timed is the training part of an epoch. Nothing is asserted here; the figures are for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from load import prepare
from torch.nn.parallel import DistributedDataParallel

import panelflow as pf
from panelflow.modeling import standardize


def make_model(dataset: pf.Dataset, hidden: list[int]) -> torch.nn.Module:
    torch.manual_seed(0)
    return pf.MLP(len(dataset.features), hidden=hidden)


def fit(path: Path, batch_size: int, epochs: int, hidden: list[int]) -> list[float]:
    """Seconds of each epoch."""
    dataset = pf.open(path)
    result = pf.fit(make_model(dataset, hidden), dataset, batch_size=batch_size, epochs=epochs, progress=False)
    return [entry["seconds"] for entry in result.history]


def bare(path: Path, batch_size: int, epochs: int, hidden: list[int]) -> list[float]:
    """The same by hand: each rank's batches in memory, the mean over the batch as loss, DDP where there are several ranks."""
    dataset = pf.open(path)
    batches = [(batch.features, batch.targets) for batch in pf.Loader(dataset["train"], batch_size, keys=False)]
    model: torch.nn.Module = standardize(make_model(dataset, hidden), dataset)
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(epochs):
        started = time.perf_counter()
        for features, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dates", type=int, default=1260)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "panelflow-bench")
    options = parser.parse_args()
    dataset = prepare(options.folder, options.dates, options.features, None)
    rows = dataset["train"].num_rows
    arguments = (Path(dataset.folder.path()), options.batch_size, options.epochs, options.hidden)
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{rows:,} rows, batches of {options.batch_size:,}, hidden {options.hidden}; {machine}")
    for ranks in (1, 2):
        seconds: dict[str, list[float]] = {"fit": [], "bare loop": []}
        for _ in range(options.repeats):
            for name, run in (("fit", fit), ("bare loop", bare)):
                seconds[name] += pf.launch(run, ranks, arguments)[0][1:]  # the first epoch warms up
        rates = {name: rows / statistics.median(found) for name, found in seconds.items()}
        own, other = rates["fit"], rates["bare loop"]
        print(f"{ranks} rank(s): fit {own:,.0f} rows/s, bare loop {other:,.0f} rows/s, ratio {own / other:.2f}")


if __name__ == "__main__":
    main()
