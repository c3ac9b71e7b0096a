"""Checkpoints of AMCT: its keys and values in the words of a prepared model.

AMCT wraps a layer and the batch norm behind it into one module, so the keys of both begin with the
name of the layer. Source: spec/deploy.md, end of section 7.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amct_fx.errors import CheckpointError
from amct_fx.graph import batch_norm_after, fx_graph_of, layer_calls, regions
from amct_fx.nn.qat import QATLayer
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.prune.parametrization import M4N2

if TYPE_CHECKING:
    from torch import nn

__all__ = ["from_amct_state", "is_amct_state"]

_FLOAT_LAYER = re.compile(r"(.*)\.quant_module\.replaced_module\.(weight|bias)")
_QUANTIZER = re.compile(r"(.*)\.quant_module\.(\w+)")
_PRUNED_PARAMETER = re.compile(r"((?:(?!\.quant_module).)*)\.replaced_module\.(weight|bias)")
"""A layer that is pruned 2:4 and not quantized."""
_PRUNED_FIELDS = (
    ".wts_mask",
    ".prune_cur_batch",
    ".cur_batch",
    ".s_rec_flag",
    ".wts_scales",
    ".wts_offsets",
)
_BATCH_NORM = re.compile(r"(.*)\.bn_module\.(\w+)")
_ONLY_FOR_FILES = re.compile(r"(.*)\.(scale_w|offset_w|record_module\.quant_layer_num)")
_OWNER_AGAIN = ".quant_module.acts_comp_reuse."
"""A layer that shares the range of another layer has that one inside."""


def is_amct_state(state: Mapping[str, Any]) -> bool:
    """Say whether a state dict is of a model that AMCT prepared.

    Example:
        >>> is_amct_state({"conv.quant_module.acts_clip_max": 1.0})
        True
    """
    return any(_QUANTIZER.fullmatch(key) or _PRUNED_PARAMETER.fullmatch(key) for key in state)


def from_amct_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Translate a state dict of AMCT for a model that was prepared with the same configuration.

    Ranges, learned weight scales, 2:4 masks and flags come along. An input quantizer that AMCT had
    not calibrated stays uncalibrated. What AMCT stores for its files only is left out.

    Args:
        state: The state dict of AMCT's model, on the CPU.
        model: The prepared model; it is not changed.

    Returns:
        A state dict for ``model``. Keys that are neither AMCT's nor of the model stay as they are.

    Raises:
        CheckpointError: The model does not quantize or prune a layer that AMCT did; names it.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QATLayer)}
    batch_norms = _batch_norms(model)
    own = model.state_dict()
    found: dict[str, Any] = {}
    fields: dict[str, dict[str, Tensor]] = defaultdict(dict)
    pruned: dict[str, dict[str, Tensor]] = {
        match[1]: {} for key in state if (match := _PRUNED_PARAMETER.fullmatch(key))
    }
    for key, value in state.items():
        if _OWNER_AGAIN in key:
            continue
        if match := _FLOAT_LAYER.fullmatch(key):
            layer, parameter = match.groups()
            found[_parameter_key(layer, parameter, own)] = value
        elif match := _PRUNED_PARAMETER.fullmatch(key):
            found[_parameter_key(match[1], match[2], own)] = value
        elif (layer := key.rpartition(".")[0]) in pruned and key.endswith(_PRUNED_FIELDS):
            pruned[layer][key.rpartition(".")[2]] = value
        elif match := _QUANTIZER.fullmatch(key):
            fields[match[1]][match[2]] = value
        elif match := _BATCH_NORM.fullmatch(key):
            layer, tensor = match.groups()
            found[f"{batch_norms.get(layer, f'{layer}.bn_module')}.{tensor}"] = value
        elif not _ONLY_FOR_FILES.fullmatch(key) or key in own:
            found[key] = value
    for name, values in fields.items():
        if name not in layers:
            message = f"the checkpoint quantizes layer {name!r}, the prepared model does not"
            raise CheckpointError(message)
        found |= _quantizers(name, layers[name], values, own)
        found |= _masks(name, layers[name], values, own)
    for name, values in pruned.items():
        found |= _masks(name, model.get_submodule(name), values, own)
    return found


def _parameter_key(layer: str, parameter: str, own: Mapping[str, Any]) -> str:
    """Return the key of a parameter, which a mask may have moved into a parametrization."""
    moved = f"{layer}.parametrizations.{parameter}.original"
    return moved if moved in own else f"{layer}.{parameter}"


def _batch_norms(model: nn.Module) -> dict[str, str]:
    """Return the name of the batch norm behind each layer that has one."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    found = {}
    for _, region in regions(model):
        for layer, calls in layer_calls(fx_graph_of(region), region).items():
            following = batch_norm_after(calls[0], region) if isinstance(layer, QATLayer) else None
            if following is not None and following.op == "call_module":
                found[names[layer]] = names[region.get_submodule(str(following.target))]
    return found


