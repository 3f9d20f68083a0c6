"""Questions with a row each: the asker, the rows, resuming them, the figures and the official file."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_dspark import datasets, resume
from pytest_dspark.acceptance import outcome
from pytest_dspark.checks import arithmetic, gsm8k, resolve
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Case, Stopwatch, new_run, sealed_rows
from pytest_dspark.parts import Part, Parts
from pytest_dspark.proportion import share, wilson
from pytest_dspark.questions import ERRORS_IN_A_ROW, Asker, Question
from pytest_dspark.reply import RequestError
from pytest_dspark.resume import Replay, Stored
from pytest_dspark.runner import run_check
from pytest_dspark.tally import agreement, counted, exact, flexible, judge_part, unfinished
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

OFFICIAL = Path(__file__).parents[2] / "shared" / "data"
CASE = Case(
    "R", "suites/test_gsm8k.py::test_gsm8k[production]", "gsm8k", "gsm8k", "production", "r", "f" * 16, settings="s"
)


def questions(count, start=1):
    return [Question(f"q-{n:03d}", f"What is {n}?", str(n), f"sha-{n}") for n in range(start, start + count)]


def reply(text, finish="stop"):
    return {"text": text, "reasoning": "", "tool_calls": [], "finish_reason": finish, "completion_tokens": 3}


def answered(question, text=None):
    return {
        "sha256": question.sha256,
        "expect": question.expect,
        "reply": reply(text or f"The answer is {question.expect}."),
    }


@pytest.fixture
def parts(tmp_path):
    run = new_run(tmp_path)
    return Parts(run, replace(CASE, run=run.run_id), judge_part, {})


def rows(parts):
    return [row for _, row in sealed_rows(parts.run.rows, parts.run.run_id)]


# --- asking


def test_threads_keep_the_engine_full_and_every_question_has_a_row(parts):
    together, most, lock = [0], [0], threading.Lock()

    def ask(question):
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
        time.sleep(0.02)
        with lock:
            together[0] -= 1
        return answered(question, "I think it is 999." if question.id == "q-007" else None)

    made = Asker(ask, parts, 8).run(questions(40))
    assert most[0] == 8 and [part.id for part in made] == [one.id for one in questions(40)]
    written = {row["part"]: row["verdict"] for row in rows(parts)}
    assert len(written) == 40 and written.pop("q-007") == "FAIL" and set(written.values()) == {"PASS"}


def test_each_row_is_on_the_disk_before_the_next_question_is_asked(parts):
    seen = []

    def ask(question):
        seen.append(len(rows(parts)))
        return answered(question)

    Asker(ask, parts, 1).run(questions(5))
    assert seen == [0, 1, 2, 3, 4]


def test_a_dead_server_leaves_finished_questions_open_ones_error_and_the_rest_blocked(parts):
    dead, all_in = threading.Event(), threading.Barrier(4)

    def ask(question):
        if question.id <= "q-012":
            return answered(question)
        all_in.wait(5)
        dead.set()
        raise RequestError("SERVER_LOST", "connection reset")

    made = Asker(ask, parts, 4).run(questions(40))
    said = [str(part.verdict.status) for part in made]
    assert said == ["PASS"] * 12 + ["ERROR"] * 4 + ["BLOCKED"] * 24
    assert {row["verdict"] for row in rows(parts)} == {"PASS", "ERROR", "BLOCKED"} and len(rows(parts)) == 40
    figures = counted(made)
    assert figures["accuracy"] is None and figures["accuracy_exact"] is None
    assert figures["accuracy_missing"] == "28 of 40 questions have no answer of the model"
    verdict = unfinished(figures | {"cause": {"code": "SERVER_LOST", "message": "connection reset"}}, 40)
    assert (verdict.status, verdict.code) == (Status.ERROR, "SERVER_LOST") and "no accuracy" in verdict.message


def test_one_failed_request_is_an_error_and_the_others_are_asked(parts):
    def ask(question):
        if question.id == "q-003":
            raise RequestError("TRUNCATED", "the stream ended")
        return answered(question)

    made = Asker(ask, parts, 2).run(questions(10))
    assert [str(part.verdict.status) for part in made].count("PASS") == 9
    assert counted(made)["accuracy"] is None


@pytest.mark.parametrize(
    "error", [RequestError("SERVER_LOST", "connection reset"), DsparkError("RANK_EXITED", "rank 1 is exited")]
)
def test_one_word_that_the_engine_is_lost_is_enough(parts, error):
    def ask(question):
        if question.id == "q-002":
            raise error
        return answered(question)

    made = Asker(ask, parts, 1).run(questions(5))
    assert [str(part.verdict.status) for part in made] == ["PASS", "ERROR", "BLOCKED", "BLOCKED", "BLOCKED"]
    assert {part.verdict.code for part in made[1:]} == {error.code}


def test_failures_in_a_row_end_the_asking(parts):
    asked = []

    def ask(question):
        asked.append(question.id)
        raise RequestError("SERVER_ERROR", "HTTP 500")

    made = Asker(ask, parts, 1).run(questions(10))
    assert len(asked) == ERRORS_IN_A_ROW
    assert [str(part.verdict.status) for part in made] == ["ERROR"] * 3 + ["BLOCKED"] * 7


def test_what_ends_the_session_ends_the_threads(parts):
    begun = []

    def ask(question):
        begun.append(question.id)
        if len(begun) > 3:
            raise KeyboardInterrupt
        return answered(question)

    with pytest.raises(KeyboardInterrupt):
        Asker(ask, parts, 1).run(questions(50))
    assert len(begun) == 4


def test_a_disk_that_is_full_is_an_error_of_the_harness(parts, monkeypatch):
    def full(run, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(parts.run), "append", full)
    with pytest.raises(DsparkError, match="could not be written") as caught:
        Asker(answered, parts, 2).run(questions(4))
    assert caught.value.code == "HARNESS"


# --- resuming


def test_finished_questions_are_judged_again_and_not_asked_again(parts, tmp_path):
    def broken(question):
        if question.id > "q-004":
            raise RequestError("SERVER_LOST", "gone")
        return answered(question, "It is 999." if question.id == "q-002" else None)

    Asker(broken, parts, 1).run(questions(8))
    parts.run.write("run.json", about(parts))
    replay = resume.read(parts.run.path)
    again = Parts(new_run(tmp_path / "b"), CASE, judge_part, {}, replay.parts(CASE))
    asked = []

    def ask(question):
        asked.append(question.id)
        return answered(question)

    made = Asker(ask, again, 2).run(questions(8))
    assert sorted(asked) == ["q-005", "q-006", "q-007", "q-008"]
    assert [str(part.verdict.status) for part in made] == ["PASS", "FAIL", *["PASS"] * 6], "a FAIL is never tried again"
    told = {row["part"]: row["measured_in"] for row in rows(again)}
    assert told["q-001"] == parts.run.run_id and told["q-005"] == "R" and len(told) == 8


def about(parts):
    profiles = {"production": {"fingerprint": "f" * 16}}
    return {"schema": 1, "run": parts.run.run_id, "profiles": profiles}


def test_another_question_or_other_settings_under_the_same_id_are_not_replayed(parts):
    stored = Stored("A", "PASS", answered(questions(1)[0]), "s", "t", 1.0, 1)
    found = replace(parts, finished={"q-001": stored})
    assert found.replayed("q-001", "sha-1") and found.replayed("q-001", "another") is None
    key = ("production", "gsm8k", CASE.nodeid)
    replay = Replay("A", Path("A"), {}, {}, {key: {"q-001": stored}})
    assert replay.parts(CASE) and not replay.parts(replace(CASE, settings="other"))


def test_an_edited_question_is_caught_by_the_judge_when_it_is_replayed(parts):
    edited = answered(questions(1)[0], "It is 5.")
    again = replace(parts, finished={"q-001": Stored("A", "PASS", edited, "s", "t", 1.0, 1)})
    part = again.replayed("q-001", "sha-1")
    assert part.verdict.status is Status.FAIL and "run A had called this PASS" in part.verdict.message
    broken = replace(parts, finished={"q-001": Stored("A", "PASS", {"sha256": "sha-1"}, "s", "t", 1.0, 1)})
    assert broken.replayed("q-001", "sha-1").verdict.status is Status.ERROR


def whole_finding(parts_made):
    how = {"streams": 4, "asked_now": len(parts_made), "elapsed_s": 1.0, "cause": None}
    data = {"asked": {"beside": len(parts_made), "alone": 0}, "how": {"alone": how, "beside": how}}
    return gsm8k.recount(data, parts_made)


def test_a_finished_case_is_counted_again_from_its_questions(tmp_path, parts):
    made = Asker(answered, parts, 2).run(questions(4))
    stored = {part.id: Stored("A", "PASS", part.data, "s", "t", 1.0, 1) for part in made}
    stored["q-004"] = replace(stored["q-004"], finding=answered(questions(4)[3], "It is 5."))
    key = ("production", "gsm8k", CASE.nodeid)
    finished = {key: Stored("A", "PASS", whole_finding(made), "s", "t", 1.0, 1)}
    run = new_run(tmp_path / "b")
    case = replace(CASE, run=run.run_id)
    verdict = run_check(
        None, run, case, resolve("gsm8k"), {"floor": 1.0}, replay=Replay("A", Path(), finished, {}, {key: stored})
    )
    assert verdict.status is Status.FAIL and "3 of 4" in verdict.message and "had called this PASS" in verdict.message
    written = [row for _, row in sealed_rows(run.rows, run.run_id)]
    assert [row["part"] for row in written] == ["q-001", "q-002", "q-003", "q-004", None]
    assert written[-1]["finding"]["counts"] == {"FAIL": 1, "PASS": 3}
    del stored["q-003"]
    lost = run_check(
        None, run, case, resolve("gsm8k"), {"floor": 1.0}, replay=Replay("A", Path(), finished, {}, {key: stored})
    )
    assert (lost.status, lost.code) == (Status.ERROR, "HARNESS"), "a question without a row is no question"


# --- figures


def test_wilson_interval_against_published_values():
    """E. B. Wilson's score interval: 81 of 263 (Newcombe 1998, table I) is 0.2553 to 0.3662; 0 of 10 ends at 0.2775."""
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = wilson(0, 10)
    assert low == 0.0 and round(high, 4) == 0.2775
    assert wilson(0, 0) is None and share(0, 0)["share"] is None
    assert wilson(10, 10)[1] == 1.0


