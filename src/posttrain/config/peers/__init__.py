"""What other libraries call things, and recipes made of their scripts."""
