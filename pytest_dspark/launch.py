"""Start every rank, wait until one token was generated, prove what runs, and stop all of it again.

Order: workers first, each to its rendezvous line; then the head; then readiness, which is a generated token and not an
open port. A rank that exits is seen at the next look. Stopping takes the head first, tries every host whatever happens
on another, and ends with a listing by this run's label that must be empty.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_dspark import behaviour, freeze, gate, inventory, manifest
from pytest_dspark.cluster import FINGERPRINT_LABEL, OWNER_LABEL, RUN_LABEL, Host, RankSpec, RankState
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError, HostError, LaunchError
from pytest_dspark.evidence import RunFolder, write_whole
from pytest_dspark.gpus import memory_back
from pytest_dspark.owner import orphaned
from pytest_dspark.plan import Plan, as_json, launch_order
from pytest_dspark.preflight import leftovers, look_at
from pytest_dspark.sanitize import mask_text
from pytest_dspark.signs import ApiSigns, Patience, RankSigns, judge
from pytest_dspark.weights import Hasher

HEARTBEAT_S = 15.0
MARKER_WAIT_S = 10.0
MEMORY_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where one launch takes place: the plan, its hosts, the run folder, and the seams for tests. `check` raises what a
    watcher has found; without one the ranks are looked at here."""

    plan: Plan
    hosts: Mapping[str, Host]
    run: RunFolder
    say: Callable[[str], None]
    cancelled: Callable[[], bool]
    hasher: Hasher | None = None
    check: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def folder(self) -> Path:
        return self.run.profile(self.plan.mark)

    def host(self, spec: RankSpec) -> Host:
        return self.hosts[spec.host]

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: rank ids in rank order. `owned` is False for an attached one, which is never stopped."""

    run_id: str
    rank_ids: tuple[str, ...]
    owned: bool = True

    @property
    def ids(self) -> dict[int, str]:
        """The ids by rank."""
        return dict(enumerate(self.rank_ids))


def labelled(spec: RankSpec, run_id: str, fingerprint: str, owner: str = "") -> RankSpec:
    """With the marks of ownership. `owner` is the process that will stop it, empty if nobody must remove it by himself."""
    marks = ((RUN_LABEL, run_id), (FINGERPRINT_LABEL, fingerprint), *(((OWNER_LABEL, owner),) if owner else ()))
    return replace(spec, labels=(*spec.labels, *marks))


def start(site: Site, *, started: dict[int, str], owner: str = "") -> Engine:
    """Start workers, then the head. `started` is filled as ranks come to life, so that a failure can stop them."""
    plan, limits = site.plan, site.plan.recipe.launch
    site.run.write(f"{plan.mark}/plan.json", as_json(plan))
    for spec in launch_order(plan):
        _check_cancelled(site)
        site.say(f"starting rank {spec.rank} on {spec.host}")
        rank_id = site.host(spec).start(labelled(spec, site.run.run_id, plan.fingerprint, owner))
        started[spec.rank] = rank_id
        site.host(spec).follow(rank_id, site.log_path(spec.rank))
        if spec.rank and limits.worker_ready:
            _await_line(site, spec.rank, limits.worker_ready, limits.rendezvous_s, started)
    return Engine(site.run.run_id, tuple(started[spec.rank] for spec in plan.specs))


def _check_cancelled(site: Site) -> None:
    if site.cancelled():
        raise LaunchError("CANCELLED", "the run was interrupted while the engine was being launched")


def _await_line(site: Site, rank: int, pattern: str, limit_s: float, started: Mapping[int, str]) -> None:
    """Wait until the worker's log says that it waits for the head."""
    wanted, deadline = re.compile(pattern), site.clock() + limit_s
    beat = site.clock() + HEARTBEAT_S
    while not wanted.search(read_text(site.log_path(rank))):
        _check_cancelled(site)
        check_running(site, started)
        if site.clock() > deadline:
            raise LaunchError(
                "RENDEZVOUS_TIMEOUT",
                f"rank {rank} ({site.plan.specs[rank].host}) {_waited(site, rank, limit_s, 'its rendezvous line')}",
            )
        beat = _heartbeat(site, rank, beat)
        site.sleep(site.plan.recipe.launch.poll_s)


def _waited(site: Site, rank: int, limit_s: float, what: str) -> str:
    return f"did not print {what} within {limit_s:g} s; last log lines: {last_lines(site.log_path(rank))}"