@pytest.mark.parametrize(
    ("text", "by_form", "by_content"),
    [
        ("Eggs: 9.\nThe answer is 18.", "18", "18"),
        ("Eggs: 9.\n**The answer is 18**", "18", "18"),
        ("The answer is $1,080", "1080", "1080"),
        ("So she makes 18 dollars.", None, "18"),
        ("The answer is 18 dollars.", None, "18"),
        ("The answer is 18.\nThat is a lot of eggs.", None, "18"),
        ("16 - 3 - 4 = 9, and 9 * 2 = 18", None, "18"),
        ("#### 18", None, "18"),
        ("I do not know.", None, None),
        ("", None, None),
    ],
)
def test_exact_and_flexible_extraction(text, by_form, by_content):
    assert (exact(reply(text)), flexible(reply(text))) == (by_form, by_content)


def test_a_cut_answer_is_a_token_limit_even_with_the_right_number_in_it():
    finding = Finding("gsm8k", {"expect": "18", "reply": reply("She makes 18", "length")})
    assert judge_part(finding, {}).status is Status.TOKEN_LIMIT


def part(name, text, expect="18", finish="stop"):
    data = {"sha256": "x", "expect": expect, "reply": reply(text, finish)}
    return Part(name, judge_part(Finding("gsm8k", data), {}), data)


