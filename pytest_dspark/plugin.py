"""All that pytest sees: options, marks, hooks and fixtures. Every body is short and delegates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from pytest_dspark import recorder, selection, selftesting, setup
from pytest_dspark.checks import resolve
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import Case
from pytest_dspark.live import Live
from pytest_dspark.plan import as_json, as_shell
from pytest_dspark.recipe import LANES
from pytest_dspark.runner import held, run_check
from pytest_dspark.state import State, controller_state, worker_state
from pytest_dspark.verdict import Status, Verdict

SUMMARY = "GITHUB_STEP_SUMMARY"
STATE = pytest.StashKey[State]()
RECORDER = pytest.StashKey[recorder.Recorder]()
ARMED = pytest.StashKey[bool]()
POSTPONED = pytest.StashKey[Any]()
ROW_WRITTEN = pytest.StashKey[bool]()

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "cluster",
        {
            "metavar": "FILE|rehearsal",
            "help": "where the ranks live: a cluster.toml, or two emulated ranks on this machine",
        },
    ),
    (
        "recipe",
        {
            "metavar": "NAME|FILE",
            "help": "what is true of the engine build (default: the cluster file's, else dspark-sm121)",
        },
    ),
    ("profile", {"metavar": "NAME|FILE", "help": "serve this profile under the one selected profile mark; recorded"}),
    (
        "out",
        {
            "metavar": "DIR",
            "help": "where runs are kept, outside every git work tree (default: the user's data folder)",
        },
    ),
    (
        "endpoint",
        {"metavar": "URL", "help": "ask this running OpenAI-compatible server; nothing is launched, never publishable"},
    ),
    (
        "weights",
        {
            "metavar": "HOW",
            "help": "sizes (default): names and sizes of the weights; sha256: every byte of them, on every host",
        },
    ),
    (
        "resume",
        {
            "metavar": "RUN",
            "help": "id or folder of an earlier run: what it finished is judged again, only the rest is measured",
        },
    ),
    (
        "data",
        {
            "metavar": "DIR",
            "help": "where published question sets lie (`dspark data`; default: the user's data folder)",
        },
    ),
    (
        "bfcl",
        {
            "metavar": "PYTHON",
            "help": "the python of an environment with bfcl-eval (`dspark data bfcl` says how to make one)",
        },
    ),
    ("r0b0bench", {"metavar": "COMMAND", "help": "the r0b0bench command (default: r0b0bench, if it is on the PATH)"}),
    (
        "challenge",
        {
            "metavar": "TEXT",
            "help": "make needles, haystacks and sums from this text, which a verifier chose or which was public at a known time",
        },
    ),
    ("model", {"metavar": "ID", "help": "model id to ask for with --dspark-endpoint (default: the profile's)"}),
)
_FLAGS: tuple[tuple[str, str], ...] = (
    ("plan", "print what would be launched, as JSON and as shell commands, and launch nothing"),
    ("keep", "leave the engine up at the end; a later session proves it again and reuses it"),
    ("attach", "use the engine that is already up; never start or stop one"),
    ("summary", "add a Markdown summary to the file that GITHUB_STEP_SUMMARY names"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dspark", "serving acceptance over a small cluster (pytest-dspark)")
    for name, settings in _OPTIONS:
        group.addoption(f"--dspark-{name}", dest=f"dspark_{name}", default=None, **settings)
        parser.addini(f"dspark_{name}", f"default of --dspark-{name}", default="")
    for name, text in _FLAGS:
        group.addoption(f"--dspark-{name}", dest=f"dspark_{name}", action="store_true", help=text)


_MARKS = (
    "profiles(*marks): the profiles that a check runs on; each gives a case of its own",
    "check(id): the check that the case measures and judges",
    "long1m: the profile with the largest window (capacity, needle in a haystack)",
    "production: the profile that serves",
    "breakable_ab: the breakable-graphs profile, for A/B comparison alone",
    "gate: launch, proof of what runs, teardown",
    "correctness: right answers, alone and under load",
    "concurrency: several requests at once",
    "performance: latency and throughput",
    "dataset: published question sets",
    "niah: needle in a haystack",
)


def option(config: pytest.Config, name: str) -> str:
    """An option: the command line beats the ini file."""
    return config.getoption(f"dspark_{name}") or config.getini(f"dspark_{name}") or ""


def options(config: pytest.Config) -> setup.Options:
    names = ("cluster", "recipe", "profile", "endpoint", "model", "weights", "data", "bfcl", "r0b0bench", "challenge")
    return setup.Options(root=config.rootpath, **{name: option(config, name) for name in names})


def wanted_marks(config: pytest.Config) -> tuple[str, ...]:
    """The profiles that -m or node ids ask for, in launch order."""
    expression = config.getoption("markexpr") or ""
    if not expression:
        return selection.wanted_by_ids(config.args)
    compiled = Expression.compile(expression)

    def matches(names: frozenset[str]) -> bool:
        return compiled.evaluate(lambda name, /, **_: name in names)

    return selection.wanted(matches)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return _print_plan(config) if config.getoption("dspark_plan") else None


def _print_plan(config: pytest.Config) -> int:
    made = _usage(lambda: setup.make_plans(options(config), wanted_marks(config) or _recipe_marks(config)))
    print(json.dumps([as_json(one) for one in made.values()], indent=1))
    for one in made.values():
        print(f"\n# {one.mark}: {one.profile.name}, in this order\n{as_shell(one)}")
    return 0


def _recipe_marks(config: pytest.Config) -> tuple[str, ...]:
    if not option(config, "cluster"):
        raise pytest.UsageError(setup.no_cluster(()))
    recipe = setup.read_recipe(options(config), setup.read_cluster(options(config)))
    return tuple(mark for mark in selection.PROFILE_MARKS if recipe.profile_of(mark))


def _usage(action: Callable[[], Any]) -> Any:
    """Configuration that cannot be used is pytest's usage error, exit code 4."""
    try:
        return action()
    except ConfigError as error:
        raise pytest.UsageError(f"{error}\n({error.remedy})") from error


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKS:
        config.addinivalue_line("markers", line)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        if worker.get("dspark"):
            config.stash[STATE] = worker_state(worker["dspark"], options(config))
            config.stash[STATE].live = _live(config)
    elif wanted_marks(config) and not config.getoption("collectonly"):
        _configure_controller(config)


