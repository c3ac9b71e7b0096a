"""The results of the zoo in Markdown."""

from __future__ import annotations

import platform
import re
import textwrap
from collections import Counter
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .agreement import Agreement
from .layerwise import Layerwise
from .pipeline import FLOAT_FAILS, Record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["record_from_json", "write_table"]

_INTRODUCTION = """# Model zoo

Real architectures with random weights, each taken through the whole life of a quantized model:
`prepare_qat_amct`, two training steps with a finite loss, `convert_amct`, `torch.onnx.export`,
onnxruntime. The page is written by

```bash
python -m pip install -c constraints.txt -e '.[test,zoo]'
AMCT_FX_ZOO=all python -m pytest test/zoo        # checks every model
python -m test.zoo --write docs/model_zoo.md     # the same, and writes this page
```

Without the CUDA builds: install torch for the CPU first, then torchvision and timm with
`--no-deps`.

"""

_LEGEND = """
## How to read the tables

- **layers**: quantized layers of all layers of a quantizable type (for the others see the end of
  the page); **weights**: share of all weights with two dimensions or more, embeddings aside, that
  is quantized.
- **islands**: parts that stay Python code because tracing would change what they do; their layers
  are quantized all the same.
- **simulation = integers**: share of equal codes over all quantizers, prepared model in eval mode
  against converted model, and in brackets the share at the worst quantizer. Every quantizer is
  compared on equal inputs: one code that rounds differently moves many sums behind it, and in a
  deep network with random weights two correct models drift apart. No code anywhere differs by more
  than the limit of 2 steps. Codes differ where the int32 bias rounds, most behind a global
  pooling, whose few values lie close together.
- **drift**: largest difference of an output when nothing is equalised, as a part of its range.
- **integers = file**: the same shares, converted model against onnxruntime.
- **file by**: the exporters that wrote a file which passed, `torch.export` (`dynamo=True`) and
  TorchScript (`dynamo=False`). The first takes ten times as long, so large siblings of a checked
  model were written by the second only.
- **s**: seconds, one thread, on a machine that was doing other work, too.
"""


def record_from_json(values: dict[str, Any]) -> Record:
    """Return the record that ``dataclasses.asdict`` made ``values`` from."""
    for key in ("converted", "onnx"):
        values[key] = None if values[key] is None else Agreement(**values[key])
    for key in ("layerwise", "onnx_layerwise"):
        values[key] = None if values[key] is None else Layerwise(**values[key])
    return Record(**values)


def write_table(path: Path, records: list[Record]) -> None:
    """Write the page."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    parts = [_INTRODUCTION, _versions(), "\n\n", _totals(groups), _LEGEND]
    parts += [_group(name, members) for name, members in groups.items()]
    parts += [_failures(records), _islands(records), _float_layers(records)]
    path.write_text("".join(parts).rstrip() + "\n", encoding="utf-8")


def _versions() -> str:
    names = ("torch", "torchvision", "timm", "transformers", "onnx", "onnxruntime")
    found = ", ".join(f"{name} {version(name)}" for name in names)
    python = f"Python {platform.python_version()}"
    text = f"Written on {date.today()} with {python}, {found}, on two CPU cores."
    return "\n".join(textwrap.wrap(text, 100))


def _totals(groups: dict[str, list[Record]]) -> str:
    rows = [
        (name, str(sum(r.passed for r in members)), str(len(members)))
        for name, members in groups.items()
    ]
    return _markdown(("models", "pass", "of"), rows)


def _group(name: str, records: list[Record]) -> str:
    header = (
        "model",
        "input",
        "layers",
        "weights",
        "islands",
        "simulation = integers",
        "drift",
        "integers = file",
        "file by",
        "s",
        "result",
    )
    return f"\n## {name}\n\n" + _markdown(header, [_row(record) for record in records])


def _row(record: Record) -> tuple[str, ...]:
    written = [name for name, text in record.files.items() if text == "ok"]
    return (
        f"`{record.name}`",
        record.input,
        f"{record.quantized}/{record.layers}",
        f"{record.weights_quantized:.0%}",
        str(len(record.islands)),
        _shares(record.layerwise),
        "" if record.converted is None else f"{record.converted.difference:.1%}",
        _shares(record.onnx_layerwise),
        ", ".join(written),
        f"{record.seconds:.0f}",
        "ok" if record.passed else f"**{record.result}**",
    )


def _shares(found: Layerwise | None) -> str:
    if found is None:
        return ""
    return f"{_percent(found.equal)} ({_percent(found.worst_equal)})"


def _percent(share: float) -> str:
    """Round down: only what is equal everywhere is 100 %."""
    return "100 %" if share == 1 else f"{int(share * 10000) / 100:.2f} %"


def _failures(records: list[Record]) -> str:
    failed = [(f"`{r.name}`", r.result, _cell(r.detail)) for r in records if not r.passed]
    excused: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for exporter, why in record.files.items():
            if why != "ok":
                short = re.sub(r" Please feel free.*", "", why.removeprefix(FLOAT_FAILS))
                excused.setdefault((exporter, short), []).append(f"`{record.name}`")
    text = "\n## What fails\n\n"
    text += _markdown(("model", "stage", "why"), failed) if failed else "Nothing.\n"
    if excused:
        rows = [(", ".join(names), *map(_cell, key)) for key, names in excused.items()]
        text += "\nWhere one exporter refuses the float model too, the other wrote the file:\n\n"
        text += _markdown(("models", "exporter", "why"), rows)
    return text


def _islands(records: list[Record]) -> str:
    """Count the reasons of all islands, without the names in them."""
    reasons: Counter[str] = Counter()
    models: dict[str, set[str]] = {}
    for record in records:
        for island in record.islands:
            reason = _generic(island)
            reasons[reason] += 1
            models.setdefault(reason, set()).add(record.name)
    rows = [
        (_cell(reason), str(count), str(len(models[reason])))
        for reason, count in reasons.most_common()
    ]
    table = _markdown(("reason", "parts", "models"), rows)
    return f"\n## Why parts stay Python\n\n{table}"


def _generic(island: str) -> str:
    reason = re.sub(r"^.*?\): ", "", island)
    reason = re.sub(r" \[[^\]]*\]$", "", reason)
    return re.sub(r"argument '\w+'", "an argument", reason)[:120]


def _float_layers(records: list[Record]) -> str:
    reasons: Counter[str] = Counter()
    for record in records:
        for reason, count in record.float_reasons.items():
            reason = re.sub(r"_\d+'", "'", reason)  # the node of a second call
            reasons[re.sub(r"\d+ times", "several times", reason)] += count
    rows = [(_cell(reason), str(count)) for reason, count in reasons.most_common()]
    text = "\n## Why layers stay float\n\n"
    text += _markdown(("reason", "layers"), rows) if rows else "None does.\n"
    few = [r for r in records if r.passed and r.weights_quantized < 0.9]
    rows = [(f"`{r.name}`", f"{r.weights_quantized:.0%}") for r in few]
    if rows:
        text += "\nIn these models much weight stays float, in layers named above, modules\n"
        text += "of other types, such as `nn.MultiheadAttention`, `Conv1D` of transformers or\n"
        text += "`ScaledStdConv2d` of timm, or in bare parameters:\n\n"
        text += _markdown(("model", "weights quantized"), rows)
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
