"""Benchmarks: `python -m kvsift.runtime.bench decode` and `profile`."""
