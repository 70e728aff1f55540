"""Derive the polynomials of `isograd/numerics/constants.py`: minimax fits by the Remez exchange.

    pip install mpmath && python tools/fit_polynomials.py

Each fit minimises the error of the whole function, relative to its value: a coefficient's error near zero costs
nothing there. Coefficients for binary32 are then rounded to it. The weights have a floor, since the exchange needs
them positive.
"""

from collections.abc import Callable

from mpmath import atanh, cos, erfc, exp, linspace, log, lu_solve, matrix, mp, mpf, nstr, pi, sqrt

Function = Callable[[mpf], mpf]
mp.prec = 200


def alternating_extrema(points: list[mpf], errors: list[mpf], count: int) -> list[mpf]:
    """The places of the largest errors of alternating sign."""
    chosen: list[int] = []
    for i, error in enumerate(errors):
        if chosen and error * errors[chosen[-1]] > 0:
            if abs(error) > abs(errors[chosen[-1]]):
                chosen[-1] = i
        else:
            chosen.append(i)
    while len(chosen) > count:
        chosen.pop(0 if abs(errors[chosen[0]]) < abs(errors[chosen[-1]]) else -1)
    return [points[i] for i in chosen]


def minimax(function: Function, weight: Function, degree: int, low: mpf, high: mpf) -> tuple[list[mpf], mpf]:
    """Coefficients, lowest power first, and the largest weighted error on [low, high]."""
    count = degree + 2
    middle, radius = (low + high) / 2, (high - low) / 2
    nodes = [middle - radius * cos(pi * (mpf(2 * i + 1)) / (2 * count)) for i in range(count)]
    points = linspace(low, high, 401)
    coefficients, worst = [], mpf(0)
    for _ in range(30):
        system, values = matrix(count, count), matrix(count, 1)
        for row, x in enumerate(nodes):
            for power in range(degree + 1):
                system[row, power] = x**power
            system[row, degree + 1] = (-1) ** row / weight(x)
            values[row] = function(x)
        solution = lu_solve(system, values)
        coefficients = [solution[i] for i in range(degree + 1)]
        errors = [(function(x) - sum(a * x**i for i, a in enumerate(coefficients))) * weight(x) for x in points]
        worst = max(abs(error) for error in errors)
        extrema = alternating_extrema(points, errors, count)
        if len(extrema) < count or max(abs(a - b) for a, b in zip(extrema, nodes, strict=True)) < mpf(10) ** -12:
            break
        nodes = extrema
    return coefficients, worst


def exponential_rest(r: mpf) -> mpf:
    """(exp(r) - 1 - r) / r^2."""
    return (exp(r) - 1 - r) / r**2 if abs(r) > mpf(10) ** -15 else mpf(1) / 2 + r / 6


def power_rest(f: mpf) -> mpf:
    """(2^f - 1) / f."""
    return (mpf(2) ** f - 1) / f if abs(f) > mpf(10) ** -20 else log(mpf(2))


def logarithm_rest(z: mpf) -> mpf:
    """(2 atanh(s) - 2 s) / (s z) with z = s^2."""
    s = sqrt(z)
    return (2 * atanh(s) - 2 * s) / (s * z) if z > mpf(10) ** -20 else mpf(2) / 3


def normal_rest(t: mpf) -> mpf:
    """(1 + 1.25 a) * Phi(-a) * exp(a^2 / 2) with t = (a - 5) / (a + 5)."""
    a = 5 * (1 + t) / (1 - t)
    return (1 + mpf("1.25") * a) * erfc(a / sqrt(mpf(2))) * exp(a * a / 2) / 2


def main() -> None:
    """Print every polynomial of the contract with its error."""
    half_ln2 = log(mpf(2)) / 2 * mpf("1.001")
    half = mpf("0.5005")
    smallest, largest = mpf(10) ** -12, mpf("0.1716") ** 2

    def of_exp(r: mpf) -> mpf:
        return max(r * r, mpf("0.004")) / exp(r)

    def of_power(f: mpf) -> mpf:
        return max(abs(f), mpf("0.06")) / mpf(2) ** f

    def of_log(z: mpf) -> mpf:
        return max(z, mpf("0.0015")) / 2

    def of_normal(t: mpf) -> mpf:
        return 1 / normal_rest(t)

    reach_32, reach_64 = mpf(16 - 5) / (16 + 5), mpf(40 - 5) / (40 + 5)
    fits = (
        ("EXP_POLY_32", exponential_rest, of_exp, 4, -half_ln2, half_ln2),
        ("EXP_POLY_64", exponential_rest, of_exp, 10, -half_ln2, half_ln2),
        ("EXP2_POLY_SHORT", power_rest, of_power, 3, -half, half),
        ("LOG_POLY_32", logarithm_rest, of_log, 3, smallest, largest),
        ("LOG_POLY_64", logarithm_rest, of_log, 7, smallest, largest),
        ("NORMAL_POLY_32", normal_rest, of_normal, 10, mpf(-1), reach_32),
        ("NORMAL_POLY_64", normal_rest, of_normal, 24, mpf(-1), reach_64),
    )
    for name, function, weight, degree, low, high in fits:
        coefficients, worst = minimax(function, weight, degree, low, high)
        print(f"{name}: error 2^{nstr(log(worst, 2), 4)}")
        for coefficient in coefficients:
            print(f"    {float(coefficient)!r},")


if __name__ == "__main__":
    main()
