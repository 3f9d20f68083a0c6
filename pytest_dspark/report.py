"""report.html: the pack explains itself in one file. Made from what is published and nothing else, so nothing private is in it.

The drawings come from matplotlib (extra `report`); without it the page has its tables alone, and says so. Everything but the
drawings is the same whoever makes it, so that `dspark verify` makes the page again. Standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark import figures, page, shown, tables, web
from pytest_dspark.acceptance import Outcome
from pytest_dspark.headlines import headlines
from pytest_dspark.pack import REPORT, Pack, raw
from pytest_dspark.pack import answer as answer_of
from pytest_dspark.tables import DASH, Table
from pytest_dspark.web import escaped

OPEN: Final = "<!--drawn-->"
CLOSE: Final = "<!--/drawn-->"
_DRAWN: Final = re.compile(f"{OPEN}.*?{CLOSE}", re.S)
_FORBIDDEN: Final = re.compile(
    r"<\s*/?\s*(?!/?(?:svg|g|defs|path|use|text|tspan|rect|style|clipPath|figure|figcaption|h3|div|p)\b)[a-zA-Z]|\bon\w+\s*=|javascript:|https?:",
    re.I,
)
_ABOUT: Final = {
    "ladder": "Each dot is one repeat. The square is their mean, the line its 95 % interval by repeats; an arrow leads out of"
    " the drawing. The numbers are in the table below.",
    "first": "Each dot is one stream, the upright line the median, the band the client's own error around it.",
    "gap": "Dots: mean gap of one stream. Crosses: its longest gap. The band is the client's own error of a gap.",
    "timeline": "Green: passed. Grey: not available here. Red or amber with a cross above: did not pass; the table names it.",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its anchor, and its HTML."""

    anchor: str
    title: str
    html: str


def report(pack: Pack, *, drawn: bool = True) -> str:
    """The whole page. Without `drawn`, or without matplotlib, it has tables alone."""
    answer = answer_of(pack)
    why = figures.available() if drawn else "no drawings were asked for"
    sections = [one for one in _sections(pack, why) if one.html]
    body = [
        f"<header>\n<h1>Evidence of run {escaped(pack.run['run'])}</h1>",
        *_banner(pack, answer),
        *_answers(pack, answer),
        "</header>",
        _nav(sections),
        "<main>",
        *(
            f'<section aria-labelledby="{one.anchor}">\n<h2 id="{one.anchor}">{escaped(one.title)}</h2>\n{one.html}\n</section>'
            for one in sections
        ),
        "</main>",
        *_footer(pack, why),
    ]
    return web.page(f"{page.accepted_words(pack, answer)}: run {pack.run['run']}", body)


def problems(pack: Pack) -> Iterator[str]:
    """What of the pack's own report does not follow from the pack. The drawings are only looked at for what no drawing has."""
    told = raw(pack.path / REPORT).decode("utf-8")
    made = report(pack, drawn=False).encode("utf-8", "backslashreplace").decode("utf-8")
    if _DRAWN.sub("", told) != _DRAWN.sub("", made):
        yield "is not the report that the pack's files make"
    for found in _DRAWN.findall(told):
        if _FORBIDDEN.search(found):
            yield "a drawing holds what no drawing has"
            return


# --- what stands first


def _banner(pack: Pack, answer: Outcome) -> Iterator[str]:
    tone = "good" if answer.accepted else "bad" if not answer.met and not answer.subset else "warn"
    yield f'<div class="banner {tone}" role="status">'
    yield f'<p class="verdict">{escaped(page.accepted_words(pack, answer))}.</p>'
    yield f"<p><strong>{escaped(page.publishable_words(answer))}.</strong></p>"
    yield web.items(answer.reasons[:8] or ("nothing stands against publishing",))
    if len(answer.reasons) > 8:
        yield f"<p>and {len(answer.reasons) - 8} more reasons, in PACK.md</p>"
    counts = ", ".join(f"{answer.counts[name]} {name}" for name in tables.VERDICTS if answer.counts.get(name))
    yield f"<p>Rows: {counts or 'none'}.</p></div>"


