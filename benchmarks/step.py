"""How much a training step costs with quantization: time, memory kept for backward, peak memory.

    python benchmarks/step.py                       # float, ours, torch.ao default and learnable
    python benchmarks/step.py --peers build/peers   # and other makers' tools, each in its own venv
    python benchmarks/step.py --device cuda --network resnet50 --batch 256 --autocast bfloat16

The network: 0.99 M parameters, 17 convolutions, one Linear; batch 16 of 3x32x32; SGD with momentum.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import MIB, Timing, interleaved, parser, peak_bytes, report, saved_bytes, start
from networks import SmallResNet, TrainingStep, resnet50
from tools import PEERS, ours, plain, torch_ao, torch_ao_learnable

HERE = Path(__file__).parent


class Remote:
    """The training step of another maker's tool, in a process of its own; call it to run a step."""

    def __init__(self, name: str, folder: Path, arguments: argparse.Namespace) -> None:
        python = _environment(name, folder)
        settings = [arguments.batch, arguments.size, arguments.device, arguments.threads]
        self._log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [python, HERE / "tools.py", name, *map(str, settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            message = f"the process ended; see {self._log.name}"
            raise RuntimeError(message)
        return json.loads(line)

    def _ask(self, request: str) -> Any:
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        return self._read()

    def __call__(self) -> None:
        """Run a step."""
        self._ask("run")

    def stopwatch(self, count: int) -> tuple[float, float]:
        """Return the seconds of a step: on the clock, of the processor."""
        wall, cpu = self._ask(f"stopwatch {count}")
        return wall, cpu

    def memory(self) -> tuple[int, int]:
        """Return the bytes kept for backward, and the peak of a step."""
        kept, peak = self._ask("memory")
        return kept, peak

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._log.close()


def _environment(name: str, folder: Path) -> Path:
    """Return the Python of the virtual environment of a tool; make it when there is none.

    It sees the packages of this environment, so PyTorch is the same and not installed again.
    """
    home = (folder / name).resolve()
    python = home / "bin" / "python"
    done = home / "installed"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        site = next((home / "lib").glob("python*/site-packages"))
        own = Path(torch.__file__).parents[1]
        (site / "with_torch.pth").write_text(f"{own}\n")
        command = [python, "-m", "pip", "install", "-q", *PEERS[name][1]]
        pinned = folder / "torch.txt"
        pinned.write_text(f"torch=={torch.__version__}\n")
        subprocess.run([*command, "-c", str(pinned)], check=True)
        done.touch()
    return python


def local_steps(
    arguments: argparse.Namespace, device: torch.device
) -> dict[str, TrainingStep | Callable[[], Any]]:
    """Build the steps that run in this process."""
    makers = {"float": plain, "amct_fx": ours}
    if arguments.network == "small" and arguments.autocast is None:
        makers |= {"torch.ao default": torch_ao, "torch.ao learnable": torch_ao_learnable}
    autocast = None if arguments.autocast is None else getattr(torch, arguments.autocast)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    steps: dict[str, Any] = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        network = resnet50() if arguments.network == "resnet50" else SmallResNet()
        steps[name] = TrainingStep(make(network.to(device), images), images, autocast)
    if arguments.compile:
        for name in ("float", "amct_fx"):
            step = steps[name]
            for _ in range(2):
                step()
            compiled = torch.compile(copy.deepcopy(step.model), fullgraph=True)
            steps[f"{name}, compiled"] = TrainingStep(compiled, images, autocast)
    return steps


def evaluation(step: TrainingStep) -> Callable[[], Any]:
    """Return the eval forward of a copy of the model."""
    model = copy.deepcopy(step.model).eval()

    @torch.no_grad()
    def run() -> None:
        model(step.images)

    return run


def rows_of(
    timings: dict[str, Timing],
    evaluations: dict[str, Timing],
    memory: dict[str, tuple[int, int]],
) -> list[dict[str, Any]]:
    """Return the rows of the table: each tool against float, compiled against compiled float."""
    rows = []
    for name, timing in timings.items():
        compiled = name.endswith(", compiled")
        base = timings["float, compiled" if compiled else "float"]
        row = {
            "tool": name,
            "step, ms": timing.wall_median * 1e3,
            "± %": 100 * timing.spread,
            "ratio": timing.wall_median / base.wall_median,
            "CPU, ms": timing.cpu_median * 1e3,
            "CPU ratio": timing.cpu_median / base.cpu_median,
        }
        if name in memory:
            kept, peak = memory[name]
            row |= {
                "kept, MiB": kept / MIB,
                "kept ratio": kept / memory["float"][0],
                "peak, MiB": peak / MIB,
                "peak ratio": peak / memory["float"][1],
            }
        if name in evaluations:
            row["eval CPU ratio"] = evaluations[name].cpu_median / evaluations["float"].cpu_median
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", repetitions=25)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--network", choices=["small", "resnet50"], default="small")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--size", type=int, default=32, help="height and width of the images")
    options.add_argument("--autocast", choices=["bfloat16", "float16"])
    options.add_argument("--no-compile", dest="compile", action="store_false")
    options.add_argument("--peers", type=Path, metavar="DIR", help="folder of their environments")
    options.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    arguments = options.parse_args()
    device = start(arguments)
    steps = local_steps(arguments, device)
    remotes: dict[str, Remote] = {}
    for name in arguments.only if arguments.peers else []:
        arguments.peers.mkdir(parents=True, exist_ok=True)
        try:
            remotes[name] = Remote(name, arguments.peers, arguments)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    for run in steps.values():
        run()  # calibrated and compiled before anything is measured
    eager = {name: step for name, step in steps.items() if not name.endswith(", compiled")}
    memory = {
        name: (saved_bytes(step.loss, step.model), peak_bytes(step, device))
        for name, step in eager.items()
    }
    memory |= {name: remote.memory() for name, remote in remotes.items()}
    runs = {**steps, **remotes}
    timings = interleaved(runs, device, repetitions=arguments.repetitions, count=2)
    evaluations = interleaved(
        {name: evaluation(eager[name]) for name in ("float", "amct_fx")},
        device,
        repetitions=arguments.repetitions,
        count=2,
    )
    for remote in remotes.values():
        remote.close()
    details = {name: timing.as_json() for name, timing in timings.items()}
    report("A training step", rows_of(timings, evaluations, memory), arguments, details)


if __name__ == "__main__":
    main()
