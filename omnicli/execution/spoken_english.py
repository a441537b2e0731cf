"""English numbers, dates, times, money, units, codes and abbreviations, as they are said.

A list of patterns, each with a function that says what it matched; the order matters, and the
last ones leave no digit behind. Patterns have bounded repeats only: any text takes linear time.
"""

import re
from collections.abc import Callable, Iterator

from num2words import num2words

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MAX_INTEGER_DIGITS = 6  # of a number without separators that is said as one
MAX_GROUPED = 15  # digits of one with separators
_YEARS = range(1100, 2100)

Say = Callable[[re.Match[str]], str]


def speak_signs(text: str) -> str:
    """An English sentence with its numbers, signs and abbreviations in words."""
    for pattern, say in _RULES:
        text = pattern.sub(say, text)
    return text


def digit_groups(digits: str) -> Iterator[str]:
    """A long number in groups of three or four, none of one digit alone but the only one."""
    size = 4 if len(digits) % 4 == 0 else 3
    at = 0
    while len(digits) - at > size + 1:
        yield digits[at : at + size]
        at += size
    yield digits[at:]


# -- numbers


def _words(number: int) -> str:
    return str(num2words(number)).replace(",", "").replace("-", " ")


def _ordinal(number: int) -> str:
    return str(num2words(number, to="ordinal")).replace(",", "").replace("-", " ")


def _year(number: int) -> str:
    return str(num2words(number, to="year")).replace("-", " ")


def _spelled(digits: str) -> str:
    """One by one, with a pause between groups."""
    return ", ".join(" ".join(DIGITS[int(d)] for d in group) for group in digit_groups(digits))


def _integer(digits: str) -> str:
    leading_zero = len(digits) > 1 and digits[0] == "0"
    if leading_zero or len(digits) > MAX_INTEGER_DIGITS:
        return _spelled(digits)
    return _words(int(digits))


def _number(text: str) -> str:
    """1,234.50 and the like; a sign before it is said."""
    sign, text = ("minus ", text[1:]) if text[:1] in ("-", "−") else ("", text)
    whole, _, decimals = text.partition(".")
    grouped = whole.replace(",", "")
    short = grouped != whole and len(grouped) <= MAX_GROUPED
    said = _words(int(grouped)) if short else _integer(grouped)
    return sign + said + (f" point {_one_by_one(decimals)}" if decimals else "")


def _one_by_one(digits: str) -> str:
    return " ".join(DIGITS[int(d)] for d in digits)


def _plain(match: re.Match[str]) -> str:
    """A number that is nothing else; four digits in the range of years are read as a year."""
    text = match.group()
    if len(text) == 4 and text.isdecimal() and int(text) in _YEARS and int(text) % 1000:
        return _year(int(text))
    return _number(text)


def _version(match: re.Match[str]) -> str:
    return " point ".join(_integer(part) for part in match.group().split("."))


def _range(match: re.Match[str]) -> str:
    return f"{match[1]} to {match[2]}"


def _fraction(match: re.Match[str]) -> str:
    whole, above, below = match[1], int(match[2]), int(match[3])
    names = {2: "half", 4: "quarter"}
    if not 1 <= above < below <= 10:  # 24/7, 50/50
        return match.group().replace("/", " ").replace("⁄", " ")
    part = names.get(below, _ordinal(below))
    many = part if above == 1 else "halves" if below == 2 else f"{part}s"
    return f"{whole} and {_words(above)} {many}" if whole else f"{_words(above)} {many}"


_GLYPHS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅛": (1, 8), "⅜": (3, 8),
    "⅝": (5, 8), "⅞": (7, 8), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6),
}  # fmt: skip


def _glyph(match: re.Match[str]) -> str:
    above, below = _GLYPHS[match[1]]
    return f" {above}/{below}"


