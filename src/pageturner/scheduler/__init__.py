"""The core: scheduling and paged KV memory, standard library only. Read first: scheduler, blocks,
store."""
