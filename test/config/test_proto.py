"""The generated modules fit their .proto files."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from amct_fx.config import distill_pb2, record_pb2, retrain_mindspore_pb2, retrain_pb2

GENERATE = runpy.run_path(str(Path(__file__).parents[2] / "proto" / "generate.py"))


@pytest.mark.parametrize("name", GENERATE["PROTOS"])
def test_a_generated_module_fits_its_proto_file(name: str) -> None:
    module = importlib.import_module(f"amct_fx.config.{name}_pb2")
    assert GENERATE["proto_sha256"](name) == module.PROTO_SHA256, "run proto/generate.py"
    if GENERATE["have_protoc"]():
        assert Path(module.__file__).read_text() == GENERATE["render"](name)


def numbers(message: object) -> dict[str, int]:
    return {field.name: field.number for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_field_numbers_are_those_of_the_interface() -> None:
    assert numbers(retrain_pb2.AMCTRetrainConfig) == {
        "batch_num": 1,
        "retrain_data_quant_config": 2,
        "retrain_weight_quant_config": 3,
        "skip_layers": 4,
        "override_layer_configs": 5,
        "skip_layer_types": 6,
        "override_layer_types": 7,
        "prune_config": 8,
        "regular_prune_skip_layers": 9,
        "regular_prune_skip_types": 10,
        "quant_skip_layers": 11,
        "quant_skip_types": 12,
        "fakequant_precision_mode": 21,
    }
    assert numbers(distill_pb2.AMCTDistillConfig) == {
        "batch_num": 1,
        "group_size": 2,
        "data_dump": 3,
        "distill_group": 10,
        "distill_data_quant_config": 11,
        "distill_weight_quant_config": 12,
        "distill_override_layers": 110,
        "distill_override_layer_types": 111,
        "quant_skip_layers": 120,
        "quant_skip_layer_types": 121,
    }
    assert numbers(record_pb2.ScaleOffsetRecord) == {"record": 1, "prune_record": 2}


def test_the_mindspore_grammar_is_a_subset_of_the_pytorch_grammar() -> None:
    def check(small: object, large: object) -> None:
        for field in small.fields:  # type: ignore[attr-defined]
            other = large.fields_by_name[field.name]  # type: ignore[attr-defined]
            assert (other.number, other.type) == (field.number, field.type)
            if field.message_type is not None:
                check(field.message_type, other.message_type)

    check(
        retrain_mindspore_pb2.AMCTRetrainConfig.DESCRIPTOR, retrain_pb2.AMCTRetrainConfig.DESCRIPTOR
    )
