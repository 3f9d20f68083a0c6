"""The error tree, the closed list of codes, and the remedy for each code.

Every refusal is one of these. `where` is a file and line, a host, or a rank; the message says what was found and what was
expected. Libraries' own exceptions are translated where the library is imported and never travel further.
"""

from __future__ import annotations

import re
from typing import Final

REMEDIES: Final[dict[str, str]] = {
    # before anything is launched
    "USAGE": "correct the option and run again; nothing was launched",
    "PROFILE_INVALID": "correct the profile line; nothing was launched",
    "RECIPE_INVALID": "correct the recipe file; nothing was launched",
    "CLUSTER_INVALID": "correct the cluster file; nothing was launched",
    "PROFILE_REFUSED": "choose values that the recipe allows; nothing was launched",
    "RESUME_REFUSED": "resume with the files and options of that run, or start a new one; nothing was launched",
    "WRAPPER_DIRTY": "commit or remove the changes in the wrapper tree",
    "HOST_UNREACHABLE": "check that the host is up and that its docker address answers",
    "HOST_KEY_UNKNOWN": "compare the key with the host's own and add it to known_hosts",
    "HOST_KEY_CHANGED": "find out why the host's key changed before you replace the known_hosts entry",
    "SSH_AUTH_FAILED": "check the user and the key; an encrypted key must be in the agent",
    "SSH_CONFIG_UNSUPPORTED": "write the target's real address, port and user into the cluster file",
    "DOCKER_MISSING": "put docker on the PATH of non-interactive shells of that host",
    "DOCKER_FAILED": "read the daemon's own message; nothing more was started",
    "IMAGE_MISSING": "load the same image on every host (docker save | docker load)",
    "IDENTITY_MISMATCH": "load exactly the pinned image and manifest on every host",
    "RANKS_DIFFER": "make the hosts equal; one engine must run one image and one command line",
    "MODEL_MISSING": "put the model folder where the cluster file says",
    "NAME_TAKEN": "another engine owns this name; it was left alone",
    "PORT_TAKEN": "stop what listens on the port or choose another port",
    "HOST_UNFIT": "make the host fit, as the message says; nothing was started",
    "LEFTOVERS": "remove them with `dspark stop --run ID`",
    # the launch
    "RANK_EXITED": "read the rank's log in the run folder",
    "PROCESS_LOST": "read the rank's log; a rank that lost a process may answer on, but it is not the one that was proven",
    "RANK_RESTARTED": "remove the restart policy; a restarted rank is another engine",
    "OOM_KILLED": "lower the memory share or free memory on that host",
    "RENDEZVOUS_TIMEOUT": "check the fabric address, the interface and the rendezvous port",
    "READY_TIMEOUT": "read both ranks' logs; the engine never generated a token",
    "GATE_FAILED": "read runtime-gate.json: it lists each requirement that was not met",
    "LAUNCH_FAILED": "read both ranks' logs in the run folder",
    "CANCELLED": "the run was interrupted; start it again",
    # asking the engine
    "SERVER_LOST": "read the logs; the server closed the connection",
    "SERVER_ERROR": "read the server's message and its log",
    "ERROR_IN_STREAM": "read the server's log; it failed after its headers were sent",
    "TRUNCATED": "read the server's log; the stream ended before it was finished",
    "PROTOCOL": "the server answered something that is not the OpenAI protocol",
    "DEADLINE": "raise the check's deadline only if the engine is known to be that slow",
    "STALLED": "the engine sent nothing for the stall limit; read both ranks' logs",
    "ENGINE_DEAD": "read both ranks' logs; the engine said that it died",
    "ENGINE_WEDGED": "read both ranks' logs; the API answers and nothing is generated",
    "FABRIC_LOST": "look at the cable, the switch and the interfaces between the hosts; the engine cannot go on without them",
    "API_DOWN": "read the head's log; its rank runs and nobody answers on its port",
    "CAPACITY": "the prompt cannot fit what the engine holds; nothing was sent",
    "CAPACITY_STALL": "the prompt was accepted and never scheduled; it is larger than the pool",
    "FOREIGN_TRAFFIC": "keep other clients off the engine while it is measured",
    "CACHE_WARM": "timed prompts must be new to the server; look for another client or a shared prefix",
    "DRIFT": "let the engine settle, look at clocks, temperature and other load on the hosts, and measure again",
    "INFRA_RISK": "free memory on that host or cool it, then resume the run; the reading is in brake.json",
    # after
    "BLOCKED": "see the first cause",
    "DATA_UNAVAILABLE": "get the file as the message says; it is used only with its sha256",
    "NOT_IMPLEMENTED": "install what the lane needs",
    "LEFT_BEHIND": "remove what is named by hand",
    "HARNESS": "report this as a fault of pytest-dspark, with the run folder",
    # verdicts of the model or the engine
    "WRONG_ANSWER": "read the stored answer",
    "NO_ANSWER": "read the stored answer",
    "GARBLED": "read the stored text; compilation, a kernel or the speculation may break it",
    "CROSS_TALK": "do not serve from this engine: one request's text went to another",
    "LOSSY": "read the stored tokens; the engine took tokens that it held for clearly less likely",
    "DIVERGED": "read the stored tokens; under load the engine took a token that is clearly less likely alone",
    "LIMIT_EXCEEDED": "a limit that the recipe states was not kept; read the row",
    "TOKEN_LIMIT": "raise the budget of the check, or switch thinking off",
}


_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text as it may be shown on a terminal: what moves the cursor, colours, hides or turns letters round is written as
    `\\x1b`, since logs, answers and packs are by others and could draw a line that says something else. Tabs and line ends stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class DsparkError(Exception):
    """A refusal or a failure of infrastructure: one clear sentence with a code of `REMEDIES`."""

    def __init__(self, code: str, message: str) -> None:
        if code not in REMEDIES:
            raise ValueError(f"code {code!r} is not in errors.REMEDIES")
        message = printable(message)
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[DsparkError], tuple[str, str]]:
        return type(self), (self.code, self.message)

    @property
    def remedy(self) -> str:
        return REMEDIES[self.code]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ConfigError(DsparkError):
    """A profile, recipe, cluster file or option that cannot be used. Ends as pytest's usage error (exit code 4)."""


class HostError(DsparkError):
    """A host, its ssh or its Docker engine did not do what was asked. `docker_only`: the host itself answered, and said that
    its Docker engine does not."""

    def __init__(self, code: str, message: str, *, docker_only: bool = False) -> None:
        super().__init__(code, message)
        self.docker_only = docker_only


class LaunchError(DsparkError):
    """The engine could not be acquired: preflight, identity, launch, readiness or gate."""


class EndpointError(DsparkError):
    """A request to the engine failed as infrastructure: no answer, a broken stream, an error inside a 200, a time-out."""


class BlockedError(DsparkError):
    """Not tried, because an earlier failure made it pointless. The message carries the first cause."""
