"""What a record file says about a layer, taken from a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amct_fx.checks import check_prepared_model
from amct_fx.convert import convert_amct
from amct_fx.graph import GraphForward, fx_graph_of, module_of
from amct_fx.nn.quantized import Quantize, QuantizedLayer
from amct_fx.nn.recurrent import ONNX_GATES

__all__ = ["LayerRecord", "execution_order", "layer_records"]


@dataclass(frozen=True)
class LayerRecord:
    """What a record file says about one layer.

    Attributes:
        name: Path of the layer.
        scale_d: Scale of the input.
        offset_d: Offset of the input: the code of 0.
        scale_w: Scales of the weight, one or one for each output channel. Of an LSTM or GRU those
            of ``weight_ih``, gate by gate in the order of ONNX.
        act_type: Integer type of the input, ``"INT8"`` or ``"INT16"``.
        wts_type: Integer type of the weight, ``"INT8"`` or ``"INT4"``.
        fakequant_precision_mode: ``"FORCE_FP16_QUANT"`` or ``None``.
        scale_h: LSTM and GRU: scale of the hidden state.
        offset_h: LSTM and GRU: offset of the hidden state.
        scale_r: LSTM and GRU: scales of ``weight_hh``.
    """

    name: str
    scale_d: float
    offset_d: int
    scale_w: tuple[float, ...]
    act_type: str = "INT8"
    wts_type: str = "INT8"
    fakequant_precision_mode: str | None = None
    scale_h: float | None = None
    offset_h: int | None = None
    scale_r: tuple[float, ...] = ()


def layer_records(model: nn.Module) -> dict[str, LayerRecord]:
    """Return what the record file of a model says, by layer, in the order of execution.

    Args:
        model: A prepared and calibrated model, or a converted one; it is not changed.

    Raises:
        ConvertError: The model cannot be converted; names the layer.
        ModelStateError: The model is not prepared.
    """
    if not any(isinstance(module, QuantizedLayer) for module in model.modules()):
        check_prepared_model(model)
        model = convert_amct(model)
    return {
        name: _record_of(name, layer)
        for name, layer in execution_order(model)
        if isinstance(layer, QuantizedLayer)
    }


def execution_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module without children once: as the graphs call them, islands as registered.

    Args:
        model: A prepared or converted model.

    Yields:
        First name and module. What no graph calls comes last.
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    seen: set[nn.Module] = set()
    for module in (*_called(model), *model.modules()):
        if module not in seen:
            seen.add(module)
            yield names[module], module


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside in the order of their calls."""
    parts: list[nn.Module | None] = list(module.children())
    if isinstance(module, GraphForward):
        parts = [module_of(node, module) for node in fx_graph_of(module).nodes]
    for part in parts:
        if part is not None:
            yield part
            yield from _called(part)


def _record_of(name: str, layer: QuantizedLayer) -> LayerRecord:
    quantize = layer.input_owner.input_quantize
    scales = [_record_scales(layer, scale) for scale in layer.weight_scales()]
    hidden: Quantize | None = getattr(layer, "hidden_quantize", None)
    return LayerRecord(
        name,
        scale_d=float(quantize.scale),
        offset_d=int(quantize.zero_point),
        scale_w=scales[0],
        act_type=f"INT{torch.iinfo(quantize.zero_point.dtype).bits}",
        wts_type=f"INT{layer.weight_bits}",
        fakequant_precision_mode="FORCE_FP16_QUANT" if quantize.force_fp16 else None,
        scale_h=None if hidden is None else float(hidden.scale),
        offset_h=None if hidden is None else int(hidden.zero_point),
        scale_r=scales[1] if len(scales) > 1 else (),
    )


def _record_scales(layer: QuantizedLayer, scale: Tensor) -> tuple[float, ...]:
    """Return the scales of a weight; of an LSTM or GRU at least one for each gate."""
    order = ONNX_GATES.get(layer.float_class.__name__)
    if order is not None:
        blocks = scale.expand(len(order)) if scale.numel() == 1 else scale
        chunks = blocks.chunk(len(order))
        scale = torch.cat([chunks[index] for index in order])
    return tuple(scale.tolist())
