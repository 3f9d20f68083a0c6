"""A pack that a stranger can believe: what was published verifies, and whatever is changed in it is found and named."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from io import BytesIO, StringIO
from pathlib import Path
from xml.etree import ElementTree

import packed
import pytest
from packed import changed, copied, edit, forge, leaf, numbers, rows_of, sum_up, write_rows
from rehearsed import Place

from pytest_dspark import cli, composition, ledger, option2, pack, packfile, rejudging, signing, tables, verify
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.packfile import opened
from pytest_dspark.verify import examine

made = packed.made
BLOCKED = "docker paramiko requests urllib3 tiktoken pytest _pytest pluggy xdist prometheus_client cryptography".split()
BLOCK = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
from pytest_dspark.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def copy(made, tmp_path):
    """The published pack of production, to be tampered with."""
    return copied(made.production, tmp_path / "pack")


def named(folder, **given):
    return {problem.file for problem in examine(folder, **given).problems}


# --- what is published


def test_both_packs_verify_with_every_library_blocked(made):
    for run in (made.long1m, made.production):
        done = subprocess.run(
            [sys.executable, "-c", BLOCK, "verify", str(run)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert done.stdout.startswith("verified, not signed") and "Only claimed:" in done.stdout


def test_the_page_answers_what_a_reader_asks(made):
    text = (made.production / "publish" / "PACK.md").read_text()
    head = text[: text.index("## Every row")]
    for words in (
        "A rehearsal, which is never an acceptance; it met every requirement",
        "It may NOT be published as a result",
        "rank 0 on host-1, rank 1 on host-2",
        "invalid_for_publish: **true**",
        "a rehearsal proves the harness and never an engine",
        "## Speed: profile production, regular graphs, method completions",
        "kv\\_cache\\_size\\_tokens is 156,000",
        "## Identity, as read from what ran",
    ):
        assert words in head, words
    assert head.index("## Speed") < head.index("## Identity")


def test_the_statement_is_in_toto_with_ours_apart(made):
    told = json.loads((made.production / "publish" / "statement.json").read_text())
    assert told["_type"] == "https://in-toto.io/Statement/v1"
    assert told["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    body = told["predicate"]
    assert set(body) == {"result", "configuration", "passedTests", "warnedTests", "failedTests", "dspark"}
    assert body["result"] == "FAILED" and body["dspark"]["accepted"] is None and not body["failedTests"]
    assert {one["name"] for one in told["subject"]} == {"image", "model"}
    not_here = body["dspark"]["verdicts"]["NOT_IMPLEMENTED"]
    assert [name for name in not_here if "/gate." in name] == [
        f"production/gate.{n}" for n in ("mounts", "frozen", "behaviour")
    ]
    assert "production/gsm8k" in not_here and not set(not_here) & set(body["passedTests"])
    names = {one["name"] for one in body["configuration"]}
    assert names == {name for name in pack.files_of(made.production / "publish") if pack.summed(name)}


def test_sha256sum_itself_agrees(made):
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=made.production / "publish", check=True)


def test_the_run_folder_keeps_inputs_versions_and_readings_in_private(made):
    kept = {path.relative_to(made.production).as_posix() for path in made.production.rglob("*") if path.is_file()}
    assert {
        "inputs/recipe/rehearsal.toml",
        "inputs/cluster.toml",
        "inputs/suites/test_gate.py",
        "versions.json",
        "nonce",
    } <= kept
    assert {"production/readings.jsonl", "production/plan.json"} <= kept
    assert not {name for name in kept if (made.production / name).stat().st_mode & 0o077}
    assert not any(
        Path(name).name == "nonce" or "cluster" in name for name in pack.files_of(made.production / "publish")
    )
    versions = json.loads((made.production / "versions.json").read_text())
    assert versions["packages"]["pytest"] and versions["files"]["verify.py"] and versions["suites"]["test_gate.py"]


# --- tampering, generated


def flip(path):
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    data[place] ^= 1
    path.write_bytes(bytes(data))


def drop(path):
    path.unlink()


def double(path):
    shutil.copy(path, path.with_name(f"{path.stem}-2{path.suffix}"))


def shout(path):
    shutil.copy(path, path.with_name(path.name.upper() if path.name.upper() != path.name else path.name.lower()))


def rename(path):
    path.rename(path.with_name(f"x{path.name}"))


def test_every_file_changed_dropped_doubled_or_renamed_is_named(made, tmp_path, capsys):
    source, count = made.production / "publish", 0
    folder = copied(made.production, tmp_path / "pack")
    for name in pack.files_of(source):
        for tamper in (flip, drop, double, shout, rename):
            tamper(folder / name)
            found = examine(folder)
            touched = {name} | {one for one in pack.files_of(folder) if not (source / one).exists()}
            assert not found.verified, f"{tamper.__name__} {name}"
            assert {problem.file for problem in found.problems} & touched, f"{tamper.__name__} {name}: {found.problems}"
            for one in pack.files_of(folder):
                if not (source / one).exists():
                    (folder / one).unlink()
            shutil.copy(source / name, folder / name)
            count += 1
    assert examine(folder).verified
    with capsys.disabled():
        print(f"\n{count} files changed, dropped, doubled or renamed: all found and named")


@pytest.mark.parametrize("which", ["production", "long1m"])
def test_every_number_of_a_row_is_made_again_or_is_said_to_be_claimed(made, which, capsys):
    found = pack.load(getattr(made, which) / "publish")
    assert verify.contents(found) == []
    known, needed, count = verify._Known(found), set(), Counter()
    for number, row in enumerate(found.rows):
        assert not noticed(found, row, known)
        for path in numbers(row):
            forged = changed(row, path, lambda value: value + 1)
            claim = claimed(path)
            count["edited"] += 1
            if noticed(found, forged, known):
                count["caught"] += 1
            elif claim not in needed or claim is None:
                rows = (*found.rows[:number], forged, *found.rows[number + 1 :])
                if verify.contents(dataclasses.replace(found, rows=rows)):
                    count["caught"] += 1
                else:
                    assert claim is not None, f"nobody checks {row['check']}: {leaf(path)}"
                    needed.add(claim)
                    count["claimed"] += 1
            else:
                count["claimed"] += 1
    with capsys.disabled():
        print(
            f"\n{which}: {count['edited']} numbers edited with checksums made anew: {count['caught']} caught, {count['claimed']} claimed"
        )
    wanted = {
        pattern for pattern, _ in verify.CLAIMED if ("needle" in pattern or "looks" in pattern) is (which == "long1m")
    }
    assert wanted <= needed, "something is called claimed that is checked"


def claimed(path):
    name = leaf(path).removeprefix("finding.")
    return next((pattern for pattern, _ in verify.CLAIMED if re.fullmatch(pattern, name)), None)


def noticed(found, row, known):
    try:
        return list(verify.row_problems(found, row, known))
    except pack.SHAPE:
        return True


def test_the_pages_of_another_version_are_claimed_and_its_rows_proven(copy, monkeypatch):
    page = copy / "PACK.md"
    page.write_text(page.read_text() + "\nlaid out otherwise\n")
    sum_up(copy)
    assert any(problem.file == "PACK.md" for problem in examine(copy).problems)
    monkeypatch.setattr(verify.provenance, "commit", lambda: "0" * 40)
    edit(copy / "versions.json", lambda data: data.update(commit="1" * 40))
    sum_up(copy)
    found = examine(copy)
    assert not any(problem.file == "PACK.md" for problem in found.problems)
    assert any("every sentence of PACK.md" in claim for claim in found.claimed)
    assert "made it" not in found.line
    rows = rows_of(copy)
    next(row for row in rows if row["check"] == "correctness.json")["verdict"] = "FAIL"
    write_rows(copy, rows)
    sum_up(copy)
    assert f"commit {'1' * 40} made it, so verify it with that code too" in examine(copy).line


def test_a_verdict_that_was_turned_round_is_found_though_all_else_is_made_anew(copy):
    rows = rows_of(copy)
    for row in rows:
        if row["check"] == "correctness.json":
            row["finding"]["reply"]["text"] = "no idea"
    write_rows(copy, rows)
    forge(copy)
    assert any("correctness.json" in str(problem) for problem in examine(copy).problems)


def test_an_expectation_that_was_bent_to_the_answer_is_found(copy):
    rows = rows_of(copy)
    for row in rows:
        if row["check"] == "correctness.arithmetic":
            row["finding"]["cases"][0] |= {"expect": "7", "reply": {**row["finding"]["cases"][0]["reply"], "text": "7"}}
    write_rows(copy, rows)
    forge(copy)
    assert any("cases.0.expect" in str(problem) for problem in examine(copy).problems)


def test_every_case_of_junit_that_was_taken_out_is_found(made, copy, capsys):
    source = (made.production / "publish" / "junit.xml").read_bytes()
    names = [name for name, _ in pack.cases(pack.load(copy))]
    for name in names:
        root = ElementTree.fromstring(source)
        for suite in root.iter("testsuite"):
            case = next(c for c in suite if any(p.get("value") == name for p in c.iter("property")))
            suite.remove(case)
            suite.set("tests", str(int(suite.get("tests")) - 1))
        found = dataclasses.replace(pack.load(copy), junit=ElementTree.tostring(root))
        problems = [str(one) for one in verify._examined(verify._cases, found)]
        assert problems == [f"junit.xml: {name}: 0 cases, 1 rows"] or "counts of suite" in problems[0], problems
    with capsys.disabled():
        print(f"\n{len(names)} cases taken out of junit.xml one by one: all found")


def test_a_case_and_its_row_taken_out_together_leave_a_begun_measurement_and_a_requirement(copy):
    rows = [row for row in rows_of(copy) if row["check"] != "correctness.tool"]
    write_rows(copy, rows)
    root = ElementTree.fromstring((copy / "junit.xml").read_bytes())
    for suite in root.iter("testsuite"):
        for case in [
            c for c in suite if any(p.get("value") == "production/correctness.tool" for p in c.iter("property"))
        ]:
            suite.remove(case)
            suite.set("tests", str(int(suite.get("tests")) - 1))
    (copy / "junit.xml").write_bytes(ElementTree.tostring(root))
    forge(copy)
    assert {"begun.jsonl", "run.json", "ledger.jsonl"} <= named(copy)


def test_edited_suites_are_found_though_their_hash_is_made_anew(copy):
    path = copy / "inputs" / "suites" / "test_correctness.py"
    path.write_text(path.read_text().replace("assert verdict.passed, verdict", "assert True"))
    edit(
        copy / "versions.json",
        lambda data: data["suites"].update({path.name: pack.hashlib.sha256(path.read_bytes()).hexdigest()}),
    )
    forge(copy)
    assert named(copy) == {"inputs/suites/test_correctness.py"}


def test_a_log_line_that_the_gate_quotes_and_that_was_edited_is_found(copy):
    path = copy / "production" / "rank0.log"
    path.write_text(
        path.read_text().replace(
            "CUDA_GRAPH_REPLAY implementation=regular", "CUDA_GRAPH_REPLAY implementation=breakable"
        )
    )
    forge(copy)
    assert named(copy) == {"production/rank0.log"}


def test_a_row_that_took_less_than_what_it_holds_is_found(copy):
    rows = rows_of(copy)
    next(row for row in rows if row["check"] == "concurrency.c4")["elapsed_s"] = 0.001
    write_rows(copy, rows)
    forge(copy)
    assert any("what it holds took at least" in str(problem) for problem in examine(copy).problems)


def test_a_hidden_rerun_is_found(copy):
    """Somebody measured twice and kept the better row."""
    lines = (copy / "begun.jsonl").read_text().splitlines()
    again = next(line for line in lines if '"correctness.json"' in line)
    (copy / "begun.jsonl").write_text("\n".join([again, *lines]) + "\n")
    forge(copy)
    assert [str(problem) for problem in examine(copy).problems if "correctness.json" in str(problem)] == [
        "begun.jsonl: production/correctness.json was begun 2 times, there are 1 rows of it"
    ]
    rows = rows_of(copy)
    next(row for row in rows if row["check"] == "correctness.json")["attempt"] = 2
    write_rows(copy, rows)
    forge(copy)
    assert "run.json" in named(copy), "a second attempt is a reason against publishing"


def test_a_recipe_that_asks_for_less_is_found(copy):
    path = copy / "inputs" / "recipe" / "rehearsal.toml"
    path.write_text(path.read_text().replace('"correctness.tool", ', ""))
    forge(copy)
    assert "production/plan.json" in named(copy)


@pytest.mark.parametrize(
    "key", ["accepted", "publishable", "requirements_met", "narrowed", "status", "exit_status", "stated"]
)
def test_an_answer_that_does_not_follow_is_found(copy, key):
    flipped = {
        "accepted": True,
        "publishable": True,
        "requirements_met": False,
        "narrowed": True,
        "status": "interrupted",
    }
    wrong = {**flipped, "exit_status": 9, "stated": ["nothing"]}[key]
    edit(copy / "run.json", lambda data: data.update({key: wrong}))
    forge(copy)
    if key == "narrowed":
        assert examine(copy).verified, "nothing was left out, so that it was narrowed changes nothing"
    else:
        assert not examine(copy).verified


def test_a_statement_of_another_build_is_found(copy):
    edit(copy / "statement.json", lambda data: data["subject"][0]["digest"].update(sha256="0" * 64))
    assert named(copy) == {"statement.json"}


def test_a_line_of_the_ledger_that_was_edited_or_taken_out_is_found(copy):
    lines = (copy / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 4, "both runs, each with its beginning and its end"
    for number in range(len(lines)):
        for kept in (
            [*lines[:number], *lines[number + 1 :]],
            [*lines[:number], lines[number].replace("2026", "2025"), *lines[number + 1 :]],
        ):
            if kept == lines:
                continue
            (copy / "ledger.jsonl").write_text("".join(f"{line}\n" for line in kept))
            forge(copy)
            assert "ledger.jsonl" in named(copy)


# --- folders and archives that are not what they seem


def test_links_and_files_of_nobody_are_refused(copy, tmp_path):
    (copy / "extra.json").write_text("{}")
    (tmp_path / "secret").write_text("x")
    (copy / "production" / "plan2.json").symlink_to(tmp_path / "secret")
    (copy / "more").symlink_to(tmp_path, target_is_directory=True)
    assert {"extra.json", "production/plan2.json", "more"} <= named(copy)


def _tar(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            data = b"x" if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            archive.addfile(info, BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([("../x", tarfile.REGTYPE, "")], "leads out"),
        ([("/etc/x", tarfile.REGTYPE, "")], "leads out"),
        ([("a/../../x", tarfile.REGTYPE, "")], "leads out"),
        ([("a\\b", tarfile.REGTYPE, "")], "leads out"),
        ([("run.json", tarfile.SYMTYPE, "/etc/passwd")], "a link"),
        ([("run.json", tarfile.LNKTYPE, "other")], "a link"),
        ([("fifo", tarfile.FIFOTYPE, "")], "no plain file"),
        ([("run.json", tarfile.REGTYPE, ""), ("RUN.json", tarfile.REGTYPE, "")], "twice"),
        ([("run.json", tarfile.REGTYPE, ""), ("run.json", tarfile.REGTYPE, "")], "twice"),
    ],
)
def test_archives_that_lead_astray_are_refused(tmp_path, members, why):
    report = verify.verify(_tar(tmp_path / "pack.tgz", *members))
    assert not report.verified and why in str(report.problems[0])
    assert not (tmp_path / "x").exists() and not Path("/etc/x").exists()


def test_archives_of_a_pack_verify(made, tmp_path):
    shutil.make_archive(str(tmp_path / "a"), "gztar", made.production, "publish")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name in pack.files_of(made.production / "publish"):
            archive.write(made.production / "publish" / name, name)
    assert verify.verify(tmp_path / "a.tar.gz").verified and verify.verify(tmp_path / "b.zip").verified
    (tmp_path / "c").write_text("no pack")
    with pytest.raises(ConfigError, match="neither a folder nor"):
        verify.verify(tmp_path / "c")


def test_a_truncated_archive_is_no_traceback(made, tmp_path):
    shutil.make_archive(str(tmp_path / "a"), "gztar", made.production, "publish")
    raw = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(raw[: len(raw) // 2])
    assert not verify.verify(tmp_path / "a.tar.gz").verified


def test_exit_codes(made, copy, tmp_path, capsys):
    assert cli.main(["verify", str(made.production)]) == 0
    flip(copy / "rows.jsonl")
    assert cli.main(["verify", str(copy)]) == 1
    assert "rows.jsonl: was changed" in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path / "absent")]) == 2
    assert cli.main(["verify", str(copy), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False


# --- signatures


def _key(folder, name, passphrase=""):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", str(folder / name)], check=True
    )
    return folder / name


def _allowed(folder, **keys):
    path = folder / "allowed"
    path.write_text(
        "".join(signing.allowed_line(who, key.with_suffix(".pub").read_text()) + "\n" for who, key in keys.items())
    )
    return path


def test_two_labs_sign_one_statement_and_openssh_agrees(copy, tmp_path, capsys):
    one, other = _key(tmp_path, "one"), _key(tmp_path, "other")
    for key in (one, other):
        assert cli.main(["sign", str(copy), "--key", str(key)]) == 0
    allowed = _allowed(tmp_path, alice=one, bob=other)
    report = examine(copy, allowed_signers=allowed)
    assert report.verified and set(report.signers) == {"alice", "bob"} and "signed by" in report.line
    printed = capsys.readouterr().out.split("checks it with\n")[1].splitlines()[0].strip()
    command = printed.replace("ALLOWED_SIGNERS", str(allowed)).replace("SIGNER", "alice")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and 'Good "pytest-dspark" signature for alice' in done.stdout
    with pytest.raises(ConfigError, match="has signed already"):
        signing.sign(copy, one)


def test_a_signature_is_of_the_statement_and_of_a_known_key(copy, tmp_path):
    key, stranger = _key(tmp_path, "one"), _key(tmp_path, "stranger")
    made = signing.sign(copy, key)
    assert examine(copy).verified and "who signed it" in examine(copy).line
    assert not examine(copy, allowed_signers=_allowed(tmp_path, alice=stranger)).verified
    signature = made.read_text()
    made.write_text(signature.replace(signature[200], "A" if signature[200] != "A" else "B", 1))
    assert named(copy) == {made.name}
    made.write_text(signature)
    edit(copy / "run.json", lambda data: data.update(exit_status=1))
    forge(copy)
    assert made.name in named(copy), "the forger has no key"


def test_no_signature_where_keys_are_given_is_not_verified(copy, tmp_path):
    assert not examine(copy, allowed_signers=_allowed(tmp_path, alice=_key(tmp_path, "one"))).verified


def test_an_encrypted_key_is_never_asked_for_without_a_terminal_and_works_in_an_agent(copy, tmp_path, monkeypatch):
    key = _key(tmp_path, "locked", "a passphrase")
    monkeypatch.setattr("sys.stdin", StringIO())
    with pytest.raises(DsparkError, match="ssh-keygen did not sign"):
        signing.sign(copy, key)
    assert signing.signatures(copy) == []
    script = f"""
    ssh-agent bash -c 'printf "%s\\n" "#!/bin/sh" "echo a passphrase" > {tmp_path}/ask; chmod +x {tmp_path}/ask
    SSH_ASKPASS={tmp_path}/ask SSH_ASKPASS_REQUIRE=force ssh-add -q {key} < /dev/null
    {sys.executable} -m pytest_dspark.cli sign {copy} --key {key}.pub < /dev/null'
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert examine(copy, allowed_signers=_allowed(tmp_path, alice=key)).signers == ("alice",)


