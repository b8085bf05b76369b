"""Traffic: traces, generators and scenarios, as requests with times."""
