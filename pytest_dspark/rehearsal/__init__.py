"""An emulated rank, run as a program of its own: imports nothing of the package, and nothing of the package imports it."""
