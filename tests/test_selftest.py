"""The self-test: every known defect is caught, and a blind adapter or an empty folder turns it red."""

import shutil

import pytest

from pytest_dspark import cli, selftesting
from pytest_dspark.errors import ConfigError
from pytest_dspark.verdict import PASS


def test_every_defect_is_caught_and_every_clean_twin_passes(capsys):
    outcome = selftesting.run()
    assert outcome.missed == ()
    assert outcome.defects == outcome.passed == len(list(selftesting.FOLDER.glob("*.toml"))) >= 60
    assert all(count >= 7 for count in outcome.caught.values()), outcome.caught
    assert outcome.elapsed_s < 20
    assert cli.main(["selftest"]) == 0 and "known defects caught" in capsys.readouterr().out


@pytest.mark.parametrize("who", sorted(selftesting.ADAPTERS))
def test_one_that_sees_nothing_turns_it_red(who, monkeypatch):
    monkeypatch.setattr(selftesting, "ADAPTERS", {**selftesting.ADAPTERS, who: lambda _: ""})
    with pytest.raises(ConfigError, match=f"{who} said nothing"):
        selftesting.require()


def test_one_that_refuses_everything_turns_it_red(monkeypatch):
    monkeypatch.setattr(selftesting, "ADAPTERS", {**selftesting.ADAPTERS, "client": lambda _: "PROTOCOL"})
    assert any("the clean twin was refused" in missed for missed in selftesting.run().missed)


def test_a_judge_that_passes_everything_is_found(monkeypatch):
    from pytest_dspark.checks import correctness

    check = correctness.CHECKS["retrieval"]
    blind = type(check)(check.measure, lambda *_: PASS, check.source)
    monkeypatch.setitem(correctness.CHECKS, "retrieval", blind)
    assert {missed.split(" ")[0] for missed in selftesting.run().missed} >= {"judge-wrong-code", "judge-two-codes"}


def test_no_defects_are_no_success(tmp_path):
    with pytest.raises(ConfigError, match="no defects are there"):
        selftesting.run(tmp_path)


@pytest.mark.parametrize(
    "text", ["shown_to = 1", 'shown_to = "nobody"\ntitle = ""\nexpect = "X"\n[defect]\n[clean]\n', "= ="]
)
def test_a_file_that_is_no_defect_is_refused(tmp_path, text):
    shutil.copy(selftesting.FOLDER / "client-html.toml", tmp_path)
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(ConfigError, match="odd.toml"):
        selftesting.read(tmp_path)
