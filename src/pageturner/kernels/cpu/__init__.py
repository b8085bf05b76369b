"""The backend of CPUs: `Ops` by the C++ kernels in `kernels/native`. The package must not import
them itself."""
