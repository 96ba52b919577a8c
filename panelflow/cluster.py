"""The Dask client of a run: the user's own, left as it was found, or a local cluster that fits the machine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_bytes
from distributed import Client, Future, LocalCluster, default_client
from distributed.scheduler import KilledWorker

from panelflow.errors import OptionError, PanelflowError, StorageError, WorkerError

_SECONDS_WITHOUT_WORKERS = 60.0
_SECONDS_TO_ANSWER = 3.0


@contextlib.contextmanager
def connect(client: Client | None, *, workers: int | None, threads_per_worker: int, memory_limit: str | int) -> Iterator[Client]:
    """The given client, else the current one, else a local cluster that is closed again.

    Everything of a local cluster listens on the loopback interface only.
    """
    if client is None:
        with contextlib.suppress(ValueError):
            client = default_client()
    try:
        if memory_limit != "auto":
            parse_bytes(memory_limit)
    except ValueError:
        raise OptionError(f"memory_limit is bytes, text such as '1GiB', or 'auto'; memory_limit={memory_limit!r}") from None
    if client is not None:
        if client.asynchronous:
            raise OptionError(f"An asynchronous Dask client cannot be used from a plain call; client={client!r}")
        yield client
        return
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads_per_worker,
            memory_limit=memory_limit,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, set_as_default=False) as own,
    ):
        yield own


@dataclass(frozen=True)
class Workers:
    """What the workers of a cluster offer: the least memory, the most threads."""

    count: int
    threads: int
    memory_limit: int | None


def survey(client: Client) -> Workers:
    """Number, threads and memory of the workers, once there is one.

    Raises
    ------
    WorkerError
        No worker came.
    """
    try:
        client.wait_for_workers(1, timeout=_SECONDS_WITHOUT_WORKERS)
    except TimeoutError:
        raise WorkerError(f"The Dask cluster has no workers after {_SECONDS_WITHOUT_WORKERS:.0f} seconds; start some.") from None
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [worker["memory_limit"] for worker in workers if worker["memory_limit"]]
    return Workers(len(workers), max(worker["nthreads"] for worker in workers), min(limits) if limits else None)


def run_everywhere(client: Client, function: Callable[[], None]) -> None:
    """Run a function in every worker process that answers soon; a worker that is stopped or gone must not hold up the rest."""
    run = threading.Thread(target=client.run, args=(function,), kwargs={"on_error": "ignore"}, daemon=True)
    run.start()
    run.join(timeout=_SECONDS_TO_ANSWER)


@dataclass(frozen=True)
class Failure:
    """An error of panelflow that a task met; it travels as a value, so that Dask adds no traceback of its own."""

    error: PanelflowError


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Run a task; errors that speak to the user come back as values."""
    try:
        return function(*args)
    except PanelflowError as error:
        return Failure(error)
    except OSError as error:
        return Failure(StorageError(f"{error.filename or 'a file'}: {error.strerror or error}"))


def run_tasks(
    client: Client,
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    key: str,
    done: Callable[[Any], None] = lambda _result: None,
) -> list[Any]:
    """Run ``function`` once for each tuple of arguments; see :func:`collect`."""
    futures = [
        client.submit(guarded, function, *args, key=f"{key}-{number}", pure=False) for number, args in enumerate(arguments)
    ]
    return collect(client, futures, done)


def collect(client: Client, futures: Sequence[Future], done: Callable[[Any], None] = lambda _result: None) -> list[Any]:
    """Results of futures of :func:`guarded` calls, in their order.

    Parameters
    ----------
    done
        Called here with each result as it comes.

    Raises
    ------
    PanelflowError
        That of the first task that fails; the others are cancelled.
    WorkerError
        Workers died under a task again and again, or none is left.
    """
    results: dict[str, Any] = {}
    try:
        for future in as_they_finish(client, futures):
            result = _result_of(future)
            results[future.key] = result
            if isinstance(result, Failure):
                raise result.error
            done(result)
        return [results[future.key] for future in futures]
    finally:
        client.cancel(futures, force=True)


def _result_of(future: Future) -> Any:
    try:
        return future.result()
    except KilledWorker as error:
        raise WorkerError(
            f"Dask gave up after its workers died repeatedly under one task ({error}). The usual cause is memory: lower "
            f"shard_bytes or give a worker fewer threads. Finished pieces are kept; run the same call again."
        ) from error


def as_they_finish(client: Client, futures: Sequence[Future]) -> Iterator[Future]:
    """Futures in the order in which they finish; raises where no worker is left to finish one."""
    finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(finished.put)
    alone_since: float | None = None
    for _ in futures:
        while True:
            try:
                future = finished.get(timeout=2.0)
                break
            except queue.Empty:
                if client.scheduler_info(n_workers=-1)["workers"]:
                    alone_since = None
                elif alone_since is None:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > _SECONDS_WITHOUT_WORKERS:
                    raise WorkerError(
                        "The Dask cluster lost all its workers. Finished pieces are kept; run the same call again."
                    ) from None
        yield future
