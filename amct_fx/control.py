"""Switching quantizers on and off by name, freezing, and a schedule for a training.

The functions act on a prepared model in place and return the names they touched. Patterns are shell
patterns on layer names: ``"layer1.*"``, ``"*.conv2"``; one that matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch.ao.quantization import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm

from amct_fx.errors import ConfigError, ModelStateError, did_you_mean
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, ULQWeightFakeQuantize

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "QATSchedule",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "freeze_bn",
    "freeze_ranges",
    "param_groups",
]


def enable_fake_quant(model: nn.Module, pattern: str = "*") -> list[str]:
    """Let the quantizers of the matching layers quantize.

    Args:
        model: A prepared model.
        pattern: Shell pattern of layer names.

    Returns:
        The names of the layers, in model order.

    Raises:
        ModelStateError: If nothing matches.
    """
    return _for_each(model, pattern, lambda quantizer: quantizer.enable_fake_quant(True))


def disable_fake_quant(model: nn.Module, pattern: str = "*") -> list[str]:
    """Let the matching layers compute in float; arguments as for :func:`enable_fake_quant`.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        >>> disable_fake_quant(model, "0")
        ['0']
    """
    return _for_each(model, pattern, lambda quantizer: quantizer.enable_fake_quant(False))


def enable_observer(model: nn.Module, pattern: str = "*") -> list[str]:
    """Let the matching layers calibrate when they have no range yet."""
    return _for_each(model, pattern, lambda quantizer: quantizer.enable_observer(True))


def disable_observer(model: nn.Module, pattern: str = "*") -> list[str]:
    """Keep the matching layers from calibrating; without a range they compute in float."""
    return _for_each(model, pattern, lambda quantizer: quantizer.enable_observer(False))


def freeze_ranges(model: nn.Module, pattern: str = "*", *, frozen: bool = True) -> list[str]:
    """Stop (or resume) learning the clips and learned weight scales of the matching layers."""
    return _for_each(model, pattern, lambda quantizer: _turn_learning(quantizer, not frozen))


@contextmanager
def weights_unchanged(model: nn.Module) -> Iterator[None]:
    """Fake-quantize each ARQ weight only once in the block, on every device.

    On a CPU this happens by itself where weights do not change. On an accelerator a look at the
    weights would stall it, so there the caller promises: no weight changes in the block. Use it
    around an evaluation, or around the micro-batches of one optimizer step. Learned weight scales
    and compiled models compute as always.

    Args:
        model: A prepared model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> with weights_unchanged(model):
        ...     for batch in torch.randn(4, 8, 4):
        ...         model(batch).sum().backward()
    """
    quantizers = [part for part in model.modules() if isinstance(part, ARQFakeQuantize)]
    for quantizer in quantizers:
        quantizer.trust_weights()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.trust_weights(False)


def freeze_bn(model: nn.Module, pattern: str = "*") -> list[str]:
    """Put the matching batch norms into eval mode: their statistics stay.

    ``model.train()`` undoes it, so call this after it; :class:`QATSchedule` does.

    Returns:
        The names of the batch norms, in model order; none is no error.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and fnmatchcase(name, pattern):
            module.eval()
            names.append(name)
    return names


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    range_lr: float | None = None,
    scale_lr: float | Literal["auto"] | None = None,
) -> list[dict[str, Any]]:
    """Split the parameters for an optimizer: clips and learned weight scales must not decay.

    Decay pulls a range to zero, whatever the data needs. And Adam moves any parameter by about the
    learning rate, whatever its size: the scale of INT8 weights is a 127th of the largest weight, so
    at the learning rate of the weights it would change a hundred times as fast as they do. That of
    INT4 weights is a 7th. ``scale_lr="auto"`` lets the ends of the range, 127 or 7 scales, move as
    fast as the weights.

    Args:
        model: A prepared model, wrapped or not.
        lr: Learning rate of all parameters; ``None`` for that of the optimizer.
        weight_decay: For all other parameters; ``None`` for that of the optimizer.
        range_lr: Learning rate of the ranges; ``None`` for the same as the others.
        scale_lr: Learning rate of learned weight scales; ``"auto"`` for ``lr`` divided by the
            largest code of each, which suits Adam. ``None`` for the same as the other ranges.

    Returns:
        Two groups, first the other parameters, then the ranges, with a weight decay of 0; with
        ``scale_lr`` a third, the weight scales, and with ``"auto"`` one for each width of their
        weights, from narrow to wide. Each parameter of the model stands in one of them, once.

    Raises:
        ConfigError: ``scale_lr`` is ``"auto"`` without ``lr``, or another word.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> groups = param_groups(model, range_lr=1e-4)
        >>> [len(group["params"]) for group in groups]
        [2, 2]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)
        >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(0.001, 0.01), (0.0001, 0.0)]
        >>> config = "retrain_weight_quant_config { ulq_retrain { dst_type: INT4 } }"
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)), config)
        >>> print(f"{param_groups(model, lr=7e-4, scale_lr='auto')[-1]['lr']:.9g}")
        0.0001
    """
    ranges = {p: None for _, quantizer in _quantizers(model) for p in quantizer.parameters()}
    others = [parameter for parameter in model.parameters() if parameter not in ranges]
    scales = {} if scale_lr is None else _weight_scales(model)
    clips = [parameter for parameter in ranges if parameter not in scales]
    groups: list[dict[str, Any]] = [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {"params": clips, "lr": lr if range_lr is None else range_lr, "weight_decay": 0.0},
    ]
    if isinstance(scale_lr, str):
        groups += _scale_groups(scales, lr, scale_lr)
    elif scale_lr is not None:
        groups.append({"params": list(scales), "lr": scale_lr, "weight_decay": 0.0})
    return [{key: value for key, value in g.items() if value is not None} for g in groups]


