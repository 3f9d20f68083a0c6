"""What one pytest process knows of its session: one object in `config.stash`, and nothing anywhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dspark import inputs, ledger, resume, selftesting, setup
from pytest_dspark.checks import lane_of
from pytest_dspark.cluster import Host, HostEntry, Readings
from pytest_dspark.datasets import data_folder
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.evidence import Case, RunFolder, default_root, digest, new_run
from pytest_dspark.hosts import open_host
from pytest_dspark.kept import KeptStore
from pytest_dspark.live import Live
from pytest_dspark.pack import lane_settings
from pytest_dspark.plan import Plan
from pytest_dspark.recipe import Recipe
from pytest_dspark.remote import Address, RemoteStage, StageServer
from pytest_dspark.resume import Replay
from pytest_dspark.sanitize import secret_values
from pytest_dspark.stage import Stage, StageOptions
from pytest_dspark.verdict import Finding


@dataclass(slots=True)
class State:
    """The session's plans, run folder and stage; `server` and signals belong to the controller alone."""

    options: setup.Options
    plans: dict[str, Plan]
    recipe: Recipe
    run: RunFolder
    stage: Any
    say: Callable[[str], None]
    controller: bool
    server: StageServer | None = None
    interrupted: bool = False
    narrowed: bool = False
    selftest: selftesting.Outcome | None = None
    ending: bool = False
    live: Live = field(default_factory=Live)
    replay: Replay | None = None
    holds: tuple[int, ...] = ()

    def settings(self, profile: str, lane: str) -> dict[str, Any]:
        """What the recipe says for the lane of a check, the profile's knobs under `knobs`, and the `challenge` if there is one."""
        return lane_settings(self.recipe, self.plans[profile].settings, lane, self.options.challenge)

    def here(self, profile: str) -> dict[str, Any]:
        """What is true of this machine and not of the check: `models` (folders in which it may have the model), `cache`
        (a folder for what is slow to make again), `data` (published question sets), `bfcl` and `r0b0bench` (other people's
        clients), `artifacts` (the folder of this run's profile, for what they leave)."""
        models = [entry.model for entry in self.plans[profile].cluster.hosts if entry.model]
        return {
            "models": models,
            "cache": str(self.run.path.parent.parent / "cache"),
            "data": self.options.data or str(data_folder()),
            "bfcl": self.options.bfcl,
            "r0b0bench": self.options.r0b0bench,
            "artifacts": str(self.run.path / profile),
        }

    def case(self, nodeid: str, profile: str, check: str) -> Case:
        """Where the row of a test case belongs, and which attempt at measuring it this is."""
        lane = lane_of(check)
        attempt = self.replay.attempt(profile, check, nodeid) if self.replay else 1
        return Case(
            run=self.run.run_id,
            nodeid=nodeid,
            check=check,
            lane=lane,
            profile=profile,
            recipe=self.recipe.name,
            fingerprint=self.plans[profile].fingerprint,
            settings=digest(self.settings(profile, lane)),
            attempt=attempt,
        )

    def measured_in(self, case: Case) -> str:
        """The run that measured what the case's row will say."""
        try:
            stored = self.replay.stored(case) if self.replay else None
        except ConfigError:  # the case's own row says so
            return case.run
        return stored.measured_in if stored else case.run

    def interrupt(self, name: str) -> bool:
        """A signal came. True: begin to stop now. False: it is stopping already, and only says so."""
        if self.interrupted or self.ending:
            self.say(f"{name}: still stopping what was started; this takes up to the stop grace of each rank")
            return False
        self.interrupted = True
        self.say(f"{name}: stopping every rank, then writing the report; once is enough")
        self.stage.cancel()
        return True

    def for_worker(self) -> dict[str, str]:
        if self.server is None:
            self.server = StageServer(self.stage)
        return {
            "path": self.server.address.path,
            "key": self.server.address.key,
            "run": str(self.run.path),
            "run_id": self.run.run_id,
            "marks": ",".join(self.plans),
            "resumed": str(self.replay.path) if self.replay else "",
        }

    def close(self, *, interrupted: bool) -> None:
        """Stop what is live. Idempotent; a worker has nothing to stop."""
        if not self.controller:
            return
        self.ending = True
        self.stage.close(interrupted=interrupted)
        if self.server is not None:
            self.server.close()
            self.server = None


