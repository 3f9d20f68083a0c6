"""Launch an LLM serving profile across all ranks of a small cluster, prove what runs, and test it with evidence."""

__version__ = "0.1.0"
