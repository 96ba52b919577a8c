from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

import panelflow as pf
from panelflow.distributed import join, sum_over_ranks


def where(tag: str) -> tuple[str, int, int, list[float]]:
    place = join()
    return tag, place.rank, place.world_size, sum_over_ranks([1.0, place.rank], place)


def test_results_come_back_in_the_order_of_ranks() -> None:
    assert pf.launch(where, 3, ("x",)) == [("x", rank, 3, [3.0, 3.0]) for rank in range(3)]


def test_functions_without_a_module_travel() -> None:
    offset = 40
    assert pf.launch(lambda extra: offset + extra, 1, (2,)) == [42]


def fail_on_rank_one() -> None:
    if join().rank == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()  # would wait for ever


def test_a_rank_that_raises_ends_the_job_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(pf.RankError, match=r"(?s)Rank 1 of 3 failed.*fail_on_rank_one.*ZeroDivisionError: on purpose"):
        pf.launch(fail_on_rank_one, 3)
    assert time.monotonic() - started < 60


def refuse() -> None:
    raise pf.OptionError("epochs=0")


def test_an_error_of_ours_is_the_cause() -> None:
    with pytest.raises(pf.RankError) as caught:
        pf.launch(refuse, 1)
    assert isinstance(caught.value.__cause__, pf.OptionError)


def die_on_rank_one() -> None:
    if join().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_ends_the_job() -> None:
    with pytest.raises(pf.RankError, match="Rank 1 of 2 was killed by SIGKILL; if nobody did so, it ran out of memory"):
        pf.launch(die_on_rank_one, 2)


def finish_late() -> int:
    rank = join().rank
    if rank == 0:
        time.sleep(4)  # longer than a collective may take
    return rank


def test_a_rank_may_work_alone_for_longer_than_a_collective() -> None:
    assert pf.launch(finish_late, 2, timeout=1.0) == [0, 1]


def raise_then_abort() -> None:
    if join().rank == 0:
        raise ValueError("the true cause")
    time.sleep(1)
    os.abort()


def test_the_first_failure_is_told() -> None:
    with pytest.raises(pf.RankError, match="the true cause"):
        pf.launch(raise_then_abort, 2)


def listening() -> list[str]:
    dist.barrier()
    own = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    parent = [c.laddr.ip for c in psutil.Process().parent().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    return own + parent


def test_ranks_and_their_rendezvous_listen_on_loopback_only() -> None:
    addresses = [address for rank in pf.launch(listening, 2) for address in rank]
    assert addresses
    assert {address.removeprefix("::ffff:") for address in addresses} <= {"127.0.0.1", "::1"}


def test_a_local_cluster_listens_on_loopback_only(tmp_path: Path) -> None:
    from panelflow.cluster import connect

    with connect(None, workers=2, threads_per_worker=1, memory_limit="1GiB"):
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        addresses = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert addresses
    assert addresses <= {"127.0.0.1", "::1"}


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(body))
    return [str(path)]


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    body = """
        import panelflow as pf
        from panelflow.distributed import join
        print("imported")
        def work():
            return join().rank
        print(pf.launch(work, 2))
    """
    done = subprocess.run([sys.executable, *script(tmp_path, body)], capture_output=True, text=True, check=True)
    assert done.stdout == "imported\n[0, 1]\n"


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    body = """
        import os, time, panelflow as pf
        def wait():
            print("rank", os.getpid(), flush=True)
            time.sleep(600)
        pf.launch(wait, 2)
    """
    parent = subprocess.Popen([sys.executable, *script(tmp_path, body)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, ranks))


def test_torchrun_runs_the_same_script(dataset: pf.Dataset, tmp_path: Path) -> None:
    body = f"""
        import json, os, sys, torch, panelflow as pf
        def train():
            torch.manual_seed(0)
            ds = pf.open({dataset.folder.path()!r})
            result = pf.fit(pf.MLP(4).double(), ds, batch_size=300, epochs=1, progress=False)
            return result.history[0]["train_loss"]
        if __name__ == "__main__":
            if sys.argv[1:] == ["launch"]:
                print(json.dumps(pf.launch(train, 2)))
            else:
                print(json.dumps(train()), flush=True)
                os._exit(0)  # torch's own threads sometimes abort while the interpreter is torn down
    """
    path = script(tmp_path, body)
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env: dict[str, Any] = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*runner, *path], capture_output=True, text=True, check=True, env=env)
    own = subprocess.run([sys.executable, *path, "launch"], capture_output=True, text=True, check=True, env=env)
    plain = subprocess.run([sys.executable, *path], capture_output=True, text=True, check=True, env=env)
    losses = [float(line) for line in run.stdout.split()]
    assert losses == pytest.approx([float(plain.stdout)] * 2, rel=1e-10)
    assert [float(item) for item in own.stdout.strip("[]\n").split(",")] == pytest.approx(losses, rel=1e-12)


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(pf.OptionError, match="nproc=0"):
        pf.launch(where, 0)