def _decade(match: re.Match[str]) -> str:
    said = _year(int(match[1])) if match[1] else _words(int(match[2]))
    return f"{said[:-1]}ies" if said.endswith("y") else f"{said}s"


# -- dates and times


def _date(year: str, month: str, day: str) -> str | None:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return None
    return f"{MONTHS[int(month) - 1]} {_ordinal(int(day))}, {_full_year(year)}"


def _full_year(year: str) -> str:
    number = int(year)
    if len(year) == 2:
        number += 2000 if number < 70 else 1900
    return _year(number) if number else "zero"


def _iso_date(match: re.Match[str]) -> str:
    return _date(match[1], match[2], match[3]) or match.group().replace("-", " ")


def _slashed_date(match: re.Match[str]) -> str:
    """Month first, as American voices have it, unless that cannot be."""
    first, second, year = match[1], match[3], match[4]
    if match[2] == "." or int(first) > 12:
        first, second = second, first
    return _date(year, first, second) or match.group().replace(match[2], " ")


def _month_day(match: re.Match[str]) -> str:
    year = f", {_full_year(match[3])}" if match[3] else ""
    return f"{match[1]} {_ordinal(int(match[2]))}{year}"


def _day_month(match: re.Match[str]) -> str:
    year = f" {_full_year(match[4])}" if match[4] else ""
    return f"{match[1] or 'the '}{_ordinal(int(match[2]))} of {match[3]}{year}"


def _time(match: re.Match[str]) -> str:
    hour, minute, second = int(match[1]), int(match[2]), match[3]
    if minute:
        said = f"{_words(hour)} {'oh ' if minute < 10 else ''}{_words(minute)}"
    elif match[4]:
        said = _words(hour)
    else:
        said = f"{_words(hour)} o'clock" if 0 < hour <= 12 else f"{_words(hour)} hundred"
    seconds = f" and {_count(str(int(second)), 'second')}" if second and int(second) else ""
    half = f" {match[4][0].lower()} m" if match[4] else ""
    return said + seconds + half


def _hour(match: re.Match[str]) -> str:
    return f"{_words(int(match[1]))} {match[2].lower()} m"


def _count(number: str, one: str, many: str = "") -> str:
    return f"{_number(number)} {one if number == '1' else many or one + 's'}"


# -- phone numbers and codes


def _phone(match: re.Match[str]) -> str:
    plus = "plus " if match.group().startswith("+") else ""
    groups = re.findall(r"\d+", match.group())
    return plus + ", ".join(_spelled(group) for group in groups)


def _is_phone(match: re.Match[str]) -> str:
    """Spaces alone make a phone number only of what looks like one: 0…, or … 555 1234."""
    text = match.group()
    signs = text.startswith(("+", "(", "0")) or "-" in text or "." in text
    likely = signs or re.search(r"\d{3} \d{4}$", text)
    return _phone(match) if likely and sum(map(str.isdecimal, text)) >= 7 else text


def _code(match: re.Match[str]) -> str:
    """Letters and digits one by one, in groups of four: IBANs, licence plates, hashes."""
    signs = [c for c in match.group() if c.isalnum()]
    said = [DIGITS[int(c)] if c.isdecimal() else c.upper() for c in signs]
    return ", ".join(" ".join(said[i : i + 4]) for i in range(0, len(said), 4))


def _mixed(match: re.Match[str]) -> str:
    """A word with digits in it: short or with one seam it is said in parts, else it is a code."""
    word = match.group()
    parts = re.findall(r"[^\W\d_]+|\d+", word)
    return " ".join(parts) if len(parts) <= 2 or len(word) < 5 else _code(match)


# -- money, per cent, units

