"""A set of questions as a whole: asking it, and its figures counted from its parts. Pure but for the asking.

No accuracy is given while a question has no answer of the model: what infrastructure kept from being answered is neither right
nor wrong.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.answers import EMPHASIS, Judgement, final_answer, find_number, judge_number
from pytest_dspark.asking import answer, ask, token_limit
from pytest_dspark.errors import DsparkError
from pytest_dspark.garble import garbled
from pytest_dspark.live import Live
from pytest_dspark.parts import Part, Parts, counts
from pytest_dspark.proportion import share, shown
from pytest_dspark.questions import Ask, Asker, Question
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

ALONE: Final = "/alone"
"""Ending of the id of a question that was asked with nothing beside it."""
INFRASTRUCTURE: Final = (Status.ERROR, Status.BLOCKED)
_LAST_LINE: Final = re.compile(r"(?i:the answer is)[ \t]{0,4}:?[ \t]{0,4}(?P<number>.{1,60})")


# --- one question


def asking(endpoint: Endpoint, settings: Mapping[str, Any]) -> Ask:
    """What asks one question and gives what is stored of it."""

    def one(question: Question) -> Mapping[str, Any]:
        reply = answer(ask(endpoint, settings, question.prompt))
        extracted = {"exact": exact(reply), "flexible": flexible(reply)}
        return {"sha256": question.sha256, "expect": question.expect, **extracted, "reply": reply}

    return one


def flexible(reply: Mapping[str, Any]) -> str | None:
    """The number that the answer comes to: the last one that is stated, else the only or the last one."""
    final = final_answer(reply["text"], reply["reasoning"])
    return None if final.problem else find_number(final.answer).answer or None


def exact(reply: Mapping[str, Any]) -> str | None:
    """The number of a last line that says `The answer is N` and nothing else: the form that was asked for."""
    final = final_answer(reply["text"], reply["reasoning"])
    lines = [line.strip() for line in final.answer.splitlines() if line.strip()]
    found = (
        _LAST_LINE.fullmatch(EMPHASIS.sub(" ", lines[-1]).strip().rstrip(".")) if lines and not final.problem else None
    )
    if found is None:
        return None
    number = find_number(found["number"])
    return number.answer if number.rule == "only number" and len(found["number"].split()) == 1 else None


def judge_part(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if the number that the answer comes to is the expected one. A cut answer is TOKEN_LIMIT, whatever stands in it."""
    reply = finding.data["reply"]
    cut = token_limit(reply)
    if cut:
        return cut
    result: Judgement = judge_number(reply["text"], reply["reasoning"], finding.data["expect"])
    return PASS if result.ok else Verdict(Status.FAIL, result.code, result.message)


# --- the set


def ask_set(
    endpoint: Endpoint,
    settings: Mapping[str, Any],
    questions: Sequence[Question],
    parts: Parts,
    streams: int,
    live: Live,
    cause: Mapping[str, str] | None = None,
) -> tuple[list[Part], dict[str, Any]]:
    """Ask all of them; gives the parts and how it went: threads, seconds, and what ended it before its end, if anything.

    With a `cause` nothing is asked: the engine was lost before.
    """
    done: list[Part] = []

    def show(part: Part) -> None:
        done.append(part)
        right = sum(one.verdict.passed for one in done)
        live.show(f"{parts.case.check}: {len(done)} of {len(questions)} answered, {right} right")

    asker, begin = Asker(asking(endpoint, settings), parts, streams, show), time.monotonic()
    asker.cause = DsparkError(cause["code"], cause["message"]) if cause else None
    made = asker.run(questions)
    asked = len(done)
    told = {
        "streams": streams,
        "asked_now": asked,
        "elapsed_s": round(time.monotonic() - begin, 3) if asked == len(questions) else None,
        "cause": {"code": asker.cause.code, "message": asker.cause.message} if asker.cause else None,
    }
    return made, told


def counted(parts: Sequence[Part]) -> dict[str, Any]:
    """Counts by verdict, and the share of right answers by both extractions, null while an answer is missing."""
    open_ones = [part for part in parts if part.verdict.status in INFRASTRUCTURE]
    missing = f"{len(open_ones)} of {len(parts)} questions have no answer of the model" if open_ones else ""
    right = sum(part.verdict.passed for part in parts)
    return {
        "counts": counts(parts),
        "accuracy": None if missing else share(right, len(parts)),
        "accuracy_exact": None if missing else share(sum(map(_exactly_right, parts)), len(parts)),
        "accuracy_missing": missing or None,
        "garbled": sum(1 for part in parts if part.data and garbled(part.data["reply"]["text"], cut=True, loops=False)),
    }


def _exactly_right(part: Part) -> bool:
    if part.data is None or not part.verdict.passed:
        return False
    said = exact(part.data["reply"])
    return said is not None and judge_number(said, "", part.data["expect"]).ok


def agreement(alone: Sequence[Part], beside: Sequence[Part]) -> dict[str, Any]:
    """How often a question asked alone and beside others came to the same number; null while an answer is missing."""
    others = {part.id: part for part in beside}
    pairs = [(part, others.get(part.id.removesuffix(ALONE))) for part in alone]
    answered = [(one, other) for one, other in pairs if one.data and other is not None and other.data]
    same = sum(_said(one) == _said(other) for one, other in answered if other is not None)
    return share(same, len(answered)) | {"unanswered": len(pairs) - len(answered)}


def _said(part: Part) -> str | None:
    return flexible(part.data["reply"]) if part.data else None


def unfinished(data: Mapping[str, Any], parts: int) -> Verdict | None:
    """ERROR while a question has no answer of the model, or has no row."""
    said = data["counts"]
    if sum(said.values()) != parts or parts < 1:
        return Verdict(Status.ERROR, "HARNESS", f"{sum(said.values())} questions have a row, expected {parts}")
    open_ones = sum(said.get(str(status), 0) for status in INFRASTRUCTURE)
    if not open_ones:
        return None
    cause = data.get("cause") or {"code": "SERVER_ERROR", "message": "see the rows of the questions"}
    text = f"{data['accuracy_missing']}, so there is no accuracy; {cause['message']}"
    return Verdict(Status.ERROR, cause["code"], text)


def above_floor(told: Mapping[str, Any], cut: int, floor: float, what: str) -> Verdict:
    """PASS if the plain share of right answers is at least the floor.

    The plain share and not the lower end of its interval: the floor was measured on these very questions, which are no
    sample of others here. The interval says what another set of such questions might give.
    """
    good, of = told["good"], told["of"]
    if good >= floor * of - 1e-9:
        return PASS
    text = f"{what}: {shown(dict(told))} right, expected at least {floor:g}"
    if good + cut >= floor * of - 1e-9:
        return Verdict(Status.TOKEN_LIMIT, "TOKEN_LIMIT", f"{text}; {cut} answers were cut by their budget")
    return Verdict(Status.FAIL, "WRONG_ANSWER", text)
