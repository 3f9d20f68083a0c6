"""The owner of the one live engine, in the controller process alone.

A profile is launched at most once; a failure is remembered and answered with BLOCKED afterwards. Launching, proving and
stopping run in one thread of their own, so that a signal never tears through them: whoever waits is released, the thread
sees the cancellation and ends its step in order. xdist workers ask through `remote.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

from pytest_dspark import changes, gate, kept, launch
from pytest_dspark.cluster import Host, HostEntry, Readings
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import BlockedError, DsparkError, LaunchError
from pytest_dspark.evidence import RunFolder, Stopwatch, utc_now
from pytest_dspark.gpus import held
from pytest_dspark.owner import owner, take_over
from pytest_dspark.plan import Plan
from pytest_dspark.preflight import refuse, survey
from pytest_dspark.resume import Left
from pytest_dspark.signs import Patience
from pytest_dspark.verdict import Finding
from pytest_dspark.vitals import UNREAD, Vitals
from pytest_dspark.watcher import Watched, Watcher
from pytest_dspark.weights import Hasher

# After a request failed: how long a rank's end may come after its silence.
SETTLE_S = 2.0
# An engine that was proven once generates a token within this many probes, or it is not healthy.
PROVEN_PROBES = 5
# The longest sleep of a thread that waits for another: the kernel may hand a signal to any thread, and Python's handler
# runs only when the main thread wakes.
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How the engine is acquired: `keep` leaves it up at the end, `attach` never starts or stops one, `left` are the
    engines that the resumed run may have left up, by profile mark. `sums` is the file of known digests if every byte of
    the weights is to be hashed."""

    keep: bool = False
    attach: bool = False
    api_key: str = ""
    left: Mapping[str, Left] = field(default_factory=dict)
    sums: Path | None = None


@dataclass(slots=True)
class Session:
    """What happened to one profile: the engine, or the first cause why there is none."""

    mark: str
    plan: Plan
    site: launch.Site | None = None
    hosts: dict[str, Host] = field(default_factory=dict)
    started: dict[int, str] = field(default_factory=dict)
    engine: launch.Engine | None = None
    error: DsparkError | None = None
    report: gate.GateReport | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, Any] | None = None
    launch_error: DsparkError | None = None
    stopped: dict[str, Any] | None = None
    reused: bool = False
    adopted: str = ""
    not_adopted: str = ""
    hold: kept.Hold | None = None
    vitals: Vitals | None = None
    watcher: Watcher | None = None
    claim: socket | None = None
    free_gib: dict[str, float | None] = field(default_factory=dict)
    orphans: list[dict[str, str]] = field(default_factory=list)
    say: Callable[[str], None] = print