def controller_state(
    options: setup.Options,
    marks: tuple[str, ...],
    *,
    out: str,
    resumed: str,
    keep: bool,
    attach: bool,
    say: Callable[[str], None],
) -> State:
    """Read all files, create the run folder, build the stage. Raises ConfigError; no host is touched."""
    plans = setup.make_plans(options, marks)
    setup.checked_weights(options)
    root = Path(out).absolute() if out else default_root()
    holds, replay = _resumed(resumed, root, plans, say) if resumed else ((), None)
    run = _begun(root, options, plans, replay)
    recipe = next(iter(plans.values())).recipe

    def masked_say(text: str) -> None:
        say(run.masked(text))

    left = _left(replay, root, plans)
    sums = root / "weights.json" if setup.checked_weights(options) == "sha256" else None
    how = StageOptions(keep, attach, os.environ.get("DSPARK_API_KEY", ""), left, sums)
    stage: Any = ForeignStage(plans) if options.endpoint else _stage(plans, run, root, how, masked_say)
    holds = (*holds, run.hold())
    return State(options, plans, recipe, run, stage, masked_say, controller=True, replay=replay, holds=holds)


def _begun(root: Path, options: setup.Options, plans: Mapping[str, Plan], replay: Replay | None) -> RunFolder:
    """The run folder with its inputs, and the run's line in the ledger. Raises USAGE if that cannot be written."""
    about = _about(options, plans, replay)
    run = new_run(root, secrets_known=_secrets(plans), about=about)
    try:
        inputs.keep(run, plans)
        fingerprints = {mark: plan.fingerprint for mark, plan in plans.items()}
        number = ledger.began(root, run.run_id, fingerprints, rehearsal=about["rehearsal"])
        run.write("run.json", {**run.about(), "ledger": {"began": number}})
    except OSError as error:
        raise ConfigError("USAGE", f"--dspark-out {root}: {error}") from error
    return run


def _about(options: setup.Options, plans: Mapping[str, Plan], replay: Replay | None) -> dict[str, Any]:
    """What run.json says from the first second, so that a run that was killed can be resumed."""
    return {
        "rehearsal": next(iter(plans.values())).recipe.rehearsal,
        "endpoint": bool(options.endpoint),
        "challenge": options.challenge or None,
        "resumed": replay.run_id if replay else None,
        "profiles": {
            mark: {"profile": plan.profile.name, "recipe": plan.recipe.name, "fingerprint": plan.fingerprint}
            for mark, plan in plans.items()
        },
    }


def _resumed(
    name: str, root: Path, plans: Mapping[str, Plan], say: Callable[[str], None]
) -> tuple[tuple[int, ...], Replay]:
    """The run to resume, taken away from everybody else and read. Raises RESUME_REFUSED."""
    path = resume.run_path(name, root)
    rehearsal = next(iter(plans.values())).recipe.rehearsal
    fingerprints = {mark: plan.fingerprint for mark, plan in plans.items()}
    resume.check_same(resume.about(path), fingerprints, rehearsal=rehearsal)
    handle = resume.take(path, say=say)
    return (handle,), resume.read(path)


def _left(replay: Replay | None, root: Path, plans: Mapping[str, Plan]) -> Mapping[str, resume.Left]:
    """Engines that the resumed run may have left up. Only under the same evidence root is it known who uses them."""
    if replay is None or replay.path.resolve().parent.parent != root.resolve():
        return {}
    return resume.left(replay.path, {mark: plan.fingerprint for mark, plan in plans.items()})


def _secrets(plans: Mapping[str, Plan]) -> tuple[str, ...]:
    api_key = os.environ.get("DSPARK_API_KEY", "")
    pairs = (pair for made in plans.values() for spec in made.specs for pair in spec.env)
    return tuple(dict.fromkeys(secret_values([*pairs, ("DSPARK_API_KEY", api_key)])))


