"""A rank's specification as the body of Docker's `POST /containers/create`: a pure function, an unknown option is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pytest_dspark.cluster import Mount, RankSpec
from pytest_dspark.errors import HostError

Value = str | tuple[str, ...]
# What of a container's HostConfig is compared with the plan, and between ranks.
HOST_KEYS = (
    "CapAdd",
    "CapDrop",
    "CpusetCpus",
    "DeviceRequests",
    "Devices",
    "GroupAdd",
    "Init",
    "IpcMode",
    "Memory",
    "MemorySwap",
    "NetworkMode",
    "PidMode",
    "Privileged",
    "Runtime",
    "SecurityOpt",
    "ShmSize",
    "Ulimits",
)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


def create_body(host: str, spec: RankSpec) -> dict[str, Any]:
    """The whole body. Raises LAUNCH_FAILED that names the option that is not mapped or cannot be read."""
    body: dict[str, Any] = {
        "Image": spec.image,
        "Cmd": list(spec.argv),
        "Env": [f"{key}={value}" for key, value in spec.env],
        "Labels": dict(spec.labels),
        "HostConfig": {"Mounts": [_mount(mount) for mount in spec.mounts], "RestartPolicy": {"Name": "no"}},
    }
    for key, value in spec.options:
        add = _OPTIONS.get(key)
        if add is None:
            known = ", ".join(sorted(_OPTIONS))
            raise HostError("LAUNCH_FAILED", f"{host}: container option {key!r} is not mapped, expected one of {known}")
        try:
            add(body, value)
        except ValueError as error:
            raise HostError("LAUNCH_FAILED", f"{host}: container option {key}={value!r}: {error}") from error
    return body


def _mount(mount: Mount) -> dict[str, Any]:
    """A bind mount whose source must be there (docker's -v would make an empty folder); a plain name is a volume."""
    kind = "bind" if mount.source.startswith("/") else "volume"
    return {"Type": kind, "Source": mount.source, "Target": mount.target, "ReadOnly": mount.read_only}


# --- how one value is read


def size(text: str) -> int:
    """Bytes of `64g`, `512MiB` or `1024`, as docker reads them: units of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ValueError(f"expected a size such as 64g, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def ulimit(text: str) -> dict[str, Any]:
    """`name=soft:hard`, or `name=both`; -1 is unlimited."""
    found = re.fullmatch(r"(\w+)=(-?\d+)(?::(-?\d+))?", text)
    if not found:
        raise ValueError(f"expected name=soft:hard, found {text!r}")
    return {"Name": found[1], "Soft": int(found[2]), "Hard": int(found[3] or found[2])}


def device(text: str) -> dict[str, str]:
    """`source[:target][:rwm]`. A folder goes as it is: the engine maps every device node below it."""
    parts = text.split(":")
    if not text.startswith("/") or len(parts) > 3:
        raise ValueError(f"expected /dev/path[:target][:rwm], found {text!r}")
    rights = parts.pop() if len(parts) > 1 and re.fullmatch("[rwm]{1,3}", parts[-1]) else "rwm"
    return {"PathOnHost": parts[0], "PathInContainer": parts[-1], "CgroupPermissions": rights}


def gpus(text: str) -> dict[str, Any]:
    """`all`, a number, or `device=0,1`."""
    asked: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]]}
    if text == "all":
        return asked | {"Count": -1}
    if text.isdigit():
        return asked | {"Count": int(text)}
    if text.startswith("device="):
        return asked | {"DeviceIDs": text.removeprefix("device=").strip('"').split(",")}
    raise ValueError(f"expected all, a number or device=…, found {text!r}")


def security(text: str) -> str:
    """As it is; a seccomp profile must be `unconfined`, `builtin` or its JSON, since docker's client would read the file."""
    profile = text.removeprefix("seccomp=")
    if profile == text or profile in ("unconfined", "builtin"):
        return text
    try:
        json.loads(profile)
    except ValueError:
        raise ValueError("a seccomp profile file cannot be given, expected unconfined, builtin or JSON") from None
    return text


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", ""):
        raise ValueError(f"expected true or false, found {text!r}")
    return text.lower() in ("true", "1", "")


# --- where it goes

_Add = Callable[[dict[str, Any], Value], None]


def _one(value: Value) -> str:
    if isinstance(value, str):
        return value
    if len(value) != 1:
        raise ValueError(f"expected one value, found {len(value)}")
    return value[0]


def _single(key: str, read: Callable[[str], Any] = str) -> _Add:
    def add(body: dict[str, Any], value: Value) -> None:
        body["HostConfig"][key] = read(_one(value))

    return add


def _many(key: str, read: Callable[[str], Any] = str) -> _Add:
    def add(body: dict[str, Any], value: Value) -> None:
        texts = (value,) if isinstance(value, str) else value
        body["HostConfig"].setdefault(key, []).extend(read(text) for text in texts)

    return add


def _top(key: str, read: Callable[[str], Any] = str) -> _Add:
    def add(body: dict[str, Any], value: Value) -> None:
        body[key] = read(_one(value))

    return add


def _restart(body: dict[str, Any], value: Value) -> None:
    name, _, count = _one(value).partition(":")
    body["HostConfig"]["RestartPolicy"] = {"Name": name, "MaximumRetryCount": int(count or 0)}


_OPTIONS: Mapping[str, _Add] = {
    "cap-add": _many("CapAdd"),
    "cap-drop": _many("CapDrop"),
    "cpuset-cpus": _single("CpusetCpus"),
    "device": _many("Devices", device),
    "entrypoint": _top("Entrypoint", lambda text: [text]),
    "gpus": _many("DeviceRequests", gpus),
    "group-add": _many("GroupAdd"),
    "hostname": _top("Hostname"),
    "init": _single("Init", flag),
    "ipc": _single("IpcMode"),
    "memory": _single("Memory", size),
    "memory-swap": _single("MemorySwap", lambda text: -1 if text == "-1" else size(text)),
    "network": _single("NetworkMode"),
    "pid": _single("PidMode"),
    "privileged": _single("Privileged", flag),
    "restart": _restart,
    "runtime": _single("Runtime"),
    "security-opt": _many("SecurityOpt", security),
    "shm-size": _single("ShmSize", size),
    "ulimit": _many("Ulimits", ulimit),
    "user": _top("User"),
    "workdir": _top("WorkingDir"),
}


# --- what an engine makes of it


def planned(host: str, spec: RankSpec) -> dict[str, Any]:
    """The options that a container of this plan must be found with, in the form of `settled`."""
    return settled({key: value for key, value in create_body(host, spec)["HostConfig"].items() if key in HOST_KEYS})


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as every engine would write them: capabilities without CAP_, empty values left out, lists in order."""
    return {key: _settled(key, value) for key, value in options.items() if value not in (None, "", 0, False, [], {})}


def _settled(key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if key in ("CapAdd", "CapDrop"):
        return sorted(str(name).upper().removeprefix("CAP_") for name in value)
    plain = [_without_empty(entry) if isinstance(entry, Mapping) else entry for entry in value]
    return sorted(plain, key=lambda entry: json.dumps(entry, sort_keys=True))


def _without_empty(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value not in (None, "", [], {})}
