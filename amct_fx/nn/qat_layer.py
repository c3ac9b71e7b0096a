"""What all quantization-aware layers share: making quantizers, using them, becoming integer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.errors import ArgumentTypeError
from amct_fx.nn.become import become, drop_reparametrization, float_class_of, shared_as
from amct_fx.nn.geometry import make_weight_fake_quant
from amct_fx.nn.integer import BatchNormAffine, integer_weight
from amct_fx.nn.quantized import quantized_class_of
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
from amct_fx.observers._recompute import is_traced

if TYPE_CHECKING:
    from torch.ao.quantization import QConfig
    from typing_extensions import Self

    from amct_fx.nn.quantized import IntegerWeight, Quantize, QuantizedLayer
    from amct_fx.observers import Source

__all__ = ["QATLayer"]


class QATLayer(nn.Module):
    """A float layer with a fake-quantized input and fake-quantized weights.

    Attributes:
        weight_names: The parameters that are quantized as weights.
        reads_float_input: Whether ``forward`` also takes the unquantized input, as
            ``float_input``, where the quantizer of the input stands in front of the layer.
        input_fake_quant: Fake-quantizer of the input, on the layer that owns it.
        quantizes_input: Whether the layer always quantizes its input itself, as in an island. Where
            a graph calls it, a node in front does, and the call says ``quantized=True``; any other
            call, such as from a method of the user's, still finds the input quantized here.
        qconfig: The ``torch.ao.quantization.QConfig`` the quantizers were made from.
    """

    float_class: ClassVar[type[nn.Module]]
    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    reads_float_input: ClassVar[bool] = False
    weight: Any
    bias: Any
    weight_fake_quant: FakeQuantizeBase
    input_fake_quant: FakeQuantizeBase
    quantizes_input: bool
    _input_owner: tuple[QATLayer, ...]
    qconfig: QConfig

    @classmethod
    def from_float(cls, module: nn.Module, qconfig: QConfig | None = None) -> Self:
        """Return a quantization-aware layer that shares the parameters of ``module``.

        Args:
            module: A layer of exactly the class ``float_class``; it is not changed.
            qconfig: Constructors of the fake-quantizers; default ``module.qconfig``.

        Raises:
            ArgumentTypeError: If ``module`` is of another class, or no ``qconfig`` is known.

        Example:
            >>> import torch
            >>> from torch.ao.quantization import QConfig
            >>> from amct_fx.nn.qat import Conv2d
            >>> from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
            >>> qconfig = QConfig(ULQFakeQuantize.with_args(), ARQFakeQuantize.with_args(ch_axis=0))
            >>> layer = Conv2d.from_float(nn.Conv2d(3, 8, 3), qconfig)
            >>> layer(torch.randn(1, 3, 5, 5)).shape
            torch.Size([1, 8, 3, 3])
        """
        qconfig = qconfig if qconfig is not None else getattr(module, "qconfig", None)
        if float_class_of(module) is not cls.float_class or qconfig is None:
            message = (
                f"{cls.__name__}.from_float takes a torch.nn.{cls.float_class.__name__} and a "
                f"QConfig, not {type(module).__name__} and {qconfig!r}"
            )
            raise ArgumentTypeError(message)
        layer = shared_as(module, cls)
        layer.attach(qconfig)
        layer.own_input_fake_quant(qconfig.activation)
        layer.quantizes_input = True
        return layer

    def attach(self, qconfig: QConfig) -> None:
        """Create the weight fake-quantizers; the layer does not quantize its input yet."""
        self.qconfig = qconfig
        self.quantizes_input = False
        self._input_owner = ()
        for weight, fake_quant in self.weight_quantizers.items():
            made = make_weight_fake_quant(qconfig.weight, self, getattr(self, weight))
            setattr(self, fake_quant, made)

    def make_activation_fake_quant(
        self, constructor: Callable[..., Any], name: str = ""
    ) -> FakeQuantizeBase:
        """Build a fake-quantizer of an activation, on the device and in the mode of the layer.

        Args:
            constructor: Such as ``qconfig.activation``.
            name: Name of the layer, for messages.
        """
        fake_quant: FakeQuantizeBase = constructor()
        if isinstance(fake_quant, ULQFakeQuantize):
            fake_quant.layer_name = name
        return fake_quant.to(self._first_weight().device).train(self.training)

    def own_input_fake_quant(self, constructor: Callable[..., Any], name: str = "") -> None:
        """Make this layer the owner of the quantizer of its input."""
        fake_quant = self.make_activation_fake_quant(constructor, name)
        self.add_module("input_fake_quant", fake_quant)

    def share_input_quantizer(self, owner: QATLayer) -> None:
        """Use the input quantizer of another layer that reads the same tensor."""
        self._input_owner = (owner,)  # a tuple, so that the owner is no sub-module

    @property
    def stays_float(self) -> bool:
        """Whether the layer has no quantizer at all, and converts to the float layer."""
        return False

    @property
    def weight_quantizers(self) -> dict[str, str]:
        """The attribute of each weight's fake-quantizer, by the weight's name."""
        # Not a constant of the class: those the tracer of PyTorch 2.7 reads only when plain.
        return {name: f"{name.removesuffix('_l0')}_fake_quant" for name in self.weight_names}

    @property
    def input_owner(self) -> Any:
        """The layer whose input quantizer this one uses: itself, or the one it shares with."""
        return self._input_owner[0] if self._input_owner else self

    @property
    def input_quantizer(self) -> FakeQuantizeBase:
        """The fake-quantizer of the input, of this layer or of the one it shares with."""
        found: FakeQuantizeBase = self.input_owner.input_fake_quant
        return found

    def quantized_input(self, input: Tensor, quantized: bool) -> Tensor:
        """Return the tensor the float operator runs on."""
        return input if quantized else self.input_quantizer(input)

    def source_of(self, input: Tensor) -> Source | None:
        """Return what a quantized ``input`` was made from, if backward will make it again."""
        weight = self._parameters.get(self.weight_names[0])
        if is_traced() or (weight is not None and not weight.requires_grad):
            return None
        quantizer = self.input_quantizer
        return quantizer.source_of(input) if isinstance(quantizer, ULQFakeQuantize) else None

    def quantized_weight(self, name: str = "weight") -> Tensor:
        """Return a fake-quantized weight, in the shape and dtype of the parameter ``name``."""
        fake_quant = getattr(self, self.weight_quantizers[name])
        quantized: Tensor = fake_quant(getattr(self, name))
        return quantized

    def weight_and_values(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and its fake-quantized values without a graph, whose gradient it gets.

        Without values the first is the fake-quantized weight itself; for eager only.
        """
        fake_quant = self.weight_fake_quant
        if type(fake_quant) is ARQFakeQuantize and fake_quant.is_plain:
            weight = self.weight
            return weight, fake_quant.values(weight)
        return self.quantized_weight(), None

    def weight_scale(self, name: str = "weight") -> Tensor:
        """Return today's scale of a weight: float32, one value or one for each output channel."""
        fake_quant = getattr(self, self.weight_quantizers[name])
        scale: Tensor = fake_quant.calculate_qparams(getattr(self, name).detach())[0]
        return scale

    @property
    def weight_bits(self) -> int:
        """Width of the codes of the weights."""
        first = next(iter(self.weight_quantizers.values()))
        return int(getattr(getattr(self, first), "num_bits", 8))

    def convert(
        self, input_quantize: Quantize, batch_norm: BatchNormAffine | None = None, name: str = ""
    ) -> QuantizedLayer:
        """Become the converted layer, staying the same object; the input quantizer stays as it is.

        Args:
            input_quantize: The frozen quantizer of the input.
            batch_norm: Arithmetic of the batch norm to fold.
            name: Name of the layer, for messages.

        Raises:
            ConvertError: For non-finite values, or a bias that does not fit into int32.
        """
        integer = self.integer_weight(input_quantize, batch_norm=batch_norm, name=name)
        return self.become_quantized({"": integer})

    def revert(self) -> nn.Module:
        """Become the float layer again, staying the same object."""
        for key, child in list(self._modules.items()):
            if isinstance(child, FakeQuantizeBase):
                del self._modules[key]
        for key in ("qconfig", "quantizes_input", "_input_owner"):
            delattr(self, key)
        return become(self, self.float_class)

    def integer_weight(
        self,
        input_quantize: Quantize,
        parameters: tuple[str, str] = ("weight", "bias"),
        batch_norm: BatchNormAffine | None = None,
        name: str = "",
    ) -> IntegerWeight:
        """Return the codes of one weight and its bias, whose names are ``parameters``."""
        return integer_weight(
            self,
            parameters=parameters,
            weight_scale=self.weight_scale(parameters[0]),
            num_bits=self.weight_bits,
            input_scale=input_quantize.scale,
            force_fp16=input_quantize.force_fp16,
            batch_norm=batch_norm,
            name=name,
        )

    def become_quantized(self, parts: Mapping[str, IntegerWeight]) -> QuantizedLayer:
        """Replace class, parameters and weight quantizers by those of the converted layer."""
        dtype = self._first_weight().dtype
        drop_reparametrization(self)
        for key in ("qconfig", *self.weight_quantizers.values()):
            delattr(self, key)
        converted = become(self, quantized_class_of(self.float_class))
        converted.adopt(parts, dtype)
        return converted

    def _first_weight(self) -> Tensor:
        weight: Tensor = getattr(self, self.weight_names[0])
        return weight

    def extra_repr(self) -> str:
        """Add to the float layer's text that the quantizer of the input stands elsewhere."""
        text = super().extra_repr()
        return f"{text}, shares the input quantizer of another layer" if self._input_owner else text
