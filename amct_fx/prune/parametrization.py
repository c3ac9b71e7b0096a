"""Masks as parametrizations: the stored weight stays dense, the effective one has zeros.

The layer computes with ``f(stored weight)``; the gradient of a masked entry is exactly 0. Masks are
``uint8`` buffers with their final shape from construction, so they move, load, average and
broadcast with the model. ``forward`` reads nothing on the host.

Source: spec/pruning.md sections 5.2 and 8.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from amct_fx.errors import ConfigError, ModelError, ModelStateError, did_you_mean
from amct_fx.nn.parametrized import parametrized_names, register
from amct_fx.observers._base import in_recomputation
from amct_fx.prune.functional import balanced_l2_keep, m4n2_mask

__all__ = [
    "M4N2",
    "FilterNorm",
    "WeightMask",
    "check_pull",
    "detach_hooks",
    "filter_norm",
    "input_axis",
    "m4n2",
]


class WeightMask(nn.Module):
    """A mask on a parameter; see the subclasses.

    Attributes:
        mask: uint8, 1 where the parameter is kept; broadcastable to the parameter.
    """

    mask: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight times the mask; so is the gradient."""
        return weight * self.mask  # on a CPU ten times faster than torch.where

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return what is stored when the effective weight is set: all of it."""
        return weight

    @property
    def density(self) -> float:
        """Share of the mask that is kept; reads the device."""
        return float(self.mask.float().mean())


class FilterNorm(WeightMask):
    """Masks whole channels of a parameter: rows, columns, or both.

    Args:
        mask: Bool or integers, nonzero where the parameter is kept, of any shape that broadcasts to
            it: ``[O, 1, 1, 1]`` masks output channels, ``[1, I, 1, 1]`` input channels, ``[O]`` a
            bias.

    Example:
        >>> layer = nn.Conv2d(3, 4, 1, bias=False)
        >>> mask = FilterNorm.choose(layer.weight, 0.5, ascend_optimized=False)
        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> _ = register_parametrization(layer, "weight", mask)
        >>> int((layer.weight != 0).any(1).sum())
        2
        >>> mask
        FilterNorm([4, 1, 1, 1], kept 2 of 4)
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (mask != 0).to(torch.uint8))

    @classmethod
    def choose(
        cls,
        weight: Tensor,
        prune_ratio: float,
        *,
        axis: int = 0,
        groups: int = 1,
        ascend_optimized: bool = True,
    ) -> FilterNorm:
        """Mask the filters with the smallest balanced L2 norm.

        Args:
            weight: The weight to look at.
            prune_ratio: Share of the filters to mask.
            axis: Axis of the filters.
            groups: Blocks of filters that keep equal counts.
            ascend_optimized: Keep a multiple of 16.

        Raises:
            ConfigError: As :func:`amct_fx.prune.functional.balanced_l2_keep`.
        """
        kept = balanced_l2_keep(
            weight.movedim(axis, 0), prune_ratio, groups=groups, ascend_optimized=ascend_optimized
        )
        mask = torch.zeros(weight.shape[axis], dtype=torch.uint8, device=weight.device)
        mask[kept] = 1
        return cls(mask.view([-1 if i == axis % weight.dim() else 1 for i in range(weight.dim())]))

    def extra_repr(self) -> str:
        """Return the shape and how much is kept."""
        kept = "meta" if self.mask.is_meta else f"kept {int(self.mask.sum())}"
        return f"{list(self.mask.shape)}, {kept} of {self.mask.numel()}"


class _StraightThrough(torch.autograd.Function):
    """A masked weight whose gradient ignores the mask, with a pull of what is masked to zero.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
    ICLR 2021 (SR-STE).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, decay: float) -> Tensor:
        """Return the masked weight."""
        ctx.decay = decay
        ctx.save_for_backward(*((weight, mask) if decay else ()))
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient as it is, plus the pull."""
        (grad,) = grads
        if ctx.decay:
            weight, mask = ctx.saved_tensors
            grad = grad.addcmul(weight, (1 - mask).to(weight.dtype), value=ctx.decay)
        return grad, None, None


