"""Training over links of a chosen bandwidth: jaxcomm's methods beside PyTorch's."""
