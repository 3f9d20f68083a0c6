"""One stream: the canary, latency, throughput by prompt class, since the prompt alone moves the speed."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.performance]


@pytest.mark.check("performance.{row}")
@pytest.mark.parametrize("row", ["canary", "latency", "decode-prose", "decode-code", "decode-list", "prefill"])
def test_one_stream(verdict, row):
    """One stream of exactly the asked length; ours alone, and cold."""
    assert verdict.passed, verdict
