"""Every mistake gives one exception that names the place and says what to write instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import amct_fx
from amct_fx import AmctError, convert_amct, errors, prepare_qat_amct


class Net(nn.Module):
    """Two convolutions and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.block = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)).mean((2, 3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("cfg", "builtin", "message"),
    [
        ("no/such/file.cfg", FileNotFoundError, r"no/such/file\.cfg"),
        ("", ValueError, "None"),
        ("skip_layer: 'stem'", ValueError, r"1:1.*skip_layers"),
        ("\n retrain_data_quant_config { ulq_quantize { fixed_mn: true } }", ValueError, r"2:\d+"),
        (
            "retrain_data_quant_config { ulq_quantize { dst_type: INT7 } }",
            ValueError,
            "INT4, INT8, INT16.*INT7",
        ),
        (
            "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 1 } } }",
            ValueError,
            "clip_min",
        ),
        ("skip_layers: 'stemm'", ValueError, "stemm.*stem"),
        ("skip_layer_types: 'conv2d'", ValueError, "conv2d.*Conv2d"),
        (
            "override_layer_configs { layer_name: 'block.0' retrain_data_quant_config { } }",
            ValueError,
            r"block\.0",
        ),
        ("batch_num: 0", ValueError, "batch_num"),
        ("prune_config { n_out_of_m_pruner { } }", ValueError, "prun"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_wrong_configuration_is_explained(cfg, builtin, message):
    with pytest.raises(AmctError, match=f"(?s){message}") as error:
        prepare_qat_amct(Net(), cfg)
    assert isinstance(error.value, builtin)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "model.cfg"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(AmctError, match=r"model\.cfg") as error:
        prepare_qat_amct(Net(), path)
    assert isinstance(error.value, ValueError)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(AmctError, match="folder"):
        prepare_qat_amct(Net(), tmp_path)


def test_a_model_without_quantizable_layers_is_refused():
    with pytest.raises(AmctError, match="Conv2d") as error:
        prepare_qat_amct(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)))
    assert isinstance(error.value, ValueError)


def test_a_configuration_that_skips_everything_is_refused():
    with pytest.raises(AmctError) as error:
        prepare_qat_amct(Net(), "skip_layer_types: ['Conv2d', 'Linear']")
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("bad", [None, "resnet18", 3, {"model": 1}, Net])
def test_what_is_no_module_is_refused(bad):
    with pytest.raises(AmctError, match=r"torch\.nn\.Module") as error:
        prepare_qat_amct(bad)
    assert isinstance(error.value, TypeError)


def test_nan_weights_are_refused_by_name():
    model = Net()
    with torch.no_grad():
        model.block[1].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(AmctError, match=r"block\.1\.weight") as error:
        prepare_qat_amct(model)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_calibration_data_name_the_layer_and_poison_nothing(x, value):
    prepared = prepare_qat_amct(Net())
    before = copy.deepcopy(prepared.stem.input_fake_quant.state_dict())
    bad = x.clone()
    bad[0, 0, 0, 0] = value
    with pytest.raises(AmctError, match="stem") as error:
        prepared(bad)
    assert isinstance(error.value, RuntimeError)
    after = prepared.stem.input_fake_quant.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.isfinite(prepared(x)).all()


def test_conversion_before_calibration_names_the_layers():
    with pytest.raises(AmctError, match=r"stem.*block\.1.*head.*batch_num") as error:
        convert_amct(prepare_qat_amct(Net()))
    assert isinstance(error.value, RuntimeError)


def test_a_bias_overflow_names_the_layer_and_the_channel(x):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    with torch.no_grad():
        prepared.stem.weight[3] = 1e-4
        prepared.stem.bias[3] = 1e9
    with pytest.raises(AmctError, match=r"stem.*channel 3.*int32") as error:
        convert_amct(prepared)
    assert isinstance(error.value, RuntimeError)


def test_weights_that_became_nan_in_training_are_refused(x):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    with torch.no_grad():
        prepared.head.weight.fill_(float("nan"))
    with pytest.raises(AmctError, match=r"head.*NaN"):
        convert_amct(prepared)


@pytest.mark.parametrize("convert_first", [False, True])
def test_preparing_twice_is_refused(x, convert_first):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    model = convert_amct(prepared) if convert_first else prepared
    word = "converted" if convert_first else "prepared"
    with pytest.raises(AmctError, match=f"stem.*already {word}") as error:
        prepare_qat_amct(model)
    assert isinstance(error.value, RuntimeError)


def test_a_model_that_contains_a_prepared_one_is_refused():
    with pytest.raises(AmctError, match=r"0\.stem.*already prepared"):
        prepare_qat_amct(nn.Sequential(prepare_qat_amct(Net())))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, r"model\.module"),
        (lambda m: torch.compile(m, backend="eager"), "_orig_mod"),
        (lambda m: torch.jit.trace(m, torch.randn(1, 3, 8, 8)), "scripted or traced"),
    ],
    ids=["DataParallel", "compiled", "TorchScript"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_models_are_refused_with_the_right_order(wrap, message):
    with pytest.raises(AmctError, match=message) as error:
        prepare_qat_amct(wrap(Net()))
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("model", [Net(), nn.ReLU()], ids=["float", "nothing"])
def test_converting_what_was_not_prepared_is_refused(model):
    with pytest.raises(AmctError, match="prepare_qat_amct") as error:
        convert_amct(model)
    assert isinstance(error.value, RuntimeError)


def test_converting_twice_is_refused(x):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    with pytest.raises(AmctError, match="already converted"):
        convert_amct(convert_amct(prepared))


def test_a_failed_prepare_in_place_leaves_the_model_as_it_was(x):
    model = Net().eval()
    expected, text = model(x), repr(model)
    with pytest.raises(AmctError):
        prepare_qat_amct(model, "skip_layers: 'nothing'", inplace=True)
    assert repr(model) == text
    assert torch.equal(model(x), expected)


def test_a_failed_convert_leaves_the_model_as_it_was(x):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    with torch.no_grad():
        prepared.head.bias[0] = 1e30
    text = repr(prepared)
    with pytest.raises(AmctError, match="head"):
        convert_amct(prepared)
    assert prepared.training
    assert repr(prepared) == text


def test_every_exception_is_exported():
    for name in errors.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(amct_fx, name), AmctError)
            assert getattr(amct_fx, name) is getattr(errors, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reused": "quantise"}, "reused must be.*did you mean 'quantize'"),
        ({"fixed_min_rule": "bogus"}, "fixed_min_rule must be 'relu' or 'nonnegative'"),
        ({"range_merge": "median"}, "range_merge must be 'mean' or 'max'"),
        ({"dialect": "tensorflow"}, "dialect"),
    ],
)
def test_a_wrong_option_is_explained(options, message):
    with pytest.raises(ValueError, match=message) as error:
        prepare_qat_amct(Net(), **options)
    assert isinstance(error.value, AmctError)


def test_lazy_layers_are_refused():
    with pytest.raises(RuntimeError, match="layer '0' is lazy; run one forward"):
        prepare_qat_amct(nn.Sequential(nn.LazyLinear(4)))


def test_complex_weights_are_refused():
    with pytest.raises(ValueError, match=r"0\.weight is complex"):
        prepare_qat_amct(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64)))


def test_a_distributed_wrapper_is_refused(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Net())
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel; .*model\.module"):
            prepare_qat_amct(wrapped)
    finally:
        torch.distributed.destroy_process_group()
