"""Quantization-aware training layers: the float layer with a fake-quantized weight and input.

Each class is a subclass of its ``torch.nn`` namesake with the same parameters and attributes, so a
float checkpoint loads by name and code that reads ``layer.weight`` or ``layer.stride`` keeps
working.

A layer that stands alone calls its own ``input_fake_quant``. In a traced graph the quantizer is a
node of its own, shared by the consumers of the tensor; then ``quantizes_input`` is ``False`` and
only the owner has an ``input_fake_quant``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.nn.geometry import make_weight_fake_quant

if TYPE_CHECKING:
    from torch.ao.quantization import FakeQuantizeBase, QConfig
    from typing_extensions import Self

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Linear",
    "QATLayer",
    "qat_class_of",
]


class QATLayer(nn.Module):
    """What all quantization-aware layers share.

    Attributes:
        weight_fake_quant: Fake-quantizer of ``weight``.
        input_fake_quant: Fake-quantizer of the input, on the layer that owns it.
        quantizes_input: Whether ``forward`` calls ``input_fake_quant`` itself.
        qconfig: The ``torch.ao.quantization.QConfig`` the quantizers were made from.
    """

    float_class: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any
    weight_fake_quant: FakeQuantizeBase
    input_fake_quant: FakeQuantizeBase
    quantizes_input: bool
    qconfig: QConfig

    @classmethod
    def from_float(cls, module: nn.Module, qconfig: QConfig | None = None) -> Self:
        """Return a quantization-aware layer that shares the parameters of ``module``.

        Args:
            module: A layer of exactly the class ``float_class``; it is not changed.
            qconfig: Constructors of the two fake-quantizers; default ``module.qconfig``.

        Raises:
            TypeError: If ``module`` is of another class, or no ``qconfig`` is known.

        Example:
            >>> import torch
            >>> from torch.ao.quantization import QConfig
            >>> from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
            >>> qconfig = QConfig(ULQFakeQuantize.with_args(), ARQFakeQuantize.with_args(ch_axis=0))
            >>> layer = Conv2d.from_float(nn.Conv2d(3, 8, 3), qconfig)
            >>> layer(torch.randn(1, 3, 5, 5)).shape
            torch.Size([1, 8, 3, 3])
        """
        qconfig = qconfig if qconfig is not None else getattr(module, "qconfig", None)
        if type(module) is not cls.float_class or qconfig is None:
            message = (
                f"{cls.__name__}.from_float takes a torch.nn.{cls.float_class.__name__} and a "
                f"QConfig, not {type(module).__name__} and {qconfig!r}"
            )
            raise TypeError(message)
        layer = cls.float_class.__new__(cls)
        layer.__dict__.update(module.__dict__)
        for table in ("_parameters", "_buffers", "_modules"):
            layer.__dict__[table] = dict(module.__dict__[table])
        layer.attach(qconfig)
        layer.add_module("input_fake_quant", qconfig.activation())
        layer.quantizes_input = True
        return layer

    def attach(self, qconfig: QConfig) -> None:
        """Create the weight fake-quantizer; the layer does not quantize its input yet."""
        self.qconfig = qconfig
        self.quantizes_input = False
        self.weight_fake_quant = make_weight_fake_quant(qconfig.weight, self, self.weight)

    def quantized_input(self, input: Tensor) -> Tensor:
        """Return the tensor the float operator runs on."""
        return self.input_fake_quant(input) if self.quantizes_input else input

    def weight_scale(self) -> Tensor:
        """Return today's scale of the weight: float32, one value or one for each output channel."""
        fake_quant: Any = self.weight_fake_quant
        scale: Tensor = fake_quant.calculate_qparams(self.weight.detach())[0]
        return scale

    def quantized_weight(self) -> Tensor:
        """Return the fake-quantized weight, in the shape and dtype of ``weight``."""
        quantized: Tensor = self.weight_fake_quant(self.weight)
        return quantized

    def extra_repr(self) -> str:
        """Add to the float layer's text that the quantizer of the input stands elsewhere."""
        text = super().extra_repr()
        shares = not self.quantizes_input and "input_fake_quant" not in self._modules
        return f"{text}, shares the input quantizer of another layer" if shares else text


class _ConvNd(QATLayer):
    """Forward of the convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve the quantized input ``[N, C_in, *]`` with the fake-quantized weight."""
        input = self.quantized_input(input)
        layer: Any = self
        output: Tensor = layer._conv_forward(input, self.quantized_weight(), self.bias)
        return output


class Conv1d(_ConvNd, nn.Conv1d):
    """Quantization-aware ``torch.nn.Conv1d``."""

    float_class = nn.Conv1d


class Conv2d(_ConvNd, nn.Conv2d):
    """Quantization-aware ``torch.nn.Conv2d``, depthwise and grouped included."""

    float_class = nn.Conv2d


class Conv3d(_ConvNd, nn.Conv3d):
    """Quantization-aware ``torch.nn.Conv3d``."""

    float_class = nn.Conv3d


class _ConvTransposeNd(QATLayer):
    """Forward of the transposed convolutions."""

    spatial_dims: ClassVar[int]
    operator: ClassVar[Any]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve the quantized input ``[N, C_in, *]`` with the fake-quantized weight."""
        input = self.quantized_input(input)
        layer: Any = self
        output_padding = layer._output_padding(
            input,
            output_size,
            layer.stride,
            layer.padding,
            layer.kernel_size,
            self.spatial_dims,
            layer.dilation,
        )
        output: Tensor = type(self).operator(
            input,
            self.quantized_weight(),
            self.bias,
            layer.stride,
            layer.padding,
            output_padding,
            layer.groups,
            layer.dilation,
        )
        return output


class ConvTranspose1d(_ConvTransposeNd, nn.ConvTranspose1d):
    """Quantization-aware ``torch.nn.ConvTranspose1d``."""

    float_class = nn.ConvTranspose1d
    spatial_dims = 1
    operator = staticmethod(F.conv_transpose1d)


class ConvTranspose2d(_ConvTransposeNd, nn.ConvTranspose2d):
    """Quantization-aware ``torch.nn.ConvTranspose2d``."""

    float_class = nn.ConvTranspose2d
    spatial_dims = 2
    operator = staticmethod(F.conv_transpose2d)


class Linear(QATLayer, nn.Linear):
    """Quantization-aware ``torch.nn.Linear`` for inputs ``[*, in_features]`` of any rank."""

    float_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the quantized input with the fake-quantized weight."""
        return F.linear(self.quantized_input(input), self.quantized_weight(), self.bias)


_CLASSES: tuple[type[QATLayer], ...] = (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
)


def qat_class_of(float_class: type[nn.Module]) -> type[QATLayer] | None:
    """Return the quantization-aware class for exactly ``float_class``, ``None`` if there is none.

    Example:
        >>> qat_class_of(nn.Linear).__name__
        'Linear'
    """
    return next((cls for cls in _CLASSES if cls.float_class is float_class), None)