# --- other limits, two runs, the ledger


def test_old_evidence_under_new_limits(made, tmp_path, capsys):
    for name in ("dspark-sm121.toml", "rehearsal.toml"):
        shutil.copy(made.production / "inputs" / "recipe" / name, tmp_path / name)
    path = tmp_path / "rehearsal.toml"
    assert list(rejudging.rejudge(made.production / "publish", path)) == []
    path.write_text(path.read_text().replace("max_fairness = 50.0", "max_fairness = 0.5"))
    assert cli.main(["rejudge", str(made.production), "--recipe", str(path)]) == 1
    out = capsys.readouterr().out
    assert "production/concurrency.c4: PASS, now FAIL LIMIT_EXCEEDED: max_fairness is 0.5" in out


def test_two_runs_of_one_build_are_joined_and_verify(made, tmp_path, capsys):
    target = tmp_path / "joined"
    assert cli.main(["pack", str(made.long1m), str(made.production), "--to", str(target)]) == 0
    text = (target / "OPTION2_PACK.md").read_text()
    assert "## Needle in a haystack" in text and "## Speed: profile production, regular graphs" in text
    report = verify.verify(target)
    assert report.verified, report.problems[:3]
    assert "that both ran on the same hosts" in report.claimed
    flip(target / "long1m" / "rows.jsonl")
    assert {one.file for one in verify.verify(target).problems} >= {"long1m/rows.jsonl"}
    shutil.copy(made.long1m / "publish" / "rows.jsonl", target / "long1m" / "rows.jsonl")
    (target / "OPTION2_PACK.md").write_text(text.replace("PASS", "pass"))
    assert "OPTION2_PACK.md" in {one.file for one in verify.verify(target).problems}
    capsys.readouterr()


