"""Defects that a rank can be given, by the name in REHEARSAL_FAULT.

| name | what the rank does |
|---|---|
| exit_at_start=CODE | ends with this code before it meets anybody |
| exit_in_load=CODE | ends with this code while loading |
| hang_at_start | prints nothing and waits for ever |
| never_ready | loads, and never serves |
| die_after_s=N | is killed N seconds after it was loaded |
| die_after_tokens=N | (head) is killed after N generated tokens |
| hang_after_tokens=N | (head) the API goes on, no byte of an answer comes any more |
| api_only | (head) the API answers, generation is accepted and never answered |
| garble | (head) text is garbled, as with compilation on |
| cut_tool_args | (head) tool arguments end half way |
| think_forever | (head) reasoning uses the whole budget |
| wrong_answer | (head) numbers and codes are off |
| error_in_stream | (head) an error inside a 200 after a few events |
| truncate_stream | (head) streams end without a finish reason |
| no_usage | (head) no usage is sent |
| slow_stop | ignores SIGTERM |
| wrong_model_len=N | (head) /v1/models says another window |
| marker_missing=TEXT | lines with this text are not printed |
| extra_line=TEXT | prints this line while loading |
| nccl_socket | NCCL falls back to TCP |
| compile_on | (head) the engine's configuration line says that compilation is on |
"""

from __future__ import annotations

NAMES = frozenset(line.split("|")[1].strip().partition("=")[0] for line in __doc__.splitlines() if line.startswith("| ") and "name" not in line)


def parse(text: str) -> dict[str, str]:
    """`a,b=1` to {"a": "", "b": "1"}. An unknown name ends the program: a fault that does nothing would hide a test."""
    found = dict(part.partition("=")[::2] for part in text.split(",") if part)
    unknown = sorted(set(found) - NAMES)
    if unknown:
        raise SystemExit(f"REHEARSAL_FAULT: unknown {', '.join(unknown)}, expected some of {', '.join(sorted(NAMES))}")
    return found
