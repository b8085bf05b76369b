"""Policies: what plugs into the scheduler: batching policies, queue orders, predictors, admission."""
