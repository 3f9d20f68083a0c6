"""PACK.md: what a reader must know within a minute. Pure, from what the pack holds, so that `dspark verify` makes it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_dspark import tables
from pytest_dspark.acceptance import Outcome
from pytest_dspark.pack import CHANGES, Pack, fingerprint, table
from pytest_dspark.statement import subjects, unproven
from pytest_dspark.tables import DASH, Table, escaped

_SPEED: Final = ("row", "figure", "was", "is", "change", "says")


def page(pack: Pack, answer: Outcome, sums: Mapping[str, str]) -> str:
    """The whole page. `sums` are sha256 of the pack's other files."""
    parts = [*_head(pack, answer), *_what(pack), *_against(answer), *_disclosed(pack, answer)]
    for one in (_proven(pack), *_every(pack), knobs(pack), made_with(pack), _files(sums)):
        parts += tables.markdown(one) if one.rows else ()
    return "\n".join([*parts, *how_to_verify(pack)]) + "\n"


def _every(pack: Pack) -> list[Table]:
    return [*tables.every(pack.rows), tables.hosts(pack.run), *changed(pack)]


def changed(pack: Pack) -> list[Table]:
    """What differs from the last accepted run under the same evidence root, as it was told when the pack was made."""
    told = table(pack.path / CHANGES) if (pack.path / CHANGES).is_file() else {}
    identity = tuple((one["what"], one["was"], one["now"]) for one in told.get("identity", ()))
    speed = tuple(tuple(one[key] for key in _SPEED) for one in told.get("speed", ()))
    why = [told["reason"]] if told.get("reason") else []
    why += [f"compared with run {told['since']}"] if told.get("since") else []
    why += ["nothing of what was read differs"] if told.get("since") and not identity else []
    said = Table("Since the last accepted run", ("what",), tuple((line,) for line in why))
    return [
        said,
        Table("What runs differently", ("what", "it was", "it is"), identity),
        Table("Speed then and now", _SPEED, speed),
    ]


def _head(pack: Pack, answer: Outcome) -> Iterator[str]:
    yield f"# Evidence of run {pack.run['run']}"
    yield ""
    yield f"**{accepted_words(pack, answer)}. {publishable_words(answer)}.**"
    yield ""
    yield from tables.markdown(tables.verdicts(pack.rows))


def accepted_words(pack: Pack, answer: Outcome) -> str:
    """Whether the run was accepted, in words."""
    if answer.accepted is not None:
        return "Accepted" if answer.accepted else "NOT accepted"
    if pack.recipe.rehearsal:
        met = "met" if answer.met else "did NOT meet"
        return f"A rehearsal, which is never an acceptance; it {met} every requirement"
    return "Not an acceptance: a subset" if answer.subset else "Not an acceptance: nothing proves what answered"


def publishable_words(answer: Outcome) -> str:
    return "It may be published" if answer.publishable else "It may NOT be published as a result (invalid_for_publish)"


def _what(pack: Pack) -> Iterator[str]:
    """What ran where, and when."""
    yield "## What ran where"
    yield ""
    yield f"- recipe `{pack.recipe.name}`: {escaped(pack.recipe.about)}"
    for mark, plan in pack.plans.items():
        hosts = ", ".join(f"rank {rank['rank']} on {escaped(rank['host'])}" for rank in plan["ranks"])
        yield f"- {mark}: profile `{pack.profiles[mark].name}`, {hosts}, fingerprint `{fingerprint(plan)}`"
    yield f"- from {pack.run['started']} to {pack.run['ended']}, status {pack.run['status']}"
    yield from _standing(pack.run["ledger"])
    if pack.run.get("challenge"):
        yield f"- challenge `{escaped(pack.run['challenge'])}`: prompts, codes and sums were made from it"
    yield ""


def _standing(told: Mapping[str, Any] | None) -> Iterator[str]:
    if told is None:
        yield "- this run stands in no ledger"
        return
    yield f"- run {told['number']} of {told['of']} with this configuration in its evidence root"
    for other in told["others"]:
        counts = (
            ", ".join(f"{count} {verdict}" for verdict, count in sorted((other["verdicts"] or {}).items())) or "no rows"
        )
        yield f"  - run {other['run']}: {other['status']}, accepted: {_word(other['accepted'])} ({counts})"


