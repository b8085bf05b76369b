"""Observe: who watches the scheduler and its steps and changes nothing: where the time of a request
went, the step log, the work of a step, counters.
"""