def _summary(config: pytest.Config) -> Path | None:
    """Where the step summary goes, if one is wanted."""
    if not _flag(config, "summary"):
        return None
    if not os.environ.get(SUMMARY):
        raise pytest.UsageError(f"--dspark-summary: {SUMMARY} is not set, expected the name of a file")
    return Path(os.environ[SUMMARY])


def _configure_controller(config: pytest.Config) -> None:
    marks, given = wanted_marks(config), options(config)
    summary = _summary(config)
    _refuse_modes(config, given, marks)
    live = _live(config)
    state = _usage(
        lambda: controller_state(
            given,
            marks,
            out=option(config, "out"),
            resumed=option(config, "resume"),
            keep=_flag(config, "keep"),
            attach=_flag(config, "attach"),
            say=live.line,
        )
    )
    # A rehearsal publishes nothing that is worth verifying; `dspark selftest` and an acceptance show packs too.
    unshown = ("verifier",) if state.recipe.rehearsal else ()
    state.selftest = _usage(lambda: selftesting.require(without=unshown))
    state.narrowed, state.live = _narrowed(config), live
    config.stash[STATE] = state
    config.stash[RECORDER] = recorder.Recorder(state, raw_junit=_junit_path(config, state), summary=summary)
    config.pluginmanager.register(config.stash[RECORDER], "dspark-recorder")
    _install_signals(config, state)
    if getattr(config.option, "maxworkerrestart", None) is None:
        config.option.maxworkerrestart = "0"  # a crashed worker is an ERROR of the run, not something to try again


def _narrowed(config: pytest.Config) -> bool:
    """Whether less than the whole profile was asked for: -k, node ids, single files, --lf, --deselect, a lane in -m."""
    words = set((config.getoption("markexpr") or "").replace("(", " ").replace(")", " ").split())
    lanes = words - {"or", *selection.PROFILE_MARKS}
    single = any("::" in arg or arg.endswith(".py") for arg in config.args)
    options = ("keyword", "lf", "failedfirst", "deselect", "stepwise")
    return bool(lanes) or single or any(config.getoption(name, None) for name in options)


def _flag(config: pytest.Config, name: str) -> bool:
    return bool(config.getoption(f"dspark_{name}"))


