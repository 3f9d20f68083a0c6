"""The `dspark` command: what is done outside pytest."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_dspark import behaviour, datasets, doctor, freeze, packs_cli, setup, show_cli
from pytest_dspark.cluster import RANK_LABEL, RUN_LABEL, Cluster, Host, RankState
from pytest_dspark.errors import ConfigError, DsparkError, printable
from pytest_dspark.evidence import RunFolder, default_root
from pytest_dspark.hosts import open_host
from pytest_dspark.kept import KeptStore
from pytest_dspark.plan import Plan
from pytest_dspark.preflight import survey

GRACE_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was done, 1 when something is left or was refused, 2 for a usage error."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.action(arguments))
    except ConfigError as error:
        print(f"dspark: {error}\n({error.remedy})", file=sys.stderr)
        return 2
    except DsparkError as error:
        print(f"dspark: {error}\n({error.remedy})", file=sys.stderr)
        return 1


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
    _add_freeze(commands)
    _add_behaviour(commands)
    _add_data(commands)
    packs_cli.add(commands)
    text = "show known defects to gate, client, judges, sanitiser and verifier: each must be caught, each clean twin must pass"
    commands.add_parser("selftest", help=text, description=text).set_defaults(action=_selftest)
    show_cli.add(commands)
    return parser


def _add_data(commands: Any) -> None:
    text = (
        "fetch a published question set from its official place, checked by its sha256; or say how to install bfcl-eval"
    )
    command = commands.add_parser("data", help=text, description=text)
    command.add_argument("name", choices=[*datasets.DATASETS, "bfcl"], help="gsm8k: fetched; bfcl: what to type")
    command.add_argument("--data", metavar="DIR", default="", help="where sets lie (default: the user's data folder)")
    command.set_defaults(action=_data)


def _data(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.data).absolute() if arguments.data else datasets.data_folder()
    if arguments.name == "bfcl":
        print(datasets.bfcl_steps(folder))
        return 0
    dataset = datasets.DATASETS[arguments.name]
    path = folder / dataset.file
    if path.is_file():
        datasets.read(dataset, folder)
        print(f"{path}: already there, sha256 {dataset.sha256}")
        return 0
    print(f"{datasets.fetch(dataset, folder)}: {dataset.questions} questions, sha256 {dataset.sha256}")
    return 0


def _add_doctor(commands: Any) -> None:
    text = "say whether a launch would be allowed, host by host, with what to do; changes nothing"
    command = _planned(commands, "doctor", text)
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(action=_doctor)


def _add_freeze(commands: Any) -> None:
    text = "write what the running, proven engine is made of and how it answers, and pin it in the recipe's overlay"
    command = _planned(commands, "freeze", text)
    command.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="times that the prompts are asked (least 2)"
    )
    command.add_argument("--to", metavar="DIR", default="", help="where to write (default: beside the recipe)")
    command.set_defaults(action=_freeze)


def _add_behaviour(commands: Any) -> None:
    text = "say how far two engines are apart in their log probabilities: frozen manifests, or folders of runs"
    command = commands.add_parser("behaviour", help=text, description=text)
    command.add_argument("one", metavar="A")
    command.add_argument("other", metavar="B")
    command.add_argument("--mark", default="production", help="whose profile (default: production)")
    command.set_defaults(action=_behaviour)


def _planned(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command that needs a plan."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--cluster", required=True, metavar="FILE|rehearsal", help="the cluster to look at")
    command.add_argument("--recipe", default="", metavar="NAME", help="default: the one that the cluster file names")
    command.add_argument("--profile", default="", metavar="NAME", help="default: the one that the recipe names")
    command.add_argument("--mark", default="production", help="whose profile (default: production)")
    command.add_argument(
        "--out", metavar="DIR", default="", help="where runs are kept (default: the user's data folder)"
    )
    return command


def _plan(arguments: argparse.Namespace) -> Plan:
    options = setup.Options(Path.cwd(), arguments.cluster, arguments.recipe, arguments.profile)
    return setup.make_plans(options, [arguments.mark])[arguments.mark]


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
    plan, hosts = _plan(arguments), {host.name: host for host in _hosts(arguments)}
    try:
        rows = survey(plan, hosts).rows
    finally:
        for host in hosts.values():
            host.close()
    print(json.dumps(doctor.as_json(rows), indent=1) if arguments.json else printable(doctor.table(rows)))
    return 0 if doctor.allowed(rows) else 1


def _freeze(arguments: argparse.Namespace) -> int:
    """Exit code 0 when manifest and overlay were written."""
    from pytest_dspark import freezing  # who freezes asks an engine, and needs a client

    if arguments.repeats < 2:
        raise ConfigError("USAGE", f"--repeats must be at least 2, found {arguments.repeats}: a spread needs two")
    plan, hosts = _plan(arguments), {host.name: host for host in _hosts(arguments)}
    api_key = os.environ.get("DSPARK_API_KEY", "")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder(Path(folder), "freeze", (api_key,) if api_key else ())
            data = freezing.take(plan, hosts, run, api_key=api_key, repeats=arguments.repeats, say=_say)
        target = Path(arguments.to) if arguments.to else plan.recipe.folder
        path, overlay, digest = freeze.write(plan.recipe, data, target)
    finally:
        for host in hosts.values():
            host.close()
    print(f"{path}: sha256 {digest}\n{overlay}: pins it")
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    """Exit code 0 if every defect was caught and every clean twin passed."""
    from pytest_dspark import selftesting  # it shows defects to a client too

    outcome = selftesting.run()
    for missed in outcome.missed:
        print(f"dspark: NOT CAUGHT: {missed}", file=sys.stderr)
    print(f"dspark: self-test: {outcome}")
    return 1 if outcome.missed else 0


def _say(text: str) -> None:
    print(f"dspark: {text}", file=sys.stderr)


def _behaviour(arguments: argparse.Namespace) -> int:
    """Exit code 0 if both are one engine within the tolerance of the first frozen one, 1 if not."""
    one, other = (freeze.reading(Path(name), arguments.mark) for name in (arguments.one, arguments.other))
    apart = behaviour.distance(one.observation, other.observation)
    tolerance = one.tolerance if one.repeats else other.tolerance
    near = behaviour.within(apart, tolerance)
    print(f"{'one engine' if near else 'another engine'}: {behaviour.sentence(apart, tolerance)}")
    return 0 if near else 1


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


if __name__ == "__main__":
    sys.exit(main())
