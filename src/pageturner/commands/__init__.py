"""The commands for people at a terminal: chat, generate, doctor. Only the command line imports them."""
