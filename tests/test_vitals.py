"""Readings of a host and the brakes on them: what is read, what is no number, and when a host is about to die."""

import threading
from pathlib import Path

import pytest

from pytest_dspark.cluster import HostEntry, Output, Readings
from pytest_dspark.errors import BlockedError, ConfigError, HostError
from pytest_dspark.evidence import new_run
from pytest_dspark.hosts.process import ProcessHost, pretended_readings
from pytest_dspark.hosts.readings import GPU, KERNEL, Reader, celsius, gpu_temperatures, readings_from
from pytest_dspark.kept import KeptStore
from pytest_dspark.recipe import Brakes, load_recipe
from pytest_dspark.remote import RemoteStage, StageServer
from pytest_dspark.stage import Stage, StageOptions
from pytest_dspark.vitals import STALE_S, UNREAD, Vitals, blind, crossed

ROOT = Path(__file__).parents[1]
GB10 = """\
/proc/meminfo:MemTotal:       125513604 kB
/proc/meminfo:MemFree:         3161600 kB
/proc/meminfo:MemAvailable:   14680064 kB
/sys/class/thermal/thermal_zone0/type:acpitz
/sys/class/thermal/thermal_zone1/type:acpitz
/sys/class/thermal/thermal_zone0/temp:61200
/sys/class/thermal/thermal_zone1/temp:68400
/sys/class/hwmon/hwmon0/name:acpitz
/sys/class/hwmon/hwmon1/name:nvme
/sys/class/hwmon/hwmon2/name:mlx5
/sys/class/hwmon/hwmon0/temp1_input:61200
/sys/class/hwmon/hwmon1/temp1_input:84850
/sys/class/hwmon/hwmon2/temp1_input:97000
"""
NOT_ASKED = "nvidia-smi is not there"


def output(text="", code=0, stderr=b""):
    return Output(code, text.encode(), stderr)


def test_free_memory_and_the_hottest_sensor_of_a_gb10():
    found = readings_from(GB10, {}, NOT_ASKED)
    assert found == Readings(14.0, 68.4, "thermal_zone1 acpitz"), "disks and network cards have limits of their own"
    assert readings_from(GB10, {"gpu0": 71.0}, "") == Readings(14.0, 71.0, "gpu0")


@pytest.mark.parametrize(
    ("text", "memory", "temperature", "words"),
    [
        ("", None, None, "/proc/meminfo has no MemAvailable in kB"),
        ("/proc/meminfo:MemAvailable:  14680064 MB\n", None, None, "no MemAvailable in kB"),
        ("/proc/meminfo:MemFree:  14680064 kB\n", None, None, "no MemAvailable in kB"),
        ("/proc/meminfo:MemAvailable:        0 kB\n", 0.0, None, "no thermal zone and no sensor"),
        (GB10.replace("61200", "-274000").replace("68400", "255000"), 14.0, None, NOT_ASKED),
        (GB10.replace("61200", "0").replace("68400", "hot"), 14.0, None, "plausible temperature"),
    ],
)
def test_what_cannot_be_read_is_null_with_the_reason(text, memory, temperature, words):
    found = readings_from(text, {}, NOT_ASKED)
    assert (found.free_memory_gib, found.temperature_c, found.sensor) == (memory, temperature, "")
    assert words in "; ".join(found.unreadable)


@pytest.mark.parametrize(
    ("text", "value"),
    [("45", 45.0), ("45.5", 45.5), ("[N/A]", None), ("N/A", None), ("", None), ("0", None), ("-40", None)]
    + [("151", None), ("nan", None), ("inf", None), ("1e2", None), ("4 5", None), ("٤٥", None)],
)
def test_only_a_plausible_number_is_a_temperature(text, value):
    assert celsius(text) == value


def test_nvidia_smi_says_a_number_or_why_not():
    assert gpu_temperatures(output("45\n52\n")) == ({"gpu0": 45.0, "gpu1": 52.0}, "")
    assert gpu_temperatures(output("[N/A]\n52\n")) == ({"gpu1": 52.0}, "nvidia-smi says [N/A] for gpu0")
    found, why = gpu_temperatures(output(code=9, stderr=b"NVIDIA-SMI has failed\nmore"))
    assert found == {} and why == "nvidia-smi ended with code 9 and said: NVIDIA-SMI has failed"
    assert gpu_temperatures(output(""))[1] == "nvidia-smi ended with code 0 and said: nothing"


