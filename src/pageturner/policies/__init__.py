"""Policies: what plugs into the scheduler, by name where there are several: batching policies,
queue orders, reserves, groups, predictors, pinned prefixes, admission by latency targets; and how
they are put together.
"""
