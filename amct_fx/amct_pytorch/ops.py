"""Single operators with quantization-aware training, for models that are written with them.

Each class is its ``torch.nn`` namesake with a fake-quantized input and weight: no configuration
file, no tracing. Parameters are never overwritten by their fake-quantized values, and a model that
holds such layers converts and exports as a prepared one does. Source: spec/deploy.md section 11.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig

from amct_fx.amct_pytorch._operator_config import OperatorConfig, operator_config
from amct_fx.errors import ArgumentError, InputDataError, LayerTypeError, ModelError
from amct_fx.nn import qat
from amct_fx.nn.become import become, float_class_of, shared_as
from amct_fx.nn.geometry import weight_geometry
from amct_fx.nn.matmul import QATMatMul
from amct_fx.nn.recurrent import unsupported_form
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, ULQWeightFakeQuantize

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "GRUQAT",
    "LSTMQAT",
    "Conv1dQAT",
    "Conv2dQAT",
    "Conv3dQAT",
    "ConvTranspose1dQAT",
    "ConvTranspose2dQAT",
    "LinearQAT",
    "MatMulQAT",
]

Config = Mapping[str, Any] | None


class _Operator(qat.QATLayer):
    """What the single operators with a weight share.

    Attributes:
        config: The configuration in force.
    """

    channel_wise: ClassVar[bool] = True
    config: OperatorConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the arguments of the float layer, and ``config`` behind them."""
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "float_class"):
            return
        own = inspect.signature(cls.float_class)
        parameters = list(own.parameters.values())
        config = inspect.Parameter(
            "config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="Config"
        )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            config = config.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.insert(-1, config)
        else:
            parameters.append(config)
        cls.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signature: inspect.Signature = type(self).__signature__  # type: ignore[attr-defined]
        bound = signature.bind(*args, **kwargs)
        config = bound.arguments.pop("config", None)
        super().__init__(*bound.args, **bound.kwargs)
        self._configure(config)

    @classmethod
    def from_float(cls, mod: nn.Module, config: Config = None) -> Self:  # type: ignore[override]
        """Return an operator that shares the parameters of a float layer.

        Args:
            mod: A layer of exactly the class that this one stands for; it is not changed.
            config: The configuration dict; it is not changed.

        Raises:
            ConfigError: The configuration is wrong; names the key.
            LayerTypeError: ``mod`` is of another class.

        Example:
            >>> layer = Conv2dQAT.from_float(nn.Conv2d(3, 8, 3))
            >>> layer(torch.randn(1, 3, 5, 5)).shape
            torch.Size([1, 8, 3, 3])
        """
        if float_class_of(mod) is not cls.float_class:
            expected, found = cls.float_class.__name__, type(mod).__name__
            message = f"{cls.__name__}.from_float takes a torch.nn.{expected}, not a {found}"
            raise LayerTypeError(message)
        layer = shared_as(mod, cls)
        layer._configure(config)
        return layer

    def _configure(self, config: Config) -> None:
        """Read the configuration and make the quantizers."""
        self.config = operator_config(config, channel_wise=self.channel_wise)
        self._check_form()
        self.quantizes_input, self._input_owner = True, ()
        if self.config.enabled:
            qconfig = self._qconfig()
            self.attach(qconfig)
            self.own_input_fake_quant(qconfig.activation)
            self.quantizes_input = True

    def _check_form(self) -> None:
        """Refuse what integer hardware cannot do."""
        padding = getattr(self, "padding_mode", "zeros")
        if padding != "zeros" and self.config.enabled:
            message = f"padding_mode {padding!r}: only zero padding equals the zero point; use it"
            raise ArgumentError(message)

    def _qconfig(self) -> QConfig:
        config = self.config
        cls = ULQWeightFakeQuantize if config.learned_weight_scale else ARQFakeQuantize
        geometry = weight_geometry(self).as_arguments(per_channel=config.channel_wise)
        return QConfig(activation=_activation(config), weight=cls.with_args(**geometry))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on the fake-quantized input and weight."""
        if not self.config.enabled:
            return super(qat.QATLayer, self).forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def revert(self) -> nn.Module:
        """Become the float layer again, staying the same object."""
        if self.config.enabled:
            return super().revert()
        return become(self, self.float_class)

    @property
    def stays_float(self) -> bool:
        """Whether the configuration switches the quantization off."""
        return not self.config.enabled

    def _deploy_state(self) -> dict[str, Tensor]:
        """Return what AMCT's operators hold beside their parameters, by AMCT's names."""
        if not self.config.enabled:
            return {}
        scale, offset = self.input_fake_quant.calculate_qparams()
        weights = torch.cat([self.weight_scale(name).detach() for name in self.weight_names])
        dtype = torch.int16 if self.config.num_bits == 16 else torch.int8
        return {
            "acts_scale": scale.detach(),
            "acts_offset_deploy": offset.to(dtype),
            "wts_scales": weights,
            "wts_offsets_deploy": torch.zeros_like(weights, dtype=torch.int8),
            "cur_batch": torch.tensor(self.input_fake_quant._batches_seen),
        }

    def __getattr__(self, name: str) -> Any:
        """Give the values of the moment under the names of AMCT."""
        if name in _DEPLOY_NAMES and "config" in self.__dict__ and self.config.enabled:
            return self._deploy_state()[name]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._deploy_state().items():
            destination[prefix + name] = value

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the quantizers; what is computed from them is passed over."""
        for name in _DEPLOY_NAMES:
            state.pop(prefix + name, None)
        super()._load_from_state_dict(state, prefix, *args)


