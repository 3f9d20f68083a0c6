"""The requirements of the vLLM CPU wheel, without torch and its companions (those are installed by name, one build)."""

import re
import sys
import zipfile

SKIPPED = {"torch", "torchaudio", "torchvision", "torchcodec"}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
for line in lines:
    requirement = line.removeprefix("Requires-Dist: ")
    if line == requirement or "extra ==" in requirement:
        continue
    if re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() not in SKIPPED:
        print(requirement)
