"""KV: memory of keys and values beyond the block pool. Tiers, survival of a crash, transfer,
events."""
