"""A training script as it is written for AMCT, with another import line.

    python examples/amct_script.py --epochs 3 --output outputs

Writes the JSON, the record file, the deploy file for ATC and the fake-quant file, and runs the last
one in onnxruntime. The restored model is a second one, as in another process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch
from amct_fx_demo.data import Split, digits
from amct_fx_demo.network import DigitsNet
from example_tools import fit_classes, print_table, share_right

import amct_fx.amct_pytorch as amct

CONFIG = """
batch_num: 2
quant_skip_layers: "classifier"
override_layer_types {
  layer_type: "Conv2d"
  retrain_weight_quant_config { ulq_retrain { channel_wise: true } }
}
"""


def accuracy_in_onnxruntime(path: Path, held_out: Split) -> float:
    """Return the share of right classes of a file."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": held_out.images.numpy()})
    return float((logits.argmax(axis=-1) == held_out.labels.numpy()).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, then create, train, restore, train on and save."""
    parser = argparse.ArgumentParser(description="Run a script of AMCT.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    options = parser.parse_args(arguments)
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    config, record, pth = (str(folder / n) for n in ("config.json", "record.txt", "model.pth"))
    definition = folder / "quant.cfg"
    definition.write_text(CONFIG)

    torch.manual_seed(0)
    train, held_out = digits()
    input_data = train.images[:2]
    model = DigitsNet()
    fit_classes(model, *train, epochs=2 * options.epochs, lr=3e-3)
    rows = [{"model": "float", "accuracy": share_right(model, *held_out)}]

    amct.create_quant_retrain_config(config, model, input_data, str(definition))
    prepared = amct.create_quant_retrain_model(config, model, record, input_data)
    fit_classes(prepared, *train, epochs=options.epochs, lr=3e-4)
    rows.append({"model": "half-way", "accuracy": share_right(prepared, *held_out)})
    torch.save({"state_dict": prepared.state_dict()}, pth)

    restored = amct.restore_quant_retrain_model(
        config, DigitsNet(), record, input_data, pth, "state_dict"
    )
    fit_classes(restored, *train, epochs=options.epochs, lr=3e-4)
    rows.append({"model": "trained on", "accuracy": share_right(restored, *held_out)})
    axes = {name: {0: "batch"} for name in ("images", "logits")}
    amct.save_quant_retrain_model(
        config, restored, record, str(folder / "net"), input_data, ["images"], ["logits"], axes
    )
    path = folder / "net_fake_quant_model.onnx"
    rows.append({"model": path.name, "accuracy": accuracy_in_onnxruntime(path, held_out)})
    print_table(f"Digits, files in {folder}", rows)


if __name__ == "__main__":
    main()
