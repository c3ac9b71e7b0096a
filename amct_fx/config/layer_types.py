"""How layer types are spelled: in torch, in MindSpore, in the graphs of AMCT.

All dialects share one table, so mixed files work. Nothing is folded: ``conv2d`` is no spelling of
``Conv2d``, and the error says so.

Example:
    >>> resolve_type("nn.Conv2D").name
    'Conv2d'
    >>> resolve_type("mindspore.nn.Dense").name
    'Linear'
    >>> resolve_type("DepthwiseConv2dNative").depthwise_only
    True
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from amct_fx.config.schema import NOWHERE, Source
from amct_fx.errors import did_you_mean

__all__ = [
    "PRUNABLE_BESIDES",
    "PRUNABLE_BY_FILTER",
    "PRUNABLE_BY_M4N2",
    "QUANTIZABLE_TYPES",
    "LayerType",
    "is_mindspore_spelling",
    "resolve_type",
]

QUANTIZABLE_TYPES = (
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Linear",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "LSTM",
    "GRU",
)
CONV_TYPES = frozenset(name for name in QUANTIZABLE_TYPES if name.startswith("Conv"))
RECURRENT_TYPES = frozenset({"LSTM", "GRU"})
PRUNABLE_BY_FILTER = frozenset({"Conv2d", "Linear"})
PRUNABLE_BY_M4N2 = frozenset({"Conv2d", "Linear", "ConvTranspose2d"})
#: Beyond what AMCT prunes; by 2:4 only where an override asks for it.
PRUNABLE_BESIDES = CONV_TYPES | {"ConvTranspose3d"}

_SYNONYMS = {name: name for name in QUANTIZABLE_TYPES} | {
    "Conv1D": "Conv1d",
    "Conv2D": "Conv2d",
    "Conv3D": "Conv3d",
    "Dense": "Linear",
    "Conv1dTranspose": "ConvTranspose1d",
    "Conv2dTranspose": "ConvTranspose2d",
    "Conv2DTranspose": "ConvTranspose2d",
    "Conv2dBackpropInput": "ConvTranspose2d",
}
_DEPTHWISE = frozenset({"DepthwiseConv2dNative", "DepthwiseConv2d"})
_NEVER_IN_MINDSPORE = frozenset({"Conv2dTranspose", "Conv2DTranspose", "Conv2dBackpropInput"})
_KNOWN_UNQUANTIZABLE = frozenset(
    {
        "AvgPool2d",
        "BatchNorm2d",
        "CellList",
        "Flatten",
        "MaxPool2d",
        "ReLU",
        "ReLU6",
        "SequentialCell",
    }
)
_NO_WEIGHT = frozenset({"MatMul", "BatchMatMul"})

_PREFIX = re.compile(r"(torch\.nn\.modules\.\w+\.|torch\.nn\.|mindspore\.nn\.|ms\.nn\.|nn\.)")


@dataclass(frozen=True)
class LayerType:
    """What a spelling means.

    Args:
        name: Class name in torch.
        depthwise_only: Only layers with as many groups as input channels are meant.
        quantizable: Whether layers of this type can be quantized at all.
        note: A remark about the spelling that is worth a warning, or ``""``.
    """

    name: str
    depthwise_only: bool = False
    quantizable: bool = True
    note: str = ""

    @property
    def key(self) -> tuple[str, bool]:
        """What makes two spellings the same type."""
        return (self.name, self.depthwise_only)

    def matches(self, layer_type: str, *, depthwise: bool) -> bool:
        """Tell whether a layer is of this type."""
        return self.name == layer_type and (depthwise or not self.depthwise_only)


def resolve_type(
    spelling: str, *, model_types: Collection[str] = (), source: Source = NOWHERE
) -> LayerType:
    """Return what a spelling means.

    Args:
        spelling: The type as a file spells it.
        model_types: Class names of all modules of the model; those are known types, too.
        source: Where it stands, for the message.

    Raises:
        ConfigError: When nothing is spelled so.

    Example:
        >>> resolve_type("conv2d")
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: unknown layer type 'conv2d'; did you mean ...
    """
    name = strip_prefix(spelling)
    if name in _SYNONYMS:
        note = ""
        if name in _NEVER_IN_MINDSPORE:
            note = f"{spelling!r} means ConvTranspose2d; MindSpore's QAT never supported it"
        return LayerType(_SYNONYMS[name], note=note)
    if name in _DEPTHWISE:
        note = (
            f"{spelling!r} is an internal name; it means Conv2d layers with groups == in_channels"
        )
        return LayerType("Conv2d", depthwise_only=True, note=note)
    if name in _NO_WEIGHT:
        message = f"{spelling!r} has no weight layer to quantize; use Linear"
        raise source.error(message)
    if name in _KNOWN_UNQUANTIZABLE or name in model_types:
        return LayerType(name, quantizable=False)
    spellings = sorted({*_SYNONYMS, *_DEPTHWISE})
    message = (
        f"unknown layer type {spelling!r}{did_you_mean(name, spellings)} "
        f"(accepted: {', '.join(spellings)}, with or without 'nn.'; case matters)"
    )
    raise source.error(message)


def strip_prefix(spelling: str) -> str:
    """Return a type without blanks and without one package prefix.

    Example:
        >>> strip_prefix(" torch.nn.modules.conv.Conv2d ")
        'Conv2d'
    """
    name = spelling.strip()
    prefix = _PREFIX.match(name)
    return name[prefix.end() :] if prefix else name


def is_mindspore_spelling(spelling: str) -> bool:
    """Tell whether only MindSpore spells a type so.

    Example:
        >>> is_mindspore_spelling("nn.Conv2D"), is_mindspore_spelling("nn.Conv2d")
        (True, False)
    """
    spelling = spelling.strip()
    return (
        spelling == "nn.Conv2D"
        or spelling.startswith("mindspore.")
        or spelling.endswith(("Dense", "Conv2dTranspose"))
    )
