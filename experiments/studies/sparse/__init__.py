"""The study of methods for sparse updates."""
