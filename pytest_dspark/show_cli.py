"""The commands of the `dspark` command that show packs: report, compare, export. They need no library but for drawings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_dspark import compare, comparing, pack, packfile, r0b0bench, report, summary
from pytest_dspark.errors import ConfigError, printable
from pytest_dspark.evidence import default_root
from pytest_dspark.pack import Pack, PackError

KINDS = ("r0b0bench", "junit", "github-summary")
SUMMARY = "GITHUB_STEP_SUMMARY"


def add(commands: Any) -> None:
    """Add the commands to the `dspark` command."""
    _add_report(commands)
    _add_compare(commands)
    _add_export(commands)


def _add_report(commands: Any) -> None:
    text = "write the report of a run or pack as one HTML file; drawings need the extra `report`"
    command = commands.add_parser("report", help=text, description=text)
    _add_pack(command, "pack", "RUN|PACK")
    command.add_argument(
        "--out", metavar="FILE", default="report.html", help="where to write (default: report.html here)"
    )
    command.set_defaults(action=_report)


def _add_compare(commands: Any) -> None:
    text = "say whether B is slower than A; exit code 0 no regression, 1 a regression, 2 refused or nothing decided"
    command = commands.add_parser("compare", help=text, description=text)
    _add_pack(command, "a", "A")
    command.add_argument("b", metavar="B", help="the same, of the later run")
    command.add_argument(
        "--limit", type=_percent, default=compare.LIMIT, metavar="PERCENT",
        help=f"a smaller slowdown is no regression (default {compare.LIMIT:g})",
    )  # fmt: skip
    command.add_argument("--only", action="append", default=[], metavar="CHECK", help="only these rows; shell patterns")
    command.add_argument("--html", metavar="FILE", default="", help="write it as one HTML file too")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(action=_compare)


def _add_export(commands: Any) -> None:
    text = "write a pack in the form of another tool: a ledger entry, a CI's JUnit report, a GitHub step summary"
    command = commands.add_parser("export", help=text, description=text)
    command.add_argument("kind", choices=KINDS)
    _add_pack(command, "pack", "PACK")
    command.add_argument(
        "--out", metavar="FILE", default="", help=f"default: standard output; github-summary: ${SUMMARY} if it is set"
    )
    command.set_defaults(action=_export)


def _add_pack(command: argparse.ArgumentParser, name: str, shown: str) -> None:
    command.add_argument(
        name, metavar=shown, help="a published folder, a run folder or its id, or a tar or zip archive"
    )


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"expected a percentage from 0 to below 100, found {text}")
    return value


@contextmanager
def opened(name: str) -> Iterator[Pack]:
    """The pack of a folder, an archive, or the id of a run of the default evidence root. Raises USAGE with the reason."""
    path = Path(name)
    if not path.exists() and (default_root() / "runs" / name).is_dir():
        path = default_root() / "runs" / name
    try:
        with packfile.opened(path) as folder:
            _published(folder)
            yield pack.load(folder)
    except (PackError, ValueError) as error:
        raise ConfigError("USAGE", f"{name}: {error}") from error


def _published(folder: Path) -> None:
    """Raises USAGE for the folder of a run that has no pack."""
    if (folder / "rows.jsonl").is_file() and not (folder / pack.SUMS).is_file():
        told = json.loads((folder / "run.json").read_bytes()) if (folder / "run.json").is_file() else {}
        why = told.get("refused") or f"it is {told.get('status', 'incomplete')}"
        raise ConfigError("USAGE", f"{folder}: this run has no pack: {why}")


def _report(arguments: argparse.Namespace) -> int:
    with opened(arguments.pack) as found:
        text = report.report(found)
    return _written(Path(arguments.out), text)


def _written(path: Path, text: str) -> int:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError("USAGE", f"{path}: cannot be written: {error.strerror}") from error
    print(path)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    with opened(arguments.a) as was, opened(arguments.b) as now:
        answer = compare.compare(was, now, limit=arguments.limit, only=arguments.only)
    if arguments.html:
        _written(Path(arguments.html), comparing.html(answer))
    print(
        json.dumps(comparing.as_json(answer), indent=1, ensure_ascii=False)
        if arguments.json
        else printable(compare.text(answer))
    )
    return answer.exit_code


def _export(arguments: argparse.Namespace) -> int:
    with opened(arguments.pack) as found:
        text = _made(arguments.kind, found)
    if arguments.kind == "github-summary" and not arguments.out and os.environ.get(SUMMARY):
        append(Path(os.environ[SUMMARY]), text)
        return 0
    if arguments.out:
        return _written(Path(arguments.out), text)
    print(text)
    return 0


def _made(kind: str, found: Pack) -> str:
    if kind == "r0b0bench":
        return json.dumps(r0b0bench.entry(found), indent=2, ensure_ascii=False) + "\n"
    return found.junit.decode("utf-8") if kind == "junit" else summary.summary(found)


def append(path: Path, text: str) -> None:
    """Add to a step summary. Raises USAGE with the reason."""
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError("USAGE", f"{path}: cannot be written: {error.strerror}") from error
