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

from panelflow.errors import PREEMPTED_EXIT_CODE, OptionError, PanelflowError, Preempted, RankError

_LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 3.0
_NOTICED_AFTER_SECONDS = 0.3
# The caller's import path comes first: panelflow itself, and what the function needs, may only be found there.
_CHILD = """
import json, sys
sys.path[:] = json.load(open(sys.argv[1] + "/path.json"))
from panelflow.distributed import run_rank
run_rank(sys.argv[1])
"""


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

    Picks NCCL where each rank of a machine has a GPU of its own, and Gloo on the CPU elsewhere: NCCL refuses to share one.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(_backend())
    if not dist.is_initialized():
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Place(dist.get_rank(), dist.get_world_size(), _device())


def _backend() -> str:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or ranks_here > torch.cuda.device_count():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "nccl"


def _device() -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())


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
    Preempted
        SIGTERM came, was passed on to the ranks, and :func:`panelflow.fit` stopped on all of them.

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
            with on_sigterm(lambda: _pass_on_sigterm(ranks)):
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


@contextlib.contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM do ``act`` and nothing else; the handler that was there comes back."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals there alone
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _pass_on_sigterm(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ranks are to stop after a step and save; this process waits for them and then stops as well."""
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    """Wait until every rank has left its result, or one failed and the others had a moment to say why.

    A rank that is done stays until all are: another may still be talking to it.
    """
    ended: dict[int, float] = {}
    while not all(Path(folder, f"result-{rank}.pkl").exists() for rank in range(len(ranks))):
        for rank, process in enumerate(ranks):
            if process.poll() is not None:
                ended.setdefault(rank, time.time())
        if ended and (len(ended) == len(ranks) or time.time() - min(ended.values()) > _GRACE_SECONDS):
            codes = [process.poll() for process in ranks]
            raise Preempted if set(codes) == {PREEMPTED_EXIT_CODE} else _explain(codes, ended, folder)
        time.sleep(0.02)


def _explain(codes: Sequence[int | None], ended: dict[int, float], folder: str) -> RankError:
    """The rank that failed first, by the time of its error or, where it could not report one, of its end."""
    failures = []
    for rank, when in ended.items():
        report = Path(folder, f"error-{rank}.json")
        # A rank that was killed is noticed a moment after the others met its absence.
        unsaid = {"time": when - _NOTICED_AFTER_SECONDS, "text": None, "error": None}
        known: dict[str, Any] = json.loads(report.read_text()) if report.exists() else unsaid
        failures.append((known["time"], rank, known))
    _, rank, first = min(failures, key=lambda failure: failure[:2])
    if first["text"] is None:
        return RankError(f"Rank {rank} of {len(codes)} {_describe_end(codes[rank])}. The job was ended.")
    failure = RankError(f"Rank {rank} of {len(codes)} failed and the job was ended:\n{first['text']}")
    if first["error"] is not None:
        failure.__cause__ = pickle.loads(bytes.fromhex(first["error"]))
    return failure


def _describe_end(code: int | None) -> str:
    if code is None or code >= 0:
        return f"left with exit code {code}"
    hint = "; if nobody did so, it ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all ranks: closing their standard input is the sign, signals are for those that do not heed it."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def run_rank(folder: str) -> None:
    """Body of a rank that :func:`launch` started."""
    done = threading.Event()
    threading.Thread(target=_end_with_parent, args=(done,), name="panelflow-parent", daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        job = pickle.loads(Path(folder, "job.pkl").read_bytes())
        store = TCPStore(_LOOPBACK, job["port"], is_master=False)
        limit = timedelta(seconds=job["timeout"])
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=job["nproc"], timeout=limit)
        result = job["function"](*job["args"])
        _flush()
        done.set()
        _write(Path(folder, f"result-{rank}.pkl"), cloudpickle.dumps(result))
        threading.Event().wait()  # until the parent has the results of all
    except Preempted:
        _flush()
        os._exit(PREEMPTED_EXIT_CODE)
    except BaseException as error:
        known = cloudpickle.dumps(error).hex() if isinstance(error, PanelflowError) else None
        report = {"time": time.time(), "text": traceback.format_exc(), "error": known}
        _write(Path(folder, f"error-{rank}.json"), json.dumps(report).encode())
        _flush()
        os._exit(1)  # torch's threads can abort, or never end, while an interpreter is torn down


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_bytes(data)
    partial.rename(path)


def _end_with_parent(done: threading.Event) -> None:
    """The parent holds the other end of standard input: at its end, so do we."""
    while os.read(0, 4096):
        pass
    os._exit(0 if done.is_set() else 1)
