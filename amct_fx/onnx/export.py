"""``export_onnx``: a prepared or converted model as a file, in one of five formats.

The recipe: check everything, convert, run PyTorch's exporter, rewrite its graph, write the file.
Source: spec/deploy.md sections 2, 4, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.convert import convert_amct
from amct_fx.copying import copy_model
from amct_fx.errors import ArgumentError, ModelStateError
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Quantize, QuantizedLayer
from amct_fx.npu import lowering_of
from amct_fx.onnx.arguments import Format, check_options, checked_inputs, checked_opset, rules_of
from amct_fx.onnx.full import has_trained_outputs, quantize_outputs_on
from amct_fx.report.preparation import preparation_of

if TYPE_CHECKING:
    import os

    from amct_fx.onnx.source import Exporter

__all__ = ["export_onnx", "own_converted"]


def export_onnx(
    model: nn.Module,
    args: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    format: Format = "qdq",
    dynamic_batch: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    exporter: Exporter = "auto",
    calibration_data: Iterable[Any] | None = None,
    signed_activations: bool = False,
    fold_unfused_weights: bool = False,
) -> None:
    """Write a prepared or converted model as an ONNX file.

    ===============  ============================================================  ============
    format           what the file is for                                          opset
    ===============  ============================================================  ============
    ``"qdq"``        onnxruntime and others: QuantizeLinear and DequantizeLinear,  13 to 23, 18
                     INT8 weights, INT32 biases; what was trained
    ``"qdq_full"``   onnxruntime at its fastest: results are quantized too, which  13 to 23, 18
                     is not AMCT's arithmetic
    ``"qdq_pairs"``  Ascend by way of ``amct_onnx.convert_qat_model``: float       13 to 18, 16
                     weights behind QuantizeLinear and DequantizeLinear
    ``"ascend"``     Ascend's ATC: AscendQuant, integer operators, AscendDequant   11 to 18, 16
    ``"fake_quant"`` AMCT's simulation of the deploy file, in float operators      11 to 23, 16
    ===============  ============================================================  ============

    The last number is the default. INT16 activations need opset 21 in ``"qdq"``, which is then the
    default.

    Args:
        model: A calibrated model of :func:`amct_fx.prepare_qat_amct` in any mode, or a model of
            :func:`amct_fx.convert_amct`. It is not changed.
        args: Example inputs: a tensor, a tuple of what ``forward`` takes, or a dict by its names.
        path: The file to write; missing folders are made. An old file is replaced at the very end,
            so after an error it is still there.
        format: See above.
        dynamic_batch: Let axis 0 of every input tensor vary.
        input_names: Names of the inputs of the file, in order.
        output_names: Names of the outputs of the file, in order.
        dynamic_axes: Axes that vary, by name of an input or output: ``{"x": {0: "batch"}}`` or
            ``{"x": [0]}``.
        dynamic_shapes: The same as ``torch.onnx.export(dynamo=True)`` takes it; needs that
            exporter.
        opset: Version of ONNX's default operator set; ``None`` for the default of the format.
        exporter: ``"dynamo"`` (needs onnxscript), ``"torchscript"``, or ``"auto"``, which tries
            the better one for the format first.
        calibration_data: Batches, each a tensor or a tuple, that give the ranges of the results in
            ``"qdq_full"``; not needed by a model prepared with ``outputs="quantize"``, whose ranges
            are trained.
        signed_activations: Keep activations INT8 in ``"qdq"`` and ``"qdq_full"``. They are UINT8
            otherwise, 128 above: the same steps, which onnxruntime runs faster.
        fold_unfused_weights: Store the weights of layers that onnxruntime runs in float anyway as
            floats, with the values of the integers: a larger file that runs faster.

    Raises:
        ArgumentError: An argument is wrong: unknown format, opset that the format does not have,
            names that do not fit, a path that is a folder.
        ArgumentTypeError: An argument is of the wrong type.
        ConvertError: The model cannot be converted; see :func:`amct_fx.convert_amct`.
        ExportError: The exporter or the format cannot hold the model.
        InputDataError: ``args`` is no tensor, tuple or dict that ``forward`` takes.
        ModelStateError: The model is not prepared, wrapped, or converted but in training mode.
        ModelTypeError: ``model`` is no ``nn.Module``.

    Example:
        >>> import tempfile, onnx, torch
        >>> from amct_fx import prepare_qat_amct
        >>> x = torch.randn(8, 4)
        >>> prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> _ = prepared(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_onnx(prepared, x, f"{folder}/deploy.onnx", format="ascend")
        ...     [node.op_type for node in onnx.load(f"{folder}/deploy.onnx").graph.node]
        ['AscendQuant', 'Gemm', 'AscendDequant']
    """
    rules = rules_of(format)
    inputs = checked_inputs(
        args,
        path,
        model,
        dynamic_batch=dynamic_batch,
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=dynamic_axes,
        dynamic_shapes=dynamic_shapes,
        exporter=exporter,
    )
    checked_opset(opset, format, exporter=exporter)
    check_options(
        format, signed_activations=signed_activations, fold_unfused_weights=fold_unfused_weights
    )
    converted = own_converted(model)
    version = checked_opset(opset, format, exporter=exporter, int16=_has_int16(converted))
    if format == "qdq_full" and not has_trained_outputs(converted):
        quantize_outputs_on(converted, calibration_data)
    elif calibration_data is not None:
        why = "the model has trained ranges" if format == "qdq_full" else f"{format!r} needs none"
        message = f"calibration_data is for format 'qdq_full' without trained results; {why}"
        raise ArgumentError(message)

    from amct_fx.onnx.build import Options, build
    from amct_fx.onnx.files import write_model

    options = Options(signed_activations, fold_unfused_weights, free_opset=opset is None)
    made = build(converted, inputs, format, version, exporter, options)
    write_model(made, path, suffix=rules.suffix)


def own_converted(model: nn.Module) -> nn.Module:
    """Return a converted model of our own, in eval mode."""
    if not isinstance(model, nn.Module) or not _is_converted(model):
        return convert_amct(model)
    training = [name for name, module in model.named_modules() if module.training]
    if lowering_of(model) is not None:
        message = "the model was converted for torch-npu; export one converted without a backend"
        raise ModelStateError(message)
    if training:
        where = f"its part {training[0]!r}" if training[0] else "it"
        message = f"the model is converted, but {where} is in training mode; call model.eval()"
        raise ModelStateError(message)
    return copy_model(model)


def _is_converted(model: nn.Module) -> bool:
    preparation = preparation_of(model)
    if preparation is not None and preparation.converted:
        return True
    parts = list(model.modules())
    return any(isinstance(part, QuantizedLayer) for part in parts) and not any(
        isinstance(part, QATLayer) for part in parts
    )


def _has_int16(model: nn.Module) -> bool:
    return any(
        isinstance(module, Quantize) and module.zero_point.dtype == torch.int16
        for module in model.modules()
    )
