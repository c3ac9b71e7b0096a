"""What the tests look at, run in a process of its own: ``python -m test.npu.scenario MODE FOLDER``.

``MODE`` is ``table``, own schemas under a stand-in package, or ``stub``, the true torch-npu. Prints
one line of JSON.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # before torch is imported

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amct_fx import (
    convert_amct,
    export_onnx,
    load_checkpoint,
    prepare_qat_amct,
    save_checkpoint,
    summarize,
)
from amct_fx.npu import NpuOptions, lowering_of, probe
from test.npu import kernels, stub

REGISTERED = Path(__file__).with_name("registered_operators.txt")
STAND_IN = """
import torch, types
from test.npu import kernels
kernels.define_schemas()
torch.npu = types.SimpleNamespace(is_available=lambda: False)
"""


class Branches(nn.Module):
    """Convolutions that can be lowered and such that cannot, with one input for three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.plain = nn.Conv2d(8, 6, 3, stride=2, padding=(1, 2), dilation=(1, 2), bias=False)
        self.grouped = nn.Conv2d(8, 6, 3, stride=2, padding=(1, 2), dilation=(1, 2), groups=2)
        self.same = nn.Conv2d(8, 4, 3, padding="same")
        self.uneven = nn.Conv2d(4, 4, 2, padding="same")
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.hardswish(self.norm(self.stem(x)))  # below 0, so asymmetric
        pooled = [self.plain(x), self.grouped(x), self.uneven(self.same(x))]
        features = [part.mean((2, 3)) for part in pooled]
        return self.head(torch.cat([features[0] + features[1], features[2]], 1))


class Island(nn.Module):
    """Cannot be traced: branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        return self.b(y if float(y.detach().sum()) >= 0 else -y)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
        x = self.rnn(scores @ x)[0]
        return self.out(self.conv(x.transpose(1, 2)).mean(2))


INT4 = "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }"
INT16 = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
SEVERAL = f"""
override_layer_configs {{ layer_name: "0" {INT4} }}
override_layer_configs {{ layer_name: "2" {INT16} }}
"""
MODELS: dict[str, tuple[Callable[[], nn.Module], str | None, tuple[int, ...]]] = {
    "branches": (Branches, None, (4, 3, 9, 9)),
    "island": (lambda: nn.Sequential(nn.Linear(4, 4), Island()), None, (5, 4)),
    "tokens": (Tokens, None, (2, 6, 8)),
    "bits": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)),
        SEVERAL,
        (3, 4),
    ),
    "one_sample": (lambda: nn.Sequential(nn.Linear(4, 6)), None, (4,)),
}


def prepared(name: str) -> tuple[nn.Module, Tensor]:
    """Return a calibrated model and an input, shifted so that ranges are not symmetric."""
    torch.manual_seed(0)
    build, cfg, shape = MODELS[name]
    model, x = prepare_qat_amct(build(), cfg), torch.rand(shape) * 3 - 0.5
    for _ in range(3):
        model(x)
        for fake_quant in model.modules():
            if hasattr(fake_quant, "set_clips"):  # IFMR ranges are symmetric, learned ones not
                fake_quant.set_clips(fake_quant.clip_max, fake_quant.clip_min * 0.3 - 0.01)
    return model.eval(), x


def error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((one.float() - other).abs().max() / other.abs().max())


@torch.no_grad()
def numbers(name: str, options: NpuOptions) -> dict[str, Any]:
    """Compare a lowered model with the converted one."""
    model, x = prepared(name)
    expected = convert_amct(model)(x)
    lowered = convert_amct(model, backend=options)
    output = lowered(x)
    assert output.dtype == expected.dtype
    reloaded = copy.deepcopy(lowered)
    reloaded.load_state_dict(convert_amct(model).state_dict())
    assert torch.equal(reloaded(x), output)
    return {
        "error": error(output, expected),
        "rows": [[r.name, r.operator, r.reason] for r in lowering_of(lowered).rows],
        "summary": {row.name: [row.state, row.reason] for row in summarize(lowered).rows},
        "text": str(lowering_of(lowered)),
    }


@torch.no_grad()
def other_uses(folder: Path) -> dict[str, str]:
    """Return what a file of the model and a second conversion say, and a checkpoint gives."""
    model, x = prepared("one_sample")
    lowered = convert_amct(model, backend="npu")
    save_checkpoint(lowered, folder / "model.pt")
    restored, _ = load_checkpoint(folder / "model.pt", MODELS["one_sample"][0]())
    return {
        "export": refusal(lambda: export_onnx(lowered, (x,), folder / "model.onnx")),
        "convert": refusal(lambda: convert_amct(lowered)),
        "restored": type(restored[0]).__module__,
    }


@torch.no_grad()
def forms() -> dict[str, float]:
    """Return the error of a lowered model that was compiled, pickled or cast."""
    model, x = prepared("branches")
    expected = convert_amct(model)(x)
    lowered = convert_amct(model, backend=NpuOptions(graph_mode=True))
    compiled = torch.compile(lowered, backend="eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    return {
        "compiled": error(compiled(x), expected),
        "pickled": error(pickle.loads(pickle.dumps(lowered))(x), expected),
        "bfloat16": error(copy.deepcopy(lowered).bfloat16()(x.bfloat16()).float(), expected),
    }


@torch.no_grad()
def asymmetry() -> dict[str, float]:
    """Return the error of a padded convolution as it is, and with each offset term left out."""
    torch.manual_seed(0)
    model = prepare_qat_amct(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)))
    x = torch.rand(2, 3, 8, 8) * 4 - 1
    model(x)
    model[0].input_fake_quant.set_clips(3.0, -1.0)
    expected = convert_amct(model)(x)
    lowered = convert_amct(model, backend=NpuOptions(graph_mode=True))
    bias = convert_amct(model)[0].bias_codes
    found = {"right": error(lowered(x), expected)}
    with kernels.replaced("npu_quant_conv2d", offset_x=0):
        found["no offset_x"] = error(lowered(x), expected)
    with kernels.replaced("npu_quant_conv2d", bias=bias):
        found["no bias term"] = error(lowered(x), expected)
    return found


def exported(name: str, options: NpuOptions) -> list[str]:
    """Return the npu operators of an exported model; fake tensors go through the Meta kernels."""
    model, x = prepared(name)
    lowered = convert_amct(model, backend=options)
    program = torch.export.export(lowered, (x,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("npu.")]


def rejections() -> dict[str, str]:
    """Return what the Meta kernels say about wrong calls, ``""`` for nothing."""
    codes = torch.empty(1, 3, 4, 4, dtype=torch.int8, device="meta")
    weight = torch.empty(2, 3, 3, 3, dtype=torch.int8, device="meta")
    packed = torch.empty(2, dtype=torch.int64, device="meta")
    bias = torch.empty(3, dtype=torch.int32, device="meta")
    conv, ones = torch.ops.npu.npu_quant_conv2d, [1, 1]
    tail = (ones, [0, 0], ones, 1, 0, "rint", torch.float16)
    calls: dict[str, Callable[[], Tensor]] = {
        "right": lambda: conv(codes, weight, packed, *tail),
        "float scale": lambda: conv(codes, weight, packed.float(), *tail),
        "one scale": lambda: conv(codes, weight, packed[:1], *tail),
        "short bias": lambda: torch.ops.npu.npu_quant_matmul(
            codes[0, 0], codes[0, 0], packed[:1], bias=bias, output_dtype=torch.float16
        ),
    }
    return {name: refusal(call) for name, call in calls.items()}


def refusal(call: Callable[[], object]) -> str:
    """Return the first line of the error of a call, ``""`` without one."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


