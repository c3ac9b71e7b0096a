"""A progress bar with group, loss and time left, where somebody looks at a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID
    from typing_extensions import Self

__all__ = ["ProgressBar"]


class ProgressBar:
    """Counts the steps of all groups; without rich, or if not wanted, it does nothing.

    Args:
        total: Number of steps.
        shown: ``None``: if the error output is a terminal.
    """

    def __init__(self, total: int, shown: bool | None = None) -> None:
        self._total = total
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._shown:
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("distill", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it."""
        if self._bar is not None:
            self._bar.stop()

    def describe(self, text: str) -> None:
        """Show which group is trained, and its loss."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)

    def advance(self, steps: int = 1) -> None:
        """Count steps."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, steps)
