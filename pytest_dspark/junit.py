"""publish/junit.xml: derived from pytest's own report, which is left untouched as raw evidence.

pytest cannot put a word first in a set-up error's message or give it a type, it writes the host's name, and it makes two
cases of a failed test whose teardown fails too. Here each case has its verdict as the first word and as `type`, the host
name is replaced, and doubled cases are merged; ids stay the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

_MESSAGE_LIMIT = 2000
_STORY_LIMIT = 500
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROBLEMS = ("error", "failure", "skipped")


def derive(
    raw: Path,
    verdicts: Mapping[str, tuple[str, str]],
    project: Callable[[str], str] = lambda text: text,
    stories: Mapping[str, str] | None = None,
) -> bytes:
    """The publishable report of a raw one: captured output is left out, and every text goes through `project`.

    `stories` are one line of output for each case, verdict first, since readers show no properties; some keep 500 characters
    of it.
    `verdicts` maps the property `dspark_case` of a case to (verdict, message). Raises ValueError if the raw report is
    not readable.
    """
    try:
        root = ElementTree.parse(raw).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{raw}: {error}") from error
    for suite in root.iter("testsuite"):
        suite.set("hostname", "host")
        _merge_doubles(suite)
        for case in suite.iter("testcase"):
            _rewrite(case, verdicts)
        _recount(suite)
    _strip(root, project)
    for case in root.iter("testcase"):
        _tell(case, (stories or {}).get(_property(case, "dspark_case"), ""))
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _tell(case: ElementTree.Element, story: str) -> None:
    if story:
        ElementTree.SubElement(case, "system-out").text = _NO_XML.sub("\ufffd", story)[:_STORY_LIMIT]


def case_ids(xml: bytes) -> Counter[tuple[str, str]]:
    """(classname, name) of every case, to check that both reports hold the same ones."""
    root = ElementTree.fromstring(xml)
    return Counter((case.get("classname", ""), case.get("name", "")) for case in root.iter("testcase"))


def read_cases(xml: bytes) -> list[tuple[str, dict[str, str]]]:
    """`profile/check` and what the report says of every case that is ours: verdict (`type`), message, time in seconds, and
    its properties. Raises ValueError for what is no report of ours."""
    if b"<!DOCTYPE" in xml or b"<!ENTITY" in xml:
        raise ValueError("a document type, which a report has not")
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    suites = list(root.iter("testsuite"))
    for suite in suites:
        before = dict(suite.attrib)
        _recount(suite)
        if suite.attrib != before:
            raise ValueError(f"the counts of suite {suite.get('name')} are not those of its cases")
    return [(name, _read(case)) for case in root.iter("testcase") if (name := _property(case, "dspark_case"))]


def _read(case: ElementTree.Element) -> dict[str, str]:
    problems = [child for child in case if child.tag in _PROBLEMS]
    found = {str(one.get("name")): str(one.get("value")) for one in case.iter("property")}
    first = problems[0] if problems else None
    return found | {
        "verdict": "PASS" if first is None else str(first.get("type")),
        "message": "" if first is None else str(first.get("message")),
        "text": "" if first is None else str(first.text or ""),
        "problems": str(len(problems)),
        "tag": "" if first is None else first.tag,
        "time": case.get("time", ""),
        "name": case.get("name", ""),
    }


def _strip(root: ElementTree.Element, project: Callable[[str], str]) -> None:
    """Leave out what was captured, and project every text and attribute that is left."""
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag in ("system-out", "system-err")]:
            parent.remove(child)
    for one in root.iter():
        one.text = project(one.text) if one.text else one.text
        for key, value in one.attrib.items():
            one.set(key, project(value))


def _merge_doubles(suite: ElementTree.Element) -> None:
    first: dict[tuple[str, str], ElementTree.Element] = {}
    for case in list(suite.findall("testcase")):
        key = (case.get("classname", ""), case.get("name", ""))
        if key not in first:
            first[key] = case
            continue
        for child in case:
            if child.tag in _PROBLEMS:
                first[key].append(child)
        suite.remove(case)


def _property(case: ElementTree.Element, name: str) -> str:
    return next((p.get("value", "") for p in case.iter("property") if p.get("name") == name), "")


def _rewrite(case: ElementTree.Element, verdicts: Mapping[str, tuple[str, str]]) -> None:
    known = verdicts.get(_property(case, "dspark_case"))
    for problem in [child for child in case if child.tag in _PROBLEMS]:
        fallback = {"error": "ERROR", "failure": "FAIL", "skipped": "NOT_IMPLEMENTED"}[problem.tag]
        verdict, message = known or (fallback, problem.get("message", ""))
        message = message.removeprefix(f"{verdict}").lstrip(" :")
        problem.set("message", f"{verdict}: {message}"[:_MESSAGE_LIMIT])
        problem.set("type", verdict)
        problem.text = f"{verdict}: {message}"[:_MESSAGE_LIMIT]


def _recount(suite: ElementTree.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for tag, name in (("error", "errors"), ("failure", "failures"), ("skipped", "skipped")):
        suite.set(name, str(sum(1 for case in cases if case.find(tag) is not None)))
