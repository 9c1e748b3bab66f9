"""How far the stream that a layer leaves is from another model's, in the measure of what that one's layer adds."""

from torch import Tensor

LEAST = 1e-12  # square of what a layer adds, where it adds nothing


def stream_error(made: Tensor, read: Tensor, left: Tensor) -> Tensor:
    """Squared error of what a layer leaves over the square of what the other's adds, at each position on the mean.

    made, read, left: batch x T x d_model, the last two of the other's layer. Positions count alike, since the first
    one's numbers are far larger.
    """
    return ((made - left).square().mean(dim=(0, 2)) * weights_by_position(read, left)).mean()


def weights_by_position(read: Tensor, left: Tensor) -> Tensor:
    """One over the mean square of what a layer adds to the stream, T: the first position's is far larger than others'.

    read, left: what the layer reads and leaves, batch x T x d_model.
    """
    return 1 / (left - read).square().mean(dim=(0, 2)).clamp(min=LEAST)