def test_runs_that_do_not_belong_together_are_not_joined(made, tmp_path):
    with pytest.raises(ConfigError, match="not about long1m"):
        composition.compose({"long1m": made.production, "production": made.long1m}, tmp_path / "x")
    other = tmp_path / "other"
    shutil.copytree(made.production, other)
    edit(other / "production" / "plan.json", lambda data: data["ranks"][0].update(host="elsewhere"))
    with pytest.raises(ConfigError, match="the hosts are not the same"):
        composition.compose({"long1m": made.long1m, "production": other}, tmp_path / "x")
    one, two = (option2.Part(mark, found, pack.answer(found)) for mark, found in parts(made).items())
    assert not list(option2.disagreements(one, two))
    moved = {**two.pack.run["profiles"]["production"], "wrapper": {"head": "another", "changes": []}}
    run = {**two.pack.run, "profiles": {"production": moved}}
    bent = dataclasses.replace(two, pack=dataclasses.replace(two.pack, run=run))
    assert any("wrapper of long1m" in why for why in option2.disagreements(one, bent))
    late = tuple({**row, "started": "2020-01-01T00:00:00.000Z"} for row in two.pack.rows)
    bent = dataclasses.replace(two, pack=dataclasses.replace(two.pack, rows=late))
    assert any("must come first" in why for why in option2.disagreements(one, bent))
    assert not (tmp_path / "x").exists()


