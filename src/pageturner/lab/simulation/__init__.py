"""Simulation: the scheduler with predicted step times, for one engine or a fleet."""
