"""AMCT's function names: the files they write, the arguments they take, the errors they raise."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amct_fx import amct_pytorch as amct
from amct_fx import prepare_qat_amct
from amct_fx.config import load_config
from amct_fx.errors import AmctError, AmctWarning, ConfigError
from amct_fx.graph import regions
from test.config import test_distill, test_golden
from test.golden.networks import PlainChain, build, example_input

CREATE = [amct.create_quant_retrain_config, amct.create_distill_config]
X = torch.rand(2, 3, 8, 8)
#: Accepted here, refused by AMCT: a global channel_wise reaches no Linear, functions may be on
#: the way of a group, a network may hold what AMCT cannot export.
ACCEPTED = {
    "per-channel ARQ",
    "weight ULQ",
    "INT4 weights, INT8 activations",
    "override type Conv2d only weights",
    "override layer wins over override type",
    "documentation-style example (skip layer, skip type, override type, override layer)",
    "override type Conv2d per-tensor",
    "override linear channel_wise true",
    "user group whole (passes pooling)",
}


def written(
    create: Callable[..., None], folder: Path, model: nn.Module, data: Any, cfg: str | None
) -> str:
    """Return what a function writes for the text of a ``.cfg`` file."""
    definition = None
    if cfg is not None:
        definition = str(folder / "quant.cfg")
        Path(definition).write_text(cfg)
    target = folder / "out" / "config.json"
    target.unlink(missing_ok=True)
    create(str(target), model, data, definition)
    return target.read_text()


def run_case(create: Callable[..., None], folder: Path, case: dict[str, Any]) -> str:
    model, data = build(case["model"]), example_input(case["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)
        return written(create, folder, model, data, case["cfg"])


@pytest.mark.parametrize("case", test_golden.CASES, ids=test_golden.label)
def test_the_recorded_retrain_configurations(case: dict[str, Any], tmp_path: Path) -> None:
    create = amct.create_quant_retrain_config
    if case["error"] is None:
        assert run_case(create, tmp_path, case) == test_golden.expected(case)
    elif case["tag"] in ACCEPTED or case["model"] == test_golden.NOT_TRACEABLE:
        if case in test_golden.CHANNEL_WISE or case["model"] == test_golden.NOT_TRACEABLE:
            assert run_case(create, tmp_path, case).endswith("}")
        else:
            with pytest.raises(ValueError, match="no layer"):
                run_case(create, tmp_path, case)
    else:
        with pytest.raises(ValueError, match=r"no layer|batch_num"):
            run_case(create, tmp_path, case)


@pytest.mark.parametrize("case", test_distill.CASES, ids=test_distill.label)
def test_the_recorded_distill_configurations(case: dict[str, Any], tmp_path: Path) -> None:
    create = amct.create_distill_config
    if case["error"] is None and case["tag"] != test_distill.OURS:
        assert run_case(create, tmp_path, case) == case["json_text"]
    elif case["tag"] in ACCEPTED and case["model"] != "NoLayers":
        assert '"distill_group"' in run_case(create, tmp_path, case)
    else:
        with pytest.raises(
            ValueError, match=r"no layer|no module|not in the|INT4|least 1|way|common"
        ):
            run_case(create, tmp_path, case)


@pytest.mark.parametrize("case", test_golden.ERRORS, ids=test_golden.label)
@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
def test_the_recorded_errors(case: dict[str, Any], tmp_path: Path) -> None:
    model, data = build(case["model"]), example_input(case["model"])

    def check() -> None:
        if case["kind"] == "json":
            content = case["config_json"]
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "config.json").write_text(text)
            prepare_qat_amct(model, tmp_path / "config.json")
        else:
            written(amct.create_quant_retrain_config, tmp_path, model, data, case["cfg"])

    tag, raised = case["tag"], case["raised"]
    if tag in test_golden.ACCEPTED or (raised is None and tag not in test_golden.REFUSED):
        check()
        return
    with pytest.raises(TypeError if raised == "TypeError" else ValueError):
        check()


@pytest.mark.parametrize("create", CREATE)
def test_the_signature_is_amcts(create: Callable[..., None]) -> None:
    parameters = inspect.signature(create).parameters
    assert list(parameters) == ["config_file", "model", "input_data", "config_defination"]
    assert parameters["config_defination"].default is None
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("create", CREATE)
def test_the_model_is_untouched_and_nothing_is_returned(
    create: Callable[..., None], tmp_path: Path
) -> None:
    model = build("PlainChain").train()
    model.fc.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    seed = torch.get_rng_state()
    assert create(str(tmp_path / "a.json"), model, (X,)) is None
    assert type(model) is PlainChain
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("create", CREATE)
def test_a_ddp_model_is_unwrapped(create: Callable[..., None], tmp_path: Path) -> None:
    model = build("PlainChain")
    plain = written(create, tmp_path, model, X, None)
    wrapped = DistributedDataParallel(model)
    assert written(create, tmp_path, wrapped, X, None) == plain
    assert wrapped.module is model


@pytest.mark.parametrize("create", CREATE)
def test_the_file_has_its_mode_and_replaces_an_old_one(
    create: Callable[..., None], tmp_path: Path
) -> None:
    target = tmp_path / "new" / "deep" / "config.json"
    create(str(target), PlainChain(), X)
    assert target.stat().st_mode & 0o777 == 0o640
    assert target.parent.stat().st_mode & 0o777 == 0o750
    assert not target.read_text().endswith("\n")
    target.write_text("old")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        create(str(target), PlainChain(), X)
    assert json.loads(target.read_text())["version"] == 1
    assert [item.name for item in target.parent.iterdir()] == ["config.json"]
    expected = ["exists and is replaced"] if create is amct.create_distill_config else []
    assert [str(item.message).partition("json ")[2] for item in caught] == expected


@pytest.mark.parametrize("create", CREATE)
@pytest.mark.filterwarnings("ignore:.*exists and is replaced")
def test_a_failure_leaves_the_old_file(
    create: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "config.json"
    target.write_text("old")
    with pytest.raises(ConfigError):
        create(str(target), PlainChain(), X, str(target))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        create(str(target), PlainChain(), X)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


class Prepared:
    """Stands for a prepared model in the table below."""


@pytest.mark.parametrize("create", CREATE)
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"config_file": 3}, TypeError, "config_file must be str, not int"),
        ({"config_file": Path("a.json")}, TypeError, "config_file must be str"),
        ({"config_file": ""}, ValueError, "config_file must name a file"),
        ({"config_file": "folder/"}, ValueError, "config_file must name a file"),
        ({"config_file": "."}, ValueError, "config_file must name a file"),
        ({"model": 3}, TypeError, "must be a torch.nn.Module, not int"),
        ({"model": PlainChain}, TypeError, "must be a torch.nn.Module"),
        ({"model": nn.Conv2d(3, 3, 1)}, RuntimeError, "the model is a single Conv2d"),
        ({"model": DataParallel(PlainChain())}, RuntimeError, "is wrapped in DataParallel"),
        ({"model": Prepared}, RuntimeError, "'c1' is already prepared"),
        ({"input_data": [X]}, RuntimeError, "input_data must be a tensor or a tuple.*not list"),
        ({"input_data": None}, RuntimeError, "input_data must be a tensor or a tuple"),
        ({"input_data": torch.rand(2, 5, 8, 8)}, RuntimeError, "cannot run on input_data"),
        ({"config_defination": 3}, TypeError, "config_defination must be str or None, not int"),
        ({"config_defination": ""}, ValueError, "config_defination is empty"),
        ({"config_defination": "missing.cfg"}, FileNotFoundError, "no such configuration file"),
        ({"config_defination": "batch_num: 2"}, FileNotFoundError, "no such configuration file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments(
    create: Callable[..., None],
    changes: dict[str, Any],
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"config_file": "a.json", "model": PlainChain(), "input_data": X} | changes
    if arguments["model"] is Prepared:
        arguments["model"] = prepare_qat_amct(PlainChain())
    with pytest.raises(kind, match=message) as caught:
        create(**arguments)
    assert isinstance(caught.value, AmctError)
    assert list(tmp_path.iterdir()) == []


def test_wrong_inputs_are_of_the_class_that_each_function_of_amct_raises(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tuple of tensors"):
        amct.create_distill_config(str(tmp_path / "a.json"), PlainChain(), (X, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        amct.create_distill_config(str(tmp_path / "a.json"), PlainChain(), [X])  # type: ignore[arg-type]


@pytest.mark.parametrize("create", CREATE)
def test_a_model_that_cannot_be_copied_is_an_error(
    create: Callable[..., None], tmp_path: Path
) -> None:
    class Stubborn(PlainChain):
        def __deepcopy__(self, _memo: Any) -> None:
            message = "no copies"
            raise NotImplementedError(message)

    with pytest.raises(RuntimeError, match="cannot be copied: no copies"):
        create(str(tmp_path / "a.json"), Stubborn(), X)


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[0])


@pytest.mark.parametrize("create", CREATE)
def test_a_convolution_without_a_batch_axis_stays_float(
    create: Callable[..., None], tmp_path: Path
) -> None:
    value = json.loads(written(create, tmp_path, Unbatched(), X, None))
    assert "a" in value
    assert "b" not in value
    skip = "quant_skip_layers: 'b'"
    with pytest.warns(AmctWarning, match="its input has no batch axis"):
        written(create, tmp_path, Unbatched(), X, skip)


class OwnConv(nn.Conv2d):
    """A subclass may compute something else."""


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True, **options)
        self.head = nn.Linear(self.rnn(torch.rand(1, 5, 4))[0].shape[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


LISTED: list[tuple[Any, Tensor | None, list[str]]] = [
    ("SharedWeight", None, ["a", "d"]),
    ("SharedWeight1d", None, ["a", "d"]),
    ("PaddingModes", None, ["z", "z2"]),
    ("ReusedModule", None, ["c1", "c2"]),
    ("Dims", None, ["c1", "t1", "c2", "t2", "c3"]),
    ("UnusedAnd3d", None, ["used", "lin", "lin2"]),
    ("FunctionalAndUnused", None, ["used", "lin"]),
    (lambda: nn.Sequential(OwnConv(3, 3, 1), nn.Conv2d(3, 3, 1)), X, ["1"]),
    (lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding="same")), X, ["0"]),
    (lambda: nn.Sequential(nn.Linear(8, 8)), X, ["0"]),
    (Aliased, torch.rand(2, 4), ["first", "last"]),
    (Tied, torch.tensor([[1, 2]]), ["head"]),
    (Recurrent, torch.rand(2, 5, 4), ["rnn", "head"]),
    (lambda: Recurrent(num_layers=2), torch.rand(2, 5, 4), ["head"]),
    (lambda: Recurrent(bidirectional=True), torch.rand(2, 5, 4), ["head"]),
    (lambda: Recurrent(proj_size=2), torch.rand(2, 5, 4), ["head"]),
]


@pytest.mark.parametrize(("model", "data", "names"), LISTED)
def test_the_json_lists_every_eligible_layer_and_no_other(
    model: Any, data: Tensor | None, names: list[str], tmp_path: Path
) -> None:
    network = build(model) if isinstance(model, str) else model()
    inputs = example_input(model) if data is None else data
    value = json.loads(written(amct.create_quant_retrain_config, tmp_path, network, inputs, None))
    assert [key for key in value if key not in ("version", "batch_num")] == names


PRUNE = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"


@pytest.mark.parametrize(
    "text",
    [
        PRUNE,
        f'override_layer_configs {{ layer_name: "c1" {PRUNE} }}',
        f'override_layer_types {{ layer_type: "Conv2d" {PRUNE} }}',
        'regular_prune_skip_layers: "c1"',
        'regular_prune_skip_types: "Conv2d"',
    ],
)
def test_settings_of_pruning_are_refused(text: str, tmp_path: Path) -> None:
    create = amct.create_quant_retrain_config
    with pytest.raises(ConfigError, match=r"quant.cfg:1:.*this call only quantizes"):
        written(create, tmp_path, PlainChain(), X, text)
    assert written(create, tmp_path, PlainChain(), X, "prune_config { }")


TEXT = """batch_num: 2
retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 0.7 clip_min: -0.3 } } }
retrain_weight_quant_config { ulq_retrain { channel_wise: false } }
quant_skip_layers: "c3"
override_layer_types { layer_type: "Linear"
  retrain_weight_quant_config { arq_retrain { } } }
