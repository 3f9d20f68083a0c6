"""No planted secret comes through, and nothing that is no secret is lost."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
import time
from urllib.parse import quote, quote_plus
from xml.sax.saxutils import escape as xml_text

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dspark.logs import read_log, search
from pytest_dspark.sanitize import is_secret_key, mask_argv, mask_env, mask_text, secret_values

PLANTED = "planted-4711"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "VLLM_API_KEY", "DSPARK_API_KEYS", "MY_PASSWORD", "X_SECRET", "api_key", "api-key", "apikey", "OPENAI_API_KEY", "hf-token",
        "hf_token", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "token", "password", "Authorization", "client_secret", "accessToken",
        "HUGGING_FACE_HUB_TOKEN", "SSH_KEY", "ssl_keyfile_password", "GH_PAT", "NPM_AUTH", "AWS_CREDENTIALS",
    ],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name",
    [
        "MAX_NUM_BATCHED_TOKENS", "MTP_NUM_TOKENS", "max_tokens", "prompt_tokens", "TOKENIZER", "tokenizer-mode", "TOKENIZERS_PARALLELISM", "kv_cache_size_tokens",
        "pad_token", "eos_token", "STOP_TOKEN", "cache_key", "PASSTHROUGH", "pass", "key", "keys", "pass_config", "MASTER_ADDR", "SSH_AUTH_SOCK", "KEYBOARD", "monkey",
        "DSPARK_VLLM_IMAGE", "KV_CACHE_DTYPE", "enable-prompt-tokens-details", "host_key", "public_key", "author", "secretary", "", "tokens", "PATH", "pattern",
    ],
)  # fmt: skip
def test_plain_names(name: str) -> None:
    assert not is_secret_key(name)


def test_declared_names() -> None:
    assert is_secret_key("LICENSE_CODE", ["license_code"])
    assert mask_env([("LICENSE_CODE", PLANTED), ("A", "1"), ("HF_TOKEN", "")], ["LICENSE_CODE"]) == (
        ("LICENSE_CODE", "***"),
        ("A", "1"),
        ("HF_TOKEN", ""),
    )
    assert secret_values([("LICENSE_CODE", PLANTED), ("HF_TOKEN", "abc"), ("A", "long value")], ["LICENSE_CODE"]) == (
        PLANTED,
    )


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (["serve", "--api-key", PLANTED, "--port", "8888"], ["serve", "--api-key", "***", "--port", "8888"]),
        (["serve", f"--api-key={PLANTED}", "/model"], ["serve", "--api-key=***", "/model"]),
        (["--api-key", PLANTED, PLANTED, "--port", "1"], ["--api-key", "***", "***", "--port", "1"]),
        (["--hf-token", PLANTED], ["--hf-token", "***"]),
        (["--hf-token", "--port", "1"], ["--hf-token", "--port", "1"]),
        (["--hf_token", PLANTED], ["--hf_token", "***"]),
        (["docker", "run", "-e", f"HF_TOKEN={PLANTED}", "-e", "A=1", "image"], ["docker", "run", "-e", "HF_TOKEN=***", "-e", "A=1", "image"]),
        (["env", f"VLLM_API_KEY={PLANTED}", "vllm"], ["env", "VLLM_API_KEY=***", "vllm"]),
        (["-H", f"Authorization: Bearer {PLANTED}"], ["-H", "Authorization: Bearer ***"]),
        (["--model", "hf_abcdefgh1234"], ["--model", "***"]),
        (["--ssl-keyfile-password", PLANTED], ["--ssl-keyfile-password", "***"]),
        (["bash", "-lc", f"vllm serve /model --api-key {PLANTED} --port 1"], ["bash", "-lc", "vllm serve /model --api-key *** --port 1"]),
        (["bash", "-lc", f"vllm serve /model \\\n  --api-key='{PLANTED}' \\\n  --port 1"], ["bash", "-lc", "vllm serve /model \\\n  --api-key='***' \\\n  --port 1"]),
        (["bash", "-lc", f"vllm serve --api-key {PLANTED} '{PLANTED}' --port 1"], ["bash", "-lc", "vllm serve --api-key ***' --port 1"]),
        (["bash", "-lc", f'exec vllm serve --hf-token "{PLANTED}"'], ["bash", "-lc", "exec vllm serve --hf-token \"***\""]),
    ],
)  # fmt: skip
def test_argv(argv: list[str], masked: list[str]) -> None:
    assert list(mask_argv(argv)) == masked
    assert mask_argv(mask_argv(argv)) == tuple(masked)


def test_argv_without_secrets_is_unchanged() -> None:
    argv = [
        "vllm", "serve", "/model", "--served-model-name", "m", "--max-num-batched-tokens", "16384", "--trust-remote-code", "--tokenizer-mode", "deepseek_v4",
        "--speculative-config", '{"method":"dspark","num_speculative_tokens":6}', "--enable-prompt-tokens-details", "--master-addr", "192.0.2.1", "-e", "A=1",
        "--compilation-config", '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}', "sha256:" + "ab" * 32, "--task-desc", "sk-learn", "http://192.0.2.1:8888/v1",
    ]  # fmt: skip
    assert list(mask_argv(argv)) == argv


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PLANTED}",
        f"authorization: bearer  {PLANTED}",
        f'{{"headers": {{"Authorization": "Bearer {PLANTED}"}}}}',
        "Authorization: Basic cGxhbnRlZC00NzEx",
        "hf_EXAMPLE",
        "token=hf_AbCdEfGhIjKlMnOpQrStUvWx",
        "ghp_0123456789abcdef",
        "github_pat_11ABCDEFG0_abc",
        "glpat-0123456789abcdef",
        "sk-0123456789abcdef",
        "sk-proj-0123_456-789abcdef",
        "AKIAIOSFODNN7EXAMPLE",
        f"https://user:{PLANTED}@example.invalid/x",
        f"https://{PLANTED}@example.invalid",
        f"ssh://user:{PLANTED}@example.invalid",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nb3BlbnNzaC1rZXk",
        f'"Env": ["PATH=/bin", "VLLM_API_KEY={PLANTED}"]',
        f"export HF_TOKEN={PLANTED}",
        f"DB_PASSWORD={PLANTED};next",
        f"non-default args: {{'api_key': ['{PLANTED}'], 'port': 1}}",
        f"{{'hf_token': '{PLANTED}'}}",
        f'{{\\"api_key\\": \\"{PLANTED}\\"}}',
        f"--api-key {PLANTED}",
        f"--api-key={PLANTED}",
        f"--hf-token '{PLANTED}'",
        f"environ({{'HF_TOKEN': '{PLANTED}', 'PATH': '/bin'}})",
        f'"VLLM_API_KEY": "{PLANTED}"',
        f'VLLM_API_KEY="two words {PLANTED}"',
        f"PGPASSWORD={PLANTED} MYSQL_PWD={PLANTED} SECRET={PLANTED} MY_PASS={PLANTED}",
        f"vllm_api_key={PLANTED} password={PLANTED}",
        f"api_key=['one', '{PLANTED}']",
        f"GET /v1/models?api_key={PLANTED}&x=1 then ?token={PLANTED}",
        f"X-Api-Key: {PLANTED}",
        f"Authorization: token {PLANTED}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{PLANTED}",
        f"nvapi-{PLANTED}",
    ],
)
def test_shapes_are_masked(text: str) -> None:
    masked = mask_text(text)
    assert "***" in masked
    for secret in (PLANTED, "hf_E", "hf_A", "ghp_", "github_pat", "glpat-", "sk-", "AKIA", "b3Blb", "cGxh"):
        assert secret not in masked
    assert mask_text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "the bearer of the news", "half_hf", "ask-me-anything-now", "risk-0123456789", "sk-learn", "http://192.0.2.1:8888/v1", "a@b", "user@host", "ssh://user@192.0.2.2:22", "mode=0 key=3",
        "GPU KV cache size: 1,041,584 tokens", "max_tokens=64 eos_token='</s>'", "https://example.invalid/a@b", "MAX_NUM_BATCHED_TOKENS=8192", "sha256:" + "0f" * 32,
        "-----BEGIN PUBLIC KEY-----", "'tokenizer': '/m'", "", "***", "--max-tokens 64", "--tokenizer /m", "--hf-token --port 1", "hf_token", "hf_overrides={}", "hf_hub_download",
    ],
)  # fmt: skip
def test_plain_text_stays(text: str) -> None:
    assert mask_text(text) == text


def test_known_values_in_every_spelling() -> None:
    value = 'p w"ä/\\x+1'
    text = " ".join(
        [
            value,
            json.dumps({"a": value}),
            json.dumps({"a": value}, ensure_ascii=False),
            quote(value, safe=""),
            f"http://x/?k={quote(value)}",
            repr(value),
        ]
    )
    masked = mask_text(text, [value])
    for spelling in (value, json.dumps(value)[1:-1], quote(value, safe=""), quote(value), repr(value)[1:-1]):
        assert spelling not in masked


@pytest.mark.parametrize("value", ["p w\"ä/\\x+1'&<>", "Plain4711word", "''''", "%%%%", "a+b/c=="])
def test_a_known_value_however_it_was_written(value: str) -> None:
    printed = json.dumps(value, ensure_ascii=False)
    written = [
        *(repr(repr(value)), json.dumps(printed, ensure_ascii=False), repr(value.encode()), shlex.quote(value)),
        *(
            quote_plus(value),
            re.sub("%..", lambda found: found[0].lower(), quote(value, safe="")),
        ),
        *(html.escape(value), html.escape(value, quote=False), xml_text(value)),
        base64.b64encode(value.encode()).decode(),
    ]
    for text in written:
        masked = mask_text(f"before {text} after", [value])
        assert masked.startswith("before ") and masked.endswith(" after")
        assert not [part for part in ("4711", "x+1", "x%2B1", "a+b", "a%2", "%%%") if part in masked], (text, masked)


def test_short_values_are_left_and_longer_ones_go_first() -> None:
    assert mask_text("abc abcd", ["abc"]) == "abc abcd"
    assert mask_text("secretplus secret", ["secret", "secretplus"]) == "*** ***"
    assert mask_text("*****", ["****"]) == "*****"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(alphabet='abcXY19-_.+$^([é"\\ ', min_size=4, max_size=8), min_size=1, max_size=3),
    st.lists(st.text(max_size=6), min_size=1, max_size=4),
)
def test_no_planted_value_comes_through(values: list[str], between: list[str]) -> None:
    text = "".join(piece + value for piece in between for value in values)
    masked = mask_text(text, values)
    assert not [value for value in values if value in masked]
    assert not [value for value in values if value in mask_text(json.dumps({"log": text}), values)]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_masking_twice_changes_nothing(text: str) -> None:
    assert mask_text(mask_text(text)) == mask_text(text)


def test_the_reported_case() -> None:
    """A token in the profile, a bearer key in the request, a log that prints its environment, an inspect dump."""
    pairs = [("HF_TOKEN", "hf_EXAMPLE"), ("VLLM_API_KEY", PLANTED), ("MAX_MODEL_LEN", "8192")]
    dump = json.dumps(
        {"Config": {"Env": [f"{key}={value}" for key, value in pairs]}, "Args": ["serve", "--api-key", PLANTED]}
    )
    log = f"HF_TOKEN=hf_EXAMPLE\n{PLANTED}\nAuthorization: Bearer {PLANTED}\n{dump}\nassert {pairs!r} == 1"
    values = secret_values(pairs)
    masked = mask_text(log, values)
    assert "hf_EXAMPLE" not in masked
    assert PLANTED not in masked
    assert "MAX_MODEL_LEN=8192" in masked
    assert search(masked, "EXAMPLE") is None
    assert "hf_EXAMPLE" not in repr(read_log(masked))


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "Bearer ",
        "hf_",
        "://",
        "x://",
        "x://a",
        "sk-",
        "A_KEY=",
        "A_",
        "-----BEGIN PRIVATE KEY-----",
        "api_key: ['",
        "authorization: ",
        "--api-key ",
        "--a",
        " ",
        *("A", "SECRET", "A_KEY='", "'A_KEY': ", "a_", "api_key", "a_api_key=", "api_key=[", "?token=", "x-api-key: "),
        *("eyJ", "eyJ.", "eyJaaaaaaaa.", "nvapi-"),
    ],
)
def test_a_megabyte_in_linear_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    mask_text(text, [PLANTED])
    assert time.process_time() - start < 8
