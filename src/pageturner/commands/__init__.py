"""Commands: what people type at a terminal, one file for each command. Only the command line imports them."""
