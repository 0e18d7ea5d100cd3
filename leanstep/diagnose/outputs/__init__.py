"""Output of findings: terminal, JSON, CI gates."""
