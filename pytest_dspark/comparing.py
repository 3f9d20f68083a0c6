"""A comparison as a small page and as JSON. Pure; standard library alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from pytest_dspark import web
from pytest_dspark.compare import Answer, as_tables

_TONES: Final = {0: "good", 1: "bad", 2: "warn"}


def html(answer: Answer) -> str:
    """One file: the answer, the figures, what was not compared, what runs differently."""
    body = [
        f"<header><h1>Run {web.escaped(answer.now)} against run {web.escaped(answer.was)}</h1>",
        f'<div class="banner {_TONES[answer.exit_code]}"><p class="verdict">{web.escaped(answer.sentence)}.</p>',
        web.items(answer.refused[1:]) if answer.refused[1:] else "",
        f"<p>{web.escaped(answer.of)}</p></div></header><main>",
        *(
            f"<section><h2>{web.escaped(one.title)}</h2>{web.table(one, heading=False)}</section>"
            for one in as_tables(answer)
        ),
        "" if answer.identity or answer.refused else "<p>Nothing of what runs differs.</p>",
        "</main><footer><p>Made by pytest-dspark from the two packs alone.</p></footer>",
    ]
    return web.page(answer.sentence, body)


def as_json(answer: Answer) -> dict[str, Any]:
    """Everything that a comparison says."""
    return {"exit_code": answer.exit_code, "says": answer.sentence, **asdict(answer)}
