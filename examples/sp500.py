"""From price files of stocks, one CSV a ticker, to a model of 5-day returns trained on two ranks.

    python examples/sp500.py DIRECTORY [--output DIR] [--epochs N]

The files have the columns date, close, volume (others are ignored) and the ticker in their name, ``AAPL_data.csv``. Features of a
stock look back only; they are ranked within each date. The target is the return over the next five dates *of the panel*: where
a stock skips dates, five of its own rows further would be a longer window that reaches past the purge.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from dask.distributed import Client, LocalCluster

import panelflow as pf

HORIZON = 5
FEATURES = ["return_1", "return_5", "return_21", "volatility_21", "volume_change", "distance_from_mean"]
SUFFIX = "_data.csv"


def read_prices(path: Path) -> pd.DataFrame:
    """Close and volume of one stock, by date."""
    return pd.read_csv(path, usecols=["date", "close", "volume"], parse_dates=["date"], index_col="date")


def build_features(path: Path, dates: pd.DatetimeIndex) -> pd.DataFrame:
    """Features and target of one stock on the dates it was traded; nothing in a feature is later than its row."""
    prices = read_prices(path).reindex(dates)
    close, volume = prices["close"], prices["volume"].where(prices["volume"] > 0)
    day = close / close.shift(1) - 1
    frame = pd.DataFrame(
        {
            "return_1": day,
            "return_5": close / close.shift(5) - 1,
            "return_21": close / close.shift(21) - 1,
            "volatility_21": day.rolling(21, min_periods=15).std(),
            "volume_change": np.log(volume) - np.log(volume).rolling(21, min_periods=15).mean(),
            "distance_from_mean": close / close.rolling(21, min_periods=15).mean() - 1,
            "target": 100 * (close.shift(-HORIZON) / close - 1),  # percent; missing without a price on that very date
        }
    )
    frame.insert(0, "stock", path.name.removesuffix(SUFFIX))
    return frame[close.notna()].rename_axis("date").reset_index()


def rank_within_dates(frame: pd.DataFrame) -> pd.DataFrame:
    """Features to cross-sectional ranks in (-1, 1), ties averaged; every date is whole in one partition."""
    by_date = frame.groupby("date")[FEATURES]
    return frame.assign(**(2 * by_date.rank() / (by_date.transform("count") + 1) - 1).astype(np.float32))


def observed_dates(files: list[Path]) -> pd.DataFrame:
    """Distinct dates of some files."""
    return pd.concat([read_prices(path).reset_index()[["date"]] for path in files]).drop_duplicates()


def build_panel(files: list[Path]) -> dd.DataFrame:
    """A Dask data frame of all stocks: built file by file, then brought together by date to be ranked."""
    groups = [list(group) for group in np.array_split(np.array(files), min(16, len(files)))]
    dates = pd.DatetimeIndex(sorted(dd.from_map(observed_dates, groups).compute()["date"].unique()))
    panel = dd.from_map(lambda group: pd.concat([build_features(path, dates) for path in group]), groups)
    return panel.shuffle("date", npartitions=8).map_partitions(rank_within_dates)


def train(path: str, epochs: int, double: bool = False) -> dict[str, object]:
    """What each rank does."""
    torch.manual_seed(0)
    dataset = pf.open(path)
    model = pf.MLP(len(dataset.features), 1, (32, 16))
    result = pf.fit(
        model.double() if double else model,
        dataset,
        epochs=epochs,
        batch_size=8192,
        lr=3e-3,
        weight_decay=1e-4,
        early_stopping=3,
        progress=False,
    )
    metrics = {name: pf.evaluate(result.model, split) for name, split in dataset.splits.items()}
    return {"history": result.history, "metrics": metrics}


def prepare(folder: Path, output: Path, client: Client) -> pf.Dataset:
    files = sorted(folder.glob(f"*{SUFFIX}"))
    dates = [read_prices(files[0]).index, read_prices(files[-1]).index]
    first, last = min(index[0] for index in dates), max(index[-1] for index in dates)
    ends = [str((first + (last - first) * share).date()) for share in (0.6, 0.8)]
    return pf.prepare(
        build_panel(files),
        output,
        entity="stock",
        date="date",
        features=FEATURES,
        targets=["target"],
        split=pf.DateSplit(train=(None, ends[0]), validation=(ends[0], ends[1]), test=(ends[1], None)),
        horizon=HORIZON,
        client=client,
        overwrite=True,
        progress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "sp500.zarr")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    with LocalCluster(host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        dataset = prepare(options.directory, options.output, client)
    account = dataset.manifest["content"]["conservation"]
    reasons = ", ".join(f"{reason.replace('_', ' ')} {rows:,}" for reason, rows in account["rows"].items())
    print(f"{account['source_rows']:,} rows with a price = {reasons}")

    outcome = pf.launch(train, 2, (str(options.output), options.epochs))[0]
    print(f"trained {len(outcome['history'])} epochs of {outcome['history'][0]['steps']} steps on two ranks")
    for name, metrics in outcome["metrics"].items():
        found = metrics.targets["target"]
        print(
            f"{name:<10} {found.rows:>8,} rows, {found.dates:>4} dates: IC {found.ic:+.4f} (ICIR {found.icir:+.2f}), "
            f"rank IC {found.rank_ic:+.4f}, R2 {found.r2:+.4f} about the mean, {found.r2_zero:+.4f} about zero"
        )


if __name__ == "__main__":
    main()
