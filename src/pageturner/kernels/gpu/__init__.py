"""The backend for NVIDIA GPUs: kernels compiled ahead of time, and what launches them."""
