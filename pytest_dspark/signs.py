"""What is seen of a live engine, and what it means: pure. One sign alone condemns nothing that may still be alive.

An end that the kernel or the Docker engine tells (a rank exited, was restarted, was killed for memory) is a fact and counts
at once. Silence is not: a host that does not answer, a fabric without a carrier, counters that stand still are each one
sign, and a verdict needs two that do not follow from each other. A prefill of hours with still counters and ranks that work
is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_dspark.cluster import RankState
from pytest_dspark.errors import LaunchError

# After the head ended in order: how long the others have to say that it was they.
SETTLE_S = 2.0
SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class RankSigns:
    """One rank and its host. Times are seconds up to now: None for what is not so.

    `silent_s` since the host last answered, `docker_only` if it did and said that its Docker engine does not; `link_s`
    since its fabric interface lost its carrier, `link` names that; `peer_s` since the other ranks' fabric addresses
    last answered it, `peer` names one; `down_s` since the rank was seen ended; `seen_s` since its state was last read.
    `restarted` says how it was. `death` is the first line of its log by which the engine says that it died, `hang` one
    by which it says that it stands still. `idle_s` since its processors last worked; `spin_s` since its GPUs last drew
    the power of work while they say that they are busy, `spin` says how much they draw.
    """

    rank: int
    host: str
    state: RankState | None = None
    silent_s: float | None = None
    docker_only: bool = False
    why: str = ""
    link_s: float | None = None
    link: str = ""
    peer_s: float | None = None
    peer: str = ""
    down_s: float | None = None
    seen_s: float | None = None
    restarted: str = ""
    death: str = ""
    hang: str = ""
    idle_s: float | None = None
    spin_s: float | None = None
    spin: str = ""
    tail: str = ""

    @property
    def down(self) -> bool:
        return self.state is not None and self.state.status != "running"

    @property
    def named(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class ApiSigns:
    """The head's API. `silent_s` since it last answered at all; `sick_s` since it says by its health that the engine is
    dead; `listening` False if the head's kernel shows nobody on its port; `still_s` since its counters last moved while it
    said that `running` requests run."""

    silent_s: float | None = None
    why: str = ""
    sick_s: float | None = None
    sick: str = ""
    listening: bool | None = None
    still_s: float | None = None
    running: float = 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a silence is a sign: of a host or a fabric, of the API, and of counters that stand still."""

    gone_s: float = 8.0
    api_s: float = 5.0
    wedge_s: float = 120.0


def judge(
    ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience, *, loading: bool = False
) -> LaunchError | None:
    """The first cause if the engine is lost; None as long as it may live. While it is `loading` there is no second sign, and
    nothing to lose: then a host that stays silent for three times as long is given up."""
    for one in (_restarted(ranks), _failed(ranks, patience), _process_lost(ranks)):
        if one:
            return one
    return (
        _fabric(ranks, api, patience)
        or _host(ranks, api, patience)
        or (_silent_launch(ranks, patience) if loading else None)
        or _ended(ranks, patience)
        or _dead(ranks, api, patience)
        or _api_down(ranks, api, patience)
        or _wedged(ranks, api, patience)
    )


# --- facts


def _restarted(ranks: Sequence[RankSigns]) -> LaunchError | None:
    found = next((one for one in ranks if one.restarted), None)
    return LaunchError("RANK_RESTARTED", f"{found.named} {found.restarted}") if found else None


def _failed(ranks: Sequence[RankSigns], patience: Patience) -> LaunchError | None:
    """A rank that was killed, or that ended with an error of its own. One that ended with an error while another host is
    silent may only have followed: it waits for that host."""
    for one in ranks:
        if one.down and one.state and (one.state.exit_code or one.state.oom_killed or one.state.status != "exited"):
            followed = not _by_signal(one.state) and any(other.silent_s is not None for other in ranks if other != one)
            if not followed or (one.down_s or 0.0) >= 2 * patience.gone_s:
                return _exit(one, ranks)
    return None


def _by_signal(state: RankState) -> bool:
    return state.oom_killed or state.status != "exited" or (state.exit_code or 0) >= SIGNALLED


def _exit(one: RankSigns, ranks: Sequence[RankSigns]) -> LaunchError:
    assert one.state is not None
    said = [f"{one.named} is {one.state.status} with exit code {one.state.exit_code}"]
    if one.state.remaining:
        said.append(f"of its processes {', '.join(one.state.remaining)} lived on")
    others = [other for other in ranks if other.down and other != one]
    said += [f"rank {other.rank} then ended with code {_code(other)}" for other in others]
    said.append(f"last log lines: {one.tail}")
    return LaunchError("OOM_KILLED" if one.state.oom_killed else "RANK_EXITED", "; ".join(said))


def _code(one: RankSigns) -> int | None:
    return one.state.exit_code if one.state else None


def _process_lost(ranks: Sequence[RankSigns]) -> LaunchError | None:
    """A process that ended is not a rank that ended: the rank's first process may live and its engine answer on."""
    found = next((one for one in ranks if one.state and not one.down and one.state.lost), None)
    if found is None or found.state is None:
        return None
    what = f"lost process {', '.join(found.state.lost)} while its first process lives"
    return LaunchError("PROCESS_LOST", f"{found.named} {what}; last log lines: {found.tail}")


# --- silences


def _past(seconds: float | None, limit_s: float) -> bool:
    return seconds is not None and seconds >= limit_s


