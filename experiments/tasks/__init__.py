"""The tasks: datasets, models, losses and partitions of data over workers."""
