"""What a check says: the finding that was measured, and the verdict that was judged from it.

A finding is data alone, so that the same pure judge gives the same verdict again from a stored finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pytest_dspark.errors import printable


class Status(StrEnum):
    """The seven verdicts; infrastructure, model, token budget and capacity are told apart."""

    PASS = "PASS"
    FAIL = "FAIL"
    TOKEN_LIMIT = "TOKEN_LIMIT"
    ERROR = "ERROR"
    CAPACITY = "CAPACITY"
    BLOCKED = "BLOCKED"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured. `data` is plain JSON: the raw answers, counts and times that a judge needs, and no opinion."""

    check: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one finding. `code` is the finer cause, empty on PASS; `message` is one sentence."""

    status: Status
    code: str = ""
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.status is Status.PASS

    def __str__(self) -> str:
        code = f" {self.code}" if self.code not in ("", str(self.status)) else ""
        return f"{self.status}{code}: {printable(self.message)}" if self.message else f"{self.status}{code}"


PASS = Verdict(Status.PASS)
