"""Questions of one test case, each with a row of its own, on the disk the moment it is judged.

A part is judged by the check's own pure judge from what is stored of it, so that a resumed run replays the finished ones
without asking, and a reader can count again what the row of the case says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Case, RunFolder, Stopwatch, row
from pytest_dspark.resume import Stored
from pytest_dspark.verdict import Finding, Status, Verdict

Judge = Callable[[Finding, Mapping[str, Any]], Verdict]


@dataclass(frozen=True, slots=True)
class Part:
    """One question: its verdict and what was measured, None if nothing could be."""

    id: str
    verdict: Verdict
    data: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Parts:
    """Writes the rows of one case's questions. Safe to use from many threads.

    `finished` are those of a resumed run. Methods that write raise HARNESS if the disk does not take the row: what is not
    on the disk was not measured.
    """

    run: RunFolder
    case: Case
    judge: Judge
    settings: Mapping[str, Any]
    finished: Mapping[str, Stored] = field(default_factory=dict)

    def replayed(self, part: str, sha256: str) -> Part | None:
        """A finished question of the resumed run, judged again; None if there is none with this very text (`sha256`)."""
        stored = self.finished.get(part)
        if stored is None or stored.finding.get("sha256") != sha256:
            return None
        return self.again(part, stored)

    def again(self, part: str, stored: Stored) -> Part:
        """Judge a stored question and write its row, which says who measured it."""
        case = replace(self.case, attempt=stored.attempt)
        finding = Finding(case.check, stored.finding)
        verdict = self._judged(finding)
        if str(verdict.status) != stored.verdict:
            note = f"run {stored.measured_in} had called this {stored.verdict}"
            verdict = replace(verdict, message=f"{verdict.message}; {note}" if verdict.message else note)
        self._write(part, case, verdict, finding, stored.started, stored.elapsed_s, stored.measured_in)
        return Part(part, verdict, stored.finding)

    def answered(self, part: str, data: Mapping[str, Any], watch: Stopwatch) -> Part:
        """Judge what was answered and write its row."""
        finding = Finding(self.case.check, data)
        verdict = self._judged(finding)
        self._write(part, self.case, verdict, finding, watch.wall, watch.elapsed_s)
        return Part(part, verdict, data)

    def unanswered(self, part: str, error: DsparkError, watch: Stopwatch, *, tried: bool) -> Part:
        """The row of a question without an answer: ERROR, or BLOCKED if it was never asked."""
        status = Status.ERROR if tried else Status.BLOCKED
        verdict = Verdict(status, error.code, error.message if tried else f"not asked: {error}")
        self._write(part, self.case, verdict, None, watch.wall, watch.elapsed_s)
        return Part(part, verdict, None)

    def _judged(self, finding: Finding) -> Verdict:
        try:
            return self.judge(finding, self.settings)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = f"what is stored of the question cannot be judged: {type(error).__name__}: {error}"
            return Verdict(Status.ERROR, "HARNESS", why)

    def _write(
        self,
        part: str,
        case: Case,
        verdict: Verdict,
        finding: Finding | None,
        started: str,
        elapsed_s: float,
        measured_in: str = "",
    ) -> None:
        made = row(
            replace(case, part=part), verdict, finding, started=started, elapsed_s=elapsed_s, measured_in=measured_in
        )
        try:
            self.run.append(made)
        except OSError as error:
            raise DsparkError("HARNESS", f"the row of {part} could not be written: {error}") from error


def counts(parts: Iterable[Part]) -> dict[str, int]:
    """How many questions have which verdict."""
    return dict(sorted(Counter(str(part.verdict.status) for part in parts).items()))
