"""Keep linear FFNs foldable without loss of precision (`nas.conversion.verified_fold`) while they are trained.

A layer with a linear FFN maps the residual stream X to `M X + c`, where M = beta I + W / alpha. Folding turns these
maps into changes of the stream's basis. Training leaves singular values of M close to 0, so that the inverse of the
basis, a product over layers, becomes large and fixed point loses digits. Therefore, every few steps, singular values
below a floor are raised to the floor, by the smallest change of W or, if the FFN has two linears, of `down`. With a
floor relative to the largest singular value, the first layers diverge. A correction costs an SVD in double precision
per layer. Layers with frozen norms before the FFN have no M, and are not changed.

Validation perplexity, number of FFNs folded, and fixed-point error with all FFNs folded / that of the trained model
(limit 2), by floor, with corrections every 32 steps (* every 16), at scale `proxy`, seed 0 and 262,144 tokens:

    architecture           without            0.3                0.5                0.7
    SM+ScFFN               72.0   3/12  13.3  73.1*  4/12  2.8   73.2  12/12  0.9   diverged*
    4xLSLGo-8xoSoFs-o      52.9   0/8   40.6                     53.7   8/8   1.5   49.1*  8/8   0.9
    SM+ScFuFFN             56.4  12/12   1.2                     56.3* 12/12  0.8

    python -m nas.train ARCH --tokens 262144 --recipe.foldable.floor 0.5 --output-dir runs/floored
    python -m nas.export runs/floored --fold --output-dir runs/floored-folded
"""

import torch

from nas.model.decoder import Decoder
from nas.model.layers import FeedForward
from nas.recipe.recipe import Foldable, layers_kept_foldable


@torch.no_grad()
def keep_foldable(model: Decoder, settings: Foldable | None, *, step: int, num_steps: int) -> None:
    """Apply `floor_singular_values` to `layers_kept_foldable` if `step` is num_steps or a multiple of `settings.every`.

    settings: None for never.
    """
    if settings is None or (step % settings.every and step != num_steps):
        return
    for index in layers_kept_foldable(model.architecture):
        ffn = model.layers[index].ffn
        assert isinstance(ffn, FeedForward)
        floor_singular_values(ffn, settings.floor)


@torch.no_grad()
def floor_singular_values(ffn: FeedForward, floor: float) -> None:
    """Raise, in place, singular values below `floor` of the layer's map M (see the module) to it, if M is finite."""
    unit = torch.ones((), dtype=torch.float64, device=next(ffn.parameters()).device)
    alpha, beta = (unit, unit) if ffn.residual is None else (ffn.residual.alpha.double(), ffn.residual.beta.double())
    weight = ffn.down.weight.double() @ ffn.up.weight.double() if ffn.fused is None else ffn.fused.weight.double()
    matrix = beta * torch.eye(len(weight), dtype=weight.dtype, device=weight.device) + weight / alpha  # d x d
    if not matrix.isfinite().all():  # the next loss is not finite either
        return
    left, sizes, right = torch.linalg.svd(matrix)
    lacking = (floor - sizes).clamp(min=0)
    if not lacking.any():
        return
    change = alpha * (left * lacking) @ right
    if ffn.fused is not None:
        ffn.fused.weight.copy_(weight + change)
    else:  # by the smallest change of `down`
        up = ffn.up.weight.double()  # d_ff x d
        inverse = torch.linalg.pinv(up.T @ up, hermitian=True) @ up.T  # d x d_ff
        ffn.down.weight.copy_(ffn.down.weight.double() + change @ inverse)
