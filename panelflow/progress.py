"""Progress of long work: a bar on a terminal or in a notebook, plain lines elsewhere, nothing when silenced.

rich draws the bars; it is light, pure Python and maintained, and the command line uses it for tables as well.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class Reporter:
    """Reports phases one after another; each counts units of work, and rows or bytes beside them.

    Parameters
    ----------
    enabled
        ``False`` reports nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._console = Console(file=sys.stderr)
        self._enabled = enabled
        self._bars: Progress | None = None
        if enabled and (self._console.is_terminal or self._console.is_jupyter):
            columns = (
                TextColumn("{task.description:<12}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=self._console)
        self._bar: TaskID | None = None
        self.seconds: dict[str, float] = {}
        """Seconds that each finished phase took."""

    def __enter__(self) -> Reporter:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def phase(self, name: str, total: float, unit: str = "rows") -> None:
        """Begin a phase of ``total`` units."""
        self._name, self._total, self._unit = name, total, unit
        self._done, self._bytes = 0.0, 0
        self._started = self._last_line = time.monotonic()
        if self._bars is not None:
            self._bar = self._bars.add_task(name, total=total or None, figures="")

    def advance(self, amount: float, num_bytes: int = 0) -> None:
        """Count finished work."""
        self._done += amount
        self._bytes += num_bytes
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, advance=amount, figures=self._figures())
        elif self._enabled and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._line(f"{self._done / max(self._total, 1):.0%}, {self._figures()}, {self._remaining():.0f} s left")

    def finish(self, note: str = "") -> None:
        """End the phase with one line of its figures."""
        self.seconds[self._name] = time.monotonic() - self._started
        if self._bars is None and self._enabled:
            self._line(f"done, {self._figures()}{f', {note}' if note else ''}")

    def _remaining(self) -> float:
        elapsed = time.monotonic() - self._started
        return elapsed * (self._total - self._done) / max(self._done, 1e-9)

    def _figures(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        figures = [f"{self._done:,.0f} {self._unit}"]
        if self._bytes:
            figures.append(f"{self._bytes / 1e6:,.1f} MB, {self._bytes / 1e6 / elapsed:,.1f} MB/s")
        figures += [f"{self._done / elapsed:,.0f} {self._unit}/s", f"{elapsed:.1f} s"]
        return ", ".join(figures)

    def _line(self, text: str) -> None:
        print(f"panelflow: {self._name}: {text}", file=sys.stderr, flush=True)
