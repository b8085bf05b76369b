"""Batches: files of requests, answered in the background and kept on disk."""
