"""``summarize``: one row for each layer, with the reason for every layer that stays float."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn

from amct_fx.config import M4N2PruneConfig
from amct_fx.config.messages import counted
from amct_fx.errors import ModelStateError
from amct_fx.graph import check_parts
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.report import table
from amct_fx.report.describe import (
    InputQuantizer,
    Pruning,
    WeightQuantizer,
    describe_input,
    describe_pruning,
    describe_weight,
)
from amct_fx.report.lookup import input_quantizers, unwrapped
from amct_fx.report.preparation import LayerDecision, Preparation, preparation_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct_fx.config import CompressionConfig
    from amct_fx.graph.capture import Island
    from amct_fx.prune import PrunePlan

__all__ = ["Summary", "SummaryRow", "summarize"]

_HEADER = ("name", "type", "state", "input", "weight", "pruning", "reason")


@dataclass(frozen=True)
class SummaryRow:
    """One layer: what quantizes and prunes it, or the reason why it stays float.

    Attributes:
        name: Name of the layer in the model.
        type: Class of the float layer.
        state: ``"float"``, ``"qat"`` (prepared), or the integer type of the converted weight, with
            the library whose integer operator runs the layer.
        input_quantizer: Quantizer of the input, ``None`` for a float layer.
        hidden_quantizer: Quantizer of the hidden state of an LSTM or GRU.
        weight_quantizer: How the weight is quantized.
        pruning: What is cut or masked.
        not_pruned: Why the layer keeps its channels although the configuration prunes it, else
            ``""``.
        reason: Why the layer is not quantized, else ``""``.
    """

    name: str
    type: str
    state: str
    input_quantizer: InputQuantizer | None = None
    hidden_quantizer: InputQuantizer | None = None
    weight_quantizer: WeightQuantizer | None = None
    pruning: Pruning | None = None
    not_pruned: str = ""
    reason: str = ""

    @property
    def input(self) -> str:
        """The quantizers of input and hidden state in words, ``""`` for none."""
        parts = [] if self.input_quantizer is None else [str(self.input_quantizer)]
        if self.hidden_quantizer is not None:
            parts.append(f"hidden state {self.hidden_quantizer}")
        return "; ".join(parts)

    @property
    def weight(self) -> str:
        """The quantizer of the weight in words, ``""`` for none."""
        return "" if self.weight_quantizer is None else str(self.weight_quantizer)

    @property
    def pruned(self) -> str:
        """What is cut or masked in words, or why nothing is, ``""`` where nothing was asked for."""
        if self.pruning is not None:
            return str(self.pruning)
        return f"none: {self.not_pruned}" if self.not_pruned else ""

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the printed table."""
        return (
            *(self.name, self.type, self.state, self.input, self.weight),
            *(self.pruned, self.reason),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return one flat record; what does not apply is ``None``."""
        return {
            "layer": self.name,
            "type": self.type,
            "state": self.state,
            **_columns("input", self.input_quantizer, InputQuantizer),
            **_columns("hidden", self.hidden_quantizer, InputQuantizer),
            **_columns("weight", self.weight_quantizer, WeightQuantizer),
            **_columns("pruning", self.pruning, Pruning),
            "not_pruned": self.not_pruned,
            "reason": self.reason,
        }


def _columns(prefix: str, value: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a description under names of their own."""
    names = [f"{prefix}_{name}" for name in kind.__dataclass_fields__]
    values = [None] * len(names) if value is None else asdict(value).values()
    return dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class Summary:
    """What became of every weight of the model.

    ``print`` gives plain text; :meth:`show` a coloured table in a terminal, if rich is installed.

    Attributes:
        rows: All layers of quantizable types, in model order.
        others: Modules of other types that own weight matrices; they stay float.
        islands: Parts with layers that could not be traced.
        plan: Which channels go; ``None`` without channel pruning.
    """

    rows: tuple[SummaryRow, ...]
    others: tuple[SummaryRow, ...]
    islands: tuple[Island, ...]
    plan: PrunePlan | None = field(default=None, repr=False)

    @property
    def quantized(self) -> tuple[int, int]:
        """How many layers are quantized, of how many that could be by their type."""
        return sum(row.state != "float" for row in self.rows), len(self.rows)

    @property
    def totals(self) -> str:
        """One line: how many layers are quantized, pruned, left float."""
        parts = ["{} of {} layers quantized".format(*self.quantized)]
        pruned = Counter(row.pruning.pattern for row in self._all if row.pruning is not None)
        parts += [f"{number} pruned ({pattern})" for pattern, number in pruned.items()]
        if self.others:
            parts.append(f"{counted(len(self.others), 'module')} of other types float")
        if self.islands:
            parts.append(f"{counted(len(self.islands), 'part')} not traced")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: ``{"layers": [...], "others": [...], "islands": [...], "totals": …}``.

        Numbers that are not finite are ``None``, so JSON can hold it.
        """
        found: dict[str, Any] = table.plain_data(
            {
                "layers": [row.to_dict() for row in self.rows],
                "others": [row.to_dict() for row in self.others],
                "islands": [asdict(island) for island in self.islands],
                "totals": self.totals,
            }
        )
        return found

    def to_markdown(self) -> str:
        """Return a Markdown table, the islands, and the line of totals."""
        layers = table.markdown([row.to_dict() for row in self._all]) if self._all else ""
        islands = "\n".join(f"- not traced: {table.escaped(str(item))}" for item in self.islands)
        return "\n\n".join(part for part in (layers, islands, self.totals) if part)

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame``, one row for each layer.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return table.dataframe([row.to_dict() for row in self._all])

    def show(self, file: TextIO | None = None) -> None:
        """Print a rich table in a terminal, plain text otherwise.

        Args:
            file: Where to; standard output by default.
        """
        table.show(self, self.__rich__, file)

    @property
    def _all(self) -> tuple[SummaryRow, ...]:
        return (*self.rows, *self.others)

    def _notes(self) -> Iterable[str]:
        yield from (table.one_line(f"not traced: {island}") for island in self.islands)
        yield self.totals

    def __rich__(self) -> Any:
        """Return the table for rich, with the islands and the totals below."""
        cells = [row.cells() for row in self._all]
        return table.rich_table(_HEADER, cells, note="\n".join(self._notes()))

    def __str__(self) -> str:
        """Return an aligned table, the islands, and one line of totals."""
        cells = [row.cells() for row in self._all]
        return "\n".join([*table.plain(*table.filled(_HEADER, cells)), *self._notes()])


def summarize(model: nn.Module) -> Summary:
    """Say what became of every layer of a prepared or converted model.

    Args:
        model: What :func:`amct_fx.prepare_qat_amct` or :func:`amct_fx.convert_amct` returned, also
            wrapped for data parallelism or compiled.

    Returns:
        A table: ``print`` it, ``.show()`` it in colours, or take ``.rows``, ``.to_dict()``,
        ``.to_markdown()`` or ``.to_dataframe()``.

    Raises:
        ModelStateError: If ``model`` was never prepared, or a layer was replaced since.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> print(summarize(prepare_qat_amct(model, 'skip_layers: "2"')))
        name  type    state  input                   weight                 reason
        0     Conv2d  qat    8 bits, not calibrated  ARQ, 8 bits, 8 scales
        2     Conv2d  float                                            skip_layers has '2' (line 1)
        1 of 2 layers quantized
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
    preparation = preparation_of(model)
    if preparation is None:
        message = "the model was never prepared; call prepare_qat_amct first"
        raise ModelStateError(message)
    check_parts(model)
    quantizers = input_quantizers(model)
    modules = dict(model.named_modules())
    prunings = _prunings(preparation, modules)
    plan = preparation.plan
    pinned = {} if plan is None else {item.name: item.text for item in plan.pinned}
    rows, others = (
        tuple(
            replace(
                _row(item, modules.get(item.name), quantizers.get(item.name)),
                pruning=prunings.get(item.name),
                not_pruned=pinned.get(item.name, ""),
            )
            for item in decisions
        )
        for decisions in (preparation.layers, preparation.others)
    )
    return Summary(rows, others, preparation.islands, plan)


def _prunings(preparation: Preparation, modules: dict[str, nn.Module]) -> dict[str, Pruning]:
    """Return what is cut or masked, by layer."""
    plan = preparation.plan
    sizes = {} if plan is None else plan.row_sizes()
    kept = {} if plan is None else {name: len(rows) for name, rows in plan.kept_rows().items()}
    patterns = preparation.converted and _wants_2_of_4(preparation.recipe.config)
    found = {}
    for item in (*preparation.layers, *preparation.others):
        if item.name in modules:
            planned = (kept[item.name], sizes[item.name]) if item.name in kept else None
            pruning = describe_pruning(modules[item.name], planned, patterns=patterns)
            if pruning is not None:
                found[item.name] = pruning
    return found


def _wants_2_of_4(config: CompressionConfig | None) -> bool:
    """Say whether a configuration asks for 2:4 sparsity anywhere."""
    if config is None:
        return False
    levels: list[Any] = [config, *config.layer_overrides, *config.type_overrides]
    return any(isinstance(level.prune, M4N2PruneConfig) for level in levels)


def _row(
    decision: LayerDecision, module: nn.Module | None, quantizer: tuple[str, nn.Module] | None
) -> SummaryRow:
    name, layer_type, reason = decision.name, decision.layer_type, decision.reason or ""
    if not isinstance(module, (QATLayer, QuantizedLayer)):
        return SummaryRow(name, layer_type, "float", reason=reason)
    weight = describe_weight(module)
    source = None
    if quantizer is not None:
        owner, found = quantizer
        source = describe_input(found, shared_with=owner if owner != name else None)
    hidden = getattr(module, "hidden_fake_quant", None) or getattr(module, "hidden_quantize", None)
    return SummaryRow(
        name,
        layer_type,
        "qat" if isinstance(module, QATLayer) else f"int{weight.bits} {module.backend}".rstrip(),
        source,
        None if hidden is None else describe_input(hidden),
        weight,
        reason=reason,
    )
