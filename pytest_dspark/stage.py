"""The owner of the one live engine, in the controller process alone.

A profile is launched at most once; a failure is remembered and answered with BLOCKED afterwards. Launching, proving and
stopping run in one thread of their own, so that a signal never tears through them: whoever waits is released, the thread
sees the cancellation and ends its step in order. xdist workers ask through `remote.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dspark import gate, kept, launch
from pytest_dspark.cluster import Host, HostEntry
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import BlockedError, DsparkError, LaunchError
from pytest_dspark.evidence import RunFolder, Stopwatch
from pytest_dspark.plan import Plan
from pytest_dspark.preflight import refuse, survey
from pytest_dspark.verdict import Finding
from pytest_dspark.weights import Hasher

WATCH_S = 0.5
# The longest sleep of a thread that waits for another: the kernel may hand a signal to any thread, and Python's handler
# runs only when the main thread wakes.
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How the engine is acquired: `keep` leaves it up at the end, `attach` never starts or stops one. `sums` is the file of
    known digests if every byte of the weights is to be hashed."""

    keep: bool = False
    attach: bool = False
    api_key: str = ""
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
        self._outstanding: dict[str, int] = {}
        self._abandoned = False
        self._alone, self._together, self._waiting_alone = False, 0, 0
        self._cancelled = threading.Event()
        self._closed = False
        self._live: Session | None = None
        self._watch_stop = threading.Event()

    # --- what the tests of this session are

    def expect(self, cases: Sequence[tuple[str, str, str]]) -> None:
        """The test cases of this session as (node id, profile, check); the first word counts, and every worker's is equal."""
        with self._changed:
            if not self.cases:
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
        self.alive(mark)

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
        if session.report is None or self._cancelled.is_set():
            self._release(session)

    def _acquire(self, session: Session) -> None:
        plan = session.plan
        session.hosts = {entry.name: self._open_host(entry, plan) for entry in plan.cluster.hosts}
        session.say = self._say_for(session)
        hasher = Hasher(self._options.sums, session.say, self._cancelled.is_set) if self._options.sums else None
        session.site = launch.Site(plan, session.hosts, self._run, session.say, self._cancelled.is_set, hasher)
        self._live = session
        session.engine = self._start(session)
        endpoint = Endpoint(plan.base_url, plan.served_model, api_key=self._options.api_key)
        with self._phase(session, "ready"):
            launch.await_ready(session.site, session.engine, endpoint)
        threading.Thread(target=self._watch, args=(session,), name="dspark-watch", daemon=True).start()
        with self._phase(session, "gate"):
            session.report = launch.prove(session.site, session.engine, endpoint)
        failure = session.report.first_failure
        if failure:
            raise LaunchError("GATE_FAILED", f"gate.{failure[0]}: {failure[1].message}")
        self._say(f"{session.mark}: engine proven and ready")

    def _start(self, session: Session) -> launch.Engine:
        site = session.site
        assert site is not None
        kept_by = None if self._options.attach else self._kept.peek(session.plan)
        with self._phase(session, "preflight"):
            launching = not (self._options.attach or kept_by)
            seen = survey(session.plan, session.hosts, launching=launching, hasher=site.hasher)
            session.seen = seen.as_json()
            self._run.write(f"{session.mark}/preflight.json", session.seen)
            refuse(seen)
            for warning in seen.warnings():
                session.say(f"warning: {warning}")
        if self._options.attach:
            return launch.adopt(site, run_id=None)
        if kept_by and self._kept.claim(session.plan, kept_by):
            return self._reuse(session, site, kept_by)
        with self._phase(session, "start"):
            return launch.start(site, started=session.started)

    def _reuse(self, session: Session, site: launch.Site, run_id: str) -> launch.Engine:
        session.reused = True
        session.say(f"reusing the engine kept by run {run_id}, to be proven again")
        engine = launch.adopt(site, run_id=run_id)
        session.started = engine.ids
        return engine

    def _say_for(self, session: Session) -> Callable[[str], None]:
        watch = Stopwatch.started()
        return lambda text: self._say(f"{session.mark} +{watch.elapsed_s:.0f}s: {text}")

    def _phase(self, session: Session, name: str) -> Phase:
        return Phase(session.phases, name, session.say)

    # --- watching

    def _watch(self, session: Session) -> None:
        """Look at every rank while the engine is live; remember the first end."""
        while not self._watch_stop.wait(WATCH_S):
            if self._live is not session or session.error or session.stopped is not None:
                return
            try:
                found = launch.states(session.site, session.engine.ids)  # type: ignore[arg-type,union-attr]
            except DsparkError:
                continue
            if self._live is session and session.stopped is None:
                error = launch.lost(session.site, found)  # type: ignore[arg-type]
                if error:
                    self._remember(session, error)
                    return

    def _remember(self, session: Session, error: DsparkError) -> None:
        with self._changed:
            if session.error is None:
                session.error = error
                self._say(f"{session.mark}: {error}")

    def alive(self, mark: str) -> None:
        """Raise the first cause if the engine is known to be lost or the run is being stopped."""
        if self._cancelled.is_set():
            raise LaunchError("CANCELLED", "the run was interrupted")
        error = self._session(mark).error
        if error:
            raise error

    def diagnose(self, mark: str) -> DsparkError | None:
        """After a failed request: the rank that ended, if one did. It is the first cause from then on."""
        session = self._session(mark)
        if session.error is None and session.engine and session.site and session.stopped is None:
            try:
                error = launch.diagnose(session.site, session.engine)
            except DsparkError as unreachable:
                error = LaunchError(unreachable.code, unreachable.message)
            if error:
                self._remember(session, error)
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
        kept_up = self._options.keep or self._options.attach
        if not kept_up:
            self._thread_do(lambda: self._release(session))
        return Finding("teardown", {"kept": kept_up, "launched": bool(session.started), "result": session.stopped})

    # --- the end

    def _release(self, session: Session) -> None:
        """Stop what the session started, once; runs in the engine thread."""
        if session.site is None or session.stopped is not None:
            return
        if self._live is session:
            self._live = None
        owned = session.engine.owned if session.engine else True
        if owned:
            run_id = session.engine.run_id if session.engine else self._run.run_id
            session.stopped = launch.stop(session.site, session.started, run_id=run_id)
            self._run.write(f"{session.mark}/teardown.json", session.stopped)
            self._report_stop(session)
        for host in session.hosts.values():
            host.close()

    def _report_stop(self, session: Session) -> None:
        result = session.stopped or {}
        for item in result.get("left_behind", ()):
            self._say(f"{session.mark}: LEFT BEHIND on {item['host']}: {item['name']} {item['id']} ({item['status']})")
        for problem in result.get("problems", ()):
            self._say(f"{session.mark}: {problem}")
        if not result.get("left_behind") and not result.get("problems"):
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
