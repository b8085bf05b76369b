"""Kernels: the Ops protocol (base), edits of logits, the numpy reference that defines each
operation, and the native backend. Knows no model family, no request and no policy.
"""
