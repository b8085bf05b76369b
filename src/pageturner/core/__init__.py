"""The core: requests, blocks and the scheduler, as plain functions on ints and lists.

Imports only the standard library. Knows no clock, no I/O, no arrays, no threads.
"""
