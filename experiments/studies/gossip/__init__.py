"""The study of gossip methods."""