@dataclass
class QATSchedule:
    """Calibrate, learn, freeze: what to switch at which epoch of one model.

    Call :meth:`apply` at the start of every epoch, after ``model.train()``. It acts where a phase
    begins or ends, and undoes only what it did itself: a layer that you switched off or froze by
    name stays so, and one that you switched back on or released in a phase stays that until the
    next one. Only the batch norms are put into eval mode every epoch, as ``model.train()`` ends it.

    Attributes:
        float_epochs: Epochs in which the ranges are observed but nothing is quantized.
        freeze_bn_epoch: First epoch with frozen batch norm statistics; ``None`` for never.
        freeze_ranges_epoch: First epoch with frozen clips and weight scales; ``None`` for never.
        epoch: The next epoch.
        switched_off: Names of the quantizers that the schedule switched off, until it switches
            them on again; ``None`` outside of the float epochs.
        frozen: Names of the quantizers that the schedule froze; ``None`` before.

    Example:
        >>> schedule = QATSchedule(float_epochs=1, freeze_bn_epoch=3, freeze_ranges_epoch=4)
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> [schedule.apply(model) for _ in range(5)]
        ['calibrate', 'learn', 'learn', 'learn, bn frozen', 'ranges frozen, bn frozen']
    """

    float_epochs: int = 0
    freeze_bn_epoch: int | None = None
    freeze_ranges_epoch: int | None = None
    epoch: int = 0
    switched_off: list[str] | None = None
    frozen: list[str] | None = None

    def __post_init__(self) -> None:
        """Nothing was loaded yet."""
        self._resumed = False

    def apply(self, model: nn.Module) -> str:
        """Set the switches for the current epoch, count it, and return what the epoch does.

        Raises:
            ModelStateError: If the model has no quantizers.
        """
        quantizers = {plain_name(name): module for name, module in _named_quantizers(model)}
        if not quantizers:
            raise ModelStateError(_NOT_PREPARED)
        calibrating = self.epoch < self.float_epochs
        ranges_frozen = _reached(self.freeze_ranges_epoch, self.epoch)
        bn_frozen = _reached(self.freeze_bn_epoch, self.epoch)
        self.switched_off = self._turn(quantizers, calibrating, self.switched_off, _FAKE_QUANT)
        self.frozen = self._turn(quantizers, ranges_frozen, self.frozen, _LEARNING)
        self._resumed = False
        if bn_frozen:
            freeze_bn(model)
        self.epoch += 1
        phase = "calibrate" if calibrating else "ranges frozen" if ranges_frozen else "learn"
        return f"{phase}, bn frozen" if bn_frozen else phase

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, the epoch and what is switched, as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the schedule that made ``state`` was.

        The next :meth:`apply` repeats what that schedule had switched, since the state dict of a
        model does not say which parameters are frozen.
        """
        for key, value in QATSchedule(**state).__dict__.items():
            setattr(self, key, value)
        self._resumed = True

    def _turn(
        self,
        quantizers: dict[str, FakeQuantizeBase],
        off: bool,
        ours: list[str] | None,
        switch: _Switch,
    ) -> list[str] | None:
        """Bring one kind of switch to what the epoch asks for; return what is off because of us."""
        if off and ours is None:
            ours = [name for name, quantizer in quantizers.items() if switch.is_on(quantizer)]
        elif off is (ours is not None) and not self._resumed:
            return ours
        for name in ours or ():
            if name in quantizers:
                switch.turn(quantizers[name], not off)
        return ours if off else None


@dataclass(frozen=True)
class _Switch:
    """Something that is on or off at each quantizer."""

    is_on: Callable[[FakeQuantizeBase], bool]
    turn: Callable[[FakeQuantizeBase, bool], object]


def _turn_learning(quantizer: FakeQuantizeBase, on: bool) -> None:
    """Let clips or a learned weight scale learn, or not; other quantizers learn nothing."""
    if isinstance(quantizer, (ULQFakeQuantize, ULQWeightFakeQuantize)):
        quantizer.requires_grad_(on)


_FAKE_QUANT = _Switch(
    lambda quantizer: bool(quantizer.fake_quant_enabled), FakeQuantizeBase.enable_fake_quant
)
_LEARNING = _Switch(
    lambda quantizer: any(p.requires_grad for p in quantizer.parameters()), _turn_learning
)


def _reached(start: int | None, epoch: int) -> bool:
    return start is not None and epoch >= start


def _named_quantizers(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeBase]]:
    """Yield every quantizer with its own name."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizeBase):
            yield name, module


