"""What people look at: terminal tables and the HTML page."""