def _heartbeat(site: Site, rank: int, beat: float) -> float:
    if site.clock() < beat:
        return beat
    site.say(f"waiting; rank {rank} last said: {last_lines(site.log_path(rank), 1)}")
    return site.clock() + HEARTBEAT_S


def read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


def last_lines(path: Path, count: int = 3) -> str:
    """The last lines of a log, for a message; empty lines and long tails are cut."""
    lines = [line.strip() for line in read_text(path)[-8000:].splitlines() if line.strip()]
    return " | ".join(line[-240:] for line in lines[-count:]) or "(nothing)"


def keep_log(site: Site, rank: int, rank_id: str) -> None:
    """Fetch the rank's whole log into the run folder; secret values that it was given are masked in what is kept. Raises
    HARNESS if the folder cannot be written: full, gone, read-only."""
    spec = site.plan.specs[rank]
    try:
        site.host(spec).save_log(rank_id, site.log_path(rank))
        raw = read_text(site.log_path(rank))
        masked = mask_text(raw, site.run.secrets)
        if masked != raw:
            write_whole(site.log_path(rank), masked)
    except OSError as error:
        raise LaunchError("HARNESS", f"the log of rank {rank} ({spec.host}) could not be kept: {error}") from error


# --- is it alive?


def states(site: Site, ids: Mapping[int, str]) -> dict[int, RankState]:
    return {rank: site.host(site.plan.specs[rank]).state(rank_id) for rank, rank_id in ids.items()}


def check_running(site: Site, ids: Mapping[int, str]) -> None:
    """Raise LaunchError if any rank is not running or was restarted, naming the one that went first."""
    if site.check:
        return site.check()
    error = lost(site, states(site, ids))
    if error:
        raise error


def lost(site: Site, found: Mapping[int, RankState]) -> LaunchError | None:
    """The rank that ended the engine, from one look at all of them: see `signs.judge`."""
    ranks = [_as_seen(site, rank, state) for rank, state in sorted(found.items())]
    return judge(ranks, ApiSigns(), Patience())


def _as_seen(site: Site, rank: int, state: RankState) -> RankSigns:
    return RankSigns(
        rank,
        site.plan.specs[rank].host,
        state,
        down_s=math.inf if state.status != "running" else None,
        seen_s=0.0,
        restarted=f"was restarted {state.restart_count} times"
        if state.status == "running" and state.restart_count
        else "",
        tail=last_lines(site.log_path(rank)),
    )


# --- readiness and proof


def await_ready(site: Site, engine: Engine, endpoint: Endpoint, *, limit_s: float) -> float:
    """Wait for one generated token; returns the seconds it took. API up without generation is told apart."""
    poll_s, begin = site.plan.recipe.launch.poll_s, site.clock()
    beat, api_up = begin + HEARTBEAT_S, False
    while True:
        _check_cancelled(site)
        check_running(site, engine.ids)
        api_up = api_up or endpoint.health()
        if api_up and _probe(site, endpoint):
            return site.clock() - begin
        if site.clock() - begin > limit_s:
            state = "the API answers but no token was generated" if api_up else "the API does not answer"
            code = "ENGINE_WEDGED" if api_up else "READY_TIMEOUT"
            raise LaunchError(
                code,
                f"not ready after {limit_s:g} s: {state}; head's last log lines: {last_lines(site.log_path(0))}",
            )
        beat = _heartbeat(site, 0, beat)
        site.sleep(poll_s)


def _probe(site: Site, endpoint: Endpoint) -> bool:
    try:
        reply = endpoint.generate_one(deadline_s=site.plan.recipe.launch.probe_s)
    except DsparkError:
        return False
    return bool(reply.usage and reply.usage.completion_tokens)


def prove(site: Site, engine: Engine, endpoint: Endpoint) -> gate.GateReport:
    """Ask the canaries, then read both ranks, compare, and write runtime-gate.json. Raises nothing for a failed gate."""
    frozen = freeze.read(site.plan.recipe)
    api = gate.ask_api(endpoint, site.plan.recipe.canaries)
    if frozen and frozen.reference(site.plan.mark):
        api = replace(api, behaviour=behaviour.observed(endpoint))
        site.run.write(f"{site.plan.mark}/behaviour.json", api.behaviour.as_json() if api.behaviour else {})
    deadline = site.clock() + MARKER_WAIT_S
    ranks = read_ranks(site, engine)
    while gate.missing_markers(site.plan, ranks) and site.clock() < deadline and not site.cancelled():
        site.sleep(0.5)
        ranks = read_ranks(site, engine)
    hashed = site.plan.recipe.inside.hashed if frozen else ()
    ranks = [whole(site, rank, hashed) for rank in ranks]
    report = gate.examine(site.plan, ranks, api)
    site.run.write(f"{site.plan.mark}/runtime-gate.json", gate.as_file(site.plan, ranks, api, report))
    return report