class Stage:
    """Launch once, remember, switch, stop. All methods may be called from any thread."""

    def __init__(
        self,
        plans: Mapping[str, Plan],
        run: RunFolder,
        options: StageOptions,
        *,
        open_host: Callable[[HostEntry, Plan], Host],
        say: Callable[[str], None],
        kept_store: kept.KeptStore,
    ) -> None:
        self._sessions = {mark: Session(mark, plan) for mark, plan in plans.items()}
        self._run, self._options, self._say = run, options, say
        self._open_host, self._kept = open_host, kept_store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dspark-engine")
        self._changed = threading.Condition()
        self.cases: dict[str, tuple[str, str]] = {}
        self.suites: tuple[str, ...] = ()
        self._outstanding: dict[str, int] = {}
        self._abandoned = False
        self._alone, self._together, self._waiting_alone = False, 0, 0
        self._cancelled = threading.Event()
        self._closed = False
        self._live: Session | None = None
        self._watch_stop = threading.Event()

    # --- what the tests of this session are

    def expect(self, cases: Sequence[tuple[str, str, str]], suites: Sequence[str] = ()) -> None:
        """The test cases of this session as (node id, profile, check), and the files that they are in, which a node id does not
        always tell; the first word counts, and every worker's is equal."""
        with self._changed:
            if not self.cases:
                self.suites = tuple(suites)
                self.cases = {nodeid: (mark, check) for nodeid, mark, check in cases}
                for mark, _ in self.cases.values():
                    self._outstanding[mark] = self._outstanding.get(mark, 0) + 1
            self._changed.notify_all()

    def done(self, nodeid: str) -> None:
        """One test case was reported to the end."""
        with self._changed:
            mark, _ = self.cases.get(nodeid, ("", ""))
            if mark:
                self._outstanding[mark] -= 1
            self._changed.notify_all()

    def abandon(self) -> None:
        """A worker died and its cases will not all be run: nobody waits for them any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _wait_for_turn(self, mark: str, remaining: int) -> None:
        """Wait until at most `remaining` cases of the profile are unreported."""
        with self._changed:
            while not (self._cancelled.is_set() or self._abandoned or self._outstanding.get(mark, 0) <= remaining):
                self._changed.wait(LOOK_S)

    def _wait_for_earlier(self, mark: str) -> None:
        """Profiles take turns in the order of collection: wait until every case of the earlier ones was reported."""
        order = list(self._outstanding)
        for earlier in order[: order.index(mark)] if mark in order else ():
            self._wait_for_turn(earlier, 0)

    # --- sharing

    def enter(self, mark: str, exclusive: bool) -> None:
        """Wait for the engine: alone for checks that time something, together for the others. Raises the first cause."""
        with self._changed:
            self._waiting_alone += exclusive
            try:
                while not (self._cancelled.is_set() or self._free_for(exclusive)):
                    self._changed.wait(LOOK_S)
            finally:
                self._waiting_alone -= exclusive
            if exclusive:
                self._alone = True
            else:
                self._together += 1
        try:
            self._still_there(mark)
        except DsparkError:
            self.leave(exclusive)
            raise

    def _still_there(self, mark: str) -> None:
        """Whoever waited while the engine was lost has tried nothing: it is BLOCKED, with the first cause."""
        try:
            self.alive(mark)
        except DsparkError as error:
            if self._cancelled.is_set():
                raise
            raise BlockedError("BLOCKED", f"first cause: {error}") from error

    def _free_for(self, exclusive: bool) -> bool:
        """Whoever wants it alone goes before new sharers, so that sharers cannot keep it for ever."""
        if self._alone:
            return False
        return self._together == 0 if exclusive else self._waiting_alone == 0

    def leave(self, exclusive: bool) -> None:
        """Give the engine back."""
        with self._changed:
            if exclusive:
                self._alone = False
            else:
                self._together -= 1
            self._changed.notify_all()

    # --- acquiring

    def acquire(self, mark: str, *, patient: bool = False) -> dict[str, Any]:
        """The engine of the profile, launched and proven now if it was not yet.

        `patient` callers (xdist workers) first wait until every case of the profile that is live has been reported.
        Returns what `Endpoint` needs. Raises BlockedError with the first cause.
        """
        session = self._launched(mark, patient)
        if session.error:
            raise BlockedError("BLOCKED", f"first cause: {session.error}")
        return {"base_url": session.plan.base_url, "model": session.plan.served_model, "api_key": self._options.api_key}

    def _launched(self, mark: str, patient: bool) -> Session:
        session = self._session(mark)
        if patient:
            self._wait_for_earlier(mark)
        if not (session.engine or session.error):
            self._thread_do(lambda: self._ensure(session))
        return session

    def _session(self, mark: str) -> Session:
        if mark not in self._sessions:
            raise BlockedError("BLOCKED", f"profile {mark} was not planned in this session")
        return self._sessions[mark]

    def _thread_do(self, action: Callable[[], None]) -> None:
        """Run in the engine thread and wait; an interrupted waiter leaves the thread to `close`."""
        if not self._closed:
            _await(self._thread.submit(action))

    def _ensure(self, session: Session) -> None:
        if session.engine or session.error:
            return
        if self._cancelled.is_set():
            session.error = session.launch_error = LaunchError("CANCELLED", "the run was interrupted")
            return
        if self._live is not None:
            self._release(self._live)
        try:
            self._acquire(session)
        except DsparkError as error:
            self._failed(session, error)
        except OSError as error:
            self._failed(session, LaunchError("HARNESS", f"evidence could not be written: {error}"))
        finally:
            if session.report is None and session.error is None:
                self._failed(session, LaunchError("HARNESS", "the launch ended unexpectedly; see the traceback"))

    def _failed(self, session: Session, error: DsparkError) -> None:
        """Remember the first cause. What was started without being proven ready is stopped now; a failed gate leaves the
        engine for the teardown case."""
        session.error = session.error or error
        if session.report is None:
            session.launch_error = error
        self._say(f"{session.mark}: {error}")
        if not self._cancelled.is_set():
            runs, plan = self._run.path.parent, session.plan
            for line in changes.said(runs, self._run.run_id, session.mark, plan.profile.name):
                self._say(line)
        if session.report is None or self._cancelled.is_set():
            self._release(session)

    def _acquire(self, session: Session) -> None:
        plan = session.plan
        session.hosts = {entry.name: self._open_host(entry, plan) for entry in plan.cluster.hosts}
        session.say = self._say_for(session)
        hasher = Hasher(self._options.sums, session.say, self._cancelled.is_set) if self._options.sums else None
        watcher = session.watcher = self._watcher(session)
        session.site = launch.Site(
            plan, session.hosts, self._run, session.say, self._cancelled.is_set, hasher, watcher.check
        )
        self._live = session
        session.hold = None if self._options.attach else self._kept.hold(plan)
        if self._adopted(session):
            return
        session.engine = self._start(session)
        self._record(session)
        self._prove(session, plan.recipe.launch.ready_s)
        self._say(f"{session.mark}: engine proven and ready")

    def _prove(self, session: Session, limit_s: float) -> None:
        """Wait for a token, begin to watch, and let the gate say what runs. Raises LaunchError."""
        site, engine = session.site, session.engine
        assert site is not None and engine is not None
        plan, alive = session.plan, partial(self.alive, session.mark)
        endpoint = Endpoint(plan.base_url, plan.served_model, api_key=self._options.api_key, alive=alive)
        with self._phase(session, "ready"):
            launch.await_ready(site, engine, endpoint, limit_s=limit_s)
        if session.watcher:
            session.watcher.serve(Endpoint(plan.base_url, plan.served_model, api_key=self._options.api_key))
        self._look_after(session)
        with self._phase(session, "gate"):
            session.report = launch.prove(site, engine, endpoint)
        if session.error:
            raise session.error
        failure = session.report.first_failure
        if failure:
            raise LaunchError("GATE_FAILED", f"gate.{failure[0]}: {failure[1].message}")

    def _preflight(self, session: Session, *, launching: bool) -> None:
        with self._phase(session, "preflight"):
            hasher = session.site.hasher if session.site else None
            seen = survey(session.plan, session.hosts, launching=launching, hasher=hasher)
            session.seen = seen.as_json()
            self._run.write(f"{session.mark}/preflight.json", session.seen)
            refuse(seen)
            for warning in seen.warnings():
                session.say(f"warning: {warning}")

    def _start(self, session: Session) -> launch.Engine:
        site = session.site
        assert site is not None
        kept_by = None if self._options.attach else self._kept.peek(session.plan)
        if session.hold is not None:
            self._clear_orphans(session, site)
        self._preflight(session, launching=not (self._options.attach or kept_by))
        session.free_gib = {} if kept_by else {n: host.readings().free_memory_gib for n, host in session.hosts.items()}
        assert session.watcher is not None
        session.watcher.start()
        if self._options.attach:
            return launch.adopt(site, run_id=None)
        if kept_by and self._kept.claim(session.plan, kept_by):
            return self._reuse(session, site, kept_by)
        with self._phase(session, "start"):
            return launch.start(site, started=session.started, owner="" if self._options.keep else owner())

    def _clear_orphans(self, session: Session, site: launch.Site) -> None:
        """Nobody else on this machine works with this engine (`hold`), so what a dead owner left of it may go."""
        session.orphans = launch.clear_orphans(site, self._kept.run_of(session.plan))
        for one in session.orphans:
            session.say(
                f"removed {one['name']} {one['id'][:24]} on {one['host']}: run {one['run']} of this machine is dead"
            )
        if session.orphans:
            self._run.write(f"{session.mark}/orphans.json", {"removed": session.orphans})

    def _reuse(self, session: Session, site: launch.Site, run_id: str) -> launch.Engine:
        session.reused = True
        session.say(f"reusing the engine kept by run {run_id}, to be proven again")
        engine = launch.adopt(site, run_id=run_id)
        session.started = engine.ids
        return engine

    def _record(self, session: Session) -> None:
        """Whose engine this run uses, so that a run that resumes this one finds it."""
        engine = session.engine
        assert engine is not None
        self._write_engine(session, engine.run_id, engine.owned, engine.ids)

    def _write_engine(self, session: Session, run_id: str, owned: bool, ids: Mapping[int, str]) -> None:
        ranks = {str(rank): rank_id for rank, rank_id in ids.items()}
        self._run.write(f"{session.mark}/engine.json", {"run": run_id, "owned": owned, "ranks": ranks})

    # --- the engine of the run that is resumed

    def _adopted(self, session: Session) -> bool:
        """Whether the engine that the resumed run left up was taken over and proven again. If it cannot be, it is stopped:
        its owner is dead, and only one engine may be up."""
        left, site = self._options.left.get(session.mark), session.site
        if left is None or self._options.attach or self._kept.run_of(session.plan):
            return False
        assert site is not None
        if session.hold is None:
            session.say(f"the engine of run {left.run_id}, if it is up, is held by another session and left alone")
            return False
        engine, why = launch.left_by(site, left.run_id)
        if engine is None:
            self._clear(session, left.run_id, {}, why)
            return False
        return self._taken_over(session, engine, left)

    def _taken_over(self, session: Session, engine: launch.Engine, left: Left) -> bool:
        session.say(f"taking over the engine that run {left.run_id} left up, to be proven again")
        session.claim = take_over(left.run_id)
        self._preflight(session, launching=False)
        session.engine, session.started, session.reused = engine, engine.ids, True
        assert session.watcher is not None
        session.watcher.start()
        self._record(session)
        ready_s = session.plan.recipe.launch.ready_s
        limit_s = min(ready_s, PROVEN_PROBES * session.plan.recipe.launch.probe_s) if left.proven else ready_s
        try:
            self._prove(session, limit_s)
        except LaunchError as error:
            if self._cancelled.is_set() or error.code == "INFRA_RISK":
                raise
            self._let_go(session)
            self._clear(session, left.run_id, engine.ids, str(error))
            return False
        session.adopted = left.run_id
        self._say(f"{session.mark}: engine of run {left.run_id} proven again and ready")
        return True

    def _let_go(self, session: Session) -> None:
        """Forget an engine that was not proven again, and what was remembered of it."""
        self._end_watching(session)
        watcher = session.watcher = self._watcher(session)
        if session.site is not None:
            session.site = replace(session.site, check=watcher.check)
        with self._changed:
            session.engine = session.error = session.report = None
            session.started, session.reused = {}, False

    def _clear(self, session: Session, run_id: str, ids: dict[int, str], why: str) -> None:
        """Stop what is left of the resumed run on every host, keep its logs under another name, and say why."""
        if not why:
            return
        assert session.site is not None
        session.not_adopted = why
        session.say(f"the engine of run {run_id} is stopped and a new one started: {why}")
        stopped = launch.stop(session.site, ids, run_id=run_id)
        self._write_engine(session, self._run.run_id, True, {})  # what is started next is this run's own
        self._run.write(f"{session.mark}/left-stopped.json", {"run": run_id, "why": why, **stopped})
        for rank in ids:
            with suppress(FileNotFoundError):
                session.site.log_path(rank).rename(session.site.folder / f"left-rank{rank}.log")

    def _say_for(self, session: Session) -> Callable[[str], None]:
        watch = Stopwatch.started()
        return lambda text: self._say(f"{session.mark} +{watch.elapsed_s:.0f}s: {text}")

    def _phase(self, session: Session, name: str) -> Phase:
        return Phase(session.phases, name, session.say)

    # --- watching

    def _watcher(self, session: Session) -> Watcher:
        """Watches the ranks from their start on; begun by `start`."""
        plan, limits = session.plan, session.plan.recipe.watch
        watched = Watched(
            entries=plan.cluster.hosts,
            hosts=session.hosts,
            ids=lambda: session.engine.ids if session.engine else session.started,
            log=lambda rank: self._run.profile(session.mark) / f"rank{rank}.log",
            port=plan.port,
            timed=lambda: self._alone,
            say=session.say,
            on_lost=partial(self._lost, session),
        )
        return Watcher(watched, Patience(limits.gone_s, limits.api_s, limits.wedge_s), spin_w=limits.spin_w)

    def _lost(self, session: Session, error: LaunchError) -> None:
        """Every open request ends at its next look; then both logs are saved, before anything is stopped. While the engine is
        being launched the launch itself ends with it."""
        engine = session.engine
        if engine is None or session.site is None or session.stopped is not None:
            return
        if self._remember(session, engine, error):
            troubles = launch.Troubles()
            launch.save_logs(session.site, engine.ids, troubles)
            for problem in troubles.problems:
                session.say(f"a log could not be saved: {problem}")

    def _remember(self, session: Session, engine: launch.Engine | None, error: DsparkError) -> bool:
        """Whether this became the first cause; not if another came first, or if it is of an engine that was let go."""
        with self._changed:
            if session.error is not None or session.engine is not engine:
                return False
            session.error = error
            self._say(f"{session.mark}: {error}")
            return True

    def _look_after(self, session: Session) -> None:
        """Begin to read the hosts of the engine."""
        brake = partial(self._brake, session, session.engine)
        brakes = session.plan.recipe.brakes
        record = partial(self._note_reading, session.mark)
        session.vitals = Vitals(session.hosts, brakes, on_crossing=brake, say=session.say, record=record)
        session.vitals.start()

    def _note_reading(self, mark: str, host: str, found: Readings) -> None:
        with suppress(OSError):  # a full disk: the brakes work on
            self._run.note(f"{mark}/readings.jsonl", {"at": utc_now(), "host": host, **found.as_json()})

    def _end_watching(self, session: Session) -> None:
        if session.watcher is not None:
            session.watcher.stop()
        if session.vitals is not None:
            session.vitals.stop()

    def _brake(self, session: Session, engine: launch.Engine | None, host: str, why: str, found: Readings) -> None:
        """A host is about to die: every open request ends at its next look, and the engine is stopped, unless it is
        somebody else's."""
        if not self._remember(session, engine, LaunchError("INFRA_RISK", f"{host}: {why}")):
            return
        with suppress(OSError):  # the brake works on a full disk too
            reading = {"host": host, "why": why, "at": utc_now(), "reading": found.as_json()}
            self._run.write(f"{session.mark}/brake.json", reading)
        if engine is not None and engine.owned:
            with suppress(RuntimeError):  # the session is over, and has stopped it
                self._thread.submit(self._release, session)
        else:
            session.say("the engine was attached, so it is left up: stop it by hand before the host dies")

    def readings(self, mark: str) -> dict[str, dict[str, Any]]:
        """Free memory in GiB and highest temperature in °C of every host of the profile, as last read (see Vitals.now)."""
        session = self._session(mark)
        if session.vitals is None:
            return {entry.name: UNREAD.as_json() | {"age_s": None} for entry in session.plan.cluster.hosts}
        return session.vitals.now()

    def alive(self, mark: str) -> None:
        """Raise the first cause if the engine is known to be lost, was stopped, or the run is being stopped. Engines of other
        profiles answer at the same address, so a stopped one must never be asked."""
        if self._cancelled.is_set():
            raise LaunchError("CANCELLED", "the run was interrupted")
        session = self._session(mark)
        if session.error:
            raise session.error
        if self._live is not session:
            raise LaunchError("CANCELLED", f"the engine of {mark} was stopped before this case was done")

    def diagnose(self, mark: str) -> DsparkError | None:
        """After a failed request: the rank that ended, if one did. It is the first cause from then on. In a run that is being
        stopped a request ends because its engine is."""
        session = self._session(mark)
        if session.error is None and self._cancelled.is_set():
            return LaunchError("CANCELLED", "the run was interrupted")
        if session.error is None and session.engine and session.watcher and session.stopped is None:
            error = session.watcher.settled(SETTLE_S, self._cancelled.is_set)
            if error:
                self._remember(session, session.engine, error)
        return session.error

    # --- what the launch, gate and teardown cases show

    def launch_finding(self, mark: str, *, patient: bool = False) -> Finding:
        session = self._launched(mark, patient)
        error = session.launch_error
        return Finding(
            "launch",
            {
                "phases": list(session.phases),
                "ranks": [
                    {"rank": spec.rank, "host": spec.host, "id": session.started.get(spec.rank)}
                    for spec in session.plan.specs
                ],
                "reused": session.reused,
                "adopted_from": session.adopted or None,
                "not_adopted": session.not_adopted or None,
                "attached": self._options.attach,
                "warnings": list(session.plan.settings.warnings),
                "error": {"code": error.code, "message": error.message} if error else None,
            },
        )

    def gate_finding(self, mark: str, requirement: str, *, patient: bool = False) -> Finding:
        session = self._launched(mark, patient)
        if session.report is None:
            raise BlockedError("BLOCKED", f"first cause: {session.error or 'the gate was not reached'}")
        return session.report.findings[requirement]

    def teardown_finding(self, mark: str, *, patient: bool = False) -> Finding:
        """Stop the profile's engine after all its other cases, and say what is left on the hosts."""
        session = self._session(mark)
        if patient:
            self._wait_for_turn(mark, 1)
        kept_up = self._options.attach or (self._options.keep and not self._cancelled.is_set())
        if not kept_up:
            self._thread_do(lambda: self._release(session))
        return Finding("teardown", {"kept": kept_up, "launched": bool(session.started), "result": session.stopped})

    # --- the end

    def _release(self, session: Session) -> None:
        """Stop what the session started, once; runs in the engine thread."""
        if session.site is None or session.stopped is not None:
            return
        self._end_watching(session)
        if self._live is session:
            self._live = None
        owned = session.engine.owned if session.engine else True
        if owned:
            run_id = session.engine.run_id if session.engine else self._run.run_id
            session.stopped = launch.stop(
                session.site,
                session.started,
                run_id=run_id,
                gpus=(session.seen or {}).get("gpus"),
                free_gib=session.free_gib,
            )
            self._report_stop(session)
            try:
                self._run.write(f"{session.mark}/teardown.json", session.stopped)
            except OSError as error:
                self._say(f"{session.mark}: how it was stopped could not be written: {error}")
        self._give_back(session)

    def _give_back(self, session: Session) -> None:
        for host in session.hosts.values():
            host.close()
        if session.claim is not None:
            session.claim.close()
        if session.hold is not None:
            session.hold.release()
            session.hold = None

    def _report_stop(self, session: Session) -> None:
        result = session.stopped or {}
        for item in result.get("left_behind", ()):
            what = f"{item['name']} {item['id']} ({item['status']})"
            then = f"; type: {item['command']}" if "command" in item else ""
            self._say(f"{session.mark}: LEFT BEHIND on {item['host']}: {what}{then}")
        problems = [*result.get("problems", ()), *(line for row in result.get("gpu_memory", ()) for line in held(row))]
        for problem in problems:
            self._say(f"{session.mark}: {problem}")
        if not result.get("left_behind") and not problems:
            self._say(f"{session.mark}: stopped; nothing is left on {', '.join(session.hosts)}")

    def cancel(self) -> None:
        """Begin to stop: whoever waits is released, and the engine thread ends its step. Safe in a signal handler's thread."""
        self._cancelled.set()
        with self._changed:
            self._changed.notify_all()

    def close(self, *, interrupted: bool) -> None:
        """Stop or keep the live engine and end the engine thread. Idempotent."""
        if self._closed:
            return
        if interrupted:
            self.cancel()
        _await(self._thread.submit(self._end, interrupted))
        self._closed = True
        self._watch_stop.set()
        self._thread.shutdown(wait=True)

    def _end(self, interrupted: bool) -> None:
        session = self._live
        if session is None:
            return
        self._end_watching(session)
        if self._options.keep and not interrupted and session.error is None and session.engine and session.engine.owned:
            self._kept.keep(session.plan, session.engine.run_id)
            self._say(
                f"{session.mark}: left running as asked (--dspark-keep); stop it with dspark stop --run {session.engine.run_id}"
            )
            return
        self._release(session)

    def summary(self) -> dict[str, Any]:
        """Per profile: fingerprint, phases and the error, for run.json."""
        return {
            mark: {
                "profile": s.plan.profile.name,
                "recipe": s.plan.recipe.name,
                "fingerprint": s.plan.fingerprint,
                "launched": bool(s.started),
                "proven": s.report is not None and s.report.first_failure is None,
                "unpublishable": list(s.plan.settings.unpublishable),
                "wrapper": (s.seen or {}).get("wrapper"),
                "orphans": list(s.orphans),
                "hosts": s.vitals.summary() if s.vitals else None,
                "error": str(s.error) if s.error else None,
            }
            for mark, s in self._sessions.items()
        }


def _await(job: Future[None]) -> None:
    """Wait for a job in short sleeps; raises what it raised."""
    while not wait([job], timeout=LOOK_S).done:
        pass
    job.result()


class Phase:
    """Times one phase of the launch and says when it begins and ends."""

    def __init__(self, phases: list[dict[str, Any]], name: str, say: Callable[[str], None]) -> None:
        self._phases, self._name, self._say = phases, name, say

    def __enter__(self) -> None:
        self._watch = Stopwatch.started()
        self._say(f"{self._name} …")

    def __exit__(self, *exc: object) -> None:
        self._phases.append({"phase": self._name, "elapsed_s": round(self._watch.elapsed_s, 3), "ok": exc[0] is None})
