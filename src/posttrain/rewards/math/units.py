"""Units of measurement after a number: whole words of a table, with dimensions and factors.

Up to three words that no table knows are a label (``12 apples``), unless one acts on the number.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from posttrain.rewards.math.words import acts_on_number, scale_of

Dimension = tuple[tuple[str, int], ...]
Measure = tuple[Fraction, Dimension]  # a factor, and the dimension that it is of

# Names of units, and each in terms of a unit above it; without that it is a new dimension.
# A line that begins with * takes the prefixes of the metric system.
_TABLE = """
*m meter metre
*g gram gramme
*s sec second
*A amp ampere
*K kelvin
*mol mole
*L l liter litre = 0.001 m^3
*N newton = kg m/s^2
*J joule = N m
Nm = N m
*W watt = J/s
*Pa pascal = N/m^2
*Hz hertz = s^-1
*C coulomb = A s
*V volt = J/C
*Ω ohm = V/A
*F farad = C/V
*T tesla = V s/m^2
*H henry = V s/A
*eV electronvolt
dm = 0.1 m
in inch = 0.0254 m
ft foot = 0.3048 m
yd yard = 0.9144 m
mi mile = 1609.344 m
Å angstrom = 0.0000000001 m
AU au = 149597870700 m
ly lightyear = 9460730472580800 m
*pc parsec = 30856775814913673 m
lb pound = 453.59237 g
oz ounce = 28.349523125 g
tonne ton = 1000 kg
min minute = 60 s
h hr hour = 60 min
kWh = kW h
day = 24 h
week = 7 day
yr year
month = 1/12 year
decade = 10 year
century = 100 year
gal gallon = 3.785411784 L
qt quart = 0.25 gal
pt pint = 0.125 gal
cup = 0.0625 gal
cc = 1 cm^3
acre = 4840 yd^2
ha hectare = 10000 m^2
mph = mi/h
kph kmh kmph = km/h
fps = ft/s
erg = 0.0000001 J
*cal calorie = 4.184 J
dyne dyn = 0.00001 N
G gauss = 0.0001 T
atm atmosphere = 101325 Pa
bar = 100000 Pa
$ dollar buck USD
¢ cent penny = 0.01 $
nickel = 0.05 $
dime = 0.1 $
€ euro EUR
£ GBP
¥ yen JPY
₹ rupee Rs INR
° degree deg
rad radian
°C celsius
°F fahrenheit
% percent
unit
"""
_PREFIXES = {
    "k kilo": 3, "M mega": 6, "G giga": 9, "T tera": 12, "hecto": 2, "deci": -1, "c centi": -2,
    "m milli": -3, "μ u micro": -6, "n nano": -9, "p pico": -12, "f femto": -15,
}  # fmt: skip
_PLURALS = {"feet": "foot", "inches": "inch", "centuries": "century", "pennies": "penny"}
_IRREGULAR = {
    "children": "child", "people": "person", "men": "man", "women": "woman", "mice": "mouse",
    "geese": "goose", "teeth": "tooth",
}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}

# Units right after a number, though their letters could also be a product of symbols.
_GLUED = frozenset({
    "cm", "mm", "km", "kg", "ft", "lb", "lbs", "oz", "ml", "mL", "hr", "hrs", "min", "sec", "mph",
    "kph", "Hz", "kHz", "MHz", "GHz", "kJ", "kW", "kcal", "mol", "kPa", "MPa", "eV", "keV", "MeV",
    "GeV", "nm",
})  # fmt: skip
_NAME = re.compile(r"(°[CF]?|[a-zA-Z$€£¥₹%¢ΩÅμ][a-zA-Z.]*)(?:(?:\^|(?<=[a-zA-Z]))(-?[0-9]{1,2}))?")
ROMAN = re.compile(r"\\text\s?\{([^{}]*)\}")
_LABEL = re.compile(r"[a-zA-Z]{3,}(?:[ -](?:[a-zA-Z]{2,}|a)){0,2}\.?")


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
        return self.dimension == (("%", 1),)

    def agrees(self, other: Unit) -> bool:
        """Whether the one can be converted to the other."""
        if self.label and other.label:
            return self.label <= other.label or other.label <= self.label
        return self.dimension == other.dimension and not self.label and not other.label

    def is_part_of(self, larger: Unit) -> bool:
        """Whether it measures what a larger unit leaves over: inches after feet."""
        alike = not self.label and self.agrees(larger) and bool(self.dimension)
        return alike and self.factor < larger.factor


@functools.lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    r"""The unit that a text is, with the space between it and the number; None where it is none.

    >>> parse_unit("square feet").dimension, parse_unit(r"\text{km}/\text{h}").factor
    ((('m', 2),), Fraction(5, 18))
    >>> parse_unit("million dollars").scale, parse_unit("xy") is None
    (Fraction(1000000, 1), True)
    """
    if text.lstrip().startswith("\\pmod"):
        return Unit(label=frozenset({text.strip()}))
    is_bare = "\\text" not in text
    words = _words(text)
    scale = Fraction(1)
    while words and (factor := scale_of(words[0])):
        if factor < 1 and len(words) > 1:  # words, not a fraction: 5 fifth graders
            return None
        scale, words = scale * factor, words[1:]
        words = words[1:] if words[:1] == ["of"] else words
    if not words:
        return Unit(scale) if scale != 1 else None
    found = _product(words, _units())
    if found is None:
        return _labelled(" ".join(words), scale=scale)
    first = re.split("[^a-zA-Z]", words[0])[0]
    sure = text[0] == " " or first in _GLUED or len(first) > 3 or not first
    names = re.findall("[a-zA-Z]+", " ".join(words))
    # Letters that may be a product of symbols: 3 m g.
    letters = max(map(len, names), default=2) == 1 < len(names) and "/" not in text
    certain = not is_bare or scale != 1 or (sure and not letters)
    return Unit(scale, *found, certain=certain)


def _words(text: str) -> list[str]:
    text = ROMAN.sub(
        r" \1 ", re.sub(r"\\mu\s?(\\text\s?\{\s?)?", r"\1μ", text).replace("\\Omega", "Ω")
    )
    return re.sub(r"\s*\^\s*", "^", re.sub(r"[{}*\\]", " ", text).replace("^ ", "^")).split()


def _product(words: Sequence[str], table: Mapping[str, Measure]) -> Measure | None:
    """Factor and dimension of a product or quotient of units of the table; None if it is none."""
    factor, exponents, sign, power = Fraction(1), Counter[str](), 1, 1
    last: tuple[Measure, int] | None = None
    for piece in " ".join(words).replace("/", " / ").replace(" per ", " / ").split():
        if piece == "/":
            sign = -1
            continue
        if piece.lower() in _POWERS and power == 1:
            power = _POWERS[piece.lower()]
            continue
        if piece in _POWERS_AFTER and last is not None:
            unit, times = last[0], last[1] * (_POWERS_AFTER[piece] - 1)
        else:
            match = _NAME.fullmatch(piece)
            known = _known(match[1], table) if match else None
            if match is None or known is None:
                return None
            unit, times = known, sign * power * int(match[2] or 1)
        factor *= unit[0] ** times
        for base, exponent in unit[1]:
            exponents[base] += exponent * times
        last, power = (unit, times), 1
    if last is None or power != 1:
        return None
    return factor, tuple(sorted((base, e) for base, e in exponents.items() if e))


def _known(name: str, table: Mapping[str, Measure]) -> Measure | None:
    name = name.rstrip(".") or name
    folded = name.lower() if len(name) > 3 else name
    forms = (name, folded, _PLURALS.get(folded, ""), folded.removesuffix("s"))
    return next((table[f] for f in forms if f in table and (len(f) > 1 or f == name)), None)


@functools.cache
def _units() -> dict[str, Measure]:
    table: dict[str, Measure] = {}
    for line in _TABLE.strip().splitlines():
        left, _, right = line.partition(" = ")
        names = left.lstrip("*").split()
        value: Measure = Fraction(1), ((names[0], 1),)
        if right:
            digits, _, of = right.partition(" ") if right[0].isdigit() else ("1", "", right)
            factor, dimension = _product(of.split(), table) or value
            value = Fraction(digits) * factor, dimension
        for name in names:
            table[name] = value
            for prefixes, exponent in _PREFIXES.items() if line[0] == "*" else ():
                *short, long = prefixes.split()
                for prefix in [long] if len(name) > 3 else short:
                    table[prefix + name] = value[0] * Fraction(10) ** exponent, value[1]
    return table


def _labelled(text: str, *, scale: Fraction) -> Unit | None:
    words = re.findall("[a-z]+", text.lower())
    if not _LABEL.fullmatch(text) or any(map(acts_on_number, words)):
        return None
    certain = len(words[0]) > 3 or len(words) > 1 or scale != 1
    return Unit(scale, label=frozenset(map(_stem, words)), certain=certain)


def _stem(word: str) -> str:
    """What a word has in common with its plural: boxes and box, babies and baby."""
    word = _IRREGULAR.get(word, word)
    if len(word) > 3 and not word.endswith("ss"):
        word = word.removesuffix("s")
    return re.sub("y$", "i", word.removesuffix("e"))
