"""AMCT's functions of pruning: records, checkpoints, files, and its own results."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amct_fx import amct_pytorch as amct
from amct_fx import prepare_qat_amct
from amct_fx.errors import AmctError, AmctWarning
from amct_fx.nn.qat import QATLayer
from amct_fx.prune.record import read_prune_record
from amct_fx.record import read_record_message

from ..golden.reader import load_cases, load_run
from ..prune.test_golden import model_and_input

RECORDS = json.loads(
    gzip.decompress(
        (Path(__file__).parents[1] / "golden" / "f_bcp" / "records.json.gz").read_bytes()
    )
)
FILTER = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
"""
M4N2 = """override_layer_configs { layer_name: "c3"
    prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 1 } } } }
"""
INT8 = "retrain_data_quant_config { ulq_quantize { } }\n"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3)
        self.b1 = nn.BatchNorm2d(8)
        self.c2 = nn.Conv2d(8, 12, 3, padding=1)
        self.c3 = nn.Conv2d(12, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.c3(torch.relu(self.c2(x))))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def fresh(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def config(folder: Path, text: str) -> str:
    path = folder / "prune.cfg"
    path.write_text(text)
    return str(path)


def train(model: nn.Module, steps: int = 3) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()


def nodes(message: Any, role: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the producers or consumers of a record that are modules, by name and begin."""
    found = {}
    for entry in message.prune_record:
        for node in getattr(entry, role):
            if node.name.startswith("/"):
                continue  # AMCT's pseudo nodes
            values = {a.name: a.s or list(a.ints) or a.i for a in node.attr}
            found[node.name, values["begin"]] = values
    return found


@pytest.mark.parametrize("case", RECORDS, ids=lambda case: f"{case['model']}: {case['tag']}")
def test_the_pruned_model_and_its_record_are_those_of_amct(case, tmp_path):
    model, example = model_and_input(case["model"])
    record = str(tmp_path / "record.txt")
    pruned = amct.create_prune_retrain_model(model, example, config(tmp_path, case["cfg"]), record)
    pruned.train()(example)  # as it was recorded: the batch norms have moved
    output = pruned.eval()(example)
    head = torch.tensor(case["output_head"][0])
    assert list(output.shape) == case["output_shapes"][0]
    assert torch.allclose(output.flatten()[: len(head)], head, atol=1e-6)
    (tmp_path / "theirs.txt").write_text(case["record"])
    ours = read_record_message(record)
    theirs = read_record_message(tmp_path / "theirs.txt")
    for role in ("producer", "consumer"):
        assert nodes(ours, role) == nodes(theirs, role)


@pytest.mark.parametrize("case", RECORDS[::5], ids=lambda case: f"{case['model']}: {case['tag']}")
def test_a_record_of_amct_restores_the_same_model(case, tmp_path):
    model, example = model_and_input(case["model"])
    cfg, record = config(tmp_path, case["cfg"]), tmp_path / "theirs.txt"
    record.write_text(case["record"])
    pruned = amct.create_prune_retrain_model(model, example, cfg, None)
    torch.save(
        {"net": {f"module.{k}": v for k, v in pruned.state_dict().items()}}, tmp_path / "a.pth"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # nothing is ranked again
    restored = amct.restore_prune_retrain_model(
        model, example, str(record), cfg, str(tmp_path / "a.pth"), "net"
    )
    assert torch.equal(restored.eval()(example), pruned.eval()(example))


@pytest.mark.parametrize("case", load_cases("f_selective")[:2], ids=lambda case: case["key"])
def test_masks_in_a_record_of_amct_are_read(case, tmp_path):
    (tmp_path / "record.txt").write_text(case["record_text"])
    record = read_prune_record(tmp_path / "record.txt")
    last = {key.removeprefix("mask4/"): case.tensor(key) for key in case.arrays if "mask4/" in key}
    assert set(record.masks) == set(last)
    for name, mask in record.masks.items():
        assert torch.equal(mask, last[name].bool())


@pytest.mark.parametrize(
    "text", [FILTER + INT8 + M4N2, FILTER + M4N2, INT8], ids=["all", "prune", "int8"]
)
def test_combined_models_are_created_restored_and_saved(text, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    cfg, record, pth = config(tmp_path, text), str(tmp_path / "r.txt"), str(tmp_path / "a.pth")
    model = amct.create_compressed_retrain_model(fresh(), images(), cfg, record)
    train(model)
    torch.save(model.state_dict(), pth)
    restored = amct.restore_compressed_retrain_model(fresh(1), images(), cfg, record, pth)
    assert torch.equal(restored.eval()(images()), model.eval()(images()))
    train(restored)
    train(model)
    assert torch.equal(restored.eval()(images()), model.eval()(images()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amct.save_compressed_retrain_model(model, record, f"{tmp_path}/out/net", images())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["net_deploy_model.onnx", "net_fake_quant_model.onnx"]
    session = ort.InferenceSession(
        f"{tmp_path}/out/net_fake_quant_model.onnx", providers=["CPUExecutionProvider"]
    )
    (output,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
    expected = model(images()).detach().numpy()
    assert np.abs(output - expected).max() <= 0.02 * np.abs(expected).max()
    saved = read_record_message(record)
    assert [entry.key for entry in saved.record] == (
        ["c1", "c2", "c3", "fc"] if "ulq" in text else []
    )
    if "filter" in text:
        assert nodes(saved, "producer")["c1", 0]["prune_index"]
        assert saved.prune_record[-1].selective_prune.name == "c3"


def test_a_prune_only_model_is_saved_as_two_equal_float_files(tmp_path):
    onnx = pytest.importorskip("onnx")
    cfg = config(tmp_path, FILTER)
    model = amct.create_prune_retrain_model(fresh(), images(), cfg, None)
    train(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amct.save_prune_retrain_model(model, f"{tmp_path}/net", images(), ["x"], ["y"])
    graphs = [
        onnx.load(f"{tmp_path}/net_{kind}_model.onnx").graph for kind in ("deploy", "fake_quant")
    ]
    assert graphs[0].SerializeToString() == graphs[1].SerializeToString()
    assert {node.op_type for node in graphs[0].node} <= {
        "Conv",
        "Relu",
        "BatchNormalization",
        "Gemm",
        "GlobalAveragePool",
        "Flatten",
    }


def test_the_quantization_part_plays_no_part_when_only_pruning(tmp_path):
    cfg = config(tmp_path, FILTER + INT8 + 'quant_skip_layers: "fc"')
    model = amct.create_prune_retrain_model(fresh(), images(), cfg, None)
    assert not any(isinstance(module, QATLayer) for module in model.modules())
    assert model.c1.out_channels == 4


def test_a_file_that_only_quantizes_leaves_a_copy_with_a_warning(tmp_path):
    original = fresh()
    with pytest.warns(AmctWarning, match="only quantizes: nothing is pruned"):
        copied = amct.create_prune_retrain_model(original, images(), config(tmp_path, INT8), None)
    assert type(copied) is Net
    assert copied.c1.weight is not original.c1.weight
    assert torch.equal(copied.c1.weight, original.c1.weight)


def test_a_masked_checkpoint_wins_over_the_record(tmp_path):
    cfg, record, pth = config(tmp_path, FILTER), str(tmp_path / "r.txt"), str(tmp_path / "a.pth")
    amct.create_prune_retrain_model(fresh(), images(), cfg, record)
    masked = prepare_qat_amct(fresh(3), cfg, images(), mode="amct", importance="first")
    torch.save(masked.state_dict(), pth)
    with pytest.warns(AmctWarning, match="those of the checkpoint count"):
        restored = amct.restore_prune_retrain_model(fresh(), images(), record, cfg, pth)
    assert torch.equal(restored.eval()(images()), masked.eval()(images()))


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "model": fresh(),
        "input_data": images(),
        "config_defination": config(folder, FILTER),
        "record_file": str(folder / "record.txt"),
    }
    return {**given, **changes}


BAD = [
    ({"model": 3}, TypeError, "nn.Module"),
    ({"config_defination": 3}, TypeError, "config_defination"),
    ({"record_file": 3}, TypeError, "record_file"),
    ({"input_data": [1]}, RuntimeError, "input_data"),
    ({"config_defination": "/nowhere/prune.cfg"}, FileNotFoundError, "nowhere"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
@pytest.mark.parametrize(
    "call", [amct.create_prune_retrain_model, amct.create_compressed_retrain_model]
)
def test_wrong_arguments_of_create_are_named(call, changes, error, text, tmp_path):
    with pytest.raises(error, match=text) as caught:
        call(**arguments(tmp_path, **changes))
    assert isinstance(caught.value, AmctError)
    assert not (tmp_path / "record.txt").exists()


def test_an_empty_file_cannot_prune(tmp_path):
    given = arguments(tmp_path)
    config(tmp_path, "# nothing\n")
    with pytest.raises(ValueError, match=r"prune\.cfg.*no prune_config"):
        amct.create_prune_retrain_model(**given)


def test_a_prepared_model_is_refused(tmp_path):
    prepared = amct.create_prune_retrain_model(**arguments(tmp_path))
    with pytest.raises(RuntimeError, match="already prepared"):
        amct.create_prune_retrain_model(**arguments(tmp_path, model=prepared))


def gone(role: str, name: str, *indices: int, more: str = "") -> str:
    ints = " ".join(f"ints: {index}" for index in indices)
    attribute = f'attr {{ name: "prune_index" type: INTS {ints} }}' if indices else ""
    return f'prune_record {{ {role} {{ name: "{name}" {attribute} {more} }} }} '


def mask(name: str, shape: tuple[int, ...], count: int) -> str:
    sizes, ints = " ".join(f"ints: {size}" for size in shape), "ints: -1 " * count
    return (
        f'prune_record {{ selective_prune {{ name: "{name}" attr {{ name: "mask_shape" {sizes} }}'
        f' attr {{ name: "selective_mask" {ints} }} }} }}'
    )


HALF = gone("producer", "c1", 0, 4, 6, 7)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (gone("producer", "c1", *range(8)), RuntimeError, "record.txt: .* at least one stays"),
        (gone("producer", "c1", -1), RuntimeError, "channels 0 to 7, not "),
        (gone("producer", "b1", 1), RuntimeError, "'b1' cannot be removed"),
        (
            gone("producer", "c1", 1, more='attr { name: "end" type: INT i: 16 }'),
            RuntimeError,
            "'c1' has channels 0 to 7, not 15",
        ),
        (
            HALF + gone("consumer", "c2", 0, 4, 6),
            RuntimeError,
            "record.txt: 'c2' loses the channels .0, 4, 6. there, in this model .*, 7.; the record",
        ),
        (HALF + gone("consumer", "b1"), RuntimeError, "'b1' loses the channels .* of another mo"),
        (HALF + gone("consumer", "fc", 3), RuntimeError, "'fc' loses the channels"),
        (
            'prune_record { producer { name: "c1" attr { name: "prune_index" floats: 1.0 } } }',
            ValueError,
            "record.txt: layer 'c1': prune_index must be of type INTS",
        ),
        (mask("zz", (8, 12, 3, 3), 14), RuntimeError, "no layers 'zz'"),
        (mask("c3", (8, 12, 3, 3), 1), ValueError, "record.txt: layer 'c3': a mask .* takes 14"),
        (mask("c3", (-8, 12), 1), ValueError, "'c3' cannot have the mask_shape"),
        (mask("c1", (8, 3, 3, 3), 4), RuntimeError, "the model has no 2:4 mask there"),
        ('prune_record { selective_prune { name: "c3" } }', ValueError, "'c3' needs mask_shape"),
        ('prune_record { producer { name: "zz" } }', RuntimeError, "no layers 'zz'"),
        ("prune_record { producer { nam", RuntimeError, "record"),
        (
            'prune_record { producer { name: "fc" '
            'attr { name: "prune_index" type: INTS ints: 1 } } }',
            RuntimeError,
            "'fc' cannot be removed",
        ),
        (
            'prune_record { producer { name: "c1" '
            'attr { name: "prune_index" type: INTS ints: 99 } } }',
            RuntimeError,
            "channels 0 to 7",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_refused(text, error, match, tmp_path):
    created = amct.create_prune_retrain_model(**arguments(tmp_path))
    torch.save(created.state_dict(), tmp_path / "a.pth")
    (tmp_path / "record.txt").write_text(text)
    given = arguments(tmp_path, pth_file=str(tmp_path / "a.pth"))
    with pytest.raises(error, match=match) as caught:
        amct.restore_prune_retrain_model(**given)
    assert isinstance(caught.value, AmctError)
    assert given["model"].c1.out_channels == 8


@pytest.mark.parametrize(("missing", "name"), [("record_file", "no.txt"), ("pth_file", "no.pth")])
def test_missing_files_are_named(missing, name, tmp_path):
    created = amct.create_prune_retrain_model(**arguments(tmp_path))
    torch.save(created.state_dict(), tmp_path / "a.pth")
    given = arguments(tmp_path, pth_file=str(tmp_path / "a.pth"))
    with pytest.raises(FileNotFoundError, match=name):
        amct.restore_prune_retrain_model(**{**given, missing: str(tmp_path / name)})


def test_an_empty_record_removes_nothing_with_a_warning(tmp_path):
    torch.save(fresh(5).state_dict(), tmp_path / "a.pth")
    (tmp_path / "record.txt").write_text("")
    given = arguments(tmp_path, pth_file=str(tmp_path / "a.pth"))
    with pytest.warns(AmctWarning, match="no channels are removed"):
        restored = amct.restore_prune_retrain_model(**given)
    assert torch.equal(restored.eval()(images()), fresh(5).eval()(images()))


def test_a_model_in_which_nothing_is_compressed_is_not_saved(tmp_path):
    with pytest.raises(RuntimeError, match="not prepared"):
        amct.save_prune_retrain_model(fresh(), f"{tmp_path}/net", images())


def amct_masks() -> tuple[dict[str, torch.Tensor], Any]:
    """Return weights and masks at the end of a run of AMCT with 2:4 sparsity and INT8."""
    run = load_run("compressed_m4n2_quant")
    path = Path(__file__).parents[1] / "golden" / "h_e2e" / "compressed_m4n2_quant.npz"
    with np.load(path) as file:
        state = {k.removeprefix("wT/"): torch.from_numpy(file[k]) for k in file if "wT/" in k}
    return state, run


def test_a_prune_only_checkpoint_of_amct_loads_whole(tmp_path):
    state, run = amct_masks()
    cfg, record, pth = config(tmp_path, run.cfg), str(tmp_path / "r.txt"), str(tmp_path / "a.pth")
    example = run.inputs[0]
    created = amct.create_prune_retrain_model(run.build(), example, cfg, record)
    theirs = dict(run.build().state_dict())
    for layer in ("c1", "c2", "c3", "fc"):
        weight = state[f"{layer}.quant_module.replaced_module.weight"]
        theirs[f"{layer}.replaced_module.weight"] = weight
        theirs[f"{layer}.replaced_module.bias"] = theirs.pop(f"{layer}.bias")
        theirs[f"{layer}.wts_mask"] = torch.full_like(weight, torch.nan)
        theirs[f"{layer}.prune_cur_batch"] = torch.tensor(0)
        theirs[f"{layer}.s_rec_flag"] = torch.tensor(0)
        del theirs[f"{layer}.weight"]
    theirs["c2.wts_mask"] = state["c2.quant_module.wts_mask"].float()
    torch.save(theirs, pth)
    restored = amct.restore_prune_retrain_model(run.build(), example, record, cfg, pth)
    mask = restored.c2.parametrizations.weight[0].mask
    assert torch.equal(mask, state["c2.quant_module.wts_mask"])
    assert torch.equal(
        restored.c1.parametrizations.weight[0].mask, created.c1.parametrizations.weight[0].mask
    )
