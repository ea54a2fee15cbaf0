"""Users' values: short texts for messages and tables, and checks of what users give."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from inspect import Parameter
from itertools import chain
from math import inf
from numbers import Real
from operator import index
from os import PathLike
from pathlib import Path
from reprlib import Repr
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

MOST = 80
"""Characters of a value that are shown."""
MOST_TEXT = 400
"""Characters of another library's message that are shown."""

_DIGITS = 10**MOST
_SEVERAL = (Sequence, Iterable, tuple)
_WORDS: Mapping[Any, str] = {
    **dict.fromkeys((None, type(None)), "None"),
    Callable: "a function",
    Path: "PathLike",
    int: "whole numbers",
    float: "numbers",
}


class _Short(Repr):
    """A repr with a few elements of a large container, which never builds the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxdict = 4
        self.maxlist = self.maxtuple = self.maxset = 16
        self.maxstring = self.maxother = self.maxlong = MOST

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if -_DIGITS < x < _DIGITS else f"an integer of {x.bit_length()} bits"

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= MOST else f"{x[: MOST // 2]!r}… ({len(x)} characters)"


def quoted(value: object, *, plain: bool = False) -> str:
    """Return a value of any size as text for a message, shortened if it is long; ``plain``, without quotation marks.

    >>> quoted("2F0"), quoted("2F0", plain=True)
    ("'2F0'", '2F0')
    >>> quoted("F" * 1000)
    "'FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF'… (1000 characters)"
    """
    if plain and isinstance(value, str) and len(value) <= MOST and value.isprintable():
        return value
    return shortened(_Short().repr(value))


def counted(count: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "layer"), counted(2, "microbatch")
    ('1 layer', '2 microbatches')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Return a message in one line, shortened if it is long.

    >>> shortened("invalid literal: 'aaaaaaaaaaaaaaaa'", most=22)
    "invalid literal: 'aaaa… (35 characters)"
    """
    short = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return " ".join(short.splitlines())


def some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def checked(call: C) -> C:
    """Let a function, or a class when it is made, refuse arguments that its signature does not allow, in one line.

    Annotated truth values, words, classes, mappings, functions and lists are checked, and names. Numbers are left to
    the function, which knows their range, and so is what else an annotation may say.

    >>> @checked
    ... def run(program: str, *, overlap: int = 3, verify: bool = True): ...
    >>> run("1f1b", verify="no")
    Traceback (most recent call last):
    ValueError: verify='no'; allowed: True or False
    >>> run("1f1b", overlp=2)
    Traceback (most recent call last):
    TypeError: run has no overlp; allowed: program, overlap, verify; nearest: overlap
    >>> run("1f1b", 2)
    Traceback (most recent call last):
    TypeError: run(…, 2) without a name; allowed: overlap=, verify=
    """
    if isinstance(call, type):
        call.__init__ = checked(call.__init__)  # type: ignore[misc]
        return call
    where, every = call.__qualname__.removesuffix(".__init__"), inspect.signature(call).parameters
    allowed = [name for name in every if name not in ("self", "cls")]
    by_place = [name for name, one in every.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_name = [f"{name}=" for name, one in every.items() if one.kind is one.KEYWORD_ONLY]
    open_to = {one.kind for one in every.values()} & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}

    @functools.cache
    def kinds() -> dict[str, tuple[Any, ...]]:  # not before a call: an annotation may name what stands below
        found = {name: _kinds_of(one.annotation, inspect.unwrap(call).__globals__) for name, one in every.items()}
        return {name: kinds for name, kinds in found.items() if kinds}

    @functools.wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in allowed and Parameter.VAR_KEYWORD not in open_to:
                nearest = "".join(f"; nearest: {found}" for found in get_close_matches(name, allowed, 1))
                raise TypeError(f"{where} has no {name}; allowed: {', '.join(allowed)}{nearest}")
        if len(args) > len(by_place) and by_name and Parameter.VAR_POSITIONAL not in open_to:
            raise TypeError(f"{where}(…, {quoted(args[len(by_place)])}) without a name; allowed: {', '.join(by_name)}")
        known = kinds()
        for name, value in chain(zip(by_place, args, strict=False), kwargs.items()):
            if name in known:
                check_kind(name, value, *known[name])
        return call(*args, **kwargs)

    return checking  # type: ignore[return-value]


def _kinds_of(annotation: Any, scope: dict[str, Any]) -> tuple[Any, ...]:
    """Return the kinds of values that an annotation allows; none if a function can say more of them.

    It can of numbers, of one thing or several, and of what cannot be told here.
    """
    try:
        hint = eval(annotation, scope) if isinstance(annotation, str) else annotation
    except NameError:  # it is imported for type checkers alone
        return ()
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    several = [get_origin(kind) in _SEVERAL for kind in kinds if kind is not type(None)]
    left = {int, float}.intersection(kinds) or (any(several) and not all(several))
    return kinds if all(map(_is_told, kinds)) and not left else ()