def _refuse_modes(config: pytest.Config, given: setup.Options, marks: tuple[str, ...]) -> None:
    if not (given.cluster or given.endpoint):
        raise pytest.UsageError(setup.no_cluster(marks))
    if given.cluster and given.endpoint:
        raise pytest.UsageError(
            "--dspark-cluster and --dspark-endpoint exclude each other: one launches, the other does not"
        )
    if option(config, "resume") and given.endpoint:
        raise pytest.UsageError(
            "--dspark-resume and --dspark-endpoint exclude each other: nothing proves that the same engine answers"
        )
    if _flag(config, "keep") and _flag(config, "attach"):
        raise pytest.UsageError(
            "--dspark-keep and --dspark-attach exclude each other: an attached engine is never stopped"
        )
    if config.getoption("dist", "no") not in ("no", "load"):
        raise pytest.UsageError(
            f"--dist {config.getoption('dist')}: profiles take turns on one engine, which needs --dist load (what -n gives)"
        )
    for name, package in (("timeout", "pytest-timeout"), ("junitxml", "pytest's junitxml")):
        if not config.pluginmanager.hasplugin(name):
            raise pytest.UsageError(f"-p no:{name}: the acceptance needs {package}")
    method = config.getoption("timeout_method", None) or config.getini("timeout_method")
    if method == "thread":
        raise pytest.UsageError(
            "timeout method thread kills pytest without teardown and report; use --timeout-method=signal"
        )
    _refuse_junit_path(config)


def _junit_path(config: pytest.Config, state: State) -> Path:
    """pytest's own report goes into the run folder unless a place was given."""
    if not config.option.xmlpath:
        config.option.xmlpath = str(state.run.path / "junit.xml")
    return Path(config.option.xmlpath)


