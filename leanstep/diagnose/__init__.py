"""Name the lines that waste a training step."""
