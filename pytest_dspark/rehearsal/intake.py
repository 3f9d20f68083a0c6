"""What a request body asks for, checked as the real server checks it, and turned into a sequence for the engine."""

from __future__ import annotations

import random
import secrets
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import answers
import sequence
import tokens
import wire
from argv import Settings
from faults import Faults

DEFAULT_COMPLETION_TOKENS = 16


class Refused(Exception):
    """The request is answered with an error and not run."""

    def __init__(self, message: str, code: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.body = wire.error(message, kind, code, param)


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads bodies for one server. `garbled`: this configuration garbles text; `weights`: a number of the model's bytes;
    `knows`: what the model has learnt by heart, question by question."""

    settings: Settings
    tokenizer: tokens.Tokenizer
    faults: Faults
    fingerprint: str
    garbled: bool
    weights: int = 0
    knows: Mapping[str, str] = field(default_factory=dict)

    # --- prompts

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat or of a prompt. Raises Refused."""
        return self.tokenizer.encode(self.chat_text(body)) if "messages" in body else self._plain_ids(body)

    def thinking(self, body: Mapping[str, Any]) -> bool:
        given = {**self.settings.template_kwargs, **(body.get("chat_template_kwargs") or {})}
        return bool(given.get("thinking", False))

    def chat_text(self, body: Mapping[str, Any]) -> str:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise Refused("messages: expected a list of at least one message")
        tools = body.get("tools") or [] if body.get("tool_choice") != "none" else []
        open_turn = bool(body.get("add_generation_prompt", True))
        try:
            return tokens.rendered(messages, tools, thinking=self.thinking(body), open_turn=open_turn)
        except (ValueError, AttributeError) as error:
            raise Refused(str(error)) from error

    def _plain_ids(self, body: Mapping[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return [tokens.BOS] * bool(body.get("add_special_tokens", True)) + self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(type(number) is int for number in prompt):
            raise Refused("prompt: expected a string or a list of token ids; one prompt a request")
        stranger = tokens.out_of_vocabulary(prompt)
        if stranger is not None:
            raise Refused(f"Token id {stranger} is out of vocabulary")
        return prompt

    # --- generations

    def job(self, body: Mapping[str, Any], *, chat: bool, gone: Callable[[], bool]) -> wire.Job:
        """Everything about one generation. Raises Refused."""
        self.check_model(body)
        self._check_numbers(body)
        if chat:
            self._check_tools(body)
        ids = array("I", self.prompt_ids(body) if chat or "messages" not in body else self._plain_ids(body))
        wanted = self._wanted(body, len(ids), chat)
        job_seed = _seed(body, ids)
        plan = self._plan(body, ids, job_seed, chat)
        source = sequence.spoken(plan, self.tokenizer, wanted, job_seed)
        own = sequence.Sequence(ids, wanted, source, job_seed, gone, time.monotonic(), retrieves=plan.retrieves)
        return self._described(body, own, chat)

    def _described(self, body: Mapping[str, Any], own: sequence.Sequence, chat: bool) -> wire.Job:
        return wire.Job(
            ident=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(8),
            created=int(time.time()),
            model=self.settings.served_model_name,
            chat=chat,
            sequence=own,
            fingerprint=self.fingerprint,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            logprobs=self._logprobs(body, chat),
            calls_end_as_tools=not isinstance(body.get("tool_choice"), Mapping),
            cache_details=self.settings.enable_prompt_tokens_details,
            weights=self.weights,
            miscount=int(self.faults.number("wrong_usage") or 0),
        )

    def _plan(self, body: Mapping[str, Any], ids: array[int], seed: int, chat: bool) -> answers.Plan:
        text = self.chat_text(body) if chat else self.tokenizer.decode(ids)
        turn = answers.turn_of(text) if len(text) < answers.LONG_CHARACTERS else ""
        choice = body.get("tool_choice") or ("auto" if body.get("tools") else "none")
        asked = answers.Asked(
            text=text,
            turn=turn,
            known=next((known for question, known in self.knows.items() if question in turn), ""),
            question=answers.question_of(text),
            seed=seed,
            thinking=self.thinking(body) if chat else text.endswith(tokens.SPECIALS[tokens.THINK]),
            tools=(body.get("tools") or ()) if chat else (),
            tool_choice=choice if chat else "none",
            response_format=_form(body),
        )
        return answers.plan(asked, self.faults, garbled=self.garbled)

    def _wanted(self, body: Mapping[str, Any], prompt: int, chat: bool) -> sequence.Wanted:
        window = self.settings.max_model_len
        if prompt == 0:
            raise Refused("The decoder prompt cannot be empty")
        given = (
            body.get("max_completion_tokens") if chat and body.get("max_completion_tokens") else body.get("max_tokens")
        )
        budget = int(given) if given is not None else max(1, window - prompt) if chat else DEFAULT_COMPLETION_TOKENS
        if prompt + budget > window:
            text = f"This model's maximum context length is {window} tokens. However, you requested {budget} output tokens and your "
            text += (
                f"prompt contains at least {prompt} input tokens, for a total of at least {prompt + budget} tokens. "
            )
            raise Refused(
                text + "Please reduce the length of the input prompt or the number of requested output tokens."
            )
        least = int(body.get("min_tokens") or 0)
        if least > budget:
            raise Refused(f"min_tokens must be less than or equal to max_tokens={budget}, got {least}.")
        stop = body.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
        return sequence.Wanted(budget, least, bool(body.get("ignore_eos")), tuple(filter(None, stops)))

    def check_model(self, body: Mapping[str, Any]) -> None:
        name = body.get("model")
        if name not in (None, self.settings.served_model_name):
            raise Refused(f"The model `{name}` does not exist.", 404, "NotFoundError", "model")

    def _check_numbers(self, body: Mapping[str, Any]) -> None:
        for name, least, most in (
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("max_tokens", 1, 2**31),
            ("max_completion_tokens", 1, 2**31),
            ("min_tokens", 0, 2**31),
            ("seed", -(2**63), 2**63),
        ):
            value = body.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise Refused(f"{name}: expected a number, got {value!r}", param=name)
            if not least <= value <= most:
                raise Refused(f"{name} must be at least {least}, got {value}.", param=name)
        if body.get("n") not in (None, 1):
            raise Refused("n: the rehearsal makes one answer a request", param="n")
        if body.get("stream_options") and not body.get("stream"):
            raise Refused("Stream options can only be defined when `stream=True`.", param="stream_options")
        if body.get("echo"):
            raise Refused("echo: the rehearsal does not echo", param="echo")

    def _check_tools(self, body: Mapping[str, Any]) -> None:
        tools, choice = body.get("tools"), body.get("tool_choice")
        if not tools:
            if choice not in (None, "none", "auto"):
                raise Refused("When using `tool_choice`, `tools` must be set.", param="tool_choice")
            return
        names = [(tool.get("function") or {}).get("name") for tool in tools if isinstance(tool, Mapping)]
        if len(names) != len(tools) or not all(names):
            raise Refused("tools: each must have a function with a name", param="tools")
        if choice in (None, "auto") and not (self.settings.enable_auto_tool_choice and self.settings.tool_call_parser):
            text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            raise Refused(text, param="tool_choice")
        if isinstance(choice, Mapping) and (choice.get("function") or {}).get("name") not in names:
            raise Refused(f"The tool specified in `tool_choice` does not match any of the specified `tools`: {choice}")
        if not isinstance(choice, Mapping) and choice not in (None, "auto", "none", "required"):
            raise Refused(f"tool_choice: unknown {choice!r}", param="tool_choice")

    def _logprobs(self, body: Mapping[str, Any], chat: bool) -> int | None:
        asked = body.get("logprobs")
        count = (int(body.get("top_logprobs") or 0) if asked else None) if chat else asked
        if count is None or count is False:
            return None
        if "no_logprobs" in self.faults:
            raise Refused("logprobs are switched off on this server", param="logprobs")
        if not 0 <= int(count) <= self.settings.max_logprobs:
            raise Refused(
                f"Requested sample logprobs of {count}, which is greater than max allowed: {self.settings.max_logprobs}"
            )
        return int(count)


def _form(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The response format; a JSON schema given as structured output is the same thing."""
    form = body.get("response_format")
    structured = body.get("structured_outputs")
    if isinstance(structured, Mapping) and isinstance(structured.get("json"), Mapping):
        return {"type": "json_schema", "json_schema": {"schema": structured["json"]}}
    if form is not None and (
        not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema")
    ):
        raise Refused(f"response_format: unknown {form!r}", param="response_format")
    return form


def _seed(body: Mapping[str, Any], ids: Sequence[int]) -> int:
    """The prompt's own number at temperature 0, with the given seed if there is one, else a new one each time."""
    own = zlib.crc32(array("I", ids).tobytes())
    if body.get("seed") is not None:
        return own ^ (int(body["seed"]) & 0xFFFFFFFF)
    return own if body.get("temperature") == 0 else random.getrandbits(32)
