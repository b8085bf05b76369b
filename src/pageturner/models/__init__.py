"""Models: a spec (config as data) and one decoder driven by it. Receives its backend as an argument."""
