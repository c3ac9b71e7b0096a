"""Switching quantizers on and off by name, freezing, and a schedule for a training.

The functions act on a prepared model in place and return the names they touched. Patterns are shell
patterns on layer names: ``"layer1.*"``, ``"*.conv2"``; one that matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.ao.quantization import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm

from amct_fx.errors import ModelStateError, did_you_mean
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize

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

    def freeze(quantizer: FakeQuantizeBase) -> None:
        if isinstance(quantizer, (ULQFakeQuantize, ULQWeightFakeQuantize)):
            quantizer.requires_grad_(not frozen)

    return _for_each(model, pattern, freeze)


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


@dataclass
class QATSchedule:
    """Calibrate, learn, freeze: what to switch at which epoch.

    Call :meth:`apply` at the start of every epoch, after ``model.train()``.

    Attributes:
        float_epochs: Epochs in which the ranges are observed but nothing is quantized.
        freeze_bn_epoch: First epoch with frozen batch norm statistics; ``None`` for never.
        freeze_ranges_epoch: First epoch with frozen clips and weight scales; ``None`` for never.
        epoch: The next epoch.

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

    def apply(self, model: nn.Module) -> str:
        """Set the switches for the current epoch, count it, and return what the epoch does."""
        calibrating = self.epoch < self.float_epochs
        ranges_frozen = _reached(self.freeze_ranges_epoch, self.epoch)
        bn_frozen = _reached(self.freeze_bn_epoch, self.epoch)
        (disable_fake_quant if calibrating else enable_fake_quant)(model)
        freeze_ranges(model, frozen=ranges_frozen)
        if bn_frozen:
            freeze_bn(model)
        self.epoch += 1
        phase = "calibrate" if calibrating else "ranges frozen" if ranges_frozen else "learn"
        return f"{phase}, bn frozen" if bn_frozen else phase

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the epoch as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the schedule that made ``state`` was."""
        for key, value in QATSchedule(**state).__dict__.items():
            setattr(self, key, value)


def _reached(start: int | None, epoch: int) -> bool:
    return start is not None and epoch >= start


def _quantizers(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeBase]]:
    """Yield the layer name and the quantizer of every quantizer."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizeBase):
            yield name.rpartition(".")[0], module


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
