r"""Mathematics as text, before any parser sees it: one plain LaTeX for the many ways to write it.

Everything here is linear in the length of the text, and computes with nothing.
"""

from __future__ import annotations

import re
import unicodedata

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "∕": "/", "⁄": "/", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "√": r"\surd ", "≈": r"\approx ", "′": "'",
    "’": "'", "‘": "'", "“": '"', "”": '"', "，": ",", "：": ":", "（": "(", "）": ")", "％": "%",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "…": r"\ldots ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "→": r"\to ", "∠": r"\angle ", "△": r"\triangle ", "ℏ": r"\hbar ",
    "µ": r"\mu ", "″": '"', **{chr(0xFEE0 + code): chr(code) for code in range(33, 127)}, "\ufeff": "", "\u200b": "", "\u2009": " ", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
_TRANSLATE = str.maketrans(_UNICODE)
_GREEK = {
    letter: f"\\{unicodedata.name(letter).rsplit(' ', 1)[1].lower().replace('lamda', 'lambda')} "
    for letter in "αβγδεζηθικλμνξπρστυφχψω"
} | {"Δ": r"\Delta ", "Ω": r"\Omega ", "Σ": r"\Sigma ", "Φ": r"\Phi ", "Γ": r"\Gamma ", "Θ": r"\Theta "}
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789+-")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"), ("``", "''"))

# Each is tried in order; none can take more than linear time on a line of bounded length.
_CLEANING = [
    (re.compile(f"[{_RAISED}]+"), lambda match: f"^{{{match[0].translate(_PLAIN)}}}"),
    (re.compile(f"[{_LOWERED}]+"), lambda match: f"_{{{match[0].translate(_PLAIN)}}}"),
    (re.compile(r"([0-9]?)([¼-¾⅐-⅞])"), lambda match: _vulgar(match[1], match[2])),
    (re.compile(r"\\(?:left|right)\s?\.(?![0-9])"), ""),
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|it|bf|tt)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:text)?color\s?\{[a-zA-Z]*\}"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"\.\.\.+|\\c?dots(?![a-zA-Z])"), r"\\ldots "),
    (re.compile(r"\\pmod\s?([0-9a-zA-Z]+)|\(\s?(?:\\(?:bmod|mod)|mod|\\text\s?\{\s?mod\s?\})\s?([0-9a-zA-Z]+)\s?\)"), r"\\pmod{\1\2}"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"(?<!\\)\\!\s?"), ""),
    (re.compile(r"\{\s?([,.])\s?\}"), r"\1"),
    (re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\(?:hspace|phantom|hphantom)\s?\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:textbf|textrm|textit|textsf|texttt|textnormal|mathrm|mathsf|mbox|emph|hbox|operatorname\*?)\s?(?=\{)"), r"\\text"),
    (re.compile(r"\\text\s?\{\s?(\\?[$%€£])\s?\}"), r"\1"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(r"(?<=[0-9])\s?(?:\\text\s?\{\s?to\s?\}|\bto\b)\s?(?=[0-9])"), ":"),
    (re.compile(r"^(?:USD|US\s?\\?\$)\s?(?=[0-9.])"), "$"),
    (re.compile(r"\^\s?(?:\{\s?\\text\s?\{o\}\s?\}|o(?![a-zA-Z]))"), "°"),
    (re.compile(r"\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree)(?![a-zA-Z]))|\\degree(?![a-zA-Z])"), "°"),
    (re.compile(r"\^\s?(?:\{\s?\\prime\s?\}|\\prime(?![a-zA-Z]))"), "'"),
    (re.compile(r"\\(?:geq(?:slant)?)(?![a-zA-Z])|(?<![<>=])>="), r"\\ge "),
    (re.compile(r"\\(?:leq(?:slant)?)(?![a-zA-Z])|(?<![<>=])<="), r"\\le "),
    (re.compile(r"\\(?:neq|not\s?=)(?![a-zA-Z])|!="), r"\\ne "),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\O(?![a-zA-Z])|\\\{\s?\\\}|\\text\s?\{\s?Ø\s?\}|Ø"), r"\\emptyset "),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![a-zA-Z])"), r"\\setminus "),
    (re.compile(r"\\(?:var)(epsilon|phi|theta|rho|sigma|pi|kappa)(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\(?:ast|star|times|cdot)(?![a-zA-Z])\s?"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])\s?"), "/"),
    (re.compile(r"\\(?:bar|overline)\s?\{?([0-9]+)\}?"), r"\\overline{\1}"),
    (re.compile(r"\\frac\s?([0-9a-zA-Z])\s?([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s?([0-9a-zA-Z])\s?(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s?\{[^{}]*\})\s?([0-9a-zA-Z])"), r"\1{\2}"),
    (re.compile(r"(?<=[0-9])\s?[x✕]\s?(?=10\s?\^)"), "*"),
    (re.compile(r"(?<=[0-9]),\s?\\!\s?(?=[0-9]{3})"), ","),
]  # fmt: skip
_SPACES = re.compile(r"(?<![0-9A-Za-z,]) | (?![0-9A-Za-z])")
_TEXT = re.compile(r"\\text\s?\{([^{}]*)\}")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z' .,()-]*")
_SHORT_WORDS = frozenset("yes no odd all any none men dog cat red day sun mon tue wed thu fri sat".split())
_ARTICLES = frozenset({"the", "a", "an"})


