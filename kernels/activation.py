"""The activations of feed-forward layers, by the numbers that the kernels know them by."""

from enum import IntEnum


class Activation(IntEnum):
    """The function of the inner features of a feed-forward layer, or of their gates."""

    SILU = 0
    """x * sigmoid(x)."""
    GELU = 1
    """x times the normal distribution function at x (Hendrycks and Gimpel, 2016)."""
    GELU_TANH = 2
    """GELU by its tanh approximation."""
    RELU = 3
