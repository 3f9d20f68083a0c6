"""What a host must be before a launch: clock, disk, memory, fabric, GPU. Each look reads, judges and says what it saw.

A look never changes anything on a host. What a host cannot show is "not observable"; whether that, or a bad answer,
refuses the launch is the recipe's word: `required` of `[preflight]`.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_dspark.cluster import Host, HostEntry, RankSpec
from pytest_dspark.errors import REMEDIES, DsparkError, HostError
from pytest_dspark.plan import Plan
from pytest_dspark.sanitize import is_secret_key

GIB = 1 << 30
LOOK_S = 5.0
ROCE_V2 = "RoCE v2"

REMEDIES_OF: Mapping[str, str] = {
    "clock": "set the clock of that host (chronyc makestep, or timedatectl set-ntp true)",
    "disk": "free space on that file system, or lower disk_gib of the recipe",
    "memory": "end what holds memory; page cache: sync; echo 3 > /proc/sys/vm/drop_caches",
    "pressure": "end what uses the memory of that host before anything is measured",
    "swap": "end what was swapped out, then: swapoff -a; swapon -a",
    "gpu-processes": "end the processes that are named; another engine may still be unloading",
    "gpu": "install the GPU driver and the NVIDIA container runtime on that host",
    "interface": "correct interface and address of that host in the cluster file, or bring the link up",
    "rdma": "bring the RDMA device up, or correct rdma of that host in the cluster file",
    "gid": "set NCCL_IB_GID_INDEX of that host to the index that resolves to RoCE v2 over IPv4",
    "jumbo": "set the MTU to 9000 on both ends of the link and on what lies between",
    "cache": "make the cache folder, writable for the user that reaches the host",
    "api": "give VLLM_API_KEY, or bind the API to one address",
    "parity": "update the hosts to one kernel, driver and Docker",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One look: `state` is green, amber (goes on), red (refuses), or `not observable`."""

    check: str
    host: str
    state: str
    message: str
    code: str = ""

    @property
    def remedy(self) -> str:
        """What to do; empty where nothing is to be done."""
        if self.state in ("green", "not observable"):
            return ""
        return REMEDIES_OF.get(self.check) or REMEDIES.get(self.code, "")

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "host": self.host, "state": self.state, "message": self.message} | (
            {"code": self.code, "remedy": self.remedy} if self.state in ("red", "amber") else {}
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look found: right or not, or None if the host cannot show it."""

    good: bool | None
    message: str


# What a running engine rightly holds.
OF_A_LAUNCH = frozenset({"memory", "gpu-processes", "pressure", "swap", "disk"})


def rows(plan: Plan, spec: RankSpec, host: Host, *, launching: bool = True) -> Iterator[Row]:
    """Every look at one host. Raises nothing: a host that stops answering is an unobservable row.

    `launching` False is for an engine that is up already, which rightly holds memory and GPU.
    """
    entry = plan.cluster.hosts[spec.rank]
    for check, look in LOOKS.items():
        if not launching and check in OF_A_LAUNCH:
            continue
        try:
            seen = look(plan, spec, entry, host)
        except DsparkError as error:
            seen = Seen(None, error.message.removeprefix(f"{host.name}: "))
        except (ValueError, IndexError, KeyError) as error:
            seen = Seen(None, f"the host's answer cannot be read: {error}")
        if seen is not None:
            yield as_row(plan, check, host.name, seen)


def as_row(plan: Plan, check: str, host: str, seen: Seen) -> Row:
    """Bad is red where the recipe requires it, else amber; what cannot be seen is red only where it is required."""
    required = check in plan.recipe.preflight.required
    if seen.good:
        return Row(check, host, "green", seen.message)
    if seen.good is None:
        text = f"{seen.message}; recipe {plan.recipe.name} requires it" if required else seen.message
        return Row(check, host, "red" if required else "not observable", text, "HOST_UNFIT" if required else "")
    return Row(check, host, "red" if required else "amber", seen.message, "HOST_UNFIT")


def _text(host: Host, *argv: str, timeout: float = LOOK_S) -> str:
    """What a command printed. Raises HOST_UNREACHABLE that says why there is nothing."""
    done = host.read(argv, timeout=timeout)
    if done.code == 0:
        return done.text
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    raise HostError("HOST_UNREACHABLE", f"{argv[0]}: {said[-1] if said else f'exit code {done.code}'}")


# --- clock, disk, memory


def _clock(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    """This machine's clock against the host's; the bound is the round trip of the question, best of two."""
    spans = []
    for _ in range(2):
        before = time.time()
        told = float(_text(host, "date", "+%s.%N"))
        spans.append((time.time() - before, told - before))
    trip, offset = min(spans)
    return judged_clock(offset, trip, plan.recipe.preflight.clock_s)


def judged_clock(offset_s: float, trip_s: float, limit_s: float) -> Seen:
    """`offset_s` is the host's clock less ours when the question was sent; the answer was made within `trip_s` after."""
    skew, bound = offset_s - trip_s / 2, trip_s / 2
    text = f"clock is {skew:+.3f} s from this machine's, known to {bound:.3f} s"
    return Seen(abs(skew) - bound <= limit_s, f"{text}, allowed {limit_s:g} s")


def _disk(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    need = plan.recipe.preflight.disk_gib
    if not need:
        return None
    folders = [folder for folder in (entry.cache, host.facts().data_root) if folder] or ["/"]
    found = {folder: free_bytes(_text(host, "df", "-Pk", folder)) / GIB for folder in folders}
    text = ", ".join(f"{free:.2f} GiB free at {folder}" for folder, free in found.items())
    return Seen(min(found.values()) >= need, f"{text}, needed {need:g} GiB")


def free_bytes(text: str) -> int:
    """Free bytes of the one file system that `df -Pk` lists."""
    return int(text.splitlines()[1].split()[3]) * 1024


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _memory(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    share = plan.settings.values.get(plan.recipe.preflight.memory_knob)
    if not plan.recipe.preflight.memory_knob or share is None:
        return None
    return judged_memory(meminfo(_text(host, "cat", "/proc/meminfo")), float(share), plan.recipe.preflight.memory_knob)


def judged_memory(found: Mapping[str, int], share: float, knob: str) -> Seen:
    """The engine asks for free memory, and page cache is not free."""
    need, free = found["MemTotal"] * share, found["MemFree"]
    cache = found.get("Cached", 0) + found.get("Buffers", 0)
    text = f"{free / GIB:.2f} GiB free of {found['MemTotal'] / GIB:.2f}, {knob}={share:g} needs {need / GIB:.2f}"
    return Seen(free >= need, f"{text}; page cache holds {cache / GIB:.2f} GiB")


def _pressure(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    found = re.search(r"^full avg10=([\d.]+)", _text(host, "cat", "/proc/pressure/memory"), re.MULTILINE)
    if not found:
        return Seen(None, "/proc/pressure/memory says nothing of full stalls")
    limit = plan.recipe.preflight.pressure_percent
    return Seen(float(found[1]) <= limit, f"memory stalls everything {found[1]} % of 10 s, allowed {limit:g} %")


def _swap(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    found = meminfo(_text(host, "cat", "/proc/meminfo"))
    used, limit = (found["SwapTotal"] - found["SwapFree"]) / GIB, plan.recipe.preflight.swap_gib
    return Seen(used <= limit, f"{used:.2f} GiB swapped out, allowed {limit:g} GiB")


# --- GPU


def _gpu_processes(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    text = _text(host, "nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")
    foreign = [line.strip() for line in text.splitlines() if line.strip()]
    return Seen(not foreign, f"processes on the GPU: {'; '.join(foreign) or 'none'}")


def _gpu(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    if not dict(spec.options).get("gpus"):
        return None
    names = _text(host, "nvidia-smi", "-L").strip()
    return Seen(bool(names), re.sub(r" \(UUID: [^)]*\)", "", names).replace("\n", "; ") or "no GPU")


# --- fabric


def _interface(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    if not entry.interface:
        return Seen(None, "the cluster file names no interface")
    done = host.read(["ip", "-o", "addr", "show", "dev", entry.interface], timeout=LOOK_S)
    if done.code == 127:
        return Seen(None, "ip is not there")
    if done.code != 0:
        return Seen(False, f"interface {entry.interface} is not there, expected {entry.address} on it")
    return judged_interface(done.text, entry.interface, entry.address)


def judged_interface(text: str, interface: str, address: str) -> Seen:
    """`ip -o addr show dev NAME`: the address must be one of its own (on loopback: in one of its networks)."""
    found = [ipaddress.ip_interface(word) for word in re.findall(r"inet6? (\S+)", text)]
    shown = ", ".join(str(one.ip) for one in found) or "none"
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return Seen(None, f"address {address} is a name; {interface} has {shown}")
    there = any(one.ip == wanted or (one.ip.is_loopback and wanted in one.network) for one in found)
    return Seen(there, f"{interface} has {shown}, expected {address}")


def _rdma(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    if entry.rdma in ("", "none"):
        return Seen(None, "the cluster file names no RDMA device")
    state = _text(host, "cat", f"/sys/class/infiniband/{entry.rdma}/ports/1/state").strip()
    return Seen("ACTIVE" in state, f"{entry.rdma} is {state}, expected ACTIVE")


def _gid(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    index = dict(spec.env).get("NCCL_IB_GID_INDEX")
    if entry.rdma in ("", "none") or not index:
        return None
    base = f"/sys/class/infiniband/{entry.rdma}/ports/1"
    kind = _text(host, "cat", f"{base}/gid_attrs/types/{index}").strip()
    return judged_gid(entry.rdma, index, kind, _text(host, "cat", f"{base}/gids/{index}").strip())


def judged_gid(device: str, index: str, kind: str, gid: str) -> Seen:
    """A GID of RoCE v2 over IPv4: sysfs writes it uncompressed, with :ffff: before the address."""
    right = kind == ROCE_V2 and ":ffff:" in gid.lower() and not gid.lower().startswith("fe80")
    return Seen(
        right, f"GID {index} of {device} is {gid or 'empty'} ({kind or 'no kind'}), expected IPv4 over {ROCE_V2}"
    )


def _jumbo(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    size = plan.recipe.preflight.ping_bytes
    peers = [other for other in plan.cluster.hosts if other.name != entry.name]
    if not size or not peers:
        return None
    lost = []
    for peer in peers:
        done = host.read(
            ["ping", "-M", "do", "-s", str(size), "-c", "1", "-W", "2", "-n", peer.address], timeout=LOOK_S
        )
        if done.code == 127:
            return Seen(None, "ping is not there")
        lost += [f"{peer.name} ({peer.address})"] if done.code != 0 else []
    return Seen(
        not lost, f"pings of {size} bytes, not to be split: {'no answer of ' + ', '.join(lost) if lost else 'answered'}"
    )


# --- folders and the API


def _cache(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    if not entry.cache:
        return None
    there = host.read(["test", "-d", entry.cache]).code == 0
    writable = there and host.read(["test", "-w", entry.cache]).code == 0
    state = "writable" if writable else "not writable" if there else "not there"
    return Seen(writable, f"cache folder {entry.cache} is {state}")


def _api(plan: Plan, spec: RankSpec, entry: HostEntry, host: Host) -> Seen | None:
    if spec.rank:
        return None
    keyed = "--api-key" in spec.argv or any(is_secret_key(key) and "API_KEY" in key for key, _ in spec.env)
    words = " ".join(spec.argv)
    bound = re.search(r"--host[ =](\S+)", words)
    wide = not bound or bound[1] in ("0.0.0.0", "::")
    return Seen(
        keyed or not wide,
        f"API bound to {'all interfaces' if wide else bound and bound[1]}, {'with' if keyed else 'without'} a key",
    )


Look = Callable[[Plan, RankSpec, HostEntry, Host], Seen | None]
LOOKS: Mapping[str, Look] = {
    "clock": _clock,
    "disk": _disk,
    "memory": _memory,
    "pressure": _pressure,
    "swap": _swap,
    "gpu-processes": _gpu_processes,
    "gpu": _gpu,
    "interface": _interface,
    "rdma": _rdma,
    "gid": _gid,
    "jumbo": _jumbo,
    "cache": _cache,
    "api": _api,
}


# --- between the hosts


def parity(plan: Plan, facts: Mapping[str, Any], drivers: Mapping[str, str]) -> Iterator[Row]:
    """Kernel, GPU driver and Docker of every host against the first; red where the recipe says that it is an error."""
    kinds = {
        "kernel": {name: fact.kernel for name, fact in facts.items()},
        "docker": {name: fact.docker_version for name, fact in facts.items()},
        "driver": dict(drivers),
    }
    for kind, values in kinds.items():
        first_name, first = next(iter(values.items()), ("", ""))
        for name, value in list(values.items())[1:]:
            if value == first:
                continue
            red = getattr(plan.recipe.asymmetry, kind) == "error"
            text = f"{kind} is {value or 'not observable'}, {first_name} has {first or 'not observable'}"
            yield Row("parity", name, "red" if red else "amber", text, "RANKS_DIFFER")
