"""The `dspark` command: what is done outside pytest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_dspark import doctor, setup
from pytest_dspark.cluster import RANK_LABEL, RUN_LABEL, Cluster, Host, RankState
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.evidence import default_root
from pytest_dspark.hosts import open_host
from pytest_dspark.kept import KeptStore
from pytest_dspark.preflight import survey

GRACE_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was done, 1 when something is left, 2 for a usage error."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.action(arguments))
    except ConfigError as error:
        print(f"dspark: {error}\n({error.remedy})", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark", description="Look after engines that pytest-dspark launched.")
    commands = parser.add_subparsers(required=True)
    for name, action, text in (
        ("ps", _ps, "list the ranks that runs of pytest-dspark left on a cluster"),
        ("stop", _stop, "stop and remove every rank of one run, on every host of a cluster"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--cluster", required=True, metavar="FILE|rehearsal", help="the cluster to look at")
        command.add_argument(
            "--out", metavar="DIR", default="", help="where runs are kept (default: the user's data folder)"
        )
        command.set_defaults(action=action)
    command.add_argument(
        "--run", required=True, metavar="ID", help="the run whose ranks are stopped; others are left alone"
    )
    _add_doctor(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    text = "say whether a launch would be allowed, host by host, with what to do; changes nothing"
    command = commands.add_parser("doctor", help=text, description=text)
    command.add_argument("--cluster", required=True, metavar="FILE|rehearsal", help="the cluster to look at")
    command.add_argument("--recipe", default="", metavar="NAME", help="default: the one that the cluster file names")
    command.add_argument("--profile", default="", metavar="NAME", help="default: the one that the recipe names")
    command.add_argument("--mark", default="production", help="whose profile (default: production)")
    command.add_argument(
        "--out", metavar="DIR", default="", help="where runs are kept (default: the user's data folder)"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(action=_doctor)


def _root(arguments: argparse.Namespace) -> Path:
    return Path(arguments.out).absolute() if arguments.out else default_root()


def _cluster(arguments: argparse.Namespace) -> Cluster:
    cluster = setup.read_cluster(setup.Options(root=Path.cwd(), cluster=arguments.cluster))
    assert cluster is not None
    return cluster


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    cluster = _cluster(arguments)
    return [open_host(entry, cluster=cluster.name, state=_root(arguments) / "hosts") for entry in cluster.hosts]


def _doctor(arguments: argparse.Namespace) -> int:
    options = setup.Options(Path.cwd(), arguments.cluster, arguments.recipe, arguments.profile)
    plan = setup.make_plans(options, [arguments.mark])[arguments.mark]
    hosts = {host.name: host for host in _hosts(arguments)}
    try:
        rows = survey(plan, hosts).rows
    finally:
        for host in hosts.values():
            host.close()
    print(json.dumps(doctor.as_json(rows), indent=1) if arguments.json else doctor.table(rows))
    return 0 if doctor.allowed(rows) else 1


def _ps(arguments: argparse.Namespace) -> int:
    good = True
    for host in _hosts(arguments):
        try:
            for state in host.owned(RUN_LABEL):
                print(_line(host, state))
        except DsparkError as error:
            good = False
            print(f"dspark: {error}", file=sys.stderr)
        finally:
            host.close()
    return 0 if good else 1


def _line(host: Host, state: RankState) -> str:
    run, rank = state.labels.get(RUN_LABEL), state.labels.get(RANK_LABEL)
    return f"{host.name}: run {run} rank {rank}: {state.name} {state.rank_id[:24]} {state.status}"


def _stop(arguments: argparse.Namespace) -> int:
    """Head first, every host tried whatever happens on another."""
    results = [_stop_on(host, arguments.run) for host in _hosts(arguments)]
    KeptStore(_root(arguments) / "kept").forget(arguments.run)
    if not any(found for found, _ in results):
        print(f"dspark: nothing of run {arguments.run} is on cluster {arguments.cluster}")
    return 0 if all(clean for _, clean in results) else 1


def _stop_on(host: Host, run_id: str) -> tuple[int, bool]:
    try:
        found = host.owned(RUN_LABEL, run_id)
        for state in found:
            print(f"stopping {_line(host, state)}")
            host.stop(state.rank_id, grace_s=GRACE_S)
            host.remove(state.rank_id)
        left = host.owned(RUN_LABEL, run_id)
    except DsparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 0, False
    finally:
        host.close()
    for state in left:
        print(f"dspark: LEFT BEHIND on {_line(host, state)}", file=sys.stderr)
    return len(found), not left