_DEPLOY_NAMES = (
    "acts_scale",
    "acts_offset_deploy",
    "wts_scales",
    "wts_offsets_deploy",
    "cur_batch",
)


class _Convolution(_Operator):
    """A convolution, which needs a batch axis."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Convolve the fake-quantized input ``[N, C_in, *]`` with the fake-quantized weight."""
        input = args[0] if args else kwargs.get("input")
        if self.config.enabled and isinstance(input, Tensor) and input.dim() != self.weight.dim():
            message = (
                f"{type(self).__name__} needs an input with {self.weight.dim()} axes, batch first, "
                f"not {input.dim()}"
            )
            raise InputDataError(message)
        return super().forward(*args, **kwargs)


class Conv1dQAT(_Convolution, qat.Conv1d):
    """``torch.nn.Conv1d`` with quantization-aware training.

    Args:
        *args: As for ``torch.nn.Conv1d``.
        **kwargs: As for ``torch.nn.Conv1d``, and ``config``, a configuration dict.
    """


class Conv2dQAT(_Convolution, qat.Conv2d):
    """``torch.nn.Conv2d`` with quantization-aware training.

    Args:
        *args: As for ``torch.nn.Conv2d``.
        **kwargs: As for ``torch.nn.Conv2d``, and ``config``, a configuration dict.

    Example:
        >>> config = {"retrain_data_config": {"clip_max": 2.0, "clip_min": -2.0}}
        >>> layer = Conv2dQAT(3, 8, 3, bias=False, config=config)
        >>> layer(torch.ones(1, 3, 4, 4)).shape, layer.acts_scale
        (torch.Size([1, 8, 2, 2]), tensor([0.0157]))
    """


class Conv3dQAT(_Convolution, qat.Conv3d):
    """``torch.nn.Conv3d`` with quantization-aware training.

    Args:
        *args: As for ``torch.nn.Conv3d``.
        **kwargs: As for ``torch.nn.Conv3d``, and ``config``, a configuration dict.
    """

    def _check_form(self) -> None:
        layer: Any = self
        if layer.padding_mode != "zeros" or layer.dilation[0] != 1:
            message = (
                f"Conv3dQAT takes padding_mode 'zeros' and a dilation of 1 along depth, not "
                f"{layer.padding_mode!r} and {layer.dilation[0]}"
            )
            raise ArgumentError(message)


