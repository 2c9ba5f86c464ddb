"""Benchmarks that anyone can rerun: `flex-trainer bench NAME`."""