class Told:
    """A host that answers as told, and remembers what it was asked."""

    def __init__(self, kernel=GB10, gpu=("45", 0)):
        self.kernel, self.gpu, self.asked = kernel, gpu, []

    def run(self, argv, *, timeout):
        self.asked.append(argv)
        answer = self.kernel if argv == KERNEL else self.gpu
        if isinstance(answer, HostError):
            raise answer
        return output(answer) if argv == KERNEL else output(*answer)


def test_the_gpu_is_asked_every_half_minute_and_not_again_after_it_hung():
    now, told = [100.0], Told()
    reader = Reader(clock=lambda: now[0])
    for _ in range(12):
        reader.read(told.run)
        now[0] += 5
    assert told.asked.count(GPU) == 2 and told.asked.count(KERNEL) == 12
    for answer in (("", 124), ("", 127), HostError("HOST_UNREACHABLE", "h: nvidia-smi did not end in time")):
        told, now[0] = Told(kernel="/proc/meminfo:MemAvailable: 1048576 kB\n", gpu=answer), 0.0
        reader = Reader(clock=lambda: now[0])
        for _ in range(3):
            found = reader.read(told.run)
            now[0] += 60
        assert told.asked.count(GPU) == 1, "a wedged driver collects processes that never end"
        assert found.free_memory_gib == 1.0 and found.temperature_c is None and "nvidia-smi" in found.unreadable[0]


def test_a_host_that_does_not_answer_is_a_reading_with_a_reason():
    found = Reader().read(Told(kernel=HostError("HOST_UNREACHABLE", "h: ssh: timed out")).run)
    assert found == Readings(None, None, unreadable=("HOST_UNREACHABLE: h: ssh: timed out",))


def test_this_machine_has_free_memory(tmp_path):
    host = ProcessHost(HostEntry("h", "127.0.0.1", process=True), cluster="c", state=tmp_path)
    found = host.readings()
    assert found.free_memory_gib > 0
    assert (found.temperature_c is None) == bool(found.unreadable)


def test_pretended_readings(tmp_path):
    path = tmp_path / "readings.json"
    assert "No such file" in pretended_readings(path).unreadable[0]
    path.write_text('{"free_memory_gib": 1.5, "temperature_c": "hot"}')
    found = pretended_readings(path)
    assert (found.free_memory_gib, found.temperature_c) == (1.5, None) and "temperature_c" in found.unreadable[0]
    path.write_text('{"free_memory_gib": true}')
    assert pretended_readings(path).free_memory_gib is None
    entry = HostEntry("h", "127.0.0.1", process=True, env=(("REHEARSAL_READINGS", str(path)),))
    assert ProcessHost(entry, cluster="c", state=tmp_path).readings() == pretended_readings(path)


# --- when to brake


BRAKES = Brakes(2.0, 90.0)


def reading(memory=8.0, temperature=60.0):
    return Readings(memory, temperature, "gpu0")


@pytest.mark.parametrize(
    ("now", "before", "words"),
    [
        (reading(), reading(), ""),
        (reading(memory=2.0), reading(), ""),
        (reading(memory=1.999), reading(), "free memory is 1.999 GiB, the recipe brakes below 2 GiB"),
        (reading(memory=0.0), UNREAD, "free memory is 0 GiB"),
        (reading(temperature=90.0), reading(temperature=91.0), ""),
        (reading(temperature=91.0), reading(temperature=60.0), ""),
        (reading(temperature=91.0), UNREAD, ""),
        (reading(temperature=91.0), reading(temperature=90.5), "gpu0 is at 91 °C, the recipe brakes above 90 °C"),
        (reading(memory=None, temperature=None), reading(memory=0.1, temperature=99.0), ""),
    ],
)
def test_crossed(now, before, words):
    why = crossed(BRAKES, now, before)
    assert why.startswith(words) and bool(why) == bool(words)
    assert crossed(Brakes(), now, before) == "", "without a limit nothing brakes"


def test_a_brake_that_cannot_see_says_so():
    assert blind(BRAKES, reading()) == blind(Brakes(), UNREAD) == ""
    assert blind(BRAKES, UNREAD) == (
        "free memory and temperature cannot be read, so nothing brakes on it: not read yet"
    )
    assert blind(Brakes(2.0), reading(temperature=None)) == ""


