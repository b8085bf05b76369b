"""Kernels: the Ops protocol (`base`), its executable specification (`reference`) and the native backend."""
