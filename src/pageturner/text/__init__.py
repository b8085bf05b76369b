"""Text: everything between strings and tokens that a server and the offline API share."""
