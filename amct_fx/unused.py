"""Layers that an island owns but never calls, such as one whose weight is only read.

Nothing shows at prepare whether an island calls a layer; the calibration does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from amct_fx.errors import AmctWarning
from amct_fx.nn.qat import QATLayer
from amct_fx.observers import ULQFakeQuantize
from amct_fx.report.preparation import preparation_of, record_preparation

if TYPE_CHECKING:
    from torch import nn

__all__ = ["leave_unused_layers_float"]

_REASON = "it never ran while the model was calibrated and trained"


def leave_unused_layers_float(model: nn.Module) -> None:
    """Turn the layers of islands that never saw an input back into float layers, with a warning.

    Single operators whose configuration switches them off become float layers without one.

    Nothing happens when no layer at all has run: that model was never calibrated.

    Args:
        model: A prepared model; changed in place.
    """
    for module in list(model.modules()):
        if isinstance(module, QATLayer) and module.stays_float:
            module.revert()
    unused = dict(_never_called(model))
    if not unused or not _anything_ran(model):
        return
    for layer in unused.values():
        layer.revert()
    preparation = preparation_of(model)
    if preparation is not None:
        layers = tuple(
            replace(layer, reason=_REASON) if layer.name in unused else layer
            for layer in preparation.layers
        )
        record_preparation(model, replace(preparation, layers=layers))
    message = (
        f"{', '.join(unused)} stay float: no input ever reached them. If the model only reads "
        "their weights, list them in quant_skip_layers; if not, calibrate with other data"
    )
    warnings.warn(message, AmctWarning, stacklevel=3)


def _never_called(model: nn.Module) -> Iterator[tuple[str, QATLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, QATLayer) and module.quantizes_input:
            quantizer = module.input_quantizer
            if isinstance(quantizer, ULQFakeQuantize) and quantizer.is_untouched:
                yield name, module


def _anything_ran(model: nn.Module) -> bool:
    quantizers = [module for module in model.modules() if isinstance(module, ULQFakeQuantize)]
    return any(not quantizer.is_untouched for quantizer in quantizers)
