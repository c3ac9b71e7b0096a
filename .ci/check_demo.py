"""Compare the figures that ``amct-fx demo --json FILE`` wrote with what the project promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def failures(figures: dict[str, float]) -> list[str]:
    """Return the promises that ``figures`` break, as readable comparisons."""
    start = figures["float_accuracy"]
    promises = {
        "float_accuracy >= 0.97": start >= 0.97,
        "equal_codes >= 0.995": figures["equal_codes"] >= 0.995,
        "max_code_difference <= 2": figures["max_code_difference"] <= 2,
        "int8_onnx_bytes <= 0.35 * float_onnx_bytes": (
            figures["int8_onnx_bytes"] <= 0.35 * figures["float_onnx_bytes"]
        ),
        "seconds < 90": figures["seconds"] < 90,
    }
    for stage in ("prepared", "converted", "onnxruntime"):
        name = f"{stage}_accuracy"
        promises[f"|{name} - float_accuracy| <= 0.01"] = abs(figures[name] - start) <= 0.01
    return [promise for promise, kept in promises.items() if not kept]


def main() -> None:
    """Read the file named on the command line; exit with 1 when a promise is broken."""
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    broken = failures(figures)
    print(json.dumps(figures, indent=2))
    print("\n".join(f"broken: {promise}" for promise in broken) or "all promises kept")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
