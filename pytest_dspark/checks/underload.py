"""Is the engine right while it works for others? Condense, cross-talk and staggered arrivals.

Condense asks a question alone and again beside threads that come and go, and looks at the first token in which the texts
differ. Cross-talk gives every stream a secret of its own. Staggered lets prefills fall between the steps of others. Nothing
here is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_dspark import divergence
from pytest_dspark.answers import codes_in, final_answer, judge_code, shape_of
from pytest_dspark.asking import (
    answer,
    ask,
    ask_many,
    checked,
    garble_verdict,
    judge_question,
    section,
    streams_of,
    token_limit,
)
from pytest_dspark.audit import near, prompt_sha256, same
from pytest_dspark.checks import Check
from pytest_dspark.divergence import Parting, losers, parting, tokens_of
from pytest_dspark.errors import DsparkError
from pytest_dspark.garble import garbled
from pytest_dspark.haystack import new_code, new_nonce
from pytest_dspark.live import Live
from pytest_dspark.metrics import Figure, Metrics, delta
from pytest_dspark.proportion import share, shown
from pytest_dspark.reply import RequestError
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

FIRST_CHURN_S = 0.01

# --- condense


def measure_condense(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """Every victim alone, then as often as `rounds` says beside threads that send tiny questions all the time."""
    asked = section(settings, "condense")
    victims = [checked(victim, "checks.underload.condense") for victim in asked["victims"]]
    churning = streams_of(settings, asked["churn"] + 1) - 1
    before = endpoint.metrics()
    alone = [_victim(endpoint, settings, victim) for victim in victims]
    between = endpoint.metrics()
    with churn(endpoint, settings, churning) as others:
        beside = [_beside(endpoint, settings, victims, others) for _ in range(asked["rounds"])]
    after = endpoint.metrics()
    rows = _compared(victims, alone, beside, asked["margin"])
    told = share(sum(one["parting"]["kind"] != divergence.SAME for one in rows), len(rows))
    live.line(f"underload.condense: diverged in {shown(told)}")
    data = {
        "margin": asked["margin"],
        "churn": {"threads": churning, "answers": others.answers, "garbled": others.garbled},
        "victims": victims,
        "alone": alone,
        "beside": rows,
        "diverged": told,
        "acceptance": {"alone": acceptance(before, between), "beside": acceptance(between, after)},
    }
    return Finding("underload.condense", data)


def _victim(endpoint: Endpoint, settings: Mapping[str, Any], victim: Mapping[str, Any]) -> dict[str, Any]:
    """One answer with its tokens; a server that refuses log probabilities is asked without, and that is said."""
    # A model's own generation_config may punish repetitions, and then the most likely token is not the one that is taken.
    given: dict[str, Any] = {"extra": {"repetition_penalty": 1.0}}
    given |= {"max_tokens": victim["max_tokens"]} if "max_tokens" in victim else {}
    try:
        reply = ask(endpoint, settings, victim["prompt"], logprobs=settings["condense"]["alternatives"], **given)
        refused = "" if reply.logprobs is not None else "the server sent no log probabilities"
    except RequestError as error:
        if error.status != 400 or "logprob" not in error.message.lower():
            raise
        reply, refused = ask(endpoint, settings, victim["prompt"], **given), error.message
    return {**answer(reply), "tokens": tokens_of(reply), "tokens_missing": refused}


def _beside(
    endpoint: Endpoint, settings: Mapping[str, Any], victims: Sequence[Mapping[str, Any]], others: Churn
) -> list[dict[str, Any]]:
    found = []
    for victim in victims:
        begun = others.begun
        reply = _victim(endpoint, settings, victim)
        found.append({**reply, "others": others.in_flight + others.begun - begun})
    return found


def _compared(
    victims: Sequence[Mapping[str, Any]],
    alone: Sequence[Mapping[str, Any]],
    beside: Sequence[Sequence[Mapping[str, Any]]],
    margin: float,
) -> list[dict[str, Any]]:
    return [
        {"victim": number, "parting": parting(alone[number], replies[number], margin).as_json(), **replies[number]}
        for replies in beside
        for number in range(len(victims))
    ]


def acceptance(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Tokens a step of speculation, 1 + accepted / drafts, between two readings; reported, and never a criterion."""
    accepted = delta(before, after, "vllm:spec_decode_num_accepted_tokens_total")
    drafts = delta(before, after, "vllm:spec_decode_num_drafts_total")
    missing = next((figure.reason for figure in (accepted, drafts) if figure.value is None), "")
    length = None if missing or not drafts.value else 1 + _number(accepted) / drafts.value
    return {
        "length": length,
        "missing": missing or ("" if length else "no draft was made"),
        "accepted": accepted.value,
        "drafts": drafts.value,
    }


def _number(figure: Figure) -> float:
    return figure.value or 0.0


