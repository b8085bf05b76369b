"""Hostile model files, made from small sound ones: what bench/fuzz_files.py and the tests load."""
