"""Drawings of a report as static SVG, by matplotlib (extra `report`). Colours are names of the page's style, so that one
drawing serves light and dark; text stays text. The same numbers give the same bytes with the same matplotlib.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from pytest_dspark.shown import Bar, Level, Session, Spread, Trace

INK, MUTED, GRID, FIRST, SECOND, BAND, GOOD, BAD, WARN, CARD = (
    *("#010101", "#010102", "#010103", "#010104", "#010105", "#010106", "#010107", "#010108", "#010109", "#01010a"),
)
_NAMES: Final = dict(
    zip(
        (INK, MUTED, GRID, FIRST, SECOND, BAND, GOOD, BAD, WARN, CARD),
        "ink muted grid accent second band good bad warn card".split(),
        strict=True,
    )
)
_SETTINGS: Final[Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "pytest-dspark", "font.size": 11.0, "font.family": ["DejaVu Sans"]},
    **{"axes.edgecolor": GRID, "axes.labelcolor": MUTED, "xtick.color": GRID, "ytick.color": GRID, "text.color": INK},
    **{"xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True, "legend.frameon": False},
    **{"axes.labelsize": 11.0, "xtick.labelsize": 10.5, "ytick.labelsize": 10.5, "path.simplify": False},
}
_VERDICTS: Final = {"PASS": GOOD, "NOT_IMPLEMENTED": MUTED, "BLOCKED": WARN, "CAPACITY": WARN}
_CLIP: Final = 1.5


def available() -> str:
    """Empty if drawings can be made, else why not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"no drawings: {error} (pip install 'pytest-dspark[report]')"
    return ""


def ladder(levels: Sequence[Level]) -> str:
    """Output rate over the number of streams: mean, 95 % interval, every repeat as a dot."""
    return _drawn("ladder", 440, 260, lambda figure: _ladder(figure.subplots(), levels))


