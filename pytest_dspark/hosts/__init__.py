"""The three ways to reach a rank: a local process, a Docker engine on this machine, and one behind ssh.

docker and paramiko are imported only when a host needs them, so that a machine without them can run process hosts.
"""

from __future__ import annotations

from pathlib import Path

from pytest_dspark.cluster import Host, HostEntry


def open_host(entry: HostEntry, *, cluster: str, state: Path) -> Host:
    """The host of one cluster entry; nothing is contacted yet. `state` is a folder for logs and locks of process ranks.

    Raises HostError if the package for its kind is not installed or its address cannot be used.
    """
    if entry.process:
        from pytest_dspark.hosts.process import ProcessHost

        return ProcessHost(entry, cluster=cluster, state=state)
    from pytest_dspark.hosts.docker import open_docker

    return open_docker(entry)
