"""The SQL environment."""
