"""Needle in a haystack: does the engine hold and read the window that it advertises? One cell a share of the window.

A cell is one prompt of exactly int((M - reserve) * share) tokens, M as /v1/models says it, with a needle in the middle and
decoys around. What the pool cannot hold is not sent. It is sent once and never again, and how long it takes is recorded
and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark import answers, haystack, prefill, prose
from pytest_dspark.audit import rising, same
from pytest_dspark.checks import Check
from pytest_dspark.checks.correctness import answer
from pytest_dspark.errors import BlockedError, ConfigError, EndpointError
from pytest_dspark.haystack import Body, Encode, Prompt, Secret, Template
from pytest_dspark.live import Live
from pytest_dspark.metrics import Figure, Metrics, delta
from pytest_dspark.recipe import Needle, needle_of
from pytest_dspark.reply import Reply
from pytest_dspark.tokens import Tokenizer, load_tokenizer
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

CELLS: Final = (25, 50, 90)
"""Shares of the usable window in percent."""
ROUNDS: Final = 5
"""Times that a text is sized anew until the server counts as planned."""
COUNT_S: Final = 120.0
MARKUP: Final = ("<|", "<｜", "<think>", "</think>", "[INST]", "<s>", "</s>")
"""What a server may read as tokens of its template: not allowed in a text that the server itself encodes."""
PLACE: Final = 200
"""Tokens that one needle has at most, and by which it may stand beside its place."""
NEW_TEXT: Final = "7 herons stood still (all of them)"


# --- how large, and whether it fits


@dataclass(frozen=True, slots=True)
class Size:
    """One cell in tokens: the window, the prompt, the answer's budget, and the pool with who said so."""

    window: int
    reserve: int
    percent: int
    prompt: int
    budget: int
    pool: int | None
    pool_source: str

    @property
    def fits(self) -> bool:
        """False only when it is known that it does not."""
        return self.pool is None or self.prompt + self.budget <= self.pool

    def as_json(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "reserve": self.reserve,
            "percent": self.percent,
            "planned_tokens": self.prompt,
            "max_tokens": self.budget,
            "pool_tokens": self.pool,
            "pool_source": self.pool_source,
        }


def depth(window: int, reserve: int, percent: int) -> int:
    """Prompt tokens of a cell: int((window - reserve) * percent / 100)."""
    return (window - reserve) * percent // 100


def size_of(endpoint: Endpoint, metrics: Metrics, options: Needle, percent: int, log_pool: int | None) -> Size:
    """Raises PROTOCOL if the server does not tell its window, RECIPE_INVALID if the reserve leaves nothing of it."""
    window = _window(endpoint)
    if window <= options.reserve:
        raise ConfigError("RECIPE_INVALID", f"checks.needle: reserve is {options.reserve}, the window {window} tokens")
    pool, source = _pool(metrics.kv_pool, log_pool)
    prompt = depth(window, options.reserve, percent)
    return Size(window, options.reserve, percent, prompt, options.budget, pool, source)


def _window(endpoint: Endpoint) -> int:
    cards = endpoint.models()
    card = next((card for card in cards if card.id == endpoint.model), None)
    if card is None or card.max_model_len is None:
        problem = card.problem if card else f"it serves {', '.join(one.id for one in cards) or 'nothing'}"
        raise EndpointError("PROTOCOL", f"{endpoint.base_url}/v1/models: no window of {endpoint.model}: {problem}")
    return card.max_model_len


def _pool(told: Figure, log_pool: int | None) -> tuple[int | None, str]:
    if told.value is not None:
        return int(told.value), "metrics: kv_cache_size_tokens"
    if log_pool is not None:
        return log_pool, "engine log"
    return None, f"unknown: {told.reason}; the engine's log does not say it either"


# --- the prompt


@dataclass(frozen=True, slots=True)
class Coder:
    """Text to ids as the server does it; `how` says by what, `template` what a chat adds."""

    encode: Encode
    how: str
    template: Template
    tokenizer: Tokenizer | None = None


