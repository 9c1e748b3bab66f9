import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from nas.attention.reference import attention_reference, row_bounds

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nas.attention import cuda_triton

pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing")  # Triton's own, under Python 3.13
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)
FEW = 1 if INTERPRETED else 2  # sequences, and heads: the interpreter takes as long for each as for the first


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "-p", "no:cacheprovider", "--noconftest", __file__]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def heads(
    length: int, head_dim: int, dtype: torch.dtype, device: str, *, temperature: float = 1.0, num: int = 2
) -> list[Tensor]:
    """Queries, keys and values as a packed linear lays them out, and temperatures between once and twice the given."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(num, length, 3, num, head_dim, generator=generator).to(device, dtype)
    temperatures = temperature * (1 + torch.rand(num, length, generator=generator)).to(device)
    return [part.requires_grad_() for part in (*packed.permute(2, 0, 3, 1, 4), temperatures)]


def with_gradients(attend, parts: list[Tensor]) -> list[Tensor]:
    """Output, entropy, and the gradients of a weighted sum of both; in double precision."""
    output, entropy = attend(*parts)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(result.shape, generator=generator).to(result) for result in (output, entropy)]
    gradients = torch.autograd.grad((output, entropy), parts, weights)
    return [tensor.detach().double() for tensor in (output, entropy, *gradients)]


def exact(parts: list[Tensor]) -> list[Tensor]:
    wide = [part.detach().double().requires_grad_() for part in parts]
    return with_gradients(lambda q, k, v, t: attention_reference(q, k, v, temperature=t), wide)


def distances(parts: list[Tensor]) -> list[float]:
    """Largest error of each result over the largest exact number in it."""
    pairs = zip(with_gradients(cuda_triton.attend, parts), exact(parts), strict=True)
    return [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]


@on_every_device
@pytest.mark.parametrize(
    ("length", "head_dim", "temperature", "num"),
    [(100, 8, 1.0, 2), (64, 16, 0.1, FEW), (61, 40, 1.0, FEW), (31, 128, 1.0, FEW)],
)
def test_values_and_gradients_are_the_references(length, head_dim, temperature, num, device):
    parts = heads(length, head_dim, torch.float32, device, temperature=temperature, num=num)
    assert max(distances(parts)) < 2e-5


@on_every_device
def test_compiled_code_may_call_the_operators(device):
    parts = [part.detach() for part in heads(18, 8, torch.float32, device)]
    output, entropy, lse = torch.ops.nas.causal_attention(*parts)
    torch.library.opcheck(torch.ops.nas.causal_attention, tuple(part.clone().requires_grad_() for part in parts))
    torch.library.opcheck(
        torch.ops.nas.causal_attention_backward, (*parts, output, entropy, lse, output.cos(), entropy.cos())
    )


@on_every_device
def test_one_token_attends_to_itself(device):
    parts = heads(1, 8, torch.float32, device)
    output, entropy, dq, dk, _, dt = with_gradients(cuda_triton.attend, parts)
    torch.testing.assert_close(output, parts[2].detach().double())
    assert all(float(zero.abs().max()) < 1e-6 for zero in (entropy, dq, dk, dt))


@on_every_device
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 5e-2)])
def test_half_precision_is_as_good_as_its_type(dtype, bound, device, monkeypatch):
    if INTERPRETED:
        widen_products(monkeypatch)
    parts = heads(100, 16, dtype, device, temperature=0.1, num=FEW)
    assert max(distances(parts)) < bound
    assert cuda_triton.attend(*parts)[0].dtype == dtype


@on_every_device
@pytest.mark.parametrize("temperature", [1.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_exact_at_low_temperatures(temperature, dtype, device, monkeypatch):
    if INTERPRETED:
        widen_products(monkeypatch)
    parts = heads(100, 8, dtype, device, temperature=temperature, num=FEW)
    entropy = cuda_triton.attend(*parts)[1].detach()
    expected = exact(parts)[1]
    assert entropy.dtype == torch.float32
    assert float((entropy - expected).abs().max()) < 1e-4  # the bar at these scores, up to some hundreds, is 1e-3
    assert float(entropy.min()) > -1e-5
    assert float((entropy - row_bounds(100).to(device)).max()) < 1e-5


@on_every_device
def test_any_layout_of_the_features_will_do(device):
    parts = heads(20, 8, torch.float32, device)
    strided = [part.detach().mT.contiguous().mT.requires_grad_() for part in parts[:3]]
    assert strided[0].stride(-1) != 1
    for ours, theirs in zip(
        with_gradients(cuda_triton.attend, [*strided, parts[3]]), with_gradients(cuda_triton.attend, parts), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_wide_heads_and_doubles_are_refused():
    for shape, dtype in (((1, 1, 4, 136), torch.float32), ((1, 1, 4, 8), torch.float64)):
        queries, keys, values = torch.zeros(3, *shape, dtype=dtype)
        with pytest.raises(ValueError, match="attention on CUDA takes heads of at most 128 features"):
            cuda_triton.attend(queries, keys, values, None)


KERNELS = ("_forward", "_backward_queries", "_backward_keys")
POINTERS = ("queries", "keys", "values", "output", "output_grad", "dq", "dk", "dv")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "num_bytes"),
    [(64, "bf16", 2), *(pytest.param(dim, "fp32", 4, marks=pytest.mark.slow) for dim in (16, 32, 64, 128))],
)
def test_kernels_compile_for_an_rtx_3090(name, head_dim, dtype, num_bytes):
    kernel = getattr(cuda_triton, name)
    block, padded_dim = cuda_triton._tile_shape(head_dim, num_bytes)
    constants = {"block": block, "padded_dim": padded_dim}

    def kind(argument: str) -> str | tuple[str, ...]:
        if argument in POINTERS:
            return f"*{dtype}"
        if argument.endswith("strides"):
            return ("i32",) * 3
        kinds = {"scale": "fp32", "block": "constexpr", "padded_dim": "constexpr"}
        return kinds.get(argument, "i32" if argument in ("num_heads", "length", "head_dim") else "*fp32")

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 86, 32), options=cuda_triton.OPTIONS)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 * 1024  # bytes a block may have there (CUDA C++ programming guide, 8.6)


def widen_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as the 16-bit integers of its bits and multiplies matrices of those as they are."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest)
    )
