"""The environment marks of a process rank: what a container's name and labels are to Docker.

They are inherited by every child, so that a rank is found after its owner died, and without any file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_dspark.cluster import RUN_LABEL, RankSpec

_LABEL = "DSPARK_LABEL_"


@dataclass(frozen=True, slots=True)
class Marks:
    """Who owns a process. `token` is drawn anew for each start; `log` is the file that holds the rank's output."""

    cluster: str
    host: str
    name: str
    token: str
    log: str
    image_id: str
    labels: tuple[tuple[str, str], ...]

    def environment(self) -> dict[str, str]:
        """The marks as environment variables; every name is one that a shell passes on."""
        labels = {f"{_LABEL}{number}": f"{key}={value}" for number, (key, value) in enumerate(self.labels)}
        return labels | {
            "DSPARK_RUN": dict(self.labels).get(RUN_LABEL, ""),
            "DSPARK_CLUSTER": self.cluster,
            "DSPARK_HOST": self.host,
            "DSPARK_NAME": self.name,
            "DSPARK_TOKEN": self.token,
            "DSPARK_LOG": self.log,
            "DSPARK_IMAGE_ID": self.image_id,
        }


def marks_for(spec: RankSpec, *, cluster: str, token: str, log: str, image_id: str) -> Marks:
    return Marks(cluster, spec.host, spec.name, token, log, image_id, spec.labels)


def marks_in(environment: Iterable[str] | None) -> Marks | None:
    """The marks in a process's environment; None if it carries none."""
    found = dict(entry.partition("=")[::2] for entry in environment or () if entry.startswith("DSPARK_"))
    if not found.get("DSPARK_TOKEN"):
        return None
    return Marks(
        cluster=found.get("DSPARK_CLUSTER", ""),
        host=found.get("DSPARK_HOST", ""),
        name=found.get("DSPARK_NAME", ""),
        token=found["DSPARK_TOKEN"],
        log=found.get("DSPARK_LOG", ""),
        image_id=found.get("DSPARK_IMAGE_ID", ""),
        labels=_labels(found),
    )


def _labels(found: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    keys = sorted((key for key in found if key.startswith(_LABEL)), key=lambda key: (len(key), key))
    pairs = (found[key].partition("=") for key in keys)
    return tuple((name, value) for name, _, value in pairs)
