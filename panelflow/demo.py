"""A panel with a planted signal, taken through the whole path: what was planted must be found."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import panelflow as pf
from panelflow.errors import OptionError
from panelflow.tables import make_console, print_history, print_splits

NUM_STOCKS, NUM_DATES, NUM_FEATURES = 500, 1000, 8
PLANTED_R2 = 0.10
"""Share of the variance of the target that the features explain."""
EPOCHS = 12
_DATES_PER_FILE = 100
_MARKER = ".panelflow-demo"
_SPLIT = {"train": (None, "2022-06-01"), "validation": ("2022-06-01", "2023-03-01"), "test": ("2023-03-01", None)}


def signal(features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The planted part of the target, of unit variance: two linear terms and a kink, which no linear model finds."""
    linear = 0.6 * features[:, 0] - 0.48 * features[:, 1]
    kink = 0.64 * (np.abs(features[:, 2]) - math.sqrt(2 / math.pi)) / math.sqrt(1 - 2 / math.pi)
    return np.asarray(linear + kink)


def write_panel(folder: Path, *, seed: int = 0) -> None:
    """Write the panel as Parquet files of 100 dates each; features are standard normal, the last two with gaps."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    dates = pd.bdate_range("2020-01-01", periods=NUM_DATES)
    stocks = np.array([f"S{number:04d}" for number in range(NUM_STOCKS)])
    for number, start in enumerate(range(0, NUM_DATES, _DATES_PER_FILE)):
        block = dates[start : start + _DATES_PER_FILE]
        rows = len(block) * NUM_STOCKS
        features = generator.normal(size=(rows, NUM_FEATURES))
        noise = generator.normal(size=rows) * math.sqrt(1 / PLANTED_R2 - 1)
        frame = pd.DataFrame(features.astype(np.float32), columns=[f"f{i}" for i in range(NUM_FEATURES)])
        frame.loc[generator.random(rows) < 0.05, ["f6", "f7"]] = np.nan
        frame.insert(0, "stock", np.tile(stocks, len(block)))
        frame.insert(1, "date", np.repeat(block, NUM_STOCKS))
        frame["ret"] = (signal(features) + noise).astype(np.float32)
        frame.to_parquet(folder / f"panel-{number:02d}.parquet", index=False)


def run_demo(directory: Path) -> None:
    """Make the panel in ``directory``, prepare, verify, train on two ranks, predict, and compare with what was planted."""
    console = make_console()
    _claim(directory)
    console.print(f"A panel of {NUM_STOCKS} stocks on {NUM_DATES} dates, planted R2 {PLANTED_R2:.4f}, in {directory}/panel")
    write_panel(directory / "panel")
    dataset = pf.prepare(
        directory / "panel",
        directory / "panel.zarr",
        entity="stock",
        date="date",
        features=["f*"],
        targets=["ret"],
        split=pf.DateSplit(**_SPLIT),
        horizon=1,
        overwrite=True,
    )
    print_splits(dataset)
    console.print(f"verified: {pf.verify(dataset):,} files are whole")
    outcome = pf.launch(_train_rank, 2, (str(directory / "panel.zarr"), str(directory / "run")))[0]
    print_history(outcome)
    frame = pd.read_parquet(directory / "predictions.parquet")
    metrics = outcome["test"]["targets"]["ret"]
    found, error = metrics["r2_zero"], sampling_error(PLANTED_R2, len(frame))
    console.print(f"test: {len(frame):,} predictions in {directory}/predictions.parquet")
    console.print(
        f"test: R2 {metrics['r2']:.4f} about the mean, {found:.4f} about zero; IC {metrics['ic']:.4f} "
        f"(ICIR {metrics['icir']:.2f}), rank IC {metrics['rank_ic']:.4f}, {metrics['dates']} dates"
    )
    distance = abs(found - PLANTED_R2) / error
    console.print(
        f"planted R2 {PLANTED_R2:.4f}, found {found:.4f}: {distance:.1f} standard errors apart (one is {error:.4f}): "
        f"{'recovered' if distance <= 2 else 'NOT recovered'}"
    )
    if distance > 2:
        raise SystemExit(1)


def _claim(directory: Path) -> None:
    """Use a new, an empty or a former demo directory, and nothing else."""
    if directory.exists() and not directory.is_dir():
        raise OptionError(f"The demo wants a directory: {directory}")
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).exists():
        raise OptionError(f"The directory holds other files; name an empty one: {directory}")
    for name in ("panel", "run"):
        shutil.rmtree(directory / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARKER).touch()


def sampling_error(r2: float, rows: int) -> float:
    """Standard error of R2 over ``rows`` independent rows: sqrt(4 R2 (1 - R2)^2 / rows) (Olkin and Finn, 1995)."""
    return math.sqrt(4 * r2 * (1 - r2) ** 2 / rows)


def _cosine(optimizer: Any) -> Any:
    from torch.optim.lr_scheduler import CosineAnnealingLR

    return CosineAnnealingLR(optimizer, EPOCHS)


def _train_rank(path: str, run: str) -> dict[str, Any]:
    import torch

    from panelflow.distributed import join

    torch.manual_seed(0)
    dataset = pf.open(path)
    result = pf.fit(
        pf.MLP(NUM_FEATURES, 1, (32, 16, 8)),
        dataset,
        epochs=EPOCHS,
        batch_size=4096,
        lr=5e-3,
        scheduler=_cosine,
        early_stopping=3,
        checkpoint_dir=run,
    )
    test = pf.evaluate(result.model, dataset["test"])
    if join().is_first:
        pf.predict(result.model, dataset["test"], to=Path(run).parent / "predictions.parquet")
    return {"history": result.history, "test": json.loads(json.dumps(test.as_dict()))}
