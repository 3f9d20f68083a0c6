"""Tests of the plugin itself drive pytest through pytester; the plugin comes in through its entry point."""

pytest_plugins = ["pytester"]
