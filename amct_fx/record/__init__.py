"""The record file: scales and offsets of every quantized layer, for exchange with Ascend's tools.

Nothing here needs it to train, to save or to restore; it is written from the values of the moment.
Protobuf is imported when the first file is read or written. Source: spec/deploy.md section 7.
"""

from amct_fx.record.checks import read_record
from amct_fx.record.layers import LayerRecord, execution_order, layer_records
from amct_fx.record.message import (
    read_record_message,
    record_message,
    record_text,
    write_record,
    write_record_message,
)

__all__ = [
    "LayerRecord",
    "execution_order",
    "layer_records",
    "read_record",
    "read_record_message",
    "record_message",
    "record_text",
    "write_record",
    "write_record_message",
]