def test_agreement_compares_numbers_and_not_words():
    alone = [part("a/alone", "The answer is 18."), part("b/alone", "It is 7."), part("c/alone", "It is 1.")]
    beside = [
        part("a", "So she makes $18."),
        part("b", "It is 8."),
        Part("c", Verdict(Status.ERROR, "SERVER_LOST"), None),
    ]
    found = agreement(alone, beside)
    assert (found["good"], found["of"], found["unanswered"]) == (1, 2, 1)


def judged(beside, limits, alone=()):
    how = {"streams": 4, "asked_now": 1, "elapsed_s": 1.0, "cause": None}
    data = {"asked": {"beside": len(beside), "alone": len(alone)}, "how": {"alone": how, "beside": how}}
    return gsm8k.judge(Finding("gsm8k", gsm8k.recount(data, [*alone, *beside])), limits)


RIGHT, WRONG = "The answer is 18.", "The answer is 17."


def test_the_floor_decides_and_without_one_nothing_is_passed():
    beside = [part(f"g-{n}", RIGHT if n else WRONG) for n in range(10)]
    assert judged(beside, {"floor": 0.9}).passed
    assert judged(beside, {"floor": 0.95}).status is Status.FAIL
    free = judged(beside, {})
    assert free.status is Status.NOT_IMPLEMENTED and "0.900" in free.message and "no floor" in free.message
    cut = [part("g-0", "She makes", finish="length"), *beside[1:]]
    assert judged(cut, {"floor": 1.0}).status is Status.TOKEN_LIMIT
    assert not judged([], {"floor": 0.0}).passed


