"""For tests and benchmarks: tiny models without a hub, functions in a fresh process.

`tiny.py` needs torch and transformers, `processes.py` needs neither, so nothing is imported here.
"""
