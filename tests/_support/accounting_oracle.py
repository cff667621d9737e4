"""The truth by another way: inversion of the Laplace transform of the privacy loss, and a closed form for one step."""

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

REACH = 14.0


class Undecided(Exception):
    """The inversion cannot tell: the oracle is silent rather than wrong."""


def log_ratio(q, offset, shift, sigma):
    """log(1 - q + q e^(shift offset / sigma^2)) for a real offset."""
    exponent = shift * offset / sigma**2
    near = np.minimum(exponent, 300.0)
    return np.log1p(q * np.expm1(near)) + (exponent - near)


def losses_at(q, sigma, direction, x):
    """Losses at outputs x, and log P / N(0, sigma^2) there."""
    if direction == "remove":
        return log_ratio(q, x - 0.5, 1.0, sigma), log_ratio(q, x - 0.5, 1.0, sigma)
    if direction == "add":
        return -log_ratio(q, -x - 0.5, 1.0, sigma), np.zeros_like(x)
    ahead = log_ratio(q, x - 0.25, 0.5, sigma)
    return ahead - log_ratio(q, -x - 0.25, 0.5, sigma), ahead


def loss_and_density(q, sigma, direction, x):
    """Losses at equidistant outputs x, and log masses under P."""
    loss, ahead = losses_at(q, sigma, direction, x)
    return loss, -((x / sigma) ** 2) / 2 - np.log(sigma * np.sqrt(2 * np.pi)) + np.log(x[1] - x[0]) + ahead


def nodes(sigma, direction, order):
    """Outputs at which the integrand of moments up to an order is sampled."""
    x = np.arange(-0.5 - REACH * sigma, max(order, 1.0) + 0.5 + REACH * sigma, min(sigma / 12, sigma**2 / 3))
    return -x[::-1] if direction == "add" else x


def transforms(events, direction, order):
    """Log of E_P e^(z loss) of all steps, as a function of complex z with real part < order."""
    parts = [(loss_and_density(q, s, direction, nodes(s, direction, order + 2)), steps) for q, s, steps in events]

    def log_transform(z):
        z = np.atleast_1d(z)
        total = np.zeros(z.shape, dtype=complex)
        for (loss, log_p), steps in parts:
            exponents = log_p + z.real[0] * loss
            top = exponents.max()
            weights = np.exp(exponents - top)
            keep = weights > 1e-22
            values = np.exp(1j * np.outer(z.imag, loss[keep])) @ weights[keep]
            total += steps * (np.log(values) + top)
        return total

    return log_transform


def delta_by_inversion(epsilon, events, direction="remove", factor=1.0):
    """delta(epsilon) = (1/2 pi) int e^(K(z) - z epsilon) / (z (1 + z)) ds along z = t + i s, at the saddle t."""
    grid = np.geomspace(0.05, 200, 60)
    rough = transforms(events, direction, 200.0)
    exponents = [float(rough(t)[0].real) - t * epsilon - np.log(t * (1 + t)) for t in grid]
    t = factor * grid[int(np.argmin(exponents))]
    log_transform = transforms(events, direction, t)
    top = float(log_transform(t)[0].real)
    width = t
    while np.real(log_transform(t + 1j * width)[0]) - top > -45:
        width *= 1.3
        if width > 400 * max(t, 1.0):
            raise Undecided(f"the transform of {events} does not decay: too few steps")
    # trapezoidal rule: exact up to the pole at distance t and to the image of the law 2 pi / step away
    s = np.arange(0.0, width, min(t / 8, 0.1))
    z = t + 1j * s
    values = np.concatenate([log_transform(chunk) for chunk in np.array_split(z, max(1, len(z) // 500))])
    integrand = np.real(np.exp(values - top - 1j * s * epsilon) / (z * (1 + z)))
    integral = np.trapezoid(integrand, s)
    return float(np.exp(top - t * epsilon) * integral / np.pi)


def agreed_delta(epsilon, events, direction="remove"):
    """delta(epsilon) by two lines of integration, which have different errors: they must agree."""
    values = [delta_by_inversion(epsilon, events, direction, factor) for factor in (1.0, 0.8)]
    if not abs(values[0] - values[1]) <= 1e-7 * abs(values[0]):
        raise Undecided(f"the inversions say {values}")
    return values[0]


def epsilon_by_inversion(events, delta, direction="remove", guess=None):
    """The true epsilon of composed Poisson-sampled Gaussians, for steps enough that the transform decays."""
    low, high = (0.0, 50.0) if guess is None else (0.8 * guess, 1.2 * guess)
    return brentq(lambda e: np.log(max(delta_by_inversion(e, events, direction), 1e-300) / delta), low, high, xtol=1e-7)


def delta_bracket(epsilon, events, direction, points=2**19, span=24.0):
    """Bounds (low, high) on delta(epsilon): losses rounded down, and up, to a grid; for few steps.

    The loss runs over -span/2..span/2; what is outside counts as -inf below, and as inf for the upper bound.
    """
    mesh = span / points
    bounds = []
    for rounding in (np.floor, np.ceil):
        spectrum, lost = np.ones(points // 2 + 1, dtype=complex), 0.0
        for q, sigma, steps in events:
            shift = {"remove": 1.0, "add": 0.0, "replace": 0.5}[direction]
            x = np.linspace(-9 * sigma, shift + 9 * sigma, 400_001)
            loss, log_p = loss_and_density(q, sigma, direction, x)
            cells = rounding(loss / mesh).astype(int)
            inside = np.abs(cells) < points // 2
            mass = np.exp(log_p)
            lost += steps * float(mass[~inside & (loss > 0)].sum())
            pmf = np.bincount(cells[inside] % points, weights=mass[inside], minlength=points)
            spectrum *= np.fft.rfft(pmf) ** steps
        composed = np.fft.irfft(spectrum, points)
        grid = (np.arange(points) + points // 2) % points - points // 2
        above = grid * mesh > epsilon
        delta = float(np.sum(composed[above] * -np.expm1(epsilon - grid[above] * mesh)))
        bounds.append(delta + (lost if rounding is np.ceil else 0.0))
    return tuple(bounds)


def delta_of_one_step(epsilon, q, sigma):
    x = sigma**2 * np.log((np.expm1(epsilon) + q) / q) + 0.5
    return (1 - q) * ndtr(-x / sigma) + q * ndtr((1 - x) / sigma) - np.exp(epsilon) * ndtr(-x / sigma)


def epsilon_of_one_step(q, sigma, delta):
    return brentq(lambda e: delta_of_one_step(e, q, sigma) - delta, 0.0, 500.0, xtol=1e-12)
