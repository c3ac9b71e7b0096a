"""How fast is the exported file in onnxruntime, next to the float one?

    python benchmarks/onnxruntime_latency.py
    python benchmarks/onnxruntime_latency.py --networks chain resnet50 --threads 1

For each network: the float file, ``qdq`` (AMCT's arithmetic), the same with the weights of unfused
layers folded, and ``qdq_full``. All run in turn in one process; the ratios are of the time of the
processor, which other programs hardly change. ``fused`` counts the convolutions and products that
onnxruntime runs in integer kernels, of all there are.
"""

from __future__ import annotations

import collections
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from harness import interleaved, parser, report, start
from networks import Chain, resnet50
from torch import Tensor, nn
from vision import encoder, mobilenet_v2, resnet18

from amct_fx import convert_amct, export_onnx, prepare_qat_amct

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "chain": (lambda: Chain(8, 64), (8, 3, 64, 64), 9),
    "resnet18": (resnet18, (1, 3, 224, 224), 21),
    "resnet50": (resnet50, (1, 3, 224, 224), 54),
    "mobilenet_v2": (mobilenet_v2, (1, 3, 224, 224), 53),
    "encoder": (encoder, (1, 128, 384), 36),
}
"""By name: the network, the shape of its input, and how many layers are quantized."""

TARGETS = {
    ("chain", "qdq_full"): 0.40,
    ("resnet50", "qdq_full"): 0.40,
    ("chain", "qdq, folded"): 0.55,
    ("resnet18", "qdq, folded"): 0.95,
    ("resnet50", "qdq, folded"): 0.95,
}
"""Largest ratio that is wanted."""

INTEGER = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger")
FLOAT = ("Conv", "FusedConv", "Gemm", "MatMul", "FusedGemm", "FusedMatMul")


def files(build: Callable[[], nn.Module], x: Tensor, folder: Path) -> dict[str, Path]:
    """Write the files of one network; the weights do not matter for the time."""
    model = build().eval()
    settle_batch_norms(model, x)
    prepared = prepare_qat_amct(model, fixed_min_rule="nonnegative")
    prepared(x)
    converted = convert_amct(prepared)
    paths = {name: folder / f"{i}.onnx" for i, name in enumerate(("float", *VARIANTS))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(paths["float"]), dynamo=False, opset_version=18)
    for name, options in VARIANTS.items():
        data = {"calibration_data": [x]} if options["format"] == "qdq_full" else {}
        export_onnx(converted, x, paths[name], exporter="torchscript", **options, **data)
    return paths


VARIANTS: dict[str, dict[str, Any]] = {
    "qdq": {"format": "qdq"},
    "qdq, folded": {"format": "qdq", "fold_unfused_weights": True},
    "qdq_full": {"format": "qdq_full"},
}


@torch.no_grad()
def settle_batch_norms(model: nn.Module, x: Tensor) -> None:
    """Give batch norms the statistics of a random network, so that values stay in range."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
            module.train()
    model(torch.cat([x, x.flip(-1)]))
    model.eval()


def session(path: Path, threads: int) -> tuple[onnxruntime.InferenceSession, str]:
    """Return a session, and how many of its layers run on integers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    constants = {item.name for item in graph.initializer}
    kinds = collections.Counter(
        node.op_type
        for node in graph.node
        if node.op_type in INTEGER or (node.op_type in FLOAT and _is_layer(node, constants))
    )
    integer = sum(count for kind, count in kinds.items() if kind in INTEGER)
    return made, f"{integer}/{sum(kinds.values())}"


def runner(made: onnxruntime.InferenceSession, x: Tensor) -> Callable[[], Any]:
    """Return what runs a session once."""
    feeds = {made.get_inputs()[0].name: x.numpy()}
    return lambda: made.run(None, feeds)


def _is_layer(node: onnx.NodeProto, constants: set[str]) -> bool:
    """Say whether a float operator has weights; the products of attention have none."""
    return "MatMul" not in node.op_type or node.input[1] in constants


def main() -> None:
    """Measure and print the table."""
    arguments = parser(__doc__ or "", repetitions=15)
    arguments.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = arguments.parse_args()
    device = start(options)
    rows, details = [], {}
    for name in options.networks:
        build, shape, layers = NETWORKS[name]
        x = torch.randn(*shape)
        with tempfile.TemporaryDirectory() as folder:
            sessions = {
                variant: session(path, options.threads)
                for variant, path in files(build, x, Path(folder)).items()
            }
            runs = {variant: runner(made, x) for variant, (made, _) in sessions.items()}
            timings = interleaved(runs, device, repetitions=options.repetitions, warmup=1)
        base = timings["float"].cpu_median
        for variant, timing in timings.items():
            ratio = timing.cpu_median / base
            rows.append(
                {
                    "network": name,
                    "file": variant,
                    "CPU ms": timing.cpu_median * 1e3,
                    "of float": ratio,
                    "wanted": TARGETS.get((name, variant)),
                    "fused": sessions[variant][1] if variant != "float" else f"0/{layers}",
                }
            )
            details[f"{name}, {variant}"] = timing.as_json()
    facts = {"onnxruntime": onnxruntime.__version__}
    report("Files in onnxruntime", rows, options, {**facts, **details})


if __name__ == "__main__":
    main()
