"""Processes of which something else started one command each, and told it by the environment which one it is."""
