"""The numbers of the arithmetic contract, shared by every backend.

Polynomials are minimax fits; `tools/fit_polynomials.py` derives them. A value for binary32 is one of its numbers, so
that converting it is exact under any rounding mode.
"""

from typing import Final

# --- Order-free sums (contract, rules 4 and 5) -----------------------------------------------------------------------
QUANTUM_BITS: Final = 44  # quantum = 2 ** (exponent of the largest term - 44)
LIMB_SHIFT_32: Final = 23  # binary32: an integer term is high * 2**23 + low, both within 2**22
LIMB_SHIFT_64: Final = 44  # binary64: the second limb resolves another 44 bits, 88 in all
SHORT_QUANTUM_BITS: Final = 30  # 16-bit softmax rows up to SHORT_ROW terms
SHORT_ROW: Final = 1 << 18

# Adding MAGIC rounds to an integer that stands in the low mantissa bits of the sum.
MAGIC_32: Final = 12582912.0  # 1.5 * 2**23
MAGIC_64: Final = 6755399441055744.0  # 1.5 * 2**52

# --- Exponential (rule 6) --------------------------------------------------------------------------------------------
LOG2E_32: Final = 1.4426950216293335
LOG2E_64: Final = 1.4426950408889634
# ln 2 rounded, and the rest of it. x - k * LN2 is one fma and exact in every reduction that occurs.
LN2_32: Final = 0.6931471824645996
LN2_REST_32: Final = -1.9046542121259336e-09
LN2_64: Final = 0.6931471805599453
LN2_REST_64: Final = 2.3190468138462996e-17
# exp(r) = 1 + r + r^2 * P(r) on |r| <= ln(2) / 2, lowest power first
EXP_POLY_32: Final = (
    0.4999999403953552,
    0.1666651964187622,
    0.04166839271783829,
    0.0083687799051404,
    0.0013814496342092752,
)
EXP_POLY_64: Final = (
    0.5,
    0.16666666666666682,
    0.04166666666666609,
    0.008333333333316923,
    0.0013888888889117337,
    0.00019841269896667585,
    2.480158692439055e-05,
    2.755723457184504e-06,
    2.7557583025746286e-07,
    2.5112140072652287e-08,
    2.0826453802418198e-09,
)
# The shorter exp: 2**f = 1 + f * P(f) on |f| <= 1/2, relative error 2**-18.4
EXP2_POLY_SHORT: Final = (
    0.6931241154670715,
    0.24024103581905365,
    0.05590721592307091,
    0.009582792408764362,
)
SHORT_MIN_EXPONENT: Final = -156.0  # below it every 16-bit result of a softmax is zero
SHORT_NORMAL: Final = (-126.0, 128.0)  # exponents between which the shorter exp gives a number; below 0, above infinity

# Exponentials inside a softmax are kept times 2**EXP_SCALE, so that none of them underflows before the division.
EXP_SCALE_32: Final = 64
EXP_SCALE_64: Final = 512
# exp of these and of anything below, divided by a sum that holds exp(0), rounds to zero.
EXP_FLOOR_32: Final = -105.0
EXP_FLOOR_64: Final = -746.0
# A row whose maximum m is smaller than this is reduced without subtracting m, which would have to be rounded: the
# exponential is divided by a power of two near exp(m) instead. From here on x - m is exact (Sterbenz) wherever
# exp(x - m) is not negligible.
EXP_DIRECT_32: Final = 256.0
EXP_DIRECT_64: Final = 2048.0
# Beyond these a full exp overflows to infinity.
EXP_CEIL_32: Final = 89.5
EXP_CEIL_64: Final = 710.5

# --- Logarithm (rule 6) ----------------------------------------------------------------------------------------------
# ln 2 in two parts; the first has so few bits that k * LN2_HI is exact for every k that occurs.
LN2_HI_32: Final = 0.693145751953125
LN2_LO_32: Final = 1.428606765330187e-06
LN2_HI_64: Final = 0.6931471803691238
LN2_LO_64: Final = 1.9082149292705877e-10
# log(1 + f) = f - (h - s * (h + R)), h = f^2 / 2, s = f / (2 + f), z = s^2, R = z * P(z)
LOG_POLY_32: Final = (
    0.6666666865348816,
    0.4000028669834137,
    0.28539761900901794,
    0.23542191088199615,
)
LOG_POLY_64: Final = (
    0.6666666666666666,
    0.40000000000003283,
    0.2857142856982817,
    0.22222222554864357,
    0.1818178192052023,
    0.153868525973322,
    0.1325487852740637,
    0.13212422251129372,
)
# log1p reduces its argument only outside this interval; inside, f = x is exact.
LOG1P_NEAR_32: Final = (-0.28999999165534973, 0.4099999964237213)
LOG1P_NEAR_64: Final = (-0.29, 0.41)
SQRT_HALF_BITS_32: Final = 0x3F3504F3  # bits of sqrt(1/2), the lower end of the reduced interval
SQRT_HALF_BITS_64: Final = 0x3FE6A09E667F3BCD

# --- exp(d) - 1, d <= 0 (rule 6) -------------------------------------------------------------------------------------
EXPM1_FLOOR: Final = -64.0  # from here on it rounds to -1

# --- The normal distribution (rule 6) --------------------------------------------------------------------------------
# Phi(-a) = exp(-a^2 / 2) * P(t) / (1 + 1.25 a), t = (a - 5) / (a + 5), for 0 <= a <= REACH, beyond which the
# exponential is zero.
NORMAL_SHIFT: Final = 5.0
NORMAL_SLOPE: Final = 1.25
NORMAL_REACH_32: Final = 16.0
NORMAL_REACH_64: Final = 40.0
NORMAL_DENSITY_32: Final = 0.3989422917366028  # 1 / sqrt(2 pi), the density at 0
NORMAL_DENSITY_64: Final = 0.3989422804014327
NORMAL_POLY_32: Final = (
    0.5576649308204651,
    -0.0785759687423706,
    0.009770900011062622,
    0.032724156975746155,
    -0.044967763125896454,
    0.03652085363864899,
    -0.021194564178586006,
    0.008772517554461956,
    -0.0021873735822737217,
    -9.407314064446837e-05,
    0.00026132637867704034,
)
NORMAL_POLY_64: Final = (
    0.5576649610687956,
    -0.07857596347650816,
    0.009770757560952812,
    0.032723909797553775,
    -0.04496514177888133,
    0.03652467917698568,
    -0.02121086189162765,
    0.008747211917130703,
    -0.002149978107528211,
    -2.382965864934675e-05,
    0.00024302451355161966,
    -6.725008381572462e-05,
    -1.403111495238888e-05,
    1.1643228599963529e-05,
    8.067186840621856e-08,
    -1.6971976517996115e-06,
    1.4056550189812262e-07,
    2.581506485040335e-07,
    -2.9644459993463716e-08,
    -4.29498043819044e-08,
    3.2669625367298116e-09,
    7.202429523283943e-09,
    3.311107331228793e-10,
    -8.57517973613636e-10,
    -1.9189332065286688e-10,
)

LANES = 512  # neighbouring rows that advance together on the CPU when the reduced axis is not the contiguous one
