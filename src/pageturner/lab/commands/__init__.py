"""Commands of the lab: what people type at a terminal, one file for each command."""
