"""What people look at: terminal tables, the README's figures, the HTML page."""