def _fabric(ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience) -> LaunchError | None:
    """The ranks cannot reach each other: an interface without a carrier, or a fabric address that answers no more though
    its host can be reached otherwise; and beside it what such a cut makes stand still."""
    cut = [one for one in ranks if one.silent_s is None and _past(one.link_s, patience.gone_s)]
    unheard = [one for one in ranks if one.silent_s is None and _past(one.peer_s, patience.gone_s)]
    silent = [one for one in ranks if _past(one.silent_s, patience.gone_s)]
    signs = [f"{one.host}: {one.link} for {one.link_s:.0f} s" for one in cut]
    signs += [f"{one.host}: {one.peer} has not answered for {one.peer_s:.0f} s" for one in unheard]
    if not cut and (not unheard or silent):
        return None  # who cannot be reached at all is the host's matter
    signs += [f"{one.host} cannot be reached by that cable either ({one.why})" for one in silent]
    signs += _still(api, patience.gone_s)
    signs += [f"{one.named} ended with code {_code(one)}" for one in ranks if one.down]
    return LaunchError("FABRIC_LOST", "; ".join(signs)) if len(signs) > 1 else None


def _host(ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience) -> LaunchError | None:
    """A host that answers nobody, and beside it an engine that shows it. Where only the Docker engine is silent it may be
    starting again, which ends its ranks: it is waited for, so that it says what became of them."""
    others = [f"{one.named} ended with code {_code(one)}" for one in ranks if one.down and one.silent_s is None]
    limit = SETTLE_S if others else patience.gone_s
    silent = [one for one in ranks if _past(one.silent_s, 3 * patience.gone_s if one.docker_only else limit)]
    if not others:
        others = _still(api, patience.gone_s)
        others += [f"{one.host}: {one.peer} has not answered either" for one in ranks if _past(one.peer_s, 1.0)]
        others += [f"the API does not answer ({api.why})"] if _past(api.silent_s, patience.api_s) else []
    if not silent or not others:
        return None
    who = f"the Docker engine of {silent[0].host}" if silent[0].docker_only else silent[0].host
    what = f"{who} has not answered for {silent[0].silent_s:.0f} s ({silent[0].why})"
    return LaunchError("HOST_UNREACHABLE", "; ".join([what, *others]))


def _silent_launch(ranks: Sequence[RankSigns], patience: Patience) -> LaunchError | None:
    one = next((one for one in ranks if _past(one.silent_s, 3 * patience.gone_s)), None)
    if one is None:
        return None
    return LaunchError("HOST_UNREACHABLE", f"{one.host} has not answered for {one.silent_s:.0f} s ({one.why})")


def _still(api: ApiSigns, limit_s: float) -> list[str]:
    if not _past(api.still_s, limit_s):
        return []
    return [f"{api.running:g} requests run and no counter has moved for {api.still_s:.0f} s"]


def _ended(ranks: Sequence[RankSigns], patience: Patience) -> LaunchError | None:
    """Ranks that ended with code 0: the others have a moment to tell whether it was they. One whose log names no death was
    ended from outside and is the cause; else the engine died by itself."""
    down = [one for one in ranks if one.down and _past(one.down_s, SETTLE_S)]
    if not down:
        return None
    late = [one for one in ranks if not one.down and (one.silent_s is not None or not _fresh(one, down[0]))]
    if late and not _past(down[0].down_s, 2 * patience.gone_s):
        return None
    asked = next((one for one in down if not one.death), None)
    if asked:
        return _exit(asked, ranks)
    return LaunchError("ENGINE_DEAD", f"the engine said: {down[0].death}; {_exit(down[0], ranks).message}")


def _fresh(one: RankSigns, down: RankSigns) -> bool:
    """Whether its state was read well after the other was seen ended."""
    return one.seen_s is not None and one.seen_s < (down.down_s or 0.0) - SETTLE_S / 2


def _dead(ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience) -> LaunchError | None:
    """The log says that the engine died, and the API says so too, while every process lives on."""
    death = next((one for one in ranks if one.death), None)
    if death is None or not (_past(api.sick_s, patience.api_s) or _past(api.silent_s, patience.api_s)):
        return None
    said = api.sick or api.why
    return LaunchError("ENGINE_DEAD", f"{death.named} said: {death.death}; the API says: {said}")


def _api_down(ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience) -> LaunchError | None:
    """Every rank runs, and nobody listens on the API's port."""
    head = ranks[0]
    if head.down or head.silent_s is not None or api.listening is not False or not _past(api.silent_s, patience.api_s):
        return None
    what = f"the API has not answered for {api.silent_s:.0f} s ({api.why}) and nobody listens on its port"
    return LaunchError("API_DOWN", f"{head.host}: {what}; {head.named} is running; last log lines: {head.tail}")


def _wedged(ranks: Sequence[RankSigns], api: ApiSigns, patience: Patience) -> LaunchError | None:
    """Requests run, no counter moves, and a rank has used no processor at all: a rank that computes, however long one step
    takes, and one that waits for its GPU use some. Or the GPUs of every rank spin: each waits for another in a collective that
    nobody finishes. What the engine says of itself follows from the same silence and is told only."""
    signs = _still(api, patience.wedge_s)
    idle = [one for one in ranks if _past(one.idle_s, patience.wedge_s / 2)]
    spinning = [one for one in ranks if _past(one.spin_s, patience.wedge_s / 2)]
    if not signs or not (idle or len(spinning) == len(ranks)):
        return None
    signs += [f"{one.named} has used no processor for {one.idle_s:.0f} s" for one in idle]
    signs += [f"{one.named}: {one.spin} for {one.spin_s:.0f} s" for one in spinning]
    signs += [f"{one.named} said: {one.hang}" for one in ranks if one.hang]
    return LaunchError("ENGINE_WEDGED", "; ".join(signs))
