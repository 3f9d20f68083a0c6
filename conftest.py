"""Tests of the plugin itself drive pytest through pytester; the plugin comes in through its entry point."""

from pathlib import Path

from pytest_dspark.plugin import wanted_marks

pytest_plugins = ["pytester"]


def pytest_ignore_collect(collection_path, config):
    """An acceptance selects none of the plugin's own tests, and must not need what they import."""
    return True if collection_path == Path(__file__).parent / "tests" and wanted_marks(config) else None