def _answers(pack: Pack, answer: Outcome) -> Iterator[str]:
    """The questions of whoever has a minute."""
    yield '<dl class="answers">'
    for question, told in (
        ("What ran where", list(_where(pack))),
        ("Accepted?", [page.accepted_words(pack, answer)]),
        ("May it be published?", [page.publishable_words(answer), *answer.reasons[:3]]),
        ("How fast?", [f"{what}: {value}" for what, value in headlines(pack.rows)] or ["no speed was measured"]),
        ("What failed, and whose fault?", _failed(pack)),
    ):
        yield f"<dt>{question}</dt><dd>{web.items(told)}</dd>"
    yield "</dl>"


def _where(pack: Pack) -> Iterator[str]:
    yield f"recipe {pack.recipe.name}: {pack.recipe.about}"
    for mark, plan in pack.plans.items():
        hosts = ", ".join(f"rank {rank['rank']} on {rank['host']}" for rank in plan["ranks"])
        model = pack.settings[mark].texts.get("SERVED_MODEL_NAME", "a model without a name")
        yield f"{mark}: profile {pack.profiles[mark].name}, model {model}; {hosts}"
    yield f"from {pack.run['started']} to {pack.run['ended']} UTC, {pack.run['status']}"


def _failed(pack: Pack) -> list[str]:
    """What failed by itself; what was only blocked by it is counted."""
    rows = tables.not_passed(pack.rows).rows
    told = [_fault(*row) for row in rows if row[1] != "BLOCKED"]
    blocked = sum(row[1] == "BLOCKED" for row in rows)
    more = [f"and {len(told) - 4} more, below"] if len(told) > 4 else []
    more += [f"{blocked} more were BLOCKED by the first cause, and not tried"] if blocked else []
    return [*told[:4], *more] or ["nothing failed"]


def _fault(check: str, verdict: str, code: str, fault: str, what: str) -> str:
    why = f"{verdict} {code}" if code not in (DASH, verdict) else verdict
    return f"{check}: {why}. Fault: {fault}. {what if len(what) < 220 else what[:220] + '…'}"


