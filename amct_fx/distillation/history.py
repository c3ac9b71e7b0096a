"""What a distillation did: losses of each group, which state was kept, a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from amct_fx.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GroupHistory", "History"]


@dataclass
class GroupHistory:
    """The training of one group.

    Attributes:
        names: Modules of the group.
        before: Loss on the measured batches before the first step.
        after: Loss of the state that was kept, on the same batches.
        losses: Mean of the losses of all steps, by epoch.
        measured: Loss on the measured batches after each epoch.
        steps: Loss of every step.
        kept_epoch: The epoch whose state was kept, from 1; 0: the state before the first step.
        seconds: Time it took.
        note: Why a group was not trained, or what could not be trained in it.
    """

    names: tuple[str, ...]
    before: float | None = None
    after: float | None = None
    losses: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    kept_epoch: int | None = None
    seconds: float = 0.0
    note: str = ""

    def undo(self) -> None:
        """Note that the group is in its calibrated state again."""
        if self.kept_epoch:
            self.after, self.kept_epoch = self.before, 0
            text = "undone, it made the outputs of the model worse"
            self.note = f"{self.note}; {text}" if self.note else text

    @property
    def label(self) -> str:
        """The modules, short."""
        if len(self.names) <= 2:
            return ", ".join(self.names)
        return f"{self.names[0]} … {self.names[-1]}"


@dataclass
class History:
    """The training of all groups, in order.

    Attributes:
        groups: One entry for each group.
        teacher_passes: Forwards of the teacher.
        model_before: Mean squared error of the outputs of the calibrated student, on the measured
            batches.
        model_after: The same of the returned student.
        seconds: Time of the whole distillation.

    Example:
        >>> group = GroupHistory(("conv", "relu"), before=4e-4, after=1e-4, kept_epoch=2)
        >>> print(History([group]))
        group       before   after    ratio  epoch  seconds
        conv, relu  0.0004   0.0001   0.25       2     0.00
        0 teacher passes, 0.0 s
    """

    groups: list[GroupHistory] = field(default_factory=list)
    teacher_passes: int = 0
    model_before: float | None = None
    model_after: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> History:
        """Return what :meth:`to_dict` came from."""
        groups = [
            GroupHistory(**{**group, "names": tuple(group["names"])}) for group in value["groups"]
        ]
        return cls(**{**value, "groups": groups})

    def __str__(self) -> str:
        """Return a table with one row for each group."""
        width = max([5, *(len(group.label) for group in self.groups)])
        lines = [f"{'group':<{width}}  before   after    ratio  epoch  seconds"]
        lines += [_row(group, width) for group in self.groups]
        if self.model_before is not None and self.model_after is not None:
            lines.append(
                f"error of the outputs {self.model_before:.3g} before, {self.model_after:.3g} after"
            )
        lines.append(f"{self.teacher_passes} teacher passes, {self.seconds:.1f} s")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Draw the losses of all groups over the steps, and before and after.

        Returns:
            A matplotlib figure; nothing is shown or written.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            message = "a plot needs matplotlib: pip install 'amct-fx[report]'"
            raise MissingExtraError(message) from error
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        curves, bars = figure.subplots(1, 2)
        trained = [group for group in self.groups if group.steps]
        for group in trained:
            curves.plot(range(1, len(group.steps) + 1), group.steps, label=group.label, lw=1)
        if any(loss > 0 for group in trained for loss in group.steps):
            curves.set_yscale("log")
        curves.set(xlabel="step", ylabel="loss of the block", title="Training")
        if 0 < len(trained) <= 12:
            curves.legend(fontsize="small")
        places = range(len(trained))
        bars.bar([p - 0.2 for p in places], [g.before or 0 for g in trained], 0.4, label="before")
        bars.bar([p + 0.2 for p in places], [g.after or 0 for g in trained], 0.4, label="after")
        if any(group.before for group in trained):
            bars.set_yscale("log")
        bars.set_xticks(list(places), [g.label for g in trained], rotation=90, fontsize="small")
        bars.set(title="Kept state, on the calibration samples")
        bars.legend(fontsize="small")
        return figure


def _row(group: GroupHistory, width: int) -> str:
    if group.before is None or group.after is None:
        return f"{group.label:<{width}}  {group.note}"
    ratio = group.after / group.before if group.before else 1.0
    row = (
        f"{group.label:<{width}}  {group.before:<7.3g}  {group.after:<7.3g}  {ratio:<5.2f}  "
        f"{group.kept_epoch or 0:>5}  {group.seconds:>7.2f}"
    )
    return f"{row}  {group.note}" if group.note else row
