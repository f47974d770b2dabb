"""The model side: what of a prompt is cached, computing the rest, and handing the whole to decode."""
