"""Runs the user's script and defines its steps, source lines and host syncs, the same for every command."""
