"""The study of slow workers on a simulated clock."""
