"""The acceptance suites."""
