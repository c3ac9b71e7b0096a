"""One LSTM or GRU layer, step by step: the arithmetic of both the training and the integer model.

torch's kernels run all steps in one call, so nothing could quantize the hidden state between two of
them. Here the product with the input is one operation over all steps, the product with the
hidden state one for each step; cell state, biases and gates stay float. Source:
spec/quantization.md section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from amct_fx.errors import ModelError, ModelTypeError

__all__ = ["ONNX_GATES", "Gates", "HiddenState", "check_input", "run_recurrent", "unsupported_form"]

HiddenState: TypeAlias = "Tensor | tuple[Tensor, Tensor] | None"
"""``h`` of a GRU, ``(h, c)`` of an LSTM, each ``[1, B, H]``; ``None`` means zeros."""

ONNX_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""ONNX's gates as indices into torch's: LSTM i, o, f, g of i, f, g, o; GRU z, r, n of r, z, n."""

_State: TypeAlias = "tuple[Tensor, ...]"


class Gates(NamedTuple):
    """The parameters of all G gates, stacked as torch does; G is 4 for LSTM, 3 for GRU.

    Attributes:
        weight_ih: ``[G*H, I]``.
        weight_hh: ``[G*H, H]``.
        bias_ih: ``[G*H]`` or ``None``.
        bias_hh: ``[G*H]`` or ``None``.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None


def unsupported_form(layer: nn.RNNBase) -> str | None:
    """Say why an LSTM or GRU cannot be quantized, ``None`` if it can.

    Example:
        >>> unsupported_form(nn.LSTM(4, 8, num_layers=2, bidirectional=True))
        'num_layers=2, bidirectional=True: only a single forward layer without dropout and \
projection is quantized'
        >>> unsupported_form(nn.GRU(4, 8, bias=False, batch_first=True)) is None
        True
    """
    plain = {"num_layers": 1, "bidirectional": False, "dropout": 0.0, "proj_size": 0}
    found = {key: getattr(layer, key) for key in plain}
    odd = [f"{key}={value}" for key, value in found.items() if value != plain[key]]
    if not odd:
        return None
    rule = "only a single forward layer without dropout and projection is quantized"
    return f"{', '.join(odd)}: {rule}"


def check_input(layer: nn.RNNBase, input: Any, name: str = "") -> None:
    """Refuse what :func:`run_recurrent` cannot run.

    Args:
        layer: LSTM or GRU.
        input: Its input; a ``PackedSequence``, whose steps differ in batch size, is refused.
        name: Name of the layer, for the message.

    Raises:
        ModelTypeError: ``input`` is a ``PackedSequence``.
        ModelError: ``input`` has neither two nor three dimensions.
    """
    label = f"layer {name!r}: " if name else ""
    if isinstance(input, PackedSequence):
        message = (
            f"{label}a quantized {layer.mode} takes a padded tensor, not a PackedSequence; pad it "
            "(torch.nn.utils.rnn.pad_packed_sequence), or list the layer in quant_skip_layers"
        )
        raise ModelTypeError(message)
    if input.dim() not in (2, 3):
        message = f"{label}the input of {layer.mode} must be 2-D or 3-D, not {input.dim()}-D"
        raise ModelError(message)


def run_recurrent(
    layer: nn.RNNBase,
    input: Tensor,
    hx: HiddenState,
    gates: Gates,
    quantize_hidden: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor | _State]:
    """Run one layer in forward direction, like ``layer(input, hx)``.

    The previous hidden state of a GRU enters its output unquantized: ``z * h`` is gate arithmetic.

    Args:
        layer: LSTM or GRU; tells the kind, ``batch_first`` and ``hidden_size``.
        input: ``[T, B, I]``, ``[B, T, I]`` with ``batch_first``, or ``[T, I]``.
        hx: Initial state, each part ``[1, B, H]`` or ``[1, H]``.
        gates: The parameters.
        quantize_hidden: Applied to the hidden state, ``[B, H]`` or ``[H]``, before each product.

    Returns:
        The output, like ``input`` with H features, and the last state in the form of ``hx``.

    Example:
        >>> lstm, x = nn.LSTM(3, 5), torch.randn(7, 2, 3)
        >>> output, (h, c) = run_recurrent(lstm, x, None, Gates(*lstm.all_weights[0]), lambda h: h)
        >>> torch.allclose(output, lstm(x)[0], atol=1e-6), h.shape
        (True, torch.Size([1, 2, 5]))
    """
    axis = 1 if layer.batch_first and input.dim() == 3 else 0
    steps = F.linear(input, gates.weight_ih, gates.bias_ih).unbind(axis)
    state = _initial_state(layer, steps[0], hx)
    advance = _lstm_step if layer.mode == "LSTM" else _gru_step
    outputs = []
    for from_input in steps:
        from_hidden = F.linear(quantize_hidden(state[0]), gates.weight_hh, gates.bias_hh)
        state = advance(from_input, from_hidden, state)
        outputs.append(state[0])
    last = tuple(part.unsqueeze(0) for part in state)
    return torch.stack(outputs, axis), last if layer.mode == "LSTM" else last[0]


def _initial_state(layer: nn.RNNBase, step: Tensor, hx: HiddenState) -> _State:
    """Return ``(h0,)`` or ``(h0, c0)``, each ``[B, H]``; ``step`` is ``[B, G*H]``."""
    shape = (*step.shape[:-1], layer.hidden_size)
    if hx is None:
        zeros = step.new_zeros(shape)
        return (zeros, zeros) if layer.mode == "LSTM" else (zeros,)
    parts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    for part in parts:
        layer.check_hidden_size(part, (1, *shape))
    return tuple(part[0] for part in parts)


def _lstm_step(from_input: Tensor, from_hidden: Tensor, state: _State) -> _State:
    i, f, g, o = (from_input + from_hidden).chunk(4, dim=-1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(from_input: Tensor, from_hidden: Tensor, state: _State) -> _State:
    (h,) = state
    r_x, z_x, n_x = from_input.chunk(3, dim=-1)
    r_h, z_h, n_h = from_hidden.chunk(3, dim=-1)
    n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return (n + torch.sigmoid(z_x + z_h) * (h - n),)
