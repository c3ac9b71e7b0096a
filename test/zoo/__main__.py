"""Run the zoo and write its table: ``python -m test.zoo --write docs/model_zoo.md``."""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .catalog import LIBRARIES, entries_of
from .pipeline import EXPORTERS, Record, TimeLimitError, run
from .table import record_from_json, write_table

if TYPE_CHECKING:
    from .entry import Entry

_LIMIT_SECONDS = 600


def main() -> None:
    """Run the chosen models that have no record yet, and write the table of all records."""
    options = _arguments()
    torch.set_num_threads(1)
    records = _load(options.records)
    for entry in _chosen(options.models):
        known = records.get(str(entry))
        retried = options.again or (options.retry and known is not None and not known.passed)
        if known is not None and not retried:
            continue
        record = _run_limited(entry, options.exporter or EXPORTERS)
        records[str(entry)] = record
        with options.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        print(f"{record.result:22} {entry} {record.seconds}s {record.detail}", flush=True)
    if options.write:
        order = [str(entry) for library in LIBRARIES for entry in entries_of(library)]
        write_table(options.write, [records[key] for key in order if key in records])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m test.zoo", description=__doc__)
    parser.add_argument("models", nargs="*", default=["*"], help="patterns of group/name")
    parser.add_argument("--records", type=Path, default=Path("zoo.jsonl"), help="kept results")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--again", action="store_true", help="run all that were chosen")
    parser.add_argument("--exporter", action="append", choices=EXPORTERS, help="default: both")
    parser.add_argument("--write", type=Path, help="write the table of all records to this file")
    return parser.parse_args()


def _chosen(patterns: list[str]) -> list[Entry]:
    everything = [entry for library in LIBRARIES for entry in entries_of(library)]
    return [e for e in everything if any(fnmatch.fnmatch(str(e), p) for p in patterns)]


def _load(path: Path) -> dict[str, Record]:
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [record_from_json(json.loads(line)) for line in lines]
    return {f"{record.group}/{record.name}": record for record in records}


def _run_limited(entry: Entry, exporters: Sequence[str]) -> Record:
    try:
        with _time_limit(_LIMIT_SECONDS):
            return run(entry, exporters)
    except TimeLimitError as error:
        return Record(entry.group, entry.name, entry.input_text, "time limit", str(error))


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        message = f"stopped after {seconds} s"
        raise TimeLimitError(message)

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    main()
