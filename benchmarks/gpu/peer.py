"""`vllm bench serve` in one process: each line of standard input is a JSON list of its arguments, each answer one line.

The command's own parser and main run for every line; only the interpreter and the imports are kept, so that a repeat does
not wait for them. Whatever it or its libraries print goes to standard error.
"""

import json
import os
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402  (what imports print must not be an answer)
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def once(arguments: list[str]) -> dict:
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    result = main(parser.parse_args(arguments))
    return {key: value for key, value in result.items() if value is None or isinstance(value, int | float | str)}


print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(once(json.loads(line))), file=answers, flush=True)