class ConvTranspose1dQAT(_Convolution, qat.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` with quantization-aware training.

    Args:
        *args: As for ``torch.nn.ConvTranspose1d``.
        **kwargs: As for ``torch.nn.ConvTranspose1d``, and ``config``, a configuration dict.
    """


class ConvTranspose2dQAT(_Convolution, qat.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` with quantization-aware training.

    Args:
        *args: As for ``torch.nn.ConvTranspose2d``.
        **kwargs: As for ``torch.nn.ConvTranspose2d``, and ``config``, a configuration dict.
    """


class LinearQAT(_Operator, qat.Linear):
    """``torch.nn.Linear`` with quantization-aware training; one weight scale.

    Args:
        *args: As for ``torch.nn.Linear``.
        **kwargs: As for ``torch.nn.Linear``, and ``config``, a configuration dict.
    """

    channel_wise = False


class _Recurrent(_Operator):
    """An LSTM or GRU, of which one layer and direction can be quantized."""

    def _check_form(self) -> None:
        layer: Any = self
        reason = unsupported_form(layer)
        if self.config.enabled and reason is not None:
            message = f"{type(self).__name__}: {reason}"
            raise ModelError(message)


class LSTMQAT(_Recurrent, qat.LSTM):  # type: ignore[misc]  # from_float takes a dict
    """``torch.nn.LSTM`` of one layer and direction with quantization-aware training.

    Args:
        *args: As for ``torch.nn.LSTM``.
        **kwargs: As for ``torch.nn.LSTM``, and ``config``, a configuration dict.
    """


class GRUQAT(_Recurrent, qat.GRU):  # type: ignore[misc]  # from_float takes a dict
    """``torch.nn.GRU`` of one layer and direction with quantization-aware training.

    Args:
        *args: As for ``torch.nn.GRU``.
        **kwargs: As for ``torch.nn.GRU``, and ``config``, a configuration dict.
    """


class MatMulQAT(QATMatMul):
    """``torch.matmul`` of two tensors, both fake-quantized to symmetric INT8.

    Args:
        config: A configuration dict with ``retrain_enable`` and ``retrain_data_config``, which
            holds for both inputs; it is not changed.

    Raises:
        ConfigError: The configuration is wrong; names the key.

    Example:
        >>> matmul = MatMulQAT()
        >>> matmul(torch.randn(2, 3, 4), torch.randn(2, 4, 5)).shape
        torch.Size([2, 3, 5])
    """

    def __init__(self, config: Config = None) -> None:
        super().__init__()
        self.config = operator_config(
            config, data_types=("INT8",), has_weight=False, asymmetric=False
        )
        if not self.config.symmetric:
            message = "config['retrain_data_config']['asymmetric'] must be False for MatMulQAT"
            raise ArgumentError(message)
        if self.config.enabled:
            self.input_fake_quant = _activation(self.config)()
            self.other_fake_quant = _activation(self.config)()

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Multiply ``input`` ``[..., M, K]`` with ``other`` ``[..., K, N]``.

        Raises:
            InputDataError: A tensor has fewer than two or more than six axes.
        """
        for tensor in (input, other):
            if not 2 <= tensor.dim() <= 6:
                message = f"MatMulQAT takes tensors with 2 to 6 axes, not {tensor.dim()}"
                raise InputDataError(message)
        return super().forward(input, other) if self.config.enabled else torch.matmul(input, other)


def _activation(config: OperatorConfig) -> Any:
    """Return the constructor of the fake-quantizer of an input."""
    return ULQFakeQuantize.with_args(
        num_bits=config.num_bits,
        fixed_min=config.fixed_min,
        clip_max=config.clip_max,
        clip_min=config.clip_min,
        batch_num=config.batch_num,
        symmetric=config.symmetric,
    )
