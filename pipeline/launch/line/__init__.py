"""Lines between this process and others elsewhere: encrypted, numbered, and taken up again when they were cut."""