def _ladder(axes: Any, levels: Sequence[Level]) -> None:
    top = _CLIP * max(value for level in levels for value in (*level.repeats, level.mean)) or 1.0
    places = range(len(levels))
    axes.plot(places, [level.mean for level in levels], color=FIRST, linewidth=1.2, alpha=0.55)
    for place, level in zip(places, levels, strict=True):
        _interval(axes, place, level, top)
        spread = [place + 0.14 + 0.06 * (index % 3) for index in range(len(level.repeats))]
        axes.plot(spread, level.repeats, "o", color=SECOND, markersize=4.2, markeredgewidth=0)
    axes.plot([], [], "s-", color=FIRST, markersize=5.5, label="mean, 95 % interval")
    axes.plot([], [], "o", color=SECOND, markersize=4.2, label="one repeat")
    axes.set_xticks(list(places), [str(level.streams) for level in levels])
    axes.set(xlabel="streams at once", ylabel="output tok/s", ylim=(0, top), xlim=(-0.5, len(levels) - 0.35))
    axes.legend(loc="upper left", fontsize=10, handlelength=1.6, borderaxespad=0.2, labelcolor=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x", visible=False)


def _interval(axes: Any, place: int, level: Level, top: float) -> None:
    """The mean with its interval; where that leaves the drawing, an arrow says so."""
    axes.plot([place], [level.mean], "s", color=FIRST, markersize=5.5)
    if level.low is None or level.high is None:
        return
    low, high = max(level.low, 0.0), min(level.high, top)
    axes.plot([place, place], [low, high], color=FIRST, linewidth=1.8)
    for end, inside, arrow in ((low, level.low >= 0, "v"), (high, level.high <= top, "^")):
        if inside:
            axes.plot([place - 0.09, place + 0.09], [end, end], color=FIRST, linewidth=1.8)
        else:
            axes.plot([place], [end], arrow, color=FIRST, markersize=6.5, clip_on=False)


def spread(name: str, rows: Sequence[Spread], unit: str) -> str:
    """Seconds of every stream, one line a row, with the client's own error as a band around the median."""
    return _drawn(name, 440, 74 + 27 * len(rows), lambda figure: _spread(figure.subplots(), rows, unit))


def _spread(axes: Any, rows: Sequence[Spread], unit: str) -> None:
    low, high = _limits([value for row in rows for value in (*row.values, *row.longest)])
    for place, row in enumerate(rows):
        middle = statistics.median(row.values) * 1000 if row.values else None
        if middle is not None and row.error is not None:
            left, right = max(middle - row.error * 1000, low), min(middle + row.error * 1000, high)
            axes.barh(place, right - left, left=left, height=0.62, color=BAND, linewidth=0)
        axes.plot([v * 1000 for v in row.values], [place] * len(row.values), "o", color=FIRST, markersize=4, alpha=0.75)
        axes.plot([v * 1000 for v in row.longest], [place] * len(row.longest), "x", color=SECOND, markersize=5)
        if middle is not None:
            axes.plot([middle, middle], [place - 0.34, place + 0.34], color=INK, linewidth=1.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set(xscale="log", xlim=(low, high), ylim=(len(rows) - 0.4, -0.6), xlabel=f"{unit}, ms (logarithmic)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers in ms around the values."""
    small, large = min(values) * 1000, max(values) * 1000
    down, up = 10 ** math.floor(math.log10(small)), 10 ** math.floor(math.log10(large))
    low = max(step * down for step in (1, 2, 5) if step * down <= small * 0.98 or step == 1)
    return low, min(step * up for step in (2, 5, 10, 20) if step * up >= large * 1.02)


def timeline(session: Session, *, wide: bool) -> str:
    """Phases and rows, free memory and temperature of the hosts, on one axis of time; what did not pass is crossed."""
    panels = 1 + bool(session.memory) + bool(session.heat)
    lanes = list(dict.fromkeys(bar.lane for bar in session.bars))
    shares = [max(len(lanes), 3) * 24.0, *[95.0] * (panels - 1)]
    width, height = (1000 if wide else 400), int(sum(shares)) + 34 * panels + 44

    def draw(figure: Any) -> None:
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": shares})[:, 0]
        _bars(axes[0], session.bars, lanes)
        told = [(session.memory, "free memory, GiB"), (session.heat, "temperature, °C")]
        for one, (traces, label) in zip(axes[1:], [pair for pair in told if pair[0]], strict=True):
            _traces(one, traces, label)
        end = max(bar.end for bar in session.bars)
        axes[-1].set_xlim(-0.01 * end, end * 1.02 or 1)
        unit, seconds = ("minutes", 60.0) if end > 240 else ("seconds", 1.0)
        axes[-1].xaxis.set_major_locator(_every(end, seconds, 8 if wide else 4))
        axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value / seconds:g}")
        axes[-1].set_xlabel(f"{unit} since the first row")

    return _drawn(f"timeline-{'wide' if wide else 'phone'}", width, height, draw)


def _every(end: float, unit: float, most: int) -> Any:
    from matplotlib.ticker import MultipleLocator

    steps = (step * unit for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600))
    return MultipleLocator(next((step for step in steps if end / step <= most), end or 1))


def _bars(axes: Any, bars: Sequence[Bar], lanes: Sequence[str]) -> None:
    places = {lane: place for place, lane in enumerate(lanes)}
    least = max(bar.end for bar in bars) * 0.003
    for bar in bars:
        color = _VERDICTS.get(bar.verdict, BAD)
        place, span = places[bar.lane], max(bar.end - bar.start, least)
        axes.barh(place, span, left=bar.start, height=0.56, color=color, edgecolor=CARD, linewidth=0.6)
        if bar.verdict not in ("PASS", "NOT_IMPLEMENTED"):
            axes.plot([bar.start + span / 2], [place - 0.5], "x", color=color, markersize=6, markeredgewidth=1.8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.8)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _traces(axes: Any, traces: Sequence[Trace], label: str) -> None:
    for trace, (color, line) in zip(
        traces, ((FIRST, "-"), (SECOND, "--"), (GOOD, ":"), (INK, "-.")) * 99, strict=False
    ):
        axes.plot(*zip(*trace.points, strict=True), color=color, linestyle=line, linewidth=1.6, label=trace.host)
        if len(trace.points) < 3:
            axes.plot(*zip(*trace.points, strict=True), "o", color=color, markersize=4)
    axes.set_title(label, loc="left", fontsize=10.5, color=MUTED)
    axes.margins(y=0.25)
    axes.legend(loc="upper right", fontsize=10, ncols=4, borderaxespad=0, labelcolor=INK, bbox_to_anchor=(1, 1.32))


# --- from matplotlib to the page


def _drawn(name: str, width: int, height: int, draw: Callable[[Any], None]) -> str:
    """An SVG of that many pixels that takes its colours and its font from the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever turns warnings into errors still gets a report
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw(figure)
        for axes in figure.axes:
            axes.set_facecolor("none")
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _of_the_page(name, out.getvalue())


def _of_the_page(name: str, svg: str) -> str:
    """Without prolog and metadata, ids of its own, colours by their names, the page's font."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", body, flags=re.S)
    body = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', body, count=1
    )
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r"font: (?:\w+ )*([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for color, token in _NAMES.items():
        body = body.replace(color, f"var(--{token})")
    return body.strip()
