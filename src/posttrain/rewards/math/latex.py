r"""Mathematics as text, before any parser sees it: one plain LaTeX for the many ways to write it.

Everything here is linear in the length of the text, and computes with nothing.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable

from posttrain.rewards.math.tokens import FUNCTIONS
from posttrain.rewards.math.units import ROMAN

_UNICODE = {
    "−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*",
    "✕": "*", "÷": "/", "∕": "/", "⁄": "/", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ",
    "∈": r"\in ", "∅": r"\emptyset ", "Ø": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
    "√": r"\surd ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
    "≈": r"\approx ", "→": r"\to ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "…": r"\ldots ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "△": r"\triangle ", "ℏ": r"\hbar ",
    "µ": r"\mu ", "\ufeff": "", "\u200b": "",
    **{chr(0xFEE0 + code): chr(code) for code in range(33, 127)},  # full-width characters
}  # fmt: skip
_GREEK = {
    letter: f"\\{unicodedata.name(letter).split()[-1].lower().replace('lamda', 'lambda')} "
    for letter in "αβγδεζηθικλμνξπρστυφχψω"
} | {"Δ": r"\Delta ", "Ω": r"\Omega ", "Σ": r"\Sigma ", "Φ": r"\Phi ", "Γ": r"\Gamma "}
_TRANSLATE = str.maketrans(_UNICODE | _GREEK)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋"
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789+-")
_DELIMITERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'),
    ("'", "'"), ("``", "''"),
)  # fmt: skip
_ABBREVIATED = ("...", ".m.", " ft.", " in.")  # abbreviations: their dot ends no sentence

# Commands that are synonyms of others, or mean nothing, and their replacements.
_SYNONYMS = {
    "left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits": "",
    "tiny small large Large LARGE huge Huge bf rm it sf tt": "", "lbrack": "[", "rbrack": "]",
    "Vert lVert rVert": r"\|", "bar": r"\overline", "overrightarrow": r"\vec",
    "quad qquad": " ", "dfrac tfrac cfrac": r"\frac", "dbinom tbinom": r"\binom",
    "textbf textrm textit textsf texttt textnormal mathrm mathsf": r"\text",
    "mbox hbox emph operatorname": r"\text", "geq geqslant": r"\ge ", "leq leqslant": r"\le ",
    "neq": r"\ne ", "gt": ">", "lt": "<", "varnothing O": r"\emptyset ", "lbrace": r"\{",
    "rbrace": r"\}", "colon": ":", "lvert rvert vert mid": "|", "circ degree": "°", "prime": "'",
    "backslash smallsetminus": r"\setminus ", "times cdot ast star": "*", "div": "/",
    "dots cdots": r"\ldots ", "varepsilon": r"\epsilon ", "varphi": r"\phi ",
    "vartheta": r"\theta ", "varrho": r"\rho ", "therefore": "", "Bbb": r"\mathbb",
    "mod": r"\bmod ",
}  # fmt: skip
_COMMANDS = {name: plain for names, plain in _SYNONYMS.items() for name in names.split()}

_IN_ROMAN = r"\\text\s?\{[^{}]*\}"

# Each is tried in order; none can take more than linear time on a line of bounded length.
_CLEANING: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Dollars around parts of an answer: $f(x)=0$ and $f(x)=x$, but not $5 and $6.
        (r"(?<!\\)\$(?=\S)([^$]*[^\s\\$])\$(?![0-9])", r"\1"),
        (f"[{_RAISED}]+", lambda match: f"^{{{match[0].translate(_LEVEL)}}}"),
        (f"[{_LOWERED}]+", lambda match: f"_{{{match[0].translate(_LEVEL)}}}"),
        ("[¼-¾⅐-⅞]", lambda match: fraction(match[0])),
        (r"\\(?:left|right)\s?\.(?![0-9])", ""),
        (r"\\tag\s?\{[^{}]*\}", ""),
        (r"\{\s?\\rm(?![a-zA-Z])([^{}]*)\}", r"\\text{\1}"),
        (r"\\mathit\s?\{([^{}]*)\}", r"\1"),
        (r"(?<!\\)\\([a-zA-Z]+)", lambda match: _COMMANDS.get(match[1], match[0])),
        (r"\\\\\s?\[[0-9.]*[a-z]+\]", r"\\\\"),
        (r"(?<!\\)\\!\s?", ""),
        (r"\{\s?([,.])\s?\}", r"\1"),
        (r"(?<!\\)\\[,;:> ]|~|\\h?phantom\s?\{[^{}]*\}|\\hspace\s?\{[^{}]*\}", " "),
        (r"\\(?:text)?color\s?\{[a-zA-Z]*\}", ""),
        (r"(?:^|\{)([^{}]*)\\over(?![a-zA-Z])([^{}]*)(?:\}|$)", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\text\s?\{\s?(\\?[$%€£])\s?\}", r"\1"),
        (r"\^\s?(?:\{\s?(°|'+)\s?\}|(°|'))", r"\1\2"),
        (r"\^\s?(?:\{\s?\\text\s?\{o\}\s?\}|o(?![a-zA-Z]))", "°"),
        (r"\\not\s?=|!=", r"\\ne "),
        (r">=", r"\\ge "),
        (r"<=", r"\\le "),
        (r"\\\{\s?\\\}", r"\\emptyset "),
        (r"\.\.\.+", r"\\ldots "),
        (r"\\text\s?\{\s?(\(mod [0-9a-zA-Z]+\))\s?\}", r"\1"),
        (
            r"\\pmod\s?([0-9a-zA-Z]+)"
            r"|\(\s?(?:\\b?mod|mod|\\text\s?\{\s?mod\s?\})\s?([0-9a-zA-Z]+)\s?\)",
            r"\\pmod{\1\2}",
        ),
        (r"\bper cent\b", "percent"),
        (r"^(?i:\\text\s?\{\s?(?:negative|minus)\s?\}\s?|(?:negative|minus)\s)(?=[0-9.$\\])", "-"),
        (r"(?<=[0-9])\s?(?:\\text\s?\{\s?squared\s?\}|squared)$", "^{2}"),
        (r"(?<=[0-9])\s?(?:\\text\s?\{\s?cubed\s?\}|cubed)$", "^{3}"),
        (r"(?<=[0-9])\s?(?:\\text\s?\{\s?o'clock\s?\}|o'clock)", ":00"),
        (r"^\\?\$\s?([0-9][0-9,.]*)\s?(\\text\s?\{)?\s?per\b", r"\1 \2dollars per"),
        (r"\bdegrees? (C|F)(?:elsius|ahrenheit)?\b", r"°\1"),
        (r"[\\,;]+$", ""),
        (r"(?<![a-zA-Z])oo(?![a-zA-Z])", r"\\infty "),
        (r"(?<=[)\]])\s?U\s?(?=[(\[])", r"\\cup "),
        (r"\\mathbb\s?\{?R\}?\s?[_^]\s?\{?(?:\+|>\s?0)\}?", r"(0,\\infty)"),
        (r"(?<=[0-9])\s?(?:\\text\s?\{\s?to\s?\}|\bto\b)\s?(?=[0-9])", ":"),
        (r"^(?:USD|US\s?\\?\$)\s?(?=[0-9.])", "$"),
        (r"\\dot\s?\{?([0-9])\}?([0-9]*)\\dot\s?\{?([0-9])\}?", r"\\overline{\1\2\3}"),
        (r"\\(?:overline|dot)\s?(?:\{\s?([0-9]+)\s?\}|([0-9]))", r"\\overline{\1\2}"),
        (r"(\\text\s?\{[^{}]*\^)\{(-?[0-9])\}", r"\1\2 "),
        (rf"\\frac\s?\{{\s?({_IN_ROMAN})\s?\}}\s?\{{\s?({_IN_ROMAN})\s?\}}", r"\1/\2"),
        (r"\\frac\s?([0-9a-zA-Z])\s?([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s?([0-9a-zA-Z])\s?(?=\{)", r"\\frac{\1}"),
        (r"(\\frac\s?\{[^{}]*\})\s?([0-9a-zA-Z])", r"\1{\2}"),
        (r"(?<=[0-9])\s?x\s?(?=10\s?\^)", "*"),
        (r"(?<=[0-9])\s?(?:\\text\s?\{\s?out of\s?\}|\bout of\b)\s?(?=[0-9])", "/"),
        (r"([0-9]+)°\s?([0-9]{1,2})'(?!')", r"(\1+\2/60)°"),
        (r"\\\{\s?(?=\\begin\s?\{(?:array|aligned|cases)\})", ""),
        (r"^\[([^\[\]()]*,[^\[\]()]*)\[$", r"[\1)"),  # [1, 2[ is the half-open interval [1, 2)
        (r"^\]([^\[\]()]*,[^\[\]()]*)\[$", r"(\1)"),
        (r"^\]([^\[\]()]*,[^\[\]()]*)\]$", r"(\1]"),
    )
]
_UNBRACED = re.compile(r"([_^])([0-9a-zA-Z])(?![0-9])")
_SPACES = re.compile(r"(?<![0-9A-Za-z,]) | (?![0-9A-Za-z])")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z' .,()-]*")
_PROSE = re.compile(  # prose, unlike a product of symbols such as GMmr
    r"\b(?:(?=[a-zA-Z]{4})[A-Z]?[a-z]+|[A-Z]{4,}|(?i:yes|no|odd|all|any|men|dog|cat|red|sun))\b"
)
_ARTICLES = frozenset({"the", "a", "an"})


@functools.lru_cache(maxsize=4096)  # a group of completions shares its answer
def clean(text: str) -> str:
    r"""One line of plain LaTeX without delimiters, spacing and synonyms.

    >>> clean(r" $\left(1{,}000\,\right)$. "), clean("x²≤½"), clean(r"\dfrac12")
    ('(1,000 )', 'x^{2}\\le \\frac{1}{2}', '\\frac{1}{2}')
    """
    text = _stripped(" ".join(text.translate(_TRANSLATE).split()))
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    text = _stripped(" ".join(text.split()))
    while text[:1] == "{" and text[-1:] == "}" and is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    whole = ROMAN.fullmatch(text)
    return clean(whole[1]) if whole else text


def unwrapped(text: str) -> str:
    r"""A cleaned text without ``\text{…}`` around its words.

    >>> unwrapped(r"5\text{ cm}")
    '5 cm'
    """
    return " ".join(ROMAN.sub(r"\1", text).split()) if "\\text" in text else text


def key(text: str) -> str:
    """A cleaned text without the spaces that mean nothing: equal keys are equal answers.

    >>> key("x + 1") == key("x+1"), key("1, 234") == key("1,234"), key("1 2") == key("12")
    (True, False, False)
    """
    return _SPACES.sub("", _UNBRACED.sub(r"\1{\2}", unwrapped(text)))


def words(text: str) -> str | None:
    r"""A cleaned text that is words and no mathematics, folded for comparison; else None.

    >>> words(r"\text{the } Cat"), words("x"), words("2x"), words("ab")
    ('cat', None, None, None)
    """
    bare = unwrapped(text)
    if not _WORDS.fullmatch(bare) or not set(_PROSE.findall(bare)) - FUNCTIONS:
        return None
    return " ".join(w for w in re.findall("[a-z]+", bare.casefold()) if w not in _ARTICLES)


def is_balanced(text: str) -> bool:
    r"""Whether every brace of LaTeX is closed.

    >>> is_balanced(r"\frac{1}{2}"), is_balanced(r"\frac{1}{"), is_balanced(r"\{1")
    (True, False, True)
    """
    depth = 0
    for character in re.sub(r"\\.", "", text):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _stripped(text: str) -> str:
    """Without the delimiters around it and the stop after it."""
    for _ in _DELIMITERS:
        if text.endswith(".") and not text.endswith(_ABBREVIATED):
            text = text[:-1].rstrip()
        for start, end in _DELIMITERS:
            inner = text[len(start) : len(text) - len(end)].strip()
            alone = start not in inner.replace("\\$", "")
            if text.startswith(start) and text.endswith(end) and inner and alone:
                text = inner
    return text


def fraction(sign: str) -> str:
    r"""A character that is a fraction, in LaTeX.

    >>> fraction("¾")
    '\\frac{3}{4}'
    """
    above, _, below = unicodedata.normalize("NFKC", sign).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}"
