"""How channels are pruned: the options of spec/pruning.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from amct_fx.choices import check_choices
from amct_fx.config import PruneMode
from amct_fx.observers._checks import check_keywords
from amct_fx.prune.parametrization import check_pull

if TYPE_CHECKING:
    from amct_fx.prune.functional import Reduction

__all__ = ["PruneKeywords", "PruneMode", "PruneOptions"]

DeconvConsumer = Literal["pin", "cut"]
NormAxis = Literal["pin", "mask_aware"]


class PruneKeywords(TypedDict, total=False):
    """The fields of :class:`PruneOptions`, as keyword arguments of the verbs."""

    mode: PruneMode
    importance: Reduction
    apply: Literal["convert", "prepare"]
    deconv_consumer: DeconvConsumer | None
    norm_axis: NormAxis
    row_masks: bool
    count_eval: bool
    straight_through: float | None


@dataclass(frozen=True)
class PruneOptions:
    """The options of channel pruning.

    Args:
        mode: ``"native"`` follows channels through every known operation; ``"amct"`` stops where
            AMCT stops.
        importance: Score of coupled channels: the mean over their producers, or the score of the
            first, as AMCT takes it.
        apply: When channels go: at ``"convert"``, masked until then, or at ``"prepare"``, before
            quantizers are inserted, which is AMCT's order.
        deconv_consumer: Whether the input channels of a transposed convolution may be cut.
            ``None``: ``"cut"`` in native mode, ``"pin"`` in AMCT's.
        norm_axis: Native mode, norms whose statistics run over the channels: ``"pin"`` keeps their
            channels; with ``"mask_aware"`` they count only the channels that stay, from prepare on.
        row_masks: Mask the rows of producers too while training.
        count_eval: Let the refresh of 2:4 masks count forwards in evaluation mode, too, as AMCT.
        straight_through: Let gradients reach weights that are masked 2:4 (STE), and pull those to
            zero by so much of their value (SR-STE); ``None`` masks the gradients.

    Raises:
        ConfigError: For a value that an option does not have.

    Example:
        >>> PruneOptions(mode="amct").cuts_deconv_inputs
        False
    """

    mode: PruneMode = "native"
    importance: Reduction = "mean"
    apply: Literal["convert", "prepare"] = "convert"
    deconv_consumer: DeconvConsumer | None = None
    norm_axis: NormAxis = "pin"
    row_masks: bool = True
    count_eval: bool = False
    straight_through: float | None = None

    def __post_init__(self) -> None:
        """Check the values of the options."""
        check_choices(
            mode=(self.mode, ("native", "amct")),
            importance=(self.importance, ("mean", "first")),
            apply=(self.apply, ("convert", "prepare")),
            deconv_consumer=(self.deconv_consumer, (None, "pin", "cut")),
            norm_axis=(self.norm_axis, ("pin", "mask_aware")),
            row_masks=(self.row_masks, (True, False)),
            count_eval=(self.count_eval, (True, False)),
        )
        check_pull(self.straight_through)

    @classmethod
    def of(cls, keywords: PruneKeywords) -> PruneOptions:
        """Make the options from keyword arguments of a verb.

        Raises:
            TypeError: For a name that is no option, with the one probably meant.

        Example:
            >>> PruneOptions.of({"mode": "amct"}).importance
            'mean'
        """
        check_keywords(cls, dict(keywords))
        return cls(**keywords)

    @property
    def cuts_deconv_inputs(self) -> bool:
        """Whether the input channels of a transposed convolution may be cut."""
        chosen = self.deconv_consumer or ("cut" if self.mode == "native" else "pin")
        return chosen == "cut"
