"""publish/junit.xml: derived from pytest's own report, which is left untouched as raw evidence.

pytest cannot put a word first in a set-up error's message or give it a type, it writes the host's name, and it makes two
cases of a failed test whose teardown fails too. Here each case has its verdict as the first word and as `type`, the host
name is replaced, and doubled cases are merged; ids stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

_MESSAGE_LIMIT = 2000
_PROBLEMS = ("error", "failure", "skipped")


def derive(raw: Path, verdicts: Mapping[str, tuple[str, str]]) -> bytes:
    """The publishable report of a raw one.

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
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def case_ids(xml: bytes) -> Counter[tuple[str, str]]:
    """(classname, name) of every case, to check that both reports hold the same ones."""
    root = ElementTree.fromstring(xml)
    return Counter((case.get("classname", ""), case.get("name", "")) for case in root.iter("testcase"))


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