def _refuse_junit_path(config: pytest.Config) -> None:
    """A report that cannot be written, or not be published, is known now and not after hours."""
    if config.getini("junit_duration_report") != "total":
        raise pytest.UsageError(
            "junit_duration_report = call: the report must say what a whole case took, expected total"
        )
    if not config.option.xmlpath:
        return
    path = Path(os.path.expandvars(config.option.xmlpath)).expanduser()  # as pytest does
    config.option.xmlpath = str(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise pytest.UsageError(f"--junitxml {path}: {error}") from error
    if not path.is_file():
        raise pytest.UsageError(f"--junitxml {path}: expected a file that can be read again")


def _live(config: pytest.Config) -> Live:
    """Progress on the real stderr, through pytest's capture; silent with -q."""
    quiet = config.getoption("verbose", 0) < 0
    return Live(None if quiet else os.fdopen(os.dup(2), "w", buffering=1, errors="replace"))


def _install_signals(config: pytest.Config, state: State) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        if state.interrupt(signal.Signals(number).name):
            raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        config.add_cleanup(partial(_restore, number, signal.signal(number, handler)))


def _restore(number: int, old: Any) -> None:
    signal.signal(number, old)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    state = node.config.stash.get(STATE, None)
    if state is not None:
        node.workerinput["dspark"] = state.for_worker()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers are told that nothing more comes as soon as it is so: a case that waits for its turn must not hold up the
    last cases of other workers, which run only when they have a successor or the end."""
    if config.stash.get(STATE, None) is None:
        return None
    from xdist.scheduler import LoadScheduling

    class TurnScheduling(LoadScheduling):  # type: ignore[misc]
        @property
        def tests_finished(self) -> bool:
            return bool(self.collection_is_completed and not self.pending)

    return TurnScheduling(config, log)


def pytest_report_header(config: pytest.Config) -> list[str]:
    state = config.stash.get(STATE, None)
    if state is None:
        return []
    sources = [
        f"{name}={option(config, name)} ({'option' if config.getoption(f'dspark_{name}') else 'ini'})"
        for name, _ in _OPTIONS
        if option(config, name)
    ]
    resumed = [f"dspark: resumes run {state.replay.run_id}"] if state.replay else []
    lines = [f"{mark}={made.profile.name} fingerprint {made.fingerprint}" for mark, made in state.plans.items()]
    return [
        f"dspark: run {state.run.run_id}, recipe {state.recipe.name}, {', '.join(sources)}",
        f"dspark: {', '.join(lines)}",
        *resumed,
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("profiles")
    if mark and "dspark_profile" in metafunc.fixturenames:
        cases = [
            pytest.param(name, marks=getattr(pytest.mark, name))
            for name in selection.PROFILE_MARKS
            if name in mark.args
        ]
        metafunc.parametrize("dspark_profile", cases, scope="session")


def profile_of(item: pytest.Item) -> str:
    """The profile of a case, empty for cases that need no engine."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("dspark_profile", "")) if callspec else ""


def check_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("check")
    return str(mark.args[0]).format(**item.callspec.params) if mark and hasattr(item, "callspec") else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = wanted_marks(config)
    gone = [item for item in items if profile_of(item) and profile_of(item) not in marks]
    if gone:
        config.hook.pytest_deselected(items=gone)
    items[:] = _in_turn([item for item in items if item not in set(gone)])


def _in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of no profile first, then profile by profile, the teardown last: one engine is up at a time."""
    plain = [item for item in items if not profile_of(item)]
    ours = [item for item in items if profile_of(item)]
    return plain + sorted(ours, key=lambda item: selection.order(profile_of(item), check_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """The order stands only now: --ff, --nf and plugins that wrap the hook above sort after it."""
    session.items[:] = _in_turn(session.items)
    state = session.config.stash.get(STATE, None)
    if state is not None and not session.config.getoption("collectonly"):
        ours = [item for item in session.items if profile_of(item)]
        cases = [(item.nodeid, profile_of(item), check_of(item)) for item in ours]
        state.stage.expect(cases, list(dict.fromkeys(str(item.path) for item in ours)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    state = item.config.stash.get(STATE, None)
    if state is not None and check_of(item):
        case = _case(item, state)
        item.user_properties += [
            ("dspark_case", f"{case.profile}/{case.check}"),
            ("dspark_run", case.run),
            ("dspark_measured_in", state.measured_in(case)),
            ("dspark_profile", case.profile),
            ("dspark_recipe", case.recipe),
            ("dspark_fingerprint", case.fingerprint),
        ]


def _case(item: pytest.Item, state: State) -> Case:
    return state.case(item.nodeid, profile_of(item), check_of(item))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """The backstop's clock starts when the engine is held, not while it is being launched."""
    if not check_of(item) or item.stash.get(ARMED, False):
        return None
    item.stash[POSTPONED] = settings
    return True


def _arm_timeout(item: pytest.Item) -> None:
    settings = item.stash.get(POSTPONED, None)
    if settings is not None:
        item.stash[ARMED] = True
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    state = item.config.stash.get(STATE, None)
    if state is not None and check_of(item) and not item.stash.get(ROW_WRITTEN, False) and not report.passed:
        item.stash[ROW_WRITTEN] = True
        recorder.write_unmeasured(state.run, _case(item, state), report, call)
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """When the raw report is finished; also if it, or another plugin's, could not be written."""
    try:
        yield
    except OSError:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        raise
    finally:
        made = session.config.stash.get(RECORDER, None)
        if made is not None:
            made.finish(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    state = config.stash.get(STATE, None)
    if state is not None:
        state.close(interrupted=state.interrupted)


# --- fixtures


@pytest.fixture(scope="session")
def dspark_profile(request: pytest.FixtureRequest) -> str:
    """The profile mark of this case: `long1m`, `production` or `breakable_ab`."""
    return str(request.param)


@pytest.fixture
def engine(request: pytest.FixtureRequest, dspark_profile: str) -> Iterator[Endpoint]:
    """The proven engine of this case's profile, as an `Endpoint` to ask.

    The engine is launched at most once per profile, before anything is asked; if it cannot be proven, the case is BLOCKED
    with the first cause. The fixture only asks for it: starting and stopping are the session's.
    """
    state = request.config.stash.get(STATE, None)
    if state is None:
        pytest.fail(setup.no_cluster((dspark_profile,)), pytrace=False)
    with held(state.stage, dspark_profile, False, partial(_arm_timeout, request.node)) as endpoint:
        yield endpoint


@pytest.fixture
def verdict(request: pytest.FixtureRequest, dspark_profile: str) -> Verdict:
    """The verdict of this case's check: measured here, judged, and written to rows.jsonl before the body runs.

    Infrastructure (ERROR, BLOCKED, CAPACITY) fails the set-up, so that JUnit shows an error and not a failure; what cannot
    run here is skipped with the reason; everything else is for the body's one assert.
    """
    node, state = request.node, request.config.stash.get(STATE, None)
    if state is None:
        pytest.fail(setup.no_cluster((profile_of(node),)), pytrace=False)
    case = _case(node, state)
    result = run_check(
        state.stage,
        state.run,
        case,
        resolve(case.check),
        {**state.settings(case.profile, case.lane), **state.here(case.profile)},
        on_engine=partial(_arm_timeout, node),
        live=state.live,
        replay=state.replay,
    )
    state.live.clear()
    node.stash[ROW_WRITTEN] = True
    if result.status in (Status.ERROR, Status.BLOCKED, Status.CAPACITY):
        pytest.fail(str(result), pytrace=False)
    if result.status is Status.NOT_IMPLEMENTED:
        pytest.skip(str(result))
    return result


assert set(LANES) <= {line.partition(":")[0] for line in _MARKS}
