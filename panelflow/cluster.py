"""The Dask client of a run: the user's own, left as it was found, or a local cluster that fits the machine."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from dask.utils import parse_bytes
from distributed import Client, Future, LocalCluster, default_client
from distributed.scheduler import KilledWorker

from panelflow.errors import OptionError, PanelflowError, StorageError, WorkerError
from panelflow.files import Folder

_SECONDS_WITHOUT_WORKERS = 60.0
_SECONDS_TO_ANSWER = 10.0


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
    with _deaf_to_interrupts():
        cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=threads_per_worker,
            memory_limit=memory_limit,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        )
    with cluster, Client(cluster, set_as_default=False) as own:
        yield own


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all: this process hears it, and ends them in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Workers:
    """What the workers of a cluster offer: the least memory, the most threads."""

    count: int
    threads: int
    memory_limit: int | None


def survey(client: Client) -> Workers:
    """Number, threads and memory of the workers, once there is one and all have this version of panelflow.

    Raises
    ------
    WorkerError
        No worker came, or some of them have another version of panelflow, or none.
    """
    asked_for = client.submit(_nothing_to_do, pure=False)  # a cluster that adapts starts workers for tasks only
    try:
        client.wait_for_workers(1, timeout=_SECONDS_WITHOUT_WORKERS)
    except TimeoutError:
        raise WorkerError(f"The Dask cluster has no workers after {_SECONDS_WITHOUT_WORKERS:.0f} seconds; start some.") from None
    finally:
        asked_for.release()
    workers = _workers_of(client).values()
    _check_versions(client)
    limits = [worker["memory_limit"] for worker in workers if worker["memory_limit"]]
    return Workers(len(workers), max(worker["nthreads"] for worker in workers), min(limits) if limits else None)


def _workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of each worker, by address.

    Not ``Client.scheduler_info``, which returns an attribute that a periodic call empties in between.
    """
    workers: dict[str, dict[str, Any]] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def _nothing_to_do() -> None:
    """A task for its own sake."""


def _check_versions(client: Client) -> None:
    def installed() -> str:  # travels by value, to workers that may have no panelflow to take it from
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("panelflow")
        except PackageNotFoundError:
            return "none"

    own = version("panelflow")
    others = {address: found for address, found in ask_everywhere(client, installed).items() if found != own}
    if others:
        listed = ", ".join(f"{address} ({found})" for address, found in sorted(others.items())[:5])
        raise WorkerError(
            f"{len(others)} Dask workers have another panelflow than {own} here: {listed}. Install the same version on all."
        )


def check_shared(client: Client, folders: Iterable[Folder]) -> None:
    """See that every worker reads what this process writes into folders.

    Raises
    ------
    OptionError
        Some do not; names them and the folder.
    """
    for folder in folders:
        token = uuid.uuid4().hex
        folder.write(token, [token.encode()])
        try:
            blind = sorted(address for address, seen in ask_everywhere(client, _sees, folder, token).items() if seen is False)
        finally:
            folder.remove(token)
        if blind:
            raise OptionError(
                f"{len(blind)} Dask workers do not see {folder.path()}, such as {blind[0]}; every worker must. Name an output "
                f"and a scratch folder (scratch=, --scratch) on storage that all of them share, such as a network file system "
                f"or an object store."
            )


def _sees(folder: Folder, token: str) -> bool:
    try:
        return folder.read(token) == token.encode()
    except OSError:
        return False


def ask_everywhere(client: Client, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What a function returns in each worker process; one that is stopped or gone is left out and holds up the others little."""
    answers: dict[str, Any] = {}

    def ask(address: str) -> None:
        with contextlib.suppress(Exception):  # the worker is gone; whoever asks knows nothing of it
            answers.update(client.run(function, *args, workers=[address]))

    addresses = list(_workers_of(client))
    threads = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    for thread in threads:
        thread.join(timeout=max(deadline - time.monotonic(), 0.0))
    return dict(answers)


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
    except Exception as error:  # whatever a library met there; its traceback travels as a note
        failure = WorkerError(f"A task failed on a worker ({type(error).__name__}: {error}). Finished pieces are kept.")
        failure.add_note(traceback.format_exc())
        return Failure(failure)


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
        let_go(futures)


def let_go(futures: Sequence[Future]) -> None:
    """Have the scheduler drop these results, and the tasks among them that have not begun.

    Not ``Client.cancel``, which also cancels dependents and trips over those that nobody wants any more.
    """
    for future in futures:
        future.release()


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
                if _workers_of(client):
                    alone_since = None
                elif alone_since is None:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > _SECONDS_WITHOUT_WORKERS:
                    raise WorkerError(
                        "The Dask cluster lost all its workers. Finished pieces are kept; run the same call again."
                    ) from None
        yield future
