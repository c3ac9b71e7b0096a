"""The four states of torch-npu, and what a conversion says in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.errors import AmctError
from amct_fx.nn.precision import truncate_to_19_bits
from amct_fx.npu import NpuOptions, NpuState, Probe, lowering_of, pack_scale, unpack_scale
from amct_fx.npu.layers import accumulator_bias, convolution_padding
from amct_fx.npu.rules import why_not

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
import torch
from torch import nn
from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.npu import probe

model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
model(torch.rand(3, 4))
try:
    said = type(convert_amct(model, backend="npu")[0]).__name__
except RuntimeError as error:
    said = f"{type(error).__name__}: {error}"
found = probe()
assert probe() is found
left = [name for name in sys.modules if name.startswith("torch_npu")]
print(json.dumps([found.state.name, str(found), said, left, os.environ.get(VARIABLE)]))
"""
VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NPU = "import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: {}, {})\n"
OPERATORS = "from test.npu.kernels import define_schemas\ndefine_schemas()\n"


def run(folder: Path, package: str | None) -> Any:
    """Convert with a package ``torch_npu`` of this content, or without one."""
    if package is not None:
        (folder / "torch_npu").mkdir()
        (folder / "torch_npu" / "__init__.py").write_text(textwrap.dedent(package))
        (folder / "torch_npu" / "part.py").write_text("")
        (folder / "torch_npu-2.13.0.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n"
        (folder / "torch_npu-2.13.0.dist-info" / "METADATA").write_text(metadata)
    path = os.pathsep.join([str(folder), str(ROOT)])
    script = SCRIPT.replace("VARIABLE", repr(VARIABLE))
    environment = {k: v for k, v in os.environ.items() if k != "AMCT_FX_TORCH_NPU"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"PYTHONPATH": path, VARIABLE: "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_not_installed(tmp_path: Path) -> None:
    state, text, said, left, _ = run(tmp_path, None)
    assert (state, text, left) == ("NOT_INSTALLED", "torch-npu: not installed", [])
    assert said.startswith("BackendError: torch-npu is not installed; pip install 'amct-fx[npu]'")


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_a_failed_import_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    package = f"""
        import os
        os.environ["{VARIABLE}"] = "1"
        import torch_npu.part
        raise {kind}("libhccl.so: cannot open shared object file")
    """
    state, text, said, left, autoload = run(tmp_path, package)
    assert state == "UNUSABLE"
    assert text == (
        "torch-npu 2.13.0: installed, cannot be imported "
        "(libhccl.so: cannot open shared object file)"
    )
    assert "libhccl.so: cannot open shared object file" in said
    assert "set_env.sh" in said
    assert VARIABLE in said
    assert (left, autoload) == ([], "0")


def test_no_device(tmp_path: Path) -> None:
    state, text, said, _, _ = run(tmp_path, OPERATORS + NPU.format(False, ""))
    assert (state, said) == ("NO_DEVICE", "NpuLinear")
    assert text == "torch-npu 2.13.0: importable, no device"


def test_a_device(tmp_path: Path) -> None:
    package = OPERATORS + NPU.format(True, "get_device_name=lambda i: 'Ascend910B2'")
    state, text, said, _, _ = run(tmp_path, package)
    assert (state, said) == ("USABLE", "NpuLinear")
    assert text == "torch-npu 2.13.0: usable (Ascend910B2)"


def test_an_old_torch_npu_without_the_operators_leaves_the_layer(tmp_path: Path) -> None:
    _, _, said, _, _ = run(tmp_path, NPU.format(False, ""))
    assert said == "Linear"


def converted(module: nn.Module, shape: tuple[int, ...]) -> Any:
    model = prepare_qat_amct(nn.Sequential(module))
    model(torch.rand(shape))
    return convert_amct(model)[0]


@pytest.fixture
def everything_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amct_fx.npu.rules.has_arguments", lambda *_names: True)


DEVICE = Probe(NpuState.USABLE, "2.13.0", device_name="Ascend910B2")
NEW_DEVICE = Probe(NpuState.USABLE, "2.13.0", device_name="Ascend950PR")
GRAPH = NpuOptions(graph_mode=True)


@pytest.mark.usefixtures("everything_there")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(2, 2, 1), None),
        (nn.Conv2d(2, 2, (1, 255), padding=(0, 127)), None),
        (nn.Conv2d(2, 2, (1, 256), padding=(0, 127)), r"kernel_size \(1, 256\) is outside of 1"),
        (nn.Conv2d(2, 2, 1, stride=64), r"stride \(64, 64\) is outside of 1 … 63"),
        (nn.Conv2d(2, 2, 1, padding=256), r"padding \(256, 256\) is outside of 0 … 255"),
        (nn.Conv2d(2, 2, 1, dilation=256), r"dilation \(256, 256\) is outside of 1 … 255"),
        (nn.Conv2d(2, 2, 1, groups=2), "it has 2 groups"),
        (nn.ConvTranspose2d(2, 2, 1), "not for ConvTranspose2d"),
    ],
)
def test_the_limits_of_convolutions(layer: nn.Module, reason: str | None) -> None:
    found = why_not(converted(layer, (1, 2, 4, 260)), GRAPH, DEVICE)
    assert found is None if reason is None else found is not None
    if reason is not None:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


