"""The kernels in Triton's language. Read when they are compiled or interpreted, never by the
product."""