_MONEY = {
    "$": ("dollar", "dollars", "cent"),
    "€": ("euro", "euros", "cent"),
    "£": ("pound", "pounds", "penny"),
    "¥": ("yen", "yen", ""),
    "₹": ("rupee", "rupees", "paisa"),
    "USD": ("dollar", "dollars", "cent"),
    "EUR": ("euro", "euros", "cent"),
    "GBP": ("pound", "pounds", "penny"),
}
_SMALL = {"cent": "cents", "penny": "pence", "paisa": "paise"}
_SCALES = {
    "k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion",
    "thousand": "thousand", "million": "million", "billion": "billion", "trillion": "trillion",
}  # fmt: skip


def _money_before(match: re.Match[str]) -> str:
    sign = "minus " if match[1] else ""
    return sign + _money(match[3], match[4], match[2])


def _money_after(match: re.Match[str]) -> str:
    return _money(match[1], match[2], match[3])


def _money(number: str, scale: str | None, currency: str) -> str:
    one, many, small = _MONEY[currency]
    if scale:
        return f"{_number(number)} {_SCALES[scale.lower()]} {many}"
    whole, _, rest = number.partition(".")
    said = f"{_number(whole)} {one if whole == '1' else many}"
    if len(rest) == 2 and int(rest) and small:
        pieces = f"{_words(int(rest))} {small if int(rest) == 1 else _SMALL[small]}"
        return pieces if whole == "0" else f"{said} and {pieces}"
    return said if not rest.strip("0") else f"{_number(number)} {many}"


_UNITS = {
    "km/h": "kilometer per hour", "kph": "kilometer per hour", "mph": "mile per hour",
    "m/s": "meter per second", "km": "kilometer", "cm": "centimeter", "mm": "millimeter",
    "m": "meter", "mi": "mile", "ft": "foot", "yd": "yard", "kg": "kilogram", "mg": "milligram",
    "g": "gram", "lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter", "L": "liter",
    "ml": "milliliter", "mL": "milliliter", "s": "second", "sec": "second", "ms": "millisecond",
    "min": "minute", "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour",
    "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "Hz": "hertz", "dB": "decibel",
    "kB": "kilobyte", "KB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte",
    "kW": "kilowatt", "kWh": "kilowatt hour", "W": "watt", "V": "volt", "mA": "milliampere",
    "°C": "degree Celsius", "°F": "degree Fahrenheit", "°": "degree", "ha": "hectare",
    "km²": "square kilometer", "m²": "square meter", "m³": "cubic meter",
}  # fmt: skip


def _unit(match: re.Match[str]) -> str:
    number, unit = match[1], _UNITS[match[2]]
    first, _, rest = unit.partition(" ")
    if first in ("square", "cubic", "kilowatt") and rest:
        first, rest = unit, ""
    many = {"foot": "feet", "hertz": "hertz", "kilohertz": "kilohertz"}
    plural = many.get(first, first if first.endswith("hertz") else f"{first}s")
    said = f"{_number(number)} {first if number == '1' else plural}"
    return f"{said} {rest}" if rest else said


def _percent(match: re.Match[str]) -> str:
    return f"{_number(match[1])} percent"


# -- abbreviations

_BEFORE_NAME = {
    "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Dr": "Doctor", "Prof": "Professor",
    "St": "Saint", "Mt": "Mount", "Ft": "Fort", "Rev": "Reverend", "Gen": "General",
    "Col": "Colonel", "Capt": "Captain", "Lt": "Lieutenant", "Sgt": "Sergeant",
    "Gov": "Governor", "Sen": "Senator", "Rep": "Representative", "Hon": "Honorable",
}  # fmt: skip
_AFTER_NAME = {
    "St": "Street", "Dr": "Drive", "Ave": "Avenue", "Rd": "Road", "Blvd": "Boulevard",
    "Jr": "Junior", "Sr": "Senior", "Inc": "Incorporated", "Ltd": "Limited",
    "Corp": "Corporation", "Co": "Company", "Bros": "Brothers", "Dept": "Department",
}  # fmt: skip
_ANYWHERE = {
    "e.g": "for example", "i.e": "that is", "etc": "et cetera", "vs": "versus",
    "approx": "approximately", "a.m": "a m", "p.m": "p m", "cf": "compare", "esp": "especially",
    "incl": "including", "dept": "department", "al": "al",
}  # fmt: skip
_BEFORE_NUMBER = {
    "no": "number", "nos": "numbers", "p": "page", "pp": "pages", "fig": "figure",
    "vol": "volume", "ch": "chapter", "sec": "section", "art": "article", "ext": "extension",
}  # fmt: skip
_MONTH_NAMES = {month[:3]: month for month in MONTHS} | {"Sept": "September"}


