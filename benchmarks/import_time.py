"""How long ``import amct_fx`` takes beyond ``import torch``, and what it must not load.

    python benchmarks/import_time.py

Ends with an error if onnx, matplotlib, torch_npu or protobuf were loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from harness import Timing, parser, report, start

FORBIDDEN = ("onnx", "onnxruntime", "onnxscript", "matplotlib", "torch_npu", "google.protobuf")

SCRIPT = """
import gc, json, sys, time
import torch
gc.disable()  # a full collection may fall into any import
begin = time.perf_counter(), time.process_time()
{statement}
end = time.perf_counter(), time.process_time()
loaded = [name for name in {forbidden!r} if name in sys.modules]
print(json.dumps([end[0] - begin[0], end[1] - begin[1], loaded]))
"""


def measure(statement: str) -> tuple[float, float, list[str]]:
    """Run ``statement`` in a new process after ``import torch``, with compiled files allowed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    script = SCRIPT.format(statement=statement, forbidden=FORBIDDEN)
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment
    )
    wall, cpu, loaded = json.loads(result.stdout)
    return wall, cpu, loaded


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "", repetitions=9).parse_args()
    start(arguments)
    statements = {
        "import amct_fx": "import amct_fx",
        "of that, parts of PyTorch": "import torch.ao.quantization.fx._decomposed, numpy.random",
    }
    rows: list[dict[str, Any]] = []
    bad: set[str] = set()
    for name, statement in statements.items():
        timing = Timing()
        measure(statement)  # compiles
        for _ in range(arguments.repetitions):
            wall, cpu, loaded = measure(statement)
            timing.wall.append(wall)
            timing.cpu.append(cpu)
            bad |= set(loaded)
        rows.append(
            {
                "beyond `import torch`": name,
                "s": timing.wall_median,
                "fastest, s": min(timing.wall),
                "CPU, s": timing.cpu_median,
                "loads": ", ".join(sorted(loaded)) or "none of them",
            }
        )
    report("Import", rows, arguments)
    if bad:
        message = f"import amct_fx loads {', '.join(sorted(bad))}"
        raise SystemExit(message)


if __name__ == "__main__":
    main()
