"""Reports as people see them, in real headless Chromium: a rehearsal, a lab run, a run with faults, and a comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from browsing import browser, faults, needs_chromium
from packed import Made, made  # noqa: F401
from rehearsed import Place

from pytest_dspark import compare, comparing, pack, packfile, report

LAB = Path(__file__).parent / "data" / "lab-pack.tar.xz"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
WIDTHS = (390, 1200)

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def pages(made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """Every page by its name."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(made.production / "publish" / "report.html", folder / "rehearsal.html")
    shutil.copy(made.long1m / "publish" / "report.html", folder / "needles.html")
    with packfile.opened(LAB) as lab:
        found = pack.load(lab)
        (folder / "lab.html").write_text(report.report(found))
        (folder / "compare.html").write_text(comparing.html(compare.compare(found, found)))
    place = Place(tmp_path_factory.mktemp("faulty"))
    place.env = ({"REHEARSAL_FAULT": f"extra_line={HOSTILE},die_after_tokens=150"}, {})
    session = place.run()
    assert session.process.returncode == 1, session.text[-2000:]
    shutil.copy(session.folder / "publish" / "report.html", folder / "faulty.html")
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_calm(pages, width, dark):
    """No message of the console, nothing wider than the page, every text with the contrast of AA."""
    with browser(width, dark=dark) as driver:
        found = {name: faults(driver, page) for name, page in pages.items()}
    assert set(found) == {"rehearsal", "needles", "lab", "faulty", "compare"}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_what_is_looked_for_is_found(tmp_path):
    """A page with everything that is looked for is told so, each by its name."""
    page = tmp_path / "bad.html"
    words = "".join(f"<p>{number}</p>" for number in range(60))
    page.write_text(f'<body>{words}<p style="color:#aaa;width:2000px">pale and wide</p><script>nothing()</script>')
    with browser(390, dark=False) as driver:
        found = faults(driver, page)
    assert [one.partition(":")[0] for one in found] == [
        "console",
        "scrolls sideways",
        "wider than the page",
        "contrast",
    ]


def test_a_stranger_s_text_stays_text(pages):
    """What a rank printed is neither run nor made part of the page."""
    with browser(1200, dark=False) as driver:
        driver.get(pages["faulty"].as_uri())
        assert "owned" not in driver.title and not driver.get_log("browser")
        assert not driver.execute_script("return document.querySelectorAll('script, img, iframe, object, link').length")
        assert not driver.execute_script("return performance.getEntriesByType('resource').length")


def test_a_minute_is_enough(pages):
    """The first screen answers what ran where, whether it was accepted, why not published, and whose fault it was."""
    with browser(1200, dark=False) as driver:
        driver.get(pages["faulty"].as_uri())
        told = driver.execute_script("return document.querySelector('header').innerText")
        landmarks = driver.execute_script(
            "return ['header','nav','main','footer'].map(n => document.querySelectorAll(n).length)"
        )
    for word in ("rank 0 on host-1", "did NOT meet", "may NOT be published", "RANK_EXITED", "Fault: "):
        assert word in told, told
    assert landmarks == [1, 1, 1, 1]
