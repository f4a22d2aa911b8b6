"""The studies. Each one answers a question and leaves a record."""