def _stage(
    plans: Mapping[str, Plan], run: RunFolder, root: Path, how: StageOptions, say: Callable[[str], None]
) -> Stage:
    def opened(entry: HostEntry, plan: Plan) -> Host:
        return open_host(entry, cluster=plan.cluster.name, state=root / "hosts")

    return Stage(
        plans,
        run,
        how,
        open_host=opened,
        say=say,
        kept_store=KeptStore(root / "kept"),
    )


def worker_state(given: Mapping[str, str], options: setup.Options) -> State:
    """The state of an xdist worker, from what the controller sent."""
    plans = setup.make_plans(options, given["marks"].split(","))
    stage = RemoteStage(Address(given["path"], given["key"]))
    run = RunFolder(Path(given["run"]), given["run_id"], _secrets(plans))
    recipe = next(iter(plans.values())).recipe
    replay = resume.read(Path(given["resumed"])) if given["resumed"] else None

    def silent(text: str) -> None:
        """The controller alone speaks."""

    return State(options, plans, recipe, run, stage, silent, controller=False, replay=replay, holds=(run.hold(),))


class ForeignStage:
    """The stage of `--dspark-endpoint`: a server that somebody else runs. Nothing is launched, proven or stopped."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = plans
        self.cases: dict[str, tuple[str, str]] = {}
        self.suites: tuple[str, ...] = ()
        self._known: set[str] = set()

    def expect(self, cases: Sequence[tuple[str, str, str]], suites: Sequence[str] = ()) -> None:
        self.suites = tuple(suites)
        self.cases = {nodeid: (mark, check) for nodeid, mark, check in cases}

    def done(self, nodeid: str) -> None:
        """Nothing to switch."""

    def abandon(self) -> None:
        """Nobody waits."""

    def cancel(self) -> None:
        """Nothing to stop."""

    def close(self, *, interrupted: bool) -> None:
        """Nothing to stop."""

    def acquire(self, mark: str, *, patient: bool = False) -> dict[str, Any]:
        """Where the server is, if it serves the model that is asked for. Raises what the request raised, or IDENTITY_MISMATCH."""
        plan, api_key = self._plans[mark], os.environ.get("DSPARK_API_KEY", "")
        if mark not in self._known:
            ids = [card.id for card in Endpoint(plan.base_url, plan.served_model, api_key=api_key).models()]
            if plan.served_model not in ids:
                served = ", ".join(ids) or "nothing"
                text = f"{plan.base_url} serves {served}, expected {plan.served_model} (--dspark-model names another)"
                raise DsparkError("IDENTITY_MISMATCH", text)
            self._known.add(mark)
        return {"base_url": plan.base_url, "model": plan.served_model, "api_key": api_key}

    def enter(self, mark: str, exclusive: bool) -> None:
        """Nobody can say who else asks it."""

    def leave(self, exclusive: bool) -> None:
        """Nothing was held."""

    def alive(self, mark: str) -> None:
        """Nobody watches it."""

    def diagnose(self, mark: str) -> DsparkError | None:
        return None

    def readings(self, mark: str) -> dict[str, dict[str, Any]]:
        return {"endpoint": Readings(None, None, unreadable=("nobody knows the host of --dspark-endpoint",)).as_json()}

    def launch_finding(self, mark: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def gate_finding(self, mark: str, requirement: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def teardown_finding(self, mark: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def summary(self) -> dict[str, Any]:
        return {
            mark: {
                "profile": plan.profile.name,
                "recipe": plan.recipe.name,
                "fingerprint": plan.fingerprint,
                "launched": False,
                "proven": False,
                "unpublishable": list(plan.settings.unpublishable),
            }
            for mark, plan in self._plans.items()
        }


def _nothing(mark: str) -> DsparkError:
    return DsparkError("NOT_IMPLEMENTED", f"{mark}: nothing is launched or proven with --dspark-endpoint")
