"""One process's life: commands in, events out."""