def _vulgar(digit: str, sign: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign).partition("⁄")
    return f"{digit}\\frac{{{above}}}{{{below}}}"


_TRANSLATE.update(str.maketrans(_GREEK))


def clean(text: str) -> str:
    r"""One line of plain LaTeX without delimiters, spacing and synonyms.

    >>> clean(r" $\left(1{,}000\,\right)$. "), clean("x²≤½"), clean(r"\dfrac12")
    ('(1,000 )', 'x^{2}\\le \\frac{1}{2}', '\\frac{1}{2}')
    """
    text = _stripped(" ".join(text.translate(_TRANSLATE).split()))
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    text = _stripped(" ".join(text.split()))
    whole = _TEXT.fullmatch(text)
    while whole and (inner := _stripped(whole[1].strip())):
        text = inner
        whole = _TEXT.fullmatch(text)
    return text


def _stripped(text: str) -> str:
    """Without the delimiters around it and the stop after it."""
    for _ in range(len(_DELIMITERS)):
        before = text
        if text.endswith(".") and not text.endswith(("...", "m.", "ft.", "in.")):
            text = text[:-1].rstrip()
        for start, end in _DELIMITERS:
            inner = text[len(start) : len(text) - len(end)]
            if text.startswith(start) and text.endswith(end) and inner.strip():
                text = inner.strip() if start not in inner else text
        if text == before:
            break
    return text


def key(text: str) -> str:
    """A cleaned text without the spaces that mean nothing: equal keys are equal answers.

    >>> key("x + 1") == key("x+1"), key("1, 234") == key("1,234"), key("1 2") == key("12")
    (True, False, False)
    """
    bare = _SPACES.sub("", " ".join(_TEXT.sub(r" \1 ", text).split()))
    return bare.casefold() if words(text) else bare


def words(text: str) -> str | None:
    r"""A cleaned text that is words and no mathematics, folded for comparison; else None.

    >>> words(r"\text{the } Cat"), words("x"), words("2x"), words("ab")
    ('cat', None, None, None)
    """
    bare = _TEXT.sub(r" \1 ", text) if "\\text" in text else text
    bare = " ".join(bare.split())
    if not _WORDS.fullmatch(bare):
        return None
    runs = re.findall("[a-zA-Z]+", bare.casefold())
    if not any(len(run) > 3 or run in _SHORT_WORDS for run in runs):
        return None
    return " ".join(run for run in runs if run not in _ARTICLES or len(runs) == 1)


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
