"""How far is what DDP averages from the gradient of all rows? Rows split by ticker, by date, and as panelflow does it.

    python examples/gradient_bias.py

500 stocks on 10 days, batches of 1,000 rows, two ranks. Stocks are sorted by size: the large half traded on every day, small ones
came to the market later, and returns depend on size. Each scheme trains one epoch of a linear model at learning rate zero, so
that every gradient is taken at the same point and can be compared with the gradient of all rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.parallel import DistributedDataParallel

import panelflow as pf
from panelflow.distributed import join

STOCKS, DAYS, BATCH, RANKS = 500, 10, 1000, 2


def make_panel() -> pd.DataFrame:
    """An unbalanced panel whose features and returns depend on size and date."""
    generator = np.random.default_rng(0)
    size = np.linspace(2, -2, STOCKS)
    born = np.where(size > 0, 0, generator.integers(0, 8, size=STOCKS))
    stock, day = (grid.ravel() for grid in np.meshgrid(np.arange(STOCKS), np.arange(DAYS), indexing="ij"))
    alive = day >= born[stock]
    stock, day = stock[alive], day[alive]
    features = generator.normal(size=(len(stock), 5)) + 0.5 * size[stock, None] + 0.1 * day[:, None]
    target = features @ np.array([0.5, -0.3, 0.2, 0.0, 0.1]) + size[stock] * features[:, 0] * 0.3
    frame = pd.DataFrame(features, columns=[f"f{i}" for i in range(5)])
    frame["ret"] = target + 0.2 * day + generator.normal(size=len(stock))
    frame.insert(0, "stock", stock)
    frame.insert(1, "date", pd.Timestamp("2020-01-06") + pd.to_timedelta(day, unit="D"))
    return frame


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1).double()


def gradient_of(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy().copy()


def mean_gradient(frame: pd.DataFrame) -> np.ndarray:
    """Gradient of the mean loss over some rows, in one process."""
    model = make_model()
    features, target = torch.tensor(frame.filter(like="f").to_numpy()), torch.tensor(frame[["ret"]].to_numpy())
    ((model(features) - target) ** 2).mean().backward()
    return gradient_of(model)


def naive_rank(frame: pd.DataFrame, by: str) -> tuple[np.ndarray, np.ndarray]:
    """Plain DDP: this rank owns half of the stocks or dates and averages over its own batches, wrapped to equal steps."""
    place = join()
    values = np.sort(frame[by].unique())
    own = frame[frame[by].isin(np.array_split(values, RANKS)[place.rank])].sample(frac=1, random_state=1)
    steps = -(-len(frame) // BATCH)
    model = make_model()
    replica = DistributedDataParallel(model)
    averaged, alone = [], []
    for step in range(steps):
        rows = own.iloc[np.arange(step * BATCH // RANKS, (step + 1) * BATCH // RANKS) % len(own)]
        features, target = torch.tensor(rows.filter(like="f").to_numpy()), torch.tensor(rows[["ret"]].to_numpy())
        model.zero_grad()
        ((replica(features) - target) ** 2).mean().backward()
        averaged.append(gradient_of(model))
        alone.append(mean_gradient(rows))
    return np.mean(averaged, axis=0), np.mean(alone, axis=0)


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step and moves nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[np.ndarray] = []

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat(gradients).numpy().copy())


def panelflow_rank(path: str) -> tuple[np.ndarray, np.ndarray]:
    """The same with panelflow: batches are divided over ranks, their gradients weighted by rows."""
    place, dataset = join(), pf.open(path)
    recorders: list[Recorder] = []

    def make_recorder(parameters: Any) -> Recorder:
        recorders.append(Recorder(parameters))
        return recorders[0]

    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 1, "standardized": False, "progress": False}
    pf.fit(make_model(), dataset, optimizer=make_recorder, **options)
    loader, stored = pf.Loader(dataset["train"], BATCH), dataset["train"].to_pandas()
    sizes = [loader.order.batch_rows(step) for step in range(len(loader))]
    own = loader.order.lanes_of(place.rank, RANKS)
    mine = pd.concat([stored.iloc[loader.order.epoch(0).rows(step, own)] for step in range(len(loader))])
    return np.average(recorders[0].seen, axis=0, weights=sizes), mean_gradient(mine)


def distance(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


def main() -> None:
    frame = make_panel()
    whole = mean_gradient(frame)
    outcomes = {
        "by ticker": pf.launch(naive_rank, RANKS, (frame, "stock")),
        "by date": pf.launch(naive_rank, RANKS, (frame, "date")),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "panel.zarr")
        split = pf.DateSplit(train=(None, None))
        options: dict[str, Any] = {"entity": "stock", "date": "date", "features": ["f*"], "targets": ["ret"]}
        pf.prepare(frame, path, split=split, horizon=0, dtype="float64", chunk_rows=256, workers=1, progress=False, **options)
        outcomes["panelflow"] = pf.launch(panelflow_rank, RANKS, (str(path),))
    print(f"{len(frame):,} rows of {STOCKS} stocks on {DAYS} days, batches of {BATCH:,}, {RANKS} ranks; relative distances")
    print(f"{'rows split':<12}{'averaged gradient':>22}{'rank 0 alone':>16}{'rank 1 alone':>16}   from the gradient of all rows")
    for name, ranks in outcomes.items():
        figures = [distance(ranks[0][0], whole), *(distance(alone, whole) for _, alone in ranks)]
        print(f"{name:<12}{figures[0]:>22.1e}{figures[1]:>16.3f}{figures[2]:>16.3f}")


if __name__ == "__main__":
    main()