def parts(made):
    return {"long1m": pack.load(made.long1m / "publish"), "production": pack.load(made.production / "publish")}


def test_rows_of_breakable_and_regular_graphs_and_of_two_methods_never_meet(made):
    rows = rows_of(made.production / "publish")
    other = json.loads(
        json.dumps(rows)
        .replace('"regular"', '"breakable"')
        .replace('"profile": "production"', '"profile": "breakable_ab"')
    )
    titles = {table.title: {row[0] for row in table.rows} for table in tables.timed([*rows, *other])}
    assert len(titles) == 4
    assert {title.partition(", ")[2] for title in titles} == {
        f"{kind} graphs, method {method}" for kind in ("regular", "breakable") for method in ("chat", "completions")
    }


def test_the_challenge_made_the_codes_and_verify_makes_them_again(made, tmp_path):
    folder = copied(made.long1m, tmp_path / "pack")
    assert "drawn on a Monday" in (folder / "PACK.md").read_text()
    edit(folder / "run.json", lambda data: data.update(challenge="drawn on a Tuesday"))
    rows = rows_of(folder)
    for row in rows:
        row["settings"] = pack.settings_digest(pack.load(folder), row)
    write_rows(folder, rows)
    forge(folder)
    problems = [str(problem) for problem in examine(folder).problems]
    assert any("codes of the challenge" in one for one in problems) and any("filler.seed" in one for one in problems)


