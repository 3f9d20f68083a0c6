"""What may reach a shell, and what shows in a process list."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from pytest_dspark.errors import HostError
from pytest_dspark.hosts.ssh_config import parse_address

PACKAGE = Path(__file__).parents[1] / "pytest_dspark"
MODULES = sorted(PACKAGE.rglob("*.py"))
SHELLS = {
    "system",
    "popen",
    "getoutput",
    "getstatusoutput",
    "create_subprocess_shell",
    "spawnl",
    "spawnlp",
    "execl",
    "execlp",
}


def calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""), node


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_string_is_given_to_a_shell(path):
    for name, node in calls(path):
        owner = getattr(getattr(node.func, "value", None), "id", "")
        assert not (name in SHELLS and owner in ("os", "subprocess", "asyncio", "commands")), f"{path}:{node.lineno}"
        shell = [word for word in node.keywords if word.arg == "shell"]
        assert not any(not isinstance(word.value, ast.Constant) or word.value.value for word in shell), (
            f"{path}:{node.lineno}"
        )
        assert not (name in ("eval", "exec") and isinstance(node.func, ast.Name)), f"{path}:{node.lineno}: {name}"
        assert not (owner in ("pickle", "marshal", "yaml") and name in ("load", "loads")), f"{path}:{node.lineno}"


def test_the_one_command_line_of_ssh_is_joined_by_shlex():
    """exec_command gives one string to the login shell of the other host."""
    found = [(path.name, node) for path in MODULES for name, node in calls(path) if name == "exec_command"]
    assert [name for name, _ in found] == ["ssh.py"]
    argument = found[0][1].args[0]
    assert ast.unparse(argument).startswith("shlex.join(["), ast.unparse(argument)


def test_a_script_for_sh_never_holds_data():
    """After `sh -c` stands a constant; data travel as its arguments."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.List, ast.Tuple)):
                words = node.elts
                for first, second, third in zip(words, words[1:], words[2:], strict=False):
                    if (
                        isinstance(first, ast.Constant)
                        and first.value in ("sh", "bash")
                        and isinstance(second, ast.Constant)
                        and second.value == "-c"
                    ):
                        constant = isinstance(third, ast.Constant) or (
                            isinstance(third, ast.Name) and third.id.isupper()
                        )
                        assert constant, f"{path}:{third.lineno}: {ast.unparse(third)}"


@pytest.mark.parametrize(
    "hostile", ["; rm -rf /", "$(id)", "`id`", "a\nb", "'", '"', "-o ProxyCommand=x", "\0"[:0] + "é"]
)
def test_hostile_words_come_through_as_they_are(hostile):
    from pytest_dspark.hosts.ssh import MARKED

    line = shlex.join(["sh", "-c", MARKED, "sh", "mark", "echo", hostile])
    assert shlex.split(line)[-1] == hostile
    assert re.fullmatch(r"[ -~\n]*", MARKED), "the script itself is constant"


def test_an_interface_name_that_is_a_path_is_never_read():
    from pytest_dspark.watcher import _INTERFACE

    assert not any(_INTERFACE.fullmatch(name) for name in ("../x", "a/b", "", "a b", "x" * 16, "$(id)"))
    assert all(_INTERFACE.fullmatch(name) for name in ("enp1s0f0np0", "eth0.100", "gbh", "ib0"))


def test_no_secret_of_ours_is_in_an_argv_or_a_label():
    """The API key travels in a header and the environment of pytest alone; ranks get what the recipe says."""
    from pytest_dspark.launch import labelled
    from pytest_dspark.sanitize import is_secret_key
    from pytest_dspark.specimen import planned

    for spec in planned().specs:
        marked = labelled(spec, "run", "fp", "boot/1/2/3")
        assert not [key for key, _ in marked.env if is_secret_key(key)]
        assert not [key for key, _ in marked.labels if is_secret_key(key)]
        assert not any("api-key" in word for word in marked.argv)


@pytest.mark.parametrize("url", ["ssh://u:Plant@h", "ssh://u@h:0", "ssh://-oProxyCommand=x", "ssh://u@%2doX"])
def test_an_ssh_address_with_more_or_less_than_an_address_is_refused_and_tells_no_password(url):
    with pytest.raises(HostError) as caught:
        parse_address("spark-2", url)
    assert caught.value.code == "CLUSTER_INVALID" and "Plant" not in caught.value.message