def _nav(sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{one.anchor}">{escaped(one.title)}</a></li>' for one in sections)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


# --- sections


def _sections(pack: Pack, why: str) -> Iterator[Section]:
    rows = pack.rows
    yield Section("failed", "What did not pass", _tables(tables.not_passed(rows)))
    yield from _speed(pack, why)
    yield Section("needles", "Needle in a haystack", _tables(tables.needle_grid(rows), tables.needles(rows)))
    yield Section(
        "session",
        "The session",
        _timeline(pack, why) + _tables(tables.session(rows), tables.launches(rows), tables.hosts(pack.run)),
    )
    yield Section("identity", "What ran: pin, head, worker", _tables(tables.identity(rows)))
    yield Section("changes", "What changed since the last accepted run", _tables(*page.changed(pack)))
    yield Section(
        "unseen", "What was not seen, or not available", _tables(tables.not_seen(rows), tables.not_available(rows))
    )
    yield Section("disclosures", "Disclosures", web.items([*answer_of(pack).disclosures, *page.disclosures(pack)]))
    yield Section(
        "all", "Every row", _folded("all rows", tables.verdicts(rows), tables.parts(rows), tables.all_rows(rows))
    )
    yield Section(
        "made", "Configuration and versions", _folded("knobs and versions", page.knobs(pack), page.made_with(pack))
    )
    yield Section("verify", "How to verify", _verify(pack))


def _tables(*given: Table) -> str:
    return "\n".join(_shown(_without_the_one_profile(one)) for one in given if one.rows)


def _shown(given: Table) -> str:
    """A table, or a list where there is one column."""
    return web.items(cell for (cell,) in given.rows) if len(given.header) == 1 else web.table(given)


def _without_the_one_profile(given: Table) -> Table:
    """A run of one profile need not say which in every row."""
    if given.header[0] != "profile" or len({row[0] for row in given.rows}) > 1:
        return given
    return Table(given.title, given.header[1:], tuple(row[1:] for row in given.rows), given.notes)


def _folded(name: str, *given: Table) -> str:
    return f"<details><summary>Show {name}</summary>{_tables(*given)}</details>" if _tables(*given) else ""


def _speed(pack: Pack, why: str) -> Iterator[Section]:
    """A section for each profile, kind of graphs and method: they never stand in one table."""
    groups = tables.timed_groups(pack.rows)
    for number, (key, rows) in enumerate(groups.items(), 1):
        profile, graphs, method = key
        drawings = _drawings(number, rows) if not why else []
        told = _block([one for one in drawings if one], "figures")
        both = [*tables.timed(pack.rows), *tables.spreads(pack.rows)]
        mine = [one for one in both if one.title.endswith(f"profile {profile}, {graphs} graphs, method {method}")]
        yield Section(f"speed-{number}", f"How fast: {profile}, {graphs} graphs, {method}", told + _tables(*mine))


def _drawings(number: int, rows: Sequence[Any]) -> list[str]:
    levels, first, gap = shown.ladder(rows), shown.first_tokens(rows), shown.gaps(rows)
    first, gap = [one for one in first if one.values], [one for one in gap if one.values]
    return [
        _figure("Output rate over streams at once", "ladder", lambda: figures.ladder(levels), number)
        if len(levels) > 1
        else "",
        _figure("First token", "first", lambda: figures.spread("first", first, "first token"), number) if first else "",
        _figure("Gaps between events", "gap", lambda: figures.spread("gap", gap, "gap"), number) if gap else "",
    ]


def _figure(title: str, kind: str, draw: Callable[[], str], number: int) -> str:
    """A drawing with its title; its ids are of this section alone."""
    svg = (
        draw()
        .replace('id="', f'id="s{number}-')
        .replace('href="#', f'href="#s{number}-')
        .replace("url(#", f"url(#s{number}-")
    )
    return f'<figure role="group" aria-label="{title}"><h3 class="fig">{title}</h3>{svg}<figcaption>{_ABOUT[kind]}</figcaption></figure>'


def _block(drawings: Sequence[str], kind: str) -> str:
    inner = f'<div class="{kind}">{"".join(drawings)}</div>' if drawings else ""
    return f"{OPEN}{inner}{CLOSE}\n"


def _timeline(pack: Pack, why: str) -> str:
    session = shown.session(pack)
    if why or not session.bars:
        return _block([], "figures")
    wide, narrow = (figures.timeline(session, wide=wide) for wide in (True, False))
    both = f'<div class="desk">{wide}</div><div class="phone">{narrow}</div>'
    missing = "" if session.heat else " The temperature was not read; the table of hosts says why."
    told = f"<figcaption>{_ABOUT['timeline']}{missing}</figcaption>"
    return _block([f'<figure class="wide" role="group" aria-label="Timeline">{both}{told}</figure>'], "timeline")


def _verify(pack: Pack) -> str:
    lines = "\n".join(page.how_to_verify(pack)[2:])
    return f"<p>SHA256SUMS lists every file of the pack, this one too.</p><pre>{escaped(lines)}</pre>"


def _footer(pack: Pack, why: str) -> Iterator[str]:
    """The last words. Whether there are drawings is part of what is not made again."""
    yield f"<footer><p>Made by pytest-dspark {escaped(pack.versions['pytest_dspark'])} from the files of the pack alone.</p>"
    yield f"{OPEN}{f'<p>{escaped(why)}</p>' if why else ''}{CLOSE}</footer>"
