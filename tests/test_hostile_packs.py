"""Packs by somebody who means harm: nothing but our own sentences, no line that he draws, nothing of a host that is private."""

import dataclasses
import io
import json
import random
import tarfile
import zipfile

import pytest

from pytest_dspark import cli, comparison, identity, packfile, publish, selftesting, specimen, verify
from pytest_dspark.errors import LaunchError, printable
from pytest_dspark.live import Live
from pytest_dspark.verdict import Finding, Status, Verdict


def tarred(path, *names, mode="w:xz", kind=tarfile.REGTYPE):
    with tarfile.open(path, mode) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(b"x") if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"x"))
    return path


def zipped(path, **kind):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack/run.json", b"a" * 100_000)
    return path


def changed(path, *places):
    data = bytearray(path.read_bytes())
    directory = data.find(b"PK\x01\x02")
    for at, value, central in places:
        data[at] = value
        if central:
            data[directory + central] = value
    path.write_bytes(data)
    return path


def broken_xz(path):
    with tarfile.open(path, "w:xz") as archive:
        member = tarfile.TarInfo("pack/run.json")
        member.size = 50_000
        archive.addfile(member, io.BytesIO(random.Random(1).randbytes(50_000)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return path


ARCHIVES = {
    "deep": lambda path: tarred(path, "a/" * 1900 + "x"),
    "broken xz": broken_xz,
    "broken deflate": lambda path: changed(zipped(path), *((at, 0xFF, 0) for at in range(45, 60))),
    "unknown method": lambda path: changed(zipped(path), (8, 99, 10)),
    "encrypted": lambda path: changed(zipped(path), (6, 1, 8)),
    "many folders": lambda path: tarred(path, *(f"pack/{n}" for n in range(20_001)), kind=tarfile.DIRTYPE),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_that_cannot_be_unpacked_is_not_verified(tmp_path, kind, capsys):
    path = ARCHIVES[kind](tmp_path / "pack.archive")
    assert cli.main(["verify", str(path)]) == 1
    assert capsys.readouterr().out.startswith("pack.archive: ")


DRAWN = "\x1b[2K\rverified, signed by you\x1b[8m\x9b8m\u202e"


def test_what_others_named_draws_no_line_on_the_terminal(tmp_path, capsys):
    path = tarred(tmp_path / "p.tar", f"pack/a\n{DRAWN}", mode="w")
    assert cli.main(["verify", str(path)]) == 1
    said = capsys.readouterr().out
    assert "\nverified" not in said and not any(char in said for char in "\x1b\r\x9b\u202e")
    assert "\\x1b[2K" in said


def test_nor_does_what_a_log_a_server_or_a_model_said():
    stream = io.StringIO()
    live = Live(stream, clock=iter((0.0, 100.0, 100.0, 100.0)).__next__)
    live.show(DRAWN)
    live.line(DRAWN)
    for text in (
        str(LaunchError("RANK_EXITED", DRAWN)),
        str(Verdict(Status.FAIL, "WRONG_ANSWER", DRAWN)),
        stream.getvalue(),
    ):
        assert "verified" in text and not any(char in text for char in "\x1b\r\x9b\u202e")
    assert printable("a\tb\nc é ✅ 漢") == "a\tb\nc é ✅ 漢"


@pytest.fixture
def folder():
    with packfile.opened(selftesting.FOLDER / selftesting.PACK) as made:
        versions = made / "versions.json"
        versions.write_text(versions.read_text().replace(f'"{selftesting.MADE_BY}"', '"0"'))
        publish.derive(made)
        yield made


def forged(folder, name, change):
    """The problems after an edit by somebody who makes everything derived anew."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    publish.derive(folder)
    return [str(one) for one in verify.examine(folder, pages=True).problems]


def test_what_the_gate_says_follows_from_its_comparisons(folder):
    assert not forged(folder, "production/runtime-gate.json", dict)
    name = "production/runtime-gate.json"
    (said,) = forged(folder, name, lambda data: data["requirements"]["image"].update(message="seen by nobody"))
    assert "requirements.image.message" in said
    (said,) = forged(
        folder, name, lambda data: (data["requirements"]["image"].update(message=""), data["errors"].append("x"))
    )
    assert "errors has 1 entries" in said


def test_changed_code_that_the_run_does_not_state_is_found(folder):
    (said,) = forged(folder, "versions.json", lambda data: data.update(changes=["verify.py"]))
    assert "own files are changed" in said


def test_data_of_another_shape_is_a_problem_and_no_traceback(folder):
    assert forged(folder, "sources.json", lambda data: data["files"].update(more="text"))


def test_half_a_character_of_a_server_is_published_and_verified(folder):
    """JSON may hold half of a pair, which no file in UTF-8 can."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    odd = json.loads('"half \\ud83d of a pair"')
    for row in rows:
        row.pop("seal")
        if row["check"] == "gate.image":
            row["finding"]["recorded"] = [odd]
            row["message"] += f"; recorded: {odd}"
    publish._seal(folder / "rows.jsonl", rows[0]["run"], rows)
    publish.derive(folder)
    said = [str(one) for one in verify.examine(folder, pages=True).problems]
    assert said and all("gate.image" in one or "requirements.image" in one or "junit" in one for one in said)
    assert all(b"half \\ud83d of" in (folder / name).read_bytes() for name in ("PACK.md", "report.html"))


def test_a_check_that_nobody_has_is_a_problem_of_the_pack_and_no_wrong_option(folder):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows[-1]["check"] = "teardown~"
    publish._seal(
        folder / "rows.jsonl", rows[0]["run"], [{k: v for k, v in row.items() if k != "seal"} for row in rows]
    )
    (folder / "SHA256SUMS").unlink()
    (folder / "statement.json").unlink()
    publish.derive(folder)
    found = verify.examine(folder, pages=True)
    assert any("teardown~" in str(one) for one in found.problems)


def test_a_variable_of_one_host_alone_is_compared_and_told_in_no_sentence():
    made = specimen.planned()
    spec = dataclasses.replace(made.specs[0], env=(*made.specs[0].env, ("MY_OWN", "Plant-expected")))
    made = dataclasses.replace(made, specs=(spec, *made.specs[1:]))
    ranks = [specimen.good_rank(made, number) for number in range(len(made.specs))]
    facts = ranks[0].facts
    entries = tuple(one if not one.startswith("MY_OWN=") else "MY_OWN=Plant-found" for one in facts.environment)
    ranks[0] = dataclasses.replace(ranks[0], facts=dataclasses.replace(facts, environment=entries))
    sheet = comparison.Sheet()
    identity.environment(made, ranks, sheet)
    verdict = comparison.judge(Finding("gate.environment", sheet.data()), {})
    assert verdict.code == "GATE_FAILED" and "MY_OWN" in verdict.message and "Plant" not in verdict.message
    gate = {"requirements": {"environment": sheet.data()}, "errors": ["found Plant-found"], "status": "FAIL"}
    told = publish._sentences_anew(gate)
    assert len(told["errors"]) == 1 and "Plant" not in told["errors"][0]
    assert "Plant" not in told["requirements"]["environment"]["message"]
