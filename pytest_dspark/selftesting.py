"""The self-test: known defects are shown to the gate, the client, the judges, the sanitiser and the verifier, and each must be caught.

A defect is a data file of the folder `selftest`: to whom it is shown, what must be said of it, and its clean twin, which is
the same without the defect and must pass. A new kind of defect is one function in `ADAPTERS` and one file.
"""

from __future__ import annotations

import hashlib
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pytest_dspark import gate, packfile, publish, sanitize, specimen, verify
from pytest_dspark.checks import resolve
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.plan import Plan
from pytest_dspark.reply import StreamReader, plain_reply
from pytest_dspark.strictjson import loads
from pytest_dspark.timing import Timing
from pytest_dspark.verdict import Finding, Status

FOLDER = Path(__file__).parent / "selftest"
# A pack of a rehearsal; `python -m pytest suites -m production --dspark-cluster rehearsal -k "launch or gate or json or teardown"` makes
# another: the folder `publish` of that run, as a tar archive.
# What is derived in it is derived anew, and it is said to be of no version, so that it need not follow every change.
PACK, MADE_BY = "pack.tar.gz", "0.1.0"
KEYS = frozenset({"shown_to", "title", "expect", "defect", "clean"})


@dataclass(frozen=True, slots=True)
class Defect:
    """One file: `expect` is what must be said of `defect`; of `clean` nothing may be said."""

    name: str
    shown_to: str
    title: str
    expect: str
    defect: Mapping[str, Any]
    clean: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many defects were caught and clean twins passed, by whom they were shown to; `missed` says what was not right."""

    caught: Mapping[str, int]
    passed: int
    missed: tuple[str, ...]
    elapsed_s: float

    @property
    def defects(self) -> int:
        return sum(self.caught.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "caught": dict(self.caught),
            "defects_caught": self.defects,
            "clean_passed": self.passed,
            "missed": list(self.missed),
            "elapsed_s": round(self.elapsed_s, 3),
        }

    def __str__(self) -> str:
        by = ", ".join(f"{count} {who}" for who, count in self.caught.items())
        return f"{self.defects} known defects caught ({by}), {self.passed} clean twins passed, {self.elapsed_s:.1f} s"


def read(folder: Path = FOLDER) -> list[Defect]:
    """Every defect of the folder. Raises HARNESS for a file that is none, and for a folder without any."""
    found = [_defect(path) for path in sorted(folder.glob("*.toml"))]
    if not found:
        raise ConfigError("HARNESS", f"{folder}: no defects are there, so nothing shows that anything would be caught")
    return found


def _defect(path: Path) -> Defect:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("HARNESS", f"{path}: {error}") from error
    if set(data) != KEYS or data["shown_to"] not in ADAPTERS or not data["expect"]:
        raise ConfigError(
            "HARNESS", f"{path}: expected the keys {', '.join(sorted(KEYS))}, found {', '.join(sorted(data))}"
        )
    return Defect(path.stem, **data)


def run(
    folder: Path = FOLDER, *, without: Collection[str] = (), clock: Callable[[], float] = time.monotonic
) -> Outcome:
    """Show every defect and every clean twin, but to none of `without`. Raises HARNESS for data that cannot be read."""
    shown = [who for who in ADAPTERS if who not in without]
    begin, caught, missed, passed = clock(), dict.fromkeys(shown, 0), [], 0
    twins: dict[str, str] = {}  # many defects have one and the same clean twin
    for one in read(folder):
        if one.shown_to not in shown:
            continue
        key = f"{one.shown_to} {one.clean}"
        if key not in twins:
            twins[key] = _shown(one, one.clean)
        said, clean = _shown(one, one.defect), twins[key]
        if said == one.expect:
            caught[one.shown_to] += 1
        else:
            missed.append(f"{one.name} ({one.title}): {one.shown_to} said {said or 'nothing'}, expected {one.expect}")
        if clean:
            missed.append(f"{one.name}: the clean twin was refused: {clean}")
        passed += not clean
    return Outcome(caught, passed, tuple(missed), clock() - begin)


def require(folder: Path = FOLDER, *, without: Collection[str] = ()) -> Outcome:
    """The outcome, if every defect was caught. Raises HARNESS if not: then no verdict of this installation is worth anything."""
    outcome = run(folder, without=without)
    if outcome.missed:
        raise ConfigError("HARNESS", f"the self-test failed, nothing was launched: {'; '.join(outcome.missed[:5])}")
    return outcome


def _shown(one: Defect, case: Mapping[str, Any]) -> str:
    """What is said of the case: a code, a requirement, or nothing. An error that is not ours is said by its name."""
    try:
        return ADAPTERS[one.shown_to](case)
    except DsparkError as error:
        return error.code
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


# --- the client


def _client(case: Mapping[str, Any]) -> str:
    """`stream`: the body of a streamed answer, in packets; `plain`: the body of one that is not."""
    timing = Timing(None, None, None, 1.0)
    if "plain" in case:
        return _other(case, plain_reply(loads(case["plain"]), {}, "", timing).text)
    reader = StreamReader()
    for number, packet in enumerate(case["stream"]):
        reader.feed(packet.encode("utf-8"), float(number))
    reader.feed(b"", float(len(case["stream"])))
    reply = reader.reply({}, "", timing)
    if case.get("tokens") is not None and (not reply.usage or reply.usage.completion_tokens != case["tokens"]):
        return "WRONG_COUNT"
    return _other(case, reply.text)


def _other(case: Mapping[str, Any], text: str) -> str:
    return "" if text == case.get("text", text) else "WRONG_TEXT"


# --- the judges


def _judges(case: Mapping[str, Any]) -> str:
    """`check`, its `finding` and the `limits` of a recipe: the verdict with its code."""
    verdict = resolve(case["check"]).judge(Finding(case["check"], case["finding"]), case.get("limits", {}))
    if verdict.status is Status.PASS:
        return ""
    return f"{verdict.status} {verdict.code}".strip()


# --- the sanitiser


def _sanitiser(case: Mapping[str, Any]) -> str:
    """`text` or `argv`, with the secret `values` that are known: nothing of `hides` may be left, all of `keeps` must be."""
    values = case.get("values", ())
    shown = " ".join(sanitize.mask_argv(case["argv"])) if "argv" in case else sanitize.mask_text(case["text"], values)
    if any(secret in shown for secret in case["hides"]):
        return "LEAKED"
    if any(word not in shown for word in case["keeps"]):
        return "DAMAGED"
    return "" if shown == case.get("text", shown) else "MASKED"


# --- the gate


@cache
def _good() -> tuple[Plan, tuple[gate.Rank, ...], gate.Api]:
    made = specimen.planned()
    return made, tuple(specimen.good_rank(made, number) for number in range(len(made.specs))), specimen.good_api(made)


def _gate(case: Mapping[str, Any]) -> str:
    """`changes` of a good pair of ranks: the requirement that is not met any more, the first of several."""
    made, ranks, api = _good()
    found = list(ranks)
    for change in case.get("changes", ()):
        if "rank" in change:
            found[change["rank"]] = _changed(found[change["rank"]], change)
        else:
            api = _changed_api(api, change)
    failure = gate.examine(made, found, api).first_failure
    return f"gate.{failure[0]}" if failure else ""


def _changed(rank: gate.Rank, change: Mapping[str, Any]) -> gate.Rank:
    """The rank with one thing changed: the log, the environment, an argument, a label, or a field of what was inspected."""
    facts = rank.facts
    if "log" in change:
        return replace(rank, log_text="\n".join(_without(rank.log_text.splitlines(), change)) + "\n")
    if "env" in change:
        return replace(rank, facts=replace(facts, environment=tuple(_without(facts.environment, change["env"]))))
    if "args" in change:
        return replace(rank, facts=replace(facts, args=tuple(_without(facts.args, change["args"]))))
    if "label" in change:
        return replace(rank, image=replace(rank.image, labels={**rank.image.labels, **change["label"]}))
    if "facts" in change:
        return replace(rank, facts=replace(facts, **change["facts"]))
    return replace(rank, **change["set"])


def _without(lines: Sequence[str], change: Mapping[str, Any]) -> Iterator[str]:
    """The lines without those that hold `drop`, with `old` written as `new`, and `add` at the end."""
    for line in lines:
        if not ("drop" in change and change["drop"] in line):
            yield change["new"] if line == change.get("old") else line
    if "add" in change:
        yield change["add"]


def _changed_api(api: gate.Api, change: Mapping[str, Any]) -> gate.Api:
    if "canary" in change:
        wrong = {"ok": False, "answered": True, "text": "y", "finish_reason": "stop", "message": "a wrong answer"}
        return replace(api, canaries={**api.canaries, change["canary"]: wrong})
    return replace(api, **change["api"])


# --- the verifier


def _verifier(case: Mapping[str, Any]) -> str:
    """`changes` of a good pack: a file's `old` text written as `new`, a file added or removed. `summed` corrects the sums of
    what was changed in SHA256SUMS and in the statement, as somebody would who knows how a pack is made."""
    with packfile.opened(FOLDER / PACK) as folder:
        _edit(folder, {"file": "versions.json", "old": f'"{MADE_BY}"', "new": '"0"'})
        publish.derive(folder)
        for change in case.get("changes", ()):
            _edit(folder, change)
        return "" if verify.examine(folder, pages=True).verified else "NOT_VERIFIED"


def _edit(folder: Path, change: Mapping[str, Any]) -> None:
    path = folder / change["file"]
    if "add" in change:
        path.write_text(change["add"], encoding="utf-8")
    elif change.get("remove"):
        path.unlink()
    else:
        before = path.read_text(encoding="utf-8")
        if change["old"] not in before:
            raise ValueError(
                f"{change['file']} does not hold {change['old']!r}: the pack was made anew, and this was not"
            )
        path.write_text(before.replace(change["old"], change["new"], 1), encoding="utf-8")
        if change.get("summed"):
            _sum_again(folder, before, path.read_text(encoding="utf-8"))


def _sum_again(folder: Path, before: str, after: str) -> None:
    old, new = (hashlib.sha256(text.encode("utf-8")).hexdigest() for text in (before, after))
    for name in ("SHA256SUMS", "statement.json"):
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


Adapter = Callable[[Mapping[str, Any]], str]
ADAPTERS: Mapping[str, Adapter] = {
    "gate": _gate,
    "client": _client,
    "judges": _judges,
    "sanitiser": _sanitiser,
    "verifier": _verifier,
}