def read_ranks(site: Site, engine: Engine) -> list[gate.Rank]:
    return [read_rank(site, spec, engine) for spec in site.plan.specs]


def read_rank(site: Site, spec: RankSpec, engine: Engine) -> gate.Rank:
    """What one running rank shows but what lies inside it (`whole`)."""
    rank_id, run_id = engine.rank_ids[spec.rank], engine.run_id if engine.owned else ""
    host, entry = site.host(spec), site.plan.cluster.hosts[spec.rank]
    keep_log(site, spec.rank, rank_id)
    facts = host.inspect(rank_id)
    return gate.Rank(
        number=spec.rank,
        host=spec.host,
        facts=facts,
        image=host.image(facts.image_id if entry.docker else spec.bundle),
        log_text=read_text(site.log_path(spec.rank)),
        manifest_sha256=_manifest_sum(site, host, rank_id, spec),
        manifest=_manifest(site, host, rank_id, spec),
        process=entry.process,
        machine=host.facts(),
        model_revision=_marker(site, host, rank_id, spec),
        run_id=run_id,
    )


def whole(site: Site, rank: gate.Rank, hashed: Sequence[str] = ()) -> gate.Rank:
    """The rank with what lies inside it, every file of the `hashed` packages included, and with its model folder."""
    return _with_model(site, _with_inventory(site, rank, hashed))


def _with_inventory(site: Site, rank: gate.Rank, hashed: Sequence[str]) -> gate.Rank:
    """The rank with what lies inside it, told by its own interpreter."""
    spec, inside = site.plan.specs[rank.number], site.plan.recipe.inside
    python = spec.argv[0] if rank.process else inside.python
    extra = sorted(manifest.patched_files(manifest.parse(rank.manifest)))
    asked = inventory.order(inside, paths=spec.package_folders, root=_root(rank), hashed=hashed, extra=extra)
    return replace(rank, inventory=inventory.take(site.host(spec), rank.facts.rank_id, python, asked))


def _with_model(site: Site, rank: gate.Rank) -> gate.Rank:
    """The rank with its model folder, as its host shows it; its mount is compared apart."""
    entry = site.plan.cluster.hosts[rank.number]
    return replace(rank, model=look_at(site.host(site.plan.specs[rank.number]), entry, site.plan, site.hasher))


def _root(rank: gate.Rank) -> int:
    """The first process of the rank as it is numbered where the inventory runs; 0: it cannot be told from others."""
    if rank.process:
        return int(rank.facts.rank_id.partition(":")[0])
    return 0 if rank.facts.options.get("PidMode") == "host" else 1


def _marker(site: Site, host: Host, rank_id: str, spec: RankSpec) -> str | None:
    """The revision in the model folder, as the rank itself sees it."""
    marker, entry = site.plan.recipe.pins.model_marker, site.plan.cluster.hosts[spec.rank]
    folder = entry.model if entry.process else site.plan.recipe.serve.model_target
    if not marker or not folder:
        return None
    done = host.read_in(rank_id, ["cat", f"{folder}/{marker}"])
    return done.text.strip() if done.code == 0 else None


def _manifest(site: Site, host: Host, rank_id: str, spec: RankSpec) -> str | None:
    """The runtime manifest as the rank itself sees it."""
    target = _manifest_target(site, spec)
    done = host.read_in(rank_id, ["cat", target]) if target else None
    return done.text if done and done.code == 0 else None


def _manifest_sum(site: Site, host: Host, rank_id: str, spec: RankSpec) -> str | None:
    """sha256 of the runtime manifest as the rank itself sees it."""
    target = _manifest_target(site, spec)
    done = host.read_in(rank_id, ["sha256sum", target]) if target else None
    return done.text.split()[0] if done and done.code == 0 and done.text else None


def _manifest_target(site: Site, spec: RankSpec) -> str:
    target = site.plan.recipe.pins.manifest_target
    return target if any(mount.target == target for mount in spec.mounts) else ""


# --- stopping


@dataclass(slots=True)
class Troubles:
    """What went wrong while stopping. A host that did not answer once is not asked again: each call would wait its time-out."""

    problems: list[str] = field(default_factory=list)
    unreached: dict[str, str] = field(default_factory=dict)

    def attempt(self, host: Host, action: Callable[[], object]) -> None:
        if host.name in self.unreached:
            return
        try:
            action()
        except DsparkError as error:
            self.problems.append(str(error))
            if error.code == "HOST_UNREACHABLE":
                self.unreached[host.name] = error.message
        except OSError as error:  # of this machine: a full disk keeps no rank from being stopped
            self.problems.append(f"{host.name}: {error}")


