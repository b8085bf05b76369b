"""The lab: workloads, load generators and reports. Measures the engine, or any OpenAI-compatible server."""
