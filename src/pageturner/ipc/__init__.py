"""IPC: what the API process and the engine process say to each other, and the ledger that both can
read."""