def _quantizers(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeBase]]:
    """Yield every quantizer with the name of its layer."""
    for name, module in _named_quantizers(model):
        yield name.rpartition(".")[0], module


def plain_name(name: str) -> str:
    """Return a name without what DistributedDataParallel and ``torch.compile`` put before it."""
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name


def _for_each(
    model: nn.Module, pattern: str, action: Callable[[FakeQuantizeBase], None]
) -> list[str]:
    matching = [item for item in _quantizers(model) if fnmatchcase(item[0], pattern)]
    if not matching:
        names = list(dict.fromkeys(name for name, _ in _quantizers(model)))
        close = did_you_mean(pattern, names)
        message = f"no quantized layer matches {pattern!r}{close}" if names else _NOT_PREPARED
        raise ModelStateError(message)
    for _, quantizer in matching:
        action(quantizer)
    return list(dict.fromkeys(name for name, _ in matching))


_NOT_PREPARED = "the model has no quantizers; call prepare_qat_amct first"


def _weight_scales(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the learned scales of weights, each with the width of its codes."""
    return {
        parameter: quantizer.num_bits
        for _, quantizer in _quantizers(model)
        if isinstance(quantizer, ULQWeightFakeQuantize)
        for parameter in quantizer.parameters()
    }


def _scale_groups(
    scales: dict[nn.Parameter, int], lr: float | None, rule: str
) -> list[dict[str, Any]]:
    """Return a group for each width, with the learning rate that moves the range like weights."""
    if rule != "auto":
        message = f'scale_lr={rule!r}: give a learning rate, "auto" or None'
        raise ConfigError(message)
    if lr is None:
        message = (
            'scale_lr="auto" is a share of the learning rate of the weights: give that as lr=..., '
            "or a number as scale_lr"
        )
        raise ConfigError(message)
    return [
        {
            "params": [parameter for parameter, bits in scales.items() if bits == width],
            "lr": lr / (2 ** (width - 1) - 1),
            "weight_decay": 0.0,
        }
        for width in sorted(set(scales.values()))
    ]