def _word(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not applicable"}[value]


def _against(answer: Outcome) -> Iterator[str]:
    yield "## invalid_for_publish"
    yield ""
    yield f"invalid_for_publish: **{'false' if answer.publishable else 'true'}**"
    yield ""
    for reason in answer.reasons or ("nothing stands against publishing",):
        yield f"- {escaped(reason)}"
    yield ""


def _disclosed(pack: Pack, answer: Outcome) -> Iterator[str]:
    yield "## Disclosures"
    yield ""
    for line in [*answer.disclosures, *disclosures(pack)]:
        yield f"- {escaped(line)}"
    yield ""


def disclosures(pack: Pack) -> Iterator[str]:
    """What a reader must be told although no rule stands against it."""
    for mark, one in pack.run["profiles"].items():
        if one.get("error"):
            yield f"{mark}: the first error was {one['error']}"
        for warning in pack.settings[mark].warnings:
            yield f"{mark}: {warning}"
        yield from _small_pool(mark, pack)
    yield "the names of hosts, addresses, interfaces, users and paths are pseudonyms, the same in every file of this pack"
    yield "logs hold the first and the last part of each rank's log; logs.json has the sha256 of the whole"


def _small_pool(mark: str, pack: Pack) -> Iterator[str]:
    pool, window = (
        pack.run["profiles"][mark].get("kv_cache_size_tokens"),
        pack.settings[mark].values.get("MAX_MODEL_LEN"),
    )
    if pool is None:
        yield f"{mark}: kv_cache_size_tokens: the engine's logs do not say it"
    else:
        less = ", fewer than the window that is advertised" if window and pool < window else ""
        yield f"{mark}: kv_cache_size_tokens is {pool:,}, max_model_len {window or DASH}{less}"


def _proven(pack: Pack) -> Table:
    """The statement's subjects."""
    title, header = "What the statement is about", ("what", "kind of digest", "digest")
    why = unproven(pack)
    if why:
        return Table(title, header, (("nothing", DASH, f"there is no statement: {why}"),))
    rows = [(one["name"], kind, value) for one in subjects(pack) for kind, value in one["digest"].items()]
    notes = () if len(rows) > 2 else ("the recipe pins no runtime manifest",)
    return Table(title, header, tuple(rows), notes)


def knobs(pack: Pack) -> Table:
    rows = [
        (mark, name, text) for mark, settings in pack.settings.items() for name, text in sorted(settings.texts.items())
    ]
    return Table("Configuration (the profile's knobs)", ("profile", "knob", "value"), tuple(rows))


def made_with(pack: Pack) -> Table:
    told = pack.versions
    ours = [("pytest-dspark", str(told["pytest_dspark"])), ("its commit", told["commit"] or DASH)]
    ours += [("Python", f"{told['implementation']} {told['python']} on {told['system']} {told['machine']}")]
    ours += [(mark, f"profile sha256 {profile.sha256}") for mark, profile in pack.profiles.items()]
    ours += [(f"recipe {pack.recipe.name}", f"sha256 {pack.recipe.sha256}")]
    ours += [(f"wrapper of {mark}", _wrapper(one)) for mark, one in pack.run["profiles"].items()]
    rows = [*ours, *((name, version) for name, version in sorted(told["packages"].items()))]
    return Table("Made with", ("what", "version"), tuple(rows))


def _wrapper(one: Mapping[str, Any]) -> str:
    wrapper = one.get("wrapper") or {}
    changes = wrapper.get("changes")
    clean = "unknown" if changes is None else "clean" if not changes else f"{len(changes)} changes"
    return f"commit {wrapper.get('head') or 'unknown'}, {clean}"


def _files(sums: Mapping[str, str]) -> Table:
    return Table("Files", ("file", "sha256"), tuple(sorted(sums.items())))


def how_to_verify(pack: Pack) -> Sequence[str]:
    return (
        "## How to verify",
        "",
        "    dspark verify FOLDER                     judges every row again; needs Python alone",
        "    dspark verify FOLDER --allowed-signers FILE   and the signatures (ssh-keygen's file of keys that you trust)",
        "    sha256sum -c SHA256SUMS",
        "",
        "A signature by itself, with OpenSSH:",
        "",
        "    ssh-keygen -Y verify -f ALLOWED_SIGNERS -I SIGNER -n pytest-dspark -s statement.json.NAME.sig < statement.json",
    )
