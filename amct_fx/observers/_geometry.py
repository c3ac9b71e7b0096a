"""Where the output channels of a weight are.

Conv and Linear weights have them on axis 0. Transposed convolutions keep ``[Cin, Cout/g, k…]``:
output channel ``c`` of group ``j`` sits at ``[j*Cin/g : (j+1)*Cin/g, c]``, so a group axis has
to be split off before there is one row per output channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct_fx.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def _check(weight: Tensor, ch_axis: int | None, groups: int) -> None:
    """Reject geometries that no layer has."""
    if ch_axis not in (None, 0, 1):
        message = f"ch_axis must be None, 0 or 1 (transposed convolution), got {ch_axis!r}"
        raise ConfigError(message)
    if ch_axis == 1 and (weight.dim() < 2 or weight.shape[0] % groups):
        message = (
            f"a transposed convolution with {groups} groups needs a weight [Cin, Cout/groups, …] "
            f"with Cin divisible by {groups}, got shape {tuple(weight.shape)}"
        )
        raise ConfigError(message)


def to_output_major(weight: Tensor, *, ch_axis: int | None = None, groups: int = 1) -> Tensor:
    """Bring the output channels of a weight to axis 0.

    Args:
        weight: ``[Cout, …]`` for ``ch_axis`` ``None`` or 0; ``[Cin, Cout/groups, k…]`` of a
            transposed convolution for ``ch_axis=1``.
        ch_axis: Axis of the output channels.
        groups: Groups of the transposed convolution; ignored otherwise.

    Returns:
        ``[Cout, Cin/groups, k…]``, channels group-major as in the output of the layer. The same
        tensor when nothing moves, a view or a copy otherwise.

    Example:
        >>> import torch
        >>> w = torch.arange(8.0).reshape(4, 2)          # Cin 4, two groups, Cout 4
        >>> to_output_major(w, ch_axis=1, groups=2).tolist()
        [[0.0, 2.0], [1.0, 3.0], [4.0, 6.0], [5.0, 7.0]]
    """
    _check(weight, ch_axis, groups)
    if ch_axis != 1:
        return weight
    rows: Tensor = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return rows


def from_output_major(rows: Tensor, *, ch_axis: int | None = None, groups: int = 1) -> Tensor:
    """Undo :func:`to_output_major`.

    Args:
        rows: ``[Cout, …]``.
        ch_axis: Axis of the output channels in the result.
        groups: Groups of the transposed convolution; ignored otherwise.

    Returns:
        The weight in the layout of the layer.

    Example:
        >>> import torch
        >>> w = torch.randn(6, 2, 3, 3)
        >>> rows = to_output_major(w, ch_axis=1, groups=3)
        >>> rows.shape
        torch.Size([6, 2, 3, 3])
        >>> torch.equal(from_output_major(rows, ch_axis=1, groups=3), w)
        True
    """
    _check(rows, ch_axis, groups)
    if ch_axis != 1:
        return rows
    # A view, as ONNX has no unflatten before operator set 13.
    return rows.view(groups, -1, *rows.shape[1:]).transpose(1, 2).flatten(0, 1)


def count_rows(weight: Tensor, ch_axis: int | None, groups: int) -> int:
    """Return the number of output channels of ``weight``."""
    _check(weight, ch_axis, groups)
    return weight.shape[0] if ch_axis != 1 else weight.shape[1] * groups


def split_groups(weight: Tensor, ch_axis: int | None, groups: int) -> Tensor:
    """View a weight so that :func:`spread` of a per-channel vector broadcasts against it.

    Transposed convolutions get a group axis, ``[g, Cin/g, Cout/g, k…]``; nothing is copied and
    the memory format stays. ``flatten(0, 1)`` undoes it.
    """
    _check(weight, ch_axis, groups)
    if ch_axis != 1:
        return weight
    view: Tensor = weight.unflatten(0, (groups, -1))
    return view


def spread(vector: Tensor, weight: Tensor, ch_axis: int | None, groups: int) -> Tensor:
    """Shape a vector ``[Cout]`` or ``[1]`` to broadcast against :func:`split_groups`.

    Args:
        vector: One value for each output channel, or one for all.
        weight: The weight in the layout of its layer.
        ch_axis: Axis of the output channels.
        groups: Groups of a transposed convolution.

    Returns:
        A view of ``vector``.
    """
    if vector.numel() == 1:
        return vector.reshape(())
    tail = [1] * (weight.dim() - (2 if ch_axis == 1 else 1))
    if ch_axis == 1:
        return vector.reshape([groups, 1, weight.shape[1], *tail])
    return vector.reshape([-1, *tail])
