"""Serve: the API process. Never imports runtime, models or kernels; starts the engine process by module name."""