def _quantizers(
    name: str, layer: QATLayer, values: Mapping[str, Tensor], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of the quantizers of one layer."""
    prefixes = (f"{name}.input_fake_quant.", f"{name}.weight_fake_quant.")
    found = {key: value for key, value in own.items() if key.startswith(prefixes)}
    activation = layer._modules.get("input_fake_quant")
    if isinstance(activation, ULQFakeQuantize) and _is_started(values, activation.batch_num):
        for ours, theirs in (
            ("clip_max", "acts_clip_max"),
            ("clip_min", "acts_clip_min"),
            ("clip_max_prev", "acts_clip_max_pre"),
            ("clip_min_prev", "acts_clip_min_pre"),
            ("scale", "acts_scale"),
            ("zero_point", "acts_offset"),
        ):
            _replace(found, prefixes[0] + ours, values.get(theirs))
        found[f"{prefixes[0]}calibrated"] = torch.ones(1)
    scales = values.get("wts_scales")
    if isinstance(layer.weight_fake_quant, ULQWeightFakeQuantize) and _is_set(scales):
        _replace(found, f"{prefixes[1]}scale", scales)
        found[f"{prefixes[1]}calibrated"] = torch.ones(1)
    return found


def _masks(
    name: str, layer: nn.Module, values: Mapping[str, Tensor], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of the 2:4 mask of one layer, and of what else may mask it."""
    start = f"{name}.parametrizations.weight."
    found = {
        key: value
        for key, value in own.items()
        if key.startswith(start) and not key.endswith(".original")
    }
    mask, counter = values.get("wts_mask"), values.get("prune_cur_batch")
    if mask is None or not _is_set(mask):
        return found
    masks: Any = getattr(layer, "parametrizations", {})
    places = (
        [i for i, item in enumerate(masks["weight"]) if isinstance(item, M4N2)]
        if "weight" in masks
        else []
    )
    if not places:
        message = f"the checkpoint prunes layer {name!r}, the prepared model does not"
        raise CheckpointError(message)
    found[f"{start}{places[0]}.mask"] = mask.to(torch.uint8)
    if counter is not None and _is_set(counter):
        found[f"{start}{places[0]}.counter"] = counter.to(torch.int64).reshape(())
    return found


def _is_started(values: Mapping[str, Tensor], batch_num: int) -> bool:
    """Say whether AMCT had found the range of an input."""
    clips = [values.get(key) for key in ("acts_clip_max", "acts_clip_min")]
    batches = values.get("cur_batch")
    collected = batches is None or not _is_set(batches) or float(batches) >= batch_num
    return all(map(_is_set, clips)) and collected


def _is_set(value: Tensor | None) -> bool:
    """Say whether AMCT had given a value to a tensor: it starts with NaN."""
    return value is not None and bool(torch.isfinite(value).all())


def _replace(found: dict[str, Any], key: str, value: Tensor | None) -> None:
    """Put a value in the place of the model's own, in its dtype; AMCT's scalars have no axis."""
    if value is not None and _is_set(value):
        found[key] = value.to(found[key].dtype).reshape(value.shape or (1,))
