"""Run every example on data that it makes, and the one on real prices where they lie beside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
REAL = Path(os.environ.get("PANELFLOW_DATA", HERE.parents[1] / "shared" / "data")) / "sp500_5yr"


def write_prices(folder: Path, stocks: int = 40, days: int = 400) -> None:
    """Random walks of some stocks, one of which skips three weeks."""
    generator = np.random.default_rng(0)
    for number in range(stocks):
        frame = pd.DataFrame({"date": pd.bdate_range("2013-02-08", periods=days)})
        frame["close"] = 50 * np.exp(np.cumsum(generator.normal(0, 0.02, size=days)))
        frame["volume"] = generator.integers(0, 10**6, size=days)
        if number == 3:
            frame = frame.drop(index=range(100, 115))
        frame.to_csv(folder / f"T{number:03d}_data.csv", index=False)


def run(name: str, *arguments: object) -> None:
    print(f"+ {name}", flush=True)
    subprocess.run([sys.executable, HERE / name, *map(str, arguments)], check=True)


with tempfile.TemporaryDirectory() as folder:
    prices, output = Path(folder, "prices"), Path(folder, "sp500.zarr")
    prices.mkdir()
    write_prices(prices)
    run("gradient_bias.py")
    run("sp500.py", prices, "--output", output, "--epochs", 2)
    if REAL.is_dir():
        run("sp500.py", REAL, "--output", output)