class M4N2(WeightMask):
    """Keeps the two largest of every four neighbouring input channels: 2:4 sparsity.

    ``update_freq = 0``: the mask is chosen once, and again when a checkpoint without masks is
    loaded. ``update_freq = f > 0``: :meth:`step` chooses it anew at steps 0, f, 2f, … from the
    stored dense weight, so a masked entry returns when kept ones shrink below it. :func:`m4n2`
    registers the mask and lets every training forward of the layer be a step. Registered by hand
    with ``torch.nn.utils.parametrize``, the loop calls :meth:`step` itself.

    Args:
        weight: The weight to mask.
        axis: Axis of the input channels, 0 for a transposed convolution.
        update_freq: Steps between two choices of the mask; 0: it is chosen once.
        columns: Nonzero where an input channel is kept, broadcastable to the weight, when channels
            are pruned as well: groups of four run over the kept channels. Every row keeps equally
            many.
        count_eval: Count forwards in evaluation mode, too, as AMCT does.
        straight_through: ``None`` masks the gradient; a number lets it reach masked entries, too
            (STE), and pulls those to zero by so much of their value (SR-STE; its paper uses 2e-4).

    Attributes:
        mask: uint8, the shape of the weight.
        counter: int64, the steps so far.
        kept: int64 indices of the kept input channels, or ``None``; broadcastable but for ``axis``.

    Example:
        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = nn.Linear(8, 2)
        >>> _ = register_parametrization(layer, "weight", M4N2(layer.weight))
        >>> (layer.weight != 0).sum(1).tolist()
        [4, 4]
    """

    counter: Tensor
    kept: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        *,
        axis: int = 1,
        update_freq: int = 0,
        columns: Tensor | None = None,
        count_eval: bool = False,
        straight_through: float | None = None,
    ) -> None:
        super().__init__()
        check_pull(straight_through)
        self.straight_through = straight_through
        self.axis = axis % weight.dim()
        self.update_freq = _checked_frequency(update_freq)
        self.count_eval = count_eval
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.uint8))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.register_buffer("kept", None if columns is None else self._indices(weight, columns))
        self.refresh(weight)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight times the mask; so is the gradient, unless it goes straight through."""
        if self.straight_through is None:
            return super().forward(weight)
        result: Tensor = _StraightThrough.apply(weight, self.mask, self.straight_through)  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """Choose the mask for ``weight`` now."""
        self.mask.copy_(self._choose(weight))

    @torch.no_grad()
    def step(self, weight: Tensor) -> None:
        """Count a step; choose the mask at steps 0, f, 2f, … Nothing is read on the host.

        Args:
            weight: The dense weight.
        """
        if self.update_freq == 0 or not (self.training or self.count_eval):
            return
        if self.update_freq == 1:
            self.mask.copy_(self._choose(weight))
        else:
            due = self.counter % self.update_freq == 0
            self.mask.copy_(torch.where(due, self._choose(weight), self.mask != 0))
        self.counter.add_(1)

    def extra_repr(self) -> str:
        """Return axis, frequency and density."""
        density = "meta" if self.mask.is_meta else f"density={self.density:.3f}"
        kept = "" if self.kept is None else f", over {self.kept.shape[self.axis]} kept channels"
        return f"axis={self.axis}, update_freq={self.update_freq}, {density}{kept}"

    def _choose(self, weight: Tensor) -> Tensor:
        """Return the bool mask of ``weight``; what is not kept counts as cut."""
        if self.kept is None:
            return m4n2_mask(weight, axis=self.axis)
        shape = list(weight.shape)
        shape[self.axis] = self.kept.shape[self.axis]
        kept = self.kept.expand(shape)
        chosen = m4n2_mask(weight.gather(self.axis, kept), axis=self.axis)
        return torch.zeros_like(weight, dtype=torch.bool).scatter(self.axis, kept, chosen)

    def _indices(self, weight: Tensor, columns: Tensor) -> Tensor:
        """Return the kept places along the axis of the input channels."""
        columns = columns.to(weight.device) != 0
        shape = list(columns.shape)
        shape[self.axis] = weight.shape[self.axis]
        columns = columns.expand(shape)
        counts = columns.sum(self.axis)
        count = int(counts.max())
        if int(counts.min()) != count:
            message = "every row of a weight must keep equally many input channels"
            raise ConfigError(message)
        cut = (~columns).to(torch.uint8)
        order = cut.argsort(dim=self.axis, stable=True)
        return order.narrow(self.axis, 0, count)


def filter_norm(module: nn.Module, name: str, mask: Tensor) -> FilterNorm:
    """Mask channels of a parameter of ``module``.

    Args:
        module: Any module; it then pickles and loads plain checkpoints, too.
        name: Name of the parameter.
        mask: As for :class:`FilterNorm`.

    Raises:
        ModelError: The module has no such parameter.
        ConfigError: The mask does not broadcast to it.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> _ = filter_norm(layer, "bias", torch.tensor([1, 0, 1]))
        >>> (layer.bias != 0).tolist()
        [True, False, True]
    """
    weight = _stored(module, name)
    if not _broadcasts(mask.shape, weight.shape):
        shapes = f"{list(mask.shape)} does not broadcast to {name} {list(weight.shape)}"
        message = f"a mask of shape {shapes}"
        raise ConfigError(message)
    parametrization = FilterNorm(mask.to(weight.device))
    register(module, name, parametrization)
    return parametrization


def m4n2(
    module: nn.Module,
    name: str = "weight",
    *,
    update_freq: int = 0,
    columns: Tensor | None = None,
    count_eval: bool = False,
    straight_through: float | None = None,
) -> M4N2:
    """Keep two of every four input channels of a layer; every training forward of it is a step.

    Args:
        module: A convolution, transposed convolution or Linear; it then pickles and loads plain
            checkpoints, too.
        name: Name of its weight.
        update_freq: As for :class:`M4N2`.
        columns: As for :class:`M4N2`.
        count_eval: As for :class:`M4N2`.
        straight_through: As for :class:`M4N2`.

    Raises:
        ModelError: The module has no such parameter.
        ModelStateError: It has a 2:4 mask already.

    Example:
        >>> layer = nn.ConvTranspose2d(4, 2, 2)
        >>> m4n2(layer, update_freq=2)
        M4N2(axis=0, update_freq=2, density=0.500)
        >>> _ = layer(torch.ones(1, 4, 2, 2))
        >>> layer.parametrizations.weight[0].counter.item()
        1
    """
    weight = _stored(module, name)
    if name in parametrized_names(module) and _seen_weights(module, name):
        message = f"{name} of the {_class_name(module)} has a 2:4 mask already"
        raise ModelStateError(message)
    parametrization = M4N2(
        weight,
        axis=input_axis(module),
        update_freq=update_freq,
        columns=columns,
        count_eval=count_eval,
        straight_through=straight_through,
    )
    register(module, name, parametrization)
    refresher = _Refresher()
    module.register_load_state_dict_pre_hook(refresher.before)
    module.register_load_state_dict_post_hook(refresher.after)
    if update_freq:
        module.register_forward_pre_hook(_Stepper())
    return parametrization


def input_axis(module: nn.Module) -> int:
    """Return the axis of the input channels in the weight of a layer.

    Example:
        >>> input_axis(nn.Linear(2, 2)), input_axis(nn.ConvTranspose1d(2, 2, 2))
        (1, 0)
    """
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return 0 if isinstance(module, transposed) else 1


def detach_hooks(module: nn.Module) -> None:
    """Remove the hooks that :func:`m4n2` put on a layer."""
    for hooks in (
        module._forward_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        for key, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)  # PyTorch wraps hooks that take the module
            owner = getattr(function, "__self__", function)
            if isinstance(owner, (_Stepper, _Refresher)):
                del hooks[key]


class _Stepper:
    """Forward pre-hook: a training forward is a step of every 2:4 mask of the layer."""

    only_weights = True

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Step, unless activation checkpointing runs the forward again."""
        if not torch.compiler.is_compiling() and in_recomputation():
            return
        for name in parametrized_names(module):
            for mask, weight in _seen_weights(module, name):
                mask.step(weight)


