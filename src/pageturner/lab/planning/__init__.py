"""Planning: memory, capacity, and searches for settings and replicas."""
