"""The `isograd` command. `main.py` has the application, the other modules one command each, and what they share."""
