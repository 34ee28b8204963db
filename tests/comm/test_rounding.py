"""Numbers in fewer bits: rounding errors, and the treatment of numbers that are not finite."""

import math

import pytest
import torch
from torch.testing import assert_close

from _low_bits import noise_like, rounded
from composable_shard._comm.rounding import dequantise, quantise, scales_of, to_bf16
from composable_shard._policies import Wire

FORMS = ("fp8", "int8")
STEPS = {"fp8": 2.0**-4, "int8": 0.5 / 127}  # the largest error, relative to the number (fp8) or block (int8)


def through(blocks, form, noise=None, dtype=torch.float32):
    codes = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty(*blocks.shape[:-1], 1)
    quantise(codes, scales, blocks, form, noise)
    out = torch.empty(blocks.shape, dtype=dtype)
    dequantise(out, codes, scales, form)
    return out


def noise_of(blocks, seed=0):
    return noise_like(blocks, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_rounding_error_is_at_most_half_a_step(form, dtype):
    torch.manual_seed(0)
    blocks = (torch.randn(50, 64) * 10.0 ** torch.randint(-3, 3, (50, 1))).to(dtype)
    blocks, error = blocks.double(), (through(blocks, form).double() - blocks.double()).abs()
    largest = blocks.abs().amax(-1, keepdim=True)
    allowed = largest * STEPS["int8"] if form == "int8" else (blocks.abs() * STEPS["fp8"]).clamp(min=largest * 2**-19)
    assert torch.all(error <= allowed * (1 + 1e-5))


@pytest.mark.parametrize("form", FORMS)
def test_only_a_block_with_a_nonfinite_number_becomes_nan(form):
    blocks = torch.ones(4, 8)
    blocks[1, 3], blocks[2, 0], blocks[3, 7] = math.nan, math.inf, -math.inf
    for noise in (None, noise_of(blocks)):
        out = through(blocks, form, noise)
        assert_close(out[0], torch.ones(8))
        assert torch.isnan(out[1:]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("noisy", [False, True])
def test_zeros_stay_zeros_and_denormal_numbers_stay_finite(form, noisy):
    blocks = torch.tensor([[0.0, -0.0], [1e-40, -1e-40], [1e-45, 0.0], [3e38, -3e38], [1e-38, 1e30]])
    out = through(blocks, form, noise_of(blocks) if noisy else None)
    assert torch.equal(out[0], torch.zeros(2))
    assert torch.isfinite(out).all()
    assert out[3].abs().max() <= 3.0001e38
    assert_close(out[3], blocks[3], rtol=0.07, atol=0.0)
    assert out[1:3].abs().max() <= torch.finfo(torch.float32).tiny


def test_fp8_codes_are_decoded_as_by_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    out = torch.empty(2, 128)
    dequantise(out, codes, torch.ones(2, 1), "fp8")
    expected = codes.view(torch.float8_e4m3fn).float()
    finite = ~torch.isnan(expected)  # the code of NaN is never sent, because the scale is NaN instead
    assert torch.equal(out[finite], expected[finite])


@pytest.mark.parametrize("form", FORMS)
def test_stochastic_rounding_stays_within_a_step_and_has_the_right_mean(form):
    torch.manual_seed(0)
    block = torch.randn(1, 64)
    block[0, :4] = torch.tensor([0.0, 1e-4, -2e-3, 4.0])
    many = block.expand(4096, 64)
    out = through(many, form, noise_of(many))
    spread = out.max(0).values - out.min(0).values
    allowed = 4.0 / 127 if form == "int8" else (block[0].abs() * 2**-3).clamp(min=4.0 / 448 * 2**-9)
    assert torch.all(spread <= allowed * 1.0001)
    assert torch.all((out.mean(0) - block[0]).abs() <= 5 * allowed / 2 / 4096**0.5)


def test_stochastic_bfloat16_rounding_has_the_right_mean_and_keeps_nonfinite_numbers():
    number = torch.tensor([1.0 + 2**-9, -3.1415927, math.inf, -math.inf, math.nan, 0.0, 1e-40])
    many = number.expand(8192, 7).contiguous()
    out = torch.empty(many.shape, dtype=torch.bfloat16)
    to_bf16(out, many, noise_of(many))
    assert {*out[:, 0].tolist()} == {1.0, 1.0 + 2**-7}
    assert_close(out[:, :2].float().mean(0), number[:2], rtol=0.0, atol=1e-3)
    assert torch.equal(out[:, 2:4].float(), many[:, 2:4])
    assert torch.isnan(out[:, 4]).all()
    assert torch.equal(out[:, 5].float(), many[:, 5])


def test_random_numbers_are_uniform_and_depend_only_on_the_seed():
    numbers = torch.empty(100_003)
    noise = noise_of(numbers)
    assert noise.shape == numbers.shape
    assert abs(noise.float().mean().item() + 0.5) < 250
    assert abs(noise.float().std().item() - 65536 / 12**0.5) < 150
    assert torch.equal(noise, noise_of(numbers))
    assert not torch.equal(noise, noise_of(numbers, seed=1))


@pytest.mark.parametrize("shape", [(6, 40), (7, 3, 24), (5, 257), (0, 16), (4, 0), (9,), (3, 8)])
@pytest.mark.parametrize("form", ["fp8", "int8", "bf16"])
def test_rounding_does_not_depend_on_how_a_parameter_is_sharded(form, shape):
    torch.manual_seed(0)
    whole, wire = torch.randn(shape), Wire(form, 16)
    pieces = [rounded(piece, wire) for piece in whole.split(2)] or [whole]
    assert torch.equal(torch.cat(pieces), rounded(whole, wire))
    if whole.dim() > 1 and whole.shape[1]:
        along = [rounded(piece, wire, dim=1) for piece in whole.split(1, dim=1)]
        assert torch.equal(torch.cat(along, dim=1), rounded(whole, wire, dim=1))


def test_a_1d_parameter_is_not_rounded():
    norm = torch.randn(64)
    assert torch.equal(rounded(norm, Wire("int8", 64)), norm)
    assert torch.equal(rounded(norm, Wire("fp8", 64), dtype=torch.bfloat16), norm.bfloat16())
    assert scales_of(torch.zeros(3, 0, 4), "fp8").shape == (3, 0, 1)
