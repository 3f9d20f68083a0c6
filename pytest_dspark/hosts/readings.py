"""How a host is: its free memory and its highest temperature, read from the kernel and from nvidia-smi.

On machines whose GPU has no memory of its own (GB10) the free memory is the GPU's too. What cannot be read is None with
the reason, never 0. Disks and network cards have limits of their own and are left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

from pytest_dspark.cluster import Output, Readings
from pytest_dspark.errors import HostError

# One process a look: grep prints `file:content` for every file, and says nothing of those that cannot be read.
KERNEL = (
    "sh",
    "-c",
    'grep -sH "" /proc/meminfo /sys/class/thermal/thermal_zone*/type /sys/class/thermal/thermal_zone*/temp'
    " /sys/class/hwmon/hwmon*/name /sys/class/hwmon/hwmon*/temp*_input",
)
# A wedged driver hangs nvidia-smi: it is ended on the host itself, since a given-up ssh command would go on there.
GPU = ("timeout", "-k", "1", "4", "nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")
KERNEL_S = 5.0
GPU_S = 8.0
GPU_EVERY_S = 30.0
KIB_A_GIB = 1024**2
LEAST_C, MOST_C = 1.0, 150.0  # a sensor that says 0, -273 or 255 says nothing
OWN_LIMITS = ("nvme", "drivetemp", "mlx5", "iwlwifi", "r8169")
_MEMORY = re.compile(r"MemAvailable:\s+([0-9]+) kB")
_SENSOR = re.compile(r"(/sys/class/(?:thermal/(thermal_zone\d+)|hwmon/(hwmon\d+)))/(?:temp|(temp\d+)_input)")
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,3})?")


class Reader:
    """Reads one host again and again. The GPU is asked at most every half minute, and no more after it did not answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gpu: tuple[dict[str, float], str] = {}, "nvidia-smi was not asked yet"
        self._due = clock()
        self._given_up = False

    def read(self, run: Callable[..., Output]) -> Readings:
        """`run` is the host's `read`. Raises nothing: a host that does not answer is a reading with a reason."""
        try:
            text = run(KERNEL, timeout=KERNEL_S).text
        except HostError as error:
            return Readings(None, None, unreadable=(str(error),))
        if not self._given_up and self._clock() >= self._due:
            self._gpu = self._ask_gpu(run)
            self._due = self._clock() + GPU_EVERY_S
        return readings_from(text, *self._gpu)

    def _ask_gpu(self, run: Callable[..., Output]) -> tuple[dict[str, float], str]:
        try:
            done = run(GPU, timeout=GPU_S)
        except HostError as error:
            self._given_up = True
            return {}, f"nvidia-smi: {error}; it is not asked again"
        if done.code in (124, 126, 127, 137):
            self._given_up = True
            words = "did not end within 4 s" if done.code in (124, 137) else "is not there"
            return {}, f"nvidia-smi {words}; it is not asked again"
        return gpu_temperatures(done)


def gpu_temperatures(done: Output) -> tuple[dict[str, float], str]:
    """°C of every GPU that says a number, and why one does not."""
    lines = [line.strip() for line in done.text.splitlines() if line.strip()]
    if done.code != 0 or not lines:
        said = (done.stderr.decode("utf-8", "replace").strip() or done.text.strip() or "nothing").splitlines()[0]
        return {}, f"nvidia-smi ended with code {done.code} and said: {said[:120]}"
    found = {f"gpu{number}": value for number, line in enumerate(lines) if (value := celsius(line)) is not None}
    silent = [f"nvidia-smi says {line[:40]} for gpu{n}" for n, line in enumerate(lines) if celsius(line) is None]
    return found, "; ".join(silent)


def celsius(text: str) -> float | None:
    """A plausible temperature; None for `[N/A]`, words, and what no sensor can mean."""
    value = float(text) if _NUMBER.fullmatch(text) else None
    return value if value is not None and LEAST_C <= value <= MOST_C else None


def readings_from(text: str, gpus: Mapping[str, float], gpu_problem: str) -> Readings:
    """The readings in what `KERNEL` printed, with what nvidia-smi said."""
    files = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("/sys/") and ":" in line)
    memory = [int(found[1]) / KIB_A_GIB for found in _MEMORY.finditer(text)]
    sensors = dict(_sensors(files)) | dict(gpus)
    hottest = max(sensors, key=lambda name: sensors[name], default="")
    reasons = [] if memory else ["/proc/meminfo has no MemAvailable in kB"]
    if not hottest:
        reasons.append(f"no thermal zone and no sensor gives a plausible temperature; {gpu_problem}")
    return Readings(
        free_memory_gib=round(memory[0], 3) if memory else None,
        temperature_c=sensors[hottest] if hottest else None,
        sensor=hottest,
        unreadable=tuple(reasons),
    )


def _sensors(files: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Name and °C of every sensor that the kernel gives in thousandths, without parts that have limits of their own."""
    for path, text in files.items():
        found = _SENSOR.fullmatch(path)
        if not found:
            continue
        folder, zone, chip, channel = found.groups()
        kind = files.get(f"{folder}/type" if zone else f"{folder}/name", "?").strip()
        value = celsius(f"{int(text) / 1000:.3f}") if re.fullmatch(r"-?[0-9]{1,9}", text.strip()) else None
        if value is not None and not kind.startswith(OWN_LIMITS):
            yield " ".join(filter(None, (zone or chip, channel, kind))), value
