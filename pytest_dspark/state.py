"""What one pytest process knows of its session: one object in `config.stash`, and nothing anywhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_dspark import setup
from pytest_dspark.cluster import Host, HostEntry
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Case, RunFolder, default_root, new_run
from pytest_dspark.hosts import open_host
from pytest_dspark.kept import KeptStore
from pytest_dspark.plan import Plan
from pytest_dspark.recipe import Recipe
from pytest_dspark.remote import Address, RemoteStage, StageServer
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
    ending: bool = False

    def settings(self, case: Case) -> dict[str, Any]:
        """What the recipe says for the lane of a check, and the profile's knobs under `knobs`."""
        knobs = dict(self.plans[case.profile].settings.values)
        return {**self.recipe.checks.get(case.lane, {}), "knobs": knobs}

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
    options: setup.Options, marks: tuple[str, ...], *, out: str, keep: bool, attach: bool, say: Callable[[str], None]
) -> State:
    """Read all files, create the run folder, build the stage. Raises ConfigError; no host is touched."""
    plans = setup.make_plans(options, marks)
    setup.checked_weights(options)
    root = Path(out).absolute() if out else default_root()
    run = new_run(root, secrets_known=_secrets(plans))
    recipe = next(iter(plans.values())).recipe

    def masked_say(text: str) -> None:
        say(run.masked(text))

    stage: Any = (
        ForeignStage(plans)
        if options.endpoint
        else _stage(plans, run, root, _stage_options(options, root, keep, attach), masked_say)
    )
    return State(options, plans, recipe, run, stage, masked_say, controller=True)


def _secrets(plans: Mapping[str, Plan]) -> tuple[str, ...]:
    api_key = os.environ.get("DSPARK_API_KEY", "")
    pairs = (pair for made in plans.values() for spec in made.specs for pair in spec.env)
    return tuple(dict.fromkeys(secret_values([*pairs, ("DSPARK_API_KEY", api_key)])))


def _stage_options(options: setup.Options, root: Path, keep: bool, attach: bool) -> StageOptions:
    hashing = setup.checked_weights(options) == "sha256"
    api_key = os.environ.get("DSPARK_API_KEY", "")
    return StageOptions(keep, attach, api_key, root / "weights.json" if hashing else None)


def _stage(
    plans: Mapping[str, Plan], run: RunFolder, root: Path, options: StageOptions, say: Callable[[str], None]
) -> Stage:
    def opened(entry: HostEntry, plan: Plan) -> Host:
        return open_host(entry, cluster=plan.cluster.name, state=root / "hosts")

    return Stage(
        plans,
        run,
        options,
        open_host=opened,
        say=say,
        kept_store=KeptStore(root / "kept"),
    )


def worker_state(given: Mapping[str, str], options: setup.Options) -> State:
    """The state of an xdist worker, from what the controller sent."""
    plans = setup.make_plans(options, given["marks"].split(","))
    stage = RemoteStage(Address(given["path"], given["key"]))
    run = RunFolder(Path(given["run"]), given["run_id"], _secrets(plans))
    return State(options, plans, next(iter(plans.values())).recipe, run, stage, lambda text: None, controller=False)  # noqa: ARG005


class ForeignStage:
    """The stage of `--dspark-endpoint`: a server that somebody else runs. Nothing is launched, proven or stopped."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = plans
        self.cases: dict[str, tuple[str, str]] = {}
        self._known: set[str] = set()

    def expect(self, cases: Sequence[tuple[str, str, str]]) -> None:
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

    def launch_finding(self, mark: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def gate_finding(self, mark: str, requirement: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def teardown_finding(self, mark: str, *, patient: bool = False) -> Finding:
        raise _nothing(mark)

    def summary(self) -> dict[str, Any]:
        return {
            mark: {"profile": plan.profile.name, "fingerprint": plan.fingerprint, "launched": False, "proven": False}
            for mark, plan in self._plans.items()
        }


def _nothing(mark: str) -> DsparkError:
    return DsparkError("NOT_IMPLEMENTED", f"{mark}: nothing is launched or proven with --dspark-endpoint")