def coder(endpoint: Endpoint, options: Needle, settings: Mapping[str, Any], sample: str) -> Coder:
    """The local tokenizer.json if its ids are the server's, else the server's own /tokenize.

    Raises what the tokenizer's file raised if the recipe names it, PROTOCOL if not even the server's own ids of a text are
    those within its template.
    """
    render = partial(_rendered, endpoint, options)
    samples = (sample, f"{NEW_TEXT} {haystack.new_nonce()})")
    tokenizer, problem = _local(options, settings)
    if tokenizer is not None:
        try:
            template = haystack.template_of(render, tokenizer.encode, samples)
            return Coder(tokenizer.encode, f"tokenizer.json sha256 {tokenizer.sha256}", template, tokenizer)
        except EndpointError as error:
            if error.code != "PROTOCOL" or options.tokenizer:
                raise
            problem = f"the local tokenizer.json is not the server's: {error.message}"
    encode = partial(_server_ids, endpoint)
    return Coder(encode, f"the server's /tokenize in pieces ({problem})", haystack.template_of(render, encode, samples))


def _local(options: Needle, settings: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    cache = Path(settings["cache"]) if settings.get("cache") else None
    if options.tokenizer:
        return load_tokenizer(Path(options.tokenizer), cache=cache), ""
    found = [path for folder in settings.get("models", ()) if (path := Path(folder) / "tokenizer.json").is_file()]
    if not found:
        return None, "no tokenizer.json on this machine"
    try:
        return load_tokenizer(found[0], cache=cache), ""
    except ConfigError as error:
        return None, error.message


def _server_ids(endpoint: Endpoint, text: str) -> Sequence[int]:
    return endpoint.tokenize(text, add_special_tokens=False, deadline_s=COUNT_S)


def _rendered(endpoint: Endpoint, options: Needle, text: str) -> tuple[Sequence[int], str]:
    given = {} if options.thinking is None else {"chat_template_kwargs": {"thinking": options.thinking}}
    found = endpoint.render([{"role": "user", "content": text}], deadline_s=COUNT_S, **given)
    return found.ids, found.how


def body_of(options: Needle, made: Coder, challenge: str = "") -> tuple[Body, dict[str, Any]]:
    """The filler and what is to be known of it."""
    if not options.filler:
        seed = haystack.seed_of(challenge, options.seed)
        return Body(prose.generated(seed), made.encode), {"kind": "generated", "seed": seed}
    path = Path(options.filler)
    blocks = prose.from_file(path, options.filler_sha256)
    if options.send == "chat" or made.tokenizer is None:
        blocks = _without_markup(blocks, path)
    return Body(blocks, made.encode), {"kind": "file", "sha256": options.filler_sha256}


def _without_markup(blocks: Iterator[tuple[str, ...]], path: Path) -> Iterator[tuple[str, ...]]:
    for block in blocks:
        for mark in MARKUP:
            if any(mark in sentence for sentence in block):
                text = f"{path}: the filler holds {mark!r}, which a server that encodes text may take for its own"
                raise ConfigError("RECIPE_INVALID", text)
        yield block


def prompt_of(
    endpoint: Endpoint, options: Needle, made: Coder, body: Body, tokens: int, secrets: Sequence[Secret]
) -> Prompt:
    """The prompt of exactly `tokens` tokens; a text that the server encodes is sized until the server counts as planned."""
    nonce, question = haystack.new_nonce(), haystack.asked(options, secrets)
    wanted = tokens
    for _ in range(ROUNDS):
        prompt = haystack.compose(body, wanted, secrets=secrets, question=question, template=made.template, nonce=nonce)
        if options.send == "ids":
            return prompt
        counted, _ = _rendered(endpoint, options, prompt.text)
        if len(counted) == tokens:
            return prompt
        wanted += tokens - len(counted)
    text = f"asked for {tokens:,} tokens, the server counts {len(counted):,} after {ROUNDS} rounds of sizing"
    raise EndpointError("PROTOCOL", text)


# --- measuring


def measure(percent: int, endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One cell: sized, built, sent once, watched."""
    name, options = f"needle.{percent}pct", _options(settings)
    before = endpoint.metrics()
    size = size_of(endpoint, before, options, percent, settings.get("log_pool"))
    if not size.fits:
        return Finding(name, {**size.as_json(), "sent": False})
    _not_after_a_stall(size, settings.get("earlier", ()))
    challenge = settings.get("challenge", "")
    secrets = haystack.new_secrets(options, haystack.chooser(challenge, name))
    made = coder(endpoint, options, settings, f"{haystack.new_nonce()}\n\n {secrets[0].sentence}{haystack.CLOSING}Why?")
    body, filler = body_of(options, made, challenge)
    prompt = prompt_of(endpoint, options, made, body, size.prompt, secrets)
    data = {**size.as_json(), "sent": True, "counted_by": made.how, "filler": filler, **_prompt_json(prompt)}
    del body
    return Finding(name, data | _sent(name, endpoint, options, prompt, size, settings, live))


def _not_after_a_stall(size: Size, earlier: Sequence[Mapping[str, Any]]) -> None:
    """What was not scheduled for a smaller prompt is not for this one."""
    for cell in earlier:
        if cell.get("stuck") and cell["planned_tokens"] <= size.prompt:
            cause = f"CAPACITY_STALL: a prompt of {cell['planned_tokens']:,} tokens was never scheduled"
            raise BlockedError("BLOCKED", f"first cause: {cause}; this one has {size.prompt:,}")


def _options(settings: Mapping[str, Any]) -> Needle:
    known = {field.name for field in fields(Needle)}
    return needle_of({key: value for key, value in settings.items() if key in known}, "checks.needle")


def _prompt_json(prompt: Prompt) -> dict[str, Any]:
    """All of a prompt but its text: where each secret stands, and what identifies it."""
    placed = [
        {
            "label": place.secret.label,
            "code": place.secret.code,
            "sentence": place.secret.sentence,
            "share": place.secret.share,
            "offset": place.offset,
            "tokens": place.tokens,
        }
        for place in prompt.placed
    ]
    decoys = [place.secret.decoy for place in prompt.placed]
    return {
        "nonce": prompt.nonce,
        "prompt_tokens_built": len(prompt.ids),
        "prompt_sha256": prompt.sha256,
        "needles": [one for one, decoy in zip(placed, decoys, strict=True) if not decoy],
        "decoys": [one for one, decoy in zip(placed, decoys, strict=True) if decoy],
        "template": {
            "before": len(prompt.template.before),
            "after": len(prompt.template.after),
            "how": prompt.template.how,
        },
    }


def _sent(
    name: str,
    endpoint: Endpoint,
    options: Needle,
    prompt: Prompt,
    size: Size,
    settings: Mapping[str, Any],
    live: Live,
) -> dict[str, Any]:
    """The one request, and what the server counted meanwhile. What ends as stuck is data, too."""
    before = endpoint.metrics()
    watcher = prefill.Watcher(
        endpoint,
        prefill.Job(name, size.prompt, size.pool),
        live,
        before=before,
        stall_s=options.stall_s,
        poll_s=options.poll_s,
        curve=prefill.fitted(finished_cells(settings.get("earlier", ()))),
        readings=settings.get("readings", dict),
    )
    with prefill.watched(watcher):
        try:
            reply = _ask(endpoint, options, prompt, watcher)
        except EndpointError as error:
            if not watcher.stuck:
                raise _told(error, name, size, watcher) from error
            seen = {"by": watcher.last.by, "looks": watcher.looks}
            return {"method": _method(options), "stuck": watcher.stuck, "reply": None, "progress": seen}
    data = _answered(options, reply, before, endpoint.metrics(), watcher)
    live.line(f"{name}: {size.prompt:,} tokens answered, {_first(data['timing']['first_token_s'])}")
    return data


def _first(seconds: float | None) -> str:
    return "no text came" if seconds is None else f"first token after {prefill.clock_text(seconds)} ({seconds:.1f} s)"


def _told(error: EndpointError, name: str, size: Size, watcher: prefill.Watcher) -> EndpointError:
    done = "unknown" if watcher.last.tokens is None else f"{watcher.last.tokens:,}"
    return EndpointError(
        error.code, f"{name} of {size.prompt:,} tokens, done {done} ({watcher.last.by}): {error.message}"
    )


def _ask(endpoint: Endpoint, options: Needle, prompt: Prompt, watcher: prefill.Watcher) -> Reply:
    def seen(_: object) -> None:
        watcher.answering = True

    given: dict[str, Any] = {"max_tokens": options.budget, "stream": True, "on_event": seen}
    given |= {"deadline_s": options.deadline_s, "stall_s": math.inf}
    if options.send == "ids":
        return endpoint.complete(prompt.ids.tolist(), **given)
    return endpoint.chat([{"role": "user", "content": prompt.text}], thinking=options.thinking, **given)


def _method(options: Needle) -> str:
    return {"ids": "token ids to /v1/completions", "chat": "text to /v1/chat/completions"}[options.send]


def _answered(
    options: Needle, reply: Reply, before: Metrics, after: Metrics, watcher: prefill.Watcher
) -> dict[str, Any]:
    hits = delta(before, after, "vllm:prefix_cache_hits_total")
    cached = reply.usage.cached_tokens if reply.usage else None
    times = reply.timing
    assert times is not None
    return {
        "method": _method(options),
        "stuck": "",
        "reply": answer(reply),
        "cache": {
            "state": cache_state(hits.value, cached),
            "prefix_hits": hits.value,
            "prefix_hits_missing": hits.reason or None,
            "cached_tokens": cached,
        },
        "timing": {"first_token_s": times.first_token_s, "last_token_s": times.last_token_s, "end_s": times.end_s},
        "progress": {"by": watcher.last.by, "looks": watcher.looks},
    }


def cache_state(hits: float | None, cached: int | None) -> str:
    """`cold`, `warm` or `unknown`, by the server's hit counter first, then by the usage. Unknown is not cold."""
    known = hits if hits is not None else cached
    return "unknown" if known is None else "warm" if known > 0 else "cold"


def finished_cells(earlier: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(prompt tokens, seconds to the first token) of cells that were answered cold."""
    cells = [cell for cell in earlier if cell.get("reply") and cell["cache"]["state"] == "cold"]
    return [
        (cell["planned_tokens"], cell["timing"]["first_token_s"]) for cell in cells if cell["timing"]["first_token_s"]
    ]


# --- judging


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if the prompt was of exactly the planned tokens as the server counts, and the answer holds the needles' codes
    and no other. Time decides nothing."""
    data = finding.data
    return _unsent(data) or _stuck(data) or _miscounted(data) or _cut(data) or _codes(data)


def _unsent(data: Mapping[str, Any]) -> Verdict | None:
    if data["sent"]:
        return None
    if data["pool_tokens"] is None or data["planned_tokens"] + data["max_tokens"] <= data["pool_tokens"]:
        return Verdict(Status.ERROR, "HARNESS", "the cell was not sent, and nothing says that it does not fit")
    pool = f"the pool holds {data['pool_tokens']:,} tokens ({data['pool_source']})"
    need = f"the cell needs {data['planned_tokens']:,} and {data['max_tokens']} for the answer"
    return Verdict(Status.CAPACITY, "CAPACITY", f"{pool}, {need}; nothing was sent")


def _stuck(data: Mapping[str, Any]) -> Verdict | None:
    if not data["stuck"]:
        return None
    pool = "unknown" if data["pool_tokens"] is None else f"{data['pool_tokens']:,} tokens"
    text = f"the prompt of {data['planned_tokens']:,} tokens was accepted and never scheduled: {data['stuck']} (pool {pool})"
    return Verdict(Status.ERROR, "CAPACITY_STALL", text)


def _miscounted(data: Mapping[str, Any]) -> Verdict | None:
    counted, planned = data["reply"]["prompt_tokens"], data["planned_tokens"]
    if counted is None:
        why = data["reply"]["usage_missing"] or "the usage has no prompt_tokens"
        return Verdict(
            Status.ERROR, "PROTOCOL", f"planned {planned:,} prompt tokens, and nothing says what was read: {why}"
        )
    if counted != planned:
        return Verdict(
            Status.ERROR, "PROTOCOL", f"the server counted {counted:,} prompt tokens, planned were {planned:,}"
        )
    if data["method"].startswith("token ids") and data["reply"]["prompt_sha256"] != data["prompt_sha256"]:
        return Verdict(Status.ERROR, "HARNESS", "what was sent is not the prompt that was built")
    return None


def _cut(data: Mapping[str, Any]) -> Verdict | None:
    reply = data["reply"]
    if reply["finish_reason"] == "length":
        text = f"the budget ended after {reply['completion_tokens']} tokens, before the answer was finished"
        return Verdict(Status.TOKEN_LIMIT, "TOKEN_LIMIT", f"{text}: {reply['text'][:80]!r}")
    if reply["finish_reason"] != "stop":
        text = f"the answer ended with {reply['finish_reason']!r}, expected 'stop'"
        return Verdict(Status.FAIL, "WRONG_ANSWER", text)
    return None


def _codes(data: Mapping[str, Any]) -> Verdict:
    reply, expect = data["reply"], [needle["code"] for needle in data["needles"]]
    if not expect:
        return Verdict(Status.ERROR, "HARNESS", "the prompt held no needle")
    result = answers.judge_codes(reply["text"], reply["reasoning"], expect)
    if result.ok:
        return PASS
    said = answers.final_answer(reply["text"], reply["reasoning"]).answer
    fooled = [one for one in data["decoys"] if one["code"] in answers.codes_in(said, answers.shape_of(one["code"]))]
    named = "".join(f"; {one['code']} is the decoy of the {one['label']}" for one in fooled)
    return Verdict(Status.FAIL, result.code, result.message + named)


# --- what was asked is what the recipe says


def audit(percent: int, finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    """Sizes, budgets, needles and times of a cell, made again."""
    data, options = finding.data, _options(settings)
    told = {"percent": percent, "reserve": options.reserve, "max_tokens": options.budget}
    told["planned_tokens"] = depth(data["window"], options.reserve, percent)
    yield from same("cell", {key: data[key] for key in told}, told)
    if data["sent"]:
        yield from _audit_needles(data, options, settings.get("challenge", ""))
        yield from _audit_answer(data)


def _audit_needles(data: Mapping[str, Any], options: Needle, challenge: str) -> Iterator[str]:
    """The needles and decoys of the recipe or of the challenge, each where its share says."""
    yield from same("needles", [one["share"] for one in data["needles"]], sorted(options.positions))
    yield from same("decoys", len(data["decoys"]), options.decoys)
    if options.send == "ids":
        yield from same("prompt_tokens_built", data["prompt_tokens_built"], data["planned_tokens"])
    slack = data["template"]["before"] + data["template"]["after"] + data["planned_tokens"] // 20 + PLACE
    for one in (*data["needles"], *data["decoys"]):
        if not 0 < one["tokens"] <= PLACE or abs(one["offset"] - one["share"] * data["planned_tokens"]) > slack:
            yield f"the {one['label']} stands at {one['offset']} with {one['tokens']} tokens, its share is {one['share']}"
    if not challenge:
        return
    wanted = haystack.new_secrets(options, haystack.chooser(challenge, f"needle.{data['percent']}pct"))
    told = [(one.code, one.label, one.share) for one in wanted]
    found = [(one["code"], one["label"], one["share"]) for one in (*data["needles"], *data["decoys"])]
    yield from same("codes of the challenge", sorted(found), sorted(told))
    if data["filler"]["kind"] == "generated":
        yield from same("filler.seed", data["filler"]["seed"], haystack.seed_of(challenge, options.seed))


def _audit_answer(data: Mapping[str, Any]) -> Iterator[str]:
    """The cache state, and the times in order."""
    if not data["reply"]:
        return
    cache, times = data["cache"], data["timing"]
    yield from same("cache.state", cache["state"], cache_state(cache["prefix_hits"], cache["cached_tokens"]))
    yield from rising("timing", start=0.0, **{key: times[key] for key in ("first_token_s", "last_token_s", "end_s")})


def _check(percent: int) -> Check:
    measured: Callable[..., Finding] = partial(measure, percent)
    return Check(measured, judge, exclusive=True, audit=partial(audit, percent))


CHECKS = {f"{percent}pct": _check(percent) for percent in CELLS}
