"""The command line: options, configs, errors and progress."""
