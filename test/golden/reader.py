"""Typed access to the golden numbers.

The files were recorded by running AMCT's public PyTorch tool on inputs and networks of our own; see
``README.md`` beside this module. Everything is float32 unless a case says otherwise.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import networks

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HERE = Path(__file__).parent
_FILES = {
    "a_ulq_act": "a_ulq_act/ulq_act",
    "b_ifmr": "b_ifmr/ifmr",
    "c_arq": "c_arq/arq",
    "d_wts_ulq": "d_wts_ulq/wts_ulq",
    "d_wts_ulq_func": "d_wts_ulq/wts_ulq_func",
    "e_m4n2": "e_m4n2/m4n2",
    "f_bcp_func": "f_bcp/bcp_func",
    "f_selective": "f_bcp/selective",
}

RUNS = (
    "tiny_default",
    "tiny_per_tensor",
    "tiny_ulq_arq_cfg",
    "tiny_clip6",
    "residual_default",
    "depthwise_default",
    "mlp_default",
    "compressed_m4n2_quant",
)
"""Names of the recorded training runs."""

GRAPH_RUNS = (*RUNS, "sharedinput_default", "deconv_default", "tiny_int16_act")
"""Names of the runs whose exported graphs are recorded; the last three have no losses to meet."""


@dataclass(frozen=True)
class Case:
    """One golden case: fields from the JSON file, arrays from the NPZ file.

    Example:
        >>> case = load_cases("a_ulq_act")[0]
        >>> case["num_bits"], case.tensor("x").shape
        (8, torch.Size([5, 1]))
    """

    key: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return a field of the JSON file."""
        return self.fields[name]

    def __str__(self) -> str:
        """Return a test id."""
        name = self.fields.get("name") or self.fields.get("layer") or self.fields["module_type"]
        return f"{self.key}-{name}"

    def tensor(self, name: str) -> torch.Tensor:
        """Return an array as a fresh tensor."""
        return torch.from_numpy(self.arrays[name].copy())


@functools.cache
def load_cases(folder: str) -> tuple[Case, ...]:
    """Return all cases of a folder, also those where AMCT raised (``case["error"]``).

    Args:
        folder: ``a_ulq_act``, ``b_ifmr``, ``c_arq``, ``d_wts_ulq``, ``d_wts_ulq_func``, ``e_m4n2``,
            ``f_bcp_func`` or ``f_selective``.

    Example:
        >>> len(load_cases("c_arq"))
        149
    """
    path = _HERE / _FILES[folder]
    cases: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text("utf-8"))
    arrays: dict[str, dict[str, NDArray[Any]]] = {}
    with np.load(path.with_suffix(".npz")) as archive:
        for full_name in archive.files:
            key, _, name = full_name.partition("_")
            arrays.setdefault(key, {})[name] = archive[full_name]
    return tuple(Case(case["key"], case, arrays.get(case["key"], {})) for case in cases)


def ifmr_batches(case: Case) -> list[torch.Tensor]:
    """Return the calibration batches of a ``b_ifmr`` case, recipe inputs included.

    Example:
        >>> [batch.shape for batch in ifmr_batches(load_cases("b_ifmr")[0])]
        [torch.Size([4, 3, 6, 6]), torch.Size([4, 3, 6, 6])]
    """
    count = case["batch_num"]
    if not case.fields.get("input_recipe"):
        return [case.tensor(f"in{i}") for i in range(count)]
    size = case["numel_total"] // count
    return [recipe_input(case["name"], size, 1000 * (i + 1)) for i in range(count)]


