"""Observe: who watches the scheduler and its steps and changes nothing: counters, step log, time, work."""
