"""The user's script: running it, its steps, its lines and its host syncs; one meaning for every command."""
