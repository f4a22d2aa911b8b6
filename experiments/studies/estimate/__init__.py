"""The study of the error of each method on real gradients."""
