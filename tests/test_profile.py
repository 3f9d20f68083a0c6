"""Profiles: each accepted line means the same to bash (and, but for JSON, to Docker's reader); all else is refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from docker.utils import parse_env_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_dspark.errors import ConfigError
from pytest_dspark.profile import Profile, load_profile

PROFILES = Path(__file__).parents[1] / "profiles"
SERVED = ["dspark-r0b0tlab-production", "dspark-r0b0tlab-1m", "dspark-r0b0tlab-breakable-ab"]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "x.env"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def bash(path: Path) -> dict[str, str]:
    """What bash exports after `set -a; source`, beyond what it exports by itself."""
    script = 'set -a; source "$1"; exec env -0'
    clean = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "--norc", "-c", script, "bash", path], env=clean, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    pairs = (entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)
    return {key: value for key, value in pairs if key not in {"PATH", "PWD", "SHLVL", "_", "OLDPWD"}}


def printed(path: Path, key: str) -> str:
    """The contract word for word: `set -a; source f; printf %s "$K"`."""
    script = f'set -a; source "{path}"; printf %s "${key}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True).stdout


def as_dict(profile: Profile) -> dict[str, str]:
    return {key: value for key, value, _ in profile.values}


def refusal(folder: Path, text: str | bytes) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert caught.value.code == "PROFILE_INVALID"
    assert caught.value.message.startswith(f"{path}")
    return caught.value.message.removeprefix(str(path))


def test_values_lines_and_sum(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, "# top\n\nA=1\n  \t\nB='{\"x\":1}'\nC="))
    assert profile.values == (("A", "1", 3), ("B", '{"x":1}', 5), ("C", "", 6))
    assert (profile.name, profile.get("A"), profile.line("B")) == ("x", "1", 5)
    assert (profile.get("Z"), profile.line("Z")) == (None, None)
    assert len(profile.sha256) == 64


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('A={"mode":0,"x":"y"}', "single quotes"),
        ("D=val # comment", "trailing comments"),
        ("export F=exp", "set -a"),
        ('G="$HOME/x"', "double quotes"),
        ("I=a b", "blanks"),
        ("A=1 ", "blanks"),
        ("A= 1", "blanks"),
        ("A =1", "blanks around the key"),
        (" A=1", "blanks around the key"),
        ("A=1\t", "blanks"),
        (" # comment", "first column"),
        ("A=#1", "comment"),
        ("A=$B", "expand"),
        ("A=x$(id)", "expand"),
        ("A=`id`", "run"),
        ("A=a\\b", "drop"),
        ("A=b\\", "drop"),
        ("A=~/x", "home"),
        ("A=x:~/y", "home"),
        ("A=*.py", "pattern"),
        ("A=a?", "pattern"),
        ("A=[x]", "pattern"),
        ("A={a,b}", "single quotes"),
        ("A=a;b", "';'"),
        ("A=a|b", "'|'"),
        ("A=a&b", "'&'"),
        ("A=(1)", "'('"),
        ("A=<x", "'<'"),
        ("A=a!b", "'!'"),
        ("A=é", "'é'"),
        ("A=a\u2028b", "character 2"),
        ("A=a\x0bb", "character 2"),
        ("A='1'", "JSON object"),
        ("A='[1]'", "JSON object"),
        ("A=''", "JSON object"),
        ("A='", "closing quote"),
        ("A='{}' ", "closing quote"),
        ("A='{}' # x", "closing quote"),
        ("A='{}''{}'", "closing quote"),
        ("A='{\"a\":1}x'", "Extra data"),
        ('A=\'{"a":1,"a":2}\'', "twice"),
        ('A=\'{"b":{"a":1,"a":2}}\'', "twice"),
        ("A='{\"a\":NaN}'", "NaN"),
        ("A='{\"a\":-Infinity}'", "Infinity"),
        ("A='{\"a\":1e999}'", "range"),
        ('A=\'{"a":"\\ud800"}\'', "surrogate"),
        ('A=\'{"a":"\\\\n"}\'', "u005c"),
        ('A=\'{"a":"${HOME}"}\'', "u0024"),
        ("A='{\"a\":\t1}'", "control"),
        ("A='{a:1}'", "JSON object"),
        ("A='" + '{"a":' * 20000 + "'", "nested"),
        ('A=\'{"a":' + "1" * 5000 + "}'", "JSON object"),
        ("oops", "no '='"),
        ("=1", "a name"),
        ("1A=1", "a name"),
        ("A-B=1", "a name"),
        ("A+=1", "a name"),
        ("A[0]=1", "a name"),
        ("Ä=1", "a name"),
        ("UID=1", "bash keeps"),
        ("RANDOM=1", "bash keeps"),
        ("PATH=/x", "bash keeps"),
        ("BASH_ENV=/x", "bash keeps"),
        ("LC_ALL=C", "bash keeps"),
    ],
)
def test_a_line_without_one_meaning_is_refused(tmp_path: Path, line: str, why: str) -> None:
    message = refusal(tmp_path, f"# top\nOK=1\n{line}\n")
    assert message.startswith(":3: expected ")
    assert why in message


@pytest.mark.parametrize(
    ("raw", "line", "why"),
    [
        (b"\xef\xbb\xbfA=1\n", 1, "byte order mark"),
        (b"A=1\nB=2\r\n", 2, "carriage return"),
        (b"# x\r\nA=1\n", 1, "carriage return"),
        (b"A=1\nB=\x00\n", 2, "NUL"),
        (b"A=1\n\nB=\xff\n", 3, "0xff"),
        (b"A=1\nB=2\nA=1\n", 3, "first on line 1"),
        (b"\xff\xfeA\x00=\x001\x00", 1, "0xff"),
    ],
)
def test_bytes_that_are_no_plain_text(tmp_path: Path, raw: bytes, line: int, why: str) -> None:
    message = refusal(tmp_path, raw)
    assert message.startswith(f":{line}: expected ")
    assert why in message


@pytest.mark.parametrize("text", ["", "# only\n", "\n\n"])
def test_a_profile_that_says_nothing(tmp_path: Path, text: str) -> None:
    assert "found none" in refusal(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.env", tmp_path):
        with pytest.raises(ConfigError, match="readable file"):
            load_profile(path)


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN=hf_planted secret",
        "HF_TOKEN='hf_planted'",
        "export HF_TOKEN=hf_planted",
        " HF_TOKEN=hf_planted",
        "HF_TOKEN =hf_planted$",
    ],
)
def test_a_refused_value_is_not_repeated(tmp_path: Path, line: str) -> None:
    assert "hf_planted" not in refusal(tmp_path, line)


def test_every_name_of_bash_is_refused(tmp_path: Path) -> None:
    names = subprocess.run(
        ["bash", "--norc", "-c", "compgen -v"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "RANDOM" in names.stdout
    for name in names.stdout.split():
        assert "bash keeps" in refusal(tmp_path, f"{name}=1\n")


ALPHABET = "abcXYZ019_./:@%+,=^-#~$`\\\"'*?[]{}()<>|&;! \té\u2028"
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet="ab é$`'\\\"#~*\n", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(alphabet="ab $", max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
QUOTED = st.dictionaries(st.text(alphabet="abc_", max_size=4), JSON_VALUES, max_size=3).map(
    lambda o: f"'{json.dumps(o, ensure_ascii=False)}'"
)
VALUES = st.text(alphabet=ALPHABET, max_size=8) | st.from_regex(r"[a-z0-9_./:@%+,=^#-]{0,10}", fullmatch=True) | QUOTED


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=6))
@example(
    [
        ("A", "a=b"),
        ("B", "a#b"),
        ("C", "=x"),
        ("D", "-n"),
        ("E", "x,y:z@w%2+^"),
        ("F", '\'{"a":"$HOME `id` # \\u005c"}\''),
    ]
)
def test_accepted_means_what_bash_means(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    """Each line alone is accepted or refused; the accepted ones together are compared with bash and Docker."""
    accepted = {}
    for key, value in pairs:
        try:
            accepted[key] = load_profile(write(tmp_path, f"{key}={value}")).get(key), value
        except ConfigError:
            continue
    if not accepted:
        return
    path = write(tmp_path, "".join(f"{key}={raw}\n" for key, (_, raw) in accepted.items()))
    profile = as_dict(load_profile(path))
    assert profile == {key: meaning for key, (meaning, _) in accepted.items()} == bash(path)
    docker = parse_env_file(path)
    for key, (meaning, raw) in accepted.items():
        assert docker[key] == (f"'{meaning}'" if raw.startswith("'") else meaning)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(alphabet=ALPHABET + "\n\r\0", max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    path = write(tmp_path, raw)
    with contextlib.suppress(ConfigError):
        load_profile(path)


def test_a_hostile_file_is_read_in_linear_time(tmp_path: Path) -> None:
    path = write(tmp_path, "A=" + "a" * 5_000_000 + "#" * 1_000_000 + " \n")
    with pytest.raises(ConfigError):
        load_profile(path)


# --- the profiles that come with the project


@pytest.mark.parametrize("name", [*SERVED, "lab-smollm2"])
def test_shipped_profiles_mean_what_bash_means(name: str) -> None:
    path = PROFILES / f"{name}.env"
    profile = load_profile(path)
    assert as_dict(profile) == bash(path)
    assert all(printed(path, key) == value for key, value, _ in profile.values)
    assert profile.name == name


SEED = {
    "dspark-r0b0tlab-production": ("327680", "16", "16384", "0.835", "15998753178", "FULL_DECODE_ONLY", "regular"),
    "dspark-r0b0tlab-1m": ("1048576", "1", "8192", "0.88", None, "FULL_DECODE_ONLY", "regular"),
    "dspark-r0b0tlab-breakable-ab": ("327680", "16", "16384", "0.835", "15998753178", "PIECEWISE", "breakable"),
}


@pytest.mark.parametrize("name", SERVED)
def test_shipped_profiles_hold_the_runbook_values(name: str) -> None:
    profile = load_profile(PROFILES / f"{name}.env")
    keys = (
        "MAX_MODEL_LEN",
        "MAX_NUM_SEQS",
        "MAX_NUM_BATCHED_TOKENS",
        "GPU_MEMORY_UTILIZATION",
        "KV_CACHE_MEMORY_BYTES",
    )
    *numbers, mode, implementation = SEED[name]
    assert [profile.get(key) for key in keys] == numbers
    assert json.loads(profile.get("COMPILATION_CONFIG_JSON") or "") == {
        "mode": 0,
        "cudagraph_mode": mode,
        "cudagraph_implementation": implementation,
        "cudagraph_strict": True,
    }
    common = {
        "DSPARK_RUNTIME_LANE": "native-v026",
        "DSPARK_VLLM_IMAGE": "dspark-r0b0tlab:production-v026-b12x-native-v11",
        "KV_CACHE_DTYPE": "nvfp4_ds_mla",
        "MTP_NUM_TOKENS": "6",
        "MOE_BACKEND": "flashinfer_b12x",
    }
    assert common.items() <= as_dict(profile).items()


def test_only_the_1m_profile_sets_time_outs() -> None:
    names = [
        {key for key in as_dict(load_profile(PROFILES / f"{name}.env")) if key.startswith("VLLM_")} for name in SERVED
    ]
    assert names == [set(), {"VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_RPC_TIMEOUT"}, set()]
