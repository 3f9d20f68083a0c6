"""Runs in the environment of the official bfcl-eval package, by that environment's python: nothing of ours is imported.

    python bfcl_driver.py ids REQUEST     writes the ids of a category with the sha256 of each entry
    python bfcl_driver.py run REQUEST     generates and evaluates some ids with the package's own code

REQUEST is a JSON file. The package knows models by name; the one that is served here is entered under its own name, with the
package's handler for OpenAI's chat API and with our budget, deadline and retries, which that handler has no options for.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAME = "dspark-served"


def main(argv: list[str]) -> int:
    asked = json.loads(Path(argv[2]).read_text(encoding="utf-8"))
    told = ids(asked) if argv[1] == "ids" else run(asked)
    Path(asked["out"]).write_text(json.dumps(told), encoding="utf-8")
    return 0


def ids(asked: dict[str, Any]) -> dict[str, Any]:
    """The entries of a category in the package's order."""
    from bfcl_eval.utils import load_dataset_entry

    entries = load_dataset_entry(asked["category"])
    hashes = {entry["id"]: hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest() for entry in entries}
    return {"version": metadata.version("bfcl_eval"), "entries": hashes}


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Generate, then evaluate what was generated; results and scores lie under BFCL_PROJECT_ROOT."""
    from bfcl_eval import _llm_response_generation as generation
    from bfcl_eval.constants.eval_config import TEST_IDS_TO_GENERATE_PATH
    from bfcl_eval.eval_checker import eval_runner

    enter(asked)
    TEST_IDS_TO_GENERATE_PATH.write_text(json.dumps({asked["category"]: asked["ids"]}), encoding="utf-8")
    generation.main(
        SimpleNamespace(
            model=[NAME],
            test_category=[asked["category"]],
            temperature=asked["temperature"],
            include_input_log=False,
            exclude_state_log=True,
            num_threads=asked["threads"],
            result_dir=None,
            allow_overwrite=False,
            run_ids=True,
        )
    )
    eval_runner.main([NAME], [asked["category"]], None, None, True)
    return {"version": metadata.version("bfcl_eval")}


def enter(asked: dict[str, Any]) -> None:
    """Make the served model known to the package."""
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    class Served(OpenAICompletionsHandler):  # type: ignore[misc]
        def _build_client_kwargs(self) -> dict[str, Any]:
            key = os.environ.get("OPENAI_API_KEY") or "none"
            given = {"api_key": key, "base_url": asked["base_url"]}
            return given | {"timeout": asked["timeout_s"], "max_retries": asked["retries"]}

        def generate_with_backoff(self, **kwargs: Any) -> Any:
            kwargs.pop("store", None)
            kwargs["max_tokens"] = asked["max_tokens"]
            if asked["thinking"] is not None:
                kwargs["extra_body"] = {"chat_template_kwargs": {"thinking": asked["thinking"]}}
            return super().generate_with_backoff(**kwargs)

    MODEL_CONFIG_MAPPING[NAME] = ModelConfig(
        model_name=asked["model"],
        display_name=NAME,
        url="",
        org="",
        license="",
        model_handler=Served,
        is_fc_model=True,
        underscore_to_dot=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