def stop(
    site: Site,
    ids: Mapping[int, str],
    *,
    run_id: str,
    gpus: Mapping[str, Mapping[str, Any]] | None = None,
    free_gib: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Save both logs, stop head first, remove, and list what is left. Never raises: what went wrong is in the result.

    `gpus` is what preflight read of each host's GPUs, `free_gib` the free memory of each host before the launch; both are
    compared with what is so now.
    """
    troubles, begin = Troubles(), site.clock()
    save_logs(site, ids, troubles)
    ends: dict[int, RankState] = {}
    for rank, rank_id in sorted(ids.items()):
        site.say(f"stopping rank {rank} on {site.plan.specs[rank].host}")
        troubles.attempt(_host_of(site, rank), lambda r=rank, i=rank_id: ends.__setitem__(r, _stop_one(site, r, i)))  # type: ignore[misc]
    left = _sweep(site, run_id, troubles)
    reached = {name: host for name, host in site.hosts.items() if name not in troubles.unreached}
    entries = [entry for entry in site.plan.cluster.hosts if entry.name in reached]
    return {
        "stopped": [
            {"rank": rank, "host": site.plan.specs[rank].host, "status": state.status, "exit_code": state.exit_code}
            for rank, state in sorted(ends.items())
        ],
        "left_behind": left + _not_stopped(site, ids, ends, run_id, troubles),
        "ports_taken": _ports(site, troubles),
        "gpu_memory": memory_back(reached, entries, gpus or {}, clock=site.clock, sleep=site.sleep),
        "host_memory": _memory(site, reached, free_gib or {}),
        "problems": troubles.problems,
        "elapsed_s": round(site.clock() - begin, 3),
    }


def save_logs(site: Site, ids: Mapping[int, str], troubles: Troubles) -> None:
    """The whole log of every rank that can be reached."""
    for rank, rank_id in sorted(ids.items()):
        troubles.attempt(_host_of(site, rank), lambda r=rank, i=rank_id: keep_log(site, r, i))  # type: ignore[misc]


def _host_of(site: Site, rank: int) -> Host:
    return site.host(site.plan.specs[rank])


def _stop_one(site: Site, rank: int, rank_id: str) -> RankState:
    host = _host_of(site, rank)
    state = host.stop(rank_id, grace_s=site.plan.recipe.launch.stop_grace_s)
    try:
        keep_log(site, rank, rank_id)
    finally:
        host.remove(rank_id)
    return state


def _not_stopped(
    site: Site, ids: Mapping[int, str], ends: Mapping[int, RankState], run_id: str, troubles: Troubles
) -> list[dict[str, str]]:
    """Ranks on hosts that did not answer: where each is, and what to type once the host is back."""
    source = site.plan.cluster.source or "FILE"
    return [
        _named(spec.host, RankState(ids[spec.rank], spec.name, "not stopped: the host does not answer"))
        | {"command": f"dspark stop --cluster {source} --run {run_id}"}
        for spec in site.plan.specs
        if spec.rank in ids and spec.rank not in ends and spec.host in troubles.unreached
    ]


def _sweep(site: Site, run_id: str, troubles: Troubles) -> list[dict[str, str]]:
    """What still carries this run's label is stopped too (a start may have been interrupted before its id was known)."""
    for host in site.hosts.values():
        troubles.attempt(host, lambda h=host: _sweep_host(site, h, run_id))  # type: ignore[misc]
    left: list[dict[str, str]] = []
    for host in site.hosts.values():
        troubles.attempt(host, lambda h=host: left.extend(_named(h.name, state) for _, state in leftovers([h], run_id)))  # type: ignore[misc]
    return left


def _sweep_host(site: Site, host: Host, run_id: str) -> None:
    for _, state in leftovers([host], run_id):
        host.stop(state.rank_id, grace_s=site.plan.recipe.launch.stop_grace_s)
        host.remove(state.rank_id)


def _named(host: str, state: RankState) -> dict[str, str]:
    return {"host": host, "id": state.rank_id, "name": state.name, "status": state.status}


def _ports(site: Site, troubles: Troubles) -> list[dict[str, Any]]:
    """Who still listens on the engine's ports, on every host that answers."""
    taken: list[dict[str, Any]] = []

    def look(host: Host) -> None:
        for port in (site.plan.port, site.plan.master_port):
            owner = host.listener(port)
            if owner:
                taken.append({"host": host.name, "port": port, "owner": owner})

    for host in site.hosts.values():
        troubles.attempt(host, lambda h=host: look(h))  # type: ignore[misc]
    return taken


def _memory(site: Site, hosts: Mapping[str, Host], before: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Free memory of each host before the launch and now, in GiB; waited for, since an engine gives back much at once."""
    margin = site.plan.recipe.launch.memory_margin_gib
    rows = []
    for name, host in hosts.items():
        free, deadline = before.get(name), site.clock() + MEMORY_WAIT_S
        after = host.readings().free_memory_gib
        while margin and free and after is not None and after < free - margin and site.clock() < deadline:
            site.sleep(1.0)
            after = host.readings().free_memory_gib
        rows.append({"host": name, "before_gib": free, "after_gib": after, "margin_gib": margin or None})
    return rows


def clear_orphans(site: Site, spare: str) -> list[dict[str, str]]:
    """Stop and remove what dead runs of this very machine left under our names; `spare` is a run that was kept on purpose.
    Returns what was removed. What is not provably ours and dead is left alone, and preflight names it."""
    removed: list[dict[str, str]] = []
    for spec in site.plan.specs:
        try:
            state = site.host(spec).find(spec.name)
            if state and orphaned(state) and state.labels.get(RUN_LABEL) not in ("", None, spare):
                site.host(spec).stop(state.rank_id, grace_s=site.plan.recipe.launch.stop_grace_s)
                site.host(spec).remove(state.rank_id)
                removed.append(_named(spec.host, state) | {"run": state.labels[RUN_LABEL]})
        except HostError:
            continue  # preflight says what is wrong with the host
    return removed


def adopt(site: Site, *, run_id: str | None) -> Engine:
    """The engine that is already there: every rank found by name, running, with this fingerprint (kept engine), or any
    (attach: run_id None). Raises NAME_TAKEN or LAUNCH_FAILED."""
    found: Sequence[RankState | None] = [site.host(spec).find(spec.name) for spec in site.plan.specs]
    for spec, state in zip(site.plan.specs, found, strict=True):
        if state is None or state.status != "running":
            what = state.status if state else "not there"
            raise LaunchError("LAUNCH_FAILED", f"{spec.host}: {spec.name} is {what}, expected a running rank to use")
        if run_id is not None and state.labels.get(RUN_LABEL) != run_id:
            raise LaunchError(
                "NAME_TAKEN",
                f"{spec.host}: {spec.name} belongs to run {state.labels.get(RUN_LABEL)}, expected the kept run {run_id}",
            )
        if run_id is not None and state.labels.get(FINGERPRINT_LABEL) != site.plan.fingerprint:
            raise LaunchError(
                "NAME_TAKEN",
                f"{spec.host}: the kept {spec.name} was launched from another plan; stop it with dspark stop --run {run_id}",
            )
    states_ = [state for state in found if state is not None]
    engine = Engine(
        run_id or states_[0].labels.get(RUN_LABEL, ""),
        tuple(state.rank_id for state in states_),
        owned=run_id is not None,
    )
    for spec in site.plan.specs:
        site.host(spec).follow(engine.rank_ids[spec.rank], site.log_path(spec.rank))
    return engine


def left_by(site: Site, run_id: str) -> tuple[Engine | None, str]:
    """The engine that a dead run left up, if every rank is there, running, that run's and of this plan. Else None, and why
    what there is of that run cannot be used: empty if nothing is there, or if the name is somebody else's."""
    found = [(spec, site.host(spec).find(spec.name)) for spec in site.plan.specs]
    if any(state and state.labels.get(RUN_LABEL) != run_id for _, state in found):
        return None, ""
    reasons = [why for spec, state in found if (why := _unfit(site.plan, spec, state))]
    if not reasons:
        return adopt(site, run_id=run_id), ""
    return None, "; ".join(reasons) if leftovers(site.hosts.values(), run_id) else ""


def _unfit(plan: Plan, spec: RankSpec, state: RankState | None) -> str:
    """Why a rank that a dead run left cannot be used; empty if it can."""
    if state is None or state.status != "running":
        return f"{spec.host}: {spec.name} is {state.status if state else 'not there'}"
    if state.labels.get(FINGERPRINT_LABEL) != plan.fingerprint:
        return f"{spec.host}: {spec.name} was launched from another plan"
    return ""
