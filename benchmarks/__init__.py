"""Benchmarks: each compares its alternatives side by side, in one run, in interleaved repeats."""
