"""Our client in a process of its own.

    python -m benchmarks.ours URL CONCURRENCY REQUESTS

Writes one JSON line in the form of `figures.read_streams`. A request that failed ends it with the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.scenarios import PROMPT_TOKENS
from pytest_dspark.endpoint import Asked, Endpoint, Reply


def ask(user: str) -> Asked:
    said = [{"role": "user", "content": "word " * PROMPT_TOKENS}]
    return Asked({"messages": said, "user": user, "max_tokens": 1000, "ignore_eos": True})


def told(user: str, reply: Reply) -> dict[str, Any]:
    """The reply's stamps on the machine's monotonic clock."""
    timing = reply.timing
    if timing is None:
        raise SystemExit(f"{user}: a reply without timing")
    start, answer = timing.at_s, timing.first_answer_s
    return {
        "user": user,
        "start": start,
        "stamps": [start + stamp for stamp in timing.stamps],
        "first_answer": None if answer is None else start + answer,
        "tokens": reply.usage.completion_tokens if reply.usage else None,
    }


def run(url: str, concurrency: int, requests: int) -> list[dict[str, Any]]:
    """All streams, finished. Raises SystemExit with the first failed request."""
    users = [f"r{number}" for number in range(requests)]
    replies = Endpoint(url, "m").stream_many([ask(user) for user in users], places=concurrency)
    for reply in replies:
        if not isinstance(reply, Reply):
            raise SystemExit(str(reply))
    return [told(user, reply) for user, reply in zip(users, replies, strict=True) if isinstance(reply, Reply)]


def main() -> None:
    url, concurrency, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"streams": run(url, concurrency, requests)}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that takes itself apart is no client's work, and would count for most at C1
