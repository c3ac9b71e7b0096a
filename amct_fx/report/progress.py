"""Progress of long work: a bar of rich in a terminal, calls of a function, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress", "ProgressReport", "progress_bars"]

ProgressReport = Callable[[str, int, int], None]
"""Called with a stage, the number of steps done, and their total number (0: not known)."""

Progress = bool | ProgressReport | None
"""``None``: a bar in a terminal; ``True``, ``False``: always, never; or a function to call."""


def _nothing(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def progress_bars(progress: Progress = None) -> Iterator[ProgressReport]:
    """Yield what reports progress.

    Args:
        progress: See :data:`Progress`.

    Example:
        >>> with progress_bars(lambda stage, done, total: print(stage, done, total)) as report:
        ...     report("layers", 1, 2)
        layers 1 2
    """
    if progress is not None and not isinstance(progress, bool):
        yield progress
        return
    wanted = sys.stderr.isatty() if progress is None else progress
    bars = _rich_bars() if wanted else None
    if bars is None:
        yield _print_steps if wanted else _nothing
        return
    with bars:
        yield _Reporter(bars)


class _Reporter:
    """Draws one bar for each stage."""

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._drawn.add_task(stage, total=total or None)
        self._drawn.update(self._tasks[stage], completed=done, total=total or None)


def _rich_bars() -> Any:
    """Return the progress display of rich, or ``None`` without rich."""
    try:
        from rich import progress as rich_progress
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    return rich_progress.Progress(*columns, console=Console(stderr=True))


def _print_steps(stage: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{stage} {done}/{total or '?'}", end=end, file=sys.stderr, flush=True)
