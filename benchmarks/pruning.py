"""Channel pruning beside Torch-Pruning, and what 2:4 sparsity costs a training step.

python benchmarks/pruning.py --networks resnet18 resnet50 mobilenet_v2 unet --ratios 0.3 0.5

Torch-Pruning and torchvision are used where they are installed, best in an environment of its own
(``pip install torch-pruning==1.6.1``). ``plan`` is copy, analysis and removal, in time of the
processor; the tools take turns. How much faster the pruned model is stands beside what its MACs
promise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import interleaved, parser, report, start
from networks import TrainingStep
from torch import Tensor, nn
from vision import mobilenet_v2, resnet18

import amct_fx

CONFIG = """prune_config {{ filter_pruner {{
    balanced_l2_norm_filter_prune {{ prune_ratio: {ratio} ascend_optimized: {aligned} }} }} }}"""
SPARSE = "prune_config {{ n_out_of_m_pruner {{ l1_selective_prune {{ update_freq: {freq} }} }} }}"


class UNet(nn.Module):
    """Two steps down and up, with transposed convolutions and concatenations."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_double(3, width), _double(width, 2 * width), _double(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.merge = nn.ModuleList([_double(4 * width, 2 * width), _double(2 * width, width)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``, sides a multiple of 4."""
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        x = self.merge[0](torch.cat([self.up[0](x), second], 1))
        x = self.merge[1](torch.cat([self.up[1](x), first], 1))
        y: Tensor = self.head(x)
        return y


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Return the networks by name; those of torchvision where it can be imported."""
    found: dict[str, Callable[[], nn.Module]] = {
        "resnet18": resnet18,
        "mobilenet_v2": mobilenet_v2,
        "unet": UNet,
    }
    try:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from test.zoo.libraries import declare_torchvision_operators

        declare_torchvision_operators()
        from torchvision import models
    except ImportError:
        return found
    for name in (
        "resnet18",
        "resnet50",
        "mobilenet_v2",
        "mobilenet_v3_large",
        "densenet121",
        "vgg11_bn",
    ):
        found[name] = getattr(models, name)
    return found


def with_ours(model: nn.Module, images: Tensor, ratio: float, aligned: bool) -> nn.Module:
    """Plan and cut with amct_fx."""
    cfg = CONFIG.format(ratio=ratio, aligned=str(aligned).lower())
    prepared = amct_fx.prepare_qat_amct(model, cfg, images, apply="prepare")
    return amct_fx.convert_amct(prepared)


def with_torch_pruning(model: nn.Module, images: Tensor, ratio: float, aligned: bool) -> nn.Module:
    """Plan and cut with Torch-Pruning: L2 norms of groups, the outputs left alone."""
    import torch_pruning as tp

    model = copy.deepcopy(model).eval()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    pruner = tp.pruner.MagnitudePruner(
        model,
        images,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=ratio,
        ignored_layers=[layers[-1]],
        round_to=16 if aligned else None,
    )
    pruner.step()
    return model


def size(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Return multiply-accumulates for one example, and parameters."""
    counts: list[int] = []

    def count(layer: Any, _inputs: Any, output: Tensor) -> None:
        places = output[0, 0].numel() if output.dim() > 2 else 1
        if isinstance(layer, nn.ConvTranspose2d):
            places = _inputs[0][0, 0].numel()
        counts.append(layer.weight.numel() * places)

    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model.eval()(images[:1])
    for hook in hooks:
        hook.remove()
    return sum(counts), sum(p.numel() for p in model.parameters())


def compare(
    name: str, make: Callable[[], nn.Module], ratio: float, arguments: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Prune one network with every tool."""
    torch.manual_seed(0)
    images = torch.randn(arguments.batch, 3, arguments.side, arguments.side, device=device)
    model = make().to(device).eval()
    prunes: dict[str, Callable[[], nn.Module]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for tool, prune in (("amct_fx", with_ours), ("Torch-Pruning", with_torch_pruning)):
        run = partial(prune, model, images[:1], ratio, arguments.aligned)
        row: dict[str, Any] = {"network": name, "ratio": ratio, "tool": tool}
        try:
            rows[tool] = row | _pruned(model, images, run(), arguments)
            prunes[tool] = run
        except ModuleNotFoundError:
            continue
        except Exception as error:  # what another tool raises is a result
            rows[tool] = row | {"failure": f"{type(error).__name__}: {str(error)[:60]}"}
    times = interleaved(prunes, device, repetitions=arguments.repetitions, warmup=1)
    for tool, timing in times.items():
        rows[tool]["plan, CPU s"] = timing.cpu_median
    return list(rows.values())


def _pruned(model: nn.Module, images: Tensor, pruned: nn.Module, arguments: Any) -> dict[str, Any]:
    """Measure a pruned model beside the full one."""
    macs, parameters = size(model, images)
    left_macs, left = size(pruned.eval(), images)
    if arguments.channels_last:
        model = copy.deepcopy(model).to(memory_format=torch.channels_last)
        pruned = copy.deepcopy(pruned).to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    with torch.no_grad():
        times = interleaved(
            {"full": lambda: model(images), "pruned": lambda: pruned(images)},
            images.device,
            repetitions=arguments.repetitions,
        )
    before, after = times["full"].cpu_median, times["pruned"].cpu_median
    faster, promised = before / after, macs / left_macs
    return {
        "plan, CPU s": 0.0,
        "parameters": left / parameters,
        "MACs": left_macs / macs,
        "CPU ms before": 1e3 * before,
        "CPU ms after": 1e3 * after,
        "faster": faster,
        "promised": promised,
        "of it": faster / promised,
        "failure": "",
    }


def sparsity_steps(arguments: Any, device: torch.device) -> list[dict[str, Any]]:
    """Time a training step of ResNet-18, dense and with 2:4 masks."""
    images = torch.randn(arguments.batch, 3, arguments.side, arguments.side, device=device)
    steps: dict[str, Callable[[], Any]] = {}
    for name, freq in (("dense", None), ("fixed mask", 0), ("refreshed every step", 1)):
        torch.manual_seed(0)
        model = resnet18(10).to(device)
        if freq is not None:
            model = amct_fx.prepare_qat_amct(model, SPARSE.format(freq=freq))
        steps[name] = TrainingStep(model, images)
    times = interleaved(steps, device, repetitions=arguments.repetitions, warmup=1)
    base = times["dense"].cpu_median
    wanted = {"dense": 1.0, "fixed mask": 1.05, "refreshed every step": 1.15}
    return [
        {
            "step": name,
            "CPU ms": 1e3 * timing.cpu_median,
            "of dense": timing.cpu_median / base,
            "wanted": wanted[name],
        }
        for name, timing in times.items()
    ]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", repetitions=7)
    known = networks()
    options.add_argument("--networks", nargs="*", choices=sorted(known), default=sorted(known))
    options.add_argument("--ratios", type=float, nargs="*", default=[0.3, 0.5])
    options.add_argument("--aligned", action="store_true", help="keep multiples of 16 channels")
    options.add_argument(
        "--channels-last", action="store_true", help="time the networks in this memory format"
    )
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--side", type=int, default=224)
    arguments = options.parse_args()
    device = start(arguments)
    rows = [
        row
        for name in arguments.networks
        for ratio in arguments.ratios
        for row in compare(name, known[name], ratio, arguments, device)
    ]
    if rows:
        report("Channel pruning", rows, arguments)
    report("A training step with 2:4 sparsity", sparsity_steps(arguments, device), arguments)


if __name__ == "__main__":
    main()
