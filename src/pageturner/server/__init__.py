"""Serve: the API process. Never imports runtime, models or kernels; starts the engine by module
name."""
