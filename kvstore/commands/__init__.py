"""Bodies of the commands; ``kvstore.cli`` says which there are and imports each by need."""
