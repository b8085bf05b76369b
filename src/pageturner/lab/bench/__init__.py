"""Benchmarks of engines, servers and kernels."""
