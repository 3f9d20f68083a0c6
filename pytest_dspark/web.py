"""Pages of one file: inline style, no script, no network; light and dark, desktop and phone. Standard library alone.

Everything that a stranger wrote (answers, logs, names) goes through `escaped`, and the page forbids itself every script and
every load, so that what got through by mistake still does nothing.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pytest_dspark.tables import VERDICTS, Table

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
NARROW: Final = 4
"""A table with more columns becomes one card a row on a phone."""
_UNIT: Final = re.compile(r"(\d) (ms|s|min|tok/s|GiB|%|°C)\b|(?<=±) (?=\d)")
_WHOLE: Final = re.compile(r"\([^()]{1,40}\)")
SHORT: Final = 14
LONG: Final = 40
"""A word of more letters (a digest, a path) may be broken anywhere."""

STYLE: Final = """
:root{color-scheme:light dark;--paper:#fbfbf9;--card:#ffffff;--ink:#1c2330;--muted:#566072;--line:#d9dde4;--grid:#e6e9ee;
--accent:#1f5fae;--second:#8a4b00;--band:#c9d8ec;--good:#176239;--bad:#a3231a;--warn:#7d5200;--goodbg:#e7f3ec;--badbg:#fbeae8;--warnbg:#fbf2df}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e7eaf0;--muted:#a5afbd;--line:#343d4a;--grid:#2a323d;
--accent:#8ab8f5;--second:#f0b66c;--band:#2d4260;--good:#86d6a5;--bad:#ff9f95;--warn:#ecc873;--goodbg:#173022;--badbg:#3b1d1b;--warnbg:#352a12}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
header,main,nav,footer{max-width:74rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2rem}
h1{font-size:1.15rem;font-weight:600;margin:0 0 .75rem;color:var(--muted);overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:.9rem;border-top:1px solid var(--line);text-wrap:balance}
h3{font-size:1rem;margin:1.75rem 0 .5rem}
p{margin:.5rem 0;max-width:46rem}
a{color:var(--accent)}
code,.num{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.88em;overflow-wrap:anywhere}
.banner{border:1px solid var(--line);border-left:.5rem solid var(--tone);background:var(--tonebg);border-radius:.6rem;padding:1.1rem 1.25rem}
.banner p{margin:.35rem 0}
.banner .verdict{font-size:1.55rem;line-height:1.25;font-weight:700;color:var(--tone);max-width:none}
.banner ul{margin:.4rem 0 .2rem;padding-left:1.2rem}
.good{--tone:var(--good);--tonebg:var(--goodbg)}.bad{--tone:var(--bad);--tonebg:var(--badbg)}.warn{--tone:var(--warn);--tonebg:var(--warnbg)}
.answers{margin:1.25rem 0 0;display:grid;grid-template-columns:12.5rem 1fr;gap:0;border:1px solid var(--line);border-radius:.6rem;background:var(--card);overflow:hidden}
.answers dt,.answers dd{margin:0;padding:.7rem 1.1rem;border-top:1px solid var(--line);overflow-wrap:anywhere;min-width:0}
.answers dt{font-weight:600;color:var(--muted)}
.answers dt:first-of-type,.answers dt:first-of-type+dd{border-top:0}
.answers ul{margin:0;padding:0;list-style:none}
.answers li+li{margin-top:.2rem}
nav ul{list-style:none;margin:1.25rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.4rem 1.1rem;font-size:.95rem}
nav a{display:inline-block;padding:.15rem 0}
.scroll{overflow-x:auto;margin:.75rem 0;border:1px solid var(--line);border-radius:.6rem;background:var(--card)}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.45;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.5rem .6rem;border-top:1px solid var(--grid);overflow-wrap:break-word}
thead th{border-top:0;color:var(--muted);font-weight:600;overflow-wrap:normal;font-size:.85rem}
tbody th{font-weight:600}
td.long,th.long{overflow-wrap:anywhere;min-width:9rem}
td.short,th.short{white-space:nowrap}
.nb,td.v,.v{white-space:nowrap}
td.v,.v{font-weight:700;white-space:nowrap}
.vPASS{color:var(--good)}.vFAIL,.vERROR,.vTOKEN_LIMIT,.differs{color:var(--bad)}.vBLOCKED,.vCAPACITY{color:var(--warn)}.vNOT_IMPLEMENTED,.same{color:var(--muted)}
.differs{font-weight:700}
.notes{margin:.5rem 0 0;padding-left:1.2rem;color:var(--muted);font-size:.9rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem;margin:.75rem 0}
figure{margin:0;border:1px solid var(--line);border-radius:.6rem;background:var(--card);padding:.9rem .9rem .7rem;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:34rem;margin:0 auto}
figure.wide svg{max-width:none}
.figures figure:first-child:nth-last-child(3){grid-column:1/-1}.figures figure:first-child:nth-last-child(3) svg{max-width:36rem}
.fig{margin:0 0 .4rem;font-size:.95rem}
figcaption{color:var(--muted);font-size:.88rem;margin-top:.5rem}
.phone{display:none}
details{margin:.75rem 0}
summary{cursor:pointer;font-weight:600;padding:.35rem 0}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem 1rem;font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:.88rem;margin-top:3rem;padding-bottom:3rem}
@media (max-width:44rem){
header,main,nav,footer{padding-left:1rem;padding-right:1rem}
header{padding-top:1.1rem}
.banner .verdict{font-size:1.3rem}
.answers{grid-template-columns:1fr}
.answers dt{padding-bottom:0}.answers dd{border-top:0;padding-top:.2rem}
.desk{display:none}.phone{display:block}
figure{padding:.7rem .5rem}
.cards{border:0;background:none;border-radius:0}
.cards table,.cards tbody,.cards tr,.cards td,.cards th{display:block;width:100%}
.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.cards tr{border:1px solid var(--line);border-radius:.6rem;background:var(--card);margin-bottom:.6rem;padding:.35rem 0}
.cards td,.cards tbody th{border:0;padding:.22rem .8rem;display:grid;grid-template-columns:8.5rem minmax(0,1fr);gap:.6rem}
.cards td::before,.cards tbody th::before{content:attr(data-label);color:var(--muted);font-weight:400}
}
@media (min-width:44.01rem){.cards table{font-size:.8rem}.cards th,.cards td{padding:.45rem .4rem}}
@media print{body{background:#fff}.scroll{overflow:visible}details>*{display:block}}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole page."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def escaped(text: object) -> str:
    """Text as text: no markup, and what is invisible or turns the direction of reading is shown by its number."""
    shown = "".join(char if _is_plain(char) else f"\\u{ord(char):04x}" for char in str(text))
    return html.escape(shown, quote=True)


def plain(page: str) -> list[str]:
    """The lines of a page as its reader sees them: every text, and none of the marks between."""
    body = re.sub(r"<style.*?</style>", "", page, flags=re.S).replace("<wbr>", "")
    return html.unescape(re.sub(r"<[^>]*>", "\n", body)).split("\n")


def _is_plain(char: str) -> bool:
    return char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def table(given: Table, *, heading: bool = True, label: str = "") -> str:
    """A table whose cells are text; a wide one becomes a card a row on a phone."""
    wide = len(given.header) > NARROW
    name = label or given.title
    lines = [f"<h3>{escaped(given.title)}</h3>"] if heading else []
    lines.append(
        f'<div class="scroll{" cards" if wide else ""}" role="region" aria-label="{escaped(name)}" tabindex="0">'
        f'<table role="table"><thead role="rowgroup"><tr role="row">{_head(given.header)}</tr></thead><tbody role="rowgroup">'
    )
    lines += [_row(given.header, row) for row in given.rows]
    lines.append("</tbody></table></div>")
    return "\n".join([*lines, *notes(given.notes)])


def notes(given: Sequence[str]) -> Iterator[str]:
    """Sentences below a table."""
    if given:
        yield f'<ul class="notes">{"".join(f"<li>{escaped(note)}</li>" for note in given)}</ul>'


def _head(header: Sequence[str]) -> str:
    return "".join(f'<th scope="col" role="columnheader">{escaped(name)}</th>' for name in header)


def _row(header: Sequence[str], row: Sequence[str]) -> str:
    cells = [_cell(name, cell, first=not index) for index, (name, cell) in enumerate(zip(header, row, strict=True))]
    return f'<tr role="row">{"".join(cells)}</tr>'


def _cell(name: str, cell: str, *, first: bool) -> str:
    tag, role = ("th", 'scope="row" role="rowheader"') if first else ("td", 'role="cell"')
    return f'<{tag} {role} data-label="{escaped(name)}"{_class(cell)}><span>{_kept(escaped(cell))}</span></{tag}>'


def _kept(text: str) -> str:
    """A number stays with its unit, an interval whole; a path may be broken at its strokes."""
    text = _UNIT.sub(lambda match: match[0].replace(" ", "&nbsp;"), text.replace("/", "/<wbr>"))
    return _WHOLE.sub(lambda match: f'<span class="nb">{match[0]}</span>' if _is_interval(match[0]) else match[0], text)


def _is_interval(text: str) -> bool:
    return " – " in text or " to " in text


def _class(cell: str) -> str:
    """Colour beside the word that says the same; a long word may be broken."""
    names = " ".join(_names(cell))
    return f' class="{names}"' if names else ""


def _names(cell: str) -> Iterator[str]:
    if any(len(word) > LONG for word in cell.split()):
        yield "long"
    elif len(cell) <= SHORT:
        yield "short"
    verdict = cell.partition(",")[0].partition(":")[0]
    if verdict in VERDICTS:
        yield f"v{verdict}"
        yield from ("v",) if cell == verdict else ()
    if cell.startswith("DIFFERS"):
        yield "differs"
    if cell in ("= pin", "= rank 0"):
        yield "same"


def items(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>"
