"""Run one kind of task after another on the cluster, and report them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future

from panelflow.cluster import run_tasks
from panelflow.manifest import Job
from panelflow.progress import Reporter
from panelflow.staging import Staging


class Tasks:
    """The tasks of one run; ``held`` are futures to be let go at its end."""

    def __init__(self, client: Client, job: Job, staging: Staging, reporter: Reporter) -> None:
        self.client, self.job, self.staging, self.reporter = client, job, staging, reporter
        self.held: list[Future] = []
        self._nonce = time.time_ns()

    def key(self, name: str) -> str:
        """Key of a kind of task, of this call alone."""
        return f"panelflow-{name}-{self.job.run[:16]}-{self._nonce}"

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        measure: Callable[[Any], tuple[float, int]],
        total: float,
        unit: str = "rows",
    ) -> list[Any]:
        """Results in order; ``measure`` tells the progress (units, bytes) of one."""
        self.reporter.phase(name, total, unit)
        results = run_tasks(
            self.client, function, arguments, self.key(name), lambda result: self.reporter.advance(*measure(result))
        )
        pieces = [piece for result in results for piece in (result if isinstance(result, list) else [result])]
        reused = sum(bool(getattr(piece, "reused", False)) for piece in pieces)
        self.reporter.finish(f"{reused} of {len(pieces)} pieces were there already" if reused else "")
        return results
