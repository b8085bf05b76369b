"""The lab: traffic, benchmarks, simulator, reports. Measures the engine, or any OpenAI-compatible
server."""
