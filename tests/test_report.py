"""report.html: says what the pack says, hides nothing, runs nothing, and cannot be forged beside the pack."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from packed import Made, forge, made, rows_of, write_rows  # noqa: F401

from pytest_dspark import cli, figures, pack, packfile, report, shown, tables, verify, web

LAB = Path(__file__).parent / "data" / "lab-pack.tar.xz"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e`|"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("lab")
    packfile.unpack(LAB, target)
    return target / "lab-pack"


@pytest.fixture(scope="module")
def lab(folder) -> pack.Pack:
    return pack.load(folder)


def without_figures(text: str) -> str:
    return re.sub(r"<svg.*?</svg>", "", text, flags=re.S)


def test_the_first_screen_answers(lab):
    """What ran where, accepted, published and why not, how fast with which interval, what failed."""
    told = report.report(lab, drawn=False).partition("</header>")[0]
    rate = tables.interval(
        next(r for r in lab.rows if r["check"] == "concurrency.c1")["finding"]["headline"]["output_rate"]
    )
    for word in (
        "recipe lab-smollm2",
        "rank 0 on host-1, rank 1 on host-2",
        "Accepted",
        "may NOT be published",
        "accepts any",
        rate,
        "nothing failed",
    ):
        assert word in told


def test_the_same_pack_gives_the_same_bytes(lab):
    assert report.report(lab) == report.report(lab)


def test_nothing_is_loaded_and_nothing_runs(lab):
    """No script, no link that leads out, no style from elsewhere; the page itself forbids them."""
    text = report.report(lab)
    assert "default-src 'none'" in text
    assert not re.search(r"<script|<link|<iframe|<object|@import|src=|url\((?!#)", text)
    assert set(re.findall(r'href="([^#][^"]*)', text)) == set()


def hostile(base: pack.Pack) -> pack.Pack:
    """Every text of the rows and of the run that people or models write is hostile."""
    rows = copy.deepcopy(list(base.rows))
    for row in rows:
        row["message"], row["code"] = HOSTILE, HOSTILE
        for one in (row["finding"] or {}).get("comparisons", ()):
            one["found"], one["what"], one["relation"] = HOSTILE, f"{one['what']} {HOSTILE}", "equal"
    run = copy.deepcopy(dict(base.run)) | {"started": HOSTILE}
    for one in run["profiles"].values():
        one["error"] = HOSTILE
    return dataclasses.replace(base, rows=tuple(rows), run=run)


def test_hostile_text_is_text(lab):
    text = report.report(hostile(lab))
    assert "<script" not in text and "<img" not in text and "\u202e" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "\\u202e" in text


def test_the_search_for_what_is_private_sees_what_a_reader_sees():
    """A path that may be broken at its strokes is found whole, and so is a quote."""
    table = tables.Table("t", ("a", "b"), (("/home/jane/it's", "x & y"),))
    assert {"/home/jane/it's", "x & y"} <= set(web.plain(web.page("t", [web.table(table)])))


def test_what_was_not_measured_is_no_zero(lab):
    """A row without a figure is a dash, a host without a sensor says why, and a void row is not drawn."""
    text = report.report(lab, drawn=False)
    assert "not read" in text and "no thermal zone" in text
    void = next(row for row in lab.rows if row["check"] == "concurrency.c4") | {
        "verdict": "ERROR",
        "message": "void: x",
    }
    rows = [void if row["check"] == "concurrency.c4" else row for row in lab.rows]
    levels = shown.ladder(rows)
    assert [level.streams for level in levels] == [1, 2]
    assert any("concurrency.c4 is void" in note for table in tables.timed(rows) for note in table.notes)


def test_differences_are_marked_by_a_word(lab):
    """Not by colour alone."""
    rows = copy.deepcopy(list(lab.rows))
    row = next(row for row in rows if row["check"] == "gate.pins")
    broken = next(one for one in row["finding"]["comparisons"] if one["rank"] == 0)
    broken["found"] = "another"
    cells = next(cells for cells in tables.identity(rows).rows if cells[1] == broken["what"])
    assert "DIFFERS: another" in " ".join(cells)
    assert 'class="differs"' in web.table(tables.identity(rows))
    assert "DIFFERS" not in str(tables.identity(lab.rows))


def test_without_the_library_there_are_tables(lab, monkeypatch):
    """The run still has its report, and one line says what is missing."""
    real = builtins.__import__

    def none(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    text = report.report(lab)
    assert "<svg" not in text and "pytest-dspark[report]" in text and "concurrency.c1" in text
    monkeypatch.undo()
    whole = report.report(lab)
    assert whole.count("<svg") >= 6
    assert report._DRAWN.sub("", whole) == report._DRAWN.sub("", text)


def test_every_level_and_repeat_is_drawn(lab):
    """As many dots as repeats, as many squares as levels."""
    levels = shown.ladder(lab.rows)
    assert [(level.streams, len(level.repeats)) for level in levels] == [(1, 3), (2, 3), (4, 3)]
    svg = figures.ladder(levels)
    assert "<metadata" not in svg and "DejaVu" not in svg and "#0101" not in svg
    for name in ("accent", "second", "muted"):
        assert f"var(--{name})" in svg


def test_an_interval_that_leaves_the_drawing_is_an_arrow():
    narrow = shown.Level(1, 10.0, 9.0, 11.0, (9.5, 10.0, 10.5))
    wide = shown.Level(2, 10.0, -50.0, 90.0, (9.5, 10.0, 10.5))
    assert figures.ladder([narrow, wide]).count("<use") > figures.ladder([narrow, narrow]).count("<use") - 4


# --- in a pack


def test_a_pack_has_its_report_and_it_verifies(made: Made):  # noqa: F811
    for run in (made.long1m, made.production):
        text = (run / "publish" / "report.html").read_text()
        assert "<svg" in text and run.name in text
        assert verify.verify(run).verified
    assert "needle.90pct" in (made.long1m / "publish" / "report.html").read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("did NOT meet", "met"),
        ("NOT be published", "be published"),
        ("<!--drawn-->", "<!--drawn--><script>1</script>"),
        ("PASS", "FAIL"),
    ],
)
def test_a_report_that_says_something_else_is_no_report(made: Made, tmp_path, old, new):  # noqa: F811
    """Although all checksums and the statement are made anew."""
    target = tmp_path / "pack"
    shutil.copytree(made.production / "publish", target)
    page = target / "report.html"
    text = page.read_text()
    changed = text.replace(old, new, 1) if old in text else text.replace("A rehearsal", "No rehearsal", 1)
    for name in ("SHA256SUMS", "statement.json", "PACK.md"):
        (target / name).unlink()
    forge(target)
    page.write_text(changed)
    resum(target)
    found = verify.verify(target)
    assert any(one.file == "report.html" for one in found.problems), found.line


def resum(target: Path) -> None:
    """Checksums, page and statement of a folder as it lies there, report included."""
    from pytest_dspark import page, publish, statement

    for name in ("SHA256SUMS", "statement.json", "PACK.md"):
        (target / name).unlink(missing_ok=True)
    found = pack.load(target)
    answer = pack.answer(found)
    publish._put(target / "PACK.md", page.page(found, answer, publish.sums_of(target)).encode())
    sums = publish.sums_of(target)
    publish._put(target / "SHA256SUMS", "".join(f"{v}  {k}\n" for k, v in sorted(sums.items())).encode())
    publish._tell(target / "statement.json", statement.build(found, answer, sums))


def test_what_changed_is_told_from_published_packs(made: Made):  # noqa: F811
    """A first run says that there is nothing to compare with."""
    told = pack.table(made.production / "publish" / "changes.json")
    assert told["since"] is None and "no earlier accepted run" in told["reason"]
    assert "no earlier accepted run" in (made.production / "publish" / "PACK.md").read_text()


def test_rows_of_single_questions_are_counted(made: Made, tmp_path):  # noqa: F811
    rows = [row for row in rows_of(made.production / "publish") if row["part"] is None]
    row = next(row for row in rows if row["check"] == "correctness.json")
    rows += [row | {"part": f"q{number}", "verdict": "PASS" if number else "FAIL"} for number in range(3)]
    assert tables.parts(rows).rows == (("production", "correctness.json", "3", "2 PASS, 1 FAIL"),)
    assert len(tables.all_rows(rows).rows) == len(rows) - 3
    write_rows_to = shutil.copytree(made.production / "publish", tmp_path / "pack")
    write_rows(write_rows_to, rows)
    assert "Single questions" in report.report(pack.load(write_rows_to), drawn=False)


def test_the_command(folder, tmp_path, capsys):
    target = tmp_path / "r.html"
    assert cli.main(["report", str(folder), "--out", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n" and "<svg" in target.read_text()
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_without_a_pack_says_why(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "rows.jsonl").write_text("")
    (run / "run.json").write_text('{"status": "complete", "refused": "something private would come out"}')
    assert cli.main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 2
    assert "this run has no pack: something private would come out" in capsys.readouterr().err
