"""What was answered, and whether it is right: the reported cases and many of their kind."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_dspark.answers import (
    exactly_one_code,
    final_answer,
    find_number,
    judge_code,
    judge_exact,
    judge_json,
    judge_number,
    shape_of,
)
from pytest_dspark.errors import REMEDIES

CODE = "48213"
QUESTION = "What is the secret verification code? Answer with the code alone."
FULL_WIDTH = "４８２１３"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("48213", ""),  # 1
        ("**48213**", ""),  # 2
        ("The code is 48213.", ""),  # 3
        ("```\n48213\n```", ""),  # 4
        ("<think>maybe 11111</think>48213", ""),  # 5
        ("maybe 11111</think>48213", ""),  # 6
        ("<think>48213</think>", "NO_ANSWER"),  # 7
        ("148213", "WRONG_ANSWER"),  # 8
        ("48213 or 11111", "WRONG_ANSWER"),  # 9
        ("not found", "WRONG_ANSWER"),  # 10
        (QUESTION, "WRONG_ANSWER"),  # 11
        (FULL_WIDTH, ""),  # 12: normalised, so the same digits
        # of the same kinds
        ("  48213\n", ""),
        ("__48213__", ""),
        ("_48213_", ""),
        ("***48213***", ""),
        ("`48213`", ""),
        ("```text\n48213\n```", ""),
        ("~~~\n48213\n~~~", ""),
        ("```48213```", ""),
        ("Here:\n```python\n48213\n```\nDone.", ""),
        ("$48213$", ""),
        ("\\boxed{48213}", ""),
        ("“48213”", ""),
        ("(48213)", ""),
        ("code:48213", ""),
        ("code=48213;", ""),
        ("The code is 48213, as the note says.", ""),
        ("48213 (again: 48213)", ""),
        ("The code is **48213**.\n\n48213", ""),
        ("コードは48213です", "WRONG_ANSWER"),  # letters touch it
        ("コードは 48213 です", ""),
        ("答：48213。", ""),
        ("<THINK>11111</THINK>\n48213", ""),
        ("<thinking>11111</thinking>48213", ""),
        ("<think>a</think>11111</think>48213", ""),
        ("<think>a</think>48213<think>11111", ""),
        ("maybe 48213</think>11111", "WRONG_ANSWER"),
        ("maybe 48213</think>", "NO_ANSWER"),
        ("48213</think></think>", "NO_ANSWER"),
        ("<think>48213", "NO_ANSWER"),
        ("<think>48213</think>\n```\n```", "NO_ANSWER"),
        ("<think>48213</think>\n** **", "NO_ANSWER"),
        ("", "NO_ANSWER"),
        (" \n", "NO_ANSWER"),
        (None, "NO_ANSWER"),
        ("482130", "WRONG_ANSWER"),
        ("4821", "WRONG_ANSWER"),
        ("x48213", "WRONG_ANSWER"),
        ("48213x", "WRONG_ANSWER"),
        ("é48213", "WRONG_ANSWER"),
        ("48213_1", "WRONG_ANSWER"),
        ("AB-48213", "WRONG_ANSWER"),
        ("48213-7", "WRONG_ANSWER"),
        ("48213.5", "WRONG_ANSWER"),
        ("1.48213", "WRONG_ANSWER"),
        ("48,213", "WRONG_ANSWER"),
        ("1,48213", "WRONG_ANSWER"),
        ("48213,11111", "WRONG_ANSWER"),
        ("48213/11111", "WRONG_ANSWER"),
        ("4 8 2 1 3", "WRONG_ANSWER"),
        ("4*8213", "WRONG_ANSWER"),
        ("482**13**", "WRONG_ANSWER"),
        ("48213²", "WRONG_ANSWER"),
        ("48\u200b213", "WRONG_ANSWER"),
        ("٤٨٢١٣", "WRONG_ANSWER"),
        ("11111", "WRONG_ANSWER"),
        ("48213\n11111", "WRONG_ANSWER"),
        ("48213 is right, 11111 is not", "WRONG_ANSWER"),
        (FULL_WIDTH + " or 11111", "WRONG_ANSWER"),
        ("1" + FULL_WIDTH, "WRONG_ANSWER"),
    ],
)
def test_codes(text: str | None, code: str) -> None:
    result = judge_code(text, "", CODE)
    assert (result.ok, result.code) == (not code, code)
    assert result.ok is (result.message == "")
    assert result.ok is (result.answer == CODE)
    assert result.rule
    assert result == judge_code(text, "", CODE), "the same every time"


def test_thinking_that_took_the_whole_budget() -> None:
    """Content null and reasoning there: no crash, and the code is not looked for in the reasoning."""
    result = judge_code(None, "so the code must be 48213", CODE)
    assert (result.ok, result.code, result.message) == (False, "NO_ANSWER", "no final answer: nothing but reasoning")
    assert judge_code("", "", CODE).message == "no final answer"
    assert (
        judge_number(None, "48213", CODE).code
        == judge_exact(None, "48213", CODE).code
        == judge_json(None, "{}", {}).code
        == "NO_ANSWER"
    )


def test_reasoning_beside_an_answer_changes_nothing() -> None:
    assert judge_code("48213", "maybe 11111", CODE).ok
    assert not judge_code("11111", "48213", CODE).ok


def test_messages_say_what_is_and_what_was_expected() -> None:
    assert (
        judge_code("48213 or 11111", "", CODE).message
        == "expected the code 48213, found ambiguous: 48213 and 11111 in '48213 or 11111'"
    )
    assert judge_code("not found", "", CODE).message == "expected the code 48213, found no code in 'not found'"
    assert judge_code("11111", "", CODE).message == "expected the code 48213, found 11111"
    assert len(judge_code("no " * 100_000, "", CODE).message) < 400


def test_the_codes_used_are_known() -> None:
    assert {"NO_ANSWER", "WRONG_ANSWER"} <= REMEDIES.keys()


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        ("R0B0TLAB-DSVF-NVFP4-7319", ["**R0B0TLAB-DSVF-NVFP4-7319**", "It is R0B0TLAB-DSVF-NVFP4-7319."], ["R0B0TLAB-DSVF-NVFP4-7318", "R0B0TLAB-DSVF-NVFP4", "XR0B0TLAB-DSVF-NVFP4-7319", "R0B0TLAB-DSVF-NVFP4-7319-X", "r0b0tlab-dsvf-nvfp4-7319", "R0B0TLAB-DSVF-NVFP4-7319 or R0B0TLAB-DSVF-NVFP4-7318"]),
        ("ORBIT-NVFP4-74291", ["ORBIT-NVFP4-74291"], ["ORBIT-NVFP4-74291 and ORBIT-NVFP4-74292"]),
        ("A9Q7", ["The code is A9Q7", "`A9Q7`"], ["A9Q7 B8R6", "A9Q78"]),
        ("R0B0BENCH_OK", ["R0B0BENCH_OK", "**R0B0BENCH_OK**."], ["R0B0BENCH_OKAY", "R0B0BENCH OK"]),
        ("orbit", ["the word is orbit, found there"], ["orbital", "Orbit"]),
        (FULL_WIDTH, ["48213", FULL_WIDTH], ["48214"]),
    ],
)  # fmt: skip
def test_other_shapes(code: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not judge_code(text, "", code).ok] == []
    assert [text for text in wrong if judge_code(text, "", code).ok] == []


def test_shapes() -> None:
    assert shape_of("48213") == "[0-9]{5}"
    assert shape_of("ORBIT-NVFP4-7") == r"[A-Z]{5}\-[A-Z0-9]{5}\-[0-9]{1}"
    assert shape_of("orbit") == "orbit"
    assert exactly_one_code("a 1 b 2", "[0-9]").problem == "ambiguous: 1 and 2"
    assert exactly_one_code("a 1 b 1", "[0-9]").answer == "1"


def test_final_answer_names_its_rule() -> None:
    assert final_answer("7", None).rule == "the text"
    assert final_answer("a</think>**7**", None).rule == "after the last </think>, without emphasis"
    assert final_answer("```\n7\n```", None).rule == "the text, without fences"
    assert final_answer("7<think>x", None) == final_answer("7<think>y", None)
    assert final_answer("7<think>x", None).rule == "before thinking that never ended"


@pytest.mark.parametrize(
    ("answer", "number", "rule"),
    [
        ("42", "42", "only number"),
        ("-42", "-42", "only number"),
        ("−42", "-42", "only number"),
        ("1,234", "1234", "only number"),
        ("$1,234.50", "1234.5", "only number"),
        ("18.00", "18", "only number"),
        ("007", "7", "only number"),
        ("0.50", "0.5", "only number"),
        ("0", "0", "only number"),
        ("-0.0", "0", "only number"),
        ("100", "100", "only number"),
        ("50%", "50", "only number"),
        ("It is 42.", "42", "only number"),
        ("42, of course", "42", "only number"),
        ("3 + 4 = 7", "7", "last number"),
        ("The answer is 7, not 8", "7", "stated number"),
        ("The answer is: 7. That took 3 steps", "7", "stated number"),
        ("Answer: $18\nCheck: 9 + 9", "18", "stated number"),
        ("#### 72", "72", "stated number"),
        ("3 4 \\boxed{12} 5", "12", "stated number"),
        ("The answer is 5. No, the answer is 6.", "6", "stated number"),
        ("the answer is unclear: 4 or 5", "5", "last number"),
        ("no", "", "number"),
        ("", "", "number"),
        ("x1", "", "number"),
        ("1/2", "", "number"),
        ("1.2.3", "", "number"),
        ("1,23", "", "number"),
        ("10:30", "", "number"),
        ("2nd", "", "number"),
        ("2^10", "", "number"),
    ],
)
def test_numbers(answer: str, number: str, rule: str) -> None:
    found = find_number(answer)
    assert (found.answer, found.rule, bool(found.problem)) == (number, rule, not number)


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3))
@settings(max_examples=200, deadline=None)
@example(Decimal("0.000"))
def test_a_written_number_is_found(value: Decimal) -> None:
    assert judge_number(f"The answer is {value:,f}.", "", str(value)).ok
    assert not judge_number(f"The answer is {value:,f}.", "", str(value + 1)).ok


def test_number_judge() -> None:
    assert judge_number("so **1,234.0**", "", 1234).ok
    assert judge_number("nothing", "", 3).message == "expected the number 3, found no number in 'nothing'"
    assert judge_number("4", "", "3").message == "expected the number 3, found 4"
    assert judge_number("Infinity", "", 3).code == "WRONG_ANSWER"


@pytest.mark.parametrize(
    "text",
    [
        "133",
        "133.",
        "**133**",
        "'133'",
        "133\n",
        "1３3",
        "<think>1</think>133",
        "$133$",
        "\\boxed{133}",
        "133.0",
        "\\(133\\)",
        "`133`",
    ],
)
def test_exact_right(text: str) -> None:
    assert judge_exact(text, "", "133").ok


@pytest.mark.parametrize(
    "text", ["7 x 19 = 133", "133 apples", "1330", "13 3", "132", "-133", "133%", "one hundred", "133 133", "$"]
)
def test_exact_wrong(text: str) -> None:
    result = judge_exact(text, "", "133")
    assert (result.ok, result.code) == (False, "WRONG_ANSWER")


def test_exact_words() -> None:
    assert judge_exact("R0B0BENCH_OK", "", "R0B0BENCH_OK").ok
    assert not judge_exact("r0b0bench_ok", "", "R0B0BENCH_OK").ok
    assert not judge_exact("OK", "", "R0B0BENCH_OK").ok
    assert judge_exact("1,234", "", "1234").ok


EXPECT = {"alpha": 2, "beta": "_3*"}


@pytest.mark.parametrize(
    "text",
    [
        '{"alpha":2,"beta":"_3*"}',
        ' {"beta": "_3*",\n "alpha": 2}\n',
        '```json\n{"alpha":2,"beta":"_3*"}\n```',
        '<think>{"alpha":1}</think>{"alpha":2,"beta":"_3*"}',
        'x</think>\n{"alpha":2.0,"beta":"_3*"}',
    ],
)
def test_json_right(text: str) -> None:
    assert judge_json(text, "", EXPECT).ok


@pytest.mark.parametrize(
    "text",
    [
        '{"alpha":3,"beta":"_3*"}',
        '{"alpha":true,"beta":"_3*"}',
        '{"alpha":"2","beta":"_3*"}',
        '{"alpha":2}',
        '{"alpha":2,"beta":"_3*","gamma":1}',
        '{"alpha":1,"alpha":2,"beta":"_3*"}',
        '{"alpha":NaN,"beta":"_3*"}',
        '{"alpha":1e999,"beta":"_3*"}',
        '[{"alpha":2,"beta":"_3*"}]',
        '{"alpha":2,"beta":"_3*"} {"alpha":2,"beta":"_3*"}',
        'Here: {"alpha":2,"beta":"_3*"}',
        '{"alpha":2,"beta":"_3*"',
        "{'alpha':2,'beta':'_3*'}",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
    ],
)
def test_json_wrong(text: str) -> None:
    result = judge_json(text, "", EXPECT)
    assert (result.ok, result.code) == (False, "WRONG_ANSWER")
    assert result.message
    assert len(result.message) < 500


def test_json_true_is_not_one() -> None:
    assert not judge_json('{"a":1}', "", {"a": True}).ok
    assert judge_json('{"a":{"b":[true,null,1]}}', "", {"a": {"b": [True, None, 1]}}).ok
    assert not judge_json('{"a":{"b":[1]}}', "", {"a": {"b": [True]}}).ok


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "```",
                "\n",
                "**",
                "_",
                " ",
                "48213",
                "11111",
                "1",
                "-",
                ",",
                ".",
                "é",
                "{",
                "}",
                '"a"',
                ":",
                "\\boxed{",
                "answer is ",
                "\ud800",
                "\0",
            ]
        )
        | st.text(max_size=3),
        max_size=15,
    ).map("".join)
)
def test_no_text_raises_and_a_pass_means_the_code_stands_there(text: str) -> None:
    result = judge_code(text, "", CODE)
    judge_number(text, "", 5)
    judge_exact(text, "", CODE)
    judge_json(text, "", {"a": 1})
    if result.ok:
        assert CODE in final_answer(text, "").answer
        assert "11111" not in final_answer(text, "").answer.replace("-", " ").split()


@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "<think",
        "```\n",
        "**a",
        "_",
        " ",
        "1,",
        "1",
        "1.",
        "48213 ",
        "answer is ",
        "\\boxed{",
        "-",
        "[",
        "answer",
        "\n\t",
    ],
)
def test_a_megabyte_takes_linear_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    judge_code(text, "", CODE)
    judge_number(text, "", 5)
    judge_exact(text, "", CODE)
    judge_json(text, "", {"a": 1})
    assert time.process_time() - start < 5
