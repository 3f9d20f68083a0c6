"""Defects that a rank can be given, in REHEARSAL_FAULT of that rank's environment: NAME or NAME=VALUE, comma-separated.

A comma inside a value is written %2C, a percent sign %25. A name may be given more than once. Ranks that a row does not
name ignore it: the API is the head's alone.

| name | rank | what it does |
|---|---|---|
| exit_at_start=CODE | any | ends with CODE before it meets anybody |
| exit_in_load=CODE | any | ends with CODE while it loads; the other ranks wait, silently |
| hang_at_start | any | prints nothing and waits for ever |
| never_ready | any | loads and never gets ready |
| die_after_tokens=N | any | kills itself (SIGKILL) after the engine generated N tokens |
| die_after_s=N | any | kills itself N seconds after it was ready |
| hang_after_tokens=N | any | after N tokens the engine stands still: the API answers, no token comes any more |
| spin_after_tokens=N | any | the same, with a processor that is kept busy, as by a rank that waits for its GPU |
| engine_dies_after_s=N | head | the engine core dies N seconds after it was ready, by itself |
| api_gone_after_s=N | head | the API closes its port N seconds after it was ready; the rank runs on |
| eat_memory_after_s=N | any | takes all the memory that it gets, N seconds after it was ready |
| slow_step_s=N | head | one step of a long answer takes N seconds, in which no counter moves and all ranks work |
| slow_stop | any | ignores SIGTERM |
| marker_missing=TEXT | any | lines that contain TEXT are not printed |
| extra_line=TEXT | any | prints TEXT as a warning of the worker while loading |
| nccl_socket | any | NCCL chooses TCP sockets instead of InfiniBand |
| compile_on | head | the engine's configuration line says compilation mode 3, whatever was asked |
| api_only | head | models, health and metrics answer; a generation is accepted and never answered |
| wrong_model_len=N | head | /v1/models says another window |
| wrong_answer | head | numbers, codes, JSON values and tool arguments are off |
| answers_decoy | head | of several codes in a text the one that fits the question least is given |
| rambles | head | after a long prompt the answer never comes to its end |
| wrong_usage=N | head | usage counts N prompt tokens more than were read |
| never_scheduled=N | head | prompts of at least N tokens are accepted and wait for ever |
| garble | head | text comes garbled, with =N after N characters; also without the fault when the compilation mode is not 0 |
| cross_talk | head | of two requests that run together and ask for a code, each gets the other's |
| swapped_answers | head | two requests that run together get each other's answer, whatever they ask |
| lossy=N | any | each N-th token of a text is another one than the most likely; on any rank it spoils the text of all |
| cut_tool_args | head | the arguments of a tool call end half way, with =N only those of more than N characters |
| think_forever | head | reasoning never ends, whatever the request says; with =asked only where thinking is on |
| error_in_stream | head | an error object inside a 200, after a few events; a plain request gets a 500 |
| truncate_stream | head | streams end without finish reason, usage and [DONE]; =abrupt: also without the last chunk |
| no_usage | head | no usage is sent |
| no_logprobs | head | log probabilities are refused |
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote


def _rows() -> list[tuple[str, bool]]:
    lines = [line.split("|")[1].strip() for line in (__doc__ or "").splitlines() if line.startswith("| ")]
    return [(cell.partition("=")[0], "=" in cell) for cell in lines if cell != "name"]


NAMES = dict(_rows())


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of this rank, in the order given."""

    given: tuple[tuple[str, str], ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(key == name for key, _ in self.given)

    def text(self, name: str) -> str:
        """The value of the last one of this name, "" if there is none."""
        return next((value for key, value in reversed(self.given) if key == name), "")

    def number(self, name: str) -> float | None:
        return float(self.text(name)) if name in self else None

    def stands_still(self, tokens: int) -> bool:
        """Whether the rank takes part no more after so many tokens; one that spins keeps a processor busy from then on."""
        limits = [self.number(name) for name in ("hang_after_tokens", "spin_after_tokens")]
        if not any(limit is not None and tokens >= limit for limit in limits):
            return False
        if "spin_after_tokens" in self:
            _spin()
        return True

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(value for key, value in self.given if key == name)


@cache
def _spin() -> threading.Thread:
    """A thread that works a part of the time, once a process: two busy ranks must leave something of a small machine."""

    def work() -> None:
        while True:
            sum(range(50_000))
            time.sleep(0.01)

    thread = threading.Thread(target=work, name="spin", daemon=True)
    thread.start()
    return thread


def parse(text: str) -> Faults:
    """Raises ValueError for a name that is not known or a value that is missing: a fault that does nothing hides a test."""
    given = tuple((name.strip(), unquote(value)) for name, _, value in (p.partition("=") for p in text.split(",") if p))
    for name, value in given:
        if name not in NAMES:
            raise ValueError(f"REHEARSAL_FAULT: unknown fault {name!r}, expected some of {', '.join(sorted(NAMES))}")
        if NAMES[name] and not value:
            raise ValueError(f"REHEARSAL_FAULT: {name} needs a value: {name}=...")
    found = Faults(given)
    for name in (
        "exit_at_start",
        "exit_in_load",
        "die_after_tokens",
        "die_after_s",
        "hang_after_tokens",
        "spin_after_tokens",
        "engine_dies_after_s",
        "api_gone_after_s",
        "eat_memory_after_s",
        "slow_step_s",
        "wrong_model_len",
        "wrong_usage",
        "never_scheduled",
        "lossy",
    ):
        found.number(name)
    return found
