from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from hypothesis import settings
from panels import OPTIONS, make_panel

import panelflow as pf

settings.register_profile("panelflow", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("panelflow")


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Two real worker processes on the loopback interface."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def prepare(client: Client, tmp_path: Path) -> Any:
    """``pf.prepare`` of a source with the options of the test panel, to a new place each time."""
    count = iter(range(1000))

    def call(source: Any, **changes: Any) -> pf.Dataset:
        output = changes.pop("output", tmp_path / f"out{next(count)}.zarr")
        return pf.prepare(source, output, **{"client": client, **OPTIONS, **changes})

    return call


@pytest.fixture(scope="session")
def dataset(client: Client, tmp_path_factory: pytest.TempPathFactory) -> pf.Dataset:
    """The test panel, with weights, in several shards and chunks; read it only."""
    output = tmp_path_factory.mktemp("dataset") / "panel.zarr"
    return pf.prepare(make_panel(), output, client=client, **OPTIONS | {"weight": "size"})


@pytest.fixture(scope="session")
def unweighted(client: Client, tmp_path_factory: pytest.TempPathFactory) -> pf.Dataset:
    """The test panel without weights; read it only."""
    output = tmp_path_factory.mktemp("unweighted") / "panel.zarr"
    return pf.prepare(make_panel(), output, client=client, **OPTIONS)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The real panels beside the checkout, where they are present."""
    folder = Path(os.environ.get("PANELFLOW_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (folder / "sp500_5yr").is_dir():
        pytest.skip("the real panels are not here")
    return folder