class Sick:
    """A host whose readings are given one after the other; the last one stays."""

    def __init__(self, *found):
        self.found = list(found)

    def readings(self):
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def test_vitals_tell_one_crossing_and_the_extremes():
    crossings, crossed_one, said = [], threading.Event(), []

    def on_crossing(*told):
        crossings.append(told)
        crossed_one.set()

    hosts = {"a": Sick(reading(), reading(memory=5.0), reading(memory=1.0)), "b": Sick(UNREAD)}
    vitals = Vitals(hosts, BRAKES, on_crossing=on_crossing, say=said.append, every_s=0.01)
    vitals.start()
    assert crossed_one.wait(5)
    vitals.stop()
    assert [(host, found.free_memory_gib) for host, _, found in crossings] == [("a", 1.0)]
    summary = vitals.summary()
    assert (summary["a"]["least_free_memory_gib"], summary["a"]["most_temperature_c"]) == (1.0, 60.0)
    assert (summary["b"]["least_free_memory_gib"], summary["b"]["unreadable"]) == (None, ["not read yet"])
    assert len(said) == 1 and said[0].startswith("b: free memory and temperature cannot be read")


def test_a_reading_that_is_too_old_is_null():
    now, stop = [0.0], threading.Event()

    class Hangs(Sick):
        def readings(self):
            if len(self.found) == 1:
                stop.wait(5)
            return super().readings()

    vitals = Vitals(
        {"a": Hangs(reading(), reading())}, Brakes(), on_crossing=print, say=print, every_s=0.01, clock=lambda: now[0]
    )
    assert vitals.now()["a"] == UNREAD.as_json() | {"age_s": None}
    vitals.start()
    while vitals.summary()["a"]["readings"] < 1:
        pass
    assert vitals.now()["a"]["free_memory_gib"] == 8.0
    now[0] = STALE_S + 1
    assert vitals.now()["a"]["free_memory_gib"] is None
    assert vitals.now()["a"]["unreadable"] == ["the last reading is 31 s old"]
    vitals.stop()
    stop.set()


def test_no_crossing_is_told_after_the_stop():
    crossings, read = [], threading.Event()

    class Late(Sick):
        def readings(self):
            read.wait(5)
            return super().readings()

    vitals = Vitals({"a": Late(reading(memory=0.5))}, BRAKES, on_crossing=lambda *t: crossings.append(t), say=print)
    vitals.start()
    vitals.stop()
    read.set()
    while vitals.summary()["a"]["readings"] < 1:
        pass
    assert crossings == []


def test_workers_may_ask_for_readings(tmp_path):
    stage = Stage(
        {}, new_run(tmp_path), StageOptions(), open_host=None, say=print, kept_store=KeptStore(tmp_path / "kept")
    )
    server = StageServer(stage)
    with pytest.raises(BlockedError, match="was not planned"):
        RemoteStage(server.address).readings("production")
    server.close()
    stage.close(interrupted=False)


# --- the recipe's limits


def test_the_recipe_states_its_brakes():
    assert load_recipe(ROOT / "recipe" / "dspark-sm121.toml").brakes == Brakes(2.0, 90.0)
    assert load_recipe(ROOT / "recipe" / "vllm.toml").brakes == Brakes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("least_free_memory_gib = 0", "must be a number above 0 and below 1024, found 0"),
        ("least_free_memory_gib = 2147483648", "below 1024"),
        ('least_free_memory_gib = "2 GiB"', "found '2 GiB'"),
        ("least_free_memory_gib = true", "found True"),
        ("most_temperature_c = nan", "found nan"),
        ("most_temperature_c = 212", "above 30 and below 150"),
        ("most_temperature = 90", "unknown key 'most_temperature'"),
    ],
)
def test_a_brake_that_never_or_always_brakes_is_refused(tmp_path, line, words):
    text = (ROOT / "recipe" / "vllm.toml").read_text()
    path = tmp_path / "x.toml"
    path.write_text(f"{text}\n[brakes]\n{line}\n")
    with pytest.raises(ConfigError, match="brakes") as caught:
        load_recipe(path)
    assert words in caught.value.message
