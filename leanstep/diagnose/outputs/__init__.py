"""What findings are turned into: the terminal, JSON, gates for a CI."""
