"""/metrics text: numbers, or unavailable with the reason. Never 0 for unknown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dspark.metrics import Metrics, delta, read_metrics

DRAFTS = "vllm:spec_decode_num_drafts_total"
TWO = f"""# HELP {DRAFTS} drafts
# TYPE {DRAFTS} counter
{DRAFTS}{{engine="0",model_name="a b, c}}\\"d"}} 6.491797e+06
{DRAFTS}{{engine="1",model_name="a b, c}}\\"d"}} 3 1776900000000
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a b, c}}\\"d"}} 1.7769e+09
vllm:num_requests_running{{engine="0"}} 2.0
vllm:num_requests_running{{engine="1"}} NaN
"""


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
@pytest.mark.parametrize("asked", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_kv_use_under_either_name(name, asked):
    assert read_metrics(f'{name}{{engine="0"}} 0.25\n').value(asked) == 0.25


def test_both_names_at_once_are_not_added():
    assert (
        read_metrics("vllm:kv_cache_usage_perc 0.25\nvllm:gpu_cache_usage_perc 0.25\n").value(
            "vllm:kv_cache_usage_perc"
        )
        == 0.25
    )


def test_shares_of_engines_are_not_added():
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    assert read_metrics(text).value("vllm:kv_cache_usage_perc") == 0.75


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_labels_stamps_engines_and_created(end):
    metrics = read_metrics(TWO.replace("\n", end))
    assert metrics.value(DRAFTS) == 6491800
    assert metrics.value(DRAFTS.removesuffix("_total")) == 6491800
    assert {engine: figure.value for engine, figure in metrics.per_engine(DRAFTS).items()} == {"0": 6491797, "1": 3}
    assert metrics.find(DRAFTS)[0].labels["model_name"] == 'a b, c}"d'
    assert metrics.value(DRAFTS, engine="1") == 3
    assert metrics.value("vllm:spec_decode_num_drafts_created") is None


def test_nan_is_unknown_and_so_is_its_sum():
    metrics = read_metrics(TWO)
    assert metrics.value("vllm:num_requests_running") is None
    assert "not a number" in metrics.figure("vllm:num_requests_running").reason
    assert metrics.per_engine("vllm:num_requests_running")["0"].value == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \r\n",
        "<html><body>404</body></html>",
        "\ufeff<!DOCTYPE html>",
        '{"detail":"Not Found"}',
        "Not Found",
        "404 page not found\n",
        "# only a comment\n",
        'a{b="c" 1\n',
        "a b c\n",
    ],
)
def test_what_is_no_metrics_is_unavailable_with_the_reason(text):
    metrics = read_metrics(text)
    assert metrics.problem
    assert metrics.figure(DRAFTS).value is None
    assert metrics.figure(DRAFTS).reason == metrics.problem == metrics.kv_pool.reason
    assert delta(metrics, read_metrics(TWO), DRAFTS).value is None
    assert delta(read_metrics(TWO), metrics, DRAFTS).reason == f"after: {metrics.problem}"


def test_unknown_name_is_unavailable():
    figure = read_metrics(TWO).figure("vllm:no_such_thing")
    assert (figure.value, figure.reason) == (None, "the server has no vllm:no_such_thing")


@given(st.text(max_size=200) | st.text(alphabet='ab{}=",\\ \n\r#0123456789.eNTYPEHL_:', max_size=80))
def test_no_text_raises(text):
    metrics = read_metrics(text)
    assert bool(metrics.problem) != bool(metrics.samples)


def pool(**labels) -> Metrics:
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return read_metrics(f"vllm:cache_config_info{{{text}}} 1.0\n")


def test_the_pool_is_the_label_and_never_a_product():
    """CASES M02."""
    blocks = {"block_size": "4", "num_gpu_blocks": "9800"}
    assert pool(**blocks, kv_cache_size_tokens="156000").kv_pool_tokens == 156000
    assert pool(**blocks).kv_pool_tokens is None
    assert pool(**blocks, kv_cache_size_tokens="None").kv_pool_tokens is None
    assert "None" in pool(**blocks, kv_cache_size_tokens="None").kv_pool.reason
    assert pool(**blocks, kv_cache_size_tokens="0").kv_pool_tokens is None
    assert pool(**blocks, kv_cache_size_tokens="-5").kv_pool_tokens is None
    assert read_metrics(TWO).kv_pool.reason == "the server has no vllm:cache_config_info"


def test_the_pool_of_several_engines_is_the_smallest():
    text = "".join(
        f'vllm:cache_config_info{{engine="{n}",kv_cache_size_tokens="{size}"}} 1\n' for n, size in enumerate((9, 7))
    )
    assert read_metrics(text).kv_pool_tokens == 7


def test_labels_of_info():
    metrics = pool(block_size="4", a="None", b="")
    assert metrics.label("vllm:cache_config_info", "block_size") == "4"
    assert [metrics.label("vllm:cache_config_info", key) for key in ("a", "b", "c")] == [None] * 3


def counter(*values, start=None):
    lines = [f'c_total{{engine="{engine}"}} {value}' for engine, value in enumerate(values)]
    return read_metrics("\n".join([*lines, *([f"process_start_time_seconds {start}"] if start else [])]) + "\n")


def test_deltas():
    assert delta(counter(1, 2), counter(4, 4), "c_total").value == 5
    assert delta(counter(5), counter(5), "c").value == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (counter(5), counter(4)),
        (counter(5, 5), counter(4, 100)),
        (counter(5, 5), counter(100)),
        (counter(5, start=1.0), counter(6, start=2.0)),
    ],
)
def test_counters_that_go_back_mean_a_restart(before, after):
    figure = delta(before, after, "c_total")
    assert figure.value is None
    assert figure.reason.startswith("server restarted")


RECORDED = Path(__file__).parents[2] / "shared/data/logs/vllm-0.26.0-h200-tp2-ngram/metrics.txt"


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded /metrics of vLLM 0.26 is not on this machine")
def test_a_recorded_reading():
    metrics = read_metrics(RECORDED.read_text())
    assert metrics.value("vllm:generation_tokens_total") == 68
    assert metrics.value("vllm:request_success_total") == 2
    assert metrics.value("vllm:prefix_cache_hits_total") == 16
    assert metrics.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") == 2
    assert metrics.kv_pool_tokens == int(metrics.label("vllm:cache_config_info", "kv_cache_size_tokens"))


def test_a_series_that_is_there_twice_is_no_number_and_never_the_sum_of_both():
    twice = 'vllm:generation_tokens_total{engine="0"} 100\nvllm:generation_tokens_total{engine="0"} 100\n'
    found = read_metrics(twice).figure("vllm:generation_tokens_total")
    assert found.value is None and "twice" in found.reason
    assert read_metrics(twice.replace('"0"', '"1"', 1)).value("vllm:generation_tokens_total") == 200
