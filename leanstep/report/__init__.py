"""Output for people: terminal tables and the HTML page."""
