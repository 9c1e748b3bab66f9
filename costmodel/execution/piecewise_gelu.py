"""GELU by polynomials between thresholds: comparisons and products, but no exponential and no division.

    gelu(x) = 0 below -5,  cubic(x) below -1.97,  x / 2 + even(x) below 3,  x above

GELU minus x / 2 is an even function, hence the even polynomial, of degree 6. The greatest error is 0.0104, at x = 2.72.

Source: thresholds and degrees of Lu et al. 2023, BumbleBee, https://eprint.iacr.org/2023/1678. The coefficients are a
least-squares fit to GELU on Chebyshev's points, which `tests/costmodel/execution/test_piecewise_gelu.py` repeats. They
are multiples of 2^-18, the engine's least number by default: half of it moves 3^6 times as much at x = 3, 0.0014.
"""

THRESHOLDS = (-5.0, -1.97, 3.0)
CUBIC = (-0.3805503845214844, -0.2882499694824219, -0.07190322875976562, -0.0059051513671875)  # of 1, x, x^2, x^3
EVEN = (0.0102691650390625, 0.3566856384277344, -0.036548614501953125, 0.001708984375)  # of 1, x^2, x^4, x^6
