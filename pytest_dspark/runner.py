"""One check, from the question to the row: acquire, measure, judge, write. No pytest in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import BlockedError, ConfigError, DsparkError
from pytest_dspark.evidence import Case, RunFolder, Stopwatch, row, utc_now
from pytest_dspark.live import Live
from pytest_dspark.parts import Parts
from pytest_dspark.resume import Replay, Stored
from pytest_dspark.verdict import Finding, Status, Verdict

# What a judge raises on a finding that has not the shape that its measure gives.
_SHAPE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_STATUS_OF_CODE = {"CAPACITY": Status.CAPACITY, "NOT_IMPLEMENTED": Status.NOT_IMPLEMENTED}


def verdict_of(error: DsparkError) -> Verdict:
    """The verdict of an error: BLOCKED for what was not tried, CAPACITY for what cannot fit, ERROR otherwise."""
    if isinstance(error, BlockedError):
        return Verdict(Status.BLOCKED, error.code, error.message)
    return Verdict(_STATUS_OF_CODE.get(error.code, Status.ERROR), error.code, error.message)


def run_check(
    stage: Any,
    run: RunFolder,
    case: Case,
    check: Check,
    settings: Mapping[str, Any],
    *,
    on_engine: Callable[[], None] = lambda: None,
    live: Live | None = None,
    replay: Replay | None = None,
) -> Verdict:
    """Measure and judge one check of one profile, and write its row before anything is raised or returned. What the
    resumed run has finished is not measured: its finding is judged again."""
    try:
        stored = replay.stored(case) if replay else None
    except ConfigError as error:
        verdict = Verdict(Status.BLOCKED, error.code, error.message)
        return _written(run, row(case, verdict, None, started=utc_now(), elapsed_s=0.0), verdict)
    parts = (
        Parts(run, case, check.judge_part, settings, replay.parts(case) if replay else {}) if check.judge_part else None
    )
    if stored:
        return _judged_again(run, case, check, settings, stored, parts)
    return _measured(stage, run, case, check, settings, on_engine, live or Live(), parts)


def _measured(
    stage: Any,
    run: RunFolder,
    case: Case,
    check: Check,
    settings: Mapping[str, Any],
    on_engine: Callable[[], None],
    live: Live,
    parts: Parts | None,
) -> Verdict:
    watch = Stopwatch.started()
    finding: Finding | None = None
    try:
        finding = _measure(stage, run, case, check, settings, on_engine, live, parts)
        verdict = _with_cause(stage, case, check.judge(finding, settings), parts)
    except DsparkError as error:
        verdict = verdict_of(_cause(stage, case, check, error))
    verdict = replace(verdict, message=run.masked(verdict.message))
    return _written(run, row(case, verdict, finding, started=watch.wall, elapsed_s=watch.elapsed_s), verdict)


def _with_cause(stage: Any, case: Case, verdict: Verdict, parts: Parts | None) -> Verdict:
    """Questions that could not be asked because a rank ended are reported as that rank's end."""
    cause = stage.diagnose(case.profile) if parts and verdict.status is Status.ERROR else None
    if cause is None or cause.code == verdict.code:
        return verdict
    return replace(verdict, code=cause.code, message=f"{cause.message} ({verdict.message})")


def _written(run: RunFolder, made: Mapping[str, Any], verdict: Verdict) -> Verdict:
    try:
        run.append(made)
    except OSError as error:
        return Verdict(Status.ERROR, "HARNESS", f"evidence could not be written: {error}; the verdict was {verdict}")
    return verdict


def _judged_again(
    run: RunFolder, case: Case, check: Check, settings: Mapping[str, Any], stored: Stored, parts: Parts | None
) -> Verdict:
    """The verdict that the judge gives now; what the earlier run said is only compared with it. Questions are judged one by
    one, and the counts made anew from them."""
    finding = Finding(case.check, stored.finding)
    try:
        if parts and check.recount:
            again = [parts.again(part, one) for part, one in parts.finished.items()]
            finding = Finding(case.check, check.recount(stored.finding, again))
        verdict = check.judge(finding, settings)
    except DsparkError as error:
        verdict = verdict_of(error)
    except _SHAPE as error:
        why = f"the finding that run {stored.measured_in} stored cannot be judged: {type(error).__name__}: {error}"
        verdict = Verdict(Status.ERROR, "HARNESS", why)
    if str(verdict.status) != stored.verdict:
        note = f"run {stored.measured_in} had called this {stored.verdict}"
        verdict = replace(verdict, message=f"{verdict.message}; {note}" if verdict.message else note)
    case = replace(case, attempt=stored.attempt)
    made = row(
        case,
        verdict,
        finding,
        started=stored.started,
        elapsed_s=stored.elapsed_s,
        measured_in=stored.measured_in,
    )
    return _written(run, made, verdict)


def _measure(
    stage: Any,
    run: RunFolder,
    case: Case,
    check: Check,
    settings: Mapping[str, Any],
    on_engine: Callable[[], None],
    live: Live,
    parts: Parts | None,
) -> Finding:
    if check.source == "stage":
        return check.measure(stage, case.profile, settings)
    with held(stage, case.profile, check.exclusive, on_engine) as endpoint:
        _begin(run, case)
        known = run.known_of(case.profile, case.lane) | {"readings": partial(stage.readings, case.profile)}
        more = {"parts": parts} if parts else {}
        return check.measure(endpoint, settings={**settings, **known}, live=live, **more)


def _begin(run: RunFolder, case: Case) -> None:
    try:
        run.begin(case)
    except OSError as error:
        raise DsparkError("HARNESS", f"evidence could not be written, so nothing was asked: {error}") from error


@contextmanager
def held(stage: Any, mark: str, exclusive: bool, on_engine: Callable[[], None]) -> Iterator[Endpoint]:
    """The proven engine of a profile to ask, alone or shared; `on_engine` is called when it is held."""
    place = stage.acquire(mark)
    stage.enter(mark, exclusive)
    try:
        on_engine()
        alive = partial(stage.alive, mark)
        endpoint = Endpoint(place["base_url"], place["model"], api_key=place["api_key"], alive=alive)
        try:
            yield endpoint
        finally:
            endpoint.close()
    finally:
        stage.leave(exclusive)


def _cause(stage: Any, case: Case, check: Check, error: DsparkError) -> DsparkError:
    """A request that failed because a rank ended is reported as that rank's end, whatever the socket said."""
    if check.source == "stage" or isinstance(error, BlockedError) or error.code == "NOT_IMPLEMENTED":
        return error
    cause: DsparkError | None = stage.diagnose(case.profile)
    if cause is None or cause.code == error.code:
        return error
    return DsparkError(cause.code, f"{cause.message} (the request ended with {error})")
