"""AOTInductor, another target: ``torch.export`` of the converted model, compiled to a library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.rnn = nn.GRU(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.norm(self.conv(x))))
        return self.fc(self.rnn(x.mean(3).transpose(1, 2)[:, :4])[0])


def test_the_compiled_model_agrees_at_every_batch_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prepared, x = prepare_qat_amct(Net()), torch.randn(4, 3, 8, 8)
    for _ in range(2):
        prepared(x)
    converted = convert_amct(prepared)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(converted, (x,), dynamic_shapes=({0: batch},))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "net.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for size in (1, 7):
            x = torch.randn(size, 3, 8, 8)
            expected = converted(x)
            difference = (compiled(x) - expected).abs()
            # A code that lies on a rounding tie may fall to the other side, no more.
            assert difference.max() <= 0.03 * expected.abs().max()
            assert difference.median() <= 1e-5
