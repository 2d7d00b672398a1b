"""The Python API: `LLM`, its outputs, and the thread that steps its engine."""
