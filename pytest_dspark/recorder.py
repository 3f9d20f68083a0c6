"""Reports become rows and the answer of the whole run: the controller's side of the evidence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_dspark import closing, inputs, ledger, provenance
from pytest_dspark.acceptance import BAD, Outcome, against_publishing, outcome, unrun
from pytest_dspark.errors import printable
from pytest_dspark.evidence import Case, RunFolder, row, utc_now, whole
from pytest_dspark.pack import load
from pytest_dspark.publish import Refused, Source, publish
from pytest_dspark.state import State
from pytest_dspark.summary import summary
from pytest_dspark.tables import escaped
from pytest_dspark.verdict import Status, Verdict

_FIRST_LINE = 500


def write_unmeasured(run: RunFolder, case: Case, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
    """The row of a case whose check wrote none: a time-out, an interrupt, a fault of the harness."""
    text = str(call.excinfo.value) if call.excinfo else str(report.longrepr)
    code = "DEADLINE" if text.startswith("Timeout") else "HARNESS"
    verdict = Verdict(Status.ERROR, code, text.strip()[:_FIRST_LINE] or "no finding was written")
    with suppress(OSError):  # a full disk: the case has no row, and so is never accepted
        run.append(row(case, verdict, None, started=utc_now(), elapsed_s=report.duration))


class Recorder:
    """Counts what is reported, ends the engine before the report is finished, and writes what the run says."""

    def __init__(self, state: State, *, raw_junit: Path, summary: Path | None = None) -> None:
        self._state, self._raw, self._summary = state, raw_junit, summary
        self._crashed: list[str] = []
        self._worker_died = False
        self._unwritten = ""
        self._outcome: Outcome | None = None
        self._tampered: list[str] = []
        self._stated: list[str] = []
        self._refused = ""

    # --- while cases are reported

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._state.stage.cases:
            return
        if hasattr(report, "wasxfail"):
            self._tampered.append(f"{report.nodeid} is marked xfail")
        if str(report.when) == "???":
            self._crashed.append(report.nodeid)
        if report.when == "teardown" or str(report.when) == "???":
            self._state.stage.done(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error and not self._state.interrupted:
            self._worker_died = True
            self._state.stage.abandon()

    # --- the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Stop or keep the engine while pytest still reports."""
        with suppress(OSError):  # the ranks are stopped whatever the disk does
            self._state.run.give_spare()
        self._state.close(interrupted=self._state.interrupted)
        session.config.add_cleanup(self._last_line)

    def finish(self, session: pytest.Session) -> None:
        """`conclude`, and exit code 1 with one sentence if the evidence cannot be written."""
        try:
            self.conclude(session)
        except OSError as error:
            self._unwritten = f"evidence could not be written: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def conclude(self, session: pytest.Session) -> None:
        """Judge the run, derive the publishable report, and let the exit code say it. The raw report is finished by now."""
        state = self._state
        for nodeid in self._crashed:
            self._write_lost(nodeid, "the xdist worker crashed in this case")
        if self._worker_died:
            known = {row["nodeid"] for row in state.run.read() if whole(row)}
            for nodeid in state.stage.cases.keys() - known:
                self._write_lost(nodeid, "not run: an xdist worker crashed")
        self._stated = self._of_ourselves()
        self._outcome = outcome(
            [row for row in state.run.read() if whole(row)],
            {mark: state.recipe.required(mark) for mark in state.plans},
            selected=self._selected(),
            narrowed=self._state.narrowed,
            rehearsal=state.recipe.rehearsal,
            against_publishing=self._against_publishing(),
            interrupted=state.interrupted,
            foreign=bool(state.options.endpoint),
            resumed=state.replay.run_id if state.replay else "",
        )
        if session.exitstatus == pytest.ExitCode.OK and not self._good():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        about = self._about(session)
        self._refused = self._publish(about)
        if session.exitstatus == pytest.ExitCode.OK and self._refused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._write_run(session, about)
        self._summarize()

    def _summarize(self) -> None:
        """The step summary, if one is wanted; a run that is not published says why."""
        if self._summary is None:
            return
        refused = f"## NOT published\n\n{escaped(self._refused)}\n"
        text = refused if self._refused else summary(load(self._state.run.path / "publish"))
        with self._summary.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)

    def _good(self) -> bool:
        """Exit code 0: something passed, nothing is bad, all that was selected was run, and all that is required is there unless
        the run was narrowed."""
        result = self._outcome
        if result is None or not result.counts.get("PASS") or any(result.counts.get(verdict) for verdict in BAD):
            return False
        if unrun([row for row in self._state.run.read() if whole(row)], self._selected()):
            return False
        return result.met or result.subset or bool(self._state.options.endpoint)

    def _selected(self) -> dict[str, frozenset[str]]:
        cases = self._state.stage.cases.values()
        return {mark: frozenset(check for m, check in cases if m == mark) for mark in self._state.plans}

    def _write_lost(self, nodeid: str, message: str) -> None:
        """The ERROR row of a case that no process could write."""
        state = self._state
        case = state.case(nodeid, *state.stage.cases[nodeid])
        verdict = Verdict(Status.ERROR, "HARNESS", message)
        state.run.append(row(case, verdict, None, started=utc_now(), elapsed_s=0.0))

    def _against_publishing(self) -> list[str]:
        state = self._state
        return against_publishing(
            state.recipe.name,
            state.recipe.wrapper,
            {mark: made.settings.unpublishable for mark, made in state.plans.items()},
            tampered=self._tampered,
            overrides=self._overrides(),
            stated=self._stated,
        )

    def _overrides(self) -> list[str]:
        """The profile that was given instead of the recipe's own."""
        given = self._state.options.profile
        return [made.profile.name for made in self._state.plans.values()] if given else []

    def _of_ourselves(self) -> list[str]:
        """Keep the suites that were run; what is not as it should be of them, of our own files and of the ledger."""
        suites = provenance.suites_of(self._state.stage.suites)
        inputs.keep_suites(self._state.run, suites)
        changes = provenance.own_changes()
        told = [f"pytest-dspark's own files are changed: {', '.join(changes[:5])}"] if changes else []
        return [*told, *provenance.foreign_suites(suites), *ledger.root_problems(self._root)]

    @property
    def _root(self) -> Path:
        return self._state.run.path.parent.parent

    def _about(self, session: pytest.Session) -> dict[str, Any]:
        """run.json at the end of the run."""
        state, begun = self._state, self._state.run.about()
        assert self._outcome is not None
        return {
            "schema": 1,
            "run": state.run.run_id,
            "status": "interrupted" if state.interrupted else "complete",
            "started": begun["started"],
            "ended": utc_now(),
            "exit_status": int(session.exitstatus),
            "rehearsal": state.recipe.rehearsal,
            "endpoint": bool(state.options.endpoint),
            "challenge": state.options.challenge or None,
            "ledger": begun["ledger"],
            "recipe": {
                "name": state.recipe.name,
                "sha256": state.recipe.sha256,
                "sources": list(state.recipe.sources),
            },
            "profiles": state.stage.summary(),
            "narrowed": state.narrowed,
            "selected": {mark: sorted(checks) for mark, checks in self._selected().items()},
            "tampered": self._tampered,
            "profile_override": next(iter(self._overrides()), None),
            "stated": self._stated,
            "selftest": state.selftest.as_json() if state.selftest else None,
            **self._outcome.as_json(),
        }

    def _publish(self, about: dict[str, Any]) -> str:
        """End the run in the ledger and write publish/; returns why it was refused, or an empty text."""
        if self._raw.parent == self._state.run.path and self._raw.exists():
            self._raw.chmod(0o600)
        told = {key: about[key] for key in ("status", "accepted", "publishable")} | {"verdicts": about["counts"]}
        ledger.ended(self._root, self._state.run.run_id, told)
        try:
            publish(Source(self._state.run, self._state.plans, about, self._raw, self._root))
        except Refused as error:
            return str(error)
        return ""

    def _write_run(self, session: pytest.Session, about: dict[str, Any]) -> None:
        about |= {"exit_status": int(session.exitstatus), "refused": self._refused or None}
        if self._refused:
            about |= {"publishable": False, "reasons": [*about["reasons"], f"not published: {self._refused}"]}
        self._state.run.write("run.json", about)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        result = self._outcome
        if result is None:
            return
        terminalreporter.section("dspark")
        told = {
            mark: f"profile {made.profile.name}, fingerprint {made.fingerprint}"
            for mark, made in self._state.plans.items()
        }
        for line in closing.closing(
            self._state.run.read(),
            result,
            word=self._word(result),
            profiles=told,
            run=self._state.run.path,
            refused=self._refused or self._unwritten,
            self_test=str(self._state.selftest or ""),
        ):
            terminalreporter.write_line(printable(line))

    def _last_line(self) -> None:
        result = self._outcome
        if self._unwritten:
            print(f"dspark: NOT accepted: {self._unwritten}; what there is lies in {self._state.run.path}")
        if result is None or self._unwritten:
            return
        resumed = f" (resumed from run {result.resumed})" if result.resumed else ""
        refused = "; NOT PUBLISHED" if self._refused else ""
        print(
            f"dspark: {self._word(result)}{refused}{resumed}; evidence (junit.xml, rows.jsonl) in {self._state.run.path}"
        )

    def _word(self, result: Outcome) -> str:
        """The run in a few words."""
        if result.subset:
            return "subset: not an acceptance"
        if self._state.options.endpoint:
            return "acceptance not applicable: nothing proves what answered"
        if self._state.recipe.rehearsal:
            return "rehearsal met every requirement" if result.met else "rehearsal did NOT meet every requirement"
        return "accepted" if result.accepted else "NOT accepted"