def judge_condense(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if every text is whole and right, alone and beside others, no token was clearly less likely than another one, and
    texts part at near ties alone."""
    data = finding.data
    margin = limits["condense"]["margin"]
    lonely = [number for number, one in enumerate(data["beside"]) if one["others"] < 1]
    if lonely or not data["beside"]:
        return Verdict(Status.ERROR, "HARNESS", f"nothing ran beside victim {lonely}: it was not under load")
    if data["churn"]["garbled"]:
        return Verdict(Status.FAIL, "GARBLED", f"an answer of the threads beside it: {data['churn']['garbled'][0]}")
    replies = [*((one, number, "alone") for number, one in enumerate(data["alone"]))]
    replies += [(one, one["victim"], "beside others") for one in data["beside"]]
    verdicts = [_judge_text(one, data["victims"][number], margin, how) for one, number, how in replies]
    verdicts += [_judge_parting(data["alone"][one["victim"]], one, margin) for one in data["beside"]]
    order = ("LOSSY", "DIVERGED", "GARBLED")
    bad = sorted((one for one in verdicts if not one.passed), key=lambda one: (one.code not in order, one.code))
    return bad[0] if bad else PASS


def _judge_text(reply: Mapping[str, Any], victim: Mapping[str, Any], margin: float, how: str) -> Verdict:
    lost = losers(reply["tokens"], margin)
    if lost:
        worst = max(lost, key=lambda one: float(one["by"]))
        text = f"{how}: {len(lost)} of {len(reply['tokens'])} tokens lost clearly; token {worst['at']} is {worst['token']!r}"
        return Verdict(Status.FAIL, "LOSSY", f"{text}, {worst['more_likely']!r} was more likely by {worst['by']:g}")
    verdict = judge_question(victim, reply)
    return verdict if verdict.passed else Verdict(verdict.status, verdict.code, f"{how}: {verdict.message}")


def _judge_parting(alone: Mapping[str, Any], beside: Mapping[str, Any], margin: float) -> Verdict:
    found: Parting = parting(alone, beside, margin)
    if found.kind != divergence.CLEAR_LOSS:
        return PASS
    return Verdict(Status.FAIL, "DIVERGED", found.message)


class Churn:
    """Threads that send tiny questions one after the other until they are stopped; the first failure ends them all."""

    def __init__(self, endpoint: Endpoint, settings: Mapping[str, Any]) -> None:
        self._endpoint, self._settings = endpoint, settings
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.begun = self.answers = self.in_flight = 0
        self.garbled: list[str] = []
        self.failed: DsparkError | None = None

    def stop(self) -> None:
        self._stop.set()

    def work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self.begun += 1
                self.in_flight += 1
            try:
                self._one()
            except DsparkError as error:
                self.failed = self.failed or error
                self.stop()
            finally:
                with self._lock:
                    self.in_flight -= 1

    def _one(self) -> None:
        asked = self._settings["condense"]
        prompt = f"{asked['churn_prompt']} ({new_nonce()})"
        reply = ask(self._endpoint, self._settings, prompt, max_tokens=asked["churn_tokens"])
        problem = garbled(reply.text + reply.reasoning, cut=True, loops=False)
        with self._lock:
            self.answers += 1
            self.garbled += [f"{problem}, in {reply.text[:80]!r}"] if problem else []


@contextmanager
def churn(endpoint: Endpoint, settings: Mapping[str, Any], threads: int) -> Iterator[Churn]:
    """So many threads at work, all of them before the body begins. Raises what the first failure raised."""
    others = Churn(endpoint, settings)
    with ThreadPoolExecutor(threads, thread_name_prefix="churn") as pool:
        jobs = [pool.submit(others.work) for _ in range(threads)]
        try:
            while others.begun < threads and others.failed is None:
                with suppress(TimeoutError):
                    jobs[0].result(timeout=FIRST_CHURN_S)
            yield others
        finally:
            others.stop()
    if others.failed is not None:
        raise others.failed


# --- cross-talk


def measure_crosstalk(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """Streams that begin together, each with a secret code that nobody else was told, in several rounds."""
    asked = section(settings, "crosstalk")
    count = streams_of(settings, asked["streams"])
    rounds = [_secrets(count, asked["code"]) for _ in range(asked["rounds"])]
    found = []
    for codes in rounds:
        prompts = [(asked["prompt"].replace("{code}", code).replace("{nonce}", new_nonce()), 0.0) for code in codes]
        replies = ask_many(endpoint, settings, prompts)
        found.append([{"code": code, **answer(reply)} for code, reply in zip(codes, replies, strict=True)])
    return Finding("underload.crosstalk", {"streams": count, "rounds": found})


def _secrets(count: int, shape: str) -> list[str]:
    codes: dict[str, None] = {}
    while len(codes) < count:
        codes[new_code(shape)] = None
    return list(codes)


def judge_crosstalk(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """A secret in another stream's answer or reasoning is FAIL and names both; beyond that at least `floor` of the streams
    must tell their own."""
    rounds = finding.data["rounds"]
    streams = [one for streams in rounds for one in streams]
    leaks = list(_leaks(rounds))
    if leaks:
        return Verdict(Status.FAIL, "CROSS_TALK", f"{leaks[0]}; {len(leaks)} such answers of {len(streams)}")
    broken = next(filter(None, map(garble_verdict, streams)), None)
    if broken:
        return broken
    wrong = [one for one in streams if not judge_code(one["text"], one["reasoning"], one["code"]).ok]
    floor = limits["crosstalk"].get("floor", 1.0)
    if streams and len(streams) - len(wrong) >= floor * len(streams):
        return PASS
    cut = next(filter(None, map(token_limit, wrong)), None)
    why = judge_code(wrong[0]["text"], wrong[0]["reasoning"], wrong[0]["code"]).message if wrong else "no stream"
    text = (
        f"{len(streams) - len(wrong)} of {len(streams)} told their own secret, expected {floor:.0%}; first wrong: {why}"
    )
    return cut or Verdict(Status.FAIL, "WRONG_ANSWER", text)


def _leaks(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Answers that hold another stream's secret, of this round or of another one."""
    owners = {
        one["code"]: f"stream {at} of round {turn}"
        for turn, round_ in enumerate(rounds)
        for at, one in enumerate(round_)
    }
    for one in (one for round_ in rounds for one in round_):
        text = f"{final_answer(one['text'], '').answer}\n{one['text']}\n{one['reasoning']}"
        for code in codes_in(text, shape_of(one["code"])):
            if code in owners and code != one["code"]:
                yield f"{owners[one['code']]} said {code}, the secret of {owners[code]} (its own is {one['code']})"


# --- staggered


def measure_staggered(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One stream every so many seconds; the recipe's questions take turns."""
    asked = section(settings, "staggered")
    questions = [checked(question, "checks.underload.staggered") for question in asked["questions"]]
    count = streams_of(settings, asked["streams"])
    turns = [questions[number % len(questions)] for number in range(count)]
    due = [(turn["prompt"], number * asked["every_s"]) for number, turn in enumerate(turns)]
    replies = ask_many(endpoint, settings, due)
    rows = [{"question": dict(turn), **answer(reply)} for turn, reply in zip(turns, replies, strict=True)]
    return Finding("underload.staggered", {"every_s": asked["every_s"], "streams": rows})


def judge_staggered(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if every single answer is whole and right."""
    streams = finding.data["streams"]
    verdicts = [judge_question(one["question"], one) for one in streams]
    bad = [(number, verdict) for number, verdict in enumerate(verdicts) if not verdict.passed]
    if not bad:
        return PASS if streams else Verdict(Status.ERROR, "HARNESS", "no stream was asked")
    number, first = bad[0]
    return Verdict(first.status, first.code, f"{len(bad)} of {len(streams)} streams; stream {number}: {first.message}")


# --- what follows from what


def audit_condense(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    """Partings, their share and the length of acceptance, made again; victims, margin and load as the recipe says."""
    data, asked = finding.data, settings["condense"]
    yield from same("victims", data["victims"], asked["victims"])
    yield from same("margin", data["margin"], asked["margin"])
    yield from same("churn.threads", data["churn"]["threads"], streams_of(settings, asked["churn"] + 1) - 1)
    yield from same("rounds", len(data["beside"]), asked["rounds"] * len(data["victims"]))
    victims = [*range(len(data["victims"])), *(one["victim"] for one in data["beside"])]
    for number, reply in zip(victims, [*data["alone"], *data["beside"]], strict=True):
        yield from same("prompt_sha256", reply["prompt_sha256"], prompt_sha256(data["victims"][number]["prompt"]))
    for at, one in enumerate(data["beside"]):
        again = parting(data["alone"][one["victim"]], one, data["margin"]).as_json()
        yield from same(f"beside.{at}.parting", one["parting"], again)
    differ = sum(one["parting"]["kind"] != divergence.SAME for one in data["beside"])
    yield from same("diverged", data["diverged"], share(differ, len(data["beside"])))
    for when, told in data["acceptance"].items():
        length = 1 + told["accepted"] / told["drafts"] if told["drafts"] and told["accepted"] is not None else None
        yield from near(f"acceptance.{when}.length", told["length"], length)


def audit_crosstalk(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    asked, rounds = settings["crosstalk"], finding.data["rounds"]
    yield from same("streams", finding.data["streams"], streams_of(settings, asked["streams"]))
    yield from same("rounds", [len(one) for one in rounds], [finding.data["streams"]] * asked["rounds"])


def audit_staggered(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    asked, streams = settings["staggered"], finding.data["streams"]
    yield from same("every_s", finding.data["every_s"], asked["every_s"])
    yield from same("streams", len(streams), streams_of(settings, asked["streams"]))
    for number, one in enumerate(streams):
        turn = asked["questions"][number % len(asked["questions"])]
        yield from same(f"streams.{number}.question", one["question"], turn)
        yield from same(f"streams.{number}.prompt_sha256", one["prompt_sha256"], prompt_sha256(turn["prompt"]))


CHECKS = {
    "condense": Check(measure_condense, judge_condense, exclusive=True, audit=audit_condense),
    "crosstalk": Check(measure_crosstalk, judge_crosstalk, exclusive=True, audit=audit_crosstalk),
    "staggered": Check(measure_staggered, judge_staggered, exclusive=True, audit=audit_staggered),
}
