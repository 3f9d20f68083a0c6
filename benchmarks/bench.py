"""Our streaming client beside the peers that a user would pick, in one run: `make bench`, docs/bench.md.

Exit code 0: as true as the best peer of this run and inside every bound; 1: not; 2: not all was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import BadRun, Report, Row, middle, read_log, read_streams, row
from benchmarks.peers import PEERS, Client, Job, environment, home, write_shared
from benchmarks.scenarios import LEVELS, QUICK, Level
from benchmarks.table import as_json, growth_text, level_text, line, titles, verdict_text
from benchmarks.usage import Usage, watched
from benchmarks.venvs import NotInstalled, folder, install, ready
from benchmarks.verdict import LATE_MS, OURS, REFERENCE, Verdict, judge
from pytest_dspark.calibration import ask_log, schedule_server

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "pytest-dspark" / "bench"
RUN_S = 300.0
LOG_S = 30.0


def own(module: str) -> Client:
    """A client of this folder; it runs in this interpreter."""

    def command(job: Job) -> list[str]:
        level = job.level
        return ["python", "-m", f"benchmarks.{module}", job.url, str(level.concurrency), str(level.requests)]

    def read(job: Job) -> Report:
        return read_streams((job.folder / "out").read_text("utf-8"))

    return Client(module, command, read)


OWN = (own(OURS), own(REFERENCE))
CLIENTS: Sequence[Client] = (*OWN, *PEERS)
NAMES = tuple(client.name for client in CLIENTS)


class Server:
    """The package's schedule server in a process of its own, and its log."""

    def __init__(self, root: str) -> None:
        self.root = root

    def clear(self) -> None:
        ask_log(self.root, "DELETE", timeout_s=LOG_S)

    def log(self) -> Mapping[str, Any]:
        return ask_log(self.root, timeout_s=LOG_S)


@contextmanager
def serving() -> Iterator[Server]:
    """Up until the block ends."""
    with schedule_server() as root:
        yield Server(root)


def measure(client: Client, level: Level, server: Server, cache: Path) -> Row | str:
    """One run of one client; a text says why there is no row."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as work:
        job = Job(server.root + level.scenario.path, level, Path(work), cache)
        server.clear()
        usage = watched(
            argv(client, job), env=environment(cache) | {"PYTHONPATH": str(ROOT)}, folder=job.folder, limit_s=RUN_S
        )
        try:
            return read(client, job, usage, server.log())
        except BadRun as error:
            return f"failed: {error}"


def argv(client: Client, job: Job) -> list[str]:
    """The command with its interpreter or program in full; a peer's is in its venv."""
    program, *rest = client.command(job)
    if client in OWN:
        return [sys.executable, *rest]
    return [str(folder(job.cache, client) / "bin" / program), *rest]


def read(client: Client, job: Job, usage: Usage, log: Mapping[str, Any]) -> Row:
    """The run's figures. Raises BadRun for a client that failed or whose report is not to be read."""
    if usage.status != 0:
        raise BadRun(f"exit {usage.status}: {last_line(job.folder)}")
    try:
        report = client.read(job)
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        raise BadRun(f"report: {type(error).__name__}: {error}; {last_line(job.folder)}") from error
    return row(report, read_log(log, job.level, client.warm_up(job.level)), usage)


def last_line(work: Path) -> str:
    """The last line that a client said, on its standard error if it said anything there."""
    for name in ("err", "out"):
        lines = [line for line in (work / name).read_text("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()[-200:]
    return "it said nothing"


# --- the run


def made_ready(chosen: Sequence[Client], options: argparse.Namespace) -> dict[str, str]:
    """Install what is missing; why a peer is not there, by name."""
    lacking: dict[str, str] = {}
    for peer in [client for client in chosen if client not in OWN]:
        if options.quick and not ready(options.cache, peer):
            lacking[peer.name] = "not installed: --quick installs nothing"
            continue
        try:
            install(options.cache, peer, index=options.torch_index, say=say)
        except NotInstalled as error:
            lacking[peer.name] = f"not installed: {error}"
            say(f"{peer.title}: {lacking[peer.name]}")
    return lacking


def rounds(
    chosen: Sequence[Client], levels: Sequence[Level], count: int, lacking: Mapping[str, str], cache: Path
) -> dict[Level, dict[str, list[Row | str]]]:
    """Every level, client after client, as often as there are rounds."""
    found: dict[Level, dict[str, list[Row | str]]] = {level: {one.name: [] for one in chosen} for level in levels}
    say(titles())
    steps = [(number, level, client) for number in range(count) for level in levels for client in chosen]
    with serving() as server:
        for step, (number, level, client) in enumerate(steps, 1):
            if client.name in lacking:
                found[level][client.name].append(lacking[client.name])
                continue
            say(f"[{step}/{len(steps)}] round {number + 1} of {count}: {level.name}: {client.title}")
            measured = measure(client, level, server, cache)
            say(line(client.title, measured))
            found[level][client.name].append(measured)
    return found


def settled(measured: Sequence[Row | str]) -> Row | str:
    """The median of the rounds; a round without a row leaves none."""
    texts = [one for one in measured if isinstance(one, str)]
    return texts[0] if texts else middle([one for one in measured if isinstance(one, Row)], LATE_MS)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one round at A C1 and A C16, with the peers that are there"
    )
    parser.add_argument("--only", type=_names, default=NAMES, help=f"clients, with commas: {', '.join(NAMES)}")
    parser.add_argument("--levels", type=_levels, default=None, help="levels, with commas: A1, A256, B64, …")
    parser.add_argument("--rounds", type=int, default=None, help="rounds whose median is reported (3)")
    parser.add_argument("--json", type=Path, help="write every round and the medians to this file")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where the peers' venvs are ({CACHE})")
    parser.add_argument("--torch-index", default="", help="index of torch's CPU build, where pip would take CUDA's")
    options = parser.parse_args(arguments)
    options.levels = options.levels or (QUICK if options.quick else LEVELS)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.cache = options.cache.expanduser().resolve()
    return options


def _names(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no client {unknown[0]!r}; there are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in chosen)


def _levels(text: str) -> tuple[Level, ...]:
    known = {level.name.replace(" C", ""): level for level in LEVELS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no level {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def report(measured: dict[Level, dict[str, list[Row | str]]], options: argparse.Namespace) -> Verdict:
    """Print the table and write the file."""
    medians = {level: {name: settled(one) for name, one in found.items()} for level, found in measured.items()}
    verdict = judge(medians, levels=LEVELS, clients=NAMES)
    named = {client.name: client.title for client in CLIENTS}
    for level, found in medians.items():
        print(level_text(level, {named[name]: one for name, one in found.items()}), end="\n\n")
    print(growth_text(medians, options.only), verdict_text(verdict), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(as_json(medians, measured, verdict), indent=1) + "\n", "utf-8")
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    home(options.cache).mkdir(parents=True, exist_ok=True)
    write_shared(options.cache)
    chosen = [client for client in CLIENTS if client.name in options.only]
    lacking = made_ready(chosen, options)
    return report(rounds(chosen, options.levels, options.rounds, lacking, options.cache), options).code


if __name__ == "__main__":
    sys.exit(main())
