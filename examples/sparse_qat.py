"""Keep two of every four neighbouring weights (2:4, AMCT's M4N2) and quantize to INT8, in one go.

    python examples/sparse_qat.py --epochs 5

The mask of each weight is chosen from its magnitudes at prepare, and again every 20 steps. The
script prints the accuracy of each stage, and the share of zeros in the integer weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from amct_fx_demo.data import digits
from example_tools import fit_classes, print_table, share_right
from torch import nn

import amct_fx
from amct_fx.nn.quantized import QuantizedLayer

CONFIG = """
    batch_num: 2
    retrain_data_quant_config { ulq_quantize { } }
    prune_config { n_out_of_m_pruner {
      l1_selective_prune { n_out_of_m_type: M4N2 update_freq: 20 }
    } }
    regular_prune_skip_layers: "0"   # one input channel: there are no four to choose from
"""


def make_model() -> nn.Sequential:
    """Return a small CNN for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def share_of_zeros(model: nn.Module) -> float:
    """Return the share of codes that are 0 in all integer weights of a converted model."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    codes = torch.cat([layer.weight_codes.flatten() for layer in layers])
    return float((codes == 0).double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, then with the mask and INT8 together, and convert."""
    parser = argparse.ArgumentParser(description="2:4 sparsity and INT8 on the digits.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = digits().train, digits().held_out
    model = make_model()
    fit_classes(model, *train_set, epochs=options.epochs, lr=3e-3)
    sparse = amct_fx.prepare_qat_amct(model, CONFIG)
    fit_classes(sparse, *train_set, epochs=options.epochs, lr=1e-3)
    converted = amct_fx.convert_amct(sparse)

    print(amct_fx.summarize(sparse))
    stages = {"float": model, "2:4, INT8 simulated": sparse, "2:4, INT8": converted}
    rows = [{"model": name, "accuracy": share_right(m, *test_set)} for name, m in stages.items()]
    print_table(f"Digits, held-out third; {share_of_zeros(converted):.0%} of the codes are 0", rows)


if __name__ == "__main__":
    main()
