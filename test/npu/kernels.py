"""The operators of torch-npu that lowered models call: their schemas, and arithmetic for the CPU.

The schemas are those of torch-npu 2.13. A process that defines them must never import torch-npu
afterwards. Source: spec/deploy.md sections 8.2 and 8.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amct_fx.npu import pack_scale, unpack_scale

__all__ = ["SCHEMAS", "define_schemas", "register_cpu_kernels", "replaced"]

SCHEMAS = (
    "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
    "bool div_mode=True) -> Tensor",
    "npu_quant_conv2d(Tensor input, Tensor weight, Tensor scale, int[2] strides=1, "
    "int[2] pads=0, int[2] dilations=1, int groups=1, int offset_x=0, str round_mode='rint', "
    "int? output_dtype=None, Tensor? bias=None, Tensor? offset=None, int? input_dtype=None, "
    "int? weight_dtype=None) -> Tensor",
    "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
    "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
    "int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
    "npu_trans_quant_param(Tensor scale, Tensor? offset=None, int? round_mode=0) -> Tensor",
)
_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_CALLED: dict[str, Callable[..., Tensor]] = {}


def define_schemas() -> None:
    """Define the schemas and kernels for shapes, as an import of torch-npu does."""
    library = torch.library.Library("npu", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    for name, kernel in _SHAPES.items():
        library.impl(name, kernel, "Meta")
    _LIBRARIES.append(library)


def register_cpu_kernels() -> None:
    """Let the operators run on the CPU."""
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in _KERNELS.items():
        _CALLED[name] = kernel
        library.impl(name, _caller(name), "CPU")
    _LIBRARIES.append(library)


@contextmanager
def replaced(name: str, **arguments: Any) -> Iterator[None]:
    """Overrule arguments of every call, to see what they are for."""
    kernel = _CALLED[name]
    names = list(torch._C.parse_schema(f"npu::{_schema_of(name)}").arguments)

    def call(*args: Any, **kwargs: Any) -> Tensor:
        bound = {a.name: value for a, value in zip(names, args, strict=False)} | kwargs
        return kernel(**(bound | arguments))

    _CALLED[name] = call
    try:
        yield
    finally:
        _CALLED[name] = kernel


_LIBRARIES: list[Any] = []


def _caller(name: str) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: _CALLED[name](*args, **kwargs)


def _schema_of(name: str) -> str:
    return next(schema for schema in SCHEMAS if schema.startswith(f"{name}("))


def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    assert (dtype, axis, scales.numel()) == (12, -1, 1)
    assert scales.dtype == input.dtype
    assert zero_points is not None
    assert zero_points.dtype == scales.dtype
    values = input / scales if div_mode else input * scales
    return torch.round(values + zero_points).clamp(-128, 127).to(torch.int8)


def npu_quant_conv2d(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    strides: Any = 1,
    pads: Any = 0,
    dilations: Any = 1,
    groups: int = 1,
    offset_x: int = 0,
    round_mode: str = "rint",
    output_dtype: int | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    input_dtype: int | None = None,
    weight_dtype: int | None = None,
) -> Tensor:
    assert (input.dtype, weight.dtype, scale.dtype) == (torch.int8, torch.int8, torch.int64)
    assert (groups, output_dtype, offset, round_mode) == (1, 5, None, "rint")
    padded = F.pad(input.double(), (pads[1], pads[1], pads[0], pads[0]), value=offset_x)
    sums = F.conv2d(padded, weight.double(), None, strides, 0, dilations)
    return _scaled(sums, bias, unpack_scale(scale), (1, -1, 1, 1)).to(torch.float16)


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    assert (x1.dtype, x2.dtype) == (torch.int8, torch.int8)
    assert set(others.values()) <= {None}
    assert output_dtype is not None
    if scale.dtype == torch.int64:
        assert output_dtype == 5
        scale = unpack_scale(scale)
    return _scaled(x1.double() @ x2.double(), bias, scale, (-1,)).to(_DTYPES[output_dtype])


def npu_trans_quant_param(
    scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0
) -> Tensor:
    assert offset is None
    return pack_scale(scale, rounded=bool(round_mode))


def _scaled(sums: Tensor, bias: Tensor | None, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add an int32 bias to the sums and scale them."""
    if bias is not None:
        assert bias.dtype == torch.int32
        sums = sums + bias.double().reshape(shape)
    assert float(sums.abs().max()) < 2**31
    return sums * scale.double().reshape(shape)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "npu_quantize": npu_quantize,
    "npu_quant_conv2d": npu_quant_conv2d,
    "npu_quant_matmul": npu_quant_matmul,
    "npu_trans_quant_param": npu_trans_quant_param,
}


def _conv_shape(input: Tensor, weight: Tensor, scale: Tensor, *args: Any) -> Tensor:
    torch._check(scale.dtype == torch.int64, lambda: "scale.dtype should be torch.int64")
    torch._check(len(scale) == len(weight), lambda: "scale shape should equal to cout")
    strides, pads, dilations = args[:3]
    empty = torch.empty(input.shape, device="meta"), torch.empty(weight.shape, device="meta")
    return F.conv2d(*empty, None, strides, pads, dilations).to(torch.float16)


def _matmul_shape(x1: Tensor, x2: Tensor, scale: Tensor, **kwargs: Any) -> Tensor:
    bias = kwargs.get("bias")
    torch._check(bias is None or len(bias) == x2.shape[-1], lambda: "wrong bias shape")
    return x1.new_empty((*x1.shape[:-1], x2.shape[-1]), dtype=_DTYPES[kwargs["output_dtype"]])


_SHAPES: dict[str, Callable[..., Tensor]] = {
    "npu_quantize": lambda input, *args, **kwargs: input.new_empty(input.shape, dtype=torch.int8),
    "npu_quant_conv2d": _conv_shape,
    "npu_quant_matmul": _matmul_shape,
}
