"""Is B slower than A: a planted slowdown is found, no slowdown is not, and what is not alike is refused with the reason."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import statistics
from pathlib import Path

import pytest

from pytest_dspark import cli, compare, comparing, pack, packfile, welch
from pytest_dspark.calibration import schedule_server
from pytest_dspark.endpoint import Asked, Endpoint
from pytest_dspark.load import sample

LAB = Path(__file__).parent / "data" / "lab-pack.tar.xz"
ONLY = ("concurrency.c1", "concurrency.c4", "performance.decode-code")


@pytest.fixture(scope="module")
def lab() -> pack.Pack:
    with packfile.opened(LAB) as folder:
        return pack.load(folder)


def changed(base: pack.Pack, change, *, checks: str = "") -> pack.Pack:
    """The pack with findings changed in place by `change(row)`."""
    rows = copy.deepcopy(list(base.rows))
    for row in rows:
        if row["finding"] and row["check"].startswith(checks or row["check"]):
            change(row)
    return dataclasses.replace(base, rows=tuple(rows))


def planted(base: pack.Pack, slower: float, spread: float, seed: int, repeats: int = 5) -> pack.Pack:
    """Timed rows of so many repeats whose times are those of the first, longer by `slower` and by chance."""
    chance = random.Random(seed)

    def replant(row):
        first = row["finding"]["repeats"][0]
        row["finding"]["repeats"] = [stretched(first, chance.gauss(1, spread) / (1 - slower)) for _ in range(repeats)]

    return changed(base, lambda row: replant(row) if "repeats" in row["finding"] else None)


def stretched(one: dict, by: float) -> dict:
    one = copy.deepcopy(one)
    for stream in one["samples"]:
        for key in ("first_token_s", "first_answer_s", "last_token_s", "end_s"):
            stream[key] *= by
        stream["at_s"] = 0.0
    return one


def says(was: pack.Pack, now: pack.Pack, **options) -> compare.Answer:
    return compare.compare(was, now, **{"only": ONLY, **options})


# --- the formulas


def test_student_s_t():
    """Against published tables: 0.975 quantiles, and the distribution at them."""
    for degrees, quantile in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (8, 2.3060), (30, 2.0423), (1000, 1.9623)):
        assert welch.t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)
        assert welch.t_cdf(-quantile, degrees) == pytest.approx(0.025, abs=1e-5)
    assert welch.t_cdf(0, 3.7) == pytest.approx(0.5)
    assert welch.t_cdf(1.0, 1) == pytest.approx(0.75)


def test_welch_by_hand():
    """Two by two: the variances 0.02 / 2 each give 2 degrees, and the interval follows."""
    was, now = [2.718281828**value for value in (1.0, 1.2)], [2.718281828**value for value in (0.9, 1.1)]
    found = welch.change(was, now)
    error = (0.02 / 2 + 0.02 / 2) ** 0.5
    assert found.degrees == pytest.approx(2.0)
    assert found.change == pytest.approx(2.718281828**-0.1 - 1, rel=1e-6)
    assert found.low == pytest.approx(2.718281828 ** (-0.1 - 4.3027 * error) - 1, rel=1e-4)


def test_holm():
    assert welch.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert welch.holm([]) == []


@pytest.mark.parametrize("values", [([1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_no_interval_from_one_repeat_or_from_nothing(values):
    with pytest.raises(ValueError, match=r"repeats|above 0"):
        welch.change(*values)


# --- power and false alarms


def test_a_planted_slowdown_is_found_and_none_is_not(lab):
    """5 % of 5 repeats with a spread of 1 %, over many seeds; both shares are printed."""
    seeds = range(60)
    answers = [says(planted(lab, 0, 0.01, seed), planted(lab, 0.05, 0.01, 1000 + seed)) for seed in seeds]
    found = [answer.exit_code for answer in answers]
    alarms = [says(planted(lab, 0, 0.01, seed), planted(lab, 0, 0.01, 1000 + seed)).exit_code for seed in seeds]
    power, false = (sum(code == 1 for code in codes) / len(codes) for codes in (found, alarms))
    print(f"\nplanted 5 %, 5 repeats, spread 1 %: found {power:.1%}; planted 0 %: {false:.1%} false alarms,", end=" ")
    print(f"{sum(code == 2 for code in alarms)} of {len(alarms)} could not tell")
    assert power == 1.0
    assert sum("output tok/s" in {one.name for one in answer.slower} for answer in answers) >= 0.95 * len(answers)
    assert alarms.count(1) == 0 and alarms.count(0) >= 55


def test_chance_alone_is_no_regression_without_a_limit(lab):
    """With a limit of 0 every second estimate is below it; the interval decides."""
    answers = [says(planted(lab, 0, 0.01, seed), planted(lab, 0, 0.01, 500 + seed), limit=0.0) for seed in range(40)]
    assert sum(answer.exit_code == 1 for answer in answers) <= 3


def streamed(base: pack.Pack, gap_s: float) -> pack.Pack:
    """The pack with one row of five repeats that our client measured now, on a server that sends an event every `gap_s`."""
    with schedule_server() as url:
        endpoint = Endpoint(f"{url}/s/0.05/{gap_s:.6f}/30/1", "m")
        repeats = []
        for number in range(5):
            asked = [Asked({"prompt": "x", "max_tokens": 30, "user": f"{number}-{one}"}) for one in range(2)]
            outcomes = endpoint.stream_many(asked, deadline_s=30.0, stall_s=10.0)
            repeats.append([{**sample(reply), "finish_reason": "length"} for reply in outcomes])

    def replant(row):
        first = row["finding"]["repeats"][0]
        row["finding"] |= {"tokens": 30, "repeats": [{**first, "samples": samples} for samples in repeats]}

    return changed(base, replant, checks="concurrency.c2")


def test_a_slower_server_is_found_for_real(lab):
    """Real streams on loopback: events 20 ms apart against 21.05 ms apart (5 % slower), and against 20 ms again."""
    was, slower, same = (streamed(lab, gap) for gap in (0.020, 0.020 / 0.95, 0.020))
    found, none = (says(was, now, only=("concurrency.c2",)) for now in (slower, same))
    rates = [next(one for one in answer.figures if one.name == "output tok/s") for answer in (found, none)]
    print(f"\nfor real, 5 % slower: {compare.percent(rates[0])}; the same again: {compare.percent(rates[1])}")
    assert found.exit_code == 1 and {one.name for one in found.slower} == {"output tok/s"}
    assert none.exit_code == 0


def test_noise_is_not_called_no_regression(lab):
    """Where a slowdown of 5 % cannot be excluded nothing is decided."""
    answer = says(planted(lab, 0, 0.1, 1), planted(lab, 0, 0.1, 2))
    assert answer.exit_code == 2 and answer.sentence.startswith("DECIDES NOTHING")
    assert {one.said for one in answer.unclear} == {"cannot tell"}


def test_a_limit_is_a_limit(lab):
    was, now = planted(lab, 0, 0.003, 1), planted(lab, 0.05, 0.003, 2)
    assert says(was, now, limit=2.5).exit_code == 1
    within = says(was, now, limit=8.0)
    assert within.exit_code == 0 and {one.said for one in within.figures} >= {"slower, within the limit"}
    assert says(now, was).exit_code == 0, "faster is no regression"
    assert any(one.said == "faster" for one in says(now, was).figures)


def test_the_first_token_alone_can_be_the_regression(lab):
    """A wait that doubles inside the same total time."""

    def later(row):
        for one in row["finding"].get("repeats", ()):
            for stream in one["samples"]:
                stream["first_token_s"] *= 2

    was = planted(lab, 0, 0.003, 1)
    answer = says(was, changed(planted(lab, 0, 0.003, 2), later))
    assert answer.exit_code == 1 and {one.name for one in answer.slower} == {"first token, s"}


def test_figures_are_made_again_from_the_streams(lab):
    """A headline that was edited decides nothing."""

    def boast(row):
        if "headline" in row["finding"]:
            row["finding"]["headline"]["output_rate"] = {"mean": 9e9, "low": 9e9, "high": 9e9, "n": 5, "reason": None}

    assert says(planted(lab, 0, 0.003, 1), changed(planted(lab, 0.05, 0.003, 2), boast)).exit_code == 1


# --- refusals


def _set(path: str, value):
    def change(row):
        inner = row["finding"]
        *outer, last = path.split(".")
        for key in outer:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value

    return change


def _warm(row):
    for one in row["finding"].get("repeats", ()):
        one["server"]["prefix_hits"] = {"value": 64.0, "reason": None}


def graphs(base: pack.Pack, kind: str) -> pack.Pack:
    def told(row):
        row["finding"]["comparisons"][0]["found"] = {"cudagraph_implementation": kind}

    return changed(base, told, checks="gate.compilation")


def test_breakable_against_regular_is_refused(lab):
    answer = says(graphs(lab, "regular"), graphs(lab, "breakable"))
    assert answer.exit_code == 2
    assert answer.sentence == "REFUSED: production: the kind of CUDA graphs differs: A regular, B breakable"


def test_another_profile_is_refused(lab):
    other = dataclasses.replace(lab, profiles={"breakable_ab": lab.profiles["production"]})
    assert "no profile in common: A is of production (NONE graphs), B of breakable_ab" in says(lab, other).sentence


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_warm, "the prompt cache is cold in A and warm in B"),
        (_set("method", "chat"), "method is completions in A and chat in B"),
        (_set("tokens", 999), "tokens is 8 in A and 999 in B"),
        (_set("arrivals", "one by one"), "arrivals is"),
        (_set("reader", "thread"), "reader is"),
        (_set("prompt_class", "code"), "prompt class is prose in A and code in B"),
        (_set("calibration", None), "the client was not calibrated in B"),
    ],
)
def test_what_was_not_measured_alike_is_refused(lab, change, told):
    answer = says(lab, changed(lab, change, checks="concurrency.c1"))
    assert answer.exit_code == 2 and answer.sentence.startswith("REFUSED: production/concurrency.c1: differs: ")
    assert told in answer.sentence


def test_other_settings_are_refused(lab):
    checks = {**lab.recipe.checks, "concurrency": {**lab.recipe.checks["concurrency"], "max_drift": 99.0}}
    other = dataclasses.replace(lab, recipe=dataclasses.replace(lab.recipe, checks=checks))
    assert "setting max_drift is" in says(lab, other).sentence


def test_a_rehearsal_says_nothing_of_an_engine(lab):
    other = dataclasses.replace(lab, recipe=dataclasses.replace(lab.recipe, rehearsal=True))
    assert says(lab, other).sentence == "REFUSED: one is a rehearsal, which says nothing of an engine"


def test_a_row_that_is_missing_or_void_is_no_all_clear(lab):
    """Everything else is steady, and still nothing is decided."""
    was, now = planted(lab, 0, 0.003, 1), planted(lab, 0, 0.003, 2)
    gone = dataclasses.replace(now, rows=tuple(row for row in now.rows if row["check"] != "concurrency.c4"))
    assert says(was, now).exit_code == 0
    assert says(was, gone).exit_code == 2 and says(was, gone).left == (
        ("production/concurrency.c4", "was not measured in B"),
    )
    void = changed(now, _set("calibration.events", 0), checks="concurrency.c4")
    assert says(was, void).exit_code == 2 and "ERROR" not in says(was, void).sentence
    assert "the client's own error was not measured" in says(was, void).left[0][1]
    assert says(was, gone, only=("concurrency.c1",)).exit_code == 0


def test_what_runs_differently_is_named(lab):
    def newer(row):
        for one in row["finding"]["comparisons"]:
            one["found"] = "0.33.0" if one["what"] == "pin package" else one["found"]

    answer = says(lab, changed(lab, newer, checks="gate.pins"))
    assert [(one.what, one.now) for one in answer.identity] == [("production: pin package, rank 0", "0.33.0")]
    assert says(lab, lab).identity == ()


# --- the command


def test_the_command(lab, tmp_path, capsys):
    """Text whose last line is the answer, JSON, a page, and the exit code."""
    page = tmp_path / "compare.html"
    assert cli.main(["compare", str(LAB), str(LAB), "--html", str(page)]) == 2
    told = capsys.readouterr().out.strip().splitlines()
    assert told[-1].startswith("DECIDES NOTHING") and "95 % interval" in "\n".join(told)
    assert page.read_text().startswith("<!doctype html>") and "DECIDES NOTHING" in page.read_text()
    assert cli.main(["compare", str(LAB), str(LAB), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.parametrize("limit", ["-1", "100", "x"])
def test_a_limit_that_is_none(limit):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(LAB), str(LAB), "--limit", limit])
    assert ended.value.code == 2


def test_no_pack(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path / "none"), str(LAB)]) == 2
    assert "no such pack" in capsys.readouterr().err


def test_the_page_says_the_refusal(lab):
    answer = says(graphs(lab, "<b>regular"), graphs(lab, "breakable"))
    assert "&lt;b&gt;regular" in comparing.html(answer) and "<b>regular" not in comparing.html(answer)
    assert statistics.fmean(len(line) for line in compare.text(answer).splitlines()) < 200
