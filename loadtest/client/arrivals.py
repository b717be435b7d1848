"""Arrival times of an open loop: Poisson or in bursts, at a steady, rising or daily changing rate."""

import argparse
import math
import random
from collections.abc import Iterator
from enum import StrEnum

from scipy.optimize import brentq

from loadtest.measurement.benchmark_program import add_options

_SWING = 0.8  # a day's rate lies between 20 % and 180 % of its mean


class ArrivalShape(StrEnum):
    """Rate of arrivals over time."""

    STEADY = "steady"
    RAMP = "ramp"  # rises from 0 for a period, and then stays
    DIURNAL = "diurnal"  # a sine around the mean, with one day in each period


def arrivals(
    rate: float,
    seed: int,
    *,
    shape: ArrivalShape = ArrivalShape.STEADY,
    burstiness: float = 1.0,
    period_seconds: float = 60.0,
) -> Iterator[float]:
    """Yield arrival times in seconds from the start, without end.

    burstiness: shape of the gamma distribution of the gaps, as in vLLM: 1 is a Poisson process, less comes in bursts.
    Other shapes than steady stretch the time of that process, so that the rate changes and the bursts remain.
    """
    rng, due = random.Random(seed), 0.0
    while True:
        due += rng.gammavariate(burstiness, 1 / burstiness)  # a gap of mean 1
        yield _time_of(due, rate, shape, period_seconds)


def _time_of(num_due: float, rate: float, shape: ArrivalShape, period: float) -> float:
    """Return the time at which this number of arrivals is expected."""
    steady = num_due / rate
    if shape is ArrivalShape.RAMP:
        return math.sqrt(2 * period * steady) if steady < period / 2 else steady + period / 2
    if shape is ArrivalShape.STEADY:
        return steady
    turn = 2 * math.pi / period
    at: float = brentq(lambda t: t + _SWING / turn * (1 - math.cos(turn * t)) - steady, steady - period, steady)
    return at


def add_arrival_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add command-line options for the arrivals of an open loop to a parser, without its rate."""
    shapes = [str(shape) for shape in ArrivalShape]
    options = {
        "arrivals": (shapes[0], "rate over time: ramp rises from 0 to --rate, diurnal swings by four fifths", shapes),
        "burstiness": (1.0, "1: random arrivals (Poisson); below 1: bursts (gamma), as in vLLM"),
        "period-seconds": (60.0, "duration of the rise, or of a day"),
    }
    add_options(parser, options)


def arrivals_from_arguments(arguments: argparse.Namespace) -> Iterator[float]:
    """Return the arrivals of the parsed options `--rate`, `--seed` and those of `add_arrival_arguments`."""
    for name in ("rate", "burstiness", "period_seconds"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0")
    return arrivals(
        arguments.rate,
        arguments.seed,
        shape=ArrivalShape(arguments.arrivals),
        burstiness=arguments.burstiness,
        period_seconds=arguments.period_seconds,
    )