def _alternatives(names: object) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))  # type: ignore[call-overload]


def _lookup(table: dict[str, str], after: str = "") -> Say:
    return lambda match: table[match[1]] + after


def _lookup_lower(table: dict[str, str], after: str = "") -> Say:
    return lambda match: table[match[1].lower()] + after


_DECIMALS = r"(?:\.\d{1,20})?"
_NUM = (
    rf"(?<![\w.,])-?\d{{1,3}}(?:,\d{{3}}){{1,5}}{_DECIMALS}(?![\d,]*\d)"
    rf"|(?<![\w.])-?\d{{1,20}}{_DECIMALS}"
)
_AMOUNT = r"\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,4})?|\d{1,15}(?:\.\d{1,4})?"
_SCALE = rf"(?:\s?({_alternatives(_SCALES)})\b)?"
_MONTH = rf"({'|'.join(MONTHS)})"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_LONG_YEAR = r"(\d{4})(?!\d)"

_RULES: tuple[tuple[re.Pattern[str], Say], ...] = (
    # Abbreviations first: they decide what a number after them is.
    (re.compile(rf"\b({_alternatives(_MONTH_NAMES)})\.(?=\s?\d)"), _lookup(_MONTH_NAMES)),
    (re.compile(rf"\b({_alternatives(_MONTH_NAMES)})(?=\s\d{{1,2}}\b)"), _lookup(_MONTH_NAMES)),
    (
        re.compile(rf"(?<=[a-z]\s)({_alternatives(_AFTER_NAME)})\.(?=\s+[a-z]|\s*[,;]|\s*$)"),
        _lookup(_AFTER_NAME),
    ),
    (re.compile(rf"\b({_alternatives(_BEFORE_NAME)})\.(?=\s*[A-Z])"), _lookup(_BEFORE_NAME)),
    (
        re.compile(rf"\b({_alternatives(_BEFORE_NUMBER)})\.\s?(?=\d)", re.I),
        _lookup_lower(_BEFORE_NUMBER, " "),
    ),
    (
        re.compile(rf"(?<![\w.])({_alternatives(_ANYWHERE)})\.(?=\W|$)", re.I),
        _lookup_lower(_ANYWHERE),
    ),
    (re.compile(rf"([{''.join(_GLYPHS)}])"), _glyph),
    (re.compile(r"[#№]\s?(?=\d)"), lambda m: "number "),
    # Codes that look like numbers.
    (
        re.compile(r"\b[A-Z]{2}\d{2}(?:\s?[A-Z0-9]{4}){2,7}(?:\s?[A-Z0-9]{1,3})?\b"),
        _code,
    ),  # IBAN
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), _code),  # UUID
    # Dates and times.
    (
        re.compile(r"(?<![\w-])(\d{4})-(\d{2})-(\d{2})(?:T(?=\d{2}:\d{2})|(?![\w-]))"),
        lambda m: _iso_date(m) + (", " if m.group().endswith("T") else ""),
    ),
    (
        re.compile(r"(?<![\w/.])(\d{1,2})([/.])(\d{1,2})\2(\d{4}|\d{2})(?![\w/]|\.\d)"),
        _slashed_date,
    ),
    (re.compile(rf"\b{_MONTH}\s{_DAY}(?:,?\s{_LONG_YEAR})?(?![\d:])\b"), _month_day),
    (
        re.compile(rf"(?<![\d.,:])\b([Tt]he\s)?{_DAY}(?:\sof)?\s{_MONTH}(?:,?\s{_LONG_YEAR})?\b"),
        _day_month,
    ),
    (
        re.compile(
            r"(?<![\d:.])([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?:\.\d{1,6})?(?![\d:])"
            r"(?:\s?([AaPp])\.?[Mm]\b\.?|Z\b)?"
        ),
        _time,
    ),
    (re.compile(r"(?<![\d:.])(1[0-2]|0?[1-9])\s?([AaPp])\.?[Mm]\b\.?"), _hour),
    # Phone numbers: groups of digits with one sign between them, seven digits or more.
    (
        re.compile(
            r"(?<![\w.,])\+?(?:\(\d{1,5}\)|\d{1,5})"
            r"(?:[ .-]{1,2}(?:\(\d{1,5}\)|\d{2,5})){1,7}(?![\d,]|\.\d)"
        ),
        _is_phone,
    ),
    (re.compile(r"(?<!\w)\+\d{5,20}\b"), _phone),
    # Decades, money, per cent, units.
    (re.compile(r"(?<![\w.,])(\d{3}0)['’]?s\b|(?:(?<=the\s)|['’])([2-9]0)['’]?s\b"), _decade),
    (re.compile(rf"(-)?([$€£¥₹])\s?({_AMOUNT}){_SCALE}", re.I), _money_before),
    (re.compile(rf"(?<![\w.,])({_AMOUNT}){_SCALE}\s?([$€£¥₹]|USD\b|EUR\b|GBP\b)"), _money_after),
    (re.compile(rf"({_NUM})\s?%"), _percent),
    (re.compile(rf"({_NUM})\s?({_alternatives(_UNITS)})(?![\w/²³°])"), _unit),
    # Ordinals, fractions, ranges.
    (re.compile(r"(?<![\w.,])(\d{1,6})(?:st|nd|rd|th)\b", re.I), lambda m: _ordinal(int(m[1]))),
    (
        re.compile(r"(?<![\w/.,])(?:(\d{1,3})\s+)?(\d{1,2})\s?[/⁄]\s?(\d{1,2})(?![\w/]|\.\d)"),
        _fraction,
    ),
    (re.compile(r"(?<![\w.,-])(\d{1,6})\s?[-–]\s?(\d{1,6})(?![\w-]|[.,]\d)"), _range),
    # Whatever has digits still.
    (re.compile(r"(?<![\w.])\d{1,5}(?:\.\d{1,5}){2,7}(?![\w]|\.\d)"), _version),
    (
        re.compile(r"(?<!\w)(?=\d{0,64}[^\W\d_])(?=[^\W\d_]{0,64}\d)[^\W_]{2,80}(?!\w)"),
        _mixed,
    ),
    (re.compile(_NUM), _plain),
    (re.compile(r"\d+"), lambda m: f" {_spelled(m.group())} "),
    # Signs.
    (re.compile(r"\s*&\s*"), lambda m: " and "),
    (re.compile(r"\s*@\s*"), lambda m: " at "),
    (re.compile(r"\s*%"), lambda m: " percent"),
    (re.compile(r"\s*\+\s*"), lambda m: " plus "),
    (re.compile(r"\s*=\s*"), lambda m: " equals "),
    (re.compile(r"\s*×\s*"), lambda m: " times "),
    (re.compile(r"\s*÷\s*"), lambda m: " divided by "),
    (re.compile(r"\s*°"), lambda m: " degrees"),
    (re.compile(r"\b(and)/(or)\b", re.I), lambda m: f"{m[1]} {m[2]}"),
    (re.compile(r"\s*/\s*"), lambda m: " slash "),
    (re.compile(r"[$€£¥₹]"), lambda m: f" {_MONEY[m.group()][1]} "),
)
