"""The one-way flow: who may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_dspark"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "rehearsal" not in path.parts)
HOSTS = {path.name for path in (PACKAGE / "hosts").glob("*.py")} - {"__init__.py", "process.py"}
ALLOWED = {
    "pytest": {"plugin.py", "recorder.py"},
    "_pytest": {"plugin.py"},
    "xdist": {"plugin.py"},
    "requests": {"endpoint.py"} | HOSTS,
    "urllib3": {"endpoint.py", "wire.py", "streams.py"} | HOSTS,
    "docker": HOSTS,
    "paramiko": HOSTS,
    "tiktoken": {"tokens.py"},
    "prometheus_client": {"metrics.py"},
    "bfcl_eval": {"bfcl_driver.py"},
    "matplotlib": {"figures.py"},
}
STDLIB_ALONE = (
    "acceptance.py",
    "changes.py",
    "verdict.py",
    "junit.py",
    "errors.py",
    "selection.py",
    "evidence.py",
    "strictjson.py",
    "audit.py",
    "composition.py",
    "ledger.py",
    "option2.py",
    "pack.py",
    "packfile.py",
    "packs_cli.py",
    "page.py",
    "projection.py",
    "provenance.py",
    "publish.py",
    "rejudging.py",
    "signing.py",
    "statement.py",
    "tables.py",
    "verify.py",
    "garble.py",
    "proportion.py",
    *("closing.py", "compare.py", "comparing.py", "differing.py", "headlines.py", "r0b0bench.py", "report.py"),
    *("show_cli.py", "shown.py", "since.py", "summary.py", "web.py", "welch.py"),
)


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_are_imported_where_they_belong(path):
    tops = {name.partition(".")[0] for name in imports(path)}
    for library, where in ALLOWED.items():
        assert library not in tops or path.name in where, f"{path.name} imports {library}"


@pytest.mark.parametrize("name", STDLIB_ALONE)
def test_what_a_stranger_needs_is_standard_library_alone(name):
    tops = {name.partition(".")[0] for name in imports(PACKAGE / name)}
    assert tops <= set(sys.stdlib_module_names) | {"pytest_dspark"}


def test_the_driver_of_bfcl_runs_where_nothing_of_ours_is_installed():
    tops = {name.partition(".")[0] for name in imports(PACKAGE / "bfcl_driver.py")}
    assert tops <= set(sys.stdlib_module_names) | {"bfcl_eval"}


def test_hosts_are_imported_lazily():
    """A machine without docker and paramiko can run process hosts."""
    package = imports(PACKAGE / "hosts" / "__init__.py", top_only=True)
    assert not {
        name
        for name in package
        if name.startswith(("docker", "paramiko", "pytest_dspark.hosts.docker", "pytest_dspark.hosts.ssh"))
    }
    assert not {name.partition(".")[0] for name in imports(PACKAGE / "hosts" / "process.py")} & {"docker", "paramiko"}


def test_checks_know_no_hosts_and_hosts_know_no_endpoint():
    for path in (PACKAGE / "checks").glob("*.py"):
        assert not any("hosts" in name or name.endswith(".launch") for name in imports(path)), path
    for path in (PACKAGE / "hosts").glob("*.py"):
        assert not any(name.startswith(("pytest_dspark.endpoint", "pytest_dspark.checks")) for name in imports(path)), (
            path
        )


def test_the_rehearsal_is_independent():
    for path in (PACKAGE / "rehearsal").glob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert "pytest_dspark" not in tops, path
    for path in MODULES:
        assert not any(name.startswith("pytest_dspark.rehearsal") for name in imports(path)), path


def test_no_import_cycles():
    graph = {}
    for path in MODULES:
        name = ".".join(["pytest_dspark", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        graph[name] = imports(path, top_only=True)
    known = {name: {other for other in graph if other in uses and other != name} for name, uses in graph.items()}

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for other in known[name]:
            walk(other, (*trail, name))

    for name in known:
        walk(name, ())


def test_a_comparison_needs_no_library():
    """compare and export run on a Python that has nothing but itself; the report then has tables alone."""
    code = "import sys; from pytest_dspark.cli import main; sys.exit(main(sys.argv[1:]))"
    pack = str(Path(__file__).parent / "data" / "lab-pack.tar.xz")
    for words in (["compare", pack, pack], ["export", "r0b0bench", pack], ["report", pack, "--out", "/dev/null"]):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, *words],
            env={"PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if words[0] == "compare" else 0), done.stderr
        assert "Traceback" not in done.stderr