def _is_told(kind: Any) -> bool:
    of, inner = get_origin(kind) or kind, get_args(kind)
    if of in _SEVERAL:
        return all(kind is ... or _is_told(kind) for kind in inner) and (of is not tuple or inner[1:] == (...,))
    protocol = getattr(of, "_is_protocol", False) and not getattr(of, "_is_runtime_protocol", False)
    return of is Literal or (isinstance(of, type) and of not in (Any, Parameter.empty, UnionType) and not protocol)


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Raise ``ValueError`` for a value that is not a whole number (a bool counts as none), or is less than ``least``.

    >>> check_size("ranks", 2.5)
    Traceback (most recent call last):
    ValueError: ranks=2.5; allowed: a whole number, 1 or more
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:  # of a tensor, too, that has fractions or several numbers
        number = None
    if number is None:
        raise ValueError(f"{name}={quoted(value)}; allowed: a whole number, {least} or more")
    if number < least:
        raise ValueError(f"{name}={quoted(value, plain=True)}; allowed: {least} or more")


def check_number(name: str, value: object, least: float = 0.0, *, above: bool = False) -> None:
    """Raise ``ValueError`` for what is no finite number (a bool is none), or less than ``least``; ``above`` it, more.

    >>> check_number("scaling", float("inf"), above=True)
    Traceback (most recent call last):
    ValueError: scaling=inf; allowed: a finite number, more than 0
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy, or a tensor
        value = value.item()
    real = isinstance(value, Real) and not isinstance(value, bool) and -inf < value < inf  # type: ignore[operator]
    if real and (value > least if above else value >= least):  # type: ignore[operator]
        return
    limit = "" if least == -inf else f", more than {least:g}" if above else f", {least:g} or more"
    raise ValueError(f"{name}={quoted(value, plain=real)}; allowed: a finite number{limit}")


def check_kind(name: str, value: object, *kinds: Any) -> None:
    """Raise ``ValueError`` for a value that is of none of these kinds: classes, words, lists; None allows None.

    >>> check_kind("costs", 3, str, None)
    Traceback (most recent call last):
    ValueError: costs=3; allowed: str or None
    >>> check_kind("experts_over", "ep", Sequence[Literal["ep", "cp"]])
    Traceback (most recent call last):
    ValueError: experts_over='ep'; allowed: a list of ep or cp
    """
    if not any(_allows(kind, value) for kind in kinds):
        raise ValueError(f"{name}={quoted(value)}; allowed: {_words_of(*kinds)}")


def _allows(kind: Any, value: object) -> bool:
    """Return whether a value is of an annotated kind."""
    if kind is None:
        return value is None
    of, inner = (kind, ()) if isinstance(kind, type) else (get_origin(kind) or kind, get_args(kind))
    if of is bool and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy
        value = value.item()
    if of is Literal:
        return any(isinstance(value, type(one)) and value == one for one in inner)
    if of in (int, float):
        return not isinstance(value, bool) and (isinstance(value, Real) if of is float else hasattr(value, "__index__"))
    if of is Path:
        return isinstance(value, PathLike)
    if of not in _SEVERAL:
        return isinstance(value, of)
    several = isinstance(value, tuple if of is tuple else Iterable) and not isinstance(value, str | bytes)
    each = value if isinstance(value, list | tuple | Set | Mapping) and inner else ()
    return several and all(_allows(inner[0], one) for one in each)


def _words_of(*kinds: Any) -> str:
    *words, last = chain.from_iterable(map(_words, kinds))
    return f"{', '.join(words)}{',' * (len(words) > 1)} or {last}" if words else last


def _words(kind: Any) -> list[str]:
    """Return the words for what a kind allows, for messages."""
    of, inner = get_origin(kind) or kind, get_args(kind)
    if of is Literal:
        return list(map(str, inner))
    if of in _SEVERAL:
        what = "a tuple" if of is tuple else "a list"
        return [f"{what} of {_words_of(inner[0])}" if inner else what]
    if of is bool:
        return ["True", "False"]
    name = _WORDS.get(of) or of.__name__
    return [f"torch.{name}" if name in ("device", "dtype") else name]


def check_each(name: str, values: Any, kind: type[T]) -> list[T]:
    """Return values as a list; raise ``ValueError`` if they are not several, or one of them is of another class.

    >>> check_each("observers", ["x"], dict)
    Traceback (most recent call last):
    ValueError: observers[0]='x'; allowed: dict
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={quoted(values)}; allowed: a list of {kind.__name__}")
    several = list(values)
    for number, value in enumerate(several):
        check_kind(f"{name}[{number}]", value, kind)
    return several