def recipe_input(kind: str, size: int, salt: int) -> torch.Tensor:
    """Return one of the large inputs that are stored as a recipe.

    Example:
        >>> recipe_input("hash_uniform", 3, 1000).tolist()
        [0.6885288953781128, -0.9875228404998779, 0.8796217441558838]
    """
    u = [_hash_uniform(size, salt + 97 * k) for k in range(4)]
    if kind == "hash_uniform":
        return torch.from_numpy(u[0])
    total = (u[0] + u[1]) + (u[2] + u[3])
    if kind.endswith("_relu"):
        total = np.maximum(total, np.float32(0))
    elif kind.endswith("_outlier"):
        total[size // 2] = 50
    elif kind.endswith("_cubed"):
        total = total * total * total
    return torch.from_numpy(total)


def _hash_uniform(size: int, salt: int) -> NDArray[np.float32]:
    """Return uniform float32 numbers in [-1, 1) from an integer hash."""
    mask = np.uint64(0xFFFFFFFF)
    h = np.arange(size, dtype=np.uint64) + np.uint64(salt * 1000003)
    for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
        h = (h & mask) * np.uint64(factor) & mask
        h ^= h >> np.uint64(shift)
    return (h >> np.uint64(8)).astype(np.float32) / np.float32(2**23) - np.float32(1)


@dataclass(frozen=True)
class Run:
    """A recorded training run.

    Attributes:
        name: Name of the run.
        cfg: Configuration text, ``None`` for the defaults.
        config: AMCT's resolved configuration, layer by layer.
        lr: Learning rate of plain SGD.
        steps: Per step the loss and, per layer, clips (after backward, before the optimizer step),
            their gradients, scale and offset.
        final: Clips per layer after the last step.
        eval: Scales and offsets per layer at conversion.
        start: State dict to start from.
        inputs: ``[steps, batch, …]``.
        targets: ``[steps, batch]``, class indices; ``[steps, 0]`` where the loss is the mean square
            of the output.
        x_fixed: Input of the final evaluation.
        y_eval: Output of the prepared model for it.
        y_fake_quant: Output of AMCT's exported fake-quant file for it.
    """

    name: str
    network: str
    cfg: str | None
    config: Mapping[str, Any] = field(repr=False)
    lr: float
    steps: list[dict[str, Any]] = field(repr=False)
    final: Mapping[str, Mapping[str, float]] = field(repr=False)
    eval: Mapping[str, Mapping[str, Any]] = field(repr=False)
    start: Mapping[str, torch.Tensor] = field(repr=False)
    inputs: torch.Tensor = field(repr=False)
    targets: torch.Tensor = field(repr=False)
    x_fixed: torch.Tensor = field(repr=False)
    y_eval: torch.Tensor = field(repr=False)
    y_fake_quant: torch.Tensor = field(repr=False)

    def build(self) -> torch.nn.Module:
        """Return the float network with the start weights, in training mode."""
        network: torch.nn.Module = getattr(networks, self.network)()
        network.load_state_dict(dict(self.start))
        return network.train()


def load_run(name: str) -> Run:
    """Return a recorded run.

    Args:
        name: One of :data:`RUNS`.

    Example:
        >>> run = load_run("mlp_default")
        >>> len(run.steps), run.inputs.shape, run.build().l3.weight.shape
        (20, torch.Size([20, 8, 20]), torch.Size([8, 40]))
    """
    path = _HERE / "h_e2e" / name
    fields = json.loads(path.with_suffix(".json").read_text("utf-8"))
    with np.load(path.with_suffix(".npz")) as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}
    return Run(
        name=name,
        network=fields["model"],
        cfg=fields["cfg"],
        config=fields["config"],
        lr=fields["lr"],
        steps=fields["per_step"],
        final=fields["final"],
        eval=fields["eval"],
        start={k.removeprefix("w0/"): v for k, v in arrays.items() if k.startswith("w0/")},
        inputs=arrays["X"],
        targets=arrays["Y"],
        x_fixed=arrays["x_fixed"],
        y_eval=arrays["y_eval_torch"],
        y_fake_quant=arrays["y_fake_quant_onnx"],
    )


@dataclass(frozen=True)
class FinalState:
    """What AMCT's model held at the end of a recorded run, and what it computed then.

    Attributes:
        network: Name of the class in ``networks.py``.
        cfg: Configuration text, ``None`` for the defaults.
        state: State dict with AMCT's keys.
        x: One input.
        y: Output of AMCT's model for it, in eval mode.
        record_text: The record file that AMCT wrote.
    """

    network: str
    cfg: str | None
    state: Mapping[str, torch.Tensor] = field(repr=False)
    x: torch.Tensor = field(repr=False)
    y: torch.Tensor = field(repr=False)
    record_text: str = field(repr=False)


FINAL_STATES = (
    "tiny_default",
    "tiny_batch_num2",
    "tiny_int16_act",
    "tiny_weight_ulq_small_lr",
    "deconv_default",
    "sharedinput_default",
)
"""Names of the runs whose final state is stored."""


def load_final_state(name: str) -> FinalState:
    """Return the end of a recorded run.

    Args:
        name: One of :data:`FINAL_STATES`.

    Example:
        >>> load_final_state("deconv_default").state["up.quant_module.acts_clip_max"]
        tensor(4.2682)
    """
    path = _HERE / "amct_state" / name
    fields = json.loads(path.with_suffix(".json").read_text("utf-8"))
    with np.load(path.with_suffix(".npz")) as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}
    return FinalState(
        network=fields["model"],
        cfg=fields["cfg"],
        state={k.removeprefix("wT/"): v for k, v in arrays.items() if k.startswith("wT/")},
        x=arrays["x_fixed"],
        y=arrays["y_eval_torch"],
        record_text=fields["record_text"],
    )


@dataclass(frozen=True)
class ExportedGraph:
    """What AMCT wrote into one ONNX file.

    Attributes:
        nodes: Each with op, name, inputs, outputs and attributes.
        initializers: By name: dtype and shape.
        arrays: Values by name, of the deploy file only.
    """

    nodes: list[dict[str, Any]] = field(repr=False)
    initializers: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)


@functools.cache
def load_graph(run: str, kind: str) -> ExportedGraph:
    """Return a graph that AMCT exported at the end of a recorded run.

    Args:
        run: One of :data:`GRAPH_RUNS`.
        kind: ``"deploy"`` or ``"fake_quant"``.

    Example:
        >>> [node["op"] for node in load_graph("mlp_default", "deploy").nodes][:3]
        ['AscendQuant', 'Gemm', 'AscendDequant']
    """
    folder = _HERE / "h_e2e"
    found = json.loads(gzip.decompress((folder / "graphs.json.gz").read_bytes()))[run][kind]
    with np.load(folder / "graphs.npz") as archive:
        arrays = {
            name.partition("/")[2]: archive[name]
            for name in archive.files
            if name.startswith(f"{run}/") and kind == "deploy"
        }
    facts = {item["name"]: (item["dtype"], tuple(item["shape"])) for item in found["initializers"]}
    return ExportedGraph(found["nodes"], facts, arrays)
