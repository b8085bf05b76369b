"""Parallel: one model on several devices or NUMA nodes."""
