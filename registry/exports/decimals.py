"""Exact decimal text of integer amounts. Pure."""

NANO_DIGITS = 9


def decimal_text(amount: int, digits: int, *, least: int = 1) -> str:
    """Return `amount / 10**digits` without needless zeros, but with at least `least` digits of a fraction."""
    whole, fraction = divmod(abs(amount), 10**digits)
    shown = f"{fraction:0{digits}}".rstrip("0").ljust(least, "0") if digits else "0" * least
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole}.{shown}" if shown else f"{sign}{whole}"


def nanos_text(nanos: int) -> str:
    """Return an amount in the currency's unit, with all nine digits of its fraction."""
    return decimal_text(nanos, NANO_DIGITS, least=NANO_DIGITS)


def nanos_of(text: str) -> int:
    """Return the amount that `nanos_text` wrote."""
    whole, _, fraction = text.partition(".")
    return int(whole + fraction.ljust(NANO_DIGITS, "0"))


def rounded_quotient(dividend: int, divisor: int) -> int:
    """Return the quotient of two integers that are not negative, rounded half up."""
    return (2 * dividend + divisor) // (2 * divisor)