def test_answers_that_change_in_company_fall_below_the_agreement_floor():
    beside = [part("g-1", RIGHT), part("g-2", WRONG)]
    alone = [part("g-1/alone", RIGHT), part("g-2/alone", RIGHT)]
    assert judged(beside, {"floor": 0.5}, alone).passed
    found = judged(beside, {"floor": 0.5, "agreement_floor": 0.9}, alone)
    assert (found.status, found.code) == (Status.FAIL, "LIMIT_EXCEEDED")


def test_half_a_lane_publishes_no_accuracy_at_all():
    how = {"streams": 4, "asked_now": 1, "elapsed_s": 1.0, "cause": {"code": "SERVER_LOST", "message": "gone"}}
    data = {"asked": {"beside": 2, "alone": 1}, "how": {"alone": how, "beside": how}}
    lost = Part("g-2", Verdict(Status.BLOCKED, "SERVER_LOST"), None)
    found = gsm8k.recount(data, [part("g-1/alone", RIGHT), part("g-1", RIGHT), lost])
    assert (
        found["accuracy"] is None
        and found["alone"]["accuracy"] is None
        and found["counts"] == {"BLOCKED": 1, "PASS": 1}
    )


# --- the built-in sums


def test_sums_are_the_same_everywhere_exact_and_of_five_kinds():
    asked = arithmetic.questions(8)
    assert asked == arithmetic.questions(8) and len({one.id for one in asked}) == 40
    assert asked[0].prompt == "Compute 6 + 2. Reply with only the number."
    for one in asked:
        text = one.prompt.removeprefix("Compute ").partition(". Reply")[0]
        assert eval(text) == int(one.expect), one
    assert arithmetic.questions(3)[0] == asked[0] and arithmetic.questions(3)[3] == asked[8]


