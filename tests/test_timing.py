"""The formulas, on schedules whose truth is known."""

import math
import random

import pytest

from pytest_dspark import timing as T
from pytest_dspark.metrics import read_metrics

SPECULATIVE = T.Timing(0.5, 0.5, 1.4, 1.4, stamps=tuple(0.5 + 0.1 * n for n in range(10)))
ONE = T.Timing(0.5, 0.5, 0.5, 0.6, stamps=(0.5,))
NONE = T.Timing(None, None, None, 0.6)


def test_several_tokens_an_event():
    """CASES L02."""
    assert T.tpot(SPECULATIVE, 60).value == pytest.approx(0.9 / 59)
    assert T.decode_rate(SPECULATIVE, 60).value == pytest.approx(59 / 0.9)
    assert T.output_rate(SPECULATIVE, 60).value == pytest.approx(60 / 1.4)
    assert T.mean_gap(SPECULATIVE).value == pytest.approx(0.1)
    assert T.longest_gap(SPECULATIVE).value == pytest.approx(0.1)
    assert T.tokens_per_event(SPECULATIVE, 60).value == 6.0
    assert (SPECULATIVE.events, len(SPECULATIVE.gaps)) == (10, 9)


@pytest.mark.parametrize(
    "figure",
    [
        T.tpot(ONE, 1),
        T.tpot(ONE, 6),
        T.tpot(NONE, 6),
        T.tpot(SPECULATIVE, None),
        T.tpot(SPECULATIVE, 0),
        T.decode_rate(ONE, 1),
        T.output_rate(SPECULATIVE, None),
        T.output_rate(SPECULATIVE, 0),
        T.first_token(NONE),
        T.first_answer(NONE),
        T.mean_gap(ONE),
        T.longest_gap(NONE),
        T.tokens_per_event(NONE, 6),
        T.tokens_per_event(SPECULATIVE, None),
        T.prefill_rate(NONE, 100),
        T.prefill_rate(SPECULATIVE, None),
        T.prefill_rate(SPECULATIVE, 100, None),
        T.prefill_rate(SPECULATIVE, 100, 100),
        T.quantile([], 0.5),
        T.quantile([1.0] * 43, 0.9),
        T.quantile([1.0] * 458, 0.99),
    ],
)
def test_unmeasured_is_none_with_a_reason(figure):
    assert figure.value is None
    assert figure.reason


def test_prefill_counts_what_was_not_cached():
    assert T.prefill_rate(SPECULATIVE, 1000, 400).value == pytest.approx(1200)


def readings(tokens, finished, seconds, start=100.0):
    return read_metrics(
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\nprocess_start_time_seconds {start}\n'
        f'vllm:request_success_total{{finished_reason="stop"}} {finished}\nvllm:request_success_total{{finished_reason="length"}} 1\n'
        f"vllm:request_decode_time_seconds_sum {seconds}\n"
    )


def test_server_decode_rate_with_and_without_correction():
    """10 requests of 60 tokens at 100 tokens/s: 59 intervals each."""
    before, after = readings(1000, 5, 50.0), readings(1600, 15, 50.0 + 10 * 59 / 100)
    assert T.server_decode_rate(before, after).value == pytest.approx(100)
    assert T.server_decode_rate_uncorrected(before, after).value == pytest.approx(100 * 60 / 59)


def test_server_decode_rate_of_a_restarted_or_silent_server_is_unknown():
    assert "restarted" in T.server_decode_rate(readings(1000, 5, 50), readings(10, 6, 51)).reason
    assert "restarted" in T.server_decode_rate(readings(1000, 5, 50), readings(2000, 6, 51, start=200.0)).reason
    assert T.server_decode_rate(read_metrics(""), readings(10, 6, 51)).reason == "before: the server sent nothing"
    assert T.server_decode_rate(readings(1, 1, 1), readings(1, 1, 1)).value is None


def test_sample_floors():
    assert (T.sample_floor(0.9), T.sample_floor(0.99), T.sample_floor(0.5)) == (44, 459, 1)


def test_quantiles():
    values = [float(n) for n in range(1, 460)]
    random.Random(1).shuffle(values)
    assert T.quantile(values, 0.5).value == 230
    assert T.quantile(values, 0.9).value == pytest.approx(1 + 458 * 0.9)
    assert T.quantile(values, 0.99).value == pytest.approx(1 + 458 * 0.99)


def test_wilson():
    """Known values: 95 of 100, and the ends, which have a width too."""
    interval = T.wilson(95, 100)
    assert (interval.low, interval.high) == (pytest.approx(0.8882, abs=1e-4), pytest.approx(0.9785, abs=1e-4))
    assert (T.wilson(10, 10).low, T.wilson(10, 10).high) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert T.wilson(0, 10).low == 0.0
    assert T.wilson(0, 0).low is None
    assert T.wilson(0, 0).reason


def test_interval_by_repeats():
    interval = T.t_interval([10.0, 11.0, 12.0])
    assert interval.centre == 11
    assert interval.high == pytest.approx(11 + 4.3027 / math.sqrt(3), abs=1e-4)
    assert T.t_interval([1.0]).low is None
    assert T.t_interval([1.0]).reason
    assert T.t_interval([]).centre is None


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.7062), (30, 2.0423), (31, 2.0395), (60, 2.0003), (1000, 1.9623)])
def test_t_values(degrees, t):
    assert T.t_975(degrees) == pytest.approx(t, abs=1.5e-4)