class Recorder(TorchDispatchMode):
    """Collects the aten operators of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def operators_of_training() -> dict[str, list[str]]:
    """Return the operators of the calibration, and of steady training and evaluation.

    The steady steps run on the meta device: reading a value there is an error, and code that is
    only for a CPU or for CUDA does not run.
    """
    found: dict[str, set[str]] = {"calibration": set(), "steady": set()}
    for name in ("branches", "tokens"):
        build, _, shape = MODELS[name]
        for cfg in (None, "retrain_weight_quant_config { ulq_retrain { channel_wise: false } }"):
            model, x = prepare_qat_amct(build(), cfg), torch.rand(shape)
            with Recorder() as recorder:
                model(x)
            found["calibration"] |= recorder.names
            model, x = model.to("meta"), x.to("meta")
            with Recorder() as recorder:
                model(x).square().sum().backward()
                model.eval()(x)
            found["steady"] |= recorder.names
    return {stage: sorted(names) for stage, names in found.items()}


def without_kernel(names: list[str]) -> list[str]:
    """Return the operators that have no kernel for the device of torch-npu.

    Those of the first key are torch-npu's own; PyTorch composes the others of such.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return [name for name in names if not any(has(name, key) for key in keys)]


def main(mode: str, folder: Path) -> dict[str, Any]:
    """Run everything."""
    if mode == "stub":
        stub.import_torch_npu(folder)
    else:
        (folder / "torch_npu").mkdir()
        (folder / "torch_npu" / "__init__.py").write_text(STAND_IN)
        sys.path.insert(0, str(folder))
    state = probe()
    kernels.register_cpu_kernels()
    graph, eager = NpuOptions(graph_mode=True), NpuOptions()
    operators = operators_of_training()
    half = NpuOptions(output_dtype=torch.bfloat16)
    return {
        "state": state.state.name,
        "version": state.version,
        "graph": {name: numbers(name, graph) for name in MODELS},
        "eager": {name: numbers(name, eager) for name in ("branches", "tokens")},
        "bfloat16": numbers("island", half),
        "asymmetry": asymmetry(),
        "other uses": other_uses(folder),
        "forms": forms(),
        "exported": {name: exported(name, graph) for name in ("branches", "bits")},
        "exported_eager": exported("bits", eager),
        "rejections": rejections(),
        "operators": operators,
        "missing": without_kernel(REGISTERED.read_text().split()) if mode == "stub" else [],
        "schemas": {
            name: str(getattr(torch.ops.npu, name).default._schema) for name in kernels._KERNELS
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
