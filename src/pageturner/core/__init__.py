"""Core: mechanism. Sequences, blocks, the scheduler, and the form of what plugs into it, on ints and lists.

Imports only the standard library. Knows no clock, no I/O, no arrays, no threads.
"""
