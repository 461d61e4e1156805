"""Units of measurement after a number: whole words of a table, with dimensions and factors.

A word that no table knows is a label (``12 apples``): it may be left out, but not be another.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

Dimension = tuple[tuple[str, int], ...]

# One line is one dimension: what its first names measure, and the factors of the others to it.
# Names are divided by spaces; ``kilo-`` and its kin are made below for the lines that begin with *.
_TABLE = """
*length = m meter metre 1
*mass = g gram gramme 1
*time = s sec second 1
*volume = L l liter litre 1
*current = A amp ampere 1
*voltage = V volt 1
*power = W watt 1
*energy = J joule 1
*force = N newton 1
*pressure = Pa pascal 1
*frequency = Hz hertz 1
*charge = C coulomb 1
*resistance = Ω ohm 1
*amount = mol mole 1
*kelvin = K kelvin 1
*electronvolt = eV electronvolt 1
*capacitance = F farad 1
*field = T tesla 1
*inductance = H henry 1
length = in inch 0.0254, ft foot 0.3048, yd yard 0.9144, mi mile 1609.344, Å angstrom 0.0000000001
length = ly lightyear 9460730472580800, AU au 149597870700, pc parsec 30856775814913673, kpc 30856775814913673000, Mpc 30856775814913673000000
mass = lb pound 453.59237, oz ounce 28.349523125, tonne ton 1000000, stone 6350.29318
time = min minute 60, h hr hour 3600, day 86400, week 604800, fortnight 1209600, decade 315360000, year yr 31536000, month 2628000, century 3153600000
volume = gal gallon 3.785411784, qt quart 0.946352946, pt pint 0.473176473, cup 0.2365882365, cc 0.001
money = $ dollar buck USD 1, cent ¢ penny 0.01, nickel 0.05, dime 0.1, quarter 0.25
euro = € euro EUR 1
sterling = £ GBP 1
yen = ¥ yen JPY 1
rupee = ₹ rupee Rs INR 1
angle = ° degree deg 1
radian = rad radian 1
celsius = °C celsius 1
fahrenheit = °F fahrenheit 1
percent = % percent 1
unit = unit 1
energy = erg 0.0000001, cal calorie 4.184, kcal kilocalorie 4184
force = dyne dyn 0.00001
field = G gauss 0.0001
pressure = atm atmosphere 101325, bar 100000
"""
_LIKE = {  # by what they are made of
    "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "ft/s", "acre": "4840 yd^2",
    "ha": "10000 m^2", "hectare": "10000 m^2",
}  # fmt: skip
_DERIVED = {  # of length, mass (in grams), time: so that N m is J, and 1000 cm^3 a litre
    "volume": ("length^3", "0.001"), "force": ("mass length/time^2", "1000"),
    "energy": ("mass length^2/time^2", "1000"), "power": ("mass length^2/time^3", "1000"),
    "pressure": ("mass/length time^2", "1000"), "frequency": ("1/time", "1"),
    "charge": ("current time", "1"), "voltage": ("mass length^2/current time^3", "1000"),
}  # fmt: skip
_PREFIXES = {
    "k kilo": 3, "M mega": 6, "G giga": 9, "T tera": 12, "c centi": -2, "d deci": -1, "m milli": -3,
    "μ µ u micro": -6, "n nano": -9, "p pico": -12, "f femto": -15, "h hecto": 2,
}  # fmt: skip
_SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
_PLURALS = {"feet": "foot", "inches": "inch", "centuries": "century", "pennies": "penny"}
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}

# Written right after a number these are units, though their letters might be a product's.
_GLUED = {
    "cm", "mm", "km", "kg", "ft", "lb", "lbs", "oz", "ml", "mL", "hr", "hrs", "min", "sec", "mph", "kph",
    "Hz", "kHz", "MHz", "GHz", "kJ", "kW", "kcal", "mol", "kPa", "MPa", "eV", "keV", "MeV", "GeV", "nm",
}  # fmt: skip
_NO_LABELS = frozenset(
    "is are was were be not no if then than but because since for so as with when where which that "
    "this the it its i we you he she they or and at in on to from by also only maybe perhaps either "
    "answer solution wrong right correct incorrect number times over divided plus minus mod base "
    "squared".split()
)
_NAME = re.compile(r"([a-zA-Z°$€£¥₹%¢ΩÅµμ][a-zA-Z.]*|°[CF]?)(?:\^?\{?(-?[0-9]{1,2})\}?)?")
_WRAPPER = re.compile(r"\\text\s?\{([^{}]*)\}")
_LABEL = re.compile(r"[a-zA-Z]+(?:[ -][a-zA-Z]+){0,3}\.?")


@dataclass(frozen=True)
class Unit:
    """What follows a number: ``scale`` belongs to the number, the rest says what it measures."""

    scale: Fraction = Fraction(1)
    factor: Fraction = Fraction(1)
    dimension: Dimension = ()
    label: frozenset[str] = frozenset()
    certain: bool = True
    """Whether it can be nothing else: the m of ``5m`` may be a symbol."""

    @property
    def is_percent(self) -> bool:
        """Whether it is per cent."""
        return self.dimension == (("percent", 1),)

    @property
    def is_none(self) -> bool:
        """Whether only a number word stood there, as in ``2 million``."""
        return not self.dimension and not self.label

    def agrees(self, other: Unit) -> bool:
        """Whether the one can be converted to the other."""
        if self.label and other.label:
            return self.label <= other.label or other.label <= self.label
        return self.dimension == other.dimension and not self.label and not other.label


@functools.lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    r"""The unit that a text is; None where it is none.

    >>> parse_unit("square feet").dimension, parse_unit(r"\text{km}/\text{h}").factor
    ((('length', 2),), Fraction(5, 18))
    >>> parse_unit("million dollars").scale, parse_unit("xy") is None
    (Fraction(1000000, 1), True)
    """
    if text.lstrip().startswith("\\pmod"):  # 5 (mod 7) may be left out, but not be another
        return Unit(label=frozenset({text.strip()}))
    bare = "\\text" not in text
    glued = bare and not text[:1].isspace()
    text = _WRAPPER.sub(r" \1 ", re.sub(r"\\mu\s?", "μ", text).replace(r"\Omega", "Ω"))
    text = text.replace("\\%", "%")
    words = re.sub(r"\s*\^\s*", "^", re.sub("[{}*]", " ", text)).split()
    scale = Fraction(1)
    while words and words[0].lower().removesuffix("s") in _SCALES:
        scale *= _SCALES[words.pop(0).lower().removesuffix("s")]
        words = words[1:] if words[:1] == ["of"] else words
    if not words:
        return Unit(scale) if scale != 1 else None
    unit = _measured(words)
    if unit is None:
        label = " ".join(words)
        return _labelled(label, scale=scale) if _LABEL.fullmatch(label) else None
    first = re.split("[^a-zA-Z]", words[0])[0]
    letters = bare and len(words) > 1 and all(len(word) == 1 for word in words)  # 3 m g
    certain = not letters and (not glued or first in _GLUED or len(first) > 3 or not first)
    return Unit(scale, unit.factor, unit.dimension, certain=certain or scale != 1)


def _measured(words: list[str]) -> Unit | None:
    """A unit of the table, or a product or quotient of some."""
    factor, dimension, sign, power = Fraction(1), Counter[str](), 1, 1
    pieces = " ".join(words).replace("/", " / ").replace(" per ", " / ").split()
    last: tuple[Fraction, Dimension, int] | None = None
    for piece in pieces:
        if piece == "/":
            sign = -1
            continue
        if piece.lower() in _POWERS and (last is None or piece.endswith("ed")) and power == 1:
            exponent = _POWERS[piece.lower()]
            if last is None:
                power = exponent
                continue
            name, times = last[:2], last[2] * (exponent - 1)
        else:
            match = _NAME.fullmatch(piece)
            known = _known(match[1]) if match else None
            if match is None or known is None:
                return None
            name, times = known, sign * power * int(match[2] or 1)
        factor *= name[0] ** times
        for base, exponent in name[1]:
            dimension[base] += exponent * times
        last, power = (name[0], name[1], times), 1
    if last is None or power != 1 or pieces[-1] == "/":
        return None
    return Unit(Fraction(1), factor, tuple(sorted((b, e) for b, e in dimension.items() if e)))


def _known(name: str) -> tuple[Fraction, Dimension] | None:
    table = _units()
    name = name.rstrip(".") or name
    folded = name.lower() if len(name) > 3 else name
    for form in (name, folded, _PLURALS.get(folded), folded[:-1] if folded[-1] == "s" else None):
        if form and form in table and not (form is not name and len(form) < 2):
            return table[form]
    return None


@functools.cache
def _units() -> dict[str, tuple[Fraction, Dimension]]:
    table: dict[str, tuple[Fraction, Dimension]] = {}
    for line in filter(None, _TABLE.splitlines()):
        base, _, rest = line.partition(" = ")
        for entry in rest.split(", "):
            *names, number = entry.split()
            factor, dimension = _derived(base.lstrip("*"), Fraction(number))
            for name in names:
                table[name] = factor, dimension
                for prefixes, exponent in _PREFIXES.items() if base[0] == "*" else ():
                    long = len(name) > 3
                    for prefix in prefixes.split():
                        if (len(prefix) > 2) == long:
                            value = factor * Fraction(10) ** exponent
                            table.setdefault(prefix + name, (value, dimension))
    for name, made_of in _LIKE.items():
        number, _, of = made_of.rpartition(" ") if made_of[0].isdigit() else ("1", "", made_of)
        table[name] = _combined(table, of, factor=Fraction(number))
    return table


def _combined(
    table: dict[str, tuple[Fraction, Dimension]], text: str, *, factor: Fraction
) -> tuple[Fraction, Dimension]:
    above, _, below = text.partition("/")
    exponents = Counter[str]()
    for part, sign in ((above, 1), (below, -1)):
        for piece in part.split():
            name, _, power = piece.partition("^")
            times = sign * int(power or 1)
            factor *= table[name][0] ** times
            for base, exponent in table[name][1]:
                exponents[base] += exponent * times
    return factor, tuple(sorted(exponents.items()))


def _derived(base: str, factor: Fraction) -> tuple[Fraction, Dimension]:
    if base not in _DERIVED:
        return factor, ((base, 1),)
    made_of, times = _DERIVED[base]
    bases = {name: (Fraction(1), ((name, 1),)) for name in ("length", "mass", "time", "current")}
    of = made_of.removeprefix("1")
    return _combined(bases, of, factor=factor * Fraction(times))


def _labelled(text: str, *, scale: Fraction) -> Unit | None:
    words = [word.lower().strip(".-") for word in re.split("[ -]", text)]
    if len(words[0]) < 3 or _NO_LABELS & set(words):
        return None
    singular = (w[:-1] if len(w) > 3 and w.endswith("s") else w for w in words)
    certain = len(words[0]) >= 4 or scale != 1
    return Unit(scale, label=frozenset(singular), certain=certain)
