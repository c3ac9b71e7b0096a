"""``summarize``: one row for each layer, with the reason for every layer that stays float."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from torch.ao.quantization import FakeQuantizeBase

from amct_fx.errors import ModelStateError
from amct_fx.graph import fx_graph_of, layer_input, module_of, regions
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Dequantize, Quantize, QuantizedLayer
from amct_fx.report.preparation import LayerDecision, preparation_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, fx, nn

    from amct_fx.graph.capture import Island

__all__ = ["Summary", "SummaryRow", "summarize"]


@dataclass(frozen=True)
class SummaryRow:
    """One layer: its quantizers as text, or the reason why it has none."""

    name: str
    type: str
    state: str
    input: str
    weight: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What became of every weight of the model.

    Attributes:
        rows: All layers of quantizable types, in model order.
        others: Modules of other types that own weight matrices; they stay float.
        islands: Parts with layers that could not be traced.
    """

    rows: tuple[SummaryRow, ...]
    others: tuple[SummaryRow, ...]
    islands: tuple[Island, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: ``{"layers": [...], "others": [...], "islands": [...]}``."""
        return {
            "layers": [asdict(row) for row in self.rows],
            "others": [asdict(row) for row in self.others],
            "islands": [asdict(island) for island in self.islands],
        }

    def __str__(self) -> str:
        """Return an aligned table, the islands, and one line of totals."""
        header = tuple(field.name for field in fields(SummaryRow))
        table = [header, *(astuple(row) for row in (*self.rows, *self.others))]
        widths = [max(len(row[column]) for row in table) for column in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        lines += [f"not traced: {island}" for island in self.islands]
        quantized = sum(row.state != "float" for row in self.rows)
        total = f"{quantized} of {len(self.rows)} layers quantized"
        rest = f", {len(self.others)} modules of other types float" if self.others else ""
        lines.append(total + rest)
        return "\n".join(lines)


def summarize(model: nn.Module) -> Summary:
    """Say what became of every layer of a prepared or converted model.

    Args:
        model: What :func:`amct_fx.prepare_qat_amct` or :func:`amct_fx.convert_amct` returned.

    Returns:
        A table; ``print`` it, or take ``.rows`` or ``.to_dict()``.

    Raises:
        ModelStateError: If ``model`` was never prepared.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> print(summarize(prepare_qat_amct(model, 'skip_layers: "2"')))
        name  type    state  input                   weight            reason
        0     Conv2d  qat    8 bits, not calibrated  8 bits, 8 scales
        2     Conv2d  float                                            the configuration skips it
        1 of 2 layers quantized
    """
    preparation = preparation_of(model)
    if preparation is None:
        message = "the model was never prepared; call prepare_qat_amct first"
        raise ModelStateError(message)
    quantizers = _input_quantizers(model)
    modules = dict(model.named_modules())
    rows = tuple(
        _row(decision, modules.get(decision.name), quantizers.get(decision.name))
        for decision in preparation.layers
    )
    others = tuple(_row(decision, None, None) for decision in preparation.others)
    return Summary(rows, others, preparation.islands)


def _row(
    decision: LayerDecision, module: nn.Module | None, quantizer: tuple[str, nn.Module] | None
) -> SummaryRow:
    state, weight = "float", ""
    if isinstance(module, QATLayer):
        scales = [module.weight_scale(name) for name in module.weight_quantizers]
        state, weight = "qat", f"{module.weight_bits} bits, {_scales_text(scales)}"
    elif isinstance(module, QuantizedLayer):
        state, weight = "int8", f"int8, {_scales_text(module.weight_scales())}"
    source = ""
    if quantizer is not None:
        owner, found = quantizer
        shared = f", of {owner}" if owner != decision.name else ""
        source = _input_text(found) + shared + _hidden_text(module)
    return SummaryRow(
        decision.name, decision.layer_type, state, source, weight, decision.reason or ""
    )


def _input_quantizers(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Map each layer to the owner and module of the quantizer of its input."""
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (QATLayer, QuantizedLayer)) and module.quantizes_input:
            own = getattr(module, "input_quantize", None) or module.get_submodule(
                "input_fake_quant"
            )
            found[name] = (name, own)
    for prefix, region in regions(model):
        for node in fx_graph_of(region).nodes:
            if not isinstance(module_of(node, region), (QATLayer, QuantizedLayer)):
                continue
            source = _quantizer_node(node, region)
            if source is not None:
                owner = str(source.target).rpartition(".")[0]
                quantizer = region.get_submodule(str(source.target))
                found[_join(prefix, str(node.target))] = (_join(prefix, owner), quantizer)
    return found


def _quantizer_node(node: fx.Node, region: nn.Module) -> fx.Node | None:
    source = layer_input(node)
    if source is not None and isinstance(module_of(source, region), Dequantize):
        source = layer_input(source)
    if source is None:
        return None
    quantizes = isinstance(module_of(source, region), (FakeQuantizeBase, Quantize))
    return source if quantizes else None


def _hidden_text(module: nn.Module | None) -> str:
    """Describe the quantizer of the hidden state that an LSTM or GRU has."""
    for attribute in ("hidden_fake_quant", "hidden_quantize"):
        quantizer = getattr(module, attribute, None)
        if quantizer is not None:
            return f"; hidden state {_input_text(quantizer)}"
    return ""


def _input_text(quantizer: nn.Module) -> str:
    if isinstance(quantizer, Quantize):
        return quantizer.extra_repr()
    bits = getattr(quantizer, "num_bits", 8)
    if not getattr(quantizer, "is_calibrated", True):
        return f"{bits} bits, not calibrated"
    scale, zero_point = quantizer.calculate_qparams()  # type: ignore[operator]
    return f"{bits} bits, scale={float(scale):.6g}, zero_point={int(zero_point)}"


def _scales_text(scales: Iterable[Tensor]) -> str:
    number = sum(scale.numel() for scale in scales)
    return f"{number} scale" if number == 1 else f"{number} scales"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
