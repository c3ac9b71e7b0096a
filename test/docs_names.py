"""What the pages of the documentation take for granted: models, loops and data of the reader."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from typing import TYPE_CHECKING, Any

import torch
from amct_fx_demo import CONFIG, DigitsNet
from torch import Tensor, nn

import amct_fx

if TYPE_CHECKING:
    import pytest

FROM_PREPARED = [
    f"docs/{page}.md" for page in ("ascend", "deployment", "onnxruntime", "resume", "training")
]


def train(model: nn.Module) -> None:
    """Stand for the training loop of the reader."""
    with torch.no_grad():
        for _ in range(2):
            model.train()(torch.rand(8, 1, 8, 8))
    model.eval()


def make_model(page: str) -> nn.Module:
    """Return the model that the page starts from."""
    if page not in FROM_PREPARED:
        return DigitsNet()
    prepared = amct_fx.prepare_qat_amct(DigitsNet(), CONFIG)
    train(prepared)
    return prepared


def names_of(page: str) -> dict[str, Any]:
    """Return the names that every page may use."""
    return {
        "model": make_model(page),
        "train": train,
        "train_one_epoch": train,
        "epochs": 1,
        "example_inputs": (torch.rand(2, 1, 8, 8),),
        "float_model": DigitsNet(),
    }


class Classifier(nn.Module):
    """A network that returns its loss, as Hugging Face's Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsNet()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _samples() -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(1, 8, 8), torch.tensor(index % 10)) for index in range(16)]


def for_lightning(_: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a LightningModule with a float network, and its data."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = DigitsNet()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return {
        "module": Module(),
        "loader": torch.utils.data.DataLoader(_samples(), batch_size=8),  # type: ignore[arg-type]
    }


def for_transformers(_: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a Trainer takes."""
    from transformers import TrainingArguments

    return {
        "classifier": Classifier(),
        "arguments": TrainingArguments(
            output_dir="out", max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
        ),
        "data": [{"images": image, "labels": label} for image, label in _samples()],
    }


def for_torchrun(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Set what torchrun sets, for one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        patch.setenv(name, value)
    return {}


NEEDS = {
    "lightning": for_lightning,
    "transformers": for_transformers,
    "torchrun": for_torchrun,
    "matplotlib": lambda _: {},
    "a C++ compiler": lambda _: {},
    "an Ascend device": lambda _: {},
}
"""What a block may need, by the comment in front of it, and what that adds to the names."""


def is_there(need: str) -> bool:
    """Say whether a block can run here."""
    if need == "a C++ compiler":
        return shutil.which("g++") is not None
    if need == "an Ascend device":
        return False
    return need == "torchrun" or importlib.util.find_spec(need) is not None
