"""The study of methods, optimizers and seeds on digits."""
