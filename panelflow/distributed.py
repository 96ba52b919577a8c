"""Process group, device, and launching ranks on this machine.

``launch`` starts each rank as a fresh interpreter, not as a fork or spawn of this one: functions of notebooks and of
scripts without a main guard travel by cloudpickle, and nothing is imported twice. The parent holds the rendezvous store on a
socket that it bound to the loopback interface itself, since torch's own listens on every interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # as typed by torch; torch.distributed re-exports it without saying so

from panelflow.errors import OptionError, PanelflowError, RankError

_LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 3.0
_CHILD = "import sys; from panelflow.distributed import run_rank; run_rank(sys.argv[1])"


@dataclass(frozen=True)
class Place:
    """Where this process stands in a job."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join() -> Place:
    """Join the job that this process belongs to: a launched one, one of ``torchrun``, or none.

    Picks NCCL on CUDA and Gloo elsewhere, and one GPU for each rank of a machine.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(_backend())
    if not dist.is_initialized():
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Place(dist.get_rank(), dist.get_world_size(), _device())


def _backend() -> str:
    if torch.cuda.is_available():
        torch.cuda.set_device(_device())
        return "nccl"
    return "gloo"


def _device() -> torch.device:
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def sum_over_ranks(values: Sequence[float], place: Place) -> list[float]:
    """Sums over all ranks in float64, equal on each of them."""
    if place.world_size == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(list(values), dtype=torch.float64, device=place.device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gather_objects(value: Any, place: Place) -> list[Any]:
    """The value of every rank, in the order of ranks, on each of them."""
    if place.world_size == 1:
        return [value]
    values: list[Any] = [None] * place.world_size
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any, place: Place) -> Any:
    """The value of rank 0 on every rank."""
    if place.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


def launch(function: Callable[..., Any], nproc: int = 1, args: Sequence[Any] = (), *, timeout: float = 1800.0) -> list[Any]:
    """Run a function on ``nproc`` ranks of this machine and return what each of them returned.

    Parameters
    ----------
    function
        Any callable that cloudpickle can carry, those of notebooks and ``__main__`` included. It runs inside a process group;
        :func:`panelflow.fit` finds it.
    nproc
        Number of ranks.
    args
        Arguments of the function, the same for each rank.
    timeout
        Seconds that a collective waits before it gives up.

    Returns
    -------
    list
        Results in the order of ranks; they travel by pickle.

    Raises
    ------
    RankError
        A rank raised or died; carries that rank's traceback, and as its cause the error where it was one of panelflow's. The
        other ranks are stopped, so that none waits for ever.
    OptionError
        ``nproc`` below 1.

    Notes
    -----
    Everything listens on the loopback interface only. Ranks end when this process does. Where ``OMP_NUM_THREADS`` is not set,
    the cores are divided among the ranks.
    """
    if nproc < 1:
        raise OptionError(f"A job has at least one rank; nproc={nproc}")
    with tempfile.TemporaryDirectory(prefix="panelflow-") as folder, _loopback_store() as port:
        job = {"function": function, "args": tuple(args), "nproc": nproc, "port": port, "timeout": timeout}
        Path(folder, "path.json").write_text(json.dumps([os.path.abspath(entry or os.curdir) for entry in sys.path]))
        Path(folder, "job.pkl").write_bytes(cloudpickle.dumps(job))
        ranks = [_start_rank(rank, nproc, folder) for rank in range(nproc)]
        try:
            _wait_for_ranks(ranks, folder)
        finally:
            _stop(ranks)
        return [pickle.loads(Path(folder, f"result-{rank}.pkl").read_bytes()) for rank in range(nproc)]


@contextlib.contextmanager
def _loopback_store() -> Iterator[int]:
    """A rendezvous store on a port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        yield port
        del store


def _start_rank(rank: int, nproc: int, folder: str) -> subprocess.Popen[bytes]:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    return subprocess.Popen([sys.executable, "-c", _CHILD, folder], stdin=subprocess.PIPE, env=environment)


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    """Wait until all are done, or one failed and the others had a moment to say why."""
    failed_at: float | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            failed_at = failed_at or time.monotonic()
            if None not in codes or time.monotonic() - failed_at > _GRACE_SECONDS:
                raise _explain(codes, folder)
        time.sleep(0.02)


def _explain(codes: Sequence[int | None], folder: str) -> RankError:
    """The rank that failed first: one that was killed could not say so, the others name the time of their error."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return RankError(f"Rank {rank} was killed by {name}; if nobody did so, it ran out of memory. The job was ended.")
    errors = []
    for rank, code in enumerate(codes):
        report = Path(folder, f"error-{rank}.json")
        if report.exists():
            errors.append((json.loads(report.read_text()), rank))
        elif code:
            errors.append(({"time": float("inf"), "text": f"it left with exit code {code}", "error": None}, rank))
    error, rank = min(errors, key=lambda item: item[0]["time"])
    failure = RankError(f"Rank {rank} of {len(codes)} failed and the job was ended:\n{error['text']}")
    if error["error"] is not None:
        failure.__cause__ = pickle.loads(bytes.fromhex(error["error"]))
    return failure


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()


def run_rank(folder: str) -> None:
    """Body of a rank that :func:`launch` started."""
    threading.Thread(target=_end_with_parent, name="panelflow-parent", daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        job = _load_job(folder)
        store = TCPStore(_LOOPBACK, job["port"], is_master=False)
        limit = timedelta(seconds=job["timeout"])
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=job["nproc"], timeout=limit)
        result = job["function"](*job["args"])
        dist.barrier()
        dist.destroy_process_group()
        _write(Path(folder, f"result-{rank}.pkl"), cloudpickle.dumps(result))
        code = 0
    except BaseException as error:
        known = cloudpickle.dumps(error).hex() if isinstance(error, PanelflowError) else None
        report = {"time": time.time(), "text": traceback.format_exc(), "error": known}
        _write(Path(folder, f"error-{rank}.json"), json.dumps(report).encode())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's threads can abort, or never end, while an interpreter is torn down


def _load_job(folder: str) -> dict[str, Any]:
    """The job; the caller's import path comes first, since its functions may live there."""
    sys.path[:] = json.loads(Path(folder, "path.json").read_text())
    job: dict[str, Any] = pickle.loads(Path(folder, "job.pkl").read_bytes())
    return job


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_bytes(data)
    partial.rename(path)


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: at its end, so do we."""
    while os.read(0, 4096):
        pass
    os._exit(1)