@pytest.mark.usefixtures("everything_there")
def test_only_new_devices_run_a_convolution_outside_of_a_graph() -> None:
    layer = converted(nn.Conv2d(2, 2, 1), (1, 2, 4, 4))
    assert "static graph" in str(why_not(layer, NpuOptions(), DEVICE))
    assert why_not(layer, NpuOptions(), NEW_DEVICE) is None


@pytest.mark.usefixtures("everything_there")
def test_long_axes_of_a_matmul_are_refused() -> None:
    layer = converted(nn.Linear(65536, 1, bias=False), (1, 65536))
    assert "65536 features" in str(why_not(layer, GRAPH, DEVICE))
    assert why_not(converted(nn.Linear(65535, 1), (1, 65535)), GRAPH, DEVICE) is None


@pytest.mark.usefixtures("everything_there")
def test_a_bias_that_leaves_int32_is_refused() -> None:
    layer = converted(nn.Linear(4, 2), (3, 4))
    layer.bias_codes.fill_(2**31 - 1)
    layer.weight_codes.fill_(-127)
    layer.input_quantize.zero_point.fill_(5)
    layer.input_quantize._remember_numbers()
    with pytest.raises(OverflowError):
        accumulator_bias(layer)
    assert "exceed int32" in str(why_not(layer, GRAPH, DEVICE))


def test_the_bias_takes_the_zero_point_off() -> None:
    layer = converted(nn.Linear(4, 2, bias=False), (3, 4))
    assert accumulator_bias(layer) is None
    layer.input_quantize.zero_point.fill_(-7)
    layer.input_quantize._remember_numbers()
    expected = 7 * layer.weight_codes.sum(1, dtype=torch.int32)
    assert torch.equal(accumulator_bias(layer), expected.to(torch.int32))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"padding": "valid"}, (0, 0)),
        ({"padding": "same"}, (1, 2)),
        ({"padding": (3, 4)}, (3, 4)),
        ({"padding": 2}, (2, 2)),
    ],
)
def test_padding_in_numbers(arguments: dict[str, Any], expected: tuple[int, int]) -> None:
    assert convolution_padding(nn.Conv2d(2, 2, (3, 5), **arguments)) == expected


def test_packed_scales_are_those_of_the_specification() -> None:
    scales = torch.tensor([0.01, 1.0])
    assert pack_scale(scales, rounded=False).tolist() == [70369753153536, 70369809530880]
    assert pack_scale(torch.tensor([1.0])).tolist() == [70369809530880]
    torch.manual_seed(0)
    scales = torch.rand(1000) * 10 ** -torch.randint(0, 6, (1000,)).float()
    assert torch.equal(unpack_scale(pack_scale(scales, rounded=False)), truncate_to_19_bits(scales))
    rounded = unpack_scale(pack_scale(scales))
    assert ((rounded - scales).abs() <= 2**-11 * scales).all()
    assert torch.equal(pack_scale(rounded), pack_scale(scales))
    assert pack_scale(torch.tensor([1.0]), offset=-1).item() == 70369809530880 | 511 << 37


@pytest.mark.parametrize("backend", ["gpu", "NPU", 3, NpuOptions])
def test_an_unknown_backend_is_an_error(backend: Any) -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
    model(torch.rand(3, 4))
    with pytest.raises(ValueError, match=r"backend must be None, 'npu' or") as caught:
        convert_amct(model, backend=backend)
    assert isinstance(caught.value, AmctError)
    with pytest.raises(ValueError, match="output_dtype must be"):
        NpuOptions(output_dtype=torch.float32)


def test_a_converted_model_was_not_lowered() -> None:
    assert lowering_of(nn.Linear(2, 2)) is None
