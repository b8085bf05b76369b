"""Hostile files, frames, answers and bodies: what bench/fuzz_files.py, bench/fuzz_frames.py and tests try."""