class _Refresher:
    """Chooses masks anew for a checkpoint that has the weight but no mask."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def before(self, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Look which weights come without a mask."""
        self._names = []
        for name, chain in module.parametrizations.items():
            inside = f"{prefix}parametrizations.{name}"
            masks = [f"{inside}.{i}.mask" for i, part in enumerate(chain) if isinstance(part, M4N2)]
            if f"{inside}.original" in state and not any(mask in state for mask in masks):
                self._names.append(name)

    def after(self, module: nn.Module, _keys: Any) -> None:
        """Choose the masks for the weights that are loaded now."""
        for name in self._names:
            for mask, weight in _seen_weights(module, name):
                mask.refresh(weight)


@torch.no_grad()
def _seen_weights(module: Any, name: str) -> list[tuple[M4N2, Tensor]]:
    """Return each 2:4 mask of a parameter with the weight that reaches it."""
    found = []
    chain = module.parametrizations[name]
    weight = chain.original
    for part in chain:
        if isinstance(part, M4N2):
            found.append((part, weight))
        else:
            weight = part(weight)
    return found


def _stored(module: Any, name: str) -> Tensor:
    """Return what a new parametrization of a parameter will see."""
    known = [*module._parameters, *parametrized_names(module)]
    if name not in known:
        message = f"a {_class_name(module)} has no parameter {name!r}{did_you_mean(name, known)}"
        raise ModelError(message)
    weight: Tensor = getattr(module, name)
    return weight.detach()


def _class_name(module: nn.Module) -> str:
    return type_before_parametrizations(module).__name__


def _broadcasts(shape: torch.Size, wanted: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, wanted) == wanted)
    except RuntimeError:
        return False


def check_pull(straight_through: object) -> None:
    """Refuse what is no pull of masked weights to zero.

    Args:
        straight_through: ``None`` or a finite number of at least 0.

    Raises:
        ConfigError: It is neither.
    """
    number = isinstance(straight_through, (int, float)) and not isinstance(straight_through, bool)
    if straight_through is None or (number and 0 <= straight_through < float("inf")):  # type: ignore[operator]
        return
    message = f"straight_through must be None or a number of at least 0, not {straight_through!r}"
    raise ConfigError(message)


def _checked_frequency(update_freq: int) -> int:
    if isinstance(update_freq, bool) or not isinstance(update_freq, int) or update_freq < 0:
        message = f"update_freq must be a whole number of at least 0, not {update_freq!r}"
        raise ConfigError(message)
    return update_freq