def test_the_ledger_tells_how_the_others_ended_and_hides_other_configurations(tmp_path):
    (tmp_path / "runs").mkdir()
    for number in range(9):
        run, fingerprint = f"run{number}", "other" if number == 3 else "same"
        ledger.began(tmp_path, run, {"production": fingerprint}, rehearsal=False)
        if number != 5:
            ledger.ended(
                tmp_path,
                run,
                {"status": "complete", "accepted": number == 7, "publishable": False, "verdicts": {"PASS": 1}},
            )
    lines = ledger.read(tmp_path / ledger.NAME)
    found = ledger.standing(lines, "run7")
    assert (found.number, found.of) == (7, 8) and ledger.root_problems(tmp_path) == []
    assert [other["status"] for other in found.others].count("never ended") == 1
    told = ledger.extract(lines, "run7")
    assert list(ledger.problems(told)) == [] and "run3" not in json.dumps(told)
    assert "other" not in (tmp_path / ledger.NAME).read_text(), "a fingerprint is not told as it is"
    for number in range(len(lines)):
        assert list(ledger.problems([*told[:number], *told[number + 1 :]])) or number == len(lines) - 1
        if told[number].get("body"):
            bent = {**told[number], "body": {**told[number]["body"], "at": "later"}}
            assert list(ledger.problems([*told[:number], bent, *told[number + 1 :]]))