def test_each_level_has_its_floor():
    def graded(per_level, floors, wrong=()):
        asked = arithmetic.questions(per_level)
        made = [part(one.id, "It is -1." if one.id in wrong else one.expect, one.expect) for one in asked]
        data = {"per_level": per_level, "asked": len(asked), "how": {"cause": None}}
        finding = Finding("arithmetic.graded", arithmetic.recount(data, made))
        return arithmetic.judge(finding, {"floors": floors} if floors else {})

    assert graded(2, [2, 2, 2, 2, 2]).passed
    found = graded(2, [2, 2, 2, 2, 2], wrong={"arithmetic-4-01"})
    assert found.status is Status.FAIL and "level 4" in found.message
    assert graded(2, [2, 2, 2, 1, 0], wrong={"arithmetic-4-01", "arithmetic-5-01", "arithmetic-5-02"}).passed
    assert graded(2, None).status is graded(2, [0] * 5).status is Status.NOT_IMPLEMENTED
    with pytest.raises(DsparkError, match="floors must be 5 numbers"):
        graded(2, [3, 2, 2, 2, 2])


# --- the official file


def test_an_absent_or_another_file_is_never_replaced(tmp_path):
    with pytest.raises(DsparkError, match="dspark data gsm8k --data") as caught:
        datasets.gsm8k(tmp_path, 200)
    assert caught.value.code == "NOT_IMPLEMENTED" and datasets.GSM8K.url in caught.value.message
    path = tmp_path / "gsm8k" / "test.jsonl"
    path.parent.mkdir()
    path.write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n')
    with pytest.raises(DsparkError, match=r"not the official .* sha256 is .* expected 3730d312"):
        datasets.gsm8k(tmp_path, 1)


def test_fetching_says_what_went_wrong_and_keeps_nothing_else(tmp_path):
    def offline(url):
        raise OSError("Name or service not known")

    with pytest.raises(DsparkError, match="copy the file from another machine") as caught:
        datasets.fetch(datasets.GSM8K, tmp_path, offline)
    assert caught.value.code == "DATA_UNAVAILABLE"
    with pytest.raises(DsparkError, match="not the official file"):
        datasets.fetch(datasets.GSM8K, tmp_path, lambda _: b"<html>")
    assert not list(tmp_path.rglob("*.jsonl"))
    small = replace(datasets.GSM8K, sha256="9834876dcfb05cb167a5c24953eba58c4ac89b1adf57f28f2f9d09af107ee8f0")
    assert datasets.fetch(small, tmp_path, lambda _: b"aaa").read_bytes() == b"aaa"


@pytest.mark.skipif(
    not (OFFICIAL / datasets.GSM8K.file).exists(), reason="the official GSM8K file is not beside this clone"
)
def test_the_official_file():
    first, everything = datasets.gsm8k(OFFICIAL, 200), datasets.gsm8k(OFFICIAL, "all")
    assert (len(first), len(everything)) == (200, 1319) and everything[:200] == first
    assert (first[0].id, first[0].expect, everything[-1].id) == ("gsm8k-0001", "18", "gsm8k-1319")
    assert "ducks lay 16 eggs" in first[0].prompt and first[0].prompt.endswith("The answer is <number>.")
    assert all(one.expect.lstrip("-").replace(".", "").isdigit() for one in everything)


# --- the run as a whole


def test_questions_are_no_cases_of_the_run_and_a_clients_own_doubt_is_disclosed():
    base = {"profile": "production", "attempt": 1, "run": "R", "measured_in": "R", "message": ""}
    case = base | {
        "check": "r0b0bench.systems",
        "part": None,
        "verdict": "PASS",
        "finding": {"invalid_for_publish": True},
    }
    found = outcome(
        [case],
        {"production": ["r0b0bench.systems"]},
        selected={"production": frozenset({"r0b0bench.systems"})},
        narrowed=False,
        rehearsal=False,
        against_publishing=(),
        interrupted=False,
    )
    assert found.accepted and found.disclosures == (
        "production: r0b0bench.systems is invalid_for_publish by its own report",
    )


def test_a_row_without_the_field_part_is_a_case(tmp_path):
    """Runs of before the field was there can be resumed."""
    from pytest_dspark.evidence import row, whole

    made = row(CASE, PASS, None, started="t", elapsed_s=Stopwatch.started().elapsed_s)
    assert made["part"] is None and whole(made) and whole({}) and not whole(made | {"part": "q-1"})
    assert json.loads(json.dumps(made))["schema"] == 1
