"""The commands of the `dspark` command that look at packs: verify, rejudge, sign, pack. They need no library at all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pytest_dspark import composition, option2, packfile, rejudging, signing, verify
from pytest_dspark.errors import ConfigError, printable
from pytest_dspark.pack import OPTION2


def add(commands: Any) -> None:
    """Add the commands to the `dspark` command."""
    _add_verify(commands)
    _add_rejudge(commands)
    _add_sign(commands)
    _add_pack(commands)


def _add_pack(commands: Any) -> None:
    text = "join the long window and production of one build on the same hosts: OPTION2_PACK.md"
    command = commands.add_parser("pack", help=text, description=text)
    command.add_argument("long1m", metavar="RUN1", help="folder of the run of long1m")
    command.add_argument("production", metavar="RUN2", help="folder of the run of production, which came after it")
    command.add_argument("--to", required=True, metavar="DIR", help="a new folder, outside git work trees")
    command.set_defaults(action=_pack)


def _add_verify(commands: Any) -> None:
    text = "say whether a pack is what it says, offline; exit code 0 verified, 1 not, 2 no pack"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("pack", metavar="PACK", help="a published folder, a run folder, or a tar or zip archive")
    command.add_argument(
        "--allowed-signers", metavar="FILE", default="", help="keys that you trust, as ssh-keygen -Y verify reads them"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(action=_verify)


def _add_rejudge(commands: Any) -> None:
    text = "judge the stored findings of a pack under the limits of another recipe; changes nothing"
    command = commands.add_parser("rejudge", help=text, description=text)
    command.add_argument("pack", metavar="PACK")
    command.add_argument("--recipe", required=True, metavar="FILE", help="the recipe whose limits are applied")
    command.set_defaults(action=_rejudge)


def _add_sign(commands: Any) -> None:
    text = "sign the statement of a pack with an SSH key; a second lab adds a second signature"
    command = commands.add_parser("sign", help=text, description=text)
    command.add_argument("pack", metavar="PACK")
    command.add_argument(
        "--key", required=True, metavar="FILE", help="a private key, or a public one whose half the agent holds"
    )
    command.set_defaults(action=_sign)


def _verify(arguments: argparse.Namespace) -> int:
    allowed = Path(arguments.allowed_signers) if arguments.allowed_signers else None
    if allowed and not allowed.is_file():
        raise ConfigError("USAGE", f"{allowed}: no such file of allowed signers")
    report = verify.verify(Path(arguments.pack), allowed_signers=allowed)
    if arguments.json:
        print(json.dumps(_as_json(report), indent=1))
    else:
        print("\n".join([*map(str, report.problems[:50]), *_more(report), report.line]))
    return 0 if report.verified else 1


def _more(report: verify.Report) -> list[str]:
    return [f"and {len(report.problems) - 50} more"] if len(report.problems) > 50 else []


def _as_json(report: verify.Report) -> dict[str, Any]:
    return {
        "verified": report.verified,
        "problems": [{"file": one.file, "text": one.text} for one in report.problems],
        "claimed": list(report.claimed),
        "signers": list(report.signers),
        "accepted": report.accepted,
        "publishable": report.publishable,
        "counts": dict(report.counts),
    }


def _rejudge(arguments: argparse.Namespace) -> int:
    """Exit code 0 if every finding is judged as before, 1 if one is judged otherwise."""
    with packfile.opened(Path(arguments.pack)) as folder:
        changes = list(rejudging.rejudge(folder, Path(arguments.recipe)))
    print(printable("\n".join(changes)) or "every finding is judged as before")
    return 1 if changes else 0


def _pack(arguments: argparse.Namespace) -> int:
    runs = {mark: Path(getattr(arguments, mark)) for mark in option2.MARKS}
    made = composition.compose(runs, Path(arguments.to).absolute())
    print(f"{made / OPTION2}\nverify it with\n    dspark verify {made}")
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.pack)
    if not folder.is_dir():
        raise ConfigError("USAGE", f"{folder}: a pack that is signed must be a folder")
    with packfile.opened(folder) as target:
        made = signing.sign(target, Path(arguments.key))
    print(f"{made}\nanyone checks it with\n    {signing.command(made)}")
    print('where ALLOWED_SIGNERS holds the line\n    SIGNER namespaces="pytest-dspark" (your public key)')
    return 0
