"""Configuration without a file: typed objects, INT4 weights where they fit, one layer left float.

python examples/own_config.py --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from amct_fx_demo.data import digits
from amct_fx_demo.network import DigitsNet
from example_tools import fit_classes, print_table, share_right

import amct_fx
from amct_fx.config import ActivationConfig, CompressionConfig, DataType, TypeOverride, WeightConfig

INT8 = CompressionConfig(batch_num=2)
MIXED = CompressionConfig(
    batch_num=2,
    activation=ActivationConfig(fixed_min=True),
    weight=WeightConfig("ulq_retrain", dst_type=DataType.INT4),
    type_overrides=(TypeOverride("Linear", weight=WeightConfig(dst_type=DataType.INT8)),),
    skip_layers=("stem.conv",),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train one float model, and from it one model for each configuration."""
    parser = argparse.ArgumentParser(description="Quantize with configuration objects.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = digits()
    model = DigitsNet()
    fit_classes(model, *train_set, epochs=2 * options.epochs, lr=3e-3)
    rows = [{"configuration": "float", "accuracy": share_right(model, *test_set)}]
    for name, config in (("INT8", INT8), ("INT4 weights", MIXED)):
        prepared = amct_fx.prepare_qat_amct(model, config)
        fit_classes(prepared, *train_set, epochs=options.epochs, lr=3e-4)
        converted = amct_fx.convert_amct(prepared)
        rows.append({"configuration": name, "accuracy": share_right(converted, *test_set)})

    print("The second configuration as a file:\n")
    print(MIXED.to_cfg())
    print(amct_fx.summarize(prepared))
    print_table("Accuracy on the held-out third of the digits", rows)


if __name__ == "__main__":
    main()