def test_a_ledger_whose_end_was_cut_off_is_found_by_the_run_folders(tmp_path):
    for number in range(3):
        run = tmp_path / "runs" / f"run{number}"
        run.mkdir(parents=True)
        line = ledger.began(tmp_path, run.name, {"production": "f"}, rehearsal=False)
        (run / "run.json").write_text(json.dumps({"ledger": {"began": line}}))
    path = tmp_path / ledger.NAME
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:2]))
    assert ledger.root_problems(tmp_path) == ["ledger: line 3 of run run2 is not there"]


def test_a_killed_run_is_incomplete_and_never_ended_in_the_ledger(tmp_path):
    place = Place(tmp_path)
    session = place.start()
    try:
        session.wait_for("ready …")
    finally:
        os.killpg(session.process.pid, signal.SIGKILL)
        session.process.wait()
        for pid in place.living():
            os.kill(pid, signal.SIGKILL)
    told = session.run_json()
    assert told["status"] == "incomplete" and told["ledger"] == {"began": 1}
    assert (
        not (session.folder / "publish").exists()
        and (session.folder / "inputs" / "recipe" / "rehearsal.toml").is_file()
    )
    assert {path.suffix: json.loads(path.read_text()) for path in session.folder.rglob("*.json")}, "each is whole"
    lines = ledger.read(place.out / ledger.NAME)
    assert [line["body"]["event"] for line in lines] == ["began"] and not list(ledger.problems(lines))
    with pytest.raises(ConfigError, match="no such pack"):
        verify.verify(session.folder / "publish")


def test_opened_finds_the_published_folder_of_a_run(made):
    with opened(made.production) as folder:
        assert folder == made.production / "publish"
    assert packfile.strange(made.production / "publish")