override_layer_configs { layer_name: "c2"
  retrain_data_quant_config { ulq_quantize { } } }
"""


def trained(source: object) -> tuple[list[str], list[Tensor]]:
    """Prepare and run a few steps; return the printed graphs and all outputs and states."""
    model = prepare_qat_amct(build("PlainChain"), source).train()  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        output = model(torch.rand(2, 3, 8, 8))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(output.detach())
    results += [value for key, value in sorted(model.state_dict().items())]
    printed = [str(region._fx_graph) for _, region in regions(model)] + [str(model)]
    return printed, results


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)], ids=["one", "other"])
def test_every_form_of_a_configuration_prepares_the_same_model(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    """Whatever was read before in the process, the order below included."""
    json_text = written(amct.create_quant_retrain_config, tmp_path, build("PlainChain"), X, TEXT)
    config = load_config(TEXT)
    forms: list[object] = [
        tmp_path / "quant.cfg",
        str(tmp_path / "out" / "config.json"),
        json.loads(json_text),
        config.to_json_dict(),
        config,
        config.to_cfg(),
    ]
    expected = trained(TEXT)
    assert len(expected[0]) == 2
    for index in order:
        load_config('{"version": 1, "batch_num": 7, "fc": {}}')
        printed, results = trained(forms[index])
        assert printed == expected[0]
        assert len(results) == len(expected[1])
        assert all(map(torch.equal, results, expected[1]))


def test_a_json_without_batch_num_does_not_remember_the_one_before() -> None:
    load_config("batch_num: 5")
    load_config({"version": 1, "batch_num": 5, "fc": {}})
    assert load_config({"version": 1, "fc": {}}).batch_num == 1
    prepared = prepare_qat_amct(build("PlainChain"), {"version": 1, "fc": {}})
    assert prepared.fc.input_fake_quant.batch_num == 1


def test_a_distill_json_of_an_empty_cfg_is_that_of_none(tmp_path: Path) -> None:
    create = amct.create_distill_config
    model = build("PlainChain")
    plain = written(create, tmp_path, model, X, None)
    assert written(create, tmp_path, model, X, "") == plain
    dumped = written(create, tmp_path, model, X, "data_dump: true")
    assert dumped == plain.replace('"data_dump":false', '"data_dump":true')


def test_a_skipped_layer_is_written_and_stays_in_its_group(tmp_path: Path) -> None:
    text = 'quant_skip_layers: "c2" distill_override_layers { layer_name: "c2" }'
    with pytest.warns(AmctWarning, match="is empty"):
        value = json.loads(
            written(amct.create_distill_config, tmp_path, build("PlainChain"), X, text)
        )
    assert value["c2"]["quant_enable"] is False
    assert list(value["c2"]) == ["quant_enable", "distill_data_config", "distill_weight_config"]
    assert ["c2", "b2", "r2"] in value["distill_group"]
